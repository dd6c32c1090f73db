"""Shapes that public submit files have, written anew: what is said of each, and what `--fix` makes of it.

Each case names the public file, or the site's guide, whose shape it has. Of all other rules nothing is said:
`missing`, `no-image`, `tag`, `name` and `site` alone are left out, as files without a disk or a digest are
most of them.
"""

from __future__ import annotations

import pytest

from imagefactory.extras.lint.check import check_submit_file, fix_text, format_diff
from imagefactory.extras.lint.findings import CheckContext, Severity, SubmitCheckResult
from imagefactory.extras.lint.reader import parse_submit_file
from imagefactory.schedulers.sites import find_site

HEAD = "executable = run.sh\nrequest_gpus = 1\n"
LEFT_OUT = {"missing", "no-image", "tag", "name", "site"}


def check(text: str, site: str = "generic", digest: str = "") -> SubmitCheckResult:
    around = CheckContext(
        site=find_site(site),
        inventory=None,
        catalog=None,
        offer=lambda image: pytest.fail(f"{image} was judged"),
        digest=lambda reference: digest if reference == "docker.io/pytorch/pytorch:2.1.0" else "",
    )
    return check_submit_file(parse_submit_file(text, "a.sub"), around)


def told(text: str, site: str = "generic") -> dict[str, tuple[str, str]]:
    """Severity and hint by rule."""
    return {
        one.rule: (one.severity.value, one.hint)
        for one in check(text, site).all_findings
        if one.rule not in LEFT_OUT
    }


# --- attributes of old machines ------------------------------------------------------------------

OLD = (
    # CHTC/templates-GPUs, containers/tensorflow_python
    (
        "(Target.CUDADriverVersion >= 10.1) && (CUDACapability < 8)",
        "gpus_minimum_runtime = 10.1 and gpus_maximum_capability = 7.9",
    ),
    # joeliven/carproject, condor_scripts/c_vgg16_a.sh
    ("(TARGET.GPUSlot && CUDAGlobalMemoryMb >= 6144)", "gpus_minimum_memory = 6GB"),
    # p-kar/text-style-transfer-gan, scripts/train_seq2seq/condor_script_proto.sh
    ("TARGET.GPUSlot && CUDAGlobalMemoryMb >= 7000", "gpus_minimum_memory = 7000MB"),
    # hasteinmetz/LING573-Project, cmd/ensemble.cmd
    ("(CUDACapability >= 10.2) && $(requirements:True)", "gpus_minimum_runtime = 10.2"),
    # gvermillion/research, prod/8x8x2/dry/run2.cmd
    (
        'OpSys == "LINUX" && (CUDA0Capability >= 3.5) && CUDA0Capability >= 3.0',
        "require_gpus = Capability >= 3.5 && Capability >= 3.0",
    ),
    # brando90/diversity-for-predictive-success-of-meta-learning, job.sub
    (
        '(CUDADeviceName == "Quadro RTX 6000") || (CUDADeviceName == "NVIDIA A40")',
        'require_gpus = (DeviceName == "Quadro RTX 6000") || (DeviceName == "NVIDIA A40")',
    ),
    # zqiu24/POET, train.sub, and the same excluded
    ('HasDocker && (CUDADeviceName != "Tesla K40m")', 'require_gpus = DeviceName != "Tesla K40m"'),
    ('regexp("V100", TARGET.CUDADeviceName)', 'require_gpus = regexp("V100", DeviceName)'),
    ("CUDACapability == 7.5", "gpus_minimum_capability = 7.5 and gpus_maximum_capability = 7.5"),
    # Zeju1997/nerfacc, train.sub
    ("TARGET.CUDAGlobalMemoryMb  > 30000", "gpus_minimum_memory = 30001MB"),
    ("8 <= CUDACapability && 1 > 0", "gpus_minimum_capability = 8.0"),
    ("CUDACapability > 7", "gpus_minimum_capability = 7.1"),
    ("CUDAMaxSupportedVersion >= 12040", "gpus_minimum_runtime = 12.4"),
    ("CUDADriverVersion >= 450", 'require_gpus = versionGE(NvidiaDriver, "450")'),
    ("CUDAClockMhz > 1000 && CUDACapability >= 7", "require_gpus = ClockMhz > 1000 && Capability >= 7"),
)


@pytest.mark.parametrize(("asked", "hint"), OLD)
def test_what_old_machines_are_asked_keeps_its_meaning(asked: str, hint: str) -> None:
    text = f"{HEAD}requirements = {asked}\nqueue"
    assert told(text) == {"deprecated": ("advice", f"write {hint}")}
    assert told(text, "chtc") == {"deprecated": ("wrong", f"write {hint}")}


