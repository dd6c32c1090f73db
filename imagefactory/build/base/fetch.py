"""The locked .debs of a base in the cache. Missing ones are fetched, and each is checked by its hash.

The hash in a lock names a file, not its author: a lock comes with a project, and so may a file. So a .deb is
used only if an index signed by Debian's keyring offers it. The cache has a record of that next to the file,
which stays valid when the archive has newer packages. A registry may have the file too (`push
--with-sources`). Then a signature by a key that the user trusts can replace that of the index.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from imagefactory.errors import BuildError, DownloadError, LockError, RegistryError, os_problem
from imagefactory.lock.changes import VersionChange, base_moves
from imagefactory.lock.debian.archive import (
    SNAPSHOT_HINT,
    AptArchive,
    DebianMirror,
    SnapshotArchive,
    StaleIndexError,
    open_archive,
    open_snapshot,
    snapshot_moments,
    solve_base,
)
from imagefactory.lock.debian.lock import deb_filename, downloaded_filename, format_package, lock_architecture
from imagefactory.lock.download import RemoteFile, copy_files
from imagefactory.model import BaseLock, BaseSpec, DebianPackage, LockedPackage
from imagefactory.progress import Progress
from imagefactory.trees import remove_tree


class DebSource(Protocol):
    """A place that has .debs: an archive, a snapshot or a directory."""

    def download(self, packages: Sequence[DebianPackage], directory: Path, progress: Progress) -> None: ...


class DebRegistry(DebSource, Protocol):
    """Registries with .debs, for those that no archive has."""

    def usable(
        self, packages: Sequence[DebianPackage], listed: Collection[DebianPackage], progress: Progress
    ) -> list[DebianPackage]:
        """Return the packages that they have, and that count: `listed` ones are in an index of Debian.

        The others need a signature by a trusted key.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseArchives:
    """All .debs of a base, each with its locked hash, in the order of `lock.packages`.

    `lock` is the requested lock, or a newer one if `moved` is not empty.
    """

    base: BaseSpec
    lock: BaseLock
    debs: tuple[Path, ...]
    moved: tuple[VersionChange, ...]

    @property
    def published(self) -> bool:
        """Whether this is the base of the committed lock, whose digest is the published one."""
        return not self.moved


def fetch_base(
    base: BaseSpec,
    lock: BaseLock,
    mirror: DebianMirror,
    progress: Progress,
    *,
    locked: bool = False,
    registry: DebRegistry | None = None,
) -> BaseArchives:
    """Fetch the locked .debs that the cache lacks: from the archive, from snapshots of it or a registry.

    If none has some of them, the suite's newer packages are solved and fetched instead, and listed in
    `moved`. With `locked` this is a BuildError. Raises DownloadError for a .deb that differs from the lock,
    LockError if the archive's indexes cannot be read and no other place has the packages.
    """
    others = _OtherPlaces(base=base, lock=lock, mirror=mirror, registry=registry)
    with _exclusive(mirror.debs, progress):
        moved: tuple[VersionChange, ...] = ()
        if missing := _missing(lock, mirror.debs):
            if there := [package for package in missing if deb_path(mirror.debs, package).exists()]:
                progress.note(
                    f"{base.name}: {len(there)} packages in the cache have no record of Debian's signature; "
                    "checking the archive's indexes"
                )
            try:
                lock, moved = _fetch_missing(others, progress, locked=locked)
            except (LockError, DownloadError) as error:
                if error.code not in _UNREADABLE or not (mirror.snapshot or registry):
                    raise
                progress.note(f"{base.name}: {error.message}")
                if problem := others.fetch(_missing(lock, mirror.debs), progress):
                    error.message += f"\nand {problem}"
                    raise
        for line in describe_missing_debs(base, moved):
            progress.note(line)
    debs = tuple(deb_path(mirror.debs, package) for package in lock.packages)
    return BaseArchives(base=base, lock=lock, debs=debs, moved=moved)


