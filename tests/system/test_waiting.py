"""What is said while people wait, on a terminal and elsewhere."""

import io
import sys

import pytest

from minitransformer.system.waiting import waiting


@pytest.mark.parametrize("terminal", [True, False])
def test_a_wait_is_said_at_once_and_a_terminal_forgets_it(monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with waiting("reading", False):
        assert stream.getvalue() == ""
    with waiting("encoding my.en"):
        during = stream.getvalue()
    after = stream.getvalue()
    assert "encoding my.en ..." in during
    shown = [line.rpartition("\r")[2] for line in after.split("\n")]
    assert [line.strip() for line in shown] == (
        [""] if terminal else ["encoding my.en ...", ""]
    )


def test_nothing_is_said_where_nobody_reads(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with waiting("reading"):
        pass
