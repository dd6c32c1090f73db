"""The seam of pools: one that a row of the table names takes a sweep from its targets to its verdicts."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from imagefactory.actions.collect import collect_sweep
from imagefactory.actions.sweep import (
    SweepDependencies,
    SweepOptions,
    make_sweep,
    prepare_sweep,
    read_status,
    submit_sweep,
)
from imagefactory.actions.verify import CollectOptions
from imagefactory.errors import UsageError
from imagefactory.model import Outcome
from imagefactory.progress import QuietProgress
from imagefactory.schedulers.pool import open_pool
from imagefactory.schedulers.sweep_file import SWEEP, read_scheduler, read_sweep
from imagefactory.settings.choices import HTCONDOR, POOLS, PoolRow
from tests.made import pool_of_one_row
from tests.made.errors import fails
from tests.made.sweep_site import Site


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> str:
    row = PoolRow(module=pool_of_one_row.__name__, title="One row", command="one_row_status")
    monkeypatch.setitem(POOLS, "one-row", row)
    return "one-row"


def bench_of(site: Site) -> SweepDependencies:
    pools = partial(open_pool, environ=site.factory.environ)
    return SweepDependencies(clock=lambda: datetime.now(UTC), random=os.urandom, pools=pools)


def skipped(site: Site, options: SweepOptions, bench: SweepDependencies) -> dict[str, str]:
    gpus = bench.pools(options.pool).inventory(bench.clock())
    plan = prepare_sweep(site.factory, (site.target,), gpus, options, bench).plan
    return {cell.capability: cell.rule for cell in plan.skipped}


def test_a_pool_of_one_row_takes_a_sweep_to_its_verdicts(site: Site, row: str) -> None:
    bench = bench_of(site)
    pool = bench.pools(row)
    gpus = pool.inventory(bench.clock())
    with pytest.raises(UsageError, match="has a space"):
        prepare_sweep(site.factory, (site.target,), gpus, SweepOptions(pool=row, folder=Path("/a b")), bench)
    options = SweepOptions(pool=row, level="quick", registry=site.registry.host)
    made = make_sweep(
        site.factory,
        prepare_sweep(site.factory, (site.target,), gpus, options, bench),
        bench,
        QuietProgress(),
    )
    folder = made.folder
    assert read_sweep(folder) == made.sweep
    assert (made.sweep.scheduler, read_scheduler(folder), pool.is_whole(folder)) == (row, row, True)
    assert submit_sweep(folder, bench.pools) == "4711"
    (waiting,) = (status := read_status(folder, bench.pools)).results
    assert (waiting.outcome, status.driven, status.jobs) == (None, True, ("4711",))
    pool_of_one_row.run_jobs(folder)
    assert read_status(folder, bench.pools).settled
    assert skipped(site, options, bench)["8.0"] == "uncollected"
    done = collect_sweep(site.factory, folder, CollectOptions(), datetime.now(UTC), QuietProgress())
    (one,) = done.nodes
    assert (one.result.outcome, len(one.attached)) == (Outcome.VERIFIED, 2)
    assert not done.faults
    assert skipped(site, options, bench)["8.0"] == "verified"


@pytest.mark.parametrize("text", ["", "[]", '{"sweep": {"scheduler": 7}}', '{"sweep": []}'])
def test_a_damaged_sweep_can_be_ended_still(tmp_path: Path, text: str) -> None:
    assert read_scheduler(tmp_path) == HTCONDOR
    (tmp_path / SWEEP).write_text(text)
    assert read_scheduler(tmp_path) == HTCONDOR


def test_a_sweep_of_a_pool_that_is_not_known_here_is_passed_over_and_said(
    site: Site,
    row: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = bench_of(site)
    options = SweepOptions(pool=row, level="quick", registry=site.registry.host)
    prepared = prepare_sweep(site.factory, (site.target,), site.pool.gpus, options, bench)
    folder = make_sweep(site.factory, prepared, bench, QuietProgress()).folder
    monkeypatch.delitem(POOLS, row)
    with fails("pool-unknown", message="'one-row'", hint="htcondor"):
        read_status(folder, bench.pools)
    options = SweepOptions(level="quick", registry=site.registry.host)
    monkeypatch.setattr(bench.pools(HTCONDOR).__class__, "driven", lambda _: frozenset())
    again = prepare_sweep(site.factory, (site.target,), site.pool.gpus, options, bench)
    assert "'one-row'" in again.plan.notes[0]
    assert len(again.plan.cells) == 2
