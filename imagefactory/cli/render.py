"""imagefactory render."""

from __future__ import annotations

import click

from imagefactory.cli.lock import refuse_orphans
from imagefactory.cli.output import (
    Call,
    choose_targets,
    collecting,
    json_option,
    say,
    say_json,
    say_next,
    targets_argument,
    write,
)
from imagefactory.errors import StaleError
from imagefactory.model import Outcome


@click.command()
@targets_argument(required=False)
@click.option("--check", is_flag=True, help="Write nothing; exit 4 if a committed file differs.")
@json_option
@click.pass_obj
def render(call: Call, names: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Write Dockerfile, apptainer.def and lock to definitions/TARGET/.

    Without TARGET, those that are known to have no solution are passed over.
    """
    from imagefactory.project import require_own
    from imagefactory.actions.definition import write_definition
    from imagefactory.actions.locked import lock_state

    require_own(call.settings, "render")
    factory = call.sound_factory
    chosen = choose_targets(factory, names)
    if not names:
        passed = [target.name for target in chosen if lock_state(factory, target) == Outcome.UNSOLVABLE]
        chosen = tuple(target for target in chosen if target.name not in passed)
        if passed:
            call.progress.note(f"without a solution, so without a definition: {', '.join(passed)}")
    written: list[str] = []
    stale: dict[str, list[str]] = {}
    with collecting(factory) as failures:
        for target in chosen:
            with failures.of(target.name):
                changes = write_definition(factory, target, check=check)
                if changes and check:
                    stale[target.name] = list(changes)
                elif changes:
                    written.append(target.name)
        if check and not names:
            with failures.of("definitions"):
                refuse_orphans(factory)
        if as_json:
            say_json("definitions", {"written": written, "stale": stale, "errors": failures.as_json()})
        elif failures.errors and not written:
            pass  # the errors have said it
        elif check and not stale:
            say(f"{len(chosen) - len(failures.errors)} definitions are as the recipes and locks give them")
        elif not check:
            say(f"wrote {', '.join(written)}" if written else "nothing to write: all definitions are current")
        for name, differences in stale.items():
            write(2, "\n".join([f"{name}:", *differences]))
        if stale:
            hint = "imagefactory render " + " ".join(stale)
            failures.add(
                StaleError("definition-outdated", f"outdated definitions: {', '.join(stale)}", hint=hint)
            )
    if not check and len(chosen) == 1:
        say_next("build", chosen[0].name)
