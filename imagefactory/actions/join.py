"""An invitation on its way: made of a factory's settings and trust, and read on a person's side.

invitation_of(settings, now) -> Invitation -> a file, or <registry>/catalogue:invitation
read_invitation(...) -> find_joining(...) -> the user's own imagefactory.toml, or centers/NAME.toml beside it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from imagefactory.access import Access, open_registry
from imagefactory.actions.centers import center_name
from imagefactory.errors import CheckFailedError, NothingSelectedError, RegistryError, UsageError, os_problem
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.store import ImageReference, resolve_mirror
from imagefactory.settings.files import center_directory, center_files, read_document, user_file
from imagefactory.settings.load import CENTER, Settings
from imagefactory.trust.catalog_package import INVITATION, parse_layer, unpack_artifact
from imagefactory.trust.invitation import (
    LARGEST,
    SETTINGS,
    Invitation,
    InvitationSettings,
    check_not_retired,
    create_invitation,
    invitation_place,
    join_center,
    parse_invitation,
)
from imagefactory.trust.policy import read_text, read_trust, write_text


def invitation_of(settings: Settings, catalogue: str, now: datetime) -> Invitation:
    """What readers of this factory's catalogue need; `catalogue` is empty for where the settings say it lies.

    Raises UsageError where they do not, CheckFailedError where no key is trusted that readers could believe.
    """
    place = catalogue or settings.catalogue.value or settings.registry.value
    if not place:
        raise UsageError(
            "no-catalog-set",
            "neither `catalogue` nor `registry` is set, so readers cannot find the catalog",
            hint="imagefactory site invite --catalog HOST/PATH, or the path of a file that all readers can "
            "read",
        )
    keys = create_invitation(read_trust(settings.files), now)
    if not keys:
        raise CheckFailedError(
            "no-trusted-key",
            "this project trusts no key, so readers could not trust its catalog",
            hint="imagefactory key create NAME && imagefactory key trust NAME && imagefactory site publish",
        )
    return Invitation(
        catalogue=place,
        site=settings.site.value,
        sif_folder=settings.sif_folder.value,
        keys=keys,
        mirrors="" if catalogue else settings.catalogue_mirrors.value,
        center=settings.center.value,
    )


def read_invitation(settings: Settings, environ: Mapping[str, str], where: str) -> Invitation:
    """That of a file, or of the registry's place HOST[/PATH]. Raises UsageError, RegistryError."""
    path = Path(where).expanduser()
    if path.is_file() or path.suffix in (".toml", ".json") or where.startswith(("/", ".", "~")):
        return parse_invitation(_read_file(path), where)
    if "://" in where:
        raise UsageError(
            "reference-invalid",
            f"{where[:80]} is the address of a web page, not of a registry",
            hint="download the file and name it, or use HOST/PATH",
        )
    return parse_invitation(_fetch(settings, environ, invitation_place(where)), where)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(
            *os_problem("read", path, error), hint="pass the file of your center, or its registry"
        ) from error
    if len(data) > LARGEST:
        raise UsageError(
            "invitation-file-too-large",
            f"{path} has more than the {LARGEST:,} bytes that an invitation may have",
            hint="check that it is the file of your center",
        )
    return data


