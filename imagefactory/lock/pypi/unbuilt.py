"""Find packages of a solution without a wheel, their build requirements, and undeclared dependencies.

uv solves only with wheels. If it finds none for a package, the source distribution is fetched and read,
never run. A stub wheel with only that metadata replaces it, and uv solves again.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from imagefactory.errors import (
    DownloadError,
    LockError,
    UnbuiltError,
    UnbuiltPackageRow,
    UnreachableError,
    UnsolvableError,
    UsageError,
)
from imagefactory.gpu import knowledge
from imagefactory.gpu.knowledge.packages import source_build
from imagefactory.lock.pypi.facts import check_facts, check_single_cuda
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.outdated import bounds_of
from imagefactory.lock.pypi.question import (
    PinnedVersions,
    QuestionSolver,
    WheelRequest,
    WheelSolver,
    versions_of,
)
from imagefactory.lock.pypi.requirements import fitting_set
from imagefactory.lock.pypi.sources import SourceProject, read_project
from imagefactory.model import Lock, LockedWheel, Target
from imagefactory.progress import Progress
from imagefactory.recipes.values import package_of

_ROUNDS = 10  # each one adds a need, and a need can bring packages that need more


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionNeed:
    """A requirement `wants` of the release `by` (`torch 2.2.2`); `add` if nothing else requires it."""

    by: str
    wants: Requirement
    add: bool
    source: str

    @property
    def package(self) -> str:
        return self.by.partition(" ")[0]

    def __str__(self) -> str:
        return f"{self.by} needs {self.wants}"


class NoCompanionError(UnsolvableError):
    """A companion has no release for a framework version. `need` limits the framework to others."""

    def __init__(
        self, code: str, message: str, *, hint: str, conflict: tuple[str, ...], need: CompanionNeed
    ) -> None:
        super().__init__(code, message, hint=hint, conflict=conflict)
        self.need = need


def companion_needs(versions: Mapping[str, str], python: str) -> tuple[CompanionNeed, ...]:
    """Return the known requirements between releases (name -> version), for a Python (`3.11`).

    Raises NoCompanionError for a companion without a release for the version of its framework.
    """
    result = [
        CompanionNeed(
            by=f"{row.package} {versions[row.package]}", wants=row.needs, add=row.add, source=row.source
        )
        for row in knowledge.bounds()
        if row.package in versions
        and row.python in ("", python)
        and (row.add or row.needs.name in versions)
        and row.versions.contains(_public(versions[row.package]), prereleases=True)
        and not (row.add and _is_other_build(versions[row.package]))
    ]
    for framework in sorted({*knowledge.families().values()} & versions.keys()):
        version = _public(versions[framework])
        for name, series in knowledge.companions_for(framework, version).items():
            if name not in versions:
                continue
            if not series:
                raise _no_companion(f"{name} {versions[name]}", f"{framework} {version}")
            wants = Requirement(f"{name}=={series}.*")
            result.append(
                CompanionNeed(by=f"{framework} {version}", wants=wants, add=False, source="companions.toml")
            )
    return tuple(result)


def with_needs(question: WheelRequest, needs: Iterable[CompanionNeed]) -> WheelRequest:
    """Return the request with `needs` as constraints, and as requirements if they must be added.

    Packages of the parent or of conda are not constrained.
    """
    brought = _parent_versions(question)
    named = {package_of(text) for text in question.requirements}
    added, bounds = list(question.requirements), list(question.constraints)
    for need in needs:
        name = need.wants.name
        if name in brought:
            continue
        if need.add and name not in named:
            added.append(name)
            named.add(name)
        if need.wants.specifier:
            bounds.append(str(need.wants))
    return replace(
        question,
        requirements=tuple(dict.fromkeys(added)),
        constraints=tuple(dict.fromkeys(bounds)),
    )


def solve_companions(
    solver: QuestionSolver, question: WheelRequest
) -> tuple[WheelRequest, PinnedVersions, tuple[CompanionNeed, ...]]:
    """Solve a request, with an older framework if a companion has no release for a newer one.

    Return the request with that bound, its solution, and the applied needs. Raises NoCompanionError if there
    is no solution, and the solver's errors.
    """
    brought, applied, pins = _parent_versions(question), list[CompanionNeed](), solver.solve(question)
    while True:
        try:
            companion_needs(brought | pins.versions, question.lock.python)
        except NoCompanionError as error:
            bounded = with_needs(question, (error.need,))
            if bounded == question:  # required by another package, or bounded before
                raise _of_target(question, error) from error
            try:
                pins = solver.solve(bounded)
            except (UnbuiltError, UnreachableError):
                raise
            except (UnsolvableError, NoWheelError):
                raise _of_target(question, error) from error
            question = bounded
            applied.append(error.need)
        else:
            return question, pins, tuple(applied)


def solve_with_companions(
    solver: QuestionSolver, question: WheelRequest, progress: Progress
) -> tuple[WheelRequest, PinnedVersions]:
    """Solve a request so that all known needs are met. Return the final request and its solution.

    The solver knows only declared requirements. If a solution misses a known need, it is solved again with
    that need, which is reported. Raises UnsolvableError with the needs if they leave no solution, and the
    solver's errors.
    """
    brought = _parent_versions(question)
    provided = {package_of(text) for text in question.given}
    question, pins, older = solve_companions(solver, question)
    applied = [*older]
    for _ in range(_ROUNDS):
        versions = brought | pins.versions
        needs = companion_needs(versions, question.lock.python)
        broken = [
            need
            for need in needs
            if need.wants.name not in brought
            and not (need.add and need.package in provided)  # a channel's build has needs of its own
            and not _is_satisfied(need, versions)
        ]
        if not broken:
            for need in applied:
                progress.note(f"{question.lock.target}: {need}, which it does not declare")
            return question, pins
        applied += broken
        question = with_needs(question, broken)
        try:
            question, pins, older = solve_companions(solver, question)
            applied += older
        except (UnbuiltError, UnreachableError, NoCompanionError):
            raise
        except (UnsolvableError, NoWheelError) as error:
            raise _contradicted(question, applied, error) from error
    raise LockError(
        "known-needs-unmet",
        f"{question.lock.target}: no solution meets the known needs of its packages: "
        f"{_describe_needs(applied)}",
        hint="pin the versions of these packages in the recipe",
    )


def _parent_versions(question: WheelRequest) -> dict[str, str]:
    """Return the versions of packages from the parent and from conda."""
    pins = (Requirement(text) for text in question.given)
    return {
        **{canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins},
        **versions_of(question.fixed),
    }


def _public(version: str) -> str:
    """Return a version without its local part."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version.partition("+")[0]


