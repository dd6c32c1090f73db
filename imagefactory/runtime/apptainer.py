"""The runner that starts images with apptainer, as an access point or a batch system would.

It uses subprocess, not spython's `execute`, so that a process ends at its time limit and streams are
separate. apptainer passes its descriptors on to the image, so a command that is not captured gets those of
`sandbox/terminals.py`.

The command sees only `spec.mounts` of the host's files (and apptainer's own /etc/hosts, resolv.conf, passwd
and group), and nothing of its environment (apptainer adds variables with the name of the .sif). It has no
capability in any set, and no_new_privs. The root file system is read-only. Without `read_only` changes go to
memory (`--writable-tmpfs`, whose size the machine's apptainer.conf sets). Without `network` it has its own
network with only loopback.

Root becomes `spec.uid` by apptainer's `--security`. An ordinary user keeps its id, or gets any other id,
also 0, by a user namespace of util-linux' `unshare` (apptainer's `--fakeroot` would load its own library
into every program).

`--nv` binds all NVIDIA GPUs, of which CUDA_VISIBLE_DEVICES inside selects some. With `use
nvidia-container-cli = yes` in apptainer.conf, apptainer itself needs NVIDIA_VISIBLE_DEVICES: without it no
GPU comes in.

From outside, a command that never started looks like a command that ends with 255. So a shell in the image
writes to a file of the runner, in memory, right before it becomes the command. That also gives 127 and 126
their meaning.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from imagefactory.errors import ImagefactoryError, ToolError, UsageError
from imagefactory.fs import temporary_directory
from imagefactory.gpu.forward import FIRST, LOOK, LOOK_SECONDS, read_look
from imagefactory.model import CommandResult, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.runtime.apptainer_command import ApptainerCommand, clean, mount_option
from imagefactory.runtime.devices import GpuDevices, check_glibc, find_gpus
from imagefactory.runtime.protocol import (
    GRACE_SECONDS,
    RunnerSupport,
    check_limits_supported,
    check_spec,
    planned_mounts,
    read_output,
    signals_to_command,
)
from imagefactory.runtime.sandbox.terminals import END_NOW, descendants
from imagefactory.runtime.unshare import SANDBOX, unrecorded_bytes

EnsureSif = Callable[[Image], SifArtifact]
HOMES = ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR")
NO_NETWORK = ("--net", "--network", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """The caller's ids, the path of util-linux' `unshare` (or empty), and options for this machine's GPUs.

    `forward` is the directory of the image's libcuda if programs must use it, empty for the machine's own.
    """

    uid: int
    gid: int
    unshare: str
    gpus: tuple[str, ...] = ("--nv",)
    forward: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApptainerInvocation:
    """The command line of apptainer, and variables besides the caller's own."""

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


