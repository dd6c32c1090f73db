"""Project pages of an index, as JSON and as HTML."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagefactory.errors import LockError
from imagefactory.http import HttpSession, RejectedError
from imagefactory.lock.pypi.index import (
    IndexFile,
    PackageIndex,
    _check_library,
    _parse_json,
    files_before,
    project_files,
    read_publishers,
    verify_provenance,
)
from imagefactory.model import LockedWheel, ReleaseCutoff
from imagefactory.progress import QUIET
from tests.made.errors import fails
from tests.made.sigstore import NOW, Sigstore, Workflow
from tests.made.values import make_lock

PAGE = """<!DOCTYPE html><html><body>
<a href="demo-1.0.tar.gz#sha256=AB12" data-requires-python="&gt;=3.9">demo-1.0.tar.gz</a>
<a href="demo-2.0.tar.gz" data-yanked="it breaks">demo-2.0.tar.gz</a>
<a>nothing</a></body></html>"""


def test_a_page_of_html(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE)
    index = PackageIndex(url="", origin="", certificates="", proxy="", environment=())
    web = HttpSession(index)
    first, second = project_files(web, tmp_path.as_uri())
    web.close()
    assert (first.filename, first.sha256, first.python, first.yanked) == (
        "demo-1.0.tar.gz",
        "ab12",
        ">=3.9",
        False,
    )
    assert (second.sha256, second.python, second.yanked, second.uploaded) == ("", "", True, "")


def test_a_page_of_json() -> None:
    row = '{"filename": "demo-1.0.tar.gz", "url": "../demo-1.0.tar.gz#x", "hashes": {"sha256": "ab"}'
    rest = '"requires-python": ">=3.9", "yanked": "it breaks", "upload-time": "2026-11-23T10:00:00.1Z"'
    (told, bare) = _parse_json(f'{{"files": [{row}, {rest}}}, {row}}}]}}', "https://i.example/simple/demo/")
    assert told == IndexFile(
        filename="demo-1.0.tar.gz",
        url="https://i.example/simple/demo-1.0.tar.gz",
        sha256="ab",
        yanked=True,
        python=">=3.9",
        uploaded="2026-11-23T10:00:00.1Z",
    )
    assert (bare.yanked, bare.python, bare.uploaded) == (False, "", "")
    with pytest.raises(RejectedError, match="PEP 691"):
        _parse_json("{}", "https://i.example/simple/demo/")


def test_files_after_the_cutoff_are_left_out_and_one_without_a_time_is_an_error() -> None:
    def file(name: str, uploaded: str) -> IndexFile:
        return IndexFile(filename=name, url="", sha256="", uploaded=uploaded)

    old, new = (
        file("demo-1.0.tar.gz", "2026-11-20T23:59:59.9Z"),
        file("demo-2.0.tar.gz", "2026-11-21T00:00:01Z"),
    )
    bare = file("demo-3.0.tar.gz", "")
    cutoff = ReleaseCutoff(time=datetime(2026, 11, 21, tzinfo=UTC), allowed=("free",))
    lock = make_lock(cutoff=cutoff)
    assert files_before("demo", (old, new), lock) == (old,)
    assert files_before("free", (old, new, bare), lock) == (old, new, bare)
    assert files_before("demo", (old, bare), make_lock()) == (old, bare)
    with fails("upload-time-missing"):
        files_before("demo", (old, bare), lock)


def test_provenance_of_files() -> None:
    row = '{"filename": "demo-1.0.tar.gz", "url": "../demo-1.0.tar.gz", "hashes": {}'
    rows = f'{row}, "provenance": "https://i.example/p"}}, {row}, "provenance": null}}, {row}}}'
    files = _parse_json(f'{{"files": [{rows}]}}', "https://i.example/simple/demo/")
    assert [file.provenance for file in files] == ["https://i.example/p", "", None]


# --- publishers

WHEEL = LockedWheel(name="demo", version="1.0", filename="demo-1.0-py3-none-any.whl", sha256="a" * 64, size=1)
WORKFLOW = Workflow()


@pytest.fixture
def sigstore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sigstore:
    """The one whose keys this machine trusts."""
    sigstore = Sigstore()
    sigstore.install(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return sigstore


def provenance(sigstore: Sigstore, **options: Any) -> dict[str, Any]:
    return sigstore.provenance(WHEEL.filename, WHEEL.sha256, WORKFLOW, **options)


def verify(value: object) -> str:
    return verify_provenance(json.dumps(value).encode(), WHEEL)


def test_a_publisher_is_verified_by_the_libraries(
    sigstore: Sigstore, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _check_library() is None
    for _ in range(5):  # each proof of the growing log has another length
        assert verify(provenance(sigstore)) == "GitHub demo/demo release.yml"
    assert capfd.readouterr().err == ""
    value = provenance(sigstore)
    other = Workflow(repository="other/demo", file="a b.yml")
    value["attestation_bundles"] += sigstore.provenance(WHEEL.filename, WHEEL.sha256, other)[
        "attestation_bundles"
    ]
    assert verify(value) == "GitHub demo/demo release.yml, GitHub other/demo a%20b.yml"


def attestation(value: dict[str, Any]) -> dict[str, Any]:
    (row,) = value["attestation_bundles"][0]["attestations"]
    return row  # type: ignore[no-any-return]


def late(sigstore: Sigstore) -> dict[str, Any]:
    """Signed in time, as it says, but logged after its certificate had expired."""
    value = provenance(sigstore)
    value["attestation_bundles"][0]["attestations"] = [
        sigstore.attestation(WHEEL.filename, WHEEL.sha256, WORKFLOW, logged=NOW + timedelta(minutes=11))
    ]
    return value


def tampered(sigstore: Sigstore, *path: str | int) -> dict[str, Any]:
    """With another byte at the end of a base64 value of the attestation."""
    value = provenance(sigstore)
    provenance(sigstore)
    part: Any = attestation(value)
    for key in path[:-1]:
        part = part[key]
    data = bytearray(base64.b64decode(part[path[-1]]))
    data[-1] ^= 1
    part[path[-1]] = base64.b64encode(data).decode()
    return value


ENTRY = ("verification_material", "transparency_entries", 0)
INVALID: dict[str, Callable[[Sigstore], object]] = {
    "another file": lambda s: s.provenance("demo-1.1-py3-none-any.whl", WHEEL.sha256, WORKFLOW),
    "another hash": lambda s: s.provenance(WHEEL.filename, "b" * 64, WORKFLOW),
    "another publisher": lambda s: provenance(s, publisher=Workflow(repository="evil/demo")),
    "another workflow": lambda s: provenance(s, publisher=Workflow(file="pull.yml")),
    "another Sigstore": lambda _: provenance(Sigstore()),
    "logged too late": late,
    "signature": lambda s: tampered(s, "envelope", "signature"),
    "statement": lambda s: tampered(s, "envelope", "statement"),
    "certificate": lambda s: tampered(s, "verification_material", "certificate"),
    "log": lambda s: tampered(s, *ENTRY, "canonicalizedBody"),
    "promise": lambda s: tampered(s, *ENTRY, "inclusionPromise", "signedEntryTimestamp"),
    "root": lambda s: tampered(s, *ENTRY, "inclusionProof", "rootHash"),
    "no attestation": lambda s: (
        provenance(s) | {"attestation_bundles": [{"publisher": WORKFLOW.publisher, "attestations": []}]}
    ),
    "no bundle": lambda s: provenance(s) | {"attestation_bundles": []},
    "an unknown type": lambda s: {
        "attestation_bundles": [
            {"publisher": {"kind": "Other"}, "attestations": [attestation(provenance(s))]}
        ]
    },
    "not an object": lambda _: [],
    "deep": lambda _: json.loads("[" * 900 + "]" * 900),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_attestation_is_an_error(case: str, sigstore: Sigstore) -> None:
    with fails("publisher-invalid"):
        verify(INVALID[case](sigstore))


@pytest.mark.parametrize("data", [b"", b"\xff", b"{", b'{"version": 2, "attestation_bundles": []}'])
def test_bytes_that_are_not_a_provenance_object_are_an_error(data: bytes, sigstore: Sigstore) -> None:
    with fails("publisher-invalid"):
        verify_provenance(data, WHEEL)


def test_keys_that_cannot_be_read_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = PackageIndex(url="", origin="", certificates="", proxy="", environment=())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    report = read_publishers(index, {WHEEL: "https://i.example/never-queried"}, QUIET)
    assert report.problem is not None
    assert report.problem.code == "trust-root-unreadable"


@given(place=st.integers(0, 1 << 20), byte=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_never_gives_another_publisher(place: int, byte: int, sigstore: Sigstore) -> None:
    text = bytearray(json.dumps(provenance(sigstore)).encode())
    text[place % len(text)] = byte
    try:
        publisher = verify_provenance(bytes(text), WHEEL)
    except LockError as error:
        publisher = error.code
    assert publisher in ("publisher-invalid", "GitHub demo/demo release.yml")


@pytest.mark.parametrize("url", ["http://other.example/p", "file:///etc/passwd", "ftp://i.example/p"])
def test_an_address_without_tls_is_not_read(url: str) -> None:
    index = PackageIndex(url="http://i.example/simple", origin="", certificates="", proxy="", environment=())
    report = read_publishers(index, {WHEEL: url}, QUIET)
    assert report.problem is not None
    assert (dict(report.known), report.problem.code) == ({}, "index-read-failed")
