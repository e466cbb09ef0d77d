"""What changes nothing: padding, order, parts, caches and permutations."""

import itertools
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.engine.autograd import no_grad
from minitransformer.model.transformer import token_log_probs
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID
from minitransformer.text.batches import Batch
from minitransformer.training import parallel
from minitransformer.training.parallel import CpuModel
from support.noise import RecordedNoise
from support.properties import within
from support.ranks import run_ranks
from support.strategies import batch_of, cases, padded

pytestmark = pytest.mark.properties(share=3)


def log_probs(model, batch):
    """The log-probability of each target token of each pair."""
    found, _ = token_log_probs(model, batch.source, batch.target)
    used = batch.target[:, 1:] != PAD_ID
    return [row[mask] for row, mask in zip(found, used, strict=True)]


def assert_same(found, expected):
    for row, other in zip(found, expected, strict=True):
        within(abs(row - other).max(), 1e-9 * (1 + abs(other).max()))


@given(cases(), st.randoms(use_true_random=False), st.integers(0, 3), st.integers(0, 3))
def test_padding_order_and_batch_mates_change_nothing(case, random, more, longer):
    model, order = case.model(), list(range(len(case.pairs)))
    random.shuffle(order)
    batch = batch_of([case.pairs[i] for i in order])
    wide = [(0, 0), (0, more)], [(0, 0), (0, longer)]
    source, target = map(np.pad, (batch.source, batch.target), wide)
    together = log_probs(model, Batch(source, target))
    for i, found in zip(order, together, strict=True):
        assert_same([found], log_probs(model, batch_of([case.pairs[i]])))


@given(cases(max_pairs=2), st.data())
def test_later_tokens_change_nothing_earlier(case, data):
    model, batch = case.model(), case.batch
    target = batch.target.copy()
    first = data.draw(st.integers(1, target.shape[1] - 1))
    ids = st.integers(1, case.config.vocab_size - 1)
    target[:, first:] = data.draw(st.lists(ids, min_size=1, max_size=3))[0]
    outputs = (model(batch.source, ids).data for ids in (batch.target, target))
    before, after = (x[:, :first] for x in outputs)
    within(abs(before - after).max(), 1e-9 * (1 + abs(before).max()))


@st.composite
def permutations(draw, size):
    return np.array(draw(st.permutations(range(size))))


@given(cases(), st.data())
def test_permuted_heads_units_and_words_change_nothing(case, data):
    """The order of the words is that of the table; special symbols keep theirs."""
    model, config = case.model(), case.config
    expected = log_probs(model, case.batch)
    heads = data.draw(permutations(config.num_heads))
    units = data.draw(permutations(config.d_ff))
    words = np.array([0, *(1 + data.draw(permutations(config.vocab_size - 1)))])

    def columns(width):
        return (heads[:, None] * width + np.arange(width)).ravel()

    keys, values = columns(config.key_width), columns(config.value_width)
    moved = {
        "query": np.s_[:, keys],
        "key": np.s_[:, keys],
        "value": np.s_[:, values],
        "output": values,
        "weight_1": np.s_[:, units],
        "bias_1": units,
        "weight_2": units,
        "table": np.argsort(words),
    }
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in moved:
            parameter.data[...] = parameter.data[moved[kind]]
    batch = Batch(words[case.batch.source], words[case.batch.target])
    assert_same(log_probs(model, batch), expected)


@given(cases(), st.integers(0, 3))
def test_a_window_as_long_as_the_sentences_is_none(case, more):
    batch = case.batch
    longest = max(batch.source.shape[1], batch.target.shape[1])
    windows = [{"attention_window": w} for w in (None, 2 * longest + more)]
    models = [replace(case, settings={**case.settings, **w}).model() for w in windows]
    assert_same(*(log_probs(model, batch) for model in models))


