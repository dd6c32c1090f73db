"""Solve locks of conda packages with py-rattler in this process.

This module decides which packages change, by solving for one package after the other. A new lock keeps as
many packages as possible. An update changes the named packages and their dependencies.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from imagefactory.errors import LockError, UnsolvableError, redact
from imagefactory.gpu.capability import MACHINES
from imagefactory.gpu.knowledge import pypi_names
from imagefactory.http import HttpError, HttpSession
from imagefactory.lock import LockRequest, OutdatedPackage, PublisherReport, requirements_of
from imagefactory.lock.conda.channels import ChannelAccess
from imagefactory.lock.conda.explain import CudaBuild, cuda_builds, explain, find_behind_channels
from imagefactory.lock.conda.facts import split_spec
from imagefactory.lock.conda.solver import (
    CondaRequest,
    CondaSolver,
    NoSolutionError,
    Rank,
    first_question,
    name_of,
    rank,
    released_at,
    run,
)
from imagefactory.lock.files import check_facts
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.outdated import find_outdated
from imagefactory.lock.pypi.question import PinnedVersions, WheelRequest, origins_of
from imagefactory.lock.pypi.unbuilt import require_wheels, without, write_stub
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import (
    Lock,
    LockedCondaPackage,
    LockedPackage,
    LockedWheel,
    ReleaseCutoff,
    Target,
)
from imagefactory.progress import Progress, QuietProgress

if TYPE_CHECKING:
    from rattler import Gateway, RepoDataRecord


# uv sees each Python package of conda as an empty wheel, `numpy-1.26.4+given`, and a constraint that allows
# no other. The local version keeps the index's own files of that name out of the solution. PEP 440 ignores
# it where a requirement is about public versions, so `numpy<=1.26.4` is met.


_LOCAL = "+given"
_NO_DISTRIBUTION = frozenset({"python", "python_abi", "cpython", "python-abi3", "python-gil"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaDistribution:
    """A Python distribution in a conda package: `name` normalized as on PyPI, `version` by PEP 440.

    `extras` are the Requires-Dist of its extras, read only if something requires one.
    """

    name: str
    version: str
    conda: LockedCondaPackage
    extras: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}{_LOCAL}"


def lock_pip(
    request: LockRequest,
    conda: tuple[LockedCondaPackage, ...],
    locker: UvLocker,
    progress: Progress | None = None,
) -> tuple[LockedWheel, ...]:
    """Return the wheels of a target's pip part, sorted by name, without the packages of `conda`.

    The wheels of `request.under` stay. Those of `request.previous` are preferred, except the names in
    `request.update` (names of conda packages there are ignored). Raises UnsolvableError if the pip part
    contradicts conda packages or itself, LockError for a package without a fitting wheel, ToolError without
    uv.
    """
    provided = conda_distributions(conda)
    _check_not_replaced(request, provided)
    if not requirements_of(request.target, "pypi")[0]:
        return request.under.wheels if request.under else ()
    _check_conda_conflicts(request, provided)
    progress = progress or QuietProgress()
    with _solved(request, provided, locker, progress) as (question, pins):
        return locker.wheels(question, pins, progress)


def outdated_pip(
    request: LockRequest, lock: Lock, locker: UvLocker, progress: Progress
) -> tuple[OutdatedPackage, ...]:
    """Return the outdated wheels of `lock`, solved for `request`. Raises like `lock_pip`."""
    with _solved(request, conda_distributions(lock.conda), locker, QuietProgress()) as (question, _):
        return find_outdated(locker, question, lock.wheels, request.target.framework, progress)


@contextmanager
def _solved(
    request: LockRequest, provided: dict[str, CondaDistribution], locker: UvLocker, progress: Progress
) -> Iterator[tuple[WheelRequest, PinnedVersions]]:
    """Yield the request of the pip part and its solution, while stubs of conda packages exist."""
    target, previous = request.target, request.previous
    requirements, constraints = requirements_of(target, "pypi")
    # No wheel may require a newer C library than conda packages may.
    base = replace(request.base, glibc=_glibc(request))
    names = {wheel.name for wheel in previous.wheels} if previous else set()
    update = tuple(sorted(names & {canonicalize_name(name) for name in request.update}))
    question = locker.question(replace(request, base=base, update=update))
    platform = locker.platform(target, base.glibc)
    empty = replace(question.lock, content_hash="", solver="", platform=platform)
    question = replace(
        question,
        lock=empty,
        requirements=requirements,
        constraints=constraints,
        previous=replace(previous, platform=platform) if previous else None,
    )
    with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as directory:
        question = replace(
            question,
            given=tuple(package.pin for package in provided.values()),
            stubs=_write_stubs(Path(directory), provided),
        )
        try:
            with without(request.absent, question) as given_without:
                question, pins = require_wheels(locker, given_without, target, progress)
            while lacking := {
                name for name, _ in pins.lacking if name in provided and not provided[name].provides
            }:
                extras_by_name = {
                    name: [extra for of, extra in pins.lacking if of == name] for name in lacking
                }
                provided |= {
                    name: _with_extras(provided[name], extras_by_name[name], locker, empty)
                    for name in lacking
                }
                _write_stubs(Path(directory), {name: provided[name] for name in lacking})
                question, pins = require_wheels(locker, question, target, progress)
        except (UnsolvableError, NoWheelError) as error:
            reason = locker.explained(error, question, target)
            fix = reason.hint if reason.hint != error.hint else ""
            raise (
                _explain(reason, provided, fix) if isinstance(reason, UnsolvableError) else reason
            ) from error
        yield question, pins


def conda_distributions(conda: Iterable[LockedCondaPackage]) -> dict[str, CondaDistribution]:
    """Return the distributions in conda packages, by normalized name.

    A package counts as a Python package if it depends on Python. If two have one name, the part
    (`matplotlib-base`) is used, not the collection (`matplotlib`).
    """
    provided: dict[str, CondaDistribution] = {}
    names = pypi_names()
    for package in sorted(conda, key=lambda package: (package.name in names, package.name)):
        needs = {spec.split()[0] for spec in package.depends if spec.strip()}
        if package.name in _NO_DISTRIBUTION or not needs & {"python", "python_abi"}:
            continue
        version = _public(package.version)
        for name in names.get(package.name, (package.name,)):
            normal = canonicalize_name(name)
            provided[normal] = CondaDistribution(name=normal, version=version, conda=package)
    return provided


def _public(version: str) -> str:
    """Return a conda version by PEP 440 without a local part, else its leading numbers."""
    try:
        return Version(version.replace("_", ".")).public
    except InvalidVersion:
        numbers = re.match(r"\d+(?:\.\d+)*", version)
        return numbers[0] if numbers else "0"


def _check_conda_conflicts(request: LockRequest, provided: Mapping[str, CondaDistribution]) -> None:
    """Raise UnsolvableError for a PyPI requirement that conda provides in another version."""
    target = request.target
    for text in requirements_of(target, "pypi")[0]:
        need = Requirement(text)
        name = canonicalize_name(need.name)
        there = provided.get(name)
        if there and not need.specifier.contains(there.version, prereleases=True):
            spec = f"{there.conda.name} {need.specifier}"
            raise UnsolvableError(
                "pip-conda-conflict",
                f"{target.name}: pip requires '{text}', but conda installs {_label(there)}",
                hint=f"write '{spec}' in `packages`, so that conda installs another version, "
                f"or remove '{text}' from `pip` at {target.where}",
                tree=f"pip: {text}\nconda: {there.conda.filename}",
            )


def _check_not_replaced(request: LockRequest, provided: Mapping[str, CondaDistribution]) -> None:
    """Raise UnsolvableError if conda has a package that the parent has from PyPI."""
    parent_lock = request.under
    for wheel in parent_lock.wheels if parent_lock else ():
        if parent_lock and (there := provided.get(wheel.name)):
            raise UnsolvableError(
                "parent-package-conflict",
                f"{request.target.name}: conda would replace {wheel.name} {wheel.version}, which "
                f"{parent_lock.target} has from PyPI, by {_label(there)}",
                hint=f"move what needs it from `packages` to `pip` at {request.target.where}, "
                f"or write '{there.conda.name}' in `packages` of {parent_lock.target}",
                tree=f"{parent_lock.target}: {wheel.filename}\nconda: {there.conda.filename}",
            )


def _with_extras(
    package: CondaDistribution, requested: Iterable[str], locker: UvLocker, empty: Lock
) -> CondaDistribution:
    """Return the package with the needs of its extras, from the index's metadata of that version."""
    try:
        metadata, _ = parse_email(locker.metadata(f"{package.name}=={package.version}", empty))
    except LockError as error:
        extras = ", ".join(sorted(requested))
        raise LockError(
            "package-extras-unknown",
            f"{empty.target}: pip requires {package.name}[{extras}], conda installs "
            f"{_label(package)}, and "
            f"the needs of '{extras}' are unknown: {error.message.removeprefix(f'{empty.target}: ')}",
            hint=f"constrain {package.conda.name} in `packages` to a version that the package index also has",
        ) from error
    needs = [text for text in metadata.get("requires_dist", []) if re.search(r";.*\bextra\b", text)]
    return replace(
        package,
        extras=tuple(needs),
        # An extra that the package does not have is ignored, as everywhere.
        provides=tuple(sorted({*metadata.get("provides_extra", []), *requested})),
    )


