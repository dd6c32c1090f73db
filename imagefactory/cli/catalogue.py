"""The command that writes the signed catalogue: catalogue."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from imagefactory.cli.output import (
    Call,
    choose_targets,
    collecting,
    json_option,
    registry_option,
    say,
    say_json,
    say_next,
    targets_argument,
    write,
)
from imagefactory.errors import CheckFailedError, NothingSelectedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagefactory.catalogue.model import Catalogue, CataloguedImage
    from imagefactory.factory import Factory
    from imagefactory.oci.graph import Place
    from imagefactory.stages.catalogue import MadeCatalogue
    from imagefactory.verdicts.keys import SigningKey
    from imagefactory.verdicts.model import Judged


@click.command()
@targets_argument(required=False)
@registry_option
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it into a file, packed where its name ends in .gz, and push nothing.",
)
@click.option("--dry-run", is_flag=True, help="Say what would stand in it. Needs no key.")
@json_option
@click.pass_obj
def catalogue(call: Call, /, names: tuple[str, ...], place: str, as_json: bool, **options: Any) -> None:
    """Sign a catalogue of what there is, for people without a factory.

    \b
    imagefactory catalogue                          to <registry>/catalogue:current
    imagefactory catalogue --output catalogue.json  a file, for a folder that everybody reads

    It says which image each target is, what is predicted of it, and carries its verdicts. Whoever trusts the
    key that signed it uses `imagefactory find` and `imagefactory submit` anywhere: write an invitation
    (`imagefactory invite`), or the site's own settings in /etc/xdg/imagefactory/imagefactory.toml.

    It holds for 30 days: make it anew after each promotion, and each night. Of a family whose recipe has
    faults it keeps what the last one had.
    """
    from imagefactory.catalogue.offers import ages_of, judge_offer
    from imagefactory.report.verdicts import ages_json, format_ages
    from imagefactory.stages.catalogue import CatalogueMaking, catalogue_of
    from imagefactory.stages.read_catalogue import keep_former
    from imagefactory.verdicts.trust import read_trust

    factory, now = call.sound_factory, datetime.now(UTC)
    key = None if options["dry_run"] else _signing_key(factory, now)
    if options["output"] is None and key:
        _ = _place(factory, place)  # before the work, not after it
    with collecting(factory) as failures:
        targets = choose_targets(factory, names)
        making = CatalogueMaking(targets=targets, now=now, registry=place, named=bool(names))
        made = catalogue_of(factory, making, call.progress)
        if factory.faults and not names and (place or factory.settings.registry.value):
            made = keep_former(factory, made, place, now)
        if not made.catalogue.images:
            raise NothingSelectedError(
                "no target has an image there", hint="imagefactory build --push TARGET, then verify it"
            )
        written = _write(factory, place, options["output"], (made.catalogue, key)) if key else []
        trust = read_trust(factory.settings.files)
        offers = [judge_offer(made.catalogue, image, trust, now) for image in made.catalogue.images]
        proven, ages = {offer.image.target: _proven(offer.judged) for offer in offers}, ages_of(offers, now)
        if as_json:
            more = {"proofs": ages_json(ages), "errors": failures.as_json()}
            return say_json("catalogue", {**_as_json(made, proven, written), **more})
        for image in made.catalogue.images:
            say(f"{image.target}  {image.reference or image.subject.index}")
            say(f"  verified on {', '.join(proven[image.target]) or 'nothing'}")
            say("  as the last catalogue has it: its recipe has faults", unless=image.target not in made.kept)
        for name, why in made.left_out:
            say(f"{name}  left out: {why}")
        for where in written:
            say(f"written: {where}")
        say(format_ages(ages))
        if written:
            say(f"signed by '{key.name if key else ''}', it holds until {made.catalogue.expires:%Y-%m-%d}")
    return say_next("submit", "--list") if written else say_next("catalogue", *names)


def _signing_key(factory: Factory, now: datetime) -> SigningKey:
    """The key that signs. Raises CheckFailedError where there is none that this factory itself believes."""
    from imagefactory.stages.sign import signing_key
    from imagefactory.verdicts.judgement import out_of_period
    from imagefactory.verdicts.trust import read_trust

    key = signing_key(factory)
    if key is None:
        raise CheckFailedError(
            "nobody would believe it: there is no key to sign it",
            hint="imagefactory keys new NAME, or name one: IMAGEFACTORY_SIGNING_KEY",
        )
    trusted = read_trust(factory.settings.files).key(key.keyid)
    late = (None, "it is not trusted") if trusted is None else out_of_period(trusted, now)
    if late:
        raise CheckFailedError(
            f"nobody here would believe the key '{key.name}': {late[1]}",
            hint=f"imagefactory keys trust {key.name}, or sign with another: IMAGEFACTORY_SIGNING_KEY",
        )
    return key


def _place(factory: Factory, registry: str) -> Place:
    from imagefactory.access import open_registry, registry_place
    from imagefactory.catalogue.package import catalogue_place
    from imagefactory.oci.graph import Place

    host, path = registry_place(factory, registry)
    reference = catalogue_place(f"{host}/{path}" if path else host)
    return Place(store=open_registry(factory, host), repository=reference.repository)


def _write(
    factory: Factory, registry: str, output: Path | None, what: tuple[Catalogue, SigningKey]
) -> list[str]:
    """Signs it and brings it where it is read; says where that is."""
    from imagefactory.catalogue.document import sign_catalogue
    from imagefactory.catalogue.publish import publish_catalogue, write_catalogue
    from imagefactory.stages.read_catalogue import keep_published

    made, key = what
    envelope = sign_catalogue(made, key)
    if output is not None:
        write_catalogue(output, envelope)
        return [str(output)]
    place = _place(factory, registry)
    references = [str(one) for one in publish_catalogue(place, envelope, made.made)]
    keep_published(factory.settings, str(place), envelope, made.made)
    asked = factory.settings.catalogue
    if asked.value and not _same_place(asked.value, str(place)):
        write(2, f"note: readers with your settings take another: catalogue = {asked.value} ({asked.origin})")
    return references


def _same_place(setting: str, place: str) -> bool:
    from imagefactory.catalogue.package import CURRENT, catalogue_place

    return not setting.startswith("/") and str(catalogue_place(setting)) == f"{place}:{CURRENT}"


def _proven(judged: Iterable[Judged]) -> list[str]:
    from imagefactory.gpu.model import Answer
    from imagefactory.verdicts.claims import verified_claims

    return [str(one) for one, claim in verified_claims(judged).items() if claim.answer is Answer.YES]


def _as_json(made: MadeCatalogue, proven: dict[str, list[str]], written: list[str]) -> dict[str, object]:
    from imagefactory.documents import format_time

    def row(image: CataloguedImage) -> dict[str, object]:
        return {
            "target": image.target,
            "reference": image.reference,
            "digest": image.subject.index,
            "manifest": image.subject.manifest,
            "size": image.size,
            "unpacked": image.unpacked,
            "verified": proven[image.target],
            "verdicts": len(image.envelopes),
            "sifs": [{"sha256": sif.sha256, "reference": sif.reference} for sif in image.sifs],
        }

    return {
        "made": format_time(made.catalogue.made),
        "expires": format_time(made.catalogue.expires),
        "written": written,
        "images": [row(image) for image in made.catalogue.images],
        "left_out": [{"target": name, "why": why} for name, why in made.left_out],
        "kept": list(made.kept),
    }
