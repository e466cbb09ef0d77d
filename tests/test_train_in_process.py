"""train.py in this process: what flags ask for, what a run does, writes and says.

The runs are so small that each takes a tenth of a second or less.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import sentencepiece
from safetensors.numpy import load_file

import train
from minitransformer import load
from minitransformer.runs import checkpoint, run_directory, starting_point
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.text import pairs
from minitransformer.text.batches import BatchStream
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training import evaluation, lifecycle, optimizer, progress
from minitransformer.training.evaluation import TokenStatistics
from minitransformer.training.lifecycle import TrainingRun
from minitransformer.training.parallel import CpuModel
from minitransformer.translation.quality import TranslationQuality
from support.damage import rewrite_checkpoint
from support.in_process import run_main, run_translate
from support.runs import (
    assert_same_parameters,
    assert_same_results,
    metrics,
    steps,
    values,
)

# A model of two layers that updates in milliseconds, and a run of it.
SETTINGS = """{
    "encoder_layers": 1, "decoder_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2,
    "vocab_size": 12, "dropout": 0.2, "max_tokens": 40, "warmup": 3, "beam": 2,
    "max_len_a": 0.0, "max_len_b": 8, "validate_bleu": 0, "validate_every": 2,
    "save_every": 2, "log_every": 1, "average": 2, "average_by": "number"
}"""

# The validation and test text are nearly what the targets of the training text are.
TARGET = "ab c ba ab c"
VAL = [TARGET, "ab c ba ab", "c", TARGET, "ab ab"]
TEST = [TARGET, "ab c ba ba", TARGET]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of 24 pairs of training text, 5 of validation, 3 of test; a preset."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(5)
    for split, targets in (("train", [TARGET] * 24), ("val", VAL), ("test", TEST)):
        rows = rng.choice(["ab", "ba", "c"], (len(targets), 4))
        lengths = rng.integers(1, 5, len(targets))
        sources = [" ".join(row[:n]) for row, n in zip(rows, lengths, strict=True)]
        (folder / f"{split}.en").write_text("\n".join(sources) + "\n")
        (folder / f"{split}.de").write_text("\n".join(targets) + "\n")
    (folder / "short.json").write_text(SETTINGS)
    return folder


def begin(text, *flags):
    """Run train.py on the text; return its code, output and error."""
    new = "--data", text, "--source", "en", "--target", "de"
    new = *new, "--config", text / "short.json"
    always = "--cache", text / "cache", "--threads", 1
    return run_main(train.main, *(() if "--resume" in flags else new), *always, *flags)


@pytest.fixture
def start(text, place):
    """Run train.py on the text; return its output, or after a failure its error."""

    def start(*flags, code=0):
        found, out, error = begin(text, *flags)
        assert found == code, error
        assert bool(error) == (code in (1, 2))
        return error or out

    return start


@pytest.fixture
def each_gradient(monkeypatch):
    """Have `change(model, step)` called after the gradient of each update."""

    def each_gradient(change):
        real = CpuModel.forward_backward

        def forward_backward(self, batches, smoothing, key):
            loss = real(self, batches, smoothing, key)
            change(self, key[1])
            return loss

        monkeypatch.setattr(CpuModel, "forward_backward", forward_backward)

    return each_gradient


def logged(out, word):
    """The step of each line of a log about a step that has this word."""
    found = re.findall(rf"^step +(\d+)/.*  {word}", out, re.MULTILINE)
    return [*map(int, found)]


def state(run, step):
    return checkpoint.load(RunDirectory(Path(run)).checkpoint(step)).state


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("[!.]*")}


# A run from its first update to its last


@pytest.fixture(autouse=True, scope="module")
def machine():
    """No hint that another precision is faster, and no waiting for the disk."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        monkeypatch.setattr(lifecycle, "multiplies_bf16_fast", lambda: False)
        yield


# It validates after 5 and 7, and saves after 2, 4, 6 and 7.
WHOLE = "--steps 7 --validate-bleu 4 --validate-every 5".split()


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run of seven updates."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert begin(text, *WHOLE, "--run", run)[::2] == (0, "")
    return run


