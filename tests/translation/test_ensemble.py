"""Several models at once: averaged probabilities, by the definition."""

import numpy as np
import pytest
from test_translate import SHORT, in_process, save_model

from minitransformer import load
from minitransformer.engine.autograd import Tensor, no_grad
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID, DecodingConfig, ModelConfig
from minitransformer.translation.beam_search import length_penalty
from minitransformer.translation.decode import translate
from minitransformer.translation.steppers import Ensemble

SIZES = {"encoder_layers": 1, "decoder_layers": 1, "d_ff": 8, "num_heads": 2}


def models(count, vocab_size=9):
    """Models of different widths, with weights that make them sure of something."""
    found = []
    for seed in range(count):
        config = ModelConfig(vocab_size=vocab_size, d_model=8 + 2 * seed, **SIZES)
        net = Transformer(config, seed=seed + 1, dtype="float64")
        net.embedding.table.data *= 3
        found.append(net)
    return found


def next_probabilities(members, source, prefix):
    """The mean over models of softmax, from a pass over the whole prefix."""
    total = 0.0
    for net in members:
        with no_grad():
            outputs = net(np.array([[*source, EOS_ID]]), np.array([[BOS_ID, *prefix]]))
            logits = net.logits(Tensor(outputs.data[0, -1])).data
        p = np.exp(logits - logits.max())
        total = total + p / p.sum()
    return total / len(members)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_greedy_search_follows_the_mean(count):
    members, source = models(count), [5, 6, 7]
    config = DecodingConfig(beam=1, max_len_a=0, max_len_b=4)
    [[found]] = translate(Ensemble(members), [source], config)
    prefix, log_prob = [], 0.0
    for _ in range(5):
        p = next_probabilities(members, source, prefix)
        p[[0, BOS_ID]] = 0  # neither padding nor BOS is ever produced
        best = int(p.argmax())
        log_prob += np.log(p[best])
        if best == EOS_ID:
            break
        prefix.append(best)
    assert list(found.tokens) == prefix
    assert found.log_prob == pytest.approx(log_prob, rel=1e-9)
    length = len(prefix) + (best == EOS_ID)
    assert found.score == pytest.approx(log_prob / length_penalty(length, 0.6))


def test_equal_models_are_as_one():
    [net] = models(1)
    config = DecodingConfig(beam=3, nbest=3, max_len_a=0, max_len_b=5)
    sources = [[5, 6, 7], [], [8, 4]]
    for a, b in zip(
        translate(Ensemble([net, net]), sources, config),
        translate(net, sources, config),
        strict=True,
    ):
        assert [h.tokens for h in a] == [h.tokens for h in b]
        assert [h.score for h in a] == pytest.approx([h.score for h in b])


def test_the_shortest_positions_set_the_limit():
    learned = [
        Transformer(
            ModelConfig(
                vocab_size=9, d_model=8, positions="learned", max_positions=n, **SIZES
            )
        )
        for n in (9, 5)
    ]
    assert Ensemble([*models(1), *learned]).config.position_limit == 5


def test_different_vocabularies_are_refused():
    with pytest.raises(ValueError, match="models of one vocabulary, got sizes 9, 10"):
        Ensemble([*models(1), *models(1, vocab_size=10)])


def test_the_command_takes_several(tmp_path, capfd):
    paths = [save_model(tmp_path / f"{n}.safetensors", d_k=n) for n in (4, 6)]
    flags = [flag for path in paths for flag in ("--model", path)]
    code, out, _ = in_process(capfd, *flags, *SHORT, "the cat", "")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert in_process(capfd, "--model", *paths, *SHORT, "the cat", "")[1] == out
    assert in_process(capfd, *SHORT, "--model", *paths, "the cat", "")[1] == out
    with pytest.raises(ValueError, match="expected one model, got 2"):
        _ = load(*paths).single
    code, _, err = in_process(
        capfd, *flags, "--attention", str(tmp_path / "x.html"), "the cat"
    )
    assert (code, err) == (1, "translate.py: error: expected one model, got 2\n")
