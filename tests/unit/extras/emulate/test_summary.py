"""What an emulated run told, and what is asked for after it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from imagefactory.errors import StatementError
from imagefactory.extras.emulate import run as emulation
from imagefactory.extras.emulate.inside import summary as inside
from imagefactory.extras.emulate.run import main_run
from imagefactory.jobs import resources
from imagefactory.jobs.resources import EmulatedRun, advise, parse_emulated
from imagefactory.schedulers.sizes import GB
from tests.made.documents import document_faults
from tests.made.emulated import TOLD


def told(**changes: Any) -> EmulatedRun:
    return parse_emulated(json.dumps({**TOLD, **changes}), "run.json")


def with_loader(**changes: Any) -> EmulatedRun:
    return told(loader={**TOLD["loader"], **changes})


def test_it_is_read_as_it_was_written() -> None:
    assert TOLD["format"] == inside.FORMAT
    assert document_faults(TOLD) == []
    assert document_faults({**TOLD, "steps": -1, "basis": "verified", "more": 1}) != []
    run = told()
    assert (run.profile, run.steps, run.host_reads) == ("A100-SXM4-40GB", 938, (("item", 12),))
    assert run.loader is not None
    assert run.loader.workers == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        ("{}", "basis"),
        (json.dumps({**TOLD, "format": 2}), "format"),
        (json.dumps({**TOLD, "steps": -1}), "steps"),
        (json.dumps({**TOLD, "basis": "verified"}), "basis"),
        (json.dumps({**TOLD, "more": 1}), "more"),
        (json.dumps({**TOLD, "program": "a\u202eb"}), "program"),
    ],
)
def test_what_no_run_of_ours_writes_is_refused(text: str, said: str) -> None:
    with pytest.raises(StatementError, match=f"run.json: .*{said}"):
        parse_emulated(text, "run.json")


def test_stalls_step_and_epoch() -> None:
    loader = with_loader(interval=0.010, wait=0.006, batches=101, first_wait=0.5).loader
    assert loader is not None
    assert emulation.stall_share(loader) == pytest.approx(0.6)
    assert resources.computing(loader) == pytest.approx(0.004)
    assert emulation.epoch_seconds(loader) == pytest.approx(1.5)


def test_of_one_batch_nothing_is_known() -> None:
    loader = with_loader(interval=None, wait=None, batches=None).loader
    assert loader is not None
    assert (
        emulation.stall_share(loader)
        is resources.computing(loader)
        is emulation.epoch_seconds(loader)
        is None
    )
    assert advise(with_loader(interval=None, wait=None)).workers is None


@pytest.mark.parametrize(
    ("fetch", "processor", "interval", "wait", "workers", "cpus"),
    [
        (0.010, 0.010, 0.010, 0.006, 3, 4),  # a batch each 4 ms, of 10 ms each
        (0.010, 0.002, 0.010, 0.006, 3, 2),  # workers that wait for a disk
        (0.001, 0.001, 0.010, 0.000, 1, 2),
        (9.000, 9.000, 9.001, 9.000, 64, 65),
    ],
)
def test_workers_and_cores(
    fetch: float, processor: float, interval: float, wait: float, workers: int, cpus: int
) -> None:
    advice = advise(with_loader(fetch=fetch, processor=processor, interval=interval, wait=wait))
    assert (advice.workers, advice.cpus) == (workers, cpus)


def test_how_long_a_job_takes_is_known_of_what_came_to_its_end() -> None:
    assert advise(told(ended=False)).time is None
    ended = told(ended=True, seconds=3000.0, busy=1000.0)
    assert advise(ended).time == timedelta(minutes=88)  # 1.1 * (3000 + 1.5 * 1000) + 300 seconds
    assert advise(replace(ended, basis="recorded")).time == timedelta(minutes=65)


def test_memory_has_room_for_gaps_and_for_cuda() -> None:
    memory = {"peak": 10 * GB, "context": GB // 2, "total": 40 * GB, "exceeded": False}
    assert advise(told(memory=memory)).gpu_memory == 12 * GB
    assert advise(told(memory={**memory, "exceeded": True})).gpu_memory is None


def test_without_a_loader_there_is_one_core() -> None:
    advice = advise(told(loader=None))
    assert (advice.workers, advice.cpus) == (None, 1)


def test_each_of_several_gpus_has_a_process_with_workers_of_its_own() -> None:
    one, four = advise(told()), advise(told(ranks=4))
    assert (one.gpus, four.gpus, four.cpus) == (1, 4, 4 * one.cpus)


def test_of_several_processes_the_one_that_did_most() -> None:
    run = told()
    assert main_run([run, replace(run, operations=run.operations + 1, rank=1)]) == replace(
        run, operations=run.operations + 1, rank=1
    )
    assert main_run([]) is None