def _is_other_build(version: str) -> bool:
    """Return whether a version (`2.5.1+cpu`, `+rocm6.2`) is a build that is not for CUDA."""
    local = version.partition("+")[2]
    return bool(local) and not local.startswith("cu")


def _is_satisfied(need: CompanionNeed, versions: Mapping[str, str]) -> bool:
    version = versions.get(need.wants.name)
    if version is None:
        return not need.add
    return need.wants.specifier.contains(_public(version), prereleases=True)


def _describe_needs(needs: Iterable[CompanionNeed]) -> str:
    return "; ".join(dict.fromkeys(map(str, needs)))


def _no_companion(companion: str, release: str) -> NoCompanionError:
    name, framework = companion.partition(" ")[0], release.partition(" ")[0]
    last = knowledge.last_with(name, framework)
    head, _, tail = last.rpartition(".")
    wants = Requirement(f"{framework}<{head}.{int(tail) + 1}" if head and tail.isdigit() else framework)
    return NoCompanionError(
        "companion-not-released",
        f"{name} has no release for {release}: its last release is for {framework} {last}",
        hint=f"write version: {last} of {framework}, or remove {name} and the packages that need it",
        conflict=(name,),
        need=CompanionNeed(by=companion, wants=wants, add=False, source="companions.toml"),
    )


def _of_target(question: WheelRequest, error: NoCompanionError) -> NoCompanionError:
    error = copy(error)
    error.message = f"{question.lock.target}: {error.message}"
    return error


def _contradicted(
    question: WheelRequest, needs: Sequence[CompanionNeed], error: LockError
) -> UnsolvableError:
    """Return the error of a request that had a solution before these needs were added."""
    added = {str(need.wants) for need in needs}
    contradicted = [
        text
        for text in (*question.requirements, *question.constraints)
        if Requirement(text).specifier and text not in added
    ]
    against = [
        need for need in needs if any(package_of(text) == need.wants.name for text in contradicted)
    ] or needs
    contradicted = [
        text for text in contradicted if package_of(text) in {need.wants.name for need in against}
    ]
    message = f"{question.lock.target}: {_describe_needs(against)} (known, but not declared), and "
    hint = error.hint
    if contradicted:
        message += f"the recipe asks for {' and '.join(contradicted)}"
        by = against[0]
        hint = f"replace {' and '.join(contradicted)} by {by.wants}, or use another version of {by.package}"
    else:
        message += "no solution meets this need"
    return UnsolvableError(
        "requirements-conflict",
        message,
        hint=hint,
        tree=error.tree if isinstance(error, UnsolvableError) else error.message,
        conflict=tuple(contradicted) or tuple(str(need.wants) for need in against),
    )


