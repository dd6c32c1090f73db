"""Which form of an offered image a job takes: layers in a registry, a .sif there, at a path or in the OSDF.

Pure. Every address is pinned: layers and artifacts by digest, files by a name that carries 12 hex digits of
their sha256, since the OSDF's caches go by names. A verdict on an image says nothing of a .sif, nor the other
way round, so each form is judged by its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imagefactory.catalogue.model import CataloguedImage, Offer
from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.oci.sif import sif_name
from imagefactory.oci.store import parse_reference
from imagefactory.schedulers.pool import ImageKind, PoolImage
from imagefactory.schedulers.sites import Site
from imagefactory.settings.checks import SIF_FOLDER
from imagefactory.jobs.offer import Grounds, proven_grounds, with_predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """An image as a job may take it, and what its own verdicts say of it. `fetch` is the command that puts
    the file there where it is missing, empty where no registry has it, or jobs take it from there."""

    image: PoolImage
    grounds: Grounds
    fetch: str = ""


def forms_of(offer: Offer, folder: str) -> tuple[ImageForm, ...]:
    """All forms of an image. `folder` is where its .sif files lie: a path, or `osdf:///...`; empty for here.

    Raises UsageError for a folder that is no such place.
    """
    return tuple(_forms(offer, _checked_folder(folder)))


def expected_grounds(grounds: Grounds, image: CataloguedImage, *, faulty: bool = False) -> Grounds:
    """What is proven of a form of an image, and what is predicted of the image where no verdict speaks.

    With `faulty` also where some calls meet a known fault.
    """
    least = "" if image.minor_compat else image.runtime
    return with_predictions(grounds, image.predicted, least, faulty=faulty)


def choose_form(
    forms: Sequence[ImageForm], site: Site, kind: ImageKind | None, *, own: str = ""
) -> ImageForm:
    """Return the form for a site: of those that work there the first that is verified, else the first.

    `own` is the target where it is of the person's own project: the store has its image, so a .sif can be
    made. Raises UsageError for a kind that does not work there, NothingSelectedError where no form does.
    """
    if kind is not None and kind not in site.kinds:
        raise UsageError(
            "image-type-unsupported",
            f"the documentation of {site.title} does not list images of type '{kind}'",
            hint=f"use --image {' or '.join(site.kinds)}",
        )
    kinds = site.kinds if kind is None else (kind,)
    fitting = [form for one in kinds for form in forms if form.image.kind is one]
    if fitting:
        return next((form for form in fitting if form.grounds.proven), fitting[0])
    there = ", ".join(dict.fromkeys(form.image.kind.value for form in forms))
    if own and ImageKind.SIF in kinds and not any(form.image.sha256 for form in forms):
        why = (
            f"only available as {there}, which this site does not run"
            if there
            else "not in a registry or file"
        )
        raise NothingSelectedError(
            "image-not-exported",
            f"jobs cannot fetch {own}: it is {why}",
            hint=f"run imagefactory export {own} --format sif, then submit again",
        )
    if not there:
        raise NothingSelectedError(
            "image-not-published",
            "the image is not in a registry or file, so jobs cannot fetch it",
            hint="ask the owner of the project to run imagefactory push, or imagefactory push --format sif",
        )
    raise NothingSelectedError(
        "image-type-not-offered",
        f"no image of type {' or '.join(kinds)}, only {there}",
        hint="use another --image; a .sif in the OSDF requires the setting sif-folder = osdf:///...",
    )


def _forms(offer: Offer, folder: str) -> Iterator[ImageForm]:
    image = offer.image
    if _pinned(image.reference) and not image.only_sif:
        yield ImageForm(
            image=PoolImage(
                kind=ImageKind.DOCKER,
                address=f"docker://{image.reference}",
                subject=image.subject,
                size=image.size,
                unpacked=image.unpacked,
            ),
            grounds=proven_grounds(offer.judged, image.revoked_of(image.subject)),
        )
    for offered in offer.sifs:
        sif = offered.sif
        name = sif_name(image.target, sif.sha256)
        file_kind = ImageKind.OSDF if folder.startswith("osdf:") else ImageKind.SIF
        places = [(file_kind, f"{folder}/{name}" if folder else name)]
        fetch = ""
        if _pinned(sif.reference):
            places.append((ImageKind.ORAS, f"oras://{sif.reference}"))
            fetch = f"apptainer pull {name} oras://{sif.reference}"
        grounds = proven_grounds(offered.judged, image.revoked_of(sif.subject))
        for kind, address in places:
            made = PoolImage(
                kind=kind,
                address=address,
                subject=sif.subject,
                size=sif.size,
                unpacked=image.unpacked,
                sha256=sif.sha256,
            )
            yield ImageForm(image=made, grounds=grounds, fetch="" if kind is ImageKind.ORAS else fetch)


def _pinned(reference: str) -> bool:
    """Whether it is one with a digest. Raises UsageError for what is no reference at all."""
    return bool(reference) and bool(parse_reference(reference).digest)


def _checked_folder(folder: str) -> str:
    if folder and not SIF_FOLDER.fullmatch(folder):
        raise UsageError(
            "sif-folder-invalid",
            f"sif-folder: '{folder[:80]}' is neither an absolute path nor osdf:///...",
            hint="write /staging/gpu/images or osdf:///chtc/staging/gpu/images: letters, digits and . _ + - "
            "without '..'",
        )
    return folder.rstrip("/")
