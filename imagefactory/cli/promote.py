"""imagefactory promote."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    choose_targets,
    collecting,
    complete_targets,
    json_option,
    registry_option,
    say,
    say_json,
    say_next,
    terminal_width,
)
from imagefactory.cli.verdicts import NAME, refuse_registry
from imagefactory.errors import CheckFailedError

if TYPE_CHECKING:
    from imagefactory.project import Factory
    from imagefactory.model import Target
    from imagefactory.oci.graph import Place
    from imagefactory.actions.promote import Promotion


@click.command()
@click.argument("names", metavar=f"{NAME}...", nargs=-1, required=True, shell_complete=complete_targets)
@registry_option
@click.option("--dry-run", is_flag=True, help="Say what would move; move nothing.")
@json_option
@click.pass_obj
def promote(call: Call, names: tuple[str, ...], place: str, dry_run: bool, as_json: bool) -> None:
    """Let the tags of targets follow their verdicts.

    In the registry, else in the store on this machine.

    \b
    imagefactory promote pytorch-2.3-cu121
    imagefactory promote registry.example.org/gpu/pytorch@sha256:...

    2.3-cu121-sm80 points to the newest candidate that is verified for 8.0, 2.3-cu121 to the newest that is
    verified for all capabilities which the recipe requires. An image for CPUs alone needs no verdict: its tag
    points to the newest candidate. In the store here a build sets that one, so only
    the others move. Exit code 9 where no tag points to anything verified.

    Where [policy] has promotion-signatures, tags of a registry move once so many trusted keys approved: this
    adds an approval of yours, says who else must, and ends with 9 until then.
    """
    from imagefactory.views.verdicts import format_promotion
    from imagefactory.actions.images import Promoting
    from imagefactory.actions.promote import promote

    factory, now = call.sound_factory, datetime.now(UTC)
    results: list[dict[str, object]] = []
    with collecting(factory) as failures:
        for target, where, digest in _targets(factory, names, place):
            with failures.of(target.name):
                request = Promoting(target=target, place=where, now=now, dry_run=dry_run)
                result = promote(factory, request, call.progress)
                results.append(promotion_json(result))
                say(format_promotion(result, terminal_width(), dry_run=dry_run), unless=as_json)
                for _, fault in result.faults:
                    failures.add(fault)
                _insist(result, target, digest)
        if as_json:
            say_json("promote", {"dry_run": dry_run, "results": results, "errors": failures.as_json()})
    say_next("promote", *names) if dry_run else say_next("catalogue", "--dry-run")


def _targets(
    factory: Factory, names: tuple[str, ...], registry: str
) -> tuple[tuple[Target, Place, str], ...]:
    """Return each target, the place of its tags, and the named digest, if any."""
    from imagefactory.oci.graph import read_manifest
    from imagefactory.oci.store import parse_reference
    from imagefactory.actions.images import target_at
    from imagefactory.stages.platforms import plain_name
    from imagefactory.actions.verdicts import place_of

    targets: list[tuple[Target, Place, str]] = []
    for name in names:
        if "/" not in name:
            continue
        refuse_registry(name, registry)
        where = parse_reference(name)
        place = place_of(factory, where)
        digest = read_manifest(place, where.wanted).descriptor.digest
        targets.append((target_at(factory, place, digest), place, digest))
    plain = [name for name in names if "/" not in name]
    chosen = choose_targets(factory, tuple(plain)) if plain else ()
    # A tag for several platforms waits for those of the others.
    for target in sorted(chosen, key=lambda target: target.name == plain_name(target)):
        targets.append((target, place_of_target(factory, target, registry), ""))
    return tuple(targets)


def place_of_target(factory: Factory, target: Target, registry: str) -> Place:
    """Return the named or configured registry, else the local store."""
    from imagefactory.actions.verdicts import local_place, registry_of

    if registry or factory.settings.registry.value:
        return registry_of(factory, target.family, registry)
    return local_place(factory, target.family)


def _insist(result: Promotion, target: Target, digest: str) -> None:
    if waiting := [fate.tag for fate in result.fates if fate.missing]:
        raise CheckFailedError(
            "approval-missing",
            f"{', '.join(waiting)}: approvals are missing, see the table",
            hint=f"the owner of another trusted key runs: imagefactory promote {result.target}",
        )
    if not target.gpu and not result.proven:
        raise CheckFailedError(
            "image-not-pushed",
            f"no image of {result.target} is in {result.place}",
            hint=f"imagefactory build --push {result.target}",
        )
    hint = f"imagefactory verify {result.target}; imagefactory verdicts {result.target} shows what there is"
    if not result.proven:
        raise CheckFailedError(
            "not-verified", f"no image of {result.target} in {result.place} is verified", hint=hint
        )
    if digest and not any(fate.proven and fate.after == digest for fate in result.fates):
        raise CheckFailedError(
            "tag-missing", f"no tag of {result.target} points to {digest}: see the table", hint=hint
        )


def promotion_json(promotion: Promotion) -> dict[str, object]:
    """Return a promotion as JSON."""
    faults = {tag: error.message for tag, error in promotion.faults}
    return {
        "target": promotion.target,
        "place": promotion.place,
        "tags": [
            {
                "tag": fate.tag,
                "before": fate.before,
                "after": fate.before if fate.tag in faults else fate.after,
                "moved": fate.moved and fate.tag not in faults,
                "proven": fate.proven,
                "why": fate.why,
                "wanted": fate.wanted or fate.after,
                "approved": list(fate.approved),
                "missing": fate.missing,
                "fault": faults.get(fate.tag, ""),
            }
            for fate in promotion.fates
        ],
    }
