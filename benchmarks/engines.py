"""From locks to images in a registry: assemble against three ways to do it with docker, in one run.

All sides start from the same locks, the same base, the same wheels on a loopback index, and push to a
registry of their own that is empty at first. Sides take turns within a trial. The ways:

    assemble      `imagefactory build` and `imagefactory push`
    dockerfile    the rendered Dockerfile as shipped: `docker buildx build --load`, `docker push`
    best          BuildKit's best practice: uv, a cache mount, byte code, zstd, pushed by BuildKit
    split         the same, hand-split: a stage and a layer for every large package
    floor         fetch the raw wheels, sha256 them, PUT them into the registry in parallel

"First" has cold caches of packages and layers; the base is there. "Changed" changes the version of one
small package; "same" changes nothing. "Eight" are eight targets that share all but one small package
each. Bytes are what the registry holds afterwards; assemble also says what it sent.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import html
import http.server
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).parents[1]))
from imagefactory.oci.archive import export
from imagefactory.oci.layout import Layout
from imagefactory.progress import Quiet
from tests.services import RegistryOptions, docker_daemon, registry_server
from tests.services.docker import write_config
from tests.services.processes import search_path

ROOT = Path(__file__).parents[1]
FAMILY, ROW, SUFFIX = "onnxruntime", "1.18", "1.18-cu118"
BEFORE, AFTER = "six==1.16.0", "six==1.17.0"
OTHERS = ("tomli", "attrs", "certifi", "idna", "click", "tqdm", "toolz", "zipp")
LARGE = 8_000_000
WAYS = ("assemble", "dockerfile", "best", "split")


# --- what is built -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    name: str
    version: str
    path: Path
    size: int
    sha256: str


def write_root(root: Path) -> None:
    """A factory with one real target in two versions (`changed` beside it) and eight that share most."""
    (root / "lockfiles" / "bases").mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "recipes", root / "recipes", dirs_exist_ok=True)
    shutil.copytree(ROOT / "lockfiles" / "bases", root / "lockfiles" / "bases", dirs_exist_ok=True)
    (root / "imagefactory.toml").write_text("")
    text = (ROOT / "recipes" / f"{FAMILY}.yaml").read_text()
    first = text.index(f'  - version: "{ROW}"')
    following = text.find("\n  - version:", first + 1)
    text = text[: following if following > 0 else None] + "\n"
    for path in (root / "recipes").glob("*.yaml"):
        if path.name != "bases.yaml":
            path.unlink()
    for family, extra in (("first", BEFORE), ("changed", AFTER), *((f"t{o}", o) for o in OTHERS)):
        mine = text.replace(f"family: {FAMILY}", f"family: {family}", 1)
        mine = mine.replace("    packages:\n", f"    packages:\n      - {extra}\n", 1)
        if family not in mine or extra not in mine:
            raise SystemExit(f"recipes/{FAMILY}.yaml is not as this benchmark expects it")
        (root / "recipes" / f"{family}.yaml").write_text(mine)


class Side:
    """The command line in a root, with a store, a cache and an index of its own."""

    def __init__(self, root: Path, folder: Path, index: str = "") -> None:
        self.root, self.store, self.cache = root, folder / "store", folder / "cache"
        self.environ = {
            **os.environ,
            "IMAGEFACTORY_STORE": str(self.store),
            "IMAGEFACTORY_CACHE": str(self.cache),
            **({"IMAGEFACTORY_INDEX": index} if index else {}),
        }

    def run(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "imagefactory", "-C", str(self.root)]
        done = subprocess.run(
            [*command, *arguments, "-q"], env=self.environ, stdout=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            raise SystemExit(
                f"imagefactory {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}"
            )
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    def wheels(self, target: str) -> list[Wheel]:
        packages = self.run("show", "--json", target)["packages"]
        folder = self.cache / "wheels"
        return [
            Wheel(
                name=p["name"],
                version=p["version"],
                path=folder / p["sha256"][:2] / p["sha256"] / p["file"],
                size=p["size"],
                sha256=p["sha256"],
            )
            for p in packages
        ]


# --- the loopback index --------------------------------------------------------------------------


class Index(http.server.ThreadingHTTPServer):
    """A package index (PEP 503) of wheels on disk, on 127.0.0.1."""

    daemon_threads = True

    def __init__(self, wheels: list[Wheel]) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.wheels = {wheel.path.name: wheel for wheel in wheels}
        self.url = f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Pages(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Index

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        if parts[0] == "files" and parts[-1] in self.server.wheels:
            return self._file(self.server.wheels[parts[-1]].path)
        if parts[0] == "simple" and len(parts) == 2:
            links = "".join(
                f'<a href="/files/{html.escape(name)}#sha256={wheel.sha256}">{html.escape(name)}</a>\n'
                for name, wheel in self.server.wheels.items()
                if wheel.name == parts[1]
            )
            body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            self.send_response(200 if links else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None
        return self.send_error(404)

    do_HEAD = do_GET

    def _file(self, path: Path) -> None:
        size = path.stat().st_size
        begin = 0
        if (wanted := self.headers.get("Range", "")).startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, size = int(first), (int(last) + 1 if last else size)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{size - 1}/{path.stat().st_size}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(size - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.flush()
        with path.open("rb") as file:
            while begin < size:
                sent = os.sendfile(self.connection.fileno(), file.fileno(), begin, size - begin)
                if not sent:
                    return
                begin += sent

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(wheels: list[Wheel]) -> Iterator[str]:
    index = Index(wheels)
    threading.Thread(target=index.serve_forever, daemon=True).start()
    try:
        yield index.url
    finally:
        index.shutdown()
        index.server_close()


# --- the ways ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the ways share: the factory's root, its definitions, the index, docker's two daemons."""

    root: Path
    folder: Path
    index: str
    base_tag: str
    loader: str
    pusher: str

    def docker(self, daemon: str, *arguments: str, where: Path | None = None) -> None:
        done = subprocess.run(
            ["docker", *arguments],
            env={**os.environ, "DOCKER_HOST": daemon, "SOURCE_DATE_EPOCH": "1"},
            cwd=where,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(
                f"docker {' '.join(arguments)} ended with {done.returncode}\n{done.stdout[-3000:]}"
            )

    def secrets(self) -> list[str]:
        path = self.folder / "pip.conf"
        path.write_text(f"[global]\nindex-url = {self.index}\n")
        return ["--secret", f"id=pip.conf,src={path}"]


def tag_of(target: str) -> str:
    return f"{target.removesuffix('-' + SUFFIX)}:{SUFFIX}"


def by_assemble(side: Side, target: str, registry: str) -> dict[str, float]:
    side.run("build", "--json", "--no-smoke", target)
    pushed = side.run("push", "--json", "--registry", registry, target)
    return {"sent": float(pushed["results"][0]["bytes_sent"])}


def by_dockerfile(bench: Bench, target: str, registry: str) -> dict[str, float]:
    folder = bench.root / "definitions" / target
    name = f"{registry}/{tag_of(target)}"
    bench.docker(
        bench.loader, "buildx", "build", "--load", "--provenance=false", "--network=host", *bench.secrets(),
        "--build-arg", f"BASE={bench.base_tag}", "--tag", name, str(folder),
    )  # fmt: skip
    bench.docker(bench.loader, "push", "--quiet", name)
    return {}


BEST = """FROM {base} AS build
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,source=requirements.txt,target=/r.txt \\
    /usr/bin/python3.11 -m venv --without-pip /opt/env && UV_LINK_MODE=copy uv pip install --python \\
    /opt/env/bin/python --index-url {index} --no-deps --require-hashes --compile-bytecode -r /r.txt
FROM {base}
ENV PATH=/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY --link --from=build /opt/env /opt/env
"""

SPLIT_STAGE = """FROM empty AS p{number}
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,source=p{number}.txt,target=/r.txt \\
    UV_LINK_MODE=copy uv pip install --python /opt/env/bin/python --index-url {index} --no-deps \\
    --require-hashes --compile-bytecode --target /opt/env/lib/python3.11/site-packages -r /r.txt
"""


def by_best(bench: Bench, target: str, registry: str, wheels: list[Wheel]) -> dict[str, float]:
    folder = context(bench, wheels)
    (folder / "Dockerfile").write_text(BEST.format(base=bench.base_tag, index=bench.index))
    push_by_buildkit(bench, folder, f"{registry}/{tag_of(target)}")
    return {}


def by_split(bench: Bench, target: str, registry: str, wheels: list[Wheel]) -> dict[str, float]:
    folder = context(bench, wheels)
    large = sorted((w for w in wheels if w.size >= LARGE), key=lambda wheel: wheel.name)
    groups = [[wheel] for wheel in large] + [[wheel for wheel in wheels if wheel.size < LARGE]]
    head = f"FROM {bench.base_tag} AS empty\nRUN /usr/bin/python3.11 -m venv --without-pip /opt/env\n"
    stages, copies = [head], [f"FROM {bench.base_tag}", "COPY --link --from=empty /opt/env /opt/env"]
    for number, group in enumerate(groups):
        (folder / f"p{number}.txt").write_text(requirements(group))
        stages.append(SPLIT_STAGE.format(number=number, index=bench.index))
        site = "/opt/env/lib/python3.11/site-packages"
        copies.append(f"COPY --link --from=p{number} {site} {site}")
    (folder / "Dockerfile").write_text("\n".join([*stages, *copies]) + "\n")
    push_by_buildkit(bench, folder, f"{registry}/{tag_of(target)}")
    return {}


def context(bench: Bench, wheels: list[Wheel]) -> Path:
    folder = bench.folder / "context"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text(requirements(wheels))
    return folder


def requirements(wheels: list[Wheel]) -> str:
    return "".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels)


