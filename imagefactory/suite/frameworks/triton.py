"""Triton, which torch.compile uses: its C compiler, its assembler, and a kernel made for sm_80.

All of it happens in a process of its own, because linking Triton's launcher without a driver takes
an empty libcuda, which must not be seen by anything else.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys

from .. import table
from ..context import CheckFailure, Context
from . import ptxas

SECONDS = 300.0
LDCONFIG = "/sbin/ldconfig"
SCRIPT = "triton_build.py"


def compilers(context: Context, scratch: str) -> tuple[str, dict[str, float]]:
    if not context.expected.locked.keys() & set(table.TRITON):
        raise CheckFailure("the lock holds no triton, which torch.compile needs")
    if not os.access(LDCONFIG, os.X_OK):
        raise CheckFailure(f"there is no {LDCONFIG}, by which triton finds the driver")
    patterns = ("backends/nvidia/bin/ptxas", "third_party/cuda/bin/ptxas")
    programs = [path for name in patterns for path in glob.glob(os.path.join(context.site, "triton", name))]
    programs += ptxas.find_programs(context, "ptxas")  # conda's Triton takes that of cuda-nvcc
    if not programs:
        raise CheckFailure("triton has no ptxas of its own in a place this suite knows, nor is there another")
    assembler = ptxas.try_ptxas(programs[0], scratch)
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), SCRIPT)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-B", script, scratch],
            capture_output=True,
            timeout=SECONDS,
            text=True,
            errors="replace",
            env={**os.environ, "TRITON_CACHE_DIR": scratch, "TRITON_LIBCUDA_PATH": scratch},
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailure(f"triton did not make a kernel in {SECONDS:.0f} s") from error
    answer = os.path.join(scratch, "made.json")
    if done.returncode != 0 or not os.path.exists(answer):
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckFailure(f"triton cannot compile (exit code {done.returncode}): {reason}")
    with open(answer, encoding="utf-8") as file:
        made = json.load(file)
    kernel = f"kernel for sm_80 of {made['cubin']} bytes"
    detail = f"triton {made['version']} with {made['compiler']}, {assembler}, {kernel}"
    return detail, {"cubin-bytes": made["cubin"], "seconds": made["seconds"]}
