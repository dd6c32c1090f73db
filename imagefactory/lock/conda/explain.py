"""Explain why conda packages conflict.

The solver's output names its last attempts. So the request itself is varied: reduced to the fewest
requirements without a solution, then solved with a newer driver, without channel priority, and with another
Python. The change that makes it solvable is the reason, and each proposal has been solved.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from imagefactory.errors import UnsolvableError
from imagefactory.gpu.knowledge import cuda_drivers, pypi_names
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.gpu.values import built_for
from imagefactory.lock import OutdatedPackage, requirements_of
from imagefactory.lock.conda.facts import split_spec
from imagefactory.lock.conda.solver import (
    CondaRequest,
    CondaSolver,
    NoSolutionError,
    first_question,
    name_of,
)
from imagefactory.lock.pypi.outdated import PypiRelease, far_newer, to_accept
from imagefactory.model import LockedCondaPackage, Target
from imagefactory.recipes.values import channel_name

if TYPE_CHECKING:
    from rattler import RepoDataRecord


_LEVELS = ("x86_64", "x86_64_v2", "x86_64_v3", "x86_64_v4")
_ENOUGH = {
    "__cuda": ("99", "13.9", "12.9", "11.9"),
    "__glibc": ("2.99",),
    "__archspec": _LEVELS,
    "__cuda_arch": ("99", "12.0", "9.0", "8.0", "7.5"),
}
"""Versions of a virtual package to test whether it prevents a solution."""
_KEYS = {"__cuda": "cuda", "__glibc": "glibc", "__archspec": "archspec"}
_BRANCHES = "├└│─ "
_LINES = 12
"""Lines of the solver's output to show."""


async def explain(target: Target, solver: CondaSolver, question: CondaRequest, tree: str) -> UnsolvableError:
    """Return the error for a request without a solution; `tree` is the solver's output."""
    conflict = _ConflictExplanation(target, solver, replace(question, favoured=()))
    error = await conflict.names() or await conflict.versions()
    if not error:
        core = await conflict.fewest()
        error = await conflict.machine(core) or await conflict.priority(core) or await conflict.python(core)
        error = error or await conflict.conflict(core)
    error.tree = tree
    return error


def _misspelled(name: str, known: Iterable[str]) -> str:
    """Return the package that a misspelled name probably means, empty for none."""
    alike = [
        candidate for candidate in known if candidate[:1] == name[:1] and abs(len(candidate) - len(name)) < 2
    ]
    return next((candidate for candidate in difflib.get_close_matches(name, alike, n=1, cutoff=0.85)), "")