def test_a_run_reports_validates_and_saves_when_it_should(whole):
    out = (whole / "train.log").read_text()
    assert logged(out, "epoch") == [*values(whole, "loss")] == [1, 2, 3, 4, 5, 6, 7]
    validated = [*values(whole, "validation_loss")]
    assert logged(out, "validation") == validated == [5, 7]
    assert metrics(whole)[-1] == {"step": 7, "ended": "--steps 7"}
    assert steps(whole) == [2, 4, 6, 7]
    paths = {path.name: path for path in whole.glob("*.safetensors")}
    to_resume = {name for name, path in paths.items() if checkpoint.has_moments(path)}
    assert to_resume == {"step-00000006.safetensors", "step-00000007.safetensors"}
    names = {path.name for path in whole.glob("[!.]*") if path.name[:4] != "step"}
    results = {"best.safetensors", "averaged.safetensors", "tokenizer.model"}
    assert names == {"config.json", "metrics.jsonl", "train.log", *results}
    lines = out.splitlines()
    assert lines[:3] == [
        f"run         {whole}",
        "preset      short: 12 word pieces, 7 updates; --config names another",
        "device      cpu, 1 worker",
    ]
    words = [line.split()[0] for line in lines]
    assert words[3:7] == ["parameters", "text", "held", "update"]
    assert words[7:-4] == ["step"] * 9
    assert words[-4:] == ["averaged", "test", "done", "translate"]
    assert lines[-4] == "averaged    the last 2 checkpoints"
    assert re.fullmatch(rf"done        {whole}, \d+ s", lines[-2])


def test_a_faster_precision_is_hinted_at(start, monkeypatch):
    monkeypatch.setattr(lifecycle, "multiplies_bf16_fast", lambda: True)
    hint = "hint        --precision bf16 is faster on this processor"
    assert hint in start("--dry-run").splitlines()
    assert "hint" not in start("--dry-run", "--precision", "fp32")


def test_long_waits_are_said(text, place, monkeypatch):
    """Standard error is no terminal here: there is a line for each."""
    monkeypatch.setattr(pairs, "LARGE", 10)
    both = [f"{text}/{split}.en, {text}/{split}.de" for split in ("train", "val")]
    code, _, error = begin(text, "--dry-run", "--cache", "new")
    lines = error.splitlines()
    assert (code, lines[0]) == (0, f"learning 12 word pieces from {both[0]} ...")
    assert {f"encoding {files} ..." for files in both} < set(lines)


def test_the_last_line_is_a_command_that_translates(start, text):
    """It has a line of the test text, which lacks what looks like a flag."""
    out = start("--steps", 2, "--run", "a run")
    assert Path("a run", "train.log").read_text() == out
    *command, source = shlex.split(out.splitlines()[-1])
    assert command == ["translate", "python", "translate.py", "--model", "a run"]
    code, out, error = run_translate(*command[3:], source)
    assert (code, error, out.count("\n")) == (0, "", 1)
    assert source in (text / "test.en").read_text().splitlines()


def test_other_dropout_noise_of_a_resumed_run_is_announced(start):
    """Each worker draws its own: one more or less gives other parameters."""
    start("--steps", 4, "--run", "two", "--threads", 2)
    start("--steps", 2, "--run", "run", "--threads", 2)
    shutil.copytree("run", "same")
    told = "resumed     with workers: 1, not 2 as before (--threads): each draws its "
    assert told in start("--resume", "run", "--steps", 4)
    out = start("--resume", "same", "--steps", 4, "--threads", 2)
    assert "dropout noise" not in out
    assert_same_results("two", "same")
    with pytest.raises(AssertionError, match="mismatch"):
        assert_same_parameters("two", "run")


def test_a_resumed_run_may_keep_fewer_checkpoints_and_no_other_model(start, whole):
    shutil.copytree(whole, "run")
    error = start("--resume", "run", "--d-ff", 4, code=2)
    assert "--d-ff: cannot change in a resumed run" in error
    out = start("--resume", "run", "--keep-last", 1, "--average", 1)
    assert steps("run") == [7]
    assert logged(out, "epoch") == []
    assert "averaged    the last 1 checkpoint\n" in out


