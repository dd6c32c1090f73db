"""Packages that PyPI does not have: rows of `index`, or what to write into the settings."""

from __future__ import annotations

import re

import pytest

from imagefactory.errors import UsageError
from imagefactory.extras.importers.draft import DraftRequest, draft, index_rows
from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.recipes.edit import check_draft
from imagefactory.recipes.read import read_bases
from imagefactory.settings.load import SHIPPED

NVIDIA = "https://pypi.nvidia.com"
CU118 = "https://download.pytorch.org/whl/cu118"
BASES = read_bases(SHIPPED / "recipes")
READING = ReadOptions(pythons=("3.11",))


def rows(*lines: str, **known: str) -> tuple[dict[str, str], set[str]]:
    spec = parse_environment_file("".join(f"{line}\n" for line in lines), "requirements.txt", READING)
    result = index_rows(spec, known)
    return result.rows, set(result.missing)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["torch==2.1.2+cu118", "torchvision==0.16.2"], {"torch", "torchvision"}),
        (["torch==2.1.2+cu121", "torchvision==0.16.2+cu121"], set()),  # PyPI's own
        (["torch==2.1.2", "torchvision"], set()),
        (["torch==2.9.1", "cuml-cu11", "cuml-cu12"], {"cuml-cu11"}),
        (["cudf_cu12>=24.2,<24.10"], {"cudf-cu12"}),
        (["torch-scatter", "numpy", "./wheels/lab-1.0-py3-none-any.whl"], set()),
    ],
)
def test_packages_that_are_on_another_index_alone(lines: list[str], expected: set[str]) -> None:
    assert rows(*lines) == ({}, expected)
    result, missing = rows(*lines, **{"mine": CU118, "nv": f"{NVIDIA}/"})
    assert (set(result), missing) == (expected, set())
    assert set(result.values()) <= {"mine", "nv"}


def test_a_page_of_wheels_is_told_and_no_index() -> None:
    spec = parse_environment_file("torch-scatter\n", "requirements.txt", READING)
    assert [note for note in index_rows(spec, {}).notes if "torch-scatter" in note]


@pytest.mark.parametrize("source", ["requirements.txt", "environment.yml"])
def test_what_the_hint_says_makes_the_recipe(source: str) -> None:
    """The index that the hint names, written as it says, is in the recipe of the next try."""
    text = "torch==2.1.2+cu118\ncuml-cu11\n"
    if source == "environment.yml":
        text = (
            "channels: [pytorch, nvidia, conda-forge]\n"
            "dependencies: [pytorch=2.1, pytorch-cuda=11.8, {pip: [cuml-cu11]}]\n"
        )
    spec = parse_environment_file(text, source, READING)
    try:
        messages = "\n".join(draft(spec, DraftRequest(family="lab"), BASES).messages)
    except UsageError as error:
        messages = f"{error.hint}\n{index_rows(spec, {}).missing}"
    settings = tuple(dict(re.findall(r'([a-z0-9-]+) = "([^"]+)"', messages)).items())
    recipe = draft(spec, DraftRequest(family="lab", indexes=settings), BASES)
    assert recipe.lost == ()
    (target,) = check_draft(recipe.text, "lab", [], BASES)
    expected = {"cuml-cu11": "nvidia"} | ({"torch": "pytorch-cu118"} if source != "environment.yml" else {})
    assert (dict(target.origins), target.cuda) == (expected, "11.8")


@pytest.mark.parametrize(
    ("option", "lost"),
    [
        (f"--extra-index-url {NVIDIA}", False),
        (f"--extra-index-url={CU118}", False),
        ("--extra-index-url https://packages.example.org/simple", True),
    ],
)
def test_an_index_whose_packages_are_known_is_no_loss(option: str, lost: bool) -> None:
    spec = parse_environment_file(f"{option}\ncuml-cu11\n", "requirements.txt", READING)
    assert bool(spec.lost) == lost
    assert set(index_rows(spec, {}).missing) == {"cuml-cu11"}


def test_a_package_that_no_index_of_the_settings_has_is_a_loss() -> None:
    """PyPI has a stub of it, whose build fetches the wheel: `lock --build` could not make it."""
    spec = parse_environment_file("torch==2.9.1\ncuml-cu11\n", "requirements.txt", READING)
    recipe = draft(spec, DraftRequest(family="lab"), BASES)
    assert len(recipe.lost) == 1
    assert NVIDIA in recipe.lost[0]


def test_an_index_of_pytorch_means_its_build() -> None:
    spec = parse_environment_file(f"--extra-index-url {CU118}\ntorch==2.1.2\n", "requirements.txt", READING)
    assert set(index_rows(spec, {}).missing) == {"torch"}
