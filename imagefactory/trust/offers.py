"""From a catalogue to what one may rely on: an image by its target's name, its verdicts judged. Pure.

Whose verdicts count, and until when, is the reader's trust and clock, as if he had read them where the image
lies. A suite counts that he has, that his policy names, or that whoever signed the catalogue let count: his
program may be of another version than theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.errors import NothingSelectedError, RegistryError, StatementError, UsageError, os_problem
from imagefactory.fs import replacing
from imagefactory.oci.artifacts import put_artifact
from imagefactory.oci.candidates import CREATED
from imagefactory.oci.graph import EMPTY, EMPTY_TYPE, Artifact, Manifest, Place
from imagefactory.oci.manifests import MANIFEST_TYPE, Descriptor, canonical_json, digest_of, format_descriptor
from imagefactory.oci.store import Reference
from imagefactory.recipes.names import Known, choose_name, choose_names
from imagefactory.trust.catalog import Catalogue, CataloguedImage, Envelopes, Offer, OfferedSif
from imagefactory.trust.catalog_package import CATALOGUE, CURRENT, INVITATION, LARGEST_PACKED, Packed, pack
from imagefactory.trust.claims import ProofAges, last_proofs, proof_ages
from imagefactory.trust.invitation import TAG
from imagefactory.trust.judgement import Court, judge_revocations, judge_verdicts
from imagefactory.trust.policy import Trust
from imagefactory.trust.verdict import Judged, RevokedCell
from imagefactory.verify.report import Subject
from imagefactory.verify.suite_files import suite_digest

LACKING = "the catalog has no target"


def find_offer(catalogue: Catalogue, name: str, trust: Trust, now: datetime) -> Offer:
    """The offer of a target. Raises NothingSelectedError, as `find_image` does."""
    return judge_offer(catalogue, find_image(catalogue, name), trust, now)


def find_image(catalogue: Catalogue, name: str) -> CataloguedImage:
    """Raises NothingSelectedError where the catalogue has no such target, UsageError where it has several."""
    wanted = choose_name(name, _known(catalogue), LACKING)
    return next(image for image in catalogue.images if image.target == wanted)


def select_images(catalogue: Catalogue, names: Sequence[str]) -> tuple[CataloguedImage, ...]:
    """The images of the targets that `names` ask for; all when empty. Raises as `find_image`."""
    chosen = choose_names(names, _known(catalogue), LACKING)
    return tuple(image for image in catalogue.images if image.target in chosen)


def _known(catalogue: Catalogue) -> Known:
    if not catalogue.images:
        raise NothingSelectedError(
            "catalog-empty",
            "the catalog is empty",
            hint="its maintainers must push images, verify them, and run imagefactory catalogue again",
        )
    return {image.target: image.family for image in catalogue.images}


def find_revoked(
    images: Iterable[CataloguedImage], digest: str, hexes: Sequence[str]
) -> tuple[str, tuple[RevokedCell, ...]]:
    """The target and the rows of an image by its digest, or by digits of a .sif file's sha256."""
    for image in images:
        rows = tuple(
            row
            for row in image.revoked
            if (digest and digest in (row.subject.index, row.subject.manifest))
            or any(row.subject.config.removeprefix("sha256:").startswith(part) for part in hexes)
        )
        if rows:
            return image.target, rows
    return "", ()


def judge_offer(catalogue: Catalogue, image: CataloguedImage, trust: Trust, now: datetime) -> Offer:
    """An image of this catalogue and its .sif files, each with its own verdicts judged."""
    policy = replace(trust.policy, suites=tuple(dict.fromkeys((*trust.policy.suites, *catalogue.suites))))
    court = Court(trust=replace(trust, policy=policy), suite=suite_digest(), now=now, vouched=True)
    return Offer(
        image=image,
        judged=_judge(image.subject, image.envelopes, image.revocations, court),
        sifs=tuple(
            OfferedSif(sif=sif, judged=_judge(sif.subject, sif.envelopes, sif.revocations, court))
            for sif in image.sifs
        ),
    )