def _fetch(settings: Settings, environ: Mapping[str, str], reference: ImageReference) -> bytes:
    access, asked = Access(settings=settings, environ=environ), resolve_mirror(reference, settings.mirror_map)
    place = StoreRepository(store=open_registry(access, asked.registry), repository=asked.repository)
    manifest = place.store.manifest(place.repository, asked.tag_or_digest)
    if manifest is None:
        raise RegistryError(
            "invitation-not-found",
            f"no invitation at {reference}",
            hint="ask your center for its address or file (imagefactory site invite --push writes one)",
        )
    layer = parse_layer(manifest[1], str(asked), INVITATION)
    if layer.size > LARGEST:
        raise RegistryError(
            "invitation-too-large",
            f"{asked} has {layer.size:,} bytes, and an invitation has at most {LARGEST:,}",
            hint="check who pushed it",
        )
    return unpack_artifact(b"".join(place.store.read(place.repository, layer)), str(asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """The file of a center that a person joins, and what an invitation changes in it.

    `center` is its name. `beside` are those that were joined before: its file is one of its own then.
    """

    path: Path
    joining: InvitationSettings
    center: str
    beside: tuple[str, ...] = ()

    def write(self) -> None:
        """Beside and renamed. Raises UsageError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                *os_problem("write", self.path, error), hint="check the permissions of its directory"
            ) from error
        write_text(self.path, self.joining.text)


def find_joining(
    settings: Settings, environ: Mapping[str, str], invitation: Invitation, now: datetime, name: str = ""
) -> UserFile:
    """What the file of that center lacks, beside what the site says for everybody.

    The first center is in the user's own file, each other one in a file of its own. `name` is what the person
    calls it: that of a center which is joined means this one, wherever its catalogue is now. Raises
    UsageError where nothing tells whether it is one of these.
    """
    path = user_file(environ)
    sites = settings.files[settings.files.index(path) + 1 :]
    main, files = _joined(path, sites, environ)
    documents = {one: main if file == path else read_document(file) for one, file in files.items()}
    known = _joined_as(documents, invitation)
    new = name or known or _new_name(documents, invitation)
    if not CENTER.fullmatch(new):
        raise UsageError(
            "option-invalid",
            f"--name: '{new[:40]}' is not a name of a center",
            hint="use 1 to 32 lowercase letters, digits, '_' and '-', such as chtc",
        )
    if known and known != new:
        if new in files or files[known] != path:
            raise UsageError(
                "center-already-joined",
                f"{invitation.catalogue} is the catalog of '{known}', which you already joined",
                hint=f"imagefactory site remove {known}, then join it under another name",
            )
        files[new], documents[new] = files.pop(known), documents.pop(known)  # the first one gets another name
    file = files.get(new) or (center_directory(environ) / f"{new}.toml" if path in files.values() else path)
    for one in dict.fromkeys((path, *sites, *files.values())):
        if one != file:
            check_not_retired(read_document(one).get("trust", []), invitation, str(one), now)
    # The first one's name is written where somebody chose it, another one's is that of its file.
    chosen = name or str(main.get("center", "")) or invitation.center
    wanted = replace(invitation, center=chosen if file == path else "")
    others = tuple(read_document(one) for one in sites) if file == path else ()
    text = read_text(file) if file.is_file() else ""
    joining = join_center(text, wanted, others, str(file), now, moved=new in documents)
    beside = tuple(one for one in documents if one != new)
    return UserFile(path=file, joining=joining, center=new, beside=beside)


def _joined(
    path: Path, sites: Sequence[Path], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Path]]:
    """What the files for the first center say together, and the file of each center by its name.

    Raises UsageError for a file that cannot be used, and where two centers have one name.
    """
    main = {key: value for one in (*reversed(sites), path) for key, value in read_document(one).items()}
    files = {one.stem: one for one in center_files(environ)}
    if "catalogue" in main:
        name = center_name(*(str(main.get(key, "")) for key in ("center", "site", "catalogue")))
        if name in files:
            raise UsageError(
                "center-name-duplicate",
                f"{files[name]}: two centers have the name '{name}'",
                hint=f'rename this file, or set center = "NAME" for the first center in {path}',
            )
        files = {name: path, **files}
    for file in (path, *sites, *files.values()):
        read_trust((file,))
    return main, files


def remove_center(
    settings: Settings, environ: Mapping[str, str], name: str
) -> tuple[Path, str | None, list[str]]:
    """The file of a center, its text without that center, and what goes; None for a file that goes whole.

    Raises NothingSelectedError for a center that is not joined, UsageError for one that the site has set.
    """
    import tomlkit

    path = user_file(environ)
    sites = settings.files[settings.files.index(path) + 1 :]
    _, files = _joined(path, sites, environ)
    if name not in files:
        joined = ", ".join(files) or "none"
        raise NothingSelectedError(
            "center-unknown", f"you have not joined a center '{name[:40]}'", hint=f"joined centers: {joined}"
        )
    document = read_document(files[name])
    gone = [f"{key} = {document[key]}" for key in SETTINGS if key in document]
    gone += [f"key {row['name']}" for row in document.get("trust", [])]
    if files[name] != path:
        return files[name], None, gone
    if "catalogue" not in document:
        site = next(one for one in sites if "catalogue" in read_document(one))
        raise UsageError(
            "center-set-by-site",
            f"{site} sets the catalog of '{name}' for all users",
            hint="ask your site's staff",
        )
    text = tomlkit.parse(read_text(path))
    for key in (*SETTINGS, "trust"):
        text.pop(key, None)
    return path, tomlkit.dumps(text), gone


def _joined_as(documents: Mapping[str, Mapping[str, Any]], invitation: Invitation) -> str:
    """The center that is joined by that very catalogue; empty for none."""
    return next((name for name, one in documents.items() if one.get("catalogue") == invitation.catalogue), "")


def _new_name(documents: Mapping[str, Mapping[str, Any]], invitation: Invitation) -> str:
    """What a center is called that is joined beside others. Raises UsageError where it may be one of them."""
    name = center_name(invitation.center, invitation.site, invitation.catalogue)
    ids = {grant.key.keyid for grant in invitation.keys}
    for known, document in documents.items():
        same = ids & {row.get("keyid") for row in document.get("trust", [])}
        if known == name or same:
            raise UsageError(
                "center-conflict",
                f"this invitation has {'a key' if same else 'the name'} of the center '{known}', which you "
                f"joined, and another catalog: {invitation.catalogue}, not {document['catalogue']}",
                hint=f"if its catalog moved, use --name {known}; for another center, use --name OTHER",
            )
    return name
