"""The runner that needs nothing but the kernel: an image's command in namespaces of its own.

`sandbox_plan` decides what the sandbox shall be, `sandbox/` makes it (a helper process, which becomes
process 1 inside), and `UnshareRunner` starts that helper and reads what it says. It works as root and
as an ordinary user, without newuidmap.

What holds inside, for both:
- its own user namespace; no capability in any set, no_new_privs, no nested user namespaces, a seccomp
  filter (key rings, bpf, io_uring, perf, fanotify, the kernel's log, userfaultfd, vsock, most of netlink,
  terminal injection, setuid files);
- its own pid, mount, ipc, uts and cgroup namespaces and, unless `network` is asked for, an empty
  network with loopback only. With `network` it is the host's network, abstract sockets included;
- an overlay over the image's layers: changes go to a scratch folder under the store that is removed
  at the end (to memory, where the file system cannot hold them); with `read_only` only /tmp, /dev/shm
  and writable mounts take writes;
- programs of the sandbox's own tree alone are started, where the kernel has Landlock (5.19);
- bounds on processes, memory, open files and scratch (limits.py): a cgroup where one can be had, and a
  watch, end the run that reaches one. /proc is read-only, so that no process takes itself out of them;
- of the host's files, only `spec.mounts`; of its environment, nothing; of its descriptors, nothing:
  0, 1 and 2 are pseudo-terminals of the sandbox's own where the caller's are terminals, else pipes.

As root the ids inside are the ids outside, so that files keep their owners, and `spec.uid` is the
caller's uid of that number without its powers. As an ordinary user `spec.uid` stands for the caller,
whose supplementary groups stay.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from imagefactory.errors import ImagefactoryError, StoreError, ToolError, UsageError
from imagefactory.model import CommandResult, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress, QuietProgress
from imagefactory.runtime.devices import DRIVER_DIRECTORY, NO_GPU_HINT, GpuDevices, find_gpus
from imagefactory.runtime.emulator import Emulator, find_emulator
from imagefactory.runtime.limits import RunLimits, decide_limits, limit_message, read_capacity
from imagefactory.runtime.protocol import RunnerSupport, planned_mounts
from imagefactory.runtime.sandbox.cgroups import look_at, read_own, scope_helps
from imagefactory.runtime.sandbox.syscalls import ARCHITECTURES

# --- What a sandbox of the unshare runner shall be, decided without making one


HOSTNAME = "imagefactory"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


ID_MAPPERS = 0x000000C0  # CAP_SETGID and CAP_SETUID, as bits


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxCaller:
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
    limits: RunLimits
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
    limits: RunLimits = field(default_factory=RunLimits)
    emulator: Emulator | None = None


def plan(
    place: SandboxPaths, spec: RunSpec, caller: SandboxCaller, *, gpus: GpuDevices | None, tty: bool
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
    _check_no_nul(spec)
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
        driver = {"folder": DRIVER_DIRECTORY, **asdict(gpus)}
    if spec.gpus and gpus is not None and gpus.nvidia:
        searched = environment.get("LD_LIBRARY_PATH")
        libraries = f"{DRIVER_DIRECTORY}/libraries"
        environment["LD_LIBRARY_PATH"] = f"{searched}:{libraries}" if searched else libraries
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


def _check_no_nul(spec: RunSpec) -> None:
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


def read_caller(proc: Path = Path("/proc/self")) -> SandboxCaller:
    """The facts about this process that decide how it may make a user namespace."""
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


SANDBOX = Path(__file__).with_name("sandbox")
BUS = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")  # by which systemd-run finds the user's own systemd
OUTPUT_LIMIT = 16 << 20  # bytes kept of each stream; a stranger's image may print without end

Pipe = int | IO[Any] | None


class LayerLayout(Protocol):
    """What the runner needs of an image layout on disk."""

    @property
    def path(self) -> Path:
        """The store's folder."""

    def blob_path(self, digest: str) -> Path:
        """The file of a blob."""


def make_runner(ground: RunnerSupport) -> UnshareRunner:
    return UnshareRunner(ground.layout, progress=ground.progress, workers=ground.workers)


