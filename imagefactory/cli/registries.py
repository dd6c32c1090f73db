"""Commands between this machine and registries: push, pull, copy, registry list and prune."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from imagefactory.cli.output import (
    Call,
    collecting,
    complete_targets,
    json_option,
    say,
    say_json,
    targets_argument,
)
from imagefactory.errors import UsageError

if TYPE_CHECKING:
    from imagefactory.factory import Factory
    from imagefactory.model import Target
    from imagefactory.oci.candidates import Tagged
    from imagefactory.oci.model import Image, Sif
    from imagefactory.oci.transfer import Sent
    from imagefactory.progress import Progress
    from imagefactory.publish import Copied, Pruned, Pulled, PulledSif, Pushed

registry_option = click.option(
    "--registry", "place", default="", metavar="HOST[/PATH]", help="Default: the setting `registry`."
)


# --- push, pull, copy ----------------------------------------------------------------------------


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
@click.option(
    "--by",
    type=click.Choice(["imagefactory", "docker"]),
    default="imagefactory",
    show_default=True,
    help="docker: where only the daemon has the way or the credentials; it compresses anew.",
)
@json_option
@click.pass_obj
def push(
    call: Call, /, names: tuple[str, ...], place: str, tags: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Push built images to a registry, each under a tag of its own that never moves (the candidate).

    \b
    imagefactory push pytorch-2.3-cu121
    imagefactory push --registry registry.example.org/gpu --tag nightly pytorch-2.3-cu121

    What the registry has is not sent again, so an interrupted push goes on where it stopped.
    Credentials are those of `docker login`.
    """
    from imagefactory.recipes.expand import select

    factory = call.factory
    chosen = select(factory.targets, names)
    families = [target.family for target in chosen]
    if tags and len(set(families)) < len(families):
        raise UsageError(
            "--tag with two targets of one family: the tag can point to one image",
            hint="push them one by one",
        )
    if options["compression"] and options["kind"] != "sif":
        raise UsageError("--compression is of --format sif", hint="leave it out")
    sif = (options["compression"] or "fast") if options["kind"] == "sif" else ""
    one = Pusher(factory, place, call.progress, tags, sif=sif, by=options["by"])
    results: list[dict[str, object]] = []
    with collecting() as failures:
        for target in chosen:
            with failures.of(target.name):
                results.append(one(target, quiet=as_json))
        if as_json:
            say_json("push", {"results": results, "errors": failures.as_json()})


class Pusher:
    """Pushes one target after the other and tells of each. Raises UsageError at once without a registry."""

    def __init__(
        self,
        factory: Factory,
        place: str,
        progress: Progress,
        tags: tuple[str, ...] = (),
        *,
        sif: str = "",
        by: str = "imagefactory",
    ) -> None:
        from imagefactory.publish import PushOptions, open_registry, registry_place

        host, _ = registry_place(factory, place)
        if by != "docker":
            open_registry(factory, host).check()  # before the work, not after it
        self.factory, self.progress, self.by = factory, progress, by
        self.options = PushOptions(registry=place, tags=tags, now=datetime.now(UTC), sif=sif)

    def __call__(self, target: Target, *, quiet: bool, made: Image | Sif | None = None) -> dict[str, object]:
        """The push as JSON; told to a person too unless `quiet`."""
        from imagefactory.publish import push_by_docker, push_target
        from imagefactory.report.console import format_pushed

        send = push_by_docker if self.by == "docker" else push_target
        pushed = send(self.factory, target, replace(self.options, made=made), self.progress)
        say(format_pushed(pushed), unless=quiet)
        return _pushed_json(pushed)


def _pushed_json(pushed: Pushed) -> dict[str, object]:
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
        **(_sent_json(pushed.sent) if pushed.sent else {}),
    }


def _sent_json(sent: Sent) -> dict[str, object]:
    return {
        "tags": dict(sent.tags),
        "bytes_sent": sent.bytes_sent,
        "blobs": {"sent": sent.sent, "mounted": sent.mounted, "present": sent.present},
        "seconds": sent.seconds,
    }


