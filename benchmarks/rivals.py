"""Four ways to get from a lock to an image in a registry, each as strong as it can be made.

dockerfile    the rendered Dockerfile as shipped: `docker buildx build --load`, `docker push`
best          BuildKit's best practice: uv, a cache mount, byte code, zstd, pushed by BuildKit
split         the same, hand-split: a stage and a layer for every large package
buildah       the rendered Dockerfile by `podman build`, which is buildah, zstd, `podman push`
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.wheels import Wheel
from imagefactory.oci.archive import export
from imagefactory.oci.layout import Layout
from imagefactory.progress import QuietProgress
from tests.services import docker_daemon, podman_service
from tests.services.docker import write_config
from tests.services.factory import Factory
from tests.services.podman import PodmanService

WAYS = ("dockerfile", "best", "split", "buildah")
LARGE = 8_000_000
BASE = "imagefactory-benchmark/base:1"
SITE = "/opt/env/lib/python3.11/site-packages"

BEST = """FROM {base} AS build
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,source=requirements.txt,target=/r.txt \\
    /usr/bin/python3.11 -m venv --without-pip /opt/env && UV_LINK_MODE=copy uv pip install --python \\
    /opt/env/bin/python --index-url {index} --no-deps --require-hashes --compile-bytecode -r /r.txt
FROM {base}
ENV PATH=/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY --link --from=build /opt/env /opt/env
"""
SPLIT_STAGE = """FROM empty AS p{number}
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,source=p{number}.txt,target=/r.txt \\
    UV_LINK_MODE=copy uv pip install --python /opt/env/bin/python --index-url {index} --no-deps \\
    --require-hashes --compile-bytecode --target {site} -r /r.txt
