"""Attach bills of materials and provenance to an image, and sign its statements as a CI job."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from imagefactory import __version__
from imagefactory.access import open_registry
from imagefactory.actions.locked import require_lock
from imagefactory.actions.transfer import PushResult, inputs_digest
from imagefactory.actions.verdicts import find_in, read_verification_policy, signing_key
from imagefactory.errors import NothingSelectedError, RegistryError, StatementError, ToolError, UsageError
from imagefactory.extras.sbom.action import image_bill, target_bill
from imagefactory.extras.sbom.bill import BillComponent, BillOfMaterials
from imagefactory.extras.sbom.formats import format_cyclonedx, format_spdx
from imagefactory.extras.sbom.look import base_digest
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.files import lock_digest
from imagefactory.oci.candidates import BUNDLE_TYPE, CYCLONEDX_TYPE, PROVENANCE_TYPE, SPDX_TYPE
from imagefactory.oci.graph import StoreRepository, make_artifact, put_artifact, read_manifest
from imagefactory.oci.manifests import MALFORMED, Descriptor, digest_of
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.serialize import printable_value
from imagefactory.trust.attached import (
    SignedStatement,
    bundle_annotations,
    read_statements,
    read_subject,
)
from imagefactory.trust.envelope import (
    format_json,
    parse_bundle,
    parse_envelope,
    parse_json,
    predicate_type,
    sign_envelope,
)
from imagefactory.trust.judgement import VerificationPolicy, unrecorded_reason, verify_envelope
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.verdict import PASSES, STATEMENT, VerdictStatus, format_test_result
from imagefactory.views.text import format_fields

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig
    from sigstore.sign import Signer
    from sigstore.verify import Verifier
    from sigstore.verify.policy import VerificationPolicy as IdentityPolicy

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


# --- The same statements as bundles that the identity of a CI job signs ("keyless"), for other tools
# A verdict counts by its key only. So only statements that a trusted key signed get a second signature.

GITHUB = "https://token.actions.githubusercontent.com"
SIGSTORE_LIMIT = 120.0
"""Seconds for a certificate, or for a signature with its entry in the log."""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityBundle:
    """A bundle about the manifest `subject`. `attached` is False if the registry had it already."""

    predicate: str
    subject: str
    artifact: str
    attached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityResult:
    """The bundles of the image `digest`, and who signed: the workflow `identity` of `issuer`."""

    place: str
    digest: str
    identity: str
    issuer: str
    bundles: tuple[IdentityBundle, ...]


def attest_by_identity(
    project: Project,
    repository: StoreRepository,
    reference: str,
    trust_config: Path | None,
    now: datetime,
    progress: Progress,
) -> IdentityResult:
    """Sign the trusted statements about an image by the identity of this CI job, and attach the bundles.

    A bundle that the registry already has is not signed again. `trust_config` describes another Sigstore than
    the public one. Raises NothingSelectedError if no trusted key signed a statement, ToolError without an
    identity, and RegistryError if a server fails; bundles attached before stay.
    """
    root = read_manifest(repository, reference).descriptor
    policy = read_verification_policy(project, now)
    statements = [
        *_verdict_payloads(project, repository, root.digest, policy),
        *((root, payload) for payload in _provenance_payloads(repository, root.digest, policy)),
    ]
    if not statements:
        raise NothingSelectedError(
            "statement-not-found",
            f"{repository}@{root.digest} has no passed verdict and no provenance by a trusted key",
            hint="verify the image, or push it with --sbom, and trust the key: imagefactory key trust",
        )
    with progress.stage("sign by the identity of this CI job"):
        identity = _open_identity(trust_config)
        bundles = [_attest(repository, subject, payload, identity) for subject, payload in statements]
    return IdentityResult(
        place=str(repository),
        digest=root.digest,
        identity=identity.name,
        issuer=GITHUB,
        bundles=tuple(bundles),
    )


def _verdict_payloads(
    project: Project, repository: StoreRepository, digest: str, policy: VerificationPolicy
) -> Iterator[tuple[Descriptor, bytes]]:
    """Yield each passed verdict that counts, and its test result."""
    subject = read_subject(repository, digest)
    manifest = read_manifest(repository, subject.manifest).descriptor
    verdicts = find_in(project, repository, subject, policy)
    for row in verdicts.judged:
        if row.verdict is None or row.standing is not VerdictStatus.GOOD:
            continue
        report = row.verdict.report
        if report.outcome in PASSES and report.subject.manifest == manifest.digest:
            yield manifest, parse_envelope(verdicts.envelopes[row.digest], "a verdict").payload
            yield manifest, format_test_result(row.verdict)


def _provenance_payloads(
    repository: StoreRepository, digest: str, policy: VerificationPolicy
) -> Iterator[bytes]:
    """Yield each provenance of the image that a trusted key signed, also if it is only in a bundle."""
    envelopes = [row.envelope for row in read_statements(repository, digest, PROVENANCE_TYPE)]
    for row in read_statements(repository, digest, BUNDLE_TYPE):
        with suppress(StatementError):
            envelopes.append(parse_bundle(row.envelope, "a bundle"))
    for envelope in dict.fromkeys(envelopes):
        opened = verify_envelope(envelope, policy.trust)
        if opened.envelope is None or opened.key is None:
            continue
        payload = opened.envelope.payload
        if unrecorded_reason(opened.key, digest_of(payload), policy.now) or opened.key.since > policy.now:
            continue
        if digest in _subjects(payload) and predicate_type(envelope) == PROVENANCE:
            yield payload


def _subjects(payload: bytes) -> list[str]:
    """Return the digests that a statement is about, none if it is malformed."""
    try:
        statement: Any = parse_json(payload, "a statement")
        return [f"sha256:{row['digest']['sha256']}" for row in statement["subject"]]
    except (*MALFORMED, StatementError):
        return []


def _attest(
    repository: StoreRepository, subject: Descriptor, payload: bytes, identity: _Identity
) -> IdentityBundle:
    predicate = str(json.loads(payload)["predicateType"])
    for attached in read_statements(repository, subject.digest, BUNDLE_TYPE):
        if attached.envelope and identity.signed(attached.envelope, payload):
            return IdentityBundle(
                predicate=predicate, subject=subject.digest, artifact=attached.digest, attached=False
            )
    artifact = make_artifact(BUNDLE_TYPE, subject, bundle_annotations(predicate), identity.sign(payload))
    put_artifact(repository, artifact)
    digest = artifact.manifest.descriptor.digest
    return IdentityBundle(predicate=predicate, subject=subject.digest, artifact=digest, attached=True)


@dataclass(slots=True, kw_only=True)
class _Identity:
    """The identity of this CI job, with Sigstore's client. `name` is the workflow, as in its certificate."""

    name: str
    signer: Signer
    verifier: Verifier
    policy: IdentityPolicy

    def sign(self, payload: bytes) -> bytes:
        """Return the bundle of a statement, signed and in the transparency log. Raises RegistryError."""
        from sigstore.dsse import Statement

        def sign() -> bytes:
            bundle = self.signer.sign_dsse(Statement(payload))
            self.verifier.verify_dsse(bundle, self.policy)  # the servers answered what others accept
            return bundle.to_json().encode()

        return _call_sigstore("sign a statement", sign)

    def signed(self, data: bytes, payload: bytes) -> bool:
        """Return whether an untrusted bundle is one of this payload by this identity."""
        from sigstore.models import Bundle

        try:
            if parse_envelope(parse_bundle(data, "a bundle"), "a bundle").payload != payload:
                return False
            return self.verifier.verify_dsse(Bundle.from_json(data), self.policy)[1] == payload
        except Exception:  # whatever the library raises on untrusted bytes: then it is signed again
            return False


