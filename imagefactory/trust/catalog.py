"""Catalogs as bytes: imagefactory writes and signs them for people who have no project.

    Catalog -> format_catalog() -> sign_catalog() -> file
    file -> open_catalog() -> SignedCatalog + TrustRules + now -> verify_catalog() -> Catalog

A file is a DSSE envelope, a line feed, and the images, each compressed. The envelope contains an index: the
name of each image, and the digest and size of its bytes. So the one signature covers everything, and an image
is read, checked and parsed when it is used. An image contains the envelopes of its verdicts. In catalogs of
format 1 the envelope contains everything.

The parser accepts only the output of the formatter. A catalog is valid for LIFE. This limits how long an
attacker can hide a newer catalog or its revocations.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import accumulate
from typing import Annotated, Any, BinaryIO, overload

from imagefactory.errors import StatementError, UsageError
from imagefactory.gpu.values import ROCM, CellClaim, ClaimBasis, Compatibility
from imagefactory.model import NO_CUDA, Outcome
from imagefactory.oci.store import parse_reference
from imagefactory.serialize import (
    CAPABILITY,
    Capability,
    Constant,
    Count,
    Digest,
    MaxRows,
    Name,
    NumberRange,
    ObjectSchema,
    PairsAsObject,
    Pattern,
    format_time,
    format_value,
    invalid_value_error,
    parse_value,
)
from imagefactory.trust.envelope import (
    EnvelopeForm,
    format_json,
    parse_envelope,
    parse_json,
    sign_envelope,
)
from imagefactory.trust.judgement import period_problem, verify_envelope
from imagefactory.trust.keys import NAME, SigningKey
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import SKEW, RevokedCell, VerdictStatus, VerificationResult
from imagefactory.verify.report import VerifiedImage

# --- The frozen values of a catalog: images by digest, their predictions and their verdicts
# A catalog names the image of each target and contains the verdicts' own envelopes, so each reader verifies
# them with their own trust and clock. Digests are `sha256:<64 hex>`, sizes bytes, capabilities `8.0`. Each
# envelope has the digest of its artifact.


Envelopes = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSif:
    """A .sif file of an image: the `sha256` and `size` of the file, and its `reference` HOST/NAME@sha256:...
    or "".

    Without a reference, the file is only in the store of the catalog's author. A .sif has separate verdicts.
    """

    sha256: str
    size: int
    reference: str
    subject: VerifiedImage
    envelopes: Envelopes = ()
    revocations: Envelopes = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogImage:
    """The image of a target.

    `reference` is HOST/NAME@sha256:... of its index, empty if it is not in a registry.

    `framework` is the distribution (`torch`), `version` its locked version (`2.3.1`). `size` is the transfer
    size in bytes, `unpacked` the size on disk, 0 if unknown. `cuda` is the target's (`12.1`, `13`, `rocm7`,
    or NO_CUDA: only for CPUs), `runtime` the CUDA version of its libraries. `driver` is the oldest driver
    that can run its machine code. `minor_compat` is set if that is the first driver of the CUDA major version
    (CUDA minor version compatibility). `required` are the capabilities that its recipe requires. `predicted`
    are the strongest claims that are not verdicts, by capability, including negative ones. `envelopes` are
    the verdicts, `revocations` revoke some of them. `revoked` lists all revocations of the target, also those
    of other images.
    """

    target: str
    family: str
    framework: str
    version: str
    cuda: str
    python: str
    platform: str
    reference: str
    subject: VerifiedImage
    size: int
    unpacked: int
    runtime: str
    minor_compat: bool
    driver: str
    required: tuple[str, ...]
    predicted: tuple[tuple[str, CellClaim], ...] = ()
    sifs: tuple[CatalogSif, ...] = ()
    envelopes: Envelopes = ()
    revocations: Envelopes = ()
    revoked: tuple[RevokedCell, ...] = ()

    def revoked_of(self, subject: VerifiedImage) -> tuple[RevokedCell, ...]:
        """Return the revocations of this image, or of one of its .sif files."""
        return tuple(row for row in self.revoked if row.subject.manifest == subject.manifest)

    @property
    def gpu(self) -> bool:
        """Return whether the image is for GPUs."""
        return self.cuda != NO_CUDA

    @property
    def only_sif(self) -> bool:
        """Return whether the image exists only as a .sif file, which Apptainer built.

        Docker cannot run it.
        """
        return any(sif.subject.manifest == self.subject.manifest for sif in self.sifs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """The row of an image in the index: its name, and `size` bytes with the digest `sha256`.

    The signer of the catalog lists its capabilities with a verdict or a positive prediction, as `7.0 8.0`.
    They only select the images to read first: nothing is shown as verified by them.
    """

    target: str
    family: str
    framework: str
    version: str
    cuda: str
    verified: str
    predicted: str
    sha256: str
    size: int


class CatalogImages(Sequence[CatalogImage]):
    """The images of a signed catalog, each read when it is used. Raises StatementError for a corrupt one."""

    def __init__(self, entries: Sequence[CatalogEntry], load: Callable[[int], CatalogImage]) -> None:
        self.entries, self._load = tuple(entries), load
        self._images: dict[int, CatalogImage] = {}

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, number: int) -> CatalogImage: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[CatalogImage, ...]: ...
    def __getitem__(self, number: int | slice) -> CatalogImage | tuple[CatalogImage, ...]:
        if isinstance(number, slice):
            return tuple(self[each] for each in range(*number.indices(len(self))))
        number = range(len(self))[number]
        if number not in self._images:
            self._images[number] = self._load(number)
        return self._images[number]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.entries)


class CatalogSource(StrEnum):
    """The source of a catalog: this process, the configured address, a mirror, or the local cache."""

    MADE = "created"
    PLACE = "place"
    MIRROR = "mirror"
    KEPT = "cached"


SOON = timedelta(days=7)
"""Readers are warned when a catalog expires within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The images of one registry at one time, signed by `keyid`.

    `keyid` is empty if this process created the catalog.

    `suites` are the digests of suites whose verdicts the author accepted. The next two are not in the signed
    bytes: `source` is how this process got the catalog, `notes` are messages about that.
    """

    created: datetime
    expires: datetime
    images: Sequence[CatalogImage]
    suites: tuple[str, ...] = ()
    keyid: str = ""
    source: CatalogSource = field(default=CatalogSource.PLACE, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def expires_soon(self, now: datetime) -> bool:
        return self.expires - now < SOON

    @property
    def entries(self) -> Sequence[CatalogEntry]:
        """Return the index of the images, without reading them."""
        if isinstance(self.images, CatalogImages):
            return self.images.entries
        return tuple(_entry(image, b"") for image in self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class SifOffer:
    """A .sif file with its verified verdicts.

    These are about the file, not about the image that it was built from.
    """

    sif: CatalogSif
    judged: tuple[VerificationResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOffer:
    """An image with its verdicts and those of its .sif files, verified with the trust of the reader."""

    image: CatalogImage
    judged: tuple[VerificationResult, ...]
    sifs: tuple[SifOffer, ...] = ()


FORMAT = 2
CATALOG_TYPE = "application/vnd.imagefactory.catalog+json"
LARGEST = 96 << 20
"""The limit of an envelope, and of one image, in bytes."""
LARGEST_IMAGES = 256 << 20
"""The limit of all images as they are in a file, in bytes."""
FORM = EnvelopeForm(payload_type=CATALOG_TYPE, largest=LARGEST)
LIFE = timedelta(days=30)
MOST_IMAGES, MOST_OTHERS = 20_000, 1000

# `2.3.1`, `0.4.26.dev1+cu12`, `3.11`; of CUDA `12.1` or `12`; of drivers `530.30.02` or `525`.
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
_NUMBERS = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){0,3}")
_CUDA = re.compile(rf"{_NUMBERS.pattern}|{ROCM}{_NUMBERS.pattern}|{NO_CUDA}")
_FRAMEWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9]+(?:/[a-z0-9]+)?")
_KEYID = re.compile(r"[0-9a-f]{64}")
_CAPABILITIES = re.compile(rf"(?:{CAPABILITY.pattern})(?: (?:{CAPABILITY.pattern})){{0,{MOST_OTHERS}}}")
_RULE = re.compile(r"[a-z0-9][a-z0-9:._-]{0,127}")

_SUBJECT = ObjectSchema(index=Digest, manifest=Digest, config=Digest)
_CLAIM = ObjectSchema(
    capability=Capability,
    basis=ClaimBasis,
    answer=Compatibility,
    rule=Annotated[str, Pattern(_RULE)],
    reason=str,
    source=str,
    driver=Annotated[str, Pattern(_NUMBERS, empty=True)],
)
_REVOKED = ObjectSchema(
    capability=Annotated[str, Pattern(CAPABILITY, empty=True)],
    subject=Annotated[object, _SUBJECT],
    by=Annotated[str, Pattern(NAME)],
    keyid=Annotated[str, Pattern(_KEYID)],
    when=datetime,
    why=str,
)
_PLACE = {
    "reference": str,
    "subject": Annotated[object, _SUBJECT],
    "size": Count,
    "envelopes": Annotated[tuple[tuple[str, object], ...], PairsAsObject(), MaxRows(MOST_OTHERS)],
    "revocations": Annotated[tuple[tuple[str, object], ...], PairsAsObject(), MaxRows(MOST_OTHERS)],
}
_SIF = ObjectSchema(sha256=Digest, **_PLACE)
_IMAGE = ObjectSchema(
    target=Name,
    family=Name,
    framework=Annotated[str, Pattern(_FRAMEWORK)],
    version=Annotated[str, Pattern(_VERSION)],
    cuda=Annotated[str, Pattern(_CUDA)],
    python=Annotated[str, Pattern(_NUMBERS)],
    platform=Annotated[str, Pattern(_PLATFORM)],
    unpacked=Count,
    runtime=Annotated[str, Pattern(_NUMBERS, empty=True)],
    minor_compat=bool,
    driver=Annotated[str, Pattern(_NUMBERS, empty=True)],
    required=Annotated[tuple[Capability, ...], MaxRows(MOST_OTHERS)],
    predicted=Annotated[tuple[Annotated[object, _CLAIM], ...], MaxRows(MOST_OTHERS)],
    sifs=Annotated[tuple[Annotated[object, _SIF], ...], MaxRows(MOST_OTHERS)],
    revoked=Annotated[tuple[Annotated[object, _REVOKED], ...], MaxRows(MOST_OTHERS)],
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
_ENTRY = ObjectSchema(
    target=Name,
    family=Name,
    framework=Annotated[str, Pattern(_FRAMEWORK)],
    version=Annotated[str, Pattern(_VERSION)],
    cuda=Annotated[str, Pattern(_CUDA)],
    verified=Annotated[str, Pattern(_CAPABILITIES, empty=True)],
    predicted=Annotated[str, Pattern(_CAPABILITIES, empty=True)],
    sha256=Digest,
    size=Annotated[int, NumberRange(1, LARGEST)],
)


def _catalog_schema(version: int) -> ObjectSchema:
    return ObjectSchema(
        format=Annotated[int, Constant(version)],
        created=datetime,
        expires=datetime,
        suites=Annotated[tuple[Digest, ...], MaxRows(MOST_OTHERS)],
        images=Annotated[tuple[object, ...], MaxRows(MOST_IMAGES)],
    )


_SCHEMA, _SCHEMA_1 = _catalog_schema(FORMAT), _catalog_schema(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedCatalog:
    """A file with a catalog: its envelope, and the images from `start` to `end`.

    `read` returns the bytes at a position, of a size.
    """

    envelope: bytes
    read: Callable[[int, int], bytes]
    start: int
    end: int

    @property
    def head(self) -> bytes:
        """Return the bytes before the images, which have the digest of each image."""
        return self.read(0, self.start)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the file."""
        for start in range(0, self.end, _CHUNK):
            yield self.read(start, min(_CHUNK, self.end - start))


