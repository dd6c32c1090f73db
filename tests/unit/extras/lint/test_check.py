"""What is wrong with a submit file for a pool: every rule, the reach, CHTC's templates.

The stanzas say what CHTC/templates-GPUs and CHTC/recipes say, written anew.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import UsageError
from imagefactory.extras.lint.check import check_submit_file
from imagefactory.extras.lint.classads import MAX_EXPRESSION, literal, make_ad, parse_expression
from imagefactory.extras.lint.findings import (
    CheckContext,
    Severity,
    SubmitCheckResult,
    check_json,
    format_check,
)
from imagefactory.extras.lint.reader import parse_submit_file
from imagefactory.gpu.values import Compatibility
from imagefactory.jobs.htcondor import AMD_MACHINE, write_htcondor
from imagefactory.jobs.offer import expected_grounds, forms_of
from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor.ads import parse_ads
from imagefactory.schedulers.pool import ImageKind, Inventory
from imagefactory.schedulers.sites import SITES, Site, find_site
from imagefactory.schedulers.sizes import GB
from imagefactory.serialize import plain
from imagefactory.settings.choices import HTCONDOR
from imagefactory.trust.catalog import CatalogImage, ImageOffer
from imagefactory.trust.verdict import RevokedCell
from tests.made.ads import A100, H100, MIG_SLICE, V100, gpu, slot
from tests.made.offers import (
    IMAGE,
    REFERENCE,
    SIF,
    catalog_of,
    digest,
    failed,
    job_spec,
    offer,
    prediction,
    verdict,
)

NOW = datetime(2026, 11, 22, tzinfo=UTC)
TAKES = {
    "HasContainer": True,
    "HasDockerURL": True,
    "HasDocker": True,
    "HasSIF": True,
    "HasSandboxImage": True,
}
SITE = {**TAKES, "OpSysMajorVer": 9, "HasCHTCStaging": True, "HasGpulabData": True}
MACHINES = (
    slot("v100", [gpu("GPU-1a", V100, DriverVersion=12.2, MaxSupportedVersion=12020)], **SITE),
    slot("a100", [gpu(f"GPU-2{n}", A100) for n in range(4)], used=("GPU-20",), **SITE),
    slot(
        "h100",
        [gpu(f"GPU-3{n}", H100, DriverVersion=12.8, MaxSupportedVersion=12080) for n in range(2)],
        **SITE,
    ),
    slot("mixed", [gpu("GPU-4a", V100, DriverVersion=12.2), gpu("GPU-4b", H100, DriverVersion=12.2)], **SITE),
)
"""1 + 4 + 2 + 2 GPUs: 7.0 (two), 8.0 (four), 9.0 (three)."""
POOL = parse_ads(MACHINES, NOW)
DOCKER = f"docker://{REFERENCE}"
RUNS = "executable = run.sh\nrequest_gpus = 1\n"
CHTC = '+WantGPULab = true\n+GPUJobLength = "short"\n'


def check(
    text: str, *, offered: ImageOffer | None = None, site: str = "generic", **more: Any
) -> SubmitCheckResult:
    def judge(image: CatalogImage) -> ImageOffer:
        assert offered is not None
        assert image == offered.image
        return offered

    given = {"inventory": POOL, "catalog": catalog_of(offered.image) if offered else None, **more}
    return check_submit_file(
        parse_submit_file(text, "a.sub"), CheckContext(site=find_site(site), offer=judge, **given)
    )


def found(checked: SubmitCheckResult, severity: str = "wrong") -> set[tuple[str, int]]:
    return {(one.rule, one.line) for one in checked.all_findings if one.severity == severity}


def gpus(checked: SubmitCheckResult) -> dict[str, int]:
    (jobs,) = checked.jobs
    return {one.capability: one.gpus for one in jobs.reached}


# --- CHTC's templates ----------------------------------------------------------------------------

TAGGED = "universe = docker\ndocker_image = {}\n"
TEMPLATES = {
    "checkpointing/tensorflow": ("requirements = (CUDADriverVersion >= 11.1)", {"deprecated", "no-match"}),
    "conda/pytorch-1.5": ("require_gpus = (DriverVersion >= 10.2) && (Capability < 8)", {"7.0": 2}),
    "conda/pytorch-1.9": ("require_gpus = (DriverVersion >= 11.1)", {"7.0": 2, "8.0": 4, "9.0": 3}),
    "containers/hello_gpu": (
        TAGGED.format("nvidia/cuda:10.1-base-ubuntu18.04")
        + "Requirements = (Target.CUDADriverVersion >= 10.1)",
        {"tag", "deprecated", "no-match"},
    ),
    "containers/pixi/apptainer": (
        "universe = container\ncontainer_image = oras://ghcr.io/someone/gpu:mnist\n"
        "requirements = (GPUs_DriverVersion >= 12.0)\n"
        "gpus_minimum_capability = 7.0\ngpus_minimum_memory = 2GB",
        {"tag"},
    ),
    "containers/pixi/docker": (
        "universe = container\ndocker_pull_policy = missing\ncontainer_image = docker://ghcr.io/someone/gpu:mnist\n"
        "requirements = (GPUs_DriverVersion >= 12.0)\n"
        "gpus_minimum_capability = 7.0\ngpus_minimum_memory = 2GB",
        {"tag"},
    ),
    "containers/pytorch_ngc": (
        TAGGED.format("nvcr.io/nvidia/pytorch:19.10-py3")
        + "Requirements = (Target.CUDADriverVersion >= 10.1)",
        {"tag", "deprecated", "no-match"},
    ),
    "containers/pytorch_python": (
        TAGGED.format("pytorch/pytorch:1.1.0-cuda10.0-cudnn7.5-runtime")
        + "require_gpus = (DriverVersion >= 10.1)",
        {"tag"},
    ),
    "containers/tensorflow_python": (
        TAGGED.format("tensorflow/tensorflow:1.14.0-gpu-py3")
        + "Requirements = (Target.CUDADriverVersion >= 10.1) && (CUDACapability < 8)",
        {"tag", "deprecated", "no-match"},
    ),
    "llm": (
        TAGGED.format("ghcr.io/someone/condor:latest") + "docker_network_type = host\n"
        "Requirements = (Target.HasCHTCStaging == true)\nrequest_gpus = 2\n"
        "Requirements = (Target.CUDADriverVersion >= 10.1)\n+is_resumable = true\n"
        "+WantFlocking = false\n+WantGlidein = false",
        {"tag", "deprecated", "overwritten", "no-match"},
    ),
    "ml_workflow": (
        "universe = container\ndocker_image = docker://someone/catdog\nrequest_disk = $(disk:500MB)\n"
        "request_memory = $(memory:6GB)\nrequest_cpus = $(cpus:1)\n"
        "gpus_minimum_capability = 7.5\ngpus_minimum_memory = 4096",
        {"tag"},
    ),
    "multi_gpu": (
        "require_gpus = (Capability == 7.5) && (DriverVersion >= 11.3)\narguments = $(request_gpus)\n"
        "requirements = (OpSysMajorVer==7 || OpSysMajorVer==8)",
        {"no-match"},
    ),
    "pixi": (
        "requirements = (GPUs_DriverVersion >= 12.0)\ngpus_minimum_capability = 7.0\n"
        "gpus_minimum_memory = 2GB",
        {"7.0": 2, "8.0": 4, "9.0": 3},
    ),
    "test": ("requirements = (CUDACapability >= 4)", {"deprecated", "no-match"}),
    "vllm_batch_inference": (
        TAGGED.format("ghcr.io/someone/vllm:v0.8.1") + "require_gpus = GlobalMemoryMb >= 20000\n"
        "Requirements = (Target.CUDADriverVersion >= 10.1)",
        {"tag", "deprecated", "no-match"},
    ),
    "AlphaFold": (
        "universe = container\ncontainer_image = file:///staging/USER/alphafold-2.3.1.sif\n"
        "require_gpus = (GlobalMemoryMB > 20000)\nrequirements = (HasGpulabData == true)",
        {"name"},
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_gpu_stanzas_of_chtcs_templates_are_judged(name: str) -> None:
    stanza, expected = TEMPLATES[name]
    checked = check(f"{RUNS}{stanza}\n{CHTC}queue 1\n", site="chtc")
    rules = {rule for rule, _ in found(checked)}
    if isinstance(expected, dict):
        assert not rules
        assert gpus(checked) == expected
    else:
        assert rules == expected - {"tag", "name"}
        assert {rule for rule, _ in found(checked, "advice")} & {"tag", "name"} == expected & {"tag", "name"}
        assert bool(gpus(checked)) is ("no-match" not in expected)


def test_a_machine_with_mixed_gpus_has_no_flat_attribute() -> None:
    alike = check(f"{RUNS}requirements = (GPUs_Capability >= 7.0)\nqueue")
    assert gpus(alike) == {"7.0": 1, "8.0": 4, "9.0": 2}  # less the two of `mixed`
    assert ("flat", 3) in found(alike, "advice")
    assert gpus(check(f"{RUNS}gpus_minimum_capability = 7.0\nqueue")) == {"7.0": 2, "8.0": 4, "9.0": 3}


def test_the_site_asks_for_its_own_attributes() -> None:
    assert found(check(f"{RUNS}{CHTC}queue", site="chtc")) == set()
    without = check(f"{RUNS}queue", site="chtc")
    assert found(without) == set()  # the site's own pages disagree
    (lab, length) = (one for one in without.all_findings if one.rule == "site")
    assert "took it out of its list in May 2026" in lab.message
    assert "+GPUJobLength is missing" in length.message
    strange = check(f"{RUNS}+WantGPULab = false\n+GPUJobLength = 'short'\nqueue", site="chtc")
    assert found(strange) == {("site", 4)}
    assert ("site", 3) in found(strange, "advice")
    assert ("unquoted", 4) in found(
        check(f"{RUNS}+WantGPULab = true\n+GPUJobLength = short\nqueue", site="chtc")
    )
    macros = found(check(f'{RUNS}WantGPULab = true\n+GPUJobLength = "long"\nqueue', site="chtc"))
    assert macros == {("misspelt", 3)}
    assert not found(check("executable = a.sh\nqueue", site="chtc"))  # no GPU, no lab
    assert not found(check(f"{RUNS}queue", site="ospool"))


# --- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "rule", "line"),
    [
        ("require_gpus = Capability == 8.0\ngpus_minimum_capability = 7.0", "cancelled", 4),
        ("require_gpus = member(capability, {8.0})\ngpus_maximum_capability = 9.0", "cancelled", 4),
        ("gpus_minimum_memory = 8GB\nrequire_gpus = GLOBALMEMORYMB > 9", "cancelled", 3),
        ("gpus_minimum_runtime = 12.1\nrequire_gpus = MaxSupportedVersion > 9", "cancelled", 3),
        ("requirements = true\nRequirements = 1 > 0", "overwritten", 4),
        ("requirements = CUDACapability > 7", "deprecated", 3),
        ("cuda_version = 12.1", "deprecated", 3),
        ("requirements = Capability >= 8.0", "misplaced", 3),
        ("require_gpus = GPUs_Capability >= 8.0", "misplaced", 3),
        ("require_gpus = TARGET.Capability >= 8.0", "misplaced", 3),
        ("require_gpus = Capabilty >= 8.0", "misplaced", 3),
        ("gpu_minimum_capability = 8.0", "misspelt", 3),
        ("gpus_min_capability = 8.0", "misspelt", 3),
        ("require_gpu = Capability > 8", "misspelt", 3),
        ("gpus_minimum_memory = 8", "unit", 3),
        ("request_memory = 16", "unit", 3),
        ("gpus_minimum_capability = 9.0\ngpus_maximum_capability = 8.0", "backwards", 4),
        ("gpus_minimum_capability = 8.0, 9.0", "unreadable", 3),
        ("require_gpus = Capability = 8.0", "unreadable", 3),
        ("require_gpus = Capability >= 8.0 &&", "unreadable", 3),
        ("request_gpus = some", "unreadable", 3),
        ("request_memory = some", "unreadable", 3),
        ("request_memory = 8 gigs", "unreadable", 3),
        ("request_memory = 4 * 1024 * 1024", "no-match", 4),
        # what condor_submit of 23.9 refuses, or compares as it is
        ("request_memory = (8GB)", "unreadable", 3),
        ("gpus_minimum_memory = 11GiB", "unreadable", 3),
        ('gpus_minimum_memory = "11GB"', "unreadable", 3),
        ("gpus_minimum_memory = 4096 + 1024 MB", "unreadable", 3),
        ("gpus_minimum_runtime = 12.4.1", "unreadable", 3),
        ("gpus_minimum_runtime = (12.4)", "unreadable", 3),
        ("gpus_minimum_runtime = NoSuchAttribute", "unreadable", 3),
        ('gpus_minimum_capability = "8.0"', "unreadable", 3),
        ("gpus_minimum_capability = sm_80", "unreadable", 3),
        ("gpus_minimum_memory = 200 * 1024", "no-match", 4),
        ("retry_request_memory = 16GB, 16XB", "unreadable", 3),
        ("requirements = NoSuchThing > 3", "unheard", 3),
        ("require_gpus = Capability > 10", "no-match", 4),
        ("request_gpus = 8", "no-match", 4),
        ("request_memory = 4TB", "no-match", 4),
        ('container_image = "docker://a.b/c@sha256:' + "0" * 64 + '"', "quoted", 3),
        ("container_image = docker://A B", "reference", 3),
        ("container_image = a.b/c:1.0", "sandbox", 3),
        ("container_image = osdf:///a/b", "sandbox", 3),
        ("container_image = /a/b.SIF", "sandbox", 3),
        (f"universe = docker\ncontainer_image = {DOCKER}\ndocker_image = a.b/c:1", "universe", 4),
        (f"universe = docker\ndocker_image = {DOCKER}", "reference", 4),
    ],
)
def test_what_is_wrong_is_told_with_its_line(lines: str, rule: str, line: int) -> None:
    assert (rule, line) in found(check(f"{RUNS}{lines}\nqueue"))


@pytest.mark.parametrize(
    "lines",
    [
        "require_gpus = Capability == 8.0\ngpus_minimum_memory = 8GB\ngpus_minimum_runtime = 12.1",
        "require_gpus = DriverVersion >= 12.1\ngpus_minimum_capability = 7.0",
        "requirements = HasCHTCStaging && OpSysMajorVer >= 8\nrequire_gpus = member(Capability, {7.0, 8.0})",
        'require_gpus = DeviceName == "nvidia a100-sxm4-40gb"',
        "MinCap = 7.5\nrequire_gpus = Capability >= $(MinCap)",
        "+MinCap = 7.5\nrequire_gpus = Capability >= MinCap",
        "gpu_list = 3\narguments = $(gpu_list)",
        'requirements = stringListMember("cm", "a,cm") && versionGE("1.2", "1.1")',
        'requirements = Machine =!= MachineAttrMachine1 && TARGET.Machine != "mixed"',
        "request_memory = ifThenElse(MemoryUsage =!= undefined, MAX({MemoryUsage * 3/2, 2048}), 2048)",
        "request_disk = 2 * 1024 * 1024\nrequest_cpus = MAX({1, 2})",
        f"container_image = {DOCKER}",
        "container_image = osdf:///a/torch-0123456789ab.sif",
    ],
)
def test_what_is_right_is_left_alone(lines: str) -> None:
    checked = check(f"{RUNS}{lines}\nqueue")
    assert found(checked) == set()
    assert gpus(checked)


def test_gpu_lines_without_a_request_do_nothing() -> None:
    text = "executable = a\nrequire_gpus = Capability == 8.0\ngpus_minimum_memory = 8GB\nqueue"
    assert found(check(text)) == {("no-request", 2), ("no-request", 3)}


def test_a_file_without_queue_submits_nothing() -> None:
    assert found(check(RUNS)) == {("no-queue", 1)}


def test_what_only_the_submission_tells_is_not_judged() -> None:
    checked = check(f"{RUNS}container_image = $(image)\nqueue image in (a b)")
    assert found(checked) == set()
    assert ("unknown", 3) in found(checked, "advice")


def test_second_names_of_commands_count() -> None:
    text = "executable = a\nRequestGPUs = 1\nRequireGPUs = Capability == 8.0\nGPUsMinCapability = 7.0\nqueue"
    checked = check(text)
    assert found(checked) == {("cancelled", 4)}
    assert gpus(checked) == {"8.0": 4}


def test_as_many_gpus_as_a_list_says_are_gpus() -> None:
    checked = check("executable = a\nrequest_gpus = $(n)\nrequire_gpus = Capability == 8.0\nqueue n in (1 2)")
    assert found(checked) == set()
    assert gpus(checked) == {"8.0": 4}


def test_what_to_write_has_the_numbers_of_the_file() -> None:
    checked = check(f"{RUNS}requirements = TARGET.CUDADriverVersion >= 11.1\nqueue")
    (one,) = (one for one in checked.all_findings if one.rule == "deprecated")
    assert one.hint == "write gpus_minimum_runtime = 11.1"


KEYS = (
    "request_gpus require_gpus gpus_minimum_capability gpus_minimum_memory gpus_minimum_runtime requirements "
    "container_image docker_image universe request_memory request_disk +X y"
)
WORDS = (
    "1 8.0 Capability >= == && ( ) { \" ' $(y) $(y:2) $ENV(A) member( , docker:// a.b/c :1 @sha256: .sif "
    "osdf:/// TARGET. ! - 10GB ; 000000000000 [ ] ? \\ // /*"
)
LINES = st.tuples(st.sampled_from(KEYS.split()), st.lists(st.sampled_from(WORDS.split()), max_size=6))


@given(st.lists(LINES, max_size=8))
def test_strange_values_are_findings_and_no_crash(lines: list[tuple[str, list[str]]]) -> None:
    text = "\n".join(f"{key} = {''.join(words)}" for key, words in lines) + "\nrequest_gpus = 1\nqueue"
    try:
        checked = check(text, offered=offer(verdict("8.0")))
    except UsageError as error:
        assert error.message.startswith("a.sub:")  # noqa: PT017
        return
    assert format_check(checked)
    json.dumps(check_json(checked, "chtc", "", []), default=plain)


def test_each_size_of_a_list_of_retries_is_judged() -> None:
    lines = "request_memory = 8 GB\nretry_request_memory = 16G, 32 GB, 64000, max({RequestMemory * 2, 9})\n"
    checked = check(f"{RUNS}{lines}copy_to_spool = false\nqueue")
    assert {one for one in found(checked, "advice") if one[0] == "unit"} == {("unit", 4)}
    assert sum(one.rule == "unit" for one in checked.all_findings) == 2
    assert not found(checked)


# --- where jobs get ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "reached"),
    [
        ("gpus_minimum_capability = 8.0\ngpus_maximum_capability = 8.0", {"8.0": 4}),
        ("gpus_minimum_runtime = 12.4", {"8.0": 4, "9.0": 2}),
        ("require_gpus = DriverVersion >= 12.4", {"8.0": 4, "9.0": 2}),
        ("gpus_minimum_memory = 40GB", {"9.0": 3}),
        ("gpus_minimum_runtime = 12040", {"8.0": 4, "9.0": 2}),
        ("gpus_minimum_runtime = 12 * 1000 + 40", {"8.0": 4, "9.0": 2}),
        ("gpus_minimum_memory = 40 * 1024", {"9.0": 3}),
        ("+Least = 40960\ngpus_minimum_memory = Least", {"9.0": 3}),
        ("gpus_minimum_memory = 41943040K", {"9.0": 3}),
        ("gpus_minimum_capability = (8.0)", {"8.0": 4, "9.0": 3}),
        ("gpus_minimum_capability = 8.0 + 0.5", {"9.0": 3}),
        ("request_gpus = 2", {"8.0": 4, "9.0": 2, "7.0": 1} | {"9.0": 3}),
        ("request_gpus = 2\nrequire_gpus = Capability == 9.0", {"9.0": 2}),
        ("require_gpus = member(Capability, {7.0, 9.0})", {"7.0": 2, "9.0": 3}),
        ('requirements = Machine == "mixed"', {"7.0": 1, "9.0": 1}),
        ('requirements = TARGET.Machine != "mixed" && MY.RequestGPUs == 1', {"7.0": 1, "8.0": 4, "9.0": 2}),
        ("request_memory = 500GB\nrequest_disk = 1GB", {"7.0": 2, "8.0": 4, "9.0": 3}),
    ],
)
def test_the_reach_is_matched_as_the_pool_does(lines: str, reached: dict[str, int]) -> None:
    assert gpus(check(f"{RUNS}{lines}\nqueue")) == reached


def test_start_and_what_an_image_needs_decide_too() -> None:
    def pool(**more: Any) -> Inventory:
        return parse_ads([slot("a", [gpu("GPU-1", A100)], **{**SITE, **more})], NOW)

    text = f"{RUNS}{CHTC}queue"
    lab = pool(Start="/Expr(TARGET.WantGPULab =?= true)/")
    assert gpus(check(text, inventory=lab)) == {"8.0": 1}
    refused = check(f"{RUNS}queue", inventory=lab)
    assert (gpus(refused), refused.jobs[0].causes) == ({}, (("its START takes no such job", 1),))
    (one,) = check(text, inventory=pool(Start='/Expr(Owner == "me")/')).jobs[0].reached
    assert (one.gpus, one.unsure) == (1, 1)
    without = pool(HasSIF=False)
    in_sif = f"{RUNS}container_image = a-0123456789ab.sif\nqueue"
    assert check(in_sif, inventory=without).jobs[0].causes == (("it has no HasSIF", 1),)
    assert gpus(check(in_sif, inventory=pool())) == {"8.0": 1}


@pytest.mark.parametrize("name", ["Owner", "acctgroup", "ProjectName", "WantContainer"])
def test_a_start_that_asks_who_submits_is_unsure_and_no_refusal(name: str) -> None:
    ad = slot("a", [gpu("GPU-1", A100)], **{**SITE, "Start": f'/Expr(TARGET.{name} =?= "lab")/'})
    checked = check(f"{RUNS}queue", inventory=parse_ads([ad], NOW))
    assert found(checked) == set()
    assert [(one.gpus, one.unsure) for one in checked.jobs[0].reached] == [(1, 1)]


@pytest.mark.parametrize(
    ("lines", "causes"),
    [
        (
            "require_gpus = member(Capability, {7.0, 8.0}) && DriverVersion >= 12.4",
            {"the job does not request its type of GPU": 3, "its driver for CUDA 12.2 is too old": 2},
        ),
        (
            "gpus_minimum_runtime = 12.5\ngpus_maximum_capability = 8.9",
            {
                "the job does not request its type of GPU": 3,
                "its driver for CUDA 12.2 is too old": 2,
                "its driver for CUDA 12.4 is too old": 4,
            },
        ),
        (
            'require_gpus = versionGE(NvidiaDriver, "570")',
            {"its ad has no NvidiaDriver, which is requested": 9},
        ),
        ("require_gpus = DriverVersion < 11.0", {"the job does not request its type of GPU": 9}),
    ],
)
def test_an_old_driver_is_told_from_another_kind_of_gpu(lines: str, causes: dict[str, int]) -> None:
    assert dict(check(f"{RUNS}{lines}\nqueue").jobs[0].causes) == causes


def test_the_version_of_a_driver_is_named_where_it_is_told() -> None:
    told = parse_ads([slot("a", [gpu("GPU-1", A100, NvidiaDriver="550.54.15")])], NOW)
    checked = check(f"{RUNS}gpus_minimum_runtime = 12.8\nqueue", inventory=told)
    assert checked.jobs[0].causes == (("its driver 550.54.15 is too old", 1),)


@pytest.mark.parametrize("name", ["remoteowner", "LastHeardFrom", "TotalLoadAvg", "MyAddress"])
def test_what_inventories_leave_out_is_unsure_in_requirements(name: str) -> None:
    checked = check(f"{RUNS}requirements = {name} > 1\nqueue")
    assert found(checked) == set()
    assert sum(one.unsure for one in checked.jobs[0].reached) == 9
    missing = check(f"{RUNS}requirements = TotalTapeDrives > 1\nqueue")
    assert found(missing) == {("unheard", 3), ("no-match", 4)}


def test_an_inventory_that_tells_no_attributes_leaves_requirements_open() -> None:
    bare = replace(POOL, machines=tuple(replace(one, attributes={}, start="") for one in POOL.machines))
    checked = check(
        f"{RUNS}requirements = OpSysMajorVer > 8\ncontainer_image = {DOCKER}\nqueue", inventory=bare
    )
    assert found(checked) == set()
    assert sum(one.unsure for one in checked.jobs[0].reached) == 9


def test_clock_speeds_are_not_in_inventories() -> None:
    (one, *_) = check(f"{RUNS}require_gpus = ClockMhz > 1000\nqueue").jobs[0].reached
    assert one.unsure == one.gpus


# --- the image -----------------------------------------------------------------------------------


def test_gpus_that_match_and_where_the_image_is_not_proven() -> None:
    offered = offer(
        verdict("8.0"),
        failed("7.0", Outcome.NO_KERNEL, "535.54.03", "12.2"),
        predicted=(("9.0", prediction()),),
    )
    checked = check(f"{RUNS}container_image = {DOCKER}\nqueue", offered=offered)
    assert found(checked) == {("refused", 3), ("unverified", 3)}
    words = {one.capability: (one.gpus, one.image) for one in checked.jobs[0].reached}
    assert words == {"7.0": (2, "refused"), "8.0": (4, "verified"), "9.0": (3, "predicted")}
    assert checked.jobs[0].target == IMAGE.target
    assert checked.wrong


def test_a_file_that_matches_proven_gpus_alone_is_right() -> None:
    text = (
        f"{RUNS}container_image = {DOCKER}\nrequire_gpus = Capability == 8.0 && DriverVersion >= 12.4\nqueue"
    )
    offered = offer(verdict("8.0"))
    assert not check(text, offered=offered).wrong
    assert check(text, offered=offer()).wrong  # no verdict at all
    older = f"{RUNS}container_image = {DOCKER}\nrequire_gpus = Capability == 7.0\nqueue"
    assert found(check(older, offered=offer(verdict("7.0")))) == {("unverified", 3)}  # the drivers are older


def test_a_slice_of_a_proven_gpu_is_not_proven() -> None:
    pool = parse_ads([slot("a", [gpu("GPU-1", A100)]), slot("b", [gpu("MIG-1", MIG_SLICE)])], NOW)
    text = f"{RUNS}container_image = {DOCKER}\nrequire_gpus = Capability == 8.0{{}}\nqueue"
    pool = replace(pool, machines=tuple(replace(one, attributes={}) for one in pool.machines))
    both = check(text.format(""), offered=offer(verdict("8.0")), inventory=pool)
    assert found(both) == {("unverified", 3)}
    assert {(one.gpus, one.image) for one in both.jobs[0].reached} == {(1, "verified"), (1, "not-tested")}
    whole = ' && regexp(" mig ", DeviceName, "i") =!= true'
    assert not check(text.format(whole), offered=offer(verdict("8.0")), inventory=pool).wrong


def test_proven_gpus_whose_driver_alone_is_not_asked_for_are_told_too() -> None:
    text = (
        f"{RUNS}container_image = {DOCKER}\nrequire_gpus = Capability == 8.0 && DriverVersion > 12.4\nqueue"
    )
    assert ("narrow", 5) in found(check(text, offered=offer(verdict("8.0"))), "advice")


def test_proven_gpus_that_are_left_out_are_told() -> None:
    one = "gpus_maximum_capability = 8.0\ngpus_minimum_capability = 8.0"
    text = f"{RUNS}container_image = {DOCKER}\n{one}\nqueue"
    checked = check(text, offered=offer(verdict("8.0"), verdict("9.0")))
    assert not checked.wrong
    assert ("narrow", 6) in found(checked, "advice")


def test_a_sif_has_verdicts_of_its_own() -> None:
    def of_sif(address: str, *judged: Any) -> set[tuple[str, int]]:
        text = f"{RUNS}container_image = {address}\nrequire_gpus = Capability == 8.0\nqueue"
        return found(check(text, offered=offer(verdict("8.0"), of_sif=judged)))

    name = f"osdf:///images/pytorch-2.3-cu121-{SIF.sha256[7:19]}.sif"
    two = f"/staging/000000000000-{SIF.sha256[7:19]}.sif"
    for address in (name, two, f"/staging/x-{SIF.sha256[7:]}.sif", f"oras://{SIF.reference}"):
        assert of_sif(address) == {("unverified", 3)}
        assert of_sif(address, verdict("8.0")) == set()


@pytest.mark.parametrize(
    ("site", "kind"), [(site, kind) for site in SITES if site.batch == HTCONDOR for kind in site.kinds]
)
def test_what_submit_writes_is_right_and_reaches_what_is_proven(site: Site, kind: ImageKind) -> None:
    proofs = [verdict("7.0", "535.54.03", "12.2"), verdict("9.0", "570.26", "12.8")]
    offered = offer(*proofs, of_sif=proofs)
    folder = {ImageKind.SIF: "/staging/images", ImageKind.OSDF: "osdf:///chtc/staging/images"}.get(kind, "")
    job = job_spec(offered=offered, site=site.name, kind=kind, folder=folder, memory=GB, disk=14 * GB)
    (text,) = write_htcondor(job).values()
    pool = [{**ad, "Arch": "X86_64", "TotalSlotDisk": 10**9, "Disk": 10**9} for ad in MACHINES]
    checked = check(text, offered=offered, site=site.name, inventory=parse_ads(pool, NOW))
    # the tag of a person's group is nothing that can be known here: a comment in the file tells of it
    lacks = {one.message.split()[0] for one in checked.all_findings if one.severity is Severity.WRONG}
    assert lacks == ({"accounting_group"} if site.name == "igwn" else set()), text
    assert gpus(checked) == {"7.0": 2, "9.0": 2}


def test_disk_for_a_file_that_is_sent() -> None:
    text = f"{RUNS}container_image = x-{SIF.sha256[7:19]}.sif\nrequest_disk = 2GB\nqueue"
    assert ("disk", 4) in found(check(text, offered=offer(of_sif=[verdict("8.0")])))


def test_an_image_that_the_catalog_does_not_have() -> None:
    other = f"docker://registry.example.org/gpu/other@{digest('9')}"
    assert ("unknown-image", 3) in found(check(f"{RUNS}container_image = {other}\nqueue", offered=offer()))
    alone = check(f"{RUNS}container_image = {other}\nqueue")
    assert not alone.wrong
    assert ("no-catalog", 3) in found(alone, "advice")


def test_a_tag_of_a_cataloged_repository_is_told_its_digest() -> None:
    tag = "docker://registry.example.org/gpu/pytorch:2.3.1-cu121"
    checked = check(f"{RUNS}container_image = {tag}\nqueue", offered=offer())
    (one,) = (one for one in checked.all_findings if one.rule == "tag")
    assert one.hint == f"write {DOCKER}"


def test_a_prediction_of_no_is_a_refusal() -> None:
    offered = offer(verdict("8.0"), predicted=(("9.0", prediction(Compatibility.NO)),))
    text = f"{RUNS}container_image = {DOCKER}\nrequire_gpus = Capability > 7.0\nqueue"
    assert found(check(text, offered=offered)) == {("refused", 3)}


# --- how it is told ------------------------------------------------------------------------------


def test_text_and_json() -> None:
    image = "container_image = docker://a.b/c:1\ngpus_minimum_capability = 8.0"
    text = f"{RUNS}{image}\nqueue 3\nrequest_gpus=2\nqueue"
    checked = check(text)
    said = format_check(checked, 80)
    assert "a.sub:3: advice: '1' is a tag" in said
    assert "queue in line 5: 3 jobs, each matches 7 of 9 GPUs of this cluster" in said
    (first,) = [line for line in format_check(checked, 60).splitlines() if line.startswith("queue in line 5")]
    assert len(first) <= 60
    assert "the other 2 do not match: the job does not request its type of GPU\n" in said
    assert (
        "the other 3 do not match: the job does not request its type of GPU (2); it has fewer than 2"
        in " ".join(said.split())
    )
    nowhere = format_check(check(f"{RUNS}require_gpus = Capability > 10\nqueue"))
    assert ": the job does not request its type of GPU [no-match]" in " ".join(nowhere.split())
    assert "no match: the job does not request its type of GPU\n" in nowhere
    assert said.count("request_disk is missing") == 1  # of two queues
    assert said.endswith("a.sub: no errors, 3 warnings")
    assert max(len(line) for line in said.splitlines()) <= 80
    told = json.loads(json.dumps(check_json(checked, "chtc", "", []), default=plain))
    assert (told["failed"], [one["matching"] for one in told["queues"]]) == (False, [7, 6])
    unknown = check_json(check(text, inventory=None), "chtc", "", [])
    assert unknown["queues"][0]["matching"] is None  # type: ignore[index]
    assert "GPUs is unknown" in format_check(check(text, inventory=None))


# --- expressions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "1; y = 2",
        "1 ] ; [ x = 2",
        '"open',
        "(1",
        "1)",
        "{1]",
        "a /* x */",
        "a // x",
        "a = 1",
        "",
        "(" * 200 + "1" + ")" * 200,
        "a" + ".a" * MAX_EXPRESSION,
        "!" * 4000 + "1",
        "1\n2",
    ],
)
def test_what_is_no_whole_expression_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_expression(text)
    long = len(text) > MAX_EXPRESSION or not text.isprintable()
    assert caught.value.code == ("expression-too-long" if long else "expression-invalid")


def test_names_and_values_of_expressions() -> None:
    one = parse_expression("MY.A == 1 && target.b =?= \"x.y\" && Foo(3) is error && 'odd name' > 2 && C.d")
    assert one.names == ("A", "b", "odd name", "C")
    machine, job = make_ad({"Memory": 8, "bad name": 1}), make_ad({"RequestMemory": 4})
    assert parse_expression("TARGET.Memory >= RequestMemory").holds(job, machine) is True
    assert parse_expression("TARGET.Memory < MY.RequestMemory").holds(job, machine) is False
    assert parse_expression("Nothing > 3").holds(job, machine) is None
    assert parse_expression('"a" + 1').holds(job, machine) is None
    assert [literal(text) for text in ('"short"', "true", "3 * 2", "short", "1 +")] == [
        "short",
        True,
        6,
        None,
        None,
    ]


def test_an_image_for_cpus_is_proven_on_no_gpu_and_should_get_none() -> None:
    cpu = replace(IMAGE, target="jax-0.10.2-cpu", cuda="none", required=(), runtime="", driver="")
    offered = ImageOffer(image=cpu, judged=())
    text = f"container_image = {DOCKER}\nexecutable = run.sh\nrequest_memory = 8GB\nrequest_disk = 20GB\n"
    plain = check(text + "queue\n", offered=offered)
    assert found(plain) == set()
    assert "1 job of jax-0.10.2-cpu, without a GPU" in format_check(plain, 80)
    assert found(check(text + "request_gpus = 1\nqueue\n", offered=offered)) == {("no-use", 5)}


# --- revocations ---------------------------------------------------------------------------------


def taken_back(manifest: str, capability: str, index: str = "", config: str = "") -> RevokedCell:
    subject = replace(IMAGE.subject, manifest=manifest)
    subject = replace(subject, index=index or subject.index, config=config or subject.config)
    return RevokedCell(
        subject=subject, capability=capability, by="lab", keyid="a" * 64, when=NOW, why="wrong sums"
    )


@pytest.mark.parametrize("capability", ["8.0", ""])
def test_a_file_of_before_learns_what_was_revoked(capability: str) -> None:
    revoked = (taken_back(IMAGE.subject.manifest, capability),)
    offered = offer(verdict("9.0"), revoked=revoked)
    text = f"{RUNS}universe = container\ncontainer_image = {DOCKER}\nqueue\n"
    checked = check(text, offered=offered)
    assert ("revoked", 4) in found(checked)
    words = {one.capability: one.image for one in checked.jobs[0].reached}
    assert words == {"7.0": "not-tested" if capability else "revoked", "8.0": "revoked", "9.0": "verified"}
    (told,) = (one for one in checked.all_findings if one.rule == "revoked")
    assert all(word in told.message for word in ("lab", "2026-11-22", "wrong sums"))
    again = offer(verdict("8.0"), revoked=revoked)  # verified anew since
    assert {one.capability: one.image for one in check(text, offered=again).jobs[0].reached}[
        "8.0"
    ] == "verified"


@pytest.mark.parametrize(("asked", "told"), [("", True), ("gpus_minimum_capability = 9.0\n", False)])
def test_without_an_inventory_too(asked: str, told: bool) -> None:
    """It is verified elsewhere, so whether the file's own GPUs were revoked decides."""
    offered = offer(verdict("9.0"), revoked=(taken_back(IMAGE.subject.manifest, "8.0"),))
    text = f"{RUNS}{asked}universe = container\ncontainer_image = {DOCKER}\nqueue\n"
    rules = {one.rule for one in check(text, offered=offered, inventory=None).all_findings}
    assert ("revoked" in rules) is told


