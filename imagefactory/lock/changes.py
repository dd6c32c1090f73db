"""The packages that differ between two locks. It has no other imports: the base installer uses it."""

from __future__ import annotations

from dataclasses import dataclass

from imagefactory.model import BaseLock, Lock, LockedCondaPackage, LockedPackage


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """A package in two locks. `before` is empty for a new one, `after` for a removed one.

    Both are versions. If only the file changes, `after` states that (`1.2, new file`).
    """

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        if not self.before:
            return f"{self.name} {self.after} (new)"
        return (
            f"{self.name} {self.before} -> {self.after}"
            if self.after
            else f"{self.name} {self.before} (gone)"
        )


def lock_moves(before: Lock | None, after: Lock) -> tuple[VersionChange, ...]:
    """Return the changes in an environment, by name. A conda package and a wheel with one name are two."""
    return _moves(_packages(before), _packages(after))


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
