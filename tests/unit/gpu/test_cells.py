"""The judge: every claim on a cell, with its rule, reason and source, the weightiest first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.gpu.capability import Capability, parse_capability, parse_code
from imagefactory.gpu.cells import (
    CellEvidence,
    answer_cell,
    cell_query,
    predict_other_processor,
)
from imagefactory.gpu.predict import predict
from imagefactory.gpu.values import (
    Cell,
    CellClaim,
    CellQuery,
    ClaimBasis,
    Compatibility,
    GpuLibrary,
    InstalledPackage,
    ModuleCount,
    ScanResult,
)
from imagefactory.model import LockedWheel
from tests.made.values import make_conda, make_lock, make_target


def asked(text: str, capability: str, driver: str = "") -> CellQuery:
    """`torch 2.3 12.1` on a capability."""
    framework, version, cuda = text.split()
    return CellQuery(
        framework=framework,
        version=version,
        cuda=cuda,
        capability=parse_capability(capability),
        driver=driver,
    )


def rules(cell: Cell, basis: ClaimBasis = ClaimBasis.DOCUMENTED) -> list[str]:
    return [claim.rule for claim in cell.claims if claim.basis is basis]


def only_documented(question: CellQuery) -> CellClaim:
    """What a page says of its code, whatever faults are known."""
    claims = answer_cell(question).claims
    return next(one for one in claims if one.basis is ClaimBasis.DOCUMENTED and "known-bad" not in one.rule)


@pytest.mark.parametrize(
    ("what", "capability", "answer", "rule", "said"),
    [
        ("torch 2.3 12.1", "7.0", Compatibility.YES, "documented", "7.0 is documented"),
        ("torch 2.3 12.1", "8.9", Compatibility.YES, "documented", "sm_86 is documented and runs on 8.9"),
        ("torch 2.3 12.1", "10.0", Compatibility.NO, "not-documented", "none of it runs on 10.0"),
        ("torch 2.3.1 12.1", "12.0", Compatibility.NO, "not-documented", "none of it runs on 12.0"),
        ("torch 2.15 13.2", "12.1", Compatibility.YES, "documented", "sm_120 is documented and runs on 12.1"),
        ("torch 2.15 13.2", "7.0", Compatibility.NO, "toolkit-dropped", "compiles for 7.5 and newer"),
        ("torch 2.3 12.6", "7.0", Compatibility.NO, "cuda-not-offered", "is built for CUDA"),
        ("torch 2.3 12.1", "3.7", Compatibility.NO, "toolkit-dropped", "compiles for 5.0 and newer"),
        ("torch 1.11 11.3", "8.6", Compatibility.YES, "documented", "8.6 is documented"),
    ],
)
def test_what_is_documented(what: str, capability: str, answer: Compatibility, rule: str, said: str) -> None:
    claim = only_documented(asked(what, capability))
    assert (claim.answer, claim.rule) == (answer, rule)
    assert said in claim.reason
    assert claim.source


def test_a_framework_that_takes_the_machines_cuda_may_have_another_minor_version_of_it() -> None:
    """TensorFlow up to 2.13 brings no CUDA; libraries keep their names within a major from 11.1 on."""
    for cuda in ("11.1", "11.6"):
        assert "cuda-not-offered" not in rules(answer_cell(asked(f"tensorflow 2.7 {cuda}", "8.0")))
    for version, cuda in (("2.7", "12.1"), ("2.4", "11.3"), ("2.15", "12.6")):
        assert "cuda-not-offered" in rules(answer_cell(asked(f"tensorflow {version} {cuda}", "8.0"))), version


@pytest.mark.parametrize(
    ("platform", "host", "answer"),
    [
        ("amd64", "arm64", Compatibility.NO), ("arm64", "amd64", Compatibility.NO), ("", "arm64",
        Compatibility.YES),
        ("amd64", "amd64", Compatibility.YES), ("amd64", "", Compatibility.YES), ("", "amd64",
        Compatibility.YES),
        ("", "", Compatibility.YES),
    ],
)  # fmt: skip
def test_an_image_runs_beside_the_processor_that_it_is_built_for(
    platform: str, host: str, answer: Compatibility
) -> None:
    question = replace(asked("torch 2.15 13.2", "9.0"), platform=platform, host=host)
    made_up = CellClaim(
        basis=ClaimBasis.VERIFIED, answer=Compatibility.YES, rule="suite", reason="", source=""
    )
    evidence = CellEvidence(verified={question.capability: made_up})
    cell = answer_cell(question, evidence)
    assert cell.answer is answer
    assert (cell.claims[0].rule == "architecture") is (answer is not Compatibility.YES)


def test_the_question_of_a_target_names_its_processor() -> None:
    assert cell_query(make_target(), None, Capability(9, 0)).platform == "amd64"


def test_what_pages_list_is_of_builds_for_amd64() -> None:
    listed = asked("tensorflow 2.18 12.5", "8.0")
    assert answer_cell(replace(listed, platform="amd64")).answer is Compatibility.YES
    assert answer_cell(replace(listed, platform="arm64")).claims == ()
    (claim,) = answer_cell(replace(listed, host="arm64")).claims
    assert (claim.answer, claim.rule) == (Compatibility.UNKNOWN, "architecture")
    assert answer_cell(replace(listed, version="9.9", host="arm64")).claims == ()


@pytest.mark.parametrize(
    ("what", "capability", "host", "answer"),
    [
        ("torch 2.11.0 13.0", "11.0", "arm64", Compatibility.YES),  # Thor: a public report says that it works
        ("torch 2.14 13.0", "11.0", "", Compatibility.YES),
        ("torch 2.11 12.6", "11.0", "arm64", Compatibility.NO),
        ("torch 2.11 13.0", "12.1", "", Compatibility.YES),
        ("torch 2.9 13.0", "8.7", "", Compatibility.NO),
        ("torch 2.9 12.6", "7.5", "arm64", Compatibility.NO),
        ("torch 2.9 12.6", "7.5", "amd64", Compatibility.YES),
        ("torch 2.5 12.4", "9.0", "arm64", Compatibility.YES),
        ("torch 2.5 12.6", "8.7", "arm64", Compatibility.YES),  # a build for Jetson
        ("triton 3.5.1 13.0", "11.0", "arm64", Compatibility.NO),  # its ptxas is in the wheel, of CUDA 12.8
        ("triton 3.5.1 13.0", "8.9", "amd64", Compatibility.YES),
        ("torch 2.5 12.6", "9.0", "arm64", Compatibility.UNKNOWN),
        ("torch 2.8 12.8", "10.0", "arm64", Compatibility.UNKNOWN),  # NVIDIA's own indexes may have it
        ("torch 2.8 12.9", "10.0", "arm64", Compatibility.YES),
        ("jax 0.10.2 13", "11.0", "arm64", Compatibility.YES),
        ("jax 0.5 12", "9.0", "arm64", Compatibility.YES),
        ("bitsandbytes 0.49 13.0", "12.1", "arm64", Compatibility.YES),
        ("bitsandbytes 0.48 13.0", "8.7", "arm64", Compatibility.NO),
    ],
)
def test_a_release_is_answered_by_its_builds_for_the_processor_next_to_the_gpu(
    what: str, capability: str, host: str, answer: Compatibility
) -> None:
    assert answer_cell(replace(asked(what, capability), host=host)).answer is answer


@pytest.mark.parametrize(
    ("what", "processor", "answer"),
    [
        ("torch 2.11.0 rocm7.2", "gfx90a", Compatibility.YES),
        ("torch 2.5 rocm6.2", "gfx1101", Compatibility.NO),
        ("torch 2.7 rocm6.3", "gfx1101", Compatibility.YES),
        ("torch 2.14 rocm7.14", "gfx906", Compatibility.NO),
        ("torch 2.14 rocm7.2", "gfx906", Compatibility.YES),
        ("torch 2.9 rocm7.13.0", "gfx1151", Compatibility.YES),  # from AMD's own index
        ("torch 2.9.1 rocm7.2.0", "gfx1100", Compatibility.YES),
        ("torch 2.9.1 rocm7.2.0", "gfx1151", Compatibility.UNKNOWN),  # that page names supported GPUs alone
        ("torch 2.7 rocm7.14", "gfx90a", Compatibility.UNKNOWN),
        ("tensorflow-rocm 2.16.1 rocm6.2", "gfx1100", Compatibility.YES),
        ("jax-rocm7-plugin 0.9.1 rocm7.2", "gfx1151", Compatibility.YES),  # generic code for RDNA 3
        ("jax-rocm7-plugin 0.8.2 rocm7.2", "gfx1151", Compatibility.NO),
    ],
)
def test_builds_for_amd_are_documented_by_their_processors(
    what: str, processor: str, answer: Compatibility
) -> None:
    cell = answer_cell(asked(what, processor))
    assert cell.answer is answer
    assert [claim.driver for claim in cell.claims] == [""] * (answer is not Compatibility.UNKNOWN)


def test_a_prediction_says_which_processor_must_stand_beside_the_gpu() -> None:
    found = predict(ScanResult(source="x", libraries=()), Capability(9, 0), "")
    assert predict_other_processor(found, "amd64", "") is found
    assert predict_other_processor(found, "arm64", "").reason == f"{found.reason}, next to an arm64 processor"
    assert predict_other_processor(found, "arm64", "arm64") is found
    assert predict_other_processor(found, "amd64", "arm64").answer is Compatibility.NO


def test_before_cuda_11_each_version_needs_its_own_driver() -> None:
    """No driver of CUDA 10.0 starts programs of 10.2: minor versions promise that from 11 on."""
    old, new = (
        only_documented(asked("torch 1.5 10.2", "6.0", driver)) for driver in ("410.104", "440.33.01")
    )
    assert (old.rule, old.driver, new.answer) == ("driver-floor", "440.33", Compatibility.YES)
    assert only_documented(asked("torch 1.12 11.3", "6.0", "450.51.06")).answer is Compatibility.YES


def test_a_driver_that_does_not_know_the_gpu_outweighs_all_else() -> None:
    """590 dropped Volta: what was verified there with an older driver is about another machine."""
    verified = CellClaim(
        basis=ClaimBasis.VERIFIED, answer=Compatibility.YES, rule="suite", reason="passed", source="a verdict"
    )
    evidence = CellEvidence(verified={Capability(7, 0): verified})
    cell = answer_cell(asked("torch 2.3 12.1", "7.0", "595.45.04"), evidence)
    assert (cell.answer, rules(cell)) == (Compatibility.NO, ["driver-gpu"])
    assert "580 was the last" in cell.claims[0].reason
    assert answer_cell(asked("torch 2.3 12.1", "7.0", "580.95.05"), evidence).answer is Compatibility.YES


def test_an_integrated_gpu_is_not_reached_from_its_neighbour() -> None:
    """Code for 8.6 runs on 8.9, yet not on 8.7, which is soldered beside an ARM processor."""
    question = replace(asked("torch 2.3 12.1", "8.7"), host="amd64")
    assert only_documented(question).rule == "not-documented"


@pytest.mark.parametrize(
    ("driver", "answer"),
    [
        ("", Compatibility.YES),
        ("525", Compatibility.YES),
        ("525.60.13", Compatibility.YES),
        ("535.54.03", Compatibility.YES),
        ("520.61.05", Compatibility.NO),
        ("470", Compatibility.NO),
    ],
)
def test_the_driver_of_a_documented_cell(driver: str, answer: Compatibility) -> None:
    """Machine code needs the floor of CUDA 12, not the driver that came with 12.1."""
    claim = only_documented(asked("torch 2.3 12.1", "7.0", driver))
    assert claim.answer is answer
    assert claim.driver.startswith("525")
    assert (claim.rule == "driver-floor") is (answer is Compatibility.NO)


@pytest.mark.parametrize(
    ("what", "driver"),
    [("conda-forge::pytorch 2.7 12.6", "560.28.03"), ("conda-forge::tensorflow 2.16 12", "")],
)
def test_documented_ptx_needs_the_driver_of_its_cuda(what: str, driver: str) -> None:
    """Of CUDA 12 any may be meant, so only drivers before all of it are known to be too old."""
    question = replace(asked(what, "11.0"), host="amd64")
    claim = only_documented(question)
    assert (claim.answer, claim.driver) == (Compatibility.PTX, driver)
    assert only_documented(replace(question, driver="520")).rule == "driver-floor"
    assert only_documented(replace(question, driver="580")).answer is Compatibility.PTX


def test_a_fault_of_a_patch_release_needs_a_whole_version() -> None:
    """1.23.0 has it and 1.23.2 has not: of `1.23` nothing is said. All of `2.12` has another one."""
    rule = "known-bad:ort-1.23.0-hopper-ptx"
    assert rule not in [claim.rule for claim in answer_cell(asked("onnxruntime-gpu 1.23 12", "12.0")).claims]
    faulty = replace(asked("onnxruntime-gpu 1.23 12", "12.0"), packages=(("onnxruntime-gpu", "1.23.0"),))
    stopped = answer_cell(faulty, CellEvidence(contents=contents("sm_90", "compute_90/8.3")))
    assert rule not in [claim.rule for claim in stopped.claims]  # what was scanned has no such package
    cell = answer_cell(asked("tensorflow 2.12 11.8", "10.0"))
    assert [claim.rule for claim in cell.claims] == [
        "known-bad:xla-tensorflow-before-blackwell",
        "documented",
    ]
    assert cell.answer is Compatibility.PARTLY
    assert cell.claims[0].source


@pytest.mark.parametrize(
    ("capability", "packages", "answer"),
    [
        ("8.0", {"torch": "2.9.1", "nvidia-cudnn-cu12": "9.10.2.21"}, Compatibility.YES),  # slow
        ("7.0", {"nvidia-cudnn-cu12": "9.20.0"}, Compatibility.PARTLY),  # some calls fail
        (
            "8.0",
            {"torch": "2.8.0", "nvidia-cudnn-cu12": "9.10.2.21"},
            Compatibility.PARTLY,
        ),  # wrong on any GPU
        ("10.0", {"nvidia-cublas-cu12": "12.8.4.1"}, Compatibility.PARTLY),  # frameworks only warn of it
    ],
)
def test_how_bad_a_known_fault_is(capability: str, packages: dict[str, str], answer: Compatibility) -> None:
    question = replace(asked("torch 2.9 12.8", capability), packages=tuple(packages.items()))
    assert [claim.answer for claim in answer_cell(question).warnings] == [answer]


@pytest.mark.parametrize(
    ("what", "capability", "rule"),
    [
        ("jax 0.4.30 12", "12.0", "known-bad:xla-jax-before-blackwell"),  # its PTX is there, and scanned
        ("jax 0.4.30 12", "9.0", "code"),
        ("jax 0.4.31 12", "10.0", "known-bad:xla-jax-before-blackwell"),  # documented alone
        ("jax 0.3.25 11", "12.0", "known-bad:xla-jax-before-blackwell"),  # nothing else is known of it
        ("faiss-gpu 1.7.2 10", "8.6", "known-bad:faiss-cublas-before-ampere"),  # though its PTX would do
        ("tensorflow 2.3.4 10.1", "8.6", "known-bad:tensorflow-before-ampere"),
        ("tensorflow 2.3.4 10.1", "7.5", "documented"),
        ("tensorflow 2.16.1 12.3", "7.0", "known-bad:tensorflow-2.16.1-cuda-wheels"),
        ("tensorflow 2.16.2 12.3", "7.0", "code"),
    ],
)
def test_a_fault_that_stops_all_is_the_answer(what: str, capability: str, rule: str) -> None:
    cell = answer_cell(asked(what, capability))
    assert cell.claims[0].rule == rule
    assert (cell.answer is Compatibility.NO) == rule.startswith("known-bad")
    assert cell.warnings == ()


@pytest.mark.parametrize(
    ("what", "capability", "answer", "driver"),
    [
        ("cupy-cuda12x 13.6.0 12.6", "12.0", Compatibility.NO, ""),  # sm_90
        ("cupy-cuda12x 13.6.0 12.8", "12.0", Compatibility.YES, "570"),
        ("cupy-cuda12x 13.6.0 12.8", "12.1", Compatibility.YES, "570"),  # sm_120 runs there
        ("cupy-cuda12x 13.6.0 12.8", "10.3", Compatibility.NO, ""),  # below its limit, and no target of NVRTC
        ("cupy-cuda12x 13.3.0 12.8", "12.0", Compatibility.YES, "570"),  # "120" is below "90"
        ("cupy-cuda12x 13.3.0 12.6", "12.0", Compatibility.NO, ""),
        ("cupy-cuda12x 14 12", "12.1", Compatibility.YES, "570"),  # the newest NVRTC of CUDA 12
        ("cupy-cuda12x 13.6.0 12.9", "11.0", Compatibility.NO, ""),  # sm_101 in CUDA 12
        ("cupy-cuda13x 13.6.0 13.0", "11.0", Compatibility.YES, "580"),
        ("cupy-cuda11x 13.6.0 11.7", "8.9", Compatibility.YES, "520"),  # sm_86 runs there
        ("cupy-cuda11x 11.0.0 11.8", "8.9", Compatibility.NO, ""),  # sm_87 does not
        ("cupy-cuda11x 11.0.0 11.8", "8.7", Compatibility.YES, "450"),
        ("cupy-cuda11x 11.1.0 11.8", "8.9", Compatibility.YES, "520"),
        ("cupy-cuda11x 11.1.0 11.8", "9.0", Compatibility.NO, ""),
        ("cupy-cuda11x 11.3.0 11.8", "9.0", Compatibility.YES, "515"),
        ("cupy 10.2.0 11.3", "8.9", Compatibility.YES, "520"),
        ("cupy 8.6.0 11.0", "8.6", Compatibility.PTX, "455"),
        ("cupy 6.0.0 9.2", "7.5", Compatibility.PTX, "396.26"),
        ("cupy 2.3.0 8.0", "7.0", Compatibility.NO, ""),
        ("cupy 2.3.0 8.0", "6.1", Compatibility.NO, ""),  # ptxas 8.0 has it, NVRTC 8.0 does not
        ("cupy 4.0.0 8.0", "6.1", Compatibility.PTX, "375.26"),
        ("numba 0.61 12.6", "7.0", Compatibility.PTX, "560.28.03"),
        ("numba 0.61 12.9", "12.0", Compatibility.NO, ""),  # PTX for 9.0
        ("numba 0.61 11.7", "8.9", Compatibility.PTX, "520"),
        ("numba 0.61 12.6", "3.5", Compatibility.NO, ""),
        ("numba-cuda 0.30 12.6", "12.0", Compatibility.NO, ""),
        ("numba-cuda 0.30 12.8", "12.0", Compatibility.YES, "570"),
        ("numba-cuda 0.5 12.8", "12.0", Compatibility.PTX, "570.26"),
        ("numba-cuda 0.5 12.6", "12.0", Compatibility.NO, ""),
        ("triton 3.5 12.8", "12.1", Compatibility.NO, ""),
        ("triton 3.6 12.9", "12.1", Compatibility.YES, "570"),
        ("triton 3.6 12.9", "11.0", Compatibility.NO, ""),  # no sm_110a
        ("triton 3.6 12.9", "6.1", Compatibility.NO, ""),
        ("triton 3.7 13.1", "11.0", Compatibility.YES, "580"),
        ("triton 3.7 13.1", "7.0", Compatibility.YES, "525"),  # its other ptxas
        ("triton 3.9 13.4", "10.7", Compatibility.YES, "580"),
        ("warp-lang 1.8 12.8", "12.0", Compatibility.YES, "570"),
        ("warp-lang 1.8 12.8", "12.1", Compatibility.PTX, "570.26"),
        ("warp-lang 1.8 12.8", "5.0", Compatibility.NO, ""),
        ("flashinfer-python 0.2.5 12.8", "7.0", Compatibility.NO, ""),
        ("deepspeed 0.9.2 11.7", "8.6", Compatibility.YES, "455"),
        ("deepspeed 0.9.2 11.7", "5.2", Compatibility.NO, ""),
        ("deepspeed 0.14.5 12.6", "12.0", Compatibility.NO, ""),  # it reads 12.0 as 1.
        ("deepspeed 0.16.9 12.8", "12.0", Compatibility.YES, "570"),
    ],
)
def test_what_makes_its_code_where_it_runs_goes_by_its_compiler(
    what: str, capability: str, answer: Compatibility, driver: str
) -> None:
    claim = next(
        claim
        for claim in answer_cell(asked(what, capability)).claims
        if claim.rule in ("no-target", "documented")
    )
    assert (claim.answer, claim.driver) == (answer, driver)
    assert (claim.rule == "no-target") == (answer is Compatibility.NO)


def test_the_compiler_of_a_lock_counts() -> None:
    """The CUDA of a target is 12; its lock names the NVRTC or NVVM, and numba-cuda in the place of numba."""
    numba = replace(
        asked("numba 0.68 12", "12.0"),
        packages=(("numba", "0.68.1"), ("numba-cuda", "0.30.4"), ("nvidia-cuda-nvcc-cu12", "12.6.85")),
    )
    assert answer_cell(numba).answer is Compatibility.NO
    newer = replace(numba, packages=(*numba.packages[:2], ("nvidia-cuda-nvcc-cu12", "12.8.93")))
    assert answer_cell(newer).answer is Compatibility.YES
    alone = replace(numba, packages=(numba.packages[0], numba.packages[2]))
    assert answer_cell(replace(alone, capability=Capability(9, 0))).answer is Compatibility.PTX


def test_a_scan_does_not_see_the_compiler() -> None:
    """The wheel has code for 12.0, and the NVRTC that is asked for has no target."""
    assert answer_cell(asked("cupy-cuda12x 14.2 12.6", "12.0")).claims[0].rule == "no-target"
    assert answer_cell(asked("cupy-cuda12x 14.2 12.8", "12.0")).claims[0].basis is ClaimBasis.PREDICTED


def test_machine_code_needs_no_driver_that_knows_its_ptx() -> None:
    for what, warned in (("cupy-cuda12x 14.2 12.9", False), ("torch 2.9 12.8", True)):
        question = asked(what, "9.0", "535")
        assert ("run-time-ptx" in [claim.rule for claim in answer_cell(question).warnings]) == warned


def test_what_no_table_knows_is_unknown() -> None:
    assert answer_cell(asked("torch 1.11 11.3", "3.5")).answer is Compatibility.UNKNOWN
    cell = answer_cell(asked("nosuch 13.1 12.1", "8.0"))
    assert (cell.claims, cell.answer) == ((), Compatibility.UNKNOWN)


def test_a_lock_proves_what_is_offered() -> None:
    question = replace(asked("torch 2.3 12.6", "8.0"), packages=(("torch", "2.3.1"),))
    assert "cuda-not-offered" not in rules(answer_cell(question))


def test_what_cannot_be_solved_says_why() -> None:
    cell = answer_cell(asked("torch 2.3 12.1", "8.0"), CellEvidence(unsolvable="numpy 2 is not to be had"))
    assert (cell.answer, cell.claims[0].rule) == (Compatibility.NO, "unsolvable")
    assert "numpy 2" in cell.claims[0].reason
    assert rules(cell) == ["unsolvable", "documented"]


def contents(*codes: str) -> ScanResult:
    """An image with PyTorch whose one library has code for these targets."""
    modules = ModuleCount(codes=tuple(sorted(map(parse_code, codes))), count=300)
    return ScanResult(
        source="an image",
        libraries=(GpuLibrary(path="torch/lib/libtorch_cuda.so", size=10**9, modules=(modules,)),),
        packages=(InstalledPackage(name="torch", version="2.3.1"),),
        facts=(("torch", "cuda", "12.1"), ("torch", "version", "2.3.1")),
    )


def test_a_scan_outweighs_the_documents() -> None:
    question = asked("torch 2.3 12.1", "7.0")
    cell = answer_cell(question, CellEvidence(contents=contents("sm_80", "sm_90")))
    assert [claim.basis for claim in cell.claims] == [ClaimBasis.PREDICTED, ClaimBasis.DOCUMENTED]
    assert [claim.answer for claim in cell.claims] == [Compatibility.NO, Compatibility.YES]
    assert cell.answer is Compatibility.NO
    assert (cell.claims[0].rule, cell.claims[0].source) == ("no-code", "scan of an image")


def test_a_scan_that_finds_the_code() -> None:
    cell = answer_cell(asked("torch 2.3 12.1", "8.9"), CellEvidence(contents=contents("sm_80", "sm_90")))
    assert (cell.answer, cell.claims[0].basis, cell.claims[0].rule) == (
        Compatibility.YES,
        ClaimBasis.PREDICTED,
        "code",
    )
    assert cell.claims[0].driver


def test_a_scan_that_finds_ptx() -> None:
    cell = answer_cell(
        asked("torch 2.3 12.1", "10.0"), CellEvidence(contents=contents("sm_80", "sm_90", "compute_90/8.1"))
    )
    assert (cell.answer, cell.claims[0].rule) == (Compatibility.PTX, "ptx")
    assert cell.claims[0].driver == "570"  # the GPU's first; PTX 8.1 alone would do with 530.30.02


def test_what_is_documented_asks_for_the_first_driver_of_its_gpu() -> None:
    cells = {gpu: answer_cell(asked("torch 2.7 12.8", gpu)) for gpu in ("9.0", "10.0")}
    assert [one.claims[0].driver for one in cells.values()] == ["525", "570"]


@pytest.mark.parametrize(("driver", "rule"), [("535", "code"), ("450.80.02", "driver-floor")])
def test_the_driver_of_a_predicted_cell(driver: str, rule: str) -> None:
    cell = answer_cell(
        asked("torch 2.3 12.1", "8.0", driver), CellEvidence(contents=contents("sm_80", "sm_90"))
    )
    assert cell.claims[0].basis is ClaimBasis.PREDICTED
    assert cell.claims[0].rule == rule


def test_no_code_is_not_told_as_a_driver_that_is_too_old() -> None:
    cell = answer_cell(
        asked("torch 2.3 12.1", "7.0", "450"), CellEvidence(contents=contents("sm_80", "sm_90"))
    )
    assert cell.claims[0].rule == "no-code"


def test_a_build_for_the_cpu_is_told() -> None:
    bare = replace(contents(), libraries=(), facts=(("torch", "version", "2.3.1+cpu"),))
    cell = answer_cell(asked("torch 2.3 12.1", "8.0"), CellEvidence(contents=bare))
    assert (cell.answer, cell.claims[0].rule) == (Compatibility.NO, "no-gpu-code")
    assert "install" in cell.claims[0].reason


def test_verified_is_said_of_its_capability_alone() -> None:
    claim = CellClaim(
        basis=ClaimBasis.VERIFIED,
        answer=Compatibility.YES,
        rule="suite",
        reason="the suite passed",
        source="a record",
    )
    evidence = CellEvidence(verified={Capability(8, 0): claim})
    assert answer_cell(asked("torch 2.3 12.1", "8.0"), evidence).claims[0] is claim
    others = answer_cell(asked("torch 2.3 12.1", "8.6"), evidence).claims
    assert ClaimBasis.VERIFIED not in [one.basis for one in others]


TARGET = make_target()
EIGHT = Capability(8, 0)


def test_a_question_holds_what_the_lock_holds() -> None:
    wheel = LockedWheel(name="torch", version="2.3.1", filename="t.whl", sha256="ab" * 32, size=1)
    lock = make_lock(wheels=(wheel,))
    question = cell_query(TARGET, lock, EIGHT, "535")
    assert question == CellQuery(
        framework="torch",
        version="2.3",
        cuda="12.1",
        capability=EIGHT,
        driver="535",
        platform="amd64",
        packages=(("torch", "2.3.1"),),
        wheels=("ab" * 32,),
    )
    assert cell_query(TARGET, None, EIGHT).packages == ()


@pytest.mark.parametrize("channel", ["pytorch", "conda-forge"])
def test_a_channel_has_builds_of_its_own(channel: str) -> None:
    address = f"https://conda.example/{channel}"
    conda = replace(
        TARGET, source="conda", framework="pytorch", channels=(address, "https://conda.example/other")
    )
    package = make_conda("pytorch 2.3.1 cuda121", channel=address)
    lock = make_lock(wheels=(), conda=(package,))
    assert cell_query(conda, lock, EIGHT).framework == f"{channel}::pytorch"
    assert cell_query(conda, None, EIGHT).framework == f"{channel}::pytorch"


def test_nothing_of_one_maker_runs_on_the_others_gpus() -> None:
    gfx = parse_capability("gfx90a")
    jax = make_target(name="jax-0.10.2-rocm7", framework="jax", version="0.10.2", cuda="rocm7")
    for question, told in (
        (cell_query(jax, None, Capability(9, 0)), "it is built for ROCm 7, and 9.0 is NVIDIA's"),
        (cell_query(make_target(), None, gfx), "it is built for CUDA 12.1, and gfx90a is AMD's"),
    ):
        (claim,) = answer_cell(question).claims
        assert (claim.answer, claim.rule, claim.reason) == (Compatibility.NO, "maker", told)
    unknown = answer_cell(cell_query(jax, None, gfx))
    assert (unknown.answer, unknown.claims) == (Compatibility.UNKNOWN, ())


def test_code_for_amd_is_predicted_by_its_own_rules() -> None:
    gfx = [parse_capability(one) for one in ("gfx90a", "gfx1100")]
    jax = make_target(name="jax-0.10.2-rocm7", framework="jax", version="0.10.2", cuda="rocm7")
    codes = tuple(map(parse_code, ("gfx90a", "gfx942")))
    plugin = GpuLibrary(
        path="jax_plugins/xla_rocm7/xla_rocm_plugin.so", size=1, modules=(ModuleCount(codes=codes, count=3),)
    )
    held = ScanResult(
        source="scan", libraries=(plugin,), packages=(InstalledPackage(name="jax", version="0.10.2"),)
    )
    cells = [answer_cell(cell_query(jax, None, one, "535"), CellEvidence(contents=held)) for one in gfx]
    assert "535" not in cells[0].claims[0].reason  # NVIDIA's
    assert [(cell.answer, cell.claims[0].basis, cell.claims[0].rule) for cell in cells] == [
        (Compatibility.YES, ClaimBasis.PREDICTED, "code"),
        (Compatibility.NO, ClaimBasis.PREDICTED, "no-code"),
    ]
