"""The contract of stores, over the layout on disk and over registries of several kinds."""

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
from imagefactory.oci.store import Store
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
        patience=RetryPolicy(first_wait=0.001, longest_wait=0.01, connect=60, read=60, commit=60),
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
