"""Files that are whole at any moment."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from imagefactory import fs
from imagefactory.errors import StoreError
from imagefactory.fs import (
    Removal,
    add_checksum,
    check_checksum,
    check_no_links,
    create_bytes,
    locked_temporary_directory,
    open_lock,
    path_inside,
    remove_inside,
    replace_all,
    replace_text,
    replacing,
    temporary_directory,
)
from tests.made.deep import MakeDeep
from tests.made.errors import fails
from tests.made.full_disk import full_disk


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_takes_its_place_when_all_is_written(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / ("n" * 250)
    path.write_bytes(b"old")
    with replacing(path, mode=0o755, durable=durable) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o755
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"half of the")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_written_as_it_is(tmp_path: Path) -> None:
    replace_text(tmp_path / "file", "é\r\n\n")
    assert (tmp_path / "file").read_bytes() == b"\xc3\xa9\r\n\n"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
    with pytest.raises(FileNotFoundError):
        replace_text(tmp_path / "none" / "file", "")


def test_a_sealed_file_is_read_where_it_lies_and_as_it_was_written_alone(tmp_path: Path) -> None:
    path = tmp_path / "layers" / "key.json"
    path.parent.mkdir()
    for data in (b"", b"{}", b"of\nmany\nsha256:lines\n"):
        sealed = add_checksum(path, data)
        path.write_bytes(sealed)
        assert check_checksum(path) == data
        for at in range(len(sealed)):
            path.write_bytes(bytes((*sealed[:at], sealed[at] ^ 1, *sealed[at + 1 :])))
            assert check_checksum(path) is None
        for cut in range(len(sealed)):
            path.write_bytes(sealed[:cut])
            assert check_checksum(path) is None
    other = tmp_path / "layers" / "other.json"
    other.write_bytes(sealed)
    assert check_checksum(other) is None
    assert check_checksum(tmp_path / "layers" / "none.json") is None


def test_a_folder_for_a_while_goes_whatever_was_written_and_raised(
    tmp_path: Path, make_deep: MakeDeep
) -> None:
    def fill() -> None:
        with temporary_directory("x-", tmp_path) as folder:
            assert folder.parent == tmp_path
            make_deep(folder / "deep")
            raise KeyError

    with pytest.raises(KeyError):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_what_stays_of_it_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(fs, "remove_tree", refuse)
    with temporary_directory("x-", tmp_path):
        pass
    assert [path.name[:2] for path in tmp_path.iterdir()] == ["x-"]


def test_the_temporary_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs.tempfile, "tempdir", str(tmp_path))
    folder = fs.user_temporary_directory()
    assert folder == fs.user_temporary_directory() == tmp_path / f"imagefactory-{os.geteuid()}"
    assert folder.stat().st_mode & 0o7777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with fails("temporary-not-yours"):
        fs.user_temporary_directory()


def test_a_killed_process_leaves_a_folder_to_the_next(tmp_path: Path, make_deep: MakeDeep) -> None:
    make_deep(tmp_path / "x-of-nobody" / "deep")
    (tmp_path / "y-other").mkdir()
    with locked_temporary_directory("x-", tmp_path) as held:
        pid = os.fork()
        if pid == 0:
            with locked_temporary_directory("x-", tmp_path):
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        left = {path for path in tmp_path.iterdir() if path.name.startswith("x-")}
        assert held in left
        assert len(left) == 2
        with locked_temporary_directory("x-", tmp_path) as folder:
            assert {path for path in tmp_path.iterdir() if path.name.startswith("x-")} == {held, folder}
    assert [path.name for path in tmp_path.iterdir()] == ["y-other"]


def test_room_is_asked_for_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache" / "below"
    usage = type(fs.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda _: usage(10**9, 0, 5_000_000))
    fs.require_space({cache: 2_000_000, store: 3_000_000}, "the build of x")
    with fails("disk-full") as told:
        fs.require_space({cache: 2_000_000, store: 3_000_001}, "the build of x")
    for named in (str(cache), str(store), "the build of x", "5.0 MB"):
        assert named in told.value.message
    assert "imagefactory image prune" in told.value.hint
    assert "IMAGEFACTORY_STORE" in told.value.hint


def test_folders_on_two_disks_have_room_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, stat = type(fs.shutil.disk_usage(tmp_path)), Path.stat
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda _: usage(10**9, 0, 5_000_000))
    (tmp_path / "other").mkdir()

    class OtherDisk:
        st_dev = -1

    def there(path: Path, **options: bool) -> object:
        return OtherDisk() if path == tmp_path / "other" else stat(path, **options)

    monkeypatch.setattr(Path, "stat", there)
    fs.require_space({tmp_path: 4_000_000, tmp_path / "other": 4_000_000}, "both")
    with fails("disk-full", "other"):
        fs.require_space({tmp_path: 4_000_000, tmp_path / "other": 6_000_000}, "both")


# --- inside a folder that others can write to -------------------------------------------------------


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A store with `blobs/sha256` and a link to a foreign folder, reached by a link of the user's."""
    for folder in ("real/blobs/sha256", "foreign/sha256"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "one").write_text("1")
    (tmp_path / "real/link").symlink_to(tmp_path / "foreign")
    (tmp_path / "store").symlink_to("real")
    return tmp_path / "store"


