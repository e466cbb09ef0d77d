"""The files that a step and a line pass through are those of docs/source.md."""

import gc
import re
import sys
from types import SimpleNamespace

import train
import translate
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.settings.config import TrainingConfig
from minitransformer.training.optimizer import Adam
from minitransformer.training.parallel import CpuModel
from support.models import small_batch, small_model
from support.scripts import ROOT


def files_on_page(title):
    page = (ROOT / "docs" / "source.md").read_text(encoding="utf-8")
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. \[.*\]\(\.\./(.*)\)", section, re.MULTILINE)


def files_called(function):
    """Return the files of this project whose functions run, sorted by name."""
    files = set()

    def note(frame, event, _):
        if event == "call":
            files.add(frame.f_code.co_filename)

    gc.collect()  # what other tests left is not finalised on the way
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    names = [file.removeprefix(f"{ROOT}/") for file in files]
    ours = re.compile(r"minitransformer/|(train|translate)\.py")
    return sorted(filter(ours.match, names))


def test_a_step_passes_through_nine_files():
    transformer, batch = small_model(dropout=0.1, dtype="float32"), small_batch(1, 4)
    settings = SimpleNamespace(model=transformer.config, training=TrainingConfig())
    parameters = ParameterBuffer(transformer)
    model = CpuModel(transformer, parameters)
    adam = Adam(parameters.data, 0.9, 0.98, 1e-9)
    before, step = parameters.data.copy(), (1, settings, iter([batch]), model, adam)
    try:
        found = files_called(lambda: train.update(*step))
    finally:
        model.close()
    assert (parameters.data != before).any()
    assert found == sorted([*files_on_page("The walk of a step"), "train.py"])
    assert len(found) <= 10


def test_a_line_passes_through_few_files(capfd):
    flags = "--model en-de --threads 1 --precision fp32".split()
    args = translate.parse_arguments(["A dog sleeps.", *flags])
    translator = translate.load_model(args)
    found = files_called(lambda: translate.write_translations(args, translator))
    assert capfd.readouterr().out == "Ein Hund schläft.\n"
    assert found == sorted(files_on_page("The walk of a line"))
    assert len(found) <= 20
