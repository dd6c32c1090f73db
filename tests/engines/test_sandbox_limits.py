"""Images that want the whole machine, held to small bounds for real, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest

from imagefactory.runtime.sandbox.cgroups import CgroupParent, Group, NoCgroup, find_parent, look_at, read_own
from imagefactory.trees import remove_tree
from tests.services.children import wait_for
from tests.services.sandbox import Caller, scratch_folders

# Each goes on until somebody ends it: where a bound did not hold, the test's own limit would.
FORKS = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
THREADS = """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(1000,)).start()
    except RuntimeError: pass
"""
MEMORY = "held = []\nwhile True: held.append(bytearray(1 << 20))"
SHARED = """
import os
held = []
while True:
    held.append(bytearray(16 << 20))
    if os.fork() == 0:
        held = bytearray(32 << 20)
        while True: os.sched_yield()
"""
FILE = 'file = open("{}", "wb")\nwhile True: file.write(bytes(1 << 16)); file.flush()'
FILES = """
import os
for number in range(10**9):
    os.makedirs(f"/var/open/{number}")
    open(f"/var/open/{number}/empty", "w").close()
"""


SLOW_FILES = """
import time
for number in range(10**9):
    open(f"/var/open/{number}", "w").close()
    if number % 100 == 0: time.sleep(0.04)
"""


@pytest.mark.parametrize(("code", "limit", "amount"), [
    (FORKS, "processes", 50), (THREADS, "processes", 50), (MEMORY, "memory", 256 << 20),
    (SHARED, "memory", 256 << 20), (FILE.format("/var/open/file"), "scratch", 10 << 20),
    (FILE.format("/tmp/file"), "scratch", 10 << 20), (FILES, "scratch", 1 << 20),
], ids=["forks", "threads", "one hog", "many hogs", "file", "tmp", "empty files"])  # fmt: skip
def test_who_takes_too_much_is_ended_with_all_it_started(
    caller: Caller, code: str, limit: str, amount: int
) -> None:
    done = caller.run("python3", "-c", textwrap.dedent(code), limits=[[limit, amount]], timeout=60)
    assert (done.get("returncode"), done["timed_out"]) == (137, False), done
    said, hint = done["over"]
    assert f"limit {limit}=" in said
    assert f"--limit {limit}=" in hint
    assert said in done["stderr"]
    assert scratch_folders(caller) == []


def test_a_folder_to_write_counts_as_scratch_where_it_says_so(caller: Caller) -> None:
    out = caller.store / "out"
    out.mkdir(mode=0o777, exist_ok=True)
    out.chmod(0o777)
    hidden = FILE.format("/out/d/file").replace("\n", "\nos.chmod('/out/d', 0)\n")
    hidden = f"import os; os.mkdir('/out/d')\n{hidden}"
    for code in (FILE.format("/out/file"), hidden):
        mounts = [[str(out), "/out", True, "scratch"]]
        limits = [["scratch", 10 << 20]]
        done = caller.run("python3", "-c", code, limits=limits, mounts=mounts, timeout=60)
        assert (done.get("returncode"), done["timed_out"]) == (137, False), done
        remove_tree(out / "file")
        remove_tree(out / "d")
    write = "open('/out/file', 'wb').write(bytes(20 << 20)); import time; time.sleep(1)"
    done = caller.run("python3", "-c", write, limits=limits, mounts=[[str(out), "/out", True]])
    assert done["returncode"] == 0
    remove_tree(out / "file")


def test_a_co_process_is_bounded_too(caller: Caller) -> None:
    done = caller.run("python3", "-c", FORKS, mode="start", limits=[["processes", 50]])
    assert done["returncode"] == 137


def test_who_ends_a_run_need_not_wait_among_those_it_started(caller: Caller) -> None:
    """Else a fork bomb of root's has taken every process number of a busy machine before it is ended."""
    said = caller.python(
        """
        import os
        print([(os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK) == os.SCHED_RR for pid in (1, 0)])
        """
    )
    assert said == f"[{caller.name == 'root'}, False]"


