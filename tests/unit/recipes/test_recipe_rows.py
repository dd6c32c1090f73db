"""Rows for CPUs, with cuda: [none]: what they become, and what may not stand in them."""

from __future__ import annotations

import pytest

from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.model import Target
from imagefactory.recipes.bases import parse_bases
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.recipe import parse_recipe
from tests.made.diagnostics import reports
from tests.made.schema import schema_accepts

BASES = parse_bases(
    """\
bases:
  - {name: debian-12, suite: bookworm, python: "3.11", glibc: "2.36", packages: [python3], public: a.b/c:12}
""",
    "recipes/bases.yaml",
)
PYPI = """\
family: onnx
description: ONNX Runtime with CUDA
labels: {org.opencontainers.image.licenses: MIT AND Zlib, org.example.kept: "yes"}
source: pypi
framework: onnxruntime-gpu
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
waive: [collective]
checks: [import, cuda-version, compute]
packages: [numpy]
matrix:
  - version: "1.23"
    cuda: ["12"]
    extras: [cuda, cudnn]
  - version: "1.23"
    cuda: [none]
    framework: onnxruntime
    description: ONNX Runtime for CPUs
    labels: {org.opencontainers.image.licenses: MIT}
"""
CONDA = """\
family: stack
description: PyTorch from conda
source: conda
framework: pytorch
channels: [conda-forge]
platform: linux/amd64
base: debian-12
python: "3.11"
virtual: {cuda: "12.4", archspec: x86_64_v2}
capabilities: ["8.0"]
matrix:
  - version: "2.10"
    cuda: [none]
"""
ON = """\
family: lab
description: with more
matrix:
  - on: onnx-1.23-cpu
    packages: [rich]
"""


def targets(*texts: str) -> dict[str, Target]:
    recipes = [parse_recipe(text, f"recipes/{number}.yaml") for number, text in enumerate(texts)]
    return {target.name: target for target in expand_all(recipes, BASES)}


def fault(*texts: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(RecipeError) as caught:
        targets(*texts)
    assert len(caught.value.diagnostics) == 1
    return caught.value.diagnostics


def test_what_speaks_of_gpus_is_the_other_rows() -> None:
    made = targets(PYPI)
    cpu, gpu = made["onnx-1.23-cpu"], made["onnx-1.23-cu12"]
    assert (cpu.gpu, cpu.cuda, cpu.capabilities, cpu.waive) == (False, "none", (), ())
    assert (gpu.gpu, gpu.cuda, gpu.capabilities, gpu.waive) == (True, "12", ("8.0",), ("collective",))
    assert (cpu.checks, gpu.checks) == (("import", "compute"), ("import", "cuda-version", "compute"))


def test_a_row_names_the_build_for_cpus_and_what_it_is() -> None:
    cpu = targets(PYPI)["onnx-1.23-cpu"]
    assert (cpu.framework, cpu.requirements) == ("onnxruntime", ("onnxruntime==1.23.*", "numpy"))
    assert cpu.description == "ONNX Runtime for CPUs"
    assert dict(cpu.labels) == {"org.opencontainers.image.licenses": "MIT", "org.example.kept": "yes"}


def test_conda_counts_on_no_driver() -> None:
    cpu = targets(CONDA)["stack-2.10-cpu"]
    assert dict(cpu.virtual) == {"__archspec": "x86_64_v2", "__glibc": "2.36"}


def test_what_is_built_on_it_is_for_cpus_too() -> None:
    lab = targets(PYPI, ON)["lab-1.23-cpu"]
    assert (lab.gpu, lab.capabilities, lab.checks) == (False, (), ("import", "compute"))
    assert "rich" in lab.requirements


def test_a_family_for_cpus_alone_needs_no_capabilities() -> None:
    text = CONDA.replace('capabilities: ["8.0"]\n', "")
    assert not targets(text)["stack-2.10-cpu"].gpu
    assert schema_accepts(text)


@pytest.mark.parametrize("text", [PYPI, CONDA, ON])
def test_the_schema_accepts_them(text: str) -> None:
    assert schema_accepts(text)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "[none]",
            '["12", none]',
            "18:18 mixed-row none",
        ),
        (
            "[none]",
            '[none]\n    capabilities: ["8.0"]',
            "19:19 gpu-only-key capabilities",
        ),
        ("[none]", "[none]\n    waive: [collective]", "gpu-only-key waive"),
        ("[none]", "[none]\n    checks: [import, compiler]", "19:22 gpu-only-key compiler"),
        ('["12"]', '["12"]\n    framework: onnxruntime', "16:16 framework-in-gpu-row framework"),
        ("[none]", '["none", none]', "18:20 duplicate-value cuda"),
    ],
)
def test_faults_that_the_schema_knows(old: str, new: str, told: str) -> None:
    text = PYPI.replace(old, new, 1)
    if new.startswith('["12", none]'):
        text = text.replace("    framework: onnxruntime\n", "")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "recipes/0.yaml")
    assert reports(caught.value.diagnostics, told), caught.value
    assert not schema_accepts(text)


def test_a_driver_is_nothing_for_cpus() -> None:
    text = CONDA.replace("[none]", '[none]\n    virtual: {cuda: "12.4"}')
    assert reports(fault(text), "gpu-only-key 'virtual.cuda'")
    assert not schema_accepts(text)


def test_what_brings_cuda_is_told_before_it_is_locked() -> None:
    without = PYPI.replace("    framework: onnxruntime\n", "")
    assert reports(fault(without), "build-mismatch 'onnxruntime-gpu' CPUs")
    jax = (
        PYPI.replace("onnxruntime-gpu", "jax")
        .replace('"1.23"', '"0.10.2"')
        .replace("[cuda, cudnn]", "[cuda12]")
    )
    jax = jax.replace("    framework: onnxruntime\n", "    extras: [cuda12]\n").replace("[collective]", "[]")
    assert reports(fault(jax), "build-mismatch 'cuda12' jax 0.10.2 CPUs")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('    capabilities: ["8.0"]\n', "4:5 gpu-only-key capabilities"),
        ("    checks: [cuda-version]\n", "6:14 gpu-only-key cuda-version"),
        ("    waive: [collective]\n", "gpu-only-key waive"),
    ],
)
def test_nothing_of_gpus_is_added_above(more: str, told: str) -> None:
    assert reports(fault(PYPI, ON + more), told)
