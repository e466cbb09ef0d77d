"""Files that are written whole or not at all, and caches that are built once."""

import multiprocessing
import os
import time

import pytest

from minitransformer.files import atomic_write, build_once, write_bytes


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "a"
    write_bytes(path, b"old")

    def fails():
        with atomic_write(path) as partial:
            partial.write_bytes(b"ne")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def _build(path, log):
    def build(partial):
        with open(log, "a") as file:
            file.write("built\n")
        partial.mkdir()
        (partial / "part").write_text("one")
        time.sleep(0.3)
        (partial / "rest").write_text("two")

    found = build_once(path, build)
    assert sorted(p.name for p in found.iterdir()) == ["part", "rest"]


def test_of_several_processes_one_builds_and_all_see_it_whole(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    arguments = (tmp_path / "cache" / "x", tmp_path / "log")
    processes = [spawn.Process(target=_build, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_leftovers_of_a_crash_are_built_anew(tmp_path):
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".x.partial" / "half").write_text("")
    _build(tmp_path / "x", tmp_path / "log")

    def fails(partial):
        partial.write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(tmp_path / "y", fails)
    assert not (tmp_path / "y").exists()
    assert not (tmp_path / ".y.partial").exists()
