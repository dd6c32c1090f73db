"""The runner for machines with docker: an image's command in a container of the daemon.

`plan` decides, the SDK acts. What holds inside is what the unshare runner gives, as far as docker
can: no capability, no new privileges, docker's own seccomp filter, namespaces of its own, an empty
network (with `network` the host's), no variable of the host. With `read_only` only /tmp, /dev/shm and
writable mounts take writes. The container is removed at the end, and with it every change.

Captured output comes over the SDK. A command that is not captured is started by `docker start
--attach --interactive`: the command line owns terminals, their size and their signals.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagefactory.errors import ImagefactoryError, ToolError, UsageError
from imagefactory.model import CommandResult, Mount, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.progress import QUIET, Progress
from imagefactory.runtime.devices import AmdGpus, count_gpus, find_amd_gpus, find_device_nodes
from imagefactory.runtime.docker_daemon import DockerDaemon, run_name
from imagefactory.runtime.limits import check_limits_supported
from imagefactory.runtime.protocol import RunnerSupport, check_spec, planned_mounts

if TYPE_CHECKING:
    from docker.models.containers import Container


# --- Who waits for a container, as a label of it: what a killed process left can be told from the rest


OWNER = "imagefactory.owner"
"""Label of our containers: who waits for them, so that what a killed runner left is found."""


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
        return file.read().strip()


def this_process() -> str:
    """The label's value: this machine since it was booted, and this process by id and beginning."""
    return f"{boot_id()}/{os.getpid()}/{_began(os.getpid())}"


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks since boot; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(owner: str, boot: str) -> bool:
    """Whether a container's owner still runs. Owners of another machine, and none of ours, count as alive."""
    found = re.fullmatch(r"([0-9a-f-]{36})/(\d+)/(\d+)", owner)
    if not found or found[1] != boot:
        return True
    return _began(int(found[2])) == found[3]


# --- What docker's daemon means where it does not make or start a container, by its own words. Pure


_NOT_FOUND = re.compile(r"executable file not found|no such file or directory", re.IGNORECASE)
_NOT_EXECUTABLE = re.compile(r"permission denied|exec format error|is a directory", re.IGNORECASE)


def not_started(said: str) -> CommandResult:
    """What the daemon's refusal to start a container means: 127 or 126 of a shell, or an error.

    Raises ToolError or UsageError when it is not the command's own fault.
    """
    others = ("docker-init", "mount", "chdir", "nvidia", "cdi")
    if re.search(r"\bexec[: ]", said) and not any(word in said.lower() for word in others):
        for pattern, code in ((_NOT_FOUND, 127), (_NOT_EXECUTABLE, 126)):
            if pattern.search(said):
                return CommandResult(returncode=code, stdout="", stderr=f"{said.strip()}\n", seconds=0.0)
    raise explain(said)


def explain(said: str) -> ImagefactoryError:
    """The error for a container that the daemon did not make or start, from its own words."""
    if "docker-init" in said:
        return ToolError(
            "tool-missing",
            "docker has no docker-init",
            hint="apt-get install tini, or install docker-ce from Docker",
        )
    if "could not select device driver" in said or "nvidia-container" in said:
        return ToolError(
            "docker-gpu-unavailable",
            f"docker cannot give the container a GPU: {said.strip()}",
            hint="install nvidia-container-toolkit, then: nvidia-ctk runtime configure "
            "--runtime=docker and systemctl restart docker",
        )
    if "CDI" in said or "cdi" in said:
        return ToolError(
            "docker-cdi-unavailable",
            f"docker cannot give the container that device: {said.strip()}",
            hint="nvidia-ctk cdi list shows the names; docker needs features.cdi in daemon.json",
        )
    if "bind source path does not exist" in said or "invalid mount" in said:
        return UsageError(
            "mount-failed",
            f"cannot mount this inside the image: {said.strip()}",
            hint="check the paths of the mount",
        )
    if "chdir" in said or "working dir" in said:
        return UsageError(
            "workdir-not-found",
            f"the image has no such directory to work in: {said.strip()}",
            hint="choose another workdir",
        )
    return ToolError(
        "command-not-started",
        f"docker did not start the container: {said.strip()}",
        hint="run docker info for details",
    )


