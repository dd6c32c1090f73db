"""Offers of a catalog: the image of a target, with its verdicts verified. Pure functions.

The trust and the clock of the reader decide which verdicts count, as for verdicts next to an image. The suite
of a verdict must be the reader's, or one that the reader's policy lists, or one that the signer of the
catalog accepted, because the reader may use another version of imagefactory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.errors import NothingSelectedError, RegistryError, StatementError, UsageError, os_problem
from imagefactory.fs import replacing
from imagefactory.oci.candidates import CREATED
from imagefactory.oci.graph import (
    EMPTY,
    EMPTY_BLOB,
    LocalArtifact,
    StoreRepository,
    artifact_of,
    put_artifact,
)
from imagefactory.oci.manifests import MANIFEST_TYPE, Descriptor, digest_of
from imagefactory.oci.store import ImageReference
from imagefactory.recipes.names import KnownNames, choose_name, choose_names
from imagefactory.trust.catalog import Catalog, CatalogImage, Envelopes, ImageOffer, SifOffer
from imagefactory.trust.catalog_package import (
    CATALOG_ARTIFACT,
    CURRENT,
    INVITATION,
    ArtifactFormat,
    pack_artifact,
)
from imagefactory.trust.claims import VerdictAges, last_verdicts, verdict_ages
from imagefactory.trust.invitation import TAG
from imagefactory.trust.judgement import VerificationPolicy, verify_revocations, verify_verdicts
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import RevokedCell, VerificationResult
from imagefactory.verify.report import VerifiedImage
from imagefactory.verify.suite_files import suite_digest

LACKING = "the catalog has no target"


def find_offer(catalog: Catalog, name: str, trust: TrustRules, now: datetime) -> ImageOffer:
    """Return the offer of a target. Raises like `find_image`."""
    return verify_offer(catalog, find_image(catalog, name), trust, now)


def find_image(catalog: Catalog, name: str) -> CatalogImage:
    """Return the image of a target.

    Raises NothingSelectedError if there is none, UsageError if there are several.
    """
    (image,) = select_images(catalog, (choose_name(name, _find_catalog_image(catalog), LACKING),))
    return image


def select_images(catalog: Catalog, names: Sequence[str]) -> tuple[CatalogImage, ...]:
    """Return the images of the targets that `names` select, all if `names` is empty.

    Raises like `find_image`.
    """
    chosen = choose_names(names, _find_catalog_image(catalog), LACKING)
    return tuple(
        catalog.images[number] for number, entry in enumerate(catalog.entries) if entry.target in chosen
    )


def _find_catalog_image(catalog: Catalog) -> KnownNames:
    if not catalog.images:
        raise empty_catalog_error()
    return {entry.target: entry.family for entry in catalog.entries}


def empty_catalog_error() -> NothingSelectedError:
    return NothingSelectedError(
        "catalog-empty",
        "the catalog is empty",
        hint="its maintainers must push images, verify them, and run imagefactory site publish again",
    )


def find_revoked(
    images: Iterable[CatalogImage], digest: str, hexes: Sequence[str]
) -> tuple[str, tuple[RevokedCell, ...]]:
    """Return the target and the revoked rows of an image, found by its digest or by hex digits of a .sif
    file's sha256.
    """
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


def verify_offer(catalog: Catalog, image: CatalogImage, trust: TrustRules, now: datetime) -> ImageOffer:
    """Return an image of the catalog and its .sif files, each with its verdicts verified."""
    policy = replace(trust.policy, suites=tuple(dict.fromkeys((*trust.policy.suites, *catalog.suites))))
    verification_policy = VerificationPolicy(
        trust=replace(trust, policy=policy), suite=suite_digest(), now=now, vouched=True
    )
    return ImageOffer(
        image=image,
        judged=_verify_statements(image.subject, image.envelopes, image.revocations, verification_policy),
        sifs=tuple(
            SifOffer(
                sif=sif,
                judged=_verify_statements(sif.subject, sif.envelopes, sif.revocations, verification_policy),
            )
            for sif in image.sifs
        ),
    )


def verdict_ages_of(offers: Iterable[ImageOffer], now: datetime) -> VerdictAges:
    """Return the ages of the valid verdicts of images and their .sif files."""
    forms = [form for offer in offers for form in (offer.judged, *(sif.judged for sif in offer.sifs))]
    proofs = (proof for judged in forms for proof in last_verdicts(judged).values())
    return verdict_ages(proofs, now)


def _verify_statements(
    subject: VerifiedImage, envelopes: Envelopes, revocations: Envelopes, policy: VerificationPolicy
) -> tuple[VerificationResult, ...]:
    revoked = verify_revocations(dict(revocations), subject, policy).heeded
    return verify_verdicts(dict(envelopes), subject, replace(policy, revocations=revoked))


def build_artifact(
    content: bytes, created: datetime, kind: ArtifactFormat = CATALOG_ARTIFACT
) -> LocalArtifact:
    """Return the manifest and blobs of an artifact without a subject (OCI image-spec 1.1).

    Raises StatementError if it is larger than readers accept.
    """
    packed = pack_artifact(content)
    if len(packed) > kind.largest:
        raise StatementError(
            "catalog-too-large",
            f"the {kind.name} has {len(packed)} bytes when packed, the limit is {kind.largest}",
            hint="include fewer targets: imagefactory site publish TARGET...",
        )
    layer = Descriptor(media_type=kind.layer_type, digest=digest_of(packed), size=len(packed))
    annotations = {CREATED: created.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    manifest = artifact_of(kind.artifact_type, None, (layer,), annotations)
    return LocalArtifact(manifest=manifest, blobs=((EMPTY_BLOB, EMPTY), (layer, packed)))


def publish_catalog(
    repository: StoreRepository, envelope: bytes, created: datetime
) -> tuple[ImageReference, ...]:
    """Push a catalog with a new tag, then move the tag `current` to it. Return both references.

    Raises RegistryError, also if another writer moved `current` in the meantime.
    """
    artifact = build_artifact(envelope, created)
    put_artifact(repository, artifact)
    digest = artifact.manifest.descriptor.digest
    dated_tag = f"{created.astimezone(UTC):%Y%m%d}-{digest.removeprefix('sha256:')[:12]}"
    references = []
    for tag in (dated_tag, CURRENT):
        put = repository.store.put_manifest(repository.repository, artifact.manifest.data, MANIFEST_TYPE, tag)
        there = repository.store.manifest(repository.repository, tag)
        if put.digest != digest or there is None or there[0].digest != digest:
            raise RegistryError(
                "catalog-overwritten",
                f"{repository}:{tag} is not the catalog that was pushed: another writer replaced it",
                hint="run it again",
            )
        references.append(
            ImageReference(
                registry=repository.store.name, repository=repository.repository, tag=tag, digest=digest
            )
        )
    return tuple(references)


def publish_invitation(repository: StoreRepository, text: str, created: datetime) -> ImageReference:
    """Push an invitation next to the catalog and replace an earlier one. Raises RegistryError."""
    artifact = build_artifact(text.encode(), created, INVITATION)
    put_artifact(repository, artifact)
    put = repository.store.put_manifest(repository.repository, artifact.manifest.data, MANIFEST_TYPE, TAG)
    return ImageReference(
        registry=repository.store.name, repository=repository.repository, tag=TAG, digest=put.digest
    )


def write_catalog(path: Path, envelope: bytes) -> None:
    """Write a signed catalog to a file. Raises UsageError."""
    try:
        with replacing(path) as file:
            file.write(envelope)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="use another file: --output FILE") from error
