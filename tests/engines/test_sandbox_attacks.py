"""Images that want to reach the host while their sandbox is made: as root and as an ordinary user."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagefactory.runtime import sandbox
from tests.services.children import LIMIT, child, wait_for
from tests.services.sandbox import ORDINARY_UID, Caller, add_layer, entry, init_of

# Whatever folder of the host an open descriptor stands for, this is a path out of it.
UP = "../" * 24
DESCRIPTORS, LEAKED = range(3, 13), (4, 5, 7)
NESTED = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
print(errno.errorcode[ctypes.get_errno()] if libc.unshare(0x10000000) else "a namespace of its own")
"""


def with_links(caller: Caller, links: dict[str, str]) -> Caller:
    """The same caller with an image in which the given paths are links."""
    made = [(entry(name, mode=0o777, kind=tarfile.SYMTYPE, link=link), b"") for name, link in links.items()]
    layer = add_layer(caller.ground / "blobs", f"links-{caller.name}", made)
    return Caller(caller.name, caller.ground, caller.store, [*caller.layers, layer])


@pytest.fixture
def caller(caller: Caller) -> Caller:
    """With a store of its own: what an attack unpacks there, other tests cannot always look through."""
    store = caller.ground / f"attacked-{caller.name}"
    store.mkdir(exist_ok=True)
    own(caller, store)
    return Caller(caller.name, caller.ground, store, caller.layers)


def own(caller: Caller, path: Path) -> Path:
    if caller.name == "user":
        os.chown(path, ORDINARY_UID, ORDINARY_UID)
    return path


@pytest.fixture
def folder(caller: Caller) -> Iterator[Path]:
    """A folder of the host that the caller may write to."""
    made = caller.ground / f"folder-{caller.name}"
    made.mkdir()
    yield own(caller, made)
    shutil.rmtree(made)


@pytest.fixture
def shown(folder: Path, caller: Caller) -> Path:
    """A folder to mount, with a file and what looks like the kernel's settings."""
    settings = folder / "shown/user"
    settings.mkdir(parents=True)
    (folder / "shown/file").write_text("host")
    (settings / "max_user_namespaces").write_text("1234")
    for path in (settings.parent, settings, settings.parent / "file", settings / "max_user_namespaces"):
        own(caller, path)
    return folder / "shown"


def under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- links, while the root is made -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "target", "source"),
    [
        ("etc/hosts", "", ""),
        ("etc/resolv.conf", "", ""),
        ("data", "/data", "."),
        ("data", "/data/chain/of/folders", "."),
        ("data", "/data", "file"),
    ],
)
def test_no_link_through_proc_makes_anything_on_the_host(
    caller: Caller, shown: Path, link: str, target: str, source: str
) -> None:
    """By any of the descriptors that the processes which make a sandbox ever had."""
    before = under(shown.parent)
    mounts = [[str(shown / source), target, True]] if target else []
    for number in LEAKED if target else DESCRIPTORS:
        image = with_links(caller, {link: f"/proc/self/fd/{number}/{UP}{shown.parent}/made"})
        told = image.run("true", mounts=mounts, network=link.endswith("resolv.conf"))
        assert under(shown.parent) == before
        assert (told["error"], told["code"]) == ("StoreError", "mount-target-reserved"), told
        assert f"leads {target or '/' + link} to /proc" in str(told["message"])


@pytest.mark.parametrize(
    "link",
    ["/proc/sys", "../../../proc/sys", "second", "usr/../proc/./sys/", "/proc", "/sys", "/dev", "/dev/null",
     "/sys/fs/cgroup", "/", "..", "/proc/self/root", "/proc/self/cwd/proc/sys", "/proc/1/root/proc/sys"],
)  # fmt: skip
def test_no_mount_covers_what_the_sandbox_is_made_of(caller: Caller, shown: Path, link: str) -> None:
    """Else its init would write settings to the host's files, and have set nothing."""
    image = with_links(caller, {"data": link, "second": "etc/../third", "third": "/proc/sys"})
    for target in ("/data", "/data/user"):
        if link in ("/", "..") and target == "/data/user":
            continue  # that is /user, a place like others
        told = image.run("python3", "-c", NESTED, mounts=[[str(shown), target, True]])
        assert (told["error"], told["code"]) == ("StoreError", "mount-target-reserved"), told
        assert f"leads {target} to /" in str(told["message"])
        assert (shown / "user/max_user_namespaces").read_text() == "1234"
    assert under(shown) == ["file", "user", "user/max_user_namespaces"]


