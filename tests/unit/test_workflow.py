"""One line a stage: in which order, and what is not done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory import workflow
from imagefactory.progress import Quiet
from imagefactory.stages.push import PushOptions
from tests.made.verdicts import NOW


def make(monkeypatch: pytest.MonkeyPatch, *, passed: bool, push: PushOptions | None) -> list[Any]:
    """What happened when an image was made that passes or not."""
    happened: list[Any] = []
    built = SimpleNamespace(passed=passed, image="an image")
    monkeypatch.setattr(workflow, "check_build", lambda options: happened.append("checked"))
    monkeypatch.setattr(workflow, "define_target", lambda factory, target: happened.append("defined"))
    monkeypatch.setattr(workflow, "build_image", lambda *arguments: built)
    monkeypatch.setattr(
        workflow,
        "push_target",
        lambda factory, target, options, progress: happened.append(("pushed", options)),
    )
    told: Any = happened.append
    wanted = workflow.Making(build=None, push=push, built=told)  # type: ignore[arg-type]
    workflow.make_image(None, None, wanted, Quiet())  # type: ignore[arg-type]
    assert happened[:3] == ["checked", "defined", built]
    return happened[3:]


def test_what_passed_is_told_and_then_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    ((word, options),) = make(
        monkeypatch, passed=True, push=PushOptions(registry="box.example/images", now=NOW)
    )
    assert (word, options.registry, options.made) == ("pushed", "box.example/images", "an image")


def test_what_did_not_pass_is_told_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make(monkeypatch, passed=False, push=PushOptions(now=NOW)) == []


def test_what_nobody_wants_elsewhere_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make(monkeypatch, passed=True, push=None) == []
