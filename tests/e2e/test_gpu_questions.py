"""What can this run on? inspect, compat and plan on the committed recipes, and on an image built here.

The questions need no image: the locks name the wheels, and what is in those was scanned before.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.services.factory import Factory, copy_store

MAIN, TINY = "pytorch-2.3-cu121", "tiny-12.1-cu121"
GPUS = """\
- {name: V100, driver: "535.129.03", count: 4}
- {name: RTX 5090, driver: "575.57.08"}
- {name: Tesla T4, driver: "470.57"}
"""


@pytest.fixture(scope="module")
def bare(scratch: Path) -> Factory:
    """No store and no cache: what the tree knows by itself."""
    return Factory(store=scratch / "no-store", cache=scratch / "no-cache")


@pytest.fixture(scope="module")
def gpus(scratch: Path) -> str:
    path = scratch / "gpus.yaml"
    path.write_text(GPUS)
    return str(path)


def ask(factory: Factory, *arguments: str, code: int = 0) -> dict[str, Any]:
    said = json.loads(factory.run(*arguments, "--json", code=code).stdout)
    assert isinstance(said, dict)
    return said


# --- without an image ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "code", "words"),
    [
        (("--gpu", "GTX 1080 Ti", "--driver", "535"), 0, ("sm_60", "6.1")),
        (("--gpu", "RTX 5090"), 9, ("no code", "12.0")),
        (("--capability", "8.0", "--driver", "470.57"), 9, ("470.57", "525")),
        (("--capability", "9.0", "--driver", "470.57"), 9, ("470.57", "9.0", "515")),
    ],
)
def test_one_question_has_an_answer_in_one_line(
    bare: Factory, question: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    said = bare.run("compat", "--scan", MAIN, *question, code=code).stdout
    assert said.count("\n") == 1
    assert said.startswith(MAIN)
    assert all(word in said for word in words), said


def test_a_target_that_is_not_built_is_told_by_its_locks_wheels(bare: Factory) -> None:
    said = bare.run("compat", "--scan", MAIN).stdout
    assert "not built" in said
    assert "libtorch_cuda.so" in said
    assert not bare.store.exists()


def test_targets_for_a_gpu_are_told_with_those_that_do_not_run_there(bare: Factory) -> None:
    said = bare.run("compat", "--gpu", "RTX 5090").stdout
    assert "pytorch-2.9-cu128" in said
    assert "libtorch_cuda.so has no code for 12.0" in said
    assert bare.run("compat", "--gpu", "RTX 5090", MAIN, code=9).stdout
    wrong = bare.run("compat", "--gpu", "RTX 509O", code=2)
    assert "RTX 5090" in wrong.stderr


def test_the_fewest_images_for_a_list_of_gpus_and_their_drivers(bare: Factory, gpus: str) -> None:
    said = bare.run("compat", "--cover", gpus, "--family", "pytorch").stdout
    assert said.startswith("pytorch: 2 images for 3 of 3 types of GPU")
    assert "pytorch-2.9-cu128" in said
    assert "pytorch-1.13-cu117" in said  # the one CUDA that the T4's driver runs


def test_the_plan_prunes_by_driver_and_by_code(bare: Factory, gpus: str) -> None:
    said = ask(bare, "plan", MAIN, "pytorch-2.15-cu132", "--inventory", gpus)
    cells = {
        (target["target"], cell["gpu"]): (cell["status"], cell["rule"])
        for target in said["targets"]
        for cell in target["cells"]
    }
    assert cells[MAIN, "V100"][0] == "build"
    assert cells[MAIN, "RTX 5090"] == ("skipped", "no-code")
    assert cells[MAIN, "T4"] == ("skipped", "driver-floor")
    assert cells["pytorch-2.15-cu132", "RTX 5090"] == ("skipped", "driver-floor")
    (line,) = bare.run("plan", MAIN, "--inventory", gpus, "--github").stdout.splitlines()
    (job,) = json.loads(line.removeprefix("matrix="))["include"]
    assert (job["target"], job["gpu"], job["driver"]) == (MAIN, "V100", "535.129.03")


# --- with an image -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_root: Path, small_store: Path, small_factory: Factory, scratch: Path) -> Factory:
    """A small target's factory, with nothing built."""
    store = copy_store(small_store, scratch / "questions-store")
    return Factory(store=store, cache=small_factory.cache, root=tiny_root)


def test_what_is_built_is_unchanged_until_what_decides_it_changes(
    tiny: Factory, scratch: Path, gpus: str
) -> None:
    def planned(root: Path, *options: str) -> dict[str, Any]:
        at = Factory(store=tiny.store, cache=tiny.cache, root=root)
        (target,) = ask(at, "plan", TINY, *options)["targets"]
        assert isinstance(target, dict)
        return target

    assert (planned(tiny.root)["status"], planned(tiny.root)["reason"]) == ("build", "not in the store")
    image: Any = tiny.build(TINY, "--no-test")["image"]
    done = planned(tiny.root)
    assert (done["status"], done["image"]) == ("unchanged", image["digest"])
    assert [cell["status"] for cell in done["cells"]] == ["unchanged"]
    assert tiny.run("plan", TINY, "--github").stdout == 'matrix={"include":[]}\n'
    assert planned(tiny.root, "--inventory", gpus)["status"] == "verify"
    moved = scratch / "tiny-moved"
    shutil.copytree(tiny.root, moved)
    recipe = moved / "recipes" / "tiny.yaml"
    recipe.write_text(recipe.read_text().replace("The CUDA runtime", "The runtime of CUDA"))
    changed = planned(moved)
    assert changed["status"] == "build"
    assert changed["reason"] == "the image in the store is not what assemble makes of the lock"


def test_an_image_of_the_store_is_scanned_once(tiny: Factory) -> None:
    tiny.build(TINY, "--no-test")
    first = ask(tiny, "compat", "--scan", TINY)
    records = sorted((tiny.store / "scans").iterdir())
    assert records
    before = [path.stat().st_mtime_ns for path in records]
    assert ask(tiny, "compat", "--scan", TINY) == first
    assert [path.stat().st_mtime_ns for path in sorted((tiny.store / "scans").iterdir())] == before
