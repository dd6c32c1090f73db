"""The DAG of a sweep: its text, what may stand in it, and the files beside it."""

from __future__ import annotations

import io
import json
import re
import stat
import tarfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import UsageError
from imagefactory.schedulers.faults import node_directory
from imagefactory.schedulers.htcondor.dag import (
    format_common,
    format_dag,
    make_suite_tar,
    site_lines,
    write_sweep,
)
from imagefactory.schedulers.htcondor.node.post import read_places
from imagefactory.schedulers.pool import ImageKind, MachinesByCapability
from imagefactory.verify.suite_files import digest_of, suite_digest
from tests.made.errors import fails
from tests.made.pool import DOCKER, node, sweep

COMMON = """\
universe = container
container_image = $(image)
executable = $(python)
transfer_executable = false
arguments = -I -B inside.py
initialdir = nodes/$(node)
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
transfer_input_files = kit.json, expectations.json, ../../suite.tar, ../../inside.py, ../../empty/result
transfer_output_files = result
max_transfer_output_mb = 16
output = out
error = err
log = job.log
ulog_execute_attrs = Machine, AssignedGPUs, GPUs_Capability, GPUs_DeviceName, GPUs_DeviceUuid, \
GPUs_DriverVersion, GPUs_GlobalMemoryMb, GPUs_NvidiaDriver
request_cpus = 1
request_memory = $(memory)MB
request_disk = $(disk)MB
request_gpus = 1
require_gpus = $(gpu) && regexp("amd|instinct|radeon|gfx", DeviceName, "i") =!= true
allowed_execute_duration = 3600
job_lease_duration = 600
periodic_remove = (JobStatus == 1 && time() - EnteredCurrentStatus > 60) \
|| (JobStatus == 1 && (NumJobStarts >= 5 || NumShadowStarts >= 20)) \
|| (JobStatus == 2 && JobCurrentStartExecutingDate >= ShadowBday \
&& time() - JobCurrentStartExecutingDate > 3600) \
|| (JobStatus != 1 && JobStatus != 5 && time() - EnteredCurrentStatus > 25200) \
|| (JobStatus == 5 && time() - EnteredCurrentStatus > 600) \
|| (JobStatus == 5 && (HoldReasonCode == 46 || HoldReasonCode == 47)) \
|| (JobStatus == 5 && (regexp("no space left|disk quota", HoldReason, "i") \
|| (HoldReasonCode == 45 && !regexp("://", HoldReason))))
notification = never
+WantGPULab = true
"""
WHOLE = """\
JOB tiny-8_0 nodes/tiny-8_0/job.sub
VARS tiny-8_0 node="tiny-8_0" image="%s" python="/opt/env/bin/python" \
gpu="Capability == 8.0 && DriverVersion >= 12.1 && regexp(\\" mig \\", DeviceName, \\"i\\") =!= true" \
memory="1024" disk="1025"
RETRY tiny-8_0 2
SCRIPT POST tiny-8_0 post.py tiny-8_0 $RETURN $JOBID $RETRY $MAX_RETRIES
""".replace("%s", DOCKER)


def test_the_whole_text() -> None:
    limits = {"idle": timedelta(minutes=1), "run": timedelta(hours=1)}
    made = sweep(node(cuda="12.1"), **limits)
    assert format_dag(made) == WHOLE
    assert format_common(made.limits, ("+WantGPULab = true",)) == COMMON


def test_a_slice_is_for_those_who_ask_for_one() -> None:
    """Of a profile it is that alone: what else its name may hold does not match."""
    assert " mig " in format_dag(sweep(node()))
    text = format_dag(sweep(node(part="1g.10gb+me"))).replace('\\"', '"')
    (expression,) = re.findall(r'regexp\("([^"]*)", DeviceName', text)
    names = ("NVIDIA H100 MIG 1g.10gb+me", "NVIDIA H100 MIG 1g.10gb", "NVIDIA H100 MIG 1c.1g.10gb+me")
    assert [bool(re.search(expression, name, re.IGNORECASE)) for name in names] == [True, False, False]


