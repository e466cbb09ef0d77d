"""docs/run-files.md names the files of a run, the metrics and the parameters."""

import json
import re

import pytest

import train
from minitransformer.model.transformer import Transformer
from minitransformer.runs.checkpoint import FORMAT, MOMENTS, TOKENIZER
from support.in_process import run_main
from support.models import tiny_config
from support.scripts import ROOT

WEIGHTS = "weight", "bias"
SPLITS = "train", "val", "test"
PAGE = (ROOT / "docs" / "run-files.md").read_text(encoding="utf-8")
CONFIG = tiny_config((2, 2), vocab_size=30, d_ff=12, positions="learned")


def names(cell):
    """Return the names in a cell, where `.key` after `a.query` stands for `a.key`."""
    found = []
    for name in re.findall(r"`([\w.]+)`", cell):
        stem = found[-1].rpartition(".")[0] if name.startswith(".") else ""
        found.append(stem + name)
    return found


def table(heading):
    """Return the cells of the table whose heading begins so."""
    start = PAGE.index(f"| {heading} |")
    rows = PAGE[start:].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_names_every_file_and_every_metric(tmp_path):
    flags = []
    for side in ("source", "target"):
        (tmp_path / side).write_text("the cat sees a dog\n" * 12)
        for split in SPLITS:
            flags += [f"--{split}-{side}", tmp_path / side]
    flags += "--steps 4 --save-every 2 --validate-every 2 --validate-bleu 2".split()
    flags += "--average-by number --log-every 1 --vocab-size 20".split()
    flags += "--d-model 8 --d-ff 8 --num-heads 2".split()
    run = tmp_path / "run"
    code, _, error = run_main(
        train.main, *flags, "--run", run, "--cache", tmp_path / "cache", "--threads", 1
    )
    assert code == 0, error
    named = {name for cell, _ in table("file") for name in re.findall(r"`(.+?)`", cell)}
    found = {re.sub(r"step-\d+", "step-00001000", x.name) for x in run.glob("[!.]*")}
    assert found == named
    metrics = {name for cell, *_ in table("key") for name in names(cell)}
    keys = {
        key
        for line in (run / "metrics.jsonl").read_text().splitlines()
        for key in json.loads(line)
    }
    assert keys - {"step"} == metrics - {"loss_scale", "skipped"}  # those of fp16


def test_the_page_names_every_parameter():
    rows = table("here")
    ours = [name for cell, _ in rows for name in names(cell)]
    model = dict(Transformer(CONFIG).named_parameters())
    assert len(set(ours)) == len(ours)
    assert set(ours) == {re.sub(r"\.\d\.", ".N.", name) for name in model}
    for name in (FORMAT.split()[0], TOKENIZER, *MOMENTS):
        assert name in PAGE


def test_the_names_of_pytorch_are_those_of_a_parameter_of_the_same_shape():
    torch = pytest.importorskip("torch")
    model = dict(Transformer(CONFIG).named_parameters())
    theirs = torch.nn.Transformer(8, 2, 2, 2, 12, batch_first=True).state_dict()
    for cell, other in table("here"):
        if "none" in other:
            continue
        mine = [name.replace(".N.", ".1.") for name in names(cell)]
        found = [theirs.pop(name.replace(".N.", ".1.")) for name in names(other)]
        if "third" in other:
            found = found[0].chunk(3)
        shapes = [model[name].shape for name in mine]
        assert shapes == [tuple(x.shape)[::-1] for x in found]
    left = {name for name in theirs if ".0." not in name}
    final_norms = {f"{x}.norm.{y}" for x in ("encoder", "decoder") for y in WEIGHTS}
    biases = {name for name in left if re.search(r"attn\.(in|out)_proj.?bias$", name)}
    assert left == final_norms | biases
