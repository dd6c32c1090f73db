"""Read locks, and check whether they fulfill the recipes. Solves and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from imagefactory.access import Access
from imagefactory.errors import ImagefactoryError, LockError, NothingSelectedError, StaleError, StatementError
from imagefactory.lock import OutdatedPackage
from imagefactory.lock.changes import content_hash
from imagefactory.lock.debian.lock import base_content_hash, read_base_lock
from imagefactory.lock.files import (
    CONDA,
    UNSOLVABLE,
    WHEELS,
    UnsolvableTarget,
    check_facts,
    check_unchanged_packages,
    lock_digest,
    lock_names,
    lock_path,
    read_lock,
    read_unsolvable,
)
from imagefactory.lock.layers import LAYERS
from imagefactory.lock.pypi.requirements import changed_wheel
from imagefactory.model import BaseLock, BaseSpec, Lock, Outcome, Target
from imagefactory.project import Project
from imagefactory.serialize import parse_value

TO_BUILD = "to build"
"""The lock state of a target whose recipe has sources without a wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedBase:
    """A base and its committed lock.

    `flaw` is the error of an unreadable lock, `content_hash` the required hash.
    """

    base: BaseSpec
    parent: LockedBase | None
    lock: BaseLock | None
    content_hash: str
    flaw: LockError | None

    @property
    def state(self) -> str:
        """`ok`, `stale`, `none` or `malformed`. A pulled base is locked by its digest."""
        if self.base.image:
            return "ok"
        if self.lock is None:
            return "malformed" if self.flaw else "none"
        return "ok" if self.lock.content_hash == self.content_hash else "stale"

    @property
    def locks(self) -> tuple[BaseLock, ...]:
        """The locks from the lowest parent to this base, none if a lock is missing or the base is pulled.

        Raises LockError for a malformed lock.
        """
        if self.flaw:
            raise self.flaw
        parents = self.parent.locks if self.parent else ()
        return () if self.lock is None or (self.parent and not parents) else (*parents, self.lock)

    def require(self, path: Path) -> BaseLock:
        """Return the current lock. Raises LockError without one, StaleError for an outdated one."""
        hint = f"run imagefactory lock base:{self.base.name}"
        if self.flaw:
            raise self.flaw
        if self.lock is None:
            raise LockError("lock-missing", f"base {self.base.name} has no lock ({path})", hint=hint)
        if self.base.on and self.state != "ok":
            message = f"the recipe or the lock of base {self.base.on} has changed"
            raise StaleError("lock-outdated", f"{path} is outdated: {message}", hint=hint)
        return self.lock


def locked_base(project: Project, base: BaseSpec) -> LockedBase:
    """Read a base's lock and those of its parents."""
    below = project.base_below(base)
    parent = locked_base(project, below) if below else None
    lock, flaw = None, None
    try:
        lock = None if base.image else read_base_lock(project.base_lock_path(base))
    except LockError as error:
        flaw = error
    required = "" if base.image else base_content_hash(base, parent.lock if parent else None)
    return LockedBase(base=base, parent=parent, lock=lock, content_hash=required, flaw=flaw)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedTarget:
    """A target with all inputs of its packages, and its committed lock.

    `content_hash` is the required hash, empty if the parent is not locked. `flaw` is the error of a lock
    with that hash: malformed, changed manually, or with a changed local wheel.
    """

    target: Target
    base: LockedBase
    parent: LockedTarget | None
    lock: Lock | None
    content_hash: str
    flaw: ImagefactoryError | None
    unsolvable: UnsolvableTarget | None

    @property
    def parents(self) -> tuple[LockedTarget, ...]:
        """The targets that this target is built on, the lowest first."""
        return (*self.parent.parents, self.parent) if self.parent else ()

    @property
    def current(self) -> bool:
        """Whether locking the target now would not change the lock."""
        return self.lock is not None and self.lock.content_hash == self.content_hash and not self.flaw

    @property
    def state(self) -> str:
        """`ok`, `stale`, `none`, `malformed`, `unsolvable` or TO_BUILD, for tables."""
        if self.target.sources:
            return TO_BUILD
        if self.flaw:
            return "stale" if isinstance(self.flaw, StaleError) else "malformed"
        if self.current:
            return self.base.state if self.base.base.on else "ok"
        if self.unsolvable:
            return Outcome.UNSOLVABLE.value
        return "none" if self.lock is None else "stale"

    def problem(self, directory: Path) -> ImagefactoryError | None:
        """Return the reason why the target cannot be built, None if its lock is current."""
        name, hint = self.target.name, f"run imagefactory lock {self.target.name}"
        if self.target.sources:
            sources = ", ".join(self.target.sources)
            return StaleError(
                "source-not-built", f"{name} has sources without a wheel: {sources}", hint=f"{hint} --build"
            )
        if self.flaw or self.current:
            return self.flaw
        if self.parent and (problem := self.parent.problem(directory)):
            return problem
        if self.unsolvable:
            reason, fix = self.unsolvable.reason, self.unsolvable.hint or f"{hint} --explain"
            return LockError("target-unsolvable", f"{name} is unsolvable: {reason}", hint=fix)
        if self.lock is None:
            path = lock_path(directory, self.target)
            return LockError("lock-missing", f"{name} has no lock ({path})", hint=hint)
        message = f"the recipe or the lock of {self.target.on}" if self.target.on else "the recipe"
        return StaleError(
            "lock-outdated", f"the lock of {name} is outdated: {message} has changed", hint=hint
        )

    def require(self, directory: Path) -> Lock:
        """Return the current lock, or raise `problem`."""
        if problem := self.problem(directory):
            raise problem
        assert self.lock is not None
        return self.lock


