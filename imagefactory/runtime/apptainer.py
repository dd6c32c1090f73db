"""The runner that starts images with apptainer, as an access point or a batch system would.

Through subprocess and not through spython's `execute`: a command has a time limit, so there must be a
process to end, and its two streams stay apart. apptainer hands its descriptors on to the image, so a command
that is not captured gets those of `sandbox/terminals.py`.

What holds inside: of the host's files only `spec.mounts` (and apptainer's own /etc/hosts, resolv.conf,
passwd and group), of its environment nothing (apptainer adds variables that name the .sif), no capability
in any set, no_new_privs. The root file
system is read-only by nature; without `read_only` changes go to memory (`--writable-tmpfs`, whose size
the machine's apptainer.conf sets). Without `network` there is a network of its own with loopback only.

Who one is inside: root becomes `spec.uid` by apptainer's `--security`; an ordinary user is himself, or any
other number, 0 too, by a user namespace of util-linux' `unshare` (apptainer's `--fakeroot` would put a
library of its own before every program).

A command that was never started and one that ends with 255 look alike from outside. So a shell in the
image writes to a file of ours, in memory, right before it becomes the command, which also gives 127
and 126 their meaning.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from imagefactory.errors import ImagefactoryError, ToolError, UsageError
from imagefactory.fs import temporary_directory
from imagefactory.model import CommandResult, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.runtime.apptainer_command import ApptainerCommand, clean, mount_option
from imagefactory.runtime.devices import GpuDevices, find_gpus
from imagefactory.runtime.limits import check_limits_supported
from imagefactory.runtime.protocol import RunnerSupport, check_spec, planned_mounts
from imagefactory.runtime.sandbox.terminals import END_NOW, descendants
from imagefactory.runtime.unshare import SANDBOX, signals_to_command, unrecorded_bytes

OUTPUT_LIMIT = 16 << 20  # bytes kept of each stream; a stranger's image may print without end
GRACE_SECONDS = 10.0

EnsureSif = Callable[[Image], SifArtifact]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """Who asks: the effective ids, and where util-linux' `unshare` is (empty: nowhere).

    `pool` are the options for the GPUs of this machine, by their makers.
    """

    uid: int
    gid: int
    unshare: str
    gpus: tuple[str, ...] = ("--nv",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApptainerInvocation:
    """How apptainer is started: the whole command line, and variables beside the caller's own."""

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


def plan(
    program: str, sif: str, spec: RunSpec, caller: CallerIdentity, *, started: int
) -> ApptainerInvocation:
    """Decides the command line. Pure. `started` is the descriptor the shell inside writes to.

    Raises UsageError for a spec that cannot be, ToolError for a user that cannot be had here.
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
                f"`unshare` is not installed, and user {spec.uid} inside needs it",
                hint=f"apt-get install util-linux, or use --user {caller.uid} (you)",
            )
        before = [caller.unshare, "--user", f"--map-user={spec.uid}", f"--map-group={spec.uid}"]
        options += ["--userns", *(["--no-privs"] if spec.uid == 0 else [])]
    if not spec.read_only:
        options.append("--writable-tmpfs")
    if not spec.network:
        if before:
            before.append("--net")
        else:
            options += ["--net", "--network", "none"]
    if spec.gpus:
        options += caller.gpus
    for name, flag in (("processes", "--pids-limit"), ("memory", "--memory")):
        if amount := dict(spec.limits).get(name):
            options += [flag, str(amount)]
    for mount in planned_mounts(spec):
        options += ["--mount", mount_option(mount.source, mount.target, writable=mount.writable)]
    shell = ("/bin/sh", "-c", f'echo >/dev/fd/{started}; exec "$@"', "sh", *spec.argv)
    return ApptainerInvocation(
        argv=(*before, program, "--silent", "exec", *options, sif, *shell),
        # Not --env, which splits values at commas.
        environment=tuple((f"APPTAINERENV_{name}", value) for name, value in spec.environment),
    )


def gpu_options(found: GpuDevices) -> tuple[str, ...]:
    """What apptainer is told of GPUs; --rocm binds /dev/kfd, /dev/dri and the machine's ROCm libraries."""
    return (*(["--nv"] if found.nvidia else []), *(["--rocm"] if found.amd else []))


def make_runner(ground: RunnerSupport) -> ApptainerRunner:
    return ApptainerRunner(ApptainerCommand(ground.environ), ground.ensure_sif)


