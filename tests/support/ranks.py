"""Ranks by MPI, and ranks that are threads, with an all-reduce over shared memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest

from minitransformer.engine.backend import array_module, to_host
from minitransformer.training.distributed import Communicator, find_mpiexec


def mpiexec() -> str | None:
    """MPI's launcher, where there is one and mpi4py."""
    if find_spec("mpi4py") is None:
        return None
    try:
        return find_mpiexec()
    except RuntimeError:
        return None


needs_mpi = pytest.mark.skipif(
    mpiexec() is None, reason="needs mpi4py and an MPI: pip install '.[mpi]'"
)


class ThreadCommunicator(Communicator):
    """One rank. `shared` has a slot for each rank's array, and a barrier."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self.shared = rank, size, shared
        self.local_rank = rank

    def start_all_reduce(self, array):
        def wait():
            slots, barrier = self.shared
            slots[self.rank] = to_host(array).copy()
            barrier.wait()
            total = sum(slots[1:], start=slots[0].copy())
            array[...] = array_module(array).asarray(total)
            barrier.wait()

        return wait

    def all_reduce_numbers(self, values):
        sums = np.array(values, np.float64)
        self.start_all_reduce(sums)()
        return sums.tolist()

    def all_gather(self, data):
        slots, barrier = self.shared
        slots[self.rank] = data
        barrier.wait()
        found = [*slots]
        barrier.wait()
        return found

    def broadcast(self, array):
        if self.rank:
            array.fill(0)
        self.start_all_reduce(array)()


def run_ranks(size, work):
    """Run `work(communicator)` on `size` ranks; return the results by rank.

    If one fails, the others wait for it no longer.
    """
    shared = [None] * size, threading.Barrier(size)
    ranks = [ThreadCommunicator(rank, size, shared) for rank in range(size)]

    def attempt(rank):
        try:
            return work(rank)
        except BaseException:
            shared[1].abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(attempt, ranks))
