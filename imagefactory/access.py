"""How this machine reaches what it is not: package index, channels, Debian's archive, registries.

Settings and environment name them; here they meet the rooms.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.errors import UsageError
from imagefactory.factory import Factory

if TYPE_CHECKING:
    from imagefactory.oci.registry.client import Registry
    from imagefactory.oci.transfer import Brake

if TYPE_CHECKING:
    from imagefactory.lock.conda.channels import Channels
    from imagefactory.lock.debian.sources import DebianMirror
    from imagefactory.lock.pypi.index import PackageIndex
    from imagefactory.lock.pypi.uv import UvLocker


def package_index(factory: Factory) -> PackageIndex:
    from imagefactory.lock.pypi.index import find_index, trusting

    found = find_index(factory.settings.index, environ=factory.environ, prefix=Path(sys.prefix))
    return trusting(found, factory.settings.certificates_path)


def uv_locker(index: PackageIndex) -> UvLocker:
    from imagefactory.lock.pypi.uv import UvLocker

    return UvLocker(index, python=Path(sys.executable))


def conda_channels(factory: Factory) -> Channels:
    """How this machine reaches conda's channels."""
    from imagefactory.lock.conda.channels import find_channels

    certificates = package_index(factory).certificates
    return find_channels(factory.settings.channels.value, factory.environ, certificates)


def debian_mirror(factory: Factory) -> DebianMirror:
    from imagefactory.lock.debian.sources import find_mirror

    settings = factory.settings
    debs = settings.cache_path / "debs"
    found = find_mirror(settings.debian_mirror.value, debs, factory.environ, etc_apt=Path("/etc/apt"))
    return replace(found, certificates=settings.certificates.value)


def registry_place(factory: Factory, given: str = "") -> tuple[str, str]:
    """(host, path) of the registry to use: what was given, else the setting. Raises UsageError for none."""
    from imagefactory.oci.mirrors import split_place

    place = given or factory.settings.registry.value
    if not place:
        raise UsageError(
            "no registry is set",
            hint='name one: --registry HOST[:PORT][/PATH], or write registry = "..." in imagefactory.toml',
        )
    return split_place(place)


def repository_of(path: str, family: str) -> str:
    return f"{path}/{family}" if path else family


def open_registry(factory: Factory, host: str, brake: Brake | None = None) -> Registry:
    """A registry with this machine's certificates and what `docker login` left for it.

    `brake` cuts its waits between attempts short when the transfer it serves has failed.
    """
    from imagefactory.oci.credentials import find_credentials
    from imagefactory.oci.registry.client import Registry
    from imagefactory.oci.registry.exchange import RegistryOptions

    settings = factory.settings
    options = RegistryOptions(
        credentials=find_credentials(factory.environ),
        certificates=Path(trusted) if (trusted := package_index(factory).certificates) else None,
        plain_hosts=settings.plain_hosts,
        sleep=brake.sleep if brake else time.sleep,
    )
    return Registry(host, options)
