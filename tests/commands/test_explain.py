"""What --explain says of a sentence, against the model, and its page."""

import re

import numpy as np
import pytest

from minitransformer.commands.attention_maps import attention_maps, translated_ids
from minitransformer.commands.explain import explain, strongest_links
from support.browser import needs_browser, open_tab
from support.in_process import run_translate
from support.models import logits_after, softmax
from support.scripts import ROOT, SHORT

LINE = "the cat number 7 sat"
HEADINGS = [
    "The word pieces",
    "The lines of the model",
    "The strongest link",
    "What is",
]


@pytest.fixture(scope="module")
def maps(translator):
    return attention_maps(translator, LINE)


@pytest.fixture(scope="module")
def tables(translator, maps):
    found = explain(translator, LINE, maps)
    assert all(map(str.startswith, found, HEADINGS))
    return [*found.values()]


def test_each_line_of_the_model_is_named_with_its_code(tables, translator):
    [pieces], lines, _, _ = tables
    *computed, rest = lines
    assert rest[1] == "word pieces, search and all else"
    in_the_model = 0
    for time, shapes, place, _, code in computed:
        assert re.fullmatch(r"\d+\.\d\d ms", time)
        assert re.fullmatch(r"\[[\d, ]+\] → \[[\d, ]+\]", shapes)
        file, number = place.split(":")
        if file == "model/transformer.py":
            path = ROOT / "minitransformer" / file
            text = path.read_text(encoding="utf-8").splitlines()
            assert text[int(number) - 1].strip() == code
            in_the_model += 1
    # Embedding, attention, feed-forward and Add & Norm, in both stacks.
    assert in_the_model >= 11
    # The encoder reads all pieces at once.
    shape = [1, len(pieces), translator.single_model.config.d_model]
    [encoded] = [x[1] for x in computed if "self.self_attention(x, x, source" in x[4]]
    assert encoded == f"{shape} → {shape}"


def test_candidates_are_the_most_probable_pieces(tables, translator):
    source, target = translated_ids(translator, LINE)
    shares = softmax(logits_after(translator.single_model, source, target))
    *_, steps = tables
    assert len(steps) == len(target) + 1
    for (_, *best), share in zip(steps, shares, strict=True):
        expected = np.sort(share)[::-1][:5]
        shown = [float(x.rpartition(" ")[2].rstrip("%")) / 100 for x in best]
        np.testing.assert_allclose(shown, expected, atol=6e-4)
        [name] = translator.tokenizer.pieces([int(share.argmax())])
        assert best[0].startswith(f"{name} ")


def test_links_are_the_largest_weights(maps):
    rows = {kind: links for kind, *links in strongest_links(maps)}
    assert len(rows) == 2 + 3 + 3
    for layer, heads in enumerate(maps.cross, 1):
        for head, link in zip(heads, rows[f"cross {layer}"], strict=True):
            query, key = np.argwhere(head == head.max())[0]
            assert link == f"{maps.read[query]} → {maps.source[key]}"
    for layer, heads in enumerate(maps.decoder, 1):
        for head, link in zip(heads, rows[f"decoder {layer}"], strict=True):
            query, key = np.argwhere(head == head[1:].max())[-1]
            assert link == f"{maps.read[query]} → {maps.read[key]}"


def test_the_command_prints_or_writes_a_page(model_path, tmp_path):
    flags = ("--model", model_path, *SHORT, "--explain")
    code, out, _ = run_translate(*flags, LINE)
    assert code == 0
    assert re.findall(r"^\n(.*)", out, re.MULTILINE)[0].startswith(HEADINGS[0])
    path = tmp_path / "page.html"
    assert run_translate(*flags, "--output", str(path), "a <b>&") == (0, "", "")
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "<b>" not in page
    other = str(tmp_path / "page.txt")
    code, _, error = run_translate(*flags, "--output", other, LINE)
    assert (code, "--output: expected .html, got" in error) == (2, True)


@needs_browser
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_page_fits_a_phone(model_path, tmp_path, colours):
    path = tmp_path / "page.html"
    run_translate("--model", model_path, "--explain", "--output", str(path), LINE)
    with open_tab(viewport={"width": 375, "height": 800}, color_scheme=colours) as tab:
        tab.goto(f"file://{path}")
        width = "document.documentElement.scrollWidth"
        assert tab.evaluate(width) <= 375
        background = "getComputedStyle(document.body).backgroundColor"
        red = int(re.search(r"\d+", tab.evaluate(background))[0])
        assert (red > 200) == (colours == "light")
        assert tab.locator("table").count() == 4
