"""`image sbom`: which locks, caches and layers a name leads to, and what is said of the bill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imagefactory import errors
from imagefactory.actions.locked import read_target_lock
from imagefactory.lock.files import lock_digest
from imagefactory.oci.layout import Layout
from imagefactory.progress import QuietProgress
from imagefactory.project import load_project
from imagefactory.settings.load import load_settings
from tests.made.command import Call
from tests.made.layout import add_image
from tests.made.registry import Ways, registry_made_here
from tests.made.scanned import tar

ROOT = Path(__file__).parents[4]
TARGET, IMAGE = "pytorch-2.3-cu121", "pytorch:2.3-cu121"
SITE = "opt/env/lib/python3.11/site-packages"
ZLIB = b"""Package: zlib1g
Status: install ok installed
Architecture: amd64
Source: zlib
Version: 1:1.2.13.dfsg-1
"""
DEP5 = (
    b"Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: Zlib\n"
)
LAYERS = [
    tar(
        ("var/lib/dpkg/status", ZLIB),
        ("usr/lib/os-release", b"ID=debian\nVERSION_ID=12\n"),
        ("usr/share/doc/zlib1g/copyright", DEP5),
    ),
    tar((f"{SITE}/torch-2.3.1.dist-info/METADATA", b"Name: torch\nVersion: 2.3.1\nLicense: BSD-3-Clause\n")),
]


def put(tmp_path: Path, *, lock: str = "") -> Layout:
    layout = Layout(tmp_path / "store")
    labels = {"imagefactory.target": TARGET, "imagefactory.lock": lock} if lock else {}
    with layout.in_use(QuietProgress()):
        add_image(layout, IMAGE, LAYERS, **labels)
    return layout


@pytest.fixture(scope="module")
def digest() -> str:
    """Of the target's committed lock."""
    factory = load_project(load_settings(directory=ROOT, start=ROOT, environ={}), {})
    target = next(one for one in factory.targets if one.name == TARGET)
    lock = read_target_lock(factory, target)
    assert lock
    return lock_digest(lock)


def parts(call: Call, name: str) -> dict[str, dict[str, Any]]:
    said = call("image", "sbom", name)
    assert said.code == 0, said.err
    return {one["name"]: one for one in json.loads(said.out)["components"]}


def test_a_target_is_told_by_its_locks_and_what_its_image_says_of_the_same_packages(
    call: Call, tmp_path: Path, digest: str
) -> None:
    before = parts(call, TARGET)
    assert {"torch", "base-files", "zlib1g"} <= before.keys()
    assert len(before["torch"]["hashes"][0]["content"]) == 64
    assert not any("licenses" in one for one in before.values())
    put(tmp_path, lock=f"sha256:{'0' * 64}")
    assert parts(call, TARGET) == before, "an image of another lock tells nothing of this one"
    put(tmp_path, lock=digest)
    after = parts(call, TARGET)
    assert after.keys() == before.keys()
    told = {name: one["licenses"] for name, one in after.items() if "licenses" in one}
    assert told == {
        "torch": [{"license": {"id": "BSD-3-Clause"}}],
        "zlib1g": [{"license": {"id": "Zlib"}}],
    }


def test_an_image_is_told_by_what_is_in_it_with_the_hashes_of_its_lock(
    call: Call, tmp_path: Path, digest: str
) -> None:
    layout = put(tmp_path)
    plain = parts(call, IMAGE)
    assert plain.keys() == {"torch", "zlib1g"}
    assert not any("hashes" in one for one in plain.values())
    assert (
        json.loads(call("image", "sbom", IMAGE).out)["metadata"]["timestamp"] == "2026-01-02T03:04:05+00:00"
    )
    assert parts(call, layout.tags()[IMAGE].digest) == plain
    put(tmp_path, lock=digest)
    hashed = parts(call, IMAGE)
    assert hashed["torch"]["hashes"] == parts(call, TARGET)["torch"]["hashes"]
    assert hashed["torch"]["purl"] == parts(call, TARGET)["torch"]["purl"]