class _ConflictExplanation:
    """An unsolvable request. Each method checks one possible reason."""

    def __init__(self, target: Target, solver: CondaSolver, question: CondaRequest) -> None:
        self._target = target
        self._solver = solver
        self._question = question
        self._python = f"python {target.python}.*"
        self._pins = {_pin(record) for record in question.pinned}

    async def names(self) -> UnsolvableError | None:
        """Return the error for a package that no channel has."""
        texts = {split_spec(text)[1]: text for text in self._question.specs}
        had = {name_of(record) for record in await self._solver.records(sorted(texts))}
        missing = [name for name in texts if name not in had]
        if not missing:
            return None
        known = await self._solver.names()
        hints, others = [], []
        for name in missing:
            renamed = [conda for conda, pypi in pypi_names().items() if name in pypi and conda in known]
            if suggestion := next(iter(renamed), "") or _misspelled(name, known):
                hints.append(f"for '{name}' write '{suggestion}'")
            else:
                others.append(name)
        if others:
            hints.append(
                f"add the channel that has {_quoted(others)} at {self._target.where}, or write "
                f"{'it' if len(others) == 1 else 'them'} in `pip`"
            )
        channels = " or ".join(channel_name(channel) for channel in self._target.channels)
        return UnsolvableError(
            "package-not-in-channel",
            f"{self._target.name}: {_quoted(missing)} {'is' if len(missing) == 1 else 'are'} not in "
            f"{channels}",
            hint="; ".join(hints),
        )

    async def versions(self) -> UnsolvableError | None:
        """Return the error for a package that has no required version or build."""
        for text in self._question.specs:
            channel, name = split_spec(text)
            records = await self._solver.records([name])
            seen = self._seen(records, channel)
            if any(self._solver.matches(record, text) for record in seen):
                continue
            hidden = [record for record in records if self._solver.matches(record, text)]
            if hidden and not channel:
                return await self._hidden([hidden[-1]], [text])
            location = channel_name(self._solver.channel(seen[0])) if seen else channel
            version = re.match(r"\S+ ([^ \[]+)", text.rpartition("::")[2])
            bare = f"{name} {version[1]}" if version else name
            builds = [record for record in seen if self._solver.matches(record, bare)]
            if builds:
                some = sorted({_variant(str(record.build)) for record in builds})
                return UnsolvableError(
                    "package-build-not-found",
                    f"{self._target.name}: {location} has no build of {bare} that matches `{text}`; "
                    f"it has {_some(some, 6)}",
                    hint=f"change `{text}` at {self._target.where}",
                )
            versions = [
                str(candidate) for candidate in sorted({record.version for record in seen}, reverse=True)
            ]
            bound = version[1] if version else ""
            near = [
                candidate
                for candidate in versions
                if candidate.split(".")[0] == bound.lstrip("=<>!~").split(".")[0]
            ]
            is_framework = name == self._target.framework
            return UnsolvableError(
                "package-version-not-found",
                f"{self._target.name}: {location} has no `{text}`; it has {_some(near or versions, 6)}",
                hint=f"change {'its version' if is_framework else f'`{text}`'} at {self._target.where}",
            )
        return None

    async def fewest(self) -> CondaRequest:
        """Return the fewest requirements without a solution: without any one of them there is a solution."""
        pins = {_pin(record): record for record in self._question.pinned}
        specs, constraints = list(self._question.specs), list(self._question.constraints)

        def question() -> CondaRequest:
            pinned = tuple(record for text, record in pins.items() if text in specs)
            return replace(self._question, specs=tuple(specs), constraints=tuple(constraints), pinned=pinned)

        for texts, ways in ((constraints, self._question.constraints), (specs, self._in_order(pins))):
            for text in ways:
                position = texts.index(text)
                texts.remove(text)
                if not specs or await self._solver.solution(question()):  # no specs always have a solution
                    texts.insert(position, text)
        return question()

    def _in_order(self, pins: Iterable[str]) -> list[str]:
        """Return the order of removal: the parent's packages, the recipe's, Python, the framework."""
        other_specs = [text for text in self._question.specs if text not in pins]
        first = [
            text for text in other_specs if split_spec(text)[1] not in ("python", self._target.framework)
        ]
        return [*pins, *first, *(text for text in other_specs if text not in first)]

    async def machine(self, core: CondaRequest) -> UnsolvableError | None:
        """Return the error for a virtual package that is missing or too old."""
        present = {name: build if name == "__archspec" else value for name, value, build in core.virtual}
        for name, values in _ENOUGH.items():
            for value in values:
                if solution := await self._solver.solution(_with_virtual(core, name, value)):
                    return await self._needed(core, name, present.get(name, ""), solution)
        return None

    async def _needed(
        self, core: CondaRequest, name: str, has: str, solution: Sequence[RepoDataRecord]
    ) -> UnsolvableError:
        """Return the error with the lowest version of a virtual package that solves the request."""
        steps = list(_LEVELS)
        if name != "__archspec":
            records = await self._solver.records(sorted({name_of(record) for record in solution}))
            bounds = {bound for record in records for bound in _bounds(record, name)}
            steps = sorted(bounds, key=lambda text: [int(part) for part in text.split(".")])
        needed = ""
        for step in steps:
            if better := await self._solver.solution(_with_virtual(core, name, step)):
                needed, solution = step, better
                break
        needed = "" if needed == "0" else needed
        askers = [record for record in solution if any(_bounds(record, name))]
        who = _some([f"{name_of(record)} {record.version}" for record in askers], 3) or "the recipe"
        verb = "need" if len(askers) > 1 else "needs"
        problem = f"the target has {has}" if has else "the target has none"
        if name == "__cuda":
            message = f"a driver for CUDA {needed}{_driver(needed)}" if needed else "an NVIDIA driver"
        elif name == "__cuda_arch":
            message = f"GPUs of compute capability {needed}".strip() if needed else "an NVIDIA GPU"
        else:
            message = f"{'glibc' if name == '__glibc' else 'a processor of level'} {needed}".strip()
        problem = f"{self._target.name}: {who} {verb} {message} ({name}); {problem}"
        value = needed or self._target.cuda
        if name == "__cuda" and not self._target.gpu:
            hint = f"require builds for CPUs at {self._target.where}, or write a version of CUDA"
            return UnsolvableError("virtual-package-missing", problem, hint=hint)
        if name == "__cuda_arch":
            value = needed or "8.0"
            hint = f'write `capabilities: ["{value}"]` at {self._target.where}, or require another build'
            return UnsolvableError("virtual-package-missing", problem, hint=hint)
        if name == "__cuda" and "." not in value:
            value += ".0"
        return UnsolvableError(
            "virtual-package-missing",
            problem,
            hint=f'write `virtual: {{{_KEYS[name]}: "{value}"}}` at {self._target.where}, '
            "or require an older version",
        )

    async def priority(self, core: CondaRequest) -> UnsolvableError | None:
        """Return the error for a package that strict priority hides."""
        if not core.strict:
            return None
        solution = await self._solver.solution(replace(core, strict=False))
        hidden = []
        records = await self._solver.records(sorted({name_of(record) for record in solution}))
        for record in solution:
            first = next(candidate for candidate in records if name_of(candidate) == name_of(record))
            if self._solver.channel(record) != self._solver.channel(first):
                hidden.append(record)
        return await self._hidden(hidden, core.specs) if hidden else None

    async def _hidden(self, hidden: Sequence[RepoDataRecord], specs: Sequence[str]) -> UnsolvableError:
        requested = {split_spec(text)[1] for text in specs}
        records = sorted(hidden, key=lambda record: (name_of(record) not in requested, name_of(record)))
        record = records[0]
        name, holder = name_of(record), channel_name(self._solver.channel(record))
        seen = self._seen(await self._solver.records([name]), "")
        spec = next((text for text in specs if split_spec(text)[1] == name), name)
        hint = f"write `channel-priority: disabled` or another order of the channels at {self._target.where}"
        named = (*(text for text in self._question.specs if text != spec), f"{holder}::{spec}")
        if "::" not in spec and await self._solver.solution(replace(self._question, specs=named)):
            hint = f"write `{holder}::{spec}` at {self._target.where}"
            if name == self._target.framework:  # its version is the row's, so a constraint names its channel
                hint = f"write constraints: ['{holder}::{name}'] at {self._target.where}"
        only = channel_name(self._solver.channel(seen[0]))
        return UnsolvableError(
            "channel-priority-conflict",
            f"{self._target.name}: {name} {record.version} is in {holder}, but with strict channel priority "
            f"{name} comes only from {only}, which has no version that fits",
            hint=hint,
        )

    async def python(self, core: CondaRequest) -> UnsolvableError | None:
        """Return the error for a Python for which some package is not built."""
        others = tuple(text for text in core.specs if text != self._python)
        if self._python not in core.specs or not others:
            return None
        rest = tuple(text for text in self._question.specs if text != self._python)
        versions = {str(candidate.version) for candidate in await self._solver.records(["python"])}
        minors = {tuple(int(part) for part in text.split(".")[:2]) for text in versions if text[:2] == "3."}
        alone, together = [], []
        for major, minor in sorted(minors):
            spec = f"python {major}.{minor}.*"
            if await self._solver.solution(replace(core, specs=(*others, spec))):
                alone.append(f"{major}.{minor}")
                if await self._solver.solution(replace(self._question, specs=(*rest, spec))):
                    together.append(f"{major}.{minor}")
        if not alone:
            return None
        wishes = " with ".join(f"`{text}`" for text in (*others, *core.constraints) if text not in self._pins)
        fitting = together or alone
        scope = "everything works" if together else "these work"
        return UnsolvableError(
            "python-not-available",
            f"{self._target.name}: {wishes} is not available for Python {self._target.python} "
            "in these channels",
            hint=f'write `python: "{fitting[-1]}"` at {self._target.where} '
            f"({scope} with Python {_some(fitting, 9)})",
        )

    async def conflict(self, core: CondaRequest) -> UnsolvableError:
        """Return the error with the fewest contradicting requirements, and the solver's output about them."""
        try:
            await self._solver.solve(core)
            tree = ""
        except NoSolutionError as error:
            tree = "\n" + shortened(str(error))
        texts = [text for text in (*core.specs, *core.constraints) if text not in self._pins]
        below = [text for text in core.specs if text in self._pins]
        wishes = " and ".join(f"`{text}`" for text in texts)
        if below:
            wishes += f" and what {self._target.on} has ({_some(below, 4)})"
        problem = "cannot be installed" if len(texts) == 1 and not below else "conflict"
        return UnsolvableError(
            "requirements-conflict",
            f"{self._target.name}: {wishes} {problem}{tree}",
            hint=await self._wider(texts),
        )

    async def _wider(self, texts: Sequence[str]) -> str:
        """Return a replacement for one of `texts` so that all have a solution."""
        for text in texts:
            name = split_spec(text)[1]
            if text == self._python or name == self._target.framework or text == name:
                continue
            specs = tuple(name if candidate == text else candidate for candidate in self._question.specs)
            bounds = tuple(candidate for candidate in self._question.constraints if candidate != text)
            solution = await self._solver.solution(replace(self._question, specs=specs, constraints=bounds))
            had = next((record for record in solution if name_of(record) == name), None)
            if had:
                return f"change `{text}` at {self._target.where}: {name} {had.version} works with the others"
        return f"change one of these requirements at {self._target.where}"

    def _seen(self, records: Sequence[RepoDataRecord], channel: str) -> list[RepoDataRecord]:
        """Return the records of one name that the solver may use."""
        if channel:
            named = channel_name(channel)
            return [
                candidate for candidate in records if channel_name(self._solver.channel(candidate)) == named
            ]
        if not self._question.strict or not records:
            return list(records)
        first = self._solver.channel(records[0])
        return [candidate for candidate in records if self._solver.channel(candidate) == first]