ROUNDS = 100
"""The most attempts. Each but the last finds one more release without a wheel."""
UNKNOWN_VERSION = "0"
"""The version of a source whose version only a build knows. No package can require a version of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePackage:
    """A package that is built from `source`: a file of the index, or an entry of the recipe.

    `project` is None for a source that is not fetched yet.
    """

    name: str
    version: str
    source: str
    project: SourceProject | None

    @property
    def code(self) -> frozenset[str]:
        """The languages that need a compiler."""
        known = source_build(self.name)
        return known.code if known else self.project.code if self.project else frozenset()

    @property
    def debian(self) -> tuple[str, ...]:
        known = source_build(self.name)
        return known.debian if known else ()


def require_wheels(
    solver: WheelSolver, question: WheelRequest, target: Target, progress: Progress
) -> tuple[WheelRequest, PinnedVersions]:
    """Solve a request as `solve_with_companions` does, so that all packages have wheels.

    Raises UnbuiltError with all packages of the solution that have no wheel. Raises LockError if others have
    libraries of two CUDA majors, or another CUDA than the target, because building would then be useless.
    """
    with tempfile.TemporaryDirectory(prefix="imagefactory-sources-") as directory:
        search = _SourceSearch(solver, question, Path(directory))
        question, pins = solve_with_companions(search, question, progress)
        unbuilt = search.unbuilt(pins)
    if not unbuilt:
        return question, pins
    built = {package.name for package in unbuilt}
    lines = tuple(line for line in pins.lines if package_of(line) not in built)
    wheels = [
        LockedWheel(name=name, version=version, filename="", sha256="", size=0)
        for name, version in pins.versions.items()
    ]
    check_single_cuda(target.name, wheels, pins.via)
    declared = all(package.project and package.project.dependencies is not None for package in unbuilt)
    if declared and canonicalize_name(target.framework) in {wheel.name for wheel in wheels} - built:
        check_facts(replace(question.lock, wheels=(*question.fixed, *wheels)), target)
    raise list_unbuilt(unbuilt, lines, question, target)


@dataclass(slots=True)
class _SourceSearch:
    """Solves a growing request in rounds. `folder` has a stub for each release in `stubs`."""

    solver: WheelSolver
    question: WheelRequest
    folder: Path
    stubs: dict[tuple[str, str], SourcePackage] = field(default_factory=dict)
    away: list[SourcePackage] = field(default_factory=list)
    own: list[SourcePackage] | None = None

    def solve(self, question: WheelRequest) -> PinnedVersions:
        """Return a solution in which stubs replace packages without a wheel."""
        if not question.sources and not self.stubs:
            try:
                return self.solver.solve(question)
            except NoWheelError:
                pass
        self.question = question
        (self.folder / "stubs").mkdir(exist_ok=True)
        if self.own is None:
            self.own = [package for entry in question.sources if (package := self._own(entry))]
        extended = replace(
            question,
            requirements=(
                *question.requirements,
                *(f"{package.name}=={package.version}" for package in self.own),
            ),
            sdists=self.folder / "stubs",
        )
        for _ in range(ROUNDS):
            try:
                return self.solver.solve(extended)
            except NoWheelError as error:
                added = [self._add(name, error.account) for name in error.names]
                if not any(added):
                    raise
        raise LockError(
            "too-many-unbuilt-releases",
            f"{question.lock.target}: more than {ROUNDS} releases without a wheel were tested",
            hint="constrain the packages without a wheel to one version each",
        )

    def unbuilt(self, pins: PinnedVersions) -> tuple[SourcePackage, ...]:
        chosen = pins.versions.items()
        return (*self.away, *(package for key, package in sorted(self.stubs.items()) if key in chosen))

    def _own(self, entry: str) -> SourcePackage | None:
        """Add a stub for a directory of the recipe. A repository, which is not fetched, is only recorded."""
        project = read_own(self.solver.root, entry) if entry.startswith(".") else None
        if project is None or not project.name:
            self.away.append(SourcePackage(name="", version="", source=entry, project=project))
            return None
        return self._stub(project.name, project.version or UNKNOWN_VERSION, entry, project)

    def _add(self, name: str, account: str) -> bool:
        """Add a stub of the newest release within the bounds of the recipe and of uv's output.

        Return whether such a release exists.
        """
        lock = self.question.lock
        known = dict(sdists_of(name, self.solver.project(name, lock), lock))
        written = bounds_of(name, [*self.question.requirements, *self.question.constraints])
        fresh = [version for version in known if (name, str(version)) not in self.stubs]
        fitting = (max(bounds.filter(fresh), default=None) for bounds in _bounds_in(name, account, written))
        version = next(filter(None, fitting), None)
        if version is None:
            return False
        file = known[version]
        try:
            project = read_project(self.solver.source(file, self.folder))
        except (UsageError, DownloadError) as error:
            raise LockError(
                "package-source-unusable",
                f"{lock.target}: {name} {version} has no wheel, and its source is unusable: {error.message}",
                hint=f"require another version of {name}, or build a wheel and write ./wheels/NAME.whl",
            ) from error
        project = replace(project, python=file.python or project.python)
        self._stub(name, str(version), file.filename, project)
        return True

    def _stub(self, name: str, version: str, source: str, project: SourceProject) -> SourcePackage:
        write_stub(self.folder / "stubs", name, version, _metadata_lines(project))
        package = SourcePackage(name=name, version=version, source=source, project=project)
        self.stubs[name, version] = package
        return package


def read_own(root: Path, entry: str) -> SourceProject:
    """Return the metadata of a directory below `root`.

    Raises UsageError if the directory is missing or is a link to outside.
    """
    directory = root / entry
    if not directory.is_dir():
        raise UsageError(
            "package-source-missing",
            f"{entry} is not a directory in {root}",
            hint="write the path of a directory, relative to the project",
        )
    if not directory.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            "source-link-outside",
            f"{entry} is a link to outside {root}",
            hint="replace the link by a copy of its target",
        )
    return read_project(directory)


def installable(name: str, files: Sequence[IndexFile], lock: Lock) -> set[Version]:
    """Return the releases that have a wheel for the Python of `lock`, or a source distribution."""
    versions = {version for version, _ in sdists_of(name, files, lock)}
    for file in files:
        with suppress(InvalidWheelFilename, InvalidVersion):
            _, version, _, offered = parse_wheel_filename(file.filename)
            versions |= {version} if offered & fitting_set(lock.python, lock.platform) else set()
    return versions


def sdists_of(name: str, files: Iterable[IndexFile], lock: Lock) -> Iterable[tuple[Version, IndexFile]]:
    """Return the source distributions for the Python of `lock`, of releases that have no wheel for it."""
    fits, sdists = set[Version](), dict[Version, IndexFile]()
    for file in files:
        try:
            if file.filename.endswith(".whl"):
                _, version, _, offered = parse_wheel_filename(file.filename)
                fits |= {version} if offered & fitting_set(lock.python, lock.platform) else set()
                continue
            named, version = parse_sdist_filename(file.filename)
            python = SpecifierSet(file.python)
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion, InvalidSpecifier):
            continue
        if named == name and file.sha256 and not file.yanked and f"{lock.python}.99" in python:
            sdists.setdefault(version, file)
    return ((version, file) for version, file in sdists.items() if version not in fits)


def _bounds_in(name: str, account: str, written: SpecifierSet) -> list[SpecifierSet]:
    """Return the bounds of a package to test, the narrowest first: all of uv's output, then each one."""
    flat = " ".join(re.sub(r"[×│╰─▶├]+", " ", account).split())
    words = r"(?:depends on|require|requires)(?: one of:)?"
    package = re.escape(name).replace(r"\-", "[-_.]")
    matches = re.finditer(rf"{words} {package}(?:\[[^\]]*\])?([<>=!~][^\s]*)", flat, re.IGNORECASE)
    each: list[SpecifierSet] = []
    for match in matches:
        try:
            each.append(SpecifierSet(match[1].rstrip(",.;")))
        except InvalidSpecifier:
            continue
    every = written
    for bounds in each:
        every &= bounds
    return [every, *(written & bounds for bounds in each), written]


