"""Answers from the signed catalogue where there is no factory: which images there are, how well known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from imagefactory.catalogue.model import Catalogue, CataloguedImage, Offer
from imagefactory.trust.offers import judge_offer
from imagefactory.settings.load import Settings
from imagefactory.actions.centers import Center, OpenCenter, find_one, read_centers, select_some
from imagefactory.verdicts.found import Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Images of a center's catalogue, judged by the reader's own trust in it, `now`.

    `notes` say how the catalogues were had, and which center could not be read.
    """

    center: Center
    catalogue: Catalogue
    offers: tuple[Offer, ...]
    now: datetime
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where the catalogue lies."""
        return self.center.place

    @property
    def said(self) -> str:
        """Who answers."""
        return self.center.answers(self.catalogue.made)

    def name_of(self, image: CataloguedImage) -> str:
        """What the image is called here: with its center, where there are several."""
        return f"{self.center.prefix}{image.target}"


def read_shelves(
    settings: Settings, environ: Mapping[str, str], names: Sequence[str], now: datetime
) -> tuple[Shelf, ...]:
    """The images that `names` ask for, all when empty; a shelf for each center that has one, at least one.

    Raises as `read_centers`, `select_some` do.
    """
    opened = read_centers(settings, environ, now, names)
    shelves = [_shelf(one, images, now, opened.notes) for one, images in select_some(opened, names)]
    return tuple(one for one in shelves if one.offers) or (shelves[0],)


def read_offer(settings: Settings, environ: Mapping[str, str], name: str, now: datetime) -> Shelf:
    """The one image that `name` asks for. Raises UsageError where it asks for several."""
    opened = read_centers(settings, environ, now, (name,))
    one, image = find_one(opened, name)
    return _shelf(one, (image,), now, opened.notes)


def _shelf(
    one: OpenCenter, images: Sequence[CataloguedImage], now: datetime, notes: tuple[str, ...]
) -> Shelf:
    catalogue, trust = one.catalogue, one.center.trust
    offers = tuple(judge_offer(catalogue, image, trust, now) for image in images)
    return Shelf(center=one.center, catalogue=catalogue, offers=offers, now=now, notes=notes)


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
