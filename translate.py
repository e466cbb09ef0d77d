"""Translate with a trained Transformer (section 6.1); see EXAMPLES."""

from __future__ import annotations

from minitransformer.settings.scripts import end_on_interrupt

if __name__ == "__main__":  # before other modules are loaded
    end_on_interrupt()

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from minitransformer.api import load
from minitransformer.cli import (
    Parser,
    add_arguments,
    add_device,
    add_model,
    exit_code,
    path_or_standard,
    positive,
    say,
)
from minitransformer.engine.backend import backend_of
from minitransformer.runs.models import (
    card_title,
    described,
    find_checkpoint,
    models_by_direction,
    shipped_models,
)
from minitransformer.runs.outputs import check_output
from minitransformer.settings.config import (
    BLEU_TOKENIZER_HELP,
    BLEU_TOKENIZERS,
    PRECISION_HELP,
    PRECISIONS,
)
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.extras import import_extra
from minitransformer.settings.options import UsageError, flag_name, flags_of
from minitransformer.system.machine import num_cores
from minitransformer.system.workers import limit_threads
from minitransformer.text.lines import (
    join_paragraphs,
    open_output,
    progress_bar,
    read_lines,
    source_lines,
    zip_lines,
)
from minitransformer.text.pairs import check_files
from minitransformer.translation import quality
from minitransformer.translation.alignment import pharaoh
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.confidence import LACKED, UNSURE
from minitransformer.translation.translator import Translator, json_objects

EXAMPLES = (
    'python translate.py "Could you help me with my homework?"',
    "python translate.py --model runs/NAME --input new.en --output new.de",
    "python translate.py --input test.en --reference test.de --output test.out",
    'python translate.py --attention heads.html "The old man sees a dog."',
    'python translate.py --explain "The old man sees a dog."',
)
USUAL = tuple(
    "--input --output --model --reference --score --prefix --attention --serve --json "
    "--threads --device --precision --beam --alpha --nbest --sample --alignment".split()
)
NOTES = """\
Flags come before the settings saved with the (first) model, and these before defaults.

Each line read gives one line of standard output, in the same order; blank lines stay
blank, and only a line feed ends a line. Everything else goes to standard error. With
--nbest N > 1, each translation has a line `number ||| translation ||| score`. Lines are
numbered from 0, also with --json. The score is the natural log-probability divided by
((5 + tokens) / 6)^alpha, where the tokens include the end of the sentence, unless the
translation was cut off; a long line has the sum of its parts' scores. --alignment
adds ` ||| 0-0 1-1`: pairs of a source word and its translation, counted from 0."""

