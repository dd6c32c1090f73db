"""On which GPUs an image may run, in which form jobs take it, and which GPUs of an inventory they can get."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.extras.lint.image import read_image
from imagefactory.extras.lint.reach import find_reach, read_request
from imagefactory.extras.lint.reader import parse_submit_file
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.jobs.htcondor import write_htcondor
from imagefactory.jobs.offer import (
    ImageEvidence,
    ResourceRequest,
    all_capabilities,
    choose_form,
    classifier_for,
    cuda_of_driver,
    expected_grounds,
    find_available_gpus,
    format_available,
    forms_of,
    index_machines,
    verified_evidence,
)
from imagefactory.jobs.spec import resource_request
from imagefactory.model import Outcome
from imagefactory.schedulers.pool import ImageKind, Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sites import find_site
from imagefactory.schedulers.sizes import GB, MB
from imagefactory.trust.verdict import VerdictStatus
from tests.made.errors import fails
from tests.made.offers import (
    IMAGE,
    NOW,
    SIF,
    digest,
    expired,
    failed,
    gpu_class,
    job_spec,
    offer,
    prediction,
    verdict,
)

NOTHING = ImageEvidence(classes=(), refused=())


def cudas(evidence: ImageEvidence) -> dict[str, str]:
    return {str(row.capability): row.cuda for row in evidence.classes}


def refusals(evidence: ImageEvidence) -> dict[str, str]:
    return {str(capability): why.partition(":")[0] for capability, why in evidence.refused}


def expected(
    evidence: ImageEvidence, *claims: tuple[str, CellClaim], least: str = "", faulty: bool = False
) -> ImageEvidence:
    image = replace(IMAGE, predicted=claims, runtime=least, minor_compat=False)
    return expected_grounds(evidence, image, faulty=faulty)


def test_each_verdict_speaks_of_its_capability_alone() -> None:
    evidence = verified_evidence([verdict("8.0"), verdict("7.0", "535.54.03", "12.2")])
    assert cudas(evidence) == {"7.0": "12.2", "8.0": "12.4"}
    assert evidence.verified
    assert all(row.claim.basis is ClaimBasis.VERIFIED for row in evidence.classes)


def test_drivers_of_amd_take_no_cuda_and_are_proven_all_the_same() -> None:
    evidence = verified_evidence([verdict("gfx90a", "6.12.12", cuda="")])
    assert cudas(evidence) == {"gfx90a": ""}


def test_the_oldest_driver_that_passed_is_the_floor() -> None:
    verdicts = [verdict("8.0", "550.54.15", "12.4"), verdict("8.0", "525.60.13", "12.0", days=40)]
    assert cudas(verified_evidence(verdicts)) == {"8.0": "12.0"}


def test_a_failure_on_a_newer_driver_takes_the_capability_out() -> None:
    verdicts = [verdict("8.0", "535.54.03", "12.2"), failed("8.0", Outcome.WRONG_NUMBERS)]
    evidence = verified_evidence(verdicts)
    assert cudas(evidence) == {}
    assert refusals(evidence) == {"8.0": "wrong-numbers"}


def test_a_failure_on_an_older_driver_raises_the_floor() -> None:
    verdicts = [
        verdict("8.0", "550.54.15", "12.4"),
        failed("8.0", Outcome.NO_KERNEL, "535.54.03", "12.2"),
        verdict("8.0", "525.60.13", "12.0"),
    ]
    assert cudas(verified_evidence(verdicts)) == {"8.0": "12.4"}


def test_drivers_that_a_pool_cannot_tell_apart_are_one() -> None:
    """550.40 failed and 550.54 passed, and both take CUDA 12.4: a pool could give either."""
    verdicts = [verdict("8.0", "550.54.15", "12.4"), failed("8.0", Outcome.LOAD_FAILED, "550.40.07", "12.4")]
    evidence = verified_evidence(verdicts)
    assert cudas(evidence) == {}
    assert refusals(evidence) == {"8.0": "load-failed"}


@pytest.mark.parametrize("standing", [status for status in VerdictStatus if status is not VerdictStatus.GOOD])
def test_what_cannot_be_relied_on_proves_nothing(standing: VerdictStatus) -> None:
    evidence = verified_evidence([replace(verdict("8.0"), standing=standing)])
    assert evidence == NOTHING


@pytest.mark.parametrize(
    "outcome", [Outcome.NO_GPU, Outcome.TIMEOUT, Outcome.INFRASTRUCTURE, Outcome.WRONG_GPU, Outcome.HELD]
)
def test_outcomes_that_say_nothing_of_the_image_prove_nothing(outcome: Outcome) -> None:
    assert verified_evidence([failed("8.0", outcome)]).classes == ()


@pytest.mark.parametrize("cuda", ["", "12.4; queue 100", "12", "12.10"])
def test_a_driver_whose_cuda_no_pool_can_be_asked_for(cuda: str) -> None:
    evidence = verified_evidence([verdict("8.0", "550.54.14", cuda)])
    assert cudas(evidence) == {}
    assert refusals(evidence) == {"8.0": "the CUDA of its driver is not known"}


def test_predictions_fill_what_verdicts_leave_open() -> None:
    evidence = verified_evidence([verdict("8.0"), failed("7.0", Outcome.NO_KERNEL)])
    whole = expected(
        evidence,
        ("7.0", prediction()),
        ("8.0", prediction()),
        ("8.6", prediction()),
        ("9.0", prediction(Compatibility.NO)),
    )
    assert cudas(whole) == {"8.0": "12.4", "8.6": "12.0"}
    assert [row.verified for row in whole.classes] == [True, False]
    assert refusals(whole) == {"7.0": "no-kernel", "9.0": "predicted no"}


@pytest.mark.parametrize(
    "claims",
    [
        [prediction(Compatibility.NO)],
        [prediction(Compatibility.PARTLY)],
        [prediction(Compatibility.UNKNOWN)],
        [prediction(basis=ClaimBasis.DOCUMENTED)],  # only the page of a project
        [prediction(), replace(prediction(Compatibility.NO), rule="known-bad:x")],
    ],
)
def test_predictions_that_are_not_accepted(claims: list[CellClaim]) -> None:
    assert expected(NOTHING, *(("8.6", claim) for claim in claims)).classes == ()


def test_a_fault_of_some_calls_is_accepted_on_request() -> None:
    fault = replace(prediction(Compatibility.PARTLY), rule="known-bad:x")
    claims = [("6.1", prediction()), ("6.1", fault), ("8.6", prediction())]
    careful = expected(NOTHING, *claims)
    assert (list(cudas(careful)), list(refusals(careful))) == (["8.6"], ["6.1"])
    bold = expected(NOTHING, *claims, faulty=True)
    assert [(str(row.capability), row.faults) for row in bold.classes] == [("6.1", (fault,)), ("8.6", ())]
    grave = replace(fault, answer=Compatibility.NO)
    assert expected(NOTHING, ("6.1", prediction()), ("6.1", grave), faulty=True).classes == ()


def test_a_fault_with_a_verdict_is_reported_and_refuses_nothing() -> None:
    fault = replace(prediction(Compatibility.PARTLY), rule="known-bad:x")
    evidence = verified_evidence([verdict("8.0")])
    (row,) = expected(evidence, ("8.0", prediction()), ("8.0", fault)).classes
    assert (row.verified, row.faults) == (True, (fault,))


@pytest.mark.parametrize(("driver", "cuda"), [("525", "12.1"), ("550.54.14", "12.4"), ("", "12.1")])
def test_the_floor_of_a_prediction_is_the_highest_that_is_known(driver: str, cuda: str) -> None:
    assert cudas(expected(NOTHING, ("8.6", prediction(driver=driver)), least="12.1")) == {"8.6": cuda}


@pytest.mark.parametrize(("driver", "least"), [("", ""), ("9999", ""), ("9999", "12.1"), ("525", "12.10")])
def test_a_prediction_whose_driver_cannot_be_queried_is_not_accepted(driver: str, least: str) -> None:
    """Without a floor it would match every driver; catalogs of newer programs name newer ones."""
    evidence = expected(NOTHING, ("8.6", prediction(driver=driver)), least=least)
    assert evidence.classes == ()
    ((_, why),) = evidence.refused
    assert why.startswith("which drivers are new enough is not known")


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("530.30.02", "12.1"),
        ("525", "12.0"),
        ("545.10", "12.3"),
        ("550.54.15", "12.5"),
        ("580", "13.0"),
        ("9999", ""),
        ("", ""),
        ("mine", ""),
    ],
)
def test_cuda_of_driver(driver: str, cuda: str) -> None:
    assert cuda_of_driver(driver) == cuda


def test_known_capabilities_are_of_gpus_and_of_compilers() -> None:
    known = all_capabilities()
    assert {Capability(7, 0), Capability(8, 7), Capability(8, 8), Capability(9, 0)} <= set(known)
    assert list(known) == sorted(known)


def test_expired_verdicts_are_no_refusals_either() -> None:
    assert verified_evidence([expired("8.0")]) == NOTHING


# --- forms of an image


def test_each_form_has_its_address_and_its_own_verdicts() -> None:
    forms = forms_of(offer(verdict("8.0"), of_sif=[verdict("7.0")]), "/staging/gpu/")
    rows = {form.image.kind: (form.image.address, list(cudas(form.grounds))) for form in forms}
    assert rows == {
        ImageKind.DOCKER: (f"docker://registry.example.org/gpu/pytorch@{digest('a')}", ["8.0"]),
        ImageKind.SIF: (f"/staging/gpu/pytorch-2.3-cu121-{'d' * 12}.sif", ["7.0"]),
        ImageKind.ORAS: (f"oras://registry.example.org/gpu/pytorch@{digest('e')}", ["7.0"]),
    }


@pytest.mark.parametrize("folder", ["", "osdf:///chtc/staging/gpu"])
def test_a_file_is_in_its_folder_and_can_be_fetched(folder: str) -> None:
    (_, form, _) = forms_of(offer(of_sif=[]), folder)
    name = f"pytorch-2.3-cu121-{'d' * 12}.sif"
    assert form.image.kind is (ImageKind.OSDF if folder else ImageKind.SIF)
    assert form.image.address == (f"{folder}/{name}" if folder else name)
    assert form.fetch == f"apptainer pull {name} oras://{SIF.reference}"


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
    with fails("sif-folder-invalid", message=folder[:80]):
        forms_of(offer(of_sif=[]), folder)


def test_an_image_that_apptainer_built_is_no_image_for_docker() -> None:
    offered = offer(of_sif=[verdict("8.0")], subject=SIF.subject, reference=SIF.reference)
    assert [form.image.kind for form in forms_of(offered, "")] == [ImageKind.SIF, ImageKind.ORAS]


def test_a_tag_is_never_an_address() -> None:
    assert forms_of(offer(verdict("8.0"), reference="registry.example.org/gpu/pytorch:2.3-cu121"), "") == ()


def test_the_verified_form_is_chosen_before_the_one_that_the_site_advises() -> None:
    chtc = find_site("chtc")
    only_sif = forms_of(offer(of_sif=[verdict("8.0")]), "")
    assert choose_form(only_sif, chtc, None).image.kind is ImageKind.ORAS
    assert choose_form(forms_of(offer(of_sif=[]), ""), chtc, None).image.kind is ImageKind.DOCKER
    assert choose_form(only_sif, chtc, ImageKind.DOCKER).image.kind is ImageKind.DOCKER


def test_a_kind_that_a_site_does_not_take() -> None:
    generic = find_site("generic")
    with fails("image-type-unsupported", message="'oras'"):
        choose_form(forms_of(offer(of_sif=[]), ""), find_site("ospool"), ImageKind.ORAS)
    with fails("image-type-not-offered", message="docker"):
        choose_form(forms_of(offer(), ""), generic, ImageKind.SIF)
    with fails("image-not-published"):
        choose_form(forms_of(offer(reference=""), ""), generic, None)


# --- GPUs of an inventory

HAS = {"Arch": "X86_64", "HasDockerURL": True, "HasSIF": True, "Memory": 515000, "Cpus": 64, "Disk": 1 << 30}


def gpu(capability: str = "8.0", **more: Any) -> PoolGpu:
    fields: dict[str, Any] = {
        "id": "GPU-a0223334", "uuid": "", "name": "NVIDIA A100-SXM4-40GB", "capability": capability,
        "memory": 40 * GB, "driver": "", "cuda": "12.4", "mig": False, "free": True, "host": "amd64",
    }  # fmt: skip
    return PoolGpu(**{**fields, **more})


def machine(*gpus: PoolGpu, start: str = "true", **attributes: Any) -> PoolMachine:
    return PoolMachine(name="a", attributes={**HAS, **attributes}, start=start, gpus=gpus)


def inventory(*machines: PoolMachine, taken: datetime = NOW) -> Inventory:
    return Inventory(pool="", taken=taken, machines=machines)


def reach(*machines: PoolMachine, now: datetime = NOW, taken: datetime = NOW, **request: Any) -> str:
    there = inventory(*machines, taken=taken)
    classify = classifier_for([gpu_class("8.0"), gpu_class("9.0", "12.8")])
    places = find_available_gpus(classify, ResourceRequest(**request), index_machines(there))
    return format_available(places, there, now)


def test_how_many_and_how_many_are_free() -> None:
    busy = gpu(free=False)
    assert reach(machine(gpu(), busy), machine(gpu("7.0"))) == "GPUs that match: 2 of 3, 1 free now"
    assert reach(machine(gpu("7.0"))) == "GPUs that match: 0 of 1, 0 free now"
    assert reach(machine(gpu("9.0"), gpu("9.0", cuda="12.8"))) == "GPUs that match: 1 of 2, 1 free now"


def test_of_two_at_once_both_must_be_there_and_free() -> None:
    busy = gpu(free=False)
    assert reach(machine(gpu()), machine(gpu()), gpus=2) == "GPUs that match: 0 of 2, 0 free now"
    assert reach(machine(gpu(), busy), gpus=2) == "GPUs that match: 2 of 2, 0 free now"
    assert reach(machine(gpu(), gpu(), busy), gpus=2) == "GPUs that match: 3 of 3, 2 free now"


@pytest.mark.parametrize(
    ("there", "request_", "count"),
    [
        (machine(gpu(memory=40 * GB - MB)), {"gpu_memory": 40 * GB}, 0),
        (machine(gpu(memory=0)), {"gpu_memory": 1}, 0),
        (machine(gpu(memory=0)), {}, 1),
        (machine(gpu(mig=True)), {}, 0),
        (machine(gpu(mig=True)), {"mig": True}, 1),
        (machine(gpu(cuda="")), {}, 0),
        (machine(gpu(host="arm64"), Arch="aarch64"), {}, 0),
        (machine(gpu(host="arm64"), Arch="aarch64"), {"platform": "linux/arm64"}, 1),
        (machine(gpu()), {"memory": 515001 * MB}, 0),
        (machine(gpu()), {"cpus": 65}, 0),
        (machine(gpu()), {"disk": 2**40 + 1}, 0),
        (machine(gpu()), {"needs": ("HasDockerURL",)}, 1),
        (machine(gpu()), {"needs": ("HasCHTCStaging",)}, 0),
        (machine(gpu(), HasDockerURL="true"), {"needs": ("HasDockerURL",)}, 0),
    ],
)
def test_what_keeps_a_job_away(there: PoolMachine, request_: dict[str, Any], count: int) -> None:
    assert reach(there, **request_).startswith(f"GPUs that match: {count} of 1")


def test_what_is_not_told_is_unsure() -> None:
    unsure = "GPUs that match: 1 of 1, 1 free now (1 of them on machines that may reject the job)"
    assert reach(machine(gpu(), start="Owner == 'me'")) == unsure
    bare = PoolMachine(name="a", attributes={}, start="", gpus=(gpu(host=""),))
    assert reach(bare, needs=("HasSIF",)) == unsure
    assert "refuse" not in reach(bare)


def test_an_inventory_says_when_it_was() -> None:
    then = NOW + timedelta(hours=1)
    assert reach(machine(gpu()), now=then) == "GPUs that match: 1 of 1, 1 free at 2026-11-22 06:00 UTC"
    assert reach(machine(gpu()), taken=datetime(1970, 1, 1, tzinfo=UTC)) == "GPUs that match: 1 of 1"


GPUS = st.builds(
    gpu,
    st.sampled_from(("7.0", "8.0", "8.6", "9.0", "12.0")),
    memory=st.sampled_from((8 * GB, 40 * GB)),
    cuda=st.sampled_from(("", "11.8", "12.4", "12.8", "13.0")),
)
MACHINES = st.builds(
    lambda gpus, attributes: machine(*gpus, **attributes),
    st.lists(GPUS, min_size=1, max_size=4),
    st.fixed_dictionaries(
        {"Memory": st.sampled_from((2000, 515000)), "HasDockerURL": st.booleans(), "Cpus": st.integers(1, 4)}
    ),
)


@given(st.lists(MACHINES, max_size=4), st.integers(1, 3), st.sampled_from((0, 24 * GB)), st.integers(1, 4))
def test_it_is_what_the_check_of_the_written_file_finds(
    machines: list[PoolMachine], gpus: int, memory: int, cpus: int
) -> None:
    there = inventory(*machines)
    classes = (gpu_class("8.0"), gpu_class("8.6", "12.0"), gpu_class("9.0", "12.8"))
    job = job_spec(classes=classes, gpus=gpus, gpu_memory=memory, cpus=cpus)
    (jobs,) = parse_submit_file(write_htcondor(job)["train.sub"], "train.sub").jobs
    image = read_image(jobs)
    assert image is not None
    checked = find_reach(read_request(jobs, (image.needs,)), there)
    places = find_available_gpus(classifier_for(classes), resource_request(job), index_machines(there))
    reached = Counter(place.gpu for place in checked.reached)
    assert sum((Counter({place.gpu: place.count}) for place in places), Counter()) == reached
    assert not any(place.unsure for place in places)
