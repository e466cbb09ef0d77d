"""A stand-in of CuPy, as strict as CuPy 14.2 on a GPU is.

Arrays are no arrays of NumPy and become none by themselves. What CuPy refuses is
refused: arrays of NumPy as operands, batched products and reductions in bfloat16. What
a GPU forbids while a graph is captured (waiting, copies from and to the host, CuPy's
own products) is an error. Freed memory is overwritten, then handed out again, and a
graph reads and writes the addresses that it recorded. An array that one stream writes
may be used on another only after a wait. Each thread begins on GPU 0, and a kernel
takes only arrays of the GPU that its thread has selected.
"""

import contextlib
import ctypes
import importlib
import math
import operator
import os
import sys
import threading
import types
from collections import Counter, defaultdict
from functools import partial
from weakref import WeakSet, WeakValueDictionary, finalize

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from support.host_blas import DTYPES, HostBlas, HostBlasLt

BFLOAT16 = np.dtype(DTYPES["bfloat16"])
ALIGNMENT = 512
FREED = 255  # the value of all bytes of freed memory: NaN, or -1


# By their addresses, which libraries are given in place of objects.
STREAMS = WeakValueDictionary()
BLOCKS = WeakSet()


class CUDARuntimeError(RuntimeError):
    """What CuPy raises when a call of the driver fails."""

    status = 1


