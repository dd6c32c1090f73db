"""Environments that exist, taken over: what they become, and that nothing of them goes unsaid."""

# ruff: noqa: E501 -- what is told reads as a table
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.cli import main
from imagefactory.errors import RecipeError, UsageError
from imagefactory.extras.importers.draft import FRAMEWORKS, DraftRequest, draft, draft_on
from imagefactory.extras.importers.environments import (
    LIMITS,
    ReadOptions,
    parse_environment_file,
    read_environment_file,
)
from imagefactory.extras.importers.locks import build_variant
from imagefactory.gpu import knowledge
from imagefactory.model import Target
from imagefactory.recipes.edit import RecipeDraft, check_draft, scaffold_on
from imagefactory.recipes.expand import expand_all, select
from imagefactory.recipes.family import Recipe
from imagefactory.recipes.read import read_bases, read_recipes
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.suite import table
from tests.made.diagnostics import reports

FOLDER = Path(__file__).parents[4] / "recipes"
BASES = read_bases(FOLDER)
READING = ReadOptions(pythons=("3.11", "3.13"))

ENVIRONMENT = """\
name: proteins   # as people write them
channels:
  - pytorch
  - https://conda.anaconda.org/nvidia/
  - conda-forge
  - defaults
  - nodefaults
dependencies:
  - python=3.12.4
  - pytorch::pytorch=2.3.1=py3.12_cuda12.1*
  - torchvision = 0.18
  - pytorch-cuda=12.1
  - numpy  >= 1.20, <2
  - scipy >=1.*
  - bioconda::samtools
  - opencv[build=x]
  - pandas==2.*
  - https://conda.example.org/x.conda
  - sel(osx): [libomp]
  - pip
  - pip:
      - Einops[Torch]>=0.7   # nice
      - torch==2.3.1+cu121
      - -r more.txt
      - --extra-index-url https://wheels.example.org/whl/cu121
      - git+https://git.example.org/x/y
      - y @ https://example.org/y.whl
      - "typing-extensions; python_version < '3.8'"
      - "tomli (>=1.0); sys_platform == 'linux'"
      - apex===1.0
prefix: /home/me/envs/proteins
variables:
  OMP_NUM_THREADS: 4
  PATH: x
"""
REQUIREMENTS = """\
# made by pip-compile
--index-url https://index.example.org/simple
torch==2.3.1 \\
    --hash=sha256:00 \\
    --hash=sha256:01
numpy>=1.26,<2  # via torch

./local
-c bounds.txt
tomli==2.0.1 ; python_version < "3.11"
"""
PIXI_6 = """\
version: 6
environments:
  default:
    channels:
    - url: https://conda.anaconda.org/conda-forge/
    - url: https://conda.anaconda.org/pytorch/
    indexes:
    - https://index.example.org/simple
    packages:
      linux-64:
      - conda: https://conda.anaconda.org/conda-forge/linux-64/python-3.12.7-hc5c86c4_0_cpython.conda
      - conda: https://conda.anaconda.org/conda-forge/linux-64/pytorch-2.5.1-cuda126_py312h1763f6d_300.conda
      - conda: https://conda.anaconda.org/conda-forge/noarch/tzdata-2024b-hc8b5060_0.tar.bz2
      - conda: ../local-package
      - pypi: https://index.example.org/einops-0.8.0-py3-none-any.whl
      - pypi: git+https://git.example.org/x
      osx-arm64:
      - conda: https://conda.anaconda.org/conda-forge/osx-arm64/python-3.12.7-h0.conda
  lint:
    channels: []
    packages:
      linux-64: []
packages:
- conda: https://conda.anaconda.org/conda-forge/linux-64/python-3.12.7-hc5c86c4_0_cpython.conda
  sha256: "00"
- pypi: https://index.example.org/einops-0.8.0-py3-none-any.whl
  name: einops
  version: 0.8.0
- pypi: git+https://git.example.org/x
  name: x
  version: "1.0"
"""
PIXI_5 = """\
version: 5
environments:
  cuda:
    channels:
    - url: https://conda.anaconda.org/conda-forge/
    packages:
      linux-64:
      - conda: https://conda.anaconda.org/conda-forge/linux-64/jaxlib-0.4.31-cuda120py311h0_200.conda
      - conda: https://conda.anaconda.org/conda-forge/linux-64/python-3.11.9-h0_0_cpython.conda
      - pypi: https://index.example.org/flax-0.9.0-py3-none-any.whl
packages:
- kind: conda
  name: jaxlib
  version: 0.4.31
- kind: pypi
  name: flax
  version: 0.9.0
  url: https://index.example.org/flax-0.9.0-py3-none-any.whl
"""
CONDA_LOCK = """\
version: 1
metadata:
  content_hash: {linux-64: "00"}
  channels:
  - {url: conda-forge, used_env_vars: []}
  - {url: "https://me:secret@conda.example.org/x", used_env_vars: []}
  platforms: [linux-64, osx-64]
  sources: [environment.yml]
package:
- {name: python, version: 3.11.9, manager: conda, platform: linux-64, dependencies: {}, url: https://conda.anaconda.org/conda-forge/linux-64/python-3.11.9-hb806964_0_cpython.conda, hash: {md5: "0"}, category: main, optional: false}
- {name: tensorflow, version: 2.17.0, manager: conda, platform: linux-64, dependencies: {}, url: https://conda.anaconda.org/conda-forge/linux-64/tensorflow-2.17.0-cuda126py311h5cbc639_203.conda, hash: {md5: "0"}, category: main, optional: false}
- {name: tensorflow, version: 2.17.0, manager: conda, platform: osx-64, dependencies: {}, url: https://conda.anaconda.org/conda-forge/osx-64/tensorflow-2.17.0-cpu_py311_0.conda, hash: {md5: "0"}, category: main, optional: false}
- {name: pytest, version: 8.0.0, manager: conda, platform: linux-64, dependencies: {}, url: https://conda.anaconda.org/conda-forge/noarch/pytest-8.0.0-py_0.conda, hash: {md5: "0"}, category: dev, optional: true}
- {name: rich, version: 13.7.1, manager: pip, platform: linux-64, dependencies: {}, url: https://index.example.org/rich-13.7.1-py3-none-any.whl, hash: {sha256: "0"}, category: main, optional: false}
"""
STACK = """\
family: stack
description: PyTorch from conda
source: conda
framework: pytorch
channels: [pytorch, nvidia, conda-forge]
platform: linux/amd64
base: debian-12
python: "3.12"
capabilities: ["8.0"]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
"""


