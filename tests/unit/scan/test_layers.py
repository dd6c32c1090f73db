"""What a scan of a place tells: wheels, folders, layers, images, .sif files; hostile ones too."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.gpu.values import InstalledPackage, ScanResult
from imagefactory.http import HttpSession, RetryPolicy
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.oci import inflate as inflate_module
from imagefactory.oci import tar_stream
from imagefactory.oci.inflate import GZIP, CorruptDataError, inflate
from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import collect
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.sif import is_sif, read_partition
from imagefactory.progress import QuietProgress
from imagefactory.scan import files, layers, zip
from imagefactory.scan import layers as records
from imagefactory.scan.files import (
    NoRangesError,
    open_remote_wheel,
    scan_directory,
    scan_path,
    scan_run,
    scan_wheel,
)
from imagefactory.scan.findings import format_contents, parse_facts, read_name
from imagefactory.scan.layers import (
    LayerScan,
    ScanCache,
    format_scan,
    layout_scan_cache,
    merge_layers,
    parse_scan,
    scan_image,
    scan_layer,
    unpacked_sif,
)
from tests.made.errors import fails
from tests.made.gpu_code import library
from tests.made.layout import add_image
from tests.made.scanned import VERSION, Entry, sif, tar
from tests.made.service import Answer, Request, service
from tests.made.wheels import add_nested, add_packed, make_wheel

TORCH = library(("sm_70", "sm_80", "compute_90/8.0"), ("sm_70", "sm_80", "compute_90/8.0"), ("sm_80",))


def modules(contents: ScanResult) -> dict[str, list[str]]:
    """`{path: ["2 sm_70 sm_80", ...]}` of the libraries."""
    return {
        one.path: [" ".join((str(each.count), *map(str, each.codes))) for each in one.modules]
        for one in contents.libraries
    }


TORCH_MODULES = ["2 compute_90/8.0 sm_70 sm_80", "1 sm_80"]


# --- names and small files -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("torch-2.3.1+cu121.dist-info/METADATA", InstalledPackage(name="torch", version="2.3.1+cu121")),
        (
            "a/site-packages/Jax_Cuda12.Plugin-0.4.dist-info/METADATA",
            InstalledPackage(name="jax-cuda12-plugin", version="0.4"),
        ),
        (
            "usr/lib/python3/dist-packages/six-1.16.0.dist-info/METADATA",
            InstalledPackage(name="six", version="1.16.0"),
        ),
        (
            "opt/env/conda-meta/pytorch-2.3.1-py3.11_cuda12.1_0.json",
            InstalledPackage(name="pytorch", version="2.3.1", build="py3.11_cuda12.1_0"),
        ),
        (
            "conda-meta/ca-certificates-2024.2.2-h_0.json",
            InstalledPackage(name="ca-certificates", version="2024.2.2", build="h_0"),
        ),
        ("a/site-packages/setuptools/_vendor/wheel-0.43.dist-info/METADATA", None),
        ("a/site-packages/six-1.16.0.dist-info/RECORD", None),
        ("a/site-packages/six/METADATA", None),
        ("METADATA", None),
        ("a/other/x-1-2.json", None),
    ],
)
def test_packages_are_read_off_the_names_of_their_records(
    path: str, package: InstalledPackage | None
) -> None:
    named = read_name(path)
    assert (named and named.package) == package


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("usr/lib/libcudart.so.12.1.105", True),
        ("torch/lib/libcudart-e409450e.so.11.0", True),
        ("lib/libcudnn_ops_infer.so.8", True),
        ("lib/libMIOpen.so.1", True),
        ("lib/libcudart.so", False),
        ("usr/local/cuda-12.4/compat/libcuda.so.550.54.14", True),
        ("usr/local/cuda/lib64/stubs/libcuda.so.1", False),
        ("lib/libcudartless.so.1", False),
    ],
)
def test_versions_of_cuda_are_read_off_file_names(name: str, told: bool) -> None:
    named = read_name(name)
    assert (named.toolkit if named else "") == (name.rpartition("/")[2] if told else "")


def test_frameworks_say_what_they_were_built_for() -> None:
    assert parse_facts("x/torch/version.py", VERSION.decode()) == (
        ("torch", "cuda", "12.1"),
        ("torch", "hip", ""),
        ("torch", "version", "2.3.1+cu121"),
    )
    tensorflow = (
        "build_info = collections.OrderedDict([('cpu_compiler', '/usr/bin/clang'), "
        "('cuda_compute_capabilities', ['sm_60', 'sm_70', 'compute_90']), ('cuda_version', '12.3'), "
        "('cudnn_version', '8'), ('is_cuda_build', True), ('is_rocm_build', False)])\n"
    )
    assert dict(fact[1:] for fact in parse_facts("tensorflow/python/platform/build_info.py", tensorflow)) == {
        "cuda_compute_capabilities": "sm_60,sm_70,compute_90",
        "cuda_version": "12.3",
        "cudnn_version": "8",
        "is_cuda_build": "True",
        "is_rocm_build": "False",
    }
    onnx = "package_name = 'onnxruntime-gpu'\n__version__ = '1.18.0'\ncuda_version = '12.2'\n"
    assert parse_facts("onnxruntime/capi/build_and_package_info.py", onnx) == (
        ("onnxruntime", "cuda_version", "12.2"),
        ("onnxruntime", "package_name", "onnxruntime-gpu"),
        ("onnxruntime", "version", "1.18.0"),
    )
    assert parse_facts("torch/version.py", "cuda = __import__('os').system('true')") == ()


def test_facts_of_a_hostile_file_take_no_time() -> None:
    assert parse_facts("torch/version.py", "cuda = '" + "[" * 250_000) == ()
    assert parse_facts("torch/version.py", "('" * 80_000) == ()
    assert parse_facts("torch/version.py", ("a" * 40 + ":") * 6_000) == ()


# --- wheels ----------------------------------------------------------------------------------------


def torch_wheel(folder: Path) -> Path:
    files = {
        "torch/lib/libtorch_cuda.so": TORCH,
        "torch/lib/libtorch_cpu.so": b"\x7fELF" + bytes(5000),
        "torch/version.py": VERSION,
        "torch/lib/libcudart-e409450e.so.11.0": b"\x7fELF" + bytes(100),
        "torch-2.3.1.data/purelib/torch/extra.so": library(("sm_90a",)),
        "torch/notes.txt": TORCH,
        "torch/data": TORCH[64:],  # begins like nothing that holds GPU code
    }
    return make_wheel(folder, "torch", files, version="2.3.1")


@pytest.mark.parametrize("workers", [1, 3])
def test_a_wheel_tells_its_libraries_packages_and_facts(tmp_path: Path, workers: int) -> None:
    found = scan_wheel(torch_wheel(tmp_path), QuietProgress(), workers=workers)
    assert found.source == "torch-2.3.1-py3-none-any.whl"
    assert modules(found) == {
        "torch/extra.so": ["1 sm_90a"],
        "torch/lib/libtorch_cuda.so": TORCH_MODULES,
    }
    assert found.libraries[1].size == len(TORCH)
    assert found.packages == (InstalledPackage(name="torch", version="2.3.1"),)
    assert ("torch", "cuda", "12.1") in found.facts
    assert found.toolkit == ("libcudart-e409450e.so.11.0",)


def test_a_wheel_tells_the_same_without_isal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zlib

    path = torch_wheel(tmp_path)
    before = scan_wheel(path, QuietProgress())
    monkeypatch.setattr(inflate_module, "inflater", lambda: (zlib.decompressobj, (zlib.error,)))
    assert scan_wheel(path, QuietProgress()) == before


def test_no_zip_is_no_wheel(tmp_path: Path) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    path.write_bytes(b"no")
    with fails("scan-archive-invalid", r"wheel: .*zip"):
        scan_wheel(path, QuietProgress())
    with fails("cannot-read-file", r"y\.whl"):
        scan_wheel(tmp_path / "y.whl", QuietProgress())


def test_a_cut_or_changed_wheel_is_said(tmp_path: Path) -> None:
    path = torch_wheel(tmp_path)
    data = path.read_bytes()
    at = data.index(b"torch/lib/libtorch_cuda.so") + 40
    path.write_bytes(data[:at] + bytes(40) + data[at + 40 :])
    with fails("scan-archive-invalid", r"libtorch_cuda\.so: "):
        scan_wheel(path, QuietProgress())
    path.write_bytes(data[: len(data) // 2])
    with fails("scan-archive-invalid", "zip"):
        scan_wheel(path, QuietProgress())


def test_a_member_that_holds_more_than_it_says_is_refused(tmp_path: Path) -> None:
    path = torch_wheel(tmp_path)
    data = bytearray(path.read_bytes())
    real, lie = struct.pack("<I", len(TORCH)), struct.pack("<I", 1000)
    name = b"torch/lib/libtorch_cuda.so"
    for at in (data.index(name) - 8, data.rindex(name) - 22):  # its own header, the row in the list
        assert data[at : at + 4] == real
        data[at : at + 4] = lie
    path.write_bytes(data)
    with fails("scan-archive-invalid", "1000 bytes"):
        scan_wheel(path, QuietProgress())


def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """A bomb of overlapping members unpacks to terabytes though each member is small."""
    path = torch_wheel(tmp_path)
    add_nested(path)
    with fails("scan-archive-invalid", "overlaps"):
        scan_wheel(path, QuietProgress())


def test_a_bomb_and_an_endless_list_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = torch_wheel(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(zip, "PLAIN", 1000)
        with fails("scan-archive-invalid", "1000 bytes"):
            scan_wheel(path, QuietProgress())
    monkeypatch.setattr(zip, "MEMBERS", 3)
    with fails("scan-archive-invalid", r"\d+ members"):
        scan_wheel(path, QuietProgress())


@pytest.mark.parametrize("hidden", ["by the row's own bytes", "by a second record"])
def test_an_endless_list_is_not_hidden(hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted must be what zipfile reads."""
    path = torch_wheel(tmp_path)
    data = path.read_bytes()
    end = bytearray(data[-22:])
    if hidden == "by the row's own bytes":
        end[16:20] = b"PK\x05\x06"
        data = data[:-22] + end
    else:
        count, length, start = struct.unpack_from("<HII", end, 10)
        record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start)
        few = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 46, start)
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(data) - 22, 1)
        end[8:16] = b"\xff" * 8
        data = data[:-22] + few + record + locator + end
    path.write_bytes(data)
    monkeypatch.setattr(zip, "MEMBERS", 3)
    with fails("scan-archive-invalid", r"\d+ members"):
        scan_wheel(path, QuietProgress())


