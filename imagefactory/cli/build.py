"""imagefactory build."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    choose_targets,
    collecting,
    json_option,
    made_json,
    registry_option,
    runner_option,
    say,
    say_json,
    say_next,
    targets_argument,
)
from imagefactory.cli.transfer import pushed_json
from imagefactory.errors import CheckFailedError, UsageError
from imagefactory.settings.choices import ENGINES

if TYPE_CHECKING:
    from imagefactory.project import Factory
    from imagefactory.actions.build import Built


@click.command()
@targets_argument(required=True)
@click.option(
    "--engine",
    type=click.Choice(tuple(ENGINES)),
    help="What builds the image; assemble needs no daemon and no root.  [default: the setting `engine`]",
)
@runner_option
@click.option("--locked", is_flag=True, help="Stop if a locked package of the base is gone from the mirror.")
@click.option("--no-smoke", is_flag=True, help="Do not start and try the image.")
@click.option("--push", "pushes", is_flag=True, help="Push each image whose smoke test passed.")
@registry_option
@json_option
@click.pass_obj
def build(
    call: Call,
    names: tuple[str, ...],
    engine: str | None,
    runner: str | None,
    locked: bool,
    no_smoke: bool,
    pushes: bool,
    place: str,
    as_json: bool,
) -> None:
    """Build images into the store, and try each one on the CPU.

    Run it again after an interruption: what is done is kept.
    """
    from imagefactory.access import registry_place
    from imagefactory.views.images import format_built
    from imagefactory.report.registries import format_pushed
    from imagefactory.actions.build import BuildOptions
    from imagefactory.actions.transfer import PushOptions, check_push
    from imagefactory.workflow.make import Making, make_image

    factory, progress = call.sound_factory, call.progress
    if pushes and no_smoke:
        raise UsageError("option-conflict", "--push requires the smoke test", hint="remove --no-smoke")
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
    chosen = choose_targets(factory, names)
    results: list[dict[str, object]] = []
    with collecting(factory) as failures:

        def tell(built: Built) -> None:
            results.append(_built_json(built, factory))
            say(format_built(built, factory.settings.store.value), unless=as_json)
            if built.report is not None and not built.report.passed:
                message = f"the image is built, but its smoke test failed: {built.report.failure}"
                hint = f"see the checks above{_or_qemu(built)}; the image stays in the store under its tag"
                text = f"{built.target.name}: {message}"
                failures.add(CheckFailedError("smoke-test-failed", text, hint=built.report.hint or hint))

        request = Making(build=options, push=push, built=tell)
        for target in chosen:
            with failures.of(target.name):
                pushed = make_image(factory, target, request, progress)
                if pushed is not None:
                    say(format_pushed(pushed), unless=as_json)
                    results[-1]["pushed"] = pushed_json(pushed)
        if as_json:
            say_json("build", {"results": results, "errors": failures.as_json()})
    if push is None and factory.settings.registry.value and not no_smoke:
        say_next("push", *(target.name for target in chosen))
    elif on_gpus := [target.name for target in chosen if target.gpu]:
        say_next("verify", *on_gpus)
    elif push is None:
        say_next("run", chosen[0].name, "--", "python")
    else:
        say_next("promote", *(target.name for target in chosen))


def _built_json(built: Built, factory: Factory) -> dict[str, object]:
    from imagefactory.verify.smoke_record import format_report

    return {
        "target": built.target.name,
        "store": factory.settings.store.value,
        "image": made_json(built.image),
        "fresh": built.fresh,
        "published_base": built.published_base,
        "smoke": format_report(built.report) if built.report else None,
        "gpu": built.report.gpu.value if built.report else "not-tested",
        "seconds": dict(built.seconds),
    }


def _or_qemu(built: Built) -> str:
    """Return a hint about qemu: 7.2 ends PyTorch 2.15 by a segmentation fault, 10.0 does not."""
    from imagefactory.gpu.platforms import emulated_here

    emulated = emulated_here(built.target.platform)
    return ", unless the emulator is at fault: try a newer qemu" if emulated else ""
