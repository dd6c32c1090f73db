"""Whatever lies in a folder that an image is shown to read: nothing of it answers, changes or is locked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.children import LIMIT, child, wait_for
from tests.services.sandbox import ORDINARY_UID, Caller

KINDS = ("stream", "packets", "datagrams", "pipe", "file", "link", "folder", "device")
PLACES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(["", "a", "a/b", ".hidden", "a,b:c"])), max_size=20
)
# Each attempt on each thing, by several ways to it; what succeeded is said.
IMAGE = r"""
import fcntl, json, os, socket, stat, time
done = []
def attempt(name, call):
    try:
        call()
        done.append(name)
    except (OSError, ValueError): pass
def send(path):
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try: os.write(fd, b"from the image")
    finally: os.close(fd)
for above, _, names in os.walk("/work"):
    place = os.open(above, os.O_PATH)
    for name in names:
        for path in (f"{above}/{name}", f"/proc/self/fd/{place}/{name}", f"/proc/self/root{above}/{name}"):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
                with socket.socket(socket.AF_UNIX, kind) as client:
                    attempt(f"connect {name}", lambda: client.connect(path))
            if not os.path.islink(path): attempt(f"write {name}", lambda: send(path))
            attempt(f"create {name}", lambda: os.close(os.open(path + "x", os.O_CREAT | os.O_WRONLY)))
            for call in (os.unlink, os.rmdir):
                attempt(f"remove {name}", lambda: call(path))
            attempt(f"rename {name}", lambda: os.rename(path, path + "x"))
            attempt(f"link {name}", lambda: os.link(path, "/tmp/linked"))
            attempt(f"mode {name}", lambda: os.lchown(path, os.getuid(), -1))
            if not os.path.islink(path): attempt(f"mode {name}", lambda: os.chmod(path, 0o777))
            attempt(f"time {name}", lambda: os.utime(path, follow_symlinks=False))
            attempt(f"attribute {name}", lambda: os.setxattr(path, "user.a", b"1", follow_symlinks=False))
            if stat.S_ISREG(os.lstat(path).st_mode):
                held = os.open(path, os.O_RDONLY)
                attempt("lock", lambda: fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB))
                attempt("lock", lambda: fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK))
            elif stat.S_ISCHR(os.lstat(path).st_mode):
                attempt(f"device {name}", lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK))
open("/out/ready", "w").close()
while not os.path.exists("/out/gate"): time.sleep(0.02)
print(json.dumps([name for name in done if name != "lock"]))
"""


@pytest.fixture(scope="module")
def image(ground: Path, layers: list[list[object]]) -> Caller:
    """A caller who is no root: the kernel allows that less."""
    store = ground / "store-attack"
    store.mkdir()
    if os.geteuid() == 0:
        os.chown(store, ORDINARY_UID, ORDINARY_UID)
    return Caller("user", ground, store, layers)


@given(places=PLACES)
@settings(max_examples=12)
def test_nothing_in_a_shown_folder_answers_or_changes(image: Caller, places: list[tuple[str, str]]) -> None:
    folder = Path(tempfile.mkdtemp(dir=image.ground))
    try:
        with contextlib.ExitStack() as opened:
            listening, readers = fill(folder / "work", places, opened)
            give(folder)
            before = states(folder / "work")
            assert json.loads(attempts(image, folder)) == []
            assert states(folder / "work") == before
            for one in listening:
                with pytest.raises(BlockingIOError):
                    one.recv(1) if one.type == socket.SOCK_DGRAM else one.accept()
            assert all(os.read(reader, 1) == b"" for reader in readers)
    finally:
        shutil.rmtree(folder)


def fill(
    work: Path, places: list[tuple[str, str]], opened: contextlib.ExitStack
) -> tuple[list[socket.socket], list[int]]:
    work.mkdir()
    listening: list[socket.socket] = []
    readers: list[int] = []
    for number, (kind, above) in enumerate(places):
        path = work / above / f"{kind}-{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind in ("stream", "packets", "datagrams"):
            types = {"stream": socket.SOCK_STREAM, "packets": socket.SOCK_SEQPACKET}
            one = opened.enter_context(socket.socket(socket.AF_UNIX, types.get(kind, socket.SOCK_DGRAM)))
            place = os.open(path.parent, os.O_PATH)
            one.bind(f"/proc/self/fd/{place}/{path.name}")  # a socket's own path is short
            os.close(place)
            if kind != "datagrams":
                one.listen()
            one.setblocking(False)
            listening.append(one)
        elif kind == "pipe":
            os.mkfifo(path)
            readers.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            opened.callback(os.close, readers[-1])
        elif kind == "link":
            path.symlink_to(("/dev/null", "../a", "/work", "nowhere")[number % 4])
        elif kind == "folder":
            path.mkdir()
        elif kind == "device" and os.geteuid() == 0:
            os.mknod(path, 0o20666, os.makedev(1, 3))
        else:
            path.write_bytes(b"host")
        if not path.is_symlink():
            path.chmod(0o777)
    return listening, readers


def give(folder: Path) -> None:
    (folder / "out").mkdir()
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, ORDINARY_UID, ORDINARY_UID, follow_symlinks=False)


def states(work: Path) -> dict[str, tuple[int, ...]]:
    def state(path: Path) -> tuple[int, ...]:
        found = path.lstat()
        return found.st_ino, found.st_mode, found.st_uid, found.st_nlink, found.st_size, found.st_ctime_ns

    return {str(path): state(path) for path in (work, *work.rglob("*"))}


def attempts(image: Caller, folder: Path) -> str:
    """What the image says. While it holds its locks, none of them holds here."""
    mounts = [[str(folder / "work"), "/work", False], [str(folder / "out"), "/out", True]]
    command = image.command({"argv": ["python3", "-c", IMAGE], "mounts": mounts})
    with child(command, env=image.environment(), stdout=subprocess.PIPE) as run:
        wait_for(lambda: (folder / "out/ready").exists() or run.poll() is not None, "the image to try all")
        for path in (folder / "work").rglob("file-*"):
            with lock(path):
                pass
        (folder / "out/gate").touch()
        told = json.loads(run.communicate(timeout=LIMIT)[0])
    assert told["returncode"] == 0, told
    return str(told["stdout"])


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        assert stat.S_ISREG(os.fstat(fd).st_mode)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
