"""Where a catalogue is read: a file, the registry, or the factory itself, made there at once.

trust/catalog_package.py has its form in a registry; the cached copy of a reader is below.
What is kept is looked at as strictly as what comes: its digest, its signature, its time. One request asks
which one is current. Whoever can move that tag cannot bring back an older one, without what was revoked
since, for who saw the newer one.

A place that cannot be read gives way to its mirrors, and these to the copy that is kept here. A catalog that
comes and is refused gives way to nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from imagefactory.access import Access, open_registry, registry_place
from imagefactory.actions.catalog import CatalogRequest, CatalogResult, build_catalog
from imagefactory.errors import ImagefactoryError, RegistryError, StatementError, UsageError, os_problem
from imagefactory.fs import remove_inside, replace_bytes, replace_text
from imagefactory.http import HURRIED, RetryPolicy
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.store import ImageReference, resolve_mirror
from imagefactory.progress import QuietProgress
from imagefactory.project import Project, is_project, load_project
from imagefactory.recipes.expand import select_single
from imagefactory.serialize import format_time
from imagefactory.settings.choices import SettingValue, listed
from imagefactory.settings.files import FILE_NAME
from imagefactory.settings.load import Settings
from imagefactory.trust.catalog import LARGEST, Catalog, CatalogSource, verify_catalog
from imagefactory.trust.catalog_package import catalog_repository, pack_artifact, parse_layer, unpack_artifact
from imagefactory.trust.policy import TrustRules, read_trust

# --- The catalogs that a reader keeps, so that a registry may be down and an old catalog cannot come back
#     <cache>/catalogues/<64 hex>             the last good catalog of a place, as it came
#     <cache>/catalogues-seen/<64 hex>        when that was made
# The names are sha256 sums of the place's name. Nothing here is trusted: whoever reads a kept catalog
# verifies
# its signature and its time again. A cache that fails keeps nothing.


MOST = 16
"""Catalogs that are kept; the one that was not used for the longest time goes first."""
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCatalog:
    """The kept catalog of a place, in the folder of the cache. `where` is the place's name."""

    cache: Path
    where: str

    @property
    def path(self) -> Path:
        return self.cache / "catalogues" / self._name

    @property
    def seen_path(self) -> Path:
        return self.cache / "catalogues-seen" / self._name

    @property
    def _name(self) -> str:
        return hashlib.sha256(os.fsencode(self.where)).hexdigest()

    def read(self) -> bytes:
        """Return the kept bytes, none where there are none that can be read."""
        with contextlib.suppress(OSError):  # somebody else's may be read only
            os.utime(self.path)
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            return file.read(LARGEST + 1)
        return b""

    def seen(self) -> str:
        """Return when the newest catalog that was seen of this place was made, empty if not known."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = self.seen_path.read_text(encoding="ascii")
            return text if _TIME.fullmatch(text) else ""
        return ""

    def refuse_older(self, made: datetime) -> None:
        """Raise StatementError for a catalog that is older than the newest that was seen of this place."""
        seen, text = self.seen(), format_time(made)
        if seen > text:
            raise StatementError(
                "catalog-rolled-back",
                f"{self.where} has a catalog of {text}, older than the one of {seen} that was there before",
                hint="ask the project's maintainers for a new catalog; if they restored this one: "
                f"rm {self.seen_path}",
            )

    def write(self, data: bytes, made: datetime) -> None:
        """Keep a catalog that was verified, and remember when it was made."""
        with contextlib.suppress(OSError):
            if data != self.read():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_bytes(self.path, data)
                self._forget_others()
        with contextlib.suppress(OSError):
            self.seen_path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.seen_path, format_time(made))

    def _forget_others(self) -> None:
        files = [path for path in self.path.parent.iterdir() if path.is_file()]
        for path in sorted(files, key=lambda path: -path.stat().st_mtime_ns)[MOST:]:
            remove_inside(self.path.parent, path)


def read_catalog(
    settings: Settings, environ: Mapping[str, str], now: datetime, name: str = "", *, hurried: bool = False
) -> Catalog:
    """The catalogue of the setting `catalogue`, else the factory's own, else that of the setting `registry`.

    In a factory only its own file and the environment name another: what a user or a site set is for those
    who have none. A factory's own is made now, of the target `name` alone (empty: of all), and nobody signed
    it. Any other must be signed by a key that is trusted here, and hold. Where the registry does not answer,
    it comes from a mirror or is the copy that is kept here: `source` and `notes` say so. With `hurried` it is
    not waited for long.

    Raises UsageError where none is named, StatementError for one that is refused, RegistryError for one that
    cannot be had.
    """
    place = settings.catalogue.value
    trust = read_trust(settings.files, settings.limits)
    reader = _CatalogReader(settings=settings, environ=environ, trust=trust, now=now)
    if hurried:
        reader = replace(reader, patience=HURRIED)
    if is_project(settings) and not (place and _near(settings)):
        factory, registry = load_project(settings, environ), settings.registry.value
        targets = (select_single(factory.targets, name),) if name else factory.targets
        kept = reader.kept(registry) if registry else None
        hurried = kept is not None and kept.path.exists()
        making = CatalogRequest(targets=targets, now=now, named=bool(name), hurried=hurried)
        try:
            return replace(
                build_catalog(factory, making, QuietProgress()).catalogue, source=CatalogSource.MADE
            )
        except RegistryError as error:
            if kept is None:
                raise
            return reader.read_kept(kept, error)
    return reader.read(place or settings.registry.value)


def place_name(place: str) -> str:
    """Return the full name of a catalog's place: `HOST/PATH/catalogue:current`, or a file's path."""
    return place if place.startswith("/") else str(catalog_repository(place))


def cache_published(settings: Settings, registry: str, envelope: bytes, made: datetime) -> None:
    """Keep what was just published, for this machine's own commands while the registry is down."""
    CachedCatalog(cache=settings.cache_path, where=place_name(registry)).write(pack_artifact(envelope), made)


