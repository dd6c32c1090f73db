"""An invitation on its way: made of a factory's settings and trust, and read on a person's side.

invitation_of(settings, now) -> Invitation -> a file, or <registry>/catalogue:invitation
read_invitation(...) -> find_joining(...) -> the user's own imagefactory.toml
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access, open_registry
from imagefactory.catalogue.invitation import (
    LARGEST,
    Invitation,
    Joining,
    invitation_place,
    invite_with,
    join,
    parse_invitation,
)
from imagefactory.catalogue.package import INVITATION, parse_layer, unpack
from imagefactory.errors import CheckFailedError, RegistryError, UsageError
from imagefactory.oci.graph import Place
from imagefactory.oci.mirrors import resolve
from imagefactory.oci.store import Reference
from imagefactory.settings.files import read_document, user_file
from imagefactory.settings.load import Settings
from imagefactory.verdicts.trust import read_text, read_trust, write_text


def invitation_of(settings: Settings, catalogue: str, now: datetime) -> Invitation:
    """What readers of this factory's catalogue need; `catalogue` is empty for where the settings say it lies.

    Raises UsageError where they do not, CheckFailedError where no key is trusted that readers could believe.
    """
    place = catalogue or settings.catalogue.value or settings.registry.value
    if not place:
        raise UsageError(
            "nobody could find the catalogue: neither `catalogue` nor `registry` is set here",
            hint="imagefactory invite --catalogue HOST/PATH, or the path of a file that everybody reads",
        )
    keys = invite_with(read_trust(settings.files), now)
    if not keys:
        raise CheckFailedError(
            "no key is trusted here, so readers could believe nobody",
            hint="imagefactory keys new NAME && imagefactory keys trust NAME; then imagefactory catalogue",
        )
    return Invitation(
        catalogue=place,
        site=settings.site.value,
        sif_folder=settings.sif_folder.value,
        keys=keys,
        mirrors="" if catalogue else settings.catalogue_mirrors.value,
    )


def read_invitation(settings: Settings, environ: Mapping[str, str], where: str) -> Invitation:
    """That of a file, or of the registry's place HOST[/PATH]. Raises UsageError, RegistryError."""
    path = Path(where).expanduser()
    if path.is_file() or path.suffix in (".toml", ".json") or where.startswith(("/", ".", "~")):
        return parse_invitation(_read_file(path), where)
    if "://" in where:
        raise UsageError(
            f"{where[:80]} is the address of a page", hint="fetch it, and name the file; or write HOST/PATH"
        )
    return parse_invitation(_fetch(settings, environ, invitation_place(where)), where)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", hint="name the file that your centre gave you, or its registry"
        ) from error
    if len(data) > LARGEST:
        raise UsageError(f"{path}: is larger than any invitation", hint="is that the file?")
    return data


def _fetch(settings: Settings, environ: Mapping[str, str], reference: Reference) -> bytes:
    access, asked = Access(settings=settings, environ=environ), resolve(reference, settings.mirror_map)
    place = Place(store=open_registry(access, asked.registry), repository=asked.repository)
    manifest = place.store.manifest(place.repository, asked.wanted)
    if manifest is None:
        raise RegistryError(
            f"there is no invitation at {reference}",
            hint="ask your centre for its address or file (they write one: imagefactory invite --push)",
        )
    layer = parse_layer(manifest[1], str(asked), INVITATION)
    if layer.size > LARGEST:
        raise RegistryError(f"{asked} is larger than any invitation", hint="see who put it there")
    return unpack(b"".join(place.store.read(place.repository, layer)), str(asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """A person's own imagefactory.toml, and what an invitation changes in it."""

    path: Path
    joining: Joining

    def write(self) -> None:
        """Beside and renamed. Raises UsageError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self.path}: {error.strerror}", hint="look at the rights of that folder"
            ) from error
        write_text(self.path, self.joining.text)


def find_joining(
    settings: Settings, environ: Mapping[str, str], invitation: Invitation, now: datetime
) -> UserFile:
    """What the user's own file lacks, beside what the site says for everybody. Raises UsageError."""
    path = user_file(environ)
    sites = settings.files[settings.files.index(path) + 1 :]
    text = read_text(path) if path.is_file() else ""
    others = tuple(read_document(one) for one in sites)
    return UserFile(path=path, joining=join(text, invitation, others, str(path), now))
