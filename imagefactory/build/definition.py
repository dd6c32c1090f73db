"""Turn a target, its base and its lock into a BuildSpec: all inputs of an engine, without open choices.

No I/O. The few files of the environment that are equal for every engine are defined here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace

from imagefactory.errors import Diagnostic, LockError, RecipeError
from imagefactory.gpu.capability import MACHINES
from imagefactory.gpu.drivers import driver_floor
from imagefactory.gpu.forward import FORWARD_DIRECTORY, FORWARD_LIBRARY
from imagefactory.gpu.values import rocm_of
from imagefactory.lock.files import lock_digest
from imagefactory.model import (
    PLAIN_START,
    BaseSpec,
    BuildSpec,
    Lock,
    LockedPackage,
    LockedWheel,
    OwnFile,
    Target,
)
from imagefactory.recipes.values import named_packages

PREFIX = "/opt/env"
HOME = "/home/user"
"""The home of users without a home in the image. Everyone can write there."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DRIVER = "/usr/local/nvidia"
"""The directory in which Kubernetes and early NVIDIA container tools mount the driver."""
_COMPAT_PACKAGE = re.compile(r"cuda-compat-([0-9]{1,3})-([0-9]{1,3})")
_LOCAL = "bin|etc|games|include|lib|sbin|share|src"
SHARED = re.compile(rf"/(etc|home(/user)?|opt|root|srv|usr|usr/src|usr/local(/({_LOCAL}))?)")
"""Directories that every image has and project files may add to."""
INIT = ("/usr/bin/tini", "-s", "--")
"""The init of an image's command, which reaps orphans; with `-s` also if it is not process 1."""


def define(
    target: Target,
    base: BaseSpec,
    lock: Lock,
    parent_locks: tuple[Lock, ...] = (),
    files: tuple[OwnFile, ...] = (),
) -> BuildSpec:
    """Return the definition of an image. `parent_locks` are the locks of its parents, the lowest first.

    Raises LockError if `lock` is another target's, or lacks the framework or a parent's package. Raises
    RecipeError if the target does not fit the base or sets a variable that imagefactory sets.
    """
    _check_fit(target, base, lock)
    _check_parent(target, lock, parent_locks)
    link = forward_links(base, lock)
    if link and base.image:
        message = f"the libcuda of cuda-compat needs the link {FORWARD_DIRECTORY}, and an image of a registry"
        raise RecipeError(
            [Diagnostic("forward-compat-base", str(target.where), f"{message} may have its own")],
            hint="write a base of recipes/bases.yaml, or remove cuda-compat",
        )
    cuda = target.gpu and not rocm_of(target.cuda)
    environment = {
        "PATH": f"{PREFIX}/bin:{SYSTEM_PATH}" + (f":{DRIVER}/bin" if cuda else ""),
        # Tools find the environment by these; conda ignores VIRTUAL_ENV.
        "CONDA_PREFIX" if lock.conda else "VIRTUAL_ENV": PREFIX,
        "HOME": HOME,
        "LANG": "C.UTF-8",
    }
    if cuda:
        environment |= {
            "NVIDIA_VISIBLE_DEVICES": "all",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        }
        # With its own libcuda an image also runs on older drivers, and NVIDIA's hook decides on which.
        if not link and not any(map(_is_forward, files)):
            environment["NVIDIA_REQUIRE_CUDA"] = f"cuda>={driver_floor(target.cuda)}"
    for name, _ in target.environment:
        if name in environment:
            message = f"environment sets {name}, which imagefactory sets in every image"
            raise RecipeError([Diagnostic("name-reserved", str(target.where), message, "remove it")])
    environment |= _defaults(target, lock) | dict(target.environment)
    if cuda and not base.image:  # such an image sets its own directories
        library_path = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = (
            f"{f'{library_path}:' if library_path else ''}{DRIVER}/lib:{DRIVER}/lib64"
        )
    labels = {
        "org.opencontainers.image.title": target.name,
        "org.opencontainers.image.description": target.description,
        "org.opencontainers.image.version": framework_package(target, lock).version,
        "org.opencontainers.image.base.name": base.image or base.name,
        "imagefactory.target": target.name,
        "imagefactory.framework": target.framework,
        "imagefactory.cuda": target.cuda,
        "imagefactory.python": target.python,
        "imagefactory.lock": lock_digest(lock),
        **dict(target.labels),
    }
    if lock.conda:
        labels["imagefactory.channels"] = " ".join(lock.channels)
    if parent_locks:
        labels["imagefactory.on"] = target.on
    if files:
        labels["imagefactory.fs"] = files_digest(files)
    start = target.start
    command = start.command or (() if start.entrypoint else PLAIN_START.command)
    return BuildSpec(
        target=target,
        base=base,
        lock=lock,
        prefix=PREFIX,
        environment=tuple(environment.items()),
        labels=tuple(labels.items()),
        under=parent_locks,
        files=files,
        start=replace(start, command=command, workdir=start.workdir or PLAIN_START.workdir),
    )


