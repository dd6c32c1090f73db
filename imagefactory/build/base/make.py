"""Build a base's layer tar: mmdebstrap installs the locked .debs, and its tar is rewritten.

Most packages are unpacked at once by hooks (look.py). dpkg installs the others, and configures all.

mmdebstrap installs from a local directory with exactly the locked packages. So no mirror, host or network
affects the result.
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
import stat
import subprocess
import tarfile
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Self, TypeAlias

from imagefactory.build.base.fetch import BaseArchives, verify_deb
from imagefactory.build.base.look import (
    CONFIGURE,
    INFO,
    SETUP_HOOK,
    SHARED,
    UNPACK,
    ControlData,
    fixed_files,
    hook_files,
    is_included,
)
from imagefactory.errors import (
    BuildError,
    DownloadError,
    ImagefactoryError,
    StoreError,
    ToolError,
    os_problem,
)
from imagefactory.lock.debian.archive import parse_stanzas
from imagefactory.lock.debian.lock import lock_architecture
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.tar_stream import CappedInfo
from imagefactory.oci.tree import WHITEOUT, FileData, TarMember, unpackable_parts
from imagefactory.oci.unpack import read_layer
from imagefactory.progress import Progress
from imagefactory.runtime.build_sandbox import (
    INPUT,
    SYSTEM_PATH,
    TREE,
    BuildProcess,
    IdMaps,
    prepare_directory,
)
from imagefactory.runtime.emulator import find_emulator
from imagefactory.trees import remove_tree

IDS = 65536
"""The number of ids that Debian packages may use."""
LAST_ID = 0x6FFFFFFF
"""The last id that systemd reserves for containers (its UIDS-GIDS.md): no user of the machine has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderFacts:
    """The facts that decide whether this machine can build bases.

    `mmdebstrap` is its version, empty without it. `uid_map` and `gid_map` are those of this process.
    `subuid` and `subgid` are the texts of the files in /etc. `names` are the user's name and number in those
    files.
    """

    is_root: bool
    mmdebstrap: str
    has_newuidmap: bool
    names: tuple[str, ...]
    uid_map: str
    gid_map: str
    subuid: str
    subgid: str


def choose_ids(facts: BuilderFacts) -> IdMaps:
    """Return the ids that become 0 to 65535 in a build. Raises ToolError for the first missing thing."""
    sudo = "" if facts.is_root else "sudo "
    if not facts.mmdebstrap:
        raise ToolError(
            "tool-missing",
            "mmdebstrap is not installed",
            hint=f"{sudo}apt-get install mmdebstrap{'' if facts.is_root else ' uidmap'}",
        )
    if facts.is_root:
        uid, gid = unused_ids(facts.uid_map), unused_ids(facts.gid_map)
        if uid is None or gid is None:
            raise ToolError(
                "subordinate-ids-missing",
                f"building a base needs {IDS} more user and group ids, and this container has only root's",
                hint="build outside of this container, or map two ranges of 65536 ids into it",
            )
        return IdMaps(uid_map=f"0 {uid} {IDS}", gid_map=f"0 {gid} {IDS}", delegated=False)
    if not facts.has_newuidmap:
        raise ToolError(
            "tool-missing",
            "newuidmap is not installed, and users other than root need it to build bases",
            hint="sudo apt-get install uidmap",
        )
    uid, gid = delegated_ids(facts.subuid, facts.names), delegated_ids(facts.subgid, facts.names)
    if uid is None or gid is None:
        raise ToolError(
            "subordinate-ids-missing",
            f"user '{facts.names[0]}' has no {IDS} subordinate ids in /etc/subuid and /etc/subgid",
            hint=f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {facts.names[0]} "
            "(choose a range that no other line of these files has)",
        )
    return IdMaps(uid_map=f"0 {uid} {IDS}", gid_map=f"0 {gid} {IDS}", delegated=True)


def unused_ids(id_map: str) -> int | None:
    """Return the first of 65536 ids for root to build with: the highest of its namespace, up to LAST_ID."""
    starts = []
    for line in id_map.splitlines():
        first, _, count = map(int, line.split())
        start = min(first + count, LAST_ID + 1) - IDS
        if start >= max(first, 1):
            starts.append(start)
    return max(starts, default=None)


