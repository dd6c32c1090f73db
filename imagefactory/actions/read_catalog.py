"""Read a catalog from a file, a registry, a mirror or the cache; or build the project's own.

A cached copy is verified like a new one: its digest, signature and time. One request finds out which catalog
is current. An attacker who moves that tag cannot bring back an older catalog, without later revocations, to
readers who saw the newer one.

If a place cannot be read, its mirrors are tried, then the cached copy. There is no fallback for a catalog
that is rejected.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path

from imagefactory.access import Access, open_registry
from imagefactory.errors import ImagefactoryError, RegistryError, StatementError, UsageError, os_problem
from imagefactory.fs import remove_inside, replace_text, replacing
from imagefactory.http import HURRIED, RetryPolicy
from imagefactory.oci.store import ImageReference, resolve_mirror
from imagefactory.progress import QuietProgress
from imagefactory.project import invalid_note, load_lenient, uses_catalog
from imagefactory.serialize import format_time
from imagefactory.settings.choices import SettingValue, listed
from imagefactory.settings.files import FILE_NAME
from imagefactory.settings.load import Settings
from imagefactory.trust.catalog import Catalog, CatalogSource, SignedCatalog, open_catalog, verify_catalog
from imagefactory.trust.catalog_package import catalog_repository, parse_layer
from imagefactory.trust.policy import TrustRules, read_trust

# --- The cache, so that a registry may be down and an old catalog cannot come back
#     <cache>/catalogs/<64 hex>             the last valid catalog of a place
#     <cache>/catalogs-seen/<64 hex>        the time of the newest one
# The names are sha256 sums of the names of places. Nothing here is trusted: signature and time are verified
# at each read. A cache that cannot be written is not an error.


MOST = 16
"""The most cached catalogs. The least recently used one is removed first."""
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCatalog:
    """The cached catalog of the place with the name `where`."""

    cache: Path
    where: str

    @property
    def path(self) -> Path:
        return self.cache / "catalogs" / self._name

    @property
    def seen_path(self) -> Path:
        return self.cache / "catalogs-seen" / self._name

    @property
    def _name(self) -> str:
        return hashlib.sha256(os.fsencode(self.where)).hexdigest()

    def open(self) -> SignedCatalog | None:
        """Return the cached file, None if it cannot be read. Raises StatementError if it is corrupt."""
        with contextlib.suppress(OSError):  # another user's may be read only
            os.utime(self.path)
        try:
            return open_catalog(self.path.open("rb"), "the copy kept here")
        except OSError:
            return None

    def digest(self) -> str:
        """Return the digest of the cached file, empty if it cannot be read."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        return ""

    def seen(self) -> str:
        """Return the time of the newest catalog that was read from this place, empty if unknown."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = self.seen_path.read_text(encoding="ascii")
            return text if _TIME.fullmatch(text) else ""
        return ""

    def refuse_older(self, time: datetime) -> None:
        """Raise StatementError for a catalog older than the newest one that was read from this place."""
        seen, text = self.seen(), format_time(time)
        if seen > text:
            raise StatementError(
                "catalog-rolled-back",
                f"{self.where} has a catalog from {text}, and you have already read one from {seen}",
                hint="ask the project's maintainers for a new catalog; if they restored this one, "
                f"run rm {self.seen_path}",
            )

    def write(self, file: SignedCatalog, time: datetime) -> None:
        """Store a verified catalog and its time, and remove the least recently used ones."""
        with contextlib.suppress(OSError):
            if not self._has(file):
                directory = self.path.parent
                directory.mkdir(parents=True, exist_ok=True)
                with replacing(self.path) as copy:
                    copy.writelines(file.chunks())
                files = [path for path in directory.iterdir() if path.is_file()]
                for path in sorted(files, key=lambda path: -path.stat().st_mtime_ns)[MOST:]:
                    remove_inside(directory, path)
        with contextlib.suppress(OSError):
            self.seen_path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.seen_path, format_time(time))

    def _has(self, file: SignedCatalog) -> bool:
        """Return whether the cached file has the same size and head, which has the digests of the rest."""
        with contextlib.suppress(StatementError):
            known = self.open()
            return known is not None and (known.end, known.head) == (file.end, file.head)
        return False


def place_name(location: str) -> str:
    """Return the full name of a catalog's place: `HOST/PATH/catalog:current`, or the path of a file."""
    return location if location.startswith("/") else str(catalog_repository(location))


