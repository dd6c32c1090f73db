"""What a base adds to the one that it stands on, as a layer of its own: what is there already is left out.

Both are made whole, by mmdebstrap with the scripts of all packages, so that what scripts change counts too.
Times alone make no difference: each base has the clock of its own lock.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self, TypeAlias

from imagefactory.build.base.make import BaseTar
from imagefactory.engines.base.tar import HashedLayer
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.layout import Layout
from imagefactory.oci.model import Layer
from imagefactory.oci.tree import WHITEOUT, Data, Member
from imagefactory.oci.unpack_layer import read_layer
from imagefactory.progress import Progress

Fact: TypeAlias = tuple[str, int, int, int, str]
"""Kind, mode, owner, group, and the sha256 of a file or the target of a link."""


def read_facts(layout: Layout, layers: tuple[Layer, ...], progress: Progress) -> Mapping[str, Fact]:
    """What layers of the store hold, the lowest first, by path. Raises StoreError for a damaged one."""
    facts = _Facts()
    size = sum(layer.descriptor.size for layer in layers)
    with progress.task("what is there below", total=size) as task:
        for layer in layers:
            read_layer(layer, layout.blob_path(layer.descriptor.digest), layout.tmp, facts, task)
    return facts.found


def write_difference(whole: Path, below: Mapping[str, Fact], out: Path) -> BaseTar:
    """Writes to `out` what the layer tar `whole` has beyond `below`, and whiteouts of what it lacks."""
    with tarfile.open(whole, mode="r:") as source, out.open("wb") as written:
        members = {member.name: member for member in source}
        facts = {name: _fact(source, member) for name, member in members.items()}
        entries = {name: members[name] for name, fact in facts.items() if below.get(name) != fact}
        gone = below.keys() - facts.keys()
        whiteouts = [name for name in gone if gone.isdisjoint(_folders(name))]
        # The folders that they lie in, as they are: nobody has to guess their owners and modes.
        for folder in [folder for name in (*entries, *whiteouts) for folder in _folders(name)]:
            if folder in members:
                entries[folder] = members[folder]
        entries |= {member.name: member for member in map(_whiteout, whiteouts)}
        hashed = HashedLayer(written)
        with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as layer:
            for name in sorted(entries, key=lambda name: name.split("/")):
                member = entries[name]
                if member.islnk() and member.linkname not in entries:
                    member = _unlinked(member, members[member.linkname])
                    layer.addfile(member, source.extractfile(members[name]))
                else:
                    layer.addfile(
                        member, source.extractfile(member) if member.isreg() and member.size else None
                    )
    return BaseTar(path=out, sha256=hashed.sha256.hexdigest(), size=hashed.size)


def _fact(source: tarfile.TarFile, member: tarfile.TarInfo) -> Fact:
    """A hard link is what it leads to."""
    if member.issym():
        return "link", 0, member.uid, member.gid, member.linkname
    if member.isdir():
        return "folder", member.mode, member.uid, member.gid, ""
    content = source.extractfile(member)
    assert content is not None  # write_layer lets in no other kind
    return "file", member.mode, member.uid, member.gid, hashlib.sha256(content.read()).hexdigest()


def _unlinked(link: tarfile.TarInfo, target: tarfile.TarInfo) -> tarfile.TarInfo:
    """A hard link to a file of another layer, as a file of its own."""
    made = tarfile.TarInfo(link.name)
    made.mode, made.uid, made.gid, made.mtime, made.size = (
        target.mode,
        target.uid,
        target.gid,
        target.mtime,
        target.size,
    )
    return made


def _whiteout(name: str) -> tarfile.TarInfo:
    folder, slash, last = name.rpartition("/")
    return tarfile.TarInfo(f"{folder}{slash}{WHITEOUT}{last}")


def _folders(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


class _Facts:
    """Takes the entries of layers, the lowest first, and keeps what they come to."""

    def __init__(self) -> None:
        self.found: dict[str, Fact] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, /, *_: object) -> None:
        pass

    def folder(self, parts: tuple[str, ...], member: Member) -> None:
        if parts:
            self.found["/".join(parts)] = ("folder", member.mode, member.uid, member.gid, "")

    def file(self, parts: tuple[str, ...], member: Member, data: Data) -> None:
        digest, left = hashlib.sha256(), member.size
        while left and (piece := data.read(min(CHUNK, left))):
            digest.update(piece)
            left -= len(piece)
        self.found["/".join(parts)] = ("file", member.mode, member.uid, member.gid, digest.hexdigest())

    def symlink(self, parts: tuple[str, ...], member: Member) -> None:
        self.found["/".join(parts)] = ("link", 0, member.uid, member.gid, member.linkname)

    def hard_link(self, parts: tuple[str, ...], target: tuple[str, ...], member: Member) -> None:  # noqa: ARG002
        self.found["/".join(parts)] = self.found["/".join(target)]

    def whiteout(self, parts: tuple[str, ...]) -> None:
        self.remove((*parts[:-1], parts[-1].removeprefix(WHITEOUT)))

    def remove(self, parts: tuple[str, ...]) -> None:
        gone = "/".join(parts)
        self.found = {p: fact for p, fact in self.found.items() if p != gone and not p.startswith(f"{gone}/")}
