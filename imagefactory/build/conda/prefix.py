"""A conda environment in a staging folder: linked there by link.py as it will lie in the image.

    <store>/tmp/conda-XXXX/prefix       the environment; what a kill leaves is collected with the rest of tmp/
    <cache>/conda-pkgs/                 archives unpacked, by py-rattler; anybody may remove it

The linker runs as a process of its own: py-rattler starts threads, and the engine forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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

from imagefactory.build.conda import link
from imagefactory.errors import BuildError, StoreError, ToolError, extra_hint
from imagefactory.fs import Removal, entries_of, explain_full_disk, remove_inside
from imagefactory.model import LockedConda
from imagefactory.progress import Progress, format_bytes
from imagefactory.build import conda_install
from imagefactory.trees import TreeLimits, remove_tree, walk_tree

LAST_WORDS = 1 << 20  # bytes of what the linker says of a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """What to link: archives by package, `groups` of packages (an earlier one keeps claimed paths).

    `shown` is the prefix that files speak of, `scratch` the folder to stage in, `cache` that of archives
    unpacked.
    """

    archives: Mapping[LockedConda, Path]
    groups: Sequence[Sequence[LockedConda]]
    shown: str
    scratch: Path
    cache: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PathClaim:
    """A path that two packages bring: `kept` is whose file is there, `same` whether both are one."""

    path: str
    kept: str
    lost: str
    same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A package whose post-link script is to run."""

    name: str
    version: str
    build_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedPrefix:
    """A linked environment. `lost` are the paths each package gave up, `scripts` in the order to run."""

    folder: Path
    shown: str
    claims: tuple[PathClaim, ...]
    lost: Mapping[str, tuple[str, ...]]
    scripts: tuple[Script, ...]

    def record(self, package: LockedConda) -> Path:
        """The package's record in conda-meta."""
        return self.folder / "conda-meta" / record_name(package)


def record_name(package: LockedConda) -> str:
    """The name of a package's record in conda-meta."""
    return f"{package.name}-{package.version}-{package.build}.json"


@contextmanager
def staged(staging: Staging, progress: Progress) -> Iterator[LinkedPrefix]:
    """The environment, linked; gone at the end.

    Raises BuildError for packages that are damaged or hold what they must not, naming them; ToolError
    without py-rattler.
    """
    if importlib.util.find_spec("rattler") is None:
        raise ToolError("extra-not-installed", "py-rattler is not installed", hint=extra_hint("conda"))
    with explain_full_disk(staging.scratch):
        staging.scratch.mkdir(parents=True, exist_ok=True)
        staging.cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="conda-", dir=staging.scratch))
    try:
        with explain_full_disk(staging.scratch):
            told = _link(staging, folder, progress)
        yield LinkedPrefix(
            folder=folder / "prefix",
            shown=staging.shown,
            claims=tuple(PathClaim(**claim) for claim in told["claims"]),
            lost={name: tuple(paths) for name, paths in told["lost"].items()},
            scripts=tuple(Script(name=n, version=v, build_number=b) for n, v, b in told["scripts"]),
        )
    finally:
        remove_tree(folder)


def _link(staging: Staging, folder: Path, progress: Progress) -> dict[str, Any]:
    archives = folder / "archives"
    archives.mkdir()
    for package, path in staging.archives.items():
        # The name as the linker reads it from the address, where `1!2.0` may be written `1%212.0`.
        (archives / unquote(package.url.rpartition("/")[2])).symlink_to(path)
    command = [sys.executable, "-I", "-m", link.__name__, "--prefix", str(folder / "prefix")]
    command += ["--as", staging.shown, "--packages", str(archives), "--cache", str(staging.cache)]
    command += ["--explicit"]
    for number, group in enumerate(staging.groups):
        explicit = folder / f"explicit-{number}.txt"
        explicit.write_text("".join(f"{one.url}#sha256:{one.sha256}\n" for one in group))
        command.append(str(explicit))
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    with (
        progress.task("linking", total=2 * len(staging.archives), unit="steps") as task,
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            env=kept,
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
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST_WORDS))
            raise _explain(errors.read().decode(errors="replace"), process.returncode, staging)
    told: dict[str, Any] = json.loads(last)
    return told


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _explain(text: str, code: int, staging: Staging) -> BuildError:
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
            hint="free disk space, for example with imagefactory store gc --cache, and run the command again",
        )
    paths = {unquote(package.filename): path for package, path in staging.archives.items()}
    files = " ".join(str(paths[name]) for name in names if name in paths)
    mend = f"if the file is corrupt, delete it and rebuild: rm {files}"
    other = "constrain the package in the recipe to another version or build"
    hints = {"hash": mend, "package": mend, "path": other}
    return BuildError(
        "conda-link-failed",
        message,
        hint=hints.get(kind, "see what the error says; `imagefactory store gc --cache` empties the cache"),
    )


