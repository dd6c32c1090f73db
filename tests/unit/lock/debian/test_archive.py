"""Base locks and the rules of a base's tree: decided here, without apt, mmdebstrap or network."""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import io
import re
import tarfile
import zoneinfo
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from imagefactory.build.base import fetch, look, make
from imagefactory.build.base import make as tar
from imagefactory.cli import cli
from imagefactory.errors import BuildError, DownloadError, LockError
from imagefactory.lock.changes import base_moves
from imagefactory.lock.debian import archive, lock
from imagefactory.lock.debian import archive as sources
from imagefactory.lock.debian.archive import (
    DebianMirror,
    choose_archives,
    lock_base,
    parse_deb822_sources,
    parse_sources_list,
    read_sources,
)
from imagefactory.lock.debian.lock import (
    base_content_hash,
    debian_key,
    format_base_lock,
    parse_base_lock,
    read_base_lock,
    write_base_lock,
)
from imagefactory.model import BaseLock, BaseSpec, DebianPackage
from imagefactory.progress import QuietProgress
from imagefactory.recipes.read import read_bases
from imagefactory.runtime.build_sandbox import IdMaps
from tests.made.errors import fails
from tests.made.trusted import write_settings
from tests.made.values import make_base

TREE = Path(__file__).parents[4]

BASE = make_base(packages=("python3", "gcc"))


def package(name: str, version: str = "1.0-1", content: bytes = b"x") -> DebianPackage:
    digest = hashlib.sha256(content).hexdigest()
    return DebianPackage(name=name, version=version, architecture="amd64", sha256=digest, size=len(content))


LOCK = BaseLock(
    base="debian-12",
    suite="bookworm",
    content_hash=base_content_hash(BASE),
    source_date_epoch=1_700_000_000,
    packages=(package("gcc", "4:12.2.0-3"), package("libc6", "2.36-9+deb12u14"), package("python3")),
)
TEXT = format_base_lock(LOCK)
ARM = replace(LOCK, packages=tuple(replace(one, architecture="arm64") for one in LOCK.packages))


# --- the lock file -------------------------------------------------------------------------------


def test_a_lock_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "bases/debian-12.lock"
    assert read_base_lock(path) is None
    write_base_lock(path, LOCK)
    assert read_base_lock(path) == LOCK
    assert [entry.name for entry in path.parent.iterdir()] == ["debian-12.lock"]
    assert TEXT.splitlines()[6] == f"gcc 4:12.2.0-3 amd64 {LOCK.packages[0].sha256} 1"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("imagefactory-base-lock 1", "imagefactory-base-lock 2", 1),
        ("base: debian-12", "basis: debian-12", 2),
        ("base: debian-12", "base: ../debian-12", 2),
        ("suite: bookworm", "suite: bookworm main", 3),
        ("content-hash: sha256:", "content-hash: md5:", 4),
        ("source-date-epoch: 1700000000", "source-date-epoch: soon", 5),
        ("1700000000\n\n", "1700000000\n", 6),
        ("gcc 4:12", "gcc  4:12", 7),
        ("4:12.2.0-3", "4:12.2.0-3;rm", 7),
        ("gcc 4:12.2.0-3 amd64", "gcc 4:12.2.0-3 riscv64", 7),
        ("gcc 4:12.2.0-3 amd64", "gcc 4:12.2.0-3 arm64", 7),
        ("gcc ", "../gcc ", 7),
        ("libc6 2.36", "gcc 2.36", 8),
        ("libc6 2.36", "aaa 2.36", 8),
        (LOCK.packages[2].sha256 + " 1\n", LOCK.packages[2].sha256 + " 0\n", 9),
        (LOCK.packages[2].sha256 + " 1\n", LOCK.packages[2].sha256 + " 1", 6),
    ],
)
def test_a_malformed_lock_is_refused_with_its_line(old: str, new: str, line: int) -> None:
    head, found, tail = TEXT.rpartition(old)
    assert found
    with fails("lock-malformed") as caught:
        parse_base_lock(head + new + tail, "a.lock")
    assert caught.value.message.startswith(f"a.lock:{line}: ")


