"""A sweep as HTCondor takes it: one DAG with one description for all jobs, and the files that go with them.

DIR/sweep.dag                     per node JOB, VARS, RETRY and SCRIPT POST; at most so many at once
DIR/sweep.sub                     the submit commands that all jobs share
DIR/machines.json                 the pool's machines by capability
DIR/faults                        which machines failed jobs, in the days before too; post.py adds to it
DIR/suite.tar, inside.py          what every job gets; the suite and what runs it, by the image's own Python
DIR/post.py                       DAGMan's POST script
DIR/nodes/<node>/                 job.sub, which post.py writes anew for each retry; kit.json,
                                  expectations.json, HTCondor's job.log, out and err, and result/

DAGMan must be started in DIR. Sources: HTCondor's manual, "DAGMan" and condor_submit(1).
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.schedulers.faults import NODES, checked_name, node_directory, write_nodes
from imagefactory.schedulers.htcondor.ads import WHOLE_GPU_EXPRESSION
from imagefactory.schedulers.htcondor.node.post import (
    FAULT_FILES,
    JOB,
    LARGEST_LOG,
    MACHINES,
    MOST_SHADOWS,
    MOST_STARTS,
    NodePlacement,
    bad_machines,
    format_job,
    parse_faults,
    read,
)
from imagefactory.schedulers.pool import TRANSFERS, ImageKind, JobLimits, SweepNode, SweepSpec
from imagefactory.schedulers.sites import find_site
from imagefactory.settings.own_commands import machine_expressions
from imagefactory.verify.kit.program import EXPECTATIONS, KIT, RESULT
from imagefactory.verify.kits import CARRIED
from imagefactory.verify.kits import KIT_PROGRAMS as KIT_FOLDER
from imagefactory.verify.suite_files import read_suite

DAG, COMMON, SUITE, INSIDE, POST = "sweep.dag", "sweep.sub", "suite.tar", "inside.py", "post.py"
JOB_LOG = "job.log"
EMPTY = f"empty/{RESULT}"
PROGRAMS = Path(__file__).parent / "node"

EXECUTE_ATTRIBUTES = (
    "Machine",
    "AssignedGPUs",
    "GPUs_Capability",
    "GPUs_DeviceName",
    "GPUs_DeviceUuid",
    "GPUs_DriverVersion",
    "GPUs_GlobalMemoryMb",
    "GPUs_NvidiaDriver",
)
"""Attributes of the slot that the startd tells and the job's log keeps: whose GPU it was."""

NO_CUDA = "amd|instinct|radeon|gfx"
"""Names of GPUs that tell a Capability and take no CUDA: condor_gpu_discovery gives HIP's version for it."""
LARGEST_OUTPUT_MB = 16
LEASE = timedelta(minutes=10)
"""How long a job waits for a machine that does not answer, before it starts anew (default: 40)."""
CPUS = 1

_CAPABILITY = re.compile(r"[1-9][0-9]?\.[0-9]")
_CUDA = re.compile(r"[0-9]{1,3}\.[0-9]{1,2}")
_PATH = r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.+@-]+)+"
_PYTHON = re.compile(_PATH)
_REFERENCE = r"[a-z0-9][a-z0-9.-]*(?::[0-9]{1,5})?(?:/[a-z0-9][a-z0-9._-]*)+@sha256:[0-9a-f]{64}"
_IMAGE = {
    ImageKind.DOCKER: re.compile(rf"docker://{_REFERENCE}"),
    ImageKind.ORAS: re.compile(rf"oras://{_REFERENCE}"),
    ImageKind.SIF: re.compile(rf"{_PATH}\.sif"),
    ImageKind.OSDF: re.compile(rf"osdf://{_PATH}\.sif"),
}
_FAILED_MACHINE = (
    '(regexp("no space left|disk quota", HoldReason, "i")'
    ' || (HoldReasonCode == 45 && !regexp("://", HoldReason)))'
)
_ARCH = {"": "X86_64", "arm64": "aarch64"}
_LINE = re.compile(r"[A-Za-z+][A-Za-z0-9_.+]* = [^\x00-\x1f\x7f\\{}]{1,5000}")
_PART = re.compile(r"[0-9a-z][0-9a-z.,+-]{0,39}")
_DAG_JOBS = "sweep"
"""The category of all nodes, of which so many run at once."""


def format_common(limits: JobLimits, lines: Sequence[str] = ()) -> str:
    """The text of sweep.sub; `lines` are the site's own submit commands (`+WantGPULab = true`).

    Raises UsageError for a line that could mean something else in a submit file.
    """
    wrong = next((line for line in lines if not _LINE.fullmatch(line)), None)
    if wrong is not None:
        raise UsageError(
            "submit-command-invalid", f"{wrong!r} is not a submit file line", hint="write NAME = VALUE"
        )
    return "".join(f"{line}\n" for line in (*_description(limits), *lines))


