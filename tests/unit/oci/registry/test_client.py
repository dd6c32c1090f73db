"""The registry client against everything that can go wrong, one fault at a time and in storms."""

from __future__ import annotations

import json
import logging
import random
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import product
from pathlib import Path
from random import Random
from urllib.parse import urljoin

import pytest

from imagefactory.errors import EXIT_REGISTRY, RegistryError, UsageError
from imagefactory.http import RetryPolicy
from imagefactory.oci.credentials import Credential, anonymous
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_TYPE, Descriptor, canonical_json, digest_of
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions, parse_challenge
from tests.made.errors import fails
from tests.made.registry import (
    PASSWORD,
    USER,
    Asked,
    RegistryMadeHere,
    Ways,
    registry_made_here,
    sha256,
)
from tests.made.service import make_certificate
from tests.made.store_contract import artifact, blob, image_manifest, noise, put_blob, source
from tests.services.tier import many

QUICK = RetryPolicy(first_wait=0.0005, longest_wait=0.01, connect=60, read=60, commit=60)
LARGE = noise(2_500_000, seed=1)
KNOWN = Credential(user=USER, secret=PASSWORD, origin="the test")


class Script:
    """Faults for requests of a kind, in order: `{"PUT upload": ["503", "reset-after"]}`. "" is no fault."""

    def __init__(self, faults: dict[str, list[str]] | None = None) -> None:
        self.faults = {kind: list(rows) for kind, rows in (faults or {}).items()}

    def __call__(self, asked: Asked) -> str | None:
        rows = self.faults.get(str(asked))
        return rows.pop(0) if rows else None


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[RegistryMadeHere]:
    with registry_made_here(getattr(request, "param", None)) as made:
        yield made


def client(server: RegistryMadeHere, retry_policy: RetryPolicy = QUICK, **more: object) -> RegistryClient:
    options = {"credentials": lambda host: KNOWN, "retry_policy": retry_policy, "random": Random(1)} | more
    return RegistryClient(server.host, RegistryOptions(**options))  # type: ignore[arg-type]


def push(registry: RegistryClient, seed: int = 0) -> dict[str, bytes]:
    """A small image with a large layer, and something that refers to it; gives its blobs and manifests."""
    large, small = LARGE[: 1_500_000 + seed], f"small {seed}".encode()
    manifest = image_manifest(registry, "a/b", large, small)
    row = registry.put_manifest("a/b", manifest, MANIFEST_TYPE, "1.0")
    note = artifact(registry, "a/b", row, "application/vnd.note", f"note {seed}")
    registry.put_manifest("a/b", note, MANIFEST_TYPE)
    return {"large": large, "small": small, "manifest": manifest, "note": note}


def check(server: RegistryMadeHere, pushed: dict[str, bytes]) -> None:
    """By looking into the registry itself, not by asking it."""
    repository = server.shelves.repositories["a/b"]
    for name in ("large", "small"):
        assert server.shelves.blobs[sha256(pushed[name])] == pushed[name]
        assert sha256(pushed[name]) in repository.blobs
    assert repository.tags["1.0"] == digest_of(pushed["manifest"])
    for name in ("manifest", "note"):
        assert repository.manifests[digest_of(pushed[name])] == (MANIFEST_TYPE, pushed[name])
    if not server.ways.referrers:
        index = repository.tags[digest_of(pushed["manifest"]).replace(":", "-")]
        rows = json.loads(repository.manifests[index][1])["manifests"]
        assert digest_of(pushed["note"]) in {row["digest"] for row in rows}


# --- faults that pass ----------------------------------------------------------------------------

REQUESTS = ("HEAD blob", "POST upload", "PATCH upload", "PUT upload", "PUT manifest", "GET manifest")
PASSING = (
    *("429:0", "503", "401", "reset", "reset-after", "lose"),
    *("drop:0", "drop:1", "drop:2", "drop:700000", "cut", "wrong"),
)
BUSY = ("408", "429", "500", "502", "504", "507")  # to the client the same as 503, whatever was asked


@pytest.mark.parametrize(
    ("kind", "fault"),
    [*product(REQUESTS, PASSING), *product(many(REQUESTS[-2:], REQUESTS), BUSY)],
)
@pytest.mark.parametrize("server", [Ways(auth="token", referrers=False)], indirect=True)
def test_a_push_bears_each_fault_at_each_request(server: RegistryMadeHere, kind: str, fault: str) -> None:
    server.fault = Script({kind: [fault, fault]})
    pushed = push(client(server))
    assert server.fault.faults[kind] != [fault, fault]
    check(server, pushed)
    assert all(sha256(data) == digest for digest, data in server.shelves.blobs.items())


