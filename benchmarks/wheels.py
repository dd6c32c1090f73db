"""Wheels of a lock: on disk, on an index on loopback, and the floors of what can be done with them."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import requests

from imagefactory.oci.layers import ZSTD_LEVEL
from imagefactory.scan.zip import data_start, members_of
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


def read(wheels: Sequence[Wheel]) -> None:
    """Bring the wheels into the page cache."""
    for wheel in wheels:
        with wheel.path.open("rb", buffering=0) as file:
            while file.read(CHUNK):
                pass


def fetch(wheels: Sequence[Wheel], index: str, folder: Path) -> list[Wheel]:
    """Fetch and hash every wheel into the new `folder`, four at a time. Return them there."""
    folder.mkdir(parents=True)

    def move(wheel: Wheel) -> Wheel:
        path, digest = folder / wheel.path.name, hashlib.sha256()
        address = index.removesuffix("/simple") + f"/files/{wheel.path.name}"
        with requests.get(address, stream=True, timeout=60) as answer, path.open("wb") as file:
            for data in answer.iter_content(CHUNK):
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != wheel.sha256:
            raise SystemExit(f"{wheel.path.name} came as another")
        return replace(wheel, path=path)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(move, wheels))


LIBRARIES = ("libisal-dev", "libzstd-dev", "libssl-dev")


def compile_floor(folder: Path) -> Path:
    """Compile floor.c into `folder`. Ends the program if its compiler or libraries are missing."""
    program = folder / "floor"
    options = ("-lisal", "-lzstd", "-lcrypto", "-pthread")
    command = ["cc", "-O2", str(Path(__file__).with_name("floor.c")), "-o", str(program), *options]
    if shutil.which("cc") is None or subprocess.run(command).returncode:
        raise SystemExit(f"cannot compile floor.c: run apt-get install gcc libc6-dev {' '.join(LIBRARIES)}")
    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorLayer:
    """One wheel's layer, as floor.c writes it."""

    path: Path
    sha256: str


def plan_of(wheels: Sequence[Wheel]) -> str:
    """Return the input of floor.c: the wheels, largest first, and where their members are."""
    lines = []
    for wheel in wheels:
        lines.append(f"W {wheel.path.stat().st_size} {wheel.path}")
        with wheel.path.open("rb") as file:
            for member in members_of(wheel.path):
                sizes = f"{member.compress_size} {member.file_size} {member.compress_type}"
                lines.append(f"M {data_start(file, member)} {sizes}")
    return "\n".join(lines) + "\n"


def one_pass(program: Path, wheels: Sequence[Wheel], folder: Path) -> list[FloorLayer]:
    """Inflate, hash and compress the wheels in C, one thread a processor, into the new `folder`."""
    wheels = sorted(wheels, key=lambda wheel: -wheel.size)
    folder.mkdir(parents=True)
    command = [str(program), str(folder), str(os.cpu_count()), str(ZSTD_LEVEL)]
    done = subprocess.run(command, input=plan_of(wheels), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    layers = []
    for line in done.stdout.splitlines():
        number, wheel, layer, _ = line.split()
        if wheel != wheels[int(number)].sha256:
            raise SystemExit(f"{wheels[int(number)].path} is not what is locked")
        layers.append(FloorLayer(path=folder / number, sha256=layer))
    if len(layers) != len(wheels):
        raise SystemExit("floor.c skipped wheels")
    return layers


def upload(layers: Sequence[FloorLayer], registry: str) -> None:
    """PUT each layer into `registry`, four at a time."""

    def put(layer: FloorLayer) -> None:
        place = requests.post(f"http://{registry}/v2/floor/blobs/uploads/", timeout=60).headers["Location"]
        joint = "&" if "?" in place else "?"
        with layer.path.open("rb") as file:
            done = requests.put(f"{place}{joint}digest=sha256:{layer.sha256}", data=file, timeout=600)
        done.raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, layers))
