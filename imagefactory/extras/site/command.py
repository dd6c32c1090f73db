"""The command report: which image runs on which GPU, as pages, pictures or tables."""

from __future__ import annotations

import gc
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

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
from imagefactory.errors import UsageError, os_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagefactory.extras.site.action import ReportContents
    from imagefactory.extras.site.tables import TableData, TableRequest


FORMATS = ("html", "svg", "badge", "csv", "markdown", "json")


class ReportFilesDocument(TypedDict):
    """The files of a report."""

    format: Literal["imagefactory.report-files/1"]
    images: int
    """The number of images in it."""
    files: list[str]


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
    type=click.Choice(FORMATS),
    default="html",
    show_default=True,
    help="Write an HTML site, the matrix as a picture (svg), a badge of one TARGET, or tables.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The directory of html, else a file.  [default: report for html, else stdout]",
)
@click.option("--force", is_flag=True, help="With html: overwrite files that imagefactory did not write.")
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
    imagefactory report 'pytorch-*' --format svg -o matrix.svg
    imagefactory report pytorch-2.3-cu121 --format badge -o verified.svg
    imagefactory report --format csv > tables.csv

    The HTML site needs no server, JavaScript or network. It has the prediction and the result for each
    image and GPU. The other formats are one document each. csv has a line for each combination that runs or
    fails. markdown and json also have version ranges, reasons and what was not tested.

    Outside a project the verdicts are those of the catalog that you joined.
    """
    from imagefactory.fs import replace_text

    reject_conflict(force and kind != "html", "--force applies only to --format html", "remove --force")
    reject_conflict(
        as_json and kind != "html" and not output,
        f"--json requires --output with --format {kind}",
        "remove --json, or add --output FILE",
    )
    request = tables_request(call, registry, capabilities=capabilities, inventory=inventory, sweeps=sweeps)
    if kind == "html":
        return _write_site(call, names, request, output or Path("report"), force=force, as_json=as_json)
    if kind in ("svg", "badge"):
        text, count, summary = _format_picture(call, names, request, kind)
    else:
        text, count, summary = _format_tables(call, names, request, kind, printed=output is None)
    if output is None:
        return print_json_document(text) if kind == "json" else print_result(text)
    try:
        replace_text(output, f"{text}\n")
    except OSError as error:
        hint = "pass a file in a directory that you can write to"
        raise UsageError(*os_problem("write", output, error), hint=hint) from error
    return _print_file(output, count, summary, as_json=as_json)


def _format_tables(
    call: CommandContext, names: tuple[str, ...], request: TableRequest, kind: str, *, printed: bool
) -> tuple[str, int, str]:
    """Return the document without its last line end, the number of targets and a summary.

    CSV has no place for notes, so they are printed to stderr if it is `printed`.
    """
    from imagefactory.extras.site.tables import (
        format_csv,
        format_markdown,
        format_summary,
        tables_json,
    )
    from imagefactory.serialize import plain

    result = _read_tables(call, names, request)
    if kind == "json":
        text = json.dumps(tables_json(result), indent=2, default=plain)
    else:
        text = format_csv(result.combos) if kind == "csv" else format_markdown(result)
    for line in result.notes if printed and kind == "csv" else ():
        call.progress.note(f"note: {line}")
    targets = {combo.target for combo in result.combos}
    return text.rstrip("\n"), len(targets), format_summary(result, terminal_width())


def _print_file(path: Path, images: int, summary: str, *, as_json: bool) -> None:
    if as_json:
        return print_json(
            ReportFilesDocument(format="imagefactory.report-files/1", images=images, files=[str(path)])
        )
    return print_result(f"{summary}\n  {path}")


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
    from imagefactory.project import uses_catalog

    settings = call.settings
    if not uses_catalog(settings):
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


def _write_site(
    call: CommandContext,
    names: tuple[str, ...],
    request: TableRequest,
    directory: Path,
    *,
    force: bool,
    as_json: bool,
) -> None:
    from imagefactory.extras.site.action import write_report
    from imagefactory.extras.site.pages import make_site

    reported = _read(call, names, request)
    gc.freeze()  # nothing of it is garbage, and searching it for garbage takes a quarter of the time
    try:
        workers = call.settings.worker_count
        pages = write_report(directory, make_site(reported), force=force, workers=workers)
    except OSError as error:
        hint = "pass a directory that you can write to: --output DIR"
        raise UsageError(*os_problem("write", directory, error), hint=hint) from error
    _print_file(
        directory / "index.html",
        len(reported.images),
        f"{_summary(reported)}\n{pages} files",
        as_json=as_json,
    )


def _format_picture(
    call: CommandContext, names: tuple[str, ...], request: TableRequest, kind: str
) -> tuple[str, int, str]:
    """Return the picture or the badge, the number of images and a summary."""
    from imagefactory.extras.site.matrix import matrix_gpus, matrix_rows
    from imagefactory.extras.site.pages import format_badge, format_picture

    reported = _read(call, names, request)
    count = len(reported.images)
    if kind == "svg":
        text = format_picture(matrix_rows(reported), matrix_gpus(reported))
    elif count == 1:
        text = format_badge(reported.images[0])
    else:
        raise UsageError(
            "option-conflict",
            f"--format badge requires exactly one image, found {count}",
            hint="select one target: imagefactory report TARGET --format badge",
        )
    return text.rstrip("\n"), count, _summary(reported)


def _summary(reported: ReportContents) -> str:
    count = len(reported.images)
    text = f"{count} image{'' if count == 1 else 's'} on {len(reported.capabilities)} compute capabilities"
    return text if reported.trusted else f"{text}\nno key is trusted here, so no image is verified"


def _read(call: CommandContext, names: tuple[str, ...], request: TableRequest) -> ReportContents:
    from imagefactory.extras.site.action import read_cataloged_report, read_report
    from imagefactory.project import uses_catalog

    settings = call.settings
    if not uses_catalog(settings):
        project = call.factory
        return read_report(project, project.select(names), request, call.progress)
    check_registry_has_targets(request.registry)
    return read_cataloged_report(settings, os.environ, names, request)
