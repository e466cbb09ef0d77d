"""Compile the CUDA kernels for GPUs that are not here, and refuse what they spill.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --arch sm_80 sm_100 --type bf16

It needs CUDA's compilers, nvcc and ptxas, and no GPU. A row gives a kernel's registers
a thread, its static shared memory and what it spills to memory, both in bytes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from minitransformer.backends.cuda import device
from minitransformer.system.machine import num_cores

# The types of activations, and with "+" the body of attention for tensor cores.
TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TENSOR_CORES = {f"{kind}+": TYPES[kind] for kind in ("fp16", "bf16")}


class Resources(NamedTuple):
    registers: int
    shared: int
    spilled: int


class Compiled(NamedTuple):
    """Kernels: their PTX, and by name what each takes."""

    ptx: str
    resources: dict[str, Resources]


def compile_kernels(arch: str, precision: str) -> Compiled:
    """Compile all kernels with the options that CuPy gives.

    Raises: CalledProcessError if a compiler fails or warns.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, ptx = Path(folder) / "kernels.cu", Path(folder) / "kernels.ptx"
        source.write_text(device.kernel_source(), encoding="utf-8")

        # From C++ to PTX, as NVRTC does on the machine with the GPU.
        name = (TYPES | TENSOR_CORES)[precision]
        options = device.compiler_options(name, precision in TENSOR_CORES)
        nvcc = ["nvcc", *options, "-ftz=true", "-ptx", f"-arch={arch}"]
        strict = ["-Werror", "all-warnings", "-o", str(ptx), str(source)]
        subprocess.run([*nvcc, *strict], check=True)

        # From PTX to the instructions of a GPU, as its driver does.
        cubin = ptx.with_suffix(".cubin")
        ptxas = ["ptxas", "-v", f"-arch={arch}", "-o", str(cubin), str(ptx)]
        done = subprocess.run(ptxas, check=True, capture_output=True, text=True)
        return Compiled(ptx.read_text(), resources(done.stderr))


def resources(report: str) -> dict[str, Resources]:
    """Read what `ptxas -v` prints."""
    kernels = {}
    for part in report.split("Compiling entry function ")[1:]:
        [name] = re.findall(r"^'(\w+)'", part)
        [registers] = re.findall(r"Used (\d+) registers", part)
        shared = re.findall(r"(\d+) bytes smem", part)
        spilled = re.findall(r"(\d+) bytes spill", part)
        kernels[name] = Resources(
            registers=int(registers),
            shared=sum(map(int, shared)),
            spilled=sum(map(int, spilled)),
        )
    return kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", nargs="+", default=["sm_90"], metavar="sm_NN")
    kinds = [*TYPES, *TENSOR_CORES]
    parser.add_argument("--type", nargs="+", default=kinds, choices=kinds)
    args = parser.parse_args()
    pool = ThreadPoolExecutor(num_cores())  # the compilers are processes
    spilled = 0
    for arch in args.arch:
        compiled = pool.map(partial(compile_kernels, arch), args.type)
        columns = [kernels.resources for kernels in compiled]
        print(f"\n{arch}: registers, bytes of shared memory, bytes spilled")
        print(f"{'kernel':<26}" + "".join(f"{kind:>20}" for kind in args.type))
        for name in sorted(columns[0]):
            row = [column[name] for column in columns]
            cells = [f"{r.registers:>8}{r.shared:>7}{r.spilled:>5}" for r in row]
            print(f"{name:<26}" + "".join(cells))
            spilled += sum(r.spilled for r in row)
    if spilled:
        print(f"kernels.py: error: {spilled} bytes are spilled", file=sys.stderr)
    return min(spilled, 1)


if __name__ == "__main__":
    sys.exit(main())
