"""What a program does to a folder, step by step, and what a crash may leave of it.

`Recorder` makes a list of operations. It does not watch the functions that write, for
a library may have its own. It looks at the folder itself: Python announces every
opening, renaming, removal and so on before it happens (an audit event), and each time
the folder is compared with what it held before. Bytes that changed become writes,
whoever wrote them. A name that changed as no event announced is an error. Only the
calls of fsync leave no trace; one that is not seen makes the crashes below worse.

`crashes` yields the folders that may be found when the machine starts again.
"""

import dataclasses
import math
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = 0
Place = tuple[int, str]  # the number of a folder, and a name in it
CREATES_OR_TRUNCATES = os.O_CREAT | os.O_TRUNC
ANNOUNCED = {
    "open",
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
}


@dataclass(frozen=True)
class Operation:
    """One change. `file` is the number of a file or folder, whatever its names are."""

    kind: (
        str  # create, mkdir, link, rename, unlink, rmdir, write, truncate, chmod, sync
    )
    file: int
    at: Place | None = None  # the name that appears or goes
    to: Place | None = None  # the new name, of a rename
    offset: int = 0
    data: bytes = b""
    size: int = 0
    mode: int = 0

    def __str__(self) -> str:
        name = self.to or self.at
        about = name[1] if name else f"#{self.file}"
        if self.kind == "write":
            about += f" {len(self.data)} bytes at {self.offset}"
        return f"{self.kind} {about}"


