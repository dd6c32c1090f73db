"""Bases by digest from a registry: pulled through a mirror, tried, built on, run. The registry is real.

The packages are small ones made here, so nothing but the Debian base is fetched.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from imagefactory.oci.graph import StoreRepository, read_graph
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import CONFIG_TYPE, INDEX_TYPE, MANIFEST_TYPE, Descriptor, canonical_json
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.transfer import TransferRequest, send
from imagefactory.progress import QuietProgress
from tests.made.wheels import make_wheel
from tests.services.children import stdout_of
from tests.services.factory import lend

ROOT = Path(__file__).parents[2]
FAKE_TORCH = ROOT / "tests" / "data" / "fake_torch.py"
TARGET = "pytorch-1.13-cu117"
RECIPE = """\
family: pytorch
description: a framework of plain Python
source: pypi
framework: torch
platform: linux/amd64
{base}
python: "3.11"
capabilities: ["8.0"]
checks: [packages, libraries, import, cuda-version, compute]
packages: [nvidia-cuda-runtime-cu11]
matrix:
  - version: "1.13"
    cuda: ["11.7"]
"""
GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True, kw_only=True)
class Site:
    """One store, one index and one registry, which stands in for docker.io."""

    folder: Path
    registry: str

    def root(self, name: str, base: str) -> Path:
        """A factory whose one recipe says `base`."""
        root = self.folder / name
        shutil.rmtree(root, ignore_errors=True)
        (root / "recipes").mkdir(parents=True)
        (root / "imagefactory.toml").write_text("")
        (root / "recipes" / "pytorch.yaml").write_text(RECIPE.format(base=base))
        shutil.copy(ROOT / "recipes" / "bases.yaml", root / "recipes")
        shutil.copytree(ROOT / "lockfiles" / "bases", root / "lockfiles" / "bases")
        self.run(root, "lock", TARGET)
        return root

    def run(
        self, root: Path, *arguments: str, code: int = 0, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        environ = {
            **os.environ,
            "IMAGEFACTORY_STORE": str(self.folder / "store"),
            "IMAGEFACTORY_CACHE": str(self.folder / "cache"),
            "IMAGEFACTORY_INDEX": (self.folder / "simple").as_uri(),
            "IMAGEFACTORY_MIRRORS": f"docker.io={self.registry}",
            **extra,
        }
        command = [sys.executable, "-m", "imagefactory", "-C", str(root), *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def build(self, root: Path, **extra: str) -> dict[str, Any]:
        (built,) = json.loads(self.run(root, "build", "--json", TARGET, **extra).stdout)["results"]
        assert isinstance(built, dict)
        return built

    def refused(self, root: Path, code: int) -> str:
        return self.run(root, "build", TARGET, code=code).stderr

    @property
    def layout(self) -> Layout:
        return Layout(self.folder / "store")

    def config(self, built: dict[str, Any]) -> dict[str, Any]:
        return self.blob(built["image"]["config"])

    def blob(self, digest: str) -> dict[str, Any]:
        value = json.loads(self.layout.blob_path(digest).read_bytes())
        assert isinstance(value, dict)
        return value


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, base_store: Path, registry: str) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("registry-base")
    lend(base_store, folder)
    wheels = {
        "torch": ("1.13.1", {"torch/__init__.py": FAKE_TORCH.read_bytes()}),
        "nvidia_cuda_runtime_cu11": ("11.7.99", {"nvidia/cuda_runtime/__init__.py": b""}),
    }
    for name, (version, files) in wheels.items():
        page = folder / "simple" / name.replace("_", "-")
        page.mkdir(parents=True)
        wheel = make_wheel(page, name, files, version=version)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (page / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>')
    yield Site(folder=folder, registry=registry)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def on_debian(site: Site) -> dict[str, Any]:
    """The target on the factory's own base, which is then in the store. `Env` is its environment."""
    built = site.build(site.root("debian", "base: debian-12"))
    return {**built, "Env": site.config(built)["config"]["Env"]}  # its blobs may be collected later