def test_other_packings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x.so", TORCH)
    with fails("scan-archive-invalid", "method 12"):
        scan_wheel(path, QuietProgress())


# --- conda packages --------------------------------------------------------------------------------


def conda_package(folder: Path, name: str, data: bytes) -> Path:
    """`data` is the tar of what it installs."""
    import bz2

    import zstandard

    path = folder / name
    if name.endswith(".tar.bz2"):
        half = len(data) // 2
        path.write_bytes(bz2.compress(data[:half]) + bz2.compress(data[half:]))
        return path
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("pkg-torch.tar.zst", zstandard.ZstdCompressor().compress(data))
        archive.writestr("info-torch.tar.zst", b"")
    return path


@pytest.mark.parametrize("ending", [".conda", ".tar.bz2"])
def test_a_conda_package_tells_what_it_installs(tmp_path: Path, ending: str) -> None:
    site = "lib/python3.11/site-packages"
    data = tar(
        (f"{site}/torch/lib/libtorch_cuda.so", TORCH),
        (f"{site}/torch/version.py", VERSION),
        ("info/test/x.so", TORCH),
    )
    found = scan_path(
        conda_package(tmp_path, f"pytorch-2.3.1-py3.11_cuda12.1_0{ending}", data), QuietProgress()
    )
    assert modules(found) == {f"{site}/torch/lib/libtorch_cuda.so": TORCH_MODULES}
    assert found.packages == (InstalledPackage(name="pytorch", version="2.3.1", build="py3.11_cuda12.1_0"),)
    assert found.facts[0] == ("torch", "cuda", "12.1")


