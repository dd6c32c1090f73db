"""How long batches took, across processes, and what of a time was waiting for a core."""

from __future__ import annotations

import os

import pytest

from imagefactory.emulate.loader import ENTRIES, Fetches, _crowded, kept_waiting


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


@pytest.mark.parametrize(
    ("now", "crowded"),
    [
        ((10.0, 10.0, 0.0, 2.0), 2.0),  # all of it was the program's
        ((10.0, 5.0, 0.0, 2.0), 1.0),  # half was the emulation's
        ((10.0, 8.0, 6.0, 2.0), 1.0),  # it slept for six seconds, and wanted no core
        ((10.0, 0.0, 0.0, 2.0), 0.0),
        ((0.0, 0.0, 0.0, 0.0), 0.0),
    ],
)
def test_of_a_time_without_a_core_as_much_is_the_programs_as_of_the_rest(
    now: tuple[float, ...], crowded: float
) -> None:
    assert _crowded((0.0, 0.0, 0.0, 0.0), now) == crowded


def test_the_kernel_counts_upwards() -> None:
    before = kept_waiting()
    assert kept_waiting() >= before >= 0
