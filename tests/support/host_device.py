"""The kernels, built for the host once for each version of their source."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from minitransformer.backends.cuda import device

SHIMS = Path(__file__).parent / "host_cuda"
FLAGS = "-O1 -std=c++17 -shared -fPIC -fno-strict-aliasing -w".split()


# The types of activations, and those that tensor cores multiply once more.
VARIANTS = [(real,) for real in device.C_TYPES.values()]
VARIANTS += [
    (device.C_TYPES[name], tensor) for name, tensor in device.TENSOR_CORE_TYPES.items()
]


def kernel_names(source: str) -> list[str]:
    bounds = r"(?:__launch_bounds__\([\w, ]+\)[\s\\]+)?"
    found = re.findall(rf"__global__ void\s+{bounds}([\w#]+)\(", source)
    widths = re.findall(r"(?m)^ATTENTION\((\d+)\)", source)
    return [
        name.replace("##WIDTH", width)
        for name in found
        for width in (widths if "##" in name else [""])
    ]


def build(compiler: str, folder: Path) -> dict[tuple[str, ...], ctypes.CDLL]:
    """Compile the kernels for each type of activations; return the libraries.

    `folder` keeps those of the last source.
    """
    source = device.kernel_source()
    names = kernel_names(source)
    exports = "".join(f"EXPORT({name})\n" for name in names)
    parts = [source, exports, *(p.read_text() for p in sorted(SHIMS.iterdir())), *FLAGS]
    digest = hashlib.sha256("".join([compiler, *parts]).encode()).hexdigest()[:16]
    place = folder / digest
    if not place.exists():
        for old in folder.iterdir():
            shutil.rmtree(old, ignore_errors=True)
        building = folder / f"{digest}-{os.getpid()}"
        building.mkdir()
        (building / "host.cpp").write_text(source + exports)

        def compile_for(variant: tuple[str, ...]) -> None:
            library = building / f"{'-'.join(variant)}.so"
            output = ["-o", str(library), str(building / "host.cpp")]
            defined = [f"-DREAL={variant[0]}", f"-I{SHIMS}", "-DHOST_KERNELS"]
            defined += [f"-DTENSOR_CORES={name}" for name in variant[1:]]
            subprocess.run([compiler, *FLAGS, *defined, *output], check=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_for, VARIANTS))
        building.replace(place)
    return {v: ctypes.CDLL(str(place / f"{'-'.join(v)}.so")) for v in VARIANTS}
