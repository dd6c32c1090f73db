"""`compat` of an image: which bytes a name leads to, what is told of them, and the exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from imagefactory import errors
from imagefactory.actions import inspect
from imagefactory.actions.inspect import InspectResult, predict_inspected, wheel_platform
from imagefactory.errors import LockError, UnreachableError, UnsolvableError
from imagefactory.gpu.amd import NO_RUNTIME, predict_amd
from imagefactory.gpu.capability import Capability, CodeKind, GpuCode, parse_code
from imagefactory.gpu.predict import predict_all
from imagefactory.gpu.values import Compatibility, GpuLibrary, InstalledPackage, ModuleCount, ScanResult
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.question import WheelRequest
from imagefactory.model import Lock, LockedWheel
from imagefactory.oci.layout import Layout
from imagefactory.oci.sif import SifOrigin, store_sif
from imagefactory.progress import QuietProgress
from imagefactory.scan.layers import LayerScan, format_scan
from imagefactory.views.inspect import Inspection, format_inspection, library_versions
from tests.made.command import Call, json_of
from tests.made.gpu_code import forward_libcuda, library
from tests.made.layout import add_image
from tests.made.registry import RegistryMadeHere, Ways, registry_made_here
from tests.made.scanned import VERSION, sif, tar
from tests.made.service import Answer, Request, service
from tests.made.values import make_lock
from tests.made.wheels import locked, make_wheel

ROOT = Path(__file__).parents[3]
SITE = "opt/env/lib/python3.11/site-packages"
TORCH = library(*[("sm_50", "sm_60", "sm_70", "sm_80", "sm_90")] * 12)
LINALG = library(*[("sm_70", "sm_80", "sm_90")] * 3)
LAYERS = [
    tar(("usr/bin/env", b"\x7fELF" + bytes(200))),
    tar(
        (f"{SITE}/torch/lib/libtorch_cuda.so", TORCH),
        (f"{SITE}/torch/version.py", VERSION),
        (f"{SITE}/torch-2.3.1.dist-info/METADATA", b"Name: torch\n"),
    ),
    tar(
        (f"{SITE}/nvidia/cudnn/lib/libcudnn.so.8", library(("sm_80",), ("sm_90",))),
        (f"{SITE}/nvidia_cudnn_cu12-8.9.2.26.dist-info/METADATA", b""),
        (f"{SITE}/nvidia_nccl_cu12-2.20.5.dist-info/METADATA", b""),
    ),
]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "store")
    with layout.in_use(QuietProgress()):
        add_image(layout, "pytorch:2.3-cu121", LAYERS)
    return layout


@pytest.fixture
def call(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return partial(call, "compat", "--scan")


# --- what is told ----------------------------------------------------------------------------------


def test_a_built_target_is_told_from_its_image(call: Call, layout: Layout) -> None:
    said = call("pytorch-2.3-cu121")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "pytorch-2.3-cu121"
    rows = (line.partition("  ") for line in lines[1 : lines.index("")])
    fields = {first: rest.strip() for first, _, rest in (row[2].partition("  ") for row in rows) if first}
    assert fields["from"].startswith("scan of the image in ")
    assert fields["framework"] == "torch 2.3.1"
    assert fields["CUDA"] == "12.1, cuDNN 8.9.2.26, NCCL 2.20.5"
    assert fields["predicted"].startswith("yes on 5.0 5.2 6.0 6.1 7.0 7.5 8.0 8.6 8.9 9.0")
    header, row, last = (line.split() for line in (lines[lines.index("") + 1 :])[:3])
    assert header[1] == "5.0"
    assert row[:3] == ["libtorch_cuda.so", "must", "load"]
    cells = dict(zip(header[1:], row[3:], strict=True))
    assert (cells["8.6"], cells["10.0"], cells["12.0"]) == ("N", "-", "-")
    assert dict(zip(header[1:], last[1:], strict=True))["8.6"] == "yes"
    assert "1 library of CUDA" in said.out
    assert "libcudnn.so.8" in call("pytorch-2.3-cu121", "--all").out


def test_json_tells_the_same_and_all_of_it(call: Call, layout: Layout) -> None:
    value: dict[str, Any] = call("pytorch:2.3-cu121", "--json").json()
    assert value["format"] == "imagefactory.compat-scan/1"
    assert (value["framework"], value["framework_version"], value["cuda"]) == ("torch", "2.3.1", "12.1")
    assert value["versions"] == {"cuDNN": "8.9.2.26", "NCCL": "2.20.5"}
    assert value["digest"] == layout.tags()["pytorch:2.3-cu121"].digest
    first, second = value["libraries"]
    assert (first["path"], first["role"]) == (f"{SITE}/torch/lib/libtorch_cuda.so", "must load")
    assert first["modules"] == [{"count": 12, "codes": ["sm_50", "sm_60", "sm_70", "sm_80", "sm_90"]}]
    assert second["role"] == "reported only"
    answers = {one["capability"]: one for one in value["predictions"]}
    assert (answers["8.6"]["answer"], answers["12.0"]["answer"]) == ("yes", "no")
    assert {one["basis"] for one in value["predictions"]} == {"predicted"}
    assert {one["name"] for one in value["packages"]} == {"torch", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"}


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--gpu", "V100"), 0, "on V100 (7.0): yes (predicted): "),
        (("--gpu", "gtx 1080 ti"), 0, "GTX 1080 Ti (6.1): yes (predicted): "),
        (("--gpu", "RTX 5090"), 9, "RTX 5090 (12.0): no (predicted): libtorch_cuda.so "),
        (("--capability", "6.1", "--driver", "535"), 0, "on 6.1, driver 535: yes (predicted): "),
        (
            ("--capability", "sm_61", "--driver", "470.82.01"),
            9,
            "no (predicted): driver 470.82.01 ",
        ),
        (("--gpu", "GFX90a"), 9, "gfx90a: no (predicted): "),
        (("--capability", "gfx90a"), 9, "gfx90a: no (predicted): "),
        (
            ("--gpu", "AMD Instinct MI250X"),
            9,
            "MI250X (gfx90a): no (predicted): ",
        ),
    ],
)
def test_one_question_is_answered_in_one_line(
    call: Call, layout: Layout, options: tuple[str, ...], code: int, told: str
) -> None:
    said = call("pytorch-2.3-cu121", *options)
    assert said.code == code
    assert said.out.count("\n") == 1
    assert told in said.out
    value = call("pytorch-2.3-cu121", "--json", *options).json()
    assert value["format"] == "imagefactory.compat-scan-gpus/1"
    assert value["gpus"][0]["answer"] == ("yes" if code == 0 else "no")


def test_each_gpu_that_is_asked_about_is_answered(call: Call, layout: Layout) -> None:
    options = ("pytorch-2.3-cu121", "--gpu", "V100", "--gpu", "gfx90a", "--capability", "12.0")
    said = call(*options)
    assert said.code == 9
    assert [line.split(" (")[0] for line in said.out.splitlines()] == [
        "pytorch-2.3-cu121 on V100", "pytorch-2.3-cu121 on gfx90a: no", "pytorch-2.3-cu121 on 12.0: no",
    ]  # fmt: skip
    value = call(*options, "--json").json()
    assert value["format"] == "imagefactory.compat-scan-gpus/1"
    assert [answer["answer"] for answer in value["gpus"]] == ["yes", "no", "no"]
    assert call(*options[:3], "--capability", "7.0").code == 0


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("torch-2.9.1-cp311-cp311-manylinux_2_28_x86_64.whl", "amd64"),
        ("torch-2.9.1-cp311-cp311-manylinux_2_28_aarch64.whl", "arm64"),
        ("torch-2.9.1-py3-none-any.whl", ""),
        ("libx_x86_64.so", ""),
    ],
)
def test_a_wheels_name_says_its_processor(name: str, platform: str) -> None:
    assert wheel_platform(name) == platform


def test_an_image_for_one_processor_does_not_run_beside_another(call: Call, layout: Layout) -> None:
    """Whatever its code: GH200 has the capability of H100, and no processor for x86-64."""
    said = call("pytorch-2.3-cu121", "--gpu", "H100", "--gpu", "GH200")
    assert said.code == 9
    assert "on H100 (9.0): yes" in said.out
    assert "on GH200 (9.0): no (predicted): it is built for amd64" in said.out
    (value,) = call("pytorch-2.3-cu121", "--gpu", "GH200", "--json").json()["gpus"]  # type: ignore[misc]
    assert (value["answer"], value["driver"], value["warnings"]) == ("no", "", [])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--capability", "sm_90a"), "sm_90a"),
        (("--capability", "8.0", "--driver", "new"), "535.54.03"),
        (("--gpu", "RTX 5091"), "RTX 5090"),
        (("--gpu", "gfx90a", "--driver", "535"), "AMD"),
        (("--gpu", "gfxfoo"), "an AMD processor"),
        (("--gpu", "gfx11-generic"), "an AMD processor"),
        (("--gpu", "MI300X", "--driver", "535"), "AMD"),
    ],
)
def test_questions_that_make_no_sense_are_exit_code_2(
    call: Call, layout: Layout, options: tuple[str, ...], told: str
) -> None:
    said = call("pytorch-2.3-cu121", *options)
    assert said.code == errors.EXIT_USAGE
    assert told in said.err


def test_a_build_for_the_cpu_is_said_with_what_to_install(call: Call, tmp_path: Path) -> None:
    version = VERSION.replace(b"'12.1'", b"None").replace(b"+cu121", b"+cpu")
    path = make_wheel(tmp_path, "torch", {"torch/version.py": version}, version="2.3.1+cpu")
    said = call(str(path))
    assert "CPU only" in said.out
    assert "torch==2.3.1" in said.out
    answer = call(str(path), "--gpu", "V100")
    assert answer.code == errors.EXIT_CHECK
    assert "computes only on the CPU" in answer.out


def test_partial_libraries_are_counted(call: Call, tmp_path: Path) -> None:
    mixed = library(*[("sm_70", "sm_80")] * 9, *[("sm_80", "sm_90")] * 3)
    path = make_wheel(tmp_path, "torch", {"torch/lib/libtorch_cuda.so": mixed}, version="2.3.1")
    said = call(str(path))
    header = next(line for line in said.out.splitlines() if line.startswith("LIBRARY")).split()
    row = next(line for line in said.out.splitlines() if line.startswith("libtorch_cuda.so")).split()
    cells = dict(zip(header[1:], row[3:], strict=True))
    assert (cells["7.0"], cells["8.0"], cells["9.0"]) == ("9/12", "N", "3/12")
    assert call(str(path), "--capability", "7.0").code == errors.EXIT_CHECK


def damaged_library() -> bytes:
    linked = bytearray(library(("sm_80",)))
    linked[16:20] = b"\1\0\x3e\0"  # an object for a linker, whose sections are told at its end
    linked[40:48] = len(linked).to_bytes(8, "little")
    return bytes(linked[:2000])


def test_a_cut_library_is_said_and_holds_nothing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "cut.o").write_bytes(damaged_library())
    said = call(str(tmp_path / "cut.o"))
    assert "damaged    cut.o: at 0x7d0: the file is truncated" in said.out
    assert said.out.endswith("\n\nno GPU code was found\n")
    answer = call(str(tmp_path / "cut.o"), "--gpu", "V100")
    assert answer.code == errors.EXIT_UNKNOWN
    assert "unknown (predicted): cut.o is damaged: at 0x7d0" in answer.out


def test_what_is_not_understood_is_told(call: Call, tmp_path: Path) -> None:
    code = library(("sm_80", "sm_90"), ("sm_80", "sm_90"))
    tile = code.rindex(b"\x01\x01\x40\0\0\0") - 2  # the kind of the last entry
    path = tmp_path / "tile.so"
    path.write_bytes(code[:tile] + b"\x80\0" + code[tile + 2 :])
    told = f"1 of CUDA Tile IR (type 128), the first at {tile:#x}"
    assert f"  not read   tile.so: {told}\n" in call(str(path)).out
    assert call(str(path), "--json").json()["libraries"][0]["unread"] == told


# --- which bytes -----------------------------------------------------------------------------------


def test_layers_that_are_known_are_not_read_again(call: Call, layout: Layout) -> None:
    first = call("pytorch:2.3-cu121").out
    for descriptor in list((layout.path / "blobs" / "sha256").iterdir()):
        if descriptor.read_bytes()[257:262] == b"ustar":
            descriptor.write_bytes(bytes(descriptor.stat().st_size))
    assert call("pytorch:2.3-cu121").out == first
    assert call(layout.tags()["pytorch:2.3-cu121"].digest).out.splitlines()[1:] == first.splitlines()[1:]


def test_a_path_comes_first_and_a_folder_needs_no_factory(call: Call, layout: Layout, tmp_path: Path) -> None:
    folder = tmp_path / "here" / "pytorch-2.3-cu121"
    folder.mkdir()
    (folder / "one.so").write_bytes(LINALG)
    said = call("pytorch-2.3-cu121", root=tmp_path)
    assert "scan of the folder" in said.out
    assert "N" in next(line for line in said.out.splitlines() if line.startswith("one.so"))
    assert "scan of the file" in call(str(folder / "one.so"), root=tmp_path).out


@pytest.mark.parametrize(
    ("name", "code", "error_code", "told"),
    [
        ("", errors.EXIT_USAGE, "argument-missing", ""),
        ("./nothing.so", errors.EXIT_USAGE, "path-not-found", "nothing.so"),
        ("torch-9-py3-none-any.whl", errors.EXIT_USAGE, "path-not-found", "torch-9-py3-none-any.whl"),
        ("pytorch:2.3", errors.EXIT_NOTHING_SELECTED, "image-not-found", "pytorch:2.3-cu121"),
        ("sha256:" + "0" * 64, errors.EXIT_NOTHING_SELECTED, "image-not-found", "image list"),
        ("pytorch-2.3-cu122", errors.EXIT_NOTHING_SELECTED, None, "pytorch-2.3-cu121"),
        ("pytorch-*", errors.EXIT_USAGE, None, "pytorch-*"),
        ("some/where", errors.EXIT_USAGE, None, "some/where"),
    ],
)
def test_names_that_lead_nowhere_are_told(
    call: Call, layout: Layout, name: str, code: int, error_code: str | None, told: str
) -> None:
    said = call(name)
    assert said.code == code
    assert error_code is None or said.error_codes == (error_code,)
    assert told in said.err


def test_an_empty_file_has_no_gpu_code(call: Call, tmp_path: Path) -> None:
    (tmp_path / "here" / "x").write_bytes(b"")
    said = call("x")
    assert said.code == 0
    assert "no GPU code was found" in said.out
    assert call("x", "--gpu", "V100").code == errors.EXIT_UNKNOWN


def test_an_image_of_a_registry_is_read_through_and_remembered(
    call: Call, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry_made_here(Ways()) as registry:
        monkeypatch.setenv("IMAGEFACTORY_PLAIN_HTTP", registry.host)
        _push(layout, registry.host, monkeypatch)
        shutil.rmtree(layout.path)
        name = f"{registry.host}/pytorch:2.3"
        said = call(name)
        assert said.code == 0, said.err
        assert f"scan of the image in {registry.host}" in said.out
        assert "torch 2.3.1" in said.out
        read = _blobs_read(registry)
        assert call(name).out == said.out
        assert _blobs_read(registry) == read + 1  # its config alone
        assert call(f"{registry.host}/pytorch:9").code == errors.EXIT_REGISTRY


def _push(layout: Layout, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from imagefactory.oci.graph import StoreRepository, read_graph
    from imagefactory.oci.layout import LayoutStore
    from imagefactory.oci.registry.client import RegistryClient
    from imagefactory.oci.registry.session import RegistryOptions
    from imagefactory.oci.transfer import TransferRequest, send

    place = StoreRepository(store=LayoutStore(layout), repository="pytorch")
    graph = read_graph(place, "2.3-cu121")
    store = RegistryClient(host, RegistryOptions(plain_hosts=(host,)))
    send(place, store, TransferRequest(graph=graph, repository="pytorch", tags=("2.3",)), QuietProgress())


def _blobs_read(registry: RegistryMadeHere) -> int:
    return registry.count["GET blob"]


def test_a_sif_is_told_by_the_image_it_was_made_from(call: Call, layout: Layout, tmp_path: Path) -> None:
    image = layout.image("pytorch:2.3-cu121")
    assert image is not None
    subject = layout.manifest(image.manifest)
    assert subject is not None
    (layout.tmp / "made.sif").write_bytes(sif())
    with layout.in_use(QuietProgress()):
        origin = SifOrigin(target="pytorch-2.3-cu121", compression="fast", subject=subject[0])
        store_sif(layout, layout.tmp / "made.sif", origin)
    copy = tmp_path / "here" / "any.sif"
    copy.write_bytes(sif())
    said = call("any.sif")
    assert said.code == 0, said.err
    assert "scan of pytorch:2.3-cu121, from which it was made" in said.out
    assert "torch 2.3.1" in said.out


# --- targets that are not built --------------------------------------------------------------------


def test_a_target_that_is_not_built_is_told_by_the_tables(call: Call) -> None:
    said = call("pytorch-2.3-cu121")
    assert said.code == 0, said.err
    assert "its lock, for it is not built" in said.out
    assert "1 from the tables of scanned wheels" in said.out
    assert "CUDA       12.1, cuBLAS 12.1.3.1, cuDNN 8.9.2.26, NCCL 2.20.5" in said.out
    assert call("pytorch-2.3-cu121", "--gpu", "V100").code == 0


def test_a_target_of_which_nothing_is_known_is_to_be_built(call: Call) -> None:
    said = call("pytorch-conda-2.3-cu121")
    assert (said.code, said.error_codes) == (errors.EXIT_BUILD, ("gpu-code-unknown",))
    assert "imagefactory build pytorch-conda-2.3-cu121" in said.err
    assert "imagefactory build pytorch-conda-2.3-cu121" in said.err
    assert "scan packages" not in said.err


def test_packages_of_the_cache_are_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_wheel(tmp_path, "torch", {"torch/lib/libtorch_cuda.so": TORCH}, version="2.3.1")
    first = inspect._scan_cached(path, 1)
    assert [one.path for one in first.libraries] == ["torch/lib/libtorch_cuda.so"]
    monkeypatch.setattr("imagefactory.actions.inspect.find_in", None)
    assert inspect._scan_cached(path, 1) == first
    monkeypatch.undo()
    kept = (tmp_path / "scan.json").read_bytes()
    # Another's words beside it are no scan of it, and one that is altered is none either.
    for altered in (b"{}", json.dumps(format_scan(LayerScan(findings=()))).encode(), kept[1:]):
        (tmp_path / "scan.json").write_bytes(altered)
        assert inspect._scan_cached(path, 1) == first
        assert (tmp_path / "scan.json").read_bytes() == kept


def test_little_known_decides_nothing() -> None:
    """A cache with numpy alone must not make a target one for the CPU."""
    torch = LockedWheel(name="torch", version="2.3.1", filename="t.whl", sha256="0" * 64, size=700_000_000)
    nothing = ScanResult(
        source="x", libraries=(), packages=(InstalledPackage(name="torch", version="2.3.1"),)
    )
    assert not inspect._answers(nothing, [torch])
    assert inspect._answers(nothing, [])


# --- drawing ---------------------------------------------------------------------------------------


def answer_of(contents: ScanResult, target: str) -> tuple[Compatibility, str]:
    predicted = predict_amd(contents, target)
    return predicted.answer, predicted.reason


def amd(path: str, *processors: str) -> GpuLibrary:
    codes = tuple(GpuCode(CodeKind.AMD, None, processor=one) for one in processors)
    return GpuLibrary(path=path, size=1, modules=(ModuleCount(codes=codes, count=3),))


def test_files_for_one_gpu_of_amd_lack_nothing() -> None:
    """rocBLAS has hundreds, each for one processor, and loads those that fit."""
    objects = (amd("rocblas/library/x_gfx90a.co", "gfx90a"), amd("rocblas/library/x_gfx942.hsaco", "gfx942"))
    contents = ScanResult(source="x", libraries=(amd("lib/a.so", "gfx90a", "gfx942"), *objects))
    assert answer_of(contents, "gfx90a") == (
        Compatibility.YES,
        f"all 2 libraries with code for AMD's GPUs have it for gfx90a{NO_RUNTIME}",
    )
    alone = ScanResult(source="x", libraries=objects)
    assert answer_of(alone, "gfx942") == (Compatibility.YES, "1 of its 2 code objects is for gfx942")
    assert answer_of(alone, "gfx1100") == (Compatibility.NO, "no code for gfx1100, only for gfx90a, gfx942")
    text = format_inspection(
        Inspection(name="x", how="scan", digest="", contents=contents, predictions=predict_all(contents))
    )
    assert text.endswith("2 code objects, a file for one GPU each: gfx90a, gfx942")
    assert "x_gfx90a.co" not in text


def test_amd_has_a_table_of_its_own() -> None:
    contents = ScanResult(
        source="x", libraries=(amd("lib/a.so", "gfx90a:xnack-", "gfx942"), amd("lib/b.so", "gfx942"))
    )
    text = format_inspection(
        Inspection(name="x", how="scan", digest="", contents=contents, predictions=predict_all(contents))
    )
    assert "ROCm       its own libraries are not in it" in text
    whole = replace(contents, toolkit=("libamdhip64.so.7",))
    told = Inspection(name="x", how="scan", digest="", contents=whole, predictions=())
    assert "ROCm" not in format_inspection(told)
    assert ["LIBRARY", "gfx90a", "gfx942"] in [line.split() for line in text.splitlines()]
    assert answer_of(contents, "gfx942")[0] is Compatibility.YES
    assert answer_of(contents, "gfx90a:xnack-")[0] is Compatibility.PARTLY
    assert answer_of(contents, "gfx1100")[0] is Compatibility.NO


def test_versions_come_from_packages_then_from_names() -> None:
    packages = (
        InstalledPackage(name="libcublas", version="12.4.5.8"),
        InstalledPackage(name="nvidia-cudnn-cu12", version="9.1.0.70"),
    )
    contents = ScanResult(
        source="x",
        libraries=(),
        packages=packages,
        toolkit=("libcudnn.so.9", "libnccl.so.2", "libnccl.so.2.21.5"),
    )
    assert library_versions(contents) == (("cuBLAS", "12.4.5.8"), ("cuDNN", "9.1.0.70"), ("NCCL", "2.21.5"))


def test_files_of_one_name_are_told_apart() -> None:
    one = ModuleCount(codes=(GpuCode(CodeKind.SASS, Capability(8, 0)),), count=1)
    contents = ScanResult(
        source="x",
        libraries=(
            GpuLibrary(path="a/lib/x.so", size=1, modules=(one,)),
            GpuLibrary(path="b/lib/x.so", size=1, modules=(one,), damage="at 0x40: cut"),
        ),
    )
    text = format_inspection(
        Inspection(name="x", how="scan", digest="", contents=contents, predictions=predict_all(contents))
    )
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("a/", "b/"))] == [
        "a/lib/x.so",
        "b/lib/x.so",
    ]
    assert "b/lib/x.so: at 0x40: cut" in text


# --- a package of the index ------------------------------------------------------------------------


class FakeLocker:
    """uv with a small index: files by name, and what it pins for any release."""

    def __init__(self, files: Sequence[str], pinned: Mapping[Path, str]) -> None:
        self.files, self.pinned, self.solved = files, dict(pinned), list[WheelRequest]()
        self.older: tuple[str, ...] = ()
        """Frameworks of which it has an older release that the package accepts."""
        self.torn = False
        """Whether the index stops answering after the first solution."""
        self.declared = ""
        """METADATA of the package."""
        self.more: dict[Path, str] = {}
        """What its extras pin."""
        self.uploaded = ""
        """When all its files were."""
        self.earlier: dict[Path, str] = {}
        """What it pins of releases until a day."""

    def empty_lock(self, name: str, python: str, platform: str) -> Lock:
        machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}[platform]
        return make_lock(wheels=(), target=name, python=python, platform=f"manylinux_2_39_{machine}")

    def project(self, name: str, _: Lock) -> tuple[IndexFile, ...]:
        files = [file for file in self.files if file.startswith(name)]
        return tuple(IndexFile(filename=file, url="", sha256="", uploaded=self.uploaded) for file in files)

    def reach(self) -> None:
        if not self.files:
            raise UnreachableError("index-unreachable", "it does not answer", hint="check the network")

    def solve(self, request: WheelRequest) -> None:
        (constraint,) = request.constraints
        if self.torn:
            raise UnreachableError("index-unreachable", "it does not answer", hint="check the network")
        if constraint.partition("<")[0] not in self.older:
            raise LockError("unsolvable", "no older release", hint="none")

    def located(self, request: WheelRequest) -> dict[LockedWheel, str]:
        self.solved.append(request)
        if request.lock.cutoff:
            if not self.earlier:
                raise LockError("unsolvable", "nothing that old", hint="none")
            return {locked(path): url for path, url in self.earlier.items()}
        more = self.more if "[" in request.requirements[0] else {}
        return {locked(path): url for path, url in {**self.pinned, **more}.items()}

    def metadata(self, pin: str, lock: Lock) -> str:
        assert pin == self.solved[-1].requirements[0]
        assert lock == self.solved[-1].lock
        return self.declared


Index = Callable[..., FakeLocker]


@pytest.fixture
def look_up(call: Call) -> Call:
    assert isinstance(call, partial)
    return partial(call.func, "compat")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    def make(*files: str, torch_version: str = "0.3", **libraries: bytes) -> FakeLocker:
        """Pin a wheel for each of `libraries`, the first one of the requested package."""
        monkeypatch.setattr(inspect, "_SMALL", 0)
        monkeypatch.setattr(inspect, "LARGE", 0)
        paths = {name: f"{name}/_C.so" for name in libraries} | {"torch": "torch/lib/libtorch_cuda.so"}
        names = {name: {paths[name]: data} if data else {} for name, data in libraries.items()}
        versions = {"torch": torch_version}
        wheels = [
            make_wheel(tmp_path, name, files, version=versions.get(name, "1.0"))
            for name, files in names.items()
        ]
        locker = FakeLocker(files, {path: path.as_uri() for path in wheels})
        monkeypatch.setattr(inspect, "uv_locker", lambda _: locker)
        return locker

    return make


NEW, OLD = library(("sm_80", "sm_120")), library(("sm_80",))
DEMO = "demo-1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
BLACKWELL = ("demo==1.0", "--gpu", "RTX 5070 Ti")


@pytest.mark.parametrize(
    ("libraries", "answer", "code"),
    [
        ({"demo": NEW}, "yes", 0),
        ({"demo": NEW, "other": NEW}, "yes", 0),
        ({"demo": OLD, "other": NEW}, "no", errors.EXIT_CHECK),
        ({"demo": NEW, "other": OLD}, "partly", errors.EXIT_CHECK),
        ({"demo": NEW, "other": damaged_library()}, "yes", 0),
        ({"demo": damaged_library(), "other": NEW}, "unknown", errors.EXIT_UNKNOWN),
        ({"demo": b"", "other": OLD}, "no", errors.EXIT_CHECK),
        ({"demo": b"", "other": b""}, "on the CPU", 0),
        ({"demo": b"", "triton": b""}, "unknown", errors.EXIT_UNKNOWN),
    ],
)
def test_the_worst_package_of_a_solution_decides(
    look_up: Call, index: Index, libraries: dict[str, bytes], answer: str, code: int
) -> None:
    locker = index(DEMO, **libraries)
    said = look_up(*BLACKWELL, "--json")
    (row,) = json_of(said, "compat-scan-gpus")["gpus"]
    assert (said.code, row["answer"]) == (code, answer)
    assert len(row["packages"]) == sum(map(bool, libraries.values()))
    assert look_up(*BLACKWELL).code == code
    assert [request.requirements for request in locker.solved] == [("demo==1.0",)]  # then from the cache


@pytest.mark.parametrize(
    ("own", "older", "answer", "code"),
    [
        (NEW, (), "no", errors.EXIT_CHECK),
        (NEW, ("torch",), "yes", 0),
        (OLD, ("torch",), "no", errors.EXIT_CHECK),
        (b"", (), "no", errors.EXIT_CHECK),
        (b"", ("torch",), "unknown", errors.EXIT_UNKNOWN),
    ],
)
def test_a_framework_decides_only_if_it_cannot_be_older(
    look_up: Call, index: Index, own: bytes, older: tuple[str, ...], answer: str, code: int
) -> None:
    index(DEMO, demo=own, torch=OLD).older = older
    said = look_up(*BLACKWELL, "--json")
    (row,) = json_of(said, "compat-scan-gpus")["gpus"]
    assert (said.code, row["answer"]) == (code, answer)
    reasons = [row["reason"], *row["warnings"]]
    assert len([text for text in reasons if "older releases of torch" in text]) == len(older)
    torch = {part["package"]: part["answer"] for part in row["packages"]}["torch 0.3"]
    assert torch == ("no" if own or not older else "unknown")  # listed, although it does not decide


def test_an_index_that_stops_answering_pins_nothing(look_up: Call, index: Index) -> None:
    locker = index(DEMO, demo=NEW, torch=OLD)
    locker.torn, locker.older = True, ("torch",)
    assert look_up(*BLACKWELL).error_codes == ("release-unknown",)
    locker.torn = False
    assert look_up(*BLACKWELL).code == 0  # nothing wrong was stored


@pytest.mark.parametrize("own", [NEW, b""])
def test_a_build_of_torch_for_another_cuda_counts(look_up: Call, index: Index, own: bytes) -> None:
    """torch 2.7.1 of the index has no code for 12.0, but that for CUDA 12.8 has."""
    index(DEMO, torch_version="2.7.1", demo=own, torch=OLD)
    (row,) = json_of(look_up(*BLACKWELL, "--json"), "compat-scan-gpus")["gpus"]
    assert row["answer"] == "yes"
    assert len([text for text in (row["reason"], *row["warnings"]) if "torch==2.7.1+cu128" in text]) == 1
    (row,) = json_of(look_up("demo==1.0", "--capability", "3.5", "--json"), "compat-scan-gpus")["gpus"]
    assert row["answer"] == "no"


def test_all_gpus_are_listed_without_a_question_about_one(look_up: Call, index: Index) -> None:
    index(DEMO, demo=NEW, other=OLD)
    value = json_of(look_up("demo==1.0", "--json"), "compat-scan")
    answers = {row["capability"]: row["answer"] for row in value["predictions"]}
    assert (answers["8.0"], answers["12.0"], answers["9.0"]) == ("yes", "partly", "no")
    index(DEMO, demo=b"")
    assert json_of(look_up("demo==1", "--json"), "compat-scan")["cpu_only"]


@pytest.mark.parametrize(
    ("declared", "extra"),
    [
        (('docs"', "cpu", "gpu"), "gpu"),
        (("srt", "all"), "srt"),
        (("cpu", "dev"), ""),
        ((), ""),
    ],
)
def test_the_extra_with_a_framework_is_added_if_nothing_else_has_gpu_code(
    look_up: Call, index: Index, declared: tuple[str, ...], extra: str
) -> None:
    locker = index(DEMO, demo=b"", torch=OLD)
    torch = next(path for path in locker.pinned if path.name.startswith("torch"))
    locker.more = {torch: locker.pinned.pop(torch)}
    needs = [f"Requires-Dist: torch ; extra == '{name}'" for name in declared]
    locker.declared = "\n".join(["Metadata-Version: 2.1", "Name: demo", "Version: 1.0", *needs, "", ""])
    said = look_up("demo==1.0", "--gpu", "RTX 3090", "--json")
    value = json_of(said, "compat-scan-gpus")
    assert (said.code, value["gpus"][0]["answer"]) == (0, "yes" if extra else "on the CPU")
    asked = [f"demo[{extra}]==1.0"] if extra else []
    assert [request.requirements[0] for request in locker.solved] == ["demo==1.0", *asked]


@pytest.mark.parametrize(
    ("version", "cuda", "code"),
    [("12.8.90", "12.8", ()), ("12.8.90", "12", ()), ("12.8.90", "12.6", ("cuda-not-on-index",))],
)
def test_a_build_for_another_cuda_is_not_answered(
    look_up: Call, index: Index, tmp_path: Path, version: str, cuda: str, code: tuple[str, ...]
) -> None:
    locker = index(DEMO, demo=NEW)
    runtime = make_wheel(tmp_path, "nvidia_cuda_runtime_cu12", {}, version=version)
    locker.pinned[runtime] = runtime.as_uri()
    said = look_up(*BLACKWELL, "--cuda", cuda)
    assert (said.error_codes, said.code) == (code, errors.EXIT_UNKNOWN if code else 0)


@pytest.mark.parametrize(("gpu", "answer"), [("Jetson Orin NX", "unknown"), ("V100", "no")])
def test_a_build_for_cpus_is_no_answer_where_other_indexes_have_builds(
    look_up: Call, index: Index, gpu: str, answer: str
) -> None:
    files = [f"torch-0.3-cp312-cp312-manylinux_2_28_{machine}.whl" for machine in ("x86_64", "aarch64")]
    index(*files, torch_version="0.3", torch=b"")
    value = json_of(look_up("torch==0.3", "--gpu", gpu, "--json"), "compat-scan-gpus")
    assert value["gpus"][0]["answer"] == answer
    said = look_up("torch==0.3", "--gpu", gpu, "--cuda", "9.0")
    assert said.error_codes == ("cuda-not-on-index",)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (("--gpu", "RTX 5070 Ti"), "demo 2.0, its newest release"),
        (("--gpu", "K80"), "an older release of demo, whose first is 0.9"),
        (("--gpu", "A100", "--driver", "470"), "driver 525 or newer"),
        (("--gpu", "A100"), ""),
    ],
)
def test_a_no_of_a_lookup_names_what_may_work(
    look_up: Call, index: Index, tmp_path: Path, options: tuple[str, ...], fix: str
) -> None:
    newer, oldest = DEMO.replace("1.0", "2.0"), DEMO.replace("1.0", "0.9")
    locker = index(DEMO, newer, oldest, demo=OLD)
    runtime = make_wheel(tmp_path, "nvidia_cuda_runtime_cu12", {}, version="12.8.90")
    locker.pinned[runtime] = runtime.as_uri()
    said = look_up("demo==1.0", *options, "--json")
    assert json_of(said, "compat-scan-gpus")["gpus"][0]["fix"] == fix


def test_a_package_with_a_compiler_that_no_table_knows_is_unknown() -> None:
    libraries = (
        GpuLibrary(
            path="torch/lib/libtorch_cuda.so",
            size=1,
            modules=(ModuleCount(codes=(parse_code("sm_80"),), count=1),),
        ),
    )
    torch = ScanResult(
        source="torch 0.3", libraries=libraries, packages=(InstalledPackage(name="torch", version="0.3"),)
    )
    contents = replace(torch, packages=(*torch.packages, InstalledPackage(name="demo", version="1.0")))
    inspected = InspectResult(contents=contents, how="", package="demo 1.0", parts=(torch,))
    assert predict_inspected(inspected, Capability(8, 0))[0].answer is Compatibility.YES
    compiling = replace(inspected, own_compilers=("libtvm.so",))
    answers = [predict_inspected(compiling, Capability(*pair))[0].answer for pair in ((8, 0), (7, 0))]
    assert answers == [Compatibility.UNKNOWN, Compatibility.NO]


@pytest.mark.parametrize(
    ("file", "uploaded", "dates", "answer"),
    [
        (DEMO, "2024-01-02T03:04:05.678901Z", ["2024-03-02"], "no"),
        (DEMO.replace("cp38-abi3-manylinux_2_28_x86_64", "py3-none-any"), "2024-01-02T03:04:05Z", [], "yes"),
        (DEMO, "", [], "yes"),  # the index has no times
        (DEMO, "2999-01-02T03:04:05Z", [], "yes"),
    ],
)
def test_a_compiled_package_is_judged_with_the_framework_of_its_time(
    look_up: Call, index: Index, file: str, uploaded: str, dates: list[str], answer: str
) -> None:
    locker = index(file, demo=NEW, torch=OLD)
    locker.older, locker.uploaded = ("torch",), uploaded
    locker.earlier = dict(locker.pinned)
    value = json_of(look_up(*BLACKWELL, "--json"), "compat-scan-gpus")
    assert value["gpus"][0]["answer"] == answer
    cutoffs = [request.lock.cutoff for request in locker.solved]
    assert [f"{cutoff.time:%Y-%m-%d}" for cutoff in cutoffs if cutoff] == dates
    assert all(day in value["source"] for day in dates)


def test_without_a_solution_of_its_time_any_release_counts(look_up: Call, index: Index) -> None:
    locker = index(DEMO, demo=NEW, torch=OLD)
    locker.older, locker.uploaded = ("torch",), "2024-01-02T03:04:05Z"
    assert json_of(look_up(*BLACKWELL, "--json"), "compat-scan-gpus")["gpus"][0]["answer"] == "yes"


@pytest.mark.parametrize(("replaceable", "answer"), [((), "partly"), (("torch",), "yes")])
def test_a_framework_that_runs_in_part_decides_only_if_it_cannot_be_older(
    replaceable: tuple[str, ...], answer: str
) -> None:
    codes = {"torch/lib/libtorch_cuda.so": "sm_80", "torch/lib/libtorch_cuda_linalg.so": "sm_90"}
    libraries = tuple(
        GpuLibrary(path=path, size=1, modules=(ModuleCount(codes=(parse_code(code),), count=1),))
        for path, code in codes.items()
    )
    package = InstalledPackage(name="torch", version="0.3")
    torch = ScanResult(source="torch 0.3", libraries=libraries, packages=(package,))
    inspected = InspectResult(
        contents=torch, how="", package="demo 1.0", parts=(torch,), replaceable=replaceable
    )
    assert predict_inspected(inspected, Capability(8, 0))[0].answer == answer


def test_a_withdrawn_dependency_is_left_out_and_named(
    look_up: Call, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    locker = index(DEMO, demo=NEW)
    solve = locker.located
    trees = {
        (): "Because there is no version of gone==1 and demo==1.0 depends on gone==1, ...",
        ("gone",): "Because built{sys_platform == 'linux'}==2.0 has no usable wheels and ...",
    }

    def located(request: WheelRequest) -> dict[LockedWheel, str]:
        if tree := trees.get(request.exclude):
            raise UnsolvableError("unsolvable", "no solution", tree=tree)
        return solve(request)

    monkeypatch.setattr(locker, "located", located)
    value = json_of(look_up(*BLACKWELL, "--json"), "compat-scan-gpus")
    assert "built, gone" in value["source"]


def test_a_failed_lookup_is_not_repeated(look_up: Call, index: Index) -> None:
    index("demo-1.0.tar.gz", demo=NEW)
    assert look_up(*BLACKWELL).error_codes == ("package-no-wheel",)
    index(DEMO, demo=NEW)
    assert look_up(*BLACKWELL).error_codes == ("package-no-wheel",)  # for an hour


def test_a_package_on_a_framework_is_looked_up_although_a_table_knows_it(look_up: Call, index: Index) -> None:
    """The table of vLLM does not know its torch, which has no code for the GPU."""
    vllm = ("vllm==0.10.0", "--gpu", "H100", "--json")
    assert json_of(look_up(*vllm, "--offline"), "compat")["rows"]
    locker = index("vllm-0.10.0-cp38-abi3-manylinux_2_28_x86_64.whl", vllm=library(("sm_90",)), torch=OLD)
    assert json_of(look_up(*vllm), "compat-scan-gpus")["gpus"][0]["answer"] == "no"
    assert len(locker.solved) == 1
    index("vllm-0.9.0.tar.gz", vllm=NEW)
    said = look_up("vllm==0.9.1", *vllm[1:])  # not on the index: the table answers
    assert json_of(said, "compat")["rows"]


def test_offline_nothing_is_looked_up(look_up: Call, index: Index) -> None:
    locker = index(DEMO, demo=NEW)
    said = look_up(*BLACKWELL, "--offline")
    assert (said.code, said.error_codes, locker.solved) == (errors.EXIT_UNKNOWN, ("lookup-offline",), [])
    assert look_up(*BLACKWELL).code == 0
    assert look_up(*BLACKWELL, "--offline").code == 0


@pytest.mark.parametrize(
    ("files", "name", "code"),
    [
        ((), "demo==1.0", "release-unknown"),  # the index does not answer
        (("other-1.0.tar.gz",), "demo==1.0", "package-not-found"),
        ((DEMO,), "demo==2.0", "release-not-found"),
        (("demo-1.0.tar.gz",), "demo==1.0", "package-no-wheel"),
        (("demo-1.0-cp312-cp312-win_amd64.whl",), "demo==1.0", "package-no-wheel"),
        (("demo-1.0-cp312-cp312-manylinux_2_28_aarch64.whl",), "demo==1.0", "package-no-wheel"),
    ],
)
def test_what_cannot_be_looked_up_says_why(
    look_up: Call, index: Index, files: tuple[str, ...], name: str, code: str
) -> None:
    locker = index(*files, demo=NEW)
    said = look_up(name, "--gpu", "V100")
    unknown = code not in ("package-not-found", "release-not-found")
    assert said.error_codes == (code,)
    assert said.code == (errors.EXIT_UNKNOWN if unknown else errors.EXIT_NOTHING_SELECTED)
    assert locker.solved == []


def test_the_newest_python_with_a_wheel_is_solved_for(look_up: Call, index: Index) -> None:
    files = [f"demo-1.0-cp3{minor}-cp3{minor}-manylinux_2_28_aarch64.whl" for minor in (10, 12, 11)]
    locker = index(*files, demo=NEW)
    assert look_up("demo==1", "--gpu", "GH200").code == errors.EXIT_CHECK  # no code for 9.0
    (request,) = locker.solved
    assert (request.lock.python, request.lock.platform) == ("3.12", "manylinux_2_39_aarch64")


def test_a_package_without_a_wheel_is_left_out_of_the_answer_and_named(
    look_up: Call, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    locker = index(DEMO, demo=NEW)
    solve = locker.located

    def located(request: WheelRequest) -> dict[LockedWheel, str]:
        if not request.exclude:
            raise NoWheelError("no-usable-wheel", "no wheel", hint="", names=("sourced",), account="")
        return solve(request)

    monkeypatch.setattr(locker, "located", located)
    value = json_of(look_up(*BLACKWELL, "--json"), "compat-scan-gpus")
    assert "sourced" in value["source"]
    assert [request.exclude for request in locker.solved] == [("sourced",)]


def test_what_a_package_pins_may_make_its_gpu_code_at_run_time() -> None:
    pins = {"demo": "1.0", "numba-cuda": "0.20.0", "nvidia-cuda-nvcc-cu12": "12.9.86"}
    packages = tuple(InstalledPackage(name=name, version=version) for name, version in pins.items())
    contents = ScanResult(source="demo==1.0", libraries=(), packages=packages)
    inspected = InspectResult(contents=contents, how="", package="demo 1.0", compilers=("numba-cuda",))
    answers = [predict_inspected(inspected, Capability(*pair))[0].answer for pair in ((8, 0), (3, 5))]
    assert answers == [Compatibility.YES, Compatibility.NO]


def answers(**codes: tuple[str, ...]) -> dict[str, Compatibility]:
    """Predict for a package with a library for each name, as only its own scan has it."""
    libraries = tuple(
        GpuLibrary(
            path=path.replace("__", "/"),
            size=1,
            modules=(ModuleCount(codes=tuple(map(parse_code, some)), count=len(path)),),
        )
        for path, some in codes.items()
    )
    contents = ScanResult(source="", libraries=libraries)
    return {str(row.capability): row.answer for row in predict_all(contents)}


def test_libraries_for_single_gpus_do_not_decide_about_others() -> None:
    plain = ("sm_80", "sm_90", "sm_120")
    every = answers(sgl_kernel__flash_ops__so=("sm_90a",), demo=plain)
    assert every["12.0"] is Compatibility.YES
    kernel = answers(**{"sgl_kernel__flash_ops.abi3.so": ("sm_90a",), "demo": plain})
    assert (kernel["12.0"], kernel["7.0"]) == (Compatibility.YES, Compatibility.NO)
    optional = answers(**{"torchao___C_cutlass_90a.so": ("sm_90a",), "torchao___C.so": ("sm_80",)})
    assert (optional["8.0"], optional["9.0"]) == (Compatibility.YES, Compatibility.PARTLY)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_wheel_is_scanned_from_a_server_and_only_its_scan_is_stored(
    look_up: Call, index: Index, tmp_path: Path, ranges: bool
) -> None:
    locker = index(DEMO, demo=NEW)
    (path,) = locker.pinned
    data = path.read_bytes()

    def answer(request: Request) -> Answer:
        if not ranges or "Range" not in request.headers:
            return 200, {}, data
        first, last = (int(text) for text in request.headers["Range"].removeprefix("bytes=").split("-"))
        return 206, {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1]

    with service(answer) as server:
        locker.pinned = {path: f"http://{server.address}/{path.name}"}
        assert look_up(*BLACKWELL).code == 0
    assert look_up(*BLACKWELL).code == 0  # without the server
    assert list((tmp_path / "cache").rglob("*.whl")) == []


def test_a_failing_server_gives_no_answer(look_up: Call, index: Index) -> None:
    locker = index(DEMO, demo=NEW)
    (path,) = locker.pinned
    with service(lambda _: (404, {}, b"")) as server:
        locker.pinned = {path: f"http://{server.address}/{path.name}"}
        assert look_up(*BLACKWELL).error_codes == ("download-failed",)


# --- NVIDIA's libcuda for older drivers

COMPAT = "usr/local/cuda-12.9/compat/libcuda.so.575.57.08"


@pytest.mark.parametrize(
    ("environment", "options", "code"),
    [
        ({}, ("--gpu", "A100", "--driver", "470.82.01"), 9),  # of no branch that it serves
        ({}, ("--gpu", "A100", "--driver", "450.80.02"), 0),
        ({}, ("--gpu", "A40", "--driver", "450.80.02"), 9),  # older than the GPU
        ({}, ("--gpu", "RTX 2080 Ti", "--driver", "450.80.02"), 9),
        ({"LD_LIBRARY_PATH": "/usr/local/cuda/compat"}, ("--gpu", "A100", "--driver", "580.65.06"), 9),
        ({"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}, ("--gpu", "A100", "--driver", "580.65.06"), 0),
        ({"LD_LIBRARY_PATH": "/usr/local/cuda/compat"}, ("--gpu", "A100", "--driver", "450.80.02"), 0),
    ],
)
def test_an_image_with_a_libcuda_for_older_drivers(
    call: Call, tmp_path: Path, environment: dict[str, str], options: tuple[str, ...], code: int
) -> None:
    layout = Layout(tmp_path / "store")
    with layout.in_use(QuietProgress()):
        layers = [*LAYERS, tar((COMPAT, forward_libcuda("12.9", (450, 575))))]
        add_image(layout, "pytorch:2.3-cu121", layers, environment=environment)
    assert call("pytorch:2.3-cu121", *options).code == code
    assert "\n  forward " in call("pytorch:2.3-cu121").out


def test_a_folder_with_a_libcuda_for_older_drivers(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "root" / COMPAT
    path.parent.mkdir(parents=True)
    path.write_bytes(forward_libcuda("12.9", (450, 575)))
    facts = call(str(tmp_path / "root"), "--json").json()["facts"]
    assert [row["value"] for row in facts] == ["CUDA 12.9 for drivers 450,575"]
