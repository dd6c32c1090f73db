"""How long batches took, across processes, and what a thread waited for a core."""

from __future__ import annotations

import os

from imagefactory.emulate.clock import kept_waiting
from imagefactory.emulate.loader import ENTRIES, Fetches


def test_what_a_worker_says_is_read_in_another_process() -> None:
    fetches = Fetches(2)
    child = os.fork()
    if child == 0:
        fetches.add(1, 0.5, 0.25)
        fetches.add(1, 0.75, 0.5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [fetches.following(1), fetches.following(1)] == [(0.5, 0.25), (0.75, 0.5)]
    assert fetches.following(0) == (0.0, 0.0)


def test_more_batches_than_there_are_entries_come_round_again() -> None:
    fetches = Fetches(1)
    for number in range(ENTRIES + 3):
        fetches.add(0, float(number), 0.0)
        assert fetches.following(0) == (float(number), 0.0)


def test_the_kernel_counts_upwards() -> None:
    before = kept_waiting()
    assert kept_waiting() >= before >= 0
