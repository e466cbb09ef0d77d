"""Scripts without a new process."""

import contextlib
import io

import translate


def run_translate(capfd, *flags):
    """Run translate.py without a new process; return its code, output and errors."""
    try:
        code = translate.main(list(flags))
    except SystemExit as error:
        code = error.code
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def run_main(main, *flags):
    """As `run_translate`, for any script and without a fixture that captures."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = main(list(flags))
        except SystemExit as error:
            code = error.code
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return code, *texts
