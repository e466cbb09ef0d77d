r"""Speed on one GPU: training and decoding, of this engine and of PyTorch.

    python benchmarks/gpu.py       # a step of base, in about a minute
    python benchmarks/gpu.py --shapes base-25000 big-25000 --rounds 3 \
        --sides ours pytorch compiled ours-decoding pytorch-decoding

Each side runs in a process of its own, in alternating rounds; a side of torch.compile
takes a minute or two to start in each. Medians and ratios are printed as JSON to
standard output, and as a table to standard error. All sides compute in bfloat16 with
float32 parameters; PyTorch runs eagerly under autocast, or compiled (`torch.compile`),
without CUDA graphs and with them. Every side repeats one batch of random tokens without
padding, with the update of Adam; PyTorch's batch stays on the GPU, ours is copied there
at each step.
TFLOP/s counts the matrix products (`training_flops`), and its share is
of the rate that PyTorch reaches in a large bfloat16 product in the same run. Memory is
all memory in use on the GPU. Decoding runs the preset multi30k with random weights on
sources of 5 to 25 tokens; outputs are as long as sources, and their tokens are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from harness import Result, medians, ratio, report, run_side

from minitransformer.backends.cuda.optimizer import GpuAdam
from minitransformer.backends.cuda.training import GpuModel
from minitransformer.backends.devices import open_device
from minitransformer.cli import exit_code
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import EOS_ID, ModelConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS
from minitransformer.text.batches import Batch
from minitransformer.text.ids import Ragged
from minitransformer.training.cost import training_flops
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.optimizer import Adam, Optimizer
from minitransformer.training.parallel import CpuModel, ParallelModel
from minitransformer.translation.batch_translation import map_batches, translate_ids

SHAPES = {  # preset, sentences, tokens of each on either side
    "base-4096": ("base", 128, 32),
    "base-25000": ("base", 896, 28),
    "big-4096": ("big", 128, 32),
    "big-25000": ("big", 896, 28),
    "tiny": ("tiny", 8, 12),  # to try this script
}
TRAINING = ("ours", "ours-eager", "pytorch", "compiled", "compiled-graphs")
COMPILED = {"compiled": "default", "compiled-graphs": "reduce-overhead"}
DECODING = ("ours-decoding", "pytorch-decoding")
VOCAB_SIZE = 37_000

Step = Callable[[int], object]
Wait = Callable[[], object]


def workload(shape: str) -> tuple[ModelConfig, Batch]:
    preset, sentences, length = SHAPES[shape]
    config = make_config(ModelConfig, PRESETS[preset], {"vocab_size": VOCAB_SIZE})
    rng = np.random.default_rng(0)
    source = rng.integers(4, VOCAB_SIZE, (sentences, length))
    return config, Batch(source, rng.integers(4, VOCAB_SIZE, (sentences, length + 1)))


def ours(args: argparse.Namespace) -> tuple[Step, Wait]:
    config, batch = workload(args.shape)
    device = open_device(args.device)
    parameters = ParameterBuffer(model := Transformer(config))
    parameters.move_to(device.xp, device.low_precision)
    scale = LossScale(device.xp, device.precision)
    graphs, training = args.side == "ours", TrainingConfig()
    if args.device == "cpu":  # to try this script
        parallel: ParallelModel = CpuModel(model, parameters, device.num_threads)
        adam: Optimizer = Adam(parameters.data, 0.9, 0.98, 1e-9)
    else:
        parallel = GpuModel(model, parameters, scale, graphs=graphs, log=complain)
        adam = GpuAdam(parameters, training, scale)

    def step(number: int) -> object:
        loss = parallel.forward_backward([batch], 0.1, (1, number))
        adam.step(parameters.grad, loss, 1e-4)
        return loss

    return step, parallel.synchronize


def complain(line: str) -> None:
    print(line, file=sys.stderr)


def pytorch(args: argparse.Namespace) -> tuple[Step, Wait]:
    import torch
    from torch_training import TorchTraining

    torch.manual_seed(1)
    config, batch = workload(args.shape)
    model = TorchTraining(Transformer(config, seed=1)).to(args.device)
    mode = COMPILED.get(args.side)
    loss_of = torch.compile(model, mode=mode) if mode else model
    optimizer = model.adam()
    source, target = (
        torch.from_numpy(ids).to(args.device) for ids in (batch.source, batch.target)
    )

    def step(number: int) -> object:
        optimizer.zero_grad()
        with torch.autocast(args.device, torch.bfloat16):
            loss = loss_of(source, target, False)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (lambda: None) if args.device == "cpu" else torch.cuda.synchronize


def memory_mb(args: argparse.Namespace) -> float:
    """What the GPU has in use."""
    if args.device == "cpu":
        return 0.0
    if args.side.startswith("ours"):
        free, total = open_device(args.device).xp.cuda.runtime.memGetInfo()
    else:
        import torch

        free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def measure_training(args: argparse.Namespace) -> Result:
    config, batch = workload(args.shape)
    step, wait = (ours if args.side.startswith("ours") else pytorch)(args)
    count, times = 0, []
    for repeat in range(args.repeats + 1):
        wait()
        started = time.perf_counter()
        for _ in range(args.steps):
            loss, count = step(count), count + 1
        wait()
        if repeat:  # the first warms up
            times.append((time.perf_counter() - started) / args.steps)
    seconds = statistics.median(times)
    length = batch.source.shape[1]
    flops = training_flops(config, length, length) * len(batch.source)
    return {
        "milliseconds_a_step": 1e3 * seconds,
        "tokens_per_second": (batch.source_tokens + batch.target_tokens) / seconds,
        "tflops": flops / seconds / 1e12,
        "memory_mb": memory_mb(args),
        "loss": float(loss),  # type: ignore[arg-type]
    }


def measure_decoding(args: argparse.Namespace) -> Result:
    """Translate as many sentences as Multi30k's test set has, of about its lengths."""
    count, beam = args.sentences, args.beam
    model = Transformer(make_config(ModelConfig, PRESETS["multi30k"], {}), seed=1)
    model.embedding.table.data[EOS_ID] = 0  # never among the best: no output ends early
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 26, count)
    sources = [rng.integers(4, model.config.vocab_size, n).tolist() for n in lengths]
    if args.side.startswith("ours"):
        device = open_device(args.device)
        ParameterBuffer(model).move_to(device.xp, device.low_precision)
        config = DecodingConfig(
            beam=beam,
            max_len_a=1.0,
            max_len_b=0,
            decode_tokens=args.decode_tokens,
        )

        def decode() -> object:
            return translate_ids(model, sources, config)

    else:
        import torch
        from torch_decoder import TorchDecoder

        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        decoder = TorchDecoder(model, True, args.device, dtype)
        encoded = Ragged.from_lists(sources)

        def search(batch: np.ndarray) -> list[list[int]]:
            ids, limits = torch.from_numpy(encoded.pad(batch)), lengths[batch] + 1
            return decoder.search(ids, limits.tolist(), beam, 0.6)

        def decode() -> object:
            max_tokens = args.decode_tokens // beam
            return list(map_batches(search, lengths, max_tokens, num_threads=1))

    decode()
    times = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        decode()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    tokens = float((lengths + 1).sum())
    return {"tokens_per_second": tokens / seconds, "memory_mb": memory_mb(args)}