def test_no_nested_user_namespace_with_mounts_anywhere(caller: Caller, shown: Path) -> None:
    mounts = [[str(shown), target, True] for target in ("/data", "/etc", "/proc2", "/tmp", "/usr/local")]
    assert caller.python(NESTED, mounts=mounts) in ("EPERM", "ENOSPC")
    assert (shown / "user/max_user_namespaces").read_text() == "1234"


def test_links_that_stay_in_the_image_are_followed(caller: Caller, shown: Path) -> None:
    """As honest images have them: to a folder that is there, to one that is not yet, by a chain."""
    name = "n\nl " + "x" * 200
    image = with_links(
        caller,
        {
            "data": "var/open",
            "abs": "/opt/lower",
            "dangling": "../srv/made/here",
            "chain": "./chain2",
            "chain2": f"/opt/{name}",
            "etc/resolv.conf": "../run/systemd/resolve/stub-resolv.conf",
            "etc/hosts": "/etc/hosts.image",
            "top": "/",
        },
    )
    code = f"""
    for path in ("/var/open/file", "/opt/lower/file", "/srv/made/here/file", {f"/opt/{name}/file"!r},
                 "/top/of/all/file", "/of/all/file", "/srv/file"):
        print(open(path).read(), end=" ")
    print(open("/etc/hosts.image").read().count("imagefactory"), open("/etc/hosts").read().count("localhost"))
    print(open("/run/systemd/resolve/stub-resolv.conf").read() == open("/etc/resolv.conf").read())
    """
    mounts = [
        *([str(shown), target, False] for target in ("/data", "/abs", "/dangling", "/chain", "/top/of/all")),
        [str(shown / "file"), "/srv/file", False],
    ]
    assert image.python(code, mounts=mounts, network=True).split("\n") == ["host " * 7 + "1 2", "True"]


@pytest.mark.parametrize(
    ("links", "word"),
    [
        ({"data": "data"}, "symbolic links"),
        ({"data": "a", "a": "b/x", "b": "a"}, "symbolic links"),
        ({"data": "x" * 300}, "too long"),
        ({"data": "x/" * 1900}, "too long"),
        ({"data": "opt/file/in"}, "Not a directory"),
        ({"data": "opt/file"}, "Not a directory"),  # a folder on a file
    ],
)
def test_links_to_nowhere_are_told(caller: Caller, shown: Path, links: dict[str, str], word: str) -> None:
    told = with_links(caller, links).run("true", mounts=[[str(shown), "/data", True]])
    assert (told["code"], word in str(told["message"])) == ("mount-failed", True), told
    assert "/data" in str(told["message"])


@pytest.mark.parametrize(
    "mounts",
    [[("", "/etc/hosts")], [("file", "/tmp")], [("", "/etc/hosts/in")], [("file", "/a"), ("", "/a")],
     [("file", "/a"), ("file", "/a/b")]],
)  # fmt: skip
def test_mounts_that_contradict_each_other_are_told(
    caller: Caller, shown: Path, mounts: list[tuple[str, str]]
) -> None:
    told = caller.run("true", mounts=[[str(shown / source), target, True] for source, target in mounts])
    assert (told["error"], told["code"]) == ("UsageError", "mount-failed"), told
    assert not list((caller.store / "run").iterdir())


def test_a_mount_on_a_mount_finds_its_links_in_the_image(caller: Caller, folder: Path, shown: Path) -> None:
    """What an earlier run left in a writable mount is no more to be trusted than the image."""
    outer = folder / "outer"
    outer.mkdir()
    own(caller, outer)
    leave = """
    import os
    os.symlink({out!r}, "/outer/in"); os.symlink("/proc/self/fd/4/../..", "/outer/proc")
    os.symlink("../opt/lower", "/outer/fine")
    """
    out = str(folder / "made")
    caller.python(leave.format(out=out), mounts=[[str(outer), "/outer", True]])
    for name, error in (("in", None), ("in/deep/er", None), ("proc", "StoreError"), ("fine", None)):
        mounts = [[str(outer), "/outer", True], [str(shown), f"/outer/{name}", False]]
        told = caller.run("cat", f"/outer/{name}/file", mounts=mounts)
        assert told.get("error") == error, told
        assert error or told["stdout"] == "host"
    assert not (folder / "made").exists()
    assert under(outer) == ["fine", "in", "proc"]


