"""Verdicts of images, in the store on this machine and in registries: read, judged, attached, never lost.

What a verdict is worth is judged each time it is read, by the trust of this factory; tags only follow. One at
a time moves tags or attaches from one store, and what goes to a registry stands in the journal first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from imagefactory.errors import FactoryError, RegistryError, StoreError, UsageError
from imagefactory.factory import Factory
from imagefactory.oci.candidates import REVOCATION_TYPE, TEST_RESULT_TYPE, VERDICT_TYPE
from imagefactory.oci.graph import Place, read_manifest
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.model import Descriptor
from imagefactory.oci.store import Reference
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.verify.attached import (
    Attached,
    Journal,
    Statement,
    attach,
    put_all,
    read_revocations,
    read_verdicts,
)
from imagefactory.verify.judgement import Court, judge_verdicts
from imagefactory.verify.judging import Judge, read_subject
from imagefactory.verify.model import Judged, Standing, Subject
from imagefactory.verify.reconcile import Reconciled, known_statements, reconcile
from imagefactory.verify.revocation import judge_revocations

if TYPE_CHECKING:
    from imagefactory.verify.statement import Signed

ANY = "any"
"""A repository of the store on this machine, where all of them share one pool."""


# --- where and what ------------------------------------------------------------------------------


def local_place(factory: Factory, family: str) -> Place:
    """A family's repository in the store on this machine."""
    return Place(store=LayoutStore(factory.layout), repository=family)


def registry_of(factory: Factory, family: str, registry: str = "") -> Place:
    """A family's repository in a registry (`host[/path]`), without it in that of the settings."""
    from imagefactory.publish import open_registry, registry_place, repository_of

    host, path = registry_place(factory, registry)
    return Place(store=open_registry(factory, host), repository=repository_of(path, family))


def place_of(factory: Factory, where: Reference) -> Place:
    """Where a reference leads; without a registry, the store on this machine."""
    from imagefactory.publish import open_registry

    store = open_registry(factory, where.registry) if where.registry else LayoutStore(factory.layout)
    return Place(store=store, repository=where.repository)


