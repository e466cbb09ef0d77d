"""Print what the card of a model says of its quality: BLEU and chrF, and examples.

    python examples/en-de/card.py en-de "Tatoeba" test.en.gz test.de.gz \
        "newstest2013 (news)" news.en news.de

After the model come three arguments for each text: a title, the source, the reference.
The first text is also tested with two and five of its lines as one paragraph, in lower
case and in capitals. The examples are those of its lines of at least five words that
stand at five places in the order of chrF, from the worst to the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import sacrebleu

from minitransformer import load, translate
from minitransformer.text.lines import read_lines

SHARES = 0.05, 0.25, 0.5, 0.75, 0.95


def joined(lines: Sequence[str], count: int) -> list[str]:
    return [" ".join(lines[i : i + count]) for i in range(0, len(lines), count)]


def print_examples(source: list[str], outputs: list[str], reference: list[str]) -> None:
    """Print translations that are better than given shares of all, by chrF."""
    scored = sorted(
        (sacrebleu.sentence_chrf(output, [expected]).score, line, output, expected)
        for line, output, expected in zip(source, outputs, reference, strict=True)
        if len(line.split()) >= 5
    )
    print("\n| better than | source | translation | reference |")
    print("| ---: | --- | --- | --- |")
    for share in SHARES:
        _, *cells = scored[int(share * len(scored))]
        print(f"| {share:.0%} of the lines | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a run, a checkpoint or a shipped model")
    help = "for each text its title, the source and the reference"
    parser.add_argument("texts", nargs="+", help=help)
    args = parser.parse_args()
    model = load(args.model, threads=2)
    texts = {
        title: (list(read_lines(Path(source))), list(read_lines(Path(reference))))
        for title, source, reference in zip(*[iter(args.texts)] * 3, strict=True)
    }
    first, (source, reference) = next(iter(texts.items()))
    outputs = dict[str, list[str]]()
    for count, words in ((2, "two"), (5, "five")):
        pair = joined(source, count), joined(reference, count)
        texts[f"{first}, {words} sentences a line"] = pair
    lower = [line.lower() for line in source]
    texts[f"{first}, the source in lower case"] = lower, reference
    upper = [line.upper() for line in source], [line.upper() for line in reference]
    texts[f"{first}, in capitals"] = upper
    print("| text | lines | BLEU | chrF |\n| --- | ---: | ---: | ---: |")
    for title, (lines, expected) in texts.items():
        outputs[title] = translate(model, lines)
        scores = (
            metric(outputs[title], [expected]).score
            for metric in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf)
        )
        cells = " | ".join(f"{score:.2f}" for score in scores)
        print(f"| {title} | {len(lines):,} | {cells} |", flush=True)

    print_examples(source, outputs[first], reference)


if __name__ == "__main__":
    main()
