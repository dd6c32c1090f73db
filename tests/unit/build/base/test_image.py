"""What making a base asks of the disk, and who makes it where two want it."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from imagefactory.build.base import image
from imagefactory.build.base.fetch import BaseArchives
from imagefactory.build.base.image import BaseRequest, space_for_base
from imagefactory.build.base.make import BaseTar
from imagefactory.lock.debian.archive import find_mirror
from imagefactory.model import BaseLock, BaseSpec, DebianPackage
from imagefactory.oci.layout import Layout
from imagefactory.progress import QuietProgress
from tests.made.values import make_base

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
    assert space_for_base(LOCK, scratch, store) == {scratch: 250_000_000, store: 330_000_000}
    assert space_for_base(LOCK, store, store) == {store: 580_000_000}


def test_of_two_at_once_one_makes_it_and_the_other_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first makes it until the second has come to the lock."""
    came: list[str] = []
    made: list[BaseArchives] = []
    second = threading.Event()
    locked = Layout.locked

    @contextmanager
    def counted(layout: Layout, name: str) -> Iterator[None]:
        came.append(name)
        if len(came) == 2:
            second.set()
        with locked(layout, name):
            yield

    def build(fetched: BaseArchives, out: Path, progress: QuietProgress, *, environ: object) -> BaseTar:
        made.append(fetched)
        assert second.wait(60)
        file = io.BytesIO()
        tarfile.open(fileobj=file, mode="w").close()
        out.write_bytes(file.getvalue())
        sha256 = hashlib.sha256(file.getvalue()).hexdigest()
        return BaseTar(path=out, sha256=sha256, size=len(file.getvalue()))

    def fetch(
        base: BaseSpec,
        lock: BaseLock,
        mirror: object,
        progress: QuietProgress,
        *,
        locked: bool,
        registry: object,
    ) -> BaseArchives:
        return BaseArchives(base=base, lock=lock, debs=(), moved=())

    mirror = find_mirror("http://127.0.0.1:1/debian", tmp_path, {}, etc_apt=tmp_path)
    order = BaseRequest(
        base=make_base(),
        lock=LOCK,
        codec="zstd",
        debs=mirror.debs,
        mirror=lambda: mirror,
        environ={"TMPDIR": str(tmp_path)},
        locked=True,
    )
    monkeypatch.setattr("imagefactory.build.base.make.build_base", build)
    monkeypatch.setattr("imagefactory.build.base.fetch.fetch_base", fetch)
    monkeypatch.setattr(image, "require_space", lambda *_: None)
    layout = Layout(tmp_path / "store")
    layout.make()
    coming = [order.begin(layout, QuietProgress()) for _ in range(2)]
    monkeypatch.setattr(Layout, "locked", counted)
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(lambda one: one.get(), coming)
    assert first.image == other.image
    assert len(made) == 1
    found = order.find(layout, QuietProgress())
    assert found
    assert found.image == first.image