# The flags that have no effect where one sentence is looked at.
OF_LINES = (
    "input score reference json buffer nbest split max_input prefix alignment words "
    "glossary paragraphs"
)
# The flags that have no effect beside each of these.
IGNORED = {
    "no_api_key": "api_key",
    "paragraphs": "prefix reference score",  # which have a line for each line
    "serve": "input output score attention explain reference json buffer prefix "
    "sample temperature top_k top_p seed alignment words nbest paragraphs",
    "attention": "output explain " + OF_LINES,
    "explain": OF_LINES,
    "score": "reference json words beam alpha nbest max_len_a max_len_b split prefix "
    "sample temperature top_k top_p seed glossary",
}
# The flags that have an effect only beside each of these.
NEEDED = {
    "serve": "host api_key no_api_key",
    "reference": "compound_split bleu_tokenizer compare",
    "json": "words",
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "translate.py",
        "Translate with a trained Transformer (section 6.1).",
        EXAMPLES,
        NOTES,
        USUAL,
    )
    add = parser.add_argument

    # The text, the translations and the models.
    add("sentence", nargs="*", help="sentences to translate, instead of --input")
    add(
        "--input",
        "-i",
        type=path_or_standard,
        metavar="FILE",
        help="text to translate, plain or .gz (default standard input)",
    )
    add(
        "--output",
        "-o",
        type=path_or_standard,
        default=False,
        metavar="FILE",
        help="file of the translations, plain or .gz (default -, which is standard "
        "output; with --reference none)",
    )
    add_model(parser)

    # The quality of translations.
    add(
        "--reference",
        type=Path,
        metavar="FILE",
        help="print BLEU and chrF beside these references, with 95%% intervals",
    )
    add(
        "--compare",
        type=Path,
        metavar="FILE",
        help="test whether the difference to the translations in FILE is significant "
        "(p)",
    )
    add(
        "--compound-split",
        metavar="LANG",
        help="also print the paper's BLEU: of tokenised LANG, with compounds split",
    )
    add("--bleu-tokenizer", choices=BLEU_TOKENIZERS, help=BLEU_TOKENIZER_HELP)
    add(
        "--score",
        type=Path,
        metavar="FILE",
        help="do not translate: write the log-probability (nats) and token count of "
        "each translation in FILE",
    )

    # Guides for the translation.
    add(
        "--tag",
        metavar="TAG",
        help="tag that every line gets, such as <2de>, if the model learned several",
    )
    add(
        "--prefix",
        type=Path,
        metavar="FILE",
        help="file whose line N is how translation N begins, possibly in mid-word",
    )

    add(
        "--paragraphs",
        action="store_true",
        help="join the lines of each paragraph, in text that was broken to fit a page",
    )

    # Other ways to look at a translation.
    add(
        "--attention",
        type=Path,
        metavar="FILE",
        help="show the attention of every head in a page (.html)",
    )
    add(
        "--explain",
        action="store_true",
        help="show what happens to a sentence: text or, with --output, a page (.html)",
    )
    add(
        "--serve",
        nargs="?",
        const=8000,
        type=positive,
        metavar="PORT",
        help="serve a web page to translate on, at this port (default 8000)",
    )
    add(
        "--host",
        metavar="NAME",
        help="address to serve at (default 127.0.0.1; with a key if others reach it)",
    )
    add(
        "--api-key",
        metavar="KEY",
        help="api_key that requests must have (default with --host: a new one)",
    )
    add(
        "--no-api-key",
        action="store_true",
        help="let everybody translate who reaches --host",
    )
    add("--json", action="store_true", help="write a JSON object for each line")

    # Where and how to compute.
    add_device(parser)
    add("--precision", choices=(*PRECISIONS, "int8"), help=PRECISION_HELP)
    add(
        "--buffer",
        type=positive,
        metavar="LINES",
        help="translate up to so many lines together (default 2000)",
    )
    for settings in DecodingConfig, TranslationConfig:
        add_arguments(parser, settings)
    args = parser.parse_intermixed_args(arguments)

    # Beside references, translations are written only to a file that is named.
    args.quiet = bool(args.reference) and args.output is False
    args.output = args.output or None
    if args.sentence and os.path.exists(path := args.sentence[0]):
        hint = "--input translates the lines of a file, a second --model adds a model"
        say(f"translate.py: {path} is a path, too: {hint}")

    # Refuse flags that would do nothing, and flags that contradict each other.
    if args.sentence and args.input:
        parser.error("expected sentences or --input, got both")
    named = {name for name, x in vars(args).items() if x is not None and x is not False}
    for mode, ignored in IGNORED.items():
        if mode in named and (useless := named.intersection(ignored.split())):
            flag = flag_name(min(useless))
            parser.error(f"{flag} does nothing with {flag_name(mode)}")
    for mode in named & {"attention", "explain"}:
        if len(args.sentence) != 1:
            parser.error(f"--{mode} expects one sentence, got {len(args.sentence)}")
    if args.serve and args.sentence:
        parser.error("--serve gets its text from the page")
    if args.serve and args.serve > 65_535:
        parser.error(f"--serve: expected a port of at most 65535, got {args.serve}")
    if args.api_key is not None and not args.api_key.strip():
        parser.error("--api-key: expected a key, got an empty one")
    for needed, names in NEEDED.items():
        if needed not in named and (useless := named.intersection(names.split())):
            parser.error(f"{flag_name(min(useless))} does nothing without --{needed}")
    if args.reference and getattr(args, "nbest", 1) > 1:
        parser.error("--reference compares one translation a line, got --nbest above 1")
    if args.quiet and (args.json or "alignment" in named):
        parser.error("--json and --alignment expect --output beside --reference")
    return args


def load_model(args: argparse.Namespace) -> Translator:
    """Load the models of --model, or else the newest; flags override their decoding."""
    if not args.model:
        args.model = [find_checkpoint(None)]
        say(f"translate.py: using {described(args.model[0])}; --model names another")
    translator = load(
        *args.model,
        device=args.device,
        precision=args.precision,
        threads=1 if args.serve else args.threads,  # a server's threads must not fork
        tag=args.tag,
        glossary=args.glossary,
    )
    precision = backend_of(translator.model.embedding.table.data).precision
    if precision == "int8" and args.precision is None:
        say("translate.py: products in int8, as the model is stored (--precision)")
    flags = flags_of(args, TranslationConfig)
    translator.decoding = TranslationConfig.changed(translator.decoding, flags)
    return translator


def serve_models(args: argparse.Namespace) -> None:
    """Serve --model, or else the newest run, or else all shipped models.

    Models of one direction are an ensemble.

    Raises: UsageError if a flag is for models of one direction, and there are more.
    """
    import_extra("uvicorn", "serve", "--serve needs a web server")
    from minitransformer.commands.serve import Direction, Server, serve

    paths = args.model or [find_checkpoint(None)]
    if not args.model and card_title(paths[0]):
        paths = shipped_models()
    groups = models_by_direction(paths)
    for flag in ("glossary", "tag"):
        if getattr(args, flag) and len(groups) > 1:
            raise UsageError(f"--{flag} expects models of one direction")
    directions = []
    for group in groups:
        args.model = group
        directions.append(Direction.of(load_model(args), find_checkpoint(group[0])))
    server = Server(
        directions,
        args.host or "127.0.0.1",
        args.serve,
        api_key=args.api_key,
        is_open=args.no_api_key,
    )
    serve(server)


