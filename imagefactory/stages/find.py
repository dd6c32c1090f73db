"""What there is to find: images of the catalogue or the factory, else what is known without any image.

A factory answers first, then the catalogue that the settings name, then the recipes that come along; where
there are none either, all releases of which something is documented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from imagefactory.catalogue.model import Catalogue, Offer
from imagefactory.catalogue.offers import ages_of, judge_offer
from imagefactory.factory import Factory, is_factory, names_catalogue
from imagefactory.gpu.knowledge import families
from imagefactory.matrix.compat import releases
from imagefactory.pools.model import Inventory
from imagefactory.pools.sites import find_site
from imagefactory.settings.load import Settings
from imagefactory.stages.compat import read_candidates
from imagefactory.stages.read_catalogue import read_catalogue
from imagefactory.submit.find import Findable, Found, candidate, find, offered
from imagefactory.submit.places import Wish
from imagefactory.verdicts.claims import ProofAges
from imagefactory.verdicts.trust import read_trust


@dataclass(frozen=True, slots=True, kw_only=True)
class FindAsk:
    """What is looked for, for jobs that ask `wish`, on the pool of an inventory where there is one."""

    words: tuple[str, ...]
    wish: Wish
    inventory: Inventory | None
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found, the best first. `catalogue` is None where no image is known: nothing is verified then.

    `factory` says that it is this factory's own, `place` where that or the catalogue lies, and `ages` how old
    the catalogue's proofs are.
    """

    found: tuple[Found, ...]
    ask: FindAsk
    catalogue: Catalogue | None
    factory: bool
    place: str
    ages: ProofAges | None = None


def find_images(
    settings: Settings, environ: Mapping[str, str], recipes: Callable[[], Factory | None], ask: FindAsk
) -> Finding:
    """Raises NothingSelectedError where the words mean nothing, and what read_catalogue raises.

    `recipes` reads the factory of the settings, or the recipes that come along: None where there are none.
    """
    own = is_factory(settings)
    catalogue = read_catalogue(settings, environ, ask.now) if own or names_catalogue(settings) else None
    offers = _judged(settings, catalogue, ask) if catalogue else []
    findables = list(_offered(settings, offers, ask))
    if own or catalogue is None:
        made = {one.target for one in findables}
        findables += [one for one in _candidates(recipes(), ask) if one.target not in made or not one.target]
    place = str(settings.root_path) if own else settings.catalogue.value or settings.registry.value
    return Finding(
        found=find(ask.words, findables, ask.inventory),
        ask=ask,
        catalogue=catalogue if catalogue and catalogue.images else None,
        factory=own,
        place=place,
        ages=ages_of(offers, ask.now) if offers else None,
    )


def _judged(settings: Settings, catalogue: Catalogue, ask: FindAsk) -> list[Offer]:
    trust = read_trust(settings.files)
    return [judge_offer(catalogue, image, trust, ask.now) for image in catalogue.images]


def _offered(settings: Settings, offers: Sequence[Offer], ask: FindAsk) -> Iterator[Findable]:
    site = find_site(settings.site.value)
    for offer in offers:
        one = offered(offer, site, settings.sif_folder.value, ask.wish)
        if one is not None:
            yield one


def _candidates(factory: Factory | None, ask: FindAsk) -> Sequence[Findable]:
    if factory:
        return [candidate(one, ask.wish) for one in read_candidates(factory, factory.targets)]
    names = dict(families())
    return [candidate(one, ask.wish) for family in names for one in releases(names[family])]