def measure_products(args: argparse.Namespace) -> Result:
    """The rate of a large product of random bfloat16 matrices."""
    import torch

    size = 256 if args.device == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=args.device, dtype=torch.bfloat16)
    wait = (lambda: None) if args.device == "cpu" else torch.cuda.synchronize
    times = []
    for _ in range(12):
        wait()
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        wait()
        times.append((time.perf_counter() - started) / 10)
    return {"tflops": 2 * size**3 / statistics.median(times[2:]) / 1e12}


def table(found: dict[str, dict[str, Result]], rate: float) -> str:
    """Lines by shape and side."""
    lines = [f"{'':<32}{'tokens/s':>12}{'ms':>9}{'TFLOP/s':>9}{'share':>7}{'MB':>9}"]
    for shape, sides in found.items():
        for side, values in sides.items():
            line = f"{f'{shape}  {side}':<32}{values['tokens_per_second']:>12,.0f}"
            if "tflops" in values:
                line += f"{values['milliseconds_a_step']:>9.1f}{values['tflops']:>9.1f}"
                line += f"{values['tflops'] / rate:>7.2f}"
            else:
                line += " " * 25
            lines.append(f"{line}{values['memory_mb']:>9,.0f}")
    return "\n".join([*lines, f"{'bfloat16 products':<53}{rate:>9.1f}"])


