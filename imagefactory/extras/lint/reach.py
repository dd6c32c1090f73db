"""Find the GPUs of an inventory that a job can get, and why it cannot get the others. Pure functions.

The job must match a GPU in `require_gpus` and the `gpus_*` bounds, and its machine in `requirements`. The
machine must be large enough, provide what the image requires, and its START must accept the job. Total
resources count, not free ones. As in HTCondor, a missing attribute is undefined and does not match. If the
inventory cannot decide (START depends on the user), the GPU is counted and marked as unsure.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.extras.lint.classads import ClassAdExpression, Plain, literal, make_ad, parse_expression
from imagefactory.extras.lint.reader import QueueStatement
from imagefactory.gpu.capability import parse_capability
from imagefactory.schedulers.htcondor.ads import is_inventory_attribute
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import MB, parse_size

# --- The requirements of a job for machines and GPUs. Pure
# Observed with `condor_submit -dry-run` of 23.9: `gpus_minimum_runtime = 12.1` becomes `MaxSupportedVersion
# >= 12010`, and so does 12010. A unit counts only after a plain number. Any other bound is an expression and
# is compared as it is. A bound is silently dropped if `require_gpus` names the same attribute.


BOUNDS = {
    "gpus_minimum_capability": ("Capability", ">="),
    "gpus_maximum_capability": ("Capability", "<="),
    "gpus_minimum_memory": ("GlobalMemoryMb", ">="),
    "gpus_minimum_runtime": ("MaxSupportedVersion", ">="),
}
"""The GPU bounds of condor_submit: attribute and comparison."""
_LEAST_VERSION = 1000
"""CUDA 1.0 in the format of drivers."""
GPU_ATTRIBUTES = (
    "Id", "Capability", "DeviceName", "DeviceUuid", "DriverVersion", "MaxSupportedVersion", "NvidiaDriver",
    "GlobalMemoryMb", "DevicePciBusId", "ECCEnabled", "ClockMhz", "ComputeUnits", "CoresPerCU",
)  # fmt: skip
"""GPU attributes of `condor_gpu_discovery -extra`. Inventories contain the first eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The resources that a job requests. Memory and disk are in bytes, 0 if not requested.

    `gpu` is the condition for GPUs, `requirements` for machines; None matches all. `needs` are machine
    attributes that must be true. `ad` are the job attributes that machines see. `faults` are (command,
    problem).
    """

    gpus: int
    cpus: int
    memory: int
    disk: int
    gpu: ClassAdExpression | None
    requirements: ClassAdExpression | None
    needs: tuple[str, ...]
    ad: Mapping[str, Plain]
    faults: tuple[tuple[str, str], ...]


def read_request(jobs: QueueStatement, needs: tuple[str, ...]) -> JobRequest:
    """Return the request of one `queue`. An unreadable command becomes a fault and is otherwise ignored."""
    reader = _RequestReader(jobs)
    memory, disk = reader.size("request_memory", MB), reader.size("request_disk", 1024)
    gpus = (reader.number("request_gpus") or 1) if jobs.requests_gpus else 0
    cpus = reader.number("request_cpus") or 1
    gpu = reader.gpu_expression() if gpus else None
    requirements = reader.expression("requirements", reader.cuda_version())
    ad: dict[str, Plain] = {
        "JobUniverse": 5,
        "RequestGPUs": gpus,
        "RequestCpus": cpus,
        "RequestMemory": memory // MB,
        "RequestDisk": disk // 1024,
    }
    return JobRequest(
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        disk=disk,
        gpu=gpu,
        requirements=requirements,
        needs=needs,
        ad={**ad, **reader.own()},
        faults=tuple(reader.faults),
    )


def cancelled(jobs: QueueStatement) -> tuple[str, ...]:
    """Return the bounds that condor_submit drops because `require_gpus` names the same attribute."""
    try:
        expression = parse_expression(jobs.value("require_gpus")) if "require_gpus" in jobs.settings else None
    except UsageError:
        return ()
    if expression is None:
        return ()
    return tuple(
        key for key, (name, _) in BOUNDS.items() if key in jobs.settings and expression.names_any(name)
    )


class _RequestReader:
    """A reader of the commands of one `queue`, which collects all faults."""

    def __init__(self, jobs: QueueStatement) -> None:
        self.jobs = jobs
        self.faults: list[tuple[str, str]] = []

    def value(self, key: str) -> str:
        """Return the value, "" if it is not set or known only at submission."""
        if self.jobs.unknown(key):
            return ""
        return self.jobs.value(key)

    def number(self, key: str) -> int:
        text = self.value(key)
        value = _before_first_run(text) if text else 0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            self.faults.append((key, f"'{text[:40]}' is not a number"))
            return 1
        return int(value)

    def size(self, key: str, unit: int) -> int:
        text = self.value(key)
        if not text:
            return 0
        if not (text.isascii() and text.isdigit()):
            with contextlib.suppress(UsageError):
                return parse_size(text)
        value = _before_first_run(text)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15:
            return int(value * unit)
        self.faults.append((key, f"'{text[:40]}' is not a size"))
        return 0

    def expression(self, key: str, more: str = "") -> ClassAdExpression | None:
        text = self.value(key)
        both = f"({text}) && {more}" if text and more else text or more
        try:
            return parse_expression(both) if both else None
        except UsageError as error:
            self.faults.append((key, f"{error.message}; {error.hint}"))
            return None

    def gpu_expression(self) -> ClassAdExpression | None:
        expression = self.expression("require_gpus")
        parts = [f"({expression.text})"] if expression else []
        dropped = cancelled(self.jobs)
        for key, (name, how) in BOUNDS.items():
            text = self.value(key)
            if not text or key in dropped or (key == "gpus_minimum_memory" and text == "0"):
                continue
            number = _bound(key, text, self.own())
            if number is None:
                self.faults.append(
                    (key, f"'{text[:40]}' is not a {'size' if 'memory' in key else 'version'}")
                )
            elif key == "gpus_minimum_runtime" and number < _LEAST_VERSION:
                message = f"'{text[:40]}' is compared as a plain number, which every GPU exceeds"
                self.faults.append((key, f"{message}: write only the version, such as 12.4"))
            else:
                parts.append(f"{name} {how} {number}")
        return parse_expression(" && ".join(parts)) if parts else None

    def own(self) -> dict[str, Plain]:
        """Return the custom attributes of the job that the file defines as constants."""
        settings = self.jobs.settings.items()
        values = {
            key.removeprefix("my."): literal(self.jobs.value(setting.key))
            for key, setting in settings
            if key[:3] == "my."
        }
        return {key: value for key, value in values.items() if value is not None}

    def cuda_version(self) -> str:
        """Return the condition for `cuda_version`, which condor_submit compares with an outdated
        attribute.
        """
        text = self.value("cuda_version")
        match = re.fullmatch(r"([0-9]{1,2})(?:\.([0-9]{1,2}))?", text)
        return (
            f"{int(match[1]) * 1000 + int(match[2] or 0)} <= TARGET.CUDAMaxSupportedVersion" if match else ""
        )


def _before_first_run(text: str, job_values: Mapping[str, Plain] | None = None) -> Plain | None:
    """Return the value before the first run, when the job has no `MemoryUsage` yet."""
    try:
        return parse_expression(text).value(make_ad(job_values or {}), make_ad({}))
    except UsageError:
        return None


def _bound(key: str, text: str, job_values: Mapping[str, Plain]) -> int | float | None:
    """Return the number to compare with: a capability, MB, or 12010 for 12.1."""
    if key == "gpus_minimum_memory":
        with contextlib.suppress(UsageError):
            return -(-parse_size(text) // MB)
    elif key == "gpus_minimum_runtime" and (
        version := re.fullmatch(r"([0-9]{1,3})(?:\.([0-9]{1,2}))?", text)
    ):
        return int(version[1]) * 1000 + int(version[2] or 0) * 10
    value = _before_first_run(text, job_values)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


_NOT_IN_INVENTORY = GPU_ATTRIBUTES[8:]
_SUBMITTER_ATTRIBUTES = (
    "Owner", "User", "OsUser", "NTDomain", "SubmitterGroup", "AcctGroup", "AcctGroupUser", "AccountingGroup",
    "ProjectName", "ConcurrencyLimits", "GlobalJobId", "ClusterId", "ProcId", "QDate", "JobPrio", "NiceUser",
    "ImageSize", "DiskUsage", "NumJobStarts", "x509UserProxySubject", "x509UserProxyVOName", "WantDocker",
    "WantContainer", "WantDockerImage", "WantSIF", "WantSandboxImage",
)  # fmt: skip
"""Attributes that HTCondor adds to jobs. A START that uses one may accept the job or not."""
UNDEFINED = "requirements is undefined there"
"""A cause for which check.py searches attributes that no machine has."""
_NEWEST_DRIVER: Mapping[str, Plain] = {
    "DriverVersion": 99.9,
    "MaxSupportedVersion": 99090,
    "NvidiaDriver": "9999.99",
}
"""The attributes of a hypothetical driver that is newer than all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableGpu:
    """One GPU of a machine. `cause` is why the job cannot get it, empty if it can.

    `unsure` is missing information in the inventory, empty if there is none. `unasked` means that
    `require_gpus` or a bound excludes this GPU.
    """

    machine: str
    gpu: PoolGpu
    cause: str = ""
    unsure: str = ""
    unasked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReachability:
    """All GPUs of an inventory for one job."""

    places: tuple[ReachableGpu, ...]

    @property
    def reached(self) -> tuple[ReachableGpu, ...]:
        return tuple(gpu for gpu in self.places if not gpu.cause)

    @property
    def causes(self) -> Mapping[str, int]:
        """Return the number of GPUs for each cause, the largest first."""
        return dict(Counter(gpu.cause for gpu in self.places if gpu.cause).most_common())