@pytest.mark.parametrize("size", range(0, len(TEXT), 7))
def test_a_truncated_lock_is_refused(size: int) -> None:
    with fails("lock-malformed") as caught:
        parse_base_lock(TEXT[:size].rstrip("\n"), "a.lock")
    assert re.match(r"a\.lock:[0-9]+: ", caught.value.message)


def test_the_content_hash_follows_what_decides_and_nothing_else() -> None:
    same = replace(BASE, packages=("gcc", "python3"), public="elsewhere", where=replace(BASE.where, line=9))
    assert base_content_hash(same) == LOCK.content_hash
    for other in (replace(BASE, suite="trixie"), replace(BASE, packages=("gcc",)), replace(BASE, name="d")):
        assert base_content_hash(other) != LOCK.content_hash


def test_without_apt_nothing_is_locked() -> None:
    nowhere = DebianMirror(
        main="http://127.0.0.1:1/debian",
        security="http://127.0.0.1:1/debian-security",
        dated=frozenset(),
        keyring=Path("/nonexistent"),
        debs=Path("/nonexistent"),
        environ=(("PATH", "/nonexistent"),),
    )
    with fails("tool-missing", message="apt-get"):
        lock_base(replace(BASE, packages=("vim",)), LOCK, nowhere, QuietProgress())


@pytest.mark.parametrize("base", read_bases(TREE / "recipes"), ids=lambda base: str(base.name))
def test_the_committed_locks_are_those_of_the_recipes(base: BaseSpec) -> None:
    lock = read_base_lock(TREE / f"lockfiles/bases/{base.name}.lock")
    assert lock is not None
    assert (lock.base, lock.suite, lock.content_hash) == (base.name, base.suite, base_content_hash(base))
    assert {*base.packages, "apt", "libc6"} <= {one.name for one in lock.packages}
    assert f"python{base.python}-minimal" in {one.name for one in lock.packages}
    libc = next(one.version for one in lock.packages if one.name == "libc6")
    assert libc.startswith(f"{base.glibc}-")


# --- where Debian's packages come from -----------------------------------------------------------

ONE_LINE = """\
# deb http://127.0.0.1/off bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/x.gpg] https://127.0.0.1/vendor bookworm main # a vendor's
deb http://127.0.0.1/debian/ bookworm main contrib
deb-src http://127.0.0.1/debian bookworm main
deb http://127.0.0.1/debian-security bookworm-security main
"""

DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://127.0.0.1/debian
Suites: trixie trixie-updates
Components: main
 contrib
