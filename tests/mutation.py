"""Mutation testing: change the code on purpose, and count what the tests notice.

    python tests/mutation.py                                        everything
    python tests/mutation.py minitransformer/engine/ops.py          one file
    python tests/mutation.py --shard 1/2 --output results/          half of everything

mutmut makes the mutants, one small change each (another operator, another number, an
argument that is missing), and runs the tests that reach the changed function, quickest
first, until one fails. A mutant that no test notices survives. Every survivor must be
listed in survivors.toml with the reason why it may live; the command fails if one is
not, or if fewer than 90% of the mutants of a file are noticed.

The tests run one after the other in processes forked from one that has imported
everything, at about ten mutants a second. The working tree is copied, never changed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import libcst

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SURVIVORS = Path(__file__).with_name("survivors.toml")
LEAST_SCORE = 0.9
MAX_MEMORY = 4 << 30  # bytes, of a process

# The tests that are asked about each file. mutmut finds which of them reach a function.
MODEL = (
    "tests/model/test_layers.py tests/model/test_loss.py tests/model/test_reference.py "
    "tests/model/test_restricted_attention.py tests/model/test_transformer.py"
)
GRADIENTS = "tests/engine/test_autograd.py tests/model/test_reference.py"
SEARCH = (
    "tests/translation/test_beam_search.py tests/translation/test_candidates.py "
    "tests/translation/test_ensemble.py"
)
DECODING = "tests/translation/test_incremental_decoding.py"
TRAINING = "tests/training/test_optimizer.py tests/training/test_parallel.py"
RUNS = "tests/runs"
ONEDNN = "tests/onednn"
SCRIPT = "tests/test_train_reference.py"
SCRIPT_IN_PARTS = "tests/test_train_flags.py tests/test_train_in_process.py"
TESTS = {
    "minitransformer/engine/autograd.py": GRADIENTS,
    "minitransformer/engine/backend.py": f"tests/engine/test_backend.py {GRADIENTS}",
    "minitransformer/machine.py": "tests/test_machine.py",
    "minitransformer/engine/ops.py": (
        "tests/engine/test_ops.py tests/model/test_reference.py "
        "tests/model/test_restricted_attention.py"
    ),
    "minitransformer/cuda/precision.py": "tests/cuda/test_precision.py",
    "minitransformer/engine/random_streams.py": "tests/engine/test_random_streams.py",
    "minitransformer/cuda/philox.py": "tests/cuda/test_philox.py",
    "minitransformer/model/kv_cache.py": f"tests/model/test_kv_cache.py {SEARCH}",
    "minitransformer/model/layers.py": f"{MODEL} {SEARCH}",
    "minitransformer/model/loss.py": (
        "tests/model/test_loss.py tests/model/test_reference.py"
    ),
    "minitransformer/model/parameters.py": (
        "tests/model/test_parameters.py tests/model/test_layers.py "
        "tests/model/test_reference.py"
    ),
    "minitransformer/model/transformer.py": f"{MODEL} {SEARCH}",
    "minitransformer/training/optimizer.py": f"{TRAINING} {SCRIPT}",
    "minitransformer/training/parallel.py": TRAINING,
    "minitransformer/translation/batch_translation.py": (
        f"{SEARCH} tests/translation/test_constraints.py "
        "tests/translation/test_lexicon.py tests/translation/test_sampling.py"
    ),
    "minitransformer/translation/beam_search.py": f"{DECODING} {SEARCH}",
    "minitransformer/translation/candidates.py": f"{DECODING} {SEARCH}",
    "minitransformer/translation/ensemble.py": f"{DECODING} {SEARCH}",
    "minitransformer/translation/histories.py": "tests/model/test_kv_cache.py",
    "minitransformer/translation/incremental_decoding.py": f"{DECODING} {SEARCH}",
    "minitransformer/onednn/bfloat16.py": ONEDNN,
    "minitransformer/onednn/float32.py": ONEDNN,
    "minitransformer/onednn/floats.py": ONEDNN,
    "minitransformer/onednn/int8.py": ONEDNN,
    "minitransformer/onednn/kernels.py": ONEDNN,
    "minitransformer/text/batches.py": "tests/text/test_batches.py",
    "minitransformer/text/ids.py": "tests/text/test_ids.py tests/text/test_batches.py",
    "minitransformer/runs/average.py": RUNS,
    "minitransformer/runs/checkpoint.py": RUNS,
    "minitransformer/runs/run_directory.py": RUNS,
    "train.py": f"{SCRIPT} {SCRIPT_IN_PARTS}",
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


@dataclass
class Result:
    """The mutants of one file."""

    file: str
    mutants: int
    noticed: int
    seconds: float
    survivors: list[str] = field(default_factory=list)

    @property
    def score(self) -> float:
        """The share of the mutants that some test noticed."""
        return self.noticed / max(self.mutants, 1)


def main(arguments: list[str] | None = None) -> int:
    """Test the files that are asked for, print the table, and judge the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: all")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="part I of N")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    parser.add_argument("--output", type=Path, help="folder for a JSON file per file")
    options = parser.parse_args(arguments)
    for file in options.files:
        if file not in TESTS:
            parser.error(f"no tests are named for {file!r}; known: {', '.join(TESTS)}")
    shard, shards = map(int, options.shard.split("/"))
    files = options.files or list(TESTS)[shard - 1 :: shards]

    failed = False
    print("| file | mutants | noticed | share | seconds |", flush=True)
    print("| --- | ---: | ---: | ---: | ---: |", flush=True)
    for file in files:
        result = run_mutants(file, options.jobs)
        print(
            f"| {file} | {result.mutants} | {result.noticed} | {result.score:.1%} "
            f"| {result.seconds:.0f} |",
            flush=True,
        )
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            path = options.output / (file.replace("/", ".") + ".json")
            path.write_text(json.dumps(asdict(result), indent=1) + "\n")
        new = unexplained(result)
        for survivor in new:
            print(f"not noticed, and not in {SURVIVORS.name}: {survivor}", flush=True)
        failed |= bool(new) or result.score < LEAST_SCORE
    return int(failed)


