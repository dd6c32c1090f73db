"""The runner for machines with docker: an image's command in a container of the daemon.

A container has what the unshare runner provides, as far as docker can: no capability, no new privileges,
docker's own seccomp filter, its own namespaces, an empty network (with `network` the host's), no variable of
the host. With `read_only` only /tmp, /dev/shm and writable mounts are writable. The container is deleted at
the end, with every change.

Captured output is read through the SDK. `docker start --attach --interactive` starts a command that is not
captured, because that program handles terminals, their size and their signals.
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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagefactory.errors import ImagefactoryError, ToolError, UsageError
from imagefactory.model import CommandResult, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.progress import QUIET, Progress
from imagefactory.runtime.devices import (
    CDI_FAILURE,
    AmdGpus,
    check_glibc,
    check_selinux,
    count_gpus,
    current_cdi_names,
    find_amd_gpus,
    find_device_nodes,
)
from imagefactory.runtime.docker_daemon import DockerDaemon, run_name
from imagefactory.runtime.hardware import MAKE_CDI, CdiDevices, driver_libraries, read_cdi, read_driver
from imagefactory.runtime.protocol import (
    GRACE_SECONDS,
    BoundedOutput,
    RunnerSupport,
    check_limits_supported,
    check_spec,
    planned_mounts,
    reject_sif,
    signals_to_command,
)

if TYPE_CHECKING:
    from docker.models.containers import Container

OWNER = "imagefactory.owner"
"""The label of our containers with their owner, to recognize the containers of a killed runner."""
MOST_PROCESSES = 32768
SHARED_MEMORY = "50%"
"""The size of /dev/shm, in percent of the memory. Docker's own 64 MB stop data loaders."""
KILLED = 128 + signal.SIGKILL
OUTPUT_SECONDS = 30
"""Seconds for output to arrive after the command has ended."""
KILL_AGAIN = 0.5
"""Seconds until a container after its time limit is killed again, if docker's command still runs."""
_NOT_FOUND = re.compile(r"executable file not found|no such file or directory", re.IGNORECASE)
_NOT_EXECUTABLE = re.compile(r"permission denied|exec format error|is a directory", re.IGNORECASE)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def this_process() -> str:
    """Return the label's value: this boot of the machine, and this process by id and start time."""
    return f"{boot_id()}/{os.getpid()}/{_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks since boot, empty without the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(owner: str, boot: str) -> bool:
    """Return whether a container's owner still runs. Unknown owners and other machines count as alive."""
    match = re.fullmatch(r"([0-9a-f-]{36})/(\d+)/(\d+)", owner)
    return not match or match[1] != boot or _start_time(int(match[2])) == match[3]


def not_started(message: str, *, cdi: bool = False) -> CommandResult:
    """Return a shell's code 127 or 126 if the command cannot start. Raises other errors of the daemon.

    `cdi` is set if the container has GPUs by CDI.
    """
    others = ("docker-init", "mount", "chdir", "nvidia", "cdi")
    if re.search(r"\bexec[: ]", message) and not any(word in message.lower() for word in others):
        for pattern, code in ((_NOT_FOUND, 127), (_NOT_EXECUTABLE, 126)):
            if pattern.search(message):
                return CommandResult(returncode=code, stdout="", stderr=f"{message.strip()}\n", seconds=0.0)
    raise explain(message, cdi=cdi)


