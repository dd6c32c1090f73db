"""An HTTP server on an address of this machine that answers what a test says, and keeps each request."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = tuple[int, Mapping[str, str], bytes]


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Service:
    """`address` is host:port. `log` has each request in order; `answer` says what comes back."""

    address: str
    answer: Callable[[Request], Answer]
    log: list[Request] = field(default_factory=list)

    @property
    def asked(self) -> list[str]:
        return [f"{request.method} {request.path}" for request in self.log]


def ok(_: Request) -> Answer:
    return 200, {}, b"{}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no failure."""


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for the first addresses of 127.0.0.0/8, and its key."""
    pem, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ",".join(f"IP:127.0.0.{number}" for number in (1, 2, 3))
    name = ["-subj", "/CN=tests", "-addext", f"subjectAltName={names}", "-days", "2"]
    subprocess.run([*make, *name, "-keyout", str(key), "-out", str(pem)], check=True, capture_output=True)
    return pem, key


@contextmanager
def service(
    answer: Callable[[Request], Answer] = ok,
    *,
    host: str = "127.0.0.1",
    tls: tuple[Path, Path] | None = None,
) -> Iterator[Service]:
    """A service at a free port of `host`, which may be any address of 127.0.0.0/8."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, dict(self.headers.items()), body)
            served.log.append(request)
            status, headers, data = served.answer(request)
            with suppress(OSError):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = handle_one

    server = _Server((host, 0), Handler)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    served = Service(f"{host}:{server.server_port}", answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
