"""What the check `profile` makes of what was measured. Nothing is measured here.

Steps of training: what they are called, and what a GPU without room for them leaves out. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.suite.context import CheckFailure
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
CONTEXT: Any = SimpleNamespace(rehearsal=False, device={"capability": "8.0"})


def check(monkeypatch: pytest.MonkeyPatch, **changes: dict[str, float]) -> Any:
    asked: list[Any] = []

    def rates(*words: Any) -> Any:
        asked.append(words)
        found = {**MEASURED, **changes}
        return SimpleNamespace(**{name: lambda own=own: own for name, own in found.items()})

    monkeypatch.setattr(profile, "Rates", rates)
    monkeypatch.setattr(profile, "record_steps", lambda *_, **__: {"step-bert-fp32-8-peak": 7.0})
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
    with pytest.raises(CheckFailure, match=r"up-pinned-4096 took no time at all"):
        check(monkeypatch, copies={"up-pinned-4096": 0.0})


SETTINGS = SimpleNamespace(
    backends=SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)),
        cudnn=SimpleNamespace(allow_tf32=False),
    )
)


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile.importlib, "import_module", lambda _: SETTINGS)


def test_each_network_batch_and_type_has_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "train", lambda *_: iter([("whole", 0.5), ("peak", 7.0)]))
    found = profile.record_steps("cuda", ("fp32", "fp16"), few=False)
    assert len(found) == 3 * 2 * 2 * 2
    assert found["step-bert-fp16-32-peak"] == 7.0
    assert set(profile.record_steps("cpu", ("fp32",), few=True)) == {
        f"step-{name}-fp32-{batch}-{what}"
        for name, (_, few) in profile.BATCHES.items()
        for batch in few
        for what in ("whole", "peak")
    }
    assert SETTINGS.backends.cudnn.allow_tf32
    assert not SETTINGS.backends.cuda.matmul.allow_tf32


def test_what_there_is_no_room_for_is_left_out_and_what_else_fails_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB"

    def train(name: str, batch: int, *_: Any) -> Iterator[tuple[str, float]]:
        yield "forward", 0.1
        if (name, batch) == ("resnet18", 64):
            raise RuntimeError(said)

    monkeypatch.setattr(profile, "train", train)
    found = profile.record_steps("cuda", ("fp32",), few=False)
    assert "step-resnet18-fp32-64-forward" not in found
    assert len(found) == 5
    said = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        profile.record_steps("cuda", ("fp32",), few=False)
