"""Find the outcome of a node from its log and files: failures of the pool, jobs that never ran, and runs to
verify.

`classify` is pure. `read_node` reads the directory of a node, where untrusted jobs write. Both use the log
parser of the POST script (node/post.py), so they agree with the decisions of DAGMan; it continues after
invalid lines. JobEventLog of the bindings stops at the first byte that is not UTF-8, and skips logs with an
unknown first line. Sources: HTCondor manual, "Hold Reason Codes" and "Job Event Log Codes"; tests on a pool
of 23.9.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from imagefactory.errors import StatementError
from imagefactory.model import CommandResult, Outcome
from imagefactory.progress import format_seconds
from imagefactory.schedulers.faults import node_directory
from imagefactory.schedulers.htcondor.ads import read_gpu
from imagefactory.schedulers.htcondor.dag import JOB_LOG
from imagefactory.schedulers.htcondor.node.post import (
    EXECUTING,
    LARGEST_FILE,
    LARGEST_LOG,
    OWN_LIMITS,
    PULLED,
    TRY_AGAIN,
    JobEvent,
    follow,
    is_result,
    machine_of,
    parse_object,
    read,
    split_events,
)
from imagefactory.schedulers.pool import (
    RETRIED_OUTCOMES,
    JobAttempt,
    JobEnding,
    JobLimits,
    NodeResult,
    NodeState,
    PoolGpu,
)
from imagefactory.serialize import DIGEST, Constant, Digest, ObjectSchema, Pattern, parse_json
from imagefactory.settings.choices import HTCONDOR
from imagefactory.trust.verdict import missing_evidence
from imagefactory.verify.evidence import parse_evidence
from imagefactory.verify.kit.program import KIT, RESULT, RUN, read_report
from imagefactory.verify.kit.start import REPORT
from imagefactory.verify.nonces import NONCE
from imagefactory.verify.outcome import (
    GpuRun,
    GpuSuiteReport,
    InvalidReportError,
    RawResult,
    clean,
    from_image,
    outcome_of,
    parse_suite_report,
)
from imagefactory.verify.report import (
    UUID,
    GpuIdentity,
    GpuReport,
    Hardware,
    VerifiedImage,
    completed_of,
    digits_of,
    end_of,
)

LIMITS_OVER = "removed by its limits"
"""The beginning of the text of an attempt that its `periodic_remove` ended."""
RAN_OUT = f"{LIMITS_OVER} while it ran"
MOST_JOBS = 1000
LOCAL_DAY = timedelta(days=1)

_ATTRIBUTE = re.compile(r"\s+([A-Za-z_][A-Za-z0-9_.]{0,99}) = (.+)")
_PAIR = re.compile(
    r"\s*([A-Za-z_][A-Za-z0-9_.]{0,99}) = "
    r'("(?:[^"\\]|\\.)*"|[+-]?[0-9.]+(?:[Ee][+-]?[0-9]+)?|true|false|undefined)\s*(?:;|$)',
    re.IGNORECASE,
)
_SLOT = re.compile(r"\s*SlotName: ([A-Za-z0-9_.@-]{1,255})")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[Ee][+-]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,254}")


def parse_attempts(
    data: bytes, latest: datetime, to_utc: Callable[[datetime], datetime]
) -> tuple[JobAttempt, ...]:
    """Return the jobs in the log of a node, the oldest first, at most the last MOST_JOBS.

    Logs have local times, some without a year. `to_utc` converts a naive time to UTC. No time is later than
    `latest` by more than a day.
    """
    jobs: dict[str, list[JobEvent]] = {}
    for event in split_events(data):
        jobs.setdefault(event.job, []).append(event)

    def time_of(text: str) -> datetime:
        try:
            return _parse_time(text, latest, to_utc)
        except (ValueError, OverflowError):  # such as 99:99:99; the event still counts
            return latest

    return tuple(_attempt(job, events, time_of) for job, events in list(jobs.items())[-MOST_JOBS:])


def _attempt(job: str, events: list[JobEvent], time_of: Callable[[str], datetime]) -> JobAttempt:
    last = follow(events)
    starts = [event for event in events if event.number == EXECUTING]
    attributes = _attributes(starts[-1]) if starts else {}
    text = last.text
    if last.ending == JobEnding.REMOVED and OWN_LIMITS in last.text:
        reason = last.trouble or last.step
        text = RAN_OUT if last.cut else f"{LIMITS_OVER}: {reason}" if reason else LIMITS_OVER
    machine = attributes.get("machine")
    known = machine if isinstance(machine, str) and _NAME.fullmatch(machine) else ""
    slots = [match[1] for line in (starts[-1].lines if starts else ()) if (match := _SLOT.fullmatch(line))]
    return JobAttempt(
        job=job,
        ending=JobEnding(last.ending) if last.ending else JobEnding.LOST,
        code=last.code,
        text=clean(text),
        machine=machine_of(last, starts, last.text) if last.over and not starts else known,
        slot=slots[0] if slots else "",
        gpu=_gpu(attributes),
        submitted=time_of(events[0].time),
        started=time_of(starts[-1].time) if starts else None,
        ended=time_of(events[-1].time) if last.over else None,
    )


# --- the startd's attributes

Value = str | float | bool | Mapping[str, str | float | bool]


def _attributes(event: JobEvent) -> dict[str, Value]:
    """Return the slot attributes of an event by lower case name, without those that cannot be parsed."""
    attributes: dict[str, Value] = {}
    for line in event.lines:
        match = _ATTRIBUTE.fullmatch(line)
        if not match:
            continue
        name, text = match[1].lower(), match[2].strip()
        value = _nested(text[1:-1]) if text.startswith("[") and text.endswith("]") else _plain(text)
        if value is not None:
            attributes[name] = value
    return attributes


def _nested(text: str) -> dict[str, str | float | bool] | None:
    """Parse `Id = "GPU-a0223334"; Capability = 8.0`. Return None if a value is not plain."""
    attributes: dict[str, str | float | bool] = {}
    position = 0
    while text[position:].strip():
        match = _PAIR.match(text, position)
        if not match:
            return None
        value = _plain(match[2])
        if value is not None:
            attributes[match[1].lower()] = value
        position = match.end()
    return attributes


def _plain(text: str) -> str | float | bool | None:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return float(text) if _NUMBER.fullmatch(text) else None


def _gpu(attributes: Mapping[str, Value]) -> PoolGpu | None:
    """Return the GPU of the job, None if it had no GPU or several."""
    assigned = attributes.get("assignedgpus")
    ids = [word for word in re.split(r"[,\s]+", assigned) if word] if isinstance(assigned, str) else []
    if len(ids) != 1:
        return None
    common = {
        name.removeprefix("gpus_"): value
        for name, value in attributes.items()
        if name.startswith("gpus_") and not isinstance(value, Mapping)
    }
    device_attributes = attributes.get("gpus_" + re.sub(r"[^A-Za-z0-9_]", "_", ids[0]).lower())
    gpu = read_gpu(
        ids[0],
        {**common, **device_attributes} if isinstance(device_attributes, Mapping) else common,
        free=False,
    )
    # The processor of an AMD GPU is empty or begins with gfx: the suite does not run on it.
    return gpu if isinstance(gpu, PoolGpu) and gpu.capability[:1].isdigit() else None


def _parse_time(text: str, latest: datetime, to_utc: Callable[[datetime], datetime]) -> datetime:
    """Return a time of a log in UTC. Raises ValueError and OverflowError."""
    if "/" not in text:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else to_utc(time)
    date, _, clock = text.partition(" ")
    month, day, *years = date.split("/")
    if years:
        year = int(years[0]) if len(years[0]) > 2 else 2000 + int(years[0])
        return to_utc(datetime.fromisoformat(f"{year:04}-{month}-{day} {clock}"))
    for year in range(latest.year + 1, latest.year - 9, -1):
        try:
            time = to_utc(datetime.fromisoformat(f"{year:04}-{month}-{day} {clock}"))
        except ValueError:  # February 29th
            continue
        if time <= latest + LOCAL_DAY:
            return time
    return latest


# --- the outcome of a node


POSTED, ERR = "post.json", "err"
MAX_REASON = 300
TRANSFER, RESOURCES, BAD_IMAGE, NO_CONTAINER, DURATION, EXECUTION = (12, 13), 34, 35, 45, 46, 47
_JOB = re.compile(r"[0-9]{1,10}\.[0-9]{1,10}")
_SIF = re.compile(r"\.sif\b")
_NOT_HAD = re.compile(r"FATAL: +Unable to handle ((?:docker|oras|library)://\S+) uri: (.*)")
"""The last line of Apptainer if it cannot pull an image: the address, then the reason."""
CUT = "HTCondor kept no more of what apptainer said"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostScriptResult:
    """The result of the POST script for `job`.

    `left` means that DAGMan will retry, `again` that it should.
    """

    job: str
    again: bool
    left: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """The files of the last attempt of a node. `err` is the end of its stderr in one line.

    `run` and `report` are None if they are missing. `broken` means that they cannot be read.
    """

    run: bytes | None = None
    report: bytes | None = None
    broken: bool = False
    err: str = ""
    posted: PostScriptResult | None = None


def classify(
    attempts: Sequence[JobAttempt], files: NodeFiles, limits: JobLimits
) -> tuple[Outcome | None, str]:
    """Return the outcome of a node and the reason.

    The outcome is None while the node waits, runs or will be retried, and for a run that must be verified.
    """
    posted = files.posted
    given_up = clean(posted.why) if posted and posted.again and not posted.left else None
    if not attempts:
        return (None, "not submitted yet") if given_up is None else (Outcome.INFRASTRUCTURE, given_up)
    last = attempts[-1]
    own_event = posted if posted and posted.job == last.job else None
    if own_event and last.ended is None:  # DAGMan saw its end, and the log did not
        last = replace(last, ending=JobEnding.LOST)
    outcome, reason = _job_status(last, files, limits)
    if own_event and own_event.left and own_event.why:
        reason = clean(own_event.why)
    if outcome in RETRIED_OUTCOMES and (own_event is None or own_event.left):
        if posted and given_up is not None and posted.job not in [attempt.job for attempt in attempts]:
            return Outcome.INFRASTRUCTURE, given_up  # the next job was never created
        return None, f"to be retried: {reason}"
    if outcome is Outcome.NO_MATCH and len(attempts) > 1:
        before = attempts[-2].machine or "a machine"
        return Outcome.INFRASTRUCTURE, f"{before} failed it, and then {reason}"
    return outcome, reason


def _job_status(last: JobAttempt, files: NodeFiles, limits: JobLimits) -> tuple[Outcome | None, str]:
    """Return the status of one job, without later jobs."""
    detail = f": {files.err}"[:MAX_REASON] if files.err else ""
    match last.ending:
        case JobEnding.WAITING:
            return None, f"waiting: {last.text}" if last.text else "waiting"
        case JobEnding.RUNNING:
            return None, f"running on {last.machine}" if last.machine else "running"
        case JobEnding.DISCONNECTED:
            return None, f"disconnected from {last.machine or 'its machine'}: {last.text}"[:MAX_REASON]
        case JobEnding.HELD:
            return _hold_reason(last, limits)
        case JobEnding.REMOVED:
            return _removed(last, limits)
        case JobEnding.KILLED:
            return Outcome.INFRASTRUCTURE, f"killed by signal {last.code}{detail}"
        case JobEnding.LOST:
            return Outcome.INFRASTRUCTURE, "its log does not show how it ended"
    if last.code and _NOT_HAD.search(files.err):
        return Outcome.PULL_FAILED, _pull_error(files.err, last.machine)
    if last.code:
        return Outcome.INFRASTRUCTURE, f"the suite was not started: exit code {last.code}{detail}"
    if files.broken or files.run is None:
        return Outcome.INFRASTRUCTURE, f"it brought back no result that can be read{detail}"
    return None, "the suite has run"


def _timeout(limits: JobLimits) -> tuple[Outcome, str]:
    run = format_seconds(limits.run.total_seconds())
    return Outcome.TIMEOUT, f"stopped after {run}, its limit on the pool"


def _hold_reason(last: JobAttempt, limits: JobLimits) -> tuple[Outcome | None, str]:
    text = _pull_error(last.text, last.machine) if _NOT_HAD.search(last.text) else last.text[:MAX_REASON]
    reason = f"held ({last.code}): {text}"
    if last.ended is None:
        return None, reason
    if last.code in (DURATION, EXECUTION):
        return _timeout(limits)
    pulled = last.code in (*TRANSFER, NO_CONTAINER) and PULLED.search(last.text)
    if last.code == BAD_IMAGE or pulled or (last.code in TRANSFER and _SIF.search(last.text)):
        return Outcome.PULL_FAILED, reason
    if last.code in TRY_AGAIN:
        return Outcome.INFRASTRUCTURE, reason
    if last.code == RESOURCES:
        return Outcome.HELD, f"held (34), it requested too little memory or disk: {last.text}"[:MAX_REASON]
    return Outcome.HELD, reason


def _removed(last: JobAttempt, limits: JobLimits) -> tuple[Outcome | None, str]:
    if last.ended is None or not last.text.startswith(LIMITS_OVER):
        return Outcome.NOT_TESTED, f"removed: {last.text}"[:MAX_REASON]
    if last.text == RAN_OUT:
        return _timeout(limits)
    if last.started is None and last.text == LIMITS_OVER:
        return Outcome.NO_MATCH, f"no such GPU took it in {format_seconds(limits.idle.total_seconds())}"
    reason = last.text.removeprefix(LIMITS_OVER).removeprefix(": ") or "it was started again and again"
    if _NOT_HAD.search(reason):
        return Outcome.PULL_FAILED, _pull_error(reason, last.machine)
    outcome = Outcome.PULL_FAILED if PULLED.search(reason) else Outcome.INFRASTRUCTURE
    return outcome, f"it did not come to an end: {reason}"[:MAX_REASON]


def _pull_error(text: str, machine: str) -> str:
    """Return the machine that could not pull an image, the image, and the reason.

    HTCondor (tested with 23.9) stores 255 bytes of Apptainer's output. A name with a digest takes two thirds
    of them.
    """
    address, words = _NOT_HAD.findall(text)[-1]
    _, twice, reason = words.partition(f"{address}: ")
    reason = reason if twice else CUT if f" {address[:12]}" in words else words
    return f"{machine or 'the machine'} could not pull {address}: {reason or CUT}"[: 2 * MAX_REASON]


# --- reading the directory


def read_node(directory: Path, name: str, limits: JobLimits) -> NodeState:
    """Return the state of a node of the sweep in `directory`. Raises UsageError for an invalid name."""
    job_directory = node_directory(directory, name)
    attempts, files = _read_both(job_directory)
    outcome, reason = classify(attempts, files, limits)
    result = NodeResult(node=name, outcome=outcome, reason=clean(reason), attempts=attempts)
    last, posted = attempts[-1] if attempts else None, files.posted
    settled = bool(last and posted and posted.job == last.job and not posted.again)
    if outcome is None and last and last.ending is JobEnding.EXITED and not last.code and not files.broken:
        return NodeState(result=result, settled=settled, run=files.run, report=files.report)
    return NodeState(result=result, settled=settled)


def _read_both(job_directory: Path) -> tuple[tuple[JobAttempt, ...], NodeFiles]:
    """Return the jobs of a node, and the files of the last job.

    A job may end and the next one start during this call. The files belong to the last job in the log only if
    the log did not change, so the call repeats until then.
    """
    path = job_directory / JOB_LOG
    log = read(path, LARGEST_LOG)
    while True:
        files = read_files(job_directory)
        before, log = log, read(path, LARGEST_LOG)
        if log == before:
            break
    if log is None:
        return (), files
    latest = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return parse_attempts(log, latest, lambda naive: naive.astimezone(UTC)), files


def read_files(job_directory: Path) -> NodeFiles:
    """Return the files of the last attempt: in the directory of the node or, before a retry, in its
    archive.
    """
    posted = parse_posted(read(job_directory / POSTED, LARGEST_FILE))
    if posted is None:
        numbered = sorted(job_directory.glob("attempt-*"), key=lambda path: (len(path.name), path.name))
        if numbered and not (job_directory / RESULT).exists():
            posted = parse_posted(read(numbered[-1] / POSTED, LARGEST_FILE))
            return replace(_read_attempt(numbered[-1], b""), posted=posted)
    return replace(_read_attempt(job_directory, read(job_directory / KIT, LARGEST_FILE)), posted=posted)


def _read_attempt(job_directory: Path, kit: bytes | None) -> NodeFiles:
    run, report = (read_report(job_directory, f"{RESULT}/{name}") for name in (RUN, REPORT))
    nonce = str((parse_object(kit) or {}).get("nonce", ""))
    path = job_directory / RESULT / REPORT
    broken = not is_result(run, nonce) or (
        (path.is_symlink() or path.exists()) and parse_object(report) is None
    )
    lines = (read(job_directory / ERR, LARGEST_FILE) or b"").decode("utf-8", "replace").strip().splitlines()
    return NodeFiles(run=run, report=report, broken=broken, err=clean(lines[-1]) if lines else "")


def parse_posted(data: bytes | None) -> PostScriptResult | None:
    """Parse post.json. Return None if the POST script did not write it."""
    match parse_object(data):
        case {"job": str(job), "again": bool(again), "left": bool(left), "why": str(reason)}:
            job = job if _JOB.fullmatch(job) else ""
            return PostScriptResult(job=job, again=again, left=left, why=reason)
    return None


# --- the report of a run. In container universe a job runs inside the image, so nothing in it is trusted
# about the GPU by itself. The startd's ad in the job's log (`ulog_execute_attrs`) names the GPU, and what
# libcuda reports inside must fit. If they name different GPUs the run is `infrastructure` and says nothing
# about the image. A GPU that condor_gpu_discovery simulates is not a GPU.


RUNNER = "htcondor"
FORMAT = 1
LONGEST_RUN = 14 * 86400.0
_CUDA = re.compile(r"[0-9]{1,3}\.[0-9]{1,2}")
_SHORT = re.compile(r"(?:GPU|MIG)-(?![0-9a-f]{2}223334)([0-9a-f]{8})")
"""A short GPU name, except those that condor_gpu_discovery simulates (trust/verdict.py, is_simulated)."""


_RUN = ObjectSchema(
    format=Annotated[int, Constant(FORMAT)],
    nonce=Annotated[str, Pattern(NONCE)],
    suite=Digest,
    image=Annotated[str, Pattern(DIGEST, empty=True)],
    started=datetime,
    ended=datetime,
    hardware=object,
    no_gpu=str,
    **end_of(LONGEST_RUN),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """The content of a job's run.json: how the process of the suite ended.

    `hardware` is the output of NVML and /proc.

    `hardware` is None if the job could not see a driver, for the reason `no_gpu`. `image` is the sha256 of
    the .sif in the job's directory, empty if there was none.
    """

    nonce: str
    suite: str
    image: str
    started: datetime
    ended: datetime
    completed: CommandResult
    hardware: Hardware | None
    no_gpu: str


def parse_job_run(data: bytes, location: str) -> SuiteRun:
    """Parse the file that inside.py writes. Raises StatementError for other data."""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise StatementError(
            "job-run-not-json",
            f"{location} is not JSON",
            hint="start a new sweep: imagefactory sweep start",
        ) from error
    row = _RUN.parse(document, location)
    hardware = row["hardware"]
    if hardware is not None:
        hardware = parse_evidence(hardware, HTCONDOR, f"{location}: hardware")
    fields = {name: row[name] for name in ("nonce", "suite", "image", "started", "ended", "no_gpu")}
    return SuiteRun(completed=completed_of(row), hardware=hardware, **fields)


def pool_hardware(attempt: JobAttempt, run: SuiteRun, device: GpuIdentity | None) -> Hardware | None:
    """Return the GPU that the startd recorded for the last start of a job, as evidence; None if there was
    none.

    A startd may report only a short name (`GPU-a0223334`). If the suite used a GPU with that short name, its
    full UUID is returned. The short name of a simulated GPU is not unique, so it never counts. The driver
    version is that of the startd. HTCondor before 24 reports none; then the version of NVML and the kernel
    module in the job is used, and the notes say so.
    """
    gpu = attempt.gpu
    if gpu is None:
        return None
    uuid = gpu.uuid or (device.uuid if device and _is_short_for(gpu.id, device.uuid) else "")
    inside = run.hardware.driver if run.hardware else ""
    identity = GpuIdentity(name=gpu.name, capability=gpu.capability, uuid=uuid, memory=gpu.memory)
    known = (identity,) if UUID.fullmatch(uuid) else ()
    notes = {
        "driver-told-by": "startd" if gpu.driver else "job" if inside else "",
        "job": attempt.job,
        "machine": attempt.machine,
        "slot": attempt.slot,
        "startd-cuda": gpu.cuda,
        "startd-gpu": gpu.id,
    }
    return Hardware(
        kind=HTCONDOR,
        driver=gpu.driver or inside,
        gpus=known,
        known=tuple(row.uuid for row in known),
        nodes=(),
        notes=tuple((name, clean(text)) for name, text in notes.items() if text),
    )


def disagreement(gpu: PoolGpu, run: SuiteRun, suite: GpuSuiteReport) -> str:
    """Return how the GPU or driver of the startd differs from that of the job, empty if they agree."""
    device = suite.device
    if device is None:
        return ""
    same = digits_of(gpu.uuid) == digits_of(device.uuid) if gpu.uuid else _is_short_for(gpu.id, device.uuid)
    if not same:
        return f"the suite ran on {device.uuid}, the startd assigned {gpu.uuid or gpu.id}"
    if gpu.capability != device.capability:
        return f"the suite says {device.uuid} has capability {device.capability}, the startd {gpu.capability}"
    if gpu.name and _plain_name(gpu.name) != _plain_name(device.name):
        return f"the suite calls {device.uuid} '{device.name}', the startd '{gpu.name}'"
    driver = gpu.driver or (run.hardware.driver if run.hardware else "")
    # The image's libcuda for older drivers takes newer CUDA than the driver.
    newer = from_image(suite.libcuda, driver) and _version(gpu.cuda) < _version(suite.cuda)
    if gpu.cuda and suite.cuda and not newer and _version(gpu.cuda) != _version(suite.cuda):
        return f"the suite's driver takes CUDA {suite.cuda}, the startd's {gpu.cuda}"
    if run.hardware is None:
        return ""
    if gpu.driver and gpu.driver != run.hardware.driver:
        return f"the job's driver is {run.hardware.driver}, the startd's {gpu.driver}"
    if run.hardware.gpu_of(device.uuid):
        return ""
    return f"the suite ran on {device.uuid}, which NVML does not report there"


def _is_short_for(short: str, uuid: str) -> bool:
    """Return whether `GPU-a0223334`, a name shortened by condor_gpu_discovery, belongs to `uuid`."""
    match = _SHORT.fullmatch(short)
    return match is not None and digits_of(uuid).startswith(f"{match[1]}-")


def _plain_name(name: str) -> str:
    """Return the name without the vendor. NVML and CUDA differ in it for some GPUs."""
    return " ".join(name.lower().removeprefix("nvidia ").split())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if _CUDA.fullmatch(text) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutput:
    """The files of a job, and its last attempt. `report` is None if the job wrote none."""

    run: SuiteRun
    report: bytes | None
    attempt: JobAttempt


def job_report(kit: Mapping[str, Any], expectations: Mapping[str, Any], output: JobOutput) -> GpuReport:
    """Return the report of a job, by the rules of the suite (verify/outcome.py) and the GPU of the startd.

    `kit` and `expectations` are the trusted files with these names. A run is never `verified` without
    evidence of the GPU from the startd and from the kernel module, which is visible in every container. A
    .sif in the job's directory must be the one of the node. Raises StatementError for a run of another kit or
    suite.
    """
    run, attempt = output.run, output.attempt
    if run.nonce != kit["nonce"] or run.suite != kit["suite"]:
        raise StatementError(
            "job-run-mismatch",
            "run.json belongs to another node or suite",
            hint="start a new sweep: imagefactory sweep start",
        )
    try:
        suite = parse_suite_report(output.report or b"", expectations)
    except InvalidReportError:
        suite = None
    gpu_run = GpuRun(
        subject=VerifiedImage(**kit["subject"]),
        suite=kit["suite"],
        asked=expectations,
        waive=tuple(kit["waive"]),
        runner=RUNNER,
        hardware=pool_hardware(attempt, run, suite.device if suite else None),
        started=run.started,
        ended=run.ended,
    )
    missing = "" if output.report is not None else "it wrote no report that can be read"
    result = RawResult(report=output.report or b"", fault=missing, completed=run.completed, parsed=suite)
    report = outcome_of(gpu_run, result)
    config = kit["subject"]["config"]
    cause = disagreement(attempt.gpu, run, suite) if attempt.gpu and suite else ""
    if run.image and kit["sif"] and run.image != config:  # another file may have replaced it
        cause = f"the job's .sif was {run.image}, the node's is {config}: put that file there"
    if cause:
        return replace(report, outcome=Outcome.INFRASTRUCTURE, reason=clean(cause))
    if report.outcome is not Outcome.VERIFIED:
        return report
    if gap := missing_evidence(report) or (run.no_gpu if run.hardware is None else ""):
        reason = f"the suite passed, and nothing shows that it ran on a GPU: {gap}"
        return replace(report, outcome=Outcome.NOT_TESTED, reason=clean(reason))
    return report
