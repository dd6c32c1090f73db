"""Plan a recipe for an environment file, and solve it.

The solver chooses values that the file does not set (framework, version, CUDA, Python). Recipes and hints are
solved before they are printed. draft.py writes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Protocol

from packaging.version import Version

from imagefactory.access import package_index, uv_locker
from imagefactory.actions.lock import (
    explain_error,
    has_wheels,
    impossible,
    read_needs,
    read_releases,
    solve_target,
    unknown_debian_packages,
)
from imagefactory.actions.locked import require_lock
from imagefactory.errors import (
    ImagefactoryError,
    LockError,
    ToolError,
    UnbuiltError,
    UnreachableError,
    UnsolvableError,
    UsageError,
)
from imagefactory.extras.importers.draft import (
    DraftRequest,
    IndexRows,
    base_for,
    draft,
    draft_on,
    index_rows,
    python_candidates,
    target_conflicts,
)
from imagefactory.extras.importers.environments import ReadOptions, read_environment_file
from imagefactory.extras.importers.framework_row import (
    FrameworkRow,
    exact_pins,
    find_framework,
    first_framework,
    named_framework,
    pypi_name,
)
from imagefactory.extras.importers.image_parts import lose_debian
from imagefactory.extras.importers.setup_files import add_needs
from imagefactory.extras.importers.spec import EnvironmentSpec, minor_python
from imagefactory.gpu.drivers import cuda_floor
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.outdated import PypiRelease
from imagefactory.lock.pypi.series import cuda_of, first_series_after
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import BaseSpec, Lock, SourceLocation, Target
from imagefactory.progress import Progress
from imagefactory.project import PROJECT_DIRECTORIES, Project
from imagefactory.recipes.bases import all_bases
from imagefactory.recipes.edit import FRAMEWORKS, ImageChoice, RecipeDraft, check_draft
from imagefactory.recipes.read import read_bases, read_each
from imagefactory.recipes.values import RULES, within
from imagefactory.settings.files import FILE_NAME
from imagefactory.versions import natural

_TARGETS, _TRIALS, _OLDER = 3, 8, 8
"""The limits of targets in a hint, of targets solved for a hint, and of older releases tested."""
_PAGES, _AGE = 40, timedelta(days=60)
"""The limit of pins whose upload dates are queried, and how much later a framework's series may start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRequest:
    """The user's request.

    Empty values mean that the file or the solver decides. `on` is the target to extend.
    """

    family: str
    file: Path
    on: str = ""
    framework: str = ""
    version: str = ""
    cuda: str = ""
    source: str = ""
    environment: str = ""
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    context: Path | None = None
    build_args: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """A recipe that can be written. `unsolved` is the reason why it was not solved, empty if it was.

    `without_wheel` are packages that must be built first. `check` raises RecipeError if the recipe conflicts
    with others.
    """

    draft: RecipeDraft
    check: Callable[[], object]
    why: tuple[str, ...] = ()
    unsolved: str = ""
    without_wheel: tuple[str, ...] = ()


class RecipeSolver(Protocol):
    """A solver that queries the package index and the channels."""

    def solve(self, target: Target, base: BaseSpec, under: Lock | None) -> Mapping[str, str]:
        """Return the versions of a target's packages by name, as a lock would have them. Raises LockError."""

    def declared(self, target: Target, base: BaseSpec) -> Mapping[str, str]:
        """Return the versions from the packages' metadata, without builds. Raises LockError, NoWheelError."""

    def explain(self, target: Target, base: BaseSpec, error: LockError) -> LockError:
        """Return the error of a target with the conflicting requirements that the solver can find."""

    def needs(self, target: Target, base: BaseSpec, pin: str) -> Sequence[str]:
        """Return Requires-Dist of a release. Raises LockError."""

    def releases(
        self, target: Target, base: BaseSpec, names: Sequence[str]
    ) -> Mapping[str, Sequence[PypiRelease]]:
        """Return the releases of projects, the oldest first, with their upload dates if the index has
        them.
        """

    def has_wheels(self, target: Target, base: BaseSpec, pin: str) -> bool:
        """Return whether the release of a pin has a wheel for any Python version. Raises LockError."""

    def impossible(self, target: Target, base: BaseSpec) -> Sequence[str]:
        """Return the packages whose bounds allow only releases that this Python version cannot install or
        build.
        """

    def unknown_system(self, base: BaseSpec, names: Sequence[str]) -> Sequence[str]:
        """Return the names that do not exist in the archive of a base, none if it is unreachable."""


