"""Trees as sequences and back, and scores against counting by hand."""

import gzip
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.commands import mix
from minitransformer.commands import parse as parsing
from minitransformer.commands.parse import score, score_files
from minitransformer.commands.trees import (
    Close,
    Leaf,
    Open,
    bracket_tree,
    linearise_tree,
    normalise_tree,
    read_trees,
    restore_tree,
    words,
)
from support.in_process import rows

PENN = r"""
( (S
    (NP-SBJ-1 (DT The) (NN board)
      (SBAR (WHNP-2 (-NONE- 0)) (S (-NONE- *T*-2))))
    (VP (VBD was) (VP (VBN given)
      (NP (-NONE- *-1))
      (NP=2 (CD 1\/2) (-LRB- -LRB-) (PRP$ its) (-RRB- -RRB-))))
    (. .)))
((NP (NN Nothing)))
(TOP (FRAG (X (-NONE- *))))
"""
PLAIN = [
    r"(TOP (S (NP (DT The) (NN board)) (VP (VBD was) (VP (VBN given)"
    r" (NP (CD 1\/2) (-LRB- -LRB-) (PRP$ its) (-RRB- -RRB-)))) (. .)))",
    "(TOP (NP (NN Nothing)))",
    "(TOP)",
]
SEQUENCE = "bS bNP DT NN eNP bVP VBD bVP VBN bNP CD -LRB- PRP$ -RRB- eNP eVP eVP . eS"

LABELS = st.sampled_from("S NP VP PP ADVP PRT SBAR".split())
PAIRS = "NN/xy VB/xy PRP$/z ,/, ./. ./? ''/'' ''/' -LRB-/-LCB-".split()
LEAVES = st.sampled_from([Leaf(*pair.split("/")) for pair in PAIRS])


def constituent(label, children):
    return [Open(label), *itertools.chain(*children), Close(label)]


def forests(children):
    return st.builds(constituent, LABELS, st.lists(children, min_size=1, max_size=4))


TREES = st.recursive(LEAVES.map(lambda leaf: [leaf]), forests, max_leaves=12)
SYMBOLS = st.sampled_from("bS eS bNP eNP bVP eVP NN VB , . b e bb".split())


def tree_of(text, folder):
    (folder / "trees").write_text(text)
    [tree] = read_trees(folder / "trees")
    return normalise_tree(tree)


def test_penn_trees_are_normalised(tmp_path):
    (tmp_path / "a.mrg").write_text(PENN)
    (tmp_path / "b.mrg.gz").write_bytes(gzip.compress(PENN.encode()))
    for path in tmp_path.iterdir():
        trees = [normalise_tree(tree) for tree in read_trees(path)]
        assert [bracket_tree(tree) for tree in trees] == PLAIN
    assert linearise_tree(trees[0]) == SEQUENCE
    assert " ".join(words(trees[0])) == r"The board was given 1\/2 -LRB- its -RRB- ."


# Trees, and what the error says; a stroke stands for the end of a line.
WRONG = """
(S (NN a)) / (S (NN | tree 2: expected ')', got the end
(S (NN a b)) | tree 1: expected a bracket, got b
(S (NN a (NN b))) | tree 1: expected ')' after a, got (
(S (NN a)) ) | tree 2: expected '(', got )
(S (NN a) b) | tree 1: expected a bracket, got b
"""


@pytest.mark.parametrize(("text", "message"), rows(WRONG))
def test_wrong_brackets_are_named(text, message, tmp_path):
    (tmp_path / "wrong.mrg").write_text(text.replace("/", "\n"))
    with pytest.raises(ValueError, match="^" + re.escape(f"{tmp_path}/wrong.mrg")) as e:
        list(read_trees(tmp_path / "wrong.mrg"))
    assert message in str(e.value)


@given(TREES, st.booleans())
def test_sequences_lose_nothing_but_the_words(tree, with_numbers):
    assert restore_tree(linearise_tree(tree, with_numbers), words(tree)) == tree


