"""What is built for a lock, in which order, and what the target is with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from imagefactory.recipes.built import BuiltWheel
from imagefactory.stages.lock_build import in_order, with_wheel
from tests.made.values import make_target


def row(name: str, *requires: str) -> dict[str, Any]:
    return {"name": name, "requires": list(requires)}


def test_each_is_built_after_what_it_requires() -> None:
    rows = [row("", "a"), row("a", "b", "numpy"), row("c", "a"), row("b", "b")]
    assert [one["name"] for one in in_order(rows)] == ["b", "a", "c", ""]


def test_packages_that_require_each_other_are_built_all_the_same() -> None:
    rows = [row("a", "b"), row("b", "a"), row("c", "b")]
    assert sorted(one["name"] for one in in_order(rows)) == ["a", "b", "c"]


def test_a_target_with_a_wheel_asks_for_it_and_keeps_extras() -> None:
    wheel = BuiltWheel(
        name="ops", version="1.2", path="./wheels/ops-1.2-py3-none-any.whl", source="./src/ops"
    )
    target = make_target(requirements=("torch==2.3.*", "Ops>=1", "ops[gpu]"), sources=("./src/ops", "./lab"))
    found = with_wheel(target, wheel)
    assert found.requirements == ("torch==2.3.*", "ops[gpu]", "ops==1.2")
    assert found.sources == ("./lab",)
    assert found.origins == (("ops", wheel.path),)
    conda = with_wheel(replace(target, source="conda", pip=("ops",)), wheel)
    assert (conda.requirements, conda.pip) == (target.requirements, ("ops==1.2",))
