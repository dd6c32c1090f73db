"""Run a command with an emulated GPU, and report the resources that it needs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.errors import UsageError, os_problem, os_reason
from imagefactory.extras.emulate import inside
from imagefactory.fs import locked_temporary_directory, replacing
from imagefactory.gpu.knowledge import DataSheet
from imagefactory.jobs.resources import (
    ESTIMATED,
    LONGEST,
    RECORDED,
    EmulatedLoader,
    EmulatedRun,
    ResourceAdvice,
    advise,
    computing,
    parse_emulated,
)
from imagefactory.model import CheckState, Mount, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.schedulers.sizes import GB, format_size
from imagefactory.serialize import invalid_value_error
from imagefactory.trees import list_names, read_file
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from imagefactory.verify.suite_files import write_suite
from imagefactory.views.text import fold, format_fields

# --- Recorded speed of a GPU, from verdicts of the full suite. Pure
# The check `profile` has times by the operations or bytes of one call: `product-fp16-2147483648-s`,
# `move-3145728-s`. The check `all-reduce`, with several GPUs, has times by bytes.


PROFILE, ALL_REDUCE, PEER = "profile", "all-reduce", "peer"
NEEDED = ("product-fp32", "convolution-fp32", "backward-fp32", "move")
COPIES = ("up-pinned", "up-pageable", "down-pinned", "down-pageable")
SINGLE = ("processors", "context", "kernel", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRunRecord:
    """The speed of a GPU in one run. `memory` and `context` are in bytes, `kernel` and `launch` in seconds.

    `curves` are pairs of an amount and its seconds by name, the smallest first.
    """

    driver: str
    when: datetime
    memory: int
    processors: int
    context: int
    kernel: float
    launch: float
    curves: Mapping[str, tuple[tuple[float, float], ...]]


def find_recorded(judged: Iterable[VerificationResult], device: str) -> GpuRunRecord | None:
    """Return the newest trusted record of a GPU that its driver calls `device`, or None.

    The transfer times between GPUs are those of the newest verdict with several GPUs.
    """
    its = sorted(
        (result.verdict for result in judged if result.verdict and result.standing is VerdictStatus.GOOD),
        key=lambda verdict: verdict.issued,
        reverse=True,
    )
    its = [verdict for verdict in its if verdict.report.device and verdict.report.device.name == device]
    record = next((recorded for verdict in its if (recorded := _recorded(verdict))), None)
    peers = next((peers for verdict in its if (peers := _peers(verdict))), ())
    return replace(record, curves={**record.curves, PEER: peers}) if record and peers else record


def _peers(verdict: Verdict) -> tuple[tuple[float, float], ...]:
    """Return the seconds of an all-reduce by the bytes that each GPU sends: in a ring 2 (n - 1) / n of its
    data.
    """
    count = verdict.report.gpus
    sums = recorded_curves(numbers_of(verdict, ALL_REDUCE)).get(ALL_REDUCE, ())
    return tuple((size * 2 * (count - 1) / count, took) for size, took in sums) if count > 1 else ()


def _recorded(verdict: Verdict) -> GpuRunRecord | None:
    report = verdict.report
    if report.device is None or report.hardware is None:
        return None
    numbers = numbers_of(verdict, PROFILE)
    curves = recorded_curves(numbers)
    if not {*NEEDED, *COPIES} <= set(curves) or not {*SINGLE} <= set(numbers):
        return None
    return GpuRunRecord(
        driver=report.hardware.driver,
        when=verdict.issued,
        memory=report.device.memory,
        processors=int(numbers["processors"]),
        context=int(numbers["context"]),
        kernel=numbers["kernel"],
        launch=numbers["launch"],
        curves=curves,
    )


def numbers_of(verdict: Verdict, name: str) -> dict[str, float]:
    """Return the numbers of a passed check, without the units in their names. Empty for other checks."""
    checks = (check for check in verdict.report.checks if check.name == name)
    passed = (check for check in checks if check.state is CheckState.PASSED)
    return next((without_units(dict(check.numbers)) for check in passed), {})


def without_units(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers with the suffixes `-s` and `-bytes` removed from their names."""
    return {name.removesuffix("-s").removesuffix("-bytes"): value for name, value in numbers.items()}


