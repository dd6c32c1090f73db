"""Checks how far a solution is behind the index, and why.

What the locked wheels require of one another is a reason without a question. Else the newest release is
required as a pin with all else: the solver's refusal is the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.errors import LockError
from imagefactory.lock import Behind
from imagefactory.lock.pypi.newest import (
    Account,
    Need,
    Release,
    bounds_of,
    far_newer,
    needs_of,
    needs_with,
    newest_source,
    no_wheel,
    read_account,
    releases,
    to_accept,
)
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.lock.pypi.question import Pins, WheelQuestion
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import Progress

_AT_ONCE = 4  # questions to the solver


class Asker(Protocol):
    """The solver, and what its index has."""

    def solve(self, question: WheelQuestion) -> Pins:
        """A solution. Raises LockError."""

    def listed(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, tuple[IndexFile, ...]]:
        """The files on the page of each wheel's project. Raises LockError."""

    def requirers(self, question: WheelQuestion, wheels: Sequence[LockedWheel]) -> dict[str, tuple[str, ...]]:
        """By each package of a solution those that require it. Raises LockError."""

    def required(
        self, wheels: Sequence[LockedWheel], listed: Mapping[LockedWheel, Sequence[IndexFile]], lock: Lock
    ) -> dict[str, tuple[str, ...]]:
        """Requires-Dist of each wheel by its name, as far as the index gives it."""

    def metadata(self, pin: str, lock: Lock) -> str:
        """METADATA of a release. Raises LockError."""


