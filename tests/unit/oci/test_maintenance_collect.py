"""What cannot be removed is named, and all else goes."""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imagefactory import fs
from imagefactory.errors import EXIT_BUILD
from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import CollectResult, collect
from imagefactory.progress import QuietProgress
from imagefactory.runtime.sandbox.keeper import make_scratch
from imagefactory.trees import alone_in, remove_tree
from tests.made.command import Call
from tests.made.layout import LAYER_TYPE, add_image

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
def layout(tmp_path: Path) -> Layout:
    """A store with an image, and seven things that nobody needs."""
    layout = Layout(tmp_path / "store")
    add_image(layout, "a:1", [b"one"])
    for data in (b"loose", b"another"):
        layout.add(data, LAYER_TYPE)
    for name in (PART, LOOSE, "3" * 64):
        (layout.path / "unpacked" / name / "usr").mkdir(parents=True)
    for name in ("left", "more"):
        (layout.tmp / name).mkdir()
    return layout


def test_what_cannot_be_removed_is_named_and_all_else_goes(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = min(
        path
        for path in (layout.path / "blobs/sha256").iterdir()
        if path.read_bytes() in (b"loose", b"another")
    )
    planned = collect(layout, QuietProgress(), dry_run=True)
    assert (planned.blobs, planned.unpacked, planned.stuck) == (2, 3, ())
    refuse(monkeypatch, blob.name, PART, LOOSE, "left")
    done = collect(layout, QuietProgress())
    assert (done.blobs, done.unpacked) == (1, 1)
    assert sorted(path for path, _ in done.stuck) == sorted(
        map(str, (blob, layout.tmp / "left", *((layout.path / "unpacked" / name) for name in (PART, LOOSE))))
    )
    for path, error in done.stuck:
        assert error.code == "cannot-delete-file"
        assert path in error.message
    assert [path.name for path in layout.tmp.iterdir()] == ["left"]
    monkeypatch.undo()
    again = collect(layout, QuietProgress())
    assert (again.blobs, again.unpacked, again.stuck) == (1, 2, ())
    assert collect(layout, QuietProgress()) == CollectResult(blobs=0, unpacked=0, records=0, bytes=0)
    assert layout.image("a:1") is not None


def test_scratch_of_killed_sandboxes_goes_and_that_of_living_ones_stays(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(layout, QuietProgress())
    scratch = layout.path / "run"
    living, lock, _ = make_scratch(str(scratch))
    for name in ("dead", "immutable"):
        (scratch / name).mkdir()
        (scratch / name / "file").write_bytes(b"12345")
    (scratch / "stray").touch()
    refuse(monkeypatch, "immutable")
    assert collect(layout, QuietProgress(), dry_run=True).bytes == 10
    done = collect(layout, QuietProgress())
    assert done.bytes == 5
    assert sorted(path for path, _ in done.stuck) == [f"{scratch}/{name}" for name in ("immutable", "stray")]
    assert sorted(path.name for path in scratch.iterdir()) == sorted(
        [Path(living).name, "immutable", "stray"]
    )
    assert Path(living, "upper").is_dir()
    os.close(lock)


def test_a_sandbox_that_begins_is_waited_for(layout: Layout) -> None:
    """Its folder stands before it is locked."""
    scratch = layout.path / "run"
    scratch.mkdir()
    with ThreadPoolExecutor() as pool:
        with alone_in(scratch):
            (scratch / "new").mkdir()
            collecting = pool.submit(collect, layout, QuietProgress())
            waiting = f":{scratch.stat().st_ino} "
            while not any("->" in line and waiting in line for line in LOCKS.read_text().splitlines()):
                assert not collecting.done()
            lock = os.open(scratch / "new", os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        collecting.result()
    assert (scratch / "new").is_dir()
    os.close(lock)
    collect(layout, QuietProgress())
    assert not (scratch / "new").exists()


def test_the_command_names_what_stays_in_the_store_and_the_cache(
    call: Call, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, goes = (tmp_path / "cache/conda-pkgs" / name / "file" for name in ("stays", "goes"))
    for path in (stays, goes):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12345")
    refuse(monkeypatch, "stays", "left")
    said = call("image", "prune", "--cache")
    assert said.code == EXIT_BUILD
    assert set(said.error_codes) == {"cannot-delete-file"}
    assert f"{layout.tmp}/left/.../stays" in said.err
    assert f"{stays.parent}/.../stays" in said.err
    assert "5 bytes" in said.out
    assert (stays.exists(), goes.exists()) == (True, False)
    told = call("image", "prune", "--cache", "--json").json()
    assert [row["target"] for row in told["errors"]] == [f"{layout.tmp}/left", str(stays.parent)]
