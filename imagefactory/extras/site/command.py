"""The report command, which shows which image runs on which GPU as pages, a picture or a badge."""

from __future__ import annotations

import gc
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import click

from imagefactory.cli.output import (
    CommandContext,
    capability_of,
    json_option,
    print_json,
    print_result,
    reject_conflict,
    targets_argument,
    terminal_width,
)
from imagefactory.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from imagefactory.extras.site.action import ReportContents
    from imagefactory.extras.site.tables import TableData, TableRequest


# --- The tables command, which writes the verified and failed combinations as files


P = ParamSpec("P")


def what_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the options that select images and GPUs of tables and reports."""
    for option in (
        click.option(
            "--inventory",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Of the capabilities of this pool too, as `imagefactory gpus -o FILE` wrote them.",
        ),
        click.option(
            "--capability",
            "capabilities",
            multiple=True,
            metavar="X.Y",
            help="Of this capability too, beside those that recipes require, verdicts name or sweeps tried.",
        ),
        click.option(
            "--sweep",
            "sweeps",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            multiple=True,
            metavar="DIR",
            help="A collected sweep that does not lie beside the store (repeatable).",
        ),
        click.option(
            "--registry",
            default="",
            metavar="HOST[/PATH]",
            help="Of the images there alone.  [default: the store, and the setting `registry`]",
        ),
    ):
        command = option(command)
    return command


@click.command()
@targets_argument(required=False)
@what_options
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    metavar="DIR",
    help="Where the files go.  [default: the current folder]",
)
@click.option("--force", is_flag=True, help="Replace files that imagefactory did not write.")
@json_option
@click.pass_obj
def tables(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    inventory: Path | None,
    capabilities: tuple[str, ...],
    sweeps: tuple[Path, ...],
    registry: str,
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Write tables of what is proven on which GPU, and what failed.

    \b
      valid_combos.csv     Framework, Compute Capability, Cuda Library, Framework Version
      invalid_combos.csv   the same, and Failure Cause
      version_ranges.csv   ranges of versions by framework and capability
      combos.md            all of it as a page, with reasons and drivers
      combos.json          all of it for programs, also what was not tested

    valid: a verdict that can be relied on says so, for that capability and no other. failed: the suite ran
    there and said no. undecided: it was tried, and what came of it says nothing of the image. ruled-out:
    nobody ran it, and what is known speaks against it. A failure cause is the word of a verdict or of a
    collected sweep, or a rule of `plan`, with (predicted) or (documented) behind it. What was not tested
    stands in neither of the first two files.

    Outside of a factory the verdicts are those of the signed catalogue. Files of an earlier call are
    replaced; with --json nothing is written. The same as pages to look at: `imagefactory report --html DIR`.
    """
    from imagefactory.extras.site.tables import format_files, format_summary, tables_json, write_tables

    request = tables_request(call, registry, capabilities=capabilities, inventory=inventory, sweeps=sweeps)
    result = _read_tables(call, names, request)
    if as_json:
        return print_json("tables", tables_json(result))
    print_result(format_summary(result, terminal_width()))
    for path in write_tables(output, format_files(result), force=force):
        print_result(f"  {path}")
    print_result("the same as pages, with each image and GPU: imagefactory report --html DIR")
    return None


def tables_request(
    call: CommandContext,
    registry: str,
    *,
    capabilities: Sequence[str],
    inventory: Path | None,
    sweeps: tuple[Path, ...],
) -> TableRequest:
    """Return the values of `what_options`. Raises UsageError for an invalid capability."""
    from imagefactory.actions.sweep import find_sweeps
    from imagefactory.extras.site.tables import TableRequest
    from imagefactory.gpu.capability import parse_capability
    from imagefactory.schedulers.inventory import read_inventory

    named = [capability_of(text) for text in capabilities]
    there = read_inventory(inventory).known if inventory else ()
    return TableRequest(
        now=datetime.now(UTC),
        registry=registry,
        capabilities=(*named, *(parse_capability(gpu.capability) for gpu in there)),
        sweeps=sweeps,
        stored=find_sweeps(call.settings),
    )