# --- what others unpacked --------------------------------------------------------------------------


def extracted_folder(cache: Path) -> Path:
    """Where py-rattler keeps archives unpacked."""
    return cache / "conda-pkgs"


def forget_extracted(cache: Path, package: LockedConda) -> None:
    """Removes what was unpacked of `package`; the next staging unpacks it anew."""
    stem = record_name(package).removesuffix(".json")
    for path in entries_of(extracted_folder(cache)):
        if path.name.startswith(stem):
            remove_inside(cache, path)


def remove_extracted(cache: Path, removal: Removal) -> None:
    """Removes all that lies there unpacked (`store gc --cache`)."""
    for path in entries_of(extracted_folder(cache)):
        removal.remove(path)


# --- post-link scripts -----------------------------------------------------------------------------

ENTRIES, DEPTH = 2_000_000, 100
"""The most entries of an environment, and its folders inside each other."""
NEW_ENTRIES, NEW_BYTES = 100_000, 16 << 30
"""What scripts may add: entries, and bytes of files."""

Start = Callable[[tuple[str, ...], Mapping[str, str]], "subprocess.Popen[bytes]"]
"""Starts a command in the base with the prefix at its place, writable; output to a pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One path that scripts made, changed or removed, relative to the prefix."""

    path: str
    removed: bool = False


def run_scripts(prefix: LinkedPrefix, start: Start) -> tuple[Change, ...]:
    """Runs the post-link scripts; gives what they changed, sorted by path.

    Raises BuildError, naming the package, when one fails.
    """
    names = ", ".join(script.name for script in prefix.scripts)
    with _readable(names):
        _own_files(prefix.folder)
        before = _listing(prefix.folder, ENTRIES)
    for script in prefix.scripts:
        told = [script.name, script.version, script.build_number]
        environment = conda_install.script_environment(prefix.shown, told)
        process = start(tuple(conda_install.script_command(prefix.shown, script.name)), environment)
        tail, why = conda_install.follow_script(process)
        if why:
            raise BuildError(
                "post-link-failed",
                f"the post-link script of {script.name} {script.version} {why}: {tail}",
                hint="it runs in the base without network; constrain the package to a version without one",
            )
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        (prefix.folder / ".messages.txt").unlink()  # what scripts have to say to a person
    with _readable(names):
        after = _listing(prefix.folder, len(before) + NEW_ENTRIES)
    if odd := sorted(path for path in after if re.search(r"[\x00-\x1f\x7f]|(^|/)\.wh\.", path)):
        raise BuildError(
            "post-link-files-invalid",
            f"the post-link scripts of {names} created {odd[0]!r}, a name that is not valid in an image",
            hint="constrain the package to a version without such a script",
        )
    changed = [Change(path=path) for path in after if before.get(path) != after[path]]
    size = sum((prefix.folder / change.path).lstat().st_size for change in changed)
    if size > NEW_BYTES:  # a hole takes no disk, and would be read to its end
        raise BuildError(
            "post-link-files-invalid",
            f"the post-link scripts of {names} left files of {format_bytes(size)}; "
            f"{format_bytes(NEW_BYTES)} are allowed",
            hint="constrain the package to a version without such a script",
        )
    # What lay in a folder that is gone, or that is something else now, went with it.
    folders = {path for path, state in after.items() if state == _FOLDER} | {""}
    removed = [
        Change(path=path, removed=True)
        for path in before.keys() - after.keys()
        if path.rpartition("/")[0] in folders
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
            f"what the post-link scripts of {names} left cannot be read: {error}",
            hint="constrain the package to a version without such a script",
        ) from error


def _own_files(folder: Path) -> None:
    """Ends the sharing of files with the cache, which scripts would write through."""
    beside = folder.parent / "own"  # outside of it: a package may bring any name, and a link under it
    for inside, state in walk_tree(folder, limits=TreeLimits(entries=ENTRIES, depth=DEPTH)):
        if state.st_nlink > 1 and stat.S_ISREG(state.st_mode):
            shutil.copy2(folder / inside, beside)
            beside.replace(folder / inside)


_FOLDER = ("folder",)


def _listing(folder: Path, entries: int) -> dict[str, tuple[object, ...]]:
    listing: dict[str, tuple[object, ...]] = {}
    for inside, state in walk_tree(folder, limits=TreeLimits(entries=entries, depth=DEPTH)):
        if stat.S_ISDIR(state.st_mode):
            listing[inside] = _FOLDER
        else:
            times = (state.st_mtime_ns, state.st_ctime_ns)
            listing[inside] = (state.st_ino, state.st_mode, state.st_size, *times)
    return listing