@pytest.mark.parametrize("fault", ["429", "500", "503", "reset", "reset-after", "cut", "wrong"])
@pytest.mark.parametrize("kind", ["GET token", "GET referrers", "GET tags", "GET blob"])
@pytest.mark.parametrize("server", [Ways(auth="token")], indirect=True)
def test_what_is_asked_bears_each_fault(server: RegistryMadeHere, kind: str, fault: str) -> None:
    pushed = push(client(server))
    server.fault = Script({kind: [fault, fault]})
    registry = client(server)
    row = digest_of(pushed["manifest"])
    assert [found.digest for found in registry.referrers("a/b", row)] == [digest_of(pushed["note"])]
    assert registry.tags("a/b") == ("1.0",)
    assert b"".join(registry.read("a/b", blob(pushed["small"]))) == pushed["small"]
    assert not any(server.fault.faults.values())


PUSHES = many(10, 120)


class Storm:
    """Faults by dice, as many as are `left`: which of the requests are hit is the seed's, by their number."""

    def __init__(self, seed: int, *, left: int, rate: float) -> None:
        self.dice, self.left, self.rate = random.Random(seed), left, rate

    def __call__(self, asked: Asked) -> str | None:
        if not self.left or self.dice.random() >= self.rate:
            return None
        self.left -= 1
        return self.dice.choice([fault for fault in PASSING + BUSY if fault != "401"])


def test_a_storm_of_fewer_faults_than_attempts_ends_right(server: RegistryMadeHere) -> None:
    """Seeded pushes with up to 5 faults each, wherever they come. A fault is one failure at most."""
    most, injected = 5, 0
    for seed in range(PUSHES):
        server.fault = storm = Storm(seed, left=most, rate=0.3)
        check(server, push(client(server), seed))
        injected += most - storm.left
    assert all(sha256(data) == digest for digest, data in server.shelves.blobs.items())
    assert injected > 3 * PUSHES  # nearly five come in the first 20 requests of each push, and none has fewer


