"""What a program does to a folder, step by step, and what a crash may leave of it.

`recording` does not watch the functions that write, for a library may have its own. It
looks at the folder itself whenever Python announces an opening, a renaming, a removal
and so on (an audit event), and after each call of fsync. `crashes` yields the folders
that may be found when the machine starts again.
"""

import os
import random
import shutil
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass

ROOT = 0
EVENTS = {"open", "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename"}
EVENTS |= {"os.rmdir", "os.symlink", "os.truncate"}
Files = dict[str, bytes | None]  # by path; of a folder, None


@dataclass(frozen=True)
class Look:
    """The folder at a moment, by the numbers of its files, whatever their names are."""

    names: dict[int, dict[str, int]]  # of each folder
    data: dict[int, bytes]
    synced: int | None = None  # what the call of fsync before was about

    def files(self, names=None, data=None):
        """Return all that can be reached, perhaps with other names or data."""
        names, data = names or self.names, self.data if data is None else data
        found = {}
        left = [(ROOT, "")]
        while left:
            folder, path = left.pop()
            for name, number in names.get(folder, {}).items():
                if number in self.data:
                    found[path + name] = data[number]
                else:
                    found[path + name] = None
                    left.append((number, f"{path}{name}/"))
        return found


class Recorder:
    """Looks at the folder `root`, and the promises that were made meanwhile."""

    def __init__(self, root):
        self.root = root.absolute()
        self.looks = []
        self.promises = []
        self._numbers = {self.root.stat().st_ino: ROOT}  # by inode
        self._next = ROOT + 1
        self._lock, self._is_looking = threading.RLock(), False
        self.look()

    def promise(self, value):
        """Note that `value` holds from here on, whatever happens."""
        self.look()
        self.promises.append((len(self.looks) - 1, value))

    def event(self, name, arguments):
        """Take an audit event, which comes before what it announces."""
        if name == "open" and not arguments[2] & (os.O_CREAT | os.O_TRUNC):
            return
        if name in EVENTS and not self._is_looking:
            self.look()

    def look(self, descriptor=None):
        """Keep what the folder holds, unless nothing has changed or was synced."""
        with self._lock:
            self._is_looking = True
            names, data = self._read()
            self._is_looking = False
            synced = None
            if descriptor is not None:
                synced = self._numbers.get(os.fstat(descriptor).st_ino)
            look = Look(names, data, synced)
            if synced is not None or not self.looks or look != self.looks[-1]:
                self.looks.append(look)

    def _read(self):
        """Return the names in each folder and the data of each file, by numbers."""
        names, data, numbers = {}, {}, {self.root.stat().st_ino: ROOT}
        left = [(ROOT, self.root)]
        while left:
            folder, path = left.pop()
            names[folder] = {}
            for item in sorted(path.iterdir()):
                inode = item.lstat().st_ino
                number = self._numbers.get(inode)
                if number is None:
                    number, self._next = self._next, self._next + 1
                    self._numbers[inode] = number
                numbers[inode] = names[folder][item.name] = number
                if item.is_dir():
                    left.append((number, item))
                else:
                    data[number] = item.read_bytes()
        self._numbers = numbers  # an inode may come again as that of another file
        return names, data


_active = []


def _hook(name, arguments):
    for recorder in _active:
        recorder.event(name, arguments)


@contextmanager
def recording(root):
    """Record what happens to the folder `root`."""
    if not getattr(sys, "_crash_points_hook", False):
        sys.addaudithook(_hook)  # for the life of this process
        sys._crash_points_hook = True
    recorder, original = Recorder(root), os.fsync

    def sync(descriptor):
        recorder.look()
        original(descriptor)
        recorder.look(descriptor)

    os.fsync = sync
    _active.append(recorder)
    try:
        yield recorder
        recorder.look()
    finally:
        _active.remove(recorder)
        os.fsync = original


@dataclass(frozen=True)
class Crash:
    """A folder as it may be found after the look `done`."""

    done: int
    how: str
    files: Files


