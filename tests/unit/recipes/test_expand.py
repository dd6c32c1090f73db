"""Recipes and bases: what they become, and what every kind of fault says."""

# ruff: noqa: E501 -- one fault per line reads as a table
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from imagefactory.errors import Diagnostic, NothingSelectedError, RecipeError, UnknownAnswerError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.model import BaseSpec, SourceLocation, Target
from imagefactory.recipes import edit, values
from imagefactory.recipes.bases import all_bases, parse_bases
from imagefactory.recipes.expand import expand, expand_all, expand_lenient, select
from imagefactory.recipes.read import read_bases, read_each, read_recipes
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.recipes.values import MAX_PROBLEMS
from imagefactory.recipes.yaml_tree import MAX_BYTES, MAX_NODES
from imagefactory.suite.gpu import table as gpu_table
from imagefactory.versions import natural
from tests.made.diagnostics import reports
from tests.made.errors import fails

ROOT = Path(__file__).parents[3]
FILE = "recipes/torch.yaml"
RECIPES = Path(__file__).parents[3] / "recipes"

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


def faults_of(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(RecipeError) as caught:
        expand(parse_recipe(text, FILE), bases())
    return caught.value.diagnostics


def bases() -> tuple[BaseSpec, ...]:
    return parse_bases(BASES, "recipes/bases.yaml")


def edited(old: str, new: str) -> str:
    assert RECIPE.count(old) >= 1
    return RECIPE.replace(old, new, 1)


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
        where=SourceLocation(file=FILE, line=15, column=5),
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
    made, targets, faults = expand_lenient([recipe], bases(), {})
    assert targets[0].name == "pytorch-2.3-cu121"
    assert faults == {}
    by_name = {base.name: base for base in made}
    assert replace(by_name["debian-12"], name="debian-12-arm64", platform="linux/arm64") in made
    assert by_name[targets[0].base].platform == "linux/arm64"
    taken = replace(bases()[0], name="debian-12-arm64")
    said = expand_lenient([recipe], (*bases(), taken), {})[2]
    assert reports(said["pytorch"], "duplicate-base linux/arm64 'debian-12-arm64'")


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


FAULTS = [
    # keys
    ("packages: [numpy]", "pakages: [numpy]", "10:1 unknown-key pakages packages"),
    ("    cuda: [", "    cudda: [", "16:5 unknown-key cudda cuda"),
    ("    cuda: [", "    cudda: [", "15:5 missing-key cuda 12.1"),
    ("source: pypi", "zzz: 1", "3:1 unknown-key zzz"),
    ("framework: torch\n", "", "1:1 missing-key framework"),
    ("source: pypi", "family: b", "3:1 duplicate-key family 1"),
    ("OMP_NUM_THREADS: \"1\"", "A: x\n  A: y", "14:3 duplicate-key A 13 3"),
    ("source: pypi", "<<: {}", "3:1 yaml-unsupported"),
    ("source: pypi", "[a]: b", "3:1 key-not-text"),
    # numbers and other things that YAML makes
    ('"2.9"', "2.10", "18:14 quotes-missing version 2.10"),
    ('python: "3.11"', "python: 3.11", "7:9 quotes-missing python 3.11"),
    ("family: pytorch", "family: no", "1:9 quotes-missing family no"),
    ('["12.1"]', "[12.1]", "16:12 quotes-missing cuda 12.1"),
    ("family: pytorch", "family: 2020-01-01", "1:9 quotes-missing family 2020-01-01"),
    ('THREADS: "1"', "THREADS: 1", "13:20 quotes-missing OMP_NUM_THREADS 1"),
    ("family: pytorch", "family:", "1:8 not-text family nothing"),
    # shapes
    ("family: pytorch", "family: [a]", "1:9 not-text family list"),
    ("packages: [numpy]", "packages: numpy", "10:11 not-a-list packages"),
    ('cuda: ["12.1"]', "cuda: []", "16:11 empty-list cuda"),
    ("checks: [import, packages]", "checks: []", "9:9 empty-list checks"),
    ('  OMP_NUM_THREADS: "1"', "  - A", "13:3 not-a-mapping environment value"),
    ('capabilities: ["9.0", "8.0"]\n', "", "14:5 capabilities-missing capabilities 8.0"),
    # values
    ("family: pytorch", "family: Py_Torch", "1:9 value-invalid family Py_Torch pytorch"),
    ("family: pytorch", 'family: "pytorch\\n"', "1:9 value-invalid family pytorch\\n"),
    ("family: pytorch", "family: " + "a" * 41, "1:9 value-invalid family 41 40"),
    ("PyTorch, small", '"{{7*7}}"', "2:14 value-invalid description {{7*7}}"),
    ("PyTorch, small", "|\n  a\n  b", "2:14 value-invalid description a\\nb\\n"),
    ("PyTorch, small", "$(id)", "2:14 value-invalid description $(id)"),
    ("PyTorch, small", "größer", "2:14 value-invalid description gr\\xf6\\xdfer"),
    ("source: pypi", "source: pip", "3:9 value-invalid source pip pypi conda"),
    ("source: pypi", "source: pypi\nchannels: [conda-forge]", "4:1 key-not-for-source channels"),
    ("source: pypi", "source: pypi\npip: [numpy]", "4:1 key-not-for-source pip packages"),
    ("source: pypi", "source: conda", "1:1 missing-key channels"),
    ('["12.1"]', '["12.1"]\n    virtual: {cuda: "12.4"}', "17:5 key-not-for-source virtual"),
    ('["12.1"]', '["12.1"]\n    on: jax-0.10-cu12', "17:5 on-with-source on"),
    (
        "linux/amd64",
        "linux/riscv64",
        "5:11 value-invalid platform linux/riscv64 linux/amd64 linux/arm64",
    ),
    ("framework: torch", "framework: torch==2", "4:12 value-invalid framework torch==2"),
    ('["9.0"', '["sm_90"', "8:16 value-invalid capabilities sm_90 8.0"),
    ('["9.0"', '["8.0"', "8:23 duplicate-value 8.0 capabilities 8 16"),
    ("[import,", "[imports,", "9:10 value-invalid checks imports import"),
    ("packages: [numpy]", "waive: [jid]", "10:9 value-invalid waive jid jit"),
    ("packages: [numpy]", "waive: [vector-add]", "10:9 value-invalid waive vector-add"),
    ("[import,", "[gpu-burn,", "9:10 value-invalid checks gpu-burn"),
    ('"2.3"', '">=2.3"', "15:14 value-invalid version >=2.3 2.3"),
    ('["12.1"]', '["cu121"]', "16:12 value-invalid cuda cu121 12.1 12"),
    ("[numpy]", '["numpy @ https://x/y.whl"]', "10:12 value-invalid packages"),
    ("[numpy]", '["numpy; python_version<3"]', "10:12 value-invalid packages"),
    ("[numpy]", '["-r /etc/passwd"]', "10:12 value-invalid packages"),
    ("[numpy]", '["numpy>=1.*"]', "10:12 value-invalid packages numpy>=1.*"),
    ("[numpy]", "[TORCH>2]", "10:12 framework-listed torch packages"),
    ('["scipy < 2, >=1"]', "[scipy]", "11:15 value-invalid constraints scipy"),
    ('["scipy < 2, >=1"]', '["scipy[x]<2"]', "11:15 value-invalid constraints scipy[x]<2"),
    ("OMP_NUM_THREADS", "omp", "13:3 value-invalid environment omp"),
    ("OMP_NUM_THREADS", "PATH", "13:3 name-reserved PATH"),
    ("OMP_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES", "13:3 name-reserved NVIDIA_VISIBLE_DEVICES"),
    ('THREADS: "1"', 'THREADS: "$HOME"', "13:20 value-invalid OMP_NUM_THREADS $HOME"),
    ('THREADS: "1"', 'THREADS: "a b"', "13:20 value-invalid OMP_NUM_THREADS"),
    ('    environment: {}', '    environment: {LANG: C}', "23:19 name-reserved LANG"),
    # what the bases and the source say
    ("base: debian-12", "base: debain-12", "6:7 base-unknown debain-12 debian-12"),
    ("base: debian-12", "base: x", "6:7 base-unknown x debian-12 debian-13"),
    ('["12.1"]', '["12.4"]', "16:12 cuda-not-offered 2.3 12.1 12.4"),
    ('["12.1"]', '["12.1", "11.8"]', "16:20 cuda-not-offered 2.3 12.1 11.8"),
    ('- version: "2.9"\n    cuda: ["12.8"]\n    python: "3.13"\n    base: debian-13', '- version: "2.3"\n    cuda: ["12.1"]',
     "18:5 duplicate-target pytorch-2.3-cu121 15 5"),
    # YAML itself
    ("family: pytorch", "family: &a pytorch", "1:9 yaml-unsupported"),
    ("family: pytorch", "family: *a", "1:9 yaml-unsupported"),
    ("family: pytorch", "family: !!python/name:os.system x", "1:9 yaml-unsupported tag:yaml.org,2002:python/name:os.system"),
    ("family: pytorch", "family: ! x", "1:9 yaml-unsupported !"),
    ("matrix:", "---\nmatrix:", "14:1 yaml-unsupported"),
    ("family: pytorch", "%YAML 1.1\n---\nfamily: pytorch", "1:1 yaml-unsupported"),
    ("family: pytorch", "family: pytorch\x00", "1:16 hidden-character \\x00"),
    ("source: pypi", "source: py\u202epi", "3:11 hidden-character \\u202e"),
    ("source: pypi", "source: pypi\rx: y", "3:13 hidden-character \\r"),
    ("family: pytorch", "\ufefffamily: pytorch", "1:1 hidden-character \\ufeff"),
    ("source: pypi", "source: \udc80", "3:9 hidden-character \\udc80"),
    ("source: pypi", "source: [pypi", "4:10 yaml-invalid , ] :"),
    ("source: pypi", "source: a: b", "3:10 yaml-invalid"),
    ("source: pypi", "\tsource: pypi", "3:1 yaml-invalid \\\\t"),
    ("source: pypi", 'source: "\\U00110000"', "yaml-invalid"),
    ("[numpy]", "[" * 20, "10:18 nesting-too-deep 8"),
    ("[numpy]", f"[{'a, ' * MAX_NODES}]", "10:14937 too-many-values 5000"),
    ("source: pypi", "#" * MAX_BYTES, "1:1 file-too-large 256"),
]  # fmt: skip


@pytest.mark.parametrize("fast", [True, False], ids=["libyaml", "pure"])
@pytest.mark.parametrize(("old", "new", "expected"), FAULTS)
def test_fault(old: str, new: str, expected: str, *, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.delattr(yaml, "CSafeLoader")
    told = faults_of(edited(old, new))
    assert reports(told, expected), told
    for fault in map(str, told):
        assert re.fullmatch(r"recipes/torch\.yaml:\d+:\d+: [ -~]+ \([ -~]+\)", fault), fault


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "just text", "- a\n- b\n", "[]", "null"])
def test_what_is_no_recipe_at_all(text: str) -> None:
    assert faults_of(text)[0].location.startswith(f"{FILE}:")


