"""The suite's checks on made-up site-packages: each kind of damage is found."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from imagefactory.suite import elf, onnx_model, table
from imagefactory.suite.checks import framework as framework_checks
from imagefactory.suite.checks import imports, libraries, packages, usage
from imagefactory.suite.context import CheckFailure, parse_expected, same_version
from tests.made.environment import add_package, fake_program, library, make_context

# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1.0", "1.0.0"),
        ("2024.01.02", "2024.1.2"),
        ("1.0rc1", "1.0-rc.1"),
        ("v1.2", "1.2"),
        ("1.0a1", "1.0alpha1"),
    ],
)
def test_spellings_of_one_version(one: str, other: str) -> None:
    assert same_version(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("1.0", "1.0.1"), ("1.10", "1.1"), ("1.0rc1", "1.0"), ("1.0", "1.0+cu121"), ("11.1", "1.11")],
)
def test_different_versions(one: str, other: str) -> None:
    assert not same_version(one, other)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("12.1", "12.1", True),
        ("12.5.1", "12", True),
        ("12.5.1", "12.5", True),
        ("13.0", "12", False),
        ("12.10", "12.1", False),
        ("12", "12.1", False),
    ],
)
def test_cuda_versions(found: str, expected: str, *, same: bool) -> None:
    assert framework_checks.same_cuda(found, expected) is same


def test_expectations_of_another_format_or_with_unknown_checks_are_refused() -> None:
    with pytest.raises(ValueError, match="format 9"):
        parse_expected('{"format": 9}')
    with pytest.raises(ValueError, match="sing"):
        parse_expected('{"format": 1, "checks": ["sing"]}')


# --- packages ------------------------------------------------------------------------------------


def test_packages_as_locked(tmp_path: Path) -> None:
    add_package(tmp_path, "Some.Package", "1.0", {"some/__init__.py": b"x = 1\n", "some/data": b"d" * 5})
    (tmp_path / "some/__pycache__").mkdir()
    (tmp_path / "some/__pycache__/__init__.cpython-311.pyc").write_bytes(b"compiled")
    finding = packages.check(make_context(tmp_path, packages={"some-package": "1.0"}))
    assert finding.numbers["packages"] == 1
    assert finding.numbers["files"] == 4


def test_byte_code_that_a_wheel_carries_may_have_been_compiled_anew(tmp_path: Path) -> None:
    code = "pkg/__pycache__/__init__.cpython-311.pyc"
    add_package(tmp_path, "pkg", "1.0", {"pkg/__init__.py": b"x = 1\n", code: b"theirs"})
    (tmp_path / code).write_bytes(b"compiled here")
    context = make_context(tmp_path, packages={"pkg": "1.0"})
    packages.check(context)
    (tmp_path / code).unlink()
    with pytest.raises(CheckFailure, match="__pycache__"):
        packages.check(context)


def test_missing_wrong_and_surplus_packages(tmp_path: Path) -> None:
    add_package(tmp_path, "wrong", "1.0", {})
    add_package(tmp_path, "surplus", "3.0", {})
    with pytest.raises(CheckFailure) as caught:
        packages.check(make_context(tmp_path, packages={"wrong": "1.1", "missing": "2.0"}))
    assert "missing 2.0" in caught.value.detail
    assert "wrong is 1.0" in caught.value.detail
    assert "surplus 3.0" in caught.value.detail


def test_one_package_in_two_versions(tmp_path: Path) -> None:
    add_package(tmp_path, "twice", "1.0", {})
    add_package(tmp_path, "twice", "1.1", {})
    with pytest.raises(CheckFailure, match="twice"):
        packages.check(make_context(tmp_path, packages={"twice": "1.0"}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda site: (site / "pkg/__init__.py").unlink(), "pkg/__init__.py: "),
        (lambda site: (site / "pkg/__init__.py").write_bytes(b"x = 12\n"), "7 bytes.* 6"),
        (
            lambda site: (site / "pkg/__init__.py").write_bytes(b"x = 2\n"),
            "pkg/__init__.py is",
        ),
        (lambda site: (site / "pkg-1.0.dist-info/RECORD").unlink(), "RECORD "),
        (lambda site: (site / "evil.pyc").write_bytes(b"code"), "evil.pyc"),
        (lambda site: (site / "evil.pth").write_bytes(b"import os\n"), "evil.pth"),
    ],
)
def test_damaged_packages(tmp_path: Path, damage: Any, words: str) -> None:
    add_package(tmp_path, "pkg", "1.0", {"pkg/__init__.py": b"x = 1\n"})
    context = make_context(tmp_path, packages={"pkg": "1.0"})
    packages.check(context)
    damage(tmp_path)
    with pytest.raises(CheckFailure, match=words):
        packages.check(context)


def test_a_file_of_several_wheels_is_as_one_of_them_says(tmp_path: Path) -> None:
    for name, text in (("cv", b"x = 1\n"), ("cv-headless", b"x = 22\n")):
        add_package(tmp_path, name, "1.0", {"cv2/__init__.py": text, "cv2/same.py": b""})
    context = make_context(tmp_path, packages={"cv": "1.0", "cv-headless": "1.0"})
    for kept in (b"x = 22\n", b"x = 1\n"):
        (tmp_path / "cv2/__init__.py").write_bytes(kept)
        finding = packages.check(context)
        assert (finding.numbers["overwritten-files"], finding.numbers["files"]) == (1, 6)
    (tmp_path / "cv2/__init__.py").write_bytes(b"x = 333\n")
    with pytest.raises(CheckFailure, match=r"__init__\.py has 8"):
        packages.check(context)


def test_another_python_than_the_locks(tmp_path: Path) -> None:
    add_package(tmp_path, "pkg", "1.0", {})
    with pytest.raises(CheckFailure, match=r" 3\.7$"):
        packages.check(make_context(tmp_path, packages={"pkg": "1.0"}, python="3.7"))


def test_an_empty_lock_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckFailure, match="names no package"):
        packages.check(make_context(tmp_path))


# --- libraries -----------------------------------------------------------------------------------


def test_a_library_beside_is_found_through_its_runpath(tmp_path: Path) -> None:
    needed = library(tmp_path / "nvidia/x/lib/libx.so.1")
    library(tmp_path / "pkg/ext.so", needed, runpath="$ORIGIN/../nvidia/x/lib")
    numbers = libraries.check(make_context(tmp_path)).numbers
    assert numbers["libraries"] == 2
    assert numbers["resolved"] == 3
    assert numbers["preloaded"] == 0


def test_a_library_known_by_its_soname_alone_is_counted_apart(tmp_path: Path) -> None:
    needed = library(tmp_path / "nvidia/x/lib/libx.so.1")
    library(tmp_path / "pkg/ext.so", needed)
    assert libraries.check(make_context(tmp_path)).numbers["preloaded"] == 1


def test_an_absent_library_is_named_with_its_user(tmp_path: Path) -> None:
    needed = library(tmp_path / "libgone.so.3")
    library(tmp_path / "pkg/ext.so", needed)
    needed.unlink()
    with pytest.raises(CheckFailure, match=r"libgone.so.3 .*pkg/ext.so"):
        libraries.check(make_context(tmp_path))


def test_the_drivers_library_may_be_absent(tmp_path: Path) -> None:
    needed = library(tmp_path / "libimagefactorytest.so.1", soname="libnvidia-imagefactory.so.1")
    library(tmp_path / "pkg/ext.so", needed)
    needed.unlink()
    assert libraries.check(make_context(tmp_path)).numbers["driver"] == 1


def test_an_optional_library_is_excused_for_its_owner_alone(tmp_path: Path) -> None:
    needed = library(tmp_path / "libsoxtest.so", soname="libsox.so.99")
    library(tmp_path / "torchaudio/lib/sox.so", needed)
    needed.unlink()
    assert libraries.check(make_context(tmp_path)).numbers["optional"] == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "torchaudio/lib/sox.so").rename(tmp_path / "other/sox.so")
    with pytest.raises(CheckFailure, match=r"libsox.so.99"):
        libraries.check(make_context(tmp_path))


def test_a_damaged_library_fails(tmp_path: Path) -> None:
    path = library(tmp_path / "ext.so")
    path.write_bytes(path.read_bytes()[:64])
    with pytest.raises(CheckFailure, match=r"ext.so"):
        libraries.check(make_context(tmp_path))


def test_libraries_of_the_system_and_of_the_path_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = library(tmp_path / "elsewhere/libe.so.1")
    library(tmp_path / "site/ext.so", needed)
    context = make_context(tmp_path / "site")
    with pytest.raises(CheckFailure, match=r"libe.so.1"):
        libraries.check(context)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "elsewhere"))
    assert libraries.check(context).numbers["resolved"] == 2


def test_the_loaders_cache_is_read() -> None:
    names = libraries.parse_cache(Path(libraries.CACHE_FILE).read_bytes())
    assert "libc.so.6" in names
    assert libraries.parse_cache(b"no cache") == frozenset()


def test_libraries_opened_by_name_must_be_within_reach(tmp_path: Path) -> None:
    library(tmp_path / "jax_plugins/xla_cuda12/xla_cuda_plugin.so", runpath="$ORIGIN/../../nvidia/all/lib")
    _, names = libraries.OPENED_BY_NAME["jax"]
    for name in names:
        library(tmp_path / f"nvidia/all/lib/{name}.so.1")
    context = make_context(tmp_path, framework="jax")
    assert libraries.check(context).numbers["opened-by-name"] == len(names)
    (tmp_path / "nvidia/all/lib/libcudnn.so.1").unlink()
    with pytest.raises(CheckFailure, match="libcudnn"):
        libraries.check(context)


def test_a_jax_without_its_plugin_fails(tmp_path: Path) -> None:
    with pytest.raises(CheckFailure, match="so no GPU library would be opened"):
        libraries.check(make_context(tmp_path, framework="jax"))


def test_an_image_for_cpus_opens_no_gpu_library(tmp_path: Path) -> None:
    context = make_context(tmp_path, framework="jax", cuda=table.NO_CUDA)
    assert libraries.check(context).numbers["opened-by-name"] == 0


@pytest.mark.parametrize("package", ["tensorflow-cpu", "onnxruntime"])
def test_builds_for_cpus_are_their_frameworks(package: str) -> None:
    name = table.FRAMEWORKS[package]
    framework = importlib.import_module(f"imagefactory.suite.frameworks.{name}")
    assert dict(framework.MODULES)[package] == table.module_of(package) == name


def test_an_image_for_amd_opens_none_of_nvidias_libraries(tmp_path: Path) -> None:
    context = make_context(tmp_path, framework="jax", cuda="rocm7")
    assert libraries.check(context).numbers["opened-by-name"] == 0


def test_the_build_for_rocm_is_its_framework() -> None:
    framework = importlib.import_module("imagefactory.suite.frameworks.tensorflow")
    assert dict(framework.MODULES)["tensorflow-rocm"] == table.module_of("tensorflow-rocm") == "tensorflow"


class Builds:
    """A framework that says what it was built for."""

    def __init__(self, rocm: str) -> None:
        self.rocm = rocm

    def prepare(self) -> None:
        """Nothing."""

    def rocm_version(self, _: object) -> tuple[str, str]:
        return self.rocm, "its plugin"


@pytest.mark.parametrize(
    ("built", "asked", "told"),
    [
        ("7", "rocm7", ""),
        ("6.4.43", "rocm6.4", ""),
        ("6.4.1", "rocm7", "ROCm 6.4.1.* 7"),
    ],
)
def test_a_build_for_rocm_must_be_the_recipes(tmp_path: Path, built: str, asked: str, told: str) -> None:
    context = make_context(tmp_path, Builds(built), framework="jax", cuda=asked)
    if told:
        with pytest.raises(CheckFailure, match=told):
            framework_checks.check_cuda(context)
    else:
        assert framework_checks.check_cuda(context).detail == f"ROCm {built} (its plugin)"


def test_a_framework_whose_rocm_nobody_knows_fails(tmp_path: Path) -> None:
    numba = importlib.import_module("imagefactory.suite.frameworks.numba")
    context = make_context(tmp_path, numba, framework="numba", distribution="numba", cuda="rocm7")
    with pytest.raises(CheckFailure, match="numba"):
        framework_checks.check_cuda(context)


@pytest.mark.parametrize(
    ("points", "told"),
    [
        (("xla_rocm7",), ""),
        ((), "rocm7-local"),
        (("xla_rocm7", "xla_rocm60"), "xla_rocm60, xla_rocm7"),
        (("xla_rocm",), "does not contain its ROCm version"),
    ],
)
def test_the_rocm_of_jax_is_its_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: tuple[str, ...], told: str
) -> None:
    jax = importlib.import_module("imagefactory.suite.frameworks.jax")
    made = [
        importlib.metadata.EntryPoint(name=name, value=f"jax_plugins.{name}", group="jax_plugins")
        for name in (*points, "cuda12")
    ]
    loaded: list[tuple[str, str]] = []
    monkeypatch.setattr(jax.importlib.metadata, "entry_points", lambda group: made)
    monkeypatch.setattr(jax, "load_all", lambda *names: loaded.append(names))
    context = make_context(tmp_path, jax, framework="jax", cuda="rocm7")
    if told:
        with pytest.raises(CheckFailure, match=told):
            jax.rocm_version(context)
    else:
        assert jax.rocm_version(context) == ("7", "plugin xla_rocm7")
        assert loaded == [("jax_plugins.xla_rocm7", "xla_rocm7")]


def test_libraries_of_another_machine_are_counted_and_not_judged(tmp_path: Path) -> None:
    needed = library(tmp_path / "libgone.so.3")
    path = library(tmp_path / "pkg/ext.so", needed)
    needed.unlink()
    data = bytearray(path.read_bytes())
    data[18:20] = (elf.MACHINES["aarch64"] if os.uname().machine == "x86_64" else 62).to_bytes(2, "little")
    path.write_bytes(data)
    assert libraries.check(make_context(tmp_path)).numbers["foreign"] == 1


# --- import, cuda, compute -----------------------------------------------------------------------


def framework(**changes: Any) -> Any:
    """A framework that computes as the reference does."""
    values: dict[str, Any] = {
        "MODULES": (("torch", "imagefactory_fake_framework"),),
        "prepare": lambda: None,
        "cuda_version": lambda context: ("11.7", "made up"),
        "matmul": lambda left, right, kind: framework_checks.matmul(left, right),
        "total": lambda values, kind: math.fsum(values),
        "convolution": lambda image, filters, kind: framework_checks.convolution(image, filters),
        "solve": lambda square, side, kind: framework_checks.solve(square, side),
        "gradient": lambda left, right, kind: framework_checks.gradient(left, right),
        **changes,
    }
    return types.SimpleNamespace(**values)


def test_import_compares_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imagefactory_fake_framework.py").write_text("__version__ = '1.13.1+cu117'\n")
    importlib.invalidate_caches()
    good = make_context(tmp_path, framework(), packages={"torch": "1.13.1"})
    assert imports.check(good).detail == "imagefactory_fake_framework 1.13.1+cu117"
    with pytest.raises(CheckFailure, match=r"1\.13\.1\+cu117.*1\.13\.0"):
        imports.check(make_context(tmp_path, framework(), packages={"torch": "1.13.0"}))
    with pytest.raises(CheckFailure, match="torch"):
        imports.check(make_context(tmp_path, framework(), packages={"numpy": "1.26.4"}))


def test_another_cuda_than_the_recipes_fails(tmp_path: Path) -> None:
    assert framework_checks.check_cuda(make_context(tmp_path, framework())).numbers == {
        "major": 11,
        "minor": 7,
    }
    with pytest.raises(CheckFailure, match=r"CUDA 11\.7.* 12"):
        framework_checks.check_cuda(make_context(tmp_path, framework(), cuda="12"))


def test_compute_agrees(tmp_path: Path) -> None:
    finding = framework_checks.check_compute(make_context(tmp_path, framework()))
    assert set(finding.numbers.values()) == {0.0}
    assert len(finding.numbers) == sum(map(len, table.OPERATIONS.values()))


@pytest.mark.parametrize("operation", list(table.OPERATIONS))
def test_each_wrong_operation_is_found(tmp_path: Path, operation: str) -> None:
    right = getattr(framework(), operation)

    def wrong(*inputs: Any) -> Any:
        values = framework_checks.flatten(right(*inputs))
        largest = max(range(len(values)), key=lambda index: abs(values[index]))
        values[largest] *= 1.05
        return values

    with pytest.raises(CheckFailure, match=f"^{operation} ") as caught:
        framework_checks.check_compute(make_context(tmp_path, framework(**{operation: wrong})))
    assert caught.value.outcome == table.WRONG_NUMBERS


@pytest.mark.parametrize("result", [math.nan, math.inf, []])
def test_no_number_is_a_wrong_number(tmp_path: Path, result: Any) -> None:
    with pytest.raises(CheckFailure, match="total in float64"):
        framework_checks.check_compute(make_context(tmp_path, framework(total=lambda values, kind: result)))


def test_a_missing_operation_is_an_error_where_no_table_excuses_it(tmp_path: Path) -> None:
    incomplete = framework()
    del incomplete.gradient
    with pytest.raises(AttributeError):
        framework_checks.check_compute(make_context(tmp_path, incomplete))


def test_every_framework_file_has_the_same_functions() -> None:
    names = {
        "MODULES",
        "cuda_version",
        "matmul",
        "total",
        "convolution",
        "solve",
        "gradient",
        "compilers",
    }
    for distribution, name in table.FRAMEWORKS.items():
        module = importlib.import_module(f"imagefactory.suite.frameworks.{name}")
        excused = {
            operation
            for owner, operation, kind in table.OPERATIONS_NOT_APPLICABLE
            if owner == name and not kind
        }
        if (name, "compute") in table.CHECKS_NOT_APPLICABLE:
            excused |= {"matmul", "total", "convolution", "solve", "gradient"}
        excused |= {"compilers"} if (name, "compiler") in table.CHECKS_NOT_APPLICABLE else set()
        assert {attribute for attribute in names if not hasattr(module, attribute)} == excused
        assert dict(module.MODULES)[distribution] == table.module_of(distribution)


# --- the reference itself ------------------------------------------------------------------------


def test_reference_solves() -> None:
    case = framework_checks.make_case()
    solution = framework_checks.solve(case.square, case.side)
    back = [math.fsum(a * x for a, x in zip(row, solution, strict=True)) for row in case.square]
    assert framework_checks.relative_error(back, case.side) < 1e-14


def test_reference_gradient_is_the_slope() -> None:
    case, step = framework_checks.make_case(), 1e-6
    left, right = case.matrix[:3], [row[:2] for row in case.right]

    def loss(weights: framework_checks.Matrix) -> float:
        return math.fsum(
            math.tanh(value / 64) ** 2 for row in framework_checks.matmul(left, weights) for value in row
        )

    gradient = framework_checks.gradient(left, right)
    for row, column in ((0, 0), (5, 1), (63, 0)):
        up, down = ([list(values) for values in right] for _ in range(2))
        up[row][column] += step
        down[row][column] -= step
        assert math.isclose(
            gradient[row][column], (loss(up) - loss(down)) / (2 * step), rel_tol=1e-4, abs_tol=1e-9
        )


def test_reference_convolution_by_hand() -> None:
    assert framework_checks.convolution([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], [[[[1, 0], [0, 1]]]]) == [
        [[6, 8], [12, 14]]
    ]


def test_inputs_are_exact_in_bfloat16() -> None:
    case = framework_checks.make_case()
    values = framework_checks.flatten([case.matrix, case.right, case.values, case.image, case.filters])
    assert all(value * 64 == int(value * 64) and abs(value) < 2 for value in values)
    assert len(set(values)) > 200


# --- compiler, models, the ordinary user ---------------------------------------------------------


def test_what_cannot_apply_stands_in_the_tables() -> None:
    assert table.check_not_applicable("onnxruntime", "compiler", {})
    assert table.check_not_applicable("torch", "compiler", {"torch": "1.13.1"})
    assert not table.check_not_applicable("torch", "compiler", {"torch": "2.3.1"})
    assert not table.check_not_applicable("torch", "compiler", {"torch": "1.13.1", "triton": "2.0"})
    assert table.check_not_applicable("jax", "compiler", {"jax": "0.4.30"})
    assert not table.check_not_applicable("jax", "compiler", {"nvidia-cuda-nvcc-cu12": "12.9.86"})
    for framework_name in table.FRAMEWORKS.values():
        for check in set(table.CHECKS) - {"compiler"}:
            alone_on_gpus = (framework_name, check) == ("cupy", "compute")
            assert bool(table.check_not_applicable(framework_name, check, {})) is alone_on_gpus


def test_an_assembler_must_start_and_make_gpu_code(tmp_path: Path) -> None:
    jax = importlib.import_module("imagefactory.suite.frameworks.jax")
    context, program = make_context(tmp_path), tmp_path / "nvidia/cuda_nvcc/bin/ptxas"
    with pytest.raises(CheckFailure, match=r"nvidia/\*/bin/ptxas"):
        jax.compilers(context, str(tmp_path))
    fake_program(program, 'echo release 12.9; [ "$1" = --version ] || printf "\\177ELF" > "$4"')
    assert jax.compilers(context, str(tmp_path))[0] == "ptxas 12.9"
    fake_program(program, 'echo release 12.9; [ "$1" = --version ] || : > "$4"')
    with pytest.raises(CheckFailure, match="made no GPU code"):
        jax.compilers(context, str(tmp_path))
    fake_program(program, "echo broken; exit 3")
    with pytest.raises(CheckFailure, match="3: broken"):
        jax.compilers(context, str(tmp_path))
    program.chmod(0o644)
    with pytest.raises(CheckFailure, match="cannot be started"):
        jax.compilers(context, str(tmp_path))


def test_a_torch_without_triton_fails(tmp_path: Path) -> None:
    torch = importlib.import_module("imagefactory.suite.frameworks.torch")
    with pytest.raises(CheckFailure, match="triton"):
        torch.compilers(make_context(tmp_path, packages={"torch": "2.3.1"}), str(tmp_path))


def test_a_triton_that_cannot_start_is_said_with_its_reason(tmp_path: Path) -> None:
    """As triton 2.3 without setuptools; here there is no triton for the interpreter at all."""
    torch = importlib.import_module("imagefactory.suite.frameworks.torch")
    context = make_context(tmp_path, packages={"torch": "2.3.1", "triton": "2.3.1"})
    with pytest.raises(CheckFailure, match="ptxas"):
        torch.compilers(context, str(tmp_path))
    program = tmp_path / "triton/backends/nvidia/bin/ptxas"
    fake_program(program, 'echo release 12.9; [ "$1" = --version ] || printf "\\177ELF" > "$4"')
    with pytest.raises(CheckFailure, match=r" 1.*ModuleNotFoundError: No module named .triton"):
        torch.compilers(context, str(tmp_path))


def test_the_empty_libcuda_answers_an_error(tmp_path: Path) -> None:
    """In a process of its own: nothing else may take it for a driver."""
    header = tmp_path / "cuda.h"
    header.write_text("CUresult CUDAAPI cuInit(unsigned int flags);\n#define cuMemAlloc cuMemAlloc_v2\n")
    text = (
        "import ctypes, sys; from imagefactory.suite import triton_build as made\n"
        "made.make_empty_libcuda(sys.argv[1], sys.argv[2]); driver = ctypes.CDLL('libcuda.so.1')\n"
        "print(driver.cuInit(0), driver.cuMemAlloc_v2(0))\n"
    )
    command = [sys.executable, "-c", text, tmp_path, header]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "999 999\n"


def test_protobuf_numbers_and_fields() -> None:
    """The examples of protobuf's own encoding page: 150 is 96 01, `testing` in field 2."""
    assert onnx_model.varint(150) == b"\x96\x01"
    assert onnx_model.field(1, 150) == b"\x08\x96\x01"
    assert onnx_model.field(2, "testing") == b"\x12\x07testing"


