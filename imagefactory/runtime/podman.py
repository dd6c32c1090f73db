"""The runner for machines with podman: an image's command in a container, by the podman command.

It needs no daemon and no root: the podman of an ordinary user maps the users of a container to those of
/etc/subuid. A container has what docker's runner gives it. GPUs come by CDI (podman 4.1 or newer): a
specification in /etc/cdi or /var/run/cdi names the devices and the driver's libraries.

Source: podman-create(1), podman-start(1), containers-mounts.conf(5); CDI specification 0.5.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagefactory.errors import ImagefactoryError, ToolError, UsageError
from imagefactory.model import CommandResult, RunSpec
from imagefactory.oci.archive import stream_docker
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.progress import Progress
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
from imagefactory.runtime.docker import (
    KILLED,
    MOST_PROCESSES,
    OWNER,
    SHARED_MEMORY,
    boot_id,
    is_alive,
    this_process,
)
from imagefactory.runtime.docker_daemon import run_name
from imagefactory.runtime.hardware import MAKE_CDI, read_cdi, read_driver
from imagefactory.runtime.protocol import (
    GRACE_SECONDS,
    RunnerSupport,
    check_limits_supported,
    check_spec,
    planned_mounts,
    read_output,
    reject_sif,
    signals_to_command,
)

OLDEST_WITH_CDI = (4, 1)
_INIT_FAILED = re.compile(
    r"ERROR \(catatonit:[0-9]+\): failed to exec pid1: (No such file|Permission|Exec|Is a)"
)
"""What podman's process 1 prints if it cannot start the command. It always exits with 1."""
_NOT_STARTED = frozenset({"created", "initialized", "configured"})


def create_command(
    image: str,
    spec: RunSpec,
    *,
    name: str,
    owner: str,
    tty: bool = False,
    gpus: Sequence[str] = (),
    limited: bool = True,
) -> list[str]:
    """Return the arguments of `podman create`. `gpus` are the options for GPUs.

    `limited` is false where podman of this user cannot limit processes: then only requested limits are set.
    """
    limits = dict(spec.limits)
    words = ["create", "--name", name, "--label", f"{OWNER}={owner}", "--pull", "never"]
    words += ["--user", f"{spec.uid}:{spec.uid}", "--workdir", spec.workdir]
    if tty:
        words.append("--tty")
        if "TERM" not in dict(spec.environment):
            words += ["--env", "TERM=xterm"]
    for key, value in spec.environment:
        words += ["--env", f"{key}={value}"]
    words += ["--http-proxy=false"]  # nothing of the host's environment
    words += ["--network", "host"] if spec.network else ["--network", "none", "--hostname", "imagefactory"]
    words += ["--tmpfs", f"/dev/shm:rw,nosuid,nodev,exec,mode=1777,size={SHARED_MEMORY}"]  # noqa: S108
    if spec.read_only:
        words += ["--read-only", "--read-only-tmpfs=false"]
        words += ["--tmpfs", "/tmp:rw,nosuid,nodev,exec,mode=1777"]  # noqa: S108 - inside the container
    for mount in planned_mounts(spec):
        values = ("type=bind", f"source={mount.source}", f"target={mount.target}")
        words += ["--mount", ",".join(map(_csv, (*values, *(() if mount.writable else ("readonly=true",)))))]
    words += ["--cap-drop", "all", "--security-opt", "no-new-privileges", "--ipc", "private"]
    words += ["--log-driver", "none", "--init"]  # as process 1 itself, a command would ignore its own signals
    if "processes" in limits or limited:
        words += ["--pids-limit", str(limits.get("processes", MOST_PROCESSES) or -1)]
    if memory := limits.get("memory"):
        words += ["--memory", str(memory)]
    # podman's own limits are larger than this user's, and not every root may raise them.
    files = limits.get("files") or _own_limit(resource.RLIMIT_NOFILE, "fs/nr_open")
    processes = _own_limit(resource.RLIMIT_NPROC, "kernel/pid_max")
    words += ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}"]
    words += [] if spec.capture else ["--interactive"]
    # A new entrypoint drops the image's CMD too.
    return [*words, *gpus, "--entrypoint", json.dumps(list(spec.argv)), image]


def gpu_options(names: Sequence[str], amd: AmdGpus | None, *, uid: int) -> tuple[str, ...]:
    """Return the options for GPUs: `names` of CDI, and all AMD GPUs.

    An ordinary user keeps the groups that own AMD's devices.
    """
    words = [word for name in names for word in ("--device", name)]
    if amd:
        words += [word for path in amd.devices for word in ("--device", path)]
        groups = map(str, amd.groups) if uid == 0 else ("keep-groups",) if amd.groups else ()
        words += [word for group in groups for word in ("--group-add", group)]
    return tuple(words)


