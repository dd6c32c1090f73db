"""From an empty node to `import torch` done: pulls of one image in several forms, by four programs.

    pull.py pytorch-2.3-cu121 --folder .benchmark-pull --trials 3 --write
    pull.py numba-0.68-cpu --module numba --sides official ours zstd-9 --mbit 0

The programs:

    docker, podman  pull, then run
    apptainer       `apptainer pull docker://`, which packs a .sif here; side `file` gets a .sif by oras
    pyxis           enroot's steps: layers by curl, unpacked, an overlay, a squashfs, unpacked again. Side
                    `file` gets a .sqsh, which is only unpacked. enroot itself is not needed

The sides have the same files:

    ours            the image as built, a zstd layer for each large package
    official        all packages in one gzip layer of level 6, as in most published images
    one             all packages in one zstd layer
    zstd-N, long-N  zstd of level N; with matches up to 128 MiB back
    split-N         layers of at most N MB, unpacked
    largest-first, smallest-first  another order of layers
    gzip            the layers of `ours` as gzip of level 6

The registry is on loopback, behind a relay that lets `--mbit` pass per second (0: no limit). CPU seconds are
those of the programs and their daemons, without the registry. All sides take turns within a trial.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import requests
import zstandard

from benchmarks.readings import Readings, cpu_of_children
from imagefactory.build.apptainer import share_layout
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import BlobWriter, Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Image,
    OciLayer,
    canonical_json,
    format_descriptor,
)
from tests.services import docker_daemon, podman_service, registry_server
from tests.services.apptainer import apptainer_command, apptainer_environ
from tests.services.factory import Factory
from tests.services.processes import search_path

ROOT = Path(__file__).parents[1]
PREFIX = "/opt/env"
ORDERS = {"largest-first": -1, "smallest-first": 1}
SERVER = "docker-registry"
CHUNK = 1 << 20


# --- sides


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a side has its packages. `level` of gzip or zstd, `joined` for one layer, `split` in MB."""

    level: int = 1
    gzip: bool = False
    long: bool = False
    joined: bool = False
    split: int = 0

    @property
    def media_type(self) -> str:
        return codec("gzip" if self.gzip else "zstd").media_type

    def compressor(self) -> Any:
        if self.gzip:
            return zlib.compressobj(self.level, wbits=31)
        back = {"enable_ldm": True, "window_log": 27} if self.long else {}
        settings = zstandard.ZstdCompressionParameters.from_level(self.level, **back)
        return zstandard.ZstdCompressor(compression_params=settings).compressobj()


def form_of(side: str) -> Form | None:
    """Return the form of a side whose layers are compressed again, None if they stay as they are."""
    name, _, number = side.partition("-")
    forms = {
        "official": Form(gzip=True, level=6, joined=True),
        "gzip": Form(gzip=True, level=6),
        "one": Form(joined=True),
    }
    if side in ("ours", *ORDERS):
        return None
    if side in forms:
        return forms[side]
    if name in ("zstd", "long", "split") and number.isdecimal():
        return Form(split=int(number)) if name == "split" else Form(level=int(number), long=name == "long")
    raise SystemExit(f"no side {side}: see --help")


class LayerFile:
    """A new layer: `write` takes its tar, `commit` returns it."""

    def __init__(self, layout: Layout, form: Form) -> None:
        self._writer, self._form, self._plain = BlobWriter(layout), form, hashlib.sha256()
        self._compressor = form.compressor()

    @cached_property
    def tar(self) -> tarfile.TarFile:
        """The layer as a tar to add files to, which `commit` ends."""
        return tarfile.open(
            fileobj=cast("IO[bytes]", self), mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK
        )

    def write(self, data: bytes) -> int:
        self._plain.update(data)
        self._writer.write(self._compressor.compress(data))
        return len(data)

    def commit(self, title: str) -> OciLayer:
        if "tar" in self.__dict__:
            self.tar.close()
        self._writer.write(self._compressor.flush())
        descriptor = self._writer.commit(self._form.media_type)
        return OciLayer(descriptor=descriptor, diff_id=f"sha256:{self._plain.hexdigest()}", title=title)


def plain_layer(layout: Layout, layer: OciLayer) -> IO[bytes]:
    file = layout.blob_path(layer.descriptor.digest).open("rb")
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=True)


def pack_again(layout: Layout, form: Form, layer: OciLayer) -> OciLayer:
    new = LayerFile(layout, form)
    with plain_layer(layout, layer) as plain:
        while data := plain.read(CHUNK):
            new.write(data)
    return new.commit(layer.title)


