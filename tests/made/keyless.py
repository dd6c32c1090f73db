"""Fulcio, Rekor and GitHub's token service on 127.0.0.1, by which the reference library signs for real."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tests.made.sigstore import GITHUB, Sigstore, Workflow

PASSWORD = "of-this-job"


def _part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@dataclass(slots=True)
class SigstoreServer:
    """`faults` are answers by path, `(status, body)`, in place of its own. `requests` are the paths asked."""

    sigstore: Sigstore
    workflow: Workflow
    url: str
    faults: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    hangs: str = ""
    """The path that gets no answer before the server ends."""
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def environ(self) -> dict[str, str]:
        """What GitHub sets in a job with `id-token: write`."""
        return {
            "GITHUB_ACTIONS": "true",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": PASSWORD,
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{self.url}/token?api-version=2.0",
        }

    def write_trust_config(self, path: Path) -> Path:
        """Write where the servers are and by which keys they are verified (ClientTrustConfig)."""
        service = {
            "url": self.url,
            "majorApiVersion": 1,
            "validFor": {"start": "2020-01-01T00:00:00Z"},
            "operator": "tests",
        }
        config = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": [service],
            "rekorTlogUrls": [service],
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaConfig": {"selector": "ALL"},
        }
        value = {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": self.sigstore.trusted_root,
            "signingConfig": config,
        }
        path.write_text(json.dumps(value))
        return path

    def token(self, audience: str) -> dict[str, Any]:
        time = int(datetime.now(UTC).timestamp())
        claims = {
            "iss": GITHUB,
            "aud": audience,
            "sub": f"repo:{self.workflow.repository}",
            "job_workflow_ref": self.workflow.uri.removeprefix("https://github.com/"),
            "iat": time,
            "nbf": time,
            "exp": time + 300,
        }
        return {"value": f"{_part({'alg': 'RS256'})}.{_part(claims)}.c2ln"}

    def certificate(self, asked: dict[str, Any]) -> dict[str, Any]:
        request = x509.load_pem_x509_csr(base64.b64decode(asked["certificateSigningRequest"]))
        key = request.public_key()
        assert request.is_signature_valid
        assert isinstance(key, ec.EllipticCurvePublicKey)
        name = x509.UniformResourceIdentifier(self.workflow.uri)
        at = datetime.now(UTC).replace(microsecond=0)
        chain = (self.sigstore.certificate(key, name, self.workflow.claims, at=at), self.sigstore.root)
        texts = [certificate.public_bytes(Encoding.PEM).decode() for certificate in chain]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": texts}}}

    def entry(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Log an envelope, as Rekor's version 1 does."""
        proposed = asked["spec"]["proposedContent"]
        envelope = json.loads(proposed["envelope"])
        certificate = x509.load_pem_x509_certificate(base64.b64decode(proposed["verifiers"][0]))
        payload, signature = (
            base64.b64decode(text) for text in (envelope["payload"], envelope["signatures"][0]["sig"])
        )
        logged = self.sigstore.log_envelope(certificate, payload, signature, at=datetime.now(UTC))
        proof = logged["inclusionProof"]
        index, uuid = int(logged["logIndex"]), hashlib.sha256(signature).hexdigest()
        return {
            uuid: {
                "body": logged["canonicalizedBody"],
                "integratedTime": int(logged["integratedTime"]),
                "logID": base64.b64decode(logged["logId"]["keyId"]).hex(),
                "logIndex": index,
                "verification": {
                    "signedEntryTimestamp": logged["inclusionPromise"]["signedEntryTimestamp"],
                    "inclusionProof": {
                        "logIndex": index,
                        "rootHash": base64.b64decode(proof["rootHash"]).hex(),
                        "treeSize": int(proof["treeSize"]),
                        "hashes": [base64.b64decode(node).hex() for node in proof["hashes"]],
                        "checkpoint": proof["checkpoint"]["envelope"],
                    },
                },
            }
        }


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        made, (path, _, query) = self.server.made, self.path.partition("?")
        made.requests.append(path)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == made.hangs:
            made.ended.wait()
            return None
        if path in made.faults:
            return self._send(*made.faults[path])
        if path == "/token" and self.headers["Authorization"] == f"bearer {PASSWORD}":
            assert "audience=sigstore" in query
            return self._send(200, json.dumps(made.token("sigstore")).encode())
        if path == "/api/v2/signingCert" and self.headers["Authorization"].startswith("Bearer "):
            return self._send(201, json.dumps(made.certificate(json.loads(data))).encode())
        if path == "/api/v1/log/entries":
            return self._send(201, json.dumps(made.entry(json.loads(data))).encode())
        return self._send(404, b"{}")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    made: SigstoreServer


@contextmanager
def sigstore_server(workflow: Workflow | None = None) -> Iterator[SigstoreServer]:
    server = _Server(("127.0.0.1", 0), _Handler)
    made = SigstoreServer(Sigstore(), workflow or Workflow(), f"http://127.0.0.1:{server.server_port}")
    server.made = made
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
