"""The GPU suite seen from the host: what is asked of an image, and the run inside it.

A report says what one run saw and proves nothing; signing is another room's. Without a GPU on the host
nothing is started inside, and nothing falls back to the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from imagefactory.errors import ImagefactoryError, UsageError
from imagefactory.fs import locked_temporary_directory
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.drivers import driver_floor
from imagefactory.gpu.knowledge.gpus import capabilities
from imagefactory.gpu.predict import generic_modules, predict, runs
from imagefactory.gpu.values import Compatibility, GpuLibrary, ScanResult, SupportLevel
from imagefactory.model import BuildSpec, Mount, Outcome, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.runtime.protocol import Runner
from imagefactory.suite import table as frameworks
from imagefactory.suite.gpu import table
from imagefactory.suite.gpu.context import Predicted
from imagefactory.verify.kit.hardware import PCI_ORDER, SeenGpu, lost_gpus, names_lost, read_visible
from imagefactory.verify.outcome import (
    GpuRun,
    InvalidReportError,
    RawResult,
    clean,
    not_started,
    outcome_of,
    read_report,
)
from imagefactory.verify.report import FULL, MULTI_GPU_LEVELS, GpuIdentity, GpuReport, Hardware, VerifiedImage
from imagefactory.verify.suite_files import (
    EXPECT_MOUNT,
    EXPECTATIONS_NAME,
    REPORT_MOUNT,
    REPORT_NAME,
    SUITE_MOUNT,
    digest_of,
    expectations,
    read_suite,
    write_suite,
)

ENTRY = "verify.py"
VISIBLE, VISIBLE_AMD = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """What a person wants to know. `capability` is the one the GPU must have (`8.0`), empty for any.

    `predicted` is by capability. `environ` is the caller's: by CUDA_VISIBLE_DEVICES, of AMD's GPUs
    ROCR_VISIBLE_DEVICES, a batch system says which GPUs are its job's. A `rehearsal` is for tests alone.
    """

    nonce: str
    level: str = FULL
    capability: str = ""
    predicted: Mapping[str, Predicted]
    environ: Mapping[str, str] = field(default_factory=dict)
    rehearsal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTrial:
    """One run to make: `made` is what runs, `runner` the name of what starts it.

    `hardware` is what the host says of its GPUs, None in a rehearsal alone.
    """

    made: Image | SifArtifact
    subject: VerifiedImage
    definition: BuildSpec
    ask: GpuRequest
    runner: str
    hardware: Hardware | None


def check_level(definition: BuildSpec, level: str) -> None:
    """Raises UsageError where the level would ask an image about several GPUs that the suite cannot."""
    target = definition.target
    framework = frameworks.FRAMEWORKS.get(target.framework, frameworks.OTHER)
    locked = {package.name: package.version for package in definition.lock.packages}
    checks = table.PARTS[table.SEVERAL] if level == MULTI_GPU_LEVELS else ()
    if why := next((why for check in checks if (why := table.not_applicable(framework, check, locked))), ""):
        raise UsageError(
            "suite-not-applicable",
            f"{target.name}: --suite {MULTI_GPU_LEVELS} is for PyTorch on NVIDIA GPUs: {why}",
            hint="verify it on one GPU: --suite full",
        )


def gpu_expectations(definition: BuildSpec, ask: GpuRequest) -> dict[str, Any]:
    """The expectations that the suite reads. Pure. Raises UsageError as the smoke test's do."""
    check_level(definition, ask.level)
    common = expectations(definition)
    return {
        **{key: common[key] for key in ("target", "framework", "version", "cuda", "python")},
        "packages": common["packages"],
        "conda": common["conda"],
        "format": table.FORMAT,
        "nonce": ask.nonce,
        "level": ask.level,
        "capability": ask.capability,
        "driver": "" if rocm_of(definition.target.cuda) else driver_floor(definition.target.cuda),
        "predicted": {key: asdict(row) for key, row in sorted(ask.predicted.items())},
        "rehearsal": ask.rehearsal,
    }


def timeout_of(level: str) -> float:
    """Seconds after which the whole run is ended: each part has its own end before."""
    return table.SECONDS[level] * len(table.LEVELS[level]) + 60.0


def suite_argv(definition: BuildSpec) -> tuple[str, ...]:
    """The command inside the image."""
    return (
        f"{definition.prefix}/bin/python",
        "-I",
        "-B",
        f"{SUITE_MOUNT}/{ENTRY}",
        f"{EXPECT_MOUNT}/{EXPECTATIONS_NAME}",
        f"{REPORT_MOUNT}/{REPORT_NAME}",
    )