_CHUNK = 1 << 20


def open_catalog(source: bytes | BinaryIO, location: str) -> SignedCatalog:
    """Read the envelope in a file, which stays open. The envelope is plain or compressed with gzip.

    Raises StatementError for corrupt data, and for a file that is too large.
    """
    read: Callable[[int, int], bytes]
    if isinstance(source, bytes):
        end, read = len(source), lambda start, size: source[start : start + size]
    else:
        end = os.fstat(source.fileno()).st_size
        # Other threads read the file too.
        read = lambda start, size: os.pread(source.fileno(), size, start)  # noqa: E731
    packed = read(0, 2) == b"\x1f\x8b"
    stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
    head, start = io.BytesIO(), 0
    while chunk := read(start, _CHUNK):
        start += len(chunk)
        try:
            piece = stream.decompress(chunk, LARGEST + 1 - head.tell()) if packed else chunk
        except zlib.error as error:
            raise _corrupt(location, str(error)) from error
        line = piece.find(b"\n")
        head.write(piece if line < 0 else piece[:line])
        if head.tell() > LARGEST:
            raise StatementError(
                "catalog-too-large",
                f"{location} is not a catalog: it has more than {LARGEST} bytes",
                hint="check the address of the catalog, or let its owner publish fewer targets",
            )
        if packed and stream.eof:
            start -= len(stream.unused_data)
            break
        if not packed and line >= 0:
            start -= len(piece) - line - 1
            break
    if packed and not stream.eof:
        raise _corrupt(location, "the compressed data is truncated")
    if end - start > LARGEST_IMAGES:
        raise StatementError(
            "catalog-too-large",
            f"the images of {location} have {end - start} bytes, the limit is {LARGEST_IMAGES}",
            hint="let its owner publish fewer targets",
        )
    return SignedCatalog(envelope=head.getvalue(), read=read, start=start, end=end)


