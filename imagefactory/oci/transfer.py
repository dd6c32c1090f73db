"""Transfer a manifest and its parts from any store to any other: push, pull and copy.

`send` writes blobs first, in parallel, then manifests with children first, then tags. So a reader of the
destination sees nothing or the complete image, and an interrupted transfer resumes: existing blobs are not
sent.

Blobs are streamed, never completely in memory. Manifests are, up to 4 MiB each.
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
from imagefactory.oci.graph import (
    LocalArtifact,
    Manifest,
    ManifestGraph,
    StoreRepository,
    put_bytes,
    put_manifest,
)
from imagefactory.oci.manifests import Descriptor
from imagefactory.oci.store import REBUILD, REPOSITORY, Store
from imagefactory.progress import Progress, ProgressTask

WORKERS = 4
MIN_MOUNT_BYTES = 1 << 20
MOST_REMEMBERED = 50_000
Origins = Callable[[Descriptor], Iterable[str]]
"""A function that returns repositories of the destination that may have a blob, the likeliest first."""


def no_origins(_: Descriptor) -> Iterable[str]:
    return ()


# --- earlier pushes: a hint, as a registry may have lost blobs since ---


def origins_from(
    memory: Mapping[str, object], repositories: Sequence[str], lacks: Collection[str] = ()
) -> Origins:
    """Return the origins of a blob from the `memory` of `remember_transfer`.

    Large blobs and those in `lacks` may be in any of `repositories` too.
    """

    def origins(blob: Descriptor) -> Iterable[str]:
        known, wide = memory.get(blob.digest), blob.size >= MIN_MOUNT_BYTES or blob.digest in lacks
        first = [known] if isinstance(known, str) and REPOSITORY.fullmatch(known) else []
        return (*first, *(r for r in repositories if r not in first and wide))

    return origins


def remember_transfer(
    memory: Mapping[str, object], repository: str, graph: ManifestGraph, inputs: str = ""
) -> dict[str, object]:
    """Return the memory of a registry, updated with the content of `repository`. Its size is bounded.

    It maps the digest of each blob to a repository, and each root of a repository to its `inputs`.
    """
    new = {blob.digest: repository for blob in graph.blobs} | {
        _root_key(repository, graph.root.descriptor.digest): inputs
    }
    old = [(digest, repo) for digest, repo in memory.items() if digest not in new]
    return {**dict(old[: max(0, MOST_REMEMBERED - len(new))]), **new}


def roots_seen_with(memory: Mapping[str, object], repository: str, graph: ManifestGraph) -> str | None:
    """Return the inputs of a root that was completely sent to `repository` before, None for another root."""
    inputs = memory.get(_root_key(repository, graph.root.descriptor.digest))
    return inputs if isinstance(inputs, str) else None


def digests_sent_as(memory: Mapping[str, object], repository: str, inputs: str) -> tuple[str, ...]:
    """Return the digests of the roots with these inputs in `repository`."""
    prefix = _root_key(repository, "")
    return tuple(
        key.removeprefix(prefix)
        for key, value in memory.items()
        if value == inputs and key.startswith(prefix)
    )


def was_transferred(memory: Mapping[str, object], repository: str, digest: str) -> bool:
    """Return whether the root `digest` was completely sent to `repository` before."""
    return _root_key(repository, digest) in memory


def _root_key(repository: str, digest: str) -> str:
    return f"{repository}@{digest}"


# --- sending ---


class CancelToken:
    """Cancels all threads of a transfer, after the first failure or an interruption.

    A store uses `sleep` for its waits between attempts, so that they end with the transfer.
    """

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def pull(self) -> None:
        self._cancelled.set()

    def release(self) -> None:
        self._cancelled.clear()

    def check(self) -> None:
        if self._cancelled.is_set():
            raise _TransferStoppedError

    def sleep(self, seconds: float) -> None:
        if self._cancelled.wait(seconds):
            raise _TransferStoppedError


class _TransferStoppedError(Exception):
    """Another blob failed, so this blob's transfer ends. Used only in this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """A graph and its destination.

    `candidate` is a tag that never moves: it is written first, and must not exist with another digest.
    `tags` may move. `attach` is put before any tag points to the root. `known` is true if all parts were
    sent before: while its manifests exist, its blobs are not queried. `lacks` are digests of blobs that the
    source does not have, so the repository or an origin must have them. With `dry_run` nothing is written.
    """

    graph: ManifestGraph
    repository: str
    candidate: str = ""
    tags: tuple[str, ...] = ()
    attach: tuple[LocalArtifact, ...] = ()
    origins: Origins = no_origins
    known: bool = False
    lacks: Collection[str] = ()
    brake: CancelToken = field(default_factory=CancelToken)
    workers: int = WORKERS
    dry_run: bool = False


class BlobArrival(StrEnum):
    """How a blob arrived at the destination."""

    SENT = "sent"
    MOUNTED = "mounted"
    PRESENT = "present"
    NOWHERE = "nowhere"


class BlobNotFoundError(RegistryError):
    """Blobs of these digests are on neither side of a transfer."""

    def __init__(self, code: str, message: str, *, hint: str, digests: tuple[str, ...]) -> None:
        super().__init__(code, message, hint=hint)
        self.digests = digests


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """The outcome of a transfer. `digest` and `tags` are what the destination reported at the end.

    `tags` pairs each further tag with its digest, as another writer may have moved the tag. `bytes_sent`
    counts the sent bytes of blobs, including parts that had to be sent again. For a dry run these are
    predictions.
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


