"""The commands `image sbom`, `image audit` and `image attest`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    json_option,
    print_json,
    print_json_document,
    print_result,
    registry_option,
    reject_conflict,
    terminal_width,
)
from imagefactory.errors import EXIT_AUDIT, UsageError
from imagefactory.views.text import format_fields, format_table

if TYPE_CHECKING:
    from imagefactory.extras.sbom.attest import IdentityResult
    from imagefactory.extras.sbom.bill import BillOfMaterials, ComponentLicense, LicenseCheck
    from imagefactory.extras.sbom.osv import Vulnerability, VulnerabilityCheck

# --- Bills of materials and results of checks, as text and as JSON. Pure


def format_bill(bill: BillOfMaterials, path: str) -> str:
    count = len(bill.components)
    unknown = sum(not component.licenses for component in bill.components)
    return f"wrote {path}: {count} packages, {unknown} of them without a known license"


def format_licenses(check: LicenseCheck, width: int | None) -> str:
    """Return a table of the licenses, then each package whose license is not allowed or unknown."""
    counted = [("yes" if fits else "no", str(count), license.text) for license, count, fits in check.counted]
    blocks = [format_table(("ALLOWED", "PACKAGES", "LICENSE"), counted, width)] if counted else []
    rows = [
        (component.name, component.version, f"not allowed: {_joined(wrong)}")
        for component, wrong in check.refused
    ]
    rows += [(component.name, component.version, f"unknown: {component.why}") for component in check.unknown]
    if rows:
        blocks.append(format_table(("PACKAGE", "VERSION", "LICENSE"), rows, width))
    refused, unknown = len(check.refused), len(check.unknown)
    blocks.append(
        f"packages: {refused} not allowed, {unknown} unknown" if rows else "licenses: all are allowed"
    )
    return "\n\n".join(blocks)


def format_vulnerabilities(check: VulnerabilityCheck, width: int | None) -> str:
    rows = [(row.package, row.version, row.id, _fixed(row), " ".join(row.aliases)) for row in check.found]
    header = ("PACKAGE", "VERSION", "VULNERABILITY", "FIXED IN", "ALIASES")
    blocks = [format_table(header, rows, width, drop=("ALIASES",))] if rows else []
    lines = [f"checked: {count} packages of {ecosystem}" for ecosystem, count in check.checked]
    lines += [f"not checked: {count} {reason}" for reason, count in check.unchecked]
    lines.append(f"vulnerabilities: {len(check.found) or 'none'} found")
    return "\n\n".join([*blocks, "\n".join(lines)])


class BillFields(TypedDict):
    name: str
    digest: str
    packages: int
    unknown_licenses: list[str]
    """The packages that declare no license, as package URLs."""


class ImageSbomDocument(BillFields):
    """The file of a bill of materials."""

    format: Literal["imagefactory.image-sbom/1"]
    path: str
    type: str
    """`cyclonedx` or `spdx`."""


class LicenseRow(TypedDict):
    license: str
    spdx: bool
    """Whether it is an SPDX expression."""
    packages: int
    allowed: bool


class RejectedPackageRow(TypedDict):
    package: str
    licenses: list[str]


class UnknownPackageRow(TypedDict):
    package: str
    reason: str


class LicenseCheckRow(TypedDict):
    passed: bool
    licenses: list[LicenseRow]
    rejected: list[RejectedPackageRow]
    unknown: list[UnknownPackageRow]


class VulnerabilityCheckRow(TypedDict):
    passed: bool
    found: list[Vulnerability]
    checked: dict[str, int]
    """The number of packages by ecosystem."""
    not_checked: dict[str, int]
    """The number of packages by reason."""


class ImageAuditDocument(BillFields):
    """The licenses and the known vulnerabilities of an image."""

    format: Literal["imagefactory.image-audit/1"]
    licenses: NotRequired[LicenseCheckRow]
    vulnerabilities: NotRequired[VulnerabilityCheckRow]


def _bill_json(bill: BillOfMaterials) -> BillFields:
    unknown = [component.purl.to_string() for component in bill.components if not component.licenses]
    return BillFields(
        name=bill.name, digest=bill.digest, packages=len(bill.components), unknown_licenses=unknown
    )


def _licenses_json(check: LicenseCheck) -> LicenseCheckRow:
    return LicenseCheckRow(
        passed=check.holds,
        licenses=[
            LicenseRow(license=license.text, spdx=license.spdx, packages=count, allowed=allowed)
            for license, count, allowed in check.counted
        ],
        rejected=[
            RejectedPackageRow(
                package=component.purl.to_string(), licenses=[license.text for license in wrong]
            )
            for component, wrong in check.refused
        ],
        unknown=[
            UnknownPackageRow(package=component.purl.to_string(), reason=component.why)
            for component in check.unknown
        ],
    )


def _vulnerabilities_json(check: VulnerabilityCheck) -> VulnerabilityCheckRow:
    return VulnerabilityCheckRow(
        passed=not check.found,
        found=list(check.found),
        checked=dict(check.checked),
        not_checked=dict(check.unchecked),
    )


def _joined(licenses: tuple[ComponentLicense, ...]) -> str:
    return ", ".join(license.text for license in licenses)


def _fixed(vulnerability: Vulnerability) -> str:
    return vulnerability.fixed or "-" if vulnerability.decided else "undecided"


_image_argument = click.argument("name", metavar="TARGET|IMAGE", shell_complete=complete_targets)


@click.command(cls=Command)
@_image_argument
@click.option(
    "--format",
    "kind",
    type=click.Choice(["cyclonedx", "spdx"]),
    default="cyclonedx",
    show_default=True,
    help="Write CycloneDX 1.6 or SPDX 2.3, as JSON.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file.  [default: stdout]",
)
@json_option
@click.pass_obj
def sbom(call: CommandContext, name: str, kind: str, output: Path | None, as_json: bool) -> None:
    """Write the bill of materials of a target or an image.

    \b
    imagefactory image sbom pytorch-2.3-cu121          a target: its locks
    imagefactory image sbom pytorch:2.3-cu121          an image of the store
    imagefactory image sbom registry.example.org/pytorch:2.3

    It lists every package with its hash and the license that it declares. An unknown license is
    NOASSERTION.
    """
    from imagefactory.extras.sbom.action import bill_of
    from imagefactory.extras.sbom.formats import format_cyclonedx, format_spdx
    from imagefactory.fs import replace_text

    reject_conflict(
        as_json and not output,
        "--json requires --output: the bill of materials itself is JSON",
        "remove --json, or write the bill with --output",
    )
    bill = bill_of(call.access, lambda: call.factory_if_any, name, call.progress)
    text = (format_cyclonedx if kind == "cyclonedx" else format_spdx)(bill)
    if output is None:
        return print_json_document(text.rstrip("\n"))
    replace_text(output, text)
    if as_json:
        return print_json(
            ImageSbomDocument(
                {
                    **_bill_json(bill),
                    "format": "imagefactory.image-sbom/1",
                    "path": str(output),
                    "type": kind,
                }
            )
        )
    return print_result(format_bill(bill, str(output)))


@click.command(cls=Command)
@_image_argument
@click.option(
    "--check",
    "checks",
    multiple=True,
    type=click.Choice(["licenses", "vulnerabilities"]),
    help="What to check (repeatable).  [default: licenses; with --osv, both if licenses are allowed]",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="LICENSE",
    help="Allow this license: MIT, 'BSD-*', 'BSD License'.  [default: the setting `licenses`]",
)
@click.option(
    "--osv",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE|DIR",
    help="Read OSV records from this file, directory or export (all.zip).",
)
@json_option
@click.pass_obj
def audit(
    call: CommandContext,
    name: str,
    checks: tuple[str, ...],
    allow: tuple[str, ...],
    osv: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Check licenses and known vulnerabilities of an image.

    \b
    imagefactory image audit pytorch:2.3-cu121 --allow 'BSD-*' --allow MIT
    imagefactory image audit pytorch:2.3-cu121 --osv all.zip

    Exit code 10 if a package has a vulnerability or a license that is not allowed.
    """
    from itertools import chain

    from imagefactory.extras.sbom.action import bill_of
    from imagefactory.extras.sbom.licenses import check_licenses
    from imagefactory.extras.sbom.osv import check_vulnerabilities, read_records

    access = call.access
    allowed = allow or access.settings.allowed_licenses
    if not checks:
        checks = ("licenses",) * (bool(allowed) or not osv) + ("vulnerabilities",) * bool(osv)
    _check_useful_options(checks, allow, osv, allowed)
    bill = bill_of(access, lambda: call.factory_if_any, name, call.progress)
    blocks, passed, fields = list[str](), True, _bill_json(bill)
    document = ImageAuditDocument(
        format="imagefactory.image-audit/1",
        name=fields["name"],
        digest=fields["digest"],
        packages=fields["packages"],
        unknown_licenses=fields["unknown_licenses"],
    )
    width = terminal_width()
    if "licenses" in checks:
        licenses = check_licenses(bill, allowed)
        blocks.append(format_licenses(licenses, width))
        document["licenses"] = _licenses_json(licenses)
        passed = licenses.holds
    if "vulnerabilities" in checks:
        vulnerabilities = check_vulnerabilities(bill, chain.from_iterable(map(read_records, osv)))
        blocks.append(format_vulnerabilities(vulnerabilities, width))
        document["vulnerabilities"] = _vulnerabilities_json(vulnerabilities)
        passed = passed and not vulnerabilities.found
    if as_json:
        print_json(document)
    else:
        print_result("\n\n".join(blocks))
    raise click.exceptions.Exit(0 if passed else EXIT_AUDIT)


