"""When a lock is outdated, and the packages that differ between two locks.

It imports only the model: the base installer uses it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TypedDict

from imagefactory.model import BaseLock, BaseSpec, Lock, LockedCondaPackage, LockedPackage, Target

FORMAT = 1
"""The format of lock files, of wheels and of conda packages."""


def content_hash(target: Target, base: BaseSpec, parent_lock: Lock | None) -> str:
    """Return `sha256:...` of all inputs of a target's solution. A lock with another hash is outdated.

    `parent_lock` is the lock of the parent target. Excluded: name, description, checks and environment (they
    change no package), the written order of requirements, and the versions of the solvers (a newer solver
    must not make every lock outdated).
    """
    conda = target.conda
    decides: dict[str, object] = {
        "format": FORMAT,
        "source": target.source,
        "requirements": sorted(set(target.requirements)),
        "constraints": sorted(set(target.constraints)),
        "python": target.python,
        "platform": target.platform,
        # For conda packages it is in `system`, whatever their base.
        "glibc": "" if conda else base.glibc,
    }
    if conda or parent_lock:
        decides |= {
            "pip": sorted(set(target.pip)),
            "channels": list(target.channels),
            "priority": target.priority,
            "system": sorted(target.virtual),
            "under": sorted([p.filename, p.sha256] for p in parent_lock.packages) if parent_lock else [],
        }
    if target.origins:
        decides["origins"] = [list(pair) for pair in target.origins]
    if target.sources:
        decides["sources"] = sorted(target.sources)
    if target.exclude:
        decides["exclude"] = sorted(target.exclude)
    if target.cooldown:
        decides["cooldown"] = target.cooldown
    if frozen := target.frozen:
        parts = (frozen.extras, frozen.groups, frozen.skip)
        decides["frozen"] = [frozen.sha256, frozen.environment, *map(sorted, parts)]
    canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """A package in two locks. `before` is empty for a new one, `after` for a removed one.

    Both are versions. If only the file changes, `after` states that (`1.2, new file`). `publisher` is set if
    its publisher changed too.
    """

    name: str
    before: str
    after: str
    publisher: PublisherChange | None = None

    def __str__(self) -> str:
        if not self.before:
            return f"{self.name} {self.after} (new)"
        if not self.after:
            return f"{self.name} {self.before} (gone)"
        return f"{self.name} {self.before} -> {self.after}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The change, and that of its publisher in short lines."""
        publisher = self.publisher
        if publisher is None:
            return (str(self),)
        return (str(self), f"  its publisher was {publisher.before},", f"  {publisher.now}")


class PublisherChangeRow(TypedDict):
    """A wheel whose publisher in the previous lock is not that of its new file."""

    name: str
    before: str
    after: str
    """Empty if none is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherChange:
    """A wheel whose publisher in the previous lock is not that of its new file. `after` is empty for none."""

    name: str
    before: str
    after: str

    def as_json(self) -> PublisherChangeRow:
        return PublisherChangeRow(name=self.name, before=self.before, after=self.after)

    @property
    def now(self) -> str:
        return f"and is now {self.after}" if self.after else "and none is recorded now"

    def __str__(self) -> str:
        return f"the publisher of {self.name} was {self.before}, {self.now}"


def publisher_changes(before: Lock | None, after: Lock) -> tuple[PublisherChange, ...]:
    """Return the changed and lost publishers of wheels that are in both locks, by name."""
    publishers, names = dict(after.publishers), {wheel.name for wheel in after.wheels}
    return tuple(
        PublisherChange(name=name, before=publisher, after=publishers.get(name, ""))
        for name, publisher in (before.publishers if before else ())
        if name in names and publishers.get(name) != publisher
    )


def lock_moves(before: Lock | None, after: Lock) -> tuple[VersionChange, ...]:
    """Return the changes in an environment, by name. A conda package and a wheel with one name are two."""
    publishers = {change.name: change for change in publisher_changes(before, after)}
    moves = _moves(_packages(before), _packages(after))
    return tuple(replace(move, publisher=publishers.get(move.name)) for move in moves)


def base_moves(before: BaseLock | None, after: BaseLock) -> tuple[VersionChange, ...]:
    """Return the changes among the Debian packages of a base, by name."""
    old = {(p.name, ""): (p.version, p.sha256) for p in before.packages} if before else {}
    return _moves(old, {(p.name, ""): (p.version, p.sha256) for p in after.packages})


_Packages = dict[tuple[str, str], tuple[str, str]]
"""(name, kind) -> (version, hash)."""


def _packages(lock: Lock | None) -> _Packages:
    return {(p.name, _change_type(p)): (p.version, p.sha256) for p in lock.packages} if lock else {}


def _change_type(package: LockedPackage) -> str:
    return "conda" if isinstance(package, LockedCondaPackage) else "wheel"


def _moves(old: _Packages, new: _Packages) -> tuple[VersionChange, ...]:
    moves = []
    for key in sorted(old.keys() | new.keys()):
        (was, was_file), (now, now_file) = old.get(key, ("", "")), new.get(key, ("", ""))
        if was_file != now_file:
            moves.append(
                VersionChange(name=key[0], before=was, after=f"{now}, new file" if was == now else now)
            )
    return tuple(moves)
