"""Which licenses a list allows, and which packages are named for it."""

from __future__ import annotations

import pytest

from imagefactory.extras.sbom.bill import BillComponent, BillOfMaterials, ComponentLicense, PackageType
from imagefactory.extras.sbom.licenses import check_licenses, is_allowed

MIT, GNU = ComponentLicense(text="MIT", spdx=True), ComponentLicense(text="GPL-3.0-only", spdx=True)
BSD = ComponentLicense(text="BSD License", spdx=False)


@pytest.mark.parametrize(
    ("text", "allowed", "fits"),
    [
        ("MIT", "mit", True),
        ("MIT-CMU", "MIT", False),
        ("BSD-3-Clause", "BSD-?-Clause", True),
        ("GPL-3.0-only OR MIT", "MIT", True),
        ("GPL-3.0-only AND MIT", "MIT", False),
        ("ISC AND (GPL-3.0-only OR MIT)", "MIT ISC", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", "GPL-2.0-only", False),
        ("GPL-2.0-only WITH Classpath-exception-2.0", "GPL-2.0-only?WITH?*", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0 OR MIT", "MIT", True),
        ("MIT", "", False),
    ],
)
def test_an_expression_is_allowed_by_its_parts(text: str, allowed: str, fits: bool) -> None:
    assert is_allowed(ComponentLicense(text=text, spdx=True), allowed.split()) is fits


def test_a_name_is_allowed_whole() -> None:
    assert is_allowed(BSD, ["bsd license"])
    assert is_allowed(BSD, ["BSD*"])
    assert not is_allowed(ComponentLicense(text="MIT OR ours", spdx=False), ["MIT"])


def test_each_package_that_is_not_allowed_or_says_none_is_named() -> None:
    parts = [
        BillComponent(
            kind=PackageType.PYPI,
            name=name,
            version="1",
            licenses=licenses,
            why="" if licenses else "no record",
        )
        for name, licenses in (("a", (MIT,)), ("b", (MIT, GNU, BSD)), ("c", ()))
    ]
    check = check_licenses(
        BillOfMaterials(name="x", digest="", created=None, components=tuple(parts)), ["MIT"]
    )
    assert check.counted == ((MIT, 2, True), (BSD, 1, False), (GNU, 1, False))
    assert check.refused == ((parts[1], (GNU, BSD)),)
    assert check.unknown == (parts[2],)
    assert not check.holds
    for held, allowed, holds in (
        (parts[:1], "MIT", True),
        (parts[2:], "MIT *", False),
        (parts[2:], "noassertion", True),
        (parts, "MIT NOASSERTION", False),
    ):
        bill = BillOfMaterials(name="x", digest="", created=None, components=tuple(held))
        assert check_licenses(bill, allowed.split()).holds is holds
