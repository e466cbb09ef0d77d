"""Whether a faster path gives on this GPU what the plain one gives.

What no test has run on a device does not decide a result there by itself. At first use
both paths compute the same small inputs, and the faster one is used only if they agree.
The verdict is kept in CuPy's cache folder, so that the next process with the same GPU,
driver, libraries and source need not compare again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.engine.backend import Array, to_host
from minitransformer.system.files import make_folder, write_bytes

FILE = "minitransformer-verdicts.json"
MAX_KEPT = 100  # verdicts, of which the oldest go

# The largest difference of two paths, relative to the largest number, in units of the
# last place of the activations' type. In 16 bits and tf32 the roundings of inputs and
# results prevail. In float32 two orders of summation do: of 264 terms, they differ by
# up to 5 units.
MAX_DIFFERENCE = {"float32": 16, "tf32": 8, "float16": 8, "bfloat16": 8}
MANTISSA_BITS = {"float32": 23, "tf32": 10, "float16": 10, "bfloat16": 7}


def agrees(
    gpu: device.Device,
    path: str,
    dtype: np.dtype[Any],
    results: Callable[[], Iterator[tuple[Array, Array]]],
    fallback: str,
    version: Callable[[], object] = lambda: "",
) -> bool:
    """Return whether `path` may be used on this GPU, found out once.

    `results` yields arrays of the plain path and of the other. `version` returns that
    of a library that the path needs, or raises what is wrong with it. If the path may
    not be used, a warning says why, and what happens instead (`fallback`).
    """
    precision = "tf32" if gpu.tf32 and dtype == np.float32 else dtype.name
    name = f"{path} in {precision}"
    if name in gpu.verdicts:
        return gpu.verdicts[name]
    problem = "it gives other results"
    try:
        key = f"{name}: {_environment(gpu)} {version()}".strip()
        agree = _read().get(key)
        if agree is None:
            limit = MAX_DIFFERENCE[precision] * 2.0 ** -MANTISSA_BITS[precision]
            agree = all(_are_close(*pair, limit) for pair in results())
            _keep(key, agree)
    except Exception as error:  # of a compiler, a library or the driver: many kinds
        agree, problem = False, str(error).partition("\n")[0]
    if not agree:
        warnings.warn(f"{fallback} in {precision}: {problem}", stacklevel=2)
    gpu.verdicts[name] = agree
    return agree


def _are_close(plain: Array, other: Array, limit: float) -> bool:
    a, b = (to_host(x).astype(np.float64) for x in (plain, other))
    return bool(np.abs(a - b).max() <= limit * np.abs(a).max())


def _environment(gpu: device.Device) -> str:
    """Return what a verdict depends on: the GPU, its driver, CUDA, CuPy and source."""
    xp, runtime = gpu.xp, gpu.xp.cuda.runtime
    chosen = xp.cuda.Device()
    name = runtime.getDeviceProperties(chosen.id)["name"].decode()
    versions = runtime.driverGetVersion(), runtime.runtimeGetVersion(), xp.__version__
    return " ".join(map(str, (name, chosen.compute_capability, *versions, _source())))


@functools.cache
def _source() -> str:
    """Return a digest of the kernels and of what launches them."""
    files = sorted(device.KERNELS.parent.glob("*.py"))
    parts = [device.kernel_source().encode(), *(path.read_bytes() for path in files)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _path() -> Path:
    """Return the file of verdicts, in the folder where CuPy keeps compiled kernels."""
    folder = os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache"
    return Path(folder).expanduser() / FILE


def _read() -> dict[str, bool]:
    """Return the verdicts that were kept, none if the file is missing or damaged."""
    with suppress(OSError, RuntimeError, ValueError):
        found = json.loads(_path().read_bytes())
        if isinstance(found, dict) and {*map(type, found.values())} <= {bool}:
            return found
    return {}


def _keep(key: str, agree: bool) -> None:
    """Add a verdict to the file; where none can be written, do without."""
    with suppress(OSError, RuntimeError):
        verdicts = {**dict([*_read().items()][1 - MAX_KEPT :]), key: agree}
        make_folder(_path().parent)
        write_bytes(_path(), json.dumps(verdicts, indent=1).encode())
