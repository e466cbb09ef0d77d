"""Constituency trees: read, written as sequences, and made from sequences (6.3).

A tree is the list of its brackets and leaves from left to right, as a model of
sequences writes it. No function here is recursive: trees may have any depth.
"""

from __future__ import annotations

import itertools
import re
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

# Labels of the brackets that some treebanks put around each tree: "( (S ...) )".
ROOT_LABELS = ("", "TOP", "ROOT")

# The tag of traces and of other leaves that are no words.
TRACE_TAG = "-NONE-"


def read_trees(path: Path) -> Iterator[Tree]:
    """Yield the trees of a bracketed file, plain or .gz; a tree may take many lines.

    Raises: ValueError naming the file and the tree whose brackets are wrong.
    """
    lines = read_lines(path)
    tokens = (token for line in lines for token in re.findall(r"[()]|[^\s()]+", line))
    tree: Tree = []
    inside: list[int] = []  # the indices in `tree` of brackets not yet closed
    number = 1
    previous = ")"
    # Each token opens a bracket, closes one, labels one, or turns one into a leaf.
    for token in tokens:
        place = f"{path}, tree {number}"
        innermost = tree[inside[-1]] if inside else None
        if token == "(":
            if isinstance(innermost, Leaf):
                word = innermost.word[:40]
                raise ValueError(f"{place}: expected ')' after {word}, got (")
            inside.append(len(tree))
            tree.append(Open(""))
        elif innermost is None:
            raise ValueError(f"{place}: expected '(', got {token[:40]}")
        elif token == ")":
            if isinstance(innermost, Open):
                tree.append(Close(innermost.label))
            inside.pop()
        elif previous == "(":
            tree[-1] = Open(token)
        elif len(tree) - 1 == inside[-1] and isinstance(innermost, Open):
            tree[-1] = Leaf(innermost.label, token)
        else:
            raise ValueError(f"{place}: expected a bracket, got {token[:40]}")
        previous = token
        if not inside:
            yield tree
            tree = []
            number += 1
    if inside:
        raise ValueError(f"{place}: expected ')', got the end of the file")


def base_label(label: str) -> str:
    """Drop function tags and indices: NP-SBJ-1 and NP=2 become NP; -LRB- stays."""
    return label[:1] + re.split("[-=]", label[1:])[0] if label[:1] != "-" else label


def normalise_tree(tree: Tree) -> Tree:
    """Return a tree as parsers are scored on it.

    Traces (-NONE-) are removed with the constituents that they leave empty, and so are
    function tags, indices, and brackets without a label or around the tree (TOP, ROOT).
    """
    result: Tree = []
    for node in tree:
        if isinstance(node, Leaf):
            if node.tag != TRACE_TAG:
                result.append(Leaf(base_label(node.tag), node.word))
        elif (label := base_label(node.label)) in ROOT_LABELS:
            continue
        elif isinstance(node, Open):
            result.append(Open(label))
        elif isinstance(result[-1], Open):  # an empty constituent
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
    """Yield each constituent, with the indices in `tree` of its two brackets."""
    inside: list[tuple[int, int]] = []
    num_words = 0
    for i, node in enumerate(tree):
        if isinstance(node, Leaf):
            num_words += 1
        elif isinstance(node, Open):
            inside.append((i, num_words))
        else:
            left, start = inside.pop()
            yield Span(node.label, start, num_words), left, i


def words(tree: Tree) -> list[str]:
    return [node.word for node in tree if isinstance(node, Leaf)]


def bracket_tree(tree: Tree) -> str:
    """Write a normalised tree in one line, within (TOP ...), as EVALB reads it.

    Parentheses in words, tags and labels become -LRB- and -RRB-, as in the treebank.
    """
    # Each bracket or leaf in turn; a leaf closes its own bracket.
    line = "(TOP"
    for node in tree:
        if isinstance(node, Close):
            line += ")"
        else:
            texts = [text.replace("(", "-LRB-").replace(")", "-RRB-") for text in node]
            line += f" ({' '.join(texts)}" + ")" * isinstance(node, Leaf)
    return line + ")"


def linearise_tree(tree: Tree, with_numbers: bool = False) -> str:
    """Write a tree without its words: bS bNP NN eNP bVP VBZ eVP eS.

    bNP and eNP begin and end a constituent. Parentheses would cost two pieces each,
    because SentencePiece never joins them to a label. With numbers, each tag follows
    the number of its word, as in `number_words`.

    Raises: ValueError if a tag looks like such a bracket or a number.
    """
    symbols = []
    number = itertools.count(1)
    for node in tree:
        if isinstance(node, Leaf):
            if re.fullmatch(r"[be].+|\d+", node.tag):
                expected = "expected tags other than a number, or b or e and more"
                raise ValueError(f"{expected}, got {node.tag!r}")
            symbols.append(f"{next(number)} {node.tag}" if with_numbers else node.tag)
        else:
            symbols.append(("b" if isinstance(node, Open) else "e") + node.label)
    return " ".join(symbols)


def number_words(sentence: Sequence[str]) -> str:
    """Write each word after its number: 1 The 2 board 3 met."""
    return " ".join(f"{i} {word}" for i, word in enumerate(sentence, start=1))


def restore_tree(sequence: str, sentence: Sequence[str]) -> Tree:
    """Make a tree over exactly these words from any output of a model.

    Each word gets the next tag. Tags without a word are dropped, and words without a
    tag become NN beside the last one. An end bracket closes the innermost open
    constituent of its label, with all inside it. End brackets without a beginning,
    empty constituents and numbers are left out.
    """
    # The tags that are left, and the words.
    symbols = [x for x in sequence.split() if not x.isdecimal()]
    tags = sum(not _is_bracket(symbol) for symbol in symbols)
    left = list(reversed(sentence))
    # Words without a tag stand after the last leaf.
    untagged = [Leaf("NN", word) for word in sentence[tags:]]
    tree: Tree = [] if tags else [*untagged]
    inside: list[str] = []  # the labels of brackets not yet closed

    def close() -> str:
        """Close the innermost constituent, or drop an empty one; return its label."""
        label = inside.pop()
        if isinstance(tree[-1], Open):
            tree.pop()
        else:
            tree.append(Close(label))
        return label

    # Each tag takes a word; an end bracket closes all that is inside its constituent.
    for symbol in symbols:
        label = symbol[1:]
        if not _is_bracket(symbol):
            tags -= 1
            tree += [Leaf(symbol, left.pop())] if left else []
            tree += [] if tags else untagged
        elif symbol[0] == "b":
            tree.append(Open(label))
            inside.append(label)
        elif label in inside:
            while close() != label:
                pass
    # The end of the sequence closes the others.
    while inside:
        close()
    return tree


def _is_bracket(symbol: str) -> bool:
    return symbol[0] in "be" and len(symbol) > 1
