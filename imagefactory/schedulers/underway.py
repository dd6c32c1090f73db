"""Find cells that another sweep already has, in this store or in another store of the registry.

    the store's sweeps, one query of the queue -> RunningSweep -> leave_out_underway -> SweepPlan
    <registry>/catalog:claims-<store> -> OtherClaim -> leave_out_claimed -> SweepPlan

A cell is one image on a capability; the same target built from another lock is another cell. A cell is
excluded only if its state is certain. If a sweep cannot be read, belongs to another user, or its queue cannot
be queried, the cell is queued with a note. A sweep without a running job (canceled, never submitted, DAGMan
gone) keeps only cells with finished results; a note explains how to continue it instead. Unknown are sweeps
outside the store (`--dir`) and sweeps older than their nonces, whose results can no longer be signed.

A store signs the list of its claims again after each change, and stores a copy in journal/claims.json. Claims
expire. Only a list signed by a trusted key counts, since otherwise anyone who can push could prevent the
verification of images. If two stores claim a cell, the first claim counts. A store that cannot write or read
claims queues its cells, with a note.
"""

from __future__ import annotations

import pwd
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from imagefactory.errors import ImagefactoryError, StatementError, ToolError, UsageError, os_reason
from imagefactory.model import Outcome
from imagefactory.schedulers.cells import CLAIMED, QUEUED, UNCOLLECTED, VERIFIED, QueuedCell, SweepPlan
from imagefactory.schedulers.faults import node_directory
from imagefactory.schedulers.pool import (
    MOST_NODES,
    RETRIED_OUTCOMES,
    Pool,
    Pools,
    SkippedCell,
    SweepNode,
    SweepSpec,
)
from imagefactory.schedulers.sweep_file import (
    ID,
    NO_KEY,
    SWEEP,
    UNSIGNED,
    VERDICT_MISSING,
    CollectedNode,
    read_collected,
    read_sweep,
)
from imagefactory.serialize import (
    CAPABILITY,
    Digest,
    MaxRows,
    Pattern,
    format_document,
    invalid_value_error,
    parse_document,
)
from imagefactory.serialize import parse_json as parse_plain_json
from imagefactory.settings.choices import HTCONDOR
from imagefactory.trees import read_file
from imagefactory.trust.catalog_package import ArtifactFormat
from imagefactory.trust.envelope import EnvelopeForm, format_json, parse_json, sign_envelope
from imagefactory.trust.judgement import period_problem, verify_envelope
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import SIGNABLE, SKEW, VerdictStatus
from imagefactory.verify.kit.program import KIT, LARGEST_REPORT
from imagefactory.verify.nonces import LIFETIME

Images = Mapping[tuple[str, str], str]
"""The image of a job, as `image_of` returns it, by target and row (a capability or a MIG slice)."""
QUEUE_NOT_READ = "the queue was not queried"


class NodeProgress(StrEnum):
    """The progress of a node that may still produce a verdict.

    UNMATCHED cannot: only its machines have the oldest driver, and none accepted it. While this sweep is
    remembered, no other sweep requests the cell, since a verdict for a newer driver exists.
    """

    OPEN = "open"
    ENDED = "not collected"
    NOT_SIGNED = "not signed"
    NOT_ATTACHED = "signed, and not attached yet"
    UNMATCHED = "no machine took it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSweep:
    """A sweep of the store with its cells that are in a plan, by target and row.

    Commands accept `name`. `driven` means that a job on the pool runs it; None means unknown, for the reason
    `why`.
    """

    name: str
    folder: Path
    made: datetime
    driven: bool | None
    cells: Mapping[tuple[str, str], NodeProgress]
    why: str = ""
    pool: str = HTCONDOR