OUTPUT_LIMIT = 16 << 20
"""Bytes kept of each stream; a stranger's image may print without end."""
MOST_PROCESSES = 32768
SHARED_MEMORY = "50%"
"""Of the machine's memory: what a tmpfs has by itself. Docker's own 64 MB stop data loaders."""
KILLED = 128 + signal.SIGKILL
GRACE_SECONDS = 10
"""What a command gets to end by itself when its runner is told to: as long as `docker stop` gives."""
OUTPUT_SECONDS = 30
"""After a command has ended, for what it printed to arrive."""
KILL_AGAIN = 0.5
"""Seconds after which a container whose time is over is killed again, if docker's command still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    """A container to make, in plain values. `devices` are CDI names; without any, `pool` asks for all.

    `amd` are AMD's GPUs of this machine, where it has some and they are asked for.
    """

    argv: tuple[str, ...]
    environment: tuple[str, ...]
    workdir: str
    user: str
    network: str
    read_only: bool
    tmpfs: tuple[tuple[str, str], ...]
    mounts: tuple[Mount, ...]
    gpus: bool
    devices: tuple[str, ...]
    tty: bool
    interactive: bool
    limits: tuple[tuple[str, int | None], ...]
    amd: AmdGpus | None = None


def plan(
    spec: RunSpec,
    *,
    devices: tuple[str, ...] = (),
    tty: bool = False,
    amd: AmdGpus | None = None,
    nvidia: bool = True,
) -> ContainerPlan:
    """Decides a container. `nvidia`: this machine has, beside `amd`, NVIDIA's GPUs. Raises UsageError for a
    spec that cannot be."""
    check_spec(spec)
    check_limits_supported(spec, "docker", ("scratch",))
    tmpfs = [("/dev/shm", f"rw,nosuid,nodev,exec,mode=1777,size={SHARED_MEMORY}")]  # noqa: S108
    if spec.read_only:
        tmpfs.append(("/tmp", "rw,nosuid,nodev,exec,mode=1777"))  # noqa: S108 - inside the container
    terminal = [("TERM", "xterm")] if tty and "TERM" not in dict(spec.environment) else []
    return ContainerPlan(
        argv=spec.argv,
        environment=tuple(f"{name}={value}" for name, value in (*terminal, *spec.environment)),
        workdir=spec.workdir,
        user=f"{spec.uid}:{spec.uid}",
        network="host" if spec.network else "none",
        read_only=spec.read_only,
        tmpfs=tuple(tmpfs),
        mounts=planned_mounts(spec),
        gpus=spec.gpus and (nvidia or amd is None),
        devices=devices if spec.gpus else (),
        tty=tty,
        interactive=not spec.capture,
        limits=spec.limits,
        amd=amd if spec.gpus else None,
    )


def make_runner(ground: RunnerSupport) -> DockerRunner:
    return DockerRunner(ground.layout, DockerDaemon(ground.environ), progress=ground.progress)


class DockerRunner:
    """Runs images of `layout` in containers of `daemon`, which gets those it lacks.

    `devices` are CDI names (`nvidia.com/gpu=all`) for machines whose docker knows GPUs by CDI alone;
    without them a run with GPUs asks for all of them as `docker run --gpus all` does.
    """

    unpacked = None

    def __init__(
        self, layout: Layout, daemon: DockerDaemon, *, progress: Progress = QUIET, devices: Sequence[str] = ()
    ) -> None:
        self.layout, self.daemon = layout, daemon
        self.progress, self.devices = progress, tuple(devices)

    def prepare(self, made: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:  # noqa: ARG002
        """The same image, which the daemon has then."""
        if isinstance(made, Image):
            self.daemon.ensure(self.layout, made, run_name(made), self.progress)
        return made

    def require(self) -> str:
        """`docker 26.1.5`, or podman's name and version where that answers."""
        facts = self.daemon.facts()
        return f"{'podman' if facts.podman else 'docker'} {facts.version.partition('+')[0]}"

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        """Runs `spec.argv` in `image`. 127 and 126 mean, as for shells, not found and not executable.

        Not captured and on a terminal, the command is interactive. Of captured output the first 16 MiB
        of each stream are kept. Raises UsageError, ToolError or StoreError when it was never started.
        """
        if isinstance(image, SifArtifact):
            raise ToolError(
                "sif-needs-apptainer",
                f"docker cannot run {image.name}, a .sif file",
                hint="use --runner apptainer",
            )
        tty = not spec.capture and os.isatty(0) and os.isatty(1)
        amd = find_amd_gpus() if spec.gpus else None
        nvidia = count_gpus(find_device_nodes(Path("/dev"))) > 0
        decided = plan(spec, devices=self.devices, tty=tty, amd=amd, nvidia=nvidia)
        if spec.gpus and self.daemon.facts().podman:
            raise ToolError(
                "podman-ignores-gpus",
                f"podman answers at {self.daemon.place}, and it ignores the request for "
                "GPUs: the command would silently run without one",
                hint="set DOCKER_HOST to a dockerd, or use --runner unshare or --runner apptainer",
            )
        if not spec.capture and shutil.which("docker", path=self.daemon.environ.get("PATH")) is None:
            raise ToolError(
                "tool-missing", "the docker command is not installed", hint="apt-get install docker-cli"
            )
        self._sweep()
        name = self.daemon.ensure(self.layout, image, run_name(image), self.progress)
        with self._made(name, decided) as made:
            return self._captured(made, spec) if spec.capture else self._attached(made, spec)

    # --- one container ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _made(self, image: str, decided: ContainerPlan) -> Iterator[Container]:
        name = f"imagefactory-{secrets.token_hex(8)}"  # ours, as a signal may come before the daemon's answer
        try:
            with self.daemon.speaking():
                import docker

                try:
                    made = self.daemon.client.containers.create(
                        image, name=name, **arguments(decided, this_process())
                    )
                except docker.errors.APIError as error:
                    raise explain(str(error.explanation or error)) from error
            yield made
        finally:
            with contextlib.suppress(ToolError), self.daemon.speaking():
                self.daemon.client.api.remove_container(name, force=True, v=True)

    def _captured(self, made: Container, spec: RunSpec) -> CommandResult:
        kept = _BoundedOutput()
        with self.daemon.speaking():
            frames = made.attach(stdout=True, stderr=True, stream=True, demux=True)
        reader = threading.Thread(target=kept.take, args=(frames,), daemon=True)
        reader.start()
        began = time.monotonic()
        refused = self._start(made)
        if refused is not None:
            return refused
        code, timed_out = self._wait(made, spec.timeout)
        seconds = time.monotonic() - began
        reader.join(timeout=OUTPUT_SECONDS)
        if reader.is_alive():
            raise ToolError(
                "output-lost",
                f"docker did not deliver the end of a command's output in {OUTPUT_SECONDS} s",
                hint="run it again; if it happens again, restart the daemon",
            )
        return CommandResult(
            returncode=code,
            stdout=kept.text("stdout"),
            stderr=kept.text("stderr"),
            seconds=seconds,
            timed_out=timed_out,
        )

    def _start(self, made: Container) -> CommandResult | None:
        """Starts it; a command that the image does not have is a result, as it is for a shell."""
        import docker

        with self.daemon.speaking():
            try:
                made.start()
            except docker.errors.APIError as error:
                return not_started(str(error.explanation or error))
        return None

    def _wait(self, made: Container, timeout: float | None) -> tuple[int, bool]:
        """(exit code, whether it was stopped because its time was over)."""
        import requests

        with self.daemon.speaking():
            try:
                return int(made.wait(timeout=timeout)["StatusCode"]), False
            except (requests.exceptions.Timeout, requests.exceptions.ConnectionError) as error:
                # urllib3's time-out of a socket's read comes as either; anything else is the daemon's end.
                if timeout is None or "timed out" not in str(error):
                    raise
            self._kill(made)
            return int(made.wait(timeout=60)["StatusCode"]) or KILLED, True

    def _kill(self, made: Container) -> None:
        import docker

        with contextlib.suppress(docker.errors.APIError):  # it has ended by itself meanwhile
            made.kill()

    def _attached(self, made: Container, spec: RunSpec) -> CommandResult:
        command = ["docker", "start", "--attach", "--interactive", made.id]
        began, timed_out = time.monotonic(), False
        with _signals_to_command():
            process = subprocess.Popen(command, env=self.daemon.environ, stderr=None)
            try:
                process.wait(timeout=spec.timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                self._end_attached(made, process)
            except BaseException:
                _end(process)
                raise
        seconds = time.monotonic() - began
        with self.daemon.speaking():
            made.reload()
        state = made.attrs["State"]
        if state.get("Status") == "created":  # docker has already said on stderr why
            refused = not_started(str(state.get("Error") or "docker did not start it"))
            return CommandResult(returncode=refused.returncode, stdout="", stderr="", seconds=seconds)
        if state.get("Running"):  # docker's client was killed, lost its connection or was told to detach
            raise ToolError(
                "docker-client-ended",
                f"the docker command ended ({process.returncode}) before the "
                "container: the container was stopped",
                hint="run it again; to run without a terminal, use docker run --detach",
            )
        code = int(state.get("ExitCode") or 0)
        return CommandResult(returncode=code, stdout="", stderr="", seconds=seconds, timed_out=timed_out)

    def _end_attached(self, made: Container, process: subprocess.Popen[bytes]) -> None:
        """Kills the container until docker's command ends, which may be slow and start it only then."""
        while process.poll() is None:
            with self.daemon.speaking():
                self._kill(made)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_AGAIN)

    def _sweep(self) -> None:
        """Removes the containers of runners on this machine that were killed before they could."""
        with self.daemon.speaking():
            import docker

            for left in self.daemon.client.containers.list(
                all=True, filters={"label": OWNER}, ignore_removed=True
            ):
                if not is_alive(left.labels.get(OWNER, ""), boot_id()):
                    with contextlib.suppress(docker.errors.APIError):  # another runner was first
                        left.remove(force=True, v=True)


