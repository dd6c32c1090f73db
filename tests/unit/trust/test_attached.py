"""Statements beside images, the journal and what it mends; revocations: which count, and which never."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from sigstore_models.bundle.v1 import Bundle

from imagefactory.actions import verdicts as actions_verdicts
from imagefactory.actions.verdicts import count_valid, verdict_statements
from imagefactory.errors import RegistryError, StatementError
from imagefactory.oci.candidates import BUNDLE_TYPE, REVOCATION_TYPE, TEST_RESULT_TYPE, VERDICT_TYPE
from imagefactory.oci.graph import (
    EMPTY,
    EMPTY_BLOB,
    LocalArtifact,
    StoreRepository,
    artifact_of,
    make_artifact,
    put_artifact,
)
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_TYPE, Descriptor, digest_of
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import Store
from imagefactory.progress import QuietProgress
from imagefactory.settings.load import load_settings
from imagefactory.trust import attached
from imagefactory.trust.attached import (
    MAX_REJECTED,
    AttachJournal,
    JournalRows,
    SignedStatement,
    attach,
    bundle_annotations,
    format_row,
    parse_row,
    put_all,
    put_statement,
    read_revocations,
    read_verdicts,
    repair_referrers,
    stored_statements,
)
from imagefactory.trust.envelope import LARGEST, format_bundle, format_json, parse_bundle
from imagefactory.trust.judgement import (
    RevocationRequest,
    find_verdicts,
    format_revocation,
    sign_revocation,
    verify_revocations,
    verify_verdicts,
)
from imagefactory.trust.keys import format_public
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import VERDICT, VerdictStatus, sign
from imagefactory.verify.report import VerifiedImage
from tests.made.errors import fails
from tests.made.registry import RegistryMadeHere, Ways, registry_made_here
from tests.made.store_contract import image_manifest
from tests.made.verdicts import (
    COURT,
    DAY,
    LAB,
    LAB_TRUSTED,
    NOW,
    STRANGER,
    SUBJECT,
    digest,
    payload_of,
    sealed,
    whole_report,
    with_payload,
)

QUIET = QuietProgress()
SIGNED = sign(whole_report(), LAB, now=NOW, days=90)


@pytest.fixture
def registry() -> Iterator[RegistryMadeHere]:
    with registry_made_here(Ways(referrers=False)) as made:
        yield made


@pytest.fixture(params=["layout", "registry"])
def place(request: pytest.FixtureRequest, registry: RegistryMadeHere, tmp_path: Path) -> StoreRepository:
    layout = Layout(tmp_path / "store")
    store: Store = LayoutStore(layout) if request.param == "layout" else RegistryClient(registry.host)
    return StoreRepository(store=store, repository="one")


def put_image(place: StoreRepository, content: bytes = b"content") -> Descriptor:
    data = image_manifest(place.store, place.repository, content)
    return place.store.put_manifest(place.repository, data, MANIFEST_TYPE)


def verdict_of(subject: Descriptor, envelope: bytes = SIGNED.envelope) -> SignedStatement:
    return SignedStatement(kind=VERDICT_TYPE, subject=subject, envelope=envelope, until=NOW + 90 * DAY)


def test_what_is_attached_is_read_back(place: StoreRepository) -> None:
    image = put_image(place)
    made = attach(place, verdict_of(image))
    assert attach(place, verdict_of(image)) == made
    attach(place, SignedStatement(kind=TEST_RESULT_TYPE, subject=image, envelope=SIGNED.test_result))
    (found,) = read_verdicts(place, image.digest)
    assert (found.digest, found.envelope, found.fault) == (made, SIGNED.envelope, "")
    assert read_revocations(place, image.digest) == ()
    there = place.store.manifest(place.repository, made)
    assert there is not None
    value = json.loads(there[1])
    assert value["artifactType"] == VERDICT_TYPE
    assert value["subject"]["digest"] == image.digest
    assert len(value["layers"]) == 1


def test_a_verdict_needs_its_image(place: StoreRepository) -> None:
    put_image(place)
    missing = Descriptor(media_type=MANIFEST_TYPE, digest=digest("0"), size=7)
    with fails("subject-not-in-registry"):
        attach(place, verdict_of(missing))
    assert put_statement(place, verdict_of(missing))


@pytest.mark.parametrize("what", ["no layer", "two layers", "a large one"])
def test_what_is_no_statement_is_told_and_hides_no_other(place: StoreRepository, what: str) -> None:
    image = put_image(place)
    good = attach(place, verdict_of(image))
    artifact = verdict_of(image, b"x" * (LARGEST + 1) if what == "a large one" else b"{}").artifact
    value = json.loads(artifact.manifest.data)
    value["layers"] = {"no layer": 0, "two layers": 2, "a large one": 1}[what] * value["layers"]
    for blob, content in artifact.blobs:
        place.store.write("one", blob, lambda offset, content=content: iter((content[offset:],)))  # type: ignore[misc]
    bad = place.store.put_manifest("one", json.dumps(value).encode(), MANIFEST_TYPE).digest
    found = {one.digest: one for one in read_verdicts(place, image.digest)}
    assert found[good].envelope == SIGNED.envelope
    assert found[bad].envelope == b""
    assert found[bad].fault


def test_a_row_comes_back_as_it_was() -> None:
    image = Descriptor(media_type=MANIFEST_TYPE, digest=digest("1"), size=7)
    for until in (None, NOW):
        statement = replace(verdict_of(image, bytes(range(256))), until=until)
        row = format_row(statement)
        assert b"\n" not in row
        assert parse_row(row) == statement


def test_a_row_of_another_version_is_no_damage(tmp_path: Path, registry: RegistryMadeHere) -> None:
    place, journal = (
        StoreRepository(store=RegistryClient(registry.host), repository="a/b"),
        AttachJournal(tmp_path),
    )
    image = Descriptor(media_type=MANIFEST_TYPE, digest=digest("1"), size=7)
    journal.append(place, verdict_of(image))
    path = next((tmp_path / "journal").rglob("*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    with fails("journal-too-new") as caught:
        journal.read(place)
    assert "format 2" in caught.value.message


def test_a_line_that_a_kill_cut_costs_no_other(tmp_path: Path, registry: RegistryMadeHere) -> None:
    place, journal = (
        StoreRepository(store=RegistryClient(registry.host), repository="a/b"),
        AttachJournal(tmp_path),
    )
    images = [Descriptor(media_type=MANIFEST_TYPE, digest=digest(letter), size=7) for letter in "123"]
    journal.append(place, verdict_of(images[0]))
    path = next((tmp_path / "journal").rglob("*.jsonl"))
    whole = path.read_bytes()
    for cut in range(1, len(whole), 97):
        path.write_bytes(whole + format_row(verdict_of(images[1]))[:cut])
        journal.append(place, verdict_of(images[2]))
        rows = journal.read(place)
        assert [one.subject.digest for one in rows.statements] == [images[0].digest, images[2].digest]
        assert rows.damaged == 1
    assert journal.places() == ((registry.host, "a/b"),)


def many(subject: Descriptor, count: int) -> tuple[SignedStatement, ...]:
    return tuple(verdict_of(subject, b"envelope %d" % number) for number in range(count))


@pytest.mark.parametrize("workers", [1, 4])
def test_many_are_put_and_all_are_listed(place: StoreRepository, workers: int) -> None:
    image = put_image(place)
    statements = many(image, 9)
    assert put_all(place, statements, workers=workers) == (None,) * 9
    found = {one.envelope for one in read_verdicts(place, image.digest)}
    assert found == {one.envelope for one in statements}


@pytest.mark.parametrize("workers", [1, 4])
def test_one_that_is_not_taken_stops_no_other(registry: RegistryMadeHere, workers: int) -> None:
    place = StoreRepository(store=RegistryClient(registry.host), repository="one")
    image = put_image(place)
    statements = many(image, 9)
    refused = statements[4].artifact.manifest.descriptor.digest
    registry.fault = lambda asked: "403" if asked.method == "PUT" and asked.path.endswith(refused) else None
    faults = put_all(place, statements, workers=workers)
    assert [type(fault) for fault in faults] == [type(None)] * 4 + [RegistryError] + [type(None)] * 4
    assert len(read_verdicts(place, image.digest)) == 8


@pytest.mark.parametrize("workers", [1, 4])
def test_a_registry_that_takes_nothing_is_left_alone(registry: RegistryMadeHere, workers: int) -> None:
    """What 2,000 jobs brought back would wait for it 2,000 times."""
    place = StoreRepository(store=RegistryClient(registry.host), repository="one")
    image = put_image(place)
    registry.fault = lambda asked: "403" if asked.method == "POST" else None
    before = len(registry.log)
    faults = put_all(place, many(image, 40), workers=workers)
    assert [type(fault) for fault in faults] == [RegistryError] * 40
    asked = sum(one.method == "POST" for one in registry.log[before:])
    assert 0 < asked < MAX_REJECTED + workers


def test_a_list_that_somebody_fills_hides_no_verdict(
    place: StoreRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "MOST", 4)
    image = put_image(place)
    put_all(place, many(image, 4), workers=1)
    assert len(read_verdicts(place, image.digest)) == 4
    put_all(place, many(image, 7), workers=1)
    *read, more = read_verdicts(place, image.digest)
    assert (len(read), more.digest, more.envelope) == (4, "", b"")
    assert more.fault.startswith("3 more that ")
    (shown,) = verify_verdicts({more.digest: more.envelope}, SUBJECT, COURT)
    assert not shown.proves


def test_a_revocation_is_not_hidden_by_others(
    place: StoreRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody reads would not count."""
    monkeypatch.setattr(attached, "MOST", 4)
    image = put_image(place)
    statements = [replace(one, kind=REVOCATION_TYPE) for one in many(image, 5)]
    put_all(place, statements, workers=1)
    with fails("revocations-too-many") as caught:
        read_revocations(place, image.digest)
    assert " 5 " in caught.value.message


