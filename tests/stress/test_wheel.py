"""The built wheel installs and runs in fresh environments of several Pythons."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from support.scripts import ROOT

VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def test_the_installed_command_lists_its_commands(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)  # which a script sets
    [entry] = metadata.entry_points(group="console_scripts", name="minitransformer")
    main = entry.load()
    assert main([]) == 0
    assert "  train " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0


def pythons():
    """Interpreters that are to be had here, by version."""
    found = {}
    for version in VERSIONS:
        places = [shutil.which(f"python{version}")]
        places += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for place in places:
            command = [place, "-c", "import venv"]
            if place and not subprocess.run(command, capture_output=True).returncode:
                found[version] = place
                break
    return found


def tracked(*places):
    """The files under version control, in some folders or anywhere."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", *places]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs git and its repository")
    return set(done.stdout.splitlines())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs the package build: pip install -e '.[dev]'")
    out, source = (tmp_path_factory.mktemp(name) for name in ("dist", "source"))
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    # The wheel is built from the sdist, which therefore is complete.
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [built] = out.glob("*.whl")
    return built


@pytest.mark.stress
def test_wheel_and_sdist_hold_what_they_need_and_no_more(wheel):
    scripts = {
        "minitransformer/scripts/train.py",
        "minitransformer/scripts/translate.py",
    }
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    folder = "-".join(wheel.name.split("-")[:2])
    about = {f"{folder}.dist-info/{name}" for name in about}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == tracked("minitransformer") | scripts | about
        for name in ("train.py", "translate.py"):
            packed = archive.read(f"minitransformer/scripts/{name}")
            assert packed == (ROOT / name).read_bytes()
        readme = archive.read(f"{folder}.dist-info/METADATA").decode()
        assert readme.count("](") > 20
        assert not re.search(r"\]\((?!https:)", readme)
    with tarfile.open(wheel.parent / f"{folder}.tar.gz") as archive:
        files = {member.name for member in archive if member.isfile()}
    expected = {f"{folder}/{name}" for name in tracked() | {"PKG-INFO"}}
    assert files == expected
    if importlib.util.find_spec("twine"):
        command = [sys.executable, "-m", "twine", "check", "--strict"]
        subprocess.run([*command, *wheel.parent.iterdir()], check=True)


@pytest.mark.stress
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_runs_the_built_in_job(tmp_path, wheel, version):
    python = pythons().get(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    bin_ = tmp_path / "venv" / "bin"
    subprocess.run([bin_ / "pip", "install", "--quiet", str(wheel)], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command, options = (
        bin_ / "minitransformer",
        {"cwd": empty, "check": True, "env": clean},
    )
    subprocess.run([command, "train", "--run", "runs/first"], **options)
    line = "The old man gives the small child a red apple."
    translate = [command, "translate", "--model", "runs/first", line]
    done = subprocess.run(translate, capture_output=True, text=True, **options)
    assert done.stdout == "Der alte Mann gibt dem kleinen Kind einen roten Apfel.\n"
