"""A catalog is read as it was signed, or refused with the word that says why."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions.read_catalog import read_catalog
from imagefactory.errors import (
    NothingSelectedError,
    StatementError,
    UsageError,
)
from imagefactory.gpu.capability import Capability
from imagefactory.model import Outcome
from imagefactory.settings.load import load_settings
from imagefactory.trust.catalog import (
    FORM,
    LIFE,
    Catalog,
    format_catalog,
    format_image,
    open_catalog,
    parse_catalog,
    sign_catalog,
    verify_catalog,
)
from imagefactory.trust.catalog_package import catalog_repository, pack_artifact, parse_layer
from imagefactory.trust.claims import verified_claims
from imagefactory.trust.envelope import MOST_VALUES, format_json, parse_envelope, sign_envelope
from imagefactory.trust.judgement import RevocationRequest, sign_revocation
from imagefactory.trust.offers import build_artifact, find_offer
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import VerdictStatus
from tests.made.catalog import (
    PREDICTED,
    SIF_SUBJECT,
    envelope_of,
    make_catalog,
    make_image,
    old_catalog,
    old_payload,
    signed,
    with_envelope,
)
from tests.made.errors import fails
from tests.made.trusted import write_settings
from tests.made.verdicts import (
    DAY,
    LAB,
    LAB_TRUSTED,
    NOW,
    STRANGER,
    SUBJECT,
    TRUST,
    digest,
    payload_of,
    whole_report,
    with_payload,
)
from tests.services.tier import many

TARGET = SUBJECT.target


@pytest.fixture(scope="module")
def data() -> bytes:
    return sign_catalog(make_catalog(), LAB)


@pytest.fixture(scope="module")
def envelope(data: bytes) -> bytes:
    return envelope_of(data)


def test_an_image_for_cpus_is_read_as_one() -> None:
    image = make_image(cuda="none", required=(), predicted=(), runtime="", driver="", envelopes=())
    data = sign_catalog(make_catalog(image), LAB)
    (read,) = verify_catalog(data, TRUST, NOW).images
    assert (read, read.gpu) == (image, False)


def test_an_image_for_amd_is_read_as_one() -> None:
    predicted = (("gfx90a", PREDICTED),)
    image = make_image(
        cuda="rocm7", required=("gfx90a",), predicted=predicted, runtime="", driver="", envelopes=()
    )
    (read,) = verify_catalog(sign_catalog(make_catalog(image), LAB), TRUST, NOW).images
    assert (read, read.gpu) == (image, True)


def test_what_is_read_is_what_was_signed(data: bytes) -> None:
    assert verify_catalog(data, TRUST, NOW) == make_catalog()
    assert sign_catalog(make_catalog(), LAB) == data


def test_an_old_catalog_is_read() -> None:
    old = old_catalog(make_catalog())
    for file in (old, pack_artifact(old)):
        assert verify_catalog(file, TRUST, NOW) == make_catalog()


def test_an_image_is_read_when_it_is_used() -> None:
    other = make_image(target="jax-0.4-cu12", family="jax", framework="jax")
    file = open_catalog(sign_catalog(make_catalog(make_image(), other), LAB), "x")
    read: list[tuple[int, int]] = []

    def record(start: int, size: int) -> bytes:
        read.append((start, size))
        return file.read(start, size)

    catalog = verify_catalog(replace(file, read=record), TRUST, NOW)
    assert [(row.target, row.verified, row.predicted) for row in catalog.entries] == [
        (TARGET, "8.0", "7.0"),
        ("jax-0.4-cu12", "8.0", "7.0"),
    ]
    assert not read
    assert find_offer(catalog, "jax-0.4-cu12", TRUST, NOW).image.family == "jax"
    assert read == [(file.end - catalog.entries[1].size, catalog.entries[1].size)]
    assert catalog.images[-1] is catalog.images[1]
    with pytest.raises(IndexError):
        catalog.images[2]


def test_an_image_that_was_not_signed_is_refused(data: bytes) -> None:
    start = open_catalog(data, "x").start
    for at in range(start, len(data), 97):
        changed = verify_catalog(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], TRUST, NOW)
        with fails("catalog-corrupt"):
            changed.images[0]
    for file in (data[:-1], data + b"x", data[:start]):
        with fails("catalog-corrupt"):
            verify_catalog(file, TRUST, NOW)


def _signed_index(image: bytes, **changes: Any) -> Catalog:
    """The catalog of one image, whose bytes and row a trusted key signed whatever they are."""
    payload, _ = format_catalog(make_catalog())
    index = json.loads(payload)
    (row,) = index["images"]
    row |= {"sha256": f"sha256:{hashlib.sha256(image).hexdigest()}", "size": len(image), **changes}
    return verify_catalog(sign_envelope(format_json(index), LAB, FORM) + b"\n" + image, TRUST, NOW)


def test_an_image_is_parsed_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    good = format_json(format_image(make_image()))
    assert _signed_index(pack_artifact(good)).images[0] == make_image()
    for image, changes in (
        (pack_artifact(good), {"version": "2.4.0"}),  # the index names another
        (pack_artifact(good), {"target": "pytorch-2.4-cu121"}),
        (pack_artifact(good + b" "), {}),
        (pack_artifact(b"{}"), {}),
        (pack_artifact(good) + pack_artifact(b"x"), {}),
        (pack_artifact(good)[:-1], {}),
    ):
        with fails("document-invalid"):
            _signed_index(image, **changes).images[0]
    with fails("catalog-corrupt"):
        _signed_index(good).images[0]  # not compressed
    monkeypatch.setattr("imagefactory.trust.catalog.LARGEST", len(good) - 1)
    with fails("document-invalid"):
        _signed_index(pack_artifact(good)).images[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "../x"},
        {"size": 0},
        {"size": True},
        {"sha256": "x"},
        {"verified": "99"},
        {"verified": "8.0 "},
        {"predicted": ["8.0"]},
        {"cuda": "12.1\n"},
        {"more": 1},
    ],
)
def test_a_row_of_the_index_is_parsed_strictly(changes: dict[str, Any]) -> None:
    with fails("catalog-rejected"):
        _signed_index(pack_artifact(format_json(format_image(make_image()))), **changes)


@pytest.mark.parametrize(
    ("trust", "now", "word"),
    [
        (TrustRules(), NOW, "wrong-key"),
        (replace(TRUST, keys=(replace(LAB_TRUSTED, until=NOW - DAY),)), NOW, "key-retired"),
        (replace(TRUST, keys=(replace(LAB_TRUSTED, since=NOW),)), NOW, "wrong-key"),
        (TRUST, NOW + LIFE, "expired"),
        (TRUST, NOW - DAY, "not-yet"),
    ],
)
def test_what_does_not_hold_is_refused(data: bytes, trust: TrustRules, now: Any, word: str) -> None:
    with fails("catalog-rejected") as caught:
        verify_catalog(data, trust, now, "/a/file")
    assert "/a/file" in caught.value.message
    assert f" {word}, " in caught.value.message
    assert caught.value.hint
    assert ("imagefactory site join" in caught.value.hint) == (word in ("wrong-key", "key-retired"))


def test_a_forged_one_is_refused(envelope: bytes) -> None:
    other, _ = format_catalog(make_catalog(make_image(size=1)))
    for forged, word in (
        (with_payload(envelope, other), "edited"),
        (format_json({**json.loads(envelope), "signatures": []}), "unsigned"),
        (sign_envelope(other, STRANGER, FORM), "wrong-key"),
        (sign_envelope(other, LAB), "malformed"),  # as an in-toto statement
        (sign_envelope(b"{}", LAB, FORM), "malformed"),
        (signed(whole_report(), "1")[1], "malformed"),
        (envelope[:-1], "malformed"),
        (b"", "malformed"),
    ):
        with fails("catalog-rejected") as caught:
            verify_catalog(forged, TRUST, NOW)
        assert f" {word}, " in caught.value.message


def test_a_catalog_is_no_verdict(envelope: bytes) -> None:
    with fails("document-invalid") as caught:
        parse_envelope(envelope, "x")
    assert "payloadType" in caught.value.message


def _changed(change: Any) -> bytes:
    value = json.loads(old_payload(make_catalog()))
    change(value)
    return format_json(value)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(format=2),
        lambda v: v.update(format=True),
        lambda v: v.update(more=1),
        lambda v: v.update(expires="2027-11-22T02:00:00Z"),
        lambda v: v.update(expires=v["created"]),
        lambda v: v.update(images={}),
        lambda v: v["images"].append(v["images"][0]),
        lambda v: v["suites"].append("md5:x"),
        lambda v: v["images"][0].update(target="../x"),
        lambda v: v["images"][0].update(target="x\nrequirements = true"),
        lambda v: v["images"][0].update(reference=f"registry.example.org/gpu/pytorch@{digest('e')}"),
        lambda v: v["images"][0].update(reference="registry.example.org/gpu/pytorch:latest"),
        lambda v: v["images"][0].update(reference=f"registry.example.org/x\n+a=1@{SUBJECT.index}"),
        lambda v: v["images"][0].update(reference=None),
        lambda v: v["images"][0].update(size=-1),
        lambda v: v["images"][0].update(size=1.5),
        lambda v: v["images"][0].update(unpacked=True),
        lambda v: v["images"][0].update(minor_compat=1),
        lambda v: v["images"][0].update(runtime="12.1\n"),
        lambda v: v["images"][0].update(version="2.3 && rm"),
        lambda v: v["images"][0]["required"].append("99"),
        lambda v: v["images"][0]["predicted"][0].update(basis="verified"),
        lambda v: v["images"][0]["predicted"][0].update(answer="perhaps"),
        lambda v: v["images"][0]["predicted"][0].update(reason="a\x1b[2J"),
        lambda v: v["images"][0]["sifs"][0].update(sha256=digest("e")),
        lambda v: v["images"][0]["subject"].update(target="x"),
        lambda v: v["images"][0].update(envelopes=[]),
        lambda v: v["images"][0].update(envelopes={"x": {}}),
    ],
)
def test_what_the_formatter_does_not_write_is_refused(change: Any) -> None:
    with pytest.raises(StatementError):
        parse_catalog(_changed(change), "x", LAB.keyid)


def test_bytes_changed_anywhere_end_in_a_refusal(data: bytes, envelope: bytes) -> None:
    chance = random.Random(7)
    for _ in range(many(100, 3000)):
        changed = bytearray(data if chance.random() < 0.5 else with_envelope(data, envelope))
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        if chance.random() < 0.3:
            del changed[chance.randrange(len(changed)) :]
        try:
            read = verify_catalog(bytes(changed), TRUST, NOW)
            same = read == make_catalog()
        except StatementError:
            continue
        assert same  # a change that gzip's header does not mind


def test_nothing_is_signed_that_nobody_would_read() -> None:
    with pytest.raises(StatementError):
        sign_catalog(make_catalog(make_image(version="a b")), LAB)
    with pytest.raises(StatementError):
        sign_catalog(make_catalog(make_image(), make_image()), LAB)


def test_an_offer_has_its_verdicts_judged_by_the_reader() -> None:
    offer = find_offer(make_catalog(), TARGET, TRUST, NOW)
    (judged,) = offer.judged
    assert judged.proves
    assert judged.digest == digest("1")
    assert set(verified_claims(offer.judged)) == {Capability(8, 0)}
    assert [one.judged[0].standing for one in offer.sifs] == [VerdictStatus.GOOD]


def test_a_catalog_makes_no_verdict_good() -> None:
    """Its signature stands for what it lists; each verdict stands on its own."""
    cases = (
        (replace(TRUST, keys=()), NOW, VerdictStatus.WRONG_KEY),
        (TRUST, NOW + 40 * DAY, VerdictStatus.EXPIRED),
        (replace(TRUST, policy=replace(TRUST.policy, evidence=())), NOW, VerdictStatus.EVIDENCE_REFUSED),
    )
    for trust, now, standing in cases:
        (judged,) = find_offer(make_catalog(), TARGET, trust, now).judged
        assert judged.standing is standing
    other = make_image(subject=replace(SUBJECT, manifest=digest("e"), config=digest("f")))
    (judged,) = find_offer(make_catalog(other), TARGET, TRUST, NOW).judged
    assert judged.standing is VerdictStatus.OTHER_SUBJECT


def test_the_suites_of_the_catalog_count() -> None:
    (judged,) = find_offer(make_catalog(suites=()), TARGET, TRUST, NOW).judged
    assert judged.standing is VerdictStatus.OTHER_SUITE


def test_a_verdict_on_an_image_says_nothing_of_its_sif() -> None:
    image = make_image()
    (sif,) = image.sifs
    swapped = replace(image, envelopes=sif.envelopes, sifs=(replace(sif, envelopes=image.envelopes),))
    offer = find_offer(make_catalog(swapped), TARGET, TRUST, NOW)
    assert [one.standing for one in (*offer.judged, *offer.sifs[0].judged)] == [
        VerdictStatus.OTHER_SUBJECT
    ] * 2


def test_what_was_taken_back_is_not_offered() -> None:
    withdrawal = RevocationRequest(subject=SUBJECT, why="it was a bad night")
    back = sign_revocation(withdrawal, LAB, NOW + timedelta(minutes=1))
    image = make_image(revocations=((digest("3"), back),))
    offer = find_offer(make_catalog(image), TARGET, TRUST, NOW + timedelta(minutes=2))
    assert [one.standing for one in offer.judged] == [VerdictStatus.REVOKED]
    assert [one.standing for one in offer.sifs[0].judged] == [VerdictStatus.GOOD]
    forged = make_image(revocations=((digest("3"), sign_revocation(withdrawal, STRANGER, NOW)),))
    assert [one.proves for one in find_offer(make_catalog(forged), TARGET, TRUST, NOW).judged] == [True]


def test_a_nonce_counts_once() -> None:
    report = whole_report(outcome=Outcome.WRONG_NUMBERS, reason="a number is off")
    image = make_image(envelopes=(signed(whole_report(), "1"), signed(report, "2")))
    standings = [one.standing for one in find_offer(make_catalog(image), TARGET, TRUST, NOW).judged]
    assert sorted(standings) == [VerdictStatus.GOOD, VerdictStatus.REPLAYED]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pytroch-2.3-cu121", f"did you mean '{TARGET}'?"),
        ("pytorch-2.3-cu12", f"of pytorch-2.3 there is {TARGET}"),
        ("jax", f"choose from {TARGET}"),
        ("a\nb", f"choose from {TARGET}"),
    ],
)
def test_the_nearest_name_is_told(name: str, hint: str) -> None:
    with pytest.raises(NothingSelectedError) as caught:
        find_offer(make_catalog(), name, TRUST, NOW)
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["pytorch", "pytorch-2.3", "pytorch-2", "pytorch-*"])
def test_a_family_or_a_beginning_is_enough(name: str) -> None:
    assert find_offer(make_catalog(), name, TRUST, NOW).image.target == TARGET


def test_an_empty_catalog_says_so() -> None:
    with fails("catalog-empty"):
        find_offer(make_catalog(images=()), TARGET, TRUST, NOW)


def test_an_image_that_is_a_sif_says_so() -> None:
    image = make_image()
    assert not image.only_sif
    assert replace(image, subject=SIF_SUBJECT).only_sif


def _read(folder: Path, place: str = "./catalog.json", more: str = "") -> Catalog:
    text = (
        f'catalog = "{place}"\n[[trust]]\nname = "lab"\nkeyid = "{LAB.keyid}"\n'
        f'public = "{payload_key()}"\nfrom = 2026-10-01\nuntil = 2027-10-01\n{more}'
    )
    environ = {"HOME": str(folder / "home"), "XDG_CONFIG_DIRS": str(folder / "site")}
    write_settings(folder, text, environ)
    settings = load_settings(directory=folder, start=folder, environ=environ)
    return read_catalog(settings, environ, NOW)


def payload_key() -> str:
    return base64.b64encode(LAB.public).decode("ascii")


def test_a_file_is_read_packed_or_not(tmp_path: Path, data: bytes, envelope: bytes) -> None:
    for file in (data, with_envelope(data, envelope)):
        (tmp_path / "catalog.json").write_bytes(file)
        assert _read(tmp_path) == make_catalog()
    assert pack_artifact(envelope) == pack_artifact(envelope)


def test_an_older_one_does_not_come_back(tmp_path: Path) -> None:
    """It may be without a revocation that the newer one has; who never saw that cannot know."""
    path, cache = tmp_path / "catalog.json", tmp_path / "home/.cache/imagefactory"
    old = make_catalog()
    new = replace(old, created=old.created + timedelta(seconds=1))
    for one in (old, new, new):
        path.write_bytes(sign_catalog(one, LAB))
        assert _read(tmp_path) == one
    path.write_bytes(sign_catalog(old, LAB))
    with pytest.raises(StatementError) as caught:
        _read(tmp_path)
    (seen,) = (cache / "catalogs-seen").iterdir()
    assert str(seen) in caught.value.hint
    other = tmp_path / "other.json"
    other.write_bytes(path.read_bytes())
    assert _read(tmp_path, "./other.json") == old  # another place is another series
    seen.write_bytes(b"\xffwhat is this")
    assert _read(tmp_path) == old
    shutil.rmtree(cache)
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("no folder")
    assert _read(tmp_path) == old


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x1f\x8b nothing", "catalog-corrupt"),
        (pack_artifact(b"0" * 200_000), "catalog-too-large"),
        (pack_artifact(b"{}")[:-9], "catalog-corrupt"),
        (b"", "catalog-rejected"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, data: bytes, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagefactory.trust.catalog.LARGEST", 100_000)
    path = tmp_path / "catalog.json"
    with pytest.raises(UsageError) as missing:
        _read(tmp_path)
    assert str(path) in missing.value.message
    assert missing.value.hint
    path.write_bytes(data)
    with fails(code) as caught:
        _read(tmp_path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_without_a_catalog_the_directory_must_be_a_project(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path)}
    settings = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    with fails("project-not-found", hint="imagefactory init"):
        read_catalog(settings, environ, NOW)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("registry.example.org", "registry.example.org/catalog:current"),
        ("registry.example.org:5000", "registry.example.org:5000/catalog:current"),
        ("registry.example.org/gpu", "registry.example.org/gpu/catalog:current"),
        ("localhost:5000/gpu:20261122-0123", "localhost:5000/gpu/catalog:20261122-0123"),
        ("registry.example.org/gpu/catalog:old", "registry.example.org/gpu/catalog:old"),
    ],
)
def test_a_place_names_the_catalog_in_it(text: str, reference: str) -> None:
    assert str(catalog_repository(text)) == reference


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 1e400),
        ("size", True),
        ("size", "5"),
        ("size", 0),
        ("size", 1 << 40),
        ("digest", "../../secret"),
        ("digest", "sha256:x"),
        ("mediaType", "text/plain"),
    ],
)
def test_a_manifest_that_is_none_of_a_catalog_is_refused(envelope: bytes, field: str, value: object) -> None:
    """A layer's digest names a file of the cache, and its size what is fetched."""
    manifest = json.loads(build_artifact(envelope, NOW).manifest.data)
    assert parse_layer(json.dumps(manifest).encode(), "x").size == len(pack_artifact(envelope))
    manifest["layers"][0][field] = value
    with fails("artifact-malformed"):
        parse_layer(json.dumps(manifest).encode(), "x")


