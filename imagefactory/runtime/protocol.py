"""What every runner offers: a command inside an image, on this machine."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from imagefactory.errors import UsageError
from imagefactory.model import CommandResult, Mount, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSupport:
    """What a runner may need of this machine; the module of each has a `make_runner` that takes it.

    `workers` layers are unpacked at once, `ensure_sif` gives the kept .sif of an image of the store.
    """

    layout: Layout
    environ: Mapping[str, str]
    progress: Progress
    workers: int
    ensure_sif: Callable[[Image], SifArtifact]


class Runner(Protocol):
    """`unpacked` is where it starts images from, layer by layer; None for one that takes them whole."""

    @property
    def unpacked(self) -> UnpackedLayers | None: ...

    def require(self) -> str:
        """The runner's version. Raises ToolError, with the command that mends it, when it cannot run here."""

    def prepare(self, made: Image | SifArtifact, *, checked: bool) -> Image | SifArtifact:
        """`made` as this runner starts it, brought to where it starts things from.

        `checked`: a verdict follows, so what the store has unpacked for it is looked at first. The caller
        holds the layout's `in_use`: no collection takes what is on its way.
        """

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        """Runs `spec.argv` in `image`, which stays untouched.

        A command that fails or times out is a result, not an error; ToolError and StoreError mean that
        it was never started. ToolError too for a kind of image that this runner cannot run.
        """


# --- What every runner refuses of a command before it starts anything. Pure


PATH_LIMIT, NAME_LIMIT = 4000, 255  # bytes; PATH_MAX less the folder that a sandbox is made in
RESERVED = ("/proc", "/sys", "/dev")


def check_spec(spec: RunSpec) -> None:
    """Raises UsageError for a command, folder, user or variable that cannot be."""
    if not spec.argv or not spec.argv[0]:
        raise UsageError("command-missing", "there is no command to run", hint="write one after `--`")
    texts = [*spec.argv, spec.workdir, *(text for pair in spec.environment for text in pair)]
    if any("\0" in text for text in texts):
        raise UsageError("option-invalid", "a command cannot contain a NUL character", hint="remove it")
    for name, _ in spec.environment:
        if not name or "=" in name:
            raise UsageError(
                "option-invalid", f"'{name}' is not the name of a variable", hint="write NAME=VALUE"
            )
    if not spec.workdir.startswith("/"):
        raise UsageError(
            "option-invalid",
            f"workdir '{spec.workdir}' is not an absolute path",
            hint="write a path of the image",
        )
    if not 0 <= spec.uid < 2**32 - 1:
        raise UsageError("option-invalid", f"uid {spec.uid} is not valid", hint="write 0 or 65534")


def planned_mounts(spec: RunSpec) -> tuple[Mount, ...]:
    """The mounts with normal targets, those above others first. Raises UsageError for one that cannot be."""
    planned = []
    for entry in spec.mounts:
        # normpath keeps two slashes at the beginning (POSIX): `//` is the root as well.
        target = "/" + posixpath.normpath(entry.target).lstrip("/")
        if not entry.target.startswith("/") or ".." in entry.target.split("/") or target == "/":
            raise UsageError(
                "mount-invalid",
                f"mount target '{entry.target}' is not a place inside the image",
                hint="write an absolute path below / without '..'",
            )
        if any(target == path or target.startswith(path + "/") for path in RESERVED):
            raise UsageError(
                "mount-invalid",
                f"mount target '{entry.target}' is reserved for the sandbox",
                hint=f"choose one that is not below {', '.join(RESERVED)}",
            )
        if "\0" in f"{entry.source}{target}":
            raise UsageError("mount-invalid", "a mount cannot contain a NUL character", hint="remove it")
        names = os.fsencode(target).split(b"/")
        if len(os.fsencode(target)) > PATH_LIMIT or any(len(name) > NAME_LIMIT for name in names):
            raise UsageError(
                "mount-invalid",
                f"mount target '{entry.target[:60]}...' is longer than Linux allows",
                hint=f"write at most {PATH_LIMIT} bytes, {NAME_LIMIT} between two slashes",
            )
        if not entry.source.is_absolute():
            raise UsageError(
                "mount-invalid",
                f"mount source '{entry.source}' is not an absolute path",
                hint="write it in full",
            )
        planned.append(replace(entry, target=target))
    # A mount below another one must come after it, or it would be covered.
    return tuple(sorted(planned, key=lambda mount: mount.target.count("/")))
