"""A bill as SPDX 2.3 JSON."""

from __future__ import annotations

import io
import re

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component as CycloneComponent
from cyclonedx.model.component import ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.model.license import LicenseExpression as CycloneDxExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.spdx import is_supported_id
from license_expression import LicenseExpression
from spdx_tools.spdx.model import (
    Actor,
    ActorType,
    Checksum,
    ChecksumAlgorithm,
    CreationInfo,
    Document,
    ExternalPackageRef,
    ExternalPackageRefCategory,
    ExtractedLicensingInfo,
    Package,
    PackagePurpose,
    Relationship,
    RelationshipType,
    SpdxNoAssertion,
)
from spdx_tools.spdx.writer.json.json_writer import write_document_to_stream

from imagefactory import __version__
from imagefactory.extras.sbom.bill import BillComponent, BillOfMaterials, ComponentLicense, PackageType
from imagefactory.extras.sbom.licenses import LICENSING

_DOCUMENT, _ROOT = "SPDXRef-DOCUMENT", "SPDXRef-image"


def format_spdx(bill: BillOfMaterials) -> str:
    """The same bill gives the same bytes."""
    identifiers = [f"SPDXRef-{n}-{_plain(f'{c.kind}-{c.name}')}" for n, c in enumerate(bill.components, 1)]
    by_key = {one.key: identifier for one, identifier in zip(bill.components, identifiers, strict=True)}
    names = _references(bill)
    document = Document(
        creation_info=CreationInfo(
            spdx_version="SPDX-2.3",
            spdx_id=_DOCUMENT,
            name=bill.name,
            document_namespace=f"urn:uuid:{bill.serial}",
            creators=[Actor(ActorType.TOOL, f"imagefactory-{__version__}")],
            created=bill.moment.replace(tzinfo=None),
        ),
        packages=[
            Package(
                spdx_id=_ROOT,
                name=bill.name,
                version=bill.digest,
                download_location=SpdxNoAssertion(),
                files_analyzed=False,
                primary_package_purpose=PackagePurpose.CONTAINER,
            ),
            *(
                _package(one, identifier, names)
                for one, identifier in zip(bill.components, identifiers, strict=True)
            ),
        ],
        relationships=[
            Relationship(_DOCUMENT, RelationshipType.DESCRIBES, _ROOT),
            *(Relationship(_ROOT, RelationshipType.CONTAINS, identifier) for identifier in identifiers),
            *(
                Relationship(by_key[owner], RelationshipType.CONTAINS, by_key[one.key])
                for one in bill.components
                for owner in one.within
                if owner in by_key
            ),
        ],
        extracted_licensing_info=[
            ExtractedLicensingInfo(license_id=reference, license_name=name, extracted_text=name)
            for name, reference in names.items()
        ],
    )
    text = io.StringIO()
    # The library's own check costs seconds; that what is written here passes it, tests hold.
    write_document_to_stream(document, text, validate=False, drop_duplicates=False)
    return text.getvalue() + "\n"


def _package(one: BillComponent, identifier: str, names: dict[str, str]) -> Package:
    return Package(
        spdx_id=identifier,
        name=one.name,
        version=one.version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        checksums=[Checksum(ChecksumAlgorithm.SHA256, one.sha256)] if one.sha256 else [],
        source_info=" ".join(one.source) if one.source[0] else None,
        license_concluded=SpdxNoAssertion(),
        license_declared=_declared(one.licences, names) if one.licences else SpdxNoAssertion(),
        license_comment=one.why or None,
        copyright_text=SpdxNoAssertion(),
        external_references=[
            ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", one.purl.to_string())
        ],
        primary_package_purpose=PackagePurpose.CONTAINER
        if one.kind is PackageType.OCI
        else PackagePurpose.LIBRARY,
    )


def _declared(licences: tuple[ComponentLicense, ...], names: dict[str, str]) -> LicenseExpression:
    texts = [one.text if one.spdx else names[one.text] for one in licences]
    return LICENSING.parse(" AND ".join(f"({text})" for text in texts) if len(texts) > 1 else texts[0])


def _references(bill: BillOfMaterials) -> dict[str, str]:
    """The reference of each licence that has a name and no identifier."""
    names = sorted({one.text for part in bill.components for one in part.licences if not one.spdx})
    given: dict[str, str] = {}
    for name in names:
        plain = reference = f"LicenseRef-{_plain(name.removeprefix('LicenseRef-'))}"
        while reference in given.values():
            reference = f"{plain}-{len(given)}"
        given[name] = reference
    return given


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-") or "unnamed"


# --- A bill as CycloneDX 1.6 JSON


def format_cyclonedx(bill: BillOfMaterials) -> str:
    """The same bill gives the same bytes."""
    root = CycloneComponent(
        name=bill.name,
        version=bill.digest,
        type=ComponentType.CONTAINER,
        bom_ref="image",
    )
    tool = CycloneComponent(
        name="imagefactory", version=__version__, type=ComponentType.APPLICATION, bom_ref="imagefactory"
    )
    bom = Bom(
        serial_number=bill.serial,
        metadata=BomMetaData(
            tools=ToolRepository(components=[tool]),
            component=root,
            timestamp=bill.moment,
        ),
        components=[],
    )
    parts = [_component(one) for one in bill.components]
    for part in parts:
        bom.components.add(part)
    by_key = {one.key: part for one, part in zip(bill.components, parts, strict=True)}
    for one in bill.components:
        for owner in one.within:
            if owner in by_key:
                bom.register_dependency(by_key[owner], [by_key[one.key]])
    bom.register_dependency(root, parts)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _component(one: BillComponent) -> CycloneComponent:
    properties = [Property(name="imagefactory:licence", value=f"NOASSERTION: {one.why}")] if one.why else []
    if one.source[0]:
        properties.append(Property(name="imagefactory:source", value=" ".join(one.source)))
    return CycloneComponent(
        name=one.name,
        version=one.version,
        group=one.namespace or None,
        type=ComponentType.CONTAINER if one.kind is PackageType.OCI else ComponentType.LIBRARY,
        bom_ref=one.purl.to_string(),
        purl=one.purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one.sha256)] if one.sha256 else [],
        licenses=[_license(licence, alone=len(one.licences) == 1) for licence in one.licences],
        properties=properties,
    )


def _license(licence: ComponentLicense, *, alone: bool) -> DisjunctiveLicense | CycloneDxExpression:
    """The format takes one expression, or any number of single licences: an identifier or a name each."""
    if licence.spdx and is_supported_id(licence.text):
        return DisjunctiveLicense(id=licence.text)
    if licence.spdx and alone:
        return CycloneDxExpression(licence.text)
    return DisjunctiveLicense(name=licence.text)
