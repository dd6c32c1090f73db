"""Layers become folders: what they hold, what is refused, and what a full disk or a rival process does."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import multiprocessing
import os
import re
import shutil
import stat
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from imagefactory.errors import StoreError
from imagefactory.fs import Removal, add_checksum
from imagefactory.oci import unpack
from imagefactory.oci.manifests import Descriptor, OciLayer
from imagefactory.oci.tree import OPAQUE_ATTRIBUTE, entry_parts
from imagefactory.oci.unpack import UnpackedLayers, find_tree_changes, record_tree
from imagefactory.progress import QUIET, QuietProgress
from imagefactory.trees import remove_tree
from tests.made.deep import MakeDeep
from tests.made.errors import fails
from tests.made.layer_store import TAR, Entry, LayerStore, digest, file, folder, link, make_tar


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path)


@pytest.mark.parametrize("codec", ["", "+gzip", "+zstd"])
def test_content_modes_and_times(store: LayerStore, codec: str) -> None:
    tar = make_tar(
        folder("a", mode=0o555),
        file("a/b", b"hello", mode=0o755),
        link("a/c", "/somewhere/else"),
        link("d", "a/b", tarfile.LNKTYPE),
        file("set", mode=0o6755),
        file("implied/parent/file"),
        file("big", b"z" * 3_000_000),
    )
    (found,) = store.unpack(store.add(tar, codec))
    assert found == store.unpacked.folder / digest(tar).removeprefix("sha256:")
    assert (found / "a/b").read_bytes() == b"hello"
    assert stat.S_IMODE((found / "a").stat().st_mode) == 0o555
    assert stat.S_IMODE((found / "a/b").stat().st_mode) == 0o755
    assert (found / "a").stat().st_mtime == (found / "a/b").stat().st_mtime == 1_600_000_000
    assert (found / "a/c").readlink() == Path("/somewhere/else")
    assert (found / "d").stat().st_ino == (found / "a/b").stat().st_ino
    assert stat.S_IMODE((found / "set").stat().st_mode) == 0o755
    assert stat.S_IMODE((found / "implied/parent").stat().st_mode) == 0o755
    assert (found / "big").stat().st_size == 3_000_000
    assert stat.S_IMODE(store.unpacked.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(found.stat().st_mode) == 0o755
    remove_tree(found)
    assert not found.exists()


def test_modes_are_the_layers_whatever_the_umask(store: LayerStore) -> None:
    layer = store.add(make_tar(file("implied/file", mode=0o644), folder("a", mode=0o755)))
    before = os.umask(0o077)
    try:
        (found,) = store.unpack(layer)
    finally:
        os.umask(before)
    modes = {place: stat.S_IMODE((found / place).stat().st_mode) for place in (".", "implied", "a")}
    assert modes == dict.fromkeys(modes, 0o755)
    assert stat.S_IMODE((found / "implied/file").stat().st_mode) == 0o644


def test_gzip_of_many_members(store: LayerStore) -> None:
    tar = make_tar(file("a", b"1" * 5000), file("b", b"2" * 5000))
    packed = b"".join(gzip.compress(tar[start : start + 700]) for start in range(0, len(tar), 700))
    (found,) = store.unpack(store.add(tar, "+gzip", packed=packed))
    assert (found / "b").read_bytes() == b"2" * 5000


def test_unpacked_once_and_shared(store: LayerStore) -> None:
    first, second = store.add(make_tar(file("a"))), store.add(make_tar(file("b")))
    paths = store.unpack(first, second, first)
    assert paths[0] == paths[2] != paths[1]
    store.blob_path(first.descriptor.digest).unlink()
    assert store.unpack(first) == paths[:1]


@pytest.mark.parametrize("entries", [
    [file("../out")],
    [file("a/../../out")],
    [file("f"), file("f/g")],
    [link("h", "../../outside", tarfile.LNKTYPE)],
    [link("h", "missing", tarfile.LNKTYPE)],
    [link("d", "/etc"), link("h", "d/passwd", tarfile.LNKTYPE)],
    [file(".wh..")],
    [file(".wh...")],
    [file("x" * 300)],
    [file("d/" * 100 + "f")],
])  # fmt: skip
def test_refused_and_nothing_left(store: LayerStore, entries: list[Entry]) -> None:
    with pytest.raises(StoreError):
        store.one(*entries)
    assert store.leftovers() == []
    assert not (store.path / "out").exists()


def test_device_nodes_below_dev_are_left_out(store: LayerStore) -> None:
    found = store.one(folder("dev"), file("dev/null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3))
    assert list((found / "dev").iterdir()) == []


def test_later_entries_win(store: LayerStore) -> None:
    found = store.one(file("a", b"1"), link("a", "b"), file("a", b"3"), folder("d"), folder("d", mode=0o700))
    assert (found / "a").read_bytes() == b"3"
    assert stat.S_IMODE((found / "d").stat().st_mode) == 0o700


def is_whiteout(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def test_whiteouts_become_overlays(store: LayerStore) -> None:
    found = store.one(
        file("a/.wh.gone"), file("b/.wh..wh..opq"), file("b/new"), file(".wh.mine"), file("mine", b"here"),
        folder("over"), file("over/f"), file(".wh.over"), file(".wh.later"), file("later/f"),
    )  # fmt: skip
    assert is_whiteout(found / "a/gone")
    assert os.getxattr(found / "b", OPAQUE_ATTRIBUTE) == b"y"
    assert (found / "mine").read_bytes() == b"here"
    for name in ("over", "later"):
        assert (found / name / "f").read_bytes() == b"x"
        assert os.getxattr(found / name, OPAQUE_ATTRIBUTE) == b"y"


def test_refused_whiteout_says_what_to_do(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refuse)
    with fails("filesystem-unsupported", "whiteouts") as told:
        store.one(file(".wh.gone"))
    assert "local disk" in told.value.hint


def test_wrong_content_is_refused(store: LayerStore) -> None:
    layer = store.add(make_tar(file("a")))
    wrong = OciLayer(descriptor=layer.descriptor, diff_id=digest(b"other"), title="w")
    with fails("layer-corrupt", "sha256:"):
        store.unpack(wrong)
    assert store.leftovers() == []


@pytest.mark.parametrize("codec", ["", "+gzip", "+zstd"])
def test_every_truncation_is_refused(store: LayerStore, codec: str) -> None:
    tar = make_tar(file("a", os.urandom(3000)), file("b", os.urandom(3000)))
    whole = store.add(tar, codec)
    data = store.blob_path(whole.descriptor.digest).read_bytes()
    for length in range(0, len(data), 511):
        with pytest.raises(StoreError):
            store.unpack(store.add(tar, codec, packed=data[:length]))
    assert store.leftovers() == []


def test_broken_header_in_the_middle_is_refused(store: LayerStore) -> None:
    tar = bytearray(make_tar(file("a"), file("b"), file("c")))
    tar[1024 + 10] ^= 0xFF  # the name in b's header, so that its checksum is wrong
    with fails("layer-corrupt", "header"):
        store.unpack(store.add(bytes(tar)))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_small_layer_with_a_huge_header_takes_no_memory(store: LayerStore, kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 64 << 20
    layer = store.add(info.tobuf() + bytes(info.size), "+gzip")
    tracemalloc.start()
    try:
        with fails("layer-corrupt", "header"):
            store.unpack(layer)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("isal", [True, False])
@pytest.mark.parametrize(
    "packed",
    [gzip.compress(b"")[:10] + b"\xff" * 40, b"no gzip at all" * 9, gzip.compress(bytes(9999))[:-3]],
    ids=["no deflate", "no gzip", "cut"],
)
def test_gzip_that_is_damaged_is_said(
    store: LayerStore, packed: bytes, isal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isal:
        monkeypatch.setitem(sys.modules, "isal", None)
    with fails("layer-corrupt"):
        store.unpack(store.add(b"", "+gzip", packed=packed))


def test_unknown_codec_and_missing_blob(store: LayerStore) -> None:
    layer = store.add(make_tar(file("a")))
    strange = Descriptor(media_type=TAR + "+xz", digest=layer.descriptor.digest, size=1)
    with fails("layer-type-unsupported", r"\+xz"):
        store.unpack(OciLayer(descriptor=strange, diff_id=layer.diff_id, title=""))
    store.blob_path(layer.descriptor.digest).unlink()
    with fails("cannot-read-file"):
        store.unpack(layer)


def test_full_disk_names_folder_and_bytes(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = make_tar(file("a", b"1" * 100_000), file("b", b"2" * 400_000))
    layer, real = store.add(tar), os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError) as told:
        store.unpack(layer)
    assert str(store.unpacked.folder) in told.value.message
    assert f"{len(tar)} bytes" in told.value.message
    assert store.leftovers() == []


def unpack_in_child(path: Path, layer: OciLayer, results: multiprocessing.Queue[str]) -> None:
    found = UnpackedLayers(path / "unpacked").unpack(
        [layer], lambda blob: path / "blobs" / blob, QuietProgress()
    )
    results.put(str(found[0]))


def test_processes_at_once(store: LayerStore) -> None:
    layer = store.add(make_tar(*(file(f"d/{number}", b"x" * 2000) for number in range(800))), "+gzip")
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[str] = context.Queue()
    children = [context.Process(target=unpack_in_child, args=(store.path, layer, results)) for _ in range(3)]
    for child in children:
        child.start()
    found = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert found == {str(store.unpacked.path(layer.diff_id))}
    assert len(list((store.unpacked.path(layer.diff_id) / "d").iterdir())) == 800


def test_leftover_of_a_killed_process_is_replaced_and_collected(store: LayerStore) -> None:
    layer = store.add(make_tar(file("a")))
    name = layer.diff_id.removeprefix("sha256:")
    for left in (f".{name}.0a1b.part", f".{'0' * 64}.0a1b.part"):
        (store.unpacked.folder / left / "half").mkdir(parents=True)
    (found,) = store.unpack(layer)
    assert [path.name for path in found.iterdir()] == ["a"]
    assert store.unpacked.collect([layer.diff_id], Removal(store.unpacked.folder, dry_run=False)) == (
        f".{'0' * 64}.0a1b.part",
    )
    assert store.leftovers() == [name]


def test_a_leftover_that_cannot_be_removed_stops_no_run(
    store: LayerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = store.add(make_tar(file("a")))
    name = layer.diff_id.removeprefix("sha256:")
    stuck = [f".{name}.0a1b.part", f".{name}.part"]
    for left in stuck:
        (store.unpacked.folder / left).mkdir(parents=True)

    def refuse(_: Path, path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", f"{path}/stays")

    monkeypatch.setattr(unpack, "remove_inside", refuse)
    (found,) = store.unpack(layer)
    assert [path.name for path in found.iterdir()] == ["a"]
    assert sorted(store.leftovers()) == [*stuck, name]
    with fails("layer-corrupt"):
        store.unpack(store.add(make_tar(file("a"))[:700]))


def test_collect(store: LayerStore) -> None:
    kept, loose = store.unpack(
        store.add(make_tar(file("a"))),
        store.add(make_tar(file("b", b"1" * 9000, mode=0), folder("c", mode=0))),
    )
    keep = [f"sha256:{kept.name}"]
    for dry_run in (True, False):
        assert loose.exists()
        removal = Removal(store.unpacked.folder, dry_run=dry_run)
        assert store.unpacked.collect(keep, removal) == (loose.name,)
        assert removal.bytes == 9000
    assert store.leftovers() == [kept.name]


def test_leftovers_deeper_than_any_path_are_collected(store: LayerStore, make_deep: MakeDeep) -> None:
    (kept,) = store.unpack(store.add(make_tar(file("a"))))
    part = make_deep(store.unpacked.folder / f".{'0' * 64}.part")
    for dry_run in (True, False):
        removal = Removal(store.unpacked.folder, dry_run=dry_run)
        assert store.unpacked.collect([f"sha256:{kept.name}"], removal) == (part.name,)
        assert removal.bytes == len("bottom")
    assert store.leftovers() == [kept.name]


@pytest.mark.parametrize(("name", "parts"), [
    ("./", ()), (".", ()), ("./a//b/./c", ("a", "b", "c")), ("a/", ("a",)), ("..a/b..", ("..a", "b..")),
])  # fmt: skip
def test_entry_parts(name: str, parts: tuple[str, ...]) -> None:
    assert entry_parts(name) == parts


def test_a_name_that_no_file_system_takes_is_no_fault_of_the_disk(store: LayerStore) -> None:
    with fails("layer-entry-unsafe", "256 bytes"):
        store.unpack(store.add(make_tar(file("a" * 256))))
    (made,) = store.unpack(store.add(make_tar(file("b"), file(".wh." + "a" * 255))))
    assert stat.S_ISCHR((made / ("a" * 255)).stat().st_mode)


def test_bad_digest_is_no_path(store: LayerStore) -> None:
    for bad in ("sha256:../../x", "sha512:" + "0" * 64, "sha256:" + "G" * 64, ""):
        with fails("digest-invalid"):
            store.unpacked.path(bad)


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
    "extra file": (lambda root: (root / "o/x\n").write_bytes(b""), r"'o/x\\n' is not in the layer"),
    "extra folder": (lambda root: (root / "o/x/y").mkdir(parents=True), "'o/x' is not in the layer"),
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
