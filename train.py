"""Train a Transformer (section 5 of "Attention Is All You Need").

    python train.py                       # the built-in corpus, minutes on a CPU
    python train.py --config multi30k --data DIR --source en --target de
    python train.py --config base --train-source FILE --train-target FILE
    python train.py --resume              # go on with the newest run
    python train.py --device cuda --config base --gpus 8

The run directory receives config.json, tokenizer.model, metrics.jsonl, train.log and
checkpoints, which translate.py reads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from minitransformer import backend, checkpoint, distributed
from minitransformer.checkpoint import Checkpoint, RunDirectory, WatchedRun
from minitransformer.config import (
    DecodingConfig,
    ModelConfig,
    RanksConfig,
    RunConfig,
    TextConfig,
    TrainingConfig,
)
from minitransformer.cost import summary
from minitransformer.cuda.training import GpuAdam, GpuModel
from minitransformer.data import (
    BatchStream,
    ReadAhead,
    cached_tokenizer,
    encoded_corpus,
)
from minitransformer.decoding import translate_lines
from minitransformer.distributed import Communicator
from minitransformer.evaluation import Quality, quality, validate
from minitransformer.files import write_bytes
from minitransformer.grammar.corpus import write_corpus
from minitransformer.launch import launch_training
from minitransformer.layers import ParameterBuffer
from minitransformer.optimizer import Adam, learning_rate, paper_peak
from minitransformer.options import (
    Parser,
    UsageError,
    add_arguments,
    build,
    exit_code,
    given,
    positive,
)
from minitransformer.parallel import ThreadedModel
from minitransformer.precision import LossScale, choose_precision, use_precision
from minitransformer.presets import find_preset
from minitransformer.profiling import profile_updates
from minitransformer.progress import Progress
from minitransformer.text import find_text, text_pairs
from minitransformer.transformer import Transformer


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("train.py", __doc__ or "")
    add = parser.add_argument
    preset = (
        "tiny, multi30k, small, base, big, base-ROW of Table 3, parsing[-small], "
        "a JSON or TOML file"
    )
    add("--config", metavar="NAME", help=f"all defaults: {preset} (default tiny)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    add("--threads", type=positive, help="CPU threads (default all cores)")
    eager = "launch a GPU's work kernel by kernel, not as graphs, to find errors"
    add("--eager", action="store_true", help=eager)
    new = "new run directory (default runs/CONFIG-TIME)"
    add("--run", "--save-dir", type=Path, metavar="DIR", help=new)
    last = "go on with a run from its last checkpoint (default the newest run)"
    add("--resume", nargs="?", const=Path(), type=Path, metavar="DIR", help=last)
    add("--dry-run", action="store_true", help="say what would be done, and end")
    profile = "time N updates by operation and write nothing (default 20)"
    add("--profile", nargs="?", const=20, type=positive, metavar="N", help=profile)
    kept = "where vocabularies and encoded text are kept (default cache)"
    add("--cache", default=Path("cache"), type=Path, metavar="DIR", help=kept)
    for cls in (TextConfig, ModelConfig, TrainingConfig, DecodingConfig, RanksConfig):
        add_arguments(parser, cls, without=("nbest",))
    args = parser.parse_args(arguments)
    try:
        args.processes = build(RanksConfig, {}, given(args, RanksConfig))
    except UsageError as error:
        parser.error(str(error))
    new_only = args.run or args.config or args.profile or args.dry_run
    if args.resume is not None and new_only:
        names = "--run, --config, --profile and --dry-run"
        parser.error(f"{names} are for a new run, not --resume")
    if args.processes.ranks > 1 and args.device != "cpu":
        parser.error("--ranks are processes on CPUs: --device cuda takes --gpus")
    if args.processes.gpus > 1 and args.device != "cuda":
        parser.error(f"--gpus expects --device cuda, got {args.device}")
    if args.eager and args.device == "cpu":
        parser.error("--eager does nothing with --device cpu")
    if args.processes.several and (args.profile or args.dry_run):
        parser.error("--profile and --dry-run are of one process, without --ranks")
    return args


def new_config(args: argparse.Namespace) -> RunConfig:
    """Put a preset and the flags together."""
    name, preset = find_preset(args.config or "tiny")
    named = given(args, TextConfig)
    text = build(TextConfig, {}, named)
    model = build(ModelConfig, preset, given(args, ModelConfig))
    if "max_positions" in args and model.max_length is None:
        raise UsageError("--max-positions does nothing without --positions learned")
    training = build(TrainingConfig, preset, given(args, TrainingConfig))
    decoding = build(DecodingConfig, preset, given(args, DecodingConfig))
    found = find_text(text) if named else write_corpus(args.cache)
    files = {
        split: (str(pair.source.absolute()), str(pair.target.absolute()))
        for split, pair in found.items()
    }
    return RunConfig(name, model, training, decoding, files)


class Trainer:
    """One training run, from the first update or from its last checkpoint."""

    def __init__(
        self,
        run: RunDirectory,
        settings: RunConfig,
        args: argparse.Namespace,
        ranks: Communicator,
    ) -> None:
        self.run, self.settings, self.training = run, settings, settings.training
        self.ranks = ranks
        device = ranks.device(args.device)
        self.xp = backend.device_module(device)
        self.on_cpu = args.device == "cpu"
        precision = choose_precision(self.training.precision, self.xp)
        cores = args.threads or max(backend.num_cores() // ranks.local_size, 1)
        self.cores, self.num_threads = cores, cores if self.on_cpu else 1
        self.device = (
            f"cpu, {cores} threads" if self.on_cpu else f"{device}, {precision}"
        )
        self.signal: int | None = None  # to this process
        self.stopped_by: int | None = None  # the same on all ranks
        self.text = text_pairs(settings.text)
        last = run.steps()[-1:] if args.resume is not None else []
        at = checkpoint.load(last[0], with_moments=True) if last else self.initial(args)
        self.model, self.tokenizer, self.state = at.model, at.tokenizer, at.state
        if self.state["text"] != self.text["train"].digest():
            raise ValueError(
                f"{self.text['train'].source}: the training text has changed since "
                "this run began, so the run cannot be resumed"
            )
        training, self.parameters = self.training, at.parameters
        self.parameters.move_to(self.xp, use_precision(precision, self.xp))
        ranks.agree("text and state", json.dumps(self.state).encode())
        ranks.broadcast(self.parameters.data)
        self.parameters.refresh()
        self.peak = training.learning_rate or paper_peak(
            settings.model.d_model, training.warmup
        )
        self.corpora = {
            split: encoded_corpus(pair, self.tokenizer, args.cache, cores)
            for split, pair in self.text.items()
        }
        self.stream = BatchStream(
            self.corpora["train"], training, self.state["epoch"], self.state["position"]
        )
        scale = LossScale(self.xp, precision, self.state.get("loss_scale"))
        self.progress = Progress(self.state, scale)
        if self.on_cpu:
            constants = training.beta1, training.beta2, training.epsilon
            self.adam = Adam(self.parameters.data, *constants)
            self.engine = ThreadedModel(self.model, self.parameters, cores, ranks)
            self.batches: BatchStream | ReadAhead = self.stream
        else:
            self.adam = GpuAdam(self.parameters, training, scale)
            graphs = not (args.eager or args.profile)
            self.engine = GpuModel(
                self.model, self.parameters, scale, ranks, graphs, self.log
            )
            self.batches = ReadAhead(self.stream)
        if at.moments is not None:
            self.adam.resume(at.step - self.state["skipped"], *at.moments)
        if args.resume is None:
            run.create(settings)
        if not ranks.rank:
            write_bytes(run.tokenizer, self.tokenizer.model)
        run.forget_after(self.state["step"])
        self.began = time.monotonic() - self.state["seconds"]

    def initial(self, args: argparse.Namespace) -> Checkpoint:
        """Learn the vocabulary (5.1), draw the parameters, begin at step 0."""
        train, config = self.text["train"], self.settings.model
        tokenizer = cached_tokenizer(train, config.vocab_size, args.cache, self.cores)
        model = Transformer(config, self.training.seed)
        state = Progress.beginning(train.digest())
        return Checkpoint(model, tokenizer, ParameterBuffer(model), state)

    def log(self, line: str) -> None:
        """Print a line above the progress bar and append it to the run's log."""
        if self.ranks.rank:
            return
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
        self.run.append(self.run.path / "train.log", line)

    def describe(self) -> None:
        """Say what is about to be computed, and on what."""
        accumulate = self.training.accumulate
        cost = summary(self.model, self.stream, accumulate, self.engine)
        count = self.ranks.size
        device = f"{count} ranks, {self.device} each" if count > 1 else self.device
        where = f"run         {self.run.path}", f"device      {device}"
        self.log("\n".join((*where, *cost)))
        if self.state["step"]:
            self.log(f"resumed     after step {self.state['step']:,}")

    def train(self) -> None:
        """Update until the steps, the minutes or the patience are used up."""
        training, state = self.training, self.state
        bar = tqdm(
            total=training.steps,
            initial=state["step"],
            unit="step",
            disable=bool(self.ranks.rank) or not sys.stderr.isatty(),
        )
        finished = state["step"] >= training.steps
        if not self.on_cpu:  # what memory the largest batches need, all others reuse
            for batch in self.stream.largest():
                self.engine.gradient([batch], training.label_smoothing, (0,))
        while not finished and self.stopped_by is None:
            before = state["seconds"]
            self.update()
            bar.update()
            step = state["step"]
            finished = step >= training.steps or (
                training.minutes is not None
                and state["seconds"] >= 60 * training.minutes
            )
            if step % training.log_every == 0:
                self.report()
            if step % training.validate_every == 0 or finished:
                self.validate()
                patience = training.patience or math.inf
                finished |= state["validations_since_best"] >= patience
            if training.saves(step, before, state["seconds"]) or finished:
                self.save()
        if self.stopped_by is not None:
            self.save()
        bar.close()

    def update(self) -> None:
        """One step of section 5.3 on the next `accumulate` batches."""
        training, started = self.training, time.monotonic()
        step = self.state["step"] + 1
        batches = [next(self.batches) for _ in range(training.accumulate)]
        loss = self.engine.gradient(
            batches, training.label_smoothing, (training.seed, step)
        )
        rate = learning_rate(step, self.peak, training.warmup)
        norm, finite = self.adam.step(
            self.parameters.grad, loss, rate, training.clip_norm
        )
        self.progress.add(batches, self.batches, rate, loss, norm, finite)
        if self.on_cpu or self.ranks.size == 1:
            self.agree()
        self.state["window"]["seconds"] += time.monotonic() - started
        if self.on_cpu:
            self.settle()

    def agree(self) -> None:
        """Take rank 0's clock, and stop where a rank was asked to: all at one step.

        On several GPUs this is left to `settle`, because it waits for them.
        """
        clock = 0.0 if self.ranks.rank else time.monotonic() - self.began
        asked, number = float(self.signal is not None), float(self.signal or 0)
        clock, asked, number = self.ranks.total([clock, asked, number])
        self.state["seconds"] = clock
        if asked:
            self.stopped_by = round(number / asked)

    def settle(self) -> None:
        """Know what all updates so far have found, waiting for the device.

        On the CPU that is after each of them, on a GPU before it is reported or saved.
        Updates whose loss or gradient was not finite have been left out; they end the
        run or are said (--on-nonfinite).
        """
        lost = self.progress.settle()
        if not self.on_cpu and self.ranks.size > 1:
            self.agree()
        if not lost:
            return
        first = self.parameters.first_not_finite()
        got = f"one that is not, first in {first}" if first else f"{lost} that are not"
        found = (
            f"{self.progress.place}: expected finite losses and gradients, got {got}"
        )
        if self.training.on_nonfinite == "stop":
            advice = "a lower --learning-rate, --clip-norm or --on-nonfinite skip"
            raise ValueError(f"{found}; the last checkpoint is untouched, try {advice}")
        self.log(f"{found}; skipped")

    def report(self) -> None:
        """Record the mean loss and the speed since the last report."""
        self.settle()
        if self.ranks.size > 1:
            self.ranks.agree("parameters", distributed.checksum(self.parameters.data))
        values, line = self.progress.report()
        self.run.record(self.state["step"], **values)
        self.log(line)

    def validate(self) -> None:
        """Measure loss, accuracy and BLEU on the validation text; keep the best."""
        if "val" not in self.corpora:
            return
        self.settle()
        training, state = self.training, self.state
        total = validate(self.engine, self.corpora["val"], training.max_tokens)
        values = {
            "seconds": round(state["seconds"], 3),
            "validation_loss": total.loss,
            "validation_perplexity": total.perplexity,
            "validation_accuracy": total.accuracy,
        }
        bleu = ""
        if count := training.validate_bleu:
            values["validation_bleu"] = self.quality("val", count).bleu
            bleu = f"  BLEU {values['validation_bleu']:.2f}"
        self.run.record(state["step"], **values)
        better = total.loss < state["best_loss"]
        state["best_loss"] = min(total.loss, state["best_loss"])
        state["validations_since_best"] += 1
        self.log(
            f"step {state['step']:>6,}  validation: loss {total.loss:.4f}  perplexity "
            f"{total.perplexity:.2f}  accuracy {total.accuracy:.2%}{bleu}"
            f"{'  best' * better}"
        )
        if better:
            state["validations_since_best"] = 0
            self.save_as(self.run.best, with_moments=False)

    def quality(self, split: str, limit: int | None = None) -> Quality:
        """Translate (the beginning of) a split and compare with its references."""
        pairs, ranks = self.text[split].first(limit), self.ranks
        mine = [source for source, _ in pairs[ranks.rank :: ranks.size]]
        decoding, threads = self.settings.decoding, self.num_threads
        found = translate_lines(self.model, self.tokenizer, mine, decoding, threads)
        lines = self.tokenizer.decode([h[0].tokens for h in found])
        parts = [json.loads(p) for p in ranks.gather(json.dumps(lines).encode())]
        lines = [parts[i % ranks.size][i // ranks.size] for i in range(len(pairs))]
        return quality(lines, [target for _, target in pairs])

    def save(self) -> None:
        """Write a checkpoint to resume from; drop the oldest ones."""
        self.settle()
        self.save_as(self.run.step(self.state["step"]))
        self.run.prune(max(self.training.keep_last, self.training.average))

    def save_as(self, path: Path, with_moments: bool = True) -> None:
        """Write a checkpoint, or say that it cannot be (--on-save-error)."""
        if self.ranks.rank:
            return
        moments = (self.adam.mean, self.adam.square) if with_moments else None
        at = self.model, self.tokenizer, self.parameters, self.state, moments
        try:
            checkpoint.save(path, Checkpoint(*at))
        except OSError as error:
            if self.training.on_save_error == "stop":
                raise
            self.log(f"not saved   {error}; going on")

    def finish(self) -> None:
        """Average the last checkpoints (6.1) and translate the test text."""
        paths = self.run.steps()[-self.training.average :]
        if len(paths) > 1 and not self.ranks.rank:
            averaged = checkpoint.average(paths)
            checkpoint.save(self.run.averaged, averaged)
            self.parameters.data[...] = self.xp.asarray(averaged.parameters.data)
            self.log(f"averaged    the last {len(paths)} checkpoints")
        self.ranks.broadcast(self.parameters.data)
        self.parameters.refresh()
        if "test" in self.text:
            test = self.quality("test")
            self.run.record(self.state["step"], test_bleu=test.bleu, exact=test.exact)
            self.log(
                f"test        {test.exact:.1%} exact, BLEU {test.bleu:.2f} "
                f"({test.bleu_signature}), beam {self.settings.decoding.beam}"
            )
        self.log(f"done        {self.run.path}, {self.state['seconds']:,.0f} s")


def try_out(args: argparse.Namespace) -> int:
    """Print what would be trained, and where the time of an update goes."""
    with tempfile.TemporaryDirectory() as directory:
        run = RunDirectory(Path(directory))
        trainer = Trainer(run, new_config(args), args, Communicator())
        trainer.describe()
        if args.profile:
            adam, engine = trainer.adam, trainer.engine
            print(profile_updates(trainer.update, adam, engine, args.profile))
    return 0


def chosen_run(args: argparse.Namespace) -> tuple[Path, RunConfig]:
    """The directory to train in, and what to train."""
    if args.resume is None:
        settings = new_config(args)
        name = f"{settings.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
        return args.run or Path("runs") / name, settings
    named = args.resume != Path()
    run = RunDirectory(args.resume) if named else checkpoint.newest_run()
    return run.path, run.read_config().resumed(args)


def run_training(args: argparse.Namespace, ranks: Communicator) -> int:
    """Begin a run or go on with one; return the exit code."""
    path, settings = chosen_run(args)
    path = Path(ranks.gather(bytes(path))[0].decode())  # its name has the time in it
    run = WatchedRun(path) if ranks.rank else RunDirectory(path)
    with run.in_use([int(pid) for pid in ranks.gather(str(os.getpid()).encode())]):
        trainer = Trainer(run, settings, args, ranks)

        def stop(number: int, frame: FrameType | None) -> None:
            trainer.signal = number  # finish the step, save, exit
            signal.signal(number, signal.SIG_DFL)  # a second one ends at once

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        trainer.describe()
        trainer.train()
        if trainer.stopped_by:
            trainer.log("stopped     and saved: train.py --resume goes on")
            return 128 + trainer.stopped_by
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        trainer.finish()
    return 0


def start_ranks(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Look at the flags once, here, and have ranks do the work."""
    processes = args.processes
    last = f"cuda:{processes.gpus - 1}" if processes.gpus > 1 else args.device
    backend.device_module(last)
    path, _ = chosen_run(args)
    script = [sys.executable, str(Path(__file__).absolute())]
    kept = [*script, "--device", args.device, "--cache", str(args.cache)]
    kept += ["--peer-timeout", str(processes.peer_timeout)]
    kept += ["--threads", str(args.threads)] if args.threads else []
    kept += ["--eager"] if args.eager else []
    resumed = args.resume is not None
    return launch_training(
        [*script, *arguments], kept, RunDirectory(path), resumed, processes
    )


def work(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Do what the flags ask for; return the exit code."""
    if args.processes.several:
        return start_ranks(args, arguments)
    if args.profile or args.dry_run:
        return try_out(args)
    ranks = distributed.connect(args.device, args.processes.peer_timeout)
    if ranks.size == 1:
        return run_training(args, ranks)
    name = f"rank {ranks.rank}: "
    code = exit_code("train.py", lambda: run_training(args, ranks), name)
    if code in (1, 2):
        ranks.abort(code)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    backend.tune_allocator()
    given_flags = sys.argv[1:] if arguments is None else arguments
    return exit_code("train.py", lambda: work(args, given_flags))


if __name__ == "__main__":
    sys.exit(main())
