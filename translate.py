"""Translate with a trained Transformer (section 6.1 of "Attention Is All You Need").

    python translate.py "The old man gives the small child a red apple."
    python translate.py --model runs/NAME --input new.en --output new.de
    cat new.en | python translate.py --beam 5 --nbest 3
    python translate.py --input test.en --reference test.de > test.out
    python translate.py --input test.en --score test.de
    python translate.py --attention heads.html "A dog runs through the snow."
    python translate.py --serve

One line is written for each line read, in order, to standard output; blank lines stay
blank, and only a line feed ends a line. Everything else goes to standard error. With
--nbest N > 1 the lines are `number ||| translation ||| score`, where the score is the
natural log-probability divided by ((5 + tokens) / 6)^alpha, end of sentence counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from minitransformer.api import load
from minitransformer.files import replacing, write_bytes
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
from minitransformer.text.lines import lines_as_they_come, read_lines
from minitransformer.training.evaluation import compound_split_bleu, translation_quality
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.decode import encode_lines
from minitransformer.translation.scoring import score_targets
from minitransformer.translation.translator import Translator

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
One line is written for each line read, in order, to standard output; blank lines stay
blank, and only a line feed ends a line. Everything else goes to standard error. With
--nbest N > 1 the lines are `number ||| translation ||| score`, where the score is the
natural log-probability divided by ((5 + tokens) / 6)^alpha, end of sentence counted."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = "Translate with a trained Transformer (section 6.1)."
    parser = Parser("translate.py", summary, EXAMPLES, NOTES)
    add = parser.add_argument
    add("sentence", nargs="*", help="sentences to translate, instead of --input")
    source = "text to translate, plain or .gz (default standard input)"
    add("--input", "-i", type=Path, metavar="FILE", help=source)
    add("--output", "-o", type=Path, metavar="FILE", help="default standard output")
    model = (
        "run directory or checkpoint (default the newest run in ./runs); of several, "
        "--model A B or --model A --model B, probabilities are averaged"
    )
    add("--model", "-m", type=Path, action="append", metavar="PATH", help=model)
    reference = "print sacreBLEU and chrF against these translations"
    add("--reference", type=Path, metavar="FILE", help=reference)
    moses = (
        "with --reference, also BLEU as the paper's: LANG tokenised, compounds split"
    )
    add("--compound-split", metavar="LANG", help=moses)
    given_targets = (
        "instead of translating, write for each line the log-probability (nats) of the "
        "translation in this file and its tokens; perplexity goes to standard error"
    )
    add("--score", type=Path, metavar="FILE", help=given_targets)
    lexicon = "choose among likely words only, listed by minitransformer lexicon"
    add("--shortlist", type=Path, metavar="FILE", help=lexicon)
    heads = "write a page (.html) or picture (.png, .svg) of where each head looks"
    add("--attention", type=Path, metavar="FILE", help=heads)
    served = "serve a page to translate on, at this port (default 8000)"
    add("--serve", nargs="?", const=8000, type=positive, metavar="PORT", help=served)
    host = "where to serve (default 127.0.0.1; elsewhere a token is asked for)"
    add("--host", metavar="NAME", help=host)
    add("--json", action="store_true", help="write a JSON object a line")
    add("--threads", type=positive, help="CPU threads (default all cores)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    precision = "numbers that a GPU computes with (default bf16 where it has it)"
    add("--precision", choices=PRECISIONS, help=precision)
    buffer = "lines translated together when a file is read (default 2000)"
    add("--buffer", type=positive, default=2000, metavar="LINES", help=buffer)
    add_arguments(parser, DecodingConfig)
    args = parser.parse_intermixed_args(arguments)
    while args.model and args.sentence and is_model(args.sentence[0]):
        args.model.append(Path(args.sentence.pop(0)))  # --model A B
    if args.sentence and args.input:
        parser.error("expected sentences or --input, got both")
    decoding = given(args, DecodingConfig).keys() - {"decode_tokens", "max_input"}
    others = {
        name for name in ("reference", "json", "shortlist") if getattr(args, name)
    }
    if args.score and (useless := sorted(decoding | others)):
        parser.error(f"--{useless[0].replace('_', '-')} does nothing with --score")
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


def source_lines(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the lines to translate, as many at a time as should be answered together.

    What comes from a terminal or a pipe is answered as soon as no more is waiting.
    """
    if args.sentence:
        yield [sentence.replace("\n", " ") for sentence in args.sentence]
    elif args.input:
        lines = read_lines(args.input)
        while part := list(itertools.islice(lines, args.buffer)):
            yield part
    else:
        yield from lines_as_they_come(sys.stdin.fileno(), args.buffer)