class Memory:
    """A block as cudaMalloc returns it, on the GPU that the thread has selected."""

    def __init__(self, size):
        if size > gpu.bytes_left:
            error = CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
            error.status = 2
            raise error
        gpu.bytes_left -= size
        self.gpu, self.size, self.device = gpu, size, gpu.local.device
        raw = np.empty(max(size, 1) + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.bytes = raw[start : start + max(size, 1)]
        self.bytes.fill(FREED)
        self.written = None  # stream, time
        BLOCKS.add(self)

    def __del__(self):
        if hasattr(self, "gpu"):
            self.gpu.bytes_left += self.size


class MemoryPointer:
    """An address in a block; `block` is kept while it is in use."""

    def __init__(self, block, offset):
        assert offset == 0
        self.block = block


class MemoryPool:
    """Hands out blocks; those that nobody uses any more serve again on their stream."""

    def __init__(self, allocate=None):
        self.allocate = allocate or (lambda size: MemoryPointer(Memory(size), 0))
        self.free = defaultdict(list)
        self.limit = 1 << 20  # as CUPY_GPU_MEMORY_LIMIT may say

    def set_limit(self, size):
        self.limit = size or math.inf

    def malloc(self, size):
        if size > self.limit:
            raise MemoryError(f"Out of memory allocating {size} bytes")
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        blocks = self.free[gpu.local.device, gpu.stream.ptr]
        fitting = [block for block in blocks if size <= block.size <= 2 * size]
        if fitting:
            block = min(fitting, key=lambda b: b.size)
            blocks.remove(block)
        else:
            block = self.allocate(size).block
        pointer = MemoryPointer(block, 0)
        finalize(pointer, self._release, blocks, block)
        return pointer

    def _release(self, blocks, block):
        block.bytes.fill(FREED)
        blocks.append(block)

    def free_all_blocks(self):
        for blocks in self.free.values():
            blocks.clear()
        gpu.calls.append("freed" if self is gpu.default_pool else "graphs freed")


class Event:
    """A place in a stream's work, which the host or another stream may wait for."""

    def __init__(self, seen):
        self.seen = dict(seen)

    def synchronize(self):
        gpu.host_waits(self.seen)
        gpu.calls.append("copied")


class Stream:
    """Runs work at once; while it captures, work is noted and not run."""

    def __init__(self, non_blocking=False, ptr=None):
        self.ptr = ptr if ptr is not None else id(self)
        self.captured = None
        self.time, self.seen = 0, {}
        STREAMS[self.ptr] = self

    def use(self):
        gpu.local.streams[gpu.local.device] = self
        return self

    def __enter__(self):
        gpu.local.entered.append(self)
        return self.use()

    def __exit__(self, *_):
        """Forget what `use` has chosen, as CuPy does: only `with` is remembered."""
        gpu.local.entered.pop()
        outer = gpu.local.entered or [gpu.null[gpu.local.device]]
        outer[-1].use()

    def synchronize(self):
        gpu.may_not_capture("waiting for a stream")
        gpu.host_waits(self.seen)
        gpu.calls.append("waited")

    def record(self):
        return Event(self.seen)

    def wait_event(self, event):
        self.seen = merged(self.seen, event.seen)

    def begin_capture(self):
        if gpu.refuses_capture or not self.ptr:
            raise CUDARuntimeError("operation not permitted when stream is capturing")
        self.captured = []
        gpu.calls.append("captured")

    def end_capture(self):
        work, self.captured = self.captured, None
        if gpu.refuses_capture:
            raise CUDARuntimeError("operation would result in a merge")
        return Graph(work)


class Graph:
    """What was captured: work on addresses, which it does not keep from being freed."""

    def __init__(self, work):
        self.work = work

    def launch(self):
        gpu.calls.append("launched")
        for task in self.work:
            gpu.run(task)


def merged(a, b):
    return {key: max(a.get(key, 0), b.get(key, 0)) for key in a.keys() | b.keys()}


class Local(threading.local):
    """What each thread has of its own."""

    def __init__(self):
        self.device, self.streams, self.allocators = 0, {}, []
        self.entered = []  # streams, by `with`


class Device:
    compute_capability, attributes = "90", {"MultiProcessorCount": 3}

    def __init__(self, index=None):
        self.id = gpu.local.device if index is None else index

    def use(self):
        gpu.local.device = self.id

    def __enter__(self):
        self.outer, gpu.local.device = gpu.local.device, self.id

    def __exit__(self, *error):
        gpu.local.device = self.outer

    def synchronize(self):
        gpu.may_not_capture("waiting for the device")
        gpu.host_waits({stream: gpu.times[stream] for stream in gpu.times})


class GpuState:
    """The machine: its streams, what they have waited for, and what was asked of it."""

    largest_copy = math.inf  # to the host, in bytes
    backwards = False  # threads of a block run last to first

    def __init__(self, libraries, count):
        self.libraries, self.count = libraries, count
        self.files = {"libcublas.so.13": HostBlas, "libcublasLt.so.13": HostBlasLt}
        self.calls, self.kernels = [], set()
        self.refuses_capture = False
        self.bytes_left, self.lock = math.inf, threading.RLock()
        self.copies = []  # to the host, on their way
        self.local, self.times, self.waited_for = Local(), Counter(), {}
        self.null = [Stream(ptr=0) for _ in range(count)]
        self.default_pool = MemoryPool()
        self.default_pool.set_limit(0)

    def load(self, name):
        """As ctypes.CDLL."""
        if name not in self.files:
            raise OSError(f"{name}: cannot open shared object file")
        return self.files[name](self)

    def close(self):
        """Free what a device and the pool hold, which tests have many of."""
        importlib.import_module(
            "minitransformer.backends.cuda.device"
        )._device.cache_clear()
        self.default_pool.free.clear()

    @property
    def stream(self):
        device = self.local.device
        return self.local.streams.get(device) or self.null[device]

    def malloc(self, size):
        allocators = self.local.allocators
        return (allocators[-1] if allocators else self.default_pool.malloc)(size)

    @contextlib.contextmanager
    def using_allocator(self, malloc):
        self.local.allocators.append(malloc)
        try:
            yield
        finally:
            self.local.allocators.pop()

    def may_not_capture(self, what):
        if self.stream.captured is not None:
            raise CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what}")

    def copy_later(self, out, values):
        """Copy to the host, which has it after a wait."""
        self.copies.append((self.stream.ptr, self.times[self.stream.ptr], out, values))

    def host_waits(self, seen):
        self.waited_for = merged(self.waited_for, seen)
        for stream, number, out, values in self.copies:
            if number <= self.waited_for.get(stream, 0):
                np.copyto(out, values)
        self.copies = [c for c in self.copies if c[1] > self.waited_for.get(c[0], 0)]

    def launch(self, task, arrays, stream=None):
        """Queue a task that reads or writes these arrays."""
        stream = stream or self.stream
        for array in arrays:
            block = array._pointer.block
            if block.device != self.local.device:
                raise CUDARuntimeError(
                    f"an array on GPU {block.device}, used on GPU {self.local.device}"
                )
            if block.written is not None and block.written[0] != stream.ptr:
                other, time = block.written
                known = max(stream.seen.get(other, 0), self.waited_for.get(other, 0))
                assert time <= known, "a race: no wait for another stream's work"
        if stream.captured is not None:
            stream.captured.append(task)
            return
        self.times[stream.ptr] += 1
        stream.seen[stream.ptr] = self.times[stream.ptr]
        for array in arrays:
            array._pointer.block.written = stream.ptr, self.times[stream.ptr]
        self.run(task)

    def run(self, task):
        with self.lock, np.errstate(all="ignore"):
            task()


