"""What the files of a place tell together."""

from __future__ import annotations

from imagefactory.gpu.capability import parse_code
from imagefactory.gpu.values import GpuLibrary, ModuleCount
from imagefactory.scan.findings import FileFinding, format_contents


def library(path: str, code: str, **changes: str) -> GpuLibrary:
    return GpuLibrary(
        path=path,
        size=10,
        modules=(ModuleCount(codes=(parse_code(code),), count=1),),
        compressions=("none",),
        damage=changes.get("damage", ""),
    )


def libraries(*some: GpuLibrary) -> dict[str, GpuLibrary]:
    found = format_contents("x", (FileFinding(path=one.path, library=one) for one in some)).libraries
    assert [one.path for one in found] == sorted(one.path for one in found)
    return {one.path: one for one in found}


def test_loose_files_of_a_folder_are_one_library() -> None:
    found = libraries(
        library("a/k/two.cubin", "sm_90a"),
        library("a/k/one.cubin", "sm_100a"),
        library("a/k/a.cubin", "sm_90a"),
        library("a/k/alone.fatbin", "sm_80"),
        library("a/other/x.cubin", "sm_80"),
        library("a/k/lib.so", "sm_80"),
        library("a/k/lib2.so", "sm_80"),
    )
    assert set(found) == {"a/k/*.cubin", "a/k/alone.fatbin", "a/other/x.cubin", "a/k/lib.so", "a/k/lib2.so"}
    loose = found["a/k/*.cubin"]
    assert (loose.size, loose.compressions) == (30, ("none",))
    assert {str(one.codes[0]): one.count for one in loose.modules} == {"sm_90a": 2, "sm_100a": 1}


def test_a_damaged_one_is_named() -> None:
    found = libraries(library("k/a.cubin", "sm_80"), library("k/b.cubin", "sm_80", damage="cut at 10"))
    assert found["k/*.cubin"].damage == "k/b.cubin: cut at 10"
