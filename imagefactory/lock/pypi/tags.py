"""Which wheels fit a Python on a platform."""

from __future__ import annotations

import re
from functools import lru_cache

from packaging import tags


@lru_cache(maxsize=32)
def fitting_tags(python: str, platform: str) -> tuple[tags.Tag, ...]:
    """The wheel tags that CPython `python` takes on `platform`, best first.

    `platform` is `manylinux_2_36_x86_64`: a wheel for this glibc or an older one fits. Sources: PEP 425,
    PEP 600 with its aliases for the older names, and packaging's order.
    """
    match = re.fullmatch(r"manylinux_2_([0-9]+)_(\w+)", platform)
    if not match:
        raise ValueError(f"not a manylinux platform: {platform}")
    machine, oldest = match[2], 5 if match[2] == "x86_64" else 17
    older_names = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(int(match[1]), oldest - 1, -1):
        platforms.append(f"manylinux_2_{minor}_{machine}")
        if minor in older_names:
            platforms.append(f"{older_names[minor]}_{machine}")
    platforms.append(f"linux_{machine}")
    major, _, minor_text = python.partition(".")
    version, interpreter = (int(major), int(minor_text)), f"cp{major}{minor_text}"
    return (
        *tags.cpython_tags(version, abis=[interpreter], platforms=platforms),
        *tags.compatible_tags(version, interpreter=interpreter, platforms=platforms),
    )


@lru_cache(maxsize=32)
def fitting_set(python: str, platform: str) -> frozenset[tags.Tag]:
    """`fitting_tags` to look in: a wheel has a tag or few, and there are hundreds that fit."""
    return frozenset(fitting_tags(python, platform))
