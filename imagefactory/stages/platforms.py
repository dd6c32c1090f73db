"""One index of the images of a target for several platforms, so that a tag gives each machine its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from imagefactory.access import Access
from imagefactory.errors import BuildError
from imagefactory.gpu.platforms import PLATFORMS, architecture
from imagefactory.model import Target
from imagefactory.oci.manifests import INDEX_TYPE, canonical_json, format_descriptor
from imagefactory.oci.model import Image
from imagefactory.stages.stored import stored_image


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """An index of the store, of images for `platforms`; `target` is the one that names no platform."""

    target: Target
    digest: str
    platforms: tuple[str, ...]


def on_other_platforms(targets: Iterable[Target], target: Target) -> tuple[Target, ...]:
    """The targets that differ from this one by their platform alone, and itself: the plain name first."""
    plain = plain_name(target)
    same = [one for one in targets if plain_name(one) == plain and one.family == target.family]
    return tuple(sorted(same, key=lambda one: (one.name != plain, PLATFORMS.index(one.platform))))


def plain_name(target: Target) -> str:
    """Its name without a platform."""
    return target.name.removesuffix(f"-{architecture(target.platform)}")


def join_platforms(access: Access, targets: Iterable[Target], image: Image, target: Target) -> Joined | None:
    """The index of `image` and what the store has of the same target for others; None for nothing else."""
    same = on_other_platforms(targets, target)
    images = {one: image if one == target else stored_image(access, one) for one in same}
    found = [(one.platform, there) for one, there in images.items() if there]
    if len(found) < 2:
        return None
    layout, entries, said = access.layout, [], list[set[tuple[str, str]]]()
    for platform, there in sorted(found):
        descriptor, data = layout.manifest(there.manifest) or _gone(there)
        system, _, processor = platform.partition("/")
        entry = {"platform": {"architecture": processor, "os": system}}
        entries.append({**format_descriptor(descriptor), **entry})
        said.append(set((json.loads(data).get("annotations") or {}).items()))
    value = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
    if agreed := dict(set.intersection(*said)):
        value["annotations"] = agreed
    index = layout.add(canonical_json(value), INDEX_TYPE)
    return Joined(target=same[0], digest=index.digest, platforms=tuple(sorted(name for name, _ in found)))


def _gone(image: Image) -> NoReturn:
    raise BuildError(
        "image-removed", f"another process removed {image.name} from the store", hint="run the command again"
    )