gpu = None  # the GpuState of the test that runs


class ndarray(NDArrayOperatorsMixin):  # noqa: N801
    """An array on a GPU: `_host` is what it would be in NumPy, at the same address."""

    __hash__ = None

    def __init__(self, host, pointer):
        self._host, self._pointer = host, pointer

    @property
    def data(self):
        block = self._pointer.block
        return types.SimpleNamespace(ptr=self._host.ctypes.data, block=block)

    def __array_ufunc__(self, function, method, *arguments, out=(None,)):
        assert method == "__call__"
        compute_it = matmul if function is np.matmul else partial(compute, function)
        return compute_it(*arguments, out=out[0])

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    @property
    def shape(self):
        return self._host.shape

    @property
    def device(self):
        return Device(self._pointer.block.device)

    def __getattr__(self, name):
        if name in ("dtype", "ndim", "size", "itemsize", "nbytes", "strides", "flags"):
            return getattr(self._host, name)
        raise AttributeError(name)

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    # To the host, which waits

    def get(self, out=None, blocking=True):
        gpu.may_not_capture("a copy to the host")
        assert self.nbytes <= gpu.largest_copy, f"{self.nbytes} bytes to the host"
        if not blocking:  # the host may read it after a wait
            assert self.flags.c_contiguous
            assert out.flags.c_contiguous
            assert (out.shape, out.dtype) == (self.shape, self.dtype)
            out.view(np.uint8).fill(FREED)
            gpu.launch(lambda: gpu.copy_later(out, self._host.copy()), [self])
            return out
        gpu.launch(lambda: None, [self])
        gpu.host_waits(gpu.stream.seen)
        if not self.flags.c_contiguous:
            with gpu.stream:  # as CuPy does, where a copy on the GPU comes first
                pass
        return self._host.copy()

    def __bool__(self):
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    # Views and copies

    def _view(self, host):
        return ndarray(host, self._pointer)

    def reshape(self, *shape):
        host = self._host.reshape(*shape)
        if np.may_share_memory(host, self._host):
            return self._view(host)
        return compute(lambda a: a.reshape(*shape), self)

    def swapaxes(self, a, b):
        return self._view(self._host.swapaxes(a, b))

    @property
    def T(self):  # noqa: N802
        return self._view(self._host.T)

    def view(self, dtype):
        return self._view(self._host.view(dtype))

    def astype(self, dtype, copy=True):
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return compute(lambda a: a.astype(dtype), self)

    def copy(self):
        return compute(np.array, self)

    def __getitem__(self, index):
        arrays = index_arrays(index)
        if any(a.dtype == bool for a in arrays):
            gpu.may_not_capture("an index of booleans, whose number the host must know")
        if not arrays:
            return self._view(np.asarray(self._host[index]))
        key = host_index(index)  # not `index`, whose memory a graph must not keep
        return compute(lambda a: a[key], self, others=arrays)

    def __setitem__(self, index, value):
        arrays = index_arrays(index)
        value, host = operand(value), self._host
        used = [x for x in (self, value, *arrays) if isinstance(x, ndarray)]
        value = value._host if isinstance(value, ndarray) else value
        key = host_index(index)

        def assign():
            host[key] = np.asarray(value).astype(host.dtype)

        gpu.launch(assign, used)

    def fill(self, value):
        self[...] = value

    def set(self, host):
        assert host.dtype == self.dtype, "set wants an array of the same type"
        assert host.shape == self.shape
        assert self.flags.c_contiguous
        gpu.may_not_capture("a copy from the host")
        gpu.launch(partial(np.copyto, self._host, host), [self])


def _reduction(name):
    def method(self, axis=None, **options):
        if self.dtype == BFLOAT16:
            raise TypeError(f"Wrong type (bfloat16) of arguments for cupy_{name}")
        return compute(lambda a: getattr(a, name)(axis=axis, **options), self)

    return method


for _name in ("sum", "mean", "max", "min", "all", "any", "argmax"):
    setattr(ndarray, _name, _reduction(_name))


def index_arrays(index):
    parts = index if isinstance(index, tuple) else (index,)
    return [part for part in parts if isinstance(operand(part, "index"), ndarray)]


def host_index(index):
    if isinstance(index, tuple):
        return tuple(map(host_index, index))
    return index._host if isinstance(index, ndarray) else index


def operand(value, what="operand"):
    """Refuse what CuPy takes from no host."""
    if isinstance(value, np.ndarray | list):
        raise TypeError(f"Unsupported type {type(value)} of an {what}")
    return value


