"""Latency: one sentence after the other, by this engine and by CTranslate2.

    python benchmarks/latency.py
    python benchmarks/latency.py --model de-en --input lines.de --rounds 5

All sides translate the same lines with the same model, each in another process with one
thread, in alternating rounds. A latency is that from the text to its translation. The
median, the 95th percentile and the milliseconds for each token that is written are
printed as JSON, for beams of 4 and of 1, and so are the ratios within a round. `cold`
is the time to load the model and to translate the first line. `calls` counts the calls
of functions, also of those in C, for each step of the search. Then `translate.py` as a
process, and a server with one client.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from behaviour import TABLE, read_table
from harness import alternate, can_compute_in, medians, ratio, report
from serve import SCRIPT, serving
from serve import measure as ask_server

from minitransformer import load, translate
from minitransformer.commands import export
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.models import find_checkpoint
from minitransformer.text.lines import read_lines

# The kinds of lines of behaviour.en.txt that are plain sentences.
KINDS = "everyday", "questions", "negation", "instructions"
LINES = 45

BEAMS = 4, 1
OURS = "fp32", "bf16", "int8"
CTRANSLATE2 = "float32", "int8"
SIDES = (
    *(f"ours-{kind}" for kind in OURS),
    *(f"ctranslate2-{kind}" for kind in CTRANSLATE2),
)

Translate = Callable[[str, int], str]  # of a line, with a beam


def ours(args: argparse.Namespace, kind: str) -> Translate:
    translator = load(args.model, precision=kind, threads=1)
    return lambda line, beam: translate(translator, [line], beam=beam)[0]


def ctranslate2(args: argparse.Namespace, kind: str) -> Translate:
    import ctranslate2

    # It reads and writes word pieces.
    tokenizer = checkpoint.load(find_checkpoint(Path(args.model))).tokenizer
    pieces = tokenizer.all_pieces()
    ids = {piece: i for i, piece in enumerate(pieces)}
    translator = ctranslate2.Translator(
        str(args.workspace / "ctranslate2"),
        compute_type=kind,
        inter_threads=1,
        intra_threads=1,
    )

    def translated(line: str, beam: int) -> str:
        [source] = tokenizer.encode([line])
        [result] = translator.translate_batch(
            [[pieces[i] for i in source]], beam_size=beam, length_penalty=1.0
        )
        return tokenizer.decode([[ids[piece] for piece in result.hypotheses[0]]])[0]

    return translated


def calls_a_step(translated: Translate, line: str, beam: int) -> float:
    """Return how many functions are called for each step of the search for a line."""
    with cProfile.Profile() as profile:
        translated(line, beam)
    stats: Any = pstats.Stats(profile)
    wanted = Transformer.decode_step.__name__
    steps = sum(x[1] for (*_, name), x in stats.stats.items() if name == wanted)
    return round(stats.total_calls / steps)


def measure(args: argparse.Namespace) -> None:
    """Run one side, and print its figures."""
    engine, _, kind = args.side.partition("-")
    lines = json.loads((args.workspace / "lines.json").read_text())
    tokenizer = checkpoint.load(find_checkpoint(Path(args.model))).tokenizer
    started = time.perf_counter()
    translated = {"ours": ours, "ctranslate2": ctranslate2}[engine](args, kind)
    translated(lines[0], BEAMS[0])
    figures = {"cold_ms": 1000 * (time.perf_counter() - started)}
    for beam in BEAMS:
        # The first time, what is compiled for a length is compiled.
        outputs = [translated(line, beam) for line in lines]
        tokens = sum(map(len, tokenizer.encode(outputs))) + len(outputs)  # EOS, too
        milliseconds = []
        for _ in range(args.passes):
            for line in lines:
                started = time.perf_counter()
                translated(line, beam)
                milliseconds.append(1000 * (time.perf_counter() - started))
        median, p95 = np.percentile(milliseconds, [50, 95]).tolist()
        figures[f"beam{beam}_median_ms"] = median
        figures[f"beam{beam}_p95_ms"] = p95
        figures[f"beam{beam}_ms_a_token"] = sum(milliseconds) / args.passes / tokens
        if engine == "ours":
            figures[f"beam{beam}_calls"] = calls_a_step(translated, lines[-1], beam)
    print(json.dumps(figures))


def process_seconds(model: str, line: str, rounds: int) -> float:
    """Return the median time of `translate.py` from its start to its end."""
    command = [sys.executable, str(SCRIPT), "--model", model, "--threads", "1", line]
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds[1:]), 3)  # the first reads from the disk


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="en-de")
    parser.add_argument(
        "--input", type=Path, help="the lines (default plain ones of behaviour.en.txt)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds")
    parser.add_argument("--passes", type=int, default=2, help="over the lines of each")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--workspace", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not args.sides:
        missing = {f"ours-{kind}" for kind in OURS[1:] if not can_compute_in(kind)}
        args.sides = [side for side in SIDES if side not in missing]
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if args.side:
        measure(args)
        return
    if args.input:
        lines = [line for line in read_lines(args.input) if line.strip()]
    else:
        lines = [case.source for case in read_table(TABLE) if case.kind in KINDS]
    lines = lines[:LINES]
    with tempfile.TemporaryDirectory() as directory:
        # All sides get the same lines and weights, and run in turns.
        workspace = Path(directory)
        (workspace / "lines.json").write_text(json.dumps(lines))
        trained = checkpoint.load(find_checkpoint(Path(args.model)))
        pieces = trained.tokenizer.all_pieces()
        export.to_ctranslate2(
            trained.model, pieces, workspace / "ctranslate2", "float32"
        )
        arguments = [*sys.argv[1:], "--workspace", directory]
        results = alternate(__file__, args.sides, arguments, args.rounds)
    # The ratios of each side to the best of CTranslate2, and to its float32.
    over = {}
    for other in (f"ctranslate2-{kind}" for kind in CTRANSLATE2):
        if other in results:
            over[f"over_{other}"] = {
                side: {
                    f"beam{beam}": ratio(found, results[other], f"beam{beam}_median_ms")
                    for beam in BEAMS
                }
                for side, found in results.items()
                if side != other
            }
    with serving(args.model, args.port, lines[0]) as address:
        server = ask_server(address, lines, clients=1, seconds=10)
    report(
        "latency",
        model=args.model,
        lines=len(lines),
        **{side: medians(found) for side, found in results.items()},
        **over,
        process_seconds=process_seconds(args.model, lines[0], args.rounds + 1),
        server=server,
    )


if __name__ == "__main__":
    main()
