"""The one tree of some layers, as each reader of layers gives it: path to "folder", "->target" or content."""

from __future__ import annotations

import io
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from imagefactory.oci.inflate import plain_layer
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.squash_layers import (
    LayerIndex,
    LayerPacker,
    PackerPool,
    SquashCompression,
    format_image,
)
from imagefactory.oci.tar_stream import DIRECTORY, HIDDEN, REMOVED, SYMLINK, TarStream, entries
from imagefactory.oci.tree import OPAQUE, OPAQUE_ATTRIBUTE, WHITEOUT
from imagefactory.oci.unpack import read_layer
from imagefactory.progress import QuietProgress
from imagefactory.scan.findings import is_text
from imagefactory.scan.layers import scan_layer
from tests.made.layer_store import LayerStore
from tests.made.squashfs import SquashReader

Tree = dict[bytes, bytes]


def unpacked_tree(store: LayerStore, layers: Sequence[OciLayer]) -> Tree:
    """What an overlay mount over the unpacked folders shows (Linux, Documentation/filesystems/overlayfs)."""
    tree: Tree = {}
    for folder in store.unpack(*layers):
        _overlay(tree, os.fsencode(folder), b"")
    return tree


def _overlay(tree: Tree, folder: bytes, above: bytes) -> None:
    if os.fsdecode(OPAQUE_ATTRIBUTE) in os.listxattr(folder):
        _drop(tree, above)
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        path = above + b"/" * bool(above) + entry.name
        state = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(state.st_mode):
            if tree.get(path, b"folder") != b"folder":
                _drop(tree, path)
            tree[path] = b"folder"
            _overlay(tree, entry.path, path)
            continue
        _drop(tree, path)
        tree.pop(path, None)
        if stat.S_ISLNK(state.st_mode):
            tree[path] = b"->" + os.fsencode(Path(os.fsdecode(entry.path)).readlink())
        elif stat.S_ISREG(state.st_mode):
            tree[path] = Path(os.fsdecode(entry.path)).read_bytes()
        else:
            assert (stat.S_ISCHR(state.st_mode), state.st_rdev) == (True, 0), "only whiteouts may be devices"


def _drop(tree: Tree, folder: bytes) -> None:
    for path in [one for one in tree if one.startswith(folder + b"/" if folder else b"")]:
        del tree[path]


def squashed_tree(store: LayerStore, layers: Sequence[OciLayer]) -> Tree:
    """What the squashfs of a .sif shows."""
    out, rows = io.BytesIO(), []
    with PackerPool(SquashCompression(level=1, block=4096), 1) as packers:
        for layer in layers:
            packer = LayerPacker(out, packers)
            blob = store.blob_path(layer.descriptor.digest)
            read_layer(layer, blob, store.path, packer, QuietProgress().task("").__enter__())
            rows.append((packer.index, packer.size))
        head, tables = format_image([*rows, (LayerIndex(), 0)], range(len(layers)), packers.squeeze, mtime=0)
    found = SquashReader(head + out.getvalue() + tables).entries
    shown = {"folder": lambda _: b"folder", "link": lambda one: b"->" + one.target}
    return {path: shown.get(one.kind, lambda one: one.content)(one) for path, one in found.items() if path}


def walked_tree(store: LayerStore, layers: Sequence[OciLayer]) -> Tree:
    """What the walk itself says: each entry in its turn, over the layers below."""
    tree: Tree = {}
    for layer in layers:
        mine: Tree = {}
        gone: set[bytes] = set()
        emptied: set[bytes] = set()
        for entry in entries(_stream(store, layer)):
            path = os.fsencode(entry.path)
            if entry.kind == HIDDEN:
                above, name = posixpath.split(path)
                if name == OPAQUE.encode():
                    emptied.add(above)
                else:
                    gone.add(above + b"/" * bool(above) + name[len(WHITEOUT) :])
                _make_folders(mine, above)
            elif entry.kind == REMOVED:
                _drop(mine, path)
                mine.pop(path, None)
            elif path:
                _make_folders(mine, posixpath.dirname(path))
                content = entry.read(entry.size)
                if entry.kind == DIRECTORY:
                    mine[path] = b"folder"
                elif entry.kind == SYMLINK:
                    mine[path] = b"->" + os.fsencode(entry.linkname)
                elif entry.target:
                    mine[path] = mine[os.fsencode("/".join(entry.target))]
                else:
                    mine[path] = content
        for path in (*gone, *emptied):
            _drop(tree, path)
        for path in (*gone, *(one for one, what in mine.items() if what != b"folder")):
            _drop(tree, path)
            tree.pop(path, None)
        tree |= mine
    return tree


def _make_folders(tree: Tree, path: bytes) -> None:
    while path:
        assert tree.setdefault(path, b"folder") == b"folder"
        path = posixpath.dirname(path)


def scanned_names(store: LayerStore, layer: OciLayer) -> set[str]:
    """The files and links that a scan names, but for texts."""
    scan = scan_layer(_stream_chunks(store, layer))
    return {*(one.path for one in scan.findings), *scan.plain}


def tree_names(tree: Tree) -> set[str]:
    """Those that a scan of this tree must name."""
    return {os.fsdecode(path) for path, what in tree.items() if what != b"folder"}


def without_texts(names: set[str]) -> set[str]:
    return {name for name in names if not is_text(name)}


def _stream(store: LayerStore, layer: OciLayer) -> TarStream:
    return TarStream(_stream_chunks(store, layer))


def _stream_chunks(store: LayerStore, layer: OciLayer) -> Iterator[bytes]:
    data = store.blob_path(layer.descriptor.digest).read_bytes()
    return plain_layer(layer.descriptor.media_type, iter([data]))
