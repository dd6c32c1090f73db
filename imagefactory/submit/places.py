"""Which GPUs of an inventory a job can get that runs in an image, and which of them are free. Pure.

By values alone, so that it needs none of HTCondor's own readers; `--check` judges the expressions of files,
also those that people wrote. What machines have at most counts, and free is what no job has at the moment.
Where the inventory does not tell it (START, a machine's attributes) a GPU is counted, and said to be unsure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.schedulers.pool import Inventory, PoolGpu
from imagefactory.schedulers.sizes import MB
from imagefactory.jobs.offer import GpuClass

FRESH = timedelta(minutes=5)
"""An inventory that is not older tells of now."""
_HOSTS = {"linux/amd64": "amd64", "linux/arm64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one job asks for: `gpus` of one machine at once, each with `gpu_memory`.

    Sizes are bytes, 0 for any. With `mig` slices of GPUs will do. `needs` are attributes that must be true of
    a machine.
    """

    gpus: int = 1
    gpu_memory: int = 0
    cpus: int = 0
    memory: int = 0
    disk: int = 0
    mig: bool = False
    platform: str = "linux/amd64"
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A GPU that a job can get; `gpu_class` is why. `free`: it and as many more as the job asks for are."""

    gpu: PoolGpu
    gpu_class: GpuClass
    free: bool
    unsure: bool


Known = Callable[[PoolGpu], GpuClass | None]
"""Why an image may run on a GPU; None where it may not."""


def by_class(classes: Iterable[GpuClass]) -> Known:
    """An image that may run on these classes."""
    by_capability = {str(one.capability): one for one in classes}

    def known(gpu: PoolGpu) -> GpuClass | None:
        found = by_capability.get(gpu.capability)
        return found if found and _new_enough(gpu, found) else None

    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenMachine:
    """A machine, made ready to be asked many times: its attributes in small letters, as ClassAds take them.

    `open`: its START takes any job.
    """

    gpus: tuple[PoolGpu, ...]
    has: Mapping[str, object]
    open: bool


def look(inventory: Inventory) -> tuple[SeenMachine, ...]:
    """The machines of an inventory."""
    return tuple(
        SeenMachine(
            gpus=one.gpus,
            has={name.lower(): value for name, value in one.attributes.items()},
            open=one.start.strip().lower() in ("", "true"),
        )
        for one in inventory.machines
    )


def find_places(known: Known, wish: Wish, machines: Iterable[SeenMachine]) -> tuple[Place, ...]:
    """The GPUs of these machines that a job can get in an image."""
    return tuple(place for machine in machines for place in _on(machine, known, wish))


def fits(gpu: PoolGpu, wish: Wish) -> bool:
    """Whether the GPU itself is what is wished for, whatever runs on it."""
    host = _HOSTS.get(wish.platform, "")
    small = gpu.memory // MB < -(-wish.gpu_memory // MB)
    return not small and (wish.mig or not gpu.mig) and (not gpu.host or gpu.host == host)


def _new_enough(gpu: PoolGpu, gpu_class: GpuClass) -> bool:
    """Pools tell the newest CUDA that a driver takes; a GPU that tells none is not matched."""
    return not gpu_class.cuda or (bool(gpu.cuda) and numbers(gpu.cuda) >= numbers(gpu_class.cuda))


def takes(machine: SeenMachine, wish: Wish) -> bool | None:
    """Whether a machine is large enough and has what the image needs; None where that is not told."""
    has = machine.has
    for name, amount, unit in (
        ("memory", wish.memory, MB),
        ("disk", wish.disk, 1024),
        ("cpus", wish.cpus, 1),
    ):
        most = has.get(name)
        if isinstance(most, int | float) and not isinstance(most, bool) and most * unit < amount:
            return False
    if has and any(has.get(need.lower()) is not True for need in wish.needs):
        return False
    told = "arch" in has if has else not wish.needs
    return True if told and machine.open else None


def format_places(places: Sequence[Place], inventory: Inventory, now: datetime) -> str:
    """`reaches 12 of 40 GPUs, 3 free now`; of an older inventory when they were."""
    total = len(inventory.gpus)
    text = f"reaches {len(places)} of {total} GPU{'s' * (total != 1)}"
    unsure = sum(place.unsure for place in places)
    if when := free_when(inventory, now):
        text += f", {sum(place.free for place in places)} free {when}"
    return text + (f" (of {unsure} of them the machines may refuse)" if unsure else "")


def free_when(inventory: Inventory, now: datetime) -> str:
    """When it was that GPUs were free: `now`, or a time; empty for an inventory that does not say."""
    if now - inventory.taken < FRESH:
        return "now"
    return f"at {inventory.taken:%Y-%m-%d %H:%M} UTC" if inventory.taken.year > 1970 else ""


def _on(machine: SeenMachine, known: Known, wish: Wish) -> Iterator[Place]:
    fitting = [(gpu, found) for gpu in machine.gpus if (found := known(gpu)) and fits(gpu, wish)]
    if not fitting or len(fitting) < wish.gpus:
        return
    taken = takes(machine, wish)
    if taken is False:
        return
    enough = sum(gpu.free for gpu, _ in fitting) >= wish.gpus
    for gpu, gpu_class in fitting:
        yield Place(gpu=gpu, gpu_class=gpu_class, free=gpu.free and enough, unsure=taken is None)
