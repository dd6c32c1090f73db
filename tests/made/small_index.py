"""A package index of a few lines and its solver, for what `new` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.errors import NoWheelError, UnreachableError, UnsolvableError
from imagefactory.model import Base, Lock, Target

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """`pythons` are those that it has wheels for; none where only its sources are there."""

    needs: tuple[str, ...] = ()
    pythons: tuple[str, ...] = PYTHONS


@dataclass(slots=True)
class SmallIndex:
    """Releases by `name==version`. `solved` are the targets that were asked for."""

    releases: Mapping[str, Release]
    solved: list[Target] = field(default_factory=list)

    def solve(self, target: Target, base: Base, under: Lock | None) -> Mapping[str, str]:
        if target.source == "conda":
            raise UnreachableError("there are no channels")
        self.solved.append(target)
        kept = {wheel.name: wheel.version for wheel in under.wheels} if under else {}
        wanted = [Requirement(text) for text in target.requirements]
        bounds = [Requirement(text) for text in target.constraints]
        lacking = sorted({one.name for one in wanted if not self._wheels(one) and self._known(one.name)})
        if lacking:
            names = " and ".join(lacking)
            raise NoWheelError(f"{target.name}: no wheel of {names}", packages=tuple(lacking))
        found = next(self._extend(wanted, bounds, dict(kept), target.python), None)
        if found is None:
            raise UnsolvableError(f"{target.name}: no solution on {target.python}", tree="the whole account")
        return found

    def needs(self, target: Target, base: Base, pin: str) -> Sequence[str]:
        return self.releases[pin].needs

    def _known(self, name: str) -> bool:
        return any(pin.startswith(f"{canonicalize_name(name)}==") for pin in self.releases)

    def _wheels(self, wanted: Requirement) -> bool:
        name = canonicalize_name(wanted.name)
        return any(pin.startswith(f"{name}==") and one.pythons for pin, one in self.releases.items())

    def _extend(
        self, wanted: list[Requirement], bounds: list[Requirement], found: dict[str, str], python: str
    ) -> Iterator[dict[str, str]]:
        if not wanted:
            yield found
            return
        first, rest = wanted[0], wanted[1:]
        name = canonicalize_name(first.name)
        limits = [first.specifier, *(one.specifier for one in bounds if canonicalize_name(one.name) == name)]
        versions = [pin.partition("==")[2] for pin in self.releases if pin.startswith(f"{name}==")]
        for version in [found[name]] if name in found else sorted(versions, key=Version, reverse=True):
            release = self.releases.get(f"{name}=={version}", Release())
            if all(version in limit for limit in limits) and python in release.pythons:
                needs = [] if name in found else [Requirement(text) for text in release.needs]
                yield from self._extend([*rest, *needs], bounds, {**found, name: version}, python)