"""
LOOK = f"""
import hashlib, importlib.metadata, json, numpy, onnxruntime, pathlib
site = pathlib.Path("{SITE}")
own = {{"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}}  # written by whoever installs
elsewhere = ("share", "bin")  # `--target` puts what belongs beside lib/ into the folder of the packages
print(json.dumps({{str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(site.rglob("*")) if path.is_file() and path.name not in own
    and path.suffix not in (".pyc", ".pth") and path.name != ".lock"
    and path.relative_to(site).parts[0] not in elsewhere}}))
"""


def docker(daemon: str, *arguments: str) -> str:
    return _said("docker", *arguments, DOCKER_HOST=daemon, SOURCE_DATE_EPOCH="1")


def _said(*command: str, **environ: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def files_in(daemon: str, image: str) -> dict[str, str]:
    """The packages' files of an image by sha256; its framework is imported there."""
    out = docker(daemon, "run", "--rm", "--network=none", image, "/opt/env/bin/python", "-c", LOOK)
    found: dict[str, str] = json.loads(out)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """Daemons with the factory's own base, and uv in it; `pusher` keeps its images in containerd."""

    folder: Path
    root: Path
    index: str
    loader: str
    pusher: str
    podman: PodmanService

    def clear(self) -> None:
        """Cold caches of packages and layers; the base stays."""
        for daemon in (self.loader, self.pusher):
            for name in docker(daemon, "images", "--format", "{{.Repository}}:{{.Tag}}").split():
                if name != BASE:
                    docker(daemon, "rmi", "--force", name)
            docker(daemon, "builder", "prune", "--all", "--force")
        for name in self._podman("images", "--all", "--format", "{{.Id}} {{.Repository}}").splitlines():
            if not name.endswith(BASE.partition(":")[0]):
                self._podman("rmi", "--force", "--ignore", name.split()[0])

    def _podman(self, *arguments: str) -> str:
        return _said(*self.podman.command, *arguments, **self.podman.environ)

    def push(self, way: str, target: str, name: str, wheels: Sequence[Wheel]) -> None:
        """Builds the target and pushes it as `name`."""
        secret = self.folder / "pip.conf"
        secret.write_text(f"[global]\nindex-url = {self.index}\n")
        if way == "buildah":
            self._podman(
                "build", "--layers", "--network=host", "--pull=never", "--timestamp=1", "--tag", name,
                "--secret", f"id=pip.conf,src={secret}", "--build-arg", f"BASE=docker.io/{BASE}",
                str(self.root / "definitions" / target),
            )  # fmt: skip
            self._podman("push", "--quiet", "--tls-verify=false", "--compression-format=zstd", name)
            return
        if way == "dockerfile":
            docker(
                self.loader, "buildx", "build", "--load", "--provenance=false", "--network=host",
                "--secret", f"id=pip.conf,src={secret}", "--build-arg", f"BASE={BASE}", "--tag", name,
                str(self.root / "definitions" / target),
            )  # fmt: skip
            docker(self.loader, "push", "--quiet", name)
            return
        context = self.folder / "context"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir()
        (self._best if way == "best" else self._split)(context, wheels)
        output = f"type=image,name={name},push=true,compression=zstd,compression-level=1,oci-mediatypes=true"
        docker(
            self.pusher, "buildx", "build", "--provenance=false", "--network=host",
            "--output", output, str(context),
        )  # fmt: skip

    def _best(self, context: Path, wheels: Sequence[Wheel]) -> None:
        (context / "requirements.txt").write_text(_requirements(wheels))
        (context / "Dockerfile").write_text(BEST.format(base=BASE, index=self.index))

    def _split(self, context: Path, wheels: Sequence[Wheel]) -> None:
        large = sorted((w for w in wheels if w.size >= LARGE), key=lambda wheel: wheel.name)
        groups = [[wheel] for wheel in large] + [[wheel for wheel in wheels if wheel.size < LARGE]]
        lines = [f"FROM {BASE} AS empty\nRUN /usr/bin/python3.11 -m venv --without-pip /opt/env\n"]
        copies = [f"FROM {BASE}", "COPY --link --from=empty /opt/env /opt/env"]
        for number, group in enumerate(groups):
            (context / f"p{number}.txt").write_text(_requirements(group))
            lines.append(SPLIT_STAGE.format(number=number, index=self.index, site=SITE))
            copies.append(f"COPY --link --from=p{number} {SITE} {SITE}")
        (context / "Dockerfile").write_text("\n".join([*lines, *copies]) + "\n")


def _requirements(wheels: Sequence[Wheel]) -> str:
    return "".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels)


@contextmanager
def rivals(folder: Path, factory: Factory, index: str) -> Iterator[Rivals]:
    """The daemons, each with the base of the factory's store."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["DOCKER_CONFIG"] = str(write_config(folder / "config"))
    with (
        docker_daemon(folder / "loader") as loader,
        docker_daemon(folder / "pusher", containerd_snapshotter=True) as pusher,
        podman_service(folder / "podman") as podman,
    ):
        made = Rivals(
            folder=folder,
            root=factory.root,
            index=index,
            loader=loader.host,
            pusher=pusher.host,
            podman=podman,
        )
        for daemon in (made.loader, made.pusher):
            _load_base(daemon, Layout(factory.store), folder)
        saved = folder / "base.tar"
        docker(made.loader, "save", "--output", str(saved), BASE)
        made._podman("load", "--quiet", "--input", str(saved))
        saved.unlink()
        yield made


def _load_base(daemon: str, layout: Layout, folder: Path) -> None:
    """The factory's own base with uv in it: all start from the same."""
    context = folder / "base"
    context.mkdir(exist_ok=True)
    image, archive = layout.image("base:debian-12"), context / "base.tar"
    assert image is not None
    export(layout, image, archive, kind="docker-archive", progress=QuietProgress())
    docker(daemon, "load", "--quiet", "--input", str(archive))
    docker(daemon, "tag", image.name, BASE)
    archive.unlink()
    shutil.copy(Path(sys.executable).parent / "uv", context)
    (context / "Dockerfile").write_text(f"FROM {BASE}\nCOPY uv /usr/local/bin/uv\n")
    docker(daemon, "buildx", "build", "--load", "--provenance=false", "--tag", BASE, str(context))