def new(shape, dtype):
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    size = math.prod(shape) * dtype.itemsize
    data = gpu.malloc(size)
    return ndarray(data.block.bytes[:size].view(dtype).reshape(shape), data)


def compute(function, *arguments, out=None, others=()):
    """Queue `function`, which NumPy computes, into a new array or `out`."""
    arrays = [x for x in arguments if isinstance(operand(x), ndarray)]
    values = [x._host if isinstance(x, ndarray) else x for x in arguments]
    with gpu.lock, np.errstate(all="ignore"):
        result = np.asarray(function(*values))
    if out is None:
        out = new(result.shape, result.dtype)
    target = out._host

    def task():
        np.copyto(target, np.asarray(function(*values)), casting="same_kind")

    gpu.launch(task, [*arrays, *others, out])
    return out


def matmul(a, b, out=None):
    gpu.may_not_capture("a product of CuPy's own handle")
    if BFLOAT16 in (a.dtype, b.dtype) and max(a.ndim, b.ndim) > 2:
        raise TypeError("a batched product of bfloat16 goes to kernels for integers")

    def product(x, y):
        wide = [v.astype(np.float32) if v.dtype.itemsize == 2 else v for v in (x, y)]
        return (wide[0] @ wide[1]).astype(np.promote_types(x.dtype, y.dtype))

    return compute(product, a, b, out=out)


class RawModule:
    """Kernels that were built for the host, of the type that the options name."""

    def __init__(self, code, options):
        found = dict(option.split("=") for option in options if option[:2] == "-D")
        assert found.keys() <= {"-DREAL", "-DTENSOR_CORES"}
        self.library, self.code = gpu.libraries[tuple(found.values())], code

    def get_function(self, name):
        return RawKernel(name, self.library[f"launch_{name}"])


WRONG = {1: "number of arguments", 2: "size of an argument", 3: "barrier not reached"}
WRONG[4] = "size of the block"


class RawKernel:
    def __init__(self, name, function):
        self.name, self.function = name, function

    def __call__(self, grid, block, arguments):
        grid, block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
        assert 0 < grid[0] < 1 << 31, (self.name, grid)
        assert all(0 < size < 1 << 16 for size in grid[1:]), (self.name, grid)
        assert 0 < math.prod(block) <= 1024, (self.name, block)
        structs = [a for a in arguments if isinstance(a, np.ndarray)]
        assert all(a.dtype.names and a.size == 1 for a in structs)
        arrays = [a for a in arguments if isinstance(a, ndarray)]
        others = (ndarray, np.ndarray, np.generic)
        assert all(isinstance(a, others) for a in arguments)
        values = [
            np.array(a._host.ctypes.data, np.uint64) if isinstance(a, ndarray) else a
            for a in arguments
        ]
        values = [np.array(value) for value in values]
        count, state = len(values), gpu
        state.kernels.add(self.name)

        def task():
            status = self.function(
                (ctypes.c_uint * 3)(*grid),
                (ctypes.c_uint * 3)(*block),
                (ctypes.c_void_p * count)(*(value.ctypes.data for value in values)),
                (ctypes.c_int * count)(*(value.itemsize for value in values)),
                count,
                state.backwards,
            )
            assert status == 0, f"{self.name}: {WRONG[status]}"

        gpu.launch(task, arrays)


def asarray(value, dtype=None):
    if isinstance(value, ndarray):
        same = dtype is None or np.dtype(dtype) == value.dtype
        return value if same else value.astype(dtype)
    gpu.may_not_capture("a copy from the host")
    host = np.asarray(value, dtype)
    out = new(host.shape, host.dtype)
    gpu.launch(lambda: np.copyto(out._host, host), [out])
    return out


def ascontiguousarray(array, dtype=None):
    array = asarray(array, dtype)
    return array if array.flags.c_contiguous else array.copy()


def filled(value):
    def create(shape, dtype=float):
        out = new(shape, dtype)
        out.fill(value)
        return out

    return create


