"""Workers: forked processes, and how many threads the products of each have.

Only one thread of a process runs Python code at a time, and threads that call NumPy
every few microseconds often wait for each other. Processes do not. A forked process
starts within milliseconds, with a copy of all that its parent has in memory, such as a
model; the copy of a page is made only when one of the two writes to it. What is to be
seen by all must be in memory that they share (`shared_zeros`).

A fork copies the thread that calls it and no other. Locks that others hold at that
moment stay locked in the copy, so that only who asks for several processes gets them.
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
from typing import Any, Generic, NoReturn, TypeVar, cast

import numpy as np
from threadpoolctl import ThreadpoolController

A = TypeVar("A")
R = TypeVar("R")

# macOS has forks, too, but its library of matrix products fails after one.
CAN_FORK = sys.platform == "linux" and hasattr(os, "fork")

STANDARD_ERROR = 2  # its descriptor
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def shared_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros in memory that this process shares with those it forks later."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, mmap.mmap(-1, max(size, 1)))


# Threads of the matrix products


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


# The limits that are in force, of which the least counts, and a lock for them.
_LIMITS, _LOCK = list[int](), threading.Lock()
_unlimited: Any = None


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Limit each matrix product of this process to `count` threads inside the block.

    The limit of 1 is for processes that share the cores with others.
    """
    _change_limits(_LIMITS.append, count)
    try:
        yield
    finally:
        _change_limits(_LIMITS.remove, count)


def _change_limits(change: Callable[[int], None], count: int) -> None:
    global _unlimited
    with _LOCK:
        if not _LIMITS:
            _unlimited = _blas().limit(limits=count)  # remembers what there was
        change(count)
        if _LIMITS:
            _blas().limit(limits=min(_LIMITS))
        else:
            _unlimited.restore_original_limits()


def product_threads() -> int:
    """Return how many threads a product by oneDNN has: as many as were asked for."""
    return min(_LIMITS, default=1)


# Forked processes


@contextmanager
def parallel_map(
    function: Callable[[A], R], count: int
) -> Iterator[Callable[[Iterable[A]], Iterable[R]]]:
    """Yield a `map` of `function` over items, in order, on `count` processes.

    Each has one thread for its matrix products: small ones wait longer for threads than
    they take. Where processes cannot be forked, this one does the work, and its matrix
    products have `count` threads.
    """
    if count == 1 or not CAN_FORK:
        with limit_threads(count):
            yield lambda items: map(function, items)
    else:
        with limit_threads(1), Workers(function, count) as workers:
            yield workers.map


class Workers(Generic[A, R]):
    """Forked processes that apply a function to the items that they are sent.

    They have the function, and all that it refers to, as it is when they start. Items
    and results are pickled. Signals that stop a program are left to the parent; when it
    ends, or the thread that made them, so do the workers, whatever they are doing.
    """

    def __init__(self, function: Callable[[A], R], count: int) -> None:
        _release_free_memory()
        self._processes: dict[Connection, int] = {}  # their ids
        self._end = weakref.finalize(self, _end, self._processes, os.getpid())
        for _ in range(count):
            ours, theirs = Pipe()
            self._processes[ours] = _fork(partial(_serve, function, theirs))
            theirs.close()

    def __enter__(self) -> Workers[A, R]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def map(self, items: Iterable[A]) -> Iterator[R]:
        """Yield function(item) for each item, in order.

        An error ends the workers, and so does a caller who leaves before the last item.

        Raises: what the function raises; RuntimeError if a worker has ended
        """
        numbered, number = enumerate(items), 0
        idle, busy = list(self._processes), dict[Connection, int]()
        found = dict[int, R]()
        try:
            while True:
                while idle and (following := next(numbered, None)):
                    connection = idle.pop(0)
                    busy[connection], item = following
                    self._send(connection, item)
                while number in found:
                    yield found.pop(number)
                    number += 1
                if not busy:
                    break
                for connection in cast(list[Connection], wait(list(busy))):
                    found[busy[connection]] = self._receive(connection)
                    del busy[connection]
                    idle.append(connection)
        finally:
            if busy:
                self.close()

    def _send(self, connection: Connection, item: A) -> None:
        try:
            connection.send(item)
        except OSError:
            self._explain_end(connection)

    def _receive(self, connection: Connection) -> R:
        try:
            result, error, trace = connection.recv()
        except (EOFError, OSError):
            self._explain_end(connection)
        if error is not None:
            raise error from RuntimeError(f"in a worker process:\n{trace}")
        answer: R = result
        return answer

    def _explain_end(self, connection: Connection) -> NoReturn:
        """Raises: RuntimeError"""
        _, status = os.waitpid(self._processes.pop(connection), 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        why = " (is there enough memory?)" if code == -signal.SIGKILL else ""
        raise RuntimeError(f"expected an answer from a worker process, it {how}{why}")

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
    """Return what the allocator keeps for reuse to the system.

    A process that is forked would fill copies of these pages, beside the parent's.
    """
    with suppress(AttributeError):  # other C libraries than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _fork(work: Callable[[], None]) -> int:
    """Start a process that does some work and ends; return its id."""
    stops, parent = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        with warnings.catch_warnings():  # of NumPy's threads, which forks stop for
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process = os.fork()
            except OSError as error:
                reason = f"{error.strerror}: no worker can be started"
                raise RuntimeError(f"{reason}, --threads 1 needs none") from error
        if process:
            return process
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:  # else it ended before that
                work()  # with the signals blocked
            code = 0
        except BaseException:
            print(traceback.format_exc(), file=sys.__stderr__, flush=True)
        finally:
            os._exit(code)  # what the parent would do at its end is left to it
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    """Answer what the parent sends, until it closes the connection or ends."""
    # A pipe does not end, and a file stays locked, while another process has it open.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > STANDARD_ERROR and int(name) != connection.fileno():
            with suppress(OSError):  # the list itself, which is closed
                os.close(int(name))
    gc.freeze()  # a collection would write to, and so copy, the pages of all objects
    with suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            result, error, trace = None, None, ""
            try:
                result = function(item)
            except BaseException as raised:
                error, trace = raised, traceback.format_exc()
            connection.send((result, error, trace))