def load_named(args: argparse.Namespace) -> Translator:
    """Load the model that the flags name, and say which one if they name none."""
    paths = args.model
    if paths is None:
        paths = [find_checkpoint(None)]
        print(f"translate.py: using {paths[0]}", file=sys.stderr)
    return load(
        *paths,
        device=args.device,
        shortlist=args.shortlist,
        precision=args.precision,
        threads=args.threads,
    )


def formatted(
    number: int,
    texts: Sequence[str],
    found: Sequence[Hypothesis],
    args: argparse.Namespace,
) -> Iterator[str]:
    """Yield the output lines of one source line."""
    if args.json:
        best = [
            {"text": text, "score": h.score, "log_prob": h.log_prob}
            for text, h in zip(texts, found, strict=True)
        ]
        yield json.dumps({"line": number, "translations": best}, ensure_ascii=False)
    elif getattr(args, "nbest", 1) > 1:
        for text, h in zip(texts, found, strict=True):
            yield f"{number} ||| {text} ||| {h.score:.4f}"
    else:
        yield texts[0]


def write_translations(args: argparse.Namespace, out: TextIO) -> None:
    config = build(DecodingConfig, {}, given(args, DecodingConfig))
    references = list(read_lines(args.reference)) if args.reference else None
    translator, outputs = load_named(args), list[str]()
    number = 0
    for lines in source_lines(args):
        for found in translator.hypotheses(lines, config, number + 1):
            texts = translator.text(found)
            if references is not None:
                outputs.append(texts[0])
            for line in formatted(number, texts, found, args):
                out.write(line + "\n")
            number += 1
        out.flush()
    if references is not None:
        print(translation_quality(outputs, references), file=sys.stderr)
        if language := args.compound_split:
            bleu = compound_split_bleu(outputs, references, language)
            print(f"BLEU {bleu:.2f}  tokenised, compounds split", file=sys.stderr)


def write_scores(args: argparse.Namespace, out: TextIO) -> None:
    """Write `log-probability TAB tokens` of each given translation."""
    named = given(args, DecodingConfig)
    config = build(DecodingConfig, {"long_input": "error"}, named)
    translator, targets = load_named(args), read_lines(args.score)
    total, tokens, number = 0.0, 0, 0
    for lines in source_lines(args):
        first = number + 1
        given_lines = list(itertools.islice(targets, len(lines)))
        number += len(given_lines)
        if len(given_lines) < len(lines):
            raise ValueError(
                f"{args.score}: expected a line for each source line, got {number}"
            )
        model, tokenizer = translator.single, translator.tokenizer
        sources, expected = (
            [ids for [ids] in encode_lines(model, tokenizer, side, config, first)]
            for side in (lines, given_lines)
        )
        for log_prob, length in score_targets(
            model, sources, expected, config.decode_tokens, translator.num_threads
        ):
            out.write(f"{log_prob:.4f}\t{length}\n")
            total, tokens = total + log_prob, tokens + length
        out.flush()
    if next(targets, None) is not None:
        raise ValueError(
            f"{args.score}: expected {number} lines as the source, got more"
        )
    perplexity = math.exp(min(-total / max(tokens, 1), 700))
    print(f"perplexity {perplexity:.4f}  {tokens} tokens", file=sys.stderr)


@contextlib.contextmanager
def output(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name once it is complete."""
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout
        return
    with (
        replacing(path) as partial,
        open(partial, "w", encoding="utf-8", newline="\n") as file,
    ):
        yield file


def run(args: argparse.Namespace) -> int:
    """Do what the flags say; return the exit code."""
    if args.serve:
        from minitransformer.translation.serve import serve

        config = build(DecodingConfig, {}, given(args, DecodingConfig))
        serve(load_named(args), config, args.host or "127.0.0.1", args.serve)
        return 0
    if args.attention:
        from minitransformer.translation.attention_maps import (
            attention_maps,
            attention_page,
        )

        [sentence] = args.sentence
        maps = attention_maps(load_named(args), sentence.replace("\n", " "))
        if args.attention.suffix == ".html":
            write_bytes(args.attention, attention_page(maps).encode())
        else:
            from minitransformer.translation.attention_picture import draw_attention

            draw_attention(maps, args.attention)
        return 0
    try:
        with output(args.output) as out:
            (write_scores if args.score else write_translations)(args, out)
    except BrokenPipeError:
        # The reader has gone, as `| head` does: end as other Unix tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    return exit_code("translate.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