@pytest.mark.parametrize(("rate", "is_worse"), [(1e-3, False), (0.9, True)])
def test_the_model_that_a_run_begins_from_may_be_the_best(start, whole, rate, is_worse):
    fine = "--from", whole, "--learning-rate", rate, "--average-by", "validation"
    out = start(*fine, "--steps", 8, "--run", "tuned")
    losses = values("tuned", "validation_loss")
    assert list(losses) == [0, 2, 4, 6, 8]
    assert (min(losses, key=losses.get) == 0) == is_worse
    said = out.splitlines()[-1].startswith("worse       no update improved")
    assert said == is_worse

    # Its parameters, and so its loss, are those of that model.
    tuned = load_file(RunDirectory(Path("tuned")).preferred_checkpoint())
    first = load_file(whole / "averaged.safetensors")
    equal = [np.array_equal(tuned[x], first[x]) for x in first if "." in x]
    assert all(equal) == is_worse


def test_sides_that_are_exchanged_for_a_trained_model_are_named(start, whole):
    for source, target in (("en", "de"), ("de", "en")):
        sides = "--source", source, "--target", target
        out = start(*sides, "--dry-run", "--from", whole)
        said = re.findall("^exchanged .* are both sides exchanged", out, re.MULTILINE)
        assert len(said) == (source == "de")


def test_a_run_begins_from_another_and_is_resumed(start, whole):
    shutil.copytree(whole, "first")
    fine = ["--from", "first", "--seed", 3, "--dropout", 0.4, "--run"]
    out = start(*fine, "tuned", "--steps", 4)
    source = Path("first/averaged.safetensors").absolute()
    news = f"from        {source}, with the embeddings of 12 of 12 word pieces"
    assert news in out.splitlines()
    config = json.loads(Path("tuned/config.json").read_text())
    assert config["start"] == str(source)
    assert config["model"]["dropout"] == 0.4
    start(*fine, "part", "--steps", 2)
    out = start("--resume", "part", "--steps", 4)
    assert "from  " not in out.partition("resumed")[0]
    assert_same_results("tuned", "part")

    # One that was killed before its first save begins again, and from the same.
    for run in ("killed", "other"):
        Path(run).mkdir()
        shutil.copy("tuned/config.json", run)
    Path("killed/.unsaved").touch()
    assert news in start("--resume", "killed").splitlines()
    assert_same_results("tuned", "killed")
    source.unlink()
    assert f"{source}: expected a run" in start("--resume", "other", code=1)
    start("--resume", "tuned", "--steps", 5)  # which does not need it any more


def test_without_validation_text_nothing_is_validated(start, text):
    for side in ("en", "de"):
        shutil.copy(text / f"train.{side}", ".")
    out = start("--data", ".", "--steps", 4, "--run", "run")
    for word in ("validation", "best", "test"):
        assert word not in out.partition("\nupdate")[2]
    assert not Path("run", "best.safetensors").exists()
    assert steps("run") == [2, 4]


def translations(model, lines):
    """What translate.py makes of the lines with this model, beam and limits."""
    flags = ("--beam", 2, "--max-len-a", 0, "--max-len-b", 8, "--threads", 1)
    code, out, error = run_translate("--model", model, *flags, *lines)
    assert code == 0, error
    return out.splitlines()


def check_quantiles(model, sources, found):
    """A model knows those of the mean log-probabilities that --score gives."""
    Path("found").write_text("".join(f"{line}\n" for line in found))
    flags = "--score", "found", "--threads", 1
    code, out, error = run_translate("--model", model, *flags, *sources)
    assert code == 0, error
    scored = [map(float, line.split("\t")) for line in out.splitlines()]
    means = [log_prob / length for log_prob, length in scored]
    expected = np.percentile(means, range(0, 101, 5))
    known = checkpoint.recorded_state(Path(model)).log_prob_quantiles
    np.testing.assert_allclose(known, expected, rtol=1e-3)


