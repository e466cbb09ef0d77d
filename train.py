"""Train a Transformer (section 5 of "Attention Is All You Need"); see EXAMPLES."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from minitransformer.cli import (
    Parser,
    add_arguments,
    drop_failed_output,
    exit_code,
    positive,
)
from minitransformer.devices import (
    Device,
    check_device,
    connect_ranks,
    open_device,
    parallel_model,
)
from minitransformer.machine import tune_allocator
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import (
    ReadOnlyRunDirectory,
    RunDirectory,
    new_directory,
    newest_run,
)
from minitransformer.runs.starting_point import choose_model, take_over
from minitransformer.settings.config import (
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import UsageError, build, given
from minitransformer.settings.presets import find_preset
from minitransformer.settings.text_config import TextConfig
from minitransformer.text.batches import BatchStream, ParallelCorpus
from minitransformer.text.cache import cached_tokenizer, encoded_corpus
from minitransformer.text.find import find_text, text_of
from minitransformer.text.grammar.corpus import built_in_corpus
from minitransformer.text.pairs import TextPair
from minitransformer.text.prefetch import Prefetcher
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training.averaging import set_final_parameters
from minitransformer.training.checks import (
    check_long_input,
    check_positions,
    check_text,
    last_checkpoint,
)
from minitransformer.training.distributed import (
    Communicator,
    checksum,
    start_ranks,
    started_by_mpi,
)
from minitransformer.training.evaluation import validate
from minitransformer.training.lifecycle import (
    STOP_SIGNALS,
    end_at_second_signal,
    logger,
    stop_signals_handled,
)
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.optimizer import (
    Optimizer,
    learning_rate,
    peak_learning_rate,
)
from minitransformer.training.parallel import ParallelModel
from minitransformer.training.profiling import profile_updates
from minitransformer.training.progress import Progress, TrainingState, run_summary
from minitransformer.translation.quality import TranslationQuality, translation_quality
from minitransformer.translation.translator import Translator

EXAMPLES = (
    "python train.py                     # the built-in corpus, minutes on a CPU",
    "python train.py --config multi30k --data DIR --source en --target de",
    "python train.py --device cuda --config base --train-source X --train-target Y",
    "python train.py --resume            # continue the newest run",
)
NOTES = """\
A preset replaces the defaults above: without --config it is tiny, with --from finetune.
The run directory receives config.json, tokenizer.model, metrics.jsonl, train.log and
checkpoints, which translate.py reads."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = 'Train a Transformer (section 5 of "Attention Is All You Need").'
    parser = Parser("train.py", summary, EXAMPLES, NOTES)
    add = parser.add_argument
    preset = (
        "preset: tiny, multi30k, small, finetune, base, big, base-en-fr, big-en-fr, "
        "base-ROW (of Table 3), parsing, parsing-semi, parsing-small, or a JSON or "
        "TOML file; for --from, finetune (default tiny)"
    )
    add("--config", metavar="NAME", help=preset)
    device = "cpu, cuda or cuda:N (default cpu)"
    add("--device", default="cpu", help=device)
    threads = "how many cores of a CPU are used (default all cores)"
    add("--threads", type=positive, metavar="N", help=threads)
    eager = "launch a GPU's work kernel by kernel, not as graphs, to find errors"
    add("--eager", action="store_true", help=eager)
    new = "new run directory (default runs/CONFIG-TIME)"
    add("--run", "--save-dir", type=Path, metavar="DIR", help=new)
    start = "begin with the weights of a run, a checkpoint or a shipped model"
    add("--from", type=Path, metavar="PATH", dest="start", help=start)
    last = "continue a run from its last checkpoint (default the newest run)"
    add("--resume", nargs="?", const=True, type=Path, metavar="DIR", help=last)
    ranks = "train with N processes on CPUs, which MPI starts and connects"
    add("--ranks", default=1, type=positive, metavar="N", help=ranks)
    gpus = "train on the first N GPUs, with a process for each (NCCL and MPI)"
    add("--gpus", default=1, type=positive, metavar="N", help=gpus)
    dry_run = "say what would be trained, and end"
    add("--dry-run", action="store_true", help=dry_run)
    profile = "time N updates by operation and keep no run (default 20)"
    add("--profile", nargs="?", const=20, type=positive, metavar="N", help=profile)
    kept = "where vocabularies and encoded text are kept (default cache)"
    add("--cache", default=Path("cache"), type=Path, metavar="DIR", help=kept)
    pieces = "SentencePiece model to take as the vocabulary; none is learned"
    add("--vocabulary", type=Path, metavar="FILE", help=pieces)
    for cls in (TextConfig, ModelConfig, TrainingConfig, DecodingConfig):
        add_arguments(parser, cls, without=("nbest",))
    args = parser.parse_args(arguments)
    new_only = args.run or args.config or args.start or args.vocabulary
    if args.resume is not None and (new_only or args.profile or args.dry_run):
        names = "--run, --config, --from, --vocabulary, --profile and --dry-run"
        parser.error(f"{names} are for a new run, not --resume")
    if args.eager and args.device == "cpu":
        parser.error("--eager does nothing with --device cpu")
    if args.ranks > 1 and args.device != "cpu":
        parser.error("--ranks starts processes on CPUs: use --gpus with --device cuda")
    if args.gpus > 1 and args.device != "cuda":
        parser.error(f"--gpus expects --device cuda, got {args.device}")
    args.processes = max(args.ranks, args.gpus)
    if args.processes > 1 and (args.profile or args.dry_run):
        alone = "--profile and --dry-run run in one process: leave out"
        parser.error(f"{alone} --ranks and --gpus")
    return args


