"""What other sweeps have in hand: cells whose job is queued already, or has ended and nobody collected it.

    the store's sweeps, one look at the queue -> RunningSweep -> leave_out_underway -> SweepPlan

A cell is the very image on a capability: the same target made of another lock is another one. Only what is
certain holds a cell back. Of a sweep that cannot be read, that is another user's or that nobody can ask the
queue about nothing is guessed: the cell is queued, and a note says so. A sweep that nothing drives any more
(cancelled, never submitted, its DAGMan gone) gives its cells back, but for results that came; the note says
how it would be gone on with instead. Sweeps outside of the store (`--dir`) are not known, nor such as are
older than their nonces: what they bring back can be signed no more.
"""

from __future__ import annotations

import pwd
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from imagefactory.errors import ImagefactoryError, ToolError, UsageError
from imagefactory.model import Outcome
from imagefactory.schedulers.cells import QUEUED, UNCOLLECTED, VERIFIED, QueuedCell, SweepPlan
from imagefactory.schedulers.faults import node_directory
from imagefactory.schedulers.pool import RETRIED_OUTCOMES, Pool, Pools, SkippedCell, SweepNode, SweepSpec
from imagefactory.schedulers.sweep_file import (
    ID,
    NO_KEY,
    SWEEP,
    UNSIGNED,
    VERDICT_MISSING,
    CollectedNode,
    NodeFilter,
    read_collected,
    read_sweep,
)
from imagefactory.serialize import parse_json
from imagefactory.settings.choices import HTCONDOR
from imagefactory.trees import read_file
from imagefactory.trust.verdict import SIGNABLE
from imagefactory.verify.kit.program import KIT, LARGEST_REPORT
from imagefactory.verify.nonces import LIFETIME

Images = Mapping[tuple[str, str], str]
"""By target and row (a capability, or a slice's), the image that a job would run: as `image_of` names it."""
QUEUE_NOT_READ = "the queue was not asked"


class NodeProgress(StrEnum):
    """How far a node is that may still bring a verdict: open, or what was not done yet about its result.

    UNMATCHED brings none: its machines alone have the oldest driver, and none took it. It is not asked again
    while its sweep is remembered, since a verdict of a newer driver is there.
    """

    OPEN = "open"
    ENDED = "not collected"
    NOT_SIGNED = "not signed"
    NOT_ATTACHED = "signed, and not attached yet"
    UNMATCHED = "no machine took it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSweep:
    """A sweep of the store as far as it has cells of a plan in hand, by target and row.

    `name` is what commands take for it. `driven`: something on the pool works on it; None where that is not
    known, and `why` says why not.
    """

    name: str
    folder: Path
    made: datetime
    driven: bool | None
    cells: Mapping[tuple[str, str], NodeProgress]
    why: str = ""
    pool: str = HTCONDOR


# --- deciding --------------------------------------------------------------------------------------


def leave_out_underway(plan: SweepPlan, seen: Sequence[RunningSweep], allow: frozenset[str]) -> SweepPlan:
    """A plan without the cells that a sweep has in hand; the newest sweep that has one tells of it. Pure."""
    newest = sorted(seen, key=lambda sweep: sweep.made, reverse=True)
    kept, left_out = [], list(plan.left_out)
    given: Counter[int] = Counter()
    for cell in plan.cells:
        key = _key(cell)
        having = [
            (number, sweep)
            for number, sweep in enumerate(newest)
            if key in sweep.cells and (cell.only or sweep.cells[key] is not NodeProgress.UNMATCHED)
        ]
        held = (_blocking_rule(sweep, sweep.cells[key]) for _, sweep in having)
        rule, reason = next((found for found in held if found and found[0] not in allow), ("", ""))
        if rule:
            capability = str(cell.capability)
            left_out.append(
                SkippedCell(target=key[0], capability=capability, rule=rule, reason=reason, part=cell.part)
            )
            continue
        kept.append(cell)
        doubtful = [number for number, sweep in having if not _blocking_rule(sweep, sweep.cells[key])]
        if doubtful and QUEUED not in allow:
            given[doubtful[0]] += 1
    notes = tuple(_queue_note(newest[number], count) for number, count in sorted(given.items()))
    return SweepPlan(cells=tuple(kept), left_out=tuple(left_out), notes=plan.notes + notes)


