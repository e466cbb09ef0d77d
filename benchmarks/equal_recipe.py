"""The same training in this engine and in PyTorch: weights, batches, schedule, Adam.

    python benchmarks/equal_recipe.py --data data/multi30k --source en --target de \
        --steps 200 --dropout 0 --plot losses.png
    python benchmarks/equal_recipe.py --data data/multi30k --source en --target de \
        --steps 2000 --seeds 1 2 3 --precision fp32 bf16

Both sides begin with the same weights and take the same batches, in processes of their
own, one after the other. Without dropout, their losses differ by rounding alone, which
training amplifies; --float64 shows how far both agree where rounding is small. With
dropout, they drop the same places at the same rates, but other elements. The PyTorch
side is benchmarks/torch_training.py, in float32 or in the mode that --mode names. At
the end, both translate the test text with this engine's beam search in float32, without
averaging checkpoints; PyTorch's side takes the first seed alone, this engine's every
seed in every format that --precision names. The losses, minutes of training and BLEU
are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

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
        self.model, self.training = model, training
        self.parameters = ParameterBuffer(model)
        self.threaded = CpuModel(model, self.parameters, threads)
        constants = training.beta1, training.beta2, training.epsilon
        share = None, threads, self.threaded.map
        self.adam = Adam(self.parameters.data, *constants, *share)

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
        smoothing = training.label_smoothing
        self.ours = model
        self.torch = TorchUpdates(model, threads, mode, training.seed, smoothing)
        self.update = self.torch.update

    def trained(self) -> Transformer:
        self.torch.model.copy_to(self.ours)
        return self.ours


def measure(args: argparse.Namespace) -> None:
    """Train one side, and print its losses, minutes and BLEU."""
    preset = PRESETS[args.config]
    changed = {} if args.dropout is None else {"dropout": args.dropout}
    config = make_config(ModelConfig, preset, changed)
    training = make_config(
        TrainingConfig, preset, {"seed": args.seed, "steps": args.steps}
    )
    folder = {"data": str(args.data), "source": args.source, "target": args.target}
    text = find_text(make_config(TextConfig, {}, folder))
    tokenizer = cached_tokenizer(
        text["train"], config.vocab_size, args.cache, args.threads
    )
    corpus = encoded_corpus(text["train"], tokenizer, args.cache, args.threads)
    stream = BatchStream(corpus, training, 0, 0)
    dtype = "float64" if args.float64 else "float32"
    model = Transformer(config, training.seed, dtype)
    side: Ours | PyTorch
    if args.side == "ours":
        open_device("cpu", args.precision[0], args.threads)
        side = Ours(model, training, args.threads)
    else:
        side = PyTorch(model, training, args.threads, args.mode)
    peak = training.learning_rate or peak_learning_rate(config.d_model, training.warmup)
    losses, seconds = [], 0.0
    for step in range(1, args.steps + 1):
        batch = next(stream)
        started = time.perf_counter()
        losses.append(side.update(batch, learning_rate(step, peak, training.warmup)))
        seconds += time.perf_counter() - started
        if step % 100 == 0:
            print(f"{args.side} step {step} loss {losses[-1]:.4f}", file=sys.stderr)
    figures = {"losses": losses, "minutes": seconds / 60}
    if "test" in text and not args.no_bleu:
        open_device("cpu", "fp32", args.threads)
        translator = Translator(side.trained(), tokenizer, num_threads=args.threads)
        pairs = list(text["test"].lines())
        lines = translator.translate(
            [source for source, _ in pairs], make_config(DecodingConfig, preset, {})
        )
        quality = translation_quality(lines, [target for _, target in pairs])
        figures |= {"bleu": quality.bleu, "signature": quality.bleu_signature}
    found = {name: value for name, value in figures.items() if name != "losses"}
    print(f"{args.side} seed {args.seed} {found}", file=sys.stderr)
    print(json.dumps(figures))


def draw(found: dict[str, list[float]], path: Path) -> None:
    """Draw the losses of all sides, and below them how far they are from the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    first = next(iter(found.values()))
    steps = np.arange(1, len(first) + 1)
    for style, (name, losses) in zip(
        ("-", "--", ":", "-."), found.items(), strict=False
    ):
        above.plot(steps, losses, style, label=name, linewidth=1.2)
        if losses is not first:
            difference = np.abs(np.subtract(losses, first))
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


def main() -> None:
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
    add(
        "--precision",
        nargs="+",
        choices=("fp32", "bf16"),
        default=["fp32"],
        help="how this engine multiplies (default fp32)",
    )
    add("--no-bleu", action="store_true", help="do not translate the test text")
    add("--plot", type=Path, metavar="FILE", help="draw the losses")
    add("--cache", type=Path, default=Path("cache"))
    add("--threads", type=int, default=num_cores())
    add("--side", choices=("ours", "pytorch"), help=argparse.SUPPRESS)
    add("--seed", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.float64 and "bf16" in args.precision:
        parser.error("--float64 does not go with --precision bf16")
    if args.side:
        measure(args)
        return
    sides = [("pytorch", args.seeds[0], "fp32")]
    sides += [("ours", seed, low) for low in args.precision for seed in args.seeds]
    found = {}
    for side, seed, precision in sides:
        wanted = ["--side", side, "--seed", str(seed), "--precision", precision]
        name = f"{side}, bf16" if precision == "bf16" else side
        found[f"{name}, seed {seed}"] = run_side(__file__, [*sys.argv[1:], *wanted])
    losses = {name: figures.pop("losses") for name, figures in found.items()}
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
        **found,
    )


if __name__ == "__main__":
    main()