def _cached(settings: Settings, location: str) -> CachedCatalog:
    return CachedCatalog(cache=settings.cache_path, where=place_name(location))


def cache_published(settings: Settings, registry: str, envelope: bytes, time: datetime) -> None:
    """Cache a catalog that was just published, for use while the registry is down."""
    _cached(settings, registry).write(open_catalog(envelope, registry), time)


def cached_expiry(settings: Settings) -> datetime | None:
    """Return the expiry of the newest cached catalog of the setting `registry`, None without one."""
    cached = _cached(settings, settings.registry.value)
    try:
        time = datetime.fromisoformat(cached.seen())
        if (file := cached.open()) is None:
            return None
        return verify_catalog(file, read_trust(settings.files), time, cached.where).expires
    except (ValueError, ImagefactoryError):
        return None


def read_catalog(
    settings: Settings, environ: Mapping[str, str], now: datetime, name: str = "", *, hurried: bool = False
) -> Catalog:
    """Return the catalog of the setting `catalog`, else the project's own, else that of `registry`.

    In a project only its own file and the environment can name another catalog: the settings of a user or a
    site are for people without a project. The project's own catalog is built now, for the target `name` or
    for all targets, and is not signed. Any other must be valid and signed by a trusted key. If the registry
    does not answer, the catalog is read from a mirror or the cache: `source` and `notes` say so. `hurried`
    sets short timeouts.

    Raises UsageError if none is set, StatementError for a rejected one, RegistryError.
    """
    location = settings.catalog.value
    trust = read_trust(settings.files, settings.limits)
    reader = _CatalogReader(settings=settings, environ=environ, trust=trust, now=now)
    origin = settings.catalog.origin
    near = location and (origin.startswith("$") or origin == str(settings.root_path / FILE_NAME))
    if uses_catalog(settings) or near:
        return reader.read(location or settings.registry.value, HURRIED if hurried else None)
    project, registry = load_lenient(settings, environ), settings.registry.value
    targets = (project.select_single(name),) if name else project.targets
    cached = _cached(settings, registry) if registry else None
    # By name: readers of a signed catalog start in half the time without what builds images.
    builder = import_module("imagefactory.actions.catalog")
    request = builder.CatalogRequest(
        targets=targets, now=now, named=bool(name), hurried=cached is not None and cached.path.exists()
    )
    try:
        catalog: Catalog = builder.build_catalog(project, request, QuietProgress()).catalog
        notes = (invalid_note(tuple(project.invalid)),) if project.invalid else ()
        return replace(catalog, source=CatalogSource.MADE, notes=(*catalog.notes, *notes))
    except RegistryError as error:
        if cached is None:
            raise
        return reader.read_cached(cached, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CatalogReader:
    settings: Settings
    environ: Mapping[str, str]
    trust: TrustRules
    now: datetime

    def read(self, place: str, retry_policy: RetryPolicy | None) -> Catalog:
        """Return the catalog of a place, else of its mirrors, else the cached copy."""
        cached, mirrors = _cached(self.settings, place), _mirrors(self.settings)
        try:
            file = self._fetch(place, cached, HURRIED if mirrors or cached.path.exists() else retry_policy)
        except (RegistryError, UsageError) as error:
            faults = [error.message]
            for mirror in mirrors:
                location = place_name(mirror)
                try:
                    catalog = self._open(cached, self._fetch(mirror, cached, HURRIED), location)
                except (RegistryError, UsageError, StatementError) as fault:
                    faults.append(f"its mirror {location}: {fault.message}")
                    continue
                note = f"this is the catalog of its mirror {location}, {age_of(catalog, self.now)}"
                return self._with_notes(replace(catalog, source=CatalogSource.MIRROR), *faults, note)
            return self.read_cached(cached, error, *faults[1:])
        return self._with_notes(self._open(cached, file, cached.where))

    def read_cached(self, cached: CachedCatalog, error: RegistryError | UsageError, *faults: str) -> Catalog:
        """Return the cached copy. Raises `error` (the reason for no catalog) if no copy is valid."""
        try:
            if (file := cached.open()) is None:
                raise error
            catalog = verify_catalog(file, self.trust, self.now, "the copy kept here")
            cached.refuse_older(catalog.created)
        except StatementError as fault:
            raise type(error)(error.code, f"{error.message}\n{fault.message}", hint=error.hint) from error
        note = f"this is the catalog that is kept here, {age_of(catalog, self.now)}"
        return self._with_notes(replace(catalog, source=CatalogSource.KEPT), error.message, *faults, note)

    def _open(self, cached: CachedCatalog, file: SignedCatalog, location: str) -> Catalog:
        """Return the catalog in this file, and cache it. Raises StatementError if it is rejected."""
        catalog = verify_catalog(file, self.trust, self.now, location)
        cached.refuse_older(catalog.created)
        cached.write(file, catalog.created)
        return catalog

    def _with_notes(self, catalog: Catalog, *notes: str) -> Catalog:
        if catalog.expires_soon(self.now):
            days = (catalog.expires - self.now).days
            when = f"{catalog.expires:%Y-%m-%d}, in {days} day{'s' * (days != 1)}"
            notes += (f"this catalog expires on {when}; ask your center for a new one before that",)
        return replace(catalog, notes=notes)

    def _fetch(self, location: str, cached: CachedCatalog, retry_policy: RetryPolicy | None) -> SignedCatalog:
        if not location.startswith("/"):
            access = Access(settings=self.settings, environ=self.environ)
            return read_registry(access, catalog_repository(location), cached, retry_policy)
        path = Path(location)
        try:
            return open_catalog(path.open("rb"), location)
        except OSError as error:
            hint = "check the setting catalog (imagefactory config), or ask your center where the file is"
            raise UsageError(*os_problem("read", path, error), hint=hint) from error


def read_limited(path: Path, largest: int, hint: str) -> bytes:
    """Return at most `largest` + 1 bytes of a file, so that a larger file is detected. Raises UsageError."""
    try:
        with path.open("rb") as file:
            return file.read(largest + 1)
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint=hint) from error


