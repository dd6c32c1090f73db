"""What a person reads after an emulated run."""

from __future__ import annotations

import json
from typing import Any

from imagefactory.extras.emulate.run import format_emulated
from imagefactory.jobs.resources import parse_emulated
from tests.made.emulated import TOLD


def shown(processes: int = 1, width: int | None = None, **changes: Any) -> str:
    return format_emulated(parse_emulated(json.dumps({**TOLD, **changes}), ""), processes, width)


def test_the_whole_of_it() -> None:
    assert shown().splitlines() == [
        "emulated: NVIDIA A100-SXM4-40GB, estimated from its data sheet; no GPU was used (not a verdict)",
        "  data stalls  67% of the time: 6.8 ms of 10.1 ms a batch",
        "  step         3.3 ms without waiting for data",
        "  epoch        9.7 s for 938 batches of 64",
        "  GPU memory   0.8 GB at most, 0.5 GB of it CUDA's own, of 39.5 GB",
        "  write        --gpu-memory 1GB --cpus 4, and num_workers=4 in the DataLoader (1 now)",
        "No values are computed on an emulated GPU: ignore losses and accuracies that the program prints.",
        "Kernels are slower than a data sheet: steps take this long at least, stalls are this share at most.",
        "It did not come to its end, so how long a job takes follows from its epochs alone.",
    ]


def test_a_program_that_came_to_its_end_tells_how_long_a_job_takes() -> None:
    assert "--cpus 4 --time 18m, and" in shown(ended=True, seconds=600.0, busy=60.0)
    assert "--cpus 4 --time 17m, and" in shown(ended=True, seconds=600.0, busy=60.0, basis="recorded")


def test_recorded_times_are_told_as_such_and_are_no_lower_bound() -> None:
    text = shown(basis="recorded")
    assert "A100-SXM4-40GB, by times recorded on one; no GPU was used (not a verdict)" in text
    assert "slower than a data sheet" not in text


def test_it_fits_a_terminal() -> None:
    assert max(map(len, shown(width=80).splitlines())) <= 80


def test_what_ran_out_of_memory_is_told_so() -> None:
    text = shown(memory={**TOLD["memory"], "exceeded": True})
    assert "it ran out of memory: take a GPU that has more, or a smaller batch" in text
    assert "--gpu-memory" not in text


def test_without_a_loader_the_optimizers_steps_are_told() -> None:
    text = shown(loader=None, step=2.5)
    assert "step        2.5 s from one of the optimizer to the next" in text
    assert "stalls  " not in text
    assert "--gpu-memory 1GB --cpus 1\n" in text


def test_a_loader_that_gave_one_batch_is_not_judged() -> None:
    text = shown(loader={**TOLD["loader"], "interval": None, "wait": None})
    assert "not measured: fewer than two batches were seen" in text


def test_more_processes_and_pages_that_were_not_locked_are_told() -> None:
    text = shown(processes=3, unlocked="64 MiB: Cannot allocate memory")
    assert "3 processes used a GPU each; this is the one that did most." in text
    assert "could not be locked here (64 MiB: Cannot allocate memory)" in text


def test_long_epochs_are_told_in_minutes_and_hours() -> None:
    for batches, told in ((100_000, "17 min"), (10_000_000, "28.1 h")):
        assert f"epoch        {told} for" in shown(loader={**TOLD["loader"], "batches": batches})
