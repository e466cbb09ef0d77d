"""Files and folders that are whole or not there, caches built once, and locks."""

from __future__ import annotations

import errno
import filecmp
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")

# How long a lock is waited for before the user is told of it. Units: seconds
SILENT_SECONDS = 2.0

# An unfinished file without a write for so long was left by a process that was killed.
# Units: seconds
LEFTOVER_AGE = 24 * 3600.0

# The names of files that are open: standard streams and descriptors.
OPEN = re.compile(r"/dev/(?:std[a-z]+|fd/\d+)|/proc/\d+(?:/task/\d+)?/fd/\d+")

# Errors of file systems without locks (Lustre, NFS), and of folders that cannot be
# synced: on CIFS, or without the permission to read them.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP}
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}


@contextmanager
def atomic_write(path: Path, replace: bool = False) -> Iterator[BinaryIO]:
    """Open a file that becomes `path`, whole and synced to disk, after the block.

    An old file with another content stays, unless `replace`: then the new file gets its
    mode. If `path` is a symbolic link, the file that it leads to is written. Devices,
    pipes and /dev/stdout are written directly.

    Raises: OSError naming `path` if it cannot be written; its old content remains.
    """
    try:
        old: os.stat_result | None = path.stat()
    except FileNotFoundError:
        old = None
    # Write to devices, pipes and descriptors as they are.
    place = os.path.join(os.path.realpath(path.parent), path.name)
    if OPEN.fullmatch(place) or (old and not stat.S_ISREG(old.st_mode)):
        with name_errors(path), open(path, "ab") as file:
            yield file
        return
    # Write any other file under a temporary name, and rename it at the end.
    target = Path(os.path.realpath(path))
    with partial_name(target) as partial, name_errors(path, partial):
        with open(partial, "xb") as file:
            if old:
                os.chmod(partial, stat.S_IMODE(old.st_mode))
            yield file
        if target.exists() and not (replace or filecmp.cmp(partial, target, False)):
            problem = "it exists with another content: move it, or name another file"
            raise FileExistsError(errno.EEXIST, problem, str(path))
        _complete(partial, target)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a folder that becomes `path`, whole and synced to disk, after the block.

    It has another name until then. An empty folder at `path` is replaced.

    Raises: OSError naming `path` if it cannot be written.
    """
    make_folder(path.parent)
    with partial_name(path) as partial, name_errors(path, partial):
        partial.mkdir()
        yield partial
        with suppress(FileNotFoundError):
            path.rmdir()  # unless something has been put into it meanwhile
        _complete(partial, path)


def build_once(
    path: Path, build: Callable[[Path], None], read: Callable[[Path], T]
) -> T:
    """Return `read(path)`; if there is nothing to read, `build(name)` makes it first.

    `path` is a file or folder, which is built under a temporary name and then renamed.
    Of several processes one builds while the others wait. `read` raises
    FileNotFoundError if it is missing, or ValueError if it is damaged and has to be
    built again.
    """
    with suppress(FileNotFoundError, ValueError):
        return read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name(f".{path.name}.lock")):
        try:
            return read(path)  # another process has built it
        except FileNotFoundError:
            pass
        except ValueError as error:
            print(f"{error}; it is made again", file=sys.stderr)
        with partial_name(path) as partial, name_errors(path, partial):
            build(partial)
            # Replace what is there, unless it is a folder with files that are not ours:
            # then the rename fails.
            own = os.listdir(partial) if partial.is_dir() else ()
            if not path.is_dir() or {*os.listdir(path)} <= {*own}:
                _remove(path)
            _complete(partial, path)
    return read(path)


@contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock that only one process can hold; a crash releases it.

    The file at `path` stays when the lock is released. On a file system without locks,
    the block runs all the same; unless `wait`, a line says so.

    Raises: TimeoutError if another process holds it and `wait` is False.
    """
    from filelock import FileLock  # here, since most commands are to start at once

    # Wait in silence first, then say so.
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=SILENT_SECONDS if wait else 0)
    except TimeoutError:
        if not wait:
            raise
        print(f"waiting for another process, which locks {path}", file=sys.stderr)
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        if not wait:
            print(f"{path}: {error.strerror}: nobody is kept out", file=sys.stderr)
    try:
        yield
    finally:
        lock.release()


def sweep(folder: Path, names: str, age: float = 0.0) -> None:
    """Delete unfinished files and folders that killed processes have left.

    `names` is a regular expression of the names that they were to get. Units: `age` is
    in seconds without a write
    """
    pattern = re.compile(unfinished(names))
    with suppress(OSError):
        for path in filter(lambda x: pattern.fullmatch(x.name), folder.iterdir()):
            if time.time() - path.lstat().st_mtime >= age:
                _remove(path)


def unfinished(names: str) -> str:
    """Return a regular expression of the names that files have until they are whole."""
    return rf"\.(?:{names})\.[0-9a-f]{{16}}\.partial"


def write_bytes(path: Path, data: bytes, replace: bool = False) -> None:
    """Write a small file as `atomic_write` does."""
    with atomic_write(path, replace) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Wait until a file is on disk, or the names in a folder if it can be synced."""
    with name_errors(path):
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if not (path.is_dir() and error.errno in NO_SYNC):
                raise


def make_folder(path: Path, exist_ok: bool = True) -> None:
    """Create a folder, and those above it, so that a crash does not lose them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for folder in missing:
        sync(folder.parent)


@contextmanager
def name_errors(path: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Name `path` in any OSError that names no file (a full disk), or `unfinished`.

    `unfinished` is a file, or a folder with the file that is named.
    """
    try:
        yield
    except OSError as error:
        hidden = unfinished and str(error.filename).startswith(str(unfinished))
        if error.strerror and (hidden or error.filename is None):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def partial_name(path: Path) -> Iterator[Path]:
    """Yield a name that nobody can predict; its file is gone after the block.

    Files that killed processes left beside `path` long ago are deleted first.
    """
    start = path.name[:50]  # names have at most 255 bytes
    sweep(path.parent, re.escape(start), LEFTOVER_AGE)
    partial = path.with_name(f".{start}.{os.urandom(8).hex()}.partial")
    try:
        yield partial
    finally:
        with suppress(OSError):  # an earlier error says more
            _remove(partial)


def _complete(partial: Path, path: Path) -> None:
    """Rename a file or folder to `path`, once it is synced, and sync the new name."""
    for part in partial.iterdir() if partial.is_dir() else ():
        sync(part)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
