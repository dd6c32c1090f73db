"""Write the invitation of a project, and join a center by its invitation.

invitation_of(settings, now) -> Invitation -> a file, or <registry>/catalog:invitation
read_invitation(...) -> find_joining(...) -> the user's imagefactory.toml, or centers/NAME.toml next to it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from imagefactory.access import Access, open_registry
from imagefactory.actions.centers import center_name
from imagefactory.actions.read_catalog import read_limited
from imagefactory.errors import CheckFailedError, NothingSelectedError, RegistryError, UsageError, os_problem
from imagefactory.oci.store import resolve_mirror
from imagefactory.settings.choices import CONTAINERS
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


def invitation_of(settings: Settings, catalog: str, now: datetime) -> Invitation:
    """Return the invitation for users of this project's catalog. An empty `catalog` means the setting.

    Raises UsageError if no catalog is set, CheckFailedError if the project trusts no key.
    """
    location = catalog or settings.catalog.value or settings.registry.value
    if not location:
        raise UsageError(
            "no-catalog-set",
            "neither `catalog` nor `registry` is set, so readers cannot find the catalog",
            hint="pass --catalog HOST/PATH, or --catalog FILE with a file that all readers can read",
        )
    keys = create_invitation(read_trust(settings.files), now)
    if not keys:
        raise CheckFailedError(
            "no-trusted-key",
            "this project trusts no key, so readers could not trust its catalog",
            hint="create and trust a key: imagefactory key create NAME && imagefactory key trust NAME",
        )
    return Invitation(
        catalog=location,
        site=settings.site.value,
        sif_folder=settings.sif_folder.value,
        keys=keys,
        mirrors="" if catalog else settings.catalog_mirrors.value,
        center=settings.center.value,
        container=settings.container.value.removeprefix(CONTAINERS[0]),
    )


def read_invitation(settings: Settings, environ: Mapping[str, str], location: str) -> Invitation:
    """Return the invitation in a file or in a registry HOST[/PATH]. Raises UsageError, RegistryError."""
    path = Path(location).expanduser()
    if path.is_file() or path.suffix in (".toml", ".json") or location.startswith(("/", ".", "~")):
        data = read_limited(path, LARGEST, "pass the file of your center, or its registry")
        if len(data) > LARGEST:
            raise UsageError(
                "invitation-file-too-large",
                f"{path} is not an invitation: it has more than {LARGEST:,} bytes",
                hint="pass the invitation file of your center",
            )
        return parse_invitation(data, location)
    if "://" in location:
        raise UsageError(
            "reference-invalid",
            f"{location[:80]} is the address of a web page, not of a registry",
            hint="download the invitation and pass the file, or pass HOST/PATH of a registry",
        )
    reference = invitation_place(location)
    mirror = resolve_mirror(reference, settings.mirror_map)
    store = open_registry(Access(settings=settings, environ=environ), mirror.registry)
    manifest = store.manifest(mirror.repository, mirror.tag_or_digest)
    if manifest is None:
        raise RegistryError(
            "invitation-not-found",
            f"no invitation at {reference}",
            hint="ask your center for its address or file (imagefactory site invite --push writes one)",
        )
    layer = parse_layer(manifest[1], str(mirror), INVITATION)
    if layer.size > LARGEST:
        raise RegistryError(
            "invitation-too-large",
            f"{mirror} is not an invitation: it has {layer.size:,} bytes, more than {LARGEST:,}",
            hint="pass the address of your center's invitation",
        )
    data = unpack_artifact(b"".join(store.read(mirror.repository, layer)), str(mirror))
    return parse_invitation(data, location)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """The settings file for a `center` that a user joins, and its changes by the invitation.

    `beside` are the centers that were joined before. If there are any, this center gets its own file.
    """

    path: Path
    joining: InvitationSettings
    center: str
    beside: tuple[str, ...] = ()

    def write(self) -> None:
        """Write the file. Raises UsageError."""
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
    """Return the file for an invitation's center, without settings that the site sets for all users.

    The first center is in the user's main file, each other one in its own file. `name` is the user's name
    for the center: the name of a joined center means this center, even if its catalog moved. Raises
    UsageError if the invitation may be for a joined center.
    """
    path = user_file(environ)
    sites = settings.files[settings.files.index(path) + 1 :]
    main, files = _joined_centers(path, sites, environ)
    documents = {center: main if file == path else read_document(file) for center, file in files.items()}
    same = (key for key, row in documents.items() if row.get("catalog") == invitation.catalog)
    known = next(same, "")
    new = name or known or _new_name(documents, invitation)
    if not CENTER.fullmatch(new):
        raise UsageError(
            "option-invalid",
            f"--name: '{new[:40]}' is not a valid name for a center",
            hint="use 1 to 32 lowercase letters, digits, '_' and '-', such as chtc",
        )
    if known and known != new:
        if new in files or files[known] != path:
            raise UsageError(
                "center-already-joined",
                f"{invitation.catalog} is the catalog of '{known}', which you already joined",
                hint=f"to change its name, run imagefactory site remove {known}, then join it again",
            )
        files[new], documents[new] = files.pop(known), documents.pop(known)  # the first one is renamed
    file = files.get(new) or (center_directory(environ) / f"{new}.toml" if path in files.values() else path)
    for other in dict.fromkeys((path, *sites, *files.values())):
        if other != file:
            check_not_retired(read_document(other).get("trust", []), invitation, str(other), now)
    # The first center's name is written only if the user chose it; another one's is its file name.
    center = (name or str(main.get("center", "")) or invitation.center) if file == path else ""
    others = tuple(read_document(site) for site in sites) if file == path else ()
    text = read_text(file) if file.is_file() else ""
    invitation = replace(invitation, center=center)
    joining = join_center(text, invitation, others, str(file), now, moved=new in documents)
    return UserFile(
        path=file, joining=joining, center=new, beside=tuple(key for key in documents if key != new)
    )


def _joined_centers(
    path: Path, sites: Sequence[Path], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the combined document of the first center, and the file of each center by its name.

    Raises UsageError for an invalid file, and if two centers have one name.
    """
    main = {key: value for file in (*reversed(sites), path) for key, value in read_document(file).items()}
    files = {file.stem: file for file in center_files(environ)}
    if "catalog" in main:
        name = center_name(*(str(main.get(key, "")) for key in ("center", "site", "catalog")))
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