def _write_stubs(directory: Path, provided: Mapping[str, CondaDistribution]) -> Path:
    """Write a wheel with only metadata for each package."""
    for package in provided.values():
        lines = [f"Provides-Extra: {extra}" for extra in package.provides]
        lines += [f"Requires-Dist: {need}" for need in package.extras]
        write_stub(directory, package.name, f"{package.version}{_LOCAL}", lines)
    return directory


def _label(package: CondaDistribution) -> str:
    return f"{package.conda.name} {package.conda.version}"


def _explain(error: UnsolvableError, provided: Mapping[str, CondaDistribution], fix: str) -> UnsolvableError:
    """Return uv's error with the real names of conda packages, and `fix` as its hint if set."""

    def plain(text: str) -> str:
        def called(match: re.Match[str]) -> str:
            package = provided.get(canonicalize_name(match[1]))
            return f"conda's {_label(package)}" if package else match[0]

        return re.sub(r"([A-Za-z0-9._-]+)==[^\s,]+?\+given", called, text)

    hint = "change the versions in `pip`, or those of conda's packages in `packages` and `constraints`"
    for package in provided.values():
        if package.pin not in error.tree:
            continue
        match = re.search(rf"(?<![\w.-]){re.escape(package.name)}([<>=!~][^\s+]*?)(?=,?\s|$)", error.tree)
        spec = f"{package.conda.name} {match[1]}" if match else f"another {package.conda.name}"
        hint = (
            f"write '{spec}' in `packages`, so that conda installs another version, "
            "or use another version of the packages in `pip` that require this one"
        )
        break
    else:
        hint = fix or hint
    return UnsolvableError(
        error.code, plain(error.message), hint=hint, tree=plain(error.tree), conflict=error.conflict
    )


