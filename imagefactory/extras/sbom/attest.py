"""Attach bills of materials in two formats, and provenance, to a pushed image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from imagefactory import __version__
from imagefactory.access import open_registry
from imagefactory.actions.locked import require_lock
from imagefactory.actions.transfer import PushResult, inputs_digest
from imagefactory.actions.verdicts import signing_key
from imagefactory.extras.sbom.action import image_bill, target_bill
from imagefactory.extras.sbom.bill import BillComponent, BillOfMaterials
from imagefactory.extras.sbom.formats import format_cyclonedx, format_spdx
from imagefactory.extras.sbom.look import base_digest
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.files import lock_digest
from imagefactory.oci.candidates import BUNDLE_TYPE, CYCLONEDX_TYPE, PROVENANCE_TYPE, SPDX_TYPE
from imagefactory.oci.graph import StoreRepository, make_artifact, put_artifact, read_manifest
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.trust.attached import SignedStatement
from imagefactory.trust.envelope import format_json, sign_envelope
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.verdict import STATEMENT
from imagefactory.views.text import format_fields

# --- SLSA provenance as an in-toto statement in a signed envelope. Pure
# It contains no time, so that the same image and key give the same bytes.


PROVENANCE = "https://slsa.dev/provenance/v1"
BUILD, BUILDER = "https://imagefactory.dev/build/v1", "https://imagefactory.dev/builder/v1"
"""Identifiers of the predicate and the builder. No program fetches these addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The inputs of the image `index` and its platform manifest. Digests are `sha256:<64 hex>`.

    `lock` is the digest of the target's lock, `base` the name and digest of the base. `made_from` is the
    digest of all inputs: these, the recipe, `engine` and `codec`.
    """

    target: str
    index: str
    manifest: str
    lock: str
    base: tuple[str, str]
    engine: str
    codec: str
    made_from: str
    packages: tuple[BillComponent, ...]


def sign_provenance(provenance: Provenance, key: SigningKey) -> bytes:
    return sign_envelope(format_provenance(provenance), key)


def format_provenance(provenance: Provenance) -> bytes:
    """Return the bytes of the statement. Source: SLSA specification v1.1, "Provenance"."""
    digests = {
        f"{provenance.target}/index": provenance.index,
        f"{provenance.target}/manifest": provenance.manifest,
    }
    name, base = provenance.base
    definition = {
        "buildType": BUILD,
        "externalParameters": {
            "target": provenance.target,
            "lock": provenance.lock,
            "base": {"name": name, "digest": base},
        },
        "internalParameters": {
            "engine": provenance.engine,
            "codec": provenance.codec,
            "madeFrom": provenance.made_from,
        },
        "resolvedDependencies": [
            {"uri": part.purl.to_string(), "digest": {"sha256": part.sha256}} for part in provenance.packages
        ],
    }
    builder = {"id": BUILDER, "version": {"imagefactory": __version__}}
    return format_json(
        {
            "_type": STATEMENT,
            "subject": [
                {"name": called, "digest": {"sha256": digest.removeprefix("sha256:")}}
                for called, digest in digests.items()
            ],
            "predicateType": PROVENANCE,
            "predicate": {"buildDefinition": definition, "runDetails": {"builder": builder}},
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestResult:
    """The digests of the attached artifacts by type. `provenance` is who signed it, or why there is none."""

    artifacts: tuple[tuple[str, str], ...]
    provenance: str

    @property
    def text(self) -> str:
        fields = [("attached", kind) for kind, _ in self.artifacts]
        return format_fields([*fields, ("provenance", self.provenance)])


def attester(project: Project, now: datetime) -> Callable[[PushResult, Progress], AttestResult]:
    """Return the function that attests a pushed image. `push --sbom` loads this by name.

    Raises StatementError at once for an unreadable key.
    """
    key = signing_key(project, now)
    return lambda pushed, progress: attest(project, pushed, key, progress)


def attest(project: Project, pushed: PushResult, key: SigningKey | None, progress: Progress) -> AttestResult:
    """Attach both bills to a pushed image, and provenance signed by `key`.

    Repeating the call changes nothing.

    Only an image that this store built from the current lock gets provenance. The bill of any other image is
    read from its layers in the registry.
    """
    image, target = pushed.reference, pushed.target
    repository = StoreRepository(store=open_registry(project, image.registry), repository=image.repository)
    inputs = inputs_digest(project, target, image.digest)
    with progress.stage(f"{target.name}: attach its bill of materials"):
        if inputs:
            bill = target_bill(project, target, progress)
        else:
            bill = image_bill(project, lambda: project, (target.name, repository, image.digest), progress)
        contents = {CYCLONEDX_TYPE: format_cyclonedx(bill).encode(), SPDX_TYPE: format_spdx(bill).encode()}
        if key and inputs:
            contents[PROVENANCE_TYPE] = sign_provenance(_provenance(project, pushed, bill, inputs), key)
        root, artifacts = read_manifest(repository, image.digest).descriptor, []
        for kind, content in contents.items():
            artifact = make_artifact(kind, root, {}, content)
            put_artifact(repository, artifact)
            artifacts.append((kind, artifact.manifest.descriptor.digest))
        if PROVENANCE_TYPE in contents and project.settings.with_bundles:
            statement = SignedStatement(kind=BUNDLE_TYPE, subject=root, envelope=contents[PROVENANCE_TYPE])
            put_artifact(repository, statement.artifact)
            artifacts.append((BUNDLE_TYPE, statement.artifact.manifest.descriptor.digest))
    signature = f"signed by '{key.name}'" if key else "none: no key (imagefactory key create NAME)"
    if not inputs:
        signature = "none: this store did not build the image from the current lock"
    return AttestResult(artifacts=tuple(artifacts), provenance=signature)


def _provenance(project: Project, pushed: PushResult, bill: BillOfMaterials, inputs: str) -> Provenance:
    target, settings = pushed.target, project.settings
    base = project.base_of(target)
    return Provenance(
        target=target.name,
        index=pushed.reference.digest,
        manifest=pushed.manifest,
        lock=lock_digest(require_lock(project, target)),
        base=(base.name, base_digest(base, read_base_lock(project.base_lock_path(base)))),
        engine=settings.engine.value,
        codec=settings.codec.value,
        made_from=inputs,
        packages=bill.components,
    )
