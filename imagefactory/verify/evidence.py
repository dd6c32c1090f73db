"""Read the identity of GPUs on the host, outside of any image: on this machine, or in a kit.

runtime/hardware.py reads NVIDIA GPUs, because kits contain it. Here its result becomes a frozen value.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from imagefactory.errors import NoGpuError
from imagefactory.runtime.devices import NODES, find_amd_gpus, processor_of
from imagefactory.runtime.hardware import (
    FORMAT,
    HINT,
    LOST,
    MACHINE,
    UNUSABLE,
    NoGpu,
    Places,
    read_hardware,
    read_memory,
)
from imagefactory.serialize import Constant, ObjectSchema, PairsAsObject
from imagefactory.verify.outcome import clean
from imagefactory.verify.report import EVIDENCE_LOCAL, DeviceNode, GpuIdentity, Hardware, Uuid, Version

# --- AMD GPUs
# Three sources must agree: the kernel's list of nodes, the same GPU's device below /sys/class/drm, and its
# render node. Documented in: Linux, amdkfd, KFD topology: `unique_id` and `drm_render_minor` of a node;
# amdgpu, sysfs: `unique_id`, in hexadecimal, and `product_name`; proc_devices(5).

AMD_HINT = "run it where `rocminfo` lists a GPU, as a user who can open /dev/kfd and its render node"
_MAJOR = re.compile(r"^\s*([0-9]+)\s+drm$", re.MULTILINE)
_RELEASE = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdPlaces:
    """The directories with GPU data of a machine. `release` is the kernel version, empty for this machine."""

    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    release: str = ""


LOCAL_AMD_PLACES = AmdPlaces()


def read_amd(places: AmdPlaces = LOCAL_AMD_PLACES) -> Hardware | None:
    """Return the AMD GPUs, None if the kernel lists none. Raises NoGpuError if the sources disagree on all.

    `known` are the ids below /sys/class/drm, `nodes` the render nodes. A GPU on which the sources disagree is
    skipped: graphics units of CPUs have no id.
    """
    devices = find_amd_gpus(dev=places.dev, sys=places.sys)
    if devices is None:
        return None
    gpus: list[GpuIdentity] = []
    nodes: list[str] = []
    lost: list[tuple[str, str]] = []
    for directory in sorted(path.parent for path in (places.sys / NODES).glob("*/properties")):
        properties = _properties(directory)
        if not properties.get("gfx_target_version"):
            continue
        try:
            gpu, node = _read_gpu(places, directory, properties)
        except NoGpuError as error:
            lost.append((f"{LOST}{len(gpus) + len(lost)}", error.message.removeprefix(UNUSABLE)))
            continue
        gpus.append(gpu)
        nodes.append(node)
    if not gpus and lost:
        raise NoGpuError(
            "gpu-not-visible", f"{UNUSABLE}{'; '.join(reason for _, reason in lost)}", hint=AMD_HINT
        )
    release = _RELEASE.match(places.release or platform.release())
    return Hardware(
        kind=EVIDENCE_LOCAL,
        driver=devices.driver or (release[0] if release else ""),
        gpus=tuple(gpus),
        known=tuple(sorted(gpu.uuid for gpu in gpus)),
        nodes=tuple(sorted(nodes)),
        notes=(*(() if devices.driver else (("amdgpu", "the kernel's own"),)), *lost),
    )


def _read_gpu(places: AmdPlaces, directory: Path, properties: Mapping[str, int]) -> tuple[GpuIdentity, str]:
    """Return a GPU and its render node. Raises NoGpuError if the sources disagree."""
    number = properties.get("drm_render_minor", 0)
    uuid = f"GPU-{properties.get('unique_id', 0):016x}"
    device = places.sys / f"class/drm/renderD{number}/device"
    if not properties.get("unique_id") or _text(device / "unique_id") != uuid.removeprefix("GPU-"):
        raise NoGpuError(
            "gpu-not-visible",
            f"{UNUSABLE}the kernel reports two different ids of {device.parent.name}",
            hint=AMD_HINT,
        )
    node = places.dev / f"dri/renderD{number}"
    if not _is_render_node(node, number, places.proc):
        raise NoGpuError(
            "gpu-not-visible", f"{UNUSABLE}{node} is not a render node of the driver", hint=AMD_HINT
        )
    processor = processor_of(properties["gfx_target_version"])
    name = clean(_text(device / "product_name")) or f"AMD {processor}"
    memory = _memory(directory) or read_memory(
        str(places.proc)
    )  # integrated graphics share the machine's memory
    return GpuIdentity(name=name, capability=processor, uuid=uuid, memory=memory), f"/dev/dri/{node.name}"


def _properties(directory: Path) -> Mapping[str, int]:
    """Return the numbers of a node, none if this user cannot read them."""
    words = (line.split() for line in _text(directory / "properties").splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _memory(directory: Path) -> int:
    """Return the memory of a GPU in bytes: the banks of its frame buffer (heap types 1 and 2)."""
    banks = [_properties(path) for path in directory.glob("mem_banks/*")]
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2))


def _is_render_node(path: Path, number: int, proc: Path) -> bool:
    major = _MAJOR.search(_text(proc / "devices").partition("Block devices:")[0])
    try:
        facts = path.stat()
    except OSError:
        return False
    device = (int(major[1]) if major else -1, number)
    return stat.S_ISCHR(facts.st_mode) and (os.major(facts.st_rdev), os.minor(facts.st_rdev)) == device


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


_EVIDENCE = ObjectSchema(
    format=Annotated[int, Constant(FORMAT)],
    driver=Version,
    gpus=tuple[GpuIdentity, ...],
    known=tuple[Uuid, ...],
    nodes=tuple[DeviceNode, ...],
    notes=Annotated[tuple[tuple[str, str], ...], PairsAsObject()],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEvidence:
    """The reader of the GPUs of this machine: NVIDIA GPUs, or else AMD GPUs."""

    places: Places = MACHINE
    amd: AmdPlaces = LOCAL_AMD_PLACES

    def read(self) -> Hardware:
        """Return the GPUs. Raises NoGpuError if there are none, StatementError for invalid values."""
        try:
            hardware = read_hardware(self.places)
        except NoGpu as error:
            if other := read_amd(self.amd):
                return other
            raise NoGpuError(
                "gpu-not-visible", f"{error}, and the kernel reports no AMD GPU", hint=HINT
            ) from error
        return parse_evidence(hardware, EVIDENCE_LOCAL, "this machine's GPUs")


def parse_evidence(value: object, kind: str, location: str) -> Hardware:
    """Parse the result of `read_hardware` on this or another machine. Raises StatementError."""
    row = _EVIDENCE.parse(value, location)
    del row["format"]
    return Hardware(kind=kind, **row)
