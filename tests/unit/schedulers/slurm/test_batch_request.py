"""What Slurm is asked for so that a job gets one of some GPUs, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.schedulers.pool import Inventory, PoolGpu
from imagefactory.schedulers.slurm.batch import request_any_gpu, request_gpu_count
from imagefactory.schedulers.slurm.nodes import parse_nodes
from tests.made.slurm import NOW, node


def cluster(*rows: tuple[str, str, str]) -> Inventory:
    lines = [node(name, gres=gres, used="gpu:0", ActiveFeatures=features) for name, gres, features in rows]
    return parse_nodes("\n".join(lines), NOW)


A100, V100 = ("a1", "gpu:a100:4", "zen,fast"), ("v1", "gpu:v100:2", "skylake")


@pytest.mark.parametrize(
    ("rows", "wanted", "options"),
    [
        ([A100, V100], ("8.0",), ("--gres=gpu:a100:1",)),
        ([("a1", "gpu:a100:2,gpu:v100:2", "x")], ("7.0",), ("--gres=gpu:v100:1",)),
        ([A100, V100, ("h1", "gpu:h100:1", "fast")], ("8.0", "9.0"), ("--gres=gpu:1", "--constraint=fast")),
        ([A100, V100, ("h1", "gpu:h100:1", "skylake")], ("8.0", "9.0"), ("--gres=gpu:1", "--exclude=v1")),
        ([A100, ("h1", "gpu:h100:1", "x")], ("8.0", "9.0"), ("--gres=gpu:1",)),
        ([A100], ("9.0",), ()),
    ],
)
def test_one_gpu(rows: list[tuple[str, str, str]], wanted: tuple[str, ...], options: tuple[str, ...]) -> None:
    assert request_any_gpu(cluster(*rows), lambda gpu: gpu.capability in wanted) == options


def test_where_nodes_mix_them_the_commonest_type_is_asked_for() -> None:
    mixed = cluster(("a1", "gpu:a100:1,gpu:h100:2,gpu:v100:1", "x"))
    assert request_gpu_count(mixed, lambda gpu: gpu.capability in ("8.0", "9.0")) == ((), ())
    assert request_any_gpu(mixed, lambda gpu: gpu.capability in ("8.0", "9.0")) == ("--gres=gpu:h100:1",)


def test_without_a_type_nodes_are_told_apart() -> None:
    """A GPU of no type whose capability somebody knows from elsewhere."""
    unknown = cluster(("a1", "gpu:2", "zen"), ("v1", "gpu:v100:1", "old"))
    told = replace(
        unknown,
        machines=tuple(
            replace(machine, gpus=tuple(known(gpu) for gpu in machine.gpus)) for machine in unknown.machines
        ),
    )
    assert request_any_gpu(told, lambda gpu: gpu.capability == "8.0") == ("--gres=gpu:1", "--constraint=zen")


def known(gpu: PoolGpu) -> PoolGpu:
    return replace(gpu, capability=gpu.capability or "8.0")


def test_several_gpus_of_one_node() -> None:
    found = request_gpu_count(cluster(A100, V100), lambda gpu: gpu.capability == "7.0", 2)
    assert found is not None
    assert (found[0], len(found[1])) == (("--gres=gpu:v100:2",), 2)
    assert request_gpu_count(cluster(A100, V100), lambda gpu: gpu.capability == "7.0", 3) is None
