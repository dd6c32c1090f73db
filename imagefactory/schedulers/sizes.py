"""How much disk and memory a job asks for, from the sizes of its image: rules with their reasons. Pure.

Sizes are bytes. HTCondor's `GB` is 2^30 bytes (condor_submit's manual, `request_disk`), and so is ours.
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
"""For what a job itself writes, where nobody says how much that is."""
_FEWEST = 4 * GB
_UNPACKED = 3
"""How many times its size an image unpacks to, where nobody counted: CUDA's libraries pack to a third."""
_MOST = 1024 * TB


def image_disk(kind: ImageKind, size: int, unpacked: int) -> int:
    """What an image takes of a job's scratch folder. `unpacked` is 0 where nobody knows.

    docker  its layers, then unpacked to be made into a .sif, then that .sif: apptainer does so in the job's
            scratch folder where a machine has no docker, and a job cannot choose the machine by that
    oras    the file twice: apptainer fetches it into a cache and runs it from a copy
    sif     the file: HTCondor transfers it, and it is mounted, not unpacked
    osdf    the same
    """
    if kind is ImageKind.DOCKER:
        return 2 * size + (unpacked or _UNPACKED * size)
    return 2 * size if kind is ImageKind.ORAS else size


def disk_of(kind: ImageKind, size: int, unpacked: int, own: int = DISK_RESERVE) -> int:
    """What a job asks for: its image, and `own` for its inputs and results."""
    return _whole_units(image_disk(kind, size, unpacked) + own)


def memory_of(unpacked: int, size: int = 0) -> int:
    """What a job asks for where nobody says: 4 GB, and half of the unpacked image above that.

    `unpacked` is 0 where nobody knows; then `size` tells.

    A process that uses a GPU maps the framework's libraries and keeps a copy of the GPU code that it loads,
    and these are most of an image; Python, the driver and the data's way to the GPU take the rest.
    """
    return _whole_units(_FEWEST + (unpacked or _UNPACKED * size) // 2)


def format_size(size: int) -> str:
    """As submit files write it: `12GB`, `512MB`; rounded up to whole MB."""
    megabytes = -(-size // MB)
    return f"{megabytes // 1024}GB" if megabytes % 1024 == 0 else f"{megabytes}MB"


def parse_size(text: str) -> int:
    """`4GB`, `4G`, `1.5 TB`, `512` (MB, as HTCondor takes memory) as bytes. Raises UsageError."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[3].upper()) if found else None
    size = 0
    if found and unit:
        size = int(found[1]) * unit + (int(found[2]) * unit // 10 ** len(found[2]) if found[2] else 0)
    if not 0 < size <= _MOST:
        raise UsageError(
            "size-invalid", f"'{text[:40]}' is not a size", hint="write a number and its unit: 8GB"
        )
    return size


def parse_time(text: str) -> timedelta:
    """`90m`, `12h`, `3d`, `1w`. Raises UsageError."""
    found = _TIME.fullmatch(text.strip())
    time = timedelta(hours=int(found[1]) * _HOURS[found[2]]) if found else timedelta()
    if not timedelta(0) < time <= timedelta(days=366):
        raise UsageError(
            "duration-invalid",
            f"'{text[:40]}' is not a duration",
            hint="write minutes, hours, days or weeks: 90m, 12h, 3d",
        )
    return time


def _whole_units(size: int) -> int:
    return -(-size // GB) * GB
