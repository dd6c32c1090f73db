"""Archives that somebody else packed: laid, unpacked or scanned, or refused; nothing outside is touched."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.build.wheel_layer import InstallPrefix, lay_wheel
from imagefactory.errors import ImagefactoryError, StoreError
from imagefactory.fs import Removal
from imagefactory.oci.archive import ImageImport, take_docker
from imagefactory.oci.inflate import GZIP, CorruptDataError, inflate
from imagefactory.oci.layers import TarSegment, codec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Descriptor, OciLayer, digest_of
from imagefactory.oci.sif import read_partition
from imagefactory.oci.squash_layers import (
    LayerIndex,
    LayerPacker,
    PackerPool,
    SquashCompression,
    format_image,
    format_index,
)
from imagefactory.oci.unpack import UnpackedLayers, read_layer
from imagefactory.progress import QuietProgress
from imagefactory.scan.files import scan_path
from imagefactory.scan.layers import scan_layer
from tests.attack.ground import ground
from tests.made.gpu_code import library
from tests.made.layer_store import LayerStore
from tests.made.layer_trees import (
    Tree,
    scanned_names,
    squashed_tree,
    tree_names,
    unpacked_tree,
    walked_tree,
    without_texts,
)
from tests.made.mutants import HOSTILE, Shown, changed_bytes
from tests.made.scanned import VERSION, sif, tar
from tests.made.wheels import make_wheel

TORCH = library(("sm_70", "sm_80", "compute_90/8.0"), ("sm_80",), padding=64)
NAMES = st.sampled_from(
    (
        *(
            "a",
            "a/b",
            "a/b/c",
            ".wh.a",
            "a/.wh..wh..opq",
            "lib/x.so",
            "torch/version.py",
            "x" * 300,
            "d/" * 100 + "e",
        ),
        *("", ".", "..", "../a", "/etc/passwd", "a/../../b", "a//b", "\udcff", "a\nb", "é" * 80),
    )
)
TYPES = st.sampled_from(
    (*(tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE), b"3", b"4", b"6", b"7", b"S")
)


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """A tar of a few entries whose names, kinds, modes, owners and attributes nobody should believe."""
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=draw(st.sampled_from((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)))
    ) as archive:
        for _ in range(draw(st.integers(0, 6))):
            info = tarfile.TarInfo(draw(NAMES))
            info.type, info.linkname = draw(TYPES), draw(NAMES)
            info.mode = draw(st.integers(0, 0o7777))
            info.mtime = draw(st.integers(-(2**33), 2**40))
            info.uid = info.gid = draw(st.sampled_from((0, 1000, 2**31, 2**40)))
            content = draw(st.sampled_from((b"", b"x", VERSION, TORCH)))
            info.size = len(content) if info.type == tarfile.REGTYPE else 0
            if archive.format == tarfile.PAX_FORMAT and draw(st.booleans()):
                key = draw(
                    st.sampled_from(
                        ("path", "linkpath", "size", "SCHILY.xattr.user.overlay.opaque", "mtime", "uid")
                    )
                )
                info.pax_headers = {
                    key: draw(st.sampled_from(HOSTILE))
                    .replace("\x00", "")
                    .encode("utf-8", "replace")
                    .decode()
                }
            with suppress(ValueError, UnicodeEncodeError):  # what tarfile itself will not write
                archive.addfile(info, io.BytesIO(content))
    data = out.getvalue()
    return draw(st.just(Shown(data)) | changed_bytes(data))


FORM_NAMES = st.sampled_from(
    (
        *("a", "b", "a/b", "a/b/c", "b/c", "./a", "/a/b", "a/../b/c", "/../a", "b//c/", "dev/null", "d"),
        *(".wh.a", "a/.wh.b", "b/.wh..wh..opq", "d/.wh.c", ".wh..wh.plnk/1", "/", ".", "é" * 70 + "/a"),
    )
)
FORM_TARGETS = st.sampled_from(
    ("a", "b", "/a", "a/b", "../..", "/", "b/..", "..", "d/c", "missing", "/etc/passwd")
)
FORM_TYPES = st.sampled_from(
    (
        *(tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE),
        *(tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE),
    )
)


@st.composite
def layer_forms(draw: st.DrawFn) -> bytes:
    """A whole tar in one of the formats, of entries that engines meet."""
    out = io.BytesIO()
    form = draw(st.sampled_from((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)))
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for number in range(draw(st.integers(0, 9))):
            info = tarfile.TarInfo(draw(FORM_NAMES))
            info.type, info.linkname = draw(FORM_TYPES), draw(FORM_TARGETS)
            content = b"%d" % number * draw(st.sampled_from((1, 1, 700)))
            info.size = len(content) if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) else 0
            if info.name.endswith("/") and info.type == tarfile.AREGTYPE:
                info.size = 0  # a folder, before POSIX
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue() if draw(st.booleans()) else out.getvalue().rstrip(b"\0") + bytes(1024)


PACKINGS = {
    "": bytes,
    "gzip": gzip.compress,
    "members": lambda plain: gzip.compress(plain[:600]) + gzip.compress(plain[600:]),
    "zstd": zstandard.compress,
}


@given(st.lists(layer_forms(), min_size=1, max_size=2), st.data())
def test_every_reader_gives_the_same_tree_or_refuses(plains: list[bytes], data: st.DataObject) -> None:
    with ground() as folder:
        store = LayerStore(folder)
        layers = []
        for plain in plains:
            packed = PACKINGS[data.draw(st.sampled_from(sorted(PACKINGS)))](plain)
            codec_name = data.draw(st.sampled_from(("", "+gzip", "+zstd")))
            layers.append(store.add(plain, codec_name, packed=packed))
        found = [
            _tree_or_error(lambda read=read: read(store, layers))  # type: ignore[misc]
            for read in (unpacked_tree, squashed_tree, walked_tree)
        ]
        assert found[0] == found[1] == found[2]
        if len(layers) == 1 and found[0] is not None:
            assert scanned_names(store, layers[0]) == without_texts(tree_names(found[0]))
        if found[0] is None:
            with pytest.raises(CorruptDataError):
                [scanned_names(store, layer) for layer in layers]


def _tree_or_error(read: Callable[[], Tree]) -> Tree | None:
    try:
        return read()
    except (StoreError, CorruptDataError):
        return None


@given(tars(), st.sampled_from(("", "+gzip", "+zstd")), st.data())
def test_a_layer_is_unpacked_inside_or_not_at_all(plain: bytes, packing: str, data: st.DataObject) -> None:
    packed = {"": bytes, "+gzip": gzip.compress, "+zstd": zstandard.compress}[packing](plain)
    if data.draw(st.booleans()):
        packed = data.draw(changed_bytes(packed))
    kind = f"application/vnd.oci.image.layer.v1.tar{packing}"
    layer = OciLayer(
        descriptor=Descriptor(media_type=kind, digest=digest_of(packed), size=len(packed)),
        diff_id=digest_of(plain),
        title="a layer",
    )
    with ground() as folder, PackerPool(SquashCompression(level=1, block=4096), 1) as packers:
        blob = folder / "blob"
        blob.write_bytes(packed)
        unpacked = UnpackedLayers(folder / "unpacked")
        try:
            (found,) = unpacked.unpack([layer], lambda _: blob, QuietProgress())
        except StoreError as error:
            assert error.message
            assert not unpacked.path(layer.diff_id).exists()
        else:
            assert found.is_dir()
        unpacked.collect((), Removal(unpacked.folder, dry_run=False))
        assert [path for path in unpacked.folder.iterdir() if path.name not in (".locks", ".sums")] == []
        packer = LayerPacker(io.BytesIO(), packers)
        try:
            read_layer(layer, blob, folder, packer, QuietProgress().task("").__enter__())
        except StoreError as error:
            assert error.message
        else:
            rows = [(packer.index, packer.size), (LayerIndex(), 0)]
            format_image(rows, [0], packers.squeeze, mtime=0)
            json.dumps(format_index(packer.index))
    with suppress(CorruptDataError):
        scan_layer(iter((plain[:700], plain[700:])))
    if packing == "+gzip":
        with suppress(CorruptDataError):
            scan_layer(inflate(iter((packed,)), GZIP))


@given(st.data())
def test_a_wheel_is_laid_or_refused(data: st.DataObject) -> None:
    with ground() as folder:
        names = data.draw(
            st.lists(NAMES.filter(lambda name: "\udcff" not in name and name), max_size=4, unique=True)
        )
        wheel = make_wheel(folder, "demo", {"demo/__init__.py": VERSION, **dict.fromkeys(names, TORCH)})
        if data.draw(st.booleans()):
            wheel.write_bytes(data.draw(changed_bytes(wheel.read_bytes())))
        segment = TarSegment(codec("zstd"), _Nowhere(), hashlib.sha256(), epoch=1)
        with suppress(ImagefactoryError):
            lay_wheel(
                wheel,
                InstallPrefix(prefix="/opt/env", python="3.11"),
                segment,
                _Compiler(),
                sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
                report=lambda _: None,
            )
        with suppress(ImagefactoryError):
            scan_path(wheel, QuietProgress())


@given(changed_bytes(TORCH))
def test_gpu_code_is_read_or_said_to_be_damaged(code: bytes) -> None:
    with ground() as folder:
        path = folder / "lib.so"
        path.write_bytes(code)
        with suppress(ImagefactoryError):
            scan_path(path, QuietProgress())
    with suppress(CorruptDataError):
        scan_layer(iter((tar(("lib/x.so", code)),)))


@given(changed_bytes(sif()))
def test_a_sif_is_read_or_refused(data: bytes) -> None:
    with ground() as folder:
        path = folder / "a.sif"
        path.write_bytes(data)
        with suppress(ImagefactoryError):
            read_partition(path)


def saved() -> bytes:
    """What `docker save` writes of an image of one layer."""
    layer = tar(("a/b", b"hello"))
    config = b'{"config": {}, "rootfs": {"type": "layers", "diff_ids": ["%s"]}}' % digest_of(layer).encode()
    manifest = b'[{"Config": "c.json", "RepoTags": null, "Layers": ["1/layer.tar"]}]'
    return tar(("1/layer.tar", layer), ("c.json", config), ("manifest.json", manifest))


@given(changed_bytes(saved()))
def test_a_saved_image_is_taken_or_refused(data: bytes) -> None:
    with ground() as folder:
        taking = ImageImport(codec=codec("zstd"), known={}, report=lambda _: None)
        with suppress(ImagefactoryError):
            take_docker(Layout(folder / "store"), io.BytesIO(data), taking)


class _Nowhere:
    def write(self, data: bytes) -> None:
        pass


class _Compiler:
    """Byte code is another attack's: what is compiled is compiled inside the base."""

    def compile(self, path: str, source: bytes) -> bytes | None:
        return None if b"\0" in source else b"byte code"
