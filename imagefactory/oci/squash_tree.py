"""Layers over one another: the one tree that a squashfs shows of them (OCI specification, whiteouts)."""

from __future__ import annotations

from collections.abc import Sequence

from imagefactory.oci.squash_layers import LayerIndex, Parts, Squeeze
from imagefactory.oci.squashfs import NO_FRAGMENT, SUPERBLOCK, File, Folder, Link, Node, format_tables


def format_image(
    rows: Sequence[tuple[LayerIndex, int]], order: Sequence[int], squeeze: Squeeze, *, mtime: int
) -> tuple[bytes, bytes]:
    """What stands before and behind the rows of an image's layers: the superblock and the tables. Pure.

    `rows` are the layers' indices and bytes as they follow one another, the last one is what apptainer adds;
    `order` are the numbers of the image's layers, the lowest first: a layer can stand in an image twice.
    """
    tree, starts, at = SquashTree(), [], SUPERBLOCK
    for _, size in rows:
        starts.append(at)
        at += size
    for place in order:
        tree.lay(rows[place][0], starts[place])
    tree.dress(rows[-1][0], starts[-1])
    return format_tables(
        tree.root,
        tree.fragments,
        data_end=at,
        block=squeeze.block,
        mtime=mtime,
        compress=squeeze.compressor(),
    )


class SquashTree:
    """The tree so far, and the fragments of all layers. The layers' own indices stay as they are."""

    def __init__(self) -> None:
        self.root = Folder()
        self.fragments: list[tuple[int, int]] = []

    def lay(self, layer: LayerIndex, start: int) -> None:
        """Puts the next layer over it, whose row begins `start` bytes behind the superblock's beginning."""
        for path in layer.hidden:
            above = self._find(path[:-1])
            if isinstance(above, Folder):
                above.entries.pop(path[-1], None)
        for path in layer.opaque:
            folder = self._find(path)
            if isinstance(folder, Folder):
                folder.entries.clear()
        _lay(self.root, layer.root, _Moved(start, len(self.fragments)))
        self._take_fragments(layer, start)

    def dress(self, made: LayerIndex, start: int) -> None:
        """Adds what apptainer put into an empty image, as it puts it into a full one.

        Folders of the image stay as they are, and so do its links and folders where apptainer has a file, and
        its files and folders where apptainer has a link.
        """
        _dress(self.root, made.root, _Moved(start, len(self.fragments)))
        self._take_fragments(made, start)

    def _take_fragments(self, layer: LayerIndex, start: int) -> None:
        self.fragments += [(start + at, size) for at, size in layer.fragments]

    def _find(self, path: Parts) -> Node | None:
        node: Node | None = self.root
        for name in path:
            node = node.entries.get(name) if isinstance(node, Folder) else None
        return node


class _Moved:
    """Files of a layer where they are in the image; one that has two names keeps them."""

    def __init__(self, start: int, fragments: int) -> None:
        self._start, self._fragments = start, fragments
        self._files: dict[int, File] = {}

    def __call__(self, node: File | Link) -> File | Link:
        if isinstance(node, Link):
            return node
        if id(node) not in self._files:
            shared = node.fragment != NO_FRAGMENT
            self._files[id(node)] = File(
                owned=node.owned,
                size=node.size,
                start=node.start + self._start if node.blocks else 0,
                blocks=node.blocks,
                fragment=node.fragment + self._fragments if shared else NO_FRAGMENT,
                offset=node.offset,
            )
        return self._files[id(node)]


def _lay(below: Folder, above: Folder, moved: _Moved) -> None:
    below.owned = above.owned or below.owned
    for name, node in above.entries.items():
        if isinstance(node, Folder):
            there = below.entries.get(name)
            if not isinstance(there, Folder):
                there = below.entries[name] = Folder()
            _lay(there, node, moved)
        else:
            below.entries[name] = moved(node)


def _dress(image: Folder, made: Folder, moved: _Moved) -> None:
    for name, node in made.entries.items():
        there = image.entries.get(name)
        if isinstance(node, Folder):
            if there is None:
                there = image.entries[name] = Folder(owned=node.owned)
            if isinstance(there, Folder):
                _dress(there, node, moved)
        elif there is None or type(there) is type(node):
            image.entries[name] = moved(node)
