"""What a project's page of the index has that a family's rows have not: newer series, newer Pythons. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import date

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from imagefactory.lock.pypi.newest import releases
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.lock.pypi.tags import fitting_set


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSeries:
    """A series (`2.16`) that no row has: its newest `release`, and the Pythons of the rows that it is for.

    `begun` is the day of its first release, None where the index tells none.
    """

    series: str
    release: str
    begun: date | None
    pythons: tuple[str, ...]


def newer_series(
    name: str, files: Iterable[IndexFile], rows: Collection[str], pythons: Collection[str], platform: str
) -> tuple[NewSeries, ...]:
    """Series newer than the newest of `rows` (`2.15`), with wheels for one of `pythons`; the oldest first.

    A series has as many numbers as the newest row names. `platform` is a lock's (`manylinux_2_36_x86_64`).
    """
    files = tuple(files)
    newest = max(map(Version, rows))
    depth = len(newest.release)
    held = _cut(newest, depth)
    grouped: dict[tuple[int, ...], list[tuple[Version, date | None, set[str]]]] = {}
    for python in sorted(pythons, key=Version):
        fits = fitting_set(python, platform)
        offered = [file for file in files if any(tag in fits for tag in wheel_tags(file.filename))]
        for one in releases(name, offered, python):
            if one.version.epoch == newest.epoch and (cut := _cut(one.version, depth)) > held:
                grouped.setdefault(cut, []).append((one.version, one.uploaded, {python}))
    found = []
    for cut, group in sorted(grouped.items()):
        days = [day for _, day, _ in group if day]
        last = max(version for version, _, _ in group)
        told = {python for version, _, given in group if version == last for python in given}
        found.append(
            NewSeries(
                series=".".join(map(str, cut)),
                release=last.public,
                begun=min(days) if days else None,
                pythons=tuple(sorted(told, key=Version)),
            )
        )
    return tuple(found)


def newest_python(name: str, files: Iterable[IndexFile], platform: str) -> tuple[str, str]:
    """(release, Python): the newest Python that the newest release has a wheel of its own for.

    Both are empty where no release has one: a wheel for any Python 3 names none, one of the stable ABI only
    the first. Free-threaded builds (`cp314t`) are another interpreter.
    """
    own: dict[str, set[str]] = {}
    listed = tuple(files)
    for file in listed:
        for tag in wheel_tags(file.filename):
            match = re.fullmatch(r"cp3([0-9]+)", tag.interpreter)
            if match and tag.abi == tag.interpreter:
                python = f"3.{match[1]}"
                if tag in fitting_set(python, platform):
                    own.setdefault(python, set()).add(file.filename)
    best: tuple[Version, Version] | None = None
    for python, names in own.items():
        known = releases(name, (file for file in listed if file.filename in names), python)
        if known:
            best = max(filter(None, (best, (known[-1].version, Version(python)))))
    return (best[0].public, str(best[1])) if best else ("", "")


def wheel_tags(filename: str) -> frozenset[Tag]:
    """The tags of a wheel's file name, none for any other file."""
    try:
        return parse_wheel_filename(filename)[3]
    except (InvalidWheelFilename, InvalidVersion):
        return frozenset()


def cuda_of(needs: Iterable[str]) -> str:
    """The CUDA (`13.2`) that a wheel's Requires-Dist pins, empty where it pins none or several."""
    found = set(_cudas(needs))
    return found.pop() if len(found) == 1 else ""


def _cudas(needs: Iterable[str]) -> Iterator[str]:
    for text in needs:
        try:
            need = Requirement(text)
        except InvalidRequirement:  # of another time
            continue
        if re.fullmatch(r"cuda-toolkit|nvidia-cuda-runtime(-cu[0-9]+)?", canonicalize_name(need.name)):
            for one in need.specifier:
                match = re.match(r"([0-9]+\.[0-9]+)", one.version)
                if one.operator == "==" and match:
                    yield match[1]


def _cut(version: Version, depth: int) -> tuple[int, ...]:
    return (*version.release, *(0,) * depth)[:depth]