def find_reach(request: JobRequest, inventory: Inventory) -> JobReachability:
    """Return all GPUs of the inventory, each with the reason why the job cannot get it."""
    starts = {text: _start(text) for text in dict.fromkeys(machine.start for machine in inventory.machines)}
    places = (
        gpu for machine in inventory.machines for gpu in _places(request, machine, starts[machine.start])
    )
    return JobReachability(places=tuple(places))


def _start(text: str) -> ClassAdExpression | None:
    """Return the START expression, None (unsure) if it is unknown or too long."""
    try:
        return parse_expression(text) if text else None
    except UsageError:
        return None


def _places(
    request: JobRequest, machine: PoolMachine, start: ClassAdExpression | None
) -> Iterator[ReachableGpu]:
    cause, unsure = _of_machine(request, machine, start)
    of_gpus = [_of_gpu(request, machine, gpu) for gpu in machine.gpus]
    fitting = sum(1 for reason, _ in of_gpus if not reason)
    for gpu, (reason, which) in zip(machine.gpus, of_gpus, strict=True):
        few = f"it has fewer than {request.gpus} such GPUs" if not reason and fitting < request.gpus else ""
        yield ReachableGpu(
            machine=machine.name,
            gpu=gpu,
            cause=reason or few or cause,
            unsure=which or unsure,
            unasked=bool(reason and request.gpus),
        )


