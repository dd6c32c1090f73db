"""Wheels on PyPI: the CUDA they come with, what goes with them, what conda's packages are called there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from imagefactory.gpu.knowledge.tables import covers, numbers, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaWheel:
    """One way in which PyPI offers a framework version: `package[extras]` comes with CUDA `cuda`.

    `version` is a prefix by whole components (`2.3` covers 2.3.1). `python` is the lowest Python that
    the wheels need, empty where every base has it.
    """

    package: str
    version: str
    cuda: str
    extras: tuple[str, ...]
    python: str
    source: str


@cache
def cuda_wheels() -> tuple[CudaWheel, ...]:
    """All rows of pypi_cuda.toml, in its order."""
    return tuple(
        CudaWheel(
            package=row["package"],
            version=row["version"],
            cuda=cuda,
            extras=tuple(row.get("extras", ())),
            python=row.get("python", ""),
            source=row["source"],
        )
        for row in read_table("pypi_cuda")["wheel"]
        for cuda in row["cuda"]
    )


def offered(package: str, version: str) -> tuple[CudaWheel, ...]:
    """What PyPI offers of a framework version; empty when the table does not know that version.

    The longest row that covers `version` speaks; without one, all rows inside `version` do.
    """
    wheels = [wheel for wheel in cuda_wheels() if wheel.package == package]
    covering = [wheel for wheel in wheels if covers(wheel.version, version)]
    if covering:
        longest = max(wheel.version.count(".") for wheel in covering)
        return tuple(wheel for wheel in covering if wheel.version.count(".") == longest)
    return tuple(wheel for wheel in wheels if covers(version, wheel.version))


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A package that is released beside a framework version: its `series` (`0.21`), for these `python`s."""

    framework: str
    version: str
    package: str
    series: str
    python: tuple[str, ...]
    source: str


@cache
def _companions() -> tuple[Companion, ...]:
    rows = read_table("companions")["companion"]
    return tuple(Companion(**row | {"python": tuple(row["python"])}) for row in rows)


def companions(framework: str, version: str, python: str) -> tuple[Companion, ...]:
    """The companions of a framework version that have wheels for a Python (`3.11`)."""
    return tuple(
        one
        for one in _companions()
        if one.framework == framework and covers(one.version, version) and python in one.python
    )


def companion_names(framework: str) -> frozenset[str]:
    """The packages that some version of a framework has beside it."""
    return frozenset(one.package for one in _companions() if one.framework == framework)


def companions_for(framework: str, version: str) -> dict[str, str]:
    """Return the series (`0.21`) of each companion for a framework version, by name.

    A companion without a release for that version has an empty one. Nothing is returned for a version that
    no row covers, of which nothing is known.
    """
    known = {
        one.package: one.series
        for one in _companions()
        if one.framework == framework and covers(one.version, version)
    }
    return dict.fromkeys(sorted(companion_names(framework)), "") | known if known else {}


def last_with(companion: str, framework: str) -> str:
    """Return the newest framework version that has a companion, empty for none."""
    versions = [
        one.version for one in _companions() if (one.package, one.framework) == (companion, framework)
    ]
    return max(versions, key=numbers, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What `versions` of a package need and do not declare: `needs`, another one's name and versions.

    With `add` it is needed even where nothing else asks for it. `python` (`3.13`) is the one that it is for,
    empty for all.
    """

    package: str
    versions: SpecifierSet
    needs: Requirement
    add: bool
    source: str
    python: str = ""


@cache
def bounds() -> tuple[Bound, ...]:
    """Return all rows of bounds.toml, in its order. Raises TypeError or ValueError for a malformed one."""
    return tuple(parse_bound(**row) for row in read_table("bounds")["bound"])


def parse_bound(
    *, package: str, versions: str, needs: str, source: str, add: bool = False, python: str = ""
) -> Bound:
    """Return a row of bounds.toml. Raises ValueError for a malformed one."""
    needed = Requirement(needs)
    if package != canonicalize_name(package) or needed.name != canonicalize_name(needed.name):
        raise ValueError(f"'{package}' or '{needed.name}' is not a normalised name")
    if needed.extras or needed.marker or needed.url or not (add or needed.specifier):
        raise ValueError(f"'{needs}' is not a name with versions")
    if python and not re.fullmatch(r"3\.[0-9]{1,2}", python):
        raise ValueError(f"'{python}' is not a minor version of Python")
    return Bound(
        package=package,
        versions=SpecifierSet(versions),
        needs=needed,
        add=add,
        source=source,
        python=python,
    )


def newest_cuda() -> int:
    """The newest major version of CUDA that any row knows."""
    return max(int(wheel.cuda.partition(".")[0]) for wheel in cuda_wheels())


@cache
def families() -> dict[str, str]:
    """Family name -> the framework's distribution on PyPI (`pytorch` -> `torch`)."""
    return dict(read_table("pypi_cuda")["families"])


@cache
def pypi_names() -> dict[str, tuple[str, ...]]:
    """What conda's packages are called on PyPI where the names differ (`pytorch` -> `("torch",)`)."""
    return {row["conda"]: tuple(row["pypi"]) for row in read_table("conda_pypi")["name"]}
