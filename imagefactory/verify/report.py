"""A GPU report as JSON and back: what `verify` writes, what a kit's result becomes, what a verdict signs.

The parser takes exactly what the formatter gives, and refuses what the report's own fields contradict. The
shapes stand in verdict.schema.json too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Protocol

from imagefactory.gpu.values import row_of, slice_of
from imagefactory.model import BuildSpec, CheckResult, CommandResult, Outcome
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.serialize import (
    NAME,
    Capability,
    Choices,
    Count,
    Digest,
    MaxRows,
    Name,
    NumberRange,
    Pattern,
    TupleAsObject,
    format_document,
    invalid_value_error,
    parse_document,
)
from imagefactory.settings.choices import POOLS

# --- The frozen values of verification: what was asked, what the host saw, what the suite said
#     Subject + Ask -> (a run on a GPU) -> GpuReport -> Verdict
# A report is unsigned and proves nothing; a verdict (verdicts/) is one that somebody signed who saw the GPU.
# Times are aware and in UTC, digests `sha256:<64 hex>`, memory bytes, capabilities `8.0`.


QUICK, FULL, MULTI_GPU_LEVELS = "quick", "full", "several"
LEVELS = (QUICK, FULL, MULTI_GPU_LEVELS)
GPUS = "gpus"
"""The check of the level `several` that counts, and its number."""

UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|GPU-[0-9a-f]{16}")
"""NVIDIA's, or the `unique_id` of one of AMD's."""
Uuid = Annotated[str, Pattern(UUID)]
DeviceNode = Annotated[str, Pattern(re.compile(r"/dev/(?:nvidia|dri/renderD)[0-9]{1,3}"))]
Version = Annotated[str, Pattern(re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,3}"), empty=True)]
EvidenceKind = Annotated[str, Pattern(re.compile(r"[a-z][a-z0-9-]{0,31}"))]
"""Who read the GPU's identity, and where: on this machine, by a kit, in a CI job, or a row of POOLS."""
EVIDENCE_LOCAL, EVIDENCE_KIT, EVIDENCE_ACTIONS = "local", "kit", "actions"
Nonce = Annotated[str, Pattern(re.compile(r"[A-Za-z0-9_-]{16,128}"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedImage:
    """What is verified: the platform manifest `manifest`, or the artifact's own of a .sif.

    The other fields describe it and decide nothing: `config` is the digest of its config, or the sha256 of a
    .sif file; `index` is what tags point to, the same as `manifest` where there is none above; `target` is
    its name, empty where nobody knows it. Equal configs say nothing of equal content.
    """

    target: Annotated[str, Pattern(NAME, empty=True)]
    index: Digest
    manifest: Digest
    config: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIdentity:
    """A GPU as the driver tells it. `uuid` is `GPU-...`, `memory` bytes."""

    name: str
    capability: Capability
    uuid: Uuid
    memory: Count

    @property
    def part(self) -> str:
        """The profile of a slice (MIG), `mig` where its name tells none; empty for a whole GPU."""
        return slice_of(self.name) or ("mig" if self.uuid.startswith("MIG-") else "")

    @property
    def row(self) -> str:
        return row_of(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the host says of its GPUs, outside of the image.

    `gpus` are those of NVML, `known` the UUIDs below /proc/driver/nvidia, `nodes` the device nodes
    (`/dev/nvidia0`); `driver` is the kernel module's version. `notes` are further (name, text) pairs. Of
    AMD's the kernel tells all of it (evidence.py).
    """

    kind: EvidenceKind
    driver: Version
    gpus: tuple[GpuIdentity, ...]
    known: tuple[Uuid, ...]
    nodes: tuple[DeviceNode, ...]
    notes: tuple[Annotated[tuple[str, str], TupleAsObject(("name", "text"))], ...] = ()

    def gpu_of(self, uuid: str) -> GpuIdentity | None:
        """The GPU that libcuda calls `uuid`; of an instance of one (MIG) that the notes name, the whole GPU.

        libcuda tells bytes without a prefix, so an instance may be called `GPU-...` inside: digits decide.
        """
        part_of = {digits_of(name): text for name, text in self.notes if name.startswith("MIG-")}
        whole = digits_of(part_of.get(digits_of(uuid), uuid))
        return next((gpu for gpu in self.gpus if digits_of(gpu.uuid) == whole), None)

    def count_of(self, capability: str) -> int:
        """How many GPUs of it NVML and the driver itself both tell."""
        return sum(gpu.capability == capability and gpu.uuid in self.known for gpu in self.gpus)


def evidence_types() -> tuple[str, ...]:
    """All that this imagefactory knows."""
    return (EVIDENCE_LOCAL, EVIDENCE_KIT, *POOLS, EVIDENCE_ACTIONS)


def digits_of(uuid: str) -> str:
    """The digits of `GPU-...` or `MIG-...`."""
    return uuid.partition("-")[2]


class Evidence(Protocol):
    """How the identity of GPUs is read on the host."""

    def read(self) -> Hardware:
        """Raises NoGpuError where there is none to be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """What one run of the GPU suite said of one image on one GPU. Unsigned.

    `suite` is the suite's digest, `level` quick, full or several. `device` is the GPU that the suite met
    inside, None where it met none, and `cuda` the newest CUDA that its driver takes, as libcuda tells it
    (`12.4`). `hardware` is what the host saw, None where it saw none. `outcome` is VERIFIED only where every
    check that applies passed on a GPU, TOGETHER on several; `reason` is one line. `waived` are checks that
    did not run and that the recipe waives. `contradictions` say where the run and the prediction differ,
    either way. A `rehearsal` ran on the CPU for the project's own tests: nothing can be signed of it.
    """

    subject: VerifiedImage
    suite: Digest
    level: Annotated[str, Choices(LEVELS)]
    nonce: Nonce
    started: datetime
    ended: datetime
    runner: Name
    hardware: Hardware | None
    device: GpuIdentity | None
    cuda: Version
    checks: tuple[CheckResult, ...]
    outcome: Outcome
    reason: str
    waived: tuple[Name, ...] = ()
    contradictions: tuple[str, ...] = ()
    rehearsal: bool = False

    @property
    def gpus(self) -> int:
        """How many GPUs it speaks of: one, and of the level `several` as many as its check counted."""
        counted = (dict(check.numbers) for check in self.checks if check.name == GPUS)
        return 1 if self.level != MULTI_GPU_LEVELS else int(next(counted, {}).get(GPUS, 0))


TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeTest:
    """One smoke test to do. `nonce` is fresh random text that the report must bring back.

    `runner` is its name: a pass with one says nothing of another. `timeout` is seconds for each of the
    two runs.
    """

    image: Image | SifArtifact
    definition: BuildSpec
    nonce: str
    runner: str = "unshare"
    timeout: float = TIMEOUT_SECONDS


FORMAT = 1


def format_gpu_report(report: GpuReport) -> dict[str, Any]:
    """The report as JSON; `format` is its version. Tuples are lists, numbers of a check a flat object."""
    return format_document(report, FORMAT)


def parse_gpu_report(value: object, where: str) -> GpuReport:
    """The report that `format_gpu_report` made this of. `where` is what messages begin with.

    Raises StatementError for anything else: a missing or further field, a value of another kind, a text with
    characters that steer a terminal, a check twice, an end before its start.
    """
    report = parse_document(value, GpuReport, FORMAT, where)
    assert isinstance(report, GpuReport)
    names = [check.name for check in report.checks]
    if len(set(names)) != len(names):
        raise invalid_value_error(f"{where}: checks", "it has a duplicate check")
    if report.ended < report.started:
        raise invalid_value_error(f"{where}: ended", "it is before the start")
    return report


def end_of(longest: float) -> Mapping[str, Any]:
    """The fields of run.json that say how a suite's process ended, within `longest` seconds."""
    return {
        "returncode": Annotated[int, NumberRange(0, 255)],
        "timed_out": bool,
        "seconds": Annotated[float, NumberRange(0, longest)],
        "said": Annotated[tuple[str, ...], MaxRows(10)],
    }


def completed_of(row: Mapping[str, Any]) -> CommandResult:
    """How the process ended, of such fields: its code, its seconds, its last lines."""
    return CommandResult(
        returncode=row["returncode"],
        stdout="\n".join(row["said"]),
        stderr="",
        seconds=row["seconds"],
        timed_out=row["timed_out"],
    )
