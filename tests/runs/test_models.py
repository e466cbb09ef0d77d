"""Which run or model is meant by a path, or by none, and what is said of it."""

import os
from pathlib import Path

import pytest

import minitransformer
from minitransformer.runs.models import (
    described,
    find_checkpoint,
    language_codes,
    newest_run,
)
from minitransformer.settings.decoding_config import DecodingConfig
from support.models import BUILT_IN, OWN, save_run, save_small_model

BEST = {"best": {"step": 20}, "step-00000030": {"step": 30}}
AVERAGED = {"averaged": {"step": 40}, "step-00000045": {"step": 45}}


@pytest.mark.parametrize(
    ("name", "states", "ended", "text"),
    [
        (None, {}, [], OWN),  # interrupted before the first checkpoint
        (None, {"step-00000030": {"step": 30}}, [], OWN),  # before the first validation
        (None, BEST, [], OWN),  # after it
        (None, BEST, ["--patience 5", None], OWN),  # was continued
        ("best", BEST, ["--steps 30"], OWN),
        ("best", BEST, [None, "--minutes 5"], OWN),
        (None, BEST, ["--steps 30"], BUILT_IN),
        (None, {}, ["--steps 30"], OWN),  # all checkpoints were deleted
        ("averaged", AVERAGED, [], OWN),  # of an older version, or continued
        (None, AVERAGED, [], BUILT_IN),
    ],
)
def test_without_a_name_it_is_the_newest_run_that_ended_on_own_text(
    box, name, states, ended, text
):
    run = save_run(Path("runs/newest"), states, text)
    for reason in ended:
        if reason is None:  # the run is resumed
            run.truncate_metrics(30)
        else:
            run.record(30, ended=reason)
    expected = box if name is None else run.path / f"{name}.safetensors"
    assert find_checkpoint(None) == expected
    older = save_run(Path("runs/older"), AVERAGED, age=60)
    save_run(Path("runs/oldest"), AVERAGED, age=120)
    expected = older.averaged if name is None else expected
    assert find_checkpoint(None) == expected


def test_python_loads_the_same_model(box):
    assert minitransformer.load().decoding.beam == 4
    save_run(Path("runs/a"), {"averaged": {"decoding": DecodingConfig(beam=7)}})
    assert minitransformer.load().decoding.beam == 7
    save_run(Path("runs/b"), {"averaged": {}}, BUILT_IN, age=-60)
    assert minitransformer.load().decoding.beam == 7


def test_what_cannot_be_read_is_not_chosen(box):
    save_run(Path("runs/b"), AVERAGED).config.write_text("{}")
    assert find_checkpoint(None).name == "model.safetensors"


def test_the_preferred_checkpoint_of_a_run_is_averaged_then_best_then_newest(box):
    run = save_run(Path("runs/a"), {})
    with pytest.raises(FileNotFoundError, match="expected a checkpoint in"):
        find_checkpoint(run.path)
    for path in (run.checkpoint(9), run.checkpoint(10), run.best, run.averaged):
        path.write_bytes(b"")
        assert find_checkpoint(run.path) == path
    assert find_checkpoint(run.best) == run.best


def test_the_newest_run_is_the_one_that_was_trained_last(box):
    with pytest.raises(FileNotFoundError, match=r"found none: run train\.py first"):
        newest_run()
    older = save_run(Path("runs/b"), AVERAGED, age=60)
    newer = save_run(Path("runs/a"), {})
    for name in ("plot.png", "train.log"):  # which are not from training
        (older.path / name).write_bytes(b"")
    os.utime(older.path, (2e9, 2e9))
    assert newest_run().path == newer.path
    older.metrics.write_bytes(b"")  # it was begun first, and trained last
    assert newest_run().path == older.path
    box.unlink()
    assert find_checkpoint(None) == older.averaged
    older.averaged.unlink()
    with pytest.raises(FileNotFoundError, match="en-de: expected a run, a checkpoint"):
        find_checkpoint(None)


def test_a_model_is_said_with_its_text_updates_and_bleu(box):
    state = {"step": 8000, "best_bleu": 39.404}
    run = save_run(Path("runs/a"), {"averaged": state, "best": {"step": 3}})
    text = "talks/train.en.gz to talks/train.de"
    said = f"averaged.safetensors ({text}, 8,000 updates, validation BLEU 39.40)"
    assert described(run.averaged) == f"runs/a/{said}"
    assert described(run.best) == f"runs/a/best.safetensors ({text}, 3 updates)"
    toy = save_run(Path("runs/b"), {"best": {}}, BUILT_IN).best
    said = "best.safetensors (the built-in corpus, 0 updates)"
    assert described(toy) == f"runs/b/{said}"
    copy = Path("copy.safetensors")
    run.best.rename(copy)
    assert described(copy) == "copy.safetensors (3 updates)"
    shipped_model = find_checkpoint(Path("en-de"))
    assert described(shipped_model) == "the shipped model en-de: English to German"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (OWN, ("en", "de")),
        (("a/my.en", "b/my.tok.deu"), ("en", "deu")),
        (("en.txt", "de.txt"), ("source", "target")),
        (("train.en", "train"), ("source", "target")),
        (("train.en", "train.de-AT"), ("source", "target")),
    ],
)
def test_languages_are_the_suffixes_of_the_text(box, text, codes):
    run = save_run(Path("runs/mine"), {"averaged": {}}, text)
    assert language_codes(run.averaged) == codes


def test_languages_without_a_run(box):
    assert language_codes(find_checkpoint(Path("en-de"))) == ("en", "de")
    save_small_model(Path("copy.safetensors"))
    assert language_codes(Path("copy.safetensors")) == ("source", "target")
