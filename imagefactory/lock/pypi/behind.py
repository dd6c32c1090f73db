"""Asks the index how far behind a solution is, and the solver why.

The newest release is asked for as a pin beside all else: the solver's refusal is the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.errors import LockError, UnsolvableError
from imagefactory.gpu.knowledge import companions
from imagefactory.lock import Behind
from imagefactory.lock.pypi.newest import (
    Account,
    Release,
    bounds_of,
    far_newer,
    needs_with,
    read_account,
    releases,
    to_accept,
)
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.lock.pypi.question import Pins, WheelQuestion
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import Progress


class Asker(Protocol):
    """The solver, and what its index has."""

    def solve(self, question: WheelQuestion) -> Pins:
        """A solution. Raises LockError."""

    def listed(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, tuple[IndexFile, ...]]:
        """The files on the page of each wheel's project. Raises LockError."""

    def metadata(self, pin: str, lock: Lock) -> str:
        """METADATA of a release. Raises LockError."""


def find_behind(
    asker: Asker,
    question: WheelQuestion,
    wheels: Sequence[LockedWheel],
    framework: str,
    progress: Progress,
) -> tuple[Behind, ...]:
    """What of `wheels`, a solution of `question`, is far behind: of what the recipe names, else of the rest.

    A newest release is one within the bounds of the recipe and of the framework, which the recipe pins on
    purpose, and of its companions. What is `fixed` was judged when it was locked. Raises LockError
    where the index does not answer.
    """
    chosen = [wheel for wheel in wheels if wheel not in question.fixed]
    bounding = [*question.requirements, *question.constraints]
    framework = canonicalize_name(framework)
    bounding += _companions(question, wheels, framework)
    bounding += _framework_needs(asker, question, wheels, framework)
    names = {canonicalize_name(Requirement(text).name) for text in question.requirements}
    late: list[_Late] = []
    with progress.task("newest releases", total=len(chosen), unit="packages") as task:
        listed = asker.listed(chosen, question.lock)
        for wheel in chosen:
            known = releases(wheel.name, listed.get(wheel, ()), question.lock.python)
            if newest := far_newer(wheel.version, known, bounds_of(wheel.name, bounding)):
                late.append(_Late(wheel=wheel, newest=newest, known=known))
        # Where the lock is refused for what the recipe names, nobody waits for the solver's word on the rest.
        for asked in (True, False):
            group = [one for one in late if (one.wheel.name in names) is asked]
            with ThreadPoolExecutor(4) as pool:
                accounts = pool.map(lambda one: _account(asker, question, wheels, one), group)
                found = [(one, account) for one, account in zip(group, accounts, strict=True) if account]
            found = [(one, account) for one, account in found if account.by != framework]
            if found:
                break
        task.advance(len(chosen))
    return tuple(
        Behind(
            name=one.wheel.name,
            locked=one.wheel.version,
            newest=str(one.newest),
            reason=account.reason,
            accept=to_accept(one.wheel.name, one.wheel.version, one.known),
            asked=one.wheel.name in names,
        )
        for one, account in found
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    wheel: LockedWheel
    newest: Version
    known: tuple[Release, ...]


def _companions(question: WheelQuestion, wheels: Sequence[LockedWheel], framework: str) -> Iterator[str]:
    for wheel in wheels:
        if wheel.name == framework:
            for one in companions(framework, wheel.version, question.lock.python):
                yield f"{one.package}=={one.series}.*"


def _framework_needs(
    asker: Asker, question: WheelQuestion, wheels: Sequence[LockedWheel], framework: str
) -> Iterator[str]:
    """What the framework requires, as far as its metadata is at hand: it spares the solver questions."""
    asked = (Requirement(text) for text in question.requirements)
    extras = {extra for one in asked if canonicalize_name(one.name) == framework for extra in one.extras}
    for wheel in wheels:
        if wheel.name != framework:
            continue
        try:
            text = asker.metadata(f"{wheel.name}=={wheel.version}", question.lock)
        except LockError:  # a big wheel of an index without PEP 658: the solver's accounts tell the same
            continue
        yield from needs_with(parse_email(text)[0].get("requires_dist", []), extras, question.lock.python)


def _public(pin: Requirement) -> str:
    """The version of a pin without the local part that marks what something else brings."""
    return next(Version(one.version).public for one in pin.specifier)


def _account(
    asker: Asker, question: WheelQuestion, wheels: Sequence[LockedWheel], late: _Late
) -> Account | None:
    """Why the newest release was not locked; None where the lock before holds what it was asked to keep."""
    name, pin = late.wheel.name, f"{late.wheel.name}=={late.newest}"
    asked: dict[str, str] = {}
    for text in (*question.constraints, *question.requirements):
        asked[canonicalize_name(Requirement(text).name)] = f"the recipe asks for {text}"
    for text in question.given:
        given = Requirement(text)
        asked[canonicalize_name(given.name)] = f"conda brings {given.name} {_public(given)}"
    try:
        pins = asker.solve(replace(question, constraints=(*question.constraints, pin)))
    except LockError as error:
        if not isinstance(error, UnsolvableError) and "wheels" not in error.message:
            raise  # the index, not the question
        text = error.tree if isinstance(error, UnsolvableError) else error.message
        return read_account(text, name, asked, question.lock)
    held = {wheel.name: wheel.version for wheel in (question.previous.wheels if question.previous else ())}
    if held.get(name) == late.wheel.version:
        return None
    with_it: dict[str, str] = dict(line.split("==", 1) for line in pins.lines)
    older = [
        f"{wheel.name} {with_it[wheel.name]}"
        for wheel in wheels
        if wheel.name in with_it and Version(with_it[wheel.name]) < Version(wheel.version)
    ]
    return Account(reason=f"it goes with {' and '.join(older[:3])} only" if older else "nothing forbids it")
