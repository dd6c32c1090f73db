"""Where a run's control group may be made, and what a run takes that the kernel does not count."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagefactory.runtime.sandbox import cgroups
from imagefactory.runtime.sandbox.cgroups import (
    CgroupFolder,
    CgroupParent,
    Group,
    NoCgroup,
    Watch,
    find_parent,
    let_children_run_as_others,
    look_at,
    memory_limit,
    own_groups,
    remove_stale,
    run_as_others,
    scope_helps,
    sizes,
    unescape,
)

# Debian 12, with `systemd.unified_cgroup_hierarchy=0` for the second; options that say nothing are left out.
V2 = (
    "31 22 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9"
    " - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
)
DOCKER_V2 = V2.replace(" rw,nosuid", " ro,nosuid")
HYBRID = """\
31 22 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,size=4096k,mode=755,inode64
32 31 0:27 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw,nsdelegate
33 31 0:28 / /sys/fs/cgroup/systemd rw,relatime shared:11 - cgroup cgroup rw,xattr,name=systemd
36 31 0:31 / /sys/fs/cgroup/pids rw,relatime shared:15 - cgroup cgroup rw,pids
38 31 0:33 / /sys/fs/cgroup/memory rw,relatime shared:17 - cgroup cgroup rw,memory
46 31 0:41 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:25 - cgroup cgroup rw,cpu,cpuacct
"""
DOCKER_V1 = """\
901 890 0:28 /docker/6f0c /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory
902 890 0:33 /docker/6f0c /sys/fs/cgroup/pids ro,relatime - cgroup cgroup rw,pids
"""
BOTH = frozenset({"memory", "pids"})
OPEN = CgroupFolder(writable=True, controllers=BOTH)
CLOSED = CgroupFolder(controllers=BOTH)
ROOT = "/sys/fs/cgroup"
USER = f"{ROOT}/user.slice/user-1000.slice"
APP = f"{USER}/user@1000.service/app.slice"
TERMINAL = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vte-spawn-8a.scope\n"
SSH = "0::/user.slice/user-1000.slice/session-3.scope\n"
SLURM = "0::/system.slice/slurmstepd.scope/job_71/step_batch/user/task_0\n"
CONDOR = "0::/system.slice/condor.service/condor_execute_slot1_1@node\n"
V1 = "12:pids:/user.slice\n8:memory:/user.slice/session-3.scope\n4:cpu,cpuacct:/\n1:name=systemd:/x\n0::/x\n"
LIMITED = CgroupFolder(writable=True, limited=True)
V1_GROUPS = (f"{ROOT}/memory/user.slice/session-3.scope", f"{ROOT}/pids/user.slice")


@pytest.mark.parametrize(("own", "mounts", "folders", "expected"), [
    # Debian 12, a user's terminal: next to it, as the user's own systemd does.
    (TERMINAL, V2, {f"{APP}/vte-spawn-8a.scope": OPEN, APP: OPEN}, CgroupParent(2, APP, APP)),
    # The same by ssh: the session is the machine's.
    (SSH, V2, {USER: CLOSED, f"{USER}/session-3.scope": CLOSED}, None),
    # Root by ssh.
    (SSH, V2, {USER: OPEN, f"{USER}/session-3.scope": OPEN}, CgroupParent(2, USER, USER)),
    (SSH, V2, {USER: CgroupFolder(writable=True, controllers=frozenset({"memory"}))}, CgroupParent(2,
    USER, "")),
    (SSH, V2, {USER: CgroupFolder(writable=True, controllers=frozenset({"pids"}))}, None),
    # Root without systemd: the top holds processes and groups.
    ("0::/\n", V2, {ROOT: OPEN._replace(top=True)}, CgroupParent(2, ROOT, ROOT)),
    ("0::/sshd\n", V2, {f"{ROOT}/sshd": OPEN, ROOT: OPEN._replace(top=True)}, CgroupParent(2, ROOT, ROOT)),
    # Docker: read-only. With --privileged it can be written, and holds the container's processes.
    ("0::/\n", DOCKER_V2, {ROOT: CLOSED}, None),
    ("0::/\n", V2, {ROOT: OPEN}, None),
    ("0::/../../x\n", V2, {ROOT: OPEN}, None),
    # Batch jobs: what limits a job would not limit its neighbour, and HTCondor's slot holds the job itself.
    (SLURM, V2, {f"{ROOT}/system.slice/slurmstepd.scope/job_71/step_batch/user": CLOSED}, None),
    (CONDOR, V2, {f"{ROOT}{CONDOR[3:-1]}": LIMITED, f"{ROOT}/system.slice/condor.service": OPEN}, None),
    # v1, alone or beside v2: below, where only root may.
    (V1, HYBRID, dict.fromkeys(V1_GROUPS, OPEN), CgroupParent(1, *V1_GROUPS)),
    (V1, HYBRID, {V1_GROUPS[0]: OPEN}, CgroupParent(1, V1_GROUPS[0], "")),
    (V1, HYBRID, {}, None),
    ("8:memory:/docker/6f0c\n", DOCKER_V1, {f"{ROOT}/memory": CLOSED}, None),
    ("8:memory:/docker/6f0c\n", DOCKER_V1, {f"{ROOT}/memory": OPEN}, CgroupParent(1, f"{ROOT}/memory", "")),
    # Not mounted, and no groups at all.
    (SSH, "", {}, None), ("", V2, {}, None),
])  # fmt: skip
def test_where_a_group_may_be_made(
    own: str, mounts: str, folders: dict[str, CgroupFolder], expected: CgroupParent | None
) -> None:
    found = find_parent(own, mounts, lambda path: folders.get(path, CgroupFolder()))
    assert (found if isinstance(found, CgroupParent) else None) == expected
    assert isinstance(found, CgroupParent) or found.reason


@pytest.mark.parametrize(("own", "folders", "helps"), [
    (SSH, {f"{USER}/user@1000.service": OPEN}, True),
    (SSH, {f"{USER}/user@1000.service": CLOSED}, False),
    (SSH, {f"{USER}/user@1000.service": OPEN, f"{USER}/session-3.scope": LIMITED}, False),
    (SSH.replace("1000", "1001"), {f"{USER}/user@1000.service": OPEN}, False),
    (TERMINAL, {APP: OPEN, f"{USER}/user@1000.service": OPEN}, False),  # nothing is needed
    (SLURM, {f"{USER}/user@1000.service": OPEN}, False),
    (CONDOR, {f"{USER}/user@1000.service": OPEN}, False),
])  # fmt: skip
def test_whether_systemd_can_bring_a_run_there(
    own: str, folders: dict[str, CgroupFolder], helps: bool
) -> None:
    """Never out of a batch job, or away from limits."""
    assert scope_helps(own, V2, lambda path: folders.get(path, CgroupFolder()), 1000) == helps


def test_v1_is_where_it_is_and_v2_beside_it_has_no_memory() -> None:
    found = own_groups(V1, HYBRID)
    assert found == {
        "pids": V1_GROUPS[1], "memory": V1_GROUPS[0], "cpu": f"{ROOT}/cpu,cpuacct",
        "cpuacct": f"{ROOT}/cpu,cpuacct", "name=systemd": f"{ROOT}/systemd/x", "": f"{ROOT}/unified/x",
    }  # fmt: skip
    assert not scope_helps(V1, HYBRID, lambda _: CgroupFolder(), 1000)


def test_names_with_spaces_and_colons() -> None:
    mounts = V2.replace("/sys/fs/cgroup", "/my\\040groups")
    assert own_groups("0::/a:b\n", mounts) == {"": "/my groups/a:b"}
    assert unescape("/a\\134b\\011") == "/a\\b\t"


@pytest.mark.parametrize(("mine", "above", "limit"), [
    ("max", "max", None), ("1000", "max", 1000), ("2000", "1000", 1000), (None, "5", 5), (None, None, None),
])  # fmt: skip
def test_the_memory_that_groups_above_allow(
    tmp_path: Path, mine: str | None, above: str | None, limit: int | None
) -> None:
    folder = tmp_path / "job/step"
    folder.mkdir(parents=True)
    for path, text in ((folder, mine), (folder.parent, above)):
        if text is not None:
            (path / "memory.max").write_text(f"{text}\n")
    assert memory_limit("0::/job/step\n", V2.replace(ROOT, str(tmp_path))) == limit


def test_a_look_at_folders(tmp_path: Path) -> None:
    assert look_at(str(tmp_path)) == CgroupFolder(top=True)
    for name, text in (("cgroup.procs", ""), ("cgroup.controllers", "cpu memory pids"),
                       ("cgroup.subtree_control", "memory")):  # fmt: skip
        (tmp_path / name).write_text(text)
    assert look_at(str(tmp_path)) == CgroupFolder(True, frozenset({"cpu", "memory", "pids"}), top=True)
    (tmp_path / "cgroup.type").write_text("domain")
    assert look_at(str(tmp_path)) == CgroupFolder(True, frozenset({"memory"}))
    for name, free, bound in (("memory.max", "max", "9"), ("cpu.max", "max 100000", "5 100000"),
                              ("cpuset.cpus", "", "0-3")):  # fmt: skip
        (tmp_path / name).write_text(f"{free}\n")
        assert not look_at(str(tmp_path)).limited
        (tmp_path / name).write_text(f"{bound}\n")
        assert look_at(str(tmp_path)).limited
        (tmp_path / name).unlink()


class Files(Group):
    """A group whose files are a folder's."""

    def __init__(self, folder: Path, version: int, memory: int | None = 100 << 20) -> None:
        self.version, self.bytes, self.processes = version, memory, 50
        self.memory = self.pids = str(folder)


