"""Real engines and registries, each started once for the session where a test asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.services.channels import real_channels  # noqa: F401
from tests.services.environments import Environment, make_environment
from tests.services.fixtures import (  # noqa: F401
    apptainer,
    dockerd,
    nothing_big_stays,
    podman,
    podman_session,
    pool,
    pool_at_rest,
    registry,
    services_environment,
    services_folder,
)


@pytest.fixture(scope="session")
def environment_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """A framework's environment, made when it is first asked for."""
    return cache(lambda framework: make_environment(framework, tmp_path_factory.mktemp("framework")))
