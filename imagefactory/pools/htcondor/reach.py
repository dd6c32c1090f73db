"""Which GPUs of an inventory a job of a submit file can get, and what keeps it from the others. Pure.

A job gets a GPU where `require_gpus` and the bounds of `gpus_*` hold for that GPU, `requirements` for its
machine, the machine is large enough and has what the image needs, and its START takes the job. What
machines have at most counts, not what is free now. An attribute that a machine has not is undefined there,
and does not match: that is HTCondor's rule. Where the inventory alone does not tell it (START asks who
submits), the GPU is counted and said to be unsure.

What becomes of commands was seen with 23.9's `condor_submit -dry-run`: `gpus_minimum_runtime = 12.1` is
`MaxSupportedVersion >= 12010`; a bound is dropped without a word where `require_gpus` names its attribute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.pools.htcondor.classads import Expression, Plain, literal, make_ad, parse_expression
from imagefactory.pools.htcondor.submit_language import Jobs
from imagefactory.pools.model import Inventory, Machine, PoolGpu
from imagefactory.pools.sizes import MB, parse_size

BOUNDS = {
    "gpus_minimum_capability": ("Capability", ">="),
    "gpus_maximum_capability": ("Capability", "<="),
    "gpus_minimum_memory": ("GlobalMemoryMb", ">="),
    "gpus_minimum_runtime": ("MaxSupportedVersion", ">="),
}
"""Commands of condor_submit for GPUs, and what they compare."""
GPU_ATTRIBUTES = (
    "Id", "Capability", "DeviceName", "DeviceUuid", "DriverVersion", "MaxSupportedVersion", "NvidiaDriver",
    "GlobalMemoryMb", "DevicePciBusId", "ECCEnabled", "ClockMhz", "ComputeUnits", "CoresPerCU",
)  # fmt: skip
"""What condor_gpu_discovery tells of a GPU, with `-extra`. Inventories have the first eight."""
_TOLD = GPU_ATTRIBUTES[:8]
_CHANGING = re.compile(
    r"(State|Activity|.*LoadAvg|.*Idle|.*Time|Remote.*|Recent.*|Entered.*|Total.*|Child.*|Client.*|Job.*)",
    re.I,
)
"""Attributes that inventories leave out because they change by the minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a job asks of a machine. Memory and disk are bytes, 0 where nothing is asked.

    `gpu` holds for GPUs, `requirements` for machines; None where all do. `needs` are attributes of machines
    that must be true. `ad` is what machines are shown of the job. `faults` are (command, what is wrong).
    """

    gpus: int
    cpus: int
    memory: int
    disk: int
    gpu: Expression | None
    requirements: Expression | None
    needs: tuple[str, ...]
    ad: Mapping[str, Plain]
    faults: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One GPU of a machine. `cause` says what keeps a job away, empty where it gets there.

    `unsure` names what the inventory does not tell, empty where all is known.
    """

    machine: str
    gpu: PoolGpu
    cause: str = ""
    unsure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """All GPUs of an inventory, as one job sees them."""

    places: tuple[Place, ...]

    @property
    def reached(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if not place.cause)

    @property
    def causes(self) -> Mapping[str, int]:
        """How many GPUs each cause keeps away, the most first."""
        return dict(Counter(place.cause for place in self.places if place.cause).most_common())


# --- what a job asks -----------------------------------------------------------------------------


def read_asked(jobs: Jobs, needs: tuple[str, ...]) -> Asked:
    """What the jobs of one `queue` ask. What cannot be read is a fault, and as if it was not there."""
    reader = _Reader(jobs)
    memory, disk = reader.size("request_memory", MB), reader.size("request_disk", 1024)
    gpus = (reader.number("request_gpus") or 1) if jobs.asks_gpus else 0
    cpus = reader.number("request_cpus") or 1
    gpu = reader.gpu_expression() if gpus else None
    requirements = reader.expression("requirements", reader.cuda_version())
    own = {
        key.removeprefix("my."): found
        for key, setting in jobs.settings.items()
        if key.startswith("my.") and (found := literal(jobs.value(setting.key))) is not None
    }
    asked: dict[str, Plain] = {
        "JobUniverse": 5,
        "RequestGPUs": gpus,
        "RequestCpus": cpus,
        "RequestMemory": memory // MB,
        "RequestDisk": disk // 1024,
    }
    return Asked(
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        disk=disk,
        gpu=gpu,
        requirements=requirements,
        needs=needs,
        ad={**asked, **own},
        faults=tuple(reader.faults),
    )


def cancelled(jobs: Jobs) -> tuple[str, ...]:
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


