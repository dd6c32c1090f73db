"""Read the inputs of a plan: locks and images of targets, a list of GPUs, a CSV file of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from imagefactory.access import open_answering, registry_place, repository_of
from imagefactory.actions.build import find_built
from imagefactory.actions.locked import base_state, require_lock
from imagefactory.actions.transfer import explain_no_candidate, find_candidate
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.errors import (
    Diagnostic,
    LockError,
    NothingSelectedError,
    RecipeError,
    RegistryError,
    StaleError,
    StoreError,
    UsageError,
    os_problem,
)
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.cells import CellEvidence
from imagefactory.matrix.plan import PlanGpu, TargetStatus, avoided_machines
from imagefactory.matrix.rows import VersionSpaceRow, parse_rows
from imagefactory.model import Target
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import Image
from imagefactory.oci.store import ImageReference
from imagefactory.project import Project
from imagefactory.scan.layers import cached_contents
from imagefactory.schedulers.inventory import read_inventory
from imagefactory.schedulers.pool import Inventory
from imagefactory.settings.own_commands import is_machine_selected
from imagefactory.trust.claims import to_renew
from imagefactory.trust.verdict import VerdictStatus, VerificationResult
from imagefactory.versions import natural

MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLookup:
    """The place and time of a plan's search for images. `registry` is empty for the store.

    `also` is a registry to search besides the store. With `renew`, verdicts that expire soon count as
    expired.
    """

    now: datetime
    registry: str = ""
    also: str = ""
    renew: bool = True

    def counted(self, judged: tuple[VerificationResult, ...]) -> tuple[VerificationResult, ...]:
        return to_renew(judged, self.now) if self.renew else judged


def read_stages(project: Project, targets: Sequence[Target], asking: PlanLookup) -> tuple[TargetStatus, ...]:
    """Return the status of each target: its lock, its base, and its image in the store or registry.

    Raises UsageError if no registry is set, RegistryError if the registry does not answer.
    """
    if asking.registry:
        look = _lookup_in_registry(project, asking)
    else:
        look = _lookup_in_both(project, asking) if asking.also else _lookup_in_store(project, asking)
    bases = {base.name: base_state(project, base) for base in project.bases}
    return tuple(
        TargetStatus(
            target=target,
            block=f"the lock of base {target.base}: {bases[target.base]}",
            hint=f"run imagefactory lock base:{target.base}",
        )
        if bases[target.base] in ("none", "malformed")
        else _read_stage(project, target, look)
        for target in targets
    )


StatusLookup = Callable[[TargetStatus], TargetStatus]
"""A function that completes the status of a target whose lock is current."""


def _read_stage(project: Project, target: Target, look: StatusLookup) -> TargetStatus:
    try:
        stage = TargetStatus(target=target, lock=require_lock(project, target))
    except (LockError, StaleError) as error:
        return TargetStatus(target=target, block=error.message, hint=error.hint)
    try:
        return look(stage)
    except (LockError, StoreError) as error:
        return replace(stage, block=error.message, hint=error.hint)


def _lookup_in_store(project: Project, asking: PlanLookup) -> StatusLookup:
    tags, judge = frozenset(project.layout.tags()), VerdictReader(project, asking.now)

    def look(stage: TargetStatus) -> TargetStatus:
        name, engine = reference(stage.target), project.settings.engine.value
        if not tags & {name, f"{name}.sif"}:
            return stage
        try:
            built = find_built(project, stage.target)
        except ModuleNotFoundError as error:  # a light install cannot build: this image was pulled
            return replace(stage, missing=f"the image in the store cannot be compared without {error.name}")
        if built is None:
            return replace(stage, missing=f"the image in the store is not what {engine} makes of the lock")
        scanned = cached_contents(project.layout, built) if isinstance(built, Image) else None
        return replace(
            stage,
            missing="",
            image=built.digest,
            evidence=CellEvidence(contents=scanned),
            verdicts=asking.counted(judge.stored(built)),
        )

    return look


def _lookup_in_both(project: Project, asking: PlanLookup) -> StatusLookup:
    """Look up the candidate in the registry, else the stored image. An unreachable registry is reported."""
    in_store = _lookup_in_store(project, asking)
    try:
        in_registry = _lookup_in_registry(project, replace(asking, registry=asking.also), hurried=True)
    except RegistryError as error:
        project.tell(f"note: this plan uses only the local store: {error.message}")
        return in_store

    def look(stage: TargetStatus) -> TargetStatus:
        local, there = in_store(stage), in_registry(stage)
        if there.missing:
            return local
        if there.image != local.image:
            return there
        revoked_last = sorted(
            (*local.verdicts, *there.verdicts), key=lambda result: result.standing is VerdictStatus.REVOKED
        )
        verdicts = {result.name: result for result in revoked_last}
        return replace(there, evidence=local.evidence, verdicts=tuple(verdicts.values()))

    return look


def _lookup_in_registry(project: Project, asking: PlanLookup, *, hurried: bool = False) -> StatusLookup:
    host, path = registry_place(project, asking.registry)
    registry, judge = open_answering(project, host, hurried=hurried), VerdictReader(project, asking.now)

    def look(stage: TargetStatus) -> TargetStatus:
        target = stage.target
        repo = StoreRepository(store=registry, repository=repository_of(path, target.family))
        candidate = find_candidate(project, target, repo)
        if candidate is None:
            return replace(stage, missing=explain_no_candidate(project, repo))
        destination = ImageReference(registry=host, repository=repo.repository, digest=candidate.digest)
        return replace(
            stage,
            missing="",
            image=candidate.digest,
            reference=str(destination),
            verdicts=asking.counted(judge.there(repo, candidate.digest)),
        )

    return look


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGpus:
    """The GPUs to plan for. `pool` is the file of an inventory, empty for a list of GPUs.

    `avoided` are the reasons why jobs avoid some GPUs.
    """

    devices: tuple[PlanGpu, ...] = ()
    pool: str = ""
    avoided: Mapping[PlanGpu, str] = field(default_factory=dict)


def read_listed(path: Path, patterns: Sequence[str] = ()) -> PlanGpus:
    """Return the GPUs of a list, or of an inventory on the machines that match `patterns`.

    Raises RecipeError and UsageError for errors in the file, NothingSelectedError if there is no GPU.
    """
    inventory = read_inventory(path)
    if inventory.listed:
        return PlanGpus(devices=listed_devices(inventory))
    devices, avoided = inventory_devices(inventory, patterns)
    return PlanGpus(devices=devices, pool=str(path), avoided=avoided)


def listed_devices(inventory: Inventory) -> tuple[PlanGpu, ...]:
    """Return each type of GPU of a list."""
    kinds = (
        PlanGpu(capability=parse_capability(gpu.capability), name=gpu.name, driver=gpu.driver, host=gpu.host)
        for gpu in inventory.gpus
    )
    return tuple(dict.fromkeys(kinds))


def inventory_devices(
    inventory: Inventory, patterns: Sequence[str] = ()
) -> tuple[tuple[PlanGpu, ...], Mapping[PlanGpu, str]]:
    """Return each type of GPU of a pool by capability, MIG slice and driver, and the reasons to avoid some.

    A type has a name if all its GPUs have the same one. Raises NothingSelectedError without a GPU.
    """
    names: dict[PlanGpu, set[str]] = {}
    machines: dict[PlanGpu, list[str]] = {}
    for machine, gpu in ((row, gpu) for row in inventory.machines for gpu in row.gpus if gpu.capability):
        cuda = "" if gpu.driver else gpu.cuda
        kind = PlanGpu(
            capability=parse_capability(gpu.capability),
            driver=gpu.driver,
            cuda=cuda,
            host=gpu.host,
            part=gpu.part,
        )
        names.setdefault(kind, set()).add(gpu.name)
        machines.setdefault(kind, []).append(machine.name)
    if not names:
        raise NothingSelectedError(
            "inventory-no-gpu",
            "the inventory has no GPU to plan for",
            hint="to see its GPUs, run imagefactory gpus --inventory FILE",
        )
    kinds = sorted(
        names, key=lambda kind: (kind.capability, kind.part, natural(kind.oldest_driver), kind.host)
    )
    devices = {
        kind: replace(kind, name=next(iter(names[kind])) if len(names[kind]) == 1 else "") for kind in kinds
    }
    avoided = {
        devices[kind]: avoided_machines(machines[kind])
        for kind in kinds
        if not any(is_machine_selected(name, patterns) for name in machines[kind])
    }
    return tuple(devices.values()), avoided


def read_rows(path: Path) -> tuple[VersionSpaceRow, ...]:
    """Return the rows of a CSV file. Raises RecipeError with file:line, UsageError if unreadable."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="pass a CSV file") from error
    if len(data) > MAX_BYTES:
        raise UsageError(
            "csv-too-large",
            f"{path} is larger than {MAX_BYTES // 2**20} MB",
            hint="split it into several files",
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = Diagnostic("not-utf8", f"{path.name}:{line}", "the line is not UTF-8 text")
        raise RecipeError([problem], hint="save the file as UTF-8") from error
    return parse_rows(text, path.name)
