"""A conda environment in a staging directory, linked by link.py with the paths of the image.

    <store>/tmp/conda-XXXX/prefix       the environment; after a kill it is deleted with the rest of tmp/
    <cache>/conda-pkgs/                 archives unpacked by py-rattler; can be deleted at any time

The linker runs as a separate process, because py-rattler starts threads and the engine forks.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from imagefactory.build import conda_install
from imagefactory.build.conda import link
from imagefactory.build.conda_install import source_of
from imagefactory.build.wheel_layer import (
    TEXT,
    BytecodeCompiler,
    InstalledFile,
    InstallPrefix,
    PackageMismatchError,
)
from imagefactory.errors import BuildError, StoreError, ToolError, extra_hint, os_reason
from imagefactory.fs import Removal, entries_of, explain_full_disk, remove_inside
from imagefactory.model import LockedCondaPackage
from imagefactory.oci.layers import TarSegment
from imagefactory.progress import Progress, format_bytes
from imagefactory.trees import TreeLimits, open_file, read_chunks, read_file, remove_tree, walk_tree

OUTPUT_TAIL_BYTES = 1 << 20  # bytes of the linker's messages about a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """The packages to link: archives by package, and `groups` (an earlier group keeps claimed paths).

    `shown` is the prefix written into files, `scratch` the staging directory, `cache` that of unpacked
    archives.
    """

    archives: Mapping[LockedCondaPackage, Path]
    groups: Sequence[Sequence[LockedCondaPackage]]
    shown: str
    scratch: Path
    cache: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PathClaim:
    """A path that two packages have. `kept` is the owner, `same` whether both contents are equal."""

    path: str
    kept: str
    lost: str
    same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PostLinkScript:
    """A package with a post-link script to run."""

    name: str
    version: str
    build_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedPrefix:
    """A linked environment. `lost` are the paths that each package lost, `scripts` in the order to run."""

    folder: Path
    shown: str
    claims: tuple[PathClaim, ...]
    lost: Mapping[str, tuple[str, ...]]
    scripts: tuple[PostLinkScript, ...]

    def record(self, package: LockedCondaPackage) -> Path:
        """Return the package's record in conda-meta."""
        return self.folder / "conda-meta" / record_name(package)


def record_name(package: LockedCondaPackage) -> str:
    """Return the name of a package's record in conda-meta."""
    return f"{package.name}-{package.version}-{package.build}.json"


@contextmanager
def staging_directory(staging: LinkPlan, progress: Progress) -> Iterator[LinkedPrefix]:
    """Yield the linked environment, which is removed at the end.

    Raises BuildError with the names of corrupt or rejected packages, ToolError without py-rattler.
    """
    if importlib.util.find_spec("rattler") is None:
        raise ToolError("extra-not-installed", "py-rattler is not installed", hint=extra_hint("conda"))
    with explain_full_disk(staging.scratch):
        staging.scratch.mkdir(parents=True, exist_ok=True)
        staging.cache.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="conda-", dir=staging.scratch))
    try:
        with explain_full_disk(staging.scratch):
            result = _link(staging, directory, progress)
        yield LinkedPrefix(
            folder=directory / "prefix",
            shown=staging.shown,
            claims=tuple(PathClaim(**claim) for claim in result["claims"]),
            lost={name: tuple(paths) for name, paths in result["lost"].items()},
            scripts=tuple(PostLinkScript(name=n, version=v, build_number=b) for n, v, b in result["scripts"]),
        )
    finally:
        remove_tree(directory)


