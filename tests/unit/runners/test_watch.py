"""What a run takes, counted in folders that stand where its /proc and its scratch would."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagefactory.runners.sandbox import watch
from imagefactory.runners.sandbox.watch import Watch, let_children_run_as_others, run_as_others, sizes

NONE = {"processes": None, "memory": None, "scratch": None, "reserve": None, "reserve_files": None}


K = 1024
SEGMENTS = """       key      shmid perms                  size  cpid  lpid nattch   uid   gid
         0          0  1600               1048576   123   123      0     0     0     0     0 1 1 1 1024 1024
"""


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Two processes that share pages and map 1 KiB of files in memory, of which there are 4 KiB."""
    for pid, threads, size, tables in ((1, 9, 999, 9), (2, 3, 100, 2), (7, 1, 50, 1)):
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        lines = [
            "Name:\ta: 7",
            "Groups:",
            f"VmPTE: {tables} kB",
            f"VmRSS:\t{size} kB",
            "VmSwap: 5 kB",
            f"Threads: {threads}",
        ]
        (folder / "status").write_text("\n".join(lines))
        (folder / "smaps_rollup").write_text(
            "7f-8f ---p 0 00:00 0 [rollup]\nPss: 10 kB\nPss_Shmem: 1 kB\nSwapPss: 2 kB\n"
        )
    (tmp_path / "proc/8").mkdir()  # gone between the two looks
    (tmp_path / "proc/meminfo").write_text("")
    (tmp_path / "segments").write_text(SEGMENTS)
    files = SimpleNamespace(f_blocks=10, f_bfree=8, f_frsize=1024)
    monkeypatch.setattr(watch.os, "fstatvfs", lambda _: files)
    return tuple(os.open(tmp_path / name, os.O_RDONLY) for name in ("proc", "segments", "proc"))  # type: ignore[return-value]


@pytest.mark.parametrize(("limits", "over"), [
    ({"processes": 3}, "processes"), ({"processes": 4}, "processes"), ({"processes": 5}, None),
    ({"memory": 29 * K - 1}, "memory"), ({"memory": 29 * K}, None), ({"memory": 200 * K}, None),
    ({"scratch": 1 << 60, "reserve": 0}, None), ({"scratch": 1 << 60, "reserve": 1 << 62}, "reserve"),
    ({"scratch": 1 << 60, "reserve": 0, "reserve_files": 0}, None),
    ({"scratch": 1 << 60, "reserve": 0, "reserve_files": 1 << 62}, "reserve_files"),
    ({"reserve": 0}, None), ({"reserve": 1 << 62}, "reserve"), ({}, None),
])  # fmt: skip
def test_the_limit_that_is_reached(
    shown: tuple[int, int, int], tmp_path: Path, limits: dict[str, int], over: str | None
) -> None:
    """Of memory: twice 9 KiB and 2 of swap, 3 of page tables, and 4 of files in memory, 2 of them mapped."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert Watch({**NONE, **limits}, shown, folders=[str(scratch)]).over() == over


def test_a_process_that_hides_its_memory_is_counted_whole(
    shown: tuple[int, int, int], tmp_path: Path
) -> None:
    (tmp_path / "proc/2/smaps_rollup").unlink()
    limits = {**NONE, "memory": (107 + 12 + 4) * K}  # 2 whole, 7 by its share, files in memory
    assert Watch(limits, shown, folders=[str(tmp_path)]).over() is None
    limits["memory"] -= 1
    again = (os.open(tmp_path / "proc", os.O_RDONLY), *shown[1:])
    assert Watch(limits, again, folders=[str(tmp_path)]).over() == "memory"


def test_files_are_counted_by_what_they_take(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/file").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "deep/er/file", tmp_path / "same")
    (tmp_path / "link").symlink_to("/")
    os.truncate(tmp_path / "empty", 1 << 40)  # a hole
    *_, total = sizes(str(tmp_path))
    assert 1 << 20 <= total < (1 << 20) + (1 << 16)


def test_folders_that_a_run_writes_count_as_scratch(shown: tuple[int, int, int], tmp_path: Path) -> None:
    folders = [tmp_path / "scratch", tmp_path / "out"]
    for folder in folders:
        folder.mkdir()
        (folder / "file").write_bytes(bytes(1 << 20))
    limits = {**NONE, "scratch": 3 << 19, "reserve": 0}
    assert Watch(limits, shown, folders=[str(folders[0])]).over() is None
    again = (os.open(tmp_path / "proc", os.O_RDONLY), *shown[1:])
    assert Watch(limits, again, folders=list(map(str, folders))).over() == "scratch"


def test_a_callers_own_policy_stays() -> None:
    """No user may go from SCHED_IDLE to another one, and a run must not end by it."""
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            let_children_run_as_others()
            run_as_others()
            os._exit(0 if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_IDLE else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
