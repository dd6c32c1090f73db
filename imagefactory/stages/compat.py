"""Targets as `compat` and `find` judge them: by their locks, and what is known of their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from imagefactory.errors import StoreError
from imagefactory.project import Factory
from imagefactory.matrix.compat import CoverCandidate, KnownTarget, candidate_of
from imagefactory.model import Outcome, Target
from imagefactory.oci.layout import Layout, reference
from imagefactory.actions.locked import lock_state, read_target_lock, read_why
from imagefactory.actions.plan import recall_contents
from imagefactory.actions.verdicts import Judge


def read_candidates(factory: Factory | None, targets: Sequence[Target]) -> list[CoverCandidate]:
    """Targets with their locks. One that is stale or malformed is judged by its recipe alone."""
    if factory is None:
        return []
    tags, judge = factory.layout.tags(), Judge(factory, datetime.now(UTC))
    made = []
    for target in targets:
        state = lock_state(factory, target)
        why = read_why(factory, target) if state == Outcome.UNSOLVABLE else None
        lock = read_target_lock(factory, target) if state == "ok" else None
        known = KnownTarget(lock=lock, state=state, unsolvable=why.reason if why else "")
        if lock and reference(target) in tags:
            known = _recall(factory.layout, target, known, judge)
        made.append(candidate_of(target, known))
    return made


def _recall(layout: Layout, target: Target, known: KnownTarget, judge: Judge) -> KnownTarget:
    """With what an earlier scan of the target's image found, unless a layer of it was never scanned."""
    try:
        image = layout.image(reference(target))
        contents = recall_contents(layout, image) if image else None
        verdicts = judge.stored(image) if image and contents else ()
    except StoreError:
        return known  # damaged: `store` tells that, and here the locked wheels still speak
    return replace(known, image=contents, verdicts=verdicts)
