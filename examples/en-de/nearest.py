"""Choose, of a model's n best translations of lines, those nearest to the references.

    python nearest.py nbest.de train.de.gz > nearest.de

The first file is what `translate.py --nbest` writes. What a model writes varies less
than what people write, and is easier to learn: sequence-level interpolation (Kim and
Rush, 2016, section 3.3), here by chrF.
"""

import argparse
import itertools
import multiprocessing
from pathlib import Path

from sacrebleu.metrics import CHRF

from minitransformer.text.lines import read_lines

METRIC = CHRF()


def nearest(case: tuple[list[str], str]) -> str:
    """Return the text that is nearest to the reference."""
    texts, reference = case
    return max(texts, key=lambda x: METRIC.sentence_score(x, [reference]).score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("nbest", type=Path, help="lines of translate.py --nbest")
    parser.add_argument("references", type=Path)
    args = parser.parse_args()
    rows = (line.split(" ||| ") for line in read_lines(args.nbest))
    groups = itertools.groupby(rows, key=lambda row: row[0])
    texts = ([" ||| ".join(row[1:-1]) for row in best] for _, best in groups)
    cases = zip(texts, read_lines(args.references), strict=True)
    with multiprocessing.Pool() as pool:
        for line in pool.imap(nearest, cases, chunksize=500):
            print(line)


if __name__ == "__main__":
    main()
