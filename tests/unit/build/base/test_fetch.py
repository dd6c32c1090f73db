"""Which packages in the cache count: the locked bytes, of which Debian's signed index spoke once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.base import fetch
from imagefactory.lock.debian.archive import DebianMirror, StaleIndexError
from imagefactory.lock.debian.lock import downloaded_filename, format_package
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.values import make_base

CONTENT = b"a deb"
HELLO = DebianPackage(
    name="hello",
    version="1:2.0",
    architecture="amd64",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
)
BASE = make_base()
LOCK = BaseLock(base=BASE.name, suite=BASE.suite, content_hash="", source_date_epoch=1, packages=(HELLO,))


class Archive:
    """Stands in for an archive whose indexes offer `packages`."""

    def __init__(self) -> None:
        self.packages: tuple[DebianPackage, ...] = ()
        self.opened = 0
        self.downloads: list[str] = []
        self.stale = 0
        self.fresh: list[bool] = []

    def offered(self, names: Sequence[str]) -> dict[tuple[str, str], DebianPackage]:
        return {(one.name, one.version): one for one in self.packages if one.name in names}

    def download(self, packages: Sequence[DebianPackage], folder: Path, _: object) -> None:
        if self.stale:
            self.stale -= 1
            raise StaleIndexError(
                "test-problem", "E: Failed to fetch http://m/pool/hello.deb  404  Not Found"
            )
        for package in packages:
            self.downloads.append(package.name)
            (folder / downloaded_filename(package)).write_bytes(CONTENT)


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Archive:
    made = Archive()

    @contextmanager
    def open_archive(*_: object, fresh: bool) -> Iterator[Archive]:
        made.opened += 1
        made.fresh.append(fresh)
        yield made

    monkeypatch.setattr(fetch, "open_archive", open_archive)
    return made


@pytest.fixture
def mirror(tmp_path: Path) -> DebianMirror:
    return DebianMirror(
        main="", security="", dated=frozenset(), keyring=Path("/k"), debs=tmp_path / "debs", environ=()
    )


def put_file(mirror: DebianMirror) -> Path:
    """Put the locked bytes into the cache, as somebody may who does not sign for Debian."""
    path = fetch.deb_path(mirror.debs, HELLO)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


def fetch_locked(mirror: DebianMirror) -> fetch.BaseArchives:
    return fetch.fetch_base(BASE, LOCK, mirror, QuietProgress(), locked=True)


def test_a_cached_file_that_no_signed_index_offers_does_not_count(
    archive: Archive, mirror: DebianMirror
) -> None:
    put_file(mirror)
    with fails("packages-withdrawn") as told:
        fetch_locked(mirror)
    assert "debian-snapshot" in told.value.hint
    assert archive.fresh == [False, True]
    assert not fetch.is_recorded(HELLO, mirror.debs)


def test_a_cached_file_of_another_content_than_the_index_says_does_not_count(
    archive: Archive, mirror: DebianMirror
) -> None:
    put_file(mirror)
    archive.packages = (replace(HELLO, sha256="0" * 64),)
    with fails("hash-mismatch"):
        fetch_locked(mirror)
    assert not fetch.is_recorded(HELLO, mirror.debs)


def test_an_index_that_names_a_file_which_is_gone_is_read_once_more(
    archive: Archive, mirror: DebianMirror
) -> None:
    archive.packages, archive.stale = (HELLO,), 1
    assert fetch_locked(mirror).moved == ()
    assert archive.fresh == [False, True]


def test_an_index_that_stays_stale_is_told(archive: Archive, mirror: DebianMirror) -> None:
    archive.packages, archive.stale = (HELLO,), 2
    with pytest.raises(StaleIndexError):
        fetch_locked(mirror)
    assert archive.opened == 2


def test_an_interrupted_download_counts_only_once_the_index_offers_it(
    archive: Archive, mirror: DebianMirror
) -> None:
    partial = mirror.debs / "partial" / downloaded_filename(HELLO)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(CONTENT)
    with fails("packages-withdrawn"):
        fetch_locked(mirror)
    assert not fetch.deb_path(mirror.debs, HELLO).exists()
    archive.packages = (HELLO,)
    assert fetch_locked(mirror).debs[0].read_bytes() == CONTENT
    assert archive.downloads == []


@pytest.mark.parametrize("cached", [True, False])
def test_what_a_signed_index_offered_once_counts_after_the_archive_has_moved_on(
    cached: bool, archive: Archive, mirror: DebianMirror
) -> None:
    if cached:
        put_file(mirror)
    archive.packages = (HELLO,)
    fetch_locked(mirror)
    assert archive.downloads == ([] if cached else ["hello"])
    archive.packages = ()
    made = fetch_locked(mirror)
    assert made.published
    assert made.debs[0].read_bytes() == CONTENT
    assert archive.opened == 1


def of_another_package(record: Path) -> None:
    record.write_text(format_package(replace(HELLO, name="other")))


def of_more_packages(record: Path) -> None:
    record.write_text(format_package(HELLO) * 2)


def that_others_may_write(record: Path) -> None:
    record.write_text(format_package(HELLO))
    record.chmod(0o666)


def that_is_a_link(record: Path) -> None:
    target = record.with_name("elsewhere")
    target.write_text(format_package(HELLO))
    record.symlink_to(target)


def that_is_a_fifo(record: Path) -> None:
    os.mkfifo(record)


@pytest.mark.parametrize(
    "forge", [of_another_package, of_more_packages, that_others_may_write, that_is_a_link, that_is_a_fifo]
)
def test_a_record_that_does_not_count(
    forge: Callable[[Path], None], archive: Archive, mirror: DebianMirror
) -> None:
    put_file(mirror)
    forge(fetch.record_path(mirror.debs, HELLO))
    with fails("packages-withdrawn"):
        fetch_locked(mirror)
    archive.packages = (HELLO,)
    fetch_locked(mirror)
    assert fetch.is_recorded(HELLO, mirror.debs)


def test_a_record_of_another_user_does_not_count(
    archive: Archive, mirror: DebianMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.packages = (HELLO,)
    fetch_locked(mirror)
    if os.geteuid() == 0:  # whose own records count for every user
        os.chown(fetch.record_path(mirror.debs, HELLO), 4242, 4242)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    archive.packages = ()
    with fails("packages-withdrawn"):
        fetch_locked(mirror)
