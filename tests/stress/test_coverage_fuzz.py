"""The loaders under a fuzzer that looks for inputs that reach new lines of code."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minitransformer.runs import checkpoint
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.lines import TextPair
from support.fuzzing import LINES, checkpoint_with_moments

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="needs the fuzzer atheris"
)

# The first byte of an input chooses the loader, and the file of the cache.
TARGET = """
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["minitransformer"]):
    from minitransformer.runs import checkpoint
    from minitransformer.text.cache import read_corpus
    from minitransformer.text.tokenizer import Tokenizer

victim, cache = Path(sys.argv.pop()), Path(sys.argv.pop())
names = sorted(path.name for path in cache.iterdir())
parts = {name: (cache / name).read_bytes() for name in names}


def one_input(data):
    if not data:
        return
    kind, data = data[0], data[1:]
    try:
        if kind < 100:
            victim.write_bytes(data)
            checkpoint.load(victim, with_moments=kind < 50)
        elif kind < 150:
            Tokenizer(data).encode(["the cat", "\\u2028"])
        else:
            name = names[kind % len(names)]
            (cache / name).write_bytes(data)
            try:
                read_corpus(cache)
            finally:
                (cache / name).write_bytes(parts[name])
    except ValueError as error:
        assert "\\n" not in str(error), error


atheris.Setup(sys.argv, one_input)
atheris.Fuzz()
"""


def fuzz(folder: Path, runs: int) -> str:
    """Run the fuzzer from real files on; return what it printed at its end."""
    model = checkpoint_with_moments()
    path = folder / "model.safetensors"
    checkpoint.save(path, model)
    pair = TextPair(folder / "a", folder / "b")
    for side in (pair.source, pair.target):
        side.write_text("".join(line + "\n" for line in LINES))
    encoded_corpus(pair, model.tokenizer, folder / "cache")
    [cache] = [p for p in (folder / "cache").iterdir() if p.is_dir()]
    seeds = folder / "seeds"
    seeds.mkdir()
    (seeds / "model").write_bytes(b"\x00" + path.read_bytes())
    (seeds / "tokenizer").write_bytes(b"\x80" + model.tokenizer.model)
    names = sorted(p.name for p in cache.iterdir())
    for number, name in enumerate(names):
        first = next(k for k in range(150, 256) if k % len(names) == number)
        (seeds / name).write_bytes(bytes([first]) + (cache / name).read_bytes())
    limits = ["-timeout=2", "-rss_limit_mb=1024", "-max_len=400000", "-seed=1"]
    command = [sys.executable, "-c", TARGET, *limits, f"-runs={runs}", str(seeds)]
    done = subprocess.run(
        [*command, str(cache), str(folder / "victim.safetensors")],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@needs_atheris
@pytest.mark.stress
def test_loaders_survive_a_hundred_thousand_fuzzed_inputs(tmp_path):
    said = fuzz(tmp_path, 100_000)
    print([line for line in said.splitlines() if "DONE" in line or "Done" in line])
    assert int(re.search(r"Done (\d+) runs", said)[1]) >= 100_000
