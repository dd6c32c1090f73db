"""The program of a kit: it reads the GPUs of the host, gets the image, runs the suite, and writes `result/`.

It uses only the standard library; run.py starts it. The result has run.json (how the run ended) and, after a
run, evidence.json (the GPUs of the host) and report.json (written by the suite in the image).

A kit of the level `node` writes no result. It checks this machine against signed numbers of its image, and
prints one line (see the end of this file).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from . import hardware
from .hardware import (
    ALL,
    PCI_ORDER,
    SelectedGpu,
    SelectionError,
    choose,
    lost_gpus,
    lost_note,
    names_lost,
    read_visible,
    select,
    visible_value,
)
from .start import (
    EXIT_TOOL,
    EXIT_USAGE,
    MEETING,
    NODE,
    NODES,
    REPORT,
    RUNNERS,
    EndedProcess,
    Kit,
    Stop,
    choose_runner,
    clean,
    say,
)
from .trees import TreeLimits, list_names, open_file, read_file, remove_tree, walk_tree

FORMAT = 1
EXIT_CHECK, EXIT_INTERRUPTED = 9, 130
EXPECTATIONS = "expectations.json"
KIT, RUN, EVIDENCE, RESULT = "kit.json", "run.json", "evidence.json", "result"
LARGEST_REPORT, MOST_NAMES = 1 << 20, 10_000
SUITE_LIMITS = TreeLimits(entries=5000, depth=20)
MOST_SAID = 3
SEVERAL = "several"
VISIBLE = "CUDA_VISIBLE_DEVICES"
DESCRIPTION = "Run the GPU suite of this kit inside its image, on a GPU of this machine."
EPILOG = (
    "Exit code 0: all checks passed; 9: a check failed, or there is no such GPU; 2, 6, 8: "
    "invalid arguments or kit, a missing tool, an image that is not available. A kit of --suite node prints "
    "one line; 9: this machine computes wrongly; 3: no signed numbers for its GPU; 11: not known."
)


def read_kit(folder: Path) -> Kit:
    """Read the kit in a directory. Raises Stop if it has another format, or its suite was changed."""
    try:
        row = json.loads(read_file(folder, KIT, LARGEST_REPORT))
        if row["format"] != FORMAT:
            raise ValueError(f"format {row['format']}, this program reads {FORMAT}")
        kit = Kit(folder, *(row[name] for name in Kit._fields[1:]))
        digest = suite_digest(folder / "suite")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Stop(f"{folder} is not a kit: {error}", EXIT_USAGE) from error
    if digest != kit.suite:
        raise Stop(f"the suite of this kit was changed: it is {digest}, and was {kit.suite}", EXIT_USAGE)
    return kit


def suite_digest(folder: Path) -> str:
    """Return the sha256 over the sorted names and contents of the suite's files, each after its length."""
    total = hashlib.sha256()
    names = [name for name, _ in walk_tree(folder, limits=SUITE_LIMITS) if name.endswith(".py")]
    for name in sorted(names):
        for part in (os.fsencode(name), read_file(folder, name, LARGEST_REPORT)):
            total.update(len(part).to_bytes(8, "little") + part)
    return f"sha256:{total.hexdigest()}"


