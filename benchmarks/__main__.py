"""The benchmark: imagefactory beside its rivals and beside floors. `python -m benchmarks --help`

Sides of a case take turns within a trial, on the same lock, base, wheels (an index on loopback) and an empty
registry on loopback; a table or a picture comes only of images whose files are the same on all sides.

    start      `imagefactory list` and `--help` (startup.py has more)
    fresh      the README's first command, nothing there; against fetching its wheels, then making its base
    cached     lock to image, base and wheels there, by codec, warm and cold; against hashing the wheels
    sif        the image as .sif, and after one small change; against mksquashfs and apptainer's own build
    bare       the push of an image that a registry has, by a machine that has nothing but the layer lock
    publish    build and push: first, one small package changed, nothing changed; and pulls of the first
    eight      eight targets that share all but one small package each, built and pushed
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import requests

from benchmarks.readings import PeakMemory, Readings, keep, kept_in
from benchmarks.rivals import WAYS, Rivals, docker, files_in, rivals
from benchmarks.sif import trial
from benchmarks.told import format_picture, format_table
from benchmarks.wheels import Wheel, fetch, read_and_hash, serving, wheels_of
from imagefactory.oci.layout import Layout
from tests.services import RegistryOptions, docker_daemon, podman_service, registry_server
from tests.services.factory import TINY_RECIPE, Factory, copy_store, make_root
from tests.services.processes import search_path

ROOT = Path(__file__).parents[1]
MAIN, TAG, TINY = "pytorch-2.3-cu121", "pytorch:2.3-cu121", "tiny-12.1-cu121"
FAMILY, ROW, SUFFIX = "onnxruntime", "1.18", "1.18-cu118"
FIRST, CHANGED = f"first-{SUFFIX}", f"changed-{SUFFIX}"
EXTRA = {"first": "six==1.16.0", "changed": "six==1.17.0"} | {
    f"t{name}": name for name in ("tomli", "attrs", "certifi", "idna", "click", "tqdm", "toolz", "zipp")
}
PUBLISHED = tuple(f"{family}-{SUFFIX}" for family in EXTRA)
EIGHT = PUBLISHED[2:]


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What cases stand on, below one folder, made when the first asks for it and kept for the next run."""

    folder: Path
    stack: ExitStack

    @cached_property
    def small(self) -> Factory:
        """A factory of one target of 1 MB; its store holds the base alone once `seed` made it."""
        factory = Factory(store=self.folder / "zstd", cache=self.folder / "cache", root=self.folder / "small")
        if not factory.root.exists():
            make_root(factory.root, tiny=TINY_RECIPE)
            factory.run("lock", TINY)
        return factory

    def seed(self, codec: str) -> Path:
        """A store with the base alone."""
        if not (self.folder / codec).exists():
            extra = {"IMAGEFACTORY_CODEC": codec}
            made = replace(self.small, store=scratch(self.folder / "new"), extra=extra)
            made.build(TINY, "--no-test")
            made.run("image", "remove", "tiny:12.1-cu121")
            made.run("image", "prune")
            made.store.rename(self.folder / codec)
        return self.folder / codec

    def lend(self, name: str, root: Path, codec: str = "zstd", *, wheels: bool = True) -> Factory:
        """A factory of its own below the scratch folder, with the base and, if asked for, the wheels."""
        seed, folder = self.seed(codec), scratch(self.folder / name)
        (folder / "cache").mkdir()
        for kept in ("debs", "wheels") if wheels else ("debs",):
            (self.folder / "cache" / kept).mkdir(exist_ok=True)
            (folder / "cache" / kept).symlink_to(self.folder / "cache" / kept)
        store = copy_store(seed, folder / "store")
        return Factory(store=store, cache=folder / "cache", root=root, extra={"IMAGEFACTORY_CODEC": codec})

    def fetched(self, factory: Factory, *targets: str) -> dict[str, list[Wheel]]:
        """The targets' wheels, in the cache: builds that are thrown away bring them."""
        plan = {target: wheels_of(factory, target) for target in targets}
        missing = [name for name, wheels in plan.items() if not all(one.path.exists() for one in wheels)]
        if missing:
            self.lend("fetched", factory.root).run("build", "--no-test", *missing)
            shutil.rmtree(self.folder / "fetched")
        return plan

    @cached_property
    def wheels(self) -> list[Wheel]:
        return self.fetched(replace(self.small, root=ROOT), MAIN)[MAIN]

    @cached_property
    def several(self) -> Factory:
        """Ten targets that share most packages, locked and rendered."""
        factory = replace(self.small, root=self.folder / "several")
        write_several(factory.root)
        factory.run("lock", *PUBLISHED)
        factory.run("render", *PUBLISHED)
        return factory

    @cached_property
    def plan(self) -> dict[str, list[Wheel]]:
        return self.fetched(self.several, *PUBLISHED)

    @cached_property
    def rivals(self) -> Rivals:
        self.seed("zstd")
        every = {wheel.sha256: wheel for wheels in self.plan.values() for wheel in wheels}
        index = self.stack.enter_context(serving(list(every.values()), self.folder / "index"))
        return self.stack.enter_context(rivals(self.folder / "docker", self.several, index))


