"""The root file system of a .sif file, unpacked for a scan.

Format: sylabs/sif, `pkg/sif` (little endian): at 32 the magic, at 96 how many descriptors there are and
where; a descriptor of 585 bytes says what it is of and where that lies. The system partition is a
squashfs, which unsquashfs reads without root.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import ToolError, UsageError
from imagefactory.progress import Progress, format_bytes
from imagefactory.trees import remove_tree

MAGIC = b"SIF_MAGIC\0"
_HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
_DESCRIPTOR = struct.Struct("<i?III qqq qqqq 128s 384s".replace(" ", ""))
_PARTITION = 0x4004
_SQUASHFS, _SYSTEM = 1, 2  # file system; partition of the primary system
MOST_DESCRIPTORS = 4096
SUPERBLOCK = 96  # bytes of squashfs 4.0's


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Where the squashfs of the system lies in the file, in bytes."""

    offset: int
    size: int


def is_sif(path: Path) -> bool:
    """Whether the file begins as a .sif."""
    with path.open("rb") as file:
        return file.read(_HEADER.size)[32 : 32 + len(MAGIC)] == MAGIC


def parse_sif(data: bytes) -> tuple[int, int]:
    """(offset, count) of the descriptors, from a file's first bytes. Raises ValueError."""
    if len(data) < _HEADER.size:
        raise ValueError("it is cut")
    fields = _HEADER.unpack_from(data)
    if fields[1] != MAGIC:
        raise ValueError("it does not begin as one")
    total, offset = fields[8], fields[9]
    if not 0 <= total <= MOST_DESCRIPTORS or offset < 0:
        raise ValueError(f"it claims {total} descriptors")
    return offset, total


def parse_descriptors(data: bytes) -> Partition:
    """The system's partition. Raises ValueError where there is none, or it is no squashfs."""
    for at in range(0, len(data) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
        fields = _DESCRIPTOR.unpack_from(data, at)
        kind, used, offset, size, extra = fields[0], fields[1], fields[5], fields[6], fields[13]
        file_system, part = struct.unpack_from("<ii", extra)
        if used and kind == _PARTITION and part == _SYSTEM:
            if file_system != _SQUASHFS:
                raise ValueError("its system is no squashfs (encrypted, or a writable image?)")
            return Partition(offset=offset, size=size)
    raise ValueError("it has no system partition")


def read_partition(path: Path) -> Partition:
    """Where the system of the .sif at `path` lies. Raises UsageError."""
    try:
        with path.open("rb") as file:
            offset, total = parse_sif(file.read(_HEADER.size))
            file.seek(offset)
            partition = parse_descriptors(file.read(total * _DESCRIPTOR.size))
        if (
            partition.offset < 0
            or partition.size < 0
            or partition.offset + partition.size > path.stat().st_size
        ):
            raise ValueError("its system partition lies outside of the file")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="name what this user may read") from error
    except ValueError as error:
        raise UsageError(f"{path} is no proper .sif: {error}", hint="fetch or build it again") from error
    return partition


@contextmanager
def unpacked_sif(path: Path, scratch: Path, progress: Progress) -> Iterator[Path]:
    """The root of the .sif at `path` as a folder below `scratch`, removed at the end.

    Raises UsageError for what is no .sif, ToolError where unsquashfs is missing or fails.
    """
    partition = read_partition(path)
    command = shutil.which("unsquashfs")
    if command is None:
        raise ToolError(
            f"{path.name} can only be looked into with unsquashfs, which is not installed",
            hint="install squashfs-tools (Debian: apt install squashfs-tools)",
        )
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="sif-"))
    root = folder / "root"
    argv = [command, "-offset", str(partition.offset), "-dest", str(root)]
    argv += ["-no-xattrs", "-no-progress", "-quiet", str(path.absolute())]
    try:
        with progress.stage(f"unpack {path.name} ({format_bytes(partition.size)}) into {scratch}"):
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace")
        # 2: something was left out, as device files are without root; only files matter here.
        if done.returncode not in (0, 2) or not root.is_dir():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
            raise ToolError(
                f"unsquashfs cannot unpack {path.name}: {lines[-1][:300]}",
                hint=f"is there room for it in {scratch}?",
            )
        yield root
    finally:
        remove_tree(folder)
