"""`image check`: whatever byte of a store changed is named, and what is mended is whole or not there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imagefactory import fs
from imagefactory.errors import EXIT_BUILD
from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import CollectResult, StoreCheck, check, collect
from imagefactory.oci.manifests import OciLayer, digest_of
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import QuietProgress
from imagefactory.runtime.sandbox.keeper import make_scratch
from imagefactory.trees import directory_lock, remove_tree
from tests.made.command import Call
from tests.made.errors import fails
from tests.made.filled_store import covered, fill
from tests.made.layout import LAYER_TYPE, add_image
from tests.made.scanned import tar

MOST_FLIPS = 4


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "store")
    fill(layout)
    return layout


def look(layout: Layout, *, mend: bool = False) -> StoreCheck:
    return check(layout, QuietProgress(), mend=mend)


def places(done: StoreCheck) -> set[str]:
    return {fault.place for fault in done.faults}


def test_a_sound_store_has_no_fault(layout: Layout) -> None:
    done = look(layout)
    assert done.faults == ()
    blobs = [path for path in covered(layout) if path.startswith("blobs/")]
    assert (done.blobs, done.records, done.tags) == (len(blobs), len(covered(layout)) - len(blobs), 1)
    assert done.bytes == sum((layout.path / path).stat().st_size for path in blobs)
    assert look(layout, mend=True) == done


def test_any_flipped_byte_is_named_and_mended(layout: Layout, tmp_path: Path) -> None:
    whole = covered(layout)
    assert len(whole) > 12
    for name, data in whole.items():
        path = layout.path / name
        for at in {round(step * (len(data) - 1) / MOST_FLIPS) for step in range(MOST_FLIPS + 1)}:
            path.write_bytes(bytes((*data[:at], data[at] ^ 1, *data[at + 1 :])))
            found = look(layout)
            assert name in places(found), (name, at)
            assert path.exists()
            assert not any(fault.mended for fault in found.faults)
            mended = look(layout, mend=True)
            assert places(mended) == places(found)
            assert (
                places(look(layout))
                == {fault.place for fault in mended.faults if not fault.mended}
                <= {"a:1"}
            )
            fill(layout)
            assert covered(layout) == whole, (name, at)
            assert look(layout).faults == ()


def test_an_image_that_lost_a_blob_is_named_with_what_to_do(layout: Layout) -> None:
    layout.blob_path(digest_of(b"two")).unlink()
    (fault,) = look(layout, mend=True).faults
    assert (fault.place, fault.mended) == ("a:1", False)
    assert "image remove a:1" in fault.error.hint
    assert "a:1" in layout.tags()


def test_of_a_verdict_that_is_not_whole_the_record_goes(layout: Layout) -> None:
    layout.blob_path(digest_of(b"good")).unlink()
    (fault,) = look(layout, mend=True).faults
    assert fault.mended
    assert fault.place.startswith("referrers/")
    assert look(layout).faults == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda place: place.mkdir(),
        lambda place: place.symlink_to("/etc/passwd"),
        lambda place: place.write_bytes(b"no digest"),
    ],
    ids=["a folder", "a link", "another name"],
)
def test_what_is_no_blob_is_named(layout: Layout, make: Callable[[Path], None]) -> None:
    place = layout.path / "blobs" / "sha256" / ("f" * 63)
    make(place)
    (fault,) = look(layout).faults
    assert fault.place == f"blobs/sha256/{place.name}"
    (mended,) = look(layout, mend=True).faults
    assert mended.mended != place.exists()
    assert mended.mended or f"rm -r {place}" in mended.error.hint


def test_a_record_of_another_subject_goes(layout: Layout) -> None:
    (record,) = (layout.path / "referrers").rglob("*.json")
    other = layout.path / "referrers" / ("0" * 64) / record.name
    other.parent.mkdir()
    shutil.copy(record, other)
    (fault,) = look(layout, mend=True).faults
    assert (fault.place, fault.mended) == (str(other.relative_to(layout.path)), True)
    assert not other.exists()
    assert record.exists()


def test_what_changed_in_an_unpacked_layer_is_named_and_goes(layout: Layout) -> None:
    data = tar(("a/b", b"hello"))
    layer = OciLayer(descriptor=layout.add(data, LAYER_TYPE), diff_id=digest_of(data), title="")
    unpacked = UnpackedLayers(layout.path / "unpacked")
    (folder,) = unpacked.unpack([layer], layout.blob_path, QuietProgress())
    assert look(layout).faults == ()
    (folder / "a/b").write_bytes(b"hullo")
    assert places(look(layout)) == {f"unpacked/{folder.name}"}
    (fault,) = look(layout, mend=True).faults
    assert fault.mended
    assert not folder.exists()
    unpacked.unpack([layer], layout.blob_path, QuietProgress())
    assert look(layout).faults == ()


def test_a_damaged_index_hides_no_other_fault(layout: Layout) -> None:
    (layout.path / "index.json").write_text("{")
    layout.blob_path(digest_of(b"two")).write_bytes(b"tow")
    assert places(look(layout)) == {"index.json", f"blobs/sha256/{digest_of(b'two')[7:]}"}


def test_another_folder_is_no_store(tmp_path: Path) -> None:
    assert check(Layout(tmp_path / "not made yet"), QuietProgress(), mend=True).blobs == 0
    assert check(Layout(tmp_path), QuietProgress(), mend=True).blobs == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").write_text("mine")
    with fails("store-invalid"):
        check(Layout(tmp_path), QuietProgress(), mend=True)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


PART = f".{'1' * 64}.0a1b.part"
LOCKS = Path("/proc/locks")
LOOSE = "2" * 64


def refuse(monkeypatch: pytest.MonkeyPatch, *stuck: str) -> None:
    """The kernel's refusal to remove what is immutable or mounted, which only root could bring about."""
    rename = Path.rename

    def renaming(path: Path, target: Path) -> Path:
        if path.name in stuck:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    def removing(path: Path) -> None:
        if path.name in stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted", f"{path}/.../stays")
        remove_tree(path)

    monkeypatch.setattr(fs, "remove_tree", removing)
    monkeypatch.setattr(Path, "rename", renaming)


