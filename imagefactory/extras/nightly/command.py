"""The commands `site nightly`, `recipe outdated` and `recipe update`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import click

from imagefactory.cli.arguments import Command, DurationType, section
from imagefactory.cli.output import (
    CommandContext,
    ErrorDocument,
    ErrorRow,
    error_json,
    exit_with_first_failure,
    explain,
    json_option,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    targets_argument,
    terminal_width,
    write_terminal,
)
from imagefactory.cli.sweeps import find_pool
from imagefactory.errors import ImagefactoryError, os_reason, printable, without_logins
from imagefactory.settings.choices import POOLS

if TYPE_CHECKING:
    from imagefactory.extras.nightly.changes import NightlyReport
    from imagefactory.extras.nightly.nights import CommandRunner
    from imagefactory.extras.nightly.outdated import RecipeNewsRow

Hook = Callable[["Mapping[str, object]"], None]
_DIRECTORY = click.Path(path_type=Path, file_okay=False)


class NightlyInstallDocument(TypedDict):
    """The systemd units that were written."""

    format: Literal["imagefactory.nightly-install/1"]
    files: list[str]


class RecipeOutdatedDocument(TypedDict):
    """What is newer than recipes and locks."""

    format: Literal["imagefactory.recipe-outdated/1"]
    results: list[RecipeNewsRow]
    errors: list[ErrorRow]


class RecipeUpdateDocument(TypedDict):
    """What was newer than recipes and locks, and the changed files."""

    format: Literal["imagefactory.recipe-update/1"]
    results: list[RecipeNewsRow]
    errors: list[ErrorRow]


@click.command(cls=Command)
@targets_argument(required=False)
@section("Run")
@click.option(
    "--scheduler",
    "pool",
    type=click.Choice(tuple(POOLS)),
    help="Verify on this cluster.  [default: on the GPU of this machine, if it has one]",
)
@click.option(
    "--wait-limit",
    "wait",
    type=DurationType(),
    metavar="TIME",
    help="How long to wait for the cluster. The next run collects later results.  [default: 6h]",
)
@click.option(
    "--install",
    type=_DIRECTORY,
    metavar="DIR",
    help="Write a systemd service and a timer that run this each night. They are not enabled.",
)
@section("Reports")
@click.option(
    "--html", type=_DIRECTORY, metavar="DIR", help="Write the HTML site of `report` to DIR, with this run."
)
@click.option(
    "--mail",
    metavar="COMMAND",
    help="Pipe the summary to this command if something was done or broke: 'mail -s nightly me'.",
)
@click.option(
    "--metrics",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.prom",
    help="Write metrics for the textfile collector of Prometheus.",
)
@click.option(
    "--webhook",
    metavar="URL|FILE",
    help="Post the report as JSON. If the address is secret, pass a FILE that contains it.",
)
@click.option(
    "--kept",
    "plan",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Only report what changed since the plan of `plan --keep FILE`.",
)
@click.option(
    "--github",
    is_flag=True,
    help="With --kept: print the text of an issue in Markdown, or nothing if nothing is broken.",
)
@json_option
@click.pass_obj
def nightly(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    pool: str | None,
    wait: timedelta | None,
    html: Path | None,
    mail: str | None,
    metrics: Path | None,
    webhook: str | None,
    install: Path | None,
    plan: Path | None,
    github: bool,
    as_json: bool,
) -> None:
    """Build, verify and publish what is due, from cron or a timer.

    \b
    imagefactory site nightly --scheduler htcondor
    imagefactory site nightly --scheduler htcondor --mail 'mail -s nightly me'
    imagefactory site nightly --install ~/.config/systemd/user

    It builds and pushes missing images, verifies cells without a verdict, moves tags, and publishes the
    catalog. Then it reports what was built and verified, what is broken and what is due. Only one run is
    active at a time.

    Exit code 0 if nothing is broken, else that of the earliest step that failed.
    """
    from imagefactory.actions.sweep import format_id
    from imagefactory.extras.nightly.changes import is_news
    from imagefactory.extras.nightly.night import NightlyRequest, run_nightly
    from imagefactory.extras.nightly.nights import (
        LOG,
        NightlyDependencies,
        allocate_reserve,
        create_nightly,
        last_nightly,
        nightly_lock,
    )
    from imagefactory.extras.nightly.view import format_nightly
    from imagefactory.serialize import format_value
    from imagefactory.verify.evidence import LocalEvidence

    options = {
        "--scheduler": pool,
        "--wait-limit": f"{int(wait.total_seconds())}s" if wait else None,
        "--html": str(html.absolute()) if html else None,
        "--mail": mail,
        "--metrics": str(metrics.absolute()) if metrics else None,
        "--webhook": webhook,
    }
    words = [*names, *(name for name, value in options.items() if value), *(["--install"] if install else ())]
    reject_conflict(
        wait and not pool,
        "--wait-limit requires --scheduler",
        "add --scheduler htcondor or remove --wait-limit",
    )
    reject_conflict(
        github and not plan, "--github requires --kept", "imagefactory site nightly --kept FILE --github"
    )
    reject_conflict(github and as_json, "--github and --json both write to stdout", "remove one of them")
    reject_conflict(
        plan and words,
        f"--kept and {words[0][:80] if words else ''} exclude each other",
        "remove one of them",
    )
    if install:
        return _install(call, names, install, options, as_json=as_json)
    if plan:
        return _changed(call, plan, github=github, as_json=as_json)
    settings = call.settings
    request = NightlyRequest(names=names, pool=pool or "", html=html)
    request = replace(request, wait=wait) if wait else request
    hook = _webhook(call, webhook)
    with _with_progress_log(mail, hook), nightly_lock(settings):
        project, last = call.factory, last_nightly(settings)
        directory = create_nightly(settings, format_id(datetime.now(UTC), os.urandom(2)))
        dependencies = NightlyDependencies(
            clock=lambda: datetime.now(UTC),
            pause=time.sleep,
            pools=find_pool,
            evidence=LocalEvidence(),
            run=_runner(settings.root_path, directory / LOG),
        )
        report = run_nightly(project, request, dependencies, directory, call.progress)
    log = f"log: {directory / LOG}"
    if mail and is_news(report, last):  # before stdout, which may be a file on a full disk
        _mail(mail, f"{format_nightly(report)}\n\n{log}\n")
    document = format_value(report)
    hook(document)
    allocate_reserve(settings)
    if metrics:
        _write_metrics(call, metrics, report)
    if as_json:
        print_json(document)
    else:
        print_result(f"{format_nightly(report, terminal_width())}\n\n{log}")
    if report.exit_code:
        raise click.exceptions.Exit(report.exit_code)
    return print_next_command("sweep", "list") if pool else print_next_command("report")


def _webhook(call: CommandContext, text: str | None) -> Hook:
    """Return a function that posts a document to --webhook. If posting fails, it only prints a warning."""
    from imagefactory.extras.nightly.nights import post_json, read_address

    url = read_address(text) if text else ""

    def post(document: Mapping[str, object]) -> None:
        if not url:
            return
        try:
            post_json(call.access, url, document)
        except ImagefactoryError as error:
            write_terminal(2, f"warning: {error.message}")

    return post


def _write_metrics(call: CommandContext, path: Path, report: NightlyReport) -> None:
    """Write the metrics. If the file cannot be written, print a warning."""
    from imagefactory.actions.read_catalog import cached_expiry
    from imagefactory.extras.nightly.view import format_metrics
    from imagefactory.fs import replace_text

    try:
        replace_text(path, format_metrics(report, cached_expiry(call.settings)))
    except OSError as error:
        write_terminal(2, f"warning: cannot write {path}: {os_reason(error)}")


@contextmanager
def _with_progress_log(mail: str | None, hook: Hook) -> Iterator[None]:
    """Report by mail and webhook that a run could not start: another is in progress, or the disk is full."""
    try:
        yield
    except (ImagefactoryError, OSError) as error:
        hook(
            ErrorDocument(
                format="imagefactory.error/1",
                errors=[error_json(error if isinstance(error, ImagefactoryError) else explain(error))],
            )
        )
        if mail:
            hint = f"\nhint: {error.hint}" if isinstance(error, ImagefactoryError) else ""
            _mail(mail, f"there was no nightly run on {datetime.now(UTC):%Y-%m-%d}: {error}{hint}\n")
        raise


def _runner(root: Path, log: Path) -> CommandRunner:
    """Return a function that runs this program and logs its output. The child ends with this process."""
    program = (sys.executable, "-P", "-m", "imagefactory", "-C", str(root), "--progress", "plain")

    def run(words: Sequence[str]) -> tuple[int, str]:
        with _open_issue(log) as file:
            _add(file, f"\n$ imagefactory {shlex.join(words)}\n")
            with subprocess.Popen(
                (*program, *words), stdout=subprocess.PIPE, stderr=file, text=True, stdin=subprocess.DEVNULL
            ) as step:
                try:
                    output = step.communicate()[0]
                except BaseException:
                    step.terminate()
                    raise
            _add(file, f"{output}exit code {step.returncode}\n")
        return step.returncode, output

    return run


def _open_issue(log: Path) -> FileIO:
    """Open the log to append.

    If the disk is full, open /dev/null, since a step is more important than its log.
    """
    try:
        return log.open("ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)


def _add(log: FileIO, text: str) -> None:
    with suppress(OSError):
        log.write(text.encode())


def _mail(command: str, text: str) -> None:
    """Pipe the text to the command. If the command fails, print a warning."""
    words = ("/bin/sh", "-c", command)
    plain = re.sub("(?m)^~", " ~", printable(text))  # some mail programs run a line of `~!COMMAND`
    process = subprocess.run(words, input=plain, stderr=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        output = without_logins(process.stderr).strip()
        write_terminal(2, f"warning: --mail ended with exit code {process.returncode}: {output}".rstrip(": "))


def _install(
    call: CommandContext,
    names: tuple[str, ...],
    directory: Path,
    options: dict[str, str | None],
    *,
    as_json: bool,
) -> None:
    from imagefactory.extras.nightly.units import enable_commands, format_units
    from imagefactory.fs import replace_all

    root = str(call.settings.root_path.absolute())
    options |= {"--webhook": _named(options["--webhook"])}
    words = [word for name, value in options.items() if value for word in (name, value)]
    command = (sys.executable, "-P", "-m", "imagefactory", "-C", root, "site", "nightly", *words, *names)
    files = format_units(root, command, os.environ)
    directory.mkdir(parents=True, exist_ok=True)
    replace_all({directory / name: text.encode() for name, text in files.items()})
    if as_json:
        return print_json(
            NightlyInstallDocument(
                format="imagefactory.nightly-install/1", files=[str(directory / name) for name in files]
            )
        )
    for name in files:
        print_result(f"wrote {directory / name}")
    return print_result(
        "\n".join(("nothing runs yet; enable it with:", *(f"  {line}" for line in enable_commands())))
    )


def _named(webhook: str | None) -> str:
    """Return the webhook for a unit, with the absolute path of a file. Raises UsageError if it is invalid."""
    from imagefactory.extras.nightly.nights import read_address

    if not webhook:
        return ""
    read_address(webhook)
    return webhook if "://" in webhook else str(Path(webhook).expanduser().absolute())


def _changed(call: CommandContext, plan: Path, *, github: bool, as_json: bool) -> None:
    from imagefactory.actions.sweep import format_id
    from imagefactory.extras.nightly.changes import NightlySteps, schedule_warning
    from imagefactory.extras.nightly.night import last_commit, nightly_since
    from imagefactory.extras.nightly.nights import (
        NIGHTLY_FILE,
        create_nightly,
        read_saved_plan,
        write_nightly,
    )
    from imagefactory.extras.nightly.view import format_issue, format_nightly
    from imagefactory.serialize import format_value

    project, now = call.factory, datetime.now(UTC)
    before, commit = read_saved_plan(plan), last_commit(project.settings.root_path)
    note = schedule_warning(commit, now) if commit and github else ""
    context = NightlySteps(
        directory="",  # it is created if this succeeds
        started=before.created,
        ended=now,
        place=before.registry,
        notes=(note,) if note else (),
    )
    report = nightly_since(project, before, context)
    directory = create_nightly(project.settings, format_id(now, os.urandom(2)))
    report = replace(report, directory=str(directory))
    write_nightly(directory / NIGHTLY_FILE, report)
    if as_json:
        print_json(format_value(report))
    elif github:
        if text := format_issue(report).rstrip():
            write_terminal(1, text)
    else:
        print_result(format_nightly(report, terminal_width()))


_units_argument = click.argument("names", metavar="[FAMILY|base:BASE]...", nargs=-1)


@click.command(cls=Command)
@_units_argument
@click.option(
    "--github",
    is_flag=True,
    help=(
        'Print families={"include":[...]} for $GITHUB_OUTPUT: one job for each family and base that '
        "`recipe update` would change. The rest goes to stderr."
    ),
)
@json_option
@click.pass_obj
def outdated(call: CommandContext, names: tuple[str, ...], github: bool, as_json: bool) -> None:
    """List what is newer than recipes and locks.

    \b
    imagefactory recipe outdated
    imagefactory recipe outdated pytorch base:bookworm

    It lists new releases of the framework (release), CUDA versions (cuda) and Python versions (python) that
    no row of the recipe has, packages that a new lock would change (lock, base), and verdicts that expire
    within 14 days (verdict). Nothing is changed. The exit code is 0 with and without news.
    """
    from imagefactory.extras.nightly.outdated import (
        commit_message,
        find_units,
        format_news,
        github_lines,
        news_json,
        watch_unit,
    )

    reject_conflict(github and as_json, "--github and --json both write to stdout", "remove one of them")
    plain = not (github or as_json)
    seen, rows = [], []
    project, now = call.factory, datetime.now(UTC)
    with exit_with_first_failure(project, names) as failures:
        for unit in find_units(project, names):
            with failures.of(unit.name):
                news = watch_unit(project, unit, now, call.progress)
                seen.append(news)
                for fault in news.faults:
                    failures.add(fault)
                print_result(format_news(news, terminal_width()), unless=not plain)
                rows.append(news_json(news, commit_message(news), []))
                if github:
                    write_terminal(2, format_news(news))
        if as_json:
            print_json(
                RecipeOutdatedDocument(
                    format="imagefactory.recipe-outdated/1", results=rows, errors=failures.as_json()
                )
            )
        if github:
            print_result(github_lines(seen))
    moved = [news.unit.name for news in seen if news.locks]
    if plain and moved:
        print_next_command("recipe", "update", *moved)


@click.command(cls=Command)
@_units_argument
@json_option
@click.pass_obj
def update(call: CommandContext, names: tuple[str, ...], as_json: bool) -> None:
    """Write newer releases and packages into recipes and locks.

    \b
    imagefactory recipe update pytorch
    imagefactory recipe update pytorch > message && git commit -aF message

    It updates locks, adds a row for each new release, renders both, and prints a commit message for each
    family. Without names it updates all families and bases. It adds no row to a conda family, and none for
    another CUDA version. Nothing is committed or pushed.
    """
    from imagefactory.extras.nightly.outdated import (
        commit_message,
        find_units,
        format_news,
        news_json,
        watch_unit,
        write_news,
    )
    from imagefactory.project import require_own_project

    require_own_project(call.settings, "recipe update")
    project, now = call.factory, datetime.now(UTC)
    root, rows = project.settings.root_path, []
    with exit_with_first_failure(project, names) as failures:
        units = find_units(project, names)
        for unit in units:
            with failures.of(unit.name):
                news = watch_unit(project, unit, now, call.progress)
                written = write_news(project, news, call.progress)
                for fault in (*news.faults, *written.faults):
                    failures.add(fault)
                message = commit_message(news, written.rows, written.notes)
                files = [str(path.relative_to(root)) for path in written.paths]
                rows.append(news_json(news, message, files))
                if not as_json:
                    write_terminal(2, format_news(news))
                if written.paths:
                    title = [f"--- {unit.name}"] if len(units) > 1 else []
                    print_result("\n".join([*title, message]), unless=as_json)
        if as_json:
            print_json(
                RecipeUpdateDocument(
                    format="imagefactory.recipe-update/1", results=rows, errors=failures.as_json()
                )
            )
