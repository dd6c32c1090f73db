"""Newer series and Pythons on a project's page that the rows of a family lack. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.outdated import PypiRelease, releases
from imagefactory.lock.pypi.requirements import fitting_set


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSeries:
    """A series (`2.16`) without a row: its newest `release`, and the Pythons of rows that it supports.

    `begun` is the day of its first release, None if unknown.
    """

    series: str
    release: str
    begun: date | None
    pythons: tuple[str, ...]


def newer_series(
    name: str, files: Iterable[IndexFile], rows: Collection[str], pythons: Collection[str], platform: str
) -> tuple[FrameworkSeries, ...]:
    """Return `series_after` of the wheels for `pythons`. `platform` is a lock's (`manylinux_2_36_x86_64`)."""
    files, offered = tuple(files), {}
    for python in pythons:
        fits = fitting_set(python, platform)
        some = [file for file in files if any(tag in fits for tag in wheel_tags(file.filename))]
        offered[python] = releases(name, some, python)
    return series_after(offered, rows)


def series_after(
    offered: Mapping[str, Sequence[PypiRelease]], rows: Collection[str]
) -> tuple[FrameworkSeries, ...]:
    """Return the series after the newest of `rows` (`2.15`) among releases, the oldest first.

    `offered` has the releases for each Python. A series has as many numbers as the newest row.
    """
    newest = max(map(Version, rows))
    depth = len(newest.release)
    current = _cut(newest, depth)
    grouped: dict[tuple[int, ...], list[tuple[Version, date | None, set[str]]]] = {}
    for python in sorted(offered, key=Version):
        for item in offered[python]:
            if item.version.epoch == newest.epoch and (cut := _cut(item.version, depth)) > current:
                grouped.setdefault(cut, []).append((item.version, item.uploaded, {python}))
    result = []
    for cut, group in sorted(grouped.items()):
        days = [day for _, day, _ in group if day]
        last = max(version for version, _, _ in group)
        fitting = {python for version, _, names in group if version == last for python in names}
        result.append(
            FrameworkSeries(
                series=".".join(map(str, cut)),
                release=last.public,
                begun=min(days) if days else None,
                pythons=tuple(sorted(fitting, key=Version)),
            )
        )
    return tuple(result)


def first_series_after(some: Iterable[PypiRelease], day: date) -> str:
    """Return the oldest series (`2.1`) that was released after `day`; empty for none, or for all."""
    begun: dict[tuple[int, ...], date] = {}
    for release in some:
        if release.uploaded:
            cut = _cut(release.version, 2)
            begun[cut] = min(release.uploaded, begun.get(cut, release.uploaded))
    later = [cut for cut, first in sorted(begun.items()) if first > day]
    return ".".join(map(str, later[0])) if later and later[0] != min(begun) else ""


def newest_python(name: str, files: Iterable[IndexFile], platform: str) -> tuple[str, str]:
    """Return (release, Python): the newest Python for which the newest release has its own wheel.

    Both are empty if no release has one. A wheel for any Python 3 names none, a wheel of the stable ABI only
    the first. Free-threaded builds (`cp314t`) are another interpreter.
    """
    python_versions: dict[str, set[str]] = {}
    listed = tuple(files)
    for file in listed:
        for tag in wheel_tags(file.filename):
            match = re.fullmatch(r"cp3([0-9]+)", tag.interpreter)
            if match and tag.abi == tag.interpreter:
                python = f"3.{match[1]}"
                if tag in fitting_set(python, platform):
                    python_versions.setdefault(python, set()).add(file.filename)
    return python_after(
        {
            python: releases(name, (file for file in listed if file.filename in names), python)
            for python, names in python_versions.items()
        }
    )


def python_after(offered: Mapping[str, Sequence[PypiRelease]]) -> tuple[str, str]:
    """Return (release, Python): the newest Python of the newest release; empty without a release."""
    best = max(
        ((some[-1].version, Version(python)) for python, some in offered.items() if some), default=None
    )
    return (best[0].public, str(best[1])) if best else ("", "")


def cuda_extras(extras: Iterable[str]) -> frozenset[str]:
    """Return the CUDA majors (`13`) in a distribution's extras (`cuda13`, `cu13`)."""
    matches = (re.fullmatch(r"cu(?:da)?-?([0-9]{2})x?", canonicalize_name(extra)) for extra in extras)
    return frozenset(match[1] for match in matches if match)


def wheel_tags(filename: str) -> frozenset[Tag]:
    """Return the tags of a wheel's file name, none for any other file."""
    try:
        return parse_wheel_filename(filename)[3]
    except (InvalidWheelFilename, InvalidVersion):
        return frozenset()


def cuda_of(needs: Iterable[str]) -> str:
    """Return the CUDA version (`13.2`) that a wheel's Requires-Dist pins, empty for none or several."""
    versions = set(_cudas(needs))
    return versions.pop() if len(versions) == 1 else ""


def _cudas(needs: Iterable[str]) -> Iterator[str]:
    for text in needs:
        try:
            need = Requirement(text)
        except InvalidRequirement:  # an old form
            continue
        if re.fullmatch(r"cuda-toolkit|nvidia-cuda-runtime(-cu[0-9]+)?", canonicalize_name(need.name)):
            for bound in need.specifier:
                match = re.match(r"([0-9]+\.[0-9]+)", bound.version)
                if bound.operator == "==" and match:
                    yield match[1]


def _cut(version: Version, depth: int) -> tuple[int, ...]:
    return (*version.release, *(0,) * depth)[:depth]