class UnshareRunner:
    """Runs commands in images of `layout`; their layers are unpacked once under `<store>/unpacked`.

    `find` says what a run with GPUs gets to see of them; `workers` threads unpack.
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

    def require(self) -> str:
        """`unshare (Linux 6.1.0)`. Makes a whole sandbox once, without a command, to know that it can."""
        attempt(self.scratch)
        return f"unshare (Linux {platform.release()})"

    def prepare(self, made: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:
        """The same image, whose layers are unpacked then, each once for all images that share it.

        `checked`: those that are not as they were unpacked are unpacked anew.
        """
        if isinstance(made, Image):
            if checked:
                self.unpacked.drop_changed(made.layers, self.progress)
            self.unpacked.unpack(made.layers, self.layout.blob_path, self.progress, workers=self.workers)
        return made

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        """Runs `spec.argv` in `image`. 127 and 126 mean, as for shells, not found and not executable.

        Not captured and on a terminal, the command is interactive. Of captured output the first 16 MiB
        of each stream are kept. Raises UsageError, ToolError or StoreError when it was never started.
        """
        _check_not_empty(spec)
        if isinstance(image, SifArtifact):
            raise ToolError(
                "sif-needs-apptainer",
                f"the unshare runner cannot run {image.name}, a .sif file",
                hint="use --runner apptainer",
            )
        lower = self.unpacked.unpack(image.layers, self.layout.blob_path, self.progress)
        limits = self.limits(spec)
        place = SandboxPaths(
            lower=lower,
            scratch=self.scratch,
            environment=image.environment,
            limits=limits,
            emulator=find_emulator(image.architecture),
        )
        tty = not spec.capture and os.isatty(0) and os.isatty(1)
        decided = plan(place, spec, read_caller(), gpus=self.find() if spec.gpus else None, tty=tty)
        stdin = subprocess.DEVNULL if spec.capture else None
        output = subprocess.PIPE if spec.capture else None
        with signals_to_command(interactive=not spec.capture):
            sandbox = SandboxProcess(decided, stdin=stdin, stdout=output, stderr=output)
            for text in sandbox.left:
                self.progress.note(f"an earlier run left files that cannot be deleted: {text}")
            try:
                stdout, stderr = sandbox.collect()
                ended = sandbox.wait()
            except BaseException:
                sandbox.end()
                raise
        if ended["lost"]:
            raise unrecorded_bytes(ended["lost"])
        over = limit_message(ended["over"], limits) if ended["over"] else ("", "")
        if spec.capture and ended["over"]:
            stderr += f"\n{over[0]} ({over[1]})\n"  # its last words, wherever those are shown
        return CommandResult(
            returncode=ended["returncode"],
            stdout=stdout,
            stderr=stderr,
            seconds=ended["seconds"],
            timed_out=ended["timed_out"],
            over=over,
        )

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
        """A command in the given layers' folders (lowest first), for a caller that talks with it.

        `processor` is the one that they are for (`arm64`), empty for this machine's.

        The process returned stands for the command: its signals are passed on, its end is the command's
        (128 + N for signal N), killing it ends everything inside. `spec.capture` has no meaning here.
        """
        _check_not_empty(spec)
        place = SandboxPaths(
            lower=tuple(lower),
            scratch=self.scratch,
            limits=self.limits(spec),
            emulator=find_emulator(processor),
        )
        decided = plan(place, spec, read_caller(), gpus=self.find() if spec.gpus else None, tty=False)
        sandbox = SandboxProcess(decided, stdin=stdin, stdout=stdout, stderr=stderr, apart=True)
        sandbox.status.close()
        return sandbox.process


def attempt(
    scratch: Path, *, emulator: Emulator | None = None, limits: RunLimits | None = None
) -> tuple[int, str]:
    """Makes and leaves a whole sandbox. Raises ToolError, with what to do, when this machine refuses it.

    `scratch` is made if need be; what a killed process left there is removed by the next sandbox. Returns the
    version of the cgroup that counted it, or 0 and why there is none.
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
    """A running helper. The constructor returns when the command runs, or raises why it does not."""

    def __init__(
        self, decided: SandboxPlan, *, stdin: Pipe, stdout: Pipe, stderr: Pipe, apart: bool = False
    ) -> None:
        """`apart`: the terminal's Ctrl-C does not reach it, but its caller alone."""
        self.decided = decided
        self.left: list[str] = []  # of earlier sandboxes, where it cannot be removed
        plan_out, plan_in = _pipe()
        status_out, status_in = _pipe()
        counted = decided.limits.memory is not None or decided.limits.processes is not None
        scope = find_scope() if counted else ()
        # Only what a Python built against libraries of its own may need; the command never sees it.
        names = ("LD_LIBRARY_PATH", *(BUS if scope else ()))
        kept = {name: os.environ[name] for name in names if name in os.environ}
        command = [*scope, sys.executable, "-I", "-S", str(SANDBOX), str(plan_out), str(status_in)]
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=kept,
                pass_fds=(plan_out, status_in),
                start_new_session=apart,
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
        """What the command prints until it ends; ("", "") where that was not asked for."""
        kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        cut: set[str] = set()
        with selectors.DefaultSelector() as selector:
            for name in kept:
                stream = getattr(self.process, name)
                if stream is not None:
                    selector.register(stream, selectors.EVENT_READ, name)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                        continue
                    room = OUTPUT_LIMIT - len(kept[key.data])
                    kept[key.data] += data[:room]
                    if len(data) > room:
                        cut.add(key.data)
        texts = []
        for name, data_kept in kept.items():
            text = data_kept.decode(errors="replace")
            texts.append(f"{text}\n[cut after {OUTPUT_LIMIT} bytes]\n" if name in cut else text)
        return texts[0], texts[1]

    def wait(self) -> dict[str, Any]:
        """How the command ended: returncode, timed_out, over (a limit), seconds, lost (why bytes were)."""
        event = self._event()
        self.process.wait()
        self.end()
        if event["event"] != "ended":
            raise explain(event["step"], event["errno"], event["detail"])
        return event

    def end(self) -> None:
        """Ends everything inside, however it is, and lets the helper tidy up."""
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
            self.left.append(event["text"])
        code = self.process.wait()
        return {"event": "failed", "step": "helper", "errno": 0, "detail": f"it ended with {code}"}


