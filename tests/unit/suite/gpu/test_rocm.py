"""What the GPU suite does otherwise on AMD's GPUs: its tables, what it sets, and what errors mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from imagefactory.suite.gpu import table, tolerances
from imagefactory.suite.gpu.context import SuiteRequest, parse_request
from imagefactory.suite.gpu.frameworks import results
from imagefactory.suite.gpu.suite import environment_of
from tests.made.gpu_suite import make_expectations

JAX = {"jax": "0.10.2", "jax-rocm7-plugin": "0.10.2"}


def asked(**changes: Any) -> SuiteRequest:
    return parse_request(
        json.dumps(make_expectations(cuda="rocm7", framework="jax", packages=JAX, **changes))
    )


@pytest.mark.parametrize(
    ("packages", "rocm"),
    [
        (JAX, True),
        ({"torch": "2.9.1+rocm6.4"}, True),
        ({"cupy-rocm-7-0": "14.2.0"}, True),
        ({"onnxruntime-migraphx": "1.27.1"}, True),
        ({"jax": "0.10.2", "jax-cuda12-plugin": "0.10.2"}, False),
    ],
)
def test_a_lock_tells_whose_gpus_it_is_for(packages: dict[str, str], rocm: bool) -> None:
    assert table.is_rocm(packages) is rocm


@pytest.mark.parametrize("check", table.ROCM_NOT_APPLICABLE)
def test_what_is_nvidias_does_not_apply(check: str) -> None:
    assert table.not_applicable("jax", check, JAX) == table.ROCM_NOT_APPLICABLE[check]
    assert check in table.CHECKS


@pytest.mark.parametrize("check", ["vector-add", "native-code", "matmul", "training", "jit", "transfers"])
def test_all_else_applies(check: str) -> None:
    assert table.not_applicable("jax", check, JAX) == ""


def test_of_several_gpus_the_later_parts_see_the_one_that_was_taken() -> None:
    facts = {"device": {"uuid": "GPU-00000000fafbfc00"}, "visible": 2}
    made = environment_of("numbers", asked(), facts, {})
    assert made["ROCR_VISIBLE_DEVICES"] == "GPU-00000000fafbfc00"
    assert "CUDA_VISIBLE_DEVICES" not in made


def test_every_kind_of_number_has_units() -> None:
    assert all(tolerances.applies(kind, "gfx90a") for kind in ("float32", "float16", "bfloat16"))


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("HIP error: hipErrorNoBinaryForGpu", table.NO_KERNEL),
        ("invalid device function", table.NO_KERNEL),
        ("no ROCm-capable device is detected", table.NO_GPU),
        ("Unknown backend: 'rocm' requested", table.NO_GPU),
        ("No HIP GPUs are available", table.NO_GPU),
        ("something else", table.LOAD_FAILED),
    ],
)
def test_what_hip_says_has_a_word(said: str, outcome: str) -> None:
    assert results.classify(RuntimeError(said)) == outcome
