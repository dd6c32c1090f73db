"""Submit files as text: what each line says, and that nothing else can be said by it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from imagefactory.cli.job import IMAGE_TYPES
from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.jobs.htcondor import (
    ROWS_MOST,
    RUN,
    JobImageSpec,
    SubmitCommand,
    check_columns,
    format_arguments,
    format_gpu_request,
    format_runs,
    format_submit,
)
from imagefactory.jobs.make import gathering
from imagefactory.jobs.offer import GpuClass, choose_form, forms_of
from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor.ads import WHOLE_GPU_EXPRESSION
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import SITES, find_site
from imagefactory.schedulers.sizes import (
    GB,
    disk_of,
    format_size,
    image_disk,
    memory_of,
    parse_size,
    parse_time,
)
from imagefactory.settings.choices import SITES as SETTING_SITES
from tests.made.offers import IMAGE, NOW, SIF, digest, failed, gpu_class, offer, verdict
from tests.services.tier import many

GENERIC = find_site("generic")
RUNS = SubmitCommand(name="train", executable="train.sh")
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


def taken(*capabilities: str, basis: ClaimBasis = ClaimBasis.VERIFIED) -> JobImageSpec:
    (form,) = forms_of(offer(verdict("8.0")), "")
    classes = tuple(gpu_class(one, basis=basis) for one in capabilities or ("8.0",))
    return JobImageSpec(target=IMAGE.target, platform=IMAGE.platform, form=form, classes=classes, judged=NOW)


def commands(text: str) -> dict[str, str]:
    """The commands of a submit file as HTCondor reads lines: none may stand twice."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#") and line != "queue":
            name, equals, value = line.partition(" = ")
            assert equals, line
            assert name not in found, line
            found[name] = value
    return found


def test_a_whole_file() -> None:
    (form,) = forms_of(offer(verdict("8.0")), "")
    one = replace(taken(), form=form, classes=form.grounds.classes)
    run = replace(
        RUNS,
        arguments=("--lr", "0.1", "--name", "a run"),
        inputs=("data.csv", "osdf:///site/weights.pt"),
        outputs=("model.pt",),
        time=timedelta(hours=12),
    )
    assert format_submit(one, run, find_site("chtc")) == WHOLE


# --- GPUs ------------------------------------------------------------------------------------------


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
    ],
)
def test_gpus_are_matched_exactly(classes: Sequence[tuple[str, str]], lines: list[str]) -> None:
    assert list(format_gpu_request([gpu_class(*one) for one in classes], slices=True)) == lines


def test_slices_of_gpus_are_left_out_unless_asked_for() -> None:
    """A verdict on a whole GPU is none on a slice of one (MIG)."""
    one, hole, floors = [gpu_class("8.0")], [gpu_class("7.0"), gpu_class("8.0")], [gpu_class("7.0", "")]
    assert format_gpu_request(one)[-1] == f"require_gpus = {WHOLE_GPU_EXPRESSION}"
    (line,) = format_gpu_request(hole)
    assert line == (
        f"require_gpus = member(Capability, {{7.0, 8.0}}) && DriverVersion >= 12.4 && {WHOLE_GPU_EXPRESSION}"
    )
    (line,) = format_gpu_request([*floors, *one])
    assert line == (
        "require_gpus = ((Capability == 7.0) || (Capability == 8.0 && DriverVersion >= 12.4))"
        f" && {WHOLE_GPU_EXPRESSION}"
    )
    text = format_submit(taken("8.0"), replace(RUNS, mig=True), GENERIC)
    assert WHOLE_GPU_EXPRESSION not in text
    assert "# WARNING: slices of these GPUs (MIG) match too, of which no verdict speaks." in text
    assert "WARNING" not in format_submit(taken("8.0"), RUNS, GENERIC)


def test_a_range_never_holds_a_capability_that_is_not_proven() -> None:
    """8.6 and 8.9 are neighbours on a list of cards; 8.7 and 8.8 lie between them."""
    (line,) = format_gpu_request([gpu_class("8.6"), gpu_class("8.9")])
    assert line.startswith("require_gpus = member(Capability, {8.6, 8.9}) &&")
    assert "member(Capability, {8.6, 8.9})" in line


