"""Attention maps: the weights of every head for one sentence (Figures 3 to 5)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minitransformer.commands.pages import page
from minitransformer.engine.backend import to_host
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.system.files import write_bytes
from minitransformer.system.workers import limit_threads
from minitransformer.translation.alignment import attention_weights
from minitransformer.translation.translator import Segment, Translator

MAX_PIECES = 256  # of a sentence: a map of more would be too small to read


@dataclass(frozen=True)
class AttentionMaps:
    """The attention weights of a sentence and its translation; each row sums to 1.

    `source`, `read` and `written` are word pieces: of the sentence, of the decoder's
    input and of its output. The input begins with BOS and lags behind by one piece.

    Shapes: encoder [N, H, S, S], decoder [L, H, T, T], cross [L, H, T, S]
    """

    source: list[str]
    read: list[str]
    written: list[str]
    encoder: np.ndarray
    decoder: np.ndarray
    cross: np.ndarray

    def to_json(self) -> str:
        """Return what `pages/attention.js` shows, with weights in thousandths."""
        values = vars(self) | {
            name: np.rint(getattr(self, name) * 1000).astype(int).tolist()
            for name in ("encoder", "decoder", "cross")
        }
        # "<" would let a word piece such as "</script>" end the page's data.
        return json.dumps(values).replace("<", "\\u003c")


def translated_ids(
    translator: Translator, line: str, config: DecodingConfig | None = None
) -> tuple[list[int], list[int]]:
    """Translate a line as one sentence, and return the ids of both.

    Raises: as `attention_maps`
    """
    whole = {"nbest": 1, "split": "never", "max_input": 1 << 30}
    config = TranslationConfig(**vars(config or translator.decoding) | whole)
    [source] = translator.encode([line], config, [1])
    if len(source) > MAX_PIECES:
        raise ValueError(
            f"expected a sentence of at most {MAX_PIECES} word pieces to show the "
            f"attention of, got {len(source)}"
        )
    if not source:
        raise ValueError("expected a sentence, got a blank line")
    [[best, *_]] = translator.translate_as_read([Segment(line)], config)
    return source, list(best.tokens)


def attention_maps(
    translator: Translator, line: str, config: DecodingConfig | None = None
) -> AttentionMaps:
    """Translate a line of at most MAX_PIECES, and record every head's weights.

    Without `config` the translator decodes as it does by default.

    Raises: ValueError if the line is blank or too long, or if there are several models.
    """
    model = translator.single_model
    tokenizer = translator.tokenizer
    source, target = translated_ids(translator, line, config)
    # Record the weights of all sub-layers while the model reads both.
    fed = [BOS_ID, *target][: model.position_limit]  # no room for the end, if cut off
    layers = model.config.encoder_layers
    xp = model.embedding.xp
    with limit_threads(1):
        recorded = attention_weights(
            model,
            xp.asarray([[*source, EOS_ID]]),
            xp.asarray([fed]),
            range(layers + 2 * model.config.decoder_layers),
        )
    weights = [to_host(each[0]) for each in recorded]
    # Name the rows and columns; decoder layers have self-attention and cross-attention.
    names = [*tokenizer.pieces(target), "end"][: len(fed)]
    return AttentionMaps(
        source=[*tokenizer.pieces(source), "end"],
        read=["begin", *names[:-1]],
        written=names,
        encoder=np.stack(weights[:layers]),
        decoder=np.stack(weights[layers::2]),
        cross=np.stack(weights[layers + 1 :: 2]),
    )


def show_attention(translator: Translator, line: str, output: Path) -> None:
    """Translate a line, and write the page of its attention.

    Raises: as `write_page`
    """
    write_page("--attention", output, attention_page(attention_maps(translator, line)))


def write_page(flag: str, output: Path, document: str) -> None:
    """Write a page to the file of a flag.

    Raises: UsageError if the name of the file is not that of a page.
    """
    if output.suffix != ".html":
        raise UsageError(f"{flag}: expected .html, got {output}")
    write_bytes(output, document.encode(), replace=True)


def attention_page(
    maps: AttentionMaps, title: str = "Attention", tables: str = ""
) -> str:
    """Return an HTML document that shows tables and the maps, and needs no network."""
    return page("attention.html", TITLE=title, TABLES=tables, DATA=maps.to_json())