def test_a_storm_without_end_ends_right_or_is_said(server: RegistryMadeHere) -> None:
    for seed in range(PUSHES // 3):
        server.fault = Storm(seed, left=1_000_000, rate=0.5)
        try:
            check(server, push(client(server), seed))
        except RegistryError as error:
            assert error.exit_code == EXIT_REGISTRY  # noqa: PT017
    assert all(sha256(data) == digest for digest, data in server.shelves.blobs.items())


# --- faults that stay ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["400", "403", "405", "413", "501"])
@pytest.mark.parametrize("kind", ["HEAD blob", "POST upload", "PUT upload"])
def test_what_is_refused_is_asked_once(server: RegistryMadeHere, kind: str, status: str) -> None:
    server.fault = lambda asked: status if str(asked) == kind else None
    with pytest.raises(RegistryError, match=status) as caught:
        put_blob(client(server), "a/b", b"small")
    denied = status == "403"
    assert caught.value.code == ("registry-access-denied" if denied else "registry-request-failed")
    assert server.count[kind] == 1
    assert caught.value.exit_code == EXIT_REGISTRY
    assert server.shelves.blobs == {}
    assert server.shelves.uploads == {}  # the registry was told that nothing more comes


@pytest.mark.parametrize(
    ("put", "post", "begun"), [("", "", 0), ("405", "", 1), ("403", "", None), ("405", "403", None)]
)
def test_who_may_push_is_asked_without_a_trace(
    server: RegistryMadeHere, put: str, post: str, begun: int | None
) -> None:
    """Where the answer to the end of no upload does not tell, one is begun and ended."""
    server.fault = Script({"PUT upload": [put], "POST upload": [post]})
    if begun is None:
        with pytest.raises(RegistryError):
            client(server).check_push("a/b")
    else:
        client(server).check_push("a/b")
        assert (server.count["POST upload"], server.count["DELETE upload"]) == (begun, begun)
    assert not server.shelves.uploads
    assert not server.shelves.blobs


def test_a_fault_that_stays_is_given_up(server: RegistryMadeHere) -> None:
    server.fault = lambda asked: "503" if asked.kind == "manifest" else None
    slept: list[float] = []
    registry = client(server, RetryPolicy(attempts=4, first_wait=1.0, longest_wait=3.0), sleep=slept.append)
    with fails("registry-unavailable", r"a/b: .*1\.0: 503 UNAVAILABLE") as caught:
        registry.manifest("a/b", "1.0")
    assert server.count["GET manifest"] == 4
    assert "again" in caught.value.hint
    for wait, longest in zip(slept, (1.0, 2.0, 3.0), strict=True):
        assert longest / 2 <= wait <= longest


@pytest.mark.parametrize("kind", ["HEAD blob", "GET referrers", "GET tags", "GET blob", "POST upload"])
def test_every_request_is_given_up_after_as_many_attempts(server: RegistryMadeHere, kind: str) -> None:
    server.fault = lambda asked: "503" if str(asked) == kind else None
    registry, large = client(server, RetryPolicy(attempts=3, first_wait=0.001)), blob(LARGE)
    calls = {
        "HEAD blob": lambda: registry.has("a/b", large),
        "GET referrers": lambda: registry.referrers("a/b", large.digest),
        "GET tags": lambda: registry.tags("a/b"),
        "GET blob": lambda: list(registry.read("a/b", large)),
        "POST upload": lambda: registry.write("a/b", large, source(LARGE)),
    }
    with fails("registry-unavailable", "503"):
        calls[kind]()
    assert server.count[kind] == 3


def test_waits_are_jittered_and_capped() -> None:
    retry_policy, dice = RetryPolicy(first_wait=1.0, longest_wait=10.0), Random(3)
    for failures in range(1, 12):
        waits = {retry_policy.wait(failures, None, dice) for _ in range(50)}
        assert len(waits) > 1 or waits == {10.0}
        assert all(min(2.0 ** (failures - 1) / 2, 10.0) <= wait <= 10.0 for wait in waits)
    assert retry_policy.wait(1, 7.0, dice) == 7.0
    assert retry_policy.wait(1, 3600.0, dice) == 10.0


@pytest.mark.parametrize("status", ["429", "503"])
def test_a_registry_says_how_long_to_wait(server: RegistryMadeHere, status: str) -> None:
    server.fault = Script({"GET tags": [f"{status}:3", f"{status}:7200"]})
    slept: list[float] = []
    client(server, sleep=slept.append, retry_policy=RetryPolicy(first_wait=0.1, longest_wait=20.0)).tags(
        "a/b"
    )
    assert slept == [3.0, 20.0]


def test_a_date_to_wait_for(server: RegistryMadeHere) -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True)
    server.fault = Script({"GET tags": [f"503:{when}"]})
    slept: list[float] = []
    client(server, sleep=slept.append, retry_policy=RetryPolicy(first_wait=0.1, longest_wait=9000.0)).tags(
        "a/b"
    )
    assert 3600.0 <= slept[0] <= 7200.0


# --- uploads -------------------------------------------------------------------------------------


def test_a_broken_upload_goes_on_where_it_stopped(server: RegistryMadeHere) -> None:
    server.fault = Script({"PATCH upload": ["drop:1000000", "drop:900000"]})
    begun: list[int] = []

    def watched(offset: int) -> Iterator[bytes]:
        begun.append(offset)
        return source(LARGE)(offset)

    registry = client(server)
    registry.write("a/b", blob(LARGE), watched)
    assert begun == [0, 1_000_000, 1_900_000]
    assert server.count["POST upload"] == 1
    assert server.shelves.blobs[sha256(LARGE)] == LARGE


@pytest.mark.parametrize("arrived", [0, 1])
def test_on_doubt_an_upload_begins_anew(server: RegistryMadeHere, arrived: int) -> None:
    """The registry says `0-0` for no byte and for one."""
    server.fault = Script({"PATCH upload": [f"drop:{arrived}"]})
    client(server).write("a/b", blob(LARGE), source(LARGE))
    assert server.count["POST upload"] == 2
    assert server.shelves.uploads == {}
    assert server.shelves.blobs[sha256(LARGE)] == LARGE


@pytest.mark.parametrize("data", [b"small", LARGE])
def test_an_upload_whose_end_was_not_answered_is_not_sent_again(
    server: RegistryMadeHere, data: bytes
) -> None:
    server.fault = Script({"PUT upload": ["reset-after"]})
    assert client(server).write("a/b", blob(data), source(data)) == len(data)
    assert server.count["POST upload"] == 1
    assert server.bytes_in == len(data)


def test_a_lost_session_begins_anew(server: RegistryMadeHere) -> None:
    server.fault = Script({"PUT upload": ["lose"]})
    assert client(server).write("a/b", blob(LARGE), source(LARGE)) == 2 * len(LARGE)
    assert server.count["POST upload"] == 2


