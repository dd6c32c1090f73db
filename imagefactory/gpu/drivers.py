"""The driver that GPU code needs: rules R5 to R7. Versions are those of drivers for Linux."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.gpu.knowledge.toolkits import (
    cuda_drivers,
    gpu_drivers,
    minor_floors,
    native_driver,
    open_modules,
    ptx_cuda,
)
from imagefactory.gpu.values import GpuLibrary, LibrarySupport

_ZSTD_CUDA = "12.4"
_MAJOR = re.compile(r"[0-9]{1,3}")
# Spellings of drivers: 535.54.03, R535, nvidia-driver-535-server, 570.124.06-0ubuntu1.
_WRITTEN = re.compile(
    r"(?:nvidia[- ])?(?:driver[- ])?[rv]?([0-9]{1,4}(?:\.[0-9]{1,5}){0,3})"
    r"((?:-(?:server|open|headless|dkms|ubuntu|debian|generic|tesla))*)(?:-[0-9][0-9a-z.~+]*)?"
)
_OLDEST, _LAST_ODD, _BEYOND = 300, 418, 100  # from 430 on branches for Linux are multiples of 5


OPEN = "-open"
"""The suffix of a driver with open kernel modules: `580.178.04-open`."""


def driver_version(driver: str) -> str:
    """Return a driver without the suffix for its kernel modules: `580.178.04` for `580.178.04-open`."""
    return driver.strip().removesuffix(OPEN)


@lru_cache(maxsize=4096)
def parse_driver(text: str) -> tuple[int, ...]:
    """Parse `535.54.03`, `535.54.03-open` or a branch such as `535` into numbers. Raises ValueError."""
    version = driver_version(text)
    parts = version.split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"'{text[:40]}' is not a driver version (write 535 or 535.54.03)")
    return numbers(version)


def read_driver(text: str) -> str:
    """Parse user input: ` R535 `, `535-server` and `535-ubuntu` become 535, `570.124.06-server-open` becomes
    `570.124.06-open`.

    Raises ValueError, with a fix, for other input: a CUDA version (`12.2`), a driver for Windows (`551.23`,
    `31.0.15.5123`), or a number that is not a driver version (`0`, `999`).
    """
    quoted = f"'{text.strip()[:40]}'"
    written = _WRITTEN.fullmatch(text.strip().lower())
    if not written:
        raise ValueError(f"{quoted} is not a driver version (write 535 or 535.54.03)")
    version = written[1]
    branch, parts = numbers(version)[0], version.count(".") + 1
    if first := cuda_drivers().get(version):
        raise ValueError(
            f"{quoted} is a CUDA version; its first driver is {first} (write the driver version)"
        )
    if parts == 4 or (parts == 2 and branch > _LAST_ODD and branch % 5):
        # Drivers for Windows have numbers of their own within a branch: 581 and 582 are of branch 580.
        like = f"in WSL write its branch, {branch - branch % 5}" if parts == 2 else "write 535 or 535.54.03"
        raise ValueError(f"{quoted} is a Windows driver ({like})")
    newest = max(map(numbers, cuda_drivers().values()))[0]
    if not _OLDEST <= branch <= newest + _BEYOND:
        raise ValueError(f"{quoted} is not a known driver: they range from {_OLDEST} to {newest}")
    return version + (OPEN if OPEN in written[2] else "")


def gpu_refusal(capability: Capability, driver: str) -> tuple[str, str]:
    """Return why a driver does not support GPUs of that capability, and the source. Empty if it does, or may.

    Raises ValueError if `driver` is not a driver version.
    """
    branch, row = parse_driver(driver)[0], gpu_drivers().get(capability)
    first, open_source = open_modules()
    if driver.endswith(OPEN) and not capability.processor and capability < first:
        return f"the open kernel modules of driver {driver_version(driver)} begin at {first}", open_source
    if row and row.first and older(driver, row.first):
        return f"driver {driver} is older than GPUs of {capability}, which begin at {row.first}", row.source
    if row and row.last and branch > int(row.last):
        return f"driver {driver} no longer knows GPUs of {capability}: {row.last} was the last", row.source
    return "", ""


def driver_fix(capability: Capability, driver: str) -> str:
    """Return the driver to install in place of one that `gpu_refusal` rejects."""
    row = gpu_drivers().get(capability)
    if row and row.first and older(driver, row.first):
        return f"driver {row.first} or newer"
    if row and row.last and parse_driver(driver)[0] > int(row.last):
        return f"driver {row.last} or older"
    return f"driver {driver_version(driver)} with the proprietary kernel modules"


def older(driver: str, needed: str) -> bool:
    """Return whether `driver` is older than `needed`, by the components that both have. Raises ValueError.

    A branch is not older than its releases: 535 may be any of them.
    """
    return any(ours < theirs for ours, theirs in _until_differing(parse_driver(driver), parse_driver(needed)))


def _until_differing(version: tuple[int, ...], other: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    for ours, theirs in zip(version, other, strict=False):
        yield ours, theirs
        if ours != theirs:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumDriver:
    """The oldest driver that one condition allows, empty if unknown. `reason` is part of a line."""

    driver: str
    reason: str


def cuda_floor(cuda: str) -> MinimumDriver:
    """Return the first driver of a CUDA major version, enough for machine code: 11 -> 450, 12 -> 525, 13 ->
    580.

    This is rule R6. Source: NVIDIA, CUDA Compatibility, minor-version compatibility. `cuda` may be empty
    (unknown).
    """
    major = cuda.partition(".")[0]
    driver = minor_floors().get(int(major), "") if _MAJOR.fullmatch(major) else ""
    if not driver:
        unknown = (
            f"no driver for CUDA {cuda} is known" if cuda else "which CUDA it was built with is not known"
        )
        return MinimumDriver(driver="", reason=unknown)
    return MinimumDriver(driver=driver, reason=f"the first that runs programs of CUDA {major}")


def ptx_floor(isa: str) -> MinimumDriver:
    """Return the first driver that compiles PTX of this instruction set: one for its CUDA version or newer.

    This is rule R5. Older drivers fail with error 222. Source: NVIDIA, CUDA Programming Guide, PTX
    compatibility, and the release history in the PTX ISA.
    """
    cuda = ptx_cuda().get(isa, "")
    if not cuda:
        return MinimumDriver(
            driver="", reason=f"PTX of ISA {isa} must be compiled; which driver does is not known"
        )
    driver = native_driver(cuda)
    if not driver:
        return MinimumDriver(
            driver="", reason=f"PTX of ISA {isa} must be compiled, by a driver that offers CUDA {cuda}"
        )
    return MinimumDriver(driver=driver, reason=f"the first that compiles PTX of ISA {isa} (CUDA {cuda})")


def compression_floor(library: GpuLibrary) -> MinimumDriver | None:
    """Return the first driver that can decompress the code of a library.

    For zstd this is the driver of CUDA 12.4.

    This is rule R7. Source: NVIDIA, nvcc documentation, `--compress-mode`: not compatible with drivers
    released before CUDA 12.4. Measured with nvcc 13.0: mode `speed`, the default of CUDA 12, writes lz4;
    `balance`, `size` and the default of CUDA 13 write zstd.
    """
    if "zstd" not in library.compressions:
        return None
    return MinimumDriver(
        driver=native_driver(_ZSTD_CUDA), reason="the first that reads code compressed with zstd"
    )


def gpu_floor(capability: Capability) -> MinimumDriver | None:
    """Return the first driver that supports a capability, None if all drivers for CUDA 11 do."""
    row = gpu_drivers().get(capability)
    if row is None or not row.first:
        return None
    return MinimumDriver(driver=row.first, reason=f"the first that knows GPUs of {capability}")


def minimum_driver(
    cuda: str, capability: Capability, libraries: Iterable[tuple[GpuLibrary, LibrarySupport]]
) -> MinimumDriver:
    """Return the oldest driver for a GPU and the libraries that must load; unknown if one library's is
    unknown.

    This is rule R6. The driver for `cuda` may be unknown if there are others: they follow from the same
    build, or apply to every build.
    """
    floors = [cuda_floor(cuda)]
    for library, code in libraries:
        compressed = compression_floor(library)
        floors += [compressed] if compressed else []
        floors += [ptx_floor(code.isa)] if code.isa else []
    known = [floor for floor in floors if floor.driver]
    unknown = next((floor for floor in floors[1:] if not floor.driver), None)
    if unknown or not known:
        return unknown or floors[0]
    known += [floor] if (floor := gpu_floor(capability)) else []
    return max(known, key=lambda floor: numbers(floor.driver))


def driver_floor(cuda: str) -> str:
    """Return the oldest CUDA version whose driver runs an image of CUDA version `cuda` ("12.1", "12").

    NVIDIA's container tools compare `cuda>=X` with the newest CUDA version that the driver supports, and
    refuse to start the container if that is older. From CUDA 11 on, programs of one major version run on
    every driver of that major version ("minor version compatibility" in NVIDIA's CUDA Compatibility guide):
    driver 525, the first for 12.x, supports 12.0 and runs libraries of 12.4. So the result is the `.0` of the
    major version. A higher result would reject GPUs that work, and a lower one would only replace a clear
    error by a failed cudaGetDeviceCount. Images with NVIDIA's cuda-compat package, which
    also run on older drivers, have no such limit. Before 11, each minor version needs its first driver.
    """
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?", cuda)
    if not match:
        message = f"cuda '{cuda}' is not a version"
        raise RecipeError([Diagnostic("value-invalid", "", message, "write 12.1, or 12")])
    major, minor = int(match[1]), int(match[2] or 0)
    return f"{major}.{0 if major >= 11 else minor}"