def verify_gpu(trial: GpuTrial, runner: Runner, clock: Callable[[], datetime], *, scratch: Path) -> GpuReport:
    """Runs the suite in the image on a GPU of this machine. Every way it can end is a report.

    The image writes its own below `scratch`.

    Without a GPU of the capability that is asked for, or several of them, nothing is started; a runner that
    could not start it is `infrastructure`.
    """
    files, started = read_suite(), clock()
    run = GpuRun(
        subject=trial.subject,
        suite=digest_of(files),
        asked=gpu_expectations(trial.definition, trial.ask),
        waive=trial.definition.target.waive,
        runner=trial.runner,
        hardware=trial.hardware,
        started=started,
        ended=started,
    )
    environment: tuple[tuple[str, str], ...] = ()
    if not trial.ask.rehearsal:
        if trial.hardware is None:
            return not_started(run, Outcome.NO_GPU, "the host saw no GPU")
        amd = bool(rocm_of(trial.definition.target.cuda))
        several = trial.ask.level == MULTI_GPU_LEVELS
        seen = assigned_gpus(trial.hardware, trial.ask.environ, amd=amd)
        lost = unusable_gpus_note(trial.hardware)
        if seen is None:
            value = trial.ask.environ[VISIBLE_AMD if amd else VISIBLE][:200]
            reason = f"{VISIBLE_AMD if amd else VISIBLE}={value!a} names no GPU of this machine{lost}"
            uuids = [gpu.uuid for gpu in trial.hardware.gpus]
            notes = dict(trial.hardware.notes)
            broken = names_lost(value, uuids, trial.hardware.known, notes)
            return not_started(run, Outcome.INFRASTRUCTURE if broken else Outcome.NO_GPU, reason)
        gpus = choose_gpus(seen, trial.ask.capability, amd=amd, several=several)
        if not gpus:
            there = ", ".join(f"{device.name} ({device.capability})" for device in seen)
            kind = f" of capability {trial.ask.capability}" if trial.ask.capability else ""
            kind = kind or (" of one capability" if several else f" of {'AMD' if amd else 'NVIDIA'}'s")
            reason = (
                f"asked for {'several GPUs' if several else 'a GPU'}{kind}, this machine has {there}{lost}"
            )
            return not_started(run, Outcome.WRONG_GPU, reason)
        environment = visible_gpus(trial.hardware, gpus, trial.ask.environ)
    with locked_temporary_directory("verify-", scratch) as folder:
        spec = _prepare(folder, files, run.asked, trial)
        try:
            completed = runner.run(trial.made, replace(spec, environment=environment))
        except ImagefactoryError as error:
            hint = f" ({error.hint})" if error.hint else ""
            reason = f"the runner could not start it: {error.message}{hint}"
            return not_started(replace(run, ended=clock()), Outcome.INFRASTRUCTURE, clean(reason))
        data, fault = b"", ""
        try:
            data = read_report(folder / "report" / REPORT_NAME)
        except InvalidReportError as error:
            fault = str(error)
    brought = RawResult(report=data, fault=fault, completed=completed)
    return outcome_of(replace(run, ended=clock()), brought)


def assigned_gpus(
    hardware: Hardware, environ: Mapping[str, str], *, amd: bool = False
) -> tuple[GpuIdentity, ...] | None:
    """The GPUs that a batch system gave to this job, all where it says nothing; None where it gave none."""
    assigned = _assigned_by_scheduler(hardware, environ, amd=amd)
    if assigned is None:
        return hardware.gpus
    uuids = [seen.uuid for seen in assigned]
    return tuple(gpu for gpu in hardware.gpus if gpu.uuid in uuids or "" in uuids) or None


def _assigned_by_scheduler(
    hardware: Hardware, environ: Mapping[str, str], *, amd: bool
) -> list[SeenGpu] | None:
    """What the batch system's word names, None where there is none."""
    value = environ.get(VISIBLE_AMD if amd else VISIBLE)
    its = _its(hardware.gpus, amd=amd)
    ordered = amd or environ.get("CUDA_DEVICE_ORDER") == PCI_ORDER or len({gpu.name for gpu in its}) == 1
    if value is None:
        return None
    return read_visible(value, [gpu.uuid for gpu in its], dict(hardware.notes), ordered=ordered)


def _its(gpus: Sequence[GpuIdentity], *, amd: bool) -> list[GpuIdentity]:
    return [gpu for gpu in gpus if gpu.capability.startswith("gfx") == amd]