def unexplained(result: Result) -> list[str]:
    """The survivors of a file that survivors.toml does not list."""
    listed = tomllib.loads(SURVIVORS.read_text())
    patterns = [re.compile(rule["pattern"]) for rule in listed["everywhere"]]
    groups = [group for group in listed["group"] if group["file"] == result.file]
    known = {mutant for group in groups for mutant in group["mutants"]}
    return [
        survivor
        for survivor in result.survivors
        if survivor not in known and not any(p.search(survivor) for p in patterns)
    ]


def run_mutants(file: str, jobs: int) -> Result:
    """Run the tests of `file` against each of its mutants, in a copy of the tree."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        # Python never looks again into a folder of its path that was absent at first.
        (tree / "mutants").mkdir()
        source = tree / file
        source.write_text(apply_decorators_below(source.read_text()))
        write_settings(tree, file)
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree / "mutants"),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        log = tree / "mutmut.log"
        with log.open("w") as output:
            code = subprocess.call(
                ["mutmut", "run", "--max-children", str(jobs)],
                cwd=tree,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=limit_memory,
            )
        if code:
            sys.exit(f"mutmut failed on {file}:\n{log.read_text()[-2000:]}")
        results = subprocess.check_output(
            ["mutmut", "results", "--all", "true"], cwd=tree, text=True, env=environment
        )
        states = dict(line.strip().split(": ") for line in results.splitlines() if line)
        alive = [name for name, state in states.items() if state not in NOTICED]
        survivors = [describe(tree, name, states[name]) for name in alive]
    return Result(
        file=file,
        mutants=len(states),
        noticed=len(states) - len(alive),
        seconds=time.monotonic() - start,
        survivors=survivors,
    )


def limit_memory() -> None:
    """Let a mutant that asks for too much memory fail."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def copy_tree(target: Path) -> None:
    """Copy the files of the working tree that git does not ignore."""
    listing = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
    )
    for name in listing.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def write_settings(tree: Path, file: str) -> None:
    """Write mutmut's settings for one file."""
    package = "minitransformer"
    settings = {
        "source_paths": [package if file.startswith(package) else file],
        "only_mutate": [file],
        "also_copy": [package, "train.py", "translate.py", "benchmarks", "docs"],
        "pytest_add_cli_args_test_selection": TESTS[file].split(),
        "do_not_mutate_patterns": NOT_MUTATED,
        "timeout_multiplier": ["2"],
        "timeout_constant": ["5"],
    }
    lines = ["[mutmut]"]
    for name, values in settings.items():
        lines += [f"{name} =", *(f"  {value}" for value in values)]
    (tree / "setup.cfg").write_text("\n".join(lines) + "\n")


def describe(tree: Path, mutant: str, state: str) -> str:
    """Return "function: line before -> line after", which later edits rarely change."""
    diff = subprocess.check_output(["mutmut", "show", mutant], cwd=tree, text=True)
    function = re.sub(r"__mutmut_\d+$", "", mutant).rpartition(".")[2]
    function = function.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
    body = diff.splitlines()[3:]
    before = " ".join(line[1:].strip() for line in body if line.startswith("-"))
    after = " ".join(line[1:].strip() for line in body if line.startswith("+"))
    suffix = " (no test reaches it)" if state == "no tests" else ""
    return f"{function}: {before} -> {after}{suffix}"


class DecoratorsBelow(libcst.CSTTransformer):
    """Turn `@decorator def f` into `def f` and, below it, `f = decorator(f)`.

    The two mean the same, but mutmut leaves out decorated functions, and with them
    every operation of the engine.
    """

    def leave_FunctionDef(  # noqa: N802
        self, original_node: libcst.FunctionDef, updated_node: libcst.FunctionDef
    ) -> libcst.FunctionDef | libcst.FlattenSentinel[libcst.BaseStatement]:
        names = [decorator.decorator for decorator in updated_node.decorators]
        if not names:
            return updated_node
        value: libcst.BaseExpression = updated_node.name
        for name in reversed(names):
            value = libcst.Call(name, [libcst.Arg(value)])
        applied = libcst.SimpleStatementLine(
            [libcst.Assign([libcst.AssignTarget(updated_node.name)], value)]
        )
        function = updated_node.with_changes(decorators=[])
        return libcst.FlattenSentinel([function, applied])


def apply_decorators_below(source: str) -> str:
    """Return `source` with the decorators of functions as calls below them."""
    return libcst.parse_module(source).visit(DecoratorsBelow()).code


if __name__ == "__main__":
    sys.exit(main())
