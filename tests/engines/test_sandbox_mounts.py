"""Folders of the host that a command may read: nothing in them answers, takes writes or is locked."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.children import LIMIT, child, wait_for
from tests.services.sandbox import ORDINARY_UID, Caller

# Locks of each kind, on each file that is shown; then it waits, and says so.
LOCKS = """
import fcntl, glob, os, struct
for path in ("/shown/file", "/one"):
    held = os.open(path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    for kind, take in (("posix", fcntl.F_SETLK), ("ofd", 37)):
        fcntl.fcntl(os.open(path, os.O_RDONLY), take, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
    try: fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except PermissionError: pass
open("/out/ready", "w").close()
import time
while not os.path.exists("/out/gate"): time.sleep(0.02)
"""
CHANGES = """
import os, socket
def see(path):
    try: return open(path).read()
    except OSError as error: return type(error).__name__
names = ("replaced", "made", "sub/made", "removed")
print([see("/shown/" + name) for name in names], flush=True)
open("/out/ready", "w").close()
import time
after = ["new"] * 3 + ["FileNotFoundError"]
while [see("/shown/" + name) for name in names] != after: time.sleep(0.02)
"""


@pytest.fixture
def folder(caller: Caller) -> Iterator[Path]:
    made = caller.ground / f"mounts-{caller.name}"
    (made / "work/sub").mkdir(parents=True)
    (made / "out").mkdir()
    (made / "work/file").write_text("host")
    give(caller, made)
    yield made
    shutil.rmtree(made)


def give(caller: Caller, folder: Path) -> None:
    if caller.name == "user":
        for path in (folder, *folder.rglob("*")):
            os.chown(path, ORDINARY_UID, ORDINARY_UID)


def mounts(folder: Path, how: bool = False) -> list[list[object]]:
    return [
        [str(folder / "work"), "/shown", how],
        [str(folder / "work/file"), "/one", how],
        [str(folder / "out"), "/out", True],
    ]


def test_no_socket_answers_and_no_pipe_is_read(caller: Caller, folder: Path) -> None:
    """By their paths, by descriptors of the folder, by links."""
    os.mkfifo(folder / "work/sub/pipe")
    with contextlib.ExitStack() as opened:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            listening = opened.enter_context(socket.socket(socket.AF_UNIX, kind))
            with at(folder / "work/sub"):
                listening.bind(f"socket-{int(kind)}")
            if kind != socket.SOCK_DGRAM:
                listening.listen()
        for path in (folder / "work/sub").iterdir():
            path.chmod(0o777)
        give(caller, folder)
        reader = os.open(folder / "work/sub/pipe", os.O_RDONLY | os.O_NONBLOCK)
        code = f"""
        import os, socket
        os.chdir("/tmp")
        os.symlink("/shown/sub", "link")
        place = os.open("/shown/sub", os.O_PATH)
        for start in ("/shown/sub", "link", f"/proc/self/fd/{{place}}"):
            for kind in ({int(socket.SOCK_STREAM)}, {int(socket.SOCK_DGRAM)}, {int(socket.SOCK_SEQPACKET)}):
                with socket.socket(socket.AF_UNIX, kind) as client:
                    try: print("answers", client.connect(f"{{start}}/socket-{{kind}}"))
                    except ConnectionRefusedError: pass
            try: print("is read", os.open(f"{{start}}/pipe", os.O_WRONLY | os.O_NONBLOCK))
            except OSError: pass
            both = os.open(f"{{start}}/pipe", os.O_RDWR | os.O_NONBLOCK)
            os.write(both, b"from the image")
            os.close(both)
        """
        assert caller.python(code, mounts=mounts(folder)) == ""
        assert os.read(reader, 99) == b""
        os.close(reader)


def test_who_asks_for_sockets_has_them(caller: Caller, folder: Path) -> None:
    """By :rw, by :bind, or by a mount of the socket itself."""
    with socket.socket(socket.AF_UNIX) as listening:
        with at(folder / "work"):
            listening.bind("socket")
        listening.listen()
        (folder / "work/socket").chmod(0o777)
        code = "import socket; socket.socket(socket.AF_UNIX).connect('{}'); print('answers')"
        shown = str(folder / "work")
        assert caller.python(code.format("/shown/socket"), mounts=[[shown, "/shown", True]]) == "answers"
        assert (
            caller.python(code.format("/shown/socket"), mounts=[[shown, "/shown", False, True]]) == "answers"
        )
        itself = [[f"{shown}/socket", "/socket", False]]
        assert caller.python(code.format("/socket"), mounts=itself) == "answers"


def test_no_lock_holds_on_the_host(caller: Caller, folder: Path) -> None:
    with inside(caller, folder, LOCKS):
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            fd = os.open(folder / "work/file", os.O_RDWR | os.O_NONBLOCK)  # a lease would refuse it
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)


def test_what_the_host_changes_is_seen(caller: Caller, folder: Path) -> None:
    """An overlay keeps what it has looked up, for ever if nobody makes it forget."""
    work = folder / "work"
    for name in ("replaced", "removed"):
        (work / name).write_text("old")
    give(caller, folder)
    with inside(caller, folder, CHANGES):
        for name in ("replaced", "made", "sub/made"):
            (folder / "new").write_text("new")
            (folder / "new").chmod(0o644)
            (folder / "new").rename(work / name)
        (work / "removed").unlink()


@contextlib.contextmanager
def inside(caller: Caller, folder: Path, code: str) -> Iterator[None]:
    """The code has said that it is ready; it is let go at the end, and must end well."""
    command = caller.command({"argv": ["python3", "-c", code], "mounts": mounts(folder), "capture": False})
    with child(command, env=caller.environment(), stdin=subprocess.DEVNULL) as run:
        ready = folder / "out/ready"
        wait_for(lambda: ready.exists() or run.poll() is not None, "the command to be ready")
        yield
        (folder / "out/gate").touch()
        assert run.wait(timeout=LIMIT) == 0


def test_nothing_is_written_and_no_time_of_access_changes(caller: Caller, folder: Path) -> None:
    file = folder / "work/file"
    os.utime(file, (1, 1))
    before = file.stat()
    code = """
    import os
    for call in (
        lambda p: os.chmod(p, 0o600), lambda p: os.utime(p), lambda p: os.setxattr(p, "user.a", b"1"),
        lambda p: os.truncate(p, 0), lambda p: os.link(p, "/shown/two"), lambda p: os.rename(p, "/shown/two"),
        lambda p: os.unlink(p), lambda p: os.mkfifo("/shown/pipe"), lambda p: os.symlink("a", "/shown/link"),
        lambda p: os.link(p, "/tmp/two"),
        lambda p: os.open(f"/proc/self/fd/{os.open(p, os.O_RDONLY)}", os.O_RDWR),
        lambda p: os.open(f"/proc/self/fd/{os.open(p, os.O_PATH)}", os.O_WRONLY),
    ):
        for path in ("/shown/file", "/one"):
            try: print("written", call(path))
            except OSError: pass
    print(open("/shown/file").read(), open("/one").read())
    """
    assert caller.python(code, mounts=mounts(folder)) == "host host"
    after = file.stat()
    assert (after.st_atime, after.st_mode, after.st_nlink, after.st_ctime) == (
        before.st_atime, before.st_mode, before.st_nlink, before.st_ctime,
    )  # fmt: skip
    assert sorted(path.name for path in (folder / "work").iterdir()) == ["file", "sub"]


def test_devices_and_setuid_programs_of_the_folder_are_nothing(caller: Caller, folder: Path) -> None:
    shutil.copy("/usr/bin/id", folder / "work/id")
    (folder / "work/id").chmod(0o4755)
    if os.geteuid() == 0:
        os.mknod(folder / "work/disk", 0o20666, os.makedev(1, 5))
    code = """
    import os, subprocess
    print(subprocess.run(["/shown/id", "-u"], capture_output=True).stdout)
    try: print("opened", open("/shown/disk", "rb").read(1))
    except OSError: pass
    """
    assert caller.python(code, mounts=mounts(folder), uid=65534) == "b'65534\\n'"


def test_where_a_disk_is_mounted_below_is_an_error(caller: Caller, folder: Path) -> None:
    """An ordinary user's overlay could show what the mount covers, so the kernel makes none. Never a bind."""
    libc = ctypes.CDLL(None, use_errno=True)
    below = os.fsencode(folder / "work/sub")
    assert libc.mount(b"none", below, b"tmpfs", 0, b"mode=0777") == 0
    try:
        told = caller.run("true", mounts=mounts(folder))
        assert (told["error"], told["code"]) == ("UsageError", "overlay-mount-failed"), told
        assert str(folder / "work/sub") in str(told["message"])
        assert ":bind" in str(told["hint"])
        plain = [[str(folder / "work"), "/shown", False, True]]
        assert caller.run("ls", "/shown", mounts=plain).get("error") is None
    finally:
        assert libc.umount2(below, 2) == 0


def test_what_no_overlay_takes_is_an_error(caller: Caller) -> None:
    told = caller.run("true", mounts=[["/proc/sys", "/shown", False]])
    assert (told["error"], told["code"]) == ("UsageError", "overlay-mount-failed"), told
    assert "/proc/sys" in str(told["message"])
    assert ":bind" in str(told["hint"])


def test_names_with_all_signs_are_shown(caller: Caller, folder: Path) -> None:
    """Of the folder's name nothing becomes an option of the overlay."""
    strange = folder / "a:b,upperdir=c\\d\n,x"
    strange.mkdir()
    (strange / "f:i,l\\e\n").write_text("host")
    give(caller, folder)
    shown = [[str(strange), "/a", False], [str(strange / "f:i,l\\e\n"), "/b", False]]
    code = "import os; print(os.listdir('/a') == ['f:i,l\\\\e\\n'], open('/b').read())"
    assert caller.python(code, mounts=shown) == "True host"


def test_many_folders_are_shown(caller: Caller, folder: Path) -> None:
    shown = []
    for number in range(300):
        (folder / f"work/{number}").mkdir()
        shown.append([str(folder / f"work/{number}"), f"/m/{number}", False])
    give(caller, folder)
    assert caller.python("import os; print(len(os.listdir('/m')))", mounts=shown) == "300"


@contextlib.contextmanager
def at(folder: Path) -> Iterator[None]:
    """A socket's path is short: it is bound from its folder."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)
