"""The stage from a lock to its layer lock: written of what a build makes, checked by making it all anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from imagefactory.access import cache_lock
from imagefactory.build.layer_lock import lock_layers, moved_on
from imagefactory.errors import LockError, StaleError, UsageError
from imagefactory.project import Factory
from imagefactory.fs import explain_full_disk, folder_for_a_while, used
from imagefactory.lock.layers import (
    format_layer_lock,
    layers_path,
    read_layer_lock,
    write_layer_lock,
    wrong_entries,
)
from imagefactory.model import BaseLock, Definition, Target
from imagefactory.oci.model import Image
from imagefactory.progress import Progress
from imagefactory.actions.build import BuildOptions, build_image, make_engine
from imagefactory.actions.definition import define_target
from imagefactory.actions.locked import base_locks

FETCHED = ("conda", "debs", "wheels")
"""What a cache holds of files that are locked by hash. The rest of it was made here."""
OPTIONS = BuildOptions(engine="assemble", locked=True, smoke=False, held=False)


def lock_target_layers(factory: Factory, target: Target, progress: Progress) -> bool:
    """Builds the target's layers, as far as the store does not have them, and writes its layer lock.

    True where that changed. Raises what a build raises, and UsageError for a target on an image of others.
    """
    definition, bases = define_target(factory, target), _base_locks(factory, target)
    image = _build(factory, definition, progress)
    lock = lock_layers(definition, bases, image, _made_with(factory, definition))
    path = layers_path(factory.lock_folder, target.name)
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") == format_layer_lock(lock):
        return False
    write_layer_lock(factory.lock_folder, lock)
    return True


def check_target_layers(factory: Factory, target: Target, progress: Progress) -> None:
    """Makes every layer of the target anew, its base's too, in a store that ends with the call, and compares.

    Raises LockError for a layer lock that is missing or has wrong entries, which it names, StaleError for one
    of another lock, base or set of tools.
    """
    definition, bases = define_target(factory, target), _base_locks(factory, target)
    lock, path = (
        read_layer_lock(factory.lock_folder, target.name),
        layers_path(factory.lock_folder, target.name),
    )
    again = f"imagefactory lock --deep {target.name}"
    if lock is None:
        raise LockError("layer-lock-missing", f"{target.name} has no layer lock ({path})", hint=again)
    if moved := moved_on(lock, definition, bases):
        raise StaleError("layer-lock-outdated", f"{path} is outdated: {moved}", hint=again)
    if lock.made_with != (here := _made_with(factory, definition)):
        raise StaleError(
            "layer-lock-outdated",
            f"{path} is of layers by {lock.made_with}, and this machine has {here}",
            hint=again,
        )
    with _from_scratch(factory, progress) as elsewhere:
        made = _build(elsewhere, definition, progress)
    if wrong := wrong_entries(lock, made.layers, str(path)):
        raise LockError(
            "layer-lock-mismatch",
            "\n".join(wrong),
            hint=f"{again}, or check out the file of another commit",
        )


def _base_locks(factory: Factory, target: Target) -> tuple[BaseLock, ...]:
    base = factory.base_of(target)
    if base.image:
        raise UsageError(
            "option-conflict",
            f"--deep requires a base that imagefactory builds, and {target.name} is on {base.image}",
            hint="omit --deep",
        )
    if not (locks := base_locks(factory, base)):
        raise LockError(
            "lock-missing", f"base {base.name} has no lock", hint=f"imagefactory lock base:{base.name}"
        )
    return locks


def _made_with(factory: Factory, definition: Definition) -> str:
    return make_engine(factory, OPTIONS.engine).made_with(definition)


def _build(factory: Factory, definition: Definition, progress: Progress) -> Image:
    image = build_image(factory, definition, OPTIONS, progress).image
    assert isinstance(image, Image)
    return image


@contextmanager
def _from_scratch(factory: Factory, progress: Progress) -> Iterator[Factory]:
    """The factory with a store that holds nothing yet, and a cache that holds what was fetched alone."""
    layout, cache = factory.layout, factory.settings.cache_path
    with (
        layout.in_use(progress),
        used(cache_lock(factory), progress),
        explain_full_disk(layout.path),
        _scratch(layout.tmp) as folder,
    ):
        for name in FETCHED:
            (cache / name).mkdir(parents=True, exist_ok=True)
            (folder / "cache").mkdir(exist_ok=True)
            (folder / "cache" / name).symlink_to((cache / name).absolute())
        settings = replace(
            factory.settings,
            store=replace(factory.settings.store, value=str(folder / "store")),
            cache=replace(factory.settings.cache, value=str(folder / "cache")),
        )
        yield replace(factory, settings=settings)


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    with folder_for_a_while("layers-", parent) as folder:
        yield folder
