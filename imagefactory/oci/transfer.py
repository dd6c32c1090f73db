"""Moves what a manifest names from any store to any other: push, pull and copy are this one thing.

`read_graph` lists a root and all below it; `send` brings blobs first, in parallel, then manifests
children first, then tags. So a reader of the destination sees nothing or the whole image, and a transfer
that was cut at any moment goes on where it stopped: blobs that are there are asked for, not sent.

No blob is ever in memory as a whole; manifests are, up to 4 MiB each.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from imagefactory.errors import RegistryError
from imagefactory.oci.layout import (
    INDEX_TYPES,
    MANIFEST_LIMIT,
    MANIFEST_TYPE,
    MANIFEST_TYPES,
    canonical_json,
    digest_of,
    format_descriptor,
    parse_descriptor,
)
from imagefactory.oci.model import Descriptor
from imagefactory.oci.store import DIGEST, REPOSITORY, Store
from imagefactory.progress import Progress, Task

EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
ATTESTATION = "vnd.docker.reference.type"

WORKERS = 4
# Bounds for manifests of strangers: more depth and breadth than images have.
MOST_MANIFESTS = 2000
MOST_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A repository of a store."""

    store: Store
    repository: str

    def __str__(self) -> str:
        return f"{self.store.name}/{self.repository}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest or index and its exact bytes, on which its digest depends."""

    descriptor: Descriptor
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """All that a root names: manifests in the order they must be put, blobs each once.

    `root` is one of `manifests`; referrers, where they were read, come after it.
    """

    root: Manifest
    manifests: tuple[Manifest, ...]
    blobs: tuple[Descriptor, ...]

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A small manifest made here, with the blobs it names, to go along with an image."""

    manifest: Manifest
    blobs: tuple[tuple[Descriptor, bytes], ...]


Origins = Callable[[Descriptor], Iterable[str]]
"""Repositories of the destination that may hold a blob already, the likeliest first."""


def no_origins(_: Descriptor) -> Iterable[str]:
    return ()


WORTH_ASKING = 1 << 20
MOST_REMEMBERED = 50_000


def origins_from(memory: Mapping[str, object], repositories: Sequence[str]) -> Origins:
    """Where a blob was pushed to before, then, for large ones, wherever else it may have come to be.

    `memory` is what `remember` gave. It is only a hint: a registry may have lost the blob since.
    """

    def origins(blob: Descriptor) -> Iterable[str]:
        known = memory.get(blob.digest)
        first = [known] if isinstance(known, str) and REPOSITORY.fullmatch(known) else []
        return (*first, *(r for r in repositories if r not in first and blob.size >= WORTH_ASKING))

    return origins


def remember(memory: Mapping[str, object], repository: str, blobs: Iterable[Descriptor]) -> dict[str, object]:
    """The memory of a registry (digest -> a repository that has it) with `blobs`, bounded in size."""
    fresh = {blob.digest: repository for blob in blobs}
    old = [(digest, where) for digest, where in memory.items() if digest not in fresh]
    return {**dict(old[: max(0, MOST_REMEMBERED - len(fresh))]), **fresh}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What goes where.

    `candidate` is a tag that never moves: it is written first, and it is an error when it exists with
    another digest. `tags` may move. `attach` is put before any tag points to the root.
    """

    graph: Graph
    repository: str
    candidate: str = ""
    tags: tuple[str, ...] = ()
    attach: tuple[Artifact, ...] = ()
    origins: Origins = no_origins
    brake: Brake = field(default_factory=lambda: Brake())
    workers: int = WORKERS


class Brake:
    """Stops a transfer: set by the first failure or by an interruption, felt by all its threads.

    `sleep` is for a store's waits between attempts, which would otherwise outlast the transfer.
    """

    def __init__(self) -> None:
        self._pulled = threading.Event()

    def pull(self) -> None:
        self._pulled.set()

    def release(self) -> None:
        self._pulled.clear()

    def check(self) -> None:
        if self._pulled.is_set():
            raise _StoppedError

    def sleep(self, seconds: float) -> None:
        if self._pulled.wait(seconds):
            raise _StoppedError


class _StoppedError(Exception):
    """A sibling failed: this blob's transfer ends. Never leaves this file."""


