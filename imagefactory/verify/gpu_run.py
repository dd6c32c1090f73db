"""Run the GPU suite: write the expectations for an image on the host, and run the suite in the image.

The report is not signed here (see `trust`). Without a GPU on the host, no process is started in the image.
There is no fallback to the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from imagefactory.errors import ImagefactoryError, UsageError
from imagefactory.fs import locked_temporary_directory
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.drivers import driver_floor
from imagefactory.gpu.knowledge.gpus import capabilities
from imagefactory.gpu.predict import generic_modules, predict, runs
from imagefactory.gpu.values import Compatibility, GpuLibrary, ScanResult, SupportLevel, rocm_of
from imagefactory.model import BuildSpec, Outcome, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.runtime.hardware import (
    ALL,
    PCI_ORDER,
    SeenGpu,
    SelectedGpu,
    SelectionError,
    choose,
    find_gpu_nodes,
    lost_gpus,
    lost_note,
    names_lost,
    read_visible,
    select,
    visible_value,
)
from imagefactory.runtime.protocol import Runner
from imagefactory.suite import table as frameworks
from imagefactory.suite.gpu import table
from imagefactory.suite.gpu.context import Predicted
from imagefactory.verify.outcome import (
    GpuRun,
    InvalidReportError,
    RawResult,
    clean,
    not_started,
    outcome_of,
    read_report,
)
from imagefactory.verify.report import (
    FULL,
    MULTI_GPU_LEVELS,
    NODES,
    SEVERAL,
    GpuIdentity,
    GpuReport,
    Hardware,
    VerifiedImage,
)
from imagefactory.verify.suite_files import (
    REPORT_NAME,
    digest_of,
    expectations,
    read_suite,
    suite_argv,
    suite_mounts,
    write_suite,
)

VISIBLE, VISIBLE_AMD = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """The request for one run. `capability` is the required capability of the GPU (`8.0`), empty for any.

    `nodes` are those of the job. `predicted` is by capability. `environ` is the environment of the caller: a
    batch system sets CUDA_VISIBLE_DEVICES or, for AMD GPUs, ROCR_VISIBLE_DEVICES to the GPUs of its job, and
    so does `selected_environment` for `selected` GPUs. A `rehearsal` is only for tests.
    """

    nonce: str
    level: str = FULL
    nodes: int = 1
    capability: str = ""
    predicted: Mapping[str, Predicted]
    environ: Mapping[str, str] = field(default_factory=dict)
    selected: tuple[SelectedGpu, ...] = ()
    rehearsal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTrial:
    """One run. `made` is the image, `runner` the name of the program that starts it.

    `hardware` are the GPUs of the host, None only in a rehearsal.
    """

    made: Image | SifArtifact
    subject: VerifiedImage
    definition: BuildSpec
    ask: GpuRequest
    runner: str
    hardware: Hardware | None


def check_level(definition: BuildSpec, level: str) -> None:
    """Raise UsageError if the level requires several GPUs and the suite has no such checks for the image."""
    target = definition.target
    framework = frameworks.FRAMEWORKS.get(target.framework, frameworks.OTHER)
    locked = {package.name: package.version for package in definition.lock.packages}
    checks = table.PARTS[level] if level in MULTI_GPU_LEVELS else ()
    if reason := next(
        (reason for check in checks if (reason := table.not_applicable(framework, check, locked))), ""
    ):
        raise UsageError(
            "suite-not-applicable",
            f"{target.name}: the suite '{level}' is for PyTorch on NVIDIA GPUs: {reason}",
            hint="verify it on one GPU: --suite full",
        )


def gpu_expectations(definition: BuildSpec, ask: GpuRequest) -> dict[str, Any]:
    """Return the expectations that the suite reads. Pure. Raises UsageError like the smoke test."""
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
        **({"nodes": ask.nodes} if ask.level == NODES else {}),
    }


def timeout_of(level: str) -> float:
    """Return the time limit of the whole run in seconds. Each part has a shorter limit.

    A kit for a node limits its run itself.
    """
    return table.SECONDS[level] * len(table.LEVELS[level]) + 60.0


def verify_gpu(trial: GpuTrial, runner: Runner, clock: Callable[[], datetime], *, scratch: Path) -> GpuReport:
    """Run the suite in the image on a GPU of this machine. The result is always a report.

    The image writes its report below `scratch`. If the requested GPUs are missing, no process is started. If
    the runner cannot start the image, the outcome is `infrastructure`.
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
        several = trial.ask.level == SEVERAL
        notes = dict(trial.hardware.notes)
        seen, lost = assigned_gpus(trial.hardware, trial.ask.environ, amd=amd), lost_note(notes)
        if seen is None:
            name = VISIBLE_AMD if amd else VISIBLE
            value = trial.ask.environ[name][:200]
            uuids = [gpu.uuid for gpu in trial.hardware.gpus]
            broken = names_lost(value, uuids, trial.hardware.known, notes)
            reason = f"{name}={value!a} names no GPU of this machine{lost}"
            return not_started(run, Outcome.INFRASTRUCTURE if broken else Outcome.NO_GPU, reason)
        gpus = choose_gpus(seen, trial.ask.capability, amd=amd, several=several)
        if not gpus:
            there = ", ".join(f"{device.name} ({device.capability})" for device in seen)
            kind = f" of capability {trial.ask.capability}" if trial.ask.capability else ""
            kind = kind or (" of one capability" if several else f" of {'AMD' if amd else 'NVIDIA'}'s")
            number = "several GPUs" if several else "a GPU"
            reason = f"asked for {number}{kind}, this machine has {there}{lost}"
            return not_started(run, Outcome.WRONG_GPU, reason)
        environment = visible_gpus(trial.hardware, gpus, trial.ask.environ)
    with locked_temporary_directory("verify-", scratch) as directory:
        write_suite(directory / "suite", files)
        spec = RunSpec(
            argv=suite_argv(trial.definition),
            environment=environment,
            gpus=not trial.ask.rehearsal,
            selected_gpus=trial.ask.selected,
            mounts=suite_mounts(directory / "suite", directory, run.asked),
            timeout=timeout_of(trial.ask.level),
        )
        try:
            completed = runner.run(trial.made, spec)
        except ImagefactoryError as error:
            hint = f" ({error.hint})" if error.hint else ""
            reason = f"the runner could not start it: {error.message}{hint}"
            return not_started(replace(run, ended=clock()), Outcome.INFRASTRUCTURE, clean(reason))
        data, fault = b"", ""
        try:
            data = read_report(directory / "report" / REPORT_NAME)
        except InvalidReportError as error:
            fault = str(error)
    return outcome_of(replace(run, ended=clock()), RawResult(report=data, fault=fault, completed=completed))


