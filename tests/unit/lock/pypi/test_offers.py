"""METADATA of a wheel: beside it, or a part of it, or out of all of it."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from imagefactory.http import RejectedError
from imagefactory.lock.pypi import offers
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.offers import IndexWheel, choose, choose_sdist, read_metadata, variant_of
from imagefactory.model import Lock
from tests.made.errors import fails

URL = "https://i.example/demo-1.0-py3-none-any.whl"
TEXT = "Metadata-Version: 2.1\nName: demo\n"


def wheel() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("demo/big.so", b"\0" * 1_000_000)
        archive.writestr("demo-1.0.dist-info/METADATA", TEXT)
    return held.getvalue()


@dataclass
class Server:
    """A web with one wheel on it."""

    beside: bool = False
    ranges: bool = True
    data: bytes = field(default_factory=wheel)
    sent: int = 0

    def size(self, url: str) -> int:
        return len(self.data)

    def request(
        self, url: str, read: Callable[[Any], bytes], *, headers: Mapping[str, str] | None = None
    ) -> bytes:
        if url.endswith(".metadata") and not self.beside:
            raise RejectedError("404", status=404)
        body, status = (TEXT.encode(), 200) if url.endswith(".metadata") else (self.data, 200)
        if self.ranges and (found := re.fullmatch(r"bytes=(\d+)-(\d+)", (headers or {}).get("Range", ""))):
            body, status = self.data[int(found[1]) : int(found[2]) + 1], 206
        self.sent += len(body)
        return read(SimpleNamespace(status_code=status, url=url, raw=SimpleNamespace(data=body)))


@pytest.fixture(autouse=True)
def _plain_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "read_some", lambda raw, limit: raw.data[:limit])


@pytest.mark.parametrize(
    ("server", "most"),
    [(Server(beside=True), 100), (Server(), 300_000), (Server(ranges=False), 3_000_000)],
    ids=["beside", "ranges", "whole"],
)
def test_no_more_is_fetched_than_must_be(server: Any, most: int) -> None:
    assert read_metadata(server, URL) == TEXT
    assert server.sent < most


def test_a_big_wheel_is_never_fetched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "_MAX_WHOLE_BYTES", 1000)
    server: Any = Server(ranges=False)
    with pytest.raises(RejectedError, match="a part of a file"):
        read_metadata(server, URL)
    server = Server()
    monkeypatch.setattr(offers, "_MAX_WHOLE_BYTES", 100_000)
    assert read_metadata(server, URL) == TEXT


def files(*names: str, yanked: str = "") -> list[IndexFile]:
    return [IndexFile(filename=n, url=f"https://x/{n}", sha256="1" * 64, yanked=n == yanked) for n in names]


def test_the_newest_that_fits_and_is_not_yanked() -> None:
    offered = files(
        "torch_scatter-2.0.9.tar.gz",
        "torch_scatter-2.1.10.tar.gz",
        "torch_scatter-2.1.9.zip",
        "torch_scatter-2.1.11.tar.gz",
        "torch_scatter-2.2.0-cp311-cp311-linux_x86_64.whl",
        "torch_scatter-2.3.0rc1.tar.gz",
        yanked="torch_scatter-2.1.11.tar.gz",
    )
    file, version = choose_sdist(Requirement("torch-scatter"), offered)
    assert (file.filename, str(version)) == ("torch_scatter-2.1.10.tar.gz", "2.1.10")
    assert choose_sdist(Requirement("torch-scatter<2.1"), offered)[0].filename == "torch_scatter-2.0.9.tar.gz"
    with fails("sdist-not-found", message="torch-scatter==9", hint="git+https://"):
        choose_sdist(Requirement("torch-scatter==9"), offered)


def offered(*filenames: str) -> tuple[IndexWheel, ...]:
    return tuple(IndexWheel(filename=name, url="", sha256="0" * 64, size=1) for name in filenames)


def test_variant_wheels_are_never_chosen() -> None:
    """Drafts PEP 817 and 825: a label after the platform; an index that has them changes no lock."""
    empty = Lock(
        target="x", content_hash="", python="3.11", platform="manylinux_2_36_x86_64", solver="", wheels=()
    )
    stem = "demo-1.0-cp311-cp311-manylinux_2_28_x86_64"
    variants = offered(f"{stem}-cu128.whl", f"{stem.replace('1.0-', '1.0-2-')}-cu128.whl")
    plain = offered(f"{stem}.whl", f"{stem.replace('1.0-', '1.0-1-')}.whl")
    assert [variant_of(file.filename) for file in (*variants, *plain)] == ["cu128", "cu128", "", ""]
    (wheel,) = choose({"demo": (*variants, *plain)}, empty, {}, lambda _: ())
    assert wheel.filename == plain[1].filename
    with fails("wheel-variant", message=variants[0].filename):
        choose({"demo": variants}, empty, {}, lambda _: ())
