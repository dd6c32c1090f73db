"""From a node's log and files to its word: what the pool broke, what it never ran, and what is to be judged.

`classify` is pure; `read_node` reads the folder of a node with care, since jobs write there. Sources:
HTCondor's manual, "Hold Reason Codes" and "Job Event Log Codes"; trials on a pool of 23.9.
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

# --- What became of a node's jobs, by HTCondor's log of them. Pure
# The reader is the POST script's own (node/post.py), for three reasons: DAGMan's decision and ours then rest
# on the same words; it needs nothing beside Python; and it goes on after what is no event. The bindings'
# JobEventLog ends at the first byte that is not UTF-8, and passes over a log that begins with anything else.


LIMITS_OVER = "removed by its limits"
"""How the text of an attempt begins that its own `periodic_remove` ended."""
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
    """The jobs of a node's log, the oldest first; at most the last MOST_JOBS.

    Logs have local times, some without a year: `to_utc` takes a naive time to UTC, and no time is later than
    `latest` by more than a day.
    """
    jobs: dict[str, list[JobEvent]] = {}
    for event in split_events(data):
        jobs.setdefault(event.job, []).append(event)
    clock = _LogClock(latest, to_utc)
    return tuple(_attempt(job, events, clock) for job, events in list(jobs.items())[-MOST_JOBS:])


def _attempt(job: str, events: list[JobEvent], clock: _LogClock) -> JobAttempt:
    last = follow(events)
    starts = [event for event in events if event.number == EXECUTING]
    told = _attributes(starts[-1]) if starts else {}
    text = last.text
    if last.ending == JobEnding.REMOVED and OWN_LIMITS in last.text:
        why = last.trouble or last.step
        text = RAN_OUT if last.cut else f"{LIMITS_OVER}: {why}" if why else LIMITS_OVER
    return JobAttempt(
        job=job,
        ending=JobEnding(last.ending) if last.ending else JobEnding.LOST,
        code=last.code,
        text=clean(text),
        machine=machine_of(last, starts, last.text) if last.over and not starts else _machine(told),
        slot=_slot(starts[-1]) if starts else "",
        gpu=_gpu(told),
        submitted=clock.read(events[0].time),
        started=clock.read(starts[-1].time) if starts else None,
        ended=clock.read(events[-1].time) if last.over else None,
    )


# --- the startd's words --------------------------------------------------------------------------

Value = str | float | bool | Mapping[str, str | float | bool]


def _attributes(event: JobEvent) -> dict[str, Value]:
    """What the startd said of the slot, by names in small letters; what cannot be read is left out."""
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
    """`Id = "GPU-a0223334"; Capability = 8.0`, None for anything but plain values."""
    attributes: dict[str, str | float | bool] = {}
    at = 0
    while text[at:].strip():
        match = _PAIR.match(text, at)
        if not match:
            return None
        value = _plain(match[2])
        if value is not None:
            attributes[match[1].lower()] = value
        at = match.end()
    return attributes


def _plain(text: str) -> str | float | bool | None:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return float(text) if _NUMBER.fullmatch(text) else None


def _gpu(told: Mapping[str, Value]) -> PoolGpu | None:
    """The one GPU that the job was given; None where it was given none, or several."""
    assigned = told.get("assignedgpus")
    ids = [one for one in re.split(r"[,\s]+", assigned) if one] if isinstance(assigned, str) else []
    if len(ids) != 1:
        return None
    common = {
        name.removeprefix("gpus_"): value
        for name, value in told.items()
        if name.startswith("gpus_") and not isinstance(value, Mapping)
    }
    own = told.get("gpus_" + re.sub(r"[^A-Za-z0-9_]", "_", ids[0]).lower())
    found = read_gpu(ids[0], {**common, **own} if isinstance(own, Mapping) else common, free=False)
    return found if isinstance(found, PoolGpu) else None


def _machine(told: Mapping[str, Value]) -> str:
    name = told.get("machine")
    return name if isinstance(name, str) and _NAME.fullmatch(name) else ""


def _slot(event: JobEvent) -> str:
    return next((match[1] for line in event.lines if (match := _SLOT.fullmatch(line))), "")


# --- times ---------------------------------------------------------------------------------------


class _LogClock:
    """Times of a log in UTC."""

    def __init__(self, latest: datetime, to_utc: Callable[[datetime], datetime]) -> None:
        self._latest, self._to_utc = latest, to_utc

    def read(self, text: str) -> datetime:
        """A time that is none (`99:99:99`) is the latest: what was said then still counts."""
        try:
            return self._aware(text)
        except (ValueError, OverflowError):
            return self._latest

    def _aware(self, text: str) -> datetime:
        if "/" not in text:
            given = datetime.fromisoformat(text)
            return given.astimezone(UTC) if given.tzinfo else self._to_utc(given)
        date, _, time = text.partition(" ")
        month, day, *years = date.split("/")
        if years:
            year = int(years[0]) if len(years[0]) > 2 else 2000 + int(years[0])
            return self._to_utc(datetime.fromisoformat(f"{year:04}-{month}-{day} {time}"))
        year = self._latest.year + 1
        while True:
            try:
                found = self._to_utc(datetime.fromisoformat(f"{year:04}-{month}-{day} {time}"))
            except ValueError:  # February 29th
                found = None
            if found is not None and found <= self._latest + LOCAL_DAY:
                return found
            year -= 1
            if year < self._latest.year - 8:
                return self._latest


POSTED, ERR = "post.json", "err"
MAX_REASON = 300
TRANSFER, RESOURCES, BAD_IMAGE, NO_CONTAINER, DURATION, EXECUTION = (12, 13), 34, 35, 45, 46, 47
_JOB = re.compile(r"[0-9]{1,10}\.[0-9]{1,10}")
_SIF = re.compile(r"\.sif\b")
_NOT_HAD = re.compile(r"FATAL: +Unable to handle ((?:docker|oras|library)://\S+) uri: (.*)")
"""Apptainer's last line where it cannot have one: the address, then why, often with the address again."""
CUT = "HTCondor kept no more of what apptainer said"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostScriptResult:
    """What the POST script said of the job `job`. `left`: DAGMan will try again; `again`: it should be."""

    job: str
    again: bool
    left: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """What lies in a node's folder of its last attempt. `err` is the end of its stderr, one line.

    `run` and `report` are None where they are missing; `broken` says that they cannot be read.
    """

    run: bytes | None = None
    report: bytes | None = None
    broken: bool = False
    err: str = ""
    posted: PostScriptResult | None = None