# Translations, and how they compare with references (6.1)


def write_translations(args: argparse.Namespace, translator: Translator) -> None:
    # Translate some lines together, and write them before more are read.
    config = translator.decoding
    best: list[str] = []
    limit = args.buffer or 2000
    source = source_lines(args.sentence, args.input, limit)
    if args.paragraphs:
        whole = join_paragraphs([*itertools.chain.from_iterable(source)])
        source = source_lines(whole, args.input, limit)
    number = unsure = lacking = alike = 0
    unseen = args.output or args.quiet
    with open_output(args.output) as out, progress_bar(args.input, unseen) as done:
        for lines, prefixes in zip_lines(source, args.prefix):
            translated = translator.hypotheses(lines, config, number + 1, prefixes)
            for line, ranked in zip(lines, translated, strict=True):
                if args.reference:
                    best.append(ranked[0].text)
                if not args.quiet:
                    out.write(written(number, ranked, config, args.json))
                share = ranked[0].confidence
                unsure += share is not None and share < UNSURE
                lacking += bool(ranked[0].missing)
                alike += are_alike(line, ranked[0].text)
                number += 1
            out.flush()
            done(len(lines))
    if unsure:
        surer = f"it was surer of {1 - UNSURE:.0%} of its validation sentences"
        say(f"translate.py: the model is unsure of {unsure} of {number} lines: {surer}")
    if 4 * alike > number:
        what = f"{alike} of {number} translations are mostly the same words"
        say(f"translate.py: {what}: is the text in the target language already?")
    if lacking:
        what = f"translations lack {LACKED}; --json says which"
        say(f"translate.py: {lacking} of {number} {what}")

    # Compare them with the references.
    if args.reference:
        report = quality.report(
            best,
            list(read_lines(args.reference)),
            language=args.compound_split,
            tokenizer=args.bleu_tokenizer,
            other=list(read_lines(args.compare)) if args.compare else None,
        )
        print(report, file=sys.stdout if args.quiet else sys.stderr)


def are_alike(line: str, translation: str) -> bool:
    """Return whether half the words stay, of more than three, which could be names."""
    words = {*line.split()}
    return len(words) > 3 and 2 * len(words & {*translation.split()}) >= len(words)


def written(
    number: int, ranked: list[Hypothesis], config: TranslationConfig, as_json: bool
) -> str:
    """Return the output for line `number`: JSON, an n-best list, or its best."""
    if as_json:
        whole = {"line": number, "translations": json_objects(ranked, config)}
        return json.dumps(whole, ensure_ascii=False) + "\n"
    links = [f" ||| {pharaoh(h.alignment)}" if config.alignment else "" for h in ranked]
    if config.nbest == 1:
        return f"{ranked[0].text}{links[0]}\n"
    return "".join(
        f"{number} ||| {h.text} ||| {h.score:.4f}{link}\n"
        for h, link in zip(ranked, links, strict=True)
    )


def write_scores(args: argparse.Namespace, translator: Translator) -> None:
    """Write `log-probability TAB tokens`, and TAB and any links, for each --score."""
    config = translator.decoding
    total = 0.0
    tokens = 0
    first = 1
    source = source_lines(args.sentence, args.input, args.buffer or 2000)
    with open_output(args.output) as out, progress_bar(args.input, args.output) as done:
        for lines, given in zip_lines(source, args.score):
            # The probability of each translation that is given, and its alignment.
            scores = translator.score(lines, given, config, first)
            for log_prob, length, links in scores:
                end = f"\t{pharaoh(links)}" if config.alignment else ""
                out.write(f"{log_prob:.4f}\t{length}{end}\n")
                total += log_prob
                tokens += length
            first += len(scores)
            out.flush()
            done(len(scores))

    # The perplexity of all tokens. e^700 is near the largest number of a float.
    perplexity = math.exp(min(-total / max(tokens, 1), 700))
    digits = ".4f" if perplexity < 1e9 else ".1e"
    print(f"perplexity {perplexity:{digits}}  {tokens} tokens", file=sys.stderr)


def work(args: argparse.Namespace) -> None:
    """Do what the flags ask for. Rarely used modules are imported here."""
    # Refuse wrong files and a missing library now, not after hours of work.
    check_output(args.attention or args.output, args, kind="text")
    check_files(
        args.output, args.input, args.reference, args.score, args.prefix, args.compare
    )
    if args.compound_split is not None:
        quality.import_moses(args.compound_split)

    if args.serve:
        serve_models(args)
        return
    translator = load_model(args)
    if args.attention:  # Figures 3 to 5
        from minitransformer.commands.attention_maps import show_attention

        show_attention(translator, args.sentence[0].replace("\n", " "), args.attention)
    elif args.explain:
        from minitransformer.commands.explain import show_explanation

        show_explanation(translator, args.sentence[0].replace("\n", " "), args.output)
    else:
        write = write_scores if args.score else write_translations
        write(args, translator)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    args.threads = args.threads or num_cores()
    with limit_threads(args.threads):
        return exit_code("translate.py", lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