def drafted(text: str, file: str, request: DraftRequest | None = None) -> tuple[RecipeDraft, Target]:
    """The draft and the target that its text makes."""
    recipe = draft(parse_environment_file(text, file, READING), request or DraftRequest(family="lab"), BASES)
    (target,) = check_draft(recipe.text, "lab", [], BASES)
    return recipe, target


def others() -> list[Recipe]:
    return [*read_recipes(FOLDER), parse_recipe(STACK, "recipes/stack.yaml")]


def target_named(name: str) -> Target:
    return select(expand_all(others(), BASES), [name])[0]


def added(text: str, file: str, on: str) -> tuple[RecipeDraft, Target]:
    below = target_named(on)
    recipe = draft_on(parse_environment_file(text, file, ReadOptions(pythons=(below.python,))), "lab", below)
    (target,) = check_draft(recipe.text, "lab", others(), BASES)
    return recipe, target


# --- environment.yml -----------------------------------------------------------------------------


def test_an_environment_becomes_a_recipe() -> None:
    recipe, target = drafted(ENVIRONMENT, "environment.yml")
    assert target.name == "lab-2.3.1-cu121"
    assert (target.source, target.framework, target.python) == ("conda", "pytorch", "3.12")
    names = ("pytorch", "nvidia", "conda-forge", "bioconda")
    assert target.channels == tuple(f"https://conda.anaconda.org/{name}" for name in names)
    assert target.requirements == (
        "pytorch::pytorch 2.3.1.*", "torchvision 0.18.*", "pytorch-cuda 12.1.*", "numpy <2,>=1.20", "scipy >=1",
        "bioconda::samtools", "pandas 2.*", "pip",
    )  # fmt: skip
    assert target.constraints == ("pytorch::pytorch * py3.12_cuda12.1*", "python 3.12.4.*")
    assert target.pip == ("einops[torch]>=0.7", "tomli>=1.0", "apex==1.0")
    assert target.environment == (("OMP_NUM_THREADS", "4"),)
    assert recipe.text.startswith(
        "# yaml-language-server: $schema=recipe.schema.json\n# From environment.yml."
    )


def lines_of(messages: Sequence[str]) -> list[int]:
    """The lines of the file that are told of."""
    return [int(item.split(":")[1]) for item in messages if re.match(r"[a-zA-Z.-]+:[0-9]+:[0-9]+: ", item)]


def test_nothing_of_an_environment_goes_unsaid() -> None:
    """What conda reads otherwise is a note; what is not in the recipe is a loss."""
    spec = parse_environment_file(ENVIRONMENT, "environment.yml", READING)
    of_pip = range(22, 31)
    assert [line for line in lines_of(spec.notes) if line not in of_pip] == [6, 17]
    assert [line for line in lines_of(spec.lost) if line not in of_pip] == [16, 18, 19, 34]
    messages = lines_of([*spec.notes, *spec.lost])
    assert sorted(line for line in messages if line in of_pip) == [23, 24, 25, 26, 27, 28]
    recipe, _ = drafted(ENVIRONMENT, "environment.yml")
    assert sorted(recipe.messages[:-1]) == sorted((*spec.notes, *spec.lost))
    assert recipe.messages[-1].startswith("torch==2.3.1 of PyPI: the framework comes from conda")
    assert all(f"#   {messages}\n" in recipe.text for messages in recipe.messages)


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        ("[defaults, pytorch, nvidia]", ["pytorch", "nvidia", "conda-forge"]),
        ("[defaults, pytorch, conda-forge, nvidia]", ["pytorch", "conda-forge", "nvidia"]),
        ("[pytorch, nvidia]", ["pytorch", "nvidia", "conda-forge"]),
        ("[pytorch, nodefaults]", ["pytorch"]),
        ("[]", ["conda-forge"]),
    ],
)
def test_conda_forge_is_asked_where_conda_asks_its_defaults_and_takes_no_channels_place(
    channels: str, expected: list[str]
) -> None:
    text = f"channels: {channels}\ndependencies: [pytorch=2.3, pytorch-cuda=12.1, numpy]\n"
    recipe, target = drafted(text, "environment.yml")
    assert target.channels == tuple(f"https://conda.anaconda.org/{name}" for name in expected)
    changed = {*expected} != {*re.findall(r"[a-z-]+", channels)} - {"nodefaults"}
    assert any("conda-forge" in messages for messages in recipe.messages) == changed
    assert parse_environment_file(text, "environment.yml", READING).lost == []


