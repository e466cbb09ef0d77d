"""What a GPU must do in a training step, counted, and how long that takes at least.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --config big --tflops 990 --terabytes 3.35

The step runs without a GPU: nothing is computed, and each product and kernel is
counted by its arguments. A row gives calls, gigabytes read and written, and operations;
its time is the larger of the bytes at --terabytes a second and the operations at
--tflops, by default what an H200 sustains in bfloat16. No real step is as fast, since
neither products nor kernels reach these limits.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from typing import Any

import ml_dtypes
import numpy as np

from minitransformer.cuda import device, ops
from minitransformer.cuda.optimizer import GpuAdam
from minitransformer.engine.backend import register_kernels
from minitransformer.engine.random_streams import PhiloxStream
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


class CountingDevice:
    """Takes the place of a `Device` and computes nothing."""

    def __init__(self) -> None:
        self.xp = np
        self.tf32 = False
        paths = "tensor cores", "cuBLASLt"
        self.verdicts = {f"{path} in bfloat16": True for path in paths}
        self.cublas_lt = self
        self.rows: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])

    def count(self, name: str, moved: float, operations: float) -> None:
        row = self.rows[name]
        row[0], row[1], row[2] = row[0] + 1, row[1] + moved, row[2] + operations

    def launch(self, name: str, dtype: Any, grid: Any, *args: Any, **_: Any) -> None:
        arrays = [x for x in args if isinstance(x, np.ndarray)]
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
        n, k, m = a.shape[-2], a.shape[-1], b.shape[-1]
        moved = a.nbytes + b.nbytes + out.nbytes * (2 if beta else 1)
        kind = "logits" if VOCAB_SIZE in (n, k, m) else "layers"
        self.count(f"products of {kind}", moved, 2.0 * math.prod(out.shape) * k)

    def linear(self, x: Any, weight: Any, bias: Any, relu: bool, out: Any) -> bool:
        """Count a product of cuBLASLt, and the bias that is rounded for it."""
        self.matmul(x, weight, out)
        self.count("biases in 16 bits", 1.5 * bias.nbytes, 0)
        return True


def count_step(config: ModelConfig, sentences: int, length: int) -> CountingDevice:
    """Run a step of training in bfloat16, of which only the calls are counted."""
    counter = CountingDevice()
    device.current = lambda: counter  # type: ignore[assignment,return-value]
    model = Transformer(config, seed=None)
    parameters = ParameterBuffer(model)
    parameters.move_to(np, BFLOAT16)
    register_kernels(np.ndarray, ops.find_kernel)
    try:
        ids = np.ones((sentences, length + 1), np.int64)
        loss = training_loss(model, ids[:, 1:], ids, 0.1, PhiloxStream((1,), np))
        loss.backward(1.0)
        adam = GpuAdam(parameters, TrainingConfig(), LossScale(np, "bf16"))
        with np.errstate(all="ignore"):
            adam.step(parameters.grad, loss.data, 1e-3)
    finally:
        register_kernels(np.ndarray, None)
    return counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="base", choices=("base", "big"))
    parser.add_argument("--sentences", type=int, default=896)
    parser.add_argument("--length", type=int, default=28, help="tokens of each side")
    parser.add_argument("--tflops", type=float, default=790.0)
    parser.add_argument("--terabytes", type=float, default=4.8, help="a second")
    parser.add_argument("--launch", type=float, default=1.0, help="microseconds each")
    args = parser.parse_args()
    config = build(ModelConfig, PRESETS[args.config], {"vocab_size": VOCAB_SIZE})
    counter = count_step(config, args.sentences, args.length)
    lines, total = [], [0.0] * 4
    for name, (calls, moved, operations) in counter.rows.items():
        limits = moved / args.terabytes / 1e9, operations / args.tflops / 1e9
        row = calls, moved / 1e9, operations / 1e12, max(limits)
        lines.append((name, row))
        total = [a + b for a, b in zip(total, row, strict=True)]
    print(f"{'':<24}{'calls':>7}{'GB':>9}{'TFLOP':>9}{'ms at least':>13}")
    gaps = "between launches", (0, 0, 0, total[0] * args.launch / 1e3)
    total[3] += gaps[1][3]
    last = [gaps, ("a step", tuple(total))]
    for name, (calls, moved, operations, time) in [
        *sorted(lines, key=lambda line: -line[1][3]),
        *last,
    ]:
        print(f"{name:<24}{calls:>7.0f}{moved:>9.2f}{operations:>9.3f}{time:>13.2f}")
    rate = total[2] / total[3] * 1e3
    print(f"at this time {rate:.0f} TFLOP/s, {rate / args.tflops:.0%} of the limit")


if __name__ == "__main__":
    main()
