"""What locked releases need and do not declare: companions of the framework, and the table of bounds.

The solver knows what packages declare. Where its solution goes against a known need it is solved again with
that need, and the person is told. A recipe that requires the contrary has no solution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from imagefactory.errors import LockError, UnbuiltError, UnreachableError, UnsolvableError
from imagefactory.gpu import knowledge
from imagefactory.lock.pypi.question import Pins, WheelQuestion, versions_of
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.progress import Progress
from imagefactory.recipes.values import package_of

_ROUNDS = 10  # each one adds a need, and a need can bring packages that need more


class Solver(Protocol):
    """What solves a question."""

    def solve(self, question: WheelQuestion) -> Pins:
        """A solution. Raises LockError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the release `by` (`torch 2.2.2`) needs: `wants`, and with `add` even where nothing else does."""

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
    """A companion has no release for a version of its framework, which `need` bounds to those that it has."""

    def __init__(self, code: str, message: str, *, hint: str, conflict: tuple[str, ...], need: Need) -> None:
        super().__init__(code, message, hint=hint, conflict=conflict)
        self.need = need


def known_needs(versions: Mapping[str, str], python: str) -> tuple[Need, ...]:
    """Return the needs of releases (name -> version) that bear on one another, for a Python (`3.11`).

    Raises NoCompanionError for a companion that has no release for the version of its framework.
    """
    found = [
        Need(by=f"{row.package} {versions[row.package]}", wants=row.needs, add=row.add, source=row.source)
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
            found.append(Need(by=f"{framework} {version}", wants=wants, add=False, source="companions.toml"))
    return tuple(found)


def with_needs(question: WheelQuestion, needs: Iterable[Need]) -> WheelQuestion:
    """Return the question with needs as constraints, and as requirements where they are to be added.

    What the target below or conda brings is theirs, and is not bounded.
    """
    brought = _brought(question)
    asked = {package_of(text) for text in question.requirements}
    added, bounds = list(question.requirements), list(question.constraints)
    for need in needs:
        name = need.wants.name
        if name in brought:
            continue
        if need.add and name not in asked:
            added.append(name)
            asked.add(name)
        if need.wants.specifier:
            bounds.append(str(need.wants))
    return replace(
        question,
        requirements=tuple(dict.fromkeys(added)),
        constraints=tuple(dict.fromkeys(bounds)),
    )


def solve_companions(solver: Solver, question: WheelQuestion) -> tuple[WheelQuestion, Pins, tuple[Need, ...]]:
    """Solve a question, with a framework left open older where a companion has no release for a newer one.

    Return the question with that bound, its solution, and what was bounded. Raises NoCompanionError where
    that has no solution, and whatever the solver raises.
    """
    brought, kept, pins = _brought(question), list[Need](), solver.solve(question)
    while True:
        try:
            known_needs(brought | _versions(pins), question.lock.python)
        except NoCompanionError as error:
            bounded = with_needs(question, (error.need,))
            if bounded == question:  # brought by something else, or bounded before
                raise _of_target(question, error) from error
            try:
                pins = solver.solve(bounded)
            except (UnbuiltError, UnreachableError):
                raise
            except (UnsolvableError, NoWheelError):
                raise _of_target(question, error) from error
            question = bounded
            kept.append(error.need)
        else:
            return question, pins, tuple(kept)


def solve_known(solver: Solver, question: WheelQuestion, progress: Progress) -> tuple[WheelQuestion, Pins]:
    """Solve a question so that all known needs are met. Return the question with them, and its solution.

    Each need that changed the solution is noted. Raises UnsolvableError, naming the needs, where these
    leave no solution, and whatever the solver raises.
    """
    brought = _brought(question)
    given = {package_of(text) for text in question.given}
    question, pins, older = solve_companions(solver, question)
    kept = [*older]
    for _ in range(_ROUNDS):
        versions = brought | _versions(pins)
        needs = known_needs(versions, question.lock.python)
        broken = [
            one
            for one in needs
            if one.wants.name not in brought
            and not (one.add and one.package in given)  # a channel's build has needs of its own
            and not _is_met(one, versions)
        ]
        if not broken:
            for one in kept:
                progress.note(f"{question.lock.target}: {one}, which it does not declare")
            return question, pins
        kept += broken
        question = with_needs(question, broken)
        try:
            question, pins, older = solve_companions(solver, question)
            kept += older
        except (UnbuiltError, UnreachableError, NoCompanionError):
            raise
        except (UnsolvableError, NoWheelError) as error:
            raise _contradicted(question, kept, error) from error
    raise LockError(
        "known-needs-unmet",
        f"{question.lock.target}: no solution meets the known needs of its packages: {_told(kept)}",
        hint="pin these packages",
    )


def _brought(question: WheelQuestion) -> dict[str, str]:
    """The versions of what the target below and conda bring."""
    given = (Requirement(text) for text in question.given)
    return {
        **{canonicalize_name(one.name): next(iter(one.specifier)).version for one in given},
        **versions_of(question.fixed),
    }


def _versions(pins: Pins) -> dict[str, str]:
    pairs = (line.partition("==") for line in pins.lines)
    return {canonicalize_name(name): version for name, _, version in pairs}


def _public(version: str) -> str:
    """A version without its local part."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version.partition("+")[0]


