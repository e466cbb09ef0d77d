"""What every head attends to in one sentence (the paper's Figures 3 to 5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from minitransformer.engine.autograd import PRIMITIVES, no_grad, observed
from minitransformer.engine.backend import Array, array_module, to_host
from minitransformer.settings.config import BOS_ID, EOS_ID, DecodingConfig
from minitransformer.translation.decode import encode_lines
from minitransformer.translation.translator import Translator


@dataclass(frozen=True)
class AttentionMaps:
    """Attention weights of a sentence and its translation; each row sums to 1.

    The decoder reads BOS and the translation, `read`, and writes `written`, one piece
    later each.

    Shapes: encoder [N, H, S, S], decoder [N, H, T, T] (lower-triangular),
    cross [N, H, T, S]
    """

    source: list[str]
    read: list[str]
    written: list[str]
    encoder: np.ndarray
    decoder: np.ndarray
    cross: np.ndarray

    def to_json(self) -> str:
        """For `pages/attention.js`; weights in whole thousandths."""
        maps = {
            name: np.rint(getattr(self, name) * 1000).astype(int).tolist()
            for name in ("encoder", "decoder", "cross")
        }
        words = {"source": self.source, "read": self.read, "written": self.written}
        # "<" would let a word piece such as "</script>" end the page's data.
        return json.dumps({**words, **maps}, ensure_ascii=True).replace("<", "\\u003c")


def attention_maps(translator: Translator, line: str) -> AttentionMaps:
    """Translate a line and record where each head looked.

    Raises: ValueError if the line is blank, or too long to translate in one piece.
    """
    model, tokenizer = translator.single, translator.tokenizer
    config = DecodingConfig(long_input="error", max_input=256)
    [[source]] = encode_lines(model, tokenizer, [line], config, 1)
    if not source:
        raise ValueError("expected a sentence, got a blank line")
    [[best, *_]] = translator.hypotheses([line], config)
    target = [int(token) for token in best.tokens]
    xp = array_module(model.embedding.table.data)
    recorded: list[np.ndarray] = []

    def observer(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        if name not in ("attention", "restricted_attention"):
            return body

        def recording(
            q: Array, k: Array, v: Array, mask: Array | None = None, **options: Any
        ) -> Any:
            # What the weights make of one-hot values is the weights themselves.
            heads, keys = options["num_heads"], k.shape[1]
            one_hot = xp.tile(xp.eye(keys, dtype=v.dtype), heads)[None]  # [1, S, H S]
            weights, _ = PRIMITIVES[name](q, k, one_hot, mask, **options)  # [1, T, H S]
            by_head = weights[0].reshape(-1, heads, keys).swapaxes(0, 1)
            recorded.append(to_host(by_head))
            return body(q, k, v, mask, **options)

        return recording

    with no_grad(), observed(observer):
        model(xp.asarray([[*source, EOS_ID]]), xp.asarray([[BOS_ID, *target]]))
    layers = model.config.encoder_layers
    names = [*tokenizer.pieces(target), "end"]
    return AttentionMaps(
        source=[*tokenizer.pieces(source), "end"],
        read=["begin", *names[:-1]],
        written=names,
        encoder=np.stack(recorded[:layers]),
        decoder=np.stack(recorded[layers::2]),
        cross=np.stack(recorded[layers + 1 :: 2]),
    )


def page(name: str) -> str:
    """The text of a file in `pages/`."""
    return (resources.files("minitransformer") / "pages" / name).read_text("utf-8")


def filled_page(name: str, **parts: str) -> str:
    """A page with its style, the script of the view and other parts put in.

    A part takes the place of its name in a comment, such as /*DATA*/.
    """
    text = page(name)
    own = {"STYLE": page("style.css"), "SCRIPT": page("attention.js")}
    for key, part in {**own, **parts}.items():
        text = text.replace(f"/*{key}*/", part)
    return text


def attention_page(maps: AttentionMaps) -> str:
    """A page of HTML that shows the maps and needs nothing else, nor a network."""
    return filled_page("attention.html", DATA=maps.to_json())
