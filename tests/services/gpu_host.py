"""A made-up machine with a GPU, for tests alone: folders instead of /proc and /dev, a compiled NVML.

Its `Places` are handed to what reads hardware. No command takes such places, so nothing of it can reach a
verdict that anybody's settings trust.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagefactory.runtime.hardware import Places

SOURCE = Path(__file__).with_name("libnvidia_ml.c")
UUID = "GPU-11111111-2222-3333-4444-555555555555"
# /dev/null has this major and minor number: a link to it is a device node that no test needs root for.
MAJOR, MINOR = 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the machine tells of its GPU. `known` and `module` are what /proc says, else as NVML.

    With `memory` 0 the GPU shares the 128 GiB of the machine. `lost` is the index of one that fails,
    as libnvidia_ml.c has it.
    """

    uuid: str = UUID
    name: str = "Test GPU"
    capability: str = "8.0"
    memory: int = 16 << 30
    driver: str = "550.90.07"
    module: str = ""
    known: str = ""
    mig: str = ""
    count: int = 1
    init: int = 0
    before_mig: bool = False
    lost: int = -1
    lost_in: int = 0
    lost_code: int = 15
    busy: int = 0


def make_host(folder: Path, told: Told | None = None) -> Places:
    """Writes the machine below `folder`."""
    told = told or Told()
    dev, proc, library = folder / "dev", folder / "proc", folder / "libnvidia-ml.so.1"
    gpu = proc / "driver/nvidia/gpus/0000:07:00.0"
    gpu.mkdir(parents=True)
    dev.mkdir()
    (dev / f"nvidia{MINOR}").symlink_to("/dev/null")
    (dev / "nvidiactl").symlink_to("/dev/null")
    (proc / "devices").write_text(
        f"Character devices:\n{MAJOR:3} nvidia\n  5 tty\n\nBlock devices:\n  8 sd\n", encoding="utf-8"
    )
    (proc / "meminfo").write_text("MemTotal:       134217728 kB\nMemFree:        1 kB\n", encoding="utf-8")
    (proc / "driver/nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {told.module or told.driver}  Fri May 31 2024\n"
        "GCC version:  gcc version 12.2.0\n",
        encoding="utf-8",
    )
    (gpu / "information").write_text(
        f"Model: \t\t {told.name}\nIRQ:   \t\t 1\nGPU UUID: \t {told.known or told.uuid}\n"
        f"Bus Location: \t 0000:07:00.0\nDevice Minor: \t {MINOR}\n",
        encoding="utf-8",
    )
    library.write_bytes(compile_nvml(told))
    return Places(dev=str(dev), proc=str(proc), nvml=str(library))


@functools.cache
def compile_nvml(told: Told) -> bytes:
    """The library's bytes."""
    major, minor = told.capability.split(".")
    texts = {"UUID": told.uuid, "NAME": told.name, "DRIVER": told.driver, "MIG": told.mig}
    numbers = {
        "MAJOR": major,
        "MINOR": minor,
        "MEMORY": f"{told.memory}ull",
        "COUNT": told.count,
        "INIT": told.init,
        "SHARED": int(not told.memory),
        "LOST": told.lost,
        "BUSY": told.busy,
    }
    defines = [f'-DTELL_{name}="{text}"' for name, text in texts.items()]
    defines += [f"-DTELL_{name}={number}" for name, number in numbers.items()]
    defines += [f"-DLOST_IN={told.lost_in}", f"-DLOST_CODE={told.lost_code}"]
    defines += ["-DBEFORE_MIG"] if told.before_mig else []
    with tempfile.TemporaryDirectory(prefix="nvml-") as folder:
        library = Path(folder, "libnvidia-ml.so.1")
        subprocess.run(["gcc", "-shared", "-fPIC", *defines, "-o", str(library), str(SOURCE)], check=True)
        return library.read_bytes()


THREADS = "#include <pthread.h>\nvoid *f = pthread_create;"
"""Needs glibc 2.34, since which this function is in libc itself."""


@functools.cache
def build_library(code: str, *options: str) -> bytes:
    """A shared library of some C."""
    with tempfile.TemporaryDirectory(prefix="library-") as folder:
        path = Path(folder, "library.so")
        command = ["gcc", "-xc", "-", "-shared", "-fPIC", "-nostartfiles", "-o", str(path), *options]
        subprocess.run(command, input=code, text=True, check=True)
        return path.read_bytes()


def library_of_the_future() -> bytes:
    """A library that needs glibc 2.99."""
    data = build_library(THREADS)
    assert b"GLIBC_2.34\0" in data
    return data.replace(b"GLIBC_2.34\0", b"GLIBC_2.99\0")
