"""Signed bytes: canonical JSON in a DSSE envelope with one Ed25519 signature.

The parsers reject bytes that the formatters would not write, so two readers never disagree about them.
Examples are a duplicate key, another spelling of a number, base64 with trailing bits, and a second signature.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from imagefactory.oci.candidates import BUNDLE_TYPE
from imagefactory.serialize import ObjectSchema, invalid_value_error, printable_value
from imagefactory.trust.keys import SigningKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
LARGEST = 1 << 20
MOST_VALUES = 4_000_000
"""The limit of values in one JSON text.

A catalog of 5,000 images has 1.4 million separators between values.
"""
_HEAD = b'{"payload":"'  # the first field of a canonical envelope
_LARGEST_REST = 1 << 16  # of an envelope without its payload

# Order of Ed25519's base point (RFC 8032, 5.1). S of a signature must be smaller, or it has two spellings.
_ORDER = (1 << 252) + 27742317777372353535851937790883648493


_ENVELOPE = ObjectSchema(payload=object, payloadType=object, signatures=object)
_SIGNATURE = ObjectSchema(keyid=object, sig=object)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvelopeForm:
    """A type of envelope: its payload type, which is part of the signed bytes, and its largest size in
    bytes.
    """

    payload_type: str
    largest: int


IN_TOTO = EnvelopeForm(payload_type=PAYLOAD_TYPE, largest=LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A DSSE envelope that is not verified yet.

    `signature` has 64 bytes, or is empty if the envelope is unsigned.
    """

    payload: bytes
    payload_type: str
    keyid: str
    signature: bytes


def sign_envelope(payload: bytes, key: SigningKey, form: EnvelopeForm = IN_TOTO) -> bytes:
    """Sign a payload, such as an in-toto statement, and return the envelope.

    Raises ToolError if a signing program returns no signature.
    """
    from securesystemslib.dsse import Envelope as Dsse
    from securesystemslib.signer import Signature

    envelope = Dsse(payload, form.payload_type, {})
    envelope.signatures[key.keyid] = Signature(key.keyid, key.sign(envelope.pae()).hex())
    return format_json(envelope.to_dict())


