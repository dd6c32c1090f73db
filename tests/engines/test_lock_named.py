"""Wheels of package indexes that a recipe names, by uv, and by pip from the same lock."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.secrets import find_secrets
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.channels import ChannelAccess
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.requirements import format_lock, parse_lock
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.values import make_base, make_conda, make_lock, make_target
from tests.services.children import stdout_of
from tests.services.package_index import Index, package_index, uv_locker

TARGET = make_target(requirements=("torch==2.3.*", "numpy"), origins=(("torch", "cu121"),))
REQUEST = LockRequest(target=TARGET, base=make_base())


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "index") as index:
        index.add("torch", "2.3.1", needs=("numpy",))
        index.add("nvidia-cuda-runtime-cu12", "12.1.105", tag="py3-none-manylinux1_x86_64")
        index.add("numpy", "1.26.3")
        yield index


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "second") as second:
        second.add("torch", "2.3.0+cu121", needs=("numpy", "nvidia-cuda-runtime-cu12==12.1.105"))
        second.add("numpy", "99.0")  # nobody asks it for this
        yield second


def locker(index: Index, second: Index | None, tmp_path: Path, **environ: str) -> UvLocker:
    uv = uv_locker(index, tmp_path, **environ)
    named = (("cu121", second.url),) if second else ()
    return UvLocker(replace(uv._index, named=named), python=Path(sys.executable))


def fetched(uv: UvLocker, lock: Lock, folder: Path) -> list[str]:
    def locate(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
        return uv.addresses(replace(lock, wheels=missing))

    return [
        path.name
        for path in PackageCache(folder, uv._index).fetch(lock.wheels, locate, QuietProgress()).values()
    ]


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
def test_a_package_comes_from_its_index_and_all_else_does_not(
    index: Index, second: Index, tmp_path: Path, as_json: bool
) -> None:
    second.json = index.json = as_json
    uv = locker(index, second, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    assert [f"{one.name} {one.version}" for one in lock.wheels] == [
        "numpy 1.26.3",
        "nvidia-cuda-runtime-cu12 12.1.105",
        "torch 2.3.0+cu121",
    ]
    text = format_lock(lock)
    assert "# wheel: torch-2.3.0+cu121-py3-none-any.whl " in text
    assert " from cu121\ntorch==2.3.0+cu121 --hash=" in text
    assert second.url not in text
    assert parse_lock(text, "x") == lock
    assert uv.behind(REQUEST, lock, QuietProgress()) == ()
    assert len(fetched(uv, lock, tmp_path / "cache")) == 3
    assert not any("torch" in path for path in index.requests)
    assert not any("numpy" in path for path in second.requests)


def test_a_locked_version_stays_and_moves_when_asked(index: Index, second: Index, tmp_path: Path) -> None:
    uv = locker(index, second, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    second.add("torch", "2.3.1+cu121", needs=("nvidia-cuda-runtime-cu12==12.1.105",))
    more = replace(REQUEST, target=replace(TARGET, constraints=("idna<9",)), previous=lock)
    assert uv.lock(more, QuietProgress()).wheels == lock.wheels
    moved = uv.lock(replace(REQUEST, previous=lock, update=("torch",)), QuietProgress())
    assert [one.version for one in moved.wheels if one.name == "torch"] == ["2.3.1+cu121"]


def test_what_is_built_on_such_a_target_keeps_its_wheels(index: Index, second: Index, tmp_path: Path) -> None:
    """What comes on top may be of an index too; what lies below comes from where it came from."""
    index.add("idna", "3.7")
    second.add("idna", "3.6")
    uv = locker(index, second, tmp_path)
    below = uv.lock(REQUEST, QuietProgress())
    above = make_target(
        name="lab-2.3-cu121",
        on=TARGET.name,
        requirements=(*TARGET.requirements, "idna"),
        origins=(("idna", "cu121"), ("numpy", "cu121"), *TARGET.origins),
    )
    lock = uv.lock(replace(REQUEST, target=above, under=below), QuietProgress())
    assert set(below.wheels) < set(lock.wheels)
    assert lock.origins == (("idna", "cu121"), ("torch", "cu121"))


def test_an_index_that_wants_a_password_gets_that_of_netrc(
    index: Index, second: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second.password = "s3cret"
    with fails("package-not-on-index", message="torch", hint=f"the index 'cu121' at {second.url}"):
        locker(index, second, tmp_path).lock(REQUEST, QuietProgress())
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login bob password s3cret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    uv = locker(index, second, tmp_path, NETRC=str(netrc))
    assert len(fetched(uv, uv.lock(REQUEST, QuietProgress()), tmp_path / "cache")) == 3


def test_an_index_without_an_address_is_said(index: Index, tmp_path: Path) -> None:
    with fails("index-unknown", message="'cu121'"):
        locker(index, None, tmp_path).lock(REQUEST, QuietProgress())


def test_a_wheel_of_the_factory_is_locked_with_what_it_needs(
    index: Index, second: Index, tmp_path: Path
) -> None:
    """No path of this machine gets into the lock, and an index that has the name too is not asked for it."""
    index.add("idna", "3.7")
    index.add("mylib", "9.0")
    root = tmp_path / "root"
    (root / "wheels").mkdir(parents=True)
    Index(folder=root / "wheels").add("mylib", "1.0+lab", needs=("idna",))
    path = "./wheels/mylib-1.0+lab-py3-none-any.whl"
    target = replace(
        TARGET,
        requirements=(*TARGET.requirements, "mylib==1.0+lab"),
        origins=(("mylib", path), *TARGET.origins),
    )
    uv = locker(index, second, tmp_path)
    uv = UvLocker(replace(uv._index, root=root), python=Path(sys.executable))
    request = replace(REQUEST, target=target)
    lock = uv.lock(request, QuietProgress())
    assert [one.name for one in lock.wheels] == [
        "idna",
        "mylib",
        "numpy",
        "nvidia-cuda-runtime-cu12",
        "torch",
    ]
    assert f" from {path}\nmylib==1.0+lab --hash=" in format_lock(lock)
    assert str(tmp_path) not in format_lock(lock)
    assert uv.behind(request, lock, QuietProgress()) == ()
    assert len(fetched(uv, lock, tmp_path / "cache")) == 5
    assert not any("mylib" in asked for asked in index.requests)
    above = replace(target, name="lab-2.3-cu121", on=target.name)
    assert uv.lock(replace(request, target=above, under=lock), QuietProgress()).wheels == lock.wheels


def test_the_part_from_pypi_of_conda_packages_too(index: Index, second: Index, tmp_path: Path) -> None:
    second.add("rich", "13.0+lab", needs=("numpy",))
    (tmp_path / "wheels").mkdir()
    Index(folder=tmp_path / "wheels").add("mylib", "1.0")
    path = "./wheels/mylib-1.0-py3-none-any.whl"
    uv = locker(index, second, tmp_path)
    uv = UvLocker(replace(uv._index, root=tmp_path), python=Path(sys.executable))
    target = replace(
        TARGET,
        source="conda",
        requirements=("pytorch 2.3.*",),
        pip=("rich", "mylib==1.0"),
        origins=(("mylib", path), ("rich", "cu121")),
        virtual=(("__glibc", "2.36"),),
    )
    conda = (make_conda("numpy 1.26.4 py311h0_0", "python"),)
    of_channels = CondaLocker(ChannelAccess(), tmp_path, lambda: uv)
    empty = make_lock(conda=conda, wheels=(), solver="py-rattler 0.1")
    lock = of_channels._with_wheels(empty, replace(REQUEST, target=target), QuietProgress())
    assert [f"{one.name} {one.version}" for one in lock.wheels] == ["mylib 1.0", "rich 13.0+lab"]
    assert lock.origins == target.origins


def test_pip_installs_such_a_lock_with_what_a_build_is_told(
    index: Index, second: Index, tmp_path: Path
) -> None:
    uv = locker(index, second, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    (tmp_path / "lock.txt").write_text(format_lock(lock))
    (tmp_path / "pip.conf").write_text(find_secrets(uv._index, {}).pip_conf)
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--no-deps", "--no-cache-dir"]
    command += ["--platform", lock.platform, "--platform", "manylinux1_x86_64", "--only-binary", ":all:"]
    stdout_of(
        [*command, "--python-version", "3.11", "--target", tmp_path / "to", "-r", tmp_path / "lock.txt"],
        env={"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")},
    )
    assert (tmp_path / "to/torch-2.3.0+cu121.dist-info").is_dir()
