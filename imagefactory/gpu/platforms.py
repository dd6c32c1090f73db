"""The platforms that images are made for, and what kernels, wheels and conda call them."""

from __future__ import annotations

AMD64, ARM64 = "linux/amd64", "linux/arm64"
PLATFORMS = (AMD64, ARM64)
MACHINES = {AMD64: "x86_64", ARM64: "aarch64"}
"""Platform -> the machine of uname(2) and of wheels' names."""
SUBDIRS = {AMD64: "linux-64", ARM64: "linux-aarch64"}
"""Platform -> conda's name of it."""


def architecture(platform: str) -> str:
    """What OCI and Debian call its processor: `arm64` of `linux/arm64`."""
    return platform.rpartition("/")[2]


def with_suffix(name: str, platform: str, default: str = AMD64) -> str:
    """A name that says its platform where that is not the `default`."""
    return name if platform == default else f"{name}-{architecture(platform)}"
