"""From a sweep that came back to verdicts: each node judged once, signed once, attached where its image lies.

    the job's log and files -> NodeResult, judge_job -> sign, spend the nonce -> attach -> collected.json

A node that is still at work is left for the next call. What was signed and could not be attached is attached
by the next call; nothing is signed a second time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagefactory.errors import FactoryError, StatementError, UsageError
from imagefactory.factory import Factory
from imagefactory.kits import CollectOptions, format_signed, parse_signed
from imagefactory.model import Outcome, Target
from imagefactory.oci.store import Reference, parse_reference
from imagefactory.pools.htcondor.classify import NodeFound, read_node
from imagefactory.pools.htcondor.dag import node_folder
from imagefactory.pools.htcondor.evidence import JobAnswer, judge_job, parse_job_run
from imagefactory.pools.model import ImageKind, Node, NodeResult, Sweep
from imagefactory.pools.sweep_file import CollectedNode, read_collected, read_sweep, write_collected
from imagefactory.progress import Progress
from imagefactory.verify.kit.program import EXPECTATIONS, KIT
from imagefactory.verify.model import GpuReport, Subject
from imagefactory.verify.nonces import Ledger, NonceError, Spending
from imagefactory.verify.smoke import digest_of, suite_digest
from imagefactory.verify.statement import SIGNABLE, Signed, sign

if TYPE_CHECKING:
    from imagefactory.oci.transfer import Place
    from imagefactory.promoting import Promotion
    from imagefactory.verdicts import Attaching
    from imagefactory.verify.keys import SigningKey

NO_KEY = "unsigned: no key (imagefactory keys new NAME)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSweep:
    """All nodes of a sweep, and what went wrong beside them (a registry that is down, tags not moved)."""

    folder: Path
    sweep: Sweep
    nodes: tuple[CollectedNode, ...]
    faults: tuple[tuple[str, FactoryError], ...]
    promotions: tuple[Promotion, ...] = ()

    @property
    def waiting(self) -> int:
        """Nodes that have no outcome yet."""
        return sum(one.result.outcome is None for one in self.nodes)

    @property
    def verified(self) -> bool:
        return all(one.result.outcome is Outcome.VERIFIED for one in self.nodes)


def collect_sweep(
    factory: Factory, folder: Path, options: CollectOptions, now: datetime, progress: Progress
) -> CollectedSweep:
    """Judges, signs and attaches what came back so far. Raises UsageError for a folder that is no sweep.

    A node whose verdict cannot be attached is among the faults; its siblings go on.
    """
    from imagefactory.verification import ledger, signing_key
    from imagefactory.verify.trust import read_trust

    sweep = read_sweep(folder)
    earlier = {one.result.node: one for one in read_collected(folder)}
    signer = Signer(
        factory=factory,
        folder=folder,
        ledger=Ledger(options.ledger) if options.ledger else ledger(factory),
        key=signing_key(factory),
        days=read_trust(factory.settings.files).policy.days,
        now=now,
        suite=suite_digest(),
    )
    attacher = Attacher(factory, options.registry, progress)
    earlier = {node: one for node, one in earlier.items() if one.attached}
    with progress.task("judging", total=len(sweep.nodes), unit="nodes") as task:
        drafts: list[Draft] = []
        for node in sweep.nodes:
            known = earlier.get(node.name)
            again = known is None or known.nonce != node.nonce
            drafts.append(_draft(node, sweep, signer) if again or not known else Draft(node=node, one=known))
            task.advance(1)
    spending = [one.spending for one in drafts if one.spending]
    refused = signer.ledger.spend_all(spending, now) if spending else {}
    drafts = [_spent(draft, refused.get(draft.node.nonce)) for draft in drafts]
    with progress.stage(f"attaching {sum(draft.signed is not None for draft in drafts)} verdicts"):
        drafts = attacher.attach_all(drafts)
    nodes = [draft.one for draft in drafts]
    faults = [(draft.node.name, draft.fault) for draft in drafts if draft.fault]
    write_collected(folder, nodes)
    signer.ledger.settle_all({one.nonce for one in nodes if one.attached})
    promotions: list[Promotion] = []
    if options.promote:
        attached = {one.target for one in nodes if one.attached}
        for node in {node.target: node for node in sweep.nodes if node.target in attached}.values():
            try:
                promotions.append(_promote(factory, node, attacher, now))
            except FactoryError as error:
                faults.append((node.target, error))
    return CollectedSweep(
        folder=folder,
        sweep=sweep,
        nodes=tuple(nodes),
        faults=tuple(faults),
        promotions=tuple(promotions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A node on its way: `signed` is to be attached, `spending` comes before that; `fault` ends it here."""

    node: Node
    one: CollectedNode
    signed: Signed | None = None
    spending: Spending | None = None
    fault: FactoryError | None = None


def _draft(node: Node, sweep: Sweep, signer: Signer) -> Draft:
    """What became of a node, judged, and signed where that can be; nothing is spent yet."""
    found = read_node(signer.folder, node.name, sweep.limits)
    one = CollectedNode(result=found.result, target=node.target, capability=node.capability, nonce=node.nonce)
    if found.run is None or not found.result.attempts:
        return Draft(node=node, one=one)
    try:
        report = judge_job(*signer.asked(node), _answer(found, node))
    except StatementError as error:
        return Draft(
            node=node, one=replace(one, result=_judged(found, Outcome.INFRASTRUCTURE, error.message))
        )
    except NonceError as error:
        return Draft(node=node, one=replace(one, result=_judged(found, Outcome.NOT_TESTED, error.message)))
    one = replace(
        one,
        result=_judged(found, report.outcome, report.reason),
        gpu=report.device.name if report.device else "",
        driver=report.hardware.driver if report.device and report.hardware else "",
    )
    try:
        signed, spending, why = signer.sign(report, node)
    except FactoryError as error:
        return Draft(node=node, one=replace(one, why=f"unsigned: {error.message}"), fault=error)
    return Draft(node=node, one=replace(one, why=why), signed=signed, spending=spending)