class _Reader:
    """Reads the commands of one `queue`; what is wrong is kept, so that all of it can be told."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.faults: list[tuple[str, str]] = []

    def value(self, key: str) -> str:
        """Its value; empty where it is not set or where only the submission tells it."""
        if self.jobs.unknown(key):
            return ""
        return self.jobs.value(key)

    def number(self, key: str) -> int:
        text = self.value(key)
        found = literal(text) if text else 0
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 1e6:
            self.faults.append((key, f"'{text[:40]}' is no number that can be read here"))
            return 1
        return int(found)

    def size(self, key: str, unit: int) -> int:
        text = self.value(key)
        if not text:
            return 0
        try:
            return (
                int(text) * unit if text.isascii() and text.isdigit() and len(text) < 15 else parse_size(text)
            )
        except UsageError:
            self.faults.append((key, f"'{text[:40]}' is no size that can be read here"))
            return 0

    def expression(self, key: str, more: str = "") -> Expression | None:
        text = self.value(key)
        both = f"({text}) && {more}" if text and more else text or more
        try:
            return parse_expression(both) if both else None
        except UsageError as error:
            self.faults.append((key, f"{error.message}; {error.hint}"))
            return None

    def gpu_expression(self) -> Expression | None:
        own = self.expression("require_gpus")
        parts = [f"({own.text})"] if own else []
        dropped = cancelled(self.jobs)
        for key, (name, how) in BOUNDS.items():
            text = self.value(key)
            if not text or key in dropped:
                continue
            number = _bound(key, text)
            if number is None:
                self.faults.append((key, f"'{text[:40]}' is no {'size' if 'memory' in key else 'version'}"))
            else:
                parts.append(f"{name} {how} {number}")
        return parse_expression(" && ".join(parts)) if parts else None

    def cuda_version(self) -> str:
        """condor_submit compares it with an attribute of old machines, in an encoding of its own."""
        text = self.value("cuda_version")
        found = re.fullmatch(r"([0-9]{1,2})(?:\.([0-9]{1,2}))?", text)
        return (
            f"{int(found[1]) * 1000 + int(found[2] or 0)} <= TARGET.CUDAMaxSupportedVersion" if found else ""
        )


def _bound(key: str, text: str) -> int | float | None:
    """The number that a bound compares with: capabilities as they are, MB, 12.1 as 12010."""
    if key == "gpus_minimum_memory":
        try:
            return -(-parse_size(text) // MB)
        except UsageError:
            return None
    if not re.fullmatch(r"[0-9]{1,3}(?:\.[0-9]{1,2})?", text):
        return None
    if key != "gpus_minimum_runtime":
        return float(text)
    major, _, minor = text.partition(".")
    return int(major) * 1000 + int(minor or 0) * 10


# --- where it gets -------------------------------------------------------------------------------


def find_reach(asked: Asked, inventory: Inventory) -> Reach:
    """Every GPU of the inventory, with what keeps the job away from it."""
    starts = {text: _start(text) for text in dict.fromkeys(machine.start for machine in inventory.machines)}
    found = (
        place for machine in inventory.machines for place in _places(asked, machine, starts[machine.start])
    )
    return Reach(places=tuple(found))


def _start(text: str) -> Expression | None:
    """None where it is not told, or is longer than any that is read here: then it is unsure."""
    try:
        return parse_expression(text) if text else None
    except UsageError:
        return None


def _places(asked: Asked, machine: Machine, start: Expression | None) -> Iterator[Place]:
    cause, unsure = _of_machine(asked, machine, start)
    of_gpus = [_of_gpu(asked, machine, gpu) for gpu in machine.gpus]
    fitting = sum(1 for why, _ in of_gpus if not why)
    for gpu, (why, which) in zip(machine.gpus, of_gpus, strict=True):
        few = f"it has fewer than {asked.gpus} such GPUs" if not why and fitting < asked.gpus else ""
        yield Place(machine=machine.name, gpu=gpu, cause=why or few or cause, unsure=which or unsure)


def _of_gpu(asked: Asked, machine: Machine, gpu: PoolGpu) -> tuple[str, str]:
    if not asked.gpus:
        return "the job asks for no GPU", ""
    if asked.gpu is None:
        return "", ""
    ad = {**_named(asked.gpu, machine.attributes), **gpu_values(gpu)}
    held = asked.gpu.holds(make_ad(ad), make_ad(asked.ad))
    if held:
        return "", ""
    untold = _untold(asked.gpu, GPU_ATTRIBUTES[8:], ad) if held is None else ""
    return ("", untold) if untold else ("its kind of GPU is not asked for", "")


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


def _of_machine(asked: Asked, machine: Machine, start: Expression | None) -> tuple[str, str]:
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
                return "requirements does not hold", ""
            unsure = changing
    if machine.start:
        held = start.holds(mine, job) if start is not None else None
        if held is False:
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
    return next((name for name in names if not has or _CHANGING.fullmatch(name)), "")