class ApptainerRunner:
    """Runs commands in .sif files; `ensure_sif` gives the kept .sif of an image of the store."""

    unpacked = None

    def __init__(self, command: ApptainerCommand, ensure_sif: EnsureSif) -> None:
        self.command, self.ensure_sif = command, ensure_sif

    def prepare(self, made: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:  # noqa: ARG002
        """The .sif of an image."""
        return self.ensure_sif(made) if isinstance(made, Image) else made

    def require(self) -> str:
        """`apptainer 1.4.5`. Raises ToolError when it is missing, too old or refused here."""
        return f"apptainer {self.command.require(building=False)}"

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        """Runs `spec.argv`. 127 and 126 mean, as for shells, not found and not executable.

        Not captured, its streams are pipes and terminals of a relay's. Of captured output the first 16 MiB
        of each stream are kept. Raises UsageError, ToolError or StoreError when it was never started;
        ToolError too where `pool` are asked for and this machine has none: apptainer would not mind.
        """
        check_spec(spec)
        planned_mounts(spec)
        found = find_gpus() if spec.gpus else None
        sif = image if isinstance(image, SifArtifact) else self.ensure_sif(image)
        caller = CallerIdentity(
            uid=os.geteuid(),
            gid=os.getegid(),
            unshare=shutil.which("unshare", path=self.command.search) or "",
            gpus=gpu_options(found) if found else (),
        )
        started, lost = os.memfd_create("started"), os.memfd_create("lost")
        try:
            invocation = plan(self.command.find(), str(sif.path), spec, caller, started=started)
            return self._run(invocation, spec, started, lost)
        finally:
            os.close(started)
            os.close(lost)

    def _run(self, invocation: ApptainerInvocation, spec: RunSpec, started: int, lost: int) -> CommandResult:
        # apptainer writes nothing lasting, but wants a home to look for settings in: an empty one.
        with temporary_directory("imagefactory-apptainer-") as home:
            own = {name: str(home) for name in ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR")}
            extra = {**dict(invocation.environment), **own}
            output = subprocess.PIPE if spec.capture else None
            relay = (sys.executable, "-I", "-S", str(SANDBOX), "relay", str(lost), str(started))
            begun = time.monotonic()
            try:
                process = subprocess.Popen(
                    invocation.argv if spec.capture else (*relay, *invocation.argv),
                    env=self.command.environment(extra),
                    stdin=subprocess.DEVNULL if spec.capture else None,
                    stdout=output,
                    stderr=output,
                    pass_fds=(started,) if spec.capture else (started, lost),
                    start_new_session=spec.capture,  # interactive, it needs the terminal's own session
                )
            except OSError as error:
                raise ToolError("tool-not-started", f"cannot start {invocation.argv[0]}: {error}") from error
            with signals_to_command(interactive=not spec.capture):
                stdout, stderr, timed_out = _collect(process, spec.timeout, relayed=not spec.capture)
        code = process.returncode
        if why := os.pread(lost, 1000, 0).decode():
            raise unrecorded_bytes(why)
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
    """The error for a command that was never started, from what apptainer said of it."""
    lines = [clean(line) for line in stderr.splitlines() if "FATAL" in line or "ERROR" in line]
    said = lines[-1].split(":", 1)[-1].strip() if lines else f"apptainer ended with {code}"
    if "failed to set working directory" in said:
        return UsageError(
            "workdir-not-found",
            f"the image has no directory {spec.workdir} to work in",
            hint="choose another workdir",
        )
    if "mount source" in said:
        return UsageError(
            "mount-failed", f"cannot mount this inside the image: {said}", hint="check the paths of the mount"
        )
    if "/bin/sh" in said:
        return ToolError(
            "image-has-no-shell",
            "this image has no /bin/sh, which the apptainer runner needs",
            hint="use --runner unshare",
        )
    return ToolError(
        "command-not-started",
        f"apptainer could not start the command: {said}",
        hint="run apptainer exec FILE.sif true for details, or use --runner unshare",
    )


def _collect(
    process: subprocess.Popen[bytes], timeout: float | None, *, relayed: bool
) -> tuple[str, str, bool]:
    """Both streams and whether time ran out. Whatever happens, nothing runs on."""
    kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}

    def read(name: str, stream: IO[bytes]) -> None:
        size = 0
        with stream:
            while data := stream.read1(1 << 16):  # type: ignore[attr-defined]
                if size < OUTPUT_LIMIT:
                    kept[name].append(data[: OUTPUT_LIMIT - size])
                elif size - len(data) < OUTPUT_LIMIT:
                    kept[name].append(f"\n[cut after {OUTPUT_LIMIT} bytes]\n".encode())
                size += len(data)

    threads = [
        threading.Thread(target=read, args=(name, stream), daemon=True)
        for name in kept
        if (stream := getattr(process, name)) is not None
    ]
    timed_out = False
    try:
        for thread in threads:
            thread.start()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            if relayed:  # it passes on what was said before
                process.send_signal(END_NOW)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
            _end(process)
        for thread in threads:
            thread.join(GRACE_SECONDS)
    finally:
        _end(process)
    texts = [b"".join(parts).decode(errors="replace") for parts in kept.values()]
    return texts[0], texts[1], timed_out


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends apptainer and all below it: what an ordinary user's apptainer started outlives it otherwise."""
    if process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