class CondaLocker:
    """Solves conda packages with py-rattler, and PyPI packages on top of them with `pip()`.

    `cache` has the channels' records. A locker reads each channel's records once.
    """

    def __init__(self, channels: ChannelAccess, cache: Path, pip: Callable[[], UvLocker]) -> None:
        self._channels = channels
        self._cache = cache
        self._pip = lru_cache(pip)  # it reads each page of the index once

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        """Solve the lock of a target. Packages of the previous lock stay if possible.

        Raises UnsolvableError without a solution, LockError for unreadable channels, for records without a
        hash and for a solution that differs from the target's values, ToolError without py-rattler.
        """
        target, previous = request.target, request.previous
        update, update_wheels = _check_updates(request)
        conda = self.packages(request, progress, update)
        lock = Lock(
            target=target.name,
            content_hash=request.content_hash,
            python=target.python,
            platform=f"manylinux_{_glibc(request).replace('.', '_')}_{MACHINES[target.platform]}",
            solver=self._solver_name(),
            wheels=(),
            conda=conda,
            channels=target.channels,
            virtual=target.virtual,
            note=previous.note if previous else "",
            cutoff=request.cutoff,
        )
        if requirements_of(target, "pypi")[0] or (request.under and request.under.wheels):
            lock = self._with_wheels(lock, replace(request, update=update_wheels), progress)
        check_facts(lock, target)
        return lock

    def packages(
        self, request: LockRequest, progress: Progress, update: tuple[str, ...] = ()
    ) -> tuple[LockedCondaPackage, ...]:
        """Return the conda packages of a target's lock, sorted by name. Raises like `lock`."""
        previous = request.previous
        unchanged = previous is not None and previous.content_hash == request.content_hash
        conda = previous.conda if previous else ()
        if not unchanged or update or request.update_all or request.cutoff:
            with progress.task("solving", unit="packages") as task:
                moving = () if request.update_all else update
                conda = self._solve(request, moving, unchanged=unchanged)
                task.advance(len(conda))
            # A channel may correct its record of a package; the parent's packages stay as locked.
            below = {package.url: package for package in (request.under.conda if request.under else ())}
            conda = tuple(below.get(package.url, package) for package in conda)
        return conda

    def described(
        self, target: Target, packages: Sequence[LockedCondaPackage]
    ) -> tuple[LockedCondaPackage, ...]:
        """Return packages with the values of their channels' records, which have the same hash.

        A package that its channel no longer lists keeps its own values, if it has a sha256. Raises LockError
        for another hash, and for a package without a sha256 anywhere.
        """
        if not packages:
            return ()
        solver = self._solver(target)
        records = run(solver.records(sorted({package.name for package in packages})))
        by_url = {solver.true_address(record): record for record in records}
        described = []
        for package in packages:
            record = by_url.get(package.url)
            if record is None and not package.sha256:
                raise LockError(
                    "locked-file-gone",
                    f"{target.name}: the channels no longer have {package.filename}, and no sha256 is known",
                    hint="write the list again with sha256: conda list --explicit --sha256",
                )
            locked = solver.locked(record) if record else package
            if (package.sha256 or locked.sha256, package.md5 or locked.md5) != (
                locked.sha256,
                locked.md5 or package.md5,
            ):
                raise LockError(
                    "channel-file-changed",
                    f"{target.name}: the channel has another file under the name {package.filename}: "
                    f"expected {package.sha256 or package.md5}, found {locked.sha256}",
                    hint="do not use this file; ask the administrator of the channel why it changed",
                )
            described.append(self._sized(locked, target))
        return tuple(described)

    def behind(self, request: LockRequest, lock: Lock, progress: Progress) -> tuple[OutdatedPackage, ...]:
        """Return the outdated packages that the recipe names. Raises like `lock`."""
        requirements, _ = requirements_of(request.target, "conda")
        solver = self._solver(request.target, request)
        with progress.task("newest releases", total=len(requirements), unit="packages") as task:
            outdated = run(find_behind_channels(request.target, lock.conda, solver))
            task.advance(len(requirements))
        if not requirements_of(request.target, "pypi")[0]:
            return outdated
        return (*outdated, *outdated_pip(request, lock, self._pip(), progress))

    def addresses(self, lock: Lock) -> dict[str, str]:
        """Return the current URL of each locked file by file name. It may have a token or a password.

        Nothing is queried for conda packages: they are at their channel or its mirror. Raises LockError for
        a wheel that the index no longer has.
        """
        urls = {package.filename: self._channels.address(package.url) for package in lock.conda}
        if lock.wheels:
            urls |= self._pip().addresses(replace(lock, conda=()))
        return urls

    def _with_wheels(self, lock: Lock, request: LockRequest, progress: Progress) -> Lock:
        pip = self._pip()
        wheels = lock_pip(request, lock.conda, pip, progress)
        names = {wheel.name for wheel in wheels}
        origins = tuple(pair for pair in origins_of(request.target, request.under) if pair[0] in names)
        return replace(lock, wheels=wheels, origins=origins, solver=f"{lock.solver}, uv {pip.require()}")

    def _solve(
        self, request: LockRequest, update: tuple[str, ...], *, unchanged: bool
    ) -> tuple[LockedCondaPackage, ...]:
        solver = self._solver(request.target, request)
        records = run(_SolveLoop(request, solver).decide(update, unchanged=unchanged))
        solver.require_hashes(records)
        packages = sorted((solver.locked(record) for record in records), key=lambda package: package.name)
        return tuple(self._sized(package, request.target) for package in packages)

    def builds(self, target: Target, cutoff: ReleaseCutoff | None = None) -> tuple[CudaBuild, ...]:
        """Return the GPU builds of a target's framework in its channels. Raises LockError or ToolError."""
        return run(cuda_builds(target.framework, CondaSolver(target, self._channels, self._gateway, cutoff)))

    def uploads(self, packages: Sequence[LockedPackage], lock: Lock, target: Target) -> dict[str, datetime]:
        """Return the time of upload of packages by file name, where known. Raises LockError."""
        conda = [package for package in packages if isinstance(package, LockedCondaPackage)]
        wheels = [package for package in packages if isinstance(package, LockedWheel)]
        records = run(self._solver(target).find(conda)) if conda else {}
        times = {record.file_name: released_at(record) for record in records.values()}
        uploads = {name: time for name, time in times.items() if time}
        return uploads | (self._pip().uploads(wheels, lock, target) if wheels else {})

    def publishers(self, wheels: Sequence[LockedWheel], lock: Lock, progress: Progress) -> PublisherReport:
        """Return the publishers of wheels of `lock`, where their index attests them. Raises LockError."""
        return self._pip().publishers(wheels, replace(lock, conda=()), progress)

    @cached_property
    def _gateway(self) -> Gateway:
        return self._channels.gateway(self._cache)

    def _solver(self, target: Target, request: LockRequest | None = None) -> CondaSolver:
        below = request.under.conda if request and request.under else ()
        return CondaSolver(target, self._channels, self._gateway, request.cutoff if request else None, below)

    def _solver_name(self) -> str:
        import rattler

        return f"py-rattler {rattler.__version__}"

    def _sized(self, package: LockedCondaPackage, target: Target) -> LockedCondaPackage:
        if package.size:
            return package
        try:
            with HttpSession(self._channels) as web:
                return replace(package, size=web.size(self._channels.address(package.url)))
        except HttpError as error:
            raise LockError(
                "channel-read-failed",
                f"{target.name}: cannot read the size of {package.filename}: {redact(str(error))}",
                hint="run the same command again later",
            ) from error