def arrange(layout: Layout, form: Form, layers: Sequence[OciLayer]) -> Iterator[OciLayer]:
    """Yield the files of `layers` in new layers, of at most `form.split` MB if that is set."""
    room, paths = form.split * 1_000_000 or 1 << 60, set[str]()
    new, size = LayerFile(layout, form), 0
    for layer in layers:
        with plain_layer(layout, layer) as plain, tarfile.open(fileobj=plain, mode="r|") as source:
            for member in source:
                if member.name in paths:
                    continue  # the same in all layers, and Docker's store rejects a path twice in one
                paths.add(member.name)
                if size and size + member.size > room:
                    yield new.commit(layer.title)
                    new, size = LayerFile(layout, form), 0
                new.tar.addfile(member, source.extractfile(member) if member.isreg() else None)
                size += member.size
    yield new.commit(layers[-1].title)


def shape(layout: Layout, image: Image, base: int, side: str) -> list[OciLayer]:
    """Return the layers of a side; the first `base` ones of `image` are those of its base."""
    below, packages = list(image.layers[:base]), list(image.layers[base:])
    form = form_of(side)
    if form is None:
        if side in ORDERS:
            packages.sort(key=lambda layer: ORDERS[side] * layer.descriptor.size)
        return below + packages
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        below = list(pool.map(lambda layer: pack_again(layout, form, layer), below))
        if form.joined:
            return below + list(arrange(layout, form, packages))
        if form.split:
            return below + [
                part
                for parts in pool.map(lambda one: list(arrange(layout, form, [one])), packages)
                for part in parts
            ]
        return below + list(pool.map(lambda layer: pack_again(layout, form, layer), packages))


def push_side(source: Layout, image: Image, base: int, side: str, folder: Path, host: str) -> list[OciLayer]:
    """Put a side into the registry as `pull:SIDE`. Return its layers."""
    layout = Layout(folder / "side")
    for digest in (image.manifest, image.config, *(layer.descriptor.digest for layer in image.layers)):
        link = layout.blob_path(digest)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source.blob_path(digest).absolute())
    layout.tmp.mkdir(parents=True)
    layers = shape(layout, image, base, side)
    config = json.loads(layout.blob_path(image.config).read_bytes())
    manifest = json.loads(layout.blob_path(image.manifest).read_bytes())
    config["rootfs"]["diff_ids"] = [layer.diff_id for layer in layers]
    config.pop("history", None)
    manifest["config"] = format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE))
    manifest["layers"] = [format_descriptor(layer.descriptor) for layer in layers]
    new = layout.add(canonical_json(manifest), MANIFEST_TYPE)
    share_layout(layout, new.digest, folder / "shared")
    run("skopeo", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false",
        f"oci:{folder / 'shared'}", f"docker://{host}/pull:{side}")  # fmt: skip
    shutil.rmtree(folder / "shared")
    shutil.rmtree(folder / "side")
    return layers


def push_files(factory: Factory, target: str, folder: Path, host: str) -> dict[str, int]:
    """Put the image into the registry as .sif (`pull:file`) and .sqsh (`pull:sqsh`). Return their bytes."""
    sizes = {}
    for kind in ("sif", "sqsh"):
        path = folder / f"image.{kind}"
        factory.run("image", "export", target, "--format", kind, "-o", str(path))
        sizes[kind] = path.stat().st_size
        if kind == "sif":
            run(apptainer_command(), "push", "--no-https", "--allow-unsigned", path, f"oras://{host}/pull:file",
                **apptainer_environ(folder / "apptainer"))  # fmt: skip
        else:
            manifest = {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": put_blob(host, io.BytesIO(b"{}")),
                "layers": [put_blob(host, path.open("rb"))],
            }
            requests.put(
                f"http://{host}/v2/pull/manifests/sqsh",
                data=canonical_json(manifest),
                headers={"Content-Type": MANIFEST_TYPE},
                timeout=60,
            ).raise_for_status()
        path.unlink()
    return sizes


def put_blob(host: str, file: IO[bytes]) -> dict[str, object]:
    """Upload a file and close it. Return its descriptor."""
    with file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"  # type: ignore[arg-type]
        size = file.tell()
        file.seek(0)
        place = requests.post(f"http://{host}/v2/pull/blobs/uploads/", timeout=60).headers["Location"]
        joint = "&" if "?" in place else "?"
        requests.put(f"{place}{joint}digest={digest}", data=file, timeout=600).raise_for_status()
    return {"mediaType": "application/octet-stream", "digest": digest, "size": size}


def layers_of(host: str, tag: str) -> list[dict[str, str]]:
    address = f"http://{host}/v2/pull/manifests/{tag}"
    layers: list[dict[str, str]] = requests.get(
        address, headers={"Accept": MANIFEST_TYPE}, timeout=60
    ).json()["layers"]
    return layers


