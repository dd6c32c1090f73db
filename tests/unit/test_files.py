"""Files that are whole at any moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imagefactory import files
from imagefactory.errors import EXIT_BUILD, StoreError
from imagefactory.files import folder_for_a_while, locked_folder, replace_text, replacing, seal, unseal
from tests.made.deep import MakeDeep


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
        sealed = seal(path, data)
        path.write_bytes(sealed)
        assert unseal(path) == data
        for at in range(len(sealed)):
            path.write_bytes(bytes((*sealed[:at], sealed[at] ^ 1, *sealed[at + 1 :])))
            assert unseal(path) is None
        for cut in range(len(sealed)):
            path.write_bytes(sealed[:cut])
            assert unseal(path) is None
    other = tmp_path / "layers" / "other.json"
    other.write_bytes(sealed)
    assert unseal(other) is None
    assert unseal(tmp_path / "layers" / "none.json") is None


def test_a_folder_for_a_while_goes_whatever_was_written_and_raised(
    tmp_path: Path, make_deep: MakeDeep
) -> None:
    def fill() -> None:
        with folder_for_a_while("x-", tmp_path) as folder:
            assert folder.parent == tmp_path
            make_deep(folder / "deep")
            raise KeyError

    with pytest.raises(KeyError):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_what_stays_of_it_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(files, "remove_tree", refuse)
    with folder_for_a_while("x-", tmp_path):
        pass
    assert [path.name[:2] for path in tmp_path.iterdir()] == ["x-"]


def test_the_temporary_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    folder = files.temporary_folder()
    assert folder == files.temporary_folder() == tmp_path / f"imagefactory-{os.geteuid()}"
    assert folder.stat().st_mode & 0o7777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(StoreError, match="is not a folder of yours"):
        files.temporary_folder()


def test_a_killed_process_leaves_a_folder_to_the_next(tmp_path: Path, make_deep: MakeDeep) -> None:
    make_deep(tmp_path / "x-of-nobody" / "deep")
    (tmp_path / "y-other").mkdir()
    with locked_folder("x-", tmp_path) as held:
        pid = os.fork()
        if pid == 0:
            with locked_folder("x-", tmp_path):
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        left = {path for path in tmp_path.iterdir() if path.name.startswith("x-")}
        assert held in left
        assert len(left) == 2
        with locked_folder("x-", tmp_path) as folder:
            assert {path for path in tmp_path.iterdir() if path.name.startswith("x-")} == {held, folder}
    assert [path.name for path in tmp_path.iterdir()] == ["y-other"]


def test_room_is_asked_for_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache" / "below"
    usage = type(files.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage(10**9, 0, 5_000_000))
    files.insist_on_room({cache: 2_000_000, store: 3_000_000}, "the build of x")
    with pytest.raises(StoreError) as told:
        files.insist_on_room({cache: 2_000_000, store: 3_000_001}, "the build of x")
    assert told.value.exit_code == EXIT_BUILD
    assert f"5.0 MB are free for {cache} and {store}, and the build of x needs 5.0 MB" in told.value.message
    assert "imagefactory store gc" in told.value.hint
    assert "IMAGEFACTORY_STORE, IMAGEFACTORY_CACHE" in told.value.hint


def test_folders_on_two_disks_have_room_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, stat = type(files.shutil.disk_usage(tmp_path)), Path.stat
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage(10**9, 0, 5_000_000))
    (tmp_path / "other").mkdir()

    class OtherDisk:
        st_dev = -1

    def there(path: Path, **options: bool) -> object:
        return OtherDisk() if path == tmp_path / "other" else stat(path, **options)

    monkeypatch.setattr(Path, "stat", there)
    files.insist_on_room({tmp_path: 4_000_000, tmp_path / "other": 4_000_000}, "both")
    with pytest.raises(StoreError, match="other"):
        files.insist_on_room({tmp_path: 4_000_000, tmp_path / "other": 6_000_000}, "both")
