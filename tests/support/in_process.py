"""Scripts without a new process."""

import contextlib
import io
import signal

import translate
from minitransformer.training.lifecycle import STOP_SIGNALS


def run_translate(capfd, *flags):
    """Run translate.py without a new process; return its code, output and errors."""
    try:
        code = translate.main(list(flags))
    except SystemExit as error:
        code = error.code
    captured = capfd.readouterr()
    return code, captured.out, captured.err


@contextlib.contextmanager
def signals_put_back():
    """Restore the handlers of the stop signals, whatever happens inside."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_main(main, *flags):
    """As `run_translate`, for any script and without a fixture that captures."""
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
