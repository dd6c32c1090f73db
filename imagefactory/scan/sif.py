"""The root file system of a .sif, unpacked for a scan: a squashfs, which unsquashfs reads without root."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imagefactory.errors import ToolError
from imagefactory.oci.sif_container import read_partition
from imagefactory.progress import Progress, format_bytes
from imagefactory.trees import remove_tree


@contextmanager
def unpacked_sif(path: Path, scratch: Path, progress: Progress) -> Iterator[Path]:
    """The root of the .sif at `path` as a folder below `scratch`, removed at the end.

    Raises UsageError for what is no .sif, ToolError where unsquashfs is missing or fails.
    """
    partition = read_partition(path)
    command = shutil.which("unsquashfs")
    if command is None:
        raise ToolError(
            "tool-missing",
            f"unsquashfs is not installed, and {path.name} cannot be scanned without it",
            hint="install squashfs-tools (Debian: apt install squashfs-tools)",
        )
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="sif-"))
    root = folder / "root"
    argv = [command, "-offset", str(partition.offset), "-dest", str(root)]
    argv += ["-no-xattrs", "-no-progress", "-quiet", str(path.absolute())]
    try:
        with progress.stage(f"unpack {path.name} ({format_bytes(partition.size)}) into {scratch}"):
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
            )
        # 2: something was left out, as device files are without root; only files matter here.
        if done.returncode not in (0, 2) or not root.is_dir():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise ToolError(
                "sif-unpack-failed",
                f"unsquashfs cannot unpack {path.name}: {lines[-1][:300]}",
                hint=f"check the free space in {scratch}",
            )
        yield root
    finally:
        remove_tree(folder)
