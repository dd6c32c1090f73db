"""Reports, keys and signed verdicts for tests. The keys are throwaway: their private halves stand here."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from imagefactory.model import CheckResult, CheckState, Outcome
from imagefactory.suite.gpu import table
from imagefactory.trust.envelope import format_json, sign_envelope
from imagefactory.trust.judgement import VerificationPolicy
from imagefactory.trust.keys import PublicKey, SigningKey
from imagefactory.trust.policy import AcceptancePolicy, TrustedKey, TrustGrant, TrustRules, format_row
from imagefactory.verify.report import (
    EVIDENCE_KIT,
    EVIDENCE_LOCAL,
    GpuIdentity,
    GpuReport,
    Hardware,
    VerifiedImage,
)

NOW = datetime(2026, 11, 22, 3, 0, 0, tzinfo=UTC)
DAY = timedelta(days=1)


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


SUITE = digest("d")
SUBJECT = VerifiedImage(
    target="pytorch-2.3-cu121", index=digest("a"), manifest=digest("b"), config=digest("c")
)
MADE_UP = GpuIdentity(
    name="A GPU of the tests",
    capability="8.0",
    uuid="GPU-01234567-89ab-cdef-0123-456789abcdef",
    memory=1 << 34,
)
HOST = Hardware(
    kind=EVIDENCE_LOCAL,
    driver="550.54.15",
    gpus=(MADE_UP,),
    known=(MADE_UP.uuid,),
    nodes=("/dev/nvidia0",),
    notes=(("nvml-driver", "550.54.15"),),
)


SECOND = replace(MADE_UP, uuid="GPU-76543210-89ab-cdef-0123-456789abcdef")
HOST_OF_TWO = replace(HOST, gpus=(MADE_UP, SECOND), known=(MADE_UP.uuid, SECOND.uuid))


def whole_report(**changes: Any) -> GpuReport:
    """A report in which every check of the quick level passed. No GPU is behind it."""
    report = GpuReport(
        subject=SUBJECT,
        suite=SUITE,
        level="quick",
        nonce="0123456789abcdef0123456789abcdef",
        started=NOW - timedelta(minutes=2),
        ended=NOW - timedelta(minutes=1),
        runner="unshare",
        hardware=HOST,
        device=MADE_UP,
        cuda="12.4",
        checks=tuple(
            CheckResult(
                name=name, state=CheckState.PASSED, detail="it held", seconds=0.5, numbers=(("n", 1.5),)
            )
            for name in table.checks_of("quick")
        ),
        outcome=Outcome.VERIFIED,
        reason="all that applies passed",
    )
    return replace(report, **changes)


def together_report(**changes: Any) -> GpuReport:
    """A report in which every check of the level several passed, on two. No GPU is behind it."""
    return whole_report(
        **{
            "level": "several",
            "hardware": HOST_OF_TWO,
            "checks": tuple(
                CheckResult(
                    name=name,
                    state=CheckState.PASSED,
                    detail="it held",
                    seconds=0.5,
                    numbers=(("gpus", 2.0),),
                )
                for name in table.checks_of("several")
            ),
            "outcome": Outcome.TOGETHER,
            **changes,
        }
    )


def make_signing_key(seed: str) -> SigningKey:
    private = Ed25519PrivateKey.from_private_bytes(seed.encode("ascii").ljust(32, b"."))
    raw = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return SigningKey(name=seed, public=raw, sign=private.sign)


LAB, STRANGER = make_signing_key("lab"), make_signing_key("stranger")
LAB_TRUSTED = TrustedKey(
    name="lab",
    keyid=LAB.keyid,
    public=LAB.public,
    since=NOW - 30 * DAY,
    until=NOW + 300 * DAY,
    evidence=(EVIDENCE_LOCAL, EVIDENCE_KIT),
)
LAB_ROW = format_row(
    TrustGrant(key=PublicKey(name="lab", raw=LAB.public), since=date(2026, 1, 1), until=date(2028, 1, 1))
)
"""The key as the settings of who trusts it have it."""
TRUST = TrustRules(keys=(LAB_TRUSTED,), policy=AcceptancePolicy())
COURT = VerificationPolicy(trust=TRUST, suite=SUITE, now=NOW)


def payload_of(envelope: bytes) -> Any:
    return json.loads(base64.b64decode(json.loads(envelope)["payload"]))


def with_payload(envelope: bytes, payload: bytes) -> bytes:
    """The same envelope and signature around another payload."""
    document = json.loads(envelope)
    return format_json({**document, "payload": base64.b64encode(payload).decode("ascii")})


def sealed(payload: bytes, key: SigningKey = LAB) -> bytes:
    """Signed by `key`, without any look at what is signed."""
    return sign_envelope(payload, key)
