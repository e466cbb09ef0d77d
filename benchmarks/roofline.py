"""What a GPU must do in a training step, counted, and how long that takes at least.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --config big --card h200
    python benchmarks/roofline.py --measure      # on a GPU: how long it really takes

The step runs without a GPU: nothing is computed, and each product and kernel is
counted by its arguments. A row gives calls, gigabytes read and written, operations of
products, and the instructions that warps run, in kernels for which these may be the
limit. The least time of a call is the largest of three: bytes at the card's bandwidth,
operations at its rate of large products, instructions at that of its multiprocessors.
No real step is as fast. What it will rather take, "ms likely", is the least time
divided by SHARES, an estimate until it is measured.

With --measure a GPU computes each call that is counted, between two events. A row's
time is the median of some steps, and its share of the limit is the least time divided
by it. While the host queues calls, the GPU is kept busy with other products, so that no
call waits for the host; their time is subtracted. What is not a counted call, such as
zeroing, is part of "between launches".
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from minitransformer.backends.cuda import attention, blaslt, device, ops
from minitransformer.backends.cuda.device import WARP
from minitransformer.backends.cuda.optimizer import GpuAdam
from minitransformer.backends.cuda.philox import PhiloxStream
from minitransformer.backends.devices import open_device
from minitransformer.cli import exit_code
from minitransformer.engine.backend import register_backend
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer, training_loss
from minitransformer.settings.config import ModelConfig, TrainingConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS
from minitransformer.training.loss_scale import LossScale

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VOCAB_SIZE = 37_000


class Card(NamedTuple):
    """What a GPU sustains; bandwidth and products were measured, not by this engine."""

    tflops: float  # of large products in bfloat16
    terabytes: float  # a second, copied
    processors: int = 132
    gigahertz: float = 1.7


CARDS = {"h100": Card(790, 3.0), "h200": Card(790, 4.3)}
# The instructions that a multiprocessor can begin in a cycle, each of a whole warp. Of
# integers they are half as many: Hopper has 64 lanes for these, and 128 for floats.
PER_CYCLE, INTEGERS_PER_CYCLE = 4, 2

# How many instructions, counted in the machine code for sm_90 in bfloat16. Attention's
# are those of each of its 4 warps, for a tile of at most so many tokens on each side
# (benchmarks/kernels.py); half of them are of integers, and all of those of a sort.
ATTENTION = {
    "attention_64": {16: 494, 32: 727},
    "attention_backward_64": {16: 802, 32: 1288},
}
ATTENTION_WARPS = 4
CROSS_ENTROPY = 23.0  # an element
SORT = 2.25  # a comparison

# The part of the limit that is expected of a row, or else OTHERS. Narrow products have
# few steps along their inner dimension, and those of weights few tiles; the 4 warps of
# attention wait for each other; the backward pass of LayerNorm has few warps, none of
# which loads ahead.
SHARES = {
    "products, projections": 0.66,
    "products, feed-forward": 0.8,
    "products, logits": 0.82,
    "attention_64": 0.5,
    "attention_backward_64": 0.5,
    "layer_norm_backward": 0.57,
    "sort_tokens": 0.7,
    "embedding_backward": 0.5,
}
OTHERS = 0.85
LIKELY_GAP = 1.75  # microseconds

# Which arrays a kernel both reads and writes, by their places among its arguments.
IN_PLACE = {"cross_entropy": [0], "scale": [0], "adam": [0, 2, 3]}

# The steps that are measured. While the host queues some calls of a step, the GPU is
# kept busy by products of square matrices.
STEPS, CALLS, PRODUCTS, SIZE = 7, 200, 20, 8192


class Call(NamedTuple):
    """What a call must do."""

    moved: float  # bytes
    operations: float = 0.0
    instructions: float = 0.0
    per_cycle: int = PER_CYCLE

    def seconds(self, card: Card) -> tuple[float, ...]:
        """The least time by each limit, as in LIMITS."""
        cycles = self.instructions / card.processors / self.per_cycle
        return (
            self.moved / card.terabytes / 1e12,
            self.operations / card.tflops / 1e12,
            cycles / card.gigahertz / 1e9,
        )


LIMITS = "bytes", "operations", "instructions"


class CountingDevice:
    """Takes the place of a `Device` and computes nothing."""

    def __init__(self) -> None:
        self.xp: Any = np
        self.num_processors = 132
        self.tf32 = False
        paths = "tensor cores", "cuBLASLt"
        self.verdicts = {f"{path} in bfloat16": True for path in paths}
        self.gradients: dict[tuple[int, ...], Any] = {}
        self.cublas_lt = self
        self.rows: dict[str, list[Call]] = defaultdict(list)
        self.tokens, self.d_ff = 0, 0

    def count(self, name: str, call: Call) -> None:
        self.rows[name].append(call)

    def launch(self, name: str, dtype: Any, grid: Any, *args: Any, **_: Any) -> None:
        arrays = [x for x in args if isinstance(x, self.xp.ndarray)]
        moved, operations, instructions = sum(x.nbytes for x in arrays), 0.0, 0.0
        per_cycle = PER_CYCLE
        if name == "embedding":  # not the whole table
            moved = 2 * arrays[0].nbytes
        elif name == "sort_tokens":
            instructions = SORT / WARP * arrays[1].size ** 2
            per_cycle = INTEGERS_PER_CYCLE
        elif name in IN_PLACE:
            moved += sum(arrays[i].nbytes for i in IN_PLACE[name])
            if name == "cross_entropy":
                instructions = CROSS_ENTROPY / WARP * arrays[0].size
        elif name.startswith("attention"):
            queries, keys, d_k, d_v = args[-7:-3]
            backward = "backward" in name
            heads = arrays[0].size // (queries * (d_k if backward else d_v))  # of all
            widths = 3 * d_k + 2 * d_v if backward else d_k + d_v
            operations = 2.0 * heads * queries * keys * widths
            if name in ATTENTION:
                tile = 16 if max(queries, keys) <= 16 else 32
                tiles = heads * -(-queries // tile) * -(-keys // tile)
                warps = tiles * ATTENTION_WARPS
                instructions = warps * ATTENTION[name][tile]
        self.count(name, Call(moved, operations, instructions, per_cycle))

    def matmul(
        self, a: Any, b: Any, out: Any, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        self.count_product(a, b, out, out.nbytes if beta else 0)

    def linear(self, x: Any, weight: Any, bias: Any, relu: bool, out: Any) -> bool:
        """Count a product of cuBLASLt, and the bias that is rounded for it."""
        self.count_product(x, weight, out, 2 * bias.nbytes)
        return True

    def count_product(self, a: Any, b: Any, out: Any, more: float) -> None:
        n, k, m = a.shape[-2], a.shape[-1], b.shape[-1]
        moved = a.nbytes + b.nbytes + out.nbytes + more
        sizes = [n, k, m]
        if self.tokens in sizes:
            sizes.remove(self.tokens)
        kind = "feed-forward" if self.d_ff in sizes else "projections"
        kind = "logits" if VOCAB_SIZE in sizes else kind
        self.count(f"products, {kind}", Call(moved, 2.0 * math.prod(out.shape) * k))


class MeasuringDevice(CountingDevice):
    """Counts what it has a `Device` compute, each call between two events."""

    def __init__(self, gpu: device.Device) -> None:
        super().__init__()
        self.gpu, self.xp, self.num_processors = gpu, gpu.xp, gpu.num_processors
        self.verdicts, self.tf32 = gpu.verdicts, gpu.tf32
        self.spans: list[tuple[str, Any, Any]] = []
        self.matrices = [self.xp.zeros((SIZE, SIZE), BFLOAT16) for _ in range(3)]

    def count(self, name: str, call: Call) -> None:
        super().count(name, call)
        self.last = name

    def launch(self, *args: Any, **options: Any) -> None:
        super().launch(*args, **options)
        self.timed(self.last, lambda: self.gpu.launch(*args, **options))

    def matmul(self, *args: Any, **options: Any) -> None:
        super().matmul(*args, **options)
        self.timed(self.last, lambda: self.gpu.matmul(*args, **options))

    def linear(self, *args: Any) -> bool:
        super().linear(*args)
        done: list[bool] = []
        work = self.gpu.cublas_lt.linear
        self.timed(self.last, lambda: done.append(work(*args)))
        return done[0]

    def timed(self, name: str, work: Callable[[], None]) -> None:
        if len(self.spans) % CALLS == 0:
            self.span("busy", self.keep_busy)
        self.span(name, work)

    def keep_busy(self) -> None:
        for _ in range(PRODUCTS):
            self.gpu.matmul(*self.matrices)

    def span(self, name: str, work: Callable[[], None]) -> None:
        start, end = (self.xp.cuda.Event() for _ in range(2))
        start.record()
        work()
        end.record()
        self.spans.append((name, start, end))

    def measure(self, step: Callable[[], None]) -> dict[str, float]:
        """Return the milliseconds of a step by row, and as "a step" those of it all."""
        self.rows.clear()
        self.spans.clear()
        self.span("a step", step)
        self.xp.cuda.Device().synchronize()
        times: dict[str, float] = defaultdict(float)
        for name, start, end in self.spans:
            times[name] += self.xp.cuda.get_elapsed_time(start, end)
        times["a step"] -= times.pop("busy")
        return times


def training_step(
    counter: CountingDevice, config: ModelConfig, sentences: int, length: int
) -> Callable[[], None]:
    """Return a function for a step in bfloat16, all of whose calls `counter` gets."""
    device.current = lambda: counter  # type: ignore[assignment,return-value]
    counter.tokens, counter.d_ff = sentences * length, config.d_ff
    xp, measures = counter.xp, isinstance(counter, MeasuringDevice)
    model = Transformer(config, seed=1 if measures else None)
    parameters = ParameterBuffer(model)
    parameters.move_to(xp, BFLOAT16)
    adam = GpuAdam(parameters, TrainingConfig(), LossScale(xp, "bf16"))
    shape = sentences, length + 1
    ids = np.random.default_rng(0).integers(4, config.vocab_size, shape)
    source, target = xp.asarray(ids[:, 1:]), xp.asarray(ids)
    rng = PhiloxStream((1,), xp)

    def step() -> None:
        parameters.grad.fill(0)
        loss = training_loss(model, source, target, 0.1, rng)
        with ops.adding_to(parameters):
            loss.backward(1 / ids.size)
        with np.errstate(all="ignore"):
            adam.step(parameters.grad, loss.data, 1e-3)

    return step


def count_step(config: ModelConfig, sentences: int, length: int) -> CountingDevice:
    """Run a step of training of which only the calls are counted."""
    counter = CountingDevice()
    register_backend(np.ndarray, ops.BACKEND)
    try:
        with np.errstate(all="ignore"):  # of memory that nobody has written
            training_step(counter, config, sentences, length)()
    finally:
        register_backend(np.ndarray, None)
    return counter


def measure_step(
    config: ModelConfig, sentences: int, length: int
) -> tuple[CountingDevice, dict[str, float]]:
    """Run steps of training on a GPU; return the counts and milliseconds of one.

    Raises: RuntimeError if there is no GPU, UsageError if it has no bfloat16.
    """
    open_device("cuda", "bf16")
    gpu = device.current()
    for matches in attention.tensor_cores_agree, blaslt.matches_reference:
        matches(gpu, BFLOAT16)  # compared on the real device, before it is wrapped
    counter = MeasuringDevice(gpu)
    step = training_step(counter, config, sentences, length)
    counter.measure(step)  # compiles kernels and takes memory
    found = [counter.measure(step) for _ in range(STEPS)]
    names = found[0].keys()
    times = {name: statistics.median(times[name] for times in found) for name in names}
    return counter, times


class Row(NamedTuple):
    """A line of the table; times in milliseconds."""

    calls: int
    moved: float = 0.0
    operations: float = 0.0
    instructions: float = 0.0
    limit: str = ""
    least: float = 0.0
    likely: float = 0.0


def row_of(name: str, calls: list[Call], card: Card) -> Row:
    seconds = [call.seconds(card) for call in calls]
    least = 1e3 * sum(map(max, seconds))
    sums = [sum(column) for column in zip(*seconds, strict=True)]
    limit = LIMITS[sums.index(max(sums))]
    return Row(
        calls=len(calls),
        moved=sum(call.moved for call in calls),
        operations=sum(call.operations for call in calls),
        instructions=sum(call.instructions for call in calls),
        limit=limit,
        least=least,
        likely=least / SHARES.get(name, OTHERS),
    )


def table(
    counter: CountingDevice, card: Card, gap: float, times: dict[str, float]
) -> list[str]:
    """Return a line for each row, the longest first, and for the whole step.

    `gap` is the least time between two launches in microseconds, `times` what was
    measured, or nothing.
    """
    rows = {name: row_of(name, calls, card) for name, calls in counter.rows.items()}
    rows = dict(sorted(rows.items(), key=lambda item: -item[1].least))
    launches = sum(row.calls for row in rows.values())
    rows["between launches"] = Row(
        0, least=launches * gap / 1e3, likely=launches * max(gap, LIKELY_GAP) / 1e3
    )
    rows["a step"] = Row(
        calls=launches,
        moved=sum(row.moved for row in rows.values()),
        operations=sum(row.operations for row in rows.values()),
        instructions=sum(row.instructions for row in rows.values()),
        least=sum(row.least for row in rows.values()),
        likely=sum(row.likely for row in rows.values()),
    )
    if times:
        in_calls = sum(times[name] for name in counter.rows)
        times = {**times, "between launches": times["a step"] - in_calls}
    text = [f"{'':<24}{'calls':>7}{'GB':>8}{'TFLOP':>8}{'G instr.':>10}{'limit':>14}"]
    text[0] += f"{'ms at least':>13}{'ms likely':>11}"
    text[0] += f"{'ms measured':>13}{'share':>8}" if times else ""
    for name, row in rows.items():
        line = f"{name:<24}{row.calls:>7}{row.moved / 1e9:>8.2f}"
        line += f"{row.operations / 1e12:>8.3f}{row.instructions / 1e9:>10.2f}"
        line += f"{row.limit:>14}{row.least:>13.2f}{row.likely:>11.2f}"
        if times:
            line += f"{times[name]:>13.2f}{row.least / times[name]:>8.0%}"
        text.append(line)
    step = rows["a step"]
    spent = {"at least": step.least, "likely": step.likely}
    if times:
        spent["measured"] = times["a step"]
    for kind, milliseconds in spent.items():
        rate = step.operations / milliseconds / 1e9
        share = f"{rate:.0f} TFLOP/s, {rate / card.tflops:.0%} of large products"
        text.append(f"{kind}: {milliseconds:.1f} ms a step, {share}")
    return text


def find_card(name: str) -> str:
    """Return the card that a GPU's name is of, or else the one with slower memory."""
    return "h200" if "H200" in name else "h100"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--config", default="base", choices=("base", "big"))
    add("--sentences", type=int, default=896)
    add("--length", type=int, default=28, help="tokens of each side")
    add("--card", choices=CARDS, help="(default: this GPU, or else h100)")
    add("--tflops", type=float, help="of large products (default: the card's)")
    add("--terabytes", type=float, help="a second (default: the card's)")
    add("--launch", type=float, default=1.0, help="microseconds between two")
    add("--measure", action="store_true", help="time each call on a GPU, too")
    args = parser.parse_args()
    config = make_config(ModelConfig, PRESETS[args.config], {"vocab_size": VOCAB_SIZE})
    shape = config, args.sentences, args.length
    times: dict[str, float] = {}
    name = args.card or "h100"
    if not args.measure:
        counter = count_step(*shape)
    else:
        counter, times = measure_step(*shape)
        runtime = counter.xp.cuda.runtime
        properties = runtime.getDeviceProperties(runtime.getDevice())
        name = args.card or find_card(properties["name"].decode())
    card = CARDS[name]
    card = card._replace(
        tflops=args.tflops or card.tflops, terabytes=args.terabytes or card.terabytes
    )
    print(
        f"{args.config}, {args.sentences} x ({args.length} + {args.length}) tokens; "
        f"{name}: {card.tflops:.0f} TFLOP/s, {card.terabytes} TB/s, {card.processors} "
        f"multiprocessors at {card.gigahertz} GHz"
    )
    print("\n".join(table(counter, card, args.launch, times)))


if __name__ == "__main__":
    sys.exit(exit_code("roofline.py", main))