def test_a_build_for_cpus_is_not_made_one_for_gpus() -> None:
    text = "dependencies: [pytorch=2.3, numpy, cpuonly]\n"
    with pytest.raises(UsageError) as caught:
        drafted(text, "environment.yml")
    assert caught.value.code == "framework-conflict"
    assert "CUDA" in caught.value.message
    _, target = drafted(text, "environment.yml", DraftRequest(family="lab", cuda="12.1"))
    assert "cpuonly" not in target.requirements


@pytest.mark.parametrize(
    ("channels", "framework", "expected"),
    [
        ("pytorch, nvidia, conda-forge", "pytorch=2.3", "pytorch-cuda 11.8.*"),
        ("conda-forge, pytorch", "'pytorch::pytorch=1.12.*'", "cudatoolkit 11.8.*"),
        ("conda-forge", "pytorch=2.3", "cuda-version 11.8.*"),
        ("defaults", "tensorflow=2.12", "cuda-version 11.8.*"),
    ],
)
def test_a_cuda_that_the_person_says_chooses_builds(channels: str, framework: str, expected: str) -> None:
    text = f"channels: [{channels}]\ndependencies: [{framework}, numpy]\n"
    _, target = drafted(text, "environment.yml", DraftRequest(family="lab", cuda="11.8"))
    assert expected in target.requirements
    assert any(re.search(r" \* \*cuda\*$", item) for item in target.constraints)


def test_bounds_on_python_hold_together() -> None:
    _, target = drafted(
        "dependencies: [pytorch=2.3, 'python <3.10', pytorch-cuda=12.1, 'python >=3.9']\n", "environment.yml"
    )
    assert target.python == "3.9"


def test_a_framework_in_the_pip_part_makes_a_recipe_of_pypi() -> None:
    text = "dependencies: [python=3.13, libffi, pip, {pip: [torch==2.9.0, rich]}]\n"
    recipe, target = drafted(text, "environment.yml")
    assert (target.name, target.source, target.base) == ("lab-2.9.0-cu128", "pypi", "debian-13")
    assert target.requirements == ("torch==2.9.0.*", "rich")
    assert ["libffi" in line for line in recipe.lost] == [True]
    recipe, target = drafted(text.replace("3.13", "3.13.4"), "environment.yml")
    assert target.python == "3.13"
    assert ["3.13.4" in line for line in recipe.lost] == [True, False]


@pytest.mark.parametrize(
    ("dependencies", "version", "cuda"),
    [
        ("pytorch=2.5, pytorch-cuda=12.4", "2.5", "12.4"),
        ("pytorch 2.5.*, cuda-version 12.6.*", "2.5", "12.6"),
        ("pytorch==1.12.1, cudatoolkit=11.3.1", "1.12.1", "11.3"),
        ("'pytorch=2.1.0=py3.9_cuda11.8_cudnn8.7.0_0'", "2.1.0", "11.8"),
        ("jaxlib=0.4.31=*cuda118*", "0.4.31", "11.8"),
        ("tensorflow-gpu=2.12, cudatoolkit 11.8.*", "2.12", "11.8"),
        ("pytorch=2.4.0.post1, cuda-cudart 12.1.105", "2.4.0", "12.1"),
    ],
)
def test_version_and_cuda_as_the_file_says_them(dependencies: str, version: str, cuda: str) -> None:
    text = f"channels: [conda-forge]\ndependencies: [python=3.11, {dependencies}]\n"
    recipe, target = drafted(text, "environment.yml")
    assert (target.version, target.cuda) == (version, cuda)
    assert recipe.messages == ()