def choose_gpus(
    seen: Sequence[GpuIdentity], capability: str, *, amd: bool = False, several: bool = False
) -> tuple[GpuIdentity, ...]:
    """The first of that maker's GPUs of this capability, or the first at all where none is asked for.

    Of `several` all of the first capability that two of them have. Empty where there is no such GPU.
    """
    its = _its(seen, amd=amd)
    for gpu in its:
        alike = tuple(other for other in its if other.capability == gpu.capability)
        if capability in ("", gpu.capability) and (len(alike) > 1 or not several):
            return alike if several else (gpu,)
    return ()


def visible_gpus(
    hardware: Hardware, gpus: tuple[GpuIdentity, ...], environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """What the image's environment says of GPUs: the batch system's word, else `pool` of more."""
    amd = gpus[0].capability.startswith("gfx")
    name = VISIBLE_AMD if amd else VISIBLE
    if assigned := _assigned_by_scheduler(hardware, environ, amd=amd):
        pci = not amd and environ.get("CUDA_DEVICE_ORDER") == PCI_ORDER
        sliced = {uuid for note, uuid in hardware.notes if note.startswith("MIG-")}
        # inside, CUDA may count in another order
        plain = [pci and seen.entry.isdigit() and seen.uuid not in sliced for seen in assigned]
        entries = [
            seen.uuid if by_uuid else seen.entry for by_uuid, seen in zip(plain, assigned, strict=True)
        ]
        return ((name, ",".join(entries)),)
    more = len(hardware.gpus) > len(gpus) or lost_gpus(dict(hardware.notes))
    return ((name, ",".join(gpu.uuid for gpu in gpus)),) if more else ()


def unusable_gpus_note(hardware: Hardware) -> str:
    """What to add where GPUs are told: those that cannot be used."""
    return "".join(
        f"; GPU {index} cannot be used: {clean(why)}"
        for index, why in lost_gpus(dict(hardware.notes)).items()
    )


def _prepare(
    folder: Path, files: Mapping[str, bytes], expectations: Mapping[str, Any], trial: GpuTrial
) -> RunSpec:
    """Writes suite and expectations and makes the report's folder; answers the run."""
    suite, expect, report = (folder / name for name in ("suite", "expect", "report"))
    write_suite(suite, files)
    write_suite(expect, {EXPECTATIONS_NAME: json.dumps(expectations, indent=1, sort_keys=True).encode()})
    report.mkdir()
    # The image's user writes here, whoever that is on the host; the folder above is closed to others.
    report.chmod(0o777)
    return RunSpec(
        argv=suite_argv(trial.definition),
        gpus=not trial.ask.rehearsal,
        mounts=(
            Mount(source=suite, target=SUITE_MOUNT, bind=True),
            Mount(source=expect, target=EXPECT_MOUNT, bind=True),
            Mount(source=report, target=REPORT_MOUNT, writable=True, scratch=True),
        ),
        timeout=timeout_of(trial.ask.level),
    )


# --- What a scan of an image lets one expect of the coverage checks: machine code, PTX, or neither. Pure
# `native` and `ptx` are about the libraries that the framework must load, since the checks run it with the
# driver's compiler switched off, and then with all machine code passed over. What has none of its own makes
# machine code where it runs.


RUNS = (Compatibility.YES, Compatibility.PTX, Compatibility.PARTLY)


def predict_coverage(contents: ScanResult, more: Iterable[Capability] = ()) -> dict[str, Predicted]:
    """By capability (`8.0`): all that are known, and `more`."""
    return {
        str(capability): _predict_capability(contents, capability)
        for capability in sorted({*capabilities(), *more})
    }


def _predict_capability(contents: ScanResult, capability: Capability) -> Predicted:
    prediction = predict(contents, capability)
    gates = {reach.path: reach for reach in prediction.libraries if reach.gates}
    runs_there = prediction.answer in RUNS
    return Predicted(
        native=runs_there and not any(reach.ptx for reach in gates.values()),
        ptx=runs_there
        and bool(gates)
        and all(_compiles(library, capability) for library in contents.libraries if library.path in gates),
        runs=runs_there,
        reason=prediction.reason,
    )


def _compiles(library: GpuLibrary, capability: Capability) -> bool:
    """Whether the driver could compile all of a library there: each module that counts holds PTX for it."""
    modules = generic_modules(library)
    return bool(modules) and all(
        any(runs(code, capability) is SupportLevel.PTX for code in module.codes) for module in modules
    )
