"""Ragged arrays of ids, by hand."""

import numpy as np

from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.text.ids import Ragged


def test_sequences_are_ended_and_padded():
    lines = Ragged.from_lists([[5, 6, 7], [], [8]])
    assert len(lines) == 3
    assert lines.ids.tolist() == [5, 6, 7, 8]
    assert lines.lengths.tolist() == [3, 0, 1]
    chosen = np.array([2, 0, 1])
    assert lines.concatenate(chosen).tolist() == [8, 5, 6, 7]
    plain, begun = lines.pad(chosen), lines.pad(chosen, first=BOS_ID)
    assert plain.tolist() == [[8, EOS_ID, 0, 0], [5, 6, 7, EOS_ID], [EOS_ID, 0, 0, 0]]
    assert begun[:, 1:].tolist() == plain.tolist()
    assert begun[:, 0].tolist() == [BOS_ID] * 3
    assert lines.ids.dtype == plain.dtype == begun.dtype == np.int64
    assert lines.pad(np.array([], dtype=int)).shape == (0, 1)
