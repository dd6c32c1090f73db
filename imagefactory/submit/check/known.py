"""What is known of an image on the GPUs that a job can get, and what is told of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from imagefactory.catalogue.model import Catalogue
from imagefactory.trust.offers import find_revoked
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.schedulers.pool import PoolGpu
from imagefactory.extras.lint.findings import PREDICTED, REFUSED, REVOKED, UNTESTED, VERIFIED, Reached, Surroundings
from imagefactory.submit.check.findings import Spot, SubmitFinding, advice, wrong
from imagefactory.extras.lint.image import JobImage, KnownImage
from imagefactory.extras.lint.reach import GpuPlace
from imagefactory.submit.forms import expected_grounds
from imagefactory.jobs.offer import Grounds
from imagefactory.trust.verdict import RevokedCell
from imagefactory.versions import natural

_FEW = 6


def grounds_of(known: KnownImage | None, around: Surroundings) -> Grounds | None:
    """What verdicts and predictions say of an image; None where it is not known at all."""
    if known is None:
        return None
    return expected_grounds(known.grounds(around.offer(known.image)), known.image)


def reached_by(places: Iterable[GpuPlace], grounds: Grounds | None) -> Iterator[Reached]:
    """The GPUs that jobs get, by capability and what is known there."""
    groups: dict[tuple[str, str, str], list[GpuPlace]] = {}
    for place in places:
        word, why = known_on(place.gpu, grounds)
        groups.setdefault((place.gpu.capability, word, why), []).append(place)
    for (capability, word, why), own in sorted(groups.items(), key=lambda one: (natural(one[0][0]), one[0])):
        yield Reached(
            capability=capability,
            gpus=len(own),
            free=sum(place.gpu.free for place in own),
            unsure=sum(bool(place.unsure) for place in own),
            image=word,
            why=why,
        )


def known_on(gpu: PoolGpu, grounds: Grounds | None) -> tuple[str, str]:
    """What is known of an image on one GPU, as a word of this room and why; two empty texts for nothing.

    Pools tell the newest CUDA that a driver takes, so that decides; a GPU that tells none is not known.
    A slice (MIG) is a class of its own, of which no verdict speaks.
    """
    if grounds is None:
        return "", ""
    if not gpu.capability:
        return UNTESTED, f"no GPU is known by the name '{gpu.name[:40]}'"
    capability = parse_capability(gpu.capability)
    refused = next((why for one, why in grounds.refused if one == capability), "")
    gpu_class = next((one for one in grounds.classes if one.capability == capability), None)
    if gpu_class is None:
        if revoked := grounds.revoked_on(capability):
            return REVOKED, revoked.said
        return (REFUSED, refused) if refused else (UNTESTED, "the image has no verdict for it")
    if gpu.mig:
        return UNTESTED, "a slice of a GPU (MIG) is a class of its own"
    if gpu_class.cuda and not gpu.cuda:
        return UNTESTED, f"its driver is not known; the verdict applies from CUDA {gpu_class.cuda} on"
    if gpu_class.cuda and numbers(gpu.cuda) < numbers(gpu_class.cuda):
        return UNTESTED, f"its driver supports CUDA {gpu.cuda}; the verdict applies from {gpu_class.cuda} on"
    return (VERIFIED if gpu_class.proven else PREDICTED), gpu_class.claim.reason


def catalogue_findings(
    image: JobImage, known: KnownImage | None, catalogue: Catalogue | None, at: Spot, site: str = ""
) -> Iterator[SubmitFinding]:
    """Of an image that is pinned: whether there is a catalogue, it has that image, what was revoked of it."""
    if catalogue is None:
        text = "this machine has no catalog, so no verdict of this image is known"
        hint = "join your center: imagefactory join ADDRESS|FILE"
        yield advice(at.line, "no-catalogue", text, hint, column=at.column)
        return
    target, revoked = find_revoked(catalogue.images, image.digest, image.hexes)
    if revoked and known is None:
        for row in revoked[:_FEW]:
            text = f"the verdicts of this image of {target} {row.where} were {row.said}"
            hint = f"use another image: imagefactory submit {target}{site}"
            yield wrong(at.line, REVOKED, text, hint, column=at.column)
    elif known is None:
        text = "the image is not in the catalog, so no verdict of it is known"
        hint = f"use an image of the catalog: imagefactory submit TARGET{site}"
        yield wrong(at.line, "unknown-image", text, hint, column=at.column)


def no_use(known: KnownImage, at: Spot, asks: str) -> SubmitFinding:
    """An image for CPUs alone is proven on no GPU, and should get none."""
    text = f"{known.image.target} is for CPUs only, so the job requests a GPU that it cannot use"
    return wrong(at.line, "no-use", text, f"remove {asks}", column=at.column)


def nowhere(known: KnownImage, grounds: Grounds, at: Spot) -> SubmitFinding:
    text = f"{known.image.target} is not verified on any GPU"
    if grounds.revoked:
        row = grounds.revoked[0]
        text = f"{text}: its verdicts {row.where} were {row.said}"
        return wrong(at.line, REVOKED, text, "choose another image: imagefactory find", column=at.column)
    return wrong(at.line, "unverified", text, "choose a verified image: imagefactory find", column=at.column)


def revoked_on(known: KnownImage, row: RevokedCell, at: Spot) -> SubmitFinding:
    """An image whose verdicts on GPUs that the jobs take were taken back."""
    text = f"{known.image.target} {row.where}, which these jobs take, was {row.said}"
    hint = f"write a file that matches only verified GPUs: imagefactory submit {known.image.target}"
    return wrong(at.line, REVOKED, text, hint, column=at.column)


def unverified(
    known: KnownImage, reached: Sequence[Reached], at: Spot, site: str = ""
) -> Iterator[SubmitFinding]:
    """GPUs that the jobs may get and where the image is not proven. `site` is an option of submit."""
    target = known.image.target
    words = (
        (REVOKED, "was revoked"),
        (REFUSED, "fails"),
        (UNTESTED, "is not verified"),
        (PREDICTED, "is not verified"),
    )
    for word, severity in words:
        found = [one for one in reached if one.image == word]
        if found:
            said = [one.why if one.why.startswith(word) else f"{word}: {one.why}" for one in found[:_FEW]]
            where = "; ".join(
                f"{one.gpus} of {one.capability} ({why})" for one, why in zip(found, said, strict=False)
            )
            count = sum(one.gpus for one in found)
            gpus = "1 GPU that matches" if count == 1 else f"{count} GPUs that match"
            text = f"{target} {severity} on {gpus}: {where}"
            hint = f"write a file that matches only verified GPUs: imagefactory submit {target}{site}"
            rule = word if word in (REFUSED, REVOKED) else "unverified"
            yield wrong(at.line, rule, text, hint, column=at.column)


def narrow(
    known: KnownImage, grounds: Grounds | None, places: Iterable[GpuPlace], at: Spot, site: str = ""
) -> Iterator[SubmitFinding]:
    """Proven GPUs that the jobs leave out."""
    missed = [place.gpu for place in places if place.unasked]
    more = [gpu.capability for gpu in missed if known_on(gpu, grounds)[0] == VERIFIED]
    if more:
        kinds = ", ".join(sorted(set(more), key=parse_capability))
        gpus = f"{len(more)} GPU{'s' * (len(more) != 1)}"
        text = f"it is also verified on {gpus} ({kinds}), which these jobs exclude"
        hint = f"write a file that includes them: imagefactory submit {known.image.target}{site}"
        yield advice(at.line, "narrow", text, hint, column=at.column)


def told_causes(causes: Iterable[tuple[str, int]]) -> str:
    """What keeps jobs from GPUs in a line, with how many where there are several causes."""
    every = tuple(causes)
    return "; ".join(cause if len(every) == 1 else f"{cause} ({count})" for cause, count in every)
