"""The combinations of framework x version x CUDA x capability, with their states. No I/O.

    entries (targets with their verdicts and predictions) + outcomes of sweeps -> combos

    valid       a valid verdict `verified` exists for an image of it, on that capability
    failed      the suite failed there (claims.REFUSALS), or its verdicts were revoked (REVOKED)
    ruled-out   not run: a rule of the plan excludes it (plan.SKIP_RULES)
    undecided   run without a result about the image (`held`, `timeout`, `no-match`)
    not-tested  all others; never shown as one of the above

Each state has a basis, and bases are never mixed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """The state of a combination in a table."""

    VALID = "valid"
    FAILED = "failed"
    RULED_OUT = "ruled-out"
    UNDECIDED = "undecided"
    NOT_TESTED = "not-tested"


INVALID = (ComboState.FAILED, ComboState.RULED_OUT)
"""The states that reject the image. Faults of a machine or a pool are not among them."""

VERIFIED, REPORTED = "verified", "reported"
"""Bases besides `predicted` and `documented`: a verdict, or an unsigned result of a sweep."""

REVOKED = VerdictStatus.REVOKED.value
"""The cause of a combination whose verdicts were revoked."""

_NO_JOB = (Outcome.NO_MATCH, Outcome.NOT_TESTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComboEntry:
    """A target and the evidence about it. `images` are the digests of its images and .sif files.

    `judged` are the verdicts on each of these, the newest image first. `rulings` are the plan's for each
    capability, without verdicts. `required` are the capabilities that its recipe requires. `block` is the
    reason why nothing can be tested, or empty. `revoked` are the revoked verdicts of the newest image.
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
    """The outcome of one node of a sweep. `sweep` is the sweep's id.

    `images` are the digests of the tested manifests, empty for an outcome of the pool (`no-match`).
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
        """Return whether the outcome is about an image that the target has."""
        return not self.images or bool(self.images & entry.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComboCell:
    """One target on one capability. `cause` is empty if it is valid, `driver` is the verified driver.

    `framework` is the family's name (`pytorch`) for every source. `basis` is that of the reason, also if the
    cell is not tested, such as `predicted`.
    """

    target: str
    framework: str
    version: str
    cuda: str
    capability: Capability
    status: ComboState
    cause: str
    basis: str
    reason: str
    source: str
    driver: str = ""


def columns(
    entries: Iterable[ComboEntry], nodes: Iterable[SweepNodeState] = (), requested: Iterable[Capability] = ()
) -> tuple[Capability, ...]:
    """Return the capabilities of a table: requested, required by a recipe, tested, or of a verdict."""
    capabilities = {*requested, *(node.capability for node in nodes)}
    for entry in entries:
        capabilities |= {*entry.required, *(capability for capability, _ in _signed(entry.judged))}
        capabilities |= {parse_capability(row.capability) for row in entry.revoked if row.capability}
    return tuple(sorted(capabilities))


def make_combos(
    entries: Iterable[ComboEntry], nodes: Iterable[SweepNodeState], capabilities: Sequence[Capability]
) -> tuple[ComboCell, ...]:
    """Return every entry on every capability.

    A verdict decides, and one verified image is enough. Without a verdict the newest outcome of a sweep for
    an existing image decides, then predictions and documentation. A sweep without a job (`no-match`,
    `not-tested`) does not replace the outcome of an earlier job, because its machine may be away.
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


def _signed(judged: Iterable[tuple[VerificationResult, ...]]) -> Iterator[tuple[Capability, Verdict]]:
    for judgement in chain.from_iterable(judged):
        device = judgement.verdict.report.device if judgement.verdict else None
        if judgement.standing is VerdictStatus.GOOD and judgement.verdict and device and not device.part:
            with contextlib.suppress(ValueError):  # an invalid capability matches nothing
                yield parse_capability(device.capability), judgement.verdict


def _combo(entry: ComboEntry, capability: Capability, node: SweepNodeState | None) -> ComboCell:
    def combo(
        state: ComboState, cause: str, basis: str, reason: str, source: str, driver: str = ""
    ) -> ComboCell:
        return ComboCell(
            target=entry.target,
            framework=family_label(entry.framework),
            version=entry.version,
            cuda=entry.cuda,
            capability=capability,
            status=state,
            cause=cause,
            basis=basis,
            reason=reason,
            source=source,
            driver=driver,
        )

    def untested(basis: str, reason: str, source: str) -> ComboCell:
        return combo(ComboState.NOT_TESTED, Outcome.NOT_TESTED, basis, reason, source)

    claims = [claim for judgement in entry.judged if (claim := verified_claims(judgement).get(capability))]
    for claim in claims:
        if claim.answer is Compatibility.YES:
            return combo(ComboState.VALID, "", VERIFIED, claim.reason, claim.source, claim.driver)
    if claims:
        return combo(ComboState.FAILED, claims[0].rule, VERIFIED, claims[0].reason, claims[0].source)
    if verdicts := [
        verdict for capability_of, verdict in _signed(entry.judged) if capability_of == capability
    ]:
        # the newest signed outcome that is not about the image itself (`timeout`, an old driver)
        newest = max(verdicts, key=lambda verdict: (verdict.issued, verdict.digest))
        report = newest.report
        driver = report.hardware.driver if report.hardware else ""
        reason = f"driver {driver}, {report.ended:%Y-%m-%d}: {report.reason}"
        source = f"verdict {newest.digest or 'not attached'} of key {newest.keyid[:12]}"
        return combo(_state(report.outcome), report.outcome, VERIFIED, reason, source)
    for row in entry.revoked:
        if row.capability in ("", str(capability)):
            source = f"revocation of key {row.keyid[:12]}"
            return combo(ComboState.FAILED, REVOKED, VERIFIED, row.summary, source)
    if node is not None and node.outcome is Outcome.VERIFIED:
        why = f"a run said verified, and no verdict of it counts: {_invalid_reason(entry, capability)}"
        return untested("", why, node.source)
    if node is not None and node.outcome is not Outcome.NOT_TESTED:
        return combo(_state(node.outcome), node.outcome, REPORTED, node.reason, node.source)
    ruling = entry.rulings.get(capability)
    by = ruling.claim if ruling else None
    if ruling and ruling.skipped and by:
        return combo(ComboState.RULED_OUT, by.rule, by.basis, by.reason, by.source)
    if entry.block:
        return untested("", entry.block, "")
    return untested(by.basis, by.reason, by.source) if by else untested("", NOTHING_KNOWN_REASON, "")


