"""A script's `main` in a forked process, which has everything imported already."""

import gc
import os
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass

LONGEST = 60  # seconds


@dataclass
class Ended:
    """The exit code (or minus the signal that killed it), and what was printed."""

    code: int
    out: str
    err: str


class Forked:
    """`main(flags)` in a forked process."""

    def __init__(self, main, flags):
        self._printed = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        with warnings.catch_warnings():
            # Python 3.12 and later warn of forks if a library has started threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = os.fork()
        if not self.process:
            self._be_the_script(main, flags)

    def _be_the_script(self, main, flags):
        code = 70
        # Collecting garbage would write to, and so copy, every page of the parent.
        gc.freeze()
        try:
            for stream, (file, name) in enumerate(
                zip(self._printed, ("stdout", "stderr"), strict=True), start=1
            ):
                os.dup2(file.fileno(), stream)
                setattr(sys, name, open(stream, "w", encoding="utf-8"))  # noqa: SIM115
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

    def end(self):
        """Wait for the process to end by itself."""
        deadline, status = time.monotonic() + LONGEST, None
        while status is None:
            ended, found = os.waitpid(self.process, os.WNOHANG)
            if ended:
                status = found
            elif time.monotonic() > deadline:
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
                raise TimeoutError(f"a script did not end within {LONGEST} s")
            else:
                time.sleep(0.01)
        texts = []
        for file in self._printed:
            with file:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return Ended(os.waitstatus_to_exitcode(status), *texts)
