"""A night: what is due is built, pushed and verified, tags follow, and the catalogue is signed anew.

    plan -> build --push -> verify, collect --promote -> image promote -> verdict sync -> catalogue -> image
    prune
         -> plan -> compare

Each step is this program's own command, in a process of its own, as a person would type it: what one of them
meets, a bug or a killed process too, is told and ends no other. `--json` says what went wrong. Nothing is
remembered between steps but what registry, store and sweeps hold, so a night that was killed is simply run
again: images that are there are not built, sweeps that are underway are waited for and collected.
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
from imagefactory.gpu.values import row_of
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

# --- What a night does about the sweeps of its store: waits for them, and collects what comes while it
# comes


POLL = 30.0
"""Seconds between two looks at the sweeps that are waited for."""
BETWEEN = 20
"""Looks between two collections of what has come so far: ten minutes."""
_SLOT_SUFFIX = re.compile(r"\bslot[0-9_]+@|(?<=\bdir)_[0-9]+\b")
"""What of a reason differs from job to job, though its cause is one."""
QUEUE_WAIT_SECONDS = 40
"""How many looks in a row the pool may not answer: an access point takes minutes to start again."""


def collect_sweeps(settings: Settings, wait: timedelta, steps: StepRunner) -> None:
    """Collects the sweeps of a store, those of earlier nights too, until nothing on the pool works on them.

    After `wait` the next night goes on with them.
    """
    bench = steps.bench
    folders = [folder for folder in find_sweeps(settings) if _is_open(folder, steps)]
    until, looks, failed = bench.clock() + wait, 0, 0
    with steps.progress.stage(f"waiting for the pool, until {until:%H:%M} UTC at the latest"):
        while True:
            try:
                jobs, failed = sum(_at_work(read_status(one, bench.pools)) for one in folders), 0
            except ToolError as error:
                jobs, failed = 0, failed + 1
                if failed > QUEUE_WAIT_SECONDS:
                    steps.fail("pool", error)
                    break
            if not failed and (not jobs or bench.clock() >= until):
                break
            looks += 1
            if looks % BETWEEN == 0:
                _take(folders, steps)
            bench.pause(max(0.0, min(POLL, (until - bench.clock()).total_seconds())))
    _take(folders, steps)
    if jobs:
        are = "job is" if jobs == 1 else "jobs are"
        steps.notes.append(f"{jobs} {are} still on the pool: the next nightly run collects their results")


def _is_open(folder: Path, steps: StepRunner) -> bool:
    """Whether what comes of it can still be signed. One that cannot be read is told, and left alone."""
    try:
        made = read_sweep(folder).made
        read_status(folder, steps.bench.pools, queue=False)
    except ImagefactoryError as error:
        steps.fail(f"sweep {folder.name}", error)
        return False
    return made + LIFETIME > steps.bench.clock()


def _at_work(status: SweepStatus) -> int:
    """The jobs of a sweep that are not done."""
    return len(status.results) - status.ended if status.driven and not status.settled else 0


def _take(folders: Sequence[Path], steps: StepRunner) -> None:
    """Collects the sweeps that have news, and tells what of them is not verified."""
    for folder in folders:
        with steps.telling(f"sweep {folder.name}"):
            status = read_status(folder, steps.bench.pools, queue=False)
            if not has_news(status):
                continue
            known = {one.result.node for one in status.collected if one.result.outcome}
            fresh = {(node.target, node.capability) for node in status.sweep.nodes if node.name not in known}
            words = ("sweep", "collect", "--promote", str(folder))
            # Of the folder itself it only counts what is told here one by one.
            _, told = steps.do(f"sweep {folder.name}", *words, expected=EXIT_CHECK, of=str(folder))
            steps.tell(*(row for row in _unproven(told) if (row.what, row.on) in fresh))


def has_news(status: SweepStatus) -> bool:
    """Whether `sweep collect` has anything to do for a sweep. Pure."""
    known = {one.result.node: one for one in status.collected}
    for result in status.results:
        one = known.get(result.node)
        if result.outcome is None or (one and one.attached):
            continue
        if one is None or one.result.outcome is None or state_of(result.outcome, one):
            return True
    return False


def _unproven(told: Mapping[str, Any]) -> Iterator[NightlyRow]:
    """What of a sweep has ended and is not verified, of the JSON of `sweep collect`."""
    for row in told.get("results", ()):
        if row.get("outcome") not in (None, Outcome.VERIFIED):
            machine = str(row.get("machine") or "")
            reason = _SLOT_SUFFIX.sub("", str(row["reason"]))
            why = as_single_line(
                f"{row['outcome']}: {reason.replace(machine, 'its machine') if machine else reason}"
            )
            yield NightlyRow(
                what=row["target"],
                on=row["capability"],
                why=why,
                hint=f"its logs: {row['kit']}",
                code=EXIT_CHECK,
                machines=(machine,) if machine else (),
            )


EXPIRY = "catalog expiry"
NIGHTLY_DIRECTORY = "nights"
"""What a failure is about where a night cannot be kept."""
HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyRequest:
    """The targets to care for (none: all), the pool (empty: this machine's GPU), and how long it is waited
    for. `html` is where the site is written, None for nowhere."""

    names: tuple[str, ...] = ()
    pool: str = ""
    wait: timedelta = 6 * HOUR
    html: Path | None = None


def run_nightly(
    factory: Project, ask: NightlyRequest, bench: NightlyDependencies, folder: Path, progress: Progress
) -> NightlyReport:
    """All of a night, kept in `folder`. Raises UsageError where no registry is set; what fails is told."""
    if not factory.settings.registry.value:
        raise UsageError(
            "no-registry-set",
            "a nightly run pushes and publishes, but no registry is set",
            hint='set registry = "HOST/PATH" in imagefactory.toml',
        )
    targets = select(factory.targets, ask.names)
    steps = StepRunner(bench=bench, progress=progress, faults=tuple(map(str, factory.faults)))
    return _NightlyRun(factory=factory, ask=ask, folder=folder, targets=targets, steps=steps).run()


def nightly_since(factory: Project, before: SavedPlan, told: NightlySteps) -> NightlyReport:
    """What changed since a plan, whoever did it. Raises RegistryError, and NothingSelectedError."""
    targets = select(factory.targets, before.names)
    stages = read_stages(factory, targets, PlanLookup(now=told.ended, registry=before.registry))
    plan = make_plan(PlanInput(stages=stages, devices=before.devices, on_machines=True))
    after = save_plan(plan, replace(before, made=told.ended, targets=()))
    return compare(before, after, replace(told, failures=(*told.failures, *unbuilt(before, after))))


def last_commit(root: Path) -> datetime | None:
    """When a factory's repository last changed; None where git tells of none."""
    # The runner of CI that checked it out is not who asks.
    printed = git_output(root, "log", "-1", "--format=%ct", options=("-c", "safe.directory=*"))
    text = printed.decode("ascii", "replace").strip()
    return datetime.fromtimestamp(int(text), UTC) if text.isdecimal() else None


@dataclass(kw_only=True)
class _NightlyRun:
    factory: Project
    ask: NightlyRequest
    folder: Path
    targets: tuple[Target, ...]
    steps: StepRunner
    ages: VerdictAges | None = None

    def run(self) -> NightlyReport:
        started, killed = self.steps.bench.clock(), killed_before(self.factory.settings)
        for fault in self.factory.faults:
            why = str(replace(fault, location=""))
            self.steps.tell(
                NightlyRow(what=as_single_line(fault.location), why=as_single_line(why), code=EXIT_USAGE)
            )
        if not has_reserve(self.factory.settings):
            self.steps.fail(NIGHTLY_DIRECTORY, no_space(nightly_directory(self.factory.settings)))
        devices = self._devices()
        before: SavedPlan | None = None
        with self.steps.telling("plan"):
            plan = self._plan(devices)
            before = killed or save_plan(plan, self._asked(devices))
            with self.steps.telling(NIGHTLY_DIRECTORY):
                write_saved_plan(self.folder / BEFORE, before)
            built = self._build(plan)
            self._verify(plan, built, on_gpus=bool(devices))
        if self.ask.pool:
            with self.steps.telling("collect"):
                collect_sweeps(self.factory.settings, self.ask.wait, self.steps)
        release_reserve(self.factory.settings)
        lost = any((row.what, row.code) == ("plan", EXIT_REGISTRY) for row in self.steps.failures)
        away = lost and self._is_away()
        if not away:
            promotable = [one.name for one in self.targets]
            _, said = self.steps.do("tags", "image", "promote", *promotable, expected=EXIT_CHECK)
            self.steps.notes += waiting_tags(said)
            self.steps.do("reconcile", "verdict", "sync")
        _, catalogue = self.steps.do("catalogue", "site", "publish")
        self.ages = _ages_in(catalogue.get("proofs"))
        self._warn_of_expiry()
        self.steps.do("store", "image", "prune")
        after = before
        with self.steps.telling("plan"):
            after = after if away else save_plan(self._plan(devices), self._asked(devices))
        report = self._report(started, before, after)
        if self.ask.html:
            done = len(self.steps.failures)
            self.steps.do("report", "report", "-o", str(self.ask.html), "--registry", self._registry)
            if len(self.steps.failures) > done:
                report = self._report(started, before, after)
        return report

    def _is_away(self) -> bool:
        """Whether the registry still does not answer. Then each step would wait in vain and report the same;
        the catalog is tried all the same."""
        host, _ = registry_place(self.factory)
        try:
            open_answering(self.factory, host, hurried=True)
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
        """Nights that cannot sign are told until the last signed catalog expires: from a week before, of its
        own."""
        expires = cached_expiry(self.factory.settings)
        if expires and expires - self.steps.bench.clock() < SOON:
            why = f"the signed catalog expires on {expires:%Y-%m-%d %H:%M} UTC, and readers reject it then"
            self.steps.tell(
                NightlyRow(what=EXPIRY, why=why, hint="imagefactory site publish", code=EXIT_CHECK)
            )

    def _compare(self, started: datetime, before: SavedPlan | None, after: SavedPlan | None) -> NightlyReport:
        empty = self._asked(())
        told = NightlySteps(
            started=started,
            ended=self.steps.bench.clock(),
            place=self._registry,
            failures=tuple(self.steps.failures),
            notes=tuple(self.steps.notes),
            ages=self.ages,
        )
        return compare(before or empty, after or before or empty, told)

    def _asked(self, devices: tuple[PlanGpu, ...]) -> SavedPlan:
        return SavedPlan(
            made=self.steps.bench.clock(), registry=self._registry, names=self.ask.names, devices=devices
        )

    # --- what is due -----------------------------------------------------------------------------

    @property
    def _registry(self) -> str:
        return self.factory.settings.registry.value

    def _devices(self) -> tuple[PlanGpu, ...]:
        """The GPUs to verify on: of the pool every kind but slices (MIG), which its sweeps take on request
        alone; else the first of this machine. None where there are none: then images are built alone."""
        if self.ask.pool:
            kinds: tuple[PlanGpu, ...] = ()
            with self.steps.telling("pool"):
                inventory = self.steps.bench.pools(self.ask.pool).inventory(self.steps.bench.clock())
                write_inventory(self._inventory, inventory)
                patterns = parse_machines(self.factory.settings.sweep_machines.value)
                listed, avoided = inventory_devices(inventory, patterns)
                kinds = tuple(one for one in listed if one not in avoided and not one.part)
                left = {(kind.capability, kind.part) for kind in kinds}
                self.steps.notes += [
                    as_single_line(f"nothing is verified on {kind}: {reason}")
                    for kind, reason in avoided.items()
                    if (kind.capability, kind.part) not in left and not kind.part
                ]
            return kinds
        try:
            hardware = self.steps.bench.evidence.read()
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
        """Against the registry; where jobs run .sif files, also the store, whose verdicts are theirs."""
        now = self.steps.bench.clock()
        with self.steps.progress.stage("plan"):
            stages = read_stages(self.factory, self.targets, PlanLookup(now=now, registry=self._registry))
            kind = choose_image_type(self.factory, "", self._registry) if self.ask.pool else ImageKind.DOCKER
            if kind is not ImageKind.DOCKER:
                place = ImageDelivery(kind=kind, registry=self._registry, folder=self.folder, now=now)
                here = read_pool_stages(self.factory, self.targets, place)
                stages = tuple(map(_merge_ages, stages, here))
        return oldest_drivers(make_plan(PlanInput(stages=stages, devices=devices, on_machines=True)))

    # --- steps -----------------------------------------------------------------------------------

    def _build(self, plan: VerificationPlan) -> frozenset[str]:
        """Builds and pushes what is due, each in a process of its own. The names of what came to be."""
        due = [one.target.name for one in plan.targets if one.state is CellState.BUILD]
        return frozenset(name for name in due if self.steps.do(name, "build", "--push", name)[0] == 0)

    def _verify(self, plan: VerificationPlan, built: frozenset[str], *, on_gpus: bool) -> None:
        ready = [one for one in plan.targets if on_gpus and _is_due(one, built)]
        if self.ask.pool:  # which starts kits
            ready = [one for one in ready if starts_by_kit(one.target)]
        if not ready:
            return
        if self.ask.pool:
            names = [one.target.name for one in ready]
            words = ("--scheduler", self.ask.pool, "--inventory", str(self._inventory), *names)
            code, told = self.steps.do("sweep", "sweep", "start", *words, expected=EXIT_NOTHING_SELECTED)
            notes = told.get("notes")
            self.steps.notes += [as_single_line(str(one)) for one in notes] if isinstance(notes, list) else []
            self.steps.notes += _not_queued(code, told)
            if isinstance(told.get("folder"), str):
                (self.folder / SWEPT).write_text(told["folder"] + "\n", "utf-8")
            return
        for one in ready:
            name = one.target.name
            image = name if name in built else f"{name}@{one.image}"
            self.steps.do(name, "verify", "--registry", self._registry, "--promote", image)


def _not_queued(code: int, told: Mapping[str, Any]) -> Iterator[str]:
    """Why cells that are due were not queued, though nothing is wrong: another store has them, or they are
    over the budget.
    """
    rows = told.get("errors" if code == EXIT_NOTHING_SELECTED else "left_out", ())
    if code == EXIT_NOTHING_SELECTED:
        yield from (as_single_line(str(row.get("message", ""))) for row in rows)
        return
    reasons = Counter(str(row.get("reason")) for row in rows if row.get("rule") == CLAIMED)
    yield from (as_single_line(f"cells left out, {count}: {reason}") for reason, count in reasons.items())
    over = [row for row in rows if row.get("rule") == BUDGET]
    if over:
        cells = ", ".join(
            f"{row.get('target')} on {row_of(row.get('capability'), str(row.get('part', '')))}"
            for row in over
        )
        waits = "cells are over the budget and wait" if len(over) > 1 else "cell is over the budget and waits"
        yield as_single_line(f"{len(over)} {waits} for another nightly run: {cells}")


def waiting_tags(said: Mapping[str, object]) -> list[str]:
    """What the JSON of `image promote` says of tags that lack approvals: a night gives one at most."""
    results = said.get("results")
    rows = [one for one in results if isinstance(one, dict)] if isinstance(results, list) else []
    return [
        as_single_line(f"{row.get('target')}: {tag.get('tag')} waits for {tag.get('missing')} more approvals")
        for row in rows
        for tag in row.get("tags", ())
        if isinstance(tag, dict) and tag.get("missing")
    ]


def _ages_in(proofs: object) -> VerdictAges | None:
    """What the catalog's own command says of the age of its verdicts, in its JSON."""
    if not isinstance(proofs, dict) or not isinstance(proofs.get("lapsing"), int):
        return None
    oldest = proofs.get("oldest")
    try:
        made = datetime.fromisoformat(oldest) if oldest else None
    except (TypeError, ValueError):
        return None
    return VerdictAges(oldest=made, lapsing=proofs["lapsing"])


def _merge_ages(there: TargetStatus, here: TargetStatus) -> TargetStatus:
    """Of a target whose .sif is what runs: what either lacks is to be made, and the .sif's verdicts count."""
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