def format_json(value: object) -> bytes:
    """Return canonical JSON: keys sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_json(data: bytes, location: str, largest: int = LARGEST) -> object:
    """Parse canonical JSON. Raises StatementError for bytes that `format_json` would not write."""
    if len(data) > largest:
        raise invalid_value_error(location, f"it has more than {largest} bytes")
    if sum(map(data.count, (b",", b":", b"[", b"{"))) > MOST_VALUES:  # values need far more than their text
        raise invalid_value_error(location, f"it has more than {MOST_VALUES} values")
    try:
        value = json.loads(data)
        same = format_json(value) == data
    except (ValueError, RecursionError) as error:
        raise invalid_value_error(location, f"it is not JSON: {printable_value(str(error))}") from error
    if not same:
        raise invalid_value_error(location, "it is not in canonical form, or has a duplicate key")
    return value


def parse_envelope(data: bytes, location: str, form: EnvelopeForm = IN_TOTO) -> Envelope:
    """Parse an envelope of type `form` with one signature. Raises StatementError for other bytes.

    The signature is not verified. The payload is not parsed as JSON.
    """
    if len(data) > form.largest:
        raise invalid_value_error(location, f"it has more than {form.largest} bytes")
    end = data.find(b'"', len(_HEAD)) if data.startswith(_HEAD) else -1
    rest = data if end < 0 else _HEAD + data[end:]
    row = _ENVELOPE.parse(parse_json(rest, location, _LARGEST_REST), location)
    encoded = row["payload"] if end < 0 else memoryview(data)[len(_HEAD) : end]
    signatures = row["signatures"]
    if row["payloadType"] != form.payload_type:
        raise invalid_value_error(f"{location}: payloadType", f"it is not {form.payload_type}")
    if not isinstance(signatures, list):
        raise invalid_value_error(f"{location}: signatures", "it is not a list")
    if not signatures:
        return Envelope(
            payload=_decode(encoded, f"{location}: payload"),
            payload_type=form.payload_type,
            keyid="",
            signature=b"",
        )
    if len(signatures) > 1:
        raise invalid_value_error(f"{location}: signatures", "there is more than one")
    signature = _SIGNATURE.parse(signatures[0], f"{location}: signatures[0]")
    keyid, raw = signature["keyid"], _decode(signature["sig"], f"{location}: signatures[0].sig")
    if not isinstance(keyid, str) or len(keyid) != 64 or set(keyid) - set("0123456789abcdef"):
        raise invalid_value_error(f"{location}: signatures[0].keyid", "it is not a key id")
    if len(raw) != 64 or int.from_bytes(raw[32:], "little") >= _ORDER:
        raise invalid_value_error(f"{location}: signatures[0].sig", "it is not an Ed25519 signature")
    payload = _decode(encoded, f"{location}: payload")
    return Envelope(payload=payload, payload_type=form.payload_type, keyid=keyid, signature=raw)


def format_bundle(envelope: bytes) -> bytes:
    """Return a signed envelope as a Sigstore bundle v0.3 whose key is given by its ID.

    Source: sigstore/protobuf-specs, sigstore_bundle.proto. A bundle without a transparency log entry and a
    timestamp is verified with the public key alone.
    """
    value = json.loads(envelope)
    (signature,) = value["signatures"]
    # go-securesystemslib, and so cosign, skips a signature whose key ID is not the one that it computes.
    keyid = signature.pop("keyid")
    return format_json(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {"publicKey": {"hint": keyid}, "tlogEntries": []},
            "dsseEnvelope": value,
        }
    )


def parse_bundle(data: bytes, location: str) -> bytes:
    """Return the envelope in a Sigstore bundle with one signature, in canonical form.

    The bundle may have any spelling of JSON. If it has a certificate, the envelope is unsigned, because only
    keys are trusted. Raises StatementError for other bundles.
    """
    try:
        value = json.loads(data)
        envelope, material = value["dsseEnvelope"], value["verificationMaterial"]
        (signature,) = envelope["signatures"]
        signatures = []
        if "certificate" not in material:
            keyid = signature.get("keyid") or material["publicKey"].get("hint", "")
            signatures = [{"keyid": str(keyid), "sig": str(signature["sig"])}]
        return format_json(
            {
                "payload": str(envelope["payload"]),
                "payloadType": str(envelope["payloadType"]),
                "signatures": signatures,
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"it is not a Sigstore bundle of a statement: {printable_value(str(error))}"
        raise invalid_value_error(location, problem) from error


def predicate_type(envelope: bytes) -> str:
    """Return the predicate type of the in-toto statement in an envelope. Raises StatementError."""
    payload = parse_envelope(envelope, "a statement").payload
    value = parse_json(payload, "a statement")
    return str(value.get("predicateType", "")) if isinstance(value, dict) else ""


def is_signed_by(envelope: Envelope, keyid: str, public: bytes) -> bool:
    """Return whether this key signed the payload and its type. `public` is the raw key of 32 bytes.

    securesystemslib calls cryptography too, but loads the signers of every cloud first, which takes longer
    than all signatures of a command. It has a slow Python implementation for the light install.
    """
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return _is_signed_without_cryptography(envelope, keyid, public)
    kind, payload = envelope.payload_type.encode(), envelope.payload
    signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(envelope.signature, signed)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return envelope.keyid == keyid


def _is_signed_without_cryptography(envelope: Envelope, keyid: str, public: bytes) -> bool:
    from securesystemslib.dsse import Envelope as Dsse
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import Signature, SSlibKey

    signature = Signature(envelope.keyid, envelope.signature.hex())
    key = SSlibKey(keyid, "ed25519", "ed25519", {"public": public.hex()})
    try:
        Dsse(envelope.payload, envelope.payload_type, {envelope.keyid: signature}).verify([key], 1)
    except VerificationError:
        return False
    return True


def _decode(value: object, location: str) -> bytes:
    """Decode canonical standard base64: with padding, without trailing bits and line breaks."""
    if isinstance(value, str):
        value = value.encode("ascii", "replace")
    if not isinstance(value, bytes | memoryview):
        raise invalid_value_error(location, "it is not base64")
    try:
        data = binascii.a2b_base64(value, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_value_error(location, "it is not base64") from error
    last = len(data) % 3 or 3  # only the last bytes have several spellings
    if base64.b64encode(data[len(data) - last :]) != bytes(value[-4:]):
        raise invalid_value_error(location, "it is not canonical base64")
    return data
