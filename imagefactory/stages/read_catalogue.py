"""Where a catalogue is read: a file, the registry, or the factory itself, made there at once.

    <cache>/catalogues/<64 hex>                     what was fetched, by the digest of its layer
    <cache>/catalogues-seen/<64 hex>                when the newest was made that a place had, by its name

How it lies in a registry is said in catalogue/package.py. What is cached is looked at as strictly as what
comes: its digest, its signature, its time. One request asks which one is current. Whoever can move that tag
cannot bring back an older one, without what was revoked since, for who saw the newer one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access, open_registry, registry_place
from imagefactory.catalogue.document import LARGEST, open_catalogue
from imagefactory.catalogue.model import Catalogue
from imagefactory.catalogue.package import catalogue_place, parse_layer, unpack
from imagefactory.documents import format_time
from imagefactory.errors import RegistryError, StatementError, UsageError
from imagefactory.factory import Factory, is_factory, read_factory
from imagefactory.files import remove_inside, replace_text, replacing
from imagefactory.oci.graph import Place
from imagefactory.oci.mirrors import resolve
from imagefactory.oci.model import Descriptor
from imagefactory.oci.store import Reference
from imagefactory.progress import Quiet
from imagefactory.recipes.expand import select_one
from imagefactory.settings.files import FILE_NAME
from imagefactory.settings.load import Settings
from imagefactory.stages.catalogue import CatalogueMaking, MadeCatalogue, catalogue_of
from imagefactory.verdicts.trust import read_trust

KEPT = 4  # in the cache
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


def read_catalogue(
    settings: Settings, environ: Mapping[str, str], now: datetime, name: str = ""
) -> Catalogue:
    """The catalogue of the setting `catalogue`, else the factory's own, else that of the setting `registry`.

    In a factory only its own file and the environment name another: what a user or a site set is for those
    who have none. A factory's own is made now, of the target `name` alone (empty: of all), and nobody signed
    it. Any other must be signed by a key that is trusted here, and hold. Raises UsageError where none is
    named, StatementError for one that is refused, RegistryError for one that cannot be had.
    """
    place = settings.catalogue.value
    if is_factory(settings) and not (place and _near(settings)):
        factory = read_factory(settings, environ)
        targets = (select_one(factory.targets, name),) if name else factory.targets
        making = CatalogueMaking(targets=targets, now=now, named=bool(name))
        return catalogue_of(factory, making, Quiet()).catalogue
    if place.startswith("/"):
        where, data = place, _read_file(Path(place))
    else:
        reference = catalogue_place(place or settings.registry.value)
        where, data = str(reference), _read_registry(settings, environ, reference)
    catalogue = open_catalogue(unpack(data, where), read_trust(settings.files), now, where)
    _refuse_older(settings.cache_path / "catalogues-seen", where, catalogue.made)
    return catalogue


def keep_former(factory: Factory, made: MadeCatalogue, registry: str, now: datetime) -> MadeCatalogue:
    """With what the last catalogue of a registry has of families whose recipes have faults now.

    People use these images, and their verdicts hold: a typing mistake takes nothing away.
    """
    host, path = registry_place(factory, registry)
    reference = catalogue_place(f"{host}/{path}" if path else host)
    try:
        data = unpack(_read_registry(factory.settings, factory.environ, reference), str(reference))
        former = open_catalogue(data, read_trust(factory.settings.files), now, str(reference))
    except (RegistryError, StatementError):  # there is none, or none that holds
        return made
    known = {target.family for target in factory.targets}
    kept = tuple(image for image in former.images if image.family not in known)
    catalogue = replace(made.catalogue, images=(*made.catalogue.images, *kept))
    return replace(made, catalogue=catalogue, kept=tuple(image.target for image in kept))


def _refuse_older(folder: Path, where: str, made: datetime) -> None:
    """Remembers when the newest catalogue of a place was made. A cache that fails remembers nothing.

    Raises StatementError for one that is older.
    """
    path, text = folder / hashlib.sha256(os.fsencode(where)).hexdigest(), format_time(made)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        seen = path.read_text(encoding="ascii")
        if _TIME.fullmatch(seen) and seen > text:
            raise StatementError(
                f"{where} is refused: it was made at {text}, and one of {seen} was there before",
                hint=f"ask whoever runs the factory for a new one; if they went back to this one: rm {path}",
            )
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


def _near(settings: Settings) -> bool:
    """Whether the factory itself, or this call, names a catalogue."""
    origin = settings.catalogue.origin
    return origin.startswith("$") or origin == str(settings.root_path / FILE_NAME)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(
            f"catalogue: {path}: {error.strerror}",
            hint="is the setting right (imagefactory settings)? then ask your centre where the file is now",
        ) from error
    if len(data) > LARGEST:
        raise StatementError(f"{path}: has more than {LARGEST} bytes", hint="is that a catalogue?")
    return data


# --- from a registry -----------------------------------------------------------------------------


def _read_registry(settings: Settings, environ: Mapping[str, str], reference: Reference) -> bytes:
    access = Access(settings=settings, environ=environ)
    asked = resolve(reference, settings.mirror_map)
    place = Place(store=open_registry(access, asked.registry), repository=asked.repository)
    manifest = place.store.manifest(place.repository, asked.wanted)
    if manifest is None:
        raise RegistryError(
            f"there is no catalogue {reference}",
            hint="is the setting right (imagefactory settings)? then ask whoever runs the factory: they make "
            "one by imagefactory catalogue",
        )
    layer = parse_layer(manifest[1], str(asked))
    return _cached(settings.cache_path / "catalogues", layer, lambda: _fetch(place, layer))


def _fetch(place: Place, layer: Descriptor) -> bytes:
    return b"".join(place.store.read(place.repository, layer))


def _cached(folder: Path, layer: Descriptor, fetch: Callable[[], bytes]) -> bytes:
    """The layer's bytes, from the cache where they are whole there. A cache that fails is none."""
    path = folder / layer.digest.removeprefix("sha256:")
    with contextlib.suppress(OSError):
        if path.stat().st_size == layer.size:
            data = path.read_bytes()
            if f"sha256:{hashlib.sha256(data).hexdigest()}" == layer.digest:
                os.utime(path)  # the last asked for is the last to go
                return data
    data = fetch()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)
        _forget_old(folder)
    return data


def _forget_old(folder: Path) -> None:
    for path in sorted(_files(folder), key=lambda path: -path.stat().st_mtime_ns)[KEPT:]:
        remove_inside(folder, path)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.is_file())
