"""Docker's daemon through its SDK, whose errors are translated here.

A successful load is checked. A stored image is identified by its diff ids, because daemons name it by the
digest of its config or, with containerd's image store, by another digest.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

from imagefactory.errors import ImagefactoryError, ToolError, extra_hint
from imagefactory.oci.archive import stream_docker
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image
from imagefactory.progress import Progress

if TYPE_CHECKING:
    import docker

SAVE_CHUNK = 2 << 20
ANSWER = 30
"""Seconds for a daemon to report its version."""
DAEMON_TIMEOUT = 3600
"""Seconds without a byte from the daemon. It packs a complete image before it sends the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """The version of dockerd (`26.1.5`) or podman."""

    version: str
    podman: bool


class DockerDaemon:
    """The daemon in `environ` (DOCKER_HOST, DOCKER_CONTEXT, else docker's current context).

    Connects at the first call. Every method raises ToolError if the daemon does not answer.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    @property
    def place(self) -> str:
        """The daemon's address or context, for messages."""
        named = self.environ.get("DOCKER_HOST")
        context = self.environ.get("DOCKER_CONTEXT")
        return named or (f"context {context}" if context else "the default socket")

    @cached_property
    def client(self) -> docker.DockerClient:
        with self.speaking():
            import docker

            return docker.from_env(environment=self.environ, timeout=DAEMON_TIMEOUT)

    def facts(self) -> DaemonFacts:
        with self.speaking():
            import docker

            # The first request: a daemon that hangs must not block it for DAEMON_TIMEOUT.
            with closing(docker.from_env(environment=self.environ, timeout=ANSWER)) as client:
                answer = client.version()
        components = {str(part.get("Name")): part for part in answer.get("Components") or ()}
        podman = components.get("Podman Engine")
        version = (podman or answer).get("Version")
        return DaemonFacts(version=str(version), podman=podman is not None)

    def info(self) -> dict[str, Any]:
        """Return the daemon's facts, as `docker info`."""
        with self.speaking():
            answer: dict[str, Any] = self.client.info()
            return answer

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Turn errors of the SDK and its HTTP into a ToolError with a fix."""
        try:
            import docker
            import requests
            import urllib3
        except ImportError as error:
            raise ToolError(
                "extra-not-installed", "the Python package docker is not installed", hint=extra_hint("docker")
            ) from error
        try:
            yield
        except (
            docker.errors.DockerException,
            docker.errors.StreamParseError,
            requests.exceptions.RequestException,
            urllib3.exceptions.HTTPError,
        ) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> ImagefactoryError:
        refused = next((e for e in _causes(error) if isinstance(e, OSError) and e.errno), None)
        if isinstance(refused, PermissionError):
            return ToolError(
                "docker-permission-denied",
                f"no permission to use docker at {self.place}",
                hint="sudo usermod -aG docker $USER, then log in again",
            )
        if isinstance(refused, FileNotFoundError | ConnectionRefusedError):
            return ToolError(
                "docker-not-running",
                f"no docker daemon answers at {self.place}",
                hint="sudo systemctl start docker; or set DOCKER_HOST to the address of your daemon",
            )
        text = str(getattr(error, "explanation", None) or error).strip()
        return ToolError(
            "docker-failed",
            f"docker at {self.place}: {text}",
            hint="read the log of docker: journalctl -u docker",
        )

    def find(self, image: Image, name: str) -> str:
        """Return the daemon's id of `image`, by its config or as `name`; empty without the image."""
        for key in (image.config, name):
            answer = self.inspect(key)
            if answer and answer["RootFS"].get("Layers") == [layer.diff_id for layer in image.layers]:
                return str(answer["Id"])
        return ""

    def inspect(self, name: str) -> dict[str, Any] | None:
        """Return the daemon's record of an image, or None."""
        with self.speaking():
            import docker

            try:
                answer: dict[str, Any] = self.client.api.inspect_image(name)
            except docker.errors.ImageNotFound:
                return None
            return answer

    def ensure(self, layout: Layout, image: Image, name: str, progress: Progress) -> str:
        """Return the daemon's id of `image`, loaded as `name` if missing.

        Raises StoreError for a corrupt layer, ToolError if the daemon does not accept the image.
        """
        if known := self.find(image, name):
            return known
        with progress.task(f"load {image.name} into docker", total=image.size) as task, self.speaking():

            def counted() -> Iterator[bytes]:
                for chunk in stream_docker(layout, image, name):
                    yield chunk
                    task.advance(len(chunk))

            for line in self.client.api.load_image(counted(), quiet=True):
                if "error" in line or "errorDetail" in line:
                    text = line.get("error") or line["errorDetail"].get("message")
                    raise _load_failed(f"docker did not load {image.name}: {text}")
        if known := self.find(image, name):
            return known
        raise _load_failed(f"docker loaded {image.name}, but it is not complete there")

    def tag(self, name: str, as_name: str) -> None:
        repository, _, tag = as_name.rpartition(":")
        with self.speaking():
            self.client.api.tag(name, repository, tag)

    def untag(self, name: str) -> None:
        """Remove a name, if there is one."""
        with self.speaking():
            import docker

            with suppress(docker.errors.NotFound):
                self.client.api.remove_image(name, noprune=True)

    @contextmanager
    def saved(self, name: str) -> Iterator[IO[bytes]]:
        """Open the archive of `docker save` as a stream."""

        def chunks() -> Iterator[bytes]:
            with (
                self.speaking()
            ):  # here, or a broken connection would look like a fault of the reader's files
                yield from self.client.api.get_image(name, SAVE_CHUNK)

        yield io.BufferedReader(_ImageStream(chunks()), SAVE_CHUNK)


def run_name(image: Image) -> str:
    """Return the name of an image of the store in a daemon."""
    return f"imagefactory/run:{image.config.removeprefix('sha256:')[:12]}"


def _load_failed(problem: str) -> ToolError:
    return ToolError("docker-load-failed", problem, hint="check the free space of docker: docker system df")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes. urllib3 and the SDK have the first one in `args`."""
    seen: set[int] = set()
    ahead: list[object] = [error]
    while ahead:
        cause = ahead.pop()
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            ahead += [*cause.args, cause.__cause__, cause.__context__]


class _ImageStream(io.RawIOBase):
    """Chunks as a file that can be read once."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
