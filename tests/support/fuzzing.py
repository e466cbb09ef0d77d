"""Fuzzing: a command that feeds the targets millions of inputs, guided by coverage.

    PYTHONPATH=.:tests python -m support.fuzzing --folder /tmp/fuzz --inputs 5000000

Each target runs in processes of its own, two of them at a time. The folder keeps what
was found: for each target the corpus, from which a later call goes on, the figures of
the table, and the inputs that failed. It needs the fuzzer atheris; the default tests
feed the targets randomly changed seeds instead.
"""

import argparse
import contextlib
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from support.scripts import ROOT, with_tests_on_path

# What an input may cost: seconds of the processor, and bytes of memory at once.
MAX_SECONDS = 2
MAX_BYTES = 512 << 20

# How many inputs of five million each target gets, by what they cost and may find.
SHARES = {
    "requests": 650_000,
    "metrics": 900_000,
    "settings": 900_000,
    "caches": 400_000,
    "trees": 700_000,
    "tokenizers": 970_000,
    "checkpoints": 250_000,
    "lines": 200_000,
    "arguments": 30_000,
}

# How many inputs a process takes. The fuzzer itself loses up to 4 kB at each of them.
INPUTS_PER_PROCESS = 50_000

FIGURES = {"inputs": 0, "seconds": 0.0, "slowest_ms": 0.0, "peak_mb": 0.0}


Row: TypeAlias = dict[str, Any]


def read_figures(folder: Path) -> Row:
    """Return what a target's folder says of the inputs that it has had so far."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / "figures.json").read_text())
    return dict(FIGURES)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, overwrite or insert some bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(out)) if out else 0
        # Headers and lengths stand at the beginning: look there as often as elsewhere.
        at = rng.choice((at, at % 64, at % 2048)) if out else 0
        end = min(len(out), at + rng.choice((1, 2, 8, 100)))
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:end]
        elif kind == 2:
            out[at:at] = out[at:end] * rng.choice((1, 3))
        elif kind == 3:
            out[at:end] = rng.randbytes(end - at)
        elif kind == 4:
            out[at:end] = rng.choice((b"\xff", b"\x00", b"\x7f")) * (end - at)
        else:
            del out[rng.randrange(len(out) + 1) :]
    return bytes(out)


def peak_megabytes() -> float:
    """The most memory that this process has held at once.

    `ru_maxrss` begins with what the process that started this one held.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 1024


class Judge:
    """Runs a target, keeps its figures and the shortest input of each failure.

    A failure is an exception that is no refusal, or an input that is too slow. Its name
    is that of the exception and of the place that raised it.
    """

    def __init__(self, run: Callable[[bytes], None], folder: Path) -> None:
        self.run, self.folder = run, folder
        self.figures = read_figures(folder)
        self.failures: dict[str, int] = {}
        self.started = time.monotonic()

    def __call__(self, data: bytes) -> None:
        started, figures = time.process_time(), self.figures
        try:
            if data:
                self.run(data)
        except BaseException as error:
            name = failure_name(error)
            self._keep(name, data, traceback.format_exc())
        milliseconds = 1000 * (time.process_time() - started)
        if milliseconds > 1000 * MAX_SECONDS:
            self._keep("slow", data, f"{milliseconds:.0f} ms")
        figures["slowest_ms"] = max(figures["slowest_ms"], milliseconds)
        figures["inputs"] += 1
        if figures["inputs"] % 5000 == 0:
            self.write()

    def write(self) -> None:
        now, figures = time.monotonic(), self.figures
        figures["seconds"] += now - self.started
        self.started = now
        figures["peak_mb"] = max(figures["peak_mb"], peak_megabytes())
        (self.folder / "figures.json").write_text(json.dumps(figures))

    def _keep(self, name: str, data: bytes, why: str) -> None:
        if len(data) < self.failures.get(name, sys.maxsize):
            self.failures[name] = len(data)
            path = self.folder / f"failure-{name}"
            path.write_bytes(data)
            path.with_name(path.name + ".txt").write_text(why, errors="replace")