def _key(cell: QueuedCell) -> tuple[str, str]:
    return cell.stage.target.name, cell.row


def _blocking_rule(seen: RunningSweep, state: NodeProgress) -> tuple[str, str] | None:
    """The rule and reason by which it holds a cell back; None where it does not for certain."""
    if state is NodeProgress.UNMATCHED:
        return VERIFIED, f"on a newer driver; no machine with an older one took its job in sweep {seen.name}"
    if state is not NodeProgress.OPEN:
        return UNCOLLECTED, f"ended in sweep {seen.name}, {state}: imagefactory sweep collect {seen.name}"
    if seen.driven:
        since = f"since {seen.made.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        return QUEUED, f"queued in sweep {seen.name}, {since}: imagefactory sweep status {seen.name}"
    return None


def _queue_note(seen: RunningSweep, count: int) -> str:
    cells = f"{count} of these cells {'is' if count == 1 else 'are'}"
    if seen.driven is None:
        return f"{cells} queued, though sweep {seen.name} may have the same in hand: {seen.why}"
    again = f"imagefactory sweep start --scheduler {seen.pool} --dir {seen.folder}"
    return (
        f"{cells} queued anew: sweep {seen.name} stopped without an answer; to go on with it instead: {again}"
    )


# --- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLookup:
    """Who looks, and when: `pools` opens them, and `queue` says whether they may be asked what is at work.

    `user` is None for whoever it is.

    `suite` is the digest of this program's suite: what another one's brings back is none of ours to collect.
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
    """A .sif by its file; an image by where jobs pull it, since its verdict is looked for there."""
    return node.image.sha256 or node.image.address


def _recent(place: Path, now: datetime) -> list[Path]:
    """The folders there whose nonces may still be good, the newest first: a sweep's name is its time."""
    try:
        return sorted((path for path in place.iterdir() if not _is_over(path.name, now)), reverse=True)
    except FileNotFoundError:
        return []


def _is_over(name: str, now: datetime) -> bool:
    if not (found := ID.fullmatch(name)):
        return False
    try:
        return datetime.strptime(f"{found[1]}Z", "%Y%m%d-%H%M%S%z") + LIFETIME <= now
    except ValueError:
        return False


def read_underway(
    place: Path, images: Images, looking: SweepLookup
) -> tuple[tuple[RunningSweep, ...], tuple[str, ...]]:
    """What the sweeps in `place` have in hand of those cells, and a note for each that cannot be read.

    A pool's queue is asked once, and only where a sweep may have something: before the logs, so that what
    ends meanwhile is seen in them.
    """
    notes: list[str] = []
    try:
        folders = _recent(place, looking.now) if images else []
    except OSError as error:
        return (), (f"the sweeps in {place} are passed over: {error.strerror}",)
    candidates = [
        candidate for folder in folders if (candidate := _candidate(folder, images, looking, notes))
    ]
    queues = {}
    if looking.queue:
        queues = {
            name: _queue(looking.pools, name)
            for name in {candidate.sweep.pool for candidate in candidates if not candidate.owner}
        }
    seen = []
    for candidate in candidates:
        try:
            seen.append(_read_running(candidate, queues.get(candidate.sweep.pool, QUEUE_NOT_READ), looking))
        except (ImagefactoryError, OSError) as error:
            notes.append(_passed_over(candidate.folder, error))
    return tuple(seen), tuple(notes)


