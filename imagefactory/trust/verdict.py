"""Verdicts: values, signing and parsing."""

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
    NODES,
    GpuReport,
    VerifiedImage,
    digits_of,
    format_gpu_report,
    parse_gpu_report,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A signed report of one run, with any outcome.

    `keyid` is the key that signed it. `digest` is the digest of the signed payload: equal in every artifact
    with this verdict, and empty before signing. The verdict is valid from `issued` until `expires`, for the
    capability of its GPU, and for its driver and newer drivers.
    """

    report: GpuReport
    issued: datetime
    expires: datetime
    keyid: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A signed statement that verdicts of a subject are no longer valid. `keyid` is the key that signed it.

    It revokes verdicts of the manifest `subject`: those in `verdicts` (values of Verdict.digest) or, if that
    is empty, all issued up to `before`; only on `capability` if that is not empty. It does not revoke
    verdicts issued from `end` on, when the key was retired; None means never. `about` is the image of the
    manifest.
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
        """Return whether this revocation applies to the verdict. The caller has verified the signature."""
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
    """Revoked verdicts of the image or .sif file `subject` on `capability`, empty for any GPU.

    The key `keyid` with the name `by` signed the revocation at `when`.
    """

    subject: VerifiedImage
    capability: str
    by: str
    keyid: str
    when: datetime
    why: str

    @property
    def summary(self) -> str:
        """Return a line with the key, the time and the reason."""
        return f"revoked by {self.by} on {self.when:%Y-%m-%d}: {self.why}"

    @property
    def where(self) -> str:
        """Return `on 8.0`, or `on all GPUs`."""
        return f"on {self.capability}" if self.capability else "on all GPUs"


class VerdictStatus(StrEnum):
    """The status of a verdict: valid, or the reason why it does not count."""

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
    """A verdict in a store, None if it cannot be read, and its status.

    `digest` is the digest of the artifact. The same verdict can be in several artifacts, so people refer to a
    verdict by `name`. `revocation` is set if the status is REVOKED.
    """

    digest: str
    standing: VerdictStatus
    why: str
    verdict: Verdict | None
    revocation: Revocation | None = None

    @property
    def name(self) -> str:
        """Return the digest to show to people: that of the signed payload, or of the artifact if the payload
        was not read.
        """
        return self.verdict.digest if self.verdict else self.digest

    @property
    def proves(self) -> bool:
        """Return whether the verdict counts and its outcome is `verified`."""
        return (
            self.standing is VerdictStatus.GOOD
            and self.verdict is not None
            and self.verdict.report.outcome is Outcome.VERIFIED
        )


# --- Statements: a verdict as bytes
#     GpuReport -> sign() -> SignedVerdict          payload -> parse_verdict() -> Verdict
# A statement is an in-toto Statement v1 about one digest, that of the image's manifest. Its predicate is the
# report, as report.py writes it, with `issued` and `expires` (verdict.schema.json). The names of predicate
# types look like addresses, but nothing is ever fetched from there.

STATEMENT = "https://in-toto.io/Statement/v1"
VERDICT = "https://imagefactory.dev/verdict/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"

LONGEST_LIFE = timedelta(days=366)
SKEW = timedelta(minutes=5)
"""The largest tolerated difference between the clocks of two machines."""

SIGNABLE = (
    Outcome.VERIFIED,
    Outcome.WRONG_NUMBERS,
    Outcome.NO_KERNEL,
    Outcome.DRIVER_TOO_OLD,
    Outcome.LOAD_FAILED,
    Outcome.TIMEOUT,
)
"""Outcomes of a run on a GPU that are about the image. All others are about the machine."""
SIGNABLE_MULTI_GPU = (Outcome.TOGETHER, Outcome.APART)
"""Outcomes of several GPUs or nodes. They have other names, so that they are not claims about one GPU."""
PASSES = (Outcome.VERIFIED, Outcome.TOGETHER)

NODE_NOTE = re.compile(r"node-[0-9]{1,3}")
"""The note of a node in a job of several: its name, the UUID of its GPU, capability and driver."""
_SIMULATED = re.compile(r"[0-9a-f]{2}223334-4445-5667-899a-abbccddeeff0")


_STATEMENT = ObjectSchema(_type=object, subject=object, predicateType=object, predicate=object)
_PERIOD = ObjectSchema(issued=datetime, expires=datetime)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedVerdict:
    """A verdict and two envelopes: the verdict, and a test-result statement for other tools."""

    verdict: Verdict
    envelope: bytes
    test_result: bytes


def jittered_expiry(report: GpuReport, days: int) -> int:
    """Return `days` minus up to a sixth, by image and GPU, so that verdicts of one night expire on several
    days.
    """
    seed = f"{report.subject.manifest} {report.device.capability if report.device else ''}"
    return days - int(hashlib.sha256(seed.encode()).hexdigest(), 16) % (days // 6 + 1)


def sign(report: GpuReport, key: SigningKey, *, now: datetime, days: int) -> SignedVerdict:
    """Sign a report as a verdict that is valid for `days` days. The outcome must be `signable`.

    Raises StatementError if the report is a rehearsal, contradicts itself, lacks a check, has no run on a
    GPU, or has a GPU that the evidence of the host does not confirm.
    """
    reason = contradiction(report) or missing_evidence(report) or _missing_check(report)
    if reason:
        raise StatementError(
            "report-not-signable",
            f"this report cannot be signed: {reason}",
            hint="correct the problem and verify the image again: imagefactory verify TARGET",
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
    # Reports that readers would reject are not signed.
    verdict = parse_verdict(payload, "the statement to sign", key.keyid)
    envelope, test_result = sign_envelope(payload, key), sign_envelope(format_test_result(verdict), key)
    for data in (envelope, test_result):
        parse_envelope(data, "the statement to sign")  # base64 is a third longer
    return SignedVerdict(verdict=verdict, envelope=envelope, test_result=test_result)


def signable(report: GpuReport) -> bool:
    """Return whether the outcome is about the image. A time-out on several GPUs is not."""
    return report.outcome in (SIGNABLE_MULTI_GPU if report.level in MULTI_GPU_LEVELS else SIGNABLE)


def contradiction(report: GpuReport) -> str:
    """Return the contradiction in a report, empty if there is none."""
    states = {check.name: check.state for check in report.checks}
    if report.rehearsal:
        return "it is a rehearsal on the CPU"
    if not signable(report):
        number = "several GPUs" if report.level in MULTI_GPU_LEVELS else "a GPU"
        return f"its outcome '{report.outcome}' is not that of a run on {number}"
    if report.level in MULTI_GPU_LEVELS and (reason := _gpu_count_problem(report)):
        return reason
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


def _gpu_count_problem(report: GpuReport) -> str:
    """Return the problem if the number of GPUs differs from the host's, or if a check for several GPUs is
    waived.
    """
    device, hardware = report.device, report.hardware
    there = hardware.count_of(device.capability) if hardware and device else 0
    if report.level == NODES:  # the other nodes are notes, with a GPU each
        nodes = nodes_of(report)
        there = len(nodes) if device and device.uuid in nodes else 0
    least = 2 if report.outcome is Outcome.TOGETHER else 0
    if not least <= report.gpus <= there:
        return f"it says {report.outcome} of {report.gpus} GPUs, and its host has {there} of that capability"
    return "it waives a check of several GPUs" if report.waived else ""


def nodes_of(report: GpuReport) -> Mapping[str, str]:
    """Return the name of each node by the UUID of its GPU, from the evidence of these nodes."""
    notes = report.hardware.notes if report.hardware else ()
    rows = (text.split(" ") for name, text in notes if NODE_NOTE.fullmatch(name))
    return {row[1]: row[0] for row in rows if len(row) > 1}


def missing_evidence(report: GpuReport) -> str:
    """Return why the evidence of the host does not confirm the GPU in the report, empty if it does.

    NVML and /proc must list the GPU with the same capability; for a MIG instance, its whole GPU. The machine
    must have a device node, and the driver must be known. For a job in a pool, the pool must list the GPU;
    device nodes are not required, and a simulated GPU does not count.
    """
    hardware, device = report.hardware, report.device
    if hardware is None:
        return "the host saw no GPU"
    if device is None:
        return "the suite met no GPU"
    pool = hardware.kind in POOLS
    if not hardware.driver or not (hardware.nodes or pool):
        return "the driver is unknown" if pool else "the host has no driver or no device node"
    teller = "the pool" if pool else "NVML"
    gpu = hardware.gpu_of(device.uuid)
    if gpu is None:
        return f"the suite met {device.uuid}, which {teller} does not list"
    if gpu.uuid not in hardware.known:
        return f"the suite met {device.uuid}, which the driver does not list"
    if gpu.capability != device.capability:
        return f"the suite met capability {device.capability}, but {teller} reports {gpu.capability}"
    return "the pool simulates that GPU" if pool and is_simulated(gpu.uuid) else ""


def is_simulated(uuid: str) -> bool:
    """Return whether condor_gpu_discovery invented the GPU with this UUID (option `-simulate`).

    Source: condor_gpu_discovery, simulated devices. Their UUIDs have one pattern, whose first byte is a
    counter.
    """
    return bool(_SIMULATED.fullmatch(digits_of(uuid)))


def _missing_check(report: GpuReport) -> str:
    names = {check.name for check in report.checks}
    missing = [name for name in table.checks_of(report.level) if name not in names]
    return f"the level '{report.level}' has the check '{missing[0]}', it does not" if missing else ""


def format_verdict(verdict: Verdict) -> bytes:
    """Return the bytes of the statement, without `keyid` and `digest`."""
    period = {"issued": format_time(verdict.issued), "expires": format_time(verdict.expires)}
    return format_statement(verdict.report.subject, VERDICT, {**format_gpu_report(verdict.report), **period})


def format_test_result(verdict: Verdict) -> bytes:
    """Return the verdict as a test-result statement v0.1 for other tools: shorter, and without an expiry.

    Source: in-toto attestation framework, predicates/test-result. WARNED is a pass with waived checks. The
    GPU is an annotation of the suite, so that two runs never make the same statement.
    """
    report = verdict.report
    device, driver = report.device, report.hardware.driver if report.hardware else ""
    device_fields = {"capability": device.capability, "gpu": device.name} if device else {}
    device_fields |= {"gpus": str(report.gpus)} if report.level in MULTI_GPU_LEVELS else {}
    named = {state: [check.name for check in report.checks if check.state is state] for state in CheckState}
    passed = "WARNED" if report.waived else "PASSED"
    predicate = {
        "result": passed if report.outcome in PASSES else "FAILED",
        "configuration": [
            {
                "name": f"gpu-suite-{report.level}",
                "digest": {"sha256": report.suite.removeprefix("sha256:")},
                "annotations": {**device_fields, "driver": driver, "nonce": report.nonce},
            }
        ],
        "passedTests": named[CheckState.PASSED],
        "warnedTests": list(report.waived),
        "failedTests": named[CheckState.FAILED],
    }
    return format_statement(report.subject, TEST_RESULT, predicate)


def format_statement(subject: VerifiedImage, kind: str, predicate: Mapping[str, Any]) -> bytes:
    """Return an in-toto Statement v1 about the manifest of `subject`, which tools use to unpack the image."""
    digest = {"sha256": subject.manifest.removeprefix("sha256:")}
    about = [{"name": f"{subject.target or 'image'}/manifest", "digest": digest}]
    return format_json({"_type": STATEMENT, "subject": about, "predicateType": kind, "predicate": predicate})


def parse_verdict(payload: bytes, location: str, keyid: str) -> Verdict:
    """Parse the bytes of a statement. Raises StatementError if they are not a valid verdict.

    A run that ended after the signature, or an invalid period, is also an error.
    """
    predicate = parse_predicate(payload, location, VERDICT)
    time_fields = ("issued", "expires")
    report = parse_gpu_report(
        {key: value for key, value in predicate.items() if key not in time_fields}, location
    )
    period = _PERIOD.parse({key: value for key, value in predicate.items() if key in time_fields}, location)
    verdict = Verdict(report=report, keyid=keyid, digest=digest_of(payload), **period)
    if not timedelta(0) < verdict.expires - verdict.issued <= LONGEST_LIFE:
        message = f"it is not within {LONGEST_LIFE.days} days after it was issued"
        raise invalid_value_error(f"{location}: expires", message)
    if report.ended - verdict.issued > SKEW:
        raise invalid_value_error(f"{location}: ended", "it is after the signature")
    reason = contradiction(report)
    if reason:
        raise invalid_value_error(location, reason)
    if format_verdict(verdict) != payload:
        message = "its subjects do not match its report, or it is not in canonical form"
        raise invalid_value_error(location, message)
    return verdict


def parse_predicate(payload: bytes, location: str, kind: str) -> Mapping[str, Any]:
    """Return the predicate of a statement of this type in canonical form. Raises StatementError."""
    statement = _STATEMENT.parse(parse_json(payload, location), location)
    if statement["_type"] != STATEMENT:
        raise invalid_value_error(f"{location}: _type", f"it is not {STATEMENT}")
    if statement["predicateType"] != kind:
        raise invalid_value_error(f"{location}: predicateType", f"it is not {kind}")
    predicate = statement["predicate"]
    if not isinstance(predicate, dict):
        raise invalid_value_error(f"{location}: predicate", "it is not an object")
    return predicate
