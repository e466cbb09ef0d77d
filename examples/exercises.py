"""Write a part of the Transformer yourself; a test says when it is right.

    python examples/exercises.py                    # the list, the easiest first
    python examples/exercises.py schedule           # take it out, and run its test
    python examples/exercises.py schedule --hint

The part is taken out of a copy of the package, in build/exercises. Write it there and
run the command again. To begin anew, delete the copy.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A name, the file and function that are taken out, the tests, and below it a hint.
LIST = """\
penalty translation/beam_search.py length_penalty translation 'exhaustive or penalty'
  Equation 14 of Wu et al. (2016). A length of 1 gives 1.
schedule training/optimizer.py learning_rate training 'schedule or linearly or decay'
  Divide equation 3 by its value at its peak. Two ratios are left; the smaller counts.
mask model/transformer.py causal_mask properties 'later_tokens or reference'
  Row t is the word that looks, column s the word that is looked at: s <= t.
linear engine/ops.py linear.vjp engine 'central_differences and linear'
  g W^T and x^T g have the shapes of x and W. Where the ReLU gave 0, g counts for 0.
norm engine/ops.py add_layer_norm.vjp engine 'central_differences and layer_norm'
  With d = g gain: dx = (d - mean(d) - normal mean(d normal)) / deviation.
attention engine/ops.py attention.vjp engine 'central_differences and attention'
  From the last product to the first. Of P = softmax(S): dS = P (dP - sum(dP P)).
adam training/optimizer.py Adam.update properties 'adam'
  Both moments begin at 0: divide them by 1 - beta^step. Change the arrays in place.
"""


def take_out(path, name):
    """Replace the body of a function by an error, below its docstring."""
    text = path.read_text(encoding="utf-8")
    node = ast.parse(text)
    for part in name.split("."):  # a function in a class or in a function
        node = next(x for x in ast.walk(node) if getattr(x, "name", None) == part)
    body = node.body[ast.get_docstring(node) is not None :]
    lines = text.splitlines(keepends=True)
    error = f'raise NotImplementedError("write {name} here")\n'
    lines[body[0].lineno - 1 : body[-1].end_lineno] = [" " * body[0].col_offset + error]
    path.write_text("".join(lines), encoding="utf-8")


def main():
    entry = r"(\w+) (\S+) (\S+) (\S+) '(.*)'\n  (.*)\n"
    exercises = {name: rest for name, *rest in re.findall(entry, LIST)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exercise", nargs="?", choices=exercises)
    parser.add_argument("--hint", action="store_true")
    args = parser.parse_args()
    if args.exercise is None:
        print(*(f"{x:10}{y[1]} in {y[0]}" for x, y in exercises.items()), sep="\n")
        return 0
    file, function, tests, chosen, hint = exercises[args.exercise]
    if args.hint:
        print(hint)
        return 0
    copy = ROOT / "build" / "exercises" / args.exercise
    if not copy.exists():
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        for part in ("minitransformer", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        for part in ("pyproject.toml", "train.py", "translate.py"):
            shutil.copy(ROOT / part, copy)
        take_out(copy / "minitransformer" / file, function)
        print(f"write {function} in {copy}/minitransformer/{file}", flush=True)
    command = [sys.executable, "-m", "pytest", "-x", "--tb=short", f"tests/{tests}"]
    return subprocess.run([*command, "-k", chosen], cwd=copy).returncode


if __name__ == "__main__":
    sys.exit(main())
