"""Compute the disk and memory that a job requests, from the size of its image. Pure functions.

Sizes are in bytes. `GB` is 2^30 bytes, as in HTCondor (condor_submit manual, `request_disk`).
"""

from __future__ import annotations

import re
from datetime import timedelta

from imagefactory.errors import UsageError
from imagefactory.schedulers.pool import ImageKind

KB, MB, GB, TB = 2**10, 2**20, 2**30, 2**40
_UNITS = {"": MB, "K": KB, "KB": KB, "M": MB, "MB": MB, "G": GB, "GB": GB, "T": TB, "TB": TB}
_HOURS = {"m": 1 / 60, "h": 1, "d": 24, "w": 168}
_TIME = re.compile(r"([0-9]{1,6}) ?([mhdw])")
_SIZE = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,3}))? ?([KMGT]?B?)", re.IGNORECASE)

DISK_RESERVE = GB
"""Disk space for the files that a job writes."""
_FEWEST = 4 * GB
_UNPACKED = 3
"""The factor from the size of an image to its unpacked size, if unknown: CUDA libraries compress to a
third.
"""
_MOST = 1024 * TB


def image_disk(kind: ImageKind, size: int, unpacked: int) -> int:
    """Return the bytes that an image uses in the scratch directory of a job. `unpacked` is 0 if unknown.

    docker  its layers, the unpacked layers and a .sif: a machine without Docker builds it in the scratch
    directory, and a
            job cannot select machines by that
    oras    the file twice: Apptainer downloads it into a cache and runs a copy sif     the file: HTCondor
    transfers it, and it is mounted, not unpacked osdf    like sif
    """
    if kind is ImageKind.DOCKER:
        return 2 * size + (unpacked or _UNPACKED * size)
    return 2 * size if kind is ImageKind.ORAS else size


def disk_of(kind: ImageKind, size: int, unpacked: int, reserve: int = DISK_RESERVE) -> int:
    """Return the bytes for the image and for `reserve` inputs and results, in whole GB."""
    return _whole_units(image_disk(kind, size, unpacked) + reserve)


def memory_of(unpacked: int, size: int = 0) -> int:
    """Return the default memory of a job in bytes: 4 GB, and half of the unpacked image.

    If `unpacked` is 0 (unknown), `size` is used. A process that uses a GPU maps the libraries of the
    framework and copies the GPU code that it loads; these are most of an image. Python, the driver and data
    transfers need the 4 GB.
    """
    return _whole_units(_FEWEST + (unpacked or _UNPACKED * size) // 2)


def format_size(size: int) -> str:
    """Return `12GB` or `512MB`, the format of submit files, rounded up to whole MB."""
    megabytes = -(-size // MB)
    return f"{megabytes // 1024}GB" if megabytes % 1024 == 0 else f"{megabytes}MB"


def parse_size(text: str) -> int:
    """Parse `4GB`, `4G`, `1.5 TB` or `512` (MB, as in HTCondor) into bytes. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match and (unit := _UNITS.get(match[3].upper())):
        size = int(match[1]) * unit + (int(match[2]) * unit // 10 ** len(match[2]) if match[2] else 0)
    if not 0 < size <= _MOST:
        raise UsageError(
            "size-invalid", f"'{text[:40]}' is not a size", hint="write a number and its unit: 8GB"
        )
    return size


def parse_time(text: str) -> timedelta:
    """Parse `90m`, `12h`, `3d` or `1w`. Raises UsageError."""
    match = _TIME.fullmatch(text.strip())
    time = timedelta(hours=int(match[1]) * _HOURS[match[2]]) if match else timedelta()
    if not timedelta(0) < time <= timedelta(days=366):
        raise UsageError(
            "duration-invalid",
            f"'{text[:40]}' is not a duration",
            hint="write minutes, hours, days or weeks: 90m, 12h, 3d",
        )
    return time


def _whole_units(size: int) -> int:
    return -(-size // GB) * GB
