"""A night: what is due is built, pushed and verified, tags follow, and the catalogue is signed anew.

    plan -> build --push -> verify, collect --promote -> promote -> reconcile -> catalogue -> store gc
         -> plan -> compare

Each step is this program's own command, in a process of its own, as a person would type it: what one of them
meets, a bug or a killed process too, is told and ends no other. `--json` says what went wrong. Nothing is
remembered between steps but what registry, store and sweeps hold, so a night that was killed is simply run
again: images that are there are not built, sweeps that are underway are waited for and collected.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from imagefactory.errors import (
    EXIT_BUILD,
    EXIT_CHECK,
    EXIT_NOTHING_SELECTED,
    EXIT_USAGE,
    FactoryError,
    NoGpuError,
    ToolError,
    UsageError,
)
from imagefactory.factory import Factory
from imagefactory.gpu.capability import parse_capability
from imagefactory.matrix.changes import (
    KeptPlan,
    NightReport,
    NightRow,
    NightTold,
    compare,
    keep_plan,
    one_line,
    unbuilt,
)
from imagefactory.matrix.night import starts_by_kit
from imagefactory.matrix.plan import (
    CellState,
    Plan,
    PlanGpu,
    PlanInput,
    PlannedTarget,
    TargetStatus,
    make_plan,
)
from imagefactory.model import Outcome, Target
from imagefactory.pools.inventory import write_inventory
from imagefactory.pools.model import ImageKind, Pools
from imagefactory.progress import Progress
from imagefactory.recipes.expand import select
from imagefactory.stages.nights import BEFORE, NIGHT, SWEPT, killed_before, write_kept_plan, write_night
from imagefactory.stages.plan import Asking, inventory_devices, read_stages
from imagefactory.stages.sweep import SweepStatus, find_sweeps, read_status
from imagefactory.stages.sweep_images import ImagePlace, choose_kind, read_pool_stages
from imagefactory.sweeps.sweep_file import read_sweep
from imagefactory.sweeps.underway import state_of
from imagefactory.verify.model import Evidence
from imagefactory.verify.nonces import LIFETIME

POLL = 30.0
"""Seconds between two looks at the sweeps that are waited for."""
PATIENCE = 40
"""How many looks in a row the pool may not answer: an access point takes minutes to start again."""
HOUR = timedelta(hours=1)


class Command(Protocol):
    """Runs this program with `words`, tells the log, and gives its exit code and what it printed."""

    def __call__(self, words: Sequence[str]) -> tuple[int, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NightAsk:
    """The targets to care for (none: all), the pool (empty: this machine's GPU), and how long it is waited
    for. `html` is where the site is written, None for nowhere."""

    names: tuple[str, ...] = ()
    pool: str = ""
    wait: timedelta = 12 * HOUR
    html: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NightBench:
    """What a night takes from this process."""

    clock: Callable[[], datetime]
    pause: Callable[[float], None]
    pools: Pools
    evidence: Evidence
    run: Command


def run_night(
    factory: Factory, ask: NightAsk, bench: NightBench, folder: Path, progress: Progress
) -> NightReport:
    """All of a night, kept in `folder`. Raises UsageError where no registry is set; what fails is told."""
    if not factory.settings.registry.value:
        raise UsageError(
            "a night pushes and publishes, and no registry is set",
            hint='write registry = "HOST/PATH" into imagefactory.toml',
        )
    targets = select(factory.targets, ask.names)
    night = _Night(factory=factory, ask=ask, bench=bench, folder=folder, progress=progress, targets=targets)
    return night.run()


def night_since(factory: Factory, before: KeptPlan, told: NightTold) -> NightReport:
    """What changed since a plan, whoever did it. Raises RegistryError, and NothingSelectedError."""
    targets = select(factory.targets, before.names)
    stages = read_stages(factory, targets, Asking(now=told.ended, registry=before.registry))
    plan = make_plan(PlanInput(stages=stages, devices=before.devices, on_machines=True))
    after = keep_plan(plan, replace(before, made=told.ended, targets=()))
    return compare(before, after, replace(told, failures=(*told.failures, *unbuilt(before, after))))


def last_commit(root: Path) -> datetime | None:
    """When a factory's repository last changed; None where git tells of none."""
    # The runner of CI that checked it out is not who asks.
    command = ("git", "-c", "safe.directory=*", "-C", str(root), "log", "-1", "--format=%ct")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return datetime.fromtimestamp(int(text), UTC) if text.isdecimal() else None


@dataclass(kw_only=True)
class _Night:
    factory: Factory
    ask: NightAsk
    bench: NightBench
    folder: Path
    progress: Progress
    targets: tuple[Target, ...]
    failures: list[NightRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> NightReport:
        started, killed = self.bench.clock(), killed_before(self.factory.settings)
        for fault in self.factory.faults:
            place, _, why = fault.partition(": ")
            self.failures.append(NightRow(what=one_line(place), why=one_line(why), code=EXIT_USAGE))
        devices = self._devices()
        before: KeptPlan | None = None
        with self.telling("plan"):
            plan = self._plan(devices)
            before = killed or keep_plan(plan, self._asked(devices))
            write_kept_plan(self.folder / BEFORE, before)
            built = self._build(plan)
            self._verify(plan, built, on_gpus=bool(devices))
        if self.ask.pool:
            self._collect()
        promotable = [one.name for one in self.targets]
        self.do("tags", "promote", *promotable, expected=EXIT_CHECK)
        self.do("reconcile", "reconcile")
        self.do("catalogue", "catalogue")
        self.do("disk", "store", "gc")
        after = before
        with self.telling("plan"):
            after = keep_plan(self._plan(devices), self._asked(devices))
        report = self._report(started, before, after)
        if self.ask.html:
            done = len(self.failures)
            self.do("report", "report", "--html", str(self.ask.html), "--registry", self._registry)
            if len(self.failures) > done:
                report = self._report(started, before, after)
        return report

    def _report(self, started: datetime, before: KeptPlan | None, after: KeptPlan | None) -> NightReport:
        empty = self._asked(())
        told = NightTold(
            started=started,
            ended=self.bench.clock(),
            place=self._registry,
            failures=tuple(self.failures),
            notes=tuple(self.notes),
        )
        report = compare(before or empty, after or before or empty, told)
        write_night(self.folder / NIGHT, report)
        return report

    def _asked(self, devices: tuple[PlanGpu, ...]) -> KeptPlan:
        return KeptPlan(
            made=self.bench.clock(), registry=self._registry, names=self.ask.names, devices=devices
        )

    # --- what is due -----------------------------------------------------------------------------

    @property
    def _registry(self) -> str:
        return self.factory.settings.registry.value

    def _devices(self) -> tuple[PlanGpu, ...]:
        """The GPUs to verify on: of the pool, each capability with its newest driver, as one job speaks for
        all; else the first of this machine. None where there are none: then images are built alone."""
        if self.ask.pool:
            kinds: tuple[PlanGpu, ...] = ()
            with self.telling("pool"):
                inventory = self.bench.pools(self.ask.pool).inventory(self.bench.clock())
                kinds = inventory_devices(inventory)
                write_inventory(self._inventory, inventory)
            return tuple({(kind.capability, kind.host): kind for kind in kinds}.values())
        try:
            hardware = self.bench.evidence.read()
        except NoGpuError as error:
            self.notes.append(one_line(f"nothing is verified: {error.message}"))
            return ()
        gpu = hardware.gpus[0]
        capability = parse_capability(gpu.capability)
        driver = "" if capability.processor else hardware.driver
        return (PlanGpu(capability=capability, name=gpu.name, driver=driver),)

    @property
    def _inventory(self) -> Path:
        return self.folder / "inventory.json"

    def _plan(self, devices: tuple[PlanGpu, ...]) -> Plan:
        """Against the registry; where jobs run .sif files, also the store, whose verdicts are theirs."""
        now = self.bench.clock()
        with self.progress.stage("plan"):
            stages = read_stages(self.factory, self.targets, Asking(now=now, registry=self._registry))
            kind = choose_kind(self.factory, "", self._registry) if self.ask.pool else ImageKind.DOCKER
            if kind is not ImageKind.DOCKER:
                place = ImagePlace(kind=kind, registry=self._registry, folder=self.folder, now=now)
                here = read_pool_stages(self.factory, self.targets, place)
                stages = tuple(map(_both, stages, here))
        return make_plan(PlanInput(stages=stages, devices=devices, on_machines=True))

    # --- steps -----------------------------------------------------------------------------------

    def _build(self, plan: Plan) -> frozenset[str]:
        """Builds and pushes what is due, each in a process of its own. The names of what came to be."""
        due = [one.target.name for one in plan.targets if one.state is CellState.BUILD]
        return frozenset(name for name in due if self.do(name, "build", "--push", name)[0] == 0)

    def _verify(self, plan: Plan, built: frozenset[str], *, on_gpus: bool) -> None:
        ready = [one for one in plan.targets if on_gpus and _is_due(one, built)]
        if not ready:
            return
        if self.ask.pool:
            names = [one.target.name for one in ready if starts_by_kit(one.target)]
            words = ("--pool", self.ask.pool, "--inventory", str(self._inventory), *names)
            code, told = self.do("verify", "verify", *words, expected=EXIT_NOTHING_SELECTED)
            if code == 0 and isinstance(told.get("folder"), str):
                (self.folder / SWEPT).write_text(told["folder"] + "\n", "utf-8")
            return
        for one in ready:
            name = one.target.name
            image = name if name in built else f"{name}@{one.image}"
            self.do(name, "verify", "--registry", self._registry, "--promote", image)

    def _collect(self) -> None:
        """Waits for the sweeps of this store, those of earlier nights too, and collects what came."""
        folders = [folder for folder in find_sweeps(self.factory.settings) if self._is_open(folder)]
        self._wait(folders)
        for folder in folders:
            with self.telling(f"sweep {folder.name}"):
                status = read_status(folder, self.bench.pools, queue=False)
                if not has_news(status):
                    continue
                known = {one.result.node for one in status.collected if one.result.outcome}
                fresh = {
                    (node.target, node.capability) for node in status.sweep.nodes if node.name not in known
                }
                words = ("collect", "--promote", str(folder))
                # Of the folder itself it only counts what is told here one by one.
                _, told = self.do(f"sweep {folder.name}", *words, expected=EXIT_CHECK, of=str(folder))
                self.failures += [row for row in _unproven(told) if (row.what, row.on) in fresh]

    def _is_open(self, folder: Path) -> bool:
        """Whether what comes of it can still be signed."""
        try:
            made = read_sweep(folder).made
        except FactoryError as error:
            self.fail(f"sweep {folder.name}", error)
            return False
        return made + LIFETIME > self.bench.clock()

    def _wait(self, folders: Sequence[Path]) -> None:
        """Until nothing on the pool works on them any more, or the time is over: the next night goes on."""
        until, failed = self.bench.clock() + self.ask.wait, 0
        with self.progress.stage(f"waiting for the pool, until {until:%H:%M} UTC at the latest"):
            while True:
                try:
                    states = [read_status(folder, self.bench.pools) for folder in folders]
                    failed = 0
                except ToolError as error:
                    if (failed := failed + 1) > PATIENCE:
                        return self.fail("pool", error)
                else:
                    working = [one for one in states if one.driven and not one.settled]
                    if not working:
                        return None
                    if self.bench.clock() >= until:
                        jobs = sum(len(one.results) - one.ended for one in working)
                        self.notes.append(f"{jobs} jobs are still on the pool: the next night collects them")
                        return None
                left = (until - self.bench.clock()).total_seconds()
                self.bench.pause(max(0.0, min(POLL, left)))

    def do(self, what: str, *words: str, expected: int = 0, of: str = "") -> tuple[int, Mapping[str, Any]]:
        """Runs a command of this program, and tells its errors but for those of the code that is `expected`
        (with `of`, of that name alone). Gives its exit code and its JSON."""
        with self.progress.stage(f"{words[0]} {what}" if what != words[0] else what):
            code, said = self.bench.run((*words, "--json"))
        told = _document(said)
        errors = [row for row in told.get("errors", ()) if isinstance(row, dict)]
        for row in errors:
            name, own = str(row.get("target") or what), int(row.get("exit_code", 1))
            told_already = own == EXIT_USAGE and row.get("message") == "\n".join(self.factory.faults)
            if not told_already and (own != expected or of not in ("", name)):
                why, hint = one_line(str(row.get("message", ""))), one_line(str(row.get("hint", "")))
                self.failures.append(NightRow(what=one_line(name), why=why, hint=hint, code=own))
        if code != 0 and not errors:
            why = f"`imagefactory {words[0]}` ended with exit code {code}"
            self.failures.append(NightRow(what=what, why=why, hint="see the log", code=max(code, 1)))
        return code, told

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """What goes wrong here is told, and ends nothing else."""
        try:
            yield
        except (FactoryError, OSError) as error:
            self.fail(what, error)

    def fail(self, what: str, error: FactoryError | OSError) -> None:
        if isinstance(error, FactoryError):
            why, hint, code = error.message, error.hint, error.exit_code
        else:
            why, hint, code = str(error), "look at the disk and the rights there", EXIT_BUILD
        self.failures.append(NightRow(what=what, why=one_line(why), hint=one_line(hint), code=code))


def _both(there: TargetStatus, here: TargetStatus) -> TargetStatus:
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


def has_news(status: SweepStatus) -> bool:
    """Whether `collect` has anything to do for a sweep. Pure."""
    known = {one.result.node: one for one in status.collected}
    for result in status.results:
        one = known.get(result.node)
        if result.outcome is None or (one and one.attached):
            continue
        if one is None or one.result.outcome is None or state_of(result.outcome, one):
            return True
    return False


def _unproven(told: Mapping[str, Any]) -> Iterator[NightRow]:
    """What of a sweep has ended and is not verified, of the JSON of `collect`."""
    for row in told.get("results", ()):
        if row.get("outcome") not in (None, Outcome.VERIFIED):
            why = one_line(f"{row['outcome']}: {row['reason']}")
            yield NightRow(
                what=row["target"],
                on=row["capability"],
                why=why,
                hint=f"its logs: {row['kit']}",
                code=EXIT_CHECK,
            )


def _document(said: str) -> Mapping[str, Any]:
    try:
        found = json.loads(said)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