def test_a_sleeper_is_ended_when_its_time_is_over(caller: Caller) -> None:
    done = caller.run("sleep", "1000", timeout=2)
    assert (done["timed_out"], done["over"]) == (True, ["", ""])
    assert 2 <= float(str(done["seconds"])) < 60


def test_scratch_in_memory_has_the_limit_as_its_size(caller: Caller) -> None:
    text = caller.python(
        """
        import errno, os
        try:
            with open("/tmp/file", "wb") as file:
                while True: file.write(bytes(1 << 16))
        except OSError as error: print(errno.errorcode[error.errno], os.stat("/tmp/file").st_size)
        shared = os.statvfs("/dev/shm")
        print(shared.f_blocks * shared.f_frsize)
        """,
        read_only=True,
        limits=[["scratch", 10 << 20], ["memory", 1 << 30]],
    )
    code, size, shared = text.split()
    assert (code, int(shared)) == ("ENOSPC", 512 << 20)
    assert int(size) <= 10 << 20


def test_open_files_are_bounded_and_what_is_lifted_is_not(caller: Caller) -> None:
    code = """
    import resource
    print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_NPROC)[1])
    """
    lifted = [["processes", None], ["memory", None], ["scratch", None]]
    assert caller.python(code, limits=[["files", 100], ["processes", 70]]) == "(100, 100) 72"
    assert caller.python(code, limits=[["files", 100], *lifted]).startswith("(100, 100) ")


def test_shared_pages_are_counted_once(caller: Caller) -> None:
    """As data loaders have them: forked from a process that holds much and written to by none."""
    text = caller.python(
        """
        import mmap, os, time
        held = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for place in range(0, len(held), 4096): held[place] = 1
        children = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                sum(held[place] for place in range(0, len(held), 4096))
                time.sleep(1)
                os._exit(0)
            children.append(child)
        print([os.waitpid(child, 0)[1] for child in children])
        """,
        limits=[["memory", 300 << 20]],
    )
    assert text == "[0, 0, 0, 0]"


def test_what_runs_inside_cannot_shield_itself_where_memory_ends(caller: Caller) -> None:
    """The kernel ends the run before anything else of the machine: no process in it may say otherwise."""
    text = caller.python(
        """
        import errno, os
        child = os.fork()
        if child == 0:
            os.execvp("sleep", ["sleep", "1000"])
        tried, accepted = 0, []
        task = f"self/task/{os.getpid()}"
        for base in ("self", "thread-self", "1", str(child), task, "self/root/proc/self"):
            for folder, _, names in os.walk(f"/proc/{base}", followlinks=False):
                if "/task/" in folder.removeprefix(f"/proc/{base}") or folder.endswith(("/net", "/fd")):
                    continue
                for name in names:
                    if os.path.islink(f"{folder}/{name}"): continue
                    tried += 1
                    try:
                        os.open(f"{folder}/{name}", os.O_WRONLY | os.O_NONBLOCK)
                        accepted.append(f"{folder}/{name}")
                    except OSError as error:
                        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT): raise
        kept = [open(f"/proc/{pid}/oom_score_adj").read().strip() for pid in (1, child, "self")]
        print(accepted, tried > 100, kept, flush=True)
        with open("/dev/stdout", "w") as file: print("opened again", file=file, flush=True)
        os.kill(child, 9)
        """
    )
    told = text.splitlines()
    assert told == ["[] True ['1000', '1000', '1000']", "opened again"]


INOTIFY = """
import ctypes, time
init = ctypes.CDLL(None, use_errno=True).inotify_init1
instances = 0
while init(0) >= 0: instances += 1
"""


