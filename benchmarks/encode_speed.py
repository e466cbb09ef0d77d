"""Encoding a corpus: this engine's cache against SentencePiece's own time.

    python benchmarks/encode_speed.py --train-source FILE --train-target FILE

SentencePiece reads the same lines and encodes them with as many threads; this engine
also checks the text, makes arrays of the ids, computes checksums and writes them. The
JSON has the sentences per second of each engine, counted on both sides of the corpus,
the peak resident memory, and the ratio of the times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

from harness import alternate, medians, peak_memory_mb, ratio, report

from minitransformer.settings.config import TrainingConfig
from minitransformer.settings.options import make_config
from minitransformer.system.machine import num_cores
from minitransformer.text.batches import BatchStream
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.lines import read_lines
from minitransformer.text.pairs import TextPair
from minitransformer.text.tokenizer import Tokenizer

SIDES = ("ours", "sentencepiece")


def encode(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, float]:
    """Write the cache, then read a thousand batches of an epoch from it."""
    pair = TextPair(args.train_source, args.train_target)
    with tempfile.TemporaryDirectory(dir=args.train_source.parent) as cache:
        started = time.perf_counter()
        corpus = encoded_corpus(pair, tokenizer, Path(cache), args.threads)
        seconds = time.perf_counter() - started
        peak = peak_memory_mb()
        stream = BatchStream(
            corpus, make_config(TrainingConfig, {}, {"max_tokens": 25_000})
        )
        for _ in range(1000):
            next(stream)
        return {
            "sentences": 2 * len(corpus),
            "seconds": seconds,
            "peak_memory_mb": peak,
            "peak_memory_with_batches_mb": peak_memory_mb(),
        }


def only_encode(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, float]:
    """Encode the lines in chunks and discard their ids."""
    sentences, started = 0, time.perf_counter()
    for path in (args.train_source, args.train_target):
        lines = read_lines(path)
        while chunk := list(itertools.islice(lines, 50_000)):
            sentences += len(tokenizer.encode(chunk, args.threads))
    return {
        "sentences": sentences,
        "seconds": time.perf_counter() - started,
        "peak_memory_mb": peak_memory_mb(),
        "peak_memory_with_batches_mb": peak_memory_mb(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-source", type=Path, required=True)
    parser.add_argument("--train-target", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        tokenizer = Tokenizer(args.tokenizer.read_bytes())
        side = encode if args.side == "ours" else only_encode
        figures = side(args, tokenizer)
        rate = figures.pop("sentences") / figures["seconds"]
        print(json.dumps({"sentences_per_second": rate, **figures}))
        return
    lines = itertools.chain.from_iterable(
        itertools.islice(read_lines(path), 100_000)
        for path in (args.train_source, args.train_target)
    )
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(Tokenizer.train(lines, args.vocab_size, args.threads).model)
        file.flush()
        flags = [
            *("--train-source", str(args.train_source)),
            *("--train-target", str(args.train_target)),
            *("--threads", str(args.threads)),
            *("--tokenizer", file.name),
        ]
        found = alternate(__file__, SIDES, flags, args.rounds)
    report(
        "encode_speed",
        threads=args.threads,
        rounds=args.rounds,
        **{side: medians(results) for side, results in found.items()},
        time_over_sentencepiece=ratio(found["ours"], found["sentencepiece"], "seconds"),
    )


if __name__ == "__main__":
    main()