def age_of(catalog: Catalog, now: datetime) -> str:
    """Return `3 days old, valid until 2026-12-20`; in hours within the first two days."""
    age = max(now - catalog.created, timedelta(0))
    count, unit = (age.days, "day") if age.days >= 2 else (int(age.total_seconds() // 3600), "hour")
    return f"{count} {unit}{'s' * (count != 1)} old, valid until {catalog.expires:%Y-%m-%d %H:%M} UTC"


def _mirrors(settings: Settings) -> tuple[str, ...]:
    """Return the mirrors of the catalog, none if a closer file or the environment sets another catalog."""

    def distance(setting: SettingValue) -> int:
        known = [str(path) for path in settings.files]
        if setting.origin.startswith("$"):
            return -1
        return known.index(setting.origin) if setting.origin in known else len(known)

    catalog = settings.catalog if settings.catalog.value else settings.registry
    mirrors = settings.catalog_mirrors
    return listed(mirrors.value) if distance(mirrors) <= distance(catalog) else ()


def read_registry(
    access: Access,
    reference: ImageReference,
    cached: CachedCatalog | None = None,
    retry_policy: RetryPolicy | None = None,
) -> SignedCatalog:
    """Return the catalog's layer, from `cached` if it is the same."""
    mirror = resolve_mirror(reference, access.settings.mirror_map)
    store = open_registry(access, mirror.registry, retry_policy=retry_policy)
    manifest = store.manifest(mirror.repository, mirror.tag_or_digest)
    if manifest is None:
        raise RegistryError(
            "catalog-not-found",
            f"no catalog at {reference}",
            hint="check the setting catalog (imagefactory config), or ask the project's owner to run "
            "imagefactory site publish",
        )
    layer = parse_layer(manifest[1], str(mirror))
    if cached and cached.digest() == layer.digest and (file := cached.open()):
        return file
    return open_catalog(b"".join(store.read(mirror.repository, layer)), str(reference))