def push_by_buildkit(bench: Bench, folder: Path, name: str) -> None:
    output = f"type=image,name={name},push=true,compression=zstd,compression-level=1,oci-mediatypes=true"
    bench.docker(
        bench.pusher,
        "buildx",
        "build",
        "--provenance=false",
        "--network=host",
        "--output",
        output,
        str(folder),
    )


def by_floor(registry: str, index: str, wheels: list[Wheel], folder: Path) -> None:
    """Fetch, hash and PUT every wheel, four at a time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def move(wheel: Wheel) -> None:
        address = index.removesuffix("/simple") + f"/files/{wheel.path.name}"
        path, digest = folder / wheel.path.name, hashlib.sha256()
        with requests.get(address, stream=True, timeout=60) as answer, path.open("wb") as file:
            for data in answer.iter_content(1 << 20):
                digest.update(data)
                file.write(data)
        begun = requests.post(f"http://{registry}/v2/floor/blobs/uploads/", timeout=60)
        place = begun.headers["Location"]
        joint = "&" if "?" in place else "?"
        with path.open("rb") as file:
            done = requests.put(f"{place}{joint}digest=sha256:{digest.hexdigest()}", data=file, timeout=600)
        done.raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(move, wheels))
    shutil.rmtree(folder)


# --- measuring -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    seconds: list[float]
    cpu: list[float]
    bytes: list[float]
    sent: list[float]


def timed(row: Row, storage: Path, work: Callable[[], dict[str, float] | None]) -> None:
    """Adds seconds, this process's and its children's CPU seconds, and what the registry gained."""
    before, began, cpu = disk_bytes(storage), time.monotonic(), cpu_seconds()
    facts = work() or {}
    row.seconds.append(time.monotonic() - began)
    row.cpu.append(cpu_seconds() - cpu)
    row.bytes.append(disk_bytes(storage) - before)
    row.sent.append(facts.get("sent", 0.0))


def cpu_seconds() -> float:
    """Of the whole machine, in seconds: docker's work is done by daemons."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    idle = int(fields[4]) + int(fields[5])
    return (sum(map(int, fields[1:9])) - idle) / os.sysconf("SC_CLK_TCK")


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("data") if path.is_file())


