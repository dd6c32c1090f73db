"""A site invites, a person joins: from the command line, by a file and by a registry."""

from __future__ import annotations

import io
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.trust.catalog import LIFE, sign_catalog
from imagefactory.trust.invitation import fingerprint
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.offers import publish_catalog
from imagefactory.trust.policy import TrustGrant, format_row
from tests.made.catalog import make_catalog
from tests.made.command import Said, json_of, say
from tests.made.registry import RegistryMadeHere
from tests.made.trusted import write_settings
from tests.made.verdicts import LAB, STRANGER

NOW = datetime.now(UTC).replace(microsecond=0)


def row(raw: bytes) -> str:
    today = NOW.date()
    since, until = today - timedelta(days=9), today + timedelta(days=99)
    return format_row(TrustGrant(key=PublicKey(name="lab", raw=raw), since=since, until=until))


@dataclass(frozen=True)
class Site:
    """A site's folder, its people's homes, and the registry between them."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    folder: Path
    registry: RegistryMadeHere

    @property
    def settings(self) -> Path:
        return self.folder / "config/imagefactory/imagefactory.toml"

    @property
    def address(self) -> str:
        return f"{self.registry.host}/gpu"

    def invite(self, *arguments: str, key: bytes = LAB.public, code: int = 0, more: str = "") -> Said:
        root = self.folder / "site"
        root.mkdir(exist_ok=True)
        write_settings(root, f'registry = "{self.address}"\nsite = "chtc"\n{more}\n{row(key)}')
        return self._say(
            "-C",
            str(root),
            "site",
            "invite",
            "-o",
            str(self.folder / "invitation.toml"),
            *arguments,
            code=code,
        )

    def join(self, *arguments: str, answer: str | None = None, code: int = 0) -> Said:
        """As a person in an empty folder; at a terminal where there is an answer."""
        if answer is not None:
            self.monkeypatch.setattr("imagefactory.cli.join.is_terminal", lambda: True)
            self.monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        else:
            self.monkeypatch.setattr("imagefactory.cli.join.is_terminal", lambda: False)
        return self._say("site", "join", *arguments, code=code)

    def _say(self, *arguments: str, code: int) -> Said:
        said = say(self.capsys, *arguments)
        assert said.code == code, said
        return said


@pytest.fixture
def site(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    registry: RegistryMadeHere,
) -> Site:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("config", "cache"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "nothing"))
    return Site(capsys, monkeypatch, tmp_path, registry)


def test_a_file_is_joined_once(site: Site) -> None:
    made = datetime.now(UTC) - timedelta(minutes=1)
    catalog = make_catalog(created=made.replace(microsecond=0), expires=made.replace(microsecond=0) + LIFE)
    place = StoreRepository(store=RegistryClient(site.registry.host), repository="gpu/catalog")
    publish_catalog(place, sign_catalog(catalog, LAB), catalog.created)
    file = str(site.folder / "invitation.toml")
    said = site.invite()
    assert fingerprint(LAB.keyid) in said.out
    assert said.err.splitlines()[-1].endswith(f" join {file}")
    said = site.join(file, "--json", answer="n\n", code=9)
    assert said.err.index(fingerprint(LAB.keyid)) < said.err.index("Do you trust this key? [y/N]")
    said = site.join(file, answer="y\n")
    assert fingerprint(LAB.keyid) in said.err
    assert "Do you trust this key? [y/N]" in said.err
    assert f"its catalog of {made:%Y-%m-%d} has 1 image\n" in said.out
    assert said.err.endswith("next: imagefactory search\n")
    settings = tomllib.loads(site.settings.read_text())
    assert (settings["catalog"], settings["site"]) == (site.address, "chtc")
    before = site.settings.read_bytes()
    again = site.join(file)  # nobody is asked
    assert f"nothing to do: {site.settings} is up to date" in again.out
    assert site.settings.read_bytes() == before


def test_a_registry_is_joined_by_its_address(site: Site) -> None:
    said = site.join(site.address, "--yes", code=8)
    assert said.error_codes == ("invitation-not-found",)
    pushed = json_of(site.invite("--push", "--json"), "site-invite")["pushed"]
    assert pushed.startswith(f"{site.address}/catalog:invitation@sha256:")
    told = json_of(site.join(site.address, "--yes", "--json"), "site-join")
    assert told["keys"] == [LAB.keyid]
    assert told["catalog_works"] is False  # nobody made one yet
    assert site.settings.is_file()
    assert json_of(site.join(site.address, "--json"), "site-join")["changes"] == []


def test_an_invitation_whose_file_cannot_be_written_is_not_pushed(site: Site) -> None:
    said = site.invite("--push", "-o", str(site.folder / "missing/invitation.toml"), code=2)
    assert said.error_codes == ("cannot-write-file",)
    assert site.join(site.address, "--yes", code=8).error_codes == ("invitation-not-found",)


def test_an_invitation_brings_the_mirrors_of_the_catalog(site: Site) -> None:
    mirrors = "mirror.example.org/gpu,/shared/catalog.json"
    site.invite(more=f'catalog-mirrors = "{mirrors}"\n')
    site.join(str(site.folder / "invitation.toml"), "--yes")
    assert tomllib.loads(site.settings.read_text())["catalog-mirrors"] == mirrors
    site.invite("--catalog", "/shared/other.json", more=f'catalog-mirrors = "{mirrors}"\n')
    assert "catalog-mirrors" not in (site.folder / "invitation.toml").read_text()


def test_nobody_to_ask_writes_nothing(site: Site) -> None:
    site.invite()
    file = str(site.folder / "invitation.toml")
    said = site.join(file, code=2)
    assert "this is not a terminal" in said.err
    assert f"imagefactory site join {file} --yes" in said.err
    for answer in ("n\n", "\n"):
        site.join(file, answer=answer, code=9)
    assert not site.settings.exists()


def test_a_changed_key_is_loud_and_asked_again(site: Site) -> None:
    file = str(site.folder / "invitation.toml")
    site.invite()
    site.join(file, "--yes")
    first = site.settings.read_bytes()
    site.invite(key=STRANGER.public)
    said = site.join(file, "--yes", code=9)
    assert "center's key has changed" in said.err
    assert site.settings.read_bytes() == first
    said = site.join(file, answer="n\n", code=9)
    assert "WARNING: THE KEY OF THIS SITE HAS CHANGED." in said.err
    assert said.err.index(fingerprint(LAB.keyid)) < said.err.index(fingerprint(STRANGER.keyid))
    assert site.settings.read_bytes() == first
    assert "Do you trust the NEW key? [y/N]" in site.join(file, answer="y\n").err
    (trust,) = tomllib.loads(site.settings.read_text())["trust"]
    assert (trust["name"], trust["keyid"]) == ("lab", STRANGER.keyid)


def test_what_cannot_be_invited_to(site: Site) -> None:
    said = site.invite("--push", "--catalog", "/shared/catalog.json", code=2)
    assert said.error_codes == ("catalog-not-in-registry",)
    root = site.folder / "bare"
    root.mkdir()
    write_settings(root, 'registry = "registry.example.org"\n')
    assert site._say("-C", str(root), "site", "invite", code=9).error_codes == ("no-trusted-key",)
    (root / "imagefactory.toml").write_text("")
    assert site._say("-C", str(root), "site", "invite", code=2).error_codes == ("no-catalog-set",)


@pytest.mark.parametrize(
    ("where", "error_codes"),
    [
        ("none.toml", ("cannot-read-file",)),
        ("./none", ("cannot-read-file",)),
        ("https://registry.example.org/gpu", ("reference-invalid",)),
        ("gpu", None),
    ],
)
def test_what_is_neither(site: Site, where: str, error_codes: tuple[str, ...] | None) -> None:
    said = site.join(where, "--yes", code=2)
    assert error_codes in (None, said.error_codes)
    assert where.removeprefix("./") in said.err
    assert "hint: " in said.err
