"""The packages of a base, solved by what the archive offers."""

from __future__ import annotations

from imagefactory.errors import LockError
from imagefactory.lock.debian.archive import Archive, open_archive
from imagefactory.lock.debian.file import base_content_hash
from imagefactory.lock.debian.sources import MIRROR_HINT, DebianMirror
from imagefactory.model import Base, BaseLock
from imagefactory.progress import Progress


def lock_base(
    base: Base,
    previous: BaseLock | None,
    mirror: DebianMirror,
    progress: Progress,
    *,
    update: bool = False,
) -> BaseLock:
    """The lock of `base`: `previous` while it is not stale, else what the archive gives today.

    With `update` the archive is always asked, and `previous` stays when it would give the same packages
    (so its date, and with it the base's digest, does not move for nothing). Raises LockError, ToolError.
    """
    current = previous is not None and previous.content_hash == base_content_hash(base)
    if previous is not None and current and not update:
        return previous
    with open_archive(mirror, base.suite, progress) as archive:
        fresh = solve_base(base, archive)
    return previous if previous is not None and current and previous.packages == fresh.packages else fresh


def solve_base(base: Base, archive: Archive) -> BaseLock:
    """What the archive gives `base` now."""
    chosen = archive.solve(base.packages)
    offers = archive.offered([name for name, _ in chosen])
    missing = [f"{name} {version}" for name, version in chosen if (name, version) not in offers]
    if missing:
        raise LockError(f"the signed indexes give no sha256 for {', '.join(missing)}", hint=MIRROR_HINT)
    return BaseLock(
        base=base.name,
        suite=base.suite,
        content_hash=base_content_hash(base),
        source_date_epoch=archive.released,
        packages=tuple(offers[key] for key in chosen),
    )
