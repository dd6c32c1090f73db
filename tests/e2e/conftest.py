"""The command line on real input. Wheels come from the machine's package index, once for the session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.services.factory import Factory, lend
from tests.services.fixtures import real_services  # noqa: F401


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Disk for gigabytes, freed before the next file of tests."""
    folder = tmp_path_factory.mktemp("e2e")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def factory(request: pytest.FixtureRequest, base_store: Path, scratch: Path) -> Iterator[Factory]:
    """A store with the base and a cache with its .debs, for one file of tests; the next finds none of it."""
    folder = scratch / request.path.stem
    yield lend(base_store, folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def small_factory(
    request: pytest.FixtureRequest, small_store: Path, tiny_root: Path, scratch: Path
) -> Iterator[Factory]:
    """The same of one small target on the small base."""
    folder = scratch / f"small-{request.path.stem}"
    yield replace(lend(small_store, folder), root=tiny_root)
    shutil.rmtree(folder)