@click.command()
@click.argument("name", metavar="TARGET|REFERENCE", shell_complete=complete_targets)
@registry_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["image", "sif"]),
    default="image",
    show_default=True,
    help="sif writes a .sif file: the registry's own where it has one, else made here by apptainer.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Of a .sif. Default: a name with its sha256 in this folder.",
)
@click.option(
    "--by",
    type=click.Choice(["imagefactory", "apptainer"]),
    default="imagefactory",
    show_default=True,
    help="apptainer: where only it has the way or the credentials; for --format sif.",
)
@json_option
@click.pass_obj
def pull(call: Call, /, name: str, place: str, as_json: bool, **options: Any) -> None:
    """Pull an image into the store on this machine; every byte is checked against its digest.

    \b
    imagefactory pull pytorch-2.3-cu121@sha256:...       then `imagefactory run pytorch-2.3-cu121`
    imagefactory pull pytorch-2.3-cu121:2.3-cu121-0123456789ab
    imagefactory pull registry.example.org/gpu/pytorch:2.3-cu121

    A target, whatever its tag or digest, becomes this store's image of that target.
    """
    from imagefactory.oci.layout import reference
    from imagefactory.oci.store import parse_reference
    from imagefactory.publish import (
        SifPull,
        local_name,
        pull_by_apptainer,
        pull_image,
        pull_sif,
        target_reference,
    )
    from imagefactory.report.console import format_pulled, format_pulled_sif

    if "/" in name:
        if place:
            raise UsageError(f"'{name}' names its registry already", hint="leave --registry out")
        factory = _without_recipes(call)
        wanted = parse_reference(name)
        own = local_name(factory, wanted)
        file = wanted.repository.rpartition("/")[2]
    else:
        factory = call.factory
        target, wanted = target_reference(factory, name, place)
        own, file = reference(target), target.name
    if options["kind"] == "sif":
        to = SifPull(name=own, target=file, output=options["output"])
        fetch = pull_by_apptainer if options["by"] == "apptainer" else pull_sif
        made = fetch(factory, wanted, to, call.progress)
        if as_json:
            return say_json("pull", _pulled_sif_json(made))
        return say(format_pulled_sif(made))
    if options["by"] != "imagefactory" or options["output"]:
        raise UsageError("--by and --output are of --format sif", hint="add --format sif, or leave them out")
    pulled = pull_image(factory, wanted, own, call.progress)
    if as_json:
        return say_json("pull", _pulled_json(pulled))
    return say(format_pulled(pulled, factory.settings.store.value))


def _pulled_sif_json(pulled: PulledSif) -> dict[str, object]:
    return {
        "reference": str(pulled.reference),
        "path": str(pulled.path),
        "sha256": pulled.digest,
        "size": pulled.size,
        "how": pulled.how,
    }


def _without_recipes(call: Call) -> Factory:
    """What works by full references alone needs no recipes: the settings are enough."""
    from imagefactory.factory import Factory

    return Factory(settings=call.settings, environ=os.environ, bases=(), targets=())


def _pulled_json(pulled: Pulled) -> dict[str, object]:
    sent = pulled.sent
    return {
        "reference": str(pulled.reference),
        "name": pulled.name,
        "digest": pulled.digest,
        "whole": pulled.whole,
        "bytes_received": sent.bytes_sent,
        "blobs": {"received": sent.sent, "present": sent.present + sent.mounted},
        "seconds": sent.seconds,
    }


@click.command("copy")
@click.argument("source", metavar="SOURCE")
@click.argument("destination", metavar="DESTINATION")
@click.option("--referrers", is_flag=True, help="Copy verdicts and other artifacts of the image too.")
@json_option
@click.pass_obj
def copy_(call: Call, source: str, destination: str, referrers: bool, as_json: bool) -> None:
    """Copy an image from registry to registry, with all its platforms; the digest stays the same.

    \b
    imagefactory copy a.example.org/pytorch:2.3-cu121 b.example.org/gpu/pytorch:2.3-cu121

    Nothing lies on this machine in between. Within one registry nothing is sent at all. The tag you
    name is moved, whatever it is: copying is how a person promotes by hand.
    """
    from imagefactory.oci.store import parse_reference
    from imagefactory.publish import Copying, copy_image
    from imagefactory.report.console import format_copied

    wanted = Copying(
        source=parse_reference(source),
        destination=parse_reference(destination),
        referrers=referrers,
        now=datetime.now(UTC),
    )
    copied = copy_image(_without_recipes(call), wanted, call.progress)
    if as_json:
        return say_json("copy", _copied_json(copied))
    return say(format_copied(copied))


