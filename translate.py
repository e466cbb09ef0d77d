"""Translate with a trained Transformer (section 6.1 of "Attention Is All You Need").

    python translate.py "The old man gives the small child a red apple."
    python translate.py --model runs/NAME --input new.en --output new.de
    python translate.py --input test.en --reference test.de > test.out

The flag --help lists all settings.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from minitransformer.api import load
from minitransformer.files import atomic_write, write_bytes
from minitransformer.runs.run_directory import find_checkpoint, is_model
from minitransformer.settings.config import PRECISIONS, DecodingConfig
from minitransformer.settings.options import (
    Parser,
    add_arguments,
    build,
    exit_code,
    given,
    positive,
)
from minitransformer.text.lines import read_available_lines, read_lines
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.translator import Translator

# What few translations need is imported where it is used, to start without delay.

EXAMPLES = (
    'python translate.py "The old man gives the small child a red apple."',
    "python translate.py --model runs/NAME --input new.en --output new.de",
    "cat new.en | python translate.py --beam 5 --nbest 3",
    "python translate.py --input test.en --reference test.de > test.out",
    "python translate.py --input test.en --score test.de",
    'python translate.py --attention heads.html "A dog runs through the snow."',
    "python translate.py --serve",
)
NOTES = """\
Each line read gives one line of standard output, in the same order; blank lines stay
blank, and only a line feed ends a line. Everything else goes to standard error. With
--nbest N > 1, each translation has a line `number ||| translation ||| score`. Numbers,
those of --json too, begin with 0. The score is the natural log-probability divided by
((5 + tokens) / 6)^alpha, where the tokens include the end of the sentence."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = "Translate with a trained Transformer (section 6.1)."
    parser = Parser("translate.py", summary, EXAMPLES, NOTES)
    add = parser.add_argument
    add("sentence", nargs="*", help="sentences to translate, instead of --input")
    source = "text to translate, plain or .gz (default standard input)"
    add("--input", "-i", type=Path, metavar="FILE", help=source)
    add("--output", "-o", type=Path, metavar="FILE", help="default standard output")
    model = "run or checkpoint (default the newest run); repeat it for an ensemble"
    add("--model", "-m", type=Path, action="append", metavar="PATH", help=model)
    reference = "compare with these translations: print sacreBLEU and chrF"
    add("--reference", type=Path, metavar="FILE", help=reference)
    paper_bleu = "also print the paper's BLEU: of tokenised LANG, with compounds split"
    add("--compound-split", metavar="LANG", help=paper_bleu)
    scored = "write log-probabilities (nats) and tokens of these translations instead"
    add("--score", type=Path, metavar="FILE", help=scored)
    lexicon = "use only likely words, from a file of `minitransformer lexicon`"
    add("--shortlist", type=Path, metavar="FILE", help=lexicon)
    heads = "show the attention of every head in a page (.html) or picture (.png, .svg)"
    add("--attention", type=Path, metavar="FILE", help=heads)
    served = "serve a web page to translate on, at this port (default 8000)"
    add("--serve", nargs="?", const=8000, type=positive, metavar="PORT", help=served)
    host = "address to serve at (default 127.0.0.1; with a token if others reach it)"
    add("--host", metavar="NAME", help=host)
    add("--json", action="store_true", help="write a JSON object for each line")
    add("--threads", type=positive, metavar="N", help="CPU threads (default all cores)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    precision = "number format on a GPU (default bf16, or else fp32)"
    add("--precision", choices=PRECISIONS, help=precision)
    buffer = "most lines that are translated together (default 2000)"
    add("--buffer", type=positive, default=2000, metavar="LINES", help=buffer)
    add_arguments(parser, DecodingConfig)
    args = parser.parse_intermixed_args(arguments)
    while args.model and args.sentence and is_model(args.sentence[0]):
        args.model.append(Path(args.sentence.pop(0)))  # --model A B
    if args.sentence and args.input:
        parser.error("expected sentences or --input, got both")
    ignored = given(args, DecodingConfig).keys() - {"decode_tokens", "max_input"}
    ignored |= {x for x in ("reference", "json", "shortlist") if getattr(args, x)}
    if args.score and ignored:
        parser.error(f"--{min(ignored).replace('_', '-')} does nothing with --score")
    if args.attention and (len(args.sentence) != 1 or args.score or args.serve):
        parser.error("--attention expects one sentence and neither --score nor --serve")
    if args.attention and args.attention.suffix not in (".html", ".png", ".svg"):
        parser.error(f"--attention: expected .html, .png, .svg, got {args.attention}")
    if args.serve and (args.sentence or args.input or args.score or args.output):
        parser.error("--serve gets its text from the page")
    if args.host and not args.serve:
        parser.error("--host does nothing without --serve")
    if args.compound_split and not args.reference:
        parser.error("--compound-split does nothing without --reference")
    if args.reference and getattr(args, "nbest", 1) > 1:
        parser.error("--reference compares one translation a line, got --nbest above 1")
    return args


# The lines to translate, and the model


def source_lines(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the lines to translate, as many at a time as are translated together.

    Lines from a terminal or a pipe are translated as soon as no more are waiting.
    """
    if args.sentence:
        yield [sentence.replace("\n", " ") for sentence in args.sentence]
    elif args.input:
        lines = read_lines(args.input)
        while part := list(itertools.islice(lines, args.buffer)):
            yield part
    else:
        yield from read_available_lines(sys.stdin.fileno(), args.buffer)


def load_model(args: argparse.Namespace) -> Translator:
    """Load what --model names; without it, the newest run, and say which that is."""
    paths = args.model or [find_checkpoint(None)]
    if not args.model:
        print(f"translate.py: using {paths[0]}", file=sys.stderr)
    return load(
        *paths,
        device=args.device,
        precision=args.precision,
        threads=args.threads,
        shortlist=args.shortlist,
    )


# Translations, and how they compare with references (6.1)


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[TextIO]:
    """Open standard output, or a file that appears once it is complete."""
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout
        return
    with atomic_write(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
        yield text
        text.detach()


def write_translations(
    args: argparse.Namespace, config: DecodingConfig, out: TextIO
) -> None:
    references = list(read_lines(args.reference)) if args.reference else None
    translator, outputs, number = load_model(args), list[str](), 0
    for lines in source_lines(args):
        for found in translator.hypotheses(lines, config, number + 1):
            texts = translator.text(found)
            if references is not None:
                outputs.append(texts[0])
            out.writelines(output_lines(args, number, texts, found))
            number += 1
        out.flush()
    if references is None:
        return
    from minitransformer.training import evaluation

    print(evaluation.translation_quality(outputs, references), file=sys.stderr)
    if language := args.compound_split:
        bleu = evaluation.compound_split_bleu(outputs, references, language)
        print(f"BLEU {bleu:.2f}  tokenised, compounds split", file=sys.stderr)


def output_lines(
    args: argparse.Namespace, number: int, texts: list[str], found: list[Hypothesis]
) -> Iterator[str]:
    """Yield what is written for the translations of one line."""
    translations = list(zip(texts, found, strict=True))
    if args.json:
        best = [
            {"text": text, "score": h.score, "log_prob": h.log_prob}
            for text, h in translations
        ]
        answer = {"line": number, "translations": best}
        yield json.dumps(answer, ensure_ascii=False) + "\n"
    elif getattr(args, "nbest", 1) > 1:
        for text, h in translations:
            yield f"{number} ||| {text} ||| {h.score:.4f}\n"
    else:
        yield texts[0] + "\n"


# Scores of given translations


def write_scores(args: argparse.Namespace, config: DecodingConfig, out: TextIO) -> None:
    """Write `log-probability TAB tokens` for each translation in --score."""
    translator, targets = load_model(args), read_lines(args.score)
    total, tokens, number = 0.0, 0, 0
    expected = f"{args.score}: expected a line for each source line"
    for lines in source_lines(args):
        translations = list(itertools.islice(targets, len(lines)))
        if len(translations) < len(lines):
            raise ValueError(f"{expected}, got {number + len(translations)}")
        scores = translator.score(lines, translations, config, number + 1)
        for log_prob, length in scores:
            out.write(f"{log_prob:.4f}\t{length}\n")
            total, tokens = total + log_prob, tokens + length
        number += len(lines)
        out.flush()
    if next(targets, None) is not None:
        raise ValueError(f"{expected}, got more than {number}")
    perplexity = math.exp(min(-total / max(tokens, 1), 700))
    print(f"perplexity {perplexity:.4f}  {tokens} tokens", file=sys.stderr)


# Attention (Figures 3 to 5)


def write_attention(args: argparse.Namespace) -> None:
    from minitransformer.translation import attention_maps, attention_picture

    line = args.sentence[0].replace("\n", " ")
    maps = attention_maps.attention_maps(load_model(args), line)
    if args.attention.suffix == ".html":
        write_bytes(args.attention, attention_maps.attention_page(maps).encode())
    else:
        attention_picture.draw_attention(maps, args.attention)


# The command line


def work(args: argparse.Namespace) -> int:
    """Do what the flags ask for; return the exit code."""
    config = build(DecodingConfig, {}, given(args, DecodingConfig))
    try:
        if args.serve:
            from minitransformer.translation.serve import serve

            serve(load_model(args), config, args.host or "127.0.0.1", args.serve)
        elif args.attention:
            write_attention(args)
        else:
            with open_output(args.output) as out:
                (write_scores if args.score else write_translations)(args, config, out)
    except BrokenPipeError:
        # The reader has gone, as with `| head`: end as other Unix tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    return exit_code("translate.py", lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
