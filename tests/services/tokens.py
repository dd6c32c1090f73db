"""A token server as the registries of the world have one: a name and password, or none, for a signed token.

Rules: distribution's "Docker Registry v2 Bearer token specification" and "Token Authentication Implementation
Documentation". docker-registry takes a JSON web token by RS256 with the certificate in its header.
"""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(slots=True, kw_only=True)
class TokenServer:
    """What it gives can be changed while it runs: lifetimes, and what it refuses."""

    realm: str
    certificate: Path
    key: Path
    users: Mapping[str, str]
    service: str
    issuer: str
    seconds: int = 300
    given: list[dict[str, Any]] = field(default_factory=list)
    """The claims of every token given, in order."""

    def claims(self, user: str, scopes: list[str]) -> dict[str, Any]:
        now = int(time.time())
        access = []
        for scope in " ".join(scopes).split():
            kind, _, rest = scope.partition(":")
            name, _, actions = rest.rpartition(":")
            granted = [action for action in actions.split(",") if user or action == "pull"]
            access.append({"type": kind, "name": name, "actions": granted})
        return {
            "iss": self.issuer,
            "sub": user,
            "aud": self.service,
            # docker-registry allows a minute's difference between clocks; it is taken off here.
            "exp": now + self.seconds - 60,
            "nbf": now - 10,
            "iat": now,
            "jti": secrets.token_hex(8),
            "access": access,
        }

    def sign(self, claims: Mapping[str, Any]) -> str:
        pem = self.certificate.read_text().splitlines()
        der = "".join(line for line in pem if not line.startswith("-"))
        head = {"typ": "JWT", "alg": "RS256", "x5c": [der]}
        body = b".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
        signed = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(self.key)],
            input=body,
            capture_output=True,
            check=True,
        )
        return (body + b"." + _base64(signed.stdout)).decode()


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


@contextmanager
def token_server(folder: Path, users: Mapping[str, str], service: str, issuer: str) -> Iterator[TokenServer]:
    """On a free port of 127.0.0.1, in a thread of this process. Who gives no name may pull, not push."""
    key, certificate = folder / "token.key", folder / "token.crt"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    made = TokenServer(
        realm="", certificate=certificate, key=key, users=users, service=service, issuer=issuer
    )
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            user = self._user()
            if user is None:
                self._send(401, {"errors": [{"code": "UNAUTHORIZED", "message": "wrong name or password"}]})
                return
            query = parse_qs(urlsplit(self.path).query)
            claims = made.claims(user, query.get("scope", []))
            with lock:
                made.given.append(claims)
            issued = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            token = made.sign(claims)
            self._send(200, {"token": token, "expires_in": made.seconds, "issued_at": issued})

        def do_POST(self) -> None:
            """OAuth2, which no client has to speak; 404 tells it to use GET."""
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._send(404, {})

        def _user(self) -> str | None:
            """The name, empty for nobody, None for a wrong password."""
            kind, _, value = self.headers.get("Authorization", "").partition(" ")
            if not kind:
                return ""
            name, _, password = base64.b64decode(value).decode().partition(":")
            return name if made.users.get(name) == password else None

        def _send(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.realm = f"http://127.0.0.1:{server.server_address[1]}/token"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
