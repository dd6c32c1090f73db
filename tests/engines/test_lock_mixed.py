"""Environments of conda and PyPI: real records of channels, and the package index of this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.errors import UnsolvableError
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock.pypi.index import find_index
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import Lock, SourceLocation
from imagefactory.progress import QuietProgress
from imagefactory.recipes.values import CHANNEL_ROOT
from imagefactory.settings.choices import SettingValue
from tests.made.errors import fails
from tests.made.values import make_base, make_target
from tests.services.channels import ChannelServer

WHERE = SourceLocation(file="recipes/mixed.yaml", line=1, column=1)
BASE = make_base(packages=(), public="", where=WHERE)
MIXED = make_target(
    name="mixed-2.3-cu121",
    family="mixed",
    description="",
    source="conda",
    framework="pytorch",
    capabilities=(),
    checks=(),
    requirements=("pytorch 2.3.*", "pytorch-cuda 12.1.*", "fsspec"),
    environment=(),
    where=WHERE,
    channels=tuple(f"{CHANNEL_ROOT}/{name}" for name in ("pytorch", "nvidia", "conda-forge")),
    virtual=(("__archspec", "x86_64"), ("__cuda", "12.1"), ("__glibc", "2.36")),
    pip=("accelerate<1", "fsspec[http]"),
)


@pytest.fixture(scope="module")
def locker(real_channels: ChannelServer, tmp_path_factory: pytest.TempPathFactory) -> CondaLocker:
    index = find_index(SettingValue(value="", origin="default"), environ=os.environ, prefix=Path(sys.prefix))
    channels = find_channels(f"{CHANNEL_ROOT}={real_channels.url}", os.environ, "")
    cache = tmp_path_factory.mktemp("records")
    return CondaLocker(channels, cache, lambda: UvLocker(index, python=Path(sys.executable)))


@pytest.fixture(scope="module")
def lock(locker: CondaLocker) -> Lock:
    return locker.lock(LockRequest(target=MIXED, base=BASE), QuietProgress())


def test_conda_brings_torch_and_pypi_the_rest(lock: Lock) -> None:
    conda, wheels = {one.name for one in lock.conda}, {one.name for one in lock.wheels}
    assert {"python", "pytorch", "pytorch-cuda", "fsspec", "pyyaml"} <= conda
    assert {"accelerate", "numpy", "safetensors", "aiohttp"} <= wheels  # aiohttp: what fsspec's extra needs
    assert not {"torch", "triton", "fsspec", "pyyaml"} & wheels
    assert not [name for name in wheels if name.startswith("nvidia-")]


def test_a_conda_target_on_another_keeps_both_kinds(locker: CondaLocker, lock: Lock) -> None:
    above = replace(
        MIXED,
        name="lab-2.3-cu121",
        family="lab",
        on=MIXED.name,
        requirements=(*MIXED.requirements, "tabulate", "zstandard"),
        pip=(*MIXED.pip, "einops==0.8.0"),
    )
    over = locker.lock(LockRequest(target=above, base=BASE, under=lock), QuietProgress())
    assert set(lock.packages) < set(over.packages)
    added = {one.name for one in over.packages} - {one.name for one in lock.packages}
    assert {"tabulate", "zstandard", "einops"} <= added
    # conda's h5py needs conda's numpy, and the target below has PyPI's.
    numpy = replace(above, requirements=(*MIXED.requirements, "h5py"))
    with fails("parent-package-conflict", message=("numpy ", "mixed-")):
        locker.lock(LockRequest(target=numpy, base=BASE, under=lock), QuietProgress())


def test_what_pypi_needs_in_another_version_is_said(locker: CondaLocker) -> None:
    target = replace(MIXED, pip=("torchvision==0.20.1",))
    with pytest.raises(UnsolvableError) as caught:
        locker.lock(LockRequest(target=target, base=BASE), QuietProgress())
    assert "torchvision==0.20.1 depends on torch==2.5.1 and conda's pytorch 2.3.1" in caught.value.message
    assert "'pytorch ==2.5.1' in `packages`" in caught.value.hint
