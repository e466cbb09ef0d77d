"""The key/value cache, whose entries here are numbers that name their position."""

import numpy as np
import pytest

from minitransformer.engine.autograd import Tensor
from minitransformer.model.kv_cache import DecoderState, KeyValueCache

WIDTHS = 3, 2  # of keys and of values


def cache_of(rows, dtype=np.float32, reach=None):
    memory = (np.zeros((4, rows, width), dtype) for width in WIDTHS)
    return KeyValueCache(*memory, reach)


def append(cache, numbers):
    """Append number n as the key n and the value -n of a beam, and return all."""
    column = np.asarray(numbers, np.float32)[:, None, None]
    key, value = (np.repeat(column, width, axis=2) for width in WIDTHS)
    keys, values, mask = cache.append(Tensor(key), Tensor(-value))
    assert mask is None
    assert (keys.shape[2], values.shape[2]) == WIDTHS
    assert (keys.data == keys.data[..., :1]).all()
    assert (values.data == -keys.data[..., :1]).all()
    return keys.data[..., 0].tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_cache_has_the_dtype_and_widths_of_the_memory(dtype):
    cache = cache_of(3, dtype=dtype)
    shapes = cache.keys.shape, cache.values.shape
    assert shapes == ((16, 3, 3), (16, 3, 2))
    assert cache.keys.dtype == cache.values.dtype == dtype


def state_of(sentences, first=0):
    """A state whose memory and mask name their sentence."""
    names = np.arange(first, first + sentences)
    memory = (names[None, :, None] * np.ones(width) for width in WIDTHS)
    keys, values = memory
    caches = [KeyValueCache(keys, values) for _ in range(2)]
    return DecoderState(caches, names[:, None, None, None])


def memory_of(state):
    names = state.source_mask.ravel().tolist()
    for cache in state.caches:
        for memory, width in zip(cache.memory(), WIDTHS, strict=True):
            assert memory.shape == (len(names), 1, width)
            assert memory[:, 0, -1].tolist() == names
    return names


def test_a_selection_that_moves_no_beam_copies_nothing():
    state = state_of(2)
    for cache in state.caches:
        append(cache, [0, 10])
    arrays = [cache.keys for cache in state.caches]
    state.select(np.arange(2), 1)
    assert all(c.keys is k for c, k in zip(state.caches, arrays, strict=True))
    state.select(np.array([0, 0, 1, 1]), 2)
    state.select(np.array([0, 1]), 2)  # all beams of the first sentence alone
    assert memory_of(state) == [0]
    for cache in state.caches:
        assert append(cache, [7, 8]) == [[0, 7], [0, 8]]


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (3, 3)])
def test_sources_of_other_sentences_are_padded(lengths):
    """With keys and values of 0 that are not looked at."""
    states = []
    for length in lengths:
        keys, values = (np.full((length, 2, width), length) for width in WIDTHS)
        mask = np.ones((2, 1, 1, length), bool)
        mask[0, ..., -1] = False
        states.append(DecoderState([KeyValueCache(keys, values)], mask))
    joined, longest = states[0], max(lengths)
    joined.join(states[1])
    assert joined.source_mask.shape == (4, 1, 1, longest)
    assert joined.source_mask.dtype == bool
    visible = joined.source_mask.sum(axis=-1).ravel().tolist()
    assert visible == [n for length in lengths for n in (length - 1, length)]
    for memory, width in zip(joined.caches[0].memory(), WIDTHS, strict=True):
        sizes = np.repeat(lengths, 2)
        used = np.arange(longest) < sizes[:, None]
        expected = np.where(used, sizes[:, None], 0)[..., None] * np.ones(width)
        assert memory.tolist() == expected.tolist()
