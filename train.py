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
from minitransformer.data import BatchStream, cached_tokenizer, encoded_corpus
from minitransformer.decoding import translate_lines
from minitransformer.distributed import Communicator
from minitransformer.evaluation import Quality, quality, validate
from minitransformer.files import write_bytes
from minitransformer.grammar.corpus import write_corpus
from minitransformer.launch import launch
from minitransformer.layers import ParameterBuffer
from minitransformer.optimizer import Adam, gradient_norm, learning_rate, paper_peak
from minitransformer.options import (
    Parser,
    UsageError,
    add_arguments,
    build,
    given,
    positive,
)
from minitransformer.parallel import ThreadedModel
from minitransformer.presets import find_preset
from minitransformer.profiling import profile_updates
from minitransformer.text import find_text, text_pairs
from minitransformer.transformer import Transformer


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("train.py", __doc__ or "")
    add = parser.add_argument
    preset = "tiny, multi30k, small, base, big, base-ROW of Table 3 or a JSON or TOML file"
    add("--config", metavar="NAME", help=f"all defaults: {preset} (default tiny)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    add("--threads", type=positive, help="CPU threads (default all cores)")
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
        self.xp = backend.device_module(ranks.device(args.device))
        on_cpu = args.device == "cpu"
        cores = max(backend.num_cores() // ranks.local_size, 1)
        self.num_threads = (args.threads or cores) if on_cpu else 1
        self.device = f"cpu, {self.num_threads} threads" if on_cpu else args.device
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
        self.parameters.move_to(self.xp)
        ranks.agree("text and state", json.dumps(self.state).encode())
        ranks.broadcast(self.parameters.data)
        self.peak = training.learning_rate or paper_peak(
            settings.model.d_model, training.warmup
        )
        self.adam = Adam(
            self.parameters.data, training.beta1, training.beta2, training.epsilon
        )
        if at.moments is not None:
            self.adam.resume(at.step - self.state["skipped"], *at.moments)
        self.corpora = {
            split: encoded_corpus(pair, self.tokenizer, args.cache, self.num_threads)
            for split, pair in self.text.items()
        }
        self.stream = BatchStream(
            self.corpora["train"], training, self.state["epoch"], self.state["position"]
        )
        threads = self.num_threads
        self.threaded = ThreadedModel(
            self.model, self.parameters, threads, self.xp, ranks
        )
        if args.resume is None:
            run.create(settings)
        if not ranks.rank:
            write_bytes(run.tokenizer, self.tokenizer.model)
        run.forget_after(self.state["step"])
        self.began = time.monotonic() - self.state["seconds"]

    def initial(self, args: argparse.Namespace) -> Checkpoint:
        """Learn the vocabulary (5.1), draw the parameters, begin at step 0."""
        train, config = self.text["train"], self.settings.model
        tokenizer = cached_tokenizer(
            train, config.vocab_size, args.cache, self.num_threads
        )
        model = Transformer(config, self.training.seed)
        state = {
            "step": 0,
            "epoch": 0,
            "position": 0,
            "seconds": 0.0,
            "text": train.digest(),
            "best_loss": math.inf,
            "validations_since_best": 0,
            "skipped": 0,
            "window": dict.fromkeys(("loss", "source", "target", "seconds"), 0.0),
        }
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
        cost = summary(self.model, self.stream, accumulate, self.threaded)
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
        training, state, started = self.training, self.state, time.monotonic()
        step = state["step"] + 1
        batches = [next(self.stream) for _ in range(training.accumulate)]
        loss = self.threaded.gradient(
            batches, training.label_smoothing, (training.seed, step)
        )
        loss, seconds = self.agreed(loss)
        gradient = self.parameters.grad
        norm = gradient_norm(gradient)
        rate = learning_rate(step, self.peak, training.warmup)
        finite = math.isfinite(loss + norm)
        if finite:
            scale = min(1.0, (training.clip_norm or math.inf) / max(norm, 1e-12))
            self.adam.update(gradient, rate, scale)
        else:
            self.not_finite(step, loss)
        state.update(
            step=step,
            epoch=self.stream.epoch,
            position=self.stream.position,
            seconds=seconds,
            learning_rate=rate,
            gradient_norm=norm,
        )
        window, tokens = state["window"], sum(b.target_tokens for b in batches)
        window["loss"] += loss * tokens if finite else 0.0
        window["target"] += tokens
        window["source"] += sum(b.source_tokens for b in batches)
        window["seconds"] += time.monotonic() - started

    def agreed(self, loss: float) -> tuple[float, float]:
        """Add up the ranks' shares of the loss; agree on the time and on stopping."""
        clock = 0.0 if self.ranks.rank else time.monotonic() - self.began
        asked, number = float(self.signal is not None), float(self.signal or 0)
        loss, seconds, asked, number = self.ranks.total([loss, clock, asked, number])
        if asked:
            self.stopped_by = round(number / asked)
        return loss, seconds

    def not_finite(self, step: int, loss: float) -> None:
        """Stop, or go on without this update (--on-nonfinite)."""
        found = (
            f"step {step:,}, epoch {self.stream.epoch}, batch {self.stream.position}: "
            f"expected a finite loss and gradient, got a loss of {loss} and a gradient "
            f"that is not finite, first in {self.parameters.first_not_finite()}"
        )
        if self.training.on_nonfinite == "stop":
            advice = "a lower --learning-rate, --clip-norm or --on-nonfinite skip"
            raise ValueError(f"{found}; the last checkpoint is untouched, try {advice}")
        self.state["skipped"] += 1
        self.log(f"{found}; skipped")

    def report(self) -> None:
        """Record the mean loss and the speed since the last report."""
        state, window = self.state, self.state["window"]
        if self.ranks.size > 1:
            self.ranks.agree("parameters", distributed.checksum(self.parameters.data))
        loss = window["loss"] / window["target"]
        source, target = (window[s] / window["seconds"] for s in ("source", "target"))
        rate, norm = state["learning_rate"], state["gradient_norm"]
        self.run.record(
            state["step"],
            epoch=state["epoch"],
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            source_tokens_per_second=round(source),
            target_tokens_per_second=round(target),
            seconds=round(state["seconds"], 3),
        )
        self.log(
            f"step {state['step']:>6,}  epoch {state['epoch']:>3}  loss {loss:.4f}  "
            f"lr {rate:.2e}  norm {norm:.2f}  {source:,.0f} source + {target:,.0f} "
            f"target tokens/s  {state['seconds']:,.0f} s"
        )
        window.update(dict.fromkeys(window, 0.0))

    def validate(self) -> None:
        """Measure loss, accuracy and BLEU on the validation text; keep the best."""
        if "val" not in self.corpora:
            return
        training, state = self.training, self.state
        total = validate(self.threaded, self.corpora["val"], training.max_tokens)
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
            adam, num_threads = trainer.adam, trainer.num_threads
            print(profile_updates(trainer.update, adam, num_threads, args.profile))
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
    run = RunDirectory(path)
    alone = ["--ranks", "1", "--gpus", "1", "--restarts", "0"]
    kept = ["--device", args.device, "--cache", str(args.cache)]
    kept += ["--peer-timeout", str(processes.peer_timeout)]
    kept += ["--threads", str(args.threads)] if args.threads else []

    def command(again: bool) -> list[str]:
        start = [sys.executable, str(Path(__file__).absolute())]
        if args.resume is not None:
            return [*start, *arguments, "--resume", str(path), *alone]
        if again and run.config.exists():
            return [*start, *kept, "--resume", str(path), *alone]
        return [*start, *arguments, "--run", str(path), *alone]

    code = launch(command, processes, run.processes)
    if code == 1 and run.steps():
        print(f"train.py --resume {path} goes on from the last checkpoint")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    backend.tune_allocator()
    ranks = Communicator()
    try:
        if args.processes.several:
            return start_ranks(args, sys.argv[1:] if arguments is None else arguments)
        if args.profile or args.dry_run:
            return try_out(args)
        ranks = distributed.connect(args.device, args.processes.peer_timeout)
        return run_training(args, ranks)
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        who = f"rank {ranks.rank}: " if ranks.size > 1 else ""
        print(f"train.py: error: {who}{error}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
        if ranks.size > 1:
            ranks.abort(code)
        return code


if __name__ == "__main__":
    sys.exit(main())
