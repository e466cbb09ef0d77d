"""Translate with a trained Transformer (section 6.1); see EXAMPLES."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from minitransformer.api import load
from minitransformer.cli import (
    Parser,
    add_arguments,
    exit_code,
    path_or_standard,
    positive,
    say,
)
from minitransformer.runs.models import described, find_checkpoint
from minitransformer.runs.outputs import check_output
from minitransformer.settings.config import BLEU_TOKENIZERS, PRECISIONS
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.settings.options import flag_name, flags_of
from minitransformer.system.machine import num_cores
from minitransformer.system.workers import limit_threads
from minitransformer.text.lines import (
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
from minitransformer.translation.confidence import UNSURE
from minitransformer.translation.translator import Translator, json_objects

EXAMPLES = (
    'python translate.py "The old man gives the small child a red apple."',
    "python translate.py --model runs/NAME --input new.en --output new.de",
    "python translate.py --input test.en --reference test.de --output test.out",
    'python translate.py --attention heads.html "The old man sees a dog."',
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

# What each of these flags leaves without effect.
IGNORED = {
    "serve": "input output score attention reference json buffer prefix sample "
    "temperature top_k top_p seed alignment words nbest",
    "attention": "input output score reference json buffer nbest split max_input "
    "prefix alignment words glossary",
    "score": "reference json words beam alpha nbest max_len_a max_len_b split prefix "
    "sample temperature top_k top_p seed glossary",
}
# What has an effect beside each of these flags only.
NEEDED = {
    "serve": "host api_key",
    "reference": "compound_split bleu_tokenizer compare",
    "json": "words",
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = "Translate with a trained Transformer (section 6.1)."
    parser = Parser("translate.py", summary, EXAMPLES, NOTES, USUAL)
    add = parser.add_argument
    add("sentence", nargs="*", help="sentences to translate, instead of --input")
    source = "text to translate, plain or .gz (default standard input)"
    add_text = partial(add, type=path_or_standard, metavar="FILE")
    add_text("--input", "-i", help=source)
    path = "file of the translations, plain or .gz (default -, which is standard "
    path += "output; with --reference none)"
    add_text("--output", "-o", default=False, help=path)
    model = "run, checkpoint, en-de or de-en (default newest ended run, or en-de); "
    model += "repeat for an ensemble"
    add("--model", "-m", type=Path, action="append", metavar="PATH", help=model)
    reference = "print BLEU and chrF beside these references, with 95%% intervals"
    add("--reference", type=Path, metavar="FILE", help=reference)
    other = "print how likely chance explains the difference to these translations"
    add("--compare", type=Path, metavar="FILE", help=other)
    paper_bleu = "also print the paper's BLEU: of tokenised LANG, with compounds split"
    add("--compound-split", metavar="LANG", help=paper_bleu)
    words = "how sacreBLEU finds words (default by the script of the references)"
    add("--bleu-tokenizer", choices=BLEU_TOKENIZERS, help=words)
    scored = "write log-probabilities (nats) and tokens of these translations instead"
    add("--score", type=Path, metavar="FILE", help=scored)
    tag = "tag that every line gets, such as <2de>, if the model learned several"
    add("--tag", metavar="TAG", help=tag)
    terms = "file of terms and their translations, with a tab between them"
    add("--glossary", type=Path, metavar="FILE", help=terms)
    beginning = "file whose line N is how translation N begins, possibly in mid-word"
    add("--prefix", type=Path, metavar="FILE", help=beginning)
    heads = "show the attention of every head in a page (.html)"
    add("--attention", type=Path, metavar="FILE", help=heads)
    served = "serve a web page to translate on, at this port (default 8000)"
    add("--serve", nargs="?", const=8000, type=positive, metavar="PORT", help=served)
    host = "address to serve at (default 127.0.0.1; with a key if others reach it)"
    add("--host", metavar="NAME", help=host)
    key = "what requests to the server must have as api_key (default with --host: new)"
    add("--api-key", metavar="KEY", help=key)
    add("--json", action="store_true", help="write a JSON object for each line")
    threads = "how many cores of a CPU are used (default all cores)"
    add("--threads", type=positive, metavar="N", help=threads)
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    precision = "number format (default fp32; on a GPU bf16 if it can)"
    add("--precision", choices=(*PRECISIONS, "int8"), help=precision)
    buffer = "translate up to so many lines together (default 2000)"
    add("--buffer", type=positive, metavar="LINES", help=buffer)
    add_arguments(parser, TranslationConfig)
    args = parser.parse_intermixed_args(arguments)
    args.quiet = bool(args.reference) and args.output is False
    args.output = args.output or None
    if args.sentence and os.path.exists(path := args.sentence[0]):
        hint = "--input translates the lines of a file, a second --model adds a model"
        say(f"translate.py: {path} is a path, too: {hint}")
    if args.sentence and args.input:
        parser.error("expected sentences or --input, got both")
    named = {name for name, x in vars(args).items() if x is not None and x is not False}
    for mode, ignored in IGNORED.items():
        if mode in named and (useless := named.intersection(ignored.split())):
            parser.error(f"{flag_name(min(useless))} does nothing with --{mode}")
    if args.attention and len(args.sentence) != 1:
        parser.error(f"--attention expects one sentence, got {len(args.sentence)}")
    if args.serve and args.sentence:
        parser.error("--serve gets its text from the page")
    for needed, names in NEEDED.items():
        if needed not in named and (useless := named.intersection(names.split())):
            parser.error(f"{flag_name(min(useless))} does nothing without --{needed}")
    if args.reference and getattr(args, "nbest", 1) > 1:
        parser.error("--reference compares one translation a line, got --nbest above 1")
    if args.quiet and (args.json or "alignment" in named):
        parser.error("--json and --alignment expect --output beside --reference")
    return args


def load_model(args: argparse.Namespace) -> Translator:
    """Load what --model names, or what is newest; flags say how it decodes."""
    if not args.model:
        args.model = [find_checkpoint(None)]
        say(f"translate.py: using {described(args.model[0])}; --model names another")
    names = "device", "precision", "tag", "glossary"
    options = {name: getattr(args, name) for name in names}
    threads = 1 if args.serve else args.threads  # a server's threads must not fork
    translator = load(*args.model, threads=threads, **options)
    flags = flags_of(args, TranslationConfig)
    translator.decoding = TranslationConfig.changed(translator.decoding, flags)
    return translator


# Translations, and how they compare with references (6.1)


def write_translations(args: argparse.Namespace, translator: Translator) -> None:
    outputs, number, unsure = list[str](), 0, 0
    source = source_lines(args.sentence, args.input, args.buffer or 2000)
    unseen = args.output or args.quiet
    with open_output(args.output) as out, progress_bar(args.input, unseen) as done:
        for lines, prefixes in zip_lines(source, args.prefix):
            config = translator.decoding
            batch = translator.hypotheses(lines, config, number + 1, prefixes)
            for found in batch:
                if args.reference:
                    outputs.append(found[0].text)
                if not args.quiet:
                    out.write(written(number, found, config, args.json))
                share = found[0].confidence
                unsure += share is not None and share < UNSURE
                number += 1
            out.flush()
            done(len(lines))
    if unsure:
        surer = f"it was surer of {1 - UNSURE:.0%} of its validation sentences"
        say(f"translate.py: the model is unsure of {unsure} of {number} lines: {surer}")
    if args.reference:
        references = list(read_lines(args.reference))
        other = list(read_lines(args.compare)) if args.compare else None
        bleu = args.compound_split, args.bleu_tokenizer, other
        report = quality.report(outputs, references, *bleu)
        print(report, file=sys.stdout if args.quiet else sys.stderr)


def written(
    number: int, found: list[Hypothesis], config: TranslationConfig, as_json: bool
) -> str:
    """Return what is written for line `number`: JSON, an n-best list, or its best."""
    if as_json:
        whole = {"line": number, "translations": json_objects(found, config)}
        return json.dumps(whole, ensure_ascii=False) + "\n"
    links = [f" ||| {pharaoh(h.alignment)}" if config.alignment else "" for h in found]
    if config.nbest == 1:
        return f"{found[0].text}{links[0]}\n"
    ranked = zip(found, links, strict=True)
    return "".join(f"{number} ||| {h.text} ||| {h.score:.4f}{x}\n" for h, x in ranked)


def write_scores(args: argparse.Namespace, translator: Translator) -> None:
    """Write `log-probability TAB tokens`, and TAB and any links, for each --score."""
    total, tokens, number = 0.0, 0, 0
    source = source_lines(args.sentence, args.input, args.buffer or 2000)
    with open_output(args.output) as out, progress_bar(args.input, args.output) as done:
        for pairs in zip_lines(source, args.score):
            rest = translator.decoding, number + 1
            scores = translator.score(*pairs, *rest)
            ends = [""] * len(scores)
            if "alignment" in args:
                ends = [f"\t{pharaoh(x)}" for x in translator.align(*pairs, *rest)]
            for (log_prob, length), end in zip(scores, ends, strict=True):
                out.write(f"{log_prob:.4f}\t{length}{end}\n")
                total, tokens = total + log_prob, tokens + length
            number += len(scores)
            out.flush()
            done(len(scores))
    perplexity = math.exp(min(-total / max(tokens, 1), 700))
    digits = ".4f" if perplexity < 1e9 else ".1e"
    print(f"perplexity {perplexity:{digits}}  {tokens} tokens", file=sys.stderr)


def work(args: argparse.Namespace) -> None:
    """Do what the flags ask for. What few translations need is imported here."""
    check_output(args.attention or args.output, args, replace=True)
    beside = args.reference, args.score, args.prefix, args.compare
    check_files(args.output, args.input, *beside)
    if args.compound_split is not None:  # refused before hours of work, not after them
        quality.import_moses(args.compound_split)
    translator = load_model(args)
    if args.serve:
        from minitransformer.commands.serve import serve

        checkpoint, host = find_checkpoint(args.model[0]), args.host or "127.0.0.1"
        serve(translator, checkpoint, host, args.serve, args.api_key)
    elif args.attention:  # Figures 3 to 5
        from minitransformer.commands.attention_maps import show_attention

        show_attention(translator, args.sentence[0].replace("\n", " "), args.attention)
    else:
        (write_scores if args.score else write_translations)(args, translator)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    args.threads = args.threads or num_cores()
    with limit_threads(args.threads):
        return exit_code("translate.py", lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