def delegated_ids(text: str, names: Sequence[str]) -> int | None:
    """Return the first of 65536 ids that a subuid(5) or subgid(5) file assigns to one of `names`, or None."""
    for line in text.splitlines():
        match = re.fullmatch(r"([^:]+):([0-9]+):([0-9]+)", line.strip())
        if match and match[1] in names and int(match[2]) and int(match[3]) >= IDS:
            return int(match[2])
    return None


def builder_facts() -> BuilderFacts:
    """Read the facts of this machine. Starts one short process, changes nothing."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    return BuilderFacts(
        is_root=os.geteuid() == 0,
        mmdebstrap=_output(["mmdebstrap", "--version"]).removeprefix("mmdebstrap "),
        has_newuidmap=all(shutil.which(tool, path=SYSTEM_PATH) for tool in ("newuidmap", "newgidmap")),
        names=(user, str(os.geteuid())),
        uid_map=_text(Path("/proc/self/uid_map")),
        gid_map=_text(Path("/proc/self/gid_map")),
        subuid=_text(Path("/etc/subuid")),
        subgid=_text(Path("/etc/subgid")),
    )


def _output(argv: Sequence[str]) -> str:
    try:
        result = subprocess.run(
            argv,
            env={"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


STATUS_LIMIT = 64 << 20
"""Bytes of dpkg's list of packages: 64,000 packages, as many as Debian has."""


class HashingReader(io.RawIOBase):
    """A stream that counts and hashes the bytes written through it."""

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
class BaseTar:
    """An uncompressed layer tar. `sha256` (64 hex digits) is the layer's diffID, `size` its bytes.

    `installed` are the packages that dpkg lists as installed (name, version, architecture).
    """

    path: Path
    sha256: str
    size: int
    installed: frozenset[tuple[str, str, str]] = frozenset()


REBUILD_BASE = "build again; if it fails again, install another version of mmdebstrap"


def write_layer(stream: IO[bytes], out: Path, fetched: BaseArchives) -> BaseTar:
    """Rewrite mmdebstrap's tar from `stream` as a base's layer.

    The layer is sorted by path with parents first, without paths that look.py excludes. Names have no `./`,
    owners are numeric, times are at most the lock's. One entry is in memory at a time. Raises BuildError for
    entries that are not allowed in a base (device nodes outside /dev, extended attributes, names too long to
    unpack), tarfile.TarError for an incomplete tar.
    """
    epoch, fixed = fetched.lock.source_date_epoch, fixed_files(fetched.base)
    name, last, written = fetched.base.name, "", set[str]()
    installed: set[tuple[str, str, str]] = set()
    with out.open("wb") as file:
        hashed = HashingReader(file)
        with (
            tarfile.open(fileobj=stream, mode="r|", tarinfo=CappedInfo) as source,
            tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as layer,
        ):
            entries = heapq.merge(_built_files(source, fixed, epoch), _fixed(fixed, epoch), key=_order)
            for member, data in entries:
                if written and _order((member, None)) <= _order((tarfile.TarInfo(last), None)):
                    raise BuildError(
                        "base-tar-invalid",
                        f"{name}: mmdebstrap wrote {member.name} out of order",
                        hint=REBUILD_BASE,
                    )
                if member.islnk() and member.linkname not in written:
                    raise BuildError(
                        "base-tar-invalid",
                        f"{name}: {member.name} is a hard link to {member.linkname}, which is missing",
                        hint=REBUILD_BASE,
                    )
                unpackable_parts(member.name)
                if member.name == "var/lib/dpkg/status" and data is not None:
                    if member.size > STATUS_LIMIT:
                        raise BuildError(
                            "base-tar-invalid",
                            f"{name}: dpkg's status file has {member.size:,} bytes, too many to read",
                            hint=REBUILD_BASE,
                        )
                    status = data.read()
                    installed, data = parse_status(status.decode()), io.BytesIO(status)
                layer.addfile(member, data)
                written.add(member.name)
                last = member.name
        while stream.read(1 << 16):  # padding after the end of the archive
            pass
    digest = hashed.sha256.hexdigest()
    return BaseTar(path=out, sha256=digest, size=hashed.size, installed=frozenset(installed))


def check_installed(installed: frozenset[tuple[str, str, str]], lock: BaseLock) -> None:
    """Raise BuildError unless exactly the locked packages are installed."""
    odd = installed ^ {(package.name, package.version, package.architecture) for package in lock.packages}
    if odd:
        raise BuildError(
            "base-not-as-locked",
            f"{lock.base}: the installed packages differ from the lock: "
            + ", ".join(" ".join(package) for package in sorted(odd)),
            hint=f"run imagefactory lock base:{lock.base} --upgrade",
        )


