"""Workers: forked processes, and how many threads the products of each have.

Only one thread of a process runs Python code at a time, and threads that call NumPy
every few microseconds often wait for each other. Processes do not. A forked process
starts within milliseconds, with a copy of its parent's memory, which includes the
model; a page is copied only when one of the two writes to it. Arrays that all processes
write to and read from lie in shared memory (`shared_zeros`).

A fork copies the thread that calls it and no other. Locks that other threads hold at
that moment stay locked in the copy. Therefore nothing forks unless the caller asks for
more than one process.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import mmap
import os
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar, cast

import numpy as np
from threadpoolctl import ThreadpoolController

A = TypeVar("A")
R = TypeVar("R")

# macOS has forks, too, but its library of matrix products fails after one.
CAN_FORK = sys.platform == "linux" and hasattr(os, "fork")

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def shared_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros in memory that this process shares with those it forks later."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, mmap.mmap(-1, max(size, 1)))


# Threads of the matrix products


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


# The limits of all blocks that are running. The least one applies.
_LIMITS = list[int]()
_LOCK = threading.RLock()  # a dropped block may end in this thread, within another
_unlimited: Any = None  # remembers the number of threads outside of all blocks


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Limit each matrix product of this process to `count` threads inside the block.

    The limit of 1 is for processes that share the cores with others.
    """
    global _unlimited
    with _LOCK:
        if not _LIMITS:
            _unlimited = _blas().limit(limits=count)
        _LIMITS.append(count)
        _blas().limit(limits=min(_LIMITS))
    try:
        yield
    finally:
        with _LOCK:
            _LIMITS.remove(count)
            if _LIMITS:
                _blas().limit(limits=min(_LIMITS))
            else:
                _unlimited.restore_original_limits()


def product_threads() -> int:
    """Return the number of threads of oneDNN's products: the limit, or else 1."""
    return min(_LIMITS, default=1)


# Forked processes


@contextmanager
def parallel_map(
    function: Callable[[A], R], count: int
) -> Iterator[Callable[[Iterable[A]], Iterable[R]]]:
    """Yield a `map` of `function` over items, in order, on `count` processes.

    Each process has one thread for its matrix products: with more, small products would
    spend most of their time waiting for threads. Where processes cannot be forked, this
    one does the work, and its matrix products have `count` threads.
    """
    if count == 1 or not CAN_FORK:
        with limit_threads(count):
            yield lambda items: map(function, items)
    else:
        with limit_threads(1), Workers(function, count) as workers:
            yield workers.map


class Workers(Generic[A, R]):
    """Forked processes that apply a function to the items that they are sent.

    The function, and all that it refers to, is copied when they start. Items and
    results are pickled. The workers ignore signals that stop a program; they are killed
    when the parent ends, or the thread that started them.
    """

    def __init__(self, function: Callable[[A], R], count: int) -> None:
        _release_free_memory()
        self._processes: dict[Connection, int] = {}  # their ids
        self._end = weakref.finalize(self, _end, self._processes, os.getpid())
        for _ in range(count):
            connection, of_worker = Pipe()
            self._processes[connection] = _fork(partial(_serve, function, of_worker))
            of_worker.close()

    def __enter__(self) -> Workers[A, R]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def map(self, items: Iterable[A]) -> Iterator[R]:
        """Yield function(item) for each item, in order.

        An error ends the workers, and so does a caller that stops before the last item.

        Raises: what the function raises; RuntimeError if a worker has ended
        """
        numbered = enumerate(items)
        idle = list(self._processes)
        busy = dict[Connection, int]()  # the number of the item of each
        results = dict[int, R]()  # by the number of the item
        number = 0  # of the next result to yield
        try:
            while True:
                # Send an item to each idle worker.
                while idle and (following := next(numbered, None)):
                    connection = idle.pop(0)
                    busy[connection], item = following
                    with suppress(OSError):  # it has ended, as `_receive` explains
                        connection.send(item)
                # Yield the results that come next in order.
                while number in results:
                    yield results.pop(number)
                    number += 1
                if not busy:
                    break
                # Wait until at least one worker has answered.
                for connection in cast(list[Connection], wait(list(busy))):
                    results[busy.pop(connection)] = self._receive(connection)
                    idle.append(connection)
        finally:
            if busy or results:  # after an error, or if the caller leaves early
                self.close()

    def _receive(self, connection: Connection) -> R:
        """Raises: RuntimeError saying how a worker ended, or what it raised"""
        try:
            result, error, trace = connection.recv()
        except (EOFError, OSError):
            _, status = os.waitpid(self._processes.pop(connection), 0)
            code = os.waitstatus_to_exitcode(status)
            how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
            why = " (is there enough memory?)" if code == -signal.SIGKILL else ""
            expected = "expected an answer from a worker process"
            raise RuntimeError(f"{expected}, it {how}{why}") from None
        if error is not None:
            raise error from RuntimeError(f"in a worker process:\n{trace}")
        return cast(R, result)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._end()


def _end(processes: dict[Connection, int], parent: int) -> None:
    if os.getpid() != parent:  # a worker that was forked later has a copy
        return
    while processes:
        connection, process = processes.popitem()
        connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _release_free_memory() -> None:
    """Return the memory that the allocator keeps for reuse to the system.

    Otherwise a forked process would fill its own copies of these pages.
    """
    with suppress(AttributeError):  # other C libraries than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _fork(work: Callable[[], None]) -> int:
    """Start a process that does some work and ends; return its id."""
    # Block the signals that stop a program: the worker inherits the mask.
    stops = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        with warnings.catch_warnings():  # of NumPy's threads, which stop for a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process:
            return process
        # In the worker: have Linux kill it when its parent ends, and do the work.
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            work()
            code = 0
        except BaseException:
            print(traceback.format_exc(), file=sys.__stderr__, flush=True)
        finally:
            os._exit(code)  # without the parent's exit handlers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    """Apply the function to the parent's items, until the connection is closed."""
    gc.freeze()  # a collection would write to, and so copy, the pages of all objects
    with suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            try:
                answer: Any = function(item), None, ""
            except BaseException as error:
                answer = None, error, traceback.format_exc()
            connection.send(answer)