Check-Valid-Until: no
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://127.0.0.1/off
Suites: trixie
Components: main
"""


def test_one_line_sources() -> None:
    found = parse_sources_list(ONE_LINE)
    assert [(one.uri, one.suite, one.components) for one in found] == [
        ("https://127.0.0.1/vendor", "bookworm", ("main",)),
        ("http://127.0.0.1/debian", "bookworm", ("main", "contrib")),
        ("http://127.0.0.1/debian-security", "bookworm-security", ("main",)),
    ]
    assert found[0].signed_by == "/usr/share/keyrings/x.gpg"


def test_deb822_sources() -> None:
    found = parse_deb822_sources(DEB822)
    assert [(one.uri, one.suite, one.components) for one in found] == [
        ("http://127.0.0.1/debian", "trixie", ("main", "contrib")),
        ("http://127.0.0.1/debian", "trixie-updates", ("main", "contrib")),
    ]
    assert not found[0].check_valid_until
    assert "debian-archive" in found[0].signed_by


def test_files_of_both_formats_are_read_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(ONE_LINE)
    (tmp_path / "sources.list.d/debian.sources").write_text(DEB822)
    (tmp_path / "sources.list.d/old.save").write_text("deb http://127.0.0.1/debian buster main\n")
    suites = [source.suite for source in read_sources(tmp_path)]
    assert suites == ["bookworm", "bookworm", "bookworm-security", "trixie", "trixie-updates"]
    assert read_sources(tmp_path / "none") == ()


def test_the_machines_sources_decide_unless_the_setting_does() -> None:
    sources = parse_sources_list(ONE_LINE)
    assert choose_archives("", sources) == (
        "http://127.0.0.1/debian",
        "http://127.0.0.1/debian-security",
        frozenset(),
    )
    assert choose_archives("", parse_deb822_sources(DEB822)) == (
        "http://127.0.0.1/debian",
        "http://127.0.0.1/debian-security",
        frozenset({"http://127.0.0.1/debian", "http://127.0.0.1/debian-security"}),
    )
    assert choose_archives("https://mirror/a/debian/", sources)[:2] == (
        "https://mirror/a/debian",
        "https://mirror/a/debian-security",
    )
    assert choose_archives("file:/srv/main http://mirror/sec", ()) == (
        "file:/srv/main",
        "http://mirror/sec",
        frozenset(),
    )
    main, security = (f"http://s/archive/{one}/20250101T000000Z" for one in ("debian", "debian-security"))
    assert choose_archives(main, ()) == (main, security, frozenset({main, security}))
    for setting, dated in ((f"{main} http://s/sec", main), (f"http://s/debian {security}", security)):
        assert choose_archives(setting, ())[2] == {dated}  # the other one's indexes must be current


@pytest.mark.parametrize(
    ("setting", "sources", "code"),
    [
        ("", "deb http://127.0.0.1/ubuntu noble main\n", "debian-archive-unknown"),
        ("", "", "debian-archive-unknown"),
        ("http://mirror/main", "", "security-archive-unknown"),
        ("http://a/debian http://b/c http://d/e", "", "debian-mirror-invalid"),
        ("http://mirror/debian\nfoo", "", "debian-mirror-invalid"),
        ("[trusted=yes] http://mirror/debian", "", "debian-mirror-invalid"),
        ("/srv/debian", "", "debian-mirror-invalid"),
    ],
)
def test_without_an_archive_the_error_says_what_to_set(setting: str, sources: str, code: str) -> None:
    with fails(code, hint="debian-mirror"):
        choose_archives(setting, parse_sources_list(sources))


APT_SNAPSHOTS = """Acquire::Snapshots::URI::Host::archive.example "https://other.example/@PATH@/@SNAPSHOTID@/";
Acquire::Snapshots::URI::Host::debian.example "https://s.example/archive/@PATH@/@SNAPSHOTID@/";
Acquire::Snapshots::URI::Origin::Debian "https://s.example/archive/debian/@SNAPSHOTID@/";
"""


@pytest.mark.parametrize(
    ("setting", "of_apt", "main", "address"),
    [
        ("", APT_SNAPSHOTS, "http://deb.example.org/debian", "https://s.example"),
        ("", "", "http://deb.example.org/debian", "http://snapshot.example.org"),
        ("", "", "https://mirror.example.org/debian", ""),
        ("", "", "http://deb.example.org/other", ""),
        ("none", APT_SNAPSHOTS, "http://deb.example.org/debian", ""),
        ("https://site.example/x/", APT_SNAPSHOTS, "http://deb.example.org/debian", "https://site.example/x"),
    ],
)
def test_snapshots_are_those_of_the_setting_or_of_this_machine(
    tmp_path: Path, setting: str, of_apt: str, main: str, address: str
) -> None:
    (tmp_path / "apt-config").write_text(f"#!/bin/sh\ncat <<'END'\n{of_apt}END\n")
    (tmp_path / "apt-config").chmod(0o755)
    assert archive.find_snapshot(setting, main, {"PATH": f"{tmp_path}:/usr/bin:/bin"}) == address


def test_indexes_are_read_with_debians_keys_and_checks() -> None:
    mirror = DebianMirror(
        main="http://m/debian",
        security="http://m/s",
        dated=frozenset(),
        keyring=Path("/k.gpg"),
        debs=Path("/d"),
        environ=(),
    )
    options = "[signed-by=/k.gpg arch=amd64 target=Packages]"
    assert archive.sources_text(mirror, "trixie", "amd64") == (
        f"deb {options} http://m/debian trixie main\n"
        f"deb {options} http://m/debian trixie-updates main\n"
        f"deb {options} http://m/s trixie-security main\n"
    )
    main = replace(mirror, dated=frozenset({mirror.main}))
    lines = archive.sources_text(main, "trixie", "arm64").splitlines()
    assert ["check-valid-until=no" in line for line in lines] == [True, True, False]
    config = archive.apt_config(Path("/root-of-apt"), "amd64")
    assert 'APT::Get::AllowUnauthenticated "false";' in config
    assert {'Acquire::Check-Date "true";', 'Acquire::Check-Valid-Until "true";'} <= {*config.splitlines()}
    assert 'Dir::State::status "/root-of-apt/state/status";' in config


def test_apt_sees_proxies_but_not_the_rest_of_the_environment() -> None:
    environ = {"https_proxy": "http://p", "LANG": "de_DE", "APT_CONFIG": "/evil", "PATH": "/usr/bin:/bin"}
    assert dict(sources.apt_environment(environ)) == {
        "https_proxy": "http://p",
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/bin:/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin",
    }


def test_what_apt_says() -> None:
    simulation = (
        "Inst gcc-12-base (12.2.0-14 Debian:12.15/oldstable [amd64])\n"
        "Inst bash (5.2-2 Debian:12/x [amd64]) [a ]\nConf bash (5.2-2 Debian:12/x [amd64])\n"
    )
    assert archive.parse_simulation(simulation) == (("bash", "5.2-2"), ("gcc-12-base", "12.2.0-14"))
    assert archive.parse_release_date("Origin: D\nDate: Sat, 01 Nov 2025 10:00:00 UTC\n") == 1761991200
    stanza = f"Package: a\nVersion: 1\nArchitecture: all\nDescription: b\n c\nSize: 3\nSHA256: {'0' * 64}\n"
    offers = archive.parse_offers(stanza + "\nPackage: b\nVersion: 1\n")
    assert offers == {
        ("a", "1"): DebianPackage(name="a", version="1", architecture="all", sha256="0" * 64, size=3)
    }
    lacking = (
        "E: Unable to locate package libfoo1.2\nE: Couldn't find any package by glob 'libfoo1.2'\n"
        "E: Package 'netcat' has no installation candidate\nE: Unable to locate package python-opengl\n"
    )
    assert archive.parse_missing_packages(lacking) == ("libfoo1.2", "netcat", "python-opengl")
    assert archive.error_lines("W: slow\nE: Failed to fetch x\n   Hash Sum mismatch\n") == (
        "E: Failed to fetch x\n   Hash Sum mismatch"
    )


# --- moved packages and the cache ----------------------------------------------------------------


def test_moved_packages_are_named_old_and_new() -> None:
    newer = replace(
        LOCK, packages=(package("gcc", "4:12.2.0-3"), package("libc6", "2.37-1", b"y"), package("zip"))
    )
    moved = base_moves(LOCK, newer)
    assert [str(one) for one in moved] == [
        "libc6 2.36-9+deb12u14 -> 2.37-1",
        "python3 1.0-1 (gone)",
        "zip 1.0-1 (new)",
    ]
    assert "not the published one" in fetch.describe_missing_debs(BASE, moved)[0]
    assert fetch.describe_missing_debs(BASE, ()) == []


def test_a_deb_is_verified_to_the_byte(tmp_path: Path) -> None:
    path, locked = tmp_path / "a.deb", package("a", content=b"good")
    for content, word in ((b"goo", "3 bytes"), (b"evil", "has sha256")):
        path.write_bytes(content)
        with pytest.raises(DownloadError, match=rf"a 1\.0-1: a\.deb .*{word}"):
            fetch.verify_deb(path, locked)
    path.write_bytes(b"good")
    fetch.verify_deb(path, locked)
    assert fetch.deb_path(tmp_path, package("gcc", "4:12.2.0-3")).name == "gcc_12.2.0-3_amd64.deb"
    assert lock.downloaded_filename(package("gcc", "4:12.2.0-3")) == "gcc_4%3a12.2.0-3_amd64.deb"


# --- what a base looks like ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "usr/share/man/man1/gcc.1.gz",
        "usr/share/doc/gcc/changelog.gz",
        "usr/share/doc/gcc/examples/copyright",
        "usr/share/locale/de/LC_MESSAGES/x.mo",
        "usr/lib/python3.11/config-3.11-x86_64-linux-gnu/libpython3.11-pic.a",
        "usr/bin/x86_64-linux-gnu-lto-dump-12",
        "var/log/dpkg.log",
        "var/lib/apt/lists/partial",
        "var/cache/apt/archives/lock",
        "var/cache/ldconfig/aux-cache",
        "var/lib/dpkg/status-old",
        "var/lib/dpkg/lock",
        "etc/.pwd.lock",
        "var/cache/debconf/tmp.ci",
        "etc/shadow-",
        "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
        "dev/null",
        "tmp/anything",
    ],
)
def test_left_out(path: str) -> None:
    assert not look.is_included(path, is_folder=False)


@pytest.mark.parametrize(
    "path",
    [
        "usr/share/man",
        "usr/share/doc/gcc",
        "usr/share/doc/gcc/copyright",
        "usr/share/locale/locale.alias",
        "usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0",
        "usr/lib/x86_64-linux-gnu/libc.a",
        "usr/include/python3.11/Python.h",
        "usr/lib/python3.11/__pycache__/ast.cpython-311.pyc",
        "var/log",
        "var/lib/apt/lists",
        "var/lib/dpkg/status",
        "etc/shadow",
        "tmp",
    ],
)
def test_kept(path: str) -> None:
    assert look.is_included(path, is_folder=path in ("usr/share/man", "usr/share/doc/gcc", "var/log", "tmp"))


def dpkg_excludes(path: str) -> bool:
    """What dpkg does with the rules (dpkg(1): the last that matches wins, * matches slashes)."""
    excluded = False
    for line in look.DPKG_EXCLUDES.splitlines():
        rule, _, pattern = line.partition("=")
        if rule in ("path-exclude", "path-include") and fnmatch.fnmatchcase("/" + path, pattern):
            excluded = rule == "path-exclude"
    return excluded


def test_the_rules_left_in_the_image_are_those_it_was_made_with() -> None:
    for path in (
        "usr/share/man/man1/a.1",
        "usr/share/info/a",
        "usr/share/lintian/overrides/a",
        "usr/share/doc/a/README",
        "usr/share/doc/a/copyright",
        "usr/share/locale/de/x",
        "usr/share/locale/locale.alias",
        "usr/lib/python3.13/config/libpython3.13.a",
        "usr/lib/libpython3.13.so",
        "usr/bin/lto-dump-14",
        "usr/bin/gcc",
        "etc/passwd",
    ):
        assert look.is_excluded(path, is_folder=False) == dpkg_excludes(path), path


def test_fixed_files_name_no_address() -> None:
    for path, content in look.fixed_files(BASE).items():
        assert b"://" not in content, path
        assert all(line.startswith(b"#") for line in content.splitlines()) or "apt" not in path


def test_local_time_of_a_base_is_utc() -> None:
    content = look.fixed_files(BASE)["etc/localtime"]
    zone = zoneinfo.ZoneInfo.from_file(io.BytesIO(content))
    assert datetime(2026, 7, 1, tzinfo=zone).utcoffset() == timedelta(0)
    assert datetime(2026, 7, 1, tzinfo=zone).tzname() == "UTC"


def test_what_apptainer_mounts_over_stays_in_a_base() -> None:
    for path in ("dev", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "var/tmp"):
        assert look.is_included(path, is_folder=True), path
    fixed = look.fixed_files(BASE)
    for path in ("etc/group", "etc/hosts", "etc/localtime", "etc/passwd", "etc/resolv.conf"):
        assert path in fixed or look.is_included(path, is_folder=False), path


def test_the_key_follows_the_lock() -> None:
    assert look.base_key(LOCK) == look.base_key(parse_base_lock(TEXT, "x"))
    assert look.base_key(LOCK) != look.base_key(replace(LOCK, source_date_epoch=1))


def test_commands() -> None:
    command = make.mmdebstrap_command(LOCK)
    assert command[:2] == ("mmdebstrap", "--mode=root")
    assert "--variant=custom" in command
    reference = make.mmdebstrap_command(LOCK, one_by_one=True)
    assert {"--variant=apt", "--include=gcc,libc6,python3"} <= {*reference}
    assert not [word for word in reference if "/input/unpack" in word]
    assert "--architectures=amd64" in command
    assert "--architectures=arm64" in make.mmdebstrap_command(ARM)
    assert command[-3:] == ("bookworm", "-", "deb [trusted=yes] copy:///input ./")
    assert make.build_environment(LOCK) == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": "1700000000",
        "PYTHONHASHSEED": "0",
        "TMPDIR": "/tmp",
    }
    assert make.format_release(LOCK, b"abc").splitlines()[1:2] == ["Codename: bookworm"]
    assert make.format_packages([("Package: a\n", "a.deb", package("a"))]) == (
        f"Package: a\nFilename: ./a.deb\nSize: 1\nSHA256: {package('a').sha256}\n\n"
    )


IDS = IdMaps(uid_map="0 100000 65536", gid_map="0 100000 65536", delegated=False)


def test_a_link_where_a_killed_builds_folder_would_be_is_not_followed(tmp_path: Path) -> None:
    """Anyone may put one into /tmp."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".lock").touch()
    (precious / "file").touch()
    (tmp_path / "imagefactory-base-dead").symlink_to(precious)
    with make._scratch({"TMPDIR": str(tmp_path)}, IDS):
        pass
    assert (precious / "file").exists()