def measured(
    sides: list[str], flags: list[str], rounds: int
) -> dict[str, list[Result]]:
    """Run each side in turns; one that fails is left out of what follows, and named."""
    found: dict[str, list[Result]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(found):
            try:
                found[side].append(run_side(__file__, [*flags, "--side", side]))
            except SystemExit as error:
                complain(f"left out: {error}")
                del found[side]
                continue
            complain(f"round {number + 1}/{rounds}: {side} {found[side][-1]}")
    return found


def device_name(device: str) -> str:
    """The GPU's name, asked for in a process that then frees its memory."""
    if device == "cpu":
        return device
    command = [sys.executable, __file__, "--side", "device"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


def print_device_name() -> None:
    cupy = open_device("cuda").xp
    print(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    shapes, sides = ["base-25000"], ["ours", "ours-eager", "pytorch"]
    add("--shapes", nargs="*", choices=SHAPES, default=shapes, help="of training")
    add("--sides", nargs="+", choices=(*TRAINING, *DECODING), default=sides)
    add("--rounds", type=int, default=1, help="alternating rounds")
    add("--repeats", type=int, default=5, help="timed repeats in a round")
    add("--steps", type=int, default=20, help="steps of each repeat")
    add("--sentences", type=int, default=1000, help="sentences decoded")
    add("--beam", type=int, default=4, help="beams of decoding")
    add("--decode-tokens", type=int, default=65536)
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu to try it")
    add("--shape", choices=SHAPES, help=argparse.SUPPRESS)
    add("--side", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_one_side(args: argparse.Namespace) -> None:
    if args.side == "device":
        sys.exit(exit_code("gpu.py", print_device_name))
    measures = {"products": measure_products}
    measures |= dict.fromkeys(DECODING, measure_decoding)
    measures |= dict.fromkeys(TRAINING, measure_training)
    print(json.dumps(measures[args.side](args)))


def ratios(sides: dict[str, list[Result]]) -> dict[str, dict[str, float]]:
    """The speed of the first side over that of each other, round by round."""
    if not sides:
        return {}
    first, *others = sides
    return {
        f"{first} over {other}": ratio(sides[first], sides[other], "tokens_per_second")
        for other in others
    }


def main() -> None:
    args = parse_arguments()
    if args.side:
        measure_one_side(args)
        return

    # Each side runs in a process of its own, after the rate of a large product.
    name = device_name(args.device)
    options = ["repeats", "steps", "sentences", "beam", "decode_tokens", "device"]
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in options]
    rate = run_side(__file__, [*flags, "--side", "products"])["tflops"]
    runs: dict[str, dict[str, list[Result]]] = {}
    training = [side for side in args.sides if side in TRAINING]
    for shape in args.shapes if training else []:
        runs[shape] = measured(training, [*flags, "--shape", shape], args.rounds)
    if decoding := [side for side in args.sides if side in DECODING]:
        runs["multi30k"] = measured(decoding, flags, args.rounds)

    # Say the medians, the ratios of speeds, and the share of the large product's rate.
    medians_of = {
        shape: {side: medians(results) for side, results in sides.items()}
        for shape, sides in runs.items()
    }
    complain(table(medians_of, rate))
    report(
        "gpu",
        device=name,
        products_tflops=round(rate, 1),
        rounds=args.rounds,
        measured=medians_of,
        speed={shape: ratios(sides) for shape, sides in runs.items()},
        share_of_products={
            shape: round(sides["ours"]["tflops"] / rate, 3)
            for shape, sides in medians_of.items()
            if "ours" in sides and shape in args.shapes
        },
    )


if __name__ == "__main__":
    main()
