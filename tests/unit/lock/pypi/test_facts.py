"""CUDA libraries of two majors in one lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import LockError
from imagefactory.gpu import knowledge
from imagefactory.lock.pypi.facts import check_single_cuda, cuda_majors
from imagefactory.lock.pypi.requirements import read_lock
from imagefactory.model import LockedWheel
from tests.made.errors import fails

ROOT = Path(knowledge.__file__).parents[3]


def wheels(pins: str) -> list[LockedWheel]:
    pairs = [pin.split("==") for pin in pins.split()]
    return [LockedWheel(name=n, version=v, filename="", sha256="0" * 64, size=1) for n, v in pairs]


@pytest.mark.parametrize(
    ("pins", "majors"),
    [
        ("nvidia-cublas-cu12==12.4.5.8 nvidia-ml-py==13.1 torch==2.6.0", {12}),
        ("nvidia-cublas-cu12==12.4 nvidia-cudnn-cu13==9.1", {12, 13}),
        ("nvidia-cuda-runtime==13.0.2 nvidia-cufft==12.0 nvidia-nccl-cu13==2.28", {13}),
        ("nvidia-cuda-runtime==13.0.2 cupy-cuda12x==14.0", {12, 13}),
        ("nvidia-cuda-runtime==13.0.2 cupy-cuda111==12.3 nvidia-dali-cuda120==1.5", {11, 12, 13}),
        ("nvidia-cuda-runtime-cu12==12.1 jax-cuda13-plugin==0.10", {12, 13}),
        ("nvidia-cuda-runtime==0.0.1.dev5 nvidia-cuda-runtime-cu12==12.1", {12}),
        ("cuda-toolkit==13.2.0 cuda-bindings==12.9", {13}),  # bindings are no library of CUDA's
        ("nvidia-cuda-cccl==13.2 nvidia-cuda-cccl-cu12==12.9 nvidia-cublas-cu12==12.4", {12}),
        ("torch==2.6.0", set()),
    ],
)
def test_the_majors_that_wheels_say(pins: str, majors: set[int]) -> None:
    assert set(cuda_majors(wheels(pins))) == majors


def test_two_majors_are_refused_with_what_brings_each() -> None:
    via = {
        "nvidia-cublas-cu12": ("torch", "nvidia-cudnn-cu12"),
        "nvidia-cudnn-cu12": ("torch",),
        "nvidia-nccl-cu13": ("other",),
    }
    some = wheels("nvidia-cublas-cu12==12.4 nvidia-cudnn-cu12==9.1 nvidia-nccl-cu13==2.28 torch==2.6.0")
    with fails("cuda-runtime-conflict") as caught:
        check_single_cuda("t", some, via)
    for value in (
        "CUDA 12 (nvidia-cublas-cu12 12.4",
        "by torch)",
        "CUDA 13 (nvidia-nccl-cu13 2.28",
        "by other)",
    ):
        assert value in caught.value.message
    check_single_cuda("t", some[:2], via)


def test_one_library_for_each_major_is_one_library() -> None:
    some = wheels("nvidia-cublas-cu12==12.4 nvidia-dsl-libs-cu12==4.1 nvidia-dsl-libs-cu13==4.1 torch==2.6.0")
    via = {
        "nvidia-dsl-libs-cu12": ("nvidia-dsl",),
        "nvidia-dsl-libs-cu13": ("nvidia-dsl", "nvidia-dsl-libs-cu12"),
    }
    check_single_cuda("t", some, via)
    with pytest.raises(LockError):
        check_single_cuda("t", some, {"nvidia-dsl-libs-cu12": ("one",), "nvidia-dsl-libs-cu13": ("other",)})


def test_no_shipped_lock_has_two() -> None:
    for path in sorted((ROOT / "lockfiles").glob("*.requirements.txt")):
        check_single_cuda(path.name, read_lock(path).wheels, {})
