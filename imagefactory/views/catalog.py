"""Images of a catalogue as a person without a factory reads them, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from imagefactory.catalogue.model import Catalogue, CataloguedImage, Offer
from imagefactory.trust.offers import ages_of
from imagefactory.serialize import format_time
from imagefactory.gpu.builds import platform_of
from imagefactory.gpu.capability import Capability
from imagefactory.progress import format_bytes
from imagefactory.views.text import CPUS, MIN_FOLDED, format_fields, format_table, wrap
from imagefactory.views.verdicts import format_ages
from imagefactory.stages.catalogued import Shelf
from imagefactory.actions.centers import OpenCenter
from imagefactory.submit.forms import expected_grounds
from imagefactory.jobs.offer import GpuClass, Grounds, proven_grounds


def format_shelves(shelves: Sequence[Shelf], width: int | None = None) -> str:
    """Each shelf's images, a row each: where it is verified, in any form, and where only predicted."""
    return "\n\n".join(_format_shelf(one, width) for one in shelves)


def _format_shelf(shelf: Shelf, width: int | None) -> str:
    rows = []
    for offer in shelf.offers:
        verified, predicted = _classes(offer)
        image = offer.image
        rows.append(
            (
                shelf.name_of(image),
                f"{image.framework} {image.version}",
                " ".join(map(str, verified)) or ("-" if image.gpu else CPUS),
                " ".join(map(str, predicted)) or "-",
            )
        )
    table = format_table(("IMAGE", "FRAMEWORK", "VERIFIED ON", "PREDICTED ON"), rows, width)
    ages = format_ages(ages_of(shelf.offers, shelf.now))
    return f"{shelf.said}\n{ages}\n\n{table}"


def format_offer(shelf: Shelf, width: int | None = None) -> str:
    """All that the catalogue says of one image, each form with its own verdicts."""
    (offer,) = shelf.offers
    image = offer.image
    fields = [
        ("framework", f"{image.framework} {image.version}, {_built_for(image)}"),
        ("Python", f"{image.python}, {image.platform}"),
        (
            "size",
            format_bytes(image.size)
            + (f", {format_bytes(image.unpacked)} unpacked" if image.unpacked else ""),
        ),
    ]
    if image.reference and not image.only_sif:
        fields += [
            ("image", image.reference),
            *_known(proven_grounds(offer.judged, image.revoked_of(image.subject))),
        ]
    for one in offer.sifs:
        where = f"oras://{one.sif.reference}" if one.sif.reference else "of sha256 " + one.sif.sha256[7:19]
        fields += [
            (".sif", f"{where}, {format_bytes(one.sif.size)}"),
            *_known(proven_grounds(one.judged, image.revoked_of(one.sif.subject))),
        ]
    guessed = expected_grounds(_nothing_but_revoked(image), image)
    spoken = set(_classes(offer)[0])
    fields += [
        ("predicted", f"on {one.capability}: {one.claim.reason}")
        for one in guessed.classes
        if one.capability not in spoken
    ]
    fields += [("not", f"on {capability}: {why}") for capability, why in guessed.refused]
    told = format_fields(_folded(fields, width))
    return f"{shelf.said}\n\n{shelf.name_of(image)}\n{told}\n\nnext: {_next(shelf, offer)}"


def _nothing_but_revoked(image: CataloguedImage) -> Grounds:
    return Grounds(classes=(), refused=(), revoked=image.revoked_of(image.subject))


def _built_for(image: CataloguedImage) -> str:
    return f"CUDA {image.runtime}" if image.runtime else f"for {platform_of(image.cuda)}"


def _folded(fields: Sequence[tuple[str, str]], width: int | None) -> list[tuple[str, str]]:
    """Values in lines that fit beside their names."""
    if width is None:
        return list(fields)
    room = width - max(len(name) for name, _ in fields) - 4
    return [(name, "\n".join(wrap(value, max(room, MIN_FOLDED)))) for name, value in fields]