def format_dag(sweep: SweepSpec) -> str:
    """The text of sweep.dag. Raises UsageError for a value that could mean something else there."""
    names = [node.name for node in sweep.nodes]
    if len(set(names)) != len(names):
        raise UsageError(
            "node-name-duplicate", "two nodes of one sweep have the same name", hint="rename one"
        )
    arch = _has_other_processors(sweep)
    text = "\n".join(_format_node(node, sweep.limits, arch=arch) for node in sweep.nodes)
    if not sweep.at_once:
        return text
    every = "".join(f"CATEGORY {node.name} {_DAG_JOBS}\n" for node in sweep.nodes)
    return f"{text}\n{every}MAXJOBS {_DAG_JOBS} {sweep.at_once}\n"


def _description(limits: JobLimits) -> tuple[str, ...]:
    """What all jobs share. `$(...)` are the VARS of a node."""
    inputs = (KIT, EXPECTATIONS, *(f"../../{name}" for name in (SUITE, INSIDE, EMPTY)))
    return (
        "universe = container",
        "container_image = $(image)",
        "executable = $(python)",
        "transfer_executable = false",
        f"arguments = -I -B {INSIDE}",
        f"initialdir = {NODES}/$(node)",
        "should_transfer_files = YES",
        "when_to_transfer_output = ON_EXIT",
        f"transfer_input_files = {', '.join(inputs)}",
        # A list, not "all that is new": what an image writes must not lie where the log and the question do.
        f"transfer_output_files = {RESULT}",
        f"max_transfer_output_mb = {LARGEST_OUTPUT_MB}",
        "output = out",
        "error = err",
        f"log = {JOB_LOG}",
        f"ulog_execute_attrs = {', '.join(EXECUTE_ATTRIBUTES)}",
        f"request_cpus = {CPUS}",
        "request_memory = $(memory)MB",
        "request_disk = $(disk)MB",
        "request_gpus = 1",
        f'require_gpus = $(gpu) && regexp("{NO_CUDA}", DeviceName, "i") =!= true',
        f"allowed_execute_duration = {_seconds(limits.run)}",
        f"job_lease_duration = {_seconds(LEASE)}",
        f"periodic_remove = {_removal(limits)}",
        "notification = never",
    )


def _removal(limits: JobLimits) -> str:
    """Ends what would hang a DAG: too long idle, held, running, or started again and again without an end.

    46 and 47 hold a job whose time is over, and nobody can mend that. `allowed_execute_duration` alone is not
    enough: a job that starts in the very second in which its shadow does is never held by it (HTCondor takes
    the date for one of an earlier start; tried with 23.9, read in 25). And no transfer has an end of its own.
    What only another machine can do better is not held: a full disk, and containers that do not start.
    """
    run, stay = _seconds(limits.run), _seconds(limits.run + TRANSFERS)
    began = "JobCurrentStartExecutingDate"
    return (
        f"(JobStatus == 1 && time() - EnteredCurrentStatus > {_seconds(limits.idle)})"
        f" || (JobStatus == 1 && (NumJobStarts >= {MOST_STARTS} || NumShadowStarts >= {MOST_SHADOWS}))"
        f" || (JobStatus == 2 && {began} >= ShadowBday && time() - {began} > {run})"
        f" || (JobStatus != 1 && JobStatus != 5 && time() - EnteredCurrentStatus > {stay})"
        f" || (JobStatus == 5 && time() - EnteredCurrentStatus > {_seconds(limits.held)})"
        " || (JobStatus == 5 && (HoldReasonCode == 46 || HoldReasonCode == 47))"
        f" || (JobStatus == 5 && {_FAILED_MACHINE})"
    )


def _seconds(time: timedelta) -> int:
    return max(1, round(time.total_seconds()))


def format_gpu(node: SweepNode) -> str:
    """`require_gpus` of a node. A slice (MIG) is another class, each profile one of its own."""
    part = _checked(node.part, _PART, "slice of a GPU") if node.part else ""
    part = part.replace(".", "[.]").replace("+", "[+]")
    named = f'regexp("(^|[^0-9a-z.]){part}([^0-9a-z.,+-].*)?$", DeviceName, "i")'
    whole = f" && {named if part else WHOLE_GPU_EXPRESSION}"
    floor = f" && DriverVersion >= {_checked(node.cuda, _CUDA, 'version of CUDA')}" if node.cuda else ""
    return f"Capability == {_checked(node.capability, _CAPABILITY, 'compute capability')}{floor}{whole}"


def _has_other_processors(sweep: SweepSpec) -> bool:
    """Whether jobs must say theirs: of others than the machine's that submits, HTCondor would match none."""
    return any(node.processor for node in sweep.nodes)


def _format_node(node: SweepNode, limits: JobLimits, *, arch: bool) -> str:
    name = checked_name(node.name)
    image = _checked(node.image.address, _IMAGE[node.image.kind], f"address of a {node.image.kind} image")
    values = {
        "node": name,
        "image": image,
        "python": _checked(node.python, _PYTHON, "path of a Python"),
        "gpu": format_gpu(node),
        "memory": str(_megabytes(node.memory)),
        "disk": str(_megabytes(node.disk)),
        **({"processor": _ARCH[node.processor]} if arch else {}),
    }
    told = " ".join(f'{key}="{_quoted(value)}"' for key, value in values.items())
    return (
        f"JOB {name} {NODES}/{name}/{JOB}\n"
        f"VARS {name} {told}\n"
        f"RETRY {name} {limits.retries}\n"
        f"SCRIPT POST {name} {POST} {name} $RETURN $JOBID $RETRY $MAX_RETRIES\n"
    )


