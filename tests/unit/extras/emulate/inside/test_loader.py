"""When batches arrive, how long they took across processes, and what a thread waited for a core."""

from __future__ import annotations

import os

import pytest

from imagefactory.extras.emulate.inside.loader import ENTRIES, FetchTimes, Pipeline
from imagefactory.extras.emulate.inside.machine import core_wait_seconds


def intervals(pipeline: Pipeline, made: float, used: float, own: float, count: int) -> list[float]:
    """Between two batches of a program that computes for `own` seconds on each."""
    now, found = 0.0, []
    for _ in range(count):
        before = now
        now = max(now, pipeline.arrival(made, used))
        pipeline.take(now)
        now += own
        found.append(now - before)
    return found


@pytest.mark.parametrize(
    ("workers", "made", "own", "expected"),
    [
        (1, 8.0, 2.0, 8.0),  # the worker is what limits
        (2, 8.0, 2.0, 4.0),
        (4, 8.0, 2.0, 2.0),  # enough of them
        (8, 8.0, 2.0, 2.0),
        (1, 1.0, 2.0, 2.0),
    ],
)
def test_workers_share_the_batches(workers: int, made: float, own: float, expected: float) -> None:
    found = intervals(Pipeline(workers, 2 * workers, 64, 0.0), made, made, own, 400)
    assert sum(found[-200:]) / 200 == pytest.approx(expected)


def test_workers_share_the_cores() -> None:
    found = intervals(Pipeline(8, 16, 2, 0.0), 8.0, 8.0, 0.5, 400)
    assert sum(found[-200:]) / 200 == pytest.approx(4.0)


def test_who_waits_for_a_disk_shares_no_core() -> None:
    found = intervals(Pipeline(8, 16, 2, 0.0), 8.0, 0.1, 0.5, 400)
    assert sum(found[-200:]) / 200 == pytest.approx(1.0)


def test_nothing_is_made_before_it_is_asked_for() -> None:
    pipeline = Pipeline(1, 1, 64, 10.0)
    assert pipeline.arrival(2.0, 2.0) == 12
    pipeline.take(50.0)
    assert pipeline.arrival(2.0, 2.0) == 52


def test_batches_come_in_turn() -> None:
    pipeline = Pipeline(3, 6, 64, 0.0)
    found = []
    for _ in range(5):
        found.append(pipeline.worker)
        pipeline.arrival(1.0, 1.0)
        pipeline.take(0.0)
    assert found == [0, 1, 2, 0, 1]


def test_what_a_worker_says_is_read_in_another_process() -> None:
    fetches = FetchTimes(2)
    child = os.fork()
    if child == 0:
        fetches.add(1, 0.5, 0.25)
        fetches.add(1, 0.75, 0.5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [fetches.following(1), fetches.following(1)] == [(0.5, 0.25), (0.75, 0.5)]
    assert fetches.following(0) == (0.0, 0.0)


def test_more_batches_than_there_are_entries_come_round_again() -> None:
    fetches = FetchTimes(1)
    for number in range(ENTRIES + 3):
        fetches.add(0, float(number), 0.0)
        assert fetches.following(0) == (float(number), 0.0)


def test_the_kernel_counts_upwards() -> None:
    before = core_wait_seconds()
    assert core_wait_seconds() >= before >= 0
