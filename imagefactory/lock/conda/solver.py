"""py-rattler as a solver: questions in, the channels' records out. Foreign exceptions stop here.

The machine that solves is never asked about: virtual packages come from the question alone, and channels are
those of the question, not others that a channel's metadata names.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from imagefactory.errors import LockError
from imagefactory.gpu.capability import SUBDIRS
from imagefactory.http import redact
from imagefactory.lock import requirements_of
from imagefactory.lock.conda.channels import ChannelAccess
from imagefactory.lock.conda.file import merge_depends
from imagefactory.model import LockedCondaPackage, Target
from imagefactory.recipes.values import channel_address

if TYPE_CHECKING:
    from rattler import Gateway, MatchSpec, RepoDataRecord

T = TypeVar("T")
Rank = tuple[bool, Any, int]
_LINGER = 0.02
_BROKEN = re.compile(r"at line \d+ column \d+")  # of what came whole, but is not JSON


class NoSolutionError(Exception):
    """Nothing fulfils the question. The text is the solver's account, a tree of many lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaRequest:
    """What to solve. `specs` are wanted, `constraints` hold for what comes along: match specs as a recipe
    has them. `virtual` are (name, version, build). `favoured` are records to prefer, `pinned` records
    whose packages may come in no other form.
    """

    specs: tuple[str, ...]
    constraints: tuple[str, ...]
    virtual: tuple[tuple[str, str, str], ...]
    strict: bool
    favoured: tuple[RepoDataRecord, ...] = ()
    pinned: tuple[RepoDataRecord, ...] = ()


def first_question(target: Target) -> CondaRequest:
    """What a target asks of conda: its requirements, and the Python that it names.

    In order: the solver's picks depend on it, and a lock's content hash does not.
    """
    python = f"python {target.python}.*"
    requirements, constraints = requirements_of(target, "conda")
    return CondaRequest(
        specs=tuple(sorted({*requirements, python})),
        constraints=tuple(sorted(set(constraints))),
        virtual=virtual_packages(target.virtual),
        strict=target.priority == "strict",
    )


def virtual_packages(system: Iterable[tuple[str, str]]) -> tuple[tuple[str, str, str], ...]:
    """(name, version, build) of what packages may count on: a target's `system`, and that it is Linux.

    `__archspec` has its value in the build string. Nothing is promised about the kernel's version.
    """
    rows = [("__linux", "0", "0"), ("__unix", "0", "0")]
    for name, value in system:
        rows.append((name, "1", value) if name == "__archspec" else (name, value, "0"))
    return tuple(sorted(rows))


def run(work: Coroutine[Any, Any, T]) -> T:
    """`work` to its end."""
    _end_gently()
    return asyncio.run(work)


@functools.cache
def _end_gently() -> None:
    """Lets the process end by itself.

    A thread of rattler hands over its result and then still needs the interpreter for a moment. If that is
    on its way out by then the process dies of a signal instead of telling its error (seen in 1 of 5 runs
    with py-rattler 0.28; in none of 400 with this pause).
    """
    atexit.register(time.sleep, _LINGER)