def test_pieces_are_of_the_size_that_is_set(server: RegistryMadeHere) -> None:
    client(server, piece=1_000_000).write("a/b", blob(LARGE), source(LARGE))
    spans = [asked.headers["content-range"] for asked in server.log if asked.method == "PATCH"]
    assert spans == ["0-999999", "1000000-1999999", "2000000-2499999"]


@pytest.mark.parametrize("kind", ["PUT upload", "PUT manifest"])
def test_a_registry_that_confirms_something_else_is_not_believed(server: RegistryMadeHere, kind: str) -> None:
    server.fault = Script({kind: ["lie"]})
    with fails("registry-request-failed", "another"):
        push(client(server))


def test_a_blob_that_the_registry_loses_at_once_is_an_error(server: RegistryMadeHere) -> None:
    def forget(asked: Asked) -> None:
        if str(asked) == "HEAD blob":
            server.shelves.repositories.clear()

    server.fault = forget
    with fails("registry-unavailable", "blob"):
        put_blob(client(server), "a/b", b"small")


def test_a_damaged_blob_of_this_machine_is_said_to_be_that(server: RegistryMadeHere) -> None:
    other = bytes(len(LARGE))
    with fails("store-corrupt"):
        client(server).write("a/b", blob(LARGE), source(other))
    assert server.shelves.blobs == {}


@pytest.mark.parametrize("status", [500, 507])
def test_a_full_registry_is_said(status: int) -> None:
    with registry_made_here(Ways(quota=2_000_000, full_status=status)) as server:
        registry = client(server)
        put_blob(registry, "a/b", b"small")
        with fails("registry-unavailable", str(status)) as caught:
            registry.write("a/b", blob(LARGE), source(LARGE))
        assert "full" in caught.value.hint
        assert set(server.shelves.blobs) == {sha256(b"small")}
        assert server.shelves.uploads == {}


# --- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [Ways(), Ways(ranges=False)], indirect=True)
def test_a_broken_reply_goes_on_where_it_broke(server: RegistryMadeHere) -> None:
    put_blob(client(server), "a/b", LARGE)
    server.fault = Script({"GET blob": ["cut", "reset", "cut", "503", "cut"]})
    assert b"".join(client(server).read("a/b", blob(LARGE))) == LARGE
    asked = [request.headers.get("range", "") for request in server.log if str(request) == "GET blob"]
    assert asked[0] == ""
    assert len(LARGE) // 2 - 65536 < int(asked[1].removeprefix("bytes=").removesuffix("-")) <= len(LARGE) // 2
    assert server.count["GET blob"] == 6


def test_faults_begin_anew_with_every_byte_that_came(server: RegistryMadeHere) -> None:
    put_blob(client(server), "a/b", LARGE)
    server.fault = Script({"GET blob": ["cut"] * 12})
    assert (
        b"".join(client(server, RetryPolicy(attempts=2, first_wait=0.001)).read("a/b", blob(LARGE))) == LARGE
    )


def test_a_small_blob_that_came_wrong_is_fetched_again(server: RegistryMadeHere) -> None:
    put_blob(client(server), "a/b", b"small")
    server.fault = Script({"GET blob": ["wrong", "wrong"]})
    assert b"".join(client(server).read("a/b", blob(b"small"))) == b"small"
    server.fault = lambda asked: "wrong"
    with fails("registry-unavailable", "digest"):
        list(client(server).read("a/b", blob(b"small")))


def test_a_large_blob_that_came_wrong_is_an_error(server: RegistryMadeHere) -> None:
    put_blob(client(server), "a/b", LARGE)
    server.fault = Script({"GET blob": ["wrong"]})
    with fails("registry-request-failed", "digest"):
        list(client(server).read("a/b", blob(LARGE)))


def test_a_manifest_that_came_wrong_is_an_error(server: RegistryMadeHere) -> None:
    pushed = push(client(server))
    server.fault = lambda asked: "wrong"
    for wanted in ("1.0", digest_of(pushed["manifest"])):
        with fails("registry-unavailable", "sha256:"):
            client(server).manifest("a/b", wanted)


def test_a_manifest_is_put_again_where_a_link_of_its_layers_was_being_written(
    server: RegistryMadeHere,
) -> None:
    server.fault = lambda asked: "link" if str(asked) == "PUT manifest" else None
    with fails("registry-unavailable", "400 DIGEST_INVALID"):
        push(client(server))
    server.fault = Script({"PUT manifest": ["link", "link"]})
    pushed = push(client(server))
    assert server.repository("a/b").tags["1.0"] in {digest_of(data) for data in pushed.values()}