# --- deciding ------------------------------------------------------------------------------------


def classify(
    attempts: Sequence[JobAttempt], files: NodeFiles, limits: JobLimits
) -> tuple[Outcome | None, str]:
    """The word for a node and a line on why. None while it waits, runs or is to be tried again, and for a run
    that is to be judged.
    """
    posted = files.posted
    given_up = posted is not None and posted.again and not posted.left
    if not attempts:
        if posted and given_up:
            return Outcome.INFRASTRUCTURE, clean(posted.why)
        return None, "not submitted yet"
    last = attempts[-1]
    mine = posted if posted and posted.job == last.job else None
    if mine and last.ended is None:  # DAGMan saw its end, and the log did not
        last = replace(last, ending=JobEnding.LOST)
    outcome, reason = _job_status(last, files, limits)
    if mine and mine.left and mine.why:
        reason = clean(mine.why)
    if outcome in RETRIED_OUTCOMES and (mine is None or mine.left):
        if posted and given_up and posted.job not in [one.job for one in attempts]:
            return Outcome.INFRASTRUCTURE, clean(posted.why)  # the next job never came to be
        return None, f"to be tried again: {reason}"
    if outcome is Outcome.NO_MATCH and len(attempts) > 1:
        before = attempts[-2].machine or "a machine"
        return Outcome.INFRASTRUCTURE, f"{before} failed it, and then {reason}"
    return outcome, reason


def _job_status(last: JobAttempt, files: NodeFiles, limits: JobLimits) -> tuple[Outcome | None, str]:
    """The word for one job, whatever comes after it."""
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
            return Outcome.INFRASTRUCTURE, f"killed by signal {last.code}{_last_lines(files)}"
        case JobEnding.LOST:
            return Outcome.INFRASTRUCTURE, "its log does not tell how it ended"
    if last.code and _NOT_HAD.search(files.err):
        return Outcome.PULL_FAILED, _not_had(files.err, last.machine)
    if last.code:
        return Outcome.INFRASTRUCTURE, f"the suite was not started: exit code {last.code}{_last_lines(files)}"
    if files.broken or files.run is None:
        return Outcome.INFRASTRUCTURE, f"it brought back no result that can be read{_last_lines(files)}"
    return None, "the suite has run"


def _hold_reason(last: JobAttempt, limits: JobLimits) -> tuple[Outcome | None, str]:
    text = _not_had(last.text, last.machine) if _NOT_HAD.search(last.text) else last.text[:MAX_REASON]
    told = f"held ({last.code}): {text}"
    if last.ended is None:
        return None, told
    if last.code in (DURATION, EXECUTION):
        return Outcome.TIMEOUT, f"stopped after {_time(limits.run)}, its limit on the pool"
    about = (*TRANSFER, NO_CONTAINER)
    if last.code == BAD_IMAGE or (last.code in about and PULLED.search(last.text)):
        return Outcome.PULL_FAILED, told
    if last.code in TRANSFER and _SIF.search(last.text):
        return Outcome.PULL_FAILED, told
    if last.code in TRY_AGAIN:
        return Outcome.INFRASTRUCTURE, told
    if last.code == RESOURCES:
        return Outcome.HELD, f"held (34), it asked for too little memory or disk: {last.text}"[:MAX_REASON]
    return Outcome.HELD, told


