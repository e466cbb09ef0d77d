"""Training speed and memory of this engine and of PyTorch, doing the same work.

    python benchmarks/train_speed.py --shape d256
    python benchmarks/train_speed.py --shape multi30k --data data/multi30k

Each side runs in another process, in alternating rounds. The medians and the ratios
within a round are printed as JSON. PyTorch's side is `nn.Transformer` (without a final
norm, with dropout where this engine has it) with fused Adam, the same embedding and
label-smoothed loss, and padding masks where there is padding. It runs in four modes:
float32, bfloat16 by `torch.autocast`, and both compiled by `torch.compile`. The ratio
that counts is the one over the mode with the highest median. Marian is a side if the
package pymarian is installed. With oneDNN, this engine also multiplies in bf16 if the
processor can. The speed counts source and target tokens without padding. The shape
multi30k trains the preset of that name on real batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    Result,
    alternate,
    can_compute_in,
    medians,
    ratio,
    report,
    watched_memory,
)

from minitransformer.backends.devices import open_device
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS
from minitransformer.system.machine import num_cores, tune_allocator
from minitransformer.text.batches import Batch
from minitransformer.text.cache import cached_tokenizer, encoded_corpus
from minitransformer.text.pairs import TextPair
from minitransformer.training.optimizer import Adam
from minitransformer.training.parallel import CpuModel

SHAPES = {  # d_model, d_ff, heads, layers of each stack, sentences, tokens a sentence
    "d128": (128, 256, 4, 4, 145, 14),
    "d256": (256, 1024, 4, 3, 64, 20),
    "d512": (512, 2048, 8, 6, 50, 32),
}
VOCAB_SIZE = 8000
PYTORCH = ("pytorch", "pytorch-bf16", "pytorch-compiled", "pytorch-compiled-bf16")
PRECISIONS = ("bf16",)  # besides that of "ours", NumPy's float32
OURS = ("ours", *(f"ours-{precision}" for precision in PRECISIONS))
SIDES = (*OURS, *PYTORCH, "marian")
Step = Callable[[Batch], float]


def workload(args: argparse.Namespace) -> tuple[ModelConfig, list[Batch]]:
    """Return the shape of the model, and a batch for each step."""
    steps = args.steps + args.warmup
    rng = np.random.default_rng(0)
    # Random sentences of one length, without padding.
    if args.shape in SHAPES:
        d, ff, heads, layers, sentences, length = SHAPES[args.shape]
        config = ModelConfig(
            vocab_size=VOCAB_SIZE,
            encoder_layers=layers,
            decoder_layers=layers,
            d_model=d,
            d_ff=ff,
            num_heads=heads,
        )
        source = rng.integers(4, VOCAB_SIZE, (sentences, length))
        target = rng.integers(4, VOCAB_SIZE, (sentences, length + 1))
        return config, [Batch(source, target)] * steps
    # Multi30k, in batches of sentences of similar length.
    config = make_config(ModelConfig, PRESETS["multi30k"], {})
    files = [args.data / f"train.{side}.gz" for side in ("en", "de")]
    pair = TextPair(*(f if f.exists() else f.with_suffix("") for f in files))
    tokenizer = cached_tokenizer(pair, config.vocab_size, args.cache, args.threads)
    corpus = encoded_corpus(pair, tokenizer, args.cache, args.threads)
    batches = corpus.batch_by_length(np.arange(len(corpus)), 4096, rng)
    return config, [corpus.batch(batches[i]) for i in range(steps)]


def ours(config: ModelConfig, threads: int, side: str = "ours") -> Step:
    # The parts of a training, as train.py has them.
    tune_allocator()
    open_device("cpu", side.partition("-")[2] or "fp32")
    model = Transformer(config)
    parameters = ParameterBuffer(model)
    computed = CpuModel(model, parameters, threads)
    adam = Adam(
        parameters.data,
        beta1=0.9,
        beta2=0.98,
        epsilon=1e-9,
        num_threads=threads,
        map=computed.map,
    )

    def step(batch: Batch) -> float:
        loss = computed.forward_backward([batch], 0.1, (1, adam.steps))
        adam.update(parameters.grad, 1e-4)
        return loss

    return step


def pytorch(config: ModelConfig, threads: int, mode: str = "pytorch") -> Step:
    from torch_training import TorchUpdates

    return TorchUpdates(Transformer(config, seed=1), threads, mode).update


def measure(args: argparse.Namespace) -> None:
    """Run one side and print its figures."""
    config, batches = workload(args)
    if args.side == "marian":
        from marian_training import marian

        print(json.dumps(marian(config, batches, args.warmup, args.threads)))
        return
    side = ours if args.side in OURS else pytorch
    step = side(config, args.threads, args.side)
    if "compiled" in args.side:
        list(map(step, batches))  # compiles for the shapes of all batches
    seconds = []
    with watched_memory() as peak_memory_mb:
        for batch in batches:
            started = time.perf_counter()
            step(batch)
            seconds.append(time.perf_counter() - started)
    # The median speed of the steps after the warm-up.
    timed = slice(args.warmup, None)
    tokens = [b.source_tokens + b.target_tokens for b in batches[timed]]
    speeds = [n / s for n, s in zip(tokens, seconds[timed], strict=True)]
    figures = {
        "tokens_per_second": statistics.median(speeds),
        "peak_memory_mb": peak_memory_mb(),
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", choices=(*SHAPES, "multi30k"), default="d256")
    parser.add_argument("--data", type=Path, help="directory of train.en and train.de")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--modes", nargs="+", choices=PYTORCH, default=PYTORCH)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shape == "multi30k" and args.data is None:
        parser.error("--shape multi30k needs --data")
    if args.side:
        measure(args)
        return
    # All sides that this machine has, in turns.
    precisions = [x for x in PRECISIONS if can_compute_in(x)]
    sides = ["ours", *(f"ours-{x}" for x in precisions), *args.modes]
    if find_spec("pymarian"):
        sides.append("marian")
    results = alternate(__file__, sides, sys.argv[1:], args.rounds)
    report(
        "train_speed",
        shape=args.shape,
        threads=args.threads,
        rounds=args.rounds,
        **{side: medians(rounds) for side, rounds in results.items()},
        **ratios(results, precisions, args.modes),
    )


def ratios(
    results: dict[str, list[Result]], precisions: Sequence[str], modes: Sequence[str]
) -> dict[str, Any]:
    """Return the ratios of this engine's speed and memory to those of other sides."""
    speed, memory = "tokens_per_second", "peak_memory_mb"
    # In float32, over PyTorch's modes.
    ours = results["ours"]
    best = max(modes, key=lambda mode: medians(results[mode])[speed])
    values = {
        "speed_over_pytorch": {x: ratio(ours, results[x], speed) for x in modes},
        "best_of_pytorch": best,
        "speed_over_best_of_pytorch": ratio(ours, results[best], speed),
        "memory_over_pytorch": ratio(ours, results[best], memory),
    }
    # In other precisions, over float32 and over PyTorch's fastest mode.
    for precision in precisions:
        low = results[f"ours-{precision}"]
        for name, other in (("float32", ours), ("best_of_pytorch", results[best])):
            values[f"{precision}_speed_over_{name}"] = ratio(low, other, speed)
            values[f"{precision}_memory_over_{name}"] = ratio(low, other, memory)
    # In each precision, over Marian.
    if marian := results.get("marian"):
        values["speed_over_marian"] = ratio(ours, marian, speed)
        for precision in precisions:
            low = results[f"ours-{precision}"]
            values[f"{precision}_speed_over_marian"] = ratio(low, marian, speed)
    return values


if __name__ == "__main__":
    main()