def test_bleu_is_that_of_what_translate_prints(start, text):
    flags = "--learning-rate 0.03 --validate-bleu 4 --max-tokens 80".split()
    often = "--steps 30 --validate-every 30 --save-every 15 --run run".split()
    out = start(*flags, *often)
    last, mean = "run/step-00000030.safetensors", "run/averaged.safetensors"
    sources = (text / "val.en").read_text().splitlines()[:4]
    found = translations(last, sources)
    check_quantiles("run/best.safetensors", sources, found)
    bleu = sacrebleu.corpus_bleu(found, [VAL[:4]]).score
    assert 5 < bleu < 100
    assert values("run", "validation_bleu") == {30: pytest.approx(bleu)}
    assert f"  BLEU {bleu:.2f}  best\n" in out
    check_quantiles(mean, sources, translations(mean, sources))
    sources = (text / "test.en").read_text().splitlines()
    found = translations(mean, sources)
    bleu = sacrebleu.corpus_bleu(found, [TEST]).score
    exact = sum(a == b for a, b in zip(found, TEST, strict=True)) / 3
    assert (0 < exact < 1, 5 < bleu < 100) == (True, True)
    assert values("run", "test_bleu") == {30: pytest.approx(bleu)}
    assert values("run", "exact") == {30: exact}
    [line] = [x for x in out.splitlines() if x.startswith("test  ")]
    assert line.startswith(f"test        {exact:.1%} exact, BLEU {bleu:.2f} (nrefs:1|")
    assert line.endswith("), beam 2")


@pytest.mark.parametrize(
    ("target", "flags", "name"),
    [
        ("\u5b66\u6821 \u597d\u3002", [], "zh"),
        ("\u0e01\u0e02 \u0e01", ["--bleu-tokenizer", "13a"], "13a"),
        pytest.param("ab c ba .", [], "13a", marks=pytest.mark.slow),
    ],
)
def test_bleu_is_of_the_words_of_the_script_or_as_a_flag_says(
    start, target, flags, name
):
    for split, count in (("train", 24), ("val", 5), ("test", 3)):
        lines = f"{target}\n" * count
        Path(f"{split}.xx").write_text(lines, encoding="utf-8")
        Path(f"{split}.en").write_text("ab c\n" * count)
    here = "--data . --target xx --vocab-size 15 --validate-bleu 5 --run run".split()
    limits = "--steps", 60, "--validate-every", 60, "--save-every", 60
    out = start(*here, "--learning-rate", 0.03, *limits, *flags)
    assert f"|tok:{name}|" in out
    told = out.count("BLEU        references look tokenised, ")
    assert told == target.endswith(" .")
    assert values("run", "exact") == {60: 1}
    assert values("run", "test_bleu") == {60: pytest.approx(100)}


@pytest.mark.parametrize(
    ("flags", "best", "last", "costs"),
    [("--best-by bleu", [2, 4], 8, (4.0, 7.5)), ("", [2, 6], 10, (1.0, 7.5))],
)
def test_the_best_and_the_end_go_by_loss_or_bleu(
    start, monkeypatch, flags, best, last, costs
):
    """The third loss is the lowest and the second BLEU the highest of all."""

    def script(first=0):
        """Let the validations from here on find these numbers, in this order."""
        losses = iter((3.0, 4.0, 1.0, 1.0, 2.0)[first:])
        bleus = iter((0.0, 7.5, 7.5, 3.0, 0.0)[first:])

        def translated(run, model, pairs):
            assert len(pairs) in (4, 3)  # of validation text, and all test text
            bleu = next(bleus, 0.0) if len(pairs) == 4 else 0.0
            return TranslationQuality(bleu, "", 1.0, 0.0)

        def validate(*arguments):
            return TokenStatistics(next(losses), 0, 1)

        monkeypatch.setattr(train, "translate", translated)
        monkeypatch.setattr(evaluation, "validate", validate)

    flags = [*flags.split(), "--validate-bleu", 4, "--patience", 2, "--save-every", 4]
    script()
    out = start(*flags, "--steps", 50, "--run", "whole")
    assert logged(out, "best$") == best
    assert steps("whole")[-1] == last
    found = checkpoint.load(Path("whole", "best.safetensors")).state
    assert (found.step, found.validations_since_best) == (best[-1], 0)
    assert (found.best_loss, found.best_bleu) == costs
    script()
    start(*flags, "--steps", 4, "--run", "run")
    script(first=1)  # the checkpoint was saved before the validation
    start("--resume", "run", "--steps", 50)
    assert_same_results("whole", "run")


