"""Run every command of the README and the tour, as a newcomer would paste them.

    python docs/check.py

Works in a copy of the source tree, in the environment that it is started in. Long
trainings get few steps and a small text takes the place of downloads; what needs what
is not here (a GPU, the network, an MPI) is named and left out. The two commands that
.ci/run pastes unchanged are left to it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/tour.md")
FEW_STEPS = (
    "--steps 12 --max-tokens 300 --vocab-size 300 --validate-every 6 --save-every 6 "
    "--validate-bleu 2 --average 1"
)


def commands(page: str) -> list[str]:
    """The lines of a page's shell blocks, except those that .ci/run takes."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- \w+ -->\n```sh\n.*?^```$", "", text, flags=re.M | re.S)
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line.partition(" #")[0].strip() for line in joined.splitlines() if line]


def reason_to_leave_out(command: str) -> str | None:
    if "--device cuda" in command:
        return "needs a GPU"
    if "minitransformer.corpora" in command:
        return "downloads: a small text stands in"
    if command.startswith("pip install"):
        return "what it installs is checked for below"
    if ("--ranks" in command or command.startswith("mpirun")) and not (
        find_spec("mpi4py") and shutil.which("mpirun")
    ):
        return "needs an MPI"
    if "export ctranslate2" in command and not find_spec("ctranslate2"):
        return "needs ctranslate2"
    if "minitransformer.plot" in command and not find_spec("matplotlib"):
        return "needs matplotlib"
    return None


def shortened(command: str, newest: str) -> str:
    """Fewer steps, and the name of a run that is there."""
    command = command.replace("runs/NAME", newest)
    if "--resume" in command:
        return command
    if "train.py" in command:
        command = f"{command} {FEW_STEPS}"
        if "runs/tour" not in command and "--dry-run" not in command:
            command += f" --run runs/check-{abs(hash(command))}"
    return command


def write_text(folder: Path) -> None:
    """What the commands read: a folder of data, and files of one's own."""
    (folder / "data" / "multi30k").mkdir(parents=True)
    pairs = [
        (f"a dog runs over {i} stones .", f"ein Hund rennt über {i} Steine .")
        for i in range(400)
    ]
    names = {
        "data/multi30k/train": pairs,
        "data/multi30k/val": pairs[:20],
        "my": pairs,
        "dev": pairs[:20],
        "new": pairs[:20],
        "photos": pairs[:20],
    }
    for name, lines in names.items():
        for side, language in enumerate(("en", "de")):
            text = "".join(line[side] + "\n" for line in lines)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")


def snippets() -> list[str]:
    """The README's snippets of Python; the tour's are run by tests/test_tour.py."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        ignored = shutil.ignore_patterns(".*", "runs", "cache", "data", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored)
        write_text(folder)
        environ = {**os.environ, "PYTHONPATH": str(folder)}
        newest = ""
        for page in PAGES:
            for command in commands(page):
                if why := reason_to_leave_out(command):
                    print(f"left out    {command}  ({why})")
                    continue
                line = shortened(command, newest)
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
                runs = sorted(folder.glob("runs/*"), key=lambda p: p.stat().st_mtime)
                newest = str(runs[-1].relative_to(folder)) if runs else ""
        for snippet in snippets():
            print("run         a snippet of Python")
            code = snippet.replace("runs/NAME", newest)
            command = [sys.executable, "-c", code]
            subprocess.run(command, cwd=folder, env=environ, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
