"""Both documents: valid by their own libraries, the same bytes each time, and what is unknown is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from imagefactory.extras.sbom.bill import BillComponent, BillOfMaterials, ComponentLicense, PackageType
from imagefactory.extras.sbom.formats import format_cyclonedx, format_spdx
from imagefactory.extras.sbom.look import (
    NOT_AVAILABLE,
    components_without_license,
    lock_bill,
    with_image_licenses,
)
from imagefactory.model import BaseLock, DebianPackage
from tests.made.values import make_base, make_conda, make_lock

BASE = BaseLock(
    base="debian-12",
    suite="bookworm",
    content_hash="sha256:" + "0" * 64,
    source_date_epoch=1_700_000_000,
    packages=tuple(
        DebianPackage(name=name, version=version, architecture="amd64", sha256=digit * 64, size=1)
        for name, version, digit in (("base-files", "12.4+deb12u5", "a"), ("libstdc++6", "12.2.0-14", "b"))
    ),
)
NAMED = (
    ComponentLicense(text="BSD License", spdx=False),
    ComponentLicense(text="GPL-2.0-or-later OR MIT", spdx=True),
    ComponentLicense(text="MIT", spdx=True),
    ComponentLicense(text="BSD-License", spdx=False),
)


@pytest.fixture
def bill() -> BillOfMaterials:
    lock = make_lock(conda=(make_conda("libblas 3.9 h1_0"),))
    known = {"2" * 64: (NAMED, ""), "1" * 64: ((NAMED[1],), "")}
    return lock_bill(lock, make_base(), BASE, known)


def test_what_a_wheel_carries_is_below_it_in_both_documents(bill: BillOfMaterials, tmp_path: Path) -> None:
    torch = next(one for one in bill.components if one.name == "torch")
    gomp = BillComponent(
        kind=PackageType.RPM,
        name="libgomp",
        version="8.5.0",
        namespace="almalinux",
        why="-",
        within=(torch.key,),
    )
    lock = make_lock(conda=(make_conda("libblas 3.9 h1_0"),))
    whole = lock_bill(lock, make_base(), BASE, {}, [gomp, gomp])
    assert len(whole.components) == len(bill.components) + 1
    cyclone = json.loads(format_cyclonedx(whole))
    below = {one["ref"]: one.get("dependsOn", []) for one in cyclone["dependencies"]}
    assert below[torch.purl.to_string()] == ["pkg:rpm/almalinux/libgomp@8.5.0"]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(format_cyclonedx(whole)) is None
    path = tmp_path / "bill.spdx.json"
    path.write_text(format_spdx(whole))
    document = parse_file(str(path))
    assert validate_full_spdx_document(document) == []
    assert sum("torch" in one.spdx_element_id for one in document.relationships) == 1


def test_a_bill_has_every_package_of_the_locks(bill: BillOfMaterials) -> None:
    told = {one.purl.to_string(): (one.sha256[:1], one.why) for one in bill.components}
    conda = next(one for one in bill.components if one.kind is PackageType.CONDA)
    assert told == {
        "pkg:deb/debian/base-files@12.4%2Bdeb12u5?arch=amd64&distro=debian-12": ("a", NOT_AVAILABLE),
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14?arch=amd64&distro=debian-12": ("b", NOT_AVAILABLE),
        "pkg:pypi/idna@3.7?file_name=idna-3.7-py3-none-any.whl": ("2", ""),
        "pkg:pypi/torch@2.3.1?file_name=torch-2.3.1-cp311-cp311-manylinux1_x86_64.whl": ("1", ""),
        "pkg:conda/libblas@3.9?build=h1_0&channel=conda-forge&subdir=linux-64&type=conda": (
            conda.sha256[0],
            NOT_AVAILABLE,
        ),
    }  # fmt: skip
    seen = replace(bill.components[1], licenses=NAMED[:1], why="", source=("gcc", "12"))
    after = with_image_licenses(bill, [seen, BillComponent(kind=PackageType.DEB, name="other", version="1")])
    assert len(after.components) == len(bill.components)
    assert components_without_license(after)
    assert seen in after.components


def test_a_base_that_is_pulled_is_one_component() -> None:
    image = f"registry.example.org/nvidia/cuda:12@sha256:{'c' * 64}"
    bill = lock_bill(make_lock(), make_base(image=image), None, {})
    (base,) = (one for one in bill.components if one.kind is PackageType.OCI)
    assert base.purl.to_string() == (
        f"pkg:oci/cuda@sha256:{'c' * 64}?repository_url=registry.example.org/nvidia/cuda"
    )
    assert bill.created is None


def test_cyclonedx_is_valid_and_says_what_is_not_known(bill: BillOfMaterials) -> None:
    text = format_cyclonedx(bill)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    value: dict[str, Any] = json.loads(text)
    assert value["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    parts = {one["name"]: one for one in value["components"]}
    assert parts["torch"]["licenses"] == [{"expression": "GPL-2.0-or-later OR MIT"}]
    assert {"license": {"id": "MIT"}} in parts["idna"]["licenses"]
    assert {"license": {"name": "BSD License"}} in parts["idna"]["licenses"]
    assert parts["base-files"]["properties"] == [
        {"name": "imagefactory:license", "value": "NOASSERTION: the package is not available"}
    ]
    assert parts["base-files"]["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]


def test_spdx_is_valid_and_says_what_is_not_known(bill: BillOfMaterials, tmp_path: Path) -> None:
    path = tmp_path / "bill.spdx.json"
    path.write_text(format_spdx(bill))
    assert [one.validation_message for one in validate_full_spdx_document(parse_file(str(path)))] == []
    value: dict[str, Any] = json.loads(path.read_text())
    parts = {one["name"]: one for one in value["packages"]}
    assert value["creationInfo"]["created"] == "2023-11-14T22:13:20Z"
    assert parts["torch"]["licenseDeclared"] == "GPL-2.0-or-later OR MIT"
    assert parts["base-files"]["licenseDeclared"] == "NOASSERTION"
    assert parts["base-files"]["licenseComments"] == "the package is not available"
    names = {one["licenseId"]: one["extractedText"] for one in value["hasExtractedLicensingInfos"]}
    assert sorted(names.values()) == ["BSD License", "BSD-License"]
    assert all(reference in parts["idna"]["licenseDeclared"] for reference in names)


@pytest.mark.parametrize("write", [format_cyclonedx, format_spdx])
def test_the_same_bill_gives_the_same_bytes_and_another_one_another_number(
    write: Any, bill: BillOfMaterials
) -> None:
    assert write(bill) == write(replace(bill, components=tuple(bill.components)))
    serial = bill.serial
    other = replace(bill, components=(replace(bill.components[0], version="9"), *bill.components[1:]))
    assert other.serial != serial
    assert str(serial) in write(bill)