def _copied_json(copied: Copied) -> dict[str, object]:
    where = copied.destination
    return {
        "source": str(copied.source),
        "destination": str(where),
        "digest": where.digest,
        **_sent_json(copied.sent),
    }


# --- what a registry holds -----------------------------------------------------------------------


@click.group()
def registry() -> None:
    """Look into the registry, and remove old candidates from it."""


@registry.command("list")
@targets_argument(required=False)
@registry_option
@json_option
@click.pass_obj
def registry_list(call: Call, names: tuple[str, ...], place: str, as_json: bool) -> None:
    """List the tags of the targets' repositories: candidates, targets, other tags."""
    from imagefactory.publish import list_registry
    from imagefactory.recipes.expand import select
    from imagefactory.report.console import format_shelves

    factory = call.factory
    shelves = list_registry(factory, select(factory.targets, names), place, call.progress)
    if as_json:
        repositories = [
            {
                "registry": shelf.registry,
                "repository": shelf.repository,
                "tags": [_tagged_json(one) for one in shelf.tagged],
            }
            for shelf in shelves
        ]
        return say_json("registry", {"repositories": repositories})
    return say(format_shelves(shelves))


def _tagged_json(one: Tagged) -> dict[str, object]:
    return {"tag": one.tag, "kind": one.kind, "digest": one.digest, "size": one.size}


@registry.command("prune")
@click.option("--older", required=True, metavar="AGE", help="An age: 30d, 12h, 2w.")
@registry_option
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@json_option
@click.pass_obj
def registry_prune(call: Call, older: str, place: str, dry_run: bool, as_json: bool) -> None:
    """Remove candidates that were first pushed longer ago than AGE and that nothing needs.

    Kept is what another tag points to, what is verified (by a verdict that can be relied on), and what was
    pushed at an unknown time (by another program). Pushing a removed one again puts it back. The bytes are
    freed by the registry's own collection. A tag set to a candidate in the very moment of its removal may be
    lost with it where a registry can delete by digest alone.
    """
    from imagefactory.publish import PruneOptions, prune_registry, registry_place
    from imagefactory.report.console import format_pruned

    factory, progress = call.factory, call.progress
    registry_place(factory, place)
    now = datetime.now(UTC)
    before = now - parse_age(older)
    options = PruneOptions(registry=place, before=before, now=now, dry_run=dry_run)
    results: list[dict[str, object]] = []
    with collecting() as failures:
        for family in sorted({target.family for target in factory.targets}):
            with failures.of(family):
                pruned = prune_registry(factory, family, options, progress)
                results.append(_pruned_json(pruned))
                say(format_pruned(pruned, dry_run=dry_run), unless=as_json)
        if as_json:
            value = {"dry_run": dry_run, "before": before.isoformat(timespec="seconds")}
            say_json("registry", {**value, "repositories": results, "errors": failures.as_json()})


def parse_age(text: str) -> timedelta:
    """`30d`, `12h` or `2w`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,5})([hdw])", text)
    if not match:
        raise UsageError(f"'{text}' is no age", hint="write hours, days or weeks: 12h, 30d, 2w")
    return timedelta(hours=int(match[1]) * {"h": 1, "d": 24, "w": 168}[match[2]])


def _pruned_json(pruned: Pruned) -> dict[str, object]:
    return {
        "registry": pruned.registry,
        "repository": pruned.repository,
        "candidates": [
            {
                **_tagged_json(fate.candidate),
                "pushed": fate.candidate.pushed.isoformat() if fate.candidate.pushed else None,
                "removed": fate.remove,
                "why": fate.why,
            }
            for fate in pruned.fates
        ],
    }