def _check_useful_options(
    checks: tuple[str, ...], allow: tuple[str, ...], osv: tuple[Path, ...], allowed: tuple[str, ...]
) -> None:
    """Raise UsageError for options without effect, and for checks without their inputs."""
    for option, value, check in (("--allow", allow, "licenses"), ("--osv", osv, "vulnerabilities")):
        reject_conflict(
            value and check not in checks, f"{option} requires --check {check}", f"add --check {check}"
        )
    if "licenses" in checks and not allowed:
        raise UsageError(
            "argument-missing",
            "no license is allowed",
            hint="add --allow MIT --allow 'BSD-*', or the setting licenses = \"MIT,BSD-*\"",
        )
    if "vulnerabilities" in checks and not osv:
        raise UsageError(
            "argument-missing",
            "no OSV records",
            hint="add --osv all.zip (an export of an ecosystem), a directory or a file",
        )


class IdentityBundleRow(TypedDict):
    predicate_type: str
    subject: str
    """The digest of the manifest that it is about."""
    artifact: str
    """The digest of the bundle's artifact."""
    attached: bool
    """False if the registry had it already."""


class ImageAttestDocument(TypedDict):
    """The bundles of an image that the identity of a CI job signed."""

    format: Literal["imagefactory.image-attest/1"]
    place: str
    digest: str
    identity: str
    issuer: str
    bundles: list[IdentityBundleRow]