def _open_identity(trust_config: Path | None) -> _Identity:
    """Return the identity of this CI job. Raises ToolError if it has none, RegistryError and UsageError."""
    from sigstore.oidc import IdentityError, IdentityToken, detect_credential
    from sigstore.sign import Signer, SigningContext
    from sigstore.verify import Verifier
    from sigstore.verify.policy import AllOf, Identity, OIDCIssuerV2

    reason, workflow = "this is not a job of GitHub Actions", ""
    try:
        if credential := detect_credential():
            token = IdentityToken(credential)
            if token.issuer == GITHUB:
                workflow = _workflow_of(credential)
    except IdentityError as error:
        reason = printable_value(str(error))
    if not workflow:
        raise ToolError(
            "identity-missing",
            f"no identity to sign with: {reason}",
            hint="in GitHub Actions, set `permissions: id-token: write` for the job",
        )
    name = f"https://github.com/{workflow}"  # source: Fulcio's oidc.md
    config = _read_trust_config(trust_config)
    signer, verifier = _call_sigstore(
        "issue a certificate",
        lambda: (
            Signer(token, SigningContext.from_trust_config(config)),
            Verifier(trusted_root=config.trusted_root),
        ),
    )
    policy = AllOf([Identity(identity=name), OIDCIssuerV2(GITHUB)])
    return _Identity(name=name, signer=signer, verifier=verifier, policy=policy)


def _workflow_of(credential: str) -> str:
    """Return the workflow in a valid token of GitHub, empty if it has none. Fulcio verifies the signature."""
    claims = credential.split(".")[1]
    value: dict[str, object] = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    return str(value.get("job_workflow_ref", ""))


def _read_trust_config(path: Path | None) -> ClientTrustConfig:
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig

    if path is None:
        return _call_sigstore("provide its trust root", ClientTrustConfig.production)
    try:
        return ClientTrustConfig.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, Error) as error:
        raise UsageError(
            "trust-config-invalid",
            f"{path} is not a trust configuration of Sigstore: {printable_value(str(error))}",
            hint="pass the JSON file that your Sigstore publishes for `sigstore --trust-config`",
        ) from error


def _call_sigstore(action: str, call: Callable[[], Answer]) -> Answer:
    """Return what Sigstore's client returns within SIGSTORE_LIMIT: it has no time limits of its own.

    Raises RegistryError, also for malformed answers.
    """
    from sigstore._internal.fulcio import ExpiredCertificate
    from sigstore._internal.fulcio.client import FulcioClientError
    from sigstore._internal.rekor import RekorClientError
    from sigstore.errors import Error
    from sigstore.oidc import ExpiredIdentity

    answers: list[Answer] = []
    faults: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # raised again by the thread that waits
            faults.append(error)

    foreign = (Error, FulcioClientError, RekorClientError, ExpiredCertificate, ExpiredIdentity)
    thread = threading.Thread(target=work, name="sigstore", daemon=True)
    thread.start()
    thread.join(SIGSTORE_LIMIT)
    try:
        if not answers and not faults:
            raise TimeoutError(f"no answer in {SIGSTORE_LIMIT:.0f} s")
        if faults:
            raise faults[0]
    except (*foreign, OSError, ValueError, KeyError, TypeError) as error:
        reason = printable_value(str(error) or str(error.__cause__ or "") or type(error).__name__)
        raise RegistryError(
            "sigstore-failed",
            f"Sigstore did not {action}: {reason}",
            hint="run the command again: it attaches what is missing; signatures by keys are not affected",
        ) from error
    return answers[0]
