"""What of a center's site is set up: `doctor --for site`, in the order in which the docs set it up.

Nothing is changed, nothing is left in the registry, and nothing is started but the pool's own commands and
`crontab -l`. A registry that hangs is given up after seconds, and what needs it is not asked then.
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
from imagefactory.errors import ImagefactoryError
from imagefactory.http import RetryPolicy
from imagefactory.oci.credentials import find_credentials
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import split_place
from imagefactory.plugins import load_extra
from imagefactory.progress import format_bytes
from imagefactory.project import recipes_directory
from imagefactory.schedulers.pool import local_pool, open_pool
from imagefactory.schedulers.sites import check_needs, site_of
from imagefactory.settings.choices import HTCONDOR, POOLS, SITES, SLURM, listed
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
    """What of a site is set up, a line each; `root` is where this machine's files are found."""
    access = Access(settings=settings, environ=environ)
    examine_nightly = load_extra("nightly.units:examine_nightly")
    site = _SiteCheck(access=access, trust=read_trust(settings.files), now=now, root=root)
    with ThreadPoolExecutor(2) as threads:  # each may be slow
        asked, pool = threads.submit(site.registry), threads.submit(lambda: tuple(site.pool()))
        registry = asked.result()
        return (
            *site.project(),
            *site.store(),
            *registry.lines,
            *site.signing(),
            *site.trusted(),
            *pool.result(),
            *registry.published,
            *site.audit(),
            *site.mirrors(registry.made),
            *(examine_nightly(access, registry.made, now, root) if examine_nightly else ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegistryCheck:
    """What a registry says: of itself, and of what is published there. `made`: when its catalogue was."""

    lines: tuple[Diagnosis, ...]
    published: tuple[Diagnosis, ...]
    made: datetime | None = None


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
            said = "none here or above: these are the recipes that come with imagefactory"
            yield missing("project", said, "imagefactory init DIR")
            return
        try:
            yield good("project", str(recipes_directory(self.settings).parent))
        except ImagefactoryError as error:
            yield missing("project", error.message, error.hint)

    def store(self) -> Iterator[Diagnosis]:
        path = self.settings.store_path
        there = next((folder for folder in (path, *path.parents) if folder.is_dir()), self.root)
        free = shutil.disk_usage(there).free
        said = f"{path} ({self.settings.store.origin}): {format_bytes(free)} free"
        if not os.access(there, os.W_OK):
            yield broken("store", f"{said}, not writable", 'store = "DIR" in imagefactory.toml')
        elif free < STORE_BYTES:
            yield warn("store", f"{said}, less than an image takes", "imagefactory image prune")
        else:
            yield good("store", said if (path / "oci-layout").exists() else f"{said}; nothing is in it yet")

    def audit(self) -> Iterator[Diagnosis]:
        try:
            rows = list(read_audit(self.settings.store_path))
        except OSError as error:
            yield broken("log", f"cannot be read: {error.strerror}", "check the permissions of the store")
            return
        said = (
            f"{len(rows)} entr{'y' if len(rows) == 1 else 'ies'}, the last of {rows[-1].get('time', '')}"
            if rows
            else "nothing is in it yet"
        )
        yield good("log", said)

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
            said = f"'{key.name}' is trusted from {trusted.since:%Y-%m-%d} on"
            yield broken("signing key", said, "set its `from` in imagefactory.toml")
        elif trusted.until - self.now < KEY_SOON:
            said = f"'{key.name}' signs until {trusted.until:%Y-%m-%d}, which is soon"
            yield warn("signing key", said, "imagefactory key rotate")
        else:
            yield good("signing key", f"'{key.name}', until {trusted.until:%Y-%m-%d}")

    def trusted(self) -> Iterator[Diagnosis]:
        keys = self.trust.keys
        valid = [key.name for key in keys if key.since <= self.now < key.until]
        others = [key.name for key in keys if key.name not in valid]
        said = f"{', '.join(valid)}" + (f"; not now: {', '.join(others)}" if others else "")
        if valid:
            yield good("trusted keys", said)
        else:
            yield missing("trusted keys", said.lstrip("; ") or "none, so no verdict counts", NEW_KEY)

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
        said = f"{POOLS[name].title} {version}, {inventory.pool}: {gpus} GPUs"
        if not known:
            yield warn("pool", f"{said}, {known} of a known capability", "imagefactory gpus")
        else:
            yield good("pool", said)
        yield self._batch(name)

    def _site_name(self) -> Diagnosis:
        site = self.settings.site
        if site.origin == "default":
            remedy = f'site = "..." in imagefactory.toml: {", ".join(SITES)}'
            return warn("site", "not set: files follow no site's own rules", remedy)
        return good("site", f"{site.value} ({site.origin})")

    def _batch(self, pool: str) -> Diagnosis:
        """What the pool asks of each job."""
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
        return good(key, "none are set, and none are known to be needed")

    # --- the registry --------------------------------------------------------------------------------

    def registry(self) -> _RegistryCheck:
        settings = self.settings
        if not settings.registry.value:
            remedy = 'registry = "HOST/PATH" in imagefactory.toml'
            none = (missing("registry", "none is set, so nothing is pushed and no night runs", remedy),)
            if settings.catalogue.value.startswith("/"):
                return self._published(Path(settings.catalogue.value), none)
            return _RegistryCheck(lines=none, published=tuple(_unasked(missing, "no registry is set")))
        place = settings.registry.value
        host, path = split_place(place)
        store = open_registry(self.access, host, retry_policy=HURRY)
        repository = catalog_repository(f"{host}/{path}" if path else host).repository
        try:
            login = find_credentials(self.access.environ)(host)
            store.check()
            said = f"with the login of {login.origin or 'a helper'}" if login else "without a login"
            answers = (
                good("registry", f"{place} answers {said}"),
                _push(store, repository, login=login is not None),
            )
            return self._published(StoreRepository(store=store, repository=repository), answers)
        except ImagefactoryError as error:
            line = broken("registry", error.message, error.hint)
            return _RegistryCheck(
                lines=(line,), published=tuple(_unasked(warn, "the registry does not answer"))
            )
        finally:
            store.close()

    def _published(self, where: StoreRepository | Path, lines: tuple[Diagnosis, ...]) -> _RegistryCheck:
        try:
            current = read_current(where, self.trust, self.now)
        except ImagefactoryError as error:
            line = broken("catalogue", error.message, error.hint)
            return _RegistryCheck(lines=lines, published=(line, self._invitation(where)))
        made = None
        if current is None:
            line = missing("catalogue", f"none at {where}", "imagefactory site publish")
        elif current.catalogue is None:
            whose = f"a key that is not trusted now ({current.keyid[:16]})" if current.keyid else "nobody"
            said = f"{current.where} is signed by {whose}, so your readers reject it"
            line = broken("catalogue", said, "imagefactory site publish")
        else:
            made, expires = current.catalogue.made, current.catalogue.expires
            name = next((key.name for key in self.trust.keys if key.keyid == current.keyid), "")
            said = f"{current.where}, signed by '{name}' on {made:%Y-%m-%d}, valid until {expires:%Y-%m-%d}"
            if expires <= self.now:
                line = broken("catalogue", f"{said}: it expired", "imagefactory site publish")
            elif expires - self.now < CATALOG_EXPIRY_WARNING:
                line = warn("catalogue", f"{said}, which is soon", "imagefactory site publish")
            elif (own := self._own_key()) and own.keyid != current.keyid:  # of two facilitators one signs it
                line = good("catalogue", f"{said}; the key here, '{own.name}', cannot sign it")
            else:
                line = good("catalogue", said)
        return _RegistryCheck(lines=lines, published=(line, self._invitation(where)), made=made)

    def _own_key(self) -> SigningKey | None:
        try:
            return signing_key(self.access, self.now)
        except ImagefactoryError:
            return None  # said in its own line

    def _invitation(self, where: StoreRepository | Path) -> Diagnosis:
        """The one beside the catalogue; for a catalogue in a file the one that `invite` wrote here."""
        push = "imagefactory site invite --push"
        try:
            if isinstance(where, StoreRepository):
                found = where.store.manifest(where.repository, TAG)
                if found is None:
                    return missing("invitation", f"none at {where}:{TAG}", push)
                name = f"{where}:{TAG}"
                layer = parse_layer(found[1], name, INVITATION)
                data = unpack_artifact(b"".join(where.store.read(where.repository, layer)), name)
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
            return broken("invitation", f"{name} names no key that is trusted here now", push)
        own = self._own_key()
        if own and own.keyid not in named:
            return warn("invitation", f"{name} does not name '{own.name}', which signs now", push)
        return good("invitation", f"{name}, for {invited.catalogue}")

    def mirrors(self, made: datetime | None) -> Iterator[Diagnosis]:
        mirrors = listed(self.settings.catalogue_mirrors.value)
        if not mirrors:
            said = "none: while the registry is down, readers have only the copies that they keep"
            yield warn("mirrors", said, 'catalogue-mirrors = "HOST/PATH" in imagefactory.toml')
            return
        with ThreadPoolExecutor(len(mirrors)) as threads:
            yield from threads.map(lambda mirror: self._mirror(mirror, made), mirrors)

    def _mirror(self, mirror: str, made: datetime | None) -> Diagnosis:
        copy = "imagefactory image copy REGISTRY/catalogue:current MIRROR/catalogue:current"
        where: StoreRepository | Path = Path(mirror)
        try:
            if not mirror.startswith("/"):
                reference = catalog_repository(mirror)
                store = open_registry(self.access, reference.registry, retry_policy=HURRY)
                where = StoreRepository(store=store, repository=reference.repository)
            current = read_current(where, self.trust, self.now)
        except ImagefactoryError as error:
            return broken("mirrors", f"{mirror}: {error.message}", error.hint)
        if current is None or current.catalogue is None:
            return broken("mirrors", f"{mirror} has no catalogue that a trusted key signed", copy)
        if made and current.catalogue.made < made:
            said = f"{mirror} has an older catalogue, of {current.catalogue.made:%Y-%m-%d %H:%M} UTC"
            return warn("mirrors", said, copy)
        return good("mirrors", mirror)


def _push(store: RegistryClient, repository: str, *, login: bool) -> Diagnosis:
    place = f"{store.host}/{repository}"
    try:
        store.check_push(repository)
    except ImagefactoryError as error:
        return broken("push", error.message, f"docker login {store.host}, with an account that may push")
    if login:
        return good("push", f"allowed to {place}")
    return warn("push", f"allowed to {place}, for anyone", "let the registry ask for a login")


def _unasked(say: Callable[[str, str, str], Diagnosis], why: str) -> Iterator[Diagnosis]:
    for name in ("catalogue", "invitation"):
        yield say(name, f"not known: {why}", "see registry")


def read_small(path: Path) -> str:
    """The text of a small file, empty where there is none that can be read. A clone may bring a pipe."""
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
    """What works without it, or still."""
    return Diagnosis(name=name, state=Health.WARNING, detail=detail, remedy=remedy, needed_for="site")


def missing(name: str, detail: str, remedy: str) -> Diagnosis:
    """What is not set up."""
    return Diagnosis(name=name, state=Health.MISSING, detail=detail, remedy=remedy, needed_for="site")


def broken(name: str, detail: str, remedy: str) -> Diagnosis:
    return Diagnosis(name=name, state=Health.DENIED, detail=detail, remedy=remedy, needed_for="site")
