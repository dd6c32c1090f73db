"""A catalogue of what this factory has in a registry, or in the store on this machine.

    Factory + Making -> catalogue_of() -> Made(catalogue, left_out)

Of each target one image: the candidate of the present lock, or what the target's own tag points to where that
alone is verified, so that a lock that was solved anew does not take away what people use. Its verdicts are
those of the registry and of the store here that can be relied on; predictions are those of the lock's wheels,
or of a scan of the image where it was scanned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime

from imagefactory.access import open_registry, registry_place, repository_of
from imagefactory.catalogue.document import LIFE
from imagefactory.catalogue.model import Catalogue, CataloguedImage, CataloguedSif, Envelopes
from imagefactory.errors import (
    FactoryError,
    LockError,
    NoImageError,
    NothingSelectedError,
    RegistryError,
    StaleError,
    StoreError,
)
from imagefactory.factory import Factory
from imagefactory.model import Lock, Target
from imagefactory.oci.candidates import plain_tag
from imagefactory.oci.graph import Manifest, Place, parse_parts, read_manifest
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.model import Image
from imagefactory.oci.sif import SIF_TYPE, is_sif_manifest
from imagefactory.oci.store import Reference
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.stages.build import find_built
from imagefactory.stages.candidates import is_own
from imagefactory.stages.catalogue_measures import facts_of, predicted_claims, unpacked_size
from imagefactory.stages.locked import require_lock
from imagefactory.stages.push import find_candidate
from imagefactory.stages.verdicts import ANY, find_in, local_place, read_court
from imagefactory.verdicts.envelope import parse_envelope
from imagefactory.verdicts.found import find_verdicts
from imagefactory.verdicts.judgement import Court
from imagefactory.verdicts.model import Judged, Standing
from imagefactory.verdicts.subject import read_subject
from imagefactory.verify.model import Subject
from imagefactory.web import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueMaking:
    """What a catalogue is made of, and when. `registry` (`host[/path]`) is empty for the setting's; where
    that is empty too, it is made of the store on this machine. `named`: each target must be there.
    `patience` is how long the registry is waited for, where that is not as long as usual.
    """

    targets: tuple[Target, ...]
    now: datetime
    registry: str = ""
    named: bool = False
    patience: Patience | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCatalogue:
    """A catalogue, and why targets are not in it: pairs of name and one line. `kept` are targets that stand
    there as the last catalogue has them."""

    catalogue: Catalogue
    left_out: tuple[tuple[str, str], ...]
    kept: tuple[str, ...] = ()


def catalogue_of(factory: Factory, making: CatalogueMaking, progress: Progress) -> MadeCatalogue:
    """Raises RegistryError and StoreError, UsageError for a trust that cannot be read.

    Where `named` is set, NothingSelectedError for the first target that is not there.
    """
    court = read_court(factory, making.now)
    shelves = _shelves(factory, making)
    images, left_out = [], []
    with (
        progress.stage(f"catalogue of {shelves.name}"),
        ThreadPoolExecutor(WORKERS, thread_name_prefix="catalogue") as pool,
    ):
        found = pool.map(lambda one: _catalogue_one(factory, one, shelves, court), making.targets)
        for target, image in zip(making.targets, found, strict=True):
            if isinstance(image, CataloguedImage):
                images.append(image)
                continue
            if making.named:
                raise NothingSelectedError(
                    f"{target.name}: {image}",
                    hint=f"imagefactory build --push {target.name}"
                    if shelves.host
                    else f"imagefactory build {target.name}",
                )
            left_out.append((target.name, image))
    made = making.now.replace(microsecond=0)
    catalogue = Catalogue(made=made, expires=made + LIFE, images=tuple(images), suites=court.suites)
    return MadeCatalogue(catalogue=catalogue, left_out=tuple(left_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shelves:
    """Where images are looked for: `host` is empty for the store on this machine."""

    places: Mapping[str, Place]
    host: str
    name: str


def _shelves(factory: Factory, making: CatalogueMaking) -> _Shelves:
    families = sorted({target.family for target in making.targets})
    if not (making.registry or factory.settings.registry.value):
        places = {family: local_place(factory, family) for family in families}
        return _Shelves(places=places, host="", name=str(factory.layout.path))
    host, path = registry_place(factory, making.registry)
    store = open_registry(factory, host, patience=making.patience)
    store.check()
    places = {family: Place(store=store, repository=repository_of(path, family)) for family in families}
    return _Shelves(places=places, host=host, name=f"{host}/{path}" if path else host)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRoot:
    """An image that a target may be: with its lock where it is what that lock gives."""

    digest: str
    lock: Lock | None
    subject: Subject
    judged: tuple[Judged, ...]
    envelopes: Envelopes
    revocations: Envelopes


def _catalogue_one(
    factory: Factory, target: Target, shelves: _Shelves, court: Court
) -> CataloguedImage | str:
    """The image of a target, or why there is none."""
    place, why, roots = shelves.places[target.family], "", []
    try:
        lock = require_lock(factory, target)
        made = _made(factory, target, place)
    except (LockError, StaleError) as error:
        lock, made, why = None, "", error.message
    except ModuleNotFoundError as error:  # a light install does not know what the lock gives
        lock, made, why = None, "", f"its image cannot be told from others without {error.name}"
    tagged = place.store.manifest(place.repository, plain_tag(target))
    for digest in dict.fromkeys(digest for digest in (made, tagged[0].digest if tagged else "") if digest):
        try:
            root = _read_root(factory, target, (place, digest, lock if digest == made else None), court)
        except NoImageError as error:
            why = f"{digest} is left out: {error.message}"
            continue
        # Anyone who may push can move a tag.
        if digest == made or any(one.proves for one in root.judged) or is_own(factory, place, digest):
            roots.append(root)
        else:
            why = f"{digest} is left out: no verdict verifies it, and this store did not push it"
    if not roots:
        return why or f"{place} has no image of what the lock gives"
    root = next((root for root in roots if any(judged.proves for judged in root.judged)), roots[0])
    return _describe(factory, target, (place, shelves.host, root), court)


def _made(factory: Factory, target: Target, place: Place) -> str:
    """The digest of what the present lock gives, empty where it is not there."""
    if isinstance(place.store, LayoutStore):
        built = find_built(factory, target)
        return built.digest if built else ""
    found = find_candidate(factory, target, place)
    return found.digest if found else ""


def _read_root(
    factory: Factory, target: Target, where: tuple[Place, str, Lock | None], court: Court
) -> CatalogueRoot:
    place, digest, lock = where
    subject = replace(read_subject(place, digest), target=target.name)
    judged, envelopes, revocations = _verdicts(factory, place, subject, court)
    return CatalogueRoot(
        digest=digest,
        lock=lock,
        subject=subject,
        judged=judged,
        envelopes=envelopes,
        revocations=revocations,
    )


def _verdicts(
    factory: Factory, place: Place, subject: Subject, court: Court
) -> tuple[tuple[Judged, ...], Envelopes, Envelopes]:
    """What can be relied on, in the registry and in the store here, and what was taken back."""
    if not court.trust.keys:
        return (), (), ()
    images = [find_in(factory, place, subject, court)]
    if not isinstance(place.store, LayoutStore):
        images.append(find_verdicts(local_place(factory, ANY), subject, court, (place,)))
    good: dict[str, tuple[Judged, bytes]] = {}
    bad = set()
    for image in images:
        for judged in image.judged:
            if judged.standing is Standing.REVOKED or _of_another(judged, subject):
                bad.add(judged.name)
            elif judged.standing is Standing.GOOD:
                good[judged.name] = (judged, image.envelopes[judged.digest])
    kept = {digest: good[digest] for digest in sorted(good) if digest not in bad}
    revocations = {digest: data for image in images for digest, data in image.revocations.items() if data}
    return (
        tuple(judged for judged, _ in kept.values()),
        tuple((judged.digest, data) for judged, data in kept.values()),
        tuple(sorted(_readable(revocations))),
    )


def _of_another(judged: Judged, subject: Subject) -> bool:
    """Whether it was verified as another target, which says nothing of what this one asks for."""
    return judged.verdict is not None and judged.verdict.report.subject.target not in ("", subject.target)


def _readable(envelopes: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    for digest, data in envelopes.items():
        try:
            parse_envelope(data, digest)
        except FactoryError:  # a stranger's: nobody would heed it
            continue
        yield digest, data


# --- describing ----------------------------------------------------------------------------------


def _describe(
    factory: Factory, target: Target, where: tuple[Place, str, CatalogueRoot], court: Court
) -> CataloguedImage:
    place, host, root = where
    manifest = read_manifest(place, root.subject.manifest)
    described = describe_image(factory, target, root, manifest)
    stored = stored_as(factory, root.subject)
    is_sif = is_sif_manifest(json.loads(manifest.data))
    return replace(
        described,
        reference=reference_of(host, place, root.subject),
        unpacked=unpacked_size(factory.layout, stored) if stored else 0,
        sifs=tuple(_sifs(factory, where, court, described.size if is_sif else 0)),
    )


def describe_image(
    factory: Factory, target: Target, root: CatalogueRoot, manifest: Manifest
) -> CataloguedImage:
    """What is said of an image by its target, its lock and its manifest: not where it lies, nor what .sif
    files there are of it, nor its unpacked size."""
    blobs = parse_parts(manifest)[1]
    is_sif = is_sif_manifest(json.loads(manifest.data))
    predicted = predicted_claims(factory, target, root.lock, stored_as(factory, root.subject))
    facts = facts_of(target, root.lock, predicted)
    return CataloguedImage(
        target=target.name,
        family=target.family,
        framework=target.framework,
        version=facts.version,
        cuda=target.cuda,
        python=target.python,
        platform=target.platform,
        reference="",
        subject=root.subject,
        size=sum(blob.size for blob in (blobs[-1:] if is_sif else blobs[1:])),
        unpacked=0,
        runtime=facts.runtime,
        minor_compat=facts.minor_compat,
        driver=facts.driver,
        required=target.capabilities,
        predicted=predicted,
        envelopes=root.envelopes,
        revocations=root.revocations,
    )


def reference_of(host: str, place: Place, subject: Subject) -> str:
    """HOST/NAME@sha256:... of an image in a registry, empty where `host` is: it is in the store here."""
    if not host:
        return ""
    return str(Reference(registry=host, repository=place.repository, digest=subject.index))


def stored_as(factory: Factory, subject: Subject) -> Image | None:
    """The image in the store here, None where it is not there whole."""
    found = factory.layout.manifest(subject.index) or factory.layout.manifest(subject.manifest)
    if found is None:
        return None
    try:
        return factory.layout.load(subject.target, found[0])
    except (StoreError, RegistryError):
        return None


def _sifs(
    factory: Factory, where: tuple[Place, str, CatalogueRoot], court: Court, own: int
) -> Iterator[CataloguedSif]:
    """The .sif files of an image, in the registry and in the store here; of one that is a .sif, itself.

    `own` is its size in that case.
    """
    place, host, root = where
    if own:
        yield CataloguedSif(
            sha256=root.subject.config,
            size=own,
            reference=reference_of(host, place, root.subject),
            subject=root.subject,
            envelopes=root.envelopes,
            revocations=root.revocations,
        )
        return
    seen = set()
    for there, name in ((place, host), (local_place(factory, ANY), "")):
        for referrer in there.store.referrers(there.repository, root.subject.manifest, SIF_TYPE):
            manifest = there.store.manifest(there.repository, referrer.digest)
            if referrer.digest in seen or manifest is None or not is_sif_manifest(json.loads(manifest[1])):
                continue
            seen.add(referrer.digest)
            subject = replace(read_subject(there, referrer.digest), target=root.subject.target)
            judged, envelopes, revocations = _verdicts(factory, there, subject, court)
            if not any(one.proves for one in judged) and not is_own(factory, there, referrer.digest):
                factory.tell(
                    f"{referrer.digest} is left out: no verdict verifies it, this store did not push it"
                )
                continue
            yield CataloguedSif(
                sha256=subject.config,
                size=json.loads(manifest[1])["layers"][0]["size"],
                reference=reference_of(name, there, subject),
                subject=subject,
                envelopes=envelopes,
                revocations=revocations,
            )