def _of_gpu(request: JobRequest, machine: PoolMachine, gpu: PoolGpu) -> tuple[str, str]:
    if not request.gpus:
        return "the job asks for no GPU", ""
    if request.gpu is None:
        return "", ""
    ad = {**_named(request.gpu, machine.attributes), **gpu_values(gpu)}
    job = make_ad(request.ad)
    matches = request.gpu.holds(make_ad(ad), job)
    if matches:
        return "", ""
    if matches is None and (attribute := _missing_attribute(request.gpu, _NOT_IN_INVENTORY, ad)):
        return "", attribute
    if not request.gpu.holds(make_ad({**ad, **_NEWEST_DRIVER}), job):
        return "the job does not request its type of GPU", ""
    if attribute := _missing_attribute(request.gpu, tuple(_NEWEST_DRIVER), ad):
        return f"its ad has no {attribute}, which is requested", ""
    return f"its driver{f' {gpu.driver}' if gpu.driver else f' for CUDA {gpu.cuda}'} is too old", ""


def gpu_values(gpu: PoolGpu) -> dict[str, Plain]:
    """Return the nested ad of a GPU with the attributes that the inventory has."""
    capability = parse_capability(gpu.capability) if gpu.capability else None
    values: dict[str, Plain] = {
        "Id": gpu.id,
        "DeviceUuid": gpu.uuid.removeprefix("GPU-"),
        "DeviceName": gpu.name,
        "Capability": float(f"{capability.major}.{capability.minor}") if capability else 0,
        "GlobalMemoryMb": gpu.memory // MB,
        "NvidiaDriver": gpu.driver,
    }
    if gpu.cuda:
        major, _, minor = gpu.cuda.partition(".")
        values["DriverVersion"] = float(gpu.cuda)
        values["MaxSupportedVersion"] = int(major) * 1000 + int(minor or 0) * 10
    return {name: value for name, value in values.items() if value not in ("", 0)}


