"""Find packages that a solution has in an outdated release, and the reasons.

If a package has no wheel, or a pin excludes it, solving does not fail: the solver uses an old release that
fits, such as one of pure Python without its later GPU code. The reason is in the requirements of the locked
wheels. Otherwise the newest release is required as a pin, and the solver's output is the reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date

from packaging.metadata import parse_email
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

from imagefactory.errors import LockError
from imagefactory.lock import OutdatedPackage
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.question import WheelRequest, WheelSolver
from imagefactory.lock.pypi.requirements import fitting_set
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import Progress

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
class PypiRelease:
    """A public release, not a pre-release and not yanked. `uploaded` is its first day, None if unknown."""

    version: Version
    uploaded: date | None


def releases(name: str, files: Iterable[IndexFile], python: str) -> tuple[PypiRelease, ...]:
    """Return the releases among a project's files, the oldest first.

    A release for only newer Pythons than `python` (`3.11`) is skipped, because the recipe chose that Python.
    A release for only older Pythons is included, because an older release without such a bound would be used
    in its place.
    """
    days: dict[Version, list[str]] = {}
    for file in files:
        version = _version(name, file.filename)
        if version and not version.is_prerelease and not file.yanked and _begun(file.python, python):
            days.setdefault(version, []).append(file.uploaded[:10])
    rows = []
    for version in sorted(days):
        known = [day for day in days[version] if re.fullmatch(r"\d{4}-\d\d-\d\d", day)]
        rows.append(PypiRelease(version=version, uploaded=date.fromisoformat(min(known)) if known else None))
    return tuple(rows)


def _version(name: str, filename: str) -> Version | None:
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        project, version = parse_sdist_filename(filename)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None
    return version if project == canonicalize_name(name) else None


def _begun(bounds: str, python: str) -> bool:
    """Return whether `bounds` include a Python that is not newer than `python`."""
    try:
        specifiers = SpecifierSet(bounds)
    except InvalidSpecifier:
        return True
    return f"{python}.0" in specifiers or _FUTURE not in specifiers


def bounds_of(name: str, written: Iterable[str]) -> SpecifierSet:
    """Return the combined bounds of requirements and constraints on a package."""
    bounds = SpecifierSet()
    for text in written:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) == name:
            bounds &= requirement.specifier
    return bounds


def needs_with(needs: Iterable[str], extras: Collection[str], lock: Lock) -> Iterator[Requirement]:
    """Yield the requirements in Requires-Dist that apply with `extras` and a lock's Python and machine."""
    for text in needs:
        try:
            need = Requirement(text)
        except InvalidRequirement:  # an old form; uv reads more of them
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
class DependencyNeed:
    """A requirement of the locked package `by` for another package."""

    by: str
    name: str
    bounds: SpecifierSet

    def __str__(self) -> str:
        return f"{self.by} needs {self.name}{self.bounds}"


def needs_of(
    required: Mapping[str, Sequence[str]], via: Mapping[str, Collection[str]], lock: Lock
) -> tuple[DependencyNeed, ...]:
    """Return the requirements between the packages of a lock.

    `required` is their Requires-Dist by name. `via` are the packages that require each one: an extra counts
    only if the requirement is not among the plain ones.
    """
    result = list[DependencyNeed]()
    for by, texts in required.items():
        plain = list(needs_with(texts, (), lock))
        extras = set(re.findall(r"""extra\s*==\s*["']([^"']+)""", "\n".join(texts)))
        for name in (name for name, some in via.items() if by in some):
            needs = [need for need in plain if canonicalize_name(need.name) == name]
            needs = needs or [
                need for need in needs_with(texts, extras, lock) if canonicalize_name(need.name) == name
            ]
            result += [DependencyNeed(by=by, name=name, bounds=need.specifier) for need in needs]
    return tuple(result)


def far_newer(locked: str, known: Iterable[PypiRelease], bounds: SpecifierSet) -> Version | None:
    """Return the newest release within `bounds` if the locked one is far older, None otherwise.

    Far older means another major version, or more than a year and five releases.
    """
    current = Version(locked)
    newer = [candidate for candidate in known if candidate.version > current and candidate.version in bounds]
    if not newer:
        return None
    newest = newer[-1]
    if newest.version.release[0] != current.release[0] or newest.version.epoch != current.epoch:
        return newest.version
    begun = next(
        (candidate.uploaded for candidate in known if candidate.version == current), newer[0].uploaded
    )
    old = begun and newest.uploaded and (newest.uploaded - begun).days > _DAYS
    return newest.version if old and len(newer) > _RELEASES else None


