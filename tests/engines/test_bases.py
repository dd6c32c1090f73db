"""Bases for real: Debian's archive, apt, mmdebstrap. Run as root; one ordinary user is made and removed.

The archive is reached through a server on 127.0.0.1 that passes on to the machine's own mirror, so that a
test can look at what is asked for, answer with damaged files, and show that the address has no say.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import imagefactory
from imagefactory.build.base import fetch, look, make
from imagefactory.build.base.make import builder_facts, choose_ids
from imagefactory.errors import BuildError, DownloadError, LockError
from imagefactory.lock.debian.archive import DebianMirror, find_mirror, lock_base
from imagefactory.lock.debian.lock import base_content_hash, read_base_lock, write_base_lock
from imagefactory.model import BaseLock, BaseSpec, DebianPackage, SourceLocation
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import Layout
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.services.children import LIMIT, stdout_of, wait_for
from tests.services.factory import ROOT, SMALL_BASES
from tests.services.hostile_script import ALLOWED, make_host, parse_report
from tests.services.tier import NIGHTLY, many

ETC_APT = Path("/etc/apt")
NEEDS = (
    "ca-certificates",
    "g++",
    "libc6-dev",
    "python3",
    "python3-dev",
    "python3-venv",
    "tini",
    "unzip",
)


SMALL = tuple(yaml.safe_load(SMALL_BASES)["bases"][0]["packages"])
"""By day bases are made of them where only the way is tried."""


def make_base(name: str, suite: str, python: str, glibc: str, packages: tuple[str, ...] = NEEDS) -> BaseSpec:
    return BaseSpec(
        name=name,
        suite=suite,
        python=python,
        glibc=glibc,
        packages=packages,
        public="",
        where=SourceLocation(file="bases.yaml", line=1, column=1),
    )


BASES = {
    "debian-12": make_base("debian-12", "bookworm", "3.11", "2.36"),
    "debian-13": make_base("debian-13", "trixie", "3.13", "2.41", many(SMALL, NEEDS)),
}


class Notes(QuietProgress):
    """Keeps what a person would have seen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


# --- a mirror on 127.0.0.1 -----------------------------------------------------------------------


