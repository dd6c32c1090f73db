"""Collect a sweep: verify each finished node, sign its verdict once and attach it to the image.

    files of a job -> NodeState -> its report -> sign, spend the nonce -> attach -> collected.json

The next call continues with running nodes and with signed verdicts that could not be attached. Nothing is
signed twice. If collected.json is lost, the verdicts are found at their images by their nonces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from imagefactory.access import package_index, registry_place, repository_of
from imagefactory.actions.claim import release_claim
from imagefactory.actions.promote import PromotionRequest, PromotionResult, promote
from imagefactory.actions.verdicts import (
    StatementRequest,
    attach_all,
    nonce_store,
    place_of,
    places_of,
    read_signed,
    signing_key,
    subject_name,
    verdict_statements,
)
from imagefactory.actions.verify import CollectOptions, format_signed, parse_signed
from imagefactory.errors import (
    CheckFailedError,
    ImagefactoryError,
    RecipeError,
    RegistryError,
    StatementError,
    ToolError,
    UsageError,
    os_problem,
)
from imagefactory.http import RetryPolicy
from imagefactory.model import Outcome, Target
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from imagefactory.oci.store import ImageReference, parse_reference
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.faults import MachineFaults, node_directory, read_failed_machines
from imagefactory.schedulers.pool import ImageKind, Pool, SweepNode, SweepSpec, open_pool
from imagefactory.schedulers.sweep_file import (
    NO_KEY,
    UNSIGNED,
    VERDICT_MISSING,
    CollectedNode,
    read_collected,
    read_sweep,
    write_collected,
)
from imagefactory.schedulers.underway import cell_of, state_of
from imagefactory.trees import read_file
from imagefactory.trust.attached import MAX_REJECTED
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import read_trust
from imagefactory.trust.verdict import PASSES, SignedVerdict, Verdict, jittered_expiry, sign, signable
from imagefactory.verify.kit.program import EXPECTATIONS, KIT, LARGEST_REPORT
from imagefactory.verify.nonces import IssuedNonce, NonceError, NonceStore, NonceUse, check_open, check_run
from imagefactory.verify.report import GpuReport, VerifiedImage
from imagefactory.verify.suite_files import digest_of, suite_digest

SECONDS = 15.0
Places = tuple[tuple[StoreRepository, VerifiedImage], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedNode:
    """The fields of a verdict that are needed to attach it. A sweep has thousands, so the rest is dropped."""

    keyid: str
    expires: datetime
    envelopes: tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingNode:
    """A node in progress: first `spending` is set, then `signed` is attached. A `fault` ends it.

    `lost` is true for a verdict that was signed and attached before, with no local record of its place.
    """

    node: SweepNode
    one: CollectedNode
    signed: SignedNode | None = None
    spending: NonceUse | None = None
    fault: ImagefactoryError | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """All nodes of a sweep, and other errors (a registry that is down, tags that did not move).

    `machines` are those on which jobs failed.
    """

    folder: Path
    sweep: SweepSpec
    nodes: tuple[CollectedNode, ...]
    faults: tuple[tuple[str, ImagefactoryError], ...]
    promotions: tuple[PromotionResult, ...] = ()
    machines: tuple[MachineFaults, ...] = ()

    @property
    def waiting(self) -> int:
        """The number of nodes without an outcome."""
        return sum(node.result.outcome is None for node in self.nodes)

    @property
    def verified(self) -> bool:
        return all(node.result.outcome in PASSES for node in self.nodes)


def collect_sweep(
    project: Project, directory: Path, options: CollectOptions, now: datetime, progress: Progress
) -> SweepResult:
    """Verify, sign and attach all results so far. Raises UsageError if the directory is not a sweep.

    A node whose verdict cannot be attached is among the faults. The other nodes continue.
    """
    sweep = read_sweep(directory)
    earlier: tuple[CollectedNode, ...] = ()
    with suppress(UsageError):  # corrupt or lost: everything is collected again
        earlier = read_collected(directory)
    trust = read_trust(project.settings.files)
    pool, silent = open_pool(sweep.scheduler, project.environ), None
    try:
        pool.look(directory)
    except ToolError as error:  # without the queue a finished job may count as running
        silent = error
    signer = NodeSigner(
        folder=directory,
        pool=pool,
        pool_name=sweep.scheduler,
        nonces=nonce_store(project, options.nonce_dir),
        key=signing_key(project, now),
        days=trust.policy.days,
        now=now,
        suite=suite_digest(),
    )
    attacher = VerdictAttacher(project, options.registry, progress)
    attached = {(row.result.node, row.nonce): row for row in earlier if row.attached}
    drafts: list[PendingNode] = []
    with progress.task("judging", total=len(sweep.nodes), unit="nodes") as task:
        for node in sweep.nodes:
            known = attached.get((node.name, node.nonce))
            drafts.append(PendingNode(node=node, one=known) if known else signer.draft(node, sweep))
            task.advance(1)
    drafts = _explain_pulls(drafts, project, progress)
    spending = [draft.spending for draft in drafts if draft.spending]
    refused = signer.nonces.spend_all(spending, now) if spending else {}
    drafts = [
        replace(draft, one=replace(draft.one, why=f"{UNSIGNED}{fault.message}"), signed=None, fault=fault)
        if (fault := refused.get(draft.node.nonce))
        else draft
        for draft in drafts
    ]
    with progress.stage(f"attaching {sum(draft.signed is not None for draft in drafts)} verdicts"):
        drafts = attacher.attach_all(drafts)
    if any(draft.lost for draft in drafts):
        own_keys = {signer.key.keyid: signer.key.public} if signer.key else {}
        keys = {key.keyid: key.public for key in trust.keys} | own_keys
        with progress.stage("looking for verdicts that were attached before"):
            drafts = [attacher.find_again(draft, keys) if draft.lost else draft for draft in drafts]
    nodes = [draft.one for draft in drafts]
    faults = [(draft.node.name, draft.fault) for draft in drafts if draft.fault]
    if silent and any(node.result.outcome is None for node in nodes):
        faults.append((sweep.id, silent))
    write_collected(directory, nodes)
    signer.nonces.settle_all({node.nonce for node in nodes if node.attached})
    # Other stores may claim nodes that have an outcome and no pending verdict.
    unfinished = {
        node.nonce
        for node in nodes
        if node.result.outcome is None
        or (not node.attached and state_of(node.result.outcome, node) is not None)
    }
    claimed = [cell_of(node) for node in sweep.nodes if node.nonce in unfinished]
    release_claim(project, sweep.id, claimed, now, progress)
    promotions: list[PromotionResult] = []
    if options.promote:
        names = {node.target for node in nodes if node.attached}
        for node in {node.target: node for node in sweep.nodes if node.target in names}.values():
            try:
                target = _target_of(project, node)
                repo = place_of(project, attacher.where(node), target.family)
                request = PromotionRequest(target=target, place=repo, now=now)
                promotions.append(promote(project, request, progress))
            except ImagefactoryError as error:
                faults.append((node.target, error))
    return SweepResult(
        folder=directory,
        sweep=sweep,
        nodes=tuple(nodes),
        faults=tuple(faults),
        promotions=tuple(promotions),
        machines=read_failed_machines(directory, sweep),
    )


def _target_of(project: Project, node: SweepNode) -> Target:
    target = project.target(node.target)
    if target is None and (problems := project.problems_of((node.target,))):
        raise RecipeError(problems)
    if target is None:
        raise UsageError(
            "target-not-in-project",
            f"this project has no target '{node.target}'",
            hint="collect the sweep in the project that created it (-C DIR)",
        )
    return target


def _reference_of(node: SweepNode) -> str:
    """Return the registry reference of a node's image (HOST/NAME@sha256:...); empty for a file."""
    if node.image.kind in (ImageKind.DOCKER, ImageKind.ORAS):
        return node.image.address.partition("://")[2]
    return ""


