"""Which licenses a package says it has: as SPDX writes them or in its own words, and never more."""

from __future__ import annotations

import pytest

from imagefactory.extras.sbom.bill import ComponentLicense
from imagefactory.extras.sbom.licenses import copyright_licenses, metadata_licenses, read_license

DEP5 = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("mit", ComponentLicense(text="MIT", spdx=True)),
        ("Apache-2.0 and (BSD-3-Clause)", ComponentLicense(text="Apache-2.0 AND BSD-3-Clause", spdx=True)),
        ("Apache  2.0", ComponentLicense(text="Apache 2.0", spdx=False)),
        ("MIT OR ours", ComponentLicense(text="MIT OR ours", spdx=False)),
        ("LicenseRef-NVIDIA", ComponentLicense(text="LicenseRef-NVIDIA", spdx=False)),
        ("(MIT", ComponentLicense(text="(MIT", spdx=False)),
        ("AND", ComponentLicense(text="AND", spdx=False)),
        ("( ) AND", ComponentLicense(text="( ) AND", spdx=False)),
        ("( OR ISC", ComponentLicense(text="( OR ISC", spdx=False)),
        ("UNKNOWN", None),
        ("", None),
        ("Permission is hereby granted, " * 9, None),
    ],
)
def test_an_expression_is_read_and_any_other_name_is_kept(text: str, read: ComponentLicense | None) -> None:
    assert read_license(text) == read


@pytest.mark.parametrize(
    ("fields", "texts", "why"),
    [
        (("License-Expression: BSD-3-Clause", "License: other"), ["BSD-3-Clause"], ""),
        (("License: NVIDIA's own", "Classifier: License :: Free"), ["NVIDIA's own"], ""),
        (
            (
                "License: UNKNOWN",
                "Classifier: License :: OSI Approved",
                "Classifier: License :: OSI Approved :: MIT License",
                "Classifier: Programming Language :: C",
            ),
            ["MIT License"],
            "",
        ),
        (("License: " + "All rights reserved. " * 9,), [], "its METADATA has a license's text, not its name"),
        ((), [], "its record names no license"),
    ],
)  # fmt: skip
def test_of_metadata_the_most_exact_field_counts(fields: tuple[str, ...], texts: list[str], why: str) -> None:
    metadata = "\n".join(["Metadata-Version: 2.4", "Name: x", "Version: 1", *fields, "", "Text"])
    licenses, reason = metadata_licenses(metadata.encode())
    assert ([one.text for one in licenses], reason) == (texts, why)


@pytest.mark.parametrize(
    ("short", "text"),
    [
        ("GPL-2+", "GPL-2.0-or-later"),
        ("LGPL-2.1", "LGPL-2.1-only"),
        ("Expat", "MIT"),
        ("BSD-3-clause", "BSD-3-Clause"),
        ("Expat or GPL-2+ and ISC", "MIT OR (GPL-2.0-or-later AND ISC)"),
        ("GPL-1+ or Artistic", "GPL-1+ or Artistic"),
        ("GPL-2+ or Expat, and ISC", "GPL-2+ or Expat, and ISC"),
        ("GPL-3+ with Bison exception", "GPL-3+ with Bison exception"),
    ],
)
def test_debians_short_names_become_spdx_where_they_are_defined_alike(short: str, text: str) -> None:
    licenses, why = copyright_licenses(
        f"{DEP5}\nFiles: *\nCopyright: x\nLicense: {short}\n the text\n .\n more\n"
    )
    assert ([one.text for one in licenses], why) == ([text], "")


def test_every_license_of_a_copyright_file_is_told_once() -> None:
    files = "Files: *\nLicense: ISC\n\nFiles: b\nLicense: GPL-2+\n"
    text = f"{DEP5}\n{files}\nLicense: GPL-2+\n On Debian systems...\n"
    assert [one.text for one in copyright_licenses(text)[0]] == ["GPL-2.0-or-later", "ISC"]
    assert copyright_licenses(DEP5) == ((), "its copyright file names no license")
    for prose in ("", "This package was debianized by ...\nLicense: MIT\n"):
        assert copyright_licenses(prose) == ((), "its copyright file is prose")
