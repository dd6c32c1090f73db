"""The check `libraries`: every shared library of the packages finds the libraries that it needs.

The search is that of ld.so(8): RUNPATH or RPATH of the library, without a RUNPATH the RPATH of the program,
LD_LIBRARY_PATH, the loader cache, its standard directories. Libraries that the framework loads first (torch,
tensorflow, jax and onnxruntime load NVIDIA's by full path) are counted separately. Two tables list libraries
that may be absent, with the reason.

The search covers the directory of packages for wheels, and the whole environment for conda packages.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import re
import struct
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .. import elf, table
from ..context import CheckFailure, Context, Finding
from .packages import SHOWN, more, shorten

LIBRARY_NAME = re.compile(r"\.so(\.[0-9]+)*$")
CACHE_FILE = "/etc/ld.so.cache"
CACHE_MAGIC = b"glibc-ld.so.cache1.1"
CACHE_HEADER, CACHE_ENTRY = 48, struct.Struct("<iIIIQ")

# Part of the machine with the GPU, never of an image.
DRIVER_LIBRARIES = (
    "libcuda.so.1",
    "libcudadebugger.so.1",
    "libnvidia-*.so.*",
    "libnvcuvid.so.1",
    "libnvoptix.so.1",
)

FFMPEG = "torchaudio has a backend per FFmpeg version and takes what is there"
RDMA = "GPUDirect Storage over the network, opened only where the machine has its RDMA libraries"
CUPY = "CuPy has a module for each of NVIDIA's libraries and loads those that are there"
NVSHMEM = "NVSHMEM has a plugin per network and launcher and opens the one that is asked for"

# (whose libraries, what they need, why its absence is not a fault)
OPTIONAL_LIBRARIES = (
    ("torchaudio/lib/*", "libsox.so*", "torchaudio's SoX backend uses the system's SoX where there is one"),
    ("torchaudio/lib/*torchaudio_ffmpeg*", "libav*.so.*", FFMPEG),
    ("torio/lib/*", "libav*.so.*", FFMPEG),
    (
        "onnxruntime/capi/libonnxruntime_providers_tensorrt.so",
        "libnv*.so.*",
        "the TensorRT provider needs TensorRT",
    ),
    ("numba/np/ufunc/tbbpool*", "libtbb.so.*", "Numba runs its threads by TBB where that is there"),
    ("cupy*/*", "libcutensor*.so.*", CUPY),
    ("cupy*/*", "libnccl.so.*", CUPY),
    ("*/libcufile_rdma.so*", "libmlx5.so*", RDMA),
    ("*/libcufile_rdma.so*", "librdmacm.so*", RDMA),
    ("*/libcufile_rdma.so*", "libibverbs.so*", RDMA),
    ("*lib/nvshmem_transport_*", "libmlx5.so*", NVSHMEM),
    ("*lib/nvshmem_transport_*", "libibverbs.so*", NVSHMEM),
    ("*lib/nvshmem_transport_*", "libuc[ps].so*", NVSHMEM),
    ("*lib/nvshmem_transport_*", "libfabric.so*", NVSHMEM),
    ("*lib/nvshmem_bootstrap_*", "libpmix.so*", NVSHMEM),
    ("*lib/nvshmem_bootstrap_*", "liboshmem.so*", NVSHMEM),
    ("*lib/nvshmem_bootstrap_*", "libmpi.so*", NVSHMEM),
)

# conda's packages leave these to the machine by rule: they belong to its graphics driver.
GRAPHICS_LIBRARIES = ("libGL.so.1", "libGLX.so.0", "libEGL.so.1", "libOpenGL.so.0")

# Below an environment: another C library, for compilers to link against, and empty drivers for the same.
NOT_LOADED = ("*/sysroot/*", "*/stubs/*")

# Libraries that a framework opens by name at the first use of a GPU, so no DT_NEEDED names them:
# (the opener, along its own paths; the names).
_XLA = ("libcudart", "libcublas", "libcublasLt", "libcudnn", "libcufft", "libcusparse", "libcupti")
OPENED_BY_NAME = {
    "tensorflow": (
        ("*libtensorflow_framework.so.2", "*libtensorflow_cc.so.2"),
        (*_XLA, "libcusolver"),  # not libnccl: up to 2.18 it is linked in
    ),
    "jax": (("jax_plugins/xla_cuda*/xla_cuda_plugin.so",), (*_XLA, "libnccl")),
}
# More openers where conda built the package: its jaxlib may have the GPU code itself.
CONDA_OPENS = {"jax": ("jaxlib/xla_extension.so", "jaxlib/libjax_common.so")}


@dataclass
class Scan:
    """The libraries below `root` by path. `names` are all sonames and file names."""

    root: str
    libraries: dict[str, elf.Dynamic] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    foreign: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class System:
    """The search paths of the loader that do not depend on the library. `program` is the RPATH of Python.

    `absent` are patterns of libraries that only machines with a GPU have.
    """

    folders: tuple[str, ...]
    cached: frozenset[str]
    program: tuple[str, ...] = ()
    absent: tuple[str, ...] = DRIVER_LIBRARIES


def check(context: Context) -> Finding:
    built = bool(context.expected.conda)
    scan = scan_libraries(context.prefix if built else context.site, platform.machine())
    system = read_system(os.environ, CACHE_FILE)
    if built:
        # The loader follows the RPATH of the program for libraries without a RUNPATH of their own.
        python = os.path.realpath(sys.executable)
        header = elf.read_dynamic(python)
        program = tuple(own_folders(python, header)) if header is not None and not header.runpath else ()
        system = replace(system, program=program, absent=(*system.absent, *GRAPHICS_LIBRARIES))
    counts: Counter[str] = Counter()
    missing: dict[str, list[str]] = {}
    excused: set[str] = set()
    for path, library in scan.libraries.items():
        for name in library.needed:
            verdict = resolve(name, path, context.site, scan, system)
            counts[verdict] += 1
            if verdict in ("driver", "optional"):
                excused.add(name)
            elif verdict == "unresolved":
                missing.setdefault(name, []).append(os.path.relpath(path, scan.root))
    faults = scan.faults + [
        f"{name} is not found (needed by {owners[0]}{f' and {len(owners) - 1} more' if owners[1:] else ''})"
        for name, owners in sorted(missing.items())
    ]
    opened, absent = find_opened_by_name(context, scan, system)
    faults += absent
    if faults:
        raise CheckFailure("; ".join(faults[:SHOWN]) + more(faults))
    kinds = ("resolved", "preloaded", "driver", "optional")
    return Finding(
        f"{len(scan.libraries)} libraries find what they need"
        + "".join(f", {counts[kind]} {kind}" for kind in kinds[1:] if counts[kind])
        + (f"; may be absent and are: {shorten(sorted(excused))}" if excused else ""),
        {
            "libraries": len(scan.libraries),
            "foreign": scan.foreign,
            "opened-by-name": opened,
            **{kind: counts[kind] for kind in kinds},
        },
    )


def scan_libraries(root: str, machine: str) -> Scan:
    """Read every shared library under `root` for `machine` (`x86_64`). Count libraries for other machines."""
    scan = Scan(root)
    for folder, _, files in os.walk(root):
        for file in files:
            path = os.path.join(folder, file)
            inside = "/" + os.path.relpath(path, root)
            if not LIBRARY_NAME.search(file) or any(fnmatch.fnmatchcase(inside, each) for each in NOT_LOADED):
                continue
            if os.path.islink(path) and not os.path.exists(path):
                continue  # a dangling link, so nothing loads it
            try:
                library = elf.read_dynamic(path)
            except (elf.CorruptElfError, OSError, ValueError) as error:
                scan.faults.append(f"{os.path.relpath(path, root)} cannot be read: {error}")
                continue
            if library is None or library.machine != elf.MACHINES[machine]:
                scan.foreign += 1
                continue
            scan.libraries[path] = library
            scan.names.update(name for name in (file, library.soname) if name)
    return scan


def resolve(name: str, path: str, site: str, scan: Scan, system: System) -> str:
    """Return how the library at `path` finds `name`: resolved, preloaded, driver, optional or unresolved."""
    library = scan.libraries[path]
    own = (*own_folders(path, library), *(() if library.runpath else system.program))
    if "/" in name:
        return "resolved" if os.path.exists(name) else "unresolved"
    if name in system.cached or any(os.path.exists(os.path.join(at, name)) for at in (*own, *system.folders)):
        return "resolved"
    if name in scan.names:
        return "preloaded"
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in system.absent):
        return "driver"
    relative = relative_to(path, site, scan.root)
    for owner, pattern, _ in OPTIONAL_LIBRARIES:
        if fnmatch.fnmatchcase(relative, owner) and fnmatch.fnmatchcase(name, pattern):
            return "optional"
    return "unresolved"


def relative_to(path: str, site: str, root: str) -> str:
    """Return `path` in the format of the tables: relative to the directory of packages, else to the
    environment.
    """
    inside = os.path.relpath(path, site)
    return os.path.relpath(path, root) if inside.startswith("..") else inside


def own_folders(path: str, library: elf.Dynamic) -> list[str]:
    """Return the search path of the library. RUNPATH hides RPATH."""
    origin = os.path.dirname(os.path.realpath(path))
    written = dict.fromkeys(library.runpath or library.rpath)
    return [folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in written]


def find_opened_by_name(context: Context, scan: Scan, system: System) -> tuple[int, list[str]]:
    """Return how many of the framework's OPENED_BY_NAME libraries are found, and a fault for each missing
    one.

    They are NVIDIA libraries, so an image for CPUs or AMD GPUs has none of them.
    """
    if context.expected.cuda == table.NO_CUDA or context.expected.rocm:
        return 0, []
    framework = context.expected.framework
    owners, names = OPENED_BY_NAME.get(framework, ((), ()))
    if context.expected.conda:
        owners = (*owners, *CONDA_OPENS.get(framework, ()))
    paths = [
        path
        for path in scan.libraries
        if any(fnmatch.fnmatchcase(relative_to(path, context.site, scan.root), owner) for owner in owners)
    ]
    if owners and not paths:
        return 0, [f"none of {', '.join(owners)} is there, so no GPU library would be opened"]
    folders = {folder for path in paths for folder in own_folders(path, scan.libraries[path])}
    reached: set[str] = set(system.cached)
    for folder in (*folders, *system.program, *system.folders):
        if os.path.isdir(folder):
            reached.update(os.listdir(folder))
    absent = [name for name in names if not any(file.startswith(f"{name}.so.") for file in reached)]
    return len(names) - len(absent), [
        f"{name} is opened by name and is not within reach of {os.path.relpath(paths[0], scan.root)}"
        for name in absent
    ]


def read_system(environ: Mapping[str, str], cache: str) -> System:
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [f"/lib/{multiarch}", f"/usr/lib/{multiarch}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    try:
        with open(cache, "rb") as file:
            cached = parse_cache(file.read())
    except FileNotFoundError:
        cached = frozenset()
    return System(folders=tuple(folders), cached=cached)


def parse_cache(data: bytes) -> frozenset[str]:
    """Return the sonames in a loader cache (glibc's dl-cache.h, format since 2.2), empty for another
    format.
    """
    start = data.find(CACHE_MAGIC)
    if start < 0:
        return frozenset()
    data = data[start:]
    count = int.from_bytes(data[20:24], "little")
    names = set()
    for index in range(count):
        _, key, _, _, _ = CACHE_ENTRY.unpack_from(data, CACHE_HEADER + index * CACHE_ENTRY.size)
        names.add(data[key : data.index(b"\0", key)].decode("utf-8", "replace"))
    return frozenset(names)
