"""What uv is asked, without uv; what it answers is in tests/engines."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.question import PinnedVersions, WheelRequest
from imagefactory.lock.pypi.uv import UvLocker
from tests.made.values import make_lock


class Counting(UvLocker):
    def __init__(self) -> None:
        index = PackageIndex(url="", origin="", certificates="", proxy="", environment=())
        super().__init__(index, python=Path(sys.executable))
        self.asked: list[WheelRequest] = []

    def _solve(self, question: WheelRequest) -> PinnedVersions:
        self.asked.append(question)
        if "sourced" in question.requirements:
            raise NoWheelError("no-usable-wheel", "no wheel", hint="", names=("sourced",), account="why")
        return PinnedVersions(lines=("demo==1.0",))


def test_a_question_is_asked_once(tmp_path: Path) -> None:
    uv, question = Counting(), WheelRequest(lock=make_lock(wheels=()), requirements=("demo",))
    assert (
        uv.solve(question)
        == uv.solve(replace(question, sources=("./demo",)))
        == PinnedVersions(lines=("demo==1.0",))
    )
    assert len(uv.asked) == 1
    uv.solve(replace(question, constraints=("demo<2",)))
    for _ in range(2):  # a folder's files may change
        uv.solve(replace(question, sdists=tmp_path))
    assert len(uv.asked) == 4
    for _ in range(2):
        with pytest.raises(NoWheelError) as caught:
            uv.solve(replace(question, requirements=("sourced",)))
        assert (caught.value.code, caught.value.names, caught.value.account) == (
            *("no-usable-wheel", ("sourced",), "why"),
        )
    assert len(uv.asked) == 5
