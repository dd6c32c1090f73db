"""How the identity of GPUs is read on the host, outside of any image: on this machine, or as a kit told it.

What is read stands in kit/hardware.py, of the standard library alone, which travels in kits; here it becomes
a frozen value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from imagefactory.serialize import Fields, Fixed, Pairs
from imagefactory.errors import NoGpuError
from imagefactory.verify.amd_evidence import AMD_HERE, AmdPlaces, read_amd
from imagefactory.verify.kit.hardware import FORMAT, HINT, MACHINE, NoGpu, Places, read_hardware
from imagefactory.verify.model import SEEN_HERE, DeviceNode, GpuIdentity, Hardware, Uuid, Version

_EVIDENCE = Fields(
    format=Annotated[int, Fixed(FORMAT)],
    driver=Version,
    gpus=tuple[GpuIdentity, ...],
    known=tuple[Uuid, ...],
    nodes=tuple[DeviceNode, ...],
    notes=Annotated[tuple[tuple[str, str], ...], Pairs()],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEvidence:
    """The GPUs of this machine: NVML, /proc/driver/nvidia and device nodes, which must agree; else AMD's."""

    places: Places = MACHINE
    amd: AmdPlaces = AMD_HERE

    def read(self) -> Hardware:
        """Raises NoGpuError where there is none to be seen, StatementError for what no driver would say."""
        try:
            found = read_hardware(self.places)
        except NoGpu as error:
            if other := read_amd(self.amd):
                return other
            raise NoGpuError(
                "gpu-not-visible", f"{error}, and the kernel reports no AMD GPU", hint=HINT
            ) from error
        return parse_evidence(found, SEEN_HERE, "this machine's GPUs")


def parse_evidence(value: object, kind: str, where: str) -> Hardware:
    """What `read_hardware` gave, here or elsewhere. Raises StatementError for anything else."""
    row = _EVIDENCE.parse(value, where)
    del row["format"]
    return Hardware(kind=kind, **row)
