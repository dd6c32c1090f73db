"""A small strict registry in this process, for tests: the distribution specification on 127.0.0.1.

It checks every digest, refuses manifests whose blobs are missing, counts requests and bytes, and can be
told to lack what real registries lack (the referrers API, deletion of tags, mounts, space) and to fail
in a given way at a given request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

USER, PASSWORD = "builder", "open-sesame-4711"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPES = {
    INDEX,
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
}

_PATH = re.compile(
    r"/v2/(?:(?P<name>.+?)/(?:blobs/uploads/(?P<upload>[^/]*)|blobs/(?P<blob>[^/]+)"
    r"|manifests/(?P<manifest>[^/]+)|referrers/(?P<referrers>[^/]+)|(?P<tags>tags/list)))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How a registry behaves. `auth` is none, basic or token; `quota` bytes of blobs in all.

    `redirect` answers GETs of blobs with the address of another host (`localhost` for `127.0.0.1`),
    which refuses who brings a credential, as object stores do.
    """

    referrers: bool = True
    auth: str = "none"
    anonymous_pull: bool = False
    token_seconds: float = 300.0
    token_uses: int = 1_000_000
    quota: int | None = None
    full_status: int = 500
    page: int = 100
    untag: bool = True
    mount: bool = True
    redirect: bool = False
    ranges: bool = True
    most_ranged: int = 0  # bytes of a PATCH with a Content-Range, as GHCR has it; 0 is no bound
    most: int = 0  # of any PATCH
    told_range: str = ""  # what every PATCH answers, whatever arrived, as ECR does
    upload_page: bool = True  # GET of an upload


@dataclass(slots=True)
class Repository:
    blobs: set[str] = field(default_factory=set)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Shelves:
    """What a registry holds; given to the next one, it survives a restart."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, tuple[str, bytearray]] = field(default_factory=dict)
    repositories: dict[str, Repository] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(map(len, self.blobs.values())) + sum(len(data) for _, data in self.uploads.values())


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `kind` is blob, upload, manifest, tags, referrers, token or ping."""

    method: str
    kind: str
    path: str
    headers: dict[str, str]

    def __str__(self) -> str:
        return f"{self.method} {self.kind}"


# What a `fault` may answer: an HTTP status ("503", "429:2" with Retry-After: 2, "401" as an expired
# token), "reset" before anything is done, "reset-after" all was done, "cut" (half of the reply's body),
# "drop:N" (the connection breaks after N bytes of the request's body are stored), "lose" (the upload is
# forgotten), "wrong" (a reply's body with its first byte changed), "hang" (no answer before the
# registry stops), "lie" (another Docker-Content-Digest), "echo" (a 403 that repeats the request's
# Authorization).
Fault = Callable[[Asked], str | None]


