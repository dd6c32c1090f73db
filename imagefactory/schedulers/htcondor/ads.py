"""Read the machines of a pool from the ads that `condor_status -json` prints. Pure functions.

A GPU has a nested ad in the ad of its slot, with the name of the GPU (`GPUs_GPU_a0223334`). Flat attributes
(`GPUs_Capability`) apply to all GPUs of a slot and fill gaps of a nested ad. `AvailableGPUs` of a
partitionable slot lists the GPUs without a job; its dynamic slots list the other GPUs again, so they are
skipped. Sources: HTCondor startd (ResAttributes.cpp) and condor_gpu_discovery.

An AMD GPU (HTCondor 25) has the numbers of its processor as Capability: 9.0 for gfx90a and gfx906. Its name
tells which it is, if amd.toml has that name; otherwise its capability is unknown. GPUs that no job can
request are skipped, with a line in `Inventory.notes`: offline GPUs, and GPUs without a Capability.
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
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.drivers import parse_driver
from imagefactory.gpu.knowledge.gpus import amd_gpus, find_amd
from imagefactory.gpu.values import mig_profile
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.verify.outcome import clean

Ad = Mapping[str, Any]

MAX_ADS = 50_000
MAX_GPUS = 1024
MAX_TEXT = 1000
MAX_NOTES = 200
NAME = r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,254}"
"""The name of a machine or a pool."""
ID = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,99}"
"""The ID of a GPU: `GPU-a0223334`, `CUDA0`, `MIG-GPU-<uuid>/1/0`."""
DEVICE = r"[A-Za-z0-9][A-Za-z0-9 ._+()/:-]{0,99}"
ATTRIBUTE = r"[A-Za-z_][A-Za-z0-9_.]{0,99}"
HOSTS = {"x86_64": "amd64", "aarch64": "arm64"}
"""The OCI architecture for the `Arch` of a machine in lower case."""
CUDA = r"[0-9]{1,2}\.[0-9]{1,2}"
WHOLE_GPU_EXPRESSION = 'regexp(" mig ", DeviceName, "i") =!= true'
"""An expression that is true for a whole GPU, by its CUDA name: a slice is `NVIDIA A100-SXM4-40GB MIG
1g.5gb`.
"""
AMD = re.compile(r"\b(amd|radeon|instinct|gfx[0-9a-f]+)\b", re.IGNORECASE)
_PROCESSOR = re.compile(r"\bgfx[0-9a-f]{3,4}\b", re.IGNORECASE)
_EXPRESSION = re.compile(r"/Expr\((.*)\)/", re.DOTALL)
_WHOLE_MACHINE_ATTRIBUTES = {
    "Cpus": "TotalSlotCpus",
    "Memory": "TotalSlotMemory",
    "Disk": "TotalSlotDisk",
    "GPUs": "TotalSlotGPUs",
}
_UNTOLD = re.compile(
    # other users
    r"Remote.*|Client.*|Accounting.*|Global.*|Job.*|Public.*|Preempt.*|Authenti.*|Concurrency.*|Child.*|.*Rank"
    # addresses
    r"|.*Address.*|Startd?IpAddr|SubnetMask|COLLECTOR_HOST_STRING"
    # what changes by the minute
    r"|Recent.*|Updates?.*|Total(Time|Job|.*LoadAvg).*|.*LoadAvg|Monitor.*|.*Idle|My(Current|Type).*|Last.*"
    r"|Entered.*|Clock.*|Daemon.*|Num(Pids|Dynamic).*|Next.*|New.*|Retirement.*|Expected.*|Claim.*|Activat.*"
    r"|Activity|State|.*Time|CondorScratchDir",
    re.IGNORECASE,  # ClassAds ignore case
)


def parse_status(text: str) -> Iterator[Ad]:
    """Yield the ads in the output of `condor_status -json`. Empty output has none. Raises ToolError."""
    decoder, position = json.JSONDecoder(), _blanks(text, 0)
    if position == len(text):
        return
    hint = "run condor_status -json and check its output"
    if text[position] != "[":
        raise ToolError("condor-output-invalid", "condor_status did not print a JSON list", hint=hint)
    position, more = _blanks(text, position + 1), True
    while more and text[position : position + 1] != "]":
        try:
            ad, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise ToolError(
                "condor-output-invalid",
                f"the output of condor_status is not JSON at character {position}",
                hint=hint,
            ) from error
        if not isinstance(ad, dict):
            raise ToolError(
                "condor-output-invalid",
                f"the output of condor_status before character {position} is not a ClassAd",
                hint=hint,
            )
        yield ad
        position = _blanks(text, position)
        more = text[position : position + 1] == ","
        position = _blanks(text, position + 1) if more else position
    if text[position : position + 1] != "]":
        raise ToolError("condor-output-invalid", "the output of condor_status is incomplete", hint=hint)


def _blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def parse_ads(rows: Iterable[Ad], now: datetime) -> Inventory:
    """Return the machines with GPUs, sorted by name, without duplicate GPUs.

    Raises ToolError for more than MAX_ADS ads.
    """
    by_startd: dict[str, list[_Slot]] = {}
    notes: dict[str, None] = {}
    pools = set()
    for number, row in enumerate(rows):
        if number >= MAX_ADS:
            raise ToolError(
                "pool-too-large",
                f"the pool has more than {MAX_ADS:,} slots",
                hint="save several smaller inventories",
            )
        ad = {str(key).lower(): value for key, value in row.items()}
        pools.add(_text(ad.get("collector_host_string"), NAME))
        if ad.get("dynamicslot") is True:
            continue
        slot = _read_slot(row, ad)
        notes |= dict.fromkeys(slot.notes)
        if slot.gpus:
            by_startd.setdefault(slot.startd, []).append(slot)
    seen: set[tuple[object, ...]] = set()
    machines = [_join(name, slots, seen) for name, slots in sorted(by_startd.items())]
    names = sorted(pools - {""})
    more = (f"and {len(notes) - MAX_NOTES} more",) if len(notes) > MAX_NOTES else ()
    return Inventory(
        pool=names[0] if len(names) == 1 else "",
        taken=now,
        machines=tuple(machine for machine in machines if machine.gpus),
        notes=(*list(notes)[:MAX_NOTES], *more),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A slot of a `startd` on a `machine`. A machine may run several startds."""

    startd: str
    machine: str
    attributes: Mapping[str, str | int | float | bool]
    start: str
    gpus: tuple[PoolGpu, ...]
    notes: tuple[str, ...]