def _own_limit(kind: int, kernel: str) -> int:
    """Return this user's hard limit, at most the kernel's: a file below /proc/sys."""
    largest, hard = int(Path("/proc/sys", kernel).read_text()), resource.getrlimit(kind)[1]
    return largest if hard == resource.RLIM_INFINITY else min(hard, largest)


def _csv(value: str) -> str:
    """Return a field of --mount, which podman reads as CSV."""
    return '"' + value.replace('"', '""') + '"' if re.search(r'[",\n\r]', value) else value


def explain(message: str, *, gpus: bool) -> ImagefactoryError:
    """Return the error for a container that podman did not create or start."""
    text = " ".join(message.split())[-600:]
    if gpus and CDI_FAILURE.search(message):
        return ToolError(
            "podman-cdi-unavailable",
            f"podman cannot pass the GPUs to the container: {text}",
            hint=f"describe the GPUs, after each update of the driver too: {MAKE_CDI}",
        )
    if "statfs" in message or "bind source path" in message:
        return UsageError(
            "mount-failed", f"cannot mount a path inside the image: {text}", hint="check the paths of --mount"
        )
    if "chdir" in message or "workdir" in message or "working directory" in message:
        return UsageError(
            "workdir-not-found",
            f"the image does not have the workdir: {text}",
            hint="pass --workdir with a directory of the image",
        )
    if "catatonit" in message or "init binary" in message:
        return ToolError("tool-missing", "podman has no catatonit", hint="apt-get install catatonit")
    if re.search("setup user|newuidmap|subuid", message):
        return ToolError(
            "podman-failed",
            f"podman cannot map the user of the container: {text}",
            hint="sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER, "
            "then podman system migrate",
        )
    return ToolError(
        "command-not-started", f"podman did not start the container: {text}", hint="run podman info"
    )


def make_runner(support: RunnerSupport) -> PodmanRunner:
    return PodmanRunner(support.layout, support.environ, support.progress)


