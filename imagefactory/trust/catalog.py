"""A catalogue as bytes: written, signed, and read again by people who have no factory.

    Catalogue -> format_catalogue() -> sign_catalogue() -> envelope
    envelope + Trust + now -> open_catalogue() -> Catalogue

One DSSE envelope with everything in it, the verdicts' own envelopes too. The parser takes exactly what the
formatter gives. A catalogue is believed for LIFE, so whoever holds back a newer one, or a revocation in it,
does so for that long at most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

from imagefactory.errors import StatementError, UsageError
from imagefactory.gpu.builds import ROCM
from imagefactory.gpu.values import Answer, Basis, Claim
from imagefactory.model import NO_CUDA
from imagefactory.oci.store import parse_reference
from imagefactory.serialize import (
    CAPABILITY,
    Capability,
    Count,
    Digest,
    Fields,
    Fixed,
    Matching,
    Most,
    Name,
    Pairs,
    fault,
    format_time,
    format_value,
    parse_value,
)
from imagefactory.trust.envelope import EnvelopeForm, format_json, parse_json, seal
from imagefactory.trust.judgement import open_signed, out_of_period
from imagefactory.trust.keys import NAME, SigningKey
from imagefactory.trust.policy import Trust
from imagefactory.trust.verdict import SKEW, Judged, RevokedCell, Standing
from imagefactory.verify.report import Subject

# --- The frozen values of a catalogue: images by digest, what is predicted of them, and their verdicts
# A catalogue says which image a target is and carries the verdicts' own envelopes, so a reader judges each
# by
# his own trust and clock. Digests are `sha256:<64 hex>`, sizes bytes, capabilities `8.0`. Envelopes come
# with
# the digest of the artifact that carries them.


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


# ---

FORMAT = 1
CATALOGUE_TYPE = "application/vnd.imagefactory.catalogue+json"
LARGEST = 96 << 20
FORM = EnvelopeForm(payload_type=CATALOGUE_TYPE, largest=LARGEST)
LIFE = timedelta(days=30)
MOST_IMAGES, MOST_OTHERS = 5000, 1000

# `2.3.1`, `0.4.26.dev1+cu12`, `3.11`; of CUDA `12.1` or `12`; of drivers `530.30.02` or `525`.
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
_NUMBERS = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){0,3}")
_CUDA = re.compile(rf"{_NUMBERS.pattern}|{ROCM}{_NUMBERS.pattern}|{NO_CUDA}")
_FRAMEWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9]+(?:/[a-z0-9]+)?")
_KEYID = re.compile(r"[0-9a-f]{64}")
_RULE = re.compile(r"[a-z0-9][a-z0-9:._-]{0,127}")

_SUBJECT = Fields(index=Digest, manifest=Digest, config=Digest)
_CLAIM = Fields(
    capability=Capability,
    basis=Basis,
    answer=Answer,
    rule=Annotated[str, Matching(_RULE)],
    reason=str,
    source=str,
    driver=Annotated[str, Matching(_NUMBERS, empty=True)],
)
_REVOKED = Fields(
    capability=Annotated[str, Matching(CAPABILITY, empty=True)],
    subject=Annotated[object, _SUBJECT],
    by=Annotated[str, Matching(NAME)],
    keyid=Annotated[str, Matching(_KEYID)],
    when=datetime,
    why=str,
)
_PLACE = {
    "reference": str,
    "subject": Annotated[object, _SUBJECT],
    "size": Count,
    "envelopes": Annotated[tuple[tuple[str, object], ...], Pairs(), Most(MOST_OTHERS)],
    "revocations": Annotated[tuple[tuple[str, object], ...], Pairs(), Most(MOST_OTHERS)],
}
_SIF = Fields(sha256=Digest, **_PLACE)
_IMAGE = Fields(
    target=Name,
    family=Name,
    framework=Annotated[str, Matching(_FRAMEWORK)],
    version=Annotated[str, Matching(_VERSION)],
    cuda=Annotated[str, Matching(_CUDA)],
    python=Annotated[str, Matching(_NUMBERS)],
    platform=Annotated[str, Matching(_PLATFORM)],
    unpacked=Count,
    runtime=Annotated[str, Matching(_NUMBERS, empty=True)],
    minor_compat=bool,
    driver=Annotated[str, Matching(_NUMBERS, empty=True)],
    required=Annotated[tuple[Capability, ...], Most(MOST_OTHERS)],
    predicted=Annotated[tuple[Annotated[object, _CLAIM], ...], Most(MOST_OTHERS)],
    sifs=Annotated[tuple[Annotated[object, _SIF], ...], Most(MOST_OTHERS)],
    revoked=Annotated[tuple[Annotated[object, _REVOKED], ...], Most(MOST_OTHERS)],
    **_PLACE,
)
_PLAIN = (
    "target",
    "family",
    "framework",
    "version",
    "cuda",
    "python",
    "platform",
    "unpacked",
    "runtime",
    "minor_compat",
    "driver",
    "required",
)
_CATALOGUE = Fields(
    format=Annotated[int, Fixed(FORMAT)],
    made=datetime,
    expires=datetime,
    suites=Annotated[tuple[Digest, ...], Most(MOST_OTHERS)],
    images=Annotated[tuple[object, ...], Most(MOST_IMAGES)],
)


# --- signing -------------------------------------------------------------------------------------


def sign_catalogue(catalogue: Catalogue, key: SigningKey) -> bytes:
    """The envelope of a catalogue. Raises StatementError for one that nobody would read."""
    payload = format_catalogue(catalogue)
    parse_catalogue(payload, "the catalog to sign", key.keyid)
    envelope = seal(payload, key, FORM)
    if len(envelope) > LARGEST:
        raise StatementError(
            "catalog-too-large",
            f"the catalog has {len(envelope)} bytes, the limit is {LARGEST}",
            hint="include fewer targets: imagefactory catalogue TARGET...",
        )
    return envelope


def open_catalogue(data: bytes, trust: Trust, now: datetime, where: str = "the catalog") -> Catalogue:
    """What a trusted key signed, where it still holds. `where` is what messages begin with.

    Raises StatementError with the word that says why not: unsigned, edited, wrong-key, key-retired, expired,
    not-yet, malformed.
    """
    opened = open_signed(data, trust, FORM)
    if opened.envelope is None or opened.key is None or opened.standing is not Standing.GOOD:
        raise _refused(where, opened.standing, opened.why)
    try:
        catalogue = parse_catalogue(opened.envelope.payload, "the catalog", opened.key.keyid)
    except StatementError as error:
        raise _refused(where, Standing.MALFORMED, error.message) from error
    # The key must be valid now, too: whoever has a retired key can date a catalogue back.
    late = out_of_period(opened.key, catalogue.made) or out_of_period(opened.key, max(now, catalogue.made))
    if late:
        raise _refused(where, *late)
    if catalogue.made - now > SKEW:
        raise _refused(
            where, Standing.NOT_YET, f"made at {format_time(catalogue.made)}, which is in the future"
        )
    if now >= catalogue.expires:
        raise _refused(where, Standing.EXPIRED, f"it was valid until {format_time(catalogue.expires)}")
    return catalogue


ASK_CENTER = (
    "anyone may have signed this: ask your center for the fingerprint of its key, in person or by phone"
)
_MEND = {
    Standing.WRONG_KEY: f"{ASK_CENTER}; trust a new key only if imagefactory join ADDRESS|FILE shows the "
    "same fingerprint",
    Standing.KEY_RETIRED: "the owner signs with another key now: run imagefactory join ADDRESS|FILE again",
    Standing.EXPIRED: "ask the maintainers of the project for a new one (they run imagefactory catalogue)",
    Standing.NOT_YET: "correct the clock of this machine",
    Standing.MALFORMED: "if it is a catalog, use the version of imagefactory that wrote it, or a newer one",
}


def _refused(where: str, standing: Standing, why: str) -> StatementError:
    hint = _MEND.get(
        standing, "get it again from the maintainers of the project, and find out who changed it"
    )
    return StatementError("catalog-rejected", f"{where} is rejected: {standing}, {why}", hint=hint)


# --- writing -------------------------------------------------------------------------------------


def format_catalogue(catalogue: Catalogue) -> bytes:
    """The payload's bytes; `keyid` is not part of them. Times are whole seconds."""
    return format_json(
        {
            "format": FORMAT,
            "made": format_time(catalogue.made),
            "expires": format_time(catalogue.expires),
            "suites": list(catalogue.suites),
            "images": [_format_image(image) for image in catalogue.images],
        }
    )


