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

from imagefactory.cli.arguments import DurationType
from imagefactory.cli.gpus import find_inventory, inventory_option
from imagefactory.cli.output import (
    CommandContext,
    capability_of,
    choose_targets,
    exit_with_first_failure,
    json_option,
    print_errors,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    terminal_width,
)
from imagefactory.errors import CheckFailedError, ToolError, UsageError
from imagefactory.model import Outcome
from imagefactory.settings.choices import POOLS, SITES, SLURM

if TYPE_CHECKING:
    from imagefactory.actions.collect import SweepResult
    from imagefactory.actions.sweep import (
        SweepCreated,
        SweepDependencies,
        SweepDraft,
        SweepOptions,
        SweepStatus,
    )
    from imagefactory.actions.verify import CollectOptions, KitResult
    from imagefactory.cli.output import TargetFailures
    from imagefactory.model import Target
    from imagefactory.project import Project
    from imagefactory.schedulers.pool import Pool
    from imagefactory.schedulers.sweep_file import CollectedNode


P = ParamSpec("P")
IMAGES = ("docker", "oras", "sif")
POLL = 15.0
"""Seconds between two looks of --wait: the logs are read, and the queue is asked."""
QUEUE_WAIT_SECONDS = 40
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
        click.option("--idle-limit", type=DurationType(), metavar="TIME", help="Default: 24h."),
        click.option("--held-limit", type=DurationType(), metavar="TIME", help="Default: 10m; not on Slurm."),
        click.option("--run-limit", type=DurationType(), metavar="TIME", help="Default: 24h."),
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


def verify_on_pool(
    call: CommandContext, names: tuple[str, ...], request: SweepRequest, *, as_json: bool
) -> None:
    """Run `verify --pool`: plan, write and submit a sweep or continue one; wait and collect with --wait."""
    from imagefactory.actions.sweep import make_sweep, prepare_sweep

    reject_conflict(
        request.held_limit and request.pool == SLURM,
        "--held-limit does not apply to Slurm, where a held job is a waiting job",
        "use --idle-limit",
    )
    factory, folder = call.sound_factory, request.folder
    with exit_with_first_failure(factory) as failures:
        pool = find_pool(request.pool)
        if folder is not None and pool.is_whole(folder):
            for word in (*names, *request.written(but=("wait", "folder"))):
                reject_conflict(
                    word,
                    f"{folder} is already a sweep, and {word[:80]} would change it",
                    f"remove {word[:80]} to continue the sweep, or pass another --folder",
                )
            return _submit(call, folder.absolute(), request, failures, as_json=as_json)
        bench = sweep_dependencies()
        options = _options(factory, request)
        targets, options = _targets(factory, names, request, options)
        inventory = find_inventory(request.inventory, bench.clock(), request.pool)
        if not request.dry_run:
            pool.require()
        prepared = prepare_sweep(factory, targets, inventory, options, bench)
        _print_plan(prepared, as_json=as_json and request.dry_run, quiet=as_json)
        if request.dry_run:
            return None
        sweep = make_sweep(factory, prepared, bench, call.progress)
        return _submit(call, sweep.folder, request, failures, sweep, as_json=as_json)


def find_pool(name: str) -> Pool:
    """Return a pool of this machine. Tests replace it."""
    from imagefactory.schedulers.pool import open_pool

    return open_pool(name, os.environ)


def sweep_dependencies() -> SweepDependencies:
    """Return the clock, random bytes, the pools and the user. Tests replace them."""
    from imagefactory.actions.sweep import SweepDependencies

    return SweepDependencies(
        clock=lambda: datetime.now(UTC), random=os.urandom, pools=find_pool, user=os.geteuid()
    )


