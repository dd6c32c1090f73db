"""imagefactory push."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    collecting,
    json_option,
    registry_option,
    reject_conflict,
    say,
    say_json,
    say_next,
    targets_argument,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from imagefactory.project import Factory
    from imagefactory.oci.transfer import Sent
    from imagefactory.progress import Progress
    from imagefactory.actions.attest import Attested
    from imagefactory.actions.transfer import Pushed, PushedPlatforms


@click.command()
@targets_argument(required=True)
@registry_option
@click.option("--tag", "tags", multiple=True, metavar="NAME", help="Set this tag too, after the candidate's.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["image", "sif"]),
    default="image",
    show_default=True,
    help="sif pushes a .sif file, for `apptainer pull oras://`.",
)
@click.option(
    "--compression", type=click.Choice(["fast", "small"]), help="Of a .sif made for this.  [default: fast]"
)
@click.option("--sbom", is_flag=True, help="Attach its bills of materials and, with a key, its provenance.")
@json_option
@click.pass_obj
def push(
    call: Call,
    /,
    *,
    names: tuple[str, ...],
    place: str,
    tags: tuple[str, ...],
    kind: str,
    compression: str | None,
    sbom: bool,
    as_json: bool,
) -> None:
    """Push images to a registry, each under a tag that never moves.

    \b
    imagefactory push pytorch-2.3-cu121
    imagefactory push --registry registry.example.org/gpu --tag nightly pytorch-2.3-cu121

    What the registry has is not sent again, so an interrupted push goes on where it stopped.
    Credentials are those of `docker login`.
    """
    from imagefactory.recipes.expand import select
    from imagefactory.report.registries import format_attested, format_pushed
    from imagefactory.stages.platforms import plain_name
    from imagefactory.actions.transfer import PushOptions, check_push, push_target

    factory = call.factory
    chosen = select(factory.targets, names)
    named = {(target.family, plain_name(target)) for target in chosen}
    reject_conflict(
        tags and len(named) > len({family for family, _ in named}),
        "--tag does not apply to two targets of one family: a tag points to one image",
        "push them one by one",
    )
    reject_conflict(
        compression and kind != "sif",
        "--compression requires --format sif",
        "add --format sif or remove --compression",
    )
    reject_conflict(
        sbom and kind == "sif", "--sbom does not apply to --format sif", "remove --sbom, or push the image"
    )
    sif = (compression or "fast") if kind == "sif" else ""
    push_options = PushOptions(registry=place, tags=tags, now=datetime.now(UTC), sif=sif)
    if len(chosen) > 1 or sif:
        check_push(factory, push_options)
    attest = _attester(factory) if sbom else None
    results: list[dict[str, object]] = []
    with collecting() as failures:
        for target in chosen:
            with failures.of(target.name):
                pushed = push_target(factory, target, push_options, call.progress)
                results.append(pushed_json(pushed))
                say(format_pushed(pushed), unless=as_json)
                if attest:
                    attested = attest(pushed, call.progress)
                    results[-1]["attached"] = dict(attested.artifacts)
                    say(format_attested(attested), unless=as_json)
        if as_json:
            say_json("push", {"results": results, "errors": failures.as_json()})
    if kind != "sif":
        on_gpus = {target.name for target in chosen if target.gpu}
        pushed_ones = [str(row["reference"]) for row in results if row["target"] in on_gpus]
        if pushed_ones:  # the addresses of several are longer than a terminal
            say_next("verify", *(pushed_ones if len(pushed_ones) == 1 else names))
        else:
            say_next("promote", *names)


def _attester(factory: Factory) -> Callable[[Pushed, Progress], Attested]:
    """Return a function that attests an image. Raises now for a missing extra or an unreadable key."""
    from imagefactory.actions.attest import attest
    from imagefactory.stages.sign import signing_key

    key = signing_key(factory, datetime.now(UTC))
    return lambda pushed, progress: attest(factory, pushed, key, progress)


def pushed_json(pushed: Pushed) -> dict[str, object]:
    where = pushed.reference
    return {
        "target": pushed.target.name,
        "reference": str(where),
        "registry": where.registry,
        "repository": where.repository,
        "tag": where.tag,
        "digest": where.digest,
        "manifest": pushed.manifest,
        **({"file": pushed.file} if pushed.file else {}),
        **({"joined": _joined_json(pushed.joined)} if pushed.joined else {}),
        **sent_json(pushed.sent),
    }


def _joined_json(joined: PushedPlatforms) -> dict[str, object]:
    return {
        "reference": str(joined.reference),
        "platforms": list(joined.platforms),
        "digest": joined.reference.digest,
        "tags": dict(joined.sent.tags),
    }


def sent_json(sent: Sent) -> dict[str, object]:
    return {
        "tags": dict(sent.tags),
        "bytes_sent": sent.bytes_sent,
        "blobs": {"sent": sent.sent, "mounted": sent.mounted, "present": sent.present},
        "seconds": sent.seconds,
    }
