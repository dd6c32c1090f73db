"""The fixtures of tests/engines and tests/e2e: tests/conftest.py imports them, so both share services.

`services_environment` is the only one that changes this process: PATH leads to the engines, and docker,
podman and apptainer find settings of the tests instead of a person's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.made.gpu_suite import Ground, Run, copy_suite
from tests.services.apptainer import apptainer_command, apptainer_environ
from tests.services.condor import CondorPool, condor_pool
from tests.services.docker import DockerDaemon, docker_daemon, need_buildx, write_config
from tests.services.libcuda import build_libcuda
from tests.services.podman import PodmanService, podman_service
from tests.services.processes import search_path
from tests.services.registry import registry_server
from tests.services.slurm import slurm_cluster

Service = TypeVar("Service")

DOCKER = pytest.StashKey[DockerDaemon | None]()
PODMAN = pytest.StashKey[PodmanService | None]()
POOL = pytest.StashKey[CondorPool | None]()


@contextmanager
def known(stash: pytest.Stash, key: pytest.StashKey[Service | None], service: Service) -> Iterator[None]:
    """For the fixtures of each file below."""
    stash[key] = service
    yield
    stash[key] = None


@pytest.fixture(scope="module")
def nothing_big_stays(request: pytest.FixtureRequest, services_folder: Path) -> Iterator[None]:
    """Images of several GB are freed before the next file of tests, in those services that run."""
    yield
    command: tuple[str, ...]
    if daemon := request.config.stash.get(DOCKER, None):
        command = (daemon.command, "--host", daemon.host)
        subprocess.run([*command, "system", "prune", "--all", "--force", "--volumes"], capture_output=True)
        subprocess.run([*command, "buildx", "prune", "--all", "--force"], capture_output=True)
    if service := request.config.stash.get(PODMAN, None):
        command = (*service.command, "system", "prune", "--all", "--force", "--volumes")
        subprocess.run(command, env={**os.environ, **service.environ}, capture_output=True)
    for folder in (services_folder / "apptainer").glob("*dir"):
        shutil.rmtree(folder, ignore_errors=True)  # what a killed apptainer still holds goes with the session
        folder.mkdir(exist_ok=True)


@pytest.fixture(scope="module")
def pool_at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each file of tests finds all machines of the pool free."""
    yield
    if found := request.config.stash.get(POOL, None):
        found.come_to_rest()


@pytest.fixture(scope="module", autouse=True)
def real_services(services_environment: None, nothing_big_stays: None, pool_at_rest: None) -> None:
    """What every file has that may use services: imported by the conftest.py of such."""


@pytest.fixture(scope="session")
def services_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Logs and data of the session's services."""
    folder = tmp_path_factory.mktemp("services")
    yield folder
    shutil.rmtree(folder / "apptainer", ignore_errors=True)


@pytest.fixture(scope="session")
def services_environment(services_folder: Path) -> Iterator[None]:
    """This process's environment, and so of all it starts."""
    mine = {
        "PATH": search_path(),
        "DOCKER_CONFIG": str(write_config(services_folder / "docker-config")),
        **apptainer_environ(services_folder / "apptainer"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_DEFAULT_PLATFORM", "REGISTRY_AUTH_FILE"):
            patch.delenv(name, raising=False)
        for name, value in mine.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def registry(services_folder: Path) -> Iterator[str]:
    """`127.0.0.1:port` of a registry that anybody may write to and delete from."""
    with registry_server(services_folder / "registry") as server:
        yield server.host


@pytest.fixture(scope="session")
def dockerd(
    request: pytest.FixtureRequest, services_folder: Path, services_environment: None
) -> Iterator[str]:
    """DOCKER_HOST of a dockerd with buildx."""
    with docker_daemon(services_folder / "docker") as daemon:
        need_buildx(daemon.command, Path(os.environ["DOCKER_CONFIG"]))
        with known(request.config.stash, DOCKER, daemon):
            yield daemon.host


@pytest.fixture(scope="session")
def podman_session(request: pytest.FixtureRequest, services_folder: Path) -> Iterator[PodmanService]:
    folder = services_folder / "podman"
    with podman_service(folder) as service, known(request.config.stash, PODMAN, service):
        yield service


@pytest.fixture(scope="session")
def podman(podman_session: PodmanService) -> str:
    """The address of podman's socket."""
    return podman_session.url


@pytest.fixture(scope="session")
def apptainer(services_environment: None) -> str:
    """The path of the apptainer command."""
    return apptainer_command()


@pytest.fixture(scope="session")
def pool(
    request: pytest.FixtureRequest, services_folder: Path, services_environment: None
) -> Iterator[CondorPool]:
    """HTCondor with simulated GPUs, and the light install on its access point."""
    folder = services_folder / "condor"
    with condor_pool(folder) as made, known(request.config.stash, POOL, made):
        yield made


@pytest.fixture(scope="session")
def cluster(pool: CondorPool) -> Iterator[CondorPool]:
    """Slurm in the root of that pool, on whose access point its commands find it by `slurm.environ`."""
    with slurm_cluster(pool):
        yield pool


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that stands where a driver's would."""
    return build_libcuda(tmp_path_factory.mktemp("libcuda")).parent


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture
def run(stand_in: Path, suite: Path, tmp_path: Path) -> Run:
    return Ground(suite=suite, library=stand_in, folder=tmp_path / "run").run