def read_court(factory: Factory, now: datetime) -> Court:
    """By what this factory judges verdicts. Raises UsageError for a trust that cannot be read."""
    return Judge(factory, now).court


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The verdicts about one image, judged. `ignored` says which revocations do not count, and why.

    `tags` are those of the target that point to it, as far as they were looked for. `envelopes` and
    `revocations` are what was read, by the digests of the artifacts.
    """

    place: str
    subject: Subject
    judged: tuple[Judged, ...]
    ignored: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    envelopes: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    revocations: Mapping[str, bytes] = field(default_factory=dict, repr=False)


def find_verdicts(place: Place, subject: Subject, court: Court, also: Sequence[Place] = ()) -> Found:
    """All verdicts that `place` has of an image, and the revocations that count applied, those of `also` too.

    Verdicts are attached to the platform manifest. One that was signed of the same content, packed in another
    way, is taken back where its own manifest is. Raises RegistryError or StoreError.
    """
    verdicts = read_verdicts(place, subject.manifest)
    envelopes = _envelopes(verdicts)
    first = judge_verdicts(envelopes, subject, court)
    good = [one.verdict for one in first if one.verdict and one.standing is Standing.GOOD]
    manifests = sorted({subject.manifest, *(verdict.report.subject.manifest for verdict in good)})
    against = [one for each in (place, *also) for own in manifests for one in read_revocations(each, own)]
    revocations = _envelopes(against)
    revoked = judge_revocations(revocations, subject, court)
    faults = {one.digest: one.fault for one in verdicts if one.fault}
    judged = judge_verdicts(
        envelopes, subject, replace(court, revocations=court.revocations + revoked.heeded)
    )
    told = tuple(replace(one, why=faults.get(one.digest, one.why)) for one in judged)
    return Found(
        place=str(place),
        subject=subject,
        judged=told,
        ignored=revoked.ignored,
        envelopes=envelopes,
        revocations=revocations,
    )


def _envelopes(attached: Sequence[Attached]) -> Mapping[str, bytes]:
    return {one.digest: one.envelope for one in attached}


def find_in(factory: Factory, place: Place, subject: Subject, court: Court) -> Found:
    """`find_verdicts`, with what the store here knows was taken back, whatever a registry lists."""
    return find_verdicts(place, subject, court, (local_place(factory, ANY),))


def find_image(factory: Factory, place: Place, wanted: str, now: datetime) -> Found:
    """The verdicts about what a tag or digest names. Raises RegistryError where there is no such image."""
    return find_in(factory, place, read_subject(place, wanted), read_court(factory, now))


def count_valid(factory: Factory, place: Place, now: datetime) -> Callable[[str], int]:
    """How many verdicts about a manifest of `place` say `verified` and can be relied on."""
    court = read_court(factory, now)

    def count(digest: str) -> int:
        if place.store.manifest(place.repository, digest) is None:
            return 0  # an index names it, and it is not there
        if not place.store.referrers(place.repository, digest, VERDICT_TYPE):
            return 0
        found = find_in(factory, place, read_subject(place, digest), court)
        return sum(one.proves for one in found.judged)

    return count


def worth_keeping(factory: Factory, now: datetime) -> tuple[str, ...]:
    """Digests of what `store gc` keeps without a tag: images that are verified, statements that still count.

    Raises UsageError for a trust that cannot be read: then nobody knows what is valid, and nothing goes.
    """
    court, layout, kept = read_court(factory, now), factory.layout, []
    place = local_place(factory, ANY)
    for digest in layout.subjects():
        kept += [one.digest for one, kind in layout.referrers(digest) if kind == REVOCATION_TYPE]
        try:
            subject = read_subject(place, digest)
        except RegistryError:  # of an image that is not here verdicts still tell, should it come again
            subject = _only_manifest(digest)
        for one in find_in(factory, place, subject, court).judged:
            if one.standing is Standing.GOOD:
                kept.append(one.digest)
            if one.proves and one.verdict:
                kept += [digest, one.verdict.report.subject.index]
    return tuple(dict.fromkeys(kept))


def _only_manifest(digest: str) -> Subject:
    return Subject(target="", index=digest, manifest=digest, config=digest)


# --- attaching -----------------------------------------------------------------------------------


def attach_signed(
    factory: Factory, signed: Signed, where: Reference | None, progress: Progress
) -> tuple[str, ...]:
    """Attaches a verdict to its image in the store here, and in a registry where `where` names it there.

    Gives the places that have it now. Raises UsageError where neither has the image, RegistryError and
    StoreError; what a registry did not take stands in the journal, and `reconcile` brings it there.
    """
    places = places_of(factory, signed.verdict.report.subject, where)
    return attach_at(factory, signed, places, progress)


def places_of(factory: Factory, own: Subject, where: Reference | None) -> tuple[tuple[Place, Subject], ...]:
    """Where verdicts on an image go, each with what is called so there: the store here, and `where`.

    Raises UsageError where neither has the image, RegistryError.
    """
    places = []
    if factory.layout.manifest(own.manifest) is not None:
        places.append((local_place(factory, ANY), own))
    if where is not None:
        place = place_of(factory, where)
        subject = read_subject(place, where.wanted)
        if own.manifest != subject.manifest and own.config != subject.config:
            raise UsageError(
                f"{where} is {subject.manifest}, and the verdict speaks of {own.manifest}",
                hint="name the image that was verified, by its digest",
            )
        places.append((place, subject))
    if not places:
        raise UsageError(
            f"{own.manifest} is not in the store here", hint="name where it lies: HOST/NAME@sha256:..."
        )
    return tuple(places)


def attach_at(
    factory: Factory, signed: Signed, places: Sequence[tuple[Place, Subject]], progress: Progress
) -> tuple[str, ...]:
    """Attaches a verdict at what `places_of` gave; gives the places' names. Raises as `attach_signed`."""
    for place, subject in places:
        envelopes = (signed.envelope, signed.test_result)
        for fault in attach_all(
            factory, place, attachings(envelopes, signed.verdict.expires, subject), progress
        ):
            if fault:
                raise fault
    return tuple(called(place) for place, _ in places)


