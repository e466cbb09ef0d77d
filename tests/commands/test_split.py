"""Sentences held out for validation or test are in no other split."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.commands.split import main, split_pairs
from minitransformer.settings.text_config import TextConfig
from minitransformer.text.find import find_text

words = st.sampled_from("abcdefghij")


@given(pairs=st.lists(st.tuples(words, words), min_size=30), seed=st.integers(0, 99))
def test_no_sentence_is_in_two_splits(pairs, seed):
    if len({source for source, _ in pairs}) < 5:
        return
    sizes = {"val": 2, "test": 2}
    splits = split_pairs(pairs, sizes, seed)
    assert splits == split_pairs(pairs, sizes, seed)
    for name, chosen in splits.items():
        assert set(chosen) <= set(pairs)
        for other in splits.keys() - {name}:
            for side in (0, 1):
                mine = {pair[side] for pair in chosen}
                assert not mine & {pair[side] for pair in splits[other]}
    held = {*splits["val"], *splits["test"]}
    sides = [{pair[side] for pair in held} for side in (0, 1)]
    free = [p for p in pairs if p[0] not in sides[0] and p[1] not in sides[1]]
    first = dict(reversed(pairs))
    # A source may have been drawn in vain, since its translation is held out already.
    drawn = {x for x, _ in free} - {x for x, _ in splits["train"]}
    assert all(first[x] in sides[1] for x in drawn)
    assert splits["train"] == [pair for pair in free if pair[0] not in drawn]
    for name in ("val", "test"):
        sources = [source for source, _ in splits[name]]
        assert all(first[source] == target for source, target in splits[name])
        assert len(set(sources)) == len(sources) <= 2


def test_the_command_writes_what_training_reads(tmp_path, capsys):
    lines = [f"Sätze {i}.\tSentences {i}.\tCC-BY\n" for i in range(40)]
    listed = tmp_path / "pairs.tsv.gz"
    listed.write_bytes(gzip.compress("".join(lines).encode()))
    command = [str(listed), str(tmp_path / "data"), "--source", "de", "--target", "en"]
    assert main([*command, "--val", "3", "--test", "4", "--seed", "7"]) == 0
    assert "3 val, 4 test, 33 train; left out: 0 of 40" in capsys.readouterr().out
    written = TextConfig(data=str(tmp_path / "data"), source="de", target="en")
    splits = {name: list(pair.lines()) for name, pair in find_text(written).items()}
    assert {name: len(found) for name, found in splits.items()} == {
        "train": 33,
        "val": 3,
        "test": 4,
    }
    pairs = [(f"Sätze {i}.", f"Sentences {i}.") for i in range(40)]
    assert splits == split_pairs(pairs, {"val": 3, "test": 4}, 7)
    everything = [pair for found in splits.values() for pair in found]
    assert sorted(everything) == sorted(pairs)
    assert main(command) == 2
    assert "data: expected a file, or a new or an empty f" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "blank"),
    [("", 1), ("\t", 1), ("source\t", 1), ("\ttarget", 1), ("\xad\t\u200b\tx", 1),
     ("Su\u0308\xdf 1\tother", 0), ("other\tSweet\xa01", 0), ("no tab", None)],
    ids=ascii,
)  # fmt: skip
def test_blank_sides_are_left_out_and_equal_text_is_one(tmp_path, capsys, line, blank):
    """As in training; a pair that Unicode calls equal is in the same split."""
    listed = tmp_path / "pairs.tsv"
    lines = [*(f"S\xfc\xdf {i}\tSweet {i}" for i in range(9)), line]
    listed.write_text("\n".join([*lines, ""]), encoding="utf-8")
    command = [str(listed), str(tmp_path / "data"), "--source", "de", "--target", "en"]
    code = main([*command, "--val", "4", "--test", "4"])
    told = capsys.readouterr()
    assert code == (blank is None)
    if blank is None:
        assert "line 10: expected source TAB target, got 'no tab'" in told.err
        return
    assert f"of 10 pairs, {blank} with a blank side" in told.out
    found = find_text(TextConfig(data=str(tmp_path / "data"), source="de", target="en"))
    pairs = [p for split in found.values() for p in {*split.lines()}]
    assert sorted(pairs) == [(f"S\xfc\xdf {i}", f"Sweet {i}") for i in range(9)]
