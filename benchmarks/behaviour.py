"""How a model behaves on written inputs of many kinds: copies, sentences, loops.

    python benchmarks/behaviour.py --model en-de
    python benchmarks/behaviour.py --model runs/NAME --failures

For each kind of input, the share of lines with each property. `kept`: the translation
has the words that the table names, as often as the source. `sentences`: it has as many
as the source. `no loop`: no three words occur three times. `length`: it is between half
and twice that of the source (and 15 characters). Numbers may change their punctuation:
1,234.5 in English is 1.234,5 in German.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minitransformer import load, translate

TABLE = Path(__file__).with_name("behaviour.en.txt")
PROPERTIES = "kept", "sentences", "no loop", "length"


@dataclass(frozen=True)
class Case:
    kind: str
    sentences: int  # 0 if they are not counted
    source: str
    kept: tuple[str, ...]


def read_table(path: Path) -> Iterator[Case]:
    kind = ""
    sentences = 0
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.startswith("## "):
            kind, _, count = line[3:].rpartition(": ")
            sentences = int(count)
        elif line and kind:
            source, *kept = line.split("\t")
            yield Case(kind, sentences, source, tuple(kept))


def is_kept(thing: str, source: str, output: str) -> bool:
    """Whether `thing` occurs in the output as often as in the source."""
    if re.fullmatch(r"\d[\d.,:]*", thing):
        digits = re.sub(r"\D", "", thing)
        numbers = [
            re.sub(r"\D", "", number)
            for number in re.findall(r"\d(?:[.,:'\u00a0\u202f ]?\d)*", output)
        ]
        return digits in numbers
    return output.count(thing) >= max(source.count(thing), 1)


def count_sentences(text: str) -> int:
    return len(re.findall(r"[.!?…]+[\"'”“»«)]*(?=\s|$)", text))


def loops(text: str) -> bool:
    words = text.lower().split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return any(triples.count(triple) > 2 for triple in triples)


def check(case: Case, output: str) -> dict[str, bool]:
    """Return for each property that the case has whether it holds."""
    length = len(case.source)
    held = {
        "no loop": not loops(output),
        "length": length / 2 - 15 <= len(output) <= 2 * length + 15 and bool(output),
    }
    if case.kept:
        held["kept"] = all(is_kept(x, case.source, output) for x in case.kept)
    if case.sentences:
        held["sentences"] = count_sentences(output) == case.sentences
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a run, a checkpoint or a shipped model")
    help = "the inputs (default benchmarks/behaviour.en.txt)"
    parser.add_argument("--table", type=Path, default=TABLE, help=help)
    help = "print each line for which something does not hold"
    parser.add_argument("--failures", action="store_true", help=help)
    args = parser.parse_args()
    # Translate all lines, and check the properties of each.
    cases = list(read_table(args.table))
    outputs = translate(load(args.model), [case.source for case in cases])
    held: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for case, output in zip(cases, outputs, strict=True):
        results = check(case, output)
        for name, result in results.items():
            for kind in (case.kind, "all"):
                held[kind][name].append(result)
        if args.failures and not all(results.values()):
            failed = ", ".join(name for name, result in results.items() if not result)
            print(f"{case.kind}: {failed}\n  {case.source}\n  {output}")
    # The share of lines by kind, and of all.
    print(f"| kind | lines | {' | '.join(PROPERTIES)} |")
    print("| --- |" + " ---: |" * (1 + len(PROPERTIES)))
    for kind, shares in sorted(held.items(), key=lambda item: item[0] == "all"):
        cells = (
            f"{sum(shares[name]) / len(shares[name]):.0%}" if shares[name] else ""
            for name in PROPERTIES
        )
        print(f"| {kind} | {len(shares['length'])} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