def locked_target(project: Project, target: Target) -> LockedTarget:
    """Read the locks of a target, its parents and its base, each once."""
    directory, below = project.lock_folder, project.target_below(target)
    base, parent = project.base_of(target), locked_target(project, below) if below else None
    under = parent.lock if parent else None
    required = ""
    if parent is None or parent.problem(directory) is None:
        required = content_hash(target, base, under)
    lock, unsolvable = None, None
    flaw: ImagefactoryError | None = None
    try:
        lock = read_lock(directory, target)
        if lock and lock.content_hash == required:
            check_facts(lock, target)
            check_unchanged_packages(lock, under)
            if changed := changed_wheel(lock, project.settings.root_path):
                hint = f"run imagefactory lock {target.name}"
                problem = f"the lock of {target.name} is outdated: {changed}"
                flaw = StaleError("lock-outdated", problem, hint=hint)
    except LockError as error:
        flaw = error
    try:
        record = read_unsolvable(directory, target)
        unsolvable = record if record and record.content_hash == required else None
    except LockError:
        pass  # locking writes the record again
    return LockedTarget(
        target=target,
        base=locked_base(project, base),
        parent=parent,
        lock=lock,
        content_hash=required,
        flaw=flaw,
        unsolvable=unsolvable,
    )


def require_locked(project: Project, target: Target) -> LockedTarget:
    """Return a target whose lock is current.

    Raises LockError if there is no lock, or it lacks the target's framework or CUDA. Raises StaleError if
    the recipe or the lock of the parent has changed, and for sources without a wheel.
    """
    locked = locked_target(project, target)
    locked.require(project.lock_folder)
    return locked


def require_lock(project: Project, target: Target) -> Lock:
    """Return the current lock of a target. Raises like `require_locked`."""
    return locked_target(project, target).require(project.lock_folder)


def read_target_lock(project: Project, target: Target) -> Lock | None:
    """Return the committed lock of a target, or None. Raises LockError if it is malformed."""
    return read_lock(project.lock_folder, target)


def lock_state(project: Project, target: Target) -> str:
    """Return the state of a target's lock, for tables."""
    return locked_target(project, target).state


def read_unsolvable_reason(project: Project, target: Target) -> UnsolvableTarget | None:
    """Return the reason why the target has no solution, from the record of its last lock; None if unknown.

    Malformed records and records of another recipe are ignored.
    """
    return locked_target(project, target).unsolvable


def base_state(project: Project, base: BaseSpec) -> str:
    """Return the state of a base's lock, for tables."""
    return locked_base(project, base).state


def base_locks(project: Project, base: BaseSpec) -> tuple[BaseLock, ...]:
    """Return the locks from the lowest parent to `base`, as `LockedBase.locks` does."""
    return locked_base(project, base).locks


def orphans(project: Project) -> tuple[Path, ...]:
    """Return the locks and definitions of targets and bases that are in no recipe.

    Returns none while recipes have errors, because their targets are unknown.
    """
    if project.faults:
        return ()
    root, directory = project.settings.root_path, project.lock_folder
    names = {target.name for target in project.targets}
    files = {f"{name}.{suffix}" for name in names for suffix in (UNSOLVABLE, LAYERS)}
    for target in project.targets:
        files.update(lock_names(target.name, conda=target.conda))
    bases = {base.name for base in project.bases if not base.image}
    suffixes = (CONDA, WHEELS, UNSOLVABLE, LAYERS)
    paths = [p for suffix in suffixes for p in directory.glob(f"*.{suffix}") if p.name not in files]
    paths += [p for p in (directory / "bases").glob("*.lock") if p.stem not in bases]
    paths += [p for p in (root / "definitions").glob("*") if p.is_dir() and p.name not in names]
    return tuple(sorted(paths))


def holding(project: Project, targets: Sequence[Target], packages: Sequence[str]) -> tuple[Target, ...]:
    """Return the targets whose own locks have all of `packages`, not from a parent.

    Raises NothingSelectedError without a match.
    """
    normal_names = {canonicalize_name(package) for package in packages}

    def names(target: Target | None) -> set[str]:
        lock = read_target_lock(project, target) if target else None
        return {canonicalize_name(package.name) for package in lock.packages} if lock else set()

    chosen = tuple(t for t in targets if normal_names <= names(t) - names(project.target_below(t)))
    if not chosen:
        raise NothingSelectedError(
            "lock-without-package",
            f"no lock has the package {' and '.join(packages)}",
            hint="to see the packages of a lock, run imagefactory show TARGET",
        )
    return chosen


def outdated_packages_of(access: Access, lock: Lock) -> tuple[OutdatedPackage, ...]:
    """Return the outdated packages of a lock that this machine solved, none for other locks."""
    try:
        value = json.loads(outdated_path(access, lock).read_text(encoding="utf-8"))
        rows: tuple[OutdatedPackage, ...] = parse_value(
            value, tuple[OutdatedPackage, ...], "outdated packages"
        )
    except (OSError, ValueError, StatementError):
        return ()
    return rows


def outdated_path(access: Access, lock: Lock) -> Path:
    """Return the file with the outdated packages of a lock."""
    return access.settings.cache_path / "behind" / f"{lock_digest(lock).removeprefix('sha256:')}.json"
