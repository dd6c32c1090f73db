"""Folders of strangers, deeper than paths may be long."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from imagefactory import trees
from imagefactory.trees import (
    TreeLimits,
    list_names,
    open_file,
    read_chunks,
    read_file,
    remove_tree,
    tree_bytes,
    walk_tree,
)
from tests.made.deep import DEEP, MakeDeep

ORDINARY = 65534


@contextmanager
def few_descriptors() -> Iterator[None]:
    """As many more as are open now, and eight: what needs one a level fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def as_ordinary_user(folder: Path) -> Iterator[None]:
    """Modes mean something to whoever is not root."""
    if os.geteuid() == 0:
        for one in (folder, *folder.rglob("*")):
            os.chown(one, ORDINARY, ORDINARY, follow_symlinks=False)
        for above in list(folder.parents)[:-2]:
            above.chmod(above.stat().st_mode | 0o011)
        os.seteuid(ORDINARY)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def test_a_chain_far_beyond_the_longest_path(tmp_path: Path, make_deep: MakeDeep) -> None:
    top = make_deep(tmp_path / "top")
    with few_descriptors():
        found = [path.count("/") for path, _ in walk_tree(top)]
        assert (len(found), max(found)) == (DEEP + 1, DEEP)
        assert tree_bytes(top) == len("bottom")
        remove_tree(top)
    assert list(tmp_path.iterdir()) == []


def test_many_chains_in_one_folder_and_files_beside_them(tmp_path: Path, make_deep: MakeDeep) -> None:
    top = tmp_path / "top"
    for number in range(3):
        make_deep(top / f"chain-{number}")
        (top / f"file-{number}").write_text("12345")
    for number in range(3000):
        (top / f"more-{number}").touch()
    assert tree_bytes(top) == 3 * (len("bottom") + 5)
    remove_tree(top)
    assert not top.exists()


def test_no_link_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("1")
    top = tmp_path / "top"
    (top / "a").mkdir(parents=True)
    for place in (top, top / "a"):
        (place / "folder").symlink_to(outside)
        (place / "file").symlink_to(outside / "kept")
        (place / "loop").symlink_to(place)
        (place / "nothing").symlink_to("missing")
    assert len(list(walk_tree(top))) == 9
    remove_tree(top)
    assert not top.exists()
    (tmp_path / "link").symlink_to(outside)
    remove_tree(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "kept").read_text() == "1"


def test_what_is_no_folder_or_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("123")
    assert tree_bytes(file) == 3
    remove_tree(file)
    assert not file.exists()
    remove_tree(file)


@pytest.mark.parametrize("mode", [0, 0o100, 0o200, 0o400, 0o500])
def test_folders_whose_modes_shut_their_owner_out(tmp_path: Path, mode: int) -> None:
    top = tmp_path / "top"
    (top / "a/b/c").mkdir(parents=True)
    (top / "a/b/file").touch()
    with as_ordinary_user(top):
        for place in (top / "a/b/c", top / "a/b", top / "a"):
            place.chmod(mode)
        os.chown(top, -1, -1)
        remove_tree(top / "a")
        assert list(top.iterdir()) == []


def test_a_link_in_place_of_a_closed_folder_changes_no_mode_elsewhere(tmp_path: Path) -> None:
    top, outside = tmp_path / "top", tmp_path / "outside"
    top.mkdir()
    outside.mkdir(mode=0o500)
    (top / "a").symlink_to(outside)
    remove_tree(top)
    assert outside.stat().st_mode & 0o777 == 0o500


def refusing(monkeypatch: pytest.MonkeyPatch, names: set[str], number: int) -> None:
    """The kernel's refusal to remove what is immutable or busy, which only root could bring about."""

    class Refusing:
        def __getattr__(self, name: str) -> object:
            real = getattr(os, name)
            if name not in ("unlink", "rmdir"):
                return real

            def remove(path: str, *, dir_fd: int | None = None) -> None:
                if path in names:
                    raise OSError(number, os.strerror(number), path)
                real(path, dir_fd=dir_fd)

            return remove

    monkeypatch.setattr(trees, "os", Refusing())


@pytest.mark.parametrize("number", [errno.EPERM, errno.EBUSY, errno.ENOTEMPTY])
def test_what_cannot_be_removed_is_named_and_all_else_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    top = tmp_path / "top"
    (top / "a/b/stays").mkdir(parents=True)
    (top / "a/b/c/d").mkdir(parents=True)
    (top / "a/file").touch()
    (top / "e").mkdir()
    refusing(monkeypatch, {"stays"}, number)
    with pytest.raises(OSError, match="stays") as told:
        remove_tree(top)
    assert told.value.errno == number
    assert told.value.filename == f"{top}/.../stays"
    monkeypatch.undo()
    assert sorted(path for path, _ in walk_tree(top)) == ["a", "a/b", "a/b/stays"]


