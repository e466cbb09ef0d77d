"""Ragged arrays of ids, in memory and in a file, by hand and by definition."""

import os

import numpy as np
import pytest

from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.text.ids import Ragged, StoredIds


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


def test_ids_in_a_file_are_those_in_memory(tmp_path):
    rng, path = np.random.default_rng(1), tmp_path / "ids"
    ids = rng.integers(0, 60_000, 50).astype(np.uint16)
    path.write_bytes(ids.tobytes())
    starts = np.array([0, 7, 7, 20, 21, 50])
    before = len(os.listdir("/dev/fd"))
    stored, chosen = StoredIds(path, "uint16"), np.array([4, 0, 1, 3])
    assert len(stored) == 50
    found = Ragged(stored, starts).concatenate(chosen)
    expected = [i for k in chosen for i in ids[starts[k] : starts[k + 1]]]
    assert found.tolist() == expected
    assert Ragged(ids, starts).concatenate(chosen).tolist() == expected
    del stored
    assert len(os.listdir("/dev/fd")) == before


def test_lengths_of_many_sequences():
    lengths = np.random.default_rng(2).integers(0, 4, 2 * (1 << 20) + 3)
    found = Ragged(np.zeros(0), np.insert(np.cumsum(lengths), 0, 0)).lengths
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, lengths)


@pytest.mark.parametrize("starts", [[0, 5, 4], [3, 2], [0, 1 << 31]])
def test_starts_that_cannot_be_are_refused(starts):
    with pytest.raises(ValueError, match="starts of sentences are out of order"):
        _ = Ragged(np.zeros(0), np.array(starts)).lengths


def test_the_longest_sequence_has_one_id_less_than_two_to_the_31():
    starts = np.array([0, (1 << 31) - 1])
    assert Ragged(np.zeros(0), starts).lengths.tolist() == [(1 << 31) - 1]


def test_a_file_that_was_cut_off_is_named(tmp_path):
    path = tmp_path / "ids"
    path.write_bytes(np.arange(20, dtype=np.uint16).tobytes())
    rows = Ragged(StoredIds(path, "uint16"), np.array([0, 12, 20]))
    path.write_bytes(bytes(30))
    assert rows.concatenate(np.array([0])).tolist() == [0] * 12
    message = r"ids: expected 40 bytes, read 30: it was cut off while in use"
    with pytest.raises(ValueError, match=message):
        rows.pad(np.array([0, 1]))