def cached_expiry(settings: Settings) -> datetime | None:
    """Return when the newest signed catalog of the setting `registry` expires that this machine knows of."""
    kept = CachedCatalog(cache=settings.cache_path, where=place_name(settings.registry.value))
    try:
        made = datetime.fromisoformat(kept.seen())
        data = unpack_artifact(kept.read(), kept.where)
        return verify_catalog(data, read_trust(settings.files), made, kept.where).expires
    except (ValueError, ImagefactoryError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _CatalogReader:
    """By whose settings a catalog is read, by whose trust, and when."""

    settings: Settings
    environ: Mapping[str, str]
    trust: TrustRules
    now: datetime
    patience: RetryPolicy | None = None

    def kept(self, place: str) -> CachedCatalog:
        return CachedCatalog(cache=self.settings.cache_path, where=place_name(place))

    def read(self, place: str) -> Catalog:
        """The catalog of a place, else of its mirrors, else the copy that is kept."""
        kept, mirrors = self.kept(place), _mirrors(self.settings)
        try:
            data = self._fetch(place, kept, HURRIED if mirrors or kept.path.exists() else self.patience)
        except (RegistryError, UsageError) as error:
            return self._read_elsewhere(kept, mirrors, error)
        return self._noted(self._open(kept, data, kept.where))

    def _read_elsewhere(
        self, kept: CachedCatalog, mirrors: tuple[str, ...], error: RegistryError | UsageError
    ) -> Catalog:
        faults = [error.message]
        for mirror in mirrors:
            where = place_name(mirror)
            try:
                found = self._open(kept, self._fetch(mirror, kept, HURRIED), where)
            except (RegistryError, UsageError, StatementError) as fault:
                faults.append(f"its mirror {where}: {fault.message}")
                continue
            said = f"this is the catalog of its mirror {where}, {age_of(found, self.now)}"
            return self._noted(replace(found, source=CatalogSource.MIRROR), *faults, said)
        return self.read_kept(kept, error, tuple(faults))

    def read_kept(
        self, kept: CachedCatalog, error: RegistryError | UsageError, faults: tuple[str, ...] = ()
    ) -> Catalog:
        """The kept copy in place of what cannot be read. Raises `error` where there is none that is valid."""
        if not (data := kept.read()):
            raise error
        try:
            found = verify_catalog(
                unpack_artifact(data, kept.where), self.trust, self.now, "the copy kept here"
            )
            kept.refuse_older(found.made)
        except StatementError as fault:
            raise type(error)(error.code, f"{error.message}\n{fault.message}", hint=error.hint) from error
        said = f"this is the catalog that is kept here, {age_of(found, self.now)}"
        return self._noted(replace(found, source=CatalogSource.KEPT), *(faults or (error.message,)), said)

    def _open(self, kept: CachedCatalog, data: bytes, where: str) -> Catalog:
        """The catalog in these bytes, kept from now on. Raises StatementError for one that is refused."""
        found = verify_catalog(unpack_artifact(data, where), self.trust, self.now, where)
        kept.refuse_older(found.made)
        kept.write(data, found.made)
        return found

    def _noted(self, catalogue: Catalog, *notes: str) -> Catalog:
        if catalogue.expires_soon(self.now):
            days = (catalogue.expires - self.now).days
            when = f"{catalogue.expires:%Y-%m-%d}, in {days} day{'s' * (days != 1)}"
            notes += (f"this catalog expires on {when}; ask your center for a new one before that",)
        return replace(catalogue, notes=notes)

    def _fetch(self, place: str, kept: CachedCatalog, patience: RetryPolicy | None) -> bytes:
        if place.startswith("/"):
            return _read_file(Path(place))
        access = Access(settings=self.settings, environ=self.environ)
        return _read_registry(access, catalog_repository(place), kept.read(), patience)


def age_of(catalogue: Catalog, now: datetime) -> str:
    """`3 days old, valid until 2026-12-20`; hours within the first two days."""
    age = max(now - catalogue.made, timedelta(0))
    count, unit = (age.days, "day") if age.days >= 2 else (int(age.total_seconds() // 3600), "hour")
    return f"{count} {unit}{'s' * (count != 1)} old, valid until {catalogue.expires:%Y-%m-%d %H:%M} UTC"


def _mirrors(settings: Settings) -> tuple[str, ...]:
    """The mirrors of the catalog: none where a nearer file, or the environment, names another catalog."""

    def distance(setting: SettingValue) -> int:
        known = [str(path) for path in settings.files]
        if setting.origin.startswith("$"):
            return -1
        return known.index(setting.origin) if setting.origin in known else len(known)

    named = settings.catalogue if settings.catalogue.value else settings.registry
    mirrors = settings.catalogue_mirrors
    return listed(mirrors.value) if distance(mirrors) <= distance(named) else ()


def with_former_families(
    factory: Project, made: CatalogResult, registry: str, now: datetime
) -> CatalogResult:
    """With what the last catalogue of a registry has of families whose recipes have faults now.

    People use these images, and their verdicts hold: a typing mistake takes nothing away.
    """
    host, path = registry_place(factory, registry)
    reference = catalog_repository(f"{host}/{path}" if path else host)
    try:
        data = unpack_artifact(_read_registry(factory, reference), str(reference))
        former = verify_catalog(data, read_trust(factory.settings.files), now, str(reference))
    except (RegistryError, StatementError):  # there is none, or none that holds
        return made
    known = {target.family for target in factory.targets}
    kept = tuple(image for image in former.images if image.family not in known)
    catalogue = replace(made.catalogue, images=(*made.catalogue.images, *kept))
    return replace(made, catalogue=catalogue, kept=tuple(image.target for image in kept))


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
            *os_problem("read", path, error),
            hint="check the setting catalogue (imagefactory config), or ask your center where the file is",
        ) from error
    if len(data) > LARGEST:
        raise StatementError(
            "catalog-too-large", f"{path} has more than {LARGEST} bytes", hint="check that it is a catalog"
        )
    return data


# --- from a registry -----------------------------------------------------------------------------


def _read_registry(
    access: Access, reference: ImageReference, kept: bytes = b"", patience: RetryPolicy | None = None
) -> bytes:
    """The layer's bytes: those that are `kept`, where they are the same."""
    asked = resolve_mirror(reference, access.settings.mirror_map)
    store = open_registry(access, asked.registry, patience=patience)
    place = StoreRepository(store=store, repository=asked.repository)
    manifest = place.store.manifest(place.repository, asked.tag_or_digest)
    if manifest is None:
        raise RegistryError(
            "catalog-not-found",
            f"no catalog at {reference}",
            hint="check the setting catalogue (imagefactory config), or ask the project's owner to run "
            "imagefactory site publish",
        )
    layer = parse_layer(manifest[1], str(asked))
    if f"sha256:{hashlib.sha256(kept).hexdigest()}" == layer.digest:
        return kept
    return b"".join(place.store.read(place.repository, layer))