def _checked(value: str, allowed: re.Pattern[str], what: str) -> str:
    if not allowed.fullmatch(value):
        raise UsageError(
            "dag-value-invalid",
            f"{value!r} cannot be the {what} in a DAG",
            hint=f"use a value that matches {allowed.pattern}",
        )
    return value


def _quoted(value: str) -> str:
    """As VARS takes it. No value has a backslash."""
    return value.replace('"', '\\"')


def _megabytes(size: int) -> int:
    """HTCondor's MB are MiB; rounded up."""
    return max(1, -(-size // (1 << 20)))


def site_lines(sweep: SweepSpec, folder: Path) -> tuple[str, ...]:
    """The site's own submit commands, and what the place of its images asks for. Pure.

    A job is as long as its suite may be, not as it could be held on to. A .sif that does not lie in the
    sweep's own folder is in one that the machines share, so it is not sent through the access point.
    """
    site = replace(find_site(sweep.site), own=sweep.own)
    longest = min(sweep.limits.run, timedelta(seconds=max(node.timeout for node in sweep.nodes)))
    needs = {need for node in sweep.nodes for need in site.requirements(node.image.address)}
    needs |= {'(Arch == "$(processor)")'} if _has_other_processors(sweep) else set()
    wanted, avoided = machine_expressions(sweep.patterns)
    needs |= {f'regexp("{wanted}", TARGET.Machine, "i")'} if wanted else set()
    needs |= {f'!regexp("{avoided}", TARGET.Machine, "i")'} if avoided else set()
    lines = [line for line in site.lines(longest) if not line.startswith("allowed_execute_duration")]
    lines.append(f"requirements = {' && '.join(('$(elsewhere)', '$(first)', *sorted(needs)))}")
    images = {node.image for node in sweep.nodes}
    if all(one.kind is ImageKind.SIF and folder not in Path(one.address).parents for one in images):
        lines.append("transfer_container = false")
    return tuple(lines)


# --- files ---------------------------------------------------------------------------------------


def check_dag_directory(folder: Path) -> None:
    """Raises UsageError for a folder that a DAG could not name, before anything is made for it."""
    if not re.fullmatch(_PATH, str(folder.resolve())):
        raise UsageError(
            "sweep-folder-invalid",
            f"{str(folder)[:200]!r} cannot be the directory of a sweep in HTCondor",
            hint="use another --dir DIR with only letters, digits, '-', '_', '.', '+' and '@'",
        )


def make_suite_tar() -> bytes:
    """The suite and what of a kit runs it, uncompressed; the same bytes every time."""
    files = {f"suite/{name}": data for name, data in read_suite().items()}
    files |= {f"kit/{name}": (KIT_FOLDER / name).read_bytes() for name in CARRIED}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(files[name]), 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    return packed.getvalue()


def write_sweep(folder: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Writes all of a sweep but sweep.json; sweep.dag is last, so with it the folder is whole.

    `texts` are per node kit.json and expectations.json. May be called again for a folder that is not whole.
    Raises UsageError where the folder cannot be written.
    """
    dag, common = format_dag(sweep), format_common(sweep.limits, site_lines(sweep, folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUITE).write_bytes(make_suite_tar())
        (folder / EMPTY).mkdir(parents=True, exist_ok=True)
        for program in (INSIDE, POST):
            (folder / program).write_bytes((PROGRAMS / program).read_bytes())
        (folder / POST).chmod(0o755)
        machines = {one.capability: one.machines for one in sweep.machines if not one.driver}
        by_driver = {(one.capability, one.driver): one.machines for one in sweep.machines}
        (folder / MACHINES).write_text(json.dumps(machines, indent=1) + "\n", encoding="ascii")
        (folder / COMMON).write_text(common, encoding="ascii")
        write_nodes(folder, sweep, texts)
        faults = parse_faults(read(folder / FAULT_FILES, LARGEST_LOG))
        jobs: dict[tuple[str, str, bool], str] = {}
        for node in sweep.nodes:
            place = node.row, node.first, node.only
            if place not in jobs:
                first = by_driver[node.row, node.first] if node.first else ()
                bad = bad_machines(faults, list(first if node.only else machines.get(node.row, ())))
                good = [name for name in first if name not in bad]
                jobs[place] = format_job(NodePlacement(node.row, good, node.only), bad)
            (node_directory(folder, node.name) / JOB).write_text(jobs[place], encoding="ascii")
        beside = folder / f".{DAG}-{os.getpid()}"
        beside.write_text(dag, encoding="ascii")
        beside.replace(folder / DAG)
    except OSError as error:
        raise UsageError(
            *os_problem("write", error.filename or folder, error), hint="use another directory: --dir DIR"
        ) from error
