"""Table 1, measured: how time and memory of four kinds of layer grow with n and d.

    python benchmarks/table1.py --output table1.svg
    python benchmarks/table1.py --kinds restricted --lengths 512 2048 8192

One sentence of n positions goes through one layer of width d, forward and backward, in
float32 with one BLAS thread; each point runs in another process. As in the table,
attention is measured without its projections, whose cost n d^2 a recurrent layer has,
too. The JSON has the medians of the processor time, on which other work on the machine
has the least effect, and of the wall-clock time; the memory taken beyond the input; and
the exponents of power laws fitted to all points and to the upper half of them, where
fixed costs weigh less.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Result, report, run_side

from minitransformer.commands.plot import write_picture
from minitransformer.engine import ops
from minitransformer.engine.autograd import PRIMITIVES, Tensor, Vjp, primitive
from minitransformer.system.machine import tune_allocator
from minitransformer.system.workers import limit_threads

KERNEL = 3  # width of the convolution, k


@primitive
def tanh(x: np.ndarray) -> tuple[np.ndarray, Vjp]:
    out = np.tanh(x)
    return out, lambda g: (g * (1 - out * out),)


@primitive
def add(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Vjp]:
    return a + b, lambda g: (g, g)


@primitive
def shift(x: np.ndarray, *, by: int) -> tuple[np.ndarray, Vjp]:
    """Shift all positions by `by` and fill with zeros. Shapes: [n, d] -> [n, d]"""
    return _shifted(x, by), lambda g: (_shifted(g, -by),)


def _shifted(x: np.ndarray, by: int) -> np.ndarray:
    out = np.zeros_like(x)
    if by >= 0:
        out[by:] = x[: len(x) - by]
    else:
        out[:by] = x[-by:]
    return out


def recurrent(*inputs: Tensor) -> Tensor:
    """The sum of all h_t = tanh(x_t W + h_{t-1} U). Shapes: rows x_t [1, d], W, U"""
    *rows, w, u = inputs
    state = total = Tensor(np.zeros_like(rows[0].data))
    for row in rows:
        state = tanh(add(ops.linear(row, w), ops.linear(state, u)))
        total = add(total, state)
    return total


def convolutional(x: Tensor, *kernel: Tensor) -> Tensor:
    """y_t = sum_j x_{t + j - k // 2} W_j. Shapes: x [n, d], k matrices W_j"""
    terms = [
        ops.linear(shift(x, by=len(kernel) // 2 - j), w) for j, w in enumerate(kernel)
    ]
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total


@primitive
def restricted(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, reach: int
) -> tuple[np.ndarray, Vjp]:
    """Attention of each position to `reach` positions on either side (section 4).

    Queries attend in blocks that are as long as the reach (or of 16, as small products
    are slow), each to the keys of its own and of both neighbouring blocks.

    Shapes: q, k, v [1, n, d] -> [1, n, d]
    """
    length = q.shape[1]
    size = max(reach, 16)
    sides = int(length > size)  # a single block has no neighbours
    # Each query sees the keys within its reach that exist. Queries beyond the end see
    # themselves.
    place = np.arange(-sides * size, (1 + sides) * size)
    starts = np.arange(0, length, size)[:, None, None]
    near = abs(place - np.arange(size)[:, None]) <= reach  # [size, keys]
    mask = near & (starts + place >= 0) & (starts + place < length)  # [blocks, ...]
    mask |= place == np.arange(size)[:, None]
    # Attention within blocks is the engine's own.
    out, block_vjp = PRIMITIVES["attention"](
        _to_blocks(q, size),
        _to_blocks(k, size, sides),
        _to_blocks(v, size, sides),
        mask[:, None],
        num_heads=1,
    )

    def vjp(g: np.ndarray) -> tuple[np.ndarray, ...]:
        # A key's gradient is the sum over the blocks that saw it.
        gradients: tuple[Any, ...] = block_vjp(_to_blocks(g, size))
        dq, dk, dv, _ = gradients
        dk, dv = (_sum_blocks(d, size, sides, length) for d in (dk, dv))
        return _sum_blocks(dq, size, 0, length), dk, dv

    return _sum_blocks(out, size, 0, length), vjp


def _to_blocks(x: np.ndarray, size: int, sides: int = 0) -> np.ndarray:
    """Divide positions into blocks, each with its neighbours on both sides.

    Shapes: x [1, n, d] -> [blocks, (1 + 2 sides) size, d]
    """
    _, length, width = x.shape
    count = -(-length // size)
    blocks = np.zeros((count + 2 * sides, size, width), x.dtype)
    blocks.reshape(-1, width)[sides * size : sides * size + length] = x[0]
    near = [blocks[i : i + count] for i in range(1 + 2 * sides)]
    return np.concatenate(near, axis=1)


def _sum_blocks(blocks: np.ndarray, size: int, sides: int, length: int) -> np.ndarray:
    """Sum the values of each position over all blocks: `_to_blocks` transposed."""
    count, keys, width = blocks.shape
    total = np.zeros((count + 2 * sides, size, width), blocks.dtype)
    for i in range(keys // size):
        total[i : i + count] += blocks[:, i * size : (i + 1) * size]
    return total.reshape(1, -1, width)[:, sides * size : sides * size + length]


def layer(kind: str, n: int, d: int, r: int) -> tuple[Callable[..., Tensor], list[Any]]:
    """Return a layer of one kind, and the shapes of its inputs and weights."""
    if kind == "self-attention":
        return partial(ops.attention, num_heads=1), [(1, n, d)] * 3
    if kind == "restricted":
        return partial(restricted, reach=r // 2), [(1, n, d)] * 3
    if kind == "recurrent":
        return recurrent, [(1, d)] * n + [(d, d)] * 2
    return convolutional, [(n, d)] + [(d, d)] * KERNEL


@dataclass(frozen=True)
class Row:
    """A row of Table 1: its complexity, and what follows from it."""

    title: str
    complexity: str
    sequential_operations: Callable[[int, int], int]
    maximum_path_length: Callable[[int, int], int]


ROWS = {
    "self-attention": Row("self-attention", "n^2 d", lambda n, r: 1, lambda n, r: 1),
    "recurrent": Row("recurrent", "n d^2", lambda n, r: n, lambda n, r: n),
    "convolutional": Row(
        f"convolutional, k = {KERNEL}",
        "k n d^2",
        lambda n, r: 1,
        lambda n, r: math.ceil(math.log(n, KERNEL)),
    ),
    "restricted": Row(
        "self-attention, restricted",
        "r n d",
        lambda n, r: 1,
        lambda n, r: math.ceil(n / r),
    ),
}


def measure(kind: str, n: int, d: int, r: int) -> Result:
    """Return the median times of forward and backward passes: three, or a second's."""
    tune_allocator()
    gc.disable()  # as timeit does; a pass leaves no cycles
    forward, shapes = layer(kind, n, d, r)
    # Random inputs and weights.
    rng = np.random.default_rng(0)
    scale = d**-0.5  # products are about as large as their inputs
    arrays = [rng.normal(0, scale, shape).astype(np.float32) for shape in shapes]

    def step() -> None:
        out = forward(*(Tensor(array, requires_grad=True) for array in arrays))
        out.backward(np.ones_like(out.data))

    # Time passes after one that is not counted.
    step()
    processor: list[float] = []
    wall: list[float] = []
    while len(wall) < 3 or (sum(wall) < 1 and len(wall) < 50):
        processor_start, wall_start = time.process_time(), time.perf_counter()
        step()
        processor.append(time.process_time() - processor_start)
        wall.append(time.perf_counter() - wall_start)
    # Watch the memory of another, which is slower then.
    tracemalloc.start()
    step()
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    return {
        "seconds": statistics.median(processor),
        "wall_seconds": statistics.median(wall),
        "peak_memory_mb": peak,
    }


def first_fitted(values: Sequence[int]) -> int:
    """Return where the upper half of the points starts, with the middle one."""
    return (len(values) - 1) // 2


def exponent(values: Sequence[int], results: Sequence[Result], key: str) -> float:
    """Return the power of `values` that the figures called `key` follow."""
    figures = [result[key] for result in results]
    return round(float(np.polyfit(np.log(values), np.log(figures), 1)[0]), 3)


def along(
    axis: str, values: list[int], kinds: list[str], fixed: dict[str, int]
) -> dict[str, Any]:
    """Measure every kind at each value of `axis`, n or d, and fit the upper half."""
    figures: dict[str, Any] = {axis: values}
    upper = first_fitted(values)
    # Each point in another process.
    for kind in kinds:
        points = [json.dumps({"kind": kind, **fixed, axis: x}) for x in values]
        results = [run_side(__file__, ["--point", point]) for point in points]
        figures[kind] = {
            key: [round(result[key], 6) for result in results] for key in results[0]
        }
        for name, first in (("exponents", 0), ("exponents_of_upper_half", upper)):
            figures[kind][name] = {
                key: exponent(values[first:], results[first:], key)
                for key in ("seconds", "peak_memory_mb")
            }
    return figures


def draw(axes: dict[str, dict[str, Any]], fixed: dict[str, int], path: Path) -> None:
    """Draw the points, the fitted laws, and the complexities of the table."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    panels = [
        ("n", "seconds", f"processor time in ms, d = {fixed['d']}", 1e3),
        ("n", "peak_memory_mb", f"memory in MB, d = {fixed['d']}", 1),
        ("d", "seconds", f"processor time in ms, n = {fixed['n']:,}", 1e3),
    ]
    # A panel for each, with its points and its axis.
    figure, plots = pyplot.subplots(1, 3, figsize=(11.4, 4.4))
    for plot, (axis, key, title, unit) in zip(plots, panels, strict=True):
        draw_points(plot, axis, axes[axis], key, unit)
        values = axes[axis][axis]
        plot.set_title(title, fontsize=10)
        plot.set_xlabel(axis)
        plot.set_xticks(values, [f"{x:,}" for x in values], fontsize=8)
        plot.set_xlim(values[0] / 1.2, values[-1] * 2)
        plot.minorticks_off()
        plot.tick_params(labelsize=8)
        plot.grid(alpha=0.25)
        plot.spines[["top", "right"]].set_visible(False)
    handles, labels = plots[0].get_legend_handles_labels()
    style = {"ncols": 4, "fontsize": 9, "frameon": False}
    figure.legend(handles, labels, loc="lower center", **style)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    write_picture(figure, path, dpi=150)


def draw_points(
    plot: Any, axis: str, figures: dict[str, Any], key: str, unit: float
) -> None:
    """Draw the points of every kind, with the power law of their upper half."""
    values = np.array(figures[axis])
    upper = first_fitted(figures[axis])
    ends: dict[float, dict[str, Any]] = {}  # the exponent beside the end of each line
    for number, (kind, row) in enumerate(ROWS.items()):
        if kind not in figures:
            continue
        color = f"C{number}"
        measured = unit * np.array(figures[kind][key])
        plot.loglog(values, measured, "o", color=color, markersize=4)
        # The line passes through the middle of the points that it is fitted to.
        power = figures[kind]["exponents_of_upper_half"][key]
        middle = np.exp(np.log(measured[upper:]).mean())
        line = middle * (values / np.exp(np.log(values[upper:]).mean())) ** power
        label = f"{row.title}: ${row.complexity}$"
        plot.plot(values[upper:], line[upper:], color=color, label=label)
        ends[line[-1]] = {"s": f"${axis}^{{{power:.2f}}}$", "color": color}
    # Exponents do not cover each other.
    plot.margins(y=0.1)
    lowest = 0.0
    apart = (plot.get_ylim()[1] / plot.get_ylim()[0]) ** 0.055
    for end, style in sorted(ends.items()):
        lowest = max(end, lowest * apart)
        plot.text(values[-1] * 1.12, lowest, va="center", fontsize=9, **style)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--kinds", nargs="+", choices=ROWS, default=list(ROWS))
    lengths = [512, 1024, 2048, 4096, 8192]
    add("--lengths", nargs="+", type=int, default=lengths, help="values of n")
    add("--widths", nargs="+", type=int, default=[64, 128, 256, 512, 1024])
    add("--n", type=int, default=512, help="n, where d changes (512)")
    add("--d", type=int, default=64, help="d, where n changes (64)")
    add("--r", type=int, default=64, help="neighbourhood of restricted attention (64)")
    add("--output", type=Path, help="plot, PNG or SVG by its ending")
    add("--point", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        with limit_threads(1):
            print(json.dumps(measure(**args.point)))
        return
    if min(len(args.lengths), len(args.widths)) < 2:
        parser.error("--lengths, --widths: expected two values or more, to fit")
    # Measure along both axes.
    fixed = {"n": args.n, "d": args.d, "r": args.r}
    axes = {
        "n": along("n", args.lengths, args.kinds, fixed),
        "d": along("d", args.widths, args.kinds, fixed),
    }
    # The table's other columns follow by arithmetic.
    n = args.lengths[-1]
    r = args.r
    table = {
        kind: {
            "complexity": ROWS[kind].complexity,
            "sequential_operations": ROWS[kind].sequential_operations(n, r),
            "maximum_path_length": ROWS[kind].maximum_path_length(n, r),
        }
        for kind in args.kinds
    }
    report("table1", **fixed, table={"n": n, **table}, axes=axes)
    if args.output:
        draw(axes, fixed, args.output)


if __name__ == "__main__":
    main()
