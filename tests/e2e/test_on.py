"""A target on another, from PyPI: `recipe import mylab --extends TARGET` keeps the layers below."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.services.factory import Factory, copy_store

BELOW, ABOVE = "tiny-12.1-cu121", "mylab-12.1-cu121"
REQUIREMENTS = """\
# What our lab adds.
packaging>=24,<25
idna  # tiny has it: it stays in its version
"""


@pytest.fixture(scope="module")
def lab(tiny_root: Path, small_store: Path, small_factory: Factory, scratch: Path) -> Factory:
    """A factory of its own that holds tiny, locked, and a family on it."""
    root = scratch / "on"
    shutil.copytree(tiny_root, root)
    here = Factory(store=copy_store(small_store, scratch / "on-store"), cache=small_factory.cache, root=root)
    (root / "requirements.txt").write_text(REQUIREMENTS)
    here.run("recipe", "import", str(root / "requirements.txt"), "--family", "mylab", "--extends", BELOW)
    here.run("lock")
    return here


def pins(root: Path, target: str) -> dict[str, str]:
    """Requirement line -> the file that is locked for it."""
    lines = (root / "lockfiles" / f"{target}.requirements.txt").read_text().splitlines()
    return {pin: wheel for wheel, pin in itertools.pairwise(lines) if wheel.startswith("# wheel: ")}


def layers(built: dict[str, Any]) -> list[tuple[str, str]]:
    return [(layer["digest"], layer["diff_id"]) for layer in built["image"]["layers"]]


@pytest.fixture(scope="module")
def below(lab: Factory) -> dict[str, Any]:
    return lab.build(BELOW)


@pytest.fixture(scope="module")
def above(lab: Factory, below: dict[str, Any]) -> dict[str, Any]:
    return lab.build(ABOVE)


def test_every_package_below_stays_as_it_is_locked(lab: Factory, tiny_root: Path) -> None:
    under, over = pins(lab.root, BELOW), pins(lab.root, ABOVE)
    assert under == pins(tiny_root, BELOW)
    assert under.items() < over.items()
    (added,) = over.keys() - under.keys()
    assert added.startswith("packaging==24.")
    lab.run("lock", "--check")


def test_the_layers_below_are_the_same_bytes(below: dict[str, Any], above: dict[str, Any]) -> None:
    assert above["fresh"] is True
    assert above["smoke"]["passed"] is True
    shared = layers(below)
    assert layers(above)[: len(shared)] == shared
    assert len(layers(above)) == len(shared) + 1


def test_the_image_holds_both(lab: Factory, above: dict[str, Any]) -> None:
    code = "import idna, markupsafe, packaging; print(idna.__version__, packaging.__version__[:3])"
    assert lab.run("run", ABOVE, "--", "python", "-c", code).stdout == "3.7 24.\n"


def test_built_alone_it_gives_the_same_image(lab: Factory, above: dict[str, Any], scratch: Path) -> None:
    """Whether the target below has ever been built decides nothing."""
    shutil.copytree(lab.store, scratch / "on-alone", symlinks=True, copy_function=os.link)
    alone = Factory(store=scratch / "on-alone", cache=lab.cache, root=lab.root)
    for name in ("tiny:12.1-cu121", "mylab:12.1-cu121"):
        alone.run("image", "remove", name)
    alone.run("image", "prune")  # the base stays, the environments' layers go
    assert alone.build(ABOVE, "--no-test")["image"]["digest"] == above["image"]["digest"]


def test_what_is_below_is_updated_there(lab: Factory, above: dict[str, Any]) -> None:
    refused = lab.run("lock", ABOVE, "--upgrade-package", "idna", code=5)
    assert "the package 'idna'" in refused.stderr
    assert f"imagefactory lock {BELOW} --upgrade-package idna" in refused.stderr


def test_a_requirement_that_contradicts_what_is_below(lab: Factory) -> None:
    recipe = lab.root / "recipes" / "mylab.yaml"
    before = recipe.read_text()
    try:
        recipe.write_text(before.replace("  - idna\n", '  - "idna>=3.9"\n'))
        refused = lab.run("lock", ABOVE, code=5)
        (row,) = json.loads(lab.run("list", "--json", ABOVE).stdout)["targets"]
    finally:
        recipe.write_text(before)
    assert "idna==3.7" in refused.stderr
    assert "idna>=3.9" in refused.stderr
    assert f"the packages of {BELOW}" in refused.stderr
    assert row["lock"] == "unsolvable"


def test_a_moved_lock_below_makes_the_one_above_stale(lab: Factory, above: dict[str, Any]) -> None:
    recipe = lab.root / "recipes" / "tiny.yaml"
    recipe.write_text(recipe.read_text().replace("idna==3.7", "idna==3.10"))
    lab.run("lock", BELOW)
    assert ABOVE in lab.run("lock", "--check", code=4).stderr
    lab.run("build", ABOVE, code=4)
    lab.run("lock", ABOVE)
    assert any(pin.startswith("idna==3.10 ") for pin in pins(lab.root, ABOVE))
    shown = json.loads(lab.run("show", "--json", ABOVE).stdout)
    assert shown["lock"] == "ok"
