"""The values of verdicts: what was said, what was taken back, and how much it counts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from imagefactory.errors import StatementError
from imagefactory.model import CheckState, Outcome
from imagefactory.oci.manifests import digest_of
from imagefactory.serialize import ObjectSchema, format_time, invalid_value_error
from imagefactory.settings.choices import POOLS
from imagefactory.suite.gpu import table
from imagefactory.trust.envelope import format_json, parse_envelope, parse_json, sign_envelope
from imagefactory.trust.keys import SigningKey
from imagefactory.verify.report import (
    MULTI_GPU_LEVELS,
    GpuReport,
    VerifiedImage,
    digits_of,
    format_gpu_report,
    parse_gpu_report,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A signed statement about one run. `report` is what it says; its outcome may be any word.

    `keyid` is that of the key that signed it, `digest` that of the signed payload: it stays the same whatever
    artifact carries the envelope, and is empty before the verdict is signed. It is valid from `issued` until
    `expires`, for its GPU's capability and for drivers from its own on.
    """

    report: GpuReport
    issued: datetime
    expires: datetime
    keyid: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A signed statement that verdicts of a subject hold no longer, signed by the key `keyid`.

    It speaks of verdicts about the manifest `subject`: of those in `verdicts` (digests of signed payloads, as
    Verdict.digest), where that is empty of all that were issued up to `before`; of one `capability`, all
    where that is empty. It takes back nothing that was issued from `end` on, when its key was retired; None
    for never. `about` is the image that `subject` is the manifest of.
    """

    subject: str
    verdicts: tuple[str, ...]
    capability: str
    before: datetime
    why: str
    keyid: str
    end: datetime | None = None
    about: VerifiedImage | None = None

    def covers(self, verdict: Verdict) -> bool:
        """Whether it takes this verdict back. Who may say so is judged when it is read."""
        report = verdict.report
        capability = report.device.capability if report.device else ""
        return (
            report.subject.manifest == self.subject
            and (verdict.digest in self.verdicts if self.verdicts else verdict.issued <= self.before)
            and self.capability in ("", capability)
            and (self.end is None or verdict.issued < self.end)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedCell:
    """Verdicts that were taken back: of the image or .sif `subject` on `capability`, empty for on any GPU.

    `by` is the name of the key `keyid` that signed the revocation at `when`, where it was judged.
    """

    subject: VerifiedImage
    capability: str
    by: str
    keyid: str
    when: datetime
    why: str

    @property
    def summary(self) -> str:
        """Who took it back, when and why."""
        return f"revoked by {self.by} on {self.when:%Y-%m-%d}: {self.why}"

    @property
    def where(self) -> str:
        """`on 8.0`, or `on all GPUs`."""
        return f"on {self.capability}" if self.capability else "on all GPUs"


class VerdictStatus(StrEnum):
    """Whether a verdict can be relied on, in the word that says why not."""

    GOOD = "good"
    UNSIGNED = "unsigned"
    EDITED = "edited"
    WRONG_KEY = "wrong-key"
    KEY_RETIRED = "key-retired"
    OTHER_SUBJECT = "other-subject"
    OTHER_SUITE = "other-suite"
    EXPIRED = "expired"
    NOT_YET = "not-yet"
    REPLAYED = "replayed"
    EVIDENCE_REFUSED = "evidence-refused"
    REVOKED = "revoked"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """A verdict as found in a store, None where it cannot be read, and whether it can be relied on.

    `digest` is that of the artifact that carries it. Anyone who may push can carry it by another one, so
    nothing but the artifact itself is known by it: `name` is the verdict's. `revocation` took it back, where
    it is REVOKED.
    """

    digest: str
    standing: VerdictStatus
    why: str
    verdict: Verdict | None
    revocation: Revocation | None = None

    @property
    def name(self) -> str:
        """The digest that people name it by: the signed payload's, the artifact's where that is not read."""
        return self.verdict.digest if self.verdict else self.digest

    @property
    def proves(self) -> bool:
        """Whether it says `verified` and can be relied on."""
        return (
            self.standing is VerdictStatus.GOOD
            and self.verdict is not None
            and self.verdict.report.outcome is Outcome.VERIFIED
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProgress:
    """How far a target's image is, by the store alone; `verified` on these capabilities."""

    built: bool = False
    pushed: bool = False
    verified: tuple[str, ...] = ()