def parse_status(text: str) -> set[tuple[str, str, str]]:
    """Return the name, version and architecture of each installed package in dpkg's status file."""
    return {
        (stanza["Package"], stanza["Version"], stanza["Architecture"])
        for stanza in parse_stanzas(text)
        if stanza.get("Status") == "install ok installed"
    }


def _order(entry: tuple[tarfile.TarInfo, IO[bytes] | None]) -> list[str]:
    return entry[0].name.split("/")


def _built_files(
    source: tarfile.TarFile, fixed: Mapping[str, bytes], epoch: int
) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yield the files of mmdebstrap's tar that belong in a base, each with its content."""
    for member in source:
        path = member.name.removeprefix("./")
        if path in (".", "dev") or path in fixed or not is_included(path, is_folder=member.isdir()):
            continue
        attributes = [key for key in member.pax_headers if "xattr" in key or "acl" in key]
        if attributes or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise BuildError(
                "base-tar-invalid",
                f"/{path}: a base must not contain {', '.join(attributes) or 'a special file'}",
                hint="remove the package with this file from the base",
            )
        entry = tarfile.TarInfo(path)
        entry.type, entry.mode, entry.size = member.type, member.mode, member.size
        entry.uid, entry.gid = member.uid, member.gid
        # a directory's time depends on the order of unpacking; a file's is its package's
        entry.mtime = epoch if member.isdir() else min(int(member.mtime), epoch)
        entry.linkname = member.linkname.removeprefix("./") if member.islnk() else member.linkname
        yield entry, source.extractfile(member) if member.isreg() else None


