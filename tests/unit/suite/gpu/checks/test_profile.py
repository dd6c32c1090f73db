"""What the check `profile` makes of what was measured. Nothing is measured here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.suite.context import Failure
from imagefactory.suite.gpu.checks import profile

MEASURED = {
    "small": {"kernel": 3e-6, "launch": 0.0},
    "products": {"product-fp16-2000": 1e-9, "product-fp16-8000": 2e-9, "product-fp32-8000": 8e-9},
    "convolutions": {"convolution-fp32-9": 1.0},
    "attention": {},
    "moves": {"move-12": 4e-9, "move-24": 6e-9},
    "copies": {"up-pinned-4096": 1e-5},
    "room": {"processors": 108, "context": 0},
}
CONTEXT: Any = SimpleNamespace(asked=SimpleNamespace(rehearsal=False), device={"capability": "8.0"})


def check(monkeypatch: pytest.MonkeyPatch, **changes: dict[str, float]) -> Any:
    asked: list[Any] = []

    def rates(*words: Any) -> Any:
        asked.append(words)
        found = {**MEASURED, **changes}
        return SimpleNamespace(**{name: lambda own=own: own for name, own in found.items()})

    monkeypatch.setattr(profile, "Rates", rates)
    monkeypatch.setattr(profile.torch_steps, "record_steps", lambda *_, **__: {"step-bert-fp32-8-peak": 7.0})
    finding = profile.check_profile(CONTEXT)
    assert asked == [("cuda", (8, 0))]
    return finding


def test_numbers_name_their_units_and_the_fastest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = check(monkeypatch)
    assert finding.detail == "products at fp16 4, fp32 1 TFLOP/s, memory at 4 GB/s"
    assert finding.numbers["product-fp16-2000-s"] == 1e-9
    assert finding.numbers["step-bert-fp32-8-peak-bytes"] == 7.0
    assert (finding.numbers["processors"], finding.numbers["context-bytes"]) == (108, 0)


def test_what_took_no_time_was_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match=r"up-pinned-4096 took no time at all"):
        check(monkeypatch, copies={"up-pinned-4096": 0.0})
