"""A nightly run: build, push and verify what is due, move tags, and sign the catalog.

    plan -> build --push -> verify, sweep collect --promote -> image promote -> verdict sync -> site publish
         -> image prune -> plan -> compare

Each step is an imagefactory command in a separate process. So a failure of one step, even a bug or a killed
process, does not end the others. `--json` reports the failure. The only state between steps is in registry,
store and sweeps. So a killed run is simply repeated: existing images are not built again, and running sweeps
are collected.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from imagefactory.access import open_answering, registry_place
from imagefactory.actions.plan import PlanLookup, inventory_devices, read_stages
from imagefactory.actions.read_catalog import cached_expiry
from imagefactory.actions.sweep import SweepStatus, find_sweeps, read_status
from imagefactory.actions.sweep_images import ImageDelivery, choose_image_type, read_pool_stages
from imagefactory.errors import (
    EXIT_CHECK,
    EXIT_NOTHING_SELECTED,
    EXIT_REGISTRY,
    EXIT_USAGE,
    ImagefactoryError,
    NoGpuError,
    RegistryError,
    ToolError,
    UsageError,
)
from imagefactory.extras.nightly.changes import (
    NightlyReport,
    NightlyRow,
    NightlySteps,
    SavedPlan,
    as_single_line,
    compare,
    oldest_drivers,
    save_plan,
    unbuilt,
)
from imagefactory.extras.nightly.nights import (
    BEFORE,
    NIGHTLY_FILE,
    SWEPT,
    NightlyDependencies,
    StepRunner,
    has_reserve,
    killed_before,
    nightly_directory,
    release_reserve,
    write_nightly,
    write_saved_plan,
)
from imagefactory.fs import no_space
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import capability_row
from imagefactory.lock.git import git_output
from imagefactory.matrix.plan import (
    CellState,
    PlanGpu,
    PlanInput,
    PlannedTarget,
    TargetStatus,
    VerificationPlan,
    make_plan,
    starts_by_kit,
)
from imagefactory.model import Outcome, Target
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.recipes.expand import select
from imagefactory.schedulers.cells import BUDGET, CLAIMED
from imagefactory.schedulers.inventory import write_inventory
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sweep_file import read_sweep
from imagefactory.schedulers.underway import state_of
from imagefactory.settings.load import Settings
from imagefactory.settings.own_commands import parse_machines
from imagefactory.trust.catalog import SOON
from imagefactory.trust.claims import VerdictAges
from imagefactory.verify.nonces import LIFETIME

# --- The sweeps of the store: wait for them, and collect their results as they arrive


POLL = 30.0
"""Seconds between two checks of the sweeps."""
BETWEEN = 20
"""The number of checks between two collections: ten minutes."""
_SLOT_SUFFIX = re.compile(r"\bslot[0-9_]+@|(?<=\bdir)_[0-9]+\b")
"""Parts of a reason that differ between jobs with the same cause."""
QUEUE_WAIT_SECONDS = 40
"""The limit of checks in a row without an answer. An access point needs minutes to restart."""


def collect_sweeps(settings: Settings, wait: timedelta, steps: StepRunner) -> None:
    """Collect the sweeps of a store, including those of earlier runs, until the pool has no job of them.

    After `wait`, the next run collects the rest.
    """
    dependencies = steps.dependencies
    directories = [directory for directory in find_sweeps(settings) if _is_open(directory, steps)]
    until, looks, failed = dependencies.clock() + wait, 0, 0
    with steps.progress.stage(f"waiting for the pool, until {until:%H:%M} UTC at the latest"):
        while True:
            try:
                jobs, failed = (
                    sum(_at_work(read_status(directory, dependencies.pools)) for directory in directories),
                    0,
                )
            except ToolError as error:
                jobs, failed = 0, failed + 1
                if failed > QUEUE_WAIT_SECONDS:
                    steps.fail("pool", error)
                    break
            if not failed and (not jobs or dependencies.clock() >= until):
                break
            looks += 1
            if looks % BETWEEN == 0:
                _take(directories, steps)
            dependencies.pause(max(0.0, min(POLL, (until - dependencies.clock()).total_seconds())))
    _take(directories, steps)
    if jobs:
        are = "job is" if jobs == 1 else "jobs are"
        steps.notes.append(f"{jobs} {are} still on the pool: the next nightly run collects their results")


def _is_open(directory: Path, steps: StepRunner) -> bool:
    """Return whether results of a sweep can still be signed. An unreadable sweep is reported and skipped."""
    try:
        started = read_sweep(directory).created
        read_status(directory, steps.dependencies.pools, queue=False)
    except ImagefactoryError as error:
        steps.fail(f"sweep {directory.name}", error)
        return False
    return started + LIFETIME > steps.dependencies.clock()


def _at_work(status: SweepStatus) -> int:
    """Return the number of unfinished jobs of a sweep."""
    return len(status.results) - status.ended if status.driven and not status.settled else 0


def _take(directories: Sequence[Path], steps: StepRunner) -> None:
    """Collect the sweeps with new results, and report their cells that are not verified."""
    for directory in directories:
        with steps.reporting_errors(f"sweep {directory.name}"):
            status = read_status(directory, steps.dependencies.pools, queue=False)
            if not has_news(status):
                continue
            known = {row.result.node for row in status.collected if row.result.outcome}
            fresh = {(node.target, node.capability) for node in status.sweep.nodes if node.name not in known}
            words = ("sweep", "collect", "--promote", str(directory))
            # An error of the directory itself only sums up the cells that are reported here.
            _, document = steps.do(f"sweep {directory.name}", *words, expected=EXIT_CHECK, of=str(directory))
            steps.tell(*(row for row in _unverified_cells(document) if (row.what, row.on) in fresh))


def has_news(status: SweepStatus) -> bool:
    """Return whether `sweep collect` would change anything. Pure."""
    known = {row.result.node: row for row in status.collected}
    for result in status.results:
        row = known.get(result.node)
        if result.outcome is None or (row and row.attached):
            continue
        if row is None or row.result.outcome is None or state_of(result.outcome, row):
            return True
    return False


def _unverified_cells(document: Mapping[str, Any]) -> Iterator[NightlyRow]:
    """Yield the finished cells that are not verified, from the JSON of `sweep collect`."""
    for row in document.get("results", ()):
        if row.get("outcome") not in (None, Outcome.VERIFIED):
            machine = str(row.get("machine") or "")
            reason = _SLOT_SUFFIX.sub("", str(row["reason"]))
            cause = as_single_line(
                f"{row['outcome']}: {reason.replace(machine, 'its machine') if machine else reason}"
            )
            yield NightlyRow(
                what=row["target"],
                on=row["capability"],
                reason=cause,
                hint=f"its logs: {row['kit']}",
                exit_code=EXIT_CHECK,
                machines=(machine,) if machine else (),
            )


EXPIRY = "catalog expiry"
NIGHTLY_DIRECTORY = "nights"
"""The subject of an error if the run cannot be stored."""
HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyRequest:
    """A request: the targets (empty: all), the pool (empty: the GPU of this machine), and how long to wait.

    `html` is the directory of the site, None for no site.
    """

    names: tuple[str, ...] = ()
    pool: str = ""
    wait: timedelta = 6 * HOUR
    html: Path | None = None


def run_nightly(
    project: Project,
    request: NightlyRequest,
    dependencies: NightlyDependencies,
    directory: Path,
    progress: Progress,
) -> NightlyReport:
    """Run all steps, and store the report in `directory`. Raises UsageError only if no registry is set."""
    if not project.settings.registry.value:
        raise UsageError(
            "no-registry-set",
            "a nightly run pushes and publishes, but no registry is set",
            hint='set registry = "HOST/PATH" in imagefactory.toml',
        )
    targets = select(project.targets, request.names)
    steps = StepRunner(dependencies=dependencies, progress=progress, faults=tuple(map(str, project.faults)))
    return _NightlyRun(project=project, request=request, folder=directory, targets=targets, steps=steps).run()


def nightly_since(project: Project, before: SavedPlan, steps: NightlySteps) -> NightlyReport:
    """Return the changes since a plan, by any process. Raises RegistryError and NothingSelectedError."""
    targets = project.select(before.names)
    stages = read_stages(project, targets, PlanLookup(now=steps.ended, registry=before.registry))
    plan = make_plan(PlanInput(stages=stages, devices=before.devices, on_machines=True))
    after = save_plan(plan, replace(before, created=steps.ended, targets=()))
    return compare(before, after, replace(steps, failures=(*steps.failures, *unbuilt(before, after))))


def last_commit(root: Path) -> datetime | None:
    """Return the time of the last commit in the repository of a project, None without one."""
    # In CI another user may have checked it out.
    printed = git_output(root, "log", "-1", "--format=%ct", options=("-c", "safe.directory=*"))
    text = printed.decode("ascii", "replace").strip()
    return datetime.fromtimestamp(int(text), UTC) if text.isdecimal() else None


@dataclass(kw_only=True)
class _NightlyRun:
    project: Project
    request: NightlyRequest
    folder: Path
    targets: tuple[Target, ...]
    steps: StepRunner
    ages: VerdictAges | None = None

    def run(self) -> NightlyReport:
        started, killed = self.steps.dependencies.clock(), killed_before(self.project.settings)
        for fault in self.project.faults:
            reason = str(replace(fault, location=""))
            self.steps.tell(
                NightlyRow(
                    what=as_single_line(fault.location), reason=as_single_line(reason), exit_code=EXIT_USAGE
                )
            )
        if not has_reserve(self.project.settings):
            self.steps.fail(NIGHTLY_DIRECTORY, no_space(nightly_directory(self.project.settings)))
        devices = self._devices()
        before: SavedPlan | None = None
        with self.steps.reporting_errors("plan"):
            plan = self._plan(devices)
            before = killed or save_plan(plan, self._request(devices))
            with self.steps.reporting_errors(NIGHTLY_DIRECTORY):
                write_saved_plan(self.folder / BEFORE, before)
            built = self._build(plan)
            self._verify(plan, built, on_gpus=bool(devices))
        if self.request.pool:
            with self.steps.reporting_errors("collect"):
                collect_sweeps(self.project.settings, self.request.wait, self.steps)
        release_reserve(self.project.settings)
        lost = any((row.what, row.exit_code) == ("plan", EXIT_REGISTRY) for row in self.steps.failures)
        away = lost and self._is_away()
        if not away:
            promotable = [target.name for target in self.targets]
            _, document = self.steps.do("tags", "image", "promote", *promotable, expected=EXIT_CHECK)
            self.steps.notes += waiting_tags(document)
            self.steps.do("reconcile", "verdict", "sync")
        _, catalog = self.steps.do("catalog", "site", "publish")
        self.ages = _ages_in(catalog.get("verdict_ages"))
        self._warn_of_expiry()
        self.steps.do("store", "image", "prune")
        after = before
        with self.steps.reporting_errors("plan"):
            after = after if away else save_plan(self._plan(devices), self._request(devices))
        report = self._report(started, before, after)
        if self.request.html:
            failures_before = len(self.steps.failures)
            self.steps.do("report", "report", "-o", str(self.request.html), "--registry", self._registry)
            if len(self.steps.failures) > failures_before:
                report = self._report(started, before, after)
        return report

    def _is_away(self) -> bool:
        """Return whether the registry is still unreachable. Then steps that need it are skipped."""
        host, _ = registry_place(self.project)
        try:
            open_answering(self.project, host, hurried=True)
        except RegistryError:
            self.steps.notes.append(f"{host} does not answer: the next nightly run moves the tags")
            return True
        return False

    def _report(self, started: datetime, before: SavedPlan | None, after: SavedPlan | None) -> NightlyReport:
        report = self._compare(started, before, after)
        try:
            write_nightly(self.folder / NIGHTLY_FILE, report)
        except (ImagefactoryError, OSError) as error:
            self.steps.fail(NIGHTLY_DIRECTORY, error)
            report = self._compare(started, before, after)
        return report

    def _warn_of_expiry(self) -> None:
        """Report that the last signed catalog expires soon if this run could not sign a new one."""
        expires = cached_expiry(self.project.settings)
        if expires and expires - self.steps.dependencies.clock() < SOON:
            reason = f"the signed catalog expires on {expires:%Y-%m-%d %H:%M} UTC, and readers reject it then"
            self.steps.tell(
                NightlyRow(
                    what=EXPIRY, reason=reason, hint="run imagefactory site publish", exit_code=EXIT_CHECK
                )
            )

    def _compare(self, started: datetime, before: SavedPlan | None, after: SavedPlan | None) -> NightlyReport:
        empty = self._request(())
        steps = NightlySteps(
            directory=str(self.folder),
            started=started,
            ended=self.steps.dependencies.clock(),
            place=self._registry,
            failures=tuple(self.steps.failures),
            notes=tuple(self.steps.notes),
            ages=self.ages,
        )
        return compare(before or empty, after or before or empty, steps)

    def _request(self, devices: tuple[PlanGpu, ...]) -> SavedPlan:
        return SavedPlan(
            created=self.steps.dependencies.clock(),
            registry=self._registry,
            names=self.request.names,
            devices=devices,
        )

    # --- what is due -----------------------------------------------------------------------------

    @property
    def _registry(self) -> str:
        return self.project.settings.registry.value

    def _devices(self) -> tuple[PlanGpu, ...]:
        """Return the GPUs to verify on: every type in the pool except MIG slices, or the first GPU of this
        machine.

        Without a GPU, images are only built.
        """
        if self.request.pool:
            kinds: tuple[PlanGpu, ...] = ()
            with self.steps.reporting_errors("pool"):
                inventory = self.steps.dependencies.pools(self.request.pool).inventory(
                    self.steps.dependencies.clock()
                )
                write_inventory(self._inventory, inventory)
                patterns = parse_machines(self.project.settings.sweep_machines.value)
                listed, avoided = inventory_devices(inventory, patterns)
                kinds = tuple(device for device in listed if device not in avoided and not device.part)
                remaining = {(kind.capability, kind.part) for kind in kinds}
                self.steps.notes += [
                    as_single_line(f"nothing is verified on {kind}: {reason}")
                    for kind, reason in avoided.items()
                    if (kind.capability, kind.part) not in remaining and not kind.part
                ]
            return kinds
        try:
            hardware = self.steps.dependencies.evidence.read()
        except NoGpuError as error:
            self.steps.notes.append(as_single_line(f"nothing is verified: {error.message}"))
            return ()
        gpu = hardware.gpus[0]
        capability = parse_capability(gpu.capability)
        driver = "" if capability.processor else hardware.driver
        return (PlanGpu(capability=capability, name=gpu.name, driver=driver),)

    @property
    def _inventory(self) -> Path:
        return self.folder / "inventory.json"

    def _plan(self, devices: tuple[PlanGpu, ...]) -> VerificationPlan:
        """Return the plan for the registry. If jobs run .sif files, the verdicts are those in the store."""
        now = self.steps.dependencies.clock()
        with self.steps.progress.stage("plan"):
            stages = read_stages(self.project, self.targets, PlanLookup(now=now, registry=self._registry))
            kind = (
                choose_image_type(self.project, "", self._registry, self.request.pool)
                if self.request.pool
                else ImageKind.DOCKER
            )
            if kind is not ImageKind.DOCKER:
                delivery = ImageDelivery(kind=kind, registry=self._registry, folder=self.folder, now=now)
                here = read_pool_stages(self.project, self.targets, delivery)
                stages = tuple(map(_merge_ages, stages, here))
        return oldest_drivers(make_plan(PlanInput(stages=stages, devices=devices, on_machines=True)))

    # --- steps -----------------------------------------------------------------------------------

    def _build(self, plan: VerificationPlan) -> frozenset[str]:
        """Build and push what is due, each in a separate process. Return the names of built targets."""
        due = [row.target.name for row in plan.targets if row.state is CellState.BUILD]
        return frozenset(name for name in due if self.steps.do(name, "build", "--push", name)[0] == 0)

    def _verify(self, plan: VerificationPlan, built: frozenset[str], *, on_gpus: bool) -> None:
        ready = [row for row in plan.targets if on_gpus and _is_due(row, built)]
        if self.request.pool:  # which starts kits
            ready = [row for row in ready if starts_by_kit(row.target)]
        if not ready:
            return
        if self.request.pool:
            names = [row.target.name for row in ready]
            words = ("--scheduler", self.request.pool, "--inventory", str(self._inventory), *names)
            code, document = self.steps.do("sweep", "sweep", "start", *words, expected=EXIT_NOTHING_SELECTED)
            notes = document.get("notes")
            self.steps.notes += [as_single_line(str(row)) for row in notes] if isinstance(notes, list) else []
            self.steps.notes += _not_queued(code, document)
            if isinstance(document.get("directory"), str):
                (self.folder / SWEPT).write_text(document["directory"] + "\n", "utf-8")
            return
        for row in ready:
            name = row.target.name
            image = name if name in built else f"{name}@{row.image}"
            self.steps.do(name, "verify", "--registry", self._registry, "--promote", image)


def _not_queued(code: int, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield why due cells were not queued: another store claimed them, or they exceed the budget."""
    rows = document.get("errors" if code == EXIT_NOTHING_SELECTED else "skipped", ())
    if code == EXIT_NOTHING_SELECTED:
        yield from (as_single_line(str(row.get("message", ""))) for row in rows)
        return
    reasons = Counter(str(row.get("reason")) for row in rows if row.get("rule") == CLAIMED)
    yield from (as_single_line(f"cells skipped, {count}: {reason}") for reason, count in reasons.items())
    over = [row for row in rows if row.get("rule") == BUDGET]
    if over:
        cells = ", ".join(
            f"{row.get('target')} on {capability_row(row.get('capability'), str(row.get('part', '')))}"
            for row in over
        )
        waits = "cells are over the budget and wait" if len(over) > 1 else "cell is over the budget and waits"
        yield as_single_line(f"{len(over)} {waits} for another nightly run: {cells}")