def test_a_manifest_of_great_length_is_not_read(server: RegistryMadeHere) -> None:
    data = canonical_json({"mediaType": INDEX_TYPE, "manifests": [], "x": "x" * (5 << 20)})
    server.repository("a/b").manifests[sha256(data)] = (INDEX_TYPE, data)
    server.repository("a/b").tags["1.0"] = sha256(data)
    with fails("registry-request-failed", "4,194,304"):
        client(server).manifest("a/b", "1.0")


def test_a_reader_may_stop(server: RegistryMadeHere) -> None:
    put_blob(client(server), "a/b", LARGE)
    registry = client(server)
    chunks = registry.read("a/b", blob(LARGE))
    next(chunks)
    chunks.close()
    assert registry.has("a/b", blob(LARGE))


# --- manifests, tags, referrers ------------------------------------------------------------------


def test_a_tag_that_another_writer_moved_is_reported(server: RegistryMadeHere) -> None:
    registry = client(server)
    other = registry.put_manifest("a/b", image_manifest(registry, "a/b", b"other"), MANIFEST_TYPE)
    ours = image_manifest(registry, "a/b", b"ours")

    def move(asked: Asked) -> None:
        if asked.method == "GET" and asked.path.endswith(digest_of(ours)):
            server.repository("a/b").tags["1.0"] = other.digest

    server.fault = move
    assert registry.put_manifest("a/b", ours, MANIFEST_TYPE, "1.0") == other


def test_a_put_that_was_not_answered_is_not_put_over_what_came_later(server: RegistryMadeHere) -> None:
    registry = client(server)
    data = image_manifest(registry, "a/b", b"one")
    server.fault = Script({"PUT manifest": ["reset-after"]})
    assert registry.put_manifest("a/b", data, MANIFEST_TYPE, "1.0").digest == digest_of(data)
    assert server.count["PUT manifest"] == 1


@pytest.mark.parametrize("server", [Ways(referrers=False)], indirect=True)
def test_an_entry_that_another_writer_lost_is_entered_again(server: RegistryMadeHere) -> None:
    registry = client(server)
    row = registry.put_manifest("a/b", image_manifest(registry, "a/b", b"one"), MANIFEST_TYPE, "1.0")
    tag, lost = row.digest.replace(":", "-"), 2

    def overwrite(asked: Asked) -> None:
        nonlocal lost
        known = server.repository("a/b").tags
        if lost and tag in known and asked.method == "GET" and asked.path.endswith(tag):
            lost -= 1
            empty = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []})
            server.repository("a/b").manifests[sha256(empty)] = (INDEX_TYPE, empty)
            known[tag] = sha256(empty)

    server.fault = overwrite
    note = artifact(registry, "a/b", row, "application/vnd.note")
    registry.put_manifest("a/b", note, MANIFEST_TYPE)
    assert lost == 0
    assert [found.digest for found in registry.referrers("a/b", row.digest)] == [digest_of(note)]


@pytest.mark.parametrize("server", [Ways(referrers=False)], indirect=True)
def test_of_a_list_in_a_tag_every_manifest_is_asked_for_once(server: RegistryMadeHere) -> None:
    registry = client(server)
    row = registry.put_manifest("a/b", image_manifest(registry, "a/b", b"one"), MANIFEST_TYPE, "1.0")
    for number in range(5):
        note = artifact(registry, "a/b", row, "application/vnd.note", f"{number}")
        registry.put_manifest("a/b", note, MANIFEST_TYPE)
    other = artifact(registry, "a/b", row, "application/vnd.other")
    registry.put_manifest("a/b", other, MANIFEST_TYPE)
    before = server.count["GET manifest"]
    (found,) = registry.referrers("a/b", row.digest, "application/vnd.other")
    assert found.digest == digest_of(other)
    assert server.count["GET manifest"] - before == 1 + 6  # the list, and all that are in it
    registry.delete_manifest("a/b", found.digest)
    assert registry.referrers("a/b", row.digest, "application/vnd.other") == ()
    assert len(registry.referrers("a/b", row.digest)) == 5


@pytest.mark.parametrize("server", [Ways(), Ways(referrers=False)], indirect=True, ids=["api", "tag"])
def test_one_connection_serves_request_after_request(server: RegistryMadeHere) -> None:
    registry = client(server)
    push(registry)
    registry.manifest("a/b", "1.0")
    assert len(server.log) > 15
    assert server.connections == 1


