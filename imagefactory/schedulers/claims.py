"""Claims: which cells a store has queued, signed, for the other stores of the same registry. Pure.

    <registry>/catalogue:claims-<store>             one list for each store, written again with each change
    <store>/journal/claims.json                     what this store has claimed, and its own id

A claim has an end, and a store that reads it leaves those cells out until then. Only a list that a key signed
which is trusted here, and now, counts: whoever may push could else keep images from ever being verified. Of
two stores that claim a cell at once the one whose claim was made first has it. A store that cannot write
or read claims queues all the same, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

from imagefactory.errors import StatementError
from imagefactory.schedulers.cells import CLAIMED, QueuedCell, SweepPlan
from imagefactory.schedulers.pool import MOST_NODES, SkippedCell, SweepNode
from imagefactory.schedulers.sweep_file import ID
from imagefactory.schedulers.underway import Images, image_of
from imagefactory.serialize import (
    CAPABILITY,
    Digest,
    MaxRows,
    Pattern,
    format_document,
    invalid_value_error,
    parse_document,
)
from imagefactory.trust.catalog_package import ArtifactFormat
from imagefactory.trust.envelope import EnvelopeForm, format_json, parse_json, sign_envelope
from imagefactory.trust.judgement import out_of_period, verify_envelope
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import SKEW, VerdictStatus
from imagefactory.verify.nonces import LIFETIME

FORMAT = 1
LARGEST = 4 << 20
FORM = EnvelopeForm(payload_type="application/vnd.imagefactory.claims+json", largest=LARGEST)
CLAIMS = ArtifactFormat(
    name="list of claims",
    artifact_type="application/vnd.imagefactory.claims.v1+json",
    layer_type="application/vnd.imagefactory.claims.v1+json+gzip",
)
STORE = re.compile(r"[0-9a-f]{16}")
TAG = re.compile(r"claims-([0-9a-f]{16})")
ROW = re.compile(rf"(?:{CAPABILITY.pattern})(?: [0-9a-z][0-9a-z.,+-]{{0,39}})?")
MOST_SWEEPS = 256

ClaimedCell = tuple[str, str]
"""An image, by its digest or that of its .sif file, and a row: a capability, or a slice's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClaim:
    """The rows on which an image is claimed. `image` is a digest as `image_of` gives it."""

    image: Digest
    rows: Annotated[tuple[Annotated[str, Pattern(ROW)], ...], MaxRows(MOST_NODES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepClaim:
    """The cells of a sweep that are queued, claimed at `made` and until `until`."""

    sweep: Annotated[str, Pattern(ID)]
    made: datetime
    until: datetime
    images: Annotated[tuple[ImageClaim, ...], MaxRows(MOST_NODES)]

    @property
    def cells(self) -> frozenset[ClaimedCell]:
        return frozenset((one.image, row) for one in self.images for row in one.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreClaims:
    """All that a store claims now. `store` is its id, `issued` when it was signed."""

    store: Annotated[str, Pattern(STORE)]
    issued: datetime
    sweeps: Annotated[tuple[SweepClaim, ...], MaxRows(MOST_SWEEPS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryClaims:
    """What this store claims in one place of a registry."""

    place: str
    sweeps: Annotated[tuple[SweepClaim, ...], MaxRows(MOST_SWEEPS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnClaims:
    """What this store has claimed, by place, and its id."""

    store: Annotated[str, Pattern(STORE)]
    places: tuple[RepositoryClaims, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherClaim:
    """A claim of another store that counts; `by` is the name here of the key that signed it."""

    by: str
    store: str
    claim: SweepClaim

    @property
    def order(self) -> tuple[datetime, str, str]:
        """By this the first of several claims is found, the same by whoever looks."""
        return self.claim.made, self.store, self.claim.sweep

    @property
    def reason(self) -> str:
        until = f"{self.claim.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        return f"claimed by '{self.by}' until {until}, for sweep {self.claim.sweep} of another store"


def digest_in(image: str) -> str:
    """The digest of an image as `image_of` names it."""
    return image.rpartition("@")[2]


def cell_of(node: SweepNode) -> ClaimedCell:
    return digest_in(image_of(node)), node.row


def claim_of(sweep: str, cells: Iterable[ClaimedCell], made: datetime, until: datetime) -> SweepClaim:
    """The claim of these cells, each image once."""
    images: dict[str, set[str]] = {}
    for image, row in cells:
        images.setdefault(image, set()).add(row)
    claimed = (ImageClaim(image=image, rows=tuple(sorted(rows))) for image, rows in sorted(images.items()))
    return SweepClaim(sweep=sweep, made=made, until=until, images=tuple(claimed))


def sign_claims(claims: StoreClaims, key: SigningKey) -> bytes:
    """The envelope of a store's claims. Raises StatementError for what nobody would read."""
    payload = format_json(format_document(claims, FORMAT))
    parse_document(parse_json(payload, "the claims to sign", LARGEST), StoreClaims, FORMAT, "the claims")
    return sign_envelope(payload, key, FORM)


def open_claims(data: bytes, store: str, trust: TrustRules, now: datetime) -> tuple[OtherClaim, ...]:
    """The claims of the store with the id `store` that count now.

    Raises StatementError with the reason for a list that does not count.
    """
    where = f"the claims of store {store}"
    opened = verify_envelope(data, trust, FORM)
    if opened.envelope is None or opened.key is None or opened.standing is not VerdictStatus.GOOD:
        raise invalid_value_error(where, f"{opened.standing}, {opened.why}")
    value = parse_json(opened.envelope.payload, where, LARGEST)
    claims = parse_document(value, StoreClaims, FORMAT, where)
    assert isinstance(claims, StoreClaims)
    late = out_of_period(opened.key, claims.issued) or out_of_period(opened.key, max(now, claims.issued))
    if late:
        raise invalid_value_error(where, f"{late[0]}, {late[1]}")
    if claims.store != store:
        raise invalid_value_error(where, f"it has the claims of store {claims.store}")
    if claims.issued - now > SKEW or any(one.made - now > SKEW for one in claims.sweeps):
        raise invalid_value_error(where, "its claims are dated in the future")
    if any(one.until - one.made > LIFETIME for one in claims.sweeps):
        raise invalid_value_error(where, f"a claim is valid for longer than {LIFETIME.days} days")
    name = opened.key.name
    return tuple(
        OtherClaim(by=name, store=store, claim=one) for one in claims.sweeps if one.made < one.until > now
    )


def first_claims(claims: Iterable[OtherClaim]) -> Mapping[ClaimedCell, OtherClaim]:
    """By cell, the first claim of it."""
    found: dict[ClaimedCell, OtherClaim] = {}
    for one in sorted(claims, key=lambda one: one.order):
        for cell in one.claim.cells:
            found.setdefault(cell, one)
    return found


def leave_out_claimed(plan: SweepPlan, images: Images, claims: Iterable[OtherClaim]) -> SweepPlan:
    """A plan without the cells that another store claims. Pure."""
    claimed = first_claims(claims)
    kept, left_out = [], list(plan.left_out)
    for cell in plan.cells:
        image = images.get((cell.stage.target.name, cell.row), "")
        other = claimed.get((digest_in(image), cell.row))
        if other is None:
            kept.append(cell)
        else:
            left_out.append(skipped_by_claim(other, cell))
    return SweepPlan(cells=tuple(kept), left_out=tuple(left_out), notes=plan.notes)


def skipped_by_claim(other: OtherClaim, cell: QueuedCell | SweepNode) -> SkippedCell:
    target = cell.target if isinstance(cell, SweepNode) else cell.stage.target.name
    capability = str(cell.capability)
    return SkippedCell(
        target=target, capability=capability, rule=CLAIMED, reason=other.reason, part=cell.part
    )


def parse_own(data: bytes, where: str) -> OwnClaims:
    """What `format_own` wrote. Raises StatementError."""
    claims = parse_document(parse_json(data, where, LARGEST), OwnClaims, FORMAT, where)
    if not isinstance(claims, OwnClaims):
        raise StatementError("claims-invalid", f"{where} has no claims", hint="delete it")
    return claims


def format_own(claims: OwnClaims) -> bytes:
    return format_json(format_document(claims, FORMAT))
