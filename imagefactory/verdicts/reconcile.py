"""Mending: a registry lists again every statement about its images that is known here.

Registries without the referrers API keep lists that two writers at once can overwrite: the artifact is there
then, and nobody finds it. The journal, and the store on disk, know what was attached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from imagefactory.errors import RegistryError, StoreError
from imagefactory.oci.candidates import STATEMENT_TYPES
from imagefactory.oci.graph import Place
from imagefactory.oci.layout import Layout
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.manifests import MALFORMED, artifact_type, parse_descriptor
from imagefactory.oci.model import Descriptor
from imagefactory.trust.attached import Journal, Statement, put_statement

TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What became of the statements known here.

    `listed` were listed there; `mended` are digests of artifacts that are listed again; `gone` counts those
    whose image is no longer there and `expired` those that nobody needs, which both leave the journal;
    `damaged` counts lines of the journal that could not be read.
    """

    place: str
    listed: int
    mended: tuple[str, ...]
    gone: int
    expired: int
    damaged: int


def reconcile(place: Place, journal: Journal, local: Sequence[Statement], now: datetime) -> Reconciled:
    """Makes a registry list every statement that the journal or the store here knows for its images.

    `local` are those of the store (known_statements). The caller is alone. Raises RegistryError when other
    writers keep overwriting the lists.
    """
    rows = journal.read(place)
    expired = [statement for statement in rows.statements if statement.until and statement.until <= now]
    current = [statement for statement in rows.statements if statement not in expired]
    by_subject: dict[str, dict[str, Statement]] = {}
    for statement in (*current, *(other for other in local if not (other.until and other.until <= now))):
        by_subject.setdefault(statement.subject.digest, {})[statement.artifact.manifest.descriptor.digest] = (
            statement
        )
    there = {subject for subject in by_subject if place.store.manifest(place.repository, subject)}
    mended = [digest for subject in sorted(there) for digest in _mend(place, subject, by_subject[subject])]
    kept = [statement for statement in current if statement.subject.digest in there]
    if len(kept) < len(rows.statements) or rows.damaged:
        journal.keep(place, kept)
    return Reconciled(
        place=str(place),
        listed=sum(len(by_subject[subject]) for subject in there) - len(mended),
        mended=tuple(mended),
        gone=len(current) - len(kept),
        expired=len(expired),
        damaged=rows.damaged,
    )


def _mend(place: Place, subject: str, statements: dict[str, Statement]) -> list[str]:
    """The digests that were not listed, and are now."""
    first: list[str] = []
    for _ in range(TRIES):
        listed = {one.digest for one in place.store.referrers(place.repository, subject)}
        missing = [digest for digest in statements if digest not in listed]
        if not missing:
            return first
        first = first or missing
        for digest in missing:
            put_statement(place, statements[digest])
    raise RegistryError(
        "referrers-contended",
        f"{place}: other writers keep overwriting the list of {subject}",
        hint="run it again when no other job pushes verdicts of this image",
    )


def known_statements(layout: Layout) -> tuple[Statement, ...]:
    """The statements of the store on disk, whatever they speak of; those that are not whole are left out."""
    store = LayoutStore(layout)
    found = []
    for subject in layout.subjects():
        for descriptor, kind in layout.referrers(subject):
            if kind in STATEMENT_TYPES:
                found.append(_known(store, descriptor))
    return tuple(one for one in found if one is not None)


def _known(store: LayoutStore, descriptor: Descriptor) -> Statement | None:
    there = store.layout.manifest(descriptor.digest)
    if there is None:
        return None
    try:
        value: dict[str, Any] = json.loads(there[1])
        (layer,) = map(parse_descriptor, value["layers"])
        subject = parse_descriptor(value["subject"])
        envelope = b"".join(store.read("", layer))
    except (*MALFORMED, StoreError):
        return None
    made = Statement(kind=artifact_type(value), subject=subject, envelope=envelope)
    return made if made.artifact.manifest.descriptor.digest == descriptor.digest else None
