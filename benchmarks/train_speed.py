"""Training speed and memory of this engine and of PyTorch, doing the same work.

    python benchmarks/train_speed.py --shape d256
    python benchmarks/train_speed.py --shape multi30k --data data/multi30k

Each side runs in a process of its own, in alternating rounds. Marian is a side where
the package pymarian is installed. The medians and the
ratios within a round are printed as JSON. PyTorch's side is `nn.Transformer` (without a
final norm, with dropout where this engine has it) with fused Adam, the same embedding
and label-smoothed loss, and padding masks where there is padding. It runs in four
modes: float32, bfloat16 by `torch.autocast`, and both compiled by `torch.compile`. The
ratio that counts is the one over the mode with the highest median. A side `products`
computes only the matrix products of the step, in the faster of two ways: whole, with
the threads of BLAS, or cut into one part for each thread. Where there is oneDNN, this
engine also multiplies in bf16 if the processor can. The speed
counts source and target tokens without padding. The shape multi30k trains the preset of
that name on real batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from harness import alternate, can_compute_in, medians, ratio, report, watched_memory
from threadpoolctl import threadpool_limits

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
SIDES = (*OURS, "products", *PYTORCH, "marian")
Step = Callable[[Batch], float]


def workload(args: argparse.Namespace) -> tuple[ModelConfig, list[Batch]]:
    """Return the shape of the model, and a batch for each step."""
    steps = args.steps + args.warmup
    rng = np.random.default_rng(0)
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
    config = make_config(ModelConfig, PRESETS["multi30k"], {})
    files = [args.data / f"train.{side}.gz" for side in ("en", "de")]
    pair = TextPair(*(f if f.exists() else f.with_suffix("") for f in files))
    tokenizer = cached_tokenizer(pair, config.vocab_size, args.cache, args.threads)
    corpus = encoded_corpus(pair, tokenizer, args.cache, args.threads)
    batches = corpus.batch_by_length(np.arange(len(corpus)), 4096, rng)
    return config, [corpus.batch(batches[i]) for i in range(steps)]


def ours(config: ModelConfig, threads: int, side: str = "ours") -> Step:
    tune_allocator()
    open_device("cpu", side.partition("-")[2] or "fp32")
    model = Transformer(config)
    parameters = ParameterBuffer(model)
    computed = CpuModel(model, parameters, threads)
    adam = Adam(parameters.data, 0.9, 0.98, 1e-9, None, threads, computed.map)

    def step(batch: Batch) -> float:
        loss = computed.forward_backward([batch], 0.1, (1, adam.steps))
        adam.update(parameters.grad, 1e-4)
        return loss

    return step


def pytorch(config: ModelConfig, threads: int, mode: str = "pytorch") -> Step:
    from torch_training import TorchUpdates

    return TorchUpdates(Transformer(config, seed=1), threads, mode).update


def products(config: ModelConfig, threads: int) -> Step:
    """Compute the products that `product_operands` lists, and discard the results."""
    tune_allocator()
    pool = ThreadPoolExecutor(threads)
    operands: dict[tuple[int, ...], list[tuple[np.ndarray, ...]]] = {}

    def multiply(key: tuple[int, ...], part: Batch) -> None:
        if key not in operands:
            operands[key] = list(product_operands(config, part))
        for a, b, out in operands[key]:
            np.matmul(a, b, out=out)

    def step(batch: Batch) -> float:
        parts = batch.split(threads)
        times = []
        for pieces, blas in (([batch], threads), (parts, 1)):
            keys = [(n, *p.source.shape, *p.target.shape) for n, p in enumerate(pieces)]
            with threadpool_limits(blas):
                list(pool.map(multiply, keys, pieces))
                started = time.perf_counter()
                list(pool.map(multiply, keys, pieces))
                times.append(time.perf_counter() - started)
            operands.clear()
        return min(times)

    return step


# (a, b, out) of matrix products.
Products = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]


def product_operands(config: ModelConfig, batch: Batch) -> Products:
    """Yield (a, b, out) of every matrix product of a step, forward and backward."""
    sentences, length = batch.source.shape
    outputs = batch.target.shape[1] - 1
    source, target = sentences * length, sentences * outputs
    d, ff, heads = config.d_model, config.d_ff, config.num_heads
    keys, values = heads * config.key_width, heads * config.value_width
    arrays: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}

    def array(role: str, *shape: int) -> np.ndarray:
        if (role, shape) not in arrays:
            arrays[role, shape] = np.full(shape, 0.01, np.float32)
        return arrays[role, shape]

    def linear(rows: int, n: int, m: int) -> Products:
        x, weight, y = array("x", rows, n), array("w", n, m), array("y", rows, m)
        yield x, weight, y
        yield y, weight.T, array("dx", rows, n)
        yield x.T, y, array("dw", n, m)

    def attention(queries: int, memory: int) -> Products:
        q, k, v, out = (
            array(role, sentences, rows, heads, width // heads).swapaxes(1, 2)
            for role, rows, width in (
                ("q", queries, keys),
                ("k", memory, keys),
                ("v", memory, values),
                ("o", queries, values),
            )
        )
        weights = array("scores", sentences, heads, queries, memory)
        yield q, k.swapaxes(-1, -2), weights
        yield weights, v, out
        yield weights.swapaxes(-1, -2), out, v
        yield out, v.swapaxes(-1, -2), weights
        yield weights, k, q
        yield weights.swapaxes(-1, -2), q, k

    def block(queries: int, memory: int, query_rows: int, memory_rows: int) -> Products:
        yield from linear(query_rows, d, keys)
        yield from linear(memory_rows, d, keys)
        yield from linear(memory_rows, d, values)
        yield from attention(queries, memory)
        yield from linear(query_rows, values, d)

    def feed_forward(rows: int) -> Products:
        yield from linear(rows, d, ff)
        yield from linear(rows, ff, d)

    for _ in range(config.encoder_layers):
        yield from block(length, length, source, source)
        yield from feed_forward(source)
    for _ in range(config.decoder_layers):
        yield from block(outputs, outputs, target, target)
        yield from block(outputs, length, target, source)
        yield from feed_forward(target)
    predicted = batch.target_tokens
    table = array("table", config.vocab_size, d)
    logits, rows = array("l", predicted, config.vocab_size), array("r", predicted, d)
    yield rows, table.T, logits
    yield logits, table, array("dr", predicted, d)
    yield logits.T, rows, array("dt", config.vocab_size, d)


def measure(args: argparse.Namespace) -> None:
    """Run one side and print its figures."""
    config, batches = workload(args)
    if args.side == "marian":
        from marian_training import marian

        print(json.dumps(marian(config, batches, args.warmup, args.threads)))
        return
    if args.side == "products":
        step = products(config, args.threads)
    else:
        side = ours if args.side in OURS else pytorch
        step = side(config, args.threads, args.side)
    if "compiled" in args.side:
        list(map(step, batches))  # compiles for the shapes of all batches
    seconds = []
    with watched_memory() as peak_memory_mb:
        for batch in batches:
            started = time.perf_counter()
            result = step(batch)
            seconds.append(time.perf_counter() - started)
            if args.side == "products":
                seconds[-1] = result
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
    possible = [precision for precision in PRECISIONS if can_compute_in(precision)]
    sides = ["ours", *(f"ours-{x}" for x in possible), "products", *args.modes]
    if find_spec("pymarian"):
        sides.append("marian")
    found = alternate(__file__, sides, sys.argv[1:], args.rounds)
    speeds = {side: medians(found[side])["tokens_per_second"] for side in args.modes}
    best = max(speeds, key=speeds.__getitem__)
    ours = found["ours"]
    by_precision = {
        f"{x}_{name}_over_{other}": ratio(found[f"ours-{x}"], found[side], key)
        for x in possible
        for side, other in (("ours", "float32"), (best, "best_of_pytorch"))
        for name, key in (("speed", "tokens_per_second"), ("memory", "peak_memory_mb"))
    }
    over_marian = {
        f"{kind}speed_over_marian": ratio(
            found[side], found["marian"], "tokens_per_second"
        )
        for kind, side in zip(["", *(f"{x}_" for x in possible)], sides, strict=False)
        if "marian" in found
    }
    report(
        "train_speed",
        shape=args.shape,
        threads=args.threads,
        rounds=args.rounds,
        **{side: medians(results) for side, results in found.items()},
        speed_over_pytorch={
            mode: ratio(ours, found[mode], "tokens_per_second") for mode in args.modes
        },
        best_of_pytorch=best,
        speed_over_best_of_pytorch=ratio(ours, found[best], "tokens_per_second"),
        share_of_matrix_products=ratio(ours, found["products"], "tokens_per_second"),
        memory_over_pytorch=ratio(ours, found[best], "peak_memory_mb"),
        **by_precision,
        **over_marian,
    )


if __name__ == "__main__":
    main()
