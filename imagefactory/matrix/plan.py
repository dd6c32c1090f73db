"""The cells to build and test: targets x GPUs -> cells, each planned, skipped, blocked or unchanged.

No I/O. The claims about framework x CUDA x driver x capability (gpu/cells.py) decide about a cell. Cells
that are known to fail are skipped by a rule with a name, a reason and a source. `--ignore-rule` with that
name includes them again. Unknown cells are included, so that a test decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.cells import NO_TARGET, CellEvidence, answer_cell, cell_query
from imagefactory.gpu.knowledge.toolkits import native_driver
from imagefactory.gpu.known_bad import find_rule
from imagefactory.gpu.values import Cell, CellClaim, CellQuery, ClaimBasis, Compatibility, rocm_of
from imagefactory.matrix.compat import CompatGpu, CoverCandidate, fix_of
from imagefactory.model import Lock, Target
from imagefactory.trust.claims import REFUSALS, last_verdicts, verified_claims
from imagefactory.trust.verdict import VerificationResult
from imagefactory.versions import nearest

Answerer = Callable[[CellQuery, CellEvidence], Cell]

GPU_NOT_LISTED = "gpu-not-listed"
"""The rule for a row with a capability that no listed GPU has."""
AVOIDED = "avoided"
"""The rule for a cell whose machines `sweep-machines` does not select. That setting can include them."""
FEW = 3
"""The most machines to list in a reason."""
AVOIDED_BY = "--machine, or the setting sweep-machines"
NO_MATCH = "no-match"
"""The rule for a row for which a pool has no GPU, by its capability or its driver."""
UNSOLVABLE = "unsolvable"
KNOWN_BAD_RULE = "known-bad"
"""The rule that includes every `known-bad:ID`."""
SKIP_RULES = (
    "architecture",
    "maker",
    "no-code",
    "partly",
    "not-documented",
    NO_TARGET,
    "toolkit-dropped",
    "driver-floor",
    "driver-gpu",
    "cuda-not-offered",
    "no-gpu-code",
    UNSOLVABLE,
    *REFUSALS,
    KNOWN_BAD_RULE,
    GPU_NOT_LISTED,
    NO_MATCH,
)
"""The rules that skip cells. cells.py describes them."""
NOTHING_KNOWN_REASON = "no evidence: a test would decide"


class CellState(StrEnum):
    """The pending work for a cell or a target.

    `build`: build the image, then verify it. `verify`: the image exists, verify it. `unchanged`: the image
    in the store matches the lock, and nothing remains to do. `blocked`: no lock to build from.
    """

    BUILD = "build"
    VERIFY = "verify"
    UNCHANGED = "unchanged"
    BLOCKED = "blocked"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGpu:
    """A type of GPU to plan for. `name` and `driver` are empty if only the capability is known.

    `cuda` is the newest CUDA version of its driver, if nothing else is known about the driver. `host` is the
    architecture of its machine's processor, empty if unknown. `part` is the profile of a MIG slice, empty
    for a complete GPU.
    """

    capability: Capability
    name: str = ""
    driver: str = ""
    cuda: str = ""
    host: str = ""
    part: str = ""

    @property
    def oldest_driver(self) -> str:
        """The driver, else the oldest one that supports its CUDA version; empty if neither is known."""
        return self.driver or (native_driver(self.cuda) if self.cuda else "")

    def __str__(self) -> str:
        known = [str(self.capability)] if self.name else []
        known += [f"slice {self.part}"] if self.part and self.part not in self.name.lower() else []
        known += [f"beside {self.host}"] if self.host else []
        known += [f"driver {self.driver}"] if self.driver else []
        known += [f"a driver for CUDA {self.cuda}"] if self.cuda and not self.driver else []
        return f"{self.name or self.capability} ({', '.join(known)})" if known else str(self.capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """The status of a target. `lock` is None without a valid lock.

    `block` is the reason why nothing can be built, else empty, and `hint` is the fix. `missing` is the
    reason to build an image, empty if the stored image matches the lock. `image` is the digest of that
    image, `verdicts` are those on it. If a registry was queried instead of the store, `reference` is the
    full name of the image there.
    """

    target: Target
    lock: Lock | None = None
    block: str = ""
    hint: str = ""
    missing: str = "not in the store"
    image: str = ""
    reference: str = ""
    evidence: CellEvidence = field(default_factory=CellEvidence)
    verdicts: tuple[VerificationResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """The input of a plan. `devices` are the GPUs; without any, the capabilities that each recipe requires.

    `allow` are rules that are ignored. `avoided` are reasons why no job may use some of the devices.
    `on_machines` is true for GPUs of machines, which have no ARM processor unless stated.
    """

    stages: tuple[TargetStatus, ...]
    devices: tuple[PlanGpu, ...] = ()
    allow: frozenset[str] = frozenset()
    answer: Answerer = answer_cell
    on_machines: bool = False
    avoided: Mapping[PlanGpu, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRuling:
    """A decision whether to test a cell. `claim` is the deciding one, None without evidence.

    `against` are all claims that skip the cell: `--ignore-rule` must name each of their rules. `allowed`
    are ignored claims that would skip it. `warnings` are negative claims that do not skip it. `fix` is what
    would work instead of a skipped cell, empty if unknown.
    """

    claim: CellClaim | None
    against: tuple[CellClaim, ...] = ()
    allowed: tuple[CellClaim, ...] = ()
    warnings: tuple[CellClaim, ...] = ()
    fix: str = ""

    @property
    def skipped(self) -> bool:
        return bool(self.against)

    @property
    def reason(self) -> str:
        return self.claim.reason if self.claim else NOTHING_KNOWN_REASON


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """One target on one type of GPU. `required` is true if the recipe requires that capability.

    `verified` is the time of the image's last verification there, even if expired, and `until` its expiry.
    Both are None for never.
    """

    device: PlanGpu
    state: CellState
    ruling: CellRuling
    required: bool
    verified: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTarget:
    """A target with its cells. `state` is the largest pending work of its cells, `reason` is one line.

    `image` is the digest of the existing image, `reference` its name in a registry.
    """

    target: Target
    state: CellState
    reason: str
    hint: str
    image: str
    reference: str
    cells: tuple[PlannedCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationPlan:
    """A plan. `on_gpus` is true if GPUs were listed. `unused` are ignored rules without effect."""

    targets: tuple[PlannedTarget, ...]
    on_gpus: bool = False
    unused: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[PlannedCell, ...]:
        return tuple(cell for target in self.targets for cell in target.cells)


def make_plan(inputs: PlanInput) -> VerificationPlan:
    """Return every target with its cells, each planned or with the reason why not."""
    targets = tuple(_plan_target(stage, inputs) for stage in inputs.stages)
    unused = unused_rules(inputs.allow, (cell.ruling for target in targets for cell in target.cells))
    return VerificationPlan(targets=targets, on_gpus=bool(inputs.devices), unused=unused)


def _plan_target(stage: TargetStatus, inputs: PlanInput) -> PlannedTarget:
    """Return the planned target. A target for CPUs has no cells: its image must be built, or exists."""
    required = tuple(parse_capability(text) for text in stage.target.capabilities)
    devices = inputs.devices or tuple(PlanGpu(capability=capability) for capability in required)
    cells = []
    for device in devices if stage.target.gpu else ():
        query = cell_query(stage.target, stage.lock, device.capability, device.oldest_driver)
        unsaid = "amd64" if inputs.on_machines and inputs.devices and query.platform == "arm64" else ""
        question = replace(query, host=device.host or unsaid)
        is_required = device.capability in required and not device.part
        known = {} if device.part else stage.evidence.verified
        known = {**known, **verified_claims(stage.verdicts, device.oldest_driver, device.part)}
        evidence = replace(stage.evidence, verified=known)
        answer = inputs.answer(question, evidence)
        ruling = weigh_claims(answer, inputs.allow, required=is_required)
        ruling = with_fix(ruling, answer, device, stage.target.name)
        if reason := inputs.avoided.get(device, ""):
            claim = CellClaim(
                basis=ClaimBasis.DOCUMENTED,
                answer=Compatibility.NO,
                rule=AVOIDED,
                reason=reason,
                source=AVOIDED_BY,
            )
            ruling = replace(ruling, claim=claim, against=(claim, *ruling.against), fix="")
        state = _cell_state(stage, ruling, verifying=bool(inputs.devices))
        proofs = last_verdicts(stage.verdicts, device.part)
        verified, until = proofs.get(device.capability, (None, None))
        cells.append(
            PlannedCell(
                device=device,
                state=state,
                ruling=ruling,
                required=is_required,
                verified=verified,
                until=until,
            )
        )
    states = [cell.state for cell in cells] or [_image_state(stage) or CellState.UNCHANGED]
    state = next(state for state in _BY_WEIGHT if state in states)
    return PlannedTarget(
        target=stage.target,
        state=state,
        reason=_target_reason(stage, state),
        hint=stage.hint if state is CellState.BLOCKED else "",
        image="" if stage.block or stage.missing else stage.image,
        reference="" if stage.block or stage.missing else stage.reference,
        cells=tuple(cells),
    )


_BY_WEIGHT = (CellState.BUILD, CellState.BLOCKED, CellState.VERIFY, CellState.UNCHANGED, CellState.SKIPPED)


def _cell_state(stage: TargetStatus, ruling: CellRuling, *, verifying: bool) -> CellState:
    """Return the state of a cell. `verifying` is true if GPUs are listed for verification."""
    if ruling.skipped:
        return CellState.SKIPPED
    if state := _image_state(stage):
        return state
    claim = ruling.claim
    verified = claim is not None and (claim.basis, claim.answer) == (ClaimBasis.VERIFIED, Compatibility.YES)
    return CellState.VERIFY if verifying and not verified else CellState.UNCHANGED


def _image_state(stage: TargetStatus) -> CellState | None:
    """Return the pending work for the image, None if it exists."""
    if stage.block:
        return CellState.BLOCKED
    return CellState.BUILD if stage.missing else None


def _target_reason(stage: TargetStatus, state: CellState) -> str:
    if state is CellState.SKIPPED:
        return "every requested GPU is excluded"
    if state is CellState.BLOCKED:
        return stage.block
    location = "candidate in the registry" if stage.reference else "image in the store"
    return stage.missing or f"the {location} matches the lock: nothing to build"


def weigh_claims(cell: Cell, allow: frozenset[str], *, required: bool = False) -> CellRuling:
    """Return whether a cell is worth a test.

    The strongest basis with a claim decides. Its `no` claims skip the cell. So does a `partly` claim,
    unless the cell is `required`: then a test decides, and the claim is a warning. Known faults skip if
    nothing runs or results are wrong, unless they affect every GPU; others are warnings. A cell is included
    again if all rules that skip it are ignored.
    """
    strongest = [claim for claim in cell.claims if claim.basis is cell.claims[0].basis]
    part = tuple(claim for claim in strongest if claim.answer is Compatibility.PARTLY)
    against = [claim for claim in strongest if claim.answer is Compatibility.NO]
    against += [] if required else part
    against += [claim for claim in cell.warnings if _is_grave(claim)]
    allowed = tuple(claim for claim in against if _is_allowed(claim.rule, allow))
    blocking = tuple(claim for claim in against if claim not in allowed)
    first = next((claim for claim in cell.claims if claim.answer is not Compatibility.UNKNOWN), None)
    return CellRuling(
        claim=blocking[0] if blocking else first,
        against=blocking,
        allowed=allowed,
        warnings=tuple(claim for claim in (*part, *cell.warnings) if claim not in against),
    )


def with_fix(ruling: CellRuling, answer: Cell, device: PlanGpu, target: str = "") -> CellRuling:
    """Return the ruling about a cell, with what would work instead if it is skipped, as `compat` names it."""
    if not ruling.skipped:
        return ruling
    gpu = CompatGpu(
        name=device.name, capability=device.capability, driver=answer.question.driver, host=device.host
    )
    candidate = CoverCandidate(name=target, group="", question=answer.question)
    return replace(ruling, fix=fix_of(candidate, answer, gpu))


def _is_grave(fault: CellClaim) -> bool:
    """Return whether a known fault prevents a test on this GPU. An unknown one counts as such."""
    rule = find_rule(fault.rule)
    if rule is None:
        return fault.answer is Compatibility.NO
    return rule.effect == "does not run" or (rule.effect == "wrong results" and bool(rule.capabilities))


def _is_allowed(rule: str, allow: frozenset[str]) -> bool:
    return rule in allow or (rule.startswith(f"{KNOWN_BAD_RULE}:") and KNOWN_BAD_RULE in allow)


def unused_rules(allow: frozenset[str], rulings: Iterable[CellRuling]) -> tuple[str, ...]:
    """Return the rules of `allow` without effect."""
    met = {claim.rule for ruling in rulings for claim in ruling.allowed}
    return tuple(
        sorted(rule for rule in allow if not any(_is_allowed(claim, frozenset({rule})) for claim in met))
    )


def avoided_machines(names: Sequence[str]) -> str:
    """Return the reason for a cell without a usable machine."""
    return f"its machines are avoided: {few(names)}"


def few(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{', '.join(names[:FEW])}{more}"


def check_rules(rules: Sequence[str]) -> frozenset[str]:
    """Return the rules to allow. Raises UsageError for an unknown rule."""
    for rule in rules:
        if rule not in SKIP_RULES and not rule.startswith(f"{KNOWN_BAD_RULE}:"):
            suggestion = nearest(rule, SKIP_RULES)
            meant = f"did you mean '{suggestion}'?" if suggestion else f"use one of {', '.join(SKIP_RULES)}"
            raise UsageError("rule-unknown", f"--ignore-rule {rule[:60]}: unknown rule", hint=meant)
    return frozenset(rules)


def starts_by_kit(target: Target) -> bool:
    """Return whether a kit can start its image, which is for NVIDIA GPUs."""
    return target.gpu and not rocm_of(target.cuda)


def turn_of(verified: datetime | None, seed: str) -> tuple[object, ...]:
    """Return the sort key of cells: the oldest verdict first, then unverified cells by a hash of `seed`."""
    never = datetime.max.replace(tzinfo=UTC)
    return verified is None, verified or never, hashlib.sha256(seed.encode()).digest()
