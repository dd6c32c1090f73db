"""What is claimed of a combination, and verdicts as a judge found them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.model import Outcome, SourceLocation
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from imagefactory.verify import report
from imagefactory.verify.report import EVIDENCE_LOCAL, GpuReport, Hardware, VerifiedImage
from tests.made.values import make_target

TARGET = make_target(
    name="torchy-2.3-cu121",
    family="torchy",
    capabilities=("7.0", "8.0"),
    where=SourceLocation(file="recipes/torchy.yaml", line=3, column=5),
)
BUILT = "sha256:" + "a" * 64


def claim(
    rule: str, answer: Compatibility = Compatibility.NO, basis: ClaimBasis = ClaimBasis.PREDICTED
) -> CellClaim:
    return CellClaim(basis=basis, answer=answer, rule=rule, reason=f"because of {rule}", source="a test")


NOW = datetime(2026, 11, 22, tzinfo=UTC)
DEVICE = report.GpuIdentity(name="NVIDIA A100-SXM4-40GB", capability="8.0", uuid="GPU-1", memory=40 << 30)


def judged(
    outcome: Outcome = Outcome.VERIFIED,
    driver: str = "535.54.03",
    capability: str = "8.0",
    days: int = 0,
    standing: VerdictStatus = VerdictStatus.GOOD,
) -> VerificationResult:
    """A verdict of `days` ago as a judge found it."""
    device, when = replace(DEVICE, capability=capability), NOW - timedelta(days=days)
    hardware = Hardware(
        kind=EVIDENCE_LOCAL, driver=driver, gpus=(device,), known=(device.uuid,), nodes=("/dev/nvidia0",)
    )
    report = GpuReport(
        subject=VerifiedImage(target="t", index=BUILT, manifest=BUILT, config=BUILT),
        suite=BUILT,
        level="full",
        nonce="0" * 32,
        started=when,
        ended=when,
        runner="docker",
        hardware=hardware,
        device=device,
        cuda="12.4",
        checks=(),
        outcome=outcome,
        reason="all checks passed" if outcome is Outcome.VERIFIED else f"the reason of {outcome}",
    )
    digest = f"sha256:{days:064x}"
    verdict = Verdict(
        report=report, issued=when, expires=when + timedelta(days=90), keyid="k" * 64, digest=digest
    )
    return VerificationResult(digest=digest, standing=standing, why="", verdict=verdict)
