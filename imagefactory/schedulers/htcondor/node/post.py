#!/usr/bin/env python3
"""DAGMan's POST script of a node: post.py NODE $RETURN $JOBID $RETRY $MAX_RETRIES, in the sweep's directory.

It uses the standard library of Python 3.6 and newer, which access points have. Exit code 0: the node has its
outcome; 1: the pool, a transfer or a machine failed, and DAGMan retries the node within RETRY. Results are
kept: before a retry, the files of an attempt are moved to nodes/<node>/attempt-<n>/, with post.json, which
has the reason. post.json of the last attempt is in nodes/<node>/.

A fault of a machine is a line in `faults`, and the next attempt of the node requests other machines in
nodes/<node>/job.sub. A machine on which two nodes failed gets no later attempts while another machine in
machines.json remains. job.sub also names the preferred machines.

imagefactory reads job logs and `faults` with this file too, so both agree. The events in a log are text
separated by lines of `...`; other lines are skipped. Source: HTCondor manual, "Job Event Log Codes" and "Hold
Reason Codes".
"""

import json
import os
import re
import stat
import sys
import time
from pathlib import Path

FORMAT = 1
MOST_STARTS, MOST_SHADOWS = 5, 20
LARGEST_LOG = 16 << 20
REPORT = "report.json"
LARGEST_FILE = 1 << 20
LONGEST_LINE = 4000
LOG_SECONDS = 60.0
POLL_SECONDS = 0.2
OTHERS_FIRST = 3600
MAX_FAULTS = 2
ATTEMPT_FILES = ("out", "err", "result", "post.json")
FAULT_FILES, MACHINES, JOB = "faults", "machines.json", "job.sub"
MACHINE_OUTCOMES = ("no-gpu", "wrong-gpu")

SUBMITTED, EXECUTING, EVICTED, TERMINATED = 0, 1, 4, 5
SHADOW_EXCEPTION, ABORTED, HOLD_CODES, RELEASED = 7, 9, 12, 13
SUSPENDED, UNSUSPENDED = 10, 11
DISCONNECTED, RECONNECTED = 22, 23
REMOTE_ERROR, RECONNECT_FAILED, TRANSFERRING = 21, 24, 40

# Holds by a failure of the pool, not of the image or the job. 35 is an image that cannot be pulled, 12 and 13
# are transfers, 45 is a machine where containers do not start.
TRY_AGAIN = (6, 7, 8, 9, 10, 11, 12, 13, 14, 17, 18, 19, 22, 23, 24, 35, 41, 43, 45, 48)

SUBMIT_FAILED = -1001
OWN_LIMITS = "PeriodicRemove expression"
# This event comes before a start, or after it in the same second: no transfer is active any more.
ARRIVED = "Finished transferring input files"

_HEAD = re.compile(
    r"([0-9]{3}) \(([0-9]{1,10})\.([0-9]{1,10})\.[0-9]{1,10}\) "
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9:]{8}(?:\.[0-9]{1,6})?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
    r"|[0-9]{2}/[0-9]{2}(?:/[0-9]{2,4})? [0-9:]{8}(?:\.[0-9]{1,6})?) (.*)"
)
_EXIT = re.compile(r"\s*\(1\) Normal termination \(return value ([0-9]{1,3})\)")
_SIGNAL = re.compile(r"\s*\(0\) Abnormal termination \(signal ([0-9]{1,3})\)")
_CODE = re.compile(r"\s*Code ([0-9]{1,6}) Subcode -?[0-9]{1,11}")
_USAGE = re.compile(r"\s*(?:\([0-9]\) |Usr |[0-9]+  -  |Code [0-9])")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")
_MACHINE = re.compile(r'\s*Machine = "([A-Za-z0-9][A-Za-z0-9_.:@-]{0,254})"')
_FIRST = "first = "
_SLOT = re.compile(r"\bslot[0-9_]+@([A-Za-z0-9][A-Za-z0-9_.:@-]{0,254})")
PULLED = re.compile(r"(?:docker|oras|osdf|library)://|could not open image")
"""Messages of Apptainer about an image that it cannot pull. Other failures have other messages."""


