"""`verify --pool`: its options, and what the commands for sweeps share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import click

from imagefactory.cli.output import (
    Call,
    capability_of,
    choose_targets,
    collecting,
    reject_conflict,
    say,
    say_json,
    say_next,
    terminal_width,
)
from imagefactory.cli.pool import find_inventory, inventory_option
from imagefactory.cli.arguments import Duration
from imagefactory.errors import CheckFailedError, ToolError, UsageError
from imagefactory.settings.choices import POOLS, SITES, SLURM

if TYPE_CHECKING:
    from imagefactory.cli.output import Failures
    from imagefactory.project import Factory
    from imagefactory.model import Target
    from imagefactory.schedulers.pool import Pool
    from imagefactory.actions.collect import CollectedSweep
    from imagefactory.stages.kits import CollectOptions
    from imagefactory.actions.sweep import Made, Prepared, SweepBench, SweepOptions
    from imagefactory.schedulers.sweep_file import CollectedNode

P = ParamSpec("P")
IMAGES = ("docker", "oras", "sif")
POLL = 15.0
"""Seconds between two looks of --wait: the logs are read, and the queue is asked."""
PATIENCE = 40
"""How many looks in a row the pool's commands may fail: an access point takes minutes to start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """The options of `verify` that a sweep uses. Those with a default need --pool, except --capability."""

    pool: str
    level: str
    registry: str
    promote: bool
    newest: int | None = None
    mig: bool = False
    machine: str | None = None
    gpu_hours: int | None = None
    jobs: int | None = None
    combination: tuple[str, ...] | None = None
    allow: tuple[str, ...] = ()
    inventory: Path | None = None
    image: str | None = None
    site: str | None = None
    idle_limit: timedelta | None = None
    held_limit: timedelta | None = None
    run_limit: timedelta | None = None
    retries: int | None = None
    wait: bool = False
    folder: Path | None = None
    dry_run: bool = False
    capability: tuple[str, ...] = ()

    def written(self, *, but: Collection[str]) -> list[str]:
        """Return the options that differ from their defaults, as a person writes them."""
        names = [
            field.name
            for field in fields(self)
            if field.default not in (MISSING, getattr(self, field.name)) and field.name not in but
        ]
        return [f"--{name.replace('combination', 'tuple').replace('_', '-')}" for name in names]


