"""The locked files of a target in a directory and in a registry, and a build's caches filled from there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory import access
from imagefactory.access import open_registry
from imagefactory.actions.build import (
    RegistrySources,
    _fetching,
    _StageTimes,
    adopt_sources,
    base_request,
    locked_digests,
    locked_files,
)
from imagefactory.actions.locked import base_locks, require_lock
from imagefactory.actions.transfer import PushOptions, SourcesPush, copy_image, push_sources, push_target
from imagefactory.actions.verdicts import registry_of
from imagefactory.build.base import fetch
from imagefactory.build.base.image import BaseRequest
from imagefactory.errors import LockError
from imagefactory.lock.debian import archive
from imagefactory.lock.debian.archive import StaleIndexError
from imagefactory.lock.debian.lock import base_content_hash, write_base_lock
from imagefactory.lock.download import PackageCache
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.oci.candidates import (
    DEB_TYPE,
    ENVELOPE_TYPE,
    FILE_TYPE,
    plan_prune,
    read_tagged,
    remove_candidate,
    sources_tag,
)
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.manifests import canonical_json, digest_of
from imagefactory.oci.store import ImageReference
from imagefactory.progress import QuietProgress
from imagefactory.project import Project, load_project
from imagefactory.settings.load import load_settings
from imagefactory.trust.approval import MOST_SIGNERS, SourcesArtifact, read_sources, sign_sources
from imagefactory.trust.keys import PublicKey, SigningKey
from imagefactory.trust.policy import TrustGrant, add_key
from tests.made.errors import fails
from tests.made.place import Place, make_place
from tests.made.pushed import put_base, put_built
from tests.made.registry import RegistryMadeHere, Repository, Ways, registry_made_here
from tests.made.trusted import write_settings
from tests.made.verdicts import LAB, NOW, STRANGER

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

    def with_registry(self, host: str, cache: Path, registry: str = "") -> Project:
        """The machine that has only a registry."""
        environ = {
            **os.environ,
            "IMAGEFACTORY_CACHE": str(cache),
            "IMAGEFACTORY_REGISTRY": registry or f"{host}/gpu",
            "IMAGEFACTORY_PLAIN_HTTP": host,
            "IMAGEFACTORY_DEBIAN_SNAPSHOT": "none",
        }
        root = self.place.root
        return load_project(load_settings(directory=root, start=root, environ=environ), environ)

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


# --- In a registry


@dataclass
class Shelf:
    """A registry with the image and the locked files of the target. `later` is a machine that trusts LAB."""

    site: Site
    registry: RegistryMadeHere
    directory: Path
    pushed: SourcesPush

    @property
    def content(self) -> Repository:
        return self.registry.repository("gpu/tiny")

    def later(self, name: str = "later") -> Project:
        return self.site.with_registry(self.registry.host, self.directory / name)

    def sign(self, digest: str, key: SigningKey = LAB, when: datetime = NOW) -> None:
        """Add a statement about `digest` to the locked files in the registry."""
        self.add_envelope(sign_sources(digest, key, when))

    def add_envelope(self, envelope: bytes) -> None:
        digest = digest_of(envelope)
        self.registry.shelves.blobs[digest] = envelope
        self.content.blobs.add(digest)
        layer = {"mediaType": ENVELOPE_TYPE, "digest": digest, "size": len(envelope)}
        self.replace_manifest(lambda value: value["layers"].append(layer))

    @property
    def artifact(self) -> SourcesArtifact:
        return read_sources(registry_of(self.later(), "tiny"), self.pushed.reference.tag)

    def replace_manifest(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the manifest that the tag names, as anyone who may push there can."""
        tag = self.pushed.reference.tag
        kind, data = self.content.manifests[self.content.tags[tag]]
        value = json.loads(data)
        change(value)
        changed = canonical_json(value)
        digest = digest_of(changed)
        self.content.manifests[digest] = (kind, changed)
        self.content.tags[tag] = digest


TODAY = NOW.date()