@pytest.mark.parametrize(("files", "over"), [
    ({}, None),
    ({"memory.events": "low 0\noom 0\noom_kill 0\n"}, None),
    ({"memory.events": "oom 2\noom_kill 1\noom_group_kill 1\n"}, "memory"),
    ({"memory.events": "oom 0\noom_kill 1\n"}, "machine"),
    ({"pids.current": "51\n"}, "processes"), ({"pids.current": "50\n"}, None),
    ({"pids.current": "3\n", "pids.peak": "51\n"}, "processes"),
])  # fmt: skip
def test_what_v2_says_of_limits(tmp_path: Path, files: dict[str, str], over: str | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert Files(tmp_path, 2).over() == over


@pytest.mark.parametrize(("kills", "most", "over"), [
    (0, 100 << 20, None), (1, 100 << 20, "memory"),
    (1, (100 << 20) - 4096, "memory"), (1, 50 << 20, "machine"),
])  # fmt: skip
def test_what_v1_says_of_limits(tmp_path: Path, kills: int, most: int, over: str | None) -> None:
    (tmp_path / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    (tmp_path / "memory.max_usage_in_bytes").write_text(f"{most}\n")
    assert Files(tmp_path, 1).over() == over
    assert Files(tmp_path, 1, memory=None).over() is None


def test_only_groups_of_processes_that_are_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, mine = cgroups.pid_namespace(), os.getpid()
    start = cgroups.start_time(mine)
    stay = [f"imagefactory-{here}-{mine}-{start}", f"imagefactory-{here + 1}-{mine}-7", "user.slice",
            f"ximagefactory-{here}-{mine}-7"]  # fmt: skip
    go = [f"imagefactory-{here}-{mine}-{start - 1}", f"imagefactory-{here}-{2**22 + 1}-{start}"]
    for name in (*stay, *go):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(cgroups, "end_all", lambda folder: None)
    remove_stale(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(stay)


def test_refusals_have_a_reason() -> None:
    found = find_parent("", "", lambda _: CgroupFolder())
    assert isinstance(found, NoCgroup)


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
    monkeypatch.setattr(cgroups.os, "fstatvfs", lambda _: files)
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
    assert Watch({**NONE, **limits}, shown, directories=[str(scratch)]).over() == over


def test_a_process_that_hides_its_memory_is_counted_whole(
    shown: tuple[int, int, int], tmp_path: Path
) -> None:
    (tmp_path / "proc/2/smaps_rollup").unlink()
    limits = {**NONE, "memory": (107 + 12 + 4) * K}  # 2 whole, 7 by its share, files in memory
    assert Watch(limits, shown, directories=[str(tmp_path)]).over() is None
    limits["memory"] -= 1
    again = (os.open(tmp_path / "proc", os.O_RDONLY), *shown[1:])
    assert Watch(limits, again, directories=[str(tmp_path)]).over() == "memory"


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
    assert Watch(limits, shown, directories=[str(folders[0])]).over() is None
    again = (os.open(tmp_path / "proc", os.O_RDONLY), *shown[1:])
    assert Watch(limits, again, directories=list(map(str, folders))).over() == "scratch"


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
