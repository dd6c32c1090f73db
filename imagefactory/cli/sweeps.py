"""The sweep commands: verify images on a pool in many jobs, and collect kits."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import click

from imagefactory.cli.arguments import Command, DurationType, section
from imagefactory.cli.gpus import find_inventory, inventory_option
from imagefactory.cli.output import (
    CommandContext,
    ErrorRow,
    capability_of,
    choose_targets,
    exit_with_first_failure,
    json_option,
    print_errors,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    targets_argument,
    terminal_width,
)
from imagefactory.cli.plan import complete_rules
from imagefactory.errors import CheckFailedError, ToolError, UsageError
from imagefactory.model import Outcome
from imagefactory.settings.choices import HTCONDOR, POOLS, SITES, SLURM
from imagefactory.verify.report import FULL, NODES, QUICK

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
    from imagefactory.cli.verdicts import PromotionRow
    from imagefactory.model import Target
    from imagefactory.project import Project
    from imagefactory.schedulers.faults import MachineFaults
    from imagefactory.schedulers.pool import NodeResult, Pool, SkippedCell
    from imagefactory.schedulers.sweep_file import CollectedNode
    from imagefactory.verify.report import FormattedGpuReport


class CollectedNodeRow(TypedDict):
    sweep: str
    kit: str
    target: str
    capability: str
    outcome: str | None
    """Null while the job is not done."""
    reason: str
    note: str
    """Why no verdict was signed, or where it was; empty for none."""
    keyid: str
    gpu: str
    driver: str
    attached: list[str]
    attempts: int
    machine: str


class CollectedKitRow(TypedDict):
    kit: str
    target: str
    outcome: str
    reason: str
    report: FormattedGpuReport
    keyid: str
    expires: str
    again: bool
    """Whether the verdict was signed before."""
    attached: list[str]
    promotion: PromotionRow | None


class SweepCollectDocument(TypedDict):
    """The results of sweeps and kits."""

    format: Literal["imagefactory.sweep-collect/1"]
    results: list[CollectedNodeRow | CollectedKitRow]
    errors: list[ErrorRow]


class SweepStartDocument(TypedDict):
    """The sweep that was started."""

    format: Literal["imagefactory.sweep-start/1"]
    sweep: str
    directory: str
    job: str
    nodes: int
    skipped: list[SkippedCell]
    notes: list[str]
    errors: list[ErrorRow]


class SweepRow(TypedDict):
    sweep: str
    scheduler: str
    directory: str
    running: bool | None
    """Whether a job works on it; null if the scheduler does not answer."""
    done: bool
    jobs: list[str]
    nodes: list[NodeResult]
    machines: list[MachineFaults]
    """The machines that failed jobs."""


class SweepListDocument(TypedDict):
    """The sweeps of this store."""

    format: Literal["imagefactory.sweep-list/1"]
    sweeps: list[SweepRow]
    errors: NotRequired[list[ErrorRow]]


class SweepStatusDocument(TypedDict):
    """The jobs of a sweep."""

    format: Literal["imagefactory.sweep-status/1"]
    sweeps: list[SweepRow]
    errors: NotRequired[list[ErrorRow]]


class SweepCancelDocument(TypedDict):
    """The sweep whose jobs were removed from the queue."""

    format: Literal["imagefactory.sweep-cancel/1"]
    sweep: str
    directory: str
    canceled: bool
    """Whether it had a job in the queue."""


IMAGES = ("docker", "oras", "sif")
POLL = 15.0
"""Seconds between two checks of --wait. A check reads the logs and queries the queue."""
QUEUE_WAIT_SECONDS = 40
"""The limit of failed checks in a row. An access point needs minutes to restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """The options of `sweep start`, as the user wrote them. The pool is a name of POOLS."""

    pool: str
    suite: str = FULL
    nodes: int | None = None
    registry: str = ""
    promote: bool = False
    capability: tuple[str, ...] = ()
    latest: int | None = None
    framework: str = ""
    version: str = ""
    cuda: str = ""
    ignore_rule: tuple[str, ...] = ()
    mig: bool = False
    machine: str | None = None
    gpu_hours: int | None = None
    jobs: int | None = None
    inventory: Path | None = None
    image_format: str | None = None
    site: str | None = None
    idle_limit: timedelta | None = None
    held_limit: timedelta | None = None
    run_limit: timedelta | None = None
    retries: int | None = None
    wait: bool = False
    dir: Path | None = None
    dry_run: bool = False

    def written(self, *, but: Collection[str]) -> list[str]:
        """Return the options that differ from their defaults, as the user would write them."""
        return [
            f"--{field.name.replace('_', '-')}"
            for field in fields(self)
            if field.default not in (MISSING, getattr(self, field.name)) and field.name not in but
        ]


