"""Bytes of a device: rounded as torch rounds, given back, and out when they are."""

from __future__ import annotations

import pytest

from imagefactory.emulate.memory import Full, Memory


def test_blocks_are_rounded_and_the_most_is_kept() -> None:
    memory = Memory(0, 1 << 30, 0)
    first, second = memory.take(1), memory.take(1000)
    assert (first, second, memory.taken, memory.blocks) == (512, 1024, 1536, 2)
    memory.give(second)
    assert (memory.taken, memory.most, memory.blocks) == (512, 1536, 1)
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
    assert memory.taken == 2 << 20


def test_a_process_may_be_given_a_share() -> None:
    memory = Memory(0, 4 << 20, 0)
    memory.share = 0.5
    with pytest.raises(Full):
        memory.take(3 << 20)