@pytest.mark.parametrize(
    ("dependencies", "code", "hint"),
    [
        ("numpy", "framework-missing", "--framework NAME"),
        ("pytorch", "choice-required", "--framework pytorch=VERSION --cuda VERSION"),
        ("pytorch=2.5", "choice-required", "--framework pytorch=2.5 --cuda VERSION"),
        ("'pytorch >=2', pytorch-cuda=12.1", "choice-required", "--framework pytorch=VERSION --cuda 12.1"),
    ],
)  # fmt: skip
def test_what_the_file_leaves_open_is_asked(dependencies: str, code: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        drafted(f"dependencies: [{dependencies}]\n", "environment.yml")
    assert caught.value.code == code
    assert hint in caught.value.hint


def test_the_cuda_that_is_proposed_is_one_that_the_version_was_released_for() -> None:
    with pytest.raises(UsageError) as caught:
        drafted("dependencies: ['pytorch::pytorch=1.12.*']\n", "environment.yml")
    assert "11.3" in caught.value.hint
    assert "12." not in caught.value.hint


def test_the_person_may_say_it() -> None:
    request = DraftRequest(family="lab", framework="NumPy", version="2.0", cuda="12.4")
    recipe, target = drafted("dependencies: [numpy, 'python >=3.9,<3.11']\n", "environment.yml", request)
    assert (target.name, target.framework, target.python) == ("lab-2.0-cu124", "numpy", "3.10")
    assert target.checks == table.OTHER_CHECKS
    assert len(recipe.messages) == 2
    assert "Python 3.10" in recipe.messages[0]
    assert "conda-forge" in recipe.messages[1]


def test_what_the_person_says_wrong_is_a_fault_before_anything_is_written() -> None:
    with pytest.raises(RecipeError) as caught:
        drafted("dependencies: [pytorch=2.5]\n", "environment.yml", DraftRequest(family="lab", cuda="99.1"))
    assert reports(caught.value.diagnostics, "driver-unknown 99.1")
    assert "--dry-run" in caught.value.hint


def test_no_part_of_a_pin_goes_unsaid() -> None:
    text = (
        "dependencies: ['pytorch=*=*cuda12*', pytorch=2.3, python=3.11.4=h1_0_cpython, pytorch-cuda=12.1]\n"
    )
    _, target = drafted(text, "environment.yml")
    assert (target.version, target.python) == ("2.3", "3.11")
    assert target.constraints == ("pytorch * *cuda12*", "python ==3.11.4", "python * h1_0_cpython")
    two, target = drafted(
        "dependencies: [pytorch=2.3, 'pytorch <2.4', pytorch-cuda=12.1]\n", "environment.yml"
    )
    assert target.version == "2.3"
    assert "pytorch <2.4: the row's version says it" in two.messages


# --- requirements.txt ----------------------------------------------------------------------------


def test_requirements_become_a_recipe() -> None:
    recipe, target = drafted(REQUIREMENTS, "requirements.txt")
    assert (target.name, target.source) == ("lab-2.3.1-cu121", "pypi")
    assert target.requirements == ("torch==2.3.1.*", "numpy<2,>=1.26")
    assert sorted(messages.partition(" (")[0] for messages in recipe.messages) == [
        "Python 3.11 was written: requirements.txt leaves it open",
        "requirements.txt:10:1: 'tomli==2.0.1 ; python_version < \"3.11\"' is not for Python 3.11 on linux-64",
        "requirements.txt:2:1: '--index-url https://index.example.org/simple' is not taken over",
        "requirements.txt:8:1: the project './local' has no pyproject.toml, setup.py or setup.cfg that can be read",
        "requirements.txt:9:1: 'bounds.txt' cannot be read",
    ]


def test_extras_that_bring_cuda_are_written() -> None:
    _, target = drafted(
        "jax[cuda12_local]==0.10.2\nflax\nnvidia-cuda-runtime-cu12==12.9.79\n", "requirements.txt"
    )
    assert (target.cuda, target.requirements[0]) == ("12", "jax[cuda12,cuda12-local]==0.10.2.*")


# --- locks ---------------------------------------------------------------------------------------


def test_the_other_half_of_our_own_lock_is_told() -> None:
    channel = "https://conda.anaconda.org/conda-forge"
    build = "pytorch-2.3.1-cuda121_py311_0"
    text = (
        f"version: 1\nmetadata:\n  channels:\n  - url: {channel}\n  custom_metadata:\n"
        f"    imagefactory.target: lab-2.3-cu121\n    imagefactory.pip: '{'0a' * 32}'\npackage:\n"
        f"- {{name: pytorch, version: 2.3.1, manager: conda, platform: linux-64, url: {channel}/linux-64/{build}.conda}}\n"
    )
    recipe, _ = drafted(text, "lab-2.3-cu121.conda-lock.yml")
    assert recipe.messages[0] == (
        "lab-2.3-cu121.conda-lock.yml:7:23: packages from PyPI are in 'lab-2.3-cu121.requirements.txt' "
        "(add those packages under pip)"
    )


def test_a_pixi_lock_becomes_a_recipe() -> None:
    """Of several channels each package is taken from the one that the lock took it from."""
    _, target = drafted(PIXI_6, "pixi.lock")
    assert target.name == "lab-2.5.1-cu126"
    assert target.channels == ("https://conda.anaconda.org/conda-forge", "https://conda.anaconda.org/pytorch")
    assert target.requirements == ("conda-forge::pytorch 2.5.1.*", "conda-forge::tzdata ==2024b")
    assert target.constraints == ("conda-forge::pytorch * cuda126_*", "python ==3.12.7")
    assert (target.python, target.pip) == ("3.12", ("einops==0.8.0",))
    spec = parse_environment_file(PIXI_6, "pixi.lock", READING)
    assert lines_of(spec.lost) == [14, 16]
    assert spec.notes == []


def test_other_indexes_of_a_pixi_lock_are_told() -> None:
    other = "https://wheels.example.org/whl/cu126"
    text = PIXI_6.replace("    packages:\n", f"    - {other}\n    packages:\n", 1)
    spec = parse_environment_file(text, "pixi.lock", READING)
    assert [item for item in (*spec.lost, *spec.notes) if other in item]


def test_a_pixi_lock_with_one_environment_of_another_name() -> None:
    _, target = drafted(PIXI_5, "pixi.lock")
    assert (target.name, target.framework, target.pip) == ("lab-0.4.31-cu120", "jaxlib", ("flax==0.9.0",))


def test_a_conda_lock_becomes_a_recipe() -> None:
    recipe, target = drafted(CONDA_LOCK, "conda-lock.yml")
    assert (target.name, target.framework) == ("lab-2.17.0-cu126", "tensorflow")
    assert target.requirements == ("tensorflow 2.17.0.*",)
    assert target.constraints == ("tensorflow * cuda126*", "python ==3.11.9")
    assert target.pip == ("rich==13.7.1",)
    spec = parse_environment_file(CONDA_LOCK, "conda-lock.yml", READING)
    assert (lines_of(spec.lost), lines_of(spec.notes)) == ([6], [10])
    assert "secret" not in recipe.text


def test_a_lock_by_way_of_a_mirror_asks_the_channels_that_it_names() -> None:
    """`01-ai/Yi conda-lock.yml`: the heading says conda-forge, the addresses are those of a mirror."""
    text = CONDA_LOCK.replace("https://conda.anaconda.org/", "https://mirror.example.org/anaconda/cloud/")
    spec = parse_environment_file(text, "conda-lock.yml", READING)
    assert spec.channels == ["conda-forge"]
    assert any("https://mirror.example.org/anaconda/cloud/conda-forge" in item for item in spec.notes)


GLIBC = """
- {name: __glibc, version: "2.17", manager: conda, platform: linux-64, dependencies: {}, category: main,
   url: "file:///tmp/tmpx/linux-64/__glibc-2.17-0.tar.bz2"}
- {name: mylib, version: "1.0", manager: conda, platform: linux-64, dependencies: {}, category: main,
   url: "file:///srv/pkgs/linux-64/mylib-1.0-0.tar.bz2"}
"""


def test_virtual_packages_and_files_of_one_machine_bring_no_channel() -> None:
    spec = parse_environment_file(CONDA_LOCK.rstrip("\n") + GLIBC, "conda-lock.yml", READING)
    before = parse_environment_file(CONDA_LOCK, "conda-lock.yml", READING)
    assert (spec.channels, spec.conda) == (before.channels, before.conda)
    messages = set(spec.lost) - set(before.lost)
    assert ["mylib" in item for item in messages] == [True]
    assert len(spec.notes) == len(before.notes) + 1
    listed = (
        "@EXPLICIT\nhttps://conda.anaconda.org/conda-forge/noarch/einops-0.8.0-pyhd8ed1ab_0.conda#sha256:00\n"
        "file:///srv/pkgs/linux-64/mylib-1.0-0.tar.bz2\nfile:///x/linux-64/__glibc-2.17-0.tar.bz2\n"
    )
    spec = parse_environment_file(listed, "lock.txt", READING)
    assert (spec.channels, spec.conda) == (["conda-forge"], ["einops ==0.8.0"])
    assert (lines_of(spec.lost), lines_of(spec.notes)) == ([3], [4])


@pytest.mark.parametrize(
    ("build", "pattern"),
    [
        ("nompi_h2d575fe_105", "nompi_*"),
        ("cuda126_py312h1763f6d_306", "cuda126_*"),
        ("np2py311h912ec1f_1", "np2*"),
        ("20_linux64_openblas", "*_linux64_openblas"),
        ("py3.12_cuda12.1_cudnn8.9.2_0", "*_cuda12.1_cudnn8.9.2_*"),
        ("conda_forge", "conda_forge"),
        ("mkl", "mkl"),
        *((build, "") for build in ("py312h1763f6d_0", "hbcca054_0", "pyhd8ed1ab_0", "py_0", "0", "")),
    ],
)
def test_of_a_locked_build_the_variant_is_kept(build: str, pattern: str) -> None:
    assert build_variant(build) == pattern
    assert not pattern or fnmatchcase(build, pattern)


# --- pixi.toml -----------------------------------------------------------------------------------

PIXI = """\
[workspace]
channels = [{ channel = "https://repo.example.org/own", priority = -1 }, "pytorch", "conda-forge"]
platforms = ["linux-64", { name = "gpu", platform = "linux-64", cuda = "12.4" }]
exclude-newer = "2026-01-01"
[tasks]
install = "pip install x"
[system-requirements]
cuda = "12.1"
[activation]
scripts = ["set.sh"]
[dependencies]
python = "3.11.*"
pytorch = { version = "2.3.*", build-number = ">=1" }
[host-dependencies]
numpy = "<2"
[constraints]
scipy = "<1.14"
[pypi-options]
extra-index-urls = ["https://wheels.example.org/simple"]
dependency-overrides = { rich = "==13" }
[pypi-dependencies]
apex = { version = "*", index = "https://more.example.org/simple" }
[dev]
own = { path = "." }
"""


def test_nothing_of_a_pixi_manifest_goes_unsaid() -> None:
    spec = parse_environment_file(PIXI, "pixi.toml", READING)
    assert spec.channels == ["pytorch", "conda-forge", "https://repo.example.org/own"]
    assert spec.conda == ["pytorch 2.3.*", "numpy <2"]
    assert spec.conda_bounds == ["scipy <1.14"]
    assert spec.python == "3.11.*"
    messages = sorted(lines_of([*spec.lost, *spec.notes]))
    assert messages == [3, 4, 5, 8, 10, 13, 19, 20, 22, 23]
    assert {10, 13, 20, 23} <= {*lines_of(spec.lost)}
    assert {3, 4, 5, 8} == {*lines_of(spec.notes)} - {19, 22}
    _, target = drafted(PIXI, "pixi.toml")
    assert target.cuda == "12.4"  # of the platform that is meant


FAULTS = [
    (PIXI_6, "pixi.lock", "version: 6", "version: 99", "1:10 format-unsupported 99 4 5 6 7"),
    (PIXI_6, "pixi.lock", "  default:", "  other:", "1:1 environment-unknown default other lint"),
    (PIXI_6, "pixi.lock", "      linux-64:\n      - conda: https", "      win-64:\n      - conda: https", "4:5 platform-missing linux-64 win-64 osx-arm64"),
    (CONDA_LOCK, "conda-lock.yml", "version: 1", "version: 2", "1:10 format-unsupported 2 1"),
    (CONDA_LOCK, "conda-lock.yml", "platform: linux-64", "platform: osx-64", "1:1 platform-missing linux-64 osx-64"),
    (ENVIRONMENT, "environment.yml", "- pip\n", "- {{ pip }}\n", "1:1 template-not-filled"),
    (ENVIRONMENT, "environment.yml", "dependencies:", "dependents:", "1:1 no-packages"),
    (ENVIRONMENT, "environment.yml", "name: proteins", "name: &a proteins", "1:7 yaml-unsupported"),
    ("[tool.ruff]\n", "pyproject.toml", "ruff", "ruff", "1:1 no-packages"),
    ("[project\n", "pyproject.toml", "p", "p", "1:9 toml-invalid ]"),
    (ENVIRONMENT, "environment.yml", "name: proteins", "name: 'proteins", "yaml-invalid"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "file", "old", "new", "expected"), FAULTS)
def test_what_cannot_be_read(text: str, file: str, old: str, new: str, expected: str) -> None:
    assert old in text
    with pytest.raises(RecipeError) as caught:
        parse_environment_file(text.replace(old, new), file, READING)
    assert reports(caught.value.diagnostics, expected), caught.value
    assert caught.value.diagnostics[0].location.startswith(f"{file}:")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "environment.yml"
    with pytest.raises(UsageError, match=str(path)) as caught:
        read_environment_file(path, READING)
    assert caught.value.code == "cannot-read-file"
    path.write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match="UTF-8") as caught:
        read_environment_file(path, READING)
    assert caught.value.code == "encoding-invalid"
    with path.open("wb") as file:
        file.truncate(LIMITS.size + 1)
    with pytest.raises(RecipeError) as large:
        read_environment_file(path, READING)
    assert reports(large.value.diagnostics, "file-too-large")