def test_capabilities_that_this_program_does_not_know_are_no_range() -> None:
    """Catalogues are written by newer programs too: what lies between 20.0 and 20.5 nobody knows here."""
    (line,) = format_gpu_request([gpu_class("20.0"), gpu_class("20.5")], slices=True)
    assert line == "require_gpus = member(Capability, {20.0, 20.5}) && DriverVersion >= 12.4"
    assert "gpus_maximum_capability = 20.0" in format_gpu_request([gpu_class("20.0")])


def test_memory_of_a_gpu_joins_either_form() -> None:
    assert "gpus_minimum_memory = 16GB" in format_gpu_request([gpu_class("8.0")], 16 * GB)
    classes = [gpu_class("7.0", ""), gpu_class("8.0")]
    wanted = (
        "require_gpus = ((Capability == 7.0) || (Capability == 8.0 && DriverVersion >= 12.4))"
        " && GlobalMemoryMb >= 16384"
    )
    assert format_gpu_request(classes, 16 * GB, slices=True) == (wanted,)
    assert format_gpu_request(classes, 16 * GB) == (f"{wanted} && {WHOLE_GPU_EXPRESSION}",)


@pytest.mark.parametrize("capabilities", [("8.0",), ("7.0", "8.0"), ("8.0", "8.6"), ("7.5", "8.9", "9.0")])
def test_neither_form_cancels_what_the_other_says(capabilities: tuple[str, ...]) -> None:
    said = commands(format_submit(taken(*capabilities), replace(RUNS, gpu_memory=GB), GENERIC))
    compared = ("Capability", "DriverVersion", "GlobalMemoryMb")
    named = [name for name in compared if name in said["require_gpus"]]
    assert named == ([] if any(name.startswith("gpus_") for name in said) else list(compared))


def test_what_is_predicted_alone_is_said_so() -> None:
    proven, both = taken("8.0"), taken("8.0")
    both = replace(both, classes=(*both.classes, gpu_class("8.6", "12.1", basis=ClaimBasis.PREDICTED)))
    assert "WARNING" not in format_submit(proven, RUNS, GENERIC)
    text = format_submit(both, RUNS, GENERIC)
    assert "# WARNING: no verdict says that it runs on 8.6; its code alone predicts so." in text
    assert "# this very image passed the suite:" not in text
    assert "#   8.6, drivers that take CUDA 12.1 or newer: predicted," in text


def test_what_is_said_of_several_capabilities_is_said_once() -> None:
    def coded(capability: str, faults: tuple[CellClaim, ...] = ()) -> GpuClass:
        made = gpu_class(capability, "12.1", basis=ClaimBasis.PREDICTED)
        reason = f"libtorch_cuda.so has {made.capability.sm} code"
        return replace(made, claim=replace(made.claim, reason=reason), faults=faults)

    fault = CellClaim(
        basis=ClaimBasis.DOCUMENTED,
        answer=Compatibility.PARTLY,
        rule="known-bad:x",
        reason="no Triton",
        source="s",
    )
    some = (coded("7.0"), coded("7.5", (fault,)), coded("8.0", (fault,)), coded("9.0"))
    form = taken().form
    refused = tuple((parse_capability(text), "no code") for text in ("5.0", "5.2", "12.0"))
    form = replace(form, grounds=replace(form.grounds, refused=refused))
    text = format_submit(replace(taken(), classes=some, form=form), RUNS, GENERIC)
    least = ", drivers that take CUDA 12.1 or newer: predicted,"
    assert f"#   7.0, 7.5, 8.0, 9.0{least} libtorch_cuda.so has sm_70, sm_75, sm_80, sm_90 code (" in text
    assert "#   known fault on 7.5, 8.0: no Triton\n" in text
    assert "#   not 5.0, 5.2, 12.0: no code\n" in text
    near = replace(taken(), classes=(*some[:3], coded("7.2")))
    assert f"#   7.0 to 8.0{least}" in format_submit(near, RUNS, GENERIC)


