"""Pairs whose sides hold the same, with symbols for it."""

import pytest

from minitransformer.text import symbols
from minitransformer.text.cache import cached_tokenizer, encoded_corpus
from minitransformer.text.masking import SYMBOLS, Mask
from minitransformer.text.pairs import TextPair
from minitransformer.text.symbols import hide_pair
from support.in_process import rows

S = "\u27e6"
MANY = " ".join(f"{{{n}}} of" for n in range(10))  # more than there are symbols
# A pair, and whether what both sides hold is hidden.
PAIRS = f"""
see a@b.de now | siehe a@b.de jetzt | yes
%s of %d | %s von %d | yes
%s of %d | %d von %s | no
see a@b.de | siehe dort | no
see a@b.de | siehe a@b.de und a@b.de | no
12345 and 67890 | 12345 und 67891 | no
so <b>xy</b> | ein <b>xy</b> | yes
https://a.org | https://a.org | no
in 1985 | 1985 | no
{MANY} | {MANY} | no
"""


@pytest.mark.parametrize(("source", "target", "hidden"), rows(PAIRS))
def test_pairs_that_hold_the_same_are_learned_from(source, target, hidden):
    found = hide_pair(Mask(), source, target)
    assert (found != (source, target)) == (hidden == "yes")
    if S in found[0]:
        names = [[x for x in SYMBOLS if x in side] for side in found]
        assert names[0] == names[1] != []


def test_all_symbols_are_learned_alike():
    pairs = [hide_pair(Mask(), f"see x{n}@y.de", f"da x{n}@y.de") for n in range(500)]
    counts = [sum(name in source for source, _ in pairs) for name in SYMBOLS]
    assert sum(counts) == 500
    assert min(counts) > 30


def test_a_vocabulary_has_symbols_if_enough_pairs_need_them(tmp_path, monkeypatch):
    monkeypatch.setattr(symbols, "LEAST_PAIRS", 5)
    rows = [
        (f"the cat saw x{n}@y.de here", f"die Katze x{n}@y.de hier") for n in range(9)
    ]
    for name, count in (("many", 9), ("few", 4)):
        text = TextPair(tmp_path / f"{name}.en", tmp_path / f"{name}.de")
        own = rows[:count] + [("the cat sat", "die Katze da")] * 20
        for path, side in zip(
            (text.source, text.target), zip(*own, strict=True), strict=True
        ):
            path.write_text("".join(f"{line}\n" for line in side))
        tokenizer = cached_tokenizer(text, 60, tmp_path / "cache", 1)
        assert all(map(tokenizer.keeps_whole, SYMBOLS)) == (name == "many")
        corpus = encoded_corpus(text, tokenizer, tmp_path / "cache")
        first = corpus.source.ids[: corpus.source.starts[1]].tolist()
        assert (SYMBOLS[0][0] in tokenizer.decode([first])[0]) == (name == "many")