def test_a_folder_that_moves_meanwhile_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `..` would lead to a place that nobody named."""
    top, elsewhere = tmp_path / "top", tmp_path / "elsewhere"
    (top / "a").mkdir(parents=True)
    (top / "a/file").touch()
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    for path, _ in (walk := walk_tree(top)):
        if path == "a/file":
            (top / "a").rename(elsewhere / "a")
            break
    with pytest.raises(OSError, match="moved meanwhile"):
        next(walk)
    assert (elsewhere / "kept").exists()


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "closed").mkdir(parents=True)
    (top / "file").write_text("12")
    with as_ordinary_user(top):
        (top / "closed").chmod(0)
        heard: list[OSError] = []
        assert sorted(path for path, _ in walk_tree(top, heard.append)) == ["closed", "file"]
        assert [error.errno for error in heard] == [errno.EACCES]
        assert tree_bytes(top) == 2
        with pytest.raises(PermissionError):
            list(walk_tree(top))


# --- files that an untrusted program wrote ---------------------------------------------------------


def folder_link(folder: Path) -> None:
    (folder / "a").rename(folder / "real")
    (folder / "a").symlink_to("real")


def folder_link_out(folder: Path) -> None:
    (folder / "a" / "file").unlink()
    (folder / "a").rmdir()
    (folder / "a").symlink_to(folder.parent / "outside")


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "a" / "file").unlink()
        make(folder / "a" / "file")

    return change


def bind_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    for name in ("folder/a", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(b"12345")
    return tmp_path / "folder"


def test_a_regular_file_is_read_below_its_folder(filled: Path, tmp_path: Path) -> None:
    assert read_file(filled, "a/file", 5) == b"12345"
    (tmp_path / "named").symlink_to(filled)  # the caller named it
    assert read_file(tmp_path / "named", "a/file", 100) == b"12345"


@pytest.mark.parametrize(
    "change",
    [
        folder_link,
        folder_link_out,
        instead(os.mkfifo),
        instead(bind_socket),
        instead(Path.mkdir),
        instead(lambda path: path.symlink_to("/etc/hostname")),
        instead(lambda path: path.symlink_to("/dev/zero")),
        instead(lambda path: path.symlink_to("../other")),
        instead(lambda path: path.write_bytes(b"123456")),
        instead(lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 42)),
    ],
)
def test_nothing_else_is_opened(filled: Path, change: Callable[[Path], None]) -> None:
    (filled / "other").write_bytes(b"1")
    change(filled)
    before = open_files()
    with pytest.raises(OSError, match="a/file") as caught:
        read_file(filled, "a/file", 5)
    assert caught.value.errno in (errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENOTDIR)
    assert open_files() - before == set()  # what earlier tests left may be closed meanwhile


def open_files() -> set[tuple[Path, Path]]:
    """This process's open files: each number, and what it is of."""
    found = set()
    for number in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # the listing's own
            found.add((number, number.readlink()))
    return found


def test_a_device_is_not_opened() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_file("/dev", "null", 5)


@pytest.mark.parametrize(
    "path", ["", "/etc/hostname", "../outside/file", "a/../a/file", "a//file", "./a", "a/"]
)
def test_a_path_stays_below_its_folder(filled: Path, path: str) -> None:
    with pytest.raises(OSError, match="not a path"):
        read_file(filled, path, 5)


def test_a_file_that_is_not_there(filled: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(filled, "a/none", 5)


def test_a_file_that_grows_is_read_to_its_limit(filled: Path) -> None:
    with open_file(filled, "a/file", 10) as fd, (filled / "a/file").open("ab") as file:
        chunks = read_chunks(fd, "a/file", 10)
        assert next(chunks) == b"12345"
        file.write(b"123456")
        file.flush()
        with pytest.raises(OSError, match="more than 10 bytes"):
            next(chunks)


def test_names_that_steer_a_terminal_are_shown_without(filled: Path) -> None:
    (filled / "a\x1b[2J\n").symlink_to("/")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - any, it is about what it names
        read_file(filled, "a\x1b[2J\n", 5)
    assert caught.value.filename == "a?[2J?"


def test_names_are_listed_up_to_a_number(filled: Path) -> None:
    (filled / "b").touch()
    assert list_names(filled, 2) == ["a", "b"]
    with pytest.raises(OSError, match="more than 1 entries"):
        list_names(filled, 1)
    (filled / "link").symlink_to("a")
    with pytest.raises(OSError):  # noqa: PT011 - ELOOP or ENOTDIR
        list_names(filled / "link", 9)


def test_a_walk_ends_at_its_limits(filled: Path, make_deep: MakeDeep) -> None:
    (filled / "b").touch()
    assert len(list(walk_tree(filled, limits=TreeLimits(entries=3, depth=1)))) == 3
    for limits in (TreeLimits(entries=2, depth=9), TreeLimits(entries=9, depth=0)):
        with pytest.raises(OSError, match="more than"):
            list(walk_tree(filled, lambda _: None, limits=limits))
    make_deep(filled / "deep")
    with pytest.raises(OSError, match="more than 100 levels of directories"):
        list(walk_tree(filled, limits=TreeLimits(entries=1 << 20, depth=100)))
