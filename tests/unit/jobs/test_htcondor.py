"""Submit files as text: what each line says, and that nothing else can be said by it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import parse_capability
from imagefactory.jobs.htcondor import AMD_MACHINE, format_arguments, format_gpu_request, write_htcondor
from imagefactory.jobs.spec import RUN
from imagefactory.schedulers.htcondor.ads import WHOLE_GPU_EXPRESSION
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import SITES
from imagefactory.schedulers.sizes import GB
from imagefactory.settings.choices import HTCONDOR
from tests.made.offers import digest, gpu_class, job_spec, offer, verdict
from tests.services.tier import many

WHOLE = f"""\
# pytorch-2.3-cu121, manifest {digest("b")}
# Made by imagefactory on 2026-11-22. The GPUs below are those, and no others, on which
# this very image passed the suite:
#   8.0, drivers that take CUDA 12.4 or newer: verified, passed the full suite on NVIDIA A100-SXM4-40GB, \
driver 550.54.15, 2026-11-22 (verdict sha256:{"0" * 64} of key kkkkkkkkkkkk)

universe = container
container_image = docker://registry.example.org/gpu/pytorch@{digest("a")}

executable = train.sh
arguments = "--lr 0.1 --name 'a run'"
transfer_input_files = data.csv, osdf:///site/weights.pt
transfer_output_files = model.pt
should_transfer_files = YES
when_to_transfer_output = ON_EXIT

request_gpus = 1
gpus_minimum_capability = 8.0
gpus_maximum_capability = 8.0
gpus_minimum_runtime = 12.4
require_gpus = regexp(" mig ", DeviceName, "i") =!= true
requirements = (Arch == "X86_64")

request_cpus = 1
request_memory = 8GB
request_disk = 14GB

+WantGPULab = true
+GPUJobLength = "short"
# a job of a few hours, or with checkpoints, gets more GPUs with:
# +is_resumable = true

log = train_$(Cluster)_$(Process).log
output = train_$(Cluster)_$(Process).out
error = train_$(Cluster)_$(Process).err
ulog_execute_attrs = GPUs_DeviceName, GPUs_Capability, GPUs_DriverVersion

queue
"""


def submit(*capabilities: str, **changes: Any) -> str:
    return write_htcondor(job_spec(*capabilities, **changes))["train.sub"]


def parse(text: str) -> dict[str, str]:
    """Return the commands of a submit file, each of which may be there once."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#") and line != "queue":
            name, equals, value = line.partition(" = ")
            assert equals, line
            assert name not in values, line
            values[name] = value
    return values


def commands(*capabilities: str, **changes: Any) -> dict[str, str]:
    return parse(submit(*capabilities, **changes))


def dag(rows: Sequence[tuple[str, ...]], *columns: str, gather: str = "") -> dict[str, str]:
    return write_htcondor(job_spec(columns=(RUN, *columns), rows=tuple(rows), gather=gather))


def test_a_whole_file() -> None:
    text = submit(
        offered=offer(verdict("8.0")),
        site="chtc",
        arguments=("--lr", "0.1", "--name", "a run"),
        inputs=("data.csv", "osdf:///site/weights.pt"),
        outputs=("model.pt",),
        time=timedelta(hours=12),
    )
    assert text == WHOLE


# --- GPUs


