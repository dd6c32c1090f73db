"""Recipes and bases: what they become, and what every kind of fault says."""

# ruff: noqa: E501 -- one fault per line reads as a table
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from imagefactory.errors import NothingSelectedError, RecipeError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.model import Base, Target, Where
from imagefactory.recipes import scaffold, values
from imagefactory.recipes.bases import all_bases, parse_bases
from imagefactory.recipes.expand import expand, expand_all, expand_sound, select
from imagefactory.recipes.read import read_bases, read_recipes
from imagefactory.recipes.reader import MAX_FAULTS
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.recipes.yaml_tree import MAX_BYTES, MAX_DEPTH, MAX_NODES
from imagefactory.suite.gpu import table as gpu_table

ROOT = Path(__file__).parents[3]
FILE = "recipes/torch.yaml"

RECIPE = """\
family: pytorch
description: PyTorch, small
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["9.0", "8.0"]
checks: [import, packages]
packages: [numpy]
constraints: ["scipy < 2, >=1"]
environment:
  OMP_NUM_THREADS: "1"
matrix:
  - version: "2.3"
    cuda: ["12.1"]
    packages: ["Torch.Vision==0.18.*"]
  - version: "2.9"
    cuda: ["12.8"]
    python: "3.13"
    base: debian-13
    capabilities: ["10.0"]
    environment: {}
"""
BASES = """\
bases:
  - {name: debian-12, suite: bookworm, python: "3.11", glibc: "2.36", packages: [python3], public: a.b/c:12}
  - {name: debian-13, suite: trixie, python: "3.13", glibc: "2.41", packages: [python3, gcc], public: a.b/c:13}
"""


CONDA_FORGE = ("https://conda.anaconda.org/conda-forge",)