def _removed(last: JobAttempt, limits: JobLimits) -> tuple[Outcome | None, str]:
    if last.ended is None or not last.text.startswith(LIMITS_OVER):
        return Outcome.NOT_TESTED, f"removed: {last.text}"[:MAX_REASON]
    if last.text == RAN_OUT:
        return Outcome.TIMEOUT, f"stopped after {_time(limits.run)}, its limit on the pool"
    if last.started is None and last.text == LIMITS_OVER:
        return Outcome.NO_MATCH, f"no such GPU took it in {_time(limits.idle)}"
    why = last.text.removeprefix(LIMITS_OVER).removeprefix(": ") or "it was started again and again"
    if _NOT_HAD.search(why):
        return Outcome.PULL_FAILED, _not_had(why, last.machine)
    word = Outcome.PULL_FAILED if PULLED.search(why) else Outcome.INFRASTRUCTURE
    return word, f"it did not come to an end: {why}"[:MAX_REASON]


def _not_had(text: str, machine: str) -> str:
    """Which machine could not have which image, and why: HTCondor (tried with 23.9) keeps 255
    bytes of apptainer's words, in which a name with a digest stands twice before the reason.
    """
    address, words = _NOT_HAD.findall(text)[-1]
    _, twice, why = words.partition(f"{address}: ")
    why = why if twice else CUT if f" {address[:12]}" in words else words
    return f"{machine or 'the machine'} could not pull {address}: {why or CUT}"[: 2 * MAX_REASON]


def _last_lines(files: NodeFiles) -> str:
    return f": {files.err}"[:MAX_REASON] if files.err else ""


def _time(time: timedelta) -> str:
    return format_seconds(time.total_seconds())


# --- reading -------------------------------------------------------------------------------------


def read_node(folder: Path, name: str, limits: JobLimits) -> NodeState:
    """The state of a node of the sweep in `folder`. Raises UsageError for a name that is none."""
    place = node_directory(folder, name)
    attempts, files = _read_both(place)
    outcome, reason = classify(attempts, files, limits)
    result = NodeResult(node=name, outcome=outcome, reason=clean(reason), attempts=attempts)
    last, posted = attempts[-1] if attempts else None, files.posted
    settled = bool(last and posted and posted.job == last.job and not posted.again)
    if outcome is None and last and last.ending is JobEnding.EXITED and not last.code and not files.broken:
        return NodeState(result=result, settled=settled, run=files.run, report=files.report)
    return NodeState(result=result, settled=settled)


def _read_both(place: Path) -> tuple[tuple[JobAttempt, ...], NodeFiles]:
    """The jobs, and the files of the last of them. A job may end while both are read, and the next one too:
    what lies there is of the jobs that the log tells only where the log is the same before and after.
    """
    path = place / JOB_LOG
    log = read(path, LARGEST_LOG)
    while True:
        files = read_files(place)
        before, log = log, read(path, LARGEST_LOG)
        if log == before:
            return _attempts(path, log), files


def _attempts(path: Path, log: bytes | None) -> tuple[JobAttempt, ...]:
    """The jobs in a log; none where there is no log yet."""
    if log is None:
        return ()
    latest = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return parse_attempts(log, latest, lambda naive: naive.astimezone(UTC))


def read_files(place: Path) -> NodeFiles:
    """The files of the last attempt: in the node's folder, or moved away where it is to be tried again."""
    posted = parse_posted(read(place / POSTED, LARGEST_FILE))
    if posted is None:
        numbered = sorted(place.glob("attempt-*"), key=lambda path: (len(path.name), path.name))
        if numbered and not (place / RESULT).exists():
            posted = parse_posted(read(numbered[-1] / POSTED, LARGEST_FILE))
            return replace(_read_attempt(numbered[-1], b""), posted=posted)
    return replace(_read_attempt(place, read(place / KIT, LARGEST_FILE)), posted=posted)


def _read_attempt(place: Path, kit: bytes | None) -> NodeFiles:
    run, report = (read_report(place, f"{RESULT}/{name}") for name in (RUN, REPORT))
    nonce = str((parse_object(kit) or {}).get("nonce", ""))
    there = (place / RESULT / REPORT).is_symlink() or (place / RESULT / REPORT).exists()
    broken = not is_result(run, nonce) or (there and parse_object(report) is None)
    lines = (read(place / ERR, LARGEST_FILE) or b"").decode("utf-8", "replace").strip().splitlines()
    return NodeFiles(run=run, report=report, broken=broken, err=clean(lines[-1]) if lines else "")


