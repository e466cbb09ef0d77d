"""Files that are written whole or not at all, and caches that are built once."""

import errno
import fcntl
import os
import stat
import tempfile
import threading
import time
from contextlib import nullcontext as no_error
from contextlib import suppress
from pathlib import Path

import pytest

from minitransformer.system import files
from minitransformer.system.files import (
    atomic_write,
    build_once,
    file_lock,
    write_bytes,
)
from minitransformer.system.workers import CAN_FORK, parallel_map
from support.locks import held_elsewhere


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "a"
    write_bytes(path, b"old")
    with suppress(KeyError), atomic_write(path) as file:
        file.write(b"ne")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("new", [b"old", b"new"])
def test_another_content_is_replaced_only_on_demand(tmp_path, replace, new):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    refused = new != b"old" and not replace
    error = pytest.raises(OSError, match=r"another content.*a'")
    with error if refused else no_error():
        write_bytes(path, new, replace)
    assert path.read_bytes() == (b"old" if refused else new)
    assert os.listdir(tmp_path) == ["a"]


def test_an_old_file_keeps_its_mode_and_a_new_one_gets_that_of_the_umask(tmp_path):
    for mode in (0o600, 0o644, 0o751, 0o400):
        path = tmp_path / oct(mode)
        path.write_bytes(b"old")
        path.chmod(mode)
        write_bytes(path, b"new", replace=True)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.read_bytes() == b"new"
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "new", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.parametrize("exists", [True, False])
def test_the_target_of_links_is_replaced(tmp_path, exists):
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    if exists:
        target.write_bytes(b"old")
    (tmp_path / "near").symlink_to("folder/far")
    (tmp_path / "folder" / "far").symlink_to("target")
    write_bytes(tmp_path / "near", b"new", replace=True)
    assert (tmp_path / "near").is_symlink()
    assert (tmp_path / "folder" / "far").is_symlink()
    assert target.read_bytes() == b"new"
    assert not target.is_symlink()


def test_a_device_and_a_pipe_are_written_directly(tmp_path):
    write_bytes(Path("/dev/null"), b"nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_bytes(Path("/dev/full"), b"x" * 100_000)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, b"through")
    reader.join()
    assert found == [b"through"]
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("way", ["/proc/self/cwd/a", "/proc/self/root{}/a"])
def test_a_file_by_way_of_proc_is_replaced_and_not_appended_to(place, way):
    for data in (b"one", b"two"):
        write_bytes(Path(way.format(place)), data, replace=True)
    assert Path("a").read_bytes() == b"two"


@pytest.mark.parametrize("way", ["/dev/fd/{}", "/proc/self/fd/{}", "/dev/../dev/fd/{}"])
def test_an_open_file_is_written_where_it_is(tmp_path, way):
    with open(tmp_path / "a", "wb") as file:
        number = file.fileno()
        write_bytes(Path(way.format(number)), b"one")
        assert os.stat(tmp_path / "a").st_ino == os.fstat(number).st_ino
    assert (tmp_path / "a").read_bytes() == b"one"


def test_a_folder_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(IsADirectoryError, match=str(tmp_path)), atomic_write(tmp_path):
        pytest.fail("it was opened")


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127])
def test_the_longest_names_can_be_written(tmp_path, name):
    write_bytes(tmp_path / name, b"x")
    assert os.listdir(tmp_path) == [name]


def test_a_folder_replaces_an_empty_one_only(tmp_path):
    path = tmp_path / "x"
    path.mkdir()
    make_folder(path, "one")
    with pytest.raises(OSError, match="x"):
        make_folder(path, "two")
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(path) == ["one"]


# Files, folders and caches alike


def make_file(path, name="part", then=str):
    with atomic_write(path) as file:
        file.write(b"half")
        then()


def make_folder(path, name="part", then=str):
    with files.atomic_folder(path) as partial:
        (partial / name).write_text("half")
        then()


def make_cache(path, name="part", then=str):
    def build(partial):
        partial.write_text("half")
        then()

    build_once(path, build, Path.read_text)


ways = pytest.mark.parametrize("make", [make_file, make_folder, make_cache])


@ways
def test_a_full_disk_is_reported_with_the_name_and_leaves_nothing(tmp_path, make):
    full = failing(errno.ENOSPC, None)
    with pytest.raises(OSError, match=r"No space left on device: '[^.]*/x'"):
        make(tmp_path / "x", then=full)
    assert {*os.listdir(tmp_path)} <= {".x.lock"}


@ways
def test_the_next_write_deletes_what_a_crash_left_of_the_same_name(tmp_path, make):
    """After a day, since the writer may be alive."""
    for name, age in (("a", 90_000), ("[a]", 90_000), ("[a]", 80_000)):
        left = tmp_path / f".{name}.{age:016}.partial"
        left.mkdir()
        (left / "half").write_text("")
        os.utime(left, (time.time() - age,) * 2)
    make(tmp_path / "[a]")
    left = {f".[a].{80_000:016}.partial", f".a.{90_000:016}.partial", "[a]"}
    assert {*os.listdir(tmp_path)} - {".[a].lock"} == left