class RegistryMadeHere:
    """`host` is host:port. `log` has every request, `count` them by `str(Asked)`; bytes are of bodies.

    `connections` counts those that were made to it.
    """

    def __init__(self, ways: Ways, shelves: Shelves | None = None, fault: Fault | None = None) -> None:
        self.scheme = "http"
        self.ways, self.shelves, self.fault = ways, shelves or Shelves(), fault
        self.lock = threading.RLock()
        self.log: list[Asked] = []
        self.count: Counter[str] = Counter()
        self.bytes_in = self.bytes_out = self.connections = 0
        self.stopped = threading.Event()
        self.tokens: dict[str, list[Any]] = {}  # token -> [scopes, valid until, uses left]
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.registry = self
        self.host = f"127.0.0.1:{self._server.server_port}"

    def repository(self, name: str) -> Repository:
        return self.shelves.repositories.setdefault(name, Repository())

    def find(self, name: str) -> Repository:
        return self.shelves.repositories.get(name, Repository())

    def forget_uploads(self) -> None:
        with self.lock:
            self.shelves.uploads.clear()

    def secure(self, certificate: Path, key: Path) -> None:
        """Speaks https from now on, before `start`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.scheme = "https"

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self.stopped.is_set():
            self._server.handle_request()

    def stop(self) -> None:
        self.stopped.set()
        self._server.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection at once
        self._thread.join()
        self._server.server_close()


@contextmanager
def registry_made_here(
    ways: Ways | None = None,
    *,
    shelves: Shelves | None = None,
    fault: Fault | None = None,
    tls: tuple[Path, Path] | None = None,
) -> Iterator[RegistryMadeHere]:
    """A registry that runs inside the `with`; `.host` is its host:port, `tls` a certificate and its key."""
    registry = RegistryMadeHere(ways or Ways(), shelves, fault)
    if tls:
        registry.secure(*tls)
    registry.start()
    try:
        yield registry
    finally:
        registry.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    registry: RegistryMadeHere

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that went away are part of the tests


class _Gone(Exception):
    """The connection is to be broken without a reply."""


class _Refused(Exception):
    def __init__(self, status: int, code: str, detail: str = "", **headers: str) -> None:
        super().__init__(code)
        self.status, self.code, self.detail, self.headers = status, code, detail, headers


def sha256(data: bytes | bytearray) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        with self.server.registry.lock:
            self.server.registry.connections += 1

    # --- one request -----------------------------------------------------------------------------

    def handle_one_request(self) -> None:
        with suppress(ConnectionError, TimeoutError):
            super().handle_one_request()
            return
        self.close_connection = True

    def do(self) -> None:
        self.registry = self.server.registry
        self.ways, self.shelves = self.registry.ways, self.registry.shelves
        parts = urlsplit(self.path)
        self.route, self.query = parts.path, {k: v[-1] for k, v in parse_qs(parts.query).items()}
        self.all = parse_qs(parts.query)
        match = _PATH.fullmatch(self.route)
        found = {k: v for k, v in (match.groupdict() if match else {}).items() if v is not None}
        self.name = found.pop("name", "")
        kind, self.word = next(iter(found.items()), ("ping", ""))
        if self.route.startswith("/token"):
            kind = "token"
        asked = Asked(self.command, kind, self.path, {k.lower(): v for k, v in self.headers.items()})
        with self.registry.lock:
            self.registry.log.append(asked)
            self.registry.count[str(asked)] += 1
            fault = (self.registry.fault(asked) if self.registry.fault else None) or ""
        self.left = int(self.headers.get("Content-Length") or 0)
        self.fault, _, self.amount = fault.partition(":")
        try:
            self._go(kind, known=bool(match) or kind == "token")
        except _Gone:
            self._reset()
        except _Refused as no:
            self._refuse(no)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = do

    def _go(self, kind: str, *, known: bool) -> None:
        if self.fault == "reset":
            raise _Gone
        if self.fault == "hang":
            self.registry.stopped.wait()
            raise _Gone
        if self.fault == "lose":
            self.registry.forget_uploads()
        if self.fault == "echo":
            raise _Refused(403, "DENIED", f"not for\x1b[31m {self.headers.get('Authorization')}")
        if self.fault == "401":
            raise self._challenge("invalid_token")
        if self.fault == "link":  # docker-registry, of a layer whose link is just being written anew
            raise _Refused(400, "DIGEST_INVALID")
        if self.fault.isdigit():
            raise _Refused(
                int(self.fault), "UNAVAILABLE", **({"Retry-After": self.amount} if self.amount else {})
            )
        if not known:
            raise _Refused(404, "NOT_FOUND")
        if kind != "token":
            self._admit()
        getattr(self, f"_{kind}")()

    def _reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        if self.fault == "reset-after":
            raise _Gone
        self._drain()
        if self.fault == "wrong" and body:
            body = bytes([body[0] ^ 255]) + body[1:]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204 and "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        with self.registry.lock:  # before they go: who has read them may look
            self.registry.bytes_out += len(body)
        self.wfile.write(body)

    def _refuse(self, no: _Refused) -> None:
        text = {
            "errors": [{"code": no.code, "message": no.code.lower().replace("_", " "), "detail": no.detail}]
        }
        self.fault = ""
        self._reply(no.status, json.dumps(text).encode(), Content_Type="application/json", **no.headers)

    def _drain(self) -> None:
        """Takes what is left of a refused body; of a long one only a part, as servers do, and hangs up."""
        if self.left > 262_144:
            self.close_connection = True
        self.rfile.read(min(self.left, 262_144))
        self.left = 0

    def _reset(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RD)
        with suppress(OSError):
            self.connection.close()

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self._count(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return
        while self.left:
            data = self.rfile.read1(min(self.left, 1 << 20))
            if not data:
                raise _Gone
            self.left -= len(data)
            yield self._count(data)

    def _count(self, data: bytes) -> bytes:
        with self.registry.lock:
            self.registry.bytes_in += len(data)
        return data

    # --- who asks --------------------------------------------------------------------------------

    def _wanted(self) -> list[str]:
        if not self.name:
            return []
        actions = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}.get(self.command, "pull,push")
        origin = self.query.get("from") if self.command == "POST" else None
        return [f"repository:{self.name}:{actions}"] + ([f"repository:{origin}:pull"] if origin else [])

    def _challenge(self, error: str = "") -> _Refused:
        if self.ways.auth != "token":
            return _Refused(401, "UNAUTHORIZED", WWW_Authenticate='Basic realm="made here, for tests"')
        words = [f'realm="{self.registry.scheme}://{self.registry.host}/token"', 'service="made, here"']
        words += [f'scope="{" ".join(self._wanted())}"'] if self._wanted() else []
        words += [f'error="{error}"'] if error else []
        return _Refused(401, "UNAUTHORIZED", WWW_Authenticate="Bearer " + ",".join(words))

    def _basic(self) -> bool:
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return self.headers.get("Authorization") == f"Basic {expected}"

    def _admit(self) -> None:
        if "elsewhere" in self.query and self.headers.get("Host", "").startswith("localhost:"):
            if self.headers.get("Authorization"):
                raise _Refused(400, "TWO_CREDENTIALS")
            return
        if self.ways.auth == "none":
            return
        if self.ways.auth == "basic":
            if not self._basic():
                raise self._challenge()
            return
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if not token:
            raise self._challenge()
        with self.registry.lock:
            row = self.registry.tokens.get(token) if kind == "Bearer" else None
            if row is None or time.monotonic() > row[1] or row[2] <= 0:
                raise self._challenge("invalid_token")
            row[2] -= 1
        if not _expand(self._wanted()) <= row[0]:
            raise self._challenge("insufficient_scope")

    def _token(self) -> None:
        if self.ways.auth != "token":
            raise _Refused(404, "NOT_FOUND")
        known = self._basic()
        if self.command == "POST":  # OAuth2, with the identity token of `docker login`
            form = parse_qs(b"".join(self._body()).decode())
            known = form.get("refresh_token") == [PASSWORD]
            self.all, self.query = form, {k: v[-1] for k, v in form.items()}
        if self.query.get("service") != "made, here":
            raise _Refused(400, "BAD_SERVICE")
        if not known and (self.headers.get("Authorization") or not self.ways.anonymous_pull):
            raise _Refused(401, "UNAUTHORIZED", "incorrect username or password")
        scopes = _expand(word for text in self.all.get("scope", []) for word in text.split())
        if not known:
            scopes = {scope for scope in scopes if scope.endswith(":pull")}
        token = secrets.token_urlsafe(24)
        with self.registry.lock:
            until = time.monotonic() + self.ways.token_seconds
            self.registry.tokens[token] = [scopes, until, self.ways.token_uses]
        body = {"token": token, "expires_in": max(int(self.ways.token_seconds), 1)}
        self._reply(200, json.dumps(body).encode(), Content_Type="application/json")

    # --- what is asked ---------------------------------------------------------------------------

    def _ping(self) -> None:
        self._reply(200, b"{}", Content_Type="application/json")

    def _blob(self) -> None:
        repository = self.registry.find(self.name)
        data = self.shelves.blobs.get(self.word) if self.word in repository.blobs else None
        if data is None:
            raise _Refused(404, "BLOB_UNKNOWN")
        if self.command == "DELETE":
            repository.blobs.discard(self.word)
            self._reply(202)
            return
        headers = {"Docker_Content_Digest": self.word, "Content_Type": "application/octet-stream"}
        if self.ways.redirect and self.command == "GET" and "elsewhere" not in self.query:
            place = f"http://localhost:{self.server.server_port}{self.route}?elsewhere=1"
            self._reply(307, Location=place)
            return
        if self.command == "HEAD":
            self._reply(200, Content_Length=str(len(data)), **headers)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.ways.ranges:
            start, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            if start > end:
                raise _Refused(416, "RANGE_INVALID")
            span = f"bytes {start}-{end}/{len(data)}"
            self._reply(206, data[start : end + 1], Content_Range=span, **headers)
            return
        self._reply(200, data, **headers)

    def _upload(self) -> None:
        if self.command == "POST":
            self._begin()
            return
        with self.registry.lock:
            repository, data = self.shelves.uploads.get(self.word, ("", bytearray()))
        if repository != self.name:
            raise _Refused(404, "BLOB_UPLOAD_UNKNOWN")
        if self.command == "DELETE":
            self.shelves.uploads.pop(self.word, None)
            self._reply(204)
            return
        if self.command == "GET" and not self.ways.upload_page:
            raise _Refused(404, "NOT_FOUND")
        if self.command == "PATCH":
            bounds = (self.ways.most_ranged if self.headers.get("Content-Range") else 0, self.ways.most)
            if any(0 < bound < self.left for bound in bounds):
                raise _Refused(416, "REQUESTED_RANGE_NOT_SATISFIABLE", "the request body is too large")
        if self.command in ("PATCH", "PUT"):
            self._store(data)
        if self.command == "PUT":
            self._commit(data)
            return
        self._progress(202 if self.command == "PATCH" else 204, data)

    def _begin(self) -> None:
        digest, origin = self.query.get("mount", ""), self.query.get("from", "")
        if digest and self.ways.mount and digest in self.registry.find(origin).blobs:
            self.registry.repository(self.name).blobs.add(digest)
            self._created(f"/v2/{self.name}/blobs/{digest}", digest)
            return
        self.word, data = secrets.token_hex(16), bytearray()
        self.shelves.uploads[self.word] = (self.name, data)
        if "digest" in self.query:
            self._store(data)
            self._commit(data)
            return
        self._progress(202, data)

    def _progress(self, status: int, data: bytearray) -> None:
        self._reply(
            status,
            Location=f"/v2/{self.name}/blobs/uploads/{self.word}?_state={secrets.token_hex(8)}",
            # 0-0 for no byte and for one, as distribution has it
            Range=self.ways.told_range
            if self.ways.told_range and status == 202
            else f"0-{max(len(data) - 1, 0)}",
            Docker_Upload_UUID=self.word,
        )

    def _store(self, data: bytearray) -> None:
        # distribution-spec 1.1, "Pushing blobs": what carries bytes of a blob says so.
        if self.left and self.headers.get("Content-Type") != "application/octet-stream":
            raise _Refused(400, "BLOB_UPLOAD_INVALID", "these are no bytes of a blob")
        span = re.fullmatch(r"(?:bytes )?(\d+)-(\d+)", self.headers.get("Content-Range", ""))
        if span and int(span[1]) != len(data):
            raise _Refused(416, "RANGE_INVALID", Range=f"0-{max(len(data) - 1, 0)}")
        stop = int(self.amount) if self.fault == "drop" else None
        stored = 0
        for chunk in self._body():
            if self.ways.quota is not None and self.shelves.bytes + len(chunk) > self.ways.quota:
                raise _Refused(self.ways.full_status, "UNKNOWN", "no space left on device")
            part = chunk if stop is None else chunk[: stop - stored]
            data += part
            stored += len(part)
            if stop is not None and stored >= stop:
                raise _Gone

    def _commit(self, data: bytearray) -> None:
        digest = self.query.get("digest", "")
        self.shelves.uploads.pop(self.word, None)
        if sha256(data) != digest:
            raise _Refused(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        with self.registry.lock:
            self.shelves.blobs[digest] = bytes(data)
            self.registry.repository(self.name).blobs.add(digest)
        self._created(f"/v2/{self.name}/blobs/{digest}", digest)

    def _created(self, place: str, digest: str, **headers: str) -> None:
        told = sha256(b"a lie") if self.fault == "lie" else digest
        self._reply(201, Location=place, Docker_Content_Digest=told, **headers)

    def _manifest(self) -> None:
        if self.command == "PUT":
            self._put_manifest(self.registry.repository(self.name), b"".join(self._body()))
            return
        repository = self.registry.find(self.name)
        digest = self.word if self.word.startswith("sha256:") else repository.tags.get(self.word, "")
        if digest not in repository.manifests:
            raise _Refused(404, "MANIFEST_UNKNOWN", f"unknown: {self.word}")
        if self.command == "DELETE":
            self._delete(repository, digest)
            return
        media_type, data = repository.manifests[digest]
        if media_type not in self.headers.get("Accept", ""):
            raise _Refused(404, "MANIFEST_UNKNOWN", f"not accepted: {media_type}")
        headers = {"Content_Type": media_type, "Docker_Content_Digest": digest}
        if self.command == "HEAD":
            self._reply(200, Content_Length=str(len(data)), **headers)
        else:
            self._reply(200, data, **headers)

    def _delete(self, repository: Repository, digest: str) -> None:
        if self.word in repository.tags:
            if not self.ways.untag:
                raise _Refused(405, "UNSUPPORTED")
            del repository.tags[self.word]
        else:
            del repository.manifests[digest]
            repository.tags = {tag: to for tag, to in repository.tags.items() if to != digest}
        self._reply(202)

    def _put_manifest(self, repository: Repository, data: bytes) -> None:
        media_type, digest = self.headers.get("Content-Type", ""), sha256(data)
        try:
            value = json.loads(data)
            _ = value["manifests"] if media_type == INDEX else (value["config"]["digest"], value["layers"])
        except (ValueError, KeyError, TypeError):
            raise _Refused(400, "MANIFEST_INVALID") from None
        if media_type not in MANIFEST_TYPES or value.get("mediaType", media_type) != media_type:
            raise _Refused(400, "MANIFEST_INVALID", f"media type {media_type}")
        if self.word.startswith("sha256:") and self.word != digest:
            raise _Refused(400, "DIGEST_INVALID")
        blobs = [*value.get("layers", []), *([value["config"]] if "config" in value else [])]
        missing = [row for row in blobs if row["digest"] not in repository.blobs]
        missing += [row for row in value.get("manifests", []) if row["digest"] not in repository.manifests]
        missing += [row for row in blobs if len(self.shelves.blobs.get(row["digest"], b"")) != row["size"]]
        if missing:
            raise _Refused(400, "MANIFEST_BLOB_UNKNOWN", missing[0]["digest"])
        with self.registry.lock:
            repository.manifests[digest] = (media_type, data)
            if not self.word.startswith("sha256:"):
                repository.tags[self.word] = digest
        subject = value.get("subject", {}).get("digest", "")
        headers = {"OCI_Subject": subject} if subject and self.ways.referrers else {}
        self._created(f"/v2/{self.name}/manifests/{digest}", digest, **headers)

    def _referrers(self) -> None:
        if not self.ways.referrers:
            raise _Refused(404, "NOT_FOUND")
        rows = []
        for digest, (media_type, data) in sorted(self.registry.find(self.name).manifests.items()):
            value = json.loads(data)
            if value.get("subject", {}).get("digest") != self.word:
                continue
            kind = value.get("artifactType") or value.get("config", {}).get("mediaType", "")
            row = {"mediaType": media_type, "digest": digest, "size": len(data), "artifactType": kind}
            rows.append(row | {"annotations": value.get("annotations", {})})
        body, headers = self._page(rows, INDEX)
        self._reply(200, json.dumps(body).encode(), Content_Type=INDEX, **headers)

    def _page(self, rows: list[dict[str, Any]], media_type: str) -> tuple[dict[str, Any], dict[str, str]]:
        start = int(self.query.get("last", "0"))
        end = start + self.ways.page
        headers = {"Link": f'<{self.route}?last={end}>; rel="next"'} if end < len(rows) else {}
        return {"schemaVersion": 2, "mediaType": media_type, "manifests": rows[start:end]}, headers

    def _tags(self) -> None:
        if self.name not in self.shelves.repositories:
            raise _Refused(404, "NAME_UNKNOWN")
        size = min(int(self.query.get("n", self.ways.page)), self.ways.page)
        names = sorted(
            tag for tag in self.registry.repository(self.name).tags if tag > self.query.get("last", "")
        )
        page = names[:size]
        headers = {"Content_Type": "application/json"}
        if len(names) > size:
            headers["Link"] = f'</v2/{self.name}/tags/list?n={size}&last={page[-1]}>; rel="next"'
        self._reply(200, json.dumps({"name": self.name, "tags": page}).encode(), **headers)


def _expand(scopes: Any) -> set[str]:
    """`repository:a:pull,push` as its single grants."""
    found = set()
    for scope in scopes:
        kind, _, rest = scope.partition(":")
        name, _, actions = rest.rpartition(":")
        found |= {f"{kind}:{name}:{action}" for action in actions.split(",")}
    return found