# The clock


@pytest.fixture
def clock(each_gradient, monkeypatch):
    """A clock by which the gradient of an update takes ten seconds, all else nothing.

    The clock of a computer may show any number at first.
    """
    now = [1000.0]

    def pass_time(model, step):
        now[0] += 10.00049

    each_gradient(pass_time)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in (progress, lifecycle):
        monkeypatch.setattr(module, "time", clock)
    return now


def test_minutes_end_a_run_and_count_those_before_it_was_resumed(start, clock):
    out = start("--minutes", 0.5, "--run", "run", "--steps", 99)
    assert logged(out, "epoch") == [1, 2, 3]
    assert logged(out, "validation") == [2, 3]
    assert steps("run") == [2, 3]
    clock[0] += 5000
    out = start("--resume", "run", "--minutes", 5 * 10.00049 / 60, "--log-every", 2)
    assert logged(out, "epoch") == [4]
    assert steps("run") == [2, 4, 5]
    assert out.splitlines()[-2] == "done        run, 50 s"
    assert [*values("run", "loss")] == [1, 2, 3, 4]
    assert [*values("run", "validation_loss")] == [2, 3, 4, 5]
    seconds = {1: 10.0, 2: 20.001, 3: 30.001, 4: 40.002, 5: 50.002}
    assert values("run", "seconds") == seconds
    for side in ("source", "target"):
        tokens = values("run", f"{side}_tokens")
        speeds = {step: round(count / 10.00049) for step, count in tokens.items()}
        assert values("run", f"{side}_tokens_per_second") == speeds


def test_checkpoints_are_saved_by_the_clock(start, clock):
    start("--checkpoint-minutes", 0.5, "--steps", 7, "--run", "run")
    assert steps("run") == [3, 6, 7]


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (("--learning-rate", 1e-30, "--patience", 2), ("--patience", 3)),
        (("--minutes", 0.5), ("--minutes", 0.7)),
    ],
)
def test_a_run_that_has_ended_is_not_trained_further(start, clock, flags, more):
    """However it ended and although the steps are more, unless a value is larger."""
    out = start(*flags, "--steps", 90, "--run", "run")
    step, recorded = steps("run")[-1], metrics("run")
    again = start("--resume", "run", "--steps", 91)
    ended = f"ended       after step {step}: {flags[-2]} {flags[-1]} used up"
    for said in (out, again):
        assert f"\n{ended}; --resume run with a larger value goes on\n" in said
    assert (steps("run")[-1], metrics("run")) == (step, recorded)
    start("--resume", "run", *more)
    assert steps("run")[-1] > step
    assert RunDirectory(Path("run")).read_config().training.steps == 91


def test_the_test_text_is_translated_by_the_mean(start, monkeypatch):
    used, real = [], train.translate

    def watched(run, model, pairs):
        used.append(model.parameters.data.copy())
        return real(run, model, pairs)

    monkeypatch.setattr(train, "translate", watched)
    start("--steps", 6, "--run", "run")
    mean, last = (
        checkpoint.load(Path("run", f"{name}.safetensors")).parameters.data
        for name in ("averaged", "step-00000006")
    )
    [found] = used
    np.testing.assert_array_equal(found, mean)
    assert abs(mean - last).max() > 1e-3


# What may go wrong


def test_a_gradient_that_is_not_finite_stops_a_run(start, each_gradient):
    name = "decoder.0.feed_forward.bias_1"

    def spoil(model, step):
        if step == 3:
            model.parameters.views(model.parameters.grad)[name][3] = np.nan

    each_gradient(spoil)
    error = start("--steps", 4, "--run", "run", code=1)
    assert re.search(r"step 3, epoch \d, batch \d: expected finite losses", error)
    assert error.count("\n") == 1
    assert f"got 1 not finite (the last: in {name});" in error
    assert steps("run") == [2]


