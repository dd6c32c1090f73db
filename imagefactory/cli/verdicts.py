"""The verdicts command, and what commands about verdicts share."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    capability_of,
    complete_targets,
    json_option,
    registry_option,
    say,
    say_json,
    say_next,
    say_notes,
    terminal_width,
)
from imagefactory.errors import CheckFailedError, NothingSelectedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagefactory.oci.graph import Place
    from imagefactory.verdicts.found import Found
    from imagefactory.trust.verdict import Judged
    from imagefactory.trust.policy import Trust

NAME = "TARGET|REFERENCE"


def parse_option(_: click.Context, __: click.Parameter, text: str) -> str:

    return str(capability_of(text)) if text else ""


def refuse_registry(name: str, registry: str) -> None:
    if registry:
        raise UsageError("option-conflict", f"'{name}' already has a registry", hint="remove --registry")


@click.command()
@click.argument("name", metavar=NAME, shell_complete=complete_targets)
@registry_option
@click.option(
    "--capability",
    default="",
    metavar="X.Y",
    callback=parse_option,
    help="Exit with 9 unless a verdict that can be relied on says verified for it.",
)
@click.option("--numbers", is_flag=True, help="Every check of every verdict, with its numbers.")
@json_option
@click.pass_obj
def verdicts(call: Call, /, *, name: str, place: str, capability: str, numbers: bool, as_json: bool) -> None:
    """Show who verified an image, when, on which GPU, and what holds.

    \b
    imagefactory verdicts pytorch-2.3-cu121                   all its images, here and in the registry;
                                                              without a factory, the catalogue's
    imagefactory verdicts pytorch-2.3-cu121:2.3-cu121-sm80
    imagefactory verdicts registry.example.org/gpu/pytorch@sha256:...

    VALID is yes for a verdict that counts, whatever its outcome is, or says why it does not count. Whose
    signatures count, the [[trust]] rows of imagefactory.toml say. A tag alone proves nothing.
    """
    from imagefactory.project import is_factory
    from imagefactory.views.verdicts import format_verdicts
    from imagefactory.actions.images import capability_proven
    from imagefactory.trust.policy import read_trust

    images, trust = _find(call, name, place, datetime.now(UTC))
    keys = {key.keyid: key.name for key in (trust or read_trust(call.settings.files)).keys}
    if as_json:
        say_json("verdicts", {"images": [_found_json(image, keys) for image in images]})
    else:
        say(format_verdicts(images, keys, terminal_width(), numbers=numbers))
        for_cpus = is_factory(call.settings) and name in {t.name for t in call.factory.targets if not t.gpu}
        if for_cpus:
            say(f"{name} is for CPUs alone: no verdict speaks of it, its smoke test is all that proves it")
        elif is_factory(call.settings) and not any(image.judged for image in images):
            say_next("verify", name)
    if capability and not any(capability_proven(image.judged, capability) for image in images):
        hint = f"imagefactory verify {name} --capability {capability}"
        if not is_factory(call.settings):
            hint = "ask whoever made the image to verify it there; what is verified: imagefactory find"
        raise CheckFailedError("not-verified", f"{name} is not verified for {capability}", hint=hint)


def _find(call: Call, name: str, registry: str, now: datetime) -> tuple[tuple[Found, ...], Trust | None]:
    """Return the images and the trust of their center, None for the trust of the settings."""
    from imagefactory.project import catalogue_answers
    from imagefactory.oci.candidates import plain_tag
    from imagefactory.oci.layout import reference
    from imagefactory.oci.store import parse_reference
    from imagefactory.recipes.expand import select_one
    from imagefactory.actions.images import Promoting, list_verdicts
    from imagefactory.stages.catalogued import read_offer, verdicts_on
    from imagefactory.actions.centers import names_center
    from imagefactory.stages.pull import target_reference
    from imagefactory.actions.verdicts import local_place, place_of, registry_of, verdicts_of

    plain = not any(mark in name for mark in "/:@") or names_center(name, call.settings)
    if plain and not registry and catalogue_answers(call.settings):
        shelf = read_offer(call.settings, os.environ, name, now)
        call.progress.note(shelf.said)
        say_notes(shelf.notes)
        return verdicts_on(shelf.offers[0]), shelf.center.trust
    if "/" in name:
        refuse_registry(name, registry)
        where = parse_reference(name)
        access = call.access
        return (verdicts_of(access, place_of(access, where), where.wanted, now),), None
    factory = call.factory
    if ":" in name or "@" in name:
        _, where = target_reference(factory, name, registry)
        return (verdicts_of(factory, place_of(factory, where), where.wanted, now),), None
    target = select_one(factory.targets, name)
    places: list[Place] = []
    if not registry:
        places.append(local_place(factory, target.family))
    if registry or factory.settings.registry.value:
        places.append(registry_of(factory, target.family, registry))
    images = [
        image
        for place in places
        for image in list_verdicts(factory, Promoting(target=target, place=place, now=now), call.progress)
    ]
    if not registry and f"{reference(target)}.sif" in factory.layout.tags():
        images.append(verdicts_of(factory, places[0], f"{plain_tag(target)}.sif", now))
    if not images:
        raise NothingSelectedError(
            "image-not-found",
            f"no image of {target.name} is in {', '.join(map(str, places))}",
            hint=f"imagefactory build {target.name}, or pass a registry: --registry HOST[/PATH]",
        )
    return tuple(images), None


def _found_json(image: Found, keys: Mapping[str, str]) -> dict[str, object]:
    from imagefactory.views.verdicts import revoked_json

    return {
        "place": image.place,
        "digest": image.subject.index,
        "manifest": image.subject.manifest,
        "config": image.subject.config,
        "tags": list(image.tags),
        "verdicts": [_judged_json(judged, keys) for judged in image.judged],
        "revoked": [revoked_json(row) for row in image.revoked],
        "not_heeded": list(image.ignored),
    }


def _judged_json(judged: Judged, keys: Mapping[str, str]) -> dict[str, object]:
    from imagefactory.serialize import format_time
    from imagefactory.verify.report import format_gpu_report

    row: dict[str, object] = {
        "digest": judged.name,
        "artifact": judged.digest,
        "standing": judged.standing.value,
        "why": judged.why,
        "proves": judged.proves,
    }
    verdict = judged.verdict
    if verdict:
        row |= {
            "keyid": verdict.keyid,
            "key": keys.get(verdict.keyid, ""),
            "issued": format_time(verdict.issued),
            "expires": format_time(verdict.expires),
            "report": format_gpu_report(verdict.report),
        }
    return row
