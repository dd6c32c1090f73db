"""What is said where no wheel fits: what does, by the files of the project's page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.lock.pypi.explain import explain_failure
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.lock.pypi.wheels_there import NoWheelError, what_works, without_wheel
from imagefactory.model import Lock

LOCK = Lock(
    target="lab-2.3-cu121",
    content_hash="00",
    python="3.11",
    platform="manylinux_2_36_x86_64",
    solver="uv 1",
    wheels=(),
)
INDEX = PackageIndex(url="", origin="uv's default", certificates="", proxy="", environment=())
UV = (
    "error: No solution found when resolving dependencies\n  cause: Because {what} and you require demo, "
    "we can conclude that your requirements are unsatisfiable.\n"
)


def anything(_: str) -> bool:
    return True


def files(*names: str) -> tuple[IndexFile, ...]:
    return tuple(IndexFile(filename=name, url="", sha256="") for name in names)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (UV.format(what="all versions of flash-attn have no usable wheels"), ""),
        ("hint: Wheels are required for `flash_attn` because building from source is disabled", "flash-attn"),
        (UV.format(what="demo==1.0 has no usable wheels"), "demo==1.0"),
        (
            UV.format(what="demo==1.0 has no wheels with a matching Python ABI tag (e.g., `cp311`)"),
            "demo==1.0",
        ),
        (UV.format(what="demo[gpu]>=1.0,<=1.2 has no wheels with a matching platform tag"), "demo"),
        ("error: the network is down", ""),
    ],
)
def test_the_project_is_the_one_that_uv_names(text: str, name: str) -> None:
    assert without_wheel(text) == name


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            files(
                "demo-1.0.tar.gz",
                "demo-1.2-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
                "demo-1.10-cp311-abi3-manylinux_2_28_x86_64.whl",
                "demo-2.0-cp312-cp312-manylinux_2_28_x86_64.whl",
                "demo-3.0-cp311-cp311-win_amd64.whl",
                "demo-0.9-py3-none-any.whl",
                "demo-0.8-py3-none-any.whl",
            ),
            "there are wheels of demo==1.10 or demo==1.2 or demo==0.9 for Python 3.11: ask for one of them",
        ),
        (
            files(
                "demo-1.0-cp310-cp310-manylinux_2_17_x86_64.whl", "demo-1.0-cp39-cp39-manylinux1_x86_64.whl"
            ),
            "its wheels are for Python 3.9, 3.10, and this image has 3.11: write python: and a base",
        ),
        (
            files("demo-1.0-cp311-cp311-macosx_11_0_arm64.whl"),
            "has wheels of demo for other platforms alone, none for x86_64",
        ),
        (
            files("demo-1.0-cp310-cp310-win_amd64.whl"),
            "has wheels of demo for other platforms alone, none for x86_64",
        ),
        (files("demo-1.0.tar.gz", "other-1-py3-none-any.whl"), "has no wheel of demo, its sources alone"),
    ],
)
def test_what_works_is_named(there: tuple[IndexFile, ...], said: str) -> None:
    assert said in what_works("demo", there, LOCK, anything)


def test_the_versions_next_to_the_one_that_was_asked_for_are_named() -> None:
    """lit 16.0.6 of a public requirements.txt has no wheel, and 23 others have."""
    there = files(*(f"lit-{one}-py3-none-any.whl" for one in ("15.0.7", "17.0.1", "18.1.0", "23.1.5")))
    assert "lit==15.0.7 or lit==17.0.1 or lit==23.1.5 for" in what_works("lit==16.0.6", there, LOCK, anything)
    assert "lit==23.1.5 for" in what_works("lit==24.0", there, LOCK, anything)


def test_a_yanked_file_is_no_way_out() -> None:
    there = replace(files("demo-1.0-py3-none-any.whl")[0], yanked=True)
    assert "no wheel of demo" in what_works("demo", (there,), LOCK, anything)


def test_only_versions_that_the_solver_accepts_are_named() -> None:
    """deepspeed==0.17.5 of a file is not answered by 0.3.1.dev5, nor by anything that the file forbids."""
    there = files(*(f"lit-{one}-py3-none-any.whl" for one in ("0.3.1.dev5", "15.0.7", "17.0.1", "23.1.5")))
    tried: list[str] = []

    def works(pin: str) -> bool:
        tried.append(pin)
        return pin == "lit==17.0.1"

    found = what_works("lit==16.0.6", there, LOCK, works)
    assert ("lit==17.0.1" in found, "15.0.7" in found, "23.1.5" in found) == (True, False, False)
    assert tried == ["lit==15.0.7", "lit==17.0.1", "lit==23.1.5"]
    assert "lit==" not in what_works("lit==16.0.6", there, LOCK, lambda _: False)


def test_the_error_holds_all_names_and_the_account() -> None:
    stderr = UV.format(what="demo==2.0 has no usable wheels")
    error = explain_failure(LOCK, stderr, INDEX)
    assert isinstance(error, NoWheelError)
    assert (error.names, error.account) == (("demo",), stderr)