def failing(number, real, fails=lambda *arguments: True):
    def call(*arguments, **options):
        if fails(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    return call


def build_a_folder(partial):
    partial.mkdir()
    (partial / "part").write_text("one")


@pytest.mark.skipif(not CAN_FORK, reason="processes are forked on Linux only")
def test_of_several_processes_one_builds_and_all_see_it_whole(tmp_path):
    def build(partial):
        with open(tmp_path / "log", "a") as file:
            file.write("built\n")
        build_a_folder(partial)
        time.sleep(0.3)
        (partial / "rest").write_text("two")

    def built(name):
        return build_once(tmp_path / "cache" / name, build, os.listdir)

    with parallel_map(built, 3) as each:
        assert [*map(set, each("xxx"))] == [{"part", "rest"}] * 3
    assert (tmp_path / "log").read_text() == "built\n"


@pytest.mark.parametrize("kind", ["file", "folder", "link to a folder"])
def test_what_is_damaged_is_built_again(tmp_path, capsys, kind):
    path, elsewhere = tmp_path / "x", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "file":
        path.write_text("damaged")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(elsewhere)

    def read(path):
        if path.is_dir() or path.read_text() == "damaged":
            raise ValueError(f"{path}: damaged")
        return path.read_text()

    assert build_once(path, lambda p: p.write_text("whole"), read) == "whole"
    assert capsys.readouterr().err == f"{path}: damaged; it is made again\n"
    assert elsewhere.is_dir()


def test_what_is_built_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    build_once(tmp_path / "x", build_a_folder, os.listdir)
    part, folder, parent = synced
    assert (part, parent) == ("part", tmp_path.name)
    assert folder.startswith(".x.")


def test_a_full_disk_names_the_folder_and_not_the_hidden_one(tmp_path):
    with (
        pytest.raises(OSError, match=r"No space left on device: '[^.]*/x'"),
        files.atomic_folder(tmp_path / "x") as partial,
        atomic_write(partial / "train.en") as file,
    ):
        raise OSError(errno.ENOSPC, "No space left on device", str(file.name))


def test_what_others_put_into_a_damaged_folder_stays(tmp_path):
    path = tmp_path / "x"
    path.mkdir()
    for name in ("part", "thesis"):
        (path / name).write_text("of the user")

    def damaged(path):
        raise ValueError(f"{path}: damaged")

    with pytest.raises(OSError, match=r"Directory not empty: '.*/x'"):
        build_once(path, build_a_folder, damaged)
    assert [p.read_text() for p in path.iterdir()] == ["of the user"] * 2


# File systems and folders that cannot do everything


@pytest.mark.parametrize(
    "number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EIO]
)
@pytest.mark.parametrize("wait", [False, True])
def test_without_locks_a_line_says_so_where_it_matters(
    tmp_path, monkeypatch, capsys, number, wait
):
    """Another error is none of a lock that is missing."""
    monkeypatch.setattr(fcntl, "flock", failing(number, fcntl.flock))
    path, told = tmp_path / "lock", os.strerror(number)
    hurts = number == errno.EIO
    with (
        pytest.raises(OSError, match=told) if hurts else no_error(),
        file_lock(path, wait),
    ):
        pass
    line = f"{path}: {told}: nobody is kept out\n"
    assert capsys.readouterr().err == ("" if wait or hurts else line)


@pytest.mark.parametrize("call", ["fsync", "open"])
@pytest.mark.parametrize(
    ("number", "hurts"),
    [(errno.EINVAL, 0), (errno.ENOTSUP, 0), (errno.EACCES, 0), (errno.EIO, 1)],
)
def test_a_folder_that_cannot_be_synced_costs_no_output(
    tmp_path, monkeypatch, call, number, hurts
):
    def is_folder(place, *rest):
        return os.path.isdir(place)

    monkeypatch.setattr(os, call, failing(number, getattr(os, call), is_folder))
    error = pytest.raises(OSError, match=rf"'{tmp_path}'")
    with error if hurts else no_error():
        write_bytes(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_a_file_that_cannot_be_synced_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL, os.fsync))
    with pytest.raises(OSError, match=r"Invalid argument: '.*/a'"):
        write_bytes(tmp_path / "a", b"half")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no files in memory")
def test_a_file_in_memory_is_no_device():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "a")
        for data in (b"one", b"two"):
            write_bytes(path, data, replace=True)
        assert path.read_bytes() == b"two"


def test_a_lock_that_is_held_is_waited_for_and_the_user_told_once(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(files, "SILENT_SECONDS", 0.1)
    with held_elsewhere(f"file_lock(Path({str(tmp_path / 'lock')!r}))") as other:
        with pytest.raises(TimeoutError), file_lock(tmp_path / "lock", wait=False):
            pass
        threading.Timer(0.5, other.stdin.close).start()
        with file_lock(tmp_path / "lock"):
            pass
    message = f"waiting for another process, which locks {tmp_path / 'lock'}\n"
    assert capsys.readouterr().err == message
