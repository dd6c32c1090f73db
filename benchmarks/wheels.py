"""Wheels of a lock: on disk, on an index on loopback, and the floors of what can be done with them."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import socket
import threading
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import requests

from tests.services.factory import Factory

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    name: str
    version: str
    path: Path
    size: int
    sha256: str


def wheels_of(factory: Factory, target: str) -> list[Wheel]:
    """The locked wheels of a target in the factory's cache."""
    folder = factory.cache / "wheels"
    return [
        Wheel(
            name=p["name"],
            version=p["version"],
            path=folder / p["sha256"][:2] / p["sha256"] / p["file"],
            size=p["size"],
            sha256=p["sha256"],
        )
        for p in json.loads(factory.run("show", "--json", target).stdout)["packages"]
    ]


class _Files(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def copyfile(self, source: Any, outputfile: Any) -> None:
        outputfile.flush()
        cast("socket.socket", self.connection).sendfile(cast("IO[bytes]", source))

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(wheels: Sequence[Wheel], folder: Path) -> Iterator[str]:
    """The address of a package index of these wheels (PEP 503, metadata by PEP 658) on 127.0.0.1."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "files").mkdir(parents=True)
    for wheel in wheels:
        name, page = wheel.path.name, folder / "simple" / wheel.name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a") as file:
            file.write(
                f'<a href="/files/{name}#sha256={wheel.sha256}" data-dist-info-metadata="true">{name}</a>\n'
            )
        (folder / "files" / name).symlink_to(wheel.path)
        with zipfile.ZipFile(wheel.path) as archive:
            metadata = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
            (folder / "files" / f"{name}.metadata").write_bytes(archive.read(metadata))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        server.server_close()


def read_and_hash(wheels: Sequence[Wheel]) -> None:
    for wheel in wheels:
        with wheel.path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wheel.sha256:
                raise SystemExit(f"{wheel.path} is not what is locked")


def fetch(wheels: Sequence[Wheel], index: str, folder: Path, registry: str = "") -> None:
    """Fetches and hashes every wheel, four at a time; PUTs each into `registry` where one is given."""
    folder.mkdir(parents=True)

    def move(wheel: Wheel) -> None:
        path, digest = folder / wheel.path.name, hashlib.sha256()
        address = index.removesuffix("/simple") + f"/files/{wheel.path.name}"
        with requests.get(address, stream=True, timeout=60) as answer, path.open("wb") as file:
            for data in answer.iter_content(CHUNK):
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != wheel.sha256:
            raise SystemExit(f"{wheel.path.name} came as another")
        if registry:
            place = requests.post(f"http://{registry}/v2/floor/blobs/uploads/", timeout=60).headers[
                "Location"
            ]
            joint = "&" if "?" in place else "?"
            with path.open("rb") as file:
                done = requests.put(f"{place}{joint}digest=sha256:{wheel.sha256}", data=file, timeout=600)
            done.raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(move, wheels))
    shutil.rmtree(folder)