def test_an_unanswered_put_of_a_referrer_asks_whether_there_is_an_api(server: RegistryMadeHere) -> None:
    registry = client(server)
    row = registry.put_manifest("a/b", image_manifest(registry, "a/b", b"one"), MANIFEST_TYPE)
    server.fault = Script({"PUT manifest": ["reset-after"]})
    registry.put_manifest("a/b", artifact(registry, "a/b", row, "application/vnd.note"), MANIFEST_TYPE)
    assert registry.tags("a/b") == ()  # no fallback tag where the registry lists by itself


@pytest.mark.parametrize("server", [Ways(page=3)], indirect=True)
def test_tags_and_referrers_come_in_pages(server: RegistryMadeHere) -> None:
    registry = client(server)
    data = image_manifest(registry, "a/b", b"one")
    names = tuple(f"t{number}" for number in range(8))
    for tag in names:
        row = registry.put_manifest("a/b", data, MANIFEST_TYPE, tag)
    for number in range(7):
        note = artifact(registry, "a/b", row, "application/vnd.note", f"{number}")
        registry.put_manifest("a/b", note, MANIFEST_TYPE)
    assert registry.tags("a/b") == names
    assert len(registry.referrers("a/b", row.digest)) == 7


@pytest.mark.parametrize("server", [Ways(referrers=False)], indirect=True)
def test_rows_that_name_no_manifest_hide_no_other(server: RegistryMadeHere) -> None:
    registry = client(server)
    pushed = push(registry)
    row, repository = digest_of(pushed["manifest"]), server.repository("a/b")
    tag = row.replace(":", "-")
    kind, data = repository.manifests[repository.tags[tag]]
    value = json.loads(data)
    (good,) = value["manifests"]
    odd = [None, 5, [], {}, {**good, "digest": "../x"}, {**good, "size": "1"}, {**good, "annotations": 5}]
    value["manifests"] = [*odd, good, *odd]
    bent = canonical_json(value)
    repository.manifests[digest_of(bent)], repository.tags[tag] = (kind, bent), digest_of(bent)
    assert [found.digest for found in registry.referrers("a/b", row)] == [digest_of(pushed["note"])]
    subject = Descriptor(media_type=MANIFEST_TYPE, digest=row, size=len(pushed["manifest"]))
    more = artifact(registry, "a/b", subject, "application/vnd.note", "another")
    registry.put_manifest("a/b", more, MANIFEST_TYPE)
    assert len(registry.referrers("a/b", row)) == 2


@pytest.mark.parametrize("server", [Ways(untag=False)], indirect=True)
def test_a_registry_that_removes_no_tags_says_so(server: RegistryMadeHere) -> None:
    registry = client(server)
    push(registry)
    with fails("registry-delete-unsupported", r"1\.0") as caught:
        registry.untag("a/b", "1.0")
    assert "manifest" in caught.value.hint
    registry.delete_manifest("a/b", server.repository("a/b").tags["1.0"])
    assert registry.tags("a/b") == ()


# --- who asks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [Ways(auth="token", token_uses=2)], indirect=True)
def test_tokens_may_be_short_lived(server: RegistryMadeHere) -> None:
    check(server, push(client(server)))


@pytest.mark.parametrize("server", [Ways(auth="token", token_seconds=800)], indirect=True)
def test_a_token_is_renewed_before_it_runs_out(server: RegistryMadeHere) -> None:
    now = 100.0
    registry = client(server, clock=lambda: now)
    registry.tags("a/b")
    registry.tags("a/b")
    assert server.count["GET token"] == 1
    now += 795.0
    registry.tags("a/b")
    assert server.count["GET token"] == 2
    assert server.count["GET tags"] == 4  # the first one was answered with the challenge


@pytest.mark.parametrize("server", [Ways(auth="token", token_seconds=-1)], indirect=True)
def test_tokens_that_are_refused_at_once_are_given_up(server: RegistryMadeHere) -> None:
    with fails("registry-access-denied", "401 UNAUTHORIZED"):
        client(server).tags("a/b")
    assert server.count["GET token"] <= 6


@pytest.mark.parametrize("server", [Ways(auth="token")], indirect=True)
def test_a_token_that_expires_after_other_faults_is_no_refusal(server: RegistryMadeHere) -> None:
    push(client(server))
    server.fault = Script({"GET tags": ["reset", "reset", "401", "401"]})
    assert client(server).tags("a/b") == ("1.0",)
    assert not any(server.fault.faults.values())


