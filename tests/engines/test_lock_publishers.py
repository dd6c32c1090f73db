"""Who published a wheel: attestations of an index (PEP 740), verified by a Sigstore of the tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from imagefactory import http
from imagefactory.errors import EXIT_LOCK, EXIT_TOOL
from imagefactory.http import RetryPolicy
from imagefactory.lock.files import read_lock as read_files
from imagefactory.lock.pypi.requirements import read_lock
from tests.made.command import Said, say
from tests.made.place import make_place
from tests.made.sigstore import Sigstore, Workflow
from tests.services.factory import make_root
from tests.services.package_index import Index, package_index

RECIPE = """\
family: demo
description: For tests of publishers
source: pypi
framework: nvidia-cuda-runtime-cu12
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
checks: [packages]
packages: [small, more]
matrix:
  - version: "12.1"
    cuda: ["12.1"]
  - version: "12.4"
    cuda: ["12.4"]
"""
NAME, OTHER = "demo-12.1-cu121", "demo-12.4-cu124"
OWN, FORK = Workflow(repository="lab/small"), Workflow(repository="fork/small", file="other.yml")
BY_OWN, BY_FORK = "GitHub lab/small release.yml", "GitHub fork/small other.yml"


@dataclass(frozen=True)
class Site:
    """A project, its index, and the Sigstore that this machine trusts."""

    root: Path
    index: Index
    sigstore: Sigstore
    call: Callable[..., Said]

    def lock(self, *words: str) -> Said:
        return self.call("-C", str(self.root), "lock", *(words or (NAME,)))

    def publishers(self, name: str = NAME) -> dict[str, str]:
        return dict(read_lock(self.root / "lockfiles" / f"{name}.requirements.txt").publishers)

    def attest(self, filename: str, workflow: Workflow = OWN, **options: Any) -> None:
        assert self.index.provenance is not None
        value = self.sigstore.provenance(filename, self.index.hash(filename), workflow, **options)
        self.index.provenance[filename] = json.dumps(value).encode()

    def release(self, version: str) -> str:
        """Upload a release of `small`."""
        self.index.add("small", version)
        return f"small-{version}-py3-none-any.whl"

    @property
    def queries(self) -> list[str]:
        return [line.rpartition("/")[2] for line in self.index.requests if "/integrity/" in line]


@pytest.fixture
def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Site]:
    sigstore = Sigstore()
    sigstore.install(tmp_path / "cache")
    with package_index(tmp_path / "index") as index:
        index.json, index.provenance = True, {}
        for version in ("12.1.105", "12.4.127"):
            index.add("nvidia-cuda-runtime-cu12", version, tag="py3-none-manylinux1_x86_64")
        index.add("more", "1.0")
        for name, value in {
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "IMAGEFACTORY_INDEX": index.url,
            "IMAGEFACTORY_CACHE": str(tmp_path / "factory"),
            "UV_HTTP_RETRIES": "0",
        }.items():
            monkeypatch.setenv(name, value)
        # A break is tried again, but without its long waits.
        monkeypatch.setattr(http, "RetryPolicy", partial(RetryPolicy, attempts=2, first_wait=0.01))
        site = Site(make_root(tmp_path / "project", demo=RECIPE), index, sigstore, partial(say, capsys))
        site.attest(site.release("1.0"))
        yield site


def test_a_publisher_is_recorded_by_one_request_and_a_change_is_told(site: Site) -> None:
    assert site.lock().code == 0
    assert (site.publishers(), site.queries) == ({"small": BY_OWN}, ["small-1.0-py3-none-any.whl"])
    packages = site.call("-C", str(site.root), "show", NAME, "--json").json()["packages"]
    assert [row.get("publisher") for row in packages] == [None, None, BY_OWN]  # type: ignore[attr-defined]
    site.index.requests.clear()
    assert site.lock("--upgrade", NAME).code == 0
    assert site.queries == []  # the file is the same
    site.attest(site.release("2.0"), FORK)
    value = site.lock(NAME, "--upgrade", "--json").json()
    (row,) = value["results"]  # type: ignore[misc]
    change = {"name": "small", "before": BY_OWN, "after": BY_FORK}
    assert (row["changed"], row["publishers_changed"]) == (True, [change])  # type: ignore[index]
    assert site.publishers() == {"small": BY_FORK}
    site.release("3.0")
    assert BY_FORK in site.lock(NAME, "--upgrade").out
    assert site.publishers() == {}


def test_off_costs_nothing_and_keeps_what_is_known(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.lock()
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", "off")
    site.index.requests.clear()
    site.index.add("more", "1.1")
    assert site.lock(NAME, "--upgrade").code == 0
    assert (site.publishers(), site.queries) == ({"small": BY_OWN}, [])


@pytest.mark.parametrize("attested", [FORK, None])
def test_strict_stops_and_record_accepts(
    attested: Workflow | None, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With None, the index names an address that it does not have."""
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", "strict")
    assert site.lock().code == 0
    before = (site.root / "lockfiles" / f"{NAME}.requirements.txt").read_bytes()
    file = site.release("2.0")
    assert site.index.provenance is not None
    site.index.provenance[file] = None
    if attested:
        site.attest(file, attested)
    said = site.lock(NAME, "--upgrade")
    assert (said.code, said.error_codes) == (EXIT_LOCK, ("publisher-changed",))
    assert site.queries[-1] == file
    assert (site.root / "lockfiles" / f"{NAME}.requirements.txt").read_bytes() == before
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", "record")
    assert site.lock(NAME, "--upgrade").code == 0
    assert site.publishers() == ({"small": BY_FORK} if attested else {})


