"""Judging: one word for each way in which a verdict cannot be relied on."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.model import CheckState, Outcome
from imagefactory.trust.envelope import format_json
from imagefactory.trust.judgement import (
    VerificationPolicy,
    expires,
    expiring_cells,
    verify_verdict,
    verify_verdicts,
)
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.policy import AcceptancePolicy, TrustGrant, TrustRules, add_key
from imagefactory.trust.verdict import Revocation, VerdictStatus, VerificationResult, format_verdict, sign
from imagefactory.verify.report import EVIDENCE_KIT, VerifiedImage
from imagefactory.verify.suite_files import EARLIER_SUITES
from tests.made.verdicts import (
    COURT,
    DAY,
    HOST,
    LAB,
    LAB_TRUSTED,
    MADE_UP,
    NOW,
    STRANGER,
    SUBJECT,
    SUITE,
    TRUST,
    digest,
    payload_of,
    sealed,
    whole_report,
    with_payload,
)

MINE = digest("9")
SIGNED = sign(whole_report(), LAB, now=NOW, days=90)


def judge(
    data: bytes = SIGNED.envelope, subject: VerifiedImage = SUBJECT, **court: Any
) -> VerificationResult:
    return verify_verdict(data, MINE, subject, replace(COURT, **court))


def trusting(**changes: Any) -> TrustRules:
    return TrustRules(keys=(replace(LAB_TRUSTED, **changes),))


def test_a_good_one_proves() -> None:
    judged = judge()
    assert (judged.standing, judged.digest, judged.proves) == (VerdictStatus.GOOD, MINE, True)
    assert judged.verdict == SIGNED.verdict
    assert "lab" in judged.why


@pytest.mark.parametrize(
    ("issued", "until"),
    [
        ("9999-12-31T23:59:50Z", "9999-12-31T23:59:59Z"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:01Z"),
    ],
)
def test_times_at_the_ends_of_the_calendar(issued: str, until: str) -> None:
    """Whoever may write to a registry may write this; nobody has to have signed it."""
    statement = payload_of(SIGNED.envelope)
    statement["predicate"].update(issued=issued, expires=until)
    if issued < "2026":
        statement["predicate"].update(started=issued, ended=issued)
    payload = format_json(statement)
    unsigned = format_json({**json.loads(with_payload(SIGNED.envelope, payload)), "signatures": []})
    told = [judge(data) for data in (sealed(payload), with_payload(SIGNED.envelope, payload), unsigned)]
    signed = VerdictStatus.KEY_RETIRED if issued > "2026" else VerdictStatus.WRONG_KEY
    assert [one.standing for one in told] == [signed, VerdictStatus.EDITED, VerdictStatus.UNSIGNED]
    for one in told:
        assert one.verdict is not None
        assert expires(one.verdict, TRUST) == one.verdict.expires


def test_what_says_no_is_good_and_proves_nothing() -> None:
    checks = whole_report().checks
    report = whole_report(
        outcome=Outcome.NO_KERNEL, checks=(*checks[:-1], replace(checks[-1], state=CheckState.FAILED))
    )
    judged = judge(sign(report, LAB, now=NOW, days=90).envelope)
    assert judged.standing is VerdictStatus.GOOD
    assert not judged.proves


REVOKED = Revocation(
    subject=SUBJECT.manifest,
    verdicts=(),
    capability="",
    before=NOW + DAY,
    why="wrong results in training",
    keyid=LAB.keyid,
)
WORDS: dict[str, tuple[dict[str, Any], VerdictStatus, str]] = {
    "no key is trusted": ({"trust": TrustRules()}, VerdictStatus.WRONG_KEY, "no trusted key"),
    "another key is trusted": (
        {"trust": trusting(keyid=STRANGER.keyid, public=STRANGER.public)},
        VerdictStatus.WRONG_KEY,
        "no trusted key",
    ),
    "another key under its id": (
        {"trust": trusting(public=STRANGER.public)},
        VerdictStatus.EDITED,
        "'lab' signed",
    ),
    "the key was not yet trusted": ({"trust": trusting(since=NOW + DAY)}, VerdictStatus.WRONG_KEY, "from"),
    "the key was retired": (
        {"trust": trusting(until=NOW)},
        VerdictStatus.KEY_RETIRED,
        "until 2026-11-22T03:00:00Z",
    ),
    "the key was retired later, and nothing was recorded": (
        {"trust": trusting(until=NOW + DAY), "now": NOW + DAY},
        VerdictStatus.KEY_RETIRED,
        "is missing",
    ),
    "the key was retired later, and the record lacks it": (
        {"trust": trusting(until=NOW + DAY, signed=frozenset({digest("5")})), "now": NOW + DAY},
        VerdictStatus.KEY_RETIRED,
        "does not have this",
    ),
    "of another time, in the list of a trusted key": (
        {"trust": trusting(until=NOW), "vouched": True},
        VerdictStatus.KEY_RETIRED,
        "until 2026-11-22T03:00:00Z",
    ),
    "another subject": (
        {"subject": VerifiedImage(target="", index=SUBJECT.index, manifest=digest("1"), config=digest("2"))},
        VerdictStatus.OTHER_SUBJECT,
        SUBJECT.manifest,
    ),
    "another suite": ({"suite": digest("8")}, VerdictStatus.OTHER_SUITE, "sha256:ddd"),
    "the key takes other evidence": (
        {"trust": trusting(evidence=(EVIDENCE_KIT,))},
        VerdictStatus.EVIDENCE_REFUSED,
        "'lab' does not accept evidence of type 'local'",
    ),
    "the policy takes other evidence": (
        {"trust": TrustRules(keys=(LAB_TRUSTED,), policy=AcceptancePolicy(evidence=(EVIDENCE_KIT,)))},
        VerdictStatus.EVIDENCE_REFUSED,
        "the policy does not accept evidence of type 'local'",
    ),
    "revoked": ({"revocations": (REVOKED,)}, VerdictStatus.REVOKED, "wrong results in training"),
    "revoked by name, whatever the clocks say": (
        {"revocations": (replace(REVOKED, verdicts=(SIGNED.verdict.digest,), before=NOW - DAY),)},
        VerdictStatus.REVOKED,
        "wrong results in training",
    ),
    "revoked by name": (
        {"revocations": (replace(REVOKED, verdicts=(SIGNED.verdict.digest,), capability="8.0"),)},
        VerdictStatus.REVOKED,
        "wrong",
    ),
    "expired": ({"now": NOW + 90 * DAY}, VerdictStatus.EXPIRED, "expired at 2027-02-20T03:00:00Z"),
    "expired by policy": (
        {"now": NOW + 7 * DAY, "trust": TrustRules(keys=(LAB_TRUSTED,), policy=AcceptancePolicy(days=7))},
        VerdictStatus.EXPIRED,
        "expired at 2026-11-29",
    ),
    "from the future": ({"now": NOW - timedelta(minutes=6)}, VerdictStatus.NOT_YET, "still to come"),
}


@pytest.mark.parametrize("name", WORDS)
def test_each_reason_has_its_word(name: str) -> None:
    changes, standing, why = WORDS[name]
    judged = judge(**changes)
    assert (judged.standing, judged.proves) == (standing, False)
    assert why in judged.why
    assert judged.verdict is not None  # what it claims can be shown


STILL_GOOD: dict[str, dict[str, Any]] = {
    "the last moment": {"now": NOW + 90 * DAY - timedelta(seconds=1)},
    "clocks a little apart": {"now": NOW - timedelta(minutes=4)},
    "retired after it, and recorded": {
        "trust": trusting(until=NOW + timedelta(seconds=1), signed=frozenset({SIGNED.verdict.digest})),
        "now": NOW + 10 * DAY,
    },
    "retired in the same second, and recorded": {
        "trust": trusting(until=NOW, signed=frozenset({SIGNED.verdict.digest})),
        "now": NOW + 10 * DAY,
    },
    "retired after it, in the list of a trusted key": {
        "trust": trusting(until=NOW + timedelta(seconds=1)),
        "now": NOW + 10 * DAY,
        "vouched": True,
    },
    "not yet retired": {"trust": trusting(until=NOW + 11 * DAY), "now": NOW + 10 * DAY},
    "an older suite that counts": {
        "suite": digest("8"),
        "trust": TrustRules(keys=(LAB_TRUSTED,), policy=AcceptancePolicy(suites=(SUITE,))),
    },
    "the manifest alone": {"subject": replace(SUBJECT, config=digest("1"), target="")},
    "another was revoked": {"revocations": (replace(REVOKED, verdicts=(digest("7"),)),)},
    "another capability was revoked": {"revocations": (replace(REVOKED, capability="9.0"),)},
    "earlier ones were revoked": {"revocations": (replace(REVOKED, before=NOW - DAY),)},
    "another image was revoked": {"revocations": (replace(REVOKED, subject=digest("1")),)},
}


@pytest.mark.parametrize("name", STILL_GOOD)
def test_what_does_not_concern_it_leaves_it_good(name: str) -> None:
    assert judge(**STILL_GOOD[name]).proves


def test_an_equal_config_proves_nothing() -> None:
    """Podman and apptainer unpack layers that do not match the config's diff IDs."""
    other = replace(SUBJECT, manifest=digest("1"))
    assert judge(SIGNED.envelope, other).standing is VerdictStatus.OTHER_SUBJECT


