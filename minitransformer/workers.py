"""Workers that apply a function to many items: threads, or processes that are forked.

Only one thread at a time runs Python code. Threads that call NumPy every few
microseconds therefore wait for each other, processes do not. A forked process starts
within milliseconds and has all the memory of its parent, such as the parameters of a
model; what one of them changes, the others do not see, except in `shared_zeros`.

Only the thread that forks lives on in a new process, and locks that other threads hold
stay locked there. So a program has to allow forks, as the scripts do.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

A = TypeVar("A")
R = TypeVar("R")

# macOS has forks, too, but its library of matrix products does not survive them.
CAN_FORK = sys.platform == "linux"

_forks_allowed: ContextVar[bool] = ContextVar("forks_allowed", default=False)


@contextmanager
def allow_forks() -> Iterator[None]:
    """Let work that is divided among threads be divided among processes instead."""
    token = _forks_allowed.set(CAN_FORK)
    try:
        yield
    finally:
        _forks_allowed.reset(token)


def forks_allowed() -> bool:
    return _forks_allowed.get()


def shared_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of zeros that processes forked from now on share with this one.

    Its memory is freed with the last array that views it.
    """
    size = max(math.prod(shape), 1) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size)
    return np.ndarray(shape, dtype, memory)


@contextmanager
def parallel_map(
    function: Callable[[A], R], count: int
) -> Iterator[Callable[[Iterable[A]], Iterable[R]]]:
    """Yield a function that maps `function` over items, in order, with `count` workers.

    They are processes where forks are allowed, and threads elsewhere.
    """
    if count == 1:
        yield lambda items: map(function, items)
    elif forks_allowed():
        with Workers(function, count) as workers:
            yield workers.map
    else:
        with ThreadPoolExecutor(count) as pool:
            yield lambda items: pool.map(function, items)


class Workers(Generic[A, R]):
    """Forked processes that apply a function to the items that they are sent.

    They have the function and all that it refers to as it is now. Items and results are
    pickled. Signals that stop programs are left to this process, with which they end.
    """

    def __init__(self, function: Callable[[A], R], count: int) -> None:
        self._processes: dict[Connection, int] = {}  # the connection and id of each
        for _ in range(count):
            self._start(function)

    def _start(self, function: Callable[[A], R]) -> None:
        ours, theirs = Pipe()
        self._processes[ours] = 0
        stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        try:
            with warnings.catch_warnings():  # NumPy's library has threads, which is fine
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if not process:
                for number in stops:
                    signal.signal(number, signal.SIG_IGN)
                # While another process holds its other end, a pipe does not end.
                _serve(function, theirs, self._processes)
            self._processes[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()

    def __enter__(self) -> Workers[A, R]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def map(self, items: Iterable[A]) -> Iterator[R]:
        """Yield function(item) of each item, in order.

        Raises: what the function raises; RuntimeError if a worker is lost. Either ends
        all workers, as does a caller who does not wait for the last result.
        """
        numbered, number = enumerate(items), 0
        idle, busy, found = list(self._processes), dict[Connection, int](), {}
        try:
            while True:
                for connection, (place, item) in zip(tuple(idle), numbered):
                    idle.remove(connection)
                    busy[connection] = place
                    self._send(connection, item)
                while number in found:
                    yield found.pop(number)
                    number += 1
                if not busy:
                    break
                for connection in wait(list(busy)):
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
            self._lost(connection)

    def _receive(self, connection: Connection) -> R:
        try:
            result, error, trace = connection.recv()
        except (EOFError, OSError):
            self._lost(connection)
        if error is not None:
            raise error from RuntimeError(f"in a worker process:\n{trace}")
        return result

    def _lost(self, connection: Connection) -> NoReturn:
        _, status = os.waitpid(self._processes.pop(connection), 0)
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(
            f"expected an answer from a worker process, it ended with code {code}"
            f"{' (is there too little memory?)' * (code == -9)}"
        )

    def close(self) -> None:
        """End the processes, whatever they do."""
        while self._processes:
            connection, process = self._processes.popitem()
            connection.close()
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _serve(
    function: Callable[[Any], Any], connection: Connection, others: Iterable[Connection]
) -> NoReturn:
    """Answer what the parent sends, until it closes the connection or ends."""
    try:
        gc.freeze()  # a collection would write to every object, and so copy its page
        for other in others:
            other.close()
        while True:
            item = connection.recv()
            try:
                answer = function(item), None, ""
            except BaseException as error:
                answer = None, error, traceback.format_exc()
            connection.send(answer)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # leaving alone what the parent would do at its end