def _corrupt(location: str, problem: str) -> StatementError:
    return StatementError("catalog-corrupt", f"{location} is corrupt: {problem}", hint="download it again")


def sign_catalog(catalog: Catalog, key: SigningKey) -> bytes:
    """Return the file of a catalog, compressed. Raises StatementError if readers would reject the catalog.

    Equal catalogs have equal bytes.
    """
    payload, images = format_catalog(catalog)
    envelope = sign_envelope(payload, key, FORM)
    if len(envelope) > LARGEST or len(images) > LARGEST_IMAGES:
        raise StatementError(
            "catalog-too-large",
            f"the catalog has {len(envelope)} bytes, and its images {len(images)}: the limits are "
            f"{LARGEST} and {LARGEST_IMAGES}",
            hint="include fewer targets: imagefactory site publish TARGET...",
        )
    data = gzip.compress(envelope + b"\n", 9, mtime=0) + images
    for _ in parse_catalog(payload, "the catalog to sign", key.keyid, open_catalog(data, "it")).images:
        pass  # each is parsed
    return data


def verify_catalog(
    file: SignedCatalog | bytes, trust: TrustRules, now: datetime, location: str = "the catalog"
) -> Catalog:
    """Return a catalog that a trusted key signed and that has not expired. Messages begin with `location`.

    Raises StatementError with the status of the problem: unsigned, edited, wrong-key, key-retired, expired,
    not-yet, malformed.
    """
    signed = open_catalog(file, location) if isinstance(file, bytes) else file
    envelope_result = verify_envelope(signed.envelope, trust, FORM)
    if (
        envelope_result.envelope is None
        or envelope_result.key is None
        or envelope_result.standing is not VerdictStatus.GOOD
    ):
        raise _rejection(location, envelope_result.standing, envelope_result.why)
    try:
        catalog = parse_catalog(
            envelope_result.envelope.payload, "the catalog", envelope_result.key.keyid, signed
        )
    except StatementError as error:
        if error.code == "catalog-corrupt":
            raise
        raise _rejection(location, VerdictStatus.MALFORMED, error.message) from error
    # The key must be valid now, too: the owner of a retired key can backdate a catalog.
    late = period_problem(envelope_result.key, catalog.created) or period_problem(
        envelope_result.key, max(now, catalog.created)
    )
    if late:
        raise _rejection(location, *late)
    if catalog.created - now > SKEW:
        raise _rejection(
            location,
            VerdictStatus.NOT_YET,
            f"created at {format_time(catalog.created)}, which is in the future",
        )
    if now >= catalog.expires:
        raise _rejection(
            location, VerdictStatus.EXPIRED, f"it was valid until {format_time(catalog.expires)}"
        )
    return catalog


