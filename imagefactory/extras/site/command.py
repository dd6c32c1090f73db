"""The report command, which shows which image runs on which GPU as pages, a picture or a badge."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import Call, json_option, say, say_json, targets_argument
from imagefactory.cli.tables import refuse_registry, tables_request, what_options
from imagefactory.errors import UsageError

if TYPE_CHECKING:
    from imagefactory.extras.site.action import Reported
    from imagefactory.extras.site.tables import TablesAsked

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
    call: Call,
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
    from imagefactory.fs import replace_text
    from imagefactory.report.html.badge import format_badge
    from imagefactory.extras.site.matrix import matrix_rows, shown_gpus
    from imagefactory.report.html.picture import format_picture
    from imagefactory.extras.site.pages import make_site
    from imagefactory.extras.site.action import write_report

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
        replace_text(picture, format_picture(matrix_rows(reported), shown_gpus(reported)))
        written.append(picture)
    pages = 0
    if folder:
        pages = write_report(folder, dict(make_site(reported)), force=force)
        written.append(folder / "index.html")
    if as_json:
        return say_json("report", {"images": len(reported.images), "files": [str(path) for path in written]})
    count = len(reported.images)
    say(f"{count} image{'' if count == 1 else 's'} on {len(reported.capabilities)} compute capabilities")
    for path in written:
        say(f"  {path}" + (f"  ({pages} files)" if path.name == "index.html" and pages else ""))
    if not reported.trusted:
        say("No key is trusted here, so nothing can be called verified.")
    return None


def _read(call: Call, names: tuple[str, ...], request: TablesAsked) -> Reported:
    from imagefactory.project import is_factory
    from imagefactory.recipes.expand import select
    from imagefactory.extras.site.action import read_catalogued_report, read_report

    settings = call.settings
    if is_factory(settings):
        factory = call.factory
        return read_report(factory, select(factory.targets, names), request, call.progress)
    refuse_registry(request.registry)
    return read_catalogued_report(settings, os.environ, names, request)