@dataclass(frozen=True, kw_only=True)
class IndexSolver:
    """The solver of the command `lock`."""

    factory: Project
    progress: Progress
    _system: dict[tuple[str, ...], Sequence[str]] = field(default_factory=dict)

    @cached_property
    def _locker(self) -> UvLocker:
        return uv_locker(package_index(self.factory))

    def solve(self, target: Target, base: BaseSpec, under: Lock | None) -> Mapping[str, str]:
        return solve_target(self.factory, target, base, self.progress, under=under, locker=self._locker)

    def declared(self, target: Target, base: BaseSpec) -> Mapping[str, str]:
        return solve_target(self.factory, target, base, self.progress, declared=True, locker=self._locker)

    def explain(self, target: Target, base: BaseSpec, error: LockError) -> LockError:
        return explain_error(self.factory, target, base, error)

    def needs(self, target: Target, base: BaseSpec, pin: str) -> Sequence[str]:
        return read_needs(self.factory, target, base, pin)

    def releases(
        self, target: Target, base: BaseSpec, names: Sequence[str]
    ) -> Mapping[str, Sequence[PypiRelease]]:
        return read_releases(self._locker, target, base, names)

    def has_wheels(self, target: Target, base: BaseSpec, pin: str) -> bool:
        return has_wheels(self._locker, target, base, pin)

    def impossible(self, target: Target, base: BaseSpec) -> Sequence[str]:
        return impossible(self._locker, target, base)

    def unknown_system(self, base: BaseSpec, names: Sequence[str]) -> Sequence[str]:
        key = (base.name, *names)
        if key not in self._system:
            try:
                self._system[key] = unknown_debian_packages(self.factory, base, names, self.progress)
            except (LockError, ToolError) as error:
                self.progress.note(f"the names of Debian packages were not checked: {error.message}")
                self._system[key] = ()
        return self._system[key]


def plan_recipe(
    factory: Project, request: RecipeRequest, solver: RecipeSolver, progress: Progress
) -> RecipePlan:
    """Return the plan of a recipe for a file. The recipe may extend a target.

    Requests in the file that a recipe cannot contain are in `lost` of its draft. They are printed even if
    there is an error. Raises UsageError, RecipeError, UnsolvableError.
    """
    planner = _RecipePlanner(factory, request, solver)
    try:
        return planner.on_target() if request.on else planner.of_its_own()
    except ImagefactoryError:
        for label, lines in (("note", planner.notes), ("lost", planner.lost)):
            for line in lines:
                progress.note(f"{label}: {line}")
        raise