class JobEvent:
    """One event: its number, the job (`12.0`), the time as written, its first line, and the other lines."""

    __slots__ = ("job", "lines", "number", "text", "time")

    def __init__(self, number, job, time, text, lines):
        # type: (int, str, str, str, list[str]) -> None
        self.number, self.job, self.time, self.text, self.lines = number, job, time, text, lines


def split_events(data):
    # type: (bytes) -> list[JobEvent]
    """Return the events of a log in order, without an incomplete last event (no `...` yet)."""
    events, block = [], []  # type: list[JobEvent], list[str]
    for line in data.decode("utf-8", "replace").split("\n"):
        if line.rstrip("\r") != "...":
            block.append(line)
            continue
        for index, first in enumerate(block):
            match = _HEAD.match(first)
            if match:
                job = f"{int(match.group(2))}.{int(match.group(3))}"
                rest = [clean(text) for text in block[index + 1 :]]
                events.append(JobEvent(int(match.group(1)), job, match.group(4), clean(match.group(5)), rest))
                break
        block = []
    return events


def clean(text):
    # type: (str) -> str
    """Return a printable line, so that output of an image or a machine cannot control a terminal."""
    line = text[:LONGEST_LINE].replace("\t", " ")
    if not line.isprintable():
        line = "".join(char if char.isprintable() else " " for char in line)
    return line.rstrip()


class JobState:
    """The state of a job, from its events. `ending` is one of JobEnding; `started` counts its starts.

    `step` is its last transfer or suspension. `cut` means that it was removed while it ran.
    """

    def __init__(self):
        # type: () -> None
        self.ending, self.code, self.text = "", 0, ""
        self.started, self.over, self.trouble = 0, False, ""
        self.step, self.cut = "", False


def follow(events):
    # type: (list[JobEvent]) -> JobState
    """Return the state of one job after its events.

    As in DAGMan, only the first end counts, even if the end is logged twice. The submission may be logged
    late.
    """
    last = JobState()
    for event in events:
        if last.over:
            break
        if event.number == SUBMITTED:
            last.ending = last.ending or "waiting"
        elif event.number == EXECUTING:
            last.started += 1
            last.ending, last.code, last.text, last.step = "running", 0, "", ""
        elif event.number in (EVICTED, SHADOW_EXCEPTION, RECONNECT_FAILED, REMOTE_ERROR):
            last.trouble = trouble_of(event) or last.trouble
            if event.number != REMOTE_ERROR and last.ending != "held":
                last.ending, last.text = "waiting", last.trouble
        elif event.number == DISCONNECTED:
            last.trouble = trouble_of(event) or last.trouble
            last.ending, last.text = "disconnected", last.trouble
        elif event.number == RECONNECTED:
            last.ending, last.text = "running", ""
        elif event.number in (TRANSFERRING, SUSPENDED):
            last.step = event.text
        elif event.number == UNSUSPENDED:
            last.step = ""
        elif event.number == HOLD_CODES:
            last.ending, last.code, last.text = ("held", *reason_of(event))
        elif event.number == RELEASED:
            last.ending, last.code, last.text = "waiting", 0, ""
        elif event.number == TERMINATED:
            last.ending, last.code = ended_of(event)
            last.text, last.over = "", True
        elif event.number == ABORTED:
            if last.ending != "held":
                last.cut = last.ending == "running" and last.step in ("", ARRIVED)
                last.ending, last.code, last.text = "removed", 0, reason_of(event)[1]
            last.over = True
    return last


def reason_of(event):
    # type: (JobEvent) -> tuple[int, str]
    """Return the code and the reason of a hold or a removal."""
    code, words = 0, []
    for line in event.lines:
        match = _CODE.match(line)
        if match:
            code = int(match.group(1))
        elif line.strip():
            words.append(line.strip())
    return code, " ".join(words)[:2000]


def ended_of(event):
    # type: (JobEvent) -> tuple[str, int]
    for line in event.lines:
        code, signal = _EXIT.match(line), _SIGNAL.match(line)
        if code:
            return "exited", int(code.group(1))
        if signal:
            return "killed", int(signal.group(1))
    return "lost", 0


