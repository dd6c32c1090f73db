"""The part of a conda environment that comes from PyPI, solved by uv above the locked conda packages.

uv is shown each Python package of conda as a wheel with nothing in it, `numpy-1.26.4+given`, and a constraint
that allows no other. The local version keeps the index's own files of that name out of the solution; PEP 440
ignores it where a requirement speaks of public versions, so `numpy<=1.26.4` holds.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from imagefactory.errors import LockError, UnsolvableError
from imagefactory.gpu.knowledge import pypi_names
from imagefactory.lock import Behind, LockRequest, asked_of
from imagefactory.lock.pypi.outdated import find_behind
from imagefactory.lock.pypi.question import Pins, WheelQuestion, check_exclude, origins_of
from imagefactory.lock.pypi.unbuilt import require_wheels, without, write_stub
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.model import Lock, LockedConda, LockedWheel
from imagefactory.progress import Progress, Quiet

_LOCAL = "+given"
_NO_DISTRIBUTION = frozenset({"python", "python_abi", "cpython", "python-abi3", "python-gil"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPackage:
    """A distribution that conda brings: `name` as PyPI has it, normalised, `version` as PEP 440 has it.

    `extras` are the Requires-Dist of its extras, known only where something asks for one.
    """

    name: str
    version: str
    conda: LockedConda
    extras: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}{_LOCAL}"


def lock_pip(
    request: LockRequest,
    conda: tuple[LockedConda, ...],
    locker: UvLocker,
    progress: Progress | None = None,
) -> tuple[LockedWheel, ...]:
    """The wheels of a target's pip part, sorted by name; none of them is a package that `conda` brings.

    The wheels of `request.under` stay as they are; those of `request.previous` are preferred, unless they
    are named in `request.update` (names that are not among them are conda's and are passed over). Raises
    UnsolvableError where the pip part contradicts conda's packages or itself, LockError for a package
    without a fitting wheel, ToolError without uv.
    """
    given = given_packages(conda)
    _refuse_replaced(request, given)
    if not asked_of(request.target, "pypi")[0]:
        return request.under.wheels if request.under else ()
    _refuse_contradictions(request, given)
    progress = progress or Quiet()
    with _solved(request, given, locker, progress) as (question, pins):
        return locker.wheels(question, pins, progress)


def behind_pip(request: LockRequest, lock: Lock, locker: UvLocker, progress: Progress) -> tuple[Behind, ...]:
    """What of the wheels of `lock`, solved for `request`, is far behind its newest release.

    Raises like `lock_pip`.
    """
    with _solved(request, given_packages(lock.conda), locker, Quiet()) as (question, _):
        return find_behind(locker, question, lock.wheels, request.target.framework, progress)


@contextmanager
def _solved(
    request: LockRequest, given: dict[str, GivenPackage], locker: UvLocker, progress: Progress
) -> Iterator[tuple[WheelQuestion, Pins]]:
    """The question of the pip part and its solution, while the given packages are there as wheels.

    Both have what is known to be needed and is not declared.
    """
    target, previous, under = request.target, request.previous, request.under
    requirements, constraints = asked_of(target, "pypi")
    glibc = dict(target.virtual).get("__glibc", request.base.glibc)
    platform = locker.platform(target, glibc)
    empty = Lock(
        target=target.name,
        content_hash="",
        python=target.python,
        platform=platform,
        solver="",
        wheels=(),
        origins=origins_of(target, under),
    )
    held = {wheel.name for wheel in previous.wheels} if previous else set()
    question = WheelQuestion(
        lock=empty,
        requirements=requirements,
        constraints=constraints,
        previous=replace(previous, platform=platform) if previous else None,
        update=tuple(sorted(held & {canonicalize_name(name) for name in request.update})),
        update_all=request.update_all,
        fixed=under.wheels if under else (),
        sources=target.sources,
        exclude=check_exclude(request),
    )
    with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
        question = replace(
            question,
            given=tuple(package.pin for package in given.values()),
            stubs=_write_stubs(Path(folder), given),
        )
        try:
            with without(request.absent, question) as given_without:
                question, pins = require_wheels(locker, given_without, target, progress)
            while lacking := {name for name, _ in pins.lacking if name in given and not given[name].provides}:
                asked = {name: [extra for of, extra in pins.lacking if of == name] for name in lacking}
                given |= {name: _with_extras(given[name], asked[name], locker, empty) for name in lacking}
                _write_stubs(Path(folder), {name: given[name] for name in lacking})
                question, pins = require_wheels(locker, question, target, progress)
        except (UnsolvableError, NoWheelError) as error:
            told = locker.explained(error, question, target)
            fix = told.hint if told.hint != error.hint else ""
            raise _explain(told, given, fix) if isinstance(told, UnsolvableError) else told from error
        yield question, pins


def given_packages(conda: Iterable[LockedConda]) -> dict[str, GivenPackage]:
    """The distributions that conda's packages bring, by normalised name.

    A package counts as a Python package if it depends on Python. Where two bring one name, the whole
    package (`matplotlib`) gives way to what it is made of (`matplotlib-base`).
    """
    given: dict[str, GivenPackage] = {}
    names = pypi_names()
    for package in sorted(conda, key=lambda one: (one.name in names, one.name)):
        needs = {spec.split()[0] for spec in package.depends if spec.strip()}
        if package.name in _NO_DISTRIBUTION or not needs & {"python", "python_abi"}:
            continue
        version = _public(package.version)
        for name in names.get(package.name, (package.name,)):
            normal = canonicalize_name(name)
            given[normal] = GivenPackage(name=normal, version=version, conda=package)
    return given


def _public(version: str) -> str:
    """A conda version as PEP 440 has it, without a local part; if it is no such one, its leading numbers."""
    try:
        return Version(version.replace("_", ".")).public
    except InvalidVersion:
        numbers = re.match(r"\d+(?:\.\d+)*", version)
        return numbers[0] if numbers else "0"


def _refuse_contradictions(request: LockRequest, given: Mapping[str, GivenPackage]) -> None:
    """Raise UnsolvableError for what the recipe itself asks of PyPI and conda brings in another version."""
    target = request.target
    for text in asked_of(target, "pypi")[0]:
        asked = Requirement(text)
        name = canonicalize_name(asked.name)
        there = given.get(name)
        if there and not asked.specifier.contains(there.version, prereleases=True):
            spec = f"{there.conda.name} {asked.specifier}"
            raise UnsolvableError(
                "pip-conda-conflict",
                f"{target.name}: pip requires '{text}', and conda installs {_shown(there)}",
                hint=f"write '{spec}' in `packages`, so that conda installs another version, "
                f"or remove '{text}' from `pip` at {target.where}",
                tree=f"pip: {text}\nconda: {there.conda.filename}",
            )


def _refuse_replaced(request: LockRequest, given: Mapping[str, GivenPackage]) -> None:
    """Raise UnsolvableError where conda brings what the target below has from PyPI."""
    under = request.under
    for wheel in under.wheels if under else ():
        if under and (there := given.get(wheel.name)):
            raise UnsolvableError(
                "parent-package-conflict",
                f"{request.target.name}: conda would replace {wheel.name} {wheel.version}, which "
                f"{under.target} has from PyPI, by {_shown(there)}",
                hint=f"move what needs it from `packages` to `pip` at {request.target.where}, "
                f"or write '{there.conda.name}' in `packages` of {under.target}",
                tree=f"{under.target}: {wheel.filename}\nconda: {there.conda.filename}",
            )


def _with_extras(package: GivenPackage, asked: Iterable[str], locker: UvLocker, empty: Lock) -> GivenPackage:
    """The package with what its extras need, as the index tells it of the same version."""
    try:
        metadata, _ = parse_email(locker.metadata(f"{package.name}=={package.version}", empty))
    except LockError as error:
        extras = ", ".join(sorted(asked))
        raise LockError(
            "package-extras-unknown",
            f"{empty.target}: pip requires {package.name}[{extras}], conda installs {_shown(package)}, and "
            f"the needs of '{extras}' are unknown: {error.message.removeprefix(f'{empty.target}: ')}",
            hint=f"constrain {package.conda.name} in `packages` to a version that the package index also has",
        ) from error
    needs = [text for text in metadata.get("requires_dist", []) if re.search(r";.*\bextra\b", text)]
    return replace(
        package,
        extras=tuple(needs),
        # An extra that the package does not have is asked for nothing, as everywhere.
        provides=tuple(sorted({*metadata.get("provides_extra", []), *asked})),
    )


def _write_stubs(folder: Path, given: Mapping[str, GivenPackage]) -> Path:
    """One wheel a package, with metadata alone."""
    for one in given.values():
        lines = [f"Provides-Extra: {extra}" for extra in one.provides]
        lines += [f"Requires-Dist: {need}" for need in one.extras]
        write_stub(folder, one.name, f"{one.version}{_LOCAL}", lines)
    return folder


def _shown(one: GivenPackage) -> str:
    return f"{one.conda.name} {one.conda.version}"


def _explain(error: UnsolvableError, given: Mapping[str, GivenPackage], fix: str) -> UnsolvableError:
    """uv's account with conda's packages called what they are, and what to write, which is `fix` if any."""

    def plain(text: str) -> str:
        def called(match: re.Match[str]) -> str:
            one = given.get(canonicalize_name(match[1]))
            return f"conda's {_shown(one)}" if one else match[0]

        return re.sub(r"([A-Za-z0-9._-]+)==[^\s,]+?\+given", called, text)

    hint = "change the versions in `pip`, or those of conda's packages in `packages` and `constraints`"
    for package in given.values():
        if package.pin not in error.tree:
            continue
        asked = re.search(rf"(?<![\w.-]){re.escape(package.name)}([<>=!~][^\s+]*?)(?=,?\s|$)", error.tree)
        wish = f"{package.conda.name} {asked[1]}" if asked else f"another {package.conda.name}"
        hint = (
            f"every conda package stays as it is: ask another version of what needs it in `pip`, "
            f"or write '{wish}' in `packages`, so that conda brings another version"
        )
        break
    else:
        hint = fix or hint
    return UnsolvableError(
        error.code, plain(error.message), hint=hint, tree=plain(error.tree), conflict=error.conflict
    )
