"""Read and render a conda lock with conda-lock itself.

Its modules promise no stability, so the extra `conda` pins its version. These functions read only their
arguments, no environment, file or solver of this machine.
"""

from __future__ import annotations

from typing import Any

import yaml

from imagefactory.errors import LockError
from imagefactory.lock.conda.file import format_conda_lock, platform_subdir
from imagefactory.model import Lock


def read_back(lock: Lock, text: str) -> Any:
    """Return a lock's text parsed by conda-lock. Raises LockError for another format."""
    from conda_lock.lockfile import lockfile_v1_to_v2
    from conda_lock.lockfile.v1.models import Lockfile

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return lockfile_v1_to_v2(Lockfile.model_validate(yaml.load(text, Loader=loader)))  # noqa: S506
    except (ValueError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())[:400]
        raise LockError(
            "conda-lock-rejected",
            f"{lock.target}: conda-lock cannot read the lock: {message}",
            hint="remove the package in this message from the recipe, or get it from another channel",
        ) from error


def render(lock: Lock, kind: str) -> str:
    """Return the conda packages as a file for conda: `explicit` has the exact files, `env` is solved again.

    Raises LockError for packages without the md5 that conda-lock requires.
    """
    from conda_lock.conda_lock import render_lockfile_for_platform

    if bare := [package.name for package in lock.conda if not package.md5]:
        raise LockError(
            "md5-not-published",
            f"{lock.target}: conda-lock needs the md5 of each package, and the channels have none for "
            f"{', '.join(bare)}",
            hint=f"install by sha256: micromamba create -n NAME -f lockfiles/{lock.target}.conda-lock.yml",
        )
    lines = render_lockfile_for_platform(
        lockfile=read_back(lock, format_conda_lock(lock)),
        include_dev_dependencies=False,
        extras=None,
        kind=kind,
        platform=platform_subdir(lock),
    )
    return "\n".join(lines) + "\n"
