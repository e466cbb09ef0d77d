"""translate.py without a new process."""

import translate


def run_translate(capfd, *flags):
    """Run translate.py without a new process; return its code, output and errors."""
    try:
        code = translate.main(list(flags))
    except SystemExit as error:
        code = error.code
    captured = capfd.readouterr()
    return code, captured.out, captured.err