def _with_virtual(question: CondaRequest, name: str, value: str) -> CondaRequest:
    row = (name, "1", value) if name == "__archspec" else (name, value, "0")
    others = tuple(entry for entry in question.virtual if entry[0] != name)
    return replace(question, virtual=tuple(sorted((*others, row))))


def _pin(record: RepoDataRecord) -> str:
    return f"{name_of(record)} =={record.version} {record.build}"


def shortened(tree: str) -> str:
    """Return the first lines of the solver's output, without repetitions."""
    lines: list[str] = []
    for line in tree.splitlines():
        if line.strip() and (not lines or line.strip(_BRANCHES) != lines[-1].strip(_BRANCHES)):
            lines.append(line.rstrip())
    if len(lines) <= _LINES:
        return "\n".join(lines)
    return "\n".join([*lines[:_LINES], f"... and {len(lines) - _LINES} more lines"])


def _bounds(record: RepoDataRecord, name: str) -> Iterable[str]:
    """Yield the least versions of a virtual package that a record accepts; 0 for any."""
    for text in (*record.depends, *record.constrains):
        if text.split()[0] == name:
            match = re.search(r"(?:>=|==?)\s*([0-9]+(?:\.[0-9]+)*)", text)
            yield match[1] if match else "0"


def _driver(cuda: str) -> str:
    driver = cuda_drivers().get(cuda if "." in cuda else f"{cuda}.0")
    return f" (NVIDIA driver {driver} or newer)" if driver else ""


