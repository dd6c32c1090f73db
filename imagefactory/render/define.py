"""Target, base and lock become a Definition: all that an engine needs, nothing that it could choose.

Pure. What every engine writes alike (the environment's own few files) is said here once.
"""

from __future__ import annotations

import hashlib
import re

from imagefactory.errors import LockError, RecipeError
from imagefactory.lock.pypi import MACHINES, format_lock
from imagefactory.model import Base, Definition, Lock, LockedWheel, Target

PREFIX = "/opt/env"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def define(target: Target, base: Base, lock: Lock) -> Definition:
    """What `target`'s image is made of.

    Raises LockError when `lock` is another target's or lacks the framework, RecipeError when the
    target does not fit the base or sets a variable that stands in every image.
    """
    _check_fit(target, base, lock)
    environment = {
        "PATH": f"{PREFIX}/bin:{SYSTEM_PATH}",
        "VIRTUAL_ENV": PREFIX,
        "LANG": "C.UTF-8",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "NVIDIA_REQUIRE_CUDA": f"cuda>={driver_floor(target.cuda)}",
    }
    for name, value in target.environment:
        if name in environment:
            raise RecipeError([f"{target.where}: environment sets {name}, which is set in every image"])
        environment[name] = value
    labels = {
        "org.opencontainers.image.title": target.name,
        "org.opencontainers.image.description": target.description,
        "org.opencontainers.image.version": framework_wheel(target, lock).version,
        "org.opencontainers.image.base.name": base.image or base.name,
        "imagefactory.target": target.name,
        "imagefactory.framework": target.framework,
        "imagefactory.cuda": target.cuda,
        "imagefactory.python": target.python,
        "imagefactory.lock": "sha256:" + hashlib.sha256(format_lock(lock).encode()).hexdigest(),
    }
    return Definition(
        target=target,
        base=base,
        lock=lock,
        prefix=PREFIX,
        environment=tuple(environment.items()),
        labels=tuple(labels.items()),
    )


def driver_floor(cuda: str) -> str:
    """The oldest CUDA version whose driver runs an image of CUDA version `cuda` ("12.1", "12").

    NVIDIA's container tools compare `cuda>=X` with the newest CUDA version the driver offers and
    refuse to start the container when it is older. From CUDA 11 on, programs of one major version
    run on every driver of that major version ("minor version compatibility" in NVIDIA's CUDA
    Compatibility guide): driver 525, the first of 12.x, offers 12.0 and runs 12.4's libraries. So
    the floor is the major version's `.0`; a higher one would refuse GPUs that work, and a lower one
    would only turn a clear refusal into a failed cudaGetDeviceCount. The exception, an older driver
    with NVIDIA's cuda-compat package, is none here: the images carry no such package. Before 11
    each minor version needs its own driver.
    """
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?", cuda)
    if not found:
        raise RecipeError([f"cuda '{cuda}' is not a version (write 12.1, or 12)"])
    major, minor = int(found[1]), int(found[2] or 0)
    return f"{major}.{0 if major >= 11 else minor}"


def framework_wheel(target: Target, lock: Lock) -> LockedWheel:
    """The wheel of the target's framework. Raises LockError when the lock has none."""
    name = re.sub(r"[-_.]+", "-", target.framework).lower()
    for wheel in lock.wheels:
        if wheel.name == name:
            return wheel
    raise LockError(
        f"the lock of {target.name} has no {target.framework}", hint=f"run: imagefactory lock {target.name}"
    )


def pyvenv_cfg(definition: Definition) -> str:
    """The text of `<prefix>/pyvenv.cfg`: what makes the prefix a virtual environment (PEP 405).

    Without the patch version that `python -m venv` adds: the base may get a newer one.
    """
    return (
        f"home = {interpreter(definition).rpartition('/')[0]}\n"
        "include-system-site-packages = false\n"
        f"version = {definition.target.python}\n"
        f"executable = {interpreter(definition)}\n"
    )


def venv_links(definition: Definition) -> tuple[tuple[str, str], ...]:
    """(absolute path inside the image, link target) of the environment's symbolic links."""
    prefix = definition.prefix
    return (
        (f"{prefix}/bin/python", interpreter(definition)),
        (f"{prefix}/bin/python3", "python"),
        (f"{prefix}/bin/python{definition.target.python}", "python"),
        (f"{prefix}/lib64", "lib"),
    )


def interpreter(definition: Definition) -> str:
    """The base's own Python, which the environment's links lead to."""
    return definition.base.python_path


def _check_fit(target: Target, base: Base, lock: Lock) -> None:
    if (target.base, target.python) != (base.name, base.python):
        raise RecipeError(
            [
                f"{target.where}: {target.name} wants Python {target.python} on {target.base}, "
                f"but {base.name} carries Python {base.python}"
            ],
            hint=f'write python: "{base.python}", or another base',
        )
    if f"{base.python_path}/".startswith(f"{PREFIX}/") or base.python_path.count("/") < 2:
        raise RecipeError(
            [f"{base.where}: the interpreter {base.python_path} cannot stand there: {PREFIX} is made anew"],
            hint="write the path of the Python that the base brings, such as /usr/local/bin/python3.11",
        )
    machine = MACHINES.get(target.platform)
    if machine is None:
        raise RecipeError(
            [f"{target.where}: platform '{target.platform}' is not one of {', '.join(MACHINES)}"]
        )
    if (lock.target, lock.python) != (target.name, target.python) or not lock.platform.endswith(machine):
        raise LockError(
            f"the lock is for {lock.target}, Python {lock.python} and {lock.platform}; "
            f"the target is {target.name}, Python {target.python} and {target.platform}",
            hint=f"run: imagefactory lock {target.name}",
        )
