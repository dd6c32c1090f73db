"""What docker's daemon means where it does not make or start a container, by its own words. Pure."""

from __future__ import annotations

import re

from imagefactory.errors import FactoryError, ToolError, UsageError
from imagefactory.model import Completed

_NOT_FOUND = re.compile(r"executable file not found|no such file or directory", re.IGNORECASE)
_NOT_EXECUTABLE = re.compile(r"permission denied|exec format error|is a directory", re.IGNORECASE)


def not_started(said: str) -> Completed:
    """What the daemon's refusal to start a container means: 127 or 126 of a shell, or an error.

    Raises ToolError or UsageError when it is not the command's own fault.
    """
    others = ("docker-init", "mount", "chdir", "nvidia", "cdi")
    if re.search(r"\bexec[: ]", said) and not any(word in said.lower() for word in others):
        for pattern, code in ((_NOT_FOUND, 127), (_NOT_EXECUTABLE, 126)):
            if pattern.search(said):
                return Completed(returncode=code, stdout="", stderr=f"{said.strip()}\n", seconds=0.0)
    raise explain(said)


def explain(said: str) -> FactoryError:
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