def scratch(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def add_package(text: str, package: str) -> str:
    changed = text.replace("    packages:\n", f"    packages:\n      - {package}\n", 1)
    changed = changed if changed != text else text.replace("packages: [", f"packages: [{package}, ", 1)
    if changed == text:
        raise SystemExit("the recipe has no `packages` to add one to")
    return changed


def write_several(root: Path) -> None:
    """One real target of `ROW` in ten families, each with a small package of its own."""
    text = (ROOT / "recipes" / f"{FAMILY}.yaml").read_text()
    first = text.index(f'  - version: "{ROW}"')
    following = text.find("\n  - version:", first + 1)
    text = text[: following if following > 0 else None] + "\n"
    shutil.rmtree(root, ignore_errors=True)
    recipes = {
        family: add_package(text, extra).replace(f"family: {FAMILY}", f"family: {family}", 1)
        for family, extra in EXTRA.items()
    }
    make_root(root, **recipes)


# --- cases -----------------------------------------------------------------------------------------


def start(ground: Ground, readings: Readings) -> None:
    factory = Factory(store=ground.folder / "none", cache=ground.folder / "cache")
    for arguments in (("list",), ("--help",)):
        with readings.timed(f"start/{arguments[0]}"):
            factory.run(*arguments)


def fresh(ground: Ground, readings: Readings) -> None:
    folder = ground.folder / "fresh"
    with serving(ground.wheels, ground.folder / "index") as index:
        with readings.timed("fresh/fetch"):
            fetch(ground.wheels, index, scratch(folder) / "wheels")
        bare = Factory(store=folder / "store", cache=folder / "cache", root=ground.small.root)
        (bare.cache).mkdir()
        (bare.cache / "wheels").symlink_to(ground.folder / "cache" / "wheels")
        with readings.timed("fresh/base"):
            bare.build(TINY, "--no-test")
        scratch(folder)
        mine = Factory(store=folder / "store", cache=folder / "cache", extra={"IMAGEFACTORY_INDEX": index})
        with readings.timed("fresh/imagefactory"):
            mine.build(MAIN)  # which fails where its smoke test does
    readings.add("fresh/floor", readings.values["fresh/fetch"][-1] + readings.values["fresh/base"][-1])
    shutil.rmtree(folder)


def cached(ground: Ground, readings: Readings) -> None:
    for state in ("warm", "cold"):
        for side in ("hash", "zstd", "gzip"):
            factory = ground.lend("cached", ROOT, side) if side != "hash" else None
            read_and_hash(ground.wheels)
            if state == "cold":
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("1")
            with readings.timed(f"{state}/{side}"):
                if factory is None:
                    read_and_hash(ground.wheels)
                else:
                    factory.build(MAIN, "--no-test")
    factory = ground.lend("cached", ROOT)
    process = subprocess.Popen(
        factory.command("build", "--no-test", "-q", MAIN), env=factory.environ, stdout=subprocess.DEVNULL
    )
    peak = PeakMemory(process.pid)
    if process.wait() != 0:
        raise SystemExit("the weighed build failed")
    peak.stop()
    readings.add("memory", peak.bytes)
    shutil.rmtree(factory.store.parent)


def sif(ground: Ground, readings: Readings) -> None:
    mine = ground.lend("sif", ROOT)
    mine.build(MAIN, "--no-test")
    for side, one in trial(ground.folder / "sif" / "made", Layout(mine.store), TAG).items():
        readings.add(f"sif/{side}", one.seconds)
        readings.add(f"sif/{side} cpu", one.cpu)
        readings.add(f"sif/{side} bytes", one.size)
    shutil.rmtree(ground.folder / "sif")


def bare(ground: Ground, readings: Readings) -> None:
    mine = ground.lend("bare", ROOT)
    mine.build(MAIN, "--no-test")
    nothing = replace(mine, store=ground.folder / "bare" / "none", cache=ground.folder / "bare" / "no-cache")
    with registry_server(ground.folder / "registry", RegistryOptions()) as server:
        push = ("push", "--json", "--registry", server.host, MAIN)
        mine.run(*push)
        with readings.timed("bare/push"):
            (pushed,) = json.loads(nothing.run(*push).stdout)["results"]
    if pushed["bytes_sent"] > 1_000_000:
        raise SystemExit("a layer was sent")
    shutil.rmtree(ground.folder / "bare")


def publish(ground: Ground, readings: Readings) -> None:
    seen: dict[str, dict[str, str]] = {}
    for way in ("assemble", *WAYS, "floor"):
        ground.rivals.clear()
        mine = ground.lend("publish", ground.several.root, wheels=False)
        mine = replace(mine, extra={"IMAGEFACTORY_INDEX": ground.rivals.index})
        with registry_server(ground.folder / "registry", RegistryOptions()) as server:
            put = partial(_put, ground, mine, way, server.host)
            if way == "floor":
                with readings.timed("first/floor"):
                    fetch(ground.plan[FIRST], ground.rivals.index, ground.folder / "floor", server.host)
                continue
            with readings.timed(f"first/{way}"):
                sent = put(FIRST)
            readings.add(f"first/{way} bytes", _held(server.storage))
            if way == "assemble":
                layers = json.loads(mine.run("show", "--json", FIRST).stdout)["image"]["layers"]
                readings.add("first/sent", sent)
                readings.add("first/unique", sum({one["digest"]: one["size"] for one in layers}.values()))
            with readings.timed(f"changed/{way}"):
                put(CHANGED)
            if way == "assemble":
                mine.run("build", "--push", "--registry", server.host, CHANGED)  # tries it, once
                with readings.timed(f"same/{way}"):
                    mine.run("build", "--push", "--registry", server.host, CHANGED)
            else:
                with readings.timed(f"same/{way}"):
                    put(CHANGED)
            seen[way] = _pull(ground, readings, way, _image(server.host, way, FIRST))
    ours = seen["assemble"].items()
    for way, files in seen.items():
        if other := sorted({path for path, _ in files.items() ^ ours}):
            raise SystemExit(f"{way}: {len(other)} files are not those of imagefactory's image: {other[:9]}")
    shutil.rmtree(ground.folder / "publish")


def eight(ground: Ground, readings: Readings) -> None:
    """BuildKit's best practice rebuilds all each time; that it is left out, and derived, spares minutes."""
    for way in ("assemble", "split"):
        ground.rivals.clear()
        mine = ground.lend("eight", ground.several.root, wheels=False)
        mine = replace(mine, extra={"IMAGEFACTORY_INDEX": ground.rivals.index})
        registry = registry_server(ground.folder / "registry", RegistryOptions())
        with registry as server, readings.timed(f"eight/{way}"):
            for target in EIGHT:
                _put(ground, mine, way, server.host, target)
    shutil.rmtree(ground.folder / "eight")


def _put(ground: Ground, mine: Factory, way: str, registry: str, target: str) -> float:
    """Builds and pushes; the bytes that were sent, where they are told."""
    if way != "assemble":
        ground.rivals.push(way, target, _image(registry, way, target), ground.plan[target])
        return 0.0
    mine.build(target, "--no-test")
    (pushed,) = json.loads(mine.run("push", "--json", "--registry", registry, target).stdout)["results"]
    return float(pushed["bytes_sent"])


def _image(registry: str, way: str, target: str) -> str:
    family = target.removesuffix(f"-{SUFFIX}")
    tag = SUFFIX
    if way == "assemble" and target == FIRST:
        listed = requests.get(f"http://{registry}/v2/{family}/tags/list", timeout=9).json()["tags"]
        tag = next(one for one in listed if one.startswith(SUFFIX))
    return f"{registry}/{family}:{tag}"


def _held(storage: Path) -> int:
    return sum(path.stat().st_size for path in storage.rglob("data"))


def _pull(ground: Ground, readings: Readings, way: str, image: str) -> dict[str, str]:
    """Pulls by a docker and a podman that hold nothing yet; what files the image has."""
    with docker_daemon(ground.folder / "puller") as puller:
        with readings.timed(f"docker/{way}"):
            docker(puller.host, "pull", "--quiet", image)
        files = files_in(puller.host, image)
    if way in ("assemble", "best"):
        with podman_service(ground.folder / "podman") as podman, readings.timed(f"podman/{way}"):
            command = [*podman.command, "pull", "--quiet", "--tls-verify=false", image]
            subprocess.run(
                command, env={**os.environ, **podman.environ}, check=True, stdout=subprocess.DEVNULL
            )
    return files


CASES: dict[str, Callable[[Ground, Readings], None]] = {
    case.__name__: case for case in (start, fresh, cached, sif, bare, publish, eight)
}


def main() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a command is compiled once on a machine, not each time
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all, if none is named")
    parser.add_argument("--folder", type=Path, default=Path(".benchmark"), help="40 GB of scratch, kept")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help="into docs/benchmarks.md and docs/benchmarks.svg"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.environ["PATH"] = search_path()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ground = Ground(folder=folder, stack=stack)
        for name in arguments.cases or CASES:
            readings = Readings()
            for number in range(arguments.trials):
                print(f"{name}: trial {number + 1} of {arguments.trials}", file=sys.stderr)
                CASES[name](ground, readings)
            keep(folder / "readings.json", name, readings)
    readings, days = kept_in(folder / "readings.json")
    table, picture = format_table(readings, days), format_picture(readings, days)
    print(table)
    if arguments.write:
        page = ROOT / "docs" / "benchmarks.md"
        before, rest = page.read_text().split("<!-- benchmark -->\n", 1)
        after = rest.split("<!-- end -->\n", 1)[1]
        picture_too = f"![How many times as fast, and the goals](benchmarks.svg)\n\n{table}"
        page.write_text(f"{before}<!-- benchmark -->\n{picture_too}<!-- end -->\n{after}")
        (ROOT / "docs" / "benchmarks.svg").write_text(picture)


if __name__ == "__main__":
    main()