@pytest.mark.parametrize("ending", [".conda", ".tar.bz2"])
def test_a_damaged_conda_package_is_said(tmp_path: Path, ending: str) -> None:
    path = conda_package(tmp_path, f"x-1-0{ending}", tar(("a.so", TORCH)))
    path.write_bytes(path.read_bytes()[:-30])
    with fails("scan-archive-invalid", "conda package"):
        scan_path(path, QuietProgress())
    path.write_bytes(b"other bytes")
    with fails("scan-archive-invalid", "conda package"):
        scan_path(path, QuietProgress())


# --- folders and files -----------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment as pip makes it."""
    site = tmp_path / "env/lib/python3.11/site-packages"
    for path, data in {
        "torch/lib/libtorch_cuda.so": TORCH,
        "torch/version.py": VERSION,
        "torch-2.3.1.dist-info/METADATA": b"Name: torch",
        "other/text.py": TORCH,
    }.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    return tmp_path / "env"


def test_a_folder_tells_what_is_below_it_once(environment: Path) -> None:
    site = environment / "lib/python3.11/site-packages"
    os.link(site / "torch/lib/libtorch_cuda.so", site / "torch/lib/the_same.so")
    (environment / "lib64").symlink_to("lib")
    (environment / "out").symlink_to("/usr")
    (site / "torch/lib/libcudart.so.12").symlink_to("libcudart.so.12.1.105")
    os.mkfifo(environment / "pipe.so")
    found = scan_directory(environment, QuietProgress(), workers=2)
    assert modules(found) == {"lib/python3.11/site-packages/torch/lib/libtorch_cuda.so": TORCH_MODULES}
    assert found.packages == (InstalledPackage(name="torch", version="2.3.1"),)
    assert found.facts[0] == ("torch", "cuda", "12.1")
    assert found.toolkit == ("libcudart.so.12",)


