"""CUDA forward compatibility: whether programs use the image's libcuda or that of the machine's driver.

It uses only the standard library. The sandbox and kits have this file as a link. Source: NVIDIA's container
toolkit, cmd/nvidia-cdi-hook/cudacompat (cudacompat.go, cuda-elf-header.go).
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass

FORWARD_DIRECTORY = "/usr/local/cuda/compat"
"""The only directory of an image in which NVIDIA's hook looks for a libcuda."""
FORWARD_LIBRARY = re.compile(r"libcuda\.so\.([0-9]{3,4}(?:\.[0-9]{1,5}){1,2})")
NOTE_LIMIT = 4096  # bytes of an ELF note
_NOTE = re.compile(rb"NVIDIA Corporation\0{1,4}(\{[^{}\0]{1,2000}\})")
_CONSUMER = re.compile(r"\b(?:GeForce|GTX|TITAN|RTX [2-9]0[5-9]0)\b", re.IGNORECASE)


@dataclass(frozen=True)
class ForwardNote:
    """The note `.note.cuda.fwd_compatibility` of a libcuda: its CUDA version, and the driver branches that it
    serves, none for a Jetson.
    """

    cuda: str
    drivers: tuple[int, ...]


def parse_forward_note(data: mmap.mmap | bytes) -> ForwardNote | None:
    """Return the note in the bytes of a library, None without a valid one. The keys may have any case."""
    match = _NOTE.search(data)
    try:
        row = json.loads(match[1]) if match else {}
    except (ValueError, RecursionError):
        return None
    values = {name.casefold(): value for name, value in row.items()}
    cuda, drivers = values.get("cuda version"), values.get("driver") or []
    if not isinstance(cuda, str) or not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", cuda):
        return None
    if not isinstance(drivers, list) or not all(
        type(branch) is int and 0 < branch < 10000 for branch in drivers
    ):
        return None
    return ForwardNote(cuda, tuple(drivers))


def serves_driver(version: str, note: ForwardNote | None, driver: str) -> bool:
    """Return whether the libcuda of `version` runs on an older `driver` (`535.54.03`), as NVIDIA's hook does.

    The driver must be older, and its branch in the note. Without a note its branch must be older. No driver
    (an empty text) is never served.
    """
    ours, host = (tuple(map(int, re.findall(r"[0-9]+", text))) for text in (version, driver))
    if not ours or not host:
        return False
    return host[0] < ours[0] if note is None else host[0] in note.drivers and host < ours


def is_consumer(gpu: str) -> bool:
    """Return whether a GPU is known to reject forward compatibility (error 804), by its name."""
    return bool(_CONSUMER.search(gpu))


def chooses_forward(version: str, note: ForwardNote | None, driver: str, gpus: Sequence[str]) -> bool:
    """Return whether programs must use the image's libcuda, as NVIDIA's hook decides.

    In contrast to the hook, not on a GPU whose name shows that CUDA would fail there. `gpus` are the names
    that are known, and may be empty.
    """
    return serves_driver(version, note, driver) and not any(map(is_consumer, gpus))
