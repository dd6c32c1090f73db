"""What two tools could read in two ways is not read at all."""

from __future__ import annotations

import json

import pytest

from imagefactory.errors import NoPlatformError
from imagefactory.http import RetryPolicy
from imagefactory.oci.graph import Manifest, StoreRepository, parse_parts, read_manifest
from imagefactory.oci.manifests import (
    ATTESTATION,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    choose_image,
    digest_of,
    media_type_of,
    parse_config,
    read_json,
)
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from tests.made.errors import fails
from tests.made.registry import RegistryMadeHere, Repository
from tests.made.service import service

DIFF_ID = "sha256:" + "1" * 64


@pytest.mark.parametrize(
    "text",
    [
        '{"layers": [1], "layers": [2]}',
        '{"layers": [1], "Layers": [2]}',
        '{"layers": [1], "layer\u017f": [2]}',  # Go folds a long s, and the Kelvin sign
        '{"\u212aey": 1, "key": 2}',
        '{"layers": [{"digest": "a", "Digest": "b"}]}',
        '{"platform": {"architecture": "amd64", "ARCHITECTURE": "arm64"}}',
        '{"annotations": {"a": "1", "a": "2"}}',
        '{"manifests": [{"platform": {"OS": "linux", "Architecture": "amd64"}}]}',
        '{"manifests": [{"Platform": {"os": "linux"}}]}',
        '{"config": {"env": ["LD_PRELOAD=/x"]}}',
    ],
)
def test_a_name_in_two_spellings_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"key|spells"):
        read_json(text.encode())


def test_the_keys_of_maps_are_a_persons_own() -> None:
    for name in ("annotations", "Labels", "ExposedPorts", "Volumes"):
        value = {name: {"Maintainer": "a", "maintainer": "b"}}
        assert read_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("image", [{"config": {}}, {"layers": []}, {"config": {}, "layers": []}])
@pytest.mark.parametrize("told", [{}, {"mediaType": INDEX_TYPE}, {"mediaType": MANIFEST_TYPE}])
def test_an_index_is_no_image(image: dict[str, object], told: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="at once"):
        media_type_of({"manifests": [], **image, **told})


def test_a_config_with_two_lists_of_layers_is_rejected() -> None:
    text = f'{{"rootfs": {{"diff_ids": ["{DIFF_ID}"]}}, "RootFS": {{"diff_ids": []}}}}'
    with pytest.raises(ValueError, match="key"):
        parse_config(text.encode(), 1)


def test_what_is_attested_of_an_image_has_no_platform() -> None:
    def entry(number: int, system: str = "linux", processor: str = "arm64") -> dict[str, object]:
        digest = "sha256:" + str(number) * 64
        platform = {"platform": {"os": system, "architecture": processor}} if system else {}
        return {"mediaType": MANIFEST_TYPE, "digest": digest, "size": 1, **platform}

    unknown = entry(2, "unknown", "unknown")
    noted = {**unknown, "annotations": {ATTESTATION: "attestation-manifest"}}
    for attested in (unknown, noted):
        assert choose_image("a", [entry(1), attested]).digest == "sha256:" + "1" * 64
        assert choose_image("a", [attested, entry(1), entry(3, "linux", "amd64")]).digest[7] == "3"
    assert choose_image("a", [unknown]).digest[7] == "2"  # some builders call every image so
    for none in ([noted], [entry(1), entry(2)], [entry(1, ""), entry(2, "")], []):
        with pytest.raises(NoPlatformError):
            choose_image("a", none)


CONFIG = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": DIFF_ID, "size": 1}


def image(**changes: object) -> dict[str, object]:
    return {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": CONFIG, "layers": [], **changes}


@pytest.mark.parametrize("header", ["application/json", "", f"{MANIFEST_TYPE}; charset=utf-8"])
def test_a_manifest_is_what_it_says_where_the_header_says_nothing(header: str) -> None:
    """Of registries that are plain files, or behind such a proxy: without the header of the digest too."""
    data = json.dumps(image()).encode()
    with service(lambda _: (200, {"Content-Type": header} if header else {}, data)) as served:
        found = read_manifest(StoreRepository(store=RegistryClient(served.address), repository="a"), "1")
    assert (found.descriptor.media_type, found.descriptor.digest) == (MANIFEST_TYPE, digest_of(data))


@pytest.mark.parametrize(
    ("data", "code", "named", "hint"),
    [
        (b"<html><title>Forbidden</title></html>", "registry-unavailable", "web page", "proxy"),
        (
            b'{"schemaVersion": 1, "fsLayers": [], "history": []}',
            "registry-request-failed",
            "schema 1",
            "docker pull",
        ),
    ],
)
def test_what_is_no_manifest_is_said_by_what_it_is(data: bytes, code: str, named: str, hint: str) -> None:
    options = RegistryOptions(retry_policy=RetryPolicy(attempts=1))
    with service(lambda _: (200, {}, data)) as served, fails(code, named) as raised:
        read_manifest(StoreRepository(store=RegistryClient(served.address, options), repository="a"), "1")
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({key: row for key, row in image().items() if key != "layers"}, "'layers'"),
        (image(layers=5), "wrong type"),
        (image(config=None), "wrong type"),
        (image(config={**CONFIG, "size": -1}), "-1 bytes"),
        (image(layers=[{**CONFIG, "digest": "sha512:" + "a" * 128}]), "sha512:"),
        (image(mediaType=INDEX_TYPE), "malformed: "),
    ],
)
def test_a_malformed_manifest_is_said_in_words(value: dict[str, object], said: str) -> None:
    data = json.dumps(value).encode()
    descriptor = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(data), size=len(data))
    with fails("manifest-invalid", said) as raised:
        parse_parts(Manifest(descriptor=descriptor, data=data))
    assert "Error" not in raised.value.message


def test_a_list_that_is_null_is_empty() -> None:
    """As Go writes and reads it."""
    for kind, value in (
        (MANIFEST_TYPE, image(layers=None)),
        (INDEX_TYPE, {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": None}),
    ):
        data = json.dumps(value).encode()
        descriptor = Descriptor(media_type=kind, digest=digest_of(data), size=len(data))
        children, blobs = parse_parts(Manifest(descriptor=descriptor, data=data))
        assert (len(children), len(blobs)) == (0, kind == MANIFEST_TYPE)


@pytest.mark.parametrize("told", [{}, {"mediaType": MANIFEST_TYPE}])
def test_a_registry_that_calls_an_image_an_index_is_not_believed(
    registry: RegistryMadeHere, told: dict[str, str]
) -> None:
    """Docker and podman go by the header: they would take something else."""
    blob = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": DIFF_ID, "size": 1}
    data = json.dumps({"schemaVersion": 2, "config": blob, "layers": [], **told}).encode()
    there = registry.shelves.repositories.setdefault("one", Repository())
    there.manifests[digest_of(data)] = (INDEX_TYPE, data)
    with fails("registry-request-failed", INDEX_TYPE.partition("+")[0]):
        read_manifest(StoreRepository(store=RegistryClient(registry.host), repository="one"), digest_of(data))
    there.manifests[digest_of(data)] = (MANIFEST_TYPE, data)
    assert (
        read_manifest(
            StoreRepository(store=RegistryClient(registry.host), repository="one"), digest_of(data)
        ).data
        == data
    )
