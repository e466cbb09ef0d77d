"""The commands of `minitransformer`, a file each; the two scripts use some of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from minitransformer.cli import Parser, exit_code
from minitransformer.runs.outputs import check_output


class Command(Parser):
    """The parser of a command, which may have an argument `output` to write to."""

    def run(
        self,
        arguments: Sequence[str],
        work: Callable[[argparse.Namespace], None],
        kind: str = "",
    ) -> int:
        """Do the work that arguments ask for, and return the exit code.

        The output is checked first; see `check_output` for its `kind`.
        """
        args = self.parse_args(arguments)

        def checked_work() -> None:
            if "output" in args:
                check_output(args.output, args, kind)
            work(args)

        return exit_code(self.prog, checked_work)
