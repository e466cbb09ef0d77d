"""Attention maps against the definition, and the page that shows them."""

import json
import re

import numpy as np
import pytest

from minitransformer.commands.attention_maps import attention_maps, attention_page
from minitransformer.settings.config import BOS_ID, EOS_ID
from support.browser import needs_browser, open_tab
from support.closeness import assert_close
from support.in_process import run_translate
from support.reference import ReferenceTransformer

LINE = "the cat number 7 sat"


@pytest.fixture(scope="module")
def maps(translator):
    return attention_maps(translator, LINE)


class Recording(ReferenceTransformer):
    """The Transformer in plain NumPy, which keeps the weights of every attention."""

    def drop(self, x, site):
        if site.endswith(".weights"):
            self.weights[site.removesuffix(".weights")] = x[0]  # [H, T, S]
        return x


def test_every_head_of_every_layer_by_the_definition(translator, maps):
    net = translator.model
    parameters = {name: p.data.astype(float) for name, p in net.named_parameters()}
    reference = Recording(net.config, parameters)
    reference.weights = {}
    pieces = {x: i for i, x in enumerate(translator.tokenizer.all_pieces())}
    [ids] = translator.tokenizer.encode([LINE])
    target = [BOS_ID, *(pieces[x] for x in maps.read[1:])]
    reference.logits(np.array([[*ids, EOS_ID]]), np.array([target]))
    for side, name in (
        (maps.encoder, "encoder.{}.self_attention"),
        (maps.decoder, "decoder.{}.self_attention"),
        (maps.cross, "decoder.{}.cross_attention"),
    ):
        for layer, weights in enumerate(side):
            assert_close(weights, reference.weights[name.format(layer)], "float32")
    assert [*map(len, (maps.encoder, maps.decoder, maps.cross))] == [2, 3, 3]
    assert maps.read[1:] == maps.written[:-1]
    assert (maps.source[-1], maps.read[0], maps.written[-1]) == ("end", "begin", "end")


def test_the_page_loads_no_other_file(maps, tmp_path):
    page = attention_page(maps)
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", page)
    data = re.search(r"getElementById\(\"attention\"\), (\{.*\})\);", page)[1]
    found = json.loads(data)
    assert found["source"] == maps.source
    assert np.abs(np.array(found["cross"]) / 1000 - maps.cross).max() <= 0.0005
    assert "<" not in data


def test_the_command_writes_the_page(model_path, maps, tmp_path):
    path = tmp_path / "heads.html"
    command = ["--model", model_path, "--attention", str(path), LINE]
    assert run_translate(*command) == (0, "", "")
    assert path.read_text(encoding="utf-8") == attention_page(maps)


@needs_browser
def test_the_page_says_where_a_word_attends(maps, tmp_path):
    (tmp_path / "page.html").write_text(attention_page(maps))
    with open_tab() as tab:
        tab.goto(f"file://{tmp_path}/page.html")
        words = tab.locator(".links ol").first.locator("button")
        assert words.count() == len(maps.read)
        words.nth(1).focus()
        said = tab.locator("p[aria-live]")
        shares = maps.cross[-1, :, 1].mean(axis=0)  # of the last layer
        best = int(shares.argmax())
        piece = maps.source[best].replace("\u2581", " ").strip() or "_"
        assert f": {piece} {shares[best]:.0%}" in said.text_content()
        lines = tab.locator("svg line").count()
        tab.locator(".heads button").first.click()  # one head less
        words.nth(1).focus()
        assert tab.locator("svg line").count() < lines
        tab.locator("select").first.select_option("decoder")
        words.nth(0).focus()
        assert ": begin 100%" in said.text_content()
