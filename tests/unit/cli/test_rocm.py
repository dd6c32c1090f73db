"""A factory with a row for AMD's GPUs: what the commands say of it, with nothing locked or built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from imagefactory.cli import cli
from imagefactory.errors import UsageError
from imagefactory.gpu.capability import parse_capability
from imagefactory.matrix.plan import (
    CellRuling,
    CellState,
    PlanGpu,
    PlannedCell,
    PlannedTarget,
    VerificationPlan,
)
from imagefactory.views.plan import format_kits, format_matrix
from tests.made.trusted import write_settings
from tests.made.values import make_target

SHIPPED = Path(__file__).parents[3] / "recipes"
RECIPE = """\
family: jax
description: JAX from PyPI
source: pypi
framework: jax
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
matrix:
  - version: "0.10.2"
    cuda: ["12"]
    extras: [cuda12]
  - version: "0.10.2"
    rocm: ["7"]
    extras: [rocm7-local]
    capabilities: [gfx942, gfx90a]
"""

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name in ("bases.yaml", "bases.schema.json", "recipe.schema.json"):
        shutil.copy(SHIPPED / name, recipes)
    (recipes / "jax.yaml").write_text(RECIPE)
    write_settings(tmp_path, f'store = "{tmp_path}/store"\n')

    def call(*words: str) -> Result:
        return CliRunner().invoke(cli, ["-C", str(tmp_path), *words])

    return call


def test_it_is_called_by_its_rocm(run: Run) -> None:
    assert "jax-0.10.2-rocm7" in run("list").stdout
    shown = run("show", "jax-0.10.2-rocm7").stdout
    assert "for           ROCm 7" in shown
    assert "capabilities  gfx90a, gfx942" in shown
    told = json.loads(run("show", "jax-0.10.2-rocm7", "--json").stdout)
    assert (told["cuda"], told["capabilities"]) == ("rocm7", ["gfx90a", "gfx942"])


def test_each_maker_has_a_table_of_its_own(run: Run) -> None:
    cuda, amd = run("compat").stdout.split("v verified")[:2]
    assert "jax-0.10.2-cu12" in cuda
    assert "jax-0.10.2-rocm7" not in cuda
    assert "jax-0.10.2-rocm7" in amd
    assert "gfx1201" in amd
    told = json.loads(run("compat", "--json").stdout)
    asked = [gpu["capability"] for gpu in told["gpus"]]
    assert asked[asked.index("12.1") + 1] == "gfx803"
    assert {len(row["cells"]) for row in told["rows"]} == {len(asked)}


@pytest.mark.parametrize(
    ("gpu", "title", "told"),
    [
        ("MI300X", "MI300X, processor gfx942: 0 of 2", "it is built for CUDA 12, and gfx942 is AMD's"),
        ("V100", "V100, compute capability 7.0: 1 of 2", "it is built for ROCm 7, and 7.0 is NVIDIA's"),
    ],
)
def test_nothing_of_one_maker_runs_on_the_others(run: Run, gpu: str, title: str, told: str) -> None:
    said = run("compat", "--gpu", gpu)
    assert said.stdout.startswith(title)
    assert told in said.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("compat", "--gpu", "MI300X", "--driver", "535"),
        ("compat", "--capability", "gfx90a", "--driver", "535"),
    ],
)
def test_no_driver_counts_for_amd(run: Run, words: tuple[str, ...]) -> None:
    said = run(*words)
    assert isinstance(said.exception, UsageError)
    assert said.exception.code == "option-conflict"
    assert "--driver" in said.exception.message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("compat", "--gpu", "MI999"), "'MI999'"),
        (("recipe", "add-version", "jax", "0.9", "--cuda", "rocm7"), "rocm7"),
    ],
)
def test_what_makes_no_sense_is_told(run: Run, words: tuple[str, ...], told: str) -> None:
    said = run(*words)
    assert isinstance(said.exception, UsageError)
    assert told in str(said.exception)


def test_a_plan_has_a_cell_for_each_processor(run: Run) -> None:
    said = run("plan", "jax-0.10.2-rocm7").stdout
    assert "gfx90a, gfx942" in said


def test_a_plan_for_gpus_of_both_makers(run: Run, tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.yaml"
    gpus.write_text("- MI250X\n- A100\n")
    cells = {
        (target["target"], cell["capability"]): cell["rule"]
        for target in json.loads(run("plan", "--inventory", str(gpus), "--json").stdout)["targets"]
        for cell in target["cells"]
    }
    assert cells["jax-0.10.2-rocm7", "8.0"] == cells["jax-0.10.2-cu12", "gfx90a"] == "maker"
    assert "maker" not in (cells["jax-0.10.2-rocm7", "gfx90a"], cells["jax-0.10.2-cu12", "8.0"])


def test_no_kit_is_asked_for_of_what_no_kit_starts() -> None:
    device = PlanGpu(capability=parse_capability("gfx90a"), name="MI250X")
    cell = PlannedCell(device=device, state=CellState.VERIFY, ruling=CellRuling(claim=None), required=True)
    planned = PlannedTarget(
        target=make_target(name="jax-0.10.2-rocm7", cuda="rocm7"),
        state=CellState.VERIFY,
        reason="",
        hint="",
        image="",
        reference="",
        cells=(cell,),
    )
    plan = VerificationPlan(targets=(planned,), on_gpus=True)
    assert format_kits(plan) == 'targets={"include":[]}'
    assert format_matrix(plan, kits=True) == 'matrix={"include":[]}'  # else a job would wait for such a kit
    assert '"capability":"gfx90a"' in format_matrix(plan)
    build = replace(planned, state=CellState.BUILD, cells=(replace(cell, state=CellState.BUILD),))
    assert '"kits":""' in format_kits(VerificationPlan(targets=(build,), on_gpus=True))
    cuda = replace(planned, target=make_target())
    assert '"kits":"gfx90a/gfx90a-mi250x"' in format_kits(VerificationPlan(targets=(cuda,), on_gpus=True))


def test_a_row_is_added_to_those_for_cuda(run: Run) -> None:
    said = run("recipe", "add-version", "jax", "0.9", "--cuda", "12", "--dry-run")
    assert said.exit_code == 0, said.stderr
    assert "copied from the row of 0.10.2" in said.stderr + said.stdout
    assert "gfx" not in said.stdout.split("as in the row")[0].split('"0.9"')[-1]