class PodmanRunner:
    """Runs images of `layout` in containers of the caller's podman, which gets the images that it lacks."""

    unpacked = None

    def __init__(
        self,
        layout: Layout,
        environ: Mapping[str, str],
        progress: Progress,
        command: Sequence[str] = ("podman",),
    ) -> None:
        self.layout, self.environ, self.progress = layout, dict(environ), progress
        self.command = tuple(command)
        self._running: set[str] = set()

    def prepare(self, image: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:  # noqa: ARG002
        if isinstance(image, Image):
            self._ensure(image)
        return image

    def require(self) -> str:
        """Return `podman 4.3.1`. Raises ToolError if it is missing or does not work."""
        return f"podman {'.'.join(map(str, self._version()))}"

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        if isinstance(image, SifArtifact):
            raise reject_sif(image, "podman")
        check_spec(spec)
        check_limits_supported(spec, "podman", ("scratch",))
        gpus: tuple[str, ...] = ()
        if spec.gpus:
            if self._version() < OLDEST_WITH_CDI:
                raise ToolError(
                    "podman-too-old",
                    f"{self.require()} has no CDI, by which containers get GPUs",
                    hint="install podman 4.1 or newer, or use --runner apptainer",
                )
            check_selinux()
            amd = find_amd_gpus()
            nvidia = amd is None or count_gpus(find_device_nodes(Path("/dev"))) > 0
            devices = read_cdi()
            names = current_cdi_names(spec.selected_gpus, devices, read_driver()) if nvidia else ()
            gpus = gpu_options(names, amd, uid=os.geteuid())
            check_glibc(devices.libraries, spec, lambda probe: self.run(image, probe))
        self._sweep()
        known, name = self._ensure(image), f"imagefactory-{secrets.token_hex(8)}"
        created = create_command(
            known,
            spec,
            name=name,
            owner=this_process(),
            tty=not spec.capture and os.isatty(0) and os.isatty(1),
            gpus=gpus,
            limited=os.geteuid() == 0 or Path("/sys/fs/cgroup/cgroup.controllers").exists(),
        )
        self._running.add(name)
        try:
            for words in (created, ["init", name]):  # all that can fail before the command starts
                ended = self._call(*words)
                if ended.returncode:
                    raise explain(ended.stderr, gpus=spec.gpus)
            return self._started(name, spec)
        finally:
            self._running.discard(name)
            self._call("rm", "--force", "--volumes", name)

    def stop(self) -> None:
        for name in tuple(self._running):
            self._call("kill", name)

    def _started(self, name: str, spec: RunSpec) -> CommandResult:
        pipe, began, timed_out = subprocess.PIPE if spec.capture else None, time.monotonic(), False
        words = ("start", "--attach", *(() if spec.capture else ("--interactive",)), name)
        with signals_to_command(interactive=not spec.capture):
            process = subprocess.Popen(
                (*self.command, *words),
                env=self.environ,
                stdin=subprocess.DEVNULL if spec.capture else None,
                stdout=pipe,
                stderr=pipe,
            )
            with read_output(process) as output:
                try:
                    process.wait(spec.timeout)
                except subprocess.TimeoutExpired:
                    timed_out = True
                    while process.poll() is None:  # podman may be slow, and start the container only then
                        self._call("kill", name)
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(1)
                finally:
                    if process.poll() is None:
                        process.terminate()  # podman passes it on to the command, which may ignore it
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(GRACE_SECONDS)
                        process.kill()
                        process.wait()
        seconds = time.monotonic() - began
        state = json.loads(self._answer("container", "inspect", "--format", "{{json .State}}", name))
        stderr = output.text("stderr")
        if not timed_out and state["Status"] in _NOT_STARTED:
            raise explain(stderr or str(state.get("Error") or ""), gpus=spec.gpus)
        if state["Status"] == "running":
            raise ToolError(
                "podman-ended",
                f"the podman command ended ({process.returncode}) before the container: it was stopped",
                hint="run the same command again",
            )
        code = int(state["ExitCode"])
        if code == 1 and (failed := _INIT_FAILED.match(stderr)):
            code = 127 if "No such file" in failed[1] else 126
        return CommandResult(
            returncode=code or (KILLED if timed_out else 0),
            stdout=output.text("stdout"),
            stderr=stderr,
            seconds=round(seconds, 3),
            timed_out=timed_out,
        )

    def _ensure(self, image: Image) -> str:
        """Return podman's id of an image, loaded if it is missing."""
        name = run_name(image)
        if known := self._find(image, name):
            return known
        with self.progress.task(f"load {image.name} into podman", total=image.size) as task:
            process = subprocess.Popen(
                (*self.command, "load", "--quiet"),
                env=self.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            with read_output(process) as output:
                assert process.stdin
                try:
                    with contextlib.suppress(BrokenPipeError), process.stdin:  # podman says why
                        for chunk in stream_docker(self.layout, image, name):
                            process.stdin.write(chunk)
                            task.advance(len(chunk))
                    process.wait()
                finally:
                    if process.poll() is None:  # half an image is none
                        process.kill()
                        process.wait()
        known = self._find(image, name) if process.returncode == 0 else ""
        if not known:
            raise ToolError(
                "podman-load-failed",
                f"podman did not load {image.name}: {' '.join(output.text('stderr').split())[-600:]}",
                hint="check the free space of podman: podman system df",
            )
        return known

    def _find(self, image: Image, name: str) -> str:
        """Return the id of `image`, by its config or as `name`; empty if podman does not have its layers."""
        for key in (image.config.removeprefix("sha256:"), name):
            ended = self._call("image", "inspect", key)
            for row in json.loads(ended.stdout) if ended.returncode == 0 else ():
                if row["RootFS"].get("Layers") == [layer.diff_id for layer in image.layers]:
                    return str(row["Id"])
        return ""

    def _sweep(self) -> None:
        """Delete the containers of runners on this machine that were killed."""
        listed = self._answer("ps", "--all", "--filter", f"label={OWNER}", "--format", "json")
        rows: list[dict[str, Any]] = json.loads(listed or "[]") or []
        for row in rows:
            if not is_alive((row.get("Labels") or {}).get(OWNER, ""), boot_id()):
                self._call("rm", "--force", "--volumes", row["Id"])

    def _version(self) -> tuple[int, ...]:
        text = self._answer("version", "--format", "{{.Client.Version}}")
        return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

    def _answer(self, *words: str) -> str:
        ended = self._call(*words)
        if ended.returncode:
            raise ToolError(
                "podman-failed",
                f"podman {words[0]}: {' '.join(ended.stderr.split())[-600:]}",
                hint="run podman info; an ordinary user needs lines in /etc/subuid and /etc/subgid",
            )
        return ended.stdout

    def _call(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                (*self.command, *words),
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise ToolError(
                "tool-missing", "the podman command is not installed", hint="apt-get install podman"
            ) from error