def test_what_the_kernel_counts_by_user_is_left_to_the_caller_too(caller: Caller) -> None:
    read = (
        "import resource as r; print(r.getrlimit(r.RLIMIT_MSGQUEUE)[1], r.getrlimit(r.RLIMIT_SIGPENDING)[1])"
    )
    here = [resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING)]
    assert caller.python(read) == " ".join(str(amount if amount < 0 else amount // 4) for amount in here)
    whole = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    assert caller.python(INOTIFY + "print(instances)") == str(whole // 4)
    code = f"{INOTIFY}print(instances, flush=True)\ntime.sleep(1000)"
    run = subprocess.Popen(
        caller.command({"argv": ["python3", "-c", code], "capture": False}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, env=caller.environment(), cwd="/",
    )  # fmt: skip
    with run:
        assert run.stdout is not None
        assert int(run.stdout.readline()) == whole // 4
        again = caller.python(INOTIFY + "print(instances)")  # another run of the same caller has its own
        run.terminate()
    assert again == str(whole // 4)


def test_files_in_memory_are_bounded_in_number_too(caller: Caller) -> None:
    code = """
    import os
    print([os.statvfs(path).f_files for path in ("/tmp", "/dev/shm")])
    print(open("/proc/sys/user/max_user_namespaces").read().strip())
    """
    limits = [["scratch", 10 << 20], ["memory", 1 << 30]]
    assert caller.python(code, read_only=True, limits=limits).splitlines() == ["[2560, 131072]", "0"]


def test_pseudo_terminals_are_bounded(caller: Caller) -> None:
    code = """
    import os
    held = []
    try:
        while True: held.append(os.openpty())
    except OSError: print(len(held))
    """
    assert 100 < int(caller.python(code)) <= 256


def test_a_reserve_of_the_disks_inodes_is_left(caller: Caller) -> None:
    folder = Path(tempfile.mkdtemp(prefix="imagefactory-inodes-"))
    options = f"nr_inodes=8000,mode=0755,uid={caller.store.stat().st_uid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        caller.store = folder
        done = caller.run("python3", "-c", SLOW_FILES, limits=[["scratch", 1 << 30]], timeout=60)
        assert done.get("returncode") == 137, done
        assert "inodes" in done["over"][0]  # type: ignore[index]
        assert scratch_folders(caller) == []
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


# Kinds of memory that no process has mapped, or that is the kernel's own, for a run.
PAGE_TABLES = """
import mmap
held = []
while True:
    held.append(mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000))
    held[-1].madvise(mmap.MADV_NOHUGEPAGE)
    for place in range(0, 1 << 40, 2 << 20): held[-1][place]
"""
SYSTEM_V = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
while True:
    place = libc.shmat(libc.shmget(0, 1 << 20, 0o1600), None, 0)
    ctypes.memset(place, 1, 1 << 20)
    libc.shmdt(ctypes.c_void_p(place))
"""
SHARED_FILES = """
held = bytearray(110 << 20)
with open("/dev/shm/file", "wb") as file:
    while file.tell() < 95 << 20: file.write(bytes(1 << 20)); file.flush()
while True: pass
"""
UNMAPPED = """
import os
held = []
while True:
    held.append(os.memfd_create("held"))
    os.write(held[-1], bytes(1 << 20))
"""
SOCKETS = """
import socket
held = []
while True:
    held.append(socket.socketpair())
    held[-1][0].setblocking(False)
    try:
        while True: held[-1][0].send(bytes(4096))
    except BlockingIOError: pass
"""


def group_of(caller: Caller) -> CgroupParent | None:
    """Where the groups of this caller's runs are made; None where the watch alone counts."""
    found = find_parent(*read_own(), look_at)
    return found if caller.name == "root" and isinstance(found, CgroupParent) else None


@pytest.mark.parametrize(("code", "by_the_kernel_alone"), [
    (PAGE_TABLES, False), (SYSTEM_V, False), (SHARED_FILES, False), (UNMAPPED, True), (SOCKETS, True),
], ids=["page tables", "System V", "dev shm", "memfd", "sockets"])  # fmt: skip
def test_memory_of_every_kind_counts(caller: Caller, code: str, by_the_kernel_alone: bool) -> None:
    if by_the_kernel_alone and group_of(caller) is None:
        pytest.skip(
            "no cgroup for this caller, and nothing else counts this memory (docs/reference/limits.md)"
        )
    done = caller.run("python3", "-c", code, limits=[["memory", 200 << 20]], timeout=60)
    assert (done.get("returncode"), done["timed_out"]) == (137, False), done
    assert "limit memory=200M" in done["over"][0]  # type: ignore[index]


def test_scratch_in_memory_is_memory(caller: Caller) -> None:
    limits = [["memory", 200 << 20], ["scratch", 1 << 30]]
    done = caller.run("python3", "-c", FILE.format("/tmp/file"), read_only=True, limits=limits, timeout=60)
    assert (done.get("returncode"), done["timed_out"]) == (137, False), done
    assert "limit memory=200M" in done["over"][0]  # type: ignore[index]


def test_the_kernel_ends_the_run_that_is_over_and_none_beside_it(caller: Caller) -> None:
    """Another run, and this process: in the same groups as the one that is ended."""
    command = caller.command(
        {"argv": ["python3", "-c", "print('up', flush=True); input()"], "capture": False}
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=caller.environment(), cwd="/", text=True, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "up\n"
        done = caller.run("bash", "-c", f"python3 -c '{MEMORY}'; true", limits=[["memory", 100 << 20]])
        other.communicate("still there\n")
    assert (done.get("returncode"), other.returncode) == (137, 0), done
    assert "limit memory=100M" in done["over"][0]  # type: ignore[index]


@pytest.mark.parametrize("sweeper_too", [False, True], ids=["keeper", "keeper and sweeper"])
def test_a_killed_keepers_group_is_removed(caller: Caller, sweeper_too: bool) -> None:
    parent = group_of(caller)
    if parent is None:
        pytest.skip("no cgroup for this caller: nothing to remove")
    command = caller.command(
        {"argv": ["python3", "-c", "print('up', flush=True); input()"], "capture": False}
    )
    with subprocess.Popen(
        command, env=caller.environment(), cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        (keeper,) = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
        children = list(map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()))
        groups = [
            path for folder in {parent.memory, parent.pids} for path in Path(folder).glob(f"*-{keeper}-*")
        ]
        assert groups
        inside = [int(pid) for path in groups for pid in (path / "cgroup.procs").read_text().split()]
        assert set(inside) & set(children)  # the init
        for pid in [pid for pid in children if sweeper_too and pid not in inside]:
            os.kill(pid, signal.SIGKILL)
        os.kill(keeper, signal.SIGKILL)
    if sweeper_too:  # then any later run removes them
        caller.run("true", limits=[["memory", 1 << 30]])
    wait_for(lambda: not any(path.exists() for path in groups), "the groups are removed")


def test_where_memory_ends_the_run_ends_and_not_its_bystander(caller: Caller) -> None:
    """In a group that stands for a small machine: a run without limits takes it all, and shields itself."""
    parent = find_parent(*read_own(), look_at)
    if isinstance(parent, NoCgroup):
        pytest.skip(f"no cgroup that stands for a small machine: {parent.reason}")
    shielded = f"""
for pid in (1, "self"):
    try: open(f"/proc/{{pid}}/oom_score_adj", "w").write("0")
    except OSError: pass
{UNMAPPED}"""
    spec = {
        "argv": ["python3", "-c", shielded],
        "timeout": 60,
        "limits": [["memory", None], ["processes", None]],
    }
    large = "held = bytearray(150 << 20)\nprint('up', flush=True)\ninput()"
    machine = Group(parent, memory=400 << 20, processes=None)
    try:
        if parent.version == 2:
            Path(machine.memory, "memory.oom.group").write_text("0")

        def enter() -> None:
            Path(machine.memory, "cgroup.procs").write_text("0")

        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "preexec_fn": enter}
        with subprocess.Popen(["python3", "-c", large], **pipes) as bystander:  # type: ignore[call-overload]
            assert bystander.stdout.readline() == "up\n"
            done = subprocess.run(
                caller.command(spec), cwd="/", check=True,
                env=caller.environment(), capture_output=True, preexec_fn=enter,
            )  # fmt: skip
            bystander.communicate("\n")
        assert bystander.returncode == 0
        ended = json.loads(done.stdout)
        assert (ended["returncode"], ended["timed_out"]) == (137, False), ended
    finally:
        machine.end()