def fail(monkeypatch, owner, name, call, error):
    """Let a function raise an error at its `call`-th call, counted from 1."""
    real, calls = getattr(owner, name), itertools.count(1)

    def failing(*arguments, **options):
        if next(calls) == call:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name", "call", "error", "saved"),
    [
        (CpuModel, "forward_backward", 4, RuntimeError("a worker"), 3),
        (BatchStream, "__next__", 4, MemoryError("a batch"), 3),
        (optimizer, "parameters_changed", 4, MemoryError("half"), 2),
        (progress.Progress, "add", 4, MemoryError("not counted"), 2),
        (progress.Progress, "report", 3, MemoryError("report"), 3),
        (evaluation, "validate", 1, MemoryError("validation"), 5),
        (evaluation, "validate", 2, OSError(ENOSPC, "gone", "val.en"), 7),
        (train, "translate", 1, ValueError("translation"), 5),
        (run_directory, "save", 3, OSError(ENOSPC, "full", "best"), 5),
        (train, "average_last", 1, MemoryError("average"), 7),
        (TrainingRun, "save_average", 1, MemoryError("average"), 7),
        (train, "translate", 3, RuntimeError("test"), 7),
    ],
)
def test_an_error_costs_no_update(
    start, monkeypatch, whole, owner, name, call, error, saved
):
    with monkeypatch.context() as patch:
        fail(patch, owner, name, call, error)
        told = start(*WHOLE, "--run", "run", code=1)
    assert told.count("\n") == 1
    assert str(error.args[-1]) in told
    assert steps("run")[-1] == saved
    last = f"step-{saved:08}.safetensors"
    resume = f"\nfailed      train.py --resume run continues from {last}\n"
    assert Path("run/train.log").read_text().endswith(resume)
    start("--resume", "run")
    assert_same_parameters("run", whole)
    if name != "report":  # the next one has the updates of this one
        assert_same_results("run", whole)


def test_text_is_read_before_the_first_update(start, whole, text, each_gradient):
    """After it, some files are replaced and some are gone, and so is the cache."""
    copy = Path(shutil.copytree(text, "text"))

    def remove(model, step):
        for path in copy.glob("*.de"):
            path.write_bytes(b"\xff\n" * 2)
        for path in copy.glob("*.en"):
            path.unlink()
        shutil.rmtree("cache", ignore_errors=True)

    each_gradient(remove)
    output = start(*WHOLE, "--run", "run", "--data", copy, "--cache", "cache")
    assert_same_results("run", whole)
    told = re.compile("^test  .*$", re.MULTILINE)
    expected = told.findall((whole / "train.log").read_text())
    assert told.findall(output) == expected != []
    assert output.endswith("translate   python translate.py --model run\n")


def test_long_validation_pairs_are_left_out_and_counted(start, text):
    copy = Path(shutil.copytree(text, "copy"))
    flags = "--data", copy, "--validate-bleu", 4, "--max-length", 15, "--dry-run"
    sides, long = [copy / f"val.{side}" for side in ("en", "de")], "c " * 40
    for path in sides:
        path.write_text(f"{long}\n{path.read_text()}")
    told = " 6 pairs (1 of them longer than 15 tokens: left out);"
    assert told in start(*flags)
    for path in sides:
        path.write_text(long)
    error = start(*flags, code=1)
    assert "expected pairs of at most 15 tokens a side (--max-length)" in error


@pytest.fixture
def stopped(start, each_gradient):
    """Start or resume a run that is told to stop in a step."""

    def stopped(*flags, at):
        def stop(model, step):
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)

        each_gradient(stop)
        start(*flags, code=128 + signal.SIGTERM)

    return stopped


@pytest.mark.parametrize(
    ("more", "last"), [([], 6), (["--learning-rate", 1e-30, "--patience", 1], 4)]
)
def test_a_stopped_run_makes_up_for_its_validation(start, stopped, more, last):
    flags = ("--steps", 6, "--save-every", 9, *more)
    start(*flags, "--run", "whole")
    stopped(*flags, "--run", "run", at=4)
    assert steps("run") == [4]
    assert list(values("run", "validation_loss")) == [2]
    start("--resume", "run")
    assert steps("run")[-1] == steps("whole")[-1] == last
    assert values("run", "validation_loss") == values("whole", "validation_loss")


