"""Files that are whole or not there, and locks between processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to; then sync the file and rename it to `path`.

    Raises: OSError naming `path` if it cannot be written; what it held is then there.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        if os.name == "posix":  # the new name, too, has to reach the disk
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        if error.filename in (None, str(partial)):  # None as when the disk is full
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a small file in one step."""
    with replacing(path) as partial:
        partial.write_bytes(data)


def built_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Return the file or folder `path`; if it is not there `build(name)` makes it.

    It is made under another name and renamed. Of several processes one builds, and the
    others wait.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock"), wait=True):
        if not path.exists():
            partial = path.with_name(f".{path.name}.partial")
            _remove(partial)  # what a crash may have left
            try:
                build(partial)
                partial.replace(path)
            finally:
                _remove(partial)
    return path


@contextmanager
def locked(path: Path, wait: bool, note: str = "") -> Iterator[None]:
    """Hold a lock on `path`, which a crash releases, too; `note` is written there.

    Raises: BlockingIOError if another process holds it and `wait` is False.
    """
    with open(path, "ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        file.truncate(0)
        file.write(note.encode())
        file.flush()
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
