"""The kernels, built for the host once for each version of their source."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from minitransformer.cuda import device

SHIMS = Path(__file__).parent / "host_cuda"
FLAGS = "-O1 -std=c++17 -shared -fPIC -fno-strict-aliasing -w".split()


def kernel_names(source: str) -> list[str]:
    bounds = r"(?:__launch_bounds__\(\w+\)\s+)?"
    return re.findall(rf"__global__ void\s+{bounds}(\w+)\(", source)


def build(compiler: str, folder: Path) -> dict[str, ctypes.CDLL]:
    """Compile the kernels for each type of activations; return the libraries by it.

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

        def compile_for(real: str) -> None:
            output = ["-o", str(building / f"{real}.so"), str(building / "host.cpp")]
            defined = [f"-DREAL={real}", f"-I{SHIMS}"]
            subprocess.run([compiler, *FLAGS, *defined, *output], check=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_for, device.C_TYPES.values()))
        building.replace(place)
    names = device.C_TYPES.values()
    return {real: ctypes.CDLL(str(place / f"{real}.so")) for real in names}
