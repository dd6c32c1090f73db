"""The runner that needs nothing but the kernel: an image's command in namespaces of its own.

`plan` decides what the sandbox shall be, `sandbox.py` makes it (a helper process, which becomes
process 1 inside), and `UnshareRunner` starts that helper and reads what it says. It works as root and
as an ordinary user, without newuidmap.

What holds inside, for both:
- its own user namespace; no capability in any set, no_new_privs, no nested user namespaces, a seccomp
  filter (key rings, bpf, io_uring, perf, userfaultfd, vsock, terminal injection, setuid files);
- its own pid, mount, ipc, uts and cgroup namespaces and, unless `network` is asked for, an empty
  network with loopback only. With `network` it is the host's network, abstract sockets included;
- an overlay over the image's layers: changes go to a scratch folder under the store that is removed
  at the end (to memory, where the file system cannot hold them); with `read_only` only /tmp, /dev/shm
  and writable mounts take writes;
- of the host's files, only `spec.mounts`; of its environment, nothing; of its terminal, nothing:
  an interactive command gets a pseudo-terminal of the sandbox's own.

As root the ids inside are the ids outside, so that files keep their owners, and `spec.uid` is the
caller's uid of that number without its powers. As an ordinary user `spec.uid` stands for the caller,
whose supplementary groups stay.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from imagefactory.errors import FactoryError, StoreError, ToolError, UsageError
from imagefactory.model import Completed, RunSpec
from imagefactory.oci.model import Image, Sif
from imagefactory.oci.unpack import Unpacked
from imagefactory.progress import Progress, Quiet
from imagefactory.verify.runners.gpu_devices import DRIVER_FOLDER, GpuDevices, find_gpus
from imagefactory.verify.runners.sandbox import ARCHITECTURES
from imagefactory.verify.runners.spec import planned_mounts

SANDBOX = Path(__file__).with_name("sandbox.py")
HOSTNAME = "imagefactory"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OUTPUT_LIMIT = 16 << 20  # bytes kept of each stream; a stranger's image may print without end
ID_MAPPERS = 0x000000C0  # CAP_SETGID and CAP_SETUID, as bits

Pipe = int | IO[Any] | None


class Layout(Protocol):
    """What the runner needs of an image layout on disk."""

    @property
    def path(self) -> Path:
        """The store's folder."""

    def blob_path(self, digest: str) -> Path:
        """The file of a blob."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlan:
    """All that sandbox.py needs to know, as plain values for JSON.

    `lower` are the layers' folders, lowest first; `scratch` is the folder to make the scratch folder in;
    `driver` is None without GPUs. An empty `argv` is a trial: everything is set up and nothing is run.
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
    caller: int
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sandbox is made of what: layers' folders (lowest first), the image's environment, scratch."""

    lower: tuple[Path, ...]
    scratch: Path
    environment: tuple[tuple[str, str], ...] = ()


def plan(place: Place, spec: RunSpec, caller: Caller, *, gpus: GpuDevices | None, tty: bool) -> SandboxPlan:
    """Decides a sandbox. Raises UsageError for a spec that cannot be, ToolError for a strange machine."""
    if caller.machine not in ARCHITECTURES:
        raise ToolError(
            f"the unshare runner does not know the processor '{caller.machine}'",
            hint=f"it runs on {', '.join(sorted(ARCHITECTURES))}",
        )
    if spec.gpus and gpus is None:
        raise ToolError("no GPU", hint="run this where `nvidia-smi` lists a GPU, or do not ask for one")
    _refuse_nul(spec)
    if not spec.workdir.startswith("/"):
        raise UsageError(
            f"workdir '{spec.workdir}' is not an absolute path", hint="write a path of the image"
        )
    if not 0 <= spec.uid < 2**32 - 1:
        raise UsageError(f"uid {spec.uid} cannot be", hint="write 0 or 65534")
    root = caller.uid == 0 and caller.capabilities & ID_MAPPERS == ID_MAPPERS
    driver = None
    environment = {"PATH": PATH, **dict(place.environment), **dict(spec.environment)}
    if tty:
        environment.setdefault("TERM", "xterm")
    if spec.gpus and gpus is not None:
        driver = {"folder": DRIVER_FOLDER, **asdict(gpus)}
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
        caller=caller.pid,
        machine=caller.machine,
    )


def identity_map(own: str) -> str:
    """A map in which every id of the caller's own namespace (/proc/self/uid_map) stays itself."""
    ranges = [line.split() for line in own.splitlines() if line.strip()]
    return "".join(f"{inside} {inside} {count}\n" for inside, _, count in ranges)


