"""What every runner refuses of a command before it starts anything. Pure."""

from __future__ import annotations

import os
import posixpath
from dataclasses import replace

from imagefactory.errors import UsageError
from imagefactory.model import Mount, RunSpec

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
