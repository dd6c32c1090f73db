"""What verdicts say of cells: the claims that tables call *verified*, by compute capability. Pure.

Only verdicts that can be relied on (Standing.GOOD) speak, each for the capability of its GPU alone: sm_86
is never inferred from sm_80. A pass holds for its driver and newer ones, a failure too; a driver that was
too old says that older ones are as well. Outcomes that say nothing of the image (`infrastructure`,
`timeout`, `no-gpu` and the like) are no claims: a test would tell.
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

SUITE = "suite"
"""The rule of a claim that says yes."""
REFUSALS = (Outcome.WRONG_NUMBERS, Outcome.NO_KERNEL, Outcome.DRIVER_TOO_OLD, Outcome.LOAD_FAILED)
"""The outcomes that say that an image is of no use there. Each is the rule of its claim."""
SOON = timedelta(days=14)
"""A proof that lapses within it is told."""
RENEWED = 10
"""In this part of its time a verdict is renewed: the last 9 of 90 days."""
_SPEAKING = (Outcome.VERIFIED, *REFUSALS)


def verified_claims(
    judged: Iterable[VerificationResult], driver: str = "", part: str = ""
) -> Mapping[Capability, CellClaim]:
    """The claim of each capability on which verdicts of one image speak of `driver` (empty: of any), of whole
    GPUs or with `part` of such slices (MIG): neither says anything of the other.

    Of several the one of the newest driver that is not newer than `driver` counts, then the newest verdict;
    without a driver the newest verdict, where a driver that was too old says nothing of others.
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
    """The capabilities of which so many GPUs at least worked together, by verdicts that can be relied on."""
    reports = (
        judgement.verdict.report
        for judgement in judged
        if judgement.verdict and judgement.standing is VerdictStatus.GOOD
    )
    capabilities = {
        report.device.capability
        for report in reports
        if report.outcome is Outcome.TOGETHER and report.device and report.gpus >= count
    }
    return tuple(sorted(capabilities, key=parse_capability))


VerifiedPeriod = tuple[datetime, datetime]
"""When something was verified, and until when that holds."""


def last_verdicts(
    judged: Iterable[VerificationResult], part: str = ""
) -> Mapping[Capability, VerifiedPeriod]:
    """When one image was last verified on each capability, by verdicts that hold or have expired."""
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
    """The same, but `verified` counts as expired in the last tenth of its time. Pure.

    Plans use it: a cell is verified again while its verdict is still valid, so readers see no gap.
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
    """When the oldest proof that holds was made, None where none holds, and how many lapse SOON."""

    oldest: datetime | None
    lapsing: int


def verdict_ages(proofs: Iterable[VerifiedPeriod], now: datetime) -> VerdictAges:
    """Of many images: how old it is what can be relied on."""
    holding = [(since, until) for since, until in proofs if until > now]
    return VerdictAges(
        oldest=min((since for since, _ in holding), default=None),
        lapsing=sum(until <= now + SOON for _, until in holding),
    )


def _covers_driver(verdict: Verdict, driver: str) -> bool:
    """Whether it says anything of a GPU with that driver."""
    report = verdict.report
    if report.outcome not in _SPEAKING or report.rehearsal or report.hardware is None:
        return False
    try:
        if report.outcome is Outcome.DRIVER_TOO_OLD:
            return bool(driver) and not older(report.hardware.driver, driver)
        return not driver or not older(driver, report.hardware.driver)
    except ValueError:  # no version that can be compared: it holds for nothing that is asked about
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
    where = f"on {gpu}, driver {driver}, {report.ended:%Y-%m-%d}"
    reason = f"passed the {report.level} suite {where}" if passed else f"{where}: {report.reason}"
    return CellClaim(
        basis=ClaimBasis.VERIFIED,
        answer=Compatibility.YES if passed else Compatibility.NO,
        rule=SUITE if passed else report.outcome.value,
        reason=reason,
        source=f"verdict {verdict.digest} of key {verdict.keyid[:12]}",
        driver=driver if passed else "",
    )
