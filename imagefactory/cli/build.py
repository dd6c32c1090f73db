"""imagefactory build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Literal, NotRequired, TypeAlias, TypedDict

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import (
    CommandContext,
    ErrorRow,
    ImageRow,
    SifRow,
    artifact_json,
    choose_targets,
    confirm,
    exit_with_first_failure,
    has_gpu,
    has_scheduler,
    is_terminal,
    json_option,
    next_after_build,
    only_with,
    print_json,
    print_next_command,
    print_result,
    registry_option,
    reject_conflict,
    runner_option,
    targets_argument,
    write_terminal,
)
from imagefactory.cli.transfer import PushRow, pushed_json
from imagefactory.errors import (
    CheckFailedError,
    StaleError,
    UnbuiltError,
    UnknownAnswerError,
    UnsolvableError,
    UsageError,
)
from imagefactory.gpu.capability import AMD64
from imagefactory.model import Outcome
from imagefactory.plugins import load_extra
from imagefactory.settings.choices import ENGINES

if TYPE_CHECKING:
    from imagefactory.actions.build import BuildResult
    from imagefactory.actions.lock import LockOptions, LockResult, MissingFileRow
    from imagefactory.cli.output import TargetFailures
    from imagefactory.errors import OutdatedPackageRow
    from imagefactory.lock.changes import PublisherChangeRow
    from imagefactory.model import BaseSpec, Target
    from imagefactory.project import Project
    from imagefactory.verify.smoke import SmokeReportRow

    FileSearch: TypeAlias = tuple[Sequence[BaseSpec], Sequence[Target]] | None
    """The bases and targets whose locked files are searched, None for no search."""


class BuildRow(TypedDict):
    target: str
    store: str
    image: ImageRow | SifRow
    fresh: bool
    """Whether it was built now; false if nothing has changed."""
    published_base: bool
    """Whether the base was pulled from a registry."""
    smoke: SmokeReportRow | None
    """The report of the smoke test; null with `--no-test`."""
    gpu: str
    seconds: dict[str, float]
    """The duration of each step."""
    pushed: NotRequired[PushRow]


class BuildDocument(TypedDict):
    """The built images, and their smoke tests."""

    format: Literal["imagefactory.build/1"]
    results: list[BuildRow]
    errors: list[ErrorRow]


class BuiltWheelRow(TypedDict):
    name: str
    version: str
    path: str
    source: str
    """A file of the index, or an entry of the recipe."""


class BaseLockRow(TypedDict):
    base: str
    changed: bool


class TargetLockRow(TypedDict):
    target: str
    changed: bool
    outdated: list[OutdatedPackageRow]
    note: str
    """Companion packages that the recipe omits; empty for none."""
    built: list[BuiltWheelRow]
    """The wheels that `--build` built."""
    exclude_newer: str
    """The time after which no release was locked, also with exempt packages; empty for any age."""
    publishers_changed: list[PublisherChangeRow]
    """The wheels whose recorded publisher changed, or is no longer recorded."""
    layers_changed: NotRequired[bool | None]


class LockDocument(TypedDict):
    """The targets and bases that were locked."""

    format: Literal["imagefactory.lock/1"]
    results: list[BaseLockRow | TargetLockRow]
    errors: list[ErrorRow]


class LockCheckDocument(TypedDict):
    """The status of each lock and each layer lock: `ok`, `outdated`, `missing` or another word."""

    format: Literal["imagefactory.lock-check/1"]
    locks: dict[str, str]
    layers: dict[str, str]
    missing_files: NotRequired[list[MissingFileRow]]
    """With `--available`: the locked files that no archive, snapshot, index or channel has."""
    errors: list[ErrorRow]


class RenderDocument(TypedDict):
    """The definitions that were written, or that differ."""

    format: Literal["imagefactory.render/1"]
    written: list[str]
    outdated: dict[str, list[str]]
    """With `--check`: the differences of each target."""
    errors: list[ErrorRow]


@click.command(cls=Command)
@targets_argument(required=True)
@section("Build")
@click.option(
    "--engine",
    type=click.Choice(tuple(ENGINES)),
    help="Build with this engine. assemble needs no daemon and no root.  [default: the setting `engine`]",
)
@runner_option
@click.option(
    "--strict-base",
    "locked",
    is_flag=True,
    help="Stop if the mirror no longer has a locked package of the base.",
)
@click.option("--no-test", "no_smoke", is_flag=True, help="Skip the smoke test.")
@section("Push")
@click.option("--push", "pushes", is_flag=True, help="Push each image that passed its smoke test.")
@registry_option
@json_option
@click.pass_obj
def build(
    call: CommandContext,
    names: tuple[str, ...],
    engine: str | None,
    runner: str | None,
    locked: bool,
    no_smoke: bool,
    pushes: bool,
    place: str,
    as_json: bool,
) -> None:
    """Build images into the store and test each on the CPU.

    \b
    imagefactory build pytorch-2.3-cu121
    imagefactory build 'pytorch-*' --push

    After an interruption, run it again: finished steps are not repeated.
    """
    from imagefactory.access import registry_place
    from imagefactory.actions.build import BuildOptions
    from imagefactory.actions.transfer import PushOptions, check_push, make_image
    from imagefactory.views.images import format_built, format_pushed

    factory, progress = call.factory, call.progress
    if pushes and no_smoke:
        raise UsageError("option-conflict", "--push requires the smoke test", hint="remove --no-test")
    if place and not pushes:
        raise UsageError(
            "option-conflict", "--registry requires --push", hint="add --push or remove --registry"
        )
    push = PushOptions(registry=place, now=datetime.now(UTC)) if pushes else None
    if push is not None:
        registry_place(factory, place)
    options = BuildOptions(
        engine=engine or factory.settings.engine.value,
        runner=runner or factory.settings.runner.value,
        locked=locked,
        smoke=not no_smoke,
        before=partial(check_push, factory, push) if push else lambda: None,
    )
    selection = choose_targets(factory, names)
    results: list[BuildRow] = []
    with exit_with_first_failure(factory, names) as failures:

        def tell(built: BuildResult) -> None:
            results.append(_built_json(built, factory))
            print_result(format_built(built, factory.settings.store.value), unless=as_json)
            if built.report is not None and not built.report.passed:
                message = f"the image is built, but its smoke test failed: {built.report.failure}"
                hint = f"see the checks above{_or_qemu(built)}; the image stays in the store under its tag"
                text = f"{built.target.name}: {message}"
                failures.add(CheckFailedError("smoke-test-failed", text, hint=built.report.hint or hint))

        for target in selection:
            with failures.of(target.name):
                pushed = make_image(factory, target, options, push, tell, progress)
                if pushed is not None:
                    print_result(format_pushed(pushed), unless=as_json)
                    results[-1]["pushed"] = pushed_json(pushed)
        if as_json:
            print_json(
                BuildDocument(format="imagefactory.build/1", results=results, errors=failures.as_json())
            )
    words = next_after_build(
        [target.name for target in selection],
        [target.name for target in selection if target.gpu],
        gpu=has_gpu(),
        scheduler=has_scheduler(),
        registry=bool(factory.settings.registry.value) and not no_smoke,
        pushed=push is not None,
    )
    print_next_command(*words)


def _built_json(built: BuildResult, factory: Project) -> BuildRow:
    from imagefactory.verify.smoke import format_report

    return BuildRow(
        target=built.target.name,
        store=factory.settings.store.value,
        image=artifact_json(built.image),
        fresh=built.fresh,
        published_base=built.published_base,
        smoke=format_report(built.report) if built.report else None,
        gpu=built.report.gpu.value if built.report else "not-tested",
        seconds=dict(built.seconds),
    )


def _or_qemu(built: BuildResult) -> str:
    """Return a hint about qemu: PyTorch 2.15 crashes with a segmentation fault in 7.2, but not in 10.0."""
    from imagefactory.gpu.capability import can_emulate

    emulated = can_emulate(built.target.platform)
    return ", unless the emulator is at fault: try a newer qemu" if emulated else ""


# --- imagefactory lock


@click.command(cls=Command)
@targets_argument(required=False)
@section("What changes")
@click.option(
    "--upgrade-package",
    "-P",
    "update",
    multiple=True,
    metavar="PACKAGE",
    help="Upgrade this package (repeatable).",
)
@click.option("--upgrade", "-U", "update_all", is_flag=True, help="Upgrade all packages.")
@click.option(
    "--exclude-newer",
    metavar="WHEN",
    help='Lock no release after this date, or younger than this age, such as "7 days except numpy".',
)
@only_with(
    "wheels",
    click.option(
        "--build", is_flag=True, help="Build packages that have no wheel, and add them to the recipe."
    ),
)
@click.option(
    "--layers",
    "deep",
    is_flag=True,
    help="Also build the images and lock their layers. With --check, build them again and compare.",
)
@section("Checks and output")
@click.option("--check", is_flag=True, help="Change nothing; exit 4 if a lock is missing or outdated.")
@click.option(
    "--available",
    is_flag=True,
    help="With --check, also look for each locked file online; exit 9 if one is gone.",
)
@click.option("--explain", is_flag=True, help="If there is no solution, print the solver's full explanation.")
@click.option("--note", metavar="TEXT", help="Store this line in the lock of a conda target ('' removes it).")
@click.option(
    "--render",
    metavar="FORMAT",
    type=click.Choice(("explicit", "env", "conda-lock", "pixi", "pylock", "requirements")),
    help=(
        "Print the lock for other tools: explicit or env for conda, conda-lock, pixi, pylock for uv and pip, "
        "or requirements with hashes."
    ),
)
@json_option
@click.pass_obj
def lock(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    check: bool,
    available: bool,
    update: tuple[str, ...],
    update_all: bool,
    exclude_newer: str | None,
    deep: bool,
    note: str | None,
    render: str | None,
    explain: bool,
    as_json: bool,
    build: bool = False,
) -> None:
    """Lock the packages of targets and bases.

    \b
    imagefactory lock pytorch-2.3-cu121
    imagefactory lock pytorch-2.3-cu121 --upgrade-package numpy
    imagefactory lock --check
    imagefactory lock --check --available   also look for the files online
    imagefactory lock                       all targets and bases

    A lock whose recipe did not change is not solved again. Other locks change as little as possible.
    """
    from imagefactory.actions.definition import layers_state
    from imagefactory.actions.lock import LockOptions, frozen_state, lock_base, parents_first
    from imagefactory.actions.locked import base_state, holding, lock_state
    from imagefactory.lock.changes import publisher_changes
    from imagefactory.project import require_own_project
    from imagefactory.recipes.edit import omitted_companions
    from imagefactory.recipes.values import parse_cutoff
    from imagefactory.views.images import format_relock

    of_targets = _check_no_bases(names)
    option = "--explain" if explain else "--note"
    reject_conflict(
        check and (update or update_all),
        "--check and --upgrade-package exclude each other",
        "remove one of them",
    )
    reject_conflict(available and not check, "--available requires --check", "add --check")
    reject_conflict(
        (check or render) and exclude_newer is not None,
        "--exclude-newer excludes --check and --render",
        "remove one of them",
    )
    reject_conflict(
        build and (check or render),
        "--build and --check or --render exclude each other",
        "remove one of them",
    )
    reject_conflict(check and note is not None, "--check and --note exclude each other", "remove one of them")
    reject_conflict(
        render and (check or update or update_all or note is not None),
        "--render prints the current lock and changes nothing",
        "lock first, then run --render",
    )
    reject_conflict(
        deep and (not of_targets or render),
        "--layers requires targets and excludes --render",
        "imagefactory lock --layers TARGET",
    )
    reject_conflict(render and as_json, "--render prints a file, not JSON", "remove --json")
    reject_conflict(
        (explain or note is not None) and not of_targets,
        f"{option} requires a target",
        f"imagefactory lock TARGET {option}",
    )
    if exclude_newer is not None:
        parse_cutoff(exclude_newer, datetime.now(UTC))  # an invalid one stops before the first solve
    if not check and not render:
        require_own_project(call.settings, "lock")
    if render:
        return _render(call, names, render)
    factory, progress = call.factory, call.progress
    selection = choose_targets(factory, of_targets) if of_targets or not names else ()
    bases = _select_bases(factory, names, () if update else selection)
    if check:
        states = {f"base:{b.name}": base_state(factory, b) for b in bases}
        states |= {t.name: frozen_state(factory, t, lock_state(factory, t)) for t in selection}
        layers = {t.name: state for t in selection if (state := layers_state(factory, t))}
        of_layers = selection if deep else ()
        search: FileSearch = None
        if available:
            below = {base.name: base for base in [*bases, *map(factory.base_of, selection)]}
            search = tuple(below.values()), selection
        return _check(call, factory, names, states, layers, deep=of_layers, search=search, as_json=as_json)
    options = LockOptions(update=update, update_all=update_all, note=note, exclude_newer=exclude_newer)
    if update and not names:
        bases, selection = [], holding(factory, selection, update)
    reject_conflict(
        update and bases,
        f"--upgrade-package does not apply to base:{bases[0].name if bases else ''}: a base is updated as a "
        "whole",
        "use --upgrade",
    )
    if deep:
        from imagefactory.actions.lock import lock_target_layers
    results: list[BaseLockRow | TargetLockRow] = []
    with exit_with_first_failure(factory, names) as failures:
        for base in bases:
            with failures.of(f"base:{base.name}"):
                changed = lock_base(factory, base, progress, update=update_all)
                results.append(BaseLockRow(base=base.name, changed=changed))
                state = "locked" if changed else "unchanged"
                if base.image:
                    state = f"pinned by its digest; to move it, write another one at {base.where}"
                print_result(f"base:{base.name}: {state}", unless=as_json)
        changed_names = set()
        for target in parents_first(factory, selection):
            with (
                failures.of(target.name),
                _with_lock_hints(factory, target, explain=explain, as_json=as_json),
            ):
                if lacking := omitted_companions(target):
                    progress.note(lacking)
                relock, wheels = _lock(call, factory, target, options, build=build, as_json=as_json)
                relayered = lock_target_layers(factory, target, progress) if deep else None
                row = TargetLockRow(
                    target=target.name,
                    changed=relock.before != relock.after,
                    exclude_newer=str(relock.after.cutoff or ""),
                    outdated=[package.as_json() for package in relock.behind],
                    note=lacking,
                    built=wheels,
                    publishers_changed=[
                        change.as_json() for change in publisher_changes(relock.before, relock.after)
                    ],
                )
                if deep:
                    row["layers_changed"] = relayered
                results.append(row)
                changed_names |= {target.name} if relock.before != relock.after else set()
                print_result(format_relock(relock), unless=as_json)
                if deep:
                    print_result(
                        f"{target.name}: layers {'locked' if relayered else 'unchanged'}", unless=as_json
                    )
        above = [t for t in factory.targets if t.on in changed_names and t not in selection]
        above = [t for t in above if lock_state(factory, t) != "ok"]
        if above:
            print_result(
                f"also lock what extends these: imagefactory lock {' '.join(t.name for t in above)}",
                unless=as_json,
            )
        if as_json:
            print_json(LockDocument(format="imagefactory.lock/1", results=results, errors=failures.as_json()))
    if changed_names:
        print_next_command("build", *sorted(changed_names)) if names else print_next_command("render")
    elif len(selection) == 1:
        print_next_command("build", selection[0].name)
    return None


def _lock(
    call: CommandContext,
    factory: Project,
    target: Target,
    options: LockOptions,
    *,
    build: bool,
    as_json: bool,
) -> tuple[LockResult, list[BuiltWheelRow]]:
    """Lock a target. Build packages without a wheel with --build, or if the user confirms it.

    Return the lock, and the built wheels as JSON.
    """
    from imagefactory.actions.lock import lock_target

    build_and_lock = load_extra("wheels.lock:build_and_lock")
    if not build:
        try:
            return lock_target(factory, target, options, call.progress), []
        except UnbuiltError as error:
            possible = all(row["possible"] for row in error.packages)
            if as_json or not possible or not build_and_lock or not is_terminal():
                raise
            if not confirm(f"{error.message}\nBuild them now?"):
                raise
    result = build_and_lock(
        factory, target, options, call.progress, lambda line: print_result(line, unless=as_json)
    )
    return result.relock, [
        BuiltWheelRow(name=wheel.name, version=wheel.version, path=wheel.path, source=wheel.source)
        for wheel, _ in result.wheels
    ]


def _render(call: CommandContext, names: tuple[str, ...], kind: str) -> None:
    """Print the lock of one target in a format of another tool.

    A note lists what it cannot contain.
    """
    from imagefactory.actions.lock import render_lock

    factory = call.factory
    selection = choose_targets(factory, _check_no_bases(names)) if _check_no_bases(names) else ()
    if len(selection) != 1 or len(names) != 1:
        files = {"env": "environment.yml", "conda-lock": "conda-lock.yml", "pixi": "pixi.lock"}
        file = files.get(kind, "pylock.toml" if kind == "pylock" else f"{kind}.txt")
        raise UsageError(
            "option-conflict",
            "--render requires exactly one target",
            hint=f"run imagefactory lock TARGET --render {kind} > {file}",
        )
    text, left_out = render_lock(factory, selection[0], kind)
    print_result(text.removesuffix("\n"))
    if left_out:
        call.progress.note(left_out)


@contextmanager
def _with_lock_hints(factory: Project, target: Target, *, explain: bool, as_json: bool) -> Iterator[None]:
    """With --explain, print the solver's explanation of this run or of the recorded run."""
    from imagefactory.actions.locked import lock_state, read_unsolvable_reason

    known = explain and lock_state(factory, target) == Outcome.UNSOLVABLE
    if known and (reason := read_unsolvable_reason(factory, target)):
        print_result(reason.tree or reason.reason, unless=as_json)
        raise UnsolvableError(
            "no-solution", f"{target.name}: {reason.reason}", hint=reason.hint, tree=reason.tree
        )
    try:
        yield
    except UnsolvableError as error:
        if explain:
            print_result(error.tree or error.message, unless=as_json)
        elif error.tree.count("\n") > 1 and "--explain" not in error.hint:
            more = f"imagefactory lock {target.name} --explain prints the solver's whole account"
            error.hint = f"{error.hint}; {more}" if error.hint else more
        raise