# --- Why a machine could not pull an image: this machine queries the registry as a job would
# HTCondor keeps too little of the output of Apptainer (schedulers/htcondor/results.py). Mostly it is one of
# three: the image is gone, the registry rejects or is down, or only that machine has a problem.


def _explain_pulls(drafts: list[PendingNode], project: Project, progress: Progress) -> list[PendingNode]:
    count = sum(draft.one.result.outcome is Outcome.PULL_FAILED for draft in drafts)
    if not count:
        return drafts
    check = AnonymousPullCheck(project)
    with progress.stage(f"check the images of {count} nodes that could not be pulled"):
        return [
            replace(draft, one=replace(draft.one, why=check.explain(draft.node)))
            if draft.one.result.outcome is Outcome.PULL_FAILED
            else draft
            for draft in drafts
        ]


class AnonymousPullCheck:
    """Checks each image once without a password, as jobs pull it. Stops after MAX_REJECTED failures."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._answers: dict[str, str] = {}
        self._failures: list[str] = []

    def explain(self, node: SweepNode) -> str:
        """Return a line about the image of a node, empty for a file."""
        reference = _reference_of(node)
        if not reference:
            return ""
        if reference not in self._answers:
            if len(self._failures) >= MAX_REJECTED:
                return self._failures[-1]
            self._answers[reference] = self._request(parse_reference(reference), node.image.address)
        return self._answers[reference]

    def _request(self, reference: ImageReference, address: str) -> str:
        certificates = package_index(self.project).certificates
        options = RegistryOptions(
            certificates=Path(certificates) if certificates else None,
            plain_hosts=self.project.settings.plain_hosts,
            retry_policy=RetryPolicy(attempts=1, connect=SECONDS, read=SECONDS),
        )
        registry = RegistryClient(reference.registry, options)
        try:
            manifest = registry.manifest(reference.repository, reference.tag_or_digest)
        except ImagefactoryError as error:
            self._failures.append(f"not readable from this machine without a password: {error.message}")
            return self._failures[-1]
        finally:
            registry.close()
        self._failures.clear()
        if manifest is None:
            return f"{reference.registry} no longer has this image: a new sweep sends it again"
        return (
            f"{reference.registry} has the image; for the reason, run `apptainer pull {address}` on that "
            "machine (its network, the registry's CA)"
        )


# --- Signing


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSigner:
    """Signs the nodes of the sweep in `folder`. `key` is None if this machine has no key."""

    folder: Path
    pool: Pool
    pool_name: str
    nonces: NonceStore
    key: SigningKey | None
    days: int
    now: datetime
    suite: str

    def draft(self, node: SweepNode, sweep: SweepSpec) -> PendingNode:
        """Return the result of a node, verified and, if possible, signed; nothing is spent."""
        state = self.pool.read_node(self.folder, node, sweep.limits)
        row = CollectedNode(
            result=state.result, target=node.target, capability=node.capability, nonce=node.nonce
        )
        if state.run is None or not state.result.attempts:
            return PendingNode(node=node, one=row)

        def judged(outcome: Outcome, reason: str) -> CollectedNode:
            return replace(row, result=replace(state.result, outcome=outcome, reason=reason))

        try:
            known = self.nonces.look(node.nonce)
            report = self.pool.job_report(*self._requested(node, known), state)
        except StatementError as error:
            return PendingNode(node=node, one=judged(Outcome.INFRASTRUCTURE, error.message))
        except ImagefactoryError as error:
            fault = None if isinstance(error, NonceError) else error
            return PendingNode(node=node, one=judged(Outcome.NOT_TESTED, error.message), fault=fault)
        row = replace(
            judged(report.outcome, report.reason),
            gpu=report.device.name if report.device else "",
            driver=report.hardware.driver if report.device and report.hardware else "",
        )
        try:
            signed, spending, cause = self._sign(report, node, known)
        except ImagefactoryError as error:
            return PendingNode(node=node, one=replace(row, why=f"{UNSIGNED}{error.message}"), fault=error)
        lost = known.spent is not None and signed is None
        return PendingNode(
            node=node, one=replace(row, why=cause), signed=signed, spending=spending, lost=lost
        )

    def _requested(self, node: SweepNode, known: IssuedNonce) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return kit.json and expectations.json as they were written. `known` is the entry of the nonce.

        Raises NonceError if the files were changed, or belong to another suite or pool.
        """
        directory = node_directory(self.folder, node.name)
        try:
            texts = {name: read_file(directory, name, LARGEST_REPORT) for name in (KIT, EXPECTATIONS)}
        except OSError as error:
            raise StatementError(
                *os_problem("read", error.filename, error), hint="create a new sweep"
            ) from error
        run = replace(known.run, suite=self.suite, kit=digest_of(texts), pool=self.pool_name)
        check_run(known, run)
        return json.loads(texts[KIT]), json.loads(texts[EXPECTATIONS])

    def _sign(
        self, report: GpuReport, node: SweepNode, known: IssuedNonce
    ) -> tuple[SignedNode | None, NonceUse | None, str]:
        """Return the verdict (None if the report is not signed), the nonce to spend, and a line.

        A verdict that was signed before but not attached spends no nonce. Raises NonceError, StoreError.
        """
        if known.spent is not None:
            data = self.nonces.unsettled(node.nonce)
            waiting = _signed_node(parse_signed(data)[0]) if data else None
            return waiting, None, f"signed on {known.spent:%Y-%m-%d %H:%M} UTC"
        if not signable(report):
            return None, None, f"{UNSIGNED}'{report.outcome}' says nothing of the image"
        if self.key is None:
            return None, None, NO_KEY
        check_open(known, self.now)
        try:
            signed = sign(report, self.key, now=self.now, days=jittered_expiry(report, self.days))
        except StatementError as error:
            return None, None, f"{UNSIGNED}{error.message}"
        data = format_signed(signed, _reference_of(node))
        result = f"sha256:{hashlib.sha256(data).hexdigest()}"
        spending = NonceUse(nonce=node.nonce, run=known.run, result=result, signed=data)
        return _signed_node(signed), spending, f"signed by '{self.key.name}'"


