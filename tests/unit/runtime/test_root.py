"""Places in an untrusted tree to mount on, and which mounts of the host are below a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagefactory.runtime.sandbox import root as room
from imagefactory.runtime.sandbox.root import mounts_below, open_target, read_forward
from imagefactory.runtime.sandbox.syscalls import (
    RESOLVE_IN_ROOT,
    RESOLVE_NO_MAGICLINKS,
    SYS_OPENAT2,
    SetupError,
    close_all_but,
    syscall,
)

OWN = ("proc", "sys", "dev")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "host/image"
    for name in ("proc/sys", "sys", "dev", "etc", "usr/lib"):
        (root / name).mkdir(parents=True)
    (root / "etc/hosts").touch()
    return root


@pytest.fixture
def root(tree: Path) -> Iterator[int]:
    fd = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def found(root: int, path: str, *, folder: bool = True) -> str:
    """Where it is, from the tree's top."""
    fd = open_target(root, path, directory=folder, closed=OWN)
    try:
        place, top = (str(Path(f"/proc/self/fd/{number}").readlink()) for number in (fd, root))
        assert place.startswith(top + "/")
        return place.removeprefix(top)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("link", "place"),
    [
        ("/usr", "/usr"),
        ("usr/./lib//", "/usr/lib"),
        ("/usr/lib/../../../../usr/new", "/usr/new"),
        ("../../../../../../etc/new/er", "/etc/new/er"),
        ("no/../such", "/such"),
        ("second", "/usr/lib"),
        ("/tmp/x\ny\x1b[2J", "/tmp/x\ny\x1b[2J"),
        ("/procession", "/procession"),
    ],
)
def test_a_link_is_walked_inside(tree: Path, root: int, link: str, place: str) -> None:
    (tree / "data").symlink_to(link)
    (tree / "second").symlink_to("/usr/lib")
    outside = sorted(tree.parent.parent.rglob("*"))
    assert found(root, "/data") == place
    made = set(tree.parent.parent.rglob("*")) - set(outside)
    assert all(path.is_relative_to(tree) for path in made)


def test_what_is_missing_is_made_as_what_it_covers(tree: Path, root: int) -> None:
    assert found(root, "/a/b/file", folder=False) == "/a/b/file"
    assert found(root, "/a/b/folder") == "/a/b/folder"
    assert (tree / "a/b/file").is_file()
    assert (tree / "a/b/folder").is_dir()
    (tree / "dangling").symlink_to("run/resolve/stub.conf")
    assert found(root, "/dangling", folder=False) == "/run/resolve/stub.conf"
    assert (tree / "run/resolve/stub.conf").is_file()


@pytest.mark.parametrize(
    "link",
    ["/proc", "proc/sys", "/proc/self/fd/4/../..", "../../sys/x", "etc/../dev/null", "second",
     "second/../dev", "/proc/../usr"],
)  # fmt: skip
def test_nothing_is_mounted_on_the_sandboxs_own(tree: Path, root: int, link: str) -> None:
    (tree / "data").symlink_to(link)
    (tree / "second").symlink_to("/proc/sys")
    before = sorted(tree.rglob("*"))
    for path in ("/data", "/data/in"):
        with pytest.raises(SetupError, match=f"a link of the image leads {path} to /(proc|sys|dev)$"):
            open_target(root, path, directory=True, closed=OWN)
    assert sorted(tree.rglob("*")) == before


@pytest.mark.parametrize("link", ["/", ".", "..", "usr/..", "../../usr/lib/../.."])
def test_nothing_is_mounted_on_the_whole_image(tree: Path, root: int, link: str) -> None:
    (tree / "data").symlink_to(link)
    with pytest.raises(SetupError, match=r"a link of the image leads /data to /$"):
        open_target(root, "/data", directory=True, closed=OWN)


@pytest.mark.parametrize(
    ("links", "number"),
    [
        ({"data": "data"}, errno.ELOOP),
        ({"data": "other", "other": "./data/x"}, errno.ELOOP),
        ({"data": "usr/" * 300}, errno.ELOOP),
        ({"data": "/etc/hosts/in"}, errno.ENOTDIR),
        ({"data": "x" * 256}, errno.ENAMETOOLONG),
        ({"data": "/".join("x" * 250)}, errno.ENAMETOOLONG),
    ],
)
def test_what_leads_nowhere_is_an_error(tree: Path, root: int, links: dict[str, str], number: int) -> None:
    (tree / "usr/usr").symlink_to("/usr/")
    for name, text in links.items():
        (tree / name).symlink_to(text)
    with pytest.raises(OSError, match=os.strerror(number)):
        open_target(root, "/data", directory=True)


