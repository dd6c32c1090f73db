"""Apptainer, the machine's own or the one of `install`, with caches in a folder of the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.services.processes import ServiceError, find, search_path

CAP_SYS_RESOURCE = 24


def lacks_sys_resource() -> bool:
    """Whether root here is one without CAP_SYS_RESOURCE, as in many containers and virtual machines."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return not int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1
    return False


def apptainer_environ(folder: Path) -> dict[str, str]:
    """What apptainer needs in its environment here; its cache and temporary files go into `folder`."""
    environ = {}
    for name in ("CACHEDIR", "TMPDIR", "CONFIGDIR"):
        place = folder / name.lower()
        place.mkdir(parents=True, exist_ok=True)
        environ[f"APPTAINER_{name}"] = str(place)
    if lacks_sys_resource():
        environ["APPTAINER_DROP_CAPS"] = "CAP_SYS_RESOURCE"  # else it stops at raising what it may not
    return environ


def apptainer_command() -> str:
    """The path of an apptainer that runs. Raises ServiceError."""
    command = find("apptainer")
    environ = {**os.environ, "PATH": search_path()}
    done = subprocess.run([command, "--version"], capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise ServiceError(f"{command}: {done.stderr.strip()}; run ./setup.sh --tests as root")
    return command
