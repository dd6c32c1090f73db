"""Wheels in the project itself: their locked values, and whether the files have changed."""

from __future__ import annotations

import hashlib
import zipfile
from functools import lru_cache
from pathlib import Path

from packaging.metadata import parse_email
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from imagefactory.errors import LockError, os_problem
from imagefactory.lock.pypi.requirements import from_files, misfit
from imagefactory.model import Lock, LockedWheel, OwnFile

_MOST = 1 << 24  # bytes of METADATA


def local_wheels(lock: Lock, root: Path) -> tuple[LockedWheel, ...]:
    """Return the wheels of `lock.origins` below `root`, as they are now.

    Raises LockError for a wheel that is missing, invalid, differs from its name, or does not fit the lock's
    Python and platform.
    """
    return tuple(_read(lock, root, path) for path in from_files(lock.origins).values())


def changed_wheel(lock: Lock, root: Path) -> str:
    """Return how a wheel below `root` differs from the lock, empty if none differs."""
    paths = from_files(lock.origins)
    for wheel in lock.wheels:
        if path := paths.get(wheel.name):
            file = root / path
            if not file.is_file():
                return f"{path} is not there any more"
            if not file.resolve().is_relative_to(root.resolve()):
                return f"{path} is a link out of {root}"
            if digest(file) != wheel.sha256:
                return f"{path} has changed since"
    return ""


def local_files(lock: Lock, root: Path) -> tuple[OwnFile, ...]:
    """Return the wheels below `root` by their file names."""
    paths = from_files(lock.origins)
    return tuple(
        OwnFile(
            path=wheel.filename,
            source=root / paths[wheel.name],
            sha256=wheel.sha256,
            size=wheel.size,
            executable=False,
        )
        for wheel in lock.wheels
        if wheel.name in paths
    )


def digest(file: Path) -> str:
    """Return the sha256 of a file, read once per process while it does not change."""
    state = file.stat()
    return _digest(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _digest(file: Path, _changed: int, _size: int) -> str:
    with file.open("rb") as file_handle:
        return hashlib.file_digest(file_handle, "sha256").hexdigest()


def _read(lock: Lock, root: Path, path: str) -> LockedWheel:
    file = root / path
    hint = f"copy the wheel to {file}, or change its path in the recipe of {lock.target}"
    if not file.is_file():
        raise LockError("local-wheel-missing", f"{lock.target}: the wheel {path} is not in {root}", hint=hint)
    if not file.resolve().is_relative_to(root.resolve()):
        raise LockError(
            "local-wheel-outside",
            f"{lock.target}: {path} is a link to outside {root}",
            hint="replace the link by the wheel",
        )
    name, version, *_ = parse_wheel_filename(file.name)
    try:
        wheel = LockedWheel(
            name=name, version=str(version), filename=file.name, sha256=digest(file), size=file.stat().st_size
        )
        metadata = wheel_metadata(file)
    except OSError as error:
        raise LockError(*os_problem("read", f"{path} of {lock.target}", error), hint=hint) from error
    if metadata != (name, version):
        problem = (
            f"found {metadata[0]} {metadata[1]}"
            if metadata
            else "it is corrupt, or was not built by a build tool"
        )
        raise LockError(
            "local-wheel-invalid",
            f"{lock.target}: {path} is not a wheel of {name} {version}: {problem}",
            hint="build the wheel again (pip wheel --no-deps, python -m build) and do not rename it",
        )
    if fault := misfit(wheel, lock.python, lock.platform):
        raise LockError(
            "local-wheel-incompatible",
            f"{lock.target}: {fault}",
            hint="build the wheel for this Python and platform, for example in an image on the same base",
        )
    return wheel


def wheel_metadata(file: Path) -> tuple[str, Version] | None:
    """Return the name and version in a wheel's own metadata, None for none."""
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.count("/") == 1 and entry.filename.endswith(".dist-info/METADATA"):
                    with archive.open(entry) as file_handle:
                        raw, _ = parse_email(file_handle.read(_MOST))
                    return canonicalize_name(raw["name"]), Version(raw["version"])
    except (zipfile.BadZipFile, NotImplementedError, KeyError, InvalidVersion):
        pass
    return None
