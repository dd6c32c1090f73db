"""Claims from verdicts, by compute capability. Tables show them as *verified*. Pure functions.

Only valid verdicts (VerdictStatus.GOOD) make claims, each only for the capability of its GPU: sm_86 is never
inferred from sm_80. Passes and failures apply to the driver of the run and to newer ones; `driver-too-old`
applies to older ones. Outcomes that are not about the image (`infrastructure`, `timeout`, `no-gpu`) make no
claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.drivers import older, parse_driver
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.model import Outcome
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from imagefactory.verify.report import SEVERAL

SUITE = "suite"
"""The rule name of a positive claim."""
REFUSALS = (Outcome.WRONG_NUMBERS, Outcome.NO_KERNEL, Outcome.DRIVER_TOO_OLD, Outcome.LOAD_FAILED)
"""The negative outcomes of an image. The name of each outcome is the rule name of its claim."""
SOON = timedelta(days=14)
"""Verdicts that expire within this time are reported."""
RENEWED = 10
"""A verdict is renewed in the last tenth of its validity: the last 9 of 90 days."""
_SPEAKING = (Outcome.VERIFIED, *REFUSALS)


def verified_claims(
    judged: Iterable[VerificationResult], driver: str = "", part: str = ""
) -> Mapping[Capability, CellClaim]:
    """Return the claim about each capability of one image for `driver` (empty: any driver).

    `part` selects a MIG slice; without `part`, claims are about whole GPUs. The verdict with the newest
    driver up to `driver` decides; of equal drivers, the newest verdict. Without `driver`, the newest verdict
    decides.
    """
    by_capability: dict[Capability, Verdict] = {}
    for judgement in judged:
        verdict = judgement.verdict
        if (
            verdict is None
            or judgement.standing is not VerdictStatus.GOOD
            or not _covers_driver(verdict, driver)
        ):
            continue
        if not _is_of(verdict, part):
            continue
        capability = _capability(verdict)
        if capability is not None and (
            capability not in by_capability
            or _weight(verdict, driver) > _weight(by_capability[capability], driver)
        ):
            by_capability[capability] = verdict
    return {capability: _claim(verdict) for capability, verdict in sorted(by_capability.items())}


def multi_gpu_capabilities(judged: Iterable[VerificationResult], count: int) -> tuple[str, ...]:
    """Return the capabilities on which a test of at least `count` GPUs passed, by valid verdicts."""
    reports = (
        judgement.verdict.report
        for judgement in judged
        if judgement.verdict and judgement.standing is VerdictStatus.GOOD
    )
    capabilities = {
        report.device.capability
        for report in reports
        if report.outcome is Outcome.TOGETHER
        and report.level == SEVERAL
        and report.device
        and report.gpus >= count
    }
    return tuple(sorted(capabilities, key=parse_capability))


VerifiedPeriod = tuple[datetime, datetime]
"""The time of a verification, and the time when it expires."""


def last_verdicts(
    judged: Iterable[VerificationResult], part: str = ""
) -> Mapping[Capability, VerifiedPeriod]:
    """Return the last verification of an image on each capability, by valid or expired verdicts."""
    periods: dict[Capability, VerifiedPeriod] = {}
    for judgement in judged:
        if judgement.verdict is None or judgement.standing not in (VerdictStatus.GOOD, VerdictStatus.EXPIRED):
            continue
        capability = _capability(judgement.verdict) if _is_of(judgement.verdict, part) else None
        if capability is not None and judgement.verdict.report.outcome is Outcome.VERIFIED:
            proof = judgement.verdict.issued, judgement.verdict.expires
            periods[capability] = max(proof, periods.get(capability, proof))
    return periods


def to_renew(judged: Iterable[VerificationResult], now: datetime) -> tuple[VerificationResult, ...]:
    """Return the results, with `verified` replaced by expired in the last tenth of its validity.

    Plans use this: imagefactory verifies a cell again while its verdict is still valid, so readers see no
    gap.
    """
    return tuple(
        replace(judgement, standing=VerdictStatus.EXPIRED)
        if judgement.proves
        and judgement.verdict
        and judgement.verdict.expires - now < _life(judgement.verdict) / RENEWED
        else judgement
        for judgement in judged
    )


def _life(verdict: Verdict) -> timedelta:
    return verdict.expires - verdict.issued


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictAges:
    """The time of the oldest valid verdict, or None, and the number of verdicts that expire within SOON."""

    oldest: datetime | None
    expiring: int


def verdict_ages(proofs: Iterable[VerifiedPeriod], now: datetime) -> VerdictAges:
    """Return the ages of the valid verdicts of many images."""
    holding = [(since, until) for since, until in proofs if until > now]
    return VerdictAges(
        oldest=min((since for since, _ in holding), default=None),
        expiring=sum(until <= now + SOON for _, until in holding),
    )


def _covers_driver(verdict: Verdict, driver: str) -> bool:
    """Return whether a verdict applies to a GPU with that driver."""
    report = verdict.report
    if report.outcome not in _SPEAKING or report.rehearsal or report.hardware is None:
        return False
    try:
        if report.outcome is Outcome.DRIVER_TOO_OLD:
            return bool(driver) and not older(report.hardware.driver, driver)
        return not driver or not older(driver, report.hardware.driver)
    except ValueError:  # not a version that can be compared: it covers no driver
        return False


def _is_of(verdict: Verdict, part: str) -> bool:
    device = verdict.report.device
    return device is not None and device.part == part


def _capability(verdict: Verdict) -> Capability | None:
    device = verdict.report.device
    try:
        return parse_capability(device.capability) if device else None
    except ValueError:
        return None


def _weight(verdict: Verdict, driver: str) -> tuple[object, ...]:
    hardware = verdict.report.hardware
    near = parse_driver(hardware.driver) if driver and hardware else ()
    return near, verdict.issued, verdict.digest


def _claim(verdict: Verdict) -> CellClaim:
    report = verdict.report
    driver = report.hardware.driver if report.hardware else ""
    gpu = report.device.name if report.device else ""
    passed = report.outcome is Outcome.VERIFIED
    location = f"on {gpu}, driver {driver}, {report.ended:%Y-%m-%d}"
    reason = f"passed the {report.level} suite {location}" if passed else f"{location}: {report.reason}"
    return CellClaim(
        basis=ClaimBasis.VERIFIED,
        answer=Compatibility.YES if passed else Compatibility.NO,
        rule=SUITE if passed else report.outcome.value,
        reason=reason,
        source=f"verdict {verdict.digest} of key {verdict.keyid[:12]}",
        driver=driver if passed else "",
    )
