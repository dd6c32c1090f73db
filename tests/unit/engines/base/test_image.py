"""What making a base asks of the disk."""

from __future__ import annotations

from pathlib import Path

from imagefactory.engines.base.image import room_of_base
from imagefactory.model import BaseLock, DebianPackage

LOCK = BaseLock(
    base="debian-12",
    suite="bookworm",
    content_hash="sha256:" + "a" * 64,
    source_date_epoch=1,
    packages=tuple(
        DebianPackage(name=name, version="1", architecture="amd64", sha256="b" * 64, size=50_000_000)
        for name in ("a", "b")
    ),
)


def test_a_base_takes_its_tree_its_tar_and_its_layer() -> None:
    scratch, store = Path("/scratch"), Path("/store")
    assert room_of_base(LOCK, scratch, store) == {scratch: 250_000_000, store: 330_000_000}
    assert room_of_base(LOCK, store, store) == {store: 580_000_000}