def _of_machine(
    request: JobRequest, machine: PoolMachine, start: ClassAdExpression | None
) -> tuple[str, str]:
    """Return why the job cannot get the machine, or which information about it is missing."""
    has = {name.lower(): value for name, value in machine.attributes.items()}
    for name, amount, unit, word in (
        ("memory", request.memory, MB, "memory"),
        ("disk", request.disk, 1024, "disk"),
        ("cpus", request.cpus, 1, "CPUs"),
    ):
        most = has.get(name)
        if isinstance(most, int | float) and not isinstance(most, bool) and most * unit < amount:
            return f"it has too little {word}" if unit > 1 else f"it has too few {word}", ""
    for need in request.needs if has else ():
        if has.get(need.lower()) is not True:
            return f"it has no {need}", ""
    expressions = [expression for expression in (request.requirements, start) if expression is not None]
    mine = make_ad(
        {
            name: value
            for expression in expressions
            for name, value in _named(expression, machine.attributes).items()
        }
    )
    job = make_ad(request.ad)
    unsure = next(iter(request.needs), "") if not has else ""
    if request.requirements is not None:
        matches = request.requirements.holds(job, mine)
        if not matches:
            changing = "" if matches is False else _changing(request.requirements, has)
            if not changing:
                return "requirements is false there" if matches is False else UNDEFINED, ""
            unsure = changing
    if machine.start:
        matches = start.holds(mine, job) if start is not None else None
        if matches is False and not (start and start.names_any(*_SUBMITTER_ATTRIBUTES)):
            return "its START takes no such job", ""
        unsure = unsure or ("" if matches else "START")
    return "", unsure


def _named(expression: ClassAdExpression, attributes: Mapping[str, Plain]) -> dict[str, Plain]:
    names = {name.lower() for name in expression.names}
    return {name: value for name, value in attributes.items() if name.lower() in names}


def _missing_attribute(expression: ClassAdExpression, names: tuple[str, ...], ad: Mapping[str, Plain]) -> str:
    """Return the first of `names` that the expression uses and the ad lacks."""
    has = {name.lower() for name in ad}
    return next((name for name in names if name.lower() not in has and expression.names_any(name)), "")


def _changing(expression: ClassAdExpression, has: Mapping[str, Plain]) -> str:
    """Return the first attribute that inventories do not have. If they have all, return the first one."""
    names = [name for name in expression.names if name.lower() not in has]
    return next((name for name in names if not has or not is_inventory_attribute(name)), "")
