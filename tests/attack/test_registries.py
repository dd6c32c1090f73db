"""A registry that answers what it likes: the client gives what its digest says or refuses with words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from imagefactory.errors import ImagefactoryError
from imagefactory.http import RetryPolicy
from imagefactory.oci.credentials import Credential
from imagefactory.oci.graph import StoreRepository, read_graph
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_TYPE, digest_of
from imagefactory.oci.registry import session
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from tests.made.mutants import HOSTILE, changed_bytes, changed_text
from tests.made.service import Request, Service, service
from tests.made.store_contract import artifact, blob, image_manifest, source

BLOB = b"a layer" * 50
PATIENCE = RetryPolicy(attempts=2, first_wait=0.0001, longest_wait=0.001, connect=5, read=5, commit=5)
STATUS = st.sampled_from(
    (200, 200, 200, 201, 202, 204, 206, 301, 307, 400, 401, 403, 404, 416, 429, 500, 503)
)
WORDS = st.sampled_from(
    (
        *HOSTILE[:-2],
        *(
            "application/json",
            INDEX_TYPE,
            MANIFEST_TYPE,
            digest_of(BLOB),
            "bytes 0-9/10",
            "bytes 5-1/-3",
            "0",
            "-5",
        ),
        *("/v2/a/b/tags/list?last=x", '</v2/_x?n=1>; rel="next"', "/v2/a/blobs/uploads/1?_state=x", "//h/x"),
        *(
            'Bearer realm="/token",service="s",scope="x"',
            'Basic realm="x"',
            "Bearer",
            'Bearer realm="file:///etc"',
        ),
        # To a service beside the registry, which is none of its own: INTERNAL and OWN become their addresses.
        *("http://INTERNAL/x", "https://INTERNAL/x", "//INTERNAL/x", "http://INTERNAL", "ftp://INTERNAL/x"),
        *(
            "http://INTERNAL\\@OWN/x",
            "http://OWN@INTERNAL/x",
            "http://INTERNAL#@OWN/",
            "http://OWN:x@INTERNAL/",
        ),
        *(
            '<http://INTERNAL/x>; rel="next"',
            "<//INTERNAL/x>; rel=next",
            '<http://INTERNAL\\@OWN/>; rel="next"',
        ),
        'Bearer realm="http://INTERNAL/token",service="s"',
        'Bearer realm="http://OWN\\@INTERNAL/token",service="s"',
    )
).map(
    lambda word: word.encode("ascii", "ignore").decode().replace("\n", "").replace("\r", "").replace("\0", "")
)
HEADERS = (
    "Content-Type",
    "Docker-Content-Digest",
    "Link",
    "Location",
    "Range",
    "Retry-After",
    "WWW-Authenticate",
)


@dataclass(slots=True)
class Answers:
    """Given in turn, over and over: (status, headers, body, what Content-Length says)."""

    rows: list[tuple[int, dict[str, str], bytes, int]]
    asked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> tuple[int, dict[str, str], bytes, int]:
        with self.lock:
            self.asked += 1
            return self.rows[(self.asked - 1) % len(self.rows)]


class Handler(BaseHTTPRequestHandler):
    answers: Answers
    internal: str

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self) -> None:
        with suppress(OSError, ValueError):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, body, length = self.answers.next()
            self.send_response(status)
            for name, value in headers.items():
                own = f"127.0.0.1:{self.connection.getsockname()[1]}"
                self.send_header(name, value.replace("INTERNAL", self.internal).replace("OWN", own))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = answer


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def answering(answers: Answers, internal: str = "127.0.0.1:1") -> Iterator[RegistryClient]:
    given = {"answers": answers, "internal": internal}
    server = Server(("127.0.0.1", 0), type("Answering", (Handler,), given))
    threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()
    try:
        known = Credential(user="me", secret="secret", origin="the attack")
        options = RegistryOptions(credentials=lambda _: known, retry_policy=PATIENCE)
        yield RegistryClient(f"127.0.0.1:{server.server_port}", options)
    finally:
        server.shutdown()
        server.server_close()


def true_bodies() -> list[bytes]:
    """What an honest registry would say: manifests, lists, a token."""
    with TemporaryDirectory() as folder:
        store = LayoutStore(Layout(Path(folder, "store")))
        manifest = image_manifest(store, "a", BLOB)
        row = store.put_manifest("a", manifest, MANIFEST_TYPE, "1")
        note = artifact(store, "a", row, "application/vnd.note", "note")
    listed = {"mediaType": MANIFEST_TYPE, "digest": digest_of(note), "size": len(note), "artifactType": "x"}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [listed]}
    texts = (
        index,
        {"name": "a", "tags": ["1", "2"]},
        {"token": "t", "expires_in": 300},
        {"errors": [{"code": "X"}]},
    )
    return [manifest, note, BLOB, b"", *(json.dumps(text).encode() for text in texts)]


BODIES = true_bodies()


@pytest.fixture(autouse=True, scope="module")
def short_lists() -> Iterator[None]:
    """A list without end is read to its limit, which takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "LIMITS", replace(session.LIMITS, pages=20))
        yield


@st.composite
def answers(draw: st.DrawFn) -> Answers:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        body = draw(st.sampled_from(BODIES))
        match draw(st.integers(0, 2)):
            case 1:
                body = draw(changed_bytes(body))
            case 2:
                body = draw(changed_text(body.decode("utf-8", "replace"))).encode("utf-8", "replace")
        headers = draw(st.dictionaries(st.sampled_from(HEADERS), WORDS, max_size=3))
        length = draw(st.sampled_from((len(body), len(body), len(body), 0, len(body) + 1, 10**13)))
        rows.append((draw(STATUS), headers, body, length))
    return Answers(rows)


