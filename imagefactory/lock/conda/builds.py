"""The builds of a framework that conda's channels have: which release, for which CUDA and Python."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imagefactory.gpu.builds import built_for
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.lock.conda.behind import releases
from imagefactory.lock.conda.solver import Solver, split_spec
from imagefactory.lock.pypi.newest import Release

if TYPE_CHECKING:
    from rattler import RepoDataRecord

_PYTHON = re.compile(r"python(?:_abi)? .*?(3\.[0-9]+)\.?(?:\*|,<3)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBuild:
    """A build for a CUDA version (`12.9`, or `12`) and one Python, which is empty for all."""

    release: Release
    cuda: str
    python: str


async def cuda_builds(name: str, solver: Solver) -> tuple[CudaBuild, ...]:
    """Every build of a package for GPUs in a target's channels. Raises LockError where one cannot be read."""
    return parse_builds(await solver.records([name]))


def parse_builds(records: Iterable[RepoDataRecord]) -> tuple[CudaBuild, ...]:
    """What records tell of builds for GPUs, the oldest release first."""
    found = []
    for record in records:
        cuda = built_for(str(record.build))
        for release in releases([record]) if cuda not in ("", "cpu") else ():
            found.append(CudaBuild(release=release, cuda=cuda, python=_python(record)))
    return tuple(sorted(found, key=lambda one: (one.release.version, one.cuda, one.python)))


def _python(record: RepoDataRecord) -> str:
    told = (_PYTHON.match(text) for text in record.depends if split_spec(text)[1].startswith("python"))
    return next((one[1] for one in told if one), "")


def offered_to(builds: Iterable[CudaBuild], pythons: Collection[str]) -> dict[str, tuple[Release, ...]]:
    """The releases that have a build for each of these Pythons, the oldest first."""
    every = tuple(builds)
    return {python: tuple(one.release for one in every if one.python in ("", python)) for python in pythons}


def cudas_of(builds: Iterable[CudaBuild], series: str, pythons: Collection[str]) -> frozenset[str]:
    """For which CUDA a series (`2.10`) has builds that go with one of these Pythons."""
    return frozenset(
        one.cuda
        for one in builds
        if covers(series, str(one.release.version)) and one.python in ("", *pythons)
    )
