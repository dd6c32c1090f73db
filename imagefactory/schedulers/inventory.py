"""Inventories as files: the GPUs of a pool at one time, for plans where the pool cannot be queried.

    {"format": "imagefactory.inventory/1", "pool": "cm.example.org", "taken": "2026-11-22T06:00:00Z",
     "machines": [{"name": "gpu01.example.org", "start": "true", "attributes": {"Memory": 515000},
                   "gpus": [{"id": "GPU-a0223334", "name": "NVIDIA A100-SXM4-40GB", "capability": "8.0",
                             "memory": 42503241728, "cuda": "12.4"}]}]}

Each machine is one line, so that two files can be compared. People can write the file too: a machine requires
only `name` and `gpus`, a GPU only `capability`, empty if unknown. Without `taken`, the time of the file is
used. YAML with the same keys, and a list of GPUs as in `matrix/gpus.py`, are read too. The attribute `Arch`
(`aarch64`) is the processor of a machine. The reader is strict. Errors name the location of a value:
`inventory.json: machines[0].gpus[0].capability`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypedDict

from imagefactory.errors import UsageError, os_problem
from imagefactory.fs import replace_text
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.drivers import parse_driver
from imagefactory.gpu.values import mig_profile
from imagefactory.matrix.gpus import GpuGroup, parse_gpus
from imagefactory.recipes.yaml_tree import YamlLimits, YamlNode, parse_tree, recipe_problem
from imagefactory.schedulers.htcondor.ads import ATTRIBUTE, CUDA, DEVICE, ID, NAME, host_of
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.verify.outcome import clean
from imagefactory.versions import nearest

FORMAT: Final = "imagefactory.inventory/1"
MAX_BYTES = 256 * 2**20
MAX_MACHINES = 50_000
MAX_GPUS = 1024
MAX_ATTRIBUTES = 2000
MAX_TEXT = 20_000
LISTED_GPUS = 8
"""The GPUs of one machine of an inventory that is only a list of GPUs."""
YAML_LIMITS = YamlLimits(size=4 * 2**20, nodes=200_000, depth=6)
HINT = "create one with imagefactory gpus -o FILE, or list GPUs in YAML: - name: V100"

_TOP = ("format", "pool", "taken", "machines", "notes")
_MACHINE = ("name", "start", "attributes", "gpus")
_NUMBERS = ("memory", "Memory", "Cpus", "Disk", "GPUs")
_GPU = ("id", "uuid", "name", "capability", "memory", "driver", "cuda", "mig", "free")


def format_inventory(inventory: Inventory) -> str:
    """Return the text of the file. Equal inventories give equal texts."""
    document = InventoryDocument(format=FORMAT, **inventory_json(inventory))
    return "{\n" + ",\n".join(f' "{key}": {_lines(value)}' for key, value in document.items()) + "\n}\n"


def _lines(value: object) -> str:
    """Return JSON in one line, or for a list one line for each row."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"


class InventoryGpuRow(TypedDict):
    id: str
    uuid: str
    name: str
    capability: str
    memory: int
    """In bytes."""
    driver: str
    cuda: str
    mig: bool
    free: bool


class InventoryMachineRow(TypedDict):
    name: str
    start: str
    """Its START expression, for HTCondor."""
    attributes: dict[str, str | int | float | bool]
    gpus: list[InventoryGpuRow]


class InventoryContent(TypedDict):
    pool: str
    """The name of the cluster."""
    taken: str
    """When it was queried."""
    machines: list[InventoryMachineRow]
    notes: list[str]


class InventoryDocument(InventoryContent):
    """The GPUs of a cluster, by machine. A file that you write yourself needs fewer keys."""

    format: Literal["imagefactory.inventory/1"]


def inventory_json(inventory: Inventory) -> InventoryContent:
    """Return the document of the file without its format."""
    return InventoryContent(
        pool=inventory.pool,
        taken=_time(inventory.taken),
        machines=[_machine_json(machine) for machine in inventory.machines],
        notes=list(inventory.notes),
    )