def faults_of(text: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        expand(parse_recipe(text, FILE), bases())
    return caught.value.faults


def bases() -> tuple[Base, ...]:
    return parse_bases(BASES, "recipes/bases.yaml")


def edited(old: str, new: str) -> str:
    assert RECIPE.count(old) >= 1
    return RECIPE.replace(old, new, 1)


# --- what a recipe becomes -----------------------------------------------------------------------


def test_targets_of_a_recipe() -> None:
    first, second = expand(parse_recipe(RECIPE, FILE), bases())
    assert first == Target(
        name="pytorch-2.3-cu121",
        family="pytorch",
        description="PyTorch, small",
        source="pypi",
        framework="torch",
        version="2.3",
        cuda="12.1",
        python="3.11",
        base="debian-12",
        platform="linux/amd64",
        capabilities=("8.0", "9.0"),
        checks=("packages", "import"),
        requirements=("torch==2.3.*", "numpy", "torch-vision==0.18.*"),
        constraints=("scipy<2,>=1",),
        environment=(("OMP_NUM_THREADS", "1"),),
        where=Where(file=FILE, line=15, column=5),
    )
    assert second.name == "pytorch-2.9-cu128-py313"
    assert second.capabilities == ("10.0",)
    assert second.environment == ()
    assert second.requirements == ("torch==2.9.*", "numpy")


def test_a_platform_that_is_not_the_familys_is_in_the_name() -> None:
    recipe = parse_recipe(RECIPE, FILE)
    row = replace(recipe.matrix[0], platforms=("linux/amd64", "linux/arm64"))
    amd, arm = expand(replace(recipe, matrix=(row,)), bases())
    assert (amd.name, amd.base) == ("pytorch-2.3-cu121", "debian-12")
    assert (arm.name, arm.base) == ("pytorch-2.3-cu121-arm64", "debian-12-arm64")


def test_a_base_for_another_platform_has_a_name_of_its_own() -> None:
    recipe = parse_recipe(edited("platform: linux/amd64", "platform: linux/arm64"), FILE)
    made, targets, faults = expand_sound([recipe], bases(), {})
    assert targets[0].name == "pytorch-2.3-cu121"
    assert faults == ()
    by_name = {base.name: base for base in made}
    assert replace(by_name["debian-12"], name="debian-12-arm64", platform="linux/arm64") in made
    assert by_name[targets[0].base].platform == "linux/arm64"
    taken = replace(bases()[0], name="debian-12-arm64")
    said = expand_sound([recipe], (*bases(), taken), {})[2]
    assert "its base for linux/arm64 would be 'debian-12-arm64'" in said[0]


def test_defaults_and_several_cudas() -> None:
    text = edited("checks: [import, packages]\n", "").replace(
        '"2.3"\n    cuda: ["12.1"]', '"99.0"\n    cuda: ["12", "13.0"]\n    extras: [B_x, a]'
    )
    first, second, _ = expand(parse_recipe(text, FILE), bases())
    assert (first.name, second.name) == ("pytorch-99.0-cu12", "pytorch-99.0-cu130")
    assert first.checks == values.default_checks("torch")
    assert first.requirements[0] == "torch[b-x,a]==99.0.*"


def test_checks_of_the_gpu_suite_can_be_waived() -> None:
    text = edited("packages: [numpy]\n", "packages: [numpy]\nwaive: [portability, jit]\n")
    first, second = expand(parse_recipe(text, FILE), bases())
    assert first.waive == second.waive == ("jit", "portability")
    text = text.replace('cuda: ["12.8"]\n', 'cuda: ["12.8"]\n    waive: []\n')
    first, second = expand(parse_recipe(text, FILE), bases())
    assert (first.waive, second.waive) == (("jit", "portability"), ())
    for row, waived in (("", ("jit", "portability")), ("    waive: [training]\n", ("training",))):
        built_on = f"family: more\ndescription: More\nmatrix:\n  - on: {first.name}\n{row}"
        found = expand_all([parse_recipe(text, FILE), parse_recipe(built_on, "b.yaml")], bases())
        assert next(one for one in found if one.family == "more").waive == waived


def test_nothing_can_be_waived_that_tells_a_gpu_from_none() -> None:
    """Nor what tells the suite's own mistakes: a pass without these would be worth nothing."""
    for part in ("driver", "native", "ptx"):
        assert not set(gpu_table.PARTS[part]) & set(values.WAIVABLE)
    assert not any("controls" in check for check in values.WAIVABLE)


def test_windows_lines_and_comments_beyond_ascii_are_fine() -> None:
    text = "# größer ≤ 日本 \U0001f600\r\n" + RECIPE.replace("\n", "\r\n")
    assert parse_recipe(text, FILE).family == "pytorch"


# --- faults: place, what is wrong, what to write -------------------------------------------------

FAULTS = [
    # keys
    ("packages: [numpy]", "pakages: [numpy]", "10:1: unknown key 'pakages' (did you mean 'packages'?)"),
    ("    cuda: [", "    cudda: [", "16:5: unknown key 'cudda' (did you mean 'cuda'?)"),
    ("    cuda: [", "    cudda: [", "15:5: 'cuda' is missing (write cuda: [\"12.1\"])"),
    ("source: pypi", "zzz: 1", "3:1: unknown key 'zzz' (the keys here are family, description, source, "),
    ("framework: torch\n", "", "1:1: 'framework' is missing (write framework: torch)"),
    ("source: pypi", "family: b", "3:1: 'family' is already set at recipes/torch.yaml:1:1 (remove one of them)"),
    ("OMP_NUM_THREADS: \"1\"", "A: x\n  A: y", "14:3: 'A' is already set at recipes/torch.yaml:13:3 (remove one"),
    ("source: pypi", "<<: {}", "3:1: merge keys (<<) are not used here (write the values out)"),
    ("source: pypi", "[a]: b", "3:1: a key cannot be a list (write a plain word)"),
    # numbers and other things that YAML makes
    ('"2.9"', "2.10", "18:14: 'version' must be text, and without quotes '2.10' is a number in YAML (write it in quotes: \"2.10\")"),
    ('python: "3.11"', "python: 3.11", "7:9: 'python' must be text, and without quotes '3.11' is a number in YAML (write it in quotes: \"3.11\")"),
    ("family: pytorch", "family: no", "1:9: 'family' must be text, and without quotes 'no' is true or false in YAML (write it in quotes: \"no\")"),
    ('["12.1"]', "[12.1]", "16:12: 'cuda' must be text, and without quotes '12.1' is a number in YAML (write it in quotes: \"12.1\")"),
    ("family: pytorch", "family: 2020-01-01", "1:9: 'family' must be text, and without quotes '2020-01-01' is a timestamp in YAML (write it in quotes: lower-case"),
    ('THREADS: "1"', "THREADS: 1", "13:20: 'OMP_NUM_THREADS' must be text, and without quotes '1' is a number in YAML (write it in quotes: \"1\")"),
    ("family: pytorch", "family:", "1:8: 'family' must be text, not nothing (write lower-case"),
    # shapes
    ("family: pytorch", "family: [a]", "1:9: 'family' must be text, not a list (write lower-case"),
    ("packages: [numpy]", "packages: numpy", "10:11: 'packages' must be a list, not text (write packages: [...] with a package"),
    ('cuda: ["12.1"]', "cuda: []", "16:11: 'cuda' is empty (write cuda: [...] with the CUDA version in quotes"),
    ("checks: [import, packages]", "checks: []", "9:9: 'checks' is empty (write checks: [...] with one of the known checks: packages, "),
    ('  OMP_NUM_THREADS: "1"', "  - A", "13:3: 'environment' must hold names and values, not a list (write NAME: \"value\")"),
    ('capabilities: ["9.0", "8.0"]\n', "", "14:5: neither the row nor the family has 'capabilities' (write capabilities: [\"8.0\"]"),
    # values
    ("family: pytorch", "family: Py_Torch", "1:9: 'family' cannot be 'Py_Torch' (write lower-case letters, digits and single hyphens, such as \"pytorch\")"),
    ("family: pytorch", 'family: "pytorch\\n"', "1:9: 'family' cannot be 'pytorch\\n' (write lower-case"),
    ("family: pytorch", "family: " + "a" * 41, f"1:9: 'family' cannot be '{'a' * 41}' of 41 characters, more than 40 (write"),
    ("PyTorch, small", '"{{7*7}}"', "2:14: 'description' cannot be '{{7*7}}' (write one line of letters"),
    ("PyTorch, small", "|\n  a\n  b", "2:14: 'description' cannot be 'a\\nb\\n' (write one line"),
    ("PyTorch, small", "$(id)", "2:14: 'description' cannot be '$(id)' (write one line"),
    ("PyTorch, small", "größer", "2:14: 'description' cannot be 'gr\\xf6\\xdfer' (write one line"),
    ("source: pypi", "source: pip", "3:9: 'source' cannot be 'pip' (write \"pypi\" or \"conda\")"),
    ("source: pypi", "source: pypi\nchannels: [conda-forge]", "4:1: 'channels' belongs to source conda (remove it, or write source: conda)"),
    ("source: pypi", "source: pypi\npip: [numpy]", "4:1: 'pip' belongs to source conda (write these under 'packages')"),
    ("source: pypi", "source: conda", "1:1: 'channels' is missing (write channels: [conda-forge])"),
    ('["12.1"]', '["12.1"]\n    virtual: {cuda: "12.4"}', "17:5: 'virtual' belongs to source conda (remove it, or write source: conda)"),
    ('["12.1"]', '["12.1"]\n    on: jax-0.10-cu12', "17:5: 'on' stands in a family that has a source of its own (give what is built on"),
    (
        "linux/amd64",
        "linux/riscv64",
        "5:11: 'platform' cannot be 'linux/riscv64' (write \"linux/amd64\" or \"linux/arm64\")",
    ),
    ("framework: torch", "framework: torch==2", "4:12: 'framework' cannot be 'torch==2' (write a distribution's name without"),
    ('["9.0"', '["sm_90"', "8:16: 'capabilities' cannot be 'sm_90' (write a compute capability in quotes, such as \"8.0\","),
    ('["9.0"', '["8.0"', "8:23: '8.0' stands in 'capabilities' twice, first at recipes/torch.yaml:8:16 (remove one)"),
    ("[import,", "[imports,", "9:10: 'checks' cannot be 'imports' (did you mean 'import'?)"),
    ("packages: [numpy]", "waive: [jid]", "10:9: 'waive' cannot be 'jid' (did you mean 'jit'?)"),
    ("packages: [numpy]", "waive: [vector-add]", "10:9: 'waive' cannot be 'vector-add' (write a check of the GPU suite: matmul, "),
    ("[import,", "[gpu-burn,", "9:10: 'checks' cannot be 'gpu-burn' (write one of the known checks: packages, libraries, "),
    ('"2.3"', '">=2.3"', "15:14: 'version' cannot be '>=2.3' (write the version in quotes, such as \"2.3\", and no bounds)"),
    ('["12.1"]', '["cu121"]', "16:12: 'cuda' cannot be 'cu121' (write the CUDA version in quotes, such as \"12.1\" or \"12\", or none for CPUs alone)"),
    ("[numpy]", '["numpy @ https://x/y.whl"]', "10:12: 'packages' cannot be 'numpy @ https://x/y.whl' (write a package with bounds"),
    ("[numpy]", '["numpy; python_version<3"]', "10:12: 'packages' cannot be 'numpy; python_version<3' (write a package with bounds"),
    ("[numpy]", '["-r /etc/passwd"]', "10:12: 'packages' cannot be '-r /etc/passwd' (write a package with bounds"),
    ("[numpy]", '["numpy>=1.*"]', "10:12: 'packages' cannot be 'numpy>=1.*' (write a package with bounds"),
    ("[numpy]", "[TORCH>2]", "10:12: 'torch' is the framework and may not stand in 'packages' (set its version by the row's"),
    ('["scipy < 2, >=1"]', "[scipy]", "11:15: 'constraints' cannot be 'scipy' (write a package and its bounds"),
    ('["scipy < 2, >=1"]', '["scipy[x]<2"]', "11:15: 'constraints' cannot be 'scipy[x]<2' (write a package and its bounds"),
    ("OMP_NUM_THREADS", "omp", "13:3: 'environment' cannot be 'omp' (write capital letters, digits and underscores"),
    ("OMP_NUM_THREADS", "PATH", "13:3: 'PATH' is set by the factory in every image (remove it)"),
    ("OMP_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES", "13:3: 'NVIDIA_VISIBLE_DEVICES' is set by the factory in every image"),
    ('THREADS: "1"', 'THREADS: "$HOME"', "13:20: 'OMP_NUM_THREADS' cannot be '$HOME' (write letters, digits and"),
    ('THREADS: "1"', 'THREADS: "a b"', "13:20: 'OMP_NUM_THREADS' cannot be 'a b' (write letters, digits and"),
    ('    environment: {}', '    environment: {LANG: C}', "23:19: 'LANG' is set by the factory in every image"),
    # what the bases and the source say
    ("base: debian-12", "base: debain-12", "6:7: there is no base 'debain-12' (did you mean 'debian-12'?)"),
    ("base: debian-12", "base: x", "6:7: there is no base 'x' (the bases are debian-12, debian-13)"),
    ('["12.1"]', '["12.4"]', '16:12: torch 2.3 on PyPI is built for CUDA 12.1, not 12.4 (write "12.1")'),
    ('["12.1"]', '["12.1", "11.8"]', '16:20: torch 2.3 on PyPI is built for CUDA 12.1, not 11.8 (write "12.1")'),
    ('- version: "2.9"\n    cuda: ["12.8"]\n    python: "3.13"\n    base: debian-13', '- version: "2.3"\n    cuda: ["12.1"]',
     "18:5: target 'pytorch-2.3-cu121' is also made at recipes/torch.yaml:15:5 (remove one of them)"),
    # YAML itself
    ("family: pytorch", "family: &a pytorch", "1:9: anchors and aliases (&, *) are not used here (write the value out)"),
    ("family: pytorch", "family: *a", "1:9: anchors and aliases (&, *) are not used here (write the value out)"),
    ("family: pytorch", "family: !!python/name:os.system x", "1:9: the tag 'tag:yaml.org,2002:python/name:os.system' is not allowed (remove"),
    ("family: pytorch", "family: ! x", "1:9: the tag '!' is not allowed (remove it; put text in quotes)"),
    ("matrix:", "---\nmatrix:", "14:1: a second document starts here (keep one document per file)"),
    ("family: pytorch", "%YAML 1.1\n---\nfamily: pytorch", "1:1: directives (%YAML, %TAG) are not used here (remove the line)"),
    ("family: pytorch", "family: pytorch\x00", "1:16: holds the character '\\x00', which cannot be seen (remove it)"),
    ("source: pypi", "source: py\u202epi", "3:11: holds the character '\\u202e', which cannot be seen (remove it)"),
    ("source: pypi", "source: pypi\rx: y", "3:13: holds the character '\\r', which cannot be seen (remove it)"),
    ("family: pytorch", "\ufefffamily: pytorch", "1:1: holds the character '\\ufeff', which cannot be seen (remove it)"),
    ("source: pypi", "source: \udc80", "3:9: holds the character '\\udc80', which cannot be seen (remove it)"),
    ("source: pypi", "source: [pypi", "4:10: is not valid YAML: expected ',' or ']', but got ':' (mend the line)"),
    ("source: pypi", "source: a: b", "3:10: is not valid YAML: mapping values are not allowed here (mend the line; text with a colon"),
    ("source: pypi", "\tsource: pypi", "3:1: is not valid YAML: found character '\\\\t' that cannot start any token (mend"),
    ("source: pypi", 'source: "\\U00110000"', ": is not valid YAML: "),
    ("[numpy]", "[" * 20, f"10:{10 + MAX_DEPTH}: is nested more than {MAX_DEPTH} deep (write it flatter)"),
    ("[numpy]", f"[{'a, ' * MAX_NODES}]", f": holds more than {MAX_NODES} values (split it)"),
    ("source: pypi", "#" * MAX_BYTES, "1:1: is larger than 256 kB (split it)"),
]  # fmt: skip


@pytest.mark.parametrize("fast", [True, False], ids=["libyaml", "pure"])
@pytest.mark.parametrize(("old", "new", "expected"), FAULTS)
def test_fault(old: str, new: str, expected: str, *, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.delattr(yaml, "CSafeLoader")
    told = faults_of(edited(old, new))
    at = FILE if expected.startswith(":") else f"{FILE}:"
    assert any(fault.startswith(at) and expected in fault for fault in told), told
    for fault in told:
        assert re.fullmatch(r"recipes/torch\.yaml:\d+:\d+: [ -~]+ \([ -~]+\)", fault), fault


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "just text", "- a\n- b\n", "[]", "null"])
def test_what_is_no_recipe_at_all(text: str) -> None:
    assert faults_of(text)[0].startswith(f"{FILE}:")


