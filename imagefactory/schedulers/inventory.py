"""Inventories as files: what a pool had at one time, to plan by where the pool cannot be asked.

    {"format": "imagefactory.inventory/1", "pool": "cm.example.org", "taken": "2026-11-22T06:00:00Z",
     "machines": [{"name": "gpu01.example.org", "start": "true", "attributes": {"Memory": 515000},
                   "gpus": [{"id": "GPU-a0223334", "name": "NVIDIA A100-SXM4-40GB", "capability": "8.0",
                             "memory": 42503241728, "cuda": "12.4"}]}]}

One machine a line, so that two of them can be compared. A person may write one: of a machine only `name` and
`pool` must stand there, of a GPU only `capability`, empty where nobody tells it. Without `taken` the time of
the file counts. The attribute `Arch`
(`aarch64`) says a machine's processor. The reader is strict, and errors name what they mean as
`inventory.json: machines[0].gpus[0].capability`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from imagefactory.errors import UsageError, os_problem
from imagefactory.fs import replace_text
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.drivers import parse_driver
from imagefactory.gpu.values import slice_of
from imagefactory.schedulers.htcondor.ads import ATTRIBUTE, CUDA, DEVICE, ID, NAME, with_host
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.verify.outcome import clean
from imagefactory.versions import nearest

FORMAT = "imagefactory.inventory/1"
MAX_BYTES = 256 * 2**20
MAX_MACHINES = 50_000
MAX_GPUS = 1024
MAX_ATTRIBUTES = 2000
MAX_TEXT = 20_000
HINT = "imagefactory gpus -o FILE writes one"

_TOP = ("format", "pool", "taken", "machines", "notes")
_MACHINE = ("name", "start", "attributes", "gpus")
_GPU = ("id", "uuid", "name", "capability", "memory", "driver", "cuda", "mig", "free")


# --- writing -------------------------------------------------------------------------------------


def format_inventory(inventory: Inventory) -> str:
    """The text of the file; the same for the same inventory."""
    head = {"format": FORMAT, "pool": inventory.pool, "taken": _time(inventory.taken)}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    machines = [f"  {json.dumps(_machine_json(machine))}" for machine in inventory.machines]
    notes = [f"  {json.dumps(note)}" for note in inventory.notes]
    for key, rows, end in (("machines", machines, ","), ("notes", notes, "")):
        lines += [f' "{key}": [', ",\n".join(rows), f" ]{end}"] if rows else [f' "{key}": []{end}']
    return "\n".join(["{", *lines, "}", ""])


def inventory_json(inventory: Inventory) -> dict[str, object]:
    """The document of the file, less its format."""
    return {
        "pool": inventory.pool,
        "taken": _time(inventory.taken),
        "machines": [_machine_json(machine) for machine in inventory.machines],
        "notes": list(inventory.notes),
    }


def _machine_json(machine: PoolMachine) -> dict[str, object]:
    gpus = [{key: getattr(gpu, key) for key in _GPU} for gpu in machine.gpus]
    return {
        "name": machine.name,
        "start": machine.start,
        "attributes": dict(machine.attributes),
        "gpus": gpus,
    }


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def write_inventory(path: Path, inventory: Inventory) -> None:
    """Writes the file, or puts a newer one in the place of an older. Raises UsageError for a place that has
    another file, or that cannot be written."""
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


# --- reading -------------------------------------------------------------------------------------


def read_inventory(path: Path) -> Inventory:
    """The inventory of a file. Raises UsageError for one that cannot be read or is none."""
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
    """What `format_inventory` wrote, or a person; `file` is what errors call it. Raises UsageError.

    An inventory that names no time is of the time when its file was `changed`.
    """
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
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
    top = _JsonLocation(file, "").fields(document, _TOP, ("format", "machines"))
    if top.given["format"] != FORMAT:
        top.at("format").refuse(top.given["format"], f'write "{FORMAT}"')
    machines = top.at("machines").listed(top.given["machines"], MAX_MACHINES)
    notes = top.at("notes").listed(top.given.get("notes", []), MAX_MACHINES)
    return Inventory(
        pool=top.text("pool", NAME, "the pool's name"),
        taken=_moment(top) if "taken" in top.given else changed,
        machines=tuple(_machine(top.at(f"machines[{i}]"), value) for i, value in enumerate(machines)),
        notes=tuple(clean(str(note)) for note in notes),
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is a duplicate key")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


class _JsonLocation:
    """Where a value stands: `machines[0].gpus[1]`, with the fields that were found there."""

    def __init__(self, file: str, path: str, given: Mapping[str, Any] | None = None) -> None:
        self.file, self.path, self.given = file, path, given or {}

    def at(self, name: str) -> _JsonLocation:
        return _JsonLocation(self.file, f"{self.path}.{name}" if self.path else name)

    def refuse(self, value: object, write: str) -> NoReturn:
        said = clean(json.dumps(value, ensure_ascii=False))
        where = f"{self.file}: {self.path}" if self.path else self.file
        raise UsageError(
            "inventory-value-invalid",
            f"{where} cannot be {said[:60]}{'...' if len(said) > 60 else ''}",
            hint=write,
        )

    def fields(self, value: object, known: tuple[str, ...], needed: tuple[str, ...]) -> _JsonLocation:
        if not isinstance(value, dict):
            self.refuse(value, f"write an object with {', '.join(known)}")
        where = f"{self.file}: {self.path}".rstrip(": ")
        for name in value:
            if name not in known:
                near = nearest(name, known)
                meant = f"did you mean '{near}'?" if near else f"the keys are {', '.join(known)}"
                raise UsageError(
                    "inventory-key-unknown", f"{where}: unknown key '{clean(name)[:60]}'", hint=meant
                )
        for name in needed:
            if name not in value:
                raise UsageError("inventory-key-missing", f"{where}: the key '{name}' is missing", hint=HINT)
        return _JsonLocation(self.file, self.path, value)

    def listed(self, value: object, most: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            self.refuse(value, f"write a list of at most {most:,}")
        return value

    def text(self, key: str, pattern: str, what: str) -> str:
        """A text of all the pattern, or empty."""
        value = self.given.get(key, "")
        if not isinstance(value, str) or (value and not re.fullmatch(pattern, value, re.ASCII)):
            self.at(key).refuse(value, f"write {what}")
        return value

    def parsed(self, key: str, parse: Callable[[str], object], what: str) -> str:
        value = self.given.get(key, "")
        try:
            if value != "":
                parse(value)
        except (ValueError, AttributeError):
            self.at(key).refuse(value, f"write {what}")
        return str(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.given.get(key, default)
        if not isinstance(value, bool):
            self.at(key).refuse(value, "write true or false")
        return value


def _moment(top: _JsonLocation) -> datetime:
    value = top.given["taken"]
    try:
        return datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except (TypeError, ValueError):
        top.at("taken").refuse(value, "write the time in UTC: 2026-11-22T06:00:00Z")


def _machine(place: _JsonLocation, value: object) -> PoolMachine:
    told = place.fields(value, _MACHINE, ("name", "gpus"))
    name = told.text("name", NAME, "the machine's name: letters, digits, dots, dashes, @")
    if not name:
        told.at("name").refuse(name, "write the machine's name")
    start = told.given.get("start", "")
    if not isinstance(start, str) or len(start) > MAX_TEXT or not start.isprintable():
        told.at("start").refuse(start, "write its START expression in one line, or nothing")
    gpus = told.at("gpus").listed(told.given["gpus"], MAX_GPUS)
    attributes = _attributes(told.at("attributes"), told.given.get("attributes", {}))
    return PoolMachine(
        name=name,
        attributes=attributes,
        start=start,
        gpus=with_host((_gpu(told.at(f"gpus[{i}]"), gpu) for i, gpu in enumerate(gpus)), attributes),
    )


def _attributes(place: _JsonLocation, value: object) -> dict[str, str | int | float | bool]:
    if not isinstance(value, dict) or len(value) > MAX_ATTRIBUTES:
        place.refuse(value, f"write an object with at most {MAX_ATTRIBUTES} attributes of the machine's ad")
    for key, attribute in value.items():
        if not re.fullmatch(ATTRIBUTE, key, re.ASCII):
            place.refuse(key, "write the name of an attribute: letters, digits, _ and dots")
        text = isinstance(attribute, str) and len(attribute) <= MAX_TEXT and attribute.isprintable()
        number = (
            math.isfinite(attribute)
            if isinstance(attribute, float)
            else isinstance(attribute, int) and abs(attribute) < 1 << 63
        )
        if not text and not number:
            place.at(key).refuse(attribute, "write a text in one line, a number, true or false")
    return value


def _gpu(place: _JsonLocation, value: object) -> PoolGpu:
    told = place.fields(value, _GPU, ("capability",))
    memory = told.given.get("memory", 0)
    if isinstance(memory, bool) or not isinstance(memory, int) or not 0 <= memory < 2**60:
        told.at("memory").refuse(memory, "write its memory in bytes, or 0 where it is not known")
    capability = told.text("capability", r"[0-9]{1,2}\.[0-9]", "a compute capability such as 8.6")
    name = told.text("name", DEVICE, "the name that the driver reports")
    return PoolGpu(
        id=told.text("id", ID, "the pool's name for it, such as GPU-a0223334"),
        uuid=told.text("uuid", ID, "GPU- and its UUID"),
        name=name,
        capability=str(parse_capability(capability)) if capability else "",
        memory=memory,
        driver=told.parsed("driver", parse_driver, "the driver's version, such as 550.54.15"),
        cuda=told.text("cuda", CUDA, "the newest CUDA that its driver takes, such as 12.4"),
        mig=told.flag("mig", default=bool(slice_of(name))),
        free=told.flag("free", default=True),
    )
