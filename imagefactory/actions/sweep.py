"""Sweeps: the GPU suite on a pool, one job for each image and capability.

    targets + inventory -> prepare_sweep -> make_sweep (images, nonces, files) -> submit -> status -> collect

The directory of a sweep is its only state, so any process can continue it. actions/collect.py signs verdicts.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.claim import ClaimRequest, ClaimResult, claim_cells, read_claims, release_claim
from imagefactory.actions.definition import define_target
from imagefactory.actions.images import stored_image
from imagefactory.actions.inspect import inspect_artifact
from imagefactory.actions.sweep_images import (
    ImageDelivery,
    choose_container,
    choose_image_type,
    ensure_image,
    ensure_stored_sif,
    read_pool_stages,
)
from imagefactory.actions.verdicts import nonce_store
from imagefactory.errors import ImagefactoryError, NothingSelectedError, UsageError
from imagefactory.gpu.capability import AMD64, MACHINES, Capability, architecture
from imagefactory.gpu.cells import cell_query, scanned_contents
from imagefactory.matrix.plan import TargetStatus
from imagefactory.model import BuildSpec, Outcome, Target
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.cells import (
    BAD_MACHINE,
    CAPACITY_HINT,
    CLAIMED,
    CellRequest,
    QueuedCell,
    SweepPlan,
    check_capacity,
    choose_machines,
    driver_of,
    exclude_bad_machines,
    plan_sweep,
    within_budget,
)
from imagefactory.schedulers.faults import (
    REMEMBERED,
    MachineFaults,
    bad_by_row,
    blamed_machines,
    faults_of_bad_machines,
    format_excluded,
    format_machine_faults,
    read_failed_machines,
    read_machine_faults,
)
from imagefactory.schedulers.htcondor.node.post import FAULT_FILES, NodeFault
from imagefactory.schedulers.pool import (
    RETRIED_OUTCOMES,
    TRANSFERS,
    ImageKind,
    Inventory,
    JobLimits,
    MachinesByCapability,
    NodeResult,
    NodeState,
    PoolImage,
    Pools,
    SkippedCell,
    SweepNode,
    SweepSpec,
)
from imagefactory.schedulers.sites import GENERIC, check_needs, find_site, job_additions
from imagefactory.schedulers.sizes import disk_of, memory_of
from imagefactory.schedulers.sweep_file import (
    ID,
    SWEEP,
    CollectedNode,
    read_collected,
    read_sweep,
    write_document,
    write_file,
    write_sweep_file,
)
from imagefactory.schedulers.underway import (
    Images,
    SweepLookup,
    cell_of,
    read_underway,
    skip_claimed,
    skip_underway,
    skipped_by_claim,
    will_still_run,
)
from imagefactory.serialize import format_time
from imagefactory.settings.choices import CONTAINERS, HTCONDOR
from imagefactory.settings.load import Settings
from imagefactory.settings.own_commands import names_of
from imagefactory.suite.gpu.context import Predicted
from imagefactory.verify.gpu_run import GpuRequest, gpu_expectations, predict_coverage, timeout_of
from imagefactory.verify.kit.program import EXPECTATIONS, FORMAT, KIT
from imagefactory.verify.nonces import LIFETIME, NONCE_BYTES, NonceSubject, format_nonce
from imagefactory.verify.report import FULL
from imagefactory.verify.suite_files import digest_of, suite_argv, suite_digest

# --- Nodes: for each cell a job, a fresh nonce, and the files that its job reads


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKit:
    """A node with kit.json and expectations.json, and the subject of its nonce."""

    node: SweepNode
    run: NonceSubject
    texts: Mapping[str, bytes]


def _make_nodes(
    project: Project,
    cells: Sequence[QueuedCell],
    image: PoolImage,
    options: SweepOptions,
    now: datetime,
    random: Callable[[int], bytes],
    progress: Progress,
) -> tuple[NodeKit, ...]:
    """Return the nodes of one target. Raises LockError and StaleError if its lock is not current."""
    definition = define_target(project, cells[0].stage.target)
    predicted = _predict(project, cells[0].stage, definition, progress)
    kits = []
    for cell in cells:
        node = make_node(cell, image, definition, options.level, format_nonce(random(NONCE_BYTES)))
        request = GpuRequest(
            nonce=node.nonce,
            level=options.level,
            nodes=options.asked.nodes_each,
            capability=node.capability,
            predicted=predicted,
        )
        kits.append(make_node_kit(node, definition, request, now))
    return tuple(kits)


def make_node(cell: QueuedCell, image: PoolImage, definition: BuildSpec, level: str, nonce: str) -> SweepNode:
    target, part = definition.target, f"-{cell.part}" if cell.part else ""
    return SweepNode(
        # DAGMan accepts neither `.` nor `+`. Names of targets have no `_`.
        name=re.sub(r"[^A-Za-z0-9_-]", "_", f"{target.name}-{cell.capability.sm.replace('_', '')}{part}"),
        target=target.name,
        capability=str(cell.capability),
        image=image,
        nonce=nonce,
        cuda=cell.cuda,
        memory=memory_of(image.unpacked),
        disk=disk_of(image.kind, image.size, image.unpacked),
        timeout=timeout_of(level),
        python=suite_argv(definition)[0],
        part=cell.part,
        first=cell.first,
        only=cell.only,
        processor="" if target.platform == AMD64 else architecture(target.platform),
    )


def make_node_kit(node: SweepNode, definition: BuildSpec, request: GpuRequest, now: datetime) -> NodeKit:
    """Return the node with the files of a kit."""
    suite, subject = suite_digest(), node.image.subject
    kit = {
        "format": FORMAT,
        "nonce": node.nonce,
        "subject": asdict(subject),
        "diff_ids": [],  # the pool starts the image by its digest
        "machine": MACHINES[definition.target.platform],
        "size": node.image.size,
        "reference": "",
        "sif": bool(node.image.sha256),
        "sifs": [],
        "plain_http": False,
        "suite": suite,
        "level": request.level,
        "capability": node.capability,
        "waive": list(definition.target.waive),
        "argv": list(suite_argv(definition)),
        "timeout": node.timeout,
        "expires": format_time((now + LIFETIME).replace(microsecond=0)),
    }
    files = {KIT: kit, EXPECTATIONS: gpu_expectations(definition, request)}
    texts = {
        name: (json.dumps(value, indent=1, sort_keys=True) + "\n").encode() for name, value in files.items()
    }
    run = NonceSubject(subject=subject, suite=suite, level=request.level, kit=digest_of(texts))
    return NodeKit(node=node, run=run, texts=texts)


def _predict(
    project: Project, stage: TargetStatus, definition: BuildSpec, progress: Progress
) -> dict[str, Predicted]:
    """Return the predictions from a scan of the image, or of the wheels if the image is not in the store."""
    image = stored_image(project, stage.target)
    if image is not None and stage.image in ("", image.digest):
        with project.layout.in_use(progress):
            return predict_coverage(inspect_artifact(project, image, progress).contents)
    contents = scanned_contents(cell_query(definition.target, definition.lock, Capability(8, 0)))
    return predict_coverage(contents) if contents is not None else {}


JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The name of a job on a pool: `12.0`, `123456`."""
SUBMITTED = "submitted.json"
WRITTEN = frozenset({"request_memory", "request_disk"})
"""The submit commands of HTCondor that every job of a sweep has, so a site need not require them."""
FAILED = "failed"
"""The rule for cells whose image is not available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options of a sweep. `image` is docker, oras, sif or empty.

    `registry` is HOST[/PATH], empty for the setting. `folder` is None for a directory in the store. `pool`
    is a row of POOLS, `site` one of sites.toml. `at_once` is the most jobs in the queue, 0 for all.
    """

    asked: CellRequest = field(default_factory=CellRequest)
    level: str = FULL
    image: str = ""
    registry: str = ""
    pool: str = HTCONDOR
    site: str = GENERIC
    limits: JobLimits = field(default_factory=JobLimits)
    folder: Path | None = None
    at_once: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDependencies:
    """The clock, random bytes and pools of this process.

    With `queue` the pools may be queried for running sweeps. `user` is the requester, None for anyone.
    """

    clock: Callable[[], datetime]
    random: Callable[[int], bytes]
    pools: Pools
    queue: bool = True
    user: int | None = None
    pause: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDraft:
    """A planned sweep: its cells, the destination of its images, its options.

    `inventory` has only usable machines. `own` are the additions of the settings to the jobs. `faults` are
    those of the excluded machines.
    """

    plan: SweepPlan
    inventory: Inventory
    place: ImageDelivery
    id: str
    options: SweepOptions
    own: tuple[str, ...] = ()
    faults: tuple[NodeFault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCreated:
    """A written sweep, the errors of targets without an available image, and the notes of its plan."""

    sweep: SweepSpec
    folder: Path
    faults: tuple[tuple[str, ImagefactoryError], ...] = ()
    notes: tuple[str, ...] = ()


def prepare_sweep(
    project: Project,
    targets: Sequence[Target],
    inventory: Inventory,
    options: SweepOptions,
    bench: SweepDependencies,
) -> SweepDraft:
    """Plan a sweep. Builds and sends nothing. Raises UsageError for invalid options."""
    check_limits(options.limits)
    extra_commands = job_additions(options.pool, project.settings)
    site = find_site(options.site)
    if options.pool == HTCONDOR:
        check_needs(site, WRITTEN | names_of(extra_commands))
    now = bench.clock()
    name = format_id(now, bench.random(2))
    registry = options.registry or project.settings.registry.value
    check_nodes(project, options)
    kind = choose_image_type(project, options.image, registry, options.pool)
    directory = options.folder or sweeps_directory(project.settings) / name
    bench.pools(options.pool).check_folder(directory)
    delivery = ImageDelivery(kind=kind, registry=registry, folder=directory, now=now)
    plan = plan_sweep(read_pool_stages(project, targets, delivery), inventory, options.asked)
    lookup = SweepLookup(now=now, suite=suite_digest(), pools=bench.pools, queue=bench.queue, user=bench.user)
    several = options.asked.nodes_each > 1  # such a job is of no cell, so others have none of its cells
    images = {} if several else _images(project, plan, kind)
    seen, notes = read_underway(sweeps_directory(project.settings), images, lookup)
    plan = skip_underway(replace(plan, notes=plan.notes + notes), seen, options.asked.allow)
    faults: tuple[NodeFault, ...] = ()
    chosen = choose_machines(inventory, options.asked.machines)
    if plan.cells and BAD_MACHINE not in options.asked.allow:
        machines = capable_machines(chosen, plan.cells)
        faults = faults_of_bad_machines(_recent_faults(project.settings, options.pool, bench), machines)
        plan = exclude_bad_machines(plan, chosen, bad_by_row(faults, machines))
        plan = replace(plan, notes=plan.notes + format_excluded(faults))
    if plan.cells and CLAIMED not in options.asked.allow and not several:
        claims = read_claims(project, registry, now)
        plan = skip_claimed(replace(plan, notes=plan.notes + claims.notes), images, claims.claims)
    plan = within_budget(plan, options.asked, timeout_of(options.level), now.date())
    return SweepDraft(
        plan=plan,
        inventory=chosen,
        place=delivery,
        id=name,
        options=options,
        own=extra_commands,
        faults=faults,
    )


def _recent_faults(settings: Settings, pool: str, bench: SweepDependencies) -> tuple[NodeFault, ...]:
    """Return the faults of machines in the sweeps of the last days.

    An unreadable sweep is skipped: `read_underway` reports it.
    """
    now = bench.clock()
    blamed: list[NodeFault] = []
    for directory in find_sweeps(settings):
        if not (faults := read_machine_faults(directory)):
            continue
        with suppress(ImagefactoryError):
            sweep = read_sweep(directory)
            if sweep.scheduler != pool or sweep.created + REMEMBERED + LIFETIME <= now:
                continue
            nodes, opened = {row.name: row for row in sweep.nodes}, bench.pools(pool)
            names = {row.node for row in faults if row.node in nodes}
            results = {name: opened.read_result(directory, nodes[name], sweep.limits) for name in names}
            blamed += blamed_machines(faults, sweep, results, now)
    return tuple(blamed)


def _images(project: Project, plan: SweepPlan, kind: ImageKind) -> Images:
    """Return the existing images for the jobs of a plan."""
    stages = {cell.stage.target.name: cell.stage for cell in plan.cells if not cell.stage.missing}
    if kind is ImageKind.DOCKER:
        images = {name: f"docker://{stage.reference}" for name, stage in stages.items()}
    else:
        sifs = {name: ensure_stored_sif(project, stage.target) for name, stage in stages.items()}
        images = {name: sif.file.digest for name, sif in sifs.items() if sif}
    keys = [(cell.stage.target.name, cell.row) for cell in plan.cells]
    return {key: images[key[0]] for key in keys if key[0] in images}


def check_nodes(project: Project, options: SweepOptions) -> None:
    """Raise UsageError if jobs on several nodes cannot start images as the settings say."""
    container = choose_container(project, options.pool)
    if options.asked.nodes_each > 1 and container != CONTAINERS[0]:
        raise UsageError(
            "container-unsupported",
            f"on several nodes, {CONTAINERS[0]} starts images, not {container}",
            hint=f"set IMAGEFACTORY_CONTAINER={CONTAINERS[0]}",
        )


def check_limits(limits: JobLimits) -> None:
    """Raise UsageError if results could come after LIFETIME, when their nonces have expired."""
    longest = (limits.idle + limits.held + limits.run + TRANSFERS) * (limits.retries + 1)
    if longest > LIFETIME:
        raise UsageError(
            "sweep-too-long",
            f"a job could take {longest.days} days with its retries, but its result must be signed within "
            f"{LIFETIME.days} days",
            hint="lower --idle-limit, --run-limit or --retries",
        )


def format_id(now: datetime, random: bytes) -> str:
    """Return an id such as `20261122-061500-1f3a`, which sorts by time and ends in random digits."""
    return f"{now.astimezone(UTC):%Y%m%d-%H%M%S}-{random.hex()}"


def sweeps_directory(settings: Settings) -> Path:
    """Return the parent directory of sweeps without `--dir`."""
    return settings.store_path / "sweeps"


def make_sweep(
    project: Project, prepared: SweepDraft, bench: SweepDependencies, progress: Progress
) -> SweepCreated:
    """Write a sweep: images, nonces and files. A target that cannot be built does not stop the others.

    Raises NothingSelectedError if there is nothing to verify, UsageError for an existing directory.
    """
    directory = prepared.place.folder
    if not prepared.plan.cells:
        rules = Counter(row.rule for row in prepared.plan.skipped)
        counts = ", ".join(f"{count} {rule}" for rule, count in sorted(rules.items()))
        raise NothingSelectedError(
            "nothing-to-verify",
            f"nothing to verify on this pool{counts and f': {counts}'}",
            hint="to include skipped cells, pass --ignore-rule RULE",
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(
            "directory-exists", f"{directory} already exists", hint="choose a new directory: --dir DIR"
        )
    project.layout.make()
    kits: list[NodeKit] = []
    faults: list[tuple[str, ImagefactoryError]] = []
    skipped = list(prepared.plan.skipped)
    by_target: dict[str, list[QueuedCell]] = {}
    for cell in prepared.plan.cells:
        by_target.setdefault(cell.stage.target.name, []).append(cell)
    for name, cells in by_target.items():
        try:
            image = ensure_image(project, cells[0].stage, prepared.place, progress)
            fitting, none = check_capacity(cells, image, prepared.inventory)
            skipped += none
            if fitting:
                kits += _make_nodes(
                    project, fitting, image, prepared.options, prepared.place.now, bench.random, progress
                )
        except ImagefactoryError as error:
            faults.append((name, error))
            skipped += [
                SkippedCell(
                    target=name,
                    capability=str(cell.capability),
                    rule=FAILED,
                    reason=f"its image is not available: {error.message}",
                    part=cell.part,
                )
                for cell in cells
            ]
    if not kits:
        raise (
            faults[0][1]
            if faults
            else NothingSelectedError("machines-too-small", skipped[-1].reason, hint=CAPACITY_HINT)
        )
    claimed = _claim(
        project,
        prepared.id,
        prepared.place.registry,
        [kit.node for kit in kits if prepared.options.asked.nodes_each == 1],
        prepared.options.limits,
        bench,
        progress,
        ask=CLAIMED not in prepared.options.asked.allow,
    )
    for note in (note for note in claimed.notes if note not in prepared.plan.notes):
        project.tell(f"note: {note}")
    for claim in {claim.order: claim for claim in claimed.lost.values()}.values():
        project.tell(f"note: skipping cells: {claim.reason}")
    lost = {kit.node.name: claimed.lost.get(cell_of(kit.node)) for kit in kits}
    skipped += [skipped_by_claim(other, kit.node) for kit in kits if (other := lost[kit.node.name])]
    kits = [kit for kit in kits if not lost[kit.node.name]]
    if not kits:
        raise NothingSelectedError(
            "cells-claimed", skipped[-1].reason, hint=f"to queue it anyway, pass --ignore-rule {CLAIMED}"
        )
    sweep = SweepSpec(
        id=prepared.id,
        created=prepared.place.now,
        level=prepared.options.level,
        site=prepared.options.site,
        nodes=tuple(kit.node for kit in kits),
        skipped=tuple(skipped),
        limits=prepared.options.limits,
        scheduler=prepared.options.pool,
        own=prepared.own,
        machines=capable_machines(prepared.inventory, [kit.node for kit in kits]),
        patterns=prepared.options.asked.machines,
        at_once=prepared.options.at_once,
        container=choose_container(project, prepared.options.pool),
        nodes_each=prepared.options.asked.nodes_each,
    )
    runs = {kit.node.nonce: replace(kit.run, pool=sweep.scheduler) for kit in kits}
    try:
        nonce_store(project).issue_all(runs, sweep.created)
        write_sweep_file(directory, sweep)
        if prepared.faults:
            write_file(directory / FAULT_FILES, format_machine_faults(prepared.faults))
        bench.pools(sweep.scheduler).write(directory, sweep, {kit.node.name: kit.texts for kit in kits})
    except BaseException:
        release_claim(project, sweep.id, (), bench.clock(), progress)
        raise
    notes = dict.fromkeys((*prepared.plan.notes, *claimed.notes))
    return SweepCreated(sweep=sweep, folder=directory, faults=tuple(faults), notes=tuple(notes))


def _claim(
    access: Access,
    sweep: str,
    registry: str,
    nodes: Iterable[SweepNode],
    limits: JobLimits,
    bench: SweepDependencies,
    progress: Progress,
    *,
    ask: bool,
) -> ClaimResult:
    """Claim the cells of nodes. With `ask`, cells that another store claimed are dropped."""
    if not (cells := frozenset(map(cell_of, nodes))):
        return ClaimResult()
    request = ClaimRequest(
        sweep=sweep,
        registry=registry,
        cells=cells,
        limits=limits,
        clock=bench.clock,
        random=bench.random,
        pause=bench.pause,
        ask=ask,
    )
    return claim_cells(access, request, progress)


def claim_again(
    access: Access, directory: Path, registry: str, bench: SweepDependencies, progress: Progress
) -> None:
    """Claim the remaining cells of a continued sweep, even if another store claimed them."""
    sweep = read_sweep(directory)
    pool, registry = bench.pools(sweep.scheduler), registry or access.settings.registry.value
    nodes = [
        node
        for node in sweep.nodes
        if sweep.nodes_each == 1 and _will_run(pool.read_node(directory, node, sweep.limits))
    ]
    result = _claim(access, sweep.id, registry, nodes, sweep.limits, bench, progress, ask=False)
    for note in result.notes:
        access.tell(f"note: {note}")


def capable_machines(
    inventory: Inventory, nodes: Sequence[SweepNode | QueuedCell]
) -> tuple[MachinesByCapability, ...]:
    """Return the machines of a pool by the rows of `nodes`, and by row and the driver that comes first.

    Several startds of one machine (`glidein_7@gpu01`) count as one machine, as in the logs of its jobs.
    """

    def names(row: str, driver: str) -> Iterator[str]:
        for machine in inventory.machines:
            if any(gpu.row == row and driver in ("", driver_of(gpu)) for gpu in machine.gpus):
                yield machine.name.rpartition("@")[2]

    rows = {(node.row, driver) for node in nodes for driver in ("", node.first)}
    return tuple(
        MachinesByCapability(capability=row, machines=tuple(dict.fromkeys(names(row, driver))), driver=driver)
        for row, driver in sorted(rows)
    )


def submit_sweep(directory: Path, pools: Pools) -> str:
    """Submit a sweep, or continue one whose DAG ended early. Return the job that drives the sweep.

    Raises UsageError for a directory that is not a sweep or has nothing to run, ToolError.
    """
    sweep, jobs = read_sweep(directory), read_submitted(directory)
    pool = pools(sweep.scheduler)
    if not any(_will_run(pool.read_node(directory, node, sweep.limits)) for node in sweep.nodes):
        raise UsageError(
            "sweep-finished",
            f"every node of {directory} has an outcome, and submitting it would run all nodes again",
            hint=f"run imagefactory sweep collect {directory}",
        )
    job = pool.submit(directory)
    write_document(directory / SUBMITTED, {"format": 1, "jobs": [*jobs, job]})
    return job


def _will_run(state: NodeState) -> bool:
    """Return whether a continued DAG still runs this node."""
    return state.run is None and will_still_run(state.result.outcome, settled=state.settled)


def read_submitted(directory: Path) -> tuple[str, ...]:
    """Return the jobs that have driven a sweep, the oldest first."""
    try:
        row = json.loads((directory / SUBMITTED).read_bytes())
        return tuple(job for job in row["jobs"] if isinstance(job, str) and JOB.fullmatch(job))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "sweep-file-invalid",
            f"{directory / SUBMITTED} is corrupt",
            hint=f"delete it (rm {directory / SUBMITTED}): it only lists the jobs of the sweep",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """The current status of a sweep. `driven` is true if a job drives it, None if the pool was not queried.

    `machines` are those on which jobs failed.
    """

    folder: Path
    sweep: SweepSpec
    results: tuple[NodeResult, ...]
    jobs: tuple[str, ...]
    driven: bool | None
    collected: tuple[CollectedNode, ...]
    machines: tuple[MachineFaults, ...] = ()

    @property
    def ended(self) -> int:
        return sum(result.outcome is not None for result in self.results)

    @property
    def complete(self) -> bool:
        return self.ended == len(self.results)

    @property
    def settled(self) -> bool:
        """Whether all nodes have an outcome that the pool does not retry."""
        open_ones = (*RETRIED_OUTCOMES, Outcome.NOT_TESTED)
        return self.complete and not (
            self.driven and any(result.outcome in open_ones for result in self.results)
        )


def read_status(directory: Path, pools: Pools, *, queue: bool = True) -> SweepStatus:
    """Return the status from the files of the jobs, with `queue` also from the pool.

    Raises UsageError, ToolError.
    """
    sweep = read_sweep(directory)
    pool = pools(sweep.scheduler)
    if queue:  # before the logs, which show jobs that end in between
        pool.look(directory)
    driven = pool.running(directory) if queue else None
    return SweepStatus(
        folder=directory,
        sweep=sweep,
        results=tuple(pool.read_result(directory, node, sweep.limits) for node in sweep.nodes),
        jobs=read_submitted(directory),
        driven=driven,
        collected=read_collected(directory),
        machines=read_failed_machines(directory, sweep),
    )


def find_sweeps(settings: Settings) -> tuple[Path, ...]:
    """Return the sweeps of this store, the oldest first."""
    return tuple(sorted(path.parent for path in sweeps_directory(settings).glob(f"*/{SWEEP}")))


def find_sweep(settings: Settings, name: str) -> Path:
    """Return the directory of a sweep by its id or path. Raises NothingSelectedError."""
    known = sweeps_directory(settings) / name
    if ID.fullmatch(name) and (known / SWEEP).is_file():
        return known
    if (Path(name) / SWEEP).is_file():
        return Path(name).absolute()
    ids = [path.name for path in find_sweeps(settings)]
    raise NothingSelectedError(
        "sweep-unknown",
        f"no sweep {name[:200]!r}",
        hint=f"use one of {', '.join(ids[-5:])}" if ids else "start one: imagefactory sweep start TARGET",
    )