@dataclass
class Tree:
    """The names, contents and modes below a folder; the content of a folder is None."""

    entries: dict[Place, int] = field(default_factory=dict)
    contents: dict[int, bytes | None] = field(default_factory=lambda: {ROOT: None})
    modes: dict[int, int] = field(default_factory=dict)

    def copy(self) -> "Tree":
        return Tree(dict(self.entries), dict(self.contents), dict(self.modes))

    def rename(self, operation: Operation) -> None:
        """Do the part of an operation that concerns names."""
        goes = operation.kind in ("rename", "unlink", "rmdir")
        # In a tree that missed earlier changes another file may have this name.
        if goes and self.entries.get(operation.at) == operation.file:
            del self.entries[operation.at]
        if operation.kind == "rename":
            self.entries[operation.to] = operation.file
        if operation.kind in ("create", "mkdir", "link"):
            self.entries[operation.at] = operation.file

    def do(self, operation: Operation) -> None:
        self.rename(operation)
        number = operation.file
        if operation.kind in ("create", "mkdir"):
            self.contents[number] = b"" if operation.kind == "create" else None
        if operation.kind in ("create", "mkdir", "chmod"):
            self.modes[number] = operation.mode
        if operation.kind == "truncate":
            self.contents[number] = self.contents[number][: operation.size]
        if operation.kind == "write":
            old, end = self.contents[number], operation.offset + len(operation.data)
            start = old[: operation.offset].ljust(operation.offset, b"\0")
            self.contents[number] = start + operation.data + old[end:]

    def files(self) -> dict[str, tuple[bytes | None, int]]:
        """Return the content and mode of everything that can be reached, by path."""
        inside: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), number in self.entries.items():
            inside.setdefault(folder, []).append((name, number))
        found, left = {}, [(ROOT, "")]
        while left:
            folder, path = left.pop()
            for name, number in inside.get(folder, []):
                found[path + name] = self.contents[number], self.modes[number]
                if self.contents[number] is None:
                    left.append((number, f"{path}{name}/"))
        return found

    def lay_out(self, root: Path) -> None:
        """Make `root` a folder that holds this tree, as it is found days later."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for name, (content, mode) in sorted(self.files().items()):
            if content is None:
                (root / name).mkdir()
            else:
                (root / name).write_bytes(content)
            (root / name).chmod(mode)
            os.utime(root / name, (0, 0))


class Recorder:
    """The operations of this process on the folder `root`, and the promises it made."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.operations: list[Operation] = []
        self.promises: list[tuple[int, object]] = []
        self._numbers = {self.root.stat().st_ino: ROOT}  # by inode
        self._next = ROOT + 1
        self._announced: tuple[str, tuple] | None = None
        self._lock, self._owner = threading.RLock(), 0
        self.start = self._look()
        self.now = self.start.copy()

    def promise(self, value: object) -> None:
        """Note that `value` holds from here on, whatever happens."""
        with self._lock:
            self._notice()
            self.promises.append((len(self.operations), value))

    def event(self, name: str, arguments: tuple) -> None:
        """Take an audit event, which comes before what it announces."""
        if name not in ANNOUNCED or self._owner == threading.get_ident():
            return
        if name == "open" and not arguments[2] & CREATES_OR_TRUNCATES:
            return
        with self._lock:
            self._notice()
            self._announced = name, arguments

    def sync(self, descriptor: int) -> None:
        """Note a call of fsync."""
        with self._lock:
            self._notice()
            number = self._numbers.get(os.fstat(descriptor).st_ino)
            if number is not None:
                self.operations.append(Operation("sync", number))

    def _notice(self) -> None:
        """Turn what has changed since the last look into operations."""
        self._owner = threading.get_ident()
        try:
            found = self._look()
        finally:
            self._owner = 0
        announced, self._announced = self._announced, None
        if announced is not None:
            for operation in self._explain(*announced, found):
                self._add(operation)
        if self.now.entries != found.entries:
            raise AssertionError(
                f"names changed as nothing announced ({announced}): "
                f"{self.now.entries.items() ^ found.entries.items()}"
            )
        for number, content in sorted(found.contents.items()):
            for operation in _differences(number, self.now.contents[number], content):
                self._add(operation)
            if number and self.now.modes[number] != found.modes[number]:
                mode = found.modes[number]
                self._add(Operation("chmod", number, mode=mode))

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.now.do(operation)

    def _look(self) -> Tree:
        tree, numbers = Tree(), {self.root.stat().st_ino: ROOT}
        left = [(ROOT, self.root)]
        while left:
            folder, path = left.pop()
            for item in sorted(path.iterdir()):
                status = item.lstat()
                number = self._numbers.get(status.st_ino)
                if number is None:
                    number, self._next = self._next, self._next + 1
                    self._numbers[status.st_ino] = number
                numbers[status.st_ino] = number
                tree.entries[folder, item.name] = number
                tree.modes[number] = status.st_mode & 0o7777
                if item.is_symlink() or not (item.is_dir() or item.is_file()):
                    raise AssertionError(f"{item}: neither a file nor a folder")
                tree.contents[number] = None if item.is_dir() else item.read_bytes()
                if item.is_dir():
                    left.append((number, item))
        self._numbers = numbers  # an inode may come again as that of another file
        return tree

    def _place(self, path: object, folder: int = -1) -> Place | None:
        """Return what a name stands for, if it is below the root and its folder is."""
        if isinstance(path, int):
            return None
        absolute = Path(os.path.abspath(os.fsdecode(path)))
        if folder >= 0:  # relative to an open folder
            number = self._numbers.get(os.fstat(folder).st_ino)
            return None if number is None else (number, os.fsdecode(path))
        try:
            number = self._numbers.get(absolute.parent.stat().st_ino)
        except OSError:
            return None
        return None if number is None else (number, absolute.name)

    def _explain(
        self, event: str, arguments: tuple, found: Tree
    ) -> Iterator[Operation]:
        """Yield what an announced operation has done to names and sizes."""
        old, new = self.now.entries, found.entries
        if event == "os.rename":
            at = self._place(arguments[0], arguments[2])
            to = self._place(arguments[1], arguments[3])
            if at in old and at not in new and new.get(to) == old[at]:
                yield Operation("rename", old[at], at, to)
            return
        if event == "os.link":
            at = self._place(arguments[1], arguments[3])
            if at in new and at not in old:
                yield Operation("link", new[at], at)
            return
        folder = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}.get(event)
        at = self._place(arguments[0], -1 if folder is None else arguments[folder])
        goes = {"os.remove": "unlink", "os.rmdir": "rmdir"}.get(event)
        comes = {"open": "create", "os.mkdir": "mkdir"}.get(event)
        if goes and at in old and at not in new:
            yield Operation(goes, old[at], at)
        elif comes and at not in old and at in new:
            yield Operation(comes, new[at], at, mode=found.modes[new[at]])
        elif event == "open" and at in old and arguments[2] & os.O_TRUNC:
            yield Operation("truncate", old[at])


