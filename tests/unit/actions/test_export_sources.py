"""The locked files of a target as a directory, and a build's caches filled from it without network."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from imagefactory.actions.build import adopt_sources, base_request
from imagefactory.actions.locked import base_locks, require_lock
from imagefactory.build.base import fetch
from imagefactory.build.base.image import BaseRequest
from imagefactory.lock.debian.lock import base_content_hash, write_base_lock
from imagefactory.lock.download import PackageCache
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.progress import QuietProgress
from imagefactory.project import Project, load_project
from imagefactory.settings.load import load_settings
from tests.made.errors import fails
from tests.made.place import Place, make_place

DEB = b"a deb"
HELLO = DebianPackage(
    name="hello",
    version="1:2.0",
    architecture="amd64",
    sha256=hashlib.sha256(DEB).hexdigest(),
    size=len(DEB),
)
NOWHERE = "http://127.0.0.1:1/debian"


@dataclass
class Site:
    """A locked target with its fetched base, and the machine that builds it years later."""

    place: Place
    directory: Path

    def later(self, cache: Path, sources: str = "") -> Project:
        environ = {
            "IMAGEFACTORY_CACHE": str(cache),
            "IMAGEFACTORY_SOURCES": sources or str(self.directory),
            "IMAGEFACTORY_DEBIAN_MIRROR": "not an archive",
        }
        root = self.place.root
        return load_project(load_settings(directory=root, start=root, environ=environ), environ)


def put_deb(debs: Path) -> None:
    path = fetch.deb_path(debs, HELLO)
    path.parent.mkdir(parents=True)
    path.write_bytes(DEB)
    fetch._record(HELLO, debs)


@pytest.fixture
def site(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    place = make_place(capsys, tmp_path, monkeypatch)
    monkeypatch.setenv("IMAGEFACTORY_DEBIAN_MIRROR", NOWHERE)
    repodata = place.root / "channel/linux-64/repodata.json"
    records = json.loads(repodata.read_text())
    for filename, record in records["packages.conda"].items():
        data = filename.encode()
        record |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        repodata.with_name(filename).write_bytes(data)
    repodata.write_text(json.dumps(records))
    assert place.call("lock", "tiny-*").code == 0
    base = place.factory.base_of(place.factory.targets[0])
    lock = BaseLock(
        base=base.name,
        suite=base.suite,
        content_hash=base_content_hash(base),
        source_date_epoch=1,
        packages=(HELLO,),
    )
    write_base_lock(place.factory.base_lock_path(base), lock)
    put_deb(tmp_path / "cache/debs")
    return Site(place, tmp_path / "sources")


def export(site: Site) -> dict[str, object]:
    said = site.place.call(
        "image", "export", "tiny-*", "--format", "sources", "-o", str(site.directory), "--json"
    )
    assert said.code == 0, said.err
    return said.json()


def test_a_directory_has_every_locked_file_of_a_target(site: Site) -> None:
    first = export(site)
    assert (first["files"], first["copied"], first["base"]) == (5, 5, "")
    assert export(site) == {**first, "copied": 0}
    rows = (site.directory / "tiny-2.3-cu121.sha256").read_text().splitlines()
    files = {path: digest for digest, path in (row.split("  ") for row in rows)}
    assert {
        str(path.relative_to(site.directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in site.directory.glob("*/*/*/*")
    } == files
    assert len(files) == 5


def test_a_build_takes_the_files_of_the_directory_and_needs_no_network(site: Site, tmp_path: Path) -> None:
    export(site)
    shutil.rmtree(site.place.root / "channel")
    shutil.rmtree(tmp_path / "cache")
    project = site.later(tmp_path / "later")
    (target,) = project.targets
    base, lock = project.base_of(target), require_lock(project, target)
    adopt_sources(project, base_locks(project, base), lock.packages, QuietProgress())
    assert PackageCache(tmp_path / "later", None).missing(lock.packages) == ()  # type: ignore[arg-type]
    request = base_request(project, base, locked=True)
    assert isinstance(request, BaseRequest)
    made = request.fetch(QuietProgress())
    assert [path.read_bytes() for path in made.debs] == [DEB]


def test_a_file_that_differs_from_the_lock_is_rejected(site: Site, tmp_path: Path) -> None:
    export(site)
    project = site.later(tmp_path / "later")
    (target,) = project.targets
    lock = require_lock(project, target)
    deb = fetch.deb_path(site.directory / "debs", HELLO)
    deb.write_bytes(bytes(len(DEB)))
    with fails("hash-mismatch"):
        adopt_sources(project, base_locks(project, project.base_of(target)), (), QuietProgress())
    assert not fetch.is_recorded(HELLO, tmp_path / "later/debs")
    archive = next(path for path in site.directory.glob("conda/*/*/numpy*"))
    archive.write_bytes(bytes(archive.stat().st_size))
    with fails("hash-mismatch"):
        adopt_sources(project, (), lock.packages, QuietProgress())
    with fails("sources-missing"):
        adopt_sources(site.later(tmp_path / "later", "/nonexistent"), (), lock.packages, QuietProgress())
