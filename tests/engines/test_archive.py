"""Exported images, read by the tools that people load them with. Needs skopeo, podman and root."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest

from imagefactory.oci.archive import FORMATS, export
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Image,
    canonical_json,
    format_descriptor,
)
from imagefactory.progress import QuietProgress
from tests.services.children import stdout_of

NAME = "pytorch:2.3-cu121"
FILES = {"etc/one": b"one" * 5000, "opt/two": b"two"}


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def a_tar(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def make_image(layout: Layout) -> Image:
    """Two layers, one zstd and one gzip, each with one file."""
    plain = [a_tar(name, data) for name, data in FILES.items()]
    layers = []
    for name, data in zip(("zstd", "gzip"), plain, strict=True):
        compressor = codec(name).compressor()
        layers.append(layout.add(compressor.compress(data) + compressor.flush(), codec(name).media_type))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/opt/env/bin", "LANG=C.UTF-8"], "Cmd": ["python"]},
        "rootfs": {"type": "layers", "diff_ids": [sha(data) for data in plain]},
        "history": [{"created_by": "test"} for _ in plain],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(layer) for layer in layers],
    }
    entry = {
        **format_descriptor(layout.add(canonical_json(manifest), MANIFEST_TYPE)),
        "platform": {"architecture": "amd64", "os": "linux"},
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    layout.tag(NAME, layout.add(canonical_json(index), INDEX_TYPE))
    image = layout.image(NAME)
    assert image is not None
    return image


@pytest.fixture(params=FORMATS)
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Image]:
    layout = Layout(tmp_path / "store")
    image = make_image(layout)
    out = tmp_path / "image.tar"
    export(layout, image, out, kind=request.param, progress=QuietProgress())
    return request.param, out, image


def run(*command: str) -> str:
    return stdout_of(command)


def test_skopeo_inspects_and_copies(exported: tuple[str, Path, Image], tmp_path: Path) -> None:
    kind, out, image = exported
    source = f"{kind}:{out}"
    seen = json.loads(run("skopeo", "inspect", source))
    assert seen["Env"] == ["PATH=/opt/env/bin", "LANG=C.UTF-8"]
    assert json.loads(run("skopeo", "inspect", "--config", source))["rootfs"]["diff_ids"] == [
        layer.diff_id for layer in image.layers
    ]
    if kind == "oci-archive":
        assert seen["Digest"] == image.digest
    copy = tmp_path / "copy"
    run("skopeo", "--insecure-policy", "copy", source, f"dir:{copy}")
    assert sha((copy / image.config.removeprefix("sha256:")).read_bytes()) == image.config


def test_podman_loads_the_same_image(exported: tuple[str, Path, Image], tmp_path: Path) -> None:
    _, out, image = exported
    runroot = tempfile.mkdtemp(prefix="pod-")  # podman takes 50 characters at most
    podman = ("podman", "--root", str(tmp_path / "root"), "--runroot", runroot, "--storage-driver", "vfs")
    assert "localhost/pytorch:2.3-cu121" in run(*podman, "load", "--quiet", "--input", str(out))
    (seen,) = json.loads(run(*podman, "image", "inspect", "pytorch:2.3-cu121"))
    assert f"sha256:{seen['Id']}" == image.config
    assert seen["RootFS"]["Layers"] == [layer.diff_id for layer in image.layers]
    folder = Path(run(*podman, "image", "mount", "pytorch:2.3-cu121").strip())
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    run(*podman, "image", "umount", "pytorch:2.3-cu121")
    shutil.rmtree(runroot)
