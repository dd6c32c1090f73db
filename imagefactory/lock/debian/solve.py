"""The packages of a base, solved by what the archive offers."""

from __future__ import annotations

from imagefactory.errors import LockError
from imagefactory.gpu.platforms import architecture
from imagefactory.lock.debian.archive import Archive, open_archive
from imagefactory.lock.debian.lock import base_content_hash
from imagefactory.lock.debian.sources import MIRROR_HINT, DebianMirror
from imagefactory.model import Base, BaseLock
from imagefactory.progress import Progress


def lock_base(
    base: Base,
    previous: BaseLock | None,
    mirror: DebianMirror,
    progress: Progress,
    *,
    below: BaseLock | None = None,
    update: bool = False,
) -> BaseLock:
    """The lock of `base`, which stands on `below`: `previous` while not stale, else what the archive gives.

    With `update` the archive is always asked, and `previous` stays when it would give the same packages
    (so its date, and with it the base's digest, does not move for nothing). Raises LockError, ToolError.
    """
    decided = base_content_hash(base, below)
    current = previous is not None and previous.content_hash == decided
    if previous is not None and current and not update:
        return previous
    with open_archive(mirror, base.suite, architecture(base.platform), progress) as archive:
        fresh = solve_base(base, archive, decided)
    return previous if previous is not None and current and previous.packages == fresh.packages else fresh


def solve_base(base: Base, archive: Archive, content_hash: str) -> BaseLock:
    """What the archive gives `base` now."""
    chosen = archive.solve(base.packages, str(base.where))
    offers = archive.offered([name for name, _ in chosen])
    missing = [f"{name} {version}" for name, version in chosen if (name, version) not in offers]
    if missing:
        raise LockError(
            "hash-not-published",
            f"the signed indexes have no sha256 for {', '.join(missing)}",
            hint=MIRROR_HINT,
        )
    return BaseLock(
        base=base.name,
        suite=base.suite,
        content_hash=content_hash,
        source_date_epoch=archive.released,
        packages=tuple(offers[key] for key in chosen),
    )
