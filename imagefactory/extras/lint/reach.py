"""Which GPUs of an inventory a job of a submit file can get, and what keeps it from the others. Pure.

A job gets a GPU where `require_gpus` and the bounds of `gpus_*` hold for that GPU, `requirements` for its
machine, the machine is large enough and has what the image needs, and its START takes the job. What
machines have at most counts, not what is free now. An attribute that a machine has not is undefined there,
and does not match: that is HTCondor's rule. Where the inventory alone does not tell it (START asks who
submits), the GPU is counted and said to be unsure.
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
from imagefactory.schedulers.htcondor.ads import is_inventory_attribute
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import MB, parse_size

# --- What a job of a submit file asks of machines and GPUs. Pure
# What becomes of commands was seen with 23.9's `condor_submit -dry-run`: `gpus_minimum_runtime = 12.1` is
# `MaxSupportedVersion >= 12010`, and so is 12010; units count behind a plain number alone; any other bound
# is
# an expression, and compared as it is. A bound is dropped without a word where `require_gpus` names what it
# compares.


BOUNDS = {
    "gpus_minimum_capability": ("Capability", ">="),
    "gpus_maximum_capability": ("Capability", "<="),
    "gpus_minimum_memory": ("GlobalMemoryMb", ">="),
    "gpus_minimum_runtime": ("MaxSupportedVersion", ">="),
}
"""Commands of condor_submit for GPUs, and what they compare."""
_LEAST_VERSION = 1000
"""As drivers tell CUDA 1.0."""
GPU_ATTRIBUTES = (
    "Id", "Capability", "DeviceName", "DeviceUuid", "DriverVersion", "MaxSupportedVersion", "NvidiaDriver",
    "GlobalMemoryMb", "DevicePciBusId", "ECCEnabled", "ClockMhz", "ComputeUnits", "CoresPerCU",
)  # fmt: skip
"""What condor_gpu_discovery tells of a GPU, with `-extra`. Inventories have the first eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a job asks of a machine. Memory and disk are bytes, 0 where nothing is asked.

    `gpu` holds for GPUs, `requirements` for machines; None where all do. `needs` are attributes of machines
    that must be true. `ad` is what machines are shown of the job. `faults` are (command, what is wrong).
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
    """What the jobs of one `queue` ask. What cannot be read is a fault, and as if it was not there."""
    reader = _RequestReader(jobs)
    memory, disk = reader.size("request_memory", MB), reader.size("request_disk", 1024)
    gpus = (reader.number("request_gpus") or 1) if jobs.asks_gpus else 0
    cpus = reader.number("request_cpus") or 1
    gpu = reader.gpu_expression() if gpus else None
    requirements = reader.expression("requirements", reader.cuda_version())
    asked: dict[str, Plain] = {
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
        ad={**asked, **reader.own()},
        faults=tuple(reader.faults),
    )


def cancelled(jobs: QueueStatement) -> tuple[str, ...]:
    """The bounds that condor_submit drops because `require_gpus` names what they compare."""
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
    """Reads the commands of one `queue`; what is wrong is kept, so that all of it can be told."""

    def __init__(self, jobs: QueueStatement) -> None:
        self.jobs = jobs
        self.faults: list[tuple[str, str]] = []

    def value(self, key: str) -> str:
        """Its value; empty where it is not set or where only the submission tells it."""
        if self.jobs.unknown(key):
            return ""
        return self.jobs.value(key)

    def number(self, key: str) -> int:
        text = self.value(key)
        found = _at_first(text) if text else 0
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 1e6:
            self.faults.append((key, f"'{text[:40]}' is not a number"))
            return 1
        return int(found)

    def size(self, key: str, unit: int) -> int:
        text = self.value(key)
        if not text:
            return 0
        if not (text.isascii() and text.isdigit()):
            with contextlib.suppress(UsageError):
                return parse_size(text)
        found = _at_first(text)
        if isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found < 1e15:
            return int(found * unit)
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
        own = self.expression("require_gpus")
        parts = [f"({own.text})"] if own else []
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
                what = f"'{text[:40]}' is compared as a plain number, which every GPU exceeds"
                self.faults.append((key, f"{what}: write only the version, such as 12.4"))
            else:
                parts.append(f"{name} {how} {number}")
        return parse_expression(" && ".join(parts)) if parts else None

    def own(self) -> dict[str, Plain]:
        """The job's own attributes, as far as the file alone tells them."""
        settings = self.jobs.settings.items()
        found = {
            key.removeprefix("my."): literal(self.jobs.value(one.key))
            for key, one in settings
            if key[:3] == "my."
        }
        return {key: value for key, value in found.items() if value is not None}

    def cuda_version(self) -> str:
        """condor_submit compares it with an attribute of old machines, in an encoding of its own."""
        text = self.value("cuda_version")
        found = re.fullmatch(r"([0-9]{1,2})(?:\.([0-9]{1,2}))?", text)
        return (
            f"{int(found[1]) * 1000 + int(found[2] or 0)} <= TARGET.CUDAMaxSupportedVersion" if found else ""
        )


