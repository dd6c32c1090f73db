"""A catalogue on its way to its readers, and whose catalogue lies there: signed, put there, never in silence
in the place of another key's.

    read_current(place) -> check_signer() -> publish() -> what was written

What the last catalogue says was revoked stays in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from imagefactory.access import open_registry, registry_place
from imagefactory.trust.catalog import FORM, LARGEST, parse_catalogue, sign_catalogue
from imagefactory.catalogue.model import Catalogue, CataloguedImage
from imagefactory.trust.catalog_package import CURRENT, catalogue_place, parse_layer, unpack
from imagefactory.catalogue.publish import publish_catalogue, write_catalogue
from imagefactory.errors import CheckFailedError, RegistryError, StatementError, UsageError, os_problem
from imagefactory.project import Factory
from imagefactory.oci.graph import Place
from imagefactory.progress import Progress
from imagefactory.actions.audit import log_acts
from imagefactory.actions.catalog import CatalogueMaking, MadeCatalogue, catalogue_of
from imagefactory.actions.read_catalog import keep_former, keep_published
from imagefactory.stages.sign import signing_key
from imagefactory.trust.audit import PUBLISH, ROLLBACK, AuditEntry
from imagefactory.trust.judgement import open_signed, out_of_period
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.verdict import Standing
from imagefactory.verdicts.revoked import merge_revoked
from imagefactory.trust.policy import Trust, read_trust

JOIN_AGAIN = "--yes-everybody-must-join-again"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentCatalogue:
    """What lies where a catalogue goes. `keyid` is the key's that it names, empty if it names none.

    `catalogue` is what it says, None if no key that is trusted now signed it.
    """

    where: str
    keyid: str
    catalogue: Catalogue | None


def current_place(factory: Factory, registry: str) -> Place:
    """The repository of the catalogue, in the registry `registry` or that of the settings."""
    host, path = registry_place(factory, registry)
    reference = catalogue_place(f"{host}/{path}" if path else host)
    return Place(store=open_registry(factory, host), repository=reference.repository)


def read_current(where: Place | Path, trust: Trust, now: datetime) -> CurrentCatalogue | None:
    """Return what lies there now, None for nothing.

    Raises RegistryError if a registry does not answer, UsageError for a file that cannot be read.
    """
    name = str(where) if isinstance(where, Path) else f"{where}:{CURRENT}"
    data = _read(where)
    if data is None:
        return None
    return _open(data, name, trust, now)[0]


def _open(data: bytes, name: str, trust: Trust, now: datetime) -> tuple[CurrentCatalogue, str]:
    """A catalogue that may have expired, by a key that is trusted now; else why it does not count."""
    try:
        opened = open_signed(unpack(data, name), trust, FORM)
    except StatementError as error:
        return CurrentCatalogue(where=name, keyid="", catalogue=None), error.message
    keyid = opened.envelope.keyid if opened.envelope and opened.envelope.signature else ""
    found: Catalogue | None = None
    why = f"{opened.standing}, {opened.why}"
    if opened.envelope and opened.key and opened.standing is Standing.GOOD:
        late = out_of_period(opened.key, now)
        try:
            found = None if late else parse_catalogue(opened.envelope.payload, name, keyid)
            why = f"{late[0]}, {late[1]}" if late else ""
        except StatementError as error:  # of another version
            why = error.message
    return CurrentCatalogue(where=name, keyid=keyid, catalogue=found), why


def open_earlier(data: bytes, where: str, trust: Trust, now: datetime) -> Catalogue:
    """A catalogue that was published once, expired or not. Raises StatementError, also where its key is not
    trusted now: whoever has a retired key can date a catalogue back."""
    current, why = _open(data, where, trust, now)
    found, key = current.catalogue, trust.key(current.keyid)
    late = out_of_period(key, found.made) if found and key else None
    if found is None or late:
        raise StatementError(
            "catalog-rejected",
            f"{where} cannot be used: {f'{late[0]}, {late[1]}' if late else why}",
            hint="choose another: imagefactory catalogue --rollback --dry-run shows the newest valid one",
        )
    return found


def _read(where: Place | Path) -> bytes | None:
    if isinstance(where, Path):
        try:
            with where.open("rb") as file:
                return file.read(LARGEST)
        except FileNotFoundError:
            return None
        except OSError as error:  # whose it is would be guessed
            raise UsageError(
                *os_problem("read", where, error),
                hint="it would be replaced: make it readable, or write to another file",
            ) from error
    manifest = where.store.manifest(where.repository, CURRENT)
    if manifest is None:
        return None
    try:
        layer = parse_layer(manifest[1], str(where))
    except RegistryError:  # not a catalogue
        return b""
    return b"".join(where.store.read(where.repository, layer))


def check_signer(current: CurrentCatalogue | None, key: SigningKey, trust: Trust, now: datetime) -> None:
    """Raises CheckFailedError if another key signed what lies there, unless that key is retired here."""
    if current is None or current.keyid in ("", key.keyid):
        return
    other = trust.key(current.keyid)
    if other and other.until <= now:
        return
    whose = f"'{other.name}'" if other else f"a key that is not trusted here, {current.keyid[:16]}"
    raise CheckFailedError(
        "catalog-other-key",
        f"{current.where} is signed by {whose}, and people who joined may trust only that key",
        hint=f"sign with that key, or retire it (keys rotate); to replace its catalog: {JOIN_AGAIN}, then "
        "imagefactory invite --push",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """What is published, and where: into `output`, else into the registry. `before` is what lies there.

    `rollback` says which earlier catalogue is put back, empty for none.
    """

    making: CatalogueMaking
    output: Path | None = None
    before: CurrentCatalogue | None = None
    rollback: str = ""


def make_catalogue(factory: Factory, asked: Publishing, progress: Progress) -> MadeCatalogue:
    """What is there now, with what the last catalogue said was revoked. Raises as `catalogue_of`."""
    making = asked.making
    made = catalogue_of(factory, making, progress)
    if factory.faults and not making.named and (making.registry or factory.settings.registry.value):
        made = keep_former(factory, made, making.registry, making.now)
    former = asked.before.catalogue if asked.before else None
    return keep_revoked(made, former, [name for name, _ in made.left_out])


def keep_revoked(made: MadeCatalogue, former: Catalogue | None, gone: Sequence[str]) -> MadeCatalogue:
    """With what the last catalogue said was revoked, also of targets that are `gone` from this one."""
    before = {image.target: image for image in former.images} if former else {}
    images = [
        replace(image, revoked=merge_revoked(image.revoked, before[image.target].revoked))
        if image.target in before
        else image
        for image in made.catalogue.images
    ]
    images += _only_revoked(made, [before[name] for name in gone if name in before])
    return replace(made, catalogue=replace(made.catalogue, images=tuple(images)))


def _only_revoked(made: MadeCatalogue, former: Sequence[CataloguedImage]) -> Iterator[CataloguedImage]:
    """Images of the last catalogue that no tag has any more because their verdicts were taken back.

    They stay in the list without verdicts: who uses one learns why not to.
    """
    for image in former:
        revoked = merge_revoked(image.revoked, made.revoked.get(image.target, ()))
        if any(row.subject.manifest == image.subject.manifest for row in revoked):
            yield replace(image, envelopes=(), sifs=(), revoked=revoked)


def publish(
    factory: Factory, made: Catalogue, key: SigningKey, asked: Publishing
) -> tuple[Catalogue, tuple[str, ...]]:
    """Signs a catalogue and brings it where it is read; gives it as signed, and where it lies.

    It expires with its key at the latest.
    """
    trusted = read_trust(factory.settings.files).key(key.keyid)
    if trusted:
        made = replace(made, expires=min(made.expires, trusted.until))
    envelope = sign_catalogue(made, key)
    if asked.output is not None:
        write_catalogue(asked.output, envelope)
        written: tuple[str, ...] = (str(asked.output),)
    else:
        place = current_place(factory, asked.making.registry)
        written = tuple(str(one) for one in publish_catalogue(place, envelope, made.made))
        keep_published(factory.settings, str(place), envelope, made.made)
    act = AuditEntry(
        action=ROLLBACK if asked.rollback else PUBLISH,
        what=f"catalogue of {len(made.images)} images",
        where=written[-1],
        key=key.keyid,
        why=asked.rollback,
    )
    log_acts(factory, (act,))
    return made, written


def publishing_key(factory: Factory, now: datetime) -> SigningKey:
    """The key that signs. Raises CheckFailedError if there is none that this factory itself trusts."""
    key = signing_key(factory, now)
    if key is None:
        raise CheckFailedError(
            "signing-key-missing",
            "no key to sign the catalog",
            hint="create one: imagefactory keys new NAME; or set IMAGEFACTORY_SIGNING_KEY",
        )
    trusted = read_trust(factory.settings.files).key(key.keyid)
    late = (None, "it is not trusted") if trusted is None else out_of_period(trusted, now)
    if late:
        raise CheckFailedError(
            "signer-not-trusted",
            f"signatures of the key '{key.name}' are not valid here: {late[1]}",
            hint=f"run imagefactory keys trust {key.name}, or set IMAGEFACTORY_SIGNING_KEY to another key",
        )
    return key


def publish_again(
    factory: Factory,
    key: SigningKey,
    now: datetime,
    registry: str,
    progress: Progress,
    before: CurrentCatalogue | None = None,
) -> tuple[str, ...]:
    """Sign the catalogue again where people read it; gives where it lies, nothing if there never was one.

    `before` is what lay there, where the caller has read it. Raises as `publish`.
    """
    trust = read_trust(factory.settings.files)
    output: Path | None = None
    if not (registry or factory.settings.registry.value):
        if not factory.settings.catalogue.value.startswith("/"):
            return ()
        output = Path(factory.settings.catalogue.value)
    current = read_current(output or current_place(factory, registry), trust, now)
    if current is None:
        return ()
    check_signer(current, key, trust, now)
    making = CatalogueMaking(targets=factory.targets, now=now, registry=registry)
    asked = Publishing(making=making, output=output, before=before or current)
    made = make_catalogue(factory, asked, progress)
    return publish(factory, made.catalogue, key, asked)[1]
