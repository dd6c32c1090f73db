"""The topmost layer of an image: own files that its recipe names, and the folder its command starts in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from imagefactory.errors import BuildError
from imagefactory.model import Definition, OwnFile
from imagefactory.oci.layers import CHUNK, Segment
from imagefactory.oci.manifests import hash_key
from imagefactory.build.definition import SHARED, files_digest, new_places

TITLE = "own files"


def own_title(definition: Definition) -> str:
    """The layer's title, which says what is in it; empty where there is nothing to lay."""
    if not definition.files and definition.start.workdir == "/":
        return ""
    return f"{TITLE} {hash_key(files_digest(definition.files), definition.start.workdir)[:12]}"


def lay_own_files(definition: Definition, segment: Segment) -> None:
    """Writes them as root's, readable by all. Folders that every image has get no entry, so they stay as
    they are. Raises BuildError for a file that is not what was hashed."""
    segment.known(*_shared(definition))
    for file in definition.files:
        segment.file(file.path.lstrip("/"), _read(file), size=file.size, executable=file.executable)
    if definition.start.workdir != "/":
        segment.folder(definition.start.workdir.lstrip("/"))


def _shared(definition: Definition) -> Iterator[str]:
    for place in (*new_places(definition), f"{definition.start.workdir}/."):
        parts = place.strip("/").split("/")
        for depth in range(1, len(parts)):
            if SHARED.fullmatch(f"/{(path := '/'.join(parts[:depth]))}"):
                yield path


def _read(file: OwnFile) -> Iterator[bytes]:
    digest = hashlib.sha256()
    with file.source.open("rb") as opened:
        while data := opened.read(CHUNK):
            digest.update(data)
            yield data
    if digest.hexdigest() != file.sha256:
        raise BuildError(
            "file-changed", f"{file.source} changed while it was read", hint="run the command again"
        )