def plan(
    program: str, sif: str, spec: RunSpec, caller: CallerIdentity, *, started: int
) -> ApptainerInvocation:
    """Return the command line. The shell in the image writes to the descriptor `started`.

    Raises UsageError for an invalid spec, ToolError for a user that is not possible on this machine.
    """
    check_spec(spec)
    check_limits_supported(spec, "apptainer", ("files", "scratch"))
    options = ["--containall", "--cleanenv", "--no-home", "--no-eval", "--pwd", spec.workdir]
    before: list[str] = []
    if caller.uid == 0:
        options.append("--no-privs")
        if spec.uid:
            options += ["--security", f"uid:{spec.uid}", "--security", f"gid:{spec.uid}"]
    elif spec.uid != caller.uid:
        if not caller.unshare:
            raise ToolError(
                "tool-missing",
                f"`unshare` is not installed, and running as user {spec.uid} needs it",
                hint=f"apt-get install util-linux, or use your own id: --user {caller.uid}",
            )
        before = [caller.unshare, "--user", f"--map-user={spec.uid}", f"--map-group={spec.uid}"]
        options += ["--userns", *(["--no-privs"] if spec.uid == 0 else [])]
    if not spec.read_only:
        options.append("--writable-tmpfs")
    if not spec.network:
        if before:
            before.append("--net")
        else:
            options += NO_NETWORK
    if spec.gpus:
        options += caller.gpus
    gpus = ",".join(uuid for _, uuid, _ in spec.selected_gpus) or "all"
    for name, flag in (("processes", "--pids-limit"), ("memory", "--memory")):
        if amount := dict(spec.limits).get(name):
            options += [flag, str(amount)]
    for mount in planned_mounts(spec):
        options += ["--mount", mount_option(mount.source, mount.target, writable=mount.writable)]
    script = FIRST if caller.forward else 'exec "$@"'
    shell = ("/bin/sh", "-c", f"echo >/dev/fd/{started}; {script}", caller.forward or "sh", *spec.argv)
    return ApptainerInvocation(
        argv=(*before, program, "--silent", "exec", *options, sif, *shell),
        # Not --env, which splits values at commas.
        environment=(
            *((f"APPTAINERENV_{name}", value) for name, value in spec.environment),
            *((("NVIDIA_VISIBLE_DEVICES", gpus),) if spec.gpus else ()),
        ),
    )


def gpu_options(devices: GpuDevices) -> tuple[str, ...]:
    """Return the options for GPUs; --rocm binds /dev/kfd, /dev/dri and the machine's ROCm libraries."""
    return (*(["--nv"] if devices.nvidia else []), *(["--rocm"] if devices.amd else []))


def make_runner(support: RunnerSupport) -> ApptainerRunner:
    return ApptainerRunner(ApptainerCommand(support.environ), support.ensure_sif)


class ApptainerRunner:
    """Runs commands in .sif files. `ensure_sif` returns the cached .sif of a stored image."""

    unpacked = None

    def __init__(self, command: ApptainerCommand, ensure_sif: EnsureSif) -> None:
        self.command, self.ensure_sif = command, ensure_sif
        self._running: set[subprocess.Popen[bytes]] = set()

    def stop(self) -> None:
        for process in tuple(self._running):
            _end(process)

    def prepare(self, image: Image | SifArtifact, *, checked: bool) -> SifArtifact:  # noqa: ARG002
        """Return the .sif of an image."""
        return self.ensure_sif(image) if isinstance(image, Image) else image

    def require(self) -> str:
        """Return `apptainer 1.4.5`. Raises ToolError if it is missing, too old or does not work."""
        return f"apptainer {self.command.require(building=False)}"

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        """Run as `Runner.run`. Raises ToolError for `gpus` without a GPU, which apptainer would ignore."""
        check_spec(spec)
        planned_mounts(spec)
        devices = find_gpus() if spec.gpus else None
        sif = self.prepare(image, checked=False)
        if devices:
            check_glibc(devices.libraries, spec, lambda probe: self.run(sif, probe))
        caller = CallerIdentity(
            uid=os.geteuid(),
            gid=os.getegid(),
            unshare=shutil.which("unshare", path=self.command.search) or "",
            gpus=gpu_options(devices) if devices else (),
            forward=self._choose_libcuda(str(sif.path), devices) if devices and devices.nvidia else "",
        )
        started, lost = os.memfd_create("started"), os.memfd_create("lost")
        try:
            invocation = plan(self.command.find(), str(sif.path), spec, caller, started=started)
            return self._run(invocation, spec, started, lost)
        finally:
            os.close(started)
            os.close(lost)

    def _choose_libcuda(self, sif: str, devices: GpuDevices) -> str:
        """Return the directory of the image's libcuda if NVIDIA's hook would choose it, since apptainer has
        none.
        """
        options = ["--containall", "--cleanenv", "--no-home", "--no-eval", *NO_NETWORK]
        options += ["--no-privs"] * (os.geteuid() == 0)
        argv = (self.command.find(), "--silent", "exec", *options, sif, "/bin/sh", "-c", LOOK)
        with temporary_directory("imagefactory-apptainer-") as home:
            environment = self.command.environment({name: str(home) for name in HOMES})
            process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            stdout, _, _ = _collect(process, LOOK_SECONDS, relayed=False)
        return read_look(stdout.encode(), devices.driver, devices.models)

    def _run(self, invocation: ApptainerInvocation, spec: RunSpec, started: int, lost: int) -> CommandResult:
        # apptainer needs a home for settings: an empty one.
        with temporary_directory("imagefactory-apptainer-") as home:
            private_homes = {name: str(home) for name in HOMES}
            extra = {**dict(invocation.environment), **private_homes}
            pipe = subprocess.PIPE if spec.capture else None
            relay = (sys.executable, "-I", "-S", str(SANDBOX), "relay", str(lost), str(started))
            begun = time.monotonic()
            try:
                process = subprocess.Popen(
                    invocation.argv if spec.capture else (*relay, *invocation.argv),
                    env=self.command.environment(extra),
                    stdin=subprocess.DEVNULL if spec.capture else None,
                    stdout=pipe,
                    stderr=pipe,
                    pass_fds=(started,) if spec.capture else (started, lost),
                    start_new_session=spec.capture,  # interactive, it needs the terminal's own session
                )
            except OSError as error:
                raise ToolError(
                    "tool-not-started",
                    f"cannot start {invocation.argv[0]}: {error}",
                    hint="run imagefactory doctor, or use --runner unshare",
                ) from error
            self._running.add(process)
            try:
                with signals_to_command(interactive=not spec.capture):
                    stdout, stderr, timed_out = _collect(process, spec.timeout, relayed=not spec.capture)
            finally:
                self._running.discard(process)
        code = process.returncode
        if reason := os.pread(lost, 1000, 0).decode():
            raise unrecorded_bytes(reason)
        if os.fstat(started).st_size == 0 and not timed_out:
            raise explain(stderr, code, spec)
        return CommandResult(
            returncode=code if code >= 0 else 128 - code,
            stdout=stdout,
            stderr=stderr,
            seconds=round(time.monotonic() - begun, 3),
            timed_out=timed_out,
        )


