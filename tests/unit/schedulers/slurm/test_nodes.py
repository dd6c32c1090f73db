"""What small jobs find out about GPUs, and how it is remembered."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.schedulers.inventory import read_inventory, write_inventory
from imagefactory.schedulers.slurm.nodes import (
    FEATURES,
    ProbedGpu,
    SlurmGpuType,
    fill,
    gpu_types_of,
    parse_answer,
    parse_nodes,
    probe_all,
    probe_file,
    query_inventory,
    read_probed,
    run,
    write_probed,
)
from tests.made.errors import fails
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
        with fails("probe-output-invalid"):
            parse_answer(text, SlurmGpuType(type="ours"))


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
    assert probe_file({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == Path("/s/imagefactory/slurm.json")
    probe_file(environ).write_text("{}")
    with fails("probe-file-invalid", message="slurm.json"):
        read_probed(environ)
    (tmp_path / "file").touch()
    with fails("cannot-read-file", message="slurm.json"):
        write_probed({"HOME": str(tmp_path / "file")}, (OURS,))


# --- Slurm's commands where they are missing, fail or do not answer.


def test_what_it_prints_or_why_not(programs: Path, program: Program) -> None:
    environ = {"PATH": str(programs)}
    with fails("tool-missing", message="squeue", hint="login node"):
        run(["squeue"], environ)
    program("squeue", "1|RUNNING\n")
    assert run(["squeue"], environ) == "1|RUNNING\n"
    program("squeue", fails="first\nsqueue: error: \x1b[2JUnable to contact slurm controller\n", code=1)
    with fails("slurm-command-failed", message="Unable to contact"):
        run(["squeue"], environ)
    program("squeue", code=3)
    with fails("slurm-command-failed", message="exit code 3"):
        run(["squeue"], environ)


def test_one_that_does_not_answer(programs: Path) -> None:
    (programs / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    (programs / "squeue").chmod(0o755)
    with fails("slurm-timeout", message="squeue"):
        run(["squeue"], {"PATH": f"{programs}:/bin:/usr/bin"}, timeout=0.2)


# --- What Slurm's nodes tell, as scontrol of Slurm 22.05 and 24.11 prints it.


def test_a_type_that_names_a_known_gpu_tells_its_capability() -> None:
    (machine,) = parse_nodes(f"{node()}\n", NOW).machines
    assert [(gpu.id, gpu.name, gpu.capability, gpu.free) for gpu in machine.gpus] == [
        ("a1/0", "a100", "8.0", False),
        ("a1/1", "a100", "8.0", True),
    ]
    assert {gpu.host for gpu in machine.gpus} == {"amd64"}
    assert machine.attributes == {"arch": "x86_64", FEATURES: "a100,zen3", "cpus": 64, "memory": 515000}


@pytest.mark.parametrize(
    ("gres", "wanted"),
    [
        ("gpu:nvidia_h100_80gb_hbm3:4(S:0-1)", ["9.0"] * 4),
        ("gpu:v100:1(S:0),gpu:rtx_2080_ti:2(S:1),license:3", ["7.0", "7.5", "7.5"]),
        ("gpu:2", ["", ""]),
        ("gpu:ours:1", [""]),
        ("gpu:a100_1g.5gb:2", ["8.0", "8.0"]),
    ],
)
def test_gres_as_sites_write_it(gres: str, wanted: list[str]) -> None:
    (machine,) = parse_nodes(node(gres=gres, used="gpu:0"), NOW).machines
    assert [gpu.capability for gpu in machine.gpus] == wanted
    assert len({gpu.id for gpu in machine.gpus}) == len(wanted)
    assert {gpu.mig for gpu in machine.gpus} == {"1g.5gb" in gres}


@pytest.mark.parametrize("gres", ["(null)", "", "mps:100", "gpu:a100:0"])
def test_nodes_without_gpus_are_none(gres: str) -> None:
    assert parse_nodes(node(gres=gres), NOW).machines == ()


@pytest.mark.parametrize(
    ("state", "taken"),
    [
        ("IDLE", True),
        ("MIXED+PLANNED", True),
        ("ALLOCATED", True),
        ("IDLE+POWERED_DOWN", True),
        ("IDLE*", True),
    ]
    + [(state, False) for state in ("DOWN*", "IDLE+DRAIN", "MIXED+DRAIN", "DOWN+NOT_RESPONDING", "FUTURE")],
)
def test_a_node_that_takes_no_jobs_is_left_out_and_said(state: str, taken: bool) -> None:
    told = parse_nodes(node(State=state), NOW)
    assert bool(told.machines) == taken
    assert [note.partition(" takes no jobs: ")[0] for note in told.notes] == (
        [] if taken else ["a1 (gpu:a100:2)"]
    )


def test_what_a_person_wrote_as_a_reason_is_no_field() -> None:
    (machine,) = parse_nodes(node(Reason="was broken Gres=gpu:h100:8"), NOW).machines
    assert [gpu.name for gpu in machine.gpus] == ["a100", "a100"]


def test_scontrol_that_is_missing_or_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with fails("tool-missing", message="scontrol"):
        query_inventory({"PATH": str(tmp_path)}, NOW)
    program = tmp_path / "scontrol"
    program.write_text(
        "#!/bin/sh\necho slurm_load_node error: Unable to contact slurm controller >&2\nexit 1\n"
    )
    program.chmod(0o755)
    with fails("slurm-command-failed", message="Unable to contact slurm controller"):
        query_inventory({"PATH": str(tmp_path)}, NOW)
    program.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\ncat <<X\n{node()}\nX\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = query_inventory({"PATH": f"{tmp_path}:/bin:/usr/bin"}, NOW)
    assert len(found.gpus) == 2
    assert (tmp_path / "asked").read_text() == "show node --detail --oneliner\n"


def test_what_they_tell_can_be_kept_in_a_file(tmp_path: Path) -> None:
    text = "\n".join([node(), node("q1", gres="gpu:2", used="gpu:0", Arch="aarch64")])
    told = parse_nodes(text, NOW)
    write_inventory(tmp_path / "cluster.json", told)
    assert read_inventory(tmp_path / "cluster.json") == told
