"""Virtual environments with a framework's small build for the CPU, by requirements/FRAMEWORK.txt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
# A recipe's name of the framework -> what is installed.
PACKAGES = {"onnxruntime-gpu": "onnxruntime", "jax": "jax"}


@dataclass(frozen=True, kw_only=True)
class Environment:
    """`packages` maps installed names (PEP 503) to versions."""

    python: Path
    packages: Mapping[str, str]


def make_environment(framework: str, folder: Path) -> Environment:
    place = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / "bin/python"
    install = [
        "uv",
        "pip",
        "install",
        "--quiet",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--python",
        python,
    ]
    wanted = REQUIREMENTS / f"{PACKAGES[framework]}.txt"
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([*install, "--requirements", wanted], check=True, env={**os.environ, "PATH": paths})
    (site,) = place.glob("lib/python*/site-packages")
    packages = {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found.version
        for found in distributions(path=[str(site)])
    }
    return Environment(python=python, packages=packages)
