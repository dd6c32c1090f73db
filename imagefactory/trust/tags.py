"""Decide where the tags of a target point, by the valid verdicts. Pure functions.

    2.3-cu121-sm80   the newest candidate that is verified for 8.0
    2.3-cu121        the newest candidate that is verified for every capability that the recipe requires

A tag moves to an older candidate only if its current candidate was revoked or failed in a later run. Then it
moves to the newest other candidate that fulfills the rule, or it is removed. Expired verdicts alone move no
tag. Annotations decide which candidate is newer; only signed statements decide what is verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum

from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.drivers import older
from imagefactory.model import Outcome
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from imagefactory.verify.report import MULTI_GPU_LEVELS

DENIALS = (Outcome.WRONG_NUMBERS, Outcome.NO_KERNEL, Outcome.LOAD_FAILED)
"""Negative outcomes that are about the image, not about the machine of the run."""
_NO_TIME = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagCandidate:
    """An image that tags may point to. `digest` is the digest of an index or a manifest.

    `name` is the tag of the candidate. `pushed` is its time; None means unknown, which is older than all
    others. Of two candidates with equal times, the one with more `platforms` is newer. `own` means that this
    store pushed it, or that its record has the MAC of the nonce store's key.
    """

    name: str
    digest: str
    pushed: datetime | None
    judged: tuple[VerificationResult, ...]
    platforms: int = 1
    own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionRule:
    """The rule of a target: its plain tag, and the capabilities on which an image with that tag must be
    verified.

    If no capability is required (an image for CPUs), the plain tag points to the newest candidate with `own`:
    verdicts do not exist for it, and a pushed image has passed the smoke test. With `pointers_only`, the
    plain tag is not moved: in the store on this machine, a build sets it.
    """

    plain: str
    capabilities: tuple[str, ...]
    pointers_only: bool = False


class CapabilityStatus(StrEnum):
    """The status of a candidate for a capability."""

    PROVEN = "proven"
    OPEN = "open"
    DENIED = "denied"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class TagDecision:
    """The decision about a tag. `before` and `after` are digests, empty for none. `why` is one line.

    `proven` means that the new image fulfills the rule of the tag, `withdrawn` that the current image must
    lose the tag. If a policy requires approvals, `approved` are the keys with a valid approval, and `missing`
    is how many more approvals are needed for the digest `wanted`.
    """

    tag: str
    before: str
    after: str
    proven: bool
    why: str
    withdrawn: bool = False
    approved: tuple[str, ...] = ()
    missing: int = 0
    wanted: str = ""

    @property
    def moved(self) -> bool:
        return self.before != self.after


def capability_tag(plain: str, capability: str) -> str:
    """Return the tag of a target for one capability, such as `2.3-cu121-sm80`."""
    return f"{plain}-{parse_capability(capability).sm.replace('_', '')}"


def capability_of(verdict: Verdict) -> str:
    """Return the capability of a verdict, empty if it is about no GPU or about a MIG slice."""
    device = verdict.report.device
    return device.capability if device and not device.part else ""


def capability_status(judged: Sequence[VerificationResult], capability: str) -> tuple[CapabilityStatus, str]:
    """Return the status of one image on a capability by its verdicts, and a short reason.

    A `verified` verdict counts until a later negative one, on the same or a newer driver. Verdicts about
    several GPUs do not count for one GPU.
    """
    about = [
        (judgement, judgement.verdict)
        for judgement in judged
        if judgement.verdict
        and capability_of(judgement.verdict) == capability
        and judgement.verdict.report.level not in MULTI_GPU_LEVELS
    ]
    good = [verdict for judgement, verdict in about if judgement.standing is VerdictStatus.GOOD]
    denials = [verdict for verdict in good if verdict.report.outcome in DENIALS]
    for verdict in good:
        if verdict.report.outcome is Outcome.VERIFIED and not any(
            _denies(denial, verdict) for denial in denials
        ):
            return CapabilityStatus.PROVEN, "verified"
    if denials:
        return CapabilityStatus.DENIED, max(denials, key=_ended).report.outcome.value
    passed = [judgement for judgement, verdict in about if verdict.report.outcome is Outcome.VERIFIED]
    words = {judgement.standing for judgement in passed} - {VerdictStatus.GOOD}
    if VerdictStatus.REVOKED in words:
        return CapabilityStatus.REVOKED, VerdictStatus.REVOKED.value
    if words:
        return CapabilityStatus.OPEN, ", ".join(sorted(words))
    return CapabilityStatus.OPEN, max(
        good, key=_ended
    ).report.outcome.value if good else Outcome.NOT_TESTED.value


def _ended(verdict: Verdict) -> datetime:
    return verdict.report.ended


def _denies(denial: Verdict, verdict: Verdict) -> bool:
    theirs, ours = (row.report.hardware.driver if row.report.hardware else "" for row in (denial, verdict))
    try:
        on_older = older(theirs, ours)
    except ValueError:  # a driver that no rule can compare: the last result counts
        on_older = False
    return _ended(denial) > _ended(verdict) and not on_older


def decide_tags(
    rule: PromotionRule, candidates: Sequence[TagCandidate], tags: Mapping[str, str]
) -> tuple[TagDecision, ...]:
    """Return the decisions about all tags of a target, the tags of single capabilities first.

    `tags` are the current digests by tag. `candidates` should include these digests.
    """
    newest = _newest_first(candidates)
    spoken = {
        capability_of(judgement.verdict) for each in newest for judgement in each.judged if judgement.verdict
    } - {""}
    capabilities = sorted({*rule.capabilities, *spoken}, key=parse_capability)
    tags_and_needs: list[tuple[str, tuple[str, ...]]] = [
        (capability_tag(rule.plain, judgement), (judgement,)) for judgement in capabilities
    ]
    if not rule.pointers_only:
        tags_and_needs.append((rule.plain, rule.capabilities))
    return tuple(_decide(tag, needs, newest, tags.get(tag, "")) for tag, needs in tags_and_needs)


def approve_tag(
    decision: TagDecision, needed: int, approved: Sequence[str], other: Sequence[str]
) -> TagDecision:
    """Return the decision about a tag that `needed` keys must approve and the keys in `approved` did approve.

    With too few approvals the tag stays, or it is removed if its image was withdrawn. `other` are the keys
    that could still approve.
    """
    missing = max(0, needed - len(approved))
    by = f"approved by {', '.join(approved) or 'nobody'}"
    if not missing:
        return replace(decision, approved=tuple(approved), why=f"{decision.why}; {by}", wanted=decision.after)
    missing_keys = f"{missing} more {'key' if missing == 1 else 'keys'} must approve"
    missing_keys += (
        f": {', '.join(other)}" if len(other) >= missing else f", but only {len(other)} others are trusted"
    )
    return replace(
        decision,
        after="" if decision.withdrawn else decision.before,
        proven=False,
        approved=tuple(approved),
        missing=missing,
        wanted=decision.after,
        why=f"{decision.why}; {by}, {missing_keys}",
    )


def newest_first(candidates: Sequence[TagCandidate]) -> tuple[str, ...]:
    """Return the digests of the candidates, the newest first. Candidates of unknown time come last."""
    return tuple(candidate.digest for candidate in _newest_first(candidates))


def _newest_first(candidates: Sequence[TagCandidate]) -> list[TagCandidate]:
    return sorted(
        candidates,
        key=lambda candidate: (candidate.pushed or _NO_TIME, candidate.platforms, candidate.name),
        reverse=True,
    )


def _decide(tag: str, needs: Sequence[str], newest: Sequence[TagCandidate], before: str) -> TagDecision:
    if not needs:  # no verdict distinguishes ours from others
        newest = [candidate for candidate in newest if candidate.own] or newest
    row_index = next((i for i, candidate in enumerate(newest) if candidate.digest == before), None)
    withdrawal = "" if row_index is None else _withdrawal_reason(newest[row_index], needs)
    for i, candidate in enumerate(newest):
        if any(capability_status(candidate.judged, need)[0] is not CapabilityStatus.PROVEN for need in needs):
            continue
        if not needs and not candidate.own:
            continue
        reason = f"{candidate.name} is verified for {_list(needs)}"
        if not needs:
            reason = f"{candidate.name} is the newest, and no GPU is required"
        if row_index is not None and i > row_index and not withdrawal:
            break
        if withdrawal:
            reason = f"{newest[row_index or 0].name} is {withdrawal}; {reason}"
        return TagDecision(
            tag=tag,
            before=before,
            after=candidate.digest,
            proven=True,
            why=reason,
            withdrawn=bool(withdrawal),
        )
    if withdrawal:
        name = newest[row_index or 0].name
        reason = f"{name} is {withdrawal}, and no other candidate is verified for {_list(needs)}"
        return TagDecision(tag=tag, before=before, after="", proven=False, why=reason, withdrawn=True)
    return TagDecision(
        tag=tag, before=before, after=before, proven=False, why=_missing_reason(newest, row_index, needs)
    )


def _withdrawal_reason(candidate: TagCandidate, needs: Sequence[str]) -> str:
    """Return the reason why a candidate must lose its tag, or ""."""
    for need in needs:
        how, word = capability_status(candidate.judged, need)
        if how in (CapabilityStatus.DENIED, CapabilityStatus.REVOKED):
            return f"{word} on {need}"
    return ""


def _missing_reason(newest: Sequence[TagCandidate], row_index: int | None, needs: Sequence[str]) -> str:
    """Return what is missing for the newest candidate, or for the one that the tag points to."""
    if not newest:
        return "no candidate"
    candidate = newest[row_index or 0]
    if not needs:
        return f"{candidate.name} was not pushed by this store, and its record has no MAC of the nonce key"
    lacks = [
        f"{need} ({word})"
        for need, (how, word) in ((need, capability_status(candidate.judged, need)) for need in needs)
        if how is not CapabilityStatus.PROVEN
    ]
    return f"{candidate.name} lacks {', '.join(lacks)}"


def _list(capabilities: Sequence[str]) -> str:
    return ", ".join(capabilities)