def _machine_json(machine: PoolMachine) -> InventoryMachineRow:
    gpus = [
        InventoryGpuRow(
            id=gpu.id,
            uuid=gpu.uuid,
            name=gpu.name,
            capability=gpu.capability,
            memory=gpu.memory,
            driver=gpu.driver,
            cuda=gpu.cuda,
            mig=gpu.mig,
            free=gpu.free,
        )
        for gpu in machine.gpus
    ]
    return InventoryMachineRow(
        name=machine.name, start=machine.start, attributes=dict(machine.attributes), gpus=gpus
    )


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def write_inventory(path: Path, inventory: Inventory) -> None:
    """Write or replace an inventory. Raises UsageError if the path has another file or cannot be written."""
    try:
        if path.exists() and not _is_inventory(path):
            raise UsageError(
                "file-exists", f"{path} exists and is not an inventory", hint="pass another file"
            )
        replace_text(path, format_inventory(inventory))
    except OSError as error:
        raise UsageError(
            *os_problem("write", path, error), hint="pass a file in a directory that you can write to"
        ) from error


def _is_inventory(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT.encode() in file.read(200)


def read_inventory(path: Path) -> Inventory:
    """Return the inventory of a file. Raises UsageError."""
    try:
        if not path.is_file():
            raise UsageError("inventory-not-found", f"{path} is not a file", hint=HINT)
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
            changed = datetime.fromtimestamp(int(os.fstat(file.fileno()).st_mtime), UTC)
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint=HINT) from error
    if len(data) > MAX_BYTES:
        raise UsageError("inventory-too-large", f"{path} is larger than {MAX_BYTES // 2**20} MB", hint=HINT)
    try:
        return parse_inventory(data.decode("utf-8"), str(path), changed)
    except UnicodeDecodeError as error:
        raise UsageError("inventory-not-text", f"{path} is not UTF-8 text", hint=HINT) from error


def parse_inventory(text: str, file: str, changed: datetime) -> Inventory:
    """Parse an inventory in JSON or YAML, or a list of GPUs.

    An inventory without a time gets the time `changed` of its file. Raises UsageError, or RecipeError for
    YAML. Both name `file`.
    """
    begin = text.lstrip()[:1]
    if begin != "{":  # a large file is JSON
        begin = re.sub(r"(?m)^\s*(?:#.*|---\s*)?$", "", text).lstrip()[:1]
    if begin in ("-", "["):
        return _of_list(parse_gpus(text, file), file, changed)
    document = _parse_json(text, file) if begin in ("{", "") else _plain(parse_tree(text, file, YAML_LIMITS))
    top = _JsonLocation(file, "").fields(document, _TOP, ("format", "machines"))
    if top.values["format"] != FORMAT:
        top.at("format").refuse(top.values["format"], f'write "{FORMAT}"')
    machines = top.rows("machines", MAX_MACHINES)
    types: _Types = {}
    notes = top.rows("notes", MAX_MACHINES, [])
    return Inventory(
        pool=top.text("pool", NAME, "the pool's name"),
        taken=_moment(top) if "taken" in top.values else changed,
        machines=tuple(_machine(top.at(f"machines[{i}]"), value, types) for i, value in enumerate(machines)),
        notes=tuple(clean(str(note)) for note in notes),
    )


def _of_list(groups: Sequence[GpuGroup], file: str, changed: datetime) -> Inventory:
    """Return an inventory of listed GPUs, in machines of at most LISTED_GPUS. Raises UsageError."""
    sizes = [
        (group, min(LISTED_GPUS, group.count - start))
        for group in groups
        for start in range(0, min(group.count, LISTED_GPUS * (MAX_MACHINES + 1)), LISTED_GPUS)
    ]
    if len(sizes) > MAX_MACHINES:
        most = f"{LISTED_GPUS * MAX_MACHINES:,}"
        raise UsageError(
            "inventory-too-large", f"{file} lists more than {most} GPUs", hint="lower the counts"
        )
    machines = tuple(
        PoolMachine(name=f"listed-{number}", attributes={}, start="", gpus=(_listed_gpu(group),) * size)
        for number, (group, size) in enumerate(sizes, 1)
    )
    return Inventory(pool="", taken=changed, machines=machines, listed=True)


