"""What is said where no wheel fits: what does, by the files of the project's page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.lock.pypi.explain import explain_failure, unreachable_error
from imagefactory.lock.pypi.index import IndexFile, PackageIndex
from imagefactory.lock.pypi.no_wheel import NoWheelError, without_wheel, working_versions
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
            "recipe allows",
        ),
        (
            files(
                "demo-1.0-cp310-cp310-manylinux_2_17_x86_64.whl", "demo-1.0-cp39-cp39-manylinux1_x86_64.whl"
            ),
            "Python 3.9, 3.10",
        ),
        (
            files("demo-1.0-cp311-cp311-macosx_11_0_arm64.whl"),
            "for other platforms, none for x86_64",
        ),
        (
            files("demo-1.0-cp310-cp310-win_amd64.whl"),
            "for other platforms, none for x86_64",
        ),
        (files("demo-1.0.tar.gz", "other-1-py3-none-any.whl"), "only its sources"),
    ],
)
def test_what_works_is_named(there: tuple[IndexFile, ...], said: str) -> None:
    assert said in working_versions("demo", there, LOCK)


def test_a_version_that_the_recipe_does_not_allow_is_not_advised() -> None:
    """deepspeed 0.17.5 of a public requirements.txt has no wheel, and a development release has one."""
    there = files(*(f"lit-{one}-py3-none-any.whl" for one in ("15.0.7", "17.0.1", "18.1.0")))
    assert "15.0.7" not in working_versions("lit==16.0.6", there, LOCK)


def test_a_yanked_file_is_no_way_out() -> None:
    there = replace(files("demo-1.0-py3-none-any.whl")[0], yanked=True)
    assert "no wheel of demo" in working_versions("demo", (there,), LOCK)


def test_the_error_holds_all_names_and_the_account() -> None:
    stderr = UV.format(what="demo==2.0 has no usable wheels")
    error = explain_failure(LOCK, stderr, INDEX)
    assert isinstance(error, NoWheelError)
    assert error.code == "no-usable-wheel"
    assert (error.names, error.account) == (("demo",), stderr)


def test_a_certificate_of_an_unknown_authority_is_not_blamed_on_the_network() -> None:
    told = unreachable_error("client error (Connect) invalid peer certificate: UnknownIssuer", INDEX)
    assert told.code == "index-unreachable"
    assert "`certificates`" in told.hint
    assert "`certificates`" not in unreachable_error("connection refused", INDEX).hint
