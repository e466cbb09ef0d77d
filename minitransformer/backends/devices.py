"""The one place that opens devices: the processor, or a GPU with its fused kernels.

CUDA's part of the package is imported only where a GPU is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from minitransformer.engine.backend import register_backend
from minitransformer.settings.options import UsageError
from minitransformer.system.machine import multiplies_bf16_fast, tune_allocator

if TYPE_CHECKING:
    from minitransformer.backends.onednn.bfloat16 import Bfloat16Kernels
    from minitransformer.backends.onednn.int8 import Int8Kernels
    from minitransformer.runs.checkpoint import Checkpoint
    from minitransformer.settings.config import TrainingConfig
    from minitransformer.training.distributed import Communicator
    from minitransformer.training.optimizer import Optimizer
    from minitransformer.training.parallel import ParallelModel

# The precisions of a processor with products by oneDNN.
ONEDNN = ("bf16", "int8")


@dataclass(frozen=True)
class Device:
    """An open device: its array library, and its number formats.

    `low_precision` is the 16-bit type of mixed precision on a GPU, if that was chosen.
    Work may be divided among `num_threads` threads or forked processes.
    """

    name: str
    xp: ModuleType
    precision: str
    low_precision: np.dtype[Any] | None
    num_threads: int

    @property
    def description(self) -> str:
        """The device and how it computes, in a few words."""
        if self.name == "cpu":
            products = ""
            if self.precision != "fp32":
                products = f", products in {self.precision}"
                if self.precision == "bf16" and not multiplies_bf16_fast():
                    products += " (slower than fp32 on this processor)"
            workers = f"{self.num_threads} worker{'s' * (self.num_threads > 1)}"
            return f"cpu, {workers}{products}"
        return f"{self.name}, {self.precision}"


def check_device(name: str) -> None:
    """Raises: UsageError or RuntimeError if there is no device of this name."""
    if name != "cpu":
        from minitransformer.backends.cuda.device import find_gpu

        find_gpu(name)


def open_device(
    name: str, precision: str | None = None, num_threads: int | None = None
) -> Device:
    """Open `cpu`, `cuda` or `cuda:N` for computing in `precision`.

    Without a precision, a GPU computes in bf16 if it can and in fp32 otherwise. On a
    processor, work may be divided among `num_threads` processes. The last call decides
    the precision of all models of this process.

    Raises: UsageError if the name is unknown or the device has no such precision,
    RuntimeError if there is no such GPU or a library that it needs is missing.
    """
    if num_threads is not None and (type(num_threads) is not int or num_threads < 1):
        raise UsageError(f"threads: expected int of at least 1, got {num_threads!r}")
    # A processor, with oneDNN's kernels for its precisions.
    if name == "cpu":
        if precision not in (None, "fp32", *ONEDNN):
            expected = "expected fp32 or bf16 with --device cpu, or int8 to translate"
            raise UsageError(f"--precision: {expected}, got {precision}")
        tune_allocator()
        register_backend(np.ndarray, None)
        if precision in ONEDNN:
            register_backend(np.ndarray, open_kernels(precision).backend())
        return Device(name, np, precision or "fp32", None, num_threads or 1)
    # A GPU, with the precision that it is asked for or does best.
    from minitransformer.backends.cuda import device, ops
    from minitransformer.backends.cuda.precision import low_precision_type

    cupy = device.select_gpu(name)
    capability = int(cupy.cuda.Device().compute_capability)
    chosen = device.choose_precision(precision, capability)
    device.set_tf32(chosen == "tf32")
    register_backend(cupy.ndarray, ops.BACKEND)
    return Device(name, cupy, chosen, low_precision_type(chosen), 1)


def multiplies_int8_fast() -> bool:
    """Whether products in int8 are faster than in fp32 on this processor."""
    from minitransformer.backends.onednn import int8

    try:
        return int8.open_kernels().is_fast
    except RuntimeError:
        return False


def open_kernels(precision: str) -> Bfloat16Kernels | Int8Kernels:
    """Return oneDNN's kernels for a precision. Raises: RuntimeError as `OneDnn`."""
    from minitransformer.backends.onednn import bfloat16, int8

    return (int8 if precision == "int8" else bfloat16).open_kernels()


def parallel_model(
    device: Device,
    start: Checkpoint,
    training: TrainingConfig,
    *,
    communicator: Communicator,
    graphs: bool,
    log: Callable[[str], None],
) -> tuple[ParallelModel, Optimizer]:
    """Return the model that computes gradients on a device, and its Adam.

    A GPU records its work as `graphs`, or launches it kernel by kernel. A processor's
    work is divided among processes, but for ranks, which MPI does not allow to fork.
    """
    model, parameters = start.model, start.parameters
    if device.name == "cpu":
        from minitransformer.system.workers import CAN_FORK
        from minitransformer.training.optimizer import Adam
        from minitransformer.training.parallel import CpuModel

        count = device.num_threads
        forks = CAN_FORK and communicator.size == 1
        cpu_model = CpuModel(
            model,
            parameters,
            num_processes=count if forks else 1,
            num_threads=1 if forks else count,
            communicator=communicator,
        )
        adam = Adam(
            parameters.data,
            beta1=training.beta1,
            beta2=training.beta2,
            epsilon=training.epsilon,
            clip_norm=training.clip_norm,
            num_threads=count,
            map=cpu_model.map,
        )
        return cpu_model, adam
    from minitransformer.backends.cuda.optimizer import GpuAdam
    from minitransformer.backends.cuda.training import GpuModel
    from minitransformer.training.loss_scale import LossScale

    scale = LossScale(device.xp, device.precision, start.state.loss_scale)
    gpu_model = GpuModel(model, parameters, scale, communicator, graphs=graphs, log=log)
    return gpu_model, GpuAdam(parameters, training, scale)


def connect_ranks(device: str) -> Communicator:
    """Connect this rank with the others that MPI has started, if any.

    `device` says whether the ranks compute on processors or on GPUs.

    Raises: RuntimeError if MPI, NCCL or a GPU is missing.
    """
    from minitransformer.training.distributed import (
        Communicator,
        MpiCommunicator,
        find_mpi,
    )

    if (mpi := find_mpi()) is None:
        return Communicator()
    if device == "cpu":
        return MpiCommunicator(mpi)
    from minitransformer.backends.cuda.nccl import NcclCommunicator

    return NcclCommunicator(mpi)