@pytest.mark.parametrize(
    ("classes", "lines"),
    [
        (
            [("8.0", "12.4")],
            ["gpus_minimum_capability = 8.0", "gpus_maximum_capability = 8.0", "gpus_minimum_runtime = 12.4"],
        ),
        ([("8.0", ""), ("8.6", "")], ["gpus_minimum_capability = 8.0", "gpus_maximum_capability = 8.6"]),
        (
            [("7.0", "12.4"), ("8.0", "12.4")],
            ["require_gpus = member(Capability, {7.0, 8.0}) && DriverVersion >= 12.4"],
        ),
        ([("8.9", ""), ("7.5", ""), ("8.0", "")], ["require_gpus = member(Capability, {7.5, 8.0, 8.9})"]),
        (
            [("8.0", "12.4"), ("8.6", "12.1")],
            [
                "require_gpus = (Capability == 8.6 && DriverVersion >= 12.1)"
                " || (Capability == 8.0 && DriverVersion >= 12.4)"
            ],
        ),
        (
            [("7.0", ""), ("8.0", "12.4"), ("9.0", "12.4")],
            [
                "require_gpus = (Capability == 7.0)"
                " || (member(Capability, {8.0, 9.0}) && DriverVersion >= 12.4)"
            ],
        ),
        # 8.7 and 8.8 lie between these
        ([("8.6", ""), ("8.9", "")], ["require_gpus = member(Capability, {8.6, 8.9})"]),
        # newer than this program, which does not know what lies between them
        ([("20.0", ""), ("20.5", "")], ["require_gpus = member(Capability, {20.0, 20.5})"]),
        ([("20.0", "")], ["gpus_minimum_capability = 20.0", "gpus_maximum_capability = 20.0"]),
    ],
)
def test_gpus_are_matched_exactly(classes: Sequence[tuple[str, str]], lines: list[str]) -> None:
    assert format_gpu_request([gpu_class(*row) for row in classes], slices=True) == lines


def test_slices_of_gpus_need_an_option() -> None:
    """A verdict on a whole GPU is not one on a slice of it (MIG)."""
    single, gap = [gpu_class("8.0")], [gpu_class("7.0"), gpu_class("8.0")]
    assert format_gpu_request(single)[-1] == f"require_gpus = {WHOLE_GPU_EXPRESSION}"
    assert format_gpu_request(gap) == [
        f"require_gpus = member(Capability, {{7.0, 8.0}}) && DriverVersion >= 12.4 && {WHOLE_GPU_EXPRESSION}"
    ]
    assert format_gpu_request([gpu_class("7.0", ""), *single]) == [
        "require_gpus = ((Capability == 7.0) || (Capability == 8.0 && DriverVersion >= 12.4))"
        f" && {WHOLE_GPU_EXPRESSION}"
    ]
    assert WHOLE_GPU_EXPRESSION not in submit(mig=True)


def test_memory_of_a_gpu_joins_either_form() -> None:
    assert "gpus_minimum_memory = 16GB" in format_gpu_request([gpu_class("8.0")], 16 * GB)
    classes = [gpu_class("7.0", ""), gpu_class("8.0")]
    line = (
        "require_gpus = ((Capability == 7.0) || (Capability == 8.0 && DriverVersion >= 12.4))"
        " && GlobalMemoryMb >= 16384"
    )
    assert format_gpu_request(classes, 16 * GB, slices=True) == [line]
    assert format_gpu_request(classes, 16 * GB) == [f"{line} && {WHOLE_GPU_EXPRESSION}"]


@pytest.mark.parametrize("capabilities", [("8.0",), ("7.0", "8.0"), ("8.0", "8.6"), ("7.5", "8.9", "9.0")])
def test_neither_form_cancels_what_the_other_says(capabilities: tuple[str, ...]) -> None:
    values = commands(*capabilities, gpu_memory=GB)
    compared = ("Capability", "DriverVersion", "GlobalMemoryMb")
    named = [name for name in compared if name in values["require_gpus"]]
    assert named == ([] if any(name.startswith("gpus_") for name in values) else list(compared))


# --- images and sizes


def test_an_image_in_the_osdf_needs_its_machines() -> None:
    values = commands(site="chtc", kind=ImageKind.OSDF, folder="osdf:///chtc/staging/gpu")
    assert values["requirements"] == '(Arch == "X86_64") && (HasCHTCStaging == true)'


def test_a_file_that_machines_share_is_not_sent_with_each_job() -> None:
    """`should_transfer_container`, which the manual names, condor_submit 23.9 does not know."""
    values = commands(kind=ImageKind.SIF, folder="/shared/gpu", disk=GB)
    assert values["transfer_container"] == "false"
    assert values["request_disk"] == "1GB"
    values = commands(kind=ImageKind.SIF)
    assert "transfer_container" not in values
    assert values["request_disk"] == "5GB"


def test_an_image_for_other_machines() -> None:
    assert commands(platform="linux/arm64")["requirements"] == '(Arch == "aarch64")'


