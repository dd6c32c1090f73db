"""A Sigstore of its own: a certificate authority, a CT log and a Rekor log whose keys are made here.

Its certificates, log entries and attestations are verified by the reference libraries, with its trusted root
in place of the public one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pypi_attestations import AttestationType

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
GITHUB = "https://token.actions.githubusercontent.com"
IN_TOTO = "application/vnd.in-toto+json"
PUBLIC_TUF = "https://tuf-repo-cdn.sigstore.dev"  # by which the library names its directory
_SCT_LIST = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_FULCIO = "1.3.6.1.4.1.57264.1."
_P256 = "PKIX_ECDSA_P256_SHA_256"


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """A GitHub Actions workflow at a tag, as its OIDC token names it."""

    repository: str = "demo/demo"
    file: str = "release.yml"
    ref: str = "refs/tags/v1"
    commit: str = "c" * 40

    @property
    def uri(self) -> str:
        return f"https://github.com/{self.repository}/.github/workflows/{self.file}@{self.ref}"

    @property
    def claims(self) -> dict[int, str]:
        """The claims of a certificate by their number. Source: Fulcio's oid-info.md."""
        return {
            8: GITHUB,
            9: self.uri,
            11: "github-hosted",
            12: f"https://github.com/{self.repository}",
            13: self.commit,
            14: self.ref,
            18: self.uri,
            20: "release",
        }

    @property
    def publisher(self) -> dict[str, str | None]:
        """The publisher in a provenance object (PEP 740)."""
        return {
            "kind": "GitHub",
            "repository": self.repository,
            "workflow": self.file,
            "environment": None,
        }


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def public_der(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def log_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(public_der(key)).digest()


def sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def pae(payload: bytes) -> bytes:
    """The bytes that a DSSE envelope signs."""
    return b"DSSEv1 %d %s %d %s" % (len(IN_TOTO), IN_TOTO.encode(), len(payload), payload)


def _utf8_string(text: str) -> bytes:
    """DER of a UTF8String."""
    data = text.encode()
    length = len(data).to_bytes(2, "big").lstrip(b"\0")
    return b"\x0c" + (length if len(data) < 128 else bytes([0x80 | len(length)]) + length) + data


@dataclass(slots=True)
class Sigstore:
    """The keys and the log of one Sigstore. Every entry stays in the log, as in the public one."""

    root_key: ec.EllipticCurvePrivateKey = field(default_factory=_new_key)
    ct_key: ec.EllipticCurvePrivateKey = field(default_factory=_new_key)
    log_key: ec.EllipticCurvePrivateKey = field(default_factory=_new_key)
    leaves: list[bytes] = field(default_factory=list)
    url: str = "https://sigstore.invalid"

    @property
    def root(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root of the tests")])
        return self._with_usage(
            x509.CertificateBuilder(name, name, self.root_key.public_key(), 1)
            .not_valid_before(NOW - timedelta(days=3650))
            .not_valid_after(NOW + timedelta(days=3650))
            .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.root_key.public_key()), False),
            ca=True,
        ).sign(self.root_key, hashes.SHA256())

    @staticmethod
    def _with_usage(builder: x509.CertificateBuilder, *, ca: bool) -> x509.CertificateBuilder:
        names = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        usage = x509.KeyUsage(
            digital_signature=not ca,
            key_cert_sign=ca,
            crl_sign=ca,
            encipher_only=False,
            decipher_only=False,
            **dict.fromkeys(names, False),
        )
        return builder.add_extension(usage, critical=True)

    def certificate(
        self,
        key: ec.EllipticCurvePublicKey,
        name: x509.GeneralName,
        claims: Mapping[int, str],
        *,
        at: datetime = NOW,
    ) -> x509.Certificate:
        """A certificate of ten minutes, with the CT log's timestamp, as Fulcio issues it for a token."""
        builder = self._with_usage(
            x509.CertificateBuilder(self.root.subject, x509.Name([]), key, x509.random_serial_number())
            .not_valid_before(at)
            .not_valid_after(at + timedelta(minutes=10))
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.root_key.public_key()), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([name]), critical=True),
            ca=False,
        )
        for number, value in claims.items():
            extension = x509.UnrecognizedExtension(
                x509.ObjectIdentifier(f"{_FULCIO}{number}"), _utf8_string(value)
            )
            builder = builder.add_extension(extension, critical=False)
        unlogged = builder.sign(self.root_key, hashes.SHA256()).tbs_certificate_bytes
        stamp = int(at.timestamp() * 1000)
        issuer = hashlib.sha256(public_der(self.root_key)).digest()
        entry = struct.pack("!BBQH", 0, 0, stamp, 1) + issuer + len(unlogged).to_bytes(3, "big") + unlogged
        signature = sign(self.ct_key, entry + struct.pack("!H", 0))
        sct = struct.pack("!B32sQHBBH", 0, log_id(self.ct_key), stamp, 0, 4, 3, len(signature)) + signature
        scts = struct.pack("!HH", len(sct) + 2, len(sct)) + sct
        octets = b"\x04" + (bytes([len(scts)]) if len(scts) < 128 else bytes([0x81, len(scts)])) + scts
        return builder.add_extension(x509.UnrecognizedExtension(_SCT_LIST, octets), critical=False).sign(
            self.root_key, hashes.SHA256()
        )

    def log(self, body: Mapping[str, Any], *, at: datetime) -> dict[str, Any]:
        """Append an entry to the log. Return it with its proof, as bundles have it (protobuf JSON)."""
        text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        index, time, key_id = len(self.leaves), int(at.timestamp()), log_id(self.log_key)
        self.leaves.append(hashlib.sha256(b"\0" + text).digest())
        root = _tree_hash(self.leaves)
        note = f"log of the tests - 1\n{len(self.leaves)}\n{base64_of(root)}\n"
        signature = base64_of(key_id[:4] + sign(self.log_key, note.encode()))
        promise = {"body": base64_of(text), "integratedTime": time, "logID": key_id.hex(), "logIndex": index}
        promised = json.dumps(promise, sort_keys=True, separators=(",", ":")).encode()
        return {
            "logIndex": str(index),
            "logId": {"keyId": base64_of(key_id)},
            "kindVersion": {"kind": body["kind"], "version": body["apiVersion"]},
            "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": base64_of(sign(self.log_key, promised))},
            "inclusionProof": {
                "logIndex": str(index),
                "rootHash": base64_of(root),
                "treeSize": str(len(self.leaves)),
                "hashes": [base64_of(node) for node in _path(index, self.leaves)],
                "checkpoint": {"envelope": f"{note}\n\N{EM DASH} log.of.the.tests {signature}\n"},
            },
            "canonicalizedBody": base64_of(text),
        }

    def log_envelope(
        self, certificate: x509.Certificate, payload: bytes, signature: bytes, *, at: datetime
    ) -> dict[str, Any]:
        """Append a signed DSSE envelope to the log (Rekor's type dsse 0.0.1)."""
        verifier = base64_of(certificate.public_bytes(Encoding.PEM))
        digest = {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()}
        row = {"signature": base64_of(signature), "verifier": verifier}
        spec = {"envelopeHash": digest, "payloadHash": digest, "signatures": [row]}
        return self.log({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}, at=at)

    def attestation(
        self,
        filename: str,
        sha256: str,
        workflow: Workflow,
        *,
        at: datetime = NOW,
        logged: datetime | None = None,
    ) -> dict[str, Any]:
        """An attestation of a file (PEP 740), signed by `workflow` at a time, and logged then or later."""
        statement = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": filename, "digest": {"sha256": sha256}}],
            "predicateType": AttestationType.PYPI_PUBLISH_V1.value,
            "predicate": None,
        }
        payload, key = json.dumps(statement).encode(), _new_key()
        name = x509.UniformResourceIdentifier(workflow.uri)
        certificate = self.certificate(key.public_key(), name, workflow.claims, at=at)
        signature = sign(key, pae(payload))
        entry = self.log_envelope(certificate, payload, signature, at=logged or at + timedelta(seconds=2))
        return {
            "version": 1,
            "verification_material": {
                "certificate": base64_of(certificate.public_bytes(Encoding.DER)),
                "transparency_entries": [entry],
            },
            "envelope": {"statement": base64_of(payload), "signature": base64_of(signature)},
        }

    def provenance(
        self, filename: str, sha256: str, workflow: Workflow, *, publisher: Workflow | None = None
    ) -> dict[str, Any]:
        """The provenance object of a file, as an index serves it. `publisher` is another one than signed."""
        row = {
            "publisher": (publisher or workflow).publisher,
            "attestations": [self.attestation(filename, sha256, workflow)],
        }
        return {"version": 1, "attestation_bundles": [row]}

    @property
    def trusted_root(self) -> dict[str, Any]:
        """The document trusted_root.json, by which clients verify."""

        def log(key: ec.EllipticCurvePrivateKey, path: str) -> dict[str, Any]:
            return {
                "baseUrl": f"{self.url}{path}",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": base64_of(public_der(key)),
                    "keyDetails": _P256,
                    "validFor": {"start": "2020-01-01T00:00:00Z"},
                },
                "logId": {"keyId": base64_of(log_id(key))},
            }

        return {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.log_key, "")],
            "certificateAuthorities": [
                {
                    "subject": {"organization": "tests", "commonName": "root of the tests"},
                    "uri": self.url,
                    "certChain": {
                        "certificates": [{"rawBytes": base64_of(self.root.public_bytes(Encoding.DER))}]
                    },
                    "validFor": {"start": "2020-01-01T00:00:00Z"},
                }
            ],
            "ctlogs": [log(self.ct_key, "/ct")],
            "timestampAuthorities": [],
        }

    def install(self, cache_home: Path) -> None:
        """Write the trusted root to where the library looks for the public one, below XDG_CACHE_HOME."""
        directory = cache_home / "sigstore-python" / "tuf" / quote(PUBLIC_TUF, safe="")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "trusted_root.json").write_text(json.dumps(self.trusted_root))


def _tree_hash(leaves: Sequence[bytes]) -> bytes:
    """The hash of a Merkle tree (RFC 6962, section 2.1)."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + _tree_hash(leaves[:middle]) + _tree_hash(leaves[middle:])).digest()


def _path(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    """The audit path of a leaf (RFC 6962, section 2.1.1)."""
    if len(leaves) == 1:
        return []
    middle = 1 << (len(leaves) - 1).bit_length() - 1
    if index < middle:
        return [*_path(index, leaves[:middle]), _tree_hash(leaves[middle:])]
    return [*_path(index - middle, leaves[middle:]), _tree_hash(leaves[:middle])]