def failure_name(error: BaseException) -> str:
    """Name an exception by its type and by the last of our lines that it passed."""
    places = [
        f"{Path(frame.filename).stem}-{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if str(ROOT) in frame.filename and "fuzz" not in Path(frame.filename).stem
    ] or [str(frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}-{places[-1]}"


def minimised(run: Callable[[bytes], None], data: bytes) -> bytes:
    """Return as short an input as leaving out parts gives, with the same failure."""

    def name_of(part: bytes) -> str | None:
        try:
            run(part)
        except BaseException as error:
            return failure_name(error)
        return None

    wanted, size = name_of(data), max(len(data) // 2, 1)
    while wanted and size:
        at = 1  # the first byte chooses the way of input
        while at < len(data):
            shorter = data[:at] + data[at + size :]
            if name_of(shorter) == wanted:
                data = shorter
            else:
                at += size
        size //= 2
    return data


def random_inputs(target, count: int, seed: int) -> Iterator[bytes]:
    """Yield the target's seeds, then randomly changed ones: `count` inputs in all."""
    rng = random.Random(seed)
    yield from target.seeds[:count]
    for _ in range(count - len(target.seeds)):
        data = rng.choice(target.seeds)
        changed = target.mutate(data, rng) if rng.random() < 0.5 else None
        yield changed or mutated(data, rng)


def fuzz_randomly(folder: Path, count: int, seed: int) -> list[Row]:
    """Feed each target `count` random inputs in this process; return their rows."""
    from support.fuzz_targets import TARGETS

    rows = []
    for name, kind in TARGETS.items():
        place = folder / name
        place.mkdir(parents=True)
        target = kind(place)
        judge = Judge(target.run, place)
        for data in random_inputs(target, count, seed):
            judge(data)
        judge.write()
        rows.append({"target": name, **judge.figures, "failures": [*judge.failures]})
    return rows


def limit_memory() -> None:
    """Let the process have MAX_BYTES more than now; beyond, there is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fuzz(name: str, inputs: int, folder: Path) -> None:
    """Feed a target until it has had so many inputs in all. This ends the process."""
    import atheris

    with atheris.instrument_imports(include=["minitransformer", "train", "translate"]):
        from support.fuzz_targets import TARGETS, hasten

    hasten()
    in_memory = Path("/dev/shm")
    place = in_memory if in_memory.is_dir() else folder
    work = tempfile.TemporaryDirectory(prefix="fuzz", dir=place)
    target, rng = TARGETS[name](Path(work.name)), random.Random()
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    words = folder / "words"
    quoted = ("".join(f"\\x{b:02x}" for b in w.encode()) for w in target.words)
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    judge = Judge(target.run, folder)
    done = judge.figures["inputs"]
    last = min(inputs, done + INPUTS_PER_PROCESS)

    def one_input(data: bytes) -> None:
        judge(data)
        if judge.figures["inputs"] >= last:
            judge.write()
            work.cleanup()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng.seed(seed)
        changed = target.mutate(data, rng) if data and seed % 2 else None
        if changed is None or len(changed) > max_size:
            return atheris.Mutate(data, max_size)
        return changed

    limits = [f"-max_len={max(target.max_length, *map(len, target.seeds))}"]
    limits += [f"-timeout={10 * MAX_SECONDS}", f"-rss_limit_mb={2 * MAX_BYTES >> 20}"]
    limits += [f"-runs={last - done}", f"-seed={1 + done}", f"-dict={words}"]
    limits += [f"-artifact_prefix={folder}/native-", "-close_fd_mask=3"]
    arguments = [sys.argv[0], *limits, "-reload=0", "-len_control=0", str(corpus)]
    atheris.Setup(arguments, one_input, custom_mutator=mutate)
    limit_memory()
    atheris.Fuzz()


def run_target(name: str, inputs: int, folder: Path) -> Row:
    """Fuzz a target in processes of its own, and return its row of the table.

    A process that ends before its inputs do is a failure; the next one goes on, unless
    it does not get further either.
    """
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "support.fuzzing", "--folder", str(folder)]
    command += ["--inputs", str(inputs), "--target", name]
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    figures, before, log = read_figures(folder), -1, folder / "log"
    while before < figures["inputs"] < inputs:
        before = figures["inputs"]
        with open(log, "ab") as file:
            ended = subprocess.run(
                command, env=with_tests_on_path() | threads, stdout=file, stderr=file
            )
        if ended.returncode and not list(folder.glob("native-*")):
            (folder / "native-exit").write_text(f"{ended.returncode}, see log")
        figures = read_figures(folder)
    said = log.read_text(errors="replace") if log.exists() else ""
    covered = [tuple(map(int, x)) for x in re.findall(r"cov: (\d+) ft: (\d+)", said)]
    edges, features = max(covered, default=(0, 0))
    found = [p for p in folder.iterdir() if re.match("failure-|native-", p.name)]
    failures = sum(path.suffix != ".txt" for path in found)
    measured = {"edges": edges, "features": features, "failures": failures}
    return {"target": name, **figures, **measured}


def table(rows: list[Row]) -> str:
    """Return the table of all targets, and their sum, as Markdown."""
    head = "kind inputs inputs/s edges features slowest,ms peak,MB failures".split()
    lines = ["| " + " | ".join(name.replace(",", ", ") for name in head) + " |"]
    lines.append("| --- |" + " ---: |" * (len(head) - 1))
    for row in rows:
        speed = row["inputs"] / (row["seconds"] or 1)
        lines.append(
            f"| {row['target']} | {row['inputs']:,} | {speed:,.0f} | {row['edges']:,} "
            f"| {row['features']:,} | {row['slowest_ms']:.0f} | {row['peak_mb']:.0f} "
            f"| {row['failures']} |"
        )
    total, failures = (sum(row[x] for row in rows) for x in ("inputs", "failures"))
    slowest, peak = (max(row[x] for row in rows) for x in ("slowest_ms", "peak_mb"))
    return "\n".join(
        [*lines, f"| all | {total:,} | | | | {slowest:.0f} | {peak:.0f} | {failures} |"]
    )


def fuzz_all(inputs: int, folder: Path, jobs: int = 2) -> list[Row]:
    """Divide `inputs` among all targets, and return the rows of the table."""
    total = sum(SHARES.values())
    shares = {name: share * inputs // total for name, share in SHARES.items()}
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda item: run_target(*item, folder), shares.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--inputs", type=int, default=5_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--target", choices=SHARES, help="used by the command itself")
    args = parser.parse_args()
    if args.target:
        fuzz(args.target, args.inputs, args.folder)
    rows = fuzz_all(args.inputs, args.folder.absolute(), args.jobs)
    print(table(rows))
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