def test_a_link_put_in_the_place_of_a_folder_is_a_link(
    tree: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to the tree swaps it between the look and the making."""
    real = room.open_beneath
    looks = []

    def open_beneath(above: int, name: str) -> int:
        if name == "in" and not looks:
            looks.append(name)
            (tree / "in").symlink_to(tree.parent)
            raise FileNotFoundError
        return real(above, name)

    monkeypatch.setattr(room, "open_beneath", open_beneath)
    assert found(root, "/in") == str(tree.parent)
    assert sorted(path.name for path in tree.parent.iterdir()) == ["image"]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_there_is_found_where_the_kernel_finds_it(tree: Path, root: int, seed: int) -> None:
    """Trees of links at random; openat2 resolves them whole in the same root. Nothing outside changes."""
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    draw = random.Random(seed)
    names = ["a", "b", "c", "etc", "usr", "..", ".", ""]

    def path() -> str:
        return draw.choice(("", "/")) + "/".join(draw.choices(names, k=draw.randint(1, 6)))

    for _ in range(12):
        place = tree / "/".join(draw.choices(("a", "b", "c", "usr"), k=draw.randint(1, 3)))
        kind = draw.choice(("folder", "link", "file"))
        with contextlib.suppress(OSError):
            if kind == "folder":
                place.mkdir(parents=True)
            elif kind == "link":
                place.symlink_to(path() or "/")
            else:
                place.touch()
    before = {name for name in tree.parents[1].rglob("*") if tree not in (name, *name.parents)}
    for _ in range(12):
        asked = path()
        try:
            known = syscall(SYS_OPENAT2, root, os.fsencode(asked or "/"), how, len(how))
        except OSError:
            known = None
        try:
            fd = open_target(root, asked, directory=True)
        except (OSError, SetupError):
            assert known is None or os.path.samestat(os.fstat(known), os.fstat(root)), asked
            continue
        assert known is None or os.path.samestat(os.fstat(known), os.fstat(fd)), asked
        for opened in (fd, known):
            if opened is not None:
                os.close(opened)
    assert {name for name in tree.parents[1].rglob("*") if tree not in (name, *name.parents)} == before


def test_no_descriptor_is_left_open(tree: Path, root: int) -> None:
    def count() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = count()
    for name, link in (("a", "/usr/lib/../../usr/new"), ("b", "usr/lib/../../proc"), ("c", "/etc/hosts/x")):
        (tree / name).symlink_to(link)
    os.close(open_target(root, "/a", directory=True, closed=OWN))
    with pytest.raises(SetupError):
        open_target(root, "/b", directory=True, closed=OWN)
    with pytest.raises(NotADirectoryError):
        open_target(root, "/c", directory=True, closed=OWN)
    assert count() == before


def test_all_but_what_is_named_is_closed() -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)][3:12:4]
            close_all_but(*reversed(kept))
            left = []
            for fd in range(kept[-1] + 200):  # after other tests many files are open
                try:
                    os.fstat(fd)
                except OSError:
                    continue
                left.append(fd)
            code = 0 if left == [0, 1, 2, *kept] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


LINES = (
    b"27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n",
    b"30 27 0:20 / /data rw,relatime - nfs server:/data rw\n",
    b"31 30 0:21 / /data/a\\040b/in rw,relatime - tmpfs none rw\n",
    b"32 27 0:22 / /database rw,relatime shared:3 master:4 - tmpfs none rw\n",
    b"33 27 0:23 / /data/a\\040b/in rw,relatime - tmpfs none rw\n",
    b"34 27 0:24 /x /k\xff/m rw - ext4 /dev/vdb rw\n",
)


@pytest.mark.parametrize(
    ("folder", "points"),
    [
        ("/data", ["/data/a b/in"]),
        ("/data/a b", ["/data/a b/in"]),
        ("/data/a b/in", []),
        ("/data/a", []),
        ("/k\udcff", ["/k\udcff/m"]),
        ("/", ["/data", "/data/a b/in", "/database", "/k\udcff/m"]),
    ],
)
def test_mounts_below(folder: str, points: list[str]) -> None:
    assert mounts_below(folder, LINES) == points


def test_the_images_libcuda_is_read_without_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, place = "libcuda.so.575.57.08", tmp_path / "cuda-12.9/compat"
    (tmp_path / "cuda").symlink_to("cuda-12.9")
    assert read_forward(str(tmp_path / "cuda/compat")) == ([], b"")
    place.mkdir(parents=True)
    os.mkfifo(place / name)  # does not block
    assert read_forward(str(tmp_path / "cuda/compat")) == ([], b"")
    (place / name).unlink()
    (place / name).write_bytes(b"head")
    (place / "libcuda.so.1").symlink_to(name)
    (place / "libcuda.so.560.1").symlink_to(name)
    assert read_forward(str(tmp_path / "cuda/compat")) == ([name], b"head")
    (place / "libcuda.so.570.1").write_bytes(b"")
    assert read_forward(str(place)) == (["libcuda.so.570.1", name], b"")
    monkeypatch.setattr(room, "MOST_NAMES", 2)
    assert read_forward(str(place)) == ([], b"")
