"""What imagefactory attaches, as the real cosign finds, reads and verifies it in a real registry."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.actions.verdicts import attach_signed
from imagefactory.extras.sbom.attest import PROVENANCE, Provenance, sign_provenance
from imagefactory.oci.candidates import BUNDLE_TYPE
from imagefactory.oci.graph import StoreRepository, read_manifest
from imagefactory.oci.manifests import MANIFEST_TYPE, Descriptor
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import ImageReference
from imagefactory.progress import QuietProgress
from imagefactory.trust.attached import SignedStatement, put_statement
from imagefactory.trust.envelope import format_json
from imagefactory.trust.keys import format_public
from imagefactory.trust.verdict import TEST_RESULT, VERDICT, SignedVerdict, sign
from tests.made.command import Said, json_of, say
from tests.made.families import make_root
from tests.made.keyless import sigstore_server
from tests.made.signing import Bench
from tests.made.sigstore import GITHUB, Sigstore
from tests.made.store_contract import image_manifest
from tests.made.verdicts import LAB, NOW, STRANGER, SUBJECT, whole_report
from tests.services.processes import find, search_path


class Cosign:
    """An image in a registry, and the command that looks for its statements there."""

    def __init__(self, folder: Path, registry: str, name: str) -> None:
        self.folder = folder
        self.place = StoreRepository(store=RegistryClient(registry), repository=name)
        for key in (LAB, STRANGER):
            (folder / f"{key.name}.pub").write_bytes(format_public(key.public))

    def put_image(self, content: bytes) -> Descriptor:
        data = image_manifest(self.place.store, self.place.repository, content)
        return self.place.store.put_manifest(self.place.repository, data, MANIFEST_TYPE)

    def attach(self, image: Descriptor, envelope: bytes) -> None:
        put_statement(self.place, SignedStatement(kind=BUNDLE_TYPE, subject=image, envelope=envelope))

    def verify(self, image: Descriptor, kind: str, *options: str, key: str = "lab") -> list[bytes]:
        """The payloads that it prints. Nothing of this machine's settings is read."""
        command = [find("cosign"), "verify-attestation", "--type", kind, f"{self.place}@{image.digest}"]
        if key:
            command += ["--key", str(self.folder / f"{key}.pub"), "--insecure-ignore-tlog=true"]
        environ = {"HOME": str(self.folder), "PATH": search_path()}
        ran = subprocess.run([*command, *options], env=environ, capture_output=True, timeout=300)
        if ran.returncode:
            assert not ran.stdout, ran.stdout
            return []
        return [base64.b64decode(json.loads(line)["payload"]) for line in ran.stdout.splitlines()]


@pytest.fixture
def cosign(registry: str, tmp_path: Path) -> Cosign:
    return Cosign(tmp_path, registry, f"cosign-{os.urandom(4).hex()}")


def signed_for(image: Descriptor) -> SignedVerdict:
    subject = replace(SUBJECT, index=image.digest, manifest=image.digest)
    return sign(whole_report(subject=subject), LAB, now=NOW, days=90)


def test_it_verifies_every_statement_by_our_key_and_by_no_other(cosign: Cosign) -> None:
    image = cosign.put_image(b"content")
    signed = signed_for(image)
    provenance = Provenance(
        target="one",
        index=image.digest,
        manifest=image.digest,
        lock="sha256:" + "1" * 64,
        base=("debian", "sha256:" + "2" * 64),
        engine="native",
        codec="zstd",
        made_from="sha256:" + "3" * 64,
        packages=(),
    )
    envelopes = {
        VERDICT: signed.envelope,
        TEST_RESULT: signed.test_result,
        PROVENANCE: sign_provenance(provenance, LAB),
    }
    for envelope in envelopes.values():
        cosign.attach(image, envelope)
    for kind, envelope in envelopes.items():
        assert cosign.verify(image, kind) == [base64.b64decode(json.loads(envelope)["payload"])]
        assert cosign.verify(image, kind, key="stranger") == []
    passed = cosign.folder / "passed.cue"
    passed.write_text('predicate: result: "PASSED"\n')
    assert cosign.verify(image, TEST_RESULT, "--policy", str(passed))
    passed.write_text('predicate: result: "FAILED"\n')
    assert cosign.verify(image, TEST_RESULT, "--policy", str(passed)) == []


def test_it_rejects_what_was_changed_and_what_is_about_another_image(cosign: Cosign) -> None:
    image, other = cosign.put_image(b"content"), cosign.put_image(b"other")
    signed = signed_for(image)
    cosign.attach(other, signed.envelope)
    assert cosign.verify(other, VERDICT) == []
    value = json.loads(signed.envelope)
    payload = base64.b64decode(value["payload"]).replace(
        b"all that applies passed", b"all that applies held!"
    )
    value["payload"] = base64.b64encode(payload).decode()
    cosign.attach(image, format_json(value))
    assert cosign.verify(image, VERDICT) == []
    cosign.attach(image, signed.envelope)
    assert len(cosign.verify(image, VERDICT)) == 1


def test_it_verifies_the_bundles_of_a_github_workflow_by_its_identity_alone(
    cosign: Cosign, registry: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cosign.folder
    root = make_root(folder / "root")

    def run(*arguments: str, code: int = 0) -> Said:
        said = say(capsys, "-C", str(root), *arguments)
        assert said.code == code, said.err
        return said

    for name in ("store", "cache"):
        monkeypatch.setenv(f"IMAGEFACTORY_{name.upper()}", str(folder / name))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    run("key", "create", "lab")
    run("key", "trust", "lab", "--since", "2026-01-01")
    host: Any = SimpleNamespace(host=f"{registry}/{cosign.place.repository}")
    bench = Bench(run, folder, host)
    digest = bench.push(b"content", 1)
    cosign.place = StoreRepository(
        store=RegistryClient(registry), repository=f"{cosign.place.repository}/one"
    )
    signed = bench.sign(cosign.place, digest)
    attach_signed(
        bench.factory,
        signed,
        ImageReference(registry=registry, repository=cosign.place.repository, digest=digest),
        QuietProgress(),
    )
    with sigstore_server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        config = server.write_trust_config(folder / "trust.json")
        said = run("image", "attest", f"{cosign.place}@{digest}", "--trust-config", str(config), "--json")
    value = json_of(said, "image-attest")
    manifest = read_manifest(cosign.place, value["bundles"][0]["subject"]).descriptor
    trusted = folder / "trusted_root.json"
    trusted.write_text(json.dumps(server.sigstore.trusted_root))

    def verified(kind: str, identity: str, issuer: str = GITHUB) -> int:
        options = (f"--certificate-identity={identity}", f"--certificate-oidc-issuer={issuer}")
        return len(cosign.verify(manifest, kind, *options, f"--trusted-root={trusted}", key=""))

    assert (value["identity"], value["issuer"]) == (server.workflow.uri, GITHUB)
    for row in value["bundles"]:
        assert verified(row["predicate_type"], value["identity"]) == 1
        assert verified(row["predicate_type"], value["identity"].replace("v1", "v2")) == 0
        assert verified(row["predicate_type"], value["identity"], "https://issuer.invalid") == 0
    trusted.write_text(json.dumps(Sigstore().trusted_root))
    assert verified(VERDICT, value["identity"]) == 0