def _link(staging: LinkPlan, directory: Path, progress: Progress) -> dict[str, Any]:
    archives = directory / "archives"
    archives.mkdir()
    for package, path in staging.archives.items():
        # The name as the linker reads it from the address, where `1!2.0` may be written `1%212.0`.
        (archives / unquote(package.url.rpartition("/")[2])).symlink_to(path)
    command = [sys.executable, "-I", "-m", link.__name__, "--prefix", str(directory / "prefix")]
    command += ["--as", staging.shown, "--packages", str(archives), "--cache", str(staging.cache)]
    command += ["--explicit"]
    for number, group in enumerate(staging.groups):
        explicit = directory / f"explicit-{number}.txt"
        explicit.write_text("".join(f"{package.url}#sha256:{package.sha256}\n" for package in group))
        command.append(str(explicit))
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    with (
        progress.task("linking", total=2 * len(staging.archives), unit="steps") as task,
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=_die_with_parent,
        ) as process,
    ):
        last = b""
        try:
            for last in process.stdout or ():
                if last == b"+\n":
                    task.advance(1)
            process.wait()
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - OUTPUT_TAIL_BYTES))
            raise _explain(errors.read().decode(errors="replace"), process.returncode, staging)
    result: dict[str, Any] = json.loads(last)
    return result


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _explain(text: str, code: int, staging: LinkPlan) -> BuildError:
    last = text.strip().rpartition("\n")[2]
    try:
        failure = json.loads(last)
        kind, message, names = str(failure["error"]), str(failure["message"]), list(failure["packages"])
    except (ValueError, KeyError, TypeError):
        kind, message, names = "", f"py-rattler ended with {code}: {text[-2000:].strip()}", []
    if "os error 28" in message or "No space left" in message:
        return StoreError(
            "disk-full",
            f"no space left in {staging.scratch} or {staging.cache}",
            hint="free disk space, for example with imagefactory image prune --cache, and run the command "
            "again",
        )
    paths = {unquote(package.filename): path for package, path in staging.archives.items()}
    files = " ".join(str(paths[name]) for name in names if name in paths)
    mend = f"if the file is corrupt, delete it and rebuild: rm {files}"
    other = "constrain the package in the recipe to another version or build"
    hints = {"hash": mend, "package": mend, "path": other}
    return BuildError(
        "conda-link-failed",
        message,
        hint=hints.get(kind, "empty the cache (imagefactory image prune --cache) and build again"),
    )


def extracted_directory(cache: Path) -> Path:
    """Return the directory of archives unpacked by py-rattler."""
    return cache / "conda-pkgs"


def remove_from_extracted(cache: Path, package: LockedCondaPackage) -> None:
    """Remove the unpacked `package`; the next staging unpacks it again."""
    stem = record_name(package).removesuffix(".json")
    for path in entries_of(extracted_directory(cache)):
        if path.name.startswith(stem):
            remove_inside(cache, path)


def remove_extracted(cache: Path, removal: Removal) -> None:
    """Remove all unpacked archives (`image prune --cache`)."""
    for path in entries_of(extracted_directory(cache)):
        removal.remove(path)


ENTRIES, DEPTH = 2_000_000, 100
"""The most entries of an environment, and the depth of its directories."""
NEW_ENTRIES, NEW_BYTES = 100_000, 16 << 30
"""The most entries, and bytes of files, that scripts may add."""