@click.command(cls=Command)
@targets_argument(required=False)
@section("What to verify")
@click.option(
    "--suite",
    type=click.Choice((QUICK, FULL)),
    default=FULL,
    show_default=True,
    help="Run these checks.",
)
@click.option(
    "--nodes",
    type=click.IntRange(2, 64),
    metavar="N",
    help="Instead sum over a GPU on each of N nodes, for PyTorch images (Slurm with Apptainer).",
)
@click.option("--latest", type=click.IntRange(1), metavar="N", help="Only the N latest versions.")
@click.option(
    "--capability", multiple=True, metavar="X.Y", help="Only GPUs of this compute capability (repeatable)."
)
@click.option(
    "--framework",
    default="",
    metavar="NAME",
    help="Only one image: of this framework. Requires --version, --cuda and one --capability.",
)
@click.option("--version", default="", metavar="VERSION", help="The version of --framework, such as 2.3.")
@click.option("--cuda", default="", metavar="X.Y", help="The CUDA version of --framework, such as 12.1.")
@click.option("--mig", is_flag=True, help="Also verify on GPU slices (MIG), each profile separately.")
@click.option(
    "--ignore-rule",
    multiple=True,
    metavar="RULE",
    shell_complete=complete_rules,
    help=(
        "Include the cells that a rule of `plan` skips (repeatable). Also `verified`, `queued`, "
        "`uncollected`, `claimed` and `bad-machine`."
    ),
)
@section("Cluster")
@click.option(
    "--scheduler",
    type=click.Choice(tuple(POOLS)),
    help="The scheduler of the cluster.  [default: the one of this machine, htcondor if it has both]",
)
@click.option(
    "--site",
    type=click.Choice(SITES),
    help="The site whose rules the jobs follow.  [default: the setting `site`]",
)
@click.option(
    "--machine",
    metavar="NAMES",
    help=(
        "Only these machines, and not those after !: 'gpu*,!gpu07'.  [default: the setting `sweep-machines`]"
    ),
)
@inventory_option
@click.option(
    "--image-format",
    type=click.Choice(IMAGES),
    help="How jobs get the image.  [default: docker; sif if `sif-folder` or no registry is set]",
)
@section("Limits")
@click.option(
    "--gpu-hours",
    type=click.IntRange(1),
    metavar="N",
    help="Queue at most N GPU hours, the oldest verdicts first.  [default: the setting `sweep-gpu-hours`]",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Have at most N jobs in the queue.  [default: the setting `sweep-jobs`]",
)
@click.option(
    "--idle-limit",
    type=DurationType(),
    metavar="TIME",
    help="Stop a job that waits longer than this.  [default: 24h]",
)
@click.option(
    "--held-limit",
    type=DurationType(),
    metavar="TIME",
    help="Stop a job that HTCondor holds longer than this.  [default: 10m]",
)
@click.option(
    "--run-limit",
    type=DurationType(),
    metavar="TIME",
    help="Stop a job that runs longer than this.  [default: 24h]",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 20),
    metavar="N",
    help="Retry a job that failed because of the cluster this often.  [default: 2]",
)
@section("Results")
@click.option("--wait", is_flag=True, help="Wait until all jobs are done, then collect.")
@click.option("--registry", default="", metavar="HOST[/PATH]", help="Also attach the verdicts there.")
@click.option("--promote", is_flag=True, help="With --wait: then move the tags to verified images.")
@click.option(
    "--dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The directory of the sweep. A sweep in it continues.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be submitted; submit nothing.")
