"""`submit --check`: find and fix problems in an existing submit file or batch script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import Call, reject_conflict, say, say_json, say_notes, terminal_width, write
from imagefactory.cli.pool import find_inventory
from imagefactory.errors import EXIT_CHECK, UsageError, os_problem
from imagefactory.settings.choices import HTCONDOR, SLURM

if TYPE_CHECKING:
    from imagefactory.catalogue.model import CataloguedImage, Offer
    from imagefactory.pools.model import Inventory
    from imagefactory.stages.centers import OpenCenters

REGISTRY_SECONDS = 5


def check_file(
    call: Call, path: Path, *, name: str | None, inventory: Path | None, fix: bool, as_json: bool
) -> None:
    """Print the problems of a file, and exit 9 if it has any. A missing pool or catalog prints a note."""
    from imagefactory.catalogue.offers import judge_offer
    from imagefactory.pools.sites import find_site
    from imagefactory.report.catalogued import centers_json, source_json
    from imagefactory.report.submit_check import check_json, format_check
    from imagefactory.stages.centers import merge_centers
    from imagefactory.submit.check.batch.check import check_batch
    from imagefactory.submit.check.batch.reader import is_batch, parse_batch
    from imagefactory.submit.check.check import check_submit_file
    from imagefactory.submit.check.checked import Checked, Surroundings
    from imagefactory.submit.check.fix import fix_text, format_diff
    from imagefactory.submit.check.reader import lists_beside, parse_submit_file, read_text
    from imagefactory.submit.check.secrets import with_secrets

    now, settings = datetime.now(UTC), call.settings
    text = read_text(path)
    batch = is_batch(text, path.name)
    reject_conflict(
        batch and fix,
        "--fix applies to HTCondor submit files only",
        "remove --fix: --check prints what to write in a script",
    )
    opened = _open_to_compare(call, now)
    catalogue = merge_centers(opened) if opened else None
    nodes = _inventory_to_compare(inventory, now, SLURM if batch else HTCONDOR)

    def offer(image: CataloguedImage) -> Offer:
        assert opened is not None  # the image is of one of its catalogues
        entry = next(entry for entry in opened.open if any(image is own for own in entry.catalogue.images))
        return judge_offer(entry.catalogue, image, entry.center.trust, now)

    site = find_site(SLURM if batch else name or settings.site.value)
    around = Surroundings(site=site, inventory=nodes, catalogue=catalogue, offer=offer, digest=_digests(call))

    def checked_as(text: str) -> Checked:
        if batch:
            return with_secrets(check_batch(parse_batch(text, str(path)), around), text)
        file = parse_submit_file(text, str(path), lists_beside(path))
        return with_secrets(check_submit_file(file, around), text)

    mended = fix_text(text, checked_as) if fix else text
    checked, diff = checked_as(mended), format_diff(str(path), text, mended)
    if mended != text:
        _write_mended(path, mended)
    if as_json:
        more = {"site": site.name, "mended": diff, **source_json(catalogue)}
        more |= centers_json(opened.open if opened else ())
        say_json("check", {**check_json(checked), **more})
    else:
        say("\n\n".join(part for part in (diff, format_check(checked, terminal_width())) if part))
    if checked.wrong:
        raise click.exceptions.Exit(EXIT_CHECK)


def _write_mended(path: Path, text: str) -> None:
    from imagefactory.files import replacing

    path = path.resolve()
    try:
        with replacing(path, mode=path.stat().st_mode & 0o777) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="copy it into your own directory") from error


def _digests(call: Call) -> Callable[[str], str]:
    """Return a function that queries registries, once per image and briefly. A note reports a failure."""
    from imagefactory.access import Access, open_registry
    from imagefactory.errors import FactoryError
    from imagefactory.oci.store import parse_reference
    from imagefactory.web import Patience

    @cache
    def digest(reference: str) -> str:
        try:
            named = parse_reference(reference)
            access = Access(settings=call.settings, environ=os.environ)
            patience = Patience(attempts=0, connect=REGISTRY_SECONDS, read=REGISTRY_SECONDS)
            registry = open_registry(access, named.registry, patience=patience)
            manifest = registry.manifest(named.repository, named.tag)
        except FactoryError as error:
            write(2, f"note: the digest of {reference} is not known: {error.message}")
            return ""
        if manifest is None:
            write(2, f"note: {named.registry} has no {named.repository}:{named.tag}")
        return manifest[0].digest if manifest else ""

    return digest


def _open_to_compare(call: Call, now: datetime) -> OpenCenters | None:
    """Return the catalogs, None outside a project without any. Raises if a named one cannot be read."""
    from imagefactory.factory import is_factory, names_catalogue

    settings = call.settings
    if names_catalogue(settings) or is_factory(settings):
        from imagefactory.stages.centers import read_centers

        centers = read_centers(settings, os.environ, now)
        say_notes(centers.notes)
        return centers
    write(2, "note: no catalogue is known, so what is verified is not: imagefactory join ADDRESS|FILE")
    return None


def _inventory_to_compare(path: Path | None, now: datetime, pool: str) -> Inventory | None:
    """Return the pool, None without its command. Raises if it or the named file does not answer."""
    command = "scontrol" if pool == SLURM else "condor_status"
    if path is not None or shutil.which(command):
        return find_inventory(path, now, pool)
    write(2, f"note: there is no {command} here, so what the pool has is not known (--inventory FILE)")
    return None
