"""Verdicts of images, in the store on this machine and in registries: where they lie, read and judged.

What a verdict is worth is judged each time it is read, by the trust that the settings name; tags only follow.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cached_property

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.oci.candidates import VERDICT_TYPE
from imagefactory.oci.graph import Place
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.model import Image, Sif
from imagefactory.oci.store import Reference
from imagefactory.verdicts.found import Found, find_verdicts
from imagefactory.trust.judgement import Court
from imagefactory.trust.verdict import Judged
from imagefactory.verdicts.subject import read_subject
from imagefactory.trust.policy import read_trust
from imagefactory.verify.model import Subject
from imagefactory.verify.suite_files import suite_digest

ANY = "any"
"""A repository of the store on this machine, where all of them share one pool."""


def local_place(access: Access, family: str) -> Place:
    """A family's repository in the store on this machine."""
    return Place(store=LayoutStore(access.layout), repository=family)


def registry_of(access: Access, family: str, registry: str = "") -> Place:
    """A family's repository in a registry (`host[/path]`), without it in that of the settings."""
    host, path = registry_place(access, registry)
    return Place(store=open_registry(access, host), repository=repository_of(path, family))


def place_of(access: Access, where: Reference) -> Place:
    """Where a reference leads; without a registry, the store on this machine."""
    store = open_registry(access, where.registry) if where.registry else LayoutStore(access.layout)
    return Place(store=store, repository=where.repository)


def read_court(access: Access, now: datetime) -> Court:
    """By what this factory judges verdicts. Raises UsageError for a trust that cannot be read."""
    return Judge(access, now).court


def find_in(access: Access, place: Place, subject: Subject, court: Court) -> Found:
    """`find_verdicts`, with what the store here knows was taken back, whatever a registry lists."""
    return find_verdicts(place, subject, court, (local_place(access, ANY),))


def verdicts_of(access: Access, place: Place, wanted: str, now: datetime) -> Found:
    """The verdicts about what a tag or digest names. Raises RegistryError where there is no such image."""
    return find_in(access, place, read_subject(place, wanted), read_court(access, now))


class Judge:
    """Judges verdicts by the trust, policy and suite that the settings name, at one time.

    Where no key is trusted nothing can be relied on, and nothing is read.
    """

    def __init__(self, access: Access, now: datetime) -> None:
        self.access, self.now = access, now

    @cached_property
    def court(self) -> Court:
        """Raises UsageError for rows of trust that cannot be read."""
        trust = read_trust(self.access.settings.files)
        return Court(trust=trust, suite=suite_digest(), now=self.now)

    def stored(self, made: Image | Sif) -> tuple[Judged, ...]:
        """The verdicts in the store on an image or .sif of it."""
        manifest = made.manifest if isinstance(made, Image) else made.digest
        subject = Subject(target="", index=made.digest, manifest=manifest, config=made.config)
        return self._judge(Place(store=LayoutStore(self.access.layout), repository=""), subject)

    def there(self, place: Place, digest: str) -> tuple[Judged, ...]:
        """The verdicts in any store on an image or index of it. Raises RegistryError or StoreError."""
        return self._judge(place, read_subject(place, digest)) if self.court.trust.keys else ()

    def _judge(self, place: Place, subject: Subject) -> tuple[Judged, ...]:
        return find_in(self.access, place, subject, self.court).judged if self.court.trust.keys else ()


def count_valid(access: Access, place: Place, now: datetime) -> Callable[[str], int]:
    """How many verdicts about a manifest of `place` say `verified` and can be relied on."""
    court = read_court(access, now)

    def count(digest: str) -> int:
        if place.store.manifest(place.repository, digest) is None:
            return 0  # an index names it, and it is not there
        if not place.store.referrers(place.repository, digest, VERDICT_TYPE):
            return 0
        found = find_in(access, place, read_subject(place, digest), court)
        return sum(one.proves for one in found.judged)

    return count


def called(place: Place) -> str:
    """The store on disk is one for all repositories."""
    return place.store.name if isinstance(place.store, LayoutStore) else str(place)
