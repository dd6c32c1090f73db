"""Capabilities of GPUs, and the types of GPU code that run on them: values, parsers and formatters.

A CUDA GPU has a capability (`8.6`). An AMD GPU has a processor (`gfx90a`); one class represents both, so that
they are queried, sorted and written in the same way. CUDA code is for an architecture with the same numbers:
machine code (`sm_86`), PTX that the driver compiles (`compute_80/8.1`, with the version of its instruction
set), or LTO-IR that only a linker can use (`lto_80`). A suffix restricts it: `sm_90a`, `sm_100f`. AMD code
names its processor and features (`gfx90a:sramecc+:xnack-`). predict.py decides which code runs on which GPU.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache, total_ordering

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

    For an AMD GPU, `processor` is the name (`gfx90a`) and the numbers are those in the name (9, 0). For CUDA,
    `processor` is empty. AMD GPUs come after CUDA GPUs in sorted lists, gfx942 before gfx1100.
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
        """Return the name of machine code for this GPU: `sm_86`, `gfx90a`."""
        return self.processor or f"sm_{self.major}{self.minor}"


@lru_cache(maxsize=4096)
def parse_capability(text: str) -> Capability:
    """Parse `8.6`, `86`, `sm_86`, `compute_86` or `gfx90a`. Raises ValueError for other texts (`sm_90a`)."""
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

    `architecture` is the compile target, None for AMD code, for which `processor` is the name with its
    features. `suffix` is empty, `a` (only that capability) or `f` (its family). `isa` is the version of PTX
    (`8.1`), empty for other code.
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


@cache
def parse_code(text: str) -> GpuCode:
    """Parse the output of `str(code)`. Raises ValueError."""
    if _AMD.fullmatch(text):
        return GpuCode(CodeKind.AMD, None, processor=text)
    match = _CODE.fullmatch(text)
    if not match or (match[5] and match[1] != "compute"):
        raise ValueError(f"'{text[:40]}' is not GPU code (write sm_86, compute_80/8.1 or gfx90a)")
    architecture = Capability(int(match[2]), int(match[3]))
    return GpuCode(CodeKind(match[1]), architecture, suffix=match[4], isa=match[5] or "")


# --- The platforms of images, and their names in kernels, wheels and conda


AMD64, ARM64 = "linux/amd64", "linux/arm64"
PLATFORMS = (AMD64, ARM64)
MACHINES = {AMD64: "x86_64", ARM64: "aarch64"}
"""The machine of each platform in uname(2) and in wheel names."""
SUBDIRS = {AMD64: "linux-64", ARM64: "linux-aarch64"}
"""The name of each platform in conda."""


def architecture(name: str) -> str:
    """Return the architecture in a platform name, as in OCI and Debian: `arm64` for `linux/arm64`."""
    return name.rpartition("/")[2]


def machine_of(processor: str) -> str:
    """Return the machine name for an OCI architecture, empty for an unknown one."""
    return next((machine for name, machine in MACHINES.items() if architecture(name) == processor), "")


def this_platform() -> str:
    """Return the native platform of this machine, linux/amd64 if it is unknown."""
    return next((name for name, machine in MACHINES.items() if machine == platform.machine()), AMD64)


def can_emulate(name: str) -> bool:
    """Return whether this machine can emulate the processor of a platform."""
    return name != this_platform()


def with_suffix(name: str, made_for: str, default: str = AMD64) -> str:
    """Return the name with the platform appended, unless that is the `default` platform."""
    return name if made_for == default else f"{name}-{architecture(made_for)}"
