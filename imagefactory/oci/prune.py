"""Which candidates of a registry may go, and their removal with all that is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from imagefactory.oci.candidates import CANDIDATE, FALLBACK, GONE_WITH_IMAGE, REVOCATION_TYPE, Tagged
from imagefactory.oci.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What `prune` does with a candidate, and why. `parts` are the manifests below that go with it."""

    candidate: Tagged
    remove: bool
    why: str
    parts: tuple[str, ...] = ()


def plan_prune(tagged: Sequence[Tagged], before: datetime) -> tuple[Fate, ...]:
    """Which candidates of one repository go: those pushed before `before` that nothing else needs.

    Kept is what another tag points to (also by one of its platforms), what has a verdict that counts, what
    was pushed at an unknown time, and what does not carry the name of its content.
    """
    candidates = [image for image in tagged if image.kind == "candidate"]
    why = {candidate.tag: _why_kept(candidate, tagged, before) for candidate in candidates}
    kept = [image for image in tagged if why.get(image.tag, "not one")]
    needed = {digest for image in kept for digest in (image.digest, *image.parts)}
    return tuple(
        Fate(
            candidate=candidate,
            remove=not why[candidate.tag],
            why=why[candidate.tag] or f"pushed {_day(candidate.pushed)}",
            parts=tuple(part for part in candidate.parts if part not in needed),
        )
        for candidate in candidates
    )


def _why_kept(candidate: Tagged, tagged: Sequence[Tagged], before: datetime) -> str:
    mine = {candidate.digest, *candidate.parts}
    for other in tagged:
        if other.tag == candidate.tag:
            continue
        same = other.digest == candidate.digest
        if same or (other.kind != "candidate" and mine & {other.digest, *other.parts}):
            return f"{other.tag} points to it"
    match = CANDIDATE.fullmatch(candidate.tag)
    if match is None or match["hex"] not in candidate.names:
        return "its name is not that of its content: somebody else's"
    if candidate.verdicts:
        return "it has a verdict"
    if candidate.pushed is None:
        return "nobody knows when it was pushed"
    if candidate.pushed >= before:
        return f"pushed {_day(candidate.pushed)}"
    return ""


def _day(time: datetime | None) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if time else "?"


class Deleting(Store, Protocol):
    """A store whose manifests can be taken away: a registry."""

    def delete_manifest(self, repository: str, digest: str) -> None:
        """Removes a manifest and the tags that name it; nothing happens when there is none."""


def remove_candidate(store: Deleting, repository: str, fate: Fate) -> str:
    """Deletes a candidate, its platforms that nothing else has, and what is said of them.

    Revocations stay: the same lock gives the same digest, and some machine still has the verdict that was
    taken back.

    By digest: docker-registry 2.8 can remove no tag alone. So the tags are looked at once more just
    before; gives the one that points to the candidate now, and then nothing is removed, else "".
    """
    digest = fate.candidate.digest
    for tag in store.tags(repository):
        if tag != fate.candidate.tag and not CANDIDATE.fullmatch(tag) and not FALLBACK.fullmatch(tag):
            manifest = store.manifest(repository, tag)
            if manifest and manifest[0].digest == digest:
                return tag
    gone = [digest, *fate.parts]
    said = [
        referrer.digest
        for subject in gone
        for kind in GONE_WITH_IMAGE
        for referrer in store.referrers(repository, subject, kind)
    ]
    lists = [
        store.manifest(repository, subject.replace(":", "-"))
        for subject in gone
        if not store.referrers(repository, subject, REVOCATION_TYPE)
    ]
    for one in (*gone, *said, *(manifest[0].digest for manifest in lists if manifest)):
        store.delete_manifest(repository, one)
    return ""
