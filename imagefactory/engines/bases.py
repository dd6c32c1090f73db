"""Bases from Debian's packages: fetch the locked .debs, let mmdebstrap install them, write one layer tar.

mmdebstrap installs from a local folder that holds exactly the locked packages, so no mirror, host or
network has a say in the result. Its tar is rewritten on the fly: what a build leaves behind (logs, caches,
locks, device nodes) is dropped, what a host would leak (hostname, resolv.conf, apt sources) is replaced by
fixed bytes, and every time is at most the lock's. What is dropped and replaced is said by pure functions.

A finished base holds no apt source: it is complete as it is, and the address of an archive belongs to a
machine. Its sources.list says how to add one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import heapq
import io
import os
import pwd
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import urllib.parse
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from imagefactory.errors import BuildError, DownloadError, ToolError
from imagefactory.lock.debian.archive import Archive, open_archive
from imagefactory.lock.debian.file import ARCHITECTURE, deb_filename, downloaded_filename, format_base_lock
from imagefactory.lock.debian.solve import solve_base
from imagefactory.lock.debian.sources import DebianMirror, parse_stanzas, search_path
from imagefactory.model import Base, BaseLock, DebianPackage
from imagefactory.progress import Progress

# --- what a base looks like: everything here decides the bytes -----------------------------------

# Part of every base's key: count it up when the code below gives other bytes for the same lock.
LAYOUT = "imagefactory-base-layout 1"

# Documentation and translations nobody reads in a container, the Python library for static linking and
# gcc's dumper of link-time objects (together 150 MB). Copyright files stay: licences ask for them.
DPKG_EXCLUDES = """\
# Written by imagefactory: what its bases leave out of Debian's packages.
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/lintian/*
path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
path-exclude=/usr/share/locale/*
path-include=/usr/share/locale/locale.alias
path-exclude=/usr/lib/*/libpython3*.a
path-exclude=/usr/bin/*lto-dump*
"""

SOURCES_LIST = """\
# This base is complete: no package archive is set, because its address belongs to a machine.
# To install more, write the address of a Debian mirror you can reach into a line like
#   deb ADDRESS {suite} main
# (and the same for {suite}-updates, and {suite}-security of the security archive), then apt-get update.
# The keys that verify it are in /etc/apt/trusted.gpg.d or /usr/share/keyrings.
"""

HOSTS = """\
127.0.0.1 localhost
::1 localhost ip6-localhost ip6-loopback
"""

# Left behind by a build: empty in a base, but there, because tools expect the folder.
_EMPTIED = (
    "boot",
    "dev",
    "proc",
    "run/lock",
    "sys",
    "tmp",
    "var/backups",
    "var/cache/apt",
    "var/cache/ldconfig",
    "var/lib/apt/lists",
    "var/log",
    "var/tmp",
)
_LEFTOVERS = re.compile(
    r"etc/\.pwd\.lock|etc/(?:passwd|group|shadow|gshadow|subuid|subgid)-"
    r"|etc/apt/apt\.conf\.d/99mmdebstrap|etc/dpkg/dpkg\.cfg\.d/99mmdebstrap"
    r"|var/cache/debconf/tmp\.ci|var/lib/dpkg/(?:lock|lock-frontend|triggers/Lock|[a-z]+-old)|var/cache/debconf/[a-z]+\.dat-old"
)


def fixed_files(base: Base) -> dict[str, bytes]:
    """Files that are the same whatever the machine: path without a leading slash -> content (mode 0644)."""
    return {
        "etc/apt/sources.list": SOURCES_LIST.format(suite=base.suite).encode(),
        "etc/dpkg/dpkg.cfg.d/imagefactory": DPKG_EXCLUDES.encode(),
        "etc/hostname": b"localhost\n",
        "etc/hosts": HOSTS.encode(),
        "etc/machine-id": b"",
        "etc/resolv.conf": b"",
    }


def is_kept(path: str, *, is_folder: bool) -> bool:
    """Whether a path (no leading slash) of mmdebstrap's tree belongs into the base."""
    for folder in _EMPTIED:
        if path.startswith(folder + "/"):
            return False
    if _LEFTOVERS.fullmatch(path):
        return False
    return not is_excluded(path, is_folder=is_folder)


def is_excluded(path: str, *, is_folder: bool) -> bool:
    """The rules of DPKG_EXCLUDES. A package's folder or link under doc stays, for its copyright file."""
    parts = path.split("/")
    top = "/".join(parts[:3])
    if top in ("usr/share/man", "usr/share/info", "usr/share/lintian"):
        return len(parts) > 3
    if top == "usr/share/doc":
        return len(parts) > 4 and (is_folder or len(parts) > 5 or parts[-1] != "copyright")
    if top == "usr/share/locale":
        return len(parts) > 3 and path != "usr/share/locale/locale.alias"
    if path.startswith("usr/bin/"):
        return "lto-dump" in parts[-1]
    return path.startswith("usr/lib/") and re.fullmatch(r"libpython3.*\.a", parts[-1]) is not None


def base_key(lock: BaseLock) -> str:
    """What names a base's layer before it is made: `sha256:...` over the lock and the rules of this room.

    Equal keys mean equal bytes, so a layer kept under its key need not be built again.
    """
    rules = (LAYOUT, DPKG_EXCLUDES, SOURCES_LIST, HOSTS, SETUP_HOOK, *_EMPTIED, _LEFTOVERS.pattern)
    text = format_base_lock(lock) + "\0".join(rules)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# --- fetching ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A locked package the archive no longer has. `old` or `new` is empty where there is none."""

    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name} {self.old or '(not there)'} -> {self.new or '(gone)'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBase:
    """All the .debs of a base, each with its locked hash, in the order of `lock.packages`.

    `lock` is what they are: the lock that was asked for, or a newer one when `moved` is not empty.
    """

    base: Base
    lock: BaseLock
    debs: tuple[Path, ...]
    moved: tuple[Moved, ...]

    @property
    def published(self) -> bool:
        """Whether this is the base of the committed lock, whose digest is the published one."""
        return not self.moved


def fetch_base(
    base: Base, lock: BaseLock, mirror: DebianMirror, progress: Progress, *, locked: bool = False
) -> FetchedBase:
    """Bring the locked .debs into the cache; only what is missing is fetched.

    When the archive no longer has some of them, the suite's newer packages are solved and fetched
    instead, and `moved` says which; with `locked` a BuildError lists them. Raises DownloadError for a
    .deb that is not the locked one, LockError when the archive's indexes cannot be read.
    """
    with _exclusive(mirror.debs, progress):
        moved: tuple[Moved, ...] = ()
        missing = _missing(lock, mirror.debs)
        if missing:
            with open_archive(mirror, lock.suite, progress) as archive:
                gone = _gone(missing, archive)
                if gone and locked:
                    raise BuildError(
                        f"{base.name}: the archive no longer has {len(gone)} of its locked packages:\n"
                        + "\n".join(f"  {package.name} {package.version}" for package in gone),
                        hint=f"'imagefactory lock base:{base.name} --update-all' takes the newer ones; "
                        "a debian-mirror that keeps old versions gives the locked ones",
                    )
                if gone:
                    newer = solve_base(base, archive)
                    moved = compare_locks(lock, newer)
                    lock, missing = newer, _missing(newer, mirror.debs)
                _download(missing, archive, mirror.debs, progress)
        for line in describe_moved(base, moved):
            progress.note(line)
    debs = tuple(deb_path(mirror.debs, package) for package in lock.packages)
    return FetchedBase(base=base, lock=lock, debs=debs, moved=moved)


def compare_locks(old: BaseLock, new: BaseLock) -> tuple[Moved, ...]:
    """Packages whose version or content differs, sorted by name."""
    before = {package.name: package for package in old.packages}
    after = {package.name: package for package in new.packages}
    return tuple(
        Moved(
            name=name,
            old=before[name].version if name in before else "",
            new=after[name].version if name in after else "",
        )
        for name in sorted(before | after)
        if before.get(name) != after.get(name)
    )


def describe_moved(base: Base, moved: Sequence[Moved]) -> list[str]:
    """Lines that say what is not as locked; none when all is."""
    if not moved:
        return []
    return [
        f"{base.name}: Debian's archive has moved on; {len(moved)} packages are newer than locked, "
        "so the digest of this base and of images on it is not the published one:",
        *(f"  {one}" for one in moved),
    ]


def deb_path(debs: Path, package: DebianPackage) -> Path:
    """Where the cache keeps a package's file."""
    return debs / package.sha256[:2] / package.sha256 / deb_filename(package)


def verify_deb(path: Path, package: DebianPackage) -> None:
    """Raises DownloadError unless the file at `path` is the locked one, to the byte."""
    size = path.stat().st_size
    if size != package.size:
        raise DownloadError(
            f"{package.name} {package.version}: {path.name} has {size} bytes, locked are {package.size}",
            hint="run the command again; if it stays, the mirror is damaged or not to be trusted",
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise DownloadError(
            f"{package.name} {package.version}: {path.name} has sha256 {found}, locked is {package.sha256}",
            hint="run the command again; if it stays, the mirror is damaged or not to be trusted",
        )


def _missing(lock: BaseLock, debs: Path) -> list[DebianPackage]:
    """What the cache lacks. A damaged file there counts as missing and is removed."""
    missing = []
    for package in lock.packages:
        path = deb_path(debs, package)
        try:
            verify_deb(path, package)
        except FileNotFoundError:
            missing.append(package)
        except DownloadError:
            path.unlink()
            missing.append(package)
    return missing


def _gone(missing: Sequence[DebianPackage], archive: Archive) -> list[DebianPackage]:
    offers = archive.offered([package.name for package in missing])
    gone = []
    for package in missing:
        offer = offers.get((package.name, package.version))
        if offer is None:
            gone.append(package)
        elif offer != package:
            raise DownloadError(
                f"{package.name} {package.version}: the archive's has sha256 {offer.sha256}, "
                f"locked is {package.sha256}",
                hint="one version must be one file: distrust this mirror or restore the lock from git",
            )
    return gone


def _download(packages: Sequence[DebianPackage], archive: Archive, debs: Path, progress: Progress) -> None:
    """Through a folder that survives a killed process, so that nothing is fetched twice."""
    partial = debs / "partial"
    partial.mkdir(exist_ok=True)
    remaining = [package for package in packages if not _adopt(package, partial, debs)]
    if remaining:
        try:
            archive.download(remaining, partial, progress)
        except DownloadError:
            for package in remaining:  # what did arrive whole need not be fetched again
                _adopt(package, partial, debs)
            raise
    for package in remaining:
        path = partial / downloaded_filename(package)
        try:
            verify_deb(path, package)
        except DownloadError:
            path.unlink()
            raise
        _keep(path, package, debs)
    shutil.rmtree(partial)


def _adopt(package: DebianPackage, partial: Path, debs: Path) -> bool:
    """Take a file that an earlier, interrupted download has left whole."""
    path = partial / downloaded_filename(package)
    try:
        verify_deb(path, package)
    except (FileNotFoundError, DownloadError):
        return False
    _keep(path, package, debs)
    return True


def _keep(path: Path, package: DebianPackage, debs: Path) -> None:
    final = deb_path(debs, package)
    final.parent.mkdir(parents=True, exist_ok=True)
    path.chmod(0o644)
    path.replace(final)


@contextmanager
def _exclusive(debs: Path, progress: Progress) -> Iterator[None]:
    """One process at a time fetches into a cache; the others wait. A killed one's lock is freed."""
    try:
        debs.mkdir(parents=True, exist_ok=True)
        with (debs / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.note("another process fetches Debian packages; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise BuildError(f"{debs}: {error}", hint="free the disk or mend the folder's rights") from error


# --- building ------------------------------------------------------------------------------------

# A merged /usr from the start; mmdebstrap gives the tree's path as the first argument.
SETUP_HOOK = 'for d in bin lib lib64 sbin; do mkdir -p "$1/usr/$d" && ln -s "usr/$d" "$1/$d"; done'

ROOT_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")

_LOG_TAIL = 30
_SCRATCH = "imagefactory-base-"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTar:
    """An uncompressed layer tar. `sha256` (64 hex digits) is the layer's diffID, `size` its bytes."""

    path: Path
    sha256: str
    size: int


def build_base(
    fetched: FetchedBase, out_tar: Path, progress: Progress, *, environ: Mapping[str, str]
) -> BaseTar:
    """Install the .debs with mmdebstrap and write the base's layer to `out_tar` (beside, then renamed).

    Same lock, same bytes, as root and as an ordinary user. Raises ToolError when this machine cannot do
    it, DownloadError for a .deb that is not the locked one, BuildError with the log's tail otherwise.
    """
    require_mmdebstrap(environ)
    for path, package in zip(fetched.debs, fetched.lock.packages, strict=True):
        try:
            verify_deb(path, package)
        except FileNotFoundError as error:
            raise DownloadError(f"{path} is not there", hint="run the command again to fetch it") from error
    beside = out_tar.with_name(f".{out_tar.name}.{os.getpid()}")
    try:
        with _scratch(environ) as scratch:
            _check_scratch(scratch, fetched.lock)
            repository = scratch / "debs"
            _write_repository(fetched, repository)
            made = _install(fetched, repository, beside, progress, environ)
        beside.replace(out_tar)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(
                f"{fetched.base.name}: no space left in {out_tar.parent} or {scratch.parent}",
                hint="free some space and run the same command again",
            ) from error
        raise BuildError(f"{fetched.base.name}: {error}", hint="mend the folder's rights") from error
    finally:
        beside.unlink(missing_ok=True)
    return BaseTar(path=out_tar, sha256=made.sha256, size=made.size)


def mmdebstrap_command(lock: BaseLock, repository: Path, dpkg_options: Path, *, as_root: bool) -> list[str]:
    """Install every locked package, and nothing that is not locked, from a folder of .debs.

    Root mode mounts /proc and the like into the tree: in namespaces of its own, so that nothing stays
    mounted and nothing goes on running when this process is killed. Unshare mode has its own.
    """
    return [
        *("setpriv", "--pdeathsig", "KILL" if as_root else "TERM", "--"),
        *((*ROOT_NAMESPACES, "--kill-child", "--") if as_root else ()),
        "mmdebstrap",
        f"--mode={'root' if as_root else 'unshare'}",
        "--variant=apt",
        f"--architectures={ARCHITECTURE}",
        "--format=tar",
        "--verbose",
        f"--include={','.join(package.name for package in lock.packages)}",
        f"--dpkgopt={dpkg_options}",
        f"--setup-hook={SETUP_HOOK}",
        "--skip=check/qemu,output/dev",
        lock.suite,
        "-",
        # the folder's packages have been verified one by one: that is where the trust comes from
        f"deb [trusted=yes] copy://{urllib.parse.quote(str(repository))} ./",
    ]


def build_environment(lock: BaseLock, scratch: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What mmdebstrap and the packages' scripts see: nothing of the caller's but the search path."""
    return {
        "PATH": search_path(environ),
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(lock.source_date_epoch),
        "PYTHONHASHSEED": "0",  # packages' scripts compile Python modules
        "TMPDIR": str(scratch),
    }


def format_packages(entries: Iterable[tuple[str, str, DebianPackage]]) -> str:
    """A Packages index of a flat repository, from (control file, file name, package)."""
    return "".join(
        f"{control.strip()}\nFilename: ./{name}\nSize: {package.size}\nSHA256: {package.sha256}\n\n"
        for control, name, package in entries
    )


def format_release(suite: str, index: bytes) -> str:
    """Its Release file: mmdebstrap looks for essential packages under the suite's name."""
    return (
        f"Suite: {suite}\nCodename: {suite}\nArchitectures: {ARCHITECTURE}\n"
        f"SHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    )


def _write_repository(fetched: FetchedBase, repository: Path) -> None:
    repository.mkdir(mode=0o755)
    repository.chmod(0o755)  # mmdebstrap reads it as another user; the umask may not get in the way
    entries = []
    for path, package in zip(fetched.debs, fetched.lock.packages, strict=True):
        try:
            (repository / path.name).hardlink_to(path)
        except OSError:  # another file system, or a file of another owner
            shutil.copyfile(path, repository / path.name)
            (repository / path.name).chmod(0o644)
        control = subprocess.run(["dpkg-deb", "--field", path], capture_output=True, text=True, check=False)
        if control.returncode:
            raise BuildError(f"{path.name} is no Debian package: {control.stderr.strip()}")
        entries.append((control.stdout, path.name, package))
    index = format_packages(entries)
    for file, text in (
        (repository / "Packages", index),
        (repository / "Release", format_release(fetched.lock.suite, index.encode())),
        (repository.parent / "dpkg.cfg", "force-unsafe-io\n"),
    ):
        file.write_text(text, encoding="utf-8")
        file.chmod(0o644)


def _install(
    fetched: FetchedBase, repository: Path, out: Path, progress: Progress, environ: Mapping[str, str]
) -> Written:
    as_root = os.geteuid() == 0
    argv = mmdebstrap_command(fetched.lock, repository, repository.parent / "dpkg.cfg", as_root=as_root)
    log: deque[str] = deque(maxlen=_LOG_TAIL)
    title = f"installing {fetched.base.name}"
    with (
        progress.task(title, total=2 * len(fetched.lock.packages), unit="steps") as task,
        subprocess.Popen(
            argv,
            env=build_environment(fetched.lock, repository.parent, environ),
            cwd="/",
            umask=0o022,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # When it cannot write its tar it sends SIGHUP to its whole process group, and in ours stands the
            # script that called us: so it has its own.
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None

        def follow(stream: IO[bytes]) -> None:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip()
                log.append(line)
                if line.startswith(("Unpacking ", "Setting up ")):
                    task.advance(1)

        follower = threading.Thread(target=follow, args=(process.stderr,), daemon=True)
        follower.start()
        try:
            result, broken = write_layer(process.stdout, out, fetched), None
        except tarfile.TarError as error:
            result, broken = None, error
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL if as_root else signal.SIGTERM)
            process.stdout.close()  # whoever outlives the signal ends at its next write
            process.wait()
            follower.join()
            raise
        process.wait()
        follower.join()
    if process.returncode or result is None:
        raise BuildError(
            f"{fetched.base.name}: mmdebstrap ended with {process.returncode}"
            f"{f' ({broken})' if broken else ''}; its last words:\n" + "\n".join(log),
            hint="imagefactory doctor says what this machine lacks for it",
        )
    check_installed(result.installed, fetched.lock)
    return result


# --- the layer tar -------------------------------------------------------------------------------


class _Hashed(io.RawIOBase):
    """Counts and hashes what goes through."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)
        return len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A layer tar just written, and the packages its dpkg calls installed (name, version, architecture)."""

    sha256: str
    size: int
    installed: frozenset[tuple[str, str, str]]


def write_layer(stream: IO[bytes], out: Path, fetched: FetchedBase) -> Written:
    """Rewrite mmdebstrap's tar from `stream` as a base's layer.

    Sorted by path with parents first, names without `./`, numeric owners, times at most the lock's; one
    entry is in memory at a time. Raises BuildError for what no base may hold (device nodes outside /dev,
    extended attributes), tarfile.TarError for a stream that is no whole tar.
    """
    epoch, fixed = fetched.lock.source_date_epoch, fixed_files(fetched.base)
    name, last, written = fetched.base.name, "", set[str]()
    installed: set[tuple[str, str, str]] = set()
    with out.open("wb") as file:
        hashed = _Hashed(file)
        with (
            tarfile.open(fileobj=stream, mode="r|") as source,
            tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as layer,
        ):
            entries = heapq.merge(_made(source, fixed, epoch), _fixed(fixed, epoch), key=_order)
            for member, data in entries:
                if written and _order((member, None)) <= _order((tarfile.TarInfo(last), None)):
                    raise BuildError(f"{name}: mmdebstrap's tar is out of order at {member.name}")
                if member.islnk() and member.linkname not in written:
                    raise BuildError(f"{name}: {member.name} is a hard link to {member.linkname}, left out")
                if member.name == "var/lib/dpkg/status" and data is not None:
                    status = data.read()
                    installed, data = parse_status(status.decode()), io.BytesIO(status)
                layer.addfile(member, data)
                written.add(member.name)
                last = member.name
        while stream.read(1 << 16):  # padding behind the end of the archive
            pass
    return Written(sha256=hashed.sha256.hexdigest(), size=hashed.size, installed=frozenset(installed))


def check_installed(installed: frozenset[tuple[str, str, str]], lock: BaseLock) -> None:
    """Raises BuildError unless exactly the locked packages were installed."""
    odd = installed ^ {(one.name, one.version, one.architecture) for one in lock.packages}
    if odd:
        raise BuildError(
            f"{lock.base}: what was installed is not what is locked: "
            + ", ".join(" ".join(one) for one in sorted(odd)),
            hint=f"run 'imagefactory lock base:{lock.base} --update-all'",
        )


def parse_status(text: str) -> set[tuple[str, str, str]]:
    """Name, version and architecture of the packages that dpkg's status file calls installed."""
    return {
        (stanza["Package"], stanza["Version"], stanza["Architecture"])
        for stanza in parse_stanzas(text)
        if stanza.get("Status") == "install ok installed"
    }


def _order(entry: tuple[tarfile.TarInfo, IO[bytes] | None]) -> list[str]:
    return entry[0].name.split("/")


def _made(
    source: tarfile.TarFile, fixed: Mapping[str, bytes], epoch: int
) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """What mmdebstrap made and a base keeps, each with its content."""
    for member in source:
        path = member.name.removeprefix("./")
        if path in (".", "dev") or path in fixed or not is_kept(path, is_folder=member.isdir()):
            continue
        attributes = [key for key in member.pax_headers if "xattr" in key or "acl" in key]
        if attributes or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise BuildError(f"/{path}: {', '.join(attributes) or 'a special file'} in a base is not allowed")
        entry = tarfile.TarInfo(path)
        entry.type, entry.mode, entry.size = member.type, member.mode, member.size
        entry.uid, entry.gid = member.uid, member.gid
        # a folder's time tells in which order mmdebstrap's version unpacked; a file's is its package's
        entry.mtime = epoch if member.isdir() else min(int(member.mtime), epoch)
        entry.linkname = member.linkname.removeprefix("./") if member.islnk() else member.linkname
        yield entry, source.extractfile(member) if member.isreg() else None


def _fixed(fixed: Mapping[str, bytes], epoch: int) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """The files that are the same everywhere, and an empty /dev."""
    for path, content in sorted({"dev": None, **fixed}.items(), key=lambda item: item[0].split("/")):
        entry = tarfile.TarInfo(path)
        entry.mtime = epoch
        if content is None:
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            yield entry, None
        else:
            entry.size = len(content)
            yield entry, io.BytesIO(content)


# --- what the machine must have ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderFacts:
    """What decides whether this machine can make bases. `mmdebstrap` is its version, empty without it."""

    is_root: bool
    mmdebstrap: str
    has_newuidmap: bool
    has_subordinate_ids: bool
    namespaces: bool
    user: str


def require_mmdebstrap(environ: Mapping[str, str]) -> str:
    """mmdebstrap's version. Raises ToolError with the command that mends what is missing."""
    facts = builder_facts(environ)
    check_builder(facts)
    return facts.mmdebstrap


def check_builder(facts: BuilderFacts) -> None:
    """Raises ToolError for the first thing that keeps this machine from making bases."""
    sudo = "" if facts.is_root else "sudo "
    if not facts.mmdebstrap:
        raise ToolError(
            "mmdebstrap is not on this machine",
            hint=f"{sudo}apt-get install mmdebstrap{'' if facts.is_root else ' uidmap'}",
        )
    if facts.is_root:
        if not facts.namespaces:
            raise ToolError(
                "this machine denies root the mount and pid namespaces that bases are made in",
                hint="run on the machine itself, or give the container the capability SYS_ADMIN",
            )
        return
    if not facts.has_newuidmap:
        raise ToolError("an ordinary user needs newuidmap to make bases", hint="sudo apt-get install uidmap")
    if not facts.has_subordinate_ids:
        raise ToolError(
            f"user '{facts.user}' has no 65536 subordinate ids in /etc/subuid and /etc/subgid",
            hint=f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {facts.user} "
            "(choose a range that no other line of these files has)",
        )
    if not facts.namespaces:
        raise ToolError(
            "this machine denies user namespaces to ordinary programs",
            hint="sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu) or "
            "kernel.unprivileged_userns_clone=1 (older Debian), or run with sudo",
        )


def builder_facts(environ: Mapping[str, str]) -> BuilderFacts:
    """Look at this machine; starts two short processes, changes nothing."""
    path = search_path(environ)
    is_root = os.geteuid() == 0
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    tools = ("newuidmap", "newgidmap")
    probe = ROOT_NAMESPACES if is_root else ("unshare", "--user")
    return BuilderFacts(
        is_root=is_root,
        mmdebstrap=_output(["mmdebstrap", "--version"], path).removeprefix("mmdebstrap "),
        has_newuidmap=all(shutil.which(tool, path=path) for tool in tools),
        has_subordinate_ids=all(
            has_range(_text(Path(file)), (user, str(os.geteuid()))) for file in ("/etc/subuid", "/etc/subgid")
        ),
        namespaces=_output([*probe, "--", "echo", "yes"], path) == "yes",
        user=user,
    )


def has_range(text: str, names: Sequence[str]) -> bool:
    """Whether a subuid(5) or subgid(5) file gives one of `names` a range of 65536 ids."""
    fields = [line.split(":") for line in text.splitlines()]
    return any(
        len(field) == 3 and field[0] in names and field[2].isdigit() and int(field[2]) >= 65536
        for field in fields
    )


def _output(argv: Sequence[str], path: str) -> str:
    try:
        done = subprocess.run(
            argv, env={"PATH": path, "LC_ALL": "C.UTF-8"}, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


@contextmanager
def _scratch(environ: Mapping[str, str]) -> Iterator[Path]:
    """A folder for one build, removed at the end; those of killed builds are removed at the start.

    A running build holds a lock on its folder, which the kernel takes from a killed one.
    """
    parent = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    for old in parent.glob(f"{_SCRATCH}*"):
        try:
            if old.stat().st_uid == os.geteuid():
                with (old / ".lock").open("r") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(old, environ)
        except (FileNotFoundError, BlockingIOError):  # just made, just removed or at work
            continue
    # It gets the name that others look for once it is locked, and is locked until it is gone.
    hidden = Path(tempfile.mkdtemp(prefix=f".{_SCRATCH}", dir=parent))
    with (hidden / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        scratch = hidden.rename(parent / hidden.name.removeprefix("."))
        try:
            yield scratch
        finally:
            _remove(scratch, environ)


def _remove(scratch: Path, environ: Mapping[str, str]) -> None:
    """Remove a build's folder; what an ordinary user's namespace left in it belongs to subordinate ids."""
    left = [str(path) for path in scratch.glob("mmdebstrap.*")]
    if left and os.geteuid() != 0:
        _output(["mmdebstrap", "--unshare-helper", "rm", "-rf", "--", *left], search_path(environ))
    for path in scratch.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != ".lock":
            path.unlink()
    if [path.name for path in scratch.iterdir()] == [".lock"]:  # else a later build tries again
        shutil.rmtree(scratch, ignore_errors=True)


def _check_scratch(scratch: Path, lock: BaseLock) -> None:
    """The clock must be past the lock's, and an ordinary user's namespace must reach the folder."""
    if scratch.stat().st_mtime < lock.source_date_epoch:
        raise BuildError(
            f"this machine's clock is behind the lock of {lock.base}, so times in the base would vary",
            hint="set the clock",
        )
    scratch.chmod(0o755)
    closed = [str(folder) for folder in scratch.parents if not folder.stat().st_mode & 0o001]
    if closed and os.geteuid() != 0:
        raise ToolError(
            f"{closed[0]} is closed to other users, so mmdebstrap's namespace cannot reach {scratch}",
            hint="set TMPDIR to a folder that others may enter",
        )
