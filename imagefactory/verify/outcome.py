"""Find the outcome of a run of the GPU suite, with a strict parser of its report. Pure functions.

The same rules apply to runs on this machine and to results of kits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from imagefactory.errors import StatementError, os_reason
from imagefactory.gpu.forward import FORWARD_LIBRARY
from imagefactory.model import CheckResult, CheckState, CommandResult, Outcome
from imagefactory.serialize import (
    LARGEST_COUNT,
    LARGEST_NUMBER,
    AnyText,
    Capability,
    Choices,
    Constant,
    MaxRows,
    NumberRange,
    ObjectSchema,
    PairsAsObject,
    Pattern,
    parse_json,
)
from imagefactory.suite import table as frameworks
from imagefactory.suite import table as smoke_table
from imagefactory.suite.gpu import table
from imagefactory.trees import read_file
from imagefactory.verify.report import (
    COUNTS,
    MULTI_GPU_LEVELS,
    NODES,
    SEVERAL,
    GpuIdentity,
    GpuReport,
    Hardware,
    Uuid,
    VerifiedImage,
    digits_of,
)

# --- Untrusted bytes that an image wrote: a strict parser, and printable texts


LARGEST_REPORT = 1 << 20
LONGEST_DETAIL = 2000


class InvalidReportError(Exception):
    """A report that is not accepted. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteCheck:
    """A row of the suite's report: the result and its outcome for a failure."""

    result: CheckResult
    outcome: str


def read_report(path: Path) -> bytes:
    """Return the bytes of a report.

    Raises InvalidReportError unless it is a regular file of at most LARGEST_REPORT bytes.
    """
    try:
        return read_file(path.parent, path.name, LARGEST_REPORT)
    except FileNotFoundError:
        raise InvalidReportError("the process wrote no report") from None
    except OSError as error:
        raise InvalidReportError(f"cannot read the report: {os_reason(error)}") from error


def parse_fields(data: bytes, fields: ObjectSchema) -> dict[str, Any]:
    """Return the JSON object of a report. Raises InvalidReportError unless it has exactly these fields."""
    try:
        return fields.parse(parse_json(data), "the report")
    except ValueError as error:
        raise InvalidReportError("the report is not JSON") from error
    except StatementError as error:
        raise InvalidReportError(error.message) from error


def checks_schema(names: Iterable[str], outcomes: Iterable[str], most: int = LARGEST_REPORT) -> Any:
    """Return the schema of a report's checks.

    `names` are the checks of the suite, `outcomes` the outcomes of a failure. A check has at most `most`
    numbers.
    """
    row = ObjectSchema(
        name=Annotated[str, Choices(tuple(names))],
        state=CheckState,
        detail=AnyText,
        outcome=Annotated[str, Choices(("", *outcomes))],
        seconds=Annotated[float, NumberRange(0, LARGEST_NUMBER)],
        numbers=Annotated[tuple[tuple[AnyText, float], ...], PairsAsObject(), MaxRows(most)],
    )
    return Annotated[tuple[Annotated[object, row], ...], MaxRows(LARGEST_REPORT)]


def clean_check(row: Mapping[str, Any]) -> SuiteCheck:
    """Return a check of `checks_schema` with printable texts."""
    numbers = {clean(name): value for name, value in row["numbers"]}
    return SuiteCheck(
        result=CheckResult(
            name=row["name"],
            state=row["state"],
            detail=clean(row["detail"]),
            seconds=row["seconds"],
            numbers=tuple(sorted(numbers.items())),
        ),
        outcome=row["outcome"],
    )


def exit_summary(completed: CommandResult) -> str:
    """Return one line: exit code or signal, and the last line on stderr."""
    code = completed.returncode
    ended = f"it ended by signal {code - 128}" if 128 < code < 192 else f"its exit code was {code}"
    lines = [line for line in (completed.stderr or completed.stdout).splitlines() if line.strip()]
    return clean(f"{ended}, its last words were: {lines[-1]}" if lines else f"{ended} and it said nothing")


