"""The last good catalog of a place is used while its registry is down, and never one that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions.read_catalog import MOST, CachedCatalog, place_name, read_catalog
from imagefactory.errors import ImagefactoryError, RegistryError, StatementError, UsageError
from imagefactory.http import HURRIED
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.serialize import format_time
from imagefactory.settings.load import load_settings
from imagefactory.trust.catalog import LIFE, Catalog, CatalogSource, open_catalog, sign_catalog
from imagefactory.trust.catalog_package import pack_artifact
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.offers import publish_catalog
from tests.made.catalog import envelope_of, make_catalog
from tests.made.errors import fails
from tests.made.registry import RegistryMadeHere, registry_made_here
from tests.made.trusted import write_settings
from tests.made.verdicts import LAB, LAB_ROW, NOW, STRANGER

MADE = NOW - timedelta(days=3)


def of(made: datetime) -> Catalog:
    return make_catalog(created=made, expires=made + LIFE)


def publish(registry: RegistryMadeHere, catalog: Catalog, key: SigningKey = LAB) -> None:
    place = StoreRepository(store=RegistryClient(registry.host), repository="gpu/catalog")
    publish_catalog(place, sign_catalog(catalog, key), catalog.created)


@dataclass(frozen=True)
class Reader:
    """Somebody who joined the catalog of a registry, and that registry, which `stop` ends."""

    folder: Path
    registry: RegistryMadeHere

    def read(self, now: datetime = NOW, more: str = "", **environ: str) -> Catalog:
        known = {"HOME": str(self.folder / "home"), "XDG_CONFIG_DIRS": str(self.folder / "none"), **environ}
        write_settings(self.folder, f'catalog = "{self.place}"\n{more}\n{LAB_ROW}', known)
        settings = load_settings(directory=self.folder, start=self.folder, environ=known)
        return read_catalog(settings, known, now)

    @property
    def place(self) -> str:
        return f"{self.registry.host}/gpu"

    @property
    def kept(self) -> CachedCatalog:
        return CachedCatalog(
            cache=self.folder / "home/.cache/imagefactory", where=f"{self.place}/catalog:current"
        )

    def stop(self) -> None:
        self.registry.fault = lambda _: "503"


@pytest.fixture
def reader(tmp_path: Path, registry: RegistryMadeHere, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setattr("imagefactory.actions.read_catalog.HURRIED", replace(HURRIED, attempts=1))
    publish(registry, of(MADE))
    return Reader(tmp_path, registry)


@pytest.fixture
def mirror() -> Iterator[RegistryMadeHere]:
    with registry_made_here() as made:
        yield made


def test_the_kept_copy_is_used_while_the_registry_is_down(reader: Reader) -> None:
    current = reader.read()
    assert (current, current.source, current.notes) == (of(MADE), CatalogSource.PLACE, ())
    reader.stop()
    kept = reader.read()
    assert (kept, kept.source) == (current, CatalogSource.KEPT)
    assert any("3 days old" in note and "2026-12-19" in note for note in kept.notes)
    with pytest.raises(RegistryError, match="expired"):
        reader.read(MADE + LIFE)
    reader.registry.fault = None
    publish(reader.registry, of(NOW))
    assert reader.read().source is CatalogSource.PLACE
    reader.stop()
    assert reader.read() == of(NOW)


def test_a_registry_that_never_answers_is_asked_once(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that costs is one time-out, not one for each attempt."""
    reader.read()
    asked = len(reader.registry.log)
    hurried = replace(HURRIED, read=0.05, span=0.04)
    monkeypatch.setattr("imagefactory.actions.read_catalog.HURRIED", hurried)
    reader.registry.fault = lambda _: "hang"
    assert reader.read().source is CatalogSource.KEPT
    assert len(reader.registry.log) == asked + 1
    assert (HURRIED.read <= 5, HURRIED.connect <= 5, HURRIED.span < HURRIED.read) == (True,) * 3


def test_a_lost_registry_that_answers_is_no_other_case(reader: Reader) -> None:
    reader.read()
    reader.registry.shelves.repositories.clear()
    assert reader.read().source is CatalogSource.KEPT