def quiet_disk() -> None:
    os.sync()
    time.sleep(2)


class Run:
    def __init__(self, bench: Bench, seed: Path, folder: Path) -> None:
        """`seed` holds a store with nothing but the base, copied for every trial of assemble."""
        self.bench, self.seed, self.folder = bench, seed, folder
        self.rows: dict[tuple[str, str], Row] = {}
        self.unique = 0

    def row(self, scene: str, way: str) -> Row:
        return self.rows.setdefault((scene, way), Row([], [], [], []))

    def trial(self, plan: dict[str, list[Wheel]], ways: tuple[str, ...], *, eight: bool) -> None:
        for way in ways:
            storage = self.folder / "registry"
            shutil.rmtree(storage, ignore_errors=True)
            side = self._clear(way)
            with registry_server(storage, RegistryOptions()) as server:
                registry = server.host
                quiet_disk()
                if eight:
                    self._eight(plan, way, functools.partial(self._build, way, side, registry))
                elif way == "floor":
                    wheels, folder = plan[f"first-{SUFFIX}"], self.folder / "floor"
                    timed(
                        self.row("first", way), storage,
                        functools.partial(by_floor, registry, self.bench.index, wheels, folder),
                    )  # fmt: skip
                else:
                    self._one(plan, way, side, registry)
            self._clear(way)

    def _eight(self, plan: dict[str, list[Wheel]], way: str, build: Callable[..., dict[str, float]]) -> None:
        targets = [name for name in plan if name.startswith("t")]
        timed(
            self.row("eight", way), self.folder / "registry",
            lambda: _sum(build(target, plan[target]) for target in targets),
        )  # fmt: skip

    def _one(self, plan: dict[str, list[Wheel]], way: str, side: Side, registry: str) -> None:
        storage, first, changed = self.folder / "registry", f"first-{SUFFIX}", f"changed-{SUFFIX}"
        build = functools.partial(self._build, way, side, registry)
        timed(self.row("first", way), storage, lambda: build(first, plan[first]))
        if way == "assemble" and not self.unique:
            self.unique = unique_bytes(side, first)
        quiet_disk()
        timed(self.row("changed", way), storage, lambda: build(changed, plan[changed]))
        timed(self.row("same", way), storage, lambda: build(changed, plan[changed]))
        self._pull(way, registry, first)

    def _clear(self, way: str) -> Side:
        """Cold caches of packages and layers; the base stays."""
        side = self.folder / "side"
        shutil.rmtree(side, ignore_errors=True)
        if way == "assemble":
            shutil.copytree(self.seed, side, symlinks=True)
        daemon = {"dockerfile": self.bench.loader, "best": self.bench.pusher, "split": self.bench.pusher}.get(
            way
        )
        if daemon:
            listing = subprocess.run(
                ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"],
                env={**os.environ, "DOCKER_HOST": daemon}, stdout=subprocess.PIPE, text=True, check=True,
            ).stdout.split()  # fmt: skip
            for name in listing:
                if name != self.bench.base_tag:
                    self.bench.docker(daemon, "rmi", "--force", name)
            self.bench.docker(daemon, "builder", "prune", "--all", "--force")
        return Side(self.bench.root, side, self.bench.index)

    def _build(
        self, way: str, side: Side, registry: str, target: str, wheels: list[Wheel]
    ) -> dict[str, float]:
        if way == "assemble":
            return by_assemble(side, target, registry)
        if way == "dockerfile":
            return by_dockerfile(self.bench, target, registry)
        return {"best": by_best, "split": by_split}[way](self.bench, target, registry, wheels)

    def _pull(self, way: str, registry: str, target: str) -> None:
        """Pull time with a docker daemon that holds nothing yet."""
        repository = target.removesuffix("-" + SUFFIX)
        name = f"{registry}/{tag_of(target)}"
        if way == "assemble":
            listing = requests.get(f"http://{registry}/v2/{repository}/tags/list", timeout=9).json()
            name = f"{registry}/{repository}:{next(tag for tag in listing['tags'] if tag.startswith(SUFFIX))}"
        with docker_daemon(self.folder / "puller") as puller:
            quiet_disk()
            timed(
                self.row("pull", way), self.folder / "registry",
                lambda: self.bench.docker(puller.host, "pull", "--quiet", name),
            )  # fmt: skip


