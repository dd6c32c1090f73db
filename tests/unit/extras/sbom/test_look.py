"""What is read of packages in layers that lie over one another, and in the cache."""

from __future__ import annotations

import bz2
import json
import zipfile
from pathlib import Path

import pytest
import zstandard

from imagefactory.errors import StoreError, UsageError
from imagefactory.extras.sbom.look import LayerStack, package_carried, package_licenses
from imagefactory.oci.inflate import CorruptDataError
from tests.made.scanned import Entry, tar
from tests.made.values import make_conda
from tests.made.wheels import locked, make_wheel

SITE = "opt/env/lib/python3.11/site-packages"
ISC = (
    b"Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: ISC\n"
)
STATUS = b"""Package: libz1
Status: install ok installed
Architecture: amd64
Source: zlib (1:1.2)
Version: 1:1.2+b1

Package: gone
Status: deinstall ok config-files
Version: 1

Package: doc
Status: install ok installed
Architecture: all
Version: 2
"""
BASE = (
    ("var/lib/dpkg/status", STATUS),
    ("usr/lib/os-release", b'ID=debian\nVERSION_ID="12"\n'),
    ("usr/share/doc/zlib/copyright", ISC),
    ("usr/share/doc/libz1", b"->zlib"),
    ("usr/share/doc/doc/copyright", b"->../zlib/copyright"),
    ("usr/share/doc/zlib/README", b"License: MIT"),
)


def metadata(name: str, version: str, license: str = "MIT") -> bytes:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: {license}\n".encode()


def wheel(name: str, version: str, license: str = "MIT") -> Entry:
    return f"{SITE}/{name}-{version}.dist-info/METADATA", metadata(name, version, license)


def seen(*layers: tuple[Entry, ...]) -> dict[str, list[str]]:
    them = LayerStack()
    for layer in layers:
        them.add(iter([tar(*layer)]))
    return {one.purl.to_string(): [license.text for license in one.licenses] for one in them.components()}


def test_debians_packages_are_dpkgs_with_the_licenses_beside_them() -> None:
    assert seen(BASE) == {
        "pkg:deb/debian/libz1@1:1.2%2Bb1?arch=amd64&distro=debian-12": ["ISC"],
        "pkg:deb/debian/doc@2?arch=all&distro=debian-12": ["ISC"],
    }
    them = LayerStack()
    them.add(iter([tar(*BASE[:2], ("usr/share/doc/libz1", b"->doc"), ("usr/share/doc/doc", b"->libz1"))]))
    doc, libz = them.components()
    assert (libz.source, doc.source) == (("zlib", "1:1.2"), ("doc", "2"))
    assert (libz.licenses, libz.why) == ((), "the image has no copyright file for it")  # a circle of links


def test_another_distribution_is_named_as_it_names_itself() -> None:
    release = ("usr/lib/os-release", b"ID=ubuntu\nVERSION_ID='24.04'\n")
    assert "pkg:deb/ubuntu/doc@2?arch=all&distro=ubuntu-24.04" in seen((BASE[0], release))


def test_what_an_upper_layer_removes_or_replaces_is_not_told() -> None:
    lower = (
        wheel("a", "1"),
        wheel("b", "1"),
        wheel("c", "1"),
        ("x/site-packages/d-1.dist-info/METADATA", metadata("d", "1")),
    )
    upper = (
        (f"{SITE}/.wh.a-1.dist-info", b""),
        ("x/.wh..wh..opq", b""),
        wheel("b", "1", "ISC"),
        (f"{SITE}/c-1.dist-info/RECORD", b""),
    )
    assert seen(lower, upper) == {"pkg:pypi/b@1": ["ISC"], "pkg:pypi/c@1": ["MIT"]}


def test_what_conda_or_debian_installed_is_no_wheel() -> None:
    record = {
        **{"name": "six", "version": "1.16", "build": "py_0", "subdir": "noarch", "license": "MIT"},
        **{"url": "https://host.example/conda-forge/noarch/six-1.16-py_0.conda", "sha256": "5" * 64},
        "files": ["lib/python3.11/site-packages/six-1.16.dist-info/METADATA"],
    }
    layer = (
        ("opt/env/conda-meta/six-1.16-py_0.json", json.dumps(record).encode()),
        wheel("six", "1.16"),
        wheel("Own_One", "2"),
        ("usr/lib/python3/dist-packages/x-1.dist-info/METADATA", metadata("x", "1")),
        (f"{SITE}/setuptools/_vendor/y-1.dist-info/METADATA", metadata("y", "1")),
    )
    assert seen(layer) == {
        "pkg:conda/six@1.16?build=py_0&channel=conda-forge&subdir=noarch&type=conda": ["MIT"],
        "pkg:pypi/own-one@2": ["MIT"],
    }


def test_an_environment_of_hard_links_and_one_of_the_whole_system_are_seen() -> None:
    cached = "root/.cache/uv/archive-v0/x1/a-1.dist-info/METADATA"
    layer: tuple[Entry, ...] = (
        (cached, metadata("a", "1")),
        (f"{SITE}/a-1.dist-info/METADATA", f"=>{cached}".encode()),
        ("usr/local/lib/python3.12/dist-packages/c-1.dist-info/METADATA", metadata("c", "1")),
        ("usr/share/doc/zlib/copyright", ISC),
        ("usr/share/doc/doc/copyright", b"=>usr/share/doc/zlib/copyright"),
        *BASE[:2],
    )
    told = seen(layer)
    assert {name for name in told if "pypi" in name} == {"pkg:pypi/a@1", "pkg:pypi/c@1"}
    assert told["pkg:deb/debian/doc@2?arch=all&distro=debian-12"] == ["ISC"]


