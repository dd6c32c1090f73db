"""Subjects, wrappers, replays, indexes and manifests made up at random: nothing else becomes verified."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from imagefactory.errors import RegistryError, StatementError
from imagefactory.oci.graph import ATTESTATION, Manifest, check_unambiguous, choose_platform, parse_parts
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_TYPE, Descriptor, digest_of
from imagefactory.trust.catalog import LIFE, sign_catalog, verify_catalog
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.judgement import (
    RevocationRequest,
    sign_revocation,
    verify_revocations,
    verify_verdict,
    verify_verdicts,
)
from imagefactory.trust.verdict import SKEW, VerdictStatus, sign
from imagefactory.verify.report import VerifiedImage
from tests.made.catalog import make_catalog
from tests.made.verdicts import COURT, LAB, NOW, STRANGER, SUBJECT, digest, whole_report

DIGESTS = st.sampled_from([SUBJECT.index, SUBJECT.manifest, SUBJECT.config, digest("1"), digest("2")])
LATER = replace(COURT, now=NOW + timedelta(hours=2))


# --- subjects, wrappers and replays -------------------------------------------------------------------

SIGNED = [
    sign(
        whole_report(nonce=nonce * 32, subject=subject), key, now=NOW + timedelta(minutes=minutes), days=90
    ).envelope
    for nonce in "ab"
    for minutes in (0, 1)
    for subject in (SUBJECT, replace(SUBJECT, manifest=digest("1")))
    for key in (LAB, STRANGER)
]


@given(st.builds(VerifiedImage, target=st.just(""), index=DIGESTS, manifest=DIGESTS, config=DIGESTS))
def test_a_verdict_is_about_its_manifest_alone(subject: VerifiedImage) -> None:
    envelope = SIGNED[0]
    good = verify_verdict(envelope, digest("9"), subject, COURT).standing is VerdictStatus.GOOD
    assert good is (subject.manifest == SUBJECT.manifest)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SIGNED)), min_size=1, max_size=12),
    st.lists(st.sampled_from(SIGNED), max_size=3),
    st.sampled_from([LAB, STRANGER]),
)
def test_wrappers_and_replays_add_nothing(
    carried: list[tuple[int, bytes]], revoked: list[bytes], key: Any
) -> None:
    """However often and by whatever artifacts verdicts are carried, in whatever order they are listed."""
    names = tuple({digest_of(json_payload(one)) for one in revoked})
    revocations = {}
    if names:
        withdrawal = RevocationRequest(subject=SUBJECT, why="no", verdicts=names)
        revocations[digest("r")] = sign_revocation(withdrawal, key, NOW + timedelta(hours=1))
    heeded = verify_revocations(revocations, SUBJECT, LATER).heeded
    envelopes = {f"sha256:{number:064x}": envelope for number, envelope in carried}
    found = verify_verdicts(envelopes, SUBJECT, replace(LATER, revocations=heeded))
    good = [one.verdict for one in found if one.standing is VerdictStatus.GOOD and one.verdict]
    assert len({one.report.nonce for one in good}) == len(good)
    assert all(one.keyid == LAB.keyid and one.report.subject.manifest == SUBJECT.manifest for one in good)
    assert key is STRANGER or not {one.digest for one in good} & set(names)
    other = verify_verdicts(dict(reversed(envelopes.items())), SUBJECT, replace(LATER, revocations=heeded))
    assert other == found


def json_payload(envelope: bytes) -> bytes:
    return parse_envelope(envelope, "x").payload


# --- which image of an index a tool takes -------------------------------------------------------------

ZSTD = "io.github.containers.compression.zstd"
SPELLINGS = st.sampled_from([str, str, str, str.upper, str.title])
PLATFORMS = st.fixed_dictionaries(
    {
        "os": st.sampled_from(["linux", "linux", "linux", "Linux", "windows", "unknown"]),
        "architecture": st.sampled_from(["amd64", "amd64", "amd64", "x86_64", "arm64", "unknown"]),
    },
    optional={"variant": st.sampled_from(["", "v2", "v3", "v8"])},
)
ENTRIES = st.builds(
    lambda entry, outer, inner: {
        outer(name): {inner(key): text for key, text in value.items()} if name == "platform" else value
        for name, value in entry.items()
    },
    st.fixed_dictionaries(
        {},
        optional={
            "platform": PLATFORMS,
            "annotations": st.dictionaries(st.sampled_from([ATTESTATION, ZSTD]), st.just("true")),
        },
    ),
    SPELLINGS,
    SPELLINGS,
)
Entry = Mapping[str, Any]


def normalized(entry: Entry) -> tuple[str, str]:
    """As containerd does."""
    platform = entry.get("platform") or {}
    processor = str(platform.get("architecture", "")).lower()
    alias = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}
    return str(platform.get("os", "")).lower(), alias.get(processor, processor)


def exact(entry: Entry) -> tuple[str, str]:
    platform = entry.get("platform") or {}
    return str(platform.get("os", "")), str(platform.get("architecture", ""))


def zstd_first(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda one: ZSTD not in one.get("annotations", {}))


def variants_first(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda one: (one.get("platform") or {}).get("variant", ""), reverse=True)


TOOLS: list[tuple[Callable[[Entry], tuple[str, str]], Callable[[list[Entry]], list[Entry]]]] = [
    (platform_of, order)
    for platform_of in (normalized, exact)
    for order in (list, zstd_first, variants_first, lambda found: found[::-1])
]


FOR_AMD64 = {"os": "linux", "architecture": "amd64"}


@given(st.lists(ENTRIES, min_size=1, max_size=4))
@example([{"platform": {"OS": "linux", "Architecture": "amd64"}}, {"platform": FOR_AMD64}])
@example([{"Platform": FOR_AMD64}, {"platform": FOR_AMD64}])
def test_every_tool_takes_the_same_image_of_an_index_that_counts(entries: list[Entry]) -> None:
    rows = [
        {
            "mediaType": MANIFEST_TYPE,
            "size": 1,
            "digest": digest(f"{number}"),
            **entry,
        }
        for number, entry in enumerate(entries)
    ]
    root = manifest({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows}, INDEX_TYPE)
    try:
        check_unambiguous(root)
        ours = choose_platform(root, "linux/amd64").digest
    except RegistryError:
        return
    ours = rows[0]["digest"] if ours == root.descriptor.digest else ours
    rows = read_as_go_does(root.data.decode())["manifests"]
    for platform_of, order in TOOLS:
        fitting = order([row for row in rows if platform_of(row) == ("linux", "amd64")])
        taken = fitting or order([row for row in rows if "platform" not in row])
        assert not taken or taken[0]["digest"] == ours


def manifest(value: object, kind: str) -> Manifest:
    data = json.dumps(value).encode() if not isinstance(value, bytes) else value
    descriptor = Descriptor(media_type=kind, digest=digest_of(data), size=len(data))
    return Manifest(descriptor=descriptor, data=data)


# --- how Go reads the bytes ---------------------------------------------------------------------------

NAMES = st.sampled_from(
    ["config", "Config", "layers", "LAYERS", "layer\u017f", "mediaType", "mediatype", "manifests"]
)
A, B = digest("a"), digest("b")
GOOD = f'{{"mediaType": "a", "digest": "{A}", "size": 1}}'
VALUES = st.sampled_from([
    f'{{"mediaType": "a", "digest": "{A}", "size": 1}}',
    f'{{"mediaType": "a", "digest": "{A}", "Digest": "{B}", "size": 1}}',
    f'[{{"mediaType": "a", "digest": "{A}", "size": 1}}]',
    f'[{{"mediaType": "a", "digest": "{B}", "size": 1}}]',
    "[]",
    json.dumps(MANIFEST_TYPE),
    json.dumps(INDEX_TYPE),
])  # fmt: skip


def read_as_go_does(text: str) -> Any:
    """Names without regard to case, and the last one counts (encoding/json)."""
    return json.loads(text, object_pairs_hook=lambda pairs: {name.casefold(): value for name, value in pairs})


@given(st.lists(st.tuples(NAMES, VALUES), max_size=2), st.randoms())
def test_what_is_read_is_what_go_reads(more: list[tuple[str, str]], order: Random) -> None:
    pairs = [("config", GOOD), ("layers", f"[{GOOD}]"), *more]
    order.shuffle(pairs)
    text = "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in pairs) + "}"
    with suppress(RegistryError):
        children, blobs = parse_parts(manifest(text.encode(), MANIFEST_TYPE))
        theirs = read_as_go_does(text)
        assert not children
        assert "manifests" not in theirs
        rows = (theirs["config"], *theirs["layers"])
        assert [blob.digest for blob in blobs] == [row["digest"] for row in rows]


# --- retired keys -------------------------------------------------------------------------------------

HOURS = st.integers(-72, 72)


@given(HOURS, HOURS, HOURS, st.booleans(), st.booleans())
def test_after_its_time_a_key_is_believed_for_what_was_seen_in_it_alone(
    issued: int, until: int, now: int, recorded: bool, vouched: bool
) -> None:
    """Whatever date its holder writes."""
    at, end, read = (NOW + timedelta(hours=hours) for hours in (issued, until, now))
    signed = sign(whole_report(started=at, ended=at), LAB, now=at, days=90)
    known = frozenset({signed.verdict.digest} if recorded else {digest("5")})
    (lab,) = COURT.trust.keys
    trust = replace(COURT.trust, keys=(replace(lab, until=end, signed=known),))
    court = replace(COURT, trust=trust, now=read, vouched=vouched)
    good = verify_verdict(signed.envelope, digest("9"), SUBJECT, court).standing is VerdictStatus.GOOD
    in_time = at < end or (at == end and recorded)  # times have whole seconds
    assert not good or (in_time and (read < end or recorded or vouched))
    assert good or not in_time or (read >= end and not recorded and not vouched) or at - read > SKEW


@given(HOURS, HOURS, HOURS)
def test_a_catalog_of_a_key_counts_in_its_time_alone(made: int, until: int, now: int) -> None:
    at, end, read = (NOW + timedelta(hours=hours) for hours in (made, until, now))
    data = sign_catalog(make_catalog(created=at, expires=at + LIFE), LAB)
    (lab,) = COURT.trust.keys
    trust = replace(COURT.trust, keys=(replace(lab, until=end),))
    with suppress(StatementError):
        assert verify_catalog(data, trust, read).keyid == LAB.keyid
        assert read < end
        assert at < end
        return
    assert read >= end or at >= end or at - read > SKEW


@given(HOURS, HOURS, st.booleans())
def test_a_retired_key_takes_back_what_is_of_its_time_alone(issued: int, until: int, named: bool) -> None:
    at, end = (NOW + timedelta(hours=hours) for hours in (issued, until))
    now = NOW + timedelta(hours=100)
    signed = sign(whole_report(started=at, ended=at), STRANGER, now=at, days=90)
    (lab,) = COURT.trust.keys
    court = replace(COURT, trust=replace(COURT.trust, keys=(replace(lab, until=end),)), now=now)
    names = (signed.verdict.digest,) if named else ()
    envelope = sign_revocation(
        RevocationRequest(subject=SUBJECT, why="no", verdicts=names), LAB, end - timedelta(seconds=1)
    )
    heeded = verify_revocations({digest("r"): envelope}, SUBJECT, court).heeded
    assert any(one.covers(signed.verdict) for one in heeded) is (at < end)