def _is_other_build(version: str) -> bool:
    """Whether a version (`2.5.1+cpu`, `+rocm6.2`) is of a build that is not for CUDA."""
    local = version.partition("+")[2]
    return bool(local) and not local.startswith("cu")


def _is_met(need: Need, versions: Mapping[str, str]) -> bool:
    version = versions.get(need.wants.name)
    if version is None:
        return not need.add
    return need.wants.specifier.contains(_public(version), prereleases=True)


def _told(needs: Iterable[Need]) -> str:
    return "; ".join(dict.fromkeys(map(str, needs)))


def _no_companion(companion: str, release: str) -> NoCompanionError:
    name, framework = companion.partition(" ")[0], release.partition(" ")[0]
    last = knowledge.last_with(name, framework)
    head, _, tail = last.rpartition(".")
    wants = Requirement(f"{framework}<{head}.{int(tail) + 1}" if head and tail.isdigit() else framework)
    return NoCompanionError(
        "companion-not-released",
        f"{name} has no release for {release}: its last is for {framework} {last}",
        hint=f"write version: {last} of {framework}, or remove {name} and what needs it",
        conflict=(name,),
        need=Need(by=companion, wants=wants, add=False, source="companions.toml"),
    )


def _of_target(question: WheelQuestion, error: NoCompanionError) -> NoCompanionError:
    error = copy(error)
    error.message = f"{question.lock.target}: {error.message}"
    return error


def _contradicted(question: WheelQuestion, needs: Sequence[Need], error: LockError) -> UnsolvableError:
    """The error of a question that had a solution before these needs were added."""
    added = {str(one.wants) for one in needs}
    own = [
        text
        for text in (*question.requirements, *question.constraints)
        if Requirement(text).specifier and text not in added
    ]
    against = [one for one in needs if any(package_of(text) == one.wants.name for text in own)] or needs
    own = [text for text in own if package_of(text) in {one.wants.name for one in against}]
    message = f"{question.lock.target}: {_told(against)} (known, but not declared), and "
    hint = error.hint
    if own:
        message += f"the recipe asks for {' and '.join(own)}"
        by = against[0]
        hint = f"write what {by.by} needs instead of {' and '.join(own)}, or another version of {by.package}"
    else:
        message += "no solution includes that"
    return UnsolvableError(
        "requirements-conflict",
        message,
        hint=hint,
        tree=error.tree if isinstance(error, UnsolvableError) else error.message,
        conflict=tuple(own) or tuple(str(one.wants) for one in against),
    )