def _new_name(documents: Mapping[str, Mapping[str, Any]], invitation: Invitation) -> str:
    """Return a name for another center. Raises UsageError if the invitation may be for a joined center."""
    name = center_name(invitation.center, invitation.site, invitation.catalog)
    ids = {grant.key.keyid for grant in invitation.keys}
    for known, document in documents.items():
        same = ids & {row.get("keyid") for row in document.get("trust", [])}
        if known == name or same:
            raise UsageError(
                "center-conflict",
                f"this invitation has {'a key' if same else 'the name'} of your center '{known}', but "
                f"another catalog: {invitation.catalog}, not {document['catalog']}",
                hint=f"if its catalog moved, pass --name {known}; if it is another center, pass --name OTHER",
            )
    return name


def remove_center(
    settings: Settings, environ: Mapping[str, str], name: str
) -> tuple[Path, str | None, list[str]]:
    """Return the file of a center, its text without this center, and the removed settings.

    The text is None to delete the file. Raises NothingSelectedError for a center that is not joined,
    UsageError for a center that the site set.
    """
    import tomlkit

    path = user_file(environ)
    sites = settings.files[settings.files.index(path) + 1 :]
    _, files = _joined_centers(path, sites, environ)
    if name not in files:
        names = ", ".join(files) or "none"
        raise NothingSelectedError(
            "center-unknown", f"you have not joined a center '{name[:40]}'", hint=f"joined centers: {names}"
        )
    document = read_document(files[name])
    removed = [f"{key} = {document[key]}" for key in SETTINGS if key in document]
    removed += [f"key {row['name']}" for row in document.get("trust", [])]
    if files[name] != path:
        return files[name], None, removed
    if "catalog" not in document:
        site = next(site for site in sites if "catalog" in read_document(site))
        raise UsageError(
            "center-set-by-site",
            f"{site} sets the catalog of '{name}' for all users",
            hint="ask the site's staff to change this file",
        )
    text = tomlkit.parse(read_text(path))
    for key in (*SETTINGS, "trust"):
        text.pop(key, None)
    return path, tomlkit.dumps(text), removed
