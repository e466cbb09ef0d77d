"""Whatever a command is told, it changes nothing but what it owns.

Trees are drawn with runs, links to anywhere, hidden names, names in other cases, and
files of others; then a command with paths in all spellings. What it may change is
written down here once more, by what the files hold and not by how the package looks.
"""

import gzip
import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import translate
from minitransformer.commands import (
    average,
    export,
    mix,
    parse,
    runs,
    split,
    vocabulary,
)
from support.in_process import run_main
from support.models import save_small_model, save_small_run

# Where many cases are drawn, there are ten times as many trees, which take little time.
DRAWN = settings.default.max_examples
TREES = DRAWN * (10 if DRAWN >= 100 else 1)
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None

FOLDERS = (
    ". runs runs/A runs/B runs/a A B .A old/A runs/runs/A ../old ../old/A corpus"
).split()
NAMES = (
    "config.json best.safetensors Best.safetensors BEST.SAFETENSORS metrics.jsonl~ "
    "averaged.safetensors step-00000001.safetensors step-1.safetensors metrics.jsonl "
    "tokenizer.model train.log .training.lock .unsaved .hidden notes.txt "
    "notes.txt.gz text pairs model train.x train.y A B"
).split()
MINE = {"backup.gz": "packed bytes", "photo.png": "picture", "old.txt": "latin-1"}
OF_A_RUN = re.compile(
    r"(config\.json|metrics\.jsonl|tokenizer\.model|train\.log)"
    r"|(best|averaged|step-\d{8,})\.safetensors|\.(unsaved|training\.lock)"
)
HIDDEN = {".unsaved", ".training.lock"}
TEXTS = {
    "text": b"the cat sat\non the mat\n",
    "pairs": "".join(f"the cat {i}\tdie Katze {i}\n" for i in range(9)).encode(),
    "trees": b"(TOP (S (NP (NN cat)) (VP (VBZ sits))))\n",
    "empty": b"",
}
CONTENTS = {
    **TEXTS,
    "config": b"",  # both are made below
    "model": b"",
    "packed text": gzip.compress(TEXTS["text"]),
    "packed bytes": gzip.compress(b"backup\0\0\0"),
    "latin-1": b"Stra\xdfe\n",
    "picture": b"\x89PNG\r\n\x1a\n\0\0",
    "program": b"MZ\0\0",
}
KINDS = [*CONTENTS, "folder", "link", "link"]

# Ways to write a path, of which some lead through a link or elsewhere.
SPELLINGS = [
    "{}",
    "./{}",
    "{}/",
    "runs/{}",
    "runs/../{}",
    "../here/{}",
    "../old/{}",
    "runs/A/{}",
    "out/{}",
    "/proc/self/cwd/{}",
    "{}.gz",
]
ODD = ["", ".", "..", "../..", "/", "runs", "runs/..", "../old", "runs/A/..", "-"]
paths = st.one_of(
    st.builds(
        lambda way, name: way.format(name),
        st.sampled_from(SPELLINGS),
        st.one_of(st.sampled_from(NAMES), st.sampled_from([*MINE, "new"])),
    ),
    st.sampled_from(ODD),
)
# Half of the runs to delete are there, unless the tree hides them.
run_names = st.one_of(
    st.sampled_from("A B a runs/A runs/B ./A ../here/runs/B ../old/A".split()),
    paths.filter(lambda path: path != "-"),
)
run_folders = st.sets(st.sampled_from(FOLDERS), max_size=6)
entries = st.tuples(
    st.sampled_from(FOLDERS), st.sampled_from(NAMES), st.sampled_from(KINDS), paths
)
OUTPUTS = {
    "average": (average.main, "OUT IN IN", False),
    "float16": (export.main, "float16 IN OUT", False),
    "split": (split.main, "pairs OUT --source x --target y --val 1 --test 1", False),
    "mix": (mix.main, "OUT corpus --source x --target y", False),
    "restore": (parse.main, "restore text words -o OUT", True),
    "linearise": (parse.main, "linearise OUT trees", False),
    "translate": (translate.main, "--model model -i text -o OUT --threads 1", True),
    "attention": (translate.main, "--model IN --attention OUT cat", True),
    "vocabulary": (vocabulary.main, "OUT text --vocab-size 20", False),
    "score": (translate.main, "--model IN -i text --score words -o OUT", True),
}


