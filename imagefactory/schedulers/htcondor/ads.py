"""The machines of a pool from their ads, as `condor_status -json` prints them. Pure.

A GPU has a nested ad of its own in the ad of its slot, named after it (`GPUs_GPU_a0223334`); flat attributes
(`GPUs_Capability`) hold what all GPUs of a slot share and fill what a nested ad leaves out. `AvailableGPUs`
of a partitionable slot lists those that no job has; its dynamic slots show the others again, so they are
passed over. Sources: HTCondor's startd (ResAttributes.cpp) and condor_gpu_discovery.

What cannot be asked for is left out, with a word in `Inventory.notes`: offline GPUs, those of AMD (whose ads
number them as if they were NVIDIA's), and those that tell no Capability, which no job that names one matches.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeGuard

from imagefactory.errors import ToolError
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.drivers import parse_driver
from imagefactory.gpu.values import slice_of
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.verify.outcome import clean

Ad = Mapping[str, Any]

MAX_ADS = 50_000
MAX_GPUS = 1024
MAX_TEXT = 1000
MAX_NOTES = 200
NAME = r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,254}"
"""A machine's name, or a pool's."""
ID = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,99}"
"""`GPU-a0223334`, `CUDA0`, `MIG-GPU-<uuid>/1/0`."""
DEVICE = r"[A-Za-z0-9][A-Za-z0-9 ._+()/:-]{0,99}"
ATTRIBUTE = r"[A-Za-z_][A-Za-z0-9_.]{0,99}"
HOSTS = {"x86_64": "amd64", "aarch64": "arm64"}
"""What a machine's `Arch` says in small letters, in OCI's words."""
CUDA = r"[0-9]{1,2}\.[0-9]{1,2}"
WHOLE_GPU_EXPRESSION = 'regexp(" mig ", DeviceName, "i") =!= true'
"""Holds for what is no slice, by its name as CUDA tells it: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`."""
AMD = re.compile(r"\b(amd|radeon|instinct|gfx[0-9a-f]+)\b", re.IGNORECASE)
_EXPRESSION = re.compile(r"/Expr\((.*)\)/", re.DOTALL)
_WHOLE_MACHINE_ATTRIBUTES = {
    "Cpus": "TotalSlotCpus",
    "Memory": "TotalSlotMemory",
    "Disk": "TotalSlotDisk",
    "GPUs": "TotalSlotGPUs",
}
_UNTOLD = re.compile(
    # who else is at work there
    r"Remote.*|Client.*|Accounting.*|Global.*|Job.*|Public.*|Preempt.*|Authenti.*|Concurrency.*|Child.*|.*Rank"
    # addresses
    r"|.*Address.*|Startd?IpAddr|SubnetMask|COLLECTOR_HOST_STRING"
    # what changes by the minute
    r"|Recent.*|Updates?.*|Total(Time|Job|.*LoadAvg).*|.*LoadAvg|Monitor.*|.*Idle|My(Current|Type).*|Last.*"
    r"|Entered.*|Clock.*|Daemon.*|Num(Pids|Dynamic).*|Next.*|New.*|Retirement.*|Expected.*|Claim.*|Activat.*"
    r"|Activity|State|.*Time|CondorScratchDir",
    re.IGNORECASE,  # ClassAds do not tell capitals apart
)


def parse_status(text: str) -> Iterator[Ad]:
    """The ads in the output of `condor_status -json`, one at a time; none in an empty output.

    Raises ToolError for anything else.
    """
    decoder, at = json.JSONDecoder(), _blanks(text, 0)
    if at == len(text):
        return
    hint = "run condor_status -json and check its output"
    if text[at] != "[":
        raise ToolError("condor-output-invalid", "condor_status did not print a JSON list", hint=hint)
    at, more = _blanks(text, at + 1), True
    while more and text[at : at + 1] != "]":
        try:
            ad, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ToolError(
                "condor-output-invalid",
                f"the output of condor_status is not JSON at character {at}",
                hint=hint,
            ) from error
        if not isinstance(ad, dict):
            raise ToolError(
                "condor-output-invalid",
                f"the output of condor_status before character {at} is not an ad",
                hint=hint,
            )
        yield ad
        at = _blanks(text, at)
        more = text[at : at + 1] == ","
        at = _blanks(text, at + 1) if more else at
    if text[at : at + 1] != "]":
        raise ToolError("condor-output-invalid", "the output of condor_status is incomplete", hint=hint)


def _blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def parse_ads(rows: Iterable[Ad], taken: datetime) -> Inventory:
    """The machines that have GPUs, by name; each GPU once. Raises ToolError for more than MAX_ADS ads."""
    by_startd: dict[str, list[_Slot]] = {}
    notes: list[str] = []
    pools = set()
    for number, row in enumerate(rows):
        if number >= MAX_ADS:
            raise ToolError(
                "pool-too-large",
                f"the pool has more than {MAX_ADS:,} slots",
                hint="save its inventory in parts",
            )
        ad = {str(key).lower(): value for key, value in row.items()}
        pools.add(_text(ad.get("collector_host_string"), NAME))
        if ad.get("dynamicslot") is True:
            continue
        slot = _read_slot(row, ad)
        notes += slot.notes
        if slot.gpus:
            by_startd.setdefault(slot.startd, []).append(slot)
    seen: set[tuple[object, ...]] = set()
    machines = [_join(name, slots, seen) for name, slots in sorted(by_startd.items())]
    named = sorted(pools - {""})
    return Inventory(
        pool=named[0] if len(named) == 1 else "",
        taken=taken,
        machines=tuple(machine for machine in machines if machine.gpus),
        notes=_shortened(dict.fromkeys(notes)),
    )


def _shortened(notes: Iterable[str]) -> tuple[str, ...]:
    every = tuple(notes)
    more = (f"and {len(every) - MAX_NOTES} more",) if len(every) > MAX_NOTES else ()
    return (*every[:MAX_NOTES], *more)


# --- a slot --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """`startd` names who offers it, `machine` the computer: one may run several startds."""

    startd: str
    machine: str
    attributes: Mapping[str, str | int | float | bool]
    start: str
    gpus: tuple[PoolGpu, ...]
    notes: tuple[str, ...]


def _read_slot(row: Ad, ad: Ad) -> _Slot:
    """`ad` is `row` with its names in small letters, as ClassAds do not tell them apart."""
    machine = _text(ad.get("machine"), NAME)
    startd = re.sub(r"^slot[0-9_]+@", "", _text(ad.get("name"), NAME)) or machine
    gpus: list[PoolGpu] = []
    notes: list[str] = []
    told = clean(str(ad.get("name") or ad.get("machine") or "a machine without a name"))[:80]
    if not startd:
        notes.append(f"{told}: left out, its name is none")
    else:
        offline = set(_ids(ad.get("offlinegpus")))
        for id, properties in _devices(ad):
            if id in offline:
                notes.append(f"{startd}: {id} is offline")
                continue
            gpu = read_gpu(id, properties, free=_is_free(ad, id))
            if isinstance(gpu, PoolGpu):
                gpus.append(gpu)
            else:
                notes.append(f"{startd}: {id} is left out: {gpu}")
    return _Slot(
        startd=startd,
        machine=machine or startd,
        attributes=_plain(row, ad) if gpus else {},
        start=_expression(ad.get("start")) if gpus else "",
        gpus=tuple(gpus),
        notes=tuple(notes),
    )


def _devices(ad: Ad) -> Iterator[tuple[str, Ad]]:
    """The ids of a slot's GPUs, each once, with their properties by names in small letters."""
    common = {
        key.removeprefix("gpus_"): value
        for key, value in ad.items()
        if key.startswith("gpus_") and not isinstance(value, dict)
    }
    nested = {
        str(value.get("Id") or key.removeprefix("gpus_")): {str(k).lower(): v for k, v in value.items()}
        for key, value in ad.items()
        if key.startswith("gpus_") and isinstance(value, dict)
    }
    names = _ids(ad.get("assignedgpus")) or tuple(nested) or _ids(ad.get("detectedgpus"))
    for id in list(dict.fromkeys(names))[:MAX_GPUS]:
        own = nested.get(id) or nested.get(_attribute(id), {})
        if re.fullmatch(ID, id):
            yield id, {**common, **own}


def _ids(value: object) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[,\s]+", value) if part) if isinstance(value, str) else ()


def _attribute(id: str) -> str:
    """The name of a GPU's nested ad, less `GPUs_`, in small letters."""
    return re.sub(r"[^A-Za-z0-9_]", "_", id).lower()


def _is_free(ad: Ad, id: str) -> bool:
    """Whether no job has it. A static slot's GPUs are its own whoever runs there, so its state decides."""
    if ad.get("state", "Unclaimed") not in ("Unclaimed", "Backfill"):
        return False
    available = ad.get("availablegpus")
    if not isinstance(available, list):
        return ad.get("gpus") != 0
    named = {_expression(one).lower().removeprefix("gpus_") for one in available}
    return _attribute(id) in named


def read_gpu(id: str, given: Ad, *, free: bool) -> PoolGpu | str:
    """The GPU of such properties (`Capability`, `DeviceName`, ...), or why it cannot be asked for."""
    properties = {key.lower(): value for key, value in given.items()}
    name = _text(properties.get("devicename"), DEVICE)
    if AMD.search(name) or "xnack" in properties:
        return f"{name or 'it'} is AMD's, and has no compute capability"
    told = properties.get("capability")
    try:
        capability = str(parse_capability(f"{told:.1f}" if _is_number(told) else ""))
    except ValueError:
        return "it tells no Capability, and no job that asks for one matches it"
    uuid = _text(properties.get("deviceuuid"), ID)
    memory = properties.get("globalmemorymb")
    return PoolGpu(
        id=id,
        uuid=uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
        name=name,
        capability=capability,
        memory=int(memory) * 2**20 if _is_number(memory) and 0 < memory < 1e9 else 0,
        driver=_driver(properties.get("nvidiadriver")),
        cuda=_cuda(properties),
        mig=id.startswith("MIG-") or uuid.startswith("MIG-") or bool(slice_of(name)),
        free=free,
    )


def _driver(value: object) -> str:
    try:
        return value.strip() if isinstance(value, str) and parse_driver(value) else ""
    except ValueError:
        return ""


def _cuda(properties: Ad) -> str:
    """The newest CUDA that the driver takes: DriverVersion (12.8), else MaxSupportedVersion (12080)."""
    told, most = properties.get("driverversion"), properties.get("maxsupportedversion")
    if _is_number(told) and 0 < told < 100:
        return f"{told:.1f}"
    if _is_number(most) and 1000 <= most < 100_000:
        return f"{int(most) // 1000}.{int(most) % 1000 // 10}"
    return ""


# --- a machine -----------------------------------------------------------------------------------


def _join(startd: str, slots: list[_Slot], seen: set[tuple[object, ...]]) -> PoolMachine:
    """A machine of its slots. What it offers is its greatest one's; GPUs of `seen` are not told again."""
    slots.sort(key=lambda slot: (-len(slot.gpus), -_size(slot.attributes.get("Memory"))))
    gpus: list[PoolGpu] = []
    for slot in slots:
        for gpu in slot.gpus:
            key = (slot.machine, gpu.id, gpu.capability, gpu.name)
            if key not in seen:
                seen.add(key)
                gpus.append(gpu)
            elif not gpu.free:
                gpus = [replace(one, free=False) if one.id == gpu.id else one for one in gpus]
    return PoolMachine(
        name=startd,
        attributes=slots[0].attributes,
        start=slots[0].start,
        gpus=with_host(sorted(gpus, key=lambda gpu: gpu.id), slots[0].attributes),
    )


def with_host(gpus: Iterable[PoolGpu], attributes: Mapping[str, object]) -> tuple[PoolGpu, ...]:
    """The GPUs of a machine with such attributes, each beside its processor."""
    told = next((value for name, value in attributes.items() if name.lower() == "arch"), "")
    host = HOSTS.get(str(told).lower(), "")
    return tuple(replace(gpu, host=host) for gpu in gpus)


def _size(value: object) -> float:
    return float(value) if _is_number(value) else 0.0


def _plain(row: Ad, ad: Ad) -> dict[str, str | int | float | bool]:
    """What jobs may ask for: plain values, less addresses, what is told of others and what changes always.

    Of a partitionable slot Cpus, Memory, Disk and GPUs are the whole slot's, not what its jobs have left.
    """
    attributes: dict[str, str | int | float | bool] = {}
    for key, value in row.items():
        if not is_inventory_attribute(str(key)):
            continue
        if (
            ad.get("partitionableslot") is True
            and (whole := ad.get(_WHOLE_MACHINE_ATTRIBUTES.get(key, "").lower())) is not None
        ):
            value = whole
        if isinstance(value, bool) or _is_number(value) or _is_text(value):
            attributes[key] = value
    return dict(sorted(attributes.items()))


@lru_cache(maxsize=4096)  # every slot has the same few hundred names
def is_inventory_attribute(name: str) -> bool:
    """Whether inventories have an attribute of that name, where a machine tells it as a plain value."""
    return bool(re.fullmatch(ATTRIBUTE, name, re.ASCII)) and not _UNTOLD.fullmatch(name)


def _is_text(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or len(value) > MAX_TEXT or _EXPRESSION.fullmatch(value):
        return False
    return value.isprintable()


def _is_number(value: object) -> TypeGuard[int | float]:
    """Of those that ClassAds have: JSON may hold any."""
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and abs(value) < 1 << 63


def _text(value: object, pattern: str) -> str:
    """The text where it is all of `pattern`, else nothing."""
    return value if isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) else ""


def _expression(value: object) -> str:
    """An expression as ClassAds write it: `/Expr(a > 1)/` -> `a > 1`, true -> `true`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str) or len(value) > 20 * MAX_TEXT:
        return ""
    found = _EXPRESSION.fullmatch(value)
    text = found[1] if found else value
    return text if text.isprintable() else ""