class Came(StrEnum):
    """How a blob came to be at the destination."""

    SENT = "sent"
    MOUNTED = "mounted"
    PRESENT = "present"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a transfer did. `digest` and `tags` are what the destination itself said when it was over.

    `tags` pairs each further tag with the digest it points to now: another writer may have moved it
    since. `bytes_sent` counts what blobs cost on the wire, also the parts that had to be sent again.
    """

    repository: str
    candidate: str
    digest: str
    tags: tuple[tuple[str, str], ...]
    bytes_sent: int
    sent: int
    mounted: int
    present: int
    seconds: float


# --- reading -------------------------------------------------------------------------------------


def read_graph(place: Place, wanted: str, *, referrers: bool = False) -> Graph:
    """The root that `wanted` (a tag or digest) names and all below it.

    With `referrers`, also the artifacts whose subject is any manifest of the graph, and theirs.
    Raises RegistryError for what is not there, is no manifest, or nests deeper than images do.
    """
    reader = _Reader(place)
    root = reader.read(wanted, depth=0)
    walk = list(reader.manifests) if referrers else []
    for digest in walk:  # grows while it is walked: referrers have referrers
        for found in place.store.referrers(place.repository, digest):
            if found.digest not in reader.manifests:
                reader.read(found.digest, depth=1)
                walk.append(found.digest)
    return Graph(root=root, manifests=tuple(reader.manifests.values()), blobs=tuple(reader.blobs.values()))


class _Reader:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.manifests: dict[str, Manifest] = {}
        self.blobs: dict[str, Descriptor] = {}

    def read(self, wanted: str, *, depth: int) -> Manifest:
        """Children first: `manifests` is in the order in which they can be put."""
        if wanted in self.manifests:
            return self.manifests[wanted]
        if depth > MOST_DEPTH or len(self.manifests) >= MOST_MANIFESTS:
            raise RegistryError(f"{self.place} {wanted} is no image: its manifests nest without end")
        manifest = read_manifest(self.place, wanted)
        children, blobs = parse_parts(manifest)
        for child in children:
            self.read(child.digest, depth=depth + 1)
        self.blobs.update({blob.digest: blob for blob in blobs})
        self.manifests[manifest.descriptor.digest] = manifest
        return manifest


def read_manifest(place: Place, wanted: str) -> Manifest:
    """The manifest of a tag or digest. Raises RegistryError when there is none."""
    found = place.store.manifest(place.repository, wanted)
    if found is None:
        raise RegistryError(f"{place} has no {wanted}", hint="is the name right, and was it pushed?")
    descriptor, data = found
    if len(data) > MANIFEST_LIMIT:
        raise RegistryError(f"{place} {wanted}: a manifest of {len(data)} bytes is none of an image")
    return Manifest(descriptor=descriptor, data=data)


def parse_parts(manifest: Manifest) -> tuple[tuple[Descriptor, ...], tuple[Descriptor, ...]]:
    """The manifests and the blobs a manifest names. Raises RegistryError for what is malformed."""
    kind, digest = manifest.descriptor.media_type, manifest.descriptor.digest
    try:
        value = json.loads(manifest.data)
        if kind in INDEX_TYPES:
            children, blobs = [parse_descriptor(entry) for entry in value["manifests"]], []
        elif kind in MANIFEST_TYPES:
            children, blobs = [], [parse_descriptor(entry) for entry in (value["config"], *value["layers"])]
        else:
            raise RegistryError(
                f"{digest} is a {kind!r}, which is no image",
                hint="only OCI images, artifacts and docker's schema 2 can be moved",
            )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise RegistryError(f"the manifest {digest} is malformed: {type(error).__name__}: {error}") from error
    for part in (*children, *blobs):
        if not DIGEST.fullmatch(part.digest) or part.size < 0:
            raise RegistryError(
                f"the manifest {digest} names {part.digest[:80]!r}, which is no sha256 digest"
            )
    return tuple(children), tuple(blobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which root to bring for one platform; `whole` is true when that is the very index asked for."""

    digest: str
    whole: bool


def choose_platform(manifest: Manifest, platform: str) -> Choice:
    """What a pull for `platform` (`linux/amd64`) brings of a manifest or index.

    An index whose every image is for the platform is kept, so that its digest stays what it was;
    attestations beside the images do not count. Of an index with other platforms only the platform's
    manifest is brought. Raises RegistryError when there is none.
    """
    if manifest.descriptor.media_type not in INDEX_TYPES:
        return Choice(digest=manifest.descriptor.digest, whole=True)
    parse_parts(manifest)  # well-formed from here on
    entries = json.loads(manifest.data)["manifests"]
    images = [entry for entry in entries if ATTESTATION not in (entry.get("annotations") or {})]
    system, _, architecture = platform.partition("/")
    fitting = [
        entry for entry in images if "platform" not in entry or _platform_of(entry) == (system, architecture)
    ]
    if not fitting:
        raise RegistryError(f"{manifest.descriptor.digest} has no image for {platform}")
    if len(fitting) == len(images) == 1:
        return Choice(digest=manifest.descriptor.digest, whole=True)
    # amd64/v3 and the like need newer processors: the plain one runs everywhere.
    fitting.sort(key=lambda entry: "platform" in entry and bool(entry["platform"].get("variant")))
    return Choice(digest=str(fitting[0]["digest"]), whole=False)