def test_all_faults_are_told_in_the_order_of_the_file_and_once() -> None:
    text = edited("family: pytorch", "family: X").replace("pypi", "pip").replace("base: debian-12", "base: .")
    assert [fault.split(":")[1] for fault in faults_of(text)] == ["1", "3", "6"]


def test_a_familys_values_are_judged_even_when_every_row_overrides_them() -> None:
    text = RECIPE[: RECIPE.index('  - version: "2.3"')] + RECIPE[RECIPE.index('  - version: "2.9"') :]
    assert faults_of(text.replace('["9.0", "8.0"]', "[x]")) == (
        f"{FILE}:8:16: 'capabilities' cannot be 'x' (write {values.RULES['capability'].write})",
    )


def test_a_flood_of_faults_is_cut() -> None:
    told = faults_of(RECIPE + "".join(f"k{number}: x\n" for number in range(90)))
    assert len(told) == MAX_FAULTS + 1
    assert told[-1] == f"{FILE}: and 40 more faults"


def test_long_input_is_cut_in_the_message() -> None:
    (fault,) = faults_of(edited("PyTorch, small", "$" * 1000))
    assert len(fault) < 300
    assert "of 1000 characters, more than 200" in fault


def test_extras_that_bring_cuda() -> None:
    text = RECIPE.replace("torch\n", "jax\n", 2).replace("2.3", "0.10.2").replace('["12.1"]', '["13"]')
    text = text[: text.index('  - version: "2.9"')].replace("framework: jax", "framework: JAX")
    assert faults_of(text) == (
        f"{FILE}:15:5: jax 0.10.2 on PyPI comes with CUDA 13 only through 'cuda13' (write extras: [cuda13])",
    )
    text = text.replace('["13"]', '["13"]\n    extras: [cuda13]')
    (target,) = expand(parse_recipe(text, FILE), bases())
    assert target.requirements[0] == "jax[cuda13]==0.10.2.*"
    assert faults_of(text.replace('"0.10.2"', '"0.12"')) == (
        f"{FILE}:7:9: jax 0.12 on PyPI needs Python 3.12 or newer, not 3.11 (write a base that carries it)",
    )


