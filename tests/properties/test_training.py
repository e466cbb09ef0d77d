"""Training: Adam and its schedule, batches, checkpoints and settings, by loops."""

import dataclasses
import math
import re
import typing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.engine.backend import Backend
from minitransformer.runs import checkpoint
from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import value_type
from minitransformer.text.batches import BatchStream, ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.training import optimizer
from minitransformer.training.averaging import TIE, best_number
from minitransformer.training.optimizer import Adam, learning_rate
from support.cuda import backend_for
from support.properties import within

NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 3.0, 1e-8, -1e-8, 1e4]) | st.floats(-9, 9)
GRADIENTS = st.lists(
    st.lists(NUMBERS, min_size=3, max_size=3) | st.just([math.inf] * 3),
    min_size=1,
    max_size=8,
)


@given(
    gradients=GRADIENTS,
    stops=st.sets(st.integers(0, 8)),
    beta1=st.sampled_from([0.0, 0.5, 0.9]),
    beta2=st.sampled_from([0.0, 0.9, 0.98]),
    epsilon=st.sampled_from([1e-9, 0.1]),
    clip_norm=st.none() | st.sampled_from([0.5, 2.0]),
    warmup=st.integers(1, 4),
    decay=st.integers(0, 4),
    block=st.sampled_from([1, 2, 100]),
    threads=st.sampled_from([1, 2, 9]),
)
def test_adam_and_its_schedule_are_loops_over_numbers(
    gradients, stops, beta1, beta2, epsilon, clip_norm, warmup, decay, block, threads
):
    """Whatever is skipped because it is not finite, and wherever a run was resumed.

    Threads divide the blocks of the parameters.
    """
    steps, told = len(gradients), []
    values = np.array([1.0, -2.0, 0.5])
    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(threads) as pool,
        backend_for(np.ndarray, backend=Backend(parameters_changed=told.append)),
    ):
        patch.setattr(optimizer, "BLOCK", block)
        options = {"clip_norm": clip_norm, "num_threads": threads, "map": pool.map}
        adam = Adam(values, beta1, beta2, epsilon, **options)
        theta, m, v, made = values.tolist(), [0.0] * 3, [0.0] * 3, 0
        for step, numbers in enumerate(gradients, start=1):
            if step in stops:
                resumed = Adam(values, beta1, beta2, epsilon, **options)
                resumed.restore(adam.steps, adam.first_moment, adam.second_moment)
                adam = resumed
            rate = learning_rate(step, 0.3, warmup, steps, decay)
            expected_rate = (
                0.3 * math.sqrt(warmup) * min(step**-0.5, step * warmup**-1.5)
            )
            if decay and steps - step < decay:
                expected_rate *= (steps + 1 - step) / (decay + 1)
            within(abs(rate - expected_rate), 1e-12)
            gradient = np.array(numbers)
            norm, finite = adam.step(gradient, 1.0, rate)
            assert gradient.tolist() == numbers
            expected_norm = math.sqrt(sum(g * g for g in numbers))
            assert norm == pytest.approx(expected_norm)
            assert finite == math.isfinite(expected_norm)
            if not finite:
                continue
            made += 1
            scale = min(1, clip_norm / norm) if clip_norm and norm else 1
            for i, g in enumerate(numbers):
                m[i] = beta1 * m[i] + (1 - beta1) * scale * g
                v[i] = beta2 * v[i] + (1 - beta2) * (scale * g) ** 2
                root = math.sqrt(v[i] / (1 - beta2**made))
                theta[i] -= rate * m[i] / (1 - beta1**made) / (root + epsilon)
            within(abs(values - theta).max(), 1e-9 * (1 + max(map(abs, theta))))
    assert [x is values for x in told] == [True] * made


LENGTHS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=30
)


