"""What moves from one lock to another."""

from __future__ import annotations

from dataclasses import replace

from imagefactory.lock.files import base_moves, lock_moves
from imagefactory.model import BaseLock, DebianPackage, LockedWheel
from tests.made.values import make_lock

LOCK = make_lock()
IDNA, TORCH = LOCK.wheels


def told(*wheels: LockedWheel) -> list[str]:
    return [str(one) for one in lock_moves(LOCK, replace(LOCK, wheels=wheels))]


def test_what_stays_does_not_move() -> None:
    assert told(IDNA, TORCH) == []


def test_each_kind_of_move_is_told() -> None:
    assert told(replace(IDNA, version="3.8", sha256="3" * 64), TORCH) == ["idna 3.7 -> 3.8"]
    assert told(replace(IDNA, sha256="3" * 64), TORCH) == ["idna 3.7 -> 3.7, new file"]
    assert told(TORCH) == ["idna 3.7 (gone)"]
    assert told(IDNA, replace(IDNA, name="jinja2"), TORCH) == ["jinja2 3.7 (new)"]


def test_of_a_lock_that_was_not_there_all_is_new() -> None:
    assert [str(one) for one in lock_moves(None, LOCK)] == ["idna 3.7 (new)", "torch 2.3.1 (new)"]


def test_a_base_moves_by_the_packages_of_debian() -> None:
    gcc = DebianPackage(name="gcc", version="12.2", architecture="amd64", sha256="1" * 64, size=1)
    before = BaseLock(
        base="debian-12", suite="bookworm", content_hash="", source_date_epoch=1, packages=(gcc,)
    )
    after = replace(before, packages=(replace(gcc, version="12.2+deb12u1", sha256="2" * 64),))
    assert [str(one) for one in base_moves(before, after)] == ["gcc 12.2 -> 12.2+deb12u1"]
    assert base_moves(before, replace(before, source_date_epoch=2)) == ()
