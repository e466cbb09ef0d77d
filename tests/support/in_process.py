"""Scripts without a new process."""

import contextlib
import io
import signal

import translate
from minitransformer.training.lifecycle import STOP_SIGNALS


@contextlib.contextmanager
def signals_put_back():
    """Restore the handlers of the stop signals, whatever happens inside."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_translate(*flags):
    """Run translate.py as `run_main` does."""
    return run_main(translate.main, *flags)


def run_main(main, *flags):
    """Run a script without a new process; return its code, output and errors."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            with signals_put_back():
                code = main([str(flag) for flag in flags])
        except SystemExit as error:
            code = error.code
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return code, *texts


def rows(table):
    """Return the rows of a table in text, whose cells a bar divides."""
    return [line.split(" | ") for line in table.strip("\n").splitlines()]
