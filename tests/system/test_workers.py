"""Workers: what they compute, how they end, and what they share."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl

from minitransformer.system import workers as workers_module
from minitransformer.system.files import file_lock
from minitransformer.system.workers import (
    CAN_FORK,
    Workers,
    limit_threads,
    parallel_map,
    product_threads,
    shared_zeros,
)
from support.scripts import is_running

forks = pytest.mark.skipif(not CAN_FORK, reason="processes are forked on Linux only")


def place(_):
    time.sleep(0.01)
    return os.getpid(), threading.get_ident()


@forks
@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(count):
    def slow_at_first(item):
        time.sleep(0.05 / (1 + item))
        return item * factor

    factor = 3
    with Workers(slow_at_first, count) as workers:
        assert list(workers.map(range(7))) == [3 * item for item in range(7)]
        assert list(workers.map([])) == []
        assert list(workers.map(iter([5]))) == [15]


@forks
def test_work_is_divided_among_processes():
    with parallel_map(place, 2) as mapped:
        found = {process for process, _ in mapped(range(8))}
    assert len(found) == 2
    assert os.getpid() not in found
    for process in found:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("count", [1, 2])
def test_one_worker_or_one_without_forks_is_this_thread(count, monkeypatch):
    monkeypatch.setattr(workers_module, "CAN_FORK", count == 1)
    with parallel_map(place, count) as mapped:
        assert set(mapped([0, 1])) == {(os.getpid(), threading.get_ident())}


@forks
def test_a_product_has_one_thread_in_each_process():
    with parallel_map(lambda _: product_threads(), 2) as mapped:
        assert list(mapped(range(2))) == [1, 1]
    with limit_threads(3), parallel_map(abs, 1):
        assert product_threads() == 1


def test_the_least_limit_of_overlapping_blocks_counts(monkeypatch):
    monkeypatch.setattr(workers_module, "_LIMITS", [])  # those of other tests
    workers_module._blas.cache_clear()  # so that this test finds the library, too

    def blas_threads():
        pools = threadpoolctl.threadpool_info()
        return {p["num_threads"] for p in pools if p["user_api"] == "blas"}

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        if blas_threads() != {2}:
            pytest.skip("the threads of this BLAS cannot be counted")
        first, second = ExitStack(), ExitStack()
        for stack in (first, second):
            stack.enter_context(limit_threads(1))
        first.close()
        assert blas_threads() == {1}
        second.close()
        assert blas_threads() == {2}


def test_a_block_may_end_while_another_begins(monkeypatch):
    """As one does that nothing refers to any more, whenever memory is collected."""
    dropped = ExitStack()
    dropped.enter_context(limit_threads(1))
    blas = SimpleNamespace(limit=lambda limits: dropped.close())
    monkeypatch.setattr(workers_module, "_blas", lambda: blas)
    with limit_threads(2):
        assert product_threads() == 2


@forks
def test_only_shared_memory_is_seen_by_all():
    own, shared = np.zeros(2), shared_zeros((2, 3), np.float32)
    assert shared.shape == (2, 3)
    assert not shared.any()

    def fill(row):
        own[row] = shared[row] = row + 1

    with Workers(fill, 2) as workers:
        list(workers.map(range(2)))
        assert shared.tolist() == [[1] * 3, [2] * 3]
        assert not own.any()


@forks
def test_an_error_of_a_worker_is_raised_and_ends_all():
    def fail(item):
        if item == 2:
            raise ValueError("expected another item, got 2")
        time.sleep(0.05)
        return item

    workers = Workers(fail, 2)
    with pytest.raises(ValueError, match="expected another item, got 2") as error:
        list(workers.map(range(9)))
    assert "in fail" in str(error.value.__cause__)
    assert not workers._processes


@forks
def test_a_worker_that_is_killed_is_told():
    def end(item):
        os.kill(os.getpid(), signal.SIGKILL)

    message = r"it was ended by signal 9 \(is there enough memory\?\)"
    with Workers(end, 2) as workers, pytest.raises(RuntimeError, match=message):
        list(workers.map(range(4)))
    with Workers(abs, 1) as workers:
        [process] = workers._processes.values()
        os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="was ended by signal 9"):
            list(workers.map([1]))


def test_workers_end_with_the_last_reference():
    workers = Workers(abs, 2)
    ids = [*workers._processes.values()]
    del workers
    assert not any(map(is_running, ids))


@forks
@pytest.mark.parametrize("seconds", [0, 0.3])
def test_a_caller_who_leaves_early_ends_the_workers(seconds):
    """Also when the other worker has done all the other items."""

    def wait_at_first(item):
        time.sleep(0 if item else seconds)
        return item

    workers = Workers(wait_at_first, 2)
    results = workers.map(range(9))
    assert next(results) == 0
    results.close()
    assert not workers._processes


@forks
def test_signals_are_left_to_the_parent():
    def signalled(item):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        return item

    with Workers(signalled, 2) as workers:
        assert list(workers.map(range(4))) == [0, 1, 2, 3]


@forks
def test_workers_keep_no_file_locked(tmp_path):
    path = tmp_path / "lock"
    with file_lock(path, wait=False):
        workers = Workers(abs, 1)
        assert list(workers.map([-1])) == [1]  # it has started
    with file_lock(path, wait=False):
        assert list(workers.map([-2])) == [2]
    workers.close()


@forks
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_at_once_with_a_parent_that_is_killed(busy, number):
    script = f"""
import os, time
from minitransformer.system.workers import Workers

workers = Workers(lambda seconds: time.sleep(seconds) or os.getpid(), 2)
print(*workers._processes.values(), flush=True)
list(workers.map([60 if {busy} else 0] * 2))
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        ids = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.2)
        parent.send_signal(number)
    assert len(ids) == 2
    deadline = time.monotonic() + 2
    while any(map(is_running, ids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