def cached_base(base: BaseSpec, lock: BaseLock, debs: Path) -> BaseArchives | None:
    """Return the locked .debs in the cache, None if it lacks some."""
    if _missing(lock, debs):
        return None
    paths = tuple(deb_path(debs, package) for package in lock.packages)
    return BaseArchives(base=base, lock=lock, debs=paths, moved=())


_UNREADABLE = ("archive-read-failed", "archive-index-outdated", "download-failed")
"""Errors of an archive after which another place may have the packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherPlaces:
    """The places of locked .debs besides the archive. `listed` are those in a signed index that was read."""

    base: BaseSpec
    lock: BaseLock
    mirror: DebianMirror
    registry: DebRegistry | None
    listed: set[DebianPackage] = field(default_factory=set)

    def fetch(self, packages: Sequence[DebianPackage], progress: Progress) -> str:
        """Fetch packages. Return the problem, empty if all are complete."""
        problem = _fetch_from_snapshots(self, packages, progress)
        if not problem or not self.registry:
            return problem
        missing, debs = _missing(self.lock, self.mirror.debs), self.mirror.debs
        remaining = [package for package in packages if package in missing]
        if self.mirror.snapshot:
            progress.note(f"{self.base.name}: {problem}")
        try:
            usable = self.registry.usable(remaining, self.listed, progress)
            _download(usable, self.registry, debs, progress)
        except (DownloadError, RegistryError) as error:
            return f"{problem}\nand {error.message}"
        lacking = [package for package in remaining if package not in usable]
        if not lacking:
            return ""
        # What a registry lacks, or has unsigned, is in its notes.
        return f"{problem}\nand the registry lacks {_describe(lacking)}" if usable else problem


def _describe(packages: Sequence[DebianPackage]) -> str:
    names = ", ".join(f"{package.name} {package.version}" for package in packages[:5])
    return f"{names} and {len(packages) - 5} more" if len(packages) > 5 else names


def _fetch_missing(
    others: _OtherPlaces, progress: Progress, *, locked: bool
) -> tuple[BaseLock, tuple[VersionChange, ...]]:
    """Fetch missing .debs. Return a newer lock and the changes if only newer packages are available.

    An index that lacks a package, or lists one that the archive does not have, is read again from the
    archive itself, not from a cache. Raises StaleIndexError if the archive still lacks a listed file.
    """
    base, lock, mirror = others.base, others.lock, others.mirror
    for fresh in (False, True):
        missing, moved = _missing(lock, mirror.debs), tuple[VersionChange, ...]()
        with open_archive(mirror, lock.suite, lock_architecture(lock), progress, fresh=fresh) as archive:
            gone = _removed_error(missing, archive)
            others.listed.update(package for package in missing if package not in gone)
            if gone and not fresh:
                progress.note(f"{base.name}: the archive lacks locked packages; reading its indexes again")
                continue
            if gone:
                problem = others.fetch(gone, progress)
                if problem and locked:
                    newer = f"lock newer packages: imagefactory lock base:{base.name} --upgrade"
                    raise BuildError(
                        "packages-withdrawn",
                        f"{base.name}: the archive no longer has {len(gone)} of its locked packages:\n"
                        + "\n".join(_describe_removed(package, mirror.debs) for package in gone)
                        + f"\n{problem}",
                        hint=newer if mirror.snapshot else f"{SNAPSHOT_HINT}; or {newer}",
                    )
                if problem:
                    progress.note(f"{base.name}: {problem}")
                    solved = solve_base(base, archive, lock.content_hash)
                    moved, lock = base_moves(lock, solved), solved
                missing = _missing(lock, mirror.debs)
            try:
                _download(missing, archive, mirror.debs, progress)
            except StaleIndexError:
                if fresh:
                    raise
                progress.note(f"{base.name}: the archive has moved on; reading its indexes again")
                continue
        break
    return lock, moved


def _fetch_from_snapshots(others: _OtherPlaces, packages: Sequence[DebianPackage], progress: Progress) -> str:
    """Fetch packages from snapshots of the lock's time. Return the problem, empty if all are complete."""
    base, lock, mirror = others.base, others.lock, others.mirror
    if not mirror.snapshot:
        return "no snapshots of the archive are set (debian-snapshot)"
    remaining, moments = list(packages), snapshot_moments(lock)
    for moment in moments:
        progress.note(f"{base.name}: fetching {len(remaining)} packages from the snapshot of {moment}")
        try:
            with open_snapshot(mirror, moment, lock.suite, lock_architecture(lock), progress) as snapshot:
                gone = _removed_error(remaining, snapshot)
                others.listed.update(package for package in remaining if package not in gone)
                _download([p for p in remaining if p not in gone], snapshot, mirror.debs, progress)
        except (DownloadError, LockError) as error:
            if error.code == "hash-mismatch":
                raise
            return f"the snapshot of {moment} cannot be used: {error.message}"
        if not (remaining := gone):
            return ""
    return f"the snapshots of {', '.join(moments)} lack {_describe(remaining)}"