def test_evidence_is_judged_again() -> None:
    """A trusted key that signed without looking."""
    for changes in (
        {"hardware": None},
        {"device": None},
        {"hardware": replace(HOST, known=())},
        {"hardware": replace(HOST, nodes=())},
        {"device": replace(MADE_UP, capability="9.0")},
    ):
        verdict = replace(SIGNED.verdict, report=whole_report(**changes))
        assert judge(sealed(format_verdict(verdict))).standing is VerdictStatus.EVIDENCE_REFUSED


def test_nobody_signed_it() -> None:
    data = format_json({**json.loads(SIGNED.envelope), "signatures": []})
    judged = judge(data)
    assert judged.standing is VerdictStatus.UNSIGNED
    assert judged.verdict is not None


def test_a_nonce_counts_once() -> None:
    later = sign(whole_report(), LAB, now=NOW + DAY, days=90).envelope
    other = sign(whole_report(nonce="f" * 32), LAB, now=NOW, days=90).envelope
    found = {
        digest("3"): later,
        digest("2"): SIGNED.envelope,
        digest("1"): other,
        digest("4"): SIGNED.envelope,
    }
    judged = verify_verdicts(found, SUBJECT, replace(COURT, now=NOW + 2 * DAY))
    assert [(one.digest[-1], one.standing) for one in judged] == [
        ("1", VerdictStatus.GOOD),
        ("2", VerdictStatus.GOOD),  # attached twice, one row
        ("3", VerdictStatus.REPLAYED),
    ]
    assert SIGNED.verdict.digest in judged[-1].why


