"""What Slurm's nodes tell, as scontrol of Slurm 22.05 and 24.11 prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import ToolError
from imagefactory.schedulers.inventory import read_inventory, write_inventory
from imagefactory.schedulers.slurm.nodes import FEATURES, parse_nodes, query_inventory
from tests.made.slurm import NOW, node


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
    with pytest.raises(ToolError) as caught:
        query_inventory({"PATH": str(tmp_path)}, NOW)
    assert caught.value.code == "tool-missing"
    assert "scontrol" in caught.value.message
    program = tmp_path / "scontrol"
    program.write_text(
        "#!/bin/sh\necho slurm_load_node error: Unable to contact slurm controller >&2\nexit 1\n"
    )
    program.chmod(0o755)
    with pytest.raises(ToolError) as caught:
        query_inventory({"PATH": str(tmp_path)}, NOW)
    assert caught.value.code == "slurm-command-failed"
    assert "Unable to contact slurm controller" in caught.value.message
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