def test_a_file_is_gzip_with_json_that_others_can_read(data: bytes) -> None:
    envelope, _, image = gzip.decompress(data).partition(b"\n")
    assert payload_of(envelope)["images"][0]["target"] == TARGET
    assert json.loads(image)["envelopes"][digest("1")]["payloadType"] == "application/vnd.in-toto+json"


def test_a_light_install_reads_it(tmp_path: Path, data: bytes) -> None:
    """Without a compiled library, and from a file without anything that asks a network."""
    (tmp_path / "catalog.json").write_bytes(data)
    _read(tmp_path)  # writes the settings
    program = f"""
import sys
for name in ("cryptography", "tomlkit", "requests", "tenacity", "rich", "jinja2", "uv", "zstandard", "isal"):
    sys.modules[name] = None
from datetime import datetime
from pathlib import Path
from imagefactory.trust.offers import find_offer
from imagefactory.actions.read_catalog import read_catalog
from imagefactory.settings.load import load_settings
from imagefactory.trust.policy import read_trust
environ = {{"HOME": {str(tmp_path / "home")!r}, "XDG_CONFIG_DIRS": "/nowhere"}}
settings = load_settings(directory=None, start=Path.cwd(), environ=environ)
now = datetime.fromisoformat({NOW.isoformat()!r})
offer = find_offer(read_catalog(settings, environ, now), {TARGET!r}, read_trust(settings.files), now)
print(*[one.standing for one in offer.judged])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["good"]


_CHILD = """
import resource, sys
from imagefactory.trust.catalog import open_catalog, verify_catalog
from imagefactory.errors import StatementError
from tests.made.verdicts import NOW, TRUST
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
try:
    verify_catalog(open_catalog(open(sys.argv[1], "rb"), "x"), TRUST, NOW)
