"""NVIDIA's compiler for fixtures: nvcc and all it calls, from the index that this machine uses.

The version is pinned with its hashes, since tests hold against what this very compiler writes. The host's
part is compiled by the machine's g++.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.services import uv
from tests.services.processes import ServiceError

VERSION = "13.5.37"
_WHEELS = {
    "nvidia-cuda-crt": "e898b7f73d3035fa89915a3f7bf3b54a73e90249746111aed295822c4729bb29",
    "nvidia-cuda-cuobjdump": "38780fee50863252a0b8926357faa91615ca1c8346490563f33a06100cd73f58",
    "nvidia-cuda-nvcc": "f5c4f7ead5d964fb4af42bbf1e6d3ec3c1e6e9d83b53749f691d387e7fcaa3a7",
    "nvidia-cuda-runtime": "df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d",
    "nvidia-cuda-tileiras": "d1657aa03ef05bba0ae22baa34728d955fa11524ef3be5a4f6401ef589dba5b5",
    "nvidia-nvvm": "c41bfa362e407405163f103c2229f0765f8cc2ed7d148b754dc77f228bf7e070",
}


@dataclass(frozen=True, slots=True)
class Nvcc:
    """The toolkit in `folder`."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "nvidia" / "cu13" / "bin"

    def run(self, *arguments: str | Path, cwd: Path, tool: str = "nvcc") -> str:
        """What nvcc or one of its kin prints; raises ServiceError with what it said."""
        command = [self.bin / tool, *arguments]
        environ = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "TMPDIR": str(cwd)}
        done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise ServiceError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
        return done.stdout


def install_nvcc(folder: Path) -> Nvcc:
    """Installs the compiler into an empty folder; 0.6 GB."""
    install_wheels(folder, {f"{name}=={VERSION}": sha256 for name, sha256 in _WHEELS.items()})
    nvcc = Nvcc(folder)
    for program in [*nvcc.bin.iterdir(), *(nvcc.bin.parent / "nvvm" / "bin").iterdir()]:
        if program.is_file():
            program.chmod(0o755)
    return nvcc


def install_wheels(folder: Path, pins: Mapping[str, str]) -> None:
    """Unpacks wheels, given as `name==version` and their sha256, into a folder. Raises ServiceError."""
    lines = [f"{pin} --hash=sha256:{sha256}" for pin, sha256 in pins.items()]
    wanted = folder.with_suffix(".txt")
    wanted.write_text("\n".join(lines) + "\n")
    options = ["--no-cache", "--no-deps", "--require-hashes", "--python", sys.executable, "--target", folder]
    uv.install(*options, "--requirement", wanted)