def test_two_families_cannot_make_one_target() -> None:
    recipe = parse_recipe(RECIPE, FILE)
    with pytest.raises(RecipeError) as caught:
        expand_all([recipe, parse_recipe(RECIPE, "recipes/other.yaml")], bases())
    assert caught.value.faults[0] == (
        "recipes/other.yaml:15:5: target 'pytorch-2.3-cu121' is also made at recipes/torch.yaml:15:5 (remove one of them)"
    )


# --- bases ---------------------------------------------------------------------------------------


def test_bases() -> None:
    assert bases()[1] == Base(
        name="debian-13",
        suite="trixie",
        python="3.13",
        glibc="2.41",
        packages=("python3", "gcc"),
        public="a.b/c:13",
        where=Where(file="recipes/bases.yaml", line=3, column=5),
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"2.36"', "2.36", "2:63: 'glibc' must be text, and without quotes '2.36' is a number"),
        ("bookworm", "book/worm", "2:30: 'suite' cannot be 'book/worm' (write the suite's code name"),
        ("suite: bookworm", "siute: bookworm", "2:23: unknown key 'siute' (did you mean 'suite'?)"),
        ("[python3]", '["python3 && id"]', "2:82: 'packages' cannot be 'python3 && id' (write the name of a Debian"),
        ("[python3]", "[-oAPT::X=y]", "2:82: 'packages' cannot be '-oAPT::X=y'"),
        ("a.b/c:12", "debian", "2:100: 'public' cannot be 'debian' (write registry, repository and tag"),
        ("debian-13", "debian-12", "3:5: base 'debian-12' is also at recipes/bases.yaml:2:5 (remove one of them)"),
        ("bases:", "base:", "1:1: unknown key 'base' (did you mean 'bases'?)"),
    ],
)  # fmt: skip
def test_fault_in_bases(old: str, new: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_bases(BASES.replace(old, new, 1), "recipes/bases.yaml")
    assert any(fault.startswith(f"recipes/bases.yaml:{expected}") for fault in caught.value.faults), (
        caught.value
    )


# --- bases by digest -----------------------------------------------------------------------------

DIGEST = "sha256:" + "0a1b2c3d" * 8
IMAGE = f"docker.io/nvidia/cuda:12.4-devel@{DIGEST}"
PULLED = f"""\
bases:
  - name: cuda-devel
    image: {IMAGE}
    python: "3.11"
    glibc: "2.36"
"""


def own_base(reference: str, beside: str = '\nglibc: "2.36"') -> str:
    return edited("base: debian-12", f"base: {reference}{beside}")


def test_a_base_by_digest() -> None:
    (base,) = parse_bases(PULLED, "recipes/bases.yaml")
    assert base == Base(
        name="cuda-devel",
        suite="",
        python="3.11",
        glibc="2.36",
        packages=(),
        public=IMAGE.replace(":12.4-devel", ""),
        where=Where(file="recipes/bases.yaml", line=2, column=5),
        image=IMAGE,
    )
    assert base.python_path == "/usr/bin/python3.11"
    (other,) = parse_bases(f"{PULLED}    interpreter: /usr/local/bin/python3.11\n", "recipes/bases.yaml")
    assert other.python_path == "/usr/local/bin/python3.11"


def test_a_recipe_may_name_an_image_itself() -> None:
    recipe = parse_recipe(own_base(IMAGE), FILE)
    first, second = expand(recipe, bases())
    assert (first.base, second.base) == ("cuda-0a1b2c3d0a1b", "debian-13")
    *_, own = all_bases(bases(), [recipe])
    assert own == Base(
        name="cuda-0a1b2c3d0a1b",
        suite="",
        python="3.11",
        glibc="2.36",
        packages=(),
        public=IMAGE.replace(":12.4-devel", ""),
        where=Where(file=FILE, line=6, column=7),
        image=IMAGE,
    )
    assert len(all_bases(bases(), [recipe, recipe])) == 3


def test_a_row_may_name_an_image_itself() -> None:
    text = edited(
        "    base: debian-13\n",
        f'    base: {IMAGE}\n    glibc: "2.31"\n    interpreter: /opt/python/bin/python3.13\n',
    )
    recipe = parse_recipe(text, FILE)
    first, second = expand(recipe, bases())
    assert (first.base, second.base) == ("debian-12", "cuda-0a1b2c3d0a1b")
    *_, own = all_bases(bases(), [recipe])
    assert (own.python, own.glibc, own.python_path) == ("3.13", "2.31", "/opt/python/bin/python3.13")
    assert own.where == Where(file=FILE, line=21, column=11)


def test_rows_inherit_the_python_that_the_familys_image_carries() -> None:
    text = own_base(IMAGE).replace("    base: debian-13\n", "")
    _, second = expand(parse_recipe(text, FILE), bases())
    assert (second.python, second.channels) == ("3.13", CONDA_FORGE)  # the image carries 3.11


def test_a_python_that_no_base_carries_is_condas() -> None:
    with_it, without = expand(parse_recipe(edited('python: "3.13"', 'python: "3.12"'), FILE), bases())
    assert (with_it.conda, with_it.channels, with_it.virtual) == (False, (), ())
    assert (without.name, without.python, without.channels) == (
        "pytorch-2.9-cu128-py312",
        "3.12",
        CONDA_FORGE,
    )
    assert (without.source, without.requirements[0]) == ("pypi", "torch==2.9.*")
    assert without.virtual == (("__archspec", "x86_64"), ("__glibc", "2.41"))


def test_one_image_is_described_in_one_way() -> None:
    recipe = parse_recipe(own_base(IMAGE), FILE)
    other = parse_recipe(own_base(IMAGE, '\nglibc: "2.31"'), "recipes/other.yaml")
    with pytest.raises(RecipeError) as caught:
        all_bases(bases(), [recipe, other])
    assert caught.value.faults == (
        "recipes/other.yaml:6:7: base 'cuda-0a1b2c3d0a1b' is described in another way at recipes/torch.yaml:6:7 "
        "(write the same glibc, interpreter and python, or give each a name in bases.yaml)",
    )
    tagged = parse_recipe(own_base(IMAGE.replace(":12.4-devel", "")), "recipes/other.yaml")
    assert len(all_bases(bases(), [recipe, tagged])) == 3


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("docker.io/nvidia/cuda:12", "6:7: 'base' cannot be 'docker.io/nvidia/cuda:12', which may be another image tomorrow "
         "(write docker.io/nvidia/cuda:12@sha256:<64 hex digits>; `skopeo inspect docker://docker.io/nvidia/cuda:12` tells the digest)"),
        ("python:3.11", "6:7: 'base' cannot be 'python:3.11', which may be another image tomorrow "
         "(write docker.io/library/python:3.11@sha256:<64 hex digits>; `skopeo inspect docker://docker.io/library/python:3.11` tells"),
        (f"python@{DIGEST}", f"6:7: 'base' cannot be 'python@{DIGEST}', a short name (write docker.io/library/python@{DIGEST})"),
        (f"nvidia/cuda@{DIGEST}", f"6:7: 'base' cannot be 'nvidia/cuda@{DIGEST}', a short name (write docker.io/nvidia/cuda@{DIGEST})"),
        (f"docker.io/python@{DIGEST}", f"6:7: 'base' cannot be 'docker.io/python@{DIGEST}', a short name (write docker.io/library/python@"),
        (f"docker.io/nvidia/cuda@{DIGEST[:-1]}", "6:7: 'base' cannot be 'docker.io/nvidia/cuda@"),
        (f"https://docker.io/nvidia/cuda@{DIGEST}", "6:7: 'base' cannot be 'https://docker.io/nvidia/cuda@"),
        (f"'docker.io/x/y:$(id)@{DIGEST}'", "6:7: 'base' cannot be 'docker.io/x/y:$(id)@"),
    ],
)  # fmt: skip
def test_references_that_are_no_digest(reference: str, expected: str) -> None:
    assert [fault.startswith(f"{FILE}:{expected}") for fault in faults_of(own_base(reference))] == [True]
    text = PULLED.replace(IMAGE, reference)
    with pytest.raises(RecipeError) as caught:
        parse_bases(text, "recipes/bases.yaml")
    wanted = expected.replace("6:7: 'base'", "recipes/bases.yaml:3:12: 'image'")
    assert any(fault.startswith(wanted) for fault in caught.value.faults), caught.value