def _differences(
    number: int, old: bytes | None, new: bytes | None
) -> Iterator[Operation]:
    """Yield the writes and truncations that make `new` of `old`."""
    if old is None or new is None or old == new:
        return
    if len(new) < len(old):
        yield Operation("truncate", number, size=len(new))
        old = old[: len(new)]
    if old != new:
        first = _common(old, new)
        yield Operation("write", number, offset=first, data=new[first:])


def _common(first: bytes, second: bytes) -> int:
    """Return the number of bytes with which both begin."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_active: list[Recorder] = []


def _hook(name: str, arguments: tuple) -> None:
    for recorder in _active:
        recorder.event(name, arguments)


@contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Record what happens to the folder `root`."""
    if not getattr(sys, "_crash_points_hook", False):
        sys.addaudithook(_hook)  # for the life of this process
        sys._crash_points_hook = True
    recorder, original = Recorder(root), os.fsync

    def sync(descriptor: int) -> None:
        original(descriptor)
        recorder.sync(descriptor)

    os.fsync = sync
    _active.append(recorder)
    try:
        yield recorder
        recorder.promise(None)
    finally:
        _active.remove(recorder)
        os.fsync = original
    again = recorder.start.copy()
    for operation in recorder.operations:
        again.do(operation)
    assert again.files() == recorder._look().files(), "an operation was missed"


@dataclass(frozen=True)
class Crash:
    """A folder as it may be found after `done` operations."""

    done: int
    how: str
    tree: Tree


def crashes(
    start: Tree, operations: list[Operation], between: tuple[int, float] = (0, math.inf)
) -> Iterator[Crash]:
    """Yield what may be found after a crash at every point of the operations.

    The process may be killed: everything that was done is there, and the write that was
    being done has any length. Or power may fail. Then the changes of names came to the
    disk in their order, all of them or the first few, but certainly those of a folder
    that was synced since. What was written to a file since its last sync is there, or
    lost, or zeros have come in its place, or it is there in part; in all files or in
    the one that was written last. `between`: how many operations were done.
    """
    now, synced = start.copy(), dict(start.contents)
    names, waiting = start.copy(), list[Operation]()
    written = list[int]()  # files, the newest last
    for done in range(len(operations) + 1):
        operation = operations[done] if done < len(operations) else None
        if between[0] <= done <= between[1]:
            yield Crash(done, "killed", now.copy())
            yield from _powerless(done, now, synced, names, waiting, written)
            if operation is not None and operation.kind == "write":
                yield from _cut_short(done, now, operation)
        if operation is None:
            return
        now.do(operation)
        if operation.kind in ("write", "truncate"):
            written = [x for x in written if x != operation.file] + [operation.file]
        if operation.kind != "sync":
            if operation.at is not None:
                waiting.append(operation)
        elif now.contents[operation.file] is not None:
            synced[operation.file] = now.contents[operation.file]
        else:
            left = []
            for change in waiting:
                if (change.to or change.at)[0] == operation.file:
                    names.rename(change)
                else:
                    left.append(change)
            waiting = left


