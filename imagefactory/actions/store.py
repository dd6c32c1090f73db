"""Delete unused files from the store, the cache and registries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from imagefactory.access import Access, cache_lock, open_registry, registry_place, repository_of
from imagefactory.actions.sweep import sweeps_directory
from imagefactory.actions.verdicts import ANY, count_valid, find_in, local_place, read_verification_policy
from imagefactory.build.conda.prefix import remove_extracted
from imagefactory.errors import RegistryError, StoreError, UsageError
from imagefactory.fs import Removal, check_checksum, entries_of, is_unused
from imagefactory.lock.debian.lock import parse_base_lock, read_base_lock
from imagefactory.lock.files import read_locks
from imagefactory.model import Target
from imagefactory.oci.candidates import (
    REVOCATION_TYPE,
    PruneDecision,
    TagTarget,
    plain_tag,
    plan_prune,
    read_tagged,
    remove_candidate,
)
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import StoreCheck, StoreFault, check
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.sweep_file import ID, read_collected
from imagefactory.schedulers.underway import NodeProgress, state_of
from imagefactory.trust.attached import AttachJournal, read_subject
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.verify.report import VerifiedImage

RETENTION = timedelta(days=60)
"""The time to keep a sweep. Its results can be signed for 14 days (verify/nonces.py)."""


def retained_digests(access: Access, now: datetime) -> tuple[str, ...]:
    """Return the digests that `image prune` keeps without a tag: verified images, and valid statements.

    Raises UsageError for unreadable trust, so that nothing is deleted.
    """
    policy, layout, digests = read_verification_policy(access, now), access.layout, []
    repo = local_place(access, ANY)
    for digest in layout.subjects():
        digests += [referrer.digest for referrer, kind in layout.referrers(digest) if kind == REVOCATION_TYPE]
        try:
            subject = read_subject(repo, digest)
        except RegistryError:  # the image is gone, and its verdicts count if it comes back
            subject = VerifiedImage(target="", index=digest, manifest=digest, config=digest)
        for judged in find_in(access, repo, subject, policy).judged:
            if judged.standing is VerdictStatus.GOOD:
                digests.append(judged.digest)
            if judged.proves and judged.verdict:
                digests += [digest, judged.verdict.report.subject.index]
    return tuple(dict.fromkeys(digests))


def collect_cache(project: Project, progress: Progress, *, dry_run: bool) -> Removal:
    """Delete from the cache all files that are in no lock here, all segments and unpacked files.

    The locks of targets that are in no valid recipe count too. Raises LockError if a lock cannot be read.
    Waits for running builds, as `image prune` does.
    """
    locks = read_locks(project.lock_folder)
    paths = map(project.base_lock_path, project.bases)
    bases = [base for path in paths if (base := read_base_lock(path))]
    # Also the newer packages of a base whose mirror no longer had the locked ones.
    directory = project.settings.store_path / "bases"
    remembered = [(path, check_checksum(path)) for path in sorted(directory.glob("*.lock"))]
    bases += [parse_base_lock(text.decode(), str(path)) for path, text in remembered if text is not None]
    needed = {package.sha256 for lock in locks for package in lock.packages}
    needed |= {package.sha256 for base in bases for package in base.packages}
    cache, removal = project.settings.cache_path, Removal(project.settings.cache_path, dry_run=dry_run)
    with is_unused(cache_lock(project), progress):
        kinds = ("wheels", "conda", "debs", "segments")
        for path in [p for kind in kinds for p in (cache / kind).rglob("*")]:
            if path.is_file() and path.parent.name not in needed and not path.name.startswith("."):
                removal.remove(path)
        remove_extracted(cache, removal)
    return removal


def collect_sweeps(access: Access, now: datetime, *, dry_run: bool) -> Removal:
    """Delete the sweeps of the store that are older than RETENTION, whose results can no longer be signed.

    A sweep with a signed verdict that is not attached yet stays.
    """
    removal = Removal(access.layout.path, dry_run=dry_run)
    for directory in entries_of(sweeps_directory(access.settings)):
        named = ID.fullmatch(directory.name)
        with suppress(ValueError):  # digits that are not a date
            created = datetime.strptime(named[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC) if named else now
            if created + RETENTION < now and not _is_waiting(directory):
                removal.remove(directory)
    return removal


def _is_waiting(directory: Path) -> bool:
    try:
        nodes = read_collected(directory)
    except UsageError:
        return False
    return any(
        state_of(node.result.outcome, node) is NodeProgress.NOT_ATTACHED
        for node in nodes
        if not node.attached
    )


def check_store(layout: Layout, progress: Progress, *, mend: bool) -> StoreCheck:
    """Return the findings of `check`, and the journals with unreadable lines."""
    result, faults = check(layout, progress, mend=mend), []
    for path, count in AttachJournal(layout.path).damaged():
        relative = path.relative_to(layout.path)
        hint = f"run imagefactory verdict sync --registry {relative.parts[1]} to rewrite it without them"
        faults.append(
            StoreFault(
                place=str(relative),
                error=StoreError("store-corrupt", f"{relative}: {count} lines are corrupt", hint=hint),
            )
        )
    return replace(result, faults=(*result.faults, *faults))


# --- The targets' artifacts in a registry, and deletion of old candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryListing:
    """A repository of a registry, and the images that its tags point to."""

    registry: str
    repository: str
    tagged: tuple[TagTarget, ...]


def list_registry(
    project: Project, targets: Sequence[Target], registry: str, progress: Progress
) -> tuple[RepositoryListing, ...]:
    """Return the tags in the repositories of targets, with the images that they point to."""
    host, path = registry_place(project, registry)
    store = open_registry(project, host)
    plain = {plain_tag(target) for target in project.targets}
    with progress.stage(f"list {host}"):
        names = sorted({repository_of(path, target.family) for target in targets})
        places = [StoreRepository(store=store, repository=name) for name in names]
        return tuple(
            RepositoryListing(registry=host, repository=repo.repository, tagged=read_tagged(repo, plain))
            for repo in places
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """The result for one repository's candidates."""

    registry: str
    repository: str
    fates: tuple[PruneDecision, ...]


def prune_registry(
    project: Project,
    family: str,
    before: datetime,
    now: datetime,
    progress: Progress,
    *,
    registry: str = "",
    dry_run: bool = False,
) -> PruneResult:
    """Delete unused candidates pushed before `before` from the repository of a family.

    The registry's own garbage collection frees their bytes. Raises RegistryError if deletion is rejected.
    """
    host, path = registry_place(project, registry)
    store, repository = open_registry(project, host), repository_of(path, family)
    with progress.stage(f"prune {host}/{repository}"):
        plain = {plain_tag(target) for target in project.targets}
        repo = StoreRepository(store=store, repository=repository)
        tagged = read_tagged(repo, plain, count_valid(project, repo, now), records=True)
        fates = list(plan_prune(tagged, before))
        for number, decision in enumerate(fates):
            if decision.remove and not dry_run and (tag := remove_candidate(store, repository, decision)):
                fates[number] = replace(decision, remove=False, why=f"{tag} points to it now")
    return PruneResult(registry=host, repository=repository, fates=tuple(fates))
