"""A bill of materials as SPDX 2.3 JSON and as CycloneDX 1.6 JSON."""

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
    """Return the bill as SPDX. Equal bills give equal bytes."""
    identifiers = [f"SPDXRef-{n}-{_plain(f'{c.kind}-{c.name}')}" for n, c in enumerate(bill.components, 1)]
    by_key = {
        component.key: identifier for component, identifier in zip(bill.components, identifiers, strict=True)
    }
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
                _package(component, identifier, names)
                for component, identifier in zip(bill.components, identifiers, strict=True)
            ),
        ],
        relationships=[
            Relationship(_DOCUMENT, RelationshipType.DESCRIBES, _ROOT),
            *(Relationship(_ROOT, RelationshipType.CONTAINS, identifier) for identifier in identifiers),
            *(
                Relationship(by_key[owner], RelationshipType.CONTAINS, by_key[component.key])
                for component in bill.components
                for owner in component.within
                if owner in by_key
            ),
        ],
        extracted_licensing_info=[
            ExtractedLicensingInfo(license_id=reference, license_name=name, extracted_text=name)
            for name, reference in names.items()
        ],
    )
    text = io.StringIO()
    # The check of the library takes seconds; tests verify that the document passes it.
    write_document_to_stream(document, text, validate=False, drop_duplicates=False)
    return text.getvalue() + "\n"


def _package(component: BillComponent, identifier: str, names: dict[str, str]) -> Package:
    return Package(
        spdx_id=identifier,
        name=component.name,
        version=component.version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        checksums=[Checksum(ChecksumAlgorithm.SHA256, component.sha256)] if component.sha256 else [],
        source_info=" ".join(component.source) if component.source[0] else None,
        license_concluded=SpdxNoAssertion(),
        license_declared=_declared(component.licenses, names) if component.licenses else SpdxNoAssertion(),
        license_comment=component.why or None,
        copyright_text=SpdxNoAssertion(),
        external_references=[
            ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", component.purl.to_string())
        ],
        primary_package_purpose=PackagePurpose.CONTAINER
        if component.kind is PackageType.OCI
        else PackagePurpose.LIBRARY,
    )


def _declared(licenses: tuple[ComponentLicense, ...], names: dict[str, str]) -> LicenseExpression:
    texts = [license.text if license.spdx else names[license.text] for license in licenses]
    return LICENSING.parse(" AND ".join(f"({text})" for text in texts) if len(texts) > 1 else texts[0])


def _references(bill: BillOfMaterials) -> dict[str, str]:
    """Return the reference of each license that has a name but no SPDX identifier."""
    names = sorted(
        {license.text for part in bill.components for license in part.licenses if not license.spdx}
    )
    references: dict[str, str] = {}
    for name in names:
        plain = reference = f"LicenseRef-{_plain(name.removeprefix('LicenseRef-'))}"
        while reference in references.values():
            reference = f"{plain}-{len(references)}"
        references[name] = reference
    return references


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-") or "unnamed"


# --- CycloneDX 1.6 JSON


def format_cyclonedx(bill: BillOfMaterials) -> str:
    """Return the bill as CycloneDX. Equal bills give equal bytes."""
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
    parts = [_component(component) for component in bill.components]
    for part in parts:
        bom.components.add(part)
    by_key = {component.key: part for component, part in zip(bill.components, parts, strict=True)}
    for component in bill.components:
        for owner in component.within:
            if owner in by_key:
                bom.register_dependency(by_key[owner], [by_key[component.key]])
    bom.register_dependency(root, parts)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _component(component: BillComponent) -> CycloneComponent:
    properties = (
        [Property(name="imagefactory:license", value=f"NOASSERTION: {component.why}")]
        if component.why
        else []
    )
    if component.source[0]:
        properties.append(Property(name="imagefactory:source", value=" ".join(component.source)))
    return CycloneComponent(
        name=component.name,
        version=component.version,
        group=component.namespace or None,
        type=ComponentType.CONTAINER if component.kind is PackageType.OCI else ComponentType.LIBRARY,
        bom_ref=component.purl.to_string(),
        purl=component.purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=component.sha256)] if component.sha256 else [],
        licenses=[_license(license, alone=len(component.licenses) == 1) for license in component.licenses],
        properties=properties,
    )


def _license(license: ComponentLicense, *, alone: bool) -> DisjunctiveLicense | CycloneDxExpression:
    """Return a license. The format allows one expression, or any number of identifiers and names."""
    if license.spdx and is_supported_id(license.text):
        return DisjunctiveLicense(id=license.text)
    if license.spdx and alone:
        return CycloneDxExpression(license.text)
    return DisjunctiveLicense(name=license.text)
