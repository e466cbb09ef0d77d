"""The key/value cache; what it computes is compared in properties."""

import numpy as np

from minitransformer.engine.autograd import Tensor
from minitransformer.model.kv_cache import DecoderState, KeyValueCache


def test_a_selection_that_moves_no_beam_copies_nothing():
    memory, column = np.zeros((4, 2, 3)), Tensor(np.zeros((2, 1, 3)))
    cache = KeyValueCache(memory, memory)
    state = DecoderState([cache], np.ones((2, 1, 1, 4), bool))
    cache.append(column, column)
    keys = cache.keys
    state.select(np.arange(2), 1)
    assert cache.keys is keys
