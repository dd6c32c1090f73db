"""Says whether a conda lock holds, against the records of its channels: no solver, no rattler, no conda.

Written from what conda documents of its rules: "Package match specifications", "Version ordering" and
"Strict channel priority" in its user guide, virtual packages and `constrains` in its repodata's description.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any

from imagefactory.model import Lock, LockedCondaPackage, Target

# --- versions ------------------------------------------------------------------------------------

Part = int | float | str
Version = tuple[tuple[Part, ...], ...]


@functools.lru_cache(maxsize=100_000)
def version_parts(text: str) -> tuple[int, Version, Version]:
    """Epoch, version and local version as rows of numbers and letters, ready to be compared."""
    rest = text.strip().lower().replace("-", "_")
    epoch, bang, after = rest.partition("!")
    public, _, local = (after if bang else rest).partition("+")
    if not re.fullmatch(r"[a-z0-9._*]+", public) or (bang and not epoch.isdigit()):
        raise ValueError(f"{text!r} is no version")
    return (int(epoch) if bang else 0), _rows(public), _rows(local) if local else ()


def _rows(text: str) -> Version:
    body, end = (text[:-1], "_") if text.endswith("_") else (text, "")  # 1.0.1_ comes before 1.0.1a
    components = body.replace("_", ".").split(".")
    components[-1] += end
    return tuple(_row(component) for component in components)


def _row(component: str) -> tuple[Part, ...]:
    if not component:
        raise ValueError("an empty part of a version")
    special: dict[str, Part] = {"post": float("inf"), "dev": "DEV"}  # capitals come before all letters
    runs: list[Part] = [
        int(run) if run.isdigit() else special.get(run, run) for run in re.findall(r"\d+|[^\d]+", component)
    ]
    return tuple(runs) if component[0].isdigit() else (0, *runs)


def compare(one: str, other: str) -> int:
    """-1, 0 or 1, as `one` is older than, as old as or newer than `other`."""
    epochs = [version_parts(text)[0] for text in (one, other)]
    if epochs[0] != epochs[1]:
        return -1 if epochs[0] < epochs[1] else 1
    for index in (1, 2):
        order = _compare_rows(_rows_of(one, index), _rows_of(other, index))
        if order:
            return order
    return 0


def _rows_of(text: str, index: int) -> Version:
    rows = version_parts(text)[index]
    assert isinstance(rows, tuple)
    return rows


def _compare_rows(ones: Version, others: Version) -> int:
    for one_row, other_row in zip_longest(ones, others, fillvalue=()):
        for one, other in zip_longest(one_row, other_row, fillvalue=0):
            if one == other:
                continue
            if isinstance(one, str) != isinstance(other, str):
                return -1 if isinstance(one, str) else 1  # letters come before numbers
            return -1 if one < other else 1  # type: ignore[operator]
    return 0


def begins_with(version: str, start: str) -> bool:
    """Whether `version` is `start` or a version below it: 1.2.3 and 1.2a begin with 1.2, 1.20 does not."""
    if version_parts(version)[0] != version_parts(start)[0]:
        return False
    rows, wanted = _rows_of(version, 1), _rows_of(start, 1)
    if len(rows) < len(wanted):
        rows = (*rows, *[(0,)] * (len(wanted) - len(rows)))
    *whole, last = wanted
    if any(_compare_rows((row,), (one,)) for row, one in zip(rows, whole, strict=False)):
        return False
    row = rows[len(whole)][: len(last)]
    return row == last or (
        len(row) == len(last)
        and row[:-1] == last[:-1]
        and isinstance(row[-1], str)
        and isinstance(last[-1], str)
        and row[-1].startswith(last[-1])
    )


def fits_version(version: str, spec: str) -> bool:
    """Whether a version fulfils `>=1.2,<2|3.*`: commas bind closer than bars."""
    spec = spec.strip()
    bracket = re.fullmatch(r"\(([^()]*)\),(.*)", spec)
    if bracket:
        return fits_version(version, bracket[1]) and fits_version(version, bracket[2])
    return any(all(_fits_one(version, one.strip()) for one in all_.split(",")) for all_ in spec.split("|"))


def _fits_one(version: str, bound: str) -> bool:
    found = re.fullmatch(r"(==|!=|<=|>=|~=|<|>|=)?\s*([A-Za-z0-9._!+-]*?)((?:\.?\*)+)?", bound)
    if not found or not (found[2] or found[3]):
        raise ValueError(f"{bound!r} is no bound that this checker reads")
    operator, asked, star = found[1] or "", found[2], bool(found[3])
    if not asked:
        return operator != "!="
    if operator == "!=":
        return not (begins_with(version, asked) if star else compare(version, asked) == 0)
    if operator == "~=":
        return compare(version, asked) >= 0 and begins_with(version, asked.rpartition(".")[0])
    if operator == "=" or (star and operator in ("", "==")):
        return begins_with(version, asked)
    order = compare(version, asked)
    orders = {"": (0,), "==": (0,), "<=": (-1, 0), ">=": (0, 1), "<": (-1,), ">": (1,)}
    return order in orders[operator]


# --- match specs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """`channel::name version build`; empty where anything will do."""

    name: str
    version: str = ""
    build: str = ""
    channel: str = ""

    def fits(self, version: str, build: str) -> bool:
        if self.version and not fits_version(version, self.version):
            return False
        if self.build.startswith("^") and self.build.endswith("$"):
            return re.fullmatch(self.build, build) is not None
        return not self.build or fnmatchcase(build, self.build.replace("[", "[[]"))


@functools.lru_cache(maxsize=100_000)
def parse_spec(text: str) -> Spec:
    channel, _, rest = text.strip().rpartition("::")
    found = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", rest)
    if not found or "[" in text:
        raise ValueError(f"{text!r} is no match spec that this checker reads")
    name, bounds = found[1].lower(), re.sub(r"(?<=[<>=!~,|])\s+|\s+(?=[,|])", "", found[2])
    short = re.fullmatch(r"==?([^=\s<>|,!~]+)=([^=\s]+)", bounds)  # name=1.2=build
    version, _, build = f"{short[1]} {short[2]}".partition(" ") if short else bounds.partition(" ")
    return Spec(name, "" if version == "*" else version, build.strip(), channel)


# --- records -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Record:
    """One package as its channel's repodata describes it."""

    url: str
    channel: str
    name: str
    version: str
    build: str
    sha256: str
    md5: str
    size: int
    depends: tuple[str, ...]
    constrains: tuple[str, ...]


