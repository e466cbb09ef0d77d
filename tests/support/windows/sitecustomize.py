"""Makes Python on a POSIX system behave as it does on Windows, as far as it can.

Python imports this file by itself if its folder is in PYTHONPATH. What Windows has not
is removed, what it refuses is refused: to open a folder, to replace or delete a file
that is open, to sync what is open for reading, names with certain characters, and
`select` for anything but sockets. The package's own text files must name their encoding
and their line ends, whose defaults differ.
"""

import builtins
import errno
import fcntl
import io
import os
import pathlib
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import types
from contextlib import suppress

with suppress(ImportError):
    import portalocker  # noqa: F401  which has code of its own for Windows

GONE = {
    os: "fchmod fchown fork forkpty getpgid killpg mkfifo "
    "pread pwrite sched_getaffinity setsid O_DIRECTORY O_NOFOLLOW O_NONBLOCK",
    signal: "SIGHUP SIGKILL SIGSTOP SIGUSR1 pthread_sigmask",
}
REFUSED_NAME = re.compile(
    r'[<>:"|?*\x00-\x1f]|[. ]$|^(con|nul|aux|prn|com\d)(\.|$)', re.I
)


def denied(path):
    return PermissionError(errno.EACCES, "Permission denied", str(path))


def check_name(path):
    name = os.path.basename(os.fsdecode(path).rstrip("/"))
    if REFUSED_NAME.search(name) and name not in (".", ".."):
        raise OSError(errno.EINVAL, "Invalid argument", str(path))


def open_files():
    """Yield the device and inode of each file that some process has open or mapped."""
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = os.stat(link)
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield found.st_dev, found.st_ino


def check_closed(path):
    try:
        found = os.lstat(path)
    except OSError:
        return
    if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) in open_files():
        raise denied(path)


def from_package():
    """Whether a function was called by this project, perhaps through pathlib."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith("pathlib"):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return "minitransformer/" in file or file.endswith(("/train.py", "/translate.py"))


def like_windows_open(real):
    def os_open(path, flags, *rest, **more):
        if from_package() and os.path.isdir(path):
            raise denied(path)
        if flags & os.O_CREAT:
            check_name(path)
        return real(path, flags, *rest, **more)

    return os_open


def like_windows_io_open(real):
    def io_open(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None,
                *rest, **more):  # fmt: skip
        if not isinstance(file, int):
            if from_package() and os.path.isdir(file):
                raise denied(file)
            if set(mode) & set("wxa"):
                check_name(file)
        if "b" not in mode and from_package():
            writes = set(mode) & set("wxa+") and file != os.devnull
            if encoding in (None, "locale") or (writes and newline is None):
                raise AssertionError(f"{file}: no encoding, or no end of line")
        return real(file, mode, buffering, encoding, errors, newline, *rest, **more)

    return io_open


def checked(real, count):
    """Wrap a function that moves or deletes the files its first arguments name."""

    def change(*args, **more):
        for path in args[:count]:
            check_closed(path)
            check_name(path)
        return real(*args, **more)

    return change


def like_windows_fsync(real):
    def fsync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor)

    return fsync


def like_windows_select(real):
    def select_sockets(*args):
        if any(isinstance(x, int) for group in args[:3] for x in group):
            raise OSError(errno.ENOTSOCK, "not a socket")
        return real(*args)

    return select_sockets


def like_windows_kill(real):
    def kill(process, number):
        if not number:
            raise AssertionError("on Windows this would be a Ctrl-C")
        real(process, number)

    return kill


def like_windows_popen(real):
    def init(self, *args, preexec_fn=None, creationflags=0, **more):
        if preexec_fn is not None:
            raise ValueError("preexec_fn is not supported on Windows platforms")
        real(self, *args, **more)

    return init


def locking(descriptor, mode, count):
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError(errno.EACCES, "Permission denied") from error


def become_windows():
    for module, names in GONE.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    signal.SIGBREAK = signal.CTRL_BREAK_EVENT = signal.SIGUSR2
    msvcrt = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.locking = 2, locking
    sys.modules["msvcrt"] = msvcrt
    for name in ("fcntl", "grp", "pwd", "resource", "termios"):
        sys.modules[name] = None
    os.open = like_windows_open(os.open)
    builtins.open = io.open = like_windows_io_open(io.open)
    os.replace, os.rename = checked(os.replace, 2), checked(os.rename, 2)
    os.unlink = os.remove = checked(os.unlink, 1)
    os.mkdir = checked(os.mkdir, 1)
    os.fsync, os.kill = like_windows_fsync(os.fsync), like_windows_kill(os.kill)
    shutil._use_fd_functions = False  # so that rmtree goes by paths
    select.select = like_windows_select(select.select)
    if accessor := getattr(pathlib, "_NormalAccessor", None):  # Python 3.10
        for name in ("mkdir", "rename", "replace", "unlink"):
            setattr(accessor, name, staticmethod(getattr(os, name)))
        accessor.open = staticmethod(io.open)
    subprocess.Popen.__init__ = like_windows_popen(subprocess.Popen.__init__)


become_windows()
