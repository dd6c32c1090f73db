"""Commands that move tags by verdicts, take verdicts back, and mend a registry's lists of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from imagefactory.cli.output import Call, collecting, complete_targets, json_option, say, say_json
from imagefactory.cli.registries import registry_option
from imagefactory.cli.verdicts import NAME, parse_option, refuse_registry
from imagefactory.errors import CheckFailedError

if TYPE_CHECKING:
    from imagefactory.factory import Factory
    from imagefactory.model import Target
    from imagefactory.oci.graph import Place
    from imagefactory.promoting import Promotion

# --- promote -------------------------------------------------------------------------------------


@click.command()
@click.argument("names", metavar=f"{NAME}...", nargs=-1, required=True, shell_complete=complete_targets)
@registry_option
@click.option("--dry-run", is_flag=True, help="Say what would move; move nothing.")
@json_option
@click.pass_obj
def promote(call: Call, names: tuple[str, ...], place: str, dry_run: bool, as_json: bool) -> None:
    """Let the tags of targets follow their verdicts, in the registry, else in the store on this machine.

    \b
    imagefactory promote pytorch-2.3-cu121
    imagefactory promote registry.example.org/gpu/pytorch@sha256:...

    2.3-cu121-sm80 points to the newest candidate that is verified for 8.0, 2.3-cu121 to the newest that is
    verified for all capabilities which the recipe requires. In the store here a build sets that one, so only
    the others move. Exit code 9 where no tag points to anything verified.
    """
    from imagefactory.promoting import Promoting, promote
    from imagefactory.report.verdict_table import format_promotion

    factory, now = call.factory, datetime.now(UTC)
    results: list[dict[str, object]] = []
    with collecting() as failures:
        for target, where, digest in _targets(factory, names, place):
            with failures.of(target.name):
                wanted = Promoting(target=target, place=where, now=now, dry_run=dry_run)
                done = promote(factory, wanted, call.progress)
                results.append(promotion_json(done))
                say(format_promotion(done, dry_run=dry_run), unless=as_json)
                for _, fault in done.faults:
                    failures.add(fault)
                _insist(done, digest)
        if as_json:
            say_json("promote", {"dry_run": dry_run, "results": results, "errors": failures.as_json()})


def _targets(
    factory: Factory, names: tuple[str, ...], registry: str
) -> tuple[tuple[Target, Place, str], ...]:
    """Each target, where its tags are, and the digest that was named, if any."""
    from imagefactory.oci.graph import read_manifest
    from imagefactory.oci.store import parse_reference
    from imagefactory.promoting import target_at
    from imagefactory.recipes.expand import select
    from imagefactory.verdicts import place_of

    found: list[tuple[Target, Place, str]] = []
    for name in names:
        if "/" not in name:
            continue
        refuse_registry(name, registry)
        where = parse_reference(name)
        place = place_of(factory, where)
        digest = read_manifest(place, where.wanted).descriptor.digest
        found.append((target_at(factory, place, digest), place, digest))
    plain = [name for name in names if "/" not in name]
    for target in select(factory.targets, plain) if plain else ():
        found.append((target, _place(factory, target, registry), ""))
    return tuple(found)


def _place(factory: Factory, target: Target, registry: str) -> Place:
    """The registry that is named or set, else the store here."""
    from imagefactory.verdicts import local_place, registry_of

    if registry or factory.settings.registry.value:
        return registry_of(factory, target.family, registry)
    return local_place(factory, target.family)


def _insist(done: Promotion, digest: str) -> None:
    hint = f"imagefactory verify {done.target}; imagefactory verdicts {done.target} shows what there is"
    if not done.proven:
        raise CheckFailedError(f"no image of {done.target} in {done.place} is verified", hint=hint)
    if digest and not any(fate.proven and fate.after == digest for fate in done.fates):
        raise CheckFailedError(f"no tag of {done.target} points to {digest}: see the table", hint=hint)


def promotion_json(done: Promotion) -> dict[str, object]:
    """A promotion for programs."""
    faults = {tag: error.message for tag, error in done.faults}
    return {
        "target": done.target,
        "place": done.place,
        "tags": [
            {
                "tag": fate.tag,
                "before": fate.before,
                "after": fate.before if fate.tag in faults else fate.after,
                "moved": fate.moved and fate.tag not in faults,
                "proven": fate.proven,
                "why": fate.why,
                "fault": faults.get(fate.tag, ""),
            }
            for fate in done.fates
        ],
    }


# --- revoke --------------------------------------------------------------------------------------


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
    """Take back the verdicts of an image, by a signed statement, and move its tags back.

    \b
    imagefactory revoke pytorch-2.3-cu121 --capability 8.0 --why "wrong sums on long rows"
    imagefactory revoke registry.example.org/gpu/pytorch@sha256:... --why "built on a broken base"

    TARGET is what its tag points to. Verdicts that are signed later count again. The tags go to the newest
    other candidate that is verified, and away where there is none.
    """
    from imagefactory.promoting import Revoking, follow, revoke
    from imagefactory.report.verdict_table import format_promotion, format_revoke
    from imagefactory.verification import signing_key

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
        for one in moved:
            say(format_promotion(one), unless=as_json)
            for tag, fault in one.faults:
                failures.of(tag).add(fault)
        if as_json:
            say_json(
                "revoke",
                {
                    "place": done.place,
                    "manifest": done.subject.manifest,
                    "revocation": done.digest,
                    "revoked": list(done.taken),
                    "promotions": [promotion_json(one) for one in moved],
                    "errors": failures.as_json(),
                },
            )


def _one(factory: Factory, name: str, registry: str, capability: str) -> tuple[Place, str, Target]:
    """Where an image lies, its tag or digest there, and its target."""
    from imagefactory.oci.candidates import plain_tag
    from imagefactory.oci.graph import read_manifest
    from imagefactory.oci.store import parse_reference
    from imagefactory.promoting import target_at
    from imagefactory.publish import target_reference
    from imagefactory.recipes.expand import select_one
    from imagefactory.verdicts import place_of
    from imagefactory.verify.promotion import pointer

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
    return _place(factory, target, registry), pointer(plain, capability) if capability else plain, target


# --- reconcile -----------------------------------------------------------------------------------


@click.command()
@registry_option
@json_option
@click.pass_obj
def reconcile(call: Call, place: str, as_json: bool) -> None:
    """Let the registry list every verdict that was attached from here, where its lists have lost some.

    Registries without the referrers API keep lists that two writers at once can overwrite. What was attached
    stands in the store's journal. Run it where nobody attaches just then.
    """
    from imagefactory.report.verdict_table import format_reconciled
    from imagefactory.verdicts import reconcile_all

    done = reconcile_all(call.factory, place, datetime.now(UTC), call.progress)
    if as_json:
        rows = [
            {
                "place": one.place,
                "listed": one.listed,
                "mended": list(one.mended),
                "gone": one.gone,
                "expired": one.expired,
                "damaged": one.damaged,
            }
            for one in done
        ]
        return say_json("reconcile", {"repositories": rows})
    return say(format_reconciled(done))