CENTER_HINT = (
    "anyone may have signed this: ask your center for the fingerprint of its key, in person or by phone"
)
_STATUS_HINTS = {
    VerdictStatus.WRONG_KEY: (
        f"{CENTER_HINT}; trust a new key only if imagefactory site join ADDRESS|FILE shows the same "
        "fingerprint"
    ),
    VerdictStatus.KEY_RETIRED: (
        "the owner signs with another key now: run imagefactory site join ADDRESS|FILE again"
    ),
    VerdictStatus.EXPIRED: (
        "get a new one from the maintainers of the project (they run imagefactory site publish)"
    ),
    VerdictStatus.NOT_YET: "correct the clock of this machine",
    VerdictStatus.MALFORMED: (
        "if it is a catalog, use the version of imagefactory that wrote it, or a newer one"
    ),
}


def _rejection(location: str, standing: VerdictStatus, reason: str) -> StatementError:
    hint = _STATUS_HINTS.get(
        standing, "get it again from the maintainers of the project, and find out who changed it"
    )
    return StatementError("catalog-rejected", f"{location} is rejected: {standing}, {reason}", hint=hint)


def format_catalog(catalog: Catalog) -> tuple[bytes, bytes]:
    """Return the payload, without `keyid`, and the images. Times are in whole seconds."""
    images = [gzip.compress(format_json(format_image(image)), 9, mtime=0) for image in catalog.images]
    rows = [format_value(_entry(image, data)) for image, data in zip(catalog.images, images, strict=True)]
    payload = format_json(
        {
            "format": FORMAT,
            "created": format_time(catalog.created),
            "expires": format_time(catalog.expires),
            "suites": list(catalog.suites),
            "images": rows,
        }
    )
    return payload, b"".join(images)