def _state(outcome: Outcome) -> ComboState:
    """Return the state for an outcome that is not `verified`."""
    return ComboState.FAILED if outcome in REFUSALS else ComboState.UNDECIDED


def _invalid_reason(entry: ComboEntry, capability: Capability) -> str:
    """Return the reason why the verdicts on a capability are invalid."""
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
    """Return the family's name of a PyPI or conda package: `torch` is `pytorch`, `jaxlib` `jax`."""
    names = {distribution: family for family, distribution in knowledge.families().items()}
    there = knowledge.pypi_names().get(framework, (framework,))
    bring = (row.name for row in frameworks() if framework in row.packages)
    return next((names[name] for name in (framework, *there, *bring) if name in names), framework)


def unite(combos: Iterable[ComboCell]) -> tuple[ComboCell, ...]:
    """Return one cell for each framework, version, CUDA and capability, sorted, of several targets.

    It is valid if any target is. A negative verdict has priority over an untested target, which has priority
    over a sweep's outcome or a prediction for another target.
    """
    ordered = sorted(combos, key=lambda cell: (order(cell), _rank(cell), cell.target))
    return tuple(next(alike) for _, alike in groupby(ordered, key=order))


def order(combo: ComboCell) -> tuple[object, ...]:
    """Return a sort key: framework, version, CUDA and capability, with numbers in numerical order."""
    return combo.framework, natural(combo.version), natural(combo.cuda), combo.capability


def _rank(combo: ComboCell) -> int:
    if combo.status is ComboState.FAILED and combo.basis == VERIFIED:
        return 1
    ranks = {ComboState.VALID: 0, ComboState.NOT_TESTED: 2, ComboState.RULED_OUT: 4}
    return ranks.get(combo.status, 3)


# --- Ranges of versions in the same state on one capability
# A release that nobody tested ends a range, so that no range promises what no combination says.


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """Consecutive versions of a framework with the same state on one capability.

    `cuda` are the CUDA versions of the range's combinations in this state.
    """

    framework: str
    capability: Capability
    first: str
    last: str
    cuda: tuple[str, ...]
    status: ComboState

    @property
    def versions(self) -> str:
        """Return `2.1-2.3`, or one version."""
        return self.first if self.first == self.last else f"{self.first}-{self.last}"


def make_ranges(combos: Iterable[ComboCell]) -> tuple[VersionRange, ...]:
    """Return version ranges by framework and capability, without a release in a gap.

    A version is valid if it is with any CUDA version, else it has the least certain state.
    """
    ordered = sorted(unite(combos), key=lambda cell: (cell.framework, cell.capability, natural(cell.version)))
    groups = groupby(ordered, key=lambda cell: (cell.framework, cell.capability))
    return tuple(row for _, some in groups for row in _ranges(list(some)))


_MOST_OPEN = (
    ComboState.VALID,
    ComboState.NOT_TESTED,
    ComboState.UNDECIDED,
    ComboState.RULED_OUT,
    ComboState.FAILED,
)


def _ranges(combos: Sequence[ComboCell]) -> Iterator[VersionRange]:
    """Yield the ranges of one framework and capability; combos are sorted by version."""
    framework, row = combos[0].framework, None
    for version, some in groupby(combos, key=lambda cell: cell.version):
        alike = list(some)
        states = {combo.status for combo in alike}
        state = next(state for state in _MOST_OPEN if state in states)
        cuda = {combo.cuda for combo in alike if combo.status is state}
        if row and row.status is state and neighbours(framework, row.last, version):
            every = tuple(sorted(cuda.union(row.cuda), key=natural))
            row = replace(row, last=version, cuda=every)
            continue
        if row:
            yield row
        row = VersionRange(
            framework=framework,
            capability=combos[0].capability,
            first=version,
            last=version,
            cuda=tuple(sorted(cuda, key=natural)),
            status=state,
        )
    if row:
        yield row


def neighbours(framework: str, lower: str, upper: str) -> bool:
    """Return whether no known release is between two versions. Unknown ones are compared by number."""
    if minor_of(lower) == minor_of(upper):
        return True  # 2.3 and 2.3.1: patches of the same
    releases = knowledge.releases(knowledge.families().get(framework, framework))
    minors = {minor_of(minor.version) for minor in releases}
    if minor_of(lower) in minors and minor_of(upper) in minors:
        return not any(minor_of(lower) < minor < minor_of(upper) for minor in minors)
    (major, minor), (other, next_minor) = minor_of(lower), minor_of(upper)
    return major == other and next_minor == minor + 1


def minor_of(version: str) -> tuple[int, int]:
    """Return `(2, 3)` for `2.3.1`; a missing number is 0."""
    numbers = [int(digits) for digits in re.findall(r"[0-9]+", version, re.ASCII)[:2]]
    first, second, *_ = [*numbers, 0, 0]
    return first, second
