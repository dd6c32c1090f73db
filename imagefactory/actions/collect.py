"""From a sweep that came back to verdicts: each node judged once, signed once, attached where its image lies.

    what a job left -> NodeState -> its report -> sign, spend the nonce -> attach -> collected.json

A node that is still at work is left for the next call. What was signed and could not be attached is attached
by the next call; nothing is signed a second time. collected.json may be lost: what was signed and attached is
then found where the images lie, by the nonces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from imagefactory.access import package_index
from imagefactory.actions.claim import release_claim
from imagefactory.actions.images import PromotionRequest
from imagefactory.actions.promote import PromotionResult, promote
from imagefactory.actions.verdicts import (
    PendingNode,
    SignedNode,
    VerdictAttacher,
    find_target,
    local_place,
    nonce_store,
    place_of,
    reference_of,
    signing_key,
)
from imagefactory.actions.verify import CollectOptions, format_signed, parse_signed
from imagefactory.errors import ImagefactoryError, StatementError, ToolError, UsageError, os_problem
from imagefactory.http import RetryPolicy
from imagefactory.model import Outcome
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from imagefactory.oci.store import ImageReference, parse_reference
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.claims import cell_of
from imagefactory.schedulers.faults import MachineFaults, node_directory, read_failed_machines
from imagefactory.schedulers.pool import NodeResult, NodeState, Pool, SweepNode, SweepSpec, open_pool
from imagefactory.schedulers.sweep_file import (
    NO_KEY,
    UNSIGNED,
    CollectedNode,
    read_collected,
    read_sweep,
    write_collected,
)
from imagefactory.schedulers.underway import state_of
from imagefactory.trees import read_file
from imagefactory.trust.attached import MAX_REJECTED
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import read_trust
from imagefactory.trust.verdict import SIGNABLE, SignedVerdict, jittered_expiry, sign
from imagefactory.verify.kit.program import EXPECTATIONS, KIT, LARGEST_REPORT
from imagefactory.verify.nonces import IssuedNonce, NonceError, NonceStore, NonceUse, check_open, check_run
from imagefactory.verify.report import GpuReport
from imagefactory.verify.suite_files import digest_of, suite_digest

# --- Why a machine could not pull an image, as far as this one can tell: it asks the registry as a job
# would
# HTCondor keeps too little of what apptainer says on the machine (schedulers/htcondor/results.py), and what
# stands
# behind it is mostly one of three: the image is gone, the registry refuses or is down, or that machine
# alone is
# wrong.


SECONDS = 15.0


class AnonymousPullCheck:
    """Asks for each image once, without a password, as no job has one; after MOST_REFUSED refusals in a row
    for no other.
    """

    def __init__(self, factory: Project) -> None:
        self.factory = factory
        self._told: dict[str, str] = {}
        self._refused: list[str] = []

    def explain(self, node: SweepNode) -> str:
        """A line on the image of a node; empty for a file."""
        reference = reference_of(node)
        if not reference:
            return ""
        if reference not in self._told:
            if len(self._refused) >= MAX_REJECTED:
                return self._refused[-1]
            self._told[reference] = self._ask(parse_reference(reference), node.image.address)
        return self._told[reference]

    def _ask(self, where: ImageReference, address: str) -> str:
        trusted = package_index(self.factory).certificates
        options = RegistryOptions(
            certificates=Path(trusted) if trusted else None,
            plain_hosts=self.factory.settings.plain_hosts,
            patience=RetryPolicy(attempts=1, connect=SECONDS, read=SECONDS),
        )
        registry = RegistryClient(where.registry, options)
        try:
            manifest = registry.manifest(where.repository, where.tag_or_digest)
        except ImagefactoryError as error:
            self._refused.append(f"asked from here, without a password: {error.message}")
            return self._refused[-1]
        finally:
            registry.close()
        self._refused.clear()
        if manifest is None:
            return f"{where.registry} has no such image any more: a new sweep sends it again"
        return (
            f"asked from here, {where.registry} has it: on that machine `apptainer pull {address}` tells "
            "more (the registry's CA, the way there)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """All nodes of a sweep, and what went wrong beside them (a registry that is down, tags not moved).

    `machines` are those that failed jobs.
    """

    folder: Path
    sweep: SweepSpec
    nodes: tuple[CollectedNode, ...]
    faults: tuple[tuple[str, ImagefactoryError], ...]
    promotions: tuple[PromotionResult, ...] = ()
    machines: tuple[MachineFaults, ...] = ()

    @property
    def waiting(self) -> int:
        """Nodes that have no outcome yet."""
        return sum(one.result.outcome is None for one in self.nodes)

    @property
    def verified(self) -> bool:
        return all(one.result.outcome is Outcome.VERIFIED for one in self.nodes)


def collect_sweep(
    factory: Project, folder: Path, options: CollectOptions, now: datetime, progress: Progress
) -> SweepResult:
    """Judges, signs and attaches what came back so far. Raises UsageError for a folder that is no sweep.

    A node whose verdict cannot be attached is among the faults; its siblings go on.
    """
    sweep = read_sweep(folder)
    earlier = {known.result.node: known for known in _read_earlier(folder)}
    trust = read_trust(factory.settings.files)
    pool = open_pool(sweep.pool, factory.environ)
    silent = _read_queue(pool, folder)
    signer = NodeSigner(
        factory=factory,
        folder=folder,
        pool=pool,
        pool_name=sweep.pool,
        ledger=nonce_store(factory, options.ledger),
        key=signing_key(factory, now),
        days=trust.policy.days,
        now=now,
        suite=suite_digest(),
    )
    attacher = VerdictAttacher(factory, options.registry, progress)
    earlier = {name: known for name, known in earlier.items() if known.attached}
    with progress.task("judging", total=len(sweep.nodes), unit="nodes") as task:
        drafts: list[PendingNode] = []
        for node in sweep.nodes:
            known = earlier.get(node.name)
            again = known is None or known.nonce != node.nonce
            drafts.append(
                _draft(node, sweep, signer) if again or not known else PendingNode(node=node, one=known)
            )
            task.advance(1)
    drafts = _explained(drafts, factory, progress)
    spending = [draft.spending for draft in drafts if draft.spending]
    refused = signer.ledger.spend_all(spending, now) if spending else {}
    drafts = [_spent_nonces(draft, refused.get(draft.node.nonce)) for draft in drafts]
    with progress.stage(f"attaching {sum(draft.signed is not None for draft in drafts)} verdicts"):
        drafts = attacher.attach_all(drafts)
    if any(draft.lost for draft in drafts):
        own = {signer.key.keyid: signer.key.public} if signer.key else {}
        with progress.stage("looking for verdicts that were attached before"):
            drafts = attacher.find_again(drafts, {key.keyid: key.public for key in trust.keys} | own)
    nodes = [draft.one for draft in drafts]
    faults = [(draft.node.name, draft.fault) for draft in drafts if draft.fault]
    if silent and any(node.result.outcome is None for node in nodes):
        faults.append((sweep.id, silent))
    write_collected(folder, nodes)
    signer.ledger.settle_all({node.nonce for node in nodes if node.attached})
    # What others may take up: all that has an end, and no verdict of it is still to arrive.
    open_ones = {
        node.nonce
        for node in nodes
        if node.result.outcome is None
        or (not node.attached and state_of(node.result.outcome, node) is not None)
    }
    left = [cell_of(node) for node in sweep.nodes if node.nonce in open_ones]
    release_claim(factory, sweep.id, left, now, progress)
    promotions: list[PromotionResult] = []
    if options.promote:
        attached = {node.target for node in nodes if node.attached}
        for node in {node.target: node for node in sweep.nodes if node.target in attached}.values():
            try:
                promotions.append(_promote(factory, node, attacher, now))
            except ImagefactoryError as error:
                faults.append((node.target, error))
    return SweepResult(
        folder=folder,
        sweep=sweep,
        nodes=tuple(nodes),
        faults=tuple(faults),
        promotions=tuple(promotions),
        machines=read_failed_machines(folder, sweep),
    )


def _read_queue(pool: Pool, folder: Path) -> ToolError | None:
    """Why the queue did not tell how its jobs are: without it one that is over may count as not done."""
    try:
        pool.look(folder)
    except ToolError as error:
        return error
    return None


def _read_earlier(folder: Path) -> tuple[CollectedNode, ...]:
    """What an earlier call found; nothing where that is damaged or lost, as all of it is made anew."""
    try:
        return read_collected(folder)
    except UsageError:
        return ()


def _draft(node: SweepNode, sweep: SweepSpec, signer: NodeSigner) -> PendingNode:
    """What became of a node, judged, and signed where that can be; nothing is spent yet."""
    state = signer.pool.read_node(signer.folder, node, sweep.limits)
    collected = CollectedNode(
        result=state.result, target=node.target, capability=node.capability, nonce=node.nonce
    )
    if state.run is None or not state.result.attempts:
        return PendingNode(node=node, one=collected)
    try:
        known = signer.ledger.look(node.nonce)
        report = signer.pool.job_report(*signer.asked(node, known), state)
    except StatementError as error:
        return PendingNode(
            node=node,
            one=replace(collected, result=_verified_nodes(state, Outcome.INFRASTRUCTURE, error.message)),
        )
    except ImagefactoryError as error:
        collected = replace(collected, result=_verified_nodes(state, Outcome.NOT_TESTED, error.message))
        return PendingNode(node=node, one=collected, fault=None if isinstance(error, NonceError) else error)
    collected = replace(
        collected,
        result=_verified_nodes(state, report.outcome, report.reason),
        gpu=report.device.name if report.device else "",
        driver=report.hardware.driver if report.device and report.hardware else "",
    )
    try:
        signed, spending, why = signer.sign(report, node, known)
    except ImagefactoryError as error:
        return PendingNode(node=node, one=replace(collected, why=f"{UNSIGNED}{error.message}"), fault=error)
    lost = known.spent is not None and signed is None
    return PendingNode(
        node=node, one=replace(collected, why=why), signed=signed, spending=spending, lost=lost
    )


def _explained(drafts: list[PendingNode], factory: Project, progress: Progress) -> list[PendingNode]:
    """Those whose image was not pulled, with what its registry says of it now."""
    count = sum(draft.one.result.outcome is Outcome.PULL_FAILED for draft in drafts)
    if not count:
        return drafts
    asker = AnonymousPullCheck(factory)
    with progress.stage(f"asking for the images of {count} nodes that could not be pulled"):
        return [
            replace(draft, one=replace(draft.one, why=asker.explain(draft.node)))
            if draft.one.result.outcome is Outcome.PULL_FAILED
            else draft
            for draft in drafts
        ]


def _spent_nonces(draft: PendingNode, refused: NonceError | None) -> PendingNode:
    if refused is None:
        return draft
    collected = replace(draft.one, why=f"{UNSIGNED}{refused.message}")
    return replace(draft, one=collected, signed=None, fault=refused)


def _verified_nodes(state: NodeState, outcome: Outcome, reason: str) -> NodeResult:
    return replace(state.result, outcome=outcome, reason=reason)


# --- signing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSigner:
    """Who signs the nodes of the sweep in `folder`; `key` is None where this machine holds none."""

    factory: Project
    folder: Path
    pool: Pool
    pool_name: str
    ledger: NonceStore
    key: SigningKey | None
    days: int
    now: datetime
    suite: str

    def asked(self, node: SweepNode, known: IssuedNonce) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """kit.json and expectations.json, as the ledger's owner wrote them; `known` is what the ledger says.

        Raises NonceError where they were changed, or are of another suite or pool.
        """
        place = node_directory(self.folder, node.name)
        try:
            texts = {name: read_file(place, name, LARGEST_REPORT) for name in (KIT, EXPECTATIONS)}
        except OSError as error:
            raise StatementError(
                *os_problem("read", error.filename, error), hint="create a new sweep"
            ) from error
        run = replace(known.run, suite=self.suite, kit=digest_of(texts), pool=self.pool_name)
        check_run(known, run)
        return json.loads(texts[KIT]), json.loads(texts[EXPECTATIONS])

    def sign(
        self, report: GpuReport, node: SweepNode, known: IssuedNonce
    ) -> tuple[SignedNode | None, NonceUse | None, str]:
        """The verdict, what is to be spent on it, and a line; no verdict where the report stays one.

        One that was signed before and did not arrive needs nothing spent. Raises NonceError, StoreError.
        """
        if known.spent is not None:
            data = self.ledger.unsettled(node.nonce)
            waiting = _signed_node(parse_signed(data)[0]) if data else None
            return waiting, None, f"signed on {known.spent:%Y-%m-%d %H:%M} UTC"
        if report.outcome not in SIGNABLE:
            return None, None, f"{UNSIGNED}'{report.outcome}' says nothing of the image"
        if self.key is None:
            return None, None, NO_KEY
        check_open(known, self.now)
        try:
            signed = sign(report, self.key, now=self.now, days=jittered_expiry(report, self.days))
        except StatementError as error:
            return None, None, f"{UNSIGNED}{error.message}"
        data = format_signed(signed, reference_of(node))
        result = f"sha256:{hashlib.sha256(data).hexdigest()}"
        spending = NonceUse(nonce=node.nonce, run=known.run, result=result, signed=data)
        return _signed_node(signed), spending, f"signed by '{self.key.name}'"


def _signed_node(signed: SignedVerdict) -> SignedNode:
    verdict = signed.verdict
    return SignedNode(
        keyid=verdict.keyid, expires=verdict.expires, envelopes=(signed.envelope, signed.test_result)
    )


def _promote(factory: Project, node: SweepNode, attacher: VerdictAttacher, now: datetime) -> PromotionResult:
    """Lets the tags of a node's target follow its verdicts."""
    target, where = find_target(factory, node.target), attacher.where(node)
    place = place_of(factory, where) if where else local_place(factory, target.family)
    return promote(factory, PromotionRequest(target=target, place=place, now=now), attacher.progress)