def _fixed(fixed: Mapping[str, bytes], epoch: int) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yield the files that are the same in every base, and an empty /dev."""
    for path, content in sorted({"dev": None, **fixed}.items(), key=lambda item: item[0].split("/")):
        entry = tarfile.TarInfo(path)
        entry.mtime = epoch
        if content is None:
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            yield entry, None
        else:
            entry.size = len(content)
            yield entry, io.BytesIO(content)


_LOG_TAIL, _LINE = 30, 4096  # lines to keep, and bytes of each: scripts may print anything
_SCRATCH = "imagefactory-base-"


def build_base(
    fetched: BaseArchives,
    out_tar: Path,
    progress: Progress,
    *,
    environ: Mapping[str, str],
    one_by_one: bool = False,
) -> BaseTar:
    """Install the .debs with mmdebstrap, and write the base's layer to `out_tar` atomically.

    The same lock gives the same bytes, as root and as an ordinary user, and `one_by_one` too. Raises
    ToolError if this machine cannot build bases, DownloadError for a .deb that differs from the lock,
    BuildError with the log's tail otherwise.
    """
    ids, emulator = choose_ids(builder_facts()), find_emulator(lock_architecture(fetched.lock))
    for path, package in zip(fetched.debs, fetched.lock.packages, strict=True):
        try:
            verify_deb(path, package)
        except FileNotFoundError as error:
            raise DownloadError(
                "package-missing", f"{path} is missing", hint="run the command again to fetch it"
            ) from error
    temporary = out_tar.with_name(f".{out_tar.name}.{os.getpid()}")
    try:
        with _scratch(environ, ids) as scratch:
            _check_clock(scratch, fetched.lock)
            prepare_directory(scratch)
            _write_repository(fetched, scratch / INPUT)
            layer = None
            while layer is None:
                process = BuildProcess(
                    scratch,
                    mmdebstrap_command(fetched.lock, one_by_one=one_by_one),
                    environment=build_environment(fetched.lock),
                    ids=ids,
                    emulator=emulator,
                )
                layer = _install(fetched, process, temporary, progress)
                one_by_one = True
        temporary.replace(out_tar)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                "disk-full",
                f"{fetched.base.name}: no space left in {out_tar.parent} or {scratch.parent}",
                hint="free disk space and run the command again",
            ) from error
        raise BuildError(*os_problem("write", out_tar.parent, error), hint="check its permissions") from error
    finally:
        temporary.unlink(missing_ok=True)
    return replace(layer, path=out_tar)


def mmdebstrap_command(lock: BaseLock, *, one_by_one: bool = False) -> tuple[str, ...]:
    """Return the command that installs exactly the locked packages, from the .debs in /input.

    Its hooks unpack most packages at once. With `one_by_one`, dpkg unpacks all. The result is equal.
    """
    names = ",".join(package.name for package in lock.packages)
    hooks = (f'--setup-hook=bash /{INPUT}/{UNPACK} "$1"', f'--customize-hook=bash /{INPUT}/{CONFIGURE} "$1"')
    return (
        "mmdebstrap",
        "--mode=root",
        f"--variant={'apt' if one_by_one else 'custom'}",
        f"--architectures={lock_architecture(lock)}",
        "--format=tar",
        "--verbose",
        f"--dpkgopt=/{INPUT}/dpkg.cfg",
        f"--setup-hook={SETUP_HOOK}",
        *((f"--include={names}",) if one_by_one else hooks),
        "--skip=check/qemu,output/dev",
        lock.suite,
        "-",
        # trusted, because each package has been verified
        f"deb [trusted=yes] copy:///{INPUT} ./",
    )


def build_environment(lock: BaseLock) -> dict[str, str]:
    """Return the environment of mmdebstrap and the packages' scripts, without the caller's variables."""
    return {
        "PATH": SYSTEM_PATH,
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(lock.source_date_epoch),
        "PYTHONHASHSEED": "0",  # packages' scripts compile Python modules
        "TMPDIR": "/tmp",  # noqa: S108 - the build's own
    }


def format_packages(entries: Iterable[tuple[str, str, DebianPackage]]) -> str:
    """Return the Packages index of a flat repository, from (control file, file name, package)."""
    return "".join(
        f"{control.strip()}\nFilename: ./{name}\nSize: {package.size}\nSHA256: {package.sha256}\n\n"
        for control, name, package in entries
    )


def format_release(lock: BaseLock, index: bytes) -> str:
    """Return the repository's Release file. mmdebstrap finds essential packages by the suite's name."""
    return (
        f"Suite: {lock.suite}\nCodename: {lock.suite}\nArchitectures: {lock_architecture(lock)}\n"
        f"SHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    )


def _write_repository(fetched: BaseArchives, repository: Path) -> None:
    """Write a flat repository of the .debs, and what the hooks of mmdebstrap read."""
    packages = fetched.lock.packages
    for path in fetched.debs:
        try:
            (repository / path.name).hardlink_to(path)
        except OSError:  # another file system, or a file of another owner
            shutil.copyfile(path, repository / path.name)
            (repository / path.name).chmod(0o644)
    with ThreadPoolExecutor() as pool:
        controls = list(pool.map(_read_control, fetched.debs, packages))
    names = (path.name for path in fetched.debs)
    archives = list(zip(names, packages, controls, strict=True))
    index = format_packages((control.text, name, package) for name, package, control in archives)
    (repository / INFO).mkdir()
    (repository / INFO).chmod(0o755)
    for control in controls:
        for suffix, (content, mode, mtime) in control.files.items() if control.is_plain else ():
            file = repository / INFO / f"{control.info_name}.{suffix}"
            file.write_bytes(content)
            file.chmod(mode)
            os.utime(file, (mtime, mtime))
    for name, text in {
        "Packages": index,
        "Release": format_release(fetched.lock, index.encode()),
        "dpkg.cfg": "force-unsafe-io\n",
        **hook_files(archives),
    }.items():
        (repository / name).write_text(text, encoding="utf-8")
        (repository / name).chmod(0o644)


CONTROL_LIMIT = 64 << 20
"""Bytes of the control files of one package."""


def parse_control(content: bytes) -> ControlData:
    """Parse the tar of a .deb's control files. Raises TarError, UnicodeDecodeError or KeyError if invalid."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if member.isreg() and (file := archive.extractfile(member)) is not None:
                if not re.fullmatch(r"[a-z0-9-]+", name):
                    raise tarfile.TarError(f"{name!r} is not a control file")
                files[name] = file.read(), member.mode & 0o755, int(member.mtime)
    text = files.pop("control")[0].decode()
    files.get("conffiles", (b"",))[0].decode()
    control = ControlData(text=text, fields=next(parse_stanzas(text), {}), files=files)
    if control.identity:
        return control
    raise KeyError("Package")


