"""OSV records against a bill: whose versions are inside, what is not checked, and records that are wrong."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import UsageError
from imagefactory.extras.sbom.bill import BillComponent, BillOfMaterials, PackageType
from imagefactory.extras.sbom.osv import VulnerabilityCheck, check_vulnerabilities, read_records, rpm_key

PYPI = BillComponent(kind=PackageType.PYPI, name="torch", version="2.3.1+cu121")
DEB = BillComponent(
    kind=PackageType.DEB,
    name="libssl3",
    version="3.0.11-1~deb12u2+b1",
    namespace="debian",
    release="12",
    source=("openssl", "3.0.11-1~deb12u2"),
)


def record(package: str, *events: str, ecosystem: str = "PyPI", **more: Any) -> dict[str, Any]:
    """`record("torch", "introduced 0", "fixed 2.4")`."""
    ranges = [{"type": "ECOSYSTEM", "events": [dict([event.split()]) for event in events]}] if events else []
    affected = {"package": {"name": package, "ecosystem": ecosystem}, "ranges": ranges}
    return {"id": "OSV-1", "affected": [affected | more.pop("affected", {})], **more}


def check(*records: dict[str, Any], parts: tuple[BillComponent, ...] = (PYPI, DEB)) -> VulnerabilityCheck:
    return check_vulnerabilities(
        BillOfMaterials(name="x", digest="", created=None, components=parts), records
    )


@pytest.mark.parametrize(
    ("events", "fixed"),
    [
        (("introduced 0", "fixed 2.4"), "2.4"),
        (("introduced 0",), ""),
        (("introduced 0", "last_affected 2.3.1"), ""),
        (("fixed 2.4", "introduced 2.3.1"), "2.4"),
        (("introduced 0", "fixed 1", "introduced 2.3", "fixed 2.3.2", "introduced 2.5", "fixed 3"), "2.3.2"),
        (("introduced 0", "fixed 2.3.1"), None),
        (("introduced 2.3.2",), None),
        (("introduced 0", "last_affected 2.3.0"), None),
        (("introduced 0", "fixed 1.13", "introduced 2.5"), None),
        (("introduced 0", "limit 2.3"), None),
        (("introduced 0", "limit *"), ""),
    ],
)  # fmt: skip
def test_a_range_is_read_as_osv_says(events: tuple[str, ...], fixed: str | None) -> None:
    found = check(record("Torch", *events)).found
    assert [(one.package, one.fixed) for one in found] == ([] if fixed is None else [("torch", fixed)])


def test_versions_that_are_listed_count_as_a_range_does() -> None:
    assert check(record("torch", affected={"versions": ["2004d", "2.3.1"]})).found
    assert not check(record("torch", affected={"versions": ["2004d", "2.3"]})).found
    other = {"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}
    assert not check(record("torch", affected=other)).found


@pytest.mark.parametrize(
    ("ecosystem", "package", "fixed", "hit"),
    [
        ("Debian:12", "openssl", "3.0.11-1~deb12u3", True),
        ("Debian:12", "openssl", "3.0.11-1~deb12u2", False),
        ("Debian", "openssl", "3.0.12", True),
        ("Debian:13", "openssl", "4", False),
        ("Ubuntu:12:LTS", "openssl", "4", False),
        ("Debian:12", "libssl3", "4", False),  # a binary package; records are of source packages
    ],
)
def test_debians_are_found_by_source_package_and_release(
    ecosystem: str, package: str, fixed: str, hit: bool
) -> None:
    found = check(record(package, "introduced 0", f"fixed {fixed}", ecosystem=ecosystem)).found
    assert [(one.package, one.version) for one in found] == ([("openssl", "3.0.11-1~deb12u2")] if hit else [])


def test_what_cannot_be_compared_is_told_and_what_was_withdrawn_is_not() -> None:
    (found,) = check(record("torch", "introduced 0", "fixed soon")).found
    assert not found.decided
    assert not check(record("torch", "introduced 0", withdrawn="2026-01-01T00:00:00Z")).found
    (found,) = check(record("torch", "introduced 0", aliases=["CVE-2", "CVE-1"])).found
    assert (found.decided, found.aliases) == (True, ("CVE-1", "CVE-2"))


def test_what_is_not_checked_is_counted() -> None:
    parts = (
        PYPI,
        DEB,
        BillComponent(kind=PackageType.PYPI, name="old", version="2004d"),
        BillComponent(kind=PackageType.DEB, name="x", version="1", namespace="debian", release="12"),
        BillComponent(kind=PackageType.DEB, name="y", version="1", namespace="debian", source=("y", "1")),
        BillComponent(kind=PackageType.CONDA, name="numpy", version="1"),
        BillComponent(kind=PackageType.CONDA, name="blas", version="1"),
        BillComponent(kind=PackageType.OCI, name="cuda", version="sha256:1"),
    )
    told = check(record("other", "introduced 0"), parts=parts)
    assert told.checked == (("PyPI", 1),)
    assert told.unchecked == (
        ("Debian packages: the image with their source packages is not available", 1),
        ("Debian packages: their release is not known", 1),
        ("base image: ask for the bill of the built image", 1),
        ("conda packages: OSV has no ecosystem of theirs", 2),
        ("packages of Debian:12: no record of it was given", 1),
        ("packages of PyPI: their version is none by PEP 440", 1),
    )


def test_records_are_read_from_a_file_a_folder_and_an_export(tmp_path: Path) -> None:
    texts = {name: json.dumps(record("torch", "introduced 0") | {"id": name}) for name in ("A", "B")}
    (tmp_path / "PyPI").mkdir()
    for name, text in texts.items():
        (tmp_path / "PyPI" / f"{name}.json").write_text(text)
    (tmp_path / "README").write_text("none")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as export:
        for name, text in texts.items():
            export.writestr(f"{name}.json", text)
    assert [one["id"] for one in read_records(tmp_path)] == ["A", "B"]
    assert [one["id"] for one in read_records(tmp_path / "all.zip")] == ["A", "B"]
    assert [one["id"] for one in read_records(tmp_path / "PyPI/A.json")] == ["A"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"id": 1}', '"text"', "\udcff"])
def test_what_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as caught:
        list(read_records(path))
    assert caught.value.code == "osv-invalid"
    assert str(path) in caught.value.message
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as export:
        export.write(path, "x.json")
    with pytest.raises(UsageError) as caught:
        list(read_records(tmp_path / "all.zip"))
    assert caught.value.code == "osv-invalid"
    assert "all.zip:x.json" in caught.value.message


def test_a_record_that_is_malformed_is_named_and_none_at_all_is_no_answer() -> None:
    for affected in (
        [1],
        [{"package": 1}],
        [{"package": {"name": "torch", "ecosystem": "PyPI"}, "ranges": [{}]}],
    ):
        with pytest.raises(UsageError) as caught:
            check({"id": "X", "affected": affected})
        assert caught.value.code == "osv-invalid"
        assert "record X " in caught.value.message
    with pytest.raises(UsageError) as caught:
        check()
    assert caught.value.code == "osv-empty"


GOMP = BillComponent(
    kind=PackageType.RPM,
    name="libgomp",
    version="8.5.0-22.el8",
    namespace="almalinux",
    within=(("pypi", "demo", "1"),),
)
CRATE = BillComponent(kind=PackageType.CARGO, name="idna", version="0.5.0", within=(("pypi", "demo", "1"),))


def test_libraries_inside_wheels_are_found_by_their_distribution_and_crates_by_name() -> None:
    crate = record("idna", "introduced 0", "fixed 1.0.0", ecosystem="crates.io")
    crate["affected"][0]["ranges"][0]["type"] = "SEMVER"
    old = record("libgomp", "introduced 0", "fixed 8.5.0-23.el8_10", ecosystem="AlmaLinux:8")
    fixed = record("libgomp", "introduced 0", "fixed 8.5.0-4.el8", ecosystem="AlmaLinux:8", id="OSV-2")
    nine = record("libgomp", "introduced 0", "fixed 99-1.el9", ecosystem="AlmaLinux:9", id="OSV-3")
    bare = replace(GOMP, namespace="centos")
    told = check(crate, old, fixed, nine, parts=(GOMP, CRATE, bare))
    assert [(row.ecosystem, row.id, row.fixed) for row in told.found] == [
        ("AlmaLinux:8", "OSV-1", "8.5.0-23.el8_10"),
        ("crates.io", "OSV-1", "1.0.0"),
    ]
    assert [number for _, number in told.unchecked] == [1]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1.0-1.el8", "1.0-2.el8"),
        ("8.5.0-4.el8", "8.5.0-22.el8"),
        ("8.5.0-22.el8", "8.5.0-22.el8_10"),
        ("9-1", "1:0.1-1"),
        ("1.0~rc1-1", "1.0-1"),
        ("1.0-1", "1.0^20240101-1"),
        ("1.0a-1", "1.0.1-1"),
    ],
)
def test_the_order_of_rpm_versions(older: str, newer: str) -> None:
    assert rpm_key(older) < rpm_key(newer)
    with pytest.raises(ValueError, match="RPM"):
        rpm_key(f"x{older}:1")
