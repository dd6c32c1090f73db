"""The arrays that a sweep becomes, and the folder that its jobs share."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.schedulers.htcondor.node.post import NodeFault
from imagefactory.schedulers.pool import Inventory, PoolGpu
from imagefactory.schedulers.slurm.batch import (
    JOBS,
    RUNNER,
    JobArray,
    SlurmNodeJob,
    SlurmSweepJobs,
    batches_of,
    excluded,
    fits,
    format_batch,
    jobs_of,
    next_number,
    note_tasks,
    read_jobs,
    read_row,
    read_tasks,
    request_any_gpu,
    request_gpu_count,
    run_limit,
    waiting,
    with_job_shares,
    write_sweep_files,
)
from imagefactory.schedulers.slurm.nodes import parse_nodes
from imagefactory.verify.kit.program import EXPECTATIONS, KIT, suite_digest
from imagefactory.verify.suite_files import suite_digest as own_digest
from tests.made.errors import fails
from tests.made.kit import SUBJECT
from tests.made.slurm import NOW, node
from tests.made.slurm_sweep import sweep, sweep_node
from tests.made.sweep import pool_gpu

CLUSTER = parse_nodes("\n".join([node("a1"), node("v1", gres="gpu:v100:1", used="gpu:0")]), NOW)


def job(name: str = "tiny", **changes: Any) -> SlurmNodeJob:
    row: dict[str, Any] = {
        "node": name,
        "capability": "8.0",
        "memory": 100,
        "seconds": 90,
        "part": "",
        "processor": "amd64",
        **changes,
    }
    return SlurmNodeJob(**row)


def test_a_job_runs_as_long_as_its_suite_and_image_take_and_no_longer_than_its_limit() -> None:
    made = jobs_of(sweep(sweep_node(), idle=timedelta(minutes=5), retries=3))
    assert (made.idle, made.retries) == (300, 3)
    assert (made.jobs[0].memory, made.jobs[0].seconds, made.jobs[0].processor) == (5121, 4600, "amd64")
    assert jobs_of(sweep(sweep_node(), run=timedelta(minutes=1))).jobs[0].seconds == 60
    (limits, timeout) = (sweep(sweep_node()).limits, sweep_node().timeout)
    assert run_limit(limits, timeout) == timedelta(seconds=4600)
    assert run_limit(limits, timeout, timedelta(hours=2)) == timedelta(hours=2)


def test_jobs_that_ask_alike_are_one_array() -> None:
    jobs = [job("a"), job("b", capability="7.0"), job("c"), job("d", memory=200), job("e", capability="9.0")]
    found = [(batch.options, [one.node for one in batch.jobs]) for batch in batches_of(jobs, CLUSTER)]
    assert found == [
        (("--gres=gpu:a100:1",), ["a", "c"]),
        (("--gres=gpu:v100:1",), ["b"]),
        (("--gres=gpu:a100:1",), ["d"]),
        ((), ["e"]),
    ]


def test_a_machine_that_failed_two_nodes_gets_no_more_of_them() -> None:
    cluster = parse_nodes("\n".join([node("a1"), node("a2")]), NOW)
    (batch,) = batches_of([job("a")], cluster)
    faults = [NodeFault("a1", name, "1", 7, "no GPU") for name in ("x", "y")]
    (without,) = batches_of([job("a")], cluster, faults)
    assert without.options == (*batch.options, "--exclude=a1")
    assert without.machines == batch.machines == ("a1", "a2")
    every = [*faults, *(NodeFault("a2", name, "1", 7, "no GPU") for name in ("x", "y"))]
    assert batches_of([job("a")], cluster, every)[0].options == batch.options


def test_machines_that_are_avoided_get_no_job() -> None:
    """Also none with another driver than the oldest, while that has a GPU free."""
    nodes = [node("a1"), node("a2"), node("b1", used="gpu:a100:4(IDX:0-3)")]
    cluster = parse_nodes("\n".join(nodes), NOW)
    drivers = {"a1": "550.54.15", "a2": "535.54.03", "b1": "470.57.02"}
    cluster = replace(
        cluster,
        machines=tuple(
            replace(one, gpus=tuple(replace(gpu, driver=drivers[one.name]) for gpu in one.gpus))
            for one in cluster.machines
        ),
    )

    def starts(made: SlurmNodeJob, *patterns: str) -> tuple[str, tuple[str, ...]]:
        """Where its jobs start, and where what failed there may go."""
        (batch,) = batches_of([made], cluster, patterns=patterns)
        assert {*batch.machines, *batch.excluded} == {"a1", "a2", "b1"}
        return " ".join(sorted({"a1", "a2", "b1"} - {*excluded(batch.options)})), batch.machines

    every = ("a1", "a2", "b1")
    assert starts(job()) == ("a1 a2 b1", every)
    assert starts(job(), "a*") == ("a1 a2", ("a1", "a2"))
    assert starts(job(), "a*", "!a1") == ("a2", ("a2",))
    assert starts(job(first="535.54.03")) == ("a2", every)
    assert starts(job(first="470.57.02")) == ("a1 a2 b1", every)  # all are busy there
    assert starts(job(first="470.57.02", only=True)) == ("b1", ("b1",))
    assert batches_of([job(first="470.57.02", only=True)], cluster, patterns=("!b1",))[0].options == ()
    faults = [NodeFault(on, name, "1", 7, "no GPU") for on in ("a2", "of-old") for name in ("x", "y")]
    (batch,) = batches_of([job(first="535.54.03")], cluster, faults)
    assert (excluded(batch.options), batch.machines) == (("a2",), every)  # sbatch knows no of-old
    (batch,) = batches_of([job()], cluster, faults, ("!a2",))
    assert (excluded(batch.options), batch.machines) == (("a2",), ("a1", "b1"))
    (batch,) = batches_of([job()], cluster, faults, ("a2",))  # the only one that is left
    assert (excluded(batch.options), batch.machines) == (("a1", "b1"), ("a2",))


@pytest.mark.parametrize(
    ("sizes", "at_once", "shares"),
    [
        ((5, 9), 0, [(0, 0), (0, 0)]),
        ((5, 9), 5, [(2, 0), (3, 1)]),
        ((5, 9, 1), 2, [(1, 0), (1, 1), (1, 0)]),  # the third waits for the first
    ],
)
def test_no_more_jobs_are_at_work_than_were_asked_for(
    sizes: tuple[int, ...], at_once: int, shares: list[tuple[int, int]]
) -> None:
    batches = [JobArray(options=(), jobs=(job(),) * size) for size in sizes]
    assert [(one.share, one.lane) for one in with_job_shares(batches, at_once)] == shares


def test_an_array_is_no_longer_than_slurm_takes() -> None:
    batches = batches_of([job(f"n{number}") for number in range(2400)], CLUSTER)
    assert [len(batch.jobs) for batch in batches] == [1000, 1000, 400]


@pytest.mark.parametrize(
    ("wanted", "gpu", "will"),
    [
        ({}, {}, True),
        ({}, {"capability": "7.0"}, False),
        ({}, {"mig": True}, False),
        ({"part": "1g.10gb"}, {"mig": True, "name": "h100_1g.10gb"}, True),
        ({"part": "1g.10gb"}, {"mig": True, "name": "h100_2g.20gb"}, False),
        ({"part": "1g.10gb"}, {}, False),
        ({}, {"host": "arm64"}, False),
        ({"processor": "arm64"}, {"host": "arm64"}, True),
        ({"processor": "arm64"}, {"host": ""}, True),
    ],
)
def test_which_gpus_will_do(wanted: dict[str, Any], gpu: dict[str, Any], will: bool) -> None:
    assert fits(job(**wanted), pool_gpu(**gpu)) is will


def test_the_script_names_its_nodes(tmp_path: Path) -> None:
    batch = JobArray(options=("--gres=gpu:a100:1",), jobs=(job("one"), job("two")), machines=("gpu1", "gpu2"))
    jobs = SlurmSweepJobs(idle=600, retries=2, jobs=batch.jobs)
    text = format_batch(batch, 7, jobs)
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--array=0-1", "--time=2", "--mem=100M", "--gres=gpu:a100:1", "--output=log/7-%a"} <= {*options}
    assert f"--deadline=now+{waiting(batch, jobs)}" in options
    assert waiting(batch, jobs) == 720
    (tmp_path / "task.sh").write_text('echo "$*"')
    for index, name in enumerate(("one", "two")):
        environ = {"SLURM_ARRAY_TASK_ID": str(index), "PATH": "/usr/bin:/bin"}
        said = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
        )
        assert said.stdout == f"7 {name} 2 gpu1 gpu2 \n"
    after = format_batch(replace(batch, share=1, excluded=("h1", "h2")), 7, jobs, after=("12", 99))
    options = [line.removeprefix("#SBATCH ") for line in after.splitlines() if line.startswith("#SBATCH")]
    assert {"--array=0-1%1", "--dependency=afterany:12", "--deadline=now+99"} <= {*options}
    assert after.splitlines()[-1].endswith("'gpu1 gpu2' 'h1 h2'")
    assert waiting(replace(batch, share=1), jobs) == 840  # the second may wait for the first


def test_the_folder_is_whole_with_its_last_file(tmp_path: Path) -> None:
    digest = f"127.0.0.1:5000/tiny@{SUBJECT.index}"
    made = sweep(sweep_node(), sweep_node("tiny-sm90", f"docker://{digest}", capability="9.0"))
    texts = {one.name: {KIT: b"{}", EXPECTATIONS: b"[]"} for one in made.nodes}
    write_sweep_files(tmp_path, replace(made, container="pyxis"), texts)
    assert (tmp_path / RUNNER).read_text() == "pyxis\n"
    write_sweep_files(tmp_path, made, texts)
    assert (tmp_path / RUNNER).read_text() == "apptainer\n"
    assert (tmp_path / "nodes/tiny-sm80/image").read_text() == "/shared/tiny.sif\n"
    assert (tmp_path / "nodes/tiny-sm90/image").read_text() == f"{digest}\n"
    assert (tmp_path / "nodes/tiny-sm90" / EXPECTATIONS).read_bytes() == b"[]"
    assert suite_digest(tmp_path / "suite") == own_digest()
    assert {path.name for path in (tmp_path / "kit").glob("*.py")} >= {"program.py", "start.py"}
    assert read_jobs(tmp_path) == jobs_of(made)
    with fails("cannot-write-file", message="image"):
        write_sweep_files(tmp_path / "nodes/tiny-sm80/image", made, texts)


def test_each_node_knows_which_tasks_it_was(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "nodes" / name).mkdir(parents=True)
    assert next_number(tmp_path) == 1
    note_tasks(tmp_path, 1, JobArray(options=(), jobs=(job("one"), job("two"))))
    (tmp_path / "batch-1.sh").touch()
    (tmp_path / "batch-10.sh").touch()
    note_tasks(tmp_path, next_number(tmp_path), JobArray(options=(), jobs=(job("two"),)))
    assert list(read_tasks(tmp_path / "nodes/two")) == [(1, 1), (11, 0)]
    assert list(read_tasks(tmp_path / "nodes/none")) == []


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert read_row(tmp_path / JOBS, SlurmSweepJobs) is None
    for text in ("{", "[]", json.dumps({"format": 1, "idle": "x"})):
        (tmp_path / JOBS).write_text(text)
        with fails("sweep-file-invalid", message="jobs.json"):
            read_row(tmp_path / JOBS, SlurmSweepJobs)


# --- What Slurm is asked for so that a job gets one of some GPUs, and no other.


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
