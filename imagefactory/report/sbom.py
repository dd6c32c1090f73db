"""What a bill of materials holds and what checks say of it, for people and as JSON. Pure."""

from __future__ import annotations

from imagefactory.lock.bill.allowed import LicenceCheck
from imagefactory.extras.sbom.bill import Bill, Licence
from imagefactory.extras.sbom.osv import Vulnerability, VulnerabilityCheck
from imagefactory.views.text import format_table


def format_bill(bill: Bill, path: str) -> str:
    count = len(bill.components)
    unknown = sum(not one.licences for one in bill.components)
    return f"wrote {path}: {count} packages, the licence of {unknown} not known"


def format_licences(check: LicenceCheck, width: int | None) -> str:
    """The licences there are, then each package that is not allowed or says none."""
    counted = [("yes" if fits else "no", str(count), one.text) for one, count, fits in check.counted]
    blocks = [format_table(("ALLOWED", "PACKAGES", "LICENCE"), counted, width)] if counted else []
    rows = [(one.name, one.version, f"not allowed: {_joined(wrong)}") for one, wrong in check.refused]
    rows += [(one.name, one.version, f"unknown: {one.why}") for one in check.unknown]
    if rows:
        blocks.append(format_table(("PACKAGE", "VERSION", "LICENCE"), rows, width))
    refused, unknown = len(check.refused), len(check.unknown)
    blocks.append(
        f"packages: {refused} not allowed, {unknown} unknown" if rows else "licences: all are allowed"
    )
    return "\n\n".join(blocks)


def format_vulnerabilities(check: VulnerabilityCheck, width: int | None) -> str:
    rows = [(one.package, one.version, one.id, _fixed(one), " ".join(one.aliases)) for one in check.found]
    header = ("PACKAGE", "VERSION", "VULNERABILITY", "FIXED IN", "ALIASES")
    blocks = [format_table(header, rows, width, drop=("ALIASES",))] if rows else []
    lines = [f"checked: {count} packages of {ecosystem}" for ecosystem, count in check.checked]
    lines += [f"not checked: {count} {why}" for why, count in check.unchecked]
    lines.append(f"vulnerabilities: {len(check.found) or 'none'} found")
    return "\n\n".join([*blocks, "\n".join(lines)])


def bill_json(bill: Bill) -> dict[str, object]:
    return {
        "name": bill.name,
        "digest": bill.digest,
        "packages": len(bill.components),
        "without_licence": [one.purl.to_string() for one in bill.components if not one.licences],
    }


def licences_json(check: LicenceCheck) -> dict[str, object]:
    return {
        "holds": check.holds,
        "licences": [
            {"licence": one.text, "spdx": one.spdx, "packages": count, "allowed": fits}
            for one, count, fits in check.counted
        ],
        "refused": [
            {"package": one.purl.to_string(), "licences": [licence.text for licence in wrong]}
            for one, wrong in check.refused
        ],
        "unknown": [{"package": one.purl.to_string(), "reason": one.why} for one in check.unknown],
    }


def vulnerabilities_json(check: VulnerabilityCheck) -> dict[str, object]:
    return {
        "holds": not check.found,
        "found": check.found,
        "checked": dict(check.checked),
        "not_checked": dict(check.unchecked),
    }


def _joined(licences: tuple[Licence, ...]) -> str:
    return ", ".join(one.text for one in licences)


def _fixed(one: Vulnerability) -> str:
    return one.fixed or "-" if one.decided else "undecided"
