"""The request to uv: the wheels to solve, their parent, and the wheels that may change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from packaging.utils import canonicalize_name

from imagefactory.errors import LockError
from imagefactory.lock import LockRequest
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.model import Lock, LockedWheel, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelRequest:
    """The wheels to solve for the Python and platform of `lock`, which has no packages yet.

    The versions and files of `previous` are preferred, except those in `update`; with `update_all` only
    files are. `fixed` are in the solution unchanged. `given` are pins (`numpy==1.26.4+given`) of packages
    from the parent or conda: uv finds them as wheels in the directory `stubs`, and they are not in the
    solution. Neither are the names in `exclude`. `sources` are directories and repositories of the recipe
    without a wheel. In `sdists` uv finds wheels that replace packages to build.
    """

    lock: Lock
    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    previous: Lock | None = None
    update: tuple[str, ...] = ()
    update_all: bool = False
    fixed: tuple[LockedWheel, ...] = ()
    given: tuple[str, ...] = ()
    stubs: Path | None = None
    sources: tuple[str, ...] = ()
    sdists: Path | None = None
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedVersions:
    """uv's solution. `lines` are `name==version`.

    `lacking` are requested extras (package, extra) that the package does not have. `via` are the packages
    that require each one.
    """

    lines: tuple[str, ...]
    lacking: tuple[tuple[str, str], ...] = ()
    via: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def versions(self) -> dict[str, str]:
        """The versions by normalized name."""
        pairs = (line.partition("==") for line in self.lines)
        return {canonicalize_name(name): version for name, _, version in pairs}


class QuestionSolver(Protocol):
    """A solver of requests."""

    def solve(self, question: WheelRequest) -> PinnedVersions:
        """Return a solution. Raises LockError."""


class WheelSolver(QuestionSolver, Protocol):
    """uv, with the files of its index. Each method raises LockError."""

    @property
    def root(self) -> Path:
        """The directory for relative paths of a request."""

    def requirers(self, question: WheelRequest, wheels: Sequence[LockedWheel]) -> dict[str, tuple[str, ...]]:
        """Return the packages that require each package of a solution."""

    def project(self, name: str, lock: Lock) -> tuple[IndexFile, ...]:
        """Return the files of a project, none if the index does not list them."""

    def listed(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, tuple[IndexFile, ...]]:
        """Return the files on the page of each wheel's project."""

    def source(self, file: IndexFile, directory: Path) -> Path:
        """Return a source distribution, in the cache or in `directory`. Raises DownloadError."""

    def metadata(self, pin: str, lock: Lock) -> str:
        """Return METADATA of a release."""

    def required(
        self, wheels: Sequence[LockedWheel], listed: Mapping[LockedWheel, Sequence[IndexFile]], lock: Lock
    ) -> dict[str, tuple[str, ...]]:
        """Return Requires-Dist of each wheel by its name, if the index has it."""


def versions_of(wheels: Iterable[LockedWheel]) -> dict[str, str]:
    """Return the version of each wheel by its name."""
    return {wheel.name: wheel.version for wheel in wheels}


def origins_of(target: Target, under: Lock | None) -> tuple[tuple[str, str], ...]:
    """Return the origins of a target's wheels. Wheels of the parent keep the parent's origins."""
    if under is None:
        return target.origins
    below = {wheel.name for wheel in under.wheels}
    own_origins = (pair for pair in target.origins if pair[0] not in below)
    return tuple(sorted((*own_origins, *under.origins)))


def check_exclude(request: LockRequest) -> tuple[str, ...]:
    """Return the names to exclude. Raises LockError for a package of the parent."""
    target, under = request.target, request.under
    for wheel in under.wheels if under else ():
        if wheel.name in target.exclude:
            raise LockError(
                "package-from-parent",
                f"{target.name} excludes '{wheel.name}' of {target.on}, on which it is built",
                hint=f"move exclude: [{wheel.name}] to the recipe of {target.on}",
            )
    return target.exclude


def check_update_names(request: LockRequest) -> tuple[str, ...]:
    """Return the normalized names to update. Raises LockError for a name that cannot change."""
    target, under = request.target, request.under
    names = [wheel.name for wheel in request.previous.wheels] if request.previous else []
    below = {wheel.name for wheel in under.wheels} if under else frozenset()
    update = tuple(sorted({canonicalize_name(name) for name in request.update}))
    for name in update:
        if name in below and under:
            raise LockError(
                "package-from-parent",
                f"{target.name} is built on {under.target}, which has the package '{name}'",
                hint=f"run imagefactory lock {under.target} --upgrade-package {name}",
            )
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            problem = "has no lock yet" if request.previous is None else f"has no package '{name}'"
            raise LockError(
                "update-package-unknown",
                f"cannot upgrade '{name}': {target.name} {problem}",
                hint=f"did you mean '{near[0]}'?" if near else f"imagefactory lock {target.name}",
            )
    return update
