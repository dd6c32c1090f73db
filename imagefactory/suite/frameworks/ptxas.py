"""NVIDIA's assembler, which jax, tensorflow and Triton start as a program.

ptxas needs no driver, so it generates real GPU code here. CUDA 11 to 13 support sm_80.
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
    """Test the assembler and linker in the locked nvidia-cuda-nvcc, or in conda's cuda-nvcc."""
    programs = find_programs(context, "ptxas")
    if not programs:
        raise CheckFailure("nvidia-cuda-nvcc is locked but there is no nvidia/*/bin/ptxas, and no bin/ptxas")
    linkers = find_programs(context, "nvlink")
    versions = [try_ptxas(program, scratch) for program in programs]
    versions += [f"nvlink {version_of(linker)}" for linker in linkers]
    return ", ".join(versions), {"assemblers": len(programs), "linkers": len(linkers)}


def find_programs(context: Context, name: str) -> list[str]:
    """Return the paths of the NVIDIA program `name` in wheels and conda packages."""
    own = os.path.join(context.prefix, "bin", name)
    wheels = glob.glob(os.path.join(context.site, "nvidia", "*", "bin", name))
    return [*sorted(wheels), *([own] if os.path.exists(own) else [])]


def try_ptxas(program: str, scratch: str) -> str:
    """Assemble a kernel for sm_80 and return a text such as `ptxas 12.1`. Raises CheckFailure."""
    version = version_of(program)
    source = os.path.join(scratch, "nothing.ptx")
    with open(source, "w", encoding="utf-8") as file:
        file.write(PTX)
    output = os.path.join(scratch, "nothing.cubin")
    run([program, "-arch=sm_80", source, "-o", output])
    with open(output, "rb") as cubin:
        if cubin.read(4) != b"\x7fELF":
            raise CheckFailure(f"{program} made no GPU code")
    return f"ptxas {version}"


def version_of(program: str) -> str:
    text = run([program, "--version"])
    release = re.search(r"release (\d+\.\d+)", text)
    if release is None:
        raise CheckFailure(f"{program} --version says {text[:80]!r}")
    return release[1]


def run(command: list[str]) -> str:
    """Return stdout and stderr of a program. Raises CheckFailure if it fails."""
    try:
        process = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckFailure(f"{command[0]} cannot be started: {error}") from error
    if process.returncode != 0:
        words = " ".join(process.stdout.split())[-300:]
        raise CheckFailure(f"{' '.join(command[:3])} fails with {process.returncode}: {words}")
    return process.stdout
