"""What is said before people wait."""

import sys

from minitransformer.system.announce import announce


def test_a_wait_is_said_when_it_begins(monkeypatch, capsys):
    announce("reading", False)
    announce("encoding my.en", True)
    assert capsys.readouterr() == ("", "encoding my.en ...\n")
    monkeypatch.setattr(sys, "stderr", None)
    announce("reading", True)
