"""The command report: which image runs on which GPU, as pages, pictures or tables."""

from __future__ import annotations

import gc
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import (
    CommandContext,
    capability_of,
    json_option,
    print_json,
    print_json_document,
    print_result,
    reject_conflict,
    targets_argument,
    terminal_width,
)
from imagefactory.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagefactory.extras.site.action import ReportContents
    from imagefactory.extras.site.tables import TableData, TableRequest


FORMATS = {
    "html": "report",
    "svg": "matrix.svg",
    "badge": "badge.svg",
    "csv": ".",
    "markdown": "",
    "json": "",
}
"""The formats of a report, and the default output of each; empty means stdout."""


@click.command(cls=Command)
@targets_argument(required=False)
@section("What to show")
@click.option(
    "--inventory",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Add the compute capabilities of a cluster, as `imagefactory gpus -o FILE` wrote them.",
)
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    metavar="X.Y",
    help="Add this compute capability (repeatable).",
)
@click.option(
    "--sweep",
    "sweeps",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    metavar="DIR",
    help="Add a collected sweep from another directory (repeatable).",
)
@click.option(
    "--registry",
    default="",
    metavar="HOST[/PATH]",
    help="Only images of this registry.  [default: the store, and the setting `registry`]",
)
@section("Output")
@click.option(
    "--format",
    "kind",
    type=click.Choice(tuple(FORMATS)),
    default="html",
    show_default=True,
    help="Write an HTML site, the matrix as a picture (svg), a badge of one TARGET, or tables.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help=(
        "The directory of html and csv, else the file.  [default: report, matrix.svg, badge.svg, this"
        " directory for csv, stdout for markdown and json]"
    ),
)
@click.option("--force", is_flag=True, help="Overwrite files that imagefactory did not write.")
@json_option
@click.pass_obj
def report(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    kind: str,
    output: Path | None,
    inventory: Path | None,
    capabilities: tuple[str, ...],
    sweeps: tuple[Path, ...],
    registry: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write a report: which image runs on which GPU.

    \b
    imagefactory report                                   to report/index.html
    imagefactory report 'pytorch-*' --format svg          the matrix as a picture
    imagefactory report pytorch-2.3-cu121 --format badge  verified on sm_80, ...
    imagefactory report --format csv --output tables

    The HTML site needs no server, JavaScript or network. It has the prediction and the result for each
    image and GPU. csv writes valid_combos.csv, invalid_combos.csv and version_ranges.csv.

    Outside a project the verdicts are those of the signed catalog.
    """
    from imagefactory.extras.site.tables import format_markdown, format_summary, tables_json
    from imagefactory.fs import replace_text
    from imagefactory.serialize import plain

    request = tables_request(call, registry, capabilities=capabilities, inventory=inventory, sweeps=sweeps)
    path = output or Path(FORMATS[kind])
    if kind in ("html", "svg", "badge"):
        return _write_report(call, names, request, (kind, path), force=force, as_json=as_json)
    result = _read_tables(call, names, request)
    if kind == "csv":
        from imagefactory.extras.site.tables import format_files, write_tables

        paths = write_tables(path, format_files(result), force=force)
        return _print_files(paths, format_summary(result, terminal_width()), len(paths), as_json=as_json)
    if kind == "markdown":
        text = format_markdown(result).rstrip("\n")
    else:
        document = {"format": "imagefactory.report/1", **tables_json(result)}
        text = json.dumps(document, indent=2, default=plain)
    if output:
        replace_text(output, f"{text}\n")
        return _print_files((output,), format_summary(result, terminal_width()), 1, as_json=as_json)
    reject_conflict(
        as_json, f"--json requires --output with --format {kind}", "remove --json, or add --output"
    )
    return print_json_document(text) if kind == "json" else print_result(text)


def _print_files(paths: Sequence[Path], summary: str, images: int, *, as_json: bool) -> None:
    if as_json:
        return print_json(
            {
                "format": "imagefactory.report-files/1",
                "images": images,
                "files": [str(path) for path in paths],
            }
        )
    return print_result("\n".join([summary, *(f"  {path}" for path in paths)]))


def tables_request(
    call: CommandContext,
    registry: str,
    *,
    capabilities: Sequence[str],
    inventory: Path | None,
    sweeps: tuple[Path, ...],
) -> TableRequest:
    """Return the request for the tables. Raises UsageError for an invalid capability."""
    from imagefactory.actions.sweep import find_sweeps
    from imagefactory.extras.site.tables import TableRequest
    from imagefactory.gpu.capability import parse_capability
    from imagefactory.schedulers.inventory import read_inventory

    named = [capability_of(text) for text in capabilities]
    pool_gpus = read_inventory(inventory).known if inventory else ()
    return TableRequest(
        now=datetime.now(UTC),
        registry=registry,
        capabilities=(*named, *(parse_capability(gpu.capability) for gpu in pool_gpus)),
        sweeps=sweeps,
        stored=find_sweeps(call.settings),
    )


def _read_tables(call: CommandContext, names: tuple[str, ...], request: TableRequest) -> TableData:
    from imagefactory.extras.site.tables import read_cataloged, read_tables
    from imagefactory.project import is_project

    settings = call.settings
    if is_project(settings):
        project = call.factory
        return read_tables(project, project.select(names), request, call.progress)
    check_registry_has_targets(request.registry)
    return read_cataloged(settings, os.environ, names, request)


def check_registry_has_targets(registry: str) -> None:
    """Raise UsageError for --registry outside a project, where only a signed catalog lists targets."""
    reject_conflict(
        registry,
        "--registry requires a project: elsewhere the images are those of the signed catalog",
        "remove --registry: the settings `catalog` and `registry` say where the catalog is",
    )


def _write_report(
    call: CommandContext,
    names: tuple[str, ...],
    request: TableRequest,
    target: tuple[str, Path],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Write the site, the picture or the badge."""
    from imagefactory.extras.site.action import write_report
    from imagefactory.extras.site.matrix import matrix_gpus, matrix_rows
    from imagefactory.extras.site.pages import format_badge, format_picture, make_site
    from imagefactory.fs import replace_text

    kind, path = target
    reported = _read(call, names, request)
    gc.freeze()  # nothing of it is garbage, and searching it for garbage takes a quarter of the time
    count, files = len(reported.images), ""
    if kind == "badge":
        if count != 1:
            raise UsageError(
                "option-conflict",
                f"--format badge requires exactly one image, found {count}",
                hint="select one target: imagefactory report TARGET --format badge",
            )
        replace_text(path, format_badge(reported.images[0]))
    elif kind == "svg":
        replace_text(path, format_picture(matrix_rows(reported), matrix_gpus(reported)))
    else:
        pages = write_report(path, dict(make_site(reported)), force=force)
        path, files = path / "index.html", f"  ({pages} files)"
    if as_json:
        return print_json({"format": "imagefactory.report-files/1", "images": count, "files": [str(path)]})
    print_result(
        f"{count} image{'' if count == 1 else 's'} on {len(reported.capabilities)} compute capabilities"
    )
    print_result(f"  {path}{files}")
    if not reported.trusted:
        print_result("no key is trusted here, so no image is verified")
    return None


def _read(call: CommandContext, names: tuple[str, ...], request: TableRequest) -> ReportContents:
    from imagefactory.extras.site.action import read_cataloged_report, read_report
    from imagefactory.project import is_project

    settings = call.settings
    if is_project(settings):
        project = call.factory
        return read_report(project, project.select(names), request, call.progress)
    check_registry_has_targets(request.registry)
    return read_cataloged_report(settings, os.environ, names, request)
