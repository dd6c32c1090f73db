"""Which framework a place is for, which of its libraries count, and how a build for the CPU is told."""

from __future__ import annotations

import pytest

from imagefactory.gpu.frameworks import (
    LibraryRole,
    cpu_only,
    cuda_of,
    find_framework,
    find_package,
    frameworks,
    role_of,
)
from imagefactory.gpu.knowledge import families
from imagefactory.gpu.predict import predict_all
from imagefactory.gpu.values import Compatibility, GpuLibrary, ScanResult
from tests.made.contents import contents, library, tensorflow_2_18, torch_2_3

MAGMA = "linear algebra that MAGMA computes (LU, LDL)"
PREFIX = "opt/env/lib/python3.11/site-packages/"


def named(name: str) -> object:
    return next(one for one in frameworks() if one.name == name)


def test_every_family_of_the_recipes_is_known() -> None:
    without_recipes = {"vllm", "xformers", "faiss-gpu"}
    assert {one.name for one in frameworks()} == {*families().values(), *without_recipes}
    for one in frameworks():
        assert one.must_load or one.runtime
        assert "{version}" in one.pip
        assert "{version}" in one.conda


@pytest.mark.parametrize(
    ("path", "framework", "role", "what"),
    [
        ("torch/lib/libtorch_cuda.so", "torch", LibraryRole.GATES, ""),
        ("opt/env/lib/libtorch_cuda.so", "torch", LibraryRole.GATES, ""),  # as conda-forge has it
        ("torch/lib/libtorch_cuda_linalg.so", "torch", LibraryRole.ON_DEMAND, MAGMA),
        ("torch/lib/libcusparseLt-f80c68d1.so.0", "torch", LibraryRole.REPORT, ""),
        (PREFIX + "nvidia/cublas/lib/libcublasLt.so.12", "torch", LibraryRole.REPORT, ""),
        (PREFIX + "nvidia/nvshmem/lib/nvshmem_bootstrap.so", "torch", LibraryRole.REPORT, ""),
        (PREFIX + "tensorrt_libs/libnvinfer_builder_resource_sm75.so.10", "torch", LibraryRole.REPORT, ""),
        (PREFIX + "torchvision/_C.so", "torch", LibraryRole.OTHER, ""),
        (PREFIX + "tensorflow/libtensorflow_cc.so.2", "tensorflow", LibraryRole.GATES, ""),
        (PREFIX + "tensorflow/libtensorflow_cc.so.2", "torch", LibraryRole.ON_DEMAND, "tensorflow"),
        (PREFIX + "jax_plugins/xla_cuda12/xla_cuda_plugin.so", "jax", LibraryRole.GATES, ""),
        (PREFIX + "jaxlib/xla_extension.so", "jax", LibraryRole.GATES, ""),
        (PREFIX + "notjaxlib/xla_extension.so", "jax", LibraryRole.OTHER, ""),
        ("onnxruntime/capi/libonnxruntime_providers_cuda.so", "onnxruntime-gpu", LibraryRole.GATES, ""),
        ("usr/lib/libcudadevrt.a", "torch", LibraryRole.REPORT, ""),
    ],
)
def test_roles(path: str, framework: str, role: LibraryRole, what: str) -> None:
    assert role_of(path, named(framework)) == (role, what)  # type: ignore[arg-type]


def test_custom_calls_of_jax() -> None:
    role, what = role_of("jax_cuda12_plugin/_solver.so", named("jax"))  # type: ignore[arg-type]
    assert role is LibraryRole.ON_DEMAND
    assert "solvers" in what


def test_without_a_framework_nothing_gates() -> None:
    assert role_of("lib/libcudnn_ops.so.9", None) == (LibraryRole.REPORT, "")
    assert role_of("lib/mine.so", None) == (LibraryRole.OTHER, "")


def test_libraries_find_a_framework_before_packages_do() -> None:
    place = contents(
        library("tensorflow/libtensorflow_cc.so.2", "1 sm_80"),
        packages=["torch==2.9.1", "tensorflow==2.18.1"],
    )
    assert find_framework(place) == named("tensorflow")
    assert find_framework(contents(packages=["jaxlib==0.4.30"])) == named("jax")
    assert find_framework(contents(packages=["numpy==2.0"])) is None


def test_the_version_comes_from_package_or_facts() -> None:
    torch = find_framework(torch_2_3())
    assert torch is not None
    conda = contents(
        packages=["libtorch==2.5.1=cuda126_h1", "pytorch==2.5.1=cuda126_py312_0", "torch==2.5.1"]
    )
    of_conda = find_package(conda, torch)
    assert of_conda is not None
    assert (of_conda.name, of_conda.build) == ("pytorch", "cuda126_py312_0")
    told = find_package(contents(facts=["torch.version=2.5.1+cu124"]), torch)
    assert told is not None
    assert (told.name, told.version) == ("torch", "2.5.1+cu124")


GPU = library("torch/lib/libtorch_cuda.so", "1 sm_80")


