"""Seconds of an operation: the longer of its arithmetic and its traffic; between what was measured too."""

from __future__ import annotations

import math
from typing import Any

import pytest

from imagefactory.extras.emulate.inside.roofline import (
    Profile,
    copying,
    exchanging,
    parse_profile,
    read,
    seconds,
)

RATES = {
    **{
        f"{what}-{kind}": rate
        for what in ("product", "convolution", "backward")
        for kind, rate in {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12}.items()
    },
    "move": 1555e9,
    "up-pinned": 32e9,
    "peer": 300e9,
}
ROW: dict[str, Any] = {
    "name": "A100-SXM4-40GB",
    "device": "NVIDIA A100-SXM4-40GB",
    "capability": "8.0",
    "processors": 108,
    "memory": 40 << 30,
    "context": 512 << 20,
    "kernel": 2e-6,
    "launch": 5e-6,
    "curves": {name: [[rate, 1.0]] for name, rate in RATES.items()},
    "basis": "estimated",
}
GPU = parse_profile(ROW)
CURVE = ((1e6, 1e-5), (1e8, 1e-4), (1e9, 1e-3))


@pytest.mark.parametrize(
    ("kind", "flops", "moved", "expected"),
    [
        ("fp16", 312e12, 0, 1.0),
        ("tf32", 156e12, 1555e9, 1.0),
        ("fp32", 19.5e12, 4 * 1555e9, 4.0),
        ("fp32", 0, 1555e6, 1e-3),
        ("fp32", 0, 4, 2e-6),
    ],
)
def test_the_longer_of_arithmetic_and_traffic(kind: str, flops: float, moved: float, expected: float) -> None:
    for what in ("product", "convolution", "backward"):
        assert seconds(GPU, what, kind, flops, moved) == pytest.approx(expected)


def test_a_kind_that_a_gpu_has_not_runs_as_fp32() -> None:
    assert seconds(GPU, "product", "bf16", 19.5e12, 0) == pytest.approx(1.0)


def test_attention_runs_as_products_where_nobody_measured_it() -> None:
    assert seconds(GPU, "attention", "fp16", 312e12, 0) == pytest.approx(1.0)
    met = parse_profile({**ROW, "curves": {**ROW["curves"], "attention-fp16": [[1e12, 1.0]]}})
    assert seconds(met, "attention", "fp16", 1e12, 0) == pytest.approx(1.0)
    assert seconds(met, "attention_backward", "fp16", 312e12, 0) == pytest.approx(1.0)


def test_a_copy_goes_at_the_pace_of_its_way() -> None:
    assert copying(GPU, "up-pinned", 64e9) == pytest.approx(2.0)
    assert copying(GPU, "up-pinned", 1) == 2e-6
    assert exchanging(GPU, 600e9) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (0, 0.0),
        (5e5, 5e-6),  # below: at the pace of the smallest
        (1e6, 1e-5),
        (1e7, math.sqrt(1e-5 * 1e-4)),  # between: half of the way by logarithms
        (1e8, 1e-4),
        (1e9, 1e-3),
        (4e9, 4e-3),  # beyond: at the pace of the largest
    ],
)
def test_what_was_measured_holds_and_what_lies_between_follows(work: float, expected: float) -> None:
    assert read(CURVE, work) == pytest.approx(expected)


def test_of_what_was_measured_each_operation_has_its_own() -> None:
    own = {"backward-fp32": [[1e9, 1.0]], "convolution-fp32": [[1e9, 2.0]], "product-fp32": [[1e9, 3.0]]}
    met = parse_profile({**ROW, "curves": {**ROW["curves"], **own}})
    times = [seconds(met, what, "fp32", 1e9, 0) for what in ("backward", "convolution", "product")]
    assert times == pytest.approx([1.0, 2.0, 3.0])


def test_a_profile_comes_as_json() -> None:
    assert isinstance(GPU, Profile)
    assert GPU.capability == (8, 0)
    with pytest.raises(KeyError):
        parse_profile({name: value for name, value in ROW.items() if name != "kernel"})
    with pytest.raises(ValueError, match="unpack"):
        parse_profile({**ROW, "capability": "8"})