Start = Callable[[tuple[str, ...], Mapping[str, str]], "subprocess.Popen[bytes]"]
"""A function that starts a command in the base, with the prefix writable and output to a pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathChange:
    """One path that scripts created, changed or removed, relative to the prefix."""

    path: str
    removed: bool = False


def run_scripts(prefix: LinkedPrefix, start: Start) -> tuple[PathChange, ...]:
    """Run the post-link scripts; return their changes, sorted by path.

    Raises BuildError, naming the package, if one fails.
    """
    names = ", ".join(script.name for script in prefix.scripts)
    with _readable(names):
        _own_files(prefix.folder)
        before = _listing(prefix.folder, ENTRIES)
    for script in prefix.scripts:
        facts = [script.name, script.version, script.build_number]
        environment = conda_install.script_environment(prefix.shown, facts)
        process = start(tuple(conda_install.script_command(prefix.shown, script.name)), environment)
        tail, reason = conda_install.follow_script(process)
        if reason:
            raise BuildError(
                "post-link-failed",
                f"the post-link script of {script.name} {script.version} {reason}: {tail}",
                hint="constrain the package to a version without such a script: it runs without a network",
            )
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        (prefix.folder / ".messages.txt").unlink()  # messages of scripts for people
    with _readable(names):
        after = _listing(prefix.folder, len(before) + NEW_ENTRIES)
    if odd := sorted(path for path in after if re.search(r"[\x00-\x1f\x7f]|(^|/)\.wh\.", path)):
        raise BuildError(
            "post-link-files-invalid",
            f"the post-link scripts of {names} created {odd[0]!r}, a name that is not valid in an image",
            hint="constrain the package to a version without such a script",
        )
    changed = [PathChange(path=path) for path in after if before.get(path) != after[path]]
    size = sum((prefix.folder / change.path).lstat().st_size for change in changed)
    if size > NEW_BYTES:  # a hole uses no disk, but would be read to its end
        raise BuildError(
            "post-link-files-invalid",
            f"the post-link scripts of {names} created files of {format_bytes(size)}, "
            f"more than {format_bytes(NEW_BYTES)}",
            hint="constrain the package to a version without such a script",
        )
    # Files in a removed or replaced directory are gone with it.
    directories = {path for path, state in after.items() if state == _DIRECTORY} | {""}
    removed = [
        PathChange(path=path, removed=True)
        for path in before.keys() - after.keys()
        if path.rpartition("/")[0] in directories
    ]
    return tuple(sorted((*changed, *removed), key=lambda change: change.path))


@contextmanager
def _readable(names: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BuildError(
            "post-link-files-invalid",
            f"cannot read the files that the post-link scripts of {names} created: {error}",
            hint="constrain the package to a version without such a script",
        ) from error


def _own_files(directory: Path) -> None:
    """Copy files that are shared with the cache, because scripts would write through the link."""
    beside = directory.parent / "own"  # outside of it: a package may have any name, and a link there
    for inside, state in walk_tree(directory, limits=TreeLimits(entries=ENTRIES, depth=DEPTH)):
        if state.st_nlink > 1 and stat.S_ISREG(state.st_mode):
            shutil.copy2(directory / inside, beside)
            beside.replace(directory / inside)


_DIRECTORY = ("folder",)


def _listing(directory: Path, entries: int) -> dict[str, tuple[object, ...]]:
    listing: dict[str, tuple[object, ...]] = {}
    for inside, state in walk_tree(directory, limits=TreeLimits(entries=entries, depth=DEPTH)):
        if stat.S_ISDIR(state.st_mode):
            listing[inside] = _DIRECTORY
        else:
            times = (state.st_mtime_ns, state.st_ctime_ns)
            listing[inside] = (state.st_ino, state.st_mode, state.st_size, *times)
    return listing


# A package's record in conda-meta lists its files. Their bytes are checked against it while they are read, so
# files that were unpacked earlier and have changed since are not trusted.


RECORD = 1 << 28  # bytes; a package of 100,000 files has a tenth of that


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaRecord:
    """A package's record. `rows` are those of paths_data, `data` is the complete record."""

    name: str
    path: Path
    data: bytes
    rows: tuple[dict[str, Any], ...]

    def sources(self, install_prefix: InstallPrefix) -> tuple[str, ...]:
        """Return the paths to compile to byte code."""
        return tuple(row["_path"] for row in self.rows if is_source(row["_path"], install_prefix))


