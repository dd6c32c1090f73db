"""What is locked, and whether it still is what the recipes ask: nothing is solved or written here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from imagefactory.errors import LockError, NothingSelectedError, StaleError
from imagefactory.lock.content_hash import content_hash
from imagefactory.lock.debian.lock import base_content_hash, read_base_lock
from imagefactory.lock.files import (
    CONDA,
    UNSOLVABLE,
    WHEELS,
    UnsolvableTarget,
    check_facts,
    check_unchanged_packages,
    lock_names,
    lock_path,
    read_lock,
    read_unsolvable,
)
from imagefactory.lock.layers import LAYERS
from imagefactory.lock.pypi.local import changed_wheel
from imagefactory.model import BaseLock, BaseSpec, Lock, Outcome, Target
from imagefactory.project import Project
from imagefactory.recipes.values import named_packages

TO_BUILD = "to build"
"""The state of a target whose recipe names sources that have no wheel yet."""


def read_target_lock(factory: Project, target: Target) -> Lock | None:
    """The committed lock of a target, or None. Raises LockError when it is malformed."""
    return read_lock(factory.lock_folder, target)


def require_lock(factory: Project, target: Target) -> Lock:
    """The committed lock.

    Raises LockError when there is none or it does not hold the framework and CUDA that the target
    names, StaleError when the recipe has moved on or the lock of the target that it is built on has, and
    for a target whose recipe names sources that have no wheel yet.
    """
    lock, hint = read_target_lock(factory, target), f"imagefactory lock {target.name}"
    if target.sources:
        raise StaleError(
            "source-not-built",
            f"{target.name} has sources without a wheel: {', '.join(target.sources)}",
            hint=f"{hint} --build",
        )
    wanted = required_content_hash(factory, target)
    if lock is not None and lock.content_hash == wanted:
        check_facts(lock, target)
        if changed := changed_wheel(lock, factory.settings.root_path):
            raise StaleError("lock-outdated", f"the lock of {target.name} is outdated: {changed}", hint=hint)
        return lock
    if why := read_unsolvable_reason(factory, target):
        raise LockError(
            "target-unsolvable",
            f"{target.name} is unsolvable: {why.reason}",
            hint=why.hint or f"{hint} --explain",
        )
    if lock is None:
        path = lock_path(factory.lock_folder, target)
        raise LockError("lock-missing", f"{target.name} has no lock ({path})", hint=hint)
    what = f"the recipe or the lock of {target.on}" if target.on else "the recipe"
    raise StaleError("lock-outdated", f"the lock of {target.name} is outdated: {what} has changed", hint=hint)


def required_content_hash(factory: Project, target: Target) -> str:
    """The content hash that the target's lock must have. Raises LockError as `lock_below` does."""
    return content_hash(target, factory.base_of(target), parent_lock(factory, target))


def parent_lock(factory: Project, target: Target) -> Lock | None:
    """The lock of the target that this one is built on, as `require_lock` gives it; None for no target."""
    below = factory.target_below(target)
    return require_lock(factory, below) if below else None


def parent_locks(factory: Project, target: Target) -> tuple[Lock, ...]:
    """The locks of all targets that this one is built on, the lowest first."""
    below = factory.target_below(target)
    return (*parent_locks(factory, below), require_lock(factory, below)) if below else ()


def parent_requirements(factory: Project, target: Target) -> tuple[frozenset[str], ...]:
    """The packages from PyPI that the recipe of each target below names, in the order of `locks_below`."""
    below = factory.target_below(target)
    return (*parent_requirements(factory, below), named_packages(below)) if below else ()


def lock_state(factory: Project, target: Target) -> str:
    """`ok`, `stale`, `none`, `malformed`, `to build` while its recipe names sources without a wheel, or
    `unsolvable` where that is what locking said, for tables."""
    if target.sources:
        return TO_BUILD
    try:
        lock = read_target_lock(factory, target)
    except LockError:
        return "malformed"
    try:
        if lock is not None and lock.content_hash == required_content_hash(factory, target):
            base = factory.base_of(target)
            if base.on and (state := base_state(factory, base)) != "ok":
                return state
            if changed_wheel(lock, factory.settings.root_path):
                return "stale"
            return "ok" if _is_current(lock, target, parent_lock(factory, target)) else "malformed"
        if read_unsolvable_reason(factory, target) is not None:
            return Outcome.UNSOLVABLE.value
    except (LockError, StaleError):
        pass  # of the target below, which has a row of its own
    return "none" if lock is None else "stale"