def test_the_dag_runs_so_many_at_once() -> None:
    made = replace(sweep(node("a"), node("b")), at_once=1)
    assert format_dag(made).splitlines()[-3:] == ["CATEGORY a sweep", "CATEGORY b sweep", "MAXJOBS sweep 1"]


def test_the_machines_with_the_oldest_driver_come_first(tmp_path: Path) -> None:
    rows = (("8.0", "", ("gpu1", "gpu2")), ("8.0", "535.54.03", ("gpu2",)))
    machines = tuple(MachinesByCapability(capability=row, driver=old, machines=on) for row, old, on in rows)
    nodes = (node("a", first="535.54.03"), node("b", first="535.54.03", only=True))
    texts = {"kit.json": b"{}", "expectations.json": b"{}"}
    write_sweep(tmp_path / "s", replace(sweep(*nodes), machines=machines), {"a": texts, "b": texts})
    found = [(tmp_path / f"s/nodes/{name}/job.sub").read_text().splitlines()[2] for name in "ab"]
    first = 'member(TARGET.Machine, {"gpu2"})'
    assert found == [f"first = ({first} || time() - QDate > 3600)", f"first = {first}"]
    assert json.loads((tmp_path / "s/machines.json").read_text()) == {"8.0": ["gpu1", "gpu2"]}


def test_a_machine_that_was_bad_before_comes_neither_first_nor_later(tmp_path: Path) -> None:
    rows = (("8.0", "", ("gpu1", "gpu2", "gpu3")), ("8.0", "535.54.03", ("gpu2", "gpu3")))
    machines = tuple(MachinesByCapability(capability=row, driver=old, machines=on) for row, old, on in rows)
    nodes = (node("a", first="535.54.03"), node("b", first="535.54.03", only=True), node("c"))
    texts = {name: {"kit.json": b"{}", "expectations.json": b"{}"} for name in "abc"}
    made = replace(sweep(*nodes), machines=machines)

    def places(*bad: str) -> list[tuple[str, bool, str]]:
        """Whether others do, after which of these machines, and on which never."""
        folder = tmp_path / "-".join(bad)
        folder.mkdir()
        faults = [f"{name}\t{one}\t1.0\t7\tno-gpu\n" for name in bad for one in "xy"]
        (folder / "faults").write_text("".join(faults))
        write_sweep(folder, made, texts)
        jobs = [(folder / f"nodes/{name}/job.sub").read_text() for name in "abc"]
        found = [read_places(job.encode()) for job in jobs]
        never = [" ".join(re.findall(r"gpu\d", job.splitlines()[1])) for job in jobs]
        return [(" ".join(one.first), one.only, no) for one, no in zip(found, never, strict=True)]

    assert places("gpu2") == [("gpu3", False, "gpu2"), ("gpu3", True, "gpu2"), ("", False, "gpu2")]
    both = [("", False, "gpu2 gpu3"), ("gpu2 gpu3", True, ""), ("", False, "gpu2 gpu3")]
    assert places("gpu2", "gpu3") == both


def test_jobs_of_another_processor_say_so_and_then_all_do(tmp_path: Path) -> None:
    """HTCondor adds the submitting machine's own to what says nothing of it."""
    plain = sweep(node("a"))
    assert site_lines(plain, tmp_path)[-1] == "requirements = $(elsewhere) && $(first)"
    mixed = sweep(node("a"), node("b", processor="arm64"))
    assert (
        site_lines(mixed, tmp_path)[-1]
        == 'requirements = $(elsewhere) && $(first) && (Arch == "$(processor)")'
    )
    assert re.findall(r'processor="(\w+)"', format_dag(mixed)) == ["X86_64", "aarch64"]


def test_two_nodes_of_a_name_are_refused() -> None:
    with fails("node-name-duplicate"):
        format_dag(sweep(node(), node()))


DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        (ImageKind.DOCKER, f"docker://registry.example.org/gpu/pytorch@{DIGEST}"),
        (ImageKind.ORAS, f"oras://127.0.0.1:5000/gpu/sif@{DIGEST}"),
        (ImageKind.SIF, "/staging/me/pytorch-2.3-cu121-0123456789ab.sif"),
        (ImageKind.OSDF, "osdf:///chtc/staging/me/pytorch-2.3-cu121-0123456789ab.sif"),
        (ImageKind.SIF, "/home/a@example.org/.local/share/imagefactory/store/sweeps/1/images/x.sif"),
    ],
)
def test_the_addresses_of_images(kind: ImageKind, address: str) -> None:
    image = replace(node().image, kind=kind, address=address)
    assert f'image="{address}"' in format_dag(sweep(node(image=image)))


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        (ImageKind.DOCKER, "docker://registry.example.org/gpu/pytorch:latest"),
        (ImageKind.DOCKER, f"docker://registry.example.org/gpu/$(x)@{DIGEST}"),
        (ImageKind.DOCKER, f"docker://registry.example.org/gpu/a@{DIGEST}\n"),
        (ImageKind.DOCKER, f"oras://registry.example.org/gpu/a@{DIGEST}"),
        (ImageKind.SIF, "relative.sif"),
        (ImageKind.SIF, "/staging/./x.sif"),
        (ImageKind.SIF, "/staging/../etc/x.sif"),
        (ImageKind.SIF, "/staging/a b.sif"),
        (ImageKind.SIF, "/staging/sandbox"),
        (ImageKind.OSDF, 'osdf:///a/x.sif" \nSCRIPT PRE all /bin/sh "'),
    ],
)
def test_addresses_that_could_be_more_are_refused(kind: ImageKind, address: str) -> None:
    image = replace(node().image, kind=kind, address=address)
    with fails("dag-value-invalid", message="address"):
        format_dag(sweep(node(image=image)))


@pytest.mark.parametrize(
    "given",
    [
        {"name": "a.b"},
        {"name": "a b"},
        {"name": "a\nSCRIPT PRE a /bin/sh"},
        {"name": ""},
        {"capability": "8"},
        {"capability": "8.0 || true"},
        {"cuda": "12"},
        {"cuda": '12.1" x="'},
        {"python": "python3"},
        {"python": "/usr/bin/env python"},
        {"python": "/opt/$(image)/python"},
        {"python": "/opt/../bin/sh"},
    ],
)
def test_values_that_could_be_more_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        format_dag(sweep(node(**given)))
    assert caught.value.code == "node-name-invalid" if "name" in given else "dag-value-invalid"


@pytest.mark.parametrize("line", ["queue", "x = a\n}\nJOB", "+A = {1}", "x =", "a b = c", 'x = "\\"'])
def test_a_sites_line_is_one_line(line: str) -> None:
    with fails("submit-command-invalid"):
        format_common(sweep(node()).limits, (line,))


def test_the_archive_is_the_suite_and_the_same_every_time() -> None:
    data = make_suite_tar()
    assert data == make_suite_tar()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
        files = {one.name: archive.extractfile(one).read() for one in members}  # type: ignore[union-attr]
    suite = {name.removeprefix("suite/"): text for name, text in files.items() if name.startswith("suite/")}
    assert digest_of(suite) == suite_digest()
    assert {(one.uid, one.mtime, one.mode) for one in members} == {(0, 0, 0o644)}


def test_the_folder_of_a_sweep(tmp_path: Path) -> None:
    texts = {"tiny-8_0": {"kit.json": b"{}", "expectations.json": json.dumps(1).encode()}}
    write_sweep(tmp_path / "s", sweep(node()), texts)
    write_sweep(tmp_path / "s", sweep(node()), texts)  # a folder that is not whole is written again
    names = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert names == [
        *("empty", "inside.py", "machines.json", "nodes", "post.py", "suite.tar"),
        *("sweep.dag", "sweep.sub"),
    ]
    job = (tmp_path / "s/nodes/tiny-8_0/job.sub").read_text()
    assert job == "# 8.0\nelsewhere = true\nfirst = true\ninclude : sweep.sub\nqueue\n"
    assert (tmp_path / "s/post.py").stat().st_mode & stat.S_IXUSR
    assert (tmp_path / "s/empty/result").is_dir()


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    with fails("cannot-write-file", message=str(tmp_path / "s")):
        write_sweep(tmp_path / "s", sweep(node()), {})


def test_a_node_cannot_leave_its_sweep(tmp_path: Path) -> None:
    with fails("node-name-invalid"):
        node_directory(tmp_path, "../other")