# --- built on a target ---------------------------------------------------------------------------


def test_requirements_on_a_target_of_pypi() -> None:
    recipe, target = added(REQUIREMENTS, "requirements.txt", "pytorch-2.3-cu121")
    assert (target.name, target.on) == ("lab-2.3-cu121", "pytorch-2.3-cu121")
    assert target.requirements[-1] == "numpy<2,>=1.26"
    assert recipe.messages[-1] == "torch==2.3.1: pytorch-2.3-cu121 brings torch 2.3"


def test_an_environment_on_a_target_of_conda() -> None:
    recipe, target = added(ENVIRONMENT, "environment.yml", "stack-2.3-cu121")
    assert target.requirements == (
        "pytorch 2.3.*", "torchvision 0.18.*", "pytorch-cuda 12.1.*", "numpy <2,>=1.20", "scipy >=1", "pandas 2.*",
        "pip",
    )  # fmt: skip
    assert target.pip == ("einops[torch]>=0.7", "tomli>=1.0", "apex==1.0")
    assert recipe.notes[-2:] == (
        "pytorch::pytorch ==2.3.1 py3.12_cuda12.1*: stack-2.3-cu121 brings pytorch 2.3",
        "torch==2.3.1: stack-2.3-cu121 brings pytorch 2.3",
    )
    assert ["bioconda" in line for line in recipe.lost[-2:]] == [True, True]


