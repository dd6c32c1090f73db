"""Locks against the package index this machine is set to (network)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.http import local_path
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.locker import lock_pip
from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.index import find_index
from imagefactory.lock.pypi.requirements import format_lock
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import Lock, LockedCondaPackage, SourceLocation
from imagefactory.progress import QuietProgress
from imagefactory.settings.choices import SettingValue
from tests.made.errors import fails
from tests.made.values import make_base, make_target
from tests.services.children import stdout_of

WHERE = SourceLocation(file="recipes/small.yaml", line=1, column=1)
PYTHON = f"3.{sys.version_info.minor}"
BASE = make_base(name="debian", suite="", python=PYTHON, packages=(), public="", where=WHERE)
# The smallest that is real: a framework's name, a CUDA runtime, and one package with many wheels.
SMALL = make_target(
    name="small-1-cu121",
    family="small",
    description="",
    framework="markupsafe",
    version="3",
    python=PYTHON,
    base="debian",
    capabilities=(),
    checks=(),
    requirements=("markupsafe==3.*", "jinja2", "nvidia-cuda-runtime-cu12==12.1.*"),
    constraints=("jinja2<4",),
    environment=(),
    where=WHERE,
)


@pytest.fixture(scope="module")
def uv() -> UvLocker:
    setting = SettingValue(value="", origin="default")
    index = find_index(setting, environ=os.environ, prefix=Path(sys.prefix))
    return UvLocker(index, python=Path(sys.executable))


@pytest.fixture(scope="module")
def lock(uv: UvLocker) -> Lock:
    return uv.lock(LockRequest(target=SMALL, base=BASE), QuietProgress())


def test_locking_twice_gives_the_same_text(uv: UvLocker, lock: Lock) -> None:
    again = uv.lock(LockRequest(target=SMALL, base=BASE), QuietProgress())
    assert format_lock(again) == format_lock(lock)
    assert [wheel.name for wheel in lock.wheels] == ["jinja2", "markupsafe", "nvidia-cuda-runtime-cu12"]


def test_the_wheels_come_and_hold(uv: UvLocker, lock: Lock, tmp_path: Path) -> None:
    cache = PackageCache(tmp_path, uv._index)
    assert len(cache.fetch(lock.wheels, lambda _: uv.addresses(lock), QuietProgress())) == 3
    assert cache.missing(lock.wheels) == ()


def test_each_file_is_found_on_its_projects_page(uv: UvLocker, lock: Lock) -> None:
    """The way taken when uv lists a locked file no more gives the same addresses as uv."""
    listed = uv.listed(list(lock.wheels), lock)
    pages = {file.filename: file.url for files in listed.values() for file in files}
    for name, url in uv.addresses(lock).items():
        assert (local_path(url) or url) == pages[name].partition("#")[0]


def test_a_target_on_another_keeps_its_wheels(uv: UvLocker, lock: Lock) -> None:
    more = replace(SMALL, name="more-1-cu121", on=SMALL.name, requirements=(*SMALL.requirements, "idna==3.7"))
    above = uv.lock(LockRequest(target=more, base=BASE, under=lock), QuietProgress())
    assert [wheel.name for wheel in above.wheels] == ["idna", *(wheel.name for wheel in lock.wheels)]
    assert set(lock.wheels) < set(above.wheels)


def test_what_is_excluded_is_left_out_whoever_requires_it(uv: UvLocker, lock: Lock) -> None:
    """markupsafe is what jinja2 requires; the target below may not lose what it has."""
    less = replace(SMALL, requirements=("jinja2", "idna==3.7"), framework="idna", cuda="none", version="3")
    less = replace(less, exclude=("markupsafe",))
    found = uv.lock(LockRequest(target=less, base=BASE), QuietProgress())
    assert [wheel.name for wheel in found.wheels] == ["idna", "jinja2"]
    mixed = replace(less, source="conda", requirements=(), constraints=(), pip=("jinja2",))
    assert [one.name for one in lock_pip(LockRequest(target=mixed, base=BASE), (), uv)] == ["jinja2"]
    above = replace(SMALL, name="more-1-cu121", on=SMALL.name, exclude=("markupsafe",))
    with fails("package-from-parent", message="'markupsafe'"):
        uv.lock(LockRequest(target=above, base=BASE, under=lock), QuietProgress())


def test_a_pip_part_leaves_out_what_conda_brings(uv: UvLocker, lock: Lock) -> None:
    """The index has markupsafe too, and newer; what an extra of a given package needs comes from there."""
    given = LockedCondaPackage(
        name="markupsafe",
        version="2.1.5",
        build="py0",
        subdir="linux-64",
        url="https://conda.anaconda.org/conda-forge/linux-64/markupsafe-2.1.5-py0.conda",
        filename="markupsafe-2.1.5-py0.conda",
        sha256="0" * 64,
        md5="",
        size=1,
        depends=("python",),
    )
    mixed = replace(SMALL, source="conda", requirements=(), constraints=(), pip=("jinja2",))
    request = LockRequest(target=mixed, base=BASE)
    wheels = lock_pip(request, (given,), uv)
    assert wheels == tuple(wheel for wheel in lock.wheels if wheel.name == "jinja2")
    jinja = replace(given, name="jinja2", version="3.1.4")
    with_extra = replace(request, target=replace(mixed, pip=("jinja2[i18n]",)))
    assert [wheel.name for wheel in lock_pip(with_extra, (given, jinja), uv)] == ["babel"]
    with fails("pip-conda-conflict", message="markupsafe 2.1.5"):
        lock_pip(replace(request, target=replace(mixed, pip=("markupsafe>=3",))), (given,), uv)


def test_pip_installs_a_lock_as_it_is(lock: Lock, tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text(format_lock(lock))
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env/bin/python"
    command = [python, "-m", "pip", "install", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    stdout_of([*map(str, command), "-r", str(tmp_path / "lock.txt")])
    told = subprocess.run(
        [str(python), "-c", "import jinja2, markupsafe; print(jinja2.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == lock.wheels[0].version


def test_the_main_index_is_that_of_the_settings_or_uvs_own() -> None:
    unset = SettingValue(value="", origin="default")
    index = find_index(unset, environ={"PATH": "/usr/bin:/bin", "HOME": "/nobody"}, prefix=Path("/nowhere"))
    own = UvLocker(replace(index, url=""), python=Path(sys.executable)).main_address()
    assert own.startswith("https://")
    there = replace(index, url="https://ann:secret@index.example.org/simple")
    assert UvLocker(there, python=Path(sys.executable)).main_address() == "https://index.example.org/simple"