def _options(factory: Project, request: SweepRequest) -> SweepOptions:
    from imagefactory.actions.sweep import SweepOptions
    from imagefactory.schedulers.cells import CellRequest, check_allowed
    from imagefactory.schedulers.pool import JobLimits
    from imagefactory.settings.own_commands import parse_limit, parse_machines

    settings, machines, default = factory.settings, request.machine, JobLimits()
    capabilities = tuple(sorted({capability_of(text) for text in request.capability}))
    return SweepOptions(
        asked=CellRequest(
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
    factory: Project, names: tuple[str, ...], request: SweepRequest, options: SweepOptions
) -> tuple[Sequence[Target], SweepOptions]:
    """Return the requested targets; for --tuple only one, with only its capability."""
    from dataclasses import replace

    from imagefactory.schedulers.cells import choose_tuple, parse_tuple

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


def _print_plan(prepared: SweepDraft, *, as_json: bool, quiet: bool) -> None:
    from imagefactory.verify.gpu_run import timeout_of
    from imagefactory.views.sweeps import format_sweep_plan, plan_json

    options = prepared.options
    run = find_pool(options.pool).run_limit(options.limits, timeout_of(options.level), prepared.own)
    limits = replace(options.limits, run=run)
    if as_json:
        print_json("sweep-plan", {"image": prepared.place.kind, **plan_json(prepared.plan, limits)})
    else:
        print_result(format_sweep_plan(prepared.plan, limits, terminal_width()), unless=quiet)


def _submit(
    call: CommandContext,
    folder: Path,
    request: SweepRequest,
    failures: TargetFailures,
    plan: SweepCreated | None = None,
    *,
    as_json: bool,
) -> None:
    """Submit the sweep and print its status, or wait for it and collect."""
    from imagefactory.actions.sweep import claim_again, submit_sweep, sweeps_directory
    from imagefactory.actions.verify import CollectOptions
    from imagefactory.schedulers.sweep_file import read_sweep

    sweep = read_sweep(folder)
    for name, fault in plan.faults if plan else ():
        failures.of(name).add(fault)
    if plan is None:
        claim_again(call.access, folder, request.registry, sweep_dependencies(), call.progress)
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
            print_json("collect", {"results": rows, "errors": failures.as_json()})
        return
    if as_json:
        row = {"sweep": sweep.id, "folder": str(folder), "job": job, "nodes": len(sweep.nodes)}
        left_out = {"left_out": sweep.left_out, "notes": list(plan.notes) if plan else []}
        print_json("submitted", {**row, **left_out, "errors": failures.as_json()})
    else:
        ours = sweep.id if folder == sweeps_directory(call.settings) / sweep.id else folder
        print_result(
            f"submitted {sweep.id} as job {job}, in {folder}\n"
            f"its verdicts:    imagefactory collect {ours}\n"
            f"end it:          imagefactory cancel {ours}"
        )
        print_next_command("status", str(ours))


def _wait(call: CommandContext, folder: Path) -> None:
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
                if (failed := failed + 1) > QUEUE_WAIT_SECONDS:
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


def parse_sweep_argument(call: CommandContext, path: Path) -> Path | None:
    """Return the directory of a sweep from its id or path; None for anything else."""
    from imagefactory.actions.sweep import find_sweep
    from imagefactory.schedulers.sweep_file import ID, SWEEP

    if ID.fullmatch(str(path)) or (path / SWEEP).is_file():
        return find_sweep(call.settings, str(path))
    return None


def collect_jobs(
    call: CommandContext, folder: Path, options: CollectOptions, failures: TargetFailures, *, as_json: bool
) -> list[dict[str, object]]:
    """Collect and print a sweep. Return its rows; unverified nodes are added to `failures`."""
    from imagefactory.actions.collect import collect_sweep
    from imagefactory.views.sweeps import format_collected, format_failed_machines, headline
    from imagefactory.views.verdicts import format_promotion

    result = collect_sweep(call.sound_factory, folder, options, datetime.now(UTC), call.progress)
    results = [node.result for node in result.nodes]
    blocks = [headline(result.sweep, results, None), format_collected(result.nodes, terminal_width())]
    blocks += [format_promotion(promotion, terminal_width()) for promotion in result.promotions]
    blocks.append(format_failed_machines(result.machines, terminal_width()))
    print_result("\n\n".join(filter(None, blocks)), unless=as_json)
    for name, fault in result.faults:
        failures.of(name).add(fault)
    for promotion in result.promotions:
        for _, fault in promotion.faults:
            failures.of(result.sweep.id).add(fault)
    failures.of(str(folder))
    rows = [_node_json(result, node) for node in result.nodes]
    if not result.verified:
        failures.add(not_verified_error(result))
    return rows


def _node_json(result: SweepResult, node: CollectedNode) -> dict[str, object]:
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


def not_verified_error(result: SweepResult) -> CheckFailedError:
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


# --- imagefactory status


@click.command()
@click.argument("sweep", metavar="[SWEEP]", default="")
@json_option
@click.pass_obj
def status(call: CommandContext, sweep: str, as_json: bool) -> None:
    """Show how far the sweeps of `verify --pool` are.

    Exit code 0 whatever became of it: `collect` judges. A sweep whose files cannot be read leaves the others.
    """
    from imagefactory.actions.sweep import find_sweep, find_sweeps, read_status
    from imagefactory.schedulers.sweep_file import format_results
    from imagefactory.views.sweeps import format_failed_machines, format_status, headline

    folders = (find_sweep(call.settings, sweep),) if sweep else find_sweeps(call.settings)
    queue = True
    statuses: list[SweepStatus] = []
    with exit_with_first_failure() as failures:
        for folder in folders:
            with failures.of(folder.name):
                try:
                    statuses.append(read_status(folder, find_pool, queue=queue))
                except ToolError as error:  # the logs tell most of it without the pool's commands
                    print_errors(error)
                    queue = False
                    statuses.append(read_status(folder, find_pool, queue=queue))
        if as_json:
            rows = [
                _status_json(sweep_status, format_results(sweep_status.results)) for sweep_status in statuses
            ]
            print_json("status", {"sweeps": rows})
        elif not folders:
            print_result(f"no sweep was made here: imagefactory verify TARGET --pool {'|'.join(POOLS)}")
        elif sweep:
            for sweep_status in statuses:
                print_result(
                    format_status(
                        sweep_status.sweep, sweep_status.results, sweep_status.driven, datetime.now(UTC)
                    )
                )
                failed = format_failed_machines(sweep_status.machines, terminal_width())
                print_result(f"\n{failed}\n", unless=not failed)
                print_result(f"in {sweep_status.folder}")
                print_next_command("collect", sweep)
        elif statuses:
            print_result(
                "\n".join(
                    headline(sweep_status.sweep, sweep_status.results, sweep_status.driven)
                    for sweep_status in statuses
                )
            )
            print_next_command("status", statuses[-1].sweep.id)


def _status_json(sweep_status: SweepStatus, results: object) -> dict[str, object]:
    return {
        "sweep": sweep_status.sweep.id,
        "pool": sweep_status.sweep.pool,
        "folder": str(sweep_status.folder),
        "driven": sweep_status.driven,
        "done": sweep_status.complete,
        "jobs": list(sweep_status.jobs),
        "nodes": results,
        "machines": sweep_status.machines,
    }


# --- imagefactory cancel


@click.command()
@click.argument("sweep", metavar="SWEEP")
@json_option
@click.pass_obj
def cancel(call: CommandContext, sweep: str, as_json: bool) -> None:
    """Remove the jobs of a sweep from the queue.

    Its files stay: `collect` still takes what had come back, and `verify --pool POOL --folder DIR` goes on.
    Other stores may queue its cells from then on.
    """
    from imagefactory.actions.claim import release_claim
    from imagefactory.actions.sweep import find_sweep
    from imagefactory.errors import UsageError
    from imagefactory.schedulers.sweep_file import ID, read_pool, read_sweep

    folder = find_sweep(call.settings, sweep)
    pool = find_pool(read_pool(folder))
    there = pool.running(folder)
    pool.cancel(folder)
    access, name = call.access, folder.name
    if not ID.fullmatch(name):
        try:
            name = read_sweep(folder).id
        except UsageError as error:  # its jobs are gone, and its claim ends by itself
            access.tell(f"note: what it has claimed is not known: {error.message}")
    release_claim(access, name, (), datetime.now(UTC), call.progress)
    if as_json:
        return print_json("cancel", {"sweep": folder.name, "folder": str(folder), "canceled": there})
    status = "canceled" if there else "nothing of it was in the queue"
    print_result(f"{status}; what had come back is in {folder}")
    return print_next_command("collect", sweep)


# --- The collect command, which checks and signs what kits and sweeps report


@click.command()
@click.argument(
    "folders",
    metavar="DIR|SWEEP...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
)
@click.option(
    "--registry",
    "place",
    default="",
    metavar="HOST[/PATH]",
    help="Attach the verdicts there too.  [default: where the kit's image lies]",
)
@click.option("--promote", is_flag=True, help="Let the tags follow the verdict.")
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder that remembers the kits' nonces; each DIR is a kit then.  [default: in the store]",
)
@json_option
@click.pass_obj
def collect(
    call: CommandContext,
    /,
    folders: tuple[Path, ...],
    place: str,
    promote: bool,
    ledger: Path | None,
    as_json: bool,
) -> None:
    """Judge and sign what kits and sweeps brought back.

    \b
    imagefactory verify pytorch-2.3-cu121 --kit DIR      here: writes the kit
    python3 DIR/run.py                                   there: runs it
    imagefactory collect DIR --promote                   here again
    imagefactory collect 20261122-061500-1f3a            a sweep, by its id or folder: what is done of it

    Each kit gives one verdict: its nonce is spent. The verdict goes to the store, where it holds the image,
    and to the registry that the kit names (or --registry), and says that a kit saw the GPU. Each job of a
    sweep is one too; the pool's word on its GPU must agree with the suite's.
    Exit code 0 where all are verified, 9 where one is not.
    """
    from imagefactory.actions.verify import CollectOptions
    from imagefactory.actions.verify import collect as collect_one

    factory, progress = call.sound_factory, call.progress
    options = CollectOptions(ledger=ledger, registry=place, promote=promote)
    results: list[dict[str, object]] = []
    with exit_with_first_failure(factory) as failures:
        for folder in folders:
            with failures.of(str(folder)):
                if ledger is None and (sweep := parse_sweep_argument(call, folder)) is not None:
                    results += collect_jobs(call, sweep, options, failures, as_json=as_json)
                    continue
                kit = collect_one(factory, folder, options, datetime.now(UTC), progress)
                results.append(_as_json(folder, kit))
                print_result(_as_text(kit), unless=as_json)
                if not kit.passed:
                    raise CheckFailedError(
                        "verification-failed",
                        f"{folder}: {kit.report.outcome}: {kit.report.reason}",
                        hint="see the checks above",
                    )
                for _, fault in kit.promotion.faults if kit.promotion else ():
                    failures.add(fault)
        if as_json:
            print_json("collect", {"results": results, "errors": failures.as_json()})
    proven = sorted({str(row["target"]) for row in results})
    show_verdicts = promote or all(row["outcome"] == Outcome.TOGETHER for row in results)
    print_next_command("verdicts", proven[0]) if show_verdicts else print_next_command("promote", *proven)