@given(
    st.lists(SYMBOLS | st.text(max_size=3), max_size=40),
    st.lists(st.text("ab,.($", min_size=1), max_size=9),
)
def test_any_line_becomes_a_tree_over_the_words(tmp_path_factory, symbols, sentence):
    tree = restore_tree(" ".join(symbols), sentence)
    assert words(tree) == sentence
    inside = []
    for before, node in zip([None, *tree], tree, strict=False):
        if isinstance(node, Open):
            inside.append(node.label)
        elif isinstance(node, Close):
            assert inside.pop() == node.label
            assert not isinstance(before, Open)
    assert not inside
    path = tmp_path_factory.getbasetemp() / "any.mrg"
    path.write_text(bracket_tree(tree))
    [again] = read_trees(path)
    assert len(words(again)) == len(sentence)


# Brackets left open, and ends in the wrong order; too many leaves, and too few:
# the missing one stands beside the last.
BROKEN = """
bS bNP DT NN eNP bVP VB | (TOP (S (NP (DT a) (NN dog)) (VP (VB ran) (NN .))))
bS bNP DT NN VB eS . eNP | (TOP (S (NP (DT a) (NN dog) (VB ran))) (. .))
bS bNP DT NN NN . eNP . eS | (TOP (S (NP (DT a) (NN dog) (NN ran) (. .))))
bS bNP DT NN . eNP eS | (TOP (S (NP (DT a) (NN dog) (. ran) (NN .))))
"""


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [*rows(BROKEN), ("", "(TOP (NN a) (NN dog) (NN ran) (NN .))")],
)
def test_broken_sequences_are_repaired(sequence, expected):
    assert bracket_tree(restore_tree(sequence, "a dog ran .".split())) == expected


GOLD = (
    "(TOP (S (NP (DT The) (NN dog)) (, ,) (VP (VBD ran) (PRT (RP away))"
    " (PP (IN from) (NP (PRP it)))) (. .)))"
)


def test_counts_worked_out_by_hand(tmp_path):
    """Right are S 0-6, NP 0-2, VP 2-6, PRT 3-4, PP 4-6, NP 5-6 of six words."""
    gold = tree_of(GOLD, tmp_path)
    perfect = score(gold, gold)
    assert perfect == (6, 6, 6)
    # S, NP, VP and NP are right; ADVP 3-5 is not. What is tagged as a mark is one where
    # the right tree has it.
    other = (
        "(TOP (S (NP (DT The) (, dog)) (NN ,) (VP (VBD ran) (ADVP (RB away)"
        " (IN from)) (NP (PRP it))) (. .)))"
    )
    found = score(gold, tree_of(other, tmp_path))
    assert found == (6, 5, 4)
    assert found.summary() == {
        "labelled recall": pytest.approx(100 * 4 / 6),
        "labelled precision": pytest.approx(100 * 4 / 5),
        "F1": pytest.approx(100 * 2 * 4 / (6 + 5)),
    }
    # ADVP is as good as PRT; where punctuation is, and TOP, make no difference.
    same = (
        "(S (NP (DT The) (NN dog) (, ,)) (VP (VBD ran) (ADVP (RP away))"
        " (PP (IN from) (NP (PRP it))) (X (. .))))"
    )
    assert score(gold, tree_of(same, tmp_path)) == perfect
    for label in ("", "ROOT"):
        assert score(gold, tree_of(f"({label} {same})", tmp_path)) == perfect
    # A constituent twice where it is right once is one too many.
    twice = score(gold, tree_of(GOLD.replace("(PRP it)", "(NP (PRP it))"), tmp_path))
    assert twice == (6, 7, 6)


def linearise(folder, text, options, name="train"):
    """Run the command; return the words and the sequences of a split."""
    (folder / "penn.mrg").write_text(text)
    command = ["linearise", str(folder), str(folder / "penn.mrg"), *options.split()]
    assert parsing.main(command) == 0
    return [(folder / f"{name}.{x}").read_text() for x in ("words", "tree")]


