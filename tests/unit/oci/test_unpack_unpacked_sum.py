"""Unpacked layers are looked at again: what changed is named, goes, and comes anew; what did not stays."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from imagefactory.fs import Removal, add_checksum
from imagefactory.oci import unpack
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.tree import OPAQUE_ATTRIBUTE
from imagefactory.oci.unpack import find_tree_changes, record_tree
from imagefactory.progress import QUIET, QuietProgress
from tests.made.errors import fails
from tests.made.layer_store import LayerStore, file, folder, link, make_tar


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path)


@pytest.fixture
def layer(store: LayerStore) -> OciLayer:
    return store.add(
        make_tar(
            folder("a", mode=0o555),
            file("a/b", b"hello", mode=0o755),
            link("a/c", "/somewhere/else"),
            link("d", "a/b", tarfile.LNKTYPE),
            file("caf\udce9", b"not UTF-8"),
            file("closed", b"read by nobody", mode=0),
            folder("shut", mode=0),
            file("o/.wh..wh..opq"),
            file(".wh.gone"),
        )
    )


def test_what_nobody_changed_stays(store: LayerStore, layer: OciLayer) -> None:
    (found,) = store.unpack(layer)
    before = found.stat().st_ino
    store.unpacked.drop_changed([layer], store.progress)
    assert store.unpacked.check_all(QUIET, mend=True) == ()
    assert store.unpack(layer)[0].stat().st_ino == before
    assert "removed" not in store.told.getvalue()


def rewrite(root: Path) -> None:
    status = (root / "a/b").stat()
    (root / "a/b").write_bytes(b"HELLO")
    os.utime(root / "a/b", ns=(status.st_atime_ns, status.st_mtime_ns))


def relink(root: Path) -> None:
    (root / "a").chmod(0o755)
    status = (root / "a").stat()
    (root / "a/c").unlink()
    (root / "a/c").symlink_to("/somewhere/elsE")
    os.utime(root / "a/c", ns=(0, 1_600_000_000 * 10**9), follow_symlinks=False)
    os.utime(root / "a", ns=(0, status.st_mtime_ns))
    (root / "a").chmod(0o555)


def lead_out(root: Path) -> None:
    shutil.copytree(root / "a", root.parent / ".elsewhere", symlinks=True)
    (root / "a").rename(root.parent / ".old")
    (root / "a").symlink_to(root.parent / ".elsewhere")


def pipe(root: Path) -> None:
    (root / "closed").unlink()
    os.mkfifo(root / "closed", 0)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "content": (rewrite, "'a/b' has another content|'d' has another content"),
    "target": (relink, "'a/c' has another content"),
    "mode": (lambda root: (root / "d").chmod(0o700), "'(a/b|d)' has another mode"),
    "mode of the root": (lambda root: root.chmod(0o700), r"'\.' has another mode"),
    "time": (lambda root: os.utime(root / "d", ns=(0, 5)), "'(a/b|d)' has another time"),
    "size": (lambda root: (root / "d").write_bytes(b"more than hello"), "'(a/b|d)' has another size"),
    "extra file": (lambda root: (root / "o/x\n").write_bytes(b""), r"'o/x\\n' is not of the layer"),
    "extra folder": (lambda root: (root / "o/x/y").mkdir(parents=True), "'o/x' is not of the layer"),
    "missing": (lambda root: (root / "d").unlink(), "'d' is missing"),
    "whiteout": (lambda root: (root / "gone").unlink(), "'gone' is missing"),
    "time of a folder": (lambda root: os.utime(root / "o", ns=(0, 5)), "'o' has another time"),
    "mark": (lambda root: os.setxattr(root / "a", OPAQUE_ATTRIBUTE, b"y"), "'a' has another content"),
    "mark of the root": (lambda root: os.setxattr(root, OPAQUE_ATTRIBUTE, b"y"), r"'\.' has another content"),
    "mark of a file": (
        lambda root: os.setxattr(root / "d", "user.overlay.whiteout", b"y"),
        "'(a/b|d)' has another content",
    ),
    "unmarked": (lambda root: os.removexattr(root / "o", OPAQUE_ATTRIBUTE), "'o' has another content"),
    "led out": (lead_out, "'a' has another mode"),
    "pipe": (pipe, "'closed' has another mode"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changed_is_named_and_made_anew(store: LayerStore, layer: OciLayer, kind: str) -> None:
    change, words = CHANGES[kind]
    (root,) = store.unpack(layer)
    change(root)
    ((name, fault),) = store.unpacked.check_all(QUIET, mend=False)
    assert name == root.name
    assert re.match(words, fault), fault
    store.unpacked.drop_changed([layer], store.progress)
    assert f"layer {name[:12]} was deleted, and will be unpacked again: {fault}" in store.told.getvalue()
    assert not root.exists()
    store.unpack(layer)
    assert store.unpacked.check_all(QUIET, mend=False) == ()


def test_a_disk_that_changes_bytes_is_found_by_reading_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    recorded = record_tree(tmp_path, {(tmp_path / "a").stat().st_ino: "0" * 64})
    assert find_tree_changes(tmp_path, recorded, every_byte=False) == ""
    assert (
        find_tree_changes(tmp_path, recorded, every_byte=True) == "'a' has another content than in the layer"
    )


def test_all_bytes_are_read_when_all_is_checked(store: LayerStore, layer: OciLayer) -> None:
    (root,) = store.unpack(layer)
    sums = store.unpacked.folder / ".sums" / root.name
    digests = {path.lstat().st_ino: "0" * 64 for path in root.rglob("*")}
    sums.write_bytes(add_checksum(sums, record_tree(root, digests)))
    assert [name for name, _ in store.unpacked.check_all(QUIET, mend=False)] == [root.name]
    store.unpacked.drop_changed([layer], store.progress)
    assert root.is_dir()


def test_a_copy_of_a_tree_and_of_its_files_is_as_good(store: LayerStore, tmp_path: Path) -> None:
    layer = store.add(make_tar(folder("a"), file("a/b", b"hello"), link("c", "a/b"), file("o/.wh..wh..opq")))
    (root,) = store.unpack(layer)
    os.link(root / "a/b", tmp_path / "kept")
    store.unpacked.drop_changed([layer], store.progress)
    shutil.copytree(root, tmp_path / "copy", symlinks=True)
    shutil.rmtree(root)
    (tmp_path / "copy").rename(root)
    store.unpacked.drop_changed([layer], store.progress)
    assert root.is_dir()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{}")])
def test_without_a_whole_record_it_is_made_anew_once(
    store: LayerStore, layer: OciLayer, damage: Callable[[Path], object]
) -> None:
    (root,) = store.unpack(layer)
    damage(store.unpacked.folder / ".sums" / root.name)
    store.unpacked.drop_changed([layer], store.progress)
    assert not root.exists()
    assert "its record is corrupt" in store.told.getvalue()
    store.unpack(layer)
    store.unpacked.drop_changed([layer], store.progress)
    assert root.is_dir()


def test_what_a_sandbox_uses_is_waited_for(store: LayerStore, layer: OciLayer) -> None:
    (root,) = store.unpack(layer)
    used = os.open(root, os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_SH)
    (root / "d").unlink()
    seen = []

    class Ends(QuietProgress):
        def note(self, text: str) -> None:
            if "waiting" in text:
                lock = store.unpacked.folder / ".locks" / root.name
                # Nobody makes it meanwhile.
                with lock.open() as asked, pytest.raises(BlockingIOError):
                    fcntl.flock(asked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen.append(root.is_dir())
                os.close(used)

    store.unpacked.drop_changed([layer], Ends())
    assert seen == [True]
    assert not root.exists()


def test_mending_takes_what_changed_alone(store: LayerStore, layer: OciLayer) -> None:
    other = store.add(make_tar(file("x")))
    changed, kept = store.unpack(layer, other)
    (changed / "d").unlink()
    assert store.unpacked.check_all(QUIET, mend=True) == ((changed.name, "'d' is missing"),)
    assert store.leftovers() == [kept.name]


def test_a_record_goes_with_its_layer(store: LayerStore, layer: OciLayer) -> None:
    kept, gone, lost = store.unpack(layer, store.add(make_tar(file("x"))), store.add(make_tar(file("y"))))
    shutil.rmtree(lost)
    records = store.unpacked.folder / ".sums"
    store.unpacked.collect([f"sha256:{kept.name}"], Removal(store.unpacked.folder, dry_run=True))
    assert {path.name for path in records.iterdir()} == {kept.name, gone.name, lost.name}
    store.unpacked.collect([f"sha256:{kept.name}"], Removal(store.unpacked.folder, dry_run=False))
    assert [path.name for path in records.iterdir()] == [kept.name]


def test_what_is_left_of_writing_a_record_goes(store: LayerStore, layer: OciLayer) -> None:
    (root,) = store.unpack(layer)
    left = store.unpacked.folder / ".sums" / f".{root.name}.abc"
    left.write_bytes(b"half")
    store.unpacked.collect([f"sha256:{root.name}"], Removal(store.unpacked.folder, dry_run=False))
    assert not left.exists()
    assert [path.name for path in (store.unpacked.folder / ".locks").iterdir()] == [root.name]


def test_no_layer_without_a_record(
    store: LayerStore, layer: OciLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> Iterator[IO[bytes]]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(unpack, "replacing", full)
        with fails("disk-full"):
            store.unpack(layer)
    assert store.leftovers() == []


def test_what_its_mode_hides_from_an_ordinary_user_is_not_read(
    store: LayerStore, layer: OciLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root,) = store.unpack(layer)
    digests = {path.stat().st_ino: "0" * 64 for path in root.rglob("*") if path.name == "closed"}
    digests |= {
        path.stat().st_ino: "" for path in root.rglob("*") if path.is_file() and path.name != "closed"
    }
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    recorded = record_tree(root, digests)
    assert "shut/" not in json.loads(recorded)
    assert find_tree_changes(root, recorded, every_byte=True) == ""