def test_a_request_of_a_person_counts() -> None:
    values = commands(disk=100 * GB, memory=GB // 2, cpus=4, gpus=2)
    assert values["request_disk"] == "100GB"
    assert values["request_memory"] == "512MB"
    assert (values["request_cpus"], values["request_gpus"]) == ("4", "2")


@pytest.mark.parametrize(
    ("site", "hours", "line"),
    [
        ("chtc", None, '+GPUJobLength = "medium"'),
        ("chtc", 12, '+GPUJobLength = "short"'),
        ("chtc", 13, '+GPUJobLength = "medium"'),
        ("chtc", 7 * 24, '+GPUJobLength = "long"'),
        ("ospool", None, '+JobDurationCategory = "Medium"'),
        ("ospool", 20, '+JobDurationCategory = "Long"'),
        ("generic", 2, "allowed_execute_duration = 7200"),
    ],
)
def test_the_time_of_a_job_in_the_words_of_its_site(site: str, hours: int | None, line: str) -> None:
    time = None if hours is None else timedelta(hours=hours)
    assert line in submit(site=site, time=time).splitlines()


# --- what runs


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--lr", "0.1"], '"--lr 0.1"'),
        (["a b", "it's", 'a "q"', ""], "\"'a b' 'it''s' 'a \"\"q\"\"' ''\""),
        (["--seed", "$(Process)"], "\"--seed '$(Process)'\""),
        (["a=$(lr)b"], "\"'a=$(value_lr)b'\""),
        (["$(RANK)$(run)"], "\"'$(value_rank)$(run)'\""),
    ],
)
def test_arguments_as_condor_submit_reads_them(words: list[str], text: str) -> None:
    assert format_arguments(words, (RUN, "lr", "rank")) == text


def test_a_sweep_of_values() -> None:
    assert dag([("0.1", "a b"), ("0.01", "c")], "lr", "name")["train.dag"] == (
        "JOB run-1 train.sub\n"
        'VARS run-1 run="1" value_lr="0.1" value_name="a b"\n'
        "JOB run-2 train.sub\n"
        'VARS run-2 run="2" value_lr="0.01" value_name="c"\n'
    )


def test_a_last_node_gets_the_folders_of_all_runs_and_no_gpu() -> None:
    job = job_spec(
        columns=(RUN,), rows=((), ()), arguments=("$(run)",), outputs=("a",), gather="gather.py", memory=GB
    )
    files = write_htcondor(job)
    assert list(files) == ["train.sub", "train-gather.sub", "train.dag"]
    assert files["train.dag"].splitlines() == [
        "JOB gather train-gather.sub",
        "JOB run-1 train.sub",
        'VARS run-1 run="1"',
        "PARENT run-1 CHILD gather",
        "JOB run-2 train.sub",
        'VARS run-2 run="2"',
        "PARENT run-2 CHILD gather",
    ]
    text = files["train-gather.sub"]
    values = parse(text)
    assert values["executable"] == "gather.py"
    assert values["transfer_input_files"] == "run-1, run-2"
    assert values["request_memory"] == "1GB"
    assert values.keys().isdisjoint(("arguments", "initialdir", "transfer_output_files", "request_gpus"))
    assert "It asks for no GPU." in text
    assert "only for CPUs" not in text


def test_a_checkpoint_gets_the_gpus_that_may_evict_the_job() -> None:
    values = commands(checkpoint="state/last.pt")
    assert values["checkpoint_exit_code"] == "85"
    assert values["transfer_checkpoint_files"] == "state/last.pt"
    text = submit(site="chtc", checkpoint="last.pt")
    assert '\n+GPUJobLength = "medium"\n+is_resumable = true\n' in text
    assert "# +is_resumable" not in text
    assert "is_resumable" not in submit(site="chtc", checkpoint="last.pt", gpus=0)


