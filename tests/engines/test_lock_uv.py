"""Locks against the package index this machine is set to (network)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from imagefactory.lock import LockRequest
from imagefactory.lock.index import find_index, local_path
from imagefactory.lock.pypi import UvLocker, format_lock, write_lock
from imagefactory.model import Base, Lock, Target, Where
from imagefactory.progress import Quiet
from imagefactory.settings import Setting
from imagefactory.wheels import WheelCache

WHERE = Where(file="recipes/small.yaml", line=1, column=1)
PYTHON = f"3.{sys.version_info.minor}"
BASE = Base(name="debian", suite="", python=PYTHON, glibc="2.36", packages=(), public="", where=WHERE)
# The smallest that is real: a framework's name, a CUDA runtime, and one package with many wheels.
SMALL = Target(
    name="small-1-cu121",
    family="small",
    description="",
    source="pypi",
    framework="markupsafe",
    version="3",
    cuda="12.1",
    python=PYTHON,
    base="debian",
    platform="linux/amd64",
    capabilities=(),
    checks=(),
    requirements=("markupsafe==3.*", "jinja2", "nvidia-cuda-runtime-cu12==12.1.*"),
    constraints=("jinja2<4",),
    environment=(),
    where=WHERE,
)


@pytest.fixture(scope="module")
def uv() -> UvLocker:
    setting = Setting(value="", origin="default")
    index = find_index(setting, environ=os.environ, prefix=Path(sys.prefix))
    return UvLocker(index, python=Path(sys.executable))


@pytest.fixture(scope="module")
def lock(uv: UvLocker) -> Lock:
    return uv.lock(LockRequest(target=SMALL, base=BASE), Quiet())


def test_locking_twice_gives_the_same_text(uv: UvLocker, lock: Lock) -> None:
    again = uv.lock(LockRequest(target=SMALL, base=BASE), Quiet())
    assert format_lock(again) == format_lock(lock)
    assert [wheel.name for wheel in lock.wheels] == ["jinja2", "markupsafe", "nvidia-cuda-runtime-cu12"]


def test_the_wheels_come_and_hold(uv: UvLocker, lock: Lock, tmp_path: Path) -> None:
    cache = WheelCache(tmp_path, uv._index)
    assert len(cache.fetch(lock, uv.addresses, Quiet())) == 3
    assert cache.missing(lock, verify=True) == ()


def test_each_file_is_found_on_its_projects_page(uv: UvLocker, lock: Lock) -> None:
    """The way taken when uv lists a locked file no more gives the same addresses as uv."""
    found = uv._search(list(lock.wheels), lock)
    assert {name: local_path(url) or url for name, url in uv.addresses(lock).items()} == found


def test_pip_installs_a_lock_as_it_is(lock: Lock, tmp_path: Path) -> None:
    write_lock(tmp_path / "lock.txt", lock)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env/bin/python"
    command = [python, "-m", "pip", "install", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*map(str, command), "-r", str(tmp_path / "lock.txt")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = subprocess.run(
        [str(python), "-c", "import jinja2, markupsafe; print(jinja2.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == lock.wheels[0].version
