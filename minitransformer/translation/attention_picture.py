"""TODO."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from minitransformer.translation.attention_maps import AttentionMaps


def draw_attention(maps: AttentionMaps, output: Path) -> None:
    """Draw what every head attends to into PNG or SVG, a row of panels a layer.

    Queries go down and keys to the right; the darker, the more weight.
    """
    pyplot = _pyplot("pictures of attention need matplotlib", " (or FILE.html)")
    kinds = (
        ("encoder", maps.encoder, maps.source, maps.source),
        ("decoder", maps.decoder, maps.read, maps.read),
        ("cross", maps.cross, maps.written, maps.source),
    )
    rows = sum(len(weights) for _, weights, _, _ in kinds)
    heads = maps.encoder.shape[1]
    side = max(1.5, 0.11 * max(len(maps.source), len(maps.read)))  # inches a panel
    size = (side * heads + 1.5, side * rows + 1.5)
    figure, axes = pyplot.subplots(rows, heads, figsize=size, squeeze=False)
    panels = iter(axes)
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
    figure.savefig(output, dpi=200)
    pyplot.close(figure)


def _pyplot(need: str, instead: str) -> Any:
    """Matplotlib's pyplot, drawing into files. Raises: RuntimeError if missing."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise RuntimeError(
            f"{need}: pip install 'minitransformer[plot]'{instead}"
        ) from error