# --- Statements: what a verdict says as bytes, signed, and read again
#     GpuReport -> sign() -> Signed          payload -> parse_verdict() -> Verdict
# A statement is an in-toto Statement v1 about one digest, that of the image's manifest. Its predicate
# is the report, as report.py writes it, with `issued` and `expires` (verdict.schema.json).
# The names of predicate types look like addresses and are none: nothing is ever fetched from there.


STATEMENT = "https://in-toto.io/Statement/v1"
VERDICT = "https://imagefactory.dev/verdict/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"

LONGEST_LIFE = timedelta(days=366)
SKEW = timedelta(minutes=5)
"""How far the clocks of two machines may be apart."""

SIGNABLE = (
    Outcome.VERIFIED,
    Outcome.WRONG_NUMBERS,
    Outcome.NO_KERNEL,
    Outcome.DRIVER_TOO_OLD,
    Outcome.LOAD_FAILED,
    Outcome.TIMEOUT,
)
"""What a run on a GPU says of an image; the other words are about the machine or about no run at all."""
SIGNABLE_MULTI_GPU = (Outcome.TOGETHER, Outcome.APART)
"""What a run of the level `several` says: in other words, so that nothing takes it for a claim about one."""
PASSES = (Outcome.VERIFIED, Outcome.TOGETHER)

_SIMULATED = re.compile(r"[0-9a-f]{2}223334-4445-5667-899a-abbccddeeff0")


_STATEMENT = ObjectSchema(_type=object, subject=object, predicateType=object, predicate=object)
_PERIOD = ObjectSchema(issued=datetime, expires=datetime)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedVerdict:
    """A verdict and its two envelopes: its own, and a test-result statement for other tools."""

    verdict: Verdict
    envelope: bytes
    test_result: bytes


# --- signing -------------------------------------------------------------------------------------


