"""The GPU suite in an image on this machine, and the report of it.

Without a GPU nothing is fetched, unpacked or started.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.access import Access
from imagefactory.errors import UsageError, os_problem
from imagefactory.fs import explain_full_disk, replace_text
from imagefactory.gpu.capability import parse_capability
from imagefactory.oci.model import Image, Sif
from imagefactory.progress import Progress
from imagefactory.runtime.emulator import refuse_emulated
from imagefactory.runtime.protocol import Runner
from imagefactory.settings.choices import ENGINES
from imagefactory.actions.resolve import Chosen
from imagefactory.actions.runner import make_runner, scratch_folder
from imagefactory.stages.scan import inspect_made
from imagefactory.stages.sign import ledger
from imagefactory.suite.gpu.context import Predicted
from imagefactory.verify.evidence import LocalEvidence
from imagefactory.verify.gpu_run import GpuAsk, GpuTrial, refuse_level, told_lost, verify_gpu
from imagefactory.verify.model import FULL, Evidence, GpuReport, Hardware
from imagefactory.verify.nonces import NONCE_BYTES, AskedRun, format_nonce
from imagefactory.verify.predicted import predict_coverage
from imagefactory.verify.report import format_gpu_report
from imagefactory.verify.suite_files import suite_digest

_HERE = LocalEvidence()


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBench:
    """What a verification needs of this machine. `runner` is None for the one that is asked for by name."""

    evidence: Evidence = _HERE
    clock: Callable[[], datetime] = utc_now
    random: Callable[[int], bytes] = os.urandom
    runner: Runner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """`runner` is empty for the setting, or for what fits. `capability` must be that of the GPU, if given.

    The verdict goes to the store and, with `registry` (`host[/path]`), there too. `output` is where the
    report goes, None for the store's own place.
    """

    level: str = FULL
    runner: str = ""
    capability: str = ""
    registry: str = ""
    promote: bool = False
    output: Path | None = None


def predicted_of(
    access: Access, chosen: Chosen, hardware: Hardware | None, progress: Progress
) -> dict[str, Predicted]:
    """What a scan of the image lets one expect, by capability."""
    contents = inspect_made(access, chosen.made, progress).contents
    here = [parse_capability(gpu.capability) for gpu in hardware.gpus] if hardware else []
    return predict_coverage(contents, here)


def verify_image(
    access: Access, chosen: Chosen, options: VerifyOptions, bench: VerifyBench, progress: Progress
) -> GpuReport:
    """Runs the GPU suite in the image on this machine.

    Raises NoGpuError where the machine shows no GPU, ToolError for an image of another processor, UsageError
    for a level that it cannot be asked, before anything is started. The nonce is issued here and spent by
    `sign_report`.
    """
    refuse_level(chosen.definition, options.level)
    if isinstance(chosen.made, Image):
        refuse_emulated(chosen.made.name, chosen.made.architecture)
    hardware = bench.evidence.read()
    if lost := told_lost(hardware):
        progress.note(lost.removeprefix("; "))
    name = runner_name(access, chosen.made, options.runner)
    nonce = format_nonce(bench.random(NONCE_BYTES))
    run = AskedRun(subject=chosen.subject, suite=suite_digest(), level=options.level)
    with access.layout.in_use(progress):
        ledger(access).issue(nonce, run, bench.clock())
        ask = GpuAsk(
            nonce=nonce,
            level=options.level,
            capability=options.capability,
            predicted=predicted_of(access, chosen, hardware, progress),
            environ=access.environ,
        )
        runner, made = bench.runner, chosen.made
        if runner is None:
            runner = make_runner(access, name, chosen.definition.target.name, progress)
            runner.require()
            made = runner.prepare(made, checked=True)
        trial = GpuTrial(
            made=made,
            subject=chosen.subject,
            definition=chosen.definition,
            ask=ask,
            runner=name,
            hardware=hardware,
        )
        with progress.stage(f"{chosen.definition.target.name}: GPU suite ({options.level}), by {name}"):
            return verify_gpu(trial, runner, bench.clock, scratch=scratch_folder(access, name))


def runner_name(access: Access, made: Image | Sif, asked: str) -> str:
    """The runner that was asked for, else the setting's, else what fits."""
    wanted = asked or access.settings.runner.value
    if isinstance(made, Sif):
        if wanted not in ("", "apptainer"):
            raise UsageError(
                "runner-no-sif", f"{wanted} cannot start .sif files", hint="pass --runner apptainer"
            )
        return "apptainer"
    return wanted or ENGINES[access.settings.engine.value].runner


def check_output(path: Path) -> None:
    """Raises UsageError where no report can be written: before minutes of work, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            *os_problem("write", path, error), hint="choose another file: --output FILE"
        ) from error


def keep_report(access: Access, report: GpuReport, output: Path | None) -> Path:
    """Writes the unsigned report beside and renames it; without `output` into the store, by its nonce."""
    path = output or access.layout.path / "reports" / f"{report.nonce}.json"
    data = json.dumps(format_gpu_report(report), indent=1) + "\n"
    with explain_full_disk(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, data)
    return path