def test_gpus_and_machines_in_one_choice_are_left_to_a_person() -> None:
    text = f"{HEAD}requirements = CUDACapability >= 7 || HasFoo\nqueue"
    assert told(text)["deprecated"][1].startswith("put conditions on GPUs into require_gpus")
    assert fix(text) == text


def test_a_file_that_chooses_gpus_already_is_not_mended_over_it() -> None:
    text = f"{HEAD}requirements = CUDACapability >= 7\nrequire_gpus = Capability < 9\nqueue"
    assert told(text)["deprecated"][1] == "add it to require_gpus: ... && (Capability >= 7)"
    assert fix(text) == text


def test_old_names_elsewhere() -> None:
    assert told(f"{HEAD}require_gpus = CUDACapability >= 7\nqueue") == {
        "deprecated": ("wrong", "write Capability >= 7")
    }
    assert told(f"{HEAD}rank = CUDACapability\nqueue") == {
        "deprecated": ("advice", "write rank = GPUs_Capability")
    }
    assert told(f"{HEAD}cuda_version = 12.1\nqueue") == {
        "deprecated": ("advice", "write gpus_minimum_runtime = 12.1")
    }
    assert "capability" in told(f"{HEAD}gpus_minimum_capability = 11.8\nqueue")
    assert "capability" not in told(f"{HEAD}gpus_minimum_capability = 12.0\nqueue")  # both


# --- valid, and said nothing of ------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        "gpus_minimum_memory = 0\nqueue",  # a public AlphaFold 3 pipeline of CHTC's users
        "request_foobar = 2\nrequest_tape_drives = 1\nqueue",  # HTCondor's manual, custom resources
        "+Owner = Undefined\nqueue",  # jobs of CMS with +DESIRED_Sites = "T2_US_UCSD"
        "queue $ENV(N)",
        "queue $(num_jobs) mem, disk, params from $(commands_file)",  # NicholasCorrado/DRO, chtc/job.sub
        "queue 3 from list.txt",
        "queue job_index from seq 0 191 |",  # UW-xDD/text2graph_llm, chtc/job.sub
        "requirements = true && \\\n # (Memory > 3) && \\\n  HasDocker\nqueue",
        "gpus_minimum_memory = 20000\nqueue",  # the OSPool's guide to GPUs
        "request_disk = 1000000\nqueue",
        "get_env = False\nqueue",  # another name of getenv, in HTCondor itself
        '+DESIRED_Sites = "T2_US_UCSD"\n+MaxRuntime = 3600\n+A = B =?= 3\n+B = $$(Memory)\nqueue',
        'arguments = a # b\nenvironment = "A=# b"\nqueue',
        "logs = out\nlog_dir = $(logs)\nlog = $(log_dir)/a\nqueue",
        'requirements = (Machine == "a") || (Machine == "b")\nqueue',
    ],
)
def test_what_is_valid_is_left_alone(lines: str) -> None:
    assert told(HEAD + lines) == {}


# --- what a facilitator sees ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "rule", "severity"),
    [
        ("getenv = True", "getenv", "advice"),  # p-kar/CS388-NLP-HW2, condor_scripts/condor.sh
        ("get_env = True", "getenv", "advice"),  # joeliven/carproject
        ("output = out.txt # where it goes", "comment", "wrong"),
        ("request_gpus = 2 # two", "comment", "wrong"),
        # zhuchen96/celf_motr, run.sub
        ('requirements = (Memory > 1) && TARGET.Machine=="a.b.edu"', "pinned", "advice"),
        ("ouput = a.txt", "misspelt", "wrong"),
        ("request_mem = 8GB", "misspelt", "wrong"),
        ("should_transfer_file = YES", "misspelt", "wrong"),
        ("+SingularityImage = /a/b.sif", "unquoted", "wrong"),
        ('+SingularityImage = "/cvmfs/x.org/a/b:latest"', "singularity", "advice"),  # grassla/osg_testing
        # the OSPool's guide to GPUs
        ("container_image = /cvmfs/singularity.opensciencegrid.org/htc/tensorflow:1.3", "sandbox", "advice"),
        ("container_image = a/b:1.0", "sandbox", "wrong"),
        # CHTC/templates-GPUs, checkpointing/tensorflow
        ("transfer_input_files = http://proxy.chtc.wisc.edu/SQUID/gpu-examples/a.tar", "retired", "advice"),
        ("transfer_input_files = stash:///osgconnect/a", "retired", "advice"),
        (
            '+SingularityImage = "osdf:///ospool/ap21/data/me/a.sif"',
            "retired",
            "advice",
        ),  # rafathasan/htcondor
        ("executable = /mnt/gluster/me/a.sh", "retired", "wrong"),
        ("request_memory = 16", "unit", "wrong"),
    ],
)
def test_what_a_facilitator_would_see(lines: str, rule: str, severity: str) -> None:
    assert told(f"{HEAD}{lines}\nqueue")[rule][0] == severity


