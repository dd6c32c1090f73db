"""Moving graphs between stores: order, what is sent and what is not, and what happens when it goes wrong."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from imagefactory.errors import RegistryError
from imagefactory.oci.candidates import (
    PUSHED_TYPE,
    VERDICT_TYPE,
    PruneDecision,
    TagTarget,
    check_tag,
    plan_prune,
    pushed_record,
    read_pushed,
    read_tagged,
    remove_candidate,
    tag_type,
)
from imagefactory.oci.graph import (
    EMPTY,
    MOST_DEPTH,
    Manifest,
    ManifestGraph,
    StoreRepository,
    choose_platform,
    make_artifact,
    platforms_in,
    read_graph,
    read_manifest,
)
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_LIMIT,
    MANIFEST_TYPE,
    Descriptor,
    canonical_json,
    digest_of,
    format_descriptor,
)
from imagefactory.oci.store import Source
from imagefactory.oci.transfer import CancelToken, TransferRequest, origins_from, remember_transfer, send
from imagefactory.progress import QuietProgress
from tests.made.errors import fails

LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
QUIET = QuietProgress()
STUCK = 300
"""Seconds after which something that is waited for does not come."""


class Shelf:
    """A store in this process that holds to the protocol, keeps a diary and can be told to fail."""

    def __init__(self, name: str = "shelf") -> None:
        self.label = name
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.documents: dict[tuple[str, str], tuple[Descriptor, bytes]] = {}
        self.pointers: dict[tuple[str, str], str] = {}
        self.diary: list[tuple[str, str]] = []
        self.broken: set[str] = set()
        self.lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.label

    def note(self, what: str, which: str) -> None:
        with self.lock:
            self.diary.append((what, which))

    def did(self, what: str) -> list[str]:
        return [which for verb, which in self.diary if verb == what]

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        self.note("has", f"{repository}@{descriptor.digest}")
        return len(self.blobs.get((repository, descriptor.digest), b"")) == descriptor.size and (
            (repository, descriptor.digest) in self.blobs
        )

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:
        data = self.blobs[repository, descriptor.digest][offset:]
        for at in range(0, len(data), 1000):
            self.note("chunk", descriptor.digest)
            yield data[at : at + 1000]

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
        self.note("ask", descriptor.digest)
        if descriptor.digest in self.broken:
            raise RegistryError(
                "store-broken", f"{self.name} is broken for {descriptor.digest}", hint="repair it"
            )
        if (repository, descriptor.digest) in self.blobs:
            return 0
        data = b"".join(source(0))
        assert digest_of(data) == descriptor.digest
        self.blobs[repository, descriptor.digest] = data
        self.note("write", descriptor.digest)
        return len(data)

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:
        self.note("mount", descriptor.digest)
        self.blobs[repository, descriptor.digest] = self.blobs[origin, descriptor.digest]
        return True

    def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        self.note("manifest", wanted)
        return self.documents.get((repository, self.pointers.get((repository, wanted), wanted)))

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        value = json.loads(data)
        for child in value.get("manifests", []):
            assert (repository, child["digest"]) in self.documents, "a child must be there before"
        for blob in [*value.get("layers", []), *([value["config"]] if "config" in value else [])]:
            assert (repository, blob["digest"]) in self.blobs, "blobs must be there before"
        made = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
        self.documents[repository, made.digest] = (made, data)
        if tag:
            self.pointers[repository, tag] = made.digest
        self.note("put", tag or made.digest)
        return made

    def tags(self, repository: str) -> tuple[str, ...]:
        return tuple(sorted(tag for place, tag in self.pointers if place == repository))

    def untag(self, repository: str, tag: str) -> None:
        self.pointers.pop((repository, tag), None)

    def delete_manifest(self, repository: str, digest: str) -> None:
        self.documents.pop((repository, digest), None)
        gone = [key for key, to in self.pointers.items() if key[0] == repository and to == digest]
        for key in gone:
            del self.pointers[key]

    def referrers(self, repository: str, digest: str, *artifact_types: str) -> tuple[Descriptor, ...]:
        found = []
        for (place, _), (descriptor, data) in self.documents.items():
            value = json.loads(data)
            fits = not artifact_types or value.get("artifactType") in artifact_types
            if place == repository and fits and value.get("subject", {}).get("digest") == digest:
                found.append(descriptor)
        return tuple(found)


def blob(store: Shelf, repository: str, data: bytes, kind: str = LAYER) -> Descriptor:
    made = Descriptor(media_type=kind, digest=digest_of(data), size=len(data))
    store.blobs[repository, made.digest] = data
    return made


def put(store: Shelf, repository: str, value: dict[str, object], tag: str = "") -> Descriptor:
    return store.put_manifest(repository, canonical_json(value), str(value["mediaType"]), tag)


def manifest(store: Shelf, repository: str, layers: list[bytes]) -> Descriptor:
    config = blob(store, repository, canonical_json({"of": [len(layer) for layer in layers]}), CONFIG_TYPE)
    return put(
        store,
        repository,
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": format_descriptor(config),
            "layers": [format_descriptor(blob(store, repository, layer)) for layer in layers],
        },
    )


def image(store: Shelf, repository: str, layers: list[bytes], tag: str = "1") -> Descriptor:
    row = {
        **format_descriptor(manifest(store, repository, layers)),
        "platform": {"os": "linux", "architecture": "amd64"},
    }
    return put(store, repository, {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [row]}, tag)


@pytest.fixture
def source() -> StoreRepository:
    store = Shelf("here")
    image(store, "mine", [b"a" * 5000, b"b" * 20, b"c" * 3000])
    return StoreRepository(store=store, repository="mine")


# --- reading -------------------------------------------------------------------------------------


def test_a_graph_is_children_first_and_every_blob_once(source: StoreRepository) -> None:
    store = source.store
    assert isinstance(store, Shelf)
    two = [
        {**format_descriptor(manifest(store, "mine", [b"same" * 9, text])), "platform": platform(name)}
        for name, text in (("amd64", b"one"), ("arm64", b"three"))
    ]
    put(store, "mine", {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": two}, "both")
    graph = read_graph(source, "both")
    assert [m.descriptor.digest for m in graph.manifests[:-1]] == [row["digest"] for row in two]
    assert graph.manifests[-1] == graph.root
    assert len(graph.blobs) == len({b.digest for b in graph.blobs}) == 5
    assert graph.size == sum(b.size for b in graph.blobs)


def platform(architecture: str) -> dict[str, str]:
    return {"os": "linux", "architecture": architecture}


def test_referrers_and_theirs_come_after_their_subject(source: StoreRepository) -> None:
    store = source.store
    assert isinstance(store, Shelf)
    root = read_graph(source, "1").root.descriptor
    blob(store, "mine", EMPTY, "application/vnd.oci.empty.v1+json")
    verdict = make_artifact("a/verdict", root, {"said": "good"})
    store.put_manifest("mine", verdict.manifest.data, MANIFEST_TYPE)
    signature = make_artifact("a/signature", verdict.manifest.descriptor, {})
    store.put_manifest("mine", signature.manifest.data, MANIFEST_TYPE)
    assert read_graph(source, "1").manifests[-1].descriptor == root
    graph = read_graph(source, "1", referrers=True)
    assert [m.descriptor for m in graph.manifests[-3:]] == [
        root,
        verdict.manifest.descriptor,
        signature.manifest.descriptor,
    ]
    there = Shelf("there")
    sent = send(source, there, TransferRequest(graph=graph, repository="yours", tags=("1",)), QUIET)
    assert sent.digest == root.digest
    assert [d.digest for d in there.referrers("yours", root.digest)] == [verdict.manifest.descriptor.digest]


def test_what_is_not_there_is_said(source: StoreRepository) -> None:
    with fails("manifest-not-found", r"here/mine .*2"):
        read_graph(source, "2")


@pytest.mark.parametrize(
    ("media_type", "data", "code", "named"),
    [
        (MANIFEST_TYPE, b"{", "manifest-invalid", "malformed"),
        (MANIFEST_TYPE, b"[]", "manifest-invalid", "malformed"),
        (MANIFEST_TYPE, b'{"config": {}, "layers": []}', "manifest-invalid", "malformed"),
        (MANIFEST_TYPE, b"[" * 100_000, "manifest-invalid", "malformed"),
        (
            INDEX_TYPE,
            b'{"manifests": [{"mediaType": "x", "digest": "md5:1", "size": 1}]}',
            "manifest-invalid",
            "md5:1",
        ),
        (
            INDEX_TYPE,
            b'{"manifests": [{"mediaType": "x", "digest": "../../etc", "size": 1}]}',
            "manifest-invalid",
            "etc",
        ),
        ("application/vnd.docker.distribution.manifest.v1+json", b"{}", "manifest-unsupported", "v1"),
        (INDEX_TYPE, b" " * (MANIFEST_LIMIT + 1), "manifest-invalid", str(MANIFEST_LIMIT)),
    ],
)
def test_what_is_no_image_is_refused(
    source: StoreRepository, media_type: str, data: bytes, code: str, named: str
) -> None:
    store = source.store
    assert isinstance(store, Shelf)
    made = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
    store.documents["mine", made.digest] = (made, data)
    with fails(code, named):
        read_graph(source, made.digest)


def test_manifests_that_nest_without_end_are_refused(source: StoreRepository) -> None:
    store = source.store
    assert isinstance(store, Shelf)
    inner = image(store, "mine", [b"x"])
    for _ in range(12):
        value = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [format_descriptor(inner)]}
        inner = put(store, "mine", value)
    with fails("manifest-invalid", "nested"):
        read_graph(source, inner.digest)


def test_manifests_nest_as_deep_as_is_allowed(source: StoreRepository) -> None:
    store = source.store
    assert isinstance(store, Shelf)
    tower = [manifest(store, "mine", [b"x"])]
    for _ in range(MOST_DEPTH + 1):
        value = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [format_descriptor(tower[-1])]}
        tower.append(put(store, "mine", value))
    deepest, deeper = tower[MOST_DEPTH:]
    graph = read_graph(source, deepest.digest)
    assert [one.descriptor.digest for one in graph.manifests] == [one.digest for one in tower[:-1]]
    with fails("manifest-invalid", "nested"):
        read_graph(source, deeper.digest)


def index_of(*rows: dict[str, object]) -> Manifest:
    filled = [
        {"mediaType": MANIFEST_TYPE, "digest": digest_of(str(n).encode()), "size": 1, **row}
        for n, row in enumerate(rows)
    ]
    data = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": filled})
    found = Descriptor(media_type=INDEX_TYPE, digest=digest_of(data), size=len(data))
    return Manifest(descriptor=found, data=data)


ATTESTATION_ROW = {
    "platform": {"os": "unknown", "architecture": "unknown"},
    "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
}


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([{"platform": platform("amd64")}], "whole"),
        ([{}], "whole"),
        ([{"platform": platform("amd64")}, ATTESTATION_ROW], "whole"),
        ([{"platform": platform("arm64")}, {"platform": platform("amd64")}], 1),
        ([{"platform": {**platform("amd64"), "variant": "v3"}}, {"platform": platform("amd64")}], 1),
    ],
)
def test_the_platform_is_chosen_and_an_index_kept_where_it_is_complete(
    rows: list[dict[str, object]], chosen: str | int
) -> None:
    index = index_of(*rows)
    choice = choose_platform(index, "linux/amd64")
    if chosen == "whole":
        assert (choice.whole, choice.digest) == (True, index.descriptor.digest)
    else:
        assert (choice.whole, choice.digest) == (False, digest_of(str(chosen).encode()))


def test_an_index_without_the_platform_is_refused() -> None:
    with fails("platform-not-found", r"linux/amd64.*linux/arm64"):
        choose_platform(index_of({"platform": platform("arm64")}), "linux/amd64")


def test_without_a_platform_it_is_the_only_image_and_of_several_that_for_amd64() -> None:
    arm, amd = {"platform": platform("arm64")}, {"platform": platform("amd64")}
    assert choose_platform(index_of(arm), "").whole
    attested = {"platform": {"os": "unknown", "architecture": "unknown"}}  # a copy may lose annotations
    assert choose_platform(index_of(arm, attested), "linux/arm64").whole
    with pytest.raises(RegistryError):
        choose_platform(index_of(arm, attested), "linux/amd64")
    assert choose_platform(index_of(arm, amd), "").digest == digest_of(b"1")
    assert platforms_in(index_of(arm)) == ()
    assert platforms_in(index_of(arm, amd, ATTESTATION_ROW)) == (
        ("linux/arm64", digest_of(b"0")),
        ("linux/amd64", digest_of(b"1")),
    )
    with fails("platform-not-found", "linux/amd64"):
        choose_platform(index_of({"platform": {"os": "linux", "architecture": "s390x"}}), "")


# --- sending -------------------------------------------------------------------------------------


def test_everything_comes_over_and_the_destination_confirms_it(source: StoreRepository) -> None:
    there = Shelf("there")
    graph = read_graph(source, "1")
    sent = send(
        source, there, TransferRequest(graph=graph, repository="yours", candidate="c", tags=("t",)), QUIET
    )
    assert (sent.digest, sent.tags) == (graph.root.descriptor.digest, (("t", graph.root.descriptor.digest),))
    assert (sent.sent, sent.mounted, sent.present) == (4, 0, 0)
    assert sent.bytes_sent == graph.size
    assert read_graph(StoreRepository(store=there, repository="yours"), "c").blobs == graph.blobs
    assert there.did("ask")[0] == max(graph.blobs, key=lambda b: b.size).digest
    assert there.did("put")[-2:] == ["c", "t"]


def test_a_candidate_that_is_there_whole_sends_nothing(source: StoreRepository) -> None:
    there = Shelf("there")
    sending = TransferRequest(graph=read_graph(source, "1"), repository="yours", candidate="c")
    send(source, there, sending, QUIET)
    there.diary.clear()
    again = send(source, there, sending, QUIET)
    assert (again.bytes_sent, again.sent, again.present) == (0, 0, 4)
    assert {what for what, _ in there.diary} == {"manifest", "has"}
    assert len(there.did("has")) == 4


@pytest.mark.parametrize("lost", ["manifest", "blob"])
def test_a_candidate_that_lost_a_part_gets_it_again(source: StoreRepository, lost: str) -> None:
    there = Shelf("there")
    sending = TransferRequest(graph=read_graph(source, "1"), repository="yours", candidate="c")
    send(source, there, sending, QUIET)
    if lost == "manifest":
        there.delete_manifest("yours", sending.graph.manifests[0].descriptor.digest)
    else:
        del there.blobs["yours", sending.graph.blobs[1].digest]
    again = send(source, there, sending, QUIET)
    assert (again.sent, again.present) == ((0, 4) if lost == "manifest" else (1, 3))
    assert read_graph(StoreRepository(store=there, repository="yours"), "c") == sending.graph


def test_a_candidate_with_another_digest_is_never_overwritten(source: StoreRepository) -> None:
    there = Shelf("there")
    other = image(there, "yours", [b"other"], tag="c")
    with fails("candidate-conflict") as caught:
        send(
            source,
            there,
            TransferRequest(graph=read_graph(source, "1"), repository="yours", candidate="c"),
            QUIET,
        )
    assert other.digest in caught.value.message
    assert there.pointers["yours", "c"] == other.digest
    assert not there.did("write")


def test_what_the_destination_does_not_confirm_is_an_error(source: StoreRepository) -> None:
    class Contested(Shelf):
        def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
            super().put_manifest(repository, data, media_type, tag)
            return other

    there = Contested("there")
    other = Descriptor(media_type=INDEX_TYPE, digest=digest_of(b"other"), size=5)
    sending = TransferRequest(graph=read_graph(source, "1"), repository="yours", candidate="c")
    with fails("push-overwritten", f"{other.digest}$"):
        send(source, there, sending, QUIET)


def test_what_arrived_before_is_asked_for_in_one_round_trip(source: StoreRepository) -> None:
    """All questions are out before the first answer comes, and no blob is asked for."""
    asked = threading.Barrier(2)

    class Slow(Shelf):
        def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
            asked.wait(STUCK)
            return super().manifest(repository, wanted)

    there, graph = Shelf("there"), read_graph(source, "1")
    sending = TransferRequest(graph=graph, repository="r", candidate="c")
    send(source, there, sending, QUIET)
    slow = Slow("there")
    slow.documents, slow.pointers = there.documents, there.pointers
    again = send(source, slow, replace(sending, known=True), QUIET)
    assert (again.sent, again.present) == (0, len(graph.blobs))
    assert sorted(slow.did("manifest")) == sorted(("c", graph.manifests[0].descriptor.digest))
    assert {word for word, _ in slow.diary} == {"manifest"}


def test_a_further_tag_that_another_writer_moved_is_reported(source: StoreRepository) -> None:
    class Contested(Shelf):
        def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
            made = super().put_manifest(repository, data, media_type, tag)
            return other if tag == "t" else made

    there = Contested("there")
    other = image(there, "yours", [b"other"], tag="o")
    sending = TransferRequest(graph=read_graph(source, "1"), repository="yours", candidate="c", tags=("t",))
    assert send(source, there, sending, QUIET).tags == (("t", other.digest),)


def test_what_another_repository_has_is_mounted(source: StoreRepository) -> None:
    there = Shelf("there")
    graph = read_graph(source, "1")
    first = send(source, there, TransferRequest(graph=graph, repository="first", candidate="c"), QUIET)
    origins = origins_from(remember_transfer({}, "first", graph), ())
    sending = TransferRequest(graph=graph, repository="second", candidate="c", origins=origins)
    second = send(source, there, sending, QUIET)
    assert (second.mounted, second.sent, second.bytes_sent) == (first.sent, 0, 0)


def test_a_wrong_memory_costs_nothing_but_a_question(source: StoreRepository) -> None:
    there = Shelf("there")
    graph = read_graph(source, "1")
    memory = {**remember_transfer({}, "gone", graph), "sha256:x": 7}
    sending = TransferRequest(graph=graph, repository="r", candidate="c", origins=origins_from(memory, ()))
    assert send(source, there, sending, QUIET).sent == 4
    assert not there.did("mount")


def test_only_large_blobs_are_looked_for_elsewhere() -> None:
    small, large = (
        Descriptor(media_type=LAYER, digest=digest_of(bytes(n)), size=n) for n in (1000, 2_000_000)
    )
    origins = origins_from({small.digest: "a", large.digest: "b"}, ("b", "c"))
    assert (tuple(origins(small)), tuple(origins(large))) == (("a",), ("b", "c"))


def test_one_failed_blob_ends_the_others_and_keeps_what_was_sent() -> None:
    """The first one is sent, the next one fails then, and all others wait for that in their middle."""
    layers = [bytes([n]) * 200_000 for n in range(6)]
    first, broken, *_ = sorted(map(digest_of, layers))  # in the order in which they are begun
    kept, stopped = threading.Event(), threading.Event()

    class Here(Shelf):
        def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:
            for number, chunk in enumerate(super().read(repository, descriptor, offset)):
                assert number != 10 or descriptor.digest == first or stopped.wait(STUCK)
                yield chunk

    class There(Shelf):
        def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
            assert descriptor.digest != broken or kept.wait(STUCK)
            cost = super().write(repository, descriptor, source)
            if descriptor.digest == first:
                kept.set()
            return cost

    class Told(CancelToken):
        def pull(self) -> None:
            super().pull()
            stopped.set()

    here, there = Here("here"), There("there")
    image(here, "mine", layers)
    there.broken = {broken}
    source = StoreRepository(store=here, repository="mine")
    sending = TransferRequest(graph=read_graph(source, "1"), repository="yours", candidate="c", brake=Told())
    with fails("store-broken") as caught:
        send(source, there, sending, QUIET)
    assert "repair it" in caught.value.hint
    assert "resumes" in caught.value.hint
    read = Counter(here.did("chunk"))
    assert all(read[digest_of(layer)] <= 11 for layer in layers if digest_of(layer) != first)
    assert there.did("write") == [first]
    assert there.tags("yours") == ()
    there.broken = set()
    sent = send(source, there, sending, QUIET)
    assert (sent.sent, sent.present) == (6, 1)


def test_the_record_is_there_before_the_tag(source: StoreRepository) -> None:
    there = Shelf("there")
    graph = read_graph(source, "1")
    record = pushed_record(graph.root.descriptor, datetime(2026, 1, 2, tzinfo=UTC))
    send(source, there, TransferRequest(graph=graph, repository="r", candidate="c", attach=(record,)), QUIET)
    puts = there.did("put")
    assert puts.index(record.manifest.descriptor.digest) < puts.index("c")
    assert [d.digest for d in there.referrers("r", graph.root.descriptor.digest, PUSHED_TYPE)] == [
        record.manifest.descriptor.digest
    ]


def test_progress_tells_every_byte_once(source: StoreRepository) -> None:
    class Restless(Shelf):
        def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
            next(source(0))  # lost, and begun again
            return super().write(repository, descriptor, source)

    class Counting(QuietProgress):
        done = 0

        def advance(self, amount: int) -> None:
            self.done += amount

        def expect(self, total: int) -> None:
            raise AssertionError

        def task(self, title: str, *, total: int = 0, unit: str = "bytes"):  # type: ignore[no-untyped-def]
            from contextlib import nullcontext

            self.total = total
            return nullcontext(self)

    counting = Counting()
    graph = read_graph(source, "1")
    send(
        source,
        Restless("there"),
        TransferRequest(graph=graph, repository="r", candidate="c", workers=1),
        counting,
    )
    assert counting.done == counting.total == graph.size


# --- candidates ----------------------------------------------------------------------------------

PLAIN = {"2.3-cu121", "2.3-cu121-py313"}


@pytest.mark.parametrize(
    ("tag", "kind"),
    [
        ("2.3-cu121", "target"),
        ("2.3-cu121-py313", "target"),
        ("2.3-cu121-sm80", "capability"),
        ("2.3-cu121-sm90a", "capability"),
        ("2.3-cu121-0123456789ab", "candidate"),
        ("2.3-cu121-0123456789ab.sif", "candidate"),
        ("9.9-cu121-0123456789ab", "other"),
        ("sha256-" + "0" * 64, "referrers"),
        ("nightly", "other"),
    ],
)
def test_tags_have_kinds_and_push_may_set_only_others(tag: str, kind: str) -> None:
    assert tag_type(tag, PLAIN) == kind
    if kind == "other":
        check_tag(tag, PLAIN)
    else:
        with fails("tag-reserved", tag):
            check_tag(tag, PLAIN)


@pytest.mark.parametrize("tag", ["", "-x", "a b", "a/b", "x" * 129, "ok\n"])
def test_what_cannot_be_a_tag_is_refused(tag: str) -> None:
    with fails("option-invalid"):
        check_tag(tag, PLAIN)


NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
OLD, NEW = NOW - timedelta(days=40), NOW - timedelta(days=2)
BEFORE = NOW - timedelta(days=30)


def candidate(number: int, **more: object) -> TagTarget:
    digest = digest_of(str(number).encode())
    name = digest[7:19]
    base: dict[str, object] = {
        "tag": f"2.3-cu121-{name}",
        "kind": "candidate",
        "digest": digest,
        "parts": (digest_of(f"part {number}".encode()),),
        "names": (name,),
        "size": 1,
        "pushed": OLD,
    }
    return TagTarget(**{**base, **more})  # type: ignore[arg-type]


def pointer(to: TagTarget, *, kind: str = "target", **more: object) -> TagTarget:
    base: dict[str, object] = {"tag": "2.3-cu121", "kind": kind, "digest": to.digest, "parts": to.parts}
    return TagTarget(**{**base, "names": to.names, "size": 1, **more})  # type: ignore[arg-type]


def fate(one: TagTarget, *others: TagTarget) -> tuple[bool, str]:
    found = next(f for f in plan_prune((one, *others), BEFORE) if f.candidate == one)
    return found.remove, found.why


def test_an_old_candidate_that_nothing_needs_goes() -> None:
    assert fate(candidate(1), candidate(2)) == (True, "pushed 2026-10-12 12:00 UTC")


@pytest.mark.parametrize(
    ("one", "others", "why"),
    [
        (candidate(1, pushed=NEW), (), "pushed 2026-11-19"),
        (candidate(1, pushed=None), (), "is unknown"),
        (candidate(1, verdicts=1), (), "verdict"),
        (candidate(1), (pointer(candidate(1)),), "2.3-cu121 points to it"),
        (candidate(1), (pointer(candidate(1), kind="other", tag="nightly"),), "nightly points to it"),
        (candidate(1), (pointer(candidate(1), digest=candidate(1).parts[0], parts=()),), "points to it"),
        (candidate(1), (pointer(candidate(1), digest=digest_of(b"another index")),), "points to it"),
        (candidate(1, tag="2.3-cu121-0123456789ab"), (), "another program"),
    ],
)
def test_a_candidate_is_kept_and_it_is_said_why(
    one: TagTarget, others: tuple[TagTarget, ...], why: str
) -> None:
    remove, said = fate(one, *others)
    assert not remove
    assert why in said


def test_only_candidates_are_ever_removed() -> None:
    everything = (candidate(1), pointer(candidate(3)), pointer(candidate(4), kind="other", tag="x"))
    assert [f.candidate.kind for f in plan_prune(everything, BEFORE)] == ["candidate"]


def test_the_latest_record_counts_and_nonsense_does_not() -> None:
    created = "org.opencontainers.image.created"
    rows = [{created: "2026-01-02T03:04:05Z"}, {created: "soon"}, {}, {created: "2026-02-01T00:00:00"}]
    assert read_pushed(rows) == datetime(2026, 2, 1, tzinfo=UTC)
    assert read_pushed([{created: "soon"}]) is None


def test_a_candidate_is_read_with_its_record_and_its_verdicts(source: StoreRepository) -> None:
    there = Shelf("there")
    graph = read_graph(source, "1")
    digest = graph.root.descriptor.digest
    record = pushed_record(graph.root.descriptor, OLD)
    tag = f"2.3-cu121-{digest[7:19]}"
    sending = TransferRequest(graph=graph, repository="r", candidate=tag, tags=("x",), attach=(record,))
    send(source, there, sending, QUIET)
    place = StoreRepository(store=there, repository="r")
    one, other = read_tagged(place, PLAIN, records=True)
    assert (one.tag, one.kind, one.pushed, one.verdicts) == (tag, "candidate", OLD, 0)
    assert (other.tag, other.kind, other.digest) == ("x", "other", digest)
    assert plan_prune((one,), BEFORE)[0].remove
    verdict = make_artifact(VERDICT_TYPE, graph.manifests[0].descriptor, {})
    there.put_manifest("r", verdict.manifest.data, MANIFEST_TYPE)
    (one, _) = read_tagged(place, PLAIN, records=True)
    assert one.verdicts == 1
    assert plan_prune((one,), BEFORE)[0].why == "it has a verdict"


def test_a_tag_whose_platform_was_deleted_is_read_and_may_go() -> None:
    there = Shelf("there")
    rows = [manifest(there, "r", [b"shared", text]) for text in (b"one", b"three")]
    entries = [format_descriptor(row) for row in rows]
    root = put(there, "r", {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}, "x")
    name = f"2.3-cu121-{root.digest[7:19]}"
    there.pointers["r", name] = there.pointers.pop(("r", "x"))
    record = pushed_record(root, OLD)
    blob(there, "r", EMPTY)
    there.put_manifest("r", record.manifest.data, MANIFEST_TYPE)
    image(there, "r", [b"whole"], "nightly")
    place = StoreRepository(store=there, repository="r")
    whole = read_tagged(place, PLAIN, records=True)
    there.delete_manifest("r", rows[0].digest)

    broken, other = read_tagged(place, PLAIN, records=True)
    assert (broken.tag, broken.kind, broken.pushed) == (name, "candidate", OLD)
    assert broken.parts == tuple(row.digest for row in rows)
    left = json.loads(there.documents["r", rows[1].digest][1])
    assert broken.size == sum(part["size"] for part in (left["config"], *left["layers"])) < whole[0].size
    assert other == whole[1]
    (gone,) = plan_prune((broken, other), BEFORE)
    assert gone.remove
    assert remove_candidate(there, "r", gone) == ""
    assert there.tags("r") == ("nightly",)
    read_graph(place, "nightly")
    assert rows[1].digest not in {digest for _, digest in there.documents}


def test_a_registry_that_refuses_a_part_is_not_one_that_lacks_it(source: StoreRepository) -> None:
    class Refusing(Shelf):
        def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
            if wanted == child:
                raise RegistryError("registry-access-denied", "403")
            return super().manifest(repository, wanted)

    there = Refusing("there")
    graph = read_graph(source, "1")
    child = ""
    send(source, there, TransferRequest(graph=graph, repository="r", tags=("x",)), QUIET)
    child = graph.manifests[0].descriptor.digest
    with fails("registry-access-denied", "403"):
        read_tagged(StoreRepository(store=there, repository="r"), PLAIN)


def test_indexes_that_share_their_parts_are_read_once(source: StoreRepository) -> None:
    store = source.store
    assert isinstance(store, Shelf)
    inner = [format_descriptor(image(store, "mine", [b"x"]))] * 2
    for _ in range(40):
        value = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": inner}
        inner = [format_descriptor(put(store, "mine", value, "1"))] * 2
    store.diary.clear()
    (one,) = read_tagged(source, PLAIN)
    assert len(one.parts) == 41
    assert len(store.did("manifest")) == 42


def test_a_candidate_may_be_named_after_what_docker_keeps() -> None:
    """docker compresses anew: only the config is what it was. A .sif is named after its file."""
    there = Shelf("there")
    row = manifest(there, "r", [b"layer"])
    config = json.loads(there.documents["r", row.digest][1])["config"]["digest"]
    sif_file = blob(there, "r", b"squashed", "application/vnd.sylabs.sif.layer.v1.sif")
    sif_config = blob(there, "r", b"{}", "application/vnd.sylabs.sif.config.v1+json")
    parts = {"config": format_descriptor(sif_config), "layers": [format_descriptor(sif_file)]}
    sif = put(there, "r", {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, **parts})
    tags = {
        f"2.3-cu121-{config[7:19]}": row,
        f"2.3-cu121-{digest_of(b'layer')[7:19]}": row,
        f"2.3-cu121-{sif_file.digest[7:19]}.sif": sif,
        f"2.3-cu121-{sif_config.digest[7:19]}.sif": sif,
    }
    for tag, to in tags.items():
        there.pointers = {("r", tag): to.digest}
        blob(there, "r", EMPTY)
        there.put_manifest("r", pushed_record(to, OLD).manifest.data, MANIFEST_TYPE)
        (fate_,) = plan_prune(
            read_tagged(StoreRepository(store=there, repository="r"), PLAIN, records=True), BEFORE
        )
        ours = tag in (*list(tags)[:1], list(tags)[2])
        assert (fate_.remove, "another program" in fate_.why) == (ours, not ours)
    there.pointers = {("r", "x"): image(there, "r", [b"layer"]).digest}
    (one,) = read_tagged(StoreRepository(store=there, repository="r"), PLAIN)
    assert one.names == (one.digest[7:19], row.digest[7:19], config[7:19])


def test_a_removed_candidate_takes_its_record_and_what_only_it_had() -> None:
    here, there = Shelf("here"), Shelf("there")
    for tag, layers in (("1", [b"shared", b"one"]), ("2", [b"shared", b"two"])):
        image(here, "mine", layers, tag)
    source = StoreRepository(store=here, repository="mine")
    digests = []
    for tag in ("1", "2"):
        graph = read_graph(source, tag)
        digests.append(graph.root.descriptor.digest)
        record = pushed_record(graph.root.descriptor, OLD)
        name = f"2.3-cu121-{digests[-1][7:19]}"
        more = ("2.3-cu121",) if tag == "2" else ()
        sending = TransferRequest(graph=graph, repository="r", candidate=name, tags=more, attach=(record,))
        send(source, there, sending, QUIET)
    place = StoreRepository(store=there, repository="r")
    before = set(there.documents)
    fates = plan_prune(read_tagged(place, PLAIN, records=True), BEFORE)
    (gone,) = [fate for fate in fates if fate.remove]
    assert gone.candidate.digest == digests[0]
    assert remove_candidate(there, "r", gone) == ""
    assert len(before - set(there.documents)) == 3  # the index, its manifest, the record of its push
    assert there.tags("r") == tuple(sorted(("2.3-cu121", f"2.3-cu121-{digests[1][7:19]}")))
    read_graph(place, "2.3-cu121")


def test_a_tag_set_since_the_plan_keeps_the_candidate() -> None:
    there = Shelf("there")
    root = image(there, "r", [b"x"], "c")
    place = StoreRepository(store=there, repository="r")
    there.pointers["r", name := f"2.3-cu121-{root.digest[7:19]}"] = root.digest
    there.untag("r", "c")
    (one,) = read_tagged(place, PLAIN)
    there.pointers["r", "nightly"] = root.digest
    fate_ = PruneDecision(candidate=one, remove=True, why="")
    assert remove_candidate(there, "r", fate_) == "nightly"
    assert there.tags("r") == (name, "nightly")


def test_a_part_that_another_tag_needs_stays() -> None:
    shared = digest_of(b"shared part")
    one, two = candidate(1, parts=(shared,)), candidate(2, parts=(shared,), pushed=NEW)
    (gone,) = [f for f in plan_prune((one, two), BEFORE) if f.remove]
    assert (gone.candidate, gone.parts) == (one, ())


def test_reading_a_manifest_needs_one_question(source: StoreRepository) -> None:
    assert isinstance(source.store, Shelf)
    source.store.diary.clear()
    found = read_manifest(source, "1")
    assert source.store.diary == [("manifest", "1")]
    assert isinstance(ManifestGraph(root=found, manifests=(found,), blobs=()).size, int)


def test_an_artifact_is_a_manifest_that_points_to_its_subject() -> None:
    """As the image specification 1.1 has it ("Guidelines for Artifact Usage"), by its own digests."""
    subject = Descriptor(media_type=MANIFEST_TYPE, digest="sha256:" + "a" * 64, size=7)
    made = make_artifact("application/vnd.example.word", subject, {"b": "2", "a": "1"})
    empty = {
        "mediaType": "application/vnd.oci.empty.v1+json",
        "digest": "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "size": 2,
    }
    assert json.loads(made.manifest.data) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": "application/vnd.example.word",
        "config": empty,
        "layers": [empty],
        "subject": {"mediaType": MANIFEST_TYPE, "digest": subject.digest, "size": 7},
        "annotations": {"a": "1", "b": "2"},
    }
    ((stored, data),) = made.blobs
    assert (stored.digest, data) == (empty["digest"], b"{}")
