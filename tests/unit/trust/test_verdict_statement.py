"""Signing: what becomes a statement, what is refused, and that others can read it."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from securesystemslib.dsse import Envelope as Dsse
from securesystemslib.signer import SSlibKey

from imagefactory.errors import StatementError
from imagefactory.model import CheckState, Outcome
from imagefactory.trust.envelope import LARGEST, PAYLOAD_TYPE, format_json, parse_envelope, parse_json
from imagefactory.trust.verdict import (
    SIGNABLE,
    TEST_RESULT,
    VERDICT,
    format_statement,
    format_verdict,
    jittered_expiry,
    parse_predicate,
    parse_verdict,
    sign,
)
from tests.made.errors import fails
from tests.made.verdicts import (
    HOST,
    HOST_OF_TWO,
    LAB,
    MADE_UP,
    NOW,
    SUBJECT,
    payload_of,
    together_report,
    whole_report,
)

PART = "MIG-11111111-2222-3333-4444-555555555555"


def test_a_signed_report_reads_back_as_it_was() -> None:
    signed = sign(whole_report(), LAB, now=NOW, days=90)
    envelope = parse_envelope(signed.envelope, "x")
    assert parse_verdict(envelope.payload, "x", envelope.keyid) == signed.verdict
    assert signed.verdict.report == whole_report()
    assert signed.verdict.expires - signed.verdict.issued == timedelta(days=90)
    assert signed.verdict.keyid == envelope.keyid == LAB.keyid


def test_the_same_report_gives_the_same_bytes() -> None:
    assert sign(whole_report(), LAB, now=NOW, days=90) == sign(whole_report(), LAB, now=NOW, days=90)


def test_nothing_is_signed_that_nobody_would_read() -> None:
    """A payload may be as large as an envelope, and base64 makes it a third larger."""
    checks = whole_report().checks
    numbers = tuple((f"{number:03}" + "x" * 3600, 1.0) for number in range(256))
    large = whole_report(checks=(replace(checks[0], numbers=numbers), *checks[1:]))
    with fails("document-invalid") as caught:
        sign(large, LAB, now=NOW, days=90)
    assert str(LARGEST) in caught.value.message


def test_the_envelope_is_dsse_and_the_payload_in_toto() -> None:
    signed = sign(whole_report(), LAB, now=NOW, days=90)
    for data in (signed.envelope, signed.test_result):
        envelope = Dsse.from_dict(json.loads(data))
        key = SSlibKey(LAB.keyid, "ed25519", "ed25519", {"public": LAB.public.hex()})
        assert list(envelope.verify([key], 1)) == [LAB.keyid]
        assert envelope.payload_type == PAYLOAD_TYPE == "application/vnd.in-toto+json"
        statement = json.loads(envelope.payload)
        assert statement["_type"] == "https://in-toto.io/Statement/v1"
        digests = [subject["digest"]["sha256"] for subject in statement["subject"]]
        assert digests == [SUBJECT.manifest[7:]]
    assert payload_of(signed.envelope)["predicateType"] == VERDICT


def test_the_keyid_is_that_of_securesystemslib() -> None:
    assert SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(LAB.public)).keyid == LAB.keyid


@pytest.mark.parametrize(
    ("outcome", "waived", "result"),
    [
        (Outcome.VERIFIED, False, "PASSED"),
        (Outcome.VERIFIED, True, "WARNED"),
        (Outcome.NO_KERNEL, False, "FAILED"),
    ],
)
def test_the_test_result_says_it_in_in_toto_s_words(outcome: Outcome, waived: bool, result: str) -> None:
    report = whole_report()
    last = report.checks[-1]
    if waived:
        checks = (*report.checks[:-1], replace(last, state=CheckState.NOT_RUN))
        report = replace(report, checks=checks, waived=(last.name,))
    elif outcome is not Outcome.VERIFIED:
        checks = (*report.checks[:-1], replace(last, state=CheckState.FAILED))
        report = replace(report, checks=checks, outcome=outcome)
    predicate = payload_of(sign(report, LAB, now=NOW, days=90).test_result)["predicate"]
    assert predicate["result"] == result
    assert predicate["passedTests"] == [check.name for check in report.checks if check.state == "passed"]
    assert predicate["failedTests"] == ([last.name] if result == "FAILED" else [])
    assert predicate["warnedTests"] == ([last.name] if result == "WARNED" else [])
    assert predicate["configuration"][0]["digest"] == {"sha256": report.suite[7:]}


def test_two_runs_never_make_one_test_result() -> None:
    """Their artifacts are named by their bytes: of two GPUs that agree there must be two."""
    report = whole_report()
    other = replace(report, nonce=report.nonce[::-1])
    one, two = (sign(each, LAB, now=NOW, days=90).test_result for each in (report, other))
    assert one != two
    annotations = payload_of(one)["predicate"]["configuration"][0]["annotations"]
    assert annotations["capability"] == MADE_UP.capability


def _with_check(**changes: Any) -> dict[str, Any]:
    checks = whole_report().checks
    return {"checks": (replace(checks[0], **changes), *checks[1:])}


UNSIGNABLE = "report-not-signable"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a rehearsal": ({"rehearsal": True}, UNSIGNABLE, "rehearsal"),
    "no GPU seen by the host": ({"hardware": None}, UNSIGNABLE, "host"),
    "no GPU met inside": ({"device": None}, UNSIGNABLE, "suite"),
    "another GPU met inside": (
        {"device": replace(MADE_UP, uuid="GPU-" + MADE_UP.uuid[4:].replace("a", "b"))},
        UNSIGNABLE,
        "NVML",
    ),
    "another capability": ({"device": replace(MADE_UP, capability="8.6")}, UNSIGNABLE, "NVML reports 8.0"),
    "not below /proc": ({"hardware": replace(HOST, known=())}, UNSIGNABLE, "the driver does not list"),
    "another below /proc": (
        {"hardware": replace(HOST, known=("GPU-" + PART[4:],))},
        UNSIGNABLE,
        "the driver does not list",
    ),
    "no node": ({"hardware": replace(HOST, nodes=())}, UNSIGNABLE, "device node"),
    "no driver": ({"hardware": replace(HOST, driver="")}, UNSIGNABLE, "no driver"),
    "a part of no GPU": ({"device": replace(MADE_UP, uuid=PART)}, UNSIGNABLE, "NVML"),
    "a part of another GPU": (
        {
            "device": replace(MADE_UP, uuid=PART),
            "hardware": replace(HOST, notes=((PART, "GPU-" + PART[4:]),)),
        },
        UNSIGNABLE,
        "NVML",
    ),
    "a failed check": (_with_check(state=CheckState.FAILED), UNSIGNABLE, "'driver' is failed"),
    "a check that did not run": (_with_check(state=CheckState.NOT_RUN), UNSIGNABLE, "'driver' is not-run"),
    "a waiver of what ran": ({"waived": ("driver",)}, UNSIGNABLE, "waives"),
    "a waiver of nothing": ({"waived": ("nothing",)}, UNSIGNABLE, "waives"),
    "a check left out": ({"checks": whole_report().checks[1:]}, UNSIGNABLE, "'driver'"),
    "no checks": ({"checks": ()}, UNSIGNABLE, "no check passed"),
    "not yet over": ({"ended": NOW + timedelta(hours=1)}, "clock-skew", ""),
    "over before it began": ({"ended": NOW - timedelta(hours=1)}, "document-invalid", "ended"),
    "a reason of two lines": ({"reason": "a\nb"}, "document-invalid", "reason"),
    "no nonce": ({"nonce": ""}, "document-invalid", "nonce"),
    **{
        f"the outcome {outcome}": ({"outcome": outcome}, UNSIGNABLE, f"outcome '{outcome}'")
        for outcome in Outcome
        if outcome not in SIGNABLE
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_gpu_run_is_behind_is_not_signed(name: str) -> None:
    changes, code, value = REFUSED[name]
    with fails(code) as caught:
        sign(whole_report(**changes), LAB, now=NOW, days=90)
    assert value in caught.value.message
    assert caught.value.hint


def test_all_na_is_no_pass() -> None:
    checks = tuple(replace(check, state=CheckState.NOT_APPLICABLE) for check in whole_report().checks)
    with fails(UNSIGNABLE) as caught:
        sign(whole_report(checks=checks), LAB, now=NOW, days=90)
    assert "no check passed" in caught.value.message


@pytest.mark.parametrize("uuid", [PART, "GPU-" + PART[4:]])
def test_a_mig_instance_is_signed_by_its_gpu_s_evidence(uuid: str) -> None:
    report = whole_report(
        device=replace(MADE_UP, uuid=uuid), hardware=replace(HOST, notes=((PART, MADE_UP.uuid),))
    )
    assert sign(report, LAB, now=NOW, days=90).verdict.report == report


@pytest.mark.parametrize("outcome", [outcome for outcome in SIGNABLE if outcome is not Outcome.VERIFIED])
def test_what_a_gpu_says_against_an_image_is_signed_too(outcome: Outcome) -> None:
    report = whole_report(outcome=outcome, **_with_check(state=CheckState.FAILED))
    assert sign(report, LAB, now=NOW, days=90).verdict.report.outcome is outcome


@pytest.mark.parametrize("days", [0, -1, 367])
def test_a_life_of_no_days_or_of_years_is_refused(days: int) -> None:
    with fails("document-invalid") as caught:
        sign(whole_report(), LAB, now=NOW, days=days)
    assert "expires" in caught.value.message


def test_what_one_night_proved_does_not_lapse_in_one() -> None:
    report = whole_report()
    assert report.device
    gpus = [replace(report, device=replace(report.device, capability=f"{n}.0")) for n in range(200)]
    days = [jittered_expiry(one, 90) for one in gpus]
    assert set(days) == set(range(75, 91))
    assert days == [jittered_expiry(one, 90) for one in gpus]
    assert {jittered_expiry(one, 5) for one in gpus} == {5}


def test_nothing_of_the_private_key_is_in_what_is_signed() -> None:
    seed = b"lab".ljust(32, b".")
    signed = sign(whole_report(), LAB, now=NOW, days=90)
    for spelling in (seed, seed.hex().encode(), base64.b64encode(seed), hashlib.sha256(seed).digest()):
        assert spelling not in signed.envelope
        assert spelling not in base64.b64decode(json.loads(signed.envelope)["payload"])


def test_one_spelling() -> None:
    verdict = sign(whole_report(), LAB, now=NOW, days=90).verdict
    payload = format_verdict(verdict)
    document = json.loads(payload)
    assert format_json(document) == payload
    for other in (
        json.dumps(document, sort_keys=True).encode(),
        json.dumps(document, separators=(",", ":"))[::-1].encode(),
        payload + b"\n",
        b"\xef\xbb\xbf" + payload,
        payload.decode().encode("utf-16"),
        payload.replace(b'"level":"quick"', b'"level":"quick","level":"quick"'),
        payload.replace(b'"seconds":0.5', b'"seconds":5e-1', 1),
        payload.replace(b'"rehearsal":false', b'"rehearsal":false,"rehearsal":true'),
        payload.replace(b"quick", b"\\u0071uick"),
    ):
        assert other != payload
        with pytest.raises(StatementError):
            parse_verdict(other, "x", LAB.keyid)


def test_sizes_are_capped_before_anything_is_read() -> None:
    with fails("document-invalid") as caught:
        parse_json(b'"' + b"x" * (1 << 20) + b'"', "x")
    assert "1048576" in caught.value.message


def test_a_predicate_is_of_the_kind_that_was_asked_for() -> None:
    payload = format_statement(SUBJECT, VERDICT, {"a": 1})
    assert parse_predicate(payload, "x", VERDICT) == {"a": 1}
    with fails("document-invalid") as caught:
        parse_predicate(payload, "x", TEST_RESULT)
    assert "predicateType" in caught.value.message
    with fails("document-invalid") as caught:
        parse_predicate(payload.replace(b"Statement/v1", b"Statement/v2"), "x", VERDICT)
    assert "_type" in caught.value.message
    with fails("document-invalid") as caught:
        parse_predicate(payload.replace(b'{"a":1}', b"[1]"), "x", VERDICT)
    assert "predicate: " in caught.value.message


GPUS_FAILED = tuple(
    replace(check, state=CheckState.FAILED, numbers=()) if check.name == "gpus" else check
    for check in together_report().checks
)


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, ("PASSED", "2")),
        ({"outcome": Outcome.APART}, ("FAILED", "2")),
        ({"outcome": Outcome.APART, "checks": GPUS_FAILED}, ("FAILED", "0")),
    ],
)
def test_what_several_gpus_say_is_signed_with_their_number(
    changes: dict[str, Any], result: tuple[str, str]
) -> None:
    report = together_report(**changes)
    signed = sign(report, LAB, now=NOW, days=90)
    assert parse_verdict(parse_envelope(signed.envelope, "x").payload, "x", LAB.keyid).report == report
    predicate = payload_of(signed.test_result)["predicate"]
    (configuration,) = predicate["configuration"]
    assert configuration["name"] == "gpu-suite-several"
    assert (predicate["result"], configuration["annotations"]["gpus"]) == result
    assert "gpus" not in json.dumps(payload_of(sign(whole_report(), LAB, now=NOW, days=90).test_result))


DRIVER_FAILED = tuple(
    replace(check, state=CheckState.FAILED) if check.name == "driver" else check
    for check in together_report().checks
)


def _counting(number: float) -> dict[str, Any]:
    checks = together_report().checks
    return {"checks": tuple(replace(check, numbers=(("gpus", number),)) for check in checks)}


REFUSED_OF_SEVERAL: dict[str, tuple[dict[str, Any], str]] = {
    "more than its host has": (_counting(3), "of 3 GPUs, and its host has 2"),
    "one": (_counting(1), "of 1 GPUs"),
    "none": ({"checks": GPUS_FAILED}, "of 0 GPUs"),
    "apart of more": ({**_counting(3), "outcome": Outcome.APART}, "of 3 GPUs"),
    "a host of one": ({"hardware": HOST}, "its host has 1"),
    "one that the driver does not know": ({"hardware": replace(HOST_OF_TWO, known=HOST.known)}, "has 1"),
    "a failed check": ({"checks": DRIVER_FAILED}, "'driver' is failed"),
    "the words of one GPU": ({"outcome": Outcome.VERIFIED}, "'verified'"),
    "a denial of one GPU": ({"outcome": Outcome.WRONG_NUMBERS}, "'wrong-numbers'"),
    "too long": ({"outcome": Outcome.TIMEOUT}, "'timeout'"),
    "another level": ({"level": "quick"}, "'together'"),
    "a rehearsal": ({"rehearsal": True}, "rehearsal"),
}


@pytest.mark.parametrize("name", REFUSED_OF_SEVERAL)
def test_what_several_gpus_did_not_say_is_not_signed(name: str) -> None:
    changes, value = REFUSED_OF_SEVERAL[name]
    with fails(UNSIGNABLE) as caught:
        sign(together_report(**changes), LAB, now=NOW, days=90)
    assert value in caught.value.message


def test_a_waiver_of_several_is_refused() -> None:
    checks = together_report().checks
    last = replace(checks[-1], state=CheckState.NOT_RUN)
    with fails(UNSIGNABLE) as caught:
        sign(
            together_report(checks=(*checks[:-1], last), waived=(last.name,), outcome=Outcome.APART),
            LAB,
            now=NOW,
            days=90,
        )
    assert "waives" in caught.value.message


@pytest.mark.parametrize("outcome", [Outcome.TOGETHER, Outcome.VERIFIED])
def test_a_statement_of_another_level_is_no_verdict(outcome: Outcome) -> None:
    """Whoever holds a key may sign what he likes; nobody reads it."""
    level = "quick" if outcome is Outcome.TOGETHER else "several"
    report = together_report(level=level, outcome=outcome)
    signed = sign(together_report(), LAB, now=NOW, days=90)
    payload = format_verdict(replace(signed.verdict, report=report))
    with fails("document-invalid") as caught:
        parse_verdict(payload, "x", LAB.keyid)
    assert f"outcome '{outcome}'" in caught.value.message