@pytest.mark.parametrize("chunk", [0, 10, 1 << 30])
def test_the_progress_of_a_folder_ends_at_its_total(
    environment: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever amounts small files are told in."""

    class Told(QuietProgress):
        total = done = 0

        def task(self, title: str, *, total: int = 0, unit: str = "bytes"):  # type: ignore[no-untyped-def]
            self.total = total
            return nullcontext(self)

        def advance(self, amount: int) -> None:
            self.done += amount

    monkeypatch.setattr(files, "CHUNK", chunk)
    told = Told()
    scan_directory(environment, told)
    size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file())
    assert (told.total, told.done) == (size, size)


def test_a_folder_may_be_the_framework_itself(environment: Path) -> None:
    found = scan_path(environment / "lib/python3.11/site-packages/torch", QuietProgress())
    assert found.facts[0] == ("torch", "cuda", "12.1")
    assert list(modules(found)) == ["lib/libtorch_cuda.so"]


def test_one_library_tells_its_own(environment: Path) -> None:
    path = environment / "lib/python3.11/site-packages/torch/lib/libtorch_cuda.so"
    assert modules(scan_path(path, QuietProgress())) == {"libtorch_cuda.so": TORCH_MODULES}
    assert scan_path(path.parents[1] / "version.py", QuietProgress()).libraries == ()


@pytest.mark.parametrize("name", [b"lib\xff.so", b"lib\x1b.so", b"lib\n.so", "lib\u202e.so".encode()])
def test_names_that_cannot_be_shown_are_shown_as_they_can(tmp_path: Path, name: bytes) -> None:
    """A line end or an escape in a name would be obeyed by a terminal, or by a log that is read."""
    path = tmp_path / os.fsdecode(name)
    path.write_bytes(TORCH)
    assert list(modules(scan_directory(tmp_path, QuietProgress()))) == ["lib�.so"]
    assert list(modules(scan_path(path, QuietProgress()))) == ["lib�.so"]
    assert paths([scan_layer(iter([tar((os.fsdecode(name), TORCH))]))]) == ["lib�.so"]
    assert parse_facts("torch/version.py", "cuda = '12\x1b[2J'") == (("torch", "cuda", "12�[2J"),)


@pytest.mark.parametrize("ending", ["zip", "tar", "tar.gz", "tar.xz"])
def test_an_archive_is_not_said_to_hold_nothing(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"image.{ending}"
    if ending == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.so", TORCH)
    else:
        with tarfile.open(path, f"w:{ending[4:]}") as packed_tar:
            packed_tar.addfile(tarfile.TarInfo("a.so"))
    with fails("scan-archive-unsupported"):
        scan_path(path, QuietProgress())


def test_what_cannot_be_read_is_said(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with fails("cannot-read-file", "env: "):
        scan_directory(environment, QuietProgress())


# --- layers ----------------------------------------------------------------------------------------


def pieces(data: bytes, step: int) -> Iterator[bytes]:
    return (data[at : at + step] for at in range(0, len(data), step))


def paths(scans: list[LayerScan]) -> list[str]:
    return [one.path for one in merge_layers(scans)]


LONG = "opt/" + "very-long-folder/" * 12 + "libtorch_cuda.so"


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("step", [1, 7, 512, 700, 1 << 20])
def test_a_layer_tells_the_same_however_its_bytes_come(step: int, form: int) -> None:
    data = tar(
        ("./opt", None),
        (LONG, TORCH),
        ("opt/torch/version.py", VERSION),
        ("opt/env/conda-meta/numpy-1.26-py_0.json", b"{}"),
        ("opt/libcudart.so.12", b"->libcudart.so.12.1"),
        ("opt/a", b"x" * 700),
        form=form,
    )
    found = scan_layer(pieces(data, step))
    assert [one.path for one in found.findings] == sorted(
        ["opt/env/conda-meta/numpy-1.26-py_0.json", "opt/libcudart.so.12", "opt/torch/version.py", LONG]
    )
    assert found.plain == ("opt/a",)
    (one,) = (each.library for each in found.findings if each.library)
    assert [each.count for each in one.modules] == [2, 1]


def test_what_an_upper_layer_removes_or_covers_counts_no_more() -> None:
    lib, other = ("opt/torch/lib/a.so", TORCH), ("opt/torch/lib/b.so", TORCH)
    lower = scan_layer(iter([tar(lib, other, ("opt/torch/version.py", VERSION))]))
    every = ["opt/torch/lib/a.so", "opt/torch/lib/b.so", "opt/torch/version.py"]

    def over(*entries: Entry) -> list[str]:
        return paths([lower, scan_layer(iter([tar(*entries)]))])

    assert over() == every
    assert over(("opt/torch/lib", None), ("opt/torch/lib/c.txt", b"x")) == every
    assert over(("opt/torch/lib/.wh.a.so", b"")) == every[1:]
    assert over(("opt/.wh.torch", b"")) == []
    assert over(("opt/torch/lib/a.so", b"\x7fELF" + bytes(200))) == every[1:]  # a build for the CPU
    assert over(("opt/torch/lib/a.so", b"->b.so")) == every[1:]
    assert over(("opt/torch", b"->elsewhere")) == []
    assert over(("opt/torch/lib/.wh..wh..opq", b"")) == [every[2]]
    assert over((".wh..wh..opq", b"")) == []
    # A whiteout speaks of the layers below, not of its own, wherever in the layer it stands.
    assert over(("opt/torch/lib/d.so", TORCH), ("opt/torch/lib/.wh..wh..opq", b"")) == [
        "opt/torch/lib/d.so",
        every[2],
    ]
    assert over(("opt/.wh.torch", b""), lib) == every[:1]


def test_a_name_that_is_replaced_leaves_the_file_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    again = ("a.so", b"\x7fELF" + bytes(99))
    data = tar(("a.so", TORCH), ("b.so", b"=>a.so"), ("c.so", b"=>a.so"), again, ("b.so", b"->c.so"))
    found = scan_layer(iter([data]))
    assert [one.path for one in found.findings if one.library] == ["c.so"]
    assert (found.links, found.plain) == ((), ("a.so", "b.so"))
    monkeypatch.setattr(layers, "RENAMED_LIMIT", 2)
    with pytest.raises(CorruptDataError, match="renamed"):
        scan_layer(iter([data]))


NOTE = b'NVIDIA Corporation\0\0{"format":1,"CUDA version":"13.0","driver":[535,550],"device":[1]}'


def test_the_drivers_libraries_say_what_they_are_for(tmp_path: Path) -> None:
    """NVIDIA's for forward compatibility in an ELF note; those that an installer left, by where they lie."""
    compat, own = "usr/local/cuda/compat/libcuda.so.580.173.02", "usr/lib/libnvidia-ml.so.610.43"
    data = b"\x7fELF\x02\x01" + bytes(699_980) + NOTE + bytes(100)  # from one piece into the next
    wanted = [
        ("driver", "libcuda.so.580.173.02", "CUDA 13.0 for drivers 535,550"),
        ("driver", "libnvidia-ml.so.610.43", "of the image itself"),
    ]
    for step in (100_000, 7 << 20):
        found = scan_layer(pieces(tar((compat, data), (own, b"\x7fELF" + bytes(99))), step))
        assert sorted(fact for one in found.findings for fact in one.facts) == wanted
    for name, content in ((compat, data), (own, b"\x7fELF" + bytes(99))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(scan_directory(tmp_path, QuietProgress()).facts) == wanted


def test_a_path_twice_in_a_layer_is_its_last() -> None:
    found = scan_layer(iter([tar(("a.so", TORCH), ("a.so", b"\x7fELF" + bytes(99)))]))
    assert (found.findings, found.plain) == ((), ("a.so",))


def test_a_file_lives_as_long_as_one_of_its_names() -> None:
    """uv links packages out of its cache, which a later layer may remove."""
    cache, site = "root/.cache/uv/torch", "usr/lib/python3/site-packages/torch"
    files = (f"{cache}/lib/libtorch_cuda.so", TORCH), (f"{cache}/version.py", VERSION)
    lower = scan_layer(
        iter(
            [
                tar(
                    *files,
                    (f"{site}/lib/libtorch_cuda.so", f"=>{cache}/lib/libtorch_cuda.so".encode()),
                    (f"{site}/version.py", f"=>{cache}/version.py".encode()),
                    ("opt/again.so", f"=>{site}/lib/libtorch_cuda.so".encode()),
                )
            ]
        )
    )
    assert parse_scan(json.loads(json.dumps(format_scan(lower)))) == lower
    assert paths([lower]) == [path for path, _ in files]
    no_cache = scan_layer(iter([tar(("root/.wh..cache", b""))]))
    found = merge_layers([lower, no_cache])
    assert [one.path for one in found] == ["opt/again.so", f"{site}/version.py"]
    assert found[0].library is not None
    assert found[0].library.path == "opt/again.so"
    assert found[1].facts[0] == ("torch", "cuda", "12.1")
    no_again = scan_layer(iter([tar(("opt/again.so", b"a text that is long enough " * 3))]))
    site_paths = [f"{site}/lib/libtorch_cuda.so", f"{site}/version.py"]
    assert paths([lower, no_cache, no_again]) == site_paths
    assert paths([lower, no_again, no_cache]) == site_paths
    assert paths([lower, no_again, scan_layer(iter([tar((".wh.usr", b""), ("root", b"->usr"))]))]) == []


def test_a_layer_is_read_from_its_record_as_it_was() -> None:
    data = tar(
        ("opt/a.so", TORCH), ("opt/torch/version.py", VERSION), (".wh.b", b""), ("c/.wh..wh..opq", b"")
    )
    found = scan_layer(iter([data]))
    value = json.loads(json.dumps(format_scan(found)))
    assert parse_scan(value) == found
    assert parse_scan({**value, "scanner": 0}) is None
    assert parse_scan({**value, "found": [{"path": "x", "modules": ["one sm_80"], "size": 1}]}) is None
    assert parse_scan({}) is None


def test_large_sizes_and_wrong_checksums() -> None:
    large = tarfile.TarInfo("x")
    large.size = 9 << 33  # more than octal digits can say
    header = large.tobuf(tarfile.GNU_FORMAT)
    assert tar_stream._parse_header(header) == ("x", tarfile.REGTYPE, 9 << 33)
    with pytest.raises(CorruptDataError, match=r"broken header at byte 0: bad checksum"):
        scan_layer(iter([header[:10] + b"y" + header[11:]]))


GOOD = tar(("opt/a.so", TORCH))
HOSTILE = {
    "not a tar": b"x" * 2000,
    "cut in a file": GOOD[:3000],
    "cut in a header": tar(("a", b"1"), ("b", b"2"))[:1300],
    "a way out": tar(("a/../../x", b"1")),
    "a header of many bytes": tar(("x" * 300, b""))[:124] + b"77777777777\0" + tar(("x" * 300, b""))[136:],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_layer_is_refused_with_its_fault(name: str) -> None:
    with pytest.raises(CorruptDataError, match=r"header|ends at byte|outside"):
        scan_layer(pieces(HOSTILE[name], 1 << 20))


def test_sparse_files_and_endless_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "y"}
    with pytest.raises(CorruptDataError, match="sparse"):
        scan_layer(iter([info.tobuf(tarfile.PAX_FORMAT)]))
    monkeypatch.setattr(tar_stream, "NAMES_LIMIT", 20)
    with pytest.raises(CorruptDataError, match="file names"):
        scan_layer(iter([tar(("0123456789", b""), ("abcdefghij", b""))]))


def test_extended_headers_cost_what_they_take() -> None:
    """Of many records only those that count are kept, however many headers stand before an entry."""
    records = b"".join(b"%d k%07d=%s\n" % (1012, number, b"v" * 997) for number in range(1000))
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(records)
    block = header.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)
    tracemalloc.start()
    try:
        found = scan_layer(iter([*[block] * 12, GOOD]))
        assert tracemalloc.get_traced_memory()[1] < 4 * len(block)
    finally:
        tracemalloc.stop()
    assert [one.path for one in found.findings] == ["opt/a.so"]
    assert tar_stream._parse_extended(tarfile.XHDTYPE, b"3 \n" * 340_000 + b"12 path=abc\n") == {
        "path": "abc"
    }


# --- images ----------------------------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "store")


def counting(shelf: ScanCache, read: list[str]) -> ScanCache:
    def told(layer: OciLayer) -> Iterator[bytes]:
        read.append(layer.descriptor.digest)
        return shelf.read(layer)

    return ScanCache(layout=shelf.layout, read=told, workers=shelf.workers)


def test_a_layer_that_images_share_is_read_once(layout: Layout) -> None:
    base, torch = tar(("usr/lib/x.so", b"\x7fELF" + bytes(99))), tar(("opt/torch.so", TORCH))
    cpu = tar(("opt/.wh.torch.so", b""))
    add_image(layout, "a:1", [base, torch])
    add_image(layout, "b:1", [base, torch, cpu])
    read: list[str] = []
    shelf = counting(layout_scan_cache(layout, 2), read)
    one, two = layout.image("a:1"), layout.image("b:1")
    assert one is not None
    assert two is not None
    found = scan_image("a:1", one.layers, shelf, QuietProgress())
    assert modules(found) == {"opt/torch.so": TORCH_MODULES}
    assert len(read) == 2
    assert scan_image("a:1", one.layers, shelf, QuietProgress()) == found
    assert len(read) == 2
    assert scan_image("b:1", two.layers, shelf, QuietProgress()).libraries == ()
    assert len(read) == 3


def test_another_scanner_reads_anew(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    add_image(layout, "a:1", [GOOD])
    image = layout.image("a:1")
    assert image is not None
    read: list[str] = []
    shelf = counting(layout_scan_cache(layout, 1), read)
    scan_image("a:1", image.layers, shelf, QuietProgress())
    monkeypatch.setattr(records, "SCANNER", records.SCANNER + 1)
    scan_image("a:1", image.layers, shelf, QuietProgress())
    assert len(read) == 2


def packed(kind: str, data: bytes) -> tuple[str, bytes]:
    import zstandard

    if kind == "gzip":
        half = len(data) // 2
        return "application/vnd.oci.image.layer.v1.tar+gzip", gzip.compress(data[:half]) + gzip.compress(
            data[half:]
        )
    if kind == "zstd":
        half = len(data) // 2
        frames = (zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
        return "application/vnd.oci.image.layer.v1.tar+zstd", b"".join(frames)
    return "application/vnd.oci.image.layer.v1.tar", data


def shelved(
    layout: Layout, kind: str, data: bytes, *, diff_id: str = "", cut: int = 0
) -> tuple[OciLayer, ScanCache]:
    """A layer and where it is read from; its blob has lost `cut` bytes at its end."""
    from imagefactory.oci.manifests import digest_of

    media_type, blob = packed(kind, data)
    descriptor = layout.add(blob, media_type)
    os.truncate(layout.blob_path(descriptor.digest), len(blob) - cut)
    return OciLayer(descriptor=descriptor, diff_id=diff_id or digest_of(data), title="x"), layout_scan_cache(
        layout, 1
    )


@pytest.mark.parametrize("kind", ["tar", "gzip", "zstd"])
def test_layers_of_every_packing_tell_the_same(layout: Layout, kind: str) -> None:
    layer, shelf = shelved(layout, kind, GOOD)
    assert modules(scan_image("x", [layer], shelf, QuietProgress())) == {"opt/a.so": TORCH_MODULES}


@pytest.mark.parametrize("kind", ["tar", "gzip", "zstd"])
def test_a_cut_layer_is_said_and_not_kept(layout: Layout, kind: str) -> None:
    layer, shelf = shelved(layout, kind, GOOD, cut=30)
    with fails("layer-corrupt", r"layer x .*\d+ bytes, found \d+"):
        scan_image("x", [layer], shelf, QuietProgress())
    assert not (layout.path / "scans").exists()


def test_what_an_image_claims_of_its_layers_says_nothing_of_anothers(layout: Layout) -> None:
    """A stranger's manifest may name any diff_id: what is kept goes by the digest of the bytes."""
    honest, shelf = shelved(layout, "tar", GOOD)
    scan_image("x", [honest], shelf, QuietProgress())
    empty = tar(("opt/a.so", bytes(99)))
    forged, _ = shelved(layout, "tar", empty, diff_id=honest.diff_id)
    assert scan_image("y", [forged], shelf, QuietProgress()).libraries == ()
    assert modules(scan_image("x", [honest], shelf, QuietProgress())) == {"opt/a.so": TORCH_MODULES}


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_layer_called_by_another_packing_is_what_its_bytes_are(layout: Layout, kind: str) -> None:
    layer, shelf = shelved(layout, kind, GOOD)
    for media_type in {packed(other, b"")[0] for other in ("tar", "gzip", "zstd")} - {
        layer.descriptor.media_type
    }:
        called = replace(layer, descriptor=replace(layer.descriptor, media_type=media_type))
        assert modules(scan_image("x", [called], shelf, QuietProgress())) == {"opt/a.so": TORCH_MODULES}
        shutil.rmtree(layout.path / "scans")


def test_a_layer_without_end_is_refused(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PLAIN", 2000)
    layer, shelf = shelved(layout, "gzip", GOOD)
    with fails("layer-corrupt", "2000 bytes"):
        scan_image("x", [layer], shelf, QuietProgress())


def test_scans_live_as_long_as_an_image_needs_them(layout: Layout) -> None:
    with layout.in_use(QuietProgress()):
        add_image(layout, "a:1", [GOOD])
        add_image(layout, "b:1", [tar(("b.so", TORCH))])
        for name in ("a:1", "b:1"):
            image = layout.image(name)
            assert image is not None
            scan_image(name, image.layers, layout_scan_cache(layout, 1), QuietProgress())
    assert len(list((layout.path / "scans").iterdir())) == 2
    layout.untag("b:1")
    collect(layout, QuietProgress(), dry_run=True)
    assert len(list((layout.path / "scans").iterdir())) == 2
    assert collect(layout, QuietProgress()).records >= 1
    image = layout.image("a:1")
    assert image is not None
    (kept,) = (layout.path / "scans").iterdir()
    assert kept.stem == image.layers[0].descriptor.digest.removeprefix("sha256:")


# --- packed bytes ----------------------------------------------------------------------------------


def _standard() -> tuple[object, tuple[type[Exception], ...]]:
    import zlib

    return zlib.decompressobj, (zlib.error,)


@pytest.mark.parametrize("make", [inflate_module.inflater, _standard])
def test_a_bomb_comes_in_small_pieces(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate_module, "inflater", make)
    bomb = gzip.compress(bytes(50 << 20))
    assert {len(piece) for piece in inflate([bomb], GZIP)} == {inflate_module.PIECE}
    assert sum(map(len, inflate([bomb, bytes(9), bomb[:5], bomb[5:], bytes(9)], GZIP))) == 100 << 20
    assert sum(map(len, inflate([bomb[10:-8], b""]))) == 50 << 20
    for broken in ([bomb[:5]], [bomb[:-1]], [bomb, bomb[:9000]], [bomb, b"garbage behind"]):
        with pytest.raises(CorruptDataError):
            list(inflate(broken, GZIP))
    for broken in ([], [bomb[10:-9]], [b"\xff" * 99], [bomb[10:-8], b"behind"], [bomb[10:-8] + b"\0"]):
        with pytest.raises(CorruptDataError):
            list(inflate(broken))


# --- .sif files ------------------------------------------------------------------------------------


def test_the_system_of_a_sif_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.sif"
    path.write_bytes(sif())
    assert is_sif(path)
    found = read_partition(path)
    assert (found.offset, found.size) == (8192, 100)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x" * 200, "header"),
        (sif()[:100], "truncated"),
        (sif()[:4600], "no system"),
        (sif(kind=0x4001), "no system"),
        (sif(part=4), "no system"),
        (sif(system=2), "squashfs"),
        (sif(size=1 << 40), "outside"),
        (sif(offset=-5), "outside"),
        (sif(size=-5), "outside"),
    ],
)
def test_a_damaged_sif_is_said(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "x.sif"
    path.write_bytes(data)
    with fails("sif-invalid", why):
        read_partition(path)


def test_a_sif_needs_unsquashfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sif"
    path.write_bytes(sif())
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        fails("tool-missing", "unsquashfs") as caught,
        unpacked_sif(path, tmp_path / "s", QuietProgress()),
    ):
        pass
    assert "squashfs-tools" in caught.value.hint
    (tmp_path / "unsquashfs").write_text("#!/bin/sh\necho FATAL ERROR: no room >&2\nexit 1\n")
    (tmp_path / "unsquashfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with (
        fails("sif-unpack-failed", "no room"),
        unpacked_sif(path, tmp_path / "s", QuietProgress()),
    ):
        pass
    assert list((tmp_path / "s").iterdir()) == []


def ranges(data: bytes, *, cut: int = 0) -> Callable[[Request], Answer]:
    """A server of one file that sends ranges. The first `cut` responses with members end early."""
    rest = [cut]

    def answer(request: Request) -> Answer:
        first, last = (int(text) for text in request.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        if first == 0 and rest[0]:
            rest[0] -= 1
            return 503, {"Retry-After": "0"}, b""
        return 206, {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, part

    return answer


def streamed(path: Path, answer: Callable[[Request], Answer], *, every: bool = True) -> ScanResult:
    index = PackageIndex(url="", origin="", certificates="", proxy="", environment=())
    with service(answer) as server, HttpSession(index, retry_policy=RetryPolicy(first_wait=0)) as web:
        size, url = path.stat().st_size, f"http://{server.address}/{path.name}"
        wheel = open_remote_wheel(web, url, path.name, size, every=every)
        with QuietProgress().task("") as task:
            findings = [row for run in wheel.runs for row in scan_run(web, wheel, run, task)]
        return format_contents(path.name, [*wheel.named, *findings])


@pytest.mark.parametrize("cut", [0, 1])
def test_a_wheel_on_a_server_is_scanned_by_parts_of_it(tmp_path: Path, cut: int) -> None:
    path = torch_wheel(tmp_path)
    assert streamed(path, ranges(path.read_bytes(), cut=cut)) == scan_wheel(path, QuietProgress())


def test_large_members_without_gpu_code_are_not_read(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(3 << 20)
    files = {"demo/notes.txt": noise, "demo/data": noise, "demo/_C.so": library(("sm_80",)) + noise[:999]}
    path, sizes = make_wheel(tmp_path, "demo", files), list[int]()
    serve = ranges(path.read_bytes())

    def answer(request: Request) -> Answer:
        sizes.append(len(serve(request)[2]))
        return serve(request)

    with service(answer) as server:
        index = PackageIndex(url="", origin="", certificates="", proxy="", environment=())
        url = f"http://{server.address}/{path.name}"
        with HttpSession(index) as web, QuietProgress().task("") as task:
            wheel = open_remote_wheel(web, url, path.name, path.stat().st_size, every=True)
            (run,) = wheel.runs
            starts = [member.info.filename for member in run]
            assert [row.path for row in scan_run(web, wheel, run, task)] == ["demo/_C.so"]
    assert starts[:2] == ["demo/data", "demo/_C.so"]  # no text
    assert len(sizes) == 3  # the list, the beginning of the data, the library


def test_libraries_of_cuda_that_a_package_pins_are_named_without_reading_them(tmp_path: Path) -> None:
    files = {"nvidia/cublas/lib/libcublas.so.12": library(("sm_80",)), "demo/_C.so": library(("sm_80",))}
    path = make_wheel(tmp_path, "demo", files)
    contents = streamed(path, ranges(path.read_bytes()), every=False)
    assert [row.path for row in contents.libraries] == ["demo/_C.so"]
    assert contents.toolkit == ("libcublas.so.12",)


def test_a_server_without_ranges_is_recognized(tmp_path: Path) -> None:
    path = torch_wheel(tmp_path)
    with pytest.raises(NoRangesError):
        streamed(path, lambda _: (200, {}, path.read_bytes()))


@pytest.mark.parametrize("harm", [add_nested, lambda path: add_packed(path, "x.so", b"no", bytes(99))])
def test_a_hostile_wheel_on_a_server_is_rejected(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = torch_wheel(tmp_path)
    harm(path)
    with fails("scan-archive-invalid"):
        streamed(path, ranges(path.read_bytes()))
    path.write_bytes(bytes(9999))
    with fails("scan-archive-invalid"):
        streamed(path, ranges(path.read_bytes()))
