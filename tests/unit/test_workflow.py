"""One line a stage: in which order, and what is not done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.actions import workflow
from imagefactory.actions import workflow as making
from imagefactory.actions.transfer import PushOptions
from imagefactory.actions.verify import VerifyOptions
from imagefactory.oci.store import ImageReference
from imagefactory.progress import QuietProgress
from tests.made.verdicts import NOW


def promoted(monkeypatch: pytest.MonkeyPatch, where: ImageReference | None) -> Any:
    """Where tags are moved after a verdict on an image that was found there."""
    chosen = SimpleNamespace(
        where=where, definition=SimpleNamespace(target=SimpleNamespace(family="pytorch"))
    )
    stages = {
        "check_name": None,
        "signing_key": "a key",
        "resolve_image": chosen,
        "verify_image": "a report",
        "write_unsigned_report": Path("report.json"),
        "sign_report": SimpleNamespace(signed="signed"),
        "attach_signed": ("there",),
    }
    for name, gives in stages.items():
        monkeypatch.setattr(workflow, name, lambda *_, gives=gives: gives)
    monkeypatch.setattr(workflow, "place_of", lambda factory, where: f"registry {where.registry}")
    monkeypatch.setattr(workflow, "local_place", lambda factory, family: f"store {family}")
    monkeypatch.setattr(workflow, "promote", lambda factory, wanted, progress: wanted.place)
    bench = SimpleNamespace(evidence=SimpleNamespace(read=lambda: None), clock=lambda: NOW)
    options = VerifyOptions(promote=True)
    done = workflow.verify_and_attach(None, "pytorch", options, bench, QuietProgress())  # type: ignore[arg-type]
    assert done.attached == ("there",)
    return done.promotion


def test_tags_move_where_the_image_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    where = ImageReference(registry="box.example", repository="images/pytorch", tag="2.3")
    assert promoted(monkeypatch, where) == "registry box.example"
    assert promoted(monkeypatch, None) == "store pytorch"


def make(monkeypatch: pytest.MonkeyPatch, *, passed: bool, push: PushOptions | None) -> list[Any]:
    """What happened when an image was made that passes or not."""
    happened: list[Any] = []
    built = SimpleNamespace(passed=passed, image="an image")
    monkeypatch.setattr(making, "check_build", lambda options: happened.append("checked"))
    monkeypatch.setattr(making, "define_target", lambda factory, target: happened.append("defined"))
    monkeypatch.setattr(making, "build_image", lambda *arguments: built)
    monkeypatch.setattr(
        making,
        "push_target",
        lambda factory, target, options, progress: happened.append(("pushed", options)),
    )
    told: Any = happened.append
    wanted = making.MakeOptions(build=None, push=push, built=told)  # type: ignore[arg-type]
    making.make_image(None, None, wanted, QuietProgress())  # type: ignore[arg-type]
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