def trouble_of(event):
    # type: (JobEvent) -> str
    """Return the reason of an eviction or an error, without the usage lines around it."""
    words = []
    for line in event.lines:
        if line.strip().startswith("Partitionable Resources"):
            break
        if line.strip() and not _USAGE.match(line):
            words.append(line.strip())
    return " ".join(words)[:2000]


def is_result(data, nonce):
    # type: (bytes | None, str) -> bool
    """Return whether run.json has the nonce of this node."""
    row = parse_object(data)
    return row is not None and bool(nonce) and row.get("nonce") == nonce


def parse_object(data):
    # type: (bytes | None) -> dict[str, object] | None
    """Return a JSON object, None if the data is not one."""
    try:
        row = json.loads((data or b"").decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def machine_of(last, events, text):
    # type: (JobState, list[JobEvent], str) -> str
    """Return the machine that failed a job: the machine of the slot in `text`, or of the last start.

    It is the last part of `slot1_1@glidein_7@gpu01`. It is empty without a name, and for a job that no
    machine failed.
    """
    named = _SLOT.findall(text)
    if named:
        return str(named[-1]).rstrip(".:").split("@")[-1]
    if last.ending not in ("held", "exited", "killed"):
        return ""
    lines = [line for event in events if event.number == EXECUTING for line in event.lines]
    names = [match.group(1) for match in map(_MACHINE.match, lines) if match]
    return names[-1] if names else ""


def is_pull(last, reason):
    # type: (JobState, str) -> bool
    """Return whether the image could not be pulled, which may also be a fault of the registry."""
    if PULLED.search(reason) or (last.ending == "held" and last.code == 35):
        return True
    return last.ending == "held" and last.code in (12, 13) and ".sif" in reason and "No space" not in reason


def machine_outcome(report, capability):
    # type: (dict[str, object] | None, str) -> str
    """Return why a report describes the machine, not the image: it has no GPU, or another one than requested.

    Empty for all other reports.
    """
    device, checks = (report or {}).get("device"), (report or {}).get("checks")
    if isinstance(device, dict) and device.get("capability") != capability:
        return "wrong-gpu: it met capability {}".format(device.get("capability"))
    for row in checks if isinstance(checks, list) else []:
        if isinstance(row, dict) and row.get("state") == "failed":
            if row.get("outcome") in MACHINE_OUTCOMES:
                return "{}: {}".format(row["outcome"], row.get("detail"))
            return ""
    return ""


class NodeFault:
    """A job of a node that failed on a machine: the time in seconds since 1970, and the reason."""

    __slots__ = ("at", "job", "machine", "node", "why")

    def __init__(self, machine, node, job, time, reason):
        # type: (str, str, str, int, str) -> None
        self.machine, self.node, self.job, self.at, self.why = machine, node, job, time, reason


def parse_faults(data):
    # type: (bytes | None) -> list[NodeFault]
    """Return the faults, one for each job.

    A line has machine, node, job, time and reason, separated by tabs.
    """
    faults = {}  # type: dict[tuple[str, ...], NodeFault]
    for line in (data or b"").decode("utf-8", "replace").split("\n"):
        parts = [clean(part) for part in line.split("\t", 4)]
        if len(parts) == 5 and parts[0] and parts[3].isdecimal():
            machine, node, job, time, reason = parts
            faults.setdefault((machine, node, job), NodeFault(machine, node, job, int(time[:12]), reason))
    return list(faults.values())


def bad_machines(faults, machines):
    # type: (list[NodeFault], list[str]) -> list[str]
    """Return the machines on which two nodes failed, including machines that are newer than `machines`.

    None if these are all of `machines`: then the fault is not in the machines.
    """
    nodes = {}  # type: dict[str, set[str]]
    for fault in faults:
        nodes.setdefault(fault.machine, set()).add(fault.node)
    bad = [name for name in nodes if len(nodes[name]) >= MAX_FAULTS]
    return bad if set(machines) - set(bad) else []


class NodePlacement:
    """The placement of a node. `row` is its key in machines.json. It prefers `first`, or runs only there."""

    __slots__ = ("first", "only", "row")

    def __init__(self, row="", first=(), only=False):
        # type: (str, list[str] | tuple[str, ...], bool) -> None
        self.row, self.first, self.only = row, list(first), only


def read_places(data):
    # type: (bytes | None) -> NodePlacement
    """Parse the placement that `format_job` wrote."""
    places = NodePlacement()
    for line in (data or b"").decode("ascii", "replace").split("\n"):
        if line.startswith("# "):
            places.row = line[2:]
        if line.startswith(_FIRST):
            places.first = re.findall(r'"([^"]+)"', line)
            places.only = bool(places.first) and "QDate" not in line
    return places


def format_job(places, avoided=(), tried=()):
    # type: (NodePlacement, list[str] | tuple[str, ...], list[str] | tuple[str, ...]) -> str
    """Return the submit file of a node: never on `avoided`, and on `tried` only after OTHERS_FIRST
    seconds.
    """
    late = f"time() - QDate > {OTHERS_FIRST}"
    needs = [f"!member(TARGET.Machine, {_listed(avoided)})"] if avoided else []
    if tried:
        needs.append(f"(!member(TARGET.Machine, {_listed(tried)}) || {late})")
    first = f"member(TARGET.Machine, {_listed(places.first)})" if places.first else "true"
    first = f"({first} || {late})" if places.first and not places.only else first
    elsewhere = " && ".join(needs) or "true"
    return f"# {places.row}\nelsewhere = {elsewhere}\n{_FIRST}{first}\ninclude : sweep.sub\nqueue\n"


def _listed(names):
    # type: (list[str] | tuple[str, ...]) -> str
    return "{{{}}}".format(", ".join(f'"{name}"' for name in names))


def decide(last, returned, whole):
    # type: (JobState, int, bool) -> tuple[bool, str]
    """Return whether to retry, and the reason. `whole` means that its result files exist and are readable."""
    if returned == SUBMIT_FAILED and not last.ending:
        return True, "condor_submit did not take it"
    if last.ending == "held":
        return last.code in TRY_AGAIN, f"held ({last.code}): {last.text}"
    if last.ending == "removed":
        own_limit, reason = OWN_LIMITS in last.text, last.trouble or last.step
        if own_limit and last.cut:
            return False, "stopped: its time was over"
        if own_limit and (last.started or reason):
            return True, f"started {last.started} times without an end: {reason}"
        return False, "no machine took it in time" if own_limit else f"removed: {last.text}"
    if last.ending == "exited" and last.code == 0:
        return not whole, "" if whole else "it brought back no result that can be read"
    if last.ending in ("exited", "killed"):
        return True, f"{last.ending} ({last.code})"
    return True, f"its end is not known (DAGMan returned {returned})"


def read_log(path, job):
    # type: (Path, str) -> tuple[JobState, list[JobEvent]]
    """Wait until the log shows the end of the job, since DAGMan reads another log.

    Return its state and events.
    """
    until = time.monotonic() + LOG_SECONDS
    while True:
        events = [event for event in split_events(read(path, LARGEST_LOG) or b"") if event.job == job]
        last = follow(events)
        if last.over or not events or time.monotonic() > until:
            return last, events
        time.sleep(POLL_SECONDS)


def read(path, largest):
    # type: (Path, int) -> bytes | None
    """Return the bytes of a regular file up to `largest`, else None.

    Links are not followed, since jobs write here.
    """
    try:
        handle = os.open(str(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)  # fdopen refuses a folder, and leaves it open
        return None
    with os.fdopen(handle, "rb") as file:
        data = file.read(largest + 1)
    return data if len(data) <= largest else None


def is_valid_run(directory):
    # type: (Path) -> bool
    """Return whether run.json belongs to this node, and report.json is missing or a JSON object."""
    kit = parse_object(read(directory / "kit.json", LARGEST_FILE)) or {}
    report = directory / "result" / "report.json"
    valid = not os.path.lexists(str(report)) or parse_object(read(report, LARGEST_FILE)) is not None
    return valid and is_result(
        read(directory / "result" / "run.json", LARGEST_FILE), str(kit.get("nonce", ""))
    )


def archive_attempt(directory, job):
    # type: (Path, str) -> None
    """Move the files of an attempt into a separate directory, so that they are not read as another attempt's.

    If this script was killed, DAGMan may run it twice for one job.
    """
    number = 1
    while (directory / f"attempt-{number}").exists():
        number += 1
    before = parse_object(read(directory / f"attempt-{number - 1}" / "post.json", LARGEST_FILE)) or {}
    if before.get("job") == job:
        return
    job_directory = directory / f"attempt-{number}"
    job_directory.mkdir()
    for name in ATTEMPT_FILES:
        if os.path.lexists(str(directory / name)):
            (directory / name).rename(job_directory / name)


def machines_of_row(row):
    # type: (str) -> list[str]
    """Return the machines of a row (a capability or a MIG slice) in the inventory of the sweep."""
    names = (parse_object(read(Path(MACHINES), LARGEST_LOG)) or {}).get(row)
    return [str(name) for name in names] if isinstance(names, list) else []


def attempted_machines(directory):
    # type: (Path) -> list[str]
    """Return the machines of earlier attempts of a node."""
    posts = sorted(directory.glob("attempt-*/post.json"))
    rows = [parse_object(read(path, LARGEST_FILE)) or {} for path in posts]
    return [str(row["machine"]) for row in rows if row.get("machine")]


def append_fault(machine, node, job, reason):
    # type: (str, str, str, str) -> None
    """Append a line in one write, so that lines of concurrent scripts do not mix."""
    line = "\t".join((machine, node, job, str(int(time.time())), clean(reason)[:500] or "-")) + "\n"
    handle = os.open(FAULT_FILES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode("utf-8"))
    finally:
        os.close(handle)


def replace_file(path, text):
    # type: (Path, str) -> None
    beside = path.with_name("." + path.name)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def main(arguments):
    # type: (list[str]) -> int
    if len(arguments) != 5 or not _NAME.fullmatch(arguments[0]):
        print("usage: post.py NODE RETURN JOBID RETRY MAX_RETRIES", file=sys.stderr)
        return 2
    node, returned, job = arguments[0], int(arguments[1]), arguments[2]
    directory = Path("nodes", node)
    directory.mkdir(parents=True, exist_ok=True)
    last, events = read_log(directory / "job.log", job)
    again, reason = decide(last, returned, is_valid_run(directory))
    kit = parse_object(read(directory / "kit.json", LARGEST_FILE)) or {}
    capability = str(kit.get("capability"))
    report = parse_object(read(directory / "result" / REPORT, LARGEST_FILE))
    word = "" if again else machine_outcome(report, capability)
    machine = machine_of(last, events, reason)
    if machine and (word or again) and not is_pull(last, reason):
        append_fault(machine, node, job, word or reason)
    places = read_places(read(directory / JOB, LARGEST_FILE))
    machines = places.first if places.only else machines_of_row(places.row or capability)
    bad = bad_machines(parse_faults(read(Path(FAULT_FILES), LARGEST_LOG)), machines)
    tried = [*attempted_machines(directory), machine] if machine else attempted_machines(directory)
    others = [name for name in machines if name not in tried and name not in bad]
    if word and others and arguments[3] != arguments[4]:
        again, reason = True, word
    retries = again and arguments[3] != arguments[4]
    row = {"format": FORMAT, "job": job, "return": returned, "again": again, "left": retries, "why": reason}
    row["machine"] = machine
    replace_file(directory / "post.json", json.dumps(row, indent=1, sort_keys=True) + "\n")
    if again:
        archive_attempt(directory, job)
        soft = sorted(name for name in set(tried) if name not in bad) if others else []
        if not places.only:  # what failed there is tried elsewhere, be the driver newer
            places.first = [name for name in places.first if name not in tried and name not in bad]
        replace_file(directory / JOB, format_job(places, bad, soft))
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