@pytest.mark.parametrize(
    ("place", "cuda"),
    [
        (contents(GPU, packages=["torch==2.5.1"], facts=["torch.cuda=12.4"]), "12.4"),
        (contents(GPU, packages=["torch==2.5.1", "nvidia-cuda-runtime-cu12==12.4.127"]), "12.4"),
        (contents(GPU, packages=["pytorch==2.5.1=py3.12_cuda12.4_cudnn9.1.0_0"]), "12.4"),
        (contents(GPU, packages=["pytorch==2.7.1=cuda126_py312h1763f6d_306"]), "12.6"),
        (contents(packages=["jax==0.7.2=pyhd8ed1ab_0", "jaxlib==0.7.2=cuda129_py311hf88c8de_202"]), "12.9"),
        (contents(packages=["cuda-cudart==12.9.79=h5888daf_0"]), "12.9"),
        (contents(packages=["jax==0.10.2", "jax-cuda13-plugin==0.10.2"]), "13"),
        (tensorflow_2_18(), "12.5"),
        (contents(library("a.so", "1 sm_80 compute_52/7.8"), library("b.so", "1 compute_80/7.0")), "11"),
        (contents(library("nvidia/cublas/lib/libcublas.so.12", "1 compute_90/8.0")), ""),
        (contents(GPU), ""),
        (contents(GPU, facts=["torch.cuda=12.x"]), ""),
        (contents(GPU, facts=["torch.cuda=\u0661\u0662.1"]), ""),
        (contents(packages=["numpy==2.0"]), ""),
    ],
)
def test_cuda(place: ScanResult, cuda: str) -> None:
    assert cuda_of(place) == cuda


def test_cuda_by_file_names() -> None:
    place = ScanResult(source="", libraries=(), toolkit=("libcudart.so.12", "libcudart.so.12.1.105"))
    assert cuda_of(place) == "12.1"
    mangled = ScanResult(source="", libraries=(), toolkit=("libcudart-e409450e.so.11.0",))
    assert cuda_of(mangled) == "11.0"


@pytest.mark.parametrize(
    ("packages", "facts", "sentence"),
    [
        (
            ["torch==2.9.1+cpu"],
            ["torch.cuda=", "torch.version=2.9.1+cpu"],
            'torch 2.9.1+cpu has no code for GPUs and computes only on the CPU: install "torch==2.9.1" '
            "(CUDA 12.8) instead",
        ),
        (
            ["tensorflow-cpu==2.18.1"],
            ["tensorflow.is_cuda_build=False"],
            "tensorflow-cpu 2.18.1 has no code for GPUs and computes only on the CPU: install "
            '"tensorflow[and-cuda]==2.18.1" (CUDA 12.5) instead',
        ),
        (
            ["jax==0.10.2", "jaxlib==0.10.2"],
            [],
            "jax 0.10.2 is here without a CUDA plugin and computes only on the CPU: install "
            '"jax[cuda12]==0.10.2" (CUDA 12) or "jax[cuda13]==0.10.2" (CUDA 13) instead',
        ),
        (
            ["onnxruntime==1.23.2"],
            ["onnxruntime.package_name=onnxruntime"],
            "onnxruntime 1.23.2 has no code for GPUs and computes only on the CPU: install "
            '"onnxruntime-gpu[cuda]==1.23.2" (CUDA 12) instead',
        ),
        (
            ["pytorch==2.10.0=cpu_mkl_py312hf462abe_109"],
            [],
            "pytorch 2.10.0 (build cpu_mkl_py312hf462abe_109) has no code for GPUs and computes only "
            'on the CPU: install "pytorch 2.10.0 *cuda*" instead',
        ),
        (
            ["jax==0.7.2=pyhd8ed1ab_0", "jaxlib==0.7.2=cpu_py312h1d65785_0"],
            [],
            "jaxlib 0.7.2 (build cpu_py312h1d65785_0) has no code for GPUs and computes only on the CPU: "
            'install "jaxlib 0.7.2 *cuda*" instead',
        ),
        (
            ["torch==2.3.1"],  # what a broken install or a slimmed image left
            ["torch.cuda=12.1"],
            "torch 2.3.1 was built for CUDA 12.1, but its libraries with code for GPUs are missing: "
            "install it again",
        ),
        (
            ["torch==99.0+cpu"],  # no table knows it
            [],
            'torch 99.0+cpu has no code for GPUs and computes only on the CPU: install "torch==99.0" instead',
        ),
    ],
)
def test_builds_for_the_cpu(packages: list[str], facts: list[str], sentence: str) -> None:
    place = contents(packages=packages, facts=facts)
    assert cpu_only(place) == sentence
    assert {(one.answer, one.reason) for one in predict_all(place)} == {(Compatibility.NO, sentence)}


AMD = library("torch/lib/libtorch_hip.so", "1 gfx90a")


@pytest.mark.parametrize(
    "place",
    [
        torch_2_3(),
        contents(),
        contents(packages=["numpy==2.0"]),
        contents(AMD, packages=["torch==2.9.1+rocm6.4"]),
        contents(
            packages=["torch==2.9.1+rocm6.4"], facts=["torch.hip=6.4.43482"]
        ),  # nothing of it is AMD's code
        contents(packages=["jax-cuda12-plugin==0.10.2"]),
    ],
)
def test_all_else_is_none(place: ScanResult) -> None:
    assert cpu_only(place) == ""


def test_a_damaged_library_makes_no_cpu_build() -> None:
    broken = GpuLibrary(path="torch/lib/libtorch_cuda.so", size=9, modules=(), damage="at 0x0: cut")
    assert cpu_only(contents(broken, packages=["torch==2.9.1"])) == ""
