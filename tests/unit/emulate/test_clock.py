"""The program's time and the device's: who waits for whom, and how long, by a clock that is set by hand."""

from __future__ import annotations

import pytest

from imagefactory.emulate.clock import QUEUE, Clock


class Hand:
    """A clock that is set by hand; who sleeps moves it."""

    def __init__(self) -> None:
        self.time = 100.0
        self.waited = 3.0

    def now(self) -> float:
        return self.time

    def kept(self) -> float:
        return self.waited

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def clock(hand: Hand) -> Clock:
    return Clock(hand.now, hand.sleep, hand.kept)


def test_the_device_runs_ahead_of_who_queues_its_work(hand: Hand, clock: Clock) -> None:
    clock.charge(0, 2.0)
    clock.charge(0, 3.0)
    assert (clock.host(), clock.through, clock.busy) == (0, 5, 5)
    hand.time += 1
    clock.synchronize()
    assert (clock.host(), clock.slept) == (5, 4)
    clock.synchronize()
    assert clock.slept == 4


def test_what_emulating_cost_is_not_the_programs(hand: Hand, clock: Clock) -> None:
    hand.time += 10
    clock.hide(9)
    assert (clock.host(), clock.wall()) == (1, 10)


def test_streams_run_side_by_side(clock: Clock) -> None:
    clock.charge(0, 2.0)
    clock.charge(1, 3.0)
    assert (clock.streams, clock.through, clock.busy) == ({0: 2, 1: 3}, 3, 3)


def test_idle_time_is_a_stall_where_the_program_waited_for_its_loader(hand: Hand, clock: Clock) -> None:
    clock.charge(0, 1.0)
    with clock.loading():
        hand.time += 5  # the device has work for one second of them
    hand.time += 2
    clock.charge(0, 1.0)
    assert (clock.idle, clock.stalled) == (6, 4)


def test_a_loader_that_is_faster_than_the_device_stalls_nothing(hand: Hand, clock: Clock) -> None:
    for _ in range(3):
        clock.charge(0, 4.0)
        with clock.loading():
            hand.time += 1
    clock.charge(0, 1.0)
    assert (clock.idle, clock.stalled, clock.through) == (0, 0, 13)


def test_a_loader_within_a_loader_counts_once(hand: Hand, clock: Clock) -> None:
    with clock.loading(), clock.loading():
        hand.time += 3
    clock.charge(0, 1.0)
    assert clock.stalled == 3


def test_no_more_is_queued_than_a_device_takes(clock: Clock) -> None:
    for _ in range(QUEUE):
        clock.charge(0, 1.0)
    assert clock.host() == 0
    clock.charge(0, 1.0)
    clock.charge(0, 1.0)
    assert clock.host() == 1


def test_a_stream_is_held_up_by_who_comes_last(clock: Clock) -> None:
    clock.charge(0, 1.0)
    clock.hold(0, 4.0)
    clock.hold(0, 2.0)
    clock.charge(0, 1.0)
    assert (clock.through, clock.busy, clock.idle) == (5, 2, 3)


def test_a_time_without_a_core_is_not_the_programs_but_the_device_works_on(hand: Hand, clock: Clock) -> None:
    clock.charge(0, 5.0)
    hand.time, hand.waited = hand.time + 4, hand.waited + 3
    clock.settle()
    clock.settle()
    assert clock.host() == 1
    hand.time, hand.waited = hand.time + 2, hand.waited + 2
    clock.synchronize()
    assert (clock.host(), clock.slept) == (5, 4)
