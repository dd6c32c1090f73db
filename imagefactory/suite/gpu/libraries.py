"""cuDNN and NCCL: which files this process has loaded, what version they say they are, what the lock says."""

from __future__ import annotations

import ctypes
import glob
import os
import re
from collections.abc import Iterable, Mapping

from ..context import CheckFailure, Finding
from . import table
from .context import GpuContext
from .frameworks.results import version_of

# Library -> the file that tells its version, and the names of its packages, PyPI's and conda's.
FILES = {"cudnn": re.compile(r"libcudnn\.so[.0-9]*"), "nccl": re.compile(r"libnccl\.so[.0-9]*")}
PACKAGES = {
    "cudnn": re.compile(r"nvidia-cudnn-cu[0-9]+|(lib)?cudnn"),
    "nccl": re.compile(r"nvidia-nccl-cu[0-9]+|nccl"),
}


def find_loaded() -> dict[str, dict[str, str]]:
    """Library -> the file of each copy in this process -> its version."""
    return versions_of(mapped_files())


def mapped_files() -> list[str]:
    """Every file that this process has in its memory."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return sorted({parts[5].rstrip("\n") for line in file if len(parts := line.split(None, 5)) == 6})


def versions_of(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of those of `paths` that are one of the libraries; opens them."""
    return {
        name: {path: read_version(name, path) for path in paths if pattern.fullmatch(os.path.basename(path))}
        for name, pattern in FILES.items()
    }


def read_version(name: str, path: str) -> str:
    """`9.1.0`, asked of the library itself: cudnnGetVersion(), ncclGetVersion(int *)."""
    library = ctypes.CDLL(path)
    if name == "cudnn":
        library.cudnnGetVersion.restype = ctypes.c_size_t
        return version_of(name, library.cudnnGetVersion())
    number = ctypes.c_int()
    code = library.ncclGetVersion(ctypes.byref(number))
    if code != 0:
        raise CheckFailure(f"{path}: ncclGetVersion answers {code}")
    return version_of(name, number.value)


def locked_versions(packages: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Library -> its package and the first three numbers of its version, where the lock has one."""
    found = {}
    for name, pattern in PACKAGES.items():
        for package, version in sorted(packages.items()):
            if pattern.fullmatch(package):
                found[name] = (package, ".".join(version.split(".")[:3]))
    return found


def judge_libraries(
    context: GpuContext, loaded: Mapping[str, Mapping[str, str]], told: Mapping[str, str]
) -> Finding:
    """Every copy and what the framework tells are the lock's version; what is locked must be loaded.

    A library that the framework has linked into itself is told and not locked. A rehearsal without a GPU
    loads few of them: what is there must still agree. Raises CheckFailure.
    """
    locked = locked_versions(context.asked.expected.locked)
    faults, lines = [], []
    for name in FILES:
        versions = {**loaded.get(name, {}), **({"the framework": told[name]} if name in told else {})}
        copies = loaded.get(name, {})
        if len(copies) > 1:
            faults.append(f"{name} is loaded {len(copies)} times: {', '.join(sorted(copies))}")
        if len(set(versions.values())) > 1:
            faults.append(f"{name} is " + ", ".join(f"{text} by {who}" for who, text in versions.items()))
        elif name in locked and versions:
            package, version = locked[name]
            found = next(iter(versions.values()))
            if found != version:
                faults.append(f"{name} {found} is loaded, {package} {version} is locked")
            lines.append(f"{name} {found} as locked")
        elif versions:
            lines.append(f"{name} {next(iter(versions.values()))}, the framework's own")
        elif name in locked and not context.asked.rehearsal:
            faults.append(f"{name} is locked ({' '.join(locked[name])}) and was not loaded")
    if faults:
        raise CheckFailure("; ".join(faults), outcome=table.LOAD_FAILED)
    if not lines and not context.asked.rehearsal:
        raise CheckFailure("neither cuDNN nor NCCL is loaded", outcome=table.LOAD_FAILED)
    return Finding(
        ", ".join(lines) or "none is loaded (rehearsed on the CPU)", {"libraries": float(len(lines))}
    )


def find_nccl(context: GpuContext) -> str:
    """The image's own libnccl, of a wheel or of conda. Raises CheckFailure where it has none, or more."""
    places = (
        os.path.join(context.site, "nvidia", "*", "lib", "libnccl.so.2"),
        os.path.join(context.prefix, "lib", "libnccl.so.2"),
    )
    found = sorted(path for place in places for path in glob.glob(place))
    if len(found) != 1:
        raise CheckFailure(
            f"the image has {len(found) or 'no'} libnccl.so.2{': ' if found else ''}{', '.join(found)}"
        )
    return found[0]