def _as_text(kit: KitResult) -> str:
    from imagefactory.views.text import format_fields
    from imagefactory.views.verdicts import format_gpu_run, format_promotion

    verdict = kit.verdict
    signed = "signed before" if kit.again else "signed"
    fields = [("verdict", f"{signed}, key {verdict.keyid[:12]}, expires {verdict.expires:%Y-%m-%d}")]
    fields += [("attached", place) for place in kit.attached]
    blocks = [f"{format_gpu_run(kit.report, terminal_width())}\n{format_fields(fields, indent='')}"]
    if kit.promotion:
        blocks.append(format_promotion(kit.promotion, terminal_width()))
    return "\n\n".join(blocks)


def _as_json(folder: Path, kit: KitResult) -> dict[str, object]:
    from imagefactory.cli.verdicts import promotion_json
    from imagefactory.serialize import format_time
    from imagefactory.verify.report import format_gpu_report

    return {
        "kit": str(folder),
        "target": kit.report.subject.target,
        "outcome": kit.report.outcome.value,
        "reason": kit.report.reason,
        "report": format_gpu_report(kit.report),
        "keyid": kit.verdict.keyid,
        "expires": format_time(kit.verdict.expires),
        "again": kit.again,
        "attached": list(kit.attached),
        "promotion": promotion_json(kit.promotion) if kit.promotion else None,
    }
