"""Real engines and registries for the tests: each made on this machine, alone, and gone at the end.

Every service is a context manager over a folder of its own. It listens on 127.0.0.1 or on a socket in a
private folder, never touches another daemon of the machine, and ends with the process that started it, also
when that one is killed (`keeper.py`). `install` sets up what they need; `./setup.sh --tests` runs it.
"""

from __future__ import annotations

from tests.services.apptainer import apptainer_command
from tests.services.docker import DockerDaemon, docker_daemon
from tests.services.podman import PodmanService, podman_service
from tests.services.processes import ServiceError
from tests.services.registry import RegistryOptions, RegistryServer, registry_server

__all__ = [
    "DockerDaemon",
    "PodmanService",
    "RegistryOptions",
    "RegistryServer",
    "ServiceError",
    "apptainer_command",
    "docker_daemon",
    "podman_service",
    "registry_server",
]
