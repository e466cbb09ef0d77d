"""Mutation testing: change the code on purpose, and count what the tests notice.

    python tests/mutation.py                                        all of the core
    python tests/mutation.py minitransformer/engine/ops.py          one file
    python tests/mutation.py --digits 3 train.py                    every tenth mutant

mutmut makes the mutants, one small change each (another operator, another number, an
argument that is missing), and runs the tests that reach the changed function, quickest
first, until one fails. A mutant that no test notices survives. The command prints the
survivors and the share that was noticed; it fails below 95% of all mutants.

The tests run one after the other in processes forked from one that has imported
everything. The working tree is copied, never changed.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import libcst

ROOT = Path(__file__).parents[1]
LEAST_SHARE = 0.95
MAX_MEMORY = 4 << 30  # bytes, of a process

# The tests that are asked about each file, by its folder; the longest name counts.
# mutmut finds which of them reach a function.
PROPERTIES = "tests/properties/test_{}.py"
MODELS = PROPERTIES.format("reference"), PROPERTIES.format("invariance")
SEARCH = (
    "tests/translation/test_beam_search.py",
    "tests/translation/test_ensemble.py",
    PROPERTIES.format("search"),
)
LOOPS = PROPERTIES.format("training")
HISTORIES = PROPERTIES.format("histories")
BATCHES = "tests/text/test_batches.py", LOOPS
TESTS = {
    "minitransformer/engine/": (
        "tests/engine",
        "tests/model",
        "tests/backends/onednn/test_bfloat16.py",
        *MODELS,
    ),
    "minitransformer/model/": ("tests/model", *MODELS, *SEARCH),
    "minitransformer/backends/onednn/": ("tests/backends/onednn", MODELS[0]),
    "minitransformer/text/batches.py": BATCHES,
    "minitransformer/text/ids.py": BATCHES,
    "minitransformer/runs/": (
        "tests/runs",
        "tests/test_train_*.py",
        "tests/commands/test_average.py",
        LOOPS,
        HISTORIES,
    ),
    "minitransformer/training/optimizer.py": (
        "tests/training/test_optimizer.py",
        "tests/test_train_reference.py",
        LOOPS,
    ),
    "minitransformer/training/parallel.py": (
        "tests/training/test_parallel.py",
        MODELS[1],
    ),
    "minitransformer/translation/": (
        "tests/translation",
        SEARCH[-1],
        PROPERTIES.format("line_rules"),
    ),
    "train.py": ("tests/test_train_*.py", HISTORIES),  # in this process
}

# Expressions that are not changed, by the lines that they begin on: the words of an
# error message, and text of several words that has a line to itself, such as a help
# text. Tests say that such text is there, and not how it is worded.
NOT_MUTATED = [
    r"raise \w+\(",
    r"\bparser\.error\(",
    r"""^\s+(\w+ = )?("\w[^"{}]* [^"{}]*"|'\w[^'{}]* [^'{}]*')$""",
]
NOTICED = {"killed", "timeout", "caught by type check", "suspicious", "segfault"}


def main() -> int:
    """Test the files that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: the core")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    parser.add_argument(
        "--digits",
        default="0-9",
        help="a sample: only mutants whose number ends in one of these, such as 37",
    )
    options = parser.parse_args()
    everything = [path for path in tracked_files() if tests_of(path)]
    for file in options.files:
        if file not in everything:
            parser.error(f"expected one of {', '.join(everything)}, got {file!r}")
    mutants = noticed = 0
    print("| file | mutants | noticed | share |\n| --- | ---: | ---: | ---: |")
    for tests, files in groupby(options.files or everything, tests_of):
        for file, count, survivors in run_mutants(list(files), tests, options):
            mutants, noticed = mutants + count, noticed + count - len(survivors)
            print(row(file, count, count - len(survivors)), flush=True)
            print("".join(f"{survivor}\n" for survivor in survivors), file=sys.stderr)
    print(row("all of these", mutants, noticed))
    return int(noticed < LEAST_SHARE * mutants)


def row(name: str, mutants: int, noticed: int) -> str:
    """Return a row of the table."""
    return f"| {name} | {mutants:,} | {noticed:,} | {noticed / max(mutants, 1):.1%} |"


def tests_of(file: str) -> list[str]:
    """Return the tests that are asked about a file, or none if it is not mutated."""
    folders = [name for name in TESTS if file.startswith(name) and file.endswith(".py")]
    patterns = TESTS[max(folders, key=len)] if folders else ()
    return [str(p.relative_to(ROOT)) for x in patterns for p in sorted(ROOT.glob(x))]