def _check(
    call: CommandContext,
    factory: Project,
    names: tuple[str, ...],
    states: dict[str, str],
    layers: dict[str, str],
    *,
    deep: Sequence[Target],
    search: FileSearch,
    as_json: bool,
) -> None:
    """Print the states of locks and layers, and rebuild the layers in `deep`. `search` looks for files.

    Exits with the code of StaleError unless all match the recipes. A recorded target without a solution
    matches its recipe as long as the record is valid.
    """
    if deep:
        from imagefactory.actions.lock import check_target_layers

    from imagefactory.actions.locked import TO_BUILD

    unsolvable = [name for name, state in states.items() if state == Outcome.UNSOLVABLE]
    bad = {name: state for name, state in states.items() if state not in ("ok", Outcome.UNSOLVABLE)}
    with exit_with_first_failure(factory, names) as failures:
        if not names:
            with failures.of("lockfiles"):
                check_no_orphans(factory)
        if bad:
            listing = ", ".join(f"{name} ({state})" for name, state in bad.items())
            hint = "run imagefactory lock " + " ".join(bad)
            hint += " --build" if TO_BUILD in bad.values() else ""
            failures.of("lockfiles").add(StaleError("lock-outdated", f"outdated locks: {listing}", hint=hint))
        old = {name: state for name, state in layers.items() if state != "ok"}
        if old:
            listing = ", ".join(f"{name} ({state})" for name, state in old.items())
            hint = "run imagefactory lock --layers " + " ".join(old)
            failures.of("lockfiles").add(
                StaleError("layer-lock-outdated", f"outdated layer locks: {listing}", hint=hint)
            )
        for target in [target for target in deep if target.name not in {**bad, **old}]:
            with failures.of(target.name):
                check_target_layers(factory, target, call.progress)
                print_result(f"{target.name}: all layers were rebuilt and match the lock", unless=as_json)
        missing = _check_available(call, factory, search, failures) if search else ()
        if as_json:
            document = LockCheckDocument(
                format="imagefactory.lock-check/1",
                locks=states,
                layers=layers,
                errors=failures.as_json(),
            )
            if search:
                document["missing_files"] = list(missing)
            print_json(document)
        elif not failures.errors:
            known = f"; known to have no solution: {', '.join(unsolvable)}" if unsolvable else ""
            count = len(states) - len(unsolvable)
            available = ", and all files are available" if search else ""
            print_result(f"{count} lock{' is' if count == 1 else 's are'} current{available}{known}")