def select_gpus(text: str, hardware: Hardware, *, one_slice: bool = False) -> tuple[SelectedGpu, ...]:
    """Return the GPUs of a value of --gpus, none for `all`. Raises UsageError for an unusable GPU.

    `one_slice` rejects several MIG slices.
    """
    if text == ALL:
        return ()
    try:
        uuids = [gpu.uuid for gpu in hardware.gpus]
        return tuple(select(text, uuids, dict(hardware.notes), find_gpu_nodes(), one_slice=one_slice))
    except SelectionError as error:
        raise UsageError("gpu-not-selectable", str(error), hint=error.hint) from error


def selected_environment(selected: Sequence[SelectedGpu], hardware: Hardware) -> dict[str, str]:
    """Return the variable by which programs use only these GPUs, none for all."""
    amd = hardware.gpus[0].capability.startswith("gfx")
    return {VISIBLE_AMD if amd else VISIBLE: ",".join(gpu.uuid for gpu in selected)} if selected else {}


def assigned_gpus(
    hardware: Hardware, environ: Mapping[str, str], *, amd: bool = False
) -> tuple[GpuIdentity, ...] | None:
    """Return the GPUs that the batch system assigned to the job, None if it assigned none.

    Without a batch system, all GPUs are returned.
    """
    assigned = _assigned_by_scheduler(hardware, environ, amd=amd)
    if assigned is None:
        return hardware.gpus
    uuids = [seen.uuid for seen in assigned]
    return tuple(gpu for gpu in hardware.gpus if gpu.uuid in uuids or "" in uuids) or None


