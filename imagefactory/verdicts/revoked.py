"""Verdicts that were taken back, as rows that say who did it, when, why, and of which image. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from imagefactory.trust.verdict import Judged, Revocation, RevokedCell, Standing
from imagefactory.trust.policy import Trust
from imagefactory.verify.model import Subject

MOST = 200
"""Rows of one target; older ones are left out."""


def cell_of(revocation: Revocation, subject: Subject, capability: str, trust: Trust) -> RevokedCell:
    """The row of a revocation that counts here: its key is one of `trust`."""
    key = trust.key(revocation.keyid)
    return RevokedCell(
        subject=subject,
        capability=capability,
        by=key.name if key else "unknown",
        keyid=revocation.keyid,
        when=revocation.before,
        why=revocation.why,
    )


def revoked_cells(judged: Iterable[Judged], subject: Subject, trust: Trust) -> tuple[RevokedCell, ...]:
    """The rows of verdicts on one image that were taken back, each GPU's capability once."""
    rows = (
        cell_of(
            one.revocation, subject, device.capability if (device := one.verdict.report.device) else "", trust
        )
        for one in judged
        if one.standing is Standing.REVOKED and one.revocation and one.verdict
    )
    return tuple(dict.fromkeys(rows))


def merge_revoked(*sources: Iterable[RevokedCell]) -> tuple[RevokedCell, ...]:
    """The rows of several sources, the newest first; one of any GPU only if no row has its GPUs."""
    rows = dict.fromkeys(row for source in sources for row in source)
    exact = {(row.subject.manifest, row.keyid, row.when) for row in rows if row.capability}
    kept = [row for row in rows if row.capability or (row.subject.manifest, row.keyid, row.when) not in exact]
    return tuple(
        sorted(kept, key=lambda row: (row.when, row.subject.manifest, row.capability), reverse=True)[:MOST]
    )