def skip_underway(plan: SweepPlan, sweeps: Sequence[RunningSweep], allow: frozenset[str]) -> SweepPlan:
    """Return a plan without the cells that a sweep has. The newest of these sweeps is the reason. Pure."""
    newest = sorted(sweeps, key=lambda sweep: sweep.made, reverse=True)
    cells, skipped = [], list(plan.skipped)
    doubtful: Counter[int] = Counter()
    for cell in plan.cells:
        key = cell.stage.target.name, cell.row
        rules = {
            number: _blocking_rule(sweep, sweep.cells[key])
            for number, sweep in enumerate(newest)
            if key in sweep.cells and (cell.only or sweep.cells[key] is not NodeProgress.UNMATCHED)
        }
        rule, reason = next((row for row in rules.values() if row and row[0] not in allow), ("", ""))
        if rule:
            skipped.append(_skip(cell, rule, reason))
            continue
        cells.append(cell)
        first = next((number for number, row in rules.items() if not row), None)
        if first is not None and QUEUED not in allow:
            doubtful[first] += 1
    notes = tuple(_queue_note(newest[number], count) for number, count in sorted(doubtful.items()))
    return SweepPlan(cells=tuple(cells), skipped=tuple(skipped), notes=plan.notes + notes)


def _skip(cell: QueuedCell | SweepNode, rule: str, reason: str) -> SkippedCell:
    target = cell.target if isinstance(cell, SweepNode) else cell.stage.target.name
    return SkippedCell(
        target=target, capability=str(cell.capability), rule=rule, reason=reason, part=cell.part
    )


def _blocking_rule(sweep: RunningSweep, state: NodeProgress) -> tuple[str, str] | None:
    """Return the rule and the reason by which a sweep excludes a cell, None if the state is not certain."""
    if state is NodeProgress.UNMATCHED:
        return VERIFIED, f"on a newer driver; no machine with an older one took its job in sweep {sweep.name}"
    if state is not NodeProgress.OPEN:
        return UNCOLLECTED, f"ended in sweep {sweep.name}, {state}: imagefactory sweep collect {sweep.name}"
    if sweep.driven:
        since = f"since {sweep.made.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        return QUEUED, f"queued in sweep {sweep.name}, {since}: imagefactory sweep status {sweep.name}"
    return None


def _queue_note(sweep: RunningSweep, count: int) -> str:
    cells = f"{count} of these cells {'is' if count == 1 else 'are'}"
    if sweep.driven is None:
        return f"{cells} queued, although sweep {sweep.name} may have the same: {sweep.why}"
    again = f"continue it instead: imagefactory sweep start --scheduler {sweep.pool} --dir {sweep.folder}"
    return f"{cells} queued again: sweep {sweep.name} stopped without an answer; {again}"


# --- reading the sweeps of a store


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLookup:
    """The context of a lookup. `pools` opens pools. Without `queue`, no queue is queried.

    `user` is None for any user. `suite` is the digest of the suite in this program: results of another suite
    cannot be collected here.
    """

    now: datetime
    suite: str
    pools: Pools
    queue: bool = True
    user: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SweepCandidate:
    folder: Path
    sweep: SweepSpec
    nodes: tuple[SweepNode, ...]
    collected: Mapping[str, CollectedNode]
    owner: str


def image_of(node: SweepNode) -> str:
    """Return the digest of a .sif, or the address of another image: the place of its verdicts."""
    return node.image.sha256 or node.image.address


def read_underway(
    sweeps_directory: Path, images: Images, lookup: SweepLookup
) -> tuple[tuple[RunningSweep, ...], tuple[str, ...]]:
    """Return the sweeps in a directory that have some of these cells, and a note for each unreadable one.

    The queue of a pool is queried once, and only if a sweep may have a cell. This happens before the logs are
    read, so that they show jobs that end in between.
    """
    notes: list[str] = []
    try:
        paths = (
            [path for path in sweeps_directory.iterdir() if not _is_expired(path.name, lookup.now)]
            if images
            else []
        )
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        return (), (f"the sweeps in {sweeps_directory} are skipped: {os_reason(error)}",)
    rows = (_candidate(directory, images, lookup, notes) for directory in sorted(paths, reverse=True))
    candidates = [candidate for candidate in rows if candidate]
    queues: dict[str, frozenset[Path] | str] = {}
    if lookup.queue:
        for name in {candidate.sweep.scheduler for candidate in candidates if not candidate.owner}:
            try:
                queues[name] = lookup.pools(name).driven()
            except (ToolError, UsageError) as error:
                queues[name] = error.message
    sweeps = []
    for candidate in candidates:
        try:
            queue = queues.get(candidate.sweep.scheduler, QUEUE_NOT_READ)
            sweeps.append(_read_running(candidate, queue, lookup))
        except (ImagefactoryError, OSError) as error:
            notes.append(_unread_note(candidate.folder, error))
    return tuple(sweeps), tuple(notes)


