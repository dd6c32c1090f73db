"""What a lock and the lock of its base say that an image is made of. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from imagefactory.extras.sbom.look import Known, conda_qualifiers, debian_component
from imagefactory.extras.sbom.bill import Bill, Component, Kind, merge_carried, sorted_components
from imagefactory.lock.debian.lock import format_base_lock
from imagefactory.lock.files import lock_digest
from imagefactory.model import Base, BaseLock, Lock, LockedPackage, LockedWheel

NOT_AT_HAND = "the package is not at hand"


def lock_bill(
    lock: Lock,
    base: Base,
    base_lock: BaseLock | None,
    licences: Mapping[str, Known],
    carried: Iterable[Component] = (),
) -> Bill:
    """The bill of a target; `licences` by the sha256 of packages that were at hand, `carried` within them.

    Without `base_lock` the base is one component: an image that is pulled by digest.
    """
    found = [package_component(one, licences.get(one.sha256, ((), NOT_AT_HAND))) for one in lock.packages]
    if base_lock:
        found += debian_components(base_lock)
    else:
        found.append(_pulled(base.image))
    decided = f"{lock_digest(lock)}\n{base_digest(base, base_lock)}"
    components = {one.key: one for one in found}
    merge_carried(components, carried)
    return Bill(
        name=lock.target,
        digest=f"sha256:{hashlib.sha256(decided.encode()).hexdigest()}",
        created=base_lock.source_date_epoch if base_lock else None,
        components=sorted_components(components),
    )


def base_digest(base: Base, lock: BaseLock | None) -> str:
    """`sha256:...` of the base's lock, or of the image that is pulled."""
    if lock is None:
        return base.image.partition("@")[2]
    return f"sha256:{hashlib.sha256(format_base_lock(lock).encode()).hexdigest()}"


def package_component(package: LockedPackage, known: Known) -> Component:
    licences, why = known
    wheel = isinstance(package, LockedWheel)
    pairs = (
        (("file_name", package.filename),)
        if isinstance(package, LockedWheel)
        else conda_qualifiers(package.url, package.subdir, package.build)
    )
    return Component(
        kind=Kind.PYPI if wheel else Kind.CONDA,
        name=package.name,
        version=package.version,
        sha256=package.sha256,
        licences=licences,
        why=why,
        qualifiers=pairs,
    )


def debian_components(lock: BaseLock) -> list[Component]:
    # Debian's base-files is in every base, and its version begins with the release's number.
    told = next((one.version for one in lock.packages if one.name == "base-files"), "")
    distribution = ("debian", told.partition(".")[0].partition("+")[0])
    return [
        replace(
            debian_component(one.name, one.version, one.architecture, distribution),
            sha256=one.sha256,
            why=NOT_AT_HAND,
        )
        for one in lock.packages
    ]


def _pulled(image: str) -> Component:
    place, _, digest = image.partition("@")
    host, _, path = place.partition("/")
    repository = f"{host}/{path.partition(':')[0]}"
    return Component(
        kind=Kind.OCI,
        name=repository.rpartition("/")[2],
        version=digest,
        sha256=digest.removeprefix("sha256:"),
        why="its packages are told of its image",
        qualifiers=(("repository_url", repository),),
    )


def told_by(bill: Bill, seen: Iterable[Component]) -> Bill:
    """`bill` with the licences and sources that an image tells of the same packages."""
    by_key = {one.key: one for one in seen}
    return replace(
        bill,
        components=tuple(
            replace(
                one,
                licences=one.licences or told.licences,
                why="" if one.licences else told.why,
                source=told.source,
            )
            if (told := by_key.get(one.key))
            else one
            for one in bill.components
        ),
    )


def untold(bill: Bill) -> bool:
    """Whether an image could still tell something of it."""
    return any(one.why == NOT_AT_HAND for one in bill.components)


def with_hashes(seen: tuple[Component, ...], locked: Bill) -> tuple[Component, ...]:
    """What an image is seen to hold, with the hashes of the lock that it was made from."""
    by_key = {one.key: one for one in locked.components}
    return tuple(
        replace(one, sha256=one.sha256 or own.sha256, qualifiers=own.qualifiers)
        if (own := by_key.get(one.key))
        else one
        for one in seen
    )