def explain(stderr: str, code: int, spec: RunSpec) -> ImagefactoryError:
    """Return the error for a command that never started, from apptainer's message."""
    lines = [clean(line) for line in stderr.splitlines() if "FATAL" in line or "ERROR" in line]
    reason = lines[-1].split(":", 1)[-1].strip() if lines else f"apptainer ended with {code}"
    if "failed to set working directory" in reason:
        return UsageError(
            "workdir-not-found",
            f"the image has no directory {spec.workdir}",
            hint="pass --workdir with a directory of the image",
        )
    if "mount source" in reason:
        return UsageError(
            "mount-failed",
            f"cannot mount a path inside the image: {reason}",
            hint="check the paths of --mount",
        )
    if "/bin/sh" in reason:
        return ToolError(
            "image-has-no-shell",
            "the image has no /bin/sh, which the apptainer runner needs",
            hint="use --runner unshare",
        )
    return ToolError(
        "command-not-started",
        f"apptainer could not start the command: {reason}",
        hint="use --runner unshare, or run apptainer exec FILE.sif true for details",
    )


def _collect(
    process: subprocess.Popen[bytes], timeout: float | None, *, relayed: bool
) -> tuple[str, str, bool]:
    """Return both streams, and whether the time limit was reached. No process remains."""
    timed_out = False
    try:
        with read_output(process) as output:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                if relayed:  # it passes on the output until now
                    process.send_signal(END_NOW)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_SECONDS)
                _end(process)
    finally:
        _end(process)
    return output.text("stdout"), output.text("stderr"), timed_out


def _end(process: subprocess.Popen[bytes]) -> None:
    """End apptainer and all its child processes, which could otherwise outlive apptainer."""
    if process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
