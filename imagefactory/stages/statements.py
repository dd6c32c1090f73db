"""Statements about images brought to where these lie: the store here and registries.

One at a time attaches from one store, and what goes to a registry stands in the journal first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from imagefactory.access import Access
from imagefactory.errors import FactoryError, StoreError, UsageError
from imagefactory.oci.candidates import TEST_RESULT_TYPE, VERDICT_TYPE
from imagefactory.oci.graph import Place, read_manifest
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.model import Descriptor
from imagefactory.oci.store import Reference
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.actions.audit import log_statements
from imagefactory.actions.verdicts import ANY, called, local_place, place_of
from imagefactory.trust.attached import Journal, Statement, attach, put_all
from imagefactory.verdicts.statement import Signed
from imagefactory.verdicts.subject import read_subject
from imagefactory.verify.model import Subject


def attach_signed(
    access: Access, signed: Signed, where: Reference | None, progress: Progress
) -> tuple[str, ...]:
    """Attaches a verdict to its image in the store here, and in a registry where `where` names it there.

    Gives the places that have it now. Raises UsageError where neither has the image, RegistryError and
    StoreError; what a registry did not take stands in the journal, and `reconcile` brings it there.
    """
    places = places_of(access, signed.verdict.report.subject, where)
    return attach_at(access, signed, places, progress)


def places_of(access: Access, own: Subject, where: Reference | None) -> tuple[tuple[Place, Subject], ...]:
    """Where verdicts on an image go, each with what is called so there: the store here, and `where`.

    Raises UsageError where neither has the image, RegistryError.
    """
    places = []
    if access.layout.manifest(own.manifest) is not None:
        places.append((local_place(access, ANY), own))
    if where is not None:
        place = place_of(access, where)
        subject = read_subject(place, where.wanted)
        if own.manifest != subject.manifest:
            raise UsageError(
                "verdict-other-image",
                f"{where} is {subject.manifest}, but the verdict is for {own.manifest}",
                hint="pass the digest of the image that was verified",
            )
        places.append((place, subject))
    if not places:
        raise UsageError(
            "image-not-stored",
            f"{own.manifest} is not in the local store",
            hint="pass where it is stored: HOST/NAME@sha256:...",
        )
    return tuple(places)


def attach_at(
    access: Access, signed: Signed, places: Sequence[tuple[Place, Subject]], progress: Progress
) -> tuple[str, ...]:
    """Attaches a verdict at what `places_of` gave; gives the places' names. Raises as `attach_signed`."""
    for place, subject in places:
        envelopes = (signed.envelope, signed.test_result)
        for fault in attach_all(
            access, place, attachings(envelopes, signed.verdict.expires, subject), progress
        ):
            if fault:
                raise fault
    return tuple(called(place) for place, _ in places)


def attachings(envelopes: tuple[bytes, bytes], until: datetime, subject: Subject) -> tuple[Attaching, ...]:
    """A verdict's two statements: its own envelope, and that of the test result."""
    kinds = zip((VERDICT_TYPE, TEST_RESULT_TYPE), envelopes, strict=True)
    return tuple(Attaching(subject=subject, kind=kind, envelope=data, until=until) for kind, data in kinds)


def attach_all(
    access: Access, place: Place, batch: Sequence[Attaching], progress: Progress
) -> tuple[FactoryError | None, ...]:
    """Attaches many statements at one place, under one lock; gives what went wrong with each, or None.

    In a registry some are put at a time, once the journal has all of them.
    """
    statements: dict[int, Statement] = {}
    faults: list[FactoryError | None] = [None] * len(batch)
    with writing(access, place, progress) as journal:
        manifests = dict.fromkeys(attaching.subject.manifest for attaching in batch)
        subjects = {manifest: _subject(place, manifest) for manifest in manifests}
        for number, attaching in enumerate(batch):
            subject = subjects[attaching.subject.manifest]
            if isinstance(subject, FactoryError):
                faults[number] = subject
            else:
                statements[number] = Statement(
                    kind=attaching.kind, subject=subject, envelope=attaching.envelope, until=attaching.until
                )
        if journal and statements:
            try:
                journal.append(place, *statements.values())
            except StoreError as error:  # nothing goes to a registry that the journal does not have
                return tuple(fault or error for fault in faults)
        workers = WORKERS if journal else 1  # a disk does not make anybody wait
        put = put_all(place, tuple(statements.values()), workers=workers)
    for number, fault in zip(statements, put, strict=True):
        faults[number] = fault
    log_statements(
        access, called(place), [one for one, fault in zip(statements.values(), put, strict=True) if not fault]
    )
    return tuple(faults)


def _subject(place: Place, manifest: str) -> Descriptor | FactoryError:
    try:
        return read_manifest(place, manifest).descriptor
    except FactoryError as error:
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Attaching:
    """A statement of a kind about an image; `until` is when nobody needs it any more, None for never."""

    subject: Subject
    kind: str
    envelope: bytes
    until: datetime | None


def attach_to(access: Access, place: Place, wanted: Attaching, progress: Progress) -> str:
    """Attaches it; gives the artifact's digest. Raises RegistryError and StoreError."""
    there = read_manifest(place, wanted.subject.manifest).descriptor
    statement = Statement(kind=wanted.kind, subject=there, envelope=wanted.envelope, until=wanted.until)
    with writing(access, place, progress) as journal:
        digest = attach(place, statement, journal)
    log_statements(access, called(place), (statement,))
    return digest


@contextmanager
def writing(access: Access, place: Place, progress: Progress) -> Iterator[Journal | None]:
    """One at a time, and no collection meanwhile; gives the journal where `place` is a registry."""
    journal = Journal(access.layout.path)
    with access.layout.in_use(progress), journal.alone(progress):
        yield None if isinstance(place.store, LayoutStore) else journal
