"""HTCondor's commands as the adapter calls them, played by small programs; and `imagefactory gpus`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from imagefactory.errors import ToolError
from imagefactory.schedulers.htcondor.pool import HTCondor
from tests.made.ads import A100, H100, MIG_SLICE, V100, gpu, slot, status
from tests.made.command import Call
from tests.made.errors import fails
from tests.made.programs import Program, calls

NOW = datetime(2026, 11, 22, 6, tzinfo=UTC)
VERSION = "$CondorVersion: 23.9.6 2026-07-12 PackageID: 23.9.6+dfsg-2.1+b10 $\n"
SUBMITTED = "Submitting job(s).\n1 job(s) submitted to cluster 35.\n"
AT_WORK = '[\n{\n  "ClusterId": 35,\n  "JobStatus": 2,\n  "ProcId": 0\n}\n]\n'


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep-1"
    folder.mkdir()
    (folder / "sweep.dag").touch()
    return folder


def test_the_version_is_told(condor: HTCondor, program: Program) -> None:
    program("condor_version", VERSION + "$CondorPlatform: X86_64-Debian_13 $\n")
    assert condor.require() == "23.9.6"
    program("condor_version", "hello\n")
    with fails("condor-output-invalid", message="'hello'"):
        condor.require()


def test_the_inventory_is_what_the_collector_knows(
    condor: HTCondor, program: Program, tmp_path: Path
) -> None:
    program("condor_status", status(slot("gpu01", [gpu("GPU-11111111", A100)])))
    assert [machine.name for machine in condor.inventory(NOW).machines] == ["gpu01"]
    program("condor_status", status())
    assert condor.inventory(NOW).machines == ()
    assert calls(tmp_path)[0][1:] == [
        "condor_status",
        "-const",
        "TotalGPUs > 0 && DynamicSlot =!= true",
        "-json",
    ]


def test_what_is_missing_or_fails_is_said_with_what_to_do(condor: HTCondor, program: Program) -> None:
    with fails("tool-missing", message="condor_status", hint="--inventory FILE"):
        condor.inventory(NOW)
    program("condor_status", fails="Error: communication error\n\x1b[2JFailed to connect\n", code=1)
    with pytest.raises(ToolError) as failed:
        condor.inventory(NOW)
    assert failed.value.code == "condor-command-failed"
    assert "exit code 1" in failed.value.message
    assert failed.value.message.endswith("Error: communication error / [2JFailed to connect")
    assert "the pool does not answer" in failed.value.hint


def test_a_command_that_never_ends_is_ended(programs: Path) -> None:
    (programs / "condor_version").write_text("#!/bin/sh\nwhile :; do :; done\n")
    (programs / "condor_version").chmod(0o755)
    with fails("condor-timeout", message="condor_version"):
        HTCondor(environ={"PATH": str(programs)}, timeout=0.2).require()


def test_a_sweep_is_submitted_in_its_own_folder(
    condor: HTCondor, program: Program, sweep: Path, tmp_path: Path
) -> None:
    program("condor_q", "[\n]\n")
    program("condor_submit_dag", SUBMITTED)
    assert condor.submit(sweep) == "35.0"
    asked, submitted = calls(tmp_path)
    assert asked[1:4] == ["condor_q", "-const", f'JobUniverse == 7 && Iwd == "{sweep}"']
    assert submitted == [
        str(sweep), "condor_submit_dag", "-batch-name", "imagefactory+sweep-1", "sweep.dag"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("there", "options"),
    [
        ((), []),
        (("sweep.dag.condor.sub",), ["-update_submit"]),
        (("sweep.dag.condor.sub", "sweep.dag.nodes.log"), ["-update_submit", "-DoRecovery"]),
        (("sweep.dag.condor.sub", "sweep.dag.nodes.log", "sweep.dag.rescue001"), []),
    ],
)
def test_a_sweep_that_was_begun_is_gone_on_with(
    there: tuple[str, ...],
    options: list[str],
    condor: HTCondor,
    program: Program,
    sweep: Path,
    tmp_path: Path,
) -> None:
    program("condor_q", "")
    program("condor_submit_dag", SUBMITTED)
    for name in there:
        (sweep / name).touch()
    condor.submit(sweep)
    assert calls(tmp_path)[-1][4:] == [*options, "sweep.dag"]


def test_a_sweep_that_runs_is_not_submitted_again(
    condor: HTCondor, program: Program, sweep: Path, tmp_path: Path
) -> None:
    program("condor_q", AT_WORK)
    program("condor_submit_dag", SUBMITTED)
    with fails("sweep-running", message="job 35.0"):
        condor.submit(sweep)
    assert condor.running(sweep)
    assert {words[1] for words in calls(tmp_path)} == {"condor_q"}


def test_a_submission_that_names_no_job_is_no_success(
    condor: HTCondor, program: Program, sweep: Path
) -> None:
    program("condor_q", "")
    program("condor_submit_dag", "all is well\n")
    with fails("condor-output-invalid", message="all is well"):
        condor.submit(sweep)
    program("condor_submit_dag", fails="ERROR: Cannot allocate a cluster id\n", code=1)
    with fails("condor-command-failed", hint="another user than root"):
        condor.submit(sweep)


def test_a_sweep_is_cancelled_by_its_dagman(
    condor: HTCondor, program: Program, sweep: Path, tmp_path: Path
) -> None:
    program("condor_q", AT_WORK)
    program("condor_rm")
    condor.cancel(sweep)
    assert calls(tmp_path)[-1][1:] == ["condor_rm", "35.0"]
    program("condor_q", "")
    condor.cancel(sweep)
    assert not condor.running(sweep)
    assert calls(tmp_path)[-1][1] == "condor_q"


@pytest.mark.parametrize("status", [3, 4])
def test_a_sweep_on_its_way_out_is_not_cancelled_twice(
    status: int, condor: HTCondor, program: Program, sweep: Path
) -> None:
    program("condor_q", AT_WORK.replace('"JobStatus": 2', f'"JobStatus": {status}'))
    program("condor_rm", fails="Job 35.0 not found\n", code=1)
    condor.cancel(sweep)
    assert condor.running(sweep)


def test_a_sweep_that_ends_while_it_is_cancelled_is_cancelled(
    condor: HTCondor, program: Program, programs: Path, sweep: Path, tmp_path: Path
) -> None:
    program("condor_q", AT_WORK)
    program("condor_rm", fails="Job 35.0 not found\n", code=1)
    with fails("condor-command-failed", message="not found"):
        condor.cancel(sweep)
    file = programs / "condor_rm"
    file.write_text(file.read_text().replace("exit 1", f": >{tmp_path}/condor_q.out\nexit 1"))
    condor.cancel(sweep)
    assert not condor.running(sweep)


def test_a_folder_that_an_expression_cannot_hold_is_refused(condor: HTCondor, tmp_path: Path) -> None:
    odd = tmp_path / 'a" || true || "'
    odd.mkdir()
    for do in (condor.submit, condor.running, condor.cancel):
        with fails("sweep-folder-invalid"):
            do(odd)


def test_a_folder_that_is_not_there_is_said(condor: HTCondor, program: Program, tmp_path: Path) -> None:
    program("condor_submit")
    with fails("sweep-not-found", message=str(tmp_path / "none")):
        condor.dry_run(tmp_path / "none" / "x.sub")


# --- imagefactory gpus ---------------------------------------------------------------------------

FOUR = (
    slot("gpu01", [gpu("GPU-11111111", V100), gpu("GPU-22222222", V100)], used=("GPU-11111111",)),
    slot("gpu02", [gpu("GPU-33333333", H100, NvidiaDriver="550.54.15")]),
    slot("gpu03", [gpu("MIG-44444444", MIG_SLICE, DriverVersion=None, MaxSupportedVersion=None)]),
    slot("gpu04", [gpu("GPU-55555555", V100, DriverVersion=11.4)], OfflineGPUs="GPU-66666666"),
)
TABLE = """\
CAPABILITY  GPU                                MEMORY  DRIVER     CUDA  MACHINES  FREE  TOTAL
9.0         NVIDIA H100 80GB HBM3              79 GiB  550.54.15  12.4         1     1      1
8.0         NVIDIA A100-SXM4-40GB MIG 3g.20gb  20 GiB  -          -            1     1      1
7.0         Tesla V100-PCIE-16GB               16 GiB  -          11.4         1     1      1
7.0         Tesla V100-PCIE-16GB               16 GiB  -          12.4         1     1      2

