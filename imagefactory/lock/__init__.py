"""Locking: from a target to the exact packages of its image, and to their addresses.

files.py reads and writes the files of a lock, changes.py decides when a lock is outdated. pypi/ locks
wheels with uv, conda/ conda packages with py-rattler, debian/ the packages of a base with apt. download.py
fetches locked packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Protocol

from imagefactory.errors import ImagefactoryError, OutdatedPackageRow
from imagefactory.lock.changes import content_hash
from imagefactory.model import BaseSpec, Lock, LockedPackage, LockedWheel, ReleaseCutoff, Target
from imagefactory.progress import Progress


@dataclass(frozen=True, kw_only=True)
class LockRequest:
    """The input of a solver.

    `previous` is the current lock. Its packages are preferred, except those in `update`; with `update_all`
    all may change. `under` is the lock of the parent target, whose packages all stay. `absent` are pins
    (`name==version`) of wheels that are omitted although others require them. No release after `cutoff` is
    locked, except packages of the parent.
    """

    target: Target
    base: BaseSpec
    previous: Lock | None = None
    update: tuple[str, ...] = ()
    update_all: bool = False
    under: Lock | None = None
    absent: tuple[str, ...] = ()
    cutoff: ReleaseCutoff | None = None

    @cached_property
    def content_hash(self) -> str:
        """The content hash of the solution's lock."""
        return content_hash(self.target, self.base, self.under)


def requirements_of(target: Target, source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the target's requirements and constraints for packages of `source`, without conda's Python."""
    if source == target.source:
        return target.requirements, target.constraints
    return (target.pip, ()) if source == "pypi" else ((), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class OutdatedPackage:
    """A package that is locked at an older release than the newest within the recipe's bounds.

    The other fields are the reason. With `named` the recipe names the package and the lock is rejected.
    `accept` is the bound that accepts the old release in the recipe. `build` is the requirement without a
    wheel that could be built, empty for none. `uploaded` is the time of a release that the cutoff excluded
    (`2026-11-26T10:11:12Z`), empty otherwise.
    """

    name: str
    locked: str
    newest: str
    reason: str
    accept: str
    named: bool
    build: str = ""
    uploaded: str = ""

    def as_json(self) -> OutdatedPackageRow:
        return OutdatedPackageRow(
            name=self.name,
            locked=self.locked,
            newest=self.newest,
            reason=self.reason,
            accept=self.accept,
            named=self.named,
            build=self.build,
            uploaded=self.uploaded,
        )

    def __str__(self) -> str:
        return f"{self.name} {self.locked}, where {self.newest} is the newest: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherReport:
    """The verified publishers of wheels by name (`GitHub numpy/numpy release.yml`).

    `attests` is whether the index serves attestations. `problem` is why some could not be checked.
    """

    known: Mapping[str, str]
    attests: bool
    problem: ImagefactoryError | None = None


class Locker(Protocol):
    """The solver of one source of packages."""

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        """Solve the environment of a target. Raises LockError, or ToolError without its solver."""

    def behind(self, request: LockRequest, lock: Lock, progress: Progress) -> tuple[OutdatedPackage, ...]:
        """Return the outdated packages of a solution for `request`. Raises like `lock`."""

    def uploads(self, packages: Sequence[LockedPackage], lock: Lock, target: Target) -> dict[str, datetime]:
        """Return the time of upload of packages of `lock` by file name, where known. Raises LockError."""

    def publishers(self, wheels: Sequence[LockedWheel], lock: Lock, progress: Progress) -> PublisherReport:
        """Return the publishers of wheels of `lock`, where their index attests them (PEP 740).

        Raises LockError for an invalid attestation.
        """

    def addresses(self, lock: Lock) -> dict[str, str]:
        """Return the current URL of each locked file, by file name. Raises LockError for a missing file."""
