"""Write a sweep for HTCondor: one DAG with one description for all jobs, and their files.

DIR/sweep.dag                     per node JOB, VARS, RETRY and SCRIPT POST; the limit of jobs at the same
time DIR/sweep.sub                     the submit commands that all jobs share DIR/machines.json the pool's
machines by capability DIR/faults                        machines that failed jobs, also in the days before;
post.py appends lines DIR/suite.tar, inside.py          the suite, and the program that runs it with the
image's Python, for every job DIR/post.py                       DAGMan's POST script DIR/nodes/<node>/
job.sub, which post.py rewrites for each retry; kit.json,
                                  expectations.json, HTCondor's job.log, out and err, and result/

DAGMan must be started in DIR. Sources: HTCondor manual, "DAGMan" and condor_submit(1).
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
"""Attributes of the slot that the log of a job records, to identify its GPU."""

NO_CUDA = "amd|instinct|radeon|gfx"
"""Names of GPUs with a Capability but without CUDA: condor_gpu_discovery reports the HIP version for them."""
LARGEST_OUTPUT_MB = 16
LEASE = timedelta(minutes=10)
"""The time for which a job waits for an unreachable machine before it restarts (HTCondor's default: 40
minutes).
"""
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
"""The category of all nodes, which limits how many jobs run at the same time."""


def format_common(limits: JobLimits, lines: Sequence[str] = ()) -> str:
    """Return the text of sweep.sub. `lines` are submit commands of the site (`+WantGPULab = true`).

    Raises UsageError for a line that could have another meaning in a submit file.
    """
    wrong = next((line for line in lines if not _LINE.fullmatch(line)), None)
    if wrong is not None:
        raise UsageError(
            "submit-command-invalid", f"{wrong!r} is not a submit file line", hint="write NAME = VALUE"
        )
    return "".join(f"{line}\n" for line in (*_description(limits), *lines))


def format_dag(sweep: SweepSpec) -> str:
    """Return the text of sweep.dag. Raises UsageError for a value that could have another meaning there."""
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
    """Return the commands that all jobs share. `$(...)` are VARS of a node."""
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
        # A list, not all new files: an image must not write where the log and the kit are.
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
    """Return the condition that removes a job which would block a DAG.

    Such a job was idle, held or running for too long, or restarted again and again. Codes 46 and 47 hold a
    job whose time is over, which a person cannot fix. `allowed_execute_duration` is not enough: HTCondor
    never holds a job that starts in the same second as its shadow (it takes the date for that of an earlier
    start; tested with 23.9, read in 25), and transfers have no limit. A job is removed immediately if only
    another machine can help: the disk is full, or containers do not start.
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
    """Return `require_gpus` of a node. Each MIG profile is a separate class."""
    part = _checked(node.part, _PART, "slice of a GPU") if node.part else ""
    part = part.replace(".", "[.]").replace("+", "[+]")
    profile = f'regexp("(^|[^0-9a-z.]){part}([^0-9a-z.,+-].*)?$", DeviceName, "i")'
    whole = f" && {profile if part else WHOLE_GPU_EXPRESSION}"
    floor = f" && DriverVersion >= {_checked(node.cuda, _CUDA, 'version of CUDA')}" if node.cuda else ""
    return f"Capability == {_checked(node.capability, _CAPABILITY, 'compute capability')}{floor}{whole}"


def _has_other_processors(sweep: SweepSpec) -> bool:
    """Return whether jobs must set their architecture: by default, HTCondor matches only that of the access
    point.
    """
    return any(node.processor for node in sweep.nodes)


def _format_node(node: SweepNode, limits: JobLimits, *, arch: bool) -> str:
    name = checked_name(node.name)
    values = {
        "node": name,
        "image": _checked(
            node.image.address, _IMAGE[node.image.kind], f"address of a {node.image.kind} image"
        ),
        "python": _checked(node.python, _PYTHON, "path of a Python"),
        "gpu": format_gpu(node),
        "memory": str(_megabytes(node.memory)),
        "disk": str(_megabytes(node.disk)),
        **({"processor": _ARCH[node.processor]} if arch else {}),
    }
    # VARS escapes quotes; no value has a backslash.
    macros = " ".join(f'{key}="{_quoted(value)}"' for key, value in values.items())
    return (
        f"JOB {name} {NODES}/{name}/{JOB}\n"
        f"VARS {name} {macros}\n"
        f"RETRY {name} {limits.retries}\n"
        f"SCRIPT POST {name} {POST} {name} $RETURN $JOBID $RETRY $MAX_RETRIES\n"
    )