def explain(message: str, *, cdi: bool = False) -> ImagefactoryError:
    """Return the error for a container that the daemon did not create or start."""
    text = message.strip()
    if "docker-init" in message:
        return ToolError(
            "tool-missing",
            "docker has no docker-init",
            hint="apt-get install tini, or install docker-ce from Docker",
        )
    if not cdi and ("could not select device driver" in message or "nvidia-container" in message):
        hint = "install nvidia-container-toolkit, then: nvidia-ctk runtime configure --runtime=docker"
        if read_cdi().names:
            hint = 'write {"features": {"cdi": true}} into /etc/docker/daemon.json (Docker 25 or newer)'
        return ToolError(
            "docker-gpu-unavailable",
            f"docker cannot pass a GPU to the container: {text}",
            hint=f"{hint}, then: systemctl restart docker",
        )
    if cdi and CDI_FAILURE.search(message):
        return ToolError(
            "docker-cdi-unavailable",
            f"docker cannot pass the GPUs to the container: {text}",
            hint=f"describe the GPUs, after each update of the driver too: {MAKE_CDI}",
        )
    if "bind source path does not exist" in message or "invalid mount" in message:
        return UsageError(
            "mount-failed", f"cannot mount a path inside the image: {text}", hint="check the paths of --mount"
        )
    if "chdir" in message or "working dir" in message:
        return UsageError(
            "workdir-not-found",
            f"the image does not have the workdir: {text}",
            hint="pass --workdir with a directory of the image",
        )
    return ToolError(
        "command-not-started",
        f"docker did not start the container: {text}",
        hint="run docker info for details",
    )


def check_request(spec: RunSpec) -> None:
    """Raise UsageError for a spec that docker cannot run."""
    check_spec(spec)
    check_limits_supported(spec, "docker", ("scratch",))
    planned_mounts(spec)


def arguments(
    spec: RunSpec,
    *,
    owner: str,
    names: tuple[str, ...] = (),
    tty: bool = False,
    amd: AmdGpus | None = None,
    nvidia: bool = True,
) -> dict[str, Any]:
    """Return the arguments for the SDK's `containers.create`.

    `names` are CDI's of the GPUs; without them, NVIDIA's runtime finds the GPUs. `nvidia` is true if this
    machine also has NVIDIA GPUs.
    """
    from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

    limits = dict(spec.limits)
    tmpfs = {"/dev/shm": f"rw,nosuid,nodev,exec,mode=1777,size={SHARED_MEMORY}"}  # noqa: S108
    if spec.read_only:
        tmpfs["/tmp"] = "rw,nosuid,nodev,exec,mode=1777"  # noqa: S108 - inside the container
    terminal = [("TERM", "xterm")] if tty and "TERM" not in dict(spec.environment) else []
    amd = amd if spec.gpus else None
    requests = None
    if spec.gpus and names:
        requests = [DeviceRequest(driver="cdi", device_ids=list(names))]
    elif spec.gpus and (nvidia or amd is None):
        uuids = [uuid for _, uuid, _ in spec.selected_gpus]
        gpus = {"device_ids": uuids} if uuids else {"count": -1}
        requests = [DeviceRequest(**gpus, capabilities=[["gpu"]])]
    return {
        "entrypoint": list(spec.argv),  # no `command`: a new entrypoint drops the image's CMD too
        "environment": [f"{name}={value}" for name, value in (*terminal, *spec.environment)],
        "working_dir": spec.workdir,
        "user": f"{spec.uid}:{spec.uid}",
        "network_mode": "host" if spec.network else "none",
        "read_only": spec.read_only,
        "tmpfs": tmpfs,
        "mounts": [
            Mount(target=mount.target, source=str(mount.source), type="bind", read_only=not mount.writable)
            for mount in planned_mounts(spec)
        ],
        "device_requests": requests,
        "devices": [f"{path}:{path}:rwm" for path in amd.devices] if amd else None,
        "group_add": list(amd.groups) if amd else None,
        "tty": tty,
        "stdin_open": not spec.capture,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": limits.get("processes", MOST_PROCESSES) or -1,
        "mem_limit": limits.get("memory"),
        "ulimits": [Ulimit(name="nofile", soft=most, hard=most) for most in [limits.get("files")] if most],
        "ipc_mode": "private",
        "log_config": LogConfig(type="none"),  # no copy of all output on the daemon's disk
        "use_config_proxy": False,  # nothing of the host's environment
        "init": True,  # as process 1 itself, a command would ignore its own signals
        "labels": {OWNER: owner},
        "hostname": None if spec.network else "imagefactory",
    }


