"""The frozen values of a catalogue: images by digest, what is predicted of them, and their verdicts.

A catalogue says which image a target is and carries the verdicts' own envelopes, so a reader judges each by
his own trust and clock. Digests are `sha256:<64 hex>`, sizes bytes, capabilities `8.0`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from imagefactory.gpu.model import Claim
from imagefactory.verify.model import Judged, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguedSif:
    """A .sif of an image: `sha256` and `size` of the file, `reference` HOST/NAME@sha256:... or empty."""

    sha256: str
    size: int
    reference: str
    subject: Subject
    envelopes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguedImage:
    """The image of a target. `reference` is HOST/NAME@sha256:... of its index.

    `cuda` is that of the target (`12.1`, `13`), `runtime` the CUDA that its libraries need of a driver.
    `minor_compat`: a driver of the same CUDA major is enough (`minor-compat`), else `strict`. `driver` is the
    lowest documented one. `required` are the capabilities that its recipe requires. `predicted` are claims
    that no verdict backs, by capability. `envelopes` are verdicts and `revocations` what takes some back.
    """

    target: str
    family: str
    framework: str
    version: str
    cuda: str
    python: str
    platform: str
    reference: str
    subject: Subject
    size: int
    unpacked: int
    runtime: str
    minor_compat: bool
    driver: str
    required: tuple[str, ...]
    predicted: tuple[tuple[str, Claim], ...] = ()
    sifs: tuple[CataloguedSif, ...] = ()
    envelopes: tuple[bytes, ...] = ()
    revocations: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """What one registry offers at one time. `keyid` signed it; empty for one that was made here just now."""

    made: datetime
    expires: datetime
    images: tuple[CataloguedImage, ...]
    keyid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An image with its verdicts judged by whom the reader trusts, now."""

    image: CataloguedImage
    judged: tuple[Judged, ...]