def ages_of(offers: Iterable[Offer], now: datetime) -> ProofAges:
    """How old it is what can be relied on of images in any of their forms."""
    forms = [form for offer in offers for form in (offer.judged, *(one.judged for one in offer.sifs))]
    proofs = (proof for judged in forms for proof in last_proofs(judged).values())
    return proof_ages(proofs, now)


def _judge(
    subject: Subject, envelopes: Envelopes, revocations: Envelopes, court: Court
) -> tuple[Judged, ...]:
    revoked = judge_revocations(dict(revocations), subject, court).heeded
    return judge_verdicts(dict(envelopes), subject, replace(court, revocations=revoked))


# --- A signed catalogue on its way to its readers: an artifact of the registry, or a file


def make_artifact(content: bytes, made: datetime, kind: Packed = CATALOGUE) -> Artifact:
    """Its manifest and blobs (image-spec 1.1, an artifact without a subject). Pure.

    Raises StatementError for one that nobody would read.
    """
    packed = pack(content)
    if len(packed) > LARGEST_PACKED:
        raise StatementError(
            "catalog-too-large",
            f"the {kind.name} has {len(packed)} bytes when packed, the limit is {LARGEST_PACKED}",
            hint="include fewer targets: imagefactory catalogue TARGET...",
        )
    empty = Descriptor(media_type=EMPTY_TYPE, digest=digest_of(EMPTY), size=len(EMPTY))
    layer = Descriptor(media_type=kind.layer_type, digest=digest_of(packed), size=len(packed))
    data = canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": kind.artifact_type,
            "config": format_descriptor(empty),
            "layers": [format_descriptor(layer)],
            "annotations": {CREATED: made.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")},
        }
    )
    descriptor = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(data), size=len(data))
    return Artifact(
        manifest=Manifest(descriptor=descriptor, data=data), blobs=((empty, EMPTY), (layer, packed))
    )


def publish_catalogue(place: Place, envelope: bytes, made: datetime) -> tuple[Reference, ...]:
    """Puts it under a tag of its own, then lets `current` point to it; gives both.

    Raises RegistryError, also where another wrote `current` meanwhile.
    """
    artifact = make_artifact(envelope, made)
    put_artifact(place, artifact)
    digest = artifact.manifest.descriptor.digest
    own = f"{made.astimezone(UTC):%Y%m%d}-{digest.removeprefix('sha256:')[:12]}"
    references = []
    for tag in (own, CURRENT):
        put = place.store.put_manifest(place.repository, artifact.manifest.data, MANIFEST_TYPE, tag)
        there = place.store.manifest(place.repository, tag)
        if put.digest != digest or there is None or there[0].digest != digest:
            raise RegistryError(
                "catalog-overwritten",
                f"{place}:{tag} is not the catalog that was pushed: another writer replaced it",
                hint="run it again",
            )
        references.append(
            Reference(registry=place.store.name, repository=place.repository, tag=tag, digest=digest)
        )
    return tuple(references)


def publish_invitation(place: Place, text: str, made: datetime) -> Reference:
    """Puts it beside the catalogue, in the place of an earlier one. Raises RegistryError."""
    artifact = make_artifact(text.encode(), made, INVITATION)
    put_artifact(place, artifact)
    put = place.store.put_manifest(place.repository, artifact.manifest.data, MANIFEST_TYPE, TAG)
    return Reference(registry=place.store.name, repository=place.repository, tag=TAG, digest=put.digest)


def write_catalogue(path: Path, envelope: bytes) -> None:
    """The envelope as a file, beside and renamed; packed where the name ends in `.gz`. Raises UsageError."""
    try:
        with replacing(path) as file:
            file.write(pack(envelope) if path.suffix == ".gz" else envelope)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="use another file: --output FILE") from error