def newest_source(
    wheel: LockedWheel, files: Iterable[IndexFile], bounds: SpecifierSet, lock: Lock
) -> Version | None:
    """Return the newest release within `bounds`, if newer, with a source but without a wheel that fits.

    An installer would build it. Releases for other Pythons are ignored.
    """
    fits, current = fitting_set(lock.python, lock.platform), Version(wheel.version)
    sources, wheels = set[Version](), set[Version]()
    for file in files:
        version = _version(wheel.name, file.filename)
        if version is None or version.is_prerelease or file.yanked or not _is_for(file.python, lock.python):
            continue
        if not file.filename.endswith(".whl"):
            sources.add(version)
        elif parse_wheel_filename(file.filename)[3] & fits:
            wheels.add(version)
    newest = max(
        (candidate for candidate in (sources | wheels) if candidate > current and candidate in bounds),
        default=None,
    )
    return newest if newest in sources - wheels else None


def _is_for(bounds: str, python: str) -> bool:
    try:
        return f"{python}.0" in SpecifierSet(bounds)
    except InvalidSpecifier:
        return True


def no_wheel(name: str, version: str, lock: Lock) -> str:
    """Return the message for a release without a wheel for a lock's Python and platform."""
    message = f"{name} {version}".strip()
    return f"no wheel of {message} for Python {lock.python} on {lock.platform}"


def to_accept(name: str, locked: str, known: Iterable[PypiRelease]) -> str:
    """Return the bound with which a recipe accepts the locked release."""
    current = Version(locked)
    after = next((release.version for release in known if release.version > current), None)
    return f"{name}=={locked}" if current.is_prerelease or after is None else f"{name}<{after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockObstacle:
    """The reason why a release could not be locked: `reason` as text, `by` its bound, empty for none.

    `build` has no wheel and could be built (`rouge-score==0.1.2`).
    """

    reason: str
    by: str = ""
    build: str = ""


def read_account(text: str, pin: str, requested: Mapping[str, str], lock: Lock) -> LockObstacle:
    """Return the reason in uv's output why the newest release, `pin` (`demo==2.0`), could not be locked.

    `requested` has the requirements of the request, by package (`the recipe asks for torch==2.3.*`).
    """
    name, _, newest = pin.partition("==")
    flat = " ".join(re.sub(r"[×│╰─▶├]+", " ", text).split())
    flat = re.sub(r",(?=[<>=!~])", ";", flat)  # in bounds, unlike a comma between sentences
    needs = [
        _DependencyClause(of=canonicalize_name(m[1]), name=canonicalize_name(m[3]), bounds=_plain(m[4]))
        for m in _NEEDS.finditer(flat)
    ]
    if match := _NO_WHEEL.search(flat):
        lacking = canonicalize_name(match[1])
        bounds = next((need.bounds for need in needs if need.name == lacking), _plain(match[2] or ""))
        return LockObstacle(
            reason=no_wheel(lacking, bounds.removeprefix("=="), lock), build=f"{lacking}{bounds}"
        )
    others = (need for need in needs if need.name == name and need.of != name)
    if by := next((need for need in others if need.excludes(newest)), None):
        return LockObstacle(reason=f"{by.of} needs {by}", by=by.of)
    if match := _PYTHON.search(flat):
        return LockObstacle(reason=f"it needs {_plain(match[1])}, the recipe has Python {lock.python}")
    for package_need in (need for need in needs if need.of == name):
        if package_need.name in requested:
            return LockObstacle(reason=f"it needs {package_need}, {requested[package_need.name]}")
        if other := next(
            (need for need in needs if need.name == package_need.name and need.of != name), None
        ):
            return LockObstacle(reason=f"it needs {package_need}, {other.of} needs {other}", by=other.of)
    return LockObstacle(reason=flat.rpartition("cause: ")[2].replace(";", ",")[:400])


@dataclass(frozen=True, slots=True, kw_only=True)
class _DependencyClause:
    """A clause of uv's output: `of` depends on `name` within `bounds`."""

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


_AT_ONCE = 4  # requests to the solver


def find_outdated(
    solver: WheelSolver,
    question: WheelRequest,
    wheels: Sequence[LockedWheel],
    framework: str,
    progress: Progress,
) -> tuple[OutdatedPackage, ...]:
    """Return the outdated packages among `wheels`, a solution of `question`.

    The newest release is one within the bounds of the recipe, of the framework, of the packages in the
    recipe, and of the parent. `fixed` wheels were checked when they were locked. An index that does not
    answer is only reported, because the lock is valid anyway.
    """
    look = _SolutionCheck(
        solver=solver, question=question, wheels=tuple(wheels), framework=canonicalize_name(framework)
    )
    with progress.task("newest releases", total=len(look.chosen), unit="packages") as task:
        try:
            outdated, unknown = look.find()
        except LockError as error:
            outdated, unknown = (), (error.message.removeprefix(f"{question.lock.target}: "),)
        task.advance(len(look.chosen))
    for message in unknown:
        progress.note(f"{question.lock.target}: newer releases are not known: {message}")
    return outdated


