"""Pushes through a network at its worst: every one ends right or with exit code 8, none silently wrong.

What a push left is always judged by reading the registry directly, behind the proxy.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from imagefactory.errors import EXIT_INTERRUPTED, EXIT_REGISTRY, RegistryError
from imagefactory.http import RetryPolicy
from imagefactory.oci.candidates import PUSHED_TYPE, pushed_record
from imagefactory.oci.graph import ManifestGraph, StoreRepository, read_graph
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    canonical_json,
    format_descriptor,
)
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from imagefactory.oci.store import Source
from imagefactory.oci.transfer import TransferRequest, TransferResult, origins_from, remember_transfer, send
from imagefactory.progress import QuietProgress
from tests.engines.faults import LINE, STUCK, Fault, FaultProxy, Storm
from tests.made.families import LAYER, candidate_of, make_root, stored_image
from tests.made.registry import Ways, registry_made_here
from tests.services import registry as services
from tests.services.children import LIMIT, child, kill_group, wait_for
from tests.services.tier import many

PUSHES, REAL_PUSHES = many((500, 100), (2000, 300))
LEAST_FAULTS = PUSHES * 5 // 2
WORKERS = 2
TARGETS = ("one-12.1-cu121", "two-12.1-cu121")
NOW = datetime(2026, 11, 21, tzinfo=UTC)
TAG = "1.0-cu121-0123456789ab"
ATTEMPTS = 6  # so many failures in a row are too many, by default
# As long as a registry may need that is starved by other jobs: about a minute of failures in a row.
STUBBORN = RetryPolicy(attempts=300, first_wait=0.01, longest_wait=0.3, read=STUCK)


def add_image(layout: Layout, layers: list[bytes], tag: str) -> ManifestGraph:
    """An image of these layers in the layout, and the graph that a push of it sends."""
    store, config = LayoutStore(layout), canonical_json({"made for": tag})
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(config, CONFIG_TYPE)),
        "layers": [format_descriptor(layout.add(layer, LAYER)) for layer in layers],
    }
    row = format_descriptor(store.put_manifest("made", canonical_json(manifest), MANIFEST_TYPE))
    platform = {"os": "linux", "architecture": "amd64"}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [{**row, "platform": platform}]}
    store.put_manifest("made", canonical_json(index), INDEX_TYPE, tag)
    return read_graph(StoreRepository(store=store, repository="made"), tag)


def graphs_in(layout: Layout) -> list[ManifestGraph]:
    """Small images of one or two layers; one in fourteen has a layer too large for one request."""
    random = Random(20261121)
    sizes = [[random.randrange(1, 9000) for _ in range(1 + n % 2)] for n in range(13)]
    sizes.append([1_300_000])
    return [
        add_image(layout, [random.randbytes(size) for size in row], str(n)) for n, row in enumerate(sizes)
    ]


# --- what the registry really has ----------------------------------------------------------------


@dataclass
class Direct:
    """The registry without the proxy and without the code that is tested."""

    host: str
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection(self.host, timeout=STUCK)

    def get(self, path: str) -> bytes | None:
        self.connection.request("GET", f"/v2/{path}", headers={"Accept": f"{INDEX_TYPE}, {MANIFEST_TYPE}"})
        answer = self.connection.getresponse()
        data = answer.read()
        assert answer.status in (200, 404), (path, answer.status, data)
        return data if answer.status == 200 else None

    def check(self, repository: str, tag: str, graph: ManifestGraph) -> bool:
        """Whether the tag is there; asserts that it then is this graph, whole."""
        root = self.get(f"{repository}/manifests/{tag}")
        if root is None:
            return False
        assert root == graph.root.data
        for manifest in graph.manifests:
            assert self.get(f"{repository}/manifests/{manifest.descriptor.digest}") == manifest.data
        for blob in graph.blobs:
            data = self.get(f"{repository}/blobs/{blob.digest}")
            assert data is not None
            assert len(data) == blob.size
            assert f"sha256:{hashlib.sha256(data).hexdigest()}" == blob.digest
        return True

    def has(self, repository: str, digest: str) -> bool:
        self.connection.request("HEAD", f"/v2/{repository}/blobs/{digest}")
        answer = self.connection.getresponse()
        answer.read()
        return answer.status == 200

    def records(self, repository: str, graph: ManifestGraph) -> int:
        """How many records of a push refer to the image, by the API or by the fallback tag."""
        digest = graph.root.descriptor.digest
        data = self.get(f"{repository}/referrers/{digest}")
        data = data or self.get(f"{repository}/manifests/{digest.replace(':', '-')}")
        rows = json.loads(data)["manifests"] if data else []
        return sum(row.get("artifactType") == PUSHED_TYPE for row in rows)


# --- many pushes ---------------------------------------------------------------------------------


@dataclass
class Tally:
    """`good` has the faults that each push met that succeeded, by its seed; the seeds in `bad` gave up.

    Both are functions of the seeds. How far the other blobs had come when one gave up is not.
    """

    good: dict[int, Counter[Fault]] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    mounted: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        self.good |= other.good
        self.bad |= other.bad
        self.mounted += other.mounted
        return self


class Lined(RegistryClient):
    """Says with each request which blob it is about: a blob's requests come one after the other."""

    def _say(self, line: str) -> None:
        self.session.connection().headers[LINE] = line

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        self._say(descriptor.digest)
        return super().has(repository, descriptor)

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
        self._say(descriptor.digest)
        return super().write(repository, descriptor, source)

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:
        self._say(descriptor.digest)
        return super().mount(repository, descriptor, origin)

    def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        self._say("")
        return super().manifest(repository, wanted)

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        self._say("")
        return super().put_manifest(repository, data, media_type, tag)


