"""uv as the product starts it: with the index, certificates and proxy that this machine's settings name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from imagefactory.lock.pypi.index import find_index
from imagefactory.settings.choices import SettingValue
from tests.services.processes import ServiceError


def install(*arguments: str | Path) -> None:
    """`uv pip install` of wheels alone, by the virtual environment's own uv. Raises ServiceError."""
    index = find_index(SettingValue(value="", origin="default"), environ=os.environ, prefix=Path(sys.prefix))
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--only-binary", ":all:"]
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **dict(index.environment)}
    done = subprocess.run([*uv, *arguments], env=environ, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise ServiceError(f"wheels could not be installed: {done.stderr}")
