"""What is known about the world, as data with sources: tables that decisions look things up in.

`pypi_cuda.toml` says which CUDA the wheels on PyPI come with, `conda_pypi.toml` what conda's packages are
called on PyPI, `cuda_drivers.toml` which driver offers which CUDA. A row is *documented* or measured from
a package's own metadata; it never says that an image works. What a table does not hold is not known,
which is not the same as false.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


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
        for row in _table()["wheel"]
        for cuda in row["cuda"]
    )


def offered(package: str, version: str) -> tuple[CudaWheel, ...]:
    """What PyPI offers of a framework version; empty when the table does not know that version.

    The longest row that covers `version` speaks; without one, all rows inside `version` do.
    """
    wheels = [wheel for wheel in cuda_wheels() if wheel.package == package]
    covering = [wheel for wheel in wheels if _covers(wheel.version, version)]
    if covering:
        longest = max(wheel.version.count(".") for wheel in covering)
        return tuple(wheel for wheel in covering if wheel.version.count(".") == longest)
    return tuple(wheel for wheel in wheels if _covers(version, wheel.version))


def newest_cuda() -> int:
    """The newest major version of CUDA that any row knows."""
    return max(int(wheel.cuda.partition(".")[0]) for wheel in cuda_wheels())


@cache
def families() -> dict[str, str]:
    """Family name -> the framework's distribution on PyPI (`pytorch` -> `torch`)."""
    return dict(_table()["families"])


@cache
def pypi_names() -> dict[str, tuple[str, ...]]:
    """What conda's packages are called on PyPI where the names differ (`pytorch` -> `("torch",)`)."""
    import tomllib

    text = Path(__file__).with_name("conda_pypi.toml").read_text(encoding="utf-8")
    return {row["conda"]: tuple(row["pypi"]) for row in tomllib.loads(text)["name"]}


@cache
def cuda_drivers() -> dict[str, str]:
    """The first driver for Linux that offers each CUDA version: `12.1` -> `530.30.02`."""
    import tomllib

    text = Path(__file__).with_name("cuda_drivers.toml").read_text(encoding="utf-8")
    return {row["cuda"]: row["driver"] for row in tomllib.loads(text)["driver"]}


@cache
def _table() -> dict[str, Any]:
    import tomllib  # only those who ask about CUDA pay for it

    return tomllib.loads(Path(__file__).with_name("pypi_cuda.toml").read_text(encoding="utf-8"))


def _covers(prefix: str, version: str) -> bool:
    return version == prefix or version.startswith(prefix + ".")
