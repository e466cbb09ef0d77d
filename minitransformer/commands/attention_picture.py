"""Attention maps in a file: a page, or a picture that matplotlib draws."""

from __future__ import annotations

import math
from pathlib import Path

from minitransformer.commands.attention_maps import (
    AttentionMaps,
    attention_maps,
    attention_page,
)
from minitransformer.commands.pictures import write_picture
from minitransformer.settings.extras import import_extra
from minitransformer.settings.options import UsageError
from minitransformer.system.files import write_bytes
from minitransformer.translation.translator import Translator

# So many pixels need 400 MB while they are drawn.
MAX_PIXELS = 100_000_000


def show_attention(translator: Translator, line: str, output: Path) -> None:
    """Translate a line, and write the maps of its attention.

    Raises: UsageError if the name of the file ends in another way than pages and
    pictures do.
    """
    if output.suffix not in (".html", ".png", ".svg"):
        raise UsageError(f"--attention: expected .html, .png, .svg, got {output}")
    write_attention(attention_maps(translator, line), output)


def write_attention(maps: AttentionMaps, output: Path) -> None:
    """Write the maps as a page (.html) or a picture (.png, .svg).

    Raises: as `draw_attention`
    """
    if output.suffix == ".html":
        write_bytes(output, attention_page(maps).encode())
    else:
        draw_attention(maps, output)


def draw_attention(maps: AttentionMaps, output: Path) -> None:
    """Draw the maps into a PNG or SVG file: a row per layer and a panel per head.

    Queries run downwards and keys to the right. The more a square differs from the
    background, the larger is the weight.

    Raises: RuntimeError if matplotlib is not installed.
    """
    need = "pictures of attention need matplotlib, FILE.html does not"
    matplotlib = import_extra("matplotlib.figure", "plot", need)
    kinds = (
        ("encoder", maps.encoder, maps.source, maps.source),
        ("decoder", maps.decoder, maps.read, maps.read),
        ("cross", maps.cross, maps.written, maps.source),
    )
    rows = sum(len(weights) for _, weights, _, _ in kinds)
    heads = maps.encoder.shape[1]
    side = max(1.5, 0.11 * max(len(maps.source), len(maps.read)))  # inches per panel
    figure = matplotlib.Figure(figsize=(side * heads + 1.5, side * rows + 1.5))
    panels = iter(figure.subplots(rows, heads, squeeze=False))
    for kind, layers, queries, keys in kinds:
        for number, weights in enumerate(layers, start=1):
            for head, (panel, shown) in enumerate(
                zip(next(panels), weights, strict=True)
            ):
                panel.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto")
                panel.set_title(f"{kind} layer {number} head {head + 1}", fontsize=5)
                words = queries if head == 0 else []
                panel.set_yticks(range(len(words)), words, fontsize=4)
                words = keys if number == len(layers) else []
                panel.set_xticks(range(len(words)), words, fontsize=4, rotation=90)
                panel.tick_params(length=0)
    figure.tight_layout()
    width, height = figure.get_size_inches()
    dots_per_inch = min(200, int(math.sqrt(MAX_PIXELS / (width * height))))
    write_picture(figure, output, dots_per_inch)