def test_a_layer_that_is_damaged_says_so() -> None:
    with pytest.raises(StoreError) as caught:
        seen((("conda-meta/x.json", b"{}"),))
    assert caught.value.code == "package-record-invalid"
    assert "conda-meta/x.json" in caught.value.message
    with pytest.raises(StoreError) as caught:
        seen((("var/lib/dpkg/status", b"Package: x\nStatus: install ok installed\n"),))
    assert caught.value.code == "package-record-invalid"
    assert "var/lib/dpkg/status" in caught.value.message
    with pytest.raises(CorruptDataError):
        LayerStack().add(iter([tar(*BASE)[:1000]]))


def test_names_that_a_terminal_would_act_on_are_told_without_that() -> None:
    path = f"{SITE}/a-1.dist-info/METADATA"
    assert seen(((path, metadata("a", "1\x1b[31m", "ours\x1b[2J")),)) == {
        "pkg:pypi/a@1%20%5B31m": ["ours [2J"]
    }
    assert seen(((path, b"\xff"),)) == {"pkg:pypi/a@1": []}


def test_packages_of_the_cache_tell_theirs(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "pkg", {})
    assert package_licenses(locked(path), path) == ((), "its record names no license")
    archive = tmp_path / "x-1-0.conda"
    inside = tar(("info/files", b"a"), ("info/index.json", b'{"license": "bsd-3-clause"}'))
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("info-x-1-0.tar.zst", zstandard.compress(inside))
        zipped.writestr("pkg-x-1-0.tar.zst", zstandard.compress(tar()))
    licenses, why = package_licenses(make_conda("x 1 0"), archive)
    assert ([one.text for one in licenses], why) == (["BSD-3-Clause"], "")
    older = tmp_path / "x-1-0.tar.bz2"
    older.write_bytes(bz2.compress(inside))
    assert package_licenses(make_conda("x 1 0"), older) == (licenses, "")
    older.write_bytes(bz2.compress(tar(("info/files", b"a"))))
    with pytest.raises(UsageError, match=r"it has no info/index\.json"):
        package_licenses(make_conda("x 1 0"), older)
    archive.write_bytes(b"no zip")
    with pytest.raises(UsageError):
        package_licenses(make_conda("x 1 0"), archive)


GOMP = {
    "type": "library",
    "name": "libgomp",
    "version": "8.5.0-22.el8",
    "purl": "pkg:rpm/almalinux/libgomp@8.5.0-22.el8",
}
SELF = {"type": "library", "name": "demo", "version": "1.0", "purl": "pkg:pypi/demo@1.0"}
SBOM = "demo-1.0.dist-info/sboms/auditwheel.cdx.json"


def document(*components: object) -> bytes:
    """As auditwheel 6.5 writes it; the wheel itself is among the components too."""
    return json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.4", "components": components}).encode()


def test_libraries_that_a_wheel_carries_are_named_once_below_it(tmp_path: Path) -> None:
    nested = {**SELF, "components": [{**GOMP, "licenses": [{"license": {"id": "MIT"}}]}]}
    path = make_wheel(tmp_path, "demo", {SBOM: document(nested, GOMP)})
    (found, again), faults = package_carried(locked(path), path)
    assert (found.purl.to_string(), found.within) == (GOMP["purl"], (("pypi", "demo", "1.0"),))
    assert (faults, again.key) == ((), found.key)
    them = LayerStack()
    entries = (
        (f"{SITE}/demo-1.0.dist-info/METADATA", metadata("demo", "1.0")),
        (f"{SITE}/{SBOM}", document(SELF, GOMP, {"name": "no address"}, {**GOMP, "purl": "pkg:npm/x@1"})),
        (f"{SITE}/other-1.dist-info/METADATA", metadata("other", "1")),
        (f"{SITE}/other-1.dist-info/sboms/a.json", document(GOMP)),
        (f"{SITE}/gone-1.dist-info/sboms/a.json", document(GOMP)),
    )
    them.add(iter([tar(*entries)]))
    told = {one.purl.to_string(): one.within for one in them.components()}
    assert told == {
        "pkg:pypi/demo@1.0": (),
        "pkg:pypi/other@1": (),
        GOMP["purl"]: (("pypi", "demo", "1.0"), ("pypi", "other", "1")),
    }
    assert them.faults == []


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]", b"{}", document("x"), document({**GOMP, "purl": "libgomp"}), b"[" * 100_000],
)
def test_what_a_wheel_says_wrongly_of_its_libraries_is_told_and_hurts_nothing(
    tmp_path: Path, data: bytes
) -> None:
    path = make_wheel(tmp_path, "demo", {SBOM: data})
    found, faults = package_carried(locked(path), path)
    assert (found, len(faults)) == ((), 1)
    them = LayerStack()
    them.add(
        iter(
            [tar((f"{SITE}/demo-1.0.dist-info/METADATA", metadata("demo", "1.0")), (f"{SITE}/{SBOM}", data))]
        )
    )
    assert [one.name for one in them.components()] == ["demo"]
    assert len(them.faults) == 1
