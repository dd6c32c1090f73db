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


JAX = """\
family: jax
description: JAX from PyPI
source: pypi
framework: jax
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
waive: [collective]
matrix:
  - version: "0.10.2"
    cuda: ["12"]
    extras: [cuda12]
  - version: "0.10.2"
    rocm: ["7", "6.4"]
    extras: [rocm7-local]
    capabilities: [gfx1100, gfx90a, gfx908]
"""


ON_ROCM = """\
family: lab
description: with more
matrix:
  - on: jax-0.10.2-rocm7
    packages: [rich]
"""


def faults(*texts: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(RecipeError) as caught:
        targets(*texts)
    return caught.value.diagnostics


def test_a_row_makes_a_target_for_each_rocm() -> None:
    made = targets(JAX)
    assert list(made) == ["jax-0.10.2-cu12", "jax-0.10.2-rocm7", "jax-0.10.2-rocm64"]
    target = made["jax-0.10.2-rocm7"]
    assert (target.gpu, target.cuda, target.waive) == (True, "rocm7", ("collective",))
    assert target.capabilities == ("gfx908", "gfx90a", "gfx1100")
    assert target.requirements == ("jax[rocm7-local]==0.10.2.*",)
    assert "compiler" not in target.checks
    assert "cuda-version" in target.checks
    assert made["jax-0.10.2-cu12"].capabilities == ("8.0",)


def test_the_build_for_rocm_may_be_a_distribution_of_its_own() -> None:
    text = JAX.replace("    extras: [rocm7-local]\n", "    framework: tensorflow-rocm\n")
    assert targets(text)["jax-0.10.2-rocm7"].requirements == ("tensorflow-rocm==0.10.2.*",)
    assert schema_accepts(text)


def test_what_is_built_on_it_is_for_rocm_too() -> None:
    lab = targets(JAX, ON_ROCM)["lab-0.10.2-rocm7"]
    assert (lab.cuda, lab.capabilities) == ("rocm7", ("gfx908", "gfx90a", "gfx1100"))
    (told,) = faults(JAX, ON_ROCM + '    capabilities: ["9.0"]\n')
    assert reports([told], "recipes/1.yaml:4:5 capability-mismatch 9.0 jax-0.10.2-rocm7")
    assert not faults(JAX, ON_ROCM.replace("rocm7", "cu12") + "    capabilities: [gfx90a]\n")[1:]


@pytest.mark.parametrize("text", [JAX, ON_ROCM])
def test_the_schema_accepts_rocm_rows(text: str) -> None:
    assert schema_accepts(text)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            'rocm: ["7", "6.4"]',
            'rocm: ["7"]\n    cuda: ["12"]',
            "16:11 mixed-row cuda rocm",
        ),
        (
            "[gfx1100, gfx90a, gfx908]",
            '[gfx90a, "9.0"]',
            "17:28 capability-mismatch 9.0",
        ),
        (
            "extras: [cuda12]",
            "extras: [cuda12]\n    capabilities: [gfx90a]",
            "14:20 capability-mismatch gfx90a",
        ),
        (
            "[gfx1100, gfx90a, gfx908]",
            "[gfx90a]\n    checks: [compiler]",
            "18:14 check-not-applicable compiler",
        ),
        ('rocm: ["7", "6.4"]', 'rocm: ["7.x"]', "15:12 value-invalid rocm"),
        ('rocm: ["7", "6.4"]', "rocm: []", "15:11 empty-list rocm"),
    ],
)
def test_faults_of_rocm_rows_that_the_schema_knows(old: str, new: str, told: str) -> None:
    text = JAX.replace(old, new, 1)
    found = faults(text)
    assert reports(found, told), found
    assert not schema_accepts(text)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            '"7", "6.4"',
            '"12.1"',
            "recipes/0.yaml:15:12 rocm-unknown 12.1 7",
        ),
        (
            "gfx90a, gfx908",
            "gfx90f",
            "17:29 capability-unknown gfx90f gfx906 gfx908 gfx90a",
        ),
        (
            "gfx90a, gfx908",
            "gfx777",
            "17:29 capability-unknown gfx777 rocminfo",
        ),
        (
            "    capabilities: [gfx1100, gfx90a, gfx908]\n",
            "",
            "14:5 capabilities-missing capabilities",
        ),
        (
            "[rocm7-local]",
            "[cuda12]",
            "16:13 build-mismatch cuda12 0.10.2",
        ),
        (
            "    extras: [rocm7-local]\n",
            "    framework: onnxruntime-gpu\n",
            "16:16 build-mismatch onnxruntime-gpu AMD",
        ),
    ],
)
def test_faults_that_only_a_person_or_a_table_knows(old: str, new: str, told: str) -> None:
    found = faults(JAX.replace(old, new, 1))
    assert reports(found, told), found


def test_conda_has_no_rows_for_rocm() -> None:
    text = JAX.replace("source: pypi", "source: conda\nchannels: [conda-forge]").replace(
        "    extras: [rocm7-local]\n", ""
    )
    assert reports(faults(text), "key-not-for-source 'rocm' pypi")
    assert not schema_accepts(text)
