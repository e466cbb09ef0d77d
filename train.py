"""Train a Transformer (section 5 of "Attention Is All You Need").

    python train.py                       # the built-in corpus, minutes on a CPU
    python train.py --config multi30k --data DIR --source en --target de
    python train.py --config base --train-source FILE --train-target FILE
    python train.py --resume              # go on with the newest run

The run directory receives config.json, tokenizer.model, metrics.jsonl, train.log and
checkpoints, which translate.py reads.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import numpy as np
from tqdm import tqdm

from minitransformer import backend, checkpoint
from minitransformer.checkpoint import Checkpoint, RunDirectory
from minitransformer.config import (
    PRESETS,
    DecodingConfig,
    ModelConfig,
    RunConfig,
    TextConfig,
    TrainingConfig,
)
from minitransformer.cost import parameters_by_block, training_flops
from minitransformer.data import BatchStream, cached_tokenizer, encoded_corpus
from minitransformer.decoding import translate_lines
from minitransformer.evaluation import Quality, quality, validate
from minitransformer.grammar.corpus import write_corpus
from minitransformer.layers import ParameterBuffer
from minitransformer.optimizer import Adam, gradient_norm, learning_rate, paper_peak
from minitransformer.options import UsageError, add_arguments, build, given, positive
from minitransformer.parallel import ThreadedModel
from minitransformer.profiling import profile_updates
from minitransformer.text import find_text, text_pairs
from minitransformer.transformer import Transformer


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, examples, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=summary,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    add = parser.add_argument
    add("--config", choices=PRESETS, help="preset of all defaults (default tiny)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    add("--threads", type=positive, help="CPU threads (default all cores)")
    new = "new run directory (default runs/CONFIG-TIME)"
    add("--run", "--save-dir", type=Path, metavar="DIR", help=new)
    last = "go on with a run from its last checkpoint (default the newest run)"
    add("--resume", nargs="?", const=Path(), type=Path, metavar="DIR", help=last)
    profile = "time N updates by operation and write nothing (default 20)"
    add("--profile", nargs="?", const=20, type=positive, metavar="N", help=profile)
    kept = "where vocabularies and encoded text are kept (default cache)"
    add("--cache", default=Path("cache"), type=Path, metavar="DIR", help=kept)
    for cls in (TextConfig, ModelConfig, TrainingConfig, DecodingConfig):
        add_arguments(parser, cls, without=("nbest",))
    args = parser.parse_args(arguments)
    if args.resume and (args.run or args.config or args.profile):
        parser.error("--run, --config and --profile are for a new run, not --resume")
    return args


def new_config(args: argparse.Namespace) -> RunConfig:
    """Put a preset and the flags together."""
    name, named = args.config or "tiny", given(args, TextConfig)
    preset = PRESETS[name]
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
        self, run: RunDirectory, settings: RunConfig, args: argparse.Namespace
    ) -> None:
        self.run, self.settings, self.training = run, settings, settings.training
        self.xp = backend.device_module(args.device)
        on_cpu = self.xp is np
        self.num_threads = (args.threads or backend.num_cores()) if on_cpu else 1
        self.device = f"cpu, {self.num_threads} threads" if on_cpu else args.device
        self.stopped_by: int | None = None
        self.text = text_pairs(settings.text)
        last = run.steps()[-1:] if args.resume else []
        at = checkpoint.load(last[0], with_moments=True) if last else self.initial(args)
        self.model, self.tokenizer, self.state = at.model, at.tokenizer, at.state
        if self.state["text"] != self.text["train"].digest():
            raise ValueError(
                f"{self.text['train'].source}: the training text has changed since "
                "this run began, so the run cannot be resumed"
            )
        training, self.parameters = self.training, at.parameters
        self.parameters.move_to(self.xp)
        self.peak = training.learning_rate or paper_peak(
            settings.model.d_model, training.warmup
        )
        self.adam = Adam(
            self.parameters.data, training.beta1, training.beta2, training.epsilon
        )
        if at.moments is not None:
            self.adam.resume(at.step, *at.moments)
        self.corpora = {
            split: encoded_corpus(pair, self.tokenizer, args.cache, self.num_threads)
            for split, pair in self.text.items()
        }
        self.stream = BatchStream(
            self.corpora["train"], training, self.state["epoch"], self.state["position"]
        )
        threads = self.num_threads
        self.threaded = ThreadedModel(self.model, self.parameters, threads, self.xp)
        if args.resume is None:
            run.create()
            checkpoint.write_text(run.config, settings.to_json())
            run.tokenizer.write_bytes(self.tokenizer.model)
        run.forget_after(self.state["step"])

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
            "window": dict.fromkeys(("loss", "source", "target", "seconds"), 0.0),
        }
        return Checkpoint(model, tokenizer, ParameterBuffer(model), state)

    def log(self, line: str) -> None:
        """Print a line above the progress bar and append it to the run's log."""
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
        with open(self.run.path / "train.log", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def describe(self) -> None:
        """Say what is about to be computed, and on what."""
        training, corpus, pairs = self.training, self.stream.corpus, self.stream.pairs
        blocks = parameters_by_block(self.model)
        source = float(corpus.source.lengths[pairs].mean() + 1)
        target = float(corpus.target.lengths[pairs].mean() + 1)
        sentences = len(pairs) / len(self.stream) * training.accumulate
        flops = training_flops(self.model.config, source, target) * sentences
        parts = ", ".join(f"{name} {count:,}" for name, count in blocks.items())
        self.log(f"run         {self.run.path}")
        self.log(f"device      {self.device}")
        self.log(f"parameters  {sum(blocks.values()):,}: {parts}")
        self.log(
            f"text        {len(pairs):,} pairs, {len(self.stream):,} batches an epoch, "
            f"{self.stream.padding_share():.1%} padding; left out: "
            f"{corpus.dropped_blank:,} blank, {len(corpus) - len(pairs):,} longer than "
            f"{training.max_length} tokens"
        )
        self.log(
            f"update      {source * sentences:,.0f} source + {target * sentences:,.0f} "
            f"target tokens, {flops / 1e9:,.1f} GFLOP"
        )
        if self.state["step"]:
            self.log(f"resumed     after step {self.state['step']:,}")

    def train(self) -> None:
        """Update until the steps, the minutes or the patience are used up."""
        training, state = self.training, self.state
        began = time.monotonic() - state["seconds"]
        bar = tqdm(
            total=training.steps,
            initial=state["step"],
            unit="step",
            disable=not sys.stderr.isatty(),
        )
        finished = state["step"] >= training.steps
        while not finished and self.stopped_by is None:
            self.update()
            bar.update()
            step, state["seconds"] = state["step"], time.monotonic() - began
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
            if step % training.save_every == 0 or finished:
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
        gradient = self.parameters.grad
        norm = gradient_norm(gradient)
        if not math.isfinite(loss + norm):
            raise ValueError(
                f"step {step}: expected a finite loss and gradient, got a loss of "
                f"{loss} and a norm of {norm}; the last checkpoint is untouched. Try a "
                "lower --learning-rate or --clip-norm"
            )
        scale = min(1.0, (training.clip_norm or math.inf) / max(norm, 1e-12))
        rate = learning_rate(step, self.peak, training.warmup)
        self.adam.update(gradient, rate, scale)
        state.update(
            step=step,
            epoch=self.stream.epoch,
            position=self.stream.position,
            learning_rate=rate,
            gradient_norm=norm,
        )
        window, tokens = state["window"], sum(b.target_tokens for b in batches)
        window["loss"] += loss * tokens
        window["target"] += tokens
        window["source"] += sum(b.source_tokens for b in batches)
        window["seconds"] += time.monotonic() - started

    def report(self) -> None:
        """Record the mean loss and the speed since the last report."""
        state, window = self.state, self.state["window"]
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
            checkpoint.save(self.run.best, self.checkpoint(with_moments=False))

    def quality(self, split: str, limit: int | None = None) -> Quality:
        """Translate (the beginning of) a split and compare with its references."""
        pairs = self.text[split].first(limit)
        sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
        decoding, threads = self.settings.decoding, self.num_threads
        found = translate_lines(self.model, self.tokenizer, sources, decoding, threads)
        return quality(self.tokenizer.decode([h[0].tokens for h in found]), targets)

    def save(self) -> None:
        """Write a checkpoint to resume from; drop the oldest ones."""
        checkpoint.save(self.run.step(self.state["step"]), self.checkpoint())
        self.run.prune(max(self.training.keep_last, self.training.average))

    def checkpoint(self, with_moments: bool = True) -> Checkpoint:
        moments = (self.adam.mean, self.adam.square) if with_moments else None
        model, tokenizer, parameters = self.model, self.tokenizer, self.parameters
        return Checkpoint(model, tokenizer, parameters, self.state, moments)

    def finish(self) -> None:
        """Average the last checkpoints (6.1) and translate the test text."""
        paths = self.run.steps()[-self.training.average :]
        if len(paths) > 1:
            averaged = checkpoint.average(paths)
            checkpoint.save(self.run.averaged, averaged)
            self.parameters.data[...] = self.xp.asarray(averaged.parameters.data)
            self.log(f"averaged    the last {len(paths)} checkpoints")
        if "test" in self.text:
            test = self.quality("test")
            self.run.record(self.state["step"], test_bleu=test.bleu, exact=test.exact)
            self.log(
                f"test        {test.exact:.1%} exact, BLEU {test.bleu:.2f} "
                f"({test.bleu_signature}), beam {self.settings.decoding.beam}"
            )
        self.log(f"done        {self.run.path}, {self.state['seconds']:,.0f} s")


def profile(args: argparse.Namespace) -> None:
    """Print where the time of an update goes."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(RunDirectory(Path(directory)), new_config(args), args)
        trainer.describe()
        adam, num_threads = trainer.adam, trainer.num_threads
        print(profile_updates(trainer.update, adam, num_threads, args.profile))


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    backend.tune_allocator()
    try:
        if args.profile:
            profile(args)
            return 0
        if args.resume is None:
            settings = new_config(args)
            name = f"{settings.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
            run = RunDirectory(args.run or Path("runs") / name)
        else:
            named = args.resume != Path()
            run = RunDirectory(args.resume) if named else checkpoint.newest_run()
            settings = run.read_config().resumed(args)
        trainer = Trainer(run, settings, args)

        def stop(number: int, frame: FrameType | None) -> None:
            trainer.stopped_by = number  # finish the step, save, exit
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
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