def _read_slot(row: Ad, ad: Ad) -> _Slot:
    """Return a slot. `ad` is `row` with names in lower case, since ClassAds ignore case."""
    machine = _text(ad.get("machine"), NAME)
    startd = re.sub(r"^slot[0-9_]+@", "", _text(ad.get("name"), NAME)) or machine
    gpus: list[PoolGpu] = []
    notes: list[str] = []
    if startd:
        offline = set(_ids(ad.get("offlinegpus")))
        for id, properties in _devices(ad):
            if id in offline:
                notes.append(f"{startd}: {id} is offline")
                continue
            gpu = read_gpu(id, properties, free=_is_free(ad, id))
            if isinstance(gpu, PoolGpu):
                gpus.append(gpu)
            else:
                notes.append(f"{startd}: {id} is skipped: {gpu}")
    else:
        name = clean(str(ad.get("name") or ad.get("machine") or "a machine without a name"))[:80]
        notes.append(f"{name}: skipped, its name is invalid")
    return _Slot(
        startd=startd,
        machine=machine or startd,
        attributes=_plain(row, ad) if gpus else {},
        start=_expression(ad.get("start")) if gpus else "",
        gpus=tuple(gpus),
        notes=tuple(notes),
    )


def _devices(ad: Ad) -> Iterator[tuple[str, Ad]]:
    """Yield the IDs of the GPUs in a slot without duplicates, each with its properties by lower case name."""
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
        device_values = nested.get(id) or nested.get(_attribute(id), {})
        if re.fullmatch(ID, id):
            yield id, {**common, **device_values}


def _ids(value: object) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[,\s]+", value) if part) if isinstance(value, str) else ()


def _attribute(id: str) -> str:
    """Return the name of a GPU's nested ad in lower case, without `GPUs_`."""
    return re.sub(r"[^A-Za-z0-9_]", "_", id).lower()


def _is_free(ad: Ad, id: str) -> bool:
    """Return whether no job uses a GPU.

    For a static slot, which owns its GPUs, the state of the slot decides.
    """
    if ad.get("state", "Unclaimed") not in ("Unclaimed", "Backfill"):
        return False
    available = ad.get("availablegpus")
    if not isinstance(available, list):
        return ad.get("gpus") != 0
    names = {_expression(value).lower().removeprefix("gpus_") for value in available}
    return _attribute(id) in names


def read_gpu(id: str, row: Ad, *, free: bool) -> PoolGpu | str:
    """Return the GPU with these properties (`Capability`, `DeviceName`, ...), or why no job can request
    it.
    """
    properties = {key.lower(): value for key, value in row.items()}
    name = _text(properties.get("devicename"), DEVICE)
    number = properties.get("capability")
    try:
        reported = parse_capability(f"{number:.1f}" if _is_number(number) else "")
    except ValueError:
        return "it reports no Capability, and no job that requests one matches it"
    amd = AMD.search(name) or not properties.keys().isdisjoint(("xnack", "rocm"))
    capability = processor_of(name, reported) if amd else str(reported)
    uuid = _text(properties.get("deviceuuid"), ID)
    memory = properties.get("globalmemorymb")
    driver = properties.get("nvidiadriver")
    try:
        driver = driver.strip() if isinstance(driver, str) and parse_driver(driver) else ""
    except ValueError:
        driver = ""
    return PoolGpu(
        id=id,
        uuid=uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
        name=name,
        capability=capability,
        memory=int(memory) * 2**20 if _is_number(memory) and 0 < memory < 1e9 else 0,
        driver="" if amd else driver,
        cuda="" if amd else _cuda(properties),
        mig=id.startswith("MIG-") or uuid.startswith("MIG-") or bool(mig_profile(name)),
        free=free,
    )