def test_many_stand_in_the_journal_and_a_cut_line_costs_no_other(
    tmp_path: Path, registry: RegistryMadeHere
) -> None:
    place, journal = (
        StoreRepository(store=RegistryClient(registry.host), repository="one"),
        AttachJournal(tmp_path),
    )
    image = put_image(place)
    first, *others = many(image, 5)
    journal.append(place, first)
    path = next(journal.path.glob("**/*.jsonl"))
    path.write_bytes(path.read_bytes() + format_row(others[0])[:40])
    journal.append(place, *others)
    assert journal.read(place) == JournalRows(statements=(first, *others), damaged=1)


def test_it_stands_in_the_journal_before_the_registry_is_asked_to_take_it(
    tmp_path: Path, registry: RegistryMadeHere
) -> None:
    place, journal = (
        StoreRepository(store=RegistryClient(registry.host), repository="one"),
        AttachJournal(tmp_path),
    )
    image = put_image(place)
    registry.fault = lambda asked: "403" if asked.method in ("PUT", "POST", "PATCH") else None
    with pytest.raises(RegistryError):
        attach(place, verdict_of(image), journal)
    registry.fault = None
    assert read_verdicts(place, image.digest) == ()
    done = repair_referrers(place, journal, (), NOW)
    assert len(done.repaired) == 1
    (found,) = read_verdicts(place, image.digest)
    assert found.envelope == SIGNED.envelope
    assert repair_referrers(place, journal, (), NOW).listed == 1


