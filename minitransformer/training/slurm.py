"""What Slurm tells the tasks that `srun` starts, in the words of torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Jobs with near numbers have different ports for rank 0, above those of services.
FIRST_PORT, NUM_PORTS = 20_000, 10_000


def with_slurm(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Add RANK, WORLD_SIZE, ..., MASTER_PORT for a process that `srun` has started.

    Variables that are set keep their values. Nothing is added if another launcher has
    set RANK, or for the script of a job, which is no task.

    Raises: ValueError if a variable of Slurm is not as its manual says.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or "RANK" in environ:
        return environ
    name = "SLURM_STEP_TASKS_PER_NODE"
    try:
        counts = tasks_per_node(environ[name])
        job, step = (int(environ[f"SLURM_{x}_ID"]) for x in ("JOB", "STEP"))
        found = {
            "RANK": environ["SLURM_PROCID"],
            "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environ["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(counts[int(environ["SLURM_NODEID"])]),
            "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(FIRST_PORT + (job + step) % NUM_PORTS),
        }
    except (ValueError, IndexError):
        names = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", name
        got = ", ".join(f"{x}={environ.get(x)}" for x in names)
        raise ValueError(f"expected the variables that srun sets, got {got}") from None
    except KeyError as error:
        raise ValueError(f"expected {error} from srun, found none") from None
    return {**found, **environ}


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each machine: `4(x2),1` stands for 4, 4, 1.

    Raises: ValueError if it is not of this form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """Return the first of a list of machines: `gpu[07-09,12],x` begins with gpu07."""
    first = re.match(r"(?:[^][,]|\[[^]]*\])*", text)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0] if first else "")