class _RecipePlanner:
    """A planner of one request. Without `hints` it is a trial, and starts no other trials."""

    def __init__(
        self, factory: Project, request: RecipeRequest, solver: RecipeSolver, *, hints: bool = True
    ) -> None:
        directory = factory.settings.root_path / "recipes"
        self._factory, self._request, self._solver = factory, request, solver
        self._recipes = [recipe for recipe in read_each(directory)[0] if recipe.family != request.family]
        self._bases = read_bases(directory)
        self._hints, self._reached = hints, True
        self._targets: dict[str, tuple[Target, BaseSpec]] = {}
        self._sourced: bool | None = None
        self._age: _PinAge | None = None
        self._ages: dict[str, _PinAge | None] = {}
        self.notes: list[str] = []
        self.lost: list[str] = []

    # --- on a target ---

    def on_target(self) -> RecipePlan:
        request = self._request
        below = self._factory.select_single(request.on)
        spec = self._read(below.python)
        drafted = draft_on(spec, request.family, below)
        lock, reason = self._lock_of(below)
        versions = {wheel.name: wheel.version for wheel in lock.wheels} if lock else {}
        if conflicts := target_conflicts(spec, below, versions):
            raise UsageError(
                "target-conflict",
                f"{spec.file} asks for {'; and for '.join(conflicts)}",
                hint=self._other_ways(spec) or "omit --extends, to solve a recipe without the target",
            )
        if lock is None:
            return self._unsolved(drafted, reason)
        try:
            return self._solved(drafted, under=lock, base=self._factory.base_of(below))
        except UnsolvableError as error:
            error.hint = self._other_ways(spec) or error.hint
            raise

    def _lock_of(self, target: Target) -> tuple[Lock | None, str]:
        try:
            return require_lock(self._factory, target), ""
        except ImagefactoryError as error:
            return None, error.message

    # --- with a framework of its own ---

    def of_its_own(self) -> RecipePlan:
        spec, request = self._read(""), self._request
        framework, source = named_framework(spec, request.framework, request.source)
        if source != "pypi":
            try:
                drafted = draft(spec, self._draft_request(), self._bases)
            except UsageError as error:
                error.hint = "; or ".join(filter(None, (error.hint, self._other_ways(spec, "conda"))))
                raise
            return self._solved(drafted)
        try:
            return self._choose(spec, framework)
        except UnreachableError as error:
            drafted = draft(spec, self._draft_request(), self._bases, [f"not solved: {error.message}"])
            return self._unsolved(drafted, error.message)

    def _draft_request(self, choice: ImageChoice | None = None) -> DraftRequest:
        """Return the user's request, completed with the solver's choice for a recipe from PyPI."""
        request = self._request
        draft_request = DraftRequest(
            family=request.family,
            framework=request.framework,
            version=request.version,
            cuda=request.cuda,
            source=request.source,
            indexes=self._factory.settings.index_map,
        )
        return replace(draft_request, source="pypi", **asdict(choice)) if choice else draft_request

    def _choose(
        self, spec: EnvironmentSpec, framework: str, failed: Mapping[str, LockError] | None = None
    ) -> RecipePlan:
        """Return the plan for the first Python version on which all packages have wheels and a solution.

        If the file pins old packages but does not set the framework's version, a framework of that time is
        tried first. `failed` are the errors of solving only wheels, by Python version, if known.
        """
        request = self._request
        row = FrameworkRow(framework=framework, source="pypi", spec=spec)
        if framework and request.version and not row.allows(request.version):
            row.reject_version(request.version)
        if framework:
            self._reject_builds(spec, row)
        self._age = self._age_of(spec, row)
        if self._age:
            try:
                return self._within(spec, framework, self._age.below, failed)
            except (UnsolvableError, NoWheelError):
                self._age = None
        return self._within(spec, framework, "", failed)

    def _reject_builds(self, spec: EnvironmentSpec, row: FrameworkRow) -> None:
        """Raise UsageError if the file requires a build that PyPI does not have, and the user sets no CUDA
        version.
        """
        request, framework = self._request, row.framework
        if request.cuda:
            return
        row.reject_rocm()
        elsewhere, version = self._elsewhere(spec), request.version or row.version
        wrong = "" if framework in elsewhere.rows else row.other_build(version)
        if wrong:
            index = elsewhere.missing.get(framework, "")
            hint = self._other_builds(spec, row, index)
            if not self._reached:
                row.reject_other_build(version, index=index)
            raise UsageError("framework-conflict", wrong, hint=hint)

    def _within(
        self, spec: EnvironmentSpec, framework: str, below: str, without: Mapping[str, LockError] | None
    ) -> RecipePlan:
        """Return the plan with a framework older than `below`.

        `without` are errors of solving only wheels.
        """
        first, others = python_candidates(spec.python, self._bases)
        if not first and not others:
            raise UsageError(
                "python-not-supported",
                f"{spec.file} requires Python {spec.python}, but images support 3.9 to 3.14",
                hint="change its Python bounds, for example to >=3.11",
            )
        failed, built = dict(without or {}), list[RecipePlan]()
        for trial in self._tried(spec, framework, below, failed, (first, others)) if without is None else ():
            if other := self._other_question(spec, framework, trial):
                return self._choose(spec, other)
            try:
                plan = self._settle(trial)
                if len(plan.without_wheel) <= len(trial.spec.sources):
                    return plan
                built.append(plan)  # with known needs: another base's Python may have all wheels
            except (UnsolvableError, NoWheelError) as error:
                failed[trial.python] = error
        if built:
            return min(built, key=lambda plan: len(plan.without_wheel))
        if best := self._unbuilt(failed, framework, below):
            if other := self._other_question(spec, framework, best):
                return self._choose(spec, other, failed)
            return self._settle(best)
        raise self._unsolvable(spec, failed)

    def _tried(
        self,
        spec: EnvironmentSpec,
        framework: str,
        below: str,
        failed: Mapping[str, LockError],
        pythons: tuple[Sequence[str], Sequence[str]],
    ) -> Iterator[_PythonTrial]:
        """Yield a trial with only wheels for each Python version: those of the bases in order, then others in
        parallel.

        `failed` has the trials without a decision. Other versions are tried only if all versions of bases
        failed, and if each package has wheels for some version, or one cannot even be built on those of the
        bases.
        """
        first, others = pythons
        for python in first:
            yield self._try(python, framework, below=below)
        if failed.keys() >= set(first) and (
            all(self._solver.impossible(*self._targets[python]) for python in first)
            or not self._only_sources(spec, [failed[python] for python in first])
        ):
            with ThreadPoolExecutor(2) as pool:
                waiting = [pool.submit(self._try, python, framework, below=below) for python in others]
                try:
                    yield from (trial.result() for trial in waiting)
                finally:
                    pool.shutdown(cancel_futures=True)

    def _other_question(self, spec: EnvironmentSpec, framework: str, trial: _PythonTrial) -> str:
        """Return the framework that a trial found, if the file bounds its version.

        Raises UsageError if the file requires a build that PyPI does not have.
        """
        other = "" if framework else first_framework(_names(spec), trial.versions)
        if not other:
            return ""
        row = FrameworkRow(framework=other, source="pypi", spec=spec)
        self._reject_builds(spec, row)
        return other if self._age_of(spec, row) or self._own_bounds(row) else ""

    def _own_bounds(self, row: FrameworkRow) -> list[str]:
        """Return the bounds on the framework: the user's version, and the CUDA version in the file."""
        request, framework = self._request, row.framework
        bounds = [f"{framework}=={request.version}.*"] if request.version else []
        cuda = request.cuda or row.explicit_cuda() or row.cuda_in_package_name()[1]
        cuda = "" if framework in self._elsewhere(row.spec).rows else cuda
        if cuda and not (request.version or row.version) and (within := row.range_with(cuda)):
            bounds.append(f"{framework}{within}")
        return bounds

    def _age_of(self, spec: EnvironmentSpec, row: FrameworkRow) -> _PinAge | None:
        """Return the age of the pins in a file, if it does not pin a framework that has newer series."""
        if not row.framework or self._request.version or row.version:
            return None
        if row.framework not in self._ages:
            self._ages[row.framework] = self._find_age(spec, row)
        return self._ages[row.framework]

    def _find_age(self, spec: EnvironmentSpec, row: FrameworkRow) -> _PinAge | None:
        elsewhere = self._elsewhere(spec).rows
        pins = exact_pins(spec.index_requirements)
        names = [name for name in pins if name not in elsewhere][:_PAGES]
        if not names or 2 * len(pins) < len(_names(spec)) or row.framework in elsewhere:
            return None
        base = base_for("", self._bases)
        target = _open_target(self._request.family, base.python, base, (), ())
        known = self._solver.releases(target, base, (row.framework, *names))
        days = [
            release.uploaded
            for name in names
            for release in known.get(name, ())
            if release.uploaded and within(f"=={pins[name]}", str(release.version))
        ]
        if not days:
            return None
        newest, series = max(days), known.get(row.framework, ())
        below = first_series_after(series, newest + _AGE)
        if not below or not any(
            row.allows(str(release.version)) for release in series if release.version >= Version(below)
        ):
            return None
        return _PinAge(below=below, day=newest)

    def _try(self, python: str, framework: str, *, below: str = "", sources: bool = False) -> _PythonTrial:
        """Solve the packages of the file with any framework version older than `below`.

        With `sources`, packages without wheels are solved too, from the metadata of their sources.
        """
        request, spec = self._request, self._read(python)
        requirements = spec.index_requirements
        bounds = list(spec.constraints)
        row, elsewhere = FrameworkRow(framework=framework, source="pypi", spec=spec), self._elsewhere(spec)
        if framework:
            requirements += [framework] if framework not in map(pypi_name, requirements) else []
            bounds += [*self._own_bounds(row), *([f"{framework}<{below}"] if below else [])]
        base = base_for(python, self._bases)
        target = _open_target(request.family, python, base, requirements, bounds)
        target = replace(target, origins=tuple(sorted(elsewhere.rows.items())), sources=tuple(spec.sources))
        trial = _PythonTrial(python=python, spec=spec, sources=sources)
        self._targets[python] = target, base
        try:
            if sources:
                return replace(trial, versions=self._solver.solve(target, base, None))
            return replace(trial, versions=self._solver.declared(target, base))
        except UnbuiltError as error:
            unbuilt = {str(package["name"]): str(package["version"]) for package in error.packages}
            pins: dict[str, str] = dict(line.split("==", 1) for line in error.pins)
            return replace(trial, versions=pins | unbuilt, unbuilt=tuple(unbuilt))
        except LockError as error:
            return replace(trial, error=error)

    def _settle(self, trial: _PythonTrial) -> RecipePlan:
        """Return the recipe of a trial, solved like a lock, with an older release if necessary."""
        first: LockError | None = None
        for _ in range(_OLDER):
            if trial.error:
                raise first or trial.error
            row, version, chosen = self._version(trial)
            cudas = self._cudas(row, version, trial)
            for cuda in cudas:
                try:
                    return self._written(row, version, cuda, trial, chosen=chosen or len(cudas) > 1)
                except UnsolvableError as error:
                    first = first or error
            if not chosen:
                break
            series = ".".join(version.split(".")[:2])
            trial = self._try(trial.python, row.framework, below=series, sources=trial.sources)
        raise first or LockError(
            "nothing-solved",
            f"no version of the framework in {trial.spec.file} has a solution",
            hint="set a version: --framework NAME=VERSION --cuda VERSION",
        )

    def _version(self, trial: _PythonTrial) -> tuple[FrameworkRow, str, bool]:
        """Return the framework, its version in the recipe, and whether the solver chose the version."""
        request, spec = self._request, trial.spec
        if request.framework:
            framework = find_framework(spec, request.framework, "pypi")[0]
        else:
            framework = first_framework(_names(spec), trial.versions)
        if not framework:
            raise UsageError(
                "framework-missing",
                f"neither {spec.file} nor the dependencies of its packages contain a known GPU framework",
                hint=self._optional(spec)
                or self._other_ways(spec)
                or "name the package that uses the GPU: --framework NAME --cuda VERSION",
            )
        row = FrameworkRow(framework=framework, source="pypi", spec=spec)
        if pinned := request.version or row.version:
            if not row.allows(pinned):
                row.reject_version(pinned)
            if row.covers(pinned):
                return row, pinned, False
        solved = trial.versions.get(framework, "").partition("+")[0].partition(".post")[0]
        if not RULES["version"].allows(solved):
            raise UsageError(
                "framework-version-invalid",
                f"{spec.file} requires {framework} {solved}, but a recipe row cannot contain that version",
                hint=f"write a release of {framework} in the file, such as {framework}==2.3",
            )
        return row, solved, True

    def _cudas(self, row: FrameworkRow, version: str, trial: _PythonTrial) -> tuple[str, ...]:
        """Return the CUDA versions to try, the newest first. Raises UsageError if none is known."""
        named = row.framework in self._elsewhere(trial.spec).rows
        if cuda := self._request.cuda or (row.explicit_cuda() if named else row.cuda(version)):
            return (cuda,)
        if offers := row.offers(version):
            return tuple(reversed(offers))
        base = base_for(trial.python, self._bases)
        target = _open_target(self._request.family, trial.python, base, (), ())
        pin = f"{row.framework}=={trial.versions.get(row.framework, version)}"
        if cuda := cuda_of(self._solver.needs(target, base, pin)):
            return (cuda,)
        raise self._without_cuda(row, version)

    def _without_cuda(self, row: FrameworkRow, version: str) -> UsageError:
        """Return the error for a release without CUDA on PyPI."""
        conda, released = row.conda_name(), row.released_for(version)
        if not conda or not released or not self._hints:
            return row.ask(version, "")
        request = self._request
        other = replace(request, source="conda", framework=conda, version=version, cuda=released[0])
        try:
            _RecipePlanner(self._factory, other, self._solver, hints=False).of_its_own()
        except ImagefactoryError:
            hint = f"allow a release that has CUDA on PyPI, such as {row.framework} {row.newest}"
        else:
            hint = f"use the conda package: --source conda --framework {conda}={version} --cuda {released[0]}"
        message = f"{row.spec.file} requires {row.framework} {version}, but PyPI has it only without CUDA"
        return UsageError("cuda-not-on-pypi", message, hint=hint)

    def _written(
        self, row: FrameworkRow, version: str, cuda: str, trial: _PythonTrial, *, chosen: bool
    ) -> RecipePlan:
        choice = ImageChoice(framework=row.framework, version=version, cuda=cuda, python=trial.python)
        reason = tuple(_reasons(trial.spec, choice, chosen=chosen, age=self._age))
        return self._solved(
            draft(trial.spec, self._draft_request(choice), self._bases, reason), reason=reason
        )

    def _only_sources(self, spec: EnvironmentSpec, errors: Sequence[LockError]) -> bool:
        """Return whether a package without wheels for some Python versions has none for the others either.

        A package counts if the file names it, for the pinned release, or if all Python versions lack it.
        """
        if self._sourced is None:
            names = [set(error.names) if isinstance(error, NoWheelError) else set() for error in errors]
            pins, named = exact_pins(spec.pip), _names(spec)
            base = base_for("", self._bases)
            target = _open_target(self._request.family, base.python, base, (), ())
            common = set.intersection(*names) if names else set()
            requirements = [
                f"{name}=={pins[name]}" if name in pins else name
                for name in sorted(common.union(*names))
                if name in common or name in named
            ]
            self._sourced = not all(self._solver.has_wheels(target, base, error) for error in requirements)
        return self._sourced

    def _unbuilt(self, failed: dict[str, LockError], framework: str, below: str) -> _PythonTrial | None:
        """Return the trial with the fewest packages to build, for the Python versions without some wheel.

        If there is none, the errors are added to `failed`.
        """
        pythons = [python for python, error in failed.items() if isinstance(error, NoWheelError)]
        carried = {base.python for base in self._bases}

        def trial_on(python: str) -> _PythonTrial:
            # A search with sources takes long, and it cannot help here.
            if self._solver.impossible(*self._targets[python]):
                return _PythonTrial(python=python, spec=self._read(python), error=failed[python])
            return self._try(python, framework, below=below, sources=True)

        for some in (carried.intersection(pythons), set(pythons) - carried):
            tried = [trial for trial in pythons if trial in some]
            trials = [trial_on(trial) for trial in tried[:1]]
            if trials and not trials[0].error and not self._has_wheels_elsewhere(trials[0]):
                return trials[0]
            with ThreadPoolExecutor(2) as pool:
                trials += pool.map(trial_on, tried[1:])
            if solved := [trial for trial in trials if trial.error is None]:
                return min(solved, key=lambda trial: len(trial.unbuilt))
            failed |= {trial.python: trial.error for trial in trials if trial.error}
        return None

    def _has_wheels_elsewhere(self, trial: _PythonTrial) -> bool:
        """Return whether another Python version may have a wheel of a package that this one must build."""
        pins = [f"{name}=={trial.versions[name]}" for name in trial.unbuilt if trial.versions[name]]
        target, base = self._targets[trial.python]
        return any(self._solver.has_wheels(target, base, pin) for pin in pins)

    # --- what all recipes share ---

    def _read(self, python: str) -> EnvironmentSpec:
        """Read the file, with markers for that Python version. Raises UsageError if no package remains."""
        request = self._request
        carried = tuple(base.python for base in self._bases if base.python) or ("3.12",)
        reading = ReadOptions(
            pythons=(python,) if python else carried,
            environment=request.environment,
            extras=request.extras,
            groups=request.groups,
            root=self._factory.settings.root_path,
            reserved=(*PROJECT_DIRECTORIES, FILE_NAME),
            build_context=request.context,
            build_args=request.build_args,
        )
        spec = read_environment_file(request.file, reading)
        empty = not (spec.conda or spec.pip or spec.sources or spec.parts.debian)
        self.notes, self.lost = ([], [*spec.lost, *spec.notes]) if empty else (spec.notes, spec.lost)
        if names := tuple(spec.parts.debian):
            base = base_for(python, self._bases)
            lose_debian(spec, self._solver.unknown_system(base, names), base.suite)
        if empty:
            raise UsageError(
                "no-packages-found",
                f"{spec.file} has no package for a recipe",
                hint="pass the file that lists the packages; add your own code with `files:` in a recipe "
                f"on a target (imagefactory recipe new {request.family} --extends TARGET, docs/recipes.md)",
            )
        add_needs(spec, self._factory.settings.root_path)
        return spec

    def _elsewhere(self, spec: EnvironmentSpec) -> IndexRows:
        """Return the packages for which the settings name another index."""
        return index_rows(spec, dict(self._factory.settings.index_map))

    def _expand(self, drafted: RecipeDraft) -> tuple[Target, ...]:
        bases = all_bases(self._bases, self._recipes)
        return check_draft(drafted.text, self._request.family, self._recipes, bases)

    def _unsolved(self, drafted: RecipeDraft, reason: str) -> RecipePlan:
        notes = (*drafted.notes, f"not solved: {reason}") if reason else drafted.notes
        return RecipePlan(
            draft=replace(drafted, notes=notes), check=lambda: self._expand(drafted), unsolved=reason
        )

    def _solved(
        self,
        drafted: RecipeDraft,
        *,
        under: Lock | None = None,
        base: BaseSpec | None = None,
        reason: Sequence[str] = (),
    ) -> RecipePlan:
        """Return the plan of a draft whose targets were solved.

        Raises UnsolvableError if they cannot be solved.

        Packages without wheels are not an error: `lock --build` builds them.
        """
        plan = RecipePlan(draft=drafted, check=lambda: self._expand(drafted), why=tuple(reason))
        try:
            targets = self._expand(drafted)
        except ImagefactoryError:  # the draft is printed with its faults
            return plan
        for target in targets:
            try:
                self._solver.solve(target, base or base_for(target.python, self._bases), under)
            except UnbuiltError as error:
                names = tuple(str(package["name"] or package["source"]) for package in error.packages)
                notes = (*drafted.notes, f"built from source by `lock --build`: {', '.join(names)}")
                return replace(plan, draft=replace(drafted, notes=notes), without_wheel=names)
            except UnreachableError as error:
                return replace(self._unsolved(drafted, error.message), why=tuple(reason))
        return plan

    # --- hints, each solved before it is made ---

    def _other_ways(self, spec: EnvironmentSpec, source: str = "pypi") -> str:
        """Return other targets that fit, or the options of another recipe with a solution.

        Empty if there are none.
        """
        if not self._hints:
            return ""
        fitting = [f"--extends {name}" for name in self._fitting(spec, source=source)]
        ways = [f"build it on a target that fits: {' or '.join(fitting)}"] if fitting else []
        request = self._request
        options = {"--extends": request.on, "--framework": request.framework, "--cuda": request.cuda}
        used = [name for name, value in options.items() if value]
        below = next((target.framework for target in self._factory.targets if target.name == request.on), "")
        framework = request.framework or FRAMEWORKS.get(below, below)
        alternative = replace(request, on="", framework=framework, version="", cuda="")
        if used and (choice := self._choice(alternative)):
            what = f"--framework {choice.framework}={choice.version} --cuda {choice.cuda}"
            ways.append(f"write a recipe of its own: {what}, in place of {' and '.join(used)}")
        return "; or ".join(ways)

    def _optional(self, spec: EnvironmentSpec) -> str:
        """Return the extra or group in the file that adds a framework, if its packages can be solved."""
        for kind, name in spec.frameworks if self._hints else ():
            request = self._request
            extra = kind == "extra"
            more = replace(request, extras=(*request.extras, name)) if extra else None
            if self._choice(more or replace(request, groups=(*request.groups, name))):
                return f"--{kind} {name}"
        return ""

    def _choice(self, request: RecipeRequest) -> ImageChoice | None:
        """Return the choice for a request, if its recipe can be solved."""
        try:
            plan = _RecipePlanner(self._factory, request, self._solver, hints=False).of_its_own()
            plan.check()
        except ImagefactoryError:
            return None
        self._reached = self._reached and not (plan.unsolved and request.source != "conda")
        return None if plan.unsolved else plan.draft.choice

    def _other_builds(self, spec: EnvironmentSpec, row: FrameworkRow, index: str) -> str:
        """Return the alternatives to a build that PyPI does not have."""
        cuda_meant, version = row.required_cuda(), self._request.version or row.version
        newest = version or "".join(row.known()[-1:])
        ways = []
        for cuda in reversed(row.offers(newest) if self._hints else ()):
            if self._choice(replace(self._request, cuda=cuda)):
                ways.append(f"use the build on PyPI: --cuda {cuda}")
                break
        if cuda_meant != "cpu" and self._hints:
            fitting = [f"--extends {name}" for name in self._fitting(spec, cuda=cuda_meant)]
            ways += [f"build on a target that has it: {' or '.join(fitting)}"] if fitting else []
            ways += [f"use that build: {index}, and run this command again"] if index else []
            conda = row.conda_name()
            other = replace(self._request, source="conda", framework=conda, version=version, cuda=cuda_meant)
            if version and conda and self._choice(other):
                ways.append(
                    f"use the conda package: --source conda --framework {conda}={version} --cuda {cuda_meant}"
                )
        return "; or ".join(ways) or "choose a CUDA version: --cuda VERSION"

    def _fitting(self, spec: EnvironmentSpec, *, cuda: str = "", source: str = "pypi") -> Iterator[str]:
        """Yield the targets on which the packages of the file can be solved, the best first."""
        request, tried, count = self._request, 0, 0
        below = next((row.framework for row in self._factory.targets if row.name == request.on), "")
        named = request.framework or first_framework(_names(spec)) or below
        named = named or named_framework(spec, "", source)[0]
        framework = FRAMEWORKS.get(named, named)
        for target in _ranked(self._factory.targets, source):
            other = framework and FRAMEWORKS.get(target.framework, target.framework) != framework
            if other or (cuda and target.cuda not in (cuda, cuda.partition(".")[0])):
                continue
            lock, _ = self._lock_of(target)
            versions = {wheel.name: wheel.version for wheel in lock.wheels} if lock else {}
            contents = self._read(target.python)
            if lock is None or target_conflicts(contents, target, versions):
                continue
            if tried == _TRIALS or count == _TARGETS:
                return
            tried += 1
            drafted = draft_on(contents, request.family, target)
            if len(drafted.lost) > len(contents.lost):
                continue
            try:
                for expanded in self._expand(drafted):
                    self._solver.solve(expanded, self._factory.base_of(target), lock)
            except ImagefactoryError:
                continue
            count += 1
            yield target.name

    def _unsolvable(self, spec: EnvironmentSpec, failed: Mapping[str, LockError]) -> LockError:
        """Return the solver's error for the Python version of the first base, or else for any version."""
        usual = [base.python for base in self._bases if base.python in failed]
        order = [*usual, *failed]
        python = next((python for python in order if isinstance(failed[python], UnsolvableError)), order[0])
        error = failed[python]
        if python in self._targets:
            error = self._solver.explain(*self._targets[python], error)
        text = error.message.removeprefix(f"{self._request.family}: ")
        tried = ", ".join(sorted(failed, key=natural))
        elsewhere = "; ".join(f"for {name}, {do}" for name, do in self._elsewhere(spec).missing.items())
        hint = elsewhere or f"change the versions of these packages in {spec.file}"
        if error.hint != failed[python].hint:  # a change that has a solution
            hint = error.hint
        if isinstance(error, NoWheelError):
            hint = error.hint
        return UnsolvableError(
            "packages-conflict",
            f"the packages of {spec.file} conflict on each tested Python version ({tried}); on "
            f"{python}: {text}",
            hint=self._other_ways(spec) or hint,
            tree=error.tree if isinstance(error, UnsolvableError) else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PythonTrial:
    """The packages of the file on one Python version: solved, or the error. `unbuilt` have no wheels."""

    python: str
    spec: EnvironmentSpec
    versions: Mapping[str, str] = field(default_factory=dict)
    error: LockError | None = None
    sources: bool = False
    unbuilt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PinAge:
    """The age of the pins in a file: the `day` of the newest, and the framework's first series after it."""

    below: str
    day: date


def _open_target(
    family: str, python: str, base: BaseSpec, requirements: Iterable[str], constraints: Iterable[str]
) -> Target:
    """Return a target of plain packages, with no framework set."""
    return Target(
        name=family,
        family=family,
        description="",
        source="pypi",
        framework="",
        version="",
        cuda="",
        python=python,
        base=base.name,
        platform=base.platform,
        capabilities=(),
        checks=(),
        requirements=tuple(requirements),
        constraints=tuple(constraints),
        environment=(),
        where=SourceLocation(file="", line=1, column=1),
    )


def _names(spec: EnvironmentSpec) -> set[str]:
    """Return the PyPI packages that a file names."""
    return {pypi_name(text) for text in spec.pip}


def _reasons(
    spec: EnvironmentSpec, choice: ImageChoice, *, chosen: bool, age: _PinAge | None
) -> Iterator[str]:
    """Yield why a framework, its version, CUDA and Python were chosen, if the file does not set them."""
    direct = _names(spec)
    if choice.framework not in direct:
        yield f"{choice.framework} is what the packages of {spec.file} need"
    others = [name for name in ("torch", "tensorflow", "jax") if name in direct - {choice.framework}]
    if others and choice.framework in direct:
        yield f"{spec.file} names {' and '.join(others)} too: the image is for {choice.framework}"
    if age:
        yield (
            f"the pins of {spec.file} are of {age.day} and before: {choice.framework} is of that time, "
            f"older than {age.below} (for a newer one: --framework {choice.framework}=VERSION)"
        )
    beside, major = FrameworkRow(framework=choice.framework, source="pypi", spec=spec).cuda_in_package_name()
    if chosen and major == choice.cuda.partition(".")[0]:
        yield f"{beside} is for CUDA {major}: so is {choice.framework}"
    if chosen:
        driver = cuda_floor(choice.cuda).driver
        needs = f"; it needs driver {driver} or newer" if driver else ""
        yield f"{choice.framework} {choice.version} with CUDA {choice.cuda} is the newest that fits{needs}"
    if not minor_python(spec.python):
        yield f"Python {choice.python} was chosen: the first that all packages support"


def _ranked(targets: Iterable[Target], source: str) -> list[Target]:
    """Return the GPU targets of a source: first those that extend no other target, then the newest
    version.
    """
    usual = [row for row in targets if row.source == source and row.gpu and row.platform == "linux/amd64"]
    return sorted(usual, key=lambda row: (not row.on, natural(row.version), natural(row.cuda)), reverse=True)
