"""Images of a catalog and search results, as text and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Literal, TypedDict

from imagefactory.actions.centers import CenterImages, JoinedCenter
from imagefactory.actions.find import FindCandidate, FindMatch, FindResult, GpuMatch
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.values import ClaimBasis, platform_of
from imagefactory.jobs.offer import ImageEvidence, expected_grounds, free_when, verified_evidence
from imagefactory.progress import format_bytes
from imagefactory.schedulers.sizes import format_size
from imagefactory.serialize import format_time
from imagefactory.trust.catalog import Catalog, CatalogImage, CatalogSource, ImageOffer
from imagefactory.trust.claims import VerdictAges
from imagefactory.trust.offers import verdict_ages_of
from imagefactory.views.sweeps import pool_summary
from imagefactory.views.text import CPUS, MIN_FOLDED, fold, format_fields, format_table, wrap
from imagefactory.views.verdicts import RevokedRow, format_ages, revoked_json


def format_center_images(shelves: Sequence[CenterImages], width: int | None = None) -> str:
    """Return a table for each center with the GPUs on which each image is verified, and those only
    predicted.
    """
    return "\n\n".join(_format_center(shelf, width) for shelf in shelves)


def _format_center(shelf: CenterImages, width: int | None) -> str:
    rows = []
    for offer in shelf.offers:
        verified, predicted = _classes(offer)
        image = offer.image
        rows.append(
            (
                shelf.name_of(image),
                f"{image.framework} {image.version}",
                _status(verified, predicted) or ("-" if image.gpu else CPUS),
            )
        )
    table = format_table(("IMAGE", "FRAMEWORK", "STATUS"), rows, width)
    ages = format_ages(verdict_ages_of(shelf.offers, shelf.now))
    return f"{shelf.source}\n{ages}\n\n{table}"


def _status(verified: Sequence[object], predicted: Sequence[object]) -> str:
    classes = (("verified", verified), ("predicted", predicted))
    return "; ".join(f"{name} {' '.join(map(str, rows))}" for name, rows in classes if rows)


def format_offer(shelf: CenterImages, width: int | None = None) -> str:
    """Return the catalog entry of one image: each form with its verdicts."""
    (offer,) = shelf.offers
    image = offer.image
    built_for = f"CUDA {image.runtime}" if image.runtime else f"for {platform_of(image.cuda)}"
    fields = [
        ("framework", f"{image.framework} {image.version}, {built_for}"),
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
            *_known_text(verified_evidence(offer.judged, image.revoked_of(image.subject))),
        ]
    for row in offer.sifs:
        sif_location = (
            f"oras://{row.sif.reference}" if row.sif.reference else "of sha256 " + row.sif.sha256[7:19]
        )
        fields += [
            (".sif", f"{sif_location}, {format_bytes(row.sif.size)}"),
            *_known_text(verified_evidence(row.judged, image.revoked_of(row.sif.subject))),
        ]
    guessed = expected_grounds(_nothing_but_revoked(image), image)
    spoken = set(_classes(offer)[0])
    fields += [
        ("predicted", f"on {row.capability}: {row.claim.reason}")
        for row in guessed.classes
        if row.capability not in spoken
    ]
    fields += [("not", f"on {capability}: {reason}") for capability, reason in guessed.refused]
    text = format_fields(_folded(fields, width))
    return f"{shelf.source}\n\n{shelf.name_of(image)}\n{text}\n\nnext: {_next(shelf, offer)}"


def _nothing_but_revoked(image: CatalogImage) -> ImageEvidence:
    return ImageEvidence(classes=(), refused=(), revoked=image.revoked_of(image.subject))


def _folded(fields: Sequence[tuple[str, str]], width: int | None) -> list[tuple[str, str]]:
    """Wrap values to fit next to their names."""
    if width is None:
        return list(fields)
    room = width - max(len(name) for name, _ in fields) - 4
    return [(name, "\n".join(wrap(value, max(room, MIN_FOLDED)))) for name, value in fields]


def _next(shelf: CenterImages, offer: ImageOffer) -> str:
    """Return the next command for the reader."""
    verified, predicted = _classes(offer)
    if verified or predicted or not offer.image.gpu:
        accept = "" if verified or not predicted else " --allow-unverified"
        return f"imagefactory job write {shelf.name_of(offer.image)}{accept}"
    return f"imagefactory search {offer.image.family}"


def _known_text(grounds: ImageEvidence) -> Iterator[tuple[str, str]]:
    for row in grounds.classes:
        drivers = f" with drivers that take CUDA {row.cuda}" if row.cuda else ""
        yield "verified", f"on {row.capability}{drivers}: {row.claim.reason}"
    for capability, reason in grounds.refused:
        yield "not", f"on {capability}: {reason}"


def _classes(offer: ImageOffer) -> tuple[list[Capability], list[Capability]]:
    """Return the capabilities on which at least one form is verified, and those with only a prediction."""
    forms = [(offer.image.subject, offer.judged), *((row.sif.subject, row.judged) for row in offer.sifs)]
    grounds = [verified_evidence(judged, offer.image.revoked_of(subject)) for subject, judged in forms]
    verified = sorted({row.capability for each in grounds for row in each.classes})
    refused = {capability for each in grounds for capability, _ in each.refused}
    hoped = expected_grounds(_nothing_but_revoked(offer.image), offer.image).classes
    return verified, [row.capability for row in hoped if row.capability not in {*verified, *refused}]


class CatalogRow(TypedDict):
    """A catalog that was read."""

    center: str
    """The name of the center that you joined."""
    reference: str
    source: CatalogSource
    created: str
    expires: str


def catalog_json(center: JoinedCenter, catalog: Catalog) -> CatalogRow:
    return CatalogRow(
        center=center.name,
        reference=center.place,
        source=catalog.source,
        created=format_time(catalog.created),
        expires=format_time(catalog.expires),
    )


class CatalogSifRow(TypedDict):
    sha256: str
    reference: str


class CatalogImageRow(TypedDict):
    name: str
    """The name for other commands: the target, after the center if you joined several."""
    target: str
    center: str
    family: str
    framework: str
    version: str
    cuda: str
    python: str
    platform: str
    reference: str
    digest: str
    manifest: str
    size: int
    unpacked_size: int
    sifs: list[CatalogSifRow]
    verified: list[str]
    """The capabilities on which it is verified."""
    predicted: list[str]


class CatalogVerdictsRow(CatalogRow):
    verdict_ages: VerdictAges


class CatalogImagesDocument(TypedDict):
    """The images of the catalogs that you joined."""

    format: Literal["imagefactory.catalog-images/1"]
    catalogs: list[CatalogVerdictsRow]
    images: list[CatalogImageRow]


def center_images_json(shelves: Sequence[CenterImages]) -> CatalogImagesDocument:
    return CatalogImagesDocument(
        format="imagefactory.catalog-images/1",
        catalogs=[
            CatalogVerdictsRow(
                **catalog_json(shelf.center, shelf.catalog),
                verdict_ages=verdict_ages_of(shelf.offers, shelf.now),
            )
            for shelf in shelves
        ],
        images=[_offer_json(shelf, offer) for shelf in shelves for offer in shelf.offers],
    )


def _offer_json(shelf: CenterImages, offer: ImageOffer) -> CatalogImageRow:
    image, (verified, predicted) = offer.image, _classes(offer)
    return CatalogImageRow(
        name=shelf.name_of(image),
        target=image.target,
        center=shelf.center.name,
        family=image.family,
        framework=image.framework,
        version=image.version,
        cuda=image.cuda,
        python=image.python,
        platform=image.platform,
        reference=image.reference,
        digest=image.subject.index,
        manifest=image.subject.manifest,
        size=image.size,
        unpacked_size=image.unpacked,
        sifs=[CatalogSifRow(sha256=row.sif.sha256, reference=row.sif.reference) for row in offer.sifs],
        verified=[str(row) for row in verified],
        predicted=[str(row) for row in predicted],
    )


# --- Search results


MOST = 20
"""The limit of images in one answer, unless all are requested."""
MOST_REVOKED = 4


def format_matches(finding: FindResult, width: int | None = None) -> str:
    """Return the source of the answer, and a row for each type of GPU."""
    inventory = finding.request.inventory
    most = finding.request.most or None
    usable = [match for match in finding.matches if match.gpus]
    lines = [*fold(_sources(finding), width), ""]
    if usable:
        header = (
            ("IMAGE", "GPU", "TOTAL", "FREE", "STATUS")
            if inventory
            else ("IMAGE", "STATUS", "GPUS BY CAPABILITY")
        )
        rows = [row for match in usable[:most] for row in (_pool_rows(match) if inventory else _rows(match))]
        lines += [format_table(header, rows, width, ("TOTAL",) if inventory else ())]
    notes = []
    if more := len(usable) - len(usable[:most]) + finding.more:
        notes.append(f"and {more} more: add words to narrow the search, or --all")
    for match in finding.matches[:most]:
        notes += [
            f"{match.candidate.name} {row.where}: {row.summary}"
            for row in match.candidate.revoked[:MOST_REVOKED]
        ]
    for_cpus = [match.candidate for match in finding.matches if not match.candidate.gpu]
    notes += [f"no GPU needed: imagefactory {shlex.join(_use(match))}" for match in for_cpus[:most]]
    which = "these GPUs" if inventory else "the known GPUs"
    if unknown := sum(match.unknown for match in finding.matches):
        verb_phrase = "image may run" if unknown == 1 else "images may run"
        notes.append(f"unknown: whether {unknown} {verb_phrase} on some of {which}")
    if rest := len(finding.matches) - len(usable) - len(for_cpus) - unknown:
        verb_phrase = "image runs" if rest == 1 else "images run"
        notes.append(f"{rest} {verb_phrase} on none of {which}")
    if any(row.unsure for match in usable[:most] for row in match.gpus):
        notes.append("* some of these machines may reject such jobs, because their rules are unknown")
    return "\n".join([*lines, *fold(notes, width)]).rstrip()


def next_command(finding: FindResult) -> tuple[str, ...]:
    """Return the next command for the best match, without `imagefactory`."""
    best, resources = finding.matches[0], finding.request.resources
    if not best.candidate.gpu:
        return _use(best.candidate)
    if not best.gpus:
        return ("gpus",) if finding.request.inventory else ("compat", best.candidate.family)
    candidate = best.candidate
    if candidate.ready:
        options = ["--gpus", str(resources.gpus)] if resources.gpus > 1 else []
        options += ["--gpu-memory", format_size(resources.gpu_memory)] if resources.gpu_memory else []
        options += [] if best.gpus[0].basis is ClaimBasis.VERIFIED else ["--allow-unverified"]
        return ("job", "write", candidate.argument, *options)
    if candidate.target:
        return ("build", candidate.target)
    cuda = ("--cuda", candidate.cuda) if candidate.cuda else ()
    gpu = ("--capability", str(best.gpus[0].capability)) if finding.request.inventory else ()
    return ("compat", f"{candidate.framework}=={candidate.version}", *cuda, *gpu)


def _use(candidate: FindCandidate) -> tuple[str, ...]:
    """Return the next command for an image that needs no GPU."""
    return ("job", "write", candidate.argument) if candidate.ready else ("build", candidate.argument)


def _sources(finding: FindResult) -> Iterator[str]:
    """Return the lines about the source of the answer, which come first."""
    if finding.catalog is None:
        message = f"{finding.place} has no images" if finding.place else "no catalog is joined"
        yield f"{message}, so no image is verified; these answers are predicted or documented"
        if not finding.place:
            yield "to join one: imagefactory site join ADDRESS|FILE"
    elif finding.own_project:
        yield f"images of the project {finding.place}" if finding.place else "images that were built here"
    else:
        for row in finding.open:
            yield row.center.answers(row.catalog.created)
    if finding.ages:
        yield format_ages(finding.ages)
    inventory = finding.request.inventory
    yield (
        f"pool: {pool_summary(inventory)}"
        if inventory
        else "no scheduler here, so these are all known GPUs; --inventory FILE selects those of a cluster"
    )


def _pool_rows(match: FindMatch) -> Iterator[tuple[str, ...]]:
    for number, row in enumerate(match.gpus):
        gpu = row.name.removeprefix("NVIDIA ")
        gpu += f" ({row.capability})" if row.name != row.capability else ""
        mark = "*" if row.unsure else ""
        yield (
            "" if number else match.candidate.name,
            gpu,
            f"{row.gpus:5}",
            f"{row.free:4}",
            f"{row.basis}{mark}",
        )


def _rows(match: FindMatch) -> Iterator[tuple[str, ...]]:
    by_basis: dict[ClaimBasis, list[GpuMatch]] = {}
    for row in match.gpus:
        by_basis.setdefault(row.basis, []).append(row)
    for number, (basis, rows) in enumerate(by_basis.items()):
        title = "" if number else match.candidate.name
        yield title, basis.value, " ".join(row.capability for row in rows)


class SearchGpuRow(TypedDict):
    """A type of GPU on which the image may run. Counts are null without an inventory."""

    capability: str
    name: str
    total: int | None
    free: int | None
    uncertain: int | None
    """How many of them may reject the job."""
    basis: ClaimBasis
    reason: str


class SearchImageRow(TypedDict):
    target: str | None
    name: str
    center: str
    framework: str
    version: str
    cuda: str
    ready: bool
    """Whether a job can use it now."""
    unknown: bool
    """Whether it is unknown for some GPU if the image runs there."""
    revoked: list[RevokedRow]
    gpus: list[SearchGpuRow]


class SearchPoolRow(TypedDict):
    name: str
    taken: str
    """The time of the inventory."""
    total: int
    free_when: str | None
    """When the GPUs were free: `now` or a time; null if it is unknown."""


class SearchDocument(TypedDict):
    """The images that match, and the GPUs for each."""

    format: Literal["imagefactory.search/1"]
    source: Literal["catalog", "project", "knowledge"]
    reference: str
    """The catalog, or the directory of the project."""
    catalogs: list[CatalogRow]
    verdict_ages: VerdictAges | None
    pool: SearchPoolRow | None
    images: list[SearchImageRow]
    more: int
    """How many other images match; `--all` lists them."""
    next: str
    """The command that uses the first image."""


def matches_json(finding: FindResult) -> SearchDocument:
    inventory = finding.request.inventory
    pool = None
    if inventory:
        pool = SearchPoolRow(
            name=inventory.pool,
            taken=f"{inventory.taken:%Y-%m-%dT%H:%M:%SZ}",
            total=len(inventory.gpus),
            free_when=free_when(inventory, finding.request.now) or None,
        )
    return SearchDocument(
        format="imagefactory.search/1",
        source="knowledge" if not finding.open else "project" if finding.own_project else "catalog",
        reference=finding.place,
        catalogs=[catalog_json(row.center, row.catalog) for row in finding.open],
        verdict_ages=finding.ages,
        pool=pool,
        images=[
            SearchImageRow(
                target=match.candidate.target or None,
                name=match.candidate.name,
                center=match.candidate.center,
                framework=match.candidate.framework,
                version=match.candidate.version,
                cuda=match.candidate.cuda,
                ready=match.candidate.ready,
                unknown=match.unknown,
                revoked=[revoked_json(row) for row in match.candidate.revoked],
                gpus=[_gpu_json(row, counted=inventory is not None) for row in match.gpus],
            )
            for match in finding.matches
        ],
        more=finding.more,
        next=shlex.join(("imagefactory", *next_command(finding))),
    )


def _gpu_json(row: GpuMatch, *, counted: bool) -> SearchGpuRow:
    return SearchGpuRow(
        capability=row.capability,
        name=row.name,
        total=row.gpus if counted else None,
        free=row.free if counted else None,
        uncertain=row.unsure if counted else None,
        basis=row.basis,
        reason=row.why,
    )