def test_trees_become_sequences_and_return_by_the_commands(tmp_path, capsys):
    words, trees = linearise(tmp_path, PENN + GOLD, "--split train=3 test")
    assert "test: 1 trees, 8 words" in capsys.readouterr().out
    plain = "".join(f"{x}\n" for x in PLAIN)
    assert (tmp_path / "train.mrg").read_text() == plain
    assert trees == f"{SEQUENCE}\nbNP NN eNP\n\n"
    assert words.count("\n") == 3
    back = ["restore", *(str(tmp_path / f"train.{x}") for x in ("tree", "words"))]
    assert parsing.main(back) == 0
    assert capsys.readouterr().out == plain
    assert parsing.main([*back, "--output", str(tmp_path / "trees")]) == 0
    assert (tmp_path / "trees").read_text() == plain
    files = [str(tmp_path / name) for name in ("train.mrg", "trees")]
    assert parsing.main(["score", *files]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].split() == ["F1", "100.00"]


def test_automatic_trees_join_the_treebank_by_one_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gold.mrg").write_text(PENN)
    Path("automatic.mrg").write_text(GOLD)
    split = ["--split", "train=2", "val"]
    assert parsing.main(["linearise", "wsj", "gold.mrg", *split]) == 0
    assert parsing.main(["linearise", "automatic", "automatic.mrg"]) == 0
    sides = ["--source", "words", "--target", "tree"]
    assert mix.main(["semi", "wsj", "automatic", *sides]) == 0
    for side in ("words", "tree"):
        parts = [Path(x, f"train.{side}").read_text() for x in ("wsj", "automatic")]
        expected = {"train": "".join(parts), "val": Path(f"wsj/val.{side}").read_text()}
        for split, text in expected.items():
            packed = Path(f"semi/{split}.{side}.gz").read_bytes()
            assert gzip.decompress(packed).decode() == text


def test_constituents_become_training_pairs_of_their_own(tmp_path):
    """Only of the first split, of two words or more, and once each."""
    options = "--split train=4 val --parts NP PP X"
    words, trees = linearise(tmp_path, PENN + GOLD + GOLD, options)
    first, second = "The board", r"1\/2 -LRB- its -RRB-"
    assert words.split("\n")[4:] == [first, second, "The dog", "from it", ""]
    assert trees.split("\n")[7] == "bPP IN bNP PRP eNP ePP"
    assert (tmp_path / "val.mrg").read_text() == GOLD + "\n"


def test_numbers_stand_before_words_and_tags(tmp_path):
    words, trees = linearise(tmp_path, GOLD, "--numbered")
    assert words == "The dog , ran away from it .\n"
    assert trees.startswith("bS bNP 1 DT 2 NN eNP 3 , bVP 4 VBD bPRT 5 RP ePRT")
    numbered = (tmp_path / "train.numbered").read_text()
    assert numbered == "1 The 2 dog 3 , 4 ran 5 away 6 from 7 it 8 .\n"


FOUR = "(S (X (A a) (A b)) (A c) (A d))"


def test_scores_of_files_are_sums_over_trees_of_the_same_words(tmp_path):
    gold, test = tmp_path / "gold", tmp_path / "test"
    gold.write_text(f"{FOUR}\n{FOUR}\n(S (: --) (, ,))")
    test.write_text(f"{FOUR}\n(S (A a) (A b) (A c) (A d))\n(S (: --) (, ,))")
    assert score_files(gold, test) == (4, 3, 3)
    gold.write_text(f"{FOUR}\n{FOUR}")
    with pytest.raises(ValueError, match=r"gold: expected as many trees as in .*test"):
        score_files(gold, test)
    test.write_text(f"{FOUR}\n(S (A b))")
    with pytest.raises(ValueError, match="test, tree 2: expected the words of"):
        score_files(gold, test)