def test_all_faults_are_told_in_the_order_of_the_file_and_once() -> None:
    text = edited("family: pytorch", "family: X").replace("pypi", "pip").replace("base: debian-12", "base: .")
    assert [fault.location.split(":")[1] for fault in faults_of(text)] == ["1", "3", "6"]


def test_a_familys_values_are_judged_even_when_every_row_overrides_them() -> None:
    text = RECIPE[: RECIPE.index('  - version: "2.3"')] + RECIPE[RECIPE.index('  - version: "2.9"') :]
    (fault,) = faults_of(text.replace('["9.0", "8.0"]', "[x]"))
    assert (fault.location, fault.code) == (f"{FILE}:8:16", "value-invalid")
    assert fault.fix == f"write {values.RULES['capability'].write}"


def test_a_flood_of_faults_is_cut() -> None:
    told = faults_of(RECIPE + "".join(f"k{number}: x\n" for number in range(90)))
    assert len(told) == MAX_PROBLEMS + 1
    assert (told[-1].location, told[-1].code) == (FILE, "more-problems")
    assert "40" in told[-1].message


def test_long_input_is_cut_in_the_message() -> None:
    (fault,) = faults_of(edited("PyTorch, small", "$" * 1000))
    assert len(str(fault)) < 300
    assert reports([fault], "value-invalid 1000 200")


