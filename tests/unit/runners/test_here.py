"""Which current folder a command inside an image gets to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.model import Mount
from imagefactory.runners.here import show_folder

PRIVATE = (Path("/home/me"), Path("/data/store"), Path("/home/me/.cache/imagefactory"))


@pytest.mark.parametrize("folder", ["/home/me/project", "/data/project", "/home/meadow", "/tmp", "/usr/src"])
def test_a_folder_of_work_is_shown_at_one_place_and_to_read(folder: str) -> None:
    mount, told = show_folder(Path(folder), readable=True, private=PRIVATE)
    assert mount == Mount(source=Path(folder), target="/work")
    assert "read-only" in told


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/home/me", "is your home"),
        ("/home", "holds /home/me"),
        ("/", "holds /home/me"),
        ("/data", "holds /data/store"),
        ("/data/store", "of imagefactory's own"),
        ("/data/store/blobs", "of imagefactory's own"),
        ("/home/me/.cache/imagefactory/wheels", "of imagefactory's own"),
    ],
)
def test_home_store_and_what_holds_them_are_not_shown(folder: str, why: str) -> None:
    mount, told = show_folder(Path(folder), readable=True, private=PRIVATE)
    assert mount is None
    assert why in told


def test_what_is_closed_to_its_caller_is_not_shown() -> None:
    mount, told = show_folder(Path("/home/me/secret"), readable=False, private=PRIVATE)
    assert mount is None
    assert "cannot be read by you" in told
