"""`imagefactory run`: what its limits become, and how a run that reached one ends."""

from __future__ import annotations

import pytest

from imagefactory.model import Completed, RunSpec
from imagefactory.stages import run
from tests.made.command import Call


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ({"timed_out": True}, "reached the limit time=2s"),
        ({"over": ("too much", "ask for more")}, "too much"),
    ],
)
def test_a_run_that_reached_a_limit(
    call: Call, monkeypatch: pytest.MonkeyPatch, ended: dict[str, object], said: str
) -> None:
    asked: list[RunSpec] = []

    def end(_: object, __: object, spec: RunSpec, *___: object) -> Completed:
        asked.append(spec)
        return Completed(returncode=137, stdout="", stderr="", seconds=2.0, **ended)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "run_target", end)
    limits = ["--limit", "time=2s,memory=1K", "--limit", "files=none"]
    result = call("run", *limits, "pytorch-2.3-cu121", "--", "true")
    assert result.code == 137
    assert said in result.err
    assert (asked[0].timeout, asked[0].limits) == (2, (("memory", 1024), ("files", None)))


def test_a_limit_that_cannot_be(call: Call) -> None:
    result = call("run", "--limit", "memory=much", "pytorch-2.3-cu121", "--", "true")
    assert result.code == 2
    assert "memory=16G" in result.err
