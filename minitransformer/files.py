"""Files that are written atomically or built once, and locks between processes.

Windows differs: it locks and syncs no folders, and an open file can be neither deleted,
renamed nor replaced, so that it needs no lock to be safe from `sweep`.
"""

from __future__ import annotations

import errno
import glob
import importlib
import itertools
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

# Where macOS names open files, without links; on Linux this leads to /proc.
OPEN_FILES = Path("/dev/fd")

# How often a lock is tried, and after how many attempts the user is told of it.
POLL_INTERVAL = 0.05  # seconds
SILENT_ATTEMPTS = 40

# What unfinished files and folders have in their names, as a pattern.
UNIQUE = "[0-9a-f]" * 16


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that becomes `path`, whole and synced to disk, after the block.

    An old file passes on its mode and owner. If `path` is a symbolic link, what it
    leads to is replaced. A device, a pipe or /dev/stdout is written directly.

    Raises: OSError naming `path` if it cannot be written; its old content remains.
    """
    try:
        old: os.stat_result | None = path.stat()
    except FileNotFoundError:
        old = None
    target = _follow_links(path)
    is_open = target.is_symlink() or target.parent == OPEN_FILES
    if is_open or (old and not stat.S_ISREG(old.st_mode)):
        with name_errors(path), open(path, "ab") as file:
            yield file
        return
    partial = _partial_name(target)
    try:
        with name_errors(path, partial):
            sweep(target.parent, f".{glob.escape(target.name[:50])}.{UNIQUE}.partial")
            with open(_create(partial), "wb") as file:
                if old:
                    _copy_permissions(old, file)
                yield file
                file.flush()
                os.fsync(file.fileno())
                if not fcntl:
                    file.close()
                replace(partial, target)  # while it is locked
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a folder that becomes `path`, whole and synced to disk, after the block.

    It has another name until then. An empty folder at `path` is replaced.

    Raises: OSError naming `path` if it cannot be written.
    """
    make_folder(path.parent)
    with _partial_folder(path) as partial:
        yield partial
        with suppress(FileNotFoundError):
            path.rmdir()  # unless something has been put into it meanwhile
        _complete(partial, path)


@contextmanager
def replaced_together(folder: Path) -> Iterator[Path]:
    """Make a folder, whose files move to `folder` after the block.

    They replace those of the same names, all of which are removed first: if the process
    is killed then, files are missing, but none is left beside others that it does not
    belong to. Until the block has ended, nothing is replaced.
    """
    make_folder(folder)
    with _partial_folder(folder / "new") as partial:
        yield partial
        made = sorted(partial.iterdir())
        for path in made:
            (folder / path.name).unlink(missing_ok=True)
        for path in made:
            replace(path, folder / path.name)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a small file atomically."""
    with atomic_write(path) as file:
        file.write(data)


def json_of(value: Any) -> str:
    """Return JSON, which knows no NaN and no infinity: these become null."""
    text = json.dumps(value)
    return json.dumps(json.loads(text, parse_constant=lambda name: None))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk.

    Windows cannot do this for folders, nor for files that are open for reading only.
    """
    if not fcntl and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if fcntl else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, exist_ok: bool = True) -> None:
    """Create a folder, and those above it, so that a crash does not lose them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for folder in missing:
        sync(folder.parent)


def replace(partial: Path, path: Path) -> None:
    """Rename a file or folder to `path`, and sync the new name to disk.

    On Windows this waits some seconds for a program that has the old file open.

    Raises: OSError if it cannot be renamed.
    """
    for attempt in itertools.count():
        try:
            os.replace(partial, path)
            break
        except PermissionError:
            if fcntl or attempt == SILENT_ATTEMPTS:
                raise
        time.sleep(POLL_INTERVAL)
    sync(path.parent)


@contextmanager
def name_errors(path: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Name `path` in any OSError that names `unfinished`, or no file (a full disk)."""
    try:
        yield
    except OSError as error:
        if error.strerror and error.filename in (None, str(unfinished)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def build_once(
    path: Path, build: Callable[[Path], None], read: Callable[[Path], T]
) -> T:
    """Return `read(path)`; if there is nothing to read, `build(name)` makes it first.

    It is a file or folder, which is built under a temporary name and then renamed. Of
    several processes one builds while the others wait. `read` raises FileNotFoundError
    if it is missing, or ValueError if it is damaged and has to be built again.
    """
    with suppress(FileNotFoundError, ValueError):
        return read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name(f".{path.name}.lock"), wait=True, create=True):
        try:
            return read(path)  # another process has built it
        except FileNotFoundError:
            pass
        except ValueError as error:
            print(f"{error}; it is made again", file=sys.stderr)
        partial = _partial_name(path)
        sweep(path.parent, f".{path.name[:50]}.*partial")
        try:
            with name_errors(path):
                build(partial)
                _remove(path)
                _complete(partial, path)
        finally:
            with suppress(OSError):
                _remove(partial)
    return read(path)