def test_a_killed_builds_folder_is_cleared_and_a_running_ones_is_not(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    dead = tmp_path / "imagefactory-base-dead"
    (dead / "debs").mkdir(parents=True)
    (dead / ".lock").touch()
    with make._scratch(environ, IDS) as running, make._scratch(environ, IDS) as other:
        assert not dead.exists()
        assert {running, other} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_no_other_build_takes_a_folder_that_is_just_made_or_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    flock, remove = fcntl.flock, make._remove
    removed: list[Path] = []

    def another_build() -> None:
        monkeypatch.undo()
        with make._scratch(environ, IDS):
            pass

    def lock_late(*arguments: Any) -> None:
        another_build()
        flock(*arguments)

    def remove_slowly(scratch: Path, ids: IdMaps) -> None:
        another_build()
        removed.append(scratch)
        assert scratch.is_dir()
        remove(scratch, ids)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with make._scratch(environ, IDS) as scratch:
        assert scratch.is_dir()
        monkeypatch.setattr(make, "_remove", remove_slowly)
    assert removed == [scratch]
    assert list(tmp_path.iterdir()) == []


# --- the layer tar -------------------------------------------------------------------------------

STATUS = "".join(
    f"Package: {one.name}\nStatus: install ok installed\nVersion: {one.version}\nArchitecture: amd64\n\n"
    for one in LOCK.packages
)


def entry(name: str, content: bytes | None = None, **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    member = tarfile.TarInfo("./" + name)
    member.mtime = 1_900_000_000
    if content is None:
        member.type, member.mode = tarfile.DIRTYPE, 0o755
    else:
        member.size = len(content)
    for key, value in fields.items():
        setattr(member, key, value)
    return member, content


def made(*entries: tuple[tarfile.TarInfo, bytes | None]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member, content in entries:
            tar.addfile(member, io.BytesIO(content) if content else None)
    buffer.seek(0)
    return buffer


TREE_ENTRIES = (
    entry("etc"),
    entry("etc/hostname", b"builder"),
    entry("etc/old", b"o", mtime=5, uid=7, gid=42, uname="somebody", mode=0o640),
    entry("usr", mtime=5),
    entry("usr/a", b"tool", mode=0o4755),
    entry("usr/a-b", b"", type=tarfile.LNKTYPE, linkname="./usr/a"),
    entry("usr/c", b"", type=tarfile.SYMTYPE, linkname="./a"),
    entry("var"),
    entry("var/lib/dpkg/status", STATUS.encode()),
    entry("var/log"),
    entry("var/log/dpkg.log", b"today"),
)


def fetched() -> fetch.BaseArchives:
    return fetch.BaseArchives(base=BASE, lock=LOCK, debs=(), moved=())


def test_a_layer_is_what_was_made_less_what_a_host_leaks(tmp_path: Path) -> None:
    written = tar.write_layer(made(*TREE_ENTRIES), tmp_path / "a.tar", fetched())
    data = (tmp_path / "a.tar").read_bytes()
    assert hashlib.sha256(data).hexdigest() == written.sha256
    assert len(data) == written.size
    tar.check_installed(written.installed, LOCK)
    with tarfile.open(tmp_path / "a.tar") as layer:
        members = {member.name: member for member in layer}
        assert list(members) == sorted(members, key=lambda name: name.split("/"))
        assert {"dev", "etc/machine-id", "etc/apt/sources.list", "var/log"} <= members.keys()
        assert "var/log/dpkg.log" not in members
        assert members["dev"].isdir()
        assert members["usr"].mtime == LOCK.source_date_epoch
        assert members["usr/a-b"].linkname == "usr/a"
        assert members["usr/c"].linkname == "./a"
        assert members["usr/a"].mode == 0o4755
        old = members["etc/old"]
        assert (old.uid, old.gid, old.uname, old.mode, old.mtime) == (7, 42, "", 0o640, 5)
        assert max(member.mtime for member in members.values()) == LOCK.source_date_epoch
        hostname = layer.extractfile("etc/hostname")
        assert hostname is not None
        assert hostname.read() == b"localhost\n"


@pytest.mark.parametrize(
    ("odd", "word"),
    [
        (entry("zz", b"", type=tarfile.CHRTYPE), "/zz: .* a special file"),
        (entry("zz", b"x", pax_headers={"SCHILY.xattr.security.capability": "x"}), "/zz: .*xattr"),
        (entry("zz", b"", type=tarfile.LNKTYPE, linkname="./var/log/dpkg.log"), "zz is a hard link"),
        (entry("zz" * 128, b"x"), "zz.* 256 bytes"),
        (entry("aa", b"x"), "aa out of order"),
        (entry("var/log"), "var/log out of order"),
    ],
)
def test_what_no_base_may_hold_is_refused(
    tmp_path: Path, odd: tuple[tarfile.TarInfo, bytes | None], word: str
) -> None:
    with pytest.raises(BuildError, match=word):
        tar.write_layer(made(*TREE_ENTRIES, odd), tmp_path / "a.tar", fetched())


def test_a_list_of_packages_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "STATUS_LIMIT", len(STATUS) - 1)
    with pytest.raises(BuildError, match="status"):
        tar.write_layer(made(*TREE_ENTRIES), tmp_path / "a.tar", fetched())


def test_a_sparse_file_is_refused(tmp_path: Path) -> None:
    odd = entry("zz", b"x", type=tarfile.GNUTYPE_SPARSE)
    with pytest.raises(tarfile.TarError):
        tar.write_layer(made(*TREE_ENTRIES, odd), tmp_path / "a.tar", fetched())


def test_a_truncated_tar_is_refused(tmp_path: Path) -> None:
    whole = made(*TREE_ENTRIES).read()
    for size in (0, 100, whole.index(STATUS.encode()) + 10):
        with pytest.raises(tarfile.TarError):
            tar.write_layer(io.BytesIO(whole[:size]), tmp_path / "a.tar", fetched())


def test_other_packages_than_locked_are_refused() -> None:
    installed = tar.parse_status(STATUS.replace("2.36-9+deb12u14", "2.37-1"))
    with pytest.raises(BuildError, match=r"libc6 2\.36-9\+deb12u14 amd64, libc6 2\.37-1 amd64"):
        tar.check_installed(frozenset(installed), LOCK)


def test_a_pulled_base_is_locked_by_its_digest(tmp_path: Path) -> None:
    """No archive is asked, nothing is written, and what would move it is said."""
    (tmp_path / "recipes").mkdir()
    write_settings(tmp_path, 'debian-mirror = "http://127.0.0.1:1/debian"\n')
    (tmp_path / "recipes" / "bases.yaml").write_text(
        f"bases:\n  - name: cuda-devel\n    image: docker.io/nvidia/cuda@sha256:{'0a' * 32}\n"
        '    python: "3.11"\n    glibc: "2.36"\n'
    )
    for arguments in (["lock", "base:cuda-devel"], ["lock", "--upgrade", "base:cuda-devel"], ["lock"]):
        ran = CliRunner().invoke(cli, ["-C", str(tmp_path), *arguments])
        assert ran.exit_code == 0, ran.output
        assert "base:cuda-devel: pinned by its digest" in ran.stdout
        assert "write another one at recipes/bases.yaml:2:5" in ran.stdout
    checked = CliRunner().invoke(cli, ["-C", str(tmp_path), "lock", "--check", "--json"])
    assert checked.exit_code == 0, checked.output
    assert '"base:cuda-devel": "ok"' in checked.stdout
    assert not (tmp_path / "lockfiles").exists()


APT = """#!/bin/sh
echo run >>{folder}/runs
[ "$(wc -l <{folder}/runs)" -gt {fails} ] && {{ echo dlstatus:1:100:done; exit 0; }}
echo "E: Failed to fetch http://m/debian/{said} [IP: 127.0.0.1 80]" >&2
exit 100
"""


@pytest.mark.parametrize(
    ("fails", "said", "runs", "raised"),
    [
        (2, "pool/a_1_amd64.deb  509  Bandwidth Limit Exceeded", 3, None),
        (2, "dists/s/InRelease  509  ", 3, None),
        (1, "dists/s/InRelease  429  Too Many Requests", 2, None),
        (1, "pool/a_1_amd64.deb  503  Service Unavailable", 2, None),
        (9, "pool/a_1_amd64.deb  509  ", 4, DownloadError),
        (1, "dists/s/Packages.xz  File has unexpected size (6 != 7). Mirror sync in progress?", 2, None),
        (1, "dists/s/Packages.xz  Hash Sum mismatch", 2, None),
        (9, "dists/s/Packages.xz  Hash Sum mismatch", 2, DownloadError),
        (9, "pool/a_1_amd64.deb  Hash Sum mismatch", 1, DownloadError),
        (
            9,
            "pool/a_1_amd64.deb  File has unexpected size (6 != 7). Mirror sync in progress?",
            1,
            DownloadError,
        ),
        (9, "pool/a_1_amd64.deb  500  Internal Server Error", 1, DownloadError),
        (9, "pool/a_1_amd64.deb  404  Not Found", 1, archive.StaleIndexError),
    ],
)
def test_an_archive_that_limits_an_address_is_asked_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: int,
    said: str,
    runs: int,
    raised: type[DownloadError] | None,
) -> None:
    (tmp_path / "apt-get").write_text(APT.format(folder=tmp_path, fails=fails, said=said))
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(archive, "PAUSES", (0.0, 0.01, 0.02))
    made = archive.AptArchive(
        root=tmp_path, suite="s", released=1, environ=(("PATH", f"{tmp_path}:/usr/bin:/bin"),)
    )
    with pytest.raises(raised) if raised else nullcontext():
        made.download((), tmp_path, QuietProgress())
    assert len((tmp_path / "runs").read_text().splitlines()) == runs


def test_an_archive_that_has_expired_says_what_takes_one_that_is_frozen(tmp_path: Path) -> None:
    told = (
        "E: Release file for http://m/debian/dists/s/InRelease is expired (invalid since 1d 2h). Updates ..."
    )
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\necho '{told}' >&2\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "key").touch()
    mirror = DebianMirror(
        main="http://m/debian",
        security="http://m/debian-security",
        dated=frozenset(),
        keyring=tmp_path / "key",
        debs=tmp_path,
        environ=(("PATH", f"{tmp_path}:/usr/bin:/bin"), ("TMPDIR", str(tmp_path))),
    )
    with pytest.raises(LockError) as raised, archive.open_archive(mirror, "s", "amd64", QuietProgress()):
        pass
    assert raised.value.code == "archive-read-failed"
    assert "is expired" in raised.value.message
    assert "Check-Valid-Until: no" in (raised.value.hint or "")


ROWS = (
    ("1.0~~", "1.0~~a", "1.0~", "1.0", "1.0-1~bpo12+1", "1.0-1", "1.0-1+b1", "1.0-1+u2", "1.0-1+u10"),
    ("0~.+0", "00-0", "0.9", "1.2a", "1.2b", "1.2+x", "1.2.1", "1.10", "10", "1:0.1", "2:0"),
    ("1.0a-1", "1.0z", "1.0-a-1", "1.0-b-1"),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_each_is_older_than_the_next(row: tuple[str, ...]) -> None:
    for older, newer in pairwise(map(debian_key, row)):
        assert older < newer


def test_what_is_written_in_two_ways_is_one_version() -> None:
    for one, other in (("1.0", "0:1.00"), ("1.0", "1.0-0"), ("1.", "1.0"), ("1-01", "1-1")):
        assert debian_key(one) == debian_key(other)
    with pytest.raises(ValueError, match="invalid literal"):
        debian_key("a:1")
