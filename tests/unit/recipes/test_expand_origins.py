"""Which packages of a recipe come from a named index."""

from __future__ import annotations

import pytest

from imagefactory.errors import RecipeError
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.recipe import parse_recipe
from tests.made.diagnostics import reports
from tests.made.values import make_base

RECIPE = """\
family: pytorch
description: small
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
packages: [numpy]
index: {Torch: cu128, torch_vision: cu128}
matrix:
  - version: "2.3"
    cuda: ["12.8"]
  - version: "2.4"
    cuda: ["12.1"]
    packages: [torch-vision]
    index: {torch: cu121, numpy: lab}
"""
ON = """\
family: lab
description: small
on: pytorch-2.4-cu121
packages: [idna, numpy]
index: {idna: own, numpy: own}
"""


def origins(*texts: str) -> dict[str, dict[str, str]]:
    recipes = [parse_recipe(text, "recipes/x.yaml") for text in texts]
    return {target.name: dict(target.origins) for target in expand_all(recipes, [make_base()])}


def test_a_row_has_those_of_what_it_asks_for() -> None:
    """Also of a CUDA that the framework's wheels on PyPI are not built for."""
    assert origins(RECIPE, ON) == {
        "pytorch-2.3-cu128": {"torch": "cu128"},
        "pytorch-2.4-cu121": {"torch": "cu121", "torch-vision": "cu128", "numpy": "lab"},
        "lab-2.4-cu121": {"torch": "cu121", "torch-vision": "cu128", "numpy": "lab", "idna": "own"},
    }


def test_a_wheel_of_the_factory_is_its_exact_version() -> None:
    wheel = "./wheels/My_Lib-1.0rc1+lab_2-py3-none-any.whl"
    above = ON.replace("[idna, numpy]", f"[idna, numpy, {wheel}]")
    recipes = [parse_recipe(text, "recipes/x.yaml") for text in (RECIPE, above)]
    lab, *_ = expand_all(recipes, [make_base()])
    assert lab.requirements[-1] == "my-lib==1.0rc1+lab.2"
    assert dict(lab.origins)["my-lib"] == wheel
    inside = RECIPE.replace("[torch-vision]", f"[torch-vision, {wheel}]")
    assert origins(inside)["pytorch-2.4-cu121"]["my-lib"] == wheel
    assert "my-lib" not in origins(inside)["pytorch-2.3-cu128"]


def test_above_conda_such_packages_stand_under_pip() -> None:
    conda = RECIPE.replace("source: pypi", "source: conda\nchannels: [conda-forge]")
    conda = conda.partition("index:")[0] + 'matrix:\n  - {version: "2.4", cuda: ["12.1"]}\n'
    with pytest.raises(RecipeError) as caught:
        origins(conda, ON)
    assert reports(caught.value.diagnostics, "x.yaml:1:1 not-a-channel-package 'idna' pytorch-2.4-cu121")
    assert origins(conda, ON.replace("packages", "pip"))["lab-2.4-cu121"] == {"idna": "own", "numpy": "own"}