def test_each_run_of_a_sweep_has_a_folder() -> None:
    values = commands(
        kind=ImageKind.SIF,
        columns=(RUN, "lr"),
        rows=(("1",),),
        arguments=("--lr", "$(lr)"),
        inputs=("data.csv", "./more/x", "/abs/y", "osdf:///z"),
    )
    assert values["initialdir"] == "run-$(run)"
    assert values["executable"] == "train.sh"
    assert values["transfer_input_files"] == "../data.csv, ../more/x, /abs/y, osdf:///z"
    assert values["log"] == "job.log"
    assert values["container_image"].startswith("../pytorch")


@pytest.mark.parametrize("name", ["rank", "input", "priority", "hold", "max_retries", "queue", "MY"])
def test_a_column_is_no_command_of_the_job(name: str) -> None:
    """DAGMan hands macros to condor_submit: `rank` would be the job's rank, `input` its stdin."""
    lines = dag([("5",)], name)["train.dag"].splitlines()
    assert lines == ["JOB run-1 train.sub", f'VARS run-1 run="1" value_{name}="5"']
    assert format_arguments([f"$({name})"], (RUN, name)) == f"\"'$(value_{name})'\""


def test_every_line_of_every_file_is_one_command() -> None:
    line = re.compile(r"(?:[+]?[A-Za-z_]+ = \S.*|#.*|queue|)")
    for site in SITES:
        for capabilities in (("8.0",), ("7.0", "8.0", "9.0")) if site.batch == HTCONDOR else ():
            text = submit(*capabilities, site=site.name)
            assert all(line.fullmatch(row) for row in text.splitlines())
            assert text.endswith("\nqueue\n")


VALUES = many(400, 8000)
NASTY = [*"aB1 \n\r\\$(){}\"',;=#+-*/.~|&<>%@\t\0é", "queue", "$(Process)", "executable = x"]


def test_no_value_becomes_another_command() -> None:
    """Whatever stands in a field, a file has the commands that it has, or there is none."""
    random = Random(7)
    job = job_spec(arguments=("x",), inputs=("x",), outputs=("x",), columns=(RUN, "lr"), rows=(("1",),))
    usual = parse(write_htcondor(job)["train.sub"]).keys()
    count = 0
    for _ in range(VALUES):
        value = "".join(random.choices(NASTY, k=random.randint(1, 6)))
        field = random.choice(("name", "executable", "arguments", "inputs", "outputs"))
        change: Any = {field: value if field in ("name", "executable") else (value,)}
        try:
            text = next(iter(write_htcondor(replace(job, **change)).values()))
        except UsageError:
            continue
        count += 1
        assert parse(text).keys() == usual, value
        assert text.splitlines().count("queue") == 1
    assert count > VALUES // 20


def test_no_value_of_a_sweep_becomes_another_node() -> None:
    random = Random(8)
    count = 0
    for _ in range(VALUES):
        value = "".join(random.choices(NASTY, k=random.randint(1, 6)))
        try:
            text = dag([(value,)], "lr")["train.dag"]
        except UsageError:
            continue
        count += 1
        assert text == f'JOB run-1 train.sub\nVARS run-1 run="1" value_lr="{value}"\n'
        assert not set('"\\$\n') & set(value)
    assert count > VALUES // 20


MI = '(Capability == 9.0 && regexp("(^|[^a-z0-9])(MI210|MI250|MI250X|gfx90a)([^a-z0-9]|$)", DeviceName, "i"))'
MI100 = '(Capability == 9.0 && regexp("(^|[^a-z0-9])(MI100|gfx908)([^a-z0-9]|$)", DeviceName, "i"))'


@pytest.mark.parametrize(
    ("processors", "memory", "expression"),
    [
        (("gfx90a",), 0, MI),
        (("gfx908", "gfx90a"), 32 * GB, f"({MI100} || {MI}) && GlobalMemoryMb >= 32768"),
    ],
)
def test_amd_gpus_are_requested_by_name(processors: tuple[str, ...], memory: int, expression: str) -> None:
    classes = tuple(replace(gpu_class("9.0", ""), capability=parse_capability(name)) for name in processors)
    (text,) = write_htcondor(job_spec(classes=classes, gpu_memory=memory)).values()
    assert f"require_gpus = {expression}" in text.splitlines()
    assert "gpus_minimum" not in text
    assert AMD_MACHINE in next(row for row in text.splitlines() if row.startswith("requirements"))
