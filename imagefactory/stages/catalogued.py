"""Answers from the signed catalogue where there is no factory: which images there are, how well known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from imagefactory.catalogue.model import Catalogue, Offer
from imagefactory.catalogue.offers import find_image, judge_offer, select_images
from imagefactory.settings.load import Settings
from imagefactory.stages.read_catalogue import read_catalogue
from imagefactory.verdicts.found import Found
from imagefactory.verdicts.trust import read_trust


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Images of a catalogue, judged by the reader's own trust, `now`. `place` is where the catalogue lies."""

    place: str
    catalogue: Catalogue
    offers: tuple[Offer, ...]
    now: datetime

    @property
    def said(self) -> str:
        """Who answers."""
        return f"images of the catalogue {self.place}, made {self.catalogue.made:%Y-%m-%d %H:%M} UTC"


def read_shelf(settings: Settings, environ: Mapping[str, str], names: Sequence[str], now: datetime) -> Shelf:
    """The images that `names` ask for, all when empty. Raises as `read_catalogue`, `select_images` do."""
    catalogue, trust = read_catalogue(settings, environ, now), read_trust(settings.files)
    return Shelf(
        place=settings.catalogue.value or settings.registry.value,
        catalogue=catalogue,
        offers=tuple(judge_offer(catalogue, one, trust, now) for one in select_images(catalogue, names)),
        now=now,
    )


def read_offer(settings: Settings, environ: Mapping[str, str], name: str, now: datetime) -> Shelf:
    """The one image that `name` asks for. Raises UsageError where it asks for several."""
    catalogue, trust = read_catalogue(settings, environ, now), read_trust(settings.files)
    return Shelf(
        place=settings.catalogue.value or settings.registry.value,
        catalogue=catalogue,
        offers=(judge_offer(catalogue, find_image(catalogue, name), trust, now),),
        now=now,
    )


def verdicts_on(offer: Offer) -> tuple[Found, ...]:
    """What the catalogue carries of verdicts: on the image, and on each .sif of it."""
    image = offer.image
    where = image.reference.partition("@")[0] or f"{image.target} (in no registry)"
    forms = [(where, image.subject, offer.judged)]
    forms += [(f"{where} (.sif)", one.sif.subject, one.judged) for one in offer.sifs]
    return tuple(
        Found(
            place=place,
            subject=subject,
            judged=judged,
            revoked=image.revoked_of(subject),
        )
        for place, subject, judged in forms
    )