def test_capabilities_that_failed_are_named() -> None:
    (form,) = forms_of(offer(verdict("8.0"), failed("7.0", Outcome.NO_KERNEL)), "")
    text = format_submit(replace(taken(), form=form), RUNS, GENERIC)
    assert (
        "\n#   not 7.0: no-kernel: on NVIDIA A100-SXM4-40GB, driver 550.54.15, 2026-11-22: the reason of"
        in text
    )


def test_a_reason_cannot_leave_its_comment() -> None:
    """Reasons and names of GPUs come from strangers' reports; a backslash at a line's end goes on with it."""
    nasty = gpu_class("8.0")
    nasty = replace(nasty, claim=replace(nasty.claim, reason="fine\nexecutable = /bin/rm", source="x\\"))
    text = format_submit(replace(taken(), classes=(nasty,)), RUNS, GENERIC)
    assert commands(text)["executable"] == "train.sh"
    assert not any(line.endswith("\\") for line in text.splitlines())
    assert text.isascii()


# --- images ----------------------------------------------------------------------------------------


def test_each_form_has_its_address_and_its_own_verdicts() -> None:
    forms = forms_of(offer(verdict("8.0"), of_sif=[verdict("7.0")]), "/staging/gpu/")
    said = {
        form.image.kind: (form.image.address, [str(one.capability) for one in form.grounds.classes])
        for form in forms
    }
    name = f"pytorch-2.3-cu121-{'d' * 12}.sif"
    assert said == {
        ImageKind.DOCKER: (f"docker://registry.example.org/gpu/pytorch@{digest('a')}", ["8.0"]),
        ImageKind.SIF: (f"/staging/gpu/{name}", ["7.0"]),
        ImageKind.ORAS: (f"oras://registry.example.org/gpu/pytorch@{digest('e')}", ["7.0"]),
    }


def test_a_folder_of_the_osdf_makes_osdf_addresses() -> None:
    forms = forms_of(offer(of_sif=[]), "osdf:///chtc/staging/gpu")
    (form,) = (one for one in forms if one.image.kind is ImageKind.OSDF)
    assert form.image.address == f"osdf:///chtc/staging/gpu/pytorch-2.3-cu121-{'d' * 12}.sif"
    text = format_submit(replace(taken(), form=form), RUNS, find_site("chtc"))
    assert commands(text)["requirements"] == '(Arch == "X86_64") && (HasCHTCStaging == true)'


def test_a_file_that_machines_share_is_not_sent_with_each_job() -> None:
    """`should_transfer_container`, which the manual names, condor_submit 23.9 does not know."""
    forms = forms_of(offer(of_sif=[]), "/shared/gpu")
    (form,) = (one for one in forms if one.image.kind is ImageKind.SIF)
    said = commands(format_submit(replace(taken(), form=form), replace(RUNS, disk=GB), GENERIC))
    assert said["transfer_container"] == "false"
    assert said["request_disk"] == "1GB"
    (_, form, _) = forms_of(offer(of_sif=[]), "")
    said = commands(format_submit(replace(taken(), form=form), RUNS, GENERIC))
    assert "transfer_container" not in said
    assert said["request_disk"] == "5GB"


def test_without_a_folder_the_file_is_beside_the_submit_file() -> None:
    (_, form, _) = forms_of(offer(of_sif=[]), "")
    assert form.image.address == f"pytorch-2.3-cu121-{'d' * 12}.sif"
    assert form.fetch == f"apptainer pull pytorch-2.3-cu121-{'d' * 12}.sif oras://{SIF.reference}"


