"""The contract of stores, over the layout on disk and several registries; and mirrors of references."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from imagefactory.http import RetryPolicy
from imagefactory.oci.credentials import Credential
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from imagefactory.oci.store import Store, parse_reference, resolve_mirror
from tests.made.errors import fails
from tests.made.registry import PASSWORD, USER, Ways, registry_made_here
from tests.made.store_contract import StoreContract

_NUMBERS = count()


@pytest.fixture
def repository() -> str:
    return f"site/r{next(_NUMBERS)}"


class TestLayoutStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LayoutStore(Layout(tmp_path / "store"))


WAYS = {
    "plain": Ways(),
    "basic, no referrers API": Ways(auth="basic", referrers=False),
    "tokens for twenty requests, pages": Ways(auth="token", token_uses=20, page=3),
    "token, no referrers API, redirects": Ways(auth="token", referrers=False, redirect=True),
}


def options(**more: object) -> RegistryOptions:
    return RegistryOptions(
        credentials=lambda host: Credential(user=USER, secret=PASSWORD, origin="the test"),
        retry_policy=RetryPolicy(first_wait=0.001, longest_wait=0.01, connect=60, read=60, commit=60),
        **more,  # type: ignore[arg-type]
    )


class TestRegistry(StoreContract):
    @pytest.fixture(scope="class", params=list(WAYS.values()), ids=list(WAYS))
    @classmethod
    def store(cls, request: pytest.FixtureRequest) -> Iterator[Store]:
        with registry_made_here(request.param) as server:
            registry = RegistryClient(server.host, options())
            yield registry
            registry.close()


class TestRegistryInPieces(StoreContract):
    """Blobs that go in many requests of a fixed size."""

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls) -> Iterator[Store]:
        with registry_made_here(Ways(auth="token")) as server:
            yield RegistryClient(server.host, options(piece=700_000))


DIGEST = "sha256:" + "ab" * 32
MIRRORS = (
    ("docker.io", "registry.example:5000/hub"),
    ("docker.io/nvidia", "gpu.example"),
    ("quay.io", "quay.example/all"),
)


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("docker.io/library/python", "registry.example:5000/hub/library/python"),
        ("docker.io/nvidia/cuda", "gpu.example/cuda"),
        ("docker.io/nvidiagpu/cuda", "registry.example:5000/hub/nvidiagpu/cuda"),
        ("quay.io/one", "quay.example/all/one"),
        ("ghcr.io/one", "ghcr.io/one"),
        ("docker.io.example/one", "docker.io.example/one"),
    ],
)
def test_the_longest_prefix_of_whole_parts_wins(name: str, fetched: str) -> None:
    reference = parse_reference(f"{name}:12@{DIGEST}")
    resolved = resolve_mirror(reference, MIRRORS)
    assert str(resolved) == f"{fetched}:12@{DIGEST}"
    assert resolve_mirror(reference, ()) == reference


def test_a_whole_name_may_be_mapped() -> None:
    reference = parse_reference(f"docker.io/library/python@{DIGEST}")
    resolved = resolve_mirror(reference, (("docker.io/library/python", "registry.example/site/python"),))
    assert str(resolved) == f"registry.example/site/python@{DIGEST}"
    with fails("mirror-invalid"):
        resolve_mirror(reference, (("docker.io/library/python", "registry.example"),))


@pytest.mark.parametrize("host", ["docker.io", "index.docker.io", "registry-1.docker.io"])
@pytest.mark.parametrize("name", ["debian", "library/debian"])
def test_docker_hub_has_one_name(host: str, name: str) -> None:
    reference = parse_reference(f"{host}/{name}:12")
    whole, official = (("docker.io", "m.example.org/hub"),), (("docker.io/library", "m.example.org/l"),)
    assert str(resolve_mirror(reference, whole)) == "m.example.org/hub/library/debian:12"
    assert str(resolve_mirror(reference, official)) == "m.example.org/l/debian:12"
