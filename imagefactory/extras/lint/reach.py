"""Which GPUs of an inventory a job of a submit file can get, and what keeps it from the others. Pure.

A job gets a GPU where `require_gpus` and the bounds of `gpus_*` hold for that GPU, `requirements` for its
machine, the machine is large enough and has what the image needs, and its START takes the job. What
machines have at most counts, not what is free now. An attribute that a machine has not is undefined there,
and does not match: that is HTCondor's rule. Where the inventory alone does not tell it (START asks who
submits), the GPU is counted and said to be unsure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.schedulers.htcondor.ads import is_told
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import MB
from imagefactory.submit.check.asked import GPU_ATTRIBUTES, JobAsk
from imagefactory.extras.lint.classads import Expression, Plain, make_ad, parse_expression

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
class GpuPlace:
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
class JobReach:
    """All GPUs of an inventory, as one job sees them."""

    places: tuple[GpuPlace, ...]

    @property
    def reached(self) -> tuple[GpuPlace, ...]:
        return tuple(place for place in self.places if not place.cause)

    @property
    def causes(self) -> Mapping[str, int]:
        """How many GPUs each cause keeps away, the most first."""
        return dict(Counter(place.cause for place in self.places if place.cause).most_common())


def find_reach(asked: JobAsk, inventory: Inventory) -> JobReach:
    """Every GPU of the inventory, with what keeps the job away from it."""
    starts = {text: _start(text) for text in dict.fromkeys(machine.start for machine in inventory.machines)}
    found = (
        place for machine in inventory.machines for place in _places(asked, machine, starts[machine.start])
    )
    return JobReach(places=tuple(found))


def _start(text: str) -> Expression | None:
    """None where it is not told, or is longer than any that is read here: then it is unsure."""
    try:
        return parse_expression(text) if text else None
    except UsageError:
        return None


def _places(asked: JobAsk, machine: PoolMachine, start: Expression | None) -> Iterator[GpuPlace]:
    cause, unsure = _of_machine(asked, machine, start)
    of_gpus = [_of_gpu(asked, machine, gpu) for gpu in machine.gpus]
    fitting = sum(1 for why, _ in of_gpus if not why)
    for gpu, (why, which) in zip(machine.gpus, of_gpus, strict=True):
        few = f"it has fewer than {asked.gpus} such GPUs" if not why and fitting < asked.gpus else ""
        yield GpuPlace(
            machine=machine.name,
            gpu=gpu,
            cause=why or few or cause,
            unsure=which or unsure,
            unasked=bool(why and asked.gpus),
        )


def _of_gpu(asked: JobAsk, machine: PoolMachine, gpu: PoolGpu) -> tuple[str, str]:
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


def _of_machine(asked: JobAsk, machine: PoolMachine, start: Expression | None) -> tuple[str, str]:
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


def _named(expression: Expression, attributes: Mapping[str, Plain]) -> dict[str, Plain]:
    names = {name.lower() for name in expression.names}
    return {name: value for name, value in attributes.items() if name.lower() in names}


def _untold(expression: Expression, names: tuple[str, ...], ad: Mapping[str, Plain]) -> str:
    """The first of `names` that the expression wants and the ad has not."""
    has = {name.lower() for name in ad}
    return next((name for name in names if name.lower() not in has and expression.names_any(name)), "")


def _changing(expression: Expression, has: Mapping[str, Plain]) -> str:
    """The first attribute that inventories do not tell; the first of all where this one tells none."""
    names = [name for name in expression.names if name.lower() not in has]
    return next((name for name in names if not has or not is_told(name)), "")
