"""imagefactory registry: list and prune."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from imagefactory.cli.groups import Group
from imagefactory.cli.output import (
    Call,
    collecting,
    json_option,
    registry_option,
    say,
    say_json,
    say_next,
    targets_argument,
    terminal_width,
)
from imagefactory.errors import UsageError

if TYPE_CHECKING:
    from imagefactory.oci.candidates import Tagged
    from imagefactory.stages.registry import Pruned


@click.group(cls=Group)
def registry() -> None:
    """Look into the registry, and remove old candidates from it."""


@registry.command("list")
@targets_argument(required=False)
@registry_option
@json_option
@click.pass_obj
def registry_list(call: Call, names: tuple[str, ...], place: str, as_json: bool) -> None:
    """List the tags of the targets' repositories."""
    from imagefactory.recipes.expand import select
    from imagefactory.report.registries import format_shelves
    from imagefactory.stages.registry import list_registry

    factory = call.factory
    shelves = list_registry(factory, select(factory.targets, names), place, call.progress)
    if as_json:
        repositories = [
            {
                "registry": shelf.registry,
                "repository": shelf.repository,
                "tags": [_tagged_json(tag) for tag in shelf.tagged],
            }
            for shelf in shelves
        ]
        return say_json("registry", {"repositories": repositories})
    say(format_shelves(shelves, terminal_width()))
    tagged = [shelf for shelf in shelves if shelf.tagged]
    if not tagged:
        return None
    first = tagged[0]
    return say_next("pull", f"{first.registry}/{first.repository}:{first.tagged[0].tag}")


def _tagged_json(tag: Tagged) -> dict[str, object]:
    return {"tag": tag.tag, "kind": tag.kind, "digest": tag.digest, "size": tag.size}


@registry.command("prune")
@click.option("--older", required=True, metavar="AGE", help="An age: 30d, 12h, 2w.")
@registry_option
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@json_option
@click.pass_obj
def registry_prune(call: Call, older: str, place: str, dry_run: bool, as_json: bool) -> None:
    """Remove old candidates that nothing needs.

    Kept is what another tag points to, what is verified (by a verdict that can be relied on), and what was
    pushed at an unknown time (by another program). Pushing a removed one again puts it back. The bytes are
    freed by the registry's own collection. A tag set to a candidate in the very moment of its removal may be
    lost with it where a registry can delete by digest alone.
    """
    from imagefactory.access import registry_place
    from imagefactory.report.registries import format_pruned
    from imagefactory.stages.registry import PruneOptions, prune_registry

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
    if dry_run:
        say_next("registry", "prune", "--older", older, *(("--registry", place) if place else ()))


def parse_age(text: str) -> timedelta:
    """Parse `30d`, `12h` or `2w`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,5})([hdw])", text)
    if not match:
        raise UsageError(
            "option-invalid", f"'{text}' is not an age", hint="write hours, days or weeks: 12h, 30d, 2w"
        )
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