def test_severity_is_the_sites() -> None:
    text = f"{HEAD}getenv = true\nqueue"

    def missing(site: str) -> dict[str, str]:
        found = (one for one in check(text, site).all_findings if one.rule == "missing")
        return {one.message.split()[0]: one.severity.value for one in found}

    assert missing("generic") == {"request_memory": "advice", "request_disk": "advice"}
    assert missing("igwn") == {
        "request_memory": "advice",
        "request_disk": "wrong",
        "accounting_group": "wrong",
    }
    assert told(text, "igwn")["getenv"][0] == "wrong"
    set_as_attributes = f"{HEAD}+RequestMemory = 1000\nRequestDisk = 1GB\nqueue"
    assert not any(one.rule == "missing" for one in check(set_as_attributes).all_findings)


def test_a_tag_is_advice_with_its_digest_where_the_registry_tells_it() -> None:
    text = f"{HEAD}container_image = docker://pytorch/pytorch:2.1.0\nqueue"
    digest = "sha256:" + "a" * 64
    (one,) = (one for one in check(text, digest=digest).all_findings if one.rule == "tag")
    assert one.severity is Severity.ADVICE
    assert one.hint == f"write docker://docker.io/pytorch/pytorch@{digest}"
    bare = text.replace("container_image = docker://", "universe = docker\ndocker_image = ")
    (one,) = (one for one in check(bare, digest=digest).all_findings if one.rule == "tag")
    assert one.hint == f"write docker.io/pytorch/pytorch@{digest}"


# --- mending -------------------------------------------------------------------------------------


def fix(text: str, site: str = "generic") -> str:
    return fix_text(text, lambda one: check(one, site))


FIXED = (
    (
        "requirements = (CUDACapability >= 7.5) && (HasCHTCStaging == true)",
        "requirements = HasCHTCStaging == true\ngpus_minimum_capability = 7.5",
    ),
    (
        "requirements = true && \\\n CUDACapability >= 7.5",
        "requirements = true\ngpus_minimum_capability = 7.5",
    ),
    ("requirements = CUDACapability < 8", "gpus_maximum_capability = 7.9"),
    ("output = a.txt # where", "# where\noutput = a.txt"),
    ("+GPUJobLength = short", '+GPUJobLength = "short"'),
    ("WantGPULab = true", "+WantGPULab = true"),
    ("ouput = a", "output = a"),
    ("input = stash:///a/b", "input = osdf:///a/b"),
    ('container_image = "docker://a.b/c:1"', "container_image = docker://a.b/c:1"),
    ("require_gpus = CUDACapability >= 7", "require_gpus = Capability >= 7"),
)


@pytest.mark.parametrize(("lines", "mended"), FIXED)
def test_what_is_certain_is_mended(lines: str, mended: str) -> None:
    text = f"{HEAD}{lines}\nqueue\n"
    assert fix(text) == f"{HEAD}{mended}\nqueue\n"
    assert fix(fix(text)) == fix(text)


def test_the_ospool_has_its_own_word_for_images() -> None:
    text = f'{HEAD}+SingularityImage = "osdf:///a/b.sif"\nqueue\n'
    assert fix(text, "ospool") == f"{HEAD}container_image = osdf:///a/b.sif\nqueue\n"
    assert fix(text) == text  # elsewhere an image in a shared folder would be sent


@pytest.mark.parametrize(
    "lines",
    [
        "request_memory = 16",
        "requirements = CUDACapability >= 10.2",
        "getenv = true",
        "container_image = docker://a.b/c:1",
        "output = # a",
        "requirements = CUDACapability >= 7 && \\\n # why \\\n true",
        "ouput = a\noutput = b",
    ],
)
def test_what_is_a_guess_is_left_to_a_person(lines: str) -> None:
    text = f"{HEAD}{lines}\nqueue\n"
    assert fix(text) == text


def test_the_difference_is_shown() -> None:
    text = f"{HEAD}ouput = a\nqueue\n"
    assert format_diff("a.sub", text, fix(text)).splitlines()[:2] == ["--- a.sub", "+++ a.sub (mended)"]
    assert format_diff("a.sub", text, text) == ""
