"""A factory of one small target, with an image that can be run and says that it was made of the lock."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile

import pytest

from imagefactory.actions.definition import define_target
from imagefactory.actions.locked import locked_target
from imagefactory.build.base.image import write_index
from imagefactory.lock.files import write_lock
from imagefactory.model import LockedWheel
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import CONFIG_TYPE, MANIFEST_TYPE, canonical_json, format_descriptor
from imagefactory.project import Project, load_project
from imagefactory.settings.load import load_settings
from tests.made.trusted import trust
from tests.made.values import make_lock
from tests.services.factory import ROOT
from tests.services.sandbox import PYTHON, entry, host_files

NAME = "tiny-12.1-cu121"
RECIPE = f"""\
family: tiny
description: The CUDA runtime alone
source: pypi
framework: nvidia-cuda-runtime-cu12
platform: linux/amd64
base: debian-12
python: "{sys.version_info[0]}.{sys.version_info[1]}"
capabilities: ["8.0"]
checks: [packages]
matrix:
  - version: "12.1"
    cuda: ["12.1"]
"""


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One locked target, and in the store an image that says it was made of that lock."""
    folder = tmp_path_factory.mktemp("gpu-verify")
    root = folder / "root"
    (root / "recipes").mkdir(parents=True)
    (root / "imagefactory.toml").write_text("")
    (root / "recipes/tiny.yaml").write_text(RECIPE)
    shutil.copy(ROOT / "recipes/bases.yaml", root / "recipes")
    environ = {
        "HOME": str(folder / "home"),
        "PATH": os.environ["PATH"],
        "IMAGEFACTORY_STORE": str(folder / "store"),
    }
    trust(root, environ)
    made = load_project(load_settings(directory=root, start=root, environ=environ), environ)
    (target,) = made.targets
    wheel = LockedWheel(
        name=target.framework,
        version="12.1.105",
        filename="nvidia_cuda_runtime_cu12-12.1.105-py3-none-manylinux1_x86_64.whl",
        sha256="0" * 64,
        size=1,
    )
    lock = make_lock(
        target=target.name,
        content_hash=locked_target(made, target).content_hash,
        python=target.python,
        wheels=(wheel,),
    )
    write_lock(made.lock_folder, lock)
    put_image(made)
    return made


def put_image(factory: Project) -> None:
    (target,), layout = factory.targets, factory.layout
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder in ("usr", "usr/bin", "opt", "opt/env", "opt/env/bin", "etc"):
            archive.addfile(entry(folder, mode=0o755, kind=tarfile.DIRTYPE))
        for name in ("bin", "lib", "lib64"):
            archive.addfile(entry(name, mode=0o777, kind=tarfile.SYMTYPE, link=f"usr/{name}"))
        archive.addfile(entry("opt/env/bin/python", mode=0o777, kind=tarfile.SYMTYPE, link=PYTHON))
        for info, path in host_files():
            info.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(info, file)
    layer = layout.add(packed.getvalue(), "application/vnd.oci.image.layer.v1.tar")
    labels = dict(define_target(factory, target).labels)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin"], "Labels": labels},
        "rootfs": {"diff_ids": [layer.digest]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(layer)],
    }
    layout.tag(reference(target), write_index(layout, manifest, "linux/amd64"))
