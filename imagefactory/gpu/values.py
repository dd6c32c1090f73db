"""The frozen values of the GPU modules: scan results -> predictions -> claims about a cell.

Three different terms: *documented* (a project's page says so), *predicted* (by a scan of the GPU code),
*verified* (the suite ran there). Nothing here touches a disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from imagefactory.gpu.capability import Capability, GpuCode

PROFILE = re.compile(
    r"(?:[0-9]c\.)?[0-9]g\.[0-9]{1,4}gb(?:[+.,-](?:me|gfx|all|none)(?![a-z0-9]))*"
    r"|(?<=-)[0-9]-[0-9]{1,4}c(?:me)?\b"
)
"""The profile of a slice in a GPU's name, in lower case: of MIG, or of a virtual GPU (`A100-1-5CME`)."""


def slice_of(name: str) -> str:
    """Return the profile of the slice (MIG) in a GPU's name: `1g.10gb`, or `mig` without one; empty for none.

    Sources: NVIDIA, MIG User Guide, "MIG Device Names"; NVIDIA, Virtual GPU Software User Guide.
    """
    match = PROFILE.search(name[:200].lower())
    return match[0] if match else "mig" if re.search(r"\bmig\b", name[:200].lower()) else ""


def row_of(capability: object, part: str) -> str:
    """Return `9.0`, or `9.0 1g.10gb` for a slice: a result on one does not apply to the other."""
    return f"{capability} {part}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCount:
    """`count` modules (fat binaries) of a library with code for the same targets.

    `codes` is sorted without duplicates and may be empty.
    """

    count: int
    codes: tuple[GpuCode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLibrary:
    """A file with GPU code, or with damage where such code belongs.

    `path` is relative to the image's root, the wheel or the directory. `compressions` are `none`, `lz4`,
    `zstd`, `other`, sorted, of all its entries. `damage` is empty, or says what is wrong and at which offset
    of the file; then `modules` are those before it. `unread` counts entries of types without a `CodeKind` (`2
    of CUDA Tile IR (kind 128), the first at 0x4618`).
    """

    path: str
    size: int
    modules: tuple[ModuleCount, ...]
    compressions: tuple[str, ...] = ()
    damage: str = ""
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPackage:
    """An installed package, from the names of its records. `build` is conda's build string."""

    name: str
    version: str
    build: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """The result of one scan; libraries and packages sorted by path and name.

    `facts` are a framework's statements about its own build, as (framework, key, value): `("torch", "cuda",
    "12.1")`. `toolkit` are file names with versions of CUDA's libraries (`libcudart.so.12.1.105`), for places
    without packages. `source` is the place's name for people.
    """

    source: str
    libraries: tuple[GpuLibrary, ...]
    packages: tuple[InstalledPackage, ...] = ()
    facts: tuple[tuple[str, str, str], ...] = ()
    toolkit: tuple[str, ...] = ()


class SupportLevel(StrEnum):
    """The level to which the modules of one library serve one capability."""

    NATIVE = "native"
    PTX = "ptx"
    PARTIAL = "partial"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySupport:
    """Counts of a library's generic modules on one capability (rule R9).

    `isa` is the newest PTX that must be compiled there, empty for none. `gates` says whether the framework
    must load this library.
    """

    path: str
    reach: SupportLevel
    native: int
    ptx: int
    without: int
    isa: str
    gates: bool


class Compatibility(StrEnum):
    """The answer for a GPU. `partly`: it starts, and some of it has no code there."""

    YES = "yes"
    PTX = "through PTX"
    PARTLY = "partly"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of a scan for one capability.

    `reason` is one line for a person. `driver` is the oldest driver for Linux (`530.30.02`), empty if
    unknown, and `driver_reason` why that one. `warnings` are known-bad combinations.
    """

    capability: Capability
    answer: Compatibility
    reason: str
    driver: str
    driver_reason: str
    warnings: tuple[str, ...] = ()
    libraries: tuple[LibrarySupport, ...]


class ClaimBasis(StrEnum):
    """The basis of a claim, the weakest first."""

    DOCUMENTED = "documented"
    PREDICTED = "predicted"
    VERIFIED = "verified"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellQuery:
    """One cell: framework x CUDA x driver x capability.

    `framework` is the distribution (`torch`), `version` its version (`2.3` or `2.3.1`), `cuda` as a target
    has it (`12.1`, `12`, `rocm7`). `driver` is empty for any. `packages` are (name, version) of a lock, for
    CUDA's libraries; `wheels` the sha256 of its files, by which scanned rows are found. `platform` is the
    architecture of the build, empty for a release, which may have several; `host` that of the GPU's machine,
    empty for any; both as in OCI (`arm64`).
    """

    framework: str
    version: str
    cuda: str
    capability: Capability
    driver: str = ""
    platform: str = ""
    host: str = ""
    packages: tuple[tuple[str, str], ...] = ()
    wheels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellClaim:
    """A claim about a cell. `rule` is the label by which it can be overridden.

    `driver` is the oldest driver for Linux for which it is valid, empty if unknown.
    """

    basis: ClaimBasis
    answer: Compatibility
    rule: str
    reason: str
    source: str
    driver: str = ""

    @property
    def is_fault(self) -> bool:
        """Return whether it is a known fault in some calls: then the request is only partly fulfilled."""
        return self.rule.startswith("known-bad:") and self.answer is Compatibility.PARTLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The claims on one query, the strongest first; `warnings` are possible failures there."""

    question: CellQuery
    claims: tuple[CellClaim, ...]
    warnings: tuple[CellClaim, ...] = ()

    @property
    def answer(self) -> Compatibility:
        return self.claims[0].answer if self.claims else Compatibility.UNKNOWN
