"""What a training step of base is made of on this GPU: its products and its kernels.

    python benchmarks/profile_step.py
    python benchmarks/profile_step.py --shape big-25000 --kernels 60

First, cuBLAS computes each product of the step by itself, without biases. The rates
bound the step's; beside them stand those of wider products, with the matrices of
queries, keys and values side by side, and what these would save in a step. Then
PyTorch's profiler (CUPTI) records steps that CUDA graphs launch: it sees the kernels of
the whole process, also those of CuPy and cuBLAS, and each kernel of a graph.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import gpu as speed
import ml_dtypes
import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.ops import rows_per_chunk
from minitransformer.backends.devices import open_device
from minitransformer.cli import exit_code
from minitransformer.settings.config import ModelConfig

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WARM_UP, REPEATS, STEPS = 3, 20, 5
BUSY = 8192  # the width of a product that lasts while the host queues the others
RANDOM = 1 << 20  # numbers are drawn once, and repeated: zeros would take less power


class Layer(NamedTuple):
    """A matrix from `inputs` to `outputs` numbers, as `rows` of them are multiplied."""

    rows: int
    inputs: int
    outputs: int

    @property
    def operations(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs


def layers_of(config: ModelConfig, tokens: int) -> dict[str, Layer]:
    width, inner, pieces = config.d_model, config.d_ff, config.vocab_size
    chunk = rows_per_chunk(tokens, pieces)
    return {
        "projection": Layer(tokens, width, width),
        "K, V in one": Layer(tokens, width, 2 * width),
        "Q, K, V in one": Layer(tokens, width, 3 * width),
        "feed-forward 1": Layer(tokens, width, inner),
        "feed-forward 2": Layer(tokens, inner, width),
        "logits": Layer(chunk, width, pieces),
    }


def random_matrix(xp: Any, rows: int, columns: int) -> Any:
    drawn = np.random.default_rng(0).standard_normal(RANDOM, np.float32)
    block, matrix = (
        xp.asarray(drawn.astype(BFLOAT16)),
        xp.empty(rows * columns, BFLOAT16),
    )
    for start in range(0, matrix.size, RANDOM):
        part = matrix[start : start + RANDOM]
        part[...] = block[: part.size]
    return matrix.reshape(rows, columns)


def microseconds(work: Callable[[], None], busy: Callable[[], None], xp: Any) -> float:
    """Return the time of `work`, which the host queues while the GPU is `busy`."""
    for _ in range(WARM_UP):
        work()
    start, end = (xp.cuda.Event() for _ in range(2))
    busy()
    start.record()
    for _ in range(REPEATS):
        work()
    end.record()
    end.synchronize()
    return float(xp.cuda.get_elapsed_time(start, end)) * 1e3 / REPEATS


def measure_layer(
    gpu: device.Device, layer: Layer, transposed: bool, busy: Callable[[], None]
) -> dict[str, float]:
    """Return the microseconds of the forward product and of its two gradients.

    As in the step, gradients are added to what is there, that of the weight in float32.
    The `transposed` weight is the table of embeddings, [outputs, inputs].
    """
    xp, (rows, inputs, outputs) = gpu.xp, layer
    x, y = random_matrix(xp, rows, inputs), random_matrix(xp, rows, outputs)
    if transposed:
        weight = random_matrix(xp, outputs, inputs).T
        gradient, factors = xp.zeros((outputs, inputs), np.float32), (y.T, x)
    else:
        weight = random_matrix(xp, inputs, outputs)
        gradient, factors = xp.zeros((inputs, outputs), np.float32), (x.T, y)
    out, dx = xp.empty((rows, outputs), BFLOAT16), xp.zeros((rows, inputs), BFLOAT16)
    added = 0.0 if transposed else 1.0
    works: dict[str, Callable[[], None]] = {
        "forward": lambda: gpu.matmul(x, weight, out),
        "dX": lambda: gpu.matmul(y, weight.T, dx, beta=added),
        "dW": lambda: gpu.matmul(*factors, gradient, beta=1.0),
    }
    return {name: microseconds(work, busy, xp) for name, work in works.items()}


def saved(times: dict[str, dict[str, float]], config: ModelConfig) -> float:
    """Return the milliseconds that wider products would save in a step."""
    alone, two, three = (
        sum(times[name].values())
        for name in ("projection", "K, V in one", "Q, K, V in one")
    )
    own = config.encoder_layers + config.decoder_layers
    return (own * (3 * alone - three) + config.decoder_layers * (2 * alone - two)) / 1e3


def measure_products(gpu: device.Device, config: ModelConfig, tokens: int) -> list[str]:
    matrices = [random_matrix(gpu.xp, BUSY, BUSY) for _ in range(3)]
    times = {}
    lines = [f"{'product':<18}{'rows':>8}{'in':>7}{'out':>7}"]
    lines[0] += "".join(f"{f'{name} us':>12}{'TFLOP/s':>9}" for name in PASSES)
    for name, layer in layers_of(config, tokens).items():
        line = f"{name:<18}{layer.rows:>8}{layer.inputs:>7}{layer.outputs:>7}"
        times[name] = measure_layer(
            gpu, layer, name == "logits", lambda: gpu.matmul(*matrices)
        )
        for each in PASSES:
            rate = layer.operations / times[name][each] / 1e6
            line += f"{times[name][each]:>12.1f}{rate:>9.0f}"
        lines.append(line)
    milliseconds = saved(times, config)
    return [*lines, f"wider products would save {milliseconds:.2f} ms of a step"]


PASSES = "forward", "dX", "dW"


def kernel_table(events: Iterable[Any], steps: int, most: int) -> list[str]:
    """Return a line for each kernel that the profiler saw, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    first, last = float("inf"), 0.0
    for event in events:
        if "cuda" in str(event.device_type).lower():
            span = event.time_range
            times[event.name].append(span.elapsed_us())
            first, last = min(first, span.start), max(last, span.end)
    lines = [f"{'kernel':<72}{'calls':>7}{'ms':>9}{'us each':>9}"]
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        line = (
            f"{name[:71]:<72}{len(each) / steps:>7.0f}{sum(each) / 1e3 / steps:>9.3f}"
        )
        lines.append(f"{line}{sum(each) / len(each):>9.1f}")
    busy = sum(map(sum, times.values())) / 1e3 / steps
    whole = (last - first) / 1e3 / steps if times else 0.0
    return [*lines, f"a step {whole:.2f} ms, of which kernels take {busy:.2f} ms"]


def measure_kernels(shape: str, most: int) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    asked = argparse.Namespace(shape=shape, side="ours", device="cuda")
    step, wait = speed.ours(asked)
    for number in range(4):  # kernels are compiled, graphs recorded and replayed
        step(number)
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for number in range(4, 4 + STEPS):
            step(number)
        wait()
    return kernel_table(found.events(), STEPS, most)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--shape", choices=speed.SHAPES, default="base-25000")
    add("--kernels", type=int, default=45, help="the most that are shown")
    args = parser.parse_args()
    config, batch = speed.workload(args.shape)
    open_device("cuda", "bf16")
    products = measure_products(device.current(), config, batch.source.size)
    print("\n".join(products), flush=True)
    device.current().xp.get_default_memory_pool().free_all_blocks()
    print("\n".join(measure_kernels(args.shape, args.kernels)))


if __name__ == "__main__":
    sys.exit(exit_code("profile_step.py", main))