def send(
    source: StoreRepository, destination: Store, sending: TransferRequest, progress: Progress
) -> TransferResult:
    """Send a graph from `source` to a repository of `destination`, `sending.workers` blobs at a time.

    Raises RegistryError if the candidate tag exists with another digest, if the destination fails (sent
    blobs stay and are not sent again), or if it does not confirm the manifests. Raises BlobNotFoundError,
    before any manifest is put, for blobs that neither side has.
    """
    began = time.monotonic()
    sending.brake.release()
    repo = StoreRepository(store=destination, repository=sending.repository)
    root = sending.graph.root
    if _graph_exists(repo, sending):
        arrivals, bytes_sent = {blob.digest: BlobArrival.PRESENT for blob in sending.graph.blobs}, 0
    else:
        arrivals, bytes_sent = _send_blobs(source, repo, sending, progress)
        if missing := tuple(digest for digest, how in arrivals.items() if how is BlobArrival.NOWHERE):
            raise BlobNotFoundError(
                "blobs-not-found",
                f"{len(missing)} blobs are neither in {repo} nor in {source}",
                hint=REBUILD,
                digests=missing,
            )
        attached = [blob for artifact in sending.attach for blob in artifact.blobs]
        if sending.dry_run:
            bytes_sent += sum(blob.size for blob, _ in attached if not destination.has(repo.repository, blob))
        else:
            bytes_sent += sum(put_bytes(repo, blob, data) for blob, data in attached)
            _put_manifests(repo, sending)
    moved = (
        root.descriptor.digest if sending.dry_run else _move_tag(repo, tag, root) for tag in sending.tags
    )
    counts = list(arrivals.values())
    return TransferResult(
        repository=sending.repository,
        candidate=sending.candidate,
        digest=root.descriptor.digest,
        tags=tuple(zip(sending.tags, moved, strict=True)),
        bytes_sent=bytes_sent,
        sent=counts.count(BlobArrival.SENT),
        mounted=counts.count(BlobArrival.MOUNTED),
        present=counts.count(BlobArrival.PRESENT),
        seconds=round(time.monotonic() - began, 3),
    )


def _resolve(repo: StoreRepository, reference: str) -> str:
    """Return the digest of a tag or digest in the store, empty if there is none."""
    manifest = repo.store.manifest(repo.repository, reference)
    return manifest[0].digest if manifest else ""


def _candidate_exists(repo: StoreRepository, candidate: str, root: Descriptor) -> bool:
    digest = _resolve(repo, candidate) if candidate else ""
    if digest and digest != root.digest:
        raise RegistryError(
            "candidate-conflict",
            f"{repo}:{candidate} exists already and is {digest}, not {root.digest}",
            hint="push to another registry, or delete this tag there: a candidate never changes",
        )
    return bool(digest)


def _graph_exists(repo: StoreRepository, sending: TransferRequest) -> bool:
    """Return whether the candidate and all its parts exist. A deletion may have removed parts.

    For a known graph only its manifests are queried, all at once: a registry deletes them first.
    """
    graph, root = sending.graph, sending.graph.root.descriptor
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="whole") as pool:

        def resolve(manifests: Sequence[Manifest]) -> Iterator[str]:
            return pool.map(lambda manifest: _resolve(repo, manifest.descriptor.digest), manifests)

        below, above = _around_root(graph)
        if sending.known:
            digests = resolve(below)
            return _candidate_exists(repo, sending.candidate, root) and all(digests)
        if not _candidate_exists(repo, sending.candidate, root) or above:
            return False  # referrers follow it
        has = functools.partial(repo.store.has, repo.repository)
        return all(resolve(graph.manifests)) and all(pool.map(has, graph.blobs))


def _put_manifests(repo: StoreRepository, sending: TransferRequest) -> None:
    """Put children, then attached artifacts, then the root under its tag.

    An artifact may be put before its subject (distribution-spec 1.1, "Pushing Manifests with Subject"). So a
    tag never exists without its artifacts.
    """
    below, above = _around_root(sending.graph)
    for manifest in (*below, *(artifact.manifest for artifact in sending.attach)):
        put_manifest(repo, manifest)
    put_manifest(repo, sending.graph.root, sending.candidate)
    for manifest in above:
        put_manifest(repo, manifest)


