"""From a catalogue to what one may rely on: an image by its target's name, its verdicts judged. Pure.

Whose verdicts count, and until when, is the reader's trust and clock, as if he had read them where the image
lies. A suite counts that he has, that his policy names, or that whoever signed the catalogue let count: his
program may be of another version than theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from imagefactory.catalogue.model import Catalogue, CataloguedImage, Envelopes, Offer, OfferedSif
from imagefactory.errors import NothingSelectedError
from imagefactory.recipes.names import Known, choose_name, choose_names
from imagefactory.trust.claims import ProofAges, last_proofs, proof_ages
from imagefactory.trust.judgement import Court, judge_verdicts
from imagefactory.trust.verdict import Judged, RevokedCell
from imagefactory.verdicts.revocation import judge_revocations
from imagefactory.trust.policy import Trust
from imagefactory.verify.model import Subject
from imagefactory.verify.suite_files import suite_digest

LACKING = "the catalog has no target"


def find_offer(catalogue: Catalogue, name: str, trust: Trust, now: datetime) -> Offer:
    """The offer of a target. Raises NothingSelectedError, as `find_image` does."""
    return judge_offer(catalogue, find_image(catalogue, name), trust, now)


def find_image(catalogue: Catalogue, name: str) -> CataloguedImage:
    """Raises NothingSelectedError where the catalogue has no such target, UsageError where it has several."""
    wanted = choose_name(name, _known(catalogue), LACKING)
    return next(image for image in catalogue.images if image.target == wanted)


def select_images(catalogue: Catalogue, names: Sequence[str]) -> tuple[CataloguedImage, ...]:
    """The images of the targets that `names` ask for; all when empty. Raises as `find_image`."""
    chosen = choose_names(names, _known(catalogue), LACKING)
    return tuple(image for image in catalogue.images if image.target in chosen)


def _known(catalogue: Catalogue) -> Known:
    if not catalogue.images:
        raise NothingSelectedError(
            "catalog-empty",
            "the catalog is empty",
            hint="its maintainers must push images, verify them, and run imagefactory catalogue again",
        )
    return {image.target: image.family for image in catalogue.images}


def find_revoked(
    images: Iterable[CataloguedImage], digest: str, hexes: Sequence[str]
) -> tuple[str, tuple[RevokedCell, ...]]:
    """The target and the rows of an image by its digest, or by digits of a .sif file's sha256."""
    for image in images:
        rows = tuple(
            row
            for row in image.revoked
            if (digest and digest in (row.subject.index, row.subject.manifest))
            or any(row.subject.config.removeprefix("sha256:").startswith(part) for part in hexes)
        )
        if rows:
            return image.target, rows
    return "", ()


def judge_offer(catalogue: Catalogue, image: CataloguedImage, trust: Trust, now: datetime) -> Offer:
    """An image of this catalogue and its .sif files, each with its own verdicts judged."""
    policy = replace(trust.policy, suites=tuple(dict.fromkeys((*trust.policy.suites, *catalogue.suites))))
    court = Court(trust=replace(trust, policy=policy), suite=suite_digest(), now=now, vouched=True)
    return Offer(
        image=image,
        judged=_judge(image.subject, image.envelopes, image.revocations, court),
        sifs=tuple(
            OfferedSif(sif=sif, judged=_judge(sif.subject, sif.envelopes, sif.revocations, court))
            for sif in image.sifs
        ),
    )


def ages_of(offers: Iterable[Offer], now: datetime) -> ProofAges:
    """How old it is what can be relied on of images in any of their forms."""
    forms = [form for offer in offers for form in (offer.judged, *(one.judged for one in offer.sifs))]
    proofs = (proof for judged in forms for proof in last_proofs(judged).values())
    return proof_ages(proofs, now)


def _judge(
    subject: Subject, envelopes: Envelopes, revocations: Envelopes, court: Court
) -> tuple[Judged, ...]:
    revoked = judge_revocations(dict(revocations), subject, court).heeded
    return judge_verdicts(dict(envelopes), subject, replace(court, revocations=revoked))
