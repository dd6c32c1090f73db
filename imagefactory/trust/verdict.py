"""The values of verdicts: what was said, what was taken back, and how much it counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from imagefactory.model import Outcome
from imagefactory.verify.model import GpuReport, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A signed statement about one run. `report` is what it says; its outcome may be any word.

    `keyid` is that of the key that signed it, `digest` that of the signed payload: it stays the same whatever
    artifact carries the envelope, and is empty before the verdict is signed. It is valid from `issued` until
    `expires`, for its GPU's capability and for drivers from its own on.
    """

    report: GpuReport
    issued: datetime
    expires: datetime
    keyid: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A signed statement that verdicts of a subject hold no longer, signed by the key `keyid`.

    It speaks of verdicts about the manifest `subject`: of those in `verdicts` (digests of signed payloads, as
    Verdict.digest), where that is empty of all that were issued up to `before`; of one `capability`, all
    where that is empty. It takes back nothing that was issued from `end` on, when its key was retired; None
    for never. `about` is the image that `subject` is the manifest of.
    """

    subject: str
    verdicts: tuple[str, ...]
    capability: str
    before: datetime
    why: str
    keyid: str
    end: datetime | None = None
    about: Subject | None = None

    def covers(self, verdict: Verdict) -> bool:
        """Whether it takes this verdict back. Who may say so is judged when it is read."""
        report = verdict.report
        capability = report.device.capability if report.device else ""
        return (
            report.subject.manifest == self.subject
            and (verdict.digest in self.verdicts if self.verdicts else verdict.issued <= self.before)
            and self.capability in ("", capability)
            and (self.end is None or verdict.issued < self.end)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedCell:
    """Verdicts that were taken back: of the image or .sif `subject` on `capability`, empty for on any GPU.

    `by` is the name of the key `keyid` that signed the revocation at `when`, where it was judged.
    """

    subject: Subject
    capability: str
    by: str
    keyid: str
    when: datetime
    why: str

    @property
    def said(self) -> str:
        """Who took it back, when and why."""
        return f"revoked by {self.by} on {self.when:%Y-%m-%d}: {self.why}"

    @property
    def where(self) -> str:
        """`on 8.0`, or `on all GPUs`."""
        return f"on {self.capability}" if self.capability else "on all GPUs"


class Standing(StrEnum):
    """Whether a verdict can be relied on, in the word that says why not."""

    GOOD = "good"
    UNSIGNED = "unsigned"
    EDITED = "edited"
    WRONG_KEY = "wrong-key"
    KEY_RETIRED = "key-retired"
    OTHER_SUBJECT = "other-subject"
    OTHER_SUITE = "other-suite"
    EXPIRED = "expired"
    NOT_YET = "not-yet"
    REPLAYED = "replayed"
    EVIDENCE_REFUSED = "evidence-refused"
    REVOKED = "revoked"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict as found in a store, None where it cannot be read, and whether it can be relied on.

    `digest` is that of the artifact that carries it. Anyone who may push can carry it by another one, so
    nothing but the artifact itself is known by it: `name` is the verdict's. `revocation` took it back, where
    it is REVOKED.
    """

    digest: str
    standing: Standing
    why: str
    verdict: Verdict | None
    revocation: Revocation | None = None

    @property
    def name(self) -> str:
        """The digest that people name it by: the signed payload's, the artifact's where that is not read."""
        return self.verdict.digest if self.verdict else self.digest

    @property
    def proves(self) -> bool:
        """Whether it says `verified` and can be relied on."""
        return (
            self.standing is Standing.GOOD
            and self.verdict is not None
            and self.verdict.report.outcome is Outcome.VERIFIED
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """How far a target's image is, by the store alone; `verified` on these capabilities."""

    built: bool = False
    pushed: bool = False
    verified: tuple[str, ...] = ()
