"""What a lock's wheels need of the system and their base has not: told where the lock is made."""

from __future__ import annotations

from imagefactory.access import package_index
from imagefactory.project import Factory
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.system_libraries import Lacking, find_lacking
from imagefactory.model import Lock, Target


def lacking_libraries(
    factory: Factory, target: Target, lock: Lock, under: Lock | None
) -> tuple[Lacking, ...]:
    """Of the wheels that are not `under`'s. None where what the base has is not known: it is pulled, or has
    no lock yet; and none for conda's targets, whose own packages have such libraries.

    Raises LockError for a base's lock that is malformed.
    """
    base = factory.base_of(target)
    known = None if base.image or lock.conda else read_base_lock(factory.base_lock_path(base))
    if known is None:
        return ()
    cache = PackageCache(factory.settings.cache_path, package_index(factory))
    below = {wheel.sha256 for wheel in under.wheels} if under else set()
    return find_lacking(
        (wheel for wheel in lock.wheels if wheel.sha256 not in below),
        (package.name for package in known.packages),
        lambda wheel: None if cache.missing((wheel,)) else cache.path(wheel),
    )
