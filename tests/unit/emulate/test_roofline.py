"""Seconds of an operation by a data sheet: the longer of its arithmetic and its traffic, never none."""

from __future__ import annotations

import pytest

from imagefactory.emulate.roofline import KERNEL, Profile, copying, exchanging, parse_profile, seconds

GPU = Profile(
    name="A100-SXM4-40GB",
    device="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    processors=108,
    memory=40 << 30,
    context=512 << 20,
    flops={"fp64": 9.7e12, "fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    bandwidth=1555e9,
    link=32e9,
    peer=300e9,
    basis="estimated",
)


@pytest.mark.parametrize(
    ("kind", "flops", "moved", "expected"),
    [
        ("fp16", 312e12, 0, 1.0),
        ("tf32", 156e12, 1555e9, 1.0),
        ("fp32", 19.5e12, 4 * 1555e9, 4.0),
        ("fp32", 0, 1555e6, 1e-3),
        ("fp32", 0, 4, KERNEL),
    ],
)
def test_the_longer_of_arithmetic_and_traffic(kind: str, flops: float, moved: float, expected: float) -> None:
    assert seconds(GPU, kind, flops, moved) == pytest.approx(expected)


def test_a_kind_that_a_gpu_has_not_runs_as_fp32() -> None:
    old = Profile(**{**GPU.__dict__, "flops": {"fp32": 15.7e12, "fp16": 125e12}})
    assert seconds(old, "bf16", 15.7e12, 0) == pytest.approx(1.0)
    assert seconds(old, "fp16", 125e12, 0) == pytest.approx(1.0)


def test_a_copy_goes_at_the_pace_of_the_link() -> None:
    assert copying(GPU, 64e9) == pytest.approx(2.0)
    assert copying(GPU, 1) == KERNEL
    assert exchanging(GPU, 600e9) == pytest.approx(2.0)


def test_a_profile_comes_as_json() -> None:
    row = {**GPU.__dict__, "capability": "8.0"}
    assert parse_profile(row) == GPU
    with pytest.raises(KeyError):
        parse_profile({name: value for name, value in row.items() if name != "link"})
    with pytest.raises(ValueError, match="unpack"):
        parse_profile({**row, "capability": "8"})
