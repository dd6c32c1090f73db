"""The benchmark: imagefactory beside its rivals and beside floors. `python -m benchmarks --help`

Sides of a case take turns within a trial, on the same lock, base, wheels (an index on loopback) and an empty
registry on loopback; a table or a picture comes only of images whose files are the same on all sides.

    start      `imagefactory list` and `--help` (startup.py has more)
    floors     the README's first command, lock to image, and build and push, each against its floor: to
               fetch the wheels, inflate, hash and compress them by floor.c, and upload the result
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
from benchmarks.told import TABLES, format_picture, format_table
from benchmarks.wheels import Wheel, compile_floor, fetch, one_pass, read, serving, upload, wheels_of
from imagefactory.oci.layout import Layout
from tests.services import RegistryOptions, docker_daemon, podman_service, registry_server
from tests.services.factory import TINY_RECIPE, Factory, copy_store, make_root
from tests.services.processes import search_path

ROOT = Path(__file__).parents[1]
MAIN, PUSHED, TINY = "pytorch-2.3-cu121", "onnxruntime-1.18-cu118", "tiny-12.1-cu121"
EXTRA = {"first": "six==1.16.0", "changed": "six==1.17.0"} | {
    f"t{name}": name for name in ("tomli", "attrs", "certifi", "idna", "click", "tqdm", "toolz", "zipp")
}


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What cases stand on, below one folder, made when the first asks for it and kept for the next run."""

    folder: Path
    stack: ExitStack
    target: str
    pushed: str

    @property
    def suffix(self) -> str:
        """The version and variant of the target that is pushed: `1.18-cu118`."""
        return self.pushed.partition("-")[2]

    @property
    def several_targets(self) -> tuple[str, ...]:
        return tuple(f"{family}-{self.suffix}" for family in EXTRA)

    @property
    def first(self) -> str:
        return self.several_targets[0]

    @property
    def changed(self) -> str:
        return self.several_targets[1]

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
        return self.fetched(replace(self.small, root=ROOT), self.target)[self.target]

    @cached_property
    def several(self) -> Factory:
        """Ten targets that share most packages, locked and rendered."""
        factory = replace(self.small, root=self.folder / "several")
        write_several(factory.root, self.pushed)
        factory.run("lock", *self.several_targets)
        factory.run("render", *self.several_targets)
        return factory

    @cached_property
    def plan(self) -> dict[str, list[Wheel]]:
        return self.fetched(self.several, *self.several_targets)

    @cached_property
    def index(self) -> str:
        """The address of an index of all wheels of `plan`."""
        every = {wheel.sha256: wheel for wheels in self.plan.values() for wheel in wheels}
        return self.stack.enter_context(serving(list(every.values()), self.folder / "index"))

    @cached_property
    def rivals(self) -> Rivals:
        self.seed("zstd")
        return self.stack.enter_context(rivals(self.folder / "docker", self.several, self.index))


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


def write_several(root: Path, target: str) -> None:
    """One real target in ten families, each with a small package of its own."""
    own, version, *_ = target.split("-")
    text = (ROOT / "recipes" / f"{own}.yaml").read_text()
    first = text.index(f'  - version: "{version}"')
    following = text.find("\n  - version:", first + 1)
    text = text[: following if following > 0 else None] + "\n"
    shutil.rmtree(root, ignore_errors=True)
    recipes = {
        family: add_package(text, extra).replace(f"family: {own}", f"family: {family}", 1)
        for family, extra in EXTRA.items()
    }
    make_root(root, **recipes)


# --- cases -----------------------------------------------------------------------------------------


def start(ground: Ground, readings: Readings) -> None:
    factory = Factory(store=ground.folder / "none", cache=ground.folder / "cache")
    for arguments in (("list",), ("--help",)):
        with readings.timed(f"start/{arguments[0]}"):
            factory.run(*arguments)


