"""Steps of training: what they are called, and what a GPU without room for them leaves out. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.suite.gpu.frameworks import torch_steps

SETTINGS = SimpleNamespace(
    backends=SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)),
        cudnn=SimpleNamespace(allow_tf32=False),
    )
)


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_steps.importlib, "import_module", lambda _: SETTINGS)


def test_each_network_batch_and_type_has_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_steps, "train", lambda *_: iter([("whole", 0.5), ("peak", 7.0)]))
    found = torch_steps.record_steps("cuda", ("fp32", "fp16"), few=False)
    assert len(found) == 3 * 2 * 2 * 2
    assert found["step-bert-fp16-32-peak"] == 7.0
    assert set(torch_steps.record_steps("cpu", ("fp32",), few=True)) == {
        f"step-{name}-fp32-{batch}-{what}"
        for name, (_, few) in torch_steps.BATCHES.items()
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

    monkeypatch.setattr(torch_steps, "train", train)
    found = torch_steps.record_steps("cuda", ("fp32",), few=False)
    assert "step-resnet18-fp32-64-forward" not in found
    assert len(found) == 5
    said = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        torch_steps.record_steps("cuda", ("fp32",), few=False)
