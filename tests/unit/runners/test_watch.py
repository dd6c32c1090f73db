"""What a run takes, counted in folders that stand where its /proc and its scratch would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imagefactory.runners.sandbox.watch import PAGE, Watch, sizes

NONE = {"processes": None, "memory": None, "scratch": None, "reserve": None}


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for pid, threads, pages, shared in ((1, 9, 999, 9), (2, 3, 100, 10), (7, 1, 50, 10)):
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        fields = ["0"] * 50
        fields[19], fields[23] = str(threads), str(pages)
        (folder / "stat").write_text(" ".join([str(pid), f"(a ) b{pid})", *fields[2:]]))
        (folder / "smaps_rollup").write_text(f"head\nPss: {shared * PAGE // 1024} kB\n")
    (tmp_path / "proc/8").mkdir()  # gone between the two looks
    (tmp_path / "proc/meminfo").write_text("")
    return tmp_path / "proc"


@pytest.mark.parametrize(("limits", "over"), [
    ({"processes": 3}, "processes"), ({"processes": 4}, "processes"), ({"processes": 5}, None),
    ({"memory": 19 * PAGE}, "memory"), ({"memory": 20 * PAGE}, None), ({"memory": 200 * PAGE}, None),
    ({"scratch": 1 << 60, "reserve": 0}, None), ({"scratch": 1 << 60, "reserve": 1 << 62}, "reserve"),
    ({}, None),
])  # fmt: skip
def test_the_limit_that_is_reached(
    proc: Path, tmp_path: Path, limits: dict[str, int], over: str | None
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert Watch({**NONE, **limits}, os.open(proc, os.O_PATH), str(scratch)).over() == over


def test_files_are_counted_by_what_they_take(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/file").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "deep/er/file", tmp_path / "same")
    (tmp_path / "link").symlink_to("/")
    os.truncate(tmp_path / "empty", 1 << 40)  # a hole
    *_, total = sizes(str(tmp_path))
    assert 1 << 20 <= total < (1 << 20) + (1 << 16)


def read_link(descriptor: Path) -> str:
    """Where a descriptor leads, empty where another thread has closed it meanwhile."""
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


def test_folders_without_end_are_not_followed_to_theirs(tmp_path: Path) -> None:
    place = tmp_path
    for _ in range(250):
        place /= "d"
        place.mkdir()
    assert len(list(sizes(str(tmp_path)))) == 200
    assert not [link for link in map(read_link, Path("/proc/self/fd").iterdir()) if str(tmp_path) in link]
