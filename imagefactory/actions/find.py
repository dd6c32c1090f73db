"""What there is to find: images of the catalogue or the factory, else what is known without any image.

A factory answers first, then the catalogue that the settings name, then the recipes that come along; where
there are none either, all releases of which something is documented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from imagefactory.catalogue.model import Catalogue, Offer
from imagefactory.trust.offers import ages_of, judge_offer
from imagefactory.project import Factory, is_factory, names_catalogue
from imagefactory.gpu.knowledge import families
from imagefactory.matrix.compat import releases
from imagefactory.schedulers.pool import Inventory
from imagefactory.schedulers.sites import find_site
from imagefactory.settings.load import Settings
from imagefactory.actions.centers import Center, OpenCenter, read_centers
from imagefactory.stages.compat import read_candidates
from imagefactory.submit.find import Findable, Found, candidate, find, offered
from imagefactory.submit.places import Wish
from imagefactory.trust.claims import ProofAges


@dataclass(frozen=True, slots=True, kw_only=True)
class FindAsk:
    """What is looked for, for jobs that ask `wish`, on the pool of an inventory where there is one."""

    words: tuple[str, ...]
    wish: Wish
    inventory: Inventory | None
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found, the best first. `open` are the centers with images, none where nothing is verified.

    `factory` says that it is this factory's own, `place` where that or the only catalogue lies, `ages` how
    old the catalogues' proofs are, and `notes` how they were had.
    """

    found: tuple[Found, ...]
    ask: FindAsk
    open: tuple[OpenCenter, ...]
    factory: bool
    place: str
    ages: ProofAges | None = None
    notes: tuple[str, ...] = ()

    @property
    def catalogue(self) -> Catalogue | None:
        """That of the first center with images."""
        return self.open[0].catalogue if self.open else None


def find_images(
    settings: Settings, environ: Mapping[str, str], recipes: Callable[[], Factory | None], ask: FindAsk
) -> Finding:
    """Raises NothingSelectedError where the words mean nothing, and what read_catalogue raises.

    `recipes` reads the factory of the settings, or the recipes that come along: None where there are none.
    """
    own = is_factory(settings)
    opened = read_centers(settings, environ, ask.now) if own or names_catalogue(settings) else None
    offers: list[Offer] = []
    findables: list[Findable] = []
    for one in opened.open if opened else ():
        judged = _judged(one, ask.now)
        offers += judged
        findables += _offered(one.center, judged, ask)
    if own or opened is None:
        made = {one.target for one in findables}
        findables += [one for one in _candidates(recipes(), ask) if one.target not in made or not one.target]
    return Finding(
        found=find(ask.words, findables, ask.inventory),
        ask=ask,
        open=tuple(one for one in opened.open if one.catalogue.images) if opened else (),
        factory=own,
        place=str(settings.root_path) if own else opened.open[0].center.place if opened else "",
        ages=ages_of(offers, ask.now) if offers else None,
        notes=opened.notes if opened else (),
    )


def _judged(one: OpenCenter, now: datetime) -> list[Offer]:
    return [judge_offer(one.catalogue, image, one.center.trust, now) for image in one.catalogue.images]


def _offered(center: Center, offers: Sequence[Offer], ask: FindAsk) -> Iterator[Findable]:
    site, folder = find_site(center.settings.site.value), center.settings.sif_folder.value
    for offer in offers:
        one = offered(offer, site, folder, ask.wish)
        if one is not None:
            yield (
                replace(one, name=f"{center.prefix}{one.name}", center=center.name) if center.several else one
            )


def _candidates(factory: Factory | None, ask: FindAsk) -> Sequence[Findable]:
    if factory:
        return [candidate(one, ask.wish) for one in read_candidates(factory, factory.targets)]
    names = dict(families())
    return [candidate(one, ask.wish) for family in names for one in releases(names[family])]