@pytest.mark.parametrize(
    "folder",
    [
        "here",
        "osdf://x/y",
        "/a b",
        "/a/../b",
        "/a;b",
        "osdf:///a/$(x)",
        "http://x/y",
        "/a\nqueue",
        "osdf:///..",
        "/a/..",
        "/./a",
        "osdf:///a/../b",
    ],
)
def test_folders_that_are_no_places(folder: str) -> None:
    with pytest.raises(UsageError) as caught:
        forms_of(offer(of_sif=[]), folder)
    assert caught.value.code == "sif-folder-invalid"
    assert folder[:80] in caught.value.message


def test_an_image_that_apptainer_built_is_no_image_for_docker() -> None:
    made = offer(of_sif=[verdict("8.0")], subject=SIF.subject, reference=SIF.reference)
    assert [form.image.kind for form in forms_of(made, "")] == [ImageKind.SIF, ImageKind.ORAS]


def test_a_tag_is_never_an_address() -> None:
    assert forms_of(offer(verdict("8.0"), reference="registry.example.org/gpu/pytorch:2.3-cu121"), "") == ()


def test_the_form_that_is_proven_is_chosen_and_else_what_the_site_advises() -> None:
    chtc = find_site("chtc")
    only_sif = forms_of(offer(of_sif=[verdict("8.0")]), "")
    assert choose_form(only_sif, chtc, None).image.kind is ImageKind.ORAS
    neither = forms_of(offer(of_sif=[]), "")
    assert choose_form(neither, chtc, None).image.kind is ImageKind.DOCKER
    assert choose_form(only_sif, chtc, ImageKind.DOCKER).image.kind is ImageKind.DOCKER


def test_a_kind_that_a_site_does_not_take() -> None:
    forms = forms_of(offer(of_sif=[]), "")
    with pytest.raises(UsageError) as caught:
        choose_form(forms, find_site("ospool"), ImageKind.ORAS)
    assert caught.value.code == "image-type-unsupported"
    assert "the OSPool" in caught.value.message
    assert "'oras'" in caught.value.message
    with pytest.raises(NothingSelectedError) as caught:
        choose_form(forms_of(offer(), ""), GENERIC, ImageKind.SIF)
    assert caught.value.code == "image-type-not-offered"
    assert "docker" in caught.value.message
    with pytest.raises(NothingSelectedError) as caught:
        choose_form(forms_of(offer(reference=""), ""), GENERIC, None)
    assert caught.value.code == "image-not-published"


@pytest.mark.parametrize(
    "address",
    [
        "docker://x/y:tag",
        f"docker://x/y@{digest('a')}\nqueue 1000",
        f"docker://x/$(y)@{digest('a')}",
        "/a/b.simg",
        "/a/b c.sif",
        "|sh x.sif",
        "/a/../b.sif",
        "osdf:///../b.sif",
        "../b.sif",
    ],
)
def test_an_address_that_is_not_pinned_or_says_more(address: str) -> None:
    one = taken()
    form = replace(one.form, image=replace(one.form.image, address=address))
    with pytest.raises(UsageError) as caught:
        format_submit(replace(one, form=form), RUNS, GENERIC)
    assert caught.value.code == "submit-value-invalid"
    assert repr(address[:80]) in caught.value.message


def test_an_image_for_other_machines() -> None:
    text = format_submit(replace(taken(), platform="linux/arm64"), RUNS, GENERIC)
    assert commands(text)["requirements"] == '(Arch == "aarch64")'
    with pytest.raises(UsageError) as caught:
        format_submit(replace(taken(), platform="linux/s390x"), RUNS, GENERIC)
    assert caught.value.code == "platform-unsupported"
    assert "linux/s390x" in caught.value.message


# --- what runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0.1"], '"--lr 0.1"'),
        (["a b", "it's", 'a "q"', ""], "\"'a b' 'it''s' 'a \"\"q\"\"' ''\""),
        (["--seed", "$(Process)"], "\"--seed '$(Process)'\""),
        (["a=$(lr)b"], "\"'a=$(value_lr)b'\""),
        (["$(RANK)$(run)"], "\"'$(value_rank)$(run)'\""),
    ],
)
def test_arguments_as_condor_submit_reads_them(words: list[str], said: str) -> None:
    assert format_arguments(words, (RUN, "lr", "rank")) == said


