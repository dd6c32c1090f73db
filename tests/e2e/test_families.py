"""The newest target of every family builds from PyPI's real wheels and passes its smoke test."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.conftest import Factory

NEWEST = (
    "onnxruntime-1.31-cu13",
    "jax-0.12.0-cu13-py313",
    "tensorflow-2.21-cu12",
    "pytorch-2.15-cu132",
)


@pytest.mark.parametrize("target", NEWEST)
def test_the_newest_target_passes_its_smoke_test(factory: Factory, target: str) -> None:
    try:
        built = factory.build(target)
        assert built["smoke"]["passed"] is True
        assert built["gpu"] == "not-tested"
        image = built["image"]["name"]
    finally:  # some 12 GB each: freed before the next
        family, _, tag = target.partition("-")
        factory.run("store", "rm", f"{family}:{tag}", code=None)
        factory.run("store", "gc")
        shutil.rmtree(factory.cache / "wheels", ignore_errors=True)
    assert image == f"{family}:{tag}"