def test_links_swapped_while_sandboxes_are_made(caller: Caller, folder: Path, shown: Path) -> None:
    """A folder and a link to the host take turns in the place of a target, as fast as they can."""
    outer, victim = folder / "outer", folder / "victim"
    for path in (outer, victim):
        path.mkdir()
        own(caller, path)
    stop = threading.Event()

    def swap() -> None:
        (outer / "link").symlink_to(victim)
        while not stop.is_set():
            for name in ("link", "folder"):
                if name == "folder":
                    (outer / name).mkdir(exist_ok=True)
                with contextlib.suppress(OSError):
                    (outer / name).rename(outer / "in")
                with contextlib.suppress(OSError):
                    (outer / "in").rename(outer / name)
                    shutil.rmtree(outer / "folder", ignore_errors=True)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(8):
            mounts = [[str(outer), "/outer", True], [str(shown), "/outer/in/deep", False]]
            told = caller.run("true", mounts=mounts)
            assert told.get("error") in (None, "UsageError"), told
    finally:
        stop.set()
        swapping.join()
    assert under(victim) == []


def test_dev_and_sys_take_no_part_of_the_image(caller: Caller, shown: Path) -> None:
    layer = add_layer(
        caller.ground / "blobs",
        f"devices-{caller.name}",
        [
            (entry("dev", kind=tarfile.DIRTYPE, mode=0o755), b""),
            (entry("dev/null", kind=tarfile.SYMTYPE, link=str(shown / "made")), b""),
            (entry("sys", kind=tarfile.DIRTYPE, mode=0o755), b""),
            (entry("sys/devices", kind=tarfile.SYMTYPE, link=str(shown)), b""),
        ],
    )
    image = Caller(caller.name, caller.ground, caller.store, [*caller.layers, layer])
    assert image.run("cat", "/dev/null")["stdout"] == ""
    assert image.run("bash", "-c", "test -d /sys/devices/system && ! test -L /sys/devices")["returncode"] == 0
    assert under(shown) == ["file", "user", "user/max_user_namespaces"]


def test_the_drivers_place_is_found_in_the_image_too(caller: Caller, shown: Path) -> None:
    """Devices and files of this machine stand for a GPU and its driver."""
    gpus: dict[str, object] = {
        "devices": ["/dev/full", "/dev/fuse"],
        "libraries": [str(shown / "file")],
        "links": [["libcuda.so.1", "file"]],
        "programs": [str(shown / "user/max_user_namespaces")],
        "driver": "1",
    }
    code = """
    import os
    print(open("/usr/local/nvidia-driver/libraries/libcuda.so.1").read(), os.path.exists("/dev/fuse"),
          open("/usr/local/nvidia-driver/programs/max_user_namespaces").read(), os.listdir("/sys/fs"))
    """
    seen = "host True 1234 []"
    for link in ("", "opt/own"):
        image = with_links(caller, {"usr/local": f"../{link}"} if link else {})
        image.gpus = gpus
        assert image.python(code, gpus=True) == seen
    out = with_links(caller, {"usr/local": f"/proc/self/fd/4/{UP}{shown}"})
    out.gpus = gpus
    told = out.run("true", gpus=True)
    assert (told["error"], told["code"]) == ("StoreError", "mount-target-reserved"), told
    assert "leads /usr/local/nvidia-driver to /proc" in str(told["message"])
    assert under(shown) == ["file", "user", "user/max_user_namespaces"]


# --- descriptors -----------------------------------------------------------------------------------


