"""CUDA toolkits and drivers: the CUDA versions and GPUs that drivers support, and compiler targets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from imagefactory.gpu.capability import Capability, GpuCode, parse_capability, parse_code
from imagefactory.gpu.knowledge.tables import covers, numbers, read_table


@cache
def cuda_drivers() -> dict[str, str]:
    """Return the first Linux driver that supports each CUDA version: `12.1` -> `530.30.02`."""
    return {row["cuda"]: row["driver"] for row in read_table("cuda_drivers")["driver"]}


@cache
def minor_floors() -> dict[int, str]:
    """Return the first driver that starts programs of any minor version of a CUDA major version: 12 -> `525`.

    Source: NVIDIA, CUDA Compatibility, minor-version compatibility. It applies to code that does not need the
    compiler in the driver.
    """
    rows = read_table("cuda_drivers")["driver"]
    return {int(row["cuda"].split(".")[0]): row["minor"] for row in rows if "minor" in row}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDrivers:
    """The first and the last driver branch (`580`) that support a capability, empty for no limit."""

    first: str
    last: str
    source: str


@cache
def gpu_drivers() -> dict[Capability, GpuDrivers]:
    """Return the drivers of each capability in the table."""
    return {
        parse_capability(capability): GpuDrivers(
            first=row.get("first", ""), last=row.get("last", ""), source=row["source"]
        )
        for row in read_table("gpu_drivers")["gpu"]
        for capability in row["capabilities"]
    }


@cache
def open_modules() -> tuple[Capability, str]:
    """Return the lowest capability that open kernel modules of drivers support, and the source."""
    row = read_table("gpu_drivers")["open"]
    return parse_capability(row["first"]), row["source"]


@cache
def forward_names() -> frozenset[str]:
    """Return the names of GPUs that support CUDA forward compatibility."""
    return frozenset(read_table("gpu_drivers")["forward"]["names"])


def native_driver(cuda: str) -> str:
    """Return the first driver that supports CUDA `cuda` or newer, empty if unknown.

    A version without a driver (12.7) has that of the next version with the same major version.
    """
    parts = numbers(cuda)
    rows = sorted((numbers(version), driver) for version, driver in cuda_drivers().items())
    return next((driver for version, driver in rows if version >= parts and version[0] == parts[0]), "")


@cache
def ptx_cuda() -> dict[str, str]:
    """Return the CUDA version that introduced each version of the PTX ISA: `8.1` -> `12.1`.

    A driver must support that CUDA version to compile such PTX.
    """
    return {row["isa"]: row["cuda"] for row in read_table("ptx_isa")["isa"]}


@cache
def cuda_targets() -> dict[str, tuple[GpuCode, ...]]:
    """Return the machine code targets of each toolkit's compiler: `12.1` -> (sm_50, ..., sm_90, sm_90a)."""
    return {
        cuda: tuple(parse_code(f"sm_{target}") for target in row["targets"].split())
        for row in read_table("cuda_targets")["toolkit"]
        for cuda in row["cuda"]
    }


def targets_of(cuda: str) -> tuple[GpuCode, ...]:
    """Return the sorted targets of a toolkit, or of all toolkits of a major version (`12`); empty if
    unknown.
    """
    return tuple(
        sorted({code for known, codes in cuda_targets().items() if covers(cuda, known) for code in codes})
    )