@given(answers(), st.sampled_from(("manifest", "graph", "blob", "tags", "referrers", "put", "write")))
def test_any_answer_is_taken_for_what_it_is_or_refused(given: Answers, asked: str) -> None:
    with (
        service(lambda _: (200, {}, b'{"token": "t"}')) as internal,
        answering(given, internal.address) as registry,
        suppress(ImagefactoryError),
    ):
        match asked:
            case "manifest":
                found = registry.manifest("a", digest_of(BODIES[0]))
                assert found is None or digest_of(found[1]) == digest_of(BODIES[0])
            case "graph":
                for manifest in read_graph(
                    StoreRepository(store=registry, repository="a"), "1", referrers=True
                ).manifests:
                    assert digest_of(manifest.data) == manifest.descriptor.digest
            case "blob":
                data = b"".join(registry.read("a", blob(BLOB)))
                assert data == BLOB
            case "tags":
                assert all(isinstance(tag, str) for tag in registry.tags("a"))
            case "referrers":
                registry.referrers("a", digest_of(BODIES[0]))
            case "put":
                registry.put_manifest("a", BODIES[0], MANIFEST_TYPE, "1")
            case "write":
                registry.write("a", blob(BLOB), source(BLOB))
    assert given.asked < 3000
    assert_only_read(internal, login=True)


def assert_only_read(internal: Service, *, login: bool) -> None:
    """A service beside a registry on this machine is asked what a registry there may send to, and no more."""
    for request in internal.log:
        assert request.method in ("GET", "HEAD")
        assert request.body == b""
        # The login goes where a token is fetched, after a word about it; a token goes nowhere.
        given = request.headers.get("Authorization", "")
        assert given == "" or (login and given.startswith("Basic"))


PLACES = st.builds(
    "{}{}{}".format,
    st.sampled_from(
        ("http://", "http://", "http://", "https://", "HTTP://", "//", "ftp://", "http:/", "\\\\")
    ),
    st.sampled_from(
        (
            *(
                "{internal}",
                "{internal}\\@{own}",
                "{internal}\\\\@{own}",
                "{internal}/@{own}",
                "{internal}#@{own}",
            ),
            *("{own}@{internal}", "{own}\\@{internal}", "{own}:80@{internal}", "u:p@{internal}", "{own}"),
            *("{internal}?@{own}", "{internal}%2f@{own}", "{internal}%5c@{own}", "[::ffff:127.0.0.1]:{port}"),
            *("localhost:{port}", "2130706433:{port}", "127.1:{port}", "0:{port}", "0.0.0.0:{port}"),
        )
    ),
    st.sampled_from(("/x", "/token", "", "?x=y", "/v2/a/blobs/uploads/1")),
)
STEP = {
    "HEAD": st.sampled_from((404, 404, 200, 307, 401)),
    "GET": st.sampled_from((200, 200, 307, 302, 401, 404)),
    "POST": st.sampled_from((202, 202, 201, 307, 308, 401)),
    "PATCH": st.sampled_from((202, 202, 307, 308, 401, 500)),
    "PUT": st.sampled_from((201, 201, 307, 308, 401, 500)),
    "DELETE": st.sampled_from((202, 307, 401)),
}


HONEST = {"HEAD": 404, "GET": 200, "POST": 202, "PATCH": 202, "PUT": 201, "DELETE": 202}


@given(
    st.fixed_dictionaries(STEP),
    PLACES,
    st.booleans(),
    st.sampled_from(("write", "large", "mount", "put", "tags", "blob", "referrers", "delete")),
)
@example(HONEST, "http://{internal}/x", False, "write")
@example(HONEST, "http://{internal}/x", False, "large")
@example(HONEST, "http://{internal}/x", False, "mount")
@example(HONEST, "http://{internal}\\@{own}/x", False, "write")  # which once got the password
def test_no_service_is_written_to_for_a_registry(
    steps: dict[str, int], place: str, login: bool, asked: str
) -> None:
    """An almost honest one: every place that it names is the same trick."""
    with service(lambda _: (200, {}, b'{"token": "t"}')) as internal:

        def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
            port = internal.address.partition(":")[2]
            where = place.format(internal=internal.address, own=request.headers["Host"], port=port)
            headers = {"Location": where, "Link": f'<{where}>; rel="next"'}
            headers["WWW-Authenticate"] = f'Bearer realm="{where}",service="s"' if login else "Basic realm=x"
            if not login and "Authorization" not in request.headers:
                return 401, headers, b""
            return steps[request.method], headers, b'{"tags": [], "manifests": []}'

        with service(answer) as served, suppress(ImagefactoryError):
            known = Credential(user="me", secret="secret", origin="the attack")
            registry = RegistryClient(
                served.address, RegistryOptions(credentials=lambda _: known, retry_policy=PATIENCE)
            )
            data = BLOB if asked != "large" else bytes(2 << 20)
            match asked:
                case "write" | "large":
                    registry.write("a", blob(data), source(data))
                case "mount":
                    registry.mount("a", blob(data), "b")
                case "put":
                    registry.put_manifest("a", BODIES[0], MANIFEST_TYPE, "1")
                case "tags":
                    registry.tags("a")
                case "blob":
                    list(registry.read("a", blob(data)))
                case "referrers":
                    registry.referrers("a", digest_of(data))
                case "delete":
                    registry.delete_manifest("a", digest_of(data))
    assert_only_read(internal, login=login)
