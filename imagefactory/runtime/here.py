"""The folder in which somebody types `run`: shown to the command, or not, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.model import Mount

WORKDIR = "/work"
"""Where it is inside. Its own path could hide what the image has there, such as /usr or /opt/env."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateDirectory:
    """A folder that no image sees unasked, nor what holds it; with `below` nor any folder in it."""

    path: Path
    name: str
    below: bool = True


SYSTEM_PLACES = (
    *(
        PrivateDirectory(path=Path(path), name="a folder of the system")
        for path in ("/run", "/var/run", "/dev", "/proc", "/sys", "/etc", "/boot", "/root")
    ),
    *(
        PrivateDirectory(path=Path(path), name="a folder of all users", below=False)
        for path in ("/tmp", "/var/tmp")  # noqa: S108 - the places themselves, no file in them
    ),
)


def private_directories(
    homes: Sequence[Path], *, own: Sequence[Path], runtime: Sequence[Path]
) -> tuple[PrivateDirectory, ...]:
    """Return all of them: the caller's homes, imagefactory's own folders, and those of running programs.

    Where a place of the system holds the home, as /root may, folders of the home are like those of others.
    """
    return (
        *(PrivateDirectory(path=path, name="your home", below=False) for path in homes),
        *(PrivateDirectory(path=path, name="a folder of imagefactory's own") for path in own),
        *(PrivateDirectory(path=path, name="a folder of running programs") for path in runtime),
        *(
            replace(place, below=place.below and not any(home.is_relative_to(place.path) for home in homes))
            for place in SYSTEM_PLACES
        ),
    )


def mount_current_directory(
    folder: Path, *, readable: bool, private: Sequence[PrivateDirectory], mounted: Sequence[str] = ()
) -> tuple[Mount | None, str]:
    """The mount of the current folder, None for one that is not shown, and what is told of it.

    `readable`: its caller may list and enter it. `mounted` are the mount points in it.
    """
    why = _hidden_reason(folder, private)
    if mounted:
        why = why or f"holds {mounted[0]}, where another disk is mounted,"
    if not readable:
        why = "cannot be read by you"
    if why:
        return (
            None,
            f"{folder} {why} and is not shown inside; --mount DIR:{WORKDIR} --workdir {WORKDIR} "
            f"shows another",
        )
    return Mount(source=folder, target=WORKDIR), (
        f"{folder} is {WORKDIR} inside, read-only; to write there: --mount .:{WORKDIR}:rw --workdir {WORKDIR}"
    )


def _hidden_reason(folder: Path, private: Sequence[PrivateDirectory]) -> str:
    for place in private:
        if folder == place.path:
            return f"is {place.name}"
        if place.path.is_relative_to(folder):
            return f"holds {place.path}"
        if place.below and folder.is_relative_to(place.path):
            return f"is in {place.path} ({place.name})"
    hidden = next((part for part in folder.parts if part.startswith(".")), "")
    return f"is in a hidden folder ({hidden})" if hidden else ""
