"""`push --sbom`: what lies beside an image then, who can read it, and that again changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from imagefactory.access import open_registry
from imagefactory.actions.locked import require_lock
from imagefactory.lock.files import lock_digest
from imagefactory.model import Target
from imagefactory.oci.candidates import (
    BUNDLE_TYPE,
    CYCLONEDX_TYPE,
    PROVENANCE_TYPE,
    SPDX_TYPE,
    plan_prune,
    read_tagged,
    remove_candidate,
)
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_TYPE, canonical_json, format_descriptor
from imagefactory.project import Project
from imagefactory.trust.envelope import is_signed_by, parse_bundle, parse_envelope
from imagefactory.trust.keys import keys_directory, make_key
from tests.made.command import Call, Said
from tests.made.pushed import put_base, put_built
from tests.made.registry import RegistryMadeHere, Ways, registry_made_here
from tests.made.scanned import tar

SITE = "opt/env/lib/python3.11/site-packages"
LAYER = tar(
    (f"{SITE}/torch-2.3.1.dist-info/METADATA", b"Name: torch\nVersion: 2.3.1\nLicense: BSD-3-Clause\n")
)

Push = Callable[..., Said]


@pytest.fixture
def registry(request: pytest.FixtureRequest) -> Iterator[RegistryMadeHere]:
    with registry_made_here(Ways(referrers=getattr(request, "param", True))) as made:
        yield made


@pytest.fixture
def push(
    factory: Project, target: Target, registry: RegistryMadeHere, call: Call, monkeypatch: pytest.MonkeyPatch
) -> Push:
    """A push of an image that the store knows to have made of the target's lock."""
    for name, value in factory.environ.items():
        monkeypatch.setenv(name, value)
    put_base(factory, target)
    labels = {
        "imagefactory.target": target.name,
        "imagefactory.lock": lock_digest(require_lock(factory, target)),
    }
    put_built(factory, target, LAYER, **labels)
    root = factory.settings.root_path
    return lambda *words: call("push", target.name, "--registry", registry.host, *words, root=root)


def attached(factory: Project, registry: RegistryMadeHere, digest: str, *more: str) -> dict[str, bytes]:
    place = StoreRepository(store=open_registry(factory, registry.host), repository="pytorch")
    found: dict[str, bytes] = {}
    for kind in (CYCLONEDX_TYPE, SPDX_TYPE, PROVENANCE_TYPE, *more):
        for referrer in place.store.referrers("pytorch", digest, kind):
            assert kind not in found
            manifest = place.store.manifest("pytorch", referrer.digest)
            assert manifest
            (layer,) = json.loads(manifest[1])["layers"]
            assert layer["mediaType"] == kind
            data = registry.shelves.blobs[layer["digest"]]
            found[kind] = data
    return found


def test_without_it_nothing_is_attached(push: Push, factory: Project, registry: RegistryMadeHere) -> None:
    (row,) = push("--json").json()["results"]  # type: ignore[attr-defined]
    assert "attached" not in row
    assert attached(factory, registry, row["digest"]) == {}


