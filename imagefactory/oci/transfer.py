"""Moves what a manifest names from any store to any other: push, pull and copy are this one thing.

`send` brings blobs first, in parallel, then manifests children first, then tags. So a reader of the
destination sees nothing or the whole image, and a transfer that was cut at any moment goes on where it
stopped: blobs that are there are asked for, not sent.

No blob is ever in memory as a whole; manifests are, up to 4 MiB each.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from enum import StrEnum

from imagefactory.errors import RegistryError
from imagefactory.oci.artifacts import put_bytes, put_manifest
from imagefactory.oci.graph import LocalArtifact, Manifest, ManifestGraph, StoreRepository
from imagefactory.oci.manifests import Descriptor
from imagefactory.oci.store import REPOSITORY, Store
from imagefactory.progress import Progress, ProgressTask

WORKERS = 4


Origins = Callable[[Descriptor], Iterable[str]]
"""Repositories of the destination that may hold a blob already, the likeliest first."""


def no_origins(_: Descriptor) -> Iterable[str]:
    return ()


MIN_MOUNT_BYTES = 1 << 20
MOST_REMEMBERED = 50_000


def origins_from(
    memory: Mapping[str, object], repositories: Sequence[str], lacks: Collection[str] = ()
) -> Origins:
    """Where a blob was pushed to before, then wherever else it may be: one that is large, or one of `lacks`.

    `memory` is what `remember` gave. It is only a hint: a registry may have lost the blob since.
    """

    def origins(blob: Descriptor) -> Iterable[str]:
        known, wide = memory.get(blob.digest), blob.size >= MIN_MOUNT_BYTES or blob.digest in lacks
        first = [known] if isinstance(known, str) and REPOSITORY.fullmatch(known) else []
        return (*first, *(r for r in repositories if r not in first and wide))

    return origins


def remember_transfer(
    memory: Mapping[str, object], repository: str, graph: ManifestGraph, told: str = ""
) -> dict[str, object]:
    """The memory of a registry with what `repository` has now, bounded in size.

    It has a repository by the digest of each blob and, by repository and root, what was `told` of it there.
    """
    fresh = {blob.digest: repository for blob in graph.blobs} | {
        _root_key(repository, graph.root.descriptor.digest): told
    }
    old = [(digest, where) for digest, where in memory.items() if digest not in fresh]
    return {**dict(old[: max(0, MOST_REMEMBERED - len(fresh))]), **fresh}


def roots_seen_with(memory: Mapping[str, object], repository: str, graph: ManifestGraph) -> str | None:
    """What `remember` was told of a root that it saw arrive whole in `repository`, None for another."""
    told = memory.get(_root_key(repository, graph.root.descriptor.digest))
    return told if isinstance(told, str) else None


def digests_sent_as(memory: Mapping[str, object], repository: str, told: str) -> tuple[str, ...]:
    """The digests of the roots of which `remember` was told this in `repository`."""
    keys = [key for key, value in memory.items() if value == told and key.startswith(f"{repository}@")]
    return tuple(key.removeprefix(f"{repository}@") for key in keys)


def was_transferred(memory: Mapping[str, object], repository: str, digest: str) -> bool:
    """Whether `remember` saw the root `digest` arrive whole in `repository`."""
    return _root_key(repository, digest) in memory


def _root_key(repository: str, digest: str) -> str:
    return f"{repository}@{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """What goes where.

    `candidate` is a tag that never moves: it is written first, and it is an error when it exists with
    another digest. `tags` may move. `attach` is put before any tag points to the root. `known` says that
    all of it arrived there before: while its manifests are there, nobody asks for each blob again.
    `lacks` are digests of blobs that the source does not have: the repository or an origin must have them.
    """

    graph: ManifestGraph
    repository: str
    candidate: str = ""
    tags: tuple[str, ...] = ()
    attach: tuple[LocalArtifact, ...] = ()
    origins: Origins = no_origins
    known: bool = False
    lacks: Collection[str] = ()
    brake: CancelToken = field(default_factory=lambda: CancelToken())
    workers: int = WORKERS


class CancelToken:
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
            raise _TransferStoppedError

    def sleep(self, seconds: float) -> None:
        if self._pulled.wait(seconds):
            raise _TransferStoppedError


class _TransferStoppedError(Exception):
    """A sibling failed: this blob's transfer ends. Never leaves this file."""