def _sum(facts: Iterator[dict[str, float]]) -> dict[str, float]:
    return {"sent": sum(fact.get("sent", 0.0) for fact in facts)}


def unique_bytes(side: Side, target: str) -> int:
    image = side.run("show", "--json", target)["image"]
    return sum({layer["digest"]: layer["size"] for layer in image["layers"]}.values())


def prepare(folder: Path) -> tuple[Path, Path, dict[str, list[Wheel]]]:
    """Root, locks, definitions, all wheels on disk, and a store with the base alone."""
    root = folder / "root"
    write_root(root)
    names = [f"first-{SUFFIX}", f"changed-{SUFFIX}", *(f"t{other}-{SUFFIX}" for other in OTHERS)]
    whole = Side(root, folder / "whole")
    whole.run("lock", *names)
    whole.run("render", *names)
    whole.run("build", "--no-smoke", *names)
    plan = {name: whole.wheels(name) for name in names}
    seed = folder / "seed"
    if not seed.exists():
        tiny = Side(root, seed)
        (seed / "cache" / "wheels").parent.mkdir(parents=True)
        (seed / "cache" / "wheels").symlink_to(whole.cache / "wheels")
        tiny.run("build", "--no-smoke", names[0])
        tiny.run("store", "rm", tag_of(names[0]))
        tiny.run("store", "gc")
        (seed / "cache" / "wheels").unlink()
        shutil.rmtree(seed / "cache" / "segments", ignore_errors=True)
    return root, seed, plan


