"""Check that the commands of the README, CONTRIBUTING and the tour work.

    python docs/check.py

Each command runs in a copy of the source tree, in the environment of this script. Long
trainings get few steps, and a small text takes the place of downloads. A command that
needs a GPU, the network or a library that is not installed is named and left out.
The README's first two commands are left to .ci/run, which runs them unchanged.

It also checks that docs/flags.md names every flag of both scripts, and no other.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/tour.md")
FEW_STEPS = (
    "--steps 12 --max-tokens 300 --vocab-size 300 --validate-every 6 --save-every 6 "
    "--validate-bleu 2 --average 1"
)


def commands(page: str) -> list[str]:
    """Return the commands of a page's shell blocks, except those that .ci/run runs."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- \w+ -->\n```sh\n.*?^```$", "", text, flags=re.M | re.S)
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line.partition(" #")[0].strip() for line in joined.splitlines() if line]


def reason_to_leave_out(command: str) -> str | None:
    if "--device cuda" in command:
        return "needs a GPU"
    if "minitransformer corpora" in command:
        return "downloads a corpus: a small text takes its place"
    if command.startswith("pip install"):
        return "installs packages into the environment"
    if command.startswith(".ci/"):
        return "runs the linters and the tests"
    if ("--ranks" in command or command.startswith("mpirun")) and not (
        find_spec("mpi4py") and shutil.which("mpirun")
    ):
        return "needs an MPI"
    if "export ctranslate2" in command and not find_spec("ctranslate2"):
        return "needs ctranslate2"
    if "minitransformer plot" in command and not find_spec("matplotlib"):
        return "needs matplotlib"
    return None


def shortened(command: str) -> str:
    """Return the command with fewer steps, and with a run of its own."""
    if "--resume" in command:
        return command
    if "train.py" in command:
        command = f"{command} {FEW_STEPS}"
        if "--run " not in command and "--dry-run" not in command:
            command += f" --run runs/check-{abs(hash(command))}"
    return command


def write_text(folder: Path) -> None:
    """Write what the commands read: a corpus, and a preset."""
    (folder / "data" / "multi30k").mkdir(parents=True)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [preset] = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folder / "mine.json").write_text(preset, encoding="utf-8")
    pairs = [
        (f"a dog runs over {i} stones .", f"ein Hund rennt über {i} Steine .")
        for i in range(400)
    ]
    names = {
        "data/multi30k/train": pairs,
        "data/multi30k/val": pairs[:20],
    }
    for name, lines in names.items():
        for side, language in enumerate(("en", "de")):
            text = "".join(line[side] + "\n" for line in lines)
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode()))


def snippets() -> list[str]:
    """Return the README's Python snippets; tests/docs/test_tour.py runs the others."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def check_flags() -> None:
    """Raise ValueError unless docs/flags.md names exactly the flags of both scripts."""
    known = set()
    for script in ("train.py", "translate.py"):
        command = [sys.executable, ROOT / script, "--help-all"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
        known.update(re.findall(r"\[(--[\w-]+)", usage.stdout))
    page = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    if wrong := known ^ set(re.findall(r"`(--[\w-]+)`", page)):
        raise ValueError(f"docs/flags.md: unknown or missing {sorted(wrong)}")


def main() -> int:
    check_flags()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        folder.mkdir()
        for part in (*ROOT.glob("*.*"), ROOT / "minitransformer"):
            copy = shutil.copytree if part.is_dir() else shutil.copy
            if not part.name.startswith("."):
                copy(part, folder / part.name)
        write_text(folder)
        environ = {**os.environ, "PYTHONPATH": str(folder)}
        for page in PAGES:
            for command in commands(page):
                if why := reason_to_leave_out(command):
                    print(f"left out    {command}  ({why})")
                    continue
                line = shortened(command)
                print(f"run         {command}", flush=True)
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", line],
                    cwd=folder,
                    env=environ,
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    print(f"failed with code {done.returncode}: {line}\n{done.stderr}")
                    return 1
        for snippet in snippets():
            print("run         a snippet of Python")
            command = [sys.executable, "-c", snippet]
            subprocess.run(command, cwd=folder, env=environ, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