def floors(ground: Ground, readings: Readings) -> None:
    """Our side and its floors in turns. Needs no docker."""
    program, folder = compile_floor(ground.folder), ground.folder / "floor-files"
    _first_command(ground, readings, scratch(folder))
    for state in ("warm", "cold"):
        for side in ("pass", "zstd"):
            mine = ground.lend("floors", ROOT)
            if state == "warm":
                read(ground.wheels)
            else:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("1")
            shutil.rmtree(folder / "layers", ignore_errors=True)
            with readings.timed(f"{state}/{side}"):
                if side == "pass":
                    one_pass(program, ground.wheels, folder / "layers")
                else:
                    mine.build(ground.target, "--no-test")
    parts = (readings.values[name][-1] for name in ("fresh/fetch", "fresh/base", "warm/pass"))
    readings.add("fresh/floor", sum(parts))
    _memory(ground, readings)
    before = {wheel.sha256 for wheel in ground.plan[ground.first]}
    changed = [wheel for wheel in ground.plan[ground.changed] if wheel.sha256 not in before]
    with registry_server(ground.folder / "registry", RegistryOptions()) as server:
        for name, wheels in (("first", ground.plan[ground.first]), ("changed", changed)):
            scratch(folder)
            with readings.timed(f"floors/{name} floor"):
                upload(
                    one_pass(program, fetch(wheels, ground.index, folder / "new"), folder / "layers"),
                    server.host,
                )
    mine = ground.lend("floors", ground.several.root, wheels=False)
    mine = replace(mine, extra={"IMAGEFACTORY_INDEX": ground.index})
    with registry_server(ground.folder / "registry", RegistryOptions()) as server:
        for name, target in (("first", ground.first), ("changed", ground.changed)):
            with readings.timed(f"floors/{name}"):
                _put(ground, mine, "assemble", server.host, target)
    shutil.rmtree(folder)


def _first_command(ground: Ground, readings: Readings, folder: Path) -> None:
    with serving(ground.wheels, ground.folder / "main-index") as index:
        with readings.timed("fresh/fetch"):
            fetch(ground.wheels, index, folder / "wheels")
        shutil.rmtree(folder / "wheels")
        bare = Factory(store=folder / "store", cache=folder / "cache", root=ground.small.root)
        bare.cache.mkdir()
        (bare.cache / "wheels").symlink_to(ground.folder / "cache" / "wheels")
        with readings.timed("fresh/base"):
            bare.build(TINY, "--no-test")
        scratch(folder)
        mine = Factory(store=folder / "store", cache=folder / "cache", extra={"IMAGEFACTORY_INDEX": index})
        with readings.timed("fresh/imagefactory"):
            mine.build(ground.target)  # which fails where its smoke test does


def _memory(ground: Ground, readings: Readings) -> None:
    factory = ground.lend("floors", ROOT)
    process = subprocess.Popen(
        factory.command("build", "--no-test", "-q", ground.target),
        env=factory.environ,
        stdout=subprocess.DEVNULL,
    )
    peak = PeakMemory(process.pid)
    if process.wait() != 0:
        raise SystemExit("the weighed build failed")
    peak.stop()
    readings.add("memory", peak.bytes)


def sif(ground: Ground, readings: Readings) -> None:
    mine = ground.lend("sif", ROOT)
    mine.build(ground.target, "--no-test")
    for side, one in trial(
        ground.folder / "sif" / "made", Layout(mine.store), ground.target.replace("-", ":", 1)
    ).items():
        readings.add(f"sif/{side}", one.seconds)
        readings.add(f"sif/{side} cpu", one.cpu)
        readings.add(f"sif/{side} bytes", one.size)
    shutil.rmtree(ground.folder / "sif")


def bare(ground: Ground, readings: Readings) -> None:
    mine = ground.lend("bare", ROOT)
    mine.build(ground.target, "--no-test")
    nothing = replace(mine, store=ground.folder / "bare" / "none", cache=ground.folder / "bare" / "no-cache")
    with registry_server(ground.folder / "registry", RegistryOptions()) as server:
        push = ("push", "--json", "--registry", server.host, ground.target)
        mine.run(*push)
        with readings.timed("bare/push"):
            (pushed,) = json.loads(nothing.run(*push).stdout)["results"]
    if pushed["bytes_sent"] > 1_000_000:
        raise SystemExit("a layer was sent")
    shutil.rmtree(ground.folder / "bare")