@pytest.mark.parametrize("server", [Ways(auth="token", anonymous_pull=True)], indirect=True)
def test_strangers_may_pull_and_not_push(server: RegistryMadeHere) -> None:
    pushed = push(client(server))
    stranger = client(server, credentials=anonymous)
    assert stranger.manifest("a/b", "1.0") is not None
    assert b"".join(stranger.read("a/b", blob(pushed["small"]))) == pushed["small"]
    server.count.clear()
    with fails("registry-access-denied", "401 UNAUTHORIZED") as caught:
        stranger.write("a/b", blob(b"new"), source(b"new"))
    assert caught.value.hint == f"log in: docker login {server.host}"
    assert server.count["POST upload"] == 1 + 1  # without a token, with one that allows too little


@pytest.mark.parametrize("server", [Ways(auth="token")], indirect=True)
def test_an_identity_token_is_exchanged(server: RegistryMadeHere) -> None:
    registry = client(server, credentials=lambda host: Credential(user="", secret=PASSWORD))
    check(server, push(registry))
    assert server.count["POST token"] >= 2
    assert server.count["GET token"] == 0


@pytest.mark.parametrize("server", [Ways(auth="token")], indirect=True)
def test_a_mount_asks_for_both_repositories(server: RegistryMadeHere) -> None:
    put_blob(client(server), "site/origin", b"shared")
    registry = client(server)
    assert registry.mount("site/copy", blob(b"shared"), "site/origin")
    assert not registry.mount("site/copy", blob(b"nowhere"), "site/origin")
    assert server.shelves.uploads == {}
    assert server.bytes_in == len(b"shared")


@pytest.mark.parametrize("server", [Ways(mount=False)], indirect=True)
def test_a_registry_that_cannot_mount_says_no(server: RegistryMadeHere) -> None:
    put_blob(client(server), "site/origin", b"shared")
    assert not client(server).mount("site/copy", blob(b"shared"), "site/origin")
    assert server.shelves.uploads == {}


