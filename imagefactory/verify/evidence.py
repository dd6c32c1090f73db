"""How the identity of GPUs is read on the host, outside of any image: on this machine, or as a kit told it.

What is read stands in kit/hardware.py, of the standard library alone, which travels in kits; here it becomes
a frozen value.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagefactory.errors import NoGpuError
from imagefactory.verify.kit.hardware import FORMAT, HINT, MACHINE, NoGpu, Places, read_hardware
from imagefactory.verify.model import EvidenceKind, Hardware
from imagefactory.verify.report import fault, fields, parse_hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEvidence:
    """The GPUs of this machine: NVML, /proc/driver/nvidia and device nodes, which must agree."""

    places: Places = MACHINE

    def read(self) -> Hardware:
        """Raises NoGpuError where there is none to be seen, StatementError for what no driver would say."""
        try:
            found = read_hardware(self.places)
        except NoGpu as error:
            raise NoGpuError(str(error), hint=HINT) from error
        return parse_evidence(found, EvidenceKind.LOCAL, "this machine's GPUs")


def parse_evidence(value: object, kind: EvidenceKind, where: str) -> Hardware:
    """What `read_hardware` gave, here or elsewhere. Raises StatementError for anything else."""
    row = fields(value, where, "format driver gpus known nodes notes")
    if row["format"] != FORMAT or isinstance(row["format"], bool):
        raise fault(f"{where}: format", f"this version reads {FORMAT}")
    if not isinstance(row["notes"], dict):
        raise fault(f"{where}: notes", "that is no object")
    notes = [{"name": name, "text": text} for name, text in sorted(row["notes"].items())]
    rest = {key: row[key] for key in ("driver", "gpus", "known", "nodes")}
    return parse_hardware({"kind": kind.value, **rest, "notes": notes}, where)
