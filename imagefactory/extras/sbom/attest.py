"""What is said of a pushed image beside it: its bill of materials in two formats, and its provenance."""

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
from imagefactory.oci.candidates import CYCLONEDX_TYPE, PROVENANCE_TYPE, SPDX_TYPE
from imagefactory.oci.graph import StoreRepository, make_artifact, put_artifact, read_manifest
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.trust.envelope import format_json, sign_envelope
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.verdict import STATEMENT
from imagefactory.views.text import format_fields

# --- Where an image comes from: SLSA provenance, as an in-toto statement in a signed envelope. Pure
# It carries no time, so that the same image by the same key gives the same bytes.


PROVENANCE = "https://slsa.dev/provenance/v1"
BUILD, BUILDER = "https://imagefactory.dev/build/v1", "https://imagefactory.dev/builder/v1"
"""Names, as predicate types are: nothing is ever fetched from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Of what the image `index` (and its platform manifest) was made: digests are `sha256:<64 hex>`.

    `lock` and `base` are the digests of the target's lock and its base's, `made_from` that of all that
    decides the image: these, what its recipe says, `engine` and `codec`.
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


def format_provenance(one: Provenance) -> bytes:
    """The statement's bytes. Source: SLSA specification v1.1, "Provenance"."""
    digests = {f"{one.target}/index": one.index, f"{one.target}/manifest": one.manifest}
    name, base = one.base
    definition = {
        "buildType": BUILD,
        "externalParameters": {
            "target": one.target,
            "lock": one.lock,
            "base": {"name": name, "digest": base},
        },
        "internalParameters": {"engine": one.engine, "codec": one.codec, "madeFrom": one.made_from},
        "resolvedDependencies": [
            {"uri": part.purl.to_string(), "digest": {"sha256": part.sha256}} for part in one.packages
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
    """Digests of what was attached, by type; `provenance` says who signed it, or why it is not there."""

    artifacts: tuple[tuple[str, str], ...]
    provenance: str

    @property
    def text(self) -> str:
        fields = [("attached", kind) for kind, _ in self.artifacts]
        return format_fields([*fields, ("provenance", self.provenance)])


def attester(factory: Project, now: datetime) -> Callable[[PushResult, Progress], AttestResult]:
    """Return a function that attests a pushed image: what `push --sbom` loads by name.

    Raises StatementError now for a key that cannot be read.
    """
    key = signing_key(factory, now)
    return lambda pushed, progress: attest(factory, pushed, key, progress)


def attest(factory: Project, pushed: PushResult, key: SigningKey | None, progress: Progress) -> AttestResult:
    """Attaches both bills to what a push left, and provenance where `key` signs it. Again changes nothing.

    Provenance is told of what this store knows to have made of the present lock; of another image the bill is
    read out of its layers in the registry.
    """
    where, target = pushed.reference, pushed.target
    place = StoreRepository(store=open_registry(factory, where.registry), repository=where.repository)
    made = inputs_digest(factory, target, where.digest)
    with progress.stage(f"{target.name}: attach its bill of materials"):
        if made:
            bill = target_bill(factory, target, progress)
        else:
            bill = image_bill(factory, lambda: factory, (target.name, place, where.digest), progress)
        contents = {CYCLONEDX_TYPE: format_cyclonedx(bill).encode(), SPDX_TYPE: format_spdx(bill).encode()}
        if key and made:
            contents[PROVENANCE_TYPE] = sign_provenance(_provenance(factory, pushed, bill, made), key)
        root, artifacts = read_manifest(place, where.digest).descriptor, []
        for kind, content in contents.items():
            artifact = make_artifact(kind, root, {}, content)
            put_artifact(place, artifact)
            artifacts.append((kind, artifact.manifest.descriptor.digest))
    told = f"signed by '{key.name}'" if key else "none: no key (imagefactory key create NAME)"
    if not made:
        told = "none: this store did not make the image of the present lock"
    return AttestResult(artifacts=tuple(artifacts), provenance=told)


def _provenance(factory: Project, pushed: PushResult, bill: BillOfMaterials, made: str) -> Provenance:
    target, settings = pushed.target, factory.settings
    base = factory.base_of(target)
    return Provenance(
        target=target.name,
        index=pushed.reference.digest,
        manifest=pushed.manifest,
        lock=lock_digest(require_lock(factory, target)),
        base=(base.name, base_digest(base, read_base_lock(factory.base_lock_path(base)))),
        engine=settings.engine.value,
        codec=settings.codec.value,
        made_from=made,
        packages=bill.components,
    )
