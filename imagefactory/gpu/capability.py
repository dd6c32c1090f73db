"""Capabilities of GPUs and the kinds of GPU code that run on them, and how both are written.

A capability (`8.6`) is what a GPU has; one of AMD's has a processor in its place (`gfx90a`), and both are
asked about, sorted and written alike. A piece of code is for an architecture of the same numbers: machine
code (`sm_86`), PTX that the driver compiles (`compute_80/8.1`, with the version of its instruction set),
or LTO-IR that only a linker can use (`lto_80`). Suffixes narrow it: `sm_90a`, `sm_100f`. AMD's code names
its processor and features (`gfx90a:sramecc+:xnack-`). Which code runs where, predict.py says.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering

_PROCESSOR = re.compile(r"gfx([0-9]{1,2})([0-9a-f])([0-9a-f])")
_CAPABILITY = re.compile(r"(?:(?:sm|compute)_)?(?:([0-9]{1,2})\.([0-9])|([0-9]{1,2})([0-9]))")
_CODE = re.compile(r"(sm|compute|lto)_([0-9]{1,2})([0-9])([af]?)(?:/([0-9]{1,2}\.[0-9]{1,2}))?")
_AMD = re.compile(
    r"gfx[0-9a-f]{1,2}(?:[0-9a-f]{1,3}|-[0-9-]{1,8}generic)(?::[a-z]+[+-])*|gfx[0-9-]+generic(?::[a-z]+[+-])*"
)


@total_ordering
@dataclass(frozen=True, slots=True)
class Capability:
    """A CUDA compute capability: 8.6 is `Capability(8, 6)`.

    Of a GPU of AMD's `processor` is its name (`gfx90a`) and the numbers are that name's (9, 0); empty for
    CUDA's. AMD's come after all of CUDA's, gfx942 before gfx1100.
    """

    major: int
    minor: int
    processor: str = ""

    def __lt__(self, other: Capability) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[object, ...]:
        return bool(self.processor), self.major, self.minor, self.processor

    def __str__(self) -> str:
        return self.processor or f"{self.major}.{self.minor}"

    @property
    def sm(self) -> str:
        """As machine code for it is called: `sm_86`, `gfx90a`."""
        return self.processor or f"sm_{self.major}{self.minor}"


def parse_capability(text: str) -> Capability:
    """`8.6`, `86`, `sm_86`, `compute_86` or `gfx90a`. Raises ValueError for all else, such as `sm_90a`."""
    if match := _PROCESSOR.fullmatch(text.strip()):
        return Capability(int(match[1]), int(match[2], 16), match[0])
    match = _CAPABILITY.fullmatch(text.strip())
    if not match:
        raise ValueError(f"'{text[:40]}' is not a compute capability (write 8.6, or gfx90a for an AMD GPU)")
    major, minor = (match[1], match[2]) if match[1] else (match[3], match[4])
    return Capability(int(major), int(minor))


class CodeKind(StrEnum):
    SASS = "sm"
    PTX = "compute"
    LTO = "lto"
    AMD = "gfx"


@dataclass(frozen=True, slots=True, order=True)
class GpuCode:
    """One piece of GPU code in a module.

    `architecture` is what it was compiled for and None for AMD's, which `processor` names with its
    features. `suffix` is empty, `a` (that capability alone) or `f` (its family). `isa` is the version of
    PTX (`8.1`), empty for all that is not PTX.
    """

    kind: CodeKind
    architecture: Capability | None
    suffix: str = ""
    isa: str = ""
    processor: str = ""

    def __str__(self) -> str:
        if self.architecture is None:
            return self.processor
        number = f"{self.architecture.major}{self.architecture.minor}"
        return f"{self.kind}_{number}{self.suffix}{f'/{self.isa}' if self.isa else ''}"


def parse_code(text: str) -> GpuCode:
    """What `str(code)` wrote. Raises ValueError."""
    if _AMD.fullmatch(text):
        return GpuCode(CodeKind.AMD, None, processor=text)
    match = _CODE.fullmatch(text)
    if not match or (match[5] and match[1] != "compute"):
        raise ValueError(f"'{text[:40]}' is not GPU code (write sm_86, compute_80/8.1 or gfx90a)")
    architecture = Capability(int(match[2]), int(match[3]))
    return GpuCode(CodeKind(match[1]), architecture, suffix=match[4], isa=match[5] or "")


# --- The platforms that images are made for, and what kernels, wheels and conda call them


AMD64, ARM64 = "linux/amd64", "linux/arm64"
PLATFORMS = (AMD64, ARM64)
MACHINES = {AMD64: "x86_64", ARM64: "aarch64"}
"""Platform -> the machine of uname(2) and of wheels' names."""
SUBDIRS = {AMD64: "linux-64", ARM64: "linux-aarch64"}
"""Platform -> conda's name of it."""


def architecture(name: str) -> str:
    """What OCI and Debian call its processor: `arm64` of `linux/arm64`."""
    return name.rpartition("/")[2]


def machine_of(processor: str) -> str:
    """The machine of OCI's word for it, empty for one that is not known."""
    return next((machine for name, machine in MACHINES.items() if architecture(name) == processor), "")


def this_platform() -> str:
    """What this machine starts itself; linux/amd64 where it is none of them."""
    return next((name for name, machine in MACHINES.items() if machine == platform.machine()), AMD64)


def can_emulate(name: str) -> bool:
    """Whether this machine starts a platform's programs by emulation, if at all."""
    return name != this_platform()


def with_suffix(name: str, made_for: str, default: str = AMD64) -> str:
    """A name that says its platform where that is not the `default`."""
    return name if made_for == default else f"{name}-{architecture(made_for)}"
