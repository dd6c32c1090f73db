"""A pool's GPUs as a person reads them."""

from __future__ import annotations

from typing import Any

from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.views.sweeps import format_machines, format_pool, gpu_groups, pool_summary
from tests.made.pool import MADE


def gpu(**changes: Any) -> PoolGpu:
    given: dict[str, Any] = {
        "id": "GPU-1",
        "uuid": "GPU-1",
        "name": "NVIDIA A100",
        "capability": "8.0",
        "memory": 40 << 30,
        "driver": "550.54.15",
        "cuda": "12.4",
        "mig": False,
        "free": True,
    }
    return PoolGpu(**{**given, **changes})


def pool(*machines: tuple[PoolGpu, ...], **more: Any) -> Inventory:
    rows = [
        PoolMachine(name=f"gpu{number}", attributes={}, start="", gpus=gpus)
        for number, gpus in enumerate(machines)
    ]
    return Inventory(pool="cm.example.org", taken=MADE, machines=tuple(rows), **more)


OLD = gpu(name="Tesla V100", capability="7.0", memory=16 << 30, driver="", cuda="", free=False)
MIXED = pool((gpu(), gpu(free=False), OLD), (gpu(), gpu(mig=True, memory=0)), notes=("gpu9 tells no GPU",))


def test_each_machine_with_its_kinds_of_gpu() -> None:
    rows = [line.split(None, 3) for line in format_machines(MIXED).splitlines()[:3]]
    assert rows == [
        ["MACHINE", "FREE", "TOTAL", "GPUS"],
        ["gpu0", "1", "3", "2 x NVIDIA A100 (8.0), 1 x Tesla V100 (7.0)"],
        ["gpu1", "2", "2", "1 x NVIDIA A100 (8.0), 1 x NVIDIA A100 (MIG slice) (8.0)"],
    ]
    assert format_machines(MIXED).endswith("\n\ngpu9 tells no GPU")


def test_kinds_newest_first_and_slices_after_whole_gpus() -> None:
    lines = format_pool(pool((OLD, gpu(capability="10.0", name="B200")), MIXED.machines[1].gpus)).splitlines()
    assert [" ".join(line.split()) for line in lines[1:5]] == [
        "10.0 B200 40 GiB 550.54.15 12.4 1 1 1",
        "8.0 NVIDIA A100 40 GiB 550.54.15 12.4 1 1 1",
        "8.0 NVIDIA A100 (MIG slice) - 550.54.15 12.4 1 1 1",
        "7.0 Tesla V100 16 GiB - - 1 0 1",
    ]


def test_a_kind_counts_its_machines_once_and_all_its_gpus() -> None:
    (row,) = format_pool(pool((gpu(), gpu(free=False)), (gpu(),))).splitlines()[1:2]
    assert row.split()[-3:] == ["2", "2", "3"]


def test_a_gpu_that_htcondor_simulates_is_marked() -> None:
    made_up = gpu(uuid="GPU-a8223334-4445-5667-899a-abbccddeeff0")
    inventory = pool((made_up, gpu()))
    assert {kind.simulated: kind.gpus for kind in gpu_groups(inventory)} == {True: 1, False: 1}
    assert "NVIDIA A100 (simulated)" in format_pool(inventory)
    assert "1 x NVIDIA A100 (simulated) (8.0)" in format_machines(inventory)


def test_numbers_stand_at_the_right() -> None:
    few, many = format_machines(pool((gpu(),), (gpu(),) * 10)).splitlines()[1:3]
    assert few.index("1 x ") == many.index("10 x ")
    assert few.rindex(" 1  1 x") == many.rindex("10  10 x")


def test_one_and_many() -> None:
    when = "2026-11-22 06:00 UTC"
    assert pool_summary(pool((gpu(),))) == f"1 machine with 1 GPU, 1 free; of cm.example.org, {when}"
    assert pool_summary(MIXED) == (
        f"2 machines with 5 GPUs (1 of them MIG slices), 3 free; of cm.example.org, {when}"
    )
    assert pool_summary(pool()) == f"0 machines with 0 GPUs, 0 free; of cm.example.org, {when}"
