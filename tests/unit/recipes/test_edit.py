"""A row more: what is written, where, and what stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import UsageError
from imagefactory.gpu import knowledge
from imagefactory.recipes.bases import all_bases
from imagefactory.recipes.edit import RecipeAddition, add_row, omitted_companions
from imagefactory.recipes.expand import expand
from imagefactory.recipes.read import read_bases
from imagefactory.recipes.recipe import parse_recipe
from tests.made.errors import fails
from tests.made.values import make_target

FOLDER = Path(__file__).parents[3] / "recipes"


SMALL = """\
family: {family}
description: Torch with torchvision
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
matrix:
- version: "2.5"
  cuda: ["12.4"]
  environment:
    OMP_NUM_THREADS: "1"
  packages: [torchvision==0.20.*, "lightning[extra]<3"]
# of the next key
constraints: [numpy<3]
"""


def add(family: str, version: str, cuda: str = "") -> RecipeAddition:
    text = (FOLDER / f"{family}.yaml").read_text()
    return add_row(text, parse_recipe(text, f"recipes/{family}.yaml"), version, cuda)


def test_the_row_stands_after_the_older_one_with_the_companions_of_its_version() -> None:
    """The blank line between, and the comments above the next row, stay."""
    addition = add("pytorch", "2.6")
    assert addition.row == (
        '  - version: "2.6"\n    cuda: ["12.4"]\n'
        "    packages: [torchvision==0.21.*, torchaudio==2.6.*, setuptools]\n    constraints: [setuptools<82]"
    )
    before, after = (FOLDER / "pytorch.yaml").read_text(), addition.text
    assert after.replace(f"{addition.row}\n\n", "") == before
    assert after.index('version: "2.5"') < after.index('version: "2.6"') < after.index('version: "2.7"')
    assert addition.notes == ("copied from the row of 2.5 (recipes/pytorch.yaml:37:5): check its bounds",)


@pytest.mark.parametrize(
    ("family", "version", "cuda", "lines"),
    [
        (
            "pytorch",
            "2.2",
            "",
            ['cuda: ["12.1"]', "packages: [torchvision==0.17.*, torchaudio==2.2.*, setuptools]"],
        ),
        ("pytorch", "2.8", "", ['cuda: ["12.8"]', "packages: [torchvision==0.23.*, torchaudio==2.8.*]"]),
        (
            "pytorch",
            "2.12",
            "",
            [
                'cuda: ["13.0"]',
                "packages: [torchvision==0.27.*]",
                'capabilities: ["7.5", "8.0", "8.6", "8.9", "9.0", "12.0"]',
            ],
        ),
        ("jax", "0.7.0", "12", ['cuda: ["12"]', "extras: [cuda12]"]),
        ("jax", "0.7.0", "13", ['cuda: ["13"]', "extras: [cuda13]", "constraints: [nvidia-cublas>=13.2]"]),
        ("jax", "0.11.0", "13", ["base: debian-13", 'python: "3.13"']),
        ("tensorflow", "2.17", "", ['cuda: ["12.3"]', "extras: [and-cuda]", "constraints: [setuptools<82]"]),
        ("onnxruntime", "1.20", "12", ["constraints: [nvidia-cudnn-cu12<9.11]"]),
    ],
)
def test_a_row_fits_its_version_and_cuda(family: str, version: str, cuda: str, lines: list[str]) -> None:
    addition = add(family, version, cuda)
    assert not [line for line in lines if f"    {line}" not in addition.row.split("\n")]
    recipe = parse_recipe(addition.text, f"recipes/{family}.yaml")
    made = expand(recipe, all_bases(read_bases(FOLDER), [recipe]))
    assert [target for target in made if target.version == version]


def test_what_a_version_is_known_to_need_is_not_repeated() -> None:
    """A solve adds it: numpy<2 for 2.2 too, and setuptools<70 no longer."""
    assert "constraints" not in add("pytorch", "2.2").row


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        ("2.8", []),
        ("2.12", ["without torchaudio: no release of torchaudio for torch 2.12 is known"]),
        (
            "9.9",
            [
                f"without {one}: the companions of torch 9.9 are not known"
                for one in ("torchaudio", "torchvision")
            ],
        ),
    ],
)
def test_a_companion_that_the_new_row_lacks_is_named(version: str, missing: list[str]) -> None:
    addition = add("pytorch", version, "13.0" if version == "9.9" else "")
    assert [line.partition(";")[0] for line in addition.notes if line.startswith("without")] == missing


def test_a_companion_without_wheels_for_the_python_of_the_row_is_named() -> None:
    text = SMALL.format(family="small").replace('"3.11"', '"3.14"')
    addition = add_row(text, parse_recipe(text, "recipes/small.yaml"), "2.6")
    assert "torchvision" not in addition.row
    assert [line for line in addition.notes if "torchvision 0.21 has no wheels for Python 3.14" in line]


def test_a_form_of_its_own_is_kept() -> None:
    text = SMALL.format(family="small")
    addition = add_row(text, parse_recipe(text, "recipes/small.yaml"), "2.6")
    assert addition.text == text.replace(
        '<3"]\n',
        '<3"]\n\n- version: "2.6"\n  cuda: ["12.4"]\n'
        '  packages: [torchvision==0.21.*, "lightning[extra]<3"]\n',
    )
    assert addition.notes[1] == "not copied from that row: environment"


@pytest.mark.parametrize(
    ("family", "version", "code", "what", "hint"),
    [
        ("pytorch", "2.15", "row-exists", "torch 2.15 for CUDA 13.2", "--cuda"),
        ("jax", "0.10.1", "choice-required", "jax 0.10.1 comes with CUDA 12 and 13", "--cuda 13"),
        ("pytorch", "9.9", "choice-required", "torch 9.9", "--cuda"),
        ("pytorch-conda", "2.6", "add-not-supported", "'pytorch-conda'", "PyPI"),
        ("pytorch-onnx", "2.6", "add-not-supported", "'pytorch-onnx'", "PyPI"),
    ],
)
def test_what_has_no_one_answer(family: str, version: str, code: str, what: str, hint: str) -> None:
    with fails(code) as caught:
        add(family, version, "")
    assert what in caught.value.message
    assert hint in caught.value.hint


def test_rows_in_one_line_are_left_to_the_person() -> None:
    text = SMALL.format(family="small")
    head = text[: text.index("matrix:")]
    flow = f'{head}matrix: [{{version: "2.5", cuda: ["12.4"]}}]\n'
    with pytest.raises(UsageError, match=r"recipes/small\.yaml:") as caught:
        add_row(flow, parse_recipe(flow, "recipes/small.yaml"), "2.6")
    assert caught.value.code == "add-not-supported"


def test_rows_for_cpus_are_no_rows_to_go_by() -> None:
    assert "numba-cuda[cu13]" in add("numba", "0.69", "13").row
    with pytest.raises(UsageError, match="'numba'") as caught:
        add("numba", "0.69", "none")
    assert caught.value.code == "add-not-supported"
    assert "CPUs" in caught.value.hint
    assert "recipes/numba.yaml" in caught.value.hint
    alone = SMALL.replace("{family}", "small").replace('["12.4"]', "[none]")
    with pytest.raises(UsageError, match="'small'") as caught:
        add_row(alone, parse_recipe(alone, "recipes/small.yaml"), "2.6")
    assert caught.value.code == "add-not-supported"


def test_a_row_for_another_platform_alone_is_none_to_go_by() -> None:
    """What its capabilities are is a matter of the machines that have such processors."""
    assert '"12.0"' in add("numba", "0.69", "13").row
    assert "platforms" not in add("numba", "0.69", "13").row


PROMISE = "PyTorch with torchvision and torchaudio where they exist"


def told(**more: Any) -> str:
    given = {
        "framework": "torch",
        "version": "2.6",
        "description": PROMISE,
        "requirements": ("torch==2.6.*",),
    }
    return omitted_companions(make_target(**given | more))


def test_a_row_without_what_its_family_promises_is_told() -> None:
    line = told()
    assert "torch 2.6 without torchvision and torchaudio, which the description" in line
    assert line.endswith("(write packages: [torchvision==0.21.*, torchaudio==2.6.*])")
    one = told(requirements=("torch==2.6.*", "torchvision==0.21.*"))
    assert one.endswith("(write packages: [torchaudio==2.6.*])")


@pytest.mark.parametrize(
    "more",
    [
        {"requirements": ("torch==2.6.*", "torchvision==0.21.*", "torchaudio")},
        {"description": "PyTorch alone"},
        {"version": "1.13"},  # whose companions have no wheels for Python 3.11
        {"version": "2.15", "requirements": ("torch==2.15.*", "torchvision==0.29.*")},  # torchaudio ended
        {"version": "99.0"},
        {"source": "conda"},
    ],
)
def test_what_is_there_or_cannot_be_is_not_missed(more: dict[str, Any]) -> None:
    assert told(**more) == ""


def test_companions_go_by_version_and_python() -> None:
    found = {one.package: one.series for one in knowledge.companions("torch", "2.3.1", "3.12")}
    assert found == {"torchvision": "0.18", "torchaudio": "2.3", "torchtext": "0.18"}
    assert knowledge.companions("torch", "2.30", "3.12") == knowledge.companions("jax", "2.3", "3.12") == ()