def _read_tables(call: CommandContext, names: tuple[str, ...], request: TableRequest) -> TableData:
    from imagefactory.extras.site.tables import read_catalogued, read_tables
    from imagefactory.project import is_project
    from imagefactory.recipes.expand import select

    settings = call.settings
    if is_project(settings):
        factory = call.factory
        return read_tables(factory, select(factory.targets, names), request, call.progress)
    check_registry_has_targets(request.registry)
    return read_catalogued(settings, os.environ, names, request)


def check_registry_has_targets(registry: str) -> None:
    """Raises UsageError for --registry outside a project: only a signed catalog has targets by name there."""
    reject_conflict(
        registry,
        "--registry requires a project: elsewhere the images are those of the signed catalog",
        "remove --registry: the settings `catalogue` and `registry` say where the catalog is",
    )


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@targets_argument(required=False)
@click.option(
    "--html",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write a static site there: the matrix, a page for each image and each GPU.",
)
@click.option("--svg", "picture", type=_FILE, metavar="FILE", help="Write the matrix as one picture.")
@click.option(
    "--badge", type=_FILE, metavar="FILE", help="Write a badge of one TARGET: `verified on sm_80, sm_90`."
)
@what_options
@click.option("--force", is_flag=True, help="Write into a folder that has other files.")
@json_option
@click.pass_obj
def report(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    folder: Path | None,
    picture: Path | None,
    badge: Path | None,
    inventory: Path | None,
    capabilities: tuple[str, ...],
    sweeps: tuple[Path, ...],
    registry: str,
    force: bool,
    as_json: bool,
) -> None:
    """Show which image runs on which GPU: pages, a picture, a badge.

    The pages need no server.

    \b
    imagefactory report --html site                     open site/index.html in a browser
    imagefactory report 'pytorch-*' --svg matrix.svg    the matrix for a page of one's own
    imagefactory report pytorch-2.3-cu121 --badge verified.svg

    Of each image the site tells what was predicted beside what the suite said, each check's numbers, what is
    in it and what changed, the commands that fetch it and its submit file; of each GPU which images to use,
    and how the same check went across versions. It asks nothing of the network, and works without JavaScript.

    Outside of a factory it is made of the signed catalogue. Whose verdicts count, your trust says, as for
    `imagefactory tables`.
    """
    from imagefactory.extras.site.action import write_report
    from imagefactory.extras.site.matrix import matrix_gpus, matrix_rows
    from imagefactory.extras.site.pages import format_badge, format_picture, make_site
    from imagefactory.fs import replace_text

    if not (folder or picture or badge):
        raise UsageError(
            "argument-missing", "no output is given", hint="add --html DIR, --svg FILE or --badge FILE"
        )
    request = tables_request(call, registry, capabilities=capabilities, inventory=inventory, sweeps=sweeps)
    reported = _read(call, names, request)
    gc.freeze()  # it lives to the end: looking for garbage in it is a quarter of the time
    written = []
    if badge:
        if len(reported.images) != 1:
            raise UsageError(
                "option-conflict",
                f"--badge requires exactly one image, found {len(reported.images)}",
                hint="imagefactory report TARGET --badge FILE",
            )
        replace_text(badge, format_badge(reported.images[0]))
        written.append(badge)
    if picture:
        replace_text(picture, format_picture(matrix_rows(reported), matrix_gpus(reported)))
        written.append(picture)
    pages = 0
    if folder:
        pages = write_report(folder, dict(make_site(reported)), force=force)
        written.append(folder / "index.html")
    if as_json:
        return print_json(
            "report", {"images": len(reported.images), "files": [str(path) for path in written]}
        )
    count = len(reported.images)
    print_result(
        f"{count} image{'' if count == 1 else 's'} on {len(reported.capabilities)} compute capabilities"
    )
    for path in written:
        print_result(f"  {path}" + (f"  ({pages} files)" if path.name == "index.html" and pages else ""))
    if not reported.trusted:
        print_result("No key is trusted here, so nothing can be called verified.")
    return None


def _read(call: CommandContext, names: tuple[str, ...], request: TableRequest) -> ReportContents:
    from imagefactory.extras.site.action import read_catalogued_report, read_report
    from imagefactory.project import is_project
    from imagefactory.recipes.expand import select

    settings = call.settings
    if is_project(settings):
        factory = call.factory
        return read_report(factory, select(factory.targets, names), request, call.progress)
    check_registry_has_targets(request.registry)
    return read_catalogued_report(settings, os.environ, names, request)
