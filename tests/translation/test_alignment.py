"""Word alignments against attention maps, by the definition, and the file of pairs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from minitransformer import load
from minitransformer.commands.attention_maps import attention_maps
from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.alignment import align_words, pharaoh, piece_weights
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.translator import Translator
from support.closeness import assert_close
from support.in_process import run_translate
from support.models import MAT_LINES, save_small_model
from support.scripts import SHORT

ALIGN = TranslationConfig(max_len_a=0, max_len_b=12, alignment=True)


@pytest.fixture(scope="module")
def ensemble(translator, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "x.safetensors"
    models = [translator.model, load(save_small_model(path, d_k=6)).model]
    models[1].embedding.table.data *= 3
    return Translator(Ensemble(models), translator.tokenizer)


def word_numbers(tokenizer, ids):
    """The word that each piece is in; a space alone is in the word that follows."""
    texts = tokenizer.decode([ids[: n + 1] for n in range(len(ids))])
    words = [max(len(text.split()) - 1, 0) for text in texts]
    for n in reversed(range(len(ids) - 1)):
        if tokenizer.pieces([ids[n]]) == ["\u2581"]:
            words[n] = words[n + 1]
    return words


def links_by_definition(tokenizer, weights, source, target):
    """For each target word the source word with the largest sum, one by one."""
    sources, targets = (word_numbers(tokenizer, ids) for ids in (source, target))
    sums = {}
    for (t, s), weight in np.ndenumerate(weights):
        of_word = sums.setdefault(targets[t], dict.fromkeys(sources, 0.0))
        of_word[sources[s]] += weight
    return tuple(sorted((max(x, key=x.get), j) for j, x in sums.items()))


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_links_follow_the_attention_of_the_upper_layers(translator, layers):
    config = replace(translator.model.config, decoder_layers=layers)
    tokenizer, model = translator.tokenizer, Transformer(config, seed=3)
    deep = Translator(model, tokenizer)
    lines = [*MAT_LINES[:2], "on the mat"]
    found = deep.hypotheses(lines, ALIGN)
    for line, [best, *_] in zip(lines, found, strict=True):
        maps = attention_maps(deep, line, replace(ALIGN, alignment=False))
        weights = maps.cross[layers // 2 :].mean(axis=(0, 1))[:-1, :-1]
        [ids] = tokenizer.encode([line])
        [computed] = piece_weights(model, [ids], [best.tokens])
        assert_close(computed, weights, "float32")
        links = links_by_definition(tokenizer, weights, ids, best.tokens)
        assert best.alignment == links
        assert {j for _, j in links} == {*range(len(best.text.split()))}


def test_every_translation_of_any_batch_is_aligned(translator):
    lines = ["", *MAT_LINES[:4], "mat"]
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
        alone, aligned = (
            [replace(h, alignment=(), parts=()) for h in x] for x in (a, b)
        )
        assert alone == aligned


def test_an_ensemble_aligns_by_the_mean(ensemble):
    sources = ensemble.tokenizer.encode(MAT_LINES[:2])
    targets = ensemble.tokenizer.encode(MAT_LINES[5:7])
    each = [piece_weights(m, sources, targets) for m in ensemble.model.members]
    assert np.abs(each[0][0] - each[1][0]).max() > 1e-3
    for n, found in enumerate(piece_weights(ensemble.model, sources, targets)):
        assert_close(found, (each[0][n] + each[1][n]) / 2, "float32")
    assert ensemble.hypotheses(["the cat"], ALIGN)[0][0].alignment


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        (" ".join(MAT_LINES[:3]), {"max_input": 12}),
        ("  the cat sat.\tThe cat looked! 3 on the mat. ", {}),
        ("the cat。sat on。 the mat", {}),
    ],
)
def test_words_of_a_line_are_counted_through_its_parts(translator, line, settings):
    config = replace(ALIGN, max_len_b=6, **settings)
    [[best, *_]] = translator.hypotheses([line], config)
    [divided] = translator.divide([line], config, [""])
    assert len(divided) > 2
    ranked = translator.hypotheses([text for _, text in divided], config)
    expected, source, target = set(), "", ""
    for (space, text), (h, *_) in zip(divided, ranked, strict=True):
        source += space
        target += space * (not target.endswith("。"))
        # Words are counted that end before this part begins.
        before = [len(f"{side}x".split()) - 1 for side in (source, target)]
        expected |= {(i + before[0], j + before[1]) for i, j in h.alignment}
        source += text
        target += h.text
    end = line[len(source) :]
    assert source + end == line
    assert target + end == best.text
    assert {*best.alignment} == expected
    assert {j for _, j in best.alignment} == {*range(len(best.text.split()))}


def test_given_translations_are_aligned(translator, model_path, tmp_path):
    lines, targets = MAT_LINES[:3], [*MAT_LINES[7:9], ""]
    scored = translator.score(lines, targets, TranslationConfig(alignment=True))
    links = [own for _, _, own in scored]
    ids = [translator.tokenizer.encode(side) for side in (lines, targets)]
    all_weights = piece_weights(translator.model, *ids)
    for pair, weights, *sides in zip(links, all_weights, *ids, strict=True):
        assert pair == links_by_definition(translator.tokenizer, weights, *sides)
    (tmp_path / "targets").write_text("".join(f"{line}\n" for line in targets))
    flags = ["--model", model_path, "--score", str(tmp_path / "targets")]
    _, plain, _ = run_translate(*flags, *lines)
    _, out, _ = run_translate(*flags, "--alignment", *lines)
    expected = zip(plain.splitlines(), map(pharaoh, links), strict=True)
    assert out == "".join(f"{scores}\t{pairs}\n" for scores, pairs in expected)


def test_the_command_writes_pairs(translator, model_path):
    flags = ["--model", model_path, *SHORT, "--alignment"]
    config = replace(ALIGN, max_len_b=5, nbest=2)
    [found] = translator.hypotheses(["the cat"], config)
    rows = [(h.text, f"{h.score:.4f}", pharaoh(h.alignment)) for h in found]
    best, _, pairs = rows[0]
    _, out, _ = run_translate(*flags, "the cat", "")
    assert out == f"{best} ||| {pairs}\n ||| \n"
    _, out, _ = run_translate(*flags, "--nbest", "2", "the cat")
    assert out == "".join(" ||| ".join(("0", *row)) + "\n" for row in rows)
    _, out, _ = run_translate(*flags, "--json", "the cat")
    [best] = json.loads(out)["translations"]
    assert best["alignment"] == [[*link] for link in found[0].alignment]


@pytest.mark.parametrize("blank", ["", "  ", "\u200b\xad"])
def test_nothing_is_aligned_with_nothing(translator, blank):
    for pair in ([blank], ["the cat"]), (["the cat"], [blank]):
        assert align_words(translator.model, translator.tokenizer, *pair) == [()]