except StatementError as error:
    print(error.message.partition(": ")[2].partition(",")[0], peak() - before)
"""


def _unsigned(payload: bytes, keyid: str = "") -> bytes:
    signature = base64.b64encode(bytes(64)).decode()
    return format_json(
        {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": FORM.payload_type,
            "signatures": [{"keyid": keyid, "sig": signature}] if keyid else [],
        }
    )


def _nested(size: int) -> bytes:
    return b'{"images":[' + b"[]," * (size // 3) + b"[]]}"


@pytest.mark.parametrize(
    ("make", "word", "bound"),
    [
        pytest.param(
            lambda: b'{"payload":' + _nested(88_000_000) + b',"payloadType":"","signatures":[]}',
            "malformed",
            150,
            id="nested in the envelope",
        ),
        pytest.param(lambda: _unsigned(_nested(66_000_000)), "unsigned", 250, id="unsigned"),
        pytest.param(lambda: pack_artifact(_unsigned(_nested(66_000_000))), "unsigned", 300, id="packed"),
        pytest.param(lambda: _unsigned(_nested(66_000_000), LAB.keyid), "edited", 300, id="forged"),
        pytest.param(lambda: sign_envelope(_nested(66_000_000), LAB, FORM), "malformed", 300, id="signed"),
        pytest.param(
            lambda: sign_envelope(
                b"[" + b'{"a":0},' * 1_330_000 + b'"' + b"x" * 50_000_000 + b'"]', LAB, FORM
            ),
            "malformed",
            750,
            id="signed with as many values as may be",
        ),
    ],
)
def test_a_large_catalog_takes_little_memory(
    tmp_path: Path, make: Callable[[], bytes], word: str, bound: int
) -> None:
    """MiB in a process of its own; the first took 2,300, what is signed 1,800."""
    path = tmp_path / "catalog"
    path.write_bytes(make())
    run = [sys.executable, "-c", _CHILD, str(path)]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == word
    assert int(said[1]) < bound


def test_the_largest_catalog_has_few_values_for_what_may_be() -> None:
    """5,000 images with two verdicts each, where 12 claims are predicted of each."""
    image = make_image(sifs=(), predicted=(("7.0", PREDICTED),) * 12, envelopes=make_image().envelopes * 2)
    payload = format_catalog(make_catalog(*(image for _ in range(10))))
    values = sum(payload.count(mark) for mark in (b",", b":", b"[", b"{"))
    assert values * 500 < MOST_VALUES / 2


@pytest.mark.parametrize("tail", ["AB==", "ABC=", "AAA", "A===", "AA=A", "AAAA\n", "AA-_", "AAAAA"])
def test_base64_has_one_spelling(tail: str) -> None:
    value = {"payload": f"AAAA{tail}", "payloadType": FORM.payload_type, "signatures": []}
    with fails("document-invalid") as caught:
        parse_envelope(format_json(value), "x", FORM)
    assert "base64" in caught.value.message