@pytest.fixture(scope="module")
def debian(site: Site, on_debian: dict[str, Any]) -> str:
    """The digest of that base in the registry, under somewhere/debian."""
    source = StoreRepository(store=LayoutStore(site.layout), repository="base")
    graph = read_graph(source, site.layout.tags()["base:debian-12"].digest)
    sending = TransferRequest(graph=graph, repository="somewhere/debian", tags=("12",))
    return send(source, RegistryClient(site.registry), sending, QuietProgress()).digest


@pytest.fixture(scope="module")
def made_by_docker(site: Site, debian: str, dockerd: str) -> str:
    """The digest of an image with docker's own media types, whiteouts and much in its config."""
    folder = site.folder / "dockerfile"
    folder.mkdir()
    (folder / "Dockerfile").write_text(
        f"FROM {site.registry}/somewhere/debian@{debian}\n"
        "RUN rm -r /usr/share/doc/gcc-12-base /etc/motd && mkdir -p /opt/tool/bin /opt/other "
        "&& touch /opt/other/file /opt/tool/bin/tool\n"
        "RUN rm -r /opt/other && mkdir /opt/other && cp -a /usr/bin/python3.11 /opt/tool/bin/python3.11\n"
        "ENV PATH=/opt/tool/bin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/tool/lib PYTHONPATH=/opt/evil\n"
        "ENV PYTHONHOME=/opt/evil TOOL_VERSION=3\n"
        "LABEL maintainer=somebody\nUSER 1000\nWORKDIR /srv\n"
        'ENTRYPOINT ["/bin/false"]\nCMD ["/bin/false"]\n'
    )
    name = f"{site.registry}/somewhere/tool:1"
    docker = [shutil.which("docker") or "docker", "--host", dockerd]
    # BuildKit writes OCI's types; docker's own are what `docker push` sends of an image of the daemon.
    for command in (["buildx", "build", "--load", "--tag", name, str(folder)], ["push", name]):
        stdout_of([*docker, *command], timeout=300)
    found = RegistryClient(site.registry).manifest("somewhere/tool", "1")
    assert found is not None
    assert found[0].media_type == "application/vnd.docker.distribution.manifest.v2+json"
    return found[0].digest


def push_image(site: Site, repository: str, config: dict[str, Any], kind: str = CONFIG_TYPE) -> Descriptor:
    """A manifest of one empty layer."""
    plain = io.BytesIO()
    tarfile.open(fileobj=plain, mode="w").close()
    layer = gzip.compress(plain.getvalue(), mtime=0)
    diff_id = f"sha256:{hashlib.sha256(plain.getvalue()).hexdigest()}"
    text = canonical_json({**config, "config": {}, "rootfs": {"type": "layers", "diff_ids": [diff_id]}})
    store = RegistryClient(site.registry)
    parts = []
    for data, media_type in ((text, kind), (layer, GZIP)):
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        part = Descriptor(media_type=media_type, digest=digest, size=len(data))
        store.write(repository, part, lambda offset, data=data: iter((data[offset:],)))  # type: ignore[misc]
        parts.append({"mediaType": media_type, "digest": digest, "size": len(data)})
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": parts[0], "layers": parts[1:]}
    return store.put_manifest(repository, canonical_json(manifest), MANIFEST_TYPE)


# --- what works ------------------------------------------------------------------------------------


def test_a_copy_of_the_factorys_base_gives_the_same_image_files(
    site: Site, on_debian: dict[str, Any], debian: str
) -> None:
    root = site.root("copy", f'base: docker.io/somewhere/debian:12@{debian}\nglibc: "2.36"')
    built = site.build(root)
    assert built["smoke"]["passed"]
    ours, theirs = ([layer["diff_id"] for layer in b["image"]["layers"]] for b in (built, on_debian))
    assert ours == theirs
    # A base of somebody else's knows its own libraries' folders.
    libraries = "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
    assert [*site.config(built)["config"]["Env"], libraries] == on_debian["Env"]
    assert f"base:debian-{debian.removeprefix('sha256:')[:12]}" in site.layout.tags()
    said = site.run(root, "run", TARGET, "--", "python", "-c", "import torch; print(torch.__version__)")
    assert said.stdout == "1.13.1+cu117\n"