def _check_updates(request: LockRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the conda packages and the wheels to update.

    Raises LockError for a name that is not in the previous lock or that must not change.
    """
    previous, target = request.previous, request.target
    conda = {package.name for package in previous.conda} if previous else set()
    wheels = {wheel.name for wheel in previous.wheels} if previous else set()
    below = {package.name for package in request.under.packages} if request.under else set()
    # `typing-extensions` is conda's `typing_extensions`, unless PyPI has a package with that name.
    called = {canonicalize_name(name): name for name in sorted(conda)}
    moving: dict[str, set[str]] = {"conda": set(), "wheels": set()}
    for name in request.update:
        normal = canonicalize_name(name)
        same = name.lower() if name.lower() in conda or normal in wheels else called.get(normal, "")
        names: dict[str, set[str]] = {"conda": conda & {same}, "wheels": wheels & {str(normal)}}
        if not any(names.values()):
            suggestion = difflib.get_close_matches(name.lower(), sorted(conda | wheels), n=1, cutoff=0.5)
            problem = "has no lock yet" if previous is None else f"has no package '{name}'"
            raise LockError(
                "update-package-unknown",
                f"cannot upgrade '{name}': {target.name} {problem}",
                hint=f"did you mean '{suggestion[0]}'?" if suggestion else f"imagefactory lock {target.name}",
            )
        if below & (names["conda"] | names["wheels"]):
            raise LockError(
                "package-from-parent",
                f"{target.name} is built on {target.on}, which has the package '{name}'",
                hint=f"run imagefactory lock {target.on} --upgrade-package {name}, then imagefactory lock "
                f"{target.name}",
            )
        moving = {kind: moving[kind] | names[kind] for kind in moving}
    return tuple(sorted(moving["conda"])), tuple(sorted(moving["wheels"]))


def _glibc(request: LockRequest) -> str:
    """Return the C library version for packages, as `2.36`."""
    return dict(request.target.virtual).get("__glibc", request.base.glibc)


class _SolveLoop:
    """Solves repeatedly until the records of a target's lock are known."""

    def __init__(self, request: LockRequest, solver: CondaSolver) -> None:
        self._request = request
        self._solver = solver
        self._question = first_question(request.target)
        self._free: set[str] = set()  # packages that updates may move besides themselves

    async def decide(self, update: tuple[str, ...], *, unchanged: bool) -> list[RepoDataRecord]:
        """Return the records of the new lock. With `unchanged` only the packages of `update` may change."""
        previous, parent_lock = self._request.previous, self._request.under
        below = parent_lock.conda if parent_lock else ()
        previous_packages = previous.conda if previous and not self._request.update_all else ()
        solver, packages = self._solver, (*previous_packages, *below)
        records = await solver.find(packages, any_age=True) if packages else {}
        self._refuse_gone(
            [package for package in below if package.url not in records], self._request.target.on
        )
        fixed = {package.name for package in below}
        stay = [package for package in previous_packages if package.name not in {*update, *fixed}]
        if unchanged:
            self._refuse_gone(
                [package for package in stay if package.url not in records], self._request.target.name
            )
        self._question = replace(
            self._question,
            specs=(
                *self._question.specs,
                *(f"{package.name} =={package.version} {package.build}" for package in below),
            ),
            pinned=tuple(records[package.url] for package in below),
            favoured=tuple(
                solver.released([records[package.url] for package in stay if package.url in records])
            ),
        )
        if update:
            await self._ask(self._question)  # raises for a request without any solution
        for name in update:
            old = records.get(next(package.url for package in previous_packages if package.name == name))
            allowed = solver.released([old] if old else [])
            self._question = await self._newest(name, allowed[0] if allowed else None)
        return await self._settle()

    def _refuse_gone(self, gone: Sequence[LockedCondaPackage], locked: str) -> None:
        if gone:
            files = ", ".join(package.filename for package in gone)
            raise LockError(
                "locked-file-gone",
                f"{self._request.target.name}: the channels no longer have the locked {files}",
                hint=f"run imagefactory lock {locked} "
                f"{' '.join(f'--upgrade-package {package.name}' for package in gone)}",
            )

    async def _newest(self, name: str, old: RepoDataRecord | None) -> CondaRequest:
        """Return the request that makes `name` as new as possible.

        At first only its dependencies may change with it. If that finds nothing newer, all others may change
        that need no older version.
        """
        question, favoured = self._question, self._question.favoured
        if not any(name_of(record) == name for record in await self._solver.solution(question)):
            return question  # nothing needs it any more
        newer = [step for step in await self._steps(name) if old is None or step.rank > rank(old)]
        widest = self._with_still(
            _dependency_closure((need for step in newer for need in step.depends), favoured)
        )
        most = await self._reach(widest, name, old)
        for step in newer:
            if most and step.rank <= most:
                free = _dependency_closure(step.depends, favoured)
                trial = self._with_still(free)
                if await self._solver.solution(replace(trial, specs=(*trial.specs, step.spec))):
                    self._free |= free
                    return replace(question, specs=(*question.specs, step.spec))
        ahead = (f"{name_of(record)} >={record.version}" for record in favoured)
        upwards = replace(question, constraints=(*question.constraints, *ahead))
        most = await self._reach(upwards, name, old)
        for step in newer:
            trial = replace(upwards, specs=(*upwards.specs, step.spec))
            if most and step.rank <= most and await self._solver.solution(trial):
                self._free |= {name_of(record) for record in favoured}
                return replace(question, specs=(*question.specs, step.spec))
        return replace(question, favoured=(*favoured, old)) if old else question

    def _with_still(self, free: set[str]) -> CondaRequest:
        """Return the request with all preferred records pinned, except the names in `free`."""
        still = (record for record in self._question.favoured if name_of(record) not in free)
        return replace(self._question, pinned=(*self._question.pinned, *still))

    async def _reach(self, question: CondaRequest, name: str, old: RepoDataRecord | None) -> Rank | None:
        """Return the newest version of `name` with a solution, None if no version above `old` has one."""
        best, last = None, old
        while True:
            specs = [name]
            if last:
                build = f'{name}[version="=={last.version}", build_number=">{last.build_number}"]'
                specs = [f"{name} >{last.version}", build]
            for spec in specs:
                records = await self._solver.solution(replace(question, specs=(*question.specs, spec)))
                if records:
                    break
            else:
                return best
            last = next(record for record in records if name_of(record) == name)
            best = (True, last.version, last.build_number)
            if last.track_features:  # conda sorts these last, and there was nothing else above
                return best

    async def _steps(self, name: str) -> list[_VersionCandidate]:
        """Return the allowed versions and build numbers in the channels, best first."""
        wishes = [
            text
            for text in (*self._question.specs, *self._question.constraints)
            if split_spec(text)[1] == name
        ]
        by_rank: dict[Rank, list[RepoDataRecord]] = {}
        for record in await self._solver.records([name]):
            if all(self._solver.matches(record, text) for text in wishes):
                by_rank.setdefault(rank(record), []).append(record)
        return [
            _VersionCandidate(
                spec=f'{name}[version="=={records[0].version}", build_number="{records[0].build_number}"]',
                rank=order,
                depends=frozenset(split_spec(text)[1] for record in records for text in record.depends),
            )
            for order, records in sorted(by_rank.items(), key=lambda item: item[0], reverse=True)
        ]

    async def _settle(self) -> list[RepoDataRecord]:
        """Return a solution in which no preferred package changes that could have stayed."""
        question = self._question
        result = await self._solver.solution(self._with_still(self._free)) if question.favoured else []
        result = result or await self._ask(question)
        for record in sorted(question.favoured, key=name_of):
            stays = {candidate.url for candidate in result}
            if record.url in stays or name_of(record) not in {name_of(candidate) for candidate in result}:
                continue
            keep = [candidate for candidate in question.favoured if candidate.url in stays]
            pinned = (*question.pinned, *keep, record)
            result = await self._solver.solution(replace(question, pinned=pinned)) or result
        return result

    async def _ask(self, question: CondaRequest) -> list[RepoDataRecord]:
        """Return a solution. Raises UnsolvableError with the contradicting requirements."""
        try:
            return await self._solver.solve(question)
        except NoSolutionError as error:
            raise await explain(self._request.target, self._solver, question, str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _VersionCandidate:
    """One version and build number of a package: its spec, and all dependencies of its builds."""

    spec: str
    rank: Rank
    depends: frozenset[str]


def _dependency_closure(names: Iterable[str], records: Iterable[RepoDataRecord]) -> set[str]:
    """Return `names` and all their dependencies among `records`."""
    depends = {name_of(record): {split_spec(text)[1] for text in record.depends} for record in records}
    closure, todo = set[str](), set(names)
    while todo:
        closure |= todo
        todo = {depend for name in todo for depend in depends.get(name, ())} - closure
    return closure