def test_what_nobody_needs_leaves_the_journal(tmp_path: Path, registry: RegistryMadeHere) -> None:
    place, journal = (
        StoreRepository(store=RegistryClient(registry.host), repository="one"),
        AttachJournal(tmp_path),
    )
    images = [put_image(place, content) for content in (b"1", b"2", b"3")]
    for image in images:
        attach(place, verdict_of(image), journal)
    attach(place, replace(verdict_of(images[0], b"late"), until=NOW), journal)
    del registry.find("one").manifests[images[1].digest]
    done = repair_referrers(place, journal, (), NOW)
    assert (done.listed, done.repaired, done.gone, done.expired) == (2, (), 1, 1)
    kept = journal.read(place)
    assert [one.subject.digest for one in kept.statements] == [images[0].digest, images[2].digest]
    assert repair_referrers(place, journal, (), NOW + 100 * DAY).expired == 2
    assert journal.places() == ()


def test_the_store_here_knows_what_a_journal_lost(tmp_path: Path, registry: RegistryMadeHere) -> None:
    layout = Layout(tmp_path / "store")
    here, there = (
        StoreRepository(store=store, repository="one")
        for store in (LayoutStore(layout), RegistryClient(registry.host))
    )
    image = put_image(there)
    assert put_image(here) == image
    attach(here, verdict_of(image))
    attach(here, verdict_of(put_image(here, b"only here")))
    known = stored_statements(layout)
    assert len(known) == 2
    done = repair_referrers(there, AttachJournal(tmp_path / "store"), known, NOW)
    assert len(done.repaired) == 1
    assert [one.envelope for one in read_verdicts(there, image.digest)] == [SIGNED.envelope]