# What to train, and where: the settings and the run directory


def new_config(args: argparse.Namespace) -> RunConfig:
    """Combine a preset with the flags."""
    usual = "finetune" if args.start else "tiny"
    name, preset = find_preset(usual if args.config is None else args.config)
    named = given(args, TextConfig)
    text = build(TextConfig, {}, named)
    sizes, vocabulary = given(args, ModelConfig), None
    if args.vocabulary is not None:
        if "vocab_size" in sizes:
            raise UsageError("--vocab-size does nothing with --vocabulary")
        vocabulary = str(args.vocabulary.absolute())
        sizes["vocab_size"] = Tokenizer.read(args.vocabulary).vocab_size
    model, start = choose_model(args.start, preset, sizes)
    training = build(TrainingConfig, preset, given(args, TrainingConfig))
    decoding = build(DecodingConfig, preset, given(args, DecodingConfig))
    found = find_text(text) if named else built_in_corpus(args.cache)
    files = {split: pair.paths for split, pair in found.items()}
    settings = RunConfig(
        preset=name,
        model=model,
        training=training,
        decoding=decoding,
        text=files,
        vocabulary=vocabulary,
        start=start,
    )
    settings.refuse_useless(args)
    return settings


def choose_run(args: argparse.Namespace, rank: int) -> tuple[Path, RunConfig, bool]:
    """Return the run's directory and settings, and whether it is continued.

    Rank 0 alone names and makes the directory of a new run.
    """
    if args.resume is None:
        settings = new_config(args)
        new = args.run or (Path() if rank else new_directory(settings.preset))
        return new, settings, False
    run = newest_run() if args.resume is True else RunDirectory(args.resume)
    return run.path, run.read_config().resumed(args), True


# Before the first update: the vocabulary (5.1), the parameters, the optimizer (5.3)


def prepare(
    run: RunDirectory,
    settings: RunConfig,
    resumes: bool,
    args: argparse.Namespace,
    communicator: Communicator,
) -> Trainer:
    """Load or create everything that training needs, and begin the run directory."""
    training = settings.training
    cores = args.threads or communicator.num_cores()
    device = open_device(communicator.device(args.device), training.precision, cores)
    if not resumes:
        run.require_empty()
    text = text_of(settings, args.cache)
    start, log_line = last_checkpoint(run, settings) if resumes else None, ""
    if start is None:
        start, log_line = first_checkpoint(
            run, settings, text["train"], args.cache, cores
        )
    state = TrainingState.from_json(start.state)
    check_text(state, text)
    shared = {**vars(settings.model), **vars(training), **vars(settings.decoding)}
    shared |= {"threads": cores, "precision": device.precision, "text": state.text}
    shared |= {"vocabulary": start.tokenizer.checksum, "state": state.to_json()}
    communicator.assert_equal(shared)
    start.parameters.move_to(device.xp, device.low_precision)
    communicator.broadcast(start.parameters.data)
    start.parameters.data_changed()
    corpora = {
        split: encoded_corpus(pair, start.tokenizer, args.cache, cores)
        for split, pair in text.items()
    }
    check_positions(settings, corpora)
    check_long_input(settings, text, start.tokenizer)
    stream = BatchStream(corpora["train"], training, state.epoch, state.position)
    scale = LossScale(device.xp, device.precision, state.loss_scale)
    log = logger(run, is_first=not communicator.rank)
    graphs = not (args.eager or args.profile)
    parallel, adam = parallel_model(
        device, start, training, scale, communicator, graphs, log
    )
    if start.moments is not None:
        adam.restore(state.step - state.skipped, *start.moments)
    run.begin(settings, start.tokenizer.model, resumes)
    if log_line:
        log(log_line)
    run.truncate_metrics(state.step, bool(state.pending_validations))
    run.prune(training)
    return Trainer(
        run=run,
        settings=settings,
        device=device,
        tokenizer=start.tokenizer,
        text=text,
        corpora=corpora,
        stream=stream,
        parallel=parallel,
        adam=adam,
        progress=Progress(state, scale),
        log=log,
    )


