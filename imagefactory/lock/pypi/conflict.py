"""Which requirements of a question contradict one another, and a change that the solver has tried.

The solver's account names all that it tried. Here requirements are taken away as long as the rest still
has no solution: what remains is the contradiction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from packaging.requirements import Requirement

from imagefactory.errors import LockError, UnsolvableError
from imagefactory.lock.pypi.question import Pins, WheelQuestion
from imagefactory.recipes.values import package_of

_MOST = 16  # requirements that are taken away in turn, each with a question
_LONGEST = 400  # characters of the reasons


class Solver(Protocol):
    """What solves a question."""

    def solve(self, question: WheelQuestion) -> Pins:
        """A solution. Raises LockError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Requirements (PEP 508) that have no solution together, and the solver's account of them alone."""

    texts: tuple[str, ...]
    account: str


def find_conflict(solver: Solver, question: WheelQuestion, account: str) -> Conflict | None:
    """Return the contradiction in a question without a solution, None where the solver finds none.

    `account` is what the solver said of it.
    """
    names = set(map(package_of, re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*", account)))
    texts = list(dict.fromkeys((*question.requirements, *question.constraints)))
    texts = [text for text in texts if package_of(text) in names]
    if not 0 < len(texts) <= _MOST:
        return None
    told = _refusal(solver, _only(question, texts))
    if not told:
        return None
    for text in tuple(texts):
        rest = [one for one in texts if one != text]
        if rest and (less := _refusal(solver, _only(question, rest))):
            texts, told = rest, less
    return Conflict(texts=tuple(texts), account=told)


def find_fix(
    solver: Solver, question: WheelQuestion, conflict: Conflict, keep: Iterable[str] = ()
) -> tuple[str, str]:
    """Return a requirement of the contradiction and what has a solution in its place, both empty for none.

    What is named last changes first, and packages of `keep` do not.
    """
    kept = set(keep)
    for text in reversed(conflict.texts):
        name = package_of(text)
        if name in kept or not Requirement(text).specifier:
            continue

        def loose(some: Sequence[str], name: str = name) -> tuple[str, ...]:
            return tuple(_bare(one) if package_of(one) == name else one for one in some)

        open_question = replace(
            question,
            requirements=loose(question.requirements),
            constraints=tuple(one for one in question.constraints if package_of(one) != name),
        )
        try:
            pins = solver.solve(open_question)
        except LockError:
            continue
        for line in pins.lines:
            if package_of(line) == name:
                return text, line.partition("+")[0]
    return "", ""


def explain_conflict(
    solver: Solver, question: WheelQuestion, error: UnsolvableError, keep: Iterable[str] = ()
) -> UnsolvableError:
    """The error with the contradiction in its message and a change that was tried as its hint.

    It stays as it is where none is found.
    """
    conflict = find_conflict(solver, question, error.tree)
    if conflict is None:
        return error
    why = _because(conflict)
    problem = "has no solution" if len(conflict.texts) == 1 else "conflict"
    message = f"{question.lock.target}: {' and '.join(conflict.texts)} {problem}{f': {why}' if why else ''}"
    old, new = find_fix(solver, question, conflict, keep)
    hint = error.hint
    if new:
        hint = f"write {new} instead of {old}: that has a solution"
    return UnsolvableError(
        "requirements-conflict", message, hint=hint, tree=error.tree, conflict=conflict.texts
    )


def _only(question: WheelQuestion, texts: Sequence[str]) -> WheelQuestion:
    return replace(
        question,
        requirements=tuple(one for one in question.requirements if one in texts),
        constraints=tuple(one for one in question.constraints if one in texts),
    )


def _refusal(solver: Solver, question: WheelQuestion) -> str:
    """What the solver says where a question has no solution, empty where it has one or that is not known."""
    try:
        solver.solve(question)
    except LockError as error:
        return error.tree or error.message if isinstance(error, UnsolvableError) else ""
    return ""


def _bare(text: str) -> str:
    one = Requirement(text)
    return f"{one.name}[{','.join(sorted(one.extras))}]" if one.extras else one.name


def _because(conflict: Conflict) -> str:
    """What the account gives as reasons, without what it concludes."""
    flat = " ".join(re.sub(r"[×│╰─▶├]+", " ", conflict.account).split())
    reasons = re.findall(r"\b[Bb]ecause (.*?),? we can conclude that", flat)
    return "; ".join(dict.fromkeys(reason.rstrip(",") for reason in reasons))[:_LONGEST]
