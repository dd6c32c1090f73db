"""A setting's value with its origin, and what settings choose among, the default first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """What makes images: where it is, the extra that it needs, and the runner that tries what it made.

    That runner holds where neither `--runner` nor the setting says otherwise.
    """

    module: str
    extra: str
    runner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRow:
    """What starts images: where it is, the extra that it needs, and whether it brings an emulator for
    images of another processor; the others take what the machine has registered.
    """

    module: str
    extra: str
    brings_emulator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """Where images are verified by the batch: the module whose `make_pool(environ)` gives the pool of this
    machine, what people call it, and the command by which a machine is known to be of one.
    """

    module: str
    title: str
    command: str


ENGINES = {
    "assemble": EngineRow(module="imagefactory.build.assemble", extra="build", runner="unshare"),
    "docker": EngineRow(module="imagefactory.build.docker", extra="docker", runner="docker"),
    "apptainer": EngineRow(module="imagefactory.build.apptainer", extra="apptainer", runner="apptainer"),
}
"""The engines that `build --engine` takes, by name; `assemble` is the embedded default."""
RUNNERS = {
    "unshare": RunnerRow(module="imagefactory.runtime.unshare", extra="build", brings_emulator=True),
    "docker": RunnerRow(module="imagefactory.runtime.docker", extra="docker"),
    "apptainer": RunnerRow(module="imagefactory.runtime.apptainer", extra="apptainer"),
}
"""The runners that `--runner` takes, by name."""
SOLVERS = ("rattler", "conda", "mamba", "micromamba")
"""What solves conda's packages."""
SITES = ("generic", "chtc", "ospool", "igwn", "slurm", "kubernetes")
"""Whose rules submit files follow."""
SLURM, KUBERNETES = "slurm", "kubernetes"
"""What runs the jobs of a site, where it is not HTCondor."""
HTCONDOR = "htcondor"
"""The pool of a sweep that names none: there was no other."""
POOLS = {
    HTCONDOR: PoolRow(
        module="imagefactory.schedulers.htcondor.pool", title="HTCondor", command="condor_status"
    ),
    SLURM: PoolRow(module="imagefactory.schedulers.slurm.pool", title="Slurm", command="scontrol"),
}
"""The pools that `sweep start` takes, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingValue:
    """A value and where it came from: `default`, a file's path, or `$NAME`."""

    value: str
    origin: str


def listed(text: str) -> tuple[str, ...]:
    """The items of a value with commas."""
    return tuple(item for part in text.split(",") if (item := part.strip()))