class CondaSolver:
    """Answers questions about one target's channels."""

    def __init__(self, target: Target, channels: ChannelAccess, gateway: Gateway) -> None:
        import rattler
        import rattler.exceptions

        self._rattler = rattler
        self._target = target
        self._channels = channels
        self._gateway = gateway
        # As rattler writes them: hosts in small letters, no default ports.
        self._true = {
            rattler.Channel(channels.place(true)).base_url.rstrip("/"): true for true in target.channels
        }
        self._sources = list(self._true)
        self._subdirs: list[Any] = [SUBDIRS[target.platform], "noarch"]

    async def solve(self, question: CondaRequest) -> list[RepoDataRecord]:
        """The records of an environment, one a package. Raises NoSolutionError, and LockError for channels
        that cannot be read."""
        records = await self._solve(question, ())
        if question.strict and (names := await self._passed_over(question, records)):
            records = await self._solve(question, names)
        return records

    async def _passed_over(self, question: CondaRequest, solution: Sequence[RepoDataRecord]) -> list[str]:
        """The names that came from a channel although one before it has them in other versions.

        rattler reads of what is asked for only the records that match; strict priority is about names.
        """
        requested = {split_spec(text)[1] for text in question.specs if "::" not in text}
        places = {name_of(record): self._place(record) for record in solution}
        later = {name: places[name] for name in requested & places.keys() if places[name]}
        if not later:
            return []
        before = await self.records(sorted(later), first=max(later.values()))
        first = {name_of(record): self._place(record) for record in reversed(before)}
        return sorted(name for name in first if first[name] < later[name])

    async def _solve(self, question: CondaRequest, names: Sequence[str]) -> list[RepoDataRecord]:
        """`names` are read in all their versions."""
        rattler = self._rattler
        priority = rattler.ChannelPriority.Strict if question.strict else rattler.ChannelPriority.Disabled
        specs = [self._spec(text) for text in (*question.specs, *names)]
        constraints = [self._spec(text) for text in question.constraints]
        virtual = [self._virtual(*row) for row in question.virtual]
        try:
            solution: list[RepoDataRecord] = await self._reading(
                lambda: rattler.solve(
                    sources=self._sources,
                    specs=specs,
                    constraints=constraints,
                    gateway=self._gateway,
                    platforms=self._subdirs,
                    locked_packages=question.favoured,
                    pinned_packages=question.pinned,
                    virtual_packages=virtual,
                    channel_priority=priority,
                    channel_relations="disabled",
                )
            )
            return solution
        except rattler.exceptions.SolverError as error:
            raise NoSolutionError(self._with_true_addresses(str(error))) from error

    async def solution(self, question: CondaRequest) -> list[RepoDataRecord]:
        """As `solve`, but nothing where there is no solution."""
        try:
            return await self.solve(question)
        except NoSolutionError:
            return []

    async def find(self, packages: Iterable[LockedCondaPackage]) -> dict[str, RepoDataRecord]:
        """The channels' records of locked packages, by true address; a changed file is not that package."""
        packages_by_url = {package.url: package for package in packages}
        result = {}
        for record in await self.records(sorted({package.name for package in packages_by_url.values()})):
            package = packages_by_url.get(self.true_address(record))
            if package and record.sha256 and record.sha256.hex() == package.sha256:
                result[package.url] = record
        return result

    async def records(self, names: Sequence[str], *, first: int | None = None) -> list[RepoDataRecord]:
        """All that the channels, or the `first` ones, have under `names`, the first channel's first."""
        specs, sources = [self._spec(name) for name in names], self._sources[:first]
        answers = await self._reading(
            lambda: self._gateway.query(
                sources, self._subdirs, specs, recursive=False, channel_relations="disabled"
            )
        )
        result = [record for answer in answers for record in answer]
        return sorted(result, key=self._place)

    async def names(self) -> list[str]:
        """The names of all packages of all the channels."""
        names = await self._reading(
            lambda: self._gateway.names(self._sources, self._subdirs, channel_relations="disabled")
        )
        return sorted(name.normalized for name in names)

    def matches(self, record: RepoDataRecord, text: str) -> bool:
        """Whether a record is what a match spec asks for, its channel left aside."""
        return self._spec(text.rpartition("::")[2]).matches(record)

    def true_address(self, record: RepoDataRecord) -> str:
        return self._address(record.url)

    def channel(self, record: RepoDataRecord) -> str:
        """The true address of the channel that a record was found in."""
        return self._address(record.channel.rstrip("/"))

    def _address(self, url: str) -> str:
        fitting = [place for place in self._true if url == place or url.startswith(f"{place}/")]
        longest = max(fitting, key=len, default="")
        return self._true[longest] + url.removeprefix(longest) if longest else url

    def _place(self, record: RepoDataRecord) -> int:
        """Which of the channels, from 0, a record was found in."""
        return self._sources.index(record.channel.rstrip("/"))

    def locked(self, record: RepoDataRecord) -> LockedCondaPackage:
        """A record as a lock has it; `size` is 0 where the channel does not tell one.

        Raises LockError for a record without a hash, and for a package that its channel has elsewhere
        (`base_url` in its records), as a copy of a channel says that was made with all its words.
        """
        self.require_hashes([record])
        channel, url = self.channel(record), self.true_address(record)
        if not url.startswith(f"{channel}/"):
            raise LockError(
                "channel-address-mismatch",
                f"{self._target.name}: the channel {channel} says that its packages are at "
                f"{redact(url.rpartition('/')[0])}",
                hint=f"write the channel of that address at {self._target.where}, "
                f"and {channel} as its mirror in the setting 'channels'",
            )
        return LockedCondaPackage(
            name=name_of(record),
            version=str(record.version),
            build=str(record.build),
            subdir=record.subdir,
            url=url,
            filename=record.file_name,
            sha256=(record.sha256 or b"").hex(),
            md5=record.md5.hex() if record.md5 else "",
            size=record.size or 0,
            depends=merge_depends(record.depends),
        )

    def require_hashes(self, records: Iterable[RepoDataRecord]) -> None:
        """Raises LockError with the names of all packages whose channels give no sha256."""
        bare = sorted((record for record in records if not record.sha256), key=name_of)
        if bare:
            channels = " and ".join(dict.fromkeys(self.channel(record) for record in bare))
            raise LockError(
                "hash-not-published",
                f"{self._target.name}: {channels} has no sha256 for "
                f"{', '.join(record.file_name for record in bare)}",
                hint="get these packages from a channel that has one; `nvidia` does, its labels "
                "(nvidia/label/cuda-...) have only md5",
            )

    def _virtual(self, name: str, version: str, build: str) -> Any:
        rattler = self._rattler
        return rattler.GenericVirtualPackage(
            rattler.PackageName(name), rattler.Version(version), rattler.BuildString(build)
        )

    def _spec(self, text: str) -> MatchSpec:
        channel, colons, rest = text.rpartition("::")
        placed = f"{self._channels.place(channel_address(channel))}::{rest}" if colons else text
        try:
            return self._rattler.MatchSpec(placed)
        except self._rattler.exceptions.InvalidMatchSpecError as error:
            raise LockError(
                "match-spec-invalid",
                f"{self._target.name}: '{text}' is not a match spec: {str(error).splitlines()[0]}",
                hint=f"write it as `numpy 1.26.*` at {self._target.where}",
            ) from error

    def _with_true_addresses(self, text: str) -> str:
        for place in sorted(self._true, key=len, reverse=True):
            text = text.replace(place, self._true[place])
        return text.removeprefix("Cannot solve the request because of: ")

    async def _reading(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` gives. Kept records that turn out to be broken are fetched once more."""
        errors = self._rattler.exceptions
        try:
            return await ask()
        except errors.GatewayError as error:
            if not _BROKEN.search(str(error)):
                raise self._fault(str(error)) from error
        for source in self._sources:
            self._gateway.clear_repodata_cache(source, clear_disk=True)
        try:
            return await ask()
        except errors.GatewayError as error:
            raise self._fault(str(error)) from error

    def _fault(self, text: str) -> LockError:
        fault = self._channels.fault(text, self._target.channels)
        fault.message = f"{self._target.name}: {fault.message}"
        return fault


def split_spec(text: str) -> tuple[str, str]:
    """The channel of a match spec, or nothing, and the package's name."""
    channel, _, rest = text.rpartition("::")
    return channel, re.split(r"[^A-Za-z0-9_.-]", rest.strip(), maxsplit=1)[0].lower()


def name_of(record: RepoDataRecord) -> str:
    return record.name.normalized


def rank(record: RepoDataRecord) -> Rank:
    """Later is better: conda prefers what has no track_features, then the version, then the build number."""
    return (not record.track_features, record.version, record.build_number)
