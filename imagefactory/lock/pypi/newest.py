"""What was locked against the newest release that the index has: how far behind it is, and why.

A package without a wheel, or one that a pin excludes, does not fail to solve: the solver goes back until an
old release fits, one of pure Python from before its GPU code or one from before the requirement was written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.lock.pypi.tags import fitting_set
from imagefactory.model import Lock, LockedWheel

_DAYS, _RELEASES = 365, 5
_FUTURE = "3.99"  # of Python, which only a release that ends below it excludes
_NO_WHEEL = re.compile(
    r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?([<>=!~][^ ,]*)? has no (?:usable wheels|wheels with)"
)
_NEEDS = re.compile(
    r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?([<>=!~][^ ,]*)? depends on "
    r"(?:one of: )?([A-Za-z0-9._-]+)(?:\[[^\]]*\])?([<>=!~][^ ,]*)"
)
_PYTHON = re.compile(r"depends on (Python[<>=!~][^ ,]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release for everyone: no pre-release, not yanked. `uploaded` is its first day, None if not told."""

    version: Version
    uploaded: date | None


def releases(name: str, files: Iterable[IndexFile], python: str) -> tuple[Release, ...]:
    """The releases among a project's files, the oldest first.

    One that begins only after `python` (`3.11`) is left out: the recipe chose that Python. One that ends
    before it is not, for older ones, which name no end, would be taken in its place.
    """
    days: dict[Version, list[str]] = {}
    for file in files:
        version = _version(name, file.filename)
        if version and not version.is_prerelease and not file.yanked and _begun(file.python, python):
            days.setdefault(version, []).append(file.uploaded)
    found = []
    for version in sorted(days):
        known = [day for day in days[version] if re.fullmatch(r"\d{4}-\d\d-\d\d", day)]
        found.append(Release(version=version, uploaded=date.fromisoformat(min(known)) if known else None))
    return tuple(found)


def _version(name: str, filename: str) -> Version | None:
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        found, version = parse_sdist_filename(filename)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None
    return version if found == canonicalize_name(name) else None


def _begun(bounds: str, python: str) -> bool:
    """Whether a release for the Pythons `bounds` is for more than Pythons newer than `python`."""
    try:
        wanted = SpecifierSet(bounds)
    except InvalidSpecifier:
        return True
    return f"{python}.0" in wanted or _FUTURE not in wanted


def bounds_of(name: str, written: Iterable[str]) -> SpecifierSet:
    """What requirements and constraints say together of a package."""
    bounds = SpecifierSet()
    for text in written:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) == name:
            bounds &= requirement.specifier
    return bounds