def sweep_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the options of `verify --pool` after the command's own."""
    options = (
        click.option(
            "--pool",
            "pool",
            type=click.Choice(tuple(POOLS)),
            help="Verify on a pool: one job for each image and capability.",
        ),
        click.option("--newest", type=click.IntRange(1), metavar="N", help="The N newest versions alone."),
        click.option(
            "--tuple",
            "combination",
            nargs=4,
            metavar="FRAMEWORK VERSION CUDA X.Y",
            help="Test just one: pytorch 2.3 12.1 8.0.",
        ),
        click.option(
            "--allow",
            multiple=True,
            metavar="RULE",
            help="Let this rule leave nothing out, as plan has it; `verified` tests again, `queued` and "
            "`uncollected` what another sweep has in hand, `claimed` what another store has, "
            "`bad-machine` also on machines that failed. May be repeated.",
        ),
        click.option(
            "--mig", is_flag=True, help="Verify on slices of GPUs (MIG) too: a row for each profile."
        ),
        click.option(
            "--machine",
            metavar="NAMES",
            help="Run on these machines only, with * and ?, and on none of those after !: 'gpu*,!gpu07'. "
            "Default: the setting `sweep-machines`.",
        ),
        click.option(
            "--gpu-hours",
            type=click.IntRange(1),
            metavar="N",
            help="Queue no more than this takes; a later sweep takes the rest, those whose verdict is oldest "
            "first. Default: the setting `sweep-gpu-hours`.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(1),
            metavar="N",
            help="Have no more jobs in the queue at once. Default: the setting `sweep-jobs`.",
        ),
        inventory_option,
        click.option(
            "--image",
            type=click.Choice(IMAGES),
            help="How jobs get the image. Default: sif where sif-folder or no registry is set, else docker.",
        ),
        click.option("--site", type=click.Choice(SITES), help="Default: the setting `site`."),
        click.option("--idle-limit", type=Duration(), metavar="TIME", help="Default: 24h."),
        click.option("--held-limit", type=Duration(), metavar="TIME", help="Default: 10m; not on Slurm."),
        click.option("--run-limit", type=Duration(), metavar="TIME", help="Default: 24h."),
        click.option(
            "--retries",
            type=click.IntRange(0, 20),
            metavar="N",
            help="How often what the pool broke is tried again. Default: 2.",
        ),
        click.option("--wait", is_flag=True, help="Stay until all is done, then collect."),
        click.option(
            "--folder",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="Where the sweep is written; of one that is there already, go on with it.",
        ),
        click.option("--dry-run", is_flag=True, help="Say what would be queued, and do nothing."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def verify_on_pool(call: Call, names: tuple[str, ...], request: SweepRequest, *, as_json: bool) -> None:
    """Run `verify --pool`: plan, write and submit a sweep or continue one; wait and collect with --wait."""
    from imagefactory.actions.sweep import make_sweep, prepare_sweep

    reject_conflict(
        request.held_limit and request.pool == SLURM,
        "--held-limit does not apply to Slurm, where a held job is a waiting job",
        "use --idle-limit",
    )
    factory, folder = call.sound_factory, request.folder
    with collecting(factory) as failures:
        pool = find_pool(request.pool)
        if folder is not None and pool.is_whole(folder):
            for word in (*names, *request.written(but=("wait", "folder"))):
                reject_conflict(
                    word,
                    f"{folder} is already a sweep, and {word[:80]} would change it",
                    f"remove {word[:80]} to continue the sweep, or pass another --folder",
                )
            return _submit(call, folder.absolute(), request, failures, as_json=as_json)
        bench = sweep_bench()
        options = _options(factory, request)
        targets, options = _targets(factory, names, request, options)
        inventory = find_inventory(request.inventory, bench.clock(), request.pool)
        if not request.dry_run:
            pool.require()
        prepared = prepare_sweep(factory, targets, inventory, options, bench)
        _say_plan(prepared, as_json=as_json and request.dry_run, quiet=as_json)
        if request.dry_run:
            return None
        sweep = make_sweep(factory, prepared, bench, call.progress)
        return _submit(call, sweep.folder, request, failures, sweep, as_json=as_json)


def find_pool(name: str) -> Pool:
    """Return a pool of this machine. Tests replace it."""
    from imagefactory.schedulers.pool import open_pool

    return open_pool(name, os.environ)


def sweep_bench() -> SweepBench:
    """Return the clock, random bytes, the pools and the user. Tests replace them."""
    from imagefactory.actions.sweep import SweepBench

    return SweepBench(clock=lambda: datetime.now(UTC), random=os.urandom, pools=find_pool, user=os.geteuid())


def _options(factory: Factory, request: SweepRequest) -> SweepOptions:
    from imagefactory.schedulers.pool import JobLimits
    from imagefactory.settings.own_commands import parse_limit, parse_machines
    from imagefactory.actions.sweep import SweepOptions
    from imagefactory.schedulers.cells import SweepAsk, check_allowed

    settings, machines, default = factory.settings, request.machine, JobLimits()
    capabilities = tuple(sorted({capability_of(text) for text in request.capability}))
    return SweepOptions(
        asked=SweepAsk(
            capabilities=capabilities,
            newest=request.newest or 0,
            mig=request.mig,
            allow=check_allowed(request.allow),
            machines=parse_machines(settings.sweep_machines.value if machines is None else machines),
            gpu_hours=request.gpu_hours or parse_limit(settings.sweep_gpu_hours.value),
        ),
        at_once=request.jobs or parse_limit(settings.sweep_jobs.value),
        level=request.level,
        image=request.image or "",
        registry=request.registry,
        pool=request.pool,
        site=request.site or factory.settings.site.value,
        limits=JobLimits(
            idle=request.idle_limit or default.idle,
            held=request.held_limit or default.held,
            run=request.run_limit or default.run,
            retries=default.retries if request.retries is None else request.retries,
        ),
        folder=request.folder.absolute() if request.folder else None,
    )


def _targets(
    factory: Factory, names: tuple[str, ...], request: SweepRequest, options: SweepOptions
) -> tuple[Sequence[Target], SweepOptions]:
    """Return the requested targets; for --tuple only one, with only its capability."""
    from dataclasses import replace

    from imagefactory.sweeps.tuples import choose_tuple, parse_tuple

    if not request.combination:
        if not names:
            raise UsageError(
                "argument-missing",
                "no target is given",
                hint="add targets ('pytorch-*'), or --tuple F V CUDA X.Y",
            )
        return choose_targets(factory, names), options
    reject_conflict(
        names or request.capability,
        "--tuple excludes targets and --capability",
        "remove the targets and --capability",
    )
    combination = parse_tuple(request.combination)
    cells = replace(options.asked, capabilities=(combination.capability,))
    return (choose_tuple(factory.targets, combination),), replace(options, asked=cells)


def _say_plan(prepared: Prepared, *, as_json: bool, quiet: bool) -> None:
    from imagefactory.views.sweeps import format_sweep_plan, plan_json
    from imagefactory.verify.gpu_run import timeout_of

    options = prepared.options
    run = find_pool(options.pool).run_limit(options.limits, timeout_of(options.level), prepared.own)
    limits = replace(options.limits, run=run)
    if as_json:
        say_json("sweep-plan", {"image": prepared.place.kind, **plan_json(prepared.plan, limits)})
    else:
        say(format_sweep_plan(prepared.plan, limits, terminal_width()), unless=quiet)


def _submit(
    call: Call,
    folder: Path,
    request: SweepRequest,
    failures: Failures,
    plan: Made | None = None,
    *,
    as_json: bool,
) -> None:
    """Submit the sweep and print its status, or wait for it and collect."""
    from imagefactory.stages.kits import CollectOptions
    from imagefactory.actions.sweep import claim_again, submit_sweep, sweeps_folder
    from imagefactory.schedulers.sweep_file import read_sweep

    sweep = read_sweep(folder)
    for name, fault in plan.faults if plan else ():
        failures.of(name).add(fault)
    if plan is None:
        claim_again(call.access, folder, request.registry, sweep_bench(), call.progress)
    try:
        job = submit_sweep(folder, find_pool)
    except ToolError as error:
        again = f"then go on with it: imagefactory verify --pool {sweep.pool} --folder {folder}"
        raise ToolError(error.code, error.message, hint=f"{error.hint}; {again}") from error
    if request.wait:
        _wait(call, folder)
        options = CollectOptions(registry=request.registry, promote=request.promote)
        rows = collect_jobs(call, folder, options, failures, as_json=as_json)
        if as_json:
            say_json("collect", {"results": rows, "errors": failures.as_json()})
        return
    if as_json:
        row = {"sweep": sweep.id, "folder": str(folder), "job": job, "nodes": len(sweep.nodes)}
        left_out = {"left_out": sweep.left_out, "notes": list(plan.notes) if plan else []}
        say_json("submitted", {**row, **left_out, "errors": failures.as_json()})
    else:
        ours = sweep.id if folder == sweeps_folder(call.settings) / sweep.id else folder
        say(
            f"submitted {sweep.id} as job {job}, in {folder}\n"
            f"its verdicts:    imagefactory collect {ours}\n"
            f"end it:          imagefactory cancel {ours}"
        )
        say_next("status", str(ours))


def _wait(call: Call, folder: Path) -> None:
    """Wait until every node has a final outcome.

    Raises CheckFailedError if no job drives the sweep, ToolError if the pool does not answer for long.
    """
    from imagefactory.actions.sweep import read_status

    progress, first = call.progress, read_status(folder, find_pool, queue=False)
    with progress.task(f"sweep {first.sweep.id}", total=len(first.results), unit="nodes") as task:
        known = failed = 0
        while True:
            try:
                now, failed = read_status(folder, find_pool), 0
            except ToolError:
                if (failed := failed + 1) > PATIENCE:
                    raise
                time.sleep(POLL)
                continue
            task.advance(max(0, now.ended - known))
            known = max(known, now.ended)
            if now.settled:
                return
            if not now.driven:
                raise CheckFailedError(
                    "sweep-stopped",
                    f"no job works on {folder}, but {len(now.results) - now.ended} nodes are not done",
                    hint=f"continue it: imagefactory verify --pool {first.sweep.pool} --folder {folder}",
                )
            time.sleep(POLL)


def as_sweep(call: Call, path: Path) -> Path | None:
    """Return the directory of a sweep from its id or path; None for anything else."""
    from imagefactory.actions.sweep import find_sweep
    from imagefactory.schedulers.sweep_file import ID, SWEEP

    if ID.fullmatch(str(path)) or (path / SWEEP).is_file():
        return find_sweep(call.settings, str(path))
    return None


def collect_jobs(
    call: Call, folder: Path, options: CollectOptions, failures: Failures, *, as_json: bool
) -> list[dict[str, object]]:
    """Collect and print a sweep. Return its rows; unverified nodes are added to `failures`."""
    from imagefactory.views.sweeps import format_collected, format_failed_machines, headline
    from imagefactory.views.verdicts import format_promotion
    from imagefactory.actions.collect import collect_sweep

    result = collect_sweep(call.sound_factory, folder, options, datetime.now(UTC), call.progress)
    results = [node.result for node in result.nodes]
    blocks = [headline(result.sweep, results, None), format_collected(result.nodes, terminal_width())]
    blocks += [format_promotion(promotion, terminal_width()) for promotion in result.promotions]
    blocks.append(format_failed_machines(result.machines, terminal_width()))
    say("\n\n".join(filter(None, blocks)), unless=as_json)
    for name, fault in result.faults:
        failures.of(name).add(fault)
    for promotion in result.promotions:
        for _, fault in promotion.faults:
            failures.of(result.sweep.id).add(fault)
    failures.of(str(folder))
    rows = [_node_json(result, node) for node in result.nodes]
    if not result.verified:
        failures.add(not_verified(result))
    return rows


def _node_json(result: CollectedSweep, node: CollectedNode) -> dict[str, object]:
    outcome = node.result.outcome
    return {
        "sweep": result.sweep.id,
        "kit": str(result.folder / "nodes" / node.result.node),
        "target": node.target,
        "capability": node.capability,
        "outcome": outcome.value if outcome else None,
        "reason": node.result.reason,
        "why": node.why,
        "keyid": node.keyid,
        "gpu": node.gpu,
        "driver": node.driver,
        "attached": list(node.attached),
        "tries": len(node.result.attempts),
        "machine": node.result.attempts[-1].machine if node.result.attempts else "",
    }


def not_verified(result: CollectedSweep) -> CheckFailedError:
    if result.waiting:
        return CheckFailedError(
            "sweep-incomplete",
            f"{result.waiting} of {len(result.nodes)} nodes are not done",
            hint=f"imagefactory status {result.folder}; collect again when they are done",
        )
    bad = sum(node.result.outcome != "verified" for node in result.nodes)
    return CheckFailedError(
        "sweep-not-verified",
        f"{bad} of {len(result.nodes)} nodes are not verified",
        hint=f"see the table; all logs are in {result.folder}/nodes",
    )
