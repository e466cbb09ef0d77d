"""Train a Transformer (section 5 of "Attention Is All You Need").

The functions come in the order of the paper's sections: text and batches (5.1), devices
and ranks (5.2), the model (3), the loop (5.3, 5.4) and the end of a run (6.1). What
keeps a run safe is in `training/lifecycle.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from minitransformer.backends.devices import (
    check_device,
    connect_ranks,
    open_device,
    parallel_model,
)
from minitransformer.cli import (
    Parser,
    add_arguments,
    exit_code,
    positive,
)
from minitransformer.runs import starting_point
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import ONLY_IN_FILES, SETTINGS, RunConfig
from minitransformer.system.announce import announce
from minitransformer.text.batches import Batches, BatchStream, ParallelCorpus
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.find import text_of
from minitransformer.text.pairs import TextPair
from minitransformer.training import distributed, evaluation, optimizer
from minitransformer.training.averaging import average_last
from minitransformer.training.lifecycle import TrainingRun, locked_directory
from minitransformer.training.parallel import ParallelModel
from minitransformer.training.progress import Update, run_summary
from minitransformer.translation import quality
from minitransformer.translation.confidence import quantiles
from minitransformer.translation.translator import Translator

EXAMPLES = (
    "python train.py                     # the built-in corpus, minutes on a CPU",
    "python train.py --config multi30k --data DIR --source en --target de",
    "python train.py --device cuda --config base --train-source X --train-target Y",
    "python train.py --resume            # continue the newest run",
)
NOTES = """\
Without --config, the preset is multi30k, small or base by the number of training pairs,
finetune with --from, and tiny without text. The run directory receives config.json,
tokenizer.model, metrics.jsonl, train.log and checkpoints, which translate.py reads."""

# The flags that --help shows; --help-all shows all.
USUAL = tuple(
    "--config --data --source --target --train-source --train-target --val-source "
    "--val-target --device --precision --ranks --gpus --steps --minutes --max-tokens "
    "--learning-rate --dropout --run --resume --from".split()
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = 'Train a Transformer (section 5 of "Attention Is All You Need").'
    parser = Parser("train.py", summary, EXAMPLES, NOTES, USUAL)
    add = parser.add_argument
    preset = (
        "tiny, multi30k, small, finetune, base, big or another preset, or a JSON file "
        "of settings, text, run and device (default by the number of training pairs)"
    )
    add("--config", metavar="NAME", help=preset)
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    threads = "how many cores of a CPU are used (default all cores)"
    add("--threads", type=positive, metavar="N", help=threads)
    ranks = "train with N processes on CPUs, which MPI starts and connects"
    add("--ranks", default=1, type=positive, metavar="N", help=ranks)
    gpus = "train on the first N GPUs, with a process for each (NCCL and MPI)"
    add("--gpus", default=1, type=positive, metavar="N", help=gpus)
    eager = "run without CUDA graphs (for debugging)"
    add("--eager", action="store_true", help=eager)
    new = "new run directory (default runs/CONFIG-TIME)"
    add("--run", type=Path, metavar="DIR", help=new)
    start = "begin with the weights of a run, a checkpoint or a shipped model"
    add("--from", type=Path, metavar="PATH", dest="start", help=start)
    last = "continue a run from its last checkpoint (default the newest run)"
    add("--resume", nargs="?", const=True, type=Path, metavar="DIR", help=last)
    add("--dry-run", action="store_true", help="say what would be trained, and end")
    kept = "where vocabularies and encoded text are kept (default cache)"
    add("--cache", default=Path("cache"), type=Path, metavar="DIR", help=kept)
    pieces = "SentencePiece model to take as the vocabulary; none is learned"
    add("--vocabulary", type=Path, metavar="FILE", help=pieces)
    for settings in SETTINGS:
        add_arguments(parser, settings, without=ONLY_IN_FILES)
    args = parser.parse_args(arguments)
    if args.config:
        parser.set_defaults(**starting_point.options_of_file(args, parser.error))
        args = parser.parse_args(arguments)
    new_only = args.run or args.config or args.start or args.vocabulary
    if args.resume is not None and (new_only or args.dry_run):
        names = "--run, --config, --from, --vocabulary and --dry-run"
        parser.error(f"{names} are for a new run, not --resume")
    if args.eager and args.device == "cpu":
        parser.error("--eager does nothing with --device cpu")
    if args.ranks > 1 and args.device != "cpu":
        parser.error("--ranks starts processes on CPUs: use --gpus with --device cuda")
    if args.gpus > 1 and args.device != "cuda":
        parser.error(f"--gpus expects --device cuda, got {args.device}")
    args.processes = max(args.ranks, args.gpus)
    if args.processes > 1 and args.dry_run:
        parser.error("--dry-run runs in one process: leave out --ranks and --gpus")
    return args


# Section 5.1: training data and batching


@dataclass(frozen=True)
class Data:
    """Each split (train, val, test), batches, and pairs that validations translate."""

    text: dict[str, TextPair]
    corpora: dict[str, ParallelCorpus]
    batches: BatchStream
    samples: list[tuple[str, str]]


def encode(
    run: TrainingRun, text: dict[str, TextPair], cache: Path, cores: int
) -> Data:
    """Turn text into word pieces, and these into batches of similar length."""
    tokenizer, state = run.start.tokenizer, run.state
    corpora = {
        split: encoded_corpus(pair, tokenizer, cache, cores)
        for split, pair in text.items()
    }
    run.progress.change(median_sentences=corpora["train"].median_sentences)
    training = run.settings.training
    batches = BatchStream(corpora["train"], training, state.epoch, state.position)
    samples = evaluation.samples(text.get("val"), tokenizer, training)
    return Data(text, corpora, batches, samples)


# Section 5.2: devices, each rank with one of its own; section 3: the model


def prepare(
    args: argparse.Namespace,
    directory: RunDirectory,
    settings: RunConfig,
    resumes: bool,
    ranks: distributed.Communicator,
) -> tuple[TrainingRun, Data, ParallelModel, optimizer.Optimizer]:
    """Load or create everything that training needs, and begin the run directory."""
    training = settings.training
    cores = args.threads or ranks.num_cores()
    device = open_device(ranks.device(args.device), training.precision, cores)
    text = text_of(settings)

    # The model and its vocabulary: from the run's last checkpoint, or new.
    start, news = starting_point.last_checkpoint(directory) if resumes else None, ""
    if start is None:
        begin = settings, text["train"], args.cache, cores
        start, news = starting_point.first_checkpoint(*begin)
    starting_point.remember_text(start, text)
    scale = device.loss_scale(start.state.loss_scale)
    run = TrainingRun(directory, settings, ranks, start, scale)
    run.check_ranks(cores, device.precision)
    start.parameters.move_to(device.xp, device.low_precision)
    ranks.broadcast(start.parameters.data)
    start.parameters.data_changed()

    # The text in its word pieces, what computes gradients of it, and the optimizer.
    data = encode(run, text, args.cache, cores)
    rest = training, scale, ranks, not args.eager, run.log
    model, adam = parallel_model(device, start, *rest)
    if start.moments is not None:
        adam.restore(run.state.step - run.state.skipped, *start.moments)
        start.moments = None  # which Adam has copied

    # The run directory, as it was after the last checkpoint.
    if not ranks.rank:
        directory.begin(settings, start.tokenizer.model, resumes)
        directory.truncate_metrics(run.state.step, bool(run.state.pending_validations))
        directory.prune(training)
    if news:
        run.log(news)
    if not args.dry_run:
        run.log(f"run         {directory.path}")
    summary = run_summary(data.batches, text, data.corpora, model, settings.decoding)
    targets = [target for _, target in data.samples]
    notes = quality.looks_tokenised(targets, training.bleu_tokenizer)
    summary += [f"BLEU        {note}" for note in notes]
    run.describe(device.description, summary)
    return run, data, model, adam


# Sections 5.3 and 5.4: the loop


def train(
    run: TrainingRun, data: Data, model: ParallelModel, adam: optimizer.Optimizer
) -> None:
    """Update until steps, minutes or patience are used up, or a signal arrives."""
    batches = model.prefetched(data.batches)
    model.reserve_memory(data.batches, run.settings.training.label_smoothing)
    if run.state.pending_validations:
        validate(run, data, model)
    for step in run.updates():
        run.count(update(step, run.settings, batches, model, adam), batches)
        if not model.asynchronous:
            run.synchronize()
        if run.report_is_due():
            run.report()
        if run.validation_is_due():
            run.progress.change(pending_validations=1)
        if run.checkpoint_is_due():
            run.save(adam)
        if run.state.pending_validations and not run.stopped_by:
            validate(run, data, model)
    run.save_unsaved(adam)


def update(
    step: int,
    settings: RunConfig,
    batches: Batches,
    model: ParallelModel,
    adam: optimizer.Optimizer,
) -> Update:
    """Do one step of section 5.3 on the next `accumulate` batches.

    Gradient accumulation: the gradients of all these batches make one update.
    """
    training, width = settings.training, settings.model.d_model
    some = [next(batches) for _ in range(training.accumulate)]
    # Section 5.4: label smoothing and dropout are in `engine/ops.py`.
    loss = model.forward_backward(some, training.label_smoothing, (training.seed, step))
    peak = training.learning_rate
    peak = peak or optimizer.peak_learning_rate(width, training.warmup)
    fall = training.steps, training.decay
    rate = optimizer.learning_rate(step, peak, training.warmup, *fall)
    norm, finite = adam.step(model.parameters.grad, loss, rate)
    return Update(some, rate, loss, norm, finite)


def validate(run: TrainingRun, data: Data, model: ParallelModel) -> None:
    """Measure loss, accuracy and BLEU on validation text; save the best model."""
    if "val" not in data.corpora:
        run.progress.change(pending_validations=0)
        return
    run.synchronize()
    training = run.settings.training
    total = evaluation.validate(model, data.corpora["val"], training)
    values = {"seconds": round(run.state.seconds, 3), **total.metrics("validation")}
    text, bleu = "", -1.0
    if data.samples:
        bleu = translate(run, model, data.samples).bleu
        text, values["validation_bleu"] = f"  BLEU {bleu:.2f}", bleu
    run.record(**values)
    state = run.state.validated(total.loss, bleu, training.best_by)
    better = not state.validations_since_best
    text += "  best" * better
    run.log(
        f"step {state.step:>6,}/{training.steps:,}  validation: loss {total.loss:.4f}  "
        f"perplexity {total.perplexity:.4g}  accuracy {total.accuracy:.2%}{text}"
    )
    if better:
        run.save_as(run.directory.best, state)
    run.progress.state = state


def translate(
    run: TrainingRun, model: ParallelModel, pairs: Sequence[tuple[str, str]]
) -> quality.TranslationQuality:
    """Compare translations with the targets; keep how sure the model was of them."""
    rank, size, settings = run.ranks.rank, run.ranks.size, run.settings
    translator = Translator(
        model.model,
        run.start.tokenizer,
        num_threads=model.num_processes,
        median_sentences=run.state.median_sentences,
    )
    announce(f"translating {len(pairs):,} lines", run.writes and len(pairs) > 99)
    sources = [source for source, _ in pairs[rank::size]]
    found = translator.hypotheses(sources, settings.decoding)
    mine = [(best.text, best.mean_log_prob) for best, *_ in found]
    lines, means = zip(*run.ranks.gather_in_turn(mine), strict=True)
    run.progress.change(log_prob_quantiles=quantiles(means))
    how = settings.training.bleu_tokenizer
    return quality.translation_quality(lines, [target for _, target in pairs], how)


# Section 6.1: the end of a run


def finish(run: TrainingRun, data: Data, model: ParallelModel) -> None:
    """Average the last checkpoints and translate the test text."""
    training = run.settings.training

    def cost() -> float:
        if training.best_by == "bleu":
            return -translate(run, model, data.samples).bleu
        return evaluation.validate(model, data.corpora["val"], training).loss

    chooses = "val" in data.corpora and training.average_by != "number"
    places = run.directory, training, model
    lowest = average_last(*places, cost if chooses else None, run.log)
    if lowest is not None:
        if data.samples:  # the mean is surer of its translations
            translate(run, model, data.samples)
        run.save_average(lowest)
    if "test" in data.text:
        test = translate(run, model, list(data.text["test"].lines()))
        run.record(test_bleu=test.bleu, exact=test.exact)
        run.log(
            f"test        {test.exact:.1%} exact, BLEU {test.bleu:.2f} "
            f"({test.bleu_signature}), beam {run.settings.decoding.beam}"
        )
    run.end(data.text)


# The command


def run_training(args: argparse.Namespace, ranks: distributed.Communicator) -> int:
    """Begin a run or continue one; return the exit code."""
    path, settings, resumes = starting_point.choose_run(args, ranks.rank)
    with locked_directory(path, ranks, resumes) as directory:
        run, data, model, adam = prepare(args, directory, settings, resumes, ranks)
        with closing(model), run.saving_after_errors(adam):
            with run.heeding_signals():
                train(run, data, model, adam)
            if not run.stopped_by:
                finish(run, data, model)
                return 0
        run.log(f"stopped     and saved: train.py --resume {directory.path} continues")
        return 128 + run.stopped_by


def preview(args: argparse.Namespace) -> int:
    """Print what would be trained."""
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        settings = starting_point.new_settings(args)
        alone = distributed.Communicator()
        _, _, model, _ = prepare(args, directory, settings, False, alone)
        model.close()
    return 0


def launch(args: argparse.Namespace, arguments: Sequence[str]) -> NoReturn:
    """Have MPI start this script as several ranks, once the flags are checked."""
    check_device(f"cuda:{args.gpus - 1}" if args.gpus > 1 else args.device)
    path, _, resumes = starting_point.choose_run(args, rank=1)
    if args.run and not resumes:
        RunDirectory(path).require_free()
    command = [str(Path(__file__).absolute()), *arguments]
    distributed.start_ranks(args.processes, command)


def work(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Do what the flags ask for; return the exit code."""
    if args.dry_run:
        return preview(args)
    if args.processes > 1 and not distributed.started_by_mpi():
        launch(args, arguments)
    ranks = connect_ranks(args.device)
    if ranks.size == 1:
        return run_training(args, ranks)
    one = partial(run_training, args, ranks)
    if (code := exit_code("train.py", one, f"rank {ranks.rank}: ")) in (1, 2):
        ranks.abort(code)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    other = "names another folder"
    run = f"--run {other}, --resume goes on in this one"
    advice = {args.cache: f"--cache {other}", args.run or Path("runs"): run}
    return exit_code("train.py", lambda: work(args, given), advice=advice)


if __name__ == "__main__":
    sys.exit(main())
