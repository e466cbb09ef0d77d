"""Train a Transformer (section 5 of "Attention Is All You Need").

The functions come in the order of the paper's sections: text and batches (5.1), devices
and ranks (5.2), the model (3), the loop (5.3, 5.4) and the end of a run (6.1). The
safety of a run, such as saving after a signal, is in `training/lifecycle.py`.
"""

from __future__ import annotations

from minitransformer.settings.scripts import end_on_interrupt

if __name__ == "__main__":  # before other modules are loaded
    end_on_interrupt()

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from minitransformer.backends.devices import (
    Device,
    check_device,
    connect_ranks,
    open_device,
    parallel_model,
)
from minitransformer.cli import (
    Parser,
    add_arguments,
    add_device,
    exit_code,
    positive,
)
from minitransformer.runs import starting_point
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import ONLY_IN_FILES, SETTINGS, RunConfig
from minitransformer.system.announce import announce
from minitransformer.text.batches import Batches, BatchStream, ParallelCorpus
from minitransformer.text.bilingual import Pair
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.find import text_of
from minitransformer.text.pairs import TextPair
from minitransformer.training import distributed, evaluation, optimizer
from minitransformer.training.averaging import average_last
from minitransformer.training.lifecycle import TrainingRun
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
tokenizer.model, metrics.jsonl, train.log and checkpoints, which translate.py reads.
@FILE stands for the flags in a file."""

# The flags that --help shows; --help-all shows all.
USUAL = tuple(
    "--config --data --source --target --train-source --train-target --val-source "
    "--val-target --device --precision --ranks --gpus --steps --minutes --max-tokens "
    "--learning-rate --dropout --run --resume --from".split()
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "train.py",
        'Train a Transformer (section 5 of "Attention Is All You Need").',
        EXAMPLES,
        NOTES,
        USUAL,
    )
    parser.fromfile_prefix_chars = "@"
    add = parser.add_argument

    # The preset, and where to compute.
    add(
        "--config",
        metavar="NAME",
        help="tiny, multi30k, small, finetune, base, big or another preset, or a JSON "
        "file of settings (default by the number of training pairs)",
    )
    add_device(parser)
    add(
        "--ranks",
        default=1,
        type=positive,
        metavar="N",
        help="train with N processes on CPUs, which MPI starts and connects",
    )
    add(
        "--gpus",
        default=1,
        type=positive,
        metavar="N",
        help="train on the first N GPUs, with a process for each (NCCL and MPI)",
    )
    add(
        "--eager",
        action="store_true",
        help="run without CUDA graphs (for debugging)",
    )

    # The run: a new one, or the continuation of another.
    add(
        "--run",
        type=Path,
        metavar="DIR",
        help="new run directory (default runs/CONFIG-TIME)",
    )
    add(
        "--from",
        type=Path,
        metavar="PATH",
        dest="start",
        help="begin with the weights of a run, a checkpoint or a shipped model",
    )
    add(
        "--resume",
        nargs="?",
        const=True,
        type=Path,
        metavar="DIR",
        help="continue a run from its last checkpoint (default the newest run)",
    )
    add("--dry-run", action="store_true", help="say what would be trained, and end")

    # The vocabulary, and the encoded text.
    add(
        "--cache",
        default=Path("cache"),
        type=Path,
        metavar="DIR",
        help="where vocabularies and encoded text are kept (default cache)",
    )
    add(
        "--vocabulary",
        type=Path,
        metavar="FILE",
        help="SentencePiece model to take as the vocabulary; none is learned",
    )

    # A flag for each setting.
    for settings in SETTINGS:
        add_arguments(parser, settings, without=ONLY_IN_FILES)
    args = parser.parse_args(arguments)

    # Flags that do not go together.
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
    """The text of a run: its splits, as files and encoded, and its batches.

    A validation translates the `samples`, the end of the run the pairs of `test`.
    """

    text: dict[str, TextPair]
    corpora: dict[str, ParallelCorpus]
    batches: BatchStream
    samples: list[Pair]
    test: list[Pair]


def encode(run: TrainingRun, cache: Path) -> Data:
    """Turn text into word pieces, and these into batches of similar length."""
    # The word pieces of each split.
    tokenizer = run.start.tokenizer
    text = text_of(run.settings)
    corpora = {
        split: encoded_corpus(pair, tokenizer, cache, run.cores)
        for split, pair in text.items()
    }
    run.progress.change(median_sentences=corpora["train"].median_sentences)

    # The batches, from the next one on.
    batches = BatchStream(
        corpora["train"],
        run.training,
        epoch=run.state.epoch,
        position=run.state.position,
    )
    samples = evaluation.samples(text.get("val"), tokenizer, run.training)

    # The test text is read now, as its file may be another one by the end.
    test = list(text["test"].lines()) if "test" in text else []
    return Data(text, corpora, batches, samples, test)


# Section 5.2: devices, and a device for each rank


def open_run(
    args: argparse.Namespace,
    directory: RunDirectory,
    settings: RunConfig,
    resumes: bool,
    ranks: distributed.Communicator,
) -> tuple[TrainingRun, Device]:
    """Open this rank's device, and begin or continue a run there."""
    cores = args.threads or ranks.num_cores()
    device = open_device(
        ranks.device(args.device), settings.training.precision, num_threads=cores
    )

    # The model of the run's last checkpoint, or else a new one, and its vocabulary.
    text = text_of(settings)
    copied = ""
    start = starting_point.last_checkpoint(directory) if resumes else None
    if start is None:
        start, copied = starting_point.first_checkpoint(
            settings, text["train"], args.cache, cores
        )
    starting_point.remember_text(start, text)
    settings = replace(settings, model=start.model.config)

    # Every rank has the parameters of rank 0, on its own device.
    run = TrainingRun(directory, settings, ranks, start, cores, copied=copied)
    run.check_ranks(device.precision)
    start.parameters.move_to(device.xp, device.low_precision)
    ranks.broadcast(start.parameters.data)
    start.parameters.data_changed()
    return run, device


