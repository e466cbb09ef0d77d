"""Batches that a thread prepares ahead of time."""

from minitransformer.backends.cuda.training import Prefetcher


class CountingStream:
    """Counts, as a stream of batches of three an epoch."""

    epoch = position = 0

    def __next__(self):
        if self.position == 3:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += 1
        return self.epoch, self.position


def test_prefetching_does_not_move_the_position_in_the_stream():
    ahead, plain = Prefetcher(CountingStream()), CountingStream()
    for _ in range(10):
        assert (ahead.epoch, ahead.position) == (plain.epoch, plain.position)
        assert next(ahead) == next(plain)
