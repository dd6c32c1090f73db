"""Connections of this machine: package index, channels, Debian's archive, registries.

They are built from the settings and the environment. Each module is imported only when needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.errors import UsageError
from imagefactory.oci.layout import Layout
from imagefactory.oci.store import split_place
from imagefactory.progress import QUIET
from imagefactory.settings.load import Settings

if TYPE_CHECKING:
    from imagefactory.http import RetryPolicy
    from imagefactory.lock.conda.channels import ChannelAccess
    from imagefactory.lock.debian.archive import DebianMirror
    from imagefactory.lock.pypi.index import PackageIndex
    from imagefactory.lock.pypi.uv import UvLocker
    from imagefactory.oci.registry.client import RegistryClient
    from imagefactory.oci.transfer import CancelToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The settings and environment of this call, for everything that needs no recipes."""

    settings: Settings
    environ: Mapping[str, str]
    tell: Callable[[str], object] = QUIET.note
    """A function that prints one line to the user."""

    @property
    def layout(self) -> Layout:
        """Return the store on this machine."""
        return Layout(self.settings.store_path)


def cache_lock(access: Access) -> Path:
    """Return the lock of the cache, which several stores may share."""
    return access.settings.cache_path / "lock"


def package_index(access: Access) -> PackageIndex:
    from imagefactory.lock.pypi.index import find_index, trusting

    index = find_index(access.settings.index, environ=access.environ, prefix=Path(sys.prefix))
    sdists = access.settings.cache_path / "sdists"
    index = replace(index, named=access.settings.index_map, root=access.settings.root_path, sdists=sdists)
    directory = access.settings.cache_path / "certificates"
    return trusting(index, access.settings.certificates_path, directory)


def uv_locker(index: PackageIndex) -> UvLocker:
    from imagefactory.lock.pypi.uv import UvLocker

    return UvLocker(index, python=Path(sys.executable))


def conda_channels(access: Access) -> ChannelAccess:
    """Return the access of this machine to conda channels."""
    from imagefactory.lock.conda.channels import find_channels

    certificates = package_index(access).certificates
    return find_channels(access.settings.channels.value, access.environ, certificates)


def debian_mirror(access: Access) -> DebianMirror:
    from imagefactory.lock.debian.archive import find_mirror

    settings = access.settings
    debs = settings.cache_path / "debs"
    mirror = find_mirror(
        settings.debian_mirror.value,
        debs,
        access.environ,
        etc_apt=Path("/etc/apt"),
        snapshot=settings.debian_snapshot.value,
    )
    trusted = package_index(access).certificates if settings.certificates.value else ""
    return replace(mirror, certificates=trusted)


def registry_place(access: Access, address: str = "") -> tuple[str, str]:
    """Return (host, path) of a registry: `address`, else the setting. Raises UsageError without either."""
    location = address or access.settings.registry.value
    if not location:
        raise UsageError(
            "no-registry-set",
            "no registry is set",
            hint='pass --registry HOST[:PORT][/PATH], or set registry = "..." in imagefactory.toml',
        )
    return split_place(location)


def repository_of(path: str, family: str) -> str:
    return f"{path}/{family}" if path else family


def open_answering(access: Access, host: str, *, hurried: bool = False) -> RegistryClient:
    """Return a registry that answers. Raises RegistryError, with `hurried` within seconds."""
    from imagefactory.http import HURRIED

    registry = open_registry(access, host)
    (open_registry(access, host, retry_policy=HURRIED) if hurried else registry).check()
    return registry


def open_registry(
    access: Access, host: str, brake: CancelToken | None = None, *, retry_policy: RetryPolicy | None = None
) -> RegistryClient:
    """Return a registry with this machine's certificates and the credentials of `docker login`.

    `brake` ends its waits between attempts when its transfer has failed. Without `retry_policy` it uses that
    of a transfer.
    """
    from imagefactory.oci.credentials import find_credentials
    from imagefactory.oci.registry.client import RegistryClient
    from imagefactory.oci.registry.session import RegistryOptions

    settings = access.settings
    options = RegistryOptions(
        credentials=find_credentials(access.environ),
        certificates=Path(trusted) if (trusted := package_index(access).certificates) else None,
        plain_hosts=settings.plain_hosts,
        sleep=brake.sleep if brake else time.sleep,
        tell=access.tell,
    )
    return RegistryClient(host, replace(options, retry_policy=retry_policy) if retry_policy else options)
