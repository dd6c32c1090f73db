"""The verdicts about one image, judged, with the revocations that count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from imagefactory.oci.graph import Place
from imagefactory.trust.attached import Attached, read_revocations, read_verdicts
from imagefactory.trust.judgement import Court, judge_verdicts
from imagefactory.trust.verdict import Judged, RevokedCell, Standing
from imagefactory.verdicts.revocation import judge_revocations
from imagefactory.verdicts.revoked import revoked_cells
from imagefactory.verify.model import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The verdicts about one image, judged. `ignored` says which revocations do not count, and why.

    `tags` are those of the target that point to it, as far as they were looked for. `envelopes` and
    `revocations` are what was read, by the digests of the artifacts. `revoked` says who took what back.
    """

    place: str
    subject: Subject
    judged: tuple[Judged, ...]
    ignored: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    envelopes: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    revocations: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    revoked: tuple[RevokedCell, ...] = ()


def find_verdicts(place: Place, subject: Subject, court: Court, also: Sequence[Place] = ()) -> Found:
    """All verdicts that `place` has of an image, and the revocations that count applied, those of `also` too.

    Verdicts are attached to the platform manifest. One that was signed of the same content, packed in another
    way, is taken back where its own manifest is. Raises RegistryError or StoreError.
    """
    verdicts = read_verdicts(place, subject.manifest)
    envelopes = _envelopes(verdicts)
    first = judge_verdicts(envelopes, subject, court)
    good = [
        judgement.verdict for judgement in first if judgement.verdict and judgement.standing is Standing.GOOD
    ]
    manifests = sorted({subject.manifest, *(verdict.report.subject.manifest for verdict in good)})
    against = [
        attached for each in (place, *also) for own in manifests for attached in read_revocations(each, own)
    ]
    revocations = _envelopes(against)
    revoked = judge_revocations(revocations, subject, court)
    faults = {attached.digest: attached.fault for attached in verdicts if attached.fault}
    judged = judge_verdicts(
        envelopes, subject, replace(court, revocations=court.revocations + revoked.heeded)
    )
    told = tuple(replace(judgement, why=faults.get(judgement.digest, judgement.why)) for judgement in judged)
    return Found(
        place=str(place),
        subject=subject,
        judged=told,
        ignored=revoked.ignored,
        envelopes=envelopes,
        revocations=revocations,
        revoked=revoked_cells(told, subject, court.trust),
    )


def _envelopes(attached: Sequence[Attached]) -> Mapping[str, bytes]:
    return {one.digest: one.envelope for one in attached}
