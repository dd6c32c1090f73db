"""What the store and the cache may forget, and what they must keep."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from imagefactory.access import Access, cache_lock
from imagefactory.build.conda.prefix import remove_extracted
from imagefactory.errors import RegistryError, StoreError, UsageError
from imagefactory.project import Factory
from imagefactory.fs import Removal, entries_of, unseal, used_by_nobody
from imagefactory.lock.debian.lock import parse_base_lock, read_base_lock
from imagefactory.oci.candidates import REVOCATION_TYPE
from imagefactory.oci.maintenance import Checked, Fault, check
from imagefactory.oci.layout import Layout
from imagefactory.progress import Progress
from imagefactory.actions.locked import read_target_lock
from imagefactory.actions.sweep import sweeps_folder
from imagefactory.actions.verdicts import ANY, find_in, local_place, read_court
from imagefactory.schedulers.sweep_file import ID, read_collected
from imagefactory.schedulers.underway import InHand, state_of
from imagefactory.trust.attached import Journal
from imagefactory.trust.verdict import Standing
from imagefactory.verdicts.subject import read_subject
from imagefactory.verify.model import Subject

KEPT = timedelta(days=60)
"""How long a sweep is kept; what it brings back can be signed for 14 days (verify/nonces.py)."""


def worth_keeping(access: Access, now: datetime) -> tuple[str, ...]:
    """Digests of what `store gc` keeps without a tag: images that are verified, statements that still count.

    Raises UsageError for a trust that cannot be read: then nobody knows what is valid, and nothing goes.
    """
    court, layout, kept = read_court(access, now), access.layout, []
    place = local_place(access, ANY)
    for digest in layout.subjects():
        kept += [referrer.digest for referrer, kind in layout.referrers(digest) if kind == REVOCATION_TYPE]
        try:
            subject = read_subject(place, digest)
        except RegistryError:  # of an image that is not here verdicts still tell, should it come again
            subject = _only_manifest(digest)
        for judged in find_in(access, place, subject, court).judged:
            if judged.standing is Standing.GOOD:
                kept.append(judged.digest)
            if judged.proves and judged.verdict:
                kept += [digest, judged.verdict.report.subject.index]
    return tuple(dict.fromkeys(kept))


def _only_manifest(digest: str) -> Subject:
    return Subject(target="", index=digest, manifest=digest, config=digest)


def collect_cache(factory: Factory, progress: Progress, *, dry_run: bool) -> Removal:
    """Removes from the cache what no committed lock names, all segments and what lies there unpacked.

    Waits for running builds, as `store gc` does.
    """
    locks = [lock for target in factory.targets if (lock := read_target_lock(factory, target))]
    bases = [
        base_lock for base in factory.bases if (base_lock := read_base_lock(factory.base_lock_path(base)))
    ]
    needed = {package.sha256 for lock in locks for package in lock.packages}
    # Also the newer packages that a base was made of when the mirror no longer had the locked ones.
    folder = factory.settings.store_path / "bases"
    remembered = [(path, unseal(path)) for path in sorted(folder.glob("*.lock"))]
    bases += [parse_base_lock(text.decode(), str(path)) for path, text in remembered if text is not None]
    needed |= {package.sha256 for base_lock in bases for package in base_lock.packages}
    cache, removal = factory.settings.cache_path, Removal(factory.settings.cache_path, dry_run=dry_run)
    with used_by_nobody(cache_lock(factory), progress):
        kinds = ("wheels", "conda", "debs", "segments")
        for path in [p for kind in kinds for p in (cache / kind).rglob("*")]:
            if path.is_file() and path.parent.name not in needed and not path.name.startswith("."):
                removal.remove(path)
        remove_extracted(cache, removal)
    return removal


def collect_sweeps(access: Access, now: datetime, *, dry_run: bool) -> Removal:
    """Remove the store's sweeps that were made more than KEPT ago, whose results cannot be signed any more.

    A sweep with a verdict that is signed and not attached yet stays.
    """
    removal = Removal(access.layout.path, dry_run=dry_run)
    for folder in entries_of(sweeps_folder(access.settings)):
        named = ID.fullmatch(folder.name)
        with suppress(ValueError):  # digits that are not a date
            made = datetime.strptime(named[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC) if named else now
            if made + KEPT < now and not _is_waiting(folder):
                removal.remove(folder)
    return removal


def _is_waiting(folder: Path) -> bool:
    try:
        nodes = read_collected(folder)
    except UsageError:
        return False
    return any(
        state_of(node.result.outcome, node) is InHand.NOT_ATTACHED for node in nodes if not node.attached
    )


def check_store(layout: Layout, progress: Progress, *, mend: bool) -> Checked:
    """What `check` finds, and the lines of the journal that cannot be read."""
    done, faults = check(layout, progress, mend=mend), []
    for path, count in Journal(layout.path).damaged():
        place = path.relative_to(layout.path)
        hint = f"run imagefactory reconcile --registry {place.parts[1]} to rewrite it without them"
        faults.append(
            Fault(
                place=str(place),
                error=StoreError("store-corrupt", f"{place}: {count} lines are corrupt", hint=hint),
            )
        )
    return replace(done, faults=(*done.faults, *faults))
