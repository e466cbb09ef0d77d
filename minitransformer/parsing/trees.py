"""Constituency trees as sequences and back (section 6.3).

A tree is the list of its brackets and leaves from left to right, which is what a model
of sequences writes. Nothing here is recursive, so that trees may have any depth.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from minitransformer.text.lines import read_lines


class Open(NamedTuple):
    """The left bracket of a constituent."""

    label: str


class Leaf(NamedTuple):
    """A word and its part of speech."""

    tag: str
    word: str


class Close(NamedTuple):
    """The right bracket of a constituent."""

    label: str


Tree: TypeAlias = list[Open | Leaf | Close]

# Brackets around a whole tree say nothing: "( (S ...) )", "(TOP ...)".
OUTER = ("", "TOP", "ROOT")

# The tag of traces and of other elements that are no words.
EMPTY = "-NONE-"

# Punctuation in the Penn Treebank, and the only tag that each mark has there.
MARKS = {
    **{word: word for word in ", . : `` '' -LRB- -RRB-".split()},
    **dict.fromkeys("? !".split(), "."),
    **dict.fromkeys("; - -- ...".split(), ":"),
    "`": "``",
    "-LCB-": "-LRB-",
    "-RCB-": "-RRB-",
}

# A constituent in just another of its label occurs once traces are gone: (NP (NP ...)).
# More of the same are a loop.
MOST_ALIKE = 2


def read_trees(path: Path) -> Iterator[Tree]:
    """Yield the trees of a bracketed file, plain or .gz; a tree may take many lines.

    Raises: ValueError naming the file and the tree whose brackets are wrong.
    """
    tree: Tree = []
    inside: list[int] = []  # where the brackets that are not yet closed were opened
    number, before = 1, ")"
    for token in _tokens(path):
        place = f"{path}, tree {number}"
        innermost = tree[inside[-1]] if inside else None
        if token == "(":
            if isinstance(innermost, Leaf):
                raise ValueError(f"{place}: expected ')' after {innermost.word}, got (")
            inside.append(len(tree))
            tree.append(Open(""))
        elif innermost is None:
            raise ValueError(f"{place}: expected '(', got {token}")
        elif token == ")":
            if isinstance(innermost, Open):
                tree.append(Close(innermost.label))
            inside.pop()
        elif before == "(":
            tree[-1] = Open(token)
        elif len(tree) - 1 == inside[-1] and isinstance(innermost, Open):
            tree[-1] = Leaf(innermost.label, token)
        else:
            raise ValueError(f"{place}: expected a bracket, got {token}")
        before = token
        if not inside:
            yield tree
            tree, number = [], number + 1
    if inside:
        raise ValueError(
            f"{path}, tree {number}: expected ')', got the end of the file"
        )


def _tokens(path: Path) -> Iterator[str]:
    for line in read_lines(path):
        yield from re.findall(r"[()]|[^\s()]+", line)


def base_label(label: str) -> str:
    """Drop function tags and indices: NP-SBJ-1 and NP=2 become NP, -LRB- stays."""
    return label[:1] + re.split("[-=]", label[1:])[0] if label[:1] != "-" else label


def normalised(tree: Tree) -> Tree:
    """Return what parsers are scored on.

    Without traces (-NONE-), constituents that are empty without them, function tags,
    indices, and brackets without a label or around the whole (TOP, ROOT).
    """
    result: Tree = []
    for node in tree:
        if isinstance(node, Leaf):
            if node.tag != EMPTY:
                result.append(Leaf(base_label(node.tag), node.word))
        elif (label := base_label(node.label)) in OUTER:
            continue
        elif isinstance(node, Open):
            result.append(Open(label))
        elif isinstance(result[-1], Open):
            result.pop()
        else:
            result.append(Close(label))
    return result


class Span(NamedTuple):
    """A constituent: its label and its words, from `start` to before `end`."""

    label: str
    start: int
    end: int


def spans(tree: Tree) -> Iterator[tuple[Span, int, int]]:
    """Yield each constituent and the places of its two brackets in the tree."""
    inside: list[tuple[int, int]] = []
    position = 0
    for place, node in enumerate(tree):
        if isinstance(node, Leaf):
            position += 1
        elif isinstance(node, Open):
            inside.append((place, position))
        else:
            left, start = inside.pop()
            yield Span(node.label, start, position), left, place


def words(tree: Tree) -> list[str]:
    return [node.word for node in tree if isinstance(node, Leaf)]


def bracketed(tree: Tree) -> str:
    """Write a normalised tree in a line, with TOP around it, as EVALB reads it.

    Parentheses among the words become -LRB- and -RRB-, as in the treebank.
    """
    parts = []
    for node in tree:
        if isinstance(node, Leaf):
            parts.append(f" ({_escaped(node.tag)} {_escaped(node.word)})")
        else:
            left = isinstance(node, Open)
            parts.append(f" ({_escaped(node.label)}" if left else ")")
    return f"(TOP{''.join(parts)})"


def _escaped(text: str) -> str:
    return text.replace("(", "-LRB-").replace(")", "-RRB-")


def linearised(tree: Tree, with_numbers: bool = False) -> str:
    """Write a tree without its words: bS bNP NN eNP bVP VBZ eVP eS.

    b and e begin and end a constituent. Letters, and not ( and ), because SentencePiece
    never joins those to a label: with them a bracket would be two pieces of a sequence.
    The number of its word may stand before each tag, as in `numbered`.

    Raises: ValueError if a tag looks like such a bracket or a number.
    """
    symbols, number = [], itertools.count(1)
    for node in tree:
        if isinstance(node, Leaf):
            if re.fullmatch(r"[be].+|\d+", node.tag):
                raise ValueError(f"expected tags, not brackets, got {node.tag}")
            symbols.append(f"{next(number)} {node.tag}" if with_numbers else node.tag)
        else:
            symbols.append(("b" if isinstance(node, Open) else "e") + node.label)
    return " ".join(symbols)


def numbered(sentence: Sequence[str]) -> str:
    """Write words with their numbers: 1 The 2 board 3 met."""
    return " ".join(f"{i} {word}" for i, word in enumerate(sentence, start=1))


def restored(sequence: str, sentence: Sequence[str]) -> Tree:
    """Make a tree over exactly these words of what a model wrote, whatever that is.

    Leaves are matched with words by `aligned`; a word without a leaf goes beside the
    one before it. An end closes the innermost constituent of its label, and with it
    those inside; an end of nothing is left out, as are empty constituents and loops.
    Numbers are passed over.
    """
    nodes: Tree = []
    for symbol in sequence.split():
        if symbol.isdecimal():
            continue
        kind, label = symbol[0], symbol[1:]
        if kind in "be" and label:
            nodes.append(Open(label) if kind == "b" else Close(label))
        else:
            nodes.append(Leaf(symbol, ""))
    tags = [node.tag for node in nodes if isinstance(node, Leaf)]
    leaves = aligned(tags or ["NN"], sentence)
    if not tags:
        return [*leaves[0]]
    places, with_words = iter(leaves), list[Open | Leaf | Close]()
    for node in nodes:
        with_words += next(places) if isinstance(node, Leaf) else [node]
    return _without_loops(_balanced(with_words))


def aligned(tags: Sequence[str], sentence: Sequence[str]) -> list[list[Leaf]]:
    """Return what stands for each leaf: its word, and words beside that have no leaf.

    As many leaves as words are taken in turn, if punctuation (MARKS) meets its own tags
    in all places but one. Otherwise as few as possible are dropped and added for which
    it does in all.
    """
    n, m = len(sentence), len(tags)
    pairs = list(zip(tags, sentence, strict=False))
    if n == m and sum(not _agree(*pair) for pair in pairs) <= 1:
        return [[Leaf(*pair)] for pair in pairs]
    cost = [[n - i + m - j for j in range(m + 1)] for i in range(n + 1)]
    for i in reversed(range(n)):
        for j in reversed(range(m)):
            cost[i][j] = 1 + min(cost[i + 1][j], cost[i][j + 1])
            if _agree(tags[j], sentence[i]):
                cost[i][j] = min(cost[i][j], cost[i + 1][j + 1])
    leaves: list[list[Leaf]] = [[] for _ in tags]
    i = j = last = 0
    while i < n:
        agree = j < m and _agree(tags[j], sentence[i])
        if agree and cost[i][j] == cost[i + 1][j + 1]:
            leaves[j].append(Leaf(tags[j], sentence[i]))
            i, j, last = i + 1, j + 1, j
        elif j == m or cost[i][j] == 1 + cost[i + 1][j]:
            leaves[last].append(Leaf(MARKS.get(sentence[i], "NN"), sentence[i]))
            i += 1
        else:
            j += 1
    return leaves


def _agree(tag: str, word: str) -> bool:
    """Whether both are the same mark or neither is one; ' may be a mark or a letter."""
    return MARKS.get(word) == (tag if tag in MARKS.values() else None) or word == "'"


def _balanced(nodes: Tree) -> Tree:
    """Close what is open and drop ends of nothing and empty constituents."""
    result: Tree = []
    inside: list[str] = []

    def close() -> None:
        label = inside.pop()
        if isinstance(result[-1], Open):
            result.pop()
        else:
            result.append(Close(label))

    for node in nodes:
        if not isinstance(node, Close):
            result.append(node)
            if isinstance(node, Open):
                inside.append(node.label)
        elif node.label in inside:
            while inside[-1] != node.label:
                close()
            close()
    while inside:
        close()
    return result


def _without_loops(tree: Tree) -> Tree:
    """Keep at most MOST_ALIKE constituents of one label over the same words."""
    seen, dropped = Counter[Span](), set[int]()
    for span, left, right in spans(tree):
        seen[span] += 1
        if seen[span] > MOST_ALIKE:
            dropped |= {left, right}
    return [node for place, node in enumerate(tree) if place not in dropped]