def test_an_environment_on_a_target_of_pypi() -> None:
    text = "dependencies: [python=3.9, scipy, {pip: [rich]}]\n"
    recipe, target = added(text, "environment.yml", "pytorch-2.3-cu121")
    assert target.requirements[-1] == "rich"
    assert recipe.notes == ()
    (lost,) = recipe.lost
    assert "scipy" in lost


def test_nothing_yet_on_a_target() -> None:
    below = target_named("pytorch-2.3-cu121")
    recipe = scaffold_on("lab", below)
    (target,) = check_draft(recipe.text, "lab", others(), BASES)
    assert target.requirements == below.requirements
    assert recipe.messages == ()


# --- agreement with other tables -----------------------------------------------------------------


def test_the_frameworks_are_those_that_are_known() -> None:
    assert set(FRAMEWORKS.values()) <= set(knowledge.families().values())
    for_others = {"onnxruntime", "tensorflow-cpu", "tensorflow-rocm", "cupy-cuda13x"}
    assert {*FRAMEWORKS, *knowledge.families().values()} == set(table.FRAMEWORKS) - for_others


# --- strangers' files ----------------------------------------------------------------------------

PIECES = [
    "\n", "\r", "\t", "\x00", "\x1b[2J", "\u202e", "\udc80", "é", '"', "'", "\\", "`id`", "$(id)", "{{x}}", "{%", "#", " # [win]", ": ", "- ",
    "&a ", "*a", "!!int ", "---\n", "@", "no", "null", "1e3", "2.10", "=", "==", "=*=*cuda12*", ">=1.*", "::", "https://u:p@x/y", "[build=x]",
    "|", ";", "-r x", "-e .", "+cu121", "; os_name", "defaults", "linux-64", "osx-64", "__cuda", "../", "A" * 300, "9" * 40,
]  # fmt: skip
SAMPLES = [
    (ENVIRONMENT, "environment.yml"),
    (REQUIREMENTS, "requirements.txt"),
    (PIXI_6, "pixi.lock"),
    (PIXI_5, "pixi.lock"),
    (CONDA_LOCK, "conda-lock.yml"),
]