def test_no_link_below_the_top_is_followed(linked: Path) -> None:
    remove_inside(linked, linked / "blobs/sha256/one")
    assert not (linked / "blobs/sha256/one").exists()
    remove_inside(linked, linked / "blobs/sha256/one")
    remove_inside(linked, linked / "gone/one")
    with pytest.raises(OSError, match="link") as caught:
        remove_inside(linked, linked / "link/sha256/one")
    assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(linked / "link"))
    assert (linked.parent / "foreign/sha256/one").exists()
    remove_inside(linked, linked / "link")  # the link itself
    assert (linked.parent / "foreign/sha256/one").exists()
    assert not (linked / "link").is_symlink()


@pytest.mark.parametrize("path", ["..", "blobs/../../foreign/sha256/one", "blobs/.."])
def test_no_path_leads_out(linked: Path, path: str) -> None:
    with pytest.raises(OSError, match="is outside"):
        remove_inside(linked, linked / path)
    assert (linked.parent / "foreign/sha256/one").exists()


def test_a_link_that_is_put_there_meanwhile_is_not_followed(linked: Path) -> None:
    with path_inside(linked, linked / "blobs/sha256") as pinned:
        (linked / "blobs").rename(linked / "other")
        (linked / "blobs").symlink_to(linked.parent / "foreign")
        assert (pinned / "one").samefile(linked / "other/sha256/one")


def test_errors_name_the_path_that_people_know(linked: Path) -> None:
    with (
        pytest.raises(FileNotFoundError) as caught,
        path_inside(linked, linked / "blobs/sha256/none") as pinned,
    ):
        pinned.unlink()
    assert caught.value.filename == str(linked / "blobs/sha256/none")


def test_what_is_behind_a_link_is_stuck(linked: Path) -> None:
    removal = Removal(linked, dry_run=False)
    assert removal.remove(linked / "blobs/sha256/one", by_way_of="two")
    assert not removal.remove(linked / "link/sha256/one")
    assert [path for path, _ in removal.stuck] == [str(linked / "link/sha256/one")]
    assert (linked.parent / "foreign/sha256/one").exists()


def test_links_are_refused(linked: Path) -> None:
    with fails("store-link"):
        check_no_links(linked)
    (linked / "link").unlink()
    check_no_links(linked, "blobs", "none")
    (linked / "blobs/x").symlink_to("/")
    check_no_links(linked)
    with fails("store-link", "blobs/x "):
        check_no_links(linked, "blobs")
    check_no_links(linked / "none")


def test_a_lock_is_no_link(linked: Path) -> None:
    (linked / "lock").symlink_to(linked.parent / "foreign/sha256/one")
    with pytest.raises(StoreError), open_lock(linked / "lock"):
        pass


def test_several_files_take_their_places_when_all_are_whole(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("old")
    with full_disk(5), pytest.raises(OSError, match="File too large"):
        replace_all({one: b"new", two: b"too long"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"one": "old"}
    replace_all({one: b"new", two: b"too long"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"one": "new", "two": "too long"}


def test_a_new_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with full_disk(), pytest.raises(OSError, match="File too large"):
        create_bytes(path, b"data", mode=0o600)
    assert list(tmp_path.iterdir()) == []
    assert create_bytes(path, b"data", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not create_bytes(path, b"other")
    assert path.read_bytes() == b"data"
    (tmp_path / "link").symlink_to("nowhere")
    assert not create_bytes(tmp_path / "link", b"other")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "new"]