def _candidate(
    folder: Path, images: Images, looking: SweepLookup, notes: list[str]
) -> _SweepCandidate | None:
    """A sweep that has nodes of these cells whose verdict has not arrived; most have none."""

    asked = {(target, row.partition(" ")[0]) for target, row in images}

    def wanted(target: str, capability: str) -> bool:
        return (target, capability) in asked

    try:
        owner = (folder / SWEEP).stat().st_uid
        sweep = read_sweep(folder, wanted)
        collected = _collected(folder, wanted)
    except (FileNotFoundError, NotADirectoryError):
        return None  # it is being made, or deleted
    except (ImagefactoryError, OSError) as error:
        notes.append(_passed_over(folder, error))
        return None
    nodes = tuple(
        node
        for node in sweep.nodes
        if images.get((node.target, node.row)) == image_of(node)
        and not (node.nonce in collected and collected[node.nonce].attached)
    )
    if not nodes or sweep.made + LIFETIME <= looking.now:
        return None
    foreign = looking.user is not None and owner != looking.user
    return _SweepCandidate(
        folder=folder,
        sweep=sweep,
        nodes=nodes,
        collected=collected,
        owner=_user(owner) if foreign else "",
    )


def _collected(folder: Path, wanted: NodeFilter) -> Mapping[str, CollectedNode]:
    try:
        return {one.nonce: one for one in read_collected(folder, wanted)}
    except UsageError:  # it can be lost: `sweep collect` writes it anew
        return {}


def _queue(pools: Pools, name: str) -> frozenset[Path] | str:
    """The folders of the sweeps that are driven on a pool, or why that is not known."""
    try:
        return pools(name).driven()
    except (ToolError, UsageError) as error:
        return error.message


def _read_running(
    candidate: _SweepCandidate, queue: frozenset[Path] | str, looking: SweepLookup
) -> RunningSweep:
    seen = RunningSweep(
        name=candidate.folder.name if ID.fullmatch(candidate.folder.name) else str(candidate.folder),
        folder=candidate.folder,
        made=candidate.sweep.made,
        driven=None if isinstance(queue, str) else candidate.folder.resolve() in queue,
        cells={},
        why=queue if isinstance(queue, str) else "",
        pool=candidate.sweep.pool,
    )
    if candidate.owner:
        cells = {(node.target, node.row): NodeProgress.OPEN for node in candidate.nodes}
        return replace(seen, driven=None, why=f"it is a sweep of user {candidate.owner}", cells=cells)
    if _suite(candidate) != looking.suite:
        return seen
    return replace(seen, cells=_states(candidate, looking.pools(candidate.sweep.pool)))


def _suite(candidate: _SweepCandidate) -> str:
    """The suite that a sweep's jobs run, by its digest; empty where its files do not tell."""
    try:
        place = node_directory(candidate.folder, candidate.nodes[0].name)
        kit: Any = parse_json(read_file(place, KIT, LARGEST_REPORT))
        return str(kit["suite"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


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
    """Whether a DAG that is at work, or is gone on with, still runs a node that has brought back no run.

    What never ended, what was removed with what drove it, and what the pool broke.
    """
    return outcome in (None, *RETRIED_OUTCOMES) or not settled


def state_of(outcome: Outcome | None, known: CollectedNode | None) -> NodeProgress | None:
    """What is left to do about a run that came back; None where no verdict can come of it. Pure."""
    if known is None or known.result.outcome is None:
        return NodeProgress.ENDED if outcome in SIGNABLE else None
    if known.result.outcome not in SIGNABLE:
        return None
    if known.why == NO_KEY:
        return NodeProgress.NOT_SIGNED
    final = known.why.startswith(UNSIGNED) or known.why.endswith(VERDICT_MISSING)
    return None if final else NodeProgress.NOT_ATTACHED


def _passed_over(folder: Path, error: ImagefactoryError | OSError) -> str:
    said = error.message if isinstance(error, ImagefactoryError) else f"{error.filename}: {error.strerror}"
    return f"sweep {folder.name} is passed over, and what it has in hand is not known: {said}"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