def waiting_tags(document: Mapping[str, object]) -> list[str]:
    """Return the tags that lack approvals, from the JSON of `image promote`. A run approves at most once."""
    results = document.get("results")
    rows = [row for row in results if isinstance(row, dict)] if isinstance(results, list) else []
    return [
        as_single_line(f"{row.get('target')}: {tag.get('tag')} waits for {tag.get('missing')} more approvals")
        for row in rows
        for tag in row.get("tags", ())
        if isinstance(tag, dict) and tag.get("missing")
    ]


def _ages_in(proofs: object) -> VerdictAges | None:
    """Return the ages of verdicts from the JSON of `site publish`, None without them."""
    if not isinstance(proofs, dict) or not isinstance(proofs.get("expiring"), int):
        return None
    oldest = proofs.get("oldest")
    try:
        issued = datetime.fromisoformat(oldest) if oldest else None
    except (TypeError, ValueError):
        return None
    return VerdictAges(oldest=issued, expiring=proofs["expiring"])


def _merge_ages(there: TargetStatus, here: TargetStatus) -> TargetStatus:
    """Merge the stages of a target whose .sif runs: both must be complete, and the verdicts of the .sif
    count.
    """
    return replace(
        there,
        block=there.block or here.block,
        missing=there.missing or here.missing,
        verdicts=here.verdicts,
    )


def _is_due(planned: PlannedTarget, built: frozenset[str]) -> bool:
    if planned.target.name not in built and planned.state is not CellState.VERIFY:
        return False
    return any(cell.state in (CellState.BUILD, CellState.VERIFY) for cell in planned.cells)