def _check_available(
    call: CommandContext,
    factory: Project,
    search: tuple[Sequence[BaseSpec], Sequence[Target]],
    failures: TargetFailures,
) -> Sequence[MissingFileRow]:
    """Return the locked files that are gone, and add the errors: gone files, places that cannot be read."""
    from imagefactory.actions.lock import check_available

    result = check_available(factory, *search, call.progress)
    if result.missing:
        rows = [f"  {row['file']} ({', '.join(row['locks'])})" for row in result.missing]
        names = " ".join(dict.fromkeys(name for row in result.missing for name in row["locks"]))
        failures.of("locked files").add(
            CheckFailedError(
                "locked-files-unavailable",
                f"no reachable place has {len(rows)} locked files:\n" + "\n".join(rows),
                hint=f"lock newer packages: imagefactory lock --upgrade {names}; for files of Debian, set "
                "debian-snapshot",
            )
        )
    for error in result.unknown:
        failures.of("locked files").add(
            UnknownAnswerError(
                "availability-unknown", f"not all files were checked: {error.message}", hint=error.hint
            )
        )
    return result.missing


def check_no_orphans(factory: Project) -> None:
    """Raise StaleError for locks and definitions without a recipe."""
    from imagefactory.actions.locked import orphans

    paths = [str(path.relative_to(factory.settings.root_path)) for path in orphans(factory)]
    if paths:
        raise StaleError(
            "lock-orphaned",
            f"no recipe defines {', '.join(paths)}",
            hint=f"delete them: rm -r {' '.join(paths)}",
        )