def _spent(draft: Draft, refused: NonceError | None) -> Draft:
    if refused is None:
        return draft
    one = replace(draft.one, why=f"unsigned: {refused.message}")
    return replace(draft, one=one, signed=None, fault=refused)


def _judged(found: NodeFound, outcome: Outcome, reason: str) -> NodeResult:
    return replace(found.result, outcome=outcome, reason=reason)


def _answer(found: NodeFound, node: Node) -> JobAnswer:
    run = parse_job_run(found.run or b"", f"{node.name}/run.json")
    return JobAnswer(run=run, report=found.report, attempt=found.result.attempts[-1])


# --- signing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Who signs the nodes of the sweep in `folder`; `key` is None where this machine holds none."""

    factory: Factory
    folder: Path
    ledger: Ledger
    key: SigningKey | None
    days: int
    now: datetime
    suite: str

    def asked(self, node: Node) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """kit.json and expectations.json, as the ledger's owner wrote them.

        Raises NonceError where they were changed, or are of another suite or ledger.
        """
        place = node_folder(self.folder, node.name)
        try:
            texts = {name: (place / name).read_bytes() for name in (KIT, EXPECTATIONS)}
        except OSError as error:
            raise StatementError(f"{error.filename}: {error.strerror}", hint="make a new sweep") from error
        known = self.ledger.look(node.nonce).run
        if known.kit != digest_of(texts):
            raise NonceError(
                "edited", f"what {node.name} asks of its image was changed", hint="make a new sweep"
            )
        if known.suite != self.suite:
            raise NonceError(
                "other-suite",
                f"it ran the suite {known.suite[:19]}..., this imagefactory has another",
                hint="collect it with the imagefactory that made it, or make a new sweep",
            )
        return json.loads(texts[KIT]), json.loads(texts[EXPECTATIONS])

    def sign(self, report: GpuReport, node: Node) -> tuple[Signed | None, Spending | None, str]:
        """The verdict, what is to be spent on it, and a line; no verdict where the report stays one.

        One that was signed before and did not arrive needs nothing spent. Raises NonceError, StoreError.
        """
        known = self.ledger.look(node.nonce)
        if known.spent is not None:
            data = self.ledger.unsettled(node.nonce)
            signed = parse_signed(data)[0] if data else None
            return signed, None, f"signed on {known.spent:%Y-%m-%d %H:%M} UTC"
        if report.outcome not in SIGNABLE:
            return None, None, f"unsigned: '{report.outcome}' says nothing of the image"
        if self.key is None:
            return None, None, NO_KEY
        self.ledger.check(node.nonce, known.run, self.now)
        try:
            signed = sign(report, self.key, now=self.now, days=self.days)
        except StatementError as error:
            return None, None, f"unsigned: {error.message}"
        data = format_signed(signed, reference_of(node))
        result = f"sha256:{hashlib.sha256(data).hexdigest()}"
        spending = Spending(nonce=node.nonce, run=known.run, result=result, signed=data)
        return signed, spending, f"signed by '{self.key.name}'"


def reference_of(node: Node) -> str:
    """Where a node's image lies in a registry (HOST/NAME@sha256:...); empty for a file."""
    if node.image.kind in (ImageKind.DOCKER, ImageKind.ORAS):
        return node.image.address.partition("://")[2]
    return ""


# --- attaching -------------------------------------------------------------------------------------


class Attacher:
    """Attaches verdicts; each image is looked for once. `registry` (host[/path]) is where they go too."""

    def __init__(self, factory: Factory, registry: str, progress: Progress) -> None:
        self.factory, self.registry, self.progress = factory, registry, progress
        self._places: dict[str, tuple[tuple[Place, Subject], ...]] = {}

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
            keyid, names = draft.signed.verdict.keyid, tuple(called(place) for place, _ in found)
            drafts[number] = replace(draft, one=replace(draft.one, keyid=keyid, attached=names))
            for place, subject in found:
                places[called(place)] = place
                rows = waiting.setdefault(called(place), [])
                rows += [(number, one) for one in attachings(draft.signed, subject)]
        for name, rows in waiting.items():
            faults = attach_all(self.factory, places[name], [one for _, one in rows], self.progress)
            for (number, _), fault in zip(rows, faults, strict=True):
                if fault:
                    one = replace(drafts[number].one, keyid="", attached=())
                    drafts[number] = replace(drafts[number], one=one, fault=fault)
        return drafts

    def places(self, draft: Draft) -> tuple[tuple[Place, Subject], ...]:
        """Where a verdict goes. Raises UsageError and RegistryError."""
        from imagefactory.verdicts import places_of

        own = draft.node.image.subject
        if own.manifest not in self._places:
            self._places[own.manifest] = places_of(self.factory, own, self.where(draft.node))
        return self._places[own.manifest]

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


def _promote(factory: Factory, node: Node, attacher: Attacher, now: datetime) -> Promotion:
    """Lets the tags of a node's target follow its verdicts."""
    from imagefactory.promoting import Promoting, promote
    from imagefactory.verdicts import local_place, place_of

    target, where = find_target(factory, node.target), attacher.where(node)
    place = place_of(factory, where) if where else local_place(factory, target.family)
    return promote(factory, Promoting(target=target, place=place, now=now), attacher.progress)
