"""Scans written by hand, in the words of what real wheels were measured to hold."""

from __future__ import annotations

from collections.abc import Iterable

from imagefactory.gpu.capability import parse_code
from imagefactory.gpu.values import GpuLibrary, InstalledPackage, ModuleCount, ScanResult


def library(
    path: str, *modules: str, compressions: tuple[str, ...] = ("lz4",), damage: str = ""
) -> GpuLibrary:
    """`"57 sm_80 sm_90"` is 57 modules for both."""
    return GpuLibrary(
        path=path,
        size=1000,
        modules=tuple(_modules(text) for text in modules),
        compressions=compressions,
        damage=damage,
    )


def _modules(text: str) -> ModuleCount:
    count, *codes = text.split()
    return ModuleCount(codes=tuple(sorted(map(parse_code, codes))), count=int(count))


def contents(*libraries: GpuLibrary, packages: Iterable[str] = (), facts: Iterable[str] = ()) -> ScanResult:
    """Packages are `torch==2.9.1` or `pytorch==2.9.1=cuda128_0`, facts `torch.cuda=12.8`."""
    return ScanResult(
        source="made by hand",
        libraries=tuple(sorted(libraries, key=lambda one: one.path)),
        packages=tuple(sorted(map(_package, packages), key=lambda one: one.name)),
        facts=tuple(sorted(_fact(text) for text in facts)),
    )


def _package(text: str) -> InstalledPackage:
    name, _, rest = text.partition("==")
    version, _, build = rest.partition("=")
    return InstalledPackage(name=name, version=version, build=build)


def _fact(text: str) -> tuple[str, str, str]:
    name, _, value = text.partition("=")
    framework, _, key = name.partition(".")
    return framework, key, value


def torch_1_13() -> ScanResult:
    return contents(
        library(
            "torch/lib/libtorch_cuda_cu.so",
            "221 sm_37 sm_50 sm_60 sm_70 sm_75 sm_80 sm_86",
            "50 sm_35 sm_50 sm_60 sm_70 sm_75 sm_80 sm_86",
            "16 sm_80",
            "8 sm_86",
            "4 sm_75",
            "3 sm_70",
        ),
        library(
            "torch/lib/libtorch_cuda_cpp.so",
            "94 sm_80",
            "75 compute_86/7.2",
            "73 sm_70",
            "65 sm_37 sm_50 sm_60 sm_70 sm_75 sm_80 sm_86",
            "15 sm_35 sm_50 sm_60 sm_70 sm_80",
            "2 sm_60 sm_70 sm_80",
        ),
        library(
            "torch/lib/libtorch_cuda_linalg.so", "107 sm_37 sm_50 sm_60 sm_70 sm_80 sm_86", "3 sm_80 sm_86"
        ),
        packages=["torch==1.13.1"],
        facts=["torch.cuda=11.7"],
    )


def torch_2_3() -> ScanResult:
    return contents(
        library("torch/lib/libtorch_cuda.so", "332 sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"),
        library("torch/lib/libtorch_cuda_linalg.so", "107 sm_50 sm_60 sm_70 sm_80 sm_86 sm_90"),
        library("torch/lib/libcusparseLt-f80c68d1.so.0", "171 sm_86", "93 sm_80 sm_86", "78 sm_80"),
        packages=["torch==2.3.1"],
        facts=["torch.cuda=12.1"],
    )


def torch_2_12() -> ScanResult:
    return contents(
        library(
            "torch/lib/libtorch_cuda.so",
            "387 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
            "57 sm_75 sm_80 sm_86 sm_90 sm_100 sm_100a sm_103a sm_120",
            "4 sm_75 sm_80 sm_86 sm_90 sm_90a sm_100 sm_120",
            compressions=("zstd",),
        ),
        library(
            "torch/lib/libtorch_cuda_linalg.so", "65 sm_80 sm_86 sm_90 sm_100 sm_120", compressions=("zstd",)
        ),
        library("torch/lib/libtorch_nvshmem.so", "2 compute_120/9.0 sm_75 sm_80 sm_89 sm_90 sm_100 sm_120"),
        packages=["torch==2.12.1"],
        facts=["torch.cuda=13.0"],
    )


def tensorflow_2_18() -> ScanResult:
    return contents(
        library(
            "tensorflow/libtensorflow_cc.so.2",
            "1149 compute_90/8.3 sm_60 sm_70 sm_80 sm_89",
            "278 compute_90/8.3 sm_60 sm_70 sm_80 sm_89 sm_90",
            "116 compute_90/8.3",
            "1 sm_60 sm_70 sm_80 sm_89 sm_90",
        ),
        packages=["tensorflow==2.18.1"],
        facts=["tensorflow.cuda_version=12.5.1", "tensorflow.is_cuda_build=True"],
    )