@pytest.fixture(scope="module", autouse=True)
def originals(tmp_path_factory):
    """A model, and the settings of a run, among the contents of files."""
    place = tmp_path_factory.mktemp("originals")
    save_small_run(place / "run")
    CONTENTS["model"] = Path(save_small_model(place / "model")).read_bytes()
    CONTENTS["config"] = (place / "run" / "config.json").read_bytes()


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """Files need not survive a crash of the machine here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def plant(root, folders, tree):
    """Make runs in folders, and of the tree what goes together."""
    for folder in FOLDERS:
        (root / "here" / folder).mkdir(parents=True, exist_ok=True)
    os.chdir(root / "here")
    files = dict.fromkeys(("corpus/train.x", "corpus/train.y", "words"), "text")
    files |= {name: name for name in ("text", "pairs", "trees", "model")}
    files |= MINE
    for folder in folders:
        files |= {f"{folder}/config.json": "config", f"{folder}/train.log": "text"}
    for path, kind in files.items():
        Path(path).write_bytes(CONTENTS[kind])
    for folder, name, kind, target in tree:
        path = Path(folder, name)
        if path.parent.is_dir() and not (path.is_dir() and not path.is_symlink()):
            path.unlink(missing_ok=True)
            if kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(target or ".")
            else:
                path.write_bytes(CONTENTS[kind])


@contextmanager
def planted(folders, tree):
    """Work in `here` of a folder with these runs and this tree; yield that folder."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        home = os.getcwd()
        root = Path(os.path.realpath(place))
        try:
            plant(root, folders, tree)
            yield root
        finally:
            os.chdir(home)


def snapshot(root):
    """Return what is at each path below `root`: bytes, a link's target or None."""
    seen = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                seen[path] = f"-> {os.readlink(path)}"
            else:
                is_folder = os.path.isdir(path)
                seen[path] = None if is_folder else Path(path).read_bytes()
    return seen


def changed(before, after):
    """Return the paths at which two snapshots differ."""
    return {path for path, _ in before.items() ^ after.items()}


def is_config(data):
    return isinstance(data, bytes) and data.startswith(b"{") and len(data) > 9


def is_text(path, data):
    if path.endswith(".gz") and data:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError):
            return False
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False


def folders_of(names, folder):
    """Return the folders that `runs --delete` may empty."""
    plain = [x for x in names if x and "/" not in x and x not in (".", "..")]
    places = [*filter(None, names), *(os.path.join(folder, x) for x in plain)]
    return {os.path.realpath(place) for place in places}


@settings(max_examples=TREES)
@given(
    run_folders,
    st.lists(entries, max_size=12),
    st.lists(run_names, min_size=1, max_size=3),
    st.sampled_from(["runs", "runs", ".", "..", "../old", "none"]),
)
@example({"."}, [], [""], "runs")  # of a variable that is not set
@example({"runs/A"}, [("runs/A", ".unsaved", "link", "../../text")], ["A"], "runs")
@example({"runs/A"}, [("runs/A", "train.log", "link", "../../text")], ["A"], "runs")
@example({"runs/A"}, [("runs/A", "best.safetensors", "folder", "")], ["A"], "runs")
def test_deleting_changes_only_files_of_the_runs_named(folders, tree, names, folder):
    with planted(folders, tree) as root:
        before = snapshot(root)
        owned = folders_of(names, folder)
        code, _, error = run_main(runs.main, folder, "--delete", *names)
        after = snapshot(root)
    assert code == 0 or error.count("\n") == 1, error
    for path in changed(before, after):
        parent, name = os.path.split(path)
        if path in owned and path not in after:  # an emptied folder goes
            assert before[path] is None
            continue
        assert parent in owned, path
        assert is_config(before.get(os.path.join(parent, "config.json"))), path
        assert OF_A_RUN.fullmatch(name), path
        assert code == 0 or name in HIDDEN, path  # all runs or none
        assert isinstance(before.get(path, b""), bytes), path  # no link, no folder


@settings(max_examples=TREES)
@given(
    run_folders,
    st.lists(entries, max_size=12),
    st.sampled_from(list(OUTPUTS)),
    paths,
    st.sampled_from(["model", "runs/A/best.safetensors", "text"]),
)
def test_writing_changes_only_the_output(folders, tree, command, output, read):
    main, words, replaces = OUTPUTS[command]
    output = output or "new"
    with planted(folders, tree) as root:
        before = snapshot(root)
        target = os.path.realpath(output)
        places = {"OUT": output, "IN": read}
        code, _, error = run_main(main, *(places.get(x, x) for x in words.split()))
        after = snapshot(root)
    assert code == 0 or error.count("\n") == 1, error
    assert not [path for path in after if path.endswith(".partial")]
    for path in changed(before, after):
        inside = path.startswith(f"{target}/")  # of a folder
        above = target.startswith(f"{path}/") and after.get(path, "") is None
        assert path == target or inside or above, path
        old = before.get(path)
        if old is not None:
            assert replaces, path
            assert isinstance(old, bytes), path
            assert is_text(path, old), path
            parent, name = os.path.split(path)
            of_run = OF_A_RUN.fullmatch(name.lower())
            config = before.get(os.path.join(parent, "config.json"))
            assert not (of_run and isinstance(config, bytes)), path