def test_extras_that_bring_cuda() -> None:
    text = RECIPE.replace("torch\n", "jax\n", 2).replace("2.3", "0.10.2").replace('["12.1"]', '["13"]')
    text = text[: text.index('  - version: "2.9"')].replace("framework: jax", "framework: JAX")
    (fault,) = faults_of(text)
    assert (fault.location, fault.code) == (f"{FILE}:15:5", "extras-missing")
    assert fault.fix == "write extras: [cuda13]"
    text = text.replace('["13"]', '["13"]\n    extras: [cuda13]')
    (target,) = expand(parse_recipe(text, FILE), bases())
    assert target.requirements[0] == "jax[cuda13]==0.10.2.*"
    (fault,) = faults_of(text.replace('"0.10.2"', '"0.12"'))
    assert reports([fault], f"{FILE}:7:9 python-too-old jax 0.12 3.12 3.11")


def test_two_families_cannot_make_one_target() -> None:
    recipe = parse_recipe(RECIPE, FILE)
    with pytest.raises(RecipeError) as caught:
        expand_all([recipe, parse_recipe(RECIPE, "recipes/other.yaml")], bases())
    assert reports(
        caught.value.diagnostics[:1],
        "recipes/other.yaml:15:5 duplicate-target 'pytorch-2.3-cu121' recipes/torch.yaml:15:5",
    )