def clean(text: str) -> str:
    """Return one printable line, so that untrusted text cannot control a terminal."""
    line = text[: 4 * LONGEST_DETAIL]
    if not line.isprintable():
        line = "".join(letter if letter.isprintable() else " " for letter in line)
    line = " ".join(line.split())
    return line if len(line) <= LONGEST_DETAIL else line[:LONGEST_DETAIL] + " ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeReport:
    """A report of the smoke test. `running` is the check in progress at the last write, empty at the end."""

    running: str
    rows: tuple[SuiteCheck, ...]


_FIELDS = ObjectSchema(
    format=Annotated[int, Constant(smoke_table.FORMAT)],
    nonce=object,
    target=object,
    python=object,
    running=Annotated[str, Choices(("", *smoke_table.CHECKS))],
    checks=checks_schema(smoke_table.CHECKS, (smoke_table.LOAD_FAILED, smoke_table.WRONG_NUMBERS)),
)


def parse_smoke_report(data: bytes, nonce: str) -> SmokeReport:
    """Parse a report in the format of this suite with this nonce.

    Raises InvalidReportError for other bytes.
    """
    report = parse_fields(data, _FIELDS)
    if report["nonce"] != nonce:
        raise InvalidReportError("the report does not contain the nonce of this run")
    return SmokeReport(running=report["running"], rows=tuple(map(clean_check, report["checks"])))


MOST_NUMBERS = 256
MEASURED = (
    *("vector-add", "matmul", "reduction", "convolution", "transfers"),
    *("profile", "peer-to-peer", "all-reduce", "data-parallel", "nodes"),
)
"""Checks that measure. They pass only with a number."""
CONTRADICTION = "contradiction"
"""The number of a coverage check that shows a contradiction to the prediction."""

MULTI_GPU_OUTCOMES = {
    Outcome.VERIFIED: Outcome.TOGETHER,
    **dict.fromkeys(
        (Outcome.WRONG_NUMBERS, Outcome.NO_KERNEL, Outcome.DRIVER_TOO_OLD, Outcome.LOAD_FAILED), Outcome.APART
    ),
}
"""The outcomes for several GPUs or nodes. None of them is a claim about one GPU in tables."""

