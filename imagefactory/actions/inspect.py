"""From what a person names to what is in it: a path, a target, an image of the store or of a registry.

scan.py reads the bytes; here is what the name means, and which word says where the answer comes from.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access, package_index
from imagefactory.errors import BuildError, NothingSelectedError, UsageError
from imagefactory.project import Factory
from imagefactory.fs import replacing, seal, unseal
from imagefactory.gpu.frameworks import Role, find_framework, role_of
from imagefactory.gpu.knowledge import scanned
from imagefactory.gpu.values import Contents, Package
from imagefactory.lock.download import PackageCache
from imagefactory.model import Lock, LockedConda, LockedPackage, Target
from imagefactory.oci.graph import Place
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.model import Descriptor
from imagefactory.oci.sif import is_sif_manifest, load_sif
from imagefactory.oci.store import DIGEST, parse_reference
from imagefactory.progress import Progress, Quiet
from imagefactory.recipes.expand import select_one
from imagefactory.scan.files import find_in
from imagefactory.scan.findings import format_contents
from imagefactory.scan.records import LayerScan, format_scan, parse_scan
from imagefactory.actions.locked import read_target_lock
from imagefactory.stages.scan import (
    Inspected,
    find_place,
    inspect_kept_sif,
    inspect_path,
    inspect_registry,
    scan_stored,
)
from imagefactory.stages.stored import stored_image, stored_sif
from imagefactory.actions.verdicts import Judge
from imagefactory.trust.verdict import Judged

LARGE = 1 << 20  # bytes; the GPU code of a framework is in no package smaller than that


def inspect_place(access: Access, recipes: Callable[[], Factory], name: str, progress: Progress) -> Inspected:
    """What `name` holds: a path that exists, a reference with its registry, a digest or tag, a target.

    `recipes` gives the factory, where a name may be a target's. Raises UsageError for a name that is
    nothing of these, BuildError for a target of which nothing is at hand, and what reading raises.
    """
    path = Path(name)
    if not name:
        raise UsageError(
            "argument-missing", "the name is empty", hint="name a file, a directory, an image or a target"
        )
    if path.exists():
        return inspect_path(access, path, progress)
    if name.startswith((".", "/", "~")) or path.suffix in (".whl", ".sif", ".so", ".conda"):
        raise UsageError(
            "path-not-found",
            f"{name} does not exist",
            hint="name an existing file or directory, an image or a target",
        )
    if "/" in name:
        return inspect_registry(access, parse_reference(name), progress)
    if DIGEST.fullmatch(name):
        return _inspect_digest(access, name, progress)
    tags = access.layout.tags()
    if name in tags:
        return _inspect_stored(access, name, tags[name], progress)
    if ":" in name:
        near = _near(name, tags)
        hint = f"did you mean {near}?" if near else "imagefactory store list"
        raise NothingSelectedError("image-not-found", f"no image '{name}' in {access.layout.path}", hint=hint)
    return _inspect_target(recipes(), name, progress)


def inspected_verdicts(access: Access, name: str, digest: str, now: datetime) -> tuple[Judged, ...]:
    """The judged verdicts on what `inspect_place` found under `name`, from the store or registry it is in.

    A file's are none: those of the image that it was made from are not about the file.
    """
    judge = Judge(access, now)
    if not digest or Path(name).exists():
        return ()
    if "/" not in name:
        return judge.there(Place(store=LayoutStore(access.layout), repository=""), digest)
    return judge.there(find_place(access, name)[1], digest)


def _near(name: str, known: Iterable[str]) -> str:
    return "".join(difflib.get_close_matches(name, known, n=1))


def _inspect_digest(access: Access, digest: str, progress: Progress) -> Inspected:
    found = access.layout.manifest(digest)
    if found is None:
        raise NothingSelectedError(
            "image-not-found", f"no image {digest} in {access.layout.path}", hint="imagefactory store list"
        )
    return _inspect_stored(access, digest, found[0], progress)


def _inspect_stored(access: Access, name: str, descriptor: Descriptor, progress: Progress) -> Inspected:
    """An image of the store, or a .sif that is kept there."""
    layout = access.layout
    if is_sif_manifest(json.loads(layout.read(descriptor))):
        return inspect_kept_sif(access, load_sif(layout, descriptor.digest), progress)
    return scan_stored(access, layout.load(name, descriptor), progress)


def _inspect_target(factory: Factory, name: str, progress: Progress) -> Inspected:
    """The target's image; else the .sif apptainer built; else what is known of its lock's packages."""
    target = select_one(factory.targets, name)
    image = stored_image(factory, target)
    if image is not None:
        return scan_stored(factory, image, progress)
    sif = stored_sif(factory, target)
    if sif is not None:
        return inspect_kept_sif(factory, sif, progress)
    return _inspect_lock(factory, target, progress)


def _inspect_lock(factory: Factory, target: Target, progress: Progress) -> Inspected:
    lock = read_target_lock(factory, target)
    if lock is None:
        raise BuildError(
            "gpu-code-unknown",
            f"{target.name} is neither built nor locked, so its GPU code is not known",
            hint=f"imagefactory lock {target.name} && imagefactory build {target.name}",
        )
    cached, tabled, missing = _known_packages(factory, lock, progress)
    contents = join_contents(target.name, lock, (*cached, *tabled))
    if not _answers(contents, missing):
        raise BuildError(
            "gpu-code-unknown",
            f"{target.name} is not built, and neither the cache nor the tables have its GPU code",
            hint=f"imagefactory build {target.name}, "
            f"or see what is documented: imagefactory compat {target.name}",
        )
    known = [f"{len(cached)} from the cache"] if cached else []
    known += [f"{len(tabled)} from the tables of scanned wheels"] if tabled else []
    known += [f"{len(missing)} large ones not looked into"] if missing else []
    how = f"its lock, for it is not built: of {len(lock.packages)} packages {', '.join(known)}"
    return Inspected(contents=contents, how=how, platform=target.platform.partition("/")[2])


def _known_packages(
    access: Access, lock: Lock, progress: Progress
) -> tuple[list[Contents], list[Contents], list[LockedPackage]]:
    """What is known of a lock's packages: those scanned in the cache, those in the tables, the others."""
    cache = PackageCache(access.settings.cache_path, package_index(access))
    absent = set(cache.missing(lock.packages))
    here = [package for package in lock.packages if package not in absent]
    cached, tabled, missing = [], [], []
    if here:
        with progress.task("scan packages of the cache", total=sum(one.size for one in here)) as task:
            for package in here:
                cached.append(_scan_cached(cache.path(package), access.settings.worker_count))
                task.advance(package.size)
    for package in lock.packages:
        known = scanned(package.sha256) if package in absent else None
        if known is not None:
            tabled.append(known)
        elif package in absent and package.size >= LARGE:
            missing.append(package)
    return cached, tabled, missing


