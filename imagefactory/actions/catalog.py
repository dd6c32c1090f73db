"""Build a catalog of this project's images, in a registry or in the local store.

A catalog has one image of each target: the candidate of the current lock, or the image of the target's tag
if only that one is verified. So a new lock removes no image that people use. If the policy requires
approvals, an image with a tag to promote needs them for one of its tags. The verdicts are the valid ones in
the registry and in the local store. The predictions are for the wheels of the lock, or from a scan of the
image.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from imagefactory.access import open_answering, registry_place, repository_of
from imagefactory.actions.build import find_built
from imagefactory.actions.locked import require_lock
from imagefactory.actions.promote import belongs, is_own
from imagefactory.actions.transfer import explain_no_candidate, find_candidate
from imagefactory.actions.verdicts import ANY, find_in, local_place, read_verification_policy
from imagefactory.errors import (
    ImagefactoryError,
    LockError,
    NoImageError,
    NothingSelectedError,
    RegistryError,
    StaleError,
    StoreError,
    ToolError,
)
from imagefactory.gpu.cells import CellEvidence, answer_cell, cell_query
from imagefactory.gpu.drivers import cuda_floor, older, parse_driver
from imagefactory.gpu.frameworks import cuda_of
from imagefactory.gpu.knowledge.gpus import capabilities, processors
from imagefactory.gpu.values import (
    CellClaim,
    ClaimBasis,
    Compatibility,
    InstalledPackage,
    ScanResult,
    rocm_of,
)
from imagefactory.matrix.plan import weigh_claims
from imagefactory.model import Lock, LockedCondaPackage, Target
from imagefactory.oci.candidates import APPROVAL_TYPE, plain_tag
from imagefactory.oci.graph import Manifest, StoreRepository, parse_parts, read_manifest
from imagefactory.oci.inflate import CorruptDataError, plain_layer
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import Image, OciLayer
from imagefactory.oci.sif import SIF_TYPE, is_sif_manifest
from imagefactory.oci.store import ImageReference
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.scan.layers import cached_contents
from imagefactory.trust.approval import Approval, Approvals, read_approvals
from imagefactory.trust.attached import read_revocations, read_statements, read_subject
from imagefactory.trust.catalog import LIFE, Catalog, CatalogImage, CatalogSif, Envelopes
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.judgement import (
    VerificationPolicy,
    cell_of,
    find_verdicts,
    merge_revoked,
    revoked_cells,
    verify_revocations,
)
from imagefactory.trust.verdict import RevokedCell, VerdictStatus, VerificationResult
from imagefactory.verify.report import VerifiedImage

SIZES = "sizes"
"""Directory of the store: the unpacked size of a layer, by the digest of the packed layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRequest:
    """The request for a catalog.

    An empty `registry` (`host[/path]`) means the setting; without a registry the images of the local store
    are used. With `named` each target must have an image. `hurried` sets short timeouts for the registry.
    """

    targets: tuple[Target, ...]
    now: datetime
    registry: str = ""
    named: bool = False
    hurried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogResult:
    """A catalog, and the skipped targets with the reasons.

    `kept` are targets from the last catalog, `waiting` are targets whose images lack approvals. `revoked`
    are the revocations in the local store, by target.
    """

    catalog: Catalog
    skipped: tuple[tuple[str, str], ...]
    kept: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    revoked: Mapping[str, tuple[RevokedCell, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRoot:
    """An image of a target, with its valid verdicts and its revocations.

    `lock` is the lock that the image was built from, if known.
    """

    subject: VerifiedImage
    lock: Lock | None = None
    judged: tuple[VerificationResult, ...] = ()
    envelopes: Envelopes = ()
    revocations: Envelopes = ()
    revoked: tuple[RevokedCell, ...] = ()

    @property
    def proven(self) -> bool:
        return any(result.proves for result in self.judged)


def build_catalog(project: Project, request: CatalogRequest, progress: Progress) -> CatalogResult:
    """Return the catalog. Raises RegistryError, StoreError, and UsageError if the trust settings are invalid.

    With `named` raises NothingSelectedError for the first missing target.
    """
    builder = _CatalogBuilder.of(project, request)
    images, skipped, waiting = [], [], []
    with (
        progress.stage(f"catalog of {builder.name}"),
        ThreadPoolExecutor(WORKERS, thread_name_prefix="catalog") as pool,
    ):
        rows = pool.map(builder.read_target, request.targets)
        for target, (image, reason, waits) in zip(request.targets, rows, strict=True):
            if image:
                images.append(image)
                continue
            if request.named:
                build = f"build --push {target.name}" if builder.host else f"build {target.name}"
                raise NothingSelectedError(
                    "catalog-image-missing",
                    f"{target.name}: {reason}",
                    hint=f"run imagefactory {f'image promote {target.name}' if waits else build}",
                )
            skipped.append((target.name, reason))
            waiting += [target.name] if waits else []
    time = request.now.replace(microsecond=0)
    catalog = Catalog(created=time, expires=time + LIFE, images=tuple(images), suites=builder.policy.suites)
    return CatalogResult(
        catalog=catalog, skipped=tuple(skipped), waiting=tuple(waiting), revoked=builder.revoked
    )


def stored_revocations(project: Project, policy: VerificationPolicy) -> Mapping[str, tuple[RevokedCell, ...]]:
    """Return the revocations in the local store, by target."""
    rows: dict[str, tuple[RevokedCell, ...]] = {}
    repo = local_place(project, ANY)
    for manifest in project.layout.subjects():
        envelopes = {row.digest: row.envelope for row in read_revocations(repo, manifest)}
        subject = VerifiedImage(target="", index=manifest, manifest=manifest, config=manifest)
        for row in verify_revocations(envelopes, subject, policy).heeded if envelopes else ():
            if row.about:
                cell = cell_of(row, row.about, row.capability, policy.trust)
                rows[row.about.target] = (*rows.get(row.about.target, ()), cell)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _CatalogBuilder:
    """The location of images, and the policy for their verdicts. `host` is empty for the local store."""

    project: Project
    policy: VerificationPolicy
    places: Mapping[str, StoreRepository]
    host: str
    name: str
    revoked: Mapping[str, tuple[RevokedCell, ...]]

    @classmethod
    def of(cls, project: Project, request: CatalogRequest) -> _CatalogBuilder:
        policy = read_verification_policy(project, request.now)
        families = {target.family for target in request.targets}
        if not (request.registry or project.settings.registry.value):
            host, name = "", str(project.layout.path)
            places = {family: local_place(project, family) for family in families}
        else:
            host, path = registry_place(project, request.registry)
            store = open_answering(project, host, hurried=request.hurried)
            name = f"{host}/{path}" if path else host
            places = {
                family: StoreRepository(store=store, repository=repository_of(path, family))
                for family in families
            }
        revoked = stored_revocations(project, policy)
        return cls(project=project, policy=policy, places=places, host=host, name=name, revoked=revoked)

    def read_target(self, target: Target) -> tuple[CatalogImage | None, str, bool]:
        """Return the image of a target, or the reason for no image and whether the image lacks approvals."""
        project, repo = self.project, self.places[target.family]
        lock, expected, reason = None, "", ""
        try:
            lock = require_lock(project, target)
            expected = self._expected_digest(target, repo)
        except (LockError, StaleError) as error:
            lock, reason = None, error.message
        except ModuleNotFoundError as error:  # a light install cannot compute the digest by the lock
            lock, reason = None, f"its image cannot be identified without {error.name}"
        tagged = repo.store.manifest(repo.repository, plain_tag(target))
        roots = []
        for digest in dict.fromkeys((expected, tagged[0].digest if tagged else "")):
            if not digest:
                continue
            try:
                subject = replace(read_subject(repo, digest), target=target.name)
                root = self._read_root(repo, subject, lock if digest == expected else None)
            except NoImageError as error:
                reason = f"{digest} is skipped: {error.message}"
                continue
            # Anyone who may push can move a tag.
            if digest == expected or root.proven or is_own(project, repo, digest):
                roots.append(root)
            else:
                reason = f"{digest} is skipped: it has no valid verdict, and this store did not push it"
        offered = []
        for root in roots:
            if self._waits(target, repo, root):
                reason = (
                    f"{root.subject.index} has too few approvals: imagefactory image promote {target.name}"
                )
                project.tell(f"{target.name}: {reason}")
            else:
                offered.append(root)
        if not offered:
            return None, reason or explain_no_candidate(project, repo), bool(roots)
        image = self._describe(target, repo, next((root for root in offered if root.proven), offered[0]))
        revoked = (image.revoked, *(root.revoked for root in roots), self.revoked.get(target.name, ()))
        return replace(image, revoked=merge_revoked(*revoked)), "", False

    def _expected_digest(self, target: Target, repo: StoreRepository) -> str:
        """Return the digest of the image of the current lock, empty if there is no such image."""
        if isinstance(repo.store, LayoutStore):
            built = find_built(self.project, target)
            return built.digest if built else ""
        candidate = find_candidate(self.project, target, repo)
        return candidate.digest if candidate else ""

    def _waits(self, target: Target, repo: StoreRepository, root: CatalogRoot) -> bool:
        """Return whether the image has too few approvals for every tag of the target.

        False if only a .sif of the image is verified: the image then has no tag to promote.
        """
        if not self.host or (target.gpu and not root.proven):
            return False
        return lacks_approvals(repo, root.subject, plain_tag(target), root.revoked, self.policy)

    def _read_root(
        self, repo: StoreRepository, subject: VerifiedImage, lock: Lock | None = None
    ) -> CatalogRoot:
        """Return an image with its verdicts and revocations, from the registry and the local store."""
        if not self.policy.trust.keys:
            return CatalogRoot(subject=subject, lock=lock)
        sets = [find_in(self.project, repo, subject, self.policy)]
        if not isinstance(repo.store, LayoutStore):
            local = local_place(self.project, ANY)
            sets.append(find_verdicts(local, subject, self.policy, (repo,)))
        valid: dict[str, tuple[VerificationResult, bytes]] = {}
        rejected = set()
        for row in sets:
            for result in row.judged:
                if result.standing is VerdictStatus.REVOKED or _is_of_another(result, subject):
                    rejected.add(result.name)
                elif result.standing is VerdictStatus.GOOD:
                    valid[result.name] = (result, row.envelopes[result.digest])
        rows = [valid[name] for name in sorted(valid) if name not in rejected]
        revocations = {digest: data for row in sets for digest, data in row.revocations.items() if data}
        return CatalogRoot(
            subject=subject,
            lock=lock,
            judged=tuple(result for result, _ in rows),
            envelopes=tuple((result.digest, data) for result, data in rows),
            revocations=tuple(sorted(readable_envelopes(revocations))),
            revoked=revoked_cells(
                [result for row in sets for result in row.judged], subject, self.policy.trust
            ),
        )

    def _describe(self, target: Target, repo: StoreRepository, root: CatalogRoot) -> CatalogImage:
        project, subject = self.project, root.subject
        manifest = read_manifest(repo, subject.manifest)
        image = describe_image(project, target, root, manifest)
        reference, stored = reference_of(self.host, repo, subject), stored_as(project, subject)
        revoked: tuple[RevokedCell, ...] = ()
        if is_sif_manifest(json.loads(manifest.data)):
            sif = CatalogSif(
                sha256=subject.config,
                size=image.size,
                reference=reference,
                subject=subject,
                envelopes=root.envelopes,
                revocations=root.revocations,
            )
            sifs = [sif]
        else:
            sifs, revoked = self._sifs(repo, subject)
        return replace(
            image,
            reference=reference,
            unpacked=unpacked_size(project.layout, stored) if stored else 0,
            sifs=tuple(sifs),
            revoked=revoked,
        )

    def _sifs(
        self, repo: StoreRepository, image: VerifiedImage
    ) -> tuple[list[CatalogSif], tuple[RevokedCell, ...]]:
        """Return the .sif files of an image, in the local store and the registry, and their revocations."""
        seen: set[str] = set()
        sifs: list[CatalogSif] = []
        revoked: list[RevokedCell] = []
        for there, host in ((repo, self.host), (local_place(self.project, ANY), "")):
            for referrer in there.store.referrers(there.repository, image.manifest, SIF_TYPE):
                manifest = there.store.manifest(there.repository, referrer.digest)
                if referrer.digest in seen or not manifest or not is_sif_manifest(json.loads(manifest[1])):
                    continue
                seen.add(referrer.digest)
                subject = replace(read_subject(there, referrer.digest), target=image.target)
                root = self._read_root(there, subject)
                revoked += root.revoked
                if not root.proven and not is_own(self.project, there, referrer.digest):
                    self.project.tell(
                        f"{referrer.digest} is skipped: no verdict verifies it, "
                        "and this store did not push it"
                    )
                    continue
                sifs.append(
                    CatalogSif(
                        sha256=subject.config,
                        size=json.loads(manifest[1])["layers"][0]["size"],
                        reference=reference_of(host, there, subject),
                        subject=subject,
                        envelopes=root.envelopes,
                        revocations=root.revocations,
                    )
                )
        return sifs, tuple(revoked)


def _is_of_another(result: VerificationResult, subject: VerifiedImage) -> bool:
    """Return whether the verdict is for another target and must be ignored."""
    return result.verdict is not None and result.verdict.report.subject.target not in ("", subject.target)


def lacks_approvals(
    repo: StoreRepository,
    subject: VerifiedImage,
    plain: str,
    revoked: Sequence[RevokedCell],
    policy: VerificationPolicy,
) -> bool:
    """Return whether an image has too few approvals for every tag of the target.

    `plain` is the tag of the target without a capability.
    """
    if not (needed := policy.trust.policy.signatures):
        return False
    envelopes = [row.envelope for row in read_statements(repo, subject.manifest, APPROVAL_TYPE)]
    tags: dict[str, list[Approval]] = {}
    for request, approval in read_approvals(envelopes, policy.trust, policy.now, revoked):
        key = (request.place, request.subject.index, request.subject.manifest)
        if key == (str(repo), subject.index, subject.manifest) and belongs(request.tag, plain):
            tags.setdefault(request.tag, []).append(approval)
    return all(len(Approvals(valid=tuple(rows)).best()) < needed for rows in tags.values())


def readable_envelopes(envelopes: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    for digest, data in envelopes.items():
        with suppress(ImagefactoryError):  # not an envelope, so it is never trusted
            parse_envelope(data, digest)
            yield digest, data


# --- Facts of an image besides its digests: versions, driver, predictions, unpacked size


def describe_image(project: Project, target: Target, root: CatalogRoot, manifest: Manifest) -> CatalogImage:
    """Return the catalog entry of an image, without its location, .sif files and size."""
    blobs = parse_parts(manifest)[1]
    is_sif = is_sif_manifest(json.loads(manifest.data))
    predicted = predicted_claims(project, target, root.lock, stored_as(project, root.subject))
    facts = facts_of(target, root.lock, predicted)
    return CatalogImage(
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
        revoked=root.revoked,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """Fields of a CatalogImage: the framework's version, the CUDA in the image, and its driver."""

    version: str
    runtime: str = ""
    driver: str = ""
    minor_compat: bool = False


def facts_of(target: Target, lock: Lock | None, predicted: Sequence[tuple[str, CellClaim]]) -> ImageFacts:
    """Return the facts of an image from its lock, or from its target without a lock.

    Programs of a CUDA major version start on the first driver of that major (gpu/drivers.py, rule R6),
    unless older drivers cannot read their packed code (R7). Code that must be compiled from PTX needs a
    newer driver, which its claim states. `driver` is the lowest that runs machine code. `minor_compat` is
    true if that is the first driver of the major.
    """
    packages = lock.packages if lock else ()
    names = {target.framework, target.framework.replace("_", "-").lower()}
    version = next((package.version for package in packages if package.name in names), target.version)
    if not target.gpu or rocm_of(target.cuda):
        return ImageFacts(version=version)
    contents = ScanResult(
        source="the lock",
        libraries=(),
        packages=tuple(
            InstalledPackage(
                name=package.name,
                version=package.version,
                build=package.build if isinstance(package, LockedCondaPackage) else "",
            )
            for package in packages
        ),
    )
    runtime = cuda_of(contents) or target.cuda
    floor = cuda_floor(runtime).driver
    native = [claim.driver for _, claim in predicted if claim.answer is Compatibility.YES and claim.driver]
    driver = min(native, key=parse_driver, default=floor)
    return ImageFacts(
        version=version,
        runtime=runtime,
        driver=driver,
        minor_compat=bool(floor and driver and not older(floor, driver)),
    )


def predicted_claims(
    project: Project, target: Target, lock: Lock | None, image: Image | None
) -> tuple[tuple[str, CellClaim], ...]:
    """Return the strongest claim for each known capability (plan.weigh_claims), then the known faults.

    Empty if the lock is unknown, or if the image is for CPUs.
    """
    if lock is None or not target.gpu:
        return ()
    evidence = CellEvidence(contents=cached_contents(project.layout, image) if image else None)
    claims = []
    for capability in processors() if rocm_of(target.cuda) else capabilities():
        ruling = weigh_claims(answer_cell(cell_query(target, lock, capability), evidence), frozenset())
        if ruling.claim is not None and ruling.claim.basis is not ClaimBasis.VERIFIED:
            faults = (claim for claim in ruling.warnings if claim.is_fault)
            claims += [(str(capability), claim) for claim in (ruling.claim, *faults)]
    return tuple(claims)


def unpacked_size(layout: Layout, image: Image) -> int:
    """Return the bytes of all unpacked layers, 0 if a layer cannot be read. Results are cached."""
    try:
        return sum(_plain_size(layout, layer) for layer in image.layers)
    except (StoreError, ToolError, CorruptDataError, OSError):
        return 0


def _plain_size(layout: Layout, layer: OciLayer) -> int:
    key = layer.descriptor.digest.removeprefix("sha256:")
    known = layout.recall(SIZES, key)
    if known and isinstance(known.get("size"), int):
        return int(known["size"])
    with layout.blob_path(layer.descriptor.digest).open("rb") as file:
        chunks = iter(lambda: file.read(CHUNK), b"")
        size = sum(map(len, plain_layer(layer.descriptor.media_type, chunks)))
    with suppress(StoreError):  # a full disk: it is measured again
        layout.record(SIZES, key, {"size": size})
    return size


def reference_of(host: str, repo: StoreRepository, subject: VerifiedImage) -> str:
    """Return HOST/NAME@sha256:... of an image in a registry, empty for the local store (no `host`)."""
    if not host:
        return ""
    return str(ImageReference(registry=host, repository=repo.repository, digest=subject.index))


def stored_as(project: Project, subject: VerifiedImage) -> Image | None:
    """Return the image in the local store, None if it is missing or incomplete."""
    manifest = project.layout.manifest(subject.index) or project.layout.manifest(subject.manifest)
    if manifest is None:
        return None
    try:
        return project.layout.load(subject.target, manifest[0])
    except (StoreError, RegistryError):
        return None
