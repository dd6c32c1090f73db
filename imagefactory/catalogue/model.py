"""The frozen values of a catalogue: images by digest, what is predicted of them, and their verdicts.

A catalogue says which image a target is and carries the verdicts' own envelopes, so a reader judges each by
his own trust and clock. Digests are `sha256:<64 hex>`, sizes bytes, capabilities `8.0`. Envelopes come with
the digest of the artifact that carries them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from imagefactory.gpu.values import Claim
from imagefactory.model import NO_CUDA
from imagefactory.trust.verdict import Judged, RevokedCell
from imagefactory.verify.model import Subject

Envelopes = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguedSif:
    """A .sif of an image: `sha256` and `size` of the file, `reference` HOST/NAME@sha256:... or empty.

    Empty: it is in the store of whoever made the catalogue alone. What was verified in it is its own.
    """

    sha256: str
    size: int
    reference: str
    subject: Subject
    envelopes: Envelopes = ()
    revocations: Envelopes = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguedImage:
    """The image of a target. `reference` is HOST/NAME@sha256:... of its index, empty where none has it.

    `framework` is the distribution (`torch`), `version` that of the lock (`2.3.1`). `size` is what is
    transferred, `unpacked` what that becomes on a disk, 0 where whoever made the catalogue could not tell.
    `cuda` is that of the target (`12.1`, `13`; `rocm7`; NO_CUDA: for CPUs alone), `runtime` the CUDA whose
    libraries came. `driver` is the lowest on which its machine code runs, and `minor_compat` says that it is
    the first of its CUDA's major (CUDA's minor-version compatibility). `required` are the capabilities that
    its recipe requires.
    `predicted` are the weightiest claims without a verdict, by capability, those that say no too. `envelopes`
    are verdicts and `revocations` what takes some back. `revoked` says what was taken back of the target, of
    other images too.
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
    envelopes: Envelopes = ()
    revocations: Envelopes = ()
    revoked: tuple[RevokedCell, ...] = ()

    def revoked_of(self, subject: Subject) -> tuple[RevokedCell, ...]:
        """What was taken back of this image, or of one of its .sif files."""
        return tuple(row for row in self.revoked if row.subject.manifest == subject.manifest)

    @property
    def gpu(self) -> bool:
        """Whether it is for GPUs, not for CPUs alone."""
        return self.cuda != NO_CUDA

    @property
    def only_sif(self) -> bool:
        """Whether it is a .sif and no image that docker could run: apptainer built it of a definition."""
        return any(sif.subject.manifest == self.subject.manifest for sif in self.sifs)


class CatalogueSource(StrEnum):
    """Where a catalog came from: made here just now, the place of the settings, a mirror of it, or the copy
    that this reader keeps."""

    MADE = "made"
    PLACE = "place"
    MIRROR = "mirror"
    KEPT = "kept"


SOON = timedelta(days=7)
"""So long before a catalog expires its readers are warned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """What one registry offers at one time. `keyid` signed it; empty for one that was made here just now.

    `suites` are the digests of suites whose verdicts counted where it was made. `source` and `notes` are no
    part of it: they say how this reader got it, and what to print about that.
    """

    made: datetime
    expires: datetime
    images: tuple[CataloguedImage, ...]
    suites: tuple[str, ...] = ()
    keyid: str = ""
    source: CatalogueSource = field(default=CatalogueSource.PLACE, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def expires_soon(self, now: datetime) -> bool:
        return self.expires - now < SOON


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedSif:
    """A .sif with its own verdicts judged: what was run is the file, not the image that it was made from."""

    sif: CataloguedSif
    judged: tuple[Judged, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An image with its verdicts judged by whom the reader trusts, now; its .sif files with theirs."""

    image: CataloguedImage
    judged: tuple[Judged, ...]
    sifs: tuple[OfferedSif, ...] = ()
