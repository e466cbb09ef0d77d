"""What happens to one sentence: `translate.py --explain`, as text or as a page."""

from __future__ import annotations

import html
import linecache
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack
from typing import Any

from minitransformer.commands.attention_maps import (
    AttentionMaps,
    attention_maps,
    attention_page,
    translated_ids,
    write_page,
)
from minitransformer.engine.autograd import no_grad, wrap_primitives
from minitransformer.engine.backend import as_float32, to_host
from minitransformer.engine.ops import softmax_in_place
from minitransformer.model import transformer
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation.translator import Translator

CANDIDATES = 5  # that are shown of each step


class Recorder:
    """Records when a line of the model calls an operation, for `wrap_primitives`.

    A line has its place, its function and its code; a call has its time and shapes.

    Units: seconds
    """

    def __init__(self) -> None:
        self.calls = defaultdict[tuple[str, ...], list[tuple[float, str]]](list)

    def __call__(self, name: str, body: Any) -> Any:
        # The line of model/transformer.py that led to this, or else the direct caller.
        stack = [*walk_stack(sys._getframe(2))]  # 1 is the operation
        layers = [x for x in stack if x[0].f_code.co_filename == transformer.__file__]
        frame, number = (layers or stack)[0]
        code = frame.f_code
        line = (
            f"{'/'.join(Path(code.co_filename).parts[-2:])}:{number}",
            getattr(code, "co_qualname", code.co_name),  # since Python 3.11
            linecache.getline(code.co_filename, number).strip(),
        )

        def timed(*arrays: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = body(*arrays, **options)
            seconds = time.perf_counter() - start
            shapes = f"{[*arrays[0].shape]} → {[*result[0].shape]}"
            self.calls[line].append((seconds, shapes))
            return result

        return timed


def explain(
    translator: Translator, text: str, maps: AttentionMaps
) -> dict[str, list[list[str]]]:
    """Translate a sentence, and return tables of what happens to it, by title."""
    # Translate, and time what is computed outside of the model, too.
    recorder = Recorder()
    start = time.perf_counter()
    with wrap_primitives(recorder):
        source, target = translated_ids(translator, text)
    rest = time.perf_counter() - start
    lines = []
    for line, calls in recorder.calls.items():
        seconds = sum(call[0] for call in calls)
        rest -= seconds
        lines.append([f"{1000 * seconds:.2f} ms", calls[-1][1], *line])
    lines.append([f"{1000 * rest:.2f} ms", "word pieces, search and all else"])

    # Read both again, for the probabilities of all pieces.
    model = translator.single_model
    xp = model.embedding.xp
    fed = [BOS_ID, *target][: len(maps.read)]
    with no_grad():
        outputs = model(xp.asarray([[*source, EOS_ID]]), xp.asarray([fed]))
        probabilities = as_float32(model.logits(outputs).data)[0]
    softmax_in_place(xp, probabilities)
    steps = []
    for piece, row in zip(maps.written, to_host(probabilities), strict=True):
        best = (-row).argsort()[:CANDIDATES].tolist()
        each = zip(translator.tokenizer.pieces(best), row[best], strict=True)
        steps.append([piece, *(f"{name} {share:.1%}" for name, share in each)])
    return {
        "The word pieces that the model reads": [maps.source],
        "The lines of the model: their time, latest shapes, place and code": lines,
        "The strongest link of each head": [*strongest_links(maps)],
        "What is written, and the most probable pieces at each step": steps,
    }


def strongest_links(maps: AttentionMaps) -> Iterator[list[str]]:
    """Yield a row for each layer: which piece attends to which, in each head."""
    for kind, weights, queries, keys in (
        ("encoder", maps.encoder, maps.source, maps.source),
        # The first piece that the decoder reads can attend to itself alone.
        ("decoder", maps.decoder[:, :, 1:], maps.read[1:], maps.read),
        ("cross", maps.cross, maps.read, maps.source),
    ):
        for number, heads in enumerate(weights, 1):
            links = (divmod(int(x.argmax()), len(keys)) for x in heads if x.size)
            named = (f"{queries[query]} → {keys[key]}" for query, key in links)
            yield [f"{kind} {number}", *named]


def show_explanation(translator: Translator, text: str, output: Path | None) -> None:
    """Print what happens to a sentence, or write a page of it.

    Raises: as `attention_maps` and `write_page`
    """
    maps = attention_maps(translator, text)
    shown = ""
    for title, rows in explain(translator, text, maps).items():
        if output:
            cells = (f"<tr><td>{'<td>'.join(map(html.escape, row))}" for row in rows)
            shown += f"<h2>{title}</h2><div><table>{''.join(cells)}</table></div>"
        else:
            print(f"\n{title}")
            print(*("\t".join(row).expandtabs(16) for row in rows), sep="\n")
    if output:
        tables = f"{shown}\n<h2>Attention</h2>"
        document = attention_page(maps, "A translation, explained", tables)
        write_page("--output", output, document)