def arguments(decided: ContainerPlan, owner: str) -> dict[str, Any]:
    """What the SDK's `containers.create` takes."""
    from docker.types import DeviceRequest, LogConfig, Ulimit
    from docker.types import Mount as Bind

    limits = dict(decided.limits)
    requests = []
    if decided.devices:
        requests = [DeviceRequest(driver="cdi", device_ids=list(decided.devices))]
    elif decided.gpus:
        requests = [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    return {
        "entrypoint": list(decided.argv),  # no `command`: an entrypoint alone drops the image's CMD too
        "environment": list(decided.environment),
        "working_dir": decided.workdir,
        "user": decided.user,
        "network_mode": decided.network,
        "read_only": decided.read_only,
        "tmpfs": dict(decided.tmpfs),
        "mounts": [
            Bind(target=mount.target, source=str(mount.source), type="bind", read_only=not mount.writable)
            for mount in decided.mounts
        ],
        "device_requests": requests or None,
        "devices": [f"{path}:{path}:rwm" for path in decided.amd.devices] if decided.amd else None,
        "group_add": list(decided.amd.groups) if decided.amd else None,
        "tty": decided.tty,
        "stdin_open": decided.interactive,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": limits.get("processes", MOST_PROCESSES) or -1,
        "mem_limit": limits.get("memory"),
        "ulimits": [Ulimit(name="nofile", soft=most, hard=most) for most in [limits.get("files")] if most],
        "ipc_mode": "private",
        "log_config": LogConfig(type="none"),  # a copy of all output on the daemon's disk
        "use_config_proxy": False,  # nothing of the host's environment
        "init": True,  # as process 1 itself, a command would not be ended by its own signals
        "labels": {OWNER: owner},
        "hostname": "imagefactory" if decided.network == "none" else None,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends `docker start`, which passes the signal on to the command.

    A command that does not mind it, or that was not yet there to get it, goes with its container.
    """
    process.terminate()
    try:
        process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _BoundedOutput:
    """Output as it comes, up to a limit; the rest is read and dropped, so that the command goes on."""

    def __init__(self) -> None:
        self._data = {"stdout": bytearray(), "stderr": bytearray()}
        self._cut: set[str] = set()

    def take(self, frames: Iterator[tuple[bytes | None, bytes | None]]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the connection goes with the container
            for pair in frames:
                for name, data in zip(("stdout", "stderr"), pair, strict=True):
                    room = OUTPUT_LIMIT - len(self._data[name])
                    self._data[name] += (data or b"")[:room]
                    if len(data or b"") > room:
                        self._cut.add(name)

    def text(self, name: str) -> str:
        text = self._data[name].decode(errors="replace")
        return f"{text}\n[cut after {OUTPUT_LIMIT} bytes]\n" if name in self._cut else text


@contextlib.contextmanager
def _signals_to_command() -> Iterator[None]:
    """Ctrl-C is for the command, which decides what it means."""
    try:
        before = signal.signal(signal.SIGINT, lambda *_: None)
    except ValueError:  # not the main thread, where no signal arrives anyway
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
