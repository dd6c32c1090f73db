"""Virtual environments with a framework's small build for the CPU, by requirements/FRAMEWORK.txt."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from tests.services import uv

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
# A recipe's name of the framework -> what is installed.
PACKAGES = {"onnxruntime-gpu": "onnxruntime", "jax": "jax"}


@dataclass(frozen=True, kw_only=True)
class Environment:
    """`packages` maps installed names (PEP 503) to versions."""

    python: Path
    packages: Mapping[str, str]


def make_environment(framework: str, place: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / "bin/python"
    wanted = REQUIREMENTS / f"{PACKAGES[framework]}.txt"
    uv.install("--require-hashes", "--python", python, "--requirements", wanted)


def find_environment(place: Path) -> Environment:
    """What `make_environment` made there."""
    (site,) = place.glob("lib/python*/site-packages")
    packages = {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found.version
        for found in distributions(path=[str(site)])
    }
    return Environment(python=place / "bin/python", packages=packages)
