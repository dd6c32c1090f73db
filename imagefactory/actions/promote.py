"""Tags that follow verdicts.

verdicts/tags.py decides, here it is done. One at a time moves tags from one store; where another store's
promoter was at a tag meanwhile, all is read and decided anew. Where the policy requires approvals
(`promotion-signatures`), a promotion to a registry adds this user's own, and moves what enough keys approved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from imagefactory.access import Access
from imagefactory.errors import FactoryError, RegistryError
from imagefactory.oci.artifacts import WITHDRAWN, withdraw_tag
from imagefactory.oci.candidates import APPROVAL_TYPE, plain_tag
from imagefactory.oci.graph import Place, read_manifest
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.progress import Progress
from imagefactory.actions.audit import log_acts, log_statements
from imagefactory.actions.images import Promoting, read_candidates
from imagefactory.stages.sign import signing_key
from imagefactory.stages.statements import writing
from imagefactory.actions.verdicts import called, read_court
from imagefactory.trust.approval import Approvable, Approvals, judge_approvals, others, sign_approval
from imagefactory.trust.attached import Journal, Statement, attach, read_statements
from imagefactory.trust.audit import PROMOTE, AuditEntry
from imagefactory.verdicts.found import Found
from imagefactory.trust.judgement import Court, out_of_period
from imagefactory.trust.tags import PromotionRule, TagFate, approve_tag, decide_tags

TRIES = 3
"""How often tags are decided anew when another promoter moved one meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """What became of the tags. `faults` are those that could not be moved, with why."""

    target: str
    place: str
    fates: tuple[TagFate, ...]
    faults: tuple[tuple[str, FactoryError], ...] = ()

    @property
    def proven(self) -> bool:
        """Whether any tag points to a candidate that fulfils its rule."""
        return any(fate.proven for fate in self.fates)


def promote(access: Access, promoting: Promoting, progress: Progress) -> Promotion:
    """Lets the tags of a target follow the verdicts that can be relied on (promotion.decide_tags).

    Raises RegistryError or StoreError, also when others keep moving the same tags; and what `signing_key` and
    the key raise, where it has to approve.
    """
    place, court = promoting.place, read_court(access, promoting.now)
    local = isinstance(place.store, LayoutStore)
    rule = PromotionRule(
        plain=plain_tag(promoting.target),
        capabilities=promoting.target.capabilities,
        pointers_only=local and promoting.target.gpu,
    )
    with (
        writing(access, place, progress) as journal,
        progress.stage(f"{promoting.target.name}: tags in {place}"),
    ):
        for _ in range(TRIES):
            read, tags = read_candidates(access, promoting, court, progress)
            fates = decide_tags(rule, [one.candidate for one in read], tags)
            if court.trust.policy.signatures and journal:
                images = {one.candidate.digest: one.found for one in read}
                approver = _Approver(
                    access=access, promoting=promoting, court=court, journal=journal, images=images
                )
                fates = tuple(map(approver.approve, fates))
            faults = () if promoting.dry_run else _move_all(access, place, fates)
            if faults is not None:
                _log(access, promoting, fates, faults)
                return Promotion(target=promoting.target.name, place=str(place), fates=fates, faults=faults)
    raise RegistryError(
        "tags-contended",
        f"{place}: another process keeps moving the tags of {promoting.target.name}",
        hint="run one promotion at a time: try again when the other has ended",
    )