def _platform_of(entry: Mapping[str, Any]) -> tuple[object, object]:
    found = entry["platform"] if isinstance(entry["platform"], Mapping) else {}
    return found.get("os"), found.get("architecture")


# --- artifacts -----------------------------------------------------------------------------------


def make_artifact(kind: str, subject: Descriptor, annotations: dict[str, str]) -> Artifact:
    """A referrer of `subject` that says what it has to say in its annotations alone (image-spec 1.1)."""
    empty = Descriptor(media_type=EMPTY_TYPE, digest=digest_of(EMPTY), size=len(EMPTY))
    data = canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": kind,
            "config": format_descriptor(empty),
            "layers": [format_descriptor(empty)],
            "subject": format_descriptor(subject),
            "annotations": annotations,
        }
    )
    descriptor = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(data), size=len(data))
    return Artifact(manifest=Manifest(descriptor=descriptor, data=data), blobs=((empty, EMPTY),))


# --- sending -------------------------------------------------------------------------------------


def send(source: Place, destination: Store, sending: Sending, progress: Progress) -> Sent:
    """Brings a graph from `source` to a repository of `destination`.

    Raises RegistryError when the candidate tag is there with another digest, when the destination
    fails for good (what was sent stays there and is not sent again), or when it does not confirm at the
    end what was put. Blobs of one transfer are in flight `sending.workers` at a time.
    """
    began = time.monotonic()
    sending.brake.release()
    place, root = Place(store=destination, repository=sending.repository), sending.graph.root.descriptor
    whole = sending.graph.manifests[-1] == sending.graph.root  # else referrers come after it
    if _is_candidate_there(place, sending.candidate, root) and whole and _is_whole(place, sending.graph):
        came, bytes_sent = {blob.digest: Came.PRESENT for blob in sending.graph.blobs}, 0
    else:
        came, bytes_sent = _send_blobs(source, place, sending, progress)
        for artifact in sending.attach:
            bytes_sent += sum(_put_bytes(place, blob, data) for blob, data in artifact.blobs)
        _put_manifests(place, sending)
    counts = list(came.values())
    return Sent(
        repository=sending.repository,
        candidate=sending.candidate,
        digest=root.digest,
        tags=tuple((tag, _move_tag(place, tag, sending.graph.root)) for tag in sending.tags),
        bytes_sent=bytes_sent,
        sent=counts.count(Came.SENT),
        mounted=counts.count(Came.MOUNTED),
        present=counts.count(Came.PRESENT),
        seconds=round(time.monotonic() - began, 3),
    )


def _resolve(place: Place, wanted: str) -> str:
    """The digest the store gives for a tag or digest, empty when it has none."""
    found = place.store.manifest(place.repository, wanted)
    return found[0].digest if found else ""


def _is_candidate_there(place: Place, candidate: str, root: Descriptor) -> bool:
    if not candidate:
        return False
    there = _resolve(place, candidate)
    if there and there != root.digest:
        raise RegistryError(
            f"{place}:{candidate} is there already and is {there}, not {root.digest}",
            hint="a candidate never changes: see who made that one, or push to another registry",
        )
    return bool(there)


def _is_whole(place: Place, graph: Graph) -> bool:
    """Whether all that a candidate names is there: a deletion or a collection may have taken parts."""
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="whole") as pool:
        below = pool.map(lambda one: _resolve(place, one.descriptor.digest), graph.manifests)
        return all(below) and all(pool.map(lambda blob: place.store.has(place.repository, blob), graph.blobs))


def _put_manifests(place: Place, sending: Sending) -> None:
    """Children, what is attached, and the root last, under its tag.

    An artifact may come before its subject (distribution-spec 1.1, "Pushing Manifests with Subject"):
    so a tag that is there has its artifacts too.
    """
    root = sending.graph.root
    below, above = _around_root(sending.graph)
    for manifest in (*below, *(artifact.manifest for artifact in sending.attach)):
        _put(place, manifest)
    _put(place, root, sending.candidate)
    for manifest in above:
        _put(place, manifest)


def _around_root(graph: Graph) -> tuple[tuple[Manifest, ...], tuple[Manifest, ...]]:
    at = graph.manifests.index(graph.root)
    return graph.manifests[:at], graph.manifests[at + 1 :]


