"""Tags that follow verdicts.

verdicts/tags.py decides, here it is done. One at a time moves tags from one store; where another store's
promoter was at a tag meanwhile, all is read and decided anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imagefactory.access import Access
from imagefactory.errors import (
    FactoryError,
    RegistryError,
)
from imagefactory.oci.candidates import (
    plain_tag,
)
from imagefactory.oci.graph import Place, read_manifest
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.progress import Progress
from imagefactory.stages.audit import log_acts
from imagefactory.stages.candidates import Promoting, read_candidates
from imagefactory.stages.statements import writing
from imagefactory.stages.verdicts import called, read_court
from imagefactory.verdicts.audit import PROMOTE, AuditEntry
from imagefactory.verdicts.tags import PromotionRule, TagFate, decide_tags

if TYPE_CHECKING:
    pass

TRIES = 3
"""How often tags are decided anew when another promoter moved one meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """What became of the tags. `faults` are those that could not be moved, with why."""

    target: str
    place: str
    fates: tuple[TagFate, ...]
    faults: tuple[tuple[str, FactoryError], ...] = ()

    @property
    def proven(self) -> bool:
        """Whether any tag points to a candidate that fulfils its rule."""
        return any(fate.proven for fate in self.fates)


def promote(access: Access, promoting: Promoting, progress: Progress) -> Promotion:
    """Lets the tags of a target follow the verdicts that can be relied on (promotion.decide_tags).

    Raises RegistryError or StoreError, also when others keep moving the same tags.
    """
    place, court = promoting.place, read_court(access, promoting.now)
    local = isinstance(place.store, LayoutStore)
    rule = PromotionRule(
        plain=plain_tag(promoting.target),
        capabilities=promoting.target.capabilities,
        pointers_only=local and promoting.target.gpu,
    )
    with writing(access, place, progress), progress.stage(f"{promoting.target.name}: tags in {place}"):
        for _ in range(TRIES):
            read, tags = read_candidates(access, promoting, court, progress)
            fates = decide_tags(rule, [one.candidate for one in read], tags)
            faults = () if promoting.dry_run else _move_all(place, fates)
            if faults is not None:
                _log(access, promoting, fates, faults)
                return Promotion(target=promoting.target.name, place=str(place), fates=fates, faults=faults)
    raise RegistryError(
        f"{place}: others keep moving the tags of {promoting.target.name}",
        hint="one promoter at a time: run it again when the other has ended",
    )


def _log(
    access: Access,
    promoting: Promoting,
    fates: Sequence[TagFate],
    faults: Sequence[tuple[str, FactoryError]],
) -> None:
    failed = {tag for tag, _ in faults}
    moved = [fate for fate in fates if fate.moved and fate.tag not in failed and not promoting.dry_run]
    log_acts(
        access,
        [
            AuditEntry(
                action=PROMOTE,
                what=f"{fate.tag} -> {fate.after or 'removed'}",
                where=called(promoting.place),
                why=fate.why,
            )
            for fate in moved
        ],
    )


def _move_all(place: Place, fates: Sequence[TagFate]) -> tuple[tuple[str, FactoryError], ...] | None:
    """Moves what moves; gives the faults, or None where another was at one of the tags meanwhile."""
    faults: list[tuple[str, FactoryError]] = []
    for fate in (one for one in fates if one.moved):
        there = place.store.manifest(place.repository, fate.tag)
        if (there[0].digest if there else "") != fate.before:
            return None
        if fate.after:
            root = read_manifest(place, fate.after)
            put = place.store.put_manifest(place.repository, root.data, root.descriptor.media_type, fate.tag)
            if put.digest != fate.after:
                return None
            continue
        try:
            place.store.untag(place.repository, fate.tag)
        except RegistryError as error:  # docker-registry 2.8 cannot: the tag stays, and that is said
            faults.append((fate.tag, error))
    return tuple(faults)
