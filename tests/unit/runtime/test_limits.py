"""Limits as they are written, and those that hold by themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.model import RunSpec
from imagefactory.runtime import limits
from imagefactory.runtime.limits import (
    MachineCapacity,
    RunLimits,
    decide_limits,
    format_amount,
    limit_message,
    parse_limits,
    read_capacity,
)
from imagefactory.runtime.protocol import check_limits_supported

ROOM = MachineCapacity(
    memory=100 << 30, processors=8, disk=1 << 40, free=1 << 38, files=1 << 26, free_files=1 << 25
)


def test_written_with_units_commas_and_repeated() -> None:
    asked = parse_limits(["memory=16G,processes=50", "time=2h", "scratch=none", "files=9,memory=1K"])
    assert asked == {"memory": 1024, "processes": 50, "time": 7200, "scratch": None, "files": 9}


@pytest.mark.parametrize(
    "text", ["", "memory", "memory=", "memory=0", "memory=-1", "memory=1X", "memory=1h", "processes=1K",
             "time=1G", "files=1.5", "cpu=1", "memory=16G,", "Memory=1G"],
)  # fmt: skip
def test_what_cannot_be(text: str) -> None:
    with pytest.raises(UsageError) as told:
        parse_limits([text])
    assert told.value.code == "option-invalid"
    assert "memory=16G" in told.value.hint


def test_by_itself_a_run_leaves_the_machine_usable() -> None:
    made = decide_limits({}, ROOM)
    assert made == RunLimits(
        processes=4096, memory=(100 << 30) // 10 * 9, files=65536,
        scratch=(1 << 38) - (5 << 30), reserve=5 << 30, reserve_files=100_000,
    )  # fmt: skip
    assert decide_limits({}, replace(ROOM, processors=128)).processes == 32768
    full = decide_limits({}, replace(ROOM, free=1 << 20))
    assert (full.scratch, full.reserve) == (1 << 19, 1 << 19)
    assert decide_limits({}, replace(ROOM, files=1 << 20)).reserve_files == (1 << 20) // 20
    assert decide_limits({}, replace(ROOM, free_files=1000)).reserve_files == 500
    assert decide_limits({}, replace(ROOM, files=0, free_files=0)).reserve_files is None  # btrfs


def test_what_is_asked_for_goes_before_and_none_lifts() -> None:
    made = decide_limits({"memory": 5, "scratch": None, "processes": None}, ROOM)
    assert made.reserve_files is None
    assert (made.memory, made.scratch, made.reserve, made.processes, made.files) == (
        5,
        None,
        None,
        None,
        65536,
    )


@pytest.mark.parametrize(
    ("name", "amount", "text"),
    [("memory", 16 << 30, "memory=16G"), ("scratch", 10 << 20, "scratch=10M"), ("memory", 1, "memory=1"),
     ("files", 2048, "files=2048"), ("memory", None, "memory=none")],
)  # fmt: skip
def test_shown_as_it_is_written(name: str, amount: int | None, text: str) -> None:
    assert format_amount(name, amount) == text


def test_what_ended_a_run_is_said_with_what_to_do() -> None:
    said, hint = limit_message("memory", RunLimits(memory=256 << 20))
    assert said.endswith("memory=256M")
    assert "--limit memory=" in hint
    said, hint = limit_message("reserve", RunLimits(scratch=1, reserve=5 << 30))
    assert "less than 5G" in said
    assert "scratch=none" in hint
    assert "500" in limit_message("reserve_files", RunLimits(scratch=1, reserve_files=500))[0]
    assert limit_message("machine", RunLimits(memory=1)) != limit_message("memory", RunLimits(memory=1))


def test_a_runner_that_does_not_hold_a_limit_says_so() -> None:
    spec = RunSpec(argv=("true",), limits=(("scratch", 1), ("files", None)))
    with pytest.raises(UsageError, match=r"docker .*scratch") as caught:
        check_limits_supported(spec, "docker", ("scratch",))
    assert caught.value.code == "option-conflict"
    check_limits_supported(spec, "x", ("files",))


def test_a_batch_jobs_memory_is_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_capacity(tmp_path).memory
    monkeypatch.setattr(limits, "memory_limit", lambda *_: 1 << 20)
    assert read_capacity(tmp_path).memory == 1 << 20
    monkeypatch.setattr(limits, "memory_limit", lambda *_: whole * 2)
    assert read_capacity(tmp_path).memory >= whole


def test_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    room = read_capacity(tmp_path / "not" / "yet")
    assert min(room.memory, room.processors, room.disk, room.free) > 0
    assert room.free <= room.disk