def _metadata_lines(project: SourceProject) -> list[str]:
    lines = [f"Requires-Dist: {need}" for need in project.dependencies or ()]
    extras = {
        extra for need in project.dependencies or () for extra in re.findall(r"extra == ['\"]([^'\"]+)", need)
    }
    lines += [f"Provides-Extra: {extra}" for extra in sorted(extras)]
    return lines + ([f"Requires-Python: {project.python}"] if project.python else [])


def write_stub(directory: Path, name: str, version: str, lines: Sequence[str]) -> None:
    """Write a wheel with only metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    text = "\n".join([f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *lines]) + "\n"
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as archive:
        for file, content in (
            ("METADATA", text),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            archive.writestr(zipfile.ZipInfo(f"{stem}.dist-info/{file}"), content)


@contextmanager
def without(absent: Sequence[str], question: WheelRequest) -> Iterator[WheelRequest]:
    """Yield `question` with empty wheels in place of the pins `absent`."""
    if not absent:
        yield question
        return
    with tempfile.TemporaryDirectory(prefix="imagefactory-absent-") as directory:
        stubs = question.stubs or Path(directory)
        for name, _, version in (pin.partition("==") for pin in absent):
            write_stub(stubs, name, version, ())
        yield replace(question, given=(*question.given, *absent), stubs=stubs)


def has_nvcc(target: Target) -> bool:
    """Return whether the index has CUDA's compiler for a target. Its wheels are complete since CUDA 13."""
    major = target.cuda.partition(".")[0]
    return target.source == "pypi" and major.isdigit() and int(major) >= 13


