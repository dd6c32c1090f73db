"""The program of a kit: it reads the GPUs of the host, gets the image, runs the suite, and writes `result/`.

It uses only the standard library; run.py starts it. The result has run.json (how the run ended) and, after a
run, evidence.json (the GPUs of the host) and report.json (written by the suite in the image).
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
from collections.abc import Iterator, Mapping, Sequence
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
from .start import EXIT_TOOL, EXIT_USAGE, REPORT, RUNNERS, Kit, Stop, choose_runner, clean, say
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
    "invalid arguments or kit, a missing tool, an image that is not available."
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
        if facts["started"] >= kit.expires:
            raise Stop(f"this kit was good until {kit.expires}: make a new one", EXIT_USAGE)
        if kit.machine not in ("", os.uname().machine):  # emulated runs prove nothing
            raise Stop(f"this kit is for {kit.machine}, and this machine is {os.uname().machine}", EXIT_USAGE)
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

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)

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
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
        work = Path(tempfile.mkdtemp(prefix=".work-", dir=folder))
        work.chmod(0o755)
        try:
            (work / RESULT).mkdir()
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