def test_a_base_in_the_store_asks_no_registry(site: Site, debian: str) -> None:
    root = site.root("offline", f'base: docker.io/somewhere/debian@{debian}\nglibc: "2.36"')
    site.build(root)
    again = site.build(root, IMAGEFACTORY_MIRRORS="docker.io=127.0.0.1:1")
    assert not again["fresh"]
    assert site.run(root, "image", "prune").stdout.startswith("freed")
    assert not site.build(root, IMAGEFACTORY_MIRRORS="docker.io=127.0.0.1:1")["fresh"]


def test_an_image_of_docker_is_built_on_and_its_config_left_behind(site: Site, made_by_docker: str) -> None:
    root = site.root("tool", f'base: docker.io/somewhere/tool@{made_by_docker}\nglibc: "2.31"')
    built = site.build(root)
    assert built["smoke"]["passed"]
    manifest = site.blob(built["image"]["manifest"])
    assert {layer["mediaType"].rpartition(".")[0] for layer in manifest["layers"]} == {
        "application/vnd.oci.image.layer.v1"
    }
    config = site.config(built)["config"]
    assert set(config) == {"Env", "Cmd", "WorkingDir", "Labels"}
    assert (config["Cmd"], config["WorkingDir"]) == (["python"], "/")
    assert "maintainer" not in config["Labels"]
    assert config["Labels"]["org.opencontainers.image.base.name"].endswith(made_by_docker)
    variables = dict(entry.split("=", 1) for entry in config["Env"])
    assert variables["PATH"].split(":")[0] == "/opt/env/bin"
    assert variables["PATH"].split(":")[-1] == "/opt/tool/bin"
    assert (variables["LD_LIBRARY_PATH"], variables["TOOL_VERSION"]) == ("/opt/tool/lib", "3")
    assert not {"PYTHONPATH", "PYTHONHOME"} & set(variables)
    said = site.run(
        root, "run", TARGET, "--", "sh", "-c",
        "id -u; pwd; ls /opt/other; test ! -e /etc/motd; python -c 'import torch; print(torch.__file__)'",
    )  # fmt: skip
    assert said.stdout.split() == ["0", "/work", "/opt/env/lib/python3.11/site-packages/torch/__init__.py"]