def forward_links(base: BaseSpec, lock: Lock) -> tuple[tuple[str, str], ...]:
    """Return the link from the directory of NVIDIA's hook to the libcuda that a package brings, if one does.

    conda-forge's cuda-compat has it in the environment, NVIDIA's Debian package in the toolkit's directory.
    """
    if any(package.name in ("cuda-compat", "cuda-compat-impl") for package in lock.conda):
        return ((FORWARD_DIRECTORY, f"{PREFIX}/cuda-compat"),)
    versions = [match for match in map(_COMPAT_PACKAGE.fullmatch, sorted(base.packages)) if match]
    return tuple((FORWARD_DIRECTORY, f"/usr/local/cuda-{row[1]}.{row[2]}/compat") for row in versions[-1:])


def _is_forward(file: OwnFile) -> bool:
    directory, _, name = file.path.rpartition("/")
    return directory == FORWARD_DIRECTORY and FORWARD_LIBRARY.fullmatch(name) is not None


def group_packages(definition: BuildSpec) -> tuple[tuple[LockedPackage, ...], ...]:
    """Return the packages of each parent, the lowest first, then those of the target itself.

    Each package is in its first group only. Without a parent there is one group.
    """
    seen: set[LockedPackage] = set()
    groups = []
    for lock in (*definition.under, definition.lock):
        groups.append(tuple(package for package in lock.packages if package not in seen))
        seen.update(lock.packages)
    return tuple(groups)


Rank = tuple[int, bool, str]
"""The rank of a wheel among wheels with the same path; the lowest wins.

The parts are the number of the target that added the wheel (the lowest parent first, so that parents stay
the same), whether the recipe does not name it, and its name.
"""


def rank_wheels(definition: BuildSpec) -> dict[str, Rank]:
    """Return the rank of each wheel, by its file name."""
    below = definition.named_below or (frozenset[str](),) * len(definition.under)
    named = (*below, named_packages(definition.target))
    return {
        package.filename: (number, package.name not in names, package.name)
        for number, (group, names) in enumerate(zip(group_packages(definition), named, strict=True))
        for package in group
        if isinstance(package, LockedWheel)
    }


def entrypoint(definition: BuildSpec) -> tuple[str, ...]:
    """Return the start of an image's command: the init of a built base, and the recipe's entry point."""
    return (*(INIT if "tini" in definition.base.packages else ()), *definition.start.entrypoint)