def _plan_mounts(spec: RunSpec) -> tuple[PlannedMount, ...]:
    return tuple(
        PlannedMount(source=str(mount.source), target=mount.target, writable=mount.writable)
        for mount in planned_mounts(spec)
    )


def _refuse_nul(spec: RunSpec) -> None:
    texts = [*spec.argv, spec.workdir, *(text for pair in spec.environment for text in pair)]
    if any("\0" in text for text in texts):
        raise UsageError("a NUL character cannot be part of a command", hint="remove it")
    for name, _ in spec.environment:
        if not name or "=" in name:
            raise UsageError(f"'{name}' is not the name of a variable", hint="write NAME=VALUE")


# --- running -------------------------------------------------------------------------------------


class UnshareRunner:
    """Runs commands in images of `layout`; their layers are unpacked once under `<store>/unpacked`.

    `find` says what a run with GPUs gets to see of them.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        progress: Progress | None = None,
        find: Callable[[], GpuDevices] = find_gpus,
    ) -> None:
        self.layout = layout
        self.progress = progress or Quiet()
        self.find = find
        self.unpacked = Unpacked(layout.path / "unpacked")
        self.scratch = layout.path / "run"

    def require(self) -> str:
        """`unshare (Linux 6.1.0)`. Makes a whole sandbox once, without a command, to know that it can."""
        attempt(self.scratch)
        return f"unshare (Linux {platform.release()})"

    def run(self, image: Image | Sif, spec: RunSpec) -> Completed:
        """Runs `spec.argv` in `image`. 127 and 126 mean, as for shells, not found and not executable.

        Not captured and on a terminal, the command is interactive. Of captured output the first 16 MiB
        of each stream are kept. Raises UsageError, ToolError or StoreError when it was never started.
        """
        _refuse_empty(spec)
        if isinstance(image, Sif):
            raise ToolError(
                f"the unshare runner cannot run {image.name}, a .sif file", hint="--runner apptainer"
            )
        lower = self.unpacked.unpack(image.layers, self.layout.blob_path, self.progress)
        place = Place(lower=lower, scratch=self.scratch, environment=image.environment)
        tty = not spec.capture and os.isatty(0) and os.isatty(1)
        decided = plan(place, spec, read_caller(), gpus=self.find() if spec.gpus else None, tty=tty)
        stdin = subprocess.DEVNULL if spec.capture else None
        output = subprocess.PIPE if spec.capture else None
        with signals_left_to_the_command(interactive=not spec.capture):
            sandbox = Sandbox(decided, stdin=stdin, stdout=output, stderr=output)
            try:
                stdout, stderr = sandbox.collect()
                ended = sandbox.wait()
            except BaseException:
                sandbox.end()
                raise
        return Completed(
            returncode=ended["returncode"],
            stdout=stdout,
            stderr=stderr,
            seconds=ended["seconds"],
            timed_out=ended["timed_out"],
        )

    def start(
        self, lower: Sequence[Path], spec: RunSpec, *, stdin: Pipe, stdout: Pipe, stderr: Pipe = None
    ) -> subprocess.Popen[bytes]:
        """A command in the given layers' folders (lowest first), for a caller that talks with it.

        The process returned stands for the command: its signals are passed on, its end is the command's
        (128 + N for signal N), killing it ends everything inside. `spec.capture` has no meaning here.
        """
        _refuse_empty(spec)
        place = Place(lower=tuple(lower), scratch=self.scratch)
        decided = plan(place, spec, read_caller(), gpus=self.find() if spec.gpus else None, tty=False)
        sandbox = Sandbox(decided, stdin=stdin, stdout=stdout, stderr=stderr)
        sandbox.status.close()
        return sandbox.process


def attempt(scratch: Path) -> None:
    """Makes and leaves a whole sandbox. Raises ToolError, with what to do, when this machine refuses it.

    `scratch` is made if need be; what a killed process left there is removed by the next sandbox.
    """
    decided = plan(Place(lower=(), scratch=scratch), RunSpec(argv=()), read_caller(), gpus=None, tty=False)
    null = subprocess.DEVNULL
    Sandbox(decided, stdin=null, stdout=null, stderr=null).wait()


class Sandbox:
    """A running helper. The constructor returns when the command runs, or raises why it does not."""

    def __init__(self, decided: SandboxPlan, *, stdin: Pipe, stdout: Pipe, stderr: Pipe) -> None:
        self.decided = decided
        plan_out, plan_in = os.pipe()
        status_out, status_in = os.pipe()
        # Only what a Python built against libraries of its own may need; the command never sees it.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        command = [sys.executable, "-I", "-S", str(SANDBOX), str(plan_out), str(status_in)]
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, env=kept, pass_fds=(plan_out, status_in)
            )
        except OSError as error:
            os.close(status_out)
            os.close(plan_in)
            raise ToolError(
                f"the sandbox cannot be started: {error}", hint=f"is {sys.executable} still there?"
            ) from error
        finally:
            os.close(plan_out)
            os.close(status_in)
        with os.fdopen(plan_in, "wb") as file, contextlib.suppress(BrokenPipeError):
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
        """How the command ended: returncode, timed_out, seconds."""
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
        line = self.status.readline()
        if not line:
            code = self.process.wait()
            return {"event": "failed", "step": "helper", "errno": 0, "detail": f"it ended with {code}"}
        event: dict[str, Any] = json.loads(line)
        return event


@contextlib.contextmanager
def signals_left_to_the_command(*, interactive: bool) -> Iterator[None]:
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


def _refuse_empty(spec: RunSpec) -> None:
    if not spec.argv or not spec.argv[0]:
        raise UsageError("there is no command to run", hint="write one after `--`")


# --- what this process is, and what went wrong -----------------------------------------------------


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


def explain(step: str, number: int, detail: str) -> FactoryError:
    """The error for a sandbox that could not be made at `step` (errno `number`)."""
    if step == "workdir":
        return UsageError(f"the image has no such folder to work in: {detail}", hint="name another workdir")
    if step in ("mount-source", "mount"):
        return UsageError(
            f"this cannot be shown inside the image: {detail}", hint="look at the mount's paths"
        )
    if step == "image":
        return StoreError(
            f"the image has no folder there, but a link or file: {detail}", hint="it is not usable"
        )
    if step == "layers":
        return StoreError(f"a layer cannot be read: {detail}", hint="run again: layers are unpacked anew")
    if step == "scratch" and number in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EPERM, errno.EDQUOT):
        return StoreError(
            f"no room for the sandbox's changes: {detail}", hint="free space in the store, or name another"
        )
    if step in ("user-namespace", "user-namespace-map", "namespaces", "private-mounts", "network-namespace"):
        return ToolError(
            f"this machine refuses user namespaces ({step}: {detail})",
            hint="`imagefactory doctor` says which setting does, and the command that changes it",
        )
    if step in ("proc", "overlay", "mount-source", "sys", "dev"):
        return ToolError(
            f"this machine refuses a mount that the sandbox needs ({step}: {detail})",
            hint="`imagefactory doctor` says why: an old kernel, or a container that covers parts of /proc",
        )
    return ToolError(
        f"the sandbox could not be made ({step}: {detail})", hint="`imagefactory doctor` looks closer"
    )
