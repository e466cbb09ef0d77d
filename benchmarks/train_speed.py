"""Training speed of this engine and of PyTorch, same shapes, tokens and threads.

    python benchmarks/train_speed.py --shape d256 --pairs 5

Each side runs in a process of its own, one after the other, in alternating pairs; the
medians and their ratio are printed as JSON. PyTorch's side is `nn.Transformer` with
fused Adam, the same embedding, label-smoothed loss and post-norm layers. Tokens are
source and target tokens a second, padding excluded (there is none here).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time

SHAPES = {  # d_model, d_ff, heads, layers, vocabulary, sentences, tokens a sentence
    "d128": (128, 256, 4, 4, 8000, 145, 14),
    "d256": (256, 1024, 4, 3, 8000, 64, 20),
    "d512": (512, 2048, 8, 6, 8000, 50, 32),
}


def batch(vocab_size: int, sentences: int, length: int):
    import numpy as np

    rng = np.random.default_rng(0)
    source = rng.integers(4, vocab_size, (sentences, length))
    target = rng.integers(4, vocab_size, (sentences, length + 1))
    return source, target


def ours(shape: str, threads: int):
    """Return a function that makes one training step and returns its loss."""
    from minitransformer import backend
    from minitransformer.config import ModelConfig
    from minitransformer.data import Batch
    from minitransformer.layers import ParameterBuffer
    from minitransformer.optimizer import Adam
    from minitransformer.parallel import ThreadedModel
    from minitransformer.transformer import Transformer

    d, ff, heads, layers, vocab, sentences, length = SHAPES[shape]
    backend.tune_allocator()
    model = Transformer(
        ModelConfig(
            vocab_size=vocab,
            encoder_layers=layers,
            decoder_layers=layers,
            d_model=d,
            d_ff=ff,
            num_heads=heads,
        )
    )
    parameters = ParameterBuffer(model)
    adam = Adam(parameters.data, 0.9, 0.98, 1e-9)
    threaded = ThreadedModel(model, parameters, threads)
    data = Batch(*batch(vocab, sentences, length))

    def step() -> float:
        loss = threaded.gradient([data], 0.1, (1, adam.steps))
        adam.update(parameters.grad, 1e-4)
        return loss

    return step


def pytorch(shape: str, threads: int):
    import torch
    from torch import nn

    d, ff, heads, layers, vocab, sentences, length = SHAPES[shape]
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    embedding = nn.Embedding(vocab, d)
    nn.init.normal_(embedding.weight, 0, d**-0.5)
    model = nn.Transformer(d, heads, layers, layers, ff, 0.1, batch_first=True)
    model.encoder.norm = model.decoder.norm = None
    optimizer = torch.optim.Adam(
        [*model.parameters(), embedding.weight],
        lr=1e-4,
        betas=(0.9, 0.98),
        eps=1e-9,
        fused=True,
    )
    dropout = nn.Dropout(0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    causal = nn.Transformer.generate_square_subsequent_mask(length)
    positions = torch.randn(length, d)
    source, target = map(torch.from_numpy, batch(vocab, sentences, length))

    def embed(ids):
        return dropout(embedding(ids) * math.sqrt(d) + positions)

    def step() -> float:
        optimizer.zero_grad()
        output = model(
            embed(source), embed(target[:, :-1]), tgt_mask=causal, tgt_is_causal=True
        )
        logits = output.reshape(-1, d) @ embedding.weight.T
        loss = criterion(logits, target[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(side: str, shape: str, threads: int, steps: int) -> None:
    step = (ours if side == "ours" else pytorch)(shape, threads)
    times = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - started)
    *_, sentences, length = SHAPES[shape]
    result = {
        "tokens_per_second": 2 * sentences * length / statistics.median(times[2:]),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": loss,
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="d256")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps a process")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--side", choices=("ours", "pytorch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measure(args.side, args.shape, args.threads, args.steps)
        return
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "pytorch": []}
    for _ in range(args.pairs):
        for side, found in runs.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            output = subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout
            found.append(json.loads(output.splitlines()[-1]))
    medians = {
        side: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for side, found in runs.items()
    }
    ratios = [
        a["tokens_per_second"] / b["tokens_per_second"]
        for a, b in zip(*runs.values(), strict=True)
    ]
    report = {
        "benchmark": "train_speed",
        "shape": args.shape,
        "threads": args.threads,
        "pairs": args.pairs,
        **{side: {k: round(v, 3) for k, v in m.items()} for side, m in medians.items()},
        "speed_ratio": round(statistics.median(ratios), 3),
        "speed_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "memory_ratio": round(
            medians["ours"]["peak_memory_mb"] / medians["pytorch"]["peak_memory_mb"], 3
        ),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
