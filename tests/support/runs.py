"""What a run of train.py wrote, and whether two runs ended alike."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from support.scripts import TIMINGS

# The settings of a run, where a test has no others.
SETTINGS = RunConfig(
    preset="tiny",
    model=ModelConfig(),
    training=TrainingConfig(),
    decoding=DecodingConfig(),
    text={"train": ("a", "b")},
)


def metrics(run):
    """The lines of a run's metrics, but for what a clock has measured."""
    return [
        {name: value for name, value in line.items() if name not in TIMINGS}
        for line in RunDirectory(Path(run)).read_metrics()
    ]


def values(run, name):
    """What a run recorded by this name, by step."""
    lines = RunDirectory(Path(run)).read_metrics()
    return {line["step"]: line[name] for line in lines if name in line}


def steps(run):
    """The steps of a run's checkpoints."""
    return [int(path.stem[5:]) for path in RunDirectory(Path(run)).checkpoints()]


def assert_same_parameters(one, other):
    """Two runs have the same checkpoints, to the bit."""
    tensors = [
        {path.name: load_file(path) for path in Path(run).glob("*.safetensors")}
        for run in (one, other)
    ]
    np.testing.assert_equal(*tensors)


def assert_same_results(one, other):
    """Two runs ended with the same bits, and said the same on the way."""
    assert_same_parameters(one, other)
    assert metrics(one) == metrics(other)
