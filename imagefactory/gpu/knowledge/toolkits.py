"""CUDA toolkits and drivers: the CUDA versions and GPUs that drivers support, and compiler targets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

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


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=4096)
def targets_of(cuda: str) -> tuple[GpuCode, ...]:
    """Return the sorted targets of a toolkit, or of all toolkits of a major version (`12`); empty if
    unknown.
    """
    return tuple(
        sorted({code for known, codes in cuda_targets().items() if covers(cuda, known) for code in codes})
    )


# --- Packages that compile GPU code while they run (`compilers.toml`)


_ONE_MAJOR = re.compile(r".+-cuda([0-9]+)x")  # cupy-cuda12x works with CUDA 12 only


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeCompiler:
    """How some versions of a package compile GPU code while they run: a row of compilers.toml.

    `pins` are the packages whose version is the CUDA version of the compiler. `bundled` are the compilers in
    its wheel, each a CUDA version and its targets. `limits` are the newest targets that it chooses, from a
    CUDA version on, for GPUs within `limited`. `ptx` means that the driver compiles all of its code, `newer`
    that it does so on GPUs that the compiler does not know, up to `newer_to`.
    """

    names: tuple[str, ...]
    replaces: str
    versions: SpecifierSet
    compiler: str
    cuda: tuple[str, ...]
    pins: tuple[str, ...]
    bundled: tuple[tuple[str, tuple[Capability, ...]], ...]
    minimum: Capability | None
    limits: tuple[tuple[str, Capability], ...]
    limited: SpecifierSet
    ptx: bool
    newer: bool
    newer_to: Capability | None
    source: str

    def toolkits(self, cuda: str) -> tuple[tuple[str, tuple[Capability, ...]], ...]:
        """Return the CUDA version and the targets of each compiler that it uses with CUDA `cuda`."""
        if self.bundled:
            return self.bundled
        plain = {code.architecture for code in cuda_targets().get(cuda, ()) if code.architecture}
        return ((cuda, tuple(sorted(plain))),) if plain else ()


@cache
def run_time_compilers() -> tuple[RunTimeCompiler, ...]:
    """Return all rows of compilers.toml, in the order of the file."""
    tables = read_table("compilers")
    pins = {row["name"]: tuple(row["packages"]) for row in tables["compiler"]}
    return tuple(
        RunTimeCompiler(
            names=tuple(row["names"]),
            replaces=row.get("replaces", ""),
            versions=SpecifierSet(row["versions"]),
            compiler=row["compiler"],
            cuda=tuple(row["cuda"]),
            pins=pins.get(row["compiler"], ()),
            bundled=tuple(
                (cuda, tuple(map(parse_capability, targets.split())))
                for cuda, targets in row.get("bundled", ())
            ),
            minimum=parse_capability(row["minimum"]) if "minimum" in row else None,
            limits=tuple((cuda, parse_capability(newest)) for cuda, newest in row.get("limits", {}).items()),
            limited=SpecifierSet(row.get("limited", "")),
            ptx=row["output"] == "PTX",
            newer=row.get("newer", "") == "PTX",
            newer_to=parse_capability(row["newer_to"]) if "newer_to" in row else None,
            source=row["source"],
        )
        for row in tables["package"]
    )


@lru_cache(maxsize=4096)
def compilers_of(name: str, version: str) -> tuple[tuple[RunTimeCompiler, tuple[str, ...]], ...]:
    """Return the rows about a version of a package, each with the CUDA versions that the package works with.

    A partial version (`2.3`) means its newest release, which a solver chooses.
    """
    newest = version if version.count(".") > 1 else f"{version}.999"
    try:
        number = Version(newest)
    except InvalidVersion:
        return ()
    major = match[1] if (match := _ONE_MAJOR.fullmatch(name)) else ""
    return tuple(
        (row, tuple(cuda for cuda in row.cuda if not major or covers(major, cuda)))
        for row in run_time_compilers()
        if name in row.names and row.versions.contains(number, prereleases=True)
    )


def find_compiler(
    name: str, version: str, cuda: str, packages: Iterable[tuple[str, str]] = ()
) -> tuple[RunTimeCompiler, str] | None:
    """Return the row for a package and the CUDA version of its compiler, None if no row is known.

    `packages` are the installed ones: their compiler counts, else `cuda`. If `cuda` is only a major version,
    the newest known compiler of it is used, which a solver chooses. A compiler in the package itself is used
    for any `cuda`.
    """
    installed = dict(packages)
    for row in run_time_compilers():
        other = next((own for own in row.names if own in installed), "")
        if other and row.replaces == name:
            name, version = other, installed[other]
    for row, versions in compilers_of(name, version):
        pinned = next((installed[pin] for pin in row.pins if pin in installed), "")
        exact = ".".join(pinned.split(".")[:2]) or cuda
        fitting = [
            known
            for known in versions
            if not row.pins or (exact and (covers(exact, known) or covers(known, exact)))
        ]
        if fitting:
            return row, max(fitting, key=numbers)
    return None


@lru_cache(maxsize=4096)
def toolkits_for(capability: Capability) -> tuple[str, ...]:
    """Return the CUDA versions whose compiler has a target for a capability, the oldest first."""
    return tuple(
        cuda
        for cuda in sorted(cuda_targets(), key=numbers)
        if any(code.architecture == capability for code in cuda_targets()[cuda])
    )
