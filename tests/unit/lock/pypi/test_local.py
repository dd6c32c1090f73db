"""Wheels that lie in the factory: what is locked of one, and whether it is still that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.errors import LockError
from imagefactory.lock.pypi.requirements import changed_wheel, local_files
from imagefactory.lock.pypi.uv import local_wheels
from imagefactory.model import Lock, LockedWheel
from tests.made.values import make_lock
from tests.made.wheels import locked, make_wheel

PLACE = "./wheels/mylib-1.0+lab-py3-none-any.whl"
LOCK = make_lock(origins=(("idna", "lab"), ("mylib", PLACE)), wheels=())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    return make_wheel(tmp_path / "wheels", "mylib", {"mylib.py": b""}, version="1.0+lab")


def fault(root: Path, lock: Lock = LOCK) -> tuple[str, str]:
    with pytest.raises(LockError) as caught:
        local_wheels(lock, root)
    assert caught.value.hint
    return caught.value.code, caught.value.message


def test_what_is_locked_of_it(file: Path, tmp_path: Path) -> None:
    (wheel,) = local_wheels(LOCK, tmp_path)
    assert wheel == locked(file)
    lock = replace(LOCK, wheels=(*make_lock().wheels[:1], wheel))
    (copied,) = local_files(lock, tmp_path)
    assert (copied.path, copied.source, copied.sha256) == (file.name, file, wheel.sha256)


def test_a_changed_or_lost_one_is_told(file: Path, tmp_path: Path) -> None:
    lock = replace(LOCK, wheels=local_wheels(LOCK, tmp_path))
    assert changed_wheel(lock, tmp_path) == ""
    file.write_bytes(file.read_bytes() + b"\0")
    assert changed_wheel(lock, tmp_path) == f"{PLACE} has changed since"
    file.unlink()
    assert changed_wheel(lock, tmp_path) == f"{PLACE} is not there any more"


def test_what_is_no_such_wheel(file: Path, tmp_path: Path) -> None:
    other = LockedWheel(
        name="mylib", version="2", filename="mylib-2-cp39-cp39-win_amd64.whl", sha256="", size=0
    )
    foreign = replace(LOCK, origins=(("mylib", f"./wheels/{other.filename}"),))
    code, message = fault(tmp_path, foreign)
    assert code == "local-wheel-missing"
    assert f"./wheels/{other.filename}" in message
    assert str(tmp_path) in message
    file.rename(file.with_name(other.filename))
    code, message = fault(tmp_path, foreign)
    assert code == "local-wheel-invalid"
    assert "mylib 2:" in message
    assert "mylib 1.0+lab" in message
    make_wheel(tmp_path, "mylib", {}, version="2").rename(tmp_path / "wheels" / other.filename)
    code, message = fault(tmp_path, foreign)
    assert code == "local-wheel-incompatible"
    assert message.endswith("Python 3.11 on manylinux_2_36_x86_64")
    file.write_text("no zip")
    code, message = fault(tmp_path)
    assert code == "local-wheel-invalid"
    assert PLACE in message
    file.unlink()
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    file.symlink_to(make_wheel(outside, "mylib", {}, version="1.0+lab"))
    assert len(local_wheels(LOCK, tmp_path)) == 1  # a link inside the factory
    (tmp_path / "factory").mkdir()
    (tmp_path / "wheels").rename(tmp_path / "factory/wheels")
    code, message = fault(tmp_path / "factory")
    assert code == "local-wheel-outside"
    assert PLACE in message
    assert str(tmp_path / "factory") in message