def test_of_conda_the_part_from_pypi_has_them() -> None:
    conda = RECIPE.replace("source: pypi", "source: conda\nchannels: [conda-forge]\npip: [rich]")
    conda = conda.replace("{Torch: cu128, torch_vision: cu128}", "{rich: lab}")
    conda = conda.replace("    index: {torch: cu121, numpy: lab}\n", "")
    assert set(map(str, origins(conda).values())) == {"{'rich': 'lab'}"}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("numpy: lab", "triton: lab", "17:27 index-unused triton"),
        ("Torch: cu128,", "mkl: cu128,", "10:9 index-unused mkl"),
        (
            "numpy: lab",
            "numpy: 'https://x'",
            "17:34 value-invalid numpy https://x",
        ),
        ("numpy: lab", "NumPy: lab, numpy: lab", "17:39 duplicate-key numpy"),
        ("{Torch: cu128, torch_vision: cu128}", "cu128", "10:8 not-a-mapping index"),
        (
            "[numpy]",
            "[numpy, ./a/m-1-py3-none-any.whl, ./b/m-2-py3-none-any.whl]",
            "9:45 origin-conflict m",
        ),
        (
            "[numpy]",
            "[numpy, ../m-1-py3-none-any.whl]",
            "9:19 value-invalid packages ../m-1-py3-none-any.whl",
        ),
        ("[numpy]", "[numpy, ./m.whl]", "9:19 value-invalid packages ./m.whl"),
        (
            "[torch-vision]",
            "[torch-vision, ./numpy-1-py3-none-any.whl]",
            "16:30 origin-conflict numpy lab",
        ),
        ("numpy: lab", "'numpy<2': lab", "17:27 value-invalid index numpy<2"),
    ],
)
def test_faults_are_told_with_their_place(old: str, new: str, told: str) -> None:
    assert old in RECIPE
    with pytest.raises(RecipeError) as caught:
        origins(RECIPE.replace(old, new))
    assert reports(caught.value.diagnostics[:1], f"recipes/x.yaml:{told}"), caught.value


@pytest.mark.parametrize(
    ("entry", "allowed"),
    [
        (".", True),
        ("./src/my_lib", True),
        (f"git+https://git.example.org/lab/ops.git@{'0a' * 20}", True),
        (f"git+https://git.example.org:8443/lab/ops@{'0a' * 20}#subdirectory=python/ops", True),
        ("./wheels/bad.whl", False),
        ("..", False),
        ("../lab", False),
        ("./src/../../lab", False),
        ("./.hidden", False),
        ("/srv/lab", False),
        ("git+https://git.example.org/lab/ops@main", False),
        (f"git+ssh://git@git.example.org/lab/ops@{'0a' * 20}", False),
        (f"git+https://user:secret@git.example.org/lab/ops@{'0a' * 20}", False),
        (f"git+https://git.example.org/../ops@{'0a' * 20}", False),
        (f"git+https://git.example.org/ops@{'0a' * 20}#subdirectory=../a", False),
        (f"git+https://git.example.org/ops@{'0a' * 20} --option", False),
    ],
)
def test_folders_and_commits_are_sources_without_a_wheel(entry: str, allowed: bool) -> None:
    text = RECIPE.replace("packages: [numpy]", f'packages: [numpy, "{entry}"]')
    if not allowed:
        with pytest.raises(RecipeError):
            parse_recipe(text, "recipes/x.yaml")
        return
    for target in expand_all([parse_recipe(text, "recipes/x.yaml")], [make_base()]):
        assert target.sources == (entry,)
        assert not any(one.startswith((".", "git")) for one in target.requirements)


def test_a_target_of_conda_has_sources_under_pip_alone() -> None:
    conda = RECIPE.replace("source: pypi", "source: conda\nchannels: [conda-forge]\npip: [./src]")
    conda = conda.replace("index: {Torch: cu128, torch_vision: cu128}\n", "")
    conda = conda.replace("    index: {torch: cu121, numpy: lab}\n", "")
    recipe = parse_recipe(conda, "recipes/x.yaml")
    assert {target.sources for target in expand_all([recipe], [make_base()])} == {("./src",)}
    with pytest.raises(RecipeError):
        parse_recipe(conda.replace("packages: [numpy]", "packages: [./src]"), "recipes/x.yaml")
    above = ON.replace("[idna, numpy]", "[./own]").replace("index: {idna: own, numpy: own}\n", "")
    with pytest.raises(RecipeError) as caught:
        expand_all([recipe, parse_recipe(above, "recipes/lab.yaml")], [make_base()])
    assert reports(caught.value.diagnostics, "not-a-channel-package './own' 'pip'")
    above = above.replace("packages: [./own]", "pip: [./own]")
    lab = expand_all([recipe, parse_recipe(above, "recipes/lab.yaml")], [make_base()])[0]
    assert lab.sources == ("./own",)
