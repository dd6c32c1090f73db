"""Which candidates of a registry may go, and their removal with all that is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from imagefactory.oci.candidates import (
    CANDIDATE,
    FALLBACK,
    PUSHED_TYPE,
    REVOCATION_TYPE,
    TEST_RESULT_TYPE,
    VERDICT_TYPE,
    Tagged,
)
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
    candidates = [one for one in tagged if one.kind == "candidate"]
    why = {one.tag: _why_kept(one, tagged, before) for one in candidates}
    kept = [one for one in tagged if why.get(one.tag, "not one")]
    needed = {digest for one in kept for digest in (one.digest, *one.parts)}
    return tuple(
        Fate(
            candidate=one,
            remove=not why[one.tag],
            why=why[one.tag] or f"pushed {_day(one.pushed)}",
            parts=tuple(part for part in one.parts if part not in needed),
        )
        for one in candidates
    )


def _why_kept(one: Tagged, tagged: Sequence[Tagged], before: datetime) -> str:
    mine = {one.digest, *one.parts}
    for other in tagged:
        if other.tag == one.tag:
            continue
        same = other.digest == one.digest
        if same or (other.kind != "candidate" and mine & {other.digest, *other.parts}):
            return f"{other.tag} points to it"
    match = CANDIDATE.fullmatch(one.tag)
    if match is None or match["hex"] not in one.names:
        return "its name is not that of its content: somebody else's"
    if one.verdicts:
        return "it has a verdict"
    if one.pushed is None:
        return "nobody knows when it was pushed"
    if one.pushed >= before:
        return f"pushed {_day(one.pushed)}"
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
            found = store.manifest(repository, tag)
            if found and found[0].digest == digest:
                return tag
    gone = [digest, *fate.parts]
    said = [
        found.digest
        for one in gone
        for kind in (PUSHED_TYPE, VERDICT_TYPE, TEST_RESULT_TYPE)
        for found in store.referrers(repository, one, kind)
    ]
    lists = [
        store.manifest(repository, one.replace(":", "-"))
        for one in gone
        if not store.referrers(repository, one, REVOCATION_TYPE)
    ]
    for one in (*gone, *said, *(found[0].digest for found in lists if found)):
        store.delete_manifest(repository, one)
    return ""