class BlobArrival(StrEnum):
    """How a blob came to be at the destination."""

    SENT = "sent"
    MOUNTED = "mounted"
    PRESENT = "present"
    NOWHERE = "nowhere"


class BlobNotFoundError(RegistryError):
    """Blobs of these digests are on neither side of a transfer."""

    def __init__(self, code: str, message: str, *, digests: tuple[str, ...]) -> None:
        super().__init__(code, message)
        self.digests = digests


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
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


# --- artifacts -----------------------------------------------------------------------------------


# --- sending -------------------------------------------------------------------------------------


def send(
    source: StoreRepository, destination: Store, sending: TransferRequest, progress: Progress
) -> TransferResult:
    """Brings a graph from `source` to a repository of `destination`.

    Raises RegistryError when the candidate tag is there with another digest, when the destination
    fails for good (what was sent stays there and is not sent again), or when it does not confirm at the
    end what was put; BlobNotFoundError, before any manifest is put, for blobs that neither side has. Blobs of
    one transfer are in flight `sending.workers` at a time.
    """
    began = time.monotonic()
    sending.brake.release()
    place, root = (
        StoreRepository(store=destination, repository=sending.repository),
        sending.graph.root.descriptor,
    )
    if _graph_exists(place, sending):
        came, bytes_sent = {blob.digest: BlobArrival.PRESENT for blob in sending.graph.blobs}, 0
    else:
        came, bytes_sent = _send_blobs(source, place, sending, progress)
        if nowhere := tuple(digest for digest, how in came.items() if how is BlobArrival.NOWHERE):
            raise BlobNotFoundError(
                "blobs-not-found",
                f"{place} lacks {len(nowhere)} blobs, and so does {source}",
                digests=nowhere,
            )
        for artifact in sending.attach:
            bytes_sent += sum(put_bytes(place, blob, data) for blob, data in artifact.blobs)
        _put_manifests(place, sending)
    counts = list(came.values())
    return TransferResult(
        repository=sending.repository,
        candidate=sending.candidate,
        digest=root.digest,
        tags=tuple((tag, _move_tag(place, tag, sending.graph.root)) for tag in sending.tags),
        bytes_sent=bytes_sent,
        sent=counts.count(BlobArrival.SENT),
        mounted=counts.count(BlobArrival.MOUNTED),
        present=counts.count(BlobArrival.PRESENT),
        seconds=round(time.monotonic() - began, 3),
    )


def _resolve(place: StoreRepository, wanted: str) -> str:
    """The digest the store gives for a tag or digest, empty when it has none."""
    found = place.store.manifest(place.repository, wanted)
    return found[0].digest if found else ""


def _candidate_exists(place: StoreRepository, candidate: str, root: Descriptor) -> bool:
    if not candidate:
        return False
    there = _resolve(place, candidate)
    if there and there != root.digest:
        raise RegistryError(
            "candidate-conflict",
            f"{place}:{candidate} exists already and is {there}, not {root.digest}",
            hint="find out who pushed it, or push to another registry: a candidate never changes",
        )
    return bool(there)


