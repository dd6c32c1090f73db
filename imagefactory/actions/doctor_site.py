"""Check the site of a center for `doctor --for site`, in the order of the setup in the docs.

The checks change nothing on this machine or in the registry. They start only commands of the pool and
`crontab -l`. If a registry does not answer within seconds, all checks that need it are skipped.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from imagefactory.access import Access, open_registry
from imagefactory.actions.publish import read_current
from imagefactory.actions.sweep import WRITTEN
from imagefactory.actions.verdicts import signing_key
from imagefactory.doctor.facts import Diagnosis, Health
from imagefactory.doctor.judge import STORE_BYTES
from imagefactory.doctor.use import NEW_KEY
from imagefactory.errors import ImagefactoryError, os_reason
from imagefactory.http import RetryPolicy
from imagefactory.oci.credentials import find_credentials
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import split_place
from imagefactory.plugins import load_extra
from imagefactory.progress import format_bytes
from imagefactory.project import recipes_directory
from imagefactory.schedulers.pool import open_pool
from imagefactory.schedulers.sites import check_needs, site_of
from imagefactory.settings.choices import HTCONDOR, POOLS, SITES, SLURM, listed, local_pool
from imagefactory.settings.load import Settings
from imagefactory.settings.own_commands import names_of
from imagefactory.trust.audit import read_audit
from imagefactory.trust.catalog_package import INVITATION, catalog_repository, parse_layer, unpack_artifact
from imagefactory.trust.invitation import TAG, parse_invitation
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import TrustRules, read_trust

HURRY = RetryPolicy(attempts=1, connect=5, read=10)
KEY_SOON, CATALOG_EXPIRY_WARNING = timedelta(days=30), timedelta(days=7)


def examine_site(
    settings: Settings, environ: Mapping[str, str], now: datetime, root: Path = Path("/")
) -> tuple[Diagnosis, ...]:
    """Return the checks of a site. Files of this machine are read below `root`."""
    access = Access(settings=settings, environ=environ)
    examine_nightly = load_extra("nightly.units:examine_nightly")
    site = _SiteCheck(access=access, trust=read_trust(settings.files), now=now, root=root)
    with ThreadPoolExecutor(2) as threads:  # each may be slow
        future, pool = threads.submit(site.registry), threads.submit(lambda: tuple(site.pool()))
        registry = future.result()
        return (
            *site.project(),
            *site.store(),
            *registry.lines,
            *site.signing(),
            *site.trusted(),
            *pool.result(),
            *registry.published,
            *site.audit(),
            *site.mirrors(registry.catalog_time),
            *(examine_nightly(access, registry.catalog_time, now, root) if examine_nightly else ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegistryCheck:
    """The checks of a registry, and of its catalog, which was created at `catalog_time`."""

    lines: tuple[Diagnosis, ...]
    published: tuple[Diagnosis, ...]
    catalog_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SiteCheck:
    access: Access
    trust: TrustRules
    now: datetime
    root: Path

    @property
    def settings(self) -> Settings:
        return self.access.settings

    # --- this machine ----------------------------------------------------------------------------

    def project(self) -> Iterator[Diagnosis]:
        if self.settings.shipped:
            detail = "none in this directory or above it: these are the bundled recipes"
            yield missing("project", detail, "imagefactory init DIR")
            return
        try:
            yield good("project", str(recipes_directory(self.settings).parent))
        except ImagefactoryError as error:
            yield missing("project", error.message, error.hint)

    def store(self) -> Iterator[Diagnosis]:
        path = self.settings.store_path
        directory = next((folder for folder in (path, *path.parents) if folder.is_dir()), self.root)
        free = shutil.disk_usage(directory).free
        detail = f"{path} ({self.settings.store.origin}): {format_bytes(free)} free"
        if not os.access(directory, os.W_OK):
            yield broken("store", f"{detail}, not writable", 'store = "DIR" in imagefactory.toml')
        elif free < STORE_BYTES:
            yield warn("store", f"{detail}, less than an image needs", "imagefactory image prune")
        else:
            yield good("store", detail if (path / "oci-layout").exists() else f"{detail}; it is empty")

    def audit(self) -> Iterator[Diagnosis]:
        try:
            rows = list(read_audit(self.settings.store_path))
        except OSError as error:
            yield broken("log", f"cannot be read: {os_reason(error)}", "check the permissions of the store")
            return
        detail = (
            f"{len(rows)} entr{'y' if len(rows) == 1 else 'ies'}, the last of {rows[-1].get('time', '')}"
            if rows
            else "it is empty"
        )
        yield good("log", detail)

    # --- keys --------------------------------------------------------------------------------------

    def signing(self) -> Iterator[Diagnosis]:
        try:
            key = signing_key(self.access, self.now)
        except ImagefactoryError as error:
            yield broken("signing key", error.message, error.hint)
            return
        if key is None:
            yield missing("signing key", "none on this machine", NEW_KEY)
            return
        trusted = self.trust.key(key.keyid)
        if trusted is None:
            remedy = f"imagefactory key trust {key.name}"
            yield missing("signing key", f"'{key.name}' is not trusted in this project", remedy)
        elif self.now < trusted.since:
            detail = f"'{key.name}' is not trusted before {trusted.since:%Y-%m-%d}"
            yield broken("signing key", detail, "set its `from` in imagefactory.toml")
        elif trusted.until - self.now < KEY_SOON:
            detail = f"'{key.name}' signs until {trusted.until:%Y-%m-%d}, which is soon"
            yield warn("signing key", detail, "imagefactory key rotate")
        else:
            yield good("signing key", f"'{key.name}', until {trusted.until:%Y-%m-%d}")

    def trusted(self) -> Iterator[Diagnosis]:
        keys = self.trust.keys
        valid = [key.name for key in keys if key.since <= self.now < key.until]
        others = [key.name for key in keys if key.name not in valid]
        detail = f"{', '.join(valid)}" + (f"; not now: {', '.join(others)}" if others else "")
        if valid:
            yield good("trusted keys", detail)
        else:
            yield missing("trusted keys", detail.lstrip("; ") or "none, so no verdict counts", NEW_KEY)

    # --- the pool ------------------------------------------------------------------------------------

    def pool(self) -> Iterator[Diagnosis]:
        yield self._site_name()
        name = local_pool(self.access.environ)
        if not name:
            remedy = "log in to the access point of your pool, or verify on a machine with a GPU"
            yield warn("pool", "no commands of HTCondor or Slurm here", remedy)
            return
        try:
            pool = open_pool(name, self.access.environ)
            version, inventory = pool.require(), pool.inventory(self.now)
        except ImagefactoryError as error:
            yield broken("pool", error.message, error.hint)
            return
        gpus, known = len(inventory.gpus), len(inventory.known)
        detail = f"{POOLS[name].title} {version}, {inventory.pool}: {gpus} GPUs"
        if not known:
            yield warn("pool", f"{detail}, {known} of a known capability", "imagefactory gpus")
        else:
            yield good("pool", detail)
        yield self._batch(name)

    def _site_name(self) -> Diagnosis:
        site = self.settings.site
        if site.origin == "default":
            remedy = f'site = "..." in imagefactory.toml: {", ".join(SITES)}'
            return warn("site", "not set: files follow no site's own rules", remedy)
        return good("site", f"{site.value} ({site.origin})")

    def _batch(self, pool: str) -> Diagnosis:
        """Check the attributes that the pool requires of each job."""
        key = "sbatch-options" if pool == SLURM else "submit-commands"
        try:
            site = site_of(self.settings.site.value, self.settings)
            if pool == HTCONDOR and site.batch == HTCONDOR:
                check_needs(site, WRITTEN | names_of(site.own))
        except ImagefactoryError as error:
            return missing(key, error.message, error.hint)
        value = self.settings.sbatch_options if pool == SLURM else self.settings.submit_commands
        if value.value:
            return good(key, f"{'; '.join(value.value.split(chr(10)))} ({value.origin})".lstrip("; "))
        if pool == SLURM and not self.access.environ.get("SBATCH_ACCOUNT"):
            remedy = 'sbatch-options = "--account=... --partition=..." in imagefactory.toml'
            return warn(key, "none: jobs run on your default account and partition", remedy)
        return good(key, "none are set, and none are known to be required")

    # --- the registry --------------------------------------------------------------------------------

    def registry(self) -> _RegistryCheck:
        settings = self.settings
        if not settings.registry.value:
            remedy = 'registry = "HOST/PATH" in imagefactory.toml'
            none = (
                missing("registry", "none is set, so nothing is pushed and no nightly run starts", remedy),
            )
            if settings.catalog.value.startswith("/"):
                return self._published(Path(settings.catalog.value), none)
            return _RegistryCheck(lines=none, published=tuple(_unknown_rows(missing, "no registry is set")))
        address = settings.registry.value
        host, path = split_place(address)
        store = open_registry(self.access, host, retry_policy=HURRY)
        repository = catalog_repository(f"{host}/{path}" if path else host).repository
        try:
            login = find_credentials(self.access.environ)(host)
            store.check()
            detail = f"with the login of {login.origin or 'a helper'}" if login else "without a login"
            answers = (
                good("registry", f"{address} answers {detail}"),
                _push(store, repository, login=login is not None),
            )
            return self._published(StoreRepository(store=store, repository=repository), answers)
        except ImagefactoryError as error:
            line = broken("registry", error.message, error.hint)
            return _RegistryCheck(
                lines=(line,), published=tuple(_unknown_rows(warn, "the registry does not answer"))
            )
        finally:
            store.close()

    def _published(self, location: StoreRepository | Path, lines: tuple[Diagnosis, ...]) -> _RegistryCheck:
        try:
            current = read_current(location, self.trust, self.now)
        except ImagefactoryError as error:
            line = broken("catalog", error.message, error.hint)
            return _RegistryCheck(lines=lines, published=(line, self._invitation(location)))
        created = None
        if current is None:
            line = missing("catalog", f"none at {location}", "imagefactory site publish")
        elif current.catalog is None:
            whose = f"a key that is not trusted now ({current.keyid[:16]})" if current.keyid else "no key"
            detail = f"{current.where} is signed by {whose}, so your readers reject it"
            line = broken("catalog", detail, "imagefactory site publish")
        else:
            created, expires = current.catalog.created, current.catalog.expires
            name = next((key.name for key in self.trust.keys if key.keyid == current.keyid), "")
            detail = (
                f"{current.where}, signed by '{name}' on {created:%Y-%m-%d}, valid until {expires:%Y-%m-%d}"
            )
            if expires <= self.now:
                line = broken("catalog", f"{detail}: it expired", "imagefactory site publish")
            elif expires - self.now < CATALOG_EXPIRY_WARNING:
                line = warn("catalog", f"{detail}, which is soon", "imagefactory site publish")
            elif (
                own_key := self._own_key()
            ) and own_key.keyid != current.keyid:  # only one of two facilitators signs it
                line = good("catalog", f"{detail}; the key here, '{own_key.name}', cannot sign it")
            else:
                line = good("catalog", detail)
        return _RegistryCheck(lines=lines, published=(line, self._invitation(location)), catalog_time=created)

    def _own_key(self) -> SigningKey | None:
        try:
            return signing_key(self.access, self.now)
        except ImagefactoryError:
            return None  # the check of the signing key reports it

    def _invitation(self, location: StoreRepository | Path) -> Diagnosis:
        """Check the invitation next to the catalog, or the local invitation for a catalog in a file."""
        push = "imagefactory site invite --push"
        try:
            if isinstance(location, StoreRepository):
                manifest = location.store.manifest(location.repository, TAG)
                if manifest is None:
                    return missing("invitation", f"none at {location}:{TAG}", push)
                name = f"{location}:{TAG}"
                layer = parse_layer(manifest[1], name, INVITATION)
                data = unpack_artifact(b"".join(location.store.read(location.repository, layer)), name)
            else:
                path, push = self.settings.root_path / "invitation.toml", "imagefactory site invite"
                name, data = str(path), read_small(path).encode()
                if not data:
                    return missing("invitation", f"there is no {path}", push)
            invited = parse_invitation(data, name)
        except ImagefactoryError as error:
            return broken("invitation", error.message, push)
        trusted = {key.keyid for key in self.trust.keys if key.since <= self.now < key.until}
        named = {grant.key.keyid for grant in invited.keys}
        if not trusted & named:
            return broken("invitation", f"{name} has no key that this project trusts now", push)
        own_key = self._own_key()
        if own_key and own_key.keyid not in named:
            return warn("invitation", f"{name} does not name '{own_key.name}', which signs now", push)
        return good("invitation", f"{name}, for {invited.catalog}")

    def mirrors(self, created: datetime | None) -> Iterator[Diagnosis]:
        mirrors = listed(self.settings.catalog_mirrors.value)
        if not mirrors:
            detail = "none: while the registry is down, readers have only their cached copies"
            yield warn("mirrors", detail, 'catalog-mirrors = "HOST/PATH" in imagefactory.toml')
            return
        with ThreadPoolExecutor(len(mirrors)) as threads:
            yield from threads.map(lambda mirror: self._mirror(mirror, created), mirrors)

    def _mirror(self, mirror: str, created: datetime | None) -> Diagnosis:
        copy = "imagefactory image copy REGISTRY/catalog:current MIRROR/catalog:current"
        location: StoreRepository | Path = Path(mirror)
        try:
            if not mirror.startswith("/"):
                reference = catalog_repository(mirror)
                store = open_registry(self.access, reference.registry, retry_policy=HURRY)
                location = StoreRepository(store=store, repository=reference.repository)
            current = read_current(location, self.trust, self.now)
        except ImagefactoryError as error:
            return broken("mirrors", f"{mirror}: {error.message}", error.hint)
        if current is None or current.catalog is None:
            return broken("mirrors", f"{mirror} has no catalog signed by a trusted key", copy)
        if created and current.catalog.created < created:
            detail = f"{mirror} has an older catalog, of {current.catalog.created:%Y-%m-%d %H:%M} UTC"
            return warn("mirrors", detail, copy)
        return good("mirrors", mirror)


def _push(store: RegistryClient, repository: str, *, login: bool) -> Diagnosis:
    address = f"{store.host}/{repository}"
    try:
        store.check_push(repository)
    except ImagefactoryError as error:
        return broken("push", error.message, f"docker login {store.host}, with an account that may push")
    if login:
        return good("push", f"allowed to {address}")
    return warn("push", f"allowed to {address}, for anyone", "let the registry ask for a login")


def _unknown_rows(say: Callable[[str, str, str], Diagnosis], reason: str) -> Iterator[Diagnosis]:
    for name in ("catalog", "invitation"):
        yield say(name, f"not known: {reason}", "see registry")


def read_small(path: Path) -> str:
    """Return the text of a small file, empty if it is unreadable or not a regular file (such as a pipe)."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


def good(name: str, detail: str) -> Diagnosis:
    return Diagnosis(name=name, state=Health.OK, detail=detail, needed_for="site")


def warn(name: str, detail: str, remedy: str) -> Diagnosis:
    """Return a warning: the site works, but not completely or not for long."""
    return Diagnosis(name=name, state=Health.WARNING, detail=detail, remedy=remedy, needed_for="site")


def missing(name: str, detail: str, remedy: str) -> Diagnosis:
    """Return the check for something that is not set up."""
    return Diagnosis(name=name, state=Health.MISSING, detail=detail, remedy=remedy, needed_for="site")


def broken(name: str, detail: str, remedy: str) -> Diagnosis:
    return Diagnosis(name=name, state=Health.DENIED, detail=detail, remedy=remedy, needed_for="site")
