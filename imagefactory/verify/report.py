"""A GPU report, parsed and formatted as JSON: written by `verify`, read from kits, signed as a verdict.

The parser accepts only the output of the formatter, and rejects reports whose fields contradict each other.
The format is also described in verdict.schema.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Protocol

from imagefactory.gpu.values import capability_row, mig_profile
from imagefactory.model import BuildSpec, CheckResult, CommandResult, Outcome
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.serialize import (
    NAME,
    Capability,
    Choices,
    Count,
    Digest,
    FormattedAs,
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


QUICK, FULL, SEVERAL, NODE, NODES = "quick", "full", "several", "node", "nodes"
MULTI_GPU_LEVELS = (SEVERAL, NODES)
LEVELS = (QUICK, FULL, *MULTI_GPU_LEVELS)
"""The levels of verdicts. A kit of the level `node` is about a machine, so nothing of it is signed."""
COUNTS = {SEVERAL: "gpus", NODES: "nodes"}
"""The check that counts GPUs on a level for several, and the name of its number. A node counts as one."""

UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|GPU-[0-9a-f]{16}")
"""A UUID of NVIDIA, or the `unique_id` of an AMD GPU."""
Uuid = Annotated[str, Pattern(UUID)]
DeviceNode = Annotated[str, Pattern(re.compile(r"/dev/(?:nvidia|dri/renderD)[0-9]{1,3}"))]
Version = Annotated[str, Pattern(re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,3}"), empty=True)]
EvidenceKind = Annotated[str, Pattern(re.compile(r"[a-z][a-z0-9-]{0,31}"))]
"""The source of the GPU's identity: this machine, a kit, a CI job, or a pool in POOLS."""
EVIDENCE_LOCAL, EVIDENCE_KIT, EVIDENCE_ACTIONS = "local", "kit", "actions"
Nonce = Annotated[str, Pattern(re.compile(r"[A-Za-z0-9_-]{16,128}"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedImage:
    """The image that is verified: its platform manifest `manifest`, or the artifact of a .sif file.

    The other fields only describe it. `config` is the digest of its config, or the sha256 of a .sif file.
    `index` is the digest of its tags, equal to `manifest` if there is no index. `target` is its name, empty
    if unknown. Images with equal configs may differ in content.
    """

    target: Annotated[str, Pattern(NAME, empty=True)]
    index: Digest
    manifest: Digest
    config: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIdentity:
    """A GPU as the driver reports it. `uuid` is `GPU-...`, `memory` is in bytes."""

    name: str
    capability: Capability
    uuid: Uuid
    memory: Count

    @property
    def part(self) -> str:
        """Return the MIG profile of a slice, `mig` if its name has none, empty for a whole GPU."""
        return mig_profile(self.name) or ("mig" if self.uuid.startswith("MIG-") else "")

    @property
    def row(self) -> str:
        return capability_row(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Data of the host about its GPUs, read outside of the image.

    `gpus` are from NVML, `known` the UUIDs below /proc/driver/nvidia, `nodes` the device nodes
    (`/dev/nvidia0`). `driver` is the version of the kernel module. `notes` are other (name, text) pairs. For
    AMD GPUs, the kernel provides all values (evidence.py).
    """

    kind: EvidenceKind
    driver: Version
    gpus: tuple[GpuIdentity, ...]
    known: tuple[Uuid, ...]
    nodes: tuple[DeviceNode, ...]
    notes: tuple[Annotated[tuple[str, str], TupleAsObject(("name", "text"))], ...] = ()

    def gpu_of(self, uuid: str) -> GpuIdentity | None:
        """Return the GPU with the UUID of libcuda. For a MIG instance in the notes, return the whole GPU.

        libcuda reports bytes without a prefix, so an instance may be `GPU-...` in the image: only digits are
        compared.
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

    `suite` is the digest of the suite, `level` is one of LEVELS. `device` is the GPU that the suite used in
    the image, or None, and `cuda` the newest CUDA version that its driver supports, from libcuda (`12.4`).
    `hardware` is the data of the host, None without GPUs. `outcome` is VERIFIED only if every check that
    applies passed on a GPU, TOGETHER on several GPUs or nodes. `reason` is one line. `waived` are checks that
    did not run and that the recipe waives. `contradictions` are differences between the run and the
    prediction. A `rehearsal` ran on the CPU for tests of imagefactory and cannot be signed.
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
        """Return the number of GPUs: one, or on a level for several the number that its check counted."""
        name = COUNTS.get(self.level, "")
        counted = (dict(check.numbers) for check in self.checks if check.name == name)
        return int(next(counted, {}).get(name, 0)) if name else 1


TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeTest:
    """One smoke test to run. `nonce` is a new random text that the report must contain.

    `runner` is the name of the runner: a pass with one runner does not apply to another. `timeout` is in
    seconds for each of the two runs.
    """

    image: Image | SifArtifact
    definition: BuildSpec
    nonce: str
    runner: str = "unshare"
    timeout: float = TIMEOUT_SECONDS


FORMAT = 1


FormattedGpuReport = Annotated[Mapping[str, object], FormattedAs(GpuReport, FORMAT)]


def format_gpu_report(report: GpuReport) -> dict[str, Any]:
    """Return the report as JSON; `format` is its version.

    Tuples become lists, the numbers of a check an object.
    """
    return format_document(report, FORMAT)


def parse_gpu_report(value: object, location: str) -> GpuReport:
    """Parse the output of `format_gpu_report`. Messages begin with `location`.

    Raises StatementError for other JSON: a missing or unknown field, a value of another type, a text with
    control characters, a duplicate check, an end before its start.
    """
    report = parse_document(value, GpuReport, FORMAT, location)
    assert isinstance(report, GpuReport)
    names = [check.name for check in report.checks]
    if len(set(names)) != len(names):
        raise invalid_value_error(f"{location}: checks", "it has a duplicate check")
    if report.ended < report.started:
        raise invalid_value_error(f"{location}: ended", "it is before the start")
    return report


def end_of(longest: float) -> Mapping[str, Any]:
    """Return the fields in run.json for the end of a process, limited to `longest` seconds."""
    return {
        "returncode": Annotated[int, NumberRange(0, 255)],
        "timed_out": bool,
        "seconds": Annotated[float, NumberRange(0, longest)],
        "said": Annotated[tuple[str, ...], MaxRows(10)],
    }


def completed_of(row: Mapping[str, Any]) -> CommandResult:
    """Return the exit code, seconds and last lines of a process from these fields."""
    return CommandResult(
        returncode=row["returncode"],
        stdout="\n".join(row["said"]),
        stderr="",
        seconds=row["seconds"],
        timed_out=row["timed_out"],
    )