def processor_of(name: str, number: Capability) -> str:
    """Return the processor of an AMD GPU (`gfx90a`) by its name and number, empty if it is unknown."""
    if match := _PROCESSOR.search(name):
        text = match[0].lower()
    else:
        model = find_amd(re.findall(r"[a-z0-9]+", name.lower()))
        text = str(model.processor) if model else ""
    try:
        processor = parse_capability(text)
    except ValueError:
        return ""
    return text if (processor.major, processor.minor) == (number.major, number.minor) else ""


def amd_name_expression(processor: Capability) -> str:
    """Return an expression that is true for the AMD GPUs of which `processor_of` is this processor."""
    names = [str(processor), *(gpu.name for gpu in amd_gpus() if gpu.processor == processor)]
    words = "|".join(sorted(names))
    pattern = f"(^|[^a-z0-9])({words})([^a-z0-9]|$)"
    return f'Capability == {processor.major}.{processor.minor} && regexp("{pattern}", DeviceName, "i")'


def _cuda(properties: Ad) -> str:
    """Return the newest CUDA version of the driver: DriverVersion (12.8), or else MaxSupportedVersion
    (12080).
    """
    version, most = properties.get("driverversion"), properties.get("maxsupportedversion")
    if _is_number(version) and 0 < version < 100:
        return f"{version:.1f}"
    if _is_number(most) and 1000 <= most < 100_000:
        return f"{int(most) // 1000}.{int(most) % 1000 // 10}"
    return ""


def _join(startd: str, slots: list[_Slot], seen: set[tuple[object, ...]]) -> PoolMachine:
    """Join slots into a machine with the attributes of the largest slot, without the GPUs in `seen`."""
    slots.sort(key=lambda slot: (-len(slot.gpus), -_size(slot.attributes.get("Memory"))))
    gpus: list[PoolGpu] = []
    for slot in slots:
        for gpu in slot.gpus:
            key = (slot.machine, gpu.id, gpu.capability, gpu.name)
            if key not in seen:
                seen.add(key)
                gpus.append(gpu)
            elif not gpu.free:
                gpus = [replace(row, free=False) if row.id == gpu.id else row for row in gpus]
    return PoolMachine(
        name=startd,
        attributes=slots[0].attributes,
        start=slots[0].start,
        gpus=with_host(sorted(gpus, key=lambda gpu: gpu.id), slots[0].attributes),
    )


def with_host(gpus: Iterable[PoolGpu], attributes: Mapping[str, object]) -> tuple[PoolGpu, ...]:
    """Return the GPUs with the processor architecture in the attributes of their machine."""
    host = host_of(attributes)
    return tuple(replace(gpu, host=host) for gpu in gpus)


def host_of(attributes: Mapping[str, object]) -> str:
    """Return the OCI architecture of a machine, empty if it is unknown."""
    arch = next((value for name, value in attributes.items() if name.lower() == "arch"), "")
    return HOSTS.get(str(arch).lower(), "")


def _size(value: object) -> float:
    return float(value) if _is_number(value) else 0.0


def _plain(row: Ad, ad: Ad) -> dict[str, str | int | float | bool]:
    """Return plain values that jobs may request, without addresses, user data and constantly changing values.

    Cpus, Memory, Disk and GPUs of a partitionable slot are those of the whole slot, not the part that is
    free.
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
    """Return whether an inventory includes the attribute with that name, if its value is plain."""
    return bool(re.fullmatch(ATTRIBUTE, name, re.ASCII)) and not _UNTOLD.fullmatch(name)


def _is_text(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or len(value) > MAX_TEXT or _EXPRESSION.fullmatch(value):
        return False
    return value.isprintable()


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a ClassAd can contain this number: JSON also allows larger ones."""
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and abs(value) < 1 << 63


def _text(value: object, pattern: str) -> str:
    """Return a string if it fully matches `pattern`, else ""."""
    return value if isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) else ""


def _expression(value: object) -> str:
    """Return an expression in ClassAd syntax: `/Expr(a > 1)/` -> `a > 1`, true -> `true`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str) or len(value) > 20 * MAX_TEXT:
        return ""
    match = _EXPRESSION.fullmatch(value)
    text = match[1] if match else value
    return text if text.isprintable() else ""
