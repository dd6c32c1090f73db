"""Images that want the whole machine, held to small bounds for real, as root and as an ordinary user."""

from __future__ import annotations

import textwrap

import pytest

from imagefactory.trees import remove_tree
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