# Section 3: the model


def place_model(
    run: TrainingRun, device: Device, graphs: bool
) -> tuple[ParallelModel, optimizer.Optimizer]:
    """Return the model that computes gradients on a device, and its optimizer."""
    model, adam = parallel_model(
        device,
        run.start,
        run.training,
        communicator=run.ranks,
        graphs=graphs,
        log=run.log,
    )
    if run.start.moments is not None:
        mean, square = run.start.moments
        adam.restore(run.state.step - run.state.skipped, mean, square)
        run.start.moments = None  # which Adam has copied
    return model, adam


def describe(
    run: TrainingRun, device: Device, data: Data, model: ParallelModel
) -> None:
    """Log the model, the text, and the costs of an update."""
    summary = run_summary(data.batches, data.text, data.corpora, model)
    targets = [target for _, target in data.samples]
    tokenizer = run.training.bleu_tokenizer
    notes = quality.looks_tokenised(targets, tokenizer, translations=targets)
    summary += [f"BLEU        {note}" for note in notes]

    if run.settings.start and not run.state.step:
        summary += evaluation.exchanged_sides(model.model, data.batches)
    workers = model.num_processes * run.ranks.size
    run.describe(device.description, workers, summary)


# Sections 5.3 and 5.4: the loop


def train(
    run: TrainingRun, data: Data, model: ParallelModel, adam: optimizer.Optimizer
) -> None:
    """Update until steps, minutes or patience are used up, or a signal arrives."""
    batches = model.prefetched(data.batches)
    model.reserve_memory(data.batches, run.training.label_smoothing)

    # The validation that the last checkpoint was saved before.
    if run.state.pending_validations:
        validate(run, data, model)

    # A checkpoint comes before the validation of the same step, which may fail.
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
    # Section 5.4: label smoothing and dropout are in `engine/ops.py`.
    training = settings.training
    micro_batches = [next(batches) for _ in range(training.accumulate)]
    loss = model.forward_backward(
        micro_batches, training.label_smoothing, key=(training.seed, step)
    )

    # Section 5.3: the learning rate of equation 3, and Adam.
    width = settings.model.d_model
    peak = optimizer.peak_learning_rate(width, training.warmup)
    peak = training.learning_rate or peak
    rate = optimizer.learning_rate(
        step, peak, training.warmup, training.steps, training.decay
    )
    norm, finite = adam.step(model.parameters.grad, loss, rate)
    return Update(micro_batches, rate, loss, norm, finite, adam.scale)


def validate(run: TrainingRun, data: Data, model: ParallelModel) -> None:
    """Measure loss, accuracy and BLEU on validation text; save the best model."""
    if "val" not in data.corpora:
        run.progress.change(pending_validations=0)
        return
    run.synchronize()

    # Loss and accuracy, with the targets given; BLEU of the samples, translated.
    training = run.training
    total = evaluation.validate(model, data.corpora["val"], training)
    values = {
        "seconds": round(run.state.seconds, 3),
        "validation_loss": total.loss,
        "validation_perplexity": total.perplexity,
        "validation_accuracy": total.accuracy,
    }
    line = (
        f"step {run.state.step:>6,}/{training.steps:,}  validation: loss "
        f"{total.loss:.4f}  perplexity {total.perplexity:.4g}  "
        f"accuracy {total.accuracy:.2%}"
    )
    bleu = -1.0
    if data.samples:
        bleu = translate(run, model, data.samples).bleu
        values["validation_bleu"] = bleu
        line += f"  BLEU {bleu:.2f}"
    run.record(**values)

    # The best model so far is saved beside the checkpoints.
    state = run.state.validated(total.loss, bleu, training.best_by)
    is_best = not state.validations_since_best
    run.log(line + "  best" * is_best)
    if is_best:
        run.save_as(run.directory.best, state)
    run.progress.state = state


