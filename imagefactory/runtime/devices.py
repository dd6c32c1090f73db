"""The machine's GPUs for a sandbox: devices of both makers, and NVIDIA's driver libraries.

NVIDIA's user-space libraries belong to the machine's kernel module, never to an image. They are in the
dynamic linker's cache. The list is that of NVIDIA's own container library for its `utility` and `compute`
capabilities.

ROCm's libraries belong to the image, which uses only the kernel's driver of the machine. Sources: Linux,
amdgpu, KFD topology (/sys/class/kfd/kfd/topology/nodes/*/properties; `gfx_target_version` is 90010 for
gfx90a, 0 for other devices); AMD, ROCm, running in Docker: /dev/kfd, and /dev/dri or its render nodes.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import ToolError
from imagefactory.model import CommandResult, RunSpec
from imagefactory.runtime.hardware import (
    FLOOR_GLIBC,
    MAKE_CDI,
    PROBE_GLIBC,
    CdiDevices,
    cdi_names,
    glibc_problem,
    newer_base,
    newest_need,
    outdated_cdi,
    parse_glibc,
    parse_linker_cache,
    read_driver,
    read_linker_cache,
)

_MODEL = re.compile(r"^Model:[ \t]*(\S.{0,99})$", re.MULTILINE)
NODES = "class/kfd/kfd/topology/nodes"
"""The directory of the kernel's AMD devices, below /sys."""
_GPU = re.compile(r"/nvidia[0-9]+$")
_VERSION = re.compile(r"^gfx_target_version ([0-9]{1,6})$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdGpus:
    """AMD GPUs: the processor of each (`gfx90a`), absolute paths of devices, and the ids of their groups.

    `refused` are nodes that this user may not open. `driver` is the version of a separately installed amdgpu
    (`6.12.12`), empty for the kernel's own.
    """

    processors: tuple[str, ...]
    devices: tuple[str, ...]
    groups: tuple[int, ...]
    driver: str
    refused: tuple[str, ...] = ()


def find_amd_gpus(*, dev: Path = Path("/dev"), sys: Path = Path("/sys")) -> AmdGpus | None:
    """Return the AMD GPUs, None if the kernel lists none or has no device for them."""
    processors = read_processors(sys / NODES)
    nodes = (dev / "kfd", *sorted(dev.glob("dri/renderD*")))
    if not processors or not nodes[0].exists():
        return None
    version = sys / "module/amdgpu/version"
    return AmdGpus(
        processors=processors,
        devices=tuple(str(path) for path in (dev / "kfd", dev / "dri") if path.exists()),
        groups=tuple(sorted({path.stat().st_gid for path in nodes} - {0})),
        driver=version.read_text().strip() if version.is_file() else "",
        refused=tuple(str(path) for path in nodes if not os.access(path, os.R_OK | os.W_OK)),
    )


def read_processors(nodes: Path) -> tuple[str, ...]:
    """Return the processor of each GPU in the kernel's list of nodes, in order."""
    processors = []
    for path in sorted(nodes.glob("*/properties"), key=lambda path: (len(path.parent.name), path)):
        try:
            version = _VERSION.search(path.read_text())
        except OSError:  # of a GPU that this container may not use
            continue
        if version and int(version[1]):
            processors.append(processor_of(int(version[1])))
    return tuple(processors)


def processor_of(version: int) -> str:
    """Return `gfx90a` for 90010: major, minor and stepping have two digits each, the last one in hex."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


# Inside a sandbox it has `libraries` and `programs`.
DRIVER_DIRECTORY = "/usr/local/nvidia-driver"
PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
NO_GPU_HINT = "run this on a machine where nvidia-smi or rocminfo lists a GPU, or do not request one"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevices:
    """NVIDIA devices and libraries by absolute path. `links` are (soname, file name) of the libraries.

    `driver` is the kernel module's version (`550.90.07`), empty without one. `models` are the names of the
    GPUs (`NVIDIA A100-SXM4-80GB`), empty if unknown.
    """

    devices: tuple[str, ...]
    libraries: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    programs: tuple[str, ...]
    driver: str
    models: tuple[str, ...] = ()

    @property
    def nvidia(self) -> bool:
        return bool(self.libraries)

    @property
    def amd(self) -> bool:
        return any(path.endswith("/kfd") for path in self.devices)


def find_device_nodes(dev: Path) -> tuple[Path, ...]:
    """Return the NVIDIA nodes below `dev`: GPUs, nvidiactl, nvidia-uvm, and the directory nvidia-caps."""
    return tuple(sorted(path for path in dev.glob("nvidia*") if path.is_char_device() or path.is_dir()))


def count_gpus(nodes: Iterable[Path]) -> int:
    return sum(1 for node in nodes if _GPU.search(str(node)))


def find_gpus(
    *,
    dev: Path = Path("/dev"),
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    programs: tuple[Path, ...] = (Path("/usr/bin"), Path("/usr/local/bin")),
    linker_cache: str | None = None,
) -> GpuDevices:
    """Return the devices to bind for a run with GPUs. Raises ToolError without a GPU or driver library.

    `linker_cache` is the text of `ldconfig -p`; with None it is run.
    """
    nodes, amd = find_device_nodes(dev), find_amd_gpus(dev=dev, sys=sys)
    if amd and not count_gpus(nodes):
        return GpuDevices(devices=amd.devices, libraries=(), links=(), programs=(), driver=amd.driver)
    if not count_gpus(nodes):
        raise ToolError(
            "gpu-device-missing",
            f"no GPU found: {dev}/nvidia0 and {dev}/kfd do not exist, or have no GPU",
            hint=NO_GPU_HINT,
        )
    names = {node.name for node in nodes}
    for needed in ("nvidiactl", "nvidia-uvm"):
        if needed not in names:
            raise ToolError(
                "gpu-driver-incomplete",
                f"no usable GPU: {dev}/{needed} is missing",
                hint="run nvidia-modprobe -c 0 -u as root",
            )
    text = require_linker_cache() if linker_cache is None else linker_cache
    cached = [
        (name, Path(path)) for name, path in parse_linker_cache(text, machine=platform.machine())
        if Path(path).is_file()
    ]  # fmt: skip
    if not any(name.startswith("libcuda.so") for name, _ in cached):
        raise ToolError(
            "gpu-driver-incomplete",
            "no usable GPU: the devices exist, but the dynamic linker does not find libcuda.so",
            hint="install the libraries of the NVIDIA driver (Debian: libcuda1) and run ldconfig",
        )
    files = {path.resolve() for _, path in cached}
    return GpuDevices(
        devices=(*map(str, nodes), *(amd.devices if amd else ())),
        libraries=tuple(sorted(map(str, files))),
        links=tuple((name, path.resolve().name) for name, path in cached if path.resolve().name != name),
        programs=tuple(
            str(program.resolve())
            for name in PROGRAMS
            if (
                program := next(
                    (directory / name for directory in programs if (directory / name).is_file()), None
                )
            )
        ),
        driver=read_driver(str(proc)),
        models=read_models(proc / "driver/nvidia/gpus"),
    )


def select_devices(gpus: GpuDevices, nodes: Collection[str]) -> GpuDevices:
    """Return only these NVIDIA GPUs (`/dev/nvidia1`) and the devices that they share, all GPUs for no nodes.

    Raises ToolError for a node that this machine lacks. AMD GPUs have no such nodes.
    """
    if not nodes or not gpus.nvidia:
        return gpus
    if missing := sorted(set(nodes) - set(gpus.devices)):
        raise ToolError(
            "gpu-device-missing",
            f"no device of a selected GPU: {missing[0] or '/proc/driver/nvidia/gpus does not name it'}",
            hint="run nvidia-modprobe as root, or select another GPU",
        )
    return replace(
        gpus, devices=tuple(path for path in gpus.devices if path in nodes or not _GPU.search(path))
    )


def read_models(directory: Path) -> tuple[str, ...]:
    """Return the names of the GPUs that the driver lists in /proc/driver/nvidia/gpus, sorted."""
    texts = [path.read_text(errors="replace") for path in directory.glob("*/information")]
    return tuple(sorted(match[1] for text in texts if (match := _MODEL.search(text))))


def require_linker_cache() -> str:
    """Return the output of `ldconfig -p`. Raises ToolError if there is no ldconfig."""
    if text := read_linker_cache():
        return text
    raise ToolError(
        "tool-missing",
        "ldconfig is not installed, and finding the driver's libraries needs it",
        hint="install ldconfig (Debian: apt-get install libc-bin)",
    )


# --- What Docker and Podman need for GPUs by CDI


CDI_FAILURE = re.compile("[Cc][Dd][Ii]|nvidia|error mounting|device node|custom device|mount request")
"""Errors of both engines for a GPU that no specification names, and a device or library that is gone."""


def current_cdi_names(
    gpus: Sequence[tuple[int, str, str]], devices: CdiDevices, driver: str
) -> tuple[str, ...]:
    """Return CDI's names of `RunSpec.selected_gpus`, of all GPUs for none.

    `driver` is the loaded one. Raises ToolError if the specifications are for another one: their libraries
    cannot use the GPUs.
    """
    if problem := outdated_cdi(devices, driver):
        raise ToolError("cdi-outdated", problem, hint=f"describe the GPUs again: {MAKE_CDI}")
    return tuple(cdi_names(gpus, devices))


def check_selinux(root: Path = Path("/sys/fs/selinux")) -> None:
    """Raise ToolError if SELinux is enforced and forbids containers the use of devices."""
    try:
        enforced = (root / "enforce").read_text().strip() == "1"
        allowed = (root / "booleans/container_use_devices").read_text().startswith("1")
    except OSError:
        return  # no SELinux, or none of its rules for containers
    if enforced and not allowed:
        raise ToolError(
            "selinux-forbids-devices",
            "SELinux forbids containers the use of devices, so they see no GPU",
            hint="sudo setsebool -P container_use_devices=on",
        )


# --- The C library that the driver's libraries need


def check_glibc(libraries: Iterable[str], spec: RunSpec, run: Callable[[RunSpec], CommandResult]) -> None:
    """Raise ToolError if a driver library of this machine needs a newer glibc than the image of `run` has.

    An image is probed only if some image could be too old. One without getconf is not checked.
    """
    need = newest_need(libraries)
    if need.version <= FLOOR_GLIBC:
        return
    probe = RunSpec(argv=PROBE_GLIBC, uid=spec.uid, read_only=True, timeout=60)
    if problem := glibc_problem(need, parse_glibc(run(probe).stdout)):
        raise ToolError("image-glibc-too-old", problem, hint=f"use an image on {newer_base(need.version)}")
