"""Files that are written atomically or built once, and locks between processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to; then sync that file and rename it to `path`.

    Raises: OSError naming `path` if it cannot be written; its old content remains.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)  # the new name has to reach the disk, too
    except OSError as error:
        if error.filename in (None, str(partial)):  # None if the disk is full
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX opens folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder, and those above it, so that a crash does not lose them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a small file atomically."""
    with atomic_write(path) as partial:
        partial.write_bytes(data)


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Return the file or folder `path`; if it does not exist, `build(name)` makes it.

    It is built under a temporary name, synced to disk and then renamed. Of several
    processes one builds while the others wait.
    """
    if path.exists():
        return path
    make_folder(path.parent)
    with file_lock(path.with_name(f".{path.name}.lock"), wait=True):
        if not path.exists():
            partial = path.with_name(f".{path.name}.partial")
            _remove(partial)  # a crash may have left one
            try:
                build(partial)
                for made in (*partial.rglob("*"), partial):
                    sync(made)
                partial.replace(path)
                sync(path.parent)
            finally:
                _remove(partial)
    return path


def file_lock(path: Path, wait: bool) -> AbstractContextManager[object]:
    """Return a lock on a file that only one process can hold; a crash releases it.

    Raises: TimeoutError on entering if another process holds it and `wait` is False.
    """
    from filelock import FileLock  # here, because importing it takes 12 ms

    return FileLock(path, blocking=wait)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