def trust_lab(root: Path, since: date = TODAY, until: date = TODAY + timedelta(days=3650)) -> None:
    grant = TrustGrant(key=PublicKey(name="lab", raw=LAB.public), since=since, until=until)
    write_settings(root, add_key("", grant, "imagefactory.toml"))


@pytest.fixture
def shelf(
    request: pytest.FixtureRequest, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shelf]:
    with registry_made_here(Ways(referrers=getattr(request, "param", True))) as registry:
        project = site.with_registry(registry.host, tmp_path / "cache")
        (target,) = project.targets
        put_base(project, target)
        put_built(project, target)
        pushed = push_target(project, target, PushOptions(now=NOW), QuietProgress())
        sources = push_sources(project, pushed, None, NOW, QuietProgress())
        shutil.rmtree(site.place.root / "channel")
        trust_lab(site.place.root)

        @contextmanager
        def dead(*_: object, **__: object) -> Iterator[None]:
            raise LockError("archive-read-failed", "cannot read the package lists", hint="")
            yield

        monkeypatch.setattr(fetch, "open_archive", dead)
        registry.log.clear()
        yield Shelf(site, registry, tmp_path, sources)


def fetch_debs(project: Project) -> list[bytes]:
    with locked_files(project, project.targets[0], QuietProgress()) as (_, files):
        return [row.path.read_bytes() for row in files if isinstance(row.package, DebianPackage)]


def fetch_archives(project: Project) -> list[bytes]:
    """The conda archives as a build fetches them; the registry alone has them."""
    lock = require_lock(project, project.targets[0])
    sources = RegistrySources(project, project.targets[0], lock)
    with _fetching(project, lock, _StageTimes(), QuietProgress(), sources) as arrivals:
        return [path.read_bytes() for path in arrivals.wait_for_all().values()]


either = pytest.mark.parametrize("shelf", [True, False], ids=["referrers", "no-referrers"], indirect=True)


@either
def test_signed_files_of_a_registry_replace_mirror_and_channel(shelf: Shelf) -> None:
    assert (shelf.pushed.files, shelf.pushed.debs, shelf.pushed.signer) == (5, 1, "")
    shelf.sign(shelf.pushed.reference.digest)
    project = shelf.later()
    assert fetch_debs(project) == [DEB]
    assert fetch.is_recorded(HELLO, project.settings.cache_path / "debs")
    shelf.registry.log.clear()
    assert fetch_debs(project) == [DEB]
    assert shelf.registry.log == []  # all is in the cache


def test_unsigned_archives_count_by_their_hash_and_unsigned_debs_do_not(shelf: Shelf) -> None:
    project = shelf.later()
    lock = require_lock(project, project.targets[0])
    assert fetch_archives(project) == [package.filename.encode() for package in lock.packages]
    with fails("archive-read-failed"):
        fetch_debs(project)
    assert not fetch.is_recorded(HELLO, project.settings.cache_path / "debs")


def test_a_reachable_channel_and_a_full_cache_send_no_request(site: Site, tmp_path: Path) -> None:
    with registry_made_here() as registry:
        project = site.with_registry(registry.host, tmp_path / "cache")
        fetch_archives(project)
        assert fetch_debs(project) == [DEB]
        assert registry.connections == 0


@pytest.mark.parametrize(
    "problem", ["other-key", "other-files", "retired", "before", "future", "untrusted", "malformed", "none"]
)
def test_a_statement_that_does_not_count(shelf: Shelf, problem: str) -> None:
    digest, when, key, root = shelf.pushed.reference.digest, NOW, LAB, shelf.site.place.root
    if problem == "other-key":
        key = STRANGER
    if problem == "other-files":
        digest = f"sha256:{'0' * 64}"
    if problem == "retired":
        trust_lab(root, until=NOW.date() - timedelta(days=1), since=NOW.date() - timedelta(days=9))
    if problem == "before":
        trust_lab(root, since=NOW.date() + timedelta(days=1))
    if problem == "future":
        when = datetime.now(UTC) + timedelta(days=1)
    if problem == "untrusted":
        write_settings(root, "")
    if problem == "malformed":
        shelf.add_envelope(b'{"payload":"' + b"[" * 10_000)
    elif problem != "none":
        shelf.sign(digest, key, when)
    project = shelf.later()
    with fails("archive-read-failed"):
        fetch_debs(project)
    assert not fetch.is_recorded(HELLO, project.settings.cache_path / "debs")
    shelf.sign(shelf.pushed.reference.digest)
    trust_lab(root)
    assert fetch_debs(shelf.later()) == [DEB]  # one valid statement among others is enough


