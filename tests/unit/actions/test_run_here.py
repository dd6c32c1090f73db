"""Which current folder a command inside an image gets to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.actions.run import mount_current_directory, private_directories
from imagefactory.model import Mount

OWN = (Path("/data/store"), Path("/home/me/cache/imagefactory"))
PRIVATE = private_directories([Path("/home/me")], own_directories=OWN, runtime=[Path("/srv/runtime/me")])


@pytest.mark.parametrize(
    "folder",
    [
        "/home/me/project",
        "/data/project",
        "/home/meadow",
        "/tmp/project",
        "/usr/src",
        "/etcetera",
        "/srv/a.b",
    ],
)
def test_a_folder_of_work_is_shown_at_one_place_and_to_read(folder: str) -> None:
    mount, told = mount_current_directory(Path(folder), readable=True, private=PRIVATE)
    assert mount == Mount(source=Path(folder), target="/work")
    assert "read-only" in told


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/home/me", "is your home"),
        ("/home", "contains /home/me"),
        ("/", "contains /home/me"),
        ("/data", "contains /data/store"),
        ("/data/store", "of imagefactory itself"),
        ("/data/store/blobs", "of imagefactory itself"),
        ("/home/me/cache/imagefactory/wheels", "of imagefactory itself"),
        ("/home/me/.ssh", "hidden"),
        ("/home/me/.config/tool/deep", "hidden"),
        ("/data/other/.gnupg", "hidden"),
        ("/run", "is a system directory"),
        ("/run/user/1000/tmux-1000", "is in /run"),
        ("/var/run", "is a system directory"),
        ("/var", "contains /var/run"),
        ("/dev", "is a system directory"),
        ("/dev/shm/x", "is in /dev"),
        ("/proc/self", "is in /proc"),
        ("/sys/fs/cgroup", "is in /sys"),
        ("/etc/ssl", "is in /etc"),
        ("/boot", "is a system directory"),
        ("/root/project", "is in /root"),
        ("/tmp", "is a directory of all users"),
        ("/var/tmp", "is a directory of all users"),
        ("/srv/runtime/me/dbus", "of running programs"),
        ("/srv", "contains /srv/runtime/me"),
    ],
)
def test_private_places_and_what_holds_them_are_not_shown(folder: str, why: str) -> None:
    mount, told = mount_current_directory(Path(folder), readable=True, private=PRIVATE)
    assert mount is None
    assert why in told


@pytest.mark.parametrize(
    ("folder", "shown"), [("/root", False), ("/root/project", True), ("/root/.ssh", False), ("/etc", False)]
)
def test_a_home_among_the_systems_folders_is_like_other_homes(folder: str, shown: bool) -> None:
    private = private_directories([Path("/root")], own_directories=(), runtime=())
    assert (mount_current_directory(Path(folder), readable=True, private=private)[0] is not None) == shown


def test_where_another_disk_is_mounted_is_not_shown() -> None:
    """The kernel makes no overlay of it for who is not root."""
    mount, told = mount_current_directory(
        Path("/data/a"), readable=True, private=PRIVATE, mounted=["/data/a/disk"]
    )
    assert mount is None
    assert "/data/a/disk" in told


def test_what_is_closed_to_its_caller_is_not_shown() -> None:
    mount, told = mount_current_directory(Path("/home/me/secret"), readable=False, private=PRIVATE)
    assert mount is None
    assert "cannot be read by you" in told
