"""From a report to a verdict: the key that signs here, and the nonce that is spent on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access
from imagefactory.serialize import format_time
from imagefactory.errors import CheckFailedError, StatementError
from imagefactory.settings.load import read_ledger_key
from imagefactory.trust.envelope import format_json
from imagefactory.trust.keys import SigningKey, find_key, read_signing_key
from imagefactory.verdicts.statement import Signed, sign, signable
from imagefactory.trust.policy import read_trust
from imagefactory.verify.model import GpuReport
from imagefactory.verify.nonces import AskedRun, NonceLedger, ci_run_of
from imagefactory.verify.report import format_gpu_report


def ledger(access: Access, named: Path | None = None) -> NonceLedger:
    """The nonces of this store, or those of a named folder, with the key that the environment has for it.

    A ledger that is named may travel between the jobs of a CI run, and belongs to that run. Raises UsageError
    for a key that can be guessed: everybody may read what it has signed.
    """
    if named:
        return NonceLedger(named, read_ledger_key(access.environ), ci_run=ci_run_of(access.environ))
    return NonceLedger(access.layout.path / "nonces")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedReport:
    """`signed` is None where the report stays one; `why` says so in a line."""

    signed: Signed | None
    why: str


def signing_key(access: Access, now: datetime) -> SigningKey | None:
    """Return the key that signs on this machine at `now`, None if there is none.

    Raises CheckFailedError for a retired key, UsageError and StatementError for one that cannot be used.
    """
    trust, named = read_trust(access.settings.files), access.settings.signing_key
    path = find_key(named.value, access.environ, trust.periods, now)
    if path is None:
        return None
    key = read_signing_key(path)
    trusted = trust.key(key.keyid)
    if trusted and trusted.until <= now:
        hint = "replace it by a new key: imagefactory keys rotate"
        if named.value:
            hint = f"name the new key in signing-key ({named.origin}), or remove that setting"
        raise CheckFailedError(
            "signing-key-retired",
            f"the key '{key.name}' is retired since {format_time(trusted.until)} and cannot sign",
            hint=hint,
        )
    return key


def sign_report(access: Access, report: GpuReport, key: SigningKey | None, now: datetime) -> SignedReport:
    """Spends the nonce of a run of this machine and signs its report.

    What cannot be signed (no key, no run on a GPU that the host knows) stays a report. Raises NonceError.
    """
    if not signable(report):
        return SignedReport(signed=None, why=f"unsigned: '{report.outcome}' says nothing of the image")
    if key is None:
        return SignedReport(signed=None, why="unsigned: no key (imagefactory keys new NAME)")
    run = AskedRun(subject=report.subject, suite=report.suite, level=report.level)
    result = hashlib.sha256(format_json(format_gpu_report(report))).hexdigest()
    days = read_trust(access.settings.files).policy.days
    try:
        signed = sign(report, key, now=now, days=days)
    except StatementError as error:
        return SignedReport(signed=None, why=f"unsigned: {error.message}")
    ledger(access).spend(report.nonce, run, result=f"sha256:{result}", now=now)
    return SignedReport(signed=signed, why=f"signed by '{key.name}'")
