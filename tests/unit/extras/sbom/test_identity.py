"""`image attest`, by Sigstore's own client and servers of the tests: what is signed, once, and what never."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sigstore.models import Bundle, ClientTrustConfig
from sigstore.verify import Verifier
from sigstore.verify.policy import AllOf, Identity, OIDCIssuerV2

from imagefactory.actions.verdicts import find_in, read_verification_policy, signing_key
from imagefactory.extras.sbom import attest
from imagefactory.extras.sbom.attest import PROVENANCE, Provenance, sign_provenance
from imagefactory.model import Outcome
from imagefactory.oci.candidates import BUNDLE_TYPE, PROVENANCE_TYPE, VERDICT_TYPE
from imagefactory.oci.graph import StoreRepository, make_artifact, put_artifact, read_manifest
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.trust.attached import bundle_annotations, read_statements, read_subject
from imagefactory.trust.envelope import format_bundle, format_json
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.verdict import TEST_RESULT, VERDICT
from tests.made.command import Said, json_of
from tests.made.keyless import PASSWORD, SigstoreServer, sigstore_server
from tests.made.signing import Bench
from tests.made.sigstore import GITHUB, Workflow
from tests.made.verdicts import STRANGER

FULCIO, REKOR = "/api/v2/signingCert", "/api/v1/log/entries"
OTHER = Workflow(repository="other/other")


@dataclass(frozen=True)
class Job:
    """A CI job that has the identity of `server.workflow`."""

    bench: Bench
    server: SigstoreServer
    config: Path

    @property
    def place(self) -> StoreRepository:
        return StoreRepository(store=RegistryClient(self.bench.registry.host), repository="one")

    def attest(self, digest: str, code: int = 0) -> Said:
        words = ("--trust-config", str(self.config), "--json")
        return self.bench.call("image", "attest", f"{self.place}@{digest}", *words, code=code)

    def rows(self, digest: str) -> list[tuple[str, str, bool]]:
        value = json_of(self.attest(digest), "image-attest")
        assert (value["digest"], value["issuer"]) == (digest, GITHUB)
        assert value["identity"] == self.server.workflow.uri
        return [(row["predicate_type"], row["subject"], row["attached"]) for row in value["bundles"]]

    def bundles(self, digest: str) -> list[dict[str, Any]]:
        """The statements in the bundles of a manifest, verified by the reference library."""
        config = ClientTrustConfig.from_json(self.config.read_text())
        policy = AllOf([Identity(identity=self.server.workflow.uri), OIDCIssuerV2(GITHUB)])
        return [
            json.loads(
                Verifier(trusted_root=config.trusted_root).verify_dsse(
                    Bundle.from_json(found.envelope), policy
                )[1]
            )
            for found in read_statements(self.place, digest, BUNDLE_TYPE)
        ]

    def put_provenance(
        self, digest: str, key: SigningKey, about: str = "", kind: str = PROVENANCE_TYPE
    ) -> None:
        provenance = Provenance(
            target="one",
            index=about or digest,
            manifest=self.bench.manifest(digest),
            lock="sha256:" + "1" * 64,
            base=("debian", "sha256:" + "2" * 64),
            engine="native",
            codec="zstd",
            made_from="sha256:" + "3" * 64,
            packages=(),
        )
        root = read_manifest(self.place, digest).descriptor
        envelope = sign_provenance(provenance, key)
        content = format_bundle(envelope) if kind == BUNDLE_TYPE else envelope
        put_artifact(self.place, make_artifact(kind, root, {}, content))

    def verdicts(self, digest: str) -> list[tuple[str, bool]]:
        """The status of each verdict, and whether a certificate is all that signed it."""
        factory = self.bench.factory
        policy = read_verification_policy(factory, datetime.now(UTC))
        found = find_in(factory, self.place, read_subject(self.place, digest), policy)
        return [(str(row.standing), bool(row.verdict and not row.verdict.keyid)) for row in found.judged]


@pytest.fixture
def job(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with sigstore_server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield Job(bench, server, server.write_trust_config(tmp_path / "trust.json"))


def own_key(bench: Bench) -> SigningKey:
    key = signing_key(bench.factory, datetime.now(UTC))
    assert key
    return key


def test_what_a_trusted_key_signed_is_signed_by_the_job_once(job: Job) -> None:
    image = job.bench.push(b"a", 1)
    job.bench.verify(image)
    job.put_provenance(image, own_key(job.bench))
    manifest = job.bench.manifest(image)
    kinds = [(VERDICT, manifest), (TEST_RESULT, manifest), (PROVENANCE, image)]
    assert job.rows(image) == [(*kind, True) for kind in kinds]
    assert job.rows(image) == [(*kind, False) for kind in kinds]
    assert job.server.requests.count(REKOR) == 3
    assert {one["predicateType"] for one in job.bundles(manifest)} == {VERDICT, TEST_RESULT}
    (provenance,) = job.bundles(image)
    assert f"sha256:{provenance['subject'][0]['digest']['sha256']}" == image
    job.bench.verify(image, "9.0")
    assert [row[2] for row in job.rows(image)].count(True) == 2
    assert job.verdicts(image) == [("good", False), ("good", False)]
    place = f"{job.place}@{image}"
    said = job.bench.call("image", "attest", place, "--trust-config", str(job.config))
    assert job.server.workflow.uri in said.out
    assert said.out.count("unchanged") == 5


def test_a_provenance_that_is_in_a_bundle_too_or_only_there_is_signed_once(job: Job) -> None:
    image, other = job.bench.push(b"a", 1), job.bench.push(b"b", 2)
    for kind in (BUNDLE_TYPE, PROVENANCE_TYPE):
        job.put_provenance(image, own_key(job.bench), kind=kind)
    job.put_provenance(other, own_key(job.bench), kind=BUNDLE_TYPE)
    for one in (image, other):
        assert job.rows(one) == [(PROVENANCE, one, True)]
        assert job.rows(one) == [(PROVENANCE, one, False)]


def test_what_no_trusted_key_signed_is_never_signed(job: Job) -> None:
    image = job.bench.push(b"a", 1)
    assert job.attest(image, code=3).error_codes == ("statement-not-found",)
    job.bench.verify(image, key=STRANGER)
    job.bench.verify(image, "9.0", outcome=Outcome.WRONG_NUMBERS)
    job.put_provenance(image, STRANGER)
    job.put_provenance(image, own_key(job.bench), about="sha256:" + "4" * 64)
    root = read_manifest(job.place, image).descriptor
    for junk in (b"{", b"[]", b"[" * 100_000):
        put_artifact(job.place, make_artifact(BUNDLE_TYPE, root, bundle_annotations(PROVENANCE), junk))
    assert job.attest(image, code=3).error_codes == ("statement-not-found",)
    assert job.server.requests == []


def test_a_bundle_of_another_workflow_or_of_no_sigstore_is_not_the_jobs(job: Job) -> None:
    image = job.bench.push(b"a", 1)
    job.bench.verify(image)
    mine, job.server.workflow = job.server.workflow, OTHER
    assert [row[2] for row in job.rows(image)] == [True, True]
    job.server.workflow = mine
    assert [row[2] for row in job.rows(image)] == [True, True]
    manifest = read_manifest(job.place, job.bench.manifest(image)).descriptor
    found = read_statements(job.place, manifest.digest, BUNDLE_TYPE)
    for number, one in enumerate(found):
        value = json.loads(one.envelope)
        certificate = base64.b64decode(value["verificationMaterial"]["certificate"]["rawBytes"])
        spoiled = (certificate[:-1] + b"x", b"", b"0" * 900)[number % 3]
        value["verificationMaterial"]["certificate"]["rawBytes"] = base64.b64encode(spoiled).decode()
        kind = str(json.loads(base64.b64decode(value["dsseEnvelope"]["payload"]))["predicateType"])
        put_artifact(
            job.place, make_artifact(BUNDLE_TYPE, manifest, bundle_annotations(kind), format_json(value))
        )
    assert [row[2] for row in job.rows(image)] == [False, False]
    assert job.verdicts(image) == [("good", False)]


def test_a_verdict_with_a_certificate_alone_is_shown_and_does_not_count(job: Job) -> None:
    image = job.bench.push(b"a", 1)
    job.bench.verify(image)
    job.rows(image)
    client = RegistryClient(job.bench.registry.host)
    for row in client.referrers("one", job.bench.manifest(image), VERDICT_TYPE):
        client.delete_manifest("one", row.digest)
    assert job.verdicts(image) == [("unsigned", True)]
    assert job.attest(image, code=3).error_codes == ("statement-not-found",)


def test_without_an_identity_it_says_how_to_get_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    image = job.bench.push(b"a", 1)
    job.bench.verify(image)
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN")
    said = job.attest(image, code=6)
    assert said.error_codes == ("identity-missing",)
    assert "id-token: write" in said.err
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert job.attest(image, code=6).error_codes == ("identity-missing",)
    assert job.server.requests == []


FAULTS: tuple[tuple[str, int, bytes], ...] = (
    ("/token", 403, b"{}"),
    ("/token", 200, b"[]"),
    ("/token", 200, b'{"value": "x"}'),
    (FULCIO, 503, b"busy"),
    (FULCIO, 400, b'{"message": "no"}'),
    (FULCIO, 201, b"<html>"),
    (FULCIO, 201, b"[]"),
    (REKOR, 500, b"x" * 100_000),
    (REKOR, 201, b"{}"),
    (REKOR, 201, b'{"a": {"body": "e30="}}'),
)


def test_a_server_that_fails_loses_no_verdict_and_again_does_it(job: Job) -> None:
    image = job.bench.push(b"a", 1)
    job.bench.verify(image)
    for path, status, body in FAULTS:
        job.server.faults = {path: (status, body)}
        code, error = (6, "identity-missing") if path == "/token" else (8, "sigstore-failed")
        said = job.attest(image, code=code)
        assert said.error_codes == (error,)
        assert len(said.err) < 1500
        assert PASSWORD not in said.err
    assert job.bundles(job.bench.manifest(image)) == []
    assert job.verdicts(image) == [("good", False)]
    job.server.faults = {}
    assert [row[2] for row in job.rows(image)] == [True, True]


def test_a_sigstore_that_nobody_runs_and_a_file_that_names_none_are_told(job: Job, tmp_path: Path) -> None:
    image = job.bench.push(b"a", 1)
    job.bench.verify(image)
    good = job.config.read_text()
    job.config.write_text(good.replace(job.server.url, "http://127.0.0.1:9"))
    assert job.attest(image, code=8).error_codes == ("sigstore-failed",)
    for text in ("{", "[]", "{}", good.replace("v0.2+json", "v9+json"), "[" * 100_000):
        job.config.write_text(text)
        assert job.attest(image, code=2).error_codes == ("trust-config-invalid",), text[:50]


def test_the_answer_of_a_log_that_has_another_key_is_not_attached(job: Job) -> None:
    image = job.bench.push(b"a", 1)
    job.bench.verify(image)
    job.server.sigstore.log_key, other = job.server.sigstore.ct_key, job.server.sigstore.log_key
    assert job.attest(image, code=8).error_codes == ("sigstore-failed",)
    job.server.sigstore.log_key = other
    assert job.bundles(job.bench.manifest(image)) == []


@pytest.mark.parametrize("path", [FULCIO, REKOR])
def test_a_server_that_never_answers_is_not_waited_for_without_end(
    job: Job, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = job.bench.push(b"a", 1)
    job.bench.verify(image)
    job.server.hangs = path
    limits: set[float | None] = set()

    class Thread(threading.Thread):
        """Its time is over as soon as the server has the request that it leaves without an answer."""

        def join(self, timeout: float | None = None) -> None:
            limits.add(timeout)
            while self.is_alive() and path not in job.server.requests:
                super().join(0.01)

    monkeypatch.setattr(attest, "threading", SimpleNamespace(Thread=Thread))
    assert job.attest(image, code=8).error_codes == ("sigstore-failed",)
    assert limits == {attest.SIGSTORE_LIMIT}