def make_runner(support: RunnerSupport) -> DockerRunner:
    return DockerRunner(support.layout, DockerDaemon(support.environ), support.progress)


class DockerRunner:
    """Runs images of `layout` in containers of `daemon`, which gets the images that it lacks.

    GPUs come by CDI if the daemon has it (Docker 25 or newer) and a specification names GPUs, else by
    NVIDIA's runtime, like `docker run --gpus`.
    """

    unpacked = None

    def __init__(self, layout: Layout, daemon: DockerDaemon, progress: Progress = QUIET) -> None:
        self.layout, self.daemon, self.progress = layout, daemon, progress
        self._running: set[str] = set()

    def prepare(self, image: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:  # noqa: ARG002
        if isinstance(image, Image):
            self.daemon.ensure(self.layout, image, run_name(image), self.progress)
        return image

    def require(self) -> str:
        """Return `docker 26.1.5`, or podman's name and version if it answers."""
        facts = self.daemon.facts()
        return f"{'podman' if facts.podman else 'docker'} {facts.version.partition('+')[0]}"

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        if isinstance(image, SifArtifact):
            raise reject_sif(image, "docker")
        check_request(spec)
        if spec.gpus and self.daemon.facts().podman:
            raise ToolError(
                "podman-ignores-gpus",
                f"podman answers at {self.daemon.place}, and podman ignores the request for "
                "GPUs: the command would silently run without one",
                hint="use --runner podman, or set DOCKER_HOST to a dockerd",
            )
        if not spec.capture and shutil.which("docker", path=self.daemon.environ.get("PATH")) is None:
            raise ToolError(
                "tool-missing", "the docker command is not installed", hint="apt-get install docker-cli"
            )
        names: tuple[str, ...] = ()
        if spec.gpus:
            devices = self._read_cdi()
            names = current_cdi_names(spec.selected_gpus, devices, read_driver()) if devices.names else ()
            libraries = devices.libraries if names else driver_libraries()
            check_glibc(libraries, spec, lambda probe: self.run(image, probe))
        self._sweep()
        name = self.daemon.ensure(self.layout, image, run_name(image), self.progress)
        run = self._captured if spec.capture else self._attached
        with self._container(name, spec, names) as container:
            return run(container, spec, cdi=bool(names))

    def _read_cdi(self) -> CdiDevices:
        """Return the GPUs of the daemon's CDI specifications, none if it has no CDI."""
        facts = self.daemon.info()
        if "name=selinux" in (facts.get("SecurityOptions") or ()):
            check_selinux()
        return read_cdi(facts.get("CDISpecDirs") or ())

    @contextlib.contextmanager
    def _container(self, image: str, spec: RunSpec, names: tuple[str, ...]) -> Iterator[Container]:
        name = f"imagefactory-{secrets.token_hex(8)}"  # ours, as a signal may come before the daemon's answer
        self._running.add(name)
        try:
            with self.daemon.speaking():
                import docker

                options = arguments(
                    spec,
                    owner=this_process(),
                    names=names,
                    tty=not spec.capture and os.isatty(0) and os.isatty(1),
                    amd=find_amd_gpus() if spec.gpus else None,
                    nvidia=count_gpus(find_device_nodes(Path("/dev"))) > 0,
                )
                try:
                    container = self.daemon.client.containers.create(image, name=name, **options)
                except docker.errors.APIError as error:
                    raise explain(str(error.explanation or error), cdi=bool(names)) from error
            yield container
        finally:
            self._running.discard(name)
            self._remove(name)

    def stop(self) -> None:
        for name in tuple(self._running):
            self._remove(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(ToolError), self.daemon.speaking():
            self.daemon.client.api.remove_container(name, force=True, v=True)

    def _captured(self, container: Container, spec: RunSpec, *, cdi: bool) -> CommandResult:
        import docker

        output = BoundedOutput()
        with self.daemon.speaking():
            frames = container.attach(stdout=True, stderr=True, stream=True, demux=True)

        def read() -> None:
            with contextlib.suppress(OSError, ValueError):  # the connection ends with the container
                for pair in frames:
                    for name, data in zip(("stdout", "stderr"), pair, strict=True):
                        output.add(name, data or b"")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        began = time.monotonic()
        with self.daemon.speaking():
            try:
                container.start()
            except docker.errors.APIError as error:
                return not_started(str(error.explanation or error), cdi=cdi)
        code, timed_out = self._wait(container, spec.timeout)
        seconds = time.monotonic() - began
        reader.join(timeout=OUTPUT_SECONDS)
        if reader.is_alive():
            raise ToolError(
                "output-lost",
                f"docker did not deliver the end of a command's output in {OUTPUT_SECONDS} s",
                hint="run the same command again; if it fails again, restart the docker daemon",
            )
        return CommandResult(
            returncode=code,
            stdout=output.text("stdout"),
            stderr=output.text("stderr"),
            seconds=seconds,
            timed_out=timed_out,
        )

    def _wait(self, container: Container, timeout: float | None) -> tuple[int, bool]:
        """Return the exit code, and whether the time limit was reached."""
        import requests

        with self.daemon.speaking():
            try:
                return int(container.wait(timeout=timeout)["StatusCode"]), False
            except (requests.exceptions.Timeout, requests.exceptions.ConnectionError) as error:
                # urllib3's time-out of a socket's read comes as either; anything else is the daemon's end.
                if timeout is None or "timed out" not in str(error):
                    raise
            self._kill(container)
            return int(container.wait(timeout=60)["StatusCode"]) or KILLED, True

    def _kill(self, container: Container) -> None:
        import docker

        with contextlib.suppress(docker.errors.APIError):  # it has ended by itself meanwhile
            container.kill()

    def _attached(self, container: Container, spec: RunSpec, *, cdi: bool) -> CommandResult:
        command = ["docker", "start", "--attach", "--interactive", container.id]
        began, timed_out = time.monotonic(), False
        with signals_to_command(interactive=True):
            process = subprocess.Popen(command, env=self.daemon.environ, stderr=None)
            try:
                process.wait(timeout=spec.timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                # Docker's command may be slow, and start the container only then.
                while process.poll() is None:
                    with self.daemon.speaking():
                        self._kill(container)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=KILL_AGAIN)
            except BaseException:
                process.terminate()  # docker passes it on to the command, which may ignore it
                try:
                    process.wait(timeout=GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                raise
        seconds = time.monotonic() - began
        with self.daemon.speaking():
            container.reload()
        state = container.attrs["State"]
        code = int(state.get("ExitCode") or 0)
        if state.get("Status") == "created":  # docker has already printed why
            message = str(state.get("Error") or "docker did not start it")
            code = not_started(message, cdi=cdi).returncode
            timed_out = False
        elif state.get("Running"):  # docker's client was killed, disconnected or detached
            raise ToolError(
                "docker-client-ended",
                f"the docker command ended ({process.returncode}) before the "
                "container: the container was stopped",
                hint="run the same command again; to run without a terminal, use docker run --detach",
            )
        return CommandResult(returncode=code, stdout="", stderr="", seconds=seconds, timed_out=timed_out)

    def _sweep(self) -> None:
        """Delete the containers of runners on this machine that were killed."""
        with self.daemon.speaking():
            import docker

            containers = self.daemon.client.containers
            for container in containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
                if not is_alive(container.labels.get(OWNER, ""), boot_id()):
                    with contextlib.suppress(docker.errors.APIError):  # another runner was first
                        container.remove(force=True, v=True)