def test_a_system_whose_packages_are_not_read_is_told(call: Call, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    with layout.in_use(QuietProgress()):
        add_image(layout, IMAGE, LAYERS[1:])
    said = call("image", "sbom", IMAGE)
    assert f"{IMAGE} has no package list of dpkg" in said.err
    assert [one["name"] for one in json.loads(said.out)["components"]] == ["torch"]


def test_an_image_of_a_registry_is_told_alike(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = put(tmp_path)
    here = parts(call, IMAGE)
    with registry_made_here(Ways()) as registry:
        monkeypatch.setenv("IMAGEFACTORY_PLAIN_HTTP", registry.host)
        monkeypatch.setenv("IMAGEFACTORY_REGISTRY", registry.host)
        pushed = call("push", TARGET, "--json")
        assert pushed.code == 0, pushed.err
        digest = layout.tags()[IMAGE].digest
        assert parts(call, f"{registry.host}/pytorch@{digest}") == here


def test_a_file_is_written_and_what_is_not_known_counted(call: Call, tmp_path: Path) -> None:
    put(tmp_path)
    path = tmp_path / "bill.json"
    said = call("image", "sbom", IMAGE, "--format", "spdx", "-o", str(path))
    assert said.out == f"wrote {path}: 2 packages, 0 of them without a known license\n"
    assert json.loads(path.read_text())["spdxVersion"] == "SPDX-2.3"
    value: dict[str, Any] = call("image", "sbom", TARGET, "-o", str(path), "--json").json()
    assert value["format"] == "imagefactory.image-sbom/1"
    assert (value["path"], value["type"]) == (str(path), "cyclonedx")
    assert len(value["unknown_licenses"]) == value["packages"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("nothing-like-it",), errors.EXIT_NOTHING_SELECTED, "no target"),
        (("nothing:like-it",), errors.EXIT_NOTHING_SELECTED, "'nothing:like-it'"),
        (("./bill.whl",), errors.EXIT_USAGE, "'./bill.whl' is not a target"),
        ((TARGET, "--json"), errors.EXIT_USAGE, "--json requires --output"),
    ],
)
def test_what_names_nothing_says_what_to_name(
    call: Call, words: tuple[str, ...], code: int, told: str
) -> None:
    said = call("image", "sbom", *words)
    assert said.code == code
    assert told in said.err


# --- checks ----------------------------------------------------------------------------------------


def test_licenses_are_held_to_a_list(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path)
    check = ("image", "audit", IMAGE, "--check", "licenses")
    held = call(*check, "--allow", "bsd-*", "--allow", "Zlib")
    assert (held.code, held.out.splitlines()[-1]) == (0, "licenses: all are allowed")
    refused = call(*check, "--allow", "BSD-*")
    assert refused.code == errors.EXIT_AUDIT
    assert "zlib1g   1:1.2.13.dfsg-1  not allowed: Zlib" in refused.out
    assert refused.out.splitlines()[-1] == "packages: 1 not allowed, 0 unknown"
    monkeypatch.setenv("IMAGEFACTORY_LICENSES", "Zlib, BSD-3-Clause")
    assert call(*check).code == 0
    value: dict[str, Any] = call(*check, "--allow", "MIT", "--json").json()
    assert (value["format"], value["licenses"]["passed"]) == ("imagefactory.image-audit/1", False)
    assert len(value["licenses"]["rejected"]) == 2


def test_vulnerabilities_are_found_by_records(call: Call, tmp_path: Path) -> None:
    put(tmp_path)
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1:1.2.13.dfsg-2"}]}]
    affected = [{"package": {"name": "zlib", "ecosystem": "Debian:12"}, "ranges": ranges}]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"id": "DSA-1", "aliases": ["CVE-1"], "affected": affected}))
    check = ("image", "audit", IMAGE, "--check", "vulnerabilities", "--osv", str(path))
    said = call(*check)
    assert said.code == errors.EXIT_AUDIT
    assert said.out.splitlines()[1].split() == [
        "zlib",
        "1:1.2.13.dfsg-1",
        "DSA-1",
        "1:1.2.13.dfsg-2",
        "CVE-1",
    ]
    assert "not checked: 1 packages of PyPI: no record of it was given" in said.out
    value: dict[str, Any] = call(*check, "--json").json()
    assert [one["id"] for one in value["vulnerabilities"]["found"]] == ["DSA-1"]
    ranges[0]["events"] = [{"introduced": "2:0"}]
    path.write_text(json.dumps({"id": "DSA-1", "affected": affected}))
    both = call(*check, "--check", "licenses", "--allow", "*")
    assert both.code == 0
    assert "licenses: all are allowed" in both.out
    assert both.out.splitlines()[-1] == "vulnerabilities: none found"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--check", "licenses"), "no license is allowed"),
        (("--check", "vulnerabilities"), "no OSV records"),
        (("--check", "vulnerabilities", "--allow", "MIT"), "--check licenses"),
        (("--check", "licenses", "--osv", "/"), "--check vulnerabilities"),
    ],
)
def test_a_check_that_lacks_what_it_goes_by_is_refused(call: Call, words: tuple[str, ...], told: str) -> None:
    said = call("image", "audit", IMAGE, *words)
    assert said.code == errors.EXIT_USAGE
    assert told in said.err
