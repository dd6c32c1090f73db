"""Solve requests with py-rattler from the channels' records, and translate its exceptions.

The machine that solves has no influence. Virtual packages come only from the request, and so do channels;
channels in a channel's metadata are ignored.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.utils import canonicalize_name

from imagefactory.errors import LockError, redact
from imagefactory.gpu.capability import SUBDIRS
from imagefactory.http import HttpError, HttpSession, local_path, read_some
from imagefactory.lock import requirements_of
from imagefactory.lock.conda.channels import ChannelAccess
from imagefactory.lock.conda.facts import cuda_arch, split_spec
from imagefactory.lock.conda.file import merge_depends
from imagefactory.model import LockedCondaPackage, ReleaseCutoff, Target
from imagefactory.recipes.values import channel_address

if TYPE_CHECKING:
    from rattler import Gateway, MatchSpec, RepoDataRecord

T = TypeVar("T")
Rank = tuple[bool, Any, int]
_LINGER = 0.02
_MOST_REPODATA = 64 << 20  # bytes
_V3 = re.compile(r"\[[^\]]*\b(?:when|extras|flags)\s*=")
"""What only records of repodata v3 have in their dependencies."""
_BROKEN = re.compile(r"at line \d+ column \d+")  # of a complete answer that is not JSON


class NoSolutionError(Exception):
    """No packages fulfill the request. The text is the solver's output, a tree of many lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaRequest:
    """The input of the solver.

    `specs` are required, `constraints` limit other packages: both are match specs of a recipe. `virtual` are
    (name, version, build). `favoured` are records to prefer, `pinned` records whose packages must stay
    exactly the same.
    """

    specs: tuple[str, ...]
    constraints: tuple[str, ...]
    virtual: tuple[tuple[str, str, str], ...]
    strict: bool
    favoured: tuple[RepoDataRecord, ...] = ()
    pinned: tuple[RepoDataRecord, ...] = ()


def first_question(target: Target) -> CondaRequest:
    """Return the request of a target: its requirements, and its Python.

    They are sorted, because the solver's choices depend on the order and a lock's content hash does not.
    """
    python = f"python {target.python}.*"
    requirements, constraints = requirements_of(target, "conda")
    return CondaRequest(
        specs=tuple(sorted({*requirements, python})),
        constraints=tuple(sorted(set(constraints))),
        virtual=(*virtual_packages(target.virtual), *cuda_arch(target)),
        strict=target.priority == "strict",
    )


