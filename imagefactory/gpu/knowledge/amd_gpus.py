"""GPUs of AMD's: their processors, the names they are sold by, and which ROCm is known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.knowledge.tables import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SoldGpu:
    """A GPU as AMD sells it."""

    name: str
    processor: Capability
    source: str


@cache
def amd_gpus() -> tuple[SoldGpu, ...]:
    """All known GPUs of AMD's, in the order of amd.toml: the newest first."""
    return tuple(
        SoldGpu(name=name, processor=parse_capability(row["processor"]), source=row["source"])
        for row in read_table("amd")["sold"]
        for name in row["names"]
    )


@cache
def processors() -> tuple[Capability, ...]:
    """The processors of GPUs that AMD sells, in the order of their numbers."""
    return tuple(sorted({gpu.processor for gpu in amd_gpus()}))


@cache
def known_processors() -> frozenset[str]:
    """The names of all processors that a table here knows, sold by a name or not."""
    return frozenset({*map(str, processors())}.union(*generic_processors().values()))


@cache
def generic_processors() -> dict[str, frozenset[str]]:
    """The processors that run the code of each generic one: `gfx11-generic` -> gfx1100, gfx1101, ..."""
    return {row["name"]: frozenset(row["processors"]) for row in read_table("amd")["generic"]}


def find_amd(words: Sequence[str]) -> SoldGpu | None:
    """The GPU all of whose name is among `words` (`("amd", "mi250x")`); of several the longest name's."""
    asked = set(words)
    fitting = [gpu for gpu in amd_gpus() if _words(gpu.name) <= asked]
    return max(fitting, key=lambda gpu: len(_words(gpu.name)), default=None)


@cache
def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def newest_rocm() -> int:
    """The newest major version of ROCm that is known."""
    return int(read_table("amd")["rocm"]["newest_major"])