def _variant(build: str) -> str:
    """Return the part of a build string before the Python and the hash: `cuda126_mkl`."""
    return re.split(r"_?(?:py\d|h[0-9a-f]{7})", build)[0] or build


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)


def _some(texts: Sequence[str], most: int) -> str:
    first = ", ".join(texts[:most])
    return f"{first} and {len(texts) - most} more" if len(texts) > most else first


# Only packages in the recipe are checked. The versions of others depend on their builds.


_PYTHON = ("python", "python_abi")
"""Packages that count as no newer release, because the recipe chose the Python."""
_CUDA = ("cuda-version", "pytorch-cuda")


async def find_behind_channels(
    target: Target, conda: Sequence[LockedCondaPackage], solver: CondaSolver
) -> tuple[OutdatedPackage, ...]:
    """Return the packages of the recipe that are far older than their channels' newest release.

    Packages limited by the framework, which the recipe pins on purpose, are ignored. Raises LockError for
    unreadable channels.
    """
    requirements, constraints = requirements_of(target, "conda")
    if not requirements:
        return ()
    wishes = (*requirements, *constraints)
    named = {split_spec(text)[1] for text in requirements} - {target.framework, *_PYTHON}
    locked = {package.name: package for package in conda if package.name in {*named, *_PYTHON}}
    by_name: dict[str, list[RepoDataRecord]] = {}
    for record in await solver.records(sorted(named)):
        by_name.setdefault(name_of(record), []).append(record)
    python = list(
        (await solver.find(locked[candidate] for candidate in _PYTHON if candidate in locked)).values()
    )
    outdated = []
    for name in sorted(named & locked.keys() & by_name.keys()):
        matching_specs = [text for text in wishes if split_spec(text)[1] == name]
        fitting = [
            record
            for record in by_name[name]
            if all(solver.matches(record, text) for text in matching_specs)
            and _fits_python(record, python, solver)
        ]
        version, known = locked[name].version, releases(fitting)
        newest = far_newer(version, known, SpecifierSet()) if _read(version) else None
        if newest is None:
            continue
        free = await _without_framework(target, name, solver)
        if free and free > Version(version):
            continue
        outdated.append(
            OutdatedPackage(
                name=name,
                locked=version,
                newest=str(newest),
                reason=await _explain_pin(target, f"{name} =={newest}", solver),
                accept=to_accept(name, version, known),
                named=True,
            )
        )
    return tuple(outdated)


