"""A GPU report, parsed and formatted as JSON: written by `verify`, read from kits, signed as a verdict.

The parser accepts only the formatter's output, and rejects reports whose fields contradict each other. The
shapes are also in verdict.schema.json.
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

# --- The frozen values of verification: the request, the host's evidence, the suite's results
#     VerifiedImage + request -> (a run on a GPU) -> GpuReport -> Verdict
# A report is unsigned and proves nothing; a verdict is a signed report. Times
# are aware and in UTC, digests `sha256:<64 hex>`, memory bytes, capabilities `8.0`.


QUICK, FULL, MULTI_GPU_LEVELS = "quick", "full", "several"
LEVELS = (QUICK, FULL, MULTI_GPU_LEVELS)
GPUS = "gpus"
"""The check that counts GPUs on the level `several`, and the name of its number."""

UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|GPU-[0-9a-f]{16}")
"""NVIDIA's UUID, or an AMD GPU's `unique_id`."""
Uuid = Annotated[str, Pattern(UUID)]
DeviceNode = Annotated[str, Pattern(re.compile(r"/dev/(?:nvidia|dri/renderD)[0-9]{1,3}"))]
Version = Annotated[str, Pattern(re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,3}"), empty=True)]
EvidenceKind = Annotated[str, Pattern(re.compile(r"[a-z][a-z0-9-]{0,31}"))]
"""The source of the GPU's identity: this machine, a kit, a CI job, or a pool in POOLS."""
EVIDENCE_LOCAL, EVIDENCE_KIT, EVIDENCE_ACTIONS = "local", "kit", "actions"
Nonce = Annotated[str, Pattern(re.compile(r"[A-Za-z0-9_-]{16,128}"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedImage:
    """The image that is verified: the platform manifest `manifest`, or a .sif's own artifact.

    The other fields only describe it: `config` is the digest of its config, or the sha256 of a .sif file;
    `index` is the digest of its tags, the same as `manifest` if there is no index; `target` is its name,
    empty if unknown. Images with equal configs may differ in content.
    """

    target: Annotated[str, Pattern(NAME, empty=True)]
    index: Digest
    manifest: Digest
    config: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIdentity:
    """A GPU as the driver reports it. `uuid` is `GPU-...`, `memory` bytes."""

    name: str
    capability: Capability
    uuid: Uuid
    memory: Count

    @property
    def part(self) -> str:
        """Return the profile of a slice (MIG), `mig` if its name has none; empty for a whole GPU."""
        return slice_of(self.name) or ("mig" if self.uuid.startswith("MIG-") else "")

    @property
    def row(self) -> str:
        return row_of(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The host's own data on its GPUs, read outside of the image.

    `gpus` are from NVML, `known` the UUIDs below /proc/driver/nvidia, `nodes` the device nodes
    (`/dev/nvidia0`); `driver` is the kernel module's version. `notes` are further (name, text) pairs. For AMD
    GPUs the kernel provides all of it (evidence.py).
    """

    kind: EvidenceKind
    driver: Version
    gpus: tuple[GpuIdentity, ...]
    known: tuple[Uuid, ...]
    nodes: tuple[DeviceNode, ...]
    notes: tuple[Annotated[tuple[str, str], TupleAsObject(("name", "text"))], ...] = ()

    def gpu_of(self, uuid: str) -> GpuIdentity | None:
        """Return the GPU that libcuda calls `uuid`; for a MIG instance in the notes, the whole GPU.

        libcuda reports bytes without a prefix, so an instance may be `GPU-...` inside: digits are compared.
        """
        part_of = {digits_of(name): text for name, text in self.notes if name.startswith("MIG-")}
        whole = digits_of(part_of.get(digits_of(uuid), uuid))
        return next((gpu for gpu in self.gpus if digits_of(gpu.uuid) == whole), None)

    def count_of(self, capability: str) -> int:
        """Return the number of GPUs with this capability that both NVML and the driver report."""
        return sum(gpu.capability == capability and gpu.uuid in self.known for gpu in self.gpus)


def evidence_types() -> tuple[str, ...]:
    """Return all evidence types that this imagefactory supports."""
    return (EVIDENCE_LOCAL, EVIDENCE_KIT, *POOLS, EVIDENCE_ACTIONS)


def digits_of(uuid: str) -> str:
    """Return the digits of `GPU-...` or `MIG-...`."""
    return uuid.partition("-")[2]


class Evidence(Protocol):
    """A reader of the identity of the host's GPUs."""

    def read(self) -> Hardware:
        """Return the host's GPUs. Raises NoGpuError if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """The report of one run of the GPU suite for one image on one GPU. Unsigned.

    `suite` is the suite's digest, `level` quick, full or several. `device` is the GPU seen by the suite
    inside, None without one, and `cuda` the newest CUDA that its driver supports, from libcuda (`12.4`).
    `hardware` is the host's data, None without GPUs. `outcome` is VERIFIED only if every check that applies
    passed on a GPU, TOGETHER on several; `reason` is one line. `waived` are checks that did not run and that
    the recipe waives. `contradictions` are differences between the run and the prediction. A `rehearsal` ran
    on the CPU for the project's own tests: it cannot be signed.
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
        """Return the number of GPUs: one, or on the level `several` as many as its check counted."""
        counted = (dict(check.numbers) for check in self.checks if check.name == GPUS)
        return 1 if self.level != MULTI_GPU_LEVELS else int(next(counted, {}).get(GPUS, 0))


TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeTest:
    """One smoke test to run. `nonce` is new random text that the report must contain.

    `runner` is its name: a pass with one does not apply to another. `timeout` is seconds for each of the two
    runs.
    """

    image: Image | SifArtifact
    definition: BuildSpec
    nonce: str
    runner: str = "unshare"
    timeout: float = TIMEOUT_SECONDS


FORMAT = 1


def format_gpu_report(report: GpuReport) -> dict[str, Any]:
    """Return the report as JSON; `format` is its version. Tuples are lists, numbers of a check an object."""
    return format_document(report, FORMAT)


def parse_gpu_report(value: object, where: str) -> GpuReport:
    """Parse the output of `format_gpu_report`. Messages begin with `where`.

    Raises StatementError for anything else: a missing or further field, a value of another type, a text with
    control characters, a duplicate check, an end before its start.
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
    """Return the fields of run.json for the end of a suite's process, within `longest` seconds."""
    return {
        "returncode": Annotated[int, NumberRange(0, 255)],
        "timed_out": bool,
        "seconds": Annotated[float, NumberRange(0, longest)],
        "said": Annotated[tuple[str, ...], MaxRows(10)],
    }


def completed_of(row: Mapping[str, Any]) -> CommandResult:
    """Return the process's code, seconds and last lines from such fields."""
    return CommandResult(
        returncode=row["returncode"],
        stdout="\n".join(row["said"]),
        stderr="",
        seconds=row["seconds"],
        timed_out=row["timed_out"],
    )
