"""A signed catalog in docker-registry, read by somebody who has nothing but two settings."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from imagefactory.actions.join import read_invitation
from imagefactory.actions.read_catalog import read_catalog
from imagefactory.errors import RegistryError, StatementError
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.settings.load import load_settings
from imagefactory.trust.catalog import CATALOG_TYPE, Catalog, CatalogSource, sign_catalog
from imagefactory.trust.catalog_package import CURRENT
from imagefactory.trust.invitation import Invitation, format_invitation
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.offers import publish_catalog, publish_invitation
from imagefactory.trust.policy import TrustGrant
from tests.made.catalog import envelope_of, make_catalog, make_image
from tests.made.errors import fails
from tests.made.verdicts import LAB, NOW, STRANGER
from tests.services.registry import RegistryOptions, registry_server


def read(folder: Path, place: str) -> Catalog:
    """As a person whose site wrote two settings for everybody."""
    site = folder / "site" / "imagefactory"
    site.mkdir(parents=True, exist_ok=True)
    public = base64.b64encode(LAB.public).decode("ascii")
    (site / "imagefactory.toml").write_text(
        f'catalog = "{place}"\n[[trust]]\nname = "lab"\nkeyid = "{LAB.keyid}"\npublic = "{public}"\n'
        "from = 2026-01-01\nuntil = 2028-01-01\n"
    )
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environ = {"HOME": str(home), "XDG_CONFIG_DIRS": str(site.parent)}
    return read_catalog(load_settings(directory=None, start=home, environ=environ), environ, NOW)


def test_current_is_the_newest_and_each_keeps_a_tag_of_its_own(registry: str, tmp_path: Path) -> None:
    place = StoreRepository(store=RegistryClient(registry), repository="cat/gpu/catalog")
    with fails("catalog-not-found"):
        read(tmp_path, f"{registry}/cat/gpu")
    old = make_catalog(make_image(size=1))
    new = replace(make_catalog(), created=NOW, expires=NOW + timedelta(days=9))
    for one in (old, new):
        own, current = publish_catalog(place, sign_catalog(one, LAB), one.created)
        assert (current.tag, current.digest) == (CURRENT, own.digest)
        assert read(tmp_path, f"{registry}/cat/gpu") == one
    assert publish_catalog(place, sign_catalog(new, LAB), new.created)[0] == own
    first, second, last = place.store.tags(place.repository)
    assert (first[:9], second[:9], last) == ("20261122-", "20261122-", CURRENT)
    assert [read(tmp_path, f"{registry}/cat/gpu:{tag}").created for tag in {first, second} - {own.tag}] == [
        old.created
    ]


def test_the_invitation_lies_beside_it_and_the_newest_counts(registry: str, tmp_path: Path) -> None:
    place = StoreRepository(store=RegistryClient(registry), repository="cat/site/catalog")
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path)}
    settings = load_settings(directory=None, start=tmp_path, environ=environ)
    with fails("invitation-not-found"):
        read_invitation(settings, environ, f"{registry}/cat/site")
    publish_catalog(place, sign_catalog(make_catalog(), LAB), NOW)
    for key in (LAB, STRANGER):
        grant = TrustGrant(
            key=PublicKey(name="lab", raw=key.public), since=NOW.date(), until=date(2027, 1, 1)
        )
        made = Invitation(catalog=f"{registry}/cat/site", site="generic", sif_folder="", keys=(grant,))
        put = publish_invitation(place, format_invitation(made), NOW)
        assert put.tag == "invitation"
        assert read_invitation(settings, environ, f"{registry}/cat/site") == made
        assert read_invitation(settings, environ, f"{registry}/cat/site/catalog") == made
    assert place.store.tags(place.repository)[-2:] == (CURRENT, "invitation")
    own = place.store.manifest(place.repository, CURRENT)
    assert own is not None
    place.store.put_manifest(place.repository, own[1], own[0].media_type, "invitation")
    with pytest.raises(
        RegistryError, check=lambda error: error.code == "artifact-malformed"
    ):  # but the catalog, called so
        read_invitation(settings, environ, f"{registry}/cat/site")


def test_what_another_put_there_is_refused(registry: str, tmp_path: Path) -> None:
    place = StoreRepository(store=RegistryClient(registry), repository="cat/other/catalog")
    publish_catalog(place, sign_catalog(make_catalog(), STRANGER), NOW)
    with pytest.raises(StatementError, match="wrong-key"):
        read(tmp_path, f"{registry}/cat/other")
    signed = json.loads(envelope_of(sign_catalog(make_catalog(), LAB)))
    assert signed["payloadType"] == CATALOG_TYPE
    forged = json.dumps({**signed, "payload": "e30="}, sort_keys=True, separators=(",", ":")).encode()
    publish_catalog(place, forged, NOW)
    with pytest.raises(StatementError, match="edited"):
        read(tmp_path, f"{registry}/cat/other")


def test_a_registry_that_is_down_or_lost_leaves_the_kept_one_and_no_older_one_comes_back(
    tmp_path: Path,
) -> None:
    def publish(host: str, catalog: Catalog) -> None:
        place = StoreRepository(store=RegistryClient(host), repository="gpu/catalog")
        publish_catalog(place, sign_catalog(catalog, LAB), catalog.created)

    old, storage = make_catalog(), tmp_path / "storage"
    new = replace(old, created=NOW, expires=NOW + timedelta(days=9))
    with registry_server(tmp_path / "first", RegistryOptions(storage=storage)) as server:
        host, port = server.host, server.port
        publish(host, old)
        assert read(tmp_path, f"{host}/gpu").source is CatalogSource.PLACE
        shutil.copytree(storage, tmp_path / "backup")
        publish(host, new)
        assert read(tmp_path, f"{host}/gpu") == new
    down = read(tmp_path, f"{host}/gpu")
    assert (down, down.source) == (new, CatalogSource.KEPT)
    with registry_server(tmp_path / "second", RegistryOptions(port=port)):
        lost = read(tmp_path, f"{host}/gpu")
        assert (lost, lost.source) == (new, CatalogSource.KEPT)
    with registry_server(tmp_path / "third", RegistryOptions(port=port, storage=tmp_path / "backup")):
        with fails("catalog-rolled-back"):
            read(tmp_path, f"{host}/gpu")
        publish(host, replace(new, created=NOW + timedelta(minutes=1)))
        assert read(tmp_path, f"{host}/gpu").source is CatalogSource.PLACE