def translate(
    run: TrainingRun, model: ParallelModel, pairs: Sequence[Pair]
) -> quality.TranslationQuality:
    """Compare translations with the targets; remember how sure the model was."""
    translator = Translator(
        model.model,
        run.start.tokenizer,
        num_threads=model.num_processes,
        median_sentences=run.state.median_sentences,
    )
    announce(f"translating {len(pairs):,} lines", run.writes and len(pairs) > 99)

    # Ranks take the pairs in turn, and all get the best translation of each.
    sources = [source for source, _ in pairs[run.ranks.rank :: run.ranks.size]]
    mine = [
        (best.text, best.mean_log_prob)
        for best, *_ in translator.hypotheses(sources, run.settings.decoding)
    ]
    ranked = [("", 0.0)] * len(pairs)
    for rank, share in enumerate(run.ranks.all_gather(mine)):
        ranked[rank :: run.ranks.size] = share
    lines, means = zip(*ranked, strict=True)
    run.progress.change(log_prob_quantiles=quantiles(means))
    targets = [target for _, target in pairs]
    return quality.translation_quality(lines, targets, run.training.bleu_tokenizer)


# Section 6.1: the end of a run


def finish(run: TrainingRun, data: Data, model: ParallelModel) -> None:
    """Average the last checkpoints and translate the test text."""
    training = run.training

    def cost() -> float:
        if training.best_by == "bleu":
            return -translate(run, model, data.samples).bleu
        return evaluation.validate(model, data.corpora["val"], training).loss

    # The mean that validates best, or of a given number. It is surer of its
    # translations than the last checkpoint: they are measured again.
    chooses = "val" in data.corpora and training.average_by != "number"
    lowest = average_last(
        run.directory, training, model, cost=cost if chooses else None, log=run.log
    )
    if lowest is not None:
        if data.samples:
            translate(run, model, data.samples)
        run.save_average(lowest)

    # The test text is translated once, at the end.
    if data.test:
        test = translate(run, model, data.test)
        run.record(test_bleu=test.bleu, exact=test.exact)
        run.log(
            f"test        {test.exact:.1%} exact, BLEU {test.bleu:.2f} "
            f"({test.bleu_signature}), beam {run.settings.decoding.beam}"
        )
    run.end(data.text)


# The command


def run_training(args: argparse.Namespace, ranks: distributed.Communicator) -> int:
    """Begin a run or continue one, or only describe it; return the exit code."""
    path, settings, resumes = starting_point.choose_run(args, ranks.rank)
    # Rank 0 names the directory, and keeps other trainings out of it.
    directory = RunDirectory(ranks.all_gather(path)[0])
    with nullcontext() if ranks.rank else directory.lock(resumes):
        run, device = open_run(args, directory, settings, resumes, ranks)
        data = encode(run, args.cache)
        model, adam = place_model(run, device, graphs=not args.eager)
        if not args.dry_run:
            run.begin(resumes)
        describe(run, device, data, model)
        with closing(model), run.saving_after_errors(adam):
            if args.dry_run:
                return 0
            with run.heeding_signals():
                train(run, data, model, adam)
            if not run.stopped_by:
                finish(run, data, model)
                return 0
        run.log(f"stopped     and saved: train.py --resume {directory.path} continues")
        return 128 + run.stopped_by


def launch(args: argparse.Namespace, arguments: Sequence[str]) -> NoReturn:
    """Have MPI start this script as several ranks, once the flags are checked."""
    check_device(f"cuda:{args.gpus - 1}" if args.gpus > 1 else args.device)
    starting_point.choose_run(args, rank=1)
    command = [str(Path(__file__).absolute()), *arguments]
    distributed.start_ranks(args.processes, command)


def work(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Do what the flags ask for; return the exit code."""
    if args.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            args.run = Path(folder)
            return run_training(args, distributed.Communicator())

    # Several ranks: MPI starts this command again, once for each.
    if args.processes > 1 and not distributed.started_by_mpi():
        launch(args, arguments)
    ranks = connect_ranks(args.device)
    if ranks.size == 1:
        return run_training(args, ranks)

    # A rank that fails ends the others, which would wait for it.
    train_rank = partial(run_training, args, ranks)
    code = exit_code(f"train.py, rank {ranks.rank}", train_rank)
    if code in (1, 2):
        ranks.abort(code)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    command_line = sys.argv[1:] if arguments is None else arguments
    advice = {
        args.cache: "--cache names another folder",
        args.run or Path("runs"): "--run names another folder, --resume goes on in "
        "this one",
    }
    return exit_code("train.py", lambda: work(args, command_line), advice=advice)


if __name__ == "__main__":
    sys.exit(main())