def _graph_exists(place: StoreRepository, sending: TransferRequest) -> bool:
    """Whether the candidate and all that it names is there: a deletion or a collection may have taken parts.

    What was there before is asked for in one round trip: its manifests, which go first.
    """
    graph, root = sending.graph, sending.graph.root.descriptor
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="whole") as pool:

        def resolve(manifests: Sequence[Manifest]) -> Iterator[str]:
            return pool.map(lambda one: _resolve(place, one.descriptor.digest), manifests)

        if sending.known:
            below = resolve(_around_root(graph)[0])
            return _candidate_exists(place, sending.candidate, root) and all(below)
        if not _candidate_exists(place, sending.candidate, root) or _around_root(graph)[1]:
            return False  # referrers come after it
        has = functools.partial(place.store.has, place.repository)
        return all(resolve(graph.manifests)) and all(pool.map(has, graph.blobs))


def _put_manifests(place: StoreRepository, sending: TransferRequest) -> None:
    """Children, what is attached, and the root last, under its tag.

    An artifact may come before its subject (distribution-spec 1.1, "Pushing Manifests with Subject"):
    so a tag that is there has its artifacts too.
    """
    root = sending.graph.root
    below, above = _around_root(sending.graph)
    for manifest in (*below, *(artifact.manifest for artifact in sending.attach)):
        put_manifest(place, manifest)
    put_manifest(place, root, sending.candidate)
    for manifest in above:
        put_manifest(place, manifest)


def _around_root(graph: ManifestGraph) -> tuple[tuple[Manifest, ...], tuple[Manifest, ...]]:
    at = graph.manifests.index(graph.root)
    return graph.manifests[:at], graph.manifests[at + 1 :]


def _move_tag(place: StoreRepository, tag: str, root: Manifest) -> str:
    """Points a tag to the root where it does not yet; gives what it points to in the end."""
    wanted = root.descriptor
    if _resolve(place, tag) == wanted.digest:
        return wanted.digest
    return place.store.put_manifest(place.repository, root.data, wanted.media_type, tag).digest


def _send_blobs(
    source: StoreRepository, place: StoreRepository, sending: TransferRequest, progress: Progress
) -> tuple[dict[str, BlobArrival], int]:
    """All blobs, the largest first, so that none is left alone at the end."""
    came: dict[str, BlobArrival] = {}
    bytes_sent = 0
    blobs = sorted(sending.graph.blobs, key=lambda blob: (-blob.size, blob.digest))
    pool = ThreadPoolExecutor(max(1, sending.workers), thread_name_prefix="transfer")
    with progress.task(f"{place.repository}: {len(blobs)} blobs", total=sending.graph.size) as task:
        work = {
            pool.submit(_BlobTransfer(source, sending, blob, task).bring, place.store): blob for blob in blobs
        }
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
                error.hint = _resume_hint(error.hint)
            raise
    pool.shutdown()
    return came, bytes_sent


def _resume_hint(hint: str) -> str:
    again = "run the same command again: it resumes after what was sent"
    return again if not hint or "run the same command again" in hint else f"{hint}; then {again}"


class _BlobTransfer:
    """One blob on its way. `passed` is how far the progress has been told."""

    def __init__(
        self, source: StoreRepository, sending: TransferRequest, blob: Descriptor, task: ProgressTask
    ) -> None:
        self.source, self.sending, self.blob, self.task = source, sending, blob, task
        self.passed = 0

    def bring(self, store: Store) -> tuple[BlobArrival, int]:
        """How the blob came to be there, and the bytes that were sent for it."""
        came, cost = self._bring(store)
        self._tell(self.blob.size)
        return came, cost

    def _bring(self, store: Store) -> tuple[BlobArrival, int]:
        repository, blob, brake = self.sending.repository, self.blob, self.sending.brake
        brake.check()
        origins = [origin for origin in self.sending.origins(blob) if origin != repository]
        lacked = blob.digest in self.sending.lacks
        if (origins or lacked) and self._is_there(store):
            return BlobArrival.PRESENT, 0
        for origin in origins:
            brake.check()
            if self._mount(store, origin):
                return BlobArrival.MOUNTED, 0
        if lacked:
            return BlobArrival.NOWHERE, 0
        cost = store.write(repository, blob, self._read)
        return (BlobArrival.SENT if cost else BlobArrival.PRESENT), cost

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
