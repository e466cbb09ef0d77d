"""How time and memory grow with length, batch, vocabulary, depth and beam.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --axes output-length

Along each axis one figure grows and the others stay; each point runs in a process of
its own. The JSON has the seconds and the peak memory of each point, and the exponent
of the power law fitted to the seconds (the slope of their logarithms), over all points
and over the upper half, where fixed costs weigh less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
from harness import Result, peak_memory_mb, report, run_side

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import EOS_ID, ModelConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.system.machine import num_cores, tune_allocator
from minitransformer.text.batches import Batch
from minitransformer.training.optimizer import Adam
from minitransformer.training.parallel import CpuModel
from minitransformer.translation.batch_translation import translate_ids

# The figures that stay unless an axis varies them: of a training step, and of decoding.
TRAINING = {"length": 16, "tokens": 2048, "vocab_size": 8000, "layers": 3}
DECODING = {"output_length": 32, "sentences": 8, "beam": 4, "decoder_layers": 3}
AXES: dict[str, tuple[str, tuple[int, ...]]] = {
    "length": ("length", (16, 32, 64, 128, 256)),
    "batch-tokens": ("tokens", (256, 512, 1024, 2048, 4096)),
    "vocabulary": ("vocab_size", (2000, 4000, 8000, 16_000, 32_000)),
    "depth": ("layers", (1, 2, 4, 8)),
    "output-length": ("output_length", (16, 32, 64, 128, 256)),
    "beam": ("beam", (1, 2, 4, 8, 16)),
    "decoding-depth": ("decoder_layers", (1, 2, 4, 8)),
}


def config(**settings: Any) -> ModelConfig:
    return ModelConfig(d_model=256, d_ff=1024, num_heads=4, **settings)


def training(point: dict[str, int], threads: int) -> list[float]:
    """Return the seconds of training steps of one batch."""
    layers, vocab_size = point["layers"], point["vocab_size"]
    model = Transformer(
        config(vocab_size=vocab_size, encoder_layers=layers, decoder_layers=layers)
    )
    parameters = ParameterBuffer(model)
    adam = Adam(parameters.data, 0.9, 0.98, 1e-9)
    threaded = CpuModel(model, parameters, threads)
    sentences, rng = point["tokens"] // point["length"], np.random.default_rng(0)
    source = rng.integers(4, vocab_size, (sentences, point["length"]))
    target = rng.integers(4, vocab_size, (sentences, point["length"] + 1))
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        threaded.forward_backward([Batch(source, target)], 0.1, (1, adam.steps))
        adam.update(parameters.grad, 1e-4)
        seconds.append(time.perf_counter() - started)
    return seconds[2:]


def decoding(point: dict[str, int], threads: int) -> list[float]:
    """Return the seconds of decoding a batch to outputs of exactly one length."""
    layers, longest = point["decoder_layers"], point["output_length"]
    model = Transformer(
        config(vocab_size=8000, encoder_layers=3, decoder_layers=layers)
    )
    model.embedding.table.data[EOS_ID] = 0  # never among the best: no output ends early
    rng = np.random.default_rng(0)
    source = rng.integers(4, 8000, (point["sentences"], 16)).tolist()
    settings = DecodingConfig(beam=point["beam"], max_len_a=0.0, max_len_b=longest - 1)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        found = translate_ids(model, source, settings, threads)
        seconds.append(time.perf_counter() - started)
    lengths = {len(hypotheses[0].tokens) for hypotheses in found}
    assert lengths == {longest}, lengths
    return seconds[1:]


def measure(point: dict[str, int], threads: int) -> None:
    tune_allocator()
    kind = decoding if "beam" in point else training
    seconds = statistics.median(kind(point, threads))
    print(json.dumps({"seconds": seconds, "peak_memory_mb": peak_memory_mb()}))


def exponent(values: list[int], results: list[Result], key: str = "seconds") -> float:
    """Return the power of `values` that the figures called `key` follow."""
    found = [result[key] for result in results]
    return round(float(np.polyfit(np.log(values), np.log(found), 1)[0]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        measure(args.point, args.threads)
        return
    axes = {}
    for axis in args.axes:
        name, values = AXES[axis]
        fixed = TRAINING if name in TRAINING else DECODING
        results = []
        for value in values:
            point = json.dumps({**fixed, name: value})
            arguments = ["--point", point, "--threads", str(args.threads)]
            results.append(run_side(__file__, arguments))
        upper = len(values) // 2
        axes[axis] = {
            name: values,
            "seconds": [round(result["seconds"], 5) for result in results],
            "peak_memory_mb": [round(result["peak_memory_mb"]) for result in results],
            "exponent": exponent(list(values), results),
            "exponent_of_upper_half": exponent(list(values[upper:]), results[upper:]),
        }
    report("scaling", threads=args.threads, axes=axes)


if __name__ == "__main__":
    main()
