"""The platforms that images are made for, and what kernels, wheels and conda call them."""

from __future__ import annotations

import platform

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


def emulated_here(name: str) -> bool:
    """Whether this machine starts a platform's programs by emulation, if at all."""
    return name != this_platform()


def with_suffix(name: str, made_for: str, default: str = AMD64) -> str:
    """A name that says its platform where that is not the `default`."""
    return name if made_for == default else f"{name}-{architecture(made_for)}"