_CUDA = re.compile(r"[0-9]{1,3}\.[0-9]{1,2}")
_DEVICE = ObjectSchema(
    name=AnyText, capability=Capability, uuid=Uuid, memory=Annotated[int, NumberRange(1, LARGEST_COUNT)]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """A run from the point of view of the host.

    `asked` are its expectations, `suite` the digest of the suite.

    `waive` are checks that the recipe does not require. `hardware` is None if the host found no GPU.
    """

    subject: VerifiedImage
    suite: str
    asked: Mapping[str, Any]
    waive: tuple[str, ...]
    runner: str
    hardware: Hardware | None
    started: datetime
    ended: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RawResult:
    """The raw result of an image. `report` is its file, or `fault` is why it cannot be read.

    `parsed` is the parsed report, if the caller already has it.
    """

    report: bytes
    fault: str
    completed: CommandResult
    parsed: GpuSuiteReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSuiteReport:
    """A report of the GPU suite. `running` is the check in progress at the last write, empty at the end.

    `libcuda` is the path of the library that answered, empty if unknown.
    """

    cuda: str
    libcuda: str
    device: GpuIdentity | None
    running: str
    rows: tuple[SuiteCheck, ...]


@functools.cache
def _fields(level: str) -> ObjectSchema:
    names = table.checks_of(level)
    return ObjectSchema(
        format=Annotated[int, Constant(table.FORMAT)],
        nonce=object,
        target=object,
        python=object,
        level=object,
        rehearsal=object,
        cuda=Annotated[str, Pattern(_CUDA, empty=True)],
        libcuda=AnyText,
        device=Annotated[object, _DEVICE] | None,
        running=Annotated[str, Choices(("", *names))],
        checks=checks_schema(names, table.OUTCOMES, MOST_NUMBERS),
    )


def parse_suite_report(data: bytes, expectations: Mapping[str, Any]) -> GpuSuiteReport:
    """Parse a report that matches `expectations`. Raises InvalidReportError for others."""
    report = parse_fields(data, _fields(expectations["level"]))
    if report["nonce"] != expectations["nonce"]:
        raise InvalidReportError("the report does not contain the nonce of this run")
    for key in ("target", "level", "rehearsal"):
        if report[key] != expectations[key] or type(report[key]) is not type(expectations[key]):
            raise InvalidReportError(f"the report has another {key}")
    checks = tuple(map(clean_check, report["checks"]))
    if len({check.result.name for check in checks}) != len(checks):
        raise InvalidReportError("the report contains a check twice")
    device = report["device"] and GpuIdentity(**{**report["device"], "name": clean(report["device"]["name"])})
    return GpuSuiteReport(
        cuda=report["cuda"],
        libcuda=clean(report["libcuda"]),
        device=device,
        running=report["running"],
        rows=checks,
    )


def from_image(libcuda: str, driver: str) -> bool:
    """Return whether a libcuda is the image's, for older drivers: its version is not that of the driver.

    `libcuda` is a path in a container. The name of the machine's own may have no version there.
    """
    match = FORWARD_LIBRARY.fullmatch(libcuda.rpartition("/")[2])
    return match is not None and bool(driver) and match[1] != driver


def _with_libcuda(hardware: Hardware | None, libcuda: str) -> Hardware | None:
    """Return the host with notes on the libcuda that answered: its path, its version, `host` or `compat`."""
    if hardware is None or not libcuda:
        return hardware
    compat = from_image(libcuda, hardware.driver)
    version = libcuda.rpartition(".so.")[2] if compat else hardware.driver
    notes = (
        ("libcuda", libcuda),
        ("libcuda-version", version),
        ("libcuda-source", "compat" if compat else "host"),
    )
    return replace(hardware, notes=(*hardware.notes, *notes))


def not_started(run: GpuRun, outcome: Outcome, reason: str) -> GpuReport:
    """Return the report of a run that started no process in the image."""
    return _complete(run, _all(run, CheckState.NOT_RUN, reason), outcome, reason)


def outcome_of(run: GpuRun, brought: RawResult) -> GpuReport:
    """Return the report: every check of the level once and in order, and the outcome of the run.

    The outcome is VERIFIED only if every check that applies passed and measured numbers, on a GPU that the
    host also found, in a process that ended normally. A rehearsal is never more than `not-tested`.
    """
    completed = brought.completed
    try:
        if brought.fault:
            raise InvalidReportError(brought.fault)
        suite_report = brought.parsed or parse_suite_report(brought.report, run.asked)
    except InvalidReportError as fault:
        if completed.timed_out:
            reason = "stopped after too long, before it wrote a readable report"
            return _complete(run, _all(run, CheckState.FAILED, reason), Outcome.TIMEOUT, reason)
        reason = f"{fault}; {exit_summary(completed)}"
        return _complete(run, _all(run, CheckState.FAILED, reason), _crash(run), reason)
    suite_report = replace(suite_report, device=_with_host_name(suite_report.device, run.hardware))
    rows = {row.result.name: row for row in suite_report.rows}
    judged = [
        _check_outcome(name, rows.get(name), suite_report, run)
        for name in table.checks_of(run.asked["level"])
    ]
    judged = [_fail_running_check(pair, completed, suite_report, run) for pair in judged]
    checks = tuple(check for check, _ in judged)
    outcome, reason = _outcome(run, suite_report, judged, completed)
    report = _complete(run, checks, outcome, reason)
    return replace(
        report,
        device=suite_report.device,
        cuda=suite_report.cuda,
        hardware=_with_libcuda(run.hardware, suite_report.libcuda),
        waived=tuple(check.name for check in checks if _waived(check, run)),
        contradictions=_contradictions(run, suite_report, judged),
    )


def _check_outcome(
    name: str, row: SuiteCheck | None, suite_report: GpuSuiteReport, run: GpuRun
) -> tuple[CheckResult, Outcome | None]:
    """Return the check with its final state, and the outcome if it prevents VERIFIED, else None."""
    if row is None:
        missing = (
            f"'{suite_report.running}' started before this check and did not finish"
            if suite_report.running
            else "the report has no result of this check"
        )
        return CheckResult(name=name, state=CheckState.NOT_RUN, detail=missing, seconds=0.0), None
    check, state = row.result, row.result.state
    framework = frameworks.FRAMEWORKS.get(run.asked["framework"], frameworks.OTHER)
    locked = {name: text.partition(" ")[0] for name, text in run.asked["conda"].items()}
    excused = table.not_applicable(framework, name, {**locked, **run.asked["packages"]})
    if state is CheckState.FAILED:
        # On several nodes, only a check that has measured something failed by itself.
        crashed = name == NODES and row.outcome in ("", table.LOAD_FAILED) and not check.numbers
        return check, _crash(run) if crashed else Outcome(row.outcome or table.LOAD_FAILED)
    if state is CheckState.NOT_APPLICABLE and not excused:
        return _failed(check, "claims not to apply, but it does"), Outcome.LOAD_FAILED
    if state is CheckState.PASSED and name in MEASURED and not check.numbers:
        return _failed(check, "says it passed and has measured nothing"), Outcome.LOAD_FAILED
    if (
        state is CheckState.PASSED
        and name in COUNTS.values()
        and not run.asked["rehearsal"]
        and not _multi_gpu_outcome(row)
    ):
        return _failed(check, "says it passed and has not counted two"), Outcome.LOAD_FAILED
    return check, None


def _counted(row: SuiteCheck | None) -> float:
    return dict(row.result.numbers).get(row.result.name, 0.0) if row else 0.0


def _multi_gpu_outcome(row: SuiteCheck | None) -> bool:
    return _counted(row) >= 2 and _counted(row).is_integer()


def _failed(check: CheckResult, detail: str) -> CheckResult:
    return replace(check, state=CheckState.FAILED, detail=detail)


def _fail_running_check(
    pair: tuple[CheckResult, Outcome | None],
    completed: CommandResult,
    suite_report: GpuSuiteReport,
    run: GpuRun,
) -> tuple[CheckResult, Outcome | None]:
    """Return the check as failed if it was running when the suite crashed."""
    check, _ = pair
    if check.name != suite_report.running or check.state is not CheckState.NOT_RUN:
        return pair
    if completed.timed_out:
        return _failed(check, "stopped after too long"), Outcome.TIMEOUT
    return _failed(check, exit_summary(completed)), _crash(run)


def _crash(run: GpuRun) -> Outcome:
    """Return the outcome of a process that ended too early: on several nodes, another may be the reason."""
    return Outcome.INFRASTRUCTURE if run.asked["level"] == NODES else Outcome.LOAD_FAILED


def _waived(check: CheckResult, run: GpuRun) -> bool:
    """Return whether the recipe waives the check. On several GPUs, no check is waived."""
    named = check.name in run.waive and run.asked["level"] not in MULTI_GPU_LEVELS
    return check.state is CheckState.NOT_RUN and named


def _outcome(
    run: GpuRun,
    suite_report: GpuSuiteReport,
    judged: Sequence[tuple[CheckResult, Outcome | None]],
    completed: CommandResult,
) -> tuple[Outcome, str]:
    """Return the first outcome that applies: a wrong GPU, a failed check, a missing check."""
    rehearsal, capability = run.asked["rehearsal"], run.asked["capability"]
    if stranger := _unknown_gpu_reason(suite_report, run):
        return Outcome.INFRASTRUCTURE, stranger
    failed = next(((check, word) for check, word in judged if word is not None), None)
    if suite_report.device and capability and suite_report.device.capability != capability:
        return (
            Outcome.WRONG_GPU,
            f"asked for {capability}, met {suite_report.device.name} ({suite_report.device.capability})",
        )
    if failed:
        word = f"{failed[1]}: " if run.asked["level"] in MULTI_GPU_LEVELS else ""
        return failed[1], f"{failed[0].name}: {word}{failed[0].detail}"
    open_checks = [check for check, _ in judged if check.state is CheckState.NOT_RUN]
    if completed.timed_out:
        return Outcome.TIMEOUT, "no check says it failed, but it did not end in time"
    if suite_report.running or completed.returncode not in ((0, 1) if open_checks else (0,)):
        return _crash(run), f"no check says it failed, but {exit_summary(completed)}"
    open_ones = [check for check in open_checks if not _waived(check, run)]
    if rehearsal:
        return Outcome.NOT_TESTED, "a rehearsal on the CPU, which says nothing of a GPU"
    if suite_report.device is None:
        return Outcome.LOAD_FAILED, "no check says it failed, and it names no GPU that it ran on"
    if open_ones:
        return Outcome.NOT_TESTED, f"{open_ones[0].name} did not run: {open_ones[0].detail}"
    passed = sum(check.state is CheckState.PASSED for check, _ in judged)
    device = suite_report.device
    several = {SEVERAL: "x", NODES: "nodes with"}.get(run.asked["level"])
    number = f"{_gpus(suite_report):.0f} {several} " if several else ""
    return Outcome.VERIFIED, f"{passed} checks passed on {number}{device.name} ({device.capability})"


def _gpus(suite_report: GpuSuiteReport) -> float:
    return _counted(next((row for row in suite_report.rows if row.result.name in COUNTS.values()), None))


def _unknown_gpu_reason(suite_report: GpuSuiteReport, run: GpuRun) -> str:
    """Return why the host does not know a GPU that the suite saw, empty if it knows all."""
    device = suite_report.device
    if device is None:
        return ""
    if run.asked["rehearsal"]:
        return "a rehearsal on the CPU names a GPU"
    if run.hardware is None:
        return "the suite names a GPU, and the host did not see one"
    known = run.hardware.gpu_of(device.uuid)
    if known is None:
        return f"the suite met the GPU {device.uuid}, which is none of this host's"
    if known.capability != device.capability:
        return f"the suite says {device.uuid} has capability {device.capability}, the host {known.capability}"
    counted, there = _gpus(suite_report), run.hardware.count_of(device.capability)
    if run.asked["level"] == SEVERAL and counted > there:
        return f"the suite counts {counted:.0f} GPUs of capability {device.capability}, the host {there}"
    return ""


def _with_host_name(device: GpuIdentity | None, hardware: Hardware | None) -> GpuIdentity | None:
    """Return the device with its name on the host, whatever its name in the image.

    libcuda reports only bytes; the host knows whether they identify a GPU or a MIG instance.
    """
    if device is None or hardware is None:
        return device
    devices = {digits_of(gpu.uuid): (gpu.uuid, gpu.name) for gpu in hardware.gpus}
    devices |= {digits_of(note): (note, device.name) for note, _ in hardware.notes if note.startswith("MIG-")}
    uuid, name = devices.get(digits_of(device.uuid), (device.uuid, device.name))
    return replace(device, uuid=uuid, name=name)


def _contradictions(
    run: GpuRun, suite_report: GpuSuiteReport, judged: Sequence[tuple[CheckResult, Outcome | None]]
) -> tuple[str, ...]:
    """Return the differences between the coverage checks and the scan of the image.

    A check that failed for another reason than missing code is not evidence about the prediction.
    """
    predicted = run.asked["predicted"].get(suite_report.device.capability, {}) if suite_report.device else {}
    claims = {"native-code": predicted.get("native"), "ptx-code": predicted.get("ptx")}
    return tuple(
        f"{check.name}: {check.detail}"
        for check, word in judged
        if check.name in claims
        and (
            dict(check.numbers).get(CONTRADICTION) == 1.0
            or (word is Outcome.NO_KERNEL and claims[check.name])
        )
    )


def _all(run: GpuRun, state: CheckState, reason: str) -> tuple[CheckResult, ...]:
    return tuple(
        CheckResult(name=name, state=state, detail=reason, seconds=0.0)
        for name in table.checks_of(run.asked["level"])
    )


def _complete(run: GpuRun, checks: tuple[CheckResult, ...], outcome: Outcome, reason: str) -> GpuReport:
    return GpuReport(
        subject=run.subject,
        suite=run.suite,
        level=run.asked["level"],
        nonce=run.asked["nonce"],
        started=run.started,
        ended=run.ended,
        runner=run.runner,
        hardware=run.hardware,
        device=None,
        cuda="",
        checks=checks,
        outcome=MULTI_GPU_OUTCOMES.get(outcome, outcome)
        if run.asked["level"] in MULTI_GPU_LEVELS
        else outcome,
        reason=clean(reason),
        rehearsal=run.asked["rehearsal"],
    )
