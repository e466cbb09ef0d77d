"""The command that averages checkpoints."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from minitransformer.commands.average import main
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.state import RunState
from minitransformer.text.tokenizer import Tokenizer
from support.closeness import assert_close
from support.in_process import rows
from support.models import tiny_config

CONFIG = tiny_config(vocab_size=40)


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    tokenizer = Tokenizer.train([f"the cat number {i}" for i in range(100)], 40)
    for step in (100, 200, 1000):
        model = Transformer(CONFIG, seed=step)
        at = Checkpoint(model, tokenizer, ParameterBuffer(model), RunState(step=step))
        checkpoint.save(run.checkpoint(step), at)
    return run


@pytest.mark.parametrize("named", [False, True])
def test_the_last_checkpoints_are_averaged(run, tmp_path, capsys, named):
    paths = [run.checkpoint(200), run.checkpoint(1000)]
    inputs = map(str, paths) if named else (str(run.path), "--last", "2")
    assert main([str(tmp_path / "mean.safetensors"), *inputs]) == 0
    names = "step-00000200.safetensors, step-00001000.safetensors"
    assert capsys.readouterr().out.endswith(f"safetensors: the mean of {names}\n")
    found = load_file(tmp_path / "mean.safetensors")
    for name in found.keys() - {"tokenizer"}:
        each = [load_file(path)[name].astype(float) for path in paths]
        assert_close(found[name], np.mean(each, axis=0), "float32")
    assert "adam.mean" not in found


def saved_as(run, name, **state):
    """Save the run's first model with another state."""
    at = checkpoint.load(run.checkpoint(100))
    at.state = RunState(**state)
    path = run.path.parent / name
    checkpoint.save(path, at)
    return path


# What a checkpoint knows, and how it differs. Names that are no codes of languages say
# no direction, and an older version knew nothing.
KNOWN = """
{"origin": 2} | its beginning (--seed or --from) differs
{"text": {"train": "0e", "val": "0f"}} | its training text differs
{"languages": ["de", "en"]} | its direction differs
{"languages": ["src", "tgt"]} | nothing
{"text": {"train": "0f", "val": "0e"}} | nothing
{"origin": 0, "text": {}, "languages": []} | nothing
"""


@pytest.mark.parametrize(("other", "differs"), rows(KNOWN))
def test_checkpoints_that_do_not_belong_together_are_named(run, capsys, other, differs):
    known = {"origin": 1, "text": {"train": "0f"}, "languages": ("en", "de")}
    last = saved_as(run, "last", **known)
    path = saved_as(run, "other", **{**known, **json.loads(other)})
    out = run.path.parent / "mean"
    is_refused = differs != "nothing"
    assert main([str(out), str(path), str(last)]) == is_refused
    error = capsys.readouterr().err
    named = f"minitransformer average: error: {path}: {differs} from that of {last}\n"
    assert error == named * is_refused
    assert out.exists() != is_refused


@pytest.mark.parametrize("way", [os.symlink, os.link, shutil.copy])
def test_a_checkpoint_that_is_named_twice_is_refused(run, tmp_path, capsys, way):
    link = tmp_path / "link"
    way(run.checkpoint(100), link)
    inputs = map(str, (run.checkpoint(100), link))
    assert main([str(tmp_path / "mean"), *inputs]) == 2
    assert "expected different checkpoints, got one twice" in capsys.readouterr().err