def test_what_stands_beside_an_image() -> None:
    assert faults_of(own_base(IMAGE, "")) == (
        f"{FILE}:6:7: 'glibc' is missing: no image is pulled to lock, so the recipe says which C library it "
        'carries (write glibc: "2.36" beside it, as `ldd --version` inside the image says)',
    )
    for key, value in (("glibc", '"2.36"'), ("interpreter", "/usr/bin/python3.11")):
        assert faults_of(own_base("debian-12", f"\n{key}: {value}")) == (
            f"{FILE}:7:{len(key) + 3}: '{key}' describes an image, and no 'base' beside it names one by digest "
            "(remove it: bases.yaml says it for the bases there)",
        )


def test_a_pulled_base_has_no_suite_and_no_packages() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_bases(f"{PULLED}    suite: bookworm\n    packages: [gcc]\n", "recipes/bases.yaml")
    assert [fault.split(" (")[0] for fault in caught.value.faults] == [
        "recipes/bases.yaml:6:5: unknown key 'suite'",
        "recipes/bases.yaml:7:5: unknown key 'packages'",
    ]


# --- folders -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "bases.yaml").write_text(BASES)
    (folder / "pytorch.yaml").write_text(RECIPE)
    (folder / ".pytorch.yaml.swp").write_text("an editor's")
    (folder / "recipe.schema.json").write_text("{}")
    return folder