def _is_expired(name: str, now: datetime) -> bool:
    """Return whether the nonces of a sweep have expired, by the time in its name."""
    if not (match := ID.fullmatch(name)):
        return False
    try:
        return datetime.strptime(f"{match[1]}Z", "%Y%m%d-%H%M%S%z") + LIFETIME <= now
    except ValueError:
        return False


def _candidate(
    directory: Path, images: Images, lookup: SweepLookup, notes: list[str]
) -> _SweepCandidate | None:
    """Return a sweep with nodes of these cells whose verdict is still missing. Most sweeps have none."""
    cells = {(target, row.partition(" ")[0]) for target, row in images}

    def is_cell(target: str, capability: str) -> bool:
        return (target, capability) in cells

    try:
        owner = (directory / SWEEP).stat().st_uid
        sweep = read_sweep(directory, is_cell)
        try:
            collected = {node.nonce: node for node in read_collected(directory, is_cell)}
        except UsageError:  # it can be lost: `sweep collect` writes it again
            collected = {}
    except (FileNotFoundError, NotADirectoryError):
        return None  # it is being created, or deleted
    except (ImagefactoryError, OSError) as error:
        notes.append(_unread_note(directory, error))
        return None
    nodes = tuple(
        node
        for node in sweep.nodes
        if images.get((node.target, node.row)) == image_of(node)
        and not (node.nonce in collected and collected[node.nonce].attached)
    )
    if not nodes or sweep.nodes_each > 1 or sweep.created + LIFETIME <= lookup.now:
        return None
    foreign = lookup.user is not None and owner != lookup.user
    return _SweepCandidate(
        folder=directory, sweep=sweep, nodes=nodes, collected=collected, owner=_user(owner) if foreign else ""
    )


def _read_running(
    candidate: _SweepCandidate, queue: frozenset[Path] | str, lookup: SweepLookup
) -> RunningSweep:
    directory = candidate.folder
    sweep = RunningSweep(
        name=directory.name if ID.fullmatch(directory.name) else str(directory),
        folder=directory,
        made=candidate.sweep.created,
        driven=None if isinstance(queue, str) else directory.resolve() in queue,
        cells={},
        why=queue if isinstance(queue, str) else "",
        pool=candidate.sweep.scheduler,
    )
    if candidate.owner:
        cells = {(node.target, node.row): NodeProgress.OPEN for node in candidate.nodes}
        return replace(sweep, driven=None, why=f"it is a sweep of user {candidate.owner}", cells=cells)
    try:
        kit: Any = parse_plain_json(
            read_file(node_directory(directory, candidate.nodes[0].name), KIT, LARGEST_REPORT)
        )
        suite = str(kit["suite"])
    except (OSError, ValueError, KeyError, TypeError):
        suite = ""
    if suite != lookup.suite:
        return sweep
    return replace(sweep, cells=_states(candidate, lookup.pools(candidate.sweep.scheduler)))


def _states(candidate: _SweepCandidate, pool: Pool) -> Mapping[tuple[str, str], NodeProgress]:
    cells: dict[tuple[str, str], NodeProgress] = {}
    for node in candidate.nodes:
        key = (node.target, node.row)
        if key in cells:
            continue
        node_state = pool.read_node(candidate.folder, node, candidate.sweep.limits)
        if node_state.run is None:
            if will_still_run(node_state.result.outcome, settled=node_state.settled):
                cells[key] = NodeProgress.OPEN
            elif node.only and node_state.result.outcome is Outcome.NO_MATCH:
                cells[key] = NodeProgress.UNMATCHED
            continue
        result = pool.read_result(candidate.folder, node, candidate.sweep.limits)
        state = state_of(result.outcome, candidate.collected.get(node.nonce))
        if state:
            cells[key] = state
    return cells