def needs_with(needs: Iterable[str], extras: Collection[str], lock: Lock) -> Iterator[Requirement]:
    """Yield what holds of a distribution's Requires-Dist for its `extras` and a lock's Python and machine."""
    for text in needs:
        try:
            need = Requirement(text)
        except InvalidRequirement:  # of another time: uv reads more of them
            continue
        worlds = [
            {
                "python_version": lock.python,
                "python_full_version": f"{lock.python}.0",
                "platform_machine": lock.platform.split("_", 3)[-1],
                "sys_platform": "linux",
                "extra": extra,
            }
            for extra in ("", *extras)
        ]
        if need.marker is None or any(need.marker.evaluate(world) for world in worlds):
            yield need


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the locked package `by` requires of another one."""

    by: str
    name: str
    bounds: SpecifierSet

    def __str__(self) -> str:
        return f"{self.by} needs {self.name}{self.bounds}"


def needs_of(
    required: Mapping[str, Sequence[str]], via: Mapping[str, Collection[str]], lock: Lock
) -> tuple[Need, ...]:
    """Return what the packages of a lock require of one another.

    `required` is their Requires-Dist by name, `via` the packages that require each one: an extra counts only
    where the requirement is not among the plain ones.
    """
    found = list[Need]()
    for by, texts in required.items():
        plain = list(needs_with(texts, (), lock))
        extras = set(re.findall(r"""extra\s*==\s*["']([^"']+)""", "\n".join(texts)))
        for name in (name for name, some in via.items() if by in some):
            needs = [one for one in plain if canonicalize_name(one.name) == name]
            needs = needs or [
                one for one in needs_with(texts, extras, lock) if canonicalize_name(one.name) == name
            ]
            found += [Need(by=by, name=name, bounds=need.specifier) for need in needs]
    return tuple(found)


def far_newer(locked: str, known: Iterable[Release], bounds: SpecifierSet) -> Version | None:
    """The newest release within `bounds`, if what is locked is far behind it; None otherwise.

    Far is another major version, or more than a year and five releases.
    """
    held = Version(locked)
    newer = [one for one in known if one.version > held and one.version in bounds]
    if not newer:
        return None
    newest = newer[-1]
    if newest.version.release[0] != held.release[0] or newest.version.epoch != held.epoch:
        return newest.version
    begun = next((one.uploaded for one in known if one.version == held), newer[0].uploaded)
    old = begun and newest.uploaded and (newest.uploaded - begun).days > _DAYS
    return newest.version if old and len(newer) > _RELEASES else None


def newest_source(
    wheel: LockedWheel, files: Iterable[IndexFile], bounds: SpecifierSet, lock: Lock
) -> Version | None:
    """Return the newest release within `bounds` if it is newer and has a source, but no wheel that fits.

    It is what an installer would build. Releases for other Pythons do not count.
    """
    fits, held = fitting_set(lock.python, lock.platform), Version(wheel.version)
    sources, wheels = set[Version](), set[Version]()
    for file in files:
        version = _version(wheel.name, file.filename)
        if version is None or version.is_prerelease or file.yanked or not _is_for(file.python, lock.python):
            continue
        if not file.filename.endswith(".whl"):
            sources.add(version)
        elif parse_wheel_filename(file.filename)[3] & fits:
            wheels.add(version)
    newest = max((one for one in (sources | wheels) if one > held and one in bounds), default=None)
    return newest if newest in sources - wheels else None


def _is_for(bounds: str, python: str) -> bool:
    try:
        return f"{python}.0" in SpecifierSet(bounds)
    except InvalidSpecifier:
        return True


def no_wheel(name: str, version: str, lock: Lock) -> str:
    """Say for a person that a release has no wheel for a lock's Python and platform."""
    what = f"{name} {version}".strip()
    return f"no wheel of {what} for Python {lock.python} on {lock.platform}"


def to_accept(name: str, locked: str, known: Iterable[Release]) -> str:
    """The bound by which a recipe says that it wants no newer release than the locked one."""
    held = Version(locked)
    after = next((one.version for one in known if one.version > held), None)
    return f"{name}=={locked}" if held.is_prerelease or after is None else f"{name}<{after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Why a release could not be locked: `reason` for a person, `by` what bounds it, empty for none.

    `build` is what lacks a wheel and could be built (`rouge-score==0.1.2`).
    """

    reason: str
    by: str = ""
    build: str = ""


def read_account(text: str, pin: str, asked: Mapping[str, str], lock: Lock) -> Account:
    """uv's account of why the newest release, `pin` (`demo==2.0`), could not be locked, in short.

    `asked` says by package what the question wants (`the recipe asks for torch==2.3.*`).
    """
    name, _, newest = pin.partition("==")
    flat = " ".join(re.sub(r"[×│╰─▶├]+", " ", text).split())
    flat = re.sub(r",(?=[<>=!~])", ";", flat)  # of bounds, unlike a comma between sentences
    needs = [
        _Clause(of=canonicalize_name(m[1]), name=canonicalize_name(m[3]), bounds=_plain(m[4]))
        for m in _NEEDS.finditer(flat)
    ]
    if found := _NO_WHEEL.search(flat):
        lacking = canonicalize_name(found[1])
        bounds = next((need.bounds for need in needs if need.name == lacking), _plain(found[2] or ""))
        return Account(reason=no_wheel(lacking, bounds.removeprefix("=="), lock), build=f"{lacking}{bounds}")
    others = (need for need in needs if need.name == name and need.of != name)
    if by := next((need for need in others if need.excludes(newest)), None):
        return Account(reason=f"{by.of} needs {by}", by=by.of)
    if found := _PYTHON.search(flat):
        return Account(reason=f"it needs {_plain(found[1])}, the recipe has Python {lock.python}")
    for own in (need for need in needs if need.of == name):
        if own.name in asked:
            return Account(reason=f"it needs {own}, {asked[own.name]}")
        if other := next((need for need in needs if need.name == own.name and need.of != name), None):
            return Account(reason=f"it needs {own}, {other.of} needs {other}", by=other.of)
    return Account(reason=flat.rpartition("cause: ")[2].replace(";", ",")[:400])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clause:
    """`of` depends on `name` within `bounds`, as an account says it."""

    of: str
    name: str
    bounds: str

    def __str__(self) -> str:
        return f"{self.name}{self.bounds}"

    def excludes(self, version: str) -> bool:
        try:
            return not SpecifierSet(self.bounds).contains(version, prereleases=True)
        except InvalidSpecifier:
            return False


def _plain(bounds: str) -> str:
    return bounds.rstrip(",.;").replace(";", ",")