def storm_of(seed: int, blobs: Iterable[Descriptor]) -> Storm:
    """Mostly up to five faults; one push in twelve meets a network that hardly works at all."""
    random, lines = Random(seed), ["", *(blob.digest for blob in blobs)]
    if random.random() < 0.08:
        return Storm(seed, budget=40, rate=random.choice((0.3, 0.5, 0.7)), lines=lines)
    return Storm(seed, budget=random.choice((1, 2, 3, 4, 5, 5)), rate=0.4, lines=lines)


def options_of(seed: int) -> RegistryOptions:
    """As a person's, but no time is spent on waiting; some send in small pieces."""
    piece = 3000 if seed % 4 == 0 else 0
    return RegistryOptions(
        sleep=lambda _: None, random=Random(seed), piece=piece, retry_policy=RetryPolicy(read=STUCK)
    )


def push_many(seeds: range, upstream: str, folder: Path) -> Tally:
    """One push a seed, each into a repository of its own, each judged behind the proxy."""
    layout, tally, memory = Layout(folder), Tally(), dict[str, object]()
    graphs, source = graphs_in(layout), StoreRepository(store=LayoutStore(layout), repository="made")
    direct = Direct(upstream)
    with FaultProxy(upstream) as plain, FaultProxy(upstream, tokens=True) as guarded:
        for seed in seeds:
            graph, repository = graphs[seed % len(graphs)], f"r{seed}"
            proxy = guarded if seed % 3 == 0 else plain
            record = (pushed_record(graph.root.descriptor, NOW),) if seed % 5 == 0 else ()
            attached = [blob for artifact in record for blob, _ in artifact.blobs]
            proxy.storm = storm = storm_of(seed, [*graph.blobs, *attached])
            sending = TransferRequest(
                graph=graph,
                repository=repository,
                candidate=TAG,
                attach=record,
                workers=2,
                origins=origins_from(memory if seed % 7 == 0 else {}, ()),
            )
            registry = Lined(proxy.address, options_of(seed))
            outcome: TransferResult | RegistryError
            try:
                outcome = send(source, registry, sending, QuietProgress())
            except RegistryError as error:
                outcome = error
            registry.close()
            there = direct.check(repository, TAG, graph)  # nothing at the tag, or all of it
            if isinstance(outcome, TransferResult):
                assert there
                assert outcome.digest == graph.root.descriptor.digest
                assert not record or direct.records(repository, graph) == 1
                tally.good[seed] = storm.faults
                tally.mounted += outcome.mounted
                memory = remember_transfer(memory, repository, graph)
            else:
                assert outcome.exit_code == EXIT_REGISTRY
                assert outcome.hint
                assert storm.worst >= ATTEMPTS, "fewer faults are borne wherever they come"
                tally.bad.add(seed)
    return tally