def load_base(side: Side, daemon: str, folder: Path) -> str:
    """The factory's own base with uv in it, in a daemon: the docker ways start from it."""
    tag = "imagefactory-benchmark/base:1"
    found = subprocess.run(
        ["docker", "image", "inspect", tag], env={**os.environ, "DOCKER_HOST": daemon}, capture_output=True
    )
    if found.returncode == 0:
        return tag
    layout, archive = Layout(side.store), folder / "base.tar"
    image = layout.image("base:debian-12")
    assert image is not None
    export(layout, image, archive, kind="docker-archive", progress=Quiet())
    environ = {**os.environ, "DOCKER_HOST": daemon}
    subprocess.run(["docker", "load", "--quiet", "--input", str(archive)], env=environ, check=True)
    subprocess.run(["docker", "tag", image.name, tag], env=environ, check=True)
    archive.unlink()
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    context = folder / "uv"
    context.mkdir(exist_ok=True)
    shutil.copy(str(uv), context / "uv")
    (context / "Dockerfile").write_text(f"FROM {tag}\nCOPY uv /usr/local/bin/uv\n")
    subprocess.run(
        ["docker", "buildx", "build", "--quiet", "--load", "--provenance=false", "--tag", tag, str(context)],
        env={**os.environ, "DOCKER_HOST": daemon}, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return tag


def table(run: Run, wheels: list[Wheel]) -> list[str]:
    lines = [
        "| scene | way | seconds | spread | against assemble | CPU s | MB in the registry |",
        "|---|---|---|---|---|---|---|",
    ]
    for (scene, way), row in sorted(
        run.rows.items(), key=lambda item: (SCENES.index(item[0][0]), item[0][1])
    ):
        middle = statistics.median(row.seconds)
        mine = (
            statistics.median(run.rows[scene, "assemble"].seconds)
            if (scene, "assemble") in run.rows
            else middle
        )
        spread = f"{min(row.seconds):.1f} to {max(row.seconds):.1f}" if len(row.seconds) > 1 else "one trial"
        lines.append(
            f"| {scene} | {way} | {middle:.2f} | {spread} | {middle / mine:.1f}x "
            f"| {statistics.median(row.cpu):.0f} | {statistics.median(row.bytes) / 1e6:.0f} |"
        )
    if run.unique:
        sent = statistics.median(run.rows["first", "assemble"].sent)
        lines.append(f"\nbytes sent by the first push: {sent / run.unique:.3f}x of the image's unique bytes")
    lines.append(f"wheels: {len(wheels)}, {sum(w.size for w in wheels) / 1e6:.0f} MB; {os.cpu_count()} cores")
    return lines


SCENES = ("first", "changed", "same", "eight", "pull")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="scratch: 25 GB")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--eight-trials", type=int, default=1, help="trials of the eight targets")
    parser.add_argument(
        "--eight-ways", nargs="+", default=["assemble", "split"], choices=WAYS,
        help="ways that the eight are measured by; the others rebuild all each time: first + 7 x changed",
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", default=[*WAYS, "floor"], choices=[*WAYS, "floor"])
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = search_path()
    os.environ["DOCKER_CONFIG"] = str(write_config(folder / "docker-config"))
    root, seed, plan = prepare(folder)
    every = {wheel.sha256: wheel for wheels in plan.values() for wheel in wheels}
    with ExitStack() as stack:
        index = stack.enter_context(serving(list(every.values())))
        loader = stack.enter_context(docker_daemon(folder / "loader")).host
        pusher = stack.enter_context(docker_daemon(folder / "pusher", containerd_snapshotter=True)).host
        whole = Side(root, folder / "whole")
        for daemon in (loader, pusher):
            base = load_base(whole, daemon, folder)
        bench = Bench(root=root, folder=folder, index=index, base_tag=base, loader=loader, pusher=pusher)
        run = Run(bench, seed, folder)
        for number in range(arguments.trials):
            print(f"trial {number + 1} of {arguments.trials}", file=sys.stderr)
            run.trial(plan, tuple(arguments.ways), eight=False)
        for _ in range(arguments.eight_trials):
            run.trial(plan, tuple(arguments.eight_ways), eight=True)
    print("\n".join(table(run, plan[f"first-{SUFFIX}"])))


if __name__ == "__main__":
    main()