# --- the network


class Relay:
    """A port of 127.0.0.1 that passes connections on to `port`, at `rate` bytes a second for all."""

    def __init__(self, port: int, rate: float) -> None:
        self._to, self._rate, self._free = port, rate, time.monotonic()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(CHUNK // 4):
                with self._lock:
                    self._free = max(self._free, time.monotonic()) + len(data) / self._rate
                    wait = self._free - time.monotonic()
                if wait > 0.005:
                    time.sleep(wait)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one end hung up
            source.close()
            target.close()


# --- programs


@dataclass(frozen=True, kw_only=True)
class Node:
    """An empty node: `pull` fetches the image, `start` runs a Python line in it and returns its output."""

    pull: Callable[[], object]
    start: Callable[[str], str]


def run(*command: str | Path, **environ: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


PYTHON = f"{PREFIX}/bin/python"


@contextmanager
def docker_node(folder: Path, host: str, side: str) -> Iterator[Node]:
    name = f"{host}/pull:{side}"
    with docker_daemon(folder) as daemon:
        yield Node(
            pull=lambda: run("docker", "pull", "--quiet", name, DOCKER_HOST=daemon.host),
            start=lambda line: run(
                "docker", "run", "--rm", "--network=none", name, PYTHON, "-c", line, DOCKER_HOST=daemon.host
            ),
        )


@contextmanager
def podman_node(folder: Path, host: str, side: str) -> Iterator[Node]:
    name = f"{host}/pull:{side}"
    with podman_service(folder) as podman:
        yield Node(
            pull=lambda: run(
                *podman.command, "pull", "--quiet", "--tls-verify=false", name, **podman.environ
            ),
            start=lambda line: run(
                *podman.command, "run", "--rm", "--network=none", name, PYTHON, "-c", line, **podman.environ
            ),
        )


@contextmanager
def apptainer_node(folder: Path, host: str, side: str) -> Iterator[Node]:
    folder.mkdir()
    environ, sif, apptainer = apptainer_environ(folder), folder / "image.sif", apptainer_command()
    scheme = "oras" if side == "file" else "docker"
    yield Node(
        pull=lambda: run(
            apptainer,
            "pull",
            "--no-https",
            "--disable-cache",
            sif,
            f"{scheme}://{host}/pull:{side}",
            **environ,
        ),
        start=lambda line: run(apptainer, "exec", sif, PYTHON, "-c", line, **environ),
    )


def enroot_import(folder: Path, host: str, side: str) -> Path:
    """Import an image as enroot 4.1 does: a layer is checked while it arrives, and gzip becomes zstd."""
    layers = layers_of(host, side)

    def fetch(layer: dict[str, str]) -> None:
        digest, packed = layer["digest"], folder / layer["digest"]
        again = "gzip -dc | zstd -q -1 -c" if layer["mediaType"].endswith("gzip") else "cat"
        script = f'set -o pipefail; {{ curl -fsS "$0" | tee /dev/fd/3 | {again} > "$1"; }} 3>&1 | sha256sum'
        found = run("bash", "-c", script, f"http://{host}/v2/pull/blobs/{digest}", packed)
        if found.split()[0] != digest.removeprefix("sha256:"):
            raise SystemExit(f"{digest} came as {found}")

    def unpack(job: tuple[int, dict[str, str]]) -> None:
        number, layer = job
        (folder / str(number)).mkdir()
        run("tar", "-C", folder / str(number), "--anchored", "--exclude=dev/*", "--exclude=./dev/*",
            "--use-compress-program=zstd", "--delay-directory-restore",
            "-pxf", folder / layer["digest"])  # fmt: skip

    with ThreadPoolExecutor(10) as connections:
        list(connections.map(fetch, layers))
    with ThreadPoolExecutor(os.cpu_count()) as processors:
        list(processors.map(unpack, enumerate(layers)))
    lower = ":".join(str(number) for number in reversed(range(len(layers))))
    script = (
        'cd "$0" && mkdir rootfs && mount -t overlay overlay -o "lowerdir=$1" rootfs && '
        "exec mksquashfs rootfs image.sqsh -all-root -no-progress -comp lzo -noD -exit-on-error"
    )
    run("unshare", "--mount", "sh", "-c", script, folder, lower)
    return folder / "image.sqsh"


@contextmanager
def pyxis_node(folder: Path, host: str, side: str) -> Iterator[Node]:
    folder.mkdir()
    rootfs = folder / "root"

    def pull() -> None:
        if side == "file":
            image = folder / "image.sqsh"
            (blob,) = layers_of(host, "sqsh")
            run("curl", "-fsS", "-o", image, f"http://{host}/v2/pull/blobs/{blob['digest']}")
        else:
            image = enroot_import(folder, host, side)
        run("unsquashfs", "-no-progress", "-quiet", "-dest", rootfs, image)

    inside = 'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
    command = ("unshare", "--mount", "--pid", "--fork", "sh", "-c", inside, rootfs, PYTHON, "-c")
    yield Node(pull=pull, start=lambda line: run(*command, line))


NODES = {"docker": docker_node, "podman": podman_node, "apptainer": apptainer_node, "pyxis": pyxis_node}


# --- the run


def measure(readings: Readings, program: str, side: str, folder: Path, host: str, module: str) -> None:
    """Add the seconds until `module` is imported, those of the pull alone, and CPU seconds of all."""
    shutil.rmtree(folder, ignore_errors=True)
    with NODES[program](folder, host, side) as node:
        os.sync()
        began, cpu = time.monotonic(), cpu_of_children(SERVER)
        node.pull()
        pulled, cpu = time.monotonic(), cpu_of_children(SERVER) - cpu
        line = node.start(f"import time, {module}; print(time.process_time())")
    key, ended = f"{program}/{side}", time.monotonic()
    for name, value in (
        ("", ended - began),
        (" pull", pulled - began),
        (" cpu", cpu + float(line.split()[-1])),
    ):
        readings.add(f"{key}{name}", value)
    print(f"{key}: {format_reading(readings, key)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)


def format_reading(readings: Readings, key: str) -> str:
    seconds, pull, cpu = (readings.middle(f"{key}{part}") for part in ("", " pull", " cpu"))
    return f"{seconds:.1f} s (pull {pull:.1f}), {cpu:.0f} CPU s"


def format_table(readings: Readings, sizes: Mapping[str, str], programs: Sequence[str]) -> str:
    def cell(program: str, side: str) -> str:
        key = f"{program}/{side}"
        return format_reading(readings, key) if key in readings.values else ""

    rows = [f"| | layers | {' | '.join(programs)} |", "|---|---|" + "---|" * len(programs)]
    for side, size in sizes.items():
        rows.append(f"| {side} | {size} | {' | '.join(cell(program, side) for program in programs)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--module", default="torch", help="what to import")
    parser.add_argument("--sides", nargs="+", default=["official", "ours", "file"], metavar="SIDE")
    parser.add_argument("--programs", nargs="+", default=list(NODES), choices=list(NODES))
    parser.add_argument(
        "--mbit", type=float, default=1000, help="speed of the network in Mbit/s; 0: no limit"
    )
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(".benchmark-pull"), help="8 times the layers")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    os.environ["PATH"] = search_path()
    folder: Path = options.folder.absolute()
    factory = Factory(store=folder / "store", cache=folder / "cache", root=ROOT)
    factory.build(options.target, "--no-test")
    shown = json.loads(factory.run("show", "--json", options.target).stdout)["image"]
    layout = Layout(factory.store)
    image = layout.image(shown["name"])
    below = next(layout.image(tag) for tag in layout.tags() if tag.startswith("base:"))
    if image is None or below is None:
        raise SystemExit(f"{options.target} is not built")
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    readings, sizes = Readings(), dict[str, str]()
    with registry_server(work / "registry") as server:
        for side in options.sides:
            if side == "file":
                files = push_files(factory, options.target, work, server.host)
                sizes[side] = ", ".join(f".{kind} {size / 1e6:.0f} MB" for kind, size in files.items())
                continue
            layers = push_side(layout, image, len(below.layers), side, work, server.host)
            sizes[side] = f"{len(layers)}, {sum(layer.descriptor.size for layer in layers) / 1e6:.0f} MB"
        host = Relay(server.port, options.mbit * 125_000).host if options.mbit else server.host
        for number in range(options.trials):
            for program in options.programs:
                for side in options.sides:
                    if side == "file" and program in ("docker", "podman"):
                        continue
                    print(f"trial {number + 1}: ", end="", file=sys.stderr)
                    measure(readings, program, side, work / "node", host, options.module)
    table = format_table(readings, sizes, options.programs)
    print(table)
    if options.write:
        page = ROOT / "docs" / "benchmarks.md"
        before, rest = page.read_text().split("<!-- pull -->\n", 1)
        network = f"{options.mbit:g} Mbit/s" if options.mbit else "loopback"
        head = (
            f"{date.today()}, {os.cpu_count()} cores, `{options.target}`, {network}, "
            f"{options.trials} trials, load average {os.getloadavg()[2]:.1f}:\n\n"
        )
        after = rest.split("<!-- end of pull -->\n", 1)[1]
        page.write_text(f"{before}<!-- pull -->\n{head}{table}<!-- end of pull -->\n{after}")


if __name__ == "__main__":
    main()
