"""What a family promises beside its framework."""

from __future__ import annotations

from typing import Any

import pytest

from imagefactory.gpu import knowledge
from imagefactory.recipes.edit import omitted_companions
from tests.made.values import make_target

PROMISE = "PyTorch with torchvision and torchaudio where they exist"


def told(**more: Any) -> str:
    given = {
        "framework": "torch",
        "version": "2.6",
        "description": PROMISE,
        "requirements": ("torch==2.6.*",),
    }
    return omitted_companions(make_target(**given | more))


def test_a_row_without_what_its_family_promises_is_told() -> None:
    line = told()
    assert "torch 2.6 without torchvision and torchaudio, which the description" in line
    assert line.endswith("(write packages: [torchvision==0.21.*, torchaudio==2.6.*])")
    one = told(requirements=("torch==2.6.*", "torchvision==0.21.*"))
    assert one.endswith("(write packages: [torchaudio==2.6.*])")


@pytest.mark.parametrize(
    "more",
    [
        {"requirements": ("torch==2.6.*", "torchvision==0.21.*", "torchaudio")},
        {"description": "PyTorch alone"},
        {"version": "1.13"},  # whose companions have no wheels for Python 3.11
        {"version": "2.15", "requirements": ("torch==2.15.*", "torchvision==0.29.*")},  # torchaudio ended
        {"version": "99.0"},
        {"source": "conda"},
    ],
)
def test_what_is_there_or_cannot_be_is_not_missed(more: dict[str, Any]) -> None:
    assert told(**more) == ""


def test_companions_go_by_version_and_python() -> None:
    found = {one.package: one.series for one in knowledge.companions("torch", "2.3.1", "3.12")}
    assert found == {"torchvision": "0.18", "torchaudio": "2.3", "torchtext": "0.18"}
    assert knowledge.companions("torch", "2.30", "3.12") == knowledge.companions("jax", "2.3", "3.12") == ()