4 machines with 5 GPUs (1 of them MIG slices), 4 free; of cm.example.org, """
MACHINES = """\
MACHINE  FREE  TOTAL  GPUS
gpu01       1      2  2 x Tesla V100-PCIE-16GB (7.0)
gpu02       1      1  1 x NVIDIA H100 80GB HBM3 (9.0)
gpu03       1      1  1 x NVIDIA A100-SXM4-40GB MIG 3g.20gb (8.0)
gpu04       1      1  1 x Tesla V100-PCIE-16GB (7.0)

4 machines with 5 GPUs (1 of them MIG slices), 4 free; of cm.example.org, """


@pytest.fixture
def four(program: Program, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("condor_status", status(*FOUR))
    monkeypatch.setenv("PATH", str(programs))


@pytest.mark.usefixtures("four")
def test_the_pool_is_shown_kind_by_kind(call: Call) -> None:
    said = call("gpus")
    assert (said.code, said.err.split("imagefactory")[0]) == (0, "next: ")
    assert said.out.startswith(TABLE)


@pytest.mark.usefixtures("four")
def test_the_pool_is_shown_machine_by_machine(call: Call) -> None:
    said = call("gpus", "--machines")
    assert (said.code, said.err.split("imagefactory")[0]) == (0, "next: ")
    assert said.out.startswith(MACHINES)


@pytest.mark.usefixtures("four")
def test_a_saved_pool_is_shown_the_same_without_the_pool(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "inventory.json"
    asked = call("gpus", "-o", str(file))
    (tmp_path / "bin" / "condor_status").unlink()
    saved = call("gpus", "--inventory", str(file))
    assert asked.out == saved.out + f"saved as {file}\n"
    found = call("gpus", "--inventory", str(file), "--json").json()
    assert found["format"] == "imagefactory.gpus/1"
    assert [(row["capability"], row["free"], row["total"]) for row in found["types"]] == [
        ("9.0", 1, 1),
        ("8.0", 1, 1),
        ("7.0", 1, 1),
        ("7.0", 1, 2),
    ]
    by_machine = call("gpus", "--inventory", str(file), "--machines").out.splitlines()
    assert by_machine[1].split() == ["gpu01", "1", "2", "2", "x", "Tesla", "V100-PCIE-16GB", "(7.0)"]
    assert call("gpus").code == 6


@pytest.mark.usefixtures("four")
def test_of_two_pools_the_other_one_is_named_and_can_be_asked(call: Call, program: Program) -> None:
    assert call("gpus", "--json").json()["scheduler"] == "htcondor"
    program("scontrol", code=1)
    said = call("gpus")
    assert said.out.startswith(TABLE)
    assert "--scheduler slurm" in said.err
    assert "--scheduler" not in call("gpus", "--scheduler", "htcondor").err.split("next:")[0]
    assert call("gpus", "--scheduler", "slurm").code == 6
    assert call("gpus", "--scheduler", "htcondor", "--probe", "1m").code == 2


def test_a_pool_without_gpus_is_told(
    call: Call,
    program: Program,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    program("condor_status", status(slot("gpu01", [gpu("GPU-11111111", A100)], OfflineGPUs="GPU-11111111")))
    said = call("gpus", "--json")
    assert said.code == 3
    assert "GPU-11111111 is offline" in said.err
    assert json.loads(said.out)["errors"][0]["exit_code"] == 3


# --- plans by an inventory -----------------------------------------------------------------------


def test_a_plan_is_for_the_kinds_of_gpus_of_an_inventory(call: Call, tmp_path: Path) -> None:
    gpus = [
        {"capability": "7.0", "name": "V100", "cuda": "11.4"},
        {"capability": "7.0", "name": "V100", "cuda": "11.4"},
        {"capability": "8.0", "name": "A100", "driver": "550.54.15", "cuda": "12.4"},
        {"capability": "8.0", "name": "A30", "driver": "550.54.15", "cuda": "12.4"},
        {"capability": "9.0", "name": "H100 MIG 1g.10gb", "mig": True},
    ]
    file = tmp_path / "pool.json"
    file.write_text(
        json.dumps({"format": "imagefactory.inventory/1", "machines": [{"name": "gpu01", "gpus": gpus}]})
    )
    planned = call("plan", "--inventory", str(file), "--json", "pytorch-2.3-cu121").json()
    cells = planned["targets"][0]["cells"]
    assert [(cell["gpu"], cell["capability"], cell["driver"], cell["rule"]) for cell in cells] == [
        ("V100", "7.0", "", "driver-floor"),  # CUDA 12 needs driver 525, and 11.4 came with 470
        ("", "8.0", "550.54.15", "code"),
        ("H100 MIG 1g.10gb", "9.0", "", "code"),
    ]
    gpus[2]["cuda"] = "12.2"
    del gpus[2]["driver"], gpus[3]["driver"]
    file.write_text(
        json.dumps({"format": "imagefactory.inventory/1", "machines": [{"name": "gpu01", "gpus": gpus}]})
    )
    said = call("plan", "--inventory", str(file), "--github", "--registry", "", "pytorch-2.3-cu121").out
    jobs = json.loads(said.removeprefix("matrix="))["include"]
    assert [(job["capability"], job["driver"]) for job in jobs] == [("8.0", "")] * 2 + [("9.0", "")]
    avoided = call("plan", "--inventory", str(file), "--machine", "!gpu*", "--json", "pytorch-2.3-cu121")
    cells = avoided.json()["targets"][0]["cells"]
    assert {(cell["status"], cell["skipped_by"][0]["rule"]) for cell in cells} == {("skipped", "avoided")}
    assert {cell["mig"] for cell in cells} == {"", "1g.10gb"}
    sliced = {"name": "gpu01", "gpus": gpus[-1:]}
    file.write_text(json.dumps({"format": "imagefactory.inventory/1", "machines": [sliced]}))
    (cell,) = call("plan", "--inventory", str(file), "--json", "pytorch-2.3-cu121").json()["targets"][0][
        "cells"
    ]
    assert (cell["capability"], cell["mig"]) == ("9.0", "1g.10gb")


@pytest.mark.parametrize(
    "options",
    [
        ("--github", "--json"),
        ("--recorded",),
        ("--strict-drivers",),
        ("--strict-drivers", "--tuples", "a.csv"),
    ],
)
def test_options_that_contradict_are_refused(options: tuple[str, ...], call: Call) -> None:
    assert call("plan", *options).code == 2