def test_both_bills_lie_beside_the_image(push: Push, factory: Project, registry: RegistryMadeHere) -> None:
    said = push("--sbom")
    assert said.code == 0, said.err
    assert "provenance  none: no key (imagefactory key create NAME)" in said.out
    value: dict[str, Any] = push("--sbom", "--json").json()
    (row,) = value["results"]
    found = attached(factory, registry, row["digest"])
    assert row["attached"].keys() == found.keys() == {CYCLONEDX_TYPE, SPDX_TYPE}
    parts = {one["name"]: one for one in json.loads(found[CYCLONEDX_TYPE])["components"]}
    assert parts["torch"]["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert "base-files" in parts
    assert json.loads(found[SPDX_TYPE])["spdxVersion"] == "SPDX-2.3"


def test_provenance_is_signed_and_names_what_went_in(
    push: Push, factory: Project, target: Target, registry: RegistryMadeHere
) -> None:
    key = make_key(keys_directory(factory.environ), "lab")
    first, second = push("--sbom", "--json"), push("--sbom", "--json")
    assert first.json()["results"][0]["attached"] == second.json()["results"][0]["attached"]  # type: ignore[index]
    value: dict[str, Any] = first.json()
    (row,) = value["results"]
    envelope = parse_envelope(attached(factory, registry, row["digest"])[PROVENANCE_TYPE], "provenance")
    assert is_signed_by(envelope, key.keyid, key.raw)
    statement = json.loads(envelope.payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    digests = [f"sha256:{one['digest']['sha256']}" for one in statement["subject"]]
    assert digests == [row["digest"], row["manifest"]]
    definition = statement["predicate"]["buildDefinition"]
    lock = require_lock(factory, target)
    assert definition["externalParameters"]["lock"] == lock_digest(lock)
    named = {one["digest"]["sha256"] for one in definition["resolvedDependencies"]}
    assert {wheel.sha256 for wheel in lock.wheels} < named


def test_provenance_is_attached_as_a_bundle_too_if_the_setting_says_so(
    push: Push, factory: Project, registry: RegistryMadeHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(keys_directory(factory.environ), "lab")
    monkeypatch.setenv("IMAGEFACTORY_SIGSTORE_BUNDLES", "yes")
    value: dict[str, Any] = push("--sbom", "--json").json()
    (row,) = value["results"]
    found = attached(factory, registry, row["digest"], BUNDLE_TYPE)
    assert BUNDLE_TYPE in row["attached"]
    assert parse_bundle(found[BUNDLE_TYPE], "x") == found[PROVENANCE_TYPE]


def test_an_image_that_was_not_made_here_has_no_provenance_of_here(
    push: Push, factory: Project, target: Target, registry: RegistryMadeHere
) -> None:
    make_key(keys_directory(factory.environ), "lab")
    put_built(factory, target, tar(), record=False)
    said = push("--sbom")
    assert said.code == 0, said.err
    assert "provenance  none: this store did not build the image from the current lock" in said.out


@pytest.mark.parametrize("registry", [False], ids=["fallback"], indirect=True)
def test_bills_are_found_in_a_list_that_calls_them_something_else(
    push: Push, factory: Project, registry: RegistryMadeHere
) -> None:
    """GHCR's list says application/vnd.oci.empty.v1+json; what it has of strangers stays."""
    value: dict[str, Any] = push("--sbom", "--json").json()
    (row,) = value["results"]
    client = open_registry(factory, registry.host)
    tag = row["digest"].replace(":", "-")
    found = client.manifest("pytorch", tag)
    assert found
    index = json.loads(found[1])
    config = client.manifest("pytorch", index["manifests"][0]["digest"])
    assert config
    bundle = {**json.loads(config[1]), "artifactType": "application/vnd.dev.sigstore.bundle.v0.3+json"}
    del bundle["subject"]
    stranger = client.put_manifest("pytorch", canonical_json(bundle), MANIFEST_TYPE)
    index["manifests"].append(format_descriptor(stranger))
    for one in index["manifests"]:
        one["artifactType"] = "application/vnd.oci.empty.v1+json"
    client.put_manifest("pytorch", canonical_json(index), INDEX_TYPE, tag)
    make_key(keys_directory(factory.environ), "lab")  # so that one more is attached
    again: dict[str, Any] = push("--sbom", "--json").json()
    attached_now = again["results"][0]["attached"]
    assert attached_now.items() > row["attached"].items()
    assert attached(factory, registry, row["digest"]).keys() == attached_now.keys()
    listed = {one.digest for one in client.referrers("pytorch", row["digest"])}
    assert listed >= {stranger.digest, *attached_now.values()}


def test_what_is_attached_goes_with_its_candidate(
    push: Push, factory: Project, registry: RegistryMadeHere
) -> None:
    make_key(keys_directory(factory.environ), "lab")
    value: dict[str, Any] = push("--sbom", "--json").json()
    place = StoreRepository(store=open_registry(factory, registry.host), repository="pytorch")
    plain = frozenset({"2.3-cu121"})
    (fate,) = plan_prune(read_tagged(place, plain, records=True), datetime.now(UTC) + timedelta(days=1))
    assert fate.remove
    assert remove_candidate(open_registry(factory, registry.host), "pytorch", fate) == ""
    (row,) = value["results"]
    assert len(row["attached"]) == 3
    gone = registry.repository("pytorch").manifests.keys() & row["attached"].values()
    assert gone == set()


def test_a_sif_has_no_bill(push: Push) -> None:
    said = push("--sbom", "--format", "sif")
    assert said.code == 2
    assert "--sbom" in said.err
