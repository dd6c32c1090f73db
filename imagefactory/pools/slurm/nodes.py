"""What Slurm tells of the GPUs of its nodes, by `scontrol show node --detail --oneliner`.

Slurm knows no capability, driver or memory of a GPU: a node tells the type that its site gave its GPUs
(`Gres=gpu:a100:4`). A type that is the name of a known GPU tells the capability; of others none is known.
Source: Slurm's manual, scontrol(1), "Generic Resource (GRES) Scheduling".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime

from imagefactory.errors import UsageError
from imagefactory.gpu.knowledge.gpus import find_gpu
from imagefactory.gpu.values import slice_of
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.pools.slurm.commands import run

COMMAND = ("scontrol", "show", "node", "--detail", "--oneliner")
FEATURES = "features"
"""The attribute of a machine that holds its node's features, with commas between them."""
_FIELD = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_/]*)=(\S*)")
_GRES = re.compile(r"gpu(?::(?P<type>[A-Za-z0-9_.+-]+))?:(?P<count>[0-9]+)(?:\((?P<told>[^)]*)\))?")
_HOSTS = {"x86_64": "amd64", "aarch64": "arm64"}
_AWAY = ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "UNKNOWN")
_MOST = 1024


def ask_inventory(environ: Mapping[str, str], now: datetime) -> Inventory:
    """The nodes with GPUs. Raises ToolError where scontrol is missing, fails or does not answer."""
    return parse_nodes(run(COMMAND, environ), now)


def parse_nodes(text: str, now: datetime) -> Inventory:
    """The nodes with GPUs of what scontrol printed, without those that take no jobs, which notes name."""
    machines, notes = [], []
    for line in text.splitlines():
        told = dict(reversed(_FIELD.findall(line)))  # free text, such as a reason, comes last
        name, gres = told.get("NodeName", ""), told.get("Gres", "")
        gpus = tuple(_gpus(name, told))
        if not name or not gpus:
            continue
        states = re.split(r"[+*~#!%$@^-]+", told.get("State", "UNKNOWN").upper())
        if away := next((state for state in states if state in _AWAY), ""):
            notes.append(f"{name} ({gres}) takes no jobs: {away}")
            continue
        attributes: dict[str, str | int | float | bool] = {"arch": told.get("Arch", "")}
        attributes[FEATURES] = told.get("ActiveFeatures", "").replace("(null)", "")
        for attribute, field in (("cpus", "CPUTot"), ("memory", "RealMemory")):
            if told.get(field, "").isdigit():
                attributes[attribute] = int(told[field])
        machines.append(PoolMachine(name=name, attributes=attributes, start="", gpus=gpus))
    return Inventory(pool="slurm", taken=now, machines=tuple(machines), notes=tuple(notes))


def _gpus(node: str, told: Mapping[str, str]) -> Iterator[PoolGpu]:
    used = {one["type"]: int(one["count"]) for one in _GRES.finditer(told.get("GresUsed", ""))}
    number = 0
    for found in _GRES.finditer(told.get("Gres", "")):
        kind = found["type"] or ""
        for place in range(min(int(found["count"]), _MOST)):
            yield PoolGpu(
                id=f"{node}/{number}",
                uuid="",
                name=kind,
                capability=capability_of(kind),
                memory=0,
                driver="",
                cuda="",
                mig=bool(slice_of(kind)),
                free=place >= used.get(found["type"], 0),
                host=_HOSTS.get(told.get("Arch", ""), ""),
            )
            number += 1


def capability_of(kind: str) -> str:
    """The capability of the GPUs that a site calls so, empty where the name does not tell it."""
    try:
        return str(find_gpu(kind).capability) if kind else ""
    except UsageError:
        return ""
