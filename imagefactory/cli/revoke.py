"""imagefactory revoke."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

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
    from imagefactory.project import Factory
    from imagefactory.model import Target
    from imagefactory.oci.graph import Place
    from imagefactory.trust.keys import SigningKey


@click.command()
@click.argument("name", metavar=NAME, shell_complete=complete_targets)
@registry_option
@click.option("--why", required=True, metavar="TEXT", help="The reason, one line; everybody can read it.")
@click.option("--capability", default="", metavar="X.Y", callback=parse_option, help="Only on such GPUs.")
@click.option(
    "--verdict",
    "digests",
    multiple=True,
    metavar="DIGEST",
    help="Only this verdict, by its first digits (repeatable).",
)
@json_option
@click.pass_obj
def revoke(
    call: Call,
    /,
    *,
    name: str,
    place: str,
    why: str,
    capability: str,
    digests: tuple[str, ...],
    as_json: bool,
) -> None:
    """Take back an image's verdicts, and move its tags back.

    \b
    imagefactory revoke pytorch-2.3-cu121 --capability 8.0 --why "wrong sums on long rows"
    imagefactory revoke registry.example.org/gpu/pytorch@sha256:... --why "built on a broken base"

    TARGET is what its tag points to. Verdicts that are signed later count again. The tags go to the newest
    other candidate that is verified, and away where there is none. The catalogue is signed again, where there
    is one, and says who took back what, when and why.
    """
    from imagefactory.views.verdicts import format_promotion, format_revoke
    from imagefactory.stages.revoke import Revoking, follow, revoke
    from imagefactory.stages.sign import signing_key

    factory, now = call.factory, datetime.now(UTC)
    where, reference, target = _resolve_image(factory, name, place, capability)
    key = signing_key(factory, now)
    if key is None:
        raise CheckFailedError(
            "signing-key-missing",
            "a revocation must be signed, but no key signs on this machine",
            hint="imagefactory keys new NAME",
        )
    request = Revoking(
        place=where,
        wanted=reference,
        why=why,
        now=now,
        capability=capability,
        verdicts=digests,
        target=target.name,
    )
    result = revoke(factory, request, key, call.progress)
    say(format_revoke(result), unless=as_json)
    with collecting() as failures:
        moved = follow(factory, request, target, call.progress)
        for promotion in moved:
            say(format_promotion(promotion, terminal_width()), unless=as_json)
            for tag, fault in promotion.faults:
                failures.of(tag).add(fault)
        written: tuple[str, ...] = ()
        with failures.of("catalogue"):
            written = _publish(call, factory, key, now, _registry_of(name, place))
            for address in written:
                say(f"written: {address}", unless=as_json)
        if as_json:
            say_json(
                "revoke",
                {
                    "place": result.place,
                    "manifest": result.subject.manifest,
                    "revocation": result.digest,
                    "revoked": list(result.taken),
                    "catalogue": list(written),
                    "promotions": [promotion_json(promotion) for promotion in moved],
                    "errors": failures.as_json(),
                },
            )
    say_next("verify", target.name)


def _registry_of(name: str, registry: str) -> str:
    """Return the registry whose catalog lists an image: the named one, empty for the setting's."""
    from imagefactory.oci.store import parse_reference

    if "/" not in name:
        return registry
    where = parse_reference(name)
    path = where.repository.rpartition("/")[0]
    return f"{where.registry}/{path}" if path else where.registry


def _publish(call: Call, factory: Factory, key: SigningKey, now: datetime, registry: str) -> tuple[str, ...]:
    """Sign the catalogue again. Raises CheckFailedError with the command that does it later."""
    from imagefactory.errors import FactoryError
    from imagefactory.actions.publish import publish_again

    try:
        return publish_again(factory, key, now, registry, call.progress)
    except FactoryError as error:
        option = f" --registry {registry}" if registry else ""
        raise CheckFailedError(
            "publish-incomplete",
            f"the revocation is signed, but the catalog does not contain it yet: {error.message}",
            hint=f"sign the catalog again: imagefactory catalogue{option}",
        ) from error


def _resolve_image(factory: Factory, name: str, registry: str, capability: str) -> tuple[Place, str, Target]:
    """Return the place of an image, its tag or digest there, and its target."""
    from imagefactory.oci.candidates import plain_tag
    from imagefactory.oci.graph import read_manifest
    from imagefactory.oci.store import parse_reference
    from imagefactory.recipes.expand import select_one
    from imagefactory.actions.images import target_at
    from imagefactory.stages.pull import target_reference
    from imagefactory.actions.verdicts import place_of
    from imagefactory.trust.tags import pointer

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