@json_option
@click.pass_obj
def start(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    scheduler: str | None,
    suite: str,
    nodes: int | None,
    capability: tuple[str, ...],
    latest: int | None,
    framework: str,
    version: str,
    cuda: str,
    ignore_rule: tuple[str, ...],
    mig: bool,
    machine: str | None,
    gpu_hours: int | None,
    jobs: int | None,
    inventory: Path | None,
    image_format: str | None,
    site: str | None,
    idle_limit: timedelta | None,
    held_limit: timedelta | None,
    run_limit: timedelta | None,
    retries: int | None,
    registry: str,
    promote: bool,
    wait: bool,
    dir: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Verify images on the GPUs of a cluster, in many jobs.

    \b
    imagefactory sweep start 'pytorch-*' --dry-run
    imagefactory sweep start 'pytorch-*'
    imagefactory sweep start 'pytorch-*' 'jax-*' --latest 3
    imagefactory sweep start --dir DIR               continue a sweep

    It submits one job for each image and compute capability. Cells that cannot work, or whose answer is
    known, are skipped with a rule; --ignore-rule RULE includes them. Then use `sweep status` and `sweep
    collect`.

    With --wait the exit code is that of `sweep collect`.
    """
    from imagefactory.actions.sweep import make_sweep, prepare_sweep
    from imagefactory.settings.choices import local_pool

    request = SweepRequest(
        pool=scheduler or local_pool(os.environ) or HTCONDOR, suite=suite, nodes=nodes, registry=registry,
        promote=promote,
        capability=capability, latest=latest, framework=framework, version=version, cuda=cuda,
        ignore_rule=ignore_rule, mig=mig, machine=machine, gpu_hours=gpu_hours, jobs=jobs,
        inventory=inventory, image_format=image_format, site=site, idle_limit=idle_limit,
        held_limit=held_limit, run_limit=run_limit, retries=retries, wait=wait, dir=dir,
        dry_run=dry_run,
    )  # fmt: skip
    reject_conflict(
        held_limit and request.pool == SLURM,
        "--held-limit does not apply to Slurm, where a held job is a waiting job",
        "use --idle-limit",
    )
    reject_conflict(nodes and request.pool != SLURM, "--nodes is for Slurm", "add --scheduler slurm")
    for option in ("--suite", "--mig", "--retries", "--promote"):
        reject_conflict(
            nodes and option in request.written(but=()),
            f"--nodes and {option} exclude each other: it is a test of its own, of which tags say nothing",
            f"remove {option}",
        )
    factory = call.factory
    with exit_with_first_failure(factory, names) as failures:
        pool = find_pool(request.pool)
        if dir is not None and pool.is_whole(dir):
            for word in (*names, *request.written(but=("wait", "dir"))):
                reject_conflict(
                    word,
                    f"{dir} is already a sweep, and {word[:80]} would change it",
                    f"remove {word[:80]} to continue the sweep, or pass another --dir",
                )
            return _submit(call, dir.absolute(), request, failures, as_json=as_json)
        bench = sweep_dependencies()
        options = _options(factory, request)
        targets, options = _targets(factory, names, request, options)
        pool_inventory = find_inventory(inventory, bench.clock(), request.pool)
        if not dry_run:
            pool.require()
        prepared = prepare_sweep(factory, targets, pool_inventory, options, bench)
        _print_plan(prepared, as_json=as_json and dry_run, quiet=as_json)
        if dry_run:
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
            newest=request.latest or 0,
            mig=request.mig,
            allow=check_allowed(request.ignore_rule),
            machines=parse_machines(settings.sweep_machines.value if machines is None else machines),
            nodes_each=request.nodes or 1,
            gpu_hours=request.gpu_hours or parse_limit(settings.sweep_gpu_hours.value),
        ),
        at_once=request.jobs or parse_limit(settings.sweep_jobs.value),
        level=NODES if request.nodes else request.suite,
        image=request.image_format or "",
        registry=request.registry,
        pool=request.pool,
        site=request.site or factory.settings.site.value,
        limits=JobLimits(
            idle=request.idle_limit or default.idle,
            held=request.held_limit or default.held,
            run=request.run_limit or default.run,
            retries=0 if request.nodes else default.retries if request.retries is None else request.retries,
        ),
        folder=request.dir.absolute() if request.dir else None,
    )


def _targets(
    factory: Project, names: tuple[str, ...], request: SweepRequest, options: SweepOptions
) -> tuple[Sequence[Target], SweepOptions]:
    """Return the requested targets. With --framework there is one, with only the requested capability."""
    from imagefactory.schedulers.cells import choose_tuple, parse_tuple

    named = {"--framework": request.framework, "--version": request.version, "--cuda": request.cuda}
    if not any(named.values()):
        if not names:
            raise UsageError(
                "argument-missing",
                "no target is given",
                hint="add targets ('pytorch-*'), or --framework, --version, --cuda and --capability",
            )
        return choose_targets(factory, names), options
    reject_conflict(names, "--framework and targets exclude each other", "remove the targets")
    for option, value in named.items():
        reject_conflict(
            not value, f"{option} is missing: an image has a framework, a version and a CUDA", f"add {option}"
        )
    reject_conflict(
        len(request.capability) != 1,
        "--framework requires exactly one --capability",
        "write, for example, --capability 8.0",
    )
    combination = parse_tuple(request.framework, request.version, request.cuda, *request.capability)
    cells = replace(options.asked, capabilities=(combination.capability,))
    return (choose_tuple(factory.targets, combination),), replace(options, asked=cells)


def _print_plan(prepared: SweepDraft, *, as_json: bool, quiet: bool) -> None:
    from imagefactory.verify.gpu_run import timeout_of
    from imagefactory.views.sweeps import format_sweep_plan, plan_json

    options = prepared.options
    run = find_pool(options.pool).run_limit(options.limits, timeout_of(options.level), prepared.own)
    limits = replace(options.limits, run=run)
    if as_json:
        print_json(plan_json(prepared.plan, limits, prepared.place.kind))
    else:
        print_result(format_sweep_plan(prepared.plan, limits, terminal_width()), unless=quiet)


def _submit(
    call: CommandContext,
    directory: Path,
    request: SweepRequest,
    failures: TargetFailures,
    plan: SweepCreated | None = None,
    *,
    as_json: bool,
) -> None:
    """Submit the sweep and print its status, or wait for it and collect its results."""
    from imagefactory.actions.sweep import claim_again, submit_sweep, sweeps_directory
    from imagefactory.actions.verify import CollectOptions
    from imagefactory.schedulers.sweep_file import read_sweep

    sweep = read_sweep(directory)
    for name, fault in plan.faults if plan else ():
        failures.of(name).add(fault)
    if plan is None:
        claim_again(call.access, directory, request.registry, sweep_dependencies(), call.progress)
    try:
        job = submit_sweep(directory, find_pool)
    except ToolError as error:
        again = f"then continue it: imagefactory sweep start --scheduler {sweep.scheduler} --dir {directory}"
        raise ToolError(error.code, error.message, hint=f"{error.hint}; {again}") from error
    if request.wait:
        _wait(call, directory)
        options = CollectOptions(registry=request.registry, promote=request.promote)
        rows = collect_jobs(call, directory, options, failures, as_json=as_json)
        if as_json:
            print_json(
                SweepCollectDocument(
                    format="imagefactory.sweep-collect/1", results=[*rows], errors=failures.as_json()
                )
            )
        return
    if as_json:
        print_json(
            SweepStartDocument(
                format="imagefactory.sweep-start/1",
                sweep=sweep.id,
                directory=str(directory),
                job=job,
                nodes=len(sweep.nodes),
                skipped=list(sweep.skipped),
                notes=list(plan.notes) if plan else [],
                errors=failures.as_json(),
            )
        )
    else:
        ours = sweep.id if directory == sweeps_directory(call.settings) / sweep.id else directory
        print_result(
            f"submitted {sweep.id} as job {job}, in {directory}\n"
            f"its verdicts:    imagefactory sweep collect {ours}\n"
            f"cancel it:       imagefactory sweep cancel {ours}"
        )
        print_next_command("sweep", "status", str(ours))


def _wait(call: CommandContext, directory: Path) -> None:
    """Wait until every node has a final outcome.

    Raises CheckFailedError if no job runs the sweep, ToolError if the pool does not answer for a long time.
    """
    from imagefactory.actions.sweep import read_status

    progress, first = call.progress, read_status(directory, find_pool, queue=False)
    with progress.task(f"sweep {first.sweep.id}", total=len(first.results), unit="nodes") as task:
        known = failed = 0
        while True:
            try:
                now, failed = read_status(directory, find_pool), 0
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
                    f"no job works on {directory}, but {len(now.results) - now.ended} nodes are not done",
                    hint=f"continue: imagefactory sweep start --scheduler {first.sweep.scheduler} "
                    f"--dir {directory}",
                )
            time.sleep(POLL)


def parse_sweep_argument(call: CommandContext, path: Path) -> Path | None:
    """Return the directory of a sweep from its id or path, None for other text."""
    from imagefactory.actions.sweep import find_sweep
    from imagefactory.schedulers.sweep_file import ID, SWEEP

    if ID.fullmatch(str(path)) or (path / SWEEP).is_file():
        return find_sweep(call.settings, str(path))
    return None


def collect_jobs(
    call: CommandContext, directory: Path, options: CollectOptions, failures: TargetFailures, *, as_json: bool
) -> list[CollectedNodeRow]:
    """Collect and print a sweep. Return its rows. Unverified nodes are added to `failures`."""
    from imagefactory.actions.collect import collect_sweep
    from imagefactory.views.sweeps import format_collected, format_failed_machines, headline
    from imagefactory.views.verdicts import format_promotion

    result = collect_sweep(call.factory, directory, options, datetime.now(UTC), call.progress)
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
    failures.of(str(directory))
    rows = [_node_json(result, node) for node in result.nodes]
    if not result.verified:
        failures.add(not_verified_error(result))
    return rows


def _node_json(result: SweepResult, node: CollectedNode) -> CollectedNodeRow:
    outcome = node.result.outcome
    return CollectedNodeRow(
        sweep=result.sweep.id,
        kit=str(result.folder / "nodes" / node.result.node),
        target=node.target,
        capability=node.capability,
        outcome=outcome.value if outcome else None,
        reason=node.result.reason,
        note=node.why,
        keyid=node.keyid,
        gpu=node.gpu,
        driver=node.driver,
        attached=list(node.attached),
        attempts=len(node.result.attempts),
        machine=node.result.attempts[-1].machine if node.result.attempts else "",
    )


def not_verified_error(result: SweepResult) -> CheckFailedError:
    if result.waiting:
        return CheckFailedError(
            "sweep-incomplete",
            f"{result.waiting} of {len(result.nodes)} nodes are not done",
            hint=f"run imagefactory sweep status {result.folder}; collect again when they are done",
        )
    bad = sum(node.result.outcome not in ("verified", "together") for node in result.nodes)
    return CheckFailedError(
        "sweep-not-verified",
        f"{bad} of {len(result.nodes)} nodes are not verified",
        hint=f"see the table; all logs are in {result.folder}/nodes",
    )


# --- Show and cancel


@click.command("list", cls=Command)
@json_option
@click.pass_obj
def list_(call: CommandContext, as_json: bool) -> None:
    """List the sweeps of this store, and their progress.

    \b
    imagefactory sweep list

    If the files of a sweep cannot be read, the others are listed all the same. The exit code is 0 whatever
    the sweeps found.
    """
    from imagefactory.actions.sweep import find_sweeps
    from imagefactory.views.sweeps import headline

    directories = find_sweeps(call.settings)
    with exit_with_first_failure() as failures:
        statuses = _read_statuses(directories, failures)
        if as_json:
            print_json(
                SweepListDocument(
                    format="imagefactory.sweep-list/1", sweeps=[_status_json(row) for row in statuses]
                )
            )
        elif not directories:
            print_result("no sweep was started here: imagefactory sweep start TARGET")
        elif statuses:
            print_result("\n".join(headline(row.sweep, row.results, row.driven) for row in statuses))
            print_next_command("sweep", "status", statuses[-1].sweep.id)


@click.command(cls=Command)
@click.argument("sweep", metavar="SWEEP")
@json_option
@click.pass_obj
def status(call: CommandContext, sweep: str, as_json: bool) -> None:
    """Show each job of a sweep, by its id or directory.

    \b
    imagefactory sweep status 20261122-061500-1f3a

    The exit code is 0 whatever the jobs found: `sweep collect` verifies their results.
    """
    from imagefactory.actions.sweep import find_sweep
    from imagefactory.views.sweeps import format_failed_machines, format_status

    with exit_with_first_failure() as failures:
        statuses = _read_statuses((find_sweep(call.settings, sweep),), failures)
        if as_json:
            return print_json(
                SweepStatusDocument(
                    format="imagefactory.sweep-status/1", sweeps=[_status_json(row) for row in statuses]
                )
            )
        for row in statuses:
            now = datetime.now(UTC)
            print_result(format_status(row.sweep, row.results, row.driven, now, terminal_width()))
            failed = format_failed_machines(row.machines, terminal_width())
            print_result(f"\n{failed}\n", unless=not failed)
            print_result(f"in {row.folder}")
            print_next_command("sweep", "collect", sweep)
    return None


def _read_statuses(directories: Sequence[Path], failures: TargetFailures) -> list[SweepStatus]:
    """Read sweeps. Without the commands of the pool, most is read from logs, and one error is printed."""
    from imagefactory.actions.sweep import read_status

    statuses: list[SweepStatus] = []
    queue = True
    for directory in directories:
        with failures.of(directory.name):
            try:
                statuses.append(read_status(directory, find_pool, queue=queue))
            except ToolError as error:
                print_errors(error)
                queue = False
                statuses.append(read_status(directory, find_pool, queue=queue))
    return statuses


def _status_json(sweep_status: SweepStatus) -> SweepRow:
    from imagefactory.schedulers.sweep_file import format_results

    return SweepRow(
        sweep=sweep_status.sweep.id,
        scheduler=sweep_status.sweep.scheduler,
        directory=str(sweep_status.folder),
        running=sweep_status.driven,
        done=sweep_status.complete,
        jobs=list(sweep_status.jobs),
        nodes=format_results(sweep_status.results),
        machines=list(sweep_status.machines),
    )


@click.command(cls=Command)
@click.argument("sweep", metavar="SWEEP")
@json_option
@click.pass_obj
def cancel(call: CommandContext, sweep: str, as_json: bool) -> None:
    """Remove the jobs of a sweep from the queue.

    \b
    imagefactory sweep cancel 20261122-061500-1f3a

    Its files stay: `sweep collect` reads the results so far, and `sweep start --dir DIR` continues it.
    """
    from imagefactory.actions.claim import release_claim
    from imagefactory.actions.sweep import find_sweep
    from imagefactory.errors import UsageError
    from imagefactory.schedulers.sweep_file import ID, read_scheduler, read_sweep

    directory = find_sweep(call.settings, sweep)
    pool = find_pool(read_scheduler(directory))
    there = pool.running(directory)
    pool.cancel(directory)
    access, name = call.access, directory.name
    if not ID.fullmatch(name):
        try:
            name = read_sweep(directory).id
        except UsageError as error:  # its jobs are gone, and its claim ends by itself
            access.tell(f"note: what it has claimed is not known: {error.message}")
    release_claim(access, name, (), datetime.now(UTC), call.progress)
    if as_json:
        return print_json(
            SweepCancelDocument(
                format="imagefactory.sweep-cancel/1",
                sweep=directory.name,
                directory=str(directory),
                canceled=there,
            )
        )
    status = "canceled" if there else "it had no job in the queue"
    print_result(f"{status}; its results are in {directory}")
    return print_next_command("sweep", "collect", sweep)


# --- Collect


@click.command(cls=Command)
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
    help="Also attach the verdicts there.  [default: the registry of the kit's image]",
)
@click.option("--promote", is_flag=True, help="Then move the tags to verified images.")
@click.option(
    "--nonce-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The directory with the nonces of the kits; each DIR is then a kit.  [default: in the store]",
)
@json_option
@click.pass_obj
def collect(
    call: CommandContext,
    /,
    folders: tuple[Path, ...],
    place: str,
    promote: bool,
    nonce_dir: Path | None,
    as_json: bool,
) -> None:
    """Verify and sign the results of sweeps and kits.

    \b
    imagefactory sweep collect 20261122-061500-1f3a      the finished jobs
    imagefactory sweep collect DIR --promote             a kit that has run

    A kit is made by `imagefactory verify TARGET --kit DIR`, and run by `python3 DIR/run.py` on a GPU
    machine.

    Each kit and each job gives one verdict. It goes to the store, if that has the image, and to the
    registry of the image (or --registry).

    Exit code 0 if all are verified, 9 if one is not.
    """
    from imagefactory.actions.verify import CollectOptions
    from imagefactory.actions.verify import collect as collect_one

    factory, progress = call.factory, call.progress
    options = CollectOptions(nonce_dir=nonce_dir, registry=place, promote=promote)
    results: list[CollectedNodeRow | CollectedKitRow] = []
    with exit_with_first_failure() as failures:
        for directory in folders:
            with failures.of(str(directory)):
                if nonce_dir is None and (sweep := parse_sweep_argument(call, directory)) is not None:
                    results += collect_jobs(call, sweep, options, failures, as_json=as_json)
                    continue
                if not directory.exists():
                    raise UsageError(
                        "kit-invalid",
                        f"'{directory}' is not a sweep or a directory",
                        hint="`imagefactory sweep list` shows the sweeps",
                    )
                kit = collect_one(factory, directory, options, datetime.now(UTC), progress)
                results.append(_as_json(directory, kit))
                print_result(_as_text(kit), unless=as_json)
                if not kit.passed:
                    raise CheckFailedError(
                        "verification-failed",
                        f"{directory}: {kit.report.outcome}: {kit.report.reason}",
                        hint=f"see its failed check: imagefactory sweep collect {directory} --json",
                    )
                for _, fault in kit.promotion.faults if kit.promotion else ():
                    failures.add(fault)
        if as_json:
            print_json(
                SweepCollectDocument(
                    format="imagefactory.sweep-collect/1", results=results, errors=failures.as_json()
                )
            )
    proven = sorted({row["target"] for row in results})
    show_verdicts = promote or all(row["outcome"] == Outcome.TOGETHER for row in results)
    print_next_command("verdict", "list", proven[0]) if show_verdicts else print_next_command(
        "image", "promote", *proven
    )


def _as_text(kit: KitResult) -> str:
    from imagefactory.views.text import format_fields
    from imagefactory.views.verdicts import format_gpu_run, format_promotion

    verdict = kit.verdict
    signed = "signed before" if kit.again else "signed"
    fields = [("verdict", f"{signed}, key {verdict.keyid[:12]}, expires {verdict.expires:%Y-%m-%d}")]
    fields += [("attached", repository) for repository in kit.attached]
    blocks = [f"{format_gpu_run(kit.report, terminal_width())}\n{format_fields(fields, indent='')}"]
    if kit.promotion:
        blocks.append(format_promotion(kit.promotion, terminal_width()))
    return "\n\n".join(blocks)


def _as_json(directory: Path, kit: KitResult) -> CollectedKitRow:
    from imagefactory.cli.verdicts import promotion_json
    from imagefactory.serialize import format_time
    from imagefactory.verify.report import format_gpu_report

    return CollectedKitRow(
        kit=str(directory),
        target=kit.report.subject.target,
        outcome=kit.report.outcome.value,
        reason=kit.report.reason,
        report=format_gpu_report(kit.report),
        keyid=kit.verdict.keyid,
        expires=format_time(kit.verdict.expires),
        again=kit.again,
        attached=list(kit.attached),
        promotion=promotion_json(kit.promotion) if kit.promotion else None,
    )