def _put(place: Place, manifest: Manifest, tag: str = "") -> None:
    """Raises RegistryError when the store does not confirm, by the tag where there is one, what was put."""
    put = place.store.put_manifest(place.repository, manifest.data, manifest.descriptor.media_type, tag)
    if put.digest != manifest.descriptor.digest:
        raise RegistryError(
            f"{place}: {manifest.descriptor.digest} was put, and {tag or 'it'} is {put.digest}",
            hint="somebody else writes there: look at it before you push again",
        )


def put_artifact(place: Place, artifact: Artifact) -> None:
    """Puts an artifact beside its subject. Raises RegistryError when the store does not confirm it."""
    for blob, data in artifact.blobs:
        _put_bytes(place, blob, data)
    _put(place, artifact.manifest)


def _put_bytes(place: Place, descriptor: Descriptor, data: bytes) -> int:
    if place.store.has(place.repository, descriptor):
        return 0
    return place.store.write(place.repository, descriptor, lambda offset: iter((data[offset:],)))


def _move_tag(place: Place, tag: str, root: Manifest) -> str:
    """Points a tag to the root where it does not yet; gives what it points to in the end."""
    wanted = root.descriptor
    if _resolve(place, tag) == wanted.digest:
        return wanted.digest
    return place.store.put_manifest(place.repository, root.data, wanted.media_type, tag).digest


def _send_blobs(
    source: Place, place: Place, sending: Sending, progress: Progress
) -> tuple[dict[str, Came], int]:
    """All blobs, the largest first, so that none is left alone at the end."""
    came: dict[str, Came] = {}
    bytes_sent = 0
    blobs = sorted(sending.graph.blobs, key=lambda blob: (-blob.size, blob.digest))
    pool = ThreadPoolExecutor(max(1, sending.workers), thread_name_prefix="transfer")
    with progress.task(f"{place.repository}: {len(blobs)} blobs", total=sending.graph.size) as task:
        work = {pool.submit(_Blob(source, sending, blob, task).bring, place.store): blob for blob in blobs}
        try:
            for future in as_completed(work):
                how, cost = future.result()
                came[work[future].digest] = how
                bytes_sent += cost
        except BaseException as error:
            sending.brake.pull()
            # A person who ends it does not wait for a registry that hangs inside a request.
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            if isinstance(error, RegistryError):
                raise _resumable(error) from error
            raise
    pool.shutdown()
    return came, bytes_sent


def _resumable(error: RegistryError) -> RegistryError:
    again = "run the same command again: what was sent is kept, it resumes"
    if not error.hint or "run the same command again" in error.hint:
        return RegistryError(error.message, hint=again)
    return RegistryError(error.message, hint=f"{error.hint}; then {again}")


class _Blob:
    """One blob on its way. `passed` is how far the progress has been told."""

    def __init__(self, source: Place, sending: Sending, blob: Descriptor, task: Task) -> None:
        self.source, self.sending, self.blob, self.task = source, sending, blob, task
        self.passed = 0

    def bring(self, store: Store) -> tuple[Came, int]:
        """How the blob came to be there, and the bytes that were sent for it."""
        came, cost = self._bring(store)
        self._tell(self.blob.size)
        return came, cost

    def _bring(self, store: Store) -> tuple[Came, int]:
        repository, blob, brake = self.sending.repository, self.blob, self.sending.brake
        brake.check()
        origins = [origin for origin in self.sending.origins(blob) if origin != repository]
        if origins and self._is_there(store):
            return Came.PRESENT, 0
        for origin in origins:
            brake.check()
            if self._mount(store, origin):
                return Came.MOUNTED, 0
        cost = store.write(repository, blob, self._read)
        return (Came.SENT if cost else Came.PRESENT), cost

    def _is_there(self, store: Store) -> bool:
        try:
            return store.has(self.sending.repository, self.blob)
        except RegistryError:
            return False  # writing asks again, and knows what to do about an answer that is none

    def _mount(self, store: Store, origin: str) -> bool:
        # Asked first: a mount that is refused leaves an upload session at the registry.
        try:
            return store.has(origin, self.blob) and store.mount(self.sending.repository, self.blob, origin)
        except RegistryError:
            return False  # an origin is only a guess, and may not be ours to read: the blob is written

    def _read(self, offset: int) -> Iterator[bytes]:
        done = offset
        for chunk in self.source.store.read(self.source.repository, self.blob, offset):
            self.sending.brake.check()
            yield chunk
            done += len(chunk)
            self._tell(done)

    def _tell(self, done: int) -> None:
        """A resumed transfer starts lower than the last one came: no byte is told twice."""
        if done > self.passed:
            self.task.advance(done - self.passed)
            self.passed = done
