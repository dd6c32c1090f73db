"""The folder in which somebody types `run`: shown to the command, or not, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from imagefactory.model import Mount

HERE = "/work"
"""Where it is inside. Its own path could hide what the image has there, such as /usr or /opt/env."""


def show_folder(folder: Path, *, readable: bool, private: Sequence[Path]) -> tuple[Mount | None, str]:
    """The mount of the current folder, None for one that is not shown, and what is told of it.

    `readable`: its caller may list and enter it. `private` are folders that no image gets to see unasked: the
    home, the store. Whatever holds one, or lies in the store (all but the first), is not shown.
    """
    ask = f"--mount DIR:{HERE} --workdir {HERE} shows another"
    if not readable:
        return None, f"{folder} cannot be read by you and is not shown inside; {ask}"
    home, *stores = private
    for place in stores:
        if folder.is_relative_to(place):
            return None, f"{folder} is of imagefactory's own ({place}) and is not shown inside; {ask}"
    for place in private:
        if place.is_relative_to(folder):
            what = "is your home" if folder == home else f"holds {place}"
            return None, f"{folder} {what} and is not shown inside; {ask}"
    return Mount(source=folder, target=HERE), (
        f"{folder} is {HERE} inside, read-only; to write there: --mount .:{HERE}:rw --workdir {HERE}"
    )
