"""Layer locks of a factory: whether they hold, what an image is by them, and what was made against them."""

from __future__ import annotations

from imagefactory.build.base.image import Blobs
from imagefactory.build.layer_lock import image_of, moved_on
from imagefactory.errors import LockError, StaleError
from imagefactory.project import Factory
from imagefactory.lock.layers import layers_path, read_layer_lock, wrong_entries
from imagefactory.model import Definition, Target
from imagefactory.oci.model import Image
from imagefactory.actions.definition import define_target
from imagefactory.actions.locked import base_locks


def layers_state(factory: Factory, target: Target) -> str:
    """`ok`, `stale`, `malformed`, or empty for a target without a layer lock."""
    try:
        if read_layer_lock(factory.lock_folder, target.name) is None:
            return ""
        return "ok" if promised_image(factory, target) else "stale"
    except StaleError:
        return "stale"
    except LockError:
        return "malformed"


def promised_image(factory: Factory, target: Target, blobs: Blobs | None = None) -> Image | None:
    """The target's image by its layer lock, None where there is none or it is stale.

    Its config, manifest and index are added to `blobs`. Raises LockError and StaleError as `define_target`
    does, and LockError for a layer lock that is malformed.
    """
    lock = read_layer_lock(factory.lock_folder, target.name)
    if lock is None:
        return None
    definition = define_target(factory, target)
    bases = base_locks(factory, definition.base)
    return None if moved_on(lock, definition, bases) else image_of(lock, definition, bases, blobs)


def hold_to_layer_lock(factory: Factory, definition: Definition, made: Image, made_with: str) -> None:
    """Raises LockError where layers made here of what the layer lock says are not as it says.

    One that is stale, or of layers that are made with other tools, is told and not held to.
    """
    target = definition.target.name
    lock = read_layer_lock(factory.lock_folder, target)
    bases = base_locks(factory, definition.base)
    if lock is None or not bases or not made_with:
        return
    path = layers_path(factory.lock_folder, target)
    if moved := moved_on(lock, definition, bases):
        factory.tell(f"{path} is outdated: {moved} (imagefactory lock --deep {target})")
    elif lock.made_with != made_with:
        factory.tell(
            f"{path} is of layers by {lock.made_with}: layers by {made_with} are not checked against it"
        )
    elif wrong := wrong_entries(lock, made.layers, str(path)):
        raise LockError(
            "layer-lock-mismatch",
            "\n".join(wrong),
            hint=f"rebuild and compare each layer: imagefactory lock --check --deep {target}",
        )
