"""The contract of stores against Debian's docker-registry, and what only a real one shows.

It has no referrers API and removes no tag by name; it drops an upload that broke inside a request.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pytest

from imagefactory.errors import EXIT_REGISTRY, RegistryError
from imagefactory.http import RetryPolicy
from imagefactory.oci.credentials import Credential, anonymous
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_TYPE, digest_of
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from imagefactory.oci.store import Store
from tests.made.errors import fails
from tests.made.store_contract import (
    StoreContract,
    blob,
    image_index,
    image_manifest,
    noise,
    put_blob,
    source,
)
from tests.services.registry import RegistryOptions as ServerOptions
from tests.services.registry import RegistryServer, registry_server

USERS = {"builder": "open-sesame-4711"}
# docker-registry rewrites its files in place: who reads at that moment gets a 500, also several in a row.
QUICK = RetryPolicy(attempts=8, first_wait=0.01, longest_wait=0.3)
_NUMBERS = count()


def client(host: str, *, known: bool = True, piece: int = 0) -> RegistryClient:
    credential = Credential(user="builder", secret=USERS["builder"], origin="the test")
    credentials = (lambda host: credential) if known else anonymous
    return RegistryClient(host, RegistryOptions(credentials=credentials, retry_policy=QUICK, piece=piece))


class Breaking:
    """Relays to a registry and resets the n-th request that carries a blob after `breaks[n]` of its bytes."""

    def __init__(self, upstream: str, breaks: list[int]) -> None:
        host, _, port = upstream.rpartition(":")
        self.upstream, self.breaks, self.broke = (host, int(port)), list(breaks), 0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.server.getsockname()[1]}"

    def __enter__(self) -> Breaking:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # wakes accept() where close() alone does not
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        registry = socket.create_connection(self.upstream)
        threading.Thread(target=_pump, args=(registry, client), daemon=True).start()
        file = client.makefile("rb")
        with suppress(OSError):
            while head := _head(file):
                registry.sendall(head)
                length = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
                left = int(length[1]) if length else 0
                blob = head.startswith((b"PATCH", b"PUT")) and b"/blobs/uploads/" in head.split(b"\r\n")[0]
                stop = self.breaks.pop(0) if blob and left and self.breaks else None
                if stop is not None and stop < left:
                    registry.sendall(file.read(stop))
                    self.broke += 1
                    break
                while left:
                    data = file.read(min(left, 65536))
                    if not data:
                        raise ConnectionResetError  # or this would go round for ever
                    registry.sendall(data)
                    left -= len(data)
        for end in (registry, client):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)
        file.close()
        client.close()
        registry.close()


def _head(file: BinaryIO) -> bytes:
    lines = [file.readline()]
    while lines[-1] not in (b"", b"\r\n"):
        lines.append(file.readline())
    return b"".join(lines)


def _pump(origin: socket.socket, to: socket.socket) -> None:
    with suppress(OSError):
        while data := origin.recv(65536):
            to.sendall(data)


@pytest.fixture
def repository() -> str:
    return f"site/r{next(_NUMBERS)}"


WAYS = {
    "open": ServerOptions(),
    "htpasswd": ServerOptions(users=USERS),
    "tokens": ServerOptions(users=USERS, tokens=True),
}


class TestRealRegistry(StoreContract):
    removes_tags = False

    @pytest.fixture(scope="class", params=list(WAYS.values()), ids=list(WAYS))
    @classmethod
    def store(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Store]:
        with registry_server(tmp_path_factory.mktemp("registry"), request.param) as server:
            yield client(server.host)


class TestRealRegistryInPieces(StoreContract):
    removes_tags = False

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
        with registry_server(tmp_path_factory.mktemp("registry")) as server:
            yield client(server.host, piece=700_000)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with registry_server(tmp_path_factory.mktemp("guarded"), WAYS["tokens"]) as server:
        yield server


def test_who_is_not_known_may_not_push_and_is_told_how(guarded: RegistryServer, repository: str) -> None:
    stranger = client(guarded.host, known=False)
    with pytest.raises(RegistryError) as caught:
        stranger.write(repository, blob(b"x"), source(b"x"))
    assert caught.value.exit_code == EXIT_REGISTRY
    assert caught.value.hint == f"log in: docker login {guarded.host}"
    assert guarded.host in caught.value.message
    assert repository in caught.value.message


def test_asking_who_may_push_leaves_nothing(guarded: RegistryServer, repository: str) -> None:
    with pytest.raises(RegistryError):
        client(guarded.host, known=False).check_push(repository)
    client(guarded.host).check_push(repository)
    assert not [path for path in guarded.storage.rglob("*") if repository in str(path)]


def test_a_wrong_password_is_told_without_it(guarded: RegistryServer, repository: str) -> None:
    wrong = Credential(user="builder", secret="hunter2-hunter2", origin="a file")
    registry = RegistryClient(
        guarded.host, RegistryOptions(credentials=lambda host: wrong, retry_policy=QUICK)
    )
    with fails("registry-access-denied", hint="a file") as caught:
        registry.write(repository, blob(b"x"), source(b"x"))
    assert "hunter2" not in f"{caught.value!r} {caught.value.hint}"


def test_tokens_that_ran_out_are_fetched_again(guarded: RegistryServer, repository: str) -> None:
    """The clock of the client stands still, so it learns from the registry alone that a token is old."""
    assert guarded.tokens is not None
    registry = RegistryClient(
        guarded.host,
        RegistryOptions(
            credentials=lambda host: Credential(user="builder", secret=USERS["builder"]),
            retry_policy=QUICK,
            clock=lambda: 0.0,
        ),
    )
    before, guarded.tokens.seconds = guarded.tokens.seconds, -300
    try:
        with fails("registry-access-denied", "401"):
            registry.has(repository, blob(b"x"))
        given = len(guarded.tokens.given)
        assert given >= 2
    finally:
        guarded.tokens.seconds = before
    assert put_blob(registry, repository, noise(2_000_000)).size == 2_000_000
    assert len(guarded.tokens.given) > given


@pytest.fixture(scope="module")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with registry_server(tmp_path_factory.mktemp("open")) as server:
        yield server


@pytest.mark.parametrize("piece", [0, 300_000])
@pytest.mark.parametrize("at", [0, 1, 2, 299_999, 300_000, 300_001, 999_999, 2_999_999])
def test_an_upload_that_breaks_anywhere_ends_right(
    open_registry: RegistryServer, repository: str, at: int, piece: int
) -> None:
    """The connection is reset after `at` bytes of the body; the rest is sent, or all of it again."""
    data = noise(3_000_000, seed=at + piece)
    with Breaking(open_registry.host, [at, at]) as middle:
        registry = client(middle.host, piece=piece)
        sent = registry.write(repository, blob(data), source(data))
    assert sent >= len(data)
    assert middle.broke == (2 if at < (piece or len(data)) else 0)
    assert b"".join(client(open_registry.host).read(repository, blob(data))) == data


def test_an_origin_that_breaks_leaves_nothing_to_see(open_registry: RegistryServer, repository: str) -> None:
    data = noise(2_000_000)
    with fails("origin-gone"):
        client(open_registry.host).write(
            repository, blob(data), lambda offset: iter(_breaks(data[offset:1_500_000]))
        )
    assert not client(open_registry.host).has(repository, blob(data))


def _breaks(data: bytes) -> Iterator[bytes]:
    yield data
    raise RegistryError("origin-gone", "the origin went away")


def test_a_full_registry_is_an_error_and_shows_nothing(tmp_path: Path) -> None:
    """Its disk is 4 MB: a small image fits, a larger one does not, and the small one stays whole."""
    with registry_server(tmp_path, ServerOptions(size=4 << 20)) as server:
        registry = client(server.host)
        small = image_manifest(registry, "site/full", b"small")
        registry.put_manifest("site/full", small, MANIFEST_TYPE, "small")
        data = noise(6_000_000)
        with pytest.raises(RegistryError) as caught:
            registry.write("site/full", blob(data), source(data))
        assert caught.value.exit_code == EXIT_REGISTRY
        assert caught.value.code == "registry-unavailable"
        assert "full" in caught.value.hint
        assert not registry.has("site/full", blob(data))
        assert registry.tags("site/full") == ("small",)
        found = registry.manifest("site/full", "small")
        assert found is not None
        assert found[1] == small


def test_two_writers_at_one_tag_leave_one_whole_image(open_registry: RegistryServer, repository: str) -> None:
    writers = [client(open_registry.host) for _ in range(2)]

    def push(number: int) -> tuple[str, str]:
        registry = writers[number % 2]
        manifest = image_manifest(registry, repository, noise(1000, seed=number))
        row = registry.put_manifest(repository, manifest, MANIFEST_TYPE)
        index = image_index(row)
        return digest_of(index), registry.put_manifest(repository, index, INDEX_TYPE, "shared").digest

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(push, range(20)))
    ours = {digest for digest, _ in results}
    assert {told for _, told in results} <= ours  # what the tag was said to name is always a whole image
    found = writers[0].manifest(repository, "shared")
    assert found is not None
    assert found[0].digest in ours


def test_a_manifest_is_deleted_with_its_tags(open_registry: RegistryServer, repository: str) -> None:
    registry = client(open_registry.host)
    data = image_manifest(registry, repository, b"one")
    row = registry.put_manifest(repository, data, MANIFEST_TYPE, "1.0")
    registry.delete_manifest(repository, row.digest)
    registry.delete_manifest(repository, row.digest)
    assert registry.manifest(repository, row.digest) is None
    assert registry.tags(repository) == ()


def test_deletion_that_is_switched_off_is_said(tmp_path: Path) -> None:
    with registry_server(tmp_path, ServerOptions(deletes=False)) as server:
        registry = client(server.host)
        data = image_manifest(registry, "site/a", b"one")
        row = registry.put_manifest("site/a", data, MANIFEST_TYPE, "1.0")
        with fails("registry-delete-unsupported", hint="REGISTRY_STORAGE_DELETE_ENABLED"):
            registry.delete_manifest("site/a", row.digest)