def read_records(folder: Path, channels: Iterable[str], subdir: str = "linux-64") -> dict[str, Record]:
    """Address -> record of all packages of `channels`, read from a folder that holds channels by name.

    `https://conda.anaconda.org/nvidia/label/cuda-12.1.0` lies in `nvidia/label/cuda-12.1.0`.
    """
    records = {}
    for channel in channels:
        place = Path(channel.removeprefix("file://")) if channel.startswith("file:") else None
        for kind in (subdir, "noarch"):
            data = _read_repodata((place or folder / channel.split("/", 3)[3]) / kind)
            for part in ("packages", "packages.conda"):
                for filename, row in data.get(part, {}).items():
                    url = f"{channel}/{kind}/{filename}"
                    records[url] = Record(
                        url=url,
                        channel=channel,
                        name=row["name"],
                        version=row["version"],
                        build=row["build"],
                        sha256=row.get("sha256", ""),
                        md5=row.get("md5", ""),
                        size=row.get("size", 0),
                        depends=tuple(row.get("depends", ())),
                        constrains=tuple(row.get("constrains", ())),
                    )
    return records


def _read_repodata(folder: Path) -> dict[str, Any]:
    path = folder / "repodata.json"
    if path.exists():
        data = json.loads(path.read_bytes())
    else:
        import zstandard

        with (folder / "repodata.json.zst").open("rb") as stream:
            data = json.loads(zstandard.ZstdDecompressor().stream_reader(stream).read())
    assert isinstance(data, dict)
    return data


# --- the lock ------------------------------------------------------------------------------------


def check_lock(lock: Lock, target: Target, records: Mapping[str, Record]) -> list[str]:
    """What is wrong with a lock for its target, a line each; none when it holds.

    `records` are those of all its channels, whole: strict priority speaks of what was not taken too.
    """
    faults = [*_identity(lock, target, records)]
    known = [records[package.url] for package in lock.conda if package.url in records]
    there = virtual_packages(lock.virtual) | {record.name: (record.version, record.build) for record in known}
    for record in known:
        faults += _bounds(f"{record.name} {record.version} {record.build}", record, there)
    asked = [f"python {target.python}.*", *target.requirements]
    faults += [fault for spec in asked if (fault := _unfulfilled("the recipe needs", spec, there))]
    for spec in target.constraints:
        if parse_spec(spec).name in there:
            faults += [fault for fault in [_unfulfilled("the recipe constrains", spec, there)] if fault]
    faults += _channels(known, (lock.channels, target.priority), [*asked, *target.constraints], records)
    return [*faults, *_superfluous(known, [parse_spec(spec).name for spec in asked])]