def push_many_here(seeds: range, folder: Path) -> Tally:
    """Against a registry in this process; one process in two has the referrers API."""
    with registry_made_here(Ways(referrers=seeds.start % 2 == 0)) as registry:
        return push_many(seeds, registry.host, folder)


def judge(tally: Tally, *, pushes: int, faults: int) -> None:
    """No seed is lucky: all that is counted here comes out the same whichever thread runs when."""
    borne = sum(tally.good.values(), Counter[Fault]())
    print(f"\n{len(tally.good)} pushes bore {borne.total()} faults, {len(tally.bad)} gave up and said so")
    assert len(tally.good) + len(tally.bad) == pushes
    assert tally.bad
    assert borne.total() >= faults
    assert set(borne) == set(Fault), "every kind of fault came"
    assert min(borne.values()) >= faults / 100
    assert tally.mounted


def test_thousands_of_faults_and_no_push_is_silently_wrong(tmp_path: Path) -> None:
    """Seeded pushes, 2,000 of them every night, in two processes."""
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [
            pool.submit(push_many_here, range(n, PUSHES, WORKERS), tmp_path / f"store-{n}")
            for n in range(WORKERS)
        ]
        tally = Tally()
        for future in futures:
            tally += future.result()
    judge(tally, pushes=PUSHES, faults=LEAST_FAULTS)


def test_the_same_faults_before_a_real_registry(tmp_path: Path, registry: str) -> None:
    tally = push_many(range(REAL_PUSHES), registry, tmp_path / "store")
    judge(tally, pushes=REAL_PUSHES, faults=REAL_PUSHES * 2)


def test_tokens_that_expire_in_the_middle(tmp_path: Path) -> None:
    """Also between the pieces of one upload: the push goes on with a new token."""
    layout = Layout(tmp_path / "store")
    graph = add_image(layout, [Random(1).randbytes(60_000)], "1")
    source, expired = StoreRepository(store=LayoutStore(layout), repository="made"), 0
    with registry_made_here() as behind, FaultProxy(behind.host, tokens=True) as proxy:
        for seed in range(20):
            proxy.storm = Storm(seed, budget=3, rate=0.3, kinds=(Fault.EXPIRED,))
            sending = TransferRequest(graph=graph, repository=f"r{seed}", candidate=TAG)
            registry = RegistryClient(proxy.address, RegistryOptions(sleep=lambda _: None, piece=9000))
            assert send(source, registry, sending, QuietProgress()).digest == graph.root.descriptor.digest
            assert Direct(behind.host).check(f"r{seed}", TAG, graph)
            expired += proxy.storm.worst
    assert expired >= 50  # which request is hit is chance, that one is hit is the seed's


# --- two at once ---------------------------------------------------------------------------------


def test_two_writers_at_one_tag(tmp_path: Path, registry: str) -> None:
    """Through a bad network: both candidates are right, the tag is one of the two, and it is said which."""
    layout = Layout(tmp_path / "store")
    graphs = [add_image(layout, [Random(n).randbytes(40_000), b"shared" * 5000], str(n)) for n in range(2)]
    digests = {graph.root.descriptor.digest for graph in graphs}
    source, direct = StoreRepository(store=LayoutStore(layout), repository="made"), Direct(registry)
    with FaultProxy(registry) as proxy, ThreadPoolExecutor(2) as pool:
        for seed in range(30):
            repository = f"two-writers-{seed}"
            proxy.storm = Storm(seed, budget=5, rate=0.1)

            def push(n: int, seed: int = seed, repository: str = repository) -> TransferResult:
                sending = TransferRequest(
                    graph=graphs[n], repository=repository, candidate=f"1.0-cu121-{n:012x}", tags=("nightly",)
                )
                # The registry rewrites its tag in place: who reads just then gets a 500, or several.
                options = replace(options_of(2 * seed + n), sleep=time.sleep, retry_policy=STUBBORN)
                return send(source, RegistryClient(proxy.address, options), sending, QuietProgress())

            both = list(pool.map(push, range(2)))
            for n, (graph, sent) in enumerate(zip(graphs, both, strict=True)):
                assert sent.digest == graph.root.descriptor.digest
                assert direct.check(repository, f"1.0-cu121-{n:012x}", graph)
                ((tag, digest),) = sent.tags
                assert tag == "nightly"
                assert digest in digests
            data = direct.get(f"{repository}/manifests/nightly")
            assert data in [graph.root.data for graph in graphs]


