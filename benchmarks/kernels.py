"""What each CUDA kernel takes of a multiprocessor, as NVIDIA's compiler reports it.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --arch sm_80 sm_100 --type bf16

It needs CUDA's compilers, nvcc and ptxas, and no GPU. A row gives a kernel's registers
a thread, its static shared memory and what it spills to memory, both in bytes.

With CUDA's cuobjdump, too (also in the package nvidia-cuda-cuobjdump), it prints for
sm_90 how many instructions a warp runs in attention for one head and one sentence, as
sass.py counts them: on tensor cores, with a mask and without dropout.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import sass

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.attention import TILE_THREADS
from minitransformer.system.machine import num_cores

# The types of activations, and with "+" the body of attention for tensor cores.
TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TENSOR_CORES = {f"{kind}+": TYPES[kind] for kind in ("fp16", "bf16")}


# Attention's instructions are counted for sentences of these lengths, in a base model.
TOKENS = 28, 12
HEADS, HEAD_WIDTH, SENTENCES = 8, 64, 896


class Resources(NamedTuple):
    registers: int
    shared: int
    spilled: int


class Compiled(NamedTuple):
    """Kernels: their PTX, and by name what each takes.

    `instructions`, by name and then by the length of sentences, may be empty.
    """

    ptx: str
    resources: dict[str, Resources]
    instructions: dict[str, dict[int, float]]


def compile_kernels(arch: str, precision: str) -> Compiled:
    """Compile all kernels with the options that CuPy gives.

    Raises: CalledProcessError if a compiler fails or warns.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, ptx = Path(folder) / "kernels.cu", Path(folder) / "kernels.ptx"
        source.write_text(device.kernel_source(), encoding="utf-8")
        name = (TYPES | TENSOR_CORES)[precision]
        nvcc = ["nvcc", "-std=c++17", "-ftz=true", "-ptx", f"-arch={arch}"]
        nvcc.append(f"-DREAL={device.C_TYPES[name]}")
        if precision in TENSOR_CORES:
            nvcc.append(f"-DTENSOR_CORES={device.TENSOR_CORE_TYPES[name]}")
        strict = ["-Werror", "all-warnings", "-o", str(ptx), str(source)]
        subprocess.run([*nvcc, *strict], check=True)
        cubin = ptx.with_suffix(".cubin")
        ptxas = ["ptxas", "-v", f"-arch={arch}", "-o", str(cubin)]
        done = subprocess.run(
            [*ptxas, str(ptx)], check=True, capture_output=True, text=True
        )
        counted = arch == "sm_90" and precision in TENSOR_CORES
        counted = counted and shutil.which("cuobjdump") is not None
        instructions = attention_instructions(cubin) if counted else {}
        return Compiled(ptx.read_text(), resources(done.stderr), instructions)


def attention_instructions(cubin: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for name in ("attention", "attention_backward"):
        code = sass.disassemble(cubin, f"{name}_{HEAD_WIDTH}")
        found[f"{name}_{HEAD_WIDTH}"] = {
            tokens: sass.count_instructions(
                code, launch_constants(name, tokens), TILE_THREADS
            )
            for tokens in TOKENS
        }
    return found


def launch_constants(name: str, tokens: int) -> dict[int, int]:
    """Return the words of constants of a launch, by address.

    The parameters of attention are found in its source. Arrays of a base model lie at
    addresses that are multiples of 16 bytes.
    """
    source = device.kernel_source().replace("\\\n", " ")
    [signature] = re.findall(rf"\b{name}_##WIDTH\((.*?)\)", source, re.DOTALL)
    width = HEADS * HEAD_WIDTH
    values = {"queries": tokens, "keys": tokens, "d_k": HEAD_WIDTH, "d_v": HEAD_WIDTH}
    values |= {"dq_sums": 0, "stride_b": tokens}  # a mask of padding
    for matrix in "qkv":
        values |= {f"{matrix}_batch": tokens * width, f"{matrix}_row": width}
    # The size of a block and of the grid, and the base of the addresses of memory.
    words = {
        0: TILE_THREADS,
        4: 1,
        8: 1,
        12: HEADS,
        16: SENTENCES,
        20: 1,
        0x28: 1 << 24,
    }
    words |= {0x208: 0, 0x20C: 0}
    address = sass.PARAMETERS
    for i, parameter in enumerate(signature.split(",")):
        kind, _, parameter_name = parameter.strip().rpartition(" ")
        size = 8 if kind.endswith("*") or kind == "u64" else 4
        address = -(-address // size) * size
        value = values.get(parameter_name, i << 20 if kind.endswith("*") else 0)
        for place in range(0, size, 4):
            words[address + place] = value >> 8 * place & 0xFFFFFFFF
        address += size
    return words


def resources(report: str) -> dict[str, Resources]:
    """Read what `ptxas -v` prints."""
    found = {}
    for part in report.split("Compiling entry function ")[1:]:
        [name] = re.findall(r"^'(\w+)'", part)
        [registers] = re.findall(r"Used (\d+) registers", part)
        shared = re.findall(r"(\d+) bytes smem", part)
        spilled = re.findall(r"(\d+) bytes spill", part)
        sizes = sum(map(int, shared)), sum(map(int, spilled))
        found[name] = Resources(int(registers), *sizes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", nargs="+", default=["sm_90"], metavar="sm_NN")
    kinds = [*TYPES, *TENSOR_CORES]
    parser.add_argument("--type", nargs="+", default=kinds, choices=kinds)
    args = parser.parse_args()
    pool = ThreadPoolExecutor(num_cores())  # the compilers are processes
    for arch in args.arch:
        compiled = pool.map(partial(compile_kernels, arch), args.type)
        found = dict(zip(args.type, compiled, strict=True))
        columns = {kind: kernels.resources for kind, kernels in found.items()}
        print(f"\n{arch}: registers, bytes of shared memory, bytes spilled")
        print(f"{'kernel':<26}" + "".join(f"{kind:>20}" for kind in columns))
        for name in sorted(next(iter(columns.values()))):
            row = [column[name] for column in columns.values()]
            cells = [f"{r.registers:>8}{r.shared:>7}{r.spilled:>5}" for r in row]
            print(f"{name:<26}" + "".join(cells))
        for kind, kernels in found.items():
            for name, counts in kernels.instructions.items():
                numbers = (
                    f"{n:,.0f} ({tokens} tokens)" for tokens, n in counts.items()
                )
                print(f"{name}, {kind}: instructions of a warp: {', '.join(numbers)}")


if __name__ == "__main__":
    main()