def publish(ground: Ground, readings: Readings) -> None:
    seen: dict[str, dict[str, str]] = {}
    for way in ("assemble", *WAYS):
        ground.rivals.clear()
        mine = ground.lend("publish", ground.several.root, wheels=False)
        mine = replace(mine, extra={"IMAGEFACTORY_INDEX": ground.rivals.index})
        with registry_server(ground.folder / "registry", RegistryOptions()) as server:
            put = partial(_put, ground, mine, way, server.host)
            with readings.timed(f"first/{way}"):
                sent = put(ground.first)
            readings.add(f"first/{way} bytes", _held(server.storage))
            if way == "assemble":
                layers = json.loads(mine.run("show", "--json", ground.first).stdout)["image"]["layers"]
                readings.add("first/sent", sent)
                readings.add("first/unique", sum({one["digest"]: one["size"] for one in layers}.values()))
            with readings.timed(f"changed/{way}"):
                put(ground.changed)
            if way == "assemble":
                mine.run("build", "--push", "--registry", server.host, ground.changed)  # tries it, once
                with readings.timed(f"same/{way}"):
                    mine.run("build", "--push", "--registry", server.host, ground.changed)
            else:
                with readings.timed(f"same/{way}"):
                    put(ground.changed)
            seen[way] = _pull(ground, readings, way, _image(ground, server.host, way, ground.first))
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
            for target in ground.several_targets[2:]:
                _put(ground, mine, way, server.host, target)
    shutil.rmtree(ground.folder / "eight")


def _put(ground: Ground, mine: Factory, way: str, registry: str, target: str) -> float:
    """Builds and pushes; the bytes that were sent, where they are told."""
    if way != "assemble":
        ground.rivals.push(way, target, _image(ground, registry, way, target), ground.plan[target])
        return 0.0
    mine.build(target, "--no-test")
    (pushed,) = json.loads(mine.run("push", "--json", "--registry", registry, target).stdout)["results"]
    return float(pushed["bytes_sent"])


def _image(ground: Ground, registry: str, way: str, target: str) -> str:
    family = target.removesuffix(f"-{ground.suffix}")
    tag = ground.suffix
    if way == "assemble" and target == ground.first:
        listed = requests.get(f"http://{registry}/v2/{family}/tags/list", timeout=9).json()["tags"]
        tag = next(one for one in listed if one.startswith(ground.suffix))
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
    case.__name__: case for case in (start, floors, sif, bare, publish, eight)
}


def main() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a command is compiled once on a machine, not each time
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all, if none is named")
    parser.add_argument("--folder", type=Path, default=Path(".benchmark"), help="40 GB of scratch, kept")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--target", default=MAIN, help=f"the target that is only built [default: {MAIN}]")
    parser.add_argument("--pushed", default=PUSHED, help=f"the target that is pushed [default: {PUSHED}]")
    parser.add_argument(
        "--write",
        action="store_true",
        help="into docs/: each table whose cases are measured, and its picture",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if arguments.write and (arguments.target, arguments.pushed) != (MAIN, PUSHED):
        parser.error(f"--write needs the targets {MAIN} and {PUSHED}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.environ["PATH"] = search_path()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ground = Ground(folder=folder, stack=stack, target=arguments.target, pushed=arguments.pushed)
        for name in arguments.cases or CASES:
            readings = Readings()
            for number in range(arguments.trials):
                print(f"{name}: trial {number + 1} of {arguments.trials}", file=sys.stderr)
                CASES[name](ground, readings)
            keep(folder / "readings.json", name, readings)
    for name, cases in TABLES.items():
        readings, days = kept_in(folder / "readings.json", cases)
        if not days:
            continue
        table = format_table(name, readings, days)
        print(table)
        if arguments.write and set(cases) <= set(json.loads((folder / "readings.json").read_text())):
            page = ROOT / "docs" / "benchmarks.md"
            before, rest = page.read_text().split(f"<!-- {name} -->\n", 1)
            after = rest.split("<!-- end -->\n", 1)[1]
            picture = f"![How many times as fast, and the goals]({name}.svg)"
            page.write_text(f"{before}<!-- {name} -->\n{picture}\n\n{table}<!-- end -->\n{after}")
            (ROOT / "docs" / f"{name}.svg").write_text(format_picture(name, readings, days))


if __name__ == "__main__":
    main()
