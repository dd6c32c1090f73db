"""Write a lock in the formats of other tools.

Conda formats come from conda-lock itself. Its modules promise no stability, so the extra `conda` pins its
version. These functions read only their arguments, no environment, file or solver of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from imagefactory.errors import LockError
from imagefactory.lock.conda.file import format_conda_lock, platform_subdir
from imagefactory.model import Lock, LockedWheel


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


WITH_WHEELS = ("conda-lock", "pixi", "pylock", "requirements")
"""The formats that can contain wheels."""
OF_CONDA = ("explicit", "env", "conda-lock", "pixi")
"""The formats that can contain conda packages, and only for targets that have some."""


def format_pylock(lock: Lock, urls: Mapping[str, str], indexes: Mapping[str, str]) -> str:
    """Return the wheels as a pylock.toml. `urls` are by file name, `indexes` addresses by package.

    Source: PyPA specification "pylock.toml", version 1.0.
    """
    lines = [
        'lock-version = "1.0"',
        "environments = [\"sys_platform == 'linux' and platform_machine == 'x86_64'\"]",
        f'requires-python = "=={lock.python}.*"',
        'created-by = "imagefactory"',
    ]
    for wheel in lock.wheels:
        url = urls[wheel.filename]
        place = f"url = {json.dumps(url)}" if "://" in url else f"path = {json.dumps(url)}"
        index = indexes.get(wheel.name, "")
        lines += [
            "",
            "[[packages]]",
            f"name = {json.dumps(wheel.name)}",
            f"version = {json.dumps(wheel.version)}",
            *([f"index = {json.dumps(index)}"] if index else []),
            f"wheels = [{{ name = {json.dumps(wheel.filename)}, {place}, size = {wheel.size}, "
            f'hashes = {{ sha256 = "{wheel.sha256}" }} }}]',
        ]
    return "\n".join(lines) + "\n"


def format_requirements(lock: Lock, local: Mapping[str, str], indexes: Sequence[str]) -> str:
    """Return the wheels as a requirements file with hashes, for `pip install --no-deps`.

    `local` are the paths of the project's wheels by package, `indexes` those besides the default one.
    """
    lines = [f"# Python {lock.python}, {lock.platform}: pip install --no-deps --require-hashes -r FILE"]
    lines += [f"--extra-index-url {address}" for address in indexes]
    for wheel in lock.wheels:
        pin = local.get(wheel.name, f"{wheel.name}=={wheel.version}")
        lines.append(f"{pin} --hash=sha256:{wheel.sha256}")
    return "\n".join(lines) + "\n"


def format_conda_lock_file(lock: Lock, urls: Mapping[str, str]) -> str:
    """Return conda packages and wheels as one conda-lock.yml. Raises LockError like `read_back`."""
    rows = [
        line
        for wheel in lock.wheels
        for line in (
            f"- name: {json.dumps(wheel.name)}",
            f"  version: {json.dumps(wheel.version)}",
            "  manager: pip",
            f"  platform: {platform_subdir(lock)}",
            "  dependencies: {}",
            f"  url: {json.dumps(urls[wheel.filename])}",
            "  hash:",
            f"    sha256: {json.dumps(wheel.sha256)}",
            "  category: main",
            "  optional: false",
        )
    ]
    text = format_conda_lock(lock) + "".join(f"{row}\n" for row in rows)
    if all(package.md5 for package in lock.conda):
        read_back(lock, text)
    return text


def format_pixi(lock: Lock, urls: Mapping[str, str], index: str) -> str:
    """Return conda packages and wheels as a pixi.lock, version 6, with one environment `default`.

    `index` is the address of the package index.
    """
    conda = [
        {
            "conda": package.url,
            "subdir": package.subdir,
            "sha256": package.sha256,
            **({"md5": package.md5} if package.md5 else {}),
            **({"depends": list(package.depends)} if package.depends else {}),
            "size": package.size,
        }
        for package in sorted(lock.conda, key=lambda package: package.url)
    ]
    wheels = [_pixi_wheel(wheel, urls[wheel.filename]) for wheel in lock.wheels]
    environment: dict[str, Any] = {"channels": [{"url": f"{channel}/"} for channel in lock.channels]}
    if wheels:
        environment["indexes"] = [index]
    environment["packages"] = {
        platform_subdir(lock): [
            *({"conda": row["conda"]} for row in conda),
            *({"pypi": row["pypi"]} for row in wheels),
        ]
    }
    document = {
        "version": 6,
        "environments": {"default": environment},
        "packages": [*conda, *wheels],
    }
    return str(yaml.safe_dump(document, sort_keys=False, width=1000))


def _pixi_wheel(wheel: LockedWheel, url: str) -> dict[str, Any]:
    return {"pypi": url, "name": wheel.name, "version": wheel.version, "sha256": wheel.sha256}
