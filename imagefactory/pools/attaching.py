"""What a sweep signed, attached where its images lie: each image looked for once, all of a place at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from imagefactory.errors import FactoryError, RegistryError, UsageError
from imagefactory.factory import Factory
from imagefactory.model import Target
from imagefactory.oci.store import Reference, parse_reference
from imagefactory.pools.model import ImageKind, Node
from imagefactory.pools.sweep_file import CollectedNode
from imagefactory.progress import Progress
from imagefactory.verify.attached import MOST_REFUSED
from imagefactory.verify.model import Subject
from imagefactory.verify.nonces import Spending

if TYPE_CHECKING:
    from imagefactory.oci.transfer import Place
    from imagefactory.verdicts import Attaching


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What is left of a verdict to attach, of thousands at once: its envelopes, not what they say."""

    keyid: str
    expires: datetime
    envelopes: tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A node on its way: `signed` is to be attached, `spending` comes before that; `fault` ends it here."""

    node: Node
    one: CollectedNode
    signed: Sealed | None = None
    spending: Spending | None = None
    fault: FactoryError | None = None


def reference_of(node: Node) -> str:
    """Where a node's image lies in a registry (HOST/NAME@sha256:...); empty for a file."""
    if node.image.kind in (ImageKind.DOCKER, ImageKind.ORAS):
        return node.image.address.partition("://")[2]
    return ""


class Attacher:
    """Attaches verdicts; each image is looked for once. `registry` (host[/path]) is where they go too."""

    def __init__(self, factory: Factory, registry: str, progress: Progress) -> None:
        self.factory, self.registry, self.progress = factory, registry, progress
        self._places: dict[str, tuple[tuple[Place, Subject], ...] | FactoryError] = {}
        self._down: list[RegistryError] = []

    def attach_all(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Each draft with the places that have its verdict now, or with what went wrong."""
        from imagefactory.verdicts import attach_all, attachings, called

        drafts = list(drafts)
        waiting: dict[str, list[tuple[int, Attaching]]] = {}
        places: dict[str, Place] = {}
        for number, draft in enumerate(drafts):
            if draft.signed is None:
                continue
            try:
                found = self.places(draft)
            except FactoryError as error:
                drafts[number] = replace(draft, fault=error)
                continue
            keyid, names = draft.signed.keyid, tuple(called(place) for place, _ in found)
            drafts[number] = replace(draft, one=replace(draft.one, keyid=keyid, attached=names))
            for place, subject in found:
                places[called(place)] = place
                rows = waiting.setdefault(called(place), [])
                own = attachings(draft.signed.envelopes, draft.signed.expires, subject)
                rows += [(number, one) for one in own]
        for name, rows in waiting.items():
            faults = attach_all(self.factory, places[name], [one for _, one in rows], self.progress)
            for (number, _), fault in zip(rows, faults, strict=True):
                if fault:
                    one = replace(drafts[number].one, keyid="", attached=())
                    drafts[number] = replace(drafts[number], one=one, fault=fault)
        return drafts

    def places(self, draft: Draft) -> tuple[tuple[Place, Subject], ...]:
        """Where a verdict goes. Raises UsageError and RegistryError.

        After MOST_REFUSED images in a row that a registry did not show, each asked for again and again, no
        other is asked for.
        """
        from imagefactory.verdicts import places_of

        own = draft.node.image.subject
        if own.manifest not in self._places:
            if len(self._down) >= MOST_REFUSED:
                raise self._down[-1]
            try:
                self._places[own.manifest] = places_of(self.factory, own, self.where(draft.node))
                self._down.clear()
            except FactoryError as error:
                self._places[own.manifest] = error
                self._down += [error] if isinstance(error, RegistryError) else []
        found = self._places[own.manifest]
        if isinstance(found, FactoryError):
            raise found
        return found

    def where(self, node: Node) -> Reference | None:
        from imagefactory.publish import registry_place, repository_of

        if not self.registry:
            reference = reference_of(node)
            return parse_reference(reference) if reference else None
        host, path = registry_place(self.factory, self.registry)
        target = find_target(self.factory, node.target)
        return Reference(
            registry=host,
            repository=repository_of(path, target.family),
            digest=node.image.subject.index,
        )


def find_target(factory: Factory, name: str) -> Target:
    target = next((one for one in factory.targets if one.name == name), None)
    if target is None:
        raise UsageError(
            f"this factory has no target '{name}'", hint="collect it in the factory that made it (-C DIR)"
        )
    return target
