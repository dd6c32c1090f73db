"""Whether a run shows the current directory to its command, and the reason if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.model import Mount

WORKDIR = "/work"
"""The path of the current directory in an image. Its own path could hide a directory of the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateDirectory:
    """A directory that no image sees by default, nor its parents. With `below` nor its subdirectories."""

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
    """Return the caller's homes, imagefactory's own directories, those of running programs and the system's.

    A home in a system directory, such as /root, is treated like other homes.
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
    """Return the mount of the current directory, or None, with a message.

    `readable` is true if the caller may list and enter the directory. `mounted` are the mount points in it.
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
