"""The machine's AMD GPUs, by what the kernel tells of them, and the devices that a container needs.

ROCm's libraries belong to the image: of the machine it takes the kernel's driver alone. Sources: Linux,
amdgpu, KFD topology (/sys/class/kfd/kfd/topology/nodes/*/properties; `gfx_target_version` is 90010 of gfx90a,
0 of what is no GPU); AMD, ROCm, running in Docker: /dev/kfd, and /dev/dri or its render nodes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

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