def _signed_node(signed: SignedVerdict) -> SignedNode:
    verdict = signed.verdict
    return SignedNode(
        keyid=verdict.keyid, expires=verdict.expires, envelopes=(signed.envelope, signed.test_result)
    )


# --- Attaching: each image is looked up once, and all verdicts of a place are attached at once


class VerdictAttacher:
    """Writes verdicts to the store and to `registry` (host[/path]), by default the registry of the image."""

    def __init__(self, project: Project, registry: str, progress: Progress) -> None:
        self.project, self.registry, self.progress = project, registry, progress
        self._places: dict[str, Places | ImagefactoryError] = {}
        self._down: list[RegistryError] = []
        self._signed: dict[tuple[str, str], Mapping[str, Verdict]] = {}

    def attach_all(self, drafts: Sequence[PendingNode]) -> list[PendingNode]:
        """Return each draft with the places that have its verdict now, or with its error."""
        drafts = list(drafts)
        waiting: dict[str, list[tuple[int, StatementRequest]]] = {}
        repositories: dict[str, StoreRepository] = {}
        for number, draft in enumerate(drafts):
            if draft.signed is None:
                continue
            try:
                places = self.places(draft)
            except ImagefactoryError as error:
                drafts[number] = replace(draft, fault=error)
                continue
            names = tuple(subject_name(repo) for repo, _ in places)
            drafts[number] = replace(draft, one=replace(draft.one, keyid=draft.signed.keyid, attached=names))
            for name, (repo, subject) in zip(names, places, strict=True):
                repositories[name] = repo
                statements = verdict_statements(
                    self.project, draft.signed.envelopes, draft.signed.expires, subject
                )
                waiting.setdefault(name, []).extend((number, statement) for statement in statements)
        for name, rows in waiting.items():
            batch = [statement for _, statement in rows]
            faults = attach_all(self.project, repositories[name], batch, self.progress)
            for (number, _), fault in zip(rows, faults, strict=True):
                if fault:
                    row = replace(drafts[number].one, keyid="", attached=())
                    drafts[number] = replace(drafts[number], one=row, fault=fault)
        return drafts

    def find_again(self, draft: PendingNode, keys: Mapping[str, bytes]) -> PendingNode:
        """Return a lost draft with the places that have its verdict, signed by one of `keys` (by their ids).

        A verdict in no place is a fault. Its nonce is spent, so no new verdict is signed.
        """
        keyids = {}
        try:
            for repo, subject in self.places(draft):
                key = (str(repo), subject.manifest)
                if key not in self._signed:
                    self._signed[key] = read_signed(repo, subject.manifest, keys)
                if verdict := self._signed[key].get(draft.node.nonce):
                    keyids[subject_name(repo)] = verdict.keyid
        except ImagefactoryError as error:
            return replace(draft, fault=error)
        if not keyids:
            reason = f"{draft.one.why}, {VERDICT_MISSING}"
            hint = f"verify it again: imagefactory sweep start {draft.node.target}"
            fault = CheckFailedError("verdict-lost", f"{draft.node.name}: {reason}", hint=hint)
            return replace(draft, one=replace(draft.one, why=reason), fault=fault)
        keyid = next(iter(keyids.values()))
        return replace(draft, one=replace(draft.one, keyid=keyid, attached=tuple(keyids)))

    def places(self, draft: PendingNode) -> Places:
        """Return the places of a verdict. Raises UsageError and RegistryError.

        After MAX_REJECTED images in a row that a registry does not show, no more are requested.
        """
        subject = draft.node.image.subject
        if subject.manifest not in self._places:
            if len(self._down) >= MAX_REJECTED:
                raise self._down[-1]
            try:
                self._places[subject.manifest] = places_of(self.project, subject, self.where(draft.node))
                self._down.clear()
            except ImagefactoryError as error:
                self._places[subject.manifest] = error
                self._down += [error] if isinstance(error, RegistryError) else []
        places = self._places[subject.manifest]
        if isinstance(places, ImagefactoryError):
            raise places
        return places

    def where(self, node: SweepNode) -> ImageReference | None:
        if not self.registry:
            reference = _reference_of(node)
            return parse_reference(reference) if reference else None
        host, path = registry_place(self.project, self.registry)
        repository = repository_of(path, _target_of(self.project, node).family)
        return ImageReference(registry=host, repository=repository, digest=node.image.subject.index)
