"""What a sweep signed, attached where its images lie: each image looked for once, all of a place at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from imagefactory.access import registry_place, repository_of
from imagefactory.errors import CheckFailedError, FactoryError, RegistryError, StatementError, UsageError
from imagefactory.project import Factory
from imagefactory.model import Target
from imagefactory.oci.graph import Place
from imagefactory.oci.store import Reference, parse_reference
from imagefactory.schedulers.pool import ImageKind, SweepNode
from imagefactory.progress import Progress
from imagefactory.stages.statements import Attaching, attach_all, attachings, places_of
from imagefactory.actions.verdicts import called
from imagefactory.schedulers.sweep_file import GONE, CollectedNode
from imagefactory.trust.attached import MOST_REFUSED, read_verdicts
from imagefactory.trust.envelope import is_signed_by, parse_envelope
from imagefactory.trust.verdict import Verdict
from imagefactory.verdicts.statement import parse_verdict
from imagefactory.verify.model import Subject
from imagefactory.verify.nonces import Spending


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What is left of a verdict to attach, of thousands at once: its envelopes, not what they say."""

    keyid: str
    expires: datetime
    envelopes: tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDraft:
    """A node on its way: `signed` is to be attached, `spending` comes before that; `fault` ends it here.

    `lost`: it was signed and attached before, and nobody remembers where.
    """

    node: SweepNode
    one: CollectedNode
    signed: Sealed | None = None
    spending: Spending | None = None
    fault: FactoryError | None = None
    lost: bool = False


def reference_of(node: SweepNode) -> str:
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
        self._signed: dict[tuple[str, str], Mapping[str, Verdict]] = {}

    def attach_all(self, drafts: Sequence[NodeDraft]) -> list[NodeDraft]:
        """Each draft with the places that have its verdict now, or with what went wrong."""
        drafts = list(drafts)
        waiting: dict[str, list[tuple[int, Attaching]]] = {}
        places: dict[str, Place] = {}
        for number, draft in enumerate(drafts):
            if draft.signed is None:
                continue
            try:
                subjects = self.places(draft)
            except FactoryError as error:
                drafts[number] = replace(draft, fault=error)
                continue
            keyid, names = draft.signed.keyid, tuple(called(place) for place, _ in subjects)
            drafts[number] = replace(draft, one=replace(draft.one, keyid=keyid, attached=names))
            for place, subject in subjects:
                places[called(place)] = place
                rows = waiting.setdefault(called(place), [])
                own = attachings(draft.signed.envelopes, draft.signed.expires, subject)
                rows += [(number, attaching) for attaching in own]
        for name, rows in waiting.items():
            faults = attach_all(
                self.factory, places[name], [attaching for _, attaching in rows], self.progress
            )
            for (number, _), fault in zip(rows, faults, strict=True):
                if fault:
                    one = replace(drafts[number].one, keyid="", attached=())
                    drafts[number] = replace(drafts[number], one=one, fault=fault)
        return drafts

    def find_again(self, drafts: Sequence[NodeDraft], keys: Mapping[str, bytes]) -> list[NodeDraft]:
        """The lost ones with the places that have their verdict, signed by one of `keys` (by their ids).

        Nothing is signed in place of one that is found nowhere, since its nonce is spent: that is a fault.
        """
        return [self._find_again(draft, keys) if draft.lost else draft for draft in drafts]

    def _find_again(self, draft: NodeDraft, keys: Mapping[str, bytes]) -> NodeDraft:
        nonce, keyids = draft.node.nonce, {}
        try:
            for place, subject in self.places(draft):
                key = (str(place), subject.manifest)
                if key not in self._signed:
                    self._signed[key] = read_signed(place, subject.manifest, keys)
                if verdict := self._signed[key].get(nonce):
                    keyids[called(place)] = verdict.keyid
        except FactoryError as error:
            return replace(draft, fault=error)
        if not keyids:
            why = f"{draft.one.why}, {GONE}"
            hint = f"imagefactory verify {draft.node.target} --pool POOL: a nonce is never signed twice"
            fault = CheckFailedError("verdict-lost", f"{draft.node.name}: {why}", hint=hint)
            return replace(draft, one=replace(draft.one, why=why), fault=fault)
        keyid = next(iter(keyids.values()))
        return replace(draft, one=replace(draft.one, keyid=keyid, attached=tuple(keyids)))

    def places(self, draft: NodeDraft) -> tuple[tuple[Place, Subject], ...]:
        """Where a verdict goes. Raises UsageError and RegistryError.

        After MOST_REFUSED images in a row that a registry did not show, each asked for again and again, no
        other is asked for.
        """
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

    def where(self, node: SweepNode) -> Reference | None:
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


def read_signed(place: Place, manifest: str, keys: Mapping[str, bytes]) -> Mapping[str, Verdict]:
    """The verdicts about an image that one of `keys` (by their ids) signed, by the run's nonce."""
    signed: dict[str, Verdict] = {}
    for attached in read_verdicts(place, manifest):
        try:
            envelope = parse_envelope(attached.envelope, "a verdict")
            verdict = parse_verdict(envelope.payload, "a verdict", envelope.keyid)
        except StatementError:
            continue
        public = keys.get(envelope.keyid)
        if public and is_signed_by(envelope, envelope.keyid, public):
            signed[verdict.report.nonce] = verdict
    return signed


def find_target(factory: Factory, name: str) -> Target:
    target = next((one for one in factory.targets if one.name == name), None)
    if target is None:
        raise UsageError(
            "target-not-in-project",
            f"this project has no target '{name}'",
            hint="collect the sweep in the project that created it (-C DIR)",
        )
    return target