def first_checkpoint(
    run: RunDirectory, settings: RunConfig, train: TextPair, cache: Path, cores: int
) -> tuple[Checkpoint, str]:
    """Learn the vocabulary (5.1) and draw the parameters: the state at step 0.

    With --from, both come from that model. A run that was stopped before it saved a
    checkpoint has its vocabulary already. Also returns a line for the log, or "".
    """
    size, file = settings.model.vocab_size, settings.vocabulary
    if run.tokenizer.is_file():
        file = str(run.tokenizer)

    def learn() -> Tokenizer:
        if file is None:
            return cached_tokenizer(train, size, cache, cores)
        own = Tokenizer.read(Path(file))
        if own.vocab_size != size:
            found = f"expected {size} word pieces, got {own.vocab_size}"
            raise ValueError(f"{file}: {found}")
        return own

    model = Transformer(settings.model, settings.training.seed)
    tokenizer, log_line = take_over(settings, model, learn)
    state = TrainingState.at_start(settings).to_json()
    return Checkpoint(model, tokenizer, ParameterBuffer(model), state), log_line


# Training (5.2 to 5.4)


@dataclass
class Trainer:
    """One training run, from its first update or from its last checkpoint."""

    run: RunDirectory
    settings: RunConfig
    device: Device
    tokenizer: Tokenizer
    text: dict[str, TextPair]
    corpora: dict[str, ParallelCorpus]
    stream: BatchStream
    parallel: ParallelModel
    adam: Optimizer
    progress: Progress
    log: Callable[[str], None]
    signal: int | None = None  # that this process received
    stopped_by: int | None = None  # the signal that stops all ranks
    saved: bool = True  # whether the last checkpoint could be written

    def __post_init__(self) -> None:
        self.training, self.state = self.settings.training, self.progress.state
        self.model, self.parameters = self.parallel.model, self.parallel.parameters
        self.communicator = self.parallel.communicator
        prefetches = self.parallel.asynchronous
        self.batches = Prefetcher(self.stream) if prefetches else self.stream
        self.peak = self.training.learning_rate or peak_learning_rate(
            self.settings.model.d_model, self.training.warmup
        )
        self.began = time.monotonic() - self.state.seconds

    def describe(self) -> None:
        """Say what is about to be computed, and on what."""
        cost = run_summary(self.stream, self.text, self.corpora, self.parallel)
        count, device = self.communicator.size, self.device.description
        if count > 1:  # MPI names a rank that dies by its process
            ids = ", ".join(map(str, self.run.processes()))
            device = f"{count} ranks (processes {ids}), {device} each"
        self.log("\n".join((f"device      {device}", *cost)))
        if self.state.step:
            self.log(f"resumed     after step {self.state.step:,}")

    def train(self) -> None:
        """Update until steps, minutes or patience are used up, or a signal stops it."""
        training, state = self.training, self.state
        off = bool(self.communicator.rank) or not sys.stderr.isatty()
        bar = tqdm(total=training.steps, initial=state.step, unit="step", disable=off)
        self.parallel.reserve_memory(self.stream, training.label_smoothing)
        if state.pending_validations:
            self.validate()
        finished = state.used_up(training)
        while not finished and self.stopped_by is None:
            before = state.seconds
            self.update()
            bar.update()
            finished = state.used_up(training)
            if state.step % training.log_every == 0:
                self.report()
            if state.step % training.validate_every == 0 or finished:
                if self.stopped_by is not None:  # there may be no time to validate
                    state.pending_validations = 1
                    self.save()
                self.validate()
                finished = state.used_up(training)
            due = training.checkpoint_due(state.step, before, state.seconds)
            if (due or finished) and self.stopped_by is None:
                self.save()
        self.sync_clock_and_stop()
        if self.stopped_by is not None:
            self.save()
        elif state.step < training.steps:
            self.log(f"ended       after step {state.step:,}: {finished} used up")
        bar.close()

    def update(self) -> None:
        """Do one step of section 5.3 on the next `accumulate` batches.

        Gradient accumulation: the gradients of all these batches make one update.
        """
        training, started = self.training, time.monotonic()
        step = self.state.step + 1
        batches = [next(self.batches) for _ in range(training.accumulate)]
        loss = self.parallel.forward_backward(
            batches, training.label_smoothing, (training.seed, step)
        )
        rate = learning_rate(step, self.peak, training.warmup)
        norm, finite = self.adam.step(self.parameters.grad, loss, rate)
        self.progress.add(batches, self.batches, rate, loss, norm, finite)
        self.sync_clock_and_stop()
        self.state.window.seconds += time.monotonic() - started
        if not self.parallel.asynchronous:
            self.synchronize()

    def sync_clock_and_stop(self) -> None:
        """Take rank 0's clock; if one rank was asked to stop, all stop at this step."""
        clock = 0.0 if self.communicator.rank else time.monotonic() - self.began
        received = [float(number == self.signal) for number in STOP_SIGNALS]
        clock, *received = self.communicator.all_reduce_numbers([clock, *received])
        self.state.seconds = clock
        asked = [n for n, count in zip(STOP_SIGNALS, received, strict=True) if count]
        self.stopped_by = max(asked, default=None)

    def synchronize(self) -> None:
        """Wait for all updates so far, and see whether any were skipped.

        Threads are never behind; a GPU is waited for before a report, a validation or
        a checkpoint. Updates whose loss or gradient was not finite have been skipped;
        they end the run or are logged (--on-nonfinite).
        """
        if not (skipped := self.progress.synchronize()):
            return
        where = self.parameters.first_nonfinite_gradient()
        found = self.progress.describe_skipped(skipped, where)
        if self.training.on_nonfinite == "stop":
            advice = "a lower --learning-rate, --clip-norm or --on-nonfinite skip"
            raise ValueError(f"{found}; checkpoints are untouched, try {advice}")
        self.log(f"{found}; skipped")

    def report(self) -> None:
        """Record the mean loss and the speed since the last report."""
        self.synchronize()
        if self.communicator.size > 1:
            parameters = checksum(self.parameters.data)
            self.communicator.assert_equal({"parameters": parameters})
        values, line = self.progress.report()
        self.run.record(self.state.step, **values)
        self.log(line)

    def validate(self) -> None:
        """Measure loss, accuracy and BLEU on validation text; save the best model."""
        self.state.pending_validations = 0
        if "val" not in self.corpora:
            return
        self.synchronize()
        training, state = self.training, self.state
        total = validate(self.parallel, self.corpora["val"], training.max_tokens)
        values = {"seconds": round(state.seconds, 3), **total.metrics("validation")}
        text, bleu = "", -1.0
        if count := training.validate_bleu:
            quality = self.translate_split("val", count)
            text, bleu = f"  BLEU {quality.bleu:.2f}", quality.bleu
            values["validation_bleu"] = bleu
        self.run.record(state.step, **values)
        better = state.count_validation(total.loss, bleu, training.best_by)
        self.log(
            f"step {state.step:>6,}  validation: loss {total.loss:.4f}  perplexity "
            f"{total.perplexity:.2f}  accuracy {total.accuracy:.2%}{text}"
            f"{'  best' * better}"
        )
        if better:
            best_so_far = state.best_loss, state.best_bleu
            state.best_loss, state.best_bleu = total.loss, bleu
            saved = float(self.save_as(self.run.best, with_moments=False))
            if self.communicator.all_reduce_numbers([saved]) == [0.0]:
                state.best_loss, state.best_bleu = best_so_far

    def translate_split(
        self, split: str, limit: int | None = None
    ) -> TranslationQuality:
        """Translate a split, or its first `limit` pairs; compare with references."""
        pairs = list(itertools.islice(self.text[split].lines(), limit))
        rank, size = self.communicator.rank, self.communicator.size
        processes = self.parallel.num_processes
        translator = Translator(self.model, self.tokenizer, processes)
        mine = [source for source, _ in pairs[rank::size]]
        mine = translator.translate(mine, self.settings.decoding)
        gathered = self.communicator.all_gather(json.dumps(mine).encode())
        parts = [json.loads(part) for part in gathered]
        lines = [parts[i % size][i // size] for i in range(len(pairs))]
        return translation_quality(lines, [target for _, target in pairs])

    def save(self) -> None:
        """Write a checkpoint to resume from; delete the oldest ones."""
        self.synchronize()
        self.saved = self.save_as(self.run.checkpoint(self.state.step))
        self.run.prune(self.training)

    def save_as(self, path: Path, with_moments: bool = True) -> bool:
        """Write a checkpoint, or say that it cannot be written (--on-save-error).

        Returns: whether it was written; False on the ranks above 0, which write none
        """
        if self.communicator.rank:
            return False
        state = self.state.to_json()
        saved = Checkpoint(self.model, self.tokenizer, self.parameters, state)
        if with_moments:
            saved.moments = self.adam.first_moment, self.adam.second_moment
        try:
            self.run.sync_metrics()
            checkpoint.save(path, saved)
        except OSError as error:
            if self.training.on_save_error == "stop":
                raise
            self.log(f"not saved   {error}; training continues")
            return False
        return True

    def finish(self) -> None:
        """Average the last checkpoints (6.1) and translate the test text."""
        run, training, val = self.run, self.training, self.corpora.get("val")

        def bleu() -> float:
            return self.translate_split("val", training.validate_bleu).bleu

        so_far = run, training, self.parallel, val, self.state, self.log
        if set_final_parameters(*so_far, bleu):
            self.saved &= self.save_as(run.averaged, with_moments=False)
        if "test" in self.text:
            test = self.translate_split("test")
            self.run.record(self.state.step, test_bleu=test.bleu, exact=test.exact)
            self.log(
                f"test        {test.exact:.1%} exact, BLEU {test.bleu:.2f} "
                f"({test.bleu_signature}), beam {self.settings.decoding.beam}"
            )
        if not self.saved and not self.communicator.rank:
            raise OSError("the run has ended, but not all of it could be saved")
        self.log(f"done        {self.run.path}, {self.state.seconds:,.0f} s")


# The command line


def try_out(args: argparse.Namespace) -> int:
    """Print what would be trained and, with --profile, where the time goes."""
    with tempfile.TemporaryDirectory() as directory:
        run = RunDirectory(Path(directory))
        trainer = prepare(run, new_config(args), False, args, Communicator())
        with closing(trainer.parallel) as parallel:
            trainer.describe()
            if args.profile:
                adam, steps = trainer.adam, args.profile
                print(profile_updates(trainer.update, adam, parallel, steps))
    return 0


def run_training(args: argparse.Namespace, communicator: Communicator) -> int:
    """Begin a run or continue one; return the exit code."""
    path, settings, resumes = choose_run(args, communicator.rank)
    path = Path(os.fsdecode(communicator.all_gather(bytes(path))[0]))
    run = ReadOnlyRunDirectory(path) if communicator.rank else RunDirectory(path)
    ids = [int(pid) for pid in communicator.all_gather(str(os.getpid()).encode())]
    with run.lock(ids):
        trainer = prepare(run, settings, resumes, args, communicator)

        def stop(number: int) -> None:
            trainer.signal = number  # finish the step, save, exit
            end_at_second_signal()

        with closing(trainer.parallel):
            with stop_signals_handled(stop):
                trainer.log(f"run         {path}")
                trainer.describe()
                trainer.train()
            if trainer.stopped_by:
                how = "and saved" if trainer.saved else "but not saved"
                trainer.log(f"stopped     {how}: train.py --resume {path} continues")
                return 128 + trainer.stopped_by
            trainer.finish()
    return 0


def launch(args: argparse.Namespace, arguments: Sequence[str]) -> NoReturn:
    """Have MPI start this script as several ranks, once the flags are checked."""
    check_device(f"cuda:{args.gpus - 1}" if args.gpus > 1 else args.device)
    path, _, resumes = choose_run(args, rank=1)
    if args.run and not resumes:
        RunDirectory(path).require_empty()
    start_ranks(args.processes, [str(Path(__file__).absolute()), *arguments])


def work(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Do what the flags ask for; return the exit code."""
    if args.profile or args.dry_run:
        return try_out(args)
    if args.processes > 1 and not started_by_mpi():
        launch(args, arguments)
    drop_failed_output()
    communicator = connect_ranks(args.device)
    if communicator.size == 1:
        return run_training(args, communicator)
    name = f"rank {communicator.rank}: "
    run = partial(run_training, args, communicator)
    if (code := exit_code("train.py", run, name)) in (1, 2):
        communicator.abort(code)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    tune_allocator()
    given_flags = sys.argv[1:] if arguments is None else arguments
    return exit_code("train.py", lambda: work(args, given_flags))


if __name__ == "__main__":
    sys.exit(main())
