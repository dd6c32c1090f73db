"""The program's time and the device's by a clock set by hand; bytes of a device, rounded as torch rounds."""

from __future__ import annotations

import pytest

from imagefactory.extras.emulate.inside.machine import QUEUE, Clock, Full, Memory


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


def test_blocks_are_rounded_and_the_most_is_kept() -> None:
    memory = Memory(0, 1 << 30, 0)
    first, second = memory.take(1), memory.take(1000)
    assert (first, second, memory.allocated, memory.blocks) == (512, 1024, 1536, 2)
    memory.give(second)
    assert (memory.allocated, memory.most, memory.blocks) == (512, 1536, 1)
    memory.reset_peak()
    assert (memory.most, memory.peak) == (512, 1536)


def test_what_was_reserved_stays_until_the_cache_is_emptied() -> None:
    memory = Memory(0, 1 << 30, 0)
    memory.give(memory.take(5 << 20))
    assert memory.reserved == 6 << 20
    memory.empty_cache()
    assert (memory.reserved, memory.most_reserved) == (0, 6 << 20)


def test_cuda_takes_its_part_first_and_then_it_is_full() -> None:
    memory = Memory(1, 4 << 20, 1 << 20)
    memory.take(2 << 20)
    with pytest.raises(
        Full, match=r"allocate 2.00 MiB. GPU 1 has a total capacity of 4.00 MiB of which 1.00 MiB"
    ):
        memory.take(2 << 20)
    assert memory.allocated == 2 << 20


def test_a_process_may_be_given_a_share() -> None:
    memory = Memory(0, 4 << 20, 0)
    memory.share = 0.5
    with pytest.raises(Full):
        memory.take(3 << 20)
