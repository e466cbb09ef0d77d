"""Runs of version 0.1.0 are still read: they go on and translate as they did.

golden/README.md says what they are. Only the two commands are used here, and files.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from safetensors.numpy import load_file
from threadpoolctl import threadpool_info

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))

# The last update of each run that goes on.
LAST = {"plain": 2000, "early": 60}


def fingerprint():
    """What decides how sums are rounded: NumPy, its kernels and those of its BLAS."""
    blas = next((x for x in threadpool_info() if x["user_api"] == "blas"), {})
    names = [str(blas.get(x)) for x in ("internal_api", "version", "architecture")]
    try:
        simd = np.show_config(mode="dicts")["SIMD Extensions"]
    except (TypeError, KeyError):  # another NumPy than that of the recording
        simd = {}
    return {
        "numpy": np.__version__,
        "blas": " ".join(names),
        "simd": " ".join([*simd.get("baseline", []), *simd.get("found", [])]),
    }


def command(folder, script, *arguments):
    """Run a script of this version in a folder; return what it wrote."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments, "--threads", "1"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def unpack(name, folder):
    """Unpack a run, and say in its settings where its text lies now."""
    run, text = folder / name, folder / "text"
    with tarfile.open(GOLDEN / "runs.tar.xz") as archive:
        has_filters = hasattr(tarfile, "data_filter")  # not in Python 3.11.3 and before
        archive.extractall(folder, **({"filter": "data"} if has_filters else {}))
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    settings["text"] = {
        split: [str(text / PurePosixPath(path).name) for path in pair]
        for split, pair in settings["text"].items()
    }
    (run / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return run


@pytest.fixture(scope="module", params=LAST)
def resumed(request, tmp_path_factory):
    """A run after twenty more updates: what is expected of it, and its directory."""
    name = request.param
    run = unpack(name, tmp_path_factory.mktemp("golden"))
    flags = "--resume", name, "--steps", str(LAST[name] + 20), "--log-every", "1"
    command(run.parent, "train.py", *flags)
    return EXPECTED["resumed"][name], run


def metrics(run, kind):
    """The lines of metrics that have such a key, after the last recorded update."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [json.loads(line) for line in lines]
    return [x for x in values if x["step"] > LAST[run.name] and kind in x]


def parameters(run):
    """The tensors of the checkpoint after the twenty updates."""
    return load_file(run / f"step-{LAST[run.name] + 20:08}.safetensors")


def test_the_recorded_files_are_as_they_were():
    content = (GOLDEN / "runs.tar.xz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == EXPECTED["archive"]


def test_a_run_goes_on_as_it_did(resumed):
    expected, run = resumed
    updates = metrics(run, "loss")
    assert [x["step"] for x in updates] == [x["step"] for x in expected["updates"]]
    for name, rtol in (("target_tokens", 0), ("loss", 1e-5), ("gradient_norm", 1e-4)):
        found, wanted = ([x[name] for x in y] for y in (updates, expected["updates"]))
        np.testing.assert_allclose(found, wanted, rtol=rtol, err_msg=name)
    [validation] = metrics(run, "validation_loss")
    for name, value in expected["validation"].items():
        np.testing.assert_allclose(validation[name], value, rtol=1e-5, err_msg=name)
    tensors = parameters(run)
    for name, norm in expected["norms"].items():
        found = np.linalg.norm(tensors[name].astype(np.float64))
        np.testing.assert_allclose(found, norm, rtol=1e-4, err_msg=name)


def test_a_run_goes_on_bit_for_bit_where_it_was_recorded(resumed):
    if fingerprint() != EXPECTED["fingerprint"]:
        pytest.skip("another NumPy or processor than that of the recording")
    expected, run = resumed
    losses = [x["loss"] for x in metrics(run, "loss")]
    assert losses == [x["loss"] for x in expected["updates"]]
    tensors = parameters(run)
    for name, digest in expected["checksums"].items():
        content = tensors[name].tobytes()
        assert hashlib.sha256(content).hexdigest().startswith(digest), name


@pytest.mark.parametrize("model", ["plain", "mixture", "features", "en-de"])
def test_a_model_translates_as_it_did(tmp_path, model):
    expected = EXPECTED["translations"][model]
    text = "".join(source + "\n" for source, _, _ in expected)
    (tmp_path / "input").write_text(text, encoding="utf-8")
    place = model if model == "en-de" else str(unpack(model, tmp_path))
    flags = "--input input --output output --json --precision fp32".split()
    command(tmp_path, "translate.py", "--model", place, *flags)
    lines = (tmp_path / "output").read_text(encoding="utf-8").splitlines()
    best = [json.loads(line)["translations"][0] for line in lines]
    assert [x["text"] for x in best] == [text for _, text, _ in expected]
    scores = [score for _, _, score in expected]
    np.testing.assert_allclose([x["score"] for x in best], scores, rtol=0, atol=1e-4)