@given(
    sample=st.sampled_from(SAMPLES),
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 12), st.sampled_from(PIECES)),
        min_size=1,
        max_size=4,
    ),
)
def test_near_valid_files_make_recipes_or_errors(
    sample: tuple[str, str], edits: list[tuple[float, int, str]]
) -> None:
    """Whatever stands in them, a draft parses and expands, and what is told is plain text."""
    text, file = sample
    for position, length, piece in edits:
        at = int(position * len(text))
        text = text[:at] + piece + text[at + length :]
    for request in (
        DraftRequest(family="lab"),
        DraftRequest(family="lab", framework="numpy", version="1.0", cuda="12.4"),
    ):
        try:
            recipe = draft(parse_environment_file(text, file, READING), request, BASES)
            check_draft(recipe.text, "lab", [], BASES)
        except (RecipeError, UsageError):
            continue
        for messages in recipe.messages:
            assert messages.isascii()
            assert messages.isprintable()


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name in ("bases.yaml", "pytorch.yaml"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "imagefactory.toml").touch()
    return tmp_path


def call(factory: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["-C", str(factory), *arguments])
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("offline")
def test_new_from_a_file(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (factory / "environment.yml").write_text(ENVIRONMENT)
    source = str(factory / "environment.yml")
    assert call(factory, "recipe", "import", source, "--family", "lab") == 2
    assert not (factory / "recipes" / "lab.yaml").exists()
    assert call(factory, "recipe", "import", source, "--family", "lab", "--dry-run") == 2
    capsys.readouterr()
    assert call(factory, "recipe", "import", source, "--family", "lab", "--json") == 2
    expected = json.loads(capsys.readouterr().out)
    assert len(expected["skipped"]) > 5
    assert expected["path"] == ""
    assert call(factory, "recipe", "import", source, "--family", "lab", "--partial") == 0
    messages = capsys.readouterr()
    assert "environment.yml:6:5: " in messages.err
    assert "wrote " in messages.out
    recipe = parse_recipe((factory / "recipes" / "lab.yaml").read_text(), "recipes/lab.yaml")
    assert recipe.framework == "pytorch"
    assert call(factory, "list", "lab-*") == 0
    assert "lab-2.3.1-cu121" in capsys.readouterr().out
    assert call(factory, "recipe", "import", str(factory / "environment.yml"), "--family", "lab") == 2
    assert "lab.yaml" in capsys.readouterr().err


@pytest.mark.usefixtures("offline")
def test_new_writes_the_index_that_the_settings_have(
    factory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (factory / "requirements.txt").write_text("torch==2.1.2+cu118\nnumpy<2\n")
    source = str(factory / "requirements.txt")
    assert call(factory, "recipe", "import", source, "--family", "lab") == 2
    address = "https://download.pytorch.org/whl/cu118"
    assert f'pytorch-cu118 = "{address}"' in capsys.readouterr().err
    monkeypatch.setenv("IMAGEFACTORY_INDEXES", f"pytorch-cu118={address}")
    assert call(factory, "recipe", "import", source, "--family", "lab") == 0
    recipe = parse_recipe((factory / "recipes" / "lab.yaml").read_text(), "recipes/lab.yaml")
    assert [(row.origins, row.cuda) for row in recipe.matrix] == [((("torch", "pytorch-cu118"),), ("11.8",))]


@pytest.mark.usefixtures("offline")
def test_new_on_a_target(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (factory / "requirements.txt").write_text("einops\n")
    source = str(factory / "requirements.txt")
    assert (
        call(
            factory,
            "recipe",
            "import",
            source,
            "--family",
            "lab",
            "--extends",
            "pytorch-2.3-cu121",
            "--dry-run",
        )
        == 0
    )
    assert "on: pytorch-2.3-cu121" in capsys.readouterr().out
    assert not (factory / "recipes" / "lab.yaml").exists()
    assert call(factory, "recipe", "new", "lab", "--extends", "pytorch-2.3-cu121") == 0
    assert call(factory, "recipe", "import", source, "--family", "lab2", "--extends", "lab-2.3-cu121") == 0
    (factory / "My Lab").mkdir()
    (factory / "My Lab/requirements.txt").write_text("einops\n")
    below = str(factory / "My Lab/requirements.txt")
    assert call(factory, "recipe", "import", below, "--extends", "pytorch-2.3-cu121") == 0
    assert (factory / "recipes/my-lab.yaml").exists()
    for name, family in (
        ("2024 A course, and " + "more " * 9, "a-course-and-more-more-more-more-more-mo"),
        ("24", ""),
    ):
        (factory / name).mkdir()
        below = str((factory / "My Lab/requirements.txt").rename(factory / name / "requirements.txt"))
        code = 0 if family else 2
        assert call(factory, "recipe", "import", below, "--extends", "pytorch-2.3-cu121") == code
        assert not family or (factory / f"recipes/{family}.yaml").exists()
        (factory / "My Lab/requirements.txt").write_text("einops\n")
    capsys.readouterr()
    assert call(factory, "list", "lab2-2.3-cu121") == 0
    assert call(factory, "recipe", "new", "x", "--extends", "pytorch-2.4-cu121") == 3
    messages = capsys.readouterr().err
    assert "hint: pytorch has pytorch-1.13-cu117, " in messages
    assert "did you mean" not in messages


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["new", "X", "--extends", "pytorch-2.3-cu121"], "'X' is not a valid name for a family"),
        (["new", "x", "--framework", "torch=2.3"], "'torch=2-3' is not a valid name for a framework"),
        (
            ["new", "x", "--extends", "pytorch-2.3-cu121", "--framework", "torch"],
            "it comes from pytorch-2.3-cu121",
        ),
        (["new", "x", "--extends", "pytorch-2.3-cu121", "--source", "conda"], "--source"),
        (
            ["import", "requirements.txt", "--family", "x", "--environment", "gpu"],
            "has no environments to choose from",
        ),
        (
            ["import", "environment.yml", "--family", "x", "--environment", "gpu"],
            "has no environments to choose from",
        ),
        (
            ["import", "requirements.txt", "--family", "x", "--framework", "torch>=2"],
            "'torch>' is not a valid name for a framework",
        ),
        (
            ["import", "requirements.txt", "--family", "x", "--framework", "torch=2.*"],
            "version cannot be '2.*'",
        ),
        (["import", "requirements.txt", "--family", "x", "--cuda", "12.1.0"], "cuda cannot be '12.1.0'"),
        (["import", "requirements.txt", "--family", "x", "--build-arg", "A=1"], "--build-arg"),
        (["import", "Dockerfile", "--family", "x", "--build-arg", "A"], "'A' is not NAME=VALUE"),
        (["import", "Dockerfile", "--family", "x", "--build-arg", "A B=1"], "'A B=1' is not NAME=VALUE"),
        (["import", "Dockerfile", "--family", "x", "--build-arg", "B=1"], "'B'"),
        (
            ["import", "/nonexistent/environment.yml", "--family", "x"],
            "cannot read /nonexistent/environment.yml: ",
        ),
    ],
)
def test_arguments_that_do_not_fit(
    factory: Path,
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (factory / "requirements.txt").write_text("torch==2.3\n")
    (factory / "environment.yml").write_text(ENVIRONMENT)
    (factory / "Dockerfile").write_text("FROM python:3.11\nARG A\nRUN pip install torch==$A\n")
    monkeypatch.chdir(factory)
    assert call(factory, "recipe", *arguments) == 2
    assert expected in capsys.readouterr().err
    assert not (factory / "recipes" / "x.yaml").exists()


@pytest.mark.usefixtures("offline")
def test_print_shows_a_draft_with_faults(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (factory / "environment.yml").write_text("dependencies: [pytorch=2.5]\n")
    request = ("recipe", "import", str(factory / "environment.yml"), "--family", "lab", "--cuda", "99.1")
    assert call(factory, *request) == 2
    assert "note: the channel conda-forge was written" in capsys.readouterr().err
    assert call(factory, *request, "--dry-run") == 2
    messages = capsys.readouterr()
    assert 'cuda: ["99.1"]' in messages.out
    assert "CUDA 99.1" in messages.err