def files_digest(files: Iterable[OwnFile]) -> str:
    """Return `sha256:...` of project files: paths, content, and which are executable."""
    text = json.dumps([[file.path, file.sha256, file.executable] for file in files], separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def new_places(definition: BuildSpec) -> tuple[str, ...]:
    """Return the topmost new paths that project files add to an image, sorted."""
    places = set()
    for file in definition.files:
        parts = file.path.strip("/").split("/")
        paths = ("/" + "/".join(parts[: depth + 1]) for depth in range(len(parts)))
        places.add(next(path for path in paths if not SHARED.fullmatch(path)))
    return tuple(sorted(places))


def _defaults(target: Target, lock: Lock) -> dict[str, str]:
    """Return variables that a recipe may override."""
    variables = {"PYTHONUNBUFFERED": "1"}
    if target.gpu and {"torch", "pytorch"} & {package.name for package in lock.packages}:
        # For extensions compiled in the image, where there may be no GPU to query.
        variables["PYTORCH_ROCM_ARCH" if rocm_of(target.cuda) else "TORCH_CUDA_ARCH_LIST"] = ";".join(
            target.capabilities
        )
    return variables


def framework_package(target: Target, lock: Lock) -> LockedPackage:
    """Return the package of the target's framework. Raises LockError if the lock has none."""
    name = target.framework.lower()
    names = {name, re.sub(r"[-_.]+", "-", name)}  # PyPI names are normalized (PEP 503), conda names are not
    for package in lock.packages:
        if package.name in names:
            return package
    raise LockError(
        "lock-mismatch",
        f"the lock of {target.name} has no {target.framework}",
        hint=f"run imagefactory lock {target.name}",
    )


def pyvenv_cfg(definition: BuildSpec) -> str:
    """Return the text of `<prefix>/pyvenv.cfg`, which makes the prefix a virtual environment (PEP 405).

    It lacks the patch version that `python -m venv` adds, because the base may get a newer one. A conda
    environment has its own Python, and neither this file nor `venv_links`.
    """
    return (
        f"home = {interpreter(definition).rpartition('/')[0]}\n"
        "include-system-site-packages = false\n"
        f"version = {definition.target.python}\n"
        f"executable = {interpreter(definition)}\n"
    )


def venv_links(definition: BuildSpec) -> tuple[tuple[str, str], ...]:
    """Return (absolute path inside the image, link target) of a virtual environment's symbolic links."""
    prefix = definition.prefix
    return (
        (f"{prefix}/bin/python", interpreter(definition)),
        (f"{prefix}/bin/python3", "python"),
        (f"{prefix}/bin/python{definition.target.python}", "python"),
        (f"{prefix}/lib64", "lib"),
    )


def interpreter(definition: BuildSpec) -> str:
    """Return the base's own Python, the target of a virtual environment's links."""
    return definition.base.python_path


def _check_parent(target: Target, lock: Lock, parent_locks: tuple[Lock, ...]) -> None:
    if target.on != (parent_locks[-1].target if parent_locks else ""):
        owner = f"of {parent_locks[-1].target}" if parent_locks else "missing"
        raise LockError(
            "lock-mismatch",
            f"{target.name} is built on {target.on or 'no target'}, but its parent lock is {owner}",
            hint=f"run imagefactory lock {target.name}",
        )
    packages = {package.name: package for package in lock.packages}
    for below in parent_locks:
        gone = [package.name for package in below.packages if packages.get(package.name) != package]
        if gone:
            raise LockError(
                "lock-mismatch",
                f"the lock of {target.name} has a different {gone[0]} than the lock of {below.target}, "
                "which it is built on",
                hint=f"run imagefactory lock {target.name}",
            )


def _check_fit(target: Target, base: BaseSpec, lock: Lock) -> None:
    if target.base != base.name or not (lock.conda or target.python == base.python):
        message = (
            f"{target.name} requires Python {target.python} on {target.base}, "
            f"but {base.name} has Python {base.python}"
        )
        raise RecipeError(
            [Diagnostic("python-mismatch", str(target.where), message)],
            hint=f'write python: "{base.python}", or another base',
        )
    if f"{base.python_path}/".startswith(f"{PREFIX}/") or base.python_path.count("/") < 2:
        message = f"the interpreter {base.python_path} is in {PREFIX}, which imagefactory replaces"
        raise RecipeError(
            [Diagnostic("interpreter-not-allowed", str(base.where), message)],
            hint="write the path of the base's own Python, such as /usr/local/bin/python3.11",
        )
    machine = MACHINES.get(target.platform)
    if machine is None:
        message, fix = f"unknown platform '{target.platform}'", f"use one of {', '.join(MACHINES)}"
        raise RecipeError([Diagnostic("platform-unknown", str(target.where), message, fix)])
    if (lock.target, lock.python) != (target.name, target.python) or not lock.platform.endswith(machine):
        raise LockError(
            "lock-mismatch",
            f"the lock is for {lock.target}, Python {lock.python} and {lock.platform}; "
            f"the target is {target.name}, Python {target.python} and {target.platform}",
            hint=f"run imagefactory lock {target.name}",
        )
    if bool(lock.conda) != target.conda:
        raise LockError(
            "lock-mismatch",
            f"the lock of {target.name} has {'' if lock.conda else 'no '}conda packages, "
            f"its recipe requires {'some' if target.conda else 'none'}",
            hint=f"run imagefactory lock {target.name}",
        )
