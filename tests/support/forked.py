"""A script's `main` in a forked process, which something happens to on the way.

A fork has everything imported already, so that thousands of trainings are affordable,
and it can be killed as any process can. Its operations on files are counted by an audit
hook, which Python calls before each of them.
"""

import os
import select
import signal
import sys
import time
import warnings
from dataclasses import dataclass

FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
LONGEST = 60  # seconds


@dataclass
class Ended:
    """The exit code (or minus the signal that killed it), and what was printed."""

    code: int
    out: str
    err: str


class Forked:
    """`main(flags)` in a forked process.

    Before operation `at` on a file whose name begins with `prefix`, the process sends
    itself the `signals`, or waits for `release` if there are none.
    """

    def __init__(self, main, flags, prefix="", at=0, signals=()):
        self._printed = os.pipe(), os.pipe()
        self._paused, self._released = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of forks if a library has started threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = os.fork()
        if not self.process:
            self._be_the_script(main, flags, prefix, at, signals)
        for pipe in (*self._printed, self._paused):
            os.close(pipe[1])
        os.close(self._released[0])

    def _be_the_script(self, main, flags, prefix, at, signals):
        code = 70
        try:
            for (_, end), stream in zip(self._printed, (1, 2), strict=True):
                os.dup2(end, stream)
            for name in ("stdout", "stderr"):
                file = open(1 + (name == "stderr"), "w", encoding="utf-8")  # noqa: SIM115
                setattr(sys, name, file)
            for pipe in (*self._printed, self._paused):
                os.close(pipe[0])
            os.close(self._released[1])
            if at:
                sys.addaudithook(self._hook(prefix, at, signals))
            try:
                code = main(flags)
            except SystemExit as error:
                code = error.code
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException as error:
            os.write(2, f"Traceback: {error!r}\n".encode())
        finally:
            os._exit(code)

    def _hook(self, prefix, at, signals):
        left = at

        def hook(event, args):
            nonlocal left
            if event in FILE_EVENTS and str(args[0]).startswith(prefix):
                left -= 1
                if not left:
                    for number in signals:
                        os.kill(os.getpid(), number)
                    if not signals:
                        os.write(self._paused[1], b".")
                        os.read(self._released[0], 1)

        return hook

    def wait_until_paused(self):
        """Return whether the process waits to be released; otherwise it has ended."""
        ready, _, _ = select.select([self._paused[0]], [], [], LONGEST)
        return bool(ready) and os.read(self._paused[0], 1) == b"."

    def release(self):
        os.write(self._released[1], b".")

    def end(self):
        """Wait for the process to end by itself."""
        printed, deadline = {pipe[0]: b"" for pipe in self._printed}, time.monotonic()
        deadline += LONGEST
        left = set(printed)
        while left:
            ready, _, _ = select.select(list(left), [], [], deadline - time.monotonic())
            if not ready:
                os.kill(self.process, signal.SIGKILL)
                raise TimeoutError(f"a script did not end within {LONGEST} s")
            for end in ready:
                part = os.read(end, 1 << 16)
                printed[end] += part
                if not part:
                    left.remove(end)
        _, status = os.waitpid(self.process, 0)
        for end in (*printed, self._paused[0], self._released[1]):
            os.close(end)
        texts = (text.decode(errors="replace") for text in printed.values())
        return Ended(os.waitstatus_to_exitcode(status), *texts)


def run_forked(main, flags, prefix="", at=0, signals=(signal.SIGKILL,)):
    """Run `main(flags)` in a forked process until it ends."""
    return Forked(main, flags, prefix, at, signals).end()
