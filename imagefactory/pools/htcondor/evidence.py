"""What a job of a sweep says and whose GPU it met: the startd's word, and the suite must agree. Pure.

In container universe a job runs inside the image, so nothing in it is believed of the GPU by itself. The
startd's ad, written into the job's log when it started (`ulog_execute_attrs`), says which GPU that was; what
libcuda said inside must fit. Where one of them is about another GPU the run is `infrastructure`: no word on
the image. A GPU that condor_gpu_discovery simulates is no GPU at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any

from imagefactory.serialize import DIGEST, Digest, Fields, Fixed, Matching, parse_json
from imagefactory.errors import StatementError
from imagefactory.model import Completed, Outcome
from imagefactory.schedulers.pool import JobAttempt, PoolGpu
from imagefactory.settings.choices import HTCONDOR
from imagefactory.verdicts.statement import missing_evidence
from imagefactory.verify.evidence import parse_evidence
from imagefactory.verify.outcome import Brought, GpuRun, GpuSuiteReport, outcome_of, parse_suite_report
from imagefactory.verify.model import UUID, GpuIdentity, GpuReport, Hardware, Subject, digits_of
from imagefactory.verify.nonces import NONCE
from imagefactory.verify.report import completed_of, end_of
from imagefactory.verify.suite_report import ReportFault, clean

RUNNER = "htcondor"
FORMAT = 1
LONGEST_RUN = 14 * 86400.0
_CUDA = re.compile(r"[0-9]{1,3}\.[0-9]{1,2}")
_SHORT = re.compile(r"(?:GPU|MIG)-(?![0-9a-f]{2}223334)([0-9a-f]{8})")
"""A short name, but for those that condor_gpu_discovery makes up (verdicts/statement.py, is_simulated)."""


_RUN = Fields(
    format=Annotated[int, Fixed(FORMAT)],
    nonce=Annotated[str, Matching(NONCE)],
    suite=Digest,
    image=Annotated[str, Matching(DIGEST, empty=True)],
    started=datetime,
    ended=datetime,
    hardware=object,
    no_gpu=str,
    **end_of(LONGEST_RUN),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """run.json of a job: how the suite's process went. `hardware` is what NVML and /proc said inside.

    It is None with the reason in `no_gpu` where nothing of a driver was to be seen there. `image` is the
    sha256 of the .sif that lay beside the job, empty where none did.
    """

    nonce: str
    suite: str
    image: str
    started: datetime
    ended: datetime
    completed: Completed
    hardware: Hardware | None
    no_gpu: str


def parse_job_run(data: bytes, where: str) -> JobRun:
    """Raises StatementError for anything but what inside.py writes."""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise StatementError(
            "job-run-not-json",
            f"{where} is not JSON",
            hint="submit the sweep again: the job wrote an invalid file",
        ) from error
    row = _RUN.parse(document, where)
    seen = row["hardware"]
    if seen is not None:
        seen = parse_evidence(seen, HTCONDOR, f"{where}: hardware")
    kept = {name: row[name] for name in ("nonce", "suite", "image", "started", "ended", "no_gpu")}
    return JobRun(completed=completed_of(row), hardware=seen, **kept)


def pool_hardware(attempt: JobAttempt, run: JobRun, met: GpuIdentity | None) -> Hardware | None:
    """The startd's word on the GPU of a job's last start as evidence; None where it had none.

    A startd that tells a short name alone (`GPU-a0223334`) is taken at it: where the suite met a GPU of that
    name its whole UUID stands here; of simulated GPUs a short name is one of many, and stands for none. The
    driver's version is the startd's; one that tells none (HTCondor before 24) leaves it to what NVML and the
    kernel module said in the job, and the notes say so.
    """
    gpu = attempt.gpu
    if gpu is None:
        return None
    uuid = gpu.uuid or (met.uuid if met and _is_short_for(gpu.id, met.uuid) else "")
    inside = run.hardware.driver if run.hardware else ""
    told = GpuIdentity(name=gpu.name, capability=gpu.capability, uuid=uuid, memory=gpu.memory)
    known = (told,) if UUID.fullmatch(uuid) else ()
    notes = {
        "machine": attempt.machine,
        "slot": attempt.slot,
        "job": attempt.job,
        "startd-gpu": gpu.id,
        "startd-cuda": gpu.cuda,
        "driver-told-by": "startd" if gpu.driver else "job" if inside else "",
    }
    return Hardware(
        kind=HTCONDOR,
        driver=gpu.driver or inside,
        gpus=known,
        known=tuple(one.uuid for one in known),
        nodes=(),
        notes=tuple((name, clean(text)) for name, text in sorted(notes.items()) if text),
    )


def disagreement(gpu: PoolGpu, run: JobRun, met: GpuSuiteReport) -> str:
    """Where the startd and the job speak of two GPUs or drivers, with both values; empty where they agree."""
    device, told = met.device, "the startd"
    if device is None:
        return ""
    same = digits_of(gpu.uuid) == digits_of(device.uuid) if gpu.uuid else _is_short_for(gpu.id, device.uuid)
    if not same:
        return f"the suite met {device.uuid}, {told} gave the job {gpu.uuid or gpu.id}"
    if gpu.capability != device.capability:
        return f"the suite says {device.uuid} has capability {device.capability}, {told} {gpu.capability}"
    if gpu.name and _plain(gpu.name) != _plain(device.name):
        return f"the suite calls {device.uuid} '{device.name}', {told} '{gpu.name}'"
    if gpu.cuda and met.cuda and _version(gpu.cuda) != _version(met.cuda):
        return f"the suite's driver takes CUDA {met.cuda}, {told}'s {gpu.cuda}"
    seen = run.hardware
    if seen is None:
        return ""
    if gpu.driver and gpu.driver != seen.driver:
        return f"the job's driver is {seen.driver}, {told}'s {gpu.driver}"
    return "" if seen.gpu_of(device.uuid) else f"the suite met {device.uuid}, which NVML does not tell there"


def _is_short_for(short: str, uuid: str) -> bool:
    """Whether `GPU-a0223334`, as condor_gpu_discovery shortens names, stands for `uuid`."""
    found = _SHORT.fullmatch(short)
    return found is not None and digits_of(uuid).startswith(f"{found[1]}-")


def _plain(name: str) -> str:
    """NVML's and CUDA's names differ in the maker's name before some GPUs' own."""
    return " ".join(name.lower().removeprefix("nvidia ").split())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if _CUDA.fullmatch(text) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """What a job brought back: its files, and its last attempt. `report` is None where it wrote none."""

    run: JobRun
    report: bytes | None
    attempt: JobAttempt


def job_report(kit: Mapping[str, Any], asked: Mapping[str, Any], answer: JobAnswer) -> GpuReport:
    """The report of a job: the suite's rules (verify/gpu_outcome), and the startd's GPU beside the suite's.

    `kit` and `asked` are kit.json and expectations.json, believed. A run is never `verified` where a word on
    the GPU is missing: the startd's, or that of the driver's kernel module, which shows in every container.
    A .sif that lay beside the job must be the node's.
    Raises StatementError for a run of another kit or suite.
    """
    run, attempt = answer.run, answer.attempt
    if run.nonce != kit["nonce"] or run.suite != kit["suite"]:
        raise StatementError(
            "job-run-mismatch",
            "run.json belongs to another node or suite",
            hint="submit the sweep again: its files were changed",
        )
    met = _met(answer, asked)
    judged = GpuRun(
        subject=Subject(**kit["subject"]),
        suite=kit["suite"],
        asked=asked,
        waive=tuple(kit["waive"]),
        runner=RUNNER,
        hardware=pool_hardware(attempt, run, met.device if met else None),
        started=run.started,
        ended=run.ended,
    )
    missing = "" if answer.report is not None else "it wrote no report that can be read"
    brought = Brought(report=answer.report or b"", fault=missing, completed=run.completed, parsed=met)
    report = outcome_of(judged, brought)
    why = _other_image(kit, run) or (disagreement(attempt.gpu, run, met) if attempt.gpu and met else "")
    if why:
        return replace(report, outcome=Outcome.INFRASTRUCTURE, reason=clean(why))
    gap = ""
    if report.outcome is Outcome.VERIFIED:
        gap = missing_evidence(report) or (run.no_gpu if run.hardware is None else "")
    if gap:
        reason = f"the suite passed, and nothing shows that it ran on a GPU: {gap}"
        return replace(report, outcome=Outcome.NOT_TESTED, reason=clean(reason))
    return report


def _other_image(kit: Mapping[str, Any], run: JobRun) -> str:
    """Whoever put the file there may have put another: of a .sif `config` is the sha256 of the file."""
    wanted = kit["subject"]["config"]
    if not run.image or not kit["sif"] or run.image == wanted:
        return ""
    return f"the job's .sif was {run.image}, the node's is {wanted}: put that file there"


def _met(answer: JobAnswer, asked: Mapping[str, Any]) -> GpuSuiteReport | None:
    try:
        return parse_suite_report(answer.report or b"", asked)
    except ReportFault:
        return None