# --- the command line ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """The command line on a root with two families, and a store of its own."""

    root: Path
    store: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "imagefactory", "-C", str(self.root), *arguments]

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "IMAGEFACTORY_STORE": str(self.store)}

    def run(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        done = subprocess.run(
            self.command(*arguments, "--json"), env=self.environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        value = json.loads(done.stdout)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(root=make_root(tmp_path / "root"), store=tmp_path / "store")


def test_killed_in_the_middle_and_run_again(line: Line, registry: str) -> None:
    """kill -9 with some blobs there and some not; the second push sends only what is missing."""
    random = Random(9)
    layers = [random.randbytes(3_000_000) for _ in range(8)]
    graph = stored_image(line.store, "one", layers)
    direct = Direct(registry)
    with FaultProxy(registry) as proxy:
        # More than four blobs, as many as are under way at a time: one is there whole. And some are not.
        proxy.most_bytes = enough = int(0.55 * graph.size)
        where = f"{proxy.address}/killed"
        command = line.command("push", "--registry", where, "one-12.1-cu121")
        with child(command, env=line.environ, stderr=subprocess.DEVNULL) as process:

            def half_sent() -> bool:
                assert process.poll() is None
                return proxy.seen.body_bytes >= enough

            wait_for(half_sent, "half of the bytes are sent")
            kill_group(process)
            assert process.wait(LIMIT) == -signal.SIGKILL
        proxy.most_bytes = 0
        assert direct.get(f"killed/one/manifests/{candidate_of(graph)}") is None
        wait_for(lambda: not proxy.serving, "what is under way at the registry comes to its end")
        there = {blob.digest for blob in graph.blobs if direct.has("killed/one", blob.digest)}
        missing = sum(blob.size for blob in graph.blobs if blob.digest not in there)
        assert there
        assert missing
        (again,) = line.run("push", "--registry", where, "one-12.1-cu121")["results"]
        assert again["blobs"]["present"] == len(there)
        assert again["bytes_sent"] <= 1.05 * missing
        interrupted = 4 * len(layers[0])  # four are on their way at a time
        assert proxy.seen.body_bytes <= 1.05 * graph.size + interrupted
    assert direct.check("killed/one", candidate_of(graph), graph)


def test_interrupted_by_a_person(line: Line) -> None:
    """Ctrl-C ends a push, also while it waits for a registry that wants to be left alone."""
    graph = stored_image(line.store, "one", [Random(n).randbytes(9_000_000) for n in range(4)])
    with registry_made_here() as behind:
        for kind, most in ((Fault.SLOW, graph.size // 2), (Fault.TOO_MANY_WAIT, 0)):
            said, code = push_interrupted(line, behind.host, kind, most)
            assert (code, said.splitlines()[-1:]) == (EXIT_INTERRUPTED, [INTERRUPTED])
    assert candidate_of(graph) not in behind.find("one").tags


INTERRUPTED = "interrupted: run the same command again to continue"


def push_interrupted(line: Line, host: str, kind: Fault, most: int) -> tuple[str, int]:
    """What a push says on stderr that is interrupted in the midst of a fault, and how it ends.

    By a proxy of its own: a request of an earlier push that comes late would be taken for one of this.
    """
    with FaultProxy(host) as proxy:
        proxy.retry_after = 3600  # cut to 30 seconds, time enough to be interrupted in
        proxy.storm, proxy.most_bytes = Storm(1, budget=1000, rate=1.0, kinds=(kind,)), most
        command = line.command("push", "--registry", proxy.address, "one-12.1-cu121")
        with child(command, env=line.environ, stderr=subprocess.PIPE, text=True) as process:

            def reached() -> bool:
                assert process.poll() is None
                return proxy.seen.body_bytes >= most and proxy.seen.faults[kind] > 0

            wait_for(reached, f"{kind} is met")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LIMIT)
        return said, process.returncode


def test_layers_that_two_targets_share_are_sent_once(line: Line, registry: str) -> None:
    random = Random(11)
    shared, own = [random.randbytes(2_000_000) for _ in range(3)], [random.randbytes(500_000) for _ in "ab"]
    graphs = [stored_image(line.store, f, [*shared, o]) for f, o in zip(("one", "two"), own, strict=True)]
    unique = {blob.digest: blob.size for graph in graphs for blob in graph.blobs}
    with FaultProxy(registry) as proxy:
        result = line.run("push", "--registry", f"{proxy.address}/shared", *TARGETS)
        assert proxy.seen.body_bytes <= 1.05 * sum(unique.values())
        assert [row["blobs"]["mounted"] for row in result["results"]] == [0, 4]
        assert sum(row["bytes_sent"] for row in result["results"]) <= 1.05 * sum(unique.values())
        before = proxy.seen.body_bytes
        again = line.run("push", "--registry", f"{proxy.address}/shared", *TARGETS)
        assert [row["bytes_sent"] for row in again["results"]] == [0, 0]
        assert proxy.seen.body_bytes == before
        # A machine that remembers nothing asks the other family's repository for what is large.
        line.run("push", "--registry", f"{proxy.address}/forgotten", TARGETS[0])
        shutil.rmtree(line.store / "pushed")
        (second,) = line.run("push", "--registry", f"{proxy.address}/forgotten", TARGETS[1])["results"]
        assert second["blobs"] == {"sent": 3, "mounted": 3, "present": 0}
    for path in ("shared", "forgotten"):
        for graph, family in zip(graphs, ("one", "two"), strict=True):
            assert Direct(registry).check(f"{path}/{family}", candidate_of(graph), graph)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small-disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_registry_that_is_full(line: Line, tmp_path: Path, small_disk: Path) -> None:
    """Exit code 8, no tag; when there is room again, the same command ends well."""
    graph = stored_image(line.store, "one", [Random(n).randbytes(2_000_000) for n in range(5)])
    options = services.RegistryOptions(storage=small_disk)
    with services.registry_server(tmp_path / "full", options) as server:
        said = line.run("push", "--registry", server.host, "one-12.1-cu121", code=EXIT_REGISTRY)
        assert said["results"] == []
        (error,) = said["errors"]
        assert "run" in error["hint"]
        direct = Direct(server.host)
        assert direct.get(f"one/manifests/{candidate_of(graph)}") is None
        subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
        (pushed,) = line.run("push", "--registry", server.host, "one-12.1-cu121")["results"]
        assert pushed["digest"] == graph.root.descriptor.digest
        assert direct.check("one", candidate_of(graph), graph)


def test_an_entry_that_a_full_disk_cut_is_mended(line: Line, tmp_path: Path) -> None:
    """docker-registry 2.8 answers 500 for such a blob for ever; sending it anew mends it."""
    graph = stored_image(line.store, "one", [b"layer" * 1000])
    with services.registry_server(tmp_path / "cut") as server:
        line.run("push", "--registry", server.host, "one-12.1-cu121")
        direct = Direct(server.host)
        links = list((server.storage / "docker/registry/v2/repositories/one/_layers").rglob("link"))
        for link in links:
            link.write_bytes(b"")
        source = StoreRepository(store=LayoutStore(Layout(line.store)), repository="one")
        registry = RegistryClient(server.host, RegistryOptions(sleep=lambda _: None))
        sending = TransferRequest(graph=graph, repository="one", tags=("again",))
        assert send(source, registry, sending, QuietProgress()).sent == len(graph.blobs)
        assert direct.check("one", "again", graph)
