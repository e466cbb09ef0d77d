"""`minitransformer cost`: parameters, operations and hours of a model's training.

The paper estimates operations from time: seconds times devices times what each device
sustains (section 6.1, footnote 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from minitransformer.cli import Parser, add_arguments, exit_code, positive
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig, TrainingConfig
from minitransformer.settings.options import UsageError, flags_of, make_config
from minitransformer.settings.presets import find_preset
from minitransformer.training.cost import parameters_by_block, training_flops

# The speed that the paper takes a GPU to sustain (footnote 5). Units: TFLOP/s
SUSTAINED_TFLOPS = {"K80": 2.8, "K40": 3.7, "M40": 6.0, "P100": 9.5}

# How long a step took on eight P100 (5.2): 100,000 steps of base in 12 hours, 300,000
# of big in 3.5 days. Units: seconds
SECONDS_PER_STEP = {"base": 0.432, "big": 1.008}

# The settings of the training that the operations depend on, and those of the model
# that they do not.
COUNTED = ("max_tokens", "accumulate", "steps")
FREE = ("dropout", "attention_dropout", "relu_dropout")


def paper_flops(seconds: float, device: str) -> float:
    """Estimate operations as the paper does: time x devices x sustained speed (6.1).

    `device` is COUNTxNAME or COUNTxTFLOPS, such as 8xP100 or 8x67.

    Raises: UsageError if it is neither.
    """
    count, _, name = device.partition("x")
    try:
        speed = SUSTAINED_TFLOPS.get(name) or float(name)
        flops = seconds * int(count) * speed * 1e12
        possible = int(count) > 0 and 0 < flops < math.inf
    except ValueError:
        possible = False
    if not possible:
        raise UsageError(
            f"--device: expected COUNTxNAME of {', '.join(SUSTAINED_TFLOPS)} or "
            f"COUNTxTFLOPS, got {device}"
        )
    return flops


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer cost",
        "Print a model's parameters and the operations and hours of its training.",
        ("minitransformer cost --config big --steps 300000 --device 8xP100",),
        "Operations are estimated from time, as the paper does (section 6.1, footnote "
        "5), and\ncounted from the matrix products. The preset of --config replaces "
        "the defaults above.",
    )
    add = parser.add_argument
    add("--config", default="base", metavar="NAME", help="see train.py (default base)")
    device = "GPUs, as COUNTxNAME or COUNTxTFLOPS (default 8xP100)"
    add("--device", metavar="GPUS", help=device)
    step = "seconds a step (default the paper's, for base and big unchanged)"
    add("--seconds-a-step", type=float, metavar="S", help=step)
    length = "tokens per sentence, on either side (default 25)"
    add("--length", type=positive, default=25, metavar="N", help=length)
    add_arguments(parser, ModelConfig, without=FREE)
    trained = [f.name for f in fields(TrainingConfig) if f.name not in COUNTED]
    add_arguments(parser, TrainingConfig, without=tuple(trained))
    args = parser.parse_args(arguments)

    def work() -> None:
        _, preset = find_preset(args.config)
        changes = flags_of(args, ModelConfig) | flags_of(args, TrainingConfig)
        config = make_config(ModelConfig, preset, changes)
        training = make_config(TrainingConfig, preset, changes)
        seconds = args.seconds_a_step
        if seconds is None and not changes.keys() - {"steps"}:
            seconds = SECONDS_PER_STEP.get(args.config)
        if seconds is not None and not 0 < seconds < math.inf:
            raise UsageError(f"--seconds-a-step: expected more than 0, got {seconds}")
        if seconds is None and args.device:
            raise UsageError("--device: expected --seconds-a-step beside it")
        by_time = {}
        if seconds is not None:
            total, device = seconds * training.steps, args.device or "8xP100"
            by_time[f"hours on {device}"] = f"{total / 3600:,.1f}"
            by_time["FLOP, by time (the paper)"] = f"{paper_flops(total, device):.2e}"
        blocks = parameters_by_block(Transformer(config, seed=None))
        for block, count in blocks.items():
            print(f"{block:<28}{count:>16,}")
        print(f"{'parameters':<28}{sum(blocks.values()):>16,}")
        tokens = training.max_tokens * training.accumulate
        counted = training_flops(config, args.length, args.length)
        counted *= tokens / args.length * training.steps
        print(f"{training.steps:,} steps of {tokens:,} + {tokens:,} tokens")
        for name, value in by_time.items():
            print(f"{name:<28}{value:>16}")
        print(f"{'FLOP, counted':<28}{counted:>16.2e}")

    return exit_code(parser.prog, work)