def test_a_signature_covers_its_very_manifest(shelf: Shelf) -> None:
    """Another manifest under the tag is not the signed one, and a wheel is never a Debian package."""
    shelf.sign(shelf.pushed.reference.digest)

    def as_wheel(value: dict[str, Any]) -> None:
        for layer in value["layers"]:
            if layer["mediaType"] == DEB_TYPE:
                layer["mediaType"] = FILE_TYPE

    shelf.replace_manifest(as_wheel)
    shelf.sign(shelf.artifact.subject)
    with fails("archive-read-failed"):
        fetch_debs(shelf.later())

    def as_deb(value: dict[str, Any]) -> None:
        for layer in value["layers"]:
            if layer["mediaType"] == FILE_TYPE:
                layer["mediaType"] = DEB_TYPE

    shelf.replace_manifest(as_deb)  # no statement is about this manifest
    with fails("archive-read-failed"):
        fetch_debs(shelf.later())
    assert len(fetch_archives(shelf.later())) == 4


def test_names_of_a_manifest_are_no_paths(shelf: Shelf) -> None:
    def outside(value: dict[str, Any]) -> None:
        for layer in value["layers"]:
            layer["annotations"] = {"org.opencontainers.image.title": "../../../evil"}

    shelf.replace_manifest(outside)
    project = shelf.later()
    fetch_archives(project)
    assert not list(shelf.directory.rglob("*evil*"))


@pytest.mark.parametrize(
    "problem", ["huge", "index", "not-json", "size", "other-type", "deep", "large-envelope", "signers"]
)
def test_a_manifest_that_is_none(shelf: Shelf, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "time", SimpleNamespace(sleep=lambda _: None))
    tag = shelf.pushed.reference.tag

    def change(value: dict[str, Any]) -> None:
        if problem == "size":
            for layer in value["layers"]:
                layer["size"] += 1
        layer = {"mediaType": ENVELOPE_TYPE, "digest": f"sha256:{'1' * 64}", "size": 100}
        if problem == "large-envelope":
            value["layers"].append(layer | {"size": 1 << 40})
        if problem == "signers":
            value["layers"] += [layer] * (MOST_SIGNERS + 1)
        value["artifactType"] = "x/y" if problem == "other-type" else value["artifactType"]
        value["x"] = "x" * (5 << 20) if problem == "huge" else ""

    shelf.replace_manifest(change)
    digest = shelf.content.tags[tag]
    kind, data = shelf.content.manifests[digest]
    if problem in ("index", "not-json", "deep"):
        data = {"index": b'{"mediaType": 1}', "not-json": b"{", "deep": b"[" * 100_000}[problem]
        shelf.content.tags[tag] = digest_of(data)
        shelf.content.manifests[shelf.content.tags[tag]] = (kind, data)
    with fails("download-rejected"):
        fetch_archives(shelf.later())


def test_wrong_bytes_are_rejected(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "time", SimpleNamespace(sleep=lambda _: None))
    shelf.registry.fault = lambda asked: "wrong" if str(asked) == "GET blob" else None
    with fails("registry-unavailable"):
        fetch_archives(shelf.later())
    shelf.registry.fault = None
    assert len(fetch_archives(shelf.later())) == 4


