"""Train a Transformer (section 5 of "Attention Is All You Need").

    python train.py                       # the built-in corpus, a few minutes on a CPU
    python train.py --config multi30k --data DIR --source en --target de
    python train.py --config base --train-source FILE --train-target FILE ...
    python train.py --resume              # go on with the newest run

The run directory receives config.json, tokenizer.model, metrics.jsonl, train.log and
checkpoints. Only progress is printed; translate with translate.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from minitransformer import backend, checkpoint, config
from minitransformer.checkpoint import Checkpoint, RunDirectory
from minitransformer.config import DecodingConfig, ModelConfig, TrainingConfig
from minitransformer.cost import parameters_by_block, training_flops
from minitransformer.data import (
    Batch,
    BatchStream,
    Corpus,
    TextPair,
    cached_tokenizer,
    encoded_corpus,
    find_pair,
)
from minitransformer.decoding import translate
from minitransformer.layers import ParameterBuffer
from minitransformer.loss import TokenStatistics, evaluate
from minitransformer.optimizer import Adam, gradient_norm, learning_rate, paper_peak
from minitransformer.parallel import ThreadedModel
from minitransformer.tokenizer import Tokenizer
from minitransformer.transformer import Transformer

# Settings of a run that --resume may change: how long and how often, never what.
RESUMABLE = ("steps", "minutes", "patience", "keep_last", "average", "log_every")
EXAMPLES = __doc__.split("\n\n")[1]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a Transformer on the built-in corpus or on your own text.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config",
        choices=config.PRESETS,
        help="preset that gives all other defaults (default tiny)",
    )
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    add("--threads", type=int, help="CPU threads (default all cores)")
    add(
        "--run",
        "--save-dir",
        type=Path,
        metavar="DIR",
        help="new run directory (default runs/NAME-TIME)",
    )
    add(
        "--resume",
        nargs="?",
        const=Path(),
        type=Path,
        metavar="RUN",
        help="go on with a run from its last checkpoint (default the newest run)",
    )
    text = parser.add_argument_group("text")
    add = text.add_argument
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of train.LANG, val.LANG and test*.LANG, plain or .gz",
    )
    add("--source", metavar="LANG", help="source language, the ending of its files")
    add("--target", metavar="LANG", help="target language, the ending of its files")
    for part in ("train", "val", "test"):
        for side in ("source", "target"):
            add(f"--{part}-{side}", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    text.description = (
        "Instead of --data: --train-source FILE --train-target FILE, and likewise "
        "--val-source, --val-target, --test-source, --test-target"
    )
    add(
        "--cache",
        type=Path,
        default=Path("cache"),
        metavar="DIR",
        help="where vocabularies and encoded text are kept (default cache)",
    )
    for cls in (ModelConfig, TrainingConfig, DecodingConfig):
        config.add_arguments(parser, cls)
    return parser.parse_args(arguments)


class UsageError(ValueError):
    """Arguments that do not go together: exit code 2."""


@dataclasses.dataclass
class Settings:
    """All that config.json holds: what to run, on which text."""

    preset: str
    model: ModelConfig
    training: TrainingConfig
    decoding: DecodingConfig
    text: dict[str, list[str]]  # split -> [source file, target file]

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Settings:
        preset = args.config or "tiny"
        try:
            built = [
                config.build(c, preset, config.given(args, c))
                for c in (ModelConfig, TrainingConfig, DecodingConfig)
            ]
        except ValueError as error:
            raise UsageError(str(error)) from error
        return cls(preset, *built, text=find_text(args))

    @classmethod
    def from_run(cls, run: RunDirectory, args: argparse.Namespace) -> Settings:
        """Read a run's settings; refuse flags that would make it another run."""
        try:
            stored = json.loads(run.config.read_text())
            model, training, decoding = (
                config.from_dict(c, stored[name])
                for c, name in (
                    (ModelConfig, "model"),
                    (TrainingConfig, "training"),
                    (DecodingConfig, "decoding"),
                )
            )
        except FileNotFoundError as error:
            raise ValueError(f"expected a run directory, got {run.path}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{run.config}: not a usable config: {error}") from error
        changes = config.given(args, TrainingConfig)
        for cls_, old in ((ModelConfig, model), (DecodingConfig, decoding)):
            changes |= config.given(args, cls_)
            changes = {k: v for k, v in changes.items() if getattr(old, k, None) != v}
        refused = [
            name
            for name, value in changes.items()
            if name not in RESUMABLE and getattr(training, name, None) != value
        ]
        for name in ("config", "data", "run", "train_source", "train_target"):
            if getattr(args, name) is not None:
                refused.append(name)
        if refused:
            flag = refused[0].replace("_", "-")
            raise UsageError(
                f"--{flag} cannot change when a run is resumed; what can: "
                + ", ".join("--" + name.replace("_", "-") for name in RESUMABLE)
            )
        training = dataclasses.replace(training, **changes)
        return cls(stored["preset"], model, training, decoding, stored["text"])

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def pair(self, split: str) -> TextPair | None:
        if split not in self.text:
            return None
        source, target = map(Path, self.text[split])
        for path in (source, target):
            if not path.is_file():
                raise ValueError(f"expected a text file, found none at {path}")
        return TextPair(source, target)


