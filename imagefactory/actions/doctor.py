"""Report what this machine and these settings lack to build images, run jobs, verify images or run a site."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from imagefactory.actions.centers import JoinedCenter, centers_of
from imagefactory.actions.doctor_site import examine_site
from imagefactory.actions.read_catalog import read_catalog
from imagefactory.doctor.facts import Diagnosis, Health, ProbeResult
from imagefactory.doctor.judge import can_build
from imagefactory.doctor.look import examine_machine
from imagefactory.doctor.use import TrustedKeyName, UsageFacts, diagnose_submit, diagnose_verify, is_working
from imagefactory.errors import ImagefactoryError, extra_hint
from imagefactory.jobs.offer import verified_evidence
from imagefactory.project import is_project, recipes_directory
from imagefactory.schedulers.pool import open_pool
from imagefactory.settings.choices import POOLS, local_pool
from imagefactory.settings.files import FILE_NAME, trust_command
from imagefactory.settings.load import Settings
from imagefactory.trust.catalog import Catalog
from imagefactory.trust.keys import keys_directory, own_keys
from imagefactory.trust.offers import verify_offer
from imagefactory.trust.policy import TrustRules, read_trust

PURPOSES = ("build", "job", "verify", "site")
"""The values of `doctor --for`, the default first."""
_MACHINE = (
    "python",
    "platform",
    "kernel",
    "user namespaces",
    "overlay",
    "limits",
    "landlock",
    "store",
    "GPU",
)
"""Names of the checks for building that are also useful for verifying on this machine."""


def examine_for(
    purpose: str, settings: Settings, environ: Mapping[str, str], now: datetime
) -> tuple[tuple[Diagnosis, ...], bool]:
    """Return the checks for a purpose, and whether nothing is missing."""
    project = _untrusted(settings)
    if purpose == "build":
        findings = (*project, *examine_machine(settings, environ=environ))
        return findings, can_build(findings)
    if purpose == "site":
        findings = project or examine_site(settings, environ, now)
    elif purpose == "job":
        findings = (*project, *diagnose_submit(_check_center(settings, environ, now, catalog=True)))
    else:
        programs = ("docker", "podman", "apptainer", *(("registry",) if settings.registry.value else ()))
        machine = tuple(
            finding
            for finding in examine_machine(settings, environ=environ, services=programs)
            if finding.name in (*_MACHINE, "registry")
            or (finding.name in programs and finding.needed_for == "run")
        )
        findings = (
            *project,
            *diagnose_verify(_check_center(settings, environ, now, catalog=False), machine),
        )
    return findings, is_working(findings)


def _untrusted(settings: Settings) -> tuple[Diagnosis, ...]:
    """Report the settings of an untrusted project: its registry and keys are ignored."""
    if not settings.untrusted:
        return ()
    names = ", ".join(setting.name for setting in settings.untrusted)
    return (
        Diagnosis(
            name="project",
            state=Health.DENIED,
            detail=f"{settings.root_path / FILE_NAME} sets {names}, and you do not trust this project",
            remedy=f"read that file. To trust it: {trust_command(settings.root_path)}",
        ),
    )


def _check_center(
    settings: Settings, environ: Mapping[str, str], now: datetime, *, catalog: bool
) -> UsageFacts:
    centers = centers_of(settings) if catalog else ()
    several = centers if len(centers) > 1 else ()
    center = centers[0] if centers and not several else None
    facts = _check_settings(center, center.settings if center else settings, environ, now)
    trusted = {key.keyid for key in read_trust(settings.files).keys}
    return replace(
        facts,
        centers=tuple(_check_settings(center, center.settings, environ, now) for center in several),
        pool=_pool(environ, now),
        reader=importlib.util.find_spec("classad2") is not None,
        mend=extra_hint("condor"),
        factory=_check_project(settings),
        signers=tuple(key.name for key in own_keys(keys_directory(environ)) if key.keyid in trusted),
    )


def _check_settings(
    center: JoinedCenter | None, settings: Settings, environ: Mapping[str, str], now: datetime
) -> UsageFacts:
    """Check the settings of a center. Without a center the catalog is not read."""
    trust = center.trust if center else read_trust(settings.files)
    facts = UsageFacts(
        now=now,
        keys=tuple(TrustedKeyName(name=key.name, since=key.since, until=key.until) for key in trust.keys),
        pool=None,
        site=settings.site.value,
        site_origin=settings.site.origin,
        own=is_project(settings),
        center=center.name if center else "",
    )
    if not center or not (facts.own or center.place):
        return facts
    try:
        catalog = read_catalog(settings, environ, now, hurried=center.several)
    except ImagefactoryError as error:
        probe = ProbeResult(name="catalog", refusal=error.message, remedy=error.hint)
        return replace(facts, catalog=probe)
    location = center.place or str(settings.root_path)
    summary = f"{location}, created {catalog.created:%Y-%m-%d}, valid until {catalog.expires:%Y-%m-%d}"
    return replace(
        facts,
        catalog=ProbeResult(name="catalog", answer=summary),
        catalog_notes=catalog.notes,
        images=len(catalog.images),
        verified=_verified_target(catalog, trust, now),
    )


def _verified_target(catalog: Catalog, trust: TrustRules, now: datetime) -> str:
    """Return the first target with a valid verdict by a trusted key, empty without one.

    The index of the catalog says which images may have one. Only these are read, until one has.
    """
    for number, entry in enumerate(catalog.entries if trust.keys else ()):
        if entry.verified:
            offer = verify_offer(catalog, catalog.images[number], trust, now)
            rows = (offer.judged, *(sif.judged for sif in offer.sifs))
            if any(verified_evidence(judged).verified for judged in rows):
                return entry.target
    return ""


def _pool(environ: Mapping[str, str], now: datetime) -> ProbeResult | None:
    """Return the pool of this machine, None if there are no commands of a pool."""
    if not (name := local_pool(environ)):
        return None
    try:
        pool = open_pool(name, environ)
        version, inventory = pool.require(), pool.inventory(now)
    except ImagefactoryError as error:
        return ProbeResult(name="pool", refusal=error.message, remedy=error.hint)
    free, gpus = sum(gpu.free for gpu in inventory.gpus), len(inventory.gpus)
    return ProbeResult(
        name="pool", answer=f"{POOLS[name].title} {version}, {inventory.pool}: {gpus} GPUs, {free} free"
    )


def _check_project(settings: Settings) -> ProbeResult:
    try:
        return ProbeResult(name="project", answer=str(recipes_directory(settings).parent))
    except ImagefactoryError as error:
        return ProbeResult(name="project", refusal=error.message, remedy=error.hint)