def read_record(path: Path) -> CondaRecord:
    """Return a record. Raises BuildError for a missing or malformed one."""
    try:
        data = read_file(path.parent, path.name, RECORD)
        value = json.loads(data)
        return CondaRecord(name=value["name"], path=path, data=data, rows=tuple(value["paths_data"]["paths"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(
            "conda-record-invalid",
            f"{path.name} is not a valid conda record: {error}",
            hint="constrain the package in the recipe to another version or build",
        ) from error


def is_source(path: str, install_prefix: InstallPrefix) -> bool:
    """Return whether a package's file is compiled: Python files outside of directories named `tests`."""
    parts = path.split("/")
    return (
        parts[:2] == ["lib", f"python{install_prefix.python}"]
        and path.endswith(".py")
        and "tests" not in parts
    )


def lay_package(
    record: Path,
    install_prefix: InstallPrefix,
    segment: TarSegment,
    compiler: BytecodeCompiler,
    *,
    report: Callable[[int], None],
) -> tuple[InstalledFile, ...]:
    """Write a linked package below `install_prefix` into `segment`, its .pyc files last. Return its files.

    `record` is its file in the prefix's conda-meta. `report` is called with the number of bytes read. Raises
    PackageMismatchError.
    """
    package, root = read_record(record), record.parents[1]
    top = install_prefix.prefix.lstrip("/")
    laid = []
    for row in package.rows:
        path, source = f"{top}/{row['_path']}", root / row["_path"]
        content = lay_path(source, path, segment, expected=_expected(row), owner=record.name, report=report)
        if content:
            laid.append(InstalledFile(path=path, content=content))
    path = f"{top}/conda-meta/{record.name}"
    segment.file(path, [package.data], size=len(package.data), executable=False)
    laid.append(InstalledFile(path=path, content=_content(hashlib.sha256(package.data).digest())))
    for inside in package.sources(install_prefix):
        _compile(root, inside, install_prefix, segment, compiler)
    return tuple(laid)


def _compile(
    root: Path, inside: str, install_prefix: InstallPrefix, segment: TarSegment, compiler: BytecodeCompiler
) -> None:
    """Write the byte code of one source, which must not be a link."""
    top, source = install_prefix.prefix.lstrip("/"), root / inside
    if source.is_symlink():
        return
    try:
        data = read_file(source.parent, source.name, TEXT)
    except OSError as error:
        raise BuildError(
            "bytecode-failed",
            f"cannot compile /{top}/{inside}: {os_reason(error)}",
            hint="check the free space of the store, and build again",
        ) from error
    pyc = compiler.compile(f"/{top}/{inside}", data)
    if pyc is not None:
        directory, _, name = inside.rpartition("/")
        tag = "cpython-" + install_prefix.python.replace(".", "")
        cached = f"{top}/{directory}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
        segment.file(cached, [pyc], size=len(pyc), executable=False)


def _expected(row: dict[str, Any]) -> str:
    return str(row.get("sha256_in_prefix") or row.get("sha256") or "")


def lay_path(
    source: Path,
    path: str,
    segment: TarSegment,
    *,
    expected: str = "",
    owner: str = "",
    report: Callable[[int], None] = lambda _: None,
) -> str:
    """Write the file at `source` as `path`. Return its content hash for conflicts, empty for a directory."""
    try:
        state = source.lstat()
    except OSError as error:
        raise _altered(owner, f"{path} is missing") from error
    if stat.S_ISLNK(state.st_mode):
        target = str(source.readlink())
        segment.link(path, target)
        return f"link={target}"
    if stat.S_ISDIR(state.st_mode):
        segment.folder(path)
        return ""
    if not stat.S_ISREG(state.st_mode):
        raise BuildError(
            "file-type-unsupported",
            f"/{path} is not a file, link or directory",
            hint="constrain the package with this file to another version",
        )
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        with open_file(source.parent, source.name, state.st_size) as fd:
            for data in read_chunks(fd, path, state.st_size):
                digest.update(data)
                report(len(data))
                yield data

    segment.file(path, chunks(), size=state.st_size, executable=bool(state.st_mode & stat.S_IXUSR))
    if expected and digest.hexdigest() != expected:
        raise _altered(owner, f"{path} has sha256 {digest.hexdigest()}, its package says {expected}")
    return _content(digest.digest())


def _altered(owner: str, message: str) -> PackageMismatchError:
    error = PackageMismatchError(
        "package-altered",
        f"{owner.removesuffix('.json')}: /{message}",
        hint="constrain the package in the recipe to another version or build",
    )
    error.name = owner
    return error


def _content(digest: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def lay_changes(
    prefix: Path,
    changes: Sequence[PathChange],
    install_prefix: InstallPrefix,
    segment: TarSegment,
    compiler: BytecodeCompiler,
) -> tuple[InstalledFile, ...]:
    """Write the changes by post-link scripts. Removed files become OCI whiteouts.

    Byte code of changed sources is compiled again, because the packages' layers are used unchecked. Byte
    code that scripts compiled from existing sources is skipped.
    """
    top, laid = install_prefix.prefix.lstrip("/"), []
    for change in changes:
        source = source_of(change.path)
        if source and (prefix / source).is_file():
            continue
        path = f"{top}/{change.path}"
        if change.removed:
            directory, _, name = path.rpartition("/")
            segment.file(f"{directory}/.wh.{name}", [], size=0, executable=False)
            laid.append(
                InstalledFile(path=path, content="removed")
            )  # wheels' files may not be removed either
            continue
        content = lay_path(prefix / change.path, path, segment)
        if content:
            laid.append(InstalledFile(path=path, content=content))
    for change in changes:
        if not change.removed and is_source(change.path, install_prefix) and (prefix / change.path).is_file():
            _compile(prefix, change.path, install_prefix, segment, compiler)
    return tuple(laid)
