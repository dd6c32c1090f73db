"""The bill of materials of the locks of a target, or of an image."""

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
from imagefactory.scan.layers import bounded

LOCK, TARGET = "imagefactory.lock", "imagefactory.target"
"""Labels of an image: the digest of its lock, and its target."""

Recipes = Callable[[], Project | None]


def bill_of(access: Access, recipes: Recipes, name: str, progress: Progress) -> BillOfMaterials:
    """Return the bill of a target, or of an image in the store (name or digest) or a registry (full name).

    `recipes` returns the project, None if there is none. Raises UsageError for a file, NothingSelectedError
    for an unknown name, LockError and StaleError like `require_lock`, and the errors of reading.
    """
    if not name or name.startswith((".", "/", "~")) or Path(name).is_file():
        raise UsageError(
            "reference-invalid",
            f"'{name}' is not a target or an image",
            hint="pass a target, an image of the store or HOST/NAME:TAG",
        )
    layout = access.layout
    if "/" in name:
        location, repository = find_place(access, name)
        return image_bill(access, recipes, (name, repository, location.tag_or_digest), progress)
    tags = layout.tags()
    if name in tags or DIGEST.fullmatch(name):
        digest = tags[name].digest if name in tags else name
        return image_bill(access, recipes, (name, _store(access), digest), progress)
    project = None if ":" in name else recipes()
    if project is None:
        raise NothingSelectedError(
            "image-not-found",
            f"no image '{name}' in {layout.path}",
            hint="list the images: imagefactory image list",
        )
    return target_bill(project, project.select_single(name), progress)


def target_bill(project: Project, target: Target, progress: Progress) -> BillOfMaterials:
    """Return the bill of the locks, with licenses from the cache, or else from the image of the target.

    Raises LockError and StaleError like `require_lock`.
    """
    lock = require_lock(project, target)
    bill = _locked(project, target, lock, _cached_licenses(project, lock), _cached_carried(project, lock))
    with project.layout.in_use(progress):
        tagged = project.layout.tags().get(reference(target))
        if tagged is None or not components_without_license(bill):
            return bill
        repository = _store(project)
        image = image_at(repository, tagged.digest)
        if dict(image.config.labels).get(LOCK) != lock_digest(lock):
            return bill
        layers = LayerStack()
        for (
            layer
        ) in image.layers:  # the lowest, of the base, first: the cache has most licenses of the others
            _add(layers, repository, layer)
            bill = with_image_licenses(bill, layers.components())
            if not components_without_license(bill):
                break
    return bill


def image_bill(
    access: Access, recipes: Recipes, location: tuple[str, StoreRepository, str], progress: Progress
) -> BillOfMaterials:
    """Return the bill of the layers. Hashes of wheels and Debian packages come from the lock."""
    name, repository, digest = location
    with access.layout.in_use(progress):
        image = image_at(repository, digest)
        layers = LayerStack()
        with progress.task("read layers", total=sum(layer.descriptor.size for layer in image.layers)) as task:
            for layer in image.layers:
                _add(layers, repository, layer)
                task.advance(layer.descriptor.size)
    seen = layers.components()
    for fault in layers.faults:
        access.tell(fault)
    if not any(component.kind is PackageType.DEB for component in seen):
        access.tell(f"{name} has no package list of dpkg, so the bill does not have its system packages")
    if locked := _lock_bill_of_image(recipes, image):
        seen = with_hashes(seen, locked)
    return BillOfMaterials(
        name=name, digest=image.manifest, created=_moment(image.config.created), components=seen
    )


def _lock_bill_of_image(recipes: Recipes, image: ImageLocation) -> BillOfMaterials | None:
    """Return the bill of the lock that the image names, None if the project does not have it."""
    labels = dict(image.config.labels)
    project = recipes() if labels.get(LOCK) else None
    target = (
        next((row for row in project.targets if row.name == labels.get(TARGET)), None) if project else None
    )
    if project is None or target is None:
        return None
    lock = read_target_lock(project, target)
    if lock is None or lock_digest(lock) != labels[LOCK]:
        return None
    return _locked(project, target, lock, {})


def _locked(
    project: Project,
    target: Target,
    lock: Lock,
    licenses: dict[str, LicenseAndSource],
    carried: Sequence[BillComponent] = (),
) -> BillOfMaterials:
    base = project.base_of(target)
    base_lock = None if base.image else read_base_lock(project.base_lock_path(base))
    if base_lock is None and not base.image:
        raise LockError(
            "lock-missing", f"the base {base.name} has no lock", hint=f"run imagefactory lock {target.name}"
        )
    return lock_bill(lock, base, base_lock, licenses, carried)


def _cached_licenses(access: Access, lock: Lock) -> dict[str, LicenseAndSource]:
    cache = PackageCache(access.settings.cache_path, package_index(access))
    absent = set(cache.missing(lock.packages))
    return {
        package.sha256: package_licenses(package, cache.path(package))
        for package in lock.packages
        if package not in absent
    }


def _cached_carried(access: Access, lock: Lock) -> list[BillComponent]:
    """Return the libraries that cached wheels declare to contain, and print faults of the declarations."""
    cache = PackageCache(access.settings.cache_path, package_index(access))
    absent = set(cache.missing(lock.packages))
    components = list[BillComponent]()
    for package in lock.packages:
        carried, faults = package_carried(package, cache.path(package)) if package not in absent else ((), ())
        components += carried
        for fault in faults:
            access.tell(fault)
    return components


def _store(access: Access) -> StoreRepository:
    return StoreRepository(store=LayoutStore(access.layout), repository="")


def _add(layers: LayerStack, repository: StoreRepository, layer: OciLayer) -> None:
    chunks: Iterator[bytes] = repository.store.read(repository.repository, layer.descriptor)
    try:
        layers.add(bounded(plain_layer(layer.descriptor.media_type, chunks)))
    except CorruptDataError as error:
        raise layer_error(layer.descriptor.digest, error) from error


def _moment(created: str) -> int | None:
    """Return the `created` time of a config (RFC 3339) in seconds since 1970, None if it is not a time."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return None
    return int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp())
