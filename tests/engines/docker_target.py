"""A target of two tiny wheels on a small Debian base, and the index that serves them, with a password."""

from __future__ import annotations

import base64
import hashlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from imagefactory.build.base.image import BuiltBase, format_time, write_index
from imagefactory.build.definition import SYSTEM_PATH, define
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.model import BuildSpec, SourceLocation
from imagefactory.oci.layers import CHUNK, codec
from imagefactory.oci.layout import BlobWriter, Layout
from imagefactory.oci.manifests import CONFIG_TYPE, MANIFEST_TYPE, OciLayer, canonical_json, format_descriptor
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import QuietProgress
from tests.made.values import make_base, make_lock, make_target
from tests.made.wheels import locked, make_wheel
from tests.services.children import stdout_of

EPOCH = 1_700_000_000
WHERE = SourceLocation(file="recipes/tiny.yaml", line=1, column=1)
BASE = make_base(packages=("python3", "python3-venv", "tini"), where=WHERE)
TARGET = make_target(
    name="tiny-1.0-cu121",
    family="tiny",
    description="Two tiny packages",
    version="1.0",
    checks=("packages", "libraries"),
    requirements=("torch==1.0.*",),
    environment=(("TINY_WORDS", 'it\'s $HOME, "really" \\ so'),),
    where=WHERE,
)


@dataclass
class Index:
    """A package index on loopback. While `hold` is set it answers nobody."""

    folder: Path
    user: str
    password: str
    port: int = 0
    hold: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)

    def found(self, *, login: bool = True) -> PackageIndex:
        name = f"{self.user}:{self.password}@" if login else ""
        url = f"http://{name}127.0.0.1:{self.port}/simple"
        return PackageIndex(url=url, origin="the test", certificates="", proxy="", environment=())


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, index: Index, *rest: object) -> None:
        self.index = index
        super().__init__(*rest, directory=str(index.folder))  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.index.asked.append(self.path)
        if self.index.hold.is_set():
            self.index.release.wait(120)
        login = f"{self.index.user}:{self.index.password}".encode()
        if self.headers.get("Authorization") != "Basic " + base64.b64encode(login).decode():
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="index"')
            self.end_headers()
            return
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def index_server(folder: Path, *, user: str, password: str) -> Iterator[Index]:
    index = Index(folder=folder, user=user, password=password)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, index)) as server:
        server.daemon_threads = True
        index.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield index
        finally:
            index.release.set()
            server.shutdown()


def make_build_spec(folder: Path, words: str = "tiny runs") -> BuildSpec:
    """The definition, and its wheels in `folder`/simple as an index has them.

    Both wheels bring other.py. The recipe names torch, so its file is to be kept, which says 7.
    """
    wheels = []
    program = f"import other\n\n\ndef main():\n    print({words!r}, other.VALUE)\n"
    for name, files in {
        "torch": {
            "torch/__init__.py": program.encode(),
            "torch-1.0.dist-info/entry_points.txt": b"[console_scripts]\ntiny = torch:main\n",
            "other.py": b"VALUE = 7\n",
        },
        "other": {"other.py": b"VALUE = 8\n"},
    }.items():
        place = folder / "simple" / name
        place.mkdir(parents=True, exist_ok=True)
        wheel = make_wheel(place, name, files)
        (place / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
        wheels.append(locked(wheel))
    lock = make_lock(target=TARGET.name, wheels=tuple(sorted(wheels, key=lambda wheel: wheel.name)))
    return define(TARGET, BASE, lock)


def make_base_tar(folder: Path) -> Path:
    """Debian with Python, about 200 MB, from the machine's own mirror."""
    tar = folder / "base.tar"
    command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(BASE.packages)}"]
    stdout_of([*command, BASE.suite, str(tar)])
    return tar


def store_base(layout: Layout, tar: Path) -> BuiltBase:
    """The tar as a base of the store, as the factory's own are."""
    packer, plain = codec("zstd"), hashlib.sha256()
    with BlobWriter(layout) as blob, tar.open("rb") as file:
        compressor = packer.compressor()
        while data := file.read(CHUNK):
            plain.update(data)
            blob.write(compressor.compress(data))
        blob.write(compressor.flush())
        descriptor = blob.commit(packer.media_type)
    layer = OciLayer(descriptor=descriptor, diff_id=f"sha256:{plain.hexdigest()}", title=BASE.name)
    config = {
        "created": format_time(EPOCH),
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [f"PATH={SYSTEM_PATH}"], "Cmd": ["bash"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
        "history": [{"created": format_time(EPOCH), "created_by": "the test"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(descriptor)],
    }
    index = write_index(layout, manifest, "linux/amd64")
    layout.tag(f"base:{BASE.name}", index)
    return BuiltBase(
        image=layout.load(f"base:{BASE.name}", index),
        folders=UnpackedLayers(layout.path / "unpacked").unpack([layer], layout.blob_path, QuietProgress()),
        identity=f"sha256:{plain.hexdigest()}",
        epoch=EPOCH,
        published=True,
    )
