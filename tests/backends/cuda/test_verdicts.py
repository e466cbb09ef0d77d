"""Verdicts on faster paths, kept for the next process on the same machine."""

import json

import numpy as np
import pytest

from minitransformer.backends.cuda import device, verdicts

HALF = np.dtype(np.float16)


@pytest.fixture
def kept(stand_in, tmp_path, monkeypatch):
    """The file of verdicts, in a folder that does not exist yet."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupy"))
    return tmp_path / "cupy" / verdicts.FILE


def ask(difference=0.0, error=None, dtype=HALF):
    """Ask as a new process does; return the verdict, and whether it was compared."""
    device._device.cache_clear()
    gpu, compared = device.current(), []

    def results():
        compared.append(True)
        if error:
            raise error
        plain = gpu.xp.asarray(np.full(3, 10, dtype))
        yield plain, plain + dtype.type(difference)

    agree = verdicts.agrees(gpu, "a path", dtype, results, "without it")
    assert verdicts.agrees(gpu, "a path", dtype, results, "without it") == agree
    return agree, bool(compared)


def test_a_second_process_does_not_compare_again(kept):
    assert ask() == (True, True)
    assert ask() == (True, False)
    [key] = json.loads(kept.read_bytes())
    assert key.startswith("a path in float16: Stand-in 0 90 13000 13000 14.2.0 ")


def test_a_difference_is_kept_and_told_by_every_process(kept):
    for compared in (True, False):
        with pytest.warns(UserWarning, match="without it in float16: .*other results"):
            assert ask(0.5) == (False, compared)


@pytest.mark.parametrize(
    ("dtype", "difference", "agree"),
    [
        (HALF, 10 * 6 * 2**-10, True),
        (HALF, 10 * 10 * 2**-10, False),
        (np.dtype(np.float32), 10 * 14 * 2**-23, True),
        (np.dtype(np.float32), 10 * 18 * 2**-23, False),
    ],
)
def test_results_may_differ_in_the_last_places(kept, dtype, difference, agree):
    """By 8 units, in float32 by 16, relative to the largest number, which is 10."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts.warnings, "warn", lambda *a, **k: None)
        assert ask(difference, dtype=dtype) == (agree, True)
        assert ask(np.nan, dtype=dtype)[0] == agree


def test_an_error_is_no_verdict_to_keep(kept):
    with pytest.warns(UserWarning, match="without it in float16: out of memory$"):
        assert ask(error=MemoryError("out of memory\nat 5")) == (False, True)
    assert not kept.exists()
    assert ask() == (True, True)


@pytest.mark.parametrize("content", [b"", b"\xff{", b"[1]", b'{"a": "b"}', b'{"a":{}}'])
def test_a_damaged_file_is_written_anew(kept, content):
    kept.parent.mkdir()
    kept.write_bytes(content)
    assert ask() == (True, True)
    assert ask() == (True, False)
