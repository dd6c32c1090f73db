"""The `job check` command, which checks a submit file or batch script against this pool."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.gpus import find_inventory, inventory_option
from imagefactory.cli.output import (
    CommandContext,
    json_option,
    print_catalog_notes,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    terminal_width,
    write_terminal,
)
from imagefactory.errors import EXIT_CHECK, UsageError, os_problem
from imagefactory.settings.choices import HTCONDOR, SITES, SLURM

if TYPE_CHECKING:
    from imagefactory.actions.centers import CenterCatalogs
    from imagefactory.schedulers.pool import Inventory
    from imagefactory.trust.catalog import CatalogImage, ImageOffer

REGISTRY_SECONDS = 5


@click.command(cls=Command)
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--fix", is_flag=True, help="Fix what is certain in a submit file, and show the changes.")
@click.option(
    "--site",
    type=click.Choice(SITES),
    help="The site whose rules the file follows.  [default: the setting `site`]",
)
@inventory_option
@json_option
@click.pass_obj
def check(
    call: CommandContext, path: Path, *, fix: bool, site: str | None, inventory: Path | None, as_json: bool
) -> None:
    """Check a job file against this cluster.

    \b
    imagefactory job check old.sub
    imagefactory job check old.sub --fix
    imagefactory job check train.sbatch

    It shows the line, a rule and a fix for each problem. Nothing is submitted.

    Exit code 9 if something is wrong.
    """
    from imagefactory.actions.centers import merge_centers
    from imagefactory.extras.lint.batch_check import check_batch
    from imagefactory.extras.lint.batch_reader import is_batch, parse_batch
    from imagefactory.extras.lint.check import check_submit_file, fix_text, format_diff, with_secrets
    from imagefactory.extras.lint.findings import CheckContext, SubmitCheckResult, check_json, format_check
    from imagefactory.extras.lint.reader import (
        parse_submit_file,
        read_edfs,
        read_neighbor_lists,
        read_text,
    )
    from imagefactory.schedulers.sites import find_site
    from imagefactory.trust.offers import verify_offer
    from imagefactory.views.catalog import catalog_json

    now, settings = datetime.now(UTC), call.settings
    text = read_text(path)
    batch = is_batch(text, path.name)
    reject_conflict(
        batch and fix,
        "--fix applies to HTCondor submit files only",
        "remove --fix: the check prints what to write in a script",
    )
    opened = _open_to_compare(call, now)
    catalog = merge_centers(opened) if opened else None
    nodes = _inventory_to_compare(inventory, now, SLURM if batch else HTCONDOR)

    def offer(image: CatalogImage) -> ImageOffer:
        assert opened is not None  # the image is of one of its catalogs
        entry = next(
            entry
            for entry in opened.open
            if any(image is catalog_image for catalog_image in entry.catalog.images)
        )
        return verify_offer(entry.catalog, image, entry.center.trust, now)

    rules = find_site(SLURM if batch else site or settings.site.value)
    around = CheckContext(
        site=rules,
        inventory=nodes,
        catalog=catalog,
        offer=offer,
        digest=_digests(call),
        edf=read_edfs(os.environ),
    )

    def checked_as(text: str) -> SubmitCheckResult:
        if batch:
            return with_secrets(check_batch(parse_batch(text, str(path)), around), text)
        file = parse_submit_file(text, str(path), read_neighbor_lists(path))
        return with_secrets(check_submit_file(file, around), text)

    fixed = fix_text(text, checked_as) if fix else text
    checked, diff = checked_as(fixed), format_diff(str(path), text, fixed)
    if fixed != text:
        _write_fixed(path, fixed)
    if as_json:
        catalogs = [catalog_json(row.center, row.catalog) for row in opened.open] if opened else []
        print_json(check_json(checked, rules.name, diff, catalogs))
    else:
        print_result("\n\n".join(part for part in (diff, format_check(checked, terminal_width())) if part))
    if checked.wrong:
        raise click.exceptions.Exit(EXIT_CHECK)
    print_next_command(str(path), program="sbatch" if batch else "condor_submit")


def _write_fixed(path: Path, text: str) -> None:
    from imagefactory.fs import replacing

    path = path.resolve()
    try:
        with replacing(path, mode=path.stat().st_mode & 0o777) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(
            *os_problem("write", path, error), hint="copy the file into a directory that you can write to"
        ) from error


def _digests(call: CommandContext) -> Callable[[str], str]:
    """Return a function that queries registries, once per image and briefly. A note reports a failure."""
    from imagefactory.access import Access, open_registry
    from imagefactory.errors import ImagefactoryError
    from imagefactory.http import RetryPolicy
    from imagefactory.oci.store import parse_reference

    @cache
    def digest(reference: str) -> str:
        try:
            named = parse_reference(reference)
            access = Access(settings=call.settings, environ=os.environ)
            retry_policy = RetryPolicy(attempts=0, connect=REGISTRY_SECONDS, read=REGISTRY_SECONDS)
            registry = open_registry(access, named.registry, retry_policy=retry_policy)
            manifest = registry.manifest(named.repository, named.tag)
        except ImagefactoryError as error:
            write_terminal(2, f"note: the digest of {reference} is not known: {error.message}")
            return ""
        if manifest is None:
            write_terminal(2, f"note: {named.registry} has no {named.repository}:{named.tag}")
        return manifest[0].digest if manifest else ""

    return digest


def _open_to_compare(call: CommandContext, now: datetime) -> CenterCatalogs | None:
    """Return the catalogs, None outside a project without any. Raises if a named catalog cannot be read."""
    from imagefactory.project import has_catalog, is_project

    settings = call.settings
    if has_catalog(settings) or is_project(settings):
        from imagefactory.actions.centers import read_centers

        centers = read_centers(settings, os.environ, now)
        print_catalog_notes(centers.notes)
        return centers
    write_terminal(
        2, "note: no catalog is known, so verdicts are not checked: imagefactory site join ADDRESS|FILE"
    )
    return None


def _inventory_to_compare(path: Path | None, now: datetime, pool: str) -> Inventory | None:
    """Return the pool, None without its commands. Raises if the pool or the named file cannot be read."""
    command = "scontrol" if pool == SLURM else "condor_status"
    if path is not None or shutil.which(command):
        return find_inventory(path, now, pool)
    write_terminal(
        2, f"note: {command} is not installed, so the pool's GPUs are not known (--inventory FILE)"
    )
    return None
