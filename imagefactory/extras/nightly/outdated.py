"""imagefactory watch."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from imagefactory.cli.output import Call, collecting, json_option, say, say_json, say_next, terminal_width
from imagefactory.cli.output import write as print_to
from imagefactory.errors import UsageError


@click.command()
@click.argument("names", metavar="[FAMILY|base:BASE]...", nargs=-1)
@click.option(
    "--write",
    is_flag=True,
    help="Write the changed locks, a row for each release, and the definitions of both; print a commit "
    "message for each family.",
)
@click.option(
    "--github",
    is_flag=True,
    help='Print families={"include":[...]}, a line for $GITHUB_OUTPUT: a job for each family and base '
    "in which --write changes something. The rest goes to stderr.",
)
@json_option
@click.pass_obj
def watch(call: Call, names: tuple[str, ...], write: bool, github: bool, as_json: bool) -> None:
    """Say what is newer outside than in recipes and locks. Default: all families and bases.

    \b
      release   a series of the framework with wheels or builds for a Python of the family's rows
      cuda      a CUDA that the newest row's series has builds for, and no row of it
      python    a Python that the newest release has wheels or builds for and no row uses
      lock      what moves where a lock is solved anew
      base      the same of a base's packages: Debian's security updates
      verdict   of an image in the store, that expires within 14 days

    What is built on a family is watched and moves with it. Nothing is changed without --write, which writes
    no row of a conda family and none for another CUDA; nothing is ever committed or pushed.

    Exit code 0 whether or not there is news.
    """
    from imagefactory.project import require_own
    from imagefactory.report.watch import commit_message, format_news, github_lines, news_json
    from imagefactory.stages.watch import find_units, watch_unit
    from imagefactory.stages.watch_write import Written, write_news

    if github and (as_json or write):
        other = "--json" if as_json else "--write"
        raise UsageError(
            "option-conflict", f"--github and {other} both write to stdout", hint="remove one of them"
        )
    if write:
        require_own(call.settings, "watch --write")
    factory, now = call.sound_factory, datetime.now(UTC)
    every, rows = [], []
    plain = not (github or as_json or write)
    with collecting(factory) as failures:
        units = find_units(factory, names)
        for unit in units:
            with failures.of(unit.name):
                news = watch_unit(factory, unit, now, call.progress)
                every.append(news)
                for fault in news.faults:
                    failures.add(fault)
                say(format_news(news, terminal_width()), unless=not plain)
                written = write_news(factory, news, call.progress) if write else Written(paths=())
                for fault in written.faults:
                    failures.add(fault)
                root, message = factory.settings.root_path, commit_message(news, written.rows, written.notes)
                files = [str(path.relative_to(root)) for path in written.paths]
                rows.append(news_json(news) | {"message": message, "written": files})
                if not plain and not as_json:
                    print_to(2, format_news(news))
                if written.paths:
                    title = [f"--- {news.unit.name}"] if len(units) > 1 else []
                    say("\n".join([*title, message]), unless=as_json)
        if as_json:
            say_json("watch", {"news": rows, "errors": failures.as_json()})
        if github:
            say(github_lines(every))
    moved = [news.unit.name for news in every if news.locks]
    if plain and moved:
        say_next("watch", *moved, "--write")