def _format_image(image: CataloguedImage) -> dict[str, Any]:
    return {
        **{name: getattr(image, name) for name in _PLAIN},
        **_format_place(image),
        "predicted": [
            {"capability": capability, **format_value(claim)} for capability, claim in image.predicted
        ],
        "sifs": [{"sha256": sif.sha256, **_format_place(sif)} for sif in image.sifs],
        "revoked": [{**format_value(one), "subject": _format_subject(one.subject)} for one in image.revoked],
    }


def _format_place(image: CataloguedImage | CataloguedSif) -> dict[str, Any]:
    """Its subject without the target, which stands above."""
    return {
        "reference": image.reference,
        "subject": _format_subject(image.subject),
        "size": image.size,
        "envelopes": _format_envelopes(image.envelopes),
        "revocations": _format_envelopes(image.revocations),
    }


def _format_subject(subject: Subject) -> dict[str, str]:
    return {"index": subject.index, "manifest": subject.manifest, "config": subject.config}


def _format_envelopes(envelopes: Envelopes) -> dict[str, object]:
    """As JSON within JSON, which packs better than text: envelopes have one spelling."""
    return {digest: parse_json(data, digest) for digest, data in envelopes}


# --- reading it again ------------------------------------------------------------------------------


def parse_catalogue(payload: bytes, where: str, keyid: str) -> Catalogue:
    """The catalogue of a payload. Raises StatementError for what `format_catalogue` does not write."""
    row = _CATALOGUE.parse(parse_json(payload, where, LARGEST), where)
    catalogue = Catalogue(
        made=row["made"],
        expires=row["expires"],
        suites=row["suites"],
        images=tuple(
            _parse_image(value, f"{where}: images[{number}]") for number, value in enumerate(row["images"])
        ),
        keyid=keyid,
    )
    if not timedelta(0) < catalogue.expires - catalogue.made <= LIFE:
        raise fault(f"{where}: expires", f"it is not within {LIFE.days} days after it was made")
    names = [image.target for image in catalogue.images]
    if len(set(names)) != len(names):
        raise fault(f"{where}: images", "it has a duplicate target")
    return catalogue


