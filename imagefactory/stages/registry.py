"""What a registry holds of the targets, and which old candidates go from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from imagefactory.access import open_registry, registry_place, repository_of
from imagefactory.project import Factory
from imagefactory.model import Target
from imagefactory.oci.candidates import Tagged, plain_tag, read_tagged
from imagefactory.oci.graph import Place
from imagefactory.oci.prune import Fate, plan_prune, remove_candidate
from imagefactory.progress import Progress
from imagefactory.actions.verdicts import count_valid

if TYPE_CHECKING:
    from imagefactory.oci.registry.client import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A repository of a registry and what its tags point to."""

    registry: str
    repository: str
    tagged: tuple[Tagged, ...]


def list_registry(
    factory: Factory, targets: Sequence[Target], registry: str, progress: Progress
) -> tuple[Shelf, ...]:
    """The tags of the targets' repositories, with what they point to."""
    host, path = registry_place(factory, registry)
    store = open_registry(factory, host)
    plain = {plain_tag(target) for target in factory.targets}
    with progress.stage(f"list {host}"):
        return tuple(
            Shelf(
                registry=host,
                repository=repository_of(path, family),
                tagged=read_tagged(Place(store=store, repository=repository_of(path, family)), plain),
            )
            for family in sorted({target.family for target in targets})
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What became of one repository's candidates."""

    registry: str
    repository: str
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions:
    """Candidates pushed before `before` go, unless something needs them (candidates.plan_prune).

    `now` is when it is judged whether verdicts of theirs are valid.
    """

    before: datetime
    now: datetime
    registry: str = ""
    dry_run: bool = False


def prune_registry(factory: Factory, family: str, options: PruneOptions, progress: Progress) -> Pruned:
    """Removes old candidates from a family's repository.

    The registry's own collection frees their bytes. Raises RegistryError when it refuses to delete.
    """
    host, path = registry_place(factory, options.registry)
    store, repository = open_registry(factory, host), repository_of(path, family)
    with progress.stage(f"prune {host}/{repository}"):
        plain = {plain_tag(target) for target in factory.targets}
        place = Place(store=store, repository=repository)
        tagged = read_tagged(place, plain, count_valid(factory, place, options.now), records=True)
        fates = plan_prune(tagged, options.before)
        if not options.dry_run:
            fates = tuple(_prune_one(store, repository, fate) for fate in fates)
    return Pruned(registry=host, repository=repository, fates=fates)


def _prune_one(store: Registry, repository: str, fate: Fate) -> Fate:
    tag = remove_candidate(store, repository, fate) if fate.remove else ""
    return replace(fate, remove=False, why=f"{tag} points to it now") if tag else fate