@functools.cache
def find_scope() -> tuple[str, ...]:
    """The start of a command by which the user's systemd brings it to where a group can be made for a run.

    Empty where that is not needed, or does not help. Tried once: a bus may be there, and answer nobody.
    """
    program = shutil.which("systemd-run")
    if program is None or not scope_helps(*read_own(), look_at, os.geteuid()):
        return ()
    command = (program, "--user", "--scope", "--quiet", "--collect", "--")
    null = subprocess.DEVNULL
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tried = subprocess.run(
            [*command, "true"], stdin=null, stdout=null, stderr=null, timeout=5, check=False
        )
        return command if tried.returncode == 0 else ()
    return ()


@contextlib.contextmanager
def signals_to_command(*, interactive: bool) -> Iterator[None]:
    """Ctrl-C is for the command of an uncaptured run, which decides what it means."""
    try:
        before = signal.getsignal(signal.SIGINT) if interactive else None
        if interactive:
            signal.signal(signal.SIGINT, lambda *_: None)
    except ValueError:  # not the main thread, where no signal arrives anyway
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _pipe() -> tuple[int, int]:
    """Above 2, also where those below were closed by whoever started us: they are the command's."""
    ends = os.pipe()
    try:
        return fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        for end in ends:
            os.close(end)


def _check_not_empty(spec: RunSpec) -> None:
    if not spec.argv or not spec.argv[0]:
        raise UsageError("command-missing", "there is no command to run", hint="write one after `--`")


def unrecorded_bytes(why: str) -> ToolError:
    return ToolError(
        "output-lost",
        f"not all input or output of the command was passed on: {why}",
        hint="check the disks of the files that it reads and writes, then run it again",
    )


def explain(step: str, number: int, detail: str) -> ImagefactoryError:
    """The error for a sandbox that could not be made at `step` (errno `number`)."""
    if step == "workdir":
        return UsageError(
            "workdir-not-found",
            f"the image has no such directory to work in: {detail}",
            hint="choose another workdir",
        )
    if step in ("mount-source", "mount"):
        return UsageError(
            "mount-failed",
            f"cannot mount this inside the image: {detail}",
            hint="check the paths of the mount; if it is not yours, the image is not usable",
        )
    if step == "shown":
        return UsageError(
            "overlay-mount-failed",
            f"cannot show this read-only through an overlay: {detail}",
            hint="use --mount SOURCE:TARGET:bind, which shows it as it is, with sockets that answer",
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
            hint="choose another mount target, if it is one; else use another image",
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
            hint="run the same command again: it unpacks the layers again",
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
            hint="run imagefactory doctor: the kernel may be old, or a container may cover parts of /proc",
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