def ask_unprivileged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **facts: Any) -> str:
    """The check's answer for a process with these facts; its own uid and rights are the test's."""
    monkeypatch.setattr(os, "getuid", lambda: facts.get("uid", 65534))
    writable = facts.get("writable", ())
    monkeypatch.setattr(os, "access", lambda path, mode: path in writable)
    if "home" in facts:
        monkeypatch.setenv("HOME", facts["home"])
    else:
        monkeypatch.delenv("HOME", raising=False)
    return usage.check_unprivileged(make_context(tmp_path, uid=65534)).detail


def test_an_ordinary_user_on_a_read_only_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ask_unprivileged(monkeypatch, tmp_path).startswith("uid 65534, read-only root, no home")
    assert ask_unprivileged(monkeypatch, tmp_path, home="/nonexistent").startswith("uid 65534")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"uid": 0}, "uid 0.* 65534"),
        ({"writable": ("/usr",)}, "/usr can be written"),
        ({"home": "/root", "writable": ("/root",)}, "HOME is /root"),
    ],
)
def test_a_run_that_is_not_what_was_asked_for_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckFailure, match=words):
        ask_unprivileged(monkeypatch, tmp_path, **facts)


def test_the_check_does_not_pass_in_the_run_as_root(tmp_path: Path) -> None:
    with pytest.raises(CheckFailure, match="a run of its own"):
        usage.check_unprivileged(make_context(tmp_path))
