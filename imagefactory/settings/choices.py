"""The value of a setting with its origin, and the allowed values of settings, the default first."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """An engine that builds images: its module, the extra that it needs, and its default runner."""

    module: str
    extra: str
    runner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRow:
    """A runner that starts images: its module and the extra that it needs.

    `brings_emulator` means that it can emulate other processors. Other runners use emulators registered on
    the machine.
    """

    module: str
    extra: str
    brings_emulator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """A scheduler: the module with `make_pool(environ)`, its title, and a command that shows its presence."""

    module: str
    title: str
    command: str


ENGINES = {
    "assemble": EngineRow(module="imagefactory.build.assemble", extra="build", runner="unshare"),
    "docker": EngineRow(module="imagefactory.build.docker", extra="docker", runner="docker"),
    "apptainer": EngineRow(module="imagefactory.build.apptainer", extra="apptainer", runner="apptainer"),
}
"""The engines of `build --engine` by name. `assemble` is part of imagefactory."""
RUNNERS = {
    "unshare": RunnerRow(module="imagefactory.runtime.unshare", extra="build", brings_emulator=True),
    "docker": RunnerRow(module="imagefactory.runtime.docker", extra="docker"),
    "podman": RunnerRow(module="imagefactory.runtime.podman", extra="build"),
    "apptainer": RunnerRow(module="imagefactory.runtime.apptainer", extra="apptainer"),
}
"""The runners of `--runner`, by name."""
SOLVERS = ("rattler", "conda", "mamba", "micromamba")
"""The solvers of conda packages."""
SITES = ("generic", "chtc", "ospool", "igwn", "slurm", "kubernetes")
"""The sites with rules for submit files."""
SLURM, KUBERNETES = "slurm", "kubernetes"
"""The schedulers of sites without HTCondor."""
PYXIS, EDF, PODMAN = "pyxis", "edf", "podman"
CONTAINERS = ("apptainer", PYXIS, EDF, PODMAN)
"""The programs by which Slurm jobs start images, the default first."""
PUBLISHERS = ("record", "strict", "off")
"""What `lock` does with the publishers of wheels, the default first."""
HTCONDOR = "htcondor"
"""The scheduler of sweep files that name none."""
POOLS = {
    HTCONDOR: PoolRow(
        module="imagefactory.schedulers.htcondor.pool", title="HTCondor", command="condor_status"
    ),
    SLURM: PoolRow(module="imagefactory.schedulers.slurm.pool", title="Slurm", command="scontrol"),
}
"""The pools of `sweep start`, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingValue:
    """A value and its origin: `default`, the path of a file, or `$NAME`."""

    value: str
    origin: str


def listed(text: str) -> tuple[str, ...]:
    """Return the items of a value that is separated by commas."""
    return tuple(item for part in text.split(",") if (item := part.strip()))


def local_pool(environ: Mapping[str, str]) -> str:
    """Return the name of the pool whose commands this machine has, empty if there is none."""
    return next(iter(local_pools(environ)), "")


def local_pools(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of all pools whose commands this machine has."""
    path = environ.get("PATH")
    return tuple(name for name, row in POOLS.items() if shutil.which(row.command, path=path))