def tracked_files() -> list[str]:
    """Return the files of the working tree that git does not ignore."""
    command = "git ls-files --cached --others --exclude-standard".split()
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    return sorted(name for name in names if (ROOT / name).is_file())


def run_mutants(
    files: list[str], tests: list[str], options: argparse.Namespace
) -> Iterator[tuple[str, int, list[str]]]:
    """Run tests against the mutants of `files`, in a copy of the tree.

    Yields: of each file its name, the number of mutants and the changes that no test
    noticed.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in tracked_files():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        # Python never looks again into a folder of its path that was absent at first.
        (tree / "mutants").mkdir()
        for source in (tree / file for file in files):
            module = libcst.parse_module(source.read_text())
            source.write_text(module.visit(DecoratorsBelow()).code)
        write_settings(tree, files, tests)
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, "PYTHONPATH": str(tree / "mutants")}
        # By the second pattern, the tests of all functions run once without a mutant: a
        # test that its name does not select ends all. It would fail for every mutant.
        names = f"*[{options.digits}] *[!0-9]"
        command = f"mutmut run --max-children {options.jobs} {names}"
        done = subprocess.run(
            command.split(),
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=limit_memory,
        )
        if done.returncode:
            sys.exit(f"mutmut failed on {files}:\n{done.stdout[-2000:]}")
        results = subprocess.check_output(
            ["mutmut", "results", "--all", "true"], cwd=tree, text=True, env=environment
        )
        states = dict(line.strip().split(": ") for line in results.splitlines() if line)
        states = {name: x for name, x in states.items() if x != "not checked"}
        for file in files:
            module_name = file.removesuffix(".py").replace("/", ".")
            mutants = [name for name in states if name.startswith(f"{module_name}.")]
            alive = [name for name in mutants if states[name] not in NOTICED]
            yield file, len(mutants), [describe(tree, name) for name in alive]


def limit_memory() -> None:
    """Let a mutant that asks for too much memory fail."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def write_settings(tree: Path, files: list[str], tests: list[str]) -> None:
    """Write mutmut's settings for files that the same tests are asked about."""
    package = "minitransformer"
    settings = {
        "source_paths": [package] if files[0].startswith(package) else files,
        "only_mutate": files,
        "also_copy": [package, "train.py", "translate.py", "benchmarks", "docs"],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["--hypothesis-profile=unshrunk"],
        "do_not_mutate_patterns": NOT_MUTATED,
        "timeout_multiplier": ["4"],
        "timeout_constant": ["15"],
    }
    lines = ["[mutmut]"]
    for name, values in settings.items():
        lines += [f"{name} =", *(f"  {value}" for value in values)]
    (tree / "setup.cfg").write_text("\n".join(lines) + "\n")


def describe(tree: Path, mutant: str) -> str:
    """Return "function: line before -> line after"."""
    diff = subprocess.check_output(["mutmut", "show", mutant], cwd=tree, text=True)
    function = re.sub(r"__mutmut_\d+$", "", mutant).rpartition(".")[2]
    body = diff.splitlines()[3:]
    before = " ".join(line[1:].strip() for line in body if line.startswith("-"))
    after = " ".join(line[1:].strip() for line in body if line.startswith("+"))
    return f"{function}: {before} -> {after}"


class DecoratorsBelow(libcst.CSTTransformer):
    """Turn `@decorator def f` into `def f` and, below it, `f = decorator(f)`.

    The two mean the same, but mutmut leaves out decorated functions, and with them
    every operation of the engine.
    """

    def leave_FunctionDef(  # noqa: N802
        self, original_node: libcst.FunctionDef, updated_node: libcst.FunctionDef
    ) -> libcst.FunctionDef | libcst.FlattenSentinel[libcst.BaseStatement]:
        if not updated_node.decorators:
            return updated_node
        value: libcst.BaseExpression = updated_node.name
        for decorator in reversed(updated_node.decorators):
            value = libcst.Call(decorator.decorator, [libcst.Arg(value)])
        target = libcst.AssignTarget(updated_node.name)
        applied = libcst.SimpleStatementLine([libcst.Assign([target], value)])
        function = updated_node.with_changes(decorators=[])
        return libcst.FlattenSentinel([function, applied])


if __name__ == "__main__":
    sys.exit(main())
