"""Offers for tests of submit files: an image with verdicts by capability, and a .sif of it with its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.jobs.offer import GpuClass, choose_form, forms_of
from imagefactory.jobs.spec import JobSpec
from imagefactory.model import Outcome
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import find_site
from imagefactory.trust.catalog import Catalog, CatalogImage, CatalogSif, ImageOffer, SifOffer
from imagefactory.trust.verdict import VerdictStatus, VerificationResult
from imagefactory.verify.report import VerifiedImage
from tests.made.claims import judged as judged_verdict

NOW = datetime(2026, 11, 22, 6, tzinfo=UTC)
GB = 2**30


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


REFERENCE = f"registry.example.org/gpu/pytorch@{digest('a')}"
IMAGE = CatalogImage(
    target="pytorch-2.3-cu121",
    family="pytorch",
    framework="torch",
    version="2.3.1",
    cuda="12.1",
    python="3.11",
    platform="linux/amd64",
    reference=REFERENCE,
    subject=VerifiedImage(
        target="pytorch-2.3-cu121", index=digest("a"), manifest=digest("b"), config=digest("c")
    ),
    size=3 * GB,
    unpacked=7 * GB,
    runtime="12.1",
    minor_compat=True,
    driver="525",
    required=("8.0",),
)
SIF = CatalogSif(
    sha256=digest("d"),
    size=4 * GB,
    reference=f"registry.example.org/gpu/pytorch@{digest('e')}",
    subject=VerifiedImage(
        target="pytorch-2.3-cu121", index=digest("e"), manifest=digest("e"), config=digest("d")
    ),
)


def verdict(
    capability: str, driver: str = "550.54.15", cuda: str = "12.4", **more: Any
) -> VerificationResult:
    """A verdict as a judge found it; `more` are arguments of test_claims.judged."""
    one = judged_verdict(capability=capability, driver=driver, **more)
    assert one.verdict is not None
    return replace(one, verdict=replace(one.verdict, report=replace(one.verdict.report, cuda=cuda)))


def failed(
    capability: str, outcome: Outcome, driver: str = "550.54.15", cuda: str = "12.4"
) -> VerificationResult:
    return verdict(capability, driver, cuda, outcome=outcome)


def expired(capability: str) -> VerificationResult:
    return replace(
        verdict(capability), standing=VerdictStatus.EXPIRED, why="it held until 2026-01-01T00:00:00Z"
    )


def prediction(
    answer: Compatibility = Compatibility.YES,
    driver: str = "525.60.13",
    basis: ClaimBasis = ClaimBasis.PREDICTED,
) -> CellClaim:
    return CellClaim(
        basis=basis,
        answer=answer,
        rule="code",
        reason="sm_86 is in all of it",
        source="scan of a wheel",
        driver=driver,
    )


def offer(
    *judged: VerificationResult, of_sif: Sequence[VerificationResult] | None = None, **changes: Any
) -> ImageOffer:
    """An offer of IMAGE with these verdicts; with a .sif where `of_sif` is given."""
    sifs = () if of_sif is None else (SifOffer(sif=SIF, judged=tuple(of_sif)),)
    image = replace(IMAGE, **changes, sifs=tuple(one.sif for one in sifs))
    return ImageOffer(image=image, judged=judged, sifs=sifs)


def catalog_of(image: CatalogImage) -> Catalog:
    return Catalog(created=NOW, expires=NOW + timedelta(days=30), images=(image,))


def gpu_class(capability: str, cuda: str = "12.4", basis: ClaimBasis = ClaimBasis.VERIFIED) -> GpuClass:
    major, _, minor = capability.partition(".")
    return GpuClass(
        capability=Capability(int(major), int(minor)),
        cuda=cuda,
        claim=replace(prediction(basis=basis), reason=f"ran on {capability}"),
    )


def job_spec(
    *capabilities: str,
    offered: ImageOffer | None = None,
    site: str = "generic",
    kind: ImageKind | None = None,
    folder: str = "",
    **changes: Any,
) -> JobSpec:
    """Return a job that runs train.sh on verified GPUs of `capabilities`, by default those of `offered`."""
    some = offered or offer(verdict("8.0"), of_sif=[])
    form = choose_form(forms_of(some, folder), find_site(site), kind)
    fields: dict[str, Any] = {
        "name": "train",
        "executable": "train.sh",
        "image": form.image,
        "classes": form.grounds.classes if offered else tuple(map(gpu_class, capabilities or ("8.0",))),
        "excluded": form.grounds.refused,
        "platform": IMAGE.platform,
        **changes,
    }
    return JobSpec(target=IMAGE.target, site=find_site(site), date=NOW, **fields)