def test_bases() -> None:
    assert bases()[1] == BaseSpec(
        name="debian-13",
        suite="trixie",
        python="3.13",
        glibc="2.41",
        packages=("python3", "gcc"),
        public="a.b/c:13",
        where=SourceLocation(file="recipes/bases.yaml", line=3, column=5),
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"2.36"', "2.36", "2:63 quotes-missing glibc 2.36"),
        ("bookworm", "book/worm", "2:30 value-invalid suite book/worm"),
        ("suite: bookworm", "siute: bookworm", "2:23 unknown-key siute suite"),
        ("[python3]", '["python3 && id"]', "2:82 value-invalid packages"),
        ("[python3]", "[-oAPT::X=y]", "2:82 value-invalid packages -oAPT::X=y"),
        ("a.b/c:12", "debian", "2:100 value-invalid public debian"),
        ("debian-13", "debian-12", "3:5 duplicate-base debian-12 2 5"),
        ("bases:", "base:", "1:1 unknown-key base bases"),
    ],
)  # fmt: skip
def test_fault_in_bases(old: str, new: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_bases(BASES.replace(old, new, 1), "recipes/bases.yaml")
    assert reports(caught.value.diagnostics, f"recipes/bases.yaml:{expected}"), caught.value


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
    assert base == BaseSpec(
        name="cuda-devel",
        suite="",
        python="3.11",
        glibc="2.36",
        packages=(),
        public=IMAGE.replace(":12.4-devel", ""),
        where=SourceLocation(file="recipes/bases.yaml", line=2, column=5),
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
    assert own == BaseSpec(
        name="cuda-0a1b2c3d0a1b",
        suite="",
        python="3.11",
        glibc="2.36",
        packages=(),
        public=IMAGE.replace(":12.4-devel", ""),
        where=SourceLocation(file=FILE, line=6, column=7),
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
    assert own.where == SourceLocation(file=FILE, line=21, column=11)


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
    (fault,) = caught.value.diagnostics
    assert reports(
        [fault],
        "recipes/other.yaml:6:7 base-described-twice 'cuda-0a1b2c3d0a1b' recipes/torch.yaml:6:7 bases.yaml",
    )
    tagged = parse_recipe(own_base(IMAGE.replace(":12.4-devel", "")), "recipes/other.yaml")
    assert len(all_bases(bases(), [recipe, tagged])) == 3


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("docker.io/nvidia/cuda:12", "image-not-pinned 'base' docker.io/nvidia/cuda:12@sha256: docker://docker.io/nvidia/cuda:12`"),
        ("python:3.11", "image-not-pinned 'base' docker.io/library/python:3.11@sha256: docker://docker.io/library/python:3.11`"),
        (f"python@{DIGEST}", f"image-short-name 'base' 'python@{DIGEST}' docker.io/library/python@{DIGEST}"),
        (f"nvidia/cuda@{DIGEST}", f"image-short-name 'base' 'nvidia/cuda@{DIGEST}' docker.io/nvidia/cuda@{DIGEST}"),
        (f"docker.io/python@{DIGEST}", f"image-short-name 'base' docker.io/library/python@{DIGEST}"),
        (f"docker.io/nvidia/cuda@{DIGEST[:-1]}", "value-invalid 'base'"),
        (f"https://docker.io/nvidia/cuda@{DIGEST}", "value-invalid 'base'"),
        (f"'docker.io/x/y:$(id)@{DIGEST}'", "value-invalid 'base'"),
    ],
)  # fmt: skip
def test_references_that_are_no_digest(reference: str, expected: str) -> None:
    (fault,) = faults_of(own_base(reference))
    assert reports([fault], f"{FILE}:6:7 {expected}"), fault
    text = PULLED.replace(IMAGE, reference)
    with pytest.raises(RecipeError) as caught:
        parse_bases(text, "recipes/bases.yaml")
    wanted = expected.replace("'base'", "'image'")
    assert reports(caught.value.diagnostics, f"recipes/bases.yaml:3:12 {wanted}"), caught.value


def test_what_stands_beside_an_image() -> None:
    (fault,) = faults_of(own_base(IMAGE, ""))
    assert reports([fault], f"{FILE}:6:7 missing-key 'glibc'")
    for key, value in (("glibc", '"2.36"'), ("interpreter", "/usr/bin/python3.11")):
        (fault,) = faults_of(own_base("debian-12", f"\n{key}: {value}"))
        assert reports([fault], f"{FILE}:7:{len(key) + 3} key-without-base '{key}'")


def test_a_pulled_base_has_no_suite_and_no_packages() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_bases(f"{PULLED}    suite: bookworm\n    packages: [gcc]\n", "recipes/bases.yaml")
    suite, packages = caught.value.diagnostics
    assert reports([suite], "recipes/bases.yaml:6:5 unknown-key 'suite'")
    assert reports([packages], "recipes/bases.yaml:7:5 unknown-key 'packages'")


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
    assert [(one.location, one.code) for one in caught.value.diagnostics] == [
        ("recipes/a.yaml:1:1", "empty-file"),
        ("recipes/b.yml:1:1", "file-name-invalid"),
        ("recipes/c.yaml:2:14", "not-utf8"),
        ("recipes/d.yaml:1:1", "not-a-file"),
        ("recipes/e.yaml:1:1", "link-not-allowed"),
        ("recipes/f.yaml:1:1", "file-not-readable"),
        ("recipes/g.yaml:1:1", "file-too-large"),
        ("recipes/h\\n.yaml:1:1", "file-name-invalid"),
    ]


def test_no_folder_and_no_bases(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path / "recipes")) as caught:
        read_recipes(tmp_path / "recipes")
    assert caught.value.code == "project-not-found"
    with pytest.raises(RecipeError) as missing:
        read_bases(tmp_path)
    assert reports(missing.value.diagnostics, "bases.yaml:1:1 file-not-readable")


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
    with pytest.raises(NothingSelectedError, match=r"'pytorch-2\.3-cu112'") as caught:
        select(targets, ["jax-*", "pytorch-2.3-cu112"])
    assert caught.value.code == "target-unknown"
    assert "pytorch-2.3-cu121" in caught.value.hint
    with fails("target-unknown") as caught:
        select(targets, ["zz\n*"])
    assert r"'zz\n*'" in caught.value.message
    assert "workbench" in caught.value.hint
    with pytest.raises(NothingSelectedError, match="'base:debian-12'") as caught:
        select(targets, ["base:debian-12"])
    assert caught.value.code == "target-unknown"
    assert "imagefactory lock base:NAME" in caught.value.hint


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