def seen_gpus(
    hardware: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return the GPUs that the batch system assigned, and CUDA_VISIBLE_DEVICES for the image ("" if not set).

    Raises Stop if the batch system assigned none.
    """
    value, gpus, notes = environ.get(VISIBLE), hardware["gpus"], hardware["notes"]
    if value is None:
        return gpus, ""
    pci, uuids = environ.get("CUDA_DEVICE_ORDER") == PCI_ORDER, [gpu["uuid"] for gpu in gpus]
    seen = read_visible(value, uuids, notes, ordered=pci or len({gpu["name"] for gpu in gpus}) == 1)
    if not seen:
        broken = names_lost(value, uuids, hardware["known"], notes)
        text = f"{VISIBLE}={value[:200]!a} names no GPU of this machine{lost_note(notes)}"
        raise Stop(text, EXIT_CHECK, "infrastructure" if broken else "no-gpu")
    assigned = [gpu.uuid for gpu in seen]
    mine = [gpu for gpu in gpus if gpu["uuid"] in assigned or "" in assigned]
    return mine, visible_value(seen, notes, pci=pci)


def choose_gpus(
    hardware: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], capability: str, level: str
) -> Sequence[Mapping[str, Any]]:
    """Return the first of `gpus` with this capability, or on level `several` all with one capability.

    Raises Stop.
    """
    positions = choose([gpu["capability"] for gpu in gpus], capability, several=level == SEVERAL)
    if positions:
        return [gpus[index] for index in positions]
    there = ", ".join(f"{gpu['name']} ({gpu['capability']})" for gpu in gpus)
    kind = f"capability {capability}" if capability else "one capability"
    number = "several GPUs" if level == SEVERAL else "a GPU"
    text = f"this kit is for {number} of {kind}, this machine has {there}{lost_note(hardware['notes'])}"
    raise Stop(text, EXIT_CHECK, "wrong-gpu")


def select_gpus(
    text: str, seen: Mapping[str, Any], environ: Mapping[str, str], places: hardware.Places
) -> tuple[Sequence[SelectedGpu], Mapping[str, str]]:
    """Return the GPUs of --gpus, none for all, and an environment that selects them like a batch system.

    Raises Stop.
    """
    if not text:
        return (), environ
    rest = {name: value for name, value in environ.items() if name != VISIBLE}
    if text == ALL:
        return (), rest
    uuids = [gpu["uuid"] for gpu in seen["gpus"]]
    try:
        gpus = select(text, uuids, seen["notes"], hardware.find_gpu_nodes(places), one_slice=True)
    except SelectionError as error:
        raise Stop(f"{error} ({error.hint})", EXIT_USAGE) from error
    return gpus, {**rest, VISIBLE: ",".join(gpu.uuid for gpu in gpus)}


class KitJob(NamedTuple):
    """One run of a kit: the options and environment of the caller, and the places with GPU data.

    `gpus` are the GPUs to use (`all`, `0,1`, UUIDs), empty for those of the batch system. With `keep`, the
    pulled image is not removed. `work` is the directory of the run; the `result` is collected in
    `work/result`.
    """

    kit: Kit
    runner: str
    image: str
    gpus: str
    keep: bool
    environ: Mapping[str, str]
    places: hardware.Places
    work: Path


def main(
    argv: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    places: hardware.Places = hardware.MACHINE,
) -> int:
    """Run the kit in `folder` and return the exit code. An earlier result is replaced."""
    parser = argparse.ArgumentParser(prog="run.py", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--runner", choices=RUNNERS, default="", help="default: the first that works here")
    parser.add_argument("--image", default="", help="HOST/NAME@sha256:..., an image of docker, or a .sif")
    parser.add_argument("--gpus", default="", help="all, or numbers or UUIDs, as in nvidia-smi -L")
    parser.add_argument("--keep", action="store_true", help="keep the image that is pulled for this run")
    options = parser.parse_args(list(argv))
    facts: dict[str, Any] = {"started": now(), "runner": options.runner}
    try:
        kit = read_kit(folder)
        if kit.level == NODE:
            with _scratch(None) as work:
                job = KitJob(kit, options.runner, options.image, options.gpus, True, environ, places, work)
                return print_node(check_node(job, read_signed(folder)))
        if facts["started"] >= kit.expires:
            raise Stop(f"this kit was good until {kit.expires}: make a new one", EXIT_USAGE)
        if kit.machine not in ("", os.uname().machine):  # emulated runs prove nothing
            raise Stop(f"this kit is for {kit.machine}, and this machine is {os.uname().machine}", EXIT_USAGE)
        if kit.level == NODES and MEETING not in environ:
            raise Stop(
                "this kit runs in a job on several nodes: imagefactory sweep start --nodes", EXIT_USAGE
            )
        with _work(folder) as work:
            job = KitJob(
                kit, options.runner, options.image, options.gpus, options.keep, environ, places, work
            )
            try:
                code = _run(job, facts)
            except Stop as stop:
                if not stop.outcome:
                    raise
                code = stop.code
                facts.update(outcome=stop.outcome, reason=str(stop))
            _write(work / RESULT / RUN, format_run(kit, environ, facts))
            if (folder / RESULT).exists():
                (folder / RESULT).rename(work / "earlier")
            (work / RESULT).rename(folder / RESULT)
    except Stop as stop:
        say(f"error: {stop}")
        return stop.code
    except OSError as error:
        say(f"error: {error.filename or folder}: {error.strerror or error}")
        return EXIT_TOOL
    except KeyboardInterrupt:
        say("interrupted: run it again")
        return EXIT_INTERRUPTED
    if facts.get("outcome"):
        say(f"{facts['outcome']}: {facts['reason']}; nothing was verified")
    else:
        say(f"bring {folder} back to where it was made: imagefactory sweep collect {folder}")
    return code


def format_run(kit: Kit, environ: Mapping[str, str], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return run.json. `outcome` is empty if the suite was started; otherwise it is the reason."""
    return {
        "format": FORMAT,
        "nonce": kit.nonce,
        "suite": kit.suite,
        "actions": actions(environ),
        "outcome": "",
        "reason": "",
        "ended": now(),
        "returncode": 0,
        "timed_out": False,
        "seconds": 0.0,
        "said": [],
        **facts,
    }


def _run(job: KitJob, facts: dict[str, Any]) -> int:
    """Run the suite. Without a GPU, no image is pulled and no process started. Raises Stop."""
    kit, work = job.kit, job.work
    try:
        seen = hardware.read_hardware(job.places)
    except hardware.NoGpu as error:
        lost = isinstance(error, hardware.LostGpu)
        raise Stop(str(error), EXIT_CHECK, "infrastructure" if lost else "no-gpu") from error
    selected, environ = select_gpus(job.gpus, seen, job.environ, job.places)
    mine, visible = seen_gpus(seen, environ)
    gpus = choose_gpus(seen, mine, kit.capability, kit.level)
    if not visible and (len(seen["gpus"]) > len(gpus) or lost_gpus(seen["notes"])):
        visible = ",".join(str(gpu["uuid"]) for gpu in gpus)
    for index, why in lost_gpus(seen["notes"]).items():
        say(f"GPU {index} cannot be used: {why}")
    runner = choose_runner(job.runner, kit, job.environ, keep=job.keep)
    facts["runner"] = runner.name
    try:
        image = runner.fetch(job.image, work)
        _prepare_directories(kit, work)
        facts["started"] = now()
        ended = runner.run(image, work, visible, selected, seen)
    finally:
        runner.clear()
    facts.update(
        ended=now(),
        returncode=ended.returncode,
        timed_out=ended.timed_out,
        seconds=ended.seconds,
        said=list(ended.lines)[-MOST_SAID:],
    )
    _write(work / RESULT / EVIDENCE, seen)
    data = read_report(work, f"report/{REPORT}")
    if data is not None:
        (work / RESULT / REPORT).write_bytes(data)
    return EXIT_CHECK if ended.returncode or ended.timed_out or data is None else 0


def _prepare_directories(kit: Kit, work: Path) -> None:
    """Copy suite and expectations, readable for every user, and create a writable report directory."""
    for name, _ in walk_tree(kit.folder / "suite", limits=SUITE_LIMITS):
        if name.endswith(".py"):
            (work / "suite" / name).parent.mkdir(parents=True, exist_ok=True)
            (work / "suite" / name).write_bytes(read_file(kit.folder / "suite", name, LARGEST_REPORT))
    (work / "expect").mkdir()
    data = read_file(kit.folder, EXPECTATIONS, LARGEST_REPORT)
    (work / "expect" / EXPECTATIONS).write_bytes(data)
    for folder in (work / "suite", work / "expect"):
        folder.chmod(0o755)
        for name, state in walk_tree(folder):
            (folder / name).chmod(0o755 if stat.S_ISDIR(state.st_mode) else 0o644)
    (work / "report").mkdir()
    (work / "report").chmod(0o777)


def read_report(folder: Path, path: str) -> bytes | None:
    """Return the bytes of `path` below `folder`, None if it is not a regular file of allowed size."""
    try:
        return read_file(folder, path, LARGEST_REPORT)
    except OSError:
        return None


def actions(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the identifiers of this GitHub Actions job, None outside of GitHub Actions."""
    if environ.get("GITHUB_ACTIONS") != "true":
        return None
    names = ("GITHUB_REPOSITORY", "GITHUB_RUN_ID", "GITHUB_RUN_ATTEMPT", "GITHUB_JOB", "RUNNER_NAME")
    return {name: clean(environ.get(name, ""))[:200] for name in names}


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017 - Python 3.9


@contextlib.contextmanager
def _work(folder: Path) -> Iterator[Path]:
    """Yield a directory in the kit that docker and apptainer can read. It is removed, also after a signal."""

    with open_file(folder, KIT, LARGEST_REPORT) as alone:
        try:
            fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Stop(f"{folder} is running already: a kit is good for one run", EXIT_USAGE) from None
        except OSError:
            pass  # a file system without locks
        else:
            for name in list_names(folder.resolve(), MOST_NAMES):
                if name.startswith(".work-"):  # of a run that was killed
                    _remove(folder / name)
        with _scratch(folder) as work:
            (work / RESULT).mkdir()
            yield work


@contextlib.contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """Yield a temporary directory in `folder`, None for that of the system, which every user can read.

    It is removed at the end, also after a signal.
    """

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    work = Path(tempfile.mkdtemp(prefix=".work-" if folder else "imagefactory-node-", dir=folder))
    try:
        work.chmod(0o755)
        yield work
    finally:
        _remove(work)
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove(folder: Path) -> None:
    """Remove a directory.

    Files that an image wrote as another user may stay, and do not affect later runs.
    """
    try:
        remove_tree(folder)
    except OSError as error:
        say(f"left: {error.filename}: {error.strerror}")


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


# --- A node: does this machine compute as others with such GPUs did?
# signed.json, from verdicts that counted when the kit was written (imagefactory, actions/verify.py):
#   checks the checks that must have a result
#   alone  those that use only the driver, not the image
#   gpus   name of a GPU -> `expires`, the oldest verified `driver`, and `checks`: check -> number -> value.
#          A rate (-gb-per-s) is the lowest signed, an error (-error) the highest signed part of its limit.
# The image has the same bytes there and here. So a check that passed there and fails here is a fault of this
# machine. A failed check that passed nowhere may be the fault of the image: then the answer is not known.


SIGNED = "signed.json"
EXIT_NO_NUMBERS, EXIT_UNKNOWN = 3, 11
PASSED, FAILED, NO_NUMBERS, UNKNOWN = "passed", "failed", "no-numbers", "unknown"
NODE_SECONDS, END_SECONDS = 50.0, 5.0
"""Seconds for the whole check, and those that remain to end a container. Slurm ends a HealthCheckProgram
after 60.
"""
RATE, ERROR, BOUND = "-gb-per-s", "-error", "-bound"
SLOWER, WORSE = 3.0, 10.0
"""A rate may be a third of the lowest signed rate: the GPUs of a machine are checked at once, and share its
memory and switches. An error may be ten times the highest signed error, in parts of its limit.
"""
LONGEST_LINE = 400


class NodeAnswer(NamedTuple):
    """The answer about a machine or one of its GPUs. `code` is the exit code, `reason` one line."""

    code: int
    status: str
    reason: str


def read_signed(folder: Path) -> Mapping[str, Any]:
    """Return signed.json. Raises Stop."""
    try:
        signed: dict[str, Any] = json.loads(read_file(folder, SIGNED, LARGEST_REPORT))
        if signed["format"] != FORMAT:
            raise ValueError(f"format {signed['format']}, this program reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Stop(f"{folder}/{SIGNED} cannot be read: {error}", EXIT_USAGE) from error
    return signed


def print_node(answer: NodeAnswer) -> int:
    """Print the answer as an attribute of a ClassAd, and return the exit code."""
    text = "".join(letter if " " <= letter <= "~" else "?" for letter in clean(answer.reason))
    text = text[:LONGEST_LINE].replace("\\", "/").replace('"', "'")
    print(f'ImagefactoryNode = "{answer.status}: {text}"', flush=True)
    return answer.code


class NodeRun(NamedTuple):
    """A check of a node: the kit, signed.json, the GPUs of the machine and those of --gpus, and its end."""

    job: KitJob
    signed: Mapping[str, Any]
    seen: Mapping[str, Any]
    selected: Sequence[SelectedGpu]
    deadline: float


def check_node(job: KitJob, signed: Mapping[str, Any]) -> NodeAnswer:
    """Check the GPUs that the batch system assigned, or else all that no program uses, at the same time."""
    deadline = time.monotonic() + NODE_SECONDS
    try:
        seen = hardware.read_hardware(job.places)
        selected, environ = select_gpus(job.gpus, seen, job.environ, job.places)
        mine, visible = seen_gpus(seen, environ)
        assigned = VISIBLE in environ
        busy = [] if assigned else hardware.busy_gpus(job.places.nvml)
    except hardware.NoGpu as error:
        return NodeAnswer(EXIT_CHECK, FAILED, str(error))
    except Stop as stop:
        if not stop.outcome:
            return NodeAnswer(stop.code, UNKNOWN, f"{stop}")
        lost = stop.outcome == "infrastructure"
        return NodeAnswer(EXIT_CHECK if lost else EXIT_UNKNOWN, FAILED if lost else UNKNOWN, f"{stop}")
    if assigned and len(mine) != len(visible.split(",")):
        reason = f"{VISIBLE} has numbers in an unknown order: set CUDA_DEVICE_ORDER={PCI_ORDER}"
        return NodeAnswer(EXIT_UNKNOWN, UNKNOWN, reason)
    lost_ones = {} if assigned else lost_gpus(seen["notes"])
    answers = [NodeAnswer(EXIT_CHECK, FAILED, f"GPU {at}: {why}") for at, why in lost_ones.items()]
    idle = [gpu for gpu in mine if gpu["uuid"] not in busy]
    if not idle and not answers:
        return NodeAnswer(EXIT_UNKNOWN, UNKNOWN, "programs use all GPUs of this machine")

    run = NodeRun(job, signed, seen, selected, deadline)

    def check(gpu: Mapping[str, Any]) -> NodeAnswer:
        return _check_gpu(run, gpu, visible if len(mine) == 1 and visible else str(gpu["uuid"]))

    answers += [check(idle[0])] if len(idle) == 1 else _check_together(idle, check)
    worst = next((answer for answer in answers if answer.status == FAILED), None)
    worst = worst or max(answers, key=lambda answer: answer.code)
    if worst.code:
        return worst
    names = ", ".join(sorted({str(gpu["name"]) for gpu in idle}))
    used = f"; {len(mine) - len(idle)} in use" if len(mine) > len(idle) else ""
    return NodeAnswer(0, PASSED, f"{len(idle)} x {names}{used}")


def _check_together(
    gpus: Sequence[Mapping[str, Any]], check: Callable[[Mapping[str, Any]], NodeAnswer]
) -> list[NodeAnswer]:
    """Return the answer about each GPU, from a process for each. They end with this process."""
    children: list[tuple[int, int]] = []
    answers = []
    try:
        for gpu in gpus:
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    os.write(writer, json.dumps(check(gpu)).encode())
                finally:
                    os._exit(0)
            os.close(writer)
            children.append((pid, reader))
        for (_, reader), gpu in zip(children, gpus):  # noqa: B905 - Python 3.9
            data = b""
            while part := os.read(reader, 1 << 16):
                data += part
            lost = (EXIT_UNKNOWN, UNKNOWN, f"{gpu['uuid']}: its process ended")
            answers.append(NodeAnswer(*(json.loads(data) if data else lost)))
    finally:
        for pid, reader in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            os.close(reader)
    return answers


def _check_gpu(run: NodeRun, gpu: Mapping[str, Any], visible: str) -> NodeAnswer:
    """Run the suite on one GPU and compare its numbers. Never raises Stop."""
    job, signed, seen = run.job, run.signed, run.seen
    selected = [other for other in run.selected if other.uuid in (gpu["uuid"], visible)]
    sliced = gpu["uuid"] in [uuid for name, uuid in seen["notes"].items() if name.startswith("MIG-")]
    work = Path(tempfile.mkdtemp(prefix="gpu-", dir=job.work))
    work.chmod(0o755)
    # The name of a slice is only known after the suite met it.
    if not sliced and (none := _no_numbers(signed, str(gpu["name"]), str(seen["driver"]))):
        return none
    try:
        runner = choose_runner(job.runner, job.kit, job.environ, keep=True)
        image = runner.fetch(job.image, work)
        _prepare_directories(job.kit, work)
        runner.kit = job.kit._replace(timeout=max(1.0, run.deadline - END_SECONDS - time.monotonic()))
        ended = runner.run(image, work, visible, selected, seen)
        report = json.loads(read_report(work, f"report/{REPORT}") or b"null")
        if report is None:
            last = ended.lines[-1] if ended.lines else "no output"
            return NodeAnswer(EXIT_UNKNOWN, UNKNOWN, f"{gpu['uuid']}: the suite wrote no report: {last}")
        name = str(report["device"]["name"]) if sliced and report["device"] else str(gpu["name"])
        if none := _no_numbers(signed, name, str(seen["driver"])):
            return none
        answer = compare_node(report, signed, name, ended)
    except Stop as stop:
        return NodeAnswer(stop.code, UNKNOWN, str(stop))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return NodeAnswer(EXIT_UNKNOWN, UNKNOWN, f"{gpu['uuid']}: the report is not readable: {error}")
    return answer._replace(reason=f"{gpu['uuid']}: {answer.reason}")


def _no_numbers(signed: Mapping[str, Any], name: str, driver: str) -> NodeAnswer | None:
    """Return the answer if no verdict that counts is about this GPU and driver, else None.

    A verdict counts for its driver and for newer ones.
    """
    row = signed["gpus"].get(name)
    if row is None:
        reason = f"no verdict of this image is for {name}, only for {', '.join(sorted(signed['gpus']))}"
    elif now() >= row["expires"]:
        reason = f"the verdicts for {name} expired at {row['expires']}: verify the image, write a new kit"
    elif _numbers_in(driver) < _numbers_in(row["driver"]):
        reason = f"the driver is {driver}, and verdicts for {name} begin with {row['driver']}"
    else:
        return None
    return NodeAnswer(EXIT_NO_NUMBERS, NO_NUMBERS, reason)


def _numbers_in(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def compare_node(
    report: Mapping[str, Any], signed: Mapping[str, Any], name: str, ended: EndedProcess
) -> NodeAnswer:
    """Compare a report with the signed numbers for the GPU `name`. Pure. The report is untrusted.

    Raises ValueError, KeyError or TypeError for other reports.
    """
    checks, alone = signed["gpus"][name]["checks"], signed["alone"]
    rows = {row["name"]: row for row in report["checks"]}
    for check, row in rows.items():
        if row["state"] == FAILED and row["outcome"] == "timeout" and check not in alone:
            return NodeAnswer(EXIT_UNKNOWN, UNKNOWN, f"{check} did not end in time: {row['detail']}")
        if row["state"] == FAILED and check not in checks:
            reason = f"{check} failed, and passed nowhere with such a GPU: {row['detail']}"
            return NodeAnswer(EXIT_UNKNOWN, UNKNOWN, reason)
        if row["state"] == FAILED:
            return NodeAnswer(EXIT_CHECK, FAILED, f"{check}: {row['outcome']}: {row['detail']}")
    faults = [fault for check in checks if check in rows for fault in _worse(check, rows[check], checks)]
    if faults:
        return NodeAnswer(EXIT_CHECK, FAILED, "; ".join(faults))
    ended_checks = [check for check, row in rows.items() if row["state"] != "not-run"]
    open_checks = [check for check in signed["checks"] if check not in ended_checks]
    if ended.timed_out and report["running"] in alone:
        return NodeAnswer(EXIT_CHECK, FAILED, f"{report['running']} hangs, which uses only the driver")
    if ended.timed_out or ended.returncode or report["running"] or open_checks:
        at = report["running"] or next(iter(open_checks), "the suite")
        return NodeAnswer(EXIT_UNKNOWN, UNKNOWN, f"{at} did not end in {NODE_SECONDS:.0f} s, or not normally")
    return NodeAnswer(0, PASSED, f"{len(rows)} checks")


def _worse(check: str, row: Mapping[str, Any], checks: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers of a check that differ from the signed ones by more than SLOWER and WORSE."""
    numbers = {str(key): float(value) for key, value in row["numbers"].items()}
    for number, signed in checks[check].items():
        value = numbers.get(number)
        if value is None:
            continue
        if number.endswith(RATE) and value * SLOWER < signed:
            yield f"{check}: {number} is {value:.3g}, and was at least {signed:.3g} in verdicts"
        if number.endswith(ERROR):
            bound = numbers.get(number[: -len(ERROR)] + BOUND, 0.0)
            if bound and signed and value / bound > WORSE * signed:
                yield f"{check}: {number} is {value:.3g}, and was at most {signed * bound:.3g} in verdicts"