def format_attest(result: IdentityResult) -> str:
    rows = [
        ("attached" if row.attached else "unchanged", f"{row.predicate} of {row.subject}")
        for row in result.bundles
    ]
    return format_fields([("identity", result.identity), ("issuer", result.issuer), *rows])


@click.command(cls=Command)
@_image_argument
@registry_option
@click.option(
    "--trust-config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Use the Sigstore in this file.  [default: the public one]",
)
@json_option
@click.pass_obj
def attest(call: CommandContext, name: str, place: str, trust_config: Path | None, as_json: bool) -> None:
    """Sign verdicts and provenance by a CI job's identity.

    \b
    imagefactory image attest pytorch-2.3-cu121
    imagefactory image attest registry.example.org/gpu/pytorch@sha256:...

    In GitHub Actions, with `permissions: id-token: write`. Each passed verdict that counts, its test result
    and the provenance of `push --sbom` get a Sigstore bundle with a certificate of the workflow. Sigstore's
    public log then shows the names of repository and workflow forever. imagefactory itself trusts keys only.
    """
    from datetime import UTC, datetime

    from imagefactory.actions.transfer import target_reference
    from imagefactory.actions.verdicts import place_of
    from imagefactory.extras.sbom.attest import attest_by_identity
    from imagefactory.oci.store import parse_reference

    project = call.factory
    reject_conflict("/" in name and place, f"'{name}' already has a registry", "remove --registry")
    image = parse_reference(name) if "/" in name else target_reference(project, name, place)[1]
    result = attest_by_identity(
        project, place_of(project, image), image.tag_or_digest, trust_config, datetime.now(UTC), call.progress
    )
    if not as_json:
        return print_result(format_attest(result))
    return print_json(
        ImageAttestDocument(
            format="imagefactory.image-attest/1",
            place=result.place,
            digest=result.digest,
            identity=result.identity,
            issuer=result.issuer,
            bundles=[
                IdentityBundleRow(
                    predicate_type=row.predicate,
                    subject=row.subject,
                    artifact=row.artifact,
                    attached=row.attached,
                )
                for row in result.bundles
            ],
        )
    )
