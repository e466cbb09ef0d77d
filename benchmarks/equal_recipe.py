"""The same training in this engine and in PyTorch: weights, batches, schedule, Adam.

    python benchmarks/equal_recipe.py --data data/multi30k --source en --target de \
        --steps 200 --dropout 0 --plot losses.png
    python benchmarks/equal_recipe.py --data data/multi30k --source en --target de \
        --steps 2000 --seeds 1 2 3 --precision fp32 bf16

Both sides begin with the same weights and take the same batches, in processes of their
own, one after the other. Without dropout, their losses differ by rounding alone, which
training amplifies; --float64 shows the difference where rounding is small. With
dropout, they drop the same places at the same rates, but other elements. The PyTorch
side is benchmarks/torch_training.py, in float32 or in the mode that --mode names. At
the end, both translate the test text with this engine's beam search in float32, without
averaging checkpoints. PyTorch's side takes the first seed alone; this engine takes
every seed in every format that --precision names. The losses, the minutes of training
and BLEU are printed as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import report, run_side
from train_speed import PYTORCH

from minitransformer.backends.devices import open_device
from minitransformer.commands.plot import write_picture
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS
from minitransformer.settings.text_config import TextConfig
from minitransformer.system.machine import num_cores, tune_allocator
from minitransformer.text.batches import Batch, BatchStream
from minitransformer.text.cache import cached_tokenizer, encoded_corpus
from minitransformer.text.find import find_text
from minitransformer.training.optimizer import (
    Adam,
    learning_rate,
    peak_learning_rate,
)
from minitransformer.training.parallel import CpuModel
from minitransformer.translation.quality import translation_quality
from minitransformer.translation.translator import Translator


class Ours:
    def __init__(self, model: Transformer, training: TrainingConfig, threads: int):
        tune_allocator()
        self.model = model
        self.training = training
        self.parameters = ParameterBuffer(model)
        self.threaded = CpuModel(model, self.parameters, threads)
        self.adam = Adam(
            self.parameters.data,
            beta1=training.beta1,
            beta2=training.beta2,
            epsilon=training.epsilon,
            num_threads=threads,
            map=self.threaded.map,
        )

    def update(self, batch: Batch, rate: float) -> float:
        key = self.training.seed, self.adam.steps + 1
        loss = self.threaded.forward_backward(
            [batch], self.training.label_smoothing, key
        )
        self.adam.update(self.parameters.grad, rate)
        return float(loss)

    def trained(self) -> Transformer:
        self.threaded.close()
        return self.model


class PyTorch:
    def __init__(
        self, model: Transformer, training: TrainingConfig, threads: int, mode: str
    ):
        import torch
        from torch_training import TorchUpdates

        torch.set_default_dtype(getattr(torch, model.embedding.table.data.dtype.name))
        self.ours = model
        self.torch = TorchUpdates(
            model,
            threads,
            mode,
            seed=training.seed,
            label_smoothing=training.label_smoothing,
        )
        self.update = self.torch.update

    def trained(self) -> Transformer:
        self.torch.model.copy_to(self.ours)
        return self.ours


def measure(args: argparse.Namespace) -> None:
    """Train one side, and print its losses, minutes and BLEU."""
    # The settings, the text and its batches, as train.py has them.
    preset = PRESETS[args.config]
    changed = {} if args.dropout is None else {"dropout": args.dropout}
    config = make_config(ModelConfig, preset, changed)
    given = {"seed": args.seed, "steps": args.steps}
    training = make_config(TrainingConfig, preset, given)
    folder = {"data": str(args.data), "source": args.source, "target": args.target}
    text = find_text(make_config(TextConfig, {}, folder))
    tokenizer = cached_tokenizer(
        text["train"], config.vocab_size, args.cache, args.threads
    )
    corpus = encoded_corpus(text["train"], tokenizer, args.cache, args.threads)
    stream = BatchStream(corpus, training)
    # The model, on one side or the other.
    dtype = "float64" if args.float64 else "float32"
    model = Transformer(config, training.seed, dtype)
    side: Ours | PyTorch
    if args.side == "ours":
        open_device("cpu", args.precision[0], args.threads)
        side = Ours(model, training, args.threads)
    else:
        side = PyTorch(model, training, args.threads, args.mode)
    figures = train(side, args.side, stream, training, config.d_model)
    # BLEU of the test text.
    if "test" in text and not args.no_bleu:
        open_device("cpu", "fp32", args.threads)
        translator = Translator(side.trained(), tokenizer, num_threads=args.threads)
        sources, references = zip(*text["test"].lines(), strict=True)
        decoding = make_config(DecodingConfig, preset, {})
        lines = translator.translate(sources, decoding)
        quality = translation_quality(lines, references)
        figures |= {"bleu": quality.bleu, "signature": quality.bleu_signature}
    shown = {name: value for name, value in figures.items() if name != "losses"}
    print(f"{args.side} seed {args.seed} {shown}", file=sys.stderr)
    print(json.dumps(figures))


def train(
    side: Ours | PyTorch,
    name: str,
    stream: BatchStream,
    training: TrainingConfig,
    d_model: int,
) -> dict[str, Any]:
    """Make all updates; return the loss before each, and the minutes that they took."""
    peak = training.learning_rate or peak_learning_rate(d_model, training.warmup)
    losses = []
    seconds = 0.0
    for step in range(1, training.steps + 1):
        batch = next(stream)
        started = time.perf_counter()
        losses.append(side.update(batch, learning_rate(step, peak, training.warmup)))
        seconds += time.perf_counter() - started
        if step % 100 == 0:
            print(f"{name} step {step} loss {losses[-1]:.4f}", file=sys.stderr)
    return {"losses": losses, "minutes": seconds / 60}


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Draw the losses of all sides, and below them their differences from the first."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(6.4, 5))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    first = next(iter(losses.values()))
    steps = np.arange(1, len(first) + 1)
    # Losses above, in styles that show curves that coincide; differences below.
    styles = itertools.cycle(("-", "--", ":", "-."))
    for style, (name, curve) in zip(styles, losses.items(), strict=False):
        above.plot(steps, curve, style, label=name, linewidth=1.2)
        if curve is not first:
            difference = np.abs(np.subtract(curve, first))
            below.semilogy(steps, np.maximum(difference, 1e-16), label=name)
    above.set_ylabel("loss, nats a token")
    above.legend(frameon=False)
    below.set_ylabel("difference")
    below.set_xlabel("updates")
    for panel in (above, below):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    write_picture(figure, path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--config", default="multi30k", help="preset (default multi30k)")
    add("--data", type=Path, required=True, help="folder of train.LANG, test*.LANG")
    add("--source", required=True)
    add("--target", required=True)
    add("--steps", type=int, default=200)
    add("--dropout", type=float, help="default that of the preset")
    add("--seeds", type=int, nargs="+", default=[1])
    add("--mode", choices=PYTORCH, default="pytorch", help="how PyTorch computes")
    add("--float64", action="store_true", help="compute both sides in double precision")
    formats = "how this engine multiplies (default fp32)"
    kinds = ("fp32", "bf16")
    add("--precision", nargs="+", choices=kinds, default=["fp32"], help=formats)
    add("--no-bleu", action="store_true", help="do not translate the test text")
    add("--plot", type=Path, metavar="FILE", help="draw the losses")
    add("--cache", type=Path, default=Path("cache"))
    add("--threads", type=int, default=num_cores())
    add("--side", choices=("ours", "pytorch"), help=argparse.SUPPRESS)
    add("--seed", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.float64 and "bf16" in args.precision:
        parser.error("--float64 does not go with --precision bf16")
    return args


def main() -> None:
    args = parse_arguments()
    if args.side:
        measure(args)
        return
    # PyTorch with the first seed, and this engine with all, one after the other.
    sides = [("pytorch", args.seeds[0], "fp32")]
    sides += [("ours", seed, low) for low in args.precision for seed in args.seeds]
    figures = {}
    for side, seed, precision in sides:
        wanted = ["--side", side, "--seed", str(seed), "--precision", precision]
        name = f"{side}, bf16" if precision == "bf16" else side
        figures[f"{name}, seed {seed}"] = run_side(__file__, [*sys.argv[1:], *wanted])
    losses = {name: each.pop("losses") for name, each in figures.items()}
    # The difference of the losses of PyTorch and of this engine, for the first seed.
    theirs, ours, *_ = losses.values()
    if args.plot:
        draw(losses, args.plot)
    report(
        "equal_recipe",
        config=args.config,
        steps=args.steps,
        threads=args.threads,
        mode=args.mode,
        dropout=args.dropout,
        float64=args.float64,
        last_loss={name: each[-1] for name, each in losses.items()},
        largest_difference=float(np.abs(np.subtract(theirs, ours)).max()),
        **figures,
    )


if __name__ == "__main__":
    main()