def test_no_prediction_outweighs_a_revocation() -> None:
    predicted = (("8.0", prediction()),)
    plain = offer(predicted=predicted)
    offered = offer(predicted=predicted, revoked=(taken_back(IMAGE.subject.manifest, ""),))
    (before, now) = (expected_grounds(forms_of(one, "")[0].grounds, one.image) for one in (plain, offered))
    assert [len(before.classes), len(now.classes)] == [1, 0]


def test_an_image_that_the_catalog_has_no_more_was_revoked() -> None:
    other, file = digest("8"), digest("7")
    rows = (taken_back(digest("6"), "8.0", index=other, config=file),)
    offered = offer(verdict("8.0"), revoked=rows)
    for name in (f"docker://registry.example.org/gpu/pytorch@{other}", f"torch-{file[7:19]}.sif"):
        text = f"{RUNS}universe = container\ncontainer_image = {name}\nqueue\n"
        assert ("revoked", 4) in found(check(text, offered=offered))
        assert ("unknown-image", 4) in found(check(text, offered=offer(verdict("8.0"))))


@pytest.mark.parametrize(
    ("most", "site", "rules"),
    [
        ("7.0", "chtc", {"no-match"}),
        ("8.0", "chtc", set()),
        ("7.0", "ospool", set()),
        ("$(x)", "chtc", set()),
    ],
)
def test_a_job_for_gpus_that_are_older_than_those_of_the_site(most: str, site: str, rules: set[str]) -> None:
    checked = check(f"{RUNS}gpus_maximum_capability = {most}\n{CHTC}queue", site=site, inventory=None)
    assert {rule for rule, _ in found(checked)} & {"no-match"} == rules


@pytest.mark.parametrize(
    ("version", "matches"),
    [("25.8.2", True), ("25.14.0", True), ("26.0.1", True), ("25.8.1", False), ("23.9.6", False)],
)
def test_machines_of_older_pools_do_not_open_amd_gpus(version: str, matches: bool) -> None:
    machine = make_ad({"CondorVersion": f"$CondorVersion: {version} 2026-08-21 BuildID: 1 $"})
    assert parse_expression(AMD_MACHINE).holds(make_ad({}), machine) is matches
