"""The topmost layer: own files and the folder that a command starts in, and nothing of what images have."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import zstandard

from imagefactory.build.definition import define
from imagefactory.build.layer_lock import lay_own_files, own_title
from imagefactory.model import BuildSpec, OwnFile
from imagefactory.oci.layers import TarSegment, codec
from tests.made.errors import fails
from tests.made.values import make_base, make_lock, make_target


def own(folder: Path, path: str, *, executable: bool = False) -> OwnFile:
    source = folder / path.strip("/").replace("/", "-")
    source.write_text(path)
    digest = hashlib.sha256(path.encode()).hexdigest()
    return OwnFile(path=path, source=source, sha256=digest, size=len(path), executable=executable)


def with_files(*files: OwnFile, workdir: str = "") -> BuildSpec:
    target = make_target()
    target = replace(target, start=replace(target.start, workdir=workdir))
    return define(target, make_base(), make_lock(), (), files)


def laid(definition: BuildSpec) -> list[tuple[str, str, int, int]]:
    """Name, kind, mode and owner of the layer's entries, in their order."""
    sink = io.BytesIO()
    segment = TarSegment(codec("zstd"), sink, hashlib.sha256(), epoch=7)
    lay_own_files(definition, segment)
    segment.raw(bytes(1024))
    segment.close()
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(sink.getvalue())
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        assert {member.mtime for member in tar} <= {7}
        return [(member.name, member.type.decode(), member.mode, member.uid) for member in tar]


def test_files_are_roots_and_shared_folders_keep_their_modes(tmp_path: Path) -> None:
    paths = ("/app/src/net.py", "/home/user/note", "/opt/mine/x")
    files = [own(tmp_path, path) for path in paths]
    files.append(own(tmp_path, "/usr/local/bin/start", executable=True))
    assert laid(with_files(*files, workdir="/home/user/run")) == [
        ("app", "5", 0o755, 0),
        ("app/src", "5", 0o755, 0),
        ("app/src/net.py", "0", 0o644, 0),
        ("home/user/note", "0", 0o644, 0),
        ("opt/mine", "5", 0o755, 0),
        ("opt/mine/x", "0", 0o644, 0),
        ("usr/local/bin/start", "0", 0o755, 0),
        ("home/user/run", "5", 0o755, 0),
    ]
    assert laid(with_files(workdir="/home/user")) == []


def test_its_title_says_what_is_in_it(tmp_path: Path) -> None:
    one, two = own(tmp_path, "/app/a"), own(tmp_path, "/app/b")
    assert own_title(with_files()) == ""
    titles = {
        own_title(made)
        for made in (
            with_files(one),
            with_files(one, two),
            with_files(replace(one, executable=True)),
            with_files(one, workdir="/app"),
            with_files(workdir="/app"),
        )
    }
    assert len(titles) == 5
    assert all(title.startswith("own files ") for title in titles)


def test_a_file_that_is_written_to_meanwhile_stops(tmp_path: Path) -> None:
    file = own(tmp_path, "/app/a")
    file.source.write_text("/app/c")
    with fails("file-changed"):
        laid(with_files(file))