def find_behind(
    asker: Asker,
    question: WheelQuestion,
    wheels: Sequence[LockedWheel],
    framework: str,
    progress: Progress,
) -> tuple[Behind, ...]:
    """What of `wheels`, a solution of `question`, is behind: far, or for want of a wheel of the newest.

    A newest release is one within the bounds of the recipe, of the framework, of the packages that the recipe
    names, and of the target below. What is `fixed` was judged when it was locked. An index that does not
    answer is noted: a lock is as good without this.
    """
    look = _Look(asker=asker, question=question, wheels=tuple(wheels), framework=canonicalize_name(framework))
    with progress.task("newest releases", total=len(look.chosen), unit="packages") as task:
        try:
            found, unknown = look.find()
        except LockError as error:
            found, unknown = (), (error.message.removeprefix(f"{question.lock.target}: "),)
        task.advance(len(look.chosen))
    for what in unknown:
        progress.note(f"{question.lock.target}: newer releases are not known: {what}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    wheel: LockedWheel
    known: tuple[Release, ...]
    newest: Version


@dataclass(slots=True, kw_only=True)
class _Look:
    """One solution, and what the index says of it."""

    asker: Asker
    question: WheelQuestion
    wheels: tuple[LockedWheel, ...]
    framework: str

    @property
    def chosen(self) -> list[LockedWheel]:
        return [wheel for wheel in self.wheels if wheel not in self.question.fixed]

    @property
    def names(self) -> set[str]:
        """What the recipe itself names."""
        return {canonicalize_name(Requirement(text).name) for text in self.question.requirements}

    def find(self) -> tuple[tuple[Behind, ...], tuple[str, ...]]:
        """What is behind, and of which packages that is not known. Raises LockError."""
        lock, own = self.question.lock, (*self.question.requirements, *self.question.constraints)
        listed = self.asker.listed(self.chosen, lock)
        known = {w.name: releases(w.name, listed.get(w, ()), lock.python) for w in self.chosen}
        late = []
        for wheel in self.chosen:
            bounds = bounds_of(wheel.name, own)
            if far_newer(wheel.version, known[wheel.name], bounds) or newest_source(
                wheel, listed.get(wheel, ()), bounds, lock
            ):
                late.append(wheel)
        if not late:
            return (), ()
        needs = self._needs(late, listed)
        named = {*self.names, self.framework, *(wheel.name for wheel in self.question.fixed)}
        found, left = list[Behind](), list[_Late]()
        for wheel in late:
            others = [need for need in needs if need.name == wheel.name and need.by != wheel.name]
            bounds = every = bounds_of(wheel.name, own)
            for need in others:
                every &= need.bounds
                bounds &= need.bounds if need.by in named else SpecifierSet()
            source = newest_source(wheel, listed.get(wheel, ()), every, lock)
            if source:
                pin = f"{wheel.name}=={source}"
                account = Account(
                    reason=f"{no_wheel(wheel.name, str(source), lock)}, only its source", build=pin
                )
                one = _Late(wheel=wheel, known=known[wheel.name], newest=source)
                found.append(self._told(one, account, stops=self._held(wheel.name) != wheel.version))
                continue
            newest = far_newer(wheel.version, known[wheel.name], bounds)
            if not newest:
                continue
            one = _Late(wheel=wheel, known=known[wheel.name], newest=newest)
            if by := next((need for need in others if newest not in need.bounds), None):
                if wheel.name in self.names:  # below, that is how packages go together, and no news
                    found.append(self._told(one, Account(reason=str(by), by=by.by), stops=False))
            else:
                left.append(one)
        more, unknown = self._solved(left, known, needs)
        return tuple(sorted([*found, *more], key=lambda one: one.name)), unknown

    def _needs(
        self, late: Iterable[LockedWheel], listed: Mapping[LockedWheel, Sequence[IndexFile]]
    ) -> tuple[Need, ...]:
        """What the other packages require of those that are late."""
        via, lock = self.asker.requirers(self.question, self.wheels), self.question.lock
        via = {wheel.name: via.get(wheel.name, ()) for wheel in late}
        names = {by for some in via.values() for by in some}
        wheels = [wheel for wheel in self.wheels if wheel.name in names]
        rest = [wheel for wheel in wheels if wheel not in listed]
        pages = {**listed, **(self.asker.listed(rest, lock) if rest else {})}
        return needs_of(self.asker.required(wheels, pages, lock), via, lock)

    def _solved(
        self, late: Sequence[_Late], known: Mapping[str, Sequence[Release]], needs: Sequence[Need]
    ) -> tuple[list[Behind], tuple[str, ...]]:
        """Those of which only the solver knows the reason: what the recipe names, else the rest.

        Where the lock is refused for what the recipe names, nobody waits for the solver's word on the rest.
        """
        found, unknown = list[Behind](), list[str]()

        def account(one: _Late) -> Account | LockError | None:
            try:
                return self._account(one, known, needs)
            except LockError as error:
                return error

        for asked in (True, False):
            group = [one for one in late if (one.wheel.name in self.names) is asked]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for one, why in zip(group, pool.map(account, group), strict=True):
                    if isinstance(why, LockError):
                        what = why.message.removeprefix(f"{self.question.lock.target}: ")
                        unknown.append(f"{one.wheel.name}: {what}")
                    elif why and why.by != self.framework:
                        found.append(self._told(one, why, stops=asked))
            if found:
                break
        return found, tuple(unknown)

    def _told(self, one: _Late, account: Account, *, stops: bool) -> Behind:
        return Behind(
            name=one.wheel.name,
            locked=one.wheel.version,
            newest=str(one.newest),
            reason=account.reason,
            accept=to_accept(one.wheel.name, one.wheel.version, one.known),
            asked=stops and one.wheel.name in self.names,
            build=account.build,
        )

    def _held(self, name: str) -> str:
        """The version in the lock before."""
        before = self.question.previous.wheels if self.question.previous else ()
        return next((wheel.version for wheel in before if wheel.name == name), "")

    def _account(
        self, late: _Late, known: Mapping[str, Sequence[Release]], needs: Sequence[Need]
    ) -> Account | None:
        """Why the newest release was not locked; None where the lock before holds what it was to keep."""
        question, name = self.question, late.wheel.name
        pin = f"{name}=={late.newest}"
        try:
            pins = self.asker.solve(replace(question, constraints=(*question.constraints, pin)))
        except LockError as error:
            text = getattr(error, "tree", "") or error.message
            if "No solution found" not in text and "wheel" not in text.lower() and "depends on" not in text:
                raise  # the index, not the question
            return self._contradiction(late, known, needs) or read_account(
                text, pin, self._asked(), question.lock
            )
        if self._held(name) == late.wheel.version:
            return None
        with_it: dict[str, str] = dict(line.split("==", 1) for line in pins.lines)
        older = [
            f"{wheel.name} {with_it[wheel.name]}"
            for wheel in self.wheels
            if wheel.name in with_it and Version(with_it[wheel.name]) < Version(wheel.version)
        ]
        return Account(
            reason=f"it goes with {' and '.join(older[:3])} only" if older else "nothing forbids it"
        )

    def _contradiction(
        self, late: _Late, known: Mapping[str, Sequence[Release]], needs: Iterable[Need]
    ) -> Account | None:
        """What the newest release requires and the recipe or a locked wheel excludes, by their metadata."""
        name, lock, asked = late.wheel.name, self.question.lock, self._asked()
        try:
            text = self.asker.metadata(f"{name}=={late.newest}", lock)
        except LockError:  # it has no wheel that fits, or its index gives no metadata
            return None
        extras = {
            extra
            for requirement in map(Requirement, self.question.requirements)
            if canonicalize_name(requirement.name) == name
            for extra in requirement.extras
        }
        own = (*self.question.requirements, *self.question.constraints)
        fixed = {wheel.name: wheel.version for wheel in self.question.fixed}
        fixed |= {canonicalize_name(one.name): _public(one) for one in map(Requirement, self.question.given)}
        for need in needs_with(parse_email(text)[0].get("requires_dist", []), extras, lock):
            other = canonicalize_name(need.name)
            there = (
                [Version(fixed[other])] if other in fixed else [one.version for one in known.get(other, ())]
            )
            allowed = bounds_of(other, own)
            fitting = [v for v in there if v in allowed and need.specifier.contains(v, prereleases=True)]
            if other in asked and there and not fitting:
                return Account(reason=f"it needs {need.name}{need.specifier}, {asked[other]}")
            for by in needs if there else ():
                if (
                    by.name == other
                    and by.by != name
                    and by.bounds
                    and not any(v in by.bounds for v in fitting)
                ):
                    return Account(reason=f"it needs {need.name}{need.specifier}, {by}", by=by.by)
        return None

    def _asked(self) -> dict[str, str]:
        """What the recipe asks for and conda brings, by package, for a person."""
        asked = dict[str, str]()
        for text in (*self.question.constraints, *self.question.requirements):
            if Requirement(text).specifier:
                asked[canonicalize_name(Requirement(text).name)] = f"the recipe asks for {text}"
        for text in self.question.given:
            given = Requirement(text)
            asked[canonicalize_name(given.name)] = f"conda brings {given.name} {_public(given)}"
        return asked


def _public(pin: Requirement) -> str:
    """The version of a pin without the local part that marks what something else brings."""
    return next(Version(one.version).public for one in pin.specifier)
