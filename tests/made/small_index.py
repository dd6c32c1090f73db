"""A package index of a few lines and its solver, for what `new` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.errors import LockError, UnbuiltError, UnreachableError, UnsolvableError
from imagefactory.lock.pypi import outdated
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.model import BaseSpec, Lock, Target

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """`pythons` are those that it has wheels for; none where only its sources are there.

    `day` is when it was uploaded (`2023-07-18`), empty where the index does not tell.
    """

    needs: tuple[str, ...] = ()
    pythons: tuple[str, ...] = PYTHONS
    day: str = ""


@dataclass(slots=True)
class SmallIndex:
    """`files` are releases by `name==version`. `solved` are the targets that were asked for.

    `searched` are the Pythons that were solved with sources. `unknown` are names that Debian does not have.
    """

    files: Mapping[str, Release]
    solved: list[Target] = field(default_factory=list)
    searched: set[str] = field(default_factory=set)
    unknown: tuple[str, ...] = ()

    def solve(self, target: Target, base: BaseSpec, under: Lock | None) -> Mapping[str, str]:
        if target.source == "conda":
            raise UnreachableError("index-unreachable", "there are no channels")
        self.solved.append(target)
        self.searched.add(target.python)
        found = self._solution(target, under, sources=True)
        unbuilt = {name: version for name, version in found.items() if self._is_source(name, version)}
        if unbuilt:
            rows = tuple({"name": name, "version": one, "source": "x"} for name, one in unbuilt.items())
            pins = tuple(f"{name}=={one}" for name, one in found.items() if name not in unbuilt)
            raise UnbuiltError("wheel-missing", f"{target.name}: no wheel", packages=rows, pins=pins)
        return found

    def declared(self, target: Target, base: BaseSpec) -> Mapping[str, str]:
        self.solved.append(target)
        try:
            return self._solution(target, None, sources=False)
        except UnsolvableError:
            names = {Requirement(text).name for text in target.requirements}
            pins = [pin.split("==") for pin in self.files if self._is_source(*pin.split("=="))]
            if lacking := tuple(name for name, _ in pins if name in names):
                raise NoWheelError(
                    "test-problem", f"{target.name}: no wheel", hint="", names=lacking, account=""
                ) from None
            raise

    def releases(
        self, target: Target, base: BaseSpec, names: Sequence[str]
    ) -> dict[str, tuple[outdated.PypiRelease, ...]]:
        found: dict[str, list[outdated.PypiRelease]] = {name: [] for name in names}
        for pin, one in self.files.items():
            name, _, version = pin.partition("==")
            if name in found:
                day = date.fromisoformat(one.day) if one.day else None
                found[name].append(outdated.PypiRelease(version=Version(version), uploaded=day))
        return {name: tuple(sorted(some, key=lambda one: one.version)) for name, some in found.items()}

    def has_wheels(self, target: Target, base: BaseSpec, pin: str) -> bool:
        prefix = pin if "==" in pin else f"{pin}=="
        return any(pin.startswith(prefix) and one.pythons for pin, one in self.files.items())

    def impossible(self, target: Target, base: BaseSpec) -> Sequence[str]:
        found = []
        for one in map(Requirement, target.requirements):
            pins = (
                pin.split("==") for pin in self.files if pin.startswith(f"{canonicalize_name(one.name)}==")
            )
            fitting = [
                self.files[f"{name}=={version}"].pythons for name, version in pins if version in one.specifier
            ]
            found += (
                [one.name] if fitting and all(some and target.python not in some for some in fitting) else []
            )
        return found

    def unknown_system(self, base: BaseSpec, names: Sequence[str]) -> Sequence[str]:
        return [name for name in names if name in self.unknown]

    def explain(self, target: Target, base: BaseSpec, error: LockError) -> LockError:
        return error

    def _solution(self, target: Target, under: Lock | None, *, sources: bool) -> dict[str, str]:
        kept = {wheel.name: wheel.version for wheel in under.wheels} if under else {}
        wanted = [Requirement(text) for text in target.requirements]
        bounds = [Requirement(text) for text in target.constraints]
        found = next(self._extend(wanted, bounds, kept, target.python, sources=sources), None)
        if found is None:
            raise UnsolvableError(
                "packages-conflict",
                f"{target.name}: no solution on {target.python}",
                tree="the whole account",
            )
        return found

    def _is_source(self, name: str, version: str) -> bool:
        return not self.files.get(f"{name}=={version}", Release()).pythons

    def needs(self, target: Target, base: BaseSpec, pin: str) -> Sequence[str]:
        return self.files[pin].needs

    def _extend(
        self,
        wanted: list[Requirement],
        bounds: list[Requirement],
        found: dict[str, str],
        python: str,
        *,
        sources: bool,
    ) -> Iterator[dict[str, str]]:
        if not wanted:
            yield found
            return
        first, rest = wanted[0], wanted[1:]
        name = canonicalize_name(first.name)
        limits = [first.specifier, *(one.specifier for one in bounds if canonicalize_name(one.name) == name)]
        versions = [pin.partition("==")[2] for pin in self.files if pin.startswith(f"{name}==")]
        for version in [found[name]] if name in found else sorted(versions, key=Version, reverse=True):
            release = self.files.get(f"{name}=={version}", Release())
            fits = python in release.pythons or (sources and not release.pythons)
            if fits and all(version in limit for limit in limits):
                needs = [] if name in found else [Requirement(text) for text in release.needs]
                yield from self._extend(
                    [*rest, *needs], bounds, {**found, name: version}, python, sources=sources
                )
