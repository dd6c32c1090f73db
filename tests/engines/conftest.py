"""Real engines and registries, each started once for the session where a test asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engines.docker_target import make_base_tar
from tests.services.channels import real_channels  # noqa: F401
from tests.services.environments import Environment, find_environment, make_environment
from tests.services.fixtures import real_services  # noqa: F401
from tests.services.gpu_factory import factory  # noqa: F401
from tests.services.once import once
from tests.services.sandbox import caller, ground, layers  # noqa: F401


@pytest.fixture(scope="session")
def environment_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """A framework's environment, made when it is first asked for."""

    def environment(framework: str) -> Environment:
        return find_environment(once(tmp_path_factory, framework, partial(make_environment, framework)))

    return environment


@pytest.fixture(scope="session")
def debian_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian with Python, as `make_base_tar` makes it."""
    return once(tmp_path_factory, "debian", make_base_tar) / "base.tar"