def _around_root(graph: ManifestGraph) -> tuple[tuple[Manifest, ...], tuple[Manifest, ...]]:
    offset = graph.manifests.index(graph.root)
    return graph.manifests[:offset], graph.manifests[offset + 1 :]


def _move_tag(repo: StoreRepository, tag: str, root: Manifest) -> str:
    """Point a tag to the root, unless it does already. Return its digest in the end."""
    descriptor = root.descriptor
    if _resolve(repo, tag) == descriptor.digest:
        return descriptor.digest
    return repo.store.put_manifest(repo.repository, root.data, descriptor.media_type, tag).digest


def _send_blobs(
    source: StoreRepository, repo: StoreRepository, sending: TransferRequest, progress: Progress
) -> tuple[dict[str, BlobArrival], int]:
    """Send all blobs, the largest first, so that no large one is last."""
    arrivals: dict[str, BlobArrival] = {}
    bytes_sent = 0
    blobs = sorted(sending.graph.blobs, key=lambda blob: (-blob.size, blob.digest))
    pool = ThreadPoolExecutor(max(1, sending.workers), thread_name_prefix="transfer")
    with progress.task(f"{repo.repository}: {len(blobs)} blobs", total=sending.graph.size) as task:
        futures = {
            pool.submit(_BlobTransfer(source, sending, blob, task).run, repo.store): blob for blob in blobs
        }
        try:
            for future in as_completed(futures):
                arrivals[futures[future].digest], cost = future.result()
                bytes_sent += cost
        except BaseException as error:
            sending.brake.pull()
            # After Ctrl-C, do not wait for a registry that hangs inside a request.
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            if isinstance(error, RegistryError):
                error.hint = _resume_hint(error.hint)
            raise
    pool.shutdown()
    return arrivals, bytes_sent


def _resume_hint(hint: str) -> str:
    again = "run the same command again: it resumes after what was sent"
    return again if not hint or "run the same command again" in hint else f"{hint}; then {again}"


class _BlobTransfer:
    """The transfer of one blob."""

    def __init__(
        self, source: StoreRepository, sending: TransferRequest, blob: Descriptor, task: ProgressTask
    ) -> None:
        self.source, self.sending, self.blob, self.task = source, sending, blob, task
        self.reported = 0

    def run(self, store: Store) -> tuple[BlobArrival, int]:
        """Send the blob. Return how it arrived, and the sent bytes."""
        arrival, cost = self._bring(store)
        self._report(self.blob.size)
        return arrival, cost

    def _bring(self, store: Store) -> tuple[BlobArrival, int]:
        repository, blob, brake = self.sending.repository, self.blob, self.sending.brake
        dry_run = self.sending.dry_run
        brake.check()
        origins = [origin for origin in self.sending.origins(blob) if origin != repository]
        lacks = blob.digest in self.sending.lacks
        if (origins or lacks or dry_run) and self._is_present(store):
            return BlobArrival.PRESENT, 0
        for origin in origins:
            brake.check()
            if self._mount(store, origin):
                return BlobArrival.MOUNTED, 0
        if lacks:
            return BlobArrival.NOWHERE, 0
        if dry_run:
            known = self.source.store.has(self.source.repository, blob)
            return (BlobArrival.SENT, blob.size) if known else (BlobArrival.NOWHERE, 0)
        cost = store.write(repository, blob, self._read)
        return (BlobArrival.SENT if cost else BlobArrival.PRESENT), cost

    def _is_present(self, store: Store) -> bool:
        try:
            return store.has(self.sending.repository, self.blob)
        except RegistryError:
            if self.sending.dry_run:
                raise
            return False  # `write` queries again, and handles an invalid response

    def _mount(self, store: Store, origin: str) -> bool:
        # The query comes first: a rejected mount leaves an upload session at the registry.
        try:
            known = store.has(origin, self.blob)
            return known and (self.sending.dry_run or store.mount(self.sending.repository, self.blob, origin))
        except RegistryError:
            return False  # an origin is only a guess, and may not be readable: the blob is written

    def _read(self, offset: int) -> Iterator[bytes]:
        position = offset
        for chunk in self.source.store.read(self.source.repository, self.blob, offset):
            self.sending.brake.check()
            yield chunk
            position += len(chunk)
            self._report(position)

    def _report(self, position: int) -> None:
        """Advance the progress. A resumed transfer starts lower, and no byte is counted twice."""
        if position > self.reported:
            self.task.advance(position - self.reported)
            self.reported = position
