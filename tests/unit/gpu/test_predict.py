"""The rules, one by one, and what they make of wheels as they were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.gpu import knowledge
from imagefactory.gpu.amd import (
    amd_capabilities,
    amd_runs,
    amd_targets,
    count_amd_modules,
    lacks_runtime,
    predict_amd,
)
from imagefactory.gpu.capability import Capability, CodeKind, GpuCode, parse_capability, parse_code
from imagefactory.gpu.contradictions import contradictions, documented_answer
from imagefactory.gpu.drivers import (
    cuda_floor,
    gpu_refusal,
    minimum_driver,
    older,
    parse_driver,
    ptx_floor,
    read_driver,
)
from imagefactory.gpu.knowledge import capabilities
from imagefactory.gpu.knowledge.packages import DocumentedSupport
from imagefactory.gpu.predict import (
    generic_modules,
    predict,
    predict_all,
    predict_code,
    reach,
    runs,
    usual_codes,
    with_driver,
)
from imagefactory.gpu.values import (
    Compatibility,
    InstalledPackage,
    ModuleCount,
    Prediction,
    ScanResult,
    SupportLevel,
)
from imagefactory.verify.gpu_run import predict_coverage
from tests.made.contents import (
    contents,
    library,
    tensorflow_2_18,
    torch_1_13,
    torch_2_3,
    torch_2_12,
)

EVERY = sorted({*capabilities(), Capability(8, 8), Capability(10, 7), Capability(10, 1)})


def where(code: str, way: SupportLevel) -> str:
    return " ".join(str(one) for one in EVERY if runs(parse_code(code), one) is way)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sm_50", "5.0 5.2"),  # R1, and R2: not 5.3
        ("sm_52", "5.2"),
        ("sm_53", "5.3"),  # R2: its own alone
        ("sm_60", "6.0 6.1"),
        ("sm_62", "6.2"),
        ("sm_70", "7.0 7.5"),
        ("sm_72", "7.2"),  # R2: not 7.5
        ("sm_75", "7.5"),
        ("sm_80", "8.0 8.6 8.8 8.9"),  # R2: not 8.7
        ("sm_86", "8.6 8.8 8.9"),
        ("sm_87", "8.7"),  # R2: not 8.9
        ("sm_90", "9.0"),
        ("sm_90a", "9.0"),
        ("sm_100", "10.0 10.3 10.7"),
        ("sm_100a", "10.0"),  # R3
        ("sm_103a", "10.3"),
        ("sm_100f", "10.0 10.3 10.7"),
        ("sm_103f", "10.3 10.7"),
        ("sm_101", "10.1 11.0"),  # R4: one GPU, two names
        ("sm_110", "10.1 11.0"),
        ("sm_110f", "10.1 11.0"),
        ("sm_101a", "10.1 11.0"),
        ("sm_120", "12.0 12.1"),
        ("sm_120a", "12.0"),
        ("sm_120f", "12.0 12.1"),
        ("sm_121f", "12.1"),
        ("lto_90", ""),  # R8
        ("gfx90a", ""),
    ],
)
def test_machine_code(code: str, expected: str) -> None:
    assert where(code, SupportLevel.NATIVE) == expected
    assert where(code, SupportLevel.PTX) == ""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("compute_89/8.0", "8.9 9.0 10.0 10.1 10.3 10.7 11.0 12.0 12.1"),  # R5
        ("compute_87/8.0", "8.7 8.8 8.9 9.0 10.0 10.1 10.3 10.7 11.0 12.0 12.1"),  # of integrated ones too
        ("compute_90a/8.0", "9.0"),  # R3: of PTX too
        ("compute_100f/8.8", "10.0 10.3 10.7"),
        ("compute_120f/8.8", "12.0 12.1"),
        ("compute_101/8.7", "10.1 11.0 12.0 12.1"),  # R4
    ],
)
def test_ptx(code: str, expected: str) -> None:
    assert where(code, SupportLevel.PTX) == expected
    assert where(code, SupportLevel.NATIVE) == ""


CODES = st.builds(
    GpuCode,
    kind=st.sampled_from([CodeKind.SASS, CodeKind.PTX, CodeKind.LTO]),
    architecture=st.sampled_from(EVERY),
    suffix=st.sampled_from(["", "a", "f"]),
    isa=st.just("8.0"),
)


@given(CODES)
def test_a_suffix_only_narrows(code: GpuCode) -> None:
    plain = replace(code, suffix="")
    for capability in EVERY:
        if runs(code, capability) is not SupportLevel.NONE:
            assert runs(plain, capability) is runs(code, capability)
            assert code.architecture is not None
            if code.suffix == "a":
                assert {code.architecture, capability} <= {capability, Capability(10, 1), Capability(11, 0)}


MODULES = st.builds(
    ModuleCount,
    codes=st.lists(CODES, min_size=1, max_size=6, unique=True).map(tuple),
    count=st.integers(1, 9),
)


@given(st.lists(MODULES, min_size=1, max_size=6))
def test_counts_add_up(modules: list[ModuleCount]) -> None:
    one = replace(library("a.so"), modules=tuple(modules))
    for capability in EVERY:
        found = reach(one, capability)
        assert found.native + found.ptx + found.without == sum(part.count for part in generic_modules(one))
        assert bool(found.isa) == bool(found.ptx)
        assert (found.reach is SupportLevel.NONE) == (found.native + found.ptx == 0)
        assert (found.reach is SupportLevel.PARTIAL) == bool(found.without and found.native + found.ptx)


def test_modules_for_single_gpus_say_nothing() -> None:
    one = library("a.so", "10 sm_70 sm_80", "90 sm_80", "5 compute_86/7.2", "3 sm_90a", "2 sm_90a sm_100a")
    assert [part.count for part in generic_modules(one)] == [10]
    assert reach(one, Capability(7, 0)).reach is SupportLevel.NATIVE
    assert reach(one, Capability(9, 0)).reach is SupportLevel.NONE


@pytest.mark.parametrize("more", ["", " compute_120/9.0"])
def test_modules_without_an_old_gpu_are_told_whatever_else_they_hold(more: str) -> None:
    """As onnxruntime-gpu 1.28 has them, with PTX, and 1.29 and newer without."""
    one = library(
        "a.so", f"222 sm_75 sm_80 sm_90a sm_120a{more}", f"48 sm_80 sm_90a sm_120a{more}", "18 sm_90a"
    )
    found = reach(one, Capability(7, 5))
    assert (found.reach, found.native, found.without) == (SupportLevel.PARTIAL, 222, 48)
    assert reach(one, Capability(9, 0)).reach is SupportLevel.NATIVE


def test_what_was_linked_is_linked_anew_from_its_ptx() -> None:
    """Of separately compiled code the linked module has no PTX, its objects do: all of it is needed."""
    one = library("a.so", "1 sm_80 sm_90", "100 compute_90/8.3", "16 compute_90/8.1")
    newer = reach(one, Capability(12, 0))
    assert (newer.reach, newer.ptx, newer.without, newer.isa) == (SupportLevel.PTX, 1, 0, "8.3")
    assert reach(one, Capability(9, 0)).reach is SupportLevel.NATIVE
    assert reach(one, Capability(7, 0)).reach is SupportLevel.NONE
    sentence = predict(contents(one), Capability(12, 0)).reason
    assert sentence.endswith("(compute_90, ISA 8.3)")


@pytest.mark.parametrize(
    "modules",
    [
        ("2 sm_80 sm_90", "100 compute_90/8.3"),  # a library is linked once
        ("1 sm_80 sm_90", "100 compute_80/8.3"),  # not the PTX of the newest target
        ("1 sm_80 sm_90", "100 compute_90a/8.3"),
        ("1 sm_80 sm_90 compute_90a/8.3", "100 compute_90/8.3"),
    ],
)
def test_ptx_of_other_modules_helps_none_else(modules: tuple[str, ...]) -> None:
    assert reach(library("a.so", *modules), Capability(12, 0)).reach is SupportLevel.NONE


def test_few_modules_for_more_gpus_do_not_speak_for_a_build_for_one() -> None:
    """As a library of one's own build has them, into which another for more GPUs was linked."""
    one = library("torch/lib/libtorch_cuda.so", "440 sm_90", "3 sm_80 sm_90")
    assert reach(one, Capability(8, 0)).without == 440
    assert reach(one, Capability(9, 0)).native == 443
    assert predict(contents(one, packages=["torch==2.9.1"]), Capability(8, 0)).answer is Compatibility.NO
    several = library("a.so", "94 sm_80", "73 sm_70", "82 sm_70 sm_80")
    assert [part.count for part in generic_modules(several)] == [82]


