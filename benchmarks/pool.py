"""What a sweep costs around its jobs: planning 240 tuples, looking for their cells in two weeks of sweeps of
2,000 nodes each, writing 2,000 nodes, collecting 2,000 results.

There is no pool and no GPU: the inventory is made up, the jobs' logs and results are text that this program
lays out, and the key that signs them is thrown away with the folder. Nothing that is printed says anything
about a GPU.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from imagefactory.actions.collect import collect_sweep
from imagefactory.actions.definition import define_target
from imagefactory.actions.sweep import (
    SweepDependencies,
    SweepOptions,
    format_id,
    make_node,
    make_node_kit,
    prepare_sweep,
)
from imagefactory.actions.verdicts import nonce_store
from imagefactory.actions.verify import CollectOptions
from imagefactory.gpu.capability import Capability
from imagefactory.matrix.plan import TargetStatus
from imagefactory.model import Outcome
from imagefactory.oci.layout import LayoutStore
from imagefactory.oci.manifests import CONFIG_TYPE, canonical_json, format_descriptor
from imagefactory.progress import QuietProgress
from imagefactory.project import Project, load_project
from imagefactory.schedulers.cells import QueuedCell
from imagefactory.schedulers.htcondor.dag import write_sweep
from imagefactory.schedulers.pool import ImageKind, PoolImage, SweepSpec
from imagefactory.schedulers.sweep_file import read_sweep, write_sweep_file
from imagefactory.schedulers.underway import SweepLookup, image_of, read_underway
from imagefactory.settings.load import load_settings
from imagefactory.trust.keys import keys_directory, make_key
from imagefactory.verify.gpu_run import GpuRequest
from imagefactory.verify.nonces import NONCE_BYTES, format_nonce
from imagefactory.verify.report import FULL, VerifiedImage
from imagefactory.verify.suite_files import suite_digest
from tests.made.sweep import PoolMadeHere, inventory, play, pool_gpu

ROOT = Path(__file__).parents[1]
PLAN_GOAL, WRITE_GOAL, COLLECT_GOAL, MEMORY_GOAL = 2.0, 5.0, 10.0, 300
CELLS, NIGHTS = 240, 14
CAPABILITIES = ("6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0")
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
NAME = "pytorch-2.3-cu121"


def make_factory(folder: Path) -> Project:
    """This repository's recipes and locks, with a store and a key of their own."""
    root = folder / "root"
    for name in ("recipes", "lockfiles"):
        shutil.copytree(ROOT / name, root / name)
    (root / "imagefactory.toml").write_text("")
    environ = {
        "HOME": str(folder / "home"),
        "PATH": os.environ["PATH"],
        "IMAGEFACTORY_STORE": str(folder / "store"),
        "IMAGEFACTORY_CACHE": str(folder / "cache"),
    }
    factory = load_project(load_settings(directory=root, start=root, environ=environ), environ)
    make_key(keys_directory(environ), "benchmark")
    return factory


def put_image(factory: Project) -> PoolImage:
    """An image without content, so that verdicts have something to be attached to."""
    layout, packed = factory.layout, io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("hello"))
    layer = layout.add(packed.getvalue(), LAYER)
    config = layout.add(canonical_json({"rootfs": {"diff_ids": [layer.digest]}}), CONFIG_TYPE)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": format_descriptor(config),
        "layers": [format_descriptor(layer)],
    }
    made = LayoutStore(layout).put_manifest("pytorch", canonical_json(manifest), MANIFEST, "2.3-cu121")
    subject = VerifiedImage(target=NAME, index=made.digest, manifest=made.digest, config=config.digest)
    return PoolImage(
        kind=ImageKind.SIF, address="/made/up.sif", subject=subject, size=1 << 30, unpacked=3 << 30
    )


@contextmanager
def timed(what: str, goal: float) -> Iterator[None]:
    began, busy = time.perf_counter(), time.process_time()
    yield
    seconds, own = time.perf_counter() - began, time.process_time() - busy
    met = "met" if seconds <= goal else "MISSED"
    print(f"{what:<48} {seconds:6.2f} s (CPU {own:5.2f} s)   goal {goal:.0f} s   {met}")