def test_writers_that_never_end_are_told(
    tmp_path: Path, registry: RegistryMadeHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RegistryClient(registry.host)
    place, journal = StoreRepository(store=client, repository="one"), AttachJournal(tmp_path)
    image = put_image(place)
    attach(place, verdict_of(image), journal)
    monkeypatch.setattr(client, "referrers", lambda *_: ())
    with fails("referrers-contended"):
        repair_referrers(place, journal, (), NOW)


def test_promoters_of_one_store_take_turns(tmp_path: Path, registry: RegistryMadeHere) -> None:
    """Without the lock of the journal, writers at once lose rows of the list; with it none does."""
    place, journal = (
        StoreRepository(store=RegistryClient(registry.host), repository="one"),
        AttachJournal(tmp_path),
    )
    image = put_image(place)
    envelopes = [f"envelope {number}".encode() for number in range(12)]

    def go(envelope: bytes) -> None:
        mine = StoreRepository(store=RegistryClient(registry.host), repository="one")
        with journal.alone(QUIET):
            attach(mine, verdict_of(image, envelope), journal)

    threads = [threading.Thread(target=go, args=(envelope,)) for envelope in envelopes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.envelope for one in read_verdicts(place, image.digest)) == sorted(envelopes)
    assert repair_referrers(place, journal, (), NOW).listed == 12


def test_a_list_that_lost_rows_is_mended(tmp_path: Path, registry: RegistryMadeHere) -> None:
    client = RegistryClient(registry.host)
    place, journal = StoreRepository(store=client, repository="one"), AttachJournal(tmp_path)
    image = put_image(place)
    for number in range(5):
        attach(place, verdict_of(image, f"envelope {number}".encode()), journal)
    tag = image.digest.replace(":", "-")
    stale = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}
    client.put_manifest("one", json.dumps(stale).encode(), INDEX_TYPE, tag)
    assert read_verdicts(place, image.digest) == ()
    assert len(repair_referrers(place, journal, (), NOW).repaired) == 5
    assert len(read_verdicts(place, image.digest)) == 5


WITHDRAWAL = RevocationRequest(subject=SUBJECT, why="wrong sums", capability="8.0")
LATER = NOW + timedelta(minutes=1)


def heeded(envelope: bytes, subject: VerifiedImage = SUBJECT, **court: Any) -> bool:
    asked = replace(COURT, **{"now": LATER, **court})
    return bool(verify_revocations({digest("9"): envelope}, subject, asked).heeded)


def standing(*revocations: bytes, envelope: bytes = SIGNED.envelope, **court: Any) -> VerdictStatus:
    asked = replace(COURT, **{"now": LATER, **court})
    found = {digest_of(one): one for one in revocations}
    known = verify_revocations(found, SUBJECT, asked).heeded
    (one,) = verify_verdicts({digest("8"): envelope}, SUBJECT, replace(asked, revocations=known))
    return one.standing


