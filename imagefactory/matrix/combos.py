"""Which combinations are proven: framework x version x CUDA x capability. Pure.

    entries (targets with their verdicts, what is known of them) + what sweeps told -> combos

    valid       a verdict that can be relied on says `verified` for an image of it, on that capability
    failed      the suite ran there and said no (claims.REFUSALS), or its verdicts were taken back (REVOKED)
    ruled-out   nobody ran it: a rule of the plan speaks against it (plan.PRUNING)
    undecided   it was tried, and what came of it says nothing of the image (`held`, `timeout`, `no-match`)
    not-tested  all else; it is never shown as one of the others

What a word stands on is its basis, and nothing is mixed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import chain, groupby

from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.frameworks import frameworks
from imagefactory.gpu.values import Compatibility
from imagefactory.matrix.plan import NOTHING_KNOWN_REASON, CellRuling
from imagefactory.model import Outcome
from imagefactory.trust.claims import REFUSALS, verified_claims
from imagefactory.trust.verdict import RevokedCell, Verdict, VerdictStatus, VerificationResult
from imagefactory.versions import natural


class ComboState(StrEnum):
    """What a table says of a combination."""

    VALID = "valid"
    FAILED = "failed"
    RULED_OUT = "ruled-out"
    UNDECIDED = "undecided"
    NOT_TESTED = "not-tested"


INVALID = (ComboState.FAILED, ComboState.RULED_OUT)
"""The states that speak against the image. Faults of a machine or a pool are not among them."""

VERIFIED, REPORTED = "verified", "reported"
"""Bases beside `predicted` and `documented`: a verdict says so, or a sweep told it and nobody signed it."""

REVOKED = VerdictStatus.REVOKED.value
"""The cause of a combination whose verdicts were taken back."""


_NO_JOB = (Outcome.NO_MATCH, Outcome.NOT_TESTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComboEntry:
    """A target with what is known of it. `images` are the digests of its images and .sif files.

    `judged` are the verdicts on each of these, the newest image first: what is proven of one is not of
    another. `rulings` say what a plan makes of each capability, verdicts left aside. `required` are the
    capabilities that its recipe requires. `block` says why there is nothing to test, empty where there is.
    `revoked` is what was taken back of the newest image.
    """

    target: str
    framework: str
    version: str
    cuda: str
    images: frozenset[str]
    judged: tuple[tuple[VerificationResult, ...], ...]
    rulings: Mapping[Capability, CellRuling] = field(default_factory=dict)
    required: tuple[Capability, ...] = ()
    block: str = ""
    revoked: tuple[RevokedCell, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepNodeState:
    """What became of one node of a sweep. `sweep` is the sweep's id.

    `images` are the digests of the manifests that it was for; empty for what speaks of the pool alone
    (`no-match`).
    """

    target: str
    capability: Capability
    outcome: Outcome
    reason: str
    sweep: str
    made: datetime
    images: frozenset[str]

    @property
    def source(self) -> str:
        return f"sweep {self.sweep}"

    def concerns(self, entry: ComboEntry) -> bool:
        """Whether it speaks of an image that the target has."""
        return not self.images or bool(self.images & entry.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComboCell:
    """One target on one capability. `cause` is empty where it is valid, `driver` the one that proved it.

    `framework` is the family's word (`pytorch`), whatever the source calls it. `basis` is what the reason
    stands on, of one that is not tested too: what is predicted of it, say.
    """

    target: str
    framework: str
    version: str
    cuda: str
    capability: Capability
    state: ComboState
    cause: str
    basis: str
    reason: str
    source: str
    driver: str = ""


def columns(
    entries: Iterable[ComboEntry], nodes: Iterable[SweepNodeState] = (), requested: Iterable[Capability] = ()
) -> tuple[Capability, ...]:
    """The capabilities of a table: asked about, required by a recipe, tried, or spoken of by a verdict."""
    capabilities = {*requested, *(node.capability for node in nodes)}
    for entry in entries:
        capabilities |= {*entry.required, *_capabilities(entry.judged)}
        capabilities |= {parse_capability(row.capability) for row in entry.revoked if row.capability}
    return tuple(sorted(capabilities))


def make_combos(
    entries: Iterable[ComboEntry], nodes: Iterable[SweepNodeState], capabilities: Sequence[Capability]
) -> tuple[ComboCell, ...]:
    """Every entry on every capability.

    A verdict decides; of several images one that is proven is enough. Without one the newest that a sweep
    told of an image that is there, then what is known. A sweep in which no job ran (`no-match`,
    `not-tested`) does not replace the outcome of an earlier job: its machine may only be away.
    """
    tried: dict[tuple[str, Capability], list[SweepNodeState]] = {}
    for node in sorted(nodes, key=lambda row: (row.outcome not in _NO_JOB, row.made), reverse=True):
        tried.setdefault((node.target, node.capability), []).append(node)
    combos = []
    for entry in entries:
        for capability in capabilities:
            of_it = (node for node in tried.get((entry.target, capability), ()) if node.concerns(entry))
            combos.append(_combo(entry, capability, next(of_it, None)))
    return tuple(combos)


def _capabilities(judged: Iterable[tuple[VerificationResult, ...]]) -> set[Capability]:
    """Where verdicts that can be relied on speak."""
    return {capability for capability, _ in _signed(judged)}


def _signed(judged: Iterable[tuple[VerificationResult, ...]]) -> Iterator[tuple[Capability, Verdict]]:
    for judgement in chain.from_iterable(judged):
        device = judgement.verdict.report.device if judgement.verdict else None
        if judgement.standing is VerdictStatus.GOOD and judgement.verdict and device and not device.part:
            with contextlib.suppress(ValueError):  # a capability that is none says nothing of any
                yield parse_capability(device.capability), judgement.verdict


def _combo(entry: ComboEntry, capability: Capability, node: SweepNodeState | None) -> ComboCell:
    state, cause, basis, reason, source, driver = _combo_facts(entry, capability, node)
    return ComboCell(
        target=entry.target,
        framework=family_label(entry.framework),
        version=entry.version,
        cuda=entry.cuda,
        capability=capability,
        state=state,
        cause=cause,
        basis=basis,
        reason=reason,
        source=source,
        driver=driver,
    )


_ComboFacts = tuple[ComboState, str, str, str, str, str]


def _combo_facts(entry: ComboEntry, capability: Capability, node: SweepNodeState | None) -> _ComboFacts:
    claims = [claim for judgement in entry.judged if (claim := verified_claims(judgement).get(capability))]
    for claim in claims:
        if claim.answer is Compatibility.YES:
            return ComboState.VALID, "", VERIFIED, claim.reason, claim.source, claim.driver
    if claims:
        return ComboState.FAILED, claims[0].rule, VERIFIED, claims[0].reason, claims[0].source, ""
    word = _newest_other_outcome(entry.judged, capability)
    if word is not None:
        return word
    for row in entry.revoked:
        if row.capability in ("", str(capability)):
            source = f"revocation of key {row.keyid[:12]}"
            return ComboState.FAILED, REVOKED, VERIFIED, row.summary, source, ""
    if node is not None and node.outcome is Outcome.VERIFIED:
        why = f"a run said verified, and no verdict of it counts: {_invalid_reason(entry, capability)}"
        return ComboState.NOT_TESTED, Outcome.NOT_TESTED, "", why, node.source, ""
    if node is not None and node.outcome is not Outcome.NOT_TESTED:
        return _state(node.outcome), node.outcome, REPORTED, node.reason, node.source, ""
    ruling = entry.rulings.get(capability)
    if ruling is not None and ruling.pruned and ruling.claim is not None:
        by = ruling.claim
        return ComboState.RULED_OUT, by.rule, by.basis, by.reason, by.source, ""
    if entry.block:
        return ComboState.NOT_TESTED, Outcome.NOT_TESTED, "", entry.block, "", ""
    if ruling is None or ruling.claim is None:
        return ComboState.NOT_TESTED, Outcome.NOT_TESTED, "", NOTHING_KNOWN_REASON, "", ""
    by = ruling.claim
    return ComboState.NOT_TESTED, Outcome.NOT_TESTED, by.basis, by.reason, by.source, ""


def _state(outcome: Outcome) -> ComboState:
    """Of what was tried and is not verified: whether that speaks against the image."""
    return ComboState.FAILED if outcome in REFUSALS else ComboState.UNDECIDED


def _newest_other_outcome(
    judged: Iterable[tuple[VerificationResult, ...]], capability: Capability
) -> _ComboFacts | None:
    """The newest signed word that is no claim about the image itself (`timeout`, an old driver)."""
    verdicts = [verdict for where, verdict in _signed(judged) if where == capability]
    if not verdicts:
        return None
    newest = max(verdicts, key=lambda verdict: (verdict.issued, verdict.digest))
    report = newest.report
    driver = report.hardware.driver if report.hardware else ""
    reason = f"driver {driver}, {report.ended:%Y-%m-%d}: {report.reason}"
    source = f"verdict {newest.digest or 'not attached'} of key {newest.keyid[:12]}"
    return _state(report.outcome), report.outcome, VERIFIED, reason, source, ""


def _invalid_reason(entry: ComboEntry, capability: Capability) -> str:
    """Why the verdicts there are do not count."""
    words = {
        judgement.standing.value
        for judgement in chain.from_iterable(entry.judged)
        if judgement.standing is not VerdictStatus.GOOD
        and judgement.verdict
        and judgement.verdict.report.device
        and judgement.verdict.report.device.row == str(capability)
    }
    return ", ".join(sorted(words)) or "there is none"


def family_label(framework: str) -> str:
    """What a family calls packages of PyPI and conda: `torch` is `pytorch`, `jaxlib` `jax`."""
    names = {distribution: family for family, distribution in knowledge.families().items()}
    there = knowledge.pypi_names().get(framework, (framework,))
    bring = (row.name for row in frameworks() if framework in row.packages)
    return next((names[name] for name in (framework, *there, *bring) if name in names), framework)


def unite(combos: Iterable[ComboCell]) -> tuple[ComboCell, ...]:
    """One for each framework, version, CUDA and capability, sorted: several targets may be of the same.

    It is valid where any of them is. A verdict that says no weighs more than a target that was not tested,
    and that more than what became of another one in a sweep, or what is foretold of it.
    """
    ordered = sorted(combos, key=lambda cell: (order(cell), _rank(cell), cell.target))
    return tuple(next(alike) for _, alike in groupby(ordered, key=order))


def order(combo: ComboCell) -> tuple[object, ...]:
    """Framework, version, CUDA and capability, numbers by their size."""
    return combo.framework, natural(combo.version), natural(combo.cuda), combo.capability


def _rank(combo: ComboCell) -> int:
    if combo.state is ComboState.VALID:
        return 0
    if combo.state is ComboState.NOT_TESTED:
        return 2
    if combo.state is ComboState.FAILED and combo.basis == VERIFIED:
        return 1
    return 4 if combo.state is ComboState.RULED_OUT else 3


# --- Ranges of versions of which the same is said on one capability: combinations -> ranges. Pure
# A release that nobody tested ends a range, so that no range promises what no combination says.


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """Versions of a framework without a gap of which the same is said on one capability.

    `cuda` are the CUDA versions of those combinations of the range that are in this state; which belongs to
    which version, the combinations say.
    """

    framework: str
    capability: Capability
    first: str
    last: str
    cuda: tuple[str, ...]
    state: ComboState

    @property
    def versions(self) -> str:
        """`2.1-2.3`, or one version."""
        return self.first if self.first == self.last else f"{self.first}-{self.last}"


def make_ranges(combos: Iterable[ComboCell]) -> tuple[VersionRange, ...]:
    """Version ranges by framework and capability. Versions count as neighbours only if no release is between.

    A version is valid where it is with any CUDA, else in the state that leaves the most open.
    """
    groups = groupby(
        sorted(unite(combos), key=lambda cell: (cell.framework, cell.capability, natural(cell.version))),
        key=lambda cell: (cell.framework, cell.capability),
    )
    return tuple(row for (_, _), some in groups for row in _ranges(list(some)))


_MOST_OPEN = (
    ComboState.VALID,
    ComboState.NOT_TESTED,
    ComboState.UNDECIDED,
    ComboState.RULED_OUT,
    ComboState.FAILED,
)


def _ranges(combos: Sequence[ComboCell]) -> Iterator[VersionRange]:
    """Of one framework and capability; combos sorted by version."""
    framework, capability = combos[0].framework, combos[0].capability
    run: list[tuple[str, ComboState, tuple[str, ...]]] = []

    def close() -> VersionRange:
        cuda = tuple(sorted({name for _, _, names in run for name in names}, key=natural))
        return VersionRange(
            framework=framework,
            capability=capability,
            first=run[0][0],
            last=run[-1][0],
            cuda=cuda,
            state=run[0][1],
        )

    for version, some in groupby(combos, key=lambda cell: cell.version):
        alike = list(some)
        states = {combo.state for combo in alike}
        state = next(combo for combo in _MOST_OPEN if combo in states)
        cuda = tuple(combo.cuda for combo in alike if combo.state is state)
        if run and not (run[-1][1] is state and neighbours(framework, run[-1][0], version)):
            yield close()
            run = []
        run.append((version, state, cuda))
    if run:
        yield close()


def neighbours(framework: str, lower: str, upper: str) -> bool:
    """Whether no release is known between two versions; of those that are not known, numbers decide."""
    if minor_of(lower) == minor_of(upper):
        return True  # 2.3 and 2.3.1: patches of the same
    releases = knowledge.releases(knowledge.families().get(framework, framework))
    minors = {minor_of(minor.version) for minor in releases}
    if minor_of(lower) in minors and minor_of(upper) in minors:
        return not any(minor_of(lower) < minor < minor_of(upper) for minor in minors)
    (major, minor), (other, next_minor) = minor_of(lower), minor_of(upper)
    return major == other and next_minor == minor + 1


def minor_of(version: str) -> tuple[int, int]:
    """`(2, 3)` of `2.3.1`; what is not written counts as 0."""
    numbers = [int(digits) for digits in re.findall(r"[0-9]+", version, re.ASCII)[:2]]
    first, second, *_ = [*numbers, 0, 0]
    return first, second