def plan(factory: Project, bench: SweepDependencies) -> None:
    gpus = inventory(*(pool_gpu(one) for one in CAPABILITIES))
    with timed("plan", PLAN_GOAL):
        prepared = prepare_sweep(factory, factory.targets, gpus, SweepOptions(image="sif"), bench)
    plan = prepared.plan
    print(f"  {len(plan.cells) + len(plan.skipped)} tuples, of which {len(plan.cells)} are queued")


def make(factory: Project, folder: Path, count: int, bench: SweepDependencies) -> None:
    target = next(one for one in factory.targets if one.name == NAME)
    definition, image, now = define_target(factory, target), put_image(factory), bench.clock()
    cell = QueuedCell(
        stage=TargetStatus(target=target),
        capability=Capability(8, 0),
        cuda="12.0",
        gpus=1,
        reason="a benchmark",
    )
    with timed(f"write {count} nodes", WRITE_GOAL):
        kits = []
        for number in range(count):
            nonce = format_nonce(bench.random(NONCE_BYTES))
            node = replace(make_node(cell, image, definition, FULL, nonce), name=f"node{number}")
            ask = GpuRequest(nonce=nonce, level=FULL, capability="8.0", predicted={})
            kits.append(make_node_kit(node, definition, ask, now))
        sweep = SweepSpec(
            id="20260102-030405-0000",
            created=now,
            level=FULL,
            site="generic",
            nodes=tuple(kit.node for kit in kits),
        )
        nonce_store(factory).issue_all({kit.node.nonce: kit.run for kit in kits}, now)
        write_sweep_file(folder, sweep)
        write_sweep(folder, sweep, {kit.node.name: kit.texts for kit in kits})


def look(folder: Path, bench: SweepDependencies) -> None:
    """The newest of NIGHTS sweeps has every result of CELLS cells, and nobody has collected one of them."""
    made, place = read_sweep(folder), folder.parent / "sweeps"
    names = [(f"tiny-{number // len(CAPABILITIES)}", CAPABILITIES[number % len(CAPABILITIES)])
             for number in range(len(made.nodes))]  # fmt: skip
    nodes = tuple(
        replace(node, target=target, capability=capability)
        for node, (target, capability) in zip(made.nodes, names, strict=True)
    )
    images = dict.fromkeys(names[:CELLS], image_of(nodes[0]))
    for night in range(NIGHTS):
        began = made.made - timedelta(days=night)
        write_sweep_file(place / format_id(began, bytes(2)), replace(made, made=began, nodes=nodes))
    newest = place / format_id(made.made, bytes(2))
    (newest / "nodes").symlink_to(folder / "nodes")
    looking = SweepLookup(now=bench.clock(), suite=suite_digest(), pools=bench.pools, user=os.geteuid())
    with timed(f"look into {NIGHTS} sweeps of {len(nodes)} nodes", PLAN_GOAL):
        seen, notes = read_underway(place, images, looking)
    print(f"  for {len(images)} cells, of which {len(seen[0].cells)} are in hand")
    assert not notes


def play_all(folder: Path) -> None:
    for node in read_sweep(folder).nodes:
        play(folder, node.name)


def collect(factory: Project, folder: Path, count: int) -> None:
    with timed(f"collect {count} results, sign and attach them", COLLECT_GOAL):
        done = collect_sweep(factory, folder, CollectOptions(), datetime.now(UTC), QuietProgress())
    assert all(one.result.outcome is Outcome.VERIFIED and one.attached for one in done.nodes), done.nodes[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="Default: a temporary one. It is emptied at the end.")
    given = parser.parse_args()
    bench = SweepDependencies(
        clock=lambda: datetime.now(UTC), random=os.urandom, pools=lambda _: PoolMadeHere()
    )
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="imagefactory-pool-") as name:
        factory, folder = make_factory(Path(name)), Path(name, "sweep")
        plan(factory, bench)
        make(factory, folder, given.nodes, bench)
        play_all(folder)
        look(folder, bench)
        collect(factory, folder, given.nodes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"peak of memory {peak} MB   goal {MEMORY_GOAL} MB   {'met' if peak < MEMORY_GOAL else 'MISSED'}")


if __name__ == "__main__":
    main()