def crashes(looks, at=None, forget=()):
    """Yield what may be found after a crash at every point.

    The process may be killed: everything that was done is there, and half of what was
    being written. Or power may fail. Then the changes of names came to the disk in
    their order, the first few of them, but certainly those of a folder that was synced
    since. What was written to files since their last sync is there, or lost, or zeros
    have come in its place, or it is there in part. `at`: only after this look.
    `forget`: calls of fsync that are taken out.
    """
    data_synced = dict(looks[0].data)
    names_synced = dict.fromkeys(looks[0].names, 0)
    for done, look in enumerate(looks):
        if look.synced is not None and done not in forget:
            if look.synced in look.data:
                data_synced[look.synced] = look.data[look.synced]
            else:
                names_synced[look.synced] = done
        if at not in (None, done):
            continue
        yield Crash(done, "killed", look.files())
        yield from _half_written(done, look, looks[min(done + 1, len(looks) - 1)])
        losses, before = [*_losses(look.data, data_synced)], None
        for kept in range(done, -1, -1):
            names = {
                folder: looks[max(kept, names_synced.get(folder, 0))].names.get(
                    folder, {}
                )
                for folder in look.names.keys() | looks[kept].names.keys()
            }
            if names == before:
                continue  # a file was written
            before = names
            numbers = {n for x in names.values() for n in x.values()}
            for how, data in losses:
                known = {**looks[kept].data, **data_synced, **data}
                if numbers <= known.keys() | names.keys():
                    files = Look(names, known).files()
                    yield Crash(done, f"power lost, names as of {kept}, {how}", files)


def _half_written(done, look, following):
    """Yield the folder with half of what is appended to a file until the next look."""
    for number, new in following.data.items():
        old = look.data.get(number)
        if old is not None and new[: len(old)] == old and len(new) > len(old) + 1:
            half = {**look.data, number: new[: (len(old) + len(new)) // 2]}
            yield Crash(done, "killed while writing", look.files(data=half))


def _losses(now, synced):
    """Yield what may have become of the data of files that are not synced."""
    yield "data written", now
    lost = {number: synced.get(number, b"") for number in now}
    if lost == now:
        return
    yield "data lost", lost
    zeros, cut = {}, {}
    for number, new in now.items():  # what was synced stays
        kept = len(lost[number]) if new.startswith(lost[number]) else 0
        zeros[number] = new[:kept].ljust(len(new), b"\0")
        cut[number] = new[: max(kept, len(new) // 2)]
    yield "zeros in its place", zeros
    yield "data cut", cut


def lay_out(files, folder):
    """Make `folder` one that holds these files, as it is found days later."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in sorted(files.items()):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    for name in files:
        os.utime(folder / name, (0, 0))


def replay(recorder, folder, check, sample=None, at=None, forget=()):
    """Call `check` with each crash laid out in `folder`, and the promises made before.

    Each folder is tried once, and only `sample` of them if that is given. `at`: only
    after this look. Returns: how many there were. Raises: AssertionError naming the
    first crash that fails.
    """
    found = {}
    for crash in crashes(recorder.looks, at, forget):
        promises = [x for done, x in recorder.promises if done <= crash.done]
        key = len(promises), frozenset(crash.files.items())
        found.setdefault(key, (crash, promises))
    chosen = list(found.values())
    if sample is not None and sample < len(chosen):
        chosen = random.Random(0).sample(chosen, sample)
    original = os.fsync
    os.fsync = lambda descriptor: None  # for speed
    try:
        for crash, promises in chosen:
            lay_out(crash.files, folder)
            try:
                check(folder, promises)
            except Exception as error:
                sizes = {n: x and len(x) for n, x in sorted(crash.files.items())}
                raise AssertionError(
                    f"{error}\n{crash.how}, look {crash.done}\nfound: {sizes}"
                ) from error
    finally:
        os.fsync = original
        shutil.rmtree(folder, ignore_errors=True)
    return (
        f"{len(recorder.looks)} points, {len(found):,} folders, {len(chosen):,} tried"
    )
