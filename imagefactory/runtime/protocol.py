"""The interface of runners, which run a command in an image on this machine, and their shared functions."""

from __future__ import annotations

import contextlib
import os
import posixpath
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Protocol

from imagefactory.errors import ToolError, UsageError
from imagefactory.model import CommandResult, Mount, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress

OUTPUT_LIMIT = 16 << 20  # bytes of each stream; an untrusted image may print without end
PATH_LIMIT, NAME_LIMIT = 4000, 255  # bytes; PATH_MAX less the directory of a sandbox
GRACE_SECONDS = 10
"""Seconds for a command to end by itself when its runner is ended, and for its last output to arrive."""
RESERVED = ("/proc", "/sys", "/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSupport:
    """The parts of this machine that a runner may need, for the `make_runner` of its module.

    `workers` layers are unpacked at once. `ensure_sif` returns the cached .sif of a stored image.
    """

    layout: Layout
    environ: Mapping[str, str]
    progress: Progress
    workers: int
    ensure_sif: Callable[[Image], SifArtifact]


class Runner(Protocol):
    """A runner. `unpacked` has the layers from which it starts images, None if it starts complete images."""

    @property
    def unpacked(self) -> UnpackedLayers | None: ...

    def require(self) -> str:
        """Return the runner's version. Raises ToolError with the fix if it does not work here."""

    def prepare(self, image: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:
        """Return `image` in the form that this runner starts, converted or loaded if needed.

        `checked` is set before a verdict: the unpacked layers in the store are checked first. The caller
        must hold the layout's `in_use`, so that no collection deletes the image meanwhile.
        """

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        """Run `spec.argv` in `image`, which stays unchanged.

        127 and 126 mean not found and not executable, as in shells. A command that is not captured is
        interactive on a terminal. The first OUTPUT_LIMIT bytes of each captured stream are returned. Raises
        UsageError, ToolError or StoreError if the command never started. A failure or timeout is a result.
        Several threads may call it.
        """

    def stop(self) -> None:
        """End the commands that other threads run, for a caller that was interrupted."""


def check_spec(spec: RunSpec) -> None:
    """Raise UsageError for an invalid command, directory, user or variable."""
    if not spec.argv or not spec.argv[0]:
        raise UsageError("command-missing", "there is no command to run", hint="write the command after `--`")
    check_values(spec)


def check_values(spec: RunSpec) -> None:
    texts = [*spec.argv, spec.workdir, *(text for pair in spec.environment for text in pair)]
    if any("\0" in text for text in texts):
        raise UsageError(
            "option-invalid", "a command cannot contain a NUL character", hint="remove the NUL character"
        )
    for name, _ in spec.environment:
        if not name or "=" in name:
            raise UsageError(
                "option-invalid", f"'{name}' is not the name of a variable", hint="write NAME=VALUE"
            )
    if not spec.workdir.startswith("/"):
        raise UsageError(
            "option-invalid",
            f"workdir '{spec.workdir}' is not an absolute path",
            hint="write an absolute path of the image",
        )
    if not 0 <= spec.uid < 2**32 - 1:
        raise UsageError("option-invalid", f"uid {spec.uid} is not valid", hint="write 0 or 65534")


def check_limits_supported(spec: RunSpec, runner: str, unknown: tuple[str, ...]) -> None:
    """Raise UsageError for a requested limit that this runner cannot enforce."""
    for name, amount in spec.limits:
        if name in unknown and amount is not None:
            raise UsageError(
                "option-conflict",
                f"{runner} cannot limit {name}",
                hint="use --runner unshare, or remove the limit",
            )


def planned_mounts(spec: RunSpec) -> tuple[Mount, ...]:
    """Return the mounts with normal targets, parents first. Raises UsageError for an invalid mount."""

    def invalid(problem: str, hint: str) -> UsageError:
        return UsageError("mount-invalid", problem, hint=hint)

    planned = []
    for entry in spec.mounts:
        # normpath keeps two slashes at the beginning (POSIX): `//` is the root as well.
        target = "/" + posixpath.normpath(entry.target).lstrip("/")
        if not entry.target.startswith("/") or ".." in entry.target.split("/") or target == "/":
            raise invalid(
                f"mount target '{entry.target}' is not a place inside the image",
                "write an absolute path below / without '..'",
            )
        if any(target == path or target.startswith(path + "/") for path in RESERVED):
            raise invalid(
                f"mount target '{entry.target}' is reserved for the sandbox",
                f"choose one that is not below {', '.join(RESERVED)}",
            )
        if "\0" in f"{entry.source}{target}":
            raise invalid("a mount cannot contain a NUL character", "remove it")
        names = os.fsencode(target).split(b"/")
        if len(os.fsencode(target)) > PATH_LIMIT or any(len(name) > NAME_LIMIT for name in names):
            raise invalid(
                f"mount target '{entry.target[:60]}...' is longer than Linux allows",
                f"write at most {PATH_LIMIT} bytes, {NAME_LIMIT} between two slashes",
            )
        if not entry.source.is_absolute():
            raise invalid(f"mount source '{entry.source}' is not an absolute path", "write it in full")
        planned.append(replace(entry, target=target))
    # A mount below another must come after it, or it would be covered.
    return tuple(sorted(planned, key=lambda mount: mount.target.count("/")))


def reject_sif(image: SifArtifact, runner: str) -> ToolError:
    return ToolError(
        "sif-needs-apptainer", f"{runner} cannot run {image.name}, a .sif file", hint="use --runner apptainer"
    )


class BoundedOutput:
    """Two streams, each up to OUTPUT_LIMIT bytes. The rest is read and dropped, so the command goes on."""

    def __init__(self) -> None:
        self._data = {"stdout": bytearray(), "stderr": bytearray()}
        self._cut: set[str] = set()

    def add(self, name: str, data: bytes) -> None:
        space = OUTPUT_LIMIT - len(self._data[name])
        self._data[name] += data[:space]
        if len(data) > space:
            self._cut.add(name)

    def text(self, name: str) -> str:
        text = self._data[name].decode(errors="replace")
        return f"{text}\n[cut after {OUTPUT_LIMIT} bytes]\n" if name in self._cut else text


@contextlib.contextmanager
def read_output(process: subprocess.Popen[bytes]) -> Iterator[BoundedOutput]:
    """Read the captured streams of a process during the block, and at its end what they still have."""
    output = BoundedOutput()

    def read(name: str, stream: IO[bytes]) -> None:
        with stream:
            while data := stream.read1(1 << 16):  # type: ignore[attr-defined]
                output.add(name, data)

    threads = [
        threading.Thread(target=read, args=(name, stream), daemon=True)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        if stream is not None
    ]
    for thread in threads:
        thread.start()
    yield output
    for thread in threads:
        thread.join(GRACE_SECONDS)


@contextlib.contextmanager
def signals_to_command(*, interactive: bool) -> Iterator[None]:
    """Leave Ctrl-C to the command of an uncaptured run."""
    try:
        before = signal.signal(signal.SIGINT, lambda *_: None) if interactive else None
    except ValueError:  # not the main thread, where no signal arrives anyway
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