@pytest.mark.parametrize(
    "word", ["$(lr)", "$HOME", "$$(Memory)", "$ENV(HOME)", "$(Process", "$INT(Process)", "\n", "é"]
)
def test_arguments_in_which_something_else_would_be_filled_in(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        format_arguments([word])
    assert caught.value.code == "macro-unknown" if "$" in word else "submit-value-invalid"


@pytest.mark.parametrize("path", ["a b", "a,b", "a;b", "$(x)", "a\nqueue", "~/x", "a*", "", "-x y"])
@pytest.mark.parametrize("field", ["executable", "inputs", "outputs"])
def test_paths_that_say_more(path: str, field: str) -> None:
    value: object = path if field == "executable" else (path,)
    with pytest.raises(UsageError) as caught:
        format_submit(taken(), replace(RUNS, **{field: value}), GENERIC)  # type: ignore[arg-type]
    assert caught.value.code == "submit-value-invalid"


@pytest.mark.parametrize("name", ["a/b", "a b", "../x", "$(x)", "", ".x"])
def test_names_that_leave_the_folder(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        format_submit(taken(), replace(RUNS, name=name), GENERIC)
    assert caught.value.code == "submit-value-invalid"


# --- sizes and sites -------------------------------------------------------------------------------


def test_disk_holds_the_image_in_its_form() -> None:
    assert image_disk(ImageKind.SIF, 4 * GB, 7 * GB) == 4 * GB
    assert image_disk(ImageKind.OSDF, 4 * GB, 7 * GB) == 4 * GB
    assert image_disk(ImageKind.ORAS, 4 * GB, 7 * GB) == 8 * GB
    assert image_disk(ImageKind.DOCKER, 3 * GB, 7 * GB) == 13 * GB
    assert image_disk(ImageKind.DOCKER, 3 * GB, 0) == 15 * GB  # nobody counted what it unpacks to
    assert disk_of(ImageKind.SIF, 4 * GB + 1, 7 * GB) == 6 * GB


def test_memory_grows_with_the_image() -> None:
    assert memory_of(7 * GB) == 8 * GB
    assert memory_of(0, 2 * GB) == 7 * GB


def test_what_a_person_asks_for_counts_and_cannot_be_less_than_the_image() -> None:
    text = format_submit(taken(), replace(RUNS, disk=100 * GB, memory=GB // 2, cpus=4, gpus=2), GENERIC)
    said = commands(text)
    assert said["request_disk"] == "100GB"
    assert said["request_memory"] == "512MB"
    assert (said["request_cpus"], said["request_gpus"]) == ("4", "2")
    with pytest.raises(UsageError) as caught:
        format_submit(taken(), replace(RUNS, disk=12 * GB), GENERIC)
    assert caught.value.code == "disk-too-small"
    assert "12GB" in caught.value.message
    assert "--disk 13GB" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * GB), ("1.5 G", 3 * GB // 2), ("512", GB // 2), ("1tb", 1024 * GB)]
)
def test_sizes_are_htcondors(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["", "0GB", "8 gigs", "-1GB", "1e9", "8GB\nqueue", "99999999TB", "B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.code == "size-invalid"


def test_times() -> None:
    assert parse_time("90m") == timedelta(minutes=90)
    assert parse_time("3d") == timedelta(days=3)
    for text in ("", "0h", "12", "1y", "999999w", "-1h"):
        with pytest.raises(UsageError) as caught:
            parse_time(text)
        assert caught.value.code == "duration-invalid"


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
def test_how_sites_are_told_how_long_a_job_runs(site: str, hours: int | None, line: str) -> None:
    time = None if hours is None else timedelta(hours=hours)
    assert line in format_submit(taken(), replace(RUNS, time=time), find_site(site)).splitlines()


@pytest.mark.parametrize(("site", "hours"), [("chtc", 169), ("ospool", 21)])
def test_jobs_too_long_for_a_site(site: str, hours: int) -> None:
    with pytest.raises(UsageError) as caught:
        find_site(site).lines(timedelta(hours=hours))
    assert caught.value.code == "job-too-long"


def test_sites_are_one_list() -> None:
    names = sorted(site.name for site in SITES)
    assert sorted(SETTING_SITES) == names
    assert sorted(IMAGE_TYPES) == sorted(ImageKind)
    assert all(site.kinds and site.source for site in SITES)
    with pytest.raises(UsageError) as caught:
        find_site("nowhere")
    assert caught.value.code == "site-unknown"
    assert "'nowhere'" in caught.value.message


# --- sweeps ----------------------------------------------------------------------------------------


def test_a_sweep_of_values() -> None:
    text = format_runs("train.sub", ("lr", "name"), [("0.1", "a b"), ("0.01", "c")])
    assert text == (
        "JOB run-1 train.sub\n"
        'VARS run-1 run="1" value_lr="0.1" value_name="a b"\n'
        "JOB run-2 train.sub\n"
        'VARS run-2 run="2" value_lr="0.01" value_name="c"\n'
    )


def test_a_last_node_waits_for_all_runs() -> None:
    lines = format_runs("train.sub", (), [(), ()], "train-gather.sub").splitlines()
    assert lines == [
        "JOB gather train-gather.sub",
        "JOB run-1 train.sub",
        'VARS run-1 run="1"',
        "PARENT run-1 CHILD gather",
        "JOB run-2 train.sub",
        'VARS run-2 run="2"',
        "PARENT run-2 CHILD gather",
    ]


def test_who_gathers_gets_the_folders_and_no_gpu() -> None:
    run = replace(
        RUNS, columns=("run",), arguments=("$(run)",), outputs=("a",), gather="gather.py", memory=GB
    )
    text = format_submit(taken(), gathering(run, 2, sent=True), GENERIC)
    found = commands(text)
    assert found["executable"] == "gather.py"
    assert found["transfer_input_files"] == "run-1, run-2"
    assert found["request_memory"] == "1GB"
    assert found.keys().isdisjoint(("arguments", "initialdir", "transfer_output_files", "request_gpus"))
    assert "It asks for no GPU." in text
    assert "for CPUs alone" not in text


def test_a_checkpoint_is_kept_by_the_code_that_says_so() -> None:
    found = commands(format_submit(taken(), replace(RUNS, checkpoint="state/last.pt"), GENERIC))
    assert found["checkpoint_exit_code"] == "85"
    assert found["transfer_checkpoint_files"] == "state/last.pt"
    with pytest.raises(UsageError) as caught:
        format_submit(taken(), replace(RUNS, checkpoint="a, b"), GENERIC)
    assert caught.value.code == "submit-value-invalid"
    assert "'a, b'" in caught.value.message


def test_what_goes_on_after_an_eviction_gets_the_gpus_that_may_evict_it() -> None:
    text = format_submit(taken(), replace(RUNS, checkpoint="last.pt"), find_site("chtc"))
    assert '\n+GPUJobLength = "medium"\n+is_resumable = true\n' in text
    assert "# +is_resumable" not in text
    text = format_submit(taken(), replace(RUNS, checkpoint="last.pt", gpus=0), find_site("chtc"))
    assert "is_resumable" not in text


def test_each_run_of_a_sweep_has_a_folder() -> None:
    run = replace(
        RUNS,
        columns=(RUN, "lr"),
        arguments=("--lr", "$(lr)"),
        inputs=("data.csv", "./more/x", "/abs/y", "osdf:///z"),
    )
    said = commands(format_submit(taken(), run, GENERIC))
    assert said["initialdir"] == "run-$(run)"
    assert said["executable"] == "train.sh"
    assert said["transfer_input_files"] == "../data.csv, ../more/x, /abs/y, osdf:///z"
    assert said["log"] == "job.log"
    (_, form, _) = forms_of(offer(of_sif=[]), "")
    assert commands(format_submit(replace(taken(), form=form), run, GENERIC))["container_image"].startswith(
        "../pytorch"
    )


@pytest.mark.parametrize("value", ['a"b', "$(x)", "a\\b", "a\nJOB x y", "a'b", "é", "a\tb", "x" * 1001])
def test_values_that_say_more(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        format_runs("train.sub", ("lr",), [(value,)])
    assert caught.value.code == "sweep-values-invalid"
    assert "run 1: " in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a b",
        "1a",
        "run",
        "ClusterId",
        "process",
        "é",
        "a.b",
    ],
)
def test_columns_that_mean_something_already(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_columns((name,))
    assert caught.value.code == "column-name-invalid"


@pytest.mark.parametrize("name", ["rank", "input", "priority", "hold", "max_retries", "queue", "MY"])
def test_a_column_is_no_command_of_the_job(name: str) -> None:
    """DAGMan hands macros to condor_submit: `rank` would be the job's rank, `input` its stdin."""
    lines = format_runs("train.sub", (name,), [("5",)]).splitlines()
    assert lines == ["JOB run-1 train.sub", f'VARS run-1 run="1" value_{name}="5"']
    assert format_arguments([f"$({name})"], (RUN, name)) == f"\"'$(value_{name})'\""


def test_columns_and_rows_fit() -> None:
    with pytest.raises(UsageError) as caught:
        check_columns(("lr", "LR"))
    assert caught.value.code == "column-name-duplicate"
    with pytest.raises(UsageError) as caught:
        format_runs("train.sub", ("lr",), [("1",), ("1", "2")])
    assert caught.value.code == "sweep-values-invalid"
    assert "run 2 has 2 values, not 1" in caught.value.message
    for rows in ([], [()] * (ROWS_MOST + 1)):
        with pytest.raises(UsageError) as caught:
            format_runs("train.sub", (), rows)
        assert caught.value.code == "sweep-size-invalid"
        assert "10,000" in caught.value.message


def test_every_line_of_every_file_is_one_command() -> None:
    line = re.compile(r"(?:[+]?[A-Za-z_]+ = \S.*|#.*|queue|)")
    for site in SITES:
        for capabilities in (("8.0",), ("7.0", "8.0", "9.0")):
            text = format_submit(taken(*capabilities), RUNS, site)
            assert all(line.fullmatch(one) for one in text.splitlines())
            assert text.endswith("\nqueue\n")


VALUES = many(400, 8000)
NASTY = [*"aB1 \n\r\\$(){}\"',;=#+-*/.~|&<>%@\t\0é", "queue", "$(Process)", "executable = x"]


def test_no_value_becomes_another_command() -> None:
    """Whatever stands in a field, a file has the commands that it has, or there is none."""
    random = Random(7)
    run = replace(RUNS, arguments=("x",), inputs=("x",), outputs=("x",), columns=(RUN, "lr"))
    usual = commands(format_submit(taken(), run, GENERIC)).keys()
    made = 0
    for _ in range(VALUES):
        value = "".join(random.choices(NASTY, k=random.randint(1, 6)))
        field = random.choice(("name", "executable", "arguments", "inputs", "outputs"))
        asked = replace(run, **{field: value if field in ("name", "executable") else (value,)})  # type: ignore[arg-type]
        try:
            text = format_submit(taken(), asked, GENERIC)
        except UsageError:
            continue
        made += 1
        assert commands(text).keys() == usual, value
        assert text.splitlines().count("queue") == 1
    assert made > VALUES // 20


def test_no_value_of_a_sweep_becomes_another_node() -> None:
    random = Random(8)
    made = 0
    for _ in range(VALUES):
        value = "".join(random.choices(NASTY, k=random.randint(1, 6)))
        try:
            text = format_runs("train.sub", ("lr",), [(value,)])
        except UsageError:
            continue
        made += 1
        assert text == f'JOB run-1 train.sub\nVARS run-1 run="1" value_lr="{value}"\n'
        assert not set('"\\$\n') & set(value)
    assert made > VALUES // 20
