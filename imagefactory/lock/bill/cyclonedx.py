"""A bill as CycloneDX 1.6 JSON."""

from __future__ import annotations

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component as CycloneComponent
from cyclonedx.model.component import ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.spdx import is_supported_id

from imagefactory import __version__
from imagefactory.extras.sbom.bill import Bill, Component, Kind, Licence


def format_cyclonedx(bill: Bill) -> str:
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


def _component(one: Component) -> CycloneComponent:
    properties = [Property(name="imagefactory:licence", value=f"NOASSERTION: {one.why}")] if one.why else []
    if one.source[0]:
        properties.append(Property(name="imagefactory:source", value=" ".join(one.source)))
    return CycloneComponent(
        name=one.name,
        version=one.version,
        group=one.namespace or None,
        type=ComponentType.CONTAINER if one.kind is Kind.OCI else ComponentType.LIBRARY,
        bom_ref=one.purl.to_string(),
        purl=one.purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one.sha256)] if one.sha256 else [],
        licenses=[_licence(licence, alone=len(one.licences) == 1) for licence in one.licences],
        properties=properties,
    )


def _licence(licence: Licence, *, alone: bool) -> DisjunctiveLicense | LicenseExpression:
    """The format takes one expression, or any number of single licences: an identifier or a name each."""
    if licence.spdx and is_supported_id(licence.text):
        return DisjunctiveLicense(id=licence.text)
    if licence.spdx and alone:
        return LicenseExpression(licence.text)
    return DisjunctiveLicense(name=licence.text)
