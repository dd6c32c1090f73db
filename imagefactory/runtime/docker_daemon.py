"""Docker's daemon through its SDK: the only place that imports it. Its errors stop here.

A load that succeeded is looked at again. An image of the store is known by what it holds, its diff ids:
daemons name it by the digest of its config or, with containerd's image store, by another one.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
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
"""Seconds for a daemon to say who it is."""
DAEMON_TIMEOUT = 3600
"""Seconds without one byte from the daemon: it packs a whole image before it sends the first of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """What answers: `version` is dockerd's (`26.1.5`) or podman's."""

    version: str
    podman: bool


class DockerDaemon:
    """The daemon that `environ` names (DOCKER_HOST, DOCKER_CONTEXT, else docker's current context).

    Nothing is asked of it before the first call. Every method raises ToolError when it does not answer.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    @property
    def place(self) -> str:
        """What a person calls it."""
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

            # The first question: a daemon that hangs must not hold its asker for PATIENCE.
            with closing(docker.from_env(environment=self.environ, timeout=ANSWER)) as asked:
                told = asked.version()
        components = {str(part.get("Name")): part for part in told.get("Components") or ()}
        podman = "Podman Engine" in components
        version = str(components["Podman Engine"].get("Version") if podman else told.get("Version"))
        return DaemonFacts(version=version, podman=podman)

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Turns what the SDK and its HTTP raise into a ToolError that says what to do."""
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
                hint="sudo systemctl start docker; or set DOCKER_HOST to the address of yours",
            )
        said = str(getattr(error, "explanation", None) or error)
        return ToolError(
            "docker-failed",
            f"docker at {self.place}: {said.strip()}",
            hint="see its log: journalctl -u docker",
        )

    # --- images ----------------------------------------------------------------------------------

    def holds(self, image: Image, name: str) -> str:
        """The id under which the daemon has `image`, by itself or as `name`; empty if it has not."""
        for asked in (image.config, name):
            found = self.inspect(asked)
            if found and found["RootFS"].get("Layers") == [layer.diff_id for layer in image.layers]:
                return str(found["Id"])
        return ""

    def inspect(self, name: str) -> dict[str, Any] | None:
        """What the daemon says of an image, or None."""
        with self.speaking():
            import docker

            try:
                found: dict[str, Any] = self.client.api.inspect_image(name)
            except docker.errors.ImageNotFound:
                return None
            return found

    def ensure(self, layout: Layout, image: Image, name: str, progress: Progress) -> str:
        """The id of `image` in the daemon, where it is loaded and called `name` if it is not there.

        Raises StoreError for a damaged layer, ToolError when the daemon does not take it.
        """
        known = self.holds(image, name)
        if known:
            return known
        with progress.task(f"load {image.name} into docker", total=image.size) as task, self.speaking():
            stream = _counted(stream_docker(layout, image, name), task.advance)
            for line in self.client.api.load_image(stream, quiet=True):
                if "error" in line or "errorDetail" in line:
                    said = line.get("error") or line["errorDetail"].get("message")
                    raise ToolError(
                        "docker-load-failed", f"docker did not load {image.name}: {said}", hint=_SPACE
                    )
        known = self.holds(image, name)
        if not known:
            raise ToolError(
                "docker-load-failed", f"docker loaded {image.name}, but it is not complete there", hint=_SPACE
            )
        return known

    def tag(self, name: str, as_name: str) -> None:
        repository, _, tag = as_name.rpartition(":")
        with self.speaking():
            self.client.api.tag(name, repository, tag)

    def untag(self, name: str) -> None:
        """Takes a name away; nothing happens when there is none."""
        with self.speaking():
            import docker

            with suppress(docker.errors.NotFound):
                self.client.api.remove_image(name, noprune=True)

    @contextmanager
    def saved(self, name: str) -> Iterator[IO[bytes]]:
        """What `docker save` writes of an image, as a stream."""

        def chunks() -> Iterator[bytes]:
            with self.speaking():  # here, or a broken connection would pass for a fault of the reader's files
                yield from self.client.api.get_image(name, SAVE_CHUNK)

        yield io.BufferedReader(_ImageStream(chunks()), SAVE_CHUNK)


def run_name(image: Image) -> str:
    """What an image of the store is called in a daemon that got it from there."""
    return f"imagefactory/run:{image.config.removeprefix('sha256:')[:12]}"


_SPACE = "check the free space of docker: docker system df"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and what is inside it; urllib3 and the SDK keep the first cause in `args`."""
    seen: set[int] = set()
    ahead: list[object] = [error]
    while ahead:
        one = ahead.pop()
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            yield one
            ahead += [*one.args, one.__cause__, one.__context__]


def _counted(chunks: Iterator[bytes], report: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        report(len(chunk))


class _ImageStream(io.RawIOBase):
    """Chunks as a file that can be read once."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size