def will_still_run(outcome: Outcome | None, *, settled: bool) -> bool:
    """Return whether a running or continued DAG will run a node that has no run yet.

    Such a node has not ended, was removed with its DAG, or failed because of the pool.
    """
    return outcome in (None, *RETRIED_OUTCOMES) or not settled


def state_of(outcome: Outcome | None, known: CollectedNode | None) -> NodeProgress | None:
    """Return the remaining step for a returned run, None if it cannot produce a verdict. Pure."""
    if known is None or known.result.outcome is None:
        return NodeProgress.ENDED if outcome in SIGNABLE else None
    if known.result.outcome not in SIGNABLE:
        return None
    if known.why == NO_KEY:
        return NodeProgress.NOT_SIGNED
    final = known.why.startswith(UNSIGNED) or known.why.endswith(VERDICT_MISSING)
    return None if final else NodeProgress.NOT_ATTACHED


def _unread_note(directory: Path, error: ImagefactoryError | OSError) -> str:
    text = error.message if isinstance(error, ImagefactoryError) else f"{error.filename}: {os_reason(error)}"
    return f"sweep {directory.name} is skipped, and its cells are not known: {text}"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


# --- claims of other stores


FORMAT = 1
LARGEST = 4 << 20
FORM = EnvelopeForm(payload_type="application/vnd.imagefactory.claims+json", largest=LARGEST)
CLAIMS = ArtifactFormat(
    name="list of claims",
    artifact_type="application/vnd.imagefactory.claims.v1+json",
    layer_type="application/vnd.imagefactory.claims.v1+json+gzip",
)
STORE = re.compile(r"[0-9a-f]{16}")
TAG = re.compile(r"claims-([0-9a-f]{16})")
ROW = re.compile(rf"(?:{CAPABILITY.pattern})(?: [0-9a-z][0-9a-z.,+-]{{0,39}})?")
MOST_SWEEPS = 256

