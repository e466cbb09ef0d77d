"""Tags: what a model of several corpora expects before a source line.

A tag is a symbol such as `<2de>` that says which corpus a translation should resemble,
for example one in German (as in Johnson et al., 2017). Beyond the paper. Older runs,
which mixed corpora while training, recorded their tags, so that a line without one is
refused; in a corpus by `minitransformer mix`, tags are part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitransformer.settings.options import UsageError
from minitransformer.text.tokenizer import Tokenizer


class Tags:
    """The tags that a model recorded, and the one put before every line, if any.

    An empty tag among those that are known stands for lines without a tag.

    Raises: UsageError if the model does not know the tag that was chosen: if it is not
    recorded or, where none is, no symbol of the vocabulary.
    """

    def __init__(
        self, tokenizer: Tokenizer, known: Sequence[str] = (), chosen: str | None = None
    ) -> None:
        if chosen and not known and tokenizer.keeps_whole(chosen):
            known = [chosen]
        if chosen is not None and chosen not in known:
            expected = ", ".join(map(repr, known)) or "a symbol of the vocabulary"
            raise UsageError(f"--tag: expected {expected}, got {chosen!r}")
        self.names, self._chosen = ", ".join(filter(None, known)), chosen
        encoded = zip(known, tokenizer.encode(known), strict=True)
        self._ids = {tag: tuple(ids) for tag, ids in encoded}

    def divide(self, ids: list[int], number: int) -> tuple[list[int], list[int]]:
        """Return the ids of the tag of a line, or of the chosen one, and of its text.

        Raises: ValueError if the line has no tag and needs one, or has another.
        """
        own = self._own(ids)
        text = ids[len(self._ids.get(own, ())) :]
        if not text:
            return [], []
        if self._chosen is not None and own not in ("", self._chosen):
            raise ValueError(
                f"line {number}: expected no other tag than --tag {self._chosen!r}, "
                f"got {own!r}"
            )
        tag = own if self._chosen is None else self._chosen
        if self._ids and tag not in self._ids:
            raise ValueError(
                f"line {number}: expected one of the model's tags {self.names} at its "
                "beginning, or as --tag"
            )
        return list(self._ids.get(tag, ())), text

    def without(self, line: str, ids: list[int]) -> tuple[str, int, int]:
        """Return a line, whose ids are `ids`, without the tag that it begins with.

        With it come how many word pieces its tag has, own or chosen, and the number of
        the first word that is left: 1 if an own tag stands before it as a word, else 0.
        """
        own = self._own(ids)
        tag = own if self._chosen is None else self._chosen
        text = line.strip().removeprefix(own)
        return text, len(self._ids.get(tag, ())), int(text[:1].isspace())

    def _own(self, ids: list[int]) -> str:
        """Return the tag that a line begins with, or nothing."""
        return next(
            (t for t, x in self._ids.items() if x and (*ids[: len(x)],) == x), ""
        )
