"""What an upload asks of a registry that tests of whole pushes do not see."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import requests

from imagefactory.http import RetryPolicy
from imagefactory.oci.manifests import Descriptor, digest_of
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from tests.made.errors import fails
from tests.made.registry import Asked, Ways, registry_made_here


@pytest.mark.parametrize("piece", [0, 3])
def test_a_registry_may_take_long_where_it_hashes_a_blob(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end or carry an upload wait longer than those that ask for a word."""
    waits: set[tuple[str, float]] = set()
    request = requests.Session.request

    def noting(self: requests.Session, method: str, url: str, **more: object) -> requests.Response:
        waits.add((method, more["timeout"][1]))  # type: ignore[index]
        return request(self, method, url, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(requests.Session, "request", noting)
    data = b"a blob"
    blob = Descriptor(media_type="application/octet-stream", digest=digest_of(data), size=len(data))
    with registry_made_here() as server:
        options = RegistryOptions(retry_policy=RetryPolicy(read=7.0, commit=77.0), piece=piece)
        RegistryClient(server.host, options).write("a/b", blob, lambda start: iter([data[start:]]))
    assert waits - {("HEAD", 7.0), ("PATCH", 77.0)} == {("POST", 7.0), ("PUT", 77.0)}
    assert (("PATCH", 77.0) in waits) == bool(piece)


QUICK = RetryPolicy(first_wait=0.0005, longest_wait=0.01, connect=60, read=60, commit=60)
DATA = random.Random(6).randbytes(9 << 20)
BLOB = Descriptor(media_type="application/octet-stream", digest=digest_of(DATA), size=len(DATA))


def source(start: int) -> Iterator[bytes]:
    return iter([DATA[start:]])


def break_once(after: int):  # type: ignore[no-untyped-def]
    """The connection breaks in the first PATCH, when so many bytes arrived."""
    broken: list[bool] = []

    def fault(asked: Asked) -> str | None:
        if asked.method != "PATCH" or broken:
            return None
        broken.append(True)
        return f"drop:{after}"

    return fault


@pytest.mark.parametrize(
    ("ways", "after", "most"),
    [
        (Ways(most_ranged=4 << 20), 3 << 20, 9 << 20),  # GHCR: what remains goes in pieces
        (Ways(most_ranged=4 << 20), 0, 18 << 20),
        (Ways(most=4 << 20), -1, 9 << 20),
        (Ways(told_range="0-0", upload_page=False), -1, 9 << 20),  # ECR: its Range does not count
        (Ways(told_range="0-2097151", upload_page=False), -1, 9 << 20),
        (Ways(told_range="0-0"), -1, 9 << 20),
        (Ways(told_range="0-0", upload_page=False), 3 << 20, 12 << 20),
    ],
)
def test_registries_that_count_otherwise_get_the_blob(ways: Ways, after: int, most: int) -> None:
    with registry_made_here(ways, fault=break_once(after) if after >= 0 else None) as server:
        RegistryClient(server.host, RegistryOptions(retry_policy=QUICK)).write("a/b", BLOB, source)
        assert server.shelves.blobs == {BLOB.digest: DATA}
        assert server.bytes_in <= most + (1 << 20)
        ranged = [asked for asked in server.log if "content-range" in asked.headers]
        assert all(int(asked.headers["content-length"]) <= 9 << 20 for asked in ranged)


@pytest.mark.parametrize("page", [True, False])
def test_a_range_may_be_of_the_last_piece_alone(page: bool) -> None:
    """As Zot and Aliyun count (regclient 961 and 627)."""
    with registry_made_here(Ways(told_range="0-4194303", upload_page=page)) as server:
        options = RegistryOptions(retry_policy=QUICK, piece=4 << 20)
        assert RegistryClient(server.host, options).write("a/b", BLOB, source) == len(DATA)
        assert server.shelves.blobs == {BLOB.digest: DATA}


def test_a_registry_that_loses_what_it_takes_is_no_endless_push() -> None:
    with registry_made_here(Ways(most=1)) as server:
        with fails("registry-unavailable", "416"):
            RegistryClient(server.host, RegistryOptions(retry_policy=QUICK)).write("a/b", BLOB, source)
        assert server.count["PATCH upload"] <= 2 * QUICK.attempts


def test_a_registry_that_asks_to_wait_a_day_is_not_waited_for() -> None:
    slept: list[float] = []
    with registry_made_here(fault=lambda asked: "429:86400" if asked.method == "PATCH" else None) as server:
        options = RegistryOptions(retry_policy=QUICK, sleep=slept.append)
        with fails("registry-request-failed", "24 hours"):
            RegistryClient(server.host, options).write("a/b", BLOB, source)
    assert slept == []


def test_an_upload_that_is_lost_to_a_limit_begins_anew_after_the_wait() -> None:
    slept: list[float] = []
    asked_to_wait = iter(["429:3"])

    def fault(asked: Asked) -> str | None:
        return next(asked_to_wait, None) if asked.method == "PATCH" else None

    with registry_made_here(Ways(upload_page=False), fault=fault) as server:
        options = RegistryOptions(retry_policy=RetryPolicy(first_wait=0.01), sleep=slept.append)
        RegistryClient(server.host, options).write("a/b", BLOB, source)
        assert server.shelves.blobs == {BLOB.digest: DATA}
        assert server.count["POST upload"] == 2
    assert slept == [3.0]