def test_without_a_copy_a_registry_that_is_down_fails(reader: Reader) -> None:
    reader.registry.fault = lambda _: "403"
    with pytest.raises(RegistryError):
        reader.read()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda data: data[:-9], "corrupt"),
        (lambda _: b"", "403"),
        (lambda _: sign_catalog(of(NOW), STRANGER), "wrong-key"),
        (lambda _: edited(sign_catalog(of(NOW), LAB)), "edited"),
        (lambda _: pack_artifact(sign_catalog(of(MADE - timedelta(seconds=1)), LAB)), format_time(MADE)),
    ],
)
def test_a_copy_is_verified_each_time(reader: Reader, change: Callable[[bytes], bytes], word: str) -> None:
    reader.read()
    reader.registry.fault = lambda _: "403"
    reader.kept.path.write_bytes(change(reader.kept.path.read_bytes()))
    with pytest.raises(RegistryError, match=word):
        reader.read()


def edited(data: bytes) -> bytes:
    signed = json.loads(envelope_of(data))
    return json.dumps({**signed, "payload": "e30="}, sort_keys=True, separators=(",", ":")).encode()


def test_what_comes_and_is_refused_gives_way_to_no_copy(reader: Reader) -> None:
    reader.read()
    publish(reader.registry, of(NOW), STRANGER)
    with pytest.raises(StatementError, match="wrong-key"):
        reader.read()
    publish(reader.registry, of(MADE - timedelta(days=1)))
    with fails("catalog-rolled-back"):
        reader.read()
    reader.stop()
    assert reader.read() == of(MADE)


def test_mirrors_come_before_the_copy_and_cannot_bring_an_older_one(
    reader: Reader, mirror: RegistryMadeHere
) -> None:
    more = f'catalog-mirrors = "/no/such/file,{mirror.host}/gpu"'
    publish(mirror, of(MADE - timedelta(days=1)))
    assert reader.read(more=more).source is CatalogSource.PLACE
    reader.stop()
    assert reader.read(more=more).source is CatalogSource.KEPT
    publish(mirror, of(NOW), STRANGER)
    assert reader.read(more=more).source is CatalogSource.KEPT
    publish(mirror, of(NOW))
    found = reader.read(more=more)
    assert (found, found.source) == (of(NOW), CatalogSource.MIRROR)
    mirror.fault = lambda _: "503"
    assert reader.read(more=more) == of(NOW)
    reader.registry.fault = None
    with fails("catalog-rolled-back"):
        reader.read(more=more)


def test_mirrors_are_of_the_catalog_beside_them(reader: Reader, mirror: RegistryMadeHere) -> None:
    publish(mirror, of(NOW))
    more = f'catalog-mirrors = "{mirror.host}/gpu"'
    with pytest.raises(UsageError):
        reader.read(more=more, IMAGEFACTORY_CATALOG="/no/catalog")
    both = {"IMAGEFACTORY_CATALOG": "/no/catalog", "IMAGEFACTORY_CATALOG_MIRRORS": f"{mirror.host}/gpu"}
    assert reader.read(**both).source is CatalogSource.MIRROR


def test_readers_are_warned_a_week_before_it_expires(reader: Reader) -> None:
    end = MADE + LIFE
    assert reader.read(end - timedelta(days=7)).notes == ()
    (note,) = reader.read(end - timedelta(days=6, hours=1)).notes
    assert ("2026-12-19" in note, "6 days" in note) == (True, True)
    reader.stop()
    assert len(reader.read(end - timedelta(hours=1)).notes) == 3


def test_a_file_has_a_copy_too(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "shared.json"
    path.write_bytes(sign_catalog(of(MADE), LAB))
    place = {"IMAGEFACTORY_CATALOG": str(path)}
    assert reader.read(**place).source is CatalogSource.PLACE
    path.unlink()
    found = reader.read(**place)
    assert (found, found.source) == (of(MADE), CatalogSource.KEPT)


def test_a_copy_that_can_only_be_read_is_used(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read()
    reader.stop()

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("imagefactory.actions.read_catalog.os.utime", refuse)
    assert reader.read().source is CatalogSource.KEPT


def test_the_cache_keeps_the_newest_of_a_few_places(tmp_path: Path) -> None:
    kept = [CachedCatalog(cache=tmp_path, where=place_name(f"/{number}")) for number in range(MOST + 2)]
    for one in kept:
        one.write(open_catalog(b"catalog", "x"), MADE)
    assert len(list((tmp_path / "catalogs").iterdir())) == MOST
    assert kept[-1].path.read_bytes() == b"catalog"
    assert kept[0].open() is None
    for one in kept:
        with pytest.raises(ImagefactoryError):
            one.refuse_older(MADE - timedelta(seconds=1))
