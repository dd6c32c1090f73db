"""A catalog for tests, with verdicts of throwaway keys. No GPU is behind them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.trust.catalog import (
    FORM,
    LIFE,
    Catalog,
    CatalogImage,
    CatalogSif,
    format_catalog,
    format_image,
    open_catalog,
)
from imagefactory.trust.envelope import format_json, sign_envelope
from imagefactory.trust.verdict import sign
from imagefactory.verify.report import GpuReport, VerifiedImage
from tests.made.verdicts import LAB, NOW, SUBJECT, SUITE, digest, whole_report

PREDICTED = CellClaim(
    basis=ClaimBasis.PREDICTED,
    answer=Compatibility.YES,
    rule="code",
    reason="sm_80",
    source="scan of x",
    driver="525.60",
)
REFUSED = CellClaim(
    basis=ClaimBasis.DOCUMENTED,
    answer=Compatibility.NO,
    rule="not-documented",
    reason="none",
    source="a page",
    driver="",
)
SIF_SUBJECT = VerifiedImage(
    target=SUBJECT.target, index=digest("6"), manifest=digest("6"), config=digest("7")
)


def signed(report: GpuReport, name: str) -> tuple[str, bytes]:
    """An envelope under the digest of an artifact that is made up."""
    return digest(name), sign(report, LAB, now=NOW, days=30).envelope


def make_image(**changes: Any) -> CatalogImage:
    image = CatalogImage(
        target=SUBJECT.target,
        family="pytorch",
        framework="torch",
        version="2.3.1",
        cuda="12.1",
        python="3.11",
        platform="linux/amd64",
        reference=f"registry.example.org/gpu/pytorch@{SUBJECT.index}",
        subject=SUBJECT,
        size=3 << 30,
        unpacked=7 << 30,
        runtime="12.1",
        minor_compat=True,
        driver="525",
        required=("7.0", "8.0"),
        predicted=(("7.0", PREDICTED), ("3.5", REFUSED)),
        sifs=(
            CatalogSif(
                sha256=SIF_SUBJECT.config,
                size=4 << 30,
                reference="",
                subject=SIF_SUBJECT,
                envelopes=(signed(whole_report(subject=SIF_SUBJECT, nonce="b" * 32), "2"),),
            ),
        ),
        envelopes=(signed(whole_report(), "1"),),
    )
    return replace(image, **changes)


def make_catalog(*images: CatalogImage, **changes: Any) -> Catalog:
    made = NOW - timedelta(hours=1)
    catalog = Catalog(
        created=made, expires=made + LIFE, images=images or (make_image(),), suites=(SUITE,), keyid=LAB.keyid
    )
    return replace(catalog, **changes)


def old_payload(catalog: Catalog) -> bytes:
    """The payload of a catalog of format 1, which has all images in it."""
    index = json.loads(format_catalog(catalog)[0])
    return format_json({**index, "format": 1, "images": [format_image(image) for image in catalog.images]})


def old_catalog(catalog: Catalog) -> bytes:
    """The file of a catalog of format 1."""
    return sign_envelope(old_payload(catalog), LAB, FORM)


def envelope_of(data: bytes) -> bytes:
    """The envelope in the file of a catalog."""
    return open_catalog(data, "x").envelope


def with_envelope(data: bytes, envelope: bytes) -> bytes:
    """The file of a catalog with another envelope before its images, which is not compressed."""
    return envelope + b"\n" + data[open_catalog(data, "x").start :]