def test_read_folder(folder: Path) -> None:
    (recipe,) = read_recipes(folder)
    assert str(recipe.where) == "recipes/pytorch.yaml:1:1"
    assert [base.name for base in read_bases(folder)] == ["debian-12", "debian-13"]


def test_faults_of_all_files_are_told_together(folder: Path) -> None:
    (folder / "a.yaml").write_text("")
    (folder / "b.yml").write_text(RECIPE)
    (folder / "c.yaml").write_bytes(b"family: x\ndescription: \xff\xfe\n")
    (folder / "d.yaml").mkdir()
    (folder / "e.yaml").symlink_to("/etc/hostname")
    (folder / "f.yaml").symlink_to(folder / "nowhere")
    (folder / "g.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    (folder / "h\n.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError) as caught:
        read_recipes(folder)
    assert caught.value.faults == (
        "recipes/a.yaml:1:1: is empty (write a recipe; `imagefactory new FAMILY` makes one)",
        "recipes/b.yml:1:1: a recipe's file is named by letters, digits and . _ - (name it FAMILY.yaml)",
        "recipes/c.yaml:2:14: is not UTF-8 (save the file as UTF-8)",
        "recipes/d.yaml:1:1: is not a file (put a file here)",
        "recipes/e.yaml:1:1: is a link out of its folder (put the file itself here)",
        "recipes/f.yaml:1:1: cannot be read: No such file or directory (put a readable file here)",
        "recipes/g.yaml:1:1: is larger than 256 kB (split it)",
        "recipes/h\\n.yaml:1:1: a recipe's file is named by letters, digits and . _ - (name it FAMILY.yaml)",
    )