@dataclass(kw_only=True)
class _Approver:
    """Asks for approvals of what tags would point to, and gives this user's own. The caller is alone."""

    access: Access
    promoting: Promoting
    court: Court
    journal: Journal
    images: Mapping[str, Found]
    read: dict[str, list[bytes]] = field(default_factory=dict)

    def approve(self, fate: TagFate) -> TagFate:
        """The fate of a tag by the approvals that there are, with one of our own where a key signs here."""
        if fate.after not in self.images:  # it goes away, or stays where nobody put it by promotion
            return fate
        now, trust = self.promoting.now, self.court.trust
        needed, counted = trust.policy.signatures, self._approvals(fate.tag, fate.after)
        approved = counted.best()
        if fate.moved and not self._may_go_back(fate, needed):
            approved = counted.by(now)
        if not fate.proven:  # it stays, and nobody approves what no verdict verifies now
            lacks = f"; {len(approved)} of {needed} keys approved it" if len(approved) < needed else ""
            return replace(fate, why=f"{fate.why}{lacks}")
        may_sign = self.promoting.approve and not self.promoting.dry_run
        if len(approved) < needed and may_sign and self._sign(fate, counted.by(now)):
            approved = self._approvals(fate.tag, fate.after).by(now)
        return approve_tag(fate, needed, approved, others(trust, approved, now))

    def _may_go_back(self, fate: TagFate, needed: int) -> bool:
        """Whether approvals that have ended serve to move a tag: where what it points to must not keep it."""
        if not fate.before:
            return False
        known = fate.before in self.images
        return fate.withdrawn or not known or len(self._approvals(fate.tag, fate.before).best()) < needed

    def _wanted(self, tag: str, digest: str) -> Approvable:
        subject = replace(self.images[digest].subject, target=self.promoting.target.name)
        return Approvable(subject=subject, place=str(self.promoting.place), tag=tag)

    def _approvals(self, tag: str, digest: str) -> Approvals:
        wanted, trust = self._wanted(tag, digest), self.court.trust
        manifest = wanted.subject.manifest
        if manifest not in self.read:
            found = read_statements(self.promoting.place, manifest, APPROVAL_TYPE)
            self.read[manifest] = [one.envelope for one in found if one.envelope]
        revoked = self.images[digest].revoked
        return judge_approvals(self.read[manifest], wanted, trust, self.promoting.now, revoked)

    def _sign(self, fate: TagFate, approved: Sequence[str]) -> bool:
        """Attach our own approval; return whether one was added: by a trusted key that had not approved."""
        place, now, wanted = self.promoting.place, self.promoting.now, self._wanted(fate.tag, fate.after)
        key = signing_key(self.access, now)
        trusted = self.court.trust.key(key.keyid) if key else None
        if key is None or trusted is None or out_of_period(trusted, now):
            who = f"the key '{key.name}' is not trusted here" if key else "there is no signing key"
            self.access.tell(f"{wanted.tag} is not approved by you: {who}")
            return False
        if trusted.name in approved:
            return False
        envelope = sign_approval(wanted, key, now)
        there = read_manifest(place, wanted.subject.manifest).descriptor
        statement = Statement(kind=APPROVAL_TYPE, subject=there, envelope=envelope)
        attach(place, statement, self.journal)
        log_statements(self.access, called(place), (statement,))
        self.read[wanted.subject.manifest].append(envelope)
        return True


def _log(
    access: Access,
    promoting: Promoting,
    fates: Sequence[TagFate],
    faults: Sequence[tuple[str, FactoryError]],
) -> None:
    failed = {tag for tag, _ in faults}
    moved = [fate for fate in fates if fate.moved and fate.tag not in failed and not promoting.dry_run]
    log_acts(
        access,
        [
            AuditEntry(
                action=PROMOTE,
                what=f"{fate.tag} -> {fate.after or 'removed'}",
                where=called(promoting.place),
                why=fate.why,
            )
            for fate in moved
        ],
    )


def _move_all(
    access: Access, place: Place, fates: Sequence[TagFate]
) -> tuple[tuple[str, FactoryError], ...] | None:
    """Moves what moves; gives the faults, or None where another was at one of the tags meanwhile."""
    faults: list[tuple[str, FactoryError]] = []
    for fate in (one for one in fates if one.moved):
        there = place.store.manifest(place.repository, fate.tag)
        if there and there[0].digest == WITHDRAWN.descriptor.digest:
            there = None
        if (there[0].digest if there else "") != fate.before:
            return None
        if fate.after:
            root = read_manifest(place, fate.after)
            put = place.store.put_manifest(place.repository, root.data, root.descriptor.media_type, fate.tag)
            if put.digest != fate.after:
                return None
            continue
        try:
            if not withdraw_tag(place, fate.tag):
                what = (
                    f"{place.store.name} removes no tags: {fate.tag} names an empty image, which nothing runs"
                )
                access.tell(f"note: {what}")
        except RegistryError as error:
            faults.append((fate.tag, error))
    return tuple(faults)