def _cut_short(done: int, now: Tree, write: Operation) -> Iterator[Crash]:
    """Yield crashes in the middle of a write."""
    size = len(write.data)
    for length in sorted({1, size // 2, size - 1} - {0, size}):
        tree = now.copy()
        tree.do(dataclasses.replace(write, data=write.data[:length]))
        yield Crash(done, f"killed {length} bytes into {write}", tree)


def _powerless(
    done: int,
    now: Tree,
    synced: dict[int, bytes | None],
    names: Tree,
    waiting: list[Operation],
    written: list[int],
) -> Iterator[Crash]:
    """Yield what is on the disk: `synced` data and `names`, and perhaps what waits."""
    for number in range(len(waiting) + 1):
        partly = names.copy()
        for change in waiting[:number]:
            partly.rename(change)
        reachable = set(partly.entries.values())
        unsynced = [
            file
            for file in written
            if file in reachable and now.contents[file] != synced.get(file, b"")
        ]
        for how, contents in _losses(now.contents, synced, unsynced):
            tree = Tree(dict(partly.entries), contents, dict(now.modes))
            kept = f"{number} of {len(waiting)} unsynced names kept"
            yield Crash(done, f"power lost, {kept}, {how}", tree)


def _losses(
    contents: dict[int, bytes | None],
    synced: dict[int, bytes | None],
    unsynced: list[int],
) -> Iterator[tuple[str, dict[int, bytes | None]]]:
    """Yield what may have become of the data of unsynced files, the newest last."""
    yield "data written", dict(contents)
    groups = {"all": unsynced}
    if len(unsynced) > 1:
        groups["the newest"] = unsynced[-1:]
    for whose, chosen in groups.items():
        for how in ("lost", "zeros", "cut") if chosen else ():
            changed = dict(contents)
            for number in chosen:
                old, new = synced.get(number, b""), contents[number]
                same = _common(old, new)
                if how == "lost":
                    changed[number] = old
                elif how == "zeros":
                    changed[number] = new[:same].ljust(len(new), b"\0")
                else:
                    changed[number] = new[: max(same, len(new) // 2)]
            yield f"unsynced data {how} of {whose}", changed


def replay(
    recorder: Recorder,
    folder: Path,
    check: Callable[[Path, list[Any]], None],
    sample: int | None = None,
    between: tuple[int, float] = (0, math.inf),
    forget: Sequence[int] = (),
) -> str:
    """Call `check` with each crash laid out in `folder`, and the promises made before.

    Each folder is tried once, and only `sample` of them if that is given. `between`:
    of which operations. `forget`: calls of fsync that are taken out. Returns: how many
    there were. Raises: AssertionError naming the first crash that fails.
    """
    operations = list(recorder.operations)
    for number in forget:
        operations[number] = dataclasses.replace(operations[number], kind="nothing")
    found: dict[object, tuple[Crash, list[Any]]] = {}
    variants = 0
    for crash in crashes(recorder.start, operations, between):
        variants += 1
        promises = [x for done, x in recorder.promises if done <= crash.done and x]
        key = len(promises), frozenset(crash.tree.files().items())
        found.setdefault(key, (crash, promises))
    chosen = list(found.values())
    if sample is not None and sample < len(chosen):
        chosen = random.Random(0).sample(chosen, sample)
    original = os.fsync
    os.fsync = lambda descriptor: None  # for speed
    try:
        for crash, promises in chosen:
            crash.tree.lay_out(folder)
            try:
                check(folder, promises)
            except Exception as error:
                sizes = {
                    name: content and len(content)
                    for name, (content, _) in sorted(crash.tree.files().items())
                }
                last = ", ".join(map(str, operations[: crash.done][-6:]))
                raise AssertionError(
                    f"{error}\n{crash.how} after {last}\nfound: {sizes}"
                ) from error
    finally:
        os.fsync = original
        shutil.rmtree(folder, ignore_errors=True)
    return (
        f"{len(operations) + 1} prefixes, {variants:,} variants, "
        f"{len(found):,} different folders, {len(chosen):,} tried"
    )
