"""What people already have pulls what the assemble engine made and `push` sent, by digest, and runs it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagefactory.build.base import image as base_image
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import BlobWriter, Layout
from tests.services import PodmanService
from tests.services.children import stdout_of
from tests.services.factory import Factory, copy_store
from tests.services.tier import many

TARGET = "tiny-12.1-cu121"
CODECS = {
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
}

LOOK = """\
import base64, ctypes, hashlib, importlib.metadata, json, os, sys
import markupsafe._speedups

wrong, files = [], 0
for package in importlib.metadata.distributions():
    for path in package.files or []:
        if path.hash is None:
            continue
        files += 1
        digest = hashlib.new(path.hash.mode, path.locate().read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != path.hash.value:
            wrong.append(str(path))
cudart = next(p for p in importlib.metadata.files("nvidia-cuda-runtime-cu12") if p.name == "libcudart.so.12")
version = ctypes.c_int()
ctypes.CDLL(str(cudart.locate())).cudaRuntimeGetVersion(ctypes.byref(version))
packages = {p.name.lower(): p.version for p in importlib.metadata.distributions() if p.files}
print(json.dumps({
    "prefix": sys.prefix,
    "packages": packages,
    "files": files > 50,
    "wrong": wrong,
    "cuda": version.value,
    "requires": os.environ.get("NVIDIA_REQUIRE_CUDA"),
}))
"""


@dataclass(frozen=True, kw_only=True)
class Published:
    reference: str
    """`127.0.0.1:port/tiny@sha256:...`, of the index."""
    digest: str
    manifest: str
    layers: tuple[str, ...]
    media_type: str
    expected: dict[str, object]
    """What LOOK prints in it."""


def gzip_store(small_store: Path, tiny_root: Path, path: Path) -> Path:
    """The lent store with its base's layer in gzip as well: whoever builds with that finds it made."""
    layout = Layout(copy_store(small_store, path))
    image = layout.image("base:debian-12")
    lock = read_base_lock(tiny_root / "lockfiles/bases/debian-12.lock")
    assert image
    assert lock
    (layer,) = image.layers
    packer = codec("gzip")
    with BlobWriter(layout) as blob:
        compressor = packer.compressor()
        for data in codec("zstd").decompress(layout.blob_path(layer.descriptor.digest)):
            blob.write(compressor.compress(data))
        blob.write(compressor.flush())
        made = replace(layer, descriptor=blob.commit(packer.media_type))
    layout.record_layer(base_image._layer_key(lock, "gzip", None), made)
    return path


@pytest.fixture(scope="module", params=CODECS)
def published(
    request: pytest.FixtureRequest,
    tiny_root: Path,
    small_store: Path,
    small_factory: Factory,
    scratch: Path,
    registry: str,
) -> Published:
    """The tiny target with layers of one codec, in the real registry."""
    extra = {"IMAGEFACTORY_CODEC": request.param}
    store = small_factory.store
    if request.param != "zstd":
        store = gzip_store(small_store, tiny_root, scratch / "pulls-gzip")
    tiny = Factory(store=store, cache=small_factory.cache, root=tiny_root, extra=extra)
    built = tiny.build(TARGET, "--no-test")
    place = f"{registry}/{request.param}"
    (sent,) = json.loads(tiny.run("push", "--registry", place, "--json", TARGET).stdout)["results"]
    shown = json.loads(tiny.run("show", "--json", TARGET).stdout)
    assert sent["digest"] == built["image"]["digest"]
    return Published(
        reference=f"{place}/tiny@{sent['digest']}",
        digest=sent["digest"],
        manifest=sent["manifest"],
        layers=tuple(layer["digest"] for layer in built["image"]["layers"]),
        media_type=CODECS[request.param],
        expected={
            "prefix": "/opt/env",
            "packages": {package["name"]: package["version"] for package in shown["packages"]},
            "files": True,
            "wrong": [],
            "cuda": 12010,
            "requires": "cuda>=12.0",
        },
    )


def run(*command: str, environ: dict[str, str] | None = None) -> str:
    return stdout_of(command, env={**os.environ, **(environ or {})}, timeout=600)


def test_docker_pulls_and_runs_it(published: Published, dockerd: str) -> None:
    docker = ("docker", "--host", dockerd)
    run(*docker, "pull", "--quiet", published.reference)
    seen = json.loads(run(*docker, "image", "inspect", published.reference))
    assert published.reference in seen[0]["RepoDigests"]
    out = run(*docker, "run", "--rm", published.reference, "python", "-c", LOOK)
    assert json.loads(out) == published.expected


def test_podman_pulls_and_runs_it(published: Published, podman_session: PodmanService) -> None:
    podman, environ = podman_session.command, dict(podman_session.environ)
    run(*podman, "pull", "--quiet", "--tls-verify=false", published.reference, environ=environ)
    out = run(*podman, "run", "--rm", published.reference, "python", "-c", LOOK, environ=environ)
    assert json.loads(out) == published.expected


def test_skopeo_pulls_every_byte_and_podman_runs_what_it_wrote(
    published: Published, podman_session: PodmanService, tmp_path: Path
) -> None:
    source = f"docker://{published.reference}"
    index = run("skopeo", "inspect", "--raw", "--tls-verify=false", source)
    assert f"sha256:{hashlib.sha256(index.encode()).hexdigest()}" == published.digest
    assert [entry["digest"] for entry in json.loads(index)["manifests"]] == [published.manifest]
    copy = tmp_path / "copy"
    run("skopeo", "--insecure-policy", "copy", "--src-tls-verify=false", source, f"oci:{copy}:tiny")
    blob = copy / "blobs" / published.manifest.replace(":", "/")
    manifest = json.loads(blob.read_bytes())
    assert [layer["digest"] for layer in manifest["layers"]] == list(published.layers)
    assert {layer["mediaType"] for layer in manifest["layers"]} == {published.media_type}
    podman, environ = podman_session.command, dict(podman_session.environ)
    out = run(*podman, "run", "--rm", f"oci:{copy}:tiny", "python", "-c", LOOK, environ=environ)
    assert json.loads(out) == published.expected


@pytest.mark.parametrize("published", many(("zstd",), tuple(CODECS)), indirect=True)
def test_apptainer_pulls_and_runs_it(published: Published, apptainer: str) -> None:
    command = (apptainer, "exec", "--containall", "--no-https", f"docker://{published.reference}")
    assert json.loads(run(*command, "python", "-c", LOOK)) == published.expected
