"""CUDA forward compatibility: whether programs use the image's libcuda or that of the machine's driver.

It uses only the standard library. The sandbox and kits have this file as a link. Source: NVIDIA's container
toolkit, cmd/nvidia-cdi-hook/cudacompat (cudacompat.go, cuda-elf-header.go).
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Sequence
from typing import NamedTuple

FORWARD_DIRECTORY = "/usr/local/cuda/compat"
"""The only directory of an image in which NVIDIA's hook looks for a libcuda."""
FORWARD_LIBRARY = re.compile(r"libcuda\.so\.([0-9]{3,4}(?:\.[0-9]{1,5}){1,2})")
NOTE_LIMIT = 4096  # bytes of an ELF note
HEAD = 1 << 20  # bytes at the start of a library that have its note, which is loaded before the code
LOOK = f"""cd {FORWARD_DIRECTORY} 2>/dev/null || exit 0
for file in libcuda.so.*.*; do [ -f "$file" ] && [ ! -L "$file" ] && echo "$file" && only=$file; done
echo; head -c {HEAD} "${{only:-/dev/null}}\""""
"""A shell script for `read_look`. It runs in a container whose runtime has no hook of NVIDIA's."""
LOOK_SECONDS = 60.0
FIRST = 'export LD_LIBRARY_PATH="$0${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; exec "$@"'
"""A shell script that runs a command with the directory $0 first in the library path."""
_NOTE = re.compile(rb"NVIDIA Corporation\0{1,4}(\{[^{}\0]{1,2000}\})")
_CONSUMER = re.compile(r"\b(?:GeForce|GTX|TITAN|RTX [2-9]0[5-9]0)\b", re.IGNORECASE)


class ForwardNote(NamedTuple):
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


def forward_directory(names: Sequence[str], head: bytes, driver: str, gpus: Sequence[str]) -> str:
    """Return FORWARD_DIRECTORY if its libcuda must come first in the library path, else an empty text.

    `names` are its regular files, of which exactly one must be a libcuda, and `head` the first bytes of that.
    """
    versions = [match[1] for match in map(FORWARD_LIBRARY.fullmatch, names) if match]
    if len(versions) != 1 or not chooses_forward(versions[0], parse_forward_note(head), driver, gpus):
        return ""
    return FORWARD_DIRECTORY


def read_look(output: bytes, driver: str, gpus: Sequence[str]) -> str:
    """Return `forward_directory` for the output of LOOK."""
    names, _, head = output.partition(b"\n\n")
    return forward_directory(names.decode("ascii", "replace").splitlines(), head, driver, gpus)