def test_lto_ir_that_was_linked_is_not_missed() -> None:
    one = library("a.so", "5 lto_80 lto_90", "1 sm_80", "1 sm_80 sm_86")
    assert (reach(one, Capability(8, 0)).native, reach(one, Capability(8, 0)).without) == (2, 0)
    assert reach(library("a.so", "5 lto_80 lto_90"), Capability(8, 0)).without == 5


def test_code_that_no_scan_can_read_is_said() -> None:
    one = replace(library("torch/lib/libtorch_cuda.so", "5"), unread="5 of kind 128, the first at 0x10")
    found = predict(contents(one, packages=["torch==2.9.1"]), Capability(9, 0))
    assert (
        found.reason
        == "libtorch_cuda.so contains no code that a scan can read: 5 of kind 128, the first at 0x10"
    )


@pytest.mark.parametrize("cuda", ["14.0", "abc", "\u00b2", "\u0661\u0662.1", "9" * 5000])
def test_a_cuda_that_nobody_knows_has_no_driver(cuda: str) -> None:
    floor = cuda_floor(cuda)
    assert (floor.driver, floor.reason) == ("", f"no driver for CUDA {cuda} is known")


def test_a_build_for_one_gpu_speaks_with_all_modules() -> None:
    one = library("a.so", "440 sm_90", "3 sm_90 sm_90a sm_100a")
    assert reach(one, Capability(9, 0)).native == 443
    assert reach(one, Capability(10, 0)).without == 440
    assert reach(one, Capability(10, 0)).reach is SupportLevel.PARTIAL  # the three that have 100a


def test_the_oldest_ptx_that_serves_counts_and_the_newest_of_all_modules() -> None:
    one = library("a.so", "1 sm_70 sm_80 compute_70/7.0 compute_80/8.3", "1 sm_70 sm_80 compute_80/7.4")
    found = reach(one, Capability(9, 0))
    assert (found.reach, found.ptx, found.isa) == (SupportLevel.PTX, 2, "7.4")


def test_isa_versions_are_no_text() -> None:
    one = library("a.so", "1 sm_70 sm_80 compute_80/9.0", "1 sm_70 sm_80 compute_80/10.2")
    assert reach(one, Capability(9, 0)).isa == "10.2"


def test_usual_codes_leave_out_what_few_modules_have() -> None:
    codes = " ".join(map(str, usual_codes(torch_2_12().libraries[0])))
    assert codes == "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


def test_versions_of_drivers() -> None:
    assert parse_driver("535.54.03") == parse_driver("535.54.03-open") == (535, 54, 3)
    for text in ("", "535.", "R535", "535.54.03.1", "٣", "535.-1"):
        with pytest.raises(ValueError, match="write 535"):
            parse_driver(text)


