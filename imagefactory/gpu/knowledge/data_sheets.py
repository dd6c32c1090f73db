"""What data sheets say of GPUs (`data_sheets.toml`): how fast each could be, and how much memory is seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.knowledge.gpus import find_gpu, gpus
from imagefactory.gpu.knowledge.tables import read_table

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """One GPU as it is sold. `memory` are bytes that a program sees, `flops` operations a second by type of
    number (fp64, fp32, tf32, fp16, bf16); bytes a second of its memory (`bandwidth`), from the host (`link`)
    and to another GPU of the machine (`peer`).
    """

    name: str
    device: str
    gpu: str
    capability: Capability
    processors: int
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    peer: float
    source: str


@cache
def data_sheets() -> tuple[DataSheet, ...]:
    """All rows of data_sheets.toml, in its order."""
    known = {gpu.name: gpu.capability for gpu in gpus()}
    return tuple(
        DataSheet(
            name=row["name"],
            device=row["device"],
            gpu=row["gpu"],
            capability=known[row["gpu"]],
            processors=row["processors"],
            memory=int(row["seen"] * GIB),
            flops={kind: rate * 1e12 for kind, rate in row["tflops"].items()},
            bandwidth=row["bandwidth"] * 1e9,
            link=row["link"] * 1e9,
            peer=row.get("peer", row["link"]) * 1e9,
            source=row["source"],
        )
        for row in read_table("data_sheets")["sheet"]
    )


def find_data_sheet(name: str) -> tuple[DataSheet, tuple[DataSheet, ...]]:
    """The one that a name means, and others that it could mean too: `A100`, `a100-80gb`, `Tesla T4`.

    Of several the first in the table whose name has all of the asked words. Raises UsageError for an unknown
    one."""
    words = set(re.findall(r"[a-z0-9]+", name[:100].lower())) - {"nvidia", "tesla", "geforce"}
    sheets = data_sheets()
    whole = [sheet for sheet in sheets if name.lower() in (sheet.name.lower(), sheet.device.lower())]
    found = whole or [sheet for sheet in sheets if words and words <= _words(sheet)]
    known = "known are " + ", ".join(sheet.name for sheet in sheets)
    if not found:
        try:
            gpu = find_gpu(name)
        except UsageError as error:
            error.hint = known
            raise
        found = [sheet for sheet in sheets if sheet.gpu == gpu.name]
    if not found:
        raise UsageError("data-sheet-unknown", f"no data sheet for {name[:60]!a}", hint=known)
    return found[0], tuple(found[1:])


def _words(sheet: DataSheet) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", f"{sheet.name} {sheet.gpu} {sheet.device}".lower()))
