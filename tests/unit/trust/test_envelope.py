"""Forged and mutated verdicts: hundreds of them, near to good ones, and none proves anything.

Three kinds of forgers: without a key, with a key of their own, and a trusted key's holder whose program signs
what it should not. Every change starts from a verdict that is good, which a control shows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from imagefactory.errors import StatementError
from imagefactory.trust import envelope
from imagefactory.trust.envelope import format_json, parse_envelope
from imagefactory.trust.judgement import verify_verdict
from imagefactory.trust.verdict import (
    VerdictStatus,
    VerificationResult,
    format_statement,
    format_verdict,
    parse_verdict,
    sign,
)
from tests.made.verdicts import (
    COURT,
    LAB,
    LAB_TRUSTED,
    NOW,
    STRANGER,
    SUBJECT,
    TRUST,
    digest,
    payload_of,
    sealed,
    whole_report,
    with_payload,
)

SIGNED = sign(whole_report(), LAB, now=NOW, days=90)
OTHER = sign(
    whole_report(subject=replace(SUBJECT, manifest=digest("1"), config=digest("2")), nonce="f" * 32),
    LAB,
    now=NOW,
    days=90,
)
STATEMENT = payload_of(SIGNED.envelope)
ENVELOPE = json.loads(SIGNED.envelope)
BOTH = replace(
    TRUST,
    keys=(LAB_TRUSTED, replace(LAB_TRUSTED, name="two", keyid=STRANGER.keyid, public=STRANGER.public)),
)
SCHEMA = json.loads((files("imagefactory.trust") / "verdict.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)

Path = tuple[str | int, ...]


def judge(data: bytes) -> VerificationResult:
    return verify_verdict(data, digest("9"), SUBJECT, COURT)


def test_the_original_is_good() -> None:
    assert judge(SIGNED.envelope).proves


@pytest.mark.parametrize("is_signed", [envelope.is_signed_by, envelope._is_signed_without_cryptography])
def test_a_signature_is_of_one_key_over_these_bytes(is_signed: Callable[..., bool]) -> None:
    good = parse_envelope(SIGNED.envelope, "x")
    assert is_signed(good, LAB.keyid, LAB.public)
    for changed in (
        replace(good, payload=good.payload + b" "),
        replace(good, payload_type=good.payload_type + "+x"),
        replace(good, signature=bytes(64)),
        replace(good, signature=b""),
        replace(good, signature=parse_envelope(OTHER.envelope, "x").signature),
    ):
        assert not is_signed(changed, LAB.keyid, LAB.public)
    assert not is_signed(good, STRANGER.keyid, LAB.public)
    assert not is_signed(good, LAB.keyid, STRANGER.public)
    assert not is_signed(good, LAB.keyid, LAB.public[:-1])
    assert VALIDATOR.is_valid(STATEMENT)
    assert judge(sealed(format_json(STATEMENT))).proves  # signed anew, the same bytes


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every node, the root left out; of the rows of checks the first two stand for all."""
    items: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(list(enumerate(value))[:2])
    for key, child in items:
        yield (*path, key)
        yield from paths(child, (*path, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def with_value(value: Any, path: Path, new: Any) -> Any:
    result = deepcopy(value)
    at(result, path[:-1])[path[-1]] = new
    return result


def without(value: Any, path: Path) -> Any:
    result = deepcopy(value)
    del at(result, path[:-1])[path[-1]]
    return result


def near(value: Any) -> list[Any]:
    """Values beside this one: those that a forger would like to have there, and those that break readers."""
    if isinstance(value, bool):
        return [not value, int(value), None]
    if isinstance(value, int | float):
        return [value + 1, -value - 1, str(value), True, 1e301, None]
    if isinstance(value, str):
        flipped = value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x"
        return [
            flipped,
            value + "\n",
            value + "\u202e",
            value + "\u0000",
            "\ud800",
            "x" * 5000,
            [value],
            7,
            None,
        ]
    if isinstance(value, list):
        return [[], [*value, *value[:1]], [*value, None], value * 300, {"0": value}, None]
    return [{}, {**value, "more": 1}, [value], None]


CHANGES = [
    (path, number)
    for path in paths(STATEMENT)
    for number in range(len(near(at(STATEMENT, path))) + 1)  # the last takes it away
]


def changed(path: Path, number: int) -> Any:
    values = near(at(STATEMENT, path))
    return with_value(STATEMENT, path, values[number]) if number < len(values) else without(STATEMENT, path)


def test_no_field_can_be_changed_under_a_signature() -> None:
    assert len(CHANGES) > 500
    for path, number in CHANGES:
        document = changed(path, number)
        if document == STATEMENT:  # an empty list that stays one
            continue
        judged = judge(with_payload(SIGNED.envelope, format_json(document)))
        assert judged.standing in (VerdictStatus.EDITED, VerdictStatus.MALFORMED), (path, number, judged)


def test_no_byte_of_an_envelope_can_be_changed() -> None:
    data = SIGNED.envelope
    for position in range(0, len(data), 7):
        for bit in (1, 32):
            edited = bytearray(data)
            edited[position] ^= bit
            judged = judge(bytes(edited))
            assert judged.standing is not VerdictStatus.GOOD, (position, bit)
    for end in range(0, len(data), 97):
        assert judge(data[:end]).standing is VerdictStatus.MALFORMED
        assert judge(data[:end] + data[end + 1 :]).standing is not VerdictStatus.GOOD


def _signature(**changes: Any) -> bytes:
    return format_json({**ENVELOPE, "signatures": [{**ENVELOPE["signatures"][0], **changes}]})


def _spelt(text: str) -> bytes:
    return format_json(ENVELOPE).replace(b'"payloadType":', text.encode() + b'"payloadType":', 1)


def _malleable() -> bytes:
    """S and S plus the group's order are the same to a verifier that does not look."""
    raw = base64.b64decode(ENVELOPE["signatures"][0]["sig"])
    order = (1 << 252) + 27742317777372353535851937790883648493
    s = int.from_bytes(raw[32:], "little") + order
    return _signature(sig=base64.b64encode(raw[:32] + s.to_bytes(32, "little")).decode())


RAW = base64.b64decode(ENVELOPE["signatures"][0]["sig"])
SIG = ENVELOPE["signatures"][0]
ENVELOPES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"PASSED",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1" * 5000,
    "NaN": b"NaN",
    "empty": b"{}",
    "deep": b"[" * 200_000,
    "huge": format_json({**ENVELOPE, "payload": "A" * (2 << 20)}),
    "padded": SIGNED.envelope + b" " * (2 << 20),
    "a space": SIGNED.envelope + b" ",
    "a line": SIGNED.envelope + b"\n",
    "indented": json.dumps(ENVELOPE, indent=1, sort_keys=True).encode(),
    "a mark of byte order": b"\xef\xbb\xbf" + SIGNED.envelope,
    "UTF-16": SIGNED.envelope.decode().encode("utf-16"),
    "UTF-32": SIGNED.envelope.decode().encode("utf-32-le"),
    "Latin": SIGNED.envelope.replace(b"application", b"applic\xe4tion"),
    "escapes": SIGNED.envelope.replace(b"application", b"\\u0061pplication"),
    "two": SIGNED.envelope * 2,
    "the statement alone": format_json(STATEMENT),
    "the predicate alone": format_json(STATEMENT["predicate"]),
    "signed by nobody": format_json({**ENVELOPE, "signatures": []}),
    "signatures null": format_json({**ENVELOPE, "signatures": None}),
    "signatures an object": format_json({**ENVELOPE, "signatures": SIG}),
    "signed twice": format_json({**ENVELOPE, "signatures": [SIG, SIG]}),
    "signed by a second": format_json({**ENVELOPE, "signatures": [SIG, {**SIG, "keyid": STRANGER.keyid}]}),
    "a signature of text": format_json({**ENVELOPE, "signatures": ["good"]}),
    "a further field": format_json({**ENVELOPE, "standing": "good"}),
    "a further field of the signature": _signature(cert="x"),
    "payload twice": _spelt(f'"payload":"{ENVELOPE["payload"]}",'),
    "another payload first": _spelt('"payload":"e30=",'),
    "another type first": _spelt('"payloadType":"text/plain",'),
    "signatures twice": SIGNED.envelope.replace(b'"signatures":', b'"signatures":[],"signatures":'),
    **{
        f"type {kind!r}": format_json({**ENVELOPE, "payloadType": kind})
        for kind in (
            "application/vnd.in-toto+json ",
            "application/vnd.in-toto+JSON",
            "application/json",
            "application/vnd.imagefactory.verdict.v1+json",
            "",
            None,
            ["application/vnd.in-toto+json"],
        )
    },
    **{
        f"key {keyid!r}": _signature(keyid=keyid)
        for keyid in (
            "",
            "lab",
            STRANGER.keyid,
            LAB.keyid.upper(),
            LAB.keyid + " ",
            LAB.keyid[:16],
            None,
            1,
            [],
        )
    },
    **{
        f"signature {number}": _signature(sig=base64.b64encode(raw).decode())
        for number, raw in enumerate(
            (
                b"",
                bytes(64),
                b"\xff" * 64,
                RAW[:-1],
                RAW + b"\0",
                RAW[32:] + RAW[:32],
                RAW[:32] + bytes(32),
                bytes(32) + RAW[32:],
                b"\x01" + bytes(63),
                RAW * 2,
            )
        )
    },
    **{
        f"spelling {number}": _signature(sig=text)
        for number, text in enumerate(
            (
                SIG["sig"].rstrip("="),
                SIG["sig"] + "=",
                SIG["sig"] + "\n",
                " " + SIG["sig"],
                SIG["sig"].replace("+", "-").replace("/", "_") + "-",
                SIG["sig"][:-3] + chr(ord(SIG["sig"][-3]) + 1) + "==",
                RAW.hex(),
                "\u00e4" * 88,
                None,
                64,
            )
        )
    },
    **{
        f"payload {number}": format_json({**ENVELOPE, "payload": text})
        for number, text in enumerate(
            (ENVELOPE["payload"] + "\n", ENVELOPE["payload"] + "====", "", "e30=", "%%%", None, STATEMENT)
        )
    },
    "S plus the order": _malleable(),
    "the payload of another": format_json({**ENVELOPE, "payload": json.loads(OTHER.envelope)["payload"]}),
    "the signature of another": _signature(sig=json.loads(OTHER.envelope)["signatures"][0]["sig"]),
    "the signature of its test result": _signature(
        sig=json.loads(SIGNED.test_result)["signatures"][0]["sig"]
    ),
}


@pytest.mark.parametrize("name", ENVELOPES)
def test_no_other_envelope_is_taken(name: str) -> None:
    assert ENVELOPES[name] != SIGNED.envelope
    judged = judge(ENVELOPES[name])
    assert judged.standing in (
        VerdictStatus.MALFORMED,
        VerdictStatus.UNSIGNED,
        VerdictStatus.EDITED,
        VerdictStatus.WRONG_KEY,
    )
    assert not judged.proves
    assert judged.why.isprintable()
    assert len(judged.why) < 1000


def _claiming(envelope: bytes, keyid: str) -> bytes:
    document = json.loads(envelope)
    document["signatures"][0]["keyid"] = keyid
    return format_json(document)


def test_a_stranger_s_signature_is_none() -> None:
    own = sign(whole_report(), STRANGER, now=NOW, days=90).envelope
    assert judge(own).standing is VerdictStatus.WRONG_KEY
    assert judge(_claiming(own, LAB.keyid)).standing is VerdictStatus.EDITED
    both = replace(COURT, trust=BOTH)
    assert verify_verdict(own, "", SUBJECT, both).proves  # the control: it is only trust that lacks
    assert verify_verdict(_claiming(own, LAB.keyid), "", SUBJECT, both).standing is VerdictStatus.EDITED
    swapped = _claiming(SIGNED.envelope, STRANGER.keyid)
    assert verify_verdict(swapped, "", SUBJECT, both).standing is VerdictStatus.EDITED


@pytest.mark.parametrize(
    "make",
    [
        lambda: SIGNED.test_result,
        lambda: sealed(format_statement(SUBJECT, "https://imagefactory.dev/revocation/v1", {})),
        lambda: sealed(
            format_statement(SUBJECT, "https://imagefactory.dev/verdict/v2", STATEMENT["predicate"])
        ),
        lambda: sealed(format_statement(SUBJECT, "https://imagefactory.dev/verdict/v1", {})),
        lambda: sealed(b"{}"),
        lambda: sealed(b""),
    ],
)
def test_what_a_trusted_key_signed_for_another_purpose_is_no_verdict(make: Callable[[], bytes]) -> None:
    assert judge(make()).standing is VerdictStatus.MALFORMED


def test_what_is_no_verdict_stays_none_when_a_trusted_key_signs_it() -> None:
    """Each change is either refused, or it is another verdict that the schema and the parser both take."""
    refused = 0
    for path, number in CHANGES:
        document = changed(path, number)
        if document == STATEMENT:
            continue
        judged = judge(sealed(format_json(document)))
        refused += judged.standing is not VerdictStatus.GOOD
        if judged.standing is VerdictStatus.GOOD:
            assert judged.verdict is not None
            assert format_verdict(judged.verdict) == format_json(document), (path, number)
            assert VALIDATOR.is_valid(document), (path, number)
    assert refused > 400


CONTRADICTIONS: dict[str, list[tuple[Path, Any]]] = {
    "the statement's manifest": [(("subject", 0, "digest", "sha256"), "1" * 64)],
    "the report's manifest": [(("predicate", "subject", "manifest"), digest("1"))],
    "the statement's name": [(("subject", 0, "name"), "jax/manifest")],
    "no subject": [(("subject",), [])],
    "a second subject": [(("subject",), [*STATEMENT["subject"], STATEMENT["subject"][0]])],
    "two digests of one subject": [(("subject", 0, "digest", "sha512"), "1" * 128)],
    "a rehearsal": [(("predicate", "rehearsal"), True)],
    "expires before it is issued": [(("predicate", "expires"), "2026-11-21T03:00:00Z")],
    "expires as it is issued": [(("predicate", "expires"), STATEMENT["predicate"]["issued"])],
    "expires in 2999": [(("predicate", "expires"), "2999-01-01T00:00:00Z")],
    "issued before it ran": [(("predicate", "issued"), "2026-11-22T02:00:00Z")],
    "a check that failed": [(("predicate", "checks", 0, "state"), "failed")],
    "a check that did not run": [(("predicate", "checks", 0, "state"), "not-run")],
    "no checks": [(("predicate", "checks"), [])],
    "an outcome of no run": [(("predicate", "outcome"), "not-tested")],
    "seconds spelt otherwise": [(("predicate", "checks", 0, "seconds"), 1)],
    "issued with an offset": [(("predicate", "issued"), "2026-11-22T03:00:00+00:00")],
    "the thirtieth of February": [(("predicate", "issued"), "2026-02-30T03:00:00Z")],
    "another format": [(("predicate", "format"), 2)],
    "a format that is 1.0": [(("predicate", "format"), 1.0)],
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_statement_that_contradicts_itself_is_malformed(name: str) -> None:
    document = STATEMENT
    for path, value in CONTRADICTIONS[name]:
        document = with_value(document, path, value)
    assert judge(sealed(format_json(document))).standing is VerdictStatus.MALFORMED


def _parses(document: Any) -> bool:
    try:
        parse_verdict(format_json(document), "x", LAB.keyid)
    except StatementError:
        return False
    return True


# What a schema cannot say: two fields that must agree, and one spelling of a number or a time.
BEYOND_SCHEMA = {"subject", "issued", "expires", "started", "ended", "state", "waived", "checks", "name"}


def test_the_schema_is_one_and_closed() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    text = json.dumps(SCHEMA)
    assert text.count('"type": "object"') - 1 == text.count(
        '"additionalProperties": false'
    )  # numbers is open


def test_schema_and_parser_agree() -> None:
    taken = 0
    for path, number in CHANGES:
        document = changed(path, number)
        if b"\\ud800" in format_json(document):  # half of a pair: no validator of schemas takes it the same
            assert not _parses(document)
            continue
        parses, valid = _parses(document), VALIDATOR.is_valid(document)
        taken += parses
        assert valid or not parses, (path, number)
        trailing = (
            isinstance(at(STATEMENT, path), str) and number == 1
        )  # "$" of Python's re passes a last "\n"
        if valid and not parses and not trailing:
            assert BEYOND_SCHEMA & {str(key) for key in path} or isinstance(
                at(STATEMENT, path), int | float
            ), (
                path,
                number,
            )
    assert taken > 40


def test_the_parsed_envelope_is_the_signed_one() -> None:
    envelope = parse_envelope(SIGNED.envelope, "x")
    assert json.loads(envelope.payload) == STATEMENT
    assert envelope.keyid == LAB.keyid
