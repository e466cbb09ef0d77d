"""Attention maps against the definition, and the page that shows them."""

import importlib.util
import json
import re
import shutil

import numpy as np
import pytest
from conftest import assert_close
from test_translate import in_process, model  # noqa: F401  (a fixture)

from minitransformer import load
from minitransformer.translation.attention_maps import attention_maps, attention_page

LINE = "the cat number 7 sat"


@pytest.fixture(scope="module")
def translator(model):  # noqa: F811
    return load(model)


@pytest.fixture(scope="module")
def maps(translator):
    return attention_maps(translator, LINE)


def test_rows_sum_to_one_and_the_decoder_looks_back_only(maps):
    S, T = len(maps.source), len(maps.read)
    assert maps.encoder.shape == (1, 2, S, S)
    assert maps.decoder.shape == (1, 2, T, T)
    assert maps.cross.shape == (1, 2, T, S)
    for part in (maps.encoder, maps.decoder, maps.cross):
        assert_close(part.sum(axis=-1), np.ones(part.shape[:-1]), "float32")
    assert (np.triu(maps.decoder[0, 0], 1) == 0).all()
    assert maps.read[1:] == maps.written[:-1]
    assert (maps.source[-1], maps.read[0], maps.written[-1]) == ("end", "begin", "end")


def test_the_first_layer_by_the_definition(translator, maps):
    """Equation 1 from the first encoder layer's own weights, a head at a time."""
    net = translator.model
    [ids] = translator.tokenizer.encode([LINE])
    x = net.embedding(np.array([[*ids, 3]]), None).data[0]
    part = net.encoder[0].self_attention
    d = net.config.key_width
    for head in range(2):
        columns = slice(head * d, (head + 1) * d)
        q, k = x @ part.query.data[:, columns], x @ part.key.data[:, columns]
        scores = np.exp(q @ k.T / np.sqrt(d))
        expected = scores / scores.sum(axis=1, keepdims=True)
        assert_close(maps.encoder[0, head], expected, "float32")


def test_a_page_needs_nothing_else(maps, tmp_path):
    page = attention_page(maps)
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", page)
    data = re.search(r"getElementById\(\"attention\"\), (\{.*\})\);", page)[1]
    found = json.loads(data)
    assert found["source"] == maps.source
    assert np.abs(np.array(found["cross"]) / 1000 - maps.cross).max() <= 0.0005
    assert "<" not in data


def test_the_command_writes_a_page(model, tmp_path, capfd):  # noqa: F811
    path = tmp_path / "heads.html"
    code, out, err = in_process(capfd, "--model", model, "--attention", str(path), LINE)
    assert (code, out, err) == (0, "", "")
    assert path.read_text().startswith("<!doctype html>")


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
def test_the_command_draws_a_picture(model, maps, tmp_path, capfd):  # noqa: F811
    for name, start in (("heads.png", b"\x89PNG"), ("heads.svg", b"<?xml")):
        path = tmp_path / name
        command = ["--model", model, "--attention", str(path), LINE]
        assert in_process(capfd, *command) == (0, "", "")
        assert path.read_bytes().startswith(start)
    layers = sum(len(m) for m in (maps.encoder, maps.decoder, maps.cross))
    panels = re.findall(r"<!-- (\w+) layer \d head \d -->", path.read_text())
    assert len(panels) == layers * maps.encoder.shape[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--attention", "x.html"], "--attention expects one sentence"),
        (["--attention", "x.pdf", "one"], "expected .html, .png, .svg, got x.pdf"),
        (["--serve", "8000", "one"], "--serve gets its text from the page"),
        (["--host", "::", "one"], "--host does nothing without --serve"),
    ],
)
def test_flags_that_do_not_go_together(capfd, flags, message):
    code, _, err = in_process(capfd, *flags)
    assert code == 2
    assert message in err


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium and playwright",
)
def test_words_say_where_they_look(maps, tmp_path):
    from playwright.sync_api import sync_playwright

    (tmp_path / "page.html").write_text(attention_page(maps))
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page()
        errors = []
        tab.on("pageerror", lambda error: errors.append(error))
        tab.goto(f"file://{tmp_path}/page.html")
        words = tab.locator(".links ol").first.locator("button")
        assert words.count() == len(maps.read)
        words.nth(1).focus()
        said = tab.locator("p[aria-live]")
        best = int(maps.cross[0, :, 1].mean(axis=0).argmax())
        share = maps.cross[0, :, 1].mean(axis=0)[best]
        piece = maps.source[best].replace("\u2581", " ").strip() or "_"
        assert f": {piece} {share:.0%}" in said.text_content()
        lines = tab.locator("svg line").count()
        tab.locator(".heads button").first.click()  # one head less
        words.nth(1).focus()
        assert tab.locator("svg line").count() < lines
        tab.locator("select").first.select_option("decoder")
        words.nth(0).focus()
        assert ": begin 100%" in said.text_content()
        assert errors == []
        browser.close()