def test_what_cannot_be_trusted_uses_up_no_nonce() -> None:
    """A stranger who attaches an earlier statement with the same nonce takes nothing away."""
    forged = sign(whole_report(), STRANGER, now=NOW - timedelta(seconds=30), days=90).envelope
    judged = verify_verdicts({digest("1"): forged, digest("2"): SIGNED.envelope}, SUBJECT, COURT)
    assert [one.standing for one in judged] == [VerdictStatus.WRONG_KEY, VerdictStatus.GOOD]


def test_it_ends_by_its_own_word_or_by_the_policy_whichever_is_earlier() -> None:
    verdict = SIGNED.verdict
    assert expires(verdict, TRUST) == NOW + 90 * DAY
    assert expires(verdict, replace(TRUST, policy=AcceptancePolicy(days=30))) == NOW + 30 * DAY
    assert expires(verdict, replace(TRUST, policy=AcceptancePolicy(days=300))) == NOW + 90 * DAY


def test_what_ends_soon_is_told_by_capability_unless_a_later_verdict_holds_on() -> None:
    old = VerificationResult(digest="", standing=VerdictStatus.GOOD, why="", verdict=SIGNED.verdict)
    new = replace(old, verdict=replace(SIGNED.verdict, issued=NOW + 60 * DAY, expires=NOW + 150 * DAY))
    assert expiring_cells([old], TRUST, NOW + 89 * DAY) == ()
    assert expiring_cells([old], TRUST, NOW + 90 * DAY) == (("8.0", NOW + 90 * DAY),)
    assert expiring_cells([old, new], TRUST, NOW + 90 * DAY) == ()
    assert expiring_cells([replace(old, standing=VerdictStatus.EXPIRED)], TRUST, NOW + 90 * DAY) == ()


def test_without_a_compiled_library_it_is_judged_the_same(tmp_path: Path) -> None:
    """The light install has no cryptography: the pure Python beside it takes and refuses the same."""
    edited = payload_of(SIGNED.envelope)
    edited["predicate"]["device"]["capability"] = "9.0"
    raw = base64.b64decode(json.loads(SIGNED.envelope)["signatures"][0]["sig"])
    again = int.from_bytes(raw[32:], "little") + (1 << 252) + 27742317777372353535851937790883648493
    document = json.loads(SIGNED.envelope)
    sig = base64.b64encode(raw[:32] + again.to_bytes(32, "little")).decode()
    document["signatures"][0]["sig"] = sig  # the pure Python takes S plus the group's order for S
    (tmp_path / "respelt").write_bytes(format_json(document))
    (tmp_path / "good").write_bytes(SIGNED.envelope)
    (tmp_path / "edited").write_bytes(with_payload(SIGNED.envelope, format_json(edited)))
    (tmp_path / "imagefactory.toml").write_text(_toml())
    program = f"""
import sys
for name in ("cryptography", "tomlkit", "requests", "tenacity", "rich", "jinja2", "uv", "zstandard"):
    sys.modules[name] = None
from datetime import datetime
from pathlib import Path
from imagefactory.trust.judgement import VerificationPolicy, verify_verdict
from imagefactory.verify.report import EVIDENCE_KIT, VerifiedImage
from imagefactory.trust.policy import read_trust
trust = read_trust((Path("imagefactory.toml"),))
court = VerificationPolicy(trust=trust, suite={SUITE!r}, now=datetime.fromisoformat({NOW.isoformat()!r}))
subject = VerifiedImage(target="", index="", manifest={SUBJECT.manifest!r}, config={SUBJECT.config!r})
for name in ("good", "edited", "respelt"):
    print(verify_verdict(Path(name).read_bytes(), "", subject, court).standing)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["good", "edited", "malformed"]


def _toml() -> str:
    grant = TrustGrant(
        key=PublicKey(name="lab", raw=LAB.public), since=date(2026, 1, 1), until=date(2027, 1, 1)
    )
    return add_key("", grant, "imagefactory.toml")


def test_court_takes_the_present_suite_and_the_policy_s() -> None:
    court = VerificationPolicy(
        trust=TrustRules(policy=AcceptancePolicy(suites=(digest("1"),))), suite=SUITE, now=NOW
    )
    assert court.suites == (SUITE, *EARLIER_SUITES, digest("1"))
