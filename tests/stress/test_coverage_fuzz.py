"""Everything that is read from outside, under a fuzzer that looks for new code."""

import importlib.util

import pytest

from support.fuzzing import MAX_BYTES, MAX_SECONDS, fuzz_all, table

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="needs the fuzzer atheris"
)


@needs_atheris
@pytest.mark.stress
def test_all_targets_survive_a_hundred_thousand_guided_inputs(tmp_path):
    rows = fuzz_all(100_000, tmp_path)
    print("\n" + table(rows))
    assert sum(row["inputs"] for row in rows) >= 100_000
    for row in rows:
        assert not row["failures"], (row, sorted(tmp_path.glob("*/failure-*")))
        assert row["slowest_ms"] < 1000 * MAX_SECONDS, row
        assert row["peak_mb"] < 2 * MAX_BYTES >> 20, row
        assert row["edges"], row


@needs_atheris
@pytest.mark.stress
def test_a_second_call_goes_on_where_the_first_ended(tmp_path):
    first, again, more = (fuzz_all(n, tmp_path) for n in (2000, 2000, 4000))
    assert first == again
    for before, after in zip(first, more, strict=True):
        assert after["inputs"] == 2 * before["inputs"]
        assert after["features"] >= before["features"]
