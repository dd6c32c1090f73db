"""cuDNN and NCCL: the files loaded by this process, their versions, and the locked versions."""

from __future__ import annotations

import ctypes
import glob
import os
import re
from collections.abc import Iterable, Mapping

from ..context import CheckFailure, Finding
from .context import GpuContext
from .frameworks.results import version_of

# Library -> its file, and the names of its packages, PyPI's and conda's.
FILES = {"cudnn": re.compile(r"libcudnn\.so[.0-9]*"), "nccl": re.compile(r"libnccl\.so[.0-9]*")}
PACKAGES = {
    "cudnn": re.compile(r"nvidia-cudnn-cu[0-9]+|(lib)?cudnn"),
    "nccl": re.compile(r"nvidia-nccl-cu[0-9]+|nccl"),
}


def find_loaded() -> dict[str, dict[str, str]]:
    """Return the version of each loaded file, by library."""
    return versions_of(mapped_files())


def mapped_files() -> list[str]:
    """Return every file that this process has mapped into memory."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return sorted({parts[5].rstrip("\n") for line in file if len(parts := line.split(None, 5)) == 6})


def versions_of(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the versions of those `paths` that are one of the libraries. The files are loaded."""
    return {
        name: {path: read_version(name, path) for path in paths if pattern.fullmatch(os.path.basename(path))}
        for name, pattern in FILES.items()
    }


def read_version(name: str, path: str) -> str:
    """Return `9.1.0`, reported by the library: cudnnGetVersion(), ncclGetVersion(int *)."""
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
    """Return the locked package of each library and the first three numbers of its version."""
    return {
        name: (package, ".".join(version.split(".")[:3]))
        for name, pattern in PACKAGES.items()
        for package, version in sorted(packages.items())
        if pattern.fullmatch(package)
    }


def judge_libraries(
    context: GpuContext, loaded: Mapping[str, Mapping[str, str]], reported: Mapping[str, str]
) -> Finding:
    """Compare every copy, and the version that the framework reports, with the lock. Raises CheckFailure.

    A locked library must be loaded. A library that is linked into the framework is reported but not locked. A
    rehearsal without a GPU loads only some of them, which must agree too.
    """
    locked = locked_versions(context.request.expected.locked)
    faults, lines = [], []
    for name in FILES:
        copies = loaded.get(name, {})
        versions = {**copies, **({"the framework": reported[name]} if name in reported else {})}
        current = next(iter(versions.values()), "")
        if len(copies) > 1:
            faults.append(f"{name} is loaded {len(copies)} times: {', '.join(sorted(copies))}")
        if len(set(versions.values())) > 1:
            faults.append(f"{name} is " + ", ".join(f"{text} by {who}" for who, text in versions.items()))
        elif name in locked and versions:
            package, version = locked[name]
            if current != version:
                faults.append(f"{name} {current} is loaded, {package} {version} is locked")
            lines.append(f"{name} {current} as locked")
        elif versions:
            lines.append(f"{name} {current}, the framework's own")
        elif name in locked and not context.rehearsal:
            faults.append(f"{name} is locked ({' '.join(locked[name])}) and was not loaded")
    if faults:
        raise CheckFailure("; ".join(faults))
    if not lines and not context.rehearsal:
        raise CheckFailure("neither cuDNN nor NCCL is loaded")
    detail = ", ".join(lines) or "none is loaded (rehearsed on the CPU)"
    return Finding(detail, {"libraries": float(len(lines))})


def find_nccl(context: GpuContext) -> str:
    """Return the path of libnccl, from a wheel or conda. Raises CheckFailure unless there is exactly one."""
    places = (
        os.path.join(context.site, "nvidia", "*", "lib", "libnccl.so.2"),
        os.path.join(context.prefix, "lib", "libnccl.so.2"),
    )
    paths = sorted(path for place in places for path in glob.glob(place))
    if not paths:
        raise CheckFailure("the image has no libnccl.so.2")
    if len(paths) > 1:
        raise CheckFailure(f"the image has {len(paths)} libnccl.so.2: {', '.join(paths)}")
    return paths[0]