@pytest.mark.parametrize(
    ("written", "version"),
    [
        (" 535 ", "535"),
        ("R535", "535"),
        ("535-server", "535"),
        ("570.124.06-open", "570.124.06-open"),
        ("nvidia-driver-550-server-open", "550-open"),
        ("535-ubuntu", "535"),
        ("580.178.04-server", "580.178.04"),
        ("550.54.15-0ubuntu1~22.04", "550.54.15"),
        ("570.26", "570.26"),
        ("418.67", "418.67"),
    ],
)
def test_a_driver_as_people_write_it(written: str, version: str) -> None:
    assert read_driver(written) == version


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("12.2", "CUDA version.*535.54.03"),
        ("0", "from 300 to "),
        ("999", "from 300 to "),
        ("551.23", "its branch, 550"),
        ("31.0.15.5123", "Windows"),
        ("new", "write 535 or"),
        ("", "write 535 or"),
        ("535 and newer", "write 535 or"),
    ],
)
def test_what_is_no_driver_for_linux_is_told_apart(written: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_driver(written)


@pytest.mark.parametrize(
    ("capability", "driver", "told"),
    [
        ("7.0", "590.44.01", "580 was the last"),
        ("7.0", "580.95.05", ""),
        ("6.1", "595", "580 was the last"),
        ("7.5", "610.43.02", ""),
        ("7.0", "580.178.04-open", "open kernel modules"),
        ("6.1", "535-open", "open kernel modules"),
        ("7.5", "580.178.04-open", ""),
        ("12.0", "565-open", "begin at 570"),
        ("3.7", "495.29.05", "470 was the last"),
        ("3.7", "470.256.02", ""),
        ("10.0", "550.54.14", "begin at 570"),
        ("12.0", "570.26", ""),
        ("8.9", "515.43.04", "begin at 520"),
        ("8.7", "300", ""),  # modules have a driver of their own
    ],
)
def test_a_gpu_has_a_first_and_a_last_driver(capability: str, driver: str, told: str) -> None:
    reason, source = gpu_refusal(parse_capability(capability), driver)
    assert told in reason
    assert bool(reason) == bool(told) == bool(source)


@pytest.mark.parametrize(
    ("driver", "needed", "expected"),
    [
        ("535", "525", False),
        ("470.82.01", "525.60.13", True),
        ("535", "535.54.03", False),  # a branch: any of its releases
        ("535.43.02", "535.54.03", True),
        ("550.40.07", "535.54.03", False),
        ("525.60.13", "525", False),
    ],
)
def test_older(driver: str, needed: str, expected: bool) -> None:
    assert older(driver, needed) is expected


def test_floors() -> None:
    assert [cuda_floor(cuda).driver for cuda in ("11.7", "12", "13.2", "", "99.1")] == [
        "450",
        "525",
        "580",
        "",
        "",
    ]
    assert ptx_floor("8.1").driver == "530.30.02"
    assert ptx_floor("99.9").driver == ""
    assert "not known" in ptx_floor("99.9").reason


def test_the_largest_floor_holds() -> None:
    """R6 and R7: machine code asks for its major's first driver, PTX and zstd for more."""
    plain = library("a.so", "1 sm_70 sm_80 compute_80/8.3")
    squeezed = replace(plain, compressions=("lz4", "zstd"))

    def floor(one: object, capability: str) -> str:
        assert one in (plain, squeezed)
        lib = plain if one is plain else squeezed
        asked = parse_capability(capability)
        return minimum_driver("12.8", asked, [(lib, reach(lib, asked))]).driver

    assert floor(plain, "8.0") == "525"
    assert floor(plain, "10.0") == "570"  # no older one knows the GPU
    assert floor(plain, "9.0") == "545.23.06"
    assert floor(squeezed, "8.0") == floor(squeezed, "9.0") == "550.54.14"


def test_a_floor_that_is_not_known_is_said() -> None:
    one = library("a.so", "1 sm_70 sm_80 compute_80/77.0")
    found = minimum_driver("12.8", Capability(9, 0), [(one, reach(one, Capability(9, 0)))])
    assert found.driver == ""
    assert "77.0" in found.reason


def answers(place: ScanResult) -> dict[str, str]:
    return {str(one.capability): str(one.answer) for one in predict_all(place)}


def ask(place: ScanResult, capability: str) -> Prediction:
    return predict(place, parse_capability(capability))


def test_torch_2_3() -> None:
    found = answers(torch_2_3())
    assert {one for one, answer in found.items() if answer == "yes"} == {
        "5.0", "5.2", "6.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0",
    }  # fmt: skip
    assert {answer for one, answer in found.items()} == {"yes", "no"}
    one = ask(torch_2_3(), "6.1")
    assert one.reason == "libtorch_cuda.so has sm_60 code, which runs on 6.1, in all 332 modules"
    assert (one.driver, one.driver_reason) == ("525", "the first that runs programs of CUDA 12")
    assert "only sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90 and no PTX" in ask(torch_2_3(), "12.0").reason


@pytest.mark.parametrize(
    ("packages", "capability", "answer", "driver"),
    [
        ("numba-cuda==0.30.4 nvidia-cuda-runtime-cu12==12.6.77", (9, 0), Compatibility.YES, "525"),
        ("numba-cuda==0.30.4 nvidia-cuda-runtime-cu12==12.6.77", (12, 0), Compatibility.NO, ""),
        ("numba-cuda==0.30.4 nvidia-cuda-nvcc-cu12==12.8.93", (12, 0), Compatibility.YES, "525"),
        ("numba-cuda==0.30.4 nvidia-cuda-runtime==13.1.80", (7, 0), Compatibility.NO, ""),
        ("nvidia-cuda-runtime-cu12==12.6.77", (9, 0), Compatibility.PTX, "560.28.03"),  # numba's own target
        ("numba-cuda==0.30.4 nvidia-cuda-runtime-of-others==1", (9, 0), Compatibility.UNKNOWN, ""),
        ("numba-cuda==0.30.4 nvidia-cuda-runtime==99.1", (9, 0), Compatibility.UNKNOWN, ""),
    ],
)
def test_what_makes_all_its_code_where_it_runs(
    packages: str, capability: tuple[int, int], answer: Compatibility, driver: str
) -> None:
    made = contents(packages=["numba==0.68.1", *packages.split()])
    found = predict(made, Capability(*capability))
    assert (found.answer, found.driver) == (answer, driver)
    # The suite then expects machine code, and no PTX.
    coverage = predict_coverage(made)[str(Capability(*capability))]
    assert (coverage.native, coverage.ptx, coverage.runs) == (
        answer is Compatibility.YES,
        False,
        answer in (Compatibility.YES, Compatibility.PTX),
    )


@pytest.mark.parametrize(
    ("nvrtc", "capability", "answer", "driver"),
    [
        ("12.9.86", "12.0", Compatibility.YES, "570"),
        ("12.6.85", "12.0", Compatibility.NO, ""),  # cub.so has code for it, and NVRTC no target
        ("12.9.86", "11.0", Compatibility.NO, ""),  # sm_101 in CUDA 12
        ("12.9.86", "9.0", Compatibility.YES, "525"),
    ],
)
def test_cupy_needs_code_of_its_own_and_a_target_of_nvrtc(
    nvrtc: str, capability: str, answer: Compatibility, driver: str
) -> None:
    """Its reductions and sorts are in the wheel, NVRTC compiles all else."""
    wheel = next(row for row in knowledge.scanned_wheels() if row.package == "cupy-cuda12x")
    nvrtc_wheel = InstalledPackage(name="nvidia-cuda-nvrtc-cu12", version=nvrtc)
    place = replace(wheel.contents, packages=(*wheel.contents.packages, nvrtc_wheel))
    found = predict(place, parse_capability(capability), "570")
    assert (found.answer, found.driver) == (answer, driver)
    assert "NVRTC" in found.reason
    assert found.warnings == ()  # it writes machine code, so the driver need not support CUDA 12.9


def test_the_turing_hole() -> None:
    """The project documents 7.5, and libtorch_cuda_linalg.so has no code for it."""
    one = ask(torch_2_12(), "7.5")
    assert one.answer is Compatibility.PARTLY
    assert one.reason == (
        "torch 2.12.1 runs on 7.5, all but linear algebra that MAGMA computes (LU, LDL): "
        "libtorch_cuda_linalg.so has no code for it"
    )
    hole = next(part for part in one.libraries if part.path.endswith("linalg.so"))
    assert (hole.reach, hole.native, hole.without, hole.gates) == (SupportLevel.NONE, 0, 65, False)
    assert ask(torch_2_12(), "8.0").answer is Compatibility.YES
    assert ask(torch_2_12(), "7.0").answer is Compatibility.NO
    lines = contradictions(torch_2_12())
    assert lines[0].startswith("7.5: documented (pytorch/pytorch")
    assert "; found: torch 2.12.1 runs on 7.5, all but linear algebra" in lines[0]
    assert "libtorch_cuda_linalg.so has no code for it" in lines[0]
    assert lines[1].startswith("newer GPUs: PTX is documented (pytorch/pytorch")
    assert lines[1].endswith("; found: compute_120 is not in libtorch_cuda.so: "
                             "GPUs newer than its machine code have nothing to run")  # fmt: skip
    assert len(lines) == 2


def test_older_ptx_than_documented_is_told_as_it_is() -> None:
    place = contents(
        library("tensorflow/libtensorflow_cc.so.2", "9 sm_60 sm_70 sm_80 sm_89 compute_80/8.3"),
        packages=["tensorflow==2.21.0"],
        facts=["tensorflow.cuda_version=12.5.1"],
    )
    assert any(
        line.endswith("compute_90 is not in libtensorflow_cc.so.2: its PTX is compute_80/8.3")
        for line in contradictions(place)
    )


def test_no_contradiction_where_all_agrees() -> None:
    assert contradictions(torch_2_3()) == ()
    assert contradictions(contents()) == ()


@pytest.mark.parametrize(
    ("package", "version", "page"),
    [
        ("pytorch==2.10.0=cuda129_mkl_py312_0", "12.9", "conda-forge/pytorch-cpu-feedstock"),
        ("pytorch==2.3.1=py3.11_cuda12.1_cudnn8.9.2_0", "12.1", "pytorch/builder conda/"),
        ("torch==2.3.1+cu121", "12.1", "pytorch/builder manywheel"),
        ("pytorch==2.3.1=gpu_py312_0", "12.1", ""),  # of no channel that a table knows
    ],
)
def test_documents_are_those_of_the_build(package: str, version: str, page: str) -> None:
    place = contents(
        library("lib/libtorch_cuda.so", "9 sm_80 sm_120"), packages=[package], facts=[f"torch.cuda={version}"]
    )
    found = [line for line in contradictions(place) if "9.0: documented" in line or "9.0," in line]
    assert all(page in line for line in found)
    assert bool(found) == bool(page)


def test_what_a_project_says_of_a_capability() -> None:
    row = DocumentedSupport(
        framework="torch",
        version="2.3",
        cuda="12.1",
        codes=(parse_code("sm_70"), parse_code("compute_90")),
        minimum=Capability(7, 0),
        cudnn="",
        source="documented: nowhere",
    )
    said = {str(one): documented_answer(row, one) for one in EVERY}
    assert (said["6.1"], said["7.5"], said["8.0"], said["12.0"]) == (
        Compatibility.NO,
        Compatibility.YES,
        Compatibility.NO,
        Compatibility.PTX,
    )


def test_a_runtime_of_another_cuda_is_told() -> None:
    place = replace(torch_2_3(), packages=(*torch_2_3().packages, *contents(
        packages=["nvidia-cuda-runtime==13.0.88"]).packages))  # fmt: skip
    assert contradictions(place) == (
        "the framework is built for CUDA 12.1, but what is installed is nvidia-cuda-runtime 13.0.88",
    )


def test_torch_1_13_counts_what_has_no_code() -> None:
    assert ask(torch_1_13(), "7.5").answer is Compatibility.YES
    assert ask(torch_1_13(), "9.0").answer is Compatibility.NO  # the modules of PTX alone say nothing
    one = ask(torch_1_13(), "5.0")
    assert one.answer is Compatibility.PARTLY
    assert one.reason == (
        "torch 1.13.1 starts on 5.0, but 2 of 82 modules of libtorch_cuda_cpp.so have no code for it"
    )
    most = ask(torch_1_13(), "3.5")
    assert most.answer is Compatibility.NO
    assert most.reason == "67 of 82 modules of libtorch_cuda_cpp.so have no code for 3.5"


def test_tensorflow_through_ptx() -> None:
    one = ask(tensorflow_2_18(), "9.0")
    assert one.answer is Compatibility.PTX
    assert one.reason == (
        "libtensorflow_cc.so.2 has no machine code for 9.0 in 1149 of 1428 modules: "
        "the driver compiles their PTX (compute_90, ISA 8.3)"
    )
    assert one.driver == "545.23.06"
    assert ask(tensorflow_2_18(), "8.9").driver == "525"
    newer = predict_code(tensorflow_2_18(), Capability(12, 0))
    assert newer.answer is Compatibility.PTX  # its one linked module is linked anew
    known = ask(tensorflow_2_18(), "12.0")
    assert (known.answer, known.driver) == (Compatibility.PARTLY, newer.driver)
    assert known.reason.startswith("XLA of TensorFlow 2.18.1 makes code for 9.0 at most")
    assert "in 1428 of 1428 modules: the driver compiles their PTX" in newer.reason


def test_drivers_turn_a_yes_into_a_no() -> None:
    one = ask(tensorflow_2_18(), "9.0")
    assert with_driver(one, "550") == one
    old = with_driver(one, "535.54.03")
    assert old.answer is Compatibility.NO
    assert old.reason == (
        "driver 535.54.03 is older than 545.23.06, the first that compiles PTX of ISA 8.3 (CUDA 12.3)"
    )
    never = ask(torch_2_3(), "12.0")
    assert with_driver(never, "450") == never
    with pytest.raises(ValueError, match="write 535 or"):
        with_driver(never, "new")


def test_a_library_for_older_drivers_leaves_it_open_whether_they_do() -> None:
    """It is of data-center GPUs alone, and a capability does not say whether a GPU is one."""
    place = replace(tensorflow_2_18(), toolkit=("libcuda.so.1", "libcuda.so.550.54.14"))
    assert predict(place, parse_capability("9.0")).driver == "545.23.06"
    assert "libcuda.so 550.54.14 is here" in predict(place, parse_capability("9.0")).driver_reason
    old = predict(place, parse_capability("9.0"), "535.54.03")
    assert old.answer is Compatibility.UNKNOWN
    assert "works only on data-center GPUs" in old.reason
    assert predict(place, parse_capability("9.0"), "550").answer is Compatibility.PTX
    assert predict(place, parse_capability("9.0"), "470").answer is Compatibility.NO  # it knows no such GPU
    too_old = replace(place, toolkit=("libcuda.so.530.30.02",))
    assert predict(too_old, parse_capability("9.0"), "535.54.03").answer is Compatibility.NO


def test_a_library_that_names_its_drivers_says_where_it_works() -> None:
    note = ("driver", "libcuda.so.550.54.14", "CUDA 12.4 for drivers 470,535,545")
    place = replace(tensorflow_2_18(), toolkit=("libcuda.so.550.54.14",), facts=(note,))
    data_center, mixed = parse_capability("9.0"), parse_capability("8.6")
    assert predict(place, data_center, "535.54.03").answer is Compatibility.PTX
    assert "forward compatibility" in predict(place, data_center, "535.54.03").reason
    assert predict(place, data_center, "535.54.03").warnings == ()  # the library that comes first compiles
    assert predict(place, data_center, "525.60.13").answer is Compatibility.NO
    assert predict(place, mixed, "470.57.02").answer is Compatibility.UNKNOWN
    assert predict(place, mixed, "470.57.02", gpu="A40 (8.6)").answer is Compatibility.YES
    assert predict(place, mixed, "470.57.02", gpu="NVIDIA A10").answer is Compatibility.YES
    assert predict(place, mixed, "470.57.02", gpu="RTX A6000 (8.6)").answer is Compatibility.UNKNOWN
    assert predict(place, mixed, "470.57.02", gpu="RTX 3090 (8.6)").answer is Compatibility.NO
    newer = predict(place, data_center, "595.10")
    assert newer.answer is Compatibility.PTX
    assert any("803" in warning for warning in newer.warnings)


@pytest.mark.parametrize(
    ("driver", "gpu", "code"),
    [
        ("595.10", "", "803"),  # newer
        ("545.90.01", "", ""),
        ("550.54.14", "", ""),  # its own
        ("550", "", ""),
        ("530.30.02", "", "803"),  # of no branch that it serves
        ("550.54.14", "GeForce RTX 4090", "804"),
        ("", "GeForce RTX 4090", "804"),
        ("", "", ""),
    ],
)
def test_a_library_path_that_always_loads_it_fails_elsewhere(driver: str, gpu: str, code: str) -> None:
    facts = (
        ("driver", "LD_LIBRARY_PATH", "/opt/lib:/usr/local/cuda/compat"),
        ("driver", "libcuda.so.550.54.14", "CUDA 12.4 for drivers 470,535,545"),
    )
    place = replace(tensorflow_2_18(), toolkit=("libcuda.so.550.54.14",), facts=facts)
    one = predict(place, parse_capability("9.0"), driver, gpu=gpu)
    assert (one.answer is Compatibility.NO) == bool(code)
    assert code in one.reason
    free = replace(place, facts=facts[1:])
    assert code or predict(free, parse_capability("9.0"), driver, gpu=gpu).answer == one.answer
    assert any("803" in warning for warning in one.warnings) == (not driver and not gpu)


def test_nvidias_hook_chooses_it_on_consumer_gpus_too() -> None:
    """Where the driver would do without it: nothing in the toolkit looks at the GPU."""
    note = ("driver", "libcuda.so.580.65.06", "CUDA 13.0 for drivers 535,550,570")
    place = replace(tensorflow_2_18(), toolkit=("libcuda.so.580.65.06",), facts=(note,))
    for gpu, count in (("GeForce RTX 3090", 1), ("A40 (8.6)", 0), ("", 0)):
        one = predict(place, parse_capability("8.6"), "570.86.15", gpu=gpu)
        assert one.answer is Compatibility.YES
        assert sum("804" in warning for warning in one.warnings) == count


def test_the_drivers_own_libraries_in_an_image_are_told() -> None:
    names = ("libcuda.so.610.43", "libnvidia-ml.so.610.43")
    own = tuple(("driver", name, "of the image itself") for name in names)
    place = replace(tensorflow_2_18(), toolkit=names[:1], facts=own)
    for driver in ("", "595.10", "610.43"):
        (warning, *_) = predict(place, parse_capability("9.0"), driver).warnings
        assert names[1] in warning
        assert ("not 595.10" in warning) == (driver == "595.10")
    assert (
        predict(place, parse_capability("9.0"), "535.54.03").answer is Compatibility.NO
    )  # not for older ones


def test_what_compiles_at_run_time_may_be_too_new_for_the_driver() -> None:
    place = replace(torch_2_3(), facts=(("torch", "cuda", "12.4"),))
    old = predict(place, parse_capability("8.0"), "535.54.03")
    assert old.answer is Compatibility.YES
    assert any("PTX of CUDA 12.4" in warning for warning in old.warnings)
    assert predict(place, parse_capability("8.0"), "550.54.14").warnings == ()


def test_of_an_unknown_cuda_nothing_is_said_of_what_it_compiles() -> None:
    place = replace(torch_2_3(), facts=(), packages=(), toolkit=())
    told = predict(place, parse_capability("8.0"), "580.95.05")
    assert (told.answer, told.warnings) == (Compatibility.YES, ())


def test_of_a_library_for_each_cuda_the_one_of_its_own_counts() -> None:
    """bitsandbytes loads that of PyTorch's CUDA: what the others lack is no matter."""
    old = library("bitsandbytes/libbitsandbytes_cuda118.so", "9 sm_60 sm_80")
    own = library("bitsandbytes/libbitsandbytes_cuda121.so", "9 sm_60 sm_80 sm_90")
    torch = torch_2_3()
    both = replace(torch, libraries=(*torch.libraries, old, own))
    assert predict(both, parse_capability("9.0")).answer is Compatibility.YES
    alone = replace(torch, libraries=(*torch.libraries, old))
    assert "all but bitsandbytes" in predict(alone, parse_capability("9.0")).reason


def test_modules_that_some_functions_alone_use_are_told_as_these() -> None:
    name = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
    place = contents(library(name, "217 sm_75 sm_80 sm_90a", "91 sm_80 sm_86 sm_90a"))
    found = predict(place, parse_capability("7.5"))
    assert found.answer is Compatibility.PARTLY
    assert "runs on 7.5, all but attention by FlashAttention: 91 of 308 modules" in found.reason
    other = contents(library(name, "217 sm_75 sm_80 sm_90a", "91 sm_61 sm_86 sm_90a"))
    assert "starts on 7.5" in predict(other, parse_capability("7.5")).reason


def test_a_driver_that_cannot_be_judged_is_said() -> None:
    one = ask(contents(library("lib/a.so", "1 sm_70 sm_80")), "8.0")
    assert (one.answer, one.driver) == (Compatibility.YES, "")
    asked = with_driver(one, "535")
    assert asked.answer is Compatibility.YES
    assert (
        "whether driver 535 will do is not known: which CUDA it was built with is not known" in asked.reason
    )


@pytest.mark.parametrize(
    ("extra", "answer", "words"),
    [
        (library("torchvision/_C.so", "3 sm_80 sm_90"), Compatibility.PARTLY,
        "all but torchvision: _C.so has no"),
        (library("opt/env/lib/python3.11/site-packages/flash_attn/x.so", "3 sm_80"), Compatibility.PARTLY,
         "all but flash_attn: x.so has no code for it"),
        (library("opt/env/lib/libmagma.so", "3 sm_80 sm_90"), Compatibility.PARTLY, "all but linear algebra"),
        (library("usr/local/cuda/extras/libsomething.so", "3 sm_80 sm_90"), Compatibility.YES, ""),
        (library("nvidia/cudnn/lib/libcudnn_ops.so.9", "3 sm_80 sm_90"), Compatibility.YES, ""),
        (library("opt/lib/libcublasLt.so.12", "3 sm_80"), Compatibility.YES, ""),
        (library("lib/libcudadevrt.a", "3 sm_80"), Compatibility.YES, ""),
        (library("flash_mla/_C.so", "3 sm_90a", "2 sm_100f"), Compatibility.YES,
         "; without _C.so, only for sm_100f, sm_90a"),
        (library("flash_mla/_C.so", "3 sm_90a", "1 sm_80"), Compatibility.PARTLY, "all but flash_mla: _C.so"),
        (library("bitsandbytes/librocm.so", "3 gfx90a"), Compatibility.YES, ""),
        (library("torchvision/_D.so", "3 sm_70 sm_80", damage="at 0x40: cut"), Compatibility.PARTLY,
        "is damaged"),
        (library("onnxruntime/capi/libonnxruntime_providers_cuda.so", "3 sm_80 sm_90"), Compatibility.PARTLY,
         "all but onnxruntime-gpu"),
    ],
)  # fmt: skip
def test_what_other_libraries_count_for(extra: object, answer: Compatibility, words: str) -> None:
    place = torch_2_3()
    one = ask(replace(place, libraries=(*place.libraries, extra)), "7.5")  # type: ignore[arg-type]
    assert one.answer is answer
    assert words in one.reason


def test_a_damaged_library_gives_no_answer() -> None:
    place = contents(
        library("torch/lib/libtorch_cuda.so", "1 sm_70 sm_80", damage="at 0x1a40: cut short"),
        packages=["torch==2.3.1"],
    )
    one = ask(place, "8.0")
    assert one.answer is Compatibility.UNKNOWN
    assert one.reason == "libtorch_cuda.so is damaged: at 0x1a40: cut short"


@pytest.mark.parametrize(
    ("modules", "capability", "answer"),
    [
        (["39 sm_80 sm_90", "5 sm_89 sm_120", "8 sm_100f sm_120f"], "8.0", Compatibility.YES),
        (["39 sm_80 sm_90", "5 sm_80 sm_90"], "8.0", Compatibility.YES),
        (["39 sm_70 sm_80 sm_90", "5 sm_80 sm_90"], "7.0", Compatibility.PARTLY),
        (["39 sm_75 sm_80 sm_90 sm_120", "1 sm_75 sm_80 sm_89"], "12.0", Compatibility.PARTLY),
        (["5 sm_80 sm_90", "8 sm_89 sm_120"], "8.0", Compatibility.NO),
    ],
)
def test_modules_for_what_a_gpu_cannot_do_are_not_missed(
    modules: list[str], capability: str, answer: Compatibility
) -> None:
    for name in ("_C.abi3.so", "_C.cpython-311-x86_64-linux-gnu.so"):
        place = contents(library(f"vllm/{name}", *modules), packages=["vllm==0.21.0"])
        assert ask(place, capability).answer is answer


def test_libraries_that_no_row_names_do_not_make_a_build_for_cpus() -> None:
    place = contents(library("vllm/_new.so", "3 sm_80 sm_90"), packages=["vllm==0.4.2"])
    assert ask(place, "8.0").answer is Compatibility.UNKNOWN
    assert ask(contents(packages=["vllm==0.4.2"]), "8.0").answer is Compatibility.NO


def test_one_module_in_a_hundred_is_a_special_case() -> None:
    few = contents(library("a.so", "342 sm_70 sm_75", "1 sm_70 sm_80"))
    assert ask(few, "7.5").answer is Compatibility.YES
    more = contents(library("a.so", "90 sm_70 sm_80", "1 sm_80 sm_90"))
    assert ask(more, "7.0").answer is Compatibility.PARTLY


def test_without_a_framework_a_library_for_other_gpus_is_not_missed() -> None:
    plain, special = library("a.so", "2 sm_70 sm_80"), library("b.so", "3 sm_90a")
    both = ask(contents(plain, special), "8.0")
    assert both.answer is Compatibility.YES
    assert both.reason.endswith("; without b.so, only for sm_90a")
    assert ask(contents(special), "8.0").answer is Compatibility.NO
    assert ask(contents(plain, special), "9.0").answer is Compatibility.NO


def test_without_a_framework_every_library_counts() -> None:
    one, other = library("a.so", "2 sm_70 sm_80"), library("b.so", "3 sm_80 sm_90")
    assert ask(contents(one, other), "8.0").answer is Compatibility.YES
    some = ask(contents(one, other), "9.0")
    assert some.answer is Compatibility.PARTLY
    assert some.reason == "1 of 2 libraries lack code for 9.0: a.so has no code for it"
    assert ask(contents(one, other), "6.0").answer is Compatibility.NO
    assert ask(contents(one, library("libcublas.so.12", "1 sm_80")), "7.0").answer is Compatibility.YES
    assert ask(contents(library("libcublas.so.12", "1 sm_70 sm_80")), "7.0").answer is Compatibility.YES
    assert ask(contents(library("a.so", "5 lto_80")), "8.0").reason == (
        "a.so contains only LTO-IR, which only a linker can use"
    )


def test_without_a_framework_the_library_with_the_most_modules_decides() -> None:
    """PaddlePaddle on 12.0: 7 of 673 modules are not something that runs in part."""
    paddle = library("paddle/base/libpaddle.so", "666 sm_70 sm_80 sm_90", "7 sm_70 sm_80 sm_90 sm_120")
    place = contents(paddle, library("paddle/libs/libextra.so", "9 sm_80 sm_120"))
    one = ask(place, "12.0")
    assert (one.answer, one.driver) == (Compatibility.NO, "")
    assert one.reason == "666 of 673 modules of libpaddle.so have no code for 12.0"
    assert ask(place, "9.0").answer is Compatibility.PARTLY
    assert ask(place, "8.0").answer is Compatibility.YES
    # cuBLASLt has more kernels for some GPUs than for others, and chooses among them.
    chooses = contents(library("nvidia/cublas/lib/libcublasLt.so.12", "9 sm_80 sm_90", "1 sm_70 sm_90"))
    assert ask(chooses, "7.0").reason == "libcublasLt.so.12 has sm_70 code, in 1 of 10 modules"
    assert ask(chooses, "7.0").answer is Compatibility.YES
    assert ask(chooses, "12.0").answer is Compatibility.NO


def test_nothing_and_amd() -> None:
    assert ask(contents(), "8.0").answer is Compatibility.UNKNOWN
    rocm = contents(
        library("torch/lib/libtorch_hip.so", "9 gfx90a gfx942"), packages=["torch==2.9.1+rocm6.4"]
    )
    one = ask(rocm, "8.0")
    assert one.answer is Compatibility.NO
    assert one.reason == "its GPU code is AMD's (gfx90a, gfx942)"
    assert amd_targets(rocm) == ("gfx90a", "gfx942")


def test_known_faults_are_warnings() -> None:
    place = contents(
        library("torch/lib/libtorch_cuda.so", "397 sm_70 sm_75 sm_80 sm_90 sm_100 sm_120"),
        packages=["torch==2.9.1", "nvidia-cublas-cu12==12.8.4.1"],
        facts=["torch.cuda=12.8"],
    )
    assert ask(place, "10.0").answer is Compatibility.YES
    assert any("cuBLAS 12.8.4.1" in text for text in ask(place, "10.0").warnings)
    assert ask(place, "9.0").warnings == ()


@pytest.mark.parametrize(
    ("code", "target", "expected"),
    [
        ("gfx90a", "gfx90a", True),
        ("gfx90a", "gfx908", False),
        ("gfx90a:xnack+", "gfx90a", True),  # nothing is said of the GPU's setting
        ("gfx90a:xnack+", "gfx90a:sramecc+:xnack-", False),
        ("gfx90a:sramecc+:xnack-", "gfx90a:sramecc+:xnack-", True),
        ("gfx90a", "gfx90a:xnack-", True),
        ("gfx11-generic", "gfx1103", True),
        ("gfx11-generic", "gfx1200", False),
        ("gfx9-4-generic", "gfx942", True),
        ("sm_90", "gfx90a", False),
    ],
)
def test_amd(code: str, target: str, expected: bool) -> None:
    assert amd_runs(parse_code(code), target) is expected


def test_amd_modules_are_counted() -> None:
    one = library("a.so", "3 gfx90a gfx942", "2 gfx1100", "7 sm_80")
    assert count_amd_modules(one, "gfx942") == (3, 5)


def test_nothing_runs_where_what_must_load_has_no_code() -> None:
    jax = contents(
        library("jax_plugins/xla_rocm7/xla_rocm_plugin.so", "5 gfx90a gfx942"),
        library("jax_rocm7_plugin/_prng.so", "2 gfx90a gfx1100"),
        packages=["jax==0.10.2"],
    )
    found = {one: predict_amd(jax, one) for one in ("gfx90a", "gfx942", "gfx1100")}
    assert {one: told.answer for one, told in found.items()} == {
        "gfx90a": Compatibility.YES, "gfx942": Compatibility.PARTLY, "gfx1100": Compatibility.NO,
    }  # fmt: skip
    missing = "; ROCm's own libraries are not in it, and must be where it runs"
    assert found["gfx942"].reason == f"1 of 2 libraries lack code for gfx942: _prng.so{missing}"
    whole = replace(jax, toolkit=("libamdhip64.so.7.0.51831",))
    assert predict_amd(whole, "gfx942").reason == "1 of 2 libraries lack code for gfx942: _prng.so"
    assert predict_amd(jax, "gfx90a").reason.endswith(missing)
    assert found["gfx1100"].reason == (
        "xla_rocm_plugin.so has no code for gfx1100, only for gfx90a, gfx942, gfx1100"
    )
    assert [(one.path, one.gates) for one in found["gfx90a"].libraries] == [
        ("jax_plugins/xla_rocm7/xla_rocm_plugin.so", True), ("jax_rocm7_plugin/_prng.so", False),
    ]  # fmt: skip
    assert ask(jax, "gfx90a") == found["gfx90a"]


def test_code_objects_of_a_folder_are_one_library() -> None:
    """rocBLAS brings hundreds of files, each for one processor, and runs where one of them does."""
    rocblas = contents(
        library("opt/rocm/lib/librccl.so", "4 gfx90a gfx1100"),
        library("opt/rocm/lib/rocblas/library/Kernels_gfx90a.hsaco", "1 gfx90a"),
        library("opt/rocm/lib/rocblas/library/Kernels_gfx942.hsaco", "1 gfx942"),
    )
    assert predict_amd(rocblas, "gfx90a").answer is Compatibility.YES
    assert not lacks_runtime(rocblas)  # RCCL is ROCm's
    assert lacks_runtime(contents(library("a.so", "1 gfx90a")))
    assert not lacks_runtime(contents(library("a.so", "1 sm_80")))
    assert predict_amd(rocblas, "gfx1100").reason.startswith(
        "1 of 2 libraries lack code for gfx1100: library/"
    )


def test_which_gpus_of_amd_are_judged() -> None:
    """Those that are known by name, and those that the code names, generic ones by their members."""
    place = contents(library("a.so", "1 gfx803 gfx90a:xnack- gfx12-generic"))
    judged = [str(one) for one in amd_capabilities(place)]
    assert {"gfx803", "gfx90a", "gfx942", "gfx1200", "gfx1201"} <= set(judged)
    assert not {"gfx12-generic", "gfx90a:xnack-"} & set(judged)
    assert {one.capability.processor for one in predict_all(place)} == set(judged)  # no other code is there
    cuda = contents(library("a.so", "1 gfx90a"), library("b.so", "1 sm_80"))
    assert {"8.0", "gfx90a"} <= {str(one.capability) for one in predict_all(cuda)}
    assert amd_capabilities(contents(library("b.so", "1 sm_80"))) == ()
