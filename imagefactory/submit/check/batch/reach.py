"""Which GPUs of a Slurm cluster a batch script's job can get, and what keeps it from the others. Pure.

By an inventory of its nodes: the type that is asked for, the features and names of nodes, their size, and
what the script itself turns away. What nodes have at most counts, not what is free now.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import MB
from imagefactory.pools.slurm.nodes import FEATURES
from imagefactory.extras.lint.batch_job import BatchAsk
from imagefactory.extras.lint.batch_reader import BatchScript
from imagefactory.extras.lint.reach import GpuPlace, JobReach
from imagefactory.jobs.slurm import LOOK

_HOSTS = re.compile(r"(?P<start>[A-Za-z0-9_.-]*)\[(?P<numbers>[0-9,-]+)\](?P<end>[A-Za-z0-9_.-]*)")
_MOST_HOSTS = 10_000
_LOOK = re.compile(re.escape(LOOK % ("@@", "@@")).replace("@@", "(.*?)"), re.DOTALL)
_CASE = re.compile(r"^ *([0-9]+\.[0-9]+)\) needs=", re.MULTILINE)


def looked_for(script: BatchScript) -> frozenset[str] | None:
    """The capabilities beside which the script stops, as `submit --site slurm` writes it; None where it does
    not look at its GPU so."""
    found = _LOOK.search(script.text)
    return frozenset(_CASE.findall(found[1])) if found else None


def find_batch_reach(script: BatchScript, asked: BatchAsk, inventory: Inventory) -> JobReach:
    """Every GPU of the inventory, with what keeps the job away from it."""
    looked = looked_for(script)
    only, not_on = (_names(script.value(name)) for name in ("nodelist", "exclude"))
    places = []
    for machine in inventory.machines:
        node = _of_node(machine, asked, only, not_on)
        causes = [node if node[0] else _of_gpu(gpu, asked, looked) for gpu in machine.gpus]
        fitting = sum(not why for why, _ in causes)
        few = f"its node has fewer than {asked.gpus} such GPUs" if fitting < asked.gpus else ""
        for gpu, (why, unasked) in zip(machine.gpus, causes, strict=True):
            gpu = replace(gpu, mig=True) if asked.part else gpu
            places.append(
                GpuPlace(
                    machine=machine.name, gpu=gpu, cause=why or few, unasked=unasked and bool(asked.gpus)
                )
            )
    return JobReach(places=tuple(places))


def _of_node(
    machine: PoolMachine, asked: BatchAsk, only: Collection[str], not_on: Collection[str]
) -> tuple[str, bool]:
    """What keeps the job away from a whole node, and whether the script asks for other nodes than this."""
    if not asked.gpus:
        return "the job asks for no GPU", False
    if (only and machine.name not in only) or machine.name in not_on:
        return "its node is left out by name", True
    features = {name for name in str(machine.attributes.get(FEATURES, "")).split(",") if name}
    if asked.features is not None and not asked.features(features):
        return "its node has not the features that are asked for", True
    for name, amount, unit, word in (
        ("memory", asked.memory, MB, "little memory"),
        ("cpus", asked.cpus, 1, "few CPUs"),
    ):
        most = machine.attributes.get(name)
        if isinstance(most, int | float) and not isinstance(most, bool) and most * unit < amount:
            return f"its node has too {word}", False
    return "", False


def _of_gpu(gpu: PoolGpu, asked: BatchAsk, looked: Collection[str] | None) -> tuple[str, bool]:
    if asked.kinds and gpu.name not in asked.kinds:
        return "its type is not asked for", True
    if looked is not None and gpu.capability not in looked:
        return "the script stops there", False
    return "", False


def _names(text: str) -> frozenset[str]:
    """`gpu[01-03,7],login` as names. What is written in another way is passed over."""
    return frozenset(name for part in re.findall(r"(?:\[[^\]]*\]|[^,\s])+", text) for name in _spread(part))


def _spread(text: str) -> Iterator[str]:
    found = _HOSTS.fullmatch(text)
    if found is None:
        yield text
        return
    for part in found["numbers"].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            for number in range(int(first), min(int(last or first), int(first) + _MOST_HOSTS) + 1):
                yield f"{found['start']}{number:0{len(first)}}{found['end']}"
