"""Decoding speed: this engine, PyTorch with a key/value cache, and CTranslate2.

    python benchmarks/decode_speed.py --run runs/m30k --input test_2016_flickr.en.gz
    python benchmarks/decode_speed.py --shape base

All sides run the same weights, each in another process, in alternating rounds.
The medians and the ratios within a round are printed as JSON. The speed counts the
output tokens of the best hypotheses, EOS included, over the time of decoding alone.
`same` is the share of translations that equal this engine's; CTranslate2 divides scores
by length^p, the others by the paper's penalty. PyTorch decodes each batch until its
last sentence ends; with `-drop`, sentences leave the batch when they end. CTranslate2
runs in each type of number that it supports on the processor. With --shape the weights
are random and every output is as long as the input.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import alternate, can_compute_in, medians, ratio, report, watched_memory

from minitransformer.backends.devices import ONEDNN, open_device
from minitransformer.commands import export
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.models import find_checkpoint
from minitransformer.settings.config import EOS_ID, PAD_ID, ModelConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS
from minitransformer.system.machine import num_cores, tune_allocator
from minitransformer.system.workers import limit_threads
from minitransformer.text.lines import read_lines
from minitransformer.translation.batch_translation import translate_ids

SHAPES = {  # preset: its vocabulary here, sentences, tokens of each
    "base": (37_000, 128, 28),
    "multi30k": (10_000, 1000, 15),
}
CTRANSLATE2 = ("float32", "bfloat16", "int16", "int8", "int8_bfloat16")
# The names of the ratios in each precision of this engine, and its side.
OURS = {"speed_over": "ours"}
OURS |= {f"{kind}_speed_over": f"ours-{kind}" for kind in ONEDNN}
SIDES = (
    *OURS.values(),
    "pytorch",
    "pytorch-drop",
    *(f"ctranslate2-{kind}" for kind in CTRANSLATE2),
)
Sentences = list[list[int]]


def workload(args: argparse.Namespace) -> tuple[Transformer, list[str], Sentences, int]:
    """Return model, word pieces, source sentences, and the longest output (0: any)."""
    if args.run:
        trained = checkpoint.load(find_checkpoint(args.run))
        lines = list(read_lines(args.input))[: args.sentences]
        tokenizer = trained.tokenizer
        return trained.model, tokenizer.all_pieces(), tokenizer.encode(lines), 0
    # Random weights, and random sentences of one length.
    vocab_size, sentences, length = SHAPES[args.shape]
    sentences = args.sentences or sentences
    length = args.length or length
    sizes = {"vocab_size": vocab_size}
    model = Transformer(make_config(ModelConfig, PRESETS[args.shape], sizes), seed=1)
    model.embedding.table.data[EOS_ID] = 0  # never among the best: no output ends early
    ParameterBuffer(model)  # in which bf16 finds its parameters
    pieces = ["<pad>", "<unk>", "<s>", "</s>", *map(str, range(4, vocab_size))]
    rng = np.random.default_rng(0)
    source = rng.integers(4, vocab_size, (sentences, length))
    return model, pieces, source.tolist(), length


def ours(args: argparse.Namespace) -> Callable[[Sentences], Sentences]:
    tune_allocator()
    kind = args.side.partition("-")[2]
    open_device("cpu", kind if kind in ONEDNN else "fp32")
    # Beam search as in the paper; random weights write outputs of one length.
    model, _, _, longest = workload(args)
    limit: dict[str, Any] = {}
    if longest:
        limit = {"max_len_a": 0.0, "max_len_b": longest - 1}
    config = DecodingConfig(
        beam=args.beam, alpha=0.6, decode_tokens=args.decode_tokens, **limit
    )

    def decode(sources: Sentences) -> Sentences:
        with limit_threads(args.threads):  # as translate.py does
            ranked = translate_ids(model, sources, config, args.threads)
        return [list(hypotheses[0].tokens) for hypotheses in ranked]

    decode([[EOS_ID]])  # rounds the parameters, which forked processes then share
    return decode


def pytorch(args: argparse.Namespace) -> Callable[[Sentences], Sentences]:
    import torch
    from torch_decoder import TorchDecoder

    torch.set_num_threads(args.threads)
    model, _, _, longest = workload(args)
    decoder = TorchDecoder(model, drop_finished=args.side == "pytorch-drop")

    def decode(sources: Sentences) -> Sentences:
        # Batches of sentences of similar length, the longest first.
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        results: Sentences = [[] for _ in sources]
        while order:
            width = len(sources[order[0]]) + 1
            size = max(1, args.decode_tokens // args.beam // width)
            chosen, order = order[:size], order[size:]
            batch = np.full((len(chosen), width), PAD_ID)
            for row, i in enumerate(chosen):
                batch[row, : len(sources[i]) + 1] = [*sources[i], EOS_ID]
            limits = [longest or len(sources[i]) + 51 for i in chosen]
            outputs = decoder.search(torch.from_numpy(batch), limits, args.beam, 0.6)
            for i, tokens in zip(chosen, outputs, strict=True):
                results[i] = tokens
        return results

    return decode


def ctranslate2(args: argparse.Namespace) -> Callable[[Sentences], Sentences]:
    import ctranslate2

    # Its translator reads and writes word pieces.
    _, pieces, _, longest = workload(args)
    ids = {piece: i for i, piece in enumerate(pieces)}
    translator = ctranslate2.Translator(
        str(args.workspace / "ctranslate2"),
        compute_type=args.side.partition("-")[2],
        inter_threads=args.threads,
        intra_threads=1,
    )
    limits = {"max_decoding_length": longest, "min_decoding_length": longest}

    def decode(sources: Sentences) -> Sentences:
        results = translator.translate_batch(
            [[pieces[i] for i in line] for line in sources],
            beam_size=args.beam,
            length_penalty=0.6,
            batch_type="tokens",
            max_batch_size=args.ctranslate2_tokens,
            **(limits if longest else {}),
        )
        return [[ids[piece] for piece in result.hypotheses[0]] for result in results]

    return decode


def measure(args: argparse.Namespace) -> None:
    """Run one side, keep its output, print its figures."""
    # A tenth of the sentences first, for what is compiled or allocated once.
    engine = {"ours": ours, "pytorch": pytorch, "ctranslate2": ctranslate2}
    decode = engine[args.side.partition("-")[0]](args)
    *_, sources, longest = workload(args)
    decode(sources[: max(8, len(sources) // 10)])
    with watched_memory() as peak_memory_mb:
        started = time.perf_counter()
        outputs = decode(sources)
        seconds = time.perf_counter() - started
    # Keep the outputs, for the share that is the same on all sides.
    (args.workspace / f"{args.side}.json").write_text(json.dumps(outputs))
    tokens = sum(len(line) + (not longest) for line in outputs)
    figures = {
        "tokens_per_second": tokens / seconds,
        "sentences_per_second": len(sources) / seconds,
        "peak_memory_mb": peak_memory_mb(),
    }
    print(json.dumps(figures))


def same(workspace: Path, side: str) -> float:
    outputs = [
        json.loads((workspace / f"{s}.json").read_text()) for s in ("ours", side)
    ]
    return round(float(np.mean([a == b for a, b in zip(*outputs, strict=True)])), 4)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--run", type=Path, help="a run directory or checkpoint")
    parser.add_argument("--input", type=Path, help="the text to translate with --run")
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead")
    parser.add_argument("--sentences", type=int, help="how many (default all)")
    parser.add_argument("--length", type=int, help="tokens of each, with --shape")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument(
        "--decode-tokens", type=int, default=DecodingConfig.decode_tokens
    )
    parser.add_argument("--ctranslate2-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--workspace", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if bool(args.run) == bool(args.shape) or bool(args.run) != bool(args.input):
        parser.error("expected --run with --input, or --shape")
    if not args.sides:
        args.sides = [side for side in SIDES if is_possible(side)]
    return args


def is_possible(side: str) -> bool:
    """Whether the processor has the kind of number that a side needs."""
    import ctranslate2

    name, _, kind = side.partition("-")
    if name == "ctranslate2":
        return kind in ctranslate2.get_supported_compute_types("cpu")
    return name != "ours" or not kind or can_compute_in(kind)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if args.side:
        measure(args)
        return
    with tempfile.TemporaryDirectory() as directory:
        # All sides get the same weights, and run in turns.
        workspace = Path(directory)
        model, pieces, sources, _ = workload(args)
        export.to_ctranslate2(model, pieces, workspace / "ctranslate2", "float32")
        arguments = [*sys.argv[1:], "--workspace", directory]
        results = alternate(__file__, args.sides, arguments, args.rounds)
        figures = {side: medians(rounds) for side, rounds in results.items()}
        others = [side for side in args.sides if side != "ours"]
        best = max(
            (side for side in others if side.startswith("ctranslate2")),
            key=lambda side: figures[side]["tokens_per_second"],
            default=None,
        )
        # The ratios of speeds, for each precision of this engine.
        speed_over = {}
        for name, ours in OURS.items():
            if ours in results:
                speed_over[name] = {
                    side: ratio(results[ours], results[side], "tokens_per_second")
                    for side in others
                    if side != ours
                }
        report(
            "decode_speed",
            model=str(args.run or args.shape),
            sentences=len(sources),
            beam=args.beam,
            threads=args.threads,
            rounds=args.rounds,
            **figures,
            **speed_over,
            best_of_ctranslate2=best,
            same={side: same(workspace, side) for side in others},
        )


if __name__ == "__main__":
    main()
