"""The runner that needs only the kernel: an image's command in its own namespaces.

`plan` decides on a sandbox, `sandbox/` builds it (a helper process, which becomes process 1 inside), and
`UnshareRunner` starts that helper and reads its events. It works as root and as an ordinary user, without
newuidmap.

Inside, for both:

- its own user namespace; no capability in any set, no_new_privs, no nested user namespaces, a seccomp
  filter (key rings, bpf, io_uring, perf, fanotify, the kernel's log, userfaultfd, vsock, most of netlink,
  terminal injection, setuid files);
- its own pid, mount, ipc, uts and cgroup namespaces and, without `network`, an empty network with only
  loopback. With `network` it is the host's network, abstract sockets included;
- an overlay over the image's layers: changes go to a scratch directory of the store that is deleted at the
  end (to memory, if the file system cannot be an upper layer). With `read_only` only /tmp, /dev/shm and
  writable mounts are writable;
- only programs of the sandbox's own tree start, if the kernel has Landlock (5.19);
- limits on processes, memory, open files and scratch (limits.py): a cgroup, if possible, and a watch end a
  run that reaches one. /proc is read-only, so that no process escapes them;
- only `spec.mounts` of the host's files, and nothing of its environment and descriptors: 0, 1 and 2 are
  the sandbox's own pseudo-terminals for the caller's terminals, else pipes.

As root the ids inside are the ids outside, so that files keep their owners, and `spec.uid` is the caller's
uid of that number without its privileges. As an ordinary user `spec.uid` maps to the caller, whose
supplementary groups stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import platform
import re
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from imagefactory.errors import ImagefactoryError, StoreError, ToolError, UsageError
from imagefactory.model import CommandResult, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress, QuietProgress
from imagefactory.runtime.devices import (
    DRIVER_DIRECTORY,
    NO_GPU_HINT,
    GpuDevices,
    check_glibc,
    find_gpus,
    select_devices,
)
from imagefactory.runtime.emulator import Emulator, find_emulator
from imagefactory.runtime.limits import RunLimits, decide_limits, limit_message, read_capacity
from imagefactory.runtime.protocol import (
    BoundedOutput,
    RunnerSupport,
    check_spec,
    check_values,
    planned_mounts,
    reject_sif,
    signals_to_command,
)
from imagefactory.runtime.sandbox.cgroups import look_at, read_own, scope_helps
from imagefactory.runtime.sandbox.syscalls import ARCHITECTURES

HOSTNAME = "imagefactory"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SANDBOX = Path(__file__).with_name("sandbox")
BUS = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")  # by which systemd-run finds the user's own systemd
ID_MAPPERS = 0x000000C0  # CAP_SETGID and CAP_SETUID, as bits


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxCaller:
    """This process: its id, effective ids, effective capabilities, and /proc/self/*id_map."""

    pid: int
    uid: int
    gid: int
    capabilities: int
    uid_map: str
    gid_map: str
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlan:
    """The input of the program in sandbox/, as plain values for JSON.

    `lower` are the layers' directories, the lowest first. `scratch` is the parent of the scratch directory.
    `driver` is None without GPUs, `emulator` is None for an image of this processor. An empty `argv` is a
    trial, which runs nothing.
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
    mounts: tuple[dict[str, Any], ...]
    driver: dict[str, Any] | None
    timeout: float | None
    limits: RunLimits
    caller: int
    machine: str
    emulator: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPaths:
    """The layers' directories (lowest first), scratch, the image's environment and the limits of a sandbox.

    `emulator` starts its programs, None for those of this processor.
    """

    lower: tuple[Path, ...]
    scratch: Path
    environment: tuple[tuple[str, str], ...] = ()
    limits: RunLimits = field(default_factory=RunLimits)
    emulator: Emulator | None = None


def plan(
    paths: SandboxPaths, spec: RunSpec, caller: SandboxCaller, *, gpus: GpuDevices | None, tty: bool
) -> SandboxPlan:
    """Return the plan of a sandbox.

    Raises UsageError for an invalid spec, StoreError for an invalid image, ToolError for an unsupported
    machine.
    """
    if caller.machine not in ARCHITECTURES:
        raise ToolError(
            "processor-unsupported",
            f"the unshare runner does not support the processor '{caller.machine}'",
            hint=f"supported processors: {', '.join(sorted(ARCHITECTURES))}",
        )
    if spec.gpus and paths.emulator:
        raise ToolError(
            "gpu-not-emulated",
            f"an image for {paths.emulator.machine} is emulated here, and emulated images have no GPU",
            hint=f"run it on a machine with the processor {paths.emulator.machine}",
        )
    if spec.gpus and gpus is None:
        raise ToolError("gpu-device-missing", "this machine has no GPU", hint=NO_GPU_HINT)
    check_values(spec)
    _check_image(paths.environment)
    root = caller.uid == 0 and caller.capabilities & ID_MAPPERS == ID_MAPPERS
    driver = None
    environment = {"PATH": PATH, **dict(paths.environment), **dict(spec.environment)}
    if tty:
        environment.setdefault("TERM", "xterm")
    if spec.gpus and gpus is not None:
        nodes = [node for _, _, node in spec.selected_gpus]
        driver = {"folder": DRIVER_DIRECTORY, **asdict(select_devices(gpus, nodes))}
        if gpus.nvidia:
            path, libraries = environment.get("LD_LIBRARY_PATH"), f"{DRIVER_DIRECTORY}/libraries"
            environment["LD_LIBRARY_PATH"] = f"{path}:{libraries}" if path else libraries
            environment["PATH"] += f":{DRIVER_DIRECTORY}/programs"
    return SandboxPlan(
        argv=spec.argv,
        environment=tuple(environment.items()),
        workdir=spec.workdir,
        uid=spec.uid,
        gid=spec.uid,
        uid_map=identity_map(caller.uid_map) if root else f"{spec.uid} {caller.uid} 1\n",
        gid_map=identity_map(caller.gid_map) if root else f"{spec.uid} {caller.gid} 1\n",
        deny_setgroups=not root,
        # An overlay takes a directory once. Of a duplicate layer (a Dockerfile's steps that change nothing
        # all give the same one) only the upper one counts.
        lower=tuple(reversed(dict.fromkeys(map(str, reversed(paths.lower))))),
        scratch=str(paths.scratch),
        hostname=HOSTNAME,
        network=spec.network,
        read_only=spec.read_only,
        tty=tty,
        mounts=tuple({**asdict(mount), "source": str(mount.source)} for mount in planned_mounts(spec)),
        driver=driver,
        timeout=spec.timeout,
        limits=paths.limits,
        caller=caller.pid,
        machine=caller.machine,
        emulator=asdict(paths.emulator) if paths.emulator else None,
    )


def identity_map(own_map: str) -> str:
    """Return an identity map of every id of the caller's own namespace (/proc/self/uid_map)."""
    ranges = [line.split() for line in own_map.splitlines() if line.strip()]
    return "".join(f"{inside} {inside} {count}\n" for inside, _, count in ranges)


def _check_image(environment: tuple[tuple[str, str], ...]) -> None:
    """Raise StoreError for a variable that no process can have. An untrusted image's text is escaped."""
    for name, text in environment:
        try:
            whole = os.fsencode(f"{name}={text}")
        except UnicodeEncodeError:
            whole = b"\0"
        if not name or "=" in name or b"\0" in whole:
            raise StoreError(
                "image-variable-invalid",
                f"the image sets an invalid variable: {name[:100]!a}",
                hint="use another image, and report this to its author",
            )


def read_caller(proc: Path = Path("/proc/self")) -> SandboxCaller:
    """Return the facts about this process that decide how it may create a user namespace."""
    status = (proc / "status").read_text()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return SandboxCaller(
        pid=os.getpid(),
        uid=os.geteuid(),
        gid=os.getegid(),
        capabilities=int(effective[1], 16) if effective else 0,
        uid_map=(proc / "uid_map").read_text(),
        gid_map=(proc / "gid_map").read_text(),
        machine=platform.machine(),
    )


Pipe = int | IO[Any] | None


class LayerLayout(Protocol):
    """The part of an image layout on disk that the runner needs."""

    @property
    def path(self) -> Path:
        """The store's directory."""

    def blob_path(self, digest: str) -> Path:
        """Return the file of a blob."""


def make_runner(support: RunnerSupport) -> UnshareRunner:
    return UnshareRunner(support.layout, progress=support.progress, workers=support.workers)


class UnshareRunner:
    """Runs commands in images of `layout`, whose layers are unpacked once under `<store>/unpacked`.

    `find` returns the devices for a run with GPUs. `workers` threads unpack.
    """

    def __init__(
        self,
        layout: LayerLayout,
        *,
        progress: Progress | None = None,
        find: Callable[[], GpuDevices] = find_gpus,
        workers: int = 1,
    ) -> None:
        self.layout, self.workers = layout, workers
        self.progress = progress or QuietProgress()
        self.find = find
        self.unpacked = UnpackedLayers(layout.path / "unpacked")
        self.scratch = layout.path / "run"
        self._running: set[SandboxProcess] = set()

    def require(self) -> str:
        """Build a sandbox once, without a command, and return `unshare (Linux 6.1.0)`."""
        attempt(self.scratch)
        return f"unshare (Linux {platform.release()})"

    def prepare(self, image: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:
        """Unpack the layers, each once for all images that share it. With `checked`, changed ones again."""
        if isinstance(image, Image):
            if checked:
                self.unpacked.drop_changed(image.layers, self.progress)
            self.unpacked.unpack(image.layers, self.layout.blob_path, self.progress, workers=self.workers)
        return image

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        check_spec(spec)
        if isinstance(image, SifArtifact):
            raise reject_sif(image, "the unshare runner")
        lower = self.unpacked.unpack(image.layers, self.layout.blob_path, self.progress)
        limits = self.limits(spec)
        paths = SandboxPaths(
            lower=lower,
            scratch=self.scratch,
            environment=image.environment,
            limits=limits,
            emulator=find_emulator(image.architecture),
        )
        tty = not spec.capture and os.isatty(0) and os.isatty(1)
        gpus = self.find() if spec.gpus else None
        decided = plan(paths, spec, read_caller(), gpus=gpus, tty=tty)
        if gpus:
            check_glibc(gpus.libraries, spec, lambda probe: self.run(image, probe))
        stdin = subprocess.DEVNULL if spec.capture else None
        output = subprocess.PIPE if spec.capture else None
        with signals_to_command(interactive=not spec.capture):
            sandbox = SandboxProcess(decided, stdin=stdin, stdout=output, stderr=output)
            for text in sandbox.undeletable:
                self.progress.note(f"an earlier run left files that cannot be deleted: {text}")
            self._running.add(sandbox)
            try:
                stdout, stderr = sandbox.collect()
                ended = sandbox.wait()
            except BaseException:
                sandbox.end()
                raise
            finally:
                self._running.discard(sandbox)
        if ended["lost"]:
            raise unrecorded_bytes(ended["lost"])
        over = limit_message(ended["over"], limits) if ended["over"] else ("", "")
        if spec.capture and ended["over"]:
            stderr += f"\n{over[0]} ({over[1]})\n"
        return CommandResult(
            returncode=ended["returncode"],
            stdout=stdout,
            stderr=stderr,
            seconds=ended["seconds"],
            timed_out=ended["timed_out"],
            over=over,
        )

    def stop(self) -> None:
        for sandbox in tuple(self._running):
            sandbox.process.send_signal(signal.SIGUSR2)

    def limits(self, spec: RunSpec) -> RunLimits:
        return decide_limits(dict(spec.limits), read_capacity(self.scratch))

    def start(
        self,
        lower: Sequence[Path],
        spec: RunSpec,
        *,
        stdin: Pipe,
        stdout: Pipe,
        stderr: Pipe = None,
        processor: str = "",
    ) -> subprocess.Popen[bytes]:
        """Start a command in these layers' directories (lowest first), for a caller that talks with it.

        `processor` is that of the layers (`arm64`), empty for this machine's. The process represents the
        command: it passes signals on and ends like the command (128 + N for signal N). Killing it ends
        everything inside. `spec.capture` is ignored.
        """
        check_spec(spec)
        paths = SandboxPaths(
            lower=tuple(lower),
            scratch=self.scratch,
            limits=self.limits(spec),
            emulator=find_emulator(processor),
        )
        decided = plan(paths, spec, read_caller(), gpus=self.find() if spec.gpus else None, tty=False)
        sandbox = SandboxProcess(decided, stdin=stdin, stdout=stdout, stderr=stderr, own_session=True)
        sandbox.status.close()
        return sandbox.process


def attempt(
    scratch: Path, *, emulator: Emulator | None = None, limits: RunLimits | None = None
) -> tuple[int, str]:
    """Build a sandbox and end it. Return its cgroup's version, or 0 and the reason for no cgroup.

    `scratch` is created if necessary. The next sandbox deletes the files of killed processes there. Raises
    ToolError with the fix if this machine does not allow sandboxes.
    """
    decided = plan(
        SandboxPaths(lower=(), scratch=scratch, emulator=emulator, limits=limits or RunLimits()),
        RunSpec(argv=()),
        read_caller(),
        gpus=None,
        tty=False,
    )
    null = subprocess.DEVNULL
    sandbox = SandboxProcess(decided, stdin=null, stdout=null, stderr=null)
    sandbox.wait()
    return sandbox.group


class SandboxProcess:
    """A running helper. The constructor returns when the command runs, or raises the reason why not.

    With `own_session` the terminal's Ctrl-C reaches only its caller. `undeletable` are files of earlier
    sandboxes.
    """

    def __init__(
        self, decided: SandboxPlan, *, stdin: Pipe, stdout: Pipe, stderr: Pipe, own_session: bool = False
    ) -> None:
        self.undeletable: list[str] = []
        plan_out, plan_in = _pipe()
        status_out, status_in = _pipe()
        counted = decided.limits.memory is not None or decided.limits.processes is not None
        scope = find_scope() if counted else ()
        # Only for a Python built against libraries of its own; the command never sees it.
        names = ("LD_LIBRARY_PATH", *(BUS if scope else ()))
        environment = {name: os.environ[name] for name in names if name in os.environ}
        command = [*scope, sys.executable, "-I", "-S", str(SANDBOX), str(plan_out), str(status_in)]
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                pass_fds=(plan_out, status_in),
                start_new_session=own_session,
            )
        except OSError as error:
            os.close(status_out)
            os.close(plan_in)
            raise ToolError(
                "sandbox-failed",
                f"cannot start the sandbox: {error}",
                hint=f"check that {sys.executable} still exists",
            ) from error
        finally:
            os.close(plan_out)
            os.close(status_in)
        with contextlib.suppress(BrokenPipeError), os.fdopen(plan_in, "wb") as file:
            file.write(json.dumps(asdict(decided)).encode())
        self.status = os.fdopen(status_out, "r", encoding="utf-8")
        try:
            event = self._event()
        except BaseException:
            self.end()
            raise
        if event["event"] == "failed":
            self.end()
            raise explain(event["step"], event["errno"], event["detail"])
        self.group: tuple[int, str] = (event["group"], event["no_group"])

    def collect(self) -> tuple[str, str]:
        """Return the command's output until it ends, ("", "") if it is not captured."""
        output = BoundedOutput()
        with selectors.DefaultSelector() as selector:
            for name, stream in (("stdout", self.process.stdout), ("stderr", self.process.stderr)):
                if stream is not None:
                    selector.register(stream, selectors.EVENT_READ, name)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    output.add(key.data, data)
        return output.text("stdout"), output.text("stderr")

    def wait(self) -> dict[str, Any]:
        """Return the end: returncode, timed_out, over (a limit), seconds, lost (why bytes were lost)."""
        event = self._event()
        self.process.wait()
        self.end()
        if event["event"] != "ended":
            raise explain(event["step"], event["errno"], event["detail"])
        return event

    def end(self) -> None:
        """End everything inside, in any state, and let the helper clean up."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR2)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.status.close()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _event(self) -> dict[str, Any]:
        for line in iter(self.status.readline, ""):
            event: dict[str, Any] = json.loads(line)
            if event["event"] != "left":
                return event
            self.undeletable.append(event["text"])
        code = self.process.wait()
        return {"event": "failed", "step": "helper", "errno": 0, "detail": f"it ended with {code}"}


@functools.cache
def find_scope() -> tuple[str, ...]:
    """Return a command prefix with which the user's systemd starts a run that can have a cgroup.

    Empty if that is not needed, or does not help. Tested once, because a bus may exist and never answer.
    """
    program = shutil.which("systemd-run")
    if program is None or not scope_helps(*read_own(), look_at, os.geteuid()):
        return ()
    command = (program, "--user", "--scope", "--quiet", "--collect", "--")
    null = subprocess.DEVNULL
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*command, "true"], stdin=null, stdout=null, stderr=null, timeout=5, check=True)
        return command
    return ()


def _pipe() -> tuple[int, int]:
    """Return descriptors above 2, even if those below are closed, because they are the command's."""
    ends = os.pipe()
    try:
        return fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        for end in ends:
            os.close(end)


def unrecorded_bytes(reason: str) -> ToolError:
    return ToolError(
        "output-lost",
        f"some input or output of the command was lost: {reason}",
        hint="check the disks of its input and output files, then run the same command again",
    )


def explain(step: str, number: int, detail: str) -> ImagefactoryError:
    """Return the error for a sandbox that failed at `step` (errno `number`)."""
    if step == "workdir":
        return UsageError(
            "workdir-not-found",
            f"the image does not have the workdir: {detail}",
            hint="pass --workdir with a directory of the image",
        )
    if step in ("mount-source", "mount"):
        return UsageError(
            "mount-failed",
            f"cannot mount a path inside the image: {detail}",
            hint="check the paths of --mount; if none is yours, use another image",
        )
    if step == "shown":
        return UsageError(
            "overlay-mount-failed",
            f"cannot mount a directory read-only through an overlay: {detail}",
            hint="use a bind mount, which is not read-only for sockets: --mount SOURCE:TARGET:bind",
        )
    if step == "image":
        return StoreError(
            "image-path-unusable",
            f"the image has a link or file where a directory must be: {detail}",
            hint="use another image",
        )
    if step == "target":
        return StoreError(
            "mount-target-reserved",
            f"{detail}, which is reserved for the sandbox",
            hint="choose another target of --mount; without --mount, use another image",
        )
    if step == "openat2":
        return ToolError(
            "kernel-too-old",
            f"this machine does not allow a system call that the sandbox needs (openat2: {detail})",
            hint="boot Linux 5.12 or newer; in a container, run "
            "imagefactory doctor: it shows how to start it",
        )
    if step == "layers":
        return StoreError(
            "layer-unreadable",
            f"cannot read a layer: {detail}",
            hint="run the same command again to unpack the layers again",
        )
    if step == "scratch" and number in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EPERM, errno.EDQUOT):
        return StoreError(
            "scratch-not-writable",
            f"no space for the sandbox's changes: {detail}",
            hint="free space in the store, or set another store",
        )
    if step in ("user-namespace", "user-namespace-map", "namespaces", "private-mounts", "network-namespace"):
        return ToolError(
            "user-namespaces-denied",
            f"this machine does not allow user namespaces ({step}: {detail})",
            hint="run imagefactory doctor: it shows the setting and the command that changes it",
        )
    if step in ("proc", "overlay", "mount-source", "sys", "dev"):
        return ToolError(
            "mount-denied",
            f"this machine does not allow a mount that the sandbox needs ({step}: {detail})",
            hint="run imagefactory doctor: it shows whether the kernel or a container is the reason",
        )
    if step == "emulator":
        return ToolError(
            "emulation-unavailable",
            f"this machine does not let a sandbox use its own emulator: {detail}",
            hint="sudo modprobe binfmt_misc; if that is not enough, run imagefactory doctor",
        )
    return ToolError(
        "sandbox-failed", f"could not create the sandbox ({step}: {detail})", hint="run imagefactory doctor"
    )