def test_a_revocation_takes_back_what_was_signed_before_it() -> None:
    assert standing(sign_revocation(WITHDRAWAL, LAB, LATER)) is VerdictStatus.REVOKED
    assert standing(sign_revocation(WITHDRAWAL, LAB, NOW - timedelta(minutes=1))) is VerdictStatus.GOOD
    assert standing(sign_revocation(replace(WITHDRAWAL, capability=""), LAB, LATER)) is VerdictStatus.REVOKED
    assert standing(sign_revocation(replace(WITHDRAWAL, capability="9.0"), LAB, LATER)) is VerdictStatus.GOOD
    one = replace(WITHDRAWAL, verdicts=(SIGNED.verdict.digest,))
    assert standing(sign_revocation(one, LAB, LATER)) is VerdictStatus.REVOKED
    other = replace(WITHDRAWAL, verdicts=(digest("8"),))  # the artifact's, which anyone can make anew
    assert standing(sign_revocation(other, LAB, LATER)) is VerdictStatus.GOOD


def test_a_later_run_verifies_again() -> None:
    again = sign(whole_report(nonce="f" * 32), LAB, now=LATER + timedelta(seconds=1), days=90)
    revocation = sign_revocation(WITHDRAWAL, LAB, LATER)
    assert standing(revocation, envelope=again.envelope, now=LATER + DAY) is VerdictStatus.GOOD


def test_a_revocation_outlives_what_it_takes_back() -> None:
    revocation = sign_revocation(WITHDRAWAL, LAB, LATER)
    assert standing(revocation, now=NOW + 80 * DAY) is VerdictStatus.REVOKED


def test_a_revocation_of_the_second_in_which_its_key_was_retired_counts() -> None:
    def counts(when: datetime, **changes: datetime) -> bool:
        key = replace(LAB_TRUSTED, **changes)
        return heeded(sign_revocation(WITHDRAWAL, LAB, when), trust=TrustRules(keys=(key,)), now=LATER + DAY)

    assert counts(LATER, until=LATER)
    assert not counts(LATER, until=LATER - timedelta(seconds=1))
    assert not counts(LATER, since=LATER, until=LATER)  # a stolen key


def test_forged_and_changed_revocations_count_for_nothing() -> None:
    good = sign_revocation(WITHDRAWAL, LAB, LATER)
    assert heeded(good)
    payload = payload_of(good)
    assert not heeded(sign_revocation(WITHDRAWAL, STRANGER, LATER))
    assert not heeded(sign_revocation(WITHDRAWAL, LAB, LATER + DAY))  # of a time to come
    assert not heeded(sign_revocation(WITHDRAWAL, LAB, NOW - 40 * DAY))  # before the key was trusted
    assert not heeded(
        sign_revocation(
            replace(WITHDRAWAL, subject=replace(SUBJECT, manifest=digest("5"), config=digest("6"))),
            LAB,
            LATER,
        )
    )
    assert not heeded(SIGNED.envelope)
    assert not heeded(SIGNED.test_result)
    assert not heeded(b"")
    assert not heeded(good[:-1])
    assert not heeded(good + b" ")
    changed: list[dict[str, Any]] = []
    for key in payload["predicate"]:
        changed.append({**payload, "predicate": {k: v for k, v in payload["predicate"].items() if k != key}})
        values: list[Any] = [None, 1, True, [], {}, "x", "\u202e", ["sha256:x"]]
        for value in values:
            if value != payload["predicate"][key]:
                changed.append({**payload, "predicate": {**payload["predicate"], key: value}})
    changed.append({**payload, "predicate": {**payload["predicate"], "more": 1}})
    changed.append({**payload, "predicateType": "https://imagefactory.dev/verdict/v1"})
    changed.append({**payload, "subject": []})
    changed.append({**payload, "subject": payload["subject"] * 2})
    changed.append({**payload, "subject": [{**payload["subject"][0], "digest": {"sha256": "0" * 64}}]})
    edited = 0
    for statement in changed:
        data = format_json(statement)
        assert not heeded(with_payload(good, data)), statement  # the signature is of something else
        accepted = heeded(sealed(data))  # signed by a trusted key: only what this program would write
        fine = {**payload["predicate"], "why": "x"} == statement["predicate"]
        assert accepted is fine, statement
        edited += 1
    assert edited > 40


