"""What the tables of gpu/knowledge say, and that they agree with each other, the locks and the scans."""

from __future__ import annotations

import re
import struct
import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from imagefactory.actions import scan_wheels
from imagefactory.gpu import contradictions, knowledge
from imagefactory.gpu.capability import Capability, CodeKind, GpuCode, parse_code
from imagefactory.gpu.knowledge.packages import parse_bound, parse_scanned, source_build
from imagefactory.gpu.knowledge.tables import covers, numbers, read_table
from imagefactory.gpu.knowledge.toolkits import run_time_compilers
from imagefactory.gpu.values import Compatibility, GpuLibrary, ModuleCount, ScanResult, rocm_of
from imagefactory.progress import QuietProgress
from imagefactory.versions import natural
from tests.made.errors import fails

ROOT = Path(knowledge.__file__).parents[3]


FRAMEWORKS = ("torch", "tensorflow", "jax", "onnxruntime-gpu")


def codes(text: str) -> tuple[GpuCode, ...]:
    return tuple(sorted(parse_code(word) for word in text.split()))


@pytest.mark.parametrize(
    ("framework", "version", "cuda", "expected"),
    [
        ("torch", "1.13.1", "11.7", "sm_37 sm_50 sm_60 sm_70 sm_75 sm_80 sm_86"),
        ("torch", "2.3", "12.1", "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"),
        ("torch", "2.7.1", "12.8", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"),
        ("torch", "2.9.1", "12.8", "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),
        ("torch", "2.11", "12.8", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),
        ("torch", "2.14.1", "13.0", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"),
        ("tensorflow", "2.21", "12", "sm_60 sm_70 sm_80 sm_89 compute_90"),
        ("tensorflow", "2.18.1", "12.5", "sm_60 sm_70 sm_80 sm_89 compute_90a"),
        ("jax", "0.10.0", "13", "sm_75 sm_80 sm_90 sm_100 sm_120 compute_120"),
        ("jax", "0.10.2", "13", "sm_75 sm_80 sm_90 sm_100 sm_110 sm_120 compute_120"),
        ("jax", "0.12.0", "13.2", "sm_75 sm_80 sm_90 sm_100 sm_110 sm_120 compute_120"),
        ("onnxruntime-gpu", "1.31.1", "13", "sm_75 sm_80 sm_86 sm_89 sm_90a sm_120a"),
    ],
)
def test_documented_builds(framework: str, version: str, cuda: str, expected: str) -> None:
    row = knowledge.documented(framework, version, cuda)
    assert row is not None
    assert row.codes == codes(expected)
    assert row.ptx == ("compute" in expected)
    assert all(one.codes for one in knowledge.all_documented())
    assert covers(row.version, version)


@pytest.mark.parametrize(
    ("framework", "version", "cuda"),
    [("torch", "2.3", "12.4"), ("torch", "2.30", "12.1"), ("torch", "3", "13.0"), ("numpy", "2.3", "12.1")],
)
def test_what_no_row_says_is_not_documented(framework: str, version: str, cuda: str) -> None:
    assert knowledge.documented(framework, version, cuda) is None


def test_documented_code_is_what_that_toolkit_can_compile() -> None:
    for row in knowledge.all_documented():
        if rocm_of(row.cuda):
            assert {code.kind for code in row.codes} == {CodeKind.AMD}, row
            continue
        targets = {(one.architecture, one.suffix) for one in knowledge.targets_of(row.cuda)}
        assert targets, row
        assert {(code.architecture, code.suffix) for code in row.codes} <= targets, row


def test_what_a_package_compiles_for_is_what_its_compiler_can() -> None:
    plain = {
        cuda: {code.architecture for code in codes if not code.suffix}
        for cuda, codes in knowledge.cuda_targets().items()
    }
    for row in run_time_compilers():
        assert set(row.cuda) <= set(plain), row
        for cuda, targets in row.bundled:
            assert set(targets) <= plain[cuda], row
        assert [numbers(first) for first, _ in row.limits] == sorted(
            numbers(first) for first, _ in row.limits
        )


@pytest.mark.parametrize("name", ["cupy", "cupy-cuda12x", "numba", "numba-cuda", "triton", "warp-lang"])
def test_no_two_rows_are_about_one_compiler_of_a_package(name: str) -> None:
    for version in (f"{major}.{minor}" for major in range(16) for minor in range(70)):
        cudas = [cuda for _, some in knowledge.compilers_of(name, version) for cuda in some]
        assert len(cudas) == len(set(cudas)), version
    assert knowledge.compilers_of(name, "not-a-version") == ()


def test_no_two_rows_document_the_same_build() -> None:
    keys = [(row.framework, row.version, row.cuda, row.platform) for row in knowledge.all_documented()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("framework", ["torch", "bitsandbytes"])
def test_every_build_for_amd_is_documented(framework: str) -> None:
    released = {(row.version, row.cuda) for row in knowledge.releases(framework) if rocm_of(row.cuda)}
    listed = {
        (row.version, row.cuda)
        for row in knowledge.all_documented()
        if row.framework == framework and rocm_of(row.cuda) and not row.partial  # AMD's own indexes
    }
    assert released
    assert released == listed


def test_releases_come_newest_first() -> None:
    first, *_ = rows = knowledge.releases("torch")
    assert (first.version, first.cuda, first.experimental) == ("2.15", "13.2", False)
    assert [row.version for row in rows] == sorted((row.version for row in rows), key=natural, reverse=True)
    assert knowledge.releases("nothing") == ()


def test_a_release_knows_its_pythons_and_its_cudnn() -> None:
    row = next(one for one in knowledge.releases("torch") if (one.version, one.cuda) == ("2.3", "12.1"))
    assert row.pythons == ("3.8", "3.9", "3.10", "3.11")
    assert (row.cudnn, row.experimental) == ("8.9.2.26", True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_pypi_offers_was_released(framework: str) -> None:
    released = [(row.version, row.cuda) for row in knowledge.releases(framework)]
    for wheel in knowledge.cuda_wheels():
        if wheel.package == framework:
            assert any(
                covers(version, wheel.version) and (covers(cuda, wheel.cuda) or covers(wheel.cuda, cuda))
                for version, cuda in released
            ), wheel


def test_newer_ptx_needs_newer_cuda() -> None:
    table = knowledge.ptx_cuda()
    known = sorted(table, key=numbers)
    assert [numbers(table[isa]) for isa in known] == sorted(numbers(table[isa]) for isa in known)
    assert (table["8.1"], table["8.6"], table["9.0"]) == ("12.1", "12.7", "13.0")


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [
        ("12.1", "530.30.02"),
        ("12.7", "570.26"),
        ("12", "525.60.13"),
        ("13.3", "610.43.02"),
        ("13.9", ""),
        ("10.1", "418.39"),
        ("7.5", ""),
    ],
)
def test_the_first_driver_that_offers_a_cuda(cuda: str, driver: str) -> None:
    assert knowledge.native_driver(cuda) == driver


def test_floors_of_minor_version_compatibility() -> None:
    assert knowledge.minor_floors() == {11: "450", 12: "525", 13: "580"}


def test_targets_of_toolkits() -> None:
    assert GpuCode(CodeKind.SASS, Capability(7, 0)) in knowledge.targets_of("12.8")
    assert GpuCode(CodeKind.SASS, Capability(7, 0)) not in knowledge.targets_of("13.0")
    assert GpuCode(CodeKind.SASS, Capability(10, 0), suffix="f") in knowledge.targets_of("12")
    assert knowledge.targets_of("14.0") == ()


def modules_of(version: str, library: str) -> tuple[ModuleCount, ...]:
    wheel = next(
        one for one in knowledge.scanned_wheels() if (one.package, one.version) == ("torch", version)
    )
    return next(one.modules for one in wheel.contents.libraries if one.path.endswith(library))


@pytest.mark.parametrize(
    ("version", "count", "common"),
    [
        ("2.3.1", 332, "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"),
        ("2.9.1", 397, "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),
        ("2.12.1", 448, "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),
    ],
)
def test_scans_found_what_is_known_of_torch(version: str, count: int, common: str) -> None:
    modules = modules_of(version, "/libtorch_cuda.so")
    assert sum(one.count for one in modules) == count
    assert set.intersection(*(set(one.codes) for one in modules)) == set(codes(common))


def test_a_scan_is_found_by_the_hash_of_its_wheel() -> None:
    wheel = knowledge.scanned_wheels()[0]
    assert knowledge.scanned(wheel.sha256) == wheel.contents
    assert knowledge.scanned("0" * 64) is None


def test_every_framework_wheel_of_the_locks_was_scanned() -> None:
    missing = [wheel.filename for _, wheel in scan_wheels.unscanned(ROOT / "lockfiles")]
    assert not missing, "`make scanned` scans them"


def test_the_file_of_scans_is_as_it_would_be_written() -> None:
    text = (Path(knowledge.__file__).parent / "scanned.toml").read_text(encoding="utf-8")
    assert scan_wheels.format_wheels(knowledge.scanned_wheels()) == text
    assert parse_scanned(text) == knowledge.scanned_wheels()


def test_a_wheel_becomes_a_row(tmp_path: Path) -> None:
    entry = struct.pack("<HHIQIIHHIQQQQ", 2, 0x0101, 64, 64, 0, 0, 0, 0, 86, 0, 0, 0, 0) + bytes(64)
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
    file = tmp_path / "torch-9.9-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("torch/lib/libtorch_cuda.so", b"\x7fELF" + bytes(124) + container)
        wheel.writestr("torch/lib/libcublasLt.so.12", b"\x7fELF" + bytes(124) + container)
        wheel.writestr(
            "torch/version.py",
            "# What this build is of.\n__version__ = '9.9+cu139'\ncuda: Optional[str] = '13.9'\n",
        )
    row = scan_wheels.scan_wheel_row(file, "2026-11", QuietProgress())
    assert (row.package, row.version, row.contents.source) == ("torch", "9.9", file.name)
    (library,) = (
        row.contents.libraries
    )  # cuBLASLt chooses among its own code: it says nothing of the framework
    assert (library.path, library.modules) == (
        "torch/lib/libtorch_cuda.so",
        (ModuleCount(codes=codes("sm_86"), count=1),),
    )
    assert ("torch", "cuda", "13.9") in row.contents.facts
    (again,) = parse_scanned(scan_wheels.format_wheel(row))
    assert again.contents.libraries == row.contents.libraries
    assert again.source.startswith("measured 2026-11: ")


def test_a_name_that_toml_would_read_otherwise_is_refused() -> None:
    contents = ScanResult(source="x", libraries=(GpuLibrary(path='a"b.so', size=1, modules=()),))
    wheel = knowledge.WheelScan(
        package="torch", version="1", file="x.whl", sha256="0" * 64, contents=contents, source="measured"
    )
    with fails("wheel-text-invalid"):
        scan_wheels.format_wheel(wheel)


@pytest.fixture(scope="module")
def differences() -> tuple[contradictions.CapabilityDifference, ...]:
    return contradictions.find_differences()


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.14.1"])
def test_turing_lacks_linear_algebra_though_documented(
    version: str, differences: tuple[contradictions.CapabilityDifference, ...]
) -> None:
    found = [
        one
        for one in differences
        if (one.framework, one.version) == ("torch", version) and Capability(7, 5) in one.capabilities
    ]
    (hole,) = found
    assert (hole.documented, hole.found) == (Compatibility.YES, Compatibility.PARTLY)
    assert "libtorch_cuda_linalg.so" in hole.reason
    assert hole.documented_source.startswith("documented: ")
    assert hole.scanned_source.startswith("measured ")


def test_what_is_documented_and_missing_comes_first(
    differences: tuple[contradictions.CapabilityDifference, ...],
) -> None:
    more = [one.documented is Compatibility.NO for one in differences]
    assert more == sorted(more)


def test_documented_ptx_that_is_not_there(
    differences: tuple[contradictions.CapabilityDifference, ...],
) -> None:
    missing = {(one.framework, one.version): one.reason for one in differences if not one.capabilities}
    assert "compute_120 is not in libtorch_cuda.so" in missing["torch", "2.12.1"]
    assert ("torch", "2.9.1") not in missing  # none is documented for CUDA 12.8


def test_the_parts_of_a_plugin_are_one_build() -> None:
    builds = [
        {wheel.package for wheel in build}
        for build in contradictions.builds(knowledge.scanned_wheels())
        if build[0].package.startswith("jax-cuda")
    ]
    assert {"jax-cuda13-pjrt", "jax-cuda13-plugin"} in builds
    assert not [build for build in builds if len({name.split("-")[1] for name in build}) > 1]


@pytest.mark.parametrize(
    "changed",
    [
        {"package": "Torch"},
        {"versions": "up to 2"},
        {"needs": "numpy"},  # which bounds nothing and adds nothing
        {"needs": "NumPy<2"},
        {"needs": "numpy[x]<2"},
        {"needs": "numpy<2; python_version < '3.12'"},
        {"needs": "numpy @ https://example.org/numpy.whl"},
        {"more": "x"},
    ],
)
def test_a_bound_that_is_not_as_its_table_says_is_rejected(changed: dict[str, str]) -> None:
    row = {"package": "torch", "versions": "<2.3", "needs": "numpy<2", "source": "x"}
    parse_bound(**row)
    with pytest.raises((ValueError, TypeError)):
        parse_bound(**row | changed)


def test_no_two_bounds_are_of_the_same_versions_and_package() -> None:
    keys = [(row.package, str(row.versions), row.needs.name) for row in knowledge.bounds()]
    assert len(keys) == len(set(keys))


def test_companions_are_known_as_far_as_their_framework_is() -> None:
    assert knowledge.companions_for("torch", "2.6.0")["torchaudio"] == "2.6"
    assert knowledge.companions_for("torch", "2.15.0")["torchaudio"] == ""  # it ended before
    assert knowledge.companions_for("torch", "99.0") == knowledge.companions_for("jax", "0.4.30") == {}
    assert (knowledge.last_with("torchaudio", "torch"), knowledge.last_with("numpy", "torch")) == ("2.11", "")


@pytest.mark.parametrize(
    ("package", "bounds", "tag", "name"),
    [
        ("cuml-cu11", "", "", "nvidia"),
        ("cuml-cu12", "==25.6.*", "", "nvidia"),
        ("cuml-cu12", "<25", "", "nvidia"),
        ("cuml-cu12", "~=25.6.0", "", "nvidia"),
        ("cuml-cu12", "", "", None),
        ("cuml-cu12", "==26.2.*", "", None),
        ("cudf-cu12", ">=24,<26", "", None),
        ("tensorrt", "", "", "nvidia"),
        ("tensorrt", "==8.6.0", "", None),
        ("nvidia-dali-cuda110", "<1.30", "", None),
        ("torch", "==2.1.2", "", None),
        ("torch", "==2.1.2", "cu118", "pytorch-cu118"),
        ("dgl", "==2.4.0", "", ""),
        ("dgl", "==2.1.0", "", None),
        ("numpy", "", "cu118", None),
    ],
)
def test_a_package_is_elsewhere_where_pypi_has_none_of_its_releases(
    package: str, bounds: str, tag: str, name: str | None
) -> None:
    row = knowledge.external_indexes(package, bounds, tag)
    assert (row.with_tag(tag)[0] if row else None) == name


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("https://pypi.nvidia.com", True),
        ("https://pypi.nvidia.com/simple/", True),
        ("https://download.pytorch.org/whl/cu118", True),
        ("https://download.pytorch.org/whl/cu118/torch_stable.html", False),
        ("https://index.example.org/simple", False),
    ],
)
def test_the_addresses_of_the_table(address: str, known: bool) -> None:
    assert knowledge.is_known_index(address) == known


def test_every_row_names_its_source_and_what_exists() -> None:
    rows = read_table("source_builds")["package"]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["name"] == canonicalize_name(row["name"])
        assert re.match(
            r"documented: [\w.-]+/[\w.-]+ \S+( and \S+)? at [0-9a-f]{8}\b.{20,}", row["source"]
        ), row
        assert set(row["code"]) <= {"C++", "CUDA", "Fortran", "Rust"}
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name) for name in row.get("debian", ()))
        for key in ("environment", "architectures"):
            assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in row.get(key, ()))


def test_a_package_is_found_by_its_normalized_name() -> None:
    found = source_build("flash-attn")
    assert found
    assert found.code == {"C++", "CUDA"}
    assert dict(found.environment) == {"FLASH_ATTENTION_FORCE_BUILD": "TRUE"}
    assert source_build("filterpy") is None


@pytest.mark.parametrize(
    ("capabilities", "architectures"),
    [
        (("8.0", "9.0"), "80;90"),
        (("8.6", "8.9+PTX"), "80"),
        (("12.0", "10.3", "11.0"), "100;110;120"),
        (("7.5",), None),
    ],
)
def test_a_build_that_reads_a_variable_of_its_own_compiles_for_the_targets_gpus(
    capabilities: tuple[str, ...], architectures: str | None
) -> None:
    found = source_build("flash-attn")
    assert found
    assert found.variables(capabilities).get("FLASH_ATTN_CUDA_ARCHS") == architectures


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("mamba-ssm", {"MAMBA_FORCE_BUILD": "TRUE", "MAMBA_KEEP_CUDA_BUILD": "TRUE"}),
        ("apex", {"APEX_CPP_EXT": "1", "APEX_CUDA_EXT": "1"}),
    ],
)
def test_extensions_are_compiled_not_left_out(name: str, variables: dict[str, str]) -> None:
    found = source_build(name)
    assert found
    assert found.variables(("8.0",)) == variables
