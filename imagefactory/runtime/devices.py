"""The machine's GPUs, as a sandbox needs them: devices of both makers, and NVIDIA's driver libraries.

NVIDIA's user-space libraries belong to the machine's kernel module, never to an image; they are
found through the dynamic linker's cache. Which ones compute work needs: the lists that NVIDIA's own
container library uses for its `utility` and `compute` capabilities.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import ToolError

# --- The machine's AMD GPUs, by what the kernel tells of them, and the devices that a container needs
# ROCm's libraries belong to the image: of the machine it takes the kernel's driver alone. Sources: Linux,
# amdgpu, KFD topology (/sys/class/kfd/kfd/topology/nodes/*/properties; `gfx_target_version` is 90010 of
# gfx90a,
# 0 of what is no GPU); AMD, ROCm, running in Docker: /dev/kfd, and /dev/dri or its render nodes.


NODES = "class/kfd/kfd/topology/nodes"
"""Below /sys."""
_VERSION = re.compile(r"^gfx_target_version ([0-9]{1,6})$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdGpus:
    """`processors` are a GPU's each (`gfx90a`). `devices` are absolute paths, `groups` the ids that own them,
    `refused` those nodes that this user may not open.

    `driver` is amdgpu's where it was installed beside the kernel (`6.12.12`), empty for the kernel's own.
    """

    processors: tuple[str, ...]
    devices: tuple[str, ...]
    groups: tuple[int, ...]
    driver: str
    refused: tuple[str, ...] = ()


def find_amd_gpus(*, dev: Path = Path("/dev"), sys: Path = Path("/sys")) -> AmdGpus | None:
    """None where the kernel tells of none, or has no device for them."""
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
    """The processor of each GPU in the kernel's list of nodes, in order, as far as it is told."""
    found = []
    for path in sorted(nodes.glob("*/properties"), key=lambda path: (len(path.parent.name), path)):
        try:
            told = _VERSION.search(path.read_text())
        except OSError:  # of a GPU that this container may not use
            continue
        if told and int(told[1]):
            found.append(processor_of(int(told[1])))
    return tuple(found)


def processor_of(version: int) -> str:
    """`gfx90a` of 90010: major, minor and stepping, two digits each, of which a name has the last in hex."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


# Where they appear inside a sandbox: `libraries` and `programs` below it.
DRIVER_DIRECTORY = "/usr/local/nvidia-driver"
LIBRARIES = (
    "libcuda.so",
    "libcudadebugger.so",
    "libnvidia-allocator.so",
    "libnvidia-cfg.so",
    "libnvidia-gpucomp.so",
    "libnvidia-ml.so",
    "libnvidia-nvvm.so",
    "libnvidia-nvvm70.so",
    "libnvidia-opencl.so",
    "libnvidia-pkcs11-openssl3.so",
    "libnvidia-pkcs11.so",
    "libnvidia-ptxjitcompiler.so",
    "libnvidia-tileiras.so",
)
PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
CACHE_LINE = re.compile(r"^\s+(?P<name>\S+) \((?P<kind>[^)]*)\) => (?P<path>/.+)$")
CACHE_ARCHITECTURES = {"x86_64": "x86-64", "aarch64": "AArch64"}
LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig")
NO_GPU_HINT = "run this on a machine where nvidia-smi or rocminfo lists a GPU, or do not request one"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevices:
    """Absolute paths on this machine. `links` are (soname, file name) pairs of the libraries.

    `driver` is the kernel module's version (`550.90.07`), empty when it does not say.
    """

    devices: tuple[str, ...]
    libraries: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    programs: tuple[str, ...]
    driver: str

    @property
    def nvidia(self) -> bool:
        return bool(self.libraries)

    @property
    def amd(self) -> bool:
        return any(path.endswith("/kfd") for path in self.devices)


def parse_linker_cache(text: str, *, machine: str) -> tuple[tuple[str, str], ...]:
    """(soname, path) of the driver's libraries in the output of `ldconfig -p`, for this architecture.

    The first line for a soname wins, as it does for the dynamic linker.
    """
    kind = CACHE_ARCHITECTURES.get(machine, machine)
    libraries: dict[str, str] = {}
    for line in text.splitlines():
        match = CACHE_LINE.match(line)
        if not match or kind not in [part.strip() for part in match["kind"].split(",")]:
            continue
        name = match["name"]
        if any(name == library or name.startswith(library + ".") for library in LIBRARIES):
            libraries.setdefault(name, match["path"])
    return tuple(sorted(libraries.items()))


def parse_driver_version(text: str) -> str:
    """The version in /proc/driver/nvidia/version, for the closed and the open kernel module; "" if none."""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return match[1] if match else ""


def find_device_nodes(dev: Path) -> tuple[Path, ...]:
    """The NVIDIA nodes below `dev`: the GPUs, nvidiactl, nvidia-uvm, and the folder nvidia-caps."""
    return tuple(sorted(path for path in dev.glob("nvidia*") if path.is_char_device() or path.is_dir()))


def count_gpus(nodes: Iterable[Path]) -> int:
    return sum(1 for node in nodes if re.fullmatch(r"nvidia\d+", node.name))


def find_gpus(
    *,
    dev: Path = Path("/dev"),
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    programs: tuple[Path, ...] = (Path("/usr/bin"), Path("/usr/local/bin")),
    linker_cache: str | None = None,
) -> GpuDevices:
    """What to bind for a run with GPUs. Raises ToolError when there is no GPU or no driver library.

    `linker_cache` is the text of `ldconfig -p`; None asks ldconfig.
    """
    nodes, amd = find_device_nodes(dev), find_amd_gpus(dev=dev, sys=sys)
    if amd and not count_gpus(nodes):
        return GpuDevices(devices=amd.devices, libraries=(), links=(), programs=(), driver=amd.driver)
    if not count_gpus(nodes):
        raise ToolError(
            "gpu-device-missing",
            f"no GPU: there is no {dev}/nvidia0 and no {dev}/kfd with a GPU",
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
    text = read_linker_cache() if linker_cache is None else linker_cache
    cached = [
        (name, Path(path)) for name, path in parse_linker_cache(text, machine=platform.machine())
        if Path(path).is_file()
    ]  # fmt: skip
    if not any(name.startswith("libcuda.so") for name, _ in cached):
        raise ToolError(
            "gpu-driver-incomplete",
            "no usable GPU: the devices exist, but the dynamic linker has no libcuda.so",
            hint="install the libraries of the NVIDIA driver (Debian: libcuda1) and run ldconfig",
        )
    files = {path.resolve() for _, path in cached}
    version = proc / "driver/nvidia/version"
    return GpuDevices(
        devices=(*map(str, nodes), *(amd.devices if amd else ())),
        libraries=tuple(sorted(map(str, files))),
        links=tuple((name, path.resolve().name) for name, path in cached if path.resolve().name != name),
        programs=tuple(
            str(found.resolve())
            for name in PROGRAMS
            if (found := next((folder / name for folder in programs if (folder / name).is_file()), None))
        ),
        driver=parse_driver_version(version.read_text()) if version.is_file() else "",
    )


def read_linker_cache() -> str:
    """What `ldconfig -p` prints. Raises ToolError where there is no ldconfig."""
    for program in LDCONFIG:
        if Path(program).is_file():
            done = subprocess.run(
                [program, "-p"], capture_output=True, text=True, check=False, env={}, stdin=subprocess.DEVNULL
            )
            return done.stdout
    raise ToolError(
        "tool-missing",
        "ldconfig is not installed, and the libraries of the driver cannot be found without it",
        hint="install ldconfig of glibc (Debian: libc-bin)",
    )
