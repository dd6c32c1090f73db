"""NVIDIA's assembler, which jax, tensorflow and Triton start as a program: found, started, tried.

ptxas needs no driver, so it makes real GPU code here. sm_80 is known to all that CUDA 11 to 13 have.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess

from ..context import CheckFailure, Context

SECONDS = 60.0
# sm_75 is the oldest target that all of them read.
PTX = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n"


def compilers(context: Context, scratch: str) -> tuple[str, dict[str, float]]:
    """Of the nvidia-cuda-nvcc that is locked, or conda's cuda-nvcc."""
    programs = find_programs(context, "ptxas")
    if not programs:
        raise CheckFailure("nvidia-cuda-nvcc is locked but there is no nvidia/*/bin/ptxas, and no bin/ptxas")
    versions = [try_ptxas(program, scratch) for program in programs]
    linkers = find_programs(context, "nvlink")
    versions += [f"nvlink {version_of(linker)}" for linker in linkers]
    return ", ".join(versions), {"assemblers": len(programs), "linkers": len(linkers)}


def find_programs(context: Context, name: str) -> list[str]:
    """Where wheels and conda's packages have NVIDIA's program `name`."""
    found = sorted(glob.glob(os.path.join(context.site, "nvidia", "*", "bin", name)))
    own = os.path.join(context.prefix, "bin", name)
    return [*found, *([own] if os.path.exists(own) else [])]


def try_ptxas(program: str, scratch: str) -> str:
    """Assembles a kernel for sm_80; answers a text such as `ptxas 12.1`.

    Raises CheckFailure for an assembler that cannot be started or makes nothing.
    """
    version = version_of(program)
    source = os.path.join(scratch, "nothing.ptx")
    with open(source, "w", encoding="utf-8") as file:
        file.write(PTX)
    output = os.path.join(scratch, "nothing.cubin")
    run([program, "-arch=sm_80", source, "-o", output])
    with open(output, "rb") as made:
        if made.read(4) != b"\x7fELF":
            raise CheckFailure(f"{program} made no GPU code")
    return f"ptxas {version}"


def version_of(program: str) -> str:
    text = run([program, "--version"])
    found = re.search(r"release (\d+\.\d+)", text)
    if found is None:
        raise CheckFailure(f"{program} --version says {text[:80]!r}")
    return found[1]


def run(command: list[str]) -> str:
    """stdout and stderr of a program that must succeed."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckFailure(f"{command[0]} cannot be started: {error}") from error
    if done.returncode != 0:
        raise CheckFailure(
            f"{' '.join(command[:3])} fails with {done.returncode}: {' '.join(done.stdout.split())[-300:]}"
        )
    return done.stdout
