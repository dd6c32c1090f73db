"""What a project's page has that rows have not, on pages made short."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date

import pytest
from packaging.version import Version

from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.outdated import PypiRelease
from imagefactory.lock.pypi.series import cuda_of, first_series_after, newer_series, newest_python

PLATFORM = "manylinux_2_36_x86_64"


def wheel(
    version: str, python: str = "cp311-cp311", platform: str = "manylinux_2_28_x86_64", **more: object
) -> IndexFile:
    name = f"demo-{version}-{python}-{platform}.whl"
    given = {"url": "", "sha256": "", "uploaded": "", **more}
    return IndexFile(filename=name, **given)  # type: ignore[arg-type]


def series(files: Iterable[IndexFile], *rows: str, pythons: Iterable[str] = ("3.11",)) -> list[str]:
    return [one.series for one in newer_series("demo", files, rows, tuple(pythons), PLATFORM)]


def test_a_series_is_newer_than_the_newest_row_and_told_with_its_first_day_and_newest_release() -> None:
    files = [
        wheel("2.9.1"),
        wheel("2.15.3"),
        wheel("2.16.0", uploaded="2026-10-01"),
        wheel("2.16.1", uploaded="2026-11-01"),
        wheel("2.17.0", python="cp313-cp313"),
    ]
    found = newer_series("demo", files, ["2.9", "2.15"], ["3.11", "3.13"], PLATFORM)
    assert [(one.series, one.release, one.begun, one.pythons) for one in found] == [
        ("2.16", "2.16.1", date(2026, 10, 1), ("3.11",)),
        ("2.17", "2.17.0", None, ("3.13",)),
    ]


def test_a_row_with_three_numbers_is_followed_by_the_next_release() -> None:
    assert series([wheel("0.12.0"), wheel("0.12.1")], "0.4.30", "0.12.0") == ["0.12.1"]
    assert series([wheel("0.12.0"), wheel("0.12.1")], "0.4", "0.12") == []


@pytest.mark.parametrize(
    "file",
    [
        wheel("3.0.0rc1"),
        wheel("3.0.0", yanked=True),
        wheel("3.0.0", python="cp314-cp314"),
        wheel("3.0.0", platform="win_amd64"),
        wheel("3.0.0", platform="manylinux_2_39_x86_64"),
        wheel("3.0.0", platform="manylinux_2_28_aarch64"),
        IndexFile(filename="demo-3.0.0.tar.gz", url="", sha256=""),
        IndexFile(filename="demo-3.0.0.whl", url="", sha256=""),
    ],
)
def test_what_no_row_could_take_is_no_news(file: IndexFile) -> None:
    assert series([wheel("2.0.0"), file], "2.0") == []


def test_two_pythons_of_the_newest_release_are_one_line() -> None:
    files = [wheel("3.0", python="cp311-cp311"), wheel("3.0", python="cp313-cp313"), wheel("3.0.1")]
    (found,) = newer_series("demo", files, ["2.0"], ["3.13", "3.11"], PLATFORM)
    assert (found.release, found.pythons) == ("3.0.1", ("3.11",))


def test_the_newest_python_is_one_that_the_newest_release_has_a_wheel_of_its_own_for() -> None:
    files = [
        wheel("2.15.0"),
        wheel("2.15.0", python="cp314-cp314"),
        wheel("2.15.0", python="cp315-cp315t"),
        wheel("2.15.0", python="cp315-cp315", platform="win_amd64"),
        wheel("2.16.0rc1", python="cp315-cp315"),
    ]
    assert newest_python("demo", files, PLATFORM) == ("2.15.0", "3.14")


def test_a_wheel_for_any_python_names_none() -> None:
    files = [wheel("2.15.0", python="py3-none"), wheel("2.15.0", python="cp39-abi3")]
    assert newest_python("demo", files, PLATFORM) == ("", "")


@pytest.mark.parametrize(
    ("needs", "cuda"),
    [
        (["numpy", "nvidia-cuda-runtime-cu12==12.8.90; platform_system == 'Linux'"], "12.8"),
        (["cuda-toolkit[cublas,cudart]==13.2.1"], "13.2"),
        (["nvidia-cuda-runtime==13.2.1", "cuda-toolkit==13.2.*"], "13.2"),
        (["nvidia-cuda-runtime-cu11==11.8.89", "nvidia-cuda-runtime-cu12==12.8.90"], ""),
        (["nvidia-cuda-runtime>=12"], ""),
        (["what is this", "nvidia-cudnn-cu12==9.1.0"], ""),
    ],
)
def test_the_cuda_that_a_wheel_pins(needs: list[str], cuda: str) -> None:
    assert cuda_of(needs) == cuda


def test_the_first_series_that_began_after_a_day() -> None:
    days = {"2.0.0": "2023-03-15", "2.0.1": "2023-05-08", "2.1.0": "2023-10-04", "2.2.0": "2024-01-30"}
    some = [PypiRelease(version=Version(one), uploaded=date.fromisoformat(day)) for one, day in days.items()]
    untold = PypiRelease(version=Version("2.1.5"), uploaded=None)
    assert first_series_after([*some, untold], date(2023, 9, 30)) == "2.1"
    assert first_series_after(some, date(2023, 10, 4)) == "2.2"
    assert first_series_after(some, date(2024, 2, 1)) == ""
    assert first_series_after(some, date(2020, 1, 1)) == ""  # nothing would be left