@pytest.fixture
def crowded(tmp_path: Path) -> Layout:
    """A store with an image, and seven things that nobody needs."""
    crowded = Layout(tmp_path / "store")
    add_image(crowded, "a:1", [b"one"])
    for data in (b"loose", b"another"):
        crowded.add(data, LAYER_TYPE)
    for name in (PART, LOOSE, "3" * 64):
        (crowded.path / "unpacked" / name / "usr").mkdir(parents=True)
    for name in ("left", "more"):
        (crowded.tmp / name).mkdir()
    return crowded


def test_what_cannot_be_removed_is_named_and_all_else_goes(
    crowded: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = min(
        path
        for path in (crowded.path / "blobs/sha256").iterdir()
        if path.read_bytes() in (b"loose", b"another")
    )
    planned = collect(crowded, QuietProgress(), dry_run=True)
    assert (planned.blobs, planned.unpacked, planned.stuck) == (2, 3, ())
    refuse(monkeypatch, blob.name, PART, LOOSE, "left")
    done = collect(crowded, QuietProgress())
    assert (done.blobs, done.unpacked) == (1, 1)
    assert sorted(path for path, _ in done.stuck) == sorted(
        map(str, (blob, crowded.tmp / "left", *(crowded.path / "unpacked" / n for n in (PART, LOOSE))))
    )
    for path, error in done.stuck:
        assert error.code == "cannot-delete-file"
        assert path in error.message
    assert [path.name for path in crowded.tmp.iterdir()] == ["left"]
    monkeypatch.undo()
    again = collect(crowded, QuietProgress())
    assert (again.blobs, again.unpacked, again.stuck) == (1, 2, ())
    assert collect(crowded, QuietProgress()) == CollectResult(blobs=0, unpacked=0, records=0, bytes=0)
    assert crowded.image("a:1") is not None


def test_scratch_of_killed_sandboxes_goes_and_that_of_living_ones_stays(
    crowded: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(crowded, QuietProgress())
    scratch = crowded.path / "run"
    living, lock, _ = make_scratch(str(scratch))
    for name in ("dead", "immutable"):
        (scratch / name).mkdir()
        (scratch / name / "file").write_bytes(b"12345")
    (scratch / "stray").touch()
    refuse(monkeypatch, "immutable")
    assert collect(crowded, QuietProgress(), dry_run=True).bytes == 10
    done = collect(crowded, QuietProgress())
    assert done.bytes == 5
    assert sorted(path for path, _ in done.stuck) == [f"{scratch}/{name}" for name in ("immutable", "stray")]
    assert sorted(path.name for path in scratch.iterdir()) == sorted(
        [Path(living).name, "immutable", "stray"]
    )
    assert Path(living, "upper").is_dir()
    os.close(lock)


def test_a_sandbox_that_begins_is_waited_for(crowded: Layout) -> None:
    """Its folder stands before it is locked."""
    scratch = crowded.path / "run"
    scratch.mkdir()
    with ThreadPoolExecutor() as pool:
        with directory_lock(scratch):
            (scratch / "new").mkdir()
            collecting = pool.submit(collect, crowded, QuietProgress())
            waiting = f":{scratch.stat().st_ino} "
            while not any("->" in line and waiting in line for line in LOCKS.read_text().splitlines()):
                assert not collecting.done()
            lock = os.open(scratch / "new", os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        collecting.result()
    assert (scratch / "new").is_dir()
    os.close(lock)
    collect(crowded, QuietProgress())
    assert not (scratch / "new").exists()


def test_the_command_names_what_stays_in_the_store_and_the_cache(
    call: Call, crowded: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, goes = (tmp_path / "cache/conda-pkgs" / name / "file" for name in ("stays", "goes"))
    for path in (stays, goes):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12345")
    refuse(monkeypatch, "stays", "left")
    said = call("image", "prune", "--cache")
    assert said.code == EXIT_BUILD
    assert set(said.error_codes) == {"cannot-delete-file"}
    assert f"{crowded.tmp}/left/.../stays" in said.err
    assert f"{stays.parent}/.../stays" in said.err
    assert "5 bytes" in said.out
    assert (stays.exists(), goes.exists()) == (True, False)
    told = call("image", "prune", "--cache", "--json").json()
    assert [row["target"] for row in told["errors"]] == [f"{crowded.tmp}/left", str(stays.parent)]