def _scan_cached(path: Path, workers: int) -> Contents:
    """A package of the cache. What it tells is kept beside it, and goes with it."""
    kept, known = path.with_name("scan.json"), None
    with contextlib.suppress(ValueError):
        known = parse_scan(json.loads(unseal(kept) or b"{}"))
    if known is None:
        known = LayerScan(found=find_in(path, Quiet(), workers=workers))
        # Only a memory: the cache may be one that others fill.
        with contextlib.suppress(OSError), replacing(kept) as file:
            file.write(seal(kept, json.dumps(format_scan(known)).encode()))
    return format_contents(path.name, known.found)


def join_contents(source: str, lock: Lock, parts: Iterable[Contents]) -> Contents:
    """What packages hold together. The lock says which packages there are. Pure."""
    every = tuple(parts)
    libraries = {library.path: library for part in every for library in part.libraries}
    packages = {
        Package(name=own.name, version=own.version, build=own.build if isinstance(own, LockedConda) else "")
        for own in lock.packages
    }
    return Contents(
        source=source,
        libraries=tuple(libraries[path] for path in sorted(libraries)),
        packages=tuple(sorted(packages, key=lambda package: (package.name, package.version))),
        facts=tuple(sorted({fact for part in every for fact in part.facts})),
        toolkit=tuple(sorted({name for part in every for name in part.toolkit})),
    )


def _answers(contents: Contents, missing: list[LockedPackage]) -> bool:
    """Whether what is known decides: the framework's own code is there, or nothing large is unknown."""
    framework = find_framework(contents)
    gates = any(role_of(one.path, framework)[0] is Role.GATES for one in contents.libraries)
    return gates or not missing