@pytest.mark.parametrize("why", ["", "  ", "two\nlines", "\u202ereversed", "x" * 5000])
def test_a_reason_is_one_printable_line(why: str) -> None:
    with pytest.raises(StatementError):
        sign_revocation(replace(WITHDRAWAL, why=why), LAB, LATER)


def test_the_same_revocation_gives_the_same_bytes() -> None:
    assert format_revocation(WITHDRAWAL, LATER) == format_revocation(WITHDRAWAL, LATER)
    statement = SignedStatement(
        kind=REVOCATION_TYPE,
        subject=Descriptor(media_type=MANIFEST_TYPE, digest=digest("1"), size=7),
        envelope=sign_revocation(WITHDRAWAL, LAB, LATER),
    )
    assert statement.artifact == replace(statement).artifact


# --- Sigstore bundles ----------------------------------------------------------------------------


def bundle_of(subject: Descriptor, envelope: bytes = SIGNED.envelope) -> SignedStatement:
    return replace(verdict_of(subject, envelope), kind=BUNDLE_TYPE)


def test_the_reference_library_reads_a_bundle_and_any_library_verifies_it(place: StoreRepository) -> None:
    """By Sigstore's own data model, and by the public key with PAE as the DSSE specification writes it."""
    image = put_image(place)
    there = place.store.manifest(place.repository, attach(place, bundle_of(image)))
    assert there is not None
    value = json.loads(there[1])
    assert value["artifactType"] == value["layers"][0]["mediaType"] == BUNDLE_TYPE
    assert value["annotations"] == {
        "dev.sigstore.bundle.content": "dsse-envelope",
        "dev.sigstore.bundle.predicateType": VERDICT,
    }
    data = next(data for blob, data in bundle_of(image).artifact.blobs if blob.media_type == BUNDLE_TYPE)
    bundle = Bundle.from_json(data)
    assert bundle.media_type == BUNDLE_TYPE
    assert bundle.verification_material.public_key is not None
    assert bundle.verification_material.public_key.hint == LAB.keyid
    envelope = bundle.dsse_envelope
    assert envelope is not None
    (signature,) = envelope.signatures
    kind, payload = (
        envelope.payload_type.encode(),
        base64.b64decode(json.loads(data)["dsseEnvelope"]["payload"]),
    )
    pae = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    raw = base64.b64decode(json.loads(data)["dsseEnvelope"]["signatures"][0]["sig"])
    public = load_pem_public_key(format_public(LAB.public))
    assert isinstance(public, Ed25519PublicKey)
    public.verify(raw, pae)
    with pytest.raises(InvalidSignature):
        public.verify(raw, pae + b" ")
    assert not signature.keyid  # cosign skips a signature whose key ID is not its own for the key
    digests = {one["digest"]["sha256"] for one in json.loads(payload)["subject"]}
    assert SUBJECT.manifest.removeprefix("sha256:") in digests


def test_a_verdict_counts_once_from_its_artifact_its_bundle_or_both(place: StoreRepository) -> None:
    image = put_image(place)
    bundle = attach(place, bundle_of(image))
    attach(place, bundle_of(image, SIGNED.test_result))  # not a verdict
    (only,) = read_verdicts(place, image.digest)
    own = attach(place, verdict_of(image))
    assert own != bundle
    assert (only.digest, only.envelope, only.fault) == (own, SIGNED.envelope, "")
    assert read_verdicts(place, image.digest) == (only,)


def test_a_bundle_in_another_spelling_is_the_same_verdict() -> None:
    value = json.loads(format_bundle(SIGNED.envelope))
    assert parse_bundle(json.dumps(value, indent=2).encode(), "x") == SIGNED.envelope
    value["dsseEnvelope"]["signatures"][0]["keyid"] = LAB.keyid
    assert parse_bundle(json.dumps(value, indent=2).encode(), "x") == SIGNED.envelope


