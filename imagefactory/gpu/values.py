"""The frozen values of the GPU modules: scan results -> predictions -> claims about a cell.

These are different terms: *documented* (on a page of the project), *predicted* (by a scan of the GPU code),
*verified* (by a run of the suite). This module does not access files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from imagefactory.gpu.capability import Capability, GpuCode
from imagefactory.model import NO_CUDA

PROFILE = re.compile(
    r"(?:[0-9]c\.)?[0-9]g\.[0-9]{1,4}gb(?:[+.,-](?:me|gfx|all|none)(?![a-z0-9]))*"
    r"|(?<=-)[0-9]-[0-9]{1,4}c(?:me)?\b"
)
"""The profile of a slice in the lower-case name of a GPU, MIG or virtual (`A100-1-5CME`)."""


ROCM = "rocm"
"""The prefix of ROCm versions in a target's `cuda`."""
_CUDA_BUILD = re.compile(r"(?:^|_)cu(?:da)?([0-9]+(?:\.[0-9]+)*)")
_CPU_BUILD = re.compile(r"(?:^|_)cpu|^(?:mkl|eigen|nocuda)")


def mig_profile(name: str) -> str:
    """Return the MIG profile in the name of a GPU: `1g.10gb`, or `mig` without a profile.

    Empty for a whole GPU.

    Sources: NVIDIA, MIG User Guide, "MIG Device Names"; NVIDIA, Virtual GPU Software User Guide.
    """
    match = PROFILE.search(name[:200].lower())
    return match[0] if match else "mig" if re.search(r"\bmig\b", name[:200].lower()) else ""


def capability_row(capability: object, part: str) -> str:
    """Return `9.0`, or `9.0 1g.10gb` for a slice.

    Results of a whole GPU do not apply to slices, nor the reverse.
    """
    return f"{capability} {part}".rstrip()


def built_for(build: str) -> str:
    """Return the platform in a build string: a CUDA version (`12.1`, `12`), `cpu`, or "".

    `py3.11_cuda12.1_cudnn8.9.2_0` is from the pytorch channel, `cuda126_py312h1763f6d_306` and
    `cpu_mkl_py312hf462abe_109` from conda-forge, `mkl_py311h...` and `eigen_py311h...` from Anaconda.
    """
    match = _CUDA_BUILD.search(build)
    if not match:
        return "cpu" if _CPU_BUILD.search(build) else ""
    if "." in match[1]:
        return minor_version(match[1])
    major = 1 if match[1][0] != "1" else 2  # 92 is 9.2, 126 is 12.6, 12 is 12
    return ".".join(part for part in (match[1][:major], match[1][major:]) if part)


def rocm_of(cuda: str) -> str:
    """Return the ROCm version (`7`) in the `cuda` of a target for AMD GPUs (`rocm7`), empty for other
    targets.
    """
    return cuda.removeprefix(ROCM) if cuda.startswith(ROCM) else ""


def platform_of(cuda: str) -> str:
    """Return the name of the platform for messages: `CUDA 12.1`, `ROCm 7`, `CPUs`."""
    rocm = rocm_of(cuda)
    return f"ROCm {rocm}" if rocm else "CPUs" if cuda == NO_CUDA else f"CUDA {cuda}"


def minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCount:
    """The number of modules (fat binaries) in a library that have code for the same targets.

    `codes` is sorted without duplicates and may be empty.
    """

    count: int
    codes: tuple[GpuCode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLibrary:
    """A file with GPU code, or with corrupt data where such code belongs.

    `path` is relative to the root of the image, the wheel or the directory. `compressions` are the sorted
    compressions of all entries: `none`, `lz4`, `zstd`, `other`. `damage` is empty, or the problem and its
    offset in the file; then `modules` are the modules before it. `unread` counts entries of types without a
    `CodeKind` (`2 of CUDA Tile IR (kind 128), the first at 0x4618`).
    """

    path: str
    size: int
    modules: tuple[ModuleCount, ...]
    compressions: tuple[str, ...] = ()
    damage: str = ""
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPackage:
    """An installed package, by the names of its records. `build` is the conda build string."""

    name: str
    version: str
    build: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """The result of one scan. Libraries and packages are sorted by path and name.

    `facts` are a framework's statements about its build, as (framework, key, value): `("torch", "cuda",
    "12.1")`. `toolkit` are file names with versions of CUDA libraries (`libcudart.so.12.1.105`), for contents
    without packages. `source` is the display name of the scanned object.
    """

    source: str
    libraries: tuple[GpuLibrary, ...]
    packages: tuple[InstalledPackage, ...] = ()
    facts: tuple[tuple[str, str, str], ...] = ()
    toolkit: tuple[str, ...] = ()


class SupportLevel(StrEnum):
    """How many modules of one library run on one capability."""

    NATIVE = "native"
    PTX = "ptx"
    PARTIAL = "partial"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySupport:
    """The number of a library's generic modules that run on one capability (rule R9).

    `isa` is the newest PTX that the driver must compile there, empty for none. `gates` means that the
    framework must load this library.
    """

    path: str
    reach: SupportLevel
    native: int
    ptx: int
    without: int
    isa: str
    gates: bool


class Compatibility(StrEnum):
    """The answer for a GPU. `partly` means that it starts, but some of its functions have no code there.

    `on the CPU` is the answer for a package without GPU code, which needs no GPU.
    """

    YES = "yes"
    PTX = "through PTX"
    PARTLY = "partly"
    NO = "no"
    UNKNOWN = "unknown"
    CPU = "on the CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of a scan for one capability.

    `reason` is one line for people. `driver` is the oldest Linux driver (`530.30.02`), empty if unknown, and
    `driver_reason` why it is needed. `warnings` are known-bad combinations.
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
    """The query about one cell: framework x CUDA x driver x capability.

    `framework` is the distribution (`torch`), `version` its version (`2.3` or `2.3.1`), `cuda` in the format
    of targets (`12.1`, `12`, `rocm7`). `driver` is empty for any. `packages` are (name, version) in a lock,
    for CUDA libraries. `wheels` are the sha256 of its files, which identify scanned rows. `platform` is the
    architecture of the build, empty for a release, which may have several. `host` is the architecture of the
    GPU's machine, empty for any. Both are in OCI format (`arm64`).
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
    """A claim about a cell. `rule` is the name by which users can ignore it.

    `driver` is the oldest Linux driver for which it is valid, empty if unknown.
    """

    basis: ClaimBasis
    answer: Compatibility
    rule: str
    reason: str
    source: str
    driver: str = ""

    @property
    def is_fault(self) -> bool:
        """Return whether this is a known fault in some calls. Then the request is only partly fulfilled."""
        return self.rule.startswith("known-bad:") and self.answer is Compatibility.PARTLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The claims on one query, the strongest first. `warnings` are possible failures."""

    question: CellQuery
    claims: tuple[CellClaim, ...]
    warnings: tuple[CellClaim, ...] = ()

    @property
    def answer(self) -> Compatibility:
        return self.claims[0].answer if self.claims else Compatibility.UNKNOWN
