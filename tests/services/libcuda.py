"""The stand-in for libcuda: libcuda.c beside this file, compiled with the lies it shall tell."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("libcuda.c")

# Words in this variable replace those that it was compiled with.
VARIABLE = "IMAGEFACTORY_TEST_LIBCUDA"

# Its first device; of a slice (`slice=1`) this is the whole GPU.
NAME = "stand-in of the tests 0"
UUID = "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfe00"
SLICE = "MIG-10111213-1415-1617-1819-1a1b1c1d1e00"
MEMORY = 16 << 30


def build_libcuda(folder: Path, lies: str = "") -> Path:
    """Compiles it to `folder`/libcuda.so.1, for LD_LIBRARY_PATH; `lies` are words as libcuda.c has them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, f'-DLIES="{lies}"', str(SOURCE), "-o", str(made)], check=True)
    return made


def compile_libcuda(lies: str = "") -> bytes:
    """The library's bytes."""
    with tempfile.TemporaryDirectory(prefix="libcuda-") as folder:
        return build_libcuda(Path(folder), lies).read_bytes()
