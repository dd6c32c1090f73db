"""imagefactory pull."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    complete_targets,
    json_option,
    registry_option,
    say,
    say_json,
    say_next,
    say_notes,
)
from imagefactory.errors import UsageError

if TYPE_CHECKING:
    from imagefactory.stages.pull import Pulled


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
@json_option
@click.pass_obj
def pull(call: Call, /, *, name: str, place: str, kind: str, output: Path | None, as_json: bool) -> None:
    """Pull an image into the store, every byte checked.

    \b
    imagefactory pull pytorch-2.3-cu121@sha256:...       then `imagefactory run pytorch-2.3-cu121`
    imagefactory pull pytorch-2.3-cu121:2.3-cu121-0123456789ab
    imagefactory pull registry.example.org/gpu/pytorch:2.3-cu121

    A target, whatever its tag or digest, becomes this store's image of that target. Without a factory TARGET
    is an image of the catalogue that you joined, CENTER/TARGET where there are several.
    """
    from imagefactory.oci.layout import reference
    from imagefactory.oci.store import parse_reference
    from imagefactory.report.registries import format_pulled, format_pulled_sif
    from imagefactory.stages.catalogued import read_offer
    from imagefactory.stages.pull import SifPull, local_name, pull_image, pull_sif, target_reference
    from imagefactory.actions.run import offered_reference

    platform = ""
    if not place and _is_catalogued(call, name):
        shelf = read_offer(call.settings, os.environ, name, datetime.now(UTC))
        call.progress.note(shelf.said)
        say_notes(shelf.notes)
        access, image = call.access, shelf.offers[0].image
        where = offered_reference(image, sif=kind == "sif")
        own, file, platform = local_name(access, where), image.target, image.platform
    elif "/" in name:
        if place:
            raise UsageError("option-conflict", f"'{name}' already has a registry", hint="remove --registry")
        access = call.access
        where = parse_reference(name)
        own = local_name(access, where)
        file = where.repository.rpartition("/")[2]
    else:
        access = factory = call.factory
        target, where = target_reference(factory, name, place)
        own, file, platform = reference(target), target.name, target.platform
    if kind == "sif":
        to = SifPull(name=own, target=file, output=output, platform=platform)
        sif = pull_sif(access, where, to, call.progress)
        if as_json:
            from imagefactory.serialize import fields_of

            return say_json("pull", fields_of(sif))
        return say(format_pulled_sif(sif))
    if output:
        raise UsageError(
            "option-conflict", "--output requires --format sif", hint="add --format sif or remove --output"
        )
    pulled = pull_image(access, where, own, call.progress, platform=platform)
    if as_json:
        return say_json("pull", _pulled_json(pulled))
    say(format_pulled(pulled, access.settings.store.value))
    return say_next("run", pulled.name, "--", "python")


def _is_catalogued(call: Call, name: str) -> bool:
    """Return whether a joined catalog has the name. With only `registry` set, the registry is queried."""
    from imagefactory.project import catalogue_answers
    from imagefactory.actions.centers import names_center

    settings = call.settings
    if not catalogue_answers(settings):
        return False
    plain = not any(mark in name for mark in "/:@")
    joined = settings.centers or (settings.catalogue.value and not settings.registry.value)
    return bool(plain and joined) or names_center(name, settings)


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
