"""What small jobs find out about GPUs, and how it is remembered."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.errors import ToolError, UsageError
from imagefactory.schedulers.slurm.nodes import (
    ProbedGpu,
    SlurmGpuType,
    fill,
    gpu_types_of,
    parse_answer,
    parse_nodes,
    place_of,
    probe_all,
    read_probed,
    write_probed,
)
from tests.made.programs import Program, calls
from tests.made.slurm import NOW, node

CLUSTER = parse_nodes(
    "\n".join([
        node("o1", gres="gpu:ours:2", used="gpu:0"),
        node("o2", gres="gpu:ours:1", used="gpu:0"),
        node("p1", gres="gpu:1", used="gpu:0"),
        node("s1", gres="gpu:a100_1g.5gb:1", used="gpu:0"),
    ]),
    NOW,
)  # fmt: skip
OURS = ProbedGpu(node="o2", type="ours", capability="8.9", memory=48 << 30, driver="550.54.15")
PLAIN = ProbedGpu(node="p1", type="", capability="7.5", memory=16 << 30, driver="535.54.03")


def test_a_type_is_asked_once_and_gpus_without_one_in_each_node() -> None:
    assert [str(kind) for kind in gpu_types_of(CLUSTER)] == [
        "the GPUs of p1",
        "type a100_1g.5gb",
        "type ours",
    ]


def test_what_one_said_holds_for_its_type_and_its_driver_for_its_node() -> None:
    found = fill(CLUSTER, (OURS, PLAIN))
    told = {
        machine.name: [(gpu.capability, gpu.driver) for gpu in machine.gpus] for machine in found.machines
    }
    assert told == {
        "o1": [("8.9", ""), ("8.9", "")],
        "o2": [("8.9", "550.54.15")],
        "p1": [("7.5", "535.54.03")],
        "s1": [("8.0", "")],
    }
    assert {gpu.name for gpu in found.gpus} == {"ours", "", "a100_1g.5gb"}
    assert fill(CLUSTER, ()) == CLUSTER


def test_an_answer_is_read_strictly() -> None:
    assert parse_answer("o2\n8.9, 49152, 550.54.15\n", SlurmGpuType(type="ours")) == OURS
    for memory in ("[N/A]", "[Not Supported]"):  # GB10 has the machine's
        found = parse_answer(f"g1\n12.1, {memory}, 580.95.05\n", SlurmGpuType(type="gb10"))
        assert (found.capability, found.memory) == ("12.1", 0)
    for text in (
        "",
        "o2\n",
        "o2\nNo devices were found\n",
        "o2\n[Unknown Error], 1, 550.54.15\n",
        "o2\n0.0, 1, 550.54.15\n",
        "a\nb\nc\n",
    ):
        with pytest.raises(ToolError) as caught:
            parse_answer(text, SlurmGpuType(type="ours"))
        assert caught.value.code == "probe-output-invalid"


def test_a_gpu_without_memory_of_its_own_has_the_machines() -> None:
    shared = ProbedGpu(node="o2", type="ours", capability="12.1", memory=0, driver="580.95.05")
    found = {machine.name: machine for machine in fill(CLUSTER, (shared,)).machines}
    memory = found["o2"].attributes["memory"]
    assert memory
    assert [gpu.memory for gpu in found["o2"].gpus] == [int(memory) << 20]


def test_each_kind_is_asked_by_a_job_that_waits_no_longer(
    programs: Path, program: Program, tmp_path: Path
) -> None:
    environ = {"PATH": str(programs)}
    program("srun", "o2\n8.9, 49152, 550.54.15\n")
    found, faults = probe_all(
        (SlurmGpuType(type="ours"), SlurmGpuType(type="", node="p1")), environ, timedelta(minutes=5)
    )
    assert (found[0], len(found), faults) == (OURS, 2, ())
    asked = sorted(call[2:] for call in calls(tmp_path))
    assert {"--immediate=300", "--gres=gpu:ours:1"} <= {*asked[1]}
    assert {"--immediate=300", "--gres=gpu:1", "--nodelist=p1"} <= {*asked[0]}
    program(
        "srun", fails="srun: error: Unable to allocate resources: Immediate execution impossible\n", code=1
    )
    found, faults = probe_all((SlurmGpuType(type="ours"),), environ, timedelta(minutes=5))
    assert found == ()
    assert "Immediate execution impossible" in faults[0][1].message


def test_it_is_remembered_by_the_user(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"}
    assert read_probed(environ) == ()
    write_probed(environ, (OURS, PLAIN))
    newer = ProbedGpu(node="o2", type="ours", capability="8.9", memory=48 << 30, driver="560.35.03")
    write_probed(environ, (newer,))
    assert set(read_probed(environ)) == {newer, PLAIN}
    assert place_of({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == Path("/s/imagefactory/slurm.json")
    place_of(environ).write_text("{}")
    with pytest.raises(UsageError) as caught:
        read_probed(environ)
    assert caught.value.code == "probe-file-invalid"
    assert "slurm.json" in caught.value.message
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as caught:
        write_probed({"HOME": str(tmp_path / "file")}, (OURS,))
    assert caught.value.code == "cannot-read-file"
    assert "slurm.json" in caught.value.message