def test_pushing_again_sends_nothing_and_adds_no_statement(shelf: Shelf, tmp_path: Path) -> None:
    project = shelf.site.with_registry(shelf.registry.host, tmp_path / "cache")
    (target,) = project.targets
    pushed = push_target(project, target, PushOptions(now=NOW), QuietProgress())
    first = push_sources(project, pushed, LAB, NOW, QuietProgress())
    again = push_sources(project, pushed, LAB, NOW + timedelta(hours=1), QuietProgress())
    assert (first.signer, again.signer, again.sent.sent) == (LAB.name, LAB.name, 0)
    assert len(shelf.artifact.envelopes) == 1
    shelf.sign(shelf.artifact.subject, STRANGER)
    other = push_sources(project, pushed, None, NOW, QuietProgress())
    assert (other.signer, len(shelf.artifact.envelopes)) == ("", 2)  # others' statements stay
    assert (
        sources_tag(locked_digests(base_locks(project, project.base_of(target)), ())) != first.reference.tag
    )


@either
def test_a_copy_with_referrers_takes_the_files_along(shelf: Shelf) -> None:
    shelf.sign(shelf.pushed.reference.digest)
    project = shelf.later()
    tag = next(tag for tag in shelf.content.tags if tag.startswith("2.3-"))
    source = ImageReference(registry=shelf.registry.host, repository="gpu/tiny", tag=tag)
    destination = replace(source, repository="mirror/tiny", tag="kept")
    plain = copy_image(project, source, destination, NOW, QuietProgress())
    assert plain.sources == ()
    copied = copy_image(project, source, destination, NOW, QuietProgress(), referrers=True)
    (files,) = copied.sources
    assert files.destination.digest == shelf.content.tags[shelf.pushed.reference.tag]
    mirror = shelf.site.with_registry(
        shelf.registry.host, shelf.directory / "m", f"{shelf.registry.host}/mirror"
    )
    assert fetch_debs(mirror) == [DEB]


@either
def test_prune_keeps_the_files_and_list_shows_them(shelf: Shelf) -> None:
    shelf.sign(shelf.pushed.reference.digest)
    environ = {"--registry": f"{shelf.registry.host}/gpu"}
    arguments = [word for pair in environ.items() for word in pair]
    listed = shelf.site.place.call("image", "list", *arguments, "--json").json()
    ((repository),) = listed["repositories"]
    kinds = {row["type"]: row["tag"] for row in repository["tags"]}
    assert kinds["sources"] == shelf.pushed.reference.tag
    store = open_registry(shelf.later(), shelf.registry.host)
    repo = StoreRepository(store=store, repository="gpu/tiny")
    for decision in plan_prune(read_tagged(repo, {"2.3-cu121"}, records=True), datetime.now(UTC)):
        assert decision.remove
        assert remove_candidate(store, "gpu/tiny", decision) == ""
    assert {tag for tag in shelf.content.tags if not tag.startswith("sha256-")} == {
        shelf.pushed.reference.tag
    }
    assert fetch_debs(shelf.later()) == [DEB]


def test_a_mirror_that_lists_a_package_that_it_lost(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's signature on the index is enough, even if no key signed the files."""

    class Index:
        def offered(self, _: object) -> dict[tuple[str, str], DebianPackage]:
            return {(HELLO.name, HELLO.version): HELLO}

        def download(self, *_: object) -> None:
            raise StaleIndexError("archive-index-outdated", "404", hint="")

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[Index]:
        yield Index()

    monkeypatch.setattr(fetch, "open_archive", opened)
    assert fetch_debs(shelf.later()) == [DEB]


def test_a_check_finds_lost_files_in_the_registry(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> tuple[tuple[DebianPackage, ...], ...]:
        return (HELLO,), (HELLO,)

    monkeypatch.setattr(archive, "unavailable_packages", lost)
    arguments = ("lock", "tiny-*", "--check", "--available", "--json")
    said = shelf.site.place.call(*arguments)
    assert (said.code, len(said.json()["missing_files"])) == (9, 5)
    monkeypatch.setenv("IMAGEFACTORY_REGISTRY", f"{shelf.registry.host}/gpu")
    said = shelf.site.place.call(*arguments)
    assert (said.code, [row["source"] for row in said.json()["missing_files"]]) == (9, ["debian"])
    shelf.sign(shelf.pushed.reference.digest)
    said = shelf.site.place.call(*arguments)
    assert (said.code, said.json()["missing_files"]) == (0, [])
