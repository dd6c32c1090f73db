"""What a run takes, counted in folders that stand where its /proc and its scratch would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imagefactory.runners.sandbox.watch import PAGE, Watch, let_children_run_as_others, run_as_others, sizes

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
    assert Watch({**NONE, **limits}, os.open(proc, os.O_PATH), [str(scratch)]).over() == over


def test_files_are_counted_by_what_they_take(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/file").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "deep/er/file", tmp_path / "same")
    (tmp_path / "link").symlink_to("/")
    os.truncate(tmp_path / "empty", 1 << 40)  # a hole
    *_, total = sizes(str(tmp_path))
    assert 1 << 20 <= total < (1 << 20) + (1 << 16)


def test_folders_that_a_run_writes_count_as_scratch(proc: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "scratch", tmp_path / "out"]
    for folder in folders:
        folder.mkdir()
        (folder / "file").write_bytes(bytes(1 << 20))
    limits = {**NONE, "scratch": 3 << 19, "reserve": 0}
    assert Watch(limits, os.open(proc, os.O_PATH), [str(folders[0])]).over() is None
    assert Watch(limits, os.open(proc, os.O_PATH), list(map(str, folders))).over() == "scratch"


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