@dataclass(slots=True, kw_only=True)
class _SolutionCheck:
    """One solution, and its files in the index."""

    solver: WheelSolver
    question: WheelRequest
    wheels: tuple[LockedWheel, ...]
    framework: str
    known: dict[str, tuple[PypiRelease, ...]] = field(default_factory=dict)

    @property
    def chosen(self) -> list[LockedWheel]:
        return [wheel for wheel in self.wheels if wheel not in self.question.fixed]

    @property
    def names(self) -> set[str]:
        """The packages that the recipe itself names."""
        return {canonicalize_name(Requirement(text).name) for text in self.question.requirements}

    def find(self) -> tuple[tuple[OutdatedPackage, ...], tuple[str, ...]]:
        """Return the outdated packages, and the packages that could not be checked. Raises LockError."""
        lock, own_requirements = self.question.lock, (*self.question.requirements, *self.question.constraints)
        listed = self.solver.listed(self.chosen, lock)
        known = self.known = {w.name: releases(w.name, listed.get(w, ()), lock.python) for w in self.chosen}
        late = []
        for wheel in self.chosen:
            bounds = bounds_of(wheel.name, own_requirements)
            files = listed.get(wheel, ())
            if far_newer(wheel.version, known[wheel.name], bounds) or newest_source(
                wheel, files, bounds, lock
            ):
                late.append(wheel)
        if not late:
            return (), ()
        needs = self._needs(late, listed)
        named = {*self.names, self.framework, *(wheel.name for wheel in self.question.fixed)}
        outdated, unexplained = list[OutdatedPackage](), list[tuple[LockedWheel, Version]]()
        for wheel in late:
            others = [need for need in needs if need.name == wheel.name and need.by != wheel.name]
            bounds = every = bounds_of(wheel.name, own_requirements)
            for need in others:
                every &= need.bounds
                bounds &= need.bounds if need.by in named else SpecifierSet()
            if source := newest_source(wheel, listed.get(wheel, ()), every, lock):
                reason = f"{no_wheel(wheel.name, str(source), lock)}, only its source"
                obstacle = LockObstacle(reason=reason, build=f"{wheel.name}=={source}")
                stops = self._locked_before(wheel.name) != wheel.version
                outdated.append(self._outdated(wheel, source, obstacle, stops=stops))
            elif newest := far_newer(wheel.version, known[wheel.name], bounds):
                by = next((need for need in others if newest not in need.bounds), None)
                if by is None:
                    unexplained.append((wheel, newest))
                elif wheel.name in self.names:  # packages that the recipe does not name depend on others
                    obstacle = LockObstacle(reason=str(by), by=by.by)
                    outdated.append(self._outdated(wheel, newest, obstacle, stops=False))
        more, unknown = self._solved(unexplained, needs)
        return tuple(sorted([*outdated, *more], key=lambda row: row.name)), unknown

    def _needs(
        self, late: Iterable[LockedWheel], listed: Mapping[LockedWheel, Sequence[IndexFile]]
    ) -> tuple[DependencyNeed, ...]:
        """Return the requirements of the other packages for outdated ones."""
        via, lock = self.solver.requirers(self.question, self.wheels), self.question.lock
        via = {wheel.name: via.get(wheel.name, ()) for wheel in late}
        names = {by for some in via.values() for by in some}
        wheels = [wheel for wheel in self.wheels if wheel.name in names]
        rest = [wheel for wheel in wheels if wheel not in listed]
        pages = {**listed, **(self.solver.listed(rest, lock) if rest else {})}
        return needs_of(self.solver.required(wheels, pages, lock), via, lock)

    def _solved(
        self, late: Sequence[tuple[LockedWheel, Version]], needs: Sequence[DependencyNeed]
    ) -> tuple[list[OutdatedPackage], tuple[str, ...]]:
        """Return the packages whose reason needs the solver: those of the recipe, else the others.

        If the lock is rejected because of a package in the recipe, the others are not solved.
        """
        outdated, unknown = list[OutdatedPackage](), list[str]()

        def obstacle(row: tuple[LockedWheel, Version]) -> LockObstacle | LockError | None:
            try:
                return self._account(*row, needs)
            except LockError as error:
                return error

        for named in (True, False):
            group = [row for row in late if (row[0].name in self.names) is named]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for (wheel, newest), reason in zip(group, pool.map(obstacle, group), strict=True):
                    if isinstance(reason, LockError):
                        message = reason.message.removeprefix(f"{self.question.lock.target}: ")
                        unknown.append(f"{wheel.name}: {message}")
                    elif reason and reason.by != self.framework:
                        outdated.append(self._outdated(wheel, newest, reason, stops=named))
            if outdated:
                break
        return outdated, tuple(unknown)

    def _outdated(
        self, wheel: LockedWheel, newest: Version, obstacle: LockObstacle, *, stops: bool
    ) -> OutdatedPackage:
        return OutdatedPackage(
            name=wheel.name,
            locked=wheel.version,
            newest=str(newest),
            reason=obstacle.reason,
            accept=to_accept(wheel.name, wheel.version, self.known[wheel.name]),
            named=stops and wheel.name in self.names,
            build=obstacle.build,
        )

    def _locked_before(self, name: str) -> str:
        """Return the version in the previous lock."""
        before = self.question.previous.wheels if self.question.previous else ()
        return next((wheel.version for wheel in before if wheel.name == name), "")

    def _account(
        self, wheel: LockedWheel, newest: Version, needs: Sequence[DependencyNeed]
    ) -> LockObstacle | None:
        """Return why the newest release was not locked, None if the previous lock has this version."""
        question, pin = self.question, f"{wheel.name}=={newest}"
        try:
            pins = self.solver.solve(replace(question, constraints=(*question.constraints, pin)))
        except LockError as error:
            text = getattr(error, "tree", "") or error.message
            if "No solution found" not in text and "wheel" not in text.lower() and "depends on" not in text:
                raise  # an error of the index, not of the request
            requested = self._requested()
            contradiction = self._contradiction(wheel.name, newest, needs)
            return contradiction or read_account(text, pin, requested, question.lock)
        if self._locked_before(wheel.name) == wheel.version:
            return None
        older = [
            f"{other.name} {version}"
            for other in self.wheels
            if (version := pins.versions.get(other.name)) and Version(version) < Version(other.version)
        ]
        return LockObstacle(
            reason=f"it goes with {' and '.join(older[:3])} only" if older else "nothing forbids it"
        )

    def _contradiction(
        self, name: str, newest: Version, needs: Iterable[DependencyNeed]
    ) -> LockObstacle | None:
        """Return a requirement of the newest release that the recipe or a locked wheel excludes."""
        lock, requested = self.question.lock, self._requested()
        try:
            text = self.solver.metadata(f"{name}=={newest}", lock)
        except LockError:  # it has no fitting wheel, or its index has no metadata
            return None
        extras = {
            extra
            for requirement in map(Requirement, self.question.requirements)
            if canonicalize_name(requirement.name) == name
            for extra in requirement.extras
        }
        own_requirements = (*self.question.requirements, *self.question.constraints)
        fixed = {wheel.name: wheel.version for wheel in self.question.fixed}
        fixed |= {
            canonicalize_name(release.name): _public(release)
            for release in map(Requirement, self.question.given)
        }
        for need in needs_with(parse_email(text)[0].get("requires_dist", []), extras, lock):
            other = canonicalize_name(need.name)
            there = (
                [Version(fixed[other])]
                if other in fixed
                else [release.version for release in self.known.get(other, ())]
            )
            allowed = bounds_of(other, own_requirements)
            fitting = [v for v in there if v in allowed and need.specifier.contains(v, prereleases=True)]
            if other in requested and there and not fitting:
                return LockObstacle(reason=f"it needs {need.name}{need.specifier}, {requested[other]}")
            for by in needs if there else ():
                if (
                    by.name == other
                    and by.by != name
                    and by.bounds
                    and not any(v in by.bounds for v in fitting)
                ):
                    return LockObstacle(reason=f"it needs {need.name}{need.specifier}, {by}", by=by.by)
        return None

    def _requested(self) -> dict[str, str]:
        """Return the recipe's requirements and conda's packages, by package, as texts."""
        requested = dict[str, str]()
        for text in (*self.question.constraints, *self.question.requirements):
            if Requirement(text).specifier:
                requested[canonicalize_name(Requirement(text).name)] = f"the recipe asks for {text}"
        for text in self.question.given:
            pin = Requirement(text)
            requested[canonicalize_name(pin.name)] = f"conda brings {pin.name} {_public(pin)}"
        return requested


def _public(pin: Requirement) -> str:
    """Return the version of a pin, without the local part that marks packages from the parent or conda."""
    return next(Version(row.version).public for row in pin.specifier)