def _is_current(lock: Lock, target: Target, under: Lock | None) -> bool:
    """Whether a lock of the right content hash is what locking writes, and not changed since."""
    try:
        check_facts(lock, target)
        check_unchanged_packages(lock, under)
    except LockError:
        return False
    return True


def read_unsolvable_reason(factory: Project, target: Target) -> UnsolvableTarget | None:
    """Why the target has no solution, as it was found when it was last locked; None where that is not known.

    What was found for another recipe does not count, nor does a record that is malformed: locking makes
    it anew. Raises LockError as `lock_below` does.
    """
    try:
        why = read_unsolvable(factory.lock_folder, target)
    except LockError:
        return None
    return why if why is not None and why.content_hash == required_content_hash(factory, target) else None


def base_state(factory: Project, base: BaseSpec) -> str:
    """The same words for a base's lock. A base that is pulled is locked by its digest."""
    if base.image:
        return "ok"
    try:
        lock = read_base_lock(factory.base_lock_path(base))
    except LockError:
        return "malformed"
    if lock is None:
        return "none"
    return "ok" if lock.content_hash == required_base_hash(factory, base) else "stale"


def required_base_hash(factory: Project, base: BaseSpec) -> str:
    """The content hash that a base's lock must have. Raises LockError for a malformed one below."""
    below = factory.base_below(base)
    return base_content_hash(base, read_base_lock(factory.base_lock_path(below)) if below else None)


def base_locks(factory: Project, base: BaseSpec) -> tuple[BaseLock, ...]:
    """The locks of the bases that this one stands on, the lowest first, and its own.

    None where one of them is missing, and for a base that is pulled. Raises LockError for a malformed one.
    """
    below, lock = factory.base_below(base), read_base_lock(factory.base_lock_path(base))
    lower = base_locks(factory, below) if below else ()
    return () if lock is None or (below and not lower) else (*lower, lock)


def orphans(factory: Project) -> tuple[Path, ...]:
    """Locks and definitions of targets and bases that no recipe makes any more.

    None while recipes have faults: theirs are not known.
    """
    if factory.faults:
        return ()
    root, folder = factory.settings.root_path, factory.lock_folder
    names = {target.name for target in factory.targets}
    files = {f"{name}.{kind}" for name in names for kind in (UNSOLVABLE, LAYERS)}
    for target in factory.targets:
        files.update(lock_names(target.name, conda=target.conda))
    bases = {base.name for base in factory.bases if not base.image}
    kinds = (CONDA, WHEELS, UNSOLVABLE, LAYERS)
    left = [p for kind in kinds for p in folder.glob(f"*.{kind}") if p.name not in files]
    left += [p for p in (folder / "bases").glob("*.lock") if p.stem not in bases]
    left += [p for p in (root / "definitions").glob("*") if p.is_dir() and p.name not in names]
    return tuple(sorted(left))


def holding(factory: Project, targets: Sequence[Target], packages: Sequence[str]) -> tuple[Target, ...]:
    """The targets whose locks hold all of `packages`, and not from a target that they are built on.

    Raises NothingSelectedError when none does.
    """
    normal_names = {canonicalize_name(package) for package in packages}

    def names(target: Target | None) -> set[str]:
        lock = read_target_lock(factory, target) if target else None
        return {canonicalize_name(package.name) for package in lock.packages} if lock else set()

    chosen = tuple(t for t in targets if normal_names <= names(t) - names(factory.target_below(t)))
    if not chosen:
        raise NothingSelectedError(
            "lock-without-package", f"no lock has {' and '.join(packages)}", hint="imagefactory show TARGET"
        )
    return chosen