def functions():
    """The functions of CuPy that the package calls; no other is there."""

    def like(value):
        fill = filled(value)
        return lambda a, dtype=None: fill(a.shape, dtype or a.dtype)

    def concatenate(arrays, axis=0):
        if len(arrays) > 8:  # CuPy may copy a list of their addresses
            gpu.may_not_capture("a copy from the host")
        return compute(lambda *values: np.concatenate(values, axis), *arrays)

    def full(shape, value, dtype=None):
        return filled(value)(shape, dtype or np.asarray(value).dtype)

    def full_host(function):
        return lambda *a, **k: compute(lambda: function(*a, **k))

    plain = "add multiply maximum log exp sqrt isfinite where sort".split()
    return {
        **{name: partial(compute, getattr(np, name)) for name in plain},
        **{name: full_host(getattr(np, name)) for name in ("arange", "tri")},
        "concatenate": concatenate,
        "ndarray": ndarray,
        "asarray": asarray,
        "ascontiguousarray": ascontiguousarray,
        "empty": lambda shape, dtype=float: new(shape, dtype),
        "empty_like": lambda a, dtype=None: new(a.shape, dtype or a.dtype),
        "zeros": filled(0),
        "ones": filled(1),
        "zeros_like": like(0),
        "full": full,
        "matmul": matmul,
        "take": lambda a, i, axis: compute(lambda x, y: np.take(x, y, axis=axis), a, i),
        "broadcast_to": lambda a, shape: a._view(np.broadcast_to(a._host, shape)),
        "RawModule": RawModule,
        "get_default_memory_pool": lambda: gpu.default_pool,
    }


def install(monkeypatch, libraries, gpus=3):
    """Put the stand-in where CuPy is imported from; return the state of its GPUs."""
    global gpu
    gpu = GpuState(libraries, gpus)
    xp = types.ModuleType("cupy")
    vars(xp).update(functions(), __version__="14.2.0")
    xp.cuda = types.SimpleNamespace(
        Stream=Stream,
        Device=Device,
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        MemoryPool=MemoryPool,
        using_allocator=gpu.using_allocator,
        get_current_stream=lambda: gpu.stream,
        is_available=lambda: True,
        runtime=types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=lambda: gpu.count,
            getDevice=lambda: gpu.local.device,
            runtimeGetVersion=lambda: 13000,
        ),
    )
    blas = types.ModuleType("cupy_backends.cuda.libs")
    blas.cublas = "loaded"
    cupyx = types.ModuleType("cupyx")
    cupyx.empty_pinned = np.empty
    modules = {"cupy": xp, "cupyx": cupyx, "cupy_backends.cuda.libs": blas}
    for name in ("cupy_backends", "cupy_backends.cuda"):
        modules[name] = types.ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    device = importlib.import_module("minitransformer.backends.cuda.device")
    loader = types.SimpleNamespace(**vars(ctypes))
    loader.CDLL = gpu.load
    monkeypatch.setattr(device, "ctypes", loader)
    monkeypatch.setenv("CUPY_CACHE_DIR", os.devnull)  # where no folder can be
    monkeypatch.setenv("CUPY_TF32", "0")  # which opening a device changes
    device._device.cache_clear()
    gpu.xp = xp
    return gpu


class NcclRanks:
    """The ranks as `cupy.cuda.nccl` connects them: arrays are addresses and types.

    MPI exchanges what is on this machine anyway.
    """

    def __init__(self, comm):
        self.comm = comm

    def _exchange(self, place, count, kind, stream, combine):
        [block] = [b for b in BLOCKS if 0 <= place - b.bytes.ctypes.data < b.size]
        start, dtype = place - block.bytes.ctypes.data, np.dtype(kind)
        array = block.bytes[start : start + count * dtype.itemsize].view(dtype)
        of_block = types.SimpleNamespace(_pointer=MemoryPointer(block, 0))
        queue = STREAMS[stream] if stream else gpu.null[gpu.local.device]
        assert queue.captured is None

        def task():
            array[...] = combine(self.comm.allgather(array))

        gpu.launch(task, [of_block], queue)

    def allReduce(self, source, out, count, kind, operation, stream):  # noqa: N802
        assert (source, operation) == (out, "sum")
        sums = partial(np.sum, axis=0)
        self._exchange(out, count, kind, stream, sums)

    def broadcast(self, source, out, count, kind, root, stream):
        assert source == out
        self._exchange(out, count, kind, stream, operator.itemgetter(root))


UNIQUE_ID = bytes(range(64, 192))


def install_nccl(monkeypatch):
    """Put a stand-in where NCCL is imported from, of a rank that MPI has started."""
    comm = importlib.import_module("mpi4py.MPI").COMM_WORLD.Dup()

    def new_ranks(size, identity, rank):
        assert (size, rank, identity) == (comm.size, comm.rank, UNIQUE_ID)
        return NcclRanks(comm)

    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.available, nccl.NcclCommunicator = True, new_ranks
    nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64, nccl.NCCL_SUM = "float32", "float64", "sum"
    # Only the identity of rank 0 is that of the group.
    nccl.get_unique_id = lambda: UNIQUE_ID if comm.rank == 0 else bytes(128)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