def parse_posted(data: bytes | None) -> PostScriptResult | None:
    """post.json, None for anything but what the POST script writes."""
    row = parse_object(data)
    if row is None:
        return None
    job, again, left, why = (row.get(name) for name in ("job", "again", "left", "why"))
    if not (isinstance(job, str) and isinstance(again, bool) and isinstance(left, bool)):
        return None
    if not isinstance(why, str):
        return None
    return PostScriptResult(job=job if _JOB.fullmatch(job) else "", again=again, left=left, why=why)


# --- What a job of a sweep says and whose GPU it met: the startd's word, and the suite must agree. Pure
# In container universe a job runs inside the image, so nothing in it is believed of the GPU by itself. The
# startd's ad, written into the job's log when it started (`ulog_execute_attrs`), says which GPU that was;
# what
# libcuda said inside must fit. Where one of them is about another GPU the run is `infrastructure`: no word
# on
# the image. A GPU that condor_gpu_discovery simulates is no GPU at all.


RUNNER = "htcondor"
FORMAT = 1
LONGEST_RUN = 14 * 86400.0
_CUDA = re.compile(r"[0-9]{1,3}\.[0-9]{1,2}")
_SHORT = re.compile(r"(?:GPU|MIG)-(?![0-9a-f]{2}223334)([0-9a-f]{8})")
"""A short name, but for those that condor_gpu_discovery makes up (trust/verdict.py, is_simulated)."""


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
    """run.json of a job: how the suite's process went. `hardware` is what NVML and /proc said inside.

    It is None with the reason in `no_gpu` where nothing of a driver was to be seen there. `image` is the
    sha256 of the .sif that lay beside the job, empty where none did.
    """

    nonce: str
    suite: str
    image: str
    started: datetime
    ended: datetime
    completed: CommandResult
    hardware: Hardware | None
    no_gpu: str


def parse_job_run(data: bytes, where: str) -> SuiteRun:
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
    return SuiteRun(completed=completed_of(row), hardware=seen, **kept)


def pool_hardware(attempt: JobAttempt, run: SuiteRun, met: GpuIdentity | None) -> Hardware | None:
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


def disagreement(gpu: PoolGpu, run: SuiteRun, met: GpuSuiteReport) -> str:
    """Where the startd and the job speak of two GPUs or drivers, with both values; empty where they agree."""
    device, told = met.device, "the startd"
    if device is None:
        return ""
    same = digits_of(gpu.uuid) == digits_of(device.uuid) if gpu.uuid else _is_short_for(gpu.id, device.uuid)
    if not same:
        return f"the suite met {device.uuid}, {told} gave the job {gpu.uuid or gpu.id}"
    if gpu.capability != device.capability:
        return f"the suite says {device.uuid} has capability {device.capability}, {told} {gpu.capability}"
    if gpu.name and _plain_text(gpu.name) != _plain_text(device.name):
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


def _plain_text(name: str) -> str:
    """NVML's and CUDA's names differ in the maker's name before some GPUs' own."""
    return " ".join(name.lower().removeprefix("nvidia ").split())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if _CUDA.fullmatch(text) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutput:
    """What a job brought back: its files, and its last attempt. `report` is None where it wrote none."""

    run: SuiteRun
    report: bytes | None
    attempt: JobAttempt


def job_report(kit: Mapping[str, Any], asked: Mapping[str, Any], answer: JobOutput) -> GpuReport:
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
    met = _find_gpu(answer, asked)
    judged = GpuRun(
        subject=VerifiedImage(**kit["subject"]),
        suite=kit["suite"],
        asked=asked,
        waive=tuple(kit["waive"]),
        runner=RUNNER,
        hardware=pool_hardware(attempt, run, met.device if met else None),
        started=run.started,
        ended=run.ended,
    )
    missing = "" if answer.report is not None else "it wrote no report that can be read"
    brought = RawResult(report=answer.report or b"", fault=missing, completed=run.completed, parsed=met)
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


def _other_image(kit: Mapping[str, Any], run: SuiteRun) -> str:
    """Whoever put the file there may have put another: of a .sif `config` is the sha256 of the file."""
    wanted = kit["subject"]["config"]
    if not run.image or not kit["sif"] or run.image == wanted:
        return ""
    return f"the job's .sif was {run.image}, the node's is {wanted}: put that file there"


def _find_gpu(answer: JobOutput, asked: Mapping[str, Any]) -> GpuSuiteReport | None:
    try:
        return parse_suite_report(answer.report or b"", asked)
    except InvalidReportError:
        return None
