"""imagefactory revoke."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from imagefactory.cli.output import (
    Call,
    collecting,
    complete_targets,
    json_option,
    registry_option,
    say,
    say_json,
    say_next,
    terminal_width,
)
from imagefactory.cli.promote import place_of_target, promotion_json
from imagefactory.cli.verdicts import NAME, parse_option, refuse_registry
from imagefactory.errors import CheckFailedError

if TYPE_CHECKING:
    from imagefactory.factory import Factory
    from imagefactory.model import Target
    from imagefactory.oci.graph import Place


@click.command()
@click.argument("name", metavar=NAME, shell_complete=complete_targets)
@registry_option
@click.option("--why", required=True, metavar="TEXT", help="The reason, one line; everybody can read it.")
@click.option("--capability", default="", metavar="X.Y", callback=parse_option, help="Only on such GPUs.")
@click.option(
    "--verdict",
    "chosen",
    multiple=True,
    metavar="DIGEST",
    help="Only this verdict, by its first digits (repeatable).",
)
@json_option
@click.pass_obj
def revoke(call: Call, /, name: str, place: str, as_json: bool, **options: Any) -> None:
    """Take back an image's verdicts, and move its tags back.

    \b
    imagefactory revoke pytorch-2.3-cu121 --capability 8.0 --why "wrong sums on long rows"
    imagefactory revoke registry.example.org/gpu/pytorch@sha256:... --why "built on a broken base"

    TARGET is what its tag points to. Verdicts that are signed later count again. The tags go to the newest
    other candidate that is verified, and away where there is none.
    """
    from imagefactory.report.verdicts import format_promotion, format_revoke
    from imagefactory.stages.revoke import Revoking, follow, revoke
    from imagefactory.stages.sign import signing_key

    factory, now = call.factory, datetime.now(UTC)
    where, wanted, target = _one(factory, name, place, options["capability"])
    key = signing_key(factory)
    if key is None:
        raise CheckFailedError(
            "a revocation has to be signed, and this machine holds no key", hint="imagefactory keys new NAME"
        )
    asked = Revoking(
        place=where,
        wanted=wanted,
        why=options["why"],
        now=now,
        capability=options["capability"],
        verdicts=options["chosen"],
    )
    done = revoke(factory, asked, key, call.progress)
    say(format_revoke(done), unless=as_json)
    with collecting() as failures:
        moved = follow(factory, asked, target, call.progress)
        for promotion in moved:
            say(format_promotion(promotion, terminal_width()), unless=as_json)
            for tag, fault in promotion.faults:
                failures.of(tag).add(fault)
        if as_json:
            say_json(
                "revoke",
                {
                    "place": done.place,
                    "manifest": done.subject.manifest,
                    "revocation": done.digest,
                    "revoked": list(done.taken),
                    "promotions": [promotion_json(promotion) for promotion in moved],
                    "errors": failures.as_json(),
                },
            )
    say_next("verify", target.name)


def _one(factory: Factory, name: str, registry: str, capability: str) -> tuple[Place, str, Target]:
    """Where an image lies, its tag or digest there, and its target."""
    from imagefactory.oci.candidates import plain_tag
    from imagefactory.oci.graph import read_manifest
    from imagefactory.oci.store import parse_reference
    from imagefactory.recipes.expand import select_one
    from imagefactory.stages.candidates import target_at
    from imagefactory.stages.pull import target_reference
    from imagefactory.stages.verdicts import place_of
    from imagefactory.verdicts.tags import pointer

    if "/" in name:
        refuse_registry(name, registry)
        where = parse_reference(name)
        place = place_of(factory, where)
        digest = read_manifest(place, where.wanted).descriptor.digest
        return place, digest, target_at(factory, place, digest)
    if ":" in name or "@" in name:
        target, where = target_reference(factory, name, registry)
        return place_of(factory, where), where.wanted, target
    target = select_one(factory.targets, name)
    plain = plain_tag(target)
    return (
        place_of_target(factory, target, registry),
        pointer(plain, capability) if capability else plain,
        target,
    )