def _read_control(deb: Path, package: DebianPackage) -> ControlData:
    with subprocess.Popen(
        ["dpkg-deb", "--ctrl-tarfile", deb],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        content = process.stdout.read(CONTROL_LIMIT)
        process.stdout.close()
        problem = process.stderr.read().decode(errors="replace").strip()
    if not process.returncode:
        try:
            control = parse_control(content)
        except (KeyError, UnicodeDecodeError, tarfile.TarError) as error:
            problem = str(error) or type(error).__name__
        else:
            if control.identity == (package.name, package.version, package.architecture):
                return control
            problem = f"its control file is of {' '.join(control.identity)}"
    raise BuildError(
        "deb-invalid",
        f"{deb} is not the Debian package {package.name}: {problem}",
        hint=f"delete it (rm {deb}) and run the same command again",
    )


def _install(fetched: BaseArchives, build: BuildProcess, out: Path, progress: Progress) -> BaseTar | None:
    """Return the layer, None if packages share paths, so that they must be installed one by one."""
    log: deque[str] = deque(maxlen=_LOG_TAIL)
    title = f"installing {fetched.base.name}"
    with (
        progress.task(title, total=2 * len(fetched.lock.packages), unit="steps") as task,
        build.process as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None

        def follow(stream: IO[bytes]) -> None:
            for raw in iter(lambda: stream.readline(_LINE), b""):
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
            process.stdout.close()  # so that remaining writers end
        except BaseException:
            build.kill()
            follower.join()
            raise
        follower.join()
        code = build.wait()
    if code and (shared := next((line for line in log if line.startswith(SHARED)), "")):
        progress.note(f"{fetched.base.name}: {shared}; installing the packages one by one")
        return None
    if code or result is None:
        raise BuildError(
            "mmdebstrap-failed",
            f"{fetched.base.name}: mmdebstrap ended with {code}"
            f"{f' ({broken})' if broken else ''}; its last lines:\n" + "\n".join(log),
            hint="run imagefactory doctor: it shows which tools and settings are missing",
        )
    check_installed(result.installed, fetched.lock)
    return result


@contextmanager
def _scratch(environ: Mapping[str, str], ids: IdMaps) -> Iterator[Path]:
    """Yield a directory for one build, removed at the end. Directories of killed builds are removed first.

    A running build locks its directory. The kernel releases the lock of a killed one.
    """
    parent = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    for old in parent.glob(f"{_SCRATCH}*"):
        try:
            state = old.lstat()  # anyone may put a link here
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid():
                with (old / ".lock").open("r") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(old, ids)
        except (FileNotFoundError, BlockingIOError):  # new, just removed, or in use
            continue
    # It gets its final name once it is locked, and stays locked until it is removed.
    hidden = Path(tempfile.mkdtemp(prefix=f".{_SCRATCH}", dir=parent))
    with (hidden / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        scratch = hidden.rename(parent / hidden.name.removeprefix("."))
        try:
            yield scratch
        finally:
            _remove(scratch, ids)


def _remove(scratch: Path, ids: IdMaps) -> None:
    """Remove a build's directory. Files in its tree belong to the ids of the build, which root may remove."""
    if os.geteuid() != 0 and (scratch / TREE).is_dir() and any((scratch / TREE).iterdir()):
        argv = ("find", "/tmp", "-mindepth", "1", "-delete")  # noqa: S108 - the build's own
        removal = BuildProcess(scratch, argv, environment={"PATH": SYSTEM_PATH}, ids=ids)
        with removal.process:
            removal.process.communicate()
            with contextlib.suppress(ImagefactoryError):
                removal.wait()
    for path in scratch.iterdir():
        if path.name != ".lock":
            with contextlib.suppress(OSError):
                remove_tree(path)
    if [path.name for path in scratch.iterdir()] == [".lock"]:  # else a later build tries again
        remove_tree(scratch)


def _check_clock(scratch: Path, lock: BaseLock) -> None:
    """Raise BuildError if the clock is earlier than the lock's time."""
    if scratch.stat().st_mtime < lock.source_date_epoch:
        raise BuildError(
            "clock-behind",
            f"the clock of this machine is earlier than the lock of {lock.base}: file times would vary",
            hint="set this machine's clock",
        )


# A base and its parent are both built completely, by mmdebstrap with the scripts of all packages, so that
# changes by scripts count too. Times do not count: each base has the time of its own lock.


Fact: TypeAlias = tuple[str, int, int, int, str]
"""The facts of a path: type, mode, owner, group, and the sha256 of a file or the target of a link."""


def read_facts(layout: Layout, layers: tuple[OciLayer, ...], progress: Progress) -> Mapping[str, Fact]:
    """Return the facts of all paths in layers of the store, the lowest layer first.

    Raises StoreError for a corrupt layer.
    """
    facts = _LayerFacts()
    size = sum(layer.descriptor.size for layer in layers)
    with progress.task("what is there below", total=size) as task:
        for layer in layers:
            read_layer(layer, layout.blob_path(layer.descriptor.digest), layout.tmp, facts, task)
    return facts.found


def write_difference(whole: Path, below: Mapping[str, Fact], out: Path) -> BaseTar:
    """Write the changes from `below` to the layer tar `whole`: additions, and whiteouts of removed files."""
    with tarfile.open(whole, mode="r:") as source, out.open("wb") as written:
        members = {member.name: member for member in source}
        facts = {name: _fact(source, member) for name, member in members.items()}
        entries = {name: members[name] for name, fact in facts.items() if below.get(name) != fact}
        gone = below.keys() - facts.keys()
        whiteouts = [name for name in gone if gone.isdisjoint(_parent_directories(name))]
        # With their parent directories, so that owners and modes are known.
        for directory in [
            directory for name in (*entries, *whiteouts) for directory in _parent_directories(name)
        ]:
            if directory in members:
                entries[directory] = members[directory]
        entries |= {member.name: member for member in map(_whiteout, whiteouts)}
        hashed = HashingReader(written)
        with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as layer:
            for name in sorted(entries, key=lambda name: name.split("/")):
                member = entries[name]
                if member.islnk() and member.linkname not in entries:
                    member = _unlinked(member, members[member.linkname])
                    layer.addfile(member, source.extractfile(members[name]))
                else:
                    layer.addfile(
                        member, source.extractfile(member) if member.isreg() and member.size else None
                    )
    return BaseTar(path=out, sha256=hashed.sha256.hexdigest(), size=hashed.size)


def _fact(source: tarfile.TarFile, member: tarfile.TarInfo) -> Fact:
    """Return the facts of an entry. A hard link has those of its target."""
    if member.issym():
        return "link", 0, member.uid, member.gid, member.linkname
    if member.isdir():
        return "folder", member.mode, member.uid, member.gid, ""
    content = source.extractfile(member)
    assert content is not None  # write_layer accepts no other type
    return "file", member.mode, member.uid, member.gid, hashlib.sha256(content.read()).hexdigest()


def _unlinked(link: tarfile.TarInfo, target: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a hard link to a file of another layer as a separate file."""
    member = tarfile.TarInfo(link.name)
    member.mode, member.uid, member.gid, member.mtime, member.size = (
        target.mode,
        target.uid,
        target.gid,
        target.mtime,
        target.size,
    )
    return member


def _whiteout(name: str) -> tarfile.TarInfo:
    directory, slash, last = name.rpartition("/")
    return tarfile.TarInfo(f"{directory}{slash}{WHITEOUT}{last}")


def _parent_directories(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


class _LayerFacts:
    """Collects the entries of layers, the lowest first."""

    def __init__(self) -> None:
        self.found: dict[str, Fact] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, /, *_: object) -> None:
        pass

    def folder(self, parts: tuple[str, ...], member: TarMember) -> None:
        if parts:
            self.found["/".join(parts)] = ("folder", member.mode, member.uid, member.gid, "")

    def file(self, parts: tuple[str, ...], member: TarMember, data: FileData) -> None:
        digest, remaining = hashlib.sha256(), member.size
        while remaining and (piece := data.read(min(CHUNK, remaining))):
            digest.update(piece)
            remaining -= len(piece)
        self.found["/".join(parts)] = ("file", member.mode, member.uid, member.gid, digest.hexdigest())

    def symlink(self, parts: tuple[str, ...], member: TarMember) -> None:
        self.found["/".join(parts)] = ("link", 0, member.uid, member.gid, member.linkname)

    def hard_link(self, parts: tuple[str, ...], target: tuple[str, ...], member: TarMember) -> None:  # noqa: ARG002
        self.found["/".join(parts)] = self.found["/".join(target)]

    def whiteout(self, parts: tuple[str, ...]) -> None:
        self.remove((*parts[:-1], parts[-1].removeprefix(WHITEOUT)))

    def remove(self, parts: tuple[str, ...]) -> None:
        gone = "/".join(parts)
        self.found = {p: fact for p, fact in self.found.items() if p != gone and not p.startswith(f"{gone}/")}
