"""imagefactory sbom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    json_option,
    print_json,
    print_json_document,
    print_result,
    reject_conflict,
    terminal_width,
)
from imagefactory.errors import EXIT_BILL, UsageError
from imagefactory.views.text import format_table

if TYPE_CHECKING:
    from imagefactory.extras.sbom.bill import BillOfMaterials, ComponentLicense, LicenseCheck
    from imagefactory.extras.sbom.osv import Vulnerability, VulnerabilityCheck

# --- What a bill of materials holds and what checks say of it, for people and as JSON. Pure


def format_bill(bill: BillOfMaterials, path: str) -> str:
    count = len(bill.components)
    unknown = sum(not one.licences for one in bill.components)
    return f"wrote {path}: {count} packages, the licence of {unknown} not known"


def format_licenses(check: LicenseCheck, width: int | None) -> str:
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


def bill_json(bill: BillOfMaterials) -> dict[str, object]:
    return {
        "name": bill.name,
        "digest": bill.digest,
        "packages": len(bill.components),
        "without_licence": [one.purl.to_string() for one in bill.components if not one.licences],
    }


def licenses_json(check: LicenseCheck) -> dict[str, object]:
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


def _joined(licences: tuple[ComponentLicense, ...]) -> str:
    return ", ".join(one.text for one in licences)


def _fixed(one: Vulnerability) -> str:
    return one.fixed or "-" if one.decided else "undecided"


LICENSE_CHECKS, VULNERABILITIES = "licences", "vulnerabilities"


@click.command()
@click.argument("name", metavar="TARGET|IMAGE", shell_complete=complete_targets)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["cyclonedx", "spdx"]),
    default="cyclonedx",
    show_default=True,
    help="CycloneDX 1.6 or SPDX 2.3, both as JSON.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: stdout.")
@click.option(
    "--check",
    "checks",
    multiple=True,
    type=click.Choice([LICENSE_CHECKS, VULNERABILITIES]),
    help="Check it instead of printing it; exit code 10 where something is found.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="LICENCE",
    help="A licence that is allowed: MIT, 'BSD-*', 'BSD License'.  [default: the setting `licences`]",
)
@click.option(
    "--osv",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE|FOLDER",
    help="OSV records: a file, a folder of them, an export (all.zip).",
)
@json_option
@click.pass_obj
def sbom(
    call: CommandContext,
    name: str,
    kind: str,
    output: Path | None,
    checks: tuple[str, ...],
    allow: tuple[str, ...],
    osv: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Write the bill of materials: every package, its hash and licence.

    \b
      imagefactory sbom pytorch-2.3-cu121                    a target: what its locks name
      imagefactory sbom pytorch:2.3-cu121                    an image of the store, or its digest
      imagefactory sbom registry.example.org/pytorch:2.3     an image of a registry
      imagefactory sbom pytorch:2.3-cu121 --check licences --allow 'BSD-*' --allow MIT
      imagefactory sbom pytorch:2.3-cu121 --check vulnerabilities --osv all.zip

    Licences are what packages say of themselves: of a target those in the cache, else its image in the store.
    What is not known is NOASSERTION. The same input gives the same bytes.
    """
    from itertools import chain

    from imagefactory.extras.sbom.action import bill_of
    from imagefactory.extras.sbom.formats import format_cyclonedx, format_spdx
    from imagefactory.extras.sbom.licenses import check_licenses
    from imagefactory.extras.sbom.osv import check_vulnerabilities, read_records
    from imagefactory.fs import replace_text

    access = call.access
    allowed = allow or access.settings.allowed_licences
    _check_useful_options(checks, (allow, osv, allowed), as_json=as_json and not output)
    bill = bill_of(access, lambda: call.factory_if_any, name, call.progress)
    blocks, value, holds = [], bill_json(bill), True
    if output or not checks:
        text = (format_cyclonedx if kind == "cyclonedx" else format_spdx)(bill)
        if output is None:
            return print_json_document(text.rstrip("\n"))
        replace_text(output, text)
        blocks.append(format_bill(bill, str(output)))
        value |= {"path": str(output), "kind": kind}
    width = terminal_width()
    if LICENSE_CHECKS in checks:
        licences = check_licenses(bill, allowed)
        blocks.append(format_licenses(licences, width))
        value[LICENSE_CHECKS] = licenses_json(licences)
        holds = licences.holds
    if VULNERABILITIES in checks:
        vulnerabilities = check_vulnerabilities(bill, chain.from_iterable(map(read_records, osv)))
        blocks.append(format_vulnerabilities(vulnerabilities, width))
        value[VULNERABILITIES] = vulnerabilities_json(vulnerabilities)
        holds = holds and not vulnerabilities.found
    if as_json:
        print_json("sbom", value)
    else:
        print_result("\n\n".join(blocks))
    raise click.exceptions.Exit(0 if holds else EXIT_BILL)


def _check_useful_options(
    checks: tuple[str, ...],
    inputs: tuple[tuple[str, ...], tuple[Path, ...], tuple[str, ...]],
    *,
    as_json: bool,
) -> None:
    """Raises UsageError for options without effect, and for checks without their inputs."""
    allow, osv, allowed = inputs
    reject_conflict(
        as_json and not checks,
        "--json requires --check: the bill of materials itself is JSON",
        "remove --json, or write the bill with --output",
    )
    licences, osv_option = "--check licences", "--check vulnerabilities"
    reject_conflict(allow and LICENSE_CHECKS not in checks, f"--allow requires {licences}", f"add {licences}")
    reject_conflict(
        osv and VULNERABILITIES not in checks, f"--osv requires {osv_option}", f"add {osv_option}"
    )
    if LICENSE_CHECKS in checks and not allowed:
        raise UsageError(
            "argument-missing",
            "no license is allowed",
            hint="add --allow MIT --allow 'BSD-*', or the setting licences = \"MIT,BSD-*\"",
        )
    if VULNERABILITIES in checks and not osv:
        raise UsageError(
            "argument-missing",
            "no OSV records are given",
            hint="add --osv all.zip (an export of an ecosystem), a directory or a file",
        )
