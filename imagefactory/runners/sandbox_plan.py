"""What a sandbox of the unshare runner shall be, decided without making one."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from imagefactory.errors import StoreError, ToolError, UsageError
from imagefactory.model import RunSpec
from imagefactory.runtime.emulator import Emulator
from imagefactory.runtime.devices import DRIVER_FOLDER, NO_GPU_HINT, GpuDevices
from imagefactory.runtime.limits import Limits
from imagefactory.runtime.sandbox.syscalls import ARCHITECTURES
from imagefactory.runners.spec import planned_mounts

HOSTNAME = "imagefactory"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


ID_MAPPERS = 0x000000C0  # CAP_SETGID and CAP_SETUID, as bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: process id, effective ids, the effective capabilities' bits, and /proc/self/*id_map."""

    pid: int
    uid: int
    gid: int
    capabilities: int
    uid_map: str
    gid_map: str
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMount:
    source: str
    target: str
    writable: bool
    bind: bool
    scratch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlan:
    """All that the program in sandbox/ needs to know, as plain values for JSON.

    `lower` are the layers' folders, lowest first; `scratch` is the folder to make the scratch folder in;
    `driver` is None without GPUs, `emulator` where the image is for this processor. An empty `argv` is a
    trial: everything is set up and nothing is run.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    workdir: str
    uid: int
    gid: int
    uid_map: str
    gid_map: str
    deny_setgroups: bool
    lower: tuple[str, ...]
    scratch: str
    hostname: str
    network: bool
    read_only: bool
    tty: bool
    mounts: tuple[PlannedMount, ...]
    driver: dict[str, Any] | None
    timeout: float | None
    limits: Limits
    caller: int
    machine: str
    emulator: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPaths:
    """Of what a sandbox is made: layers' folders (lowest first), scratch, the image's environment, bounds.

    `emulator` starts its programs, None where they are this processor's.
    """

    lower: tuple[Path, ...]
    scratch: Path
    environment: tuple[tuple[str, str], ...] = ()
    limits: Limits = field(default_factory=Limits)
    emulator: Emulator | None = None


def plan(
    place: SandboxPaths, spec: RunSpec, caller: Caller, *, gpus: GpuDevices | None, tty: bool
) -> SandboxPlan:
    """Decides a sandbox.

    Raises UsageError for a spec that cannot be, StoreError for an image that cannot, ToolError for a strange
    machine.
    """
    if caller.machine not in ARCHITECTURES:
        raise ToolError(
            "processor-unsupported",
            f"the unshare runner does not support the processor '{caller.machine}'",
            hint=f"supported processors: {', '.join(sorted(ARCHITECTURES))}",
        )
    if spec.gpus and place.emulator:
        raise ToolError(
            "gpu-not-emulated",
            f"an image for {place.emulator.machine} is emulated here, and has no access to a GPU",
            hint="run it on a machine of that processor",
        )
    if spec.gpus and gpus is None:
        raise ToolError("gpu-device-missing", "no GPU", hint=NO_GPU_HINT)
    _refuse_nul(spec)
    _check_image(place.environment)
    if not spec.workdir.startswith("/"):
        raise UsageError(
            "option-invalid",
            f"workdir '{spec.workdir}' is not an absolute path",
            hint="write a path of the image",
        )
    if not 0 <= spec.uid < 2**32 - 1:
        raise UsageError("option-invalid", f"uid {spec.uid} is not valid", hint="write 0 or 65534")
    root = caller.uid == 0 and caller.capabilities & ID_MAPPERS == ID_MAPPERS
    driver = None
    environment = {"PATH": PATH, **dict(place.environment), **dict(spec.environment)}
    if tty:
        environment.setdefault("TERM", "xterm")
    if spec.gpus and gpus is not None:
        driver = {"folder": DRIVER_FOLDER, **asdict(gpus)}
    if spec.gpus and gpus is not None and gpus.nvidia:
        searched = environment.get("LD_LIBRARY_PATH")
        libraries = f"{DRIVER_FOLDER}/libraries"
        environment["LD_LIBRARY_PATH"] = f"{searched}:{libraries}" if searched else libraries
        environment["PATH"] += f":{DRIVER_FOLDER}/programs"
    return SandboxPlan(
        argv=spec.argv,
        environment=tuple(environment.items()),
        workdir=spec.workdir,
        uid=spec.uid,
        gid=spec.uid,
        uid_map=identity_map(caller.uid_map) if root else f"{spec.uid} {caller.uid} 1\n",
        gid_map=identity_map(caller.gid_map) if root else f"{spec.uid} {caller.gid} 1\n",
        deny_setgroups=not root,
        # An overlay takes a folder once. A layer that stands twice (a Dockerfile's steps that change nothing
        # all give the same one) says all that it says in its upper place.
        lower=tuple(reversed(dict.fromkeys(map(str, reversed(place.lower))))),
        scratch=str(place.scratch),
        hostname=HOSTNAME,
        network=spec.network,
        read_only=spec.read_only,
        tty=tty,
        mounts=_plan_mounts(spec),
        driver=driver,
        timeout=spec.timeout,
        limits=place.limits,
        caller=caller.pid,
        machine=caller.machine,
        emulator=asdict(place.emulator) if place.emulator else None,
    )


def identity_map(own: str) -> str:
    """A map in which every id of the caller's own namespace (/proc/self/uid_map) stays itself."""
    ranges = [line.split() for line in own.splitlines() if line.strip()]
    return "".join(f"{inside} {inside} {count}\n" for inside, _, count in ranges)


def _plan_mounts(spec: RunSpec) -> tuple[PlannedMount, ...]:
    return tuple(
        PlannedMount(
            source=str(mount.source),
            target=mount.target,
            writable=mount.writable,
            bind=mount.bind,
            scratch=mount.scratch,
        )
        for mount in planned_mounts(spec)
    )


def _refuse_nul(spec: RunSpec) -> None:
    texts = [*spec.argv, spec.workdir, *(text for pair in spec.environment for text in pair)]
    if any("\0" in text for text in texts):
        raise UsageError("option-invalid", "a command cannot contain a NUL character", hint="remove it")
    for name, _ in spec.environment:
        if not name or "=" in name:
            raise UsageError(
                "option-invalid", f"'{name}' is not the name of a variable", hint="write NAME=VALUE"
            )


def _check_image(environment: tuple[tuple[str, str], ...]) -> None:
    """A stranger's image may set what no process can be given. Its texts are shown escaped."""
    for name, text in environment:
        try:
            whole = os.fsencode(f"{name}={text}")
        except UnicodeEncodeError:
            whole = b"\0"
        if not name or "=" in name or b"\0" in whole:
            raise StoreError(
                "image-variable-invalid",
                f"the image sets an invalid variable: {name[:100]!a}",
                hint="report it to the author of the image: no one can run it",
            )


def read_caller(proc: Path = Path("/proc/self")) -> Caller:
    """The facts about this process that decide how it may make a user namespace."""
    status = (proc / "status").read_text()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return Caller(
        pid=os.getpid(),
        uid=os.geteuid(),
        gid=os.getegid(),
        capabilities=int(effective[1], 16) if effective else 0,
        uid_map=(proc / "uid_map").read_text(),
        gid_map=(proc / "gid_map").read_text(),
        machine=platform.machine(),
    )