@pytest.mark.parametrize("family", ["pytorch", "tensorflow", "jax", "onnxruntime"])
def test_scaffold_parses_and_expands(family: str) -> None:
    text = edit.scaffold(family, bases()).text
    recipe = parse_recipe(text, f"recipes/{family}.yaml")
    (target,) = expand(recipe, bases())
    assert target.name.startswith(f"{family}-")
    assert target.version in {wheel.version for wheel in knowledge.cuda_wheels()}


@pytest.mark.parametrize(
    "named",
    [
        "cupy",
        "cupy-cuda12x",
        "numba",
        "openvino",
        "apache-tvm",
        "jax",
        "pytorch",
        "tensorflow",
        "onnxruntime-gpu",
    ],
)
def test_scaffold_takes_the_newest_row_of_a_bundled_recipe(named: str) -> None:
    bundled = read_each(RECIPES)[0]
    (known,) = (one for one in bundled if named in (one.family, one.framework) and one.source == "pypi")
    text = edit.scaffold("lab", read_bases(RECIPES), bundled, framework=named).text
    (target,) = expand(parse_recipe(text, FILE), read_bases(RECIPES))
    newest = max((row.version for row in known.matrix), key=natural)
    assert (target.framework, target.version) == (known.framework, newest)
    rows = [
        row for row in expand(known, read_bases(RECIPES)) if row.version == newest and row.cuda == target.cuda
    ]
    assert target.gpu or not any(row.gpu for row in rows)
    keys = ("requirements", "constraints", "capabilities", "environment")
    assert any(all(getattr(row, key) == getattr(target, key) for key in keys) for row in rows)