def _check_no_bases(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if not name.startswith("base:"))


def _select_bases(factory: Project, names: tuple[str, ...], selection: Sequence[Target]) -> list[BaseSpec]:
    """Return the named bases, and those to which recipes of the chosen targets add packages or a platform."""
    base_names = [name.removeprefix("base:") for name in names if name.startswith("base:")]
    known = {base.name: base for base in factory.bases}
    unknown = [name for name in base_names if name not in known]
    if unknown:
        raise UsageError(
            "base-unknown", f"there is no base '{unknown[0]}'", hint=f"the bases are {', '.join(known)}"
        )
    own = [t.base for t in selection if (base := known[t.base]).on or base.platform != AMD64]
    return [known[name] for name in dict.fromkeys((*base_names, *own))] if names else list(factory.bases)


# --- imagefactory render


@click.command(cls=Command)
@targets_argument(required=False)
@click.option("--check", is_flag=True, help="Write nothing; exit 4 if a committed file differs.")
@json_option
@click.pass_obj
def render(call: CommandContext, names: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Write Dockerfiles and definition files to definitions/.

    \b
    imagefactory render pytorch-2.3-cu121
    imagefactory render --check

    Each target has a directory with Dockerfile, apptainer.def and its lock. Without TARGET, targets that
    have no solution are skipped.
    """
    from imagefactory.actions.definition import write_definition
    from imagefactory.actions.locked import lock_state
    from imagefactory.project import require_own_project

    require_own_project(call.settings, "render")
    factory = call.factory
    selection = choose_targets(factory, names)
    if not names:
        passed = [target.name for target in selection if lock_state(factory, target) == Outcome.UNSOLVABLE]
        selection = tuple(target for target in selection if target.name not in passed)
        if passed:
            call.progress.note(f"skipped, because they have no solution: {', '.join(passed)}")
    written: list[str] = []
    stale: dict[str, list[str]] = {}
    with exit_with_first_failure(factory, names) as failures:
        for target in selection:
            with failures.of(target.name):
                changes = write_definition(factory, target, check=check)
                if changes and check:
                    stale[target.name] = list(changes)
                elif changes:
                    written.append(target.name)
        if check and not names:
            with failures.of("definitions"):
                check_no_orphans(factory)
        if as_json:
            print_json(
                RenderDocument(
                    format="imagefactory.render/1",
                    written=written,
                    outdated=stale,
                    errors=failures.as_json(),
                )
            )
        elif failures.errors and not written:
            pass  # the errors have said it
        elif check and not stale:
            count = len(selection) - len(failures.errors)
            print_result(f"{count} definition{' is' if count == 1 else 's are'} current")
        elif not check:
            print_result(
                f"wrote {', '.join(written)}" if written else "nothing to write: all definitions are current"
            )
        for name, differences in stale.items():
            write_terminal(2, "\n".join([f"{name}:", *differences]))
        if stale:
            hint = "run imagefactory render " + " ".join(stale)
            failures.add(
                StaleError("definition-outdated", f"outdated definitions: {', '.join(stale)}", hint=hint)
            )
    if not check and len(selection) == 1:
        print_next_command("build", selection[0].name)