@pytest.mark.parametrize("value", ["record", "strict"])
def test_an_invalid_attestation_always_stops(value: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", value)
    site.attest("small-1.0-py3-none-any.whl", FORK, publisher=OWN)
    said = site.lock()
    assert (said.code, said.error_codes) == (EXIT_LOCK, ("publisher-invalid",))
    assert not list((site.root / "lockfiles").glob("*.requirements.txt"))


def test_an_index_without_attestations_is_said_once_where_publishers_are_set(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.index.provenance, requests = None, {}
    site.lock(NAME, OTHER)  # the sizes of files are known from then on
    for value, notes in (("off", 0), ("", 0), ("record", 1), ("strict", 1)):
        monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", value)
        site.index.own_requests.clear()
        said = site.lock(NAME, OTHER, "--upgrade")
        assert (said.code, said.err.count("PEP 740")) == (0, notes)
        requests[value] = sorted(site.index.own_requests)
    assert requests[""] == requests["strict"] == requests["off"]  # the pages are read anyway


def test_without_the_library_nothing_pretends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypi_attestations", None)
    said = site.lock(NAME, OTHER)
    assert (said.code, said.err.count("[sigstore]")) == (0, 1)
    assert (site.publishers(), site.queries) == ({}, [])
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", "strict")
    said = site.lock(NAME, "--upgrade")
    assert (said.code, said.error_codes) == (EXIT_TOOL, ("extra-not-installed",))


def test_a_break_in_the_middle_is_told_and_stops_strict(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.attest("more-1.0-py3-none-any.whl", Workflow(repository="lab/more"))
    site.index.broken.add("small-1.0-py3-none-any.whl")
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", "strict")
    said = site.lock()
    assert (said.code, said.error_codes) == (EXIT_LOCK, ("index-read-failed",))
    assert site.queries.count("small-1.0-py3-none-any.whl") == 2
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", "record")
    said = site.lock()
    assert (said.code, "small-1.0-py3-none-any.whl" in said.err) == (0, True)
    assert site.publishers() == {"more": "GitHub lab/more release.yml"}


def test_an_endless_provenance_is_not_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.index.provenance is not None
    site.index.provenance["small-1.0-py3-none-any.whl"] = b" " * (1 << 20) + b"{}"
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", "strict")
    assert site.lock().error_codes == ("index-read-failed",)


def test_wheels_on_conda_packages_have_publishers_too(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_place(capsys, tmp_path / "place", monkeypatch)
    path = place.root / "recipes" / "tiny.yaml"
    path.write_text(f"{path.read_text()}    pip: [small]\n")
    assert place.call("lock", "tiny-*").code == 0
    (target,) = place.factory.targets
    lock = read_files(place.root / "lockfiles", target)
    assert lock is not None
    assert (lock.publishers, bool(lock.conda)) == ((("small", BY_OWN),), True)
    own = [line for line in site.index.own_requests if line == "GET /simple/small/"]
    assert (len(own), place.call("lock", "--check", "tiny-*").code) == (1, 0)


def test_the_login_of_the_index_is_sent_to_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.index.password = "secret"
    monkeypatch.setenv("IMAGEFACTORY_INDEX", site.index.url.replace("//", "//bob:secret@"))
    monkeypatch.setenv("IMAGEFACTORY_PUBLISHERS", "strict")
    assert site.lock().code == 0
    assert site.publishers() == {"small": BY_OWN}
    assert "secret" not in (site.root / "lockfiles" / f"{NAME}.requirements.txt").read_text()


def test_a_target_on_another_takes_what_its_parent_knows(site: Site) -> None:
    recipe = "family: more\ndescription: More\non: demo-12.1-cu121\npackages: [extra]\n"
    (site.root / "recipes" / "more.yaml").write_text(recipe)
    site.index.add("extra", "1.0")
    site.attest("extra-1.0-py3-none-any.whl", Workflow(repository="lab/extra"))
    assert site.lock(NAME, "more-12.1-cu121").code == 0
    assert site.publishers("more-12.1-cu121") == {"extra": "GitHub lab/extra release.yml", "small": BY_OWN}
    assert sorted(site.queries) == ["extra-1.0-py3-none-any.whl", "small-1.0-py3-none-any.whl"]


def test_attributes_of_html_pages_are_read_too(site: Site) -> None:
    site.index.json = False
    assert site.lock().code == 0
    assert site.publishers() == {"small": BY_OWN}