def _entry(image: CatalogImage, data: bytes) -> CatalogEntry:
    """Return the row of an image in the index."""
    envelopes = [image.envelopes, *(sif.envelopes for sif in image.sifs)]
    capabilities = {_capability(envelope) for rows in envelopes for _, envelope in rows}
    return CatalogEntry(
        target=image.target,
        family=image.family,
        framework=image.framework,
        version=image.version,
        cuda=image.cuda,
        verified=" ".join(sorted(filter(None, capabilities))),
        predicted=" ".join(sorted({name for name, claim in image.predicted if claim.answer is not _NO})),
        sha256=f"sha256:{hashlib.sha256(data).hexdigest()}",
        size=len(data),
    )


_NO = Compatibility.NO


def _capability(envelope: bytes) -> str:
    """Return the capability on which a verdict says that the image runs, empty without one. Unchecked."""
    with suppress(StatementError, ValueError, KeyError, TypeError):
        predicate = json.loads(parse_envelope(envelope, "verdict").payload)["predicate"]
        capability = predicate["device"]["capability"]
        if predicate["outcome"] == Outcome.VERIFIED and CAPABILITY.fullmatch(capability):
            return str(capability)
    return ""


def format_image(image: CatalogImage) -> dict[str, Any]:
    """Return an image as JSON."""
    return {
        **{name: getattr(image, name) for name in _PLAIN},
        **_format_place(image),
        "predicted": [
            {"capability": capability, **format_value(claim)} for capability, claim in image.predicted
        ],
        "sifs": [{"sha256": sif.sha256, **_format_place(sif)} for sif in image.sifs],
        "revoked": [
            {**format_value(cell), "subject": _format_subject(cell.subject)} for cell in image.revoked
        ],
    }


def _format_place(image: CatalogImage | CatalogSif) -> dict[str, Any]:
    """Return the subject of an image without its target, which the parent object has."""
    return {
        "reference": image.reference,
        "subject": _format_subject(image.subject),
        "size": image.size,
        "envelopes": _format_envelopes(image.envelopes),
        "revocations": _format_envelopes(image.revocations),
    }


def _format_subject(subject: VerifiedImage) -> dict[str, str]:
    return {"index": subject.index, "manifest": subject.manifest, "config": subject.config}


def _format_envelopes(envelopes: Envelopes) -> dict[str, object]:
    """Return envelopes as nested JSON, which compresses better than strings.

    Each envelope has only one valid spelling.
    """
    return {digest: parse_json(data, digest) for digest, data in envelopes}


def parse_catalog(payload: bytes, location: str, keyid: str, file: SignedCatalog | None = None) -> Catalog:
    """Parse a payload, of the catalog in `file`. Raises StatementError for anything but the output of
    `format_catalog`. Its images are parsed when they are used.
    """
    value = parse_json(payload, location, LARGEST)
    old = file is None or (isinstance(value, dict) and value.get("format") == 1)
    row = (_SCHEMA_1 if old else _SCHEMA).parse(value, location)
    images: Sequence[CatalogImage]
    if old or file is None:
        rows = [(f"{location}: images[{number}]", value) for number, value in enumerate(row["images"])]
        images = tuple(_parse_image(value, at) for at, value in rows)
        names = [image.target for image in images]
    else:
        images = _index(row["images"], location, file)
        names = [entry.target for entry in images.entries]
    catalog = Catalog(
        created=row["created"],
        expires=row["expires"],
        suites=row["suites"],
        images=images,
        keyid=keyid,
    )
    if not timedelta(0) < catalog.expires - catalog.created <= LIFE:
        raise invalid_value_error(
            f"{location}: expires", f"it is not within {LIFE.days} days after it was created"
        )
    if len(set(names)) != len(names):
        raise invalid_value_error(f"{location}: images", "it has a duplicate target")
    return catalog


