"""Locking: from a target to the exact packages of its image, and where they are found again.

files.py knows the files of a lock whatever source its packages come from, content_hash.py what makes one
stale. pypi/ locks wheels with uv, conda/ conda's packages with py-rattler, debian/ the packages of a base
with apt. download.py fetches what is locked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from imagefactory.model import BaseSpec, Lock, Target
from imagefactory.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRequest:
    """What to lock.

    `previous` is the lock as it stands, if there is one. While nothing that decides it has changed it
    is kept; `update` names packages that may move all the same, `update_all` lets every one move. `under`
    is the lock of the target that this one is built on, of which every package stays. `absent` are pins
    (`name==version`) of wheels that others may require and that are left out.
    """

    target: Target
    base: BaseSpec
    previous: Lock | None = None
    update: tuple[str, ...] = ()
    update_all: bool = False
    under: Lock | None = None
    absent: tuple[str, ...] = ()


def requirements_of(target: Target, source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Requirements and constraints of what `target` has from `source`, but for conda's Python."""
    if source == target.source:
        return target.requirements, target.constraints
    return (target.pip, ()) if source == "pypi" else ((), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class OutdatedPackage:
    """A package locked behind the newest release that the recipe's own bounds allow, and why.

    With `asked` the recipe names it and the lock is refused; `accept` is the bound that the recipe then
    writes to want no newer one. `build` is the requirement that has no wheel and could be built, empty for
    none.
    """

    name: str
    locked: str
    newest: str
    reason: str
    accept: str
    asked: bool
    build: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.locked}, where {self.newest} is the newest: {self.reason}"


class Locker(Protocol):
    """One source of packages."""

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        """The solved environment of a target. Raises LockError, or ToolError without its solver."""

    def behind(self, request: LockRequest, lock: Lock, progress: Progress) -> tuple[OutdatedPackage, ...]:
        """What of a solution for `request` is far behind what its source has. Raises like `lock`."""

    def addresses(self, lock: Lock) -> dict[str, str]:
        """Where each locked file is now: file name -> URL. Raises LockError for a file that is gone."""