@given(cases(max_pairs=3), st.data())
def test_incremental_decoding_is_a_pass_over_the_whole(case, data):
    """Whichever beams go on, and whichever sentences leave."""
    model, source, beams = case.model(), padded([[*s, EOS_ID] for s in case.sources]), 1
    ids = st.integers(1, case.config.vocab_size - 1)
    owners = np.arange(len(source))
    histories = np.full((len(source), 1), BOS_ID)
    with no_grad():
        state = model.start_decoding(source)
        for _ in range(data.draw(st.integers(1, 20), label="steps")):
            found = model.decode_step(histories[:, -1], state)
            whole = model(source[owners], histories).data[:, -1]
            within(abs(found - whole).max(), 1e-9 * (1 + abs(whole).max()))

            # Of each sentence that is left, some beams go on.
            count = len(owners) // beams
            left = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
            kept = data.draw(
                st.lists(st.integers(0, beams - 1), min_size=1, max_size=3)
            )
            rows = np.array([s * beams + k for s in sorted(left) for k in kept])
            beams = len(kept)
            state.select(rows, beams)
            owners = owners[rows]
            tokens = data.draw(ids) + np.arange(len(rows))[:, None]
            tokens = 1 + tokens % (case.config.vocab_size - 1)
            histories = np.concatenate([histories[rows], tokens], axis=1)


# Parts of a batch


def rows_of(ids):
    """Return each row without its padding."""
    return [tuple(row[row != PAD_ID].tolist()) for row in ids]


def noise_of(key):
    return RecordedNoise(zlib.crc32(repr(key).encode()))


@given(
    case=cases(max_pairs=8, dropout=True),
    ends=st.lists(st.integers(1, 7), max_size=3),
    width=st.integers(0, 60),
    ranks=st.integers(1, 5),
)
def test_a_gradient_is_the_sum_of_parts_each_with_its_own_noise(
    case, ends, width, ranks
):
    """Over accumulated batches, and the rounds and ranks that share them.

    A part is as many pairs as a process may take at once, rounded up.
    """
    keys, parts, compute = [], [], parallel.training_loss
    sizes = sorted({0, *(n for n in ends if n < len(case.pairs)), len(case.pairs)})
    batches = [batch_of(case.pairs[a:b]) for a, b in itertools.pairwise(sizes)]

    def draw(key):
        keys.append(key)
        noise = noise_of(key)
        noise.key = key
        return noise

    def remember(model, source, target, smoothing, noise):
        parts.append((source, target, noise.key))
        return compute(model, source, target, smoothing, noise)

    def on_rank(communicator):
        model, buffer = case.buffered()
        computed = CpuModel(model, buffer, communicator=communicator)
        loss = computed.forward_backward(batches, case.smoothing, (1, 2))
        computed.close()
        return loss, buffer.grad

    with pytest.MonkeyPatch.context() as patch:
        at_most = (width + 1) * case.config.d_model - 1
        patch.setattr(parallel, "TOKENS_TIMES_WIDTH", at_most)
        patch.setattr(parallel, "HostStream", draw)
        patch.setattr(parallel, "training_loss", remember)
        results = run_ranks(ranks, on_rank)
    assert len(set(keys)) == len(keys), "two parts have the same noise"
    pairs = [p for x in parts for p in zip(rows_of(x[0]), rows_of(x[1]), strict=True)]
    sources, targets = rows_of(case.batch.source), rows_of(case.batch.target)
    assert sorted(pairs) == sorted(zip(sources, targets, strict=True))
    width = max(width, 1)
    for source, target, _ in parts:
        assert (len(source) - 1) * max(source.shape[1], target.shape[1]) < width
    sizes = [(len(b.source), max(b.source.size, b.target.size)) for b in batches]
    counts = [min(n, ranks * math.ceil(size / (width * ranks))) for n, size in sizes]
    assert len(parts) == sum(counts)

    model, buffer = case.buffered()
    buffer.grad[...] = total = 0.0
    for source, target, key in parts:
        loss = compute(model, source, target, case.smoothing, noise_of(key))
        loss.backward()
        total += float(loss.data)
    tokens = case.batch.target_tokens
    expected = buffer.grad / tokens
    for loss, gradient in results:
        within(abs(loss - total / tokens), 1e-9 * (1 + abs(loss)))
        within(abs(gradient - expected).max(), 1e-9 * (1 + abs(expected).max()))