def attachings(envelopes: tuple[bytes, bytes], until: datetime, subject: Subject) -> tuple[Attaching, ...]:
    """A verdict's two statements: its own envelope, and that of the test result."""
    kinds = zip((VERDICT_TYPE, TEST_RESULT_TYPE), envelopes, strict=True)
    return tuple(Attaching(subject=subject, kind=kind, envelope=data, until=until) for kind, data in kinds)


def attach_all(
    factory: Factory, place: Place, wanted: Sequence[Attaching], progress: Progress
) -> tuple[FactoryError | None, ...]:
    """Attaches many statements at one place, under one lock; gives what went wrong with each, or None.

    In a registry some are put at a time, once the journal has all of them.
    """
    statements: dict[int, Statement] = {}
    faults: list[FactoryError | None] = [None] * len(wanted)
    with writing(factory, place, progress) as journal:
        manifests = dict.fromkeys(one.subject.manifest for one in wanted)
        subjects = {manifest: _subject(place, manifest) for manifest in manifests}
        for number, one in enumerate(wanted):
            subject = subjects[one.subject.manifest]
            if isinstance(subject, FactoryError):
                faults[number] = subject
            else:
                statements[number] = Statement(
                    kind=one.kind, subject=subject, envelope=one.envelope, until=one.until
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
    return tuple(faults)


def _subject(place: Place, manifest: str) -> Descriptor | FactoryError:
    try:
        return read_manifest(place, manifest).descriptor
    except FactoryError as error:
        return error


def called(place: Place) -> str:
    """The store on disk is one for all repositories."""
    return place.store.name if isinstance(place.store, LayoutStore) else str(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attaching:
    """A statement of a kind about an image; `until` is when nobody needs it any more, None for never."""

    subject: Subject
    kind: str
    envelope: bytes
    until: datetime | None


def attach_to(factory: Factory, place: Place, wanted: Attaching, progress: Progress) -> str:
    """Attaches it; gives the artifact's digest. Raises RegistryError and StoreError."""
    there = read_manifest(place, wanted.subject.manifest).descriptor
    statement = Statement(kind=wanted.kind, subject=there, envelope=wanted.envelope, until=wanted.until)
    with writing(factory, place, progress) as journal:
        return attach(place, statement, journal)


@contextmanager
def writing(factory: Factory, place: Place, progress: Progress) -> Iterator[Journal | None]:
    """One at a time, and no collection meanwhile; gives the journal where `place` is a registry."""
    journal = Journal(factory.layout.path)
    with factory.layout.in_use(progress), journal.alone(progress):
        yield None if isinstance(place.store, LayoutStore) else journal


# --- mending -------------------------------------------------------------------------------------


def reconcile_all(
    factory: Factory, registry: str, now: datetime, progress: Progress
) -> tuple[Reconciled, ...]:
    """Lets every repository of a registry list what was attached to it from here, or is known here.

    Those of the families, and those of that host that the journal knows. Raises RegistryError.
    """
    from imagefactory.publish import open_registry, registry_place, repository_of

    host, path = registry_place(factory, registry)
    journal, store = Journal(factory.layout.path), open_registry(factory, host)
    repositories = {repository_of(path, target.family) for target in factory.targets}
    repositories |= {repository for known, repository in journal.places() if known == host}
    with factory.layout.in_use(progress), journal.alone(progress):
        local = known_statements(factory.layout)
        done = []
        for repository in sorted(repositories):
            with progress.stage(f"reconcile {host}/{repository}"):
                done.append(reconcile(Place(store=store, repository=repository), journal, local, now))
    return tuple(done)