def test_the_init_holds_nothing_of_the_host(caller: Caller, folder: Path) -> None:
    """Seen from outside, where it can be seen."""
    gate = folder / "gate"
    os.mkfifo(gate)
    own(caller, gate)
    leaked = os.open("/etc", os.O_RDONLY)
    spec: dict[str, object] = {"argv": ["cat", "/gate"], "mounts": [[str(gate), "/gate", False]]}
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with child(caller.command(spec), env=caller.environment(), pass_fds=(leaked,), **silent) as run:
        writer = os.open(gate, os.O_WRONLY)  # until the command reads
        (keeper,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        init = init_of(int(keeper))

        def lets_go() -> bool:  # it may come to that when the command runs already
            held = held_by(init)
            return {held.pop(name) for name in "012"} == {"/dev/null"} and all(
                place.startswith("pipe:") for place in held.values()
            )

        wait_for(lets_go, "the init holds nothing but /dev/null and its pipes")
        os.close(writer)
        os.close(leaked)
        run.wait()


def held_by(pid: int) -> dict[str, str]:
    held = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held[path.name] = str(path.readlink())
    return held


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("capture", [True, False])
def test_a_closed_descriptor_becomes_nothing_else(
    caller: Caller, folder: Path, closed: str, capture: bool
) -> None:
    """The next file that is opened would have its number, and the command that file."""
    code = (
        "import os; print([os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)], file=open('/out/o', 'w'))"
    )
    spec: dict[str, object] = {"argv": ["python3", "-c", code], "mounts": [[str(folder), "/out", True]]}
    command = ["bash", "-c", f'"$@" {closed}', "bash", *caller.command({**spec, "capture": capture})]
    with child(command, env=caller.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.communicate(timeout=LIMIT)
    held = ast.literal_eval((folder / "o").read_text())
    null = {fd for fd in range(3) if held[fd] == "/dev/null"}
    assert {fd for fd in range(3) if not held[fd].startswith("pipe:")} == null
    wanted = {number for number, text in enumerate(("<&-", ">&-", "2>&-")) if text in closed.split()}
    assert capture or null >= wanted


# --- the program that starts the command -----------------------------------------------------------


def with_programs(caller: Caller) -> Caller:
    """Each is /proc/self/exe in another way: by links, by scripts that name it, by one that none may read."""
    script = b"#!/proc/self/exe -cprint('started')\n"
    programs = [
        (entry("usr/bin/link", mode=0o777, kind=tarfile.SYMTYPE, link="/proc/self/exe"), b""),
        (entry("usr/bin/chain", mode=0o777, kind=tarfile.SYMTYPE, link="../../proc/thread-self/exe"), b""),
        (entry("usr/bin/script", mode=0o755), script),
        (entry("usr/bin/closed", mode=0o111), script),
        (entry("usr/bin/second", mode=0o755), b"#!/usr/bin/script\n"),
    ]
    layer = add_layer(caller.ground / "blobs", f"programs-{caller.name}", programs)
    return Caller(caller.name, caller.ground, caller.store, [*caller.layers, layer])


@pytest.mark.parametrize("uid", [0, 65534])
def test_no_command_is_the_hosts_python(caller: Caller, uid: int) -> None:
    """Not to be read there, nor to be written to where the kernel lets a running program be. By Landlock."""
    image = with_programs(caller)
    for name in ("link", "chain", "script", "closed", "second"):
        done = image.run(name, "-c", "print('started')", uid=uid)
        assert (done["returncode"], done["stdout"]) == (126, ""), (name, done)


def test_programs_of_the_sandbox_start_from_anywhere(caller: Caller, folder: Path) -> None:
    """From mounts, from memory and from a file without a name; and files move between folders."""
    code = """
    import os, shutil, subprocess, sys
    for place in ("/tmp", "/dev/shm", "/opt", "/out"):
        shutil.copy("/usr/bin/cat", f"{place}/program")
        os.makedirs(f"{place}/a/b")
        os.rename(f"{place}/program", f"{place}/a/b/moved")
        os.link(f"{place}/a/b/moved", f"{place}/linked")
        assert subprocess.run([f"{place}/linked", "/opt/file"], capture_output=True).stdout == b"image"
    fd = os.memfd_create("program", 0)
    os.write(fd, open("/usr/bin/cat", "rb").read())
    print(subprocess.run([f"/proc/self/fd/{fd}", "/opt/file"], pass_fds=[fd], capture_output=True).stdout)
    shutil.copy(sys.executable, "/tmp/again")
    again = "import os; os.unlink('/tmp/again'); os.execv('/proc/self/exe', ['x', '-c', 'print(42)'])"
    print(subprocess.run(["/tmp/again", "-c", again], capture_output=True).stdout)
    """
    assert caller.python(code, mounts=[[str(folder), "/out", True]]) == "b'image'\nb'42\\n'"


# --- a caller that is gone -------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [b"", b'{"argv": ["tr', b'{"caller": %d}'])
def test_a_keeper_whose_caller_died_says_nothing(plan: bytes) -> None:
    """Its caller died before it wrote the plan, as it wrote, or after."""
    with child(["true"]) as gone:
        gone.wait()
    plan_out, plan_in = os.pipe()
    os.write(plan_in, plan % gone.pid if b"%d" in plan else plan)
    os.close(plan_in)
    program = Path(sandbox.__file__).parent
    command = [sys.executable, "-I", "-S", str(program), str(plan_out), "1"]
    with child(command, pass_fds=(plan_out,), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as keeper:
        os.close(plan_out)
        assert keeper.communicate(timeout=LIMIT) == (b"", b"")
        assert keeper.returncode == 1


def test_an_end_asked_for_before_the_start_is_one(caller: Caller) -> None:
    """It comes as the keeper waits for its turn to make a scratch folder."""
    caller.run("true")  # makes the folder of scratch folders
    turn = os.open(caller.store / "run", os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)
    command = caller.command({"argv": ["sleep", "600"]})
    with child(command, env=caller.environment(), stdout=subprocess.PIPE) as run:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        wait_for(
            lambda: children.read_text() and hears(int(children.read_text()), signal.SIGUSR2),
            "the keeper to take signals",
        )
        os.kill(int(children.read_text()), signal.SIGUSR2)
        os.close(turn)
        assert json.loads(run.communicate(timeout=LIMIT)[0])["returncode"] == 137


def hears(pid: int, number: int) -> bool:
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


REOPEN = """
import os
for fd in (0, 1, 2):
    for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        try:
            os.write(os.open(f"/proc/self/fd/{fd}", flags), b"by the image")
        except OSError:
            pass
    try:
        print(os.listdir(f"/proc/self/fd/{fd}/.."))
    except OSError:
        pass
"""


def test_a_file_of_the_caller_is_read_and_written_and_not_opened_anew(caller: Caller, folder: Path) -> None:
    given, said, wrong = (folder / name for name in ("given", "said", "wrong"))
    for path in (given, said, wrong):
        path.write_text(f"{path.name} before\n")
        own(caller, path)
    script = 'import sys; print("in:", sys.stdin.read().strip()); print("on 2", file=sys.stderr)'
    for code in (script + REOPEN, REOPEN):
        with given.open() as stdin, said.open("a") as stdout, wrong.open("a") as stderr:
            command = caller.command({"argv": ("python3", "-u", "-c", code), "capture": False})
            streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            assert subprocess.run(command, **streams, env=caller.environment(), check=False).returncode == 0
        assert given.read_text() == "given before\n"
        assert said.read_text().startswith("said before\nin: given before\n")
        assert wrong.read_text().startswith("wrong before\non 2\n")
        assert folder.name not in said.read_text()
        assert "given" not in said.read_text().replace("in: given before", "")


def test_a_folder_of_the_caller_leads_nowhere(caller: Caller, folder: Path) -> None:
    (folder / "mine").write_text("")
    with child(
        caller.command({"argv": ("python3", "-c", REOPEN)}),
        stdin=os.open(folder, os.O_RDONLY), stdout=subprocess.PIPE, env=caller.environment(),
    ) as run:  # fmt: skip
        out, _ = run.communicate(timeout=LIMIT)
    assert folder.name.encode() not in out


def test_both_outputs_into_one_file_keep_their_order(caller: Caller, folder: Path) -> None:
    log = folder / "log"
    code = "import os\nfor n in range(2000): os.write(1 + n % 2, b'%d\\n' % n)"
    with log.open("w") as both:
        own(caller, log)
        command = caller.command({"argv": ("python3", "-c", code), "capture": False})
        done = subprocess.run(command, stdout=both, stderr=both, env=caller.environment(), check=False)
        both.write("after\n")
    assert done.returncode == 0
    assert log.read_text().split() == [*map(str, range(2000)), "after"]


def test_much_is_carried_both_ways(caller: Caller, folder: Path) -> None:
    given, said = folder / "given", folder / "said"
    given.write_bytes(os.urandom(1 << 20) * 24)
    with given.open("rb") as stdin, said.open("wb") as stdout:
        command = caller.command({"argv": ("cat",), "capture": False})
        done = subprocess.run(command, stdin=stdin, stdout=stdout, env=caller.environment(), check=False)
    assert done.returncode == 0
    assert said.read_bytes() == given.read_bytes()
    with given.open("rb") as stdin:  # what is not read stops nobody
        command = caller.command({"argv": ("true",), "capture": False})
        assert subprocess.run(command, stdin=stdin, env=caller.environment(), check=False).returncode == 0