def _checked(value: str, allowed: re.Pattern[str], value_name: str) -> str:
    if not allowed.fullmatch(value):
        raise UsageError(
            "dag-value-invalid",
            f"{value!r} is not valid as the {value_name} in a DAG",
            hint=f"use a value that matches {allowed.pattern}",
        )
    return value


def _quoted(value: str) -> str:
    return value.replace('"', '\\"')


def _megabytes(size: int) -> int:
    """Return a size in MB, rounded up. A MB is a MiB in HTCondor."""
    return max(1, -(-size // (1 << 20)))


def site_lines(sweep: SweepSpec, directory: Path) -> tuple[str, ...]:
    """Return the submit commands of the site, and those that the location of the images requires. Pure.

    The length of a job is the time limit of its suite, without time on hold. A .sif outside the directory of
    the sweep is on a shared file system, so it is not transferred through the access point.
    """
    site = replace(find_site(sweep.site), own=sweep.own)
    longest = min(sweep.limits.run, timedelta(seconds=max(node.timeout for node in sweep.nodes)))
    needs = {need for node in sweep.nodes for need in site.requirements(node.image.address)}
    needs |= {'(Arch == "$(processor)")'} if _has_other_processors(sweep) else set()
    selected, avoided = machine_expressions(sweep.patterns)
    needs |= {f'regexp("{selected}", TARGET.Machine, "i")'} if selected else set()
    needs |= {f'!regexp("{avoided}", TARGET.Machine, "i")'} if avoided else set()
    lines = [line for line in site.lines(longest) if not line.startswith("allowed_execute_duration")]
    lines.append(f"requirements = {' && '.join(('$(elsewhere)', '$(first)', *sorted(needs)))}")
    images = {node.image for node in sweep.nodes}
    if all(image.kind is ImageKind.SIF and directory not in Path(image.address).parents for image in images):
        lines.append("transfer_container = false")
    return tuple(lines)


def check_dag_directory(directory: Path) -> None:
    """Raise UsageError for a directory that a DAG cannot contain, before any file is created."""
    if not re.fullmatch(_PATH, str(directory.resolve())):
        raise UsageError(
            "sweep-folder-invalid",
            f"HTCondor does not support the sweep directory {str(directory)[:200]!r}",
            hint="use another --dir DIR with only letters, digits, '-', '_', '.', '+' and '@'",
        )


def make_suite_tar() -> bytes:
    """Return an uncompressed archive of the suite and of the kit files that run it.

    Its bytes are reproducible.
    """
    files = {f"suite/{name}": data for name, data in read_suite().items()}
    files |= {f"kit/{name}": (KIT_FOLDER / name).read_bytes() for name in CARRIED}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(files[name]), 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    return packed.getvalue()


def write_sweep(directory: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write all files of a sweep except sweep.json. sweep.dag is the last one, so its presence shows
    completeness.

    `texts` are kit.json and expectations.json by node. An incomplete directory may be written again. Raises
    UsageError if the directory cannot be written.
    """
    dag, common = format_dag(sweep), format_common(sweep.limits, site_lines(sweep, directory))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / SUITE).write_bytes(make_suite_tar())
        (directory / EMPTY).mkdir(parents=True, exist_ok=True)
        for program in (INSIDE, POST):
            (directory / program).write_bytes((PROGRAMS / program).read_bytes())
        (directory / POST).chmod(0o755)
        machines = {row.capability: row.machines for row in sweep.machines if not row.driver}
        by_driver = {(row.capability, row.driver): row.machines for row in sweep.machines}
        (directory / MACHINES).write_text(json.dumps(machines, indent=1) + "\n", encoding="ascii")
        (directory / COMMON).write_text(common, encoding="ascii")
        write_nodes(directory, sweep, texts)
        faults = parse_faults(read(directory / FAULT_FILES, LARGEST_LOG))
        jobs: dict[tuple[str, str, bool], str] = {}
        for node in sweep.nodes:
            job_directory = node.row, node.first, node.only
            if job_directory not in jobs:
                first = by_driver[node.row, node.first] if node.first else ()
                bad = bad_machines(faults, list(first if node.only else machines.get(node.row, ())))
                good = [name for name in first if name not in bad]
                jobs[job_directory] = format_job(NodePlacement(node.row, good, node.only), bad)
            (node_directory(directory, node.name) / JOB).write_text(jobs[job_directory], encoding="ascii")
        temporary = directory / f".{DAG}-{os.getpid()}"
        temporary.write_text(dag, encoding="ascii")
        temporary.replace(directory / DAG)
    except OSError as error:
        raise UsageError(
            *os_problem("write", error.filename or directory, error), hint="use another directory: --dir DIR"
        ) from error
