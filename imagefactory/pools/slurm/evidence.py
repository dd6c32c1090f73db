"""What a job of a sweep says and whose GPU it met: the machine's own word, and slurmctld's must fit it. Pure.

The job reads NVML, /proc and the device nodes of its machine outside of the image, as a kit does; slurmctld
says which GPU of which machine it gave to the job. Where one of them is about another GPU the run is
`infrastructure`: no word on the image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from imagefactory.model import Outcome
from imagefactory.schedulers.pool import JobAttempt, NodeFound
from imagefactory.settings.choices import SLURM
from imagefactory.verdicts.statement import missing_evidence
from imagefactory.verify.kits import Folder, outcome_of_folder
from imagefactory.verify.model import GpuReport
from imagefactory.verify.suite_report import clean


def job_report(kit: Mapping[str, Any], asked: Mapping[str, Any], found: NodeFound) -> GpuReport:
    """The report of a run that came back: a kit's rules, and slurmctld's word on the GPU beside the suite's.

    `kit` and `asked` are kit.json and expectations.json, believed. A run is never `verified` where a word on
    the GPU is missing. Raises StatementError for a run that is none, or of another kit or suite.
    """
    attempt = found.result.attempts[-1]
    files = Folder(
        kit=b"",
        expectations=json.dumps(asked).encode(),
        suite=kit["suite"],
        run=found.run or b"",
        evidence=found.evidence,
        report=found.report,
    )
    report = outcome_of_folder(files, kit, found.result.node, SLURM)
    if report.hardware is not None:
        report = replace(
            report, hardware=replace(report.hardware, notes=(*report.hardware.notes, *_notes(attempt)))
        )
    if why := disagreement(attempt, report):
        return replace(report, outcome=Outcome.INFRASTRUCTURE, reason=clean(why))
    gap = missing_evidence(report) if report.outcome is Outcome.VERIFIED else ""
    if report.outcome is Outcome.VERIFIED and attempt.gpu is None:
        gap = "Slurm does not tell that it gave the job one GPU"
    if gap:
        reason = f"the suite passed, and nothing shows that it ran on a GPU: {gap}"
        return replace(report, outcome=Outcome.NOT_TESTED, reason=clean(reason))
    return report


def disagreement(attempt: JobAttempt, report: GpuReport) -> str:
    """Where Slurm and the machine speak of two machines or GPUs, with both values; empty where they agree."""
    gpu, device = attempt.gpu, report.device
    if attempt.slot and attempt.slot != attempt.machine:
        return f"the job ran on {attempt.machine}, Slurm gave it {attempt.slot}"
    if gpu and device and gpu.capability not in ("", device.capability):
        told = f"Slurm gave the job a GPU of type {gpu.name} ({gpu.capability})"
        return f"the suite says {device.uuid} has capability {device.capability}, {told}"
    return ""


def _notes(attempt: JobAttempt) -> tuple[tuple[str, str], ...]:
    gpu = attempt.gpu
    told = {
        "machine": attempt.machine,
        "job": attempt.job,
        "slurm-gpu": gpu.id if gpu else "",
        "slurm-type": gpu.name if gpu else "",
    }
    return tuple((name, clean(text)) for name, text in sorted(told.items()) if text)