def recorded_curves(numbers: Mapping[str, float]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return the numbers whose names end with an amount, by the rest of the name. Zero times are skipped."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, seconds in numbers.items():
        operation, _, amount = name.rpartition("-")
        if operation and amount.isdecimal() and int(amount) > 0 and seconds > 0:
            curves.setdefault(operation, []).append((float(amount), seconds))
    return {operation: tuple(sorted(points)) for operation, points in curves.items()}


SOURCE = Path(inside.__file__).parent
PACKAGE, START = "imagefactory_emulate", "sitecustomize.py"
"""The package name inside the image, and the file that Python imports at start."""
INSIDE, EMULATION_DIRECTORIES = "/imagefactory/emulate", "/imagefactory/emulated"
REQUEST_FILE = "asked.json"
CONTEXT = 512 << 20
"""GPU memory of CUDA and its libraries before the first tensor: 300 to 700 MiB by driver and GPU."""
KERNEL, LAUNCH = 2e-6, 5e-6
"""Seconds of the smallest kernel, and of the program for launching one."""
MOST, MOST_NAMES = 256, 10_000
"""The limits of processes whose summaries are read, and of names in their directory."""


def recorded_profile(
    access: Access,
    artifact: Image | SifArtifact,
    sheet: DataSheet,
    now: datetime,
    offered: Sequence[VerificationResult] = (),
) -> GpuRunRecord | None:
    """Return the record of this GPU in the image's verdicts (stored or `offered`), or None."""
    return find_recorded((*offered, *VerdictReader(access, now).stored(artifact)), sheet.device)


@contextmanager
def emulating(
    sheet: DataSheet, count: int, spec: RunSpec, recorded: GpuRunRecord | None = None, *, scratch: Path
) -> Iterator[tuple[RunSpec, Path]]:
    """Yield the run with `count` emulated GPUs, and the directory for the summaries of its processes.

    The directory is below `scratch`. Times come from `recorded`, or from the data sheet without it.
    """
    request = json.dumps(emulation_request(sheet, count, recorded)).encode()
    with locked_temporary_directory("emulate-", scratch) as directory:
        package, summaries = directory / "shown", directory / "told"
        write_suite(package, {REQUEST_FILE: request, **read_package()})
        summaries.mkdir()
        summaries.chmod(0o777)  # the image's user writes here, with an unknown user ID
        python_path = dict(spec.environment).get("PYTHONPATH", "")
        yield (
            replace(
                spec,
                environment=(
                    *((key, value) for key, value in spec.environment if key != "PYTHONPATH"),
                    ("IMAGEFACTORY_EMULATE", f"{INSIDE}/{REQUEST_FILE}"),
                    ("PYTHONPATH", f"{INSIDE}:{python_path}" if python_path else INSIDE),
                ),
                mounts=(
                    *spec.mounts,
                    Mount(source=package, target=INSIDE, bind=True),
                    Mount(source=summaries, target=EMULATION_DIRECTORIES, writable=True, scratch=True),
                ),
            ),
            summaries,
        )


def read_package() -> dict[str, bytes]:
    """Return the files of the emulation by their paths in the directory that the image sees."""
    files = {
        name: read_file(SOURCE, name, LONGEST) for name in list_names(SOURCE, MOST) if name.endswith(".py")
    }
    return {name if name == START else f"{PACKAGE}/{name}": data for name, data in files.items()}


def emulation_request(
    sheet: DataSheet, count: int, recorded: GpuRunRecord | None = None
) -> dict[str, object]:
    """Return the description of the GPUs that `inside/start.py` reads."""
    hardware = recorded or sheet
    return {
        "gpus": count,
        "folder": EMULATION_DIRECTORIES,
        "profile": {
            "name": sheet.name,
            "device": sheet.device,
            "capability": str(sheet.capability),
            "processors": hardware.processors,
            "memory": hardware.memory,
            "context": recorded.context if recorded else CONTEXT,
            "kernel": recorded.kernel if recorded else KERNEL,
            "launch": recorded.launch if recorded else LAUNCH,
            "curves": {**curves_of(sheet), **(recorded.curves if recorded else {})},
            "basis": RECORDED if recorded else ESTIMATED,
        },
    }


def curves_of(sheet: DataSheet) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return the rates of a data sheet as curves: the amount of each in one second."""
    rates = {
        "move": sheet.bandwidth,
        "peer": sheet.peer,
        **dict.fromkeys(COPIES, sheet.link),
        **{
            f"{operation}-{kind}": rate
            for operation in ("product", "convolution", "backward")
            for kind, rate in sheet.flops.items()
        },
    }
    return {name: ((rate, 1.0),) for name, rate in rates.items()}


def read_emulation_summaries(directory: Path) -> tuple[EmulatedRun, ...]:
    """Return the summary of each process. Raises StatementError for invalid files."""
    return tuple(run for _, run in _read(directory))


def _read(directory: Path) -> Iterator[tuple[bytes, EmulatedRun]]:
    """Yield each file's text and summary. The image owns the directory, so its files are untrusted."""
    try:
        names = [name for name in list_names(directory, MOST_NAMES) if name.endswith(".json")]
    except OSError as error:
        raise invalid_value_error("the summary of the run", os_reason(error)) from error
    for name in names[:MOST]:
        try:
            text = read_file(directory, name, LONGEST)
        except OSError as error:
            raise invalid_value_error(name, os_reason(error)) from error
        yield text, parse_emulated(text, name)


def write_emulation_summary(directory: Path, runs: tuple[EmulatedRun, ...], output: Path) -> None:
    """Write the summary of the main process to a file, for `job write --resources-from`."""
    main = main_run(runs)
    text = next((text for text, run in _read(directory) if run == main), None)
    if text is None:
        raise UsageError(
            "gpu-not-used", "the run used no GPU, so there is no summary to write", hint="omit --output"
        )
    try:
        with replacing(output) as file:
            file.write(text + b"\n")
    except OSError as error:
        raise UsageError(
            *os_problem("write", output, error), hint="pass a file that you may write: --output FILE"
        ) from error


# --- Text of a summary


def main_run(runs: Sequence[EmulatedRun]) -> EmulatedRun | None:
    """Return the process with the most GPU operations."""
    return max(runs, key=lambda run: run.operations, default=None)


def stall_share(loader: EmulatedLoader) -> float | None:
    """Return the share of the time per batch that the program waits for data, or None."""
    if not loader.interval or loader.wait is None:
        return None
    return min(1.0, loader.wait / loader.interval)


def epoch_seconds(loader: EmulatedLoader) -> float | None:
    """Return the seconds of an epoch at the measured pace, with its first batch."""
    if loader.interval is None or not loader.batches:
        return None
    return loader.first_wait + loader.interval * (loader.batches - 1)


NONE = (
    "emulated: no program of this run used a GPU through torch, so there is no summary",
    "programs other than Python, and python -I or -E, see no emulated GPU",
)
BASES = {ESTIMATED: "estimated from its data sheet", RECORDED: "by times recorded on one"}
SLOWER_NOTE = (
    "Kernels are slower than a data sheet: steps take this long at least, stalls are this share at most."
)
UNTOLD = "not measured: fewer than two batches were seen"


def format_emulated(run: EmulatedRun, processes: int, width: int | None) -> str:
    """Return the numbers of the main process, and the options for a job."""
    memory, loader, advice = run.memory, run.loader, advise(run)
    head = f"emulated: {run.device}, {BASES[run.basis]}; no GPU was used (not a verdict)"
    fields = []
    if loader is not None:
        share, compute_time, epoch = stall_share(loader), computing(loader), epoch_seconds(loader)
        if share is None or compute_time is None or loader.interval is None:
            fields.append(("data stalls", UNTOLD))
        else:
            waited = f"{_time(loader.wait or 0)} of {_time(loader.interval)} a batch"
            fields.append(("data stalls", f"{share:.0%} of the time: {waited}"))
            fields.append(("step", f"{_time(compute_time)} without waiting for data"))
        if epoch is not None and loader.batches:
            size = f" of {loader.batch_size}" if loader.batch_size else ""
            fields.append(("epoch", f"{_time(epoch)} for {loader.batches} batches{size}"))
    elif run.step is not None:
        fields.append(("step", f"{_time(run.step)} from one of the optimizer to the next"))
    most = (
        f"{_gigabytes(memory.peak + memory.context)} at most, {_gigabytes(memory.context)} of it CUDA's own"
    )
    fields.append(("GPU memory", f"{most}, of {_gigabytes(memory.total)}"))
    fields.append(("write", _write(run, advice)))
    notes = [
        "No values are computed on an emulated GPU: ignore losses and accuracies that the program prints."
    ]
    if run.basis == ESTIMATED:
        notes.append(SLOWER_NOTE)
    if advice.time is None:
        notes.append("It did not come to its end, so how long a job takes follows from its epochs alone.")
    if processes > 1:
        notes.append(f"{processes} processes used a GPU each; this is the one that did most.")
    if run.unlocked:
        notes.append(
            f"Pinned memory could not be locked here ({run.unlocked}): a loader may be faster for it."
        )
    return "\n".join([*fold([head], width), format_fields(fields, width=width), *fold(notes, width)])


def _write(run: EmulatedRun, advice: ResourceAdvice) -> str:
    if advice.gpu_memory is None:
        return "it ran out of memory: take a GPU that has more, or a smaller batch"
    several = f"--gpus {advice.gpus} " if advice.gpus > 1 else ""
    words = f"{several}--gpu-memory {format_size(advice.gpu_memory)} --cpus {advice.cpus}"
    if advice.time:
        words += f" --time {math.ceil(advice.time.total_seconds() / 60)}m"
    if advice.workers is None or run.loader is None:
        return words
    return f"{words}, and num_workers={advice.workers} in the DataLoader ({run.loader.workers} now)"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _gigabytes(size: int) -> str:
    return f"{size / GB:.1f} GB"
