"""A crash at any file operation: work goes on, and nothing that was promised is lost.

The file operations of a training, a resume and outputs are recorded. Each
folder that a crash may leave after any of them is laid out, and work goes on there.
"""

import pytest

import train
import translate
from minitransformer.runs import checkpoint, run_directory
from minitransformer.runs.run_directory import RunDirectory
from support.crash_points import crashes, lay_out, recording, replay
from support.in_process import run_main
from support.models import CAT_LINES
from support.runs import assert_same_results, metrics
from support.scripts import SHORT, write_random_text

FLAGS = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 8 --d-ff 8 --num-heads 2 "
    "--vocab-size 60 --max-tokens 120 --warmup 10 --threads 1 --validate-every 2 "
    "--validate-bleu 0 --save-every 3 --log-every 1 --keep-last 2 --average 2 "
    "--steps 7"
).split()

HOW_MANY = [
    pytest.param(6, id="sample"),
    pytest.param(None, id="all", marks=pytest.mark.stress),
]


def run(main, *flags):
    """Call the main function of a script, which has to succeed."""
    code, *printed = run_main(main, *flags)
    assert code == 0, printed


def names(folder):
    """The names of everything in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# Training: config.json, vocabulary, encoded text, metrics, checkpoints, pruning


def parameters(path):
    return checkpoint.load(path).parameters.data.tobytes()


class Training:
    """A training to its end, what it promised meanwhile, and what it left."""

    def __init__(self, folder, monkeypatch):
        self.data = write_random_text(folder)
        root = folder / "recorded"
        root.mkdir()
        self.saved = {}  # by the name of a checkpoint, all versions of its parameters
        self.recorder = self.record(root, self.begin, monkeypatch)
        self.ended = RunDirectory(root / "runs" / "a")
        self.cached = names(root / "cache")

    def record(self, root, work, monkeypatch):
        """Record `work(root)`, and what it promised: which versions were saved."""
        save, write = checkpoint.save, run_directory.write_bytes

        def save_and_promise(path, at, replace):
            save(path, at, replace=replace)
            versions = self.saved.setdefault(path.name, [])
            version = at.parameters.data.tobytes()
            if version not in versions:
                versions.append(version)
            recorder.promise((path.name, versions.index(version)))

        def write_and_promise(path, data, replace):
            write(path, data, replace)
            if path.name == "config.json":
                recorder.promise(("config.json", 0))

        with monkeypatch.context() as patch, recording(root) as recorder:
            patch.setattr(run_directory, "save", save_and_promise)
            patch.setattr(run_directory, "write_bytes", write_and_promise)
            work(root)
        return recorder

    def begin(self, root):
        where = "--run", root / "runs" / "a", "--cache", root / "cache"
        run(train.main, *self.data, *FLAGS, *where)

    def resume(self, root):
        directory, cache = root / "runs" / "a", root / "cache"
        run(train.main, "--resume", directory, "--threads", 1, "--cache", cache)

    def check(self, root, promises):
        """See that all promises hold, and that the run goes on to the same end."""
        self.check_promises(root, promises)
        directory = RunDirectory(root / "runs" / "a")
        if "config.json" in dict(promises) or directory.config.exists():
            self.resume(root)
        else:
            self.begin(root)
        assert_same_results(directory.path, self.ended.path)
        assert names(directory.path) == names(self.ended.path)
        assert names(root / "cache") <= self.cached

    def check_promises(self, root, promises):
        """See that what was saved is there, and that all that is there is whole."""
        directory, promised = RunDirectory(root / "runs" / "a"), dict(promises)
        if promised:
            directory.read_config()
        found = {path.name: path for path in directory.checkpoints()}
        for name, path in found.items():
            assert parameters(path) == self.saved[name][-1]
        newest = max((x for x in promised if x.startswith("step-")), default="")
        if newest:
            assert max(found, default="") >= newest, f"{newest} is lost"
            step = int(newest.removeprefix("step-").removesuffix(".safetensors"))
            later = {"validation_loss", "ended"}  # after the checkpoint of a step
            lines = [
                record
                for record in metrics(self.ended.path)
                if record["step"] < step + (not later & record.keys())
            ]
            assert metrics(directory.path)[: len(lines)] == lines, "metrics are lost"
        for path in (directory.best, directory.averaged):
            if path.name in promised or path.exists():
                versions = self.saved[path.name][promised.get(path.name, 0) :]
                assert parameters(path) in versions


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Training(tmp_path_factory.mktemp("training"), monkeypatch)


@pytest.mark.parametrize("sample", HOW_MANY)
def test_a_training(training, tmp_path, sample):
    report = replay(training.recorder, tmp_path / "crash", training.check, sample)
    print(f"training: {report}")


@pytest.mark.parametrize("sample", HOW_MANY)
def test_a_resume(training, tmp_path, monkeypatch, sample):
    """It begins where a crash in the middle of a save left more metrics than that."""
    recorder, root = training.recorder, tmp_path / "recorded"
    before = [
        crash
        for crash in crashes(recorder.looks)
        if crash.how == "killed while writing"
        and sum("step-" in value[0] for value in promised(recorder, crash.done)) == 1
    ]
    middle = before[len(before) * 2 // 3]
    lay_out(middle.files, root)
    again = training.record(root, training.resume, monkeypatch)
    # What was best after the last checkpoint is found again later.
    kept = [x for x in promised(recorder, middle.done) if "best" not in x[0]]

    def check(folder, promises):
        training.check(folder, [*kept, *promises])

    report = replay(again, tmp_path / "crash", check, sample)
    print(f"resume: {report}")


def promised(recorder, done):
    return [value for when, value in recorder.promises if when <= done and value]


# What translate.py writes


@pytest.mark.parametrize("old", [b"old\n", None])
@pytest.mark.parametrize("sample", HOW_MANY)
def test_an_output(model_path, tmp_path, sample, old):
    root = tmp_path / "recorded"
    root.mkdir()
    if old is not None:
        (root / "out").write_bytes(old)
    (tmp_path / "en").write_text("".join(f"{line}\n" for line in CAT_LINES[:20]))
    flags = "--model", model_path, "--threads", 1, *SHORT, "--input", tmp_path / "en"

    def write(folder):
        run(translate.main, *flags, "--output", folder / "out")

    with recording(root) as recorder:
        write(root)
        recorder.promise("written")
    new = (root / "out").read_bytes()

    def check(folder, promises):
        path = folder / "out"
        found = path.read_bytes() if path.exists() else None
        assert found in ((new,) if promises else (old, new))
        write(folder)
        assert path.read_bytes() == new
        assert names(folder) == {"out"}

    print(f"output: {replay(recorder, tmp_path / 'crash', check, sample)}")


# The replay itself


def test_a_sync_that_is_missing_is_noticed(training, tmp_path):
    """Without its calls of fsync no promise is kept, so that the replay can be trusted.

    Before each promise a file is synced and then its folder; before a checkpoint to
    resume from, also the metrics; and at the beginning the folders above.
    """
    recorder, noticed, unnoticed = training.recorder, 0, []
    promises = [(done, value[0]) for done, value in recorder.promises if value]
    for done, name in promises:
        syncs = {}  # by file, the one that was synced last at the end
        for number, look in enumerate(recorder.looks[: done + 1]):
            if look.synced is not None:
                syncs[look.synced] = [*syncs.pop(look.synced, []), number]
        above, runs, *_, metrics_file, saved_file, folder = syncs.values()
        forgotten = [saved_file, folder[-1:]]
        if name == "config.json":
            forgotten += above, runs
        if name.startswith("step-"):
            forgotten.append(metrics_file)
        check = training.check_promises
        for numbers in [], *forgotten:
            try:
                replay(recorder, tmp_path / "crash", check, None, done, numbers)
            except AssertionError:
                if not numbers:
                    raise
                noticed += 1
            else:
                unnoticed += [(name, number) for number in numbers]
    print(f"calls of fsync whose lack was noticed: {noticed}")
    assert not unnoticed
