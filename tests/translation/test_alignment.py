"""Word alignments against attention maps, by the definition, and the file of pairs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minitransformer import load
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import EOS_ID
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation import alignment
from minitransformer.translation.alignment import (
    TextInParts,
    align_words,
    pharaoh,
    piece_weights,
    word_weights,
    words_of_pieces,
)
from minitransformer.translation.attention_maps import attention_maps
from minitransformer.translation.ensemble import Ensemble
from minitransformer.translation.translator import Translator
from support.closeness import assert_close
from support.in_process import run_translate
from support.models import CAT_LINES, save_small_model
from support.scripts import SHORT

HAND_ALIGNED = Path(__file__).with_name("hand_aligned.txt")
ALIGN = TranslationConfig(max_len_a=0, max_len_b=12, alignment=True)


@pytest.fixture(scope="module")
def translator(model_path):
    return load(model_path, threads=1)


@pytest.fixture(scope="module")
def ensemble(translator, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "x.safetensors"
    models = [translator.model, load(save_small_model(path, d_k=6)).model]
    models[1].embedding.table.data *= 3
    return Translator(Ensemble(models), translator.tokenizer)


def links_by_definition(weights, source_words, target_words):
    """For each target word the source word with the largest sum, one by one."""
    links = []
    for j in sorted(set(target_words)):
        sums = dict.fromkeys(source_words, 0.0)
        for t, row in enumerate(weights):
            for s, weight in enumerate(row):
                if target_words[t] == j:
                    sums[source_words[s]] += weight
        links.append((max(sums, key=lambda i: sums[i]), j))
    return tuple(sorted(links))


def word_numbers(tokenizer, ids):
    """The word that each piece is in; a space alone is in the word that follows."""
    texts = tokenizer.decode([ids[: n + 1] for n in range(len(ids))])
    words = [max(len(text.split()) - 1, 0) for text in texts]
    for n in reversed(range(len(ids) - 1)):
        if tokenizer.pieces([ids[n]]) == ["\u2581"]:
            words[n] = words[n + 1]
    return words


def test_links_follow_the_attention_maps(translator):
    lines = [*CAT_LINES[:3], "on the mat"]
    found = translator.hypotheses(lines, ALIGN)
    for line, [best, *_] in zip(lines, found, strict=True):
        maps = attention_maps(translator, line, replace(ALIGN, alignment=False))
        weights = maps.cross[-1].mean(axis=0)[:-1, :-1]
        [ids] = translator.tokenizer.encode([line])
        [computed] = piece_weights(translator.model, [ids], [best.tokens])
        assert_close(computed, weights, "float32")
        words = (word_numbers(translator.tokenizer, x) for x in (ids, best.tokens))
        assert best.alignment == links_by_definition(weights, *words)
        assert [j for _, j in sorted(best.alignment, key=lambda x: x[1])] == [
            *range(len(translator.text([best])[0].split()))
        ]
        best_sources = maps.words[0, 0].argmax(axis=1)
        assert {(int(i), j) for j, i in enumerate(best_sources)} == {*best.alignment}
        assert maps.words.shape[2:] == (len(maps.target_words), len(maps.source_words))


@pytest.mark.parametrize(("layers", "window"), [(3, None), (4, None), (2, 2)])
def test_the_upper_half_of_the_layers_aligns(translator, layers, window):
    config = replace(
        translator.model.config, decoder_layers=layers, attention_window=window
    )
    tokenizer = translator.tokenizer
    deep = Translator(Transformer(config, seed=3), tokenizer)
    [[best]] = deep.hypotheses(["the cat"], ALIGN)
    maps = attention_maps(deep, "the cat", ALIGN)
    [found] = piece_weights(deep.model, tokenizer.encode(["the cat"]), [best.tokens])
    expected = maps.cross[layers // 2 :].mean(axis=(0, 1))[:-1, :-1]
    assert_close(found, expected, "float32")


def test_a_translation_that_takes_all_positions_is_aligned_and_drawn(translator):
    """It was cut off at the limit, so that its end has no position."""
    config = replace(translator.model.config, positions="learned", max_positions=6)
    model = Transformer(config, seed=3)
    model.embedding.table.data[EOS_ID] = 0  # never the best: nothing ends by itself
    limited = Translator(model, translator.tokenizer)
    [[best]] = limited.hypotheses(["the cat"], ALIGN)
    assert len(best.tokens) == 6
    maps = attention_maps(limited, "the cat", ALIGN)
    assert len(maps.read) == len(maps.written) == 6
    assert "end" not in maps.written
    sources = limited.tokenizer.encode(["the cat"])
    for pairs in ([best.tokens], [best.tokens, ()]):
        found = piece_weights(model, sources * len(pairs), pairs)
        expected = maps.cross.mean(axis=(0, 1))[:, :-1]
        assert_close(found[0], expected, "float32")


def test_every_translation_of_any_batch_is_aligned(translator):
    lines = ["", *CAT_LINES[:4], "mat"]
    config = replace(ALIGN, nbest=3)
    together = translator.hypotheses(lines, config)
    assert together[0][0].alignment == ()
    narrow = replace(config, decode_tokens=1)
    threads = Translator(translator.model, translator.tokenizer, num_threads=3)
    for found in (
        translator.hypotheses(lines, narrow),
        threads.hypotheses(lines, config),
    ):
        assert found[1:] != [()]
        for a, b in zip(found, together, strict=True):
            assert [h.alignment for h in a] == [h.alignment for h in b]
    plain = translator.hypotheses(lines, replace(config, alignment=False))
    for a, b in zip(plain, together, strict=True):
        assert a == [replace(h, alignment=()) for h in b]


def test_an_ensemble_aligns_by_the_mean(ensemble):
    sources = ensemble.tokenizer.encode(CAT_LINES[:2])
    targets = ensemble.tokenizer.encode(CAT_LINES[5:7])
    each = [piece_weights(m, sources, targets) for m in ensemble.model.members]
    assert np.abs(each[0][0] - each[1][0]).max() > 1e-3
    for n, found in enumerate(piece_weights(ensemble.model, sources, targets)):
        assert_close(found, (each[0][n] + each[1][n]) / 2, "float32")
    assert ensemble.hypotheses(["the cat"], ALIGN)[0][0].alignment


def test_words_of_a_long_line_are_counted_through_its_parts(translator):
    line = " ".join(CAT_LINES[:3])
    config = replace(ALIGN, max_input=12, max_len_b=6)
    [[best, *_]] = translator.hypotheses([line], config)
    [parts] = translator.encode([line], config)
    assert len(parts) > 2
    source = TextInParts(line, parts).words(translator.tokenizer)
    whole = word_numbers(translator.tokenizer, [i for part in parts for i in part])
    assert np.concatenate(source).tolist() == whole
    text = translator.text([best])[0]
    assert {j for _, j in best.alignment} == {*range(len(text.split()))}
    first = translator.hypotheses([translator.tokenizer.decode(parts[:1])[0]], config)
    inner = [link for link in first[0][0].alignment if link[1] + 1 < len(text.split())]
    assert {*inner[:-1]} <= {*best.alignment}
    last = max(i for i, _ in best.alignment)
    assert source[-1][0] <= last < len(line.split())


def test_words_are_those_of_the_line_as_it_was_given():
    tokenizer = Tokenizer.train(CAT_LINES, 50)
    for text in ("the cat sat", "  the\u00a0cat  sat ", "\uff54he mat\u3000on 7"):
        [ids] = tokenizer.encode([text])
        expected = word_numbers(tokenizer, ids)
        assert words_of_pieces(tokenizer, ids, text) == expected
    ids = tokenizer.encode(["a\u00a8t mat"])[0]  # normalised to "a", space, diaeresis
    assert tokenizer.normalise("a\u00a8t").count("\u2581") == 2
    words = words_of_pieces(tokenizer, ids, "a\u00a8t mat")
    assert sorted({*words}) == [0, 1]
    assert words == sorted(words)


def test_weights_of_words_are_sums_over_pieces():
    weights = np.array([[0.1, 0.2, 0.6], [0.5, 0.3, 0.1], [0.2, 0.2, 0.5]])
    found = word_weights(weights, np.array([0, 1, 1]), np.array([0, 0, 1]))
    assert_close(found, [[0.3, 0.6], [0.2, 0.7]])


def test_given_translations_are_aligned(translator, model_path, tmp_path, capfd):
    lines, targets = CAT_LINES[:3], [*CAT_LINES[7:9], ""]
    links = translator.align(lines, targets, TranslationConfig())
    ids = [translator.tokenizer.encode(side) for side in (lines, targets)]
    for pair, source, target in zip(links, *ids, strict=True):
        [weights] = piece_weights(translator.model, [source], [target])
        words = (word_numbers(translator.tokenizer, x) for x in (source, target))
        assert pair == links_by_definition(weights, *words)
    (tmp_path / "targets").write_text("".join(f"{line}\n" for line in targets))
    flags = ["--model", model_path, "--score", str(tmp_path / "targets")]
    _, plain, _ = run_translate(capfd, *flags, *lines)
    code, out, _ = run_translate(capfd, *flags, "--alignment", *lines)
    expected = zip(plain.splitlines(), links, strict=True)
    assert (code, out.split("\n")[:-1]) == (
        0,
        [f"{scores}\t{pharaoh(pair)}" for scores, pair in expected],
    )


def test_the_command_writes_pairs(translator, model_path, capfd):
    flags = ["--model", model_path, *SHORT, "--alignment"]
    config = replace(ALIGN, max_len_b=5, nbest=2)
    [found] = translator.hypotheses(["the cat"], config)
    texts, pairs = translator.text(found), [pharaoh(h.alignment) for h in found]
    code, out, _ = run_translate(capfd, *flags, "the cat", "")
    assert (code, out) == (0, f"{texts[0]} ||| {pairs[0]}\n ||| \n")
    _, out, _ = run_translate(capfd, *flags, "--nbest", "2", "the cat")
    assert out.split("\n")[:-1] == [
        f"0 ||| {text} ||| {h.score:.4f} ||| {links}"
        for text, h, links in zip(texts, found, pairs, strict=True)
    ]
    _, out, _ = run_translate(capfd, *flags, "--json", "the cat")
    [best] = json.loads(out)["translations"]
    assert best["alignment"] == [list(link) for link in found[0].alignment]


def test_the_hand_aligned_sentences_are_whole():
    """Every word of both sides has a partner, but for articles and auxiliaries."""
    without = {"do", "does", "the", "is", "of", "on", "in"}
    for line in HAND_ALIGNED.read_text(encoding="utf-8").splitlines():
        english, german, pairs = (part.split() for part in line.split(" ||| "))
        links = {tuple(map(int, pair.split("-"))) for pair in pairs}
        assert {j for _, j in links} == {*range(len(german))}, line
        missing = {*range(len(english))} - {i for i, _ in links}
        assert {english[i].lower() for i in missing} <= without, line
        assert max(i for i, _ in links) == len(english) - 1 or "not" in english


@pytest.mark.parametrize("blank", ["", "  "])
def test_nothing_is_aligned_with_nothing(translator, blank):
    ids = translator.tokenizer.encode([blank, "the cat"])
    pairs = [TextInParts(blank, [ids[0]]), TextInParts("the cat", [ids[1]])]
    for pair in (pairs, pairs[::-1]):
        assert align_words(translator.model, translator.tokenizer, [pair]) == [()]


def test_a_space_is_no_word(translator):
    tokenizer = translator.tokenizer
    [ids] = tokenizer.encode(["the cat"])
    space = tokenizer.pieces(range(50)).index("\u2581")
    words = words_of_pieces(tokenizer, [*ids, space], "the cat")
    assert words == [*word_numbers(tokenizer, ids), 1]
    pair = TextInParts("the cat", [ids]), TextInParts("", [[space]])
    assert align_words(translator.model, tokenizer, [pair]) == [()]


@pytest.mark.parametrize(("second", "source"), [(0.2, 0), (0.6, 1)])
def test_a_word_in_two_parts_has_one_link(translator, monkeypatch, second, source):
    weights = [np.array([[0.5]]), np.array([[second]])]
    monkeypatch.setattr(alignment, "piece_weights", lambda *args: weights)
    names = translator.tokenizer.pieces(range(50))
    the, on, s, t = (names.index(x) for x in ("\u2581the", "\u2581on", "s", "t"))
    pair = TextInParts("the on", [[the], [on]]), TextInParts("st", [[s], [t]])
    found = align_words(translator.model, translator.tokenizer, [pair])
    assert found == [((source, 0),)]


@pytest.mark.parametrize("long_input", ["split", "truncate"])
def test_long_lines_are_neither_scored_nor_aligned(translator, long_input):
    """Whatever happens to long lines that are translated."""
    config = DecodingConfig(max_input=8, long_input=long_input)
    pairs = {
        "line": (CAT_LINES[0], "cat"),
        "translation of line": ("cat", CAT_LINES[0]),
    }
    for method in (translator.score, translator.align):
        for what, pair in pairs.items():
            sides = [["cat", text] for text in pair]
            with pytest.raises(ValueError, match=f"^{what} 8: expected at most 8 word"):
                method(*sides, config, first_line=7)


def test_a_line_of_invisible_characters_has_links(translator):
    """Normalisation leaves nothing of zero width space and next line."""
    config = TranslationConfig(alignment=True, max_len_b=3)
    [[best]] = translator.hypotheses(["\u200b\x85"], config)
    assert all(i == 0 for i, _ in best.alignment)
