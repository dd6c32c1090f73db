"""What is worth building and testing: targets x GPUs -> cells, each planned, pruned, blocked or unchanged.

Pure. A cell is judged by what is known of framework x CUDA x driver x capability (gpu/cells.py). What is
known to fail is pruned under the name of a rule, with its reason and source, and comes back by that name
(`--allow`). What nothing is known of stays in: a test would tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from imagefactory.errors import UsageError
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.cells import CellEvidence, answer_cell, cell_query
from imagefactory.gpu.knowledge.toolkits import native_driver
from imagefactory.gpu.known_bad import find_rule
from imagefactory.gpu.values import Cell, CellClaim, CellQuery, ClaimBasis, Compatibility
from imagefactory.model import Lock, Target
from imagefactory.trust.claims import REFUSALS, last_verdicts, verified_claims
from imagefactory.trust.verdict import VerificationResult
from imagefactory.versions import nearest

Answerer = Callable[[CellQuery, CellEvidence], Cell]

GPU_NOT_LISTED = "gpu-not-listed"
"""The rule of a row whose capability none of the listed GPUs has."""
AVOIDED = "avoided"
"""The rule of a cell whose machines `sweep-machines` does not choose. It comes back by that setting."""
FEW = 3
"""Machines that a reason names."""
AVOIDED_BY = "--machine, or the setting sweep-machines"
NO_MATCH = "no-match"
"""The rule of a row for which a pool has no GPU, be it for its capability or its driver."""
UNSOLVABLE = "unsolvable"
KNOWN_BAD_RULE = "known-bad"
"""Allows every `known-bad:ID` at once."""
PRUNING = (
    "architecture",
    "maker",
    "no-code",
    "partly",
    "not-documented",
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
"""The rules that prune; cells.py says what they mean."""
NOTHING_KNOWN_REASON = "nothing is known of it: a test would tell"


class CellState(StrEnum):
    """What is to be done about a cell or a target.

    `build`: make the image, then verify it there. `verify`: the image is there, verify it. `unchanged`: the
    image in the store is what the lock gives, and nothing is left to do. `blocked`: no lock to build from.
    """

    BUILD = "build"
    VERIFY = "verify"
    UNCHANGED = "unchanged"
    BLOCKED = "blocked"
    PRUNED = "pruned"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGpu:
    """A kind of GPU to plan for; `name` and `driver` are empty where only the capability is asked about.

    `cuda` is the newest that its driver takes, where that is all that is told of the driver. `host` is the
    architecture of its machine's processor, empty where nobody says. `part` is the profile of a slice (MIG),
    empty for a whole GPU.
    """

    capability: Capability
    name: str = ""
    driver: str = ""
    cuda: str = ""
    host: str = ""
    part: str = ""

    @property
    def oldest_driver(self) -> str:
        """Its driver, else the oldest that takes such a CUDA; empty where neither is known."""
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
    """How far a target is. `lock` is None where there is none that holds.

    `block` says why nothing can be built from it, empty where something can, and `hint` what mends that.
    `missing` says why an image must be made, empty where the one in the store is what the lock gives; `image`
    is that one's digest, `verdicts` what is said of it. Where a registry was asked in place of the store
    `reference` is the whole name of that image there.
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
    """`devices` are the GPUs to plan for; none stands for the capabilities that each recipe requires.

    `allow` are rules that prune nothing. `avoided` are reasons why no job gets some of the devices.
    `on_machines`: they are GPUs of machines, which stand beside no ARM
    processor where nobody says so.
    """

    stages: tuple[TargetStatus, ...]
    devices: tuple[PlanGpu, ...] = ()
    allow: frozenset[str] = frozenset()
    answer: Answerer = answer_cell
    on_machines: bool = False
    avoided: Mapping[PlanGpu, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRuling:
    """Whether a cell is worth a test. `claim` is what decided, None where nothing is known.

    `against` are all claims that prune it: it comes back by `--allow` of each of their rules. `allowed` are
    those that would have pruned it, `warnings` what is known against it and prunes nothing.
    """

    claim: CellClaim | None
    against: tuple[CellClaim, ...] = ()
    allowed: tuple[CellClaim, ...] = ()
    warnings: tuple[CellClaim, ...] = ()

    @property
    def pruned(self) -> bool:
        return bool(self.against)

    @property
    def reason(self) -> str:
        return self.claim.reason if self.claim else NOTHING_KNOWN_REASON


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """One target on one kind of GPU; `required`: the recipe asks for that capability.

    `proven` is when the image was last verified there, be it too long ago, and `until` when that lapses;
    None for never.
    """

    device: PlanGpu
    state: CellState
    ruling: CellRuling
    required: bool
    proven: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTarget:
    """One target: `state` is the most that is to be done for any of its cells, `reason` one line.

    `image` is the digest of what is there, `reference` its name where a registry holds it.
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
    """`on_gpus` is whether GPUs were listed, to verify on. `unused` are rules that were allowed and would
    have pruned nothing here."""

    targets: tuple[PlannedTarget, ...]
    on_gpus: bool = False
    unused: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[PlannedCell, ...]:
        return tuple(cell for target in self.targets for cell in target.cells)


def make_plan(inputs: PlanInput) -> VerificationPlan:
    """Every target with every cell of its own, each planned or said why not."""
    targets = tuple(_plan_target(stage, inputs) for stage in inputs.stages)
    unused = unused_rules(inputs.allow, (cell.ruling for target in targets for cell in target.cells))
    return VerificationPlan(targets=targets, on_gpus=bool(inputs.devices), unused=unused)


def _plan_target(stage: TargetStatus, inputs: PlanInput) -> PlannedTarget:
    """A target for CPUs alone has no cell: it is to build, or there."""
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
        ruling = weigh_claims(inputs.answer(question, evidence), inputs.allow, required=is_required)
        if reason := inputs.avoided.get(device, ""):
            claim = CellClaim(
                basis=ClaimBasis.DOCUMENTED,
                answer=Compatibility.NO,
                rule=AVOIDED,
                reason=reason,
                source=AVOIDED_BY,
            )
            ruling = replace(ruling, claim=claim, against=(claim, *ruling.against))
        state = _cell_state(stage, ruling, verifying=bool(inputs.devices))
        proofs = last_verdicts(stage.verdicts, device.part)
        proven, until = proofs.get(device.capability, (None, None))
        cells.append(
            PlannedCell(
                device=device,
                state=state,
                ruling=ruling,
                required=is_required,
                proven=proven,
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


_BY_WEIGHT = (CellState.BUILD, CellState.BLOCKED, CellState.VERIFY, CellState.UNCHANGED, CellState.PRUNED)


def _cell_state(stage: TargetStatus, ruling: CellRuling, *, verifying: bool) -> CellState:
    """`verifying`: GPUs are listed, so there is something to verify on."""
    if ruling.pruned:
        return CellState.PRUNED
    if state := _image_state(stage):
        return state
    claim = ruling.claim
    verified = claim is not None and (claim.basis, claim.answer) == (ClaimBasis.VERIFIED, Compatibility.YES)
    return CellState.VERIFY if verifying and not verified else CellState.UNCHANGED


def _image_state(stage: TargetStatus) -> CellState | None:
    """What is to be done for the image to be there, None where it is."""
    if stage.block:
        return CellState.BLOCKED
    return CellState.BUILD if stage.missing else None


def _target_reason(stage: TargetStatus, state: CellState) -> str:
    if state is CellState.PRUNED:
        return "no GPU asked about is left"
    if state is CellState.BLOCKED:
        return stage.block
    where = "candidate in the registry" if stage.reference else "image in the store"
    return stage.missing or f"the {where} is what the lock gives: nothing to build"


def weigh_claims(cell: Cell, allow: frozenset[str], *, required: bool = False) -> CellRuling:
    """Whether a cell is worth a test.

    The weightiest basis that says anything decides: each of its claims that says `no` prunes. So does one
    that says `partly`, unless the cell is `required`: then a test decides, and the claim is a warning. Known
    faults prune where nothing runs or results are wrong, unless on every GPU alike; others are warnings. A
    cell comes back when all that prunes it is allowed.
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


def _is_grave(fault: CellClaim) -> bool:
    """Whether a known fault is a reason against a test on this GPU. One that has no row is taken for one."""
    rule = find_rule(fault.rule)
    if rule is None:
        return fault.answer is Compatibility.NO
    return rule.effect == "does not run" or (rule.effect == "wrong results" and bool(rule.capabilities))


def _is_allowed(rule: str, allow: frozenset[str]) -> bool:
    return rule in allow or (rule.startswith(f"{KNOWN_BAD_RULE}:") and KNOWN_BAD_RULE in allow)


def unused_rules(allow: frozenset[str], rulings: Iterable[CellRuling]) -> tuple[str, ...]:
    """The rules of `allow` that would have pruned nothing."""
    met = {claim.rule for ruling in rulings for claim in ruling.allowed}
    return tuple(
        sorted(rule for rule in allow if not any(_is_allowed(claim, frozenset({rule})) for claim in met))
    )


def avoided_machines(names: Sequence[str]) -> str:
    """Why a cell has no machine left."""
    return f"its machines are avoided: {few(names)}"


def few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{', '.join(names[:FEW])}{more}"


def check_rules(rules: Sequence[str]) -> frozenset[str]:
    """The rules to allow. Raises UsageError for a word that is no rule."""
    for rule in rules:
        if rule not in PRUNING and not rule.startswith(f"{KNOWN_BAD_RULE}:"):
            near = nearest(rule, PRUNING)
            meant = f"did you mean '{near}'?" if near else f"rules: {', '.join(PRUNING)}"
            raise UsageError("rule-unknown", f"--ignore-rule {rule[:60]}: unknown rule", hint=meant)
    return frozenset(rules)


def starts_by_kit(target: Target) -> bool:
    """Whether a kit can start its image: it is for GPUs, and not for AMD's."""
    return target.gpu and not rocm_of(target.cuda)


def turn_of(proven: datetime | None, seed: str) -> tuple[object, ...]:
    """What cells are sorted by: the oldest proof first, then what was never proven, by a hash of `seed`."""
    never = datetime.max.replace(tzinfo=UTC)
    return proven is None, proven or never, hashlib.sha256(seed.encode()).digest()
