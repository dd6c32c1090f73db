"""What `recipe import` chooses, where it stops, and that each hint is solved before it is made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagefactory.errors import ImagefactoryError, UnbuiltError, UnreachableError, UnsolvableError, UsageError
from imagefactory.extras.importers.new import RecipePlan, RecipeRequest, plan_recipe
from imagefactory.model import BaseSpec, Lock, Target
from imagefactory.progress import QuietProgress
from imagefactory.project import load_project
from imagefactory.recipes.edit import ImageChoice
from imagefactory.settings.load import load_settings
from tests.made.small_index import PYTHONS, Release, SmallIndex

OLD = ("3.9", "3.10", "3.11")
CUDA = {"2.15.0": "13.2", "2.7.1": "12.6", "2.6.0": "12.4"}
INDEX = {
    **{f"torch=={one}": Release() for one in ("2.15.0", "2.9.1", "2.7.1", "2.6.0", "2.4.1", "2.3.1")},
    "torch==2.0.1": Release(pythons=OLD),
    "torch==2.1.2": Release(pythons=OLD),
    "cupy-cuda111==12.3.0": Release(pythons=OLD),
    "torch==2.2.2": Release(pythons=OLD),
    "transformers==5.0.0": Release(needs=("numpy",)),
    "trainer==1.0": Release(needs=("torch<2.8", "numpy")),
    "numpy==2.4.6": Release(),
    "numpy==1.26.4": Release(pythons=OLD),
    "einops==0.8.0": Release(),
    "tensorflow==2.21.0": Release(),
    "jax==0.10.2": Release(),
    "jax==0.4.35": Release(),
    "tensorflow-cpu==2.21.0": Release(),
    "jax-cuda12-plugin==0.10.2": Release(),
    "data==1.0": Release(needs=("tensorflow",)),
    "layers==1.0": Release(needs=("jax",)),
    "cupy-cuda12x==13.6.0": Release(),
    "numba==0.68.1": Release(needs=("numpy",)),
    "librosa==1.0": Release(needs=("numba",)),
    "old-tool==1.0": Release(needs=("numpy<2",)),
    "sourced==1.0": Release(pythons=()),
    "filterpy==1.4.5": Release(pythons=()),
}


@dataclass(frozen=True, slots=True)
class Bench:
    root: Path
    index: SmallIndex

    def plan(self, text: str, *, file: str = "requirements.txt", **arguments: str) -> RecipePlan:
        path = self.root / file
        path.write_text(text)
        factory = load_project(load_settings(directory=self.root, start=self.root, environ={}), os.environ)
        request = RecipeRequest(family="lab", file=path, **arguments)  # type: ignore[arg-type]
        return plan_recipe(factory, request, self.index, QuietProgress())

    def choice(self, text: str, **request: str) -> ImageChoice:
        plan = self.plan(text, **request)
        plan.check()
        assert not plan.unsolved
        assert plan.draft.choice
        return plan.draft.choice

    def stop(self, text: str, **request: str) -> ImagefactoryError:
        with pytest.raises(ImagefactoryError) as stopped:
            self.plan(text, **request)
        return stopped.value


@pytest.fixture
def bench(root: Path) -> Bench:
    (root / "imagefactory.toml").touch()
    return Bench(root, SmallIndex(INDEX))


# --- what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("torch\neinops\n", ("torch", "2.15.0", "13.2", "3.13")),
        ("trainer\n", ("torch", "2.7.1", "12.6", "3.13")),
        ("trainer\nlibrosa\n", ("torch", "2.7.1", "12.6", "3.13")),
        ("torch>=2.2,<2.3\n", ("torch", "2.2.2", "12.1", "3.11")),
        ("torch==2.6.0\nnumpy<2\n", ("torch", "2.6.0", "12.4", "3.11")),
        ("torch==2.3.1\n", ("torch", "2.3.1", "12.1", "3.13")),
        ("jax[cuda12]\n", ("jax", "0.10.2", "12", "3.13")),
        ("jax\n", ("jax", "0.10.2", "13", "3.13")),
        ("jax[cuda12_pip]==0.4.35\n", ("jax", "0.4.35", "12", "3.13")),
        ("cupy-cuda12x<14\n", ("cupy-cuda12x", "13.6.0", "12", "3.13")),
        ("tensorflow\ntrainer\n", ("tensorflow", "2.21.0", "12", "3.13")),
        ("torch\n-c bounds.txt\n", ("torch", "2.3.1", "12.1", "3.13")),
        ("torch\ncupy-cuda12x\n", ("torch", "2.9.1", "12.8", "3.13")),
        ("torch\ncupy-cuda111\n", ("torch", "2.0.1", "11.7", "3.11")),
        ("trainer\ncupy-cuda111\n", ("torch", "2.0.1", "11.7", "3.11")),
        ("tensorflow\njax\njax-cuda12-plugin\n", ("jax", "0.10.2", "12", "3.13")),
        ("tensorflow-cpu\ndata\nlayers\n", ("jax", "0.10.2", "13", "3.13")),
    ],
)
def test_what_the_file_leaves_open_is_solved(bench: Bench, text: str, chosen: tuple[str, ...]) -> None:
    (bench.root / "bounds.txt").write_text("torch<2.4\n")
    framework, version, cuda, python = chosen
    result = bench.choice(text)
    assert result == ImageChoice(framework=framework, version=version, cuda=cuda, python=python)


def test_an_index_of_builds_says_which_cuda(bench: Bench) -> None:
    text = "--extra-index-url https://wheels.example.org/whl/cu121\ntorch\n"
    assert bench.choice(text).version == "2.4.1"
    assert bench.choice(text.replace("torch\n", "trainer\n")).version == "2.4.1"


def test_a_version_that_no_table_knows_says_its_cuda_itself(bench: Bench) -> None:
    bench.index.files = {"torch==9.1.0": Release(needs=("nvidia-cuda-runtime==14.1.5",))} | INDEX
    bench.index.files["nvidia-cuda-runtime==14.1.5"] = Release()  # type: ignore[index]
    assert bench.choice("torch\n").cuda == "14.1"


def test_the_choice_is_told_with_its_driver(bench: Bench) -> None:
    plan = bench.plan("trainer\n")
    assert any(re.search(r"torch 2\.7\.1 .*12\.6.* 525 ", line) for line in plan.why)
    assert set(plan.why) <= set(plan.draft.notes)
    assert plan.draft.lost == ()


def test_what_was_asked_for_is_solved_as_it_will_be_locked(bench: Bench) -> None:
    bench.plan("trainer\n")
    assert bench.index.solved[-1].requirements == ("torch==2.7.1.*", "trainer")


def test_an_older_release_is_chosen_where_the_newest_does_not_lock(bench: Bench) -> None:
    """What a version of the framework is known to need comes to the question with that version."""

    class Strict(SmallIndex):
        def solve(self, target: Target, base: BaseSpec, under: Lock | None) -> dict[str, str]:
            if target.version == "2.15.0":
                raise UnsolvableError("companion-missing", "no torchaudio goes with it")
            return dict(SmallIndex.solve(self, target, base, under))

    strict = Bench(bench.root, Strict(INDEX))
    assert strict.choice("torch\n").version == "2.9.1"
    assert isinstance(strict.stop("torch==2.15.0\n"), UnsolvableError)


def test_a_python_with_all_wheels_comes_before_one_to_build_for(bench: Bench) -> None:
    """What is known to be needed, and not declared, may have no wheel."""

    class Needing(SmallIndex):
        def solve(self, target: Target, base: BaseSpec, under: Lock | None) -> dict[str, str]:
            if target.python not in pythons:
                rows = ({"name": "numpy", "version": "1.26.4", "source": "x"},)
                raise UnbuiltError("wheel-missing", "no wheel", packages=rows, pins=("torch==2.15.0",))
            return dict(SmallIndex.solve(self, target, base, under))

    pythons = {"3.11"}
    needing = Bench(bench.root, Needing(INDEX))
    assert needing.choice("torch\n").python == "3.11"
    pythons = set()
    plan = needing.plan("torch\n")
    assert (plan.draft.choice and plan.draft.choice.python, plan.without_wheel) == ("3.13", ("numpy",))


@pytest.mark.parametrize(
    ("text", "solved"),
    [
        ("torch\neinops\n", ["3.13", "3.13"]),  # the file, and the recipe
        ("trainer\n", ["3.13", "3.13"]),  # what was found changes no question
        ("torch==2.1.2\n", ["3.13", "3.11", "3.11"]),
        ("torch\nsourced\n", ["3.11", "3.13", "3.13", "3.13"]),  # no other Python can have wheels
        ("torch\nfilterpy==1.4.5\n", ["3.11", "3.13", "3.13", "3.13"]),
    ],
)
def test_nothing_is_solved_needlessly(bench: Bench, text: str, solved: list[str]) -> None:
    bench.index.files = INDEX | {"filterpy==0.1": Release()}
    bench.plan(text)
    pythons = [item.python for item in bench.index.solved]
    assert (sorted(pythons) if len(pythons) > 3 else pythons) == solved


def test_the_projects_own_code_bounds_setuptools_and_python(bench: Bench) -> None:
    (bench.root / "train.py").write_text("import imp\nimport pkg_resources\n")
    bench.index.files = INDEX | {f"setuptools=={item}": Release() for item in ("83.0.0", "81.0.0")}
    plan = bench.plan("torch\nsetuptools>=70\n")
    assert plan.draft.choice
    assert plan.draft.choice.python == "3.11"
    assert "  - setuptools<82" in plan.draft.text.partition("constraints:")[2].splitlines()
    assert [item for item in plan.draft.notes if item.startswith("train.py:")]


def test_numba_alone_is_no_framework(bench: Bench) -> None:
    assert isinstance(bench.stop("librosa\nnumba\n"), UsageError)
    assert bench.choice("numba\n", framework="numba", cuda="13").framework == "numba"


# --- a file of pins of an older time ---------------------------------------------------------------

DAYS = {
    "torch==2.15.0": Release(day="2026-10-01"),
    "torch==2.3.1": Release(day="2024-06-05"),
    "torch==2.3.0": Release(day="2024-04-24"),
    "torch==2.2.2": Release(day="2024-01-30", pythons=OLD),
    "adapter==1.0": Release(needs=("torch",), day="2024-01-02"),
    "tool==2.0": Release(day="2024-03-01"),
    "tool==3.0": Release(day="2026-03-01"),
    "newer==1.0": Release(needs=("torch>=2.9",), day="2024-03-01"),
    "sourced==1.0": Release(pythons=(), day="2024-03-01"),
}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("torch\nadapter==1.0\ntool==2.0\n", "2.3.1"),  # a series that began within 60 days
        ("torch\nadapter==1.0\n", "2.2.2"),
        ("adapter==1.0\ntool==2.0\n", "2.3.1"),  # the framework comes by another
        ("adapter==1.0\nsourced==1.0\n", "2.3.1"),  # a package to be built
        ("torch\nadapter\ntool==2.0\n", "2.15.0"),  # most is open
        ("torch\ntool==2.*\n", "2.15.0"),
        ("torch>=2.9\ntool==2.0\n", "2.15.0"),  # the file wants a newer one
        ("torch\nnewer==1.0\n", "2.15.0"),  # so does a package
        ("torch==2.15.0\ntool==2.0\n", "2.15.0"),
        ("torch\ntool==3.0\n", "2.3.1"),
    ],
)
def test_a_framework_beside_pins_is_of_their_time(bench: Bench, text: str, version: str) -> None:
    bench.index.files = DAYS
    plan = bench.plan(text)
    assert plan.draft.choice
    assert plan.draft.choice.version == version
    messages = any("--framework torch=VERSION" in line for line in plan.draft.notes)
    assert messages is (version != "2.15.0")


def test_pins_of_no_day_and_a_version_that_was_said_change_nothing(bench: Bench) -> None:
    text = "torch\ntool==2.0\n"
    bench.index.files = DAYS
    expected = bench.choice(text, framework="torch", version="2.15.0")
    bench.index.files = {pin: replace(item, day="") for pin, item in DAYS.items()}
    assert expected.version == bench.choice(text).version == "2.15.0"


# --- where it stops ------------------------------------------------------------------------------


def test_an_option_completes_the_file_and_does_not_override_it(bench: Bench) -> None:
    error = bench.stop("torch>=2.2,<2.3\n", framework="torch", version="2.1.2", cuda="12.1")
    assert isinstance(error, UsageError)
    assert "2.2" in error.hint
    (bench.root / "bounds.txt").write_text("torch>=2.2\n")
    assert isinstance(bench.stop("torch\n-c bounds.txt\n", framework="torch", version="2.1"), UsageError)


def test_a_series_within_whose_releases_only_some_are_allowed_is_written_as_one(bench: Bench) -> None:
    bench.index.files = INDEX | {"torch==2.3.0": Release()}
    assert bench.choice("torch<2.3.1\n", framework="torch", version="2.3").version == "2.3.0"
    assert bench.choice("torch==2.3\n").version == "2.3.0"


@pytest.mark.parametrize(
    "text",
    [
        "torch==2.4.1\neinops\n",
        "torch\nnumpy>=2\n",
        "einops\n-c bounds.txt\n",
        "torch<2.3\n",
        "--extra-index-url https://wheels.example.org/whl/cu128\ntorch\n",
    ],
)
def test_a_target_against_the_bounds_of_the_file(bench: Bench, text: str) -> None:
    (bench.root / "bounds.txt").write_text("numpy>=2\n")
    error = bench.stop(text, on="pytorch-2.3-cu121")
    assert error.code == "target-conflict"
    for name in re.findall(r"--extends ([^ ;]+)", error.hint):
        assert bench.plan(text, on=name).unsolved == ""
    assert re.search(r"--extends pytorch|--framework torch=2", error.hint)


def test_a_python_that_the_target_does_not_have(bench: Bench) -> None:
    text = '[project]\nname = "x"\nrequires-python = ">=3.12"\ndependencies = ["einops"]\n'
    error = bench.stop(text, file="pyproject.toml", on="pytorch-2.9-cu128")
    assert (error.code, "Python" in error.message) == ("target-conflict", True)
    names = re.findall(r"--extends ([^ ;]+)", error.hint)
    assert names
    assert all(name.endswith("-py313") for name in names)


def test_a_target_that_fits(bench: Bench) -> None:
    plan = bench.plan("torch==2.3.1\neinops\nnumpy<2\n", on="pytorch-2.3-cu121")
    (target,) = plan.check()  # type: ignore[misc]
    assert target.on == "pytorch-2.3-cu121"
    assert (plan.unsolved, plan.draft.lost) == ("", ())
    assert bench.index.solved[-1].name == "lab-2.3-cu121"


def test_a_target_whose_packages_do_not_go_with_the_file(bench: Bench) -> None:
    error = bench.stop("old-tool\n", on="pytorch-2.15-cu132")
    assert isinstance(error, UnsolvableError)
    assert "--extends pytorch-2.3-cu121" in error.hint


def test_a_build_that_the_index_does_not_have(bench: Bench) -> None:
    bench.index.files = INDEX | {"torch==2.2.1": Release(pythons=OLD)}
    error = bench.stop("torch==2.2.1+cu118\neinops\n")
    assert error.code == "framework-conflict"
    assert "--cuda 12.1" in error.hint
    assert "--extends" not in error.hint  # a target of another torch
    assert bench.choice("torch==2.2.1+cu118\neinops\n", cuda="12.1").version == "2.2.1"


def test_a_build_for_cpus(bench: Bench) -> None:
    error = bench.stop("--index-url https://wheels.example.org/whl/cpu\ntorch\n")
    assert error.code == "framework-conflict"
    result = re.search(r"--cuda (\S+)", error.hint)
    assert result
    assert bench.choice("torch\n", cuda=result[1]).cuda == result[1]


def test_no_solution(bench: Bench) -> None:
    error = bench.stop("torch==2.6.0\nnumpy>=3\n")
    assert (error.code, error.tree) == ("packages-conflict", "the whole account")  # type: ignore[attr-defined]
    error = bench.stop("trainer\n", framework="torch", version="2.9", cuda="12.8")
    assert "--framework torch=2.7.1 --cuda 12.6" in error.hint


def test_a_file_of_which_nothing_is_taken(bench: Bench) -> None:
    for text in ("# nothing\n", "-e .\n"):
        for on in ("", "pytorch-2.3-cu121"):
            assert bench.stop(text, on=on).code == "no-packages-found"


def test_the_extra_that_has_the_framework_is_the_hint(bench: Bench) -> None:
    text = '[project]\nname = "x"\ndependencies = ["einops"]\n[project.optional-dependencies]\n'
    text += 'broken = ["torch>=99"]\nworker = ["trainer", "torch"]\n'
    error = bench.stop(text, file="pyproject.toml")
    assert (error.code, error.hint) == ("framework-missing", "--extra worker")
    plan = bench.plan(text, file="pyproject.toml", extras=("worker",))  # type: ignore[arg-type]
    assert plan.draft.choice
    assert plan.draft.choice.version == "2.7.1"


# --- what is written all the same ---------------------------------------------------------------


def test_packages_without_wheels_stop_no_recipe(bench: Bench) -> None:
    plan = bench.plan("torch==2.1.2\nsourced\nfilterpy==1.4.5\n")
    plan.check()
    assert sorted(plan.without_wheel) == ["filterpy", "sourced"]
    assert plan.draft.choice == ImageChoice(framework="torch", version="2.1.2", cuda="12.1", python="3.11")
    assert plan.draft.lost == ()


def test_what_stands_against_packages_without_wheels(bench: Bench) -> None:
    """A wheel that is missing is not the reason where building it would not help."""
    error = bench.stop("torch==2.1.2\nsourced\nold-tool\nnumpy>=2\n")
    assert (error.code, error.tree) == ("packages-conflict", "the whole account")  # type: ignore[attr-defined]


def test_an_index_that_cannot_be_reached(bench: Bench) -> None:
    class Down(SmallIndex):
        def solve(self, target: Target, base: BaseSpec, under: Lock | None) -> dict[str, str]:
            raise UnreachableError("index-unreachable", "no network")

        def declared(self, target: Target, base: BaseSpec) -> dict[str, str]:
            raise UnreachableError("index-unreachable", "no network")

    down = Bench(bench.root, Down({}))
    plan = down.plan("torch==2.3.1\n")
    assert plan.unsolved == "no network"
    assert any("no network" in note for note in plan.draft.notes)
    assert isinstance(down.stop("torch\n"), UsageError)
    plan = down.plan("einops\n", on="pytorch-2.3-cu121")
    assert plan.unsolved == "no network"


def test_every_python_is_one_that_the_index_may_have(bench: Bench) -> None:
    bench.index.files = INDEX | {"torch==2.0.1": Release(pythons=("3.9", "3.10"))}
    assert bench.choice("torch==2.0.1\n").python == "3.10"
    assert {item.python for item in bench.index.solved} <= set(PYTHONS)


def test_an_extra_for_a_cuda_that_pypi_does_not_have_stops(bench: Bench) -> None:
    text = "jax[cuda11_cudnn86]>=0.4.2\n"
    assert "--cuda 13" in bench.stop(text).hint
    plan = bench.plan(text, cuda="13")
    assert "extras: [cuda13]" in plan.draft.text
    assert any(line.startswith("jax[cuda11-cudnn86]") for line in plan.draft.notes)


def test_a_release_that_pypi_has_without_cuda(bench: Bench) -> None:
    bench.index.files = INDEX | {"tensorflow==2.12.1": Release(pythons=OLD)}
    error = bench.stop("tensorflow==2.12.1\n")
    assert error.code == "cuda-not-on-pypi"
    assert "--source conda --framework tensorflow=2.12.1 --cuda 11.8" in error.hint
    plan = bench.plan("tensorflow==2.12.1\n", source="conda", framework="tensorflow", cuda="11.8")
    assert "\nsource: conda\n" in plan.draft.text
    assert '\npython: "3.11"\n' in plan.draft.text
    plan = bench.plan("tensorflow==2.11.0\n", source="conda", framework="tensorflow", cuda="11.2")
    assert '\npython: "3.10"\n' in plan.draft.text


def test_a_python_without_wheels_of_what_has_no_source_is_not_solved_with_sources(bench: Bench) -> None:
    bench.index.files = INDEX | {"torch==2.0.1": Release(pythons=("3.9", "3.10"))}
    plan = bench.plan("torch==2.0.1\nsourced\n")
    assert plan.without_wheel == ("sourced",)
    assert bench.index.searched == {"3.10", "3.9"}


def test_a_debian_package_that_the_release_does_not_have_is_lost(bench: Bench) -> None:
    bench.index.unknown = ("python-opengl",)
    text = "FROM python:3.11\nRUN apt-get install -y git python-opengl\nRUN pip install torch\n"
    plan = bench.plan(text, file="Dockerfile")
    assert "\nsystem:\n  - git\n" in plan.draft.text
    assert "  - python-opengl" not in plan.draft.text
    (lost,) = plan.draft.lost
    assert re.match(r"Dockerfile:2:\d+: apt-get install python-opengl \(", lost)
