"""What a GPU must do in a training step, counted, and how long that takes at least.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --config big --tflops 990 --terabytes 3.35
    python benchmarks/roofline.py --measure      # on a GPU: how long it really takes

The step runs without a GPU: nothing is computed, and each product and kernel is
counted by its arguments. A row gives calls, gigabytes read and written, and operations;
its time is the larger of the bytes at --terabytes a second and the operations at
--tflops, by default an H200's nominal bandwidth and what it sustains in large bfloat16
products. No real step is as fast, since neither products nor kernels reach these
limits.

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
from typing import Any

import ml_dtypes
import numpy as np

from minitransformer.cli import exit_code
from minitransformer.cuda import attention, blaslt, device, ops
from minitransformer.cuda.optimizer import GpuAdam
from minitransformer.cuda.philox import PhiloxStream
from minitransformer.devices import open_device
from minitransformer.engine.backend import register_kernels
from minitransformer.model.loss import training_loss
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig, TrainingConfig
from minitransformer.settings.options import build
from minitransformer.settings.presets import PRESETS
from minitransformer.training.loss_scale import LossScale

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VOCAB_SIZE = 37_000
# Which arrays a kernel both reads and writes, by their places among its arguments.
IN_PLACE = {"cross_entropy": [0], "accumulate": [0], "scale": [0], "adam": [0, 2, 3]}

# The steps that are measured. While the host queues some calls of a step, the GPU is
# kept busy by products of square matrices.
STEPS, CALLS, PRODUCTS, SIZE = 7, 200, 20, 8192


class CountingDevice:
    """Takes the place of a `Device` and computes nothing."""

    def __init__(self) -> None:
        self.xp: Any = np
        self.num_processors = 132
        self.tf32 = False
        paths = "tensor cores", "cuBLASLt"
        self.verdicts = {f"{path} in bfloat16": True for path in paths}
        self.cublas_lt = self
        self.rows: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])

    def count(self, name: str, moved: float, operations: float) -> None:
        row = self.rows[name]
        row[0], row[1], row[2] = row[0] + 1, row[1] + moved, row[2] + operations

    def launch(self, name: str, dtype: Any, grid: Any, *args: Any, **_: Any) -> None:
        arrays = [x for x in args if isinstance(x, self.xp.ndarray)]
        moved, operations = sum(x.nbytes for x in arrays), 0.0
        if name == "embedding":  # not the whole table
            moved = 2 * arrays[0].nbytes
        elif name == "sort_tokens":
            operations = 2.0 * arrays[1].size ** 2
        elif name in IN_PLACE:
            moved += sum(arrays[i].nbytes for i in IN_PLACE[name])
        elif name.startswith("attention"):
            heads, queries, keys, d_k, d_v = args[-8:-3]
            backward = "backward" in name
            batch = arrays[0].size // (queries * heads * (d_k if backward else d_v))
            widths = 3 * d_k + 2 * d_v if backward else d_k + d_v
            operations = 2.0 * batch * heads * queries * keys * widths
        self.count(name, moved, operations)

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
        kind = "logits" if VOCAB_SIZE in (n, k, m) else "layers"
        self.count(f"products of {kind}", moved, 2.0 * math.prod(out.shape) * k)


class MeasuringDevice(CountingDevice):
    """Counts what it has a `Device` compute, each call between two events."""

    def __init__(self, gpu: device.Device) -> None:
        super().__init__()
        self.gpu, self.xp, self.num_processors = gpu, gpu.xp, gpu.num_processors
        self.verdicts, self.tf32 = gpu.verdicts, gpu.tf32
        self.spans: list[tuple[str, Any, Any]] = []
        self.matrices = [self.xp.zeros((SIZE, SIZE), BFLOAT16) for _ in range(3)]

    def count(self, name: str, moved: float, operations: float) -> None:
        super().count(name, moved, operations)
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
        loss.backward(1 / ids.size)
        with np.errstate(all="ignore"):
            adam.step(parameters.grad, loss.data, 1e-3)

    return step


def count_step(config: ModelConfig, sentences: int, length: int) -> CountingDevice:
    """Run a step of training of which only the calls are counted."""
    counter = CountingDevice()
    register_kernels(np.ndarray, ops.find_kernel)
    try:
        training_step(counter, config, sentences, length)()
    finally:
        register_kernels(np.ndarray, None)
    return counter


def measure_step(
    config: ModelConfig, sentences: int, length: int
) -> tuple[CountingDevice, dict[str, float]]:
    """Run steps of training on a GPU; return the counts and milliseconds of one.

    Raises: RuntimeError if there is no GPU, UsageError if it has no bfloat16.
    """
    open_device("cuda", "bf16")
    gpu = device.current()
    for agrees in attention.tensor_cores_agree, blaslt.agrees:
        agrees(gpu, BFLOAT16)  # compared on the real device, before it is wrapped
    counter = MeasuringDevice(gpu)
    step = training_step(counter, config, sentences, length)
    counter.measure(step)  # compiles kernels and takes memory
    found = [counter.measure(step) for _ in range(STEPS)]
    names = found[0].keys()
    times = {name: statistics.median(times[name] for times in found) for name in names}
    return counter, times


def table(
    counter: CountingDevice, args: argparse.Namespace, times: dict[str, float]
) -> list[str]:
    """Return a line for each row, the longest first, and for the whole step."""
    lines: list[tuple[str, tuple[float, ...]]] = []
    total = [0.0] * 4
    for name, (calls, moved, operations) in counter.rows.items():
        limits = moved / args.terabytes / 1e9, operations / args.tflops / 1e9
        row = calls, moved / 1e9, operations / 1e12, max(limits)
        lines.append((name, row))
        total = [a + b for a, b in zip(total, row, strict=True)]
    gaps = "between launches", (0.0, 0.0, 0.0, total[0] * args.launch / 1e3)
    total[3] += gaps[1][3]
    if times:
        in_calls = sum(times[name] for name in counter.rows)
        times = {**times, "between launches": times["a step"] - in_calls}
    lines.sort(key=lambda line: -line[1][3])
    text = [f"{'':<24}{'calls':>7}{'GB':>9}{'TFLOP':>9}{'ms at least':>13}"]
    text[0] += f"{'ms measured':>13}{'share':>8}" if times else ""
    lines += [gaps, ("a step", tuple(total))]
    for name, (calls, moved, operations, least) in lines:
        line = f"{name:<24}{calls:>7.0f}{moved:>9.2f}{operations:>9.3f}{least:>13.2f}"
        if times:
            line += f"{times[name]:>13.2f}{least / times[name]:>8.0%}"
        text.append(line)
    least = times["a step"] if times else total[3]
    rate = total[2] / least * 1e3
    share = f"{rate:.0f} TFLOP/s, {rate / args.tflops:.0%} of the limit"
    return [*text, f"{'measured' if times else 'at this time'} {share}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--config", default="base", choices=("base", "big"))
    add("--sentences", type=int, default=896)
    add("--length", type=int, default=28, help="tokens of each side")
    add("--tflops", type=float, default=790.0)
    add("--terabytes", type=float, default=4.8, help="a second")
    add("--launch", type=float, default=1.0, help="microseconds each")
    add("--measure", action="store_true", help="time each call on a GPU, too")
    args = parser.parse_args()
    config = build(ModelConfig, PRESETS[args.config], {"vocab_size": VOCAB_SIZE})
    shape = config, args.sentences, args.length
    found = measure_step(*shape) if args.measure else (count_step(*shape), {})
    print("\n".join(table(found[0], args, found[1])))


if __name__ == "__main__":
    sys.exit(exit_code("roofline.py", main))