def jittered_expiry(report: GpuReport, days: int) -> int:
    """Up to a sixth fewer than `days`, by image and GPU: what one night proved need not lapse in one."""
    seed = f"{report.subject.manifest} {report.device.capability if report.device else ''}"
    return days - int(hashlib.sha256(seed.encode()).hexdigest(), 16) % (days // 6 + 1)


def sign(report: GpuReport, key: SigningKey, *, now: datetime, days: int) -> SignedVerdict:
    """Makes a verdict of a report, good for `days` days. Its outcome must be `signable`.

    Raises StatementError for a rehearsal, for a report that contradicts itself or leaves a check out, where
    no run on a GPU is behind it, and where the host's evidence of that GPU is missing or does not fit it.
    """
    why = contradiction(report) or missing_evidence(report) or _missing_check(report)
    if why:
        raise StatementError(
            "report-not-signable", f"this report cannot be signed: {why}", hint="see the output of the run"
        )
    if report.ended - now > SKEW:
        raise StatementError(
            "clock-skew",
            f"this report cannot be signed: it ended at {format_time(report.ended)}, which is in the future",
            hint="correct the clocks of both machines",
        )
    issued = now.replace(microsecond=0)
    verdict = Verdict(report=report, issued=issued, expires=issued + timedelta(days=days), keyid=key.keyid)
    payload = format_verdict(verdict)
    # Nothing is signed that nobody would read.
    verdict = parse_verdict(payload, "the statement to sign", key.keyid)
    envelope, test_result = sign_envelope(payload, key), sign_envelope(format_test_result(verdict), key)
    for data in (envelope, test_result):
        parse_envelope(data, "the statement to sign")  # base64 is a third longer
    return SignedVerdict(verdict=verdict, envelope=envelope, test_result=test_result)


def signable(report: GpuReport) -> bool:
    """Whether its outcome says anything of the image. Of several GPUs a run that took too long does not."""
    return report.outcome in (SIGNABLE_MULTI_GPU if report.level == MULTI_GPU_LEVELS else SIGNABLE)


def contradiction(report: GpuReport) -> str:
    """Why the report does not hold together; empty where it does."""
    states = {check.name: check.state for check in report.checks}
    if report.rehearsal:
        return "it is a rehearsal on the CPU"
    if not signable(report):
        return f"its outcome '{report.outcome}' is not that of a run on {_tested_gpu(report)}"
    if report.level == MULTI_GPU_LEVELS and (why := _miscounted(report)):
        return why
    if any(states.get(name) is not CheckState.NOT_RUN for name in report.waived):
        return "it waives a check that ran, or that it does not have"
    if report.outcome not in PASSES:
        return ""
    for name, state in states.items():
        if state is CheckState.FAILED or (state is CheckState.NOT_RUN and name not in report.waived):
            return f"it says {report.outcome}, and '{name}' is {state}"
    if CheckState.PASSED not in states.values():
        return f"it says {report.outcome}, and no check passed"
    return ""


def _tested_gpu(report: GpuReport) -> str:
    return "several GPUs" if report.level == MULTI_GPU_LEVELS else "a GPU"


def _miscounted(report: GpuReport) -> str:
    """Why it does not speak of as many GPUs as its host has, or waives a part of what it says of them."""
    device, hardware = report.device, report.hardware
    there = hardware.count_of(device.capability) if hardware and device else 0
    least = 2 if report.outcome is Outcome.TOGETHER else 0
    if not least <= report.gpus <= there:
        return f"it says {report.outcome} of {report.gpus} GPUs, and its host has {there} of that capability"
    return "it waives a check of several GPUs" if report.waived else ""


def missing_evidence(report: GpuReport) -> str:
    """Why the host's evidence does not show the GPU that the suite met; empty where it does.

    The GPU, or the one that its MIG instance is a part of, must be told by NVML with the same capability and
    by /proc, the machine must have a device node, and the driver must be known. Of a pool's job the pool
    tells the GPU, and it sees no node; what is simulated there is no GPU.
    """
    hardware, device = report.hardware, report.device
    if hardware is None:
        return "the host saw no GPU"
    if device is None:
        return "the suite met no GPU"
    pool = hardware.kind in POOLS
    if not hardware.driver or not (hardware.nodes or pool):
        return "nobody told the driver" if pool else "the host told no driver or no device node"
    teller = "the pool" if pool else "NVML"
    gpu = hardware.gpu_of(device.uuid)
    if gpu is None:
        return f"the suite met {device.uuid}, which {teller} does not tell"
    if gpu.uuid not in hardware.known:
        return f"the suite met {device.uuid}, which the driver itself does not tell"
    if gpu.capability != device.capability:
        return f"the suite met capability {device.capability}, and {teller} tells {gpu.capability}"
    return "the pool simulates that GPU" if pool and is_simulated(gpu.uuid) else ""


def is_simulated(uuid: str) -> bool:
    """Whether that is the UUID of a GPU that condor_gpu_discovery makes up (`-simulate`).

    Source: condor_gpu_discovery, the simulated devices: one pattern, whose first byte counts them.
    """
    return bool(_SIMULATED.fullmatch(digits_of(uuid)))


def _missing_check(report: GpuReport) -> str:
    names = {check.name for check in report.checks}
    missing = [name for name in table.checks_of(report.level) if name not in names]
    return f"the level '{report.level}' has the check '{missing[0]}', it does not" if missing else ""


# --- what is said ----------------------------------------------------------------------------------


def format_verdict(verdict: Verdict) -> bytes:
    """The statement's bytes. `keyid` and `digest` are not part of them."""
    report = verdict.report
    predicate = {
        **format_gpu_report(report),
        "issued": format_time(verdict.issued),
        "expires": format_time(verdict.expires),
    }
    return format_statement(report.subject, VERDICT, predicate)


def format_test_result(verdict: Verdict) -> bytes:
    """The same as a test-result statement v0.1, which other tools read; less is said, and it expires never.

    Source: in-toto attestation framework, predicates/test-result. WARNED is a pass with checks waived. Where
    it ran is an annotation of the suite, so that two runs never make one statement.
    """
    report = verdict.report
    device, driver = report.device, report.hardware.driver if report.hardware else ""
    where = {"capability": device.capability, "gpu": device.name} if device else {}
    where |= {"gpus": str(report.gpus)} if report.level == MULTI_GPU_LEVELS else {}
    named = {state: [check.name for check in report.checks if check.state is state] for state in CheckState}
    passed = "WARNED" if report.waived else "PASSED"
    predicate = {
        "result": passed if report.outcome in PASSES else "FAILED",
        "configuration": [
            {
                "name": f"gpu-suite-{report.level}",
                "digest": {"sha256": report.suite.removeprefix("sha256:")},
                "annotations": {**where, "driver": driver, "nonce": report.nonce},
            }
        ],
        "passedTests": named[CheckState.PASSED],
        "warnedTests": list(report.waived),
        "failedTests": named[CheckState.FAILED],
    }
    return format_statement(report.subject, TEST_RESULT, predicate)


def format_statement(subject: VerifiedImage, kind: str, predicate: Mapping[str, Any]) -> bytes:
    """An in-toto Statement v1 about the manifest of `subject`, which alone fixes what tools unpack."""
    return format_json(
        {
            "_type": STATEMENT,
            "subject": [
                {
                    "name": f"{subject.target or 'image'}/manifest",
                    "digest": {"sha256": subject.manifest.removeprefix("sha256:")},
                }
            ],
            "predicateType": kind,
            "predicate": predicate,
        }
    )


# --- reading it again ------------------------------------------------------------------------------


def parse_verdict(payload: bytes, where: str, keyid: str) -> Verdict:
    """The verdict that a statement's bytes say. Raises StatementError for bytes that are not a verdict's.

    That includes a validity that is none, and a run that ended after it was signed.
    """
    predicate = parse_predicate(payload, where, VERDICT)
    own = ("issued", "expires")
    report = parse_gpu_report({key: value for key, value in predicate.items() if key not in own}, where)
    period = _PERIOD.parse({key: value for key, value in predicate.items() if key in own}, where)
    verdict = Verdict(report=report, keyid=keyid, digest=digest_of(payload), **period)
    if not timedelta(0) < verdict.expires - verdict.issued <= LONGEST_LIFE:
        raise invalid_value_error(
            f"{where}: expires", f"it is not within {LONGEST_LIFE.days} days after it was issued"
        )
    if report.ended - verdict.issued > SKEW:
        raise invalid_value_error(f"{where}: ended", "it is after the signature")
    why = contradiction(report)
    if why:
        raise invalid_value_error(where, why)
    if format_verdict(verdict) != payload:
        raise invalid_value_error(
            where, "its subjects do not match its report, or it is not in canonical form"
        )
    return verdict


def parse_predicate(payload: bytes, where: str, kind: str) -> Mapping[str, Any]:
    """The predicate of a statement of this kind, in the one spelling. Raises StatementError."""
    statement = _STATEMENT.parse(parse_json(payload, where), where)
    if statement["_type"] != STATEMENT:
        raise invalid_value_error(f"{where}: _type", f"it is not {STATEMENT}")
    if statement["predicateType"] != kind:
        raise invalid_value_error(f"{where}: predicateType", f"it is not {kind}")
    predicate = statement["predicate"]
    if not isinstance(predicate, dict):
        raise invalid_value_error(f"{where}: predicate", "it is not an object")
    return predicate