def _assigned_by_scheduler(
    hardware: Hardware, environ: Mapping[str, str], *, amd: bool
) -> list[SeenGpu] | None:
    value = environ.get(VISIBLE_AMD if amd else VISIBLE)
    if value is None:
        return None
    gpus = _of_maker(hardware.gpus, amd=amd)
    ordered = amd or environ.get("CUDA_DEVICE_ORDER") == PCI_ORDER or len({gpu.name for gpu in gpus}) == 1
    return read_visible(value, [gpu.uuid for gpu in gpus], dict(hardware.notes), ordered=ordered)


def _of_maker(gpus: Sequence[GpuIdentity], *, amd: bool) -> list[GpuIdentity]:
    return [gpu for gpu in gpus if gpu.capability.startswith("gfx") == amd]


def choose_gpus(
    seen: Sequence[GpuIdentity], capability: str, *, amd: bool = False, several: bool = False
) -> tuple[GpuIdentity, ...]:
    """Return the GPUs that run the suite, chosen by `hardware.choose`.

    Empty if there are none of this vendor.
    """
    gpus = _of_maker(seen, amd=amd)
    return tuple(
        gpus[index] for index in choose([gpu.capability for gpu in gpus], capability, several=several)
    )


def visible_gpus(
    hardware: Hardware, gpus: tuple[GpuIdentity, ...], environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return the variables that select GPUs in the image: the batch system's value, or `gpus` if there are
    more.
    """
    amd, notes = gpus[0].capability.startswith("gfx"), dict(hardware.notes)
    name = VISIBLE_AMD if amd else VISIBLE
    if assigned := _assigned_by_scheduler(hardware, environ, amd=amd):
        pci = not amd and environ.get("CUDA_DEVICE_ORDER") == PCI_ORDER
        return ((name, visible_value(assigned, notes, pci=pci)),)
    more = len(hardware.gpus) > len(gpus) or lost_gpus(notes)
    return ((name, ",".join(gpu.uuid for gpu in gpus)),) if more else ()


def unusable_gpus_note(hardware: Hardware) -> str:
    """Return a note about unusable GPUs, as a suffix of a message."""
    return clean(lost_note(dict(hardware.notes)))


# --- Expectations of the coverage checks, from a scan of the image. Pure
# `native` and `ptx` are about the libraries that the framework must load: the checks run it first without the
# driver's compiler, then without machine code. A framework without code of its own compiles at run time.


RUNS = (Compatibility.YES, Compatibility.PTX, Compatibility.PARTLY)


def predict_coverage(contents: ScanResult, more: Iterable[Capability] = ()) -> dict[str, Predicted]:
    """Return the predictions for all known capabilities (`8.0`) and those in `more`."""
    every = sorted({*capabilities(), *more})
    return {str(capability): _predict_capability(contents, capability) for capability in every}


def _predict_capability(contents: ScanResult, capability: Capability) -> Predicted:
    prediction = predict(contents, capability)
    gates = {reach.path: reach for reach in prediction.libraries if reach.gates}
    runs_there = prediction.answer in RUNS
    return Predicted(
        native=runs_there
        and prediction.answer is not Compatibility.PTX
        and not any(reach.ptx for reach in gates.values()),
        ptx=runs_there
        and bool(gates)
        and all(_compiles(library, capability) for library in contents.libraries if library.path in gates),
        runs=runs_there,
        reason=prediction.reason,
    )


def _compiles(library: GpuLibrary, capability: Capability) -> bool:
    """Return whether the driver could compile a library: each generic module has PTX for the capability."""
    modules = generic_modules(library)
    return bool(modules) and all(
        any(runs(code, capability) is SupportLevel.PTX for code in module.codes) for module in modules
    )
