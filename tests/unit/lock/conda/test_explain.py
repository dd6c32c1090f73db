"""What a channel's records tell of a framework's builds."""

from __future__ import annotations

from datetime import UTC, date, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.lock.conda.explain import cudas_of, offered_to, parse_builds, releases


def record(version: str, build: str, *depends: str) -> Any:
    """As much of a channel's record as is asked."""
    moment = datetime(2026, 6, 1, tzinfo=UTC)
    return SimpleNamespace(version=version, build=build, depends=depends, timestamp=moment)


@pytest.mark.parametrize(
    ("build", "depends", "cuda", "python"),
    [
        (
            "cuda129_py311h1763f6d_306",
            ("python >=3.11,<3.12.0a0", "python_abi 3.11.* *_cp311"),
            "12.9",
            "3.11",
        ),
        ("py3.10_cuda11.7_cudnn8.5.0_0", ("python >=3.10,<3.11.0a0",), "11.7", "3.10"),
        ("cuda126py312h6a0f5d4_0", ("python_abi 3.12.* *_cp312",), "12.6", "3.12"),
        ("cuda12_0", ("tensorflow-base 2.18",), "12", ""),
    ],
)
def test_a_build_names_its_cuda_and_its_python(
    build: str, depends: tuple[str, ...], cuda: str, python: str
) -> None:
    (found,) = parse_builds([record("2.10.0", build, *depends)])
    assert (str(found.release.version), found.cuda, found.python) == ("2.10.0", cuda, python)


def test_what_is_for_the_cpu_or_no_release_is_no_build_for_gpus() -> None:
    some = [record("2.10.0", "cpu_mkl_py311h_1"), record("2.10.0", "h123_0"), record("2.11rc1", "cuda129_0")]
    assert parse_builds(some) == ()


def test_what_a_python_is_offered() -> None:
    builds = parse_builds(
        [
            record("2.10.0", "cuda129_py311_0", "python_abi 3.11.* *_cp311"),
            record("2.10.0", "cuda130_py314_0", "python_abi 3.14.* *_cp314"),
            record("2.1.0", "cuda128_0"),
        ]
    )
    offered = offered_to(builds, ["3.11", "3.14"])
    assert {python: [str(one.version) for one in some] for python, some in offered.items()} == {
        "3.11": ["2.1.0", "2.10.0"],
        "3.14": ["2.1.0", "2.10.0"],
    }
    assert cudas_of(builds, "2.10", ["3.11"]) == {"12.9"}
    assert cudas_of(builds, "2.1", ["3.11"]) == {"12.8"}


def dated_record(version: str, day: str) -> Any:
    """As much of a channel's dated_record as is asked."""
    moment = datetime.fromisoformat(day).replace(tzinfo=UTC) if day else None
    return SimpleNamespace(version=version, timestamp=moment)


def test_a_release_begins_with_its_first_build() -> None:
    found = releases(
        [
            dated_record("1.10", "2024-03-01"),
            dated_record("1.9", "2023-01-02"),
            dated_record("1.10", "2024-02-01"),
        ]
    )
    assert [(str(one.version), one.uploaded) for one in found] == [
        ("1.9", date(2023, 1, 2)),
        ("1.10", date(2024, 2, 1)),
    ]


def test_no_release_is_what_only_conda_can_read_or_nobody_should_have() -> None:
    some = [
        dated_record("2.0rc1", "2024-01-01"),
        dated_record("2024a_1", "2024-01-01"),
        dated_record("1.0", ""),
    ]
    assert [(str(one.version), one.uploaded) for one in releases(some)] == [("1.0", None)]