def test_docker_builds_the_rendered_file_on_it(site: Site, made_by_docker: str, dockerd: str) -> None:
    """The definition by hand, without the factory: the base's config does not hold in that image either."""
    root = site.root("by-hand", f'base: {site.registry}/somewhere/tool@{made_by_docker}\nglibc: "2.31"')
    site.run(root, "render")
    text = (root / "definitions" / TARGET / "Dockerfile").read_text()
    lines = text.splitlines()
    # Up to the environment: the packages come from an index that a container does not reach.
    head = "\n".join(lines[: lines.index("FROM base AS build")])
    (root / "Dockerfile").write_text(head)
    docker = [shutil.which("docker") or "docker", "--host", dockerd]
    name = "imagefactory/tests:by-hand"
    stdout_of([*docker, "buildx", "build", "--load", "--tag", name, str(root)])
    program = "import os, sys; print(os.getuid(), os.getcwd(), sys.prefix, os.environ['PATH'])"
    said = subprocess.run(
        [*docker, "run", "--rm", name, "/usr/bin/python3.11", "-c", program],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    uid, folder, prefix, path = said.stdout.split()
    assert (uid, folder, prefix) == ("0", "/", "/usr")
    assert path.startswith("/opt/env/bin:")
    assert path.endswith("/opt/tool/bin:/usr/bin:/bin")


def test_of_an_index_the_platform_is_taken(site: Site, made_by_docker: str) -> None:
    foreign = push_image(site, "somewhere/tool", {"architecture": "arm64", "os": "linux"})
    store = RegistryClient(site.registry)
    found = store.manifest("somewhere/tool", made_by_docker)
    assert found is not None
    entries = [
        {
            "mediaType": each.media_type,
            "digest": each.digest,
            "size": each.size,
            "platform": {"architecture": architecture, "os": "linux"},
        }
        for each, architecture in ((foreign, "arm64"), (found[0], "amd64"))
    ]
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
    put = store.put_manifest("somewhere/tool", canonical_json(index), INDEX_TYPE)
    root = site.root("index", f'base: docker.io/somewhere/tool@{put.digest}\nglibc: "2.36"')
    built = site.build(root)
    annotations = site.blob(built["image"]["manifest"])["annotations"]
    assert annotations["org.opencontainers.image.base.digest"] == made_by_docker
    alone = site.root("foreign", f'base: docker.io/somewhere/tool@{foreign.digest}\nglibc: "2.36"')
    assert "is an image for linux/arm64, not for linux/amd64" in site.refused(alone, 7)


def test_a_python_at_another_place(site: Site, made_by_docker: str) -> None:
    root = site.root(
        "place",
        f'base: docker.io/somewhere/tool@{made_by_docker}\nglibc: "2.36"\ninterpreter: /bin/python3.11',
    )
    built = site.build(root)
    assert built["smoke"]["passed"]
    program = "readlink /opt/env/bin/python; head -1 /opt/env/pyvenv.cfg"
    said = site.run(root, "run", TARGET, "--", "sh", "-c", program)
    assert said.stdout.splitlines() == ["/bin/python3.11", "home = /bin"]


# --- what does not ---------------------------------------------------------------------------------


def test_a_registry_that_has_no_such_image(site: Site, debian: str) -> None:
    missing = "sha256:" + "0" * 64
    for repository, digest in (("somewhere/debian", missing), ("nowhere/debian", debian)):
        name = f"docker.io/{repository}@{digest}"
        root = site.root("missing", f'base: {name}\nglibc: "2.36"')
        said = site.run(root, "build", TARGET, code=8, IMAGEFACTORY_STORE=str(root / "store")).stderr
        assert f"recipes/pytorch.yaml:6:7: {name}: " in said
        assert f"{site.registry}/{repository}" in said


def test_a_mirror_that_is_not_there(site: Site, debian: str) -> None:
    root = site.root("gone", f'base: docker.io/elsewhere/debian@{debian[:-4]}0000\nglibc: "2.36"')
    said = site.run(root, "build", TARGET, code=8, IMAGEFACTORY_MIRRORS="docker.io=127.0.0.1:1/hub").stderr
    assert "127.0.0.1:1/hub/elsewhere/debian" in said


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ('glibc: "2.36"\ninterpreter: /usr/local/bin/python3.11',
         "/usr/local/bin/python3.11"),
        ('glibc: "2.36"\ninterpreter: /bin/true', "/bin/true"),
        ('glibc: "2.37"', "glibc 2.36, older than the 2.37 "),
    ],
)  # fmt: skip
def test_an_image_that_is_not_as_the_recipe_says(site: Site, debian: str, beside: str, expected: str) -> None:
    root = site.root("other", f"base: docker.io/somewhere/debian@{debian}\n{beside}")
    said = site.refused(root, 7)
    (line,) = [one for one in said.splitlines() if one.startswith("error: ")]
    assert f"recipes/pytorch.yaml:6:7: docker.io/somewhere/debian@{debian} " in line
    assert expected in line
    assert "hint: " in said


def test_another_python_than_the_recipes(site: Site, debian: str) -> None:
    root = site.root("python", f'base: docker.io/somewhere/debian@{debian}\nglibc: "2.36"')
    recipe = root / "recipes" / "pytorch.yaml"
    text = recipe.read_text().replace('"3.11"', '"3.10"')
    recipe.write_text(text.replace('glibc: "2.36"', 'glibc: "2.36"\ninterpreter: /usr/bin/python3'))
    site.run(root, "lock", TARGET)
    assert "Python 3.11 at /usr/bin/python3, not 3.10" in site.refused(root, 7)


def test_what_is_no_container_image(site: Site) -> None:
    put = push_image(site, "somewhere/artifact", {}, kind="application/vnd.oci.empty.v1+json")
    root = site.root("artifact", f'base: docker.io/somewhere/artifact@{put.digest}\nglibc: "2.36"')
    assert f"docker.io/somewhere/artifact@{put.digest}" in site.refused(root, 7)
