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
        PrivateDirectory(path=Path(path), name="a system directory")
        for path in ("/run", "/var/run", "/dev", "/proc", "/sys", "/etc", "/boot", "/root")
    ),
    *(
        PrivateDirectory(path=Path(path), name="a directory of all users", below=False)
        for path in ("/tmp", "/var/tmp")  # noqa: S108 - the places themselves, no file in them
    ),
)


def private_directories(
    homes: Sequence[Path], *, own_directories: Sequence[Path], runtime: Sequence[Path]
) -> tuple[PrivateDirectory, ...]:
    """Return the caller's homes, imagefactory's own directories, those of running programs and the system's.

    A home in a system directory, such as /root, is treated like other homes.
    """
    return (
        *(PrivateDirectory(path=path, name="your home", below=False) for path in homes),
        *(PrivateDirectory(path=path, name="a directory of imagefactory itself") for path in own_directories),
        *(PrivateDirectory(path=path, name="a directory of running programs") for path in runtime),
        *(
            replace(
                directory,
                below=directory.below and not any(home.is_relative_to(directory.path) for home in homes),
            )
            for directory in SYSTEM_PLACES
        ),
    )


def mount_current_directory(
    directory: Path, *, readable: bool, private: Sequence[PrivateDirectory], mounted: Sequence[str] = ()
) -> tuple[Mount | None, str]:
    """Return the mount of the current directory, or None, with a message.

    `readable` is true if the caller may list and enter the directory. `mounted` are the mount points in it.
    """
    reason = _hidden_reason(directory, private)
    if mounted:
        reason = reason or f"contains {mounted[0]}, where another disk is mounted,"
    if not readable:
        reason = "cannot be read by you"
    if reason:
        return (
            None,
            f"{directory} {reason} and is not mounted; to mount another directory: --mount DIR:{WORKDIR} "
            f"--workdir {WORKDIR}",
        )
    return Mount(source=directory, target=WORKDIR), (
        f"{directory} is {WORKDIR} inside, read-only; "
        f"to write there: --mount .:{WORKDIR}:rw --workdir {WORKDIR}"
    )


def _hidden_reason(folder: Path, private: Sequence[PrivateDirectory]) -> str:
    for directory in private:
        if folder == directory.path:
            return f"is {directory.name}"
        if directory.path.is_relative_to(folder):
            return f"contains {directory.path}"
        if directory.below and folder.is_relative_to(directory.path):
            return f"is in {directory.path} ({directory.name})"
    hidden = next((part for part in folder.parts if part.startswith(".")), "")
    return f"is in a hidden directory ({hidden})" if hidden else ""