@contextmanager
def file_lock(path: Path, wait: bool, create: bool = False) -> Iterator[None]:
    """Hold a lock that only one process can hold; a crash releases it.

    The lock is on a folder, or on a file, which `create` makes if it is missing. On
    Windows a file beside the folder, which exists as long as the lock, stands for it.

    Raises: TimeoutError if another process holds it and `wait` is False, OSError if
    `path` is a symbolic link or no regular file.
    """
    if not fcntl and path.is_dir():
        folder = path.resolve()
        beside = folder.parent / f".{folder.name}.lock"
        try:
            with file_lock(beside, wait, create=True):
                yield
        finally:
            with suppress(OSError):  # another process waits for it
                beside.unlink()
        return
    while True:
        if path.is_dir():
            descriptor = os.open(path, os.O_RDONLY)
        else:
            descriptor = open_no_link(path, os.O_RDWR | create * os.O_CREAT)
        try:
            with name_errors(path):
                _acquire(descriptor, path, wait)
            if _is_open_as(descriptor, path):  # nobody has deleted it meanwhile
                yield
                return
        finally:
            os.close(descriptor)


def open_no_link(path: Path | str, flags: int) -> int:
    """Open a regular file as `os.open` does; do not follow a link or wait for a pipe.

    Raises: OSError if it is a link or no regular file.
    """
    if hasattr(os, "O_NOFOLLOW"):
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    elif os.path.islink(path):
        raise OSError(errno.ELOOP, "expected no symbolic link", str(path))
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path}: expected a regular file")
    return descriptor


def sweep(folder: Path, pattern: str) -> None:
    """Delete the unfinished files and folders of processes that were killed.

    On Windows, only a file that is closed but not yet renamed is in danger from this.
    """
    for path in folder.glob(pattern):
        with suppress(OSError):
            if not fcntl:
                _remove(path)
                continue
            with file_lock(path, wait=False):  # its writer holds a lock
                _remove(path)


def _acquire(descriptor: int, path: Path, wait: bool) -> None:
    for attempt in itertools.count():
        try:
            _lock(descriptor)
            return
        except BlockingIOError:
            if not wait:
                raise TimeoutError(f"{path}: another process holds this lock") from None
        if attempt == SILENT_ATTEMPTS:
            print(f"waiting for another process, which locks {path}", file=sys.stderr)
        time.sleep(POLL_INTERVAL)


def _lock(descriptor: int) -> None:
    """Lock an open file. Raises: BlockingIOError if another process has locked it."""
    if fcntl:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    msvcrt = importlib.import_module("msvcrt")
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(*error.args) from error


def _is_open_as(descriptor: int, path: Path) -> bool:
    if not fcntl:
        return True
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _follow_links(path: Path) -> Path:
    """Return the file that symbolic links lead to, or a link of /proc to an open file.

    /dev/stdout is such a link: even if standard output is a file, the link's text need
    not be its name.
    """
    while path.is_symlink():
        folder = os.path.realpath(path.parent)
        path = Path(folder, path.name)
        if folder.startswith("/proc/"):
            break
        path = Path(folder, os.readlink(path))
    return path


def _partial_name(path: Path) -> Path:
    """Return a name that nobody can predict, of at most 255 bytes."""
    return path.with_name(f".{path.name[:50]}.{os.urandom(8).hex()}.partial")


@contextmanager
def _partial_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside `path`, which is locked, and removed after the block.

    Raises: OSError naming `path` if it cannot be made.
    """
    partial = _partial_name(path)
    try:
        with name_errors(path, partial):
            sweep(path.parent, f".{glob.escape(path.name[:50])}.{UNIQUE}.partial")
            partial.mkdir()
            with ExitStack() as locks:
                with suppress(OSError):  # a file system without locks
                    locks.enter_context(file_lock(partial, wait=False))
                yield partial
    finally:
        with suppress(OSError):  # what went wrong before says more
            _remove(partial)


def _create(path: Path) -> int:
    """Create a file and lock it, so that `sweep` sees that its writer is alive."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if not fcntl:
            return descriptor
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # a sweep was faster than the lock


def _complete(partial: Path, path: Path) -> None:
    """Rename a file or folder to `path`, once it is synced."""
    for part in partial.iterdir() if partial.is_dir() else ():
        sync(part)
    sync(partial)
    replace(partial, path)


def _copy_permissions(old: os.stat_result, file: BinaryIO) -> None:
    if not fcntl:
        return
    with suppress(OSError):  # only root may give a file away
        os.fchown(file.fileno(), old.st_uid, old.st_gid)
    with suppress(OSError):  # a file system without modes
        os.fchmod(file.fileno(), old.st_mode & 0o777)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
