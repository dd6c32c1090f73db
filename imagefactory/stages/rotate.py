"""A key that ends: what it signed in its time is recorded before it is retired.

A signature has no clock of its own: who holds a key writes any date. So a record is made of what lies in the
store, in its journal and in the registry now; later nothing enters it any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.project import Factory
from imagefactory.fs import replacing
from imagefactory.oci.candidates import APPROVAL_TYPE, PORTABLE_TYPE, VERDICT_TYPE
from imagefactory.oci.graph import Place
from imagefactory.oci.manifests import digest_of
from imagefactory.progress import Progress
from imagefactory.actions.images import Promoting, list_verdicts
from imagefactory.extras.site.tables import sifs_of
from imagefactory.actions.verdicts import registry_of
from imagefactory.trust.attached import Journal, read_statements
from imagefactory.trust.judgement import open_signed
from imagefactory.verdicts.reconcile import known_statements
from imagefactory.trust.policy import RECORDS, Trust, TrustedKey, format_record

_KINDS = (VERDICT_TYPE, PORTABLE_TYPE, APPROVAL_TYPE)


def record_of(factory: Factory, key: TrustedKey, now: datetime, progress: Progress) -> bytes:
    """The record of what a key has signed so far: verdicts, statements of portability and approvals.

    Raises RegistryError if the registry of the settings does not answer: what lies there would be lost.
    """
    trust = Trust(keys=(key,))
    envelopes = {*_stored(factory), *_registered(factory, now, progress)}
    opened = [one for data in envelopes if (one := open_signed(data, trust)).key]
    return format_record(digest_of(one.envelope.payload) for one in opened if one.envelope)


def _stored(factory: Factory) -> Iterator[bytes]:
    """What the store here has, and what was attached to registries from it."""
    statements = (*known_statements(factory.layout), *Journal(factory.layout.path).read_all())
    return (one.envelope for one in statements if one.kind in _KINDS)


def _registered(factory: Factory, now: datetime, progress: Progress) -> Iterator[bytes]:
    """What the registry of the settings has of all targets, and of their .sif files."""
    if not factory.settings.registry.value:
        return
    for target in factory.targets:
        place = registry_of(factory, target.family)
        images = list_verdicts(factory, Promoting(target=target, place=place, now=now), progress)
        manifests = [image.subject.manifest for image in images]
        for manifest in dict.fromkeys((*manifests, *sifs_of(place, target, images))):
            yield from _attached(place, manifest)


def _attached(place: Place, manifest: str) -> Iterator[bytes]:
    for kind in _KINDS:
        yield from (one.envelope for one in read_statements(place, manifest, kind) if one.envelope)


def write_record(folder: Path, name: str, record: bytes) -> Path:
    """Write the record of a key beside imagefactory.toml. Raises UsageError."""
    path = folder / RECORDS / f"{name}.txt"
    try:
        path.parent.mkdir(exist_ok=True)
        if path.parent.is_symlink():
            raise UsageError(
                "directory-is-link",
                f"{path.parent} is a symbolic link, so it is not read",
                hint="replace it by a directory",
            )
        with replacing(path, durable=True) as file:
            file.write(record)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    return path


def next_name(name: str, taken: set[str]) -> str:
    """The name of the key that takes the place of another: `lab` becomes `lab-2`, `lab-2` `lab-3`."""
    found = re.fullmatch(r"(.*?)(?:-([0-9]{1,4}))?", name)
    base, number = (found[1], int(found[2] or 1)) if found else (name, 1)
    while (new := f"{base}-{number + 1}") in taken:
        number += 1
    return new