def find_text(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name the files of each split: given ones, a folder's, or the built-in corpus's."""
    files = {
        split: [getattr(args, f"{split}_{side}") for side in ("source", "target")]
        for split in ("train", "val", "test")
    }
    if any(path for paths in files.values() for path in paths):
        for split, paths in files.items():
            if (paths[0] is None) != (paths[1] is None):
                missing = "source" if paths[0] is None else "target"
                raise UsageError(f"expected --{split}-{missing} too")
        if args.data or args.source or args.target:
            raise UsageError("--data, --source and --target do not go with file names")
        if files["train"][0] is None:
            raise UsageError("expected --train-source and --train-target")
        found = {s: TextPair(*p) for s, p in files.items() if p[0] is not None}
    elif args.data:
        if not (args.source and args.target):
            raise UsageError("--data expects --source and --target, such as en and de")
        if not args.data.is_dir():
            raise ValueError(f"--data: expected a folder, found none at {args.data}")
        splits = {
            split: find_pair(args.data, split, args.source, args.target)
            for split in ("train", "val", "test")
        }
        found = {split: pair for split, pair in splits.items() if pair}
        if "train" not in found:
            raise ValueError(
                f"expected {args.data}/train.{args.source} and train.{args.target}, "
                "plain or .gz, found none"
            )
    else:
        if args.source or args.target:
            raise UsageError("--source and --target need --data")
        from minitransformer import grammar

        found = grammar.write_corpus(args.cache / "built-in")
    return {
        split: [str(pair.source.absolute()), str(pair.target.absolute())]
        for split, pair in found.items()
    }


class Log:
    """Prints to the terminal and appends to the run's log file."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def __call__(self, line: str) -> None:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


class Trainer:
    """One training run, from the first update or from a checkpoint."""

    def __init__(self, settings: Settings, run: RunDirectory, args: Any) -> None:
        self.settings, self.run = settings, run
        self.training = settings.training
        self.xp = backend.device_module(args.device)
        on_cpu = self.xp is np
        self.threads = (args.threads or backend.num_cores()) if on_cpu else 1
        self.device = f"cpu, {self.threads} threads" if on_cpu else args.device
        self.cache = args.cache
        self.stop_signal: int | None = None

    def prepare(self, resume: bool) -> None:
        """Read the text, make or load the model, and say what is about to happen."""
        training, text = self.training, self.settings.pair("train")
        assert text is not None
        found = self.run.steps()
        if resume and found:
            loaded = checkpoint.load(found[-1], with_moments=True)
            self.tokenizer = loaded.tokenizer
        elif resume:
            self.tokenizer = Tokenizer(self.run.tokenizer.read_bytes())
        else:
            self.tokenizer = cached_tokenizer(
                text, self.settings.model.vocab_size, self.cache, self.threads
            )
        corpora = {
            split: encoded_corpus(pair, self.tokenizer, self.cache, self.threads)
            for split in ("train", "val", "test")
            if (pair := self.settings.pair(split))
        }
        self.corpora: dict[str, Corpus] = corpora
        state: dict[str, Any] = {
            "step": 0,
            "epoch": 0,
            "position": 0,
            "seconds": 0.0,
            "best_loss": math.inf,
            "bad_validations": 0,
            "text": text.digest(),
        }
        if not resume:
            self.run.create()
            checkpoint.write_text(self.run.config, self.settings.to_json())
            self.run.tokenizer.write_bytes(self.tokenizer.model)
        self.log = Log(self.run.path / "train.log")
        if resume and found:
            if loaded.state["text"] != state["text"]:
                raise ValueError(
                    f"{text.source}, {text.target}: the training text has changed "
                    "since this run began, so it cannot be resumed"
                )
            state = loaded.state
            model, self.parameters = loaded.model, loaded.parameters
        else:
            model = Transformer(self.settings.model, training.seed)
            self.parameters = ParameterBuffer(model)
        self.state = state
        self.adam = Adam(
            self.parameters.data, training.beta1, training.beta2, training.epsilon
        )
        if resume and found:
            assert loaded.moments is not None
            self.adam.mean[...], self.adam.square[...] = loaded.moments
            self.adam.steps = state["step"]
        self.stream = BatchStream(
            corpora["train"],
            training.max_tokens,
            training.max_length,
            training.seed,
            state["epoch"],
            state["position"],
        )
        self._truncate_metrics()
        self.threaded = ThreadedModel(model, self.parameters, self.threads, self.xp)
        self._describe(model)

    def _describe(self, model: Transformer) -> None:
        training, corpus = self.training, self.corpora["train"]
        blocks = parameters_by_block(model)
        parts = ", ".join(f"{name} {count:,}" for name, count in blocks.items())
        pairs = self.stream.pairs
        source = float((corpus.source.lengths[pairs] + 1).mean())
        target = float((corpus.target.lengths[pairs] + 1).mean())
        batches = len(self.stream)
        sentences = len(pairs) / batches * training.accumulate
        flops = training_flops(model.config, source, target) * sentences
        self.log(f"run         {self.run.path}")
        self.log(f"device      {self.device}")
        self.log(f"parameters  {sum(blocks.values()):,}: {parts}")
        self.log(
            f"text        {len(pairs):,} pairs, {batches:,} batches an epoch, "
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

    def _truncate_metrics(self) -> None:
        """Drop what was measured after the checkpoint: it will be measured again."""
        if not self.run.metrics.exists():
            return
        lines = self.run.metrics.read_text(encoding="utf-8").split("\n")[:-1]
        kept = [x for x in lines if json.loads(x)["step"] <= self.state["step"]]
        checkpoint.write_text(self.run.metrics, "".join(x + "\n" for x in kept))

    def _record(self, **values: Any) -> None:
        with open(self.run.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.state["step"], **values}) + "\n")

    def loop(self) -> None:
        """Update until the steps, the minutes or the patience are used up."""
        training, state = self.training, self.state
        peak = training.learning_rate or paper_peak(
            self.settings.model.d_model, training.warmup
        )
        began = time.monotonic() - state["seconds"]
        window: list[tuple[float, int, int, float]] = []
        progress = tqdm(
            total=training.steps,
            initial=state["step"],
            unit="step",
            disable=not sys.stderr.isatty(),
        )
        while state["step"] < training.steps and self.stop_signal is None:
            started = time.monotonic()
            batches = [next(self.stream) for _ in range(training.accumulate)]
            step = state["step"] + 1
            loss = self.threaded.gradient(
                batches, training.label_smoothing, (training.seed, step)
            )
            norm = gradient_norm(self.parameters.grad)
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise ValueError(
                    f"step {step}: expected a finite loss and gradient, got {loss} and "
                    f"{norm}; the last checkpoint is untouched. Try a lower "
                    "--learning-rate or --clip-norm 1"
                )
            scale = min(1.0, (training.clip_norm or math.inf) / max(norm, 1e-12))
            rate = learning_rate(step, peak, training.warmup)
            self.adam.update(self.parameters.grad, rate, scale)
            state.update(
                step=step, epoch=self.stream.epoch, position=self.stream.position
            )
            now = time.monotonic()
            state["seconds"] = now - began
            window.append((loss, *_tokens(batches), now - started))
            progress.update()
            if step % training.log_every == 0:
                self._report(window, rate, norm)
                window.clear()
            out_of_time = (
                training.minutes is not None and now - began >= 60 * training.minutes
            )
            last = step == training.steps or out_of_time or self.stop_signal is not None
            if step % training.validate_every == 0 or last:
                self._validate()
            if step % training.save_every == 0 or last:
                self._save()
            patience = training.patience or math.inf
            if out_of_time or state["bad_validations"] >= patience:
                break
        progress.close()

    def _report(
        self, window: list[tuple[float, int, int, float]], rate: float, norm: float
    ) -> None:
        losses, sources, targets, times = zip(*window, strict=True)
        seconds, state = sum(times), self.state
        loss = sum(x * n for x, n in zip(losses, targets, strict=True)) / sum(targets)
        speeds = sum(sources) / seconds, sum(targets) / seconds
        self._record(
            epoch=state["epoch"],
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            source_tokens_per_second=round(speeds[0]),
            target_tokens_per_second=round(speeds[1]),
            seconds=round(state["seconds"], 3),
        )
        self.log(
            f"step {state['step']:>6,}  epoch {state['epoch']:>3}  loss {loss:.4f}  "
            f"lr {rate:.2e}  norm {norm:.2f}  {speeds[0]:,.0f} source + "
            f"{speeds[1]:,.0f} target tokens/s  {state['seconds']:,.0f} s"
        )

    def _validate(self) -> None:
        """Measure loss, accuracy and BLEU on the validation text (section 6.2)."""
        if "val" not in self.corpora:
            return
        corpus, training, state = self.corpora["val"], self.training, self.state
        total = TokenStatistics()
        batches = corpus.batches(np.arange(len(corpus)), training.max_tokens)
        for part in self.threaded.map(
            lambda chosen: self._evaluate(corpus.batch(chosen)), batches
        ):
            total += part
        loss = total.nll / total.tokens
        values = {
            "seconds": round(state["seconds"], 3),
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),
            "validation_accuracy": total.correct / total.tokens,
        }
        text = ""
        if training.validate_bleu:
            bleu, _, _ = self.translation_quality("val", training.validate_bleu)
            values["validation_bleu"] = bleu
            text = f"  BLEU {bleu:.2f}"
        self._record(**values)
        better = loss < state["best_loss"]
        state["best_loss"] = min(loss, state["best_loss"])
        state["bad_validations"] = 0 if better else state["bad_validations"] + 1
        self.log(
            f"step {state['step']:>6,}  validation: loss {loss:.4f}  perplexity "
            f"{math.exp(min(loss, 700)):.2f}  accuracy "
            f"{total.correct / total.tokens:.2%}{text}{'  best' if better else ''}"
        )
        if better:
            checkpoint.save(self.run.best, self._checkpoint(moments=False))

    def _evaluate(self, batch: Batch) -> TokenStatistics:
        source, target = self.xp.asarray(batch.source), self.xp.asarray(batch.target)
        return evaluate(self.threaded.model, source, target)

    def translation_quality(
        self, split: str, limit: int | None = None
    ) -> tuple[float, str, float]:
        """Translate a split: sacreBLEU, its signature, and the share of exact matches.

        Units: BLEU from 0 to 100 on detokenised, cased text
        """
        from sacrebleu.metrics import BLEU

        pair = self.settings.pair(split)
        assert pair is not None
        lines = [x for _, x in zip(range(limit or sys.maxsize), pair.lines())]  # noqa: B905
        hypotheses = translate(
            self.threaded.model,
            self.tokenizer.encode([source for source, _ in lines]),
            self.settings.decoding,
            num_threads=self.threads,
        )
        output = self.tokenizer.decode([h[0].tokens for h in hypotheses])
        references = [target for _, target in lines]
        metric = BLEU()
        score = metric.corpus_score(output, [references]).score
        exact = sum(o == r for o, r in zip(output, references, strict=True))
        return score, str(metric.get_signature()), exact / max(len(lines), 1)

    def _checkpoint(self, moments: bool = True) -> Checkpoint:
        return Checkpoint(
            self.threaded.model,
            self.tokenizer,
            self.parameters,
            self.state,
            (self.adam.mean, self.adam.square) if moments else None,
        )

    def _save(self) -> None:
        checkpoint.save(self.run.step(self.state["step"]), self._checkpoint())
        self.run.prune(max(self.training.keep_last, self.training.average))

    def finish(self) -> None:
        """Average the last checkpoints (6.1) and translate the test text with them."""
        paths = self.run.steps()[-self.training.average :]
        if len(paths) > 1:
            averaged = checkpoint.average(paths)
            checkpoint.save(self.run.averaged, averaged)
            self.parameters.data[...] = self.xp.asarray(averaged.parameters.data)
            self.log(f"averaged    the last {len(paths)} checkpoints")
        if "test" in self.corpora:
            bleu, signature, exact = self.translation_quality("test")
            self._record(test_bleu=bleu, test_exact=exact, signature=signature)
            self.log(
                f"test        {exact:.1%} exact, BLEU {bleu:.2f}  {signature}, beam "
                f"{self.settings.decoding.beam}"
            )
        self.log(f"done        {self.run.path}, {self.state['seconds']:,.0f} s")


def _tokens(batches: list[Batch]) -> tuple[int, int]:
    return sum(b.source_tokens for b in batches), sum(b.target_tokens for b in batches)


def run_directory(args: argparse.Namespace, preset: str) -> RunDirectory:
    if args.resume is None:
        name = f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
        return RunDirectory(args.run or Path("runs") / name)
    if args.resume == Path():
        return checkpoint.newest_run(Path("runs"))
    return RunDirectory(args.resume)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        if args.threads is not None and args.threads < 1:
            raise UsageError(f"--threads: expected at least 1, got {args.threads}")
        backend.tune_allocator()
        run = run_directory(args, args.config or "tiny")
        if args.resume is None:
            settings = Settings.from_arguments(args)
        else:
            settings = Settings.from_run(run, args)
        trainer = Trainer(settings, run, args)

        def stop(number: int, frame: FrameType | None) -> None:
            trainer.stop_signal = number
            signal.signal(number, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, stop)
        trainer.prepare(resume=args.resume is not None)
        signal.signal(signal.SIGINT, stop)
        trainer.loop()
        if trainer.stop_signal is not None:
            trainer.log(f"stopped by signal {trainer.stop_signal}, saved; --resume")
            return 128 + trainer.stop_signal
        trainer.finish()
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