def with_certificate(subject: Descriptor) -> LocalArtifact:
    """The verdict in a bundle with a certificate and a signature of another type of key."""
    value = json.loads(format_bundle(SIGNED.envelope))
    value["verificationMaterial"] = {"certificate": {"rawBytes": "MIIB"}, "tlogEntries": []}
    value["dsseEnvelope"]["signatures"] = [{"sig": "MEUCIQ=="}]
    return make_artifact(BUNDLE_TYPE, subject, bundle_annotations(VERDICT), format_json(value))


def test_a_certificate_makes_no_verdict_count(place: StoreRepository) -> None:
    image = put_image(place)
    own = replace(SUBJECT, manifest=image.digest)
    put_artifact(place, with_certificate(image))
    (found,) = read_verdicts(place, image.digest)
    assert found.fault
    (alone,) = find_verdicts(place, own, COURT).judged
    assert (alone.standing, alone.why, alone.name) == (
        VerdictStatus.UNSIGNED,
        found.fault,
        SIGNED.verdict.digest,
    )
    attach(place, verdict_of(image))
    (row,) = find_verdicts(place, own, COURT).judged
    assert row.verdict
    assert (row.name, row.verdict.keyid) == (SIGNED.verdict.digest, LAB.keyid)


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"dsseEnvelope": {"signatures": []}}', b"[" * 100_000])
def test_what_is_no_bundle_of_a_key_is_told(place: StoreRepository, data: bytes) -> None:
    image = put_image(place)
    layer = Descriptor(media_type=BUNDLE_TYPE, digest=digest_of(data), size=len(data))
    manifest = artifact_of(BUNDLE_TYPE, image, (layer,), bundle_annotations(VERDICT))
    for blob, content in ((EMPTY_BLOB, EMPTY), (layer, data)):
        place.store.write("one", blob, lambda offset, content=content: iter((content[offset:],)))  # type: ignore[misc]
    bad = place.store.put_manifest("one", manifest.data, MANIFEST_TYPE).digest
    (found,) = read_verdicts(place, image.digest)
    assert (found.digest, found.envelope, bool(found.fault)) == (bad, b"", True)


def test_bundles_of_the_store_are_known_and_those_of_other_tools_are_not(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    place = StoreRepository(store=LayoutStore(layout), repository="one")
    image = put_image(place)
    attach(place, bundle_of(image))
    other = artifact_of(BUNDLE_TYPE, image, (EMPTY_BLOB,))
    place.store.put_manifest("one", other.data, MANIFEST_TYPE)
    (known,) = stored_statements(layout)
    assert known == replace(bundle_of(image), until=None)
    assert parse_row(format_row(bundle_of(image))) == bundle_of(image)


@pytest.mark.parametrize(("setting", "kinds"), [("yes", 4), ("no", 2), ("", 2)])
def test_bundles_are_attached_if_the_setting_says_so(tmp_path: Path, setting: str, kinds: int) -> None:
    environ = {"IMAGEFACTORY_SIGSTORE_BUNDLES": setting, "HOME": str(tmp_path)}
    access: Any = SimpleNamespace(settings=load_settings(directory=None, start=tmp_path, environ=environ))
    requests = verdict_statements(access, (SIGNED.envelope, SIGNED.test_result), NOW, SUBJECT)
    assert len(requests) == kinds
    assert [one.envelope for one in requests if one.kind == BUNDLE_TYPE] == (
        [SIGNED.envelope, SIGNED.test_result] if setting == "yes" else []
    )


def test_an_image_whose_verdict_is_only_in_a_bundle_is_judged(
    place: StoreRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = SimpleNamespace(judged=[SimpleNamespace(proves=True)])
    for name, value in (("read_verification_policy", None), ("read_subject", SUBJECT), ("find_in", judged)):
        monkeypatch.setattr(actions_verdicts, name, lambda *_, value=value: value)
    with_bundle, bare = put_image(place), put_image(place, b"other")
    attach(place, bundle_of(with_bundle))
    access: Any = SimpleNamespace()
    count = count_valid(access, place, NOW)
    assert (count(with_bundle.digest), count(bare.digest)) == (1, 0)
