"""How far behind its channels a solution of conda's packages is, and why: the solver is asked for the newest.

Only what the recipe names is asked about. Below that, versions are bound by what was built with them, which
is how conda's packages work, and not one of them is news.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from imagefactory.lock import Behind, asked_of
from imagefactory.lock.conda.explain import explain
from imagefactory.lock.conda.solver import NoSolutionError, Solver, first_question, name_of, split_spec
from imagefactory.lock.pypi.newest import Release, far_newer, to_accept
from imagefactory.model import LockedConda, Target

if TYPE_CHECKING:
    from rattler import RepoDataRecord

_PYTHON = ("python", "python_abi")
"""The recipe chose it: builds for another one are not newer releases."""
_CUDA = ("cuda-version", "pytorch-cuda")


async def find_behind(target: Target, conda: Sequence[LockedConda], solver: Solver) -> tuple[Behind, ...]:
    """What the recipe names and is locked far behind its channels' newest release within the recipe's bounds.

    What the framework holds back, which the recipe pins on purpose, is no fault of the lock. Raises LockError
    for channels that cannot be read.
    """
    requirements, constraints = asked_of(target, "conda")
    if not requirements:
        return ()
    wishes = (*requirements, *constraints)
    asked = {split_spec(text)[1] for text in requirements} - {target.framework, *_PYTHON}
    locked = {package.name: package for package in conda if package.name in {*asked, *_PYTHON}}
    by_name: dict[str, list[RepoDataRecord]] = {}
    for record in await solver.records(sorted(asked)):
        by_name.setdefault(name_of(record), []).append(record)
    python = list((await solver.find(locked[one] for one in _PYTHON if one in locked)).values())
    found = []
    for name in sorted(asked & locked.keys() & by_name.keys()):
        own = [text for text in wishes if split_spec(text)[1] == name]
        fitting = [
            record
            for record in by_name[name]
            if all(solver.matches(record, text) for text in own) and _goes_with(record, python, solver)
        ]
        version, known = locked[name].version, releases(fitting)
        newest = far_newer(version, known, SpecifierSet()) if _read(version) else None
        if newest is None:
            continue
        free = await _without_framework(target, name, solver)
        if free and free > Version(version):
            continue
        found.append(
            Behind(
                name=name,
                locked=version,
                newest=str(newest),
                reason=await _why(target, f"{name} =={newest}", solver),
                accept=to_accept(name, version, known),
                asked=True,
            )
        )
    return tuple(found)


async def _without_framework(target: Target, name: str, solver: Solver) -> Version | None:
    """The version of a package that would come if the recipe asked for all but its framework and CUDA."""
    question = first_question(target)
    bare = tuple(text for text in question.specs if split_spec(text)[1] not in {target.framework, *_CUDA})
    virtual = (*(one for one in question.virtual if one[0] != "__cuda"), ("__cuda", "99", "0"))
    solution = await solver.solution(replace(question, specs=bare, virtual=virtual))
    return next((_read(str(record.version)) for record in solution if name_of(record) == name), None)


async def _why(target: Target, pin: str, solver: Solver) -> str:
    """Why there is no solution with `pin`."""
    question = first_question(target)
    question = replace(question, specs=(*question.specs, pin))
    try:
        await solver.solve(question)
    except NoSolutionError as error:
        told = await explain(target, solver, question, str(error))
        return told.message.removeprefix(f"{target.name}: ")
    return "nothing forbids it"


def releases(records: Iterable[RepoDataRecord]) -> tuple[Release, ...]:
    """The releases among records, the oldest first; each begins with its first build. No pre-releases, and
    none whose version only conda reads."""
    days: dict[Version, list[date]] = {}
    for record in records:
        version = _read(str(record.version))
        if version and not version.is_prerelease:
            days.setdefault(version, []).extend([record.timestamp.date()] if record.timestamp else [])
    return tuple(
        Release(version=version, uploaded=min(days[version], default=None)) for version in sorted(days)
    )


def _goes_with(record: RepoDataRecord, python: Iterable[RepoDataRecord], solver: Solver) -> bool:
    """Whether a build is for the Python that was locked, or for any."""
    return all(
        solver.matches(own, text)
        for own in python
        for text in record.depends
        if split_spec(text)[1] == name_of(own)
    )


def _read(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None