@given(LENGTHS, st.integers(1, 60), st.integers(0, 3), st.integers(0, 40))
def test_batches_go_on_wherever_they_were_stopped(lengths, max_tokens, seed, stop):
    """Each epoch has each pair once."""
    sides = [[[4 + i] * pair[n] for i, pair in enumerate(lengths)] for n in (0, 1)]
    corpus = ParallelCorpus(*map(Ragged.from_lists, sides))
    training = TrainingConfig(max_tokens=max_tokens, seed=seed)
    stream = BatchStream(corpus, training)
    seen, orders = {}, {}

    def note(batch):
        seen.setdefault(stream.epoch, []).extend(batch.source[:, 0] - 4)
        orders[stream.epoch] = np.concatenate(stream.batches).tolist()

    for _ in range(stop):
        note(next(stream))
    resumed = BatchStream(corpus, training, stream.epoch, stream.position)
    for _ in range(8):
        batch, again = next(stream), next(resumed)
        np.testing.assert_array_equal(batch.source, again.source)
        np.testing.assert_array_equal(batch.target, again.target)
        note(batch)
    assert [*orders] == [*range(stream.epoch + 1)]
    for epoch, order in orders.items():
        assert sorted(order) == list(range(len(lengths)))
        end = None if epoch < stream.epoch else len(seen[epoch])
        assert seen[epoch] == order[:end]


@pytest.fixture(scope="module")
def saved(model_path):
    with open(model_path, "rb") as file:
        return file.read()


@given(data=st.data())
def test_changed_bytes_of_a_checkpoint_are_refused_in_one_line(
    saved, tmp_path_factory, data
):
    """Or they are no part of what is read: the tensors are the same."""
    changed = bytearray(saved)
    header = 8 + int.from_bytes(saved[:8], "little")
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        anywhere = st.integers(0, header - 1) | st.integers(0, len(saved) - 1)
        place = data.draw(anywhere, label="place")
        removed = data.draw(st.integers(0, 4) | st.just(len(saved)), label="removed")
        changed[place : place + removed] = data.draw(st.binary(max_size=4), label="new")
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(changed)
    refused = None
    try:
        loaded = checkpoint.load(path)
    except (ValueError, OSError) as error:
        refused = str(error)
    if refused:
        assert re.fullmatch(f"{path}: .*", refused)  # in one line
        return
    path.write_bytes(saved)
    original = checkpoint.load(path)
    np.testing.assert_array_equal(loaded.parameters.data, original.parameters.data)
    assert loaded.tokenizer.model == original.tokenizer.model


def values_of(field, hint):
    """A strategy of a field's values, as its option allows them."""
    kind, may_be_none = value_type(hint)
    limits = field.metadata["limits"]
    least, most = limits.get("at_least", 0), limits.get("at_most", 1000)
    values = {
        bool: st.booleans(),
        int: st.integers(least, most),
        float: st.floats(least + 1e-6, min(limits.get("below", most), most) - 1e-6),
        str: st.sampled_from(field.metadata["flag"]["choices"] or [""]),
    }
    return st.none() | values[kind] if may_be_none else values[kind]


@st.composite
def configs(draw, cls):
    hints = typing.get_type_hints(cls)
    chosen = draw(st.sets(st.sampled_from(dataclasses.fields(cls)), max_size=6))
    values = {f.name: draw(values_of(f, hints[f.name])) for f in chosen}
    try:
        return cls(**values)
    except ValueError:
        return cls()


@given(
    configs(ModelConfig), configs(TrainingConfig), configs(DecodingConfig), st.data()
)
def test_settings_to_json_and_back_are_the_same(model, training, decoding, data):
    files = st.tuples(st.text(), st.text())
    text = {split: data.draw(files) for split in ("train", "val")}
    vocabulary, start = (data.draw(st.none() | st.text()) for _ in range(2))
    config = RunConfig(
        "tiny", model, training, decoding, text, vocabulary=vocabulary, start=start
    )
    assert RunConfig.from_json(config.to_json()) == config


COSTS = st.sampled_from([1.0, 1 + 0.4 * TIE, 1 + 0.8 * TIE, 1 + 1.5 * TIE, 1.1, 0.9])


@settings(max_examples=100)
@given(st.lists(COSTS, min_size=1, max_size=7), COSTS | st.just(math.inf))
def test_as_many_are_averaged_as_cost_least(costs, best):
    """Or more, if that costs hardly more; none if a checkpoint is better than all."""
    least = min(*costs, best)
    equal = [n for n, cost in enumerate(costs, 1) if n > 1 and cost < least + TIE]
    expected = equal[-1] if equal else int(costs[0] < best)
    assert best_number([best, *costs]) == expected
