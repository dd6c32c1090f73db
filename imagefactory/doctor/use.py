"""Checks for the use of images (`job write`) and their verification (`verify`), and their fixes. Pure.

The results of queries (catalog, keys, pool) are passed in as values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from imagefactory.doctor.facts import Diagnosis, Health, ProbeResult

SOON = timedelta(days=14)
NEW_KEY = "imagefactory key create NAME && imagefactory key trust NAME"
JOIN = "ask your center for its invitation, then run imagefactory site join ADDRESS|FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKeyName:
    """A key that the settings trust, by its name."""

    name: str
    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFacts:
    """Facts for users of images. `catalog` is None if none is set, `verified` is a verified one of its
    `images`, empty without one.

    `catalog_notes` report an old or expiring catalog. `pool` is the answer of the scheduler, None without
    its commands. `site` is the setting. `reader`: the HTCondor package is installed, else `mend` installs
    it. `signers` are this user's trusted keys. With several centers, `centers` has the facts of each, and
    `center` its name. `own`: the images are of a project of this person.
    """

    now: datetime
    keys: tuple[TrustedKeyName, ...]
    pool: ProbeResult | None
    catalog: ProbeResult | None = None
    catalog_notes: tuple[str, ...] = ()
    images: int = 0
    verified: str = ""
    site: str = "generic"
    site_origin: str = "default"
    reader: bool = True
    mend: str = ""
    factory: ProbeResult | None = None
    signers: tuple[str, ...] = ()
    own: bool = False
    center: str = ""
    centers: tuple[UsageFacts, ...] = ()


def diagnose_submit(facts: UsageFacts) -> tuple[Diagnosis, ...]:
    """Return the lines for writing job files, with a project or without."""
    centers = (line for center in facts.centers for line in _center(center))
    catalog_diagnoses = (
        ()
        if facts.centers
        else (*_diagnose_catalog(facts), *_trust(facts, own_catalog=facts.own), _site(facts))
    )
    return (*catalog_diagnoses, *centers, _pool(facts), *_reader(facts))


def _center(facts: UsageFacts) -> Iterator[Diagnosis]:
    """Yield the lines of one center of several, with its name."""
    for line in (*_diagnose_catalog(facts), *_trust(facts), _site(facts)):
        yield replace(line, name=f"{facts.center}: {line.name}")


def diagnose_verify(facts: UsageFacts, machine: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """Return the lines for verification; `machine` are those of GPUs, runner and store here.

    A pool needs no GPU of this machine and no sandbox.
    """
    pooled = facts.pool is not None and not facts.pool.refusal
    factory = (facts.factory.judge(Health.MISSING, use="use"),) if facts.factory else ()
    relevant = tuple(finding for finding in machine if not (pooled and finding.needed_for in ("run", "gpu")))
    return (*factory, *_trust(facts, own_catalog=True), _signer(facts), _pool(facts), *relevant)


def is_working(findings: tuple[Diagnosis, ...]) -> bool:
    """Return whether nothing is missing or denied."""
    return not any(finding.state in (Health.MISSING, Health.DENIED) for finding in findings)


def _diagnose_catalog(facts: UsageFacts) -> Iterator[Diagnosis]:
    if facts.catalog is None:
        yield _line("catalog", Health.MISSING, "no catalog is set", JOIN)
        return
    yield facts.catalog.judge(Health.DENIED, use="use")
    if not facts.catalog.refusal:
        for note in facts.catalog_notes:
            yield _line("catalog", Health.WARNING, note)
        if facts.verified:
            summary = f"{facts.images}; a key that you trust verified {facts.verified}"
            yield _line("images", Health.OK, summary)
        else:
            summary = f"none of {facts.images} is verified by keys that you trust"
            yield _line("images", Health.WARNING, summary, "see the predictions: imagefactory search")


def _trust(facts: UsageFacts, *, own_catalog: bool = False) -> Iterator[Diagnosis]:
    """Yield the lines of trusted keys. `own_catalog`: verification signs with the user's key, uninvited."""
    if not facts.keys:
        yield _line(
            "trust",
            Health.MISSING,
            "no key is trusted, so no verdict counts",
            NEW_KEY if own_catalog else JOIN,
        )
    for key in facts.keys:
        name, until = f"key {key.name}", f"{key.until:%Y-%m-%d}"
        if key.until <= facts.now and any(other.since <= facts.now < other.until for other in facts.keys):
            yield _line(name, Health.OK, f"retired on {until}: its older verdicts still count")
        elif key.until <= facts.now:
            remedy = NEW_KEY if own_catalog else "join the center again, or delete this key"
            yield _line(name, Health.WARNING, f"expired on {until}", remedy)
        elif key.since > facts.now:
            yield _line(name, Health.WARNING, f"not valid before {key.since:%Y-%m-%d}")
        elif key.until - facts.now < SOON:
            remedy = (
                "replace it: imagefactory key rotate"
                if own_catalog
                else "join the center again: imagefactory site join"
            )
            yield _line(name, Health.WARNING, f"expires soon, on {until}", remedy)
        else:
            yield _line(name, Health.OK, f"trusted until {until}")


def _site(facts: UsageFacts) -> Diagnosis:
    if facts.site_origin != "default":
        return _line("site", Health.OK, f"{facts.site} ({facts.site_origin})")
    remedy = 'write site = "chtc", or another site of `imagefactory job write --help`, in your settings'
    return _line(
        "site", Health.WARNING, "no site is set, so job files omit the rules of your cluster", remedy
    )


def _pool(facts: UsageFacts) -> Diagnosis:
    if facts.pool is None:
        what = "condor_submit is not installed, so you cannot submit jobs here"
        return _line("pool", Health.WARNING, what, "submit the files on the access point of your pool")
    return facts.pool.judge(Health.WARNING, use="use")


def _reader(facts: UsageFacts) -> Iterator[Diagnosis]:
    if not facts.reader:
        problem = "job check requires the HTCondor package, which is not installed"
        yield _line("job check", Health.WARNING, problem, facts.mend)


def _signer(facts: UsageFacts) -> Diagnosis:
    if facts.signers:
        return _line("signing", Health.OK, f"with {', '.join(facts.signers)}")
    problem = "you have no trusted key, so verdicts stay unsigned"
    return _line("signing", Health.WARNING, problem, NEW_KEY)


def _line(name: str, state: Health, detail: str, remedy: str = "") -> Diagnosis:
    return Diagnosis(name, state, detail, remedy, "use")
