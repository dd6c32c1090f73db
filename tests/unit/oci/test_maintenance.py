"""`image check`: whatever byte of a store changed is named, and what is mended is whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import StoreCheck, check
from imagefactory.oci.manifests import OciLayer, digest_of
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.filled_store import covered, fill
from tests.made.layout import LAYER_TYPE
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
