"""How Slurm is asked for GPUs of some kinds: by type, by features of nodes, or without other nodes. Pure.

It can never be asked for what a GPU can do. Source: Slurm's manual, sbatch(1) and "Generic Resource (GRES)
Scheduling".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.pools.slurm.nodes import FEATURES

_FEATURE = re.compile(r"[A-Za-z0-9_.+:-]+")
Asked = tuple[tuple[str, ...], tuple[PoolGpu, ...]]
"""Options of sbatch, and the cluster's GPUs that they reach."""


def ask_for(inventory: Inventory, fits: Callable[[PoolGpu], bool], count: int = 1) -> Asked | None:
    """What to ask for so that a job gets `count` GPUs that fit, and no others.

    By type where one is all there is, by features where some have just these nodes, else without the other
    nodes. None where no node has so many; no options where each that has them has other GPUs too.
    """
    found = [(machine, [gpu for gpu in machine.gpus if fits(gpu)]) for machine in inventory.machines]
    reached = [(machine, gpus) for machine, gpus in found if len(gpus) >= count]
    if not reached:
        return None
    types = {gpu.name for _, gpus in reached for gpu in gpus}
    if len(types) == 1 and all(types):
        every = tuple(gpu for _, gpus in reached for gpu in gpus)
        return (f"--gres=gpu:{types.pop()}:{count}",), every
    whole = [machine for machine, gpus in reached if len(gpus) == len(machine.gpus)]
    if not whole:
        return (), ()
    others = [machine for machine in inventory.machines if machine not in whole]
    narrow: tuple[str, ...] = ()
    if others and (features := _features(whole, others)):
        narrow = (f"--constraint={'|'.join(features)}",)
    elif others:
        narrow = (f"--exclude={','.join(machine.name for machine in others)}",)
    return (f"--gres=gpu:{count}", *narrow), tuple(gpu for machine in whole for gpu in machine.gpus)


def ask_for_one(inventory: Inventory, fits: Callable[[PoolGpu], bool]) -> tuple[str, ...]:
    """The same for one GPU, whichever: by the commonest type where nodes mix them. Empty for none."""
    asked = ask_for(inventory, fits)
    if asked is None or asked[0]:
        return asked[0] if asked else ()
    types = Counter(gpu.name for gpu in inventory.gpus if gpu.name and fits(gpu))
    return (f"--gres=gpu:{max(sorted(types), key=lambda name: types[name])}:1",) if types else ()


def _features(right: Sequence[PoolMachine], others: Sequence[PoolMachine]) -> tuple[str, ...]:
    """The fewest features that all of the nodes to the `right` have one of, and none of the others has; empty
    where there are none."""
    wrong = {name for machine in others for name in _features_of(machine)}
    chosen: list[str] = []
    left = {machine.name: _features_of(machine) - wrong for machine in right}
    while left:
        counted = sorted({name for names in left.values() for name in names})
        best = max(counted, key=lambda name: sum(name in names for names in left.values()), default="")
        if not best:
            return ()
        chosen.append(best)
        left = {node: names for node, names in left.items() if best not in names}
    return tuple(sorted(chosen))


def _features_of(machine: PoolMachine) -> set[str]:
    told = str(machine.attributes.get(FEATURES, "")).split(",")
    return {name for name in told if _FEATURE.fullmatch(name)}