def _next(shelf: Shelf, offer: Offer) -> str:
    """What the reader types to go on."""
    verified, predicted = _classes(offer)
    if verified or predicted or not offer.image.gpu:
        accept = "" if verified or not predicted else " --accept predicted"
        return f"imagefactory submit {shelf.name_of(offer.image)}{accept}"
    return f"imagefactory find {offer.image.family}"


def _known(grounds: Grounds) -> Iterator[tuple[str, str]]:
    for one in grounds.classes:
        yield "verified", f"on {one.capability}{_least(one)}: {one.claim.reason}"
    for capability, why in grounds.refused:
        yield "not", f"on {capability}: {why}"


def _least(gpu_class: GpuClass) -> str:
    return f" with drivers that take CUDA {gpu_class.cuda}" if gpu_class.cuda else ""


def _classes(offer: Offer) -> tuple[list[Capability], list[Capability]]:
    """The capabilities on which some form of it is verified, and those on which it is only predicted."""
    forms = [(offer.image.subject, offer.judged), *((one.sif.subject, one.judged) for one in offer.sifs)]
    grounds = [proven_grounds(judged, offer.image.revoked_of(subject)) for subject, judged in forms]
    verified = sorted({one.capability for each in grounds for one in each.classes})
    refused = {capability for each in grounds for capability, _ in each.refused}
    hoped = expected_grounds(_nothing_but_revoked(offer.image), offer.image).classes
    return verified, [one.capability for one in hoped if one.capability not in {*verified, *refused}]


def source_json(catalogue: Catalogue | None) -> Mapping[str, object]:
    """Where the catalog came from and its time, for the JSON of each command that reads one."""
    return {
        "catalogue_source": catalogue.source.value if catalogue else None,
        "catalogue_made": format_time(catalogue.made) if catalogue else None,
        "catalogue_expires": format_time(catalogue.expires) if catalogue else None,
    }


def centers_json(open_: Sequence[OpenCenter]) -> Mapping[str, object]:
    """`{centers: [...]}` where several are joined, else nothing."""
    if not any(one.center.several for one in open_):
        return {}
    rows = [
        {"center": one.center.name, "catalogue": one.center.place, **source_json(one.catalogue)}
        for one in open_
    ]
    return {"centers": rows}


def shelves_json(shelves: Sequence[Shelf]) -> Mapping[str, object]:
    """Of one center `{catalogue, made, ..., images}`; of several `{centers: [...], images}`."""
    images = [_offer_json(shelf, offer) for shelf in shelves for offer in shelf.offers]
    if shelves[0].center.several:
        return {
            "centers": [{"center": one.center.name, **_head_json(one)} for one in shelves],
            "images": images,
        }
    return {**_head_json(shelves[0]), "images": images}


def _head_json(shelf: Shelf) -> Mapping[str, object]:
    return {
        "catalogue": shelf.place,
        **source_json(shelf.catalogue),
        "made": f"{shelf.catalogue.made:%Y-%m-%dT%H:%M:%SZ}",
        "expires": f"{shelf.catalogue.expires:%Y-%m-%dT%H:%M:%SZ}",
        "proofs": ages_of(shelf.offers, shelf.now),
    }


def _offer_json(shelf: Shelf, offer: Offer) -> Mapping[str, object]:
    image, (verified, predicted) = offer.image, _classes(offer)
    return {
        "target": image.target,
        **shelf.center.json_of(image.target),
        "family": image.family,
        "framework": image.framework,
        "version": image.version,
        "cuda": image.cuda,
        "python": image.python,
        "platform": image.platform,
        "reference": image.reference,
        "digest": image.subject.index,
        "manifest": image.subject.manifest,
        "size": image.size,
        "unpacked": image.unpacked,
        "sifs": [{"sha256": one.sif.sha256, "reference": one.sif.reference} for one in offer.sifs],
        "verified": [str(one) for one in verified],
        "predicted": [str(one) for one in predicted],
    }