def test_a_run_directory_in_use_is_refused_before_the_text_is_read(start, whole):
    before = contents(whole)
    error = start("--run", whole, "--cache", "fresh", code=1)
    begins = "train.py: error: expected a new or empty run directory"
    assert error.startswith(begins)  # it names a rank only if there are several
    assert not Path("fresh").exists()
    assert contents(whole) == before


@pytest.mark.parametrize("left", ["best.safetensors", "averaged.safetensors", None])
def test_results_without_a_checkpoint_are_not_begun_anew(start, whole, left):
    shutil.copytree(whole, "run")
    for path in Path("run").glob("*.safetensors"):
        if path.name != left:
            path.unlink()
    before = contents("run")
    error = start("--resume", "run", "--minutes", "1e-300", code=1)
    assert "found none, and a new beginning would replace what is here" in error
    assert contents("run") == before


def test_the_text_of_every_split_is_compared(start, text):
    shutil.copytree(text, "text")
    start("--data", "text", "--steps", 1, "--run", "run")
    for split, name in starting_point.SPLITS.items():
        path = Path("text", f"{split}.de")
        before = path.read_text()
        path.write_text(before.upper())
        error = start("--resume", "run", "--steps", 2, code=1)
        assert f"the {name} text has changed" in error
        path.write_text(before)


# Without a run


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(start):
    words = [line.split()[0] for line in start("--dry-run").splitlines()]
    assert words == "preset device parameters text held update".split()
    assert not os.listdir()


# A vocabulary of one's own


def test_a_run_keeps_how_many_sentences_its_lines_have(start, whole, place):
    assert state(whole, 6).median_sentences == 1
    for name in ("train.en", "train.de", "val.en", "val.de"):
        (place / name).write_text("ab. c? ba ab. c\n" * 22 + "ab c\n" * 2)
    start("--data", place, "--steps", 2, "--run", "run")
    assert state("run", 2).median_sentences == 4
    assert load("run", threads=1).median_sentences == 4


def test_a_run_takes_the_vocabulary_of_a_file(start, place):
    """The file has other ids, and no padding."""
    own = place / "own.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(VAL), model_prefix="own", model_type="char",
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    size = Tokenizer.read(own).vocab_size
    start("--vocabulary", own, "--steps", 3, "--run", "run")
    run = RunDirectory(Path("run"))
    found = checkpoint.load(run.best)
    assert found.model.config.vocab_size == found.tokenizer.vocab_size == size
    assert run.tokenizer.read_bytes() == own.read_bytes()
    assert run.read_config().vocabulary == str(own)
    for path in run.path.glob("*.safetensors"):
        path.unlink()
    run.unsaved.touch()
    start("--resume", "run", "--steps", 4)
    assert state("run", 4).step == 4
    Path("none").write_text("no vocabulary")
    for file, message in (("none", "none: expected a Sente"), ("gone", "No such file")):
        error = start("--vocabulary", file, code=1)
        assert (error.count("\n"), message in error) == (1, True)
    error = start("--vocabulary", own, "--vocab-size", 12, code=2)
    assert "--vocab-size does nothing with --vocabulary" in error


def test_adam_and_a_stop_count_no_skipped_update(start, stopped, monkeypatch):
    """A run that skipped one saves when it is stopped, off the regular steps."""
    start("--run", "run", "--steps", 4)
    path, restored = RunDirectory(Path("run")).checkpoint(4), []
    skipped = {**vars(state("run", 4)), "skipped": 1}
    rewrite_checkpoint(path, state=json.dumps(skipped, default=vars))
    restore = optimizer.Adam.restore

    def remember(adam, steps, *moments):
        restored.append(steps)
        restore(adam, steps, *moments)

    monkeypatch.setattr(optimizer.Adam, "restore", remember)
    stopped("--resume", "run", "--steps", 8, at=5)
    assert restored == [3]
    assert steps("run")[-1] == 5
