"""The bill of materials of a target's locks, or of what is in an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.access import Access, package_index
from imagefactory.actions.inspect import ImageLocation, find_place, image_at
from imagefactory.actions.locked import read_target_lock, require_lock
from imagefactory.errors import LockError, NothingSelectedError, UsageError
from imagefactory.extras.sbom.bill import BillComponent, BillOfMaterials, PackageType
from imagefactory.extras.sbom.look import (
    LayerStack,
    LicenseAndSource,
    components_without_license,
    lock_bill,
    package_carried,
    package_licenses,
    with_hashes,
    with_image_licenses,
)
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.download import PackageCache
from imagefactory.lock.files import lock_digest
from imagefactory.model import Lock, Target
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.inflate import CorruptDataError, plain_layer
from imagefactory.oci.layout import LayoutStore, reference
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.store import DIGEST
from imagefactory.oci.tar_stream import layer_error
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.recipes.expand import select_single
from imagefactory.scan.layers import bounded

LOCK, TARGET = "imagefactory.lock", "imagefactory.target"
"""An image's labels: the digest of the lock that it was made from, and of which target."""

Recipes = Callable[[], Project | None]


def bill_of(access: Access, recipes: Recipes, name: str, progress: Progress) -> BillOfMaterials:
    """The bill of a target, of an image of the store (its name or digest) or of a registry's (in full).

    `recipes` gives the factory, None where there is none. Raises UsageError for a file, NothingSelectedError
    for a name that is nothing of these, LockError and StaleError as `require_lock`, and what reading raises.
    """
    if not name or name.startswith((".", "/", "~")) or Path(name).is_file():
        raise UsageError(
            "reference-invalid",
            f"'{name}' is not a target or an image",
            hint="pass a target, an image of the store or HOST/NAME:TAG",
        )
    layout = access.layout
    if "/" in name:
        asked, place = find_place(access, name)
        return image_bill(access, recipes, (name, place, asked.tag_or_digest), progress)
    tags = layout.tags()
    if name in tags or DIGEST.fullmatch(name):
        wanted = tags[name].digest if name in tags else name
        return image_bill(access, recipes, (name, _store(access), wanted), progress)
    factory = None if ":" in name else recipes()
    if factory is None:
        raise NothingSelectedError(
            "image-not-found", f"no image '{name}' in {layout.path}", hint="see imagefactory image list"
        )
    return target_bill(factory, select_single(factory.targets, name), progress)


def target_bill(factory: Project, target: Target, progress: Progress) -> BillOfMaterials:
    """What the target's locks name. Licences are told by packages in the cache, else by the target's image.

    Raises LockError and StaleError as `require_lock` does.
    """
    lock = require_lock(factory, target)
    bill = _locked(factory, target, lock, _cached_licenses(factory, lock), _cached_carried(factory, lock))
    with factory.layout.in_use(progress):
        tagged = factory.layout.tags().get(reference(target))
        if tagged is None or not components_without_license(bill):
            return bill
        place = _store(factory)
        image = image_at(place, tagged.digest)
        if dict(image.config.labels).get(LOCK) != lock_digest(lock):
            return bill
        layers = LayerStack()
        for (
            layer
        ) in image.layers:  # the base's are the lowest; wheels are told by the cache where it has them
            _add(layers, place, layer)
            bill = with_image_licenses(bill, layers.components())
            if not components_without_license(bill):
                break
    return bill


def image_bill(
    access: Access, recipes: Recipes, asked: tuple[str, StoreRepository, str], progress: Progress
) -> BillOfMaterials:
    """What is in the layers. Hashes of wheels and Debian's packages are in no image, but in its lock."""
    name, place, wanted = asked
    with access.layout.in_use(progress):
        image = image_at(place, wanted)
        layers = LayerStack()
        with progress.task("read layers", total=sum(one.descriptor.size for one in image.layers)) as task:
            for layer in image.layers:
                _add(layers, place, layer)
                task.advance(layer.descriptor.size)
    seen = layers.components()
    for fault in layers.faults:
        access.tell(fault)
    if not any(one.kind is PackageType.DEB for one in seen):
        access.tell(f"{name} has no package list of dpkg, so the bill does not have its system packages")
    if locked := _lock_bill_of_image(recipes, image):
        seen = with_hashes(seen, locked)
    return BillOfMaterials(
        name=name, digest=image.manifest, created=_moment(image.config.created), components=seen
    )


def _lock_bill_of_image(recipes: Recipes, image: ImageLocation) -> BillOfMaterials | None:
    """The bill of the very lock that the image says it was made from, None where that is not at hand."""
    labels = dict(image.config.labels)
    factory = recipes() if labels.get(LOCK) else None
    target = (
        next((one for one in factory.targets if one.name == labels.get(TARGET)), None) if factory else None
    )
    if factory is None or target is None:
        return None
    lock = read_target_lock(factory, target)
    if lock is None or lock_digest(lock) != labels[LOCK]:
        return None
    return _locked(factory, target, lock, {})


def _locked(
    factory: Project,
    target: Target,
    lock: Lock,
    licences: dict[str, LicenseAndSource],
    carried: Sequence[BillComponent] = (),
) -> BillOfMaterials:
    base = factory.base_of(target)
    base_lock = None if base.image else read_base_lock(factory.base_lock_path(base))
    if base_lock is None and not base.image:
        raise LockError(
            "lock-missing", f"the base {base.name} has no lock", hint=f"run imagefactory lock {target.name}"
        )
    return lock_bill(lock, base, base_lock, licences, carried)


def _cached_licenses(access: Access, lock: Lock) -> dict[str, LicenseAndSource]:
    cache = PackageCache(access.settings.cache_path, package_index(access))
    absent = set(cache.missing(lock.packages))
    return {one.sha256: package_licenses(one, cache.path(one)) for one in lock.packages if one not in absent}


def _cached_carried(access: Access, lock: Lock) -> list[BillComponent]:
    """What wheels of the cache say that they carry; what is wrong with it is told."""
    cache = PackageCache(access.settings.cache_path, package_index(access))
    absent = set(cache.missing(lock.packages))
    found = list[BillComponent]()
    for one in lock.packages:
        carried, faults = package_carried(one, cache.path(one)) if one not in absent else ((), ())
        found += carried
        for fault in faults:
            access.tell(fault)
    return found


def _store(access: Access) -> StoreRepository:
    return StoreRepository(store=LayoutStore(access.layout), repository="")


def _add(layers: LayerStack, place: StoreRepository, layer: OciLayer) -> None:
    chunks: Iterator[bytes] = place.store.read(place.repository, layer.descriptor)
    try:
        layers.add(bounded(plain_layer(layer.descriptor.media_type, chunks)))
    except CorruptDataError as error:
        raise layer_error(layer.descriptor.digest, error) from error


def _moment(created: str) -> int | None:
    """Seconds since 1970 of a config's `created` (RFC 3339); None where it says none."""
    try:
        told = datetime.fromisoformat(created)
    except ValueError:
        return None
    return int(told.replace(tzinfo=told.tzinfo or UTC).timestamp())