ClaimedCell = tuple[str, str]
"""An image, by its digest or that of its .sif file, and a row: a capability or a MIG slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClaim:
    """The rows on which an image is claimed. `image` is a digest, as `image_of` returns it."""

    image: Digest
    rows: Annotated[tuple[Annotated[str, Pattern(ROW)], ...], MaxRows(MOST_NODES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepClaim:
    """The queued cells of a sweep, claimed from `made` until `until`."""

    sweep: Annotated[str, Pattern(ID)]
    made: datetime
    until: datetime
    images: Annotated[tuple[ImageClaim, ...], MaxRows(MOST_NODES)]

    @property
    def cells(self) -> frozenset[ClaimedCell]:
        return frozenset((image.image, row) for image in self.images for row in image.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreClaims:
    """All current claims of a store. `store` is its ID, `issued` the time of the signature."""

    store: Annotated[str, Pattern(STORE)]
    issued: datetime
    sweeps: Annotated[tuple[SweepClaim, ...], MaxRows(MOST_SWEEPS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryClaims:
    """The claims of this store in one repository of a registry."""

    place: str
    sweeps: Annotated[tuple[SweepClaim, ...], MaxRows(MOST_SWEEPS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnClaims:
    """The ID of this store and its claims by repository."""

    store: Annotated[str, Pattern(STORE)]
    places: tuple[RepositoryClaims, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherClaim:
    """A valid claim of another store. `by` is the local name of the key that signed it."""

    by: str
    store: str
    claim: SweepClaim

    @property
    def order(self) -> tuple[datetime, str, str]:
        """Return the sort key by which all stores find the same first claim."""
        return self.claim.made, self.store, self.claim.sweep

    @property
    def reason(self) -> str:
        until = f"{self.claim.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        return f"claimed by '{self.by}' until {until}, for sweep {self.claim.sweep} of another store"


def cell_of(node: SweepNode) -> ClaimedCell:
    return _digest_in(image_of(node)), node.row


def _digest_in(image: str) -> str:
    return image.rpartition("@")[2]


def claim_of(sweep: str, cells: Iterable[ClaimedCell], created: datetime, until: datetime) -> SweepClaim:
    """Return the claim of these cells, without duplicate images."""
    images: dict[str, set[str]] = {}
    for image, row in cells:
        images.setdefault(image, set()).add(row)
    claims = (ImageClaim(image=image, rows=tuple(sorted(rows))) for image, rows in sorted(images.items()))
    return SweepClaim(sweep=sweep, made=created, until=until, images=tuple(claims))


def sign_claims(claims: StoreClaims, key: SigningKey) -> bytes:
    """Return the envelope of a store's claims.

    Raises StatementError for claims that other stores would reject.
    """
    payload = format_json(format_document(claims, FORMAT))
    parse_document(parse_json(payload, "the claims to sign", LARGEST), StoreClaims, FORMAT, "the claims")
    return sign_envelope(payload, key, FORM)


def open_claims(data: bytes, store: str, trust: TrustRules, now: datetime) -> tuple[OtherClaim, ...]:
    """Return the claims of the store with the ID `store` that are valid now.

    Raises StatementError with the reason if the list is not valid.
    """
    location = f"the claims of store {store}"
    verified = verify_envelope(data, trust, FORM)
    if verified.envelope is None or verified.key is None or verified.standing is not VerdictStatus.GOOD:
        raise invalid_value_error(location, f"{verified.standing}, {verified.why}")
    claims = parse_document(
        parse_json(verified.envelope.payload, location, LARGEST), StoreClaims, FORMAT, location
    )
    assert isinstance(claims, StoreClaims)
    late = period_problem(verified.key, claims.issued) or period_problem(
        verified.key, max(now, claims.issued)
    )
    if late:
        raise invalid_value_error(location, f"{late[0]}, {late[1]}")
    if claims.store != store:
        raise invalid_value_error(location, f"it has the claims of store {claims.store}")
    if claims.issued - now > SKEW or any(claim.made - now > SKEW for claim in claims.sweeps):
        raise invalid_value_error(location, "its claims are dated in the future")
    if any(claim.until - claim.made > LIFETIME for claim in claims.sweeps):
        raise invalid_value_error(location, f"a claim is valid for longer than {LIFETIME.days} days")
    return tuple(
        OtherClaim(by=verified.key.name, store=store, claim=claim)
        for claim in claims.sweeps
        if claim.made < claim.until > now
    )


def first_claims(claims: Iterable[OtherClaim]) -> Mapping[ClaimedCell, OtherClaim]:
    """Return the earliest claim of each cell."""
    first: dict[ClaimedCell, OtherClaim] = {}
    for other in sorted(claims, key=lambda other: other.order):
        for cell in other.claim.cells:
            first.setdefault(cell, other)
    return first


def skip_claimed(plan: SweepPlan, images: Images, claims: Iterable[OtherClaim]) -> SweepPlan:
    """Return a plan without the cells that another store claims. Pure."""
    first = first_claims(claims)
    cells, skipped = [], list(plan.skipped)
    for cell in plan.cells:
        image = images.get((cell.stage.target.name, cell.row), "")
        if other := first.get((_digest_in(image), cell.row)):
            skipped.append(skipped_by_claim(other, cell))
        else:
            cells.append(cell)
    return SweepPlan(cells=tuple(cells), skipped=tuple(skipped), notes=plan.notes)


def skipped_by_claim(other: OtherClaim, cell: QueuedCell | SweepNode) -> SkippedCell:
    return _skip(cell, CLAIMED, other.reason)


def parse_own(data: bytes, location: str) -> OwnClaims:
    """Parse the output of `format_own`. Raises StatementError."""
    claims = parse_document(parse_json(data, location, LARGEST), OwnClaims, FORMAT, location)
    if not isinstance(claims, OwnClaims):
        raise StatementError("claims-invalid", f"{location} has no claims", hint="delete the file")
    return claims


def format_own(claims: OwnClaims) -> bytes:
    return format_json(format_document(claims, FORMAT))