def _index(rows: Sequence[object], location: str, file: SignedCatalog) -> CatalogImages:
    """Return the images of a file. Raises StatementError if it does not have their bytes."""
    entries = [
        CatalogEntry(**_ENTRY.parse(value, f"{location}: images[{number}]"))
        for number, value in enumerate(rows)
    ]
    starts = list(accumulate((entry.size for entry in entries), initial=file.start))
    if starts[-1] != file.end:
        raise _corrupt(location, f"it has {file.end} bytes, not {starts[-1]}")

    def load(number: int) -> CatalogImage:
        return _read_image(entries[number], file.read(starts[number], entries[number].size), location)

    return CatalogImages(entries, load)


def _read_image(entry: CatalogEntry, data: bytes, location: str) -> CatalogImage:
    """Return an image from its bytes. Raises StatementError unless they are those in the index."""
    at = f"{location}: {entry.target}"
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != entry.sha256:
        raise _corrupt(at, "its bytes are not those that were signed")
    stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        text = stream.decompress(data, LARGEST + 1)
    except zlib.error as error:
        raise _corrupt(at, str(error)) from error
    if not stream.eof or stream.unused_data:
        raise invalid_value_error(at, "it is larger than the limit, or has more than one part")
    image = _parse_image(parse_json(text, at, LARGEST), at)
    if any(getattr(image, name) != getattr(entry, name) for name in _NAMES):
        raise invalid_value_error(at, "it is not the image of its row in the index")
    return image


_NAMES = ("target", "family", "framework", "version", "cuda")


def _parse_image(value: object, location: str) -> CatalogImage:
    row = _IMAGE.parse(value, location)
    at = f"{location} ({row['target']})"
    subject = VerifiedImage(target=row["target"], **row["subject"])
    return CatalogImage(
        **{
            **row,
            "reference": _image_reference(row["reference"], f"{at}: reference", subject),
            "subject": subject,
            "predicted": tuple(_parse_claim(claim, f"{at}: predicted") for claim in row["predicted"]),
            "sifs": tuple(_parse_sif(sif, f"{at}: sifs", row["target"]) for sif in row["sifs"]),
            "revoked": tuple(
                RevokedCell(**{**cell, "subject": VerifiedImage(target=row["target"], **cell["subject"])})
                for cell in row["revoked"]
            ),
            "envelopes": _parse_envelopes(row["envelopes"], f"{at}: envelopes"),
            "revocations": _parse_envelopes(row["revocations"], f"{at}: revocations"),
        }
    )


def _parse_sif(row: Mapping[str, Any], location: str, target: str) -> CatalogSif:
    subject = VerifiedImage(target=target, **row["subject"])
    if row["sha256"] != subject.config:
        raise invalid_value_error(f"{location}: sha256", "it is not the file of its subject")
    return CatalogSif(
        **{
            **row,
            "reference": _image_reference(row["reference"], f"{location}: reference", subject),
            "subject": subject,
            "envelopes": _parse_envelopes(row["envelopes"], f"{location}: envelopes"),
            "revocations": _parse_envelopes(row["revocations"], f"{location}: revocations"),
        }
    )


def _parse_claim(row: Mapping[str, Any], location: str) -> tuple[str, CellClaim]:
    if row["basis"] is ClaimBasis.VERIFIED:
        raise invalid_value_error(f"{location}.basis", "a catalog verifies nothing, verdicts do")
    return row["capability"], CellClaim(
        **{name: value for name, value in row.items() if name != "capability"}
    )


def _parse_envelopes(value: tuple[tuple[str, object], ...], location: str) -> Envelopes:
    return tuple((parse_value(digest, Digest, location), format_json(document)) for digest, document in value)


def _image_reference(value: str, location: str, subject: VerifiedImage) -> str:
    """Return HOST/NAME@sha256:... if it has the digest of the subject. Job files contain this text."""
    if value == "":
        return ""
    try:
        reference = parse_reference(value)
    except UsageError:
        reference = None
    if reference is None or reference.tag or reference.digest != subject.index:
        raise invalid_value_error(location, "it is not HOST/NAME@sha256:... of its subject")
    return str(reference)
