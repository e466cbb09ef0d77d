"""Write a model between two: what one knew before training, and what another learned.

    python interpolate.py before.safetensors after.safetensors between.safetensors \
        --weight 0.5

Each parameter is half way from the first model's to that of the second, which went on
from the first. Much of what the training unlearned comes back, and much of what it
learned stays (WiSE-FT, Wortsman et al., 2022).
"""

import argparse
from pathlib import Path

from minitransformer.runs.checkpoint import load, save
from minitransformer.runs.models import find_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    help = "a run or a checkpoint"
    parser.add_argument("before", type=Path, help=help)
    parser.add_argument("after", type=Path, help=help)
    parser.add_argument("output", type=Path, help="the checkpoint to write")
    help = "the share of the second (between 0 and 1)"
    parser.add_argument("--weight", type=float, required=True, help=help)
    args = parser.parse_args()
    before, after = (load(find_checkpoint(x)) for x in (args.before, args.after))
    parameters = after.parameters.data
    parameters *= args.weight
    parameters += (1 - args.weight) * before.parameters.data
    save(args.output, after)


if __name__ == "__main__":
    main()