def _listed_gpu(group: GpuGroup) -> PoolGpu:
    return PoolGpu(
        id="",
        uuid="",
        name=group.own_name,
        capability=str(group.capability),
        memory=0,
        driver=group.driver,
        cuda="",
        mig=False,
        free=True,
        host=group.host,
    )


def _plain(node: YamlNode, key: str = "") -> object:
    """Return YAML as the values that JSON has. Versions stay text, also without quotes."""
    if node.kind == "map":
        if len(set(node.keys)) < len(node.pairs):
            raise recipe_problem(node.where, "duplicate-key", "has a duplicate key", "remove one of them")
        return {name.text: _plain(value, name.text) for name, value in node.pairs}
    if node.kind == "list":
        return [_plain(item, key) for item in node.items]
    if node.made == "nothing":
        return None
    if node.made == "true or false" and node.text in ("true", "false"):
        return node.text == "true"
    return (
        int(node.text) if node.made == "a number" and key in _NUMBERS and node.text.isdigit() else node.text
    )


def _parse_json(text: str, file: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UsageError(
            "inventory-not-json",
            f"{file}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}",
            hint=HINT,
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "inventory-not-json", f"{file}: not valid JSON: {clean(str(error))[:100]}", hint=HINT
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is a duplicate key")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


class _JsonLocation:
    """The location of a value in JSON, `machines[0].gpus[1]`, and the fields of the object there."""

    def __init__(self, file: str, path: str, values: Mapping[str, Any] | None = None) -> None:
        self.file, self.path, self.values = file, path, values or {}

    def at(self, name: str) -> _JsonLocation:
        return _JsonLocation(self.file, f"{self.path}.{name}" if self.path else name)

    def refuse(self, value: object, write: str) -> NoReturn:
        text = clean(json.dumps(value, ensure_ascii=False))
        location = f"{self.file}: {self.path}" if self.path else self.file
        raise UsageError(
            "inventory-value-invalid",
            f"{location}: {text[:60]}{'...' if len(text) > 60 else ''} is not a valid value",
            hint=write,
        )

    def fields(self, value: object, known: tuple[str, ...], required: tuple[str, ...]) -> _JsonLocation:
        if not isinstance(value, dict):
            self.refuse(value, f"write an object with {', '.join(known)}")
        location = f"{self.file}: {self.path}".rstrip(": ")
        for name in value:
            if name not in known:
                suggestion = nearest(name, known)
                hint = f"did you mean '{suggestion}'?" if suggestion else f"the keys are {', '.join(known)}"
                raise UsageError(
                    "inventory-key-unknown", f"{location}: unknown key '{clean(name)[:60]}'", hint=hint
                )
        for name in required:
            if name not in value:
                raise UsageError(
                    "inventory-key-missing", f"{location}: the key '{name}' is missing", hint=HINT
                )
        return _JsonLocation(self.file, self.path, value)

    def rows(self, key: str, most: int, default: object = None) -> list[Any]:
        value = self.values.get(key, default)
        if not isinstance(value, list) or len(value) > most:
            self.at(key).refuse(value, f"write a list of at most {most:,}")
        return value

    def text(self, key: str, pattern: str, value_name: str) -> str:
        """Return a string that fully matches the pattern, or an empty one."""
        value = self.values.get(key, "")
        if not isinstance(value, str) or (value and not re.fullmatch(pattern, value, re.ASCII)):
            self.at(key).refuse(value, f"write {value_name}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.at(key).refuse(value, "write true or false")
        return value


def _moment(top: _JsonLocation) -> datetime:
    value = top.values["taken"]
    try:
        return datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except (TypeError, ValueError):
        top.at("taken").refuse(value, "write the time in UTC: 2026-11-22T06:00:00Z")


def _machine(job_directory: _JsonLocation, value: object, types: _Types) -> PoolMachine:
    row = job_directory.fields(value, _MACHINE, ("name", "gpus"))
    name = row.text("name", NAME, "the machine's name: letters, digits, dots, dashes, @")
    if not name:
        row.at("name").refuse(name, "write the name of the machine")
    start = row.values.get("start", "")
    if not isinstance(start, str) or len(start) > MAX_TEXT or not start.isprintable():
        row.at("start").refuse(start, "write its START expression in one line, or nothing")
    gpus = row.rows("gpus", MAX_GPUS)
    attributes = _attributes(row.at("attributes"), row.values.get("attributes", {}))
    host = host_of(attributes)
    return PoolMachine(
        name=name,
        attributes=attributes,
        start=start,
        gpus=tuple(_gpu(row, i, gpu, types, host) for i, gpu in enumerate(gpus)),
    )


def _attributes(job_directory: _JsonLocation, value: object) -> dict[str, str | int | float | bool]:
    if not isinstance(value, dict) or len(value) > MAX_ATTRIBUTES:
        job_directory.refuse(
            value, f"write an object with at most {MAX_ATTRIBUTES} attributes of the machine"
        )
    for key, attribute in value.items():
        if not _ATTRIBUTE.fullmatch(key):
            job_directory.refuse(key, "write the name of an attribute: letters, digits, _ and dots")
        text = isinstance(attribute, str) and len(attribute) <= MAX_TEXT and attribute.isprintable()
        number = (
            math.isfinite(attribute)
            if isinstance(attribute, float)
            else isinstance(attribute, int) and abs(attribute) < 1 << 63
        )
        if not text and not number:
            job_directory.at(key).refuse(attribute, "write a string in one line, a number, true or false")
    return value


_Types = dict[tuple[str, str], PoolGpu]
"""GPUs by the values of their JSON except the IDs. In a large pool, most rows differ only in these."""
_ID, _ATTRIBUTE = re.compile(ID, re.ASCII), re.compile(ATTRIBUTE, re.ASCII)


def _gpu(machine: _JsonLocation, number: int, value: object, types: _Types, host: str) -> PoolGpu:
    if not isinstance(value, dict):
        return replace(_parse_gpu(machine.at(f"gpus[{number}]"), value), host=host)
    rest = value.copy()
    own_id, uuid = rest.pop("id", ""), rest.pop("uuid", "")
    key = host, repr(rest)
    known = types.get(key)
    if known is None or not (_is_id(own_id) and _is_id(uuid)):
        types[key] = replace(_parse_gpu(machine.at(f"gpus[{number}]"), value), host=host)
        return types[key]
    return PoolGpu(
        id=own_id,
        uuid=uuid,
        name=known.name,
        capability=known.capability,
        memory=known.memory,
        driver=known.driver,
        cuda=known.cuda,
        mig=known.mig,
        free=known.free,
        host=host,
    )


def _is_id(text: object) -> bool:
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def _parse_gpu(job_directory: _JsonLocation, value: object) -> PoolGpu:
    row = job_directory.fields(value, _GPU, ("capability",))
    memory = row.values.get("memory", 0)
    if isinstance(memory, bool) or not isinstance(memory, int) or not 0 <= memory < 2**60:
        row.at("memory").refuse(memory, "write its memory in bytes, or 0 if unknown")
    driver = row.values.get("driver", "")
    try:
        if driver != "":
            parse_driver(driver)
    except (ValueError, AttributeError, TypeError):
        row.at("driver").refuse(driver, "write the driver version, such as 550.54.15")
    capability = row.text(
        "capability", r"[0-9]{1,2}\.[0-9]|gfx[0-9]{1,2}[0-9a-f]{2}", "a compute capability such as 8.6"
    )
    name = row.text("name", DEVICE, "the name that the driver reports")
    return PoolGpu(
        id=row.text("id", ID, "the pool's name for it, such as GPU-a0223334"),
        uuid=row.text("uuid", ID, "GPU- and its UUID"),
        name=name,
        capability=str(parse_capability(capability)) if capability else "",
        memory=memory,
        driver=str(driver),
        cuda=row.text("cuda", CUDA, "the newest CUDA that its driver takes, such as 12.4"),
        mig=row.flag("mig", default=bool(mig_profile(name))),
        free=row.flag("free", default=True),
    )