def adopt_debs(lock: BaseLock, debs: Path, directory: Path, progress: Progress) -> int:
    """Copy .debs that the cache lacks from `directory`, which has the layout of a cache of .debs.

    The user chose the directory, so its files count as signed if they have the locked hash. Returns the
    number of copies. Raises DownloadError for a file that differs from the lock.
    """
    with _exclusive(debs, progress):
        packages = [package for package in _missing(lock, debs) if deb_path(directory, package).is_file()]
        _download(packages, _DebDirectory(directory), debs, progress)
    return len(packages)


@dataclass(frozen=True, slots=True)
class _DebDirectory:
    """A directory of .debs in the place of an archive."""

    path: Path

    def download(self, packages: Sequence[DebianPackage], directory: Path, progress: Progress) -> None:
        copy_files(
            [
                package_copy(package, deb_path(self.path, package), directory / downloaded_filename(package))
                for package in packages
            ],
            progress,
        )


def package_copy(package: DebianPackage | LockedPackage, source: Path, path: Path) -> RemoteFile:
    """Return the copy of a package from `source` to `path`."""
    return RemoteFile(
        title=f"{package.name} {package.version}",
        url=source.absolute().as_uri(),
        path=path,
        size=package.size,
        sha256=package.sha256,
        denied="",
        gone="",
    )


def describe_missing_debs(base: BaseSpec, moved: Sequence[VersionChange]) -> list[str]:
    """Return lines about the packages that differ from the lock."""
    if not moved:
        return []
    return [
        f"{base.name}: Debian's archive has moved on; {len(moved)} packages are newer than locked, "
        "so the digest of this base and of images on it is not the published one:",
        *(f"  {row}" for row in moved),
    ]


def deb_path(debs: Path, package: DebianPackage) -> Path:
    """Return the path of a package's file in the cache."""
    return debs / package.sha256[:2] / package.sha256 / deb_filename(package)


def verify_deb(path: Path, package: DebianPackage) -> None:
    """Raise DownloadError unless the file at `path` is the locked one."""
    code, size = "size-mismatch", path.stat().st_size
    problem = f"{size} bytes, expected {package.size}" if size != package.size else ""
    if not problem:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest == package.sha256:
            return
        code, problem = "hash-mismatch", f"sha256 {digest}, expected {package.sha256}"
    raise DownloadError(
        code,
        f"{package.name} {package.version}: {path.name} has {problem}",
        hint="run the command again; if it fails again, use another mirror",
    )


def _missing(lock: BaseLock, debs: Path) -> list[DebianPackage]:
    """Return the packages whose file or record is not in the cache.

    A corrupt file counts as missing and is removed.
    """
    return [p for p in lock.packages if not (_is_complete(p, debs) and is_recorded(p, debs))]


