"""The lines that `translate.py` writes for the translations of one line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import Any

from minitransformer.translation.beam_search import Hypothesis


def output_lines(
    args: argparse.Namespace, number: int, texts: list[str], found: list[Hypothesis]
) -> Iterator[str]:
    """Yield the lines of one line's translations: JSON, an n-best list, or text.

    With --alignment, they have the links between words, too.
    """
    aligned = "alignment" in args
    if args.json:
        translations = json_objects(texts, found, aligned)
        answer = {"line": number, "translations": translations}
        yield json.dumps(answer, ensure_ascii=False) + "\n"
        return
    links = [f" ||| {pharaoh(h.alignment)}" if aligned else "" for h in found]
    if getattr(args, "nbest", 1) > 1:
        for text, h, end in zip(texts, found, links, strict=True):
            yield f"{number} ||| {text} ||| {h.score:.4f}{end}\n"
    else:
        yield f"{texts[0]}{links[0]}\n"


def json_objects(
    texts: list[str], found: list[Hypothesis], alignment: bool
) -> list[dict[str, Any]]:
    """Return a line's translations as what is written in JSON for each of them."""
    names = ("score", "log_prob", "alignment")[: 2 + alignment]
    return [
        {"text": text} | {name: getattr(h, name) for name in names}
        for text, h in zip(texts, found, strict=True)
    ]


def pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Return links as text, such as `0-0 1-2`: the format of the decoder Pharaoh."""
    return " ".join(f"{source}-{target}" for source, target in links)