@pytest.mark.parametrize("kind", ["basic", "token"])
@pytest.mark.parametrize("fault", ["echo", "wrong password", "503"])
def test_no_secret_comes_out(
    kind: str, fault: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = PASSWORD if fault != "wrong password" else PASSWORD[::-1]
    credential = Credential(user=USER, secret=secret, origin="~/.docker/config.json")
    caplog.set_level(logging.DEBUG)
    told = [repr(credential)]
    with registry_made_here(Ways(auth=kind)) as server:
        registry = client(
            server, RetryPolicy(attempts=2, first_wait=0.001), credentials=lambda host: credential
        )
        server.fault = (
            None
            if fault == "wrong password"
            else lambda asked: fault if "authorization" in asked.headers and asked.kind != "token" else None
        )
        for call in (
            lambda: registry.tags("a/b"),
            lambda: registry.write("a/b", blob(LARGE), source(LARGE)),
            lambda: registry.put_manifest("a/b", b"{}", MANIFEST_TYPE, "1.0"),
        ):
            with pytest.raises(RegistryError) as caught:
                call()
            assert "\x1b" not in caught.value.message
            chain = caught.value.__cause__
            told += [
                caught.value.message,
                caught.value.hint,
                repr(chain),
                str(caught.getrepr(showlocals=False)),
            ]
        told += [repr(registry), repr(registry.options), caplog.text, *capfd.readouterr()]
        secrets = {secret, credential.basic.partition(" ")[2], *server.tokens}
    assert len(secrets) > 2 or kind == "basic" or fault == "wrong password"
    for word in secrets:
        assert word not in "\n".join(told)


@pytest.mark.parametrize("server", [Ways(auth="token")], indirect=True)
@pytest.mark.parametrize("token", [f"{PASSWORD}.the-rest", f"+the-rest.{PASSWORD}"])
def test_a_token_that_holds_the_password_is_hidden_whole(
    server: RegistryMadeHere, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr("tests.made.registry.secrets.token_urlsafe", lambda _: token)
    server.fault = lambda asked: "echo" if token in asked.headers.get("authorization", "") else None
    with fails("registry-access-denied", r"Bearer \*\*\*") as caught:
        client(server).tags("a/b")
    assert "the-rest" not in caught.value.message


def test_a_challenge_is_read_as_it_stands() -> None:
    for header in (
        'Bearer realm="https://a.example/token",service="made, here",scope="repository:a/b:pull,push"',
        'Basic realm="x", Bearer service="made, here", scope="repository:a/b:pull,push" , '
        'realm="https://a.example/token"',
        'bearer realm=https://a.example/token,service="made, here",scope="repository:a/b:pull,push",'
        ' Basic realm="x"',
    ):
        found = parse_challenge(header)
        assert found is not None
        assert found.realm == "https://a.example/token"
        assert found.service == "made, here"
        assert found.scope == ("repository:a/b:pull,push",)
    for header in ("", "Basic realm=x", 'Bearer realm="file:///etc/passwd"', "Bearer"):
        assert parse_challenge(header) is None


# --- where it is ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_a_registry_with_a_ca_of_its_own(certificate: tuple[Path, Path]) -> None:
    with registry_made_here(Ways(auth="token"), tls=certificate) as server:
        check(server, push(client(server, loopback_plain=False, certificates=certificate[0])))
        server.count.clear()
        with fails("registry-request-failed", "CERTIFICATE_VERIFY_FAILED") as caught:
            client(server, loopback_plain=False).tags("a/b")
        assert "certificates" in caught.value.hint
        assert server.count == {}  # and it was not tried again


def test_http_and_https_are_not_confused(server: RegistryMadeHere, certificate: tuple[Path, Path]) -> None:
    with pytest.raises(RegistryError) as caught:
        client(server, loopback_plain=False).tags("a/b")
    assert "plain-http" in caught.value.hint
    assert client(server, loopback_plain=False, plain_hosts=(server.host,)).tags("a/b") == ()
    assert client(server, loopback_plain=False, plain_hosts=("127.0.0.1",)).tags("a/b") == ()


def test_nobody_listens() -> None:
    with socket.socket() as held:  # bound alone, it refuses, and nobody else gets its port
        held.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{held.getsockname()[1]}"
        with fails("registry-unavailable", "refused") as caught:
            RegistryClient(
                host, RegistryOptions(retry_policy=RetryPolicy(attempts=2, first_wait=0.001))
            ).tags("a/b")
    assert caught.value.hint == f"check that a registry runs at {host}"


def test_a_registry_that_never_answers_is_given_up(server: RegistryMadeHere) -> None:
    server.fault = lambda asked: "hang"
    with fails("registry-unavailable", "timed out"):
        client(server, RetryPolicy(attempts=2, first_wait=0.001, read=0.1)).tags("a/b")


def test_a_server_that_is_no_registry(server: RegistryMadeHere) -> None:
    server.fault = lambda asked: "418"
    with fails("registry-request-failed", "418"):
        client(server).manifest("a/b", "1.0")


@pytest.mark.parametrize(
    ("host", "options", "address"),
    [
        ("docker.io", RegistryOptions(), "https://registry-1.docker.io/v2/library/debian/tags"),
        ("registry.example.org", RegistryOptions(), "https://registry.example.org/v2/debian/tags"),
        ("localhost:5000", RegistryOptions(), "http://localhost:5000/v2/debian/tags"),
        ("[::1]:5000", RegistryOptions(), "http://[::1]:5000/v2/debian/tags"),
        ("box:5000", RegistryOptions(plain_hosts=("box:5000",)), "http://box:5000/v2/debian/tags"),
        ("box:5001", RegistryOptions(plain_hosts=("box:5000",)), "https://box:5001/v2/debian/tags"),
    ],
)
def test_where_a_registry_is_asked(host: str, options: RegistryOptions, address: str) -> None:
    assert RegistryClient(host, options).session.url("debian", "tags") == address


@pytest.mark.parametrize(
    ("place", "address", "ours"),
    [
        ("/v2/a/uploads/1?s=2", "https://r.example.org/v2/a/uploads/1?s=2", True),
        ("https://r.example.org:443/v2/a", "https://r.example.org:443/v2/a", True),
        ("https://R.EXAMPLE.org/v2/a", "https://R.EXAMPLE.org/v2/a", True),
        ("http://r.example.org/v2/a?s=1", "https://r.example.org/v2/a?s=1", True),
        ("https://r.example.org.evil.example/a", "https://r.example.org.evil.example/a", False),
        ("https://r.example.org@evil.example/a", "https://r.example.org@evil.example/a", False),
        ("https://r.example.org:8443/a", "https://r.example.org:8443/a", False),
        ("http://other.example.org/a", "http://other.example.org/a", False),
    ],
)
def test_an_upload_elsewhere_gets_no_credential(place: str, address: str, ours: bool) -> None:
    session = RegistryClient("r.example.org").session
    assert session._own(urljoin("https://r.example.org/v2/a/blobs/uploads/", place)) == address
    assert session.is_ours(address) is ours


@pytest.mark.parametrize("host", ["", "a b", "https://a.example", "user:secret@host", "a/b", "host:port"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        RegistryClient(host)
