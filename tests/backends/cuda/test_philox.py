"""Dropout's numbers against those that the paper of Philox publishes."""

import numpy as np
import pytest

from minitransformer.backends.cuda.philox import dropout_threshold
from support.philox import HostPhilox, philox_4x32_10


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter, key, expected):
    counter, key, expected = (
        [np.uint64(int(word, 16)) for word in x.split()]
        for x in (counter, key, expected)
    )
    assert [*philox_4x32_10(counter, key)] == expected


def numbers(seed, counter):
    """The 8 numbers of 16 bits of a counter, the lower half of a word first."""
    place = map(np.uint64, (counter % 2**32, counter >> 32, 0, 0))
    key = map(np.uint64, (seed % 2**32, seed >> 32))
    words = map(int, philox_4x32_10(place, key))
    return [half for word in words for half in (word % 2**16, word >> 16)]


def test_each_row_of_a_mask_has_counters_of_its_own():
    stream = HostPhilox((3, 1, 4))
    [seed] = stream.seed.tolist()
    assert [seed] == np.random.SeedSequence((3, 1, 4)).generate_state(1, "u8").tolist()
    counter = 2**32 - 2
    stream.take((counter, 1))
    for shape in ((2, 3, 5), (4, 8), (2, 9), (17,)):
        keep, factor = stream.keep_mask(shape, 0.25)
        assert keep.shape == shape
        assert factor == 4 / 3
        for row in keep.reshape(-1, shape[-1]):
            drawn = []
            while len(drawn) < len(row):
                drawn += numbers(seed, counter)
                counter += 1
            assert row.tolist() == [x >= 2**14 for x in drawn[: len(row)]]


def test_a_number_below_the_threshold_is_dropped_and_one_at_it_kept():
    seed = int(HostPhilox((3,)).seed[0])
    for counter in range(20):
        number = numbers(seed, counter)[0]
        for threshold in (number, number + 1):
            stream = HostPhilox((3,))
            stream.take((counter, 1))
            [keep], _ = stream.keep_mask((1,), threshold / 2**16)
            assert keep == (number >= threshold)


def test_another_key_starts_over():
    stream = HostPhilox((1,))
    seed, shape = stream.seed, (5, 40)
    first, second = (stream.keep_mask(shape, 0.5)[0] for _ in range(2))
    assert (first != second).any()
    stream.reseed((2,))
    other, _ = stream.keep_mask(shape, 0.5)
    np.testing.assert_array_equal(other, HostPhilox((2,)).keep_mask(shape, 0.5)[0])
    assert (first != other).any()
    stream.reseed((1,))
    np.testing.assert_array_equal(stream.keep_mask(shape, 0.5)[0], first)
    assert stream.seed is seed


@pytest.mark.parametrize(
    ("rate", "threshold"),
    [(0, 0), (0.1, 6554), (0.5, 32_768), (0.9, 58_982), (1, 65_535)],
)
def test_a_threshold_of_16_bits_is_the_nearest_to_the_rate(rate, threshold):
    assert dropout_threshold(rate) == threshold