def virtual_packages(system: Iterable[tuple[str, str]]) -> tuple[tuple[str, str, str], ...]:
    """Return (name, version, build) of the virtual packages: a target's `system`, and `__linux`.

    `__archspec` has its value in the build string. There is none for the kernel's version.
    """
    rows = [("__linux", "0", "0"), ("__unix", "0", "0")]
    for name, value in system:
        rows.append((name, "1", value) if name == "__archspec" else (name, value, "0"))
    return tuple(sorted(rows))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the coroutine `work`."""
    _end_gently()
    return asyncio.run(work)


@functools.cache
def _end_gently() -> None:
    """Pause at the end of the process.

    A thread of rattler still needs the interpreter for a moment after its result. If the interpreter ends
    meanwhile, the process dies of a signal instead of printing its error (in 1 of 5 runs with py-rattler
    0.28; in none of 400 with this pause).
    """
    atexit.register(time.sleep, _LINGER)


class CondaSolver:
    """A solver for one target's channels."""

    def __init__(
        self,
        target: Target,
        channels: ChannelAccess,
        gateway: Gateway,
        cutoff: ReleaseCutoff | None = None,
        below: Iterable[LockedCondaPackage] = (),
    ) -> None:
        import rattler
        import rattler.exceptions

        self._rattler = rattler
        self._target = target
        self._channels = channels
        self._gateway = gateway
        # As rattler writes them: hosts in lower case, no default ports.
        self._true = {
            rattler.Channel(channels.place(true)).base_url.rstrip("/"): true for true in target.channels
        }
        self._sources = list(self._true)
        self._cutoff = cutoff
        self._below = {package.url for package in below}
        self._dated: set[str] = set()
        self._undated: set[str] = set()
        self._subdirs: list[Any] = [SUBDIRS[target.platform], "noarch"]

    async def solve(self, question: CondaRequest) -> list[RepoDataRecord]:
        """Return the records of an environment, one for each package.

        Raises NoSolutionError, and LockError for channels that cannot be read.
        """
        records = await self._solve(question, ())
        if question.strict and (names := await self._passed_over(question, records)):
            records = await self._solve(question, names)
        return records

    async def _passed_over(self, question: CondaRequest, solution: Sequence[RepoDataRecord]) -> list[str]:
        """Return the names that came from a channel although an earlier channel has other versions of them.

        rattler reads only the records that match, but strict priority is about names.
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
        """Solve, and read all versions of `names`."""
        rattler = self._rattler
        priority = rattler.ChannelPriority.Strict if question.strict else rattler.ChannelPriority.Disabled
        specs = [self._spec(text) for text in (*question.specs, *names)]
        constraints = [self._spec(text) for text in question.constraints]
        virtual = [self._virtual(*row) for row in question.virtual]
        try:
            solution: list[RepoDataRecord] = await self._reading(
                lambda: rattler.solve(
                    sources=self._dated_sources(),
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
            requested = {split_spec(text)[1] for text in question.specs}
            if undated := (self._undated - self._dated) & requested:
                raise self._no_time(min(undated)) from error
            raise NoSolutionError(self._with_true_addresses(str(error))) from error

    async def solution(self, question: CondaRequest) -> list[RepoDataRecord]:
        """Return the result of `solve`, empty without a solution."""
        try:
            return await self.solve(question)
        except NoSolutionError:
            return []

    async def find(
        self, packages: Iterable[LockedCondaPackage], *, any_age: bool = False
    ) -> dict[str, RepoDataRecord]:
        """Return the channels' records of locked packages, by true address. Changed files are skipped.

        With `any_age` the cutoff does not apply.
        """
        packages_by_url = {package.url: package for package in packages}
        names = sorted({package.name for package in packages_by_url.values()})
        result = {}
        for record in await self.records(names, any_age=any_age):
            package = packages_by_url.get(self.true_address(record))
            if package and record.sha256 and record.sha256.hex() == package.sha256:
                result[package.url] = record
        return result

    async def records(
        self, names: Sequence[str], *, first: int | None = None, any_age: bool = False
    ) -> list[RepoDataRecord]:
        """Return the records of `names` in all channels or the `first` ones, ordered by channel.

        With `any_age` the cutoff does not apply.
        """
        specs, sources = [self._spec(name) for name in names], self._sources[:first]
        answers = await self._reading(
            lambda: self._gateway.query(
                sources, self._subdirs, specs, recursive=False, channel_relations="disabled"
            )
        )
        result = [record for answer in answers for record in answer]
        return sorted(result if any_age else self.released(result), key=self._place)

    def _dated_sources(self) -> list[Any]:
        """Return the channels for the solver, without the records after the cutoff."""
        return self._sources if self._cutoff is None else [_DatedChannel(self, url) for url in self._sources]

    async def dated_records(self, source: str, subdir: Any, name: Any) -> list[RepoDataRecord]:
        """Return the records of a package in one channel up to the cutoff."""
        specs = [self._rattler.MatchSpec(name.normalized)]
        answers = await self._gateway.query(
            [source], [subdir], specs, recursive=False, channel_relations="disabled"
        )
        return self.released([record for answer in answers for record in answer])

    def released(self, records: list[RepoDataRecord]) -> list[RepoDataRecord]:
        """Return the records up to the cutoff. Records without a time are excluded."""
        cutoff = self._cutoff
        if cutoff is None:
            return records
        allowed = []
        for record in records:
            time, name = released_at(record), canonicalize_name(name_of(record))
            if name in cutoff.allowed or self.true_address(record) in self._below:
                allowed.append(record)
            elif time is None:
                self._undated.add(name_of(record))
                continue
            elif time <= cutoff.time:
                allowed.append(record)
            self._dated.add(name_of(record))
        return allowed

    def _no_time(self, name: str) -> LockError:
        return LockError(
            "upload-time-missing",
            f"{self._target.name}: the channel has no timestamp for {name}, so its age is unknown",
            hint=f'exempt the package: --exclude-newer "7 days except {name}"',
        )

    async def names(self) -> list[str]:
        """Return the names of all packages of all channels."""
        names = await self._reading(
            lambda: self._gateway.names(self._sources, self._subdirs, channel_relations="disabled")
        )
        if not names:
            self._check_revision()
        return sorted(name.normalized for name in names)

    def _check_revision(self) -> None:
        """Raise LockError if a channel without readable packages has records of a newer format.

        Source: CEP 48, the key `v3` of repodata; its wheels are not read either.
        """
        for true in self._target.channels:
            for subdir in self._subdirs:
                address = self._channels.address(f"{true}/{subdir}/repodata.json")
                try:
                    document = json.loads(self._fetched(address))
                    version, newer = document.get("repodata_version", 1), document.get("v3") or {}
                except (HttpError, OSError, ValueError, AttributeError):
                    continue  # reading the channel has its own errors
                if version in (1, 2) and not newer:
                    continue
                label = f"repodata version {version}" if version not in (1, 2) else "repodata v3"
                raise LockError(
                    "repodata-unsupported",
                    f"{self._target.name}: the channel {true} has only {label}, which cannot be read",
                    hint=f"use another channel at {self._target.where}, or a newer py-rattler",
                )

    def _fetched(self, address: str) -> bytes:
        if path := local_path(address):
            return path.read_bytes()
        with HttpSession(self._channels) as web:
            return web.request(address, lambda response: read_some(response.raw, _MOST_REPODATA))

    def matches(self, record: RepoDataRecord, text: str) -> bool:
        """Return whether a record matches a match spec, without its channel."""
        return self._spec(text.rpartition("::")[2]).matches(record)

    def true_address(self, record: RepoDataRecord) -> str:
        return self._address(record.url)

    def channel(self, record: RepoDataRecord) -> str:
        """Return the true address of a record's channel."""
        return self._address(record.channel.rstrip("/"))

    def _address(self, url: str) -> str:
        fitting = [address for address in self._true if url == address or url.startswith(f"{address}/")]
        longest = max(fitting, key=len, default="")
        return self._true[longest] + url.removeprefix(longest) if longest else url

    def _place(self, record: RepoDataRecord) -> int:
        """Return the number of a record's channel, from 0."""
        return self._sources.index(record.channel.rstrip("/"))

    def locked(self, record: RepoDataRecord) -> LockedCondaPackage:
        """Return a record as a locked package. `size` is 0 if the channel has no size.

        Raises LockError for a record without a hash, and for a package at another address (`base_url` in the
        channel's records), as in a copy of a channel with all its metadata.
        """
        self.require_hashes([record])
        if newer := next((text for text in record.depends if _V3.search(text)), ""):
            raise LockError(
                "repodata-unsupported",
                f"{self._target.name}: {record.file_name} has a dependency of repodata v3, '{newer}', "
                "which a lock cannot contain",
                hint=f"exclude this build or version at {self._target.where}",
            )
        channel, url = self.channel(record), self.true_address(record)
        if not url.startswith(f"{channel}/"):
            raise LockError(
                "channel-address-mismatch",
                f"{self._target.name}: the packages of the channel {channel} are at another address, "
                f"{redact(url.rpartition('/')[0])}",
                hint=f"write that address as the channel at {self._target.where}, "
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
        """Raise LockError with the names of all packages whose channels have no sha256."""
        bare = sorted((record for record in records if not record.sha256), key=name_of)
        if bare:
            channels = " and ".join(dict.fromkeys(self.channel(record) for record in bare))
            raise LockError(
                "hash-not-published",
                f"{self._target.name}: {channels} has no sha256 for "
                f"{', '.join(record.file_name for record in bare)}",
                hint="get these packages from a channel with sha256, such as `nvidia` instead of "
                "nvidia/label/cuda-...",
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
        for address in sorted(self._true, key=len, reverse=True):
            text = text.replace(address, self._true[address])
        return text.removeprefix("Cannot solve the request because of: ")

    async def _reading(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ask`. Corrupt cached records are fetched again once."""
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


class _DatedChannel:
    """A channel for rattler's solver, without the records after the cutoff (protocol RepoDataSource)."""

    def __init__(self, solver: CondaSolver, url: str) -> None:
        self._solver = solver
        self._url = url

    async def fetch_package_records(self, platform: Any, name: Any) -> list[RepoDataRecord]:
        return await self._solver.dated_records(self._url, platform, name)

    def package_names(self, _platform: Any) -> list[str]:
        return []  # only for a search of all names


def released_at(record: RepoDataRecord) -> datetime | None:
    """Return when a channel got a package, else when it was built; None if the record has neither."""
    time = record.indexed_timestamp or record.timestamp
    return time if time is None or time.tzinfo else time.replace(tzinfo=UTC)


def name_of(record: RepoDataRecord) -> str:
    return record.name.normalized


def rank(record: RepoDataRecord) -> Rank:
    """Return a sort key as conda uses: no track_features, then the version, then the build number."""
    return (not record.track_features, record.version, record.build_number)
