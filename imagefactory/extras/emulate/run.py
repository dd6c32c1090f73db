"""A command in an image that has no GPU, and sees one."""

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
from imagefactory.errors import UsageError, os_problem
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

# --- How fast a GPU was seen to be: what verdicts of the full suite hold of it, for emulating one. Pure
# The numbers of the check `profile` are times by the operations or the bytes of one call:
# `product-fp16-2147483648-s`, `move-3145728-s`. Those of `all-reduce`, of several GPUs, are by bytes.


PROFILE, ALL_REDUCE, PEER = "profile", "all-reduce", "peer"
NEEDED = ("product-fp32", "convolution-fp32", "backward-fp32", "move")
COPIES = ("up-pinned", "up-pageable", "down-pinned", "down-pageable")
SINGLE = ("processors", "context", "kernel", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRunRecord:
    """A GPU as one run met it. `memory` and `context` in bytes, `kernel` and `launch` in seconds; `curves` by
    name as pairs of an amount and its seconds, the smallest first.
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
    """The newest that can be relied on, of a GPU that its driver calls `device`; None without one.

    What several of them sent each other is the newest verdict's on those.
    """
    its = sorted(
        (one.verdict for one in judged if one.verdict and one.standing is VerdictStatus.GOOD),
        key=lambda verdict: verdict.issued,
        reverse=True,
    )
    its = [verdict for verdict in its if verdict.report.device and verdict.report.device.name == device]
    found = next((recorded for verdict in its if (recorded := _recorded(verdict))), None)
    peers = next((peers for verdict in its if (peers := _peers(verdict))), ())
    return replace(found, curves={**found.curves, PEER: peers}) if found and peers else found


def _peers(verdict: Verdict) -> tuple[tuple[float, float], ...]:
    """Seconds by the bytes that each GPU of an all-reduce sends: in a ring of n, 2 (n - 1) / n of its own."""
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
    """Those of a check that passed, without the units in their names; none of another."""
    checks = (check for check in verdict.report.checks if check.name == name)
    passed = (check for check in checks if check.state is CheckState.PASSED)
    return next((without_units(dict(check.numbers)) for check in passed), {})


def without_units(numbers: Mapping[str, float]) -> dict[str, float]:
    """Seconds and bytes by the names of what they are of."""
    return {name.removesuffix("-s").removesuffix("-bytes"): value for name, value in numbers.items()}


def recorded_curves(numbers: Mapping[str, float]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Numbers whose names end with an amount, by what stands before it. Those of no time are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, seconds in numbers.items():
        what, _, amount = name.rpartition("-")
        if what and amount.isdecimal() and int(amount) > 0 and seconds > 0:
            found.setdefault(what, []).append((float(amount), seconds))
    return {what: tuple(sorted(points)) for what, points in found.items()}


SOURCE = Path(inside.__file__).parent
PACKAGE, START = "imagefactory_emulate", "sitecustomize.py"
"""What the room is called inside, and the file of it that Python finds by itself."""
INSIDE, EMULATION_DIRECTORIES = "/imagefactory/emulate", "/imagefactory/emulated"
REQUEST_FILE = "asked.json"
CONTEXT = 512 << 20
"""What CUDA and its libraries take of a GPU before the first tensor; by driver and GPU 300 to 700 MiB."""
KERNEL, LAUNCH = 2e-6, 5e-6
"""Seconds that the smallest kernel takes, and the program's for handing one to the driver."""
MOST, MOST_NAMES = 256, 10_000
"""Processes that are listened to, and names in their folder."""


def recorded_profile(
    access: Access,
    made: Image | SifArtifact,
    sheet: DataSheet,
    now: datetime,
    offered: Sequence[VerificationResult] = (),
) -> GpuRunRecord | None:
    """What a verdict of this very image holds of such a GPU, of the store or `offered` by a catalogue; None
    without one that counts.
    """
    return find_recorded((*offered, *VerdictReader(access, now).stored(made)), sheet.device)


@contextmanager
def emulating(
    sheet: DataSheet, count: int, spec: RunSpec, recorded: GpuRunRecord | None = None, *, scratch: Path
) -> Iterator[tuple[RunSpec, Path]]:
    """The run as it sees `count` of such GPUs, and the folder in which its processes tell what they did.

    That folder is below `scratch`. Times are those of `recorded`, without it those of the data sheet.
    """
    asked = json.dumps(emulation_request(sheet, count, recorded)).encode()
    with locked_temporary_directory("emulate-", scratch) as folder:
        shown, told = folder / "shown", folder / "told"
        write_suite(shown, {REQUEST_FILE: asked, **read_package()})
        told.mkdir()
        told.chmod(0o777)  # the image's user writes here, whoever that is on the host
        own = dict(spec.environment).get("PYTHONPATH", "")
        yield (
            replace(
                spec,
                environment=(
                    *((key, value) for key, value in spec.environment if key != "PYTHONPATH"),
                    ("IMAGEFACTORY_EMULATE", f"{INSIDE}/{REQUEST_FILE}"),
                    ("PYTHONPATH", f"{INSIDE}:{own}" if own else INSIDE),
                ),
                mounts=(
                    *spec.mounts,
                    Mount(source=shown, target=INSIDE, bind=True),
                    Mount(source=told, target=EMULATION_DIRECTORIES, writable=True, scratch=True),
                ),
            ),
            told,
        )


def read_package() -> dict[str, bytes]:
    """Return the files of the room `emulate`, by their paths in the folder that an image is shown."""
    files = {
        name: read_file(SOURCE, name, LONGEST) for name in list_names(SOURCE, MOST) if name.endswith(".py")
    }
    return {name if name == START else f"{PACKAGE}/{name}": data for name, data in files.items()}


def emulation_request(
    sheet: DataSheet, count: int, recorded: GpuRunRecord | None = None
) -> dict[str, object]:
    """What the program inside is told of its GPUs, as `emulate/start.py` reads it."""
    told = recorded or sheet
    return {
        "gpus": count,
        "folder": EMULATION_DIRECTORIES,
        "profile": {
            "name": sheet.name,
            "device": sheet.device,
            "capability": str(sheet.capability),
            "processors": told.processors,
            "memory": told.memory,
            "context": recorded.context if recorded else CONTEXT,
            "kernel": recorded.kernel if recorded else KERNEL,
            "launch": recorded.launch if recorded else LAUNCH,
            "curves": {**curves_of(sheet), **(recorded.curves if recorded else {})},
            "basis": RECORDED if recorded else ESTIMATED,
        },
    }


def curves_of(sheet: DataSheet) -> dict[str, tuple[tuple[float, float], ...]]:
    """What a data sheet lets one expect: of each what it does in a second."""
    rates = {
        "move": sheet.bandwidth,
        "peer": sheet.peer,
        **dict.fromkeys(COPIES, sheet.link),
        **{
            f"{what}-{kind}": rate
            for what in ("product", "convolution", "backward")
            for kind, rate in sheet.flops.items()
        },
    }
    return {name: ((rate, 1.0),) for name, rate in rates.items()}


def read_emulation_summaries(folder: Path) -> tuple[EmulatedRun, ...]:
    """What each process of the run told. Raises StatementError for what no process of ours writes."""
    return tuple(run for _, run in _read(folder))


def _read(folder: Path) -> Iterator[tuple[bytes, EmulatedRun]]:
    """Each text with what it tells. The image owns the folder, and may have left anything in it."""
    try:
        names = [name for name in list_names(folder, MOST_NAMES) if name.endswith(".json")]
    except OSError as error:
        raise invalid_value_error("what the run told", error.strerror or str(error)) from error
    for name in names[:MOST]:
        try:
            text = read_file(folder, name, LONGEST)
        except OSError as error:
            raise invalid_value_error(name, error.strerror or str(error)) from error
        yield text, parse_emulated(text, name)


def write_emulation_summary(folder: Path, runs: tuple[EmulatedRun, ...], output: Path) -> None:
    """Writes what the main process told to a file, for `job write --resources-from`."""
    main = main_run(runs)
    text = next((text for text, run in _read(folder) if run == main), None)
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


# --- What a run measured, as a person reads it, and what to request for a job


def main_run(runs: Sequence[EmulatedRun]) -> EmulatedRun | None:
    """Of the processes of a run the one that did most on a device."""
    return max(runs, key=lambda run: run.operations, default=None)


def stall_share(loader: EmulatedLoader) -> float | None:
    """The part of a batch's time that the program waited for it."""
    if not loader.interval or loader.wait is None:
        return None
    return min(1.0, loader.wait / loader.interval)


def epoch_seconds(loader: EmulatedLoader) -> float | None:
    """An epoch at the pace that was seen, its first batch included."""
    if loader.interval is None or not loader.batches:
        return None
    return loader.first_wait + loader.interval * (loader.batches - 1)


NONE = (
    "emulated: no program of this run used a GPU through torch, so there is nothing to tell",
    "what starts python with -I or -E, or is no Python, sees no emulated GPU",
)
BASES = {ESTIMATED: "estimated from its data sheet", RECORDED: "by times recorded on one"}
SLOWER_NOTE = (
    "Kernels are slower than a data sheet: steps take this long at least, stalls are this share at most."
)
UNTOLD = "not measured: fewer than two batches were seen"


def format_emulated(run: EmulatedRun, processes: int, width: int | None) -> str:
    """The numbers of the process that did most, and what to write."""
    memory, loader, advice = run.memory, run.loader, advise(run)
    head = f"emulated: {run.device}, {BASES[run.basis]}; no GPU was used, this is no verdict"
    fields = []
    if loader is not None:
        share, own, epoch = stall_share(loader), computing(loader), epoch_seconds(loader)
        if share is None or own is None or loader.interval is None:
            fields.append(("data stalls", UNTOLD))
        else:
            waited = f"{_time(loader.wait or 0)} of {_time(loader.interval)} a batch"
            fields.append(("data stalls", f"{share:.0%} of the time: {waited}"))
            fields.append(("step", f"{_time(own)} without waiting for data"))
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
    notes = ["Nothing is computed on such a GPU: a loss or an accuracy that the program told means nothing."]
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
