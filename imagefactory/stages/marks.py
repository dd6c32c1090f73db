"""How far the images of targets are, by what the store knows: for lists, no registry is asked."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from imagefactory.access import Access, registry_place, repository_of
from imagefactory.errors import StoreError
from imagefactory.model import Target
from imagefactory.oci.layout import reference
from imagefactory.oci.transfer import was_sent
from imagefactory.actions.verdicts import Judge
from imagefactory.trust.verdict import Marks
from imagefactory.versions import natural


def find_marks(access: Access, targets: Iterable[Target], now: datetime) -> dict[str, Marks]:
    """The marks of targets by name. An image that is damaged has none but that it is there."""
    tags, judge = access.layout.tags(), Judge(access, now)
    sent, path = {}, ""
    if access.settings.registry.value:
        host, path = registry_place(access, "")
        sent = access.layout.recall("pushed", host) or {}

    def marks(target: Target) -> Marks:
        name = reference(target)
        if name not in tags:
            return Marks(built=f"{name}.sif" in tags)
        try:
            image = access.layout.load(name, tags[name])
            proven = {
                one.verdict.report.device.row
                for one in judge.stored(image)
                if one.proves and one.verdict and one.verdict.report.device
            }
        except StoreError:
            return Marks(built=True)
        pushed = was_sent(sent, repository_of(path, target.family), image.digest)
        return Marks(built=True, pushed=pushed, verified=tuple(sorted(proven, key=natural)))

    return {target.name: marks(target) for target in targets}
