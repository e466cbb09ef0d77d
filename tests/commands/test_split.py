"""Sentences held out for validation or test are in no other split."""

import gzip
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minitransformer.commands.split import main, split_pairs
from minitransformer.settings.text_config import TextConfig
from minitransformer.text.find import find_text

words = st.sampled_from("abcdefghij")


@given(pairs=st.lists(st.tuples(words, words), min_size=30), seed=st.integers(0, 99))
def test_no_sentence_is_in_two_splits(pairs, seed):
    first = dict(reversed(pairs))  # the first translation of each source
    assume(len(first) > 4)
    splits = split_pairs(pairs, {"val": 2, "test": 2}, seed)
    for one, other in itertools.permutations(splits.values(), 2):
        for mine, theirs in zip(zip(*one), zip(*other)):  # noqa: B905
            assert not {*mine} & {*theirs}
    held = [*splits["val"], *splits["test"]]
    assert all(first[source] == target for source, target in held)
    for name in ("val", "test"):
        assert len({source for source, _ in splits[name]}) == len(splits[name]) <= 2
    train = splits["train"]
    assert train == [pair for pair in pairs if pair in train]
    for source, target in {*pairs} - {*train}:
        # A source may have been drawn in vain: its translation is held out already.
        targets = {target for _, target in held}
        assert source in dict(held) or {target, first[source]} & targets


def read(folder):
    """The pairs of each split that were written."""
    text = find_text(TextConfig(data=str(folder / "data"), source="de", target="en"))
    return {name: [*pairs.lines()] for name, pairs in text.items()}


def test_the_command_writes_what_training_reads(tmp_path, capsys):
    lines = [f"Sätze {i}.\tSentences {i}.\tCC-BY\n" for i in range(40)]
    listed = tmp_path / "pairs.tsv.gz"
    listed.write_bytes(gzip.compress("".join(lines).encode()))
    command = [str(listed), str(tmp_path / "data"), "--source", "de", "--target", "en"]
    assert main([*command, "--val", "3", "--test", "4", "--seed", "7"]) == 0
    assert "3 val, 4 test, 33 train; left out: 0 of 40" in capsys.readouterr().out
    pairs = [(f"Sätze {i}.", f"Sentences {i}.") for i in range(40)]
    assert read(tmp_path) == split_pairs(pairs, {"val": 3, "test": 4}, 7)
    assert main(command) == 2
    assert "data: expected a file, or a new or an empty f" in capsys.readouterr().err


BLANK = "", "\t", "source\t", "\ttarget", "\xad\t\u200b\tx"
EQUAL = "Su\u0308\xdf 1\tother", "other\tSweet\xa01"


@pytest.mark.parametrize("line", [*BLANK, *EQUAL])
def test_blank_sides_are_left_out_and_equal_text_is_one(tmp_path, capsys, line):
    """As in training; a pair that Unicode calls equal is in the same split."""
    pairs = [(f"S\xfc\xdf {i}", f"Sweet {i}") for i in range(9)]
    listed = tmp_path / "pairs.tsv"
    lines = [*map("\t".join, pairs), line, ""]
    listed.write_text("\n".join(lines), encoding="utf-8")
    command = [str(listed), str(tmp_path / "data"), "--source", "de", "--target", "en"]
    assert main([*command, "--val", "4", "--test", "4"]) == 0
    blank = f"of 10 pairs, {line in BLANK:d} with a blank side"
    assert blank in capsys.readouterr().out
    assert sorted(p for x in read(tmp_path).values() for p in {*x}) == pairs