class PassingMirror(ThreadingHTTPServer):
    """Passes requests on to the machine's mirror. `damage` changes answers whose path ends in a key."""

    daemon_threads = True

    def __init__(self, upstream: DebianMirror) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.routes = {"/debian/": upstream.main, "/debian-security/": upstream.security}
        self.asked: list[str] = []
        self.damage: dict[str, Callable[[bytes], bytes]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/debian"


class _Passing(BaseHTTPRequestHandler):
    server: PassingMirror

    def do_GET(self) -> None:
        prefix = next((route for route in self.server.routes if self.path.startswith(route)), "")
        path = urllib.parse.unquote(self.path)
        self.server.asked.append(path)
        if not prefix:
            self.send_error(404)
            return
        try:
            with urllib.request.urlopen(
                f"{self.server.routes[prefix]}/{self.path.removeprefix(prefix)}", timeout=60
            ) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            self.send_error(error.code)
            return
        for end, change in self.server.damage.items():
            if path.endswith(end):
                body = change(body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def flip(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


@pytest.fixture
def mirror() -> Iterator[PassingMirror]:
    server = PassingMirror(find_mirror("", Path("/nonexistent"), os.environ, etc_apt=ETC_APT))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def through(server: PassingMirror, debs: Path) -> DebianMirror:
    environ = {**os.environ, "no_proxy": "127.0.0.1"}
    return find_mirror(server.address, debs, environ, etc_apt=ETC_APT, snapshot="none")


# --- the bases, made once as root ----------------------------------------------------------------


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A folder that other users may enter."""
    assert os.geteuid() == 0, "these tests make bases as root and as another user: run them as root"
    folder = Path(tempfile.mkdtemp(prefix="imagefactory-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def own(room: Path, base_store: Path) -> DebianMirror:
    """It need not send what the run's base was made of."""
    kept = base_store.parent / "cache" / "debs"
    subprocess.run(["cp", "--archive", "--link", kept, room / "debs"], check=True)
    return find_mirror("", room / "debs", os.environ, etc_apt=ETC_APT, snapshot="none")


@pytest.fixture(scope="module")
def locks(room: Path, own: DebianMirror) -> dict[str, BaseLock]:
    """What the archive gives today: the committed locks may have moved on."""
    made = {name: lock_base(base, None, own, QuietProgress()) for name, base in BASES.items()}
    for name, lock in made.items():
        write_base_lock(room / f"{name}.lock", lock)
    return made


@pytest.fixture(scope="module")
def fetched(own: DebianMirror, locks: dict[str, BaseLock]) -> dict[str, fetch.BaseArchives]:
    return {
        name: fetch.fetch_base(base, locks[name], own, QuietProgress(), locked=True)
        for name, base in BASES.items()
    }


@pytest.fixture(scope="module")
def made_of(room: Path, own: DebianMirror, locks: dict[str, BaseLock]) -> dict[str, BaseLock]:
    """What the tars below are made of: debian-12's is the run's own base."""
    committed = read_base_lock(ROOT / "lockfiles" / "bases" / "debian-12.lock")
    assert committed
    lent = fetch.fetch_base(BASES["debian-12"], committed, own, QuietProgress()).lock
    write_base_lock(room / "made-of.lock", lent)
    return {**locks, "debian-12": lent}


@pytest.fixture(scope="module")
def tars(
    room: Path, base_store: Path, fetched: dict[str, fetch.BaseArchives], made_of: dict[str, BaseLock]
) -> dict[str, make.BaseTar]:
    """debian-13's is made here; debian-12's the command line made, as root."""
    made = make.build_base(fetched["debian-13"], room / "debian-13.tar", QuietProgress(), environ=os.environ)
    return {"debian-12": lent_tar(base_store, room / "debian-12.tar"), "debian-13": made}


def lent_tar(store: Path, path: Path) -> make.BaseTar:
    """The base of a store that is lent."""
    layout = Layout(store)
    image = layout.image("base:debian-12")
    assert image
    (layer,) = image.layers
    with path.open("wb") as file:
        for data in codec("zstd").decompress(layout.blob_path(layer.descriptor.digest)):
            file.write(data)
    return make.BaseTar(path=path, sha256=layer.diff_id.removeprefix("sha256:"), size=path.stat().st_size)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A base that the command line made as root, and what it is made of."""

    base: BaseSpec
    lock: Path
    tar: make.BaseTar


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, room: Path) -> Compared:
    """By day the small base."""
    base = BASES["debian-12"]
    if NIGHTLY:
        tars, _ = request.getfixturevalue("tars"), request.getfixturevalue("made_of")
        return Compared(base=base, lock=room / "made-of.lock", tar=tars[base.name])
    root, store = request.getfixturevalue("tiny_root"), request.getfixturevalue("small_store")
    lock = Path(shutil.copy(root / "lockfiles/bases/debian-12.lock", room / "small.lock"))
    tar = lent_tar(store, room / "small.tar")
    return Compared(base=replace(base, packages=SMALL), lock=lock, tar=tar)


@pytest.fixture(scope="module")
def stranger(room: Path) -> Iterator[str]:
    """An ordinary user with subordinate ids (useradd gives them), gone afterwards."""
    name = f"ifbase{os.getpid()}"
    subprocess.run(["useradd", "--create-home", "--base-dir", str(room), name], check=True)
    yield name
    subprocess.run(["userdel", name], check=True)


ELSEWHERE = """
import json, os, sys
from pathlib import Path
from imagefactory.build.base.make import build_base
from imagefactory.build.base.fetch import fetch_base
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.debian.archive import find_mirror
from imagefactory.model import BaseSpec, SourceLocation
from imagefactory.progress import QuietProgress

fields, lock, mirror, out = sys.argv[1:]
base = BaseSpec(**json.loads(fields), where=SourceLocation(file="x", line=1, column=1))
lock, out = read_base_lock(Path(lock)), Path(out)
found = find_mirror(mirror, out.parent / "debs", os.environ, etc_apt=Path("/nonexistent"))
fetched = fetch_base(base, lock, found, QuietProgress(), locked=True)
print(os.geteuid(), os.uname().nodename, build_base(fetched, out, QuietProgress(), environ=os.environ).sha256)
"""


def test_the_same_bytes_for_another_user_host_mirror_folder_zone_language_and_umask(
    room: Path,
    compared: Compared,
    stranger: str,
    mirror: PassingMirror,
) -> None:
    user = pwd.getpwnam(stranger)
    home = Path(user.pw_dir)
    home.chmod(0o700)  # the caches of a careful user: mmdebstrap's namespace cannot enter
    scratch = Path(tempfile.mkdtemp(prefix="elsewhere-", dir=room))
    scratch.chmod(0o755)
    os.chown(scratch, user.pw_uid, user.pw_gid)
    shutil.copytree(Path(imagefactory.__file__).parent, scratch / "code/imagefactory")
    base, lock = compared.base, read_base_lock(compared.lock)
    assert lock
    fields = {key: getattr(base, key) for key in ("name", "suite", "python", "glibc", "packages", "public")}
    out = home / f"of {base.name}/base.tar"
    out.parent.mkdir()
    os.chown(out.parent, user.pw_uid, user.pw_gid)
    script = (
        'hostname elsewhere-9; umask 077; cd /; exec setpriv --reuid "$0" --regid "$0" --init-groups "$@"'
    )
    output = stdout_of(
        [
            *("unshare", "--uts", "sh", "-c", script, stranger),
            *(os.path.realpath(sys.executable), "-c", ELSEWHERE),
            *(json.dumps(fields), compared.lock, mirror.address, out),
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(scratch),
            "TZ": "Asia/Tokyo",
            "LANG": "de_DE.UTF-8",
            "LC_ALL": "tr_TR.UTF-8",
            "PYTHONPATH": str(scratch / "code"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "no_proxy": "127.0.0.1",
        },
    )
    uid, host, digest = output.split()
    assert (int(uid), host) == (user.pw_uid, "elsewhere-9")
    assert sum(path.endswith(".deb") for path in mirror.asked) >= len(lock.packages) > 60
    assert digest == compared.tar.sha256
    assert out.read_bytes() == compared.tar.path.read_bytes()
    assert [path.name for path in out.parent.iterdir() if "tar" in path.name] == ["base.tar"]
    assert [path.name for path in scratch.iterdir()] == ["code"]


KILLED = (
    """
import os, signal, threading, time
from contextlib import suppress
from pathlib import Path

def end_in_the_middle():  # when dpkg works in the root that mmdebstrap makes
    installed = "imagefactory-base-*/tree/mmdebstrap.*/var/lib/dpkg/info/*.list"
    while True:
        with suppress(OSError):  # it is gone again
            if any(Path(os.environ["TMPDIR"]).glob(installed)):
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)

threading.Thread(target=end_in_the_middle, daemon=True).start()
"""
    + ELSEWHERE
)


def test_a_killed_build_takes_all_along(
    room: Path, tars: dict[str, make.BaseTar], fetched: dict[str, fetch.BaseArchives], own: DebianMirror
) -> None:
    base, scratch = BASES["debian-12"], room / "killed"
    (scratch / "out").mkdir(parents=True)
    (scratch / "out/debs").symlink_to(own.debs)
    fields = {key: getattr(base, key) for key in ("name", "suite", "python", "glibc", "packages", "public")}
    arguments = (
        json.dumps(fields),
        room / "debian-12.lock",
        "http://127.0.0.1:1/debian",
        scratch / "out/a.tar",
    )
    environ = {**os.environ, "TMPDIR": str(scratch)}
    argv = [sys.executable, "-c", KILLED, *arguments]
    done = subprocess.run(argv, env=environ, check=False, timeout=LIMIT)
    assert done.returncode == -signal.SIGKILL
    left = next(scratch.glob("imagefactory-base-*"))
    made = next(left.glob("tree/mmdebstrap.*/var")).parent
    # The kernel ends a pid namespace at once, but not in no time.
    wait_for(lambda: not running_in(made.name), "what ran in the root ends")
    assert str(left) not in Path("/proc/self/mounts").read_text()
    with make._scratch(environ, choose_ids(builder_facts())):  # the next build
        assert not left.exists()
    assert not (scratch / "out/a.tar").exists()


def test_mmdebstraps_hangup_reaches_nobody_elses_processes(
    tmp_path: Path, fetched: dict[str, fetch.BaseArchives], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends one when the reader of its tar is gone: a full disk, or a tar that is refused."""
    monkeypatch.setattr(make, "mmdebstrap_command", lambda *_, **__: ("sh", "-c", "kill -HUP 0; exit 1"))
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    try:
        with fails("mmdebstrap-failed"):
            make.build_base(fetched["debian-12"], tmp_path / "base.tar", QuietProgress(), environ=os.environ)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == []


def test_a_writer_that_goes_on_after_a_broken_tar_is_ended(
    tmp_path: Path, fetched: dict[str, fetch.BaseArchives], monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = ("sh", "-c", "while echo not a tar; do :; done")
    monkeypatch.setattr(make, "mmdebstrap_command", lambda *_, **__: endless)
    with fails("mmdebstrap-failed"):
        make.build_base(fetched["debian-12"], tmp_path / "base.tar", QuietProgress(), environ=os.environ)


def test_a_line_without_end_is_not_kept(
    tmp_path: Path, fetched: dict[str, fetch.BaseArchives], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("sh", "-c", "head -c 10000000 /dev/zero >&2; exit 1")
    monkeypatch.setattr(make, "mmdebstrap_command", lambda *_, **__: line)
    with pytest.raises(BuildError) as caught:
        make.build_base(fetched["debian-12"], tmp_path / "base.tar", QuietProgress(), environ=os.environ)
    assert len(caught.value.message) < 200_000


def running_in(text: str) -> list[str]:
    """Processes whose root or command line speaks of `text`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            if text in words or text in str((process / "root").readlink()):
                found.append(words)
        except OSError:  # it ended meanwhile
            continue
    return found


# --- packages that are not Debian's --------------------------------------------------------------


@pytest.fixture(scope="module")
def least(own: DebianMirror) -> fetch.BaseArchives:
    """The smallest base."""
    base = replace(BASES["debian-12"], packages=("usr-is-merged",))
    return fetch.fetch_base(
        base, lock_base(base, None, own, QuietProgress()), own, QuietProgress(), locked=True
    )


@dataclass(frozen=True, kw_only=True)
class MadeHere:
    """A package of the test: fields and scripts of its control data, and files with their content."""

    name: str
    fields: str = ""
    control: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folder_mode: int = 0o755

    def build(self, folder: Path) -> bytes:
        root = folder / "root"
        sums = [f"{hashlib.md5(text.encode()).hexdigest()}  {path}\n" for path, text in self.files.items()]
        files = {"md5sums": "".join(sums), **self.control}
        control = {f"DEBIAN/{name}": text for name, text in files.items()}
        for path, text in {**control, **self.files}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
            (root / path).chmod(0o755)
            (root / path).parent.chmod(0o755 if path.startswith("DEBIAN/") else self.folder_mode)
        for path, target in self.links.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)
        (root / "DEBIAN").mkdir(parents=True, exist_ok=True)
        (root / "DEBIAN/control").write_text(
            f"Package: {self.name}\nVersion: 1.0\nArchitecture: all\nMaintainer: A <a@b.org>\n"
            f"Description: x\n{self.fields}"
        )
        environ = {**os.environ, "SOURCE_DATE_EPOCH": "1600000000"}
        argv = ["dpkg-deb", "--build", "--root-owner-group", root, folder / "a.deb"]
        subprocess.run(argv, check=True, env=environ)
        return (folder / "a.deb").read_bytes()


def with_packages(least: fetch.BaseArchives, debs: Path, *more: MadeHere) -> fetch.BaseArchives:
    """The same base with more packages: as a stranger's cache and lock have them."""
    for one in more:
        with tempfile.TemporaryDirectory() as folder:
            content = one.build(Path(folder))
        package = DebianPackage(
            name=one.name,
            version="1.0",
            architecture="all",
            sha256=hashlib.sha256(content).hexdigest(),
            size=len(content),
        )
        path = fetch.deb_path(debs, package)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        lock = replace(least.lock, packages=(*least.lock.packages, package))
        least = replace(least, lock=lock, debs=(*least.debs, path))
    return least


def with_hostile(least: fetch.BaseArchives, script: str, debs: Path) -> fetch.BaseArchives:
    return with_packages(least, debs, MadeHere(name="zz-hostile", control={"postinst": script}))


def contents(tar: make.BaseTar, *paths: str) -> list[str]:
    with tarfile.open(tar.path) as archive:
        files = [archive.extractfile(path) for path in paths]
        return [file.read().decode() for file in files if file]


@pytest.mark.parametrize(
    "name", many(("least", "small"), ("least", "debian-12", "debian-13", "debian-12-arm64"))
)
def test_the_same_bytes_as_by_mmdebstrap_and_dpkg_alone(
    name: str, request: pytest.FixtureRequest, own: DebianMirror, tmp_path: Path
) -> None:
    """By day the small base, and the one of which apt installs nothing."""
    base, tar = replace(BASES["debian-12"], packages=SMALL), None
    if name == "small":
        compared = request.getfixturevalue("compared")
        base, lock, tar = compared.base, read_base_lock(compared.lock), compared.tar
    elif name == "least":
        archives = request.getfixturevalue("least")
        base, lock = archives.base, archives.lock
    elif name in BASES:
        tars, made_of = request.getfixturevalue("tars"), request.getfixturevalue("made_of")
        base, lock, tar = BASES[name], made_of[name], tars[name]
    else:
        base = replace(BASES["debian-12"], name=name, platform="linux/arm64")
        lock = lock_base(base, None, own, QuietProgress())
    assert lock
    fetched = fetch.fetch_base(base, lock, own, QuietProgress(), locked=True)
    notes = Notes()
    tar = tar or make.build_base(fetched, tmp_path / "hooks.tar", notes, environ=os.environ)
    other = make.build_base(fetched, tmp_path / "dpkg.tar", notes, environ=os.environ, one_by_one=True)
    assert notes.lines == []
    trees = [read_tree(one.path) for one in (tar, other)]
    assert {
        path: [tree.get(path) for tree in trees] for path, _ in {*trees[0].items()} ^ {*trees[1].items()}
    } == {}
    assert tar.sha256 == other.sha256


def read_tree(path: Path) -> dict[str, tuple[object, ...]]:
    tree: dict[str, tuple[object, ...]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            content = hashlib.sha256(file.read()).hexdigest() if file else member.linkname
            owner = (member.uid, member.gid)
            tree[member.name] = (member.type, member.mode, owner, member.mtime, content)
    return tree


DIVERTED = MadeHere(
    name="zz-diverted",
    control={"conffiles": "/etc/zz.conf\n", "postinst": "#!/bin/sh\n/usr/bin/zz >/etc/zz.said\n"},
    files={"usr/bin/zz": "#!/bin/sh\necho diverted\n", "etc/zz.conf": "x\n"},
)
DIVERTS = MadeHere(
    name="zz-diverts",
    fields="Pre-Depends: zz-diverted\n",
    control={
        "preinst": "#!/bin/sh\nset -e\n[ -x /usr/bin/zz ]\n"
        "dpkg-divert --package zz-diverts --add --rename --divert /usr/bin/zz.real /usr/bin/zz\n"
    },
    files={"usr/bin/zz": "#!/bin/sh\necho diverts\n"},
)


def test_a_diversion_is_made_before_what_diverts_is_unpacked(
    least: fetch.BaseArchives, room: Path, tmp_path: Path
) -> None:
    fetched, notes = with_packages(least, room / "stranger/debs", DIVERTS, DIVERTED), Notes()
    tar, other = (
        make.build_base(fetched, tmp_path / f"{way}.tar", notes, environ=os.environ, one_by_one=way)
        for way in (False, True)
    )
    assert notes.lines == []
    assert contents(tar, "usr/bin/zz", "usr/bin/zz.real", "etc/zz.said", "etc/zz.conf") == [
        DIVERTS.files["usr/bin/zz"], DIVERTED.files["usr/bin/zz"], "diverted\n", "x\n"
    ]  # fmt: skip
    assert "zz-diverts" in contents(tar, "var/lib/dpkg/diversions")[0]
    assert tar.sha256 == other.sha256


@pytest.mark.parametrize(
    "second",
    [
        MadeHere(name="zz-b", fields="Replaces: zz-a\n", files={"usr/share/zz/of": "b"}),
        MadeHere(name="zz-b", fields="Replaces: zz-a\n", files={"lib/zz/of": "b"}),
        MadeHere(name="zz-b", files={"usr/share/zz/other": "b"}, folder_mode=0o700),
        MadeHere(name="zz-b", files={"usr/share/zb": "b"}, links={"usr/share/zz": "elsewhere"}),
    ],
)
def test_packages_that_share_paths_are_installed_one_by_one(
    second: MadeHere, least: fetch.BaseArchives, room: Path, tmp_path: Path
) -> None:
    """Who is first or last decides there."""
    first = MadeHere(name="zz-a", files={"usr/share/zz/of": "a", "usr/lib/zz/of": "a"})
    fetched, notes = with_packages(least, room / "stranger/debs", first, second), Notes()
    tar = make.build_base(fetched, tmp_path / "base.tar", notes, environ=os.environ)
    assert len(notes.lines) == 1
    assert look.SHARED in notes.lines[0]
    ((path, text),) = second.files.items()
    assert contents(tar, path.replace("lib/zz", "usr/lib/zz")) == [text]
    assert not list(tmp_path.glob(".base.tar*"))


def test_a_cached_package_that_debian_did_not_sign_is_not_installed(
    least: fetch.BaseArchives, own: DebianMirror
) -> None:
    hostile = with_hostile(least, "#!/bin/sh\n", own.debs)
    with fails("packages-withdrawn", r"zz-hostile 1\.0"):
        fetch.fetch_base(hostile.base, hostile.lock, own, QuietProgress(), locked=True)
    newer = fetch.fetch_base(hostile.base, hostile.lock, own, QuietProgress())
    assert [(change.name, change.after) for change in newer.moved] == [("zz-hostile", "")]
    assert "zz-hostile" not in {package.name for package in newer.lock.packages}


def test_a_hostile_package_reaches_nothing_of_the_machine(
    least: fetch.BaseArchives, room: Path, tmp_path: Path
) -> None:
    with make_host(room, "package") as host:
        hostile = with_hostile(least, host.script("/report"), room / "stranger/debs")
        made = make.build_base(hostile, tmp_path / "base.tar", QuietProgress(), environ=os.environ)
        host.check()
        for path, package in zip(hostile.debs, hostile.lock.packages, strict=True):
            fetch.verify_deb(path, package)
    with tarfile.open(made.path) as tar:
        report = tar.extractfile("report")
        assert report is not None
        found = parse_report(report.read().decode())
    assert len(found) > 20
    assert [name for name, reached in found.items() if reached] == list(ALLOWED)


@pytest.mark.parametrize("name", BASES)
def test_the_layer_holds_nothing_of_its_making(
    name: str, tars: dict[str, make.BaseTar], made_of: dict[str, BaseLock], own: DebianMirror, room: Path
) -> None:
    hosts = [uri.split("/")[2].encode() for uri in (own.main, own.security) if "//" in uri]
    host, epoch = os.uname().nodename, made_of[name].source_date_epoch
    seen: list[str] = []
    with tarfile.open(tars[name].path) as tar:
        for member in tar:
            assert member.isreg() or member.isdir() or member.issym() or member.islnk(), member.name
            assert member.mtime <= epoch
            assert not member.uname
            assert not [key for key in member.pax_headers if key not in ("path", "linkpath")]
            assert not member.name.startswith(("/", "./"))
            seen.append(member.name)
            if member.isreg() and member.name.startswith(("etc/", "var/")):
                file = tar.extractfile(member)
                assert file is not None
                content = file.read()
                assert str(room).encode() not in content, member.name
                assert not [one for one in hosts if b"//" + one in content], member.name
                if member.name in ("etc/hostname", "etc/hosts", "etc/localtime", "etc/resolv.conf"):
                    assert content == look.fixed_files(BASES[name])[member.name]
                    assert host.encode() not in content or host == "localhost"
                if member.name == "etc/shadow":  # the one file of a base that holds a day
                    days = {line.split(":")[2] for line in content.decode().splitlines()}
                    assert days == {str(epoch // 86400)}
    assert seen == sorted(set(seen), key=lambda path: path.split("/"))
    # what apptainer mounts over, where neither overlay nor underlay is allowed
    assert {"etc/group", "etc/hosts", "etc/localtime", "etc/passwd", "etc/resolv.conf"} <= {*seen}
    assert {"home", "mnt", "opt", "root", "srv", "var/tmp"} <= {*seen}
    for folder in ("dev", "proc", "sys", "tmp", "run/lock", "var/log", "var/cache/apt", "var/lib/apt/lists"):
        assert folder in seen
        assert not [path for path in seen if path.startswith(folder + "/")]
    assert f"usr/lib/python{BASES[name].python}/__pycache__/ast.cpython-" + (
        BASES[name].python.replace(".", "") + ".pyc"
    ) in set(seen)
    assert tars[name].size < 360_000_000


INSIDE = """
set -e
python3 -c 'import sys, ssl, ctypes, sqlite3, venv; print("%d.%d" % sys.version_info[:2])'
python3 -c 'import sysconfig, os; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")'
python3 -c 'import os; print(os.confstr("CS_GNU_LIBC_VERSION"))'
cd /tmp
printf '#include <Python.h>\\n#include <stdio.h>\\nint main(void){puts(PY_VERSION);return 0;}\\n' >a.c
gcc -O2 $(python3-config --includes) a.c -o a
./a
unzip -v >/dev/null
grep -c 'BEGIN CERTIFICATE' /etc/ssl/certs/ca-certificates.crt
python3 -m venv env && env/bin/python -m pip --version >/dev/null
dpkg --audit
apt-get check -qq
"""


@pytest.mark.parametrize("name", many(("debian-12",), tuple(BASES)))
def test_a_base_has_what_gpu_work_needs(name: str, room: Path, tars: dict[str, make.BaseTar]) -> None:
    root = room / f"{name}.root"
    root.mkdir()
    subprocess.run(["tar", "-xf", tars[name].path, "-C", root, "--numeric-owner"], check=True)
    (root / "dev/null").touch()  # gcc and apt ask for it; a runner gives real device nodes
    output = stdout_of(
        ["chroot", root, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "sh", "-c", INSIDE]
    )
    python, libc, header, certificates = output.split("\n")[:4]
    assert python == BASES[name].python
    assert libc == f"glibc {BASES[name].glibc}"
    assert header.startswith(BASES[name].python + ".")
    assert int(certificates) > 100
    shutil.rmtree(root)


# --- when the archive is not as locked -----------------------------------------------------------


def with_stale(lock: BaseLock, name: str) -> BaseLock:
    """The lock with a version of `name` that no archive has."""
    return replace(
        lock,
        packages=tuple(
            replace(one, version="0.1-1", sha256="0" * 64) if one.name == name else one
            for one in lock.packages
        ),
    )


def test_locked_packages_that_are_gone(
    own: DebianMirror, locks: dict[str, BaseLock], fetched: dict[str, fetch.BaseArchives]
) -> None:
    base, lock = BASES["debian-12"], locks["debian-12"]
    stale, notes = with_stale(lock, "unzip"), Notes()
    with fails("packages-withdrawn", r"unzip 0\.1-1", hint="lock base:debian-12"):
        fetch.fetch_base(base, stale, own, notes, locked=True)
    assert not [line for line in notes.lines if "not the published one" in line]
    newer = fetch.fetch_base(base, stale, own, notes)
    version = next(one.version for one in lock.packages if one.name == "unzip")
    assert [str(one) for one in newer.moved] == [f"unzip 0.1-1 -> {version}"]
    assert not newer.published
    assert newer.lock.packages == lock.packages
    assert all(path.is_file() for path in newer.debs)
    assert [line for line in notes.lines if "not the published one" in line]
    assert fetched["debian-12"].published


def test_a_base_from_snapshots_alone_has_the_same_digest(
    least: fetch.BaseArchives, own: DebianMirror, mirror: PassingMirror, tmp_path: Path
) -> None:
    then = datetime.fromtimestamp(least.lock.source_date_epoch, UTC) + timedelta(hours=6)
    mirror.routes = {
        f"/archive/{name}/{then:%Y%m%dT%H%M%SZ}/": upstream
        for name, upstream in (("debian", own.main), ("debian-security", own.security))
    }
    emptied = replace(through(mirror, tmp_path / "debs"), snapshot=mirror.address.removesuffix("/debian"))
    again = fetch.fetch_base(least.base, least.lock, emptied, QuietProgress(), locked=True)
    assert again.published
    made, expected = (
        make.build_base(one, tmp_path / f"{number}.tar", QuietProgress(), environ=os.environ)
        for number, one in enumerate((again, least))
    )
    assert made.sha256 == expected.sha256


def test_a_package_of_another_content_is_refused(own: DebianMirror, locks: dict[str, BaseLock]) -> None:
    packages = tuple(
        replace(one, sha256="0" * 64) if one.name == "unzip" else one for one in locks["debian-12"].packages
    )
    with fails("hash-mismatch", "unzip "):
        fetch.fetch_base(
            BASES["debian-12"], replace(locks["debian-12"], packages=packages), own, QuietProgress()
        )


def without_unzip(fetched: fetch.BaseArchives, debs: Path) -> tuple[Path, str]:
    """A cache that lacks one package; that package's path in it, and its file's name."""
    for path, package in zip(fetched.debs, fetched.lock.packages, strict=True):
        target = fetch.deb_path(debs, package)
        target.parent.mkdir(parents=True)
        if package.name == "unzip":
            lacking = target
        else:
            target.hardlink_to(path)
    return lacking, lacking.name


def test_tampered_truncated_and_interrupted_downloads(
    tmp_path: Path, fetched: dict[str, fetch.BaseArchives], mirror: PassingMirror
) -> None:
    one = fetched["debian-12"]
    path, name = without_unzip(one, tmp_path)
    found = through(mirror, tmp_path)
    for change in (flip, lambda body: body[:-100]):
        mirror.damage = {name: change}
        with pytest.raises(DownloadError, match=r"unzip"):
            fetch.fetch_base(one.base, one.lock, found, QuietProgress(), locked=True)
        assert not path.exists()
    mirror.damage, mirror.asked = {}, []
    again = fetch.fetch_base(one.base, one.lock, found, QuietProgress(), locked=True)
    assert [asked for asked in mirror.asked if asked.endswith(".deb")] == [
        asked for asked in mirror.asked if asked.endswith(name)
    ]
    assert again.published
    # what a killed run had fetched is taken, not fetched again
    partial = tmp_path / "partial"
    partial.mkdir()
    path.rename(partial / name)
    mirror.asked = []
    fetch.fetch_base(one.base, one.lock, found, QuietProgress(), locked=True)
    assert path.is_file()
    assert not [asked for asked in mirror.asked if asked.endswith(".deb")]


def test_a_damaged_cache_heals_and_is_never_built_from(
    tmp_path: Path, fetched: dict[str, fetch.BaseArchives], own: DebianMirror
) -> None:
    one = fetched["debian-12"]
    path, _ = without_unzip(one, tmp_path / "debs")
    good = next(deb for deb in one.debs if deb.name == path.name)
    path.write_bytes(flip(good.read_bytes()))
    debs = tuple(fetch.deb_path(tmp_path / "debs", package) for package in one.lock.packages)
    with fails("hash-mismatch", r"^unzip "):
        make.build_base(replace(one, debs=debs), tmp_path / "a.tar", QuietProgress(), environ=os.environ)
    assert not (tmp_path / "a.tar").exists()
    fetch.fetch_base(one.base, one.lock, replace(own, debs=tmp_path / "debs"), QuietProgress(), locked=True)
    assert path.read_bytes() == good.read_bytes()


def test_indexes_that_are_not_debians_are_refused(tmp_path: Path, mirror: PassingMirror) -> None:
    mirror.damage = {"/bookworm/InRelease": lambda body: body.replace(b"Date: ", b"Date:  ")}
    with pytest.raises(LockError, match=r"bookworm.*(?s:.)*(sign|SIG)") as caught:
        lock_base(BASES["debian-12"], None, through(mirror, tmp_path), QuietProgress())
    assert "debian-mirror" in caught.value.hint


def test_an_archive_out_of_reach(tmp_path: Path) -> None:
    nowhere = find_mirror("http://127.0.0.1:1/debian", tmp_path, os.environ, etc_apt=ETC_APT)
    with fails("archive-read-failed"):
        lock_base(BASES["debian-12"], None, nowhere, QuietProgress())


def test_a_package_debian_does_not_have(own: DebianMirror) -> None:
    with fails("debian-no-solution", message="no-such-package", hint="bases.yaml:1:1"):
        lock_base(replace(BASES["debian-12"], packages=("no-such-package",)), None, own, QuietProgress())


def test_an_update_that_changes_nothing_keeps_the_lock(
    room: Path, own: DebianMirror, locks: dict[str, BaseLock]
) -> None:
    lock = read_base_lock(room / "debian-12.lock")
    assert lock == locks["debian-12"]
    assert lock is not None
    assert lock.content_hash == base_content_hash(BASES["debian-12"])
    older = replace(lock, source_date_epoch=lock.source_date_epoch - 1000)
    assert lock_base(BASES["debian-12"], older, own, QuietProgress()) is older
