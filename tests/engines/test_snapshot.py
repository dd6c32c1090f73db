"""An archive that dropped and replaced packages, and a snapshot service that limits and tears, with real apt.

Both are signed by a key of this test.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from imagefactory.build.base import fetch
from imagefactory.http import RetryPolicy
from imagefactory.lock.debian import archive
from imagefactory.lock.debian.archive import DebianMirror
from imagefactory.lock.debian.lock import deb_filename
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.values import make_base

LOCKED = datetime(2024, 1, 1, 12, tzinfo=UTC)
BASE = make_base()
QUICK = RetryPolicy(attempts=4, first_wait=0.01, longest_wait=0.05, connect=60, read=60, threads=2)


class Notes(QuietProgress):
    """Keeps what a person would have seen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Service:
    """The mirror and the snapshots. `faults` are the next answers by the end of a path."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def paths(self, ending: str) -> list[str]:
        return [path for path, _ in self.requests if path.endswith(ending)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        span, path = self.headers.get("Range", ""), unquote(self.path)
        self.service.requests.append((path, span))
        faults = next((rows for end, rows in self.service.faults.items() if path.endswith(end)), [])
        fault = faults.pop(0) if faults else ""
        body = self.service.files.get(path)
        if fault.isdigit() or body is None:
            self.send_response(int(fault or 404))
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if fault == "tear":
            self.wfile.write(body[start : start + (len(body) - start) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body[start:])


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": made}))
    made.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    http.shutdown()
    thread.join()
    http.server_close()


@dataclass
class Debian:
    """Makes packages and archives that `keyring` signs."""

    home: Path
    keyring: Path

    def deb(self, name: str, version: str) -> tuple[DebianPackage, bytes]:
        root = self.home / f"{name}-{version}"
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: A <a@b.org>\n"
            "Description: x\n"
        )
        (root / "content").write_bytes(os.urandom(200_000))
        path = self.home / f"{name}.deb"
        subprocess.run(
            ["dpkg-deb", "-Znone", "--build", "--root-owner-group", root, path],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        data = path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        return DebianPackage(
            name=name, version=version, architecture="all", sha256=sha256, size=len(data)
        ), data

    def archive(self, packages: dict[DebianPackage, bytes], suite: str, when: datetime) -> dict[str, bytes]:
        """Return the files of an archive with one suite, by path."""
        files = {f"pool/main/{deb_filename(package)}": data for package, data in packages.items()}
        index = "\n".join(
            f"Package: {one.name}\nVersion: {one.version}\nArchitecture: all\nMaintainer: A <a@b.org>\n"
            f"Filename: pool/main/{deb_filename(one)}\nSize: {one.size}\nSHA256: {one.sha256}\n"
            "Description: x\n"
            for one in packages
        )
        packed = lzma.compress(index.encode())
        rows = [
            f" {hashlib.sha256(data).hexdigest()} {len(data)} main/binary-amd64/{name}"
            for name, data in (("Packages", index.encode()), ("Packages.xz", packed))
        ]
        until = when + timedelta(days=7)
        release = (
            f"Origin: Debian\nLabel: Debian\nSuite: {suite}\nCodename: {suite}\n"
            f"Date: {format_datetime(when, usegmt=True)}\n"
            f"Valid-Until: {format_datetime(until, usegmt=True)}\n"
            "Architectures: amd64\nComponents: main\nSHA256:\n" + "\n".join(rows) + "\n"
        )
        signed = subprocess.run(
            ["gpg", "--homedir", self.home, "--batch", "--clearsign"],
            input=release.encode(),
            capture_output=True,
            check=True,
        )
        dists = f"dists/{suite}"
        return {
            **files,
            f"{dists}/InRelease": signed.stdout,
            f"{dists}/main/binary-amd64/Packages.xz": packed,
        }


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Debian:
    home = tmp_path_factory.mktemp("gpg")
    home.chmod(0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch"]
    subprocess.run(
        [*gpg, "--passphrase", "", "--quick-gen-key", "test@example.org", "rsa2048", "sign"],
        check=True,
        capture_output=True,
    )
    keyring = home / "keyring.gpg"
    keyring.write_bytes(subprocess.run([*gpg, "--export"], check=True, capture_output=True).stdout)
    return Debian(home, keyring)


@dataclass
class World:
    """A lock of `old` and `kept`; its mirror has a newer `old`; snapshots have both as locked."""

    service: Service
    mirror: DebianMirror
    lock: BaseLock

    def fetch(self, progress: QuietProgress | None = None, *, locked: bool = True) -> fetch.BaseArchives:
        return fetch.fetch_base(BASE, self.lock, self.mirror, progress or QuietProgress(), locked=locked)


def at(hours: int) -> str:
    return f"{LOCKED + timedelta(hours=hours):%Y%m%dT%H%M%SZ}"


@pytest.fixture
def world(service: Service, debian: Debian, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(archive, "SNAPSHOT_POLICY", QUICK)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    debian = replace(debian)
    old, kept, newer = (
        debian_deb(debian, tmp_path, *row) for row in (("old", "1:1.0+b1"), ("kept", "1.0"), ("old", "1:2.0"))
    )
    now = datetime.now(UTC)
    for prefix, main, when in (
        ("/debian/", [kept], now),
        (f"/archive/debian/{at(6)}/", [kept], LOCKED),
    ):
        put(service, prefix, debian.archive(dict(main), BASE.suite, when))
        put(service, prefix, debian.archive({}, f"{BASE.suite}-updates", when))
    put(service, "/debian-security/", debian.archive(dict([newer]), f"{BASE.suite}-security", now))
    put(
        service,
        f"/archive/debian-security/{at(6)}/",
        debian.archive(dict([old]), f"{BASE.suite}-security", LOCKED),
    )
    lock = BaseLock(
        base=BASE.name,
        suite=BASE.suite,
        content_hash="",
        source_date_epoch=int(LOCKED.timestamp()),
        packages=(kept[0], old[0]),
    )
    mirror = DebianMirror(
        main=f"{service.url}/debian",
        security=f"{service.url}/debian-security",
        dated=frozenset(),
        keyring=debian.keyring,
        debs=tmp_path / "debs",
        environ=archive.apt_environment({**os.environ, "no_proxy": "127.0.0.1"}),
        snapshot=service.url,
    )
    for module in (fetch, archive):
        monkeypatch.setattr(module, "lock_architecture", lambda _: "amd64")
    return World(service, mirror, lock)


def debian_deb(debian: Debian, directory: Path, name: str, version: str) -> tuple[DebianPackage, bytes]:
    (directory / version).mkdir()
    return replace(debian, home=directory / version).deb(name, version)


def put(service: Service, prefix: str, files: dict[str, bytes]) -> None:
    service.files |= {f"{prefix}{path}": data for path, data in files.items()}


def test_a_package_that_the_mirror_replaced_comes_from_the_snapshot(world: World) -> None:
    notes = Notes()
    made = world.fetch(notes)
    assert made.published
    for path, package in zip(made.debs, world.lock.packages, strict=True):
        fetch.verify_deb(path, package)
        assert fetch.is_recorded(package, world.mirror.debs)
    debs = world.service.paths(".deb")
    assert sum(path.startswith(f"/archive/debian-security/{at(6)}/pool/") for path in debs) == 1
    assert sum(path.startswith("/debian/pool/") for path in debs) == 1
    assert [line for line in notes.lines if at(6) in line]
    world.service.requests.clear()
    assert world.fetch().published
    assert world.service.requests == []


def test_the_snapshot_alone_is_enough(world: World) -> None:
    for path in list(world.service.files):
        if not path.startswith("/archive/"):
            del world.service.files[path]
    assert world.fetch().published


@pytest.mark.parametrize("status", ["429", "503", "509"])
def test_a_service_that_limits_is_waited_for_and_a_torn_file_continues(world: World, status: str) -> None:
    world.service.faults = {
        "/InRelease": [*[""] * 6, status],  # apt reads three of the mirror, twice
        "Packages.xz": [*[""] * 6, status, "tear"],
        "_1.0+b1_all.deb": [status, "tear", status, "tear"],
    }
    assert world.fetch().published
    spans = [span for path, span in world.service.requests if path.endswith("_1.0+b1_all.deb")]
    starts = [int(re.findall(r"\d+", span)[0]) for span in spans if span]
    assert len(starts) >= 2
    assert starts == sorted(starts)


def test_packages_that_no_place_has_are_listed(world: World) -> None:
    kept, old = world.lock.packages

    def unavailable() -> tuple[tuple[DebianPackage, ...], ...]:
        return archive.unavailable_packages(world.lock, (kept, old), world.mirror, QuietProgress())

    assert unavailable() == ((old,), ())
    of_mirror = [path for path in world.service.files if not path.startswith("/archive/")]
    files = {path: world.service.files.pop(path) for path in of_mirror}
    assert unavailable() == ((kept, old), ())  # as after the end of a suite
    world.service.files = files
    with fails("snapshot-unreadable", message="old 1:1.0+b1"):
        unavailable()
    world.mirror = replace(world.mirror, snapshot="")
    assert unavailable() == ((old,), (old,))
    assert not world.service.paths(".deb")


def test_a_service_that_always_limits_is_reported(world: World) -> None:
    world.service.faults = {"_1.0+b1_all.deb": ["509"] * 99}
    with fails("packages-withdrawn", r"509"):
        world.fetch()
    assert not (fetch.deb_path(world.mirror.debs, world.lock.packages[1])).exists()


def test_without_strict_newer_packages_are_used_and_the_reason_is_shown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "solve_base", lambda *_: replace(world.lock, packages=world.lock.packages[:1]))
    notes = Notes()
    world.mirror = replace(world.mirror, snapshot="")
    made = world.fetch(notes, locked=False)
    assert not made.published
    assert [line for line in notes.lines if "debian-snapshot" in line]


def drop_the_next(world: World) -> None:
    moved = {path: data for path, data in world.service.files.items() if at(6) in path}
    for path, data in moved.items():
        world.service.files[path.replace(at(6), at(0))] = data
    for suite in ("", "-updates", "-security"):
        place = "debian-security" if suite == "-security" else "debian"
        for path in list(world.service.files):
            if path.startswith(f"/archive/{place}/{at(6)}/") and path.endswith(".deb"):
                del world.service.files[path]


def empty_the_index(world: World, debian: Debian) -> None:
    drop_the_next(world)
    suite = f"{BASE.suite}-security"
    put(world.service, f"/archive/debian-security/{at(6)}/", debian.archive({}, suite, LOCKED))


def test_a_package_that_was_replaced_within_hours_is_in_an_older_snapshot(
    world: World, debian: Debian
) -> None:
    empty_the_index(world, debian)
    assert world.fetch().published
    assert {at(6), at(0)} == set(re.findall(r"\d{8}T\d{6}Z", " ".join(world.service.paths("InRelease"))))


def forge_the_index(world: World) -> None:
    path = f"/archive/debian-security/{at(6)}/dists/{BASE.suite}-security/InRelease"
    world.service.files[path] = world.service.files[path].replace(b"Label: Debian", b"Label: Someone")


def forge_the_file(world: World) -> None:
    path = next(p for p in world.service.files if p.startswith("/archive") and p.endswith("b1_all.deb"))
    world.service.files[path] = bytes(len(world.service.files[path]))


@pytest.mark.parametrize(
    ("forge", "code"), [(forge_the_index, "packages-withdrawn"), (forge_the_file, "hash-mismatch")]
)
def test_a_snapshot_that_is_not_debians_is_rejected(
    world: World, forge: Callable[[World], None], code: str
) -> None:
    forge(world)
    with fails(code):
        world.fetch()
    assert not fetch.deb_path(world.mirror.debs, world.lock.packages[1]).exists()


def test_a_lock_that_differs_from_the_snapshot_is_rejected(world: World) -> None:
    kept, old = world.lock.packages
    world.lock = replace(world.lock, packages=(kept, replace(old, sha256="0" * 64)))
    with fails("hash-mismatch"):
        world.fetch(locked=False)
