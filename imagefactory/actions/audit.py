"""The log of acts of this store. If it cannot be written, a note says so and nothing stops."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from imagefactory.access import Access
from imagefactory.errors import ImagefactoryError, StatementError
from imagefactory.oci.candidates import APPROVAL_TYPE, REVOCATION_TYPE, VERDICT_TYPE
from imagefactory.progress import QUIET
from imagefactory.trust.approval import parse_approval
from imagefactory.trust.attached import SignedStatement
from imagefactory.trust.audit import APPROVE, REVOKE, SIGN, AuditEntry, append_audit
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.judgement import parse_revocation
from imagefactory.trust.verdict import parse_verdict


def log_acts(access: Access, entries: Iterable[AuditEntry], now: datetime | None = None) -> None:
    """Add entries to the log of the local store."""
    rows = tuple(entries)
    if not rows:
        return
    try:
        with access.layout.in_use(QUIET):
            append_audit(access.layout.path, rows, now or datetime.now(UTC))
    except (ImagefactoryError, OSError) as error:
        access.tell(f"cannot write to the log of the store ({rows[0].action} {rows[0].what}): {error}")


def log_statements(access: Access, where: str, statements: Iterable[SignedStatement]) -> None:
    """Log statements that were attached at `where`."""
    log_acts(access, (entry for statement in statements if (entry := _entry(where, statement))))


def _entry(where: str, statement: SignedStatement) -> AuditEntry | None:
    if statement.kind not in (VERDICT_TYPE, REVOCATION_TYPE, APPROVAL_TYPE):
        return None
    try:
        opened = parse_envelope(statement.envelope, "a statement")
        if statement.kind == REVOCATION_TYPE:
            revocation = parse_revocation(opened.payload, "a statement", opened.keyid)
            action, why = REVOKE, revocation.why
        elif statement.kind == APPROVAL_TYPE:
            request, _ = parse_approval(opened.payload, "a statement")
            action, why = APPROVE, f"{request.tag} -> {request.subject.index}"
        else:
            report = parse_verdict(opened.payload, "a statement", opened.keyid).report
            action = SIGN
            why = f"{report.outcome} on {report.device.capability if report.device else 'no GPU'}"
    except StatementError:
        return None
    return AuditEntry(action=action, what=statement.subject.digest, where=where, key=opened.keyid, why=why)