def test_no_folder_and_no_bases(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no recipes at") as caught:
        read_recipes(tmp_path / "recipes")
    assert "imagefactory new FAMILY" in caught.value.hint
    with pytest.raises(RecipeError, match=r"bases\.yaml:1:1: cannot be read: No such file"):
        read_bases(tmp_path)


# --- selecting -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def targets() -> tuple[Target, ...]:
    return expand_all(read_recipes(ROOT / "recipes"), read_bases(ROOT / "recipes"))


def test_select(targets: tuple[Target, ...]) -> None:
    assert select(targets, []) == targets
    assert [target.name for target in select(targets, ["pytorch-2.3-cu121"])] == ["pytorch-2.3-cu121"]
    chosen = select(targets, ["tensorflow-[0-9]*", "jax-0.4*", "jax-0.4.30-cu12"])
    assert chosen[0].name == "jax-0.4.30-cu12"
    assert {target.family for target in chosen[1:]} == {"tensorflow"}
    assert chosen == tuple(target for target in targets if target in chosen)


def test_select_nothing(targets: tuple[Target, ...]) -> None:
    with pytest.raises(NothingSelectedError, match=r"there is no target 'pytorch-2\.3-cu112'") as caught:
        select(targets, ["jax-*", "pytorch-2.3-cu112"])
    assert caught.value.hint == "of pytorch-2.3 there is pytorch-2.3-cu121"
    with pytest.raises(NothingSelectedError) as caught:
        select(targets, ["zz\n*"])
    assert caught.value.message == r"there is no target 'zz\n*'"
    assert caught.value.hint.startswith("there is workbench-")
    with pytest.raises(NothingSelectedError, match="no target 'base:debian-12'") as caught:
        select(targets, ["base:debian-12"])
    assert "imagefactory lock base:NAME" in caught.value.hint


# --- the recipes of the tree ---------------------------------------------------------------------


def test_promised_targets(targets: tuple[Target, ...]) -> None:
    names = [target.name for target in targets]
    promised = "1.13-cu117", "2.3-cu121", "2.5-cu124", "2.9-cu128"
    assert {f"pytorch-{version}" for version in promised} <= set(names)
    assert {"jax", "onnxruntime", "pytorch", "tensorflow"} <= {target.family for target in targets}
    pytorch = [target.version for target in targets if target.family == "pytorch"]
    assert pytorch == sorted(pytorch, key=lambda version: [int(part) for part in version.split(".")])


def test_environment_points_into_the_targets_own_python(targets: tuple[Target, ...]) -> None:
    for target in targets:
        for name, value in target.environment:
            folders = value.split(":") if name == "LD_LIBRARY_PATH" else []
            for path in folders:
                assert path.startswith(f"/opt/env/lib/python{target.python}/site-packages/nvidia/"), (
                    target.name
                )
    assert any(target.environment for target in targets)


def test_every_target_is_known_to_be_offered(targets: tuple[Target, ...]) -> None:
    for target in (target for target in targets if target.source == "pypi" and target.gpu):
        offers = knowledge.offered(target.framework, target.version)
        assert target.cuda in {wheel.cuda for wheel in offers}, target.name


# --- knowledge -----------------------------------------------------------------------------------


def test_every_row_of_knowledge_has_a_source_and_sound_values() -> None:
    wheels = knowledge.cuda_wheels()
    assert len(wheels) > 40
    for wheel in wheels:
        assert re.match(r"(measured 20\d\d-\d\d|documented): .{20,}", wheel.source), wheel
        assert values.RULES["version"].allows(wheel.version), wheel
        assert values.RULES["cuda"].allows(wheel.cuda), wheel
    keys = [(wheel.package, wheel.version, wheel.cuda) for wheel in wheels]
    assert len(keys) == len(set(keys))
    without_recipes = {"vllm", "xformers", "faiss-gpu", "faiss-gpu-cu12"}
    assert {*knowledge.families().values(), *without_recipes} == {wheel.package for wheel in wheels}


def test_offered_goes_by_whole_components() -> None:
    assert [wheel.cuda for wheel in knowledge.offered("torch", "2.1")] == ["12.1"]
    assert [wheel.cuda for wheel in knowledge.offered("torch", "2.10.0")] == ["12.8"]
    assert {wheel.version.rpartition(".")[0] for wheel in knowledge.offered("jax", "0.4")} == {"0.4"}
    assert knowledge.offered("torch", "2") != ()
    assert knowledge.offered("torch", "2.99") == ()
    assert knowledge.offered("nothing", "1.0") == ()


# --- a recipe to start from ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["pytorch", "tensorflow", "jax", "onnxruntime", "cupy", "my-lab"])
def test_scaffold_parses_and_expands(family: str) -> None:
    text = scaffold.scaffold(family, bases()).text
    recipe = parse_recipe(text, f"recipes/{family}.yaml")
    (target,) = expand(recipe, bases())
    assert target.name.startswith(f"{family}-")
    assert (recipe.framework in {"cupy", "my-lab"}) == ("nothing is known" in text)


def test_scaffold_of_a_known_framework_under_another_name() -> None:
    text = scaffold.scaffold("lab", bases(), framework="Torch").text
    (target,) = expand(parse_recipe(text, FILE), bases())
    newest = [wheel for wheel in knowledge.cuda_wheels() if wheel.package == "torch"][-1]
    assert (target.framework, target.version, target.cuda) == ("torch", newest.version, newest.cuda)


@pytest.mark.parametrize(("family", "framework"), [("A\nb", ""), ("a", "x; y"), ("../x", ""), ("", "")])
def test_scaffold_refuses_names(family: str, framework: str) -> None:
    for source in ("pypi", "conda"):
        with pytest.raises(UsageError):
            scaffold.scaffold(family, bases(), framework=framework, source=source)


@pytest.mark.parametrize(
    ("family", "framework"),
    [("pytorch-conda", "pytorch"), ("tensorflow", "tensorflow"), ("jax-conda", "jaxlib"), ("cupy", "cupy")],
)
def test_scaffold_of_conda_parses_and_expands(family: str, framework: str) -> None:
    text = scaffold.scaffold(family, bases(), source="conda").text
    (target,) = expand(parse_recipe(text, f"recipes/{family}.yaml"), bases())
    assert (target.source, target.framework, target.name) == ("conda", framework, f"{family}-1.0-cu126")
    assert target.channels == ("https://conda.anaconda.org/conda-forge",)


def test_scaffold_says_when_a_name_is_condas() -> None:
    (told,) = scaffold.scaffold("lab", bases(), framework="pytorch").told
    assert told == "pytorch is what conda calls it: PyPI's is --framework torch, conda's is --source conda"
    assert scaffold.scaffold("lab", bases(), framework="tensorflow").told == ()
    assert scaffold.scaffold("lab", bases(), framework="pytorch", source="conda").told == ()


# --- packages left out ----------------------------------------------------------------------------

_EXCLUDE = RECIPE.replace('OMP_NUM_THREADS: "1"', 'OMP_NUM_THREADS: "1"\nexclude: [PyYAML]').replace(
    'cuda: ["12.8"]', 'cuda: ["12.8"]\n    exclude: [opencv-python]'
)


def test_what_is_excluded_is_the_familys_and_the_rows() -> None:
    first, second = expand(parse_recipe(_EXCLUDE, FILE), parse_bases(BASES, "b"))
    assert first.exclude == ("pyyaml",)
    assert second.exclude == ("pyyaml", "opencv-python")
    above = parse_recipe(
        f"family: lab\ndescription: x\non: {first.name}\npackages: [idna]\nexclude: [babel]\n", "lab.yaml"
    )
    added = next(
        one for one in expand_all([parse_recipe(_EXCLUDE, FILE), above], parse_bases(BASES, "b")) if one.on
    )
    assert added.exclude == ("pyyaml", "babel")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (RECIPE.replace("checks:", "exclude: [a, torch]\nchecks:"), f"{FILE}:9:14"),
        (RECIPE.replace("checks:", "exclude: [NumPy]\nchecks:"), f"{FILE}:9:11"),
    ],
)
def test_what_the_recipe_names_is_not_excluded(text: str, place: str) -> None:
    with pytest.raises(RecipeError) as caught:
        expand(parse_recipe(text, FILE), parse_bases(BASES, "b"))
    assert all(fault.startswith(place) for fault in caught.value.faults)