async def _without_framework(target: Target, name: str, solver: CondaSolver) -> Version | None:
    """Return the version of a package that is solved without the framework and CUDA."""
    question = first_question(target)
    bare = tuple(text for text in question.specs if split_spec(text)[1] not in {target.framework, *_CUDA})
    virtual = (*(row for row in question.virtual if row[0] != "__cuda"), ("__cuda", "99", "0"))
    solution = await solver.solution(replace(question, specs=bare, virtual=virtual))
    return next((_read(str(record.version)) for record in solution if name_of(record) == name), None)


async def _explain_pin(target: Target, pin: str, solver: CondaSolver) -> str:
    """Return the reason why there is no solution with `pin`."""
    question = first_question(target)
    question = replace(question, specs=(*question.specs, pin))
    try:
        await solver.solve(question)
    except NoSolutionError as error:
        reason = await explain(target, solver, question, str(error))
        return reason.message.removeprefix(f"{target.name}: ")
    return "nothing forbids it"


def releases(records: Iterable[RepoDataRecord]) -> tuple[PypiRelease, ...]:
    """Return the releases among records, the oldest first. Each begins with its first build.

    Pre-releases and versions that only conda can parse are excluded.
    """
    days: dict[Version, list[date]] = {}
    for record in records:
        version = _read(str(record.version))
        if version and not version.is_prerelease:
            days.setdefault(version, []).extend([record.timestamp.date()] if record.timestamp else [])
    return tuple(
        PypiRelease(version=version, uploaded=min(days[version], default=None)) for version in sorted(days)
    )


def _fits_python(record: RepoDataRecord, python: Iterable[RepoDataRecord], solver: CondaSolver) -> bool:
    """Return whether a build is for the locked Python, or for any."""
    return all(
        solver.matches(build_python, text)
        for build_python in python
        for text in record.depends
        if split_spec(text)[1] == name_of(build_python)
    )


def _read(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


_BUILD_PYTHON = re.compile(r"python(?:_abi)? .*?(3\.[0-9]+)\.?(?:\*|,<3)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBuild:
    """A build for a CUDA version (`12.9`, or `12`) and one Python, empty for all Pythons."""

    release: PypiRelease
    cuda: str
    python: str


async def cuda_builds(name: str, solver: CondaSolver) -> tuple[CudaBuild, ...]:
    """Return every GPU build of a package in a target's channels. Raises LockError."""
    return parse_builds(await solver.records([name]))


def parse_builds(records: Iterable[RepoDataRecord]) -> tuple[CudaBuild, ...]:
    """Return the GPU builds among records, the oldest release first."""
    builds = []
    for record in records:
        cuda = built_for(str(record.build))
        for release in releases([record]) if cuda not in ("", "cpu") else ():
            builds.append(CudaBuild(release=release, cuda=cuda, python=_python(record)))
    return tuple(sorted(builds, key=lambda row: (row.release.version, row.cuda, row.python)))


def _python(record: RepoDataRecord) -> str:
    matches = (
        _BUILD_PYTHON.match(text) for text in record.depends if split_spec(text)[1].startswith("python")
    )
    return next((match[1] for match in matches if match), "")


def offered_to(builds: Iterable[CudaBuild], pythons: Collection[str]) -> dict[str, tuple[PypiRelease, ...]]:
    """Return the releases that have a build for each of these Pythons, the oldest first."""
    every = tuple(builds)
    return {
        python: tuple(build.release for build in every if build.python in ("", python)) for python in pythons
    }


def cudas_of(builds: Iterable[CudaBuild], series: str, pythons: Collection[str]) -> frozenset[str]:
    """Return the CUDA versions of a series (`2.10`) that has builds for one of these Pythons."""
    return frozenset(
        build.cuda
        for build in builds
        if covers(series, str(build.release.version)) and build.python in ("", *pythons)
    )