def virtual_packages(system: Sequence[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Name -> (version, build) of the virtual packages of a lock's `system`, on Linux."""
    there = {"__unix": ("0", "0"), "__linux": ("0", "0")}
    for name, value in system:
        there[name] = ("1", value) if name == "__archspec" else (value, "0")
    return there


def _identity(lock: Lock, target: Target, records: Mapping[str, Record]) -> Iterator[str]:
    names = [package.name for package in lock.conda]
    yield from (f"{name} stands twice" for name in sorted(set(names)) if names.count(name) > 1)
    if lock.virtual != tuple(sorted(target.virtual)) or lock.channels != target.channels:
        yield "its system or channels are not the target's"
    for package in lock.conda:
        record = records.get(package.url)
        if record is None:
            yield f"{package.url} is in no channel"
            continue
        told: list[tuple[str, object, object]] = [
            (field, getattr(package, field), getattr(record, field))
            for field in ("name", "version", "build", "sha256", "md5", "size")
        ]
        told.append(("names of depends", _names(package.depends), _names(record.depends)))
        for field, here, there in told:
            if here != there and there != 0:  # a size of 0 is one that the channel does not tell
                yield f"{package.name}: {field} is {here}, the channel says {there}"


def _names(specs: Iterable[str]) -> list[str]:
    return sorted({parse_spec(spec).name for spec in specs})


def _bounds(who: str, record: Record, there: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    for spec in record.depends:
        fault = _unfulfilled(f"{who} needs", spec, there)
        if fault:
            yield fault
    for spec in record.constrains:
        if parse_spec(spec).name in there:
            fault = _unfulfilled(f"{who} constrains", spec, there)
            if fault:
                yield fault


def _unfulfilled(who: str, text: str, there: Mapping[str, tuple[str, str]]) -> str:
    spec = parse_spec(text)
    found = there.get(spec.name)
    if found is None:
        return f"{who} {text}, and there is none"
    return "" if spec.fits(*found) else f"{who} {text}, and there is {' '.join(found)}"


def _channels(
    known: Sequence[Record],
    order: tuple[Sequence[str], str],
    asked: Sequence[str],
    records: Mapping[str, Record],
) -> Iterator[str]:
    """What comes from another channel than it must."""
    channels, priority = order
    first: dict[str, str] = {}
    for channel in reversed(channels):
        first |= {record.name: channel for record in records.values() if record.channel == channel}
    named = {(spec := parse_spec(text)).name: spec.channel for text in asked if "::" in text}
    for record in known:
        wanted = named.get(record.name)
        if wanted is not None:
            if record.channel != wanted and not record.channel.endswith(f"/{wanted}"):
                yield f"{record.name} was asked from {wanted} and comes from {record.channel}"
        elif record.channel not in channels:
            yield f"{record.name} comes from {record.channel}, which is none of the lock's channels"
        elif priority == "strict" and record.channel != first[record.name]:
            yield f"{record.name} comes from {record.channel}, but {first[record.name]} is asked first"


def _superfluous(known: Sequence[Record], asked: Iterable[str]) -> Iterator[str]:
    """Packages that nothing needs."""
    by_name = {record.name: record for record in known}
    needed: set[str] = set()
    more = list(asked)
    while more:
        name = more.pop()
        if name in by_name and name not in needed:
            needed.add(name)
            more += _names(by_name[name].depends)
    yield from (f"nothing needs {name}" for name in sorted(by_name.keys() - needed))


def moved(
    before: Iterable[LockedCondaPackage], after: Iterable[LockedCondaPackage]
) -> dict[str, tuple[str, str]]:
    """Name -> (version build, version build) of packages that differ; empty where one was not there."""
    old = {package.name: package for package in before}
    new = {package.name: package for package in after}
    shown = {
        name: tuple(f"{side[name].version} {side[name].build}" if name in side else "" for side in (old, new))
        for name in old.keys() | new.keys()
        if (old[name].url if name in old else "") != (new[name].url if name in new else "")
    }
    return {name: (was, now) for name, (was, now) in sorted(shown.items())}