def _at_first(text: str, own: Mapping[str, Plain] | None = None) -> Plain | None:
    """What an expression comes to before the job ran: of itself it knows no `MemoryUsage` then."""
    try:
        return parse_expression(text).value(make_ad(own or {}), make_ad({}))
    except UsageError:
        return None


def _bound(key: str, text: str, own: Mapping[str, Plain]) -> int | float | None:
    """The number that a bound compares with: capabilities as they are, MB, 12.1 as 12010."""
    if key == "gpus_minimum_memory":
        with contextlib.suppress(UsageError):
            return -(-parse_size(text) // MB)
    elif key == "gpus_minimum_runtime" and (
        version := re.fullmatch(r"([0-9]{1,3})(?:\.([0-9]{1,2}))?", text)
    ):
        return int(version[1]) * 1000 + int(version[2] or 0) * 10
    found = _at_first(text, own)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


_UNTOLD = GPU_ATTRIBUTES[8:]
_OF_THE_SUBMITTER = (
    "Owner", "User", "OsUser", "NTDomain", "SubmitterGroup", "AcctGroup", "AcctGroupUser", "AccountingGroup",
    "ProjectName", "ConcurrencyLimits", "GlobalJobId", "ClusterId", "ProcId", "QDate", "JobPrio", "NiceUser",
    "ImageSize", "DiskUsage", "NumJobStarts", "x509UserProxySubject", "x509UserProxyVOName", "WantDocker",
    "WantContainer", "WantDockerImage", "WantSIF", "WantSandboxImage",
)  # fmt: skip
"""What HTCondor adds to jobs and their files do not say: a START that asks for it may hold or not."""
UNDEFINED = "requirements is undefined there"
"""A cause, by which check.py looks for what no machine tells."""
_NEWEST_DRIVER: Mapping[str, Plain] = {
    "DriverVersion": 99.9,
    "MaxSupportedVersion": 99090,
    "NvidiaDriver": "9999.99",
}
"""What a GPU would tell of a driver that is newer than any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableGpu:
    """One GPU of a machine. `cause` says what keeps a job away, empty where it gets there.

    `unsure` names what the inventory does not tell, empty where all is known. `unasked`: the cause is that
    `require_gpus` or a bound leaves this GPU out.
    """

    machine: str
    gpu: PoolGpu
    cause: str = ""
    unsure: str = ""
    unasked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReachability:
    """All GPUs of an inventory, as one job sees them."""

    places: tuple[ReachableGpu, ...]

    @property
    def reached(self) -> tuple[ReachableGpu, ...]:
        return tuple(place for place in self.places if not place.cause)

    @property
    def causes(self) -> Mapping[str, int]:
        """How many GPUs each cause keeps away, the most first."""
        return dict(Counter(place.cause for place in self.places if place.cause).most_common())


def find_reach(asked: JobRequest, inventory: Inventory) -> JobReachability:
    """Every GPU of the inventory, with what keeps the job away from it."""
    starts = {text: _start(text) for text in dict.fromkeys(machine.start for machine in inventory.machines)}
    found = (
        place for machine in inventory.machines for place in _places(asked, machine, starts[machine.start])
    )
    return JobReachability(places=tuple(found))


def _start(text: str) -> ClassAdExpression | None:
    """None where it is not told, or is longer than any that is read here: then it is unsure."""
    try:
        return parse_expression(text) if text else None
    except UsageError:
        return None


def _places(
    asked: JobRequest, machine: PoolMachine, start: ClassAdExpression | None
) -> Iterator[ReachableGpu]:
    cause, unsure = _of_machine(asked, machine, start)
    of_gpus = [_of_gpu(asked, machine, gpu) for gpu in machine.gpus]
    fitting = sum(1 for why, _ in of_gpus if not why)
    for gpu, (why, which) in zip(machine.gpus, of_gpus, strict=True):
        few = f"it has fewer than {asked.gpus} such GPUs" if not why and fitting < asked.gpus else ""
        yield ReachableGpu(
            machine=machine.name,
            gpu=gpu,
            cause=why or few or cause,
            unsure=which or unsure,
            unasked=bool(why and asked.gpus),
        )


def _of_gpu(asked: JobRequest, machine: PoolMachine, gpu: PoolGpu) -> tuple[str, str]:
    if not asked.gpus:
        return "the job asks for no GPU", ""
    if asked.gpu is None:
        return "", ""
    ad = {**_named(asked.gpu, machine.attributes), **gpu_values(gpu)}
    job = make_ad(asked.ad)
    held = asked.gpu.holds(make_ad(ad), job)
    if held:
        return "", ""
    if held is None and (untold := _untold(asked.gpu, _UNTOLD, ad)):
        return "", untold
    if not asked.gpu.holds(make_ad({**ad, **_NEWEST_DRIVER}), job):
        return "its kind of GPU is not asked for", ""
    if untold := _untold(asked.gpu, tuple(_NEWEST_DRIVER), ad):
        return f"it tells no {untold}, which is asked for", ""
    return f"its driver{f' {gpu.driver}' if gpu.driver else f' for CUDA {gpu.cuda}'} is too old", ""


def gpu_values(gpu: PoolGpu) -> dict[str, Plain]:
    """The nested ad of a GPU, as far as an inventory tells it."""
    values: dict[str, Plain] = {
        "Id": gpu.id,
        "DeviceUuid": gpu.uuid.removeprefix("GPU-"),
        "DeviceName": gpu.name,
        "Capability": float(gpu.capability),
        "GlobalMemoryMb": gpu.memory // MB,
        "NvidiaDriver": gpu.driver,
    }
    if gpu.cuda:
        major, _, minor = gpu.cuda.partition(".")
        values["DriverVersion"] = float(gpu.cuda)
        values["MaxSupportedVersion"] = int(major) * 1000 + int(minor or 0) * 10
    return {name: value for name, value in values.items() if value not in ("", 0)}


def _of_machine(asked: JobRequest, machine: PoolMachine, start: ClassAdExpression | None) -> tuple[str, str]:
    """What keeps the job away from the whole machine, or what is not known of it."""
    has = {name.lower(): value for name, value in machine.attributes.items()}
    for name, amount, unit, word in (
        ("memory", asked.memory, MB, "memory"),
        ("disk", asked.disk, 1024, "disk"),
        ("cpus", asked.cpus, 1, "CPUs"),
    ):
        most = has.get(name)
        if isinstance(most, int | float) and not isinstance(most, bool) and most * unit < amount:
            return f"it has too little {word}" if unit > 1 else f"it has too few {word}", ""
    for need in asked.needs if has else ():
        if has.get(need.lower()) is not True:
            return f"it has no {need}", ""
    wanted = [one for one in (asked.requirements, start) if one is not None]
    mine = make_ad({name: value for one in wanted for name, value in _named(one, machine.attributes).items()})
    job = make_ad(asked.ad)
    unsure = next(iter(asked.needs), "") if not has else ""
    if asked.requirements is not None:
        held = asked.requirements.holds(job, mine)
        if not held:
            changing = "" if held is False else _changing(asked.requirements, has)
            if not changing:
                return "requirements does not hold" if held is False else UNDEFINED, ""
            unsure = changing
    if machine.start:
        held = start.holds(mine, job) if start is not None else None
        if held is False and not (start and start.names_any(*_OF_THE_SUBMITTER)):
            return "its START takes no such job", ""
        unsure = unsure or ("" if held else "START")
    return "", unsure


def _named(expression: ClassAdExpression, attributes: Mapping[str, Plain]) -> dict[str, Plain]:
    names = {name.lower() for name in expression.names}
    return {name: value for name, value in attributes.items() if name.lower() in names}


def _untold(expression: ClassAdExpression, names: tuple[str, ...], ad: Mapping[str, Plain]) -> str:
    """The first of `names` that the expression wants and the ad has not."""
    has = {name.lower() for name in ad}
    return next((name for name in names if name.lower() not in has and expression.names_any(name)), "")


def _changing(expression: ClassAdExpression, has: Mapping[str, Plain]) -> str:
    """The first attribute that inventories do not tell; the first of all where this one tells none."""
    names = [name for name in expression.names if name.lower() not in has]
    return next((name for name in names if not has or not is_inventory_attribute(name)), "")