def needs_of(package: SourcePackage, target: Target) -> tuple[list[str], bool]:
    """Return the build requirements of a package as texts, and whether this machine can meet all."""
    code, needs, possible = package.code, list[str](), True
    if package.project is None:
        return ["to be fetched"], True
    if "C++" in code or "CUDA" in code:
        needs.append("a C++ compiler")
    if "CUDA" in code and target.gpu:
        needs.append("the CUDA compiler")
        if not has_nvcc(target):
            possible = False
            needs[-1] += f" (the index has it from CUDA 13 on, not for CUDA {target.cuda})"
    rust = {canonicalize_name(Requirement(text).name) for text in package.project.requires} & {
        "maturin",
        "setuptools-rust",
    }
    if "Fortran" in code or ("Rust" in code and rust):
        possible = False
        needs.append(f"a {'Rust' if rust else 'Fortran'} compiler (no base has one)")
    if package.debian:
        needs.append(f"Debian's {', '.join(package.debian)} (system: in the recipe)")
    if package.project.dependencies is None:
        needs.append("more packages, which only its build names")
    return needs, possible


def list_unbuilt(
    unbuilt: Sequence[SourcePackage], pins: tuple[str, ...], question: WheelRequest, target: Target
) -> UnbuiltError:
    """Return the error with all packages of a solution that have no wheel."""
    named = {canonicalize_name(Requirement(text).name) for text in question.requirements}
    rows, lines, impossible = list[UnbuiltPackageRow](), list[str](), list[str]()
    for package in unbuilt:
        needs, possible = needs_of(package, target)
        version = "" if package.version == UNKNOWN_VERSION else package.version
        label = f"{package.name} {version}".strip()
        if package.source in question.sources:  # the project's own code, or a repository
            label = f"{label} ({package.source})" if label else package.source
        lines.append(f"{label}: {'needs ' + ', '.join(needs) if needs else 'pure Python'}")
        if not possible:
            impossible.append(package.name)
        requires = package.project.dependencies or () if package.project else ()
        build = package.project.requires if package.project else ()
        rows.append(
            UnbuiltPackageRow(
                name=package.name,
                version=version,
                source=package.source,
                needs=needs,
                possible=possible,
                requires=sorted({canonicalize_name(Requirement(need).name) for need in (*requires, *build)}),
                named=package.name in named or package.source in question.sources,
            )
        )
    count = "1 package" if len(rows) == 1 else f"{len(rows)} packages"
    hint = f"run imagefactory lock {target.name} --build"
    if impossible:
        hint = (
            f"{' and '.join(impossible)} cannot be built for {target.name}: remove it from the recipe, "
            f"or write the path of your own wheel (./wheels/NAME.whl); then {hint}"
        )
    return UnbuiltError(
        "source-build-required",
        f"{target.name}: {count} must be built from source first:\n  " + "\n  ".join(lines),
        packages=tuple(rows),
        hint=hint,
        pins=pins,
    )