@pytest.mark.parametrize("source", ["pypi", "conda"])
def test_scaffold_invents_no_version(source: str) -> None:
    with pytest.raises(UnknownAnswerError) as caught:
        edit.scaffold("my-lab", bases(), source=source)
    assert caught.value.code == "framework-not-known"
    assert "torch" in caught.value.hint


def test_scaffold_of_a_known_framework_under_another_name() -> None:
    text = edit.scaffold("lab", bases(), framework="Torch").text
    (target,) = expand(parse_recipe(text, FILE), bases())
    newest = [wheel for wheel in knowledge.cuda_wheels() if wheel.package == "torch"][-1]
    assert (target.framework, target.version, target.cuda) == ("torch", newest.version, newest.cuda)


@pytest.mark.parametrize(("family", "framework"), [("A\nb", ""), ("a", "x; y"), ("../x", ""), ("", "")])
def test_scaffold_refuses_names(family: str, framework: str) -> None:
    for source in ("pypi", "conda"):
        with pytest.raises(UsageError):
            edit.scaffold(family, bases(), framework=framework, source=source)


@pytest.mark.parametrize(
    ("family", "framework"),
    [("pytorch-conda", "pytorch"), ("tensorflow", "tensorflow"), ("jax-conda", "jaxlib")],
)
def test_scaffold_of_conda_parses_and_expands(family: str, framework: str) -> None:
    text = edit.scaffold(family, bases(), source="conda").text
    (target,) = expand(parse_recipe(text, f"recipes/{family}.yaml"), bases())
    assert (target.source, target.framework, target.name) == (
        "conda",
        framework,
        f"{family}-{target.version}-cu126",
    )
    assert target.version in {
        row.version for name in knowledge.families().values() for row in knowledge.releases(name)
    }
    assert target.channels == ("https://conda.anaconda.org/conda-forge",)


def test_scaffold_says_when_a_name_is_condas() -> None:
    with pytest.raises(UnknownAnswerError) as caught:
        edit.scaffold("lab", bases(), framework="pytorch")
    assert "--framework torch" in caught.value.hint
    assert edit.scaffold("lab", bases(), framework="pytorch", source="conda").text


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
    assert all((one.location, one.code) == (place, "exclude-conflict") for one in caught.value.diagnostics)