def _is_complete(package: DebianPackage, debs: Path) -> bool:
    path = deb_path(debs, package)
    try:
        verify_deb(path, package)
    except FileNotFoundError:
        return False
    except DownloadError:
        path.unlink()
        return False
    return True


def record_path(debs: Path, package: DebianPackage) -> Path:
    """Return the path of a package's record: its lock line, as offered by Debian's signed index."""
    return deb_path(debs, package).with_name("signed")


def is_recorded(package: DebianPackage, debs: Path) -> bool:
    """Return whether this user or root has recorded that a signed index offers exactly this package.

    In a cache where others may write, records by other users are ignored.
    """
    try:
        fd = os.open(record_path(debs, package), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        state = os.fstat(fd)
        owner_only = state.st_uid in (0, os.geteuid()) and not state.st_mode & 0o022
        text = format_package(package).encode()
        return owner_only and stat.S_ISREG(state.st_mode) and file.read(len(text) + 1) == text


def _record(package: DebianPackage, debs: Path) -> None:
    """Write a record, without syncing it to the disk: a partial record is ignored."""
    path = record_path(debs, package)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        file.write(format_package(package))
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _describe_removed(package: DebianPackage, debs: Path) -> str:
    there = " (in the cache, but without a record of Debian's signature)"
    return f"  {package.name} {package.version}{there if deb_path(debs, package).exists() else ''}"


def _removed_error(
    missing: Sequence[DebianPackage], archive: AptArchive | SnapshotArchive
) -> list[DebianPackage]:
    offers = archive.offered([package.name for package in missing])
    gone = []
    for package in missing:
        offer = offers.get((package.name, package.version))
        if offer is None:
            gone.append(package)
        elif offer != package:
            raise DownloadError(
                "hash-mismatch",
                f"{package.name} {package.version}: the archive has sha256 {offer.sha256}, "
                f"expected {package.sha256}",
                hint="use another mirror, or restore the lock from git: a Debian version never changes",
            )
    return gone


def _download(packages: Sequence[DebianPackage], archive: DebSource, debs: Path, progress: Progress) -> None:
    """Fetch packages through a directory that survives a killed process, so that nothing is fetched twice.

    The signed indexes have all of `packages`.
    """
    partial = debs / "partial"
    partial.mkdir(exist_ok=True)
    remaining = [package for package in packages if not _adopt(package, partial, debs)]
    if remaining:
        try:
            archive.download(remaining, partial, progress)
        except DownloadError:
            for package in remaining:  # complete files need not be fetched again
                _adopt(package, partial, debs)
            raise
    for package in remaining:
        path = partial / downloaded_filename(package)
        try:
            verify_deb(path, package)
        except DownloadError:
            path.unlink()
            raise
        _store_deb(path, package, debs)
    remove_tree(partial)


def _adopt(package: DebianPackage, partial: Path, debs: Path) -> bool:
    """Use a file of the cache, or a complete one of an interrupted download. Return whether one exists."""
    if _is_complete(package, debs):
        _record(package, debs)
        return True
    path = partial / downloaded_filename(package)
    try:
        verify_deb(path, package)
    except (FileNotFoundError, DownloadError):
        return False
    _store_deb(path, package, debs)
    return True


def _store_deb(path: Path, package: DebianPackage, debs: Path) -> None:
    final = deb_path(debs, package)
    final.parent.mkdir(parents=True, exist_ok=True)
    path.chmod(0o644)
    path.replace(final)
    _record(package, debs)


@contextmanager
def _exclusive(debs: Path, progress: Progress) -> Iterator[None]:
    """Lock the cache for this process, while others wait. The lock ends with the process."""
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
        raise BuildError(
            *os_problem("write", debs, error), hint="check its free space and permissions"
        ) from error