def _parse_image(value: object, where: str) -> CataloguedImage:
    row = _IMAGE.parse(value, where)
    at = f"{where} ({row['target']})"
    subject = Subject(target=row["target"], **row["subject"])
    return CataloguedImage(
        **{
            **row,
            "reference": _reference(row["reference"], f"{at}: reference", subject),
            "subject": subject,
            "predicted": tuple(_parse_claim(claim, f"{at}: predicted") for claim in row["predicted"]),
            "sifs": tuple(_parse_sif(sif, f"{at}: sifs", row["target"]) for sif in row["sifs"]),
            "revoked": tuple(
                RevokedCell(**{**one, "subject": Subject(target=row["target"], **one["subject"])})
                for one in row["revoked"]
            ),
            "envelopes": _parse_envelopes(row["envelopes"], f"{at}: envelopes"),
            "revocations": _parse_envelopes(row["revocations"], f"{at}: revocations"),
        }
    )


def _parse_sif(row: Mapping[str, Any], where: str, target: str) -> CataloguedSif:
    subject = Subject(target=target, **row["subject"])
    if row["sha256"] != subject.config:
        raise fault(f"{where}: sha256", "it is not the file of its subject")
    return CataloguedSif(
        **{
            **row,
            "reference": _reference(row["reference"], f"{where}: reference", subject),
            "subject": subject,
            "envelopes": _parse_envelopes(row["envelopes"], f"{where}: envelopes"),
            "revocations": _parse_envelopes(row["revocations"], f"{where}: revocations"),
        }
    )


def _parse_claim(row: Mapping[str, Any], where: str) -> tuple[str, Claim]:
    if row["basis"] is Basis.VERIFIED:
        raise fault(f"{where}.basis", "a catalog verifies nothing, verdicts do")
    return row["capability"], Claim(**{name: one for name, one in row.items() if name != "capability"})


def _parse_envelopes(value: tuple[tuple[str, object], ...], where: str) -> Envelopes:
    return tuple((parse_value(digest, Digest, where), format_json(one)) for digest, one in value)


def _reference(value: str, where: str, subject: Subject) -> str:
    """HOST/NAME@sha256:..., the digest that of the subject; it reaches submit files."""
    if value == "":
        return ""
    try:
        found = parse_reference(value)
    except UsageError:
        found = None
    if found is None or found.tag or found.digest != subject.index:
        raise fault(where, "it is not HOST/NAME@sha256:... of its subject")
    return str(found)
